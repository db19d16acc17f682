"""Leaving things out at an epoch: from a processor that stands at the cut, by the rules of `kernel.items.discarding`.

    items written since the base ──────────────┐
    items of the base whose waits are over ────┴──► looked at ──► what went, what they wait for now
    what hangs below those that go ── placements of the base, moves

Without the waits of the base all its items are read once, and those looked at that could lose something at all.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.items.discarding import FirstBelow, LeftOut, Waits, discard, may_lose, stable_frontier
from echostore.kernel.models.base import Horizon
from echostore.kernel.timeframe import Dependency
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.generated import snapshot_pb2 as pb

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor


@dataclass(frozen=True, slots=True)
class Settled:
    """What a discard leaves to know: what all items of the state wait for now, how many it looked at, and what went."""

    waits: Waits
    looked: int
    left_out: LeftOut


def discard_at(
    processor: "PartyProcessor",
    before_ms: int,
    asserted: Mapping[FeedId, Mapping[FeedId, Dependency]],
    waits: Waits | None = None,
) -> Settled:
    """Leave out what may go. `asserted` is, per data feed, what its last message inside the epoch had processed.

    `waits` are those of the base; None when nobody here knows them.
    """
    processed = {feed: {other: known.seq for other, known in seen.items()} for feed, seen in asserted.items()}
    lengths = {feed: at.seq + 1 for feed, at in processor.timeframe.entries.items()}
    horizon = Horizon(before_ms, stable_frontier(processed, lengths, processor.admission))
    state = processor.state
    if processor.base is not None:
        state.take_in(map(processor.base.record_of, _concerned(processor.base, horizon, waits)))
    looked = sorted(state.records)
    done = discard(state, horizon, looked, _first_below(processor))
    left = {item: kept for item, kept in (waits or {}).items() if item not in state.gone}
    for item in looked:
        left.pop(item, None)
    return Settled({**left, **done.waits}, len(looked), done.left_out)


def _concerned(base: BaseEpoch, horizon: Horizon, waits: Waits | None) -> Iterable[pb.ItemState]:
    """Items of the base that may lose something now, as it has them."""
    if waits is not None:
        over = [item for item, kept in waits.items() if any(map(horizon.ends, kept))]
        return base.reader.some(over).values()
    states = (state for _, state in base.reader.items())
    return (state for state in states if may_lose(state.model, state.version, has_metadata=bool(state.metadata)))


def _first_below(processor: "PartyProcessor") -> FirstBelow:
    made = defaultdict(list)
    for record in processor.state.records.values():
        if record.genesis.parent is not None:
            made[record.genesis.parent].append(record.item)
    in_base = _base_below(processor.base) if processor.base is not None else None

    def below(parents: AbstractSet[ItemId]) -> Iterable[ItemId]:
        found = {item for parent in parents for item in made.get(parent, ())}
        if processor.base is not None and in_base is not None:
            found.update(in_base(parents))
            unread = found.difference(processor.state.records)
            processor.state.take_in(map(processor.base.record_of, processor.base.reader.some(unread).values()))
        return found

    return below


def _base_below(base: BaseEpoch) -> Callable[[AbstractSet[ItemId]], Iterable[ItemId]]:
    """What the placements of the base say; where it has none here, its items."""
    every: dict[ItemId, list[ItemId]] | None = None

    def below(parents: AbstractSet[ItemId]) -> Iterable[ItemId]:
        nonlocal every
        if every is None and base.placements is not None:
            try:
                return [item for items in base.placements.at_each(parents).values() for item in items]
            except Corrupt:
                pass  # blobs of it are lost, and the items say the same
        if every is None:
            every = defaultdict(list)
            for item, state in base.reader.items():
                if state.parent:
                    every[ItemId(state.parent)].append(item)
        return [item for parent in parents for item in every.get(parent, ())]

    return below
