"""What a session needs of a peer's store, and the plain way to give it: every effect answered at once.

The mesh, the in-memory link and the simulator all answer effects with `answer`; a driver that reads and writes in
other threads can do the same there and post the event afterwards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.events import (
    Compare,
    Compared,
    Effect,
    Event,
    FeedKnown,
    ForkFound,
    Ingest,
    Ingested,
    IngestRejected,
    Processed,
    RangeMissing,
    RangeRead,
    Read,
)
from echostore.kernel.sync.frames import Blocks, FeedTip, RefusalReason, Tip


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a range was not kept.

    FORK       kept as evidence of a fork, not in use
    BAD_LINK   does not hook to what is held: another branch, or a lie
    GAP        starts beyond what is held
    WAITING    kept in limbo, or the store is busy
    others     as named; the feed is not asked for again in this session
    """

    reason: Reason
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """Blocks of a control feed that are no longer here, and the name of what to start from instead."""

    evidence: bytes


class SyncPort(Protocol):
    """One party of one peer, as replication sees it. Lengths count blocks; a tip of length 0 is an empty feed."""

    def feeds(self) -> Iterable[FeedTip]:
        """Every feed that is followed (admitted, or in vain) with its tip, and the branches kept as evidence marked as such."""
        ...

    def tips(self, key: FeedKey) -> Sequence[FeedTip]:
        """The same for one feed: the tip in use first, then branches; empty when the feed is not followed."""
        ...

    def own(self, key: FeedKey) -> bool:
        """Whether this peer writes the feed."""
        ...

    def holds(self, key: FeedKey, length: int, link: Link) -> bool:
        """Whether the block `length - 1` is held with this link, on any branch."""
        ...

    def read(
        self, key: FeedKey, start: int, blocks_max: int, bytes_max: int, toward: Link
    ) -> tuple[Sequence[bytes], Head] | Gone | None:
        """The longest range from `start` that ends at a head within the limits, else the shortest there is.

        On the branch that holds the link `toward`, else on the one in use. None or Gone when blocks are no longer here.
        """
        ...

    def ingest(self, key: FeedKey, kind: str, start: int, payloads: Sequence[bytes], head: Head) -> int | Rejection:
        """Check and keep a range durably; the length of the branch in use afterwards. Known blocks are no error."""
        ...

    def processed_length(self, key: FeedKey) -> int:
        """How much of a feed has been applied, of what is held."""
        ...

    def fork_proofs(self) -> Iterable[bytes]:
        """Hashes of the fork proofs that are known."""
        ...

    def on_grow(self, callback: Callable[[FeedKey, int], None]) -> Callable[[], None]:
        """Call back after a feed grew, was admitted, got a branch or was processed further, from wherever; returns
        how to stop that."""
        ...

    def on_written(self, callback: Callable[[FeedTip, Blocks], None]) -> Callable[[], None]:
        """Call back with what this peer wrote itself, once it is durable and before `on_grow` tells of it; returns how
        to stop that. It may be called from any thread, and needs nothing of the port to be sent."""
        ...


def answer(port: SyncPort, effect: Effect) -> list[Event]:
    """What the store says to an effect; nothing for effects that are not the store's."""
    if isinstance(effect, Read):
        found = port.read(effect.feed, effect.start, effect.blocks_max, effect.bytes_max, effect.toward)
        if found is None:
            return [RangeMissing(effect.feed, effect.start, RefusalReason.COMPACTED)]
        if isinstance(found, Gone):
            return [RangeMissing(effect.feed, effect.start, RefusalReason.COMPACTED, found.evidence)]
        payloads, head = found
        return [RangeRead(effect.feed, effect.start, tuple(payloads), head)]
    if isinstance(effect, Ingest):
        return _ingest(port, effect)
    if isinstance(effect, Compare):
        return [Compared(effect.feed, effect.tip, port.holds(effect.feed, effect.tip.length, effect.tip.link))]
    return []


def _ingest(port: SyncPort, effect: Ingest) -> list[Event]:
    result = port.ingest(effect.feed, effect.kind, effect.start, effect.payloads, effect.head)
    if isinstance(result, Rejection):
        if result.reason is Reason.FORK and not result.fatal:
            return [ForkFound(effect.feed)]
        return [IngestRejected(effect.feed, result.reason, result.fatal)]
    known = port.tips(effect.feed)
    tip = known[0].tip if known else Tip(effect.head.length, effect.head.link)
    admitted: list[Event] = [FeedKnown(known[0])] if effect.limbo and known else []
    # Before Ingested, so that one ack tells both.
    return [*admitted, Processed(effect.feed, port.processed_length(effect.feed)), Ingested(effect.feed, tip)]
