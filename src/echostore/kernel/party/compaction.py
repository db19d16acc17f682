"""Compaction: from a PartyMachine to the control state at a cut. See `control_state` for what that is.

    1  a machine of its own goes through what lies below the cut: nothing above it has a say
    2  the chain begins at the newest epoch that a quorum attested there; votes on older ones go
    3  what can never count goes (`hope`, in canonical order: the same on every peer)
    4  clocks are cut down to what is kept; those of removals stay exact, because their bounds are read from them
    5  of the pins those stay that a kept credential asks for: the one just before it was contained itself

Costs as much as what the machine holds: with a state to go on from, that is the state and the tail.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from echostore.kernel.ids import FeedId, FeedKey, PartyKey, feed_id
from echostore.kernel.party.control_state import (
    EXACT,
    LOWERING,
    ChainStart,
    ControlFeed,
    ControlState,
    Step,
)
from echostore.kernel.party.credentials import (
    ControlMessage,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    ForkEvidence,
    PartyGenesis,
)
from echostore.kernel.party.hope import Hope
from echostore.kernel.party.ledger import Event
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.party.pins import PinnedEpoch
from echostore.kernel.party.verdicts import is_genesis


def compact(machine: PartyMachine, lengths: Mapping[FeedKey, int]) -> ControlState:
    """The control state below a causally closed cut, at or above the one that the machine went on from."""
    return _compacted(_machine_below(machine, machine.start, lengths), lengths)


def compact_from(machine: PartyMachine, start: ControlState, lengths: Mapping[FeedKey, int]) -> ControlState | None:
    """The same from a later state, with what the machine holds above it: costs what came since.

    None when some of that speaks of what the later state left out, or overtook what it pinned: then only the machine's own
    start will do.
    """
    if any(lengths.get(key, 0) < length for key, length in start.lengths.items()):
        return None
    below = _machine_below(machine, start, lengths)
    return None if below.late or _overtaken(below, start) else _compacted(below, lengths)


def _overtaken(below: PartyMachine, start: ControlState) -> bool:
    """Whether an epoch that was declared below a state came to its quorum above it.

    It had not heard of all that the state has, so it may not have heard of the quorums behind what the state pinned, and
    then those pin nothing any more. Their votes are gone: whoever has all messages can tell.
    """
    inside = {credential.hash for message in start.messages for credential in message.credentials}
    return any(
        epoch.number > chain.number and epoch.hash in inside
        for chain in start.chains
        for epoch in below.epoch_tally(chain.child).pinned()
    )


def _compacted(below: PartyMachine, lengths: Mapping[FeedKey, int]) -> ControlState:
    starts = _chain_starts(below)
    events = _kept(below, starts)
    ends = {feed_id(key): length - 1 for key, length in lengths.items() if length}
    places: defaultdict[FeedId, set[int]] = defaultdict(set)
    for event in events:
        places[event.feed].add(event.seq)
    for feed, last in ends.items():
        places[feed].add(last)
    kept = {feed: sorted(seqs) for feed, seqs in places.items()}
    return ControlState(
        below.party,
        tuple(_feed(below, key, length, kept) for key, length in sorted(lengths.items()) if length),
        tuple(_messages(events, kept)),
        tuple(
            ChainStart(child, number, epoch, rivals, _pins(below, child, events))
            for child, (number, epoch, rivals) in sorted(starts.items(), key=lambda entry: entry[0] or b"")
        ),
    )


def is_closed(machine: PartyMachine, lengths: Mapping[FeedKey, int]) -> bool:
    """Whether a cut contains all that the messages below it have seen."""
    ends = {feed_id(key): length for key, length in lengths.items()}
    begun = machine.start.lengths if machine.start is not None else {}
    return all(
        last < ends.get(feed, 0)
        for key, length in lengths.items()
        if length > begun.get(key, 0)
        for feed, last in machine.clock(key, length - 1).items()
    )


def _machine_below(machine: PartyMachine, start: ControlState | None, lengths: Mapping[FeedKey, int]) -> PartyMachine:
    begun = start.lengths if start is not None else {}
    for key, length in begun.items():
        assert lengths.get(key, 0) >= length, "the cut goes back behind what this machine went on from"
    below = PartyMachine(machine.party, start)
    told = [
        each for each in machine.messages if begun.get(each.feed_key, 0) <= each.seq < lengths.get(each.feed_key, 0)
    ]
    for message in sorted(told, key=lambda each: (each.depth, each.feed, each.seq)):
        below.receive(message)
    return below


def _chain_starts(machine: PartyMachine) -> dict[PartyKey | None, tuple[int, bytes, tuple[bytes, ...]]]:
    """Per party and child party the newest epoch with a quorum, with its rivals."""
    found = {}
    for child in (None, *(child for child, _ in machine.children)):
        tally = machine.epoch_tally(child)
        newest = next((epoch for epoch in reversed(tally.chain) if epoch.quorate), None)
        if newest is not None:
            found[child] = (newest.number, newest.hash, tally.contenders(newest.number))
    return found


# what is kept


def _kept(machine: PartyMachine, starts: Mapping[PartyKey | None, tuple[int, bytes, tuple[bytes, ...]]]) -> list[Event]:
    """The credentials that count or could, in canonical order."""
    hope, found = Hope(), list[Event]()
    living: set[bytes] = set()
    for event in sorted(machine.events, key=lambda each: (each.stamp, each.feed_key, each.hash)):
        claim = event.claim
        if event.fault is not None or claim is None or claim.party != machine.party:
            continue
        said = claim.assertion
        if isinstance(said, ForkEvidence):
            if said.proof.party == machine.party:
                found.append(event)
            continue
        if isinstance(said, PartyGenesis) and not is_genesis(event, said, machine.party):
            continue
        if isinstance(said, EpochGenesis):
            # Also one that is in nobody's chain: who voted for it has no other vote at its number.
            begun = starts.get(said.child)
            if (begun is not None and said.number < begun[0]) or hope.role(claim.issuer) is None:
                continue
            living.add(event.hash)
        elif isinstance(said, EpochAttest | EpochDispute):
            if said.genesis not in living or hope.role(claim.issuer) is None:
                continue
        elif hope.none_for(event):
            continue
        hope.note(event)
        found.append(event)
    return found


# clocks


def _floor(kept: Mapping[FeedId, list[int]], feed: FeedId, last: int) -> int:
    """The last kept message of a feed at or before a place; -1 when there is none."""
    seqs = kept.get(feed, [])
    at = bisect_right(seqs, last)
    return seqs[at - 1] if at else -1


def _messages(events: Iterable[Event], kept: Mapping[FeedId, list[int]]) -> Iterable[ControlMessage]:
    """Kept credentials as messages, with the positions that they had."""
    grouped: dict[tuple[FeedKey, int], list[Event]] = {}
    for event in events:
        grouped.setdefault((event.feed_key, event.seq), []).append(event)
    for same in grouped.values():
        first = same[0]
        exact = any(event.claim is not None and isinstance(event.claim.assertion, EXACT) for event in same)
        clock = {
            feed: last if exact else _floor(kept, feed, last)
            for feed, last in sorted(first.clock.items())
            if feed != first.feed
        }
        yield ControlMessage(
            first.feed,
            first.feed_key,
            first.seq,
            first.stamp.depth,
            {feed: last for feed, last in clock.items() if last >= 0},
            tuple(event.credential for event in same),
            tuple(event.position for event in same),
        )


def _feed(machine: PartyMachine, key: FeedKey, length: int, kept: Mapping[FeedId, list[int]]) -> ControlFeed:
    own, known, steps = feed_id(key), dict[FeedId, int](), list[Step]()

    def saw(seq: int, feed: FeedId, last: int) -> None:
        floor = _floor(kept, feed, last)
        if feed != own and floor > known.get(feed, -1):
            known[feed] = floor
            steps.append(Step(seq, feed, floor))

    begun = 0
    earlier = next((each for each in machine.start.feeds if each.key == key), None) if machine.start else None
    if earlier is not None:
        begun = earlier.length
        for step in earlier.steps:
            saw(*step)
    for seq in range(begun, length):
        for feed, last in sorted(machine.clock(key, seq).items()):
            saw(seq, feed, last)
    return ControlFeed(key, length, tuple(steps))


# pins


def _pins(machine: PartyMachine, child: PartyKey | None, events: Iterable[Event]) -> tuple[PinnedEpoch, ...]:
    pins = machine.pins(child)
    wanted = {pins.count - 1}
    for event in events:
        if event.claim is not None and isinstance(event.claim.assertion, (*LOWERING, ForkEvidence)):
            wanted.add(pins.first(event) - 1)
    return tuple(pins.epoch(at) for at in sorted(wanted) if at >= 0)
