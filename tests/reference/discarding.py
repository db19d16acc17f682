"""What an epoch leaves out, found by looking at every item of the party: the account that `peer.discarding` has to match."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.items.discarding import stable_frontier
from echostore.kernel.items.record import DELETED_AT_KEY, DELETED_KEY, ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.models.base import Horizon
from echostore.kernel.timeframe import Dependency


def discard_looking_at_all(
    processor: Any, before_ms: int, asserted: Mapping[FeedId, Mapping[FeedId, Dependency]], waits: object = None
) -> None:
    """In the place of `discard_at`; whatever somebody knows of waits is not asked."""
    processed = {feed: {other: known.seq for other, known in seen.items()} for feed, seen in asserted.items()}
    lengths = {feed: at.seq + 1 for feed, at in processor.timeframe.entries.items()}
    horizon = Horizon(before_ms, stable_frontier(processed, lengths, processor.admission))
    state: PartyState = processor.state
    items = set(state.records)
    if processor.base is not None:
        items |= {item for item, _ in processor.base.reader.items()}
    doomed: set[ItemId] = set()
    for item in sorted(items - state.gone):
        record = state.record(item)
        assert record is not None
        if _deleted_before(record, horizon):
            doomed.add(item)
        if hasattr(record.model, "discard") and record.model.discard(horizon):
            state.dirty.add(item)
    if doomed:
        state.drop(frozenset(_with_all_below(state, doomed, items - state.gone)))


def _deleted_before(record: ItemRecord, horizon: Horizon) -> bool:
    if not record.deleted:
        return False
    stamp, _ = record.metadata.writes((DELETED_KEY,))[0]
    at = record.metadata.get((DELETED_AT_KEY,))
    return horizon.covers(stamp) and isinstance(at, int) and at < horizon.before_ms


def _with_all_below(state: PartyState, doomed: set[ItemId], items: set[ItemId]) -> set[ItemId]:
    below: dict[ItemId | None, list[ItemId]] = defaultdict(list)
    for item in items:
        below[state.home(item)].append(item)
    found, front = set(doomed), list(doomed)
    while front:
        new = [child for child in below[front.pop()] if child not in found]
        found.update(new)
        front += new
    shrinking = True
    while shrinking:  # what is embedded in what stays, and what has something below it that stays
        stays = {
            item
            for item in found
            if any(parent not in found for parent in state.tree.embeddings(item))
            or any(child not in found for child in below[item])
        }
        found -= stays
        shrinking = bool(stays)
    return found
