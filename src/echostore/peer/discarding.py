"""Leaving things out at an epoch: from a processor that stands at the cut, by the rules of `kernel.items.discarding`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.items.discarding import LeftOut, discard, stable_frontier
from echostore.kernel.models.base import Horizon
from echostore.kernel.timeframe import Dependency
from echostore.wire.tree_nodes import Page

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor


def discard_at(
    processor: "PartyProcessor", before_ms: int, asserted: Mapping[FeedId, Mapping[FeedId, Dependency]]
) -> LeftOut:
    """Leave out what may go. `asserted` is, per data feed, what its last message inside the epoch had processed."""
    processed = {feed: {other: known.seq for other, known in seen.items()} for feed, seen in asserted.items()}
    lengths = {feed: at.seq + 1 for feed, at in processor.timeframe.entries.items()}
    horizon = Horizon(before_ms, stable_frontier(processed, lengths, processor.admission))
    return discard(processor.state, horizon, _items(processor))


def _items(processor: "PartyProcessor") -> list[ItemId]:
    found = set(processor.state.records)
    if processor.base is not None:
        for _, _, node in processor.base.reader.nodes():
            if isinstance(node, Page):
                found.update(entry.item for entry in node.entries)
    return sorted(found - processor.state.gone)
