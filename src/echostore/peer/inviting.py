"""Invitations of a peer: what it has issued, kept on disk, and both sides of an attempt over the mesh.

A host keeps each invitation in its MetaStore with the tries that were taken and the uses that are left. A try is counted, by
device, by address and in total, before the first answer and given back when the guest has proven that it knows the passcode, so
that neither a cut connection nor a restart gives anyone one more. A use is taken off before the guest is admitted. Of a passcode
only the verifier is kept, beside the invitation; what an ended invitation held is wiped, from the file too. An open invitation is a credential as
well: any admin honours it.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from echostore.kernel.errors import EchoError, NotFound, Refused, StorageFailed, TimedOut, Unreachable, UsageError
from echostore.kernel.ids import KEY_BYTES, DeviceKey, PartyKey
from echostore.kernel.party.credentials import Invitation as InvitationClaim
from echostore.kernel.party.credentials import InvitationCancel
from echostore.mesh.invitation import (
    PASSCODE_DIGITS,
    TRIES_PER_DEVICE,
    Between,
    Dialler,
    Guest,
    Host,
    InvitationFailed,
    Reason,
    passcode_verifier,
    refusal,
    tries_left,
    with_tries,
)
from echostore.mesh.node import Link, Standing
from echostore.mesh.secure_channel import KnownKeys
from echostore.mesh.ticket import ADDRESSES_MAX, Kind, Purpose, Ticket, read_ticket
from echostore.peer.identity import JoinRequest, Welcome
from echostore.peer.members import ROLES
from echostore.peer.own_devices import check_identity_unused
from echostore.peer.welcomes import (
    DeviceWelcome,
    device_request_bytes,
    device_welcome_bytes,
    read_device_request,
    read_device_welcome,
    read_welcome,
    welcome_bytes,
)
from echostore.store.meta_store import INVITATIONS
from echostore.wire.credentials import CHAIN_LINKS_MAX
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.mesh import INVITATION_ID_BYTES, MeshFrame
from echostore.wire.mesh import Invitation as Frame
from echostore.wire.signing import SigningKey

if TYPE_CHECKING:
    from echostore.peer.network import Network
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer
    from echostore.store.meta_store import MetaStore

EXPIRES_S = 600.0
STEP_S = 20.0
"""How long a guest waits for the host's next word."""
ADDRESSES_SETTING = "peer_addresses"
SOMEBODY = ""
"""Stands in it for the device, where only the address is known."""
_log = logging.getLogger("echostore.mesh")
_VERIFIER = "verifier"
_NO_TRIES_LEFT = "no tries left"
_T = TypeVar("_T")
_KEPT_MAX = 1000

MESSAGES = {
    Reason.UNKNOWN: "the host does not know this invitation",
    Reason.WRONG_PASSCODE: "the passcode is wrong",
    Reason.NO_TRIES_LEFT: "the invitation has ended: too many wrong passcodes",
    Reason.EXPIRED: "the invitation has expired",
    Reason.CANCELLED: "the invitation was cancelled",
    Reason.USED_UP: "the invitation has been used",
    Reason.NOT_FOR_YOU: "the invitation is for someone else",
    Reason.NOT_ALLOWED: "the host may not admit members",
    Reason.MALFORMED: "the two sides did not understand each other",
    Reason.BUSY: "the host is busy with another attempt",
    Reason.TOO_MANY_TRIES: "too many wrong passcodes from this device or its address",
}


@dataclass(frozen=True, slots=True)
class Issued:
    """An invitation as its host keeps it."""

    invitation: str
    kind: str
    purpose: str
    party: str
    role: str
    ticket: str
    """Empty once it has ended: of kind `open` it holds a secret."""
    bound: str
    """Of kind `key` the identity or device it is for, of kind `open` the invitation's public key."""
    expires_ms: int
    uses_left: int
    tries: dict[str, int] = field(default_factory=dict)
    """Wrong passcodes so far, in total, by device and by address."""
    ended: str = ""
    """Why it counts no more; empty while it does."""
    events: tuple[str, ...] = ()

    @property
    def tries_left(self) -> int:
        """Wrong passcodes that it stands yet, of all guests together."""
        return tries_left(self.tries)


class Invitation:
    """An invitation of this peer. Give the ticket to the guest, and the passcode by another way: it is told here and kept
    nowhere."""

    def __init__(self, inviting: "Inviting", issued: Issued, passcode: str | None) -> None:
        self._inviting = inviting
        self.id = issued.invitation
        self.ticket = issued.ticket
        self.passcode = passcode

    @property
    def state(self) -> Issued:
        """What has become of it."""
        return self._inviting.issued(self.id)

    def cancel(self) -> None:
        self._inviting.cancel(self.id)

    def wait(self, *, timeout: float | None = None) -> Issued:
        """Wait until it has been used up or has ended; TimedOut otherwise."""
        if not self._inviting.wait(lambda: bool(self.state.ended), timeout):
            raise TimedOut("nobody has used the invitation", unchanged="It still counts.")
        return self.state


class _LinkLost(Unreachable):
    """The link ended before the host had answered."""


class Inviting:
    """The invitations of one peer. Handles the invitation frames of its mesh node."""

    def __init__(self, peer: "Peer", network: "Network") -> None:
        self._peer = peer
        self._network = network
        self._hosts: dict[tuple[Link, bytes], Host] = {}
        self._guests: dict[tuple[Link, bytes], asyncio.Queue[pb.MeshInvitation | None]] = {}
        self._changed = threading.Condition()

    # issuing

    def invite(
        self,
        party: "Party",
        *,
        role: str,
        key: bytes | None,
        uses: int,
        expires_s: float,
        open: bool,
    ) -> Invitation:
        if role not in ROLES:
            raise UsageError(f"{role!r} is not a role", next_step=f"Roles are {', '.join(ROLES)}.")
        if uses < 1 or expires_s <= 0:
            raise UsageError("an invitation has at least one use and some time to live")
        if key is not None and (open or len(key) != KEY_BYTES):
            raise UsageError("an invitation is bound to a key of 32 bytes, or open, not both")
        addresses = self._addresses()
        kind = Kind.KEY if key is not None else Kind.OPEN if open else Kind.PASSCODE
        if kind is Kind.OPEN:  # any admin honours it
            known = self._network.reach_book.of_admins(party.key)
            addresses = tuple(dict.fromkeys((*addresses, *known)))[:ADDRESSES_MAX]
        number = secrets.token_bytes(INVITATION_ID_BYTES)
        expires_ms = self._peer.now_ms() + int(expires_s * 1000)
        secret, bound = b"", key or b""
        if kind is Kind.OPEN:
            signing = SigningKey.generate()
            secret, bound = signing.seed, signing.public
            number = signing.public[:INVITATION_ID_BYTES]
            party.members.issue_claim(InvitationClaim(signing.public, ROLES[role], expires_ms, uses))
        else:
            party.members.check_may_admit(role)
        ticket = Ticket(
            number, kind, Purpose.PARTY, party.key, DeviceKey(self._peer.device), addresses, expires_ms, secret
        )
        issued = Issued(
            invitation=number.hex(),
            kind=kind,
            purpose=Purpose.PARTY,
            party=party.key.hex(),
            role=role,
            ticket=ticket.text(),
            bound=bound.hex(),
            expires_ms=expires_ms,
            uses_left=uses,
        )
        return self._issue(issued)

    def invite_device(self, *, expires_s: float) -> Invitation:
        """An invitation for one more device of this peer's own identity."""
        if expires_s <= 0:
            raise UsageError("an invitation has some time to live")
        addresses, number = self._addresses(), secrets.token_bytes(INVITATION_ID_BYTES)
        if len(self._peer.myself.chain()) >= CHAIN_LINKS_MAX:
            raise Refused(
                f"this device is the {CHAIN_LINKS_MAX}th in a row that let the next one in",
                next_step="Invite from an older device.",
            )
        expires_ms = self._peer.now_ms() + int(expires_s * 1000)
        nowhere, host = PartyKey(bytes(KEY_BYTES)), DeviceKey(self._peer.device)
        ticket = Ticket(number, Kind.PASSCODE, Purpose.DEVICE, nowhere, host, addresses, expires_ms)
        issued = Issued(
            invitation=number.hex(),
            kind=Kind.PASSCODE,
            purpose=Purpose.DEVICE,
            party="",
            role="",
            ticket=ticket.text(),
            bound="",
            expires_ms=expires_ms,
            uses_left=1,
        )
        return self._issue(issued)

    def _issue(self, issued: Issued) -> Invitation:
        passcode = _new_passcode() if issued.kind == Kind.PASSCODE else None
        verifier = passcode_verifier(bytes.fromhex(issued.invitation), passcode) if passcode else b""
        self._keep(issued, verifier=verifier)
        return Invitation(self, issued, passcode)

    def _addresses(self) -> tuple[str, ...]:
        from echostore.peer.reachable import reachable_addresses

        addresses = reachable_addresses(self._network.addresses)[:ADDRESSES_MAX]
        if not addresses:
            raise Refused(
                "this peer listens nowhere, so that no guest could come",
                next_step='Call `peer.listen("0.0.0.0:4711")` or run `echostore serve` first.',
            )
        return addresses

    def all(self) -> list[Issued]:
        """Every invitation of this peer, those that have ended too."""
        return kept_invitations(self._peer.meta)

    def issued(self, invitation: str) -> Issued:
        found = [each for each in self.all() if each.invitation.startswith(invitation)]
        if len(found) != 1:
            raise NotFound(f"no invitation {invitation!r} here" if not found else f"several start with {invitation}")
        return found[0]

    def cancel(self, invitation: str) -> None:
        """End an invitation; a guest who comes later is told so."""
        issued = self.issued(invitation)
        if not issued.ended:
            self._end(issued, "cancelled")

    def wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def _keep(self, issued: Issued, *, verifier: bytes | None = None) -> None:
        """Keep an invitation as it is now; with its verifier when it is new, which is wiped when it ends."""
        meta = self._peer.meta
        with self._peer.lock:
            kept = {name: _brought_up(each) for name, each in meta.setting(INVITATIONS, {}).items()}
            before = kept.get(issued.invitation, {})
            kept[issued.invitation] = asdict(issued) | {
                _VERIFIER: before.get(_VERIFIER, "") if verifier is None else verifier.hex()
            }
            for old in [each for each, value in kept.items() if value["ended"]][: max(0, len(kept) - _KEPT_MAX)]:
                del kept[old]
            kept, wiped = _without_secrets(kept, self._peer.now_ms())
            meta.set_setting(INVITATIONS, kept)
            if wiped:
                meta.wipe_log()
        with self._changed:
            self._changed.notify_all()

    def _end(self, issued: Issued, why: str) -> Issued:
        ended = replace(issued, ended=why, events=(*issued.events, why))
        _log.info("invitation ended", extra={"invitation": issued.invitation, "why": why})
        self._keep(ended)
        if issued.kind == Kind.OPEN and issued.purpose == Purpose.PARTY:
            party = self._peer.party(PartyKey(bytes.fromhex(issued.party)))
            party.members.issue_claim(InvitationCancel(bytes.fromhex(issued.bound)))
        return ended

    # hosting: called in the node's thread

    def receive(self, link: Link, frame: MeshFrame) -> None:
        assert isinstance(frame, Frame)
        place = (link, frame.invitation)
        if place in self._guests:
            self._guests[place].put_nowait(frame.step)
            return
        try:
            self._host(link, frame)
        except InvitationFailed as failure:
            self._hosts.pop(place, None)
            self._refuse(link, frame.invitation, failure.reason, str(failure))
        except EchoError as error:
            self._hosts.pop(place, None)
            self._refuse(link, frame.invitation, Reason.NOT_ALLOWED, error.what)

    def closed(self, link: Link) -> None:
        for place in [place for place in self._hosts if place[0] is link]:
            del self._hosts[place]
        for place in [place for place in self._guests if place[0] is link]:
            self._guests[place].put_nowait(None)

    def _host(self, link: Link, frame: Frame) -> None:
        place, step = (link, frame.invitation), frame.step
        kind = step.WhichOneof("step")
        if kind == "knock":
            issued = self._standing(frame.invitation)
            verifier = b""
            if issued.kind == Kind.PASSCODE:
                verifier = self._verifier(issued)
                self._count_try(issued, link)  # before a word is said
            between = Between(
                frame.invitation, link.device, DeviceKey(self._peer.device), link.connection.handshake_hash
            )
            host = Host(Kind(issued.kind), between, verifier=verifier, key=bytes.fromhex(issued.bound))
            self._hosts[place] = host
            link.connection.send(host.share(step.knock))
            return
        known = self._hosts.get(place)
        if known is None:
            raise InvitationFailed(Reason.MALFORMED, "a step without a knock")
        if kind == "confirm":
            known.confirm(step.confirm)
            if known.kind is Kind.PASSCODE:
                issued = self.issued(frame.invitation.hex())
                self._keep(replace(issued, tries=with_tries(issued.tries, _dialler(link), -1)))
        elif kind == "request":
            welcome = self._admit(link, frame.invitation, known.requested(step.request))
            del self._hosts[place]
            link.connection.send(known.welcome(welcome))
        elif kind == "refusal":
            del self._hosts[place]
            self._refuse(link, frame.invitation, Reason.WRONG_PASSCODE, "the guest had another passcode")
        else:
            raise InvitationFailed(Reason.MALFORMED, f"an unexpected {kind}")

    def _count_try(self, issued: Issued, link: Link) -> None:
        """Durable on return; InvitationFailed when the dialler has none left."""
        dialler = _dialler(link)
        if tries_left(issued.tries, dialler) < 1:
            raise InvitationFailed(Reason.TOO_MANY_TRIES, "no tries left for this dialler")
        self._keep(replace(issued, tries=with_tries(issued.tries, dialler, 1)))

    def _verifier(self, issued: Issued) -> bytes:
        kept = self._peer.meta.setting(INVITATIONS, {}).get(issued.invitation, {})
        return bytes.fromhex(kept.get(_VERIFIER, ""))

    def _standing(self, invitation: bytes) -> Issued:
        """The invitation, if it still counts."""
        try:
            issued = self.issued(invitation.hex())
        except NotFound:
            issued = self._honour(invitation)
        if issued.ended == "cancelled":
            raise InvitationFailed(Reason.CANCELLED, "cancelled")
        if self._peer.now_ms() > issued.expires_ms:
            if not issued.ended:
                self._end(issued, "expired")
            raise InvitationFailed(Reason.EXPIRED, "expired")
        if issued.uses_left < 1:
            raise InvitationFailed(Reason.USED_UP, "used up")
        if issued.tries_left < 1 or issued.ended == _NO_TRIES_LEFT:
            raise InvitationFailed(Reason.NO_TRIES_LEFT, "no tries left")
        return issued

    def _honour(self, invitation: bytes) -> Issued:
        """An open invitation of another admin, as the control feeds of a party tell it."""
        for key in self._network.shared_parties():
            party = self._peer.party(key)
            for known in party.runtime.processor.membership.machine.invitations:
                said = known.invitation
                if said.key[:INVITATION_ID_BYTES] == invitation:
                    if known.cancelled:
                        raise InvitationFailed(Reason.CANCELLED, "cancelled")
                    return Issued(
                        invitation=invitation.hex(),
                        kind=Kind.OPEN,
                        purpose=Purpose.PARTY,
                        party=key.hex(),
                        role=said.role.label,
                        ticket="",
                        bound=said.key.hex(),
                        expires_ms=said.expires_ms,
                        uses_left=said.uses,
                    )
        raise InvitationFailed(Reason.UNKNOWN, "no such invitation")

    def _admit(self, link: Link, invitation: bytes, request: bytes) -> bytes:
        """Let the guest in, as the invitation says; returns the welcome."""
        issued = self._standing(invitation)
        if issued.purpose == Purpose.DEVICE:
            return self._admit_device(link, issued, request)
        asked = JoinRequest.from_bytes(request)
        if asked.device != link.device:
            raise InvitationFailed(Reason.NOT_FOR_YOU, "the request is another device's")
        if issued.kind == Kind.KEY and bytes.fromhex(issued.bound) not in (asked.identity, asked.device):
            raise InvitationFailed(Reason.NOT_FOR_YOU, "bound to another key")
        issued = replace(issued, uses_left=issued.uses_left - 1)
        self._keep(issued)
        party = self._peer.party(PartyKey(bytes.fromhex(issued.party)))
        welcome = party.members.admit(asked, role=issued.role)
        party.flush()
        self._used(issued, asked.name or asked.identity.hex()[:8])
        return welcome_bytes(welcome)

    def _admit_device(self, link: Link, issued: Issued, request: bytes) -> bytes:
        """Vouch for one more device of this identity. It is admitted to the parties when it introduces itself."""
        device, name = read_device_request(request)
        if device != link.device:
            raise InvitationFailed(Reason.NOT_FOR_YOU, "the request is another device's")
        issued = replace(issued, uses_left=issued.uses_left - 1)
        self._keep(issued)
        myself = self._peer.myself
        chain = myself.vouch_for(link.device, name)
        self._network.own_devices.remember(link.device, name)
        self._used(issued, name or device.hex()[:8])
        return device_welcome_bytes(DeviceWelcome(myself.identity, myself.name, chain))

    def _used(self, issued: Issued, name: str) -> None:
        issued = replace(self.issued(issued.invitation), events=(*issued.events, f"admitted {name}"))
        _log.info("invitation admitted somebody", extra={"invitation": issued.invitation, "name_given": name})
        if issued.uses_left:
            self._keep(issued)
        else:
            self._end(issued, "used")

    def _refuse(
        self, link: Link, invitation: bytes, reason: "pb.InvitationRefusal.Reason.ValueType", detail: str
    ) -> None:
        """Tell the guest, and keep it for the host's own eyes. What comes after the end, or after a dialler's last try, is
        logged and changes nothing on disk: a stranger may say it as often as it likes."""
        tries = 0
        try:
            issued = self.issued(invitation.hex())
        except NotFound:
            pass  # nobody here to be told
        else:
            tries = tries_left(issued.tries, _dialler(link))
            told = {"invitation": issued.invitation, "why": f"{MESSAGES[reason]} ({detail})", "tries_left": tries}
            _log.warning("invitation refused somebody", extra={**told, "device": link.device.hex()})
            if not issued.ended and reason != Reason.TOO_MANY_TRIES:
                issued = replace(issued, events=(*issued.events, f"refused: {MESSAGES[reason]} ({detail})")[-20:])
                if issued.tries_left < 1:
                    self._end(issued, _NO_TRIES_LEFT)
                else:
                    self._keep(issued)
        link.connection.send(refusal(invitation, reason, tries))

    # being a guest

    def join(self, ticket: str, passcode: str | None, timeout: float, *, wait: bool = True) -> "Party":
        """Enter a party, and wait until this device may use it (`Party.wait_admitted`) unless told not to."""
        read = self._read(ticket, passcode, Purpose.PARTY)
        if any(known.key == read.party for known in self._peer.parties()):
            if self._network.standing(read.party, DeviceKey(self._peer.device)) is Standing.REMOVED:
                raise Refused(
                    "this peer was in that party and was removed",
                    next_step="Forget what is left of it here (`echostore party forget`), then join again.",
                )
            raise Refused("this peer is in that party already")
        verifier = _verifier_of(read, passcode)

        async def attempt() -> tuple[Link, Welcome]:
            def request() -> bytes:
                return self._peer.request_join(read.party).to_bytes()

            link, welcome = await self._attempt(read, verifier, request)
            return link, read_welcome(welcome, read.party)

        link, welcome = self._network.call(_explained(attempt()), timeout + STEP_S)
        party = self._peer.enter(welcome)
        if read.kind is Kind.OPEN:  # it names other admins too, and does not say which address is whose
            here = link.connection.address
            self.remember(link.device, [here])
            self.remember(None, [address for address in read.addresses if address != here])
        else:
            self.remember(link.device, read.addresses)
        if wait:
            party.wait_admitted(timeout)
        return party

    def join_device(self, ticket: str, passcode: str | None, timeout: float, *, wait: bool = True) -> "list[Party]":
        """Become one more device of the host's identity, and enter its parties."""
        peer, read = self._peer, self._read(ticket, passcode, Purpose.DEVICE)
        check_identity_unused(peer)
        myself, verifier = peer.myself, _verifier_of(read, passcode)

        async def attempt() -> tuple[Link, DeviceWelcome]:
            def request() -> bytes:
                return device_request_bytes(myself.device, myself.name)

            link, welcome = await self._attempt(read, verifier, request)
            return link, read_device_welcome(welcome, myself.device)

        link, welcome = self._network.call(_explained(attempt()), timeout + STEP_S)
        with peer.lock:
            check_identity_unused(peer)
            myself.become(welcome.identity, chain=welcome.chain)
            if welcome.name:
                myself.take_name(welcome.name)
        devices = self._network.own_devices
        devices.remember(read.host, "")
        self.remember(read.host, read.addresses)
        try:
            parties = self._network.call(devices.ask(link, prove=False), timeout + STEP_S)
        except EchoError as error:
            raise Unreachable(
                f"the host has not told of its parties: {error.what}",
                unchanged="This device acts for the identity.",
                next_step="Its parties follow as soon as one of its devices can be reached.",
            ) from None
        entered = devices.enter(parties.entries, again=True)
        return devices.settled(entered, timeout if wait else None)

    def _read(self, ticket: str, passcode: str | None, purpose: Purpose) -> Ticket:
        """A ticket that may be tried."""
        read = read_ticket(ticket)
        if read.purpose is not purpose:
            device = read.purpose is Purpose.DEVICE
            raise UsageError(
                f"this ticket is for {'one more device of an identity' if device else 'a party'}",
                next_step=f"Use `{'device' if device else 'party'} join`, or `peer.{'join_device' if device else 'join'}`.",
            )
        if read.kind is Kind.PASSCODE and not passcode:
            raise UsageError("this ticket needs its passcode")
        if self._peer.now_ms() > read.expires_ms:
            raise Refused("the invitation has expired", next_step="Ask for a new one.")
        return read

    async def _attempt(self, ticket: Ticket, verifier: bytes, request: Callable[[], bytes]) -> tuple[Link, bytes]:
        """Go through the steps with the host; returns its welcome. A link that ends before the host answers, because both
        sides had dialled at once or a shared party had just ended, is made once more."""
        try:
            return await self._attempt_once(ticket, verifier, request)
        except _LinkLost:
            return await self._attempt_once(ticket, verifier, request)

    async def _attempt_once(self, ticket: Ticket, verifier: bytes, request: Callable[[], bytes]) -> tuple[Link, bytes]:
        link = await self._reach(ticket)
        between = Between(ticket.invitation, DeviceKey(self._peer.device), link.device, link.connection.handshake_hash)
        place = (link, ticket.invitation)
        inbox: asyncio.Queue[pb.MeshInvitation | None] = asyncio.Queue()
        self._guests[place] = inbox
        try:
            guest = Guest(ticket, between, verifier)
            link.connection.send(guest.knock())
            share = await self._next(inbox, "share")
            try:
                frames = guest.answer(share.share, request())
            except InvitationFailed as failure:
                link.connection.send(refusal(ticket.invitation, failure.reason))
                await self._next(inbox, "refusal")
                raise Refused(MESSAGES[failure.reason]) from None
            for frame in frames:
                link.connection.send(frame)
            answer = await self._next(inbox, "welcome")
            return link, guest.welcomed(answer.welcome)
        finally:
            del self._guests[place]

    async def _reach(self, ticket: Ticket) -> Link:
        # Any admin honours an open one, and knows the party.
        expected = None if ticket.kind is Kind.OPEN else ticket.host
        known = KnownKeys((ticket.party, ticket.host))
        link, _ = await self._network.reach(ticket.addresses, expected, known=known, whom="the host")
        return link

    async def _next(self, inbox: "asyncio.Queue[pb.MeshInvitation | None]", wanted: str) -> pb.MeshInvitation:
        """The host's next step; a refusal is raised with its reason."""
        try:
            async with asyncio.timeout(STEP_S):
                step = await inbox.get()
        except TimeoutError:
            raise TimedOut("the host did not answer") from None
        if step is None:
            lost = _LinkLost if wanted == "share" else Unreachable
            raise lost("the connection to the host was lost", next_step="Try again with the same ticket.")
        kind = step.WhichOneof("step")
        if kind == "refusal":
            reason, tries = step.refusal.reason, step.refusal.tries_left
            text = MESSAGES.get(reason, "the host refused")
            if reason == Reason.WRONG_PASSCODE:
                text += f"; {tries} {'try' if tries == 1 else 'tries'} left"
            again = tries and reason in (Reason.WRONG_PASSCODE, Reason.MALFORMED, Reason.BUSY)
            raise Refused(text, next_step="Try again." if again else "Ask the host for a new invitation.")
        if kind != wanted:
            raise InvitationFailed(Reason.MALFORMED, f"{kind} instead of {wanted}")
        return step

    def remember(self, device: DeviceKey | None, addresses: Sequence[str]) -> None:
        """Find a device again after a restart; None for some member, whoever that is."""
        with self._peer.lock:
            known = dict(self._peer.meta.setting(ADDRESSES_SETTING, {}))
            if device is not None:
                known[device.hex()] = list(addresses)
            elif addresses:
                known[SOMEBODY] = list(dict.fromkeys((*addresses, *known.get(SOMEBODY, ()))))[:ADDRESSES_MAX]
            self._peer.meta.set_setting(ADDRESSES_SETTING, known)
        for address in addresses:
            self._network.keep_connecting(address, device=device)


async def _explained(attempt: Coroutine[Any, Any, _T]) -> _T:
    """The attempt, with its failure in words for the guest."""
    try:
        return await attempt
    except InvitationFailed as failure:
        raise Refused(MESSAGES[failure.reason]) from None


def _dialler(link: Link) -> Dialler:
    return Dialler.at(link.device, link.connection.address)


def _new_passcode() -> str:
    return "".join(secrets.choice("0123456789") for _ in range(PASSCODE_DIGITS))


def _verifier_of(ticket: Ticket, passcode: str | None) -> bytes:
    """Made by who asks, in its own thread: it takes a while."""
    return passcode_verifier(ticket.invitation, passcode.strip()) if ticket.kind is Kind.PASSCODE and passcode else b""


def kept_invitations(meta: "MetaStore") -> list[Issued]:
    """The invitations of a home."""
    return [_read(each) for each in meta.setting(INVITATIONS, {}).values()]


def wipe_passcodes(meta: "MetaStore", now_ms: int) -> None:
    """At open: replace passcodes that an earlier version kept by verifiers, and wipe what ended invitations hold."""
    found: dict[str, dict[str, Any]] = meta.setting(INVITATIONS, {})
    try:
        if any(_VERIFIER not in each for each in found.values()):
            # An earlier version left what it deleted in the file. That goes first: a crash from here on begins again.
            meta.wipe_free_pages()
        kept, wiped = _without_secrets({name: _brought_up(each) for name, each in found.items()}, now_ms)
        if kept != found:
            meta.set_setting(INVITATIONS, kept)
        if wiped or kept != found:
            meta.wipe_log()
    except StorageFailed as failed:
        _log.warning("passcodes of an earlier version are still in meta.db, until the next start: %s", failed.what)


def _without_secrets(kept: dict[str, dict[str, Any]], now_ms: int) -> tuple[dict[str, dict[str, Any]], bool]:
    """The invitations, without what lets anyone in of those that count no more; and whether there was any."""
    over = [name for name, each in kept.items() if each["ended"] or now_ms > each["expires_ms"]]
    wiped = [name for name in over if kept[name][_VERIFIER] or kept[name]["ticket"]]
    return {**kept, **{name: kept[name] | {_VERIFIER: "", "ticket": ""} for name in wiped}}, bool(wiped)


def _brought_up(kept: dict[str, Any]) -> dict[str, Any]:
    """An invitation as this version keeps it. One that an earlier version made counted tries in total, three at most."""
    if _VERIFIER in kept:
        return kept
    known = {name: value for name, value in kept.items() if name not in ("passcode", "tries_left")}
    passcode = "" if kept["ended"] else kept["passcode"]
    verifier = passcode_verifier(bytes.fromhex(kept["invitation"]), passcode).hex() if passcode else ""
    lost = TRIES_PER_DEVICE - kept["tries_left"]
    return {**known, _VERIFIER: verifier, "tries": {"total": lost} if lost > 0 else {}}


def _read(kept: dict[str, Any]) -> Issued:
    names = Issued.__slots__
    return Issued(**{name: value for name, value in kept.items() if name in names} | {"events": tuple(kept["events"])})
