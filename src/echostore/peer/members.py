"""Members of a party: admitting, changing roles, removing, and why someone counts."""

from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import NOTHING_CHANGED, NotFound, Refused, UsageError
from echostore.kernel.ids import KEY_BYTES, DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, feed_id
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.party.authority import Refusal
from echostore.kernel.party.credentials import (
    AdoptLocal,
    Assertion,
    Claim,
    ControlMessage,
    DeviceAdmit,
    DeviceRevoke,
    EpochGenesis,
    FeedAdmit,
    FeedBound,
    FeedKind,
    FeedRetire,
    GroupAdmit,
    MemberAdmit,
    MemberRemove,
    Policy,
    Profile,
    Role,
    RoleChange,
    VerifiedCredential,
)
from echostore.kernel.party.machine import Rejection
from echostore.kernel.reasons import Reason
from echostore.peer.control_standing import fold_whole
from echostore.peer.identity import JoinRequest, Welcome, check_title, read_chain
from echostore.store.feed_store import FeedStore
from echostore.store.meta_store import PartyState
from echostore.wire.credentials import device_vouched, verify_credentials, with_adoption_proof
from echostore.wire.generated import credential_pb2
from echostore.wire.signing import SigningKey

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

ROLES = {role.label: role for role in Role}


class Members:
    """What a party's control feeds say, and what this device may add to it."""

    def __init__(self, party: "Party") -> None:
        self._party = party

    # reading

    def __iter__(self) -> Any:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[Any]:
        """Every identity that is or was a member, with role, status and devices."""
        with self._party.reading() as runtime:
            return list(runtime.processor.membership.machine.members)

    def groups(self) -> list[Any]:
        with self._party.reading() as runtime:
            return list(runtime.processor.membership.machine.groups)

    def rejected(self) -> list[Rejection]:
        """Credentials that do not count, with the reasons."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            return list(runtime.processor.membership.machine.listed)

    def why(self, key: bytes | str) -> list[Any]:
        """The chain of credentials about a member, device or feed, with a verdict for each."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)  # also what can never count is told here
            raw = self.find_key(key) if isinstance(key, str) else key
            steps = runtime.processor.membership.machine.why(raw)
            if not steps:
                raise NotFound(f"no credential speaks of {raw.hex()[:8]}")
            return list(steps)

    def find_key(self, text: str) -> bytes:
        """A member, group, device or feed by a unique prefix of its key in hex; a member or group by `@name`."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            machine = runtime.processor.membership.machine
            if text.startswith("@"):
                found = {bytes(member.identity) for member in machine.members if member.name == text[1:]}
                found |= {bytes(group.group) for group in machine.groups if group.name == text[1:]}
            else:
                # Also of whom no credential counts: that is when one asks why.
                found = {key for key in machine.named() if text and key.hex().startswith(text.lower())}
        if not found:
            raise NotFound(
                f"no member, device or feed {text!r} in the party",
                next_step="Give the first digits of a key, or @name; `echostore party members` lists them.",
            )
        if len(found) > 1:
            raise UsageError(f"{len(found)} keys start with {text}", next_step="Give more of it.")
        return found.pop()

    # changing

    def admit(self, request: JoinRequest, *, role: str = "editor") -> Welcome:
        """Admit a device that asked to join, with its identity and its feeds."""
        party = self._party
        if request.party != party.key:
            raise UsageError("the request is for another party")
        with party.writing() as runtime:
            chain = read_chain(request.chain)
            assertions: list[Assertion] = []
            machine = runtime.processor.membership.machine
            if not any(member.identity == request.identity and member.role for member in machine.members):
                assertions.append(MemberAdmit(request.identity, self._role(role), request.name))
            if not any(known.device == request.device and not known.revoked for known in machine.devices):
                assertions.append(DeviceAdmit(request.identity, request.device, request.name))
            for feed, kind, consent in (
                (request.control_feed, FeedKind.CONTROL, request.control_consent),
                (request.data_feed, FeedKind.DATA, request.data_consent),
            ):
                assertions.append(FeedAdmit(feed, kind, request.identity, request.device, None, consent))
            if not device_vouched(chain, request.identity, request.device):
                raise Refused("the identity does not vouch for the device that asks to join")
            self._issue([self._sign(assertion) for assertion in assertions])
            genesis = machine.genesis
            assert genesis is not None
            return Welcome(party.key, genesis.control_feed, party.title)

    def change_role(self, member: bytes, role: str) -> None:
        """Give a member another role. What they wrote up to here, as seen on this peer, counts under the old one."""
        self._issue([self._sign(RoleChange(IdentityKey(member), self._role(role), self._bounds(member)))])

    def remove(self, member: bytes) -> None:
        """Remove a member. What they wrote and this peer has not seen leaves the state everywhere (kept, listed)."""
        self._issue([self._sign(MemberRemove(IdentityKey(member), self._bounds(member)))])

    def revoke_device(self, identity: bytes, device: bytes) -> None:
        cut = self._bounds(identity, device)
        self._issue([self._sign(DeviceRevoke(IdentityKey(identity), DeviceKey(device), cut))])

    def retire_feed(self, feed: bytes) -> None:
        """Let a feed of this party, or of a light-weight one below it, end where it stands on this peer."""
        with self._party.reading() as runtime:
            machine, name = runtime.processor.membership.machine, feed_id(FeedKey(feed))
            child = next((key for key, _ in machine.children if name in machine.admission(key).by_id), None)
            below = self._seen(child).get(name, (0, b"")) if child is not None else None
            length = runtime.feeds.length(FeedKey(feed)) if below is None else below[0]
        self._issue([self._sign(FeedRetire(FeedKey(feed), length))])

    def new_group(self, name: str, role: str, members: list[bytes]) -> bytes:
        """Admit several identities as one, under a new key, which is returned: it can be removed and given another role."""
        check_title(name)
        named = sorted(set(members))
        if not named or any(len(member) != KEY_BYTES for member in named):
            raise UsageError("a group has at least one member, each named by its identity key of 32 bytes")
        key = SigningKey.generate().public  # nobody acts as the group, so its secret is of no use
        self.admit_group(key, name, role, named)
        return key

    def admit_group(self, group: bytes, name: str, role: str, members: list[bytes]) -> None:
        """Admit several identities as one."""
        admit = GroupAdmit(IdentityKey(group), name, self._role(role), tuple(sorted(IdentityKey(m) for m in members)))
        self._issue([self._sign(admit)])

    def set_profile(self, display_name: str) -> None:
        self._issue([self._sign(Profile(display_name))])

    def set_policy(self, entries: dict[str, bytes]) -> None:
        """Change settings of the party; nothing is written of those that stand already."""
        with self._party.writing() as runtime:
            if runtime.control is None:
                raise self._no_control(runtime)
            now = runtime.processor.membership.machine.policy
            said = Policy(tuple(sorted((key, value) for key, value in entries.items() if now.get(key) != value)))
            self.check_may_say(said)
            if said.entries:
                self._issue([self._sign(said)])

    def adopt(self) -> None:
        """Give a local party this peer's identity."""
        party = self._party
        myself = party.peer.myself
        adoption = AdoptLocal(myself.identity, myself.device, myself.name)
        proven = with_adoption_proof(adoption, party.key, myself.identity_key)
        self._issue([self._sign(proven)])

    def issue_claim(self, assertion: Assertion) -> None:
        """Sign and write one claim of this device's identity."""
        self._issue([self._sign(assertion)])

    def check_may_say(self, assertion: Assertion) -> None:
        """Refused when a claim of this device would not count; nothing is signed or written for the question."""
        party = self._party
        with party.reading() as runtime:
            if runtime.control is None:
                raise self._no_control(runtime)
            self._check_role()
            claim = Claim(party.key, party.peer.opener.identity_in(party), party.peer.myself.device, assertion)
            self._foresee((VerifiedCredential(claim, b""),))

    def check_may_admit(self, role: str) -> None:
        """Refused when this device's identity may not admit a member in that role."""
        wanted = self._role(role)
        party = self._party
        with party.reading() as runtime:
            identity = party.peer.opener.identity_in(party)
            mine = [m.role for m in runtime.processor.membership.machine.members if m.identity == identity]
        if not mine or mine[0] is None or mine[0] < Role.ADMIN or wanted > mine[0]:
            raise Refused(
                f"only owners and admins invite, and nobody above themselves; here this device is "
                f"{mine[0].label if mine and mine[0] else 'no member'}",
                next_step="Ask an admin to invite.",
            )

    # inside

    def _issue(self, credentials: list[credential_pb2.Credential]) -> None:
        """Write credentials and raise when the machine does not accept them: nobody else would either."""
        with self._party.writing() as runtime:
            root = runtime if runtime.control is not None else None
            if root is None:
                raise self._no_control(runtime)
            machine = runtime.processor.membership.machine
            seq = root.control.cursor.length if root.control else 0
            self._check_role()
            self._foresee(verify_credentials(credentials, self._party.key))
            runtime.issue(credentials)
            self._party.peer.epoch_keeper.control_written(self._party)
            feed = root.control.feed if root.control else b""
            for rejection in machine.rejected:
                if rejection.feed == feed and rejection.seq == seq:
                    raise Refused(
                        f"the credential does not count: {rejection.reason}: {rejection.detail}".removesuffix(": "),
                        unchanged="It was written, and changes nothing.",
                        next_step="`echostore party rejected` lists it.",
                    )

    def _foresee(self, credentials: tuple[VerifiedCredential, ...]) -> None:
        """Refuse before anything is written: a signed block stays for good, and goes to all others."""
        runtime = self._party.runtime
        processor, own = runtime.processor, runtime.control
        assert own is not None
        clock = {
            feed: cursor.length - 1
            for feed, cursor in processor.orderer.cursors.items()
            if cursor.kind == CONTROL and cursor.length
        }
        message = ControlMessage(own.feed, own.cursor.key, own.cursor.length, own.next_depth, clock, credentials)
        refusal = processor.membership.machine.foresee(message)
        if refusal is not None:
            claim = credentials[0].claim
            raise _refused(refusal, claim.assertion if claim is not None else None)

    def _no_control(self, runtime: "PartyRuntime") -> Refused:
        if runtime.processor.parent is None:
            return Refused("this device has no control feed in the party")
        return Refused(
            "a light-weight party has the members and the policy of the party above it",
            next_step=f"Do it in party {runtime.processor.parent.party.hex()[:8]}; it holds here too.",
        )

    def _check_role(self) -> None:
        runtime = self._party.runtime
        assert runtime.control is not None
        admitted = runtime.processor.admission.by_id.get(runtime.control.feed)
        if admitted is None:
            raise Refused("this device is not a member of the party")

    def _sign(self, assertion: Assertion) -> credential_pb2.Credential:
        party = self._party
        opener = party.peer.opener
        return opener.sign(party.key, assertion, identity=opener.identity_in(party))

    def _role(self, role: str) -> Role:
        if role not in ROLES:
            raise UsageError(f"{role!r} is not a role", next_step=f"Roles are {', '.join(ROLES)}.")
        return ROLES[role]

    def unseen_children(self, member: bytes) -> list[str]:
        """Titles of the light-weight parties in which a member has a feed and that are not on this peer.

        What they wrote there can't be named by who removes them, or changes their role, from here: it leaves the state.
        """
        with self._party.reading() as runtime:
            machine = runtime.processor.membership.machine
            here = {known.key for known in self._party.peer.parties()}
            subjects = self._subjects(member)
            return [
                title
                for child, title in machine.children
                if child not in here and any(each.identity in subjects for each in machine.admission(child).feeds)
            ]

    def _subjects(self, member: bytes) -> set[bytes]:
        """A member, or all members of a group."""
        groups = self._party.runtime.processor.membership.machine.groups
        return {member, *(identity for group in groups if group.group == member for identity in group.members)}

    def _bounds(self, member: bytes, device: bytes | None = None) -> tuple[FeedBound, ...]:
        """How much of a member's feeds this peer has, in the party and in its light-weight parties.

        A feed that is not named does not count at all, beyond what an epoch with a quorum contains.
        """
        with self._party.reading() as runtime:
            machine = runtime.processor.membership.machine
            subjects = self._subjects(member)
            found = []
            for child in (None, *(key for key, _ in machine.children)):
                feeds = [
                    feed
                    for feed, admitted in machine.admission(child).by_id.items()
                    if admitted.identity in subjects and device in (None, admitted.device)
                ]
                seen = self._seen(child) if feeds else {}  # one that does not concern them may be closed, or damaged
                found += [FeedBound(feed, *seen[feed]) for feed in feeds if feed in seen]
            return tuple(sorted(found, key=lambda bound: bound.feed))

    def _seen(self, child: PartyKey | None) -> dict[FeedId, tuple[int, bytes]]:
        """Length and last link of the data feeds of this party, or of a light-weight one below it, as far as it is here."""
        peer = self._party.peer
        known = None if child is None else next((each for each in peer.parties() if each.key == child), None)
        if child is not None and known is None:
            return {}
        if known is not None and known.state is PartyState.CLOSED:
            with FeedStore(peer.home.party(known.key).feeds, known.key, writable=False) as feeds:
                return {
                    feed_id(held.key): (held.length, held.last_link if held.length else b"") for held in feeds.feeds()
                }
        party = self._party if known is None else peer.held(known.key)
        cursors = party.runtime.processor.orderer.cursors
        return {
            feed: (cursor.length, cursor.link if cursor.length else b"")
            for feed, cursor in cursors.items()
            if cursor.kind == DATA
        }


_ACTS: dict[type, str] = {
    EpochGenesis: "declaring an epoch",
    Policy: "changing the policy",
    MemberAdmit: "admitting a member",
    GroupAdmit: "admitting a group",
    RoleChange: "changing a role",
    MemberRemove: "removing a member",
    DeviceRevoke: "revoking a device",
    FeedRetire: "retiring a feed",
}
_GONE = {
    Reason.ISSUER_REMOVED: "this identity was removed from the party",
    Reason.DEVICE_REVOKED: "this device was revoked",
}


def _refused(refusal: Refusal, assertion: Assertion | None) -> Refused:
    """What would not count, in the words of who asked for it."""
    gone = _GONE.get(refusal.reason)
    if gone is not None:
        return Refused(gone, next_step="Ask an admin to let it in again.")
    act = _ACTS.get(type(assertion), "this")
    step = "`echostore party why KEY` shows what a key may do and why."
    if isinstance(assertion, EpochGenesis):
        step = "`echostore party policy` shows who declares epochs: ask one of them."
    elif isinstance(assertion, Policy):
        step = "Ask an owner or an admin."
    what = f"{act} is refused: {refusal.reason}: {refusal.detail}".removesuffix(": ")
    return Refused(what, unchanged=NOTHING_CHANGED, next_step=step)
