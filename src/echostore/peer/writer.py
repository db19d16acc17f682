"""OwnFeed: this device's own feed of one kind in one party. Messages in, durable signed blocks out.

A write builds its block at once: the next seq, the link, the depth and the dependencies are all known here. It is
applied to the state right away and becomes durable at the next flush, which signs one head over all open blocks and
commits them in one transaction. No byte leaves the process before that (the network reads from the FeedStore alone).

An append that can't be stored leaves the state ahead of the disk. Its blocks stay open, and where the disk is full they
are stored as they are once there is space: several writers may have made them, and all but the last were told of no error.
A control message is processed only when it is durable, so one that can't be stored is taken back.
"""

from collections.abc import Iterable
from dataclasses import replace

from echostore.kernel.errors import NOTHING_CHANGED, TooLarge
from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedId, Link, PartyKey
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, BLOCK_BYTES_MAX
from echostore.kernel.order import CONTROL, DATA, Envelope, FeedCursor
from echostore.kernel.timeframe import Dependency
from echostore.peer.processor import PartyProcessor
from echostore.store.feed_store import Append
from echostore.wire.generated import credential_pb2, message_pb2
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.signing import SigningKey


class OwnFeed:
    """Builds, links and signs the blocks of one own feed."""

    def __init__(self, processor: PartyProcessor, cursor: FeedCursor, key: SigningKey) -> None:
        assert key.public == cursor.key
        self._processor = processor
        self.party: PartyKey = processor.party
        self.cursor = cursor
        self._key = key
        self.feed: FeedId = cursor.id
        self._payloads: list[bytes] = []
        self._links: list[Link] = []
        self._bytes = 0

    @property
    def open_blocks(self) -> int:
        """Blocks that are applied but not durable yet."""
        return len(self._payloads)

    @property
    def durable_length(self) -> int:
        return self.cursor.length - len(self._payloads)

    @property
    def full(self) -> bool:
        """Whether one more block might not fit under one signature."""
        return len(self._payloads) >= APPEND_BLOCKS_MAX or self._bytes + BLOCK_BYTES_MAX > APPEND_BYTES_MAX

    @property
    def next_depth(self) -> int:
        return self._depth(self._dependencies())

    def seal(
        self,
        *,
        time_ms: int,
        operations: Iterable[message_pb2.Operation] = (),
        credentials: Iterable[credential_pb2.Credential] = (),
        undoes: int | None = None,
    ) -> tuple[Envelope, Link]:
        """Build the next block and count it as processed. The caller applies its operations to the state."""
        processor, cursor = self._processor, self.cursor
        dependencies = self._dependencies()
        depth = self._depth(dependencies)
        message = message_pb2.Message(depth=depth, time_ms=time_ms, operations=operations, credentials=credentials)
        if undoes is not None:
            message.undoes = undoes + 1
        if dependencies:
            message.dependency_feeds = b"".join([dependency.feed for dependency in dependencies])
            message.dependency_seqs.extend([dependency.seq for dependency in dependencies])
            message.dependency_links = b"".join([dependency.link_prefix for dependency in dependencies])
            message.dependency_depths.extend([dependency.depth for dependency in dependencies])
        payload = message.SerializeToString()
        if len(payload) > BLOCK_BYTES_MAX:
            raise TooLarge(
                f"the write makes a block of {len(payload):,} bytes; at most {BLOCK_BYTES_MAX:,} fit",
                unchanged=NOTHING_CHANGED,
                next_step="Write less in one batch, or put large content into a blob.",
            )
        link = block_link(cursor.key, cursor.length, cursor.link, payload_hash(payload))
        self._payloads.append(payload)
        self._links.append(link)
        self._bytes += len(payload)
        envelope = Envelope(dependencies, depth, message)
        processor.orderer.advance_own(cursor, link, envelope)
        if dependencies or cursor.kind == CONTROL:
            processor.wrote(cursor)
        return envelope, link

    def take_append(self) -> Append | None:
        """The open blocks under one new head, ready for the store; None when there are none."""
        if not self._payloads:
            return None
        cursor = self.cursor
        signature = self._key.sign(head_bytes(self.party, cursor.key, cursor.length, cursor.link))
        head = Head(cursor.length, cursor.link, signature)
        return Append(cursor.key, self.durable_length, self._payloads, self._links, head)

    def unsealed(self) -> FeedCursor:
        """Where the feed is now, to be given to `take_back`."""
        assert not self._payloads, "open blocks would be lost"
        return replace(self.cursor, asserted=dict(self.cursor.asserted), marks=list(self.cursor.marks))

    def take_back(self, before: FeedCursor) -> None:
        """Forget blocks that were sealed since `unsealed`: they were neither stored nor processed."""
        cursor = self.cursor
        cursor.length, cursor.link, cursor.depth, cursor.asserted = (
            before.length,
            before.link,
            before.depth,
            before.asserted,
        )
        cursor.marks_start, cursor.marks = before.marks_start, before.marks
        self._payloads, self._links, self._bytes = [], [], 0

    def open_payload(self, seq: int) -> bytes | None:
        """The payload of a block that is not durable yet; None for one that is."""
        place = seq - self.durable_length
        return self._payloads[place] if 0 <= place < len(self._payloads) else None

    def appended(self) -> None:
        """The store has them."""
        self._payloads, self._links, self._bytes = [], [], 0
        self.cursor.held = self.cursor.length

    def _dependencies(self) -> tuple[Dependency, ...]:
        processor = self._processor
        if self.cursor.kind == DATA and not processor.advanced:
            return ()  # the usual case: nothing came from elsewhere since the last write
        return processor.dependencies(self.cursor)

    def _depth(self, dependencies: tuple[Dependency, ...]) -> int:
        return 1 + max([self.cursor.depth, *[dependency.depth for dependency in dependencies]])
