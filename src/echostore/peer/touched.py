"""Which blocks wrote an item: from the ItemStore's index, from what came since, and from the blocks below a base.

Who folds from an epoch without a checkpoint of it never processes the blocks below its cut, so no index names them.
Starting must not cost what history is long, so those that are still held are read when somebody first asks for the past
of an item: into the ItemStore, once for all, or into memory by who has none, as a reader beside the writer.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from echostore.kernel.ids import FeedId, ItemId, feed_id
from echostore.kernel.order import DATA, Envelope
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor

Touch = tuple[ItemId, FeedId, int]

UNREAD_MARK = "unread_below"
"""The entry of the ItemStore's `about` that names the base below which no block was looked at; empty: all were."""

BATCH_TOUCHES = 65_536
"""Places of blocks in one transaction."""


class Touched:
    """The blocks that wrote each item of one processor."""

    def __init__(self, processor: "PartyProcessor") -> None:
        self._processor = processor
        self._below: set[Touch] | None = None
        self.unread: BaseEpoch | None = None
        """The base whose held blocks nobody has looked at yet."""

    def places(self, items: frozenset[ItemId], *, below: bool = True) -> list[tuple[FeedId, int]]:
        """The blocks that write any of these items, excluded ones too; without `below`, of those above the base at least."""
        processor = self._processor
        touches = chain(self._read() if below else (), processor.touches)
        found = {(feed, seq) for item, feed, seq in touches if item in items}
        if processor.items is not None:
            for item in items:
                found.update(processor.items.touches(item))
        return sorted(found)

    def seqs(self, item: ItemId, feed: FeedId, start: int) -> set[int]:
        """Seqs from `start` on at which a feed writes an item."""
        processor = self._processor
        below = self._read() if self.unread is None or start < self.unread.length(feed) else ()
        found = {
            seq
            for touched, writer, seq in chain(below, processor.touches)
            if touched == item and writer == feed and seq >= start
        }
        if processor.items is not None:
            found.update(processor.items.touches_after(item, feed, start))
        return found

    def _read(self) -> set[Touch]:
        if self.unread is not None:
            waiting, items = held_below(self._processor, self.unread), self._processor.items
            if items is not None and items.database.writable:
                while touches := list(islice(waiting, BATCH_TOUCHES)):
                    items.add_touches(touches)
                items.set_about({UNREAD_MARK: b""})
            else:
                self._below = set(waiting)
            self.unread = None
        return self._below or set()


def held_below(processor: "PartyProcessor", base: BaseEpoch) -> Iterator[Touch]:
    """What the blocks below a base's cut write, as far as they are held."""
    feeds = processor.feeds
    for cut in base.cuts.values():
        if cut.control or not feeds.has_feed(cut.feed):
            continue
        feed = feed_id(cut.feed)
        for block in feeds.read(cut.feed, feeds.feed(cut.feed).base, min(cut.length, feeds.length(cut.feed))):
            envelope = decode_envelope(block.payload, DATA)
            if isinstance(envelope, Envelope):
                for item in {operation.item for operation in processor.operations(feed, block.seq, envelope.body)}:
                    yield item, feed, block.seq
