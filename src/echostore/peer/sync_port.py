"""PartySyncPort: one party as replication sees it. The mesh, the in-memory link and the simulator use nothing else.

Everything read here is durable: it comes from the FeedStore. A control feed that nobody has admitted yet is taken in
while it is short, because its first message may be its own admission (a restored device); a data feed is not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

from echostore.kernel.errors import DiskFull, StorageFailed
from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, Link, feed_id
from echostore.kernel.order import CONTROL
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.asking import LIMBO_RANGE_BYTES
from echostore.kernel.sync.frames import Blocks, FeedTip, Tip
from echostore.kernel.sync.limbo import Limbo, Waiting
from echostore.kernel.sync.port import Gone, Rejection
from echostore.kernel.sync.serving import PUSH_BYTES_MAX
from echostore.peer.self_admission import opens_itself
from echostore.store.feed_store import Append, Ingested
from echostore.wire.control_state import EVIDENCE_KEY
from echostore.wire.links import check_range
from echostore.wire.signing import verify

if TYPE_CHECKING:
    from echostore.peer.party import Party

UNADMITTED_BLOCKS_MAX = 64
"""Blocks of a feed that opens itself, before it counts: the admission stands in the first one."""

UNADMITTED_FEEDS_MAX = 64
"""Feeds that open themselves and do not count yet, because the party has heard of too many or of a removal meanwhile. Only
devices of members can make one."""


class PartySyncPort:
    """The `SyncPort` of one party."""

    def __init__(self, party: "Party") -> None:
        self._party = party
        self._callbacks: list[Callable[[FeedKey, int], None]] = []
        self._written_callbacks: list[Callable[[FeedTip, Blocks], None]] = []
        self._held_back: dict[FeedKey, int] | None = None
        """While blocks are shown that are not durable yet: what to tell once they are, of each feed once."""
        self.limbo = Limbo()
        self._retries = False
        self._known: set[FeedKey] = {followed.feed for followed in party.runtime.processor.admission.followed}
        self._untold: set[FeedKey] = set()
        """Feeds of others that nobody heard of while the disk was full: what they hold may be durable now."""
        party.runtime.on_space.append(self._space_again)
        party.runtime.on_written.append(self._written)
        party.runtime.on_durable.append(self._grew)
        party.runtime.processor.on_admission.append(self._admission_moved)
        party.runtime.processor.on_processed.append(self._processed)

    def feeds(self) -> list[FeedTip]:
        """Every feed that is followed with its tip, and the branches kept as evidence."""
        with self._party.reading() as runtime:
            found: list[FeedTip] = []
            for held in runtime.feeds.feeds():
                if self._followed(held.key):
                    found.append(FeedTip(held.key, held.kind, Tip(held.length, held.last_link)))
                    found.extend(self._branch_tips(held.key, held.kind))
            known = {tip.feed for tip in found}
            # Those of which nothing is held yet are asked for as well.
            for each in runtime.processor.admission.followed:
                if each.feed not in known and not (runtime.data_held and each.kind.value != CONTROL):
                    runtime.feeds.add_feed(each.feed, each.kind.value)
                    found.append(FeedTip(each.feed, each.kind.value, Tip(0, _NO_LINK)))
            return found

    def tips(self, key: FeedKey) -> list[FeedTip]:
        with self._party.reading() as runtime:
            if not self._followed(key) or not runtime.feeds.has_feed(key):
                return []
            held = runtime.feeds.feed(key)
            return [FeedTip(key, held.kind, Tip(held.length, held.last_link)), *self._branch_tips(key, held.kind)]

    def own(self, key: FeedKey) -> bool:
        with self._party.reading() as runtime:
            return runtime.feeds.has_feed(key) and runtime.feeds.feed(key).own

    def holds(self, key: FeedKey, length: int, link: Link) -> bool:
        with self._party.reading() as runtime:
            if not runtime.feeds.has_feed(key):
                return False
            held = runtime.feeds.feed(key)
            if length <= held.base:
                # Below the beginning an epoch stands for the blocks: who differs there is on a branch that did not win.
                return length < held.base or runtime.feeds.link_at(key, length - 1) in (link, None)
            return runtime.feeds.fork_block(key, length - 1, link) is not None

    def read(
        self, key: FeedKey, start: int, blocks_max: int, bytes_max: int, toward: Link
    ) -> tuple[Sequence[bytes], Head] | Gone | None:
        with self._party.reading() as runtime:
            if not runtime.feeds.has_feed(key) or not self._followed(key):
                return None
            held = runtime.feeds.feed(key)
            if held.kind == CONTROL and start < held.base:
                return Gone(runtime.feeds.about(EVIDENCE_KEY) or b"")
            branch = runtime.feeds.branch_range(key, start, toward) if runtime.feeds.branches(key) else None
            if branch is not None:
                return branch
            return runtime.feeds.range_ending_at_head(key, start, blocks_max, bytes_max)

    def ingest(
        self,
        key: FeedKey,
        kind: str,
        start: int,
        payloads: Sequence[bytes],
        head: Head,
        *,
        newcomer: DeviceKey | None = None,
    ) -> int | Rejection:
        """Check and keep a range durably, and process it unless the party is paused. `newcomer` is who brings it, if that
        is nobody who is known.

        A short range of data, such as a keystroke, is shown before it is durable: a person waits for it. Nobody is told
        that it is held before it is, and nothing that builds on it can be durable earlier.
        """
        with self._party.reading() as runtime:
            if runtime.writable and runtime.open_edits and not runtime.in_batch:
                runtime.seal_edits()
            if not self._followed(key):
                refused = self._refuse(key, kind, start, payloads, head, newcomer)
                if refused is not None:
                    return refused
            result = self._store(key, kind, start, payloads, head)
            if kind == CONTROL and not isinstance(result, Rejection):
                self._retry_limbo()
            return result

    def _store(self, key: FeedKey, kind: str, start: int, payloads: Sequence[bytes], head: Head) -> int | Rejection:
        party = self._party
        with party.reading() as runtime:
            at_once = kind != CONTROL and sum(map(len, payloads)) <= PUSH_BYTES_MAX and not runtime.processor.paused
            try:
                if not runtime.feeds.has_feed(key):
                    runtime.feeds.add_feed(key, "control" if kind == CONTROL else "data")
                result = runtime.feeds.ingest(key, start, payloads, head, verify, durable=not at_once)
            except StorageFailed as error:
                # A full or failing disk: nothing was kept, and the sender is told to try again later.
                self._not_stored(error)
                return Rejection(Reason.WAITING)
            if isinstance(result, Ingested) and not at_once:
                runtime.blocks_stored += len(result.links)
            with self._holding_back():
                if isinstance(result, Ingested) and result.links:
                    fresh = list(payloads[len(payloads) - len(result.links) :])
                    runtime.processor.grown(key, result.start_seq, result.links, fresh)
                try:
                    runtime.feeds.sync()
                except StorageFailed as error:
                    # It is shown and may be lost: nobody hears that it is held before there is space to sync it. A store
                    # that failed otherwise takes no more writes.
                    self._untold.update(self._held_back or {}, [key])
                    self._held_back = {}
                    self._not_stored(error)
                    return Rejection(Reason.WAITING)
                if isinstance(result, Ingested) and result.links:
                    if at_once:
                        runtime.blocks_stored += len(result.links)
                    self._grew(key, runtime.feeds.length(key))
            if isinstance(result, Ingested):
                if result.links:
                    runtime.checkpoint_if_due()
                return runtime.feeds.length(key)
            if result.reason is Reason.FORK:
                runtime.processor.fork_stored(key)
                if not runtime.processor.paused:
                    party.report_forks()
                self._grew(key, runtime.feeds.length(key))
            return Rejection(result.reason, fatal=result.reason is Reason.BAD_SIGNATURE)

    def processed_length(self, key: FeedKey) -> int:
        """How much of a feed has been applied. Own blocks count once they are durable, like those of others."""
        with self._party.reading() as runtime:
            cursor = runtime.processor.orderer.cursors.get(feed_id(key))
            if cursor is None or cursor.key != key or not runtime.feeds.has_feed(key):
                return 0
            return min(cursor.length, runtime.feeds.length(key))

    def fork_proofs(self) -> Iterable[bytes]:
        with self._party.reading() as runtime:
            return [sha256(proof.feed + proof.seq.to_bytes(8, "big")).digest() for proof in runtime.feeds.forks()]

    def on_grow(self, callback: Callable[[FeedKey, int], None]) -> Callable[[], None]:
        self._callbacks.append(callback)

        def stop() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return stop

    def on_written(self, callback: Callable[[FeedTip, Blocks], None]) -> Callable[[], None]:
        self._written_callbacks.append(callback)

        def stop() -> None:
            if callback in self._written_callbacks:
                self._written_callbacks.remove(callback)

        return stop

    def _written(self, append: Append) -> None:
        """Own blocks, durable now, on their way out without another look at the store."""
        if self._written_callbacks and self._followed(append.feed):
            kind = self._party.runtime.feeds.feed(append.feed).kind
            tip = FeedTip(append.feed, kind, Tip(append.head.length, append.head.link))
            written = Blocks(append.feed, append.start_seq, tuple(append.payloads), append.head, more=False)
            for callback in list(self._written_callbacks):
                callback(tip, written)

    @contextmanager
    def _holding_back(self) -> Iterator[None]:
        """Tell nobody of growth until the end of the block, and nobody at all when it fails."""
        self._held_back = {}
        try:
            yield
        except BaseException:
            self._held_back = None
            raise
        held_back, self._held_back = self._held_back, None
        for key, length in (held_back or {}).items():
            self._grew(key, length)

    def _not_stored(self, error: StorageFailed) -> None:
        if isinstance(error, DiskFull):
            self._party.runtime.note_full(error)

    def _space_again(self) -> None:
        """What could not be stored while the disk was full is asked for again, and what was is told."""
        runtime = self._party.runtime
        untold, self._untold = self._untold, set()
        for key in sorted(untold):
            if runtime.feeds.has_feed(key):
                self._grew(key, runtime.feeds.length(key))
        self._admission_moved()

    def _admission_moved(self) -> None:
        """Feeds that have just been admitted are news to the other side as well."""
        followed = self._party.runtime.processor.admission.followed
        fresh = [each for each in followed if each.feed not in self._known]
        self._known = {each.feed for each in followed}
        feeds = self._party.runtime.feeds
        for each in fresh:
            if self._party.runtime.data_held and each.kind.value != CONTROL:
                continue
            try:
                if not feeds.has_feed(each.feed):
                    feeds.add_feed(each.feed, each.kind.value)
            except DiskFull as error:
                self._known.discard(each.feed)  # it is news again once there is space
                self._not_stored(error)
                continue
            self._grew(each.feed, feeds.length(each.feed))

    def data_released(self) -> None:
        """Data feeds are asked for from now on."""
        runtime = self._party.runtime
        for each in runtime.processor.admission.followed:
            if not runtime.feeds.has_feed(each.feed):
                runtime.feeds.add_feed(each.feed, each.kind.value)
            self._grew(each.feed, runtime.feeds.length(each.feed))

    def control_begun(self) -> None:
        """Control feeds begin elsewhere: what follows is asked for from there."""
        feeds = self._party.runtime.feeds
        for held in feeds.feeds():
            if held.kind == CONTROL:
                self._grew(held.key, held.length)

    def _processed(self, moved: set[FeedId]) -> None:
        """Let the other side know how far this one is in the feeds that it has just processed."""
        if self._callbacks:
            feeds = self._party.runtime.feeds
            for feed in sorted(moved):
                key = self._party.runtime.processor.feed_key(feed)
                if feeds.has_feed(key):
                    self._grew(key, feeds.length(key))

    def _grew(self, key: FeedKey, length: int) -> None:
        if self._held_back is not None:
            self._held_back[key] = length
            return
        for callback in list(self._callbacks):
            callback(key, length)

    def _followed(self, key: FeedKey) -> bool:
        runtime = self._party.runtime
        found = runtime.processor.admission.follows(feed_id(key))
        if found is None or found.feed != key:
            return False
        # A party that waits for its epoch knows of its own data feed alone: the others begin where the epoch ends.
        if not runtime.data_held or found.kind.value == CONTROL:
            return True
        return runtime.feeds.has_feed(key) and runtime.feeds.feed(key).own

    def _branch_tips(self, key: FeedKey, kind: str) -> list[FeedTip]:
        feeds = self._party.runtime.feeds
        return [FeedTip(key, kind, Tip(head.length, head.link), branch=True) for head in feeds.branch_heads(key)]

    def _refuse(
        self,
        key: FeedKey,
        kind: str,
        start: int,
        payloads: Sequence[bytes],
        head: Head,
        newcomer: DeviceKey | None,
    ) -> Rejection | None:
        """What becomes of blocks of a feed that nobody admitted; None: the store may have them."""
        runtime = self._party.runtime
        feeds = runtime.feeds
        unadmitted = Rejection(Reason.UNADMITTED, fatal=False)
        if kind != CONTROL or runtime.processor.parent is not None:
            return unadmitted
        if key == feeds.about("genesis_feed"):
            return None
        if head.length > UNADMITTED_BLOCKS_MAX or sum(map(len, payloads)) > LIMBO_RANGE_BYTES:
            return unadmitted
        if feeds.has_feed(key) and feeds.length(key):
            return None  # it has been judged before: it can open itself
        if start or not payloads:
            return unadmitted
        if self._opens_itself(key, payloads[0]):
            stored = sum(held.kind == CONTROL and not self._followed(held.key) for held in feeds.feeds())
            return unadmitted if stored >= UNADMITTED_FEEDS_MAX else None
        checked = check_range(self._party.key, key, 0, _NO_LINK, payloads, head, verify)
        if isinstance(checked, Reason):
            return Rejection(checked, fatal=checked is Reason.BAD_SIGNATURE)
        waiting = Waiting(key, tuple(payloads), head, newcomer, self._party.peer.now_ms() / 1000)
        return Rejection(Reason.WAITING) if self.limbo.keep(waiting) else unadmitted

    def _opens_itself(self, key: FeedKey, payload: bytes) -> bool:
        machine = self._party.runtime.processor.membership.machine
        return opens_itself(self._party.key, machine, key, payload)

    def _retry_limbo(self) -> None:
        """Control has moved: what waited for its admission may be admitted by now, or can be judged."""
        if self._retries:
            return
        self._retries = True
        try:
            self.limbo.expire(self._party.peer.now_ms() / 1000)
            for waiting in self.limbo:
                if self._followed(waiting.feed) or self._opens_itself(waiting.feed, waiting.payloads[0]):
                    self.limbo.remove(waiting.feed)
                    self._store(waiting.feed, CONTROL, 0, waiting.payloads, waiting.head)
        finally:
            self._retries = False


_NO_LINK = Link(bytes(32))
