"""Streams: delivered messages after an anchor, in causal order, and where a reader stands in them.

A stream reads what is new and nothing else: for each feed the blocks after the anchor, for one item the blocks that
the index names. It merges feeds by depth, so that causes come before effects, and its own position is a timeframe
that is causally closed at every step: stored as an anchor, it resumes exactly there, on any peer.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from echostore.kernel.errors import Compacted, UsageError
from echostore.kernel.ids import FeedId, ItemId, Link
from echostore.kernel.order import DATA, Envelope, FeedCursor
from echostore.kernel.timeframe import Position, Timeframe
from echostore.peer.anchors import Anchor
from echostore.peer.delivered import Delivered
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

CHUNK_BLOCKS = 256


def compacted_after(runtime: "PartyRuntime", positions: Mapping[FeedId, Position]) -> dict[FeedId, int]:
    """How many data blocks after these positions are gone, by feed."""
    found = {}
    for feed, cursor in runtime.processor.orderer.cursors.items():
        if cursor.kind == DATA and runtime.feeds.has_feed(cursor.key):
            known = positions.get(feed)
            missing = runtime.feeds.feed(cursor.key).base - (known.seq + 1 if known else 0)
            if missing > 0:
                found[feed] = missing
    return found


def _check_branches(runtime: "PartyRuntime", positions: Mapping[FeedId, Position]) -> None:
    """A stream that went on after another branch of a feed would leave messages out, and nobody would know."""
    orderer = runtime.processor.orderer
    for feed, at in positions.items():
        cursor = orderer.cursors.get(feed)
        if cursor is None or not runtime.feeds.has_feed(cursor.key):
            continue  # what is not here yet comes later
        beginning = runtime.feeds.feed(cursor.key).base
        if not beginning - 1 <= at.seq < cursor.length:
            continue
        if at.seq == beginning - 1:
            here = runtime.feeds.link_at(cursor.key, at.seq)  # the block is gone, its link is kept
        else:
            here = orderer.mark(feed, at.seq).link
        if here is None or not here.startswith(at.link[:16]):
            raise UsageError(
                f"the anchor names another branch of feed {feed.hex()}",
                next_step="Open a stream without an anchor, and take its messages again.",
            )


class Stream:
    """An iterator over what is delivered now; `wait` blocks for more. Not shared between threads."""

    def __init__(self, party: "Party", after: Anchor | str | None = None, *, item: ItemId | None = None) -> None:
        self._party = party
        self._item = item
        anchor = Anchor.parse(after) if after is not None else None
        if anchor is not None and anchor.party != party.key:
            raise UsageError("the anchor belongs to another party")
        self._positions: dict[FeedId, Position] = dict(anchor.data.entries) if anchor else {}
        self._control = anchor.control if anchor else Timeframe({})
        with party.reading() as runtime:
            _check_branches(runtime, self._positions)
            gaps = compacted_after(runtime, self._positions)
        if anchor is not None and gaps:
            raise Compacted(
                f"{sum(gaps.values())} blocks after the anchor were compacted into an epoch and are not here any more",
                next_step="Open a stream without an anchor: it begins where the feeds do, and the state has the rest.",
            )
        self.compacted = sum(gaps.values())
        """How many blocks lie before the first one that this stream can give: an epoch stands for them."""
        self._taken: Iterator[Delivered] | None = None
        """What `next` takes messages from."""
        self.blocks_read = 0
        """How many blocks this stream has read: what is old costs nothing."""

    def __iter__(self) -> Iterator[Delivered]:
        """Everything delivered and not yet yielded, in causal order."""
        self._taken = None
        return self._messages()

    def __next__(self) -> Delivered:
        """The next message; StopIteration when all that is delivered was yielded, until more is."""
        for _ in range(2):  # what was under way, and then what came since
            if self._taken is None:
                self._taken = self._messages()
            found = next(self._taken, None)
            if found is not None:
                return found
            self._taken = None
        raise StopIteration

    def _messages(self) -> Iterator[Delivered]:
        with self._party.reading() as runtime:
            if runtime.writable:
                runtime.flush()
            ends = {
                feed: cursor.length for feed, cursor in runtime.processor.orderer.cursors.items() if cursor.kind == DATA
            }
            sources = [
                self._feed(runtime.processor.orderer.cursors[feed], length) for feed, length in sorted(ends.items())
            ]
        for _, feed, seq, link, delivered in heapq.merge(*sources, key=lambda entry: entry[:3]):
            self._positions[feed] = Position(seq, link)
            if delivered is not None:
                yield delivered
        with self._party.reading():
            self._control = runtime.processor.control_timeframe
            for feed, length in ends.items():
                # Blocks that do not write this item are behind the reader as well.
                cursor = runtime.processor.orderer.cursors[feed]
                known = self._positions.get(feed)
                if self._item is not None and length and (known is None or known.seq < length - 1):
                    self._positions[feed] = Position(
                        length - 1, runtime.processor.orderer.mark(cursor.id, length - 1).link
                    )

    def anchor(self) -> Anchor:
        """The position after the last message yielded."""
        return Anchor(self._party.key, 0, Timeframe.of(self._positions.items()), self._control)

    def reached(self, write_anchor: Anchor | str) -> bool:
        """Whether everything a write anchor names has been delivered on this stream."""
        wanted = Anchor.parse(write_anchor)
        return all(
            feed in self._positions and self._positions[feed].seq >= at.seq for feed, at in wanted.data.entries.items()
        )

    def wait(self, write_anchor: Anchor | str | None = None, *, timeout: float | None = None) -> bool:
        """Wait until the party has processed a write (or anything new); False when the time is up first.

        After True, iterating yields it.
        """
        processor = self._party.runtime.processor
        if write_anchor is None:
            here = Timeframe.of(self._positions.items())
            return self._party.wait_for(lambda: not here.includes_seqs(processor.timeframe), timeout)
        wanted = Anchor.parse(write_anchor).data
        return self._party.wait_for(lambda: processor.timeframe.includes_seqs(wanted), timeout)

    def _feed(self, cursor: FeedCursor, length: int) -> Iterator[tuple[int, FeedId, int, Link, Delivered | None]]:
        known = self._positions.get(cursor.id)
        with self._party.reading() as runtime:
            start = max(known.seq + 1 if known else 0, runtime.feeds.feed(cursor.key).base)
        for seq, link, envelope in self._blocks(cursor, start, length):
            yield envelope.depth, cursor.id, seq, link, self._delivered(cursor, seq, link, envelope)

    def _blocks(self, cursor: FeedCursor, start: int, length: int) -> Iterator[tuple[int, Link, Envelope]]:
        with self._party.reading() as runtime:
            if self._item is None:
                wanted = None
            else:
                wanted = sorted(
                    seq for seq in runtime.processor.touched.seqs(self._item, cursor.id, start) if seq < length
                )
        if wanted is None:
            while start < length:
                end = min(length, start + CHUNK_BLOCKS)
                with self._party.reading() as runtime:
                    blocks = list(runtime.feeds.read(cursor.key, start, end))
                start = end
                for block in blocks:
                    yield self._decoded(block.seq, block.link, block.payload)
        else:
            for seq in wanted:
                with self._party.reading() as runtime:
                    block = runtime.feeds.block(cursor.key, seq)
                yield self._decoded(block.seq, block.link, block.payload)

    def _decoded(self, seq: int, link: Link, payload: bytes) -> tuple[int, Link, Envelope]:
        self.blocks_read += 1
        envelope = decode_envelope(payload, DATA)
        assert isinstance(envelope, Envelope), (seq, envelope)
        return seq, link, envelope

    def _delivered(self, cursor: FeedCursor, seq: int, link: Link, envelope: Envelope) -> Delivered | None:
        """The message as it entered the state; None when the admission excludes it."""
        with self._party.reading() as runtime:
            return runtime.processor.delivered(cursor.id, seq, link, envelope)
