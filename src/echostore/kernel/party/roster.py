"""The roster: members, devices, groups and the other things a party's credentials speak of, as people ask for them.

Every function reads the ledger from the view of who has received everything. Lists are ascending by key, so that they
are equal on every peer with equal credentials.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, PartyKey, Stamp
from echostore.kernel.party.credentials import (
    AdoptLocal,
    CapabilityRevoke,
    ChildParty,
    DeviceAdmit,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedKind,
    GroupAdmit,
    Invitation,
    MemberAdmit,
    ModelPublish,
    PartyGenesis,
    Profile,
    Role,
)
from echostore.kernel.party.ledger import EVERYTHING, Event, Ledger, View, group_of, seen, sees_all


class Status(StrEnum):
    ACTIVE = "active"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Device:
    identity: IdentityKey
    device: DeviceKey
    name: str
    revoked: bool


@dataclass(frozen=True, slots=True)
class Member:
    """`role` is the effective one (None once removed), `direct` the one without groups."""

    identity: IdentityKey
    role: Role | None
    direct: Role | None
    groups: tuple[IdentityKey, ...]
    name: str
    devices: tuple[Device, ...]
    status: Status
    creator: bool
    seniority: Stamp


@dataclass(frozen=True, slots=True)
class Group:
    """`role` is None once the group is removed; then it has no members."""

    group: IdentityKey
    name: str
    role: Role | None
    members: tuple[IdentityKey, ...]


@dataclass(frozen=True, slots=True)
class OpenInvitation:
    invitation: Invitation
    issuer: IdentityKey
    cancelled: bool


@dataclass(frozen=True, slots=True)
class RevokedCapability:
    """A capability that is worth nothing any more: of one issuer, or (None) of any."""

    id: bytes
    issuer: DeviceKey | None
    expires_ms: int
    """When it ends by itself; 0: not known."""
    revoked_ms: int
    """By the clock of who revoked it."""


@dataclass(frozen=True, slots=True)
class EpochAct:
    """An epoch credential with who wrote it where: the input of the agreement on epochs."""

    act: EpochGenesis | EpochAttest | EpochDispute
    hash: bytes
    identity: IdentityKey
    device: DeviceKey
    stamp: Stamp
    electorate: frozenset[IdentityKey] | None = None
    """Of a genesis: the unretired identities that were members in its past. None: whoever asks knows them."""
    voided: bool = False
    """Of a genesis: whether its declarer was removed at the same time or later."""
    ended: frozenset[FeedKey] = frozenset()
    """Of a genesis: data feeds of which blocks were cut in its past."""


def members(ledger: Ledger) -> tuple[Member, ...]:
    found: dict[IdentityKey, list[Device]] = {identity: [] for identity in ledger.seniority}
    for device in devices(ledger):
        if device.identity in found:
            found[device.identity].append(device)
    admitted = groups(ledger)
    return tuple(_member(ledger, identity, tuple(found[identity]), admitted) for identity in sorted(found))


def _member(ledger: Ledger, identity: IdentityKey, owned: tuple[Device, ...], admitted: tuple[Group, ...]) -> Member:
    role = ledger.role(identity, EVERYTHING)
    return Member(
        identity=identity,
        role=role,
        direct=ledger.subject_role(identity, EVERYTHING),
        groups=tuple(group.group for group in admitted if identity in group.members),
        # Who came in by a group alone is called as its first device is.
        name=_name(ledger, identity) or next((each.name for each in owned if each.name), ""),
        devices=owned,
        status=Status.REMOVED if role is None else Status.ACTIVE,
        creator=identity == ledger.creator,
        seniority=ledger.seniority[identity],
    )


def _name(ledger: Ledger, identity: IdentityKey) -> str:
    profile = ledger.profiles.get(identity)
    said = profile.claim.assertion if profile is not None and profile.claim is not None else None
    if isinstance(said, Profile) and said.display_name:
        return said.display_name
    for admission in reversed(in_order(ledger.admits.get(identity, ()))):
        assert admission.claim is not None
        if isinstance(admission.claim.assertion, MemberAdmit | AdoptLocal) and admission.claim.assertion.name:
            return admission.claim.assertion.name
    return ""


def devices(ledger: Ledger) -> tuple[Device, ...]:
    found = []
    for (identity, device), admits in ledger.device_admits.items():
        names = []
        for admit in in_order(admits):
            assert admit.claim is not None
            said = admit.claim.assertion
            names.append(said.name if isinstance(said, DeviceAdmit | AdoptLocal) else "")
        revoked = bool(ledger.device_revokes.get((identity, device)))
        found.append(Device(identity, device, next((name for name in names if name), ""), revoked))
    return tuple(sorted(found, key=lambda each: (each.identity, each.device)))


def groups(ledger: Ledger) -> tuple[Group, ...]:
    found = []
    for subject, admits in ledger.admits.items():
        if not any(_group(event) for event in admits):
            continue
        removed = seen(ledger.removals.get(subject, ()), EVERYTHING)
        present = [said for event in in_order(admits) if sees_all(event, removed) and (said := _group(event))]
        named = {member for said in present for member in said.members}
        name = present[0].name if present else ""
        inside = tuple(sorted(member for member in named if _inside(ledger, member, subject)))
        found.append(Group(subject, name, ledger.subject_role(subject, EVERYTHING), inside))
    return tuple(sorted(found, key=lambda each: each.group))


def _group(event: Event) -> GroupAdmit | None:
    assert event.claim is not None
    return event.claim.assertion if isinstance(event.claim.assertion, GroupAdmit) else None


def _inside(ledger: Ledger, member: IdentityKey, group: IdentityKey) -> bool:
    """Whether the group still brings the member in: neither was removed since."""
    removals = [*ledger.removals.get(member, ()), *ledger.removals.get(group, ())]
    naming = (event for event in ledger.listed.get(member, ()) if (said := _group(event)) and said.group == group)
    return any(sees_all(event, removals) for event in naming)


def invitations(ledger: Ledger) -> tuple[OpenInvitation, ...]:
    found = []
    for key in sorted(ledger.invitations):
        first = in_order(ledger.invitations[key])[0]
        assert first.claim is not None
        assert isinstance(first.claim.assertion, Invitation)
        found.append(OpenInvitation(first.claim.assertion, first.claim.issuer, bool(ledger.cancels.get(key))))
    return tuple(found)


def children(ledger: Ledger) -> tuple[tuple[PartyKey, str], ...]:
    found = []
    for child in sorted(ledger.children):
        first = in_order(ledger.children[child])[0]
        assert first.claim is not None
        assert isinstance(first.claim.assertion, ChildParty)
        found.append((child, first.claim.assertion.title))
    return tuple(found)


def policy(ledger: Ledger) -> dict[str, bytes]:
    return {key: value for key in sorted(ledger.policies) if (value := ledger.policy(key, EVERYTHING)) is not None}


def revoked_capabilities(ledger: Ledger) -> tuple[RevokedCapability, ...]:
    """Each once, as the first who revoked it said."""
    found: dict[tuple[bytes, bytes], RevokedCapability] = {}
    for event in in_order(ledger.revocations):
        assert event.claim is not None
        said = event.claim.assertion
        assert isinstance(said, CapabilityRevoke)
        revoked = RevokedCapability(said.id, said.issuer, said.expires_ms, event.claim.issued_ms)
        found.setdefault((said.id, said.issuer or b""), revoked)
    return tuple(found[key] for key in sorted(found))


def models(ledger: Ledger) -> tuple[ModelPublish, ...]:
    found = []
    for key in sorted(ledger.models):
        claim = ledger.winner(ledger.models[key]).claim
        assert claim is not None
        assert isinstance(claim.assertion, ModelPublish)
        found.append(claim.assertion)
    return tuple(found)


def epoch_acts(events: Iterable[Event]) -> tuple[EpochAct, ...]:
    return tuple(epoch_act(event) for event in in_order(events))


def epoch_act(
    event: Event,
    electorate: frozenset[IdentityKey] | None = None,
    *,
    ended: frozenset[FeedKey] = frozenset(),
    voided: bool = False,
) -> EpochAct:
    claim = event.claim
    assert claim is not None
    assert isinstance(claim.assertion, EpochGenesis | EpochAttest | EpochDispute)
    return EpochAct(claim.assertion, event.hash, claim.issuer, claim.device, event.stamp, electorate, voided, ended)


def ended_feeds(
    ledger: Ledger, forks: Mapping[FeedKey, Iterable[tuple[int, Event | None]]], view: View
) -> frozenset[FeedKey]:
    """Data feeds of which a removal, a change of role, a retirement or a fork in view may have cut blocks."""
    found = {feed for feed, proofs in forks.items() if any(proof is None or view.sees(proof) for _, proof in proofs)}
    cutting = [*ledger.removals.values(), *ledger.device_revokes.values(), *ledger.retires.values()]
    cutting += ledger.changes.values()
    if not found and not any(view.sees(event) for events in cutting for event in events):
        return frozenset()  # nearly always
    for entries in ledger.feeds.values():
        for _, admit in entries:
            groups = [group_of(event) for event in ledger.listed.get(admit.identity, ())]
            events = [
                *ledger.device_revokes.get((admit.identity, admit.device), ()),
                *ledger.retires.get(admit.feed, ()),
                *(event for subject in (admit.identity, *groups) for event in ledger.removals.get(subject, ())),
                *(event for subject in (admit.identity, *groups) for event in ledger.changes.get(subject, ())),
            ]
            if any(view.sees(event) for event in events):
                found.add(admit.feed)
    return frozenset(found)


def admitted_ms(ledger: Ledger, feed: FeedKey) -> int:
    claims = [event.claim for event, _ in ledger.admissions_of(feed, EVERYTHING)]
    return max((claim.issued_ms for claim in claims if claim is not None), default=0)


def electorate(ledger: Ledger, view: View, child: PartyKey | None = None) -> frozenset[IdentityKey]:
    """The unretired identities in view: who may vote there, and whose data feeds were not all retired.

    Of a child party: those of them who take part in it, with a feed of its own that was not retired. Who never entered
    it holds none of its blocks, and could not say anything of its epochs.
    """
    found = voters(ledger, view)
    if child is not None:
        return found & _with_feed(ledger, view, FeedKind.DATA, child)
    retired = _with_feed(ledger, view, FeedKind.DATA, None, retired=True) if ledger.retires else frozenset()
    return found - retired | found & _with_feed(ledger, view, FeedKind.DATA, None) if retired else found


def voters(ledger: Ledger, view: View) -> frozenset[IdentityKey]:
    """Members with a control feed that was not retired, of a device not revoked: whose vote may still come.

    Also those whose data feeds were retired while they were silent: they come back, and may say what they had computed.
    """
    return _with_feed(ledger, view, FeedKind.CONTROL, None)


def _with_feed(
    ledger: Ledger, view: View, kind: FeedKind, child: PartyKey | None, *, retired: bool = False
) -> frozenset[IdentityKey]:
    """Members with a feed, of a device not revoked, that was not retired (or that was)."""
    found: set[IdentityKey] = set()
    for entries in ledger.feeds.values():
        for event, admit in entries:
            if admit.kind is not kind or admit.child != child or admit.identity in found or not view.sees(event):
                continue
            if any(view.sees(retire) for retire in ledger.retires.get(admit.feed, ())) != retired:
                continue
            if ledger.device_state(admit.identity, admit.device, view) is None and ledger.role(
                admit.identity, view, event
            ):
                found.add(admit.identity)
    return frozenset(found)


def genesis(ledger: Ledger) -> PartyGenesis | None:
    if ledger.genesis is None or ledger.genesis.claim is None:
        return None
    said = ledger.genesis.claim.assertion
    return said if isinstance(said, PartyGenesis) else None


def in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.stamp, event.hash))
