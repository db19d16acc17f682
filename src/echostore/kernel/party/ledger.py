"""The ledger: the credentials that count, indexed so that a question about any past is answered from a few of them.

    Event    one credential at its place (depth, feed, seq, position), with the clock of its message
    View     what something sees: an event sees its causal past, EVERYTHING sees all
    Ledger   valid events by subject; roles, devices and feeds as seen from a view

A subject (identity or group) may be admitted, removed and admitted again. The removals of it that an event sees are
the event's *era*. An admission, a role change or a feed belongs to its era for ever:

    admit ── feed A ── remove ── admit again ── feed B        A is of the era {}, B of {remove}: A stays cut, B counts
      └────────────── admit (concurrent with the removal)     era {}: does not bring the member back

so "is a member" means: has an admission whose era is all the removals in view, and a removal beats what is concurrent
with it. Validity is not decided here; see `authority` and `verdicts`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, Stamp, feed_id
from echostore.kernel.party.credentials import (
    AdoptLocal,
    CapabilityRevoke,
    ChildParty,
    Claim,
    ControlMessage,
    DeviceAdmit,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    GroupAdmit,
    Invitation,
    InvitationCancel,
    MemberAdmit,
    MemberRemove,
    ModelPublish,
    PartyGenesis,
    Policy,
    Profile,
    Role,
    RoleChange,
    VerifiedCredential,
)
from echostore.kernel.reasons import Reason


class Event:
    """One credential at its place. Compared by identity; `stamp` gives the canonical order."""

    __slots__ = ("claim", "clock", "fault", "feed", "feed_key", "hash", "position", "seq", "stamp")

    def __init__(self, message: ControlMessage, position: int, credential: VerifiedCredential) -> None:
        self.stamp = Stamp(message.depth, message.feed, message.seq, position)
        self.feed: FeedId = message.feed
        self.feed_key: FeedKey = message.feed_key
        self.seq = message.seq
        self.position = position
        self.clock: Mapping[FeedId, int] = message.clock
        self.claim: Claim | None = credential.claim
        self.hash = credential.hash
        self.fault: Reason | None = credential.fault

    @property
    def credential(self) -> VerifiedCredential:
        return VerifiedCredential(self.claim, self.hash, self.fault)

    def sees(self, other: "Event") -> bool:
        """Whether `other` happened before this event."""
        if other.feed_key == self.feed_key:
            return other.seq < self.seq or (other.seq == self.seq and other.position < self.position)
        return other.seq <= self.clock.get(other.feed, -1)

    def follows(self, stamp: Stamp) -> bool:
        """Whether the credential at a stamp happened before this event."""
        if stamp.feed == self.feed:
            return (stamp.seq, stamp.position) < (self.seq, self.position)
        return stamp.seq <= self.clock.get(stamp.feed, -1)

    def reach(self, feed: FeedId) -> int:
        """How many messages of `feed` this event sees, its own one included."""
        return self.seq + 1 if feed == self.feed else self.clock.get(feed, -1) + 1

    def __repr__(self) -> str:
        what = type(self.claim.assertion).__name__ if self.claim else "?"
        return f"Event({what} at {self.feed.hex()[:8]}:{self.seq}.{self.position})"


class View(Protocol):
    """Something that sees a causally closed set of events."""

    def sees(self, other: Event) -> bool: ...


class Everything:
    """The view of who has received all: the present state."""

    def sees(self, other: Event) -> bool:
        return True


class Including:
    """The past of an event and the event itself: the state it leaves behind."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def sees(self, other: Event) -> bool:
        return other is self._event or self._event.sees(other)


EVERYTHING = Everything()


class AdmittedAs(NamedTuple):
    """A feed and the event that admitted it. The genesis admits two feeds without a FeedAdmit of their own."""

    event: Event
    admit: FeedAdmit


DevicePair = tuple[IdentityKey, DeviceKey]

_NONE: tuple[Event, ...] = ()
_MEMBERSHIP = (
    PartyGenesis,
    MemberAdmit,
    DeviceAdmit,
    FeedAdmit,
    RoleChange,
    MemberRemove,
    DeviceRevoke,
    FeedRetire,
    GroupAdmit,
    AdoptLocal,
)


class Ledger:
    """The valid events of one party. Only `record` changes it."""

    def __init__(self, party: PartyKey) -> None:
        self.party = party
        self.genesis: Event | None = None
        self.creator: IdentityKey | None = None
        self.admits: defaultdict[IdentityKey, list[Event]] = defaultdict(list)  # by subject
        self.listed: defaultdict[IdentityKey, list[Event]] = defaultdict(list)  # GroupAdmits that name an identity
        self.changes: defaultdict[IdentityKey, list[Event]] = defaultdict(list)  # by subject
        self.removals: defaultdict[IdentityKey, list[Event]] = defaultdict(list)  # by subject
        self.device_admits: defaultdict[DevicePair, list[Event]] = defaultdict(list)
        self.device_revokes: defaultdict[DevicePair, list[Event]] = defaultdict(list)
        self.feeds: defaultdict[FeedId, list[AdmittedAs]] = defaultdict(list)
        self.feeds_of: defaultdict[DevicePair, int] = defaultdict(int)
        self.retires: defaultdict[FeedKey, list[Event]] = defaultdict(list)
        self.children: defaultdict[PartyKey, list[Event]] = defaultdict(list)
        self.invitations: defaultdict[bytes, list[Event]] = defaultdict(list)
        self.cancels: defaultdict[bytes, list[Event]] = defaultdict(list)
        self.profiles: dict[IdentityKey, Event] = {}  # the last one in canonical order
        self.policies: defaultdict[str, list[Event]] = defaultdict(list)
        self.models: defaultdict[tuple[str, int], list[Event]] = defaultdict(list)
        self.revocations: list[Event] = []  # of capabilities
        self.epochs: list[Event] = []
        self.attests: list[Event] = []
        self.disputes: list[Event] = []
        self.seniority: dict[IdentityKey, Stamp] = {}  # the earliest admission of each identity
        self.version = 0  # grows with every event that can change an admission

    # --- what is recorded -------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Takes in an event that was found valid."""
        claim = event.claim
        assert claim is not None, f"{event} has no claim and can't be valid"
        said = claim.assertion
        if isinstance(said, _MEMBERSHIP):
            self.version += 1
        match said:
            case EpochAttest():
                self.attests.append(event)
            case PartyGenesis():
                self._record_genesis(event, said)
            case MemberAdmit():
                self.admits[said.member].append(event)
                self._rank(said.member, event)
            case GroupAdmit():
                self.admits[said.group].append(event)
                for member in said.members:
                    self.listed[member].append(event)
                    self._rank(member, event)
            case AdoptLocal():
                self.admits[said.identity].append(event)
                self.device_admits[said.identity, said.device].append(event)
                self._rank(said.identity, event)
            case DeviceAdmit():
                self.device_admits[said.identity, said.device].append(event)
            case FeedAdmit():
                self._record_feed(event, said)
            case RoleChange():
                self.changes[said.member].append(event)
            case MemberRemove():
                self.removals[said.member].append(event)
            case DeviceRevoke():
                self.device_revokes[said.identity, said.device].append(event)
            case FeedRetire():
                self.retires[said.feed].append(event)
            case Profile():
                known = self.profiles.get(claim.issuer)
                if known is None or known.stamp < event.stamp:
                    self.profiles[claim.issuer] = event
            case ChildParty():
                self.children[said.child].append(event)
            case Invitation():
                self.invitations[said.key].append(event)
            case InvitationCancel():
                self.cancels[said.key].append(event)
            case Policy():
                for key, _ in said.entries:
                    self.policies[key].append(event)
            case ModelPublish():
                self.models[said.name, said.version].append(event)
            case CapabilityRevoke():
                self.revocations.append(event)
            case EpochGenesis():
                self.epochs.append(event)
            case EpochDispute():
                self.disputes.append(event)
            case _:  # fork evidence proves itself and is not kept here
                pass

    def _record_genesis(self, event: Event, said: PartyGenesis) -> None:
        self.genesis, self.creator = event, said.identity
        self.admits[said.identity].append(event)
        self.device_admits[said.identity, said.device].append(event)
        self._rank(said.identity, event)
        control = FeedAdmit(said.control_feed, FeedKind.CONTROL, said.identity, said.device)
        data = FeedAdmit(said.data_feed, FeedKind.DATA, said.identity, said.device)
        self._record_feed(event, control)
        self._record_feed(event, data)

    def _record_feed(self, event: Event, admit: FeedAdmit) -> None:
        self.feeds[feed_id(admit.feed)].append(AdmittedAs(event, admit))
        self.feeds_of[admit.identity, admit.device] += 1

    def _rank(self, identity: IdentityKey, event: Event) -> None:
        known = self.seniority.get(identity)
        if known is None or event.stamp < known:
            self.seniority[identity] = event.stamp

    # --- roles ------------------------------------------------------------------------------------------------

    def subject_role(self, subject: IdentityKey, view: View, since: Event | None = None) -> Role | None:
        """The role that an identity has directly, or a group; with `since`, only within that event's era."""
        admits = self.admits.get(subject)
        if not admits:
            return None
        removals, changes = self.removals.get(subject), self.changes.get(subject, _NONE)
        if len(admits) == 1 and not removals and not changes:  # nearly always
            return granted_role(admits[0]) if view.sees(admits[0]) else None
        era = seen(removals or _NONE, view)
        if since is not None and not sees_all(since, era):
            return None
        contenders = [event for event in admits if view.sees(event) and sees_all(event, era)]
        if not contenders:
            return None
        contenders += [event for event in changes if view.sees(event) and sees_all(event, era)]
        return granted_role(self.winner(contenders))

    def role(self, identity: IdentityKey, view: View, since: Event | None = None) -> Role | None:
        """The effective role: the greatest of the direct one and those of the groups that name the identity.

        With `since` (the admission of a feed): the role with which that feed's writer acts.
        """
        best = self.subject_role(identity, view, since)
        groups = self.listed.get(identity)
        if not groups:
            return best
        era = seen(self.removals.get(identity, _NONE), view)
        if since is not None and not sees_all(since, era):
            return None
        for event in groups:
            if not view.sees(event) or not sees_all(event, era):
                continue
            group = group_of(event)
            if sees_all(event, seen(self.removals.get(group, _NONE), view)):
                found = self.subject_role(group, view, since)
                if found is not None and (best is None or found > best):
                    best = found
        return best

    def winner(self, contenders: list[Event]) -> Event:
        """Of conflicting events: a causal successor, then the senior issuer's, then the lower hash."""
        if len(contenders) == 1:
            return contenders[0]
        last = [event for event in contenders if not any(other.sees(event) for other in contenders)]
        return min(last, key=lambda event: (self.rank_of_issuer(event), event.hash))

    def rank_of_issuer(self, event: Event) -> Stamp:
        """Lower is more senior. Who was never admitted (only under a pinned removal) comes last: its own stamp."""
        assert event.claim is not None
        return self.seniority.get(event.claim.issuer, event.stamp)

    # --- devices and feeds ------------------------------------------------------------------------------------

    def device_state(self, identity: IdentityKey, device: DeviceKey, view: View) -> Reason | None:
        """None when the device may act for the identity, else why not."""
        pair = (identity, device)
        if not any(view.sees(event) for event in self.device_admits.get(pair, _NONE)):
            return Reason.DEVICE_UNKNOWN
        if any(view.sees(event) for event in self.device_revokes.get(pair, _NONE)):
            return Reason.DEVICE_REVOKED
        return None

    def admissions_of(self, key: FeedKey, view: View) -> Iterator[AdmittedAs]:
        for entry in self.feeds.get(feed_id(key), ()):
            if entry.admit.feed == key and view.sees(entry.event):
                yield entry

    def policy(self, key: str, view: View) -> bytes | None:
        setting = [event for event in self.policies.get(key, _NONE) if view.sees(event)]
        if not setting:
            return None
        claim = self.winner(setting).claim
        assert claim is not None
        assert isinstance(claim.assertion, Policy)
        return dict(claim.assertion.entries)[key]


def seen(events: Iterable[Event], view: View) -> list[Event]:
    return [event for event in events if view.sees(event)]


def sees_all(event: Event, others: list[Event]) -> bool:
    """Whether `event` came after every one of `others`. For removals in view: whether its era is all of them."""
    return all(event.sees(other) for other in others)


def same_era(left: Event, right: Event, removals: Iterable[Event]) -> bool:
    return all(left.sees(removal) == right.sees(removal) for removal in removals)


def group_of(event: Event) -> IdentityKey:
    assert event.claim is not None
    assert isinstance(event.claim.assertion, GroupAdmit)
    return event.claim.assertion.group


def granted_role(event: Event) -> Role:
    """The role that an admission or a role change gives."""
    assert event.claim is not None
    said = event.claim.assertion
    if isinstance(said, MemberAdmit | RoleChange | GroupAdmit):
        return said.role
    assert isinstance(said, PartyGenesis | AdoptLocal), f"{event} gives no role"
    return Role.OWNER
