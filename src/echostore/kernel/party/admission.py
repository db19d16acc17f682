"""The admission: which blocks of which feeds count, and as whose. All that the data side knows of membership.

Of each admitted feed it has intervals of blocks, each with the role in which its writer acts there:

    blocks of a feed     0        40              90        120
                         ├─ editor ┼──── reader ───┼─ editor ┤ cut
    said by              admit     role change     role      member removed, device revoked,
                                   (bound 40)      change    feed retired, fork: the least of them

Of data feeds the bounds come from the credentials' own content, of control feeds from their causal past. The role at
a block is that of the winner (causal successor, then senior issuer, then lower hash) among the admissions and role
changes that reach it; concurrent role changes all start at the least of their bounds. With groups it is the greatest
over direct membership and groups. What a final epoch contained before a credential, that credential's bound does not
reach (`pins`).

A feed whose admission was voided (its issuer was removed at the same time) is not admitted, but still followed: what
others wrote before they heard of that names its blocks.

An `Admission` is a value: two peers with equal digests read the same blocks. `build` makes it from the ledger.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, feed_id
from echostore.kernel.party.credentials import (
    DeviceRevoke,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    MemberRemove,
    Role,
    RoleChange,
)
from echostore.kernel.party.ledger import (
    EVERYTHING,
    AdmittedAs,
    Event,
    Ledger,
    granted_role,
    group_of,
    same_era,
)
from echostore.kernel.party.pins import NO_PINS, Pins
from echostore.kernel.reasons import Reason

_TAG: Final = b"echostore/admission/1"
_OPEN: Final = (1 << 64) - 1
_REASON_ORDER: Final = (Reason.FORK, Reason.BEYOND_CUT, Reason.RETIRED)


class Interval(NamedTuple):
    """Blocks from `start` up to `end` (exclusive; None: no end yet), written in `role`."""

    start: int
    end: int | None
    role: Role


@dataclass(frozen=True, slots=True)
class FeedAdmission:
    """What counts of one feed. `end_reason` says why it ends, when it does."""

    feed: FeedKey
    kind: FeedKind
    identity: IdentityKey
    device: DeviceKey
    child: PartyKey | None
    intervals: tuple[Interval, ...]
    end_reason: Reason | None = None
    fork: int | None = None
    """The earliest block at which the feed was proven to fork."""

    def role_at(self, seq: int) -> Role | None:
        for start, end, role in self.intervals:
            if start <= seq and (end is None or seq < end):
                return role
        return None

    @property
    def branches_from(self) -> int | None:
        """From which block on a forked feed has several branches, none of which counts; None when it has not forked.

        What a final epoch contains of one branch counts, also behind the fork.
        """
        at = self.fork
        for start, end, _ in self.intervals:
            if at is not None and start <= at and (end is None or at < end):
                at = end
        return at


@dataclass(frozen=True, slots=True)
class Admission:
    """The admitted feeds of a party, or of one of its child parties (`child`), ascending by key."""

    party: PartyKey
    child: PartyKey | None
    feeds: tuple[FeedAdmission, ...]
    digest: bytes
    by_id: Mapping[FeedId, FeedAdmission] = field(compare=False, repr=False)
    void: Mapping[FeedId, FeedAdmission] = field(compare=False, repr=False, default_factory=dict)
    """Feeds that are not admitted, though somebody who had heard less may have thought so and built on their blocks. Of
    these nothing counts, and they are in no digest; but they are passed on and followed, or who lacks such a block would
    wait for ever where others do not."""

    @staticmethod
    def of(
        party: PartyKey, child: PartyKey | None, feeds: Iterable[FeedAdmission], void: Iterable[FeedAdmission] = ()
    ) -> "Admission":
        ordered = tuple(sorted(feeds, key=lambda admitted: admitted.feed))
        digest = hashlib.sha256(_encode(party, child, ordered)).digest()
        by_id = {feed_id(admitted.feed): admitted for admitted in ordered}
        lapsed = sorted(void, key=lambda each: (each.feed, each.kind, each.identity, each.device))
        return Admission(party, child, ordered, digest, by_id, {feed_id(each.feed): each for each in lapsed})

    @property
    def followed(self) -> Iterable[FeedAdmission]:
        """The feeds whose blocks are passed on and put in order: the admitted and the void ones."""
        return (*self.feeds, *self.void.values())

    def follows(self, feed: FeedId) -> FeedAdmission | None:
        return self.by_id.get(feed) or self.void.get(feed)

    def role_at(self, feed: FeedId, seq: int) -> Role | None:
        """The role in which the block was written; None when it does not count at all."""
        admitted = self.by_id.get(feed)
        return admitted.role_at(seq) if admitted is not None else None

    def why_excluded(self, feed: FeedId, seq: int) -> Reason | None:
        """None when the block's operations count (for a control feed: when the block does)."""
        admitted = self.by_id.get(feed)
        if admitted is None:
            return Reason.UNADMITTED
        role = admitted.role_at(seq)
        if role is None:
            return admitted.end_reason or Reason.BEYOND_CUT
        return Reason.READER if role is Role.READER and admitted.kind is FeedKind.DATA else None


def reach(end: int, counted: Collection[tuple[int, int | None]]) -> int | None:
    """How much of a data feed belongs to a moment whose timeframe ends the feed at `end`; None for all that there is.

    A timeframe names the last block that counts, of those in the intervals `counted`. Blocks behind it that do not count
    may still be causes of what does, in other feeds, and change nothing: so it reaches up to the next one that counts.
    """
    if any(start <= end and (stop is None or end < stop) for start, stop in counted):
        return end
    return min((start for start, _ in counted if start > end), default=None)


Forks = Mapping[FeedKey, Iterable[tuple[int, Event | None]]]
"""Where feeds were proven to fork, with the credential that says so; None where two messages themselves do."""


def build(
    ledger: Ledger, forks: Forks, child: PartyKey | None, pins: Pins = NO_PINS, claimed: Iterable[FeedAdmit] = ()
) -> Admission:
    """The admission that the valid credentials give. Without a child: control feeds and the party's own data feeds.

    `claimed` are admissions that could have been valid and are not: their feeds are void.
    """
    feeds = []
    for entries in ledger.feeds.values():
        entry = _representative(ledger, entries)
        if entry.admit.child == child:
            feeds.append(_admit(ledger, forks, entry, pins))
    void = [
        FeedAdmission(
            admit.feed, admit.kind, admit.identity, admit.device, child, (), Reason.UNADMITTED, _fork(forks, admit)
        )
        for admit in claimed
        if admit.child == child
    ]
    return Admission.of(ledger.party, child, feeds, void)


def _representative(ledger: Ledger, entries: list[AdmittedAs]) -> AdmittedAs:
    """Of concurrent equal admissions of a feed, the first one whose era lasts, else the first one."""
    ordered = sorted(entries, key=lambda entry: (entry.event.stamp, entry.event.hash))
    lasting = (entry for entry in ordered if ledger.role(entry.admit.identity, EVERYTHING, entry.event) is not None)
    return next(lasting, ordered[0])


def _admit(ledger: Ledger, forks: Forks, entry: AdmittedAs, pins: Pins) -> FeedAdmission:
    admit = entry.admit
    end, reason = _end(ledger, forks, entry, pins)
    own = _Timeline(ledger, entry, admit.identity, pins)
    timelines = [own]
    removals = ledger.removals.get(admit.identity, ())
    groups = {
        group_of(event)
        for event in ledger.listed.get(admit.identity, ())
        if same_era(event, entry.event, removals)
        and same_era(event, entry.event, ledger.removals.get(group_of(event), ()))
    }
    timelines += [_Timeline(ledger, entry, group, pins) for group in groups]
    starts = sorted({0} | {start for timeline in timelines for start in timeline.starts()})
    intervals: list[Interval] = []
    for index, start in enumerate(starts):
        if end is not None and start >= end:
            break
        role = max((found for timeline in timelines if (found := timeline.role_at(start))), default=None)
        stop = starts[index + 1] if index + 1 < len(starts) else None
        if end is not None and (stop is None or stop > end):
            stop = end
        if role is None:
            continue
        if intervals and intervals[-1].role is role and intervals[-1].end == start:
            intervals[-1] = Interval(intervals[-1].start, stop, role)
        else:
            intervals.append(Interval(start, stop, role))
    fork, kept = _fork(forks, admit), tuple(intervals)
    return FeedAdmission(admit.feed, admit.kind, admit.identity, admit.device, admit.child, kept, reason, fork)


def _fork(forks: Forks, admit: FeedAdmit) -> int | None:
    return min((seq for seq, _ in forks.get(admit.feed, ())), default=None)


def _end(ledger: Ledger, forks: Forks, entry: AdmittedAs, pins: Pins) -> tuple[int | None, Reason | None]:
    """Where the feed ends, and why: the least of all that end it."""
    admit = entry.admit
    forked, cut, retired = (_REASON_ORDER.index(each) for each in (Reason.FORK, Reason.BEYOND_CUT, Reason.RETIRED))
    ends = [(max(seq, _pinned(evidence, admit, pins)), forked) for seq, evidence in forks.get(admit.feed, ())]
    for removal in ledger.removals.get(admit.identity, ()):
        if not entry.event.sees(removal):
            ends.append((bound(removal, admit, pins), cut))
    for revoke in ledger.device_revokes.get((admit.identity, admit.device), ()):
        ends.append((bound(revoke, admit, pins), cut))
    for retire in ledger.retires.get(admit.feed, ()):
        ends.append((bound(retire, admit, pins), retired))
    if not ends:
        return None, None
    end, reason = min(ends)
    return end, _REASON_ORDER[reason]


class _Timeline:
    """The roles that one subject (the feed's identity, or a group of it) gives along a feed."""

    def __init__(self, ledger: Ledger, entry: AdmittedAs, subject: IdentityKey, pins: Pins) -> None:
        removals = ledger.removals.get(subject, ())
        self._ledger = ledger
        admit = entry.admit
        self._admits = [event for event in ledger.admits.get(subject, ()) if same_era(event, entry.event, removals)]
        changes = [event for event in ledger.changes.get(subject, ()) if same_era(event, entry.event, removals)]
        self._changes = [(_least_bound(change, changes, admit, pins), change) for change in changes]
        later = [removal for removal in removals if not entry.event.sees(removal)]
        self._end = min((bound(removal, admit, pins) for removal in later), default=None)

    def starts(self) -> set[int]:
        return {start for start, _ in self._changes} | ({self._end} if self._end is not None else set())

    def role_at(self, seq: int) -> Role | None:
        if not self._admits or (self._end is not None and seq >= self._end):
            return None
        reaching = [change for start, change in self._changes if start <= seq]
        return granted_role(self._ledger.winner(self._admits + reaching))


def _least_bound(change: Event, changes: list[Event], admit: FeedAdmit, pins: Pins) -> int:
    concurrent = [other for other in changes if not change.sees(other) and not other.sees(change)]
    return min(bound(event, admit, pins) for event in concurrent)  # `change` itself is among them


def bound(event: Event, admit: FeedAdmit, pins: Pins = NO_PINS) -> int:
    """How many blocks of the feed lie before what `event` says of it, or were contained in an epoch before it."""
    said = _said_bound(event, admit)
    return max(said, _pinned(event, admit, pins)) if pins else said


def _pinned(event: Event | None, admit: FeedAdmit, pins: Pins) -> int:
    """How much of the feed final epochs contained before they contained `event`."""
    before = pins.count if event is None else pins.first(event)
    feed = feed_id(admit.feed)
    return pins.control_length(feed, before) if admit.kind is FeedKind.CONTROL else pins.data_length(feed, before)


def _said_bound(event: Event, admit: FeedAdmit) -> int:
    assert event.claim is not None
    feed = feed_id(admit.feed)
    if admit.kind is FeedKind.CONTROL:
        return event.reach(feed)
    said = event.claim.assertion
    if isinstance(said, FeedRetire):
        return said.length_end
    assert isinstance(said, RoleChange | MemberRemove | DeviceRevoke), f"{event} has no bounds"
    bounds = said.bounds if isinstance(said, RoleChange) else said.cut
    return min((entry.length_end for entry in bounds if entry.feed == feed), default=0)


def _encode(party: PartyKey, child: PartyKey | None, feeds: tuple[FeedAdmission, ...]) -> bytes:
    """The bytes under the digest: fixed widths, so that no two admissions share an encoding."""
    parts = [_TAG, party, child or bytes(len(party)), len(feeds).to_bytes(8, "big")]
    for admitted in feeds:
        kind = b"\x01" if admitted.kind is FeedKind.CONTROL else b"\x02"
        parts += [admitted.feed, kind, admitted.identity, admitted.device, len(admitted.intervals).to_bytes(4, "big")]
        for start, end, role in admitted.intervals:
            parts.append(start.to_bytes(8, "big") + (_OPEN if end is None else end).to_bytes(8, "big") + bytes([role]))
    return b"".join(parts)
