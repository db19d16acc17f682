"""Reading held blocks for the orderer: read-ahead from the FeedStore, arrivals straight from memory."""

from collections import deque
from collections.abc import Sequence

from echostore.kernel.errors import NotFound
from echostore.kernel.ids import FeedId, Link
from echostore.kernel.order import FeedCursor, Held, Mark
from echostore.kernel.reasons import Reason
from echostore.store.feed_store import FeedStore
from echostore.wire.messages import decode_envelope

READ_AHEAD_BLOCKS = 128
"""Blocks read from disk at a time per feed: enough to make a query cheap, little enough for a thousand feeds."""

ARRIVALS_MAX = 4096
"""Blocks of one feed kept in memory on arrival, so that they need not be read back; the rest waits on disk."""


class BlockReader:
    """The orderer's `fetch` and `lookup` over one FeedStore. Counts decodes, which inactive parties must not cost."""

    def __init__(self, feeds: FeedStore) -> None:
        self._feeds = feeds
        self._ahead: dict[tuple[FeedId, int], deque[tuple[int, Link, bytes]]] = {}
        self._current: dict[tuple[FeedId, int], tuple[int, Held]] = {}
        self.decodes = 0
        self.reads = 0

    def arrived(self, feed: FeedId, start: int, links: Sequence[Link], payloads: Sequence[bytes]) -> None:
        """Blocks that were just stored; they follow those already waiting in memory, or nothing is kept."""
        ahead = self._ahead.setdefault((feed, 0), deque())
        if len(ahead) + len(links) > ARRIVALS_MAX or (ahead and ahead[-1][0] + 1 != start):
            return
        ahead.extend(zip(range(start, start + len(links)), links, payloads, strict=True))

    def fetch(self, cursor: FeedCursor, seq: int) -> Held:
        place = (cursor.id, cursor.branch)
        current = self._current.get(place)
        if current is not None and current[0] == seq:
            return current[1]
        ahead = self._ahead.get(place)
        while ahead and ahead[0][0] < seq:
            ahead.popleft()
        if not ahead or ahead[0][0] != seq:
            ahead = self._ahead[place] = self._read(cursor, seq)
        _, link, payload = ahead.popleft()
        self.decodes += 1
        held = Held(link, decode_envelope(payload, cursor.kind))
        self._current[place] = (seq, held)
        return held

    def forget(self) -> None:
        """Cursors were put elsewhere: what was read ahead is of no use."""
        self._ahead.clear()
        self._current.clear()

    def lookup(self, cursor: FeedCursor, seq: int) -> Mark:
        """Content and depth of one processed block."""
        if cursor.branch:
            link, payload = self._branch_block(cursor, seq)
        else:
            block = self._feeds.block(cursor.key, seq)
            link, payload = block.link, block.payload
        envelope = decode_envelope(payload, cursor.kind)
        assert not isinstance(envelope, Reason), (cursor.key.hex(), seq, envelope)
        self.reads += 1
        return Mark(link, envelope.depth)

    def _read(self, cursor: FeedCursor, seq: int) -> deque[tuple[int, Link, bytes]]:
        self.reads += 1
        if cursor.branch:
            link, payload = self._branch_block(cursor, seq)
            return deque([(seq, link, payload)])
        blocks = self._feeds.read(cursor.key, seq, min(cursor.held, seq + READ_AHEAD_BLOCKS))
        ahead = deque((block.seq, block.link, block.payload) for block in blocks)
        if not ahead or ahead[0][0] != seq:
            raise NotFound(f"Block {seq} of feed {cursor.key.hex()} is not held; its feed begins later here.")
        return ahead

    def _branch_block(self, cursor: FeedCursor, seq: int) -> tuple[Link, bytes]:
        branch = self._feeds.branches(cursor.key)[cursor.branch - 1]
        if seq < branch.start_seq:
            block = self._feeds.block(cursor.key, seq)
        else:
            block = branch.blocks[seq - branch.start_seq]
        return block.link, block.payload
