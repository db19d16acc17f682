"""What leaves wrote and the party leaves out since: found again by the block it stands in, so that its leaf can be told.

    a block of the root's own feed, or an operation in it, is rejected now     a removal, a rule, a fork heard later
        -> the row of that block says whose operations it holds                coherence_ledger
        -> each is told once: with the tick that leaves it out, or when its leaf is back

An edit of a text or list that put something in, and is refused because it builds on somebody's excluded edit, is issued
again by this device (peer.reissue): it is not told while this device may write.

What is told is not taken back, should the party count the operation again later: it is simply there then. Everything
here runs under the peer's lock.
"""

from typing import TYPE_CHECKING, NamedTuple

from echostore.kernel.coherence.batches import Batches
from echostore.kernel.coherence.messages import Arc, IssuedId, RejectOp, SystemId
from echostore.kernel.errors import Refused
from echostore.kernel.ids import FeedId
from echostore.kernel.items.operations import Reject
from echostore.kernel.reasons import Reason
from echostore.peer.coherence_ledger import CoherenceLedger, PlacedOp

if TYPE_CHECKING:
    from echostore.peer.runtime import PartyRuntime


class _Standing(NamedTuple):
    """What must move for anything to be left out that was not before."""

    refolded: int
    excluded: int
    rebuilds: int
    admission: bytes


class ExclusionWatch:
    """Looks for operations of leaves that are left out since the last look."""

    def __init__(self, ledger: CoherenceLedger, feed: FeedId) -> None:
        self._ledger = ledger
        self._feed = feed
        self._looked_at: _Standing | None = None
        self._known: set[Reject] = set()
        """Rejects of the own feed that were looked at, and still hold."""
        self._settled = 0
        self.told = 0

    def suspect(self) -> None:
        """Something was rejected as it was written: look, whatever else moved."""
        self._looked_at = None

    def look(self, runtime: "PartyRuntime") -> dict[SystemId, list[tuple[RejectOp, int]]]:
        """By system: what has to be told, each with the number of its block. Nothing is kept yet."""
        standing = _standing(runtime)
        if standing == self._looked_at:
            return {}
        self._looked_at = standing
        rejects = {each for each in runtime.processor.rejects() if each.feed == self._feed}
        fresh, self._known = rejects - self._known, rejects
        found: dict[SystemId, list[tuple[RejectOp, int]]] = {}
        may_write = _may_write(runtime)
        for reject in sorted(fresh):
            written = self._ledger.ops_of(reject.seq)
            if written is None:
                continue
            arc, ops = written
            told = found.setdefault(arc.system, [])
            known = {each.op for each, _ in told}
            for op in ops:
                issued = IssuedId(arc, op.n)
                if issued not in known and _leaves_out(reject, op, may_write=may_write):
                    told.append((self._rejection(runtime, reject, op, issued), reject.seq))
        return {system: told for system, told in found.items() if told}

    def keep(
        self, found: dict[SystemId, list[tuple[RejectOp, int]]], batches: Batches, tick: int
    ) -> list[tuple[Arc, tuple[RejectOp, ...]]]:
        """Put on disk what was found, as rejections from a tick on; by the clock over which each system hears of it."""
        told = {_clock(batches, system): [each for each, _ in each_told] for system, each_told in found.items()}
        left: dict[int, tuple[Arc, list[PlacedOp]]] = {}
        for each_told in found.values():
            for rejected, seq in each_told:
                written = left.get(seq) or self._ledger.ops_of(seq)
                assert written is not None, f"block {seq} lost its row"
                left[seq] = rejected.op.arc, [op for op in written[1] if op.n != rejected.op.n]
        self._ledger.keep_excluded(batches, told, tick, left)
        self.told += sum(len(each) for each in told.values())
        return [(clock, tuple(each)) for clock, each in told.items()]

    def forget_settled(self, runtime: "PartyRuntime") -> None:
        """Blocks inside the epoch that the party stands on stay as they are."""
        settled = runtime.processor.base_length(self._feed)
        if settled > self._settled:
            self._ledger.forget_ops(settled)
            self._settled = settled

    def _rejection(self, runtime: "PartyRuntime", reject: Reject, op: PlacedOp, issued: IssuedId) -> RejectOp:
        operations = runtime.processor.operations_at(self._feed, reject.seq)
        item = operations[op.start].item if op.start < len(operations) else b""
        return RejectOp(issued, Reason(reject.reason), bytes(item))


def _standing(runtime: "PartyRuntime") -> _Standing:
    processor = runtime.processor
    counters = processor.counters
    return _Standing(
        counters.refolded_items,
        counters.excluded,
        counters.rebuilds,
        processor.admission.digest,
    )


def _may_write(runtime: "PartyRuntime") -> bool:
    try:
        runtime.writer()
    except Refused:
        return False
    return True


def _leaves_out(reject: Reject, op: PlacedOp, *, may_write: bool) -> bool:
    if reject.reason == Reason.BUILDS_ON_EXCLUDED and op.inserts and may_write:
        return False
    return reject.position == -1 or op.start <= reject.position < op.end


def _clock(batches: Batches, system: SystemId) -> Arc:
    """The arc whose account a system is sure to hear of."""
    return Arc(system, batches.arcs.gens.get(system, 0))
