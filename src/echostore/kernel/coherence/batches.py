"""A root's account of the batches it has applied: each one once, in order, whichever way and however often it comes.

A batch counts only if it is the next one of its arc, and `applied` moves in the same durable commit that writes its
operations. So it does not matter over which link a batch comes, or after which restart: the account is the root's and
not a link's.
"""

from collections.abc import Iterable

from echostore.kernel.coherence.arcs import ArcLedger
from echostore.kernel.coherence.messages import Arc, FollowsEpoch, IssuedId, PublishOp, RejectOp, RejectReason, Update
from echostore.kernel.reasons import Reason

REJECTIONS_MAX = 1000
"""Rejections of one system that it may not have heard of. Beyond it the oldest are only counted."""


class Batches:
    """What was applied, what is being written, and who has to be told of rejections. Durable at the root."""

    __slots__ = ("applied", "arcs", "exposed", "rejections", "writing")

    def __init__(self, arcs: ArcLedger) -> None:
        self.arcs = arcs
        self.applied: dict[Arc, int] = {}
        """Durable, the state of the next tick."""
        self.exposed: dict[Arc, int] = {}
        """Part of the current tick."""
        self.writing: dict[Arc, int] = {}
        self.rejections: dict[Arc, tuple[tuple[int, RejectOp], ...]] = {}
        """By arc: the tick from which each is true, and what to say."""

    def take(self, update: Update) -> tuple[tuple[PublishOp, ...], tuple[tuple[IssuedId, RejectReason], ...]] | None:
        """The operations of a batch to write, and those that break a rule. None: not its turn, or known."""
        arc = update.clock
        if not self.is_next(update):
            return None
        self.writing[arc] = update.tick
        allowed = self.arcs.allows(arc, update.tick)
        good, bad = [], []
        for op in update.items:
            assert isinstance(op, PublishOp), f"{op} does not travel upwards"
            if not allowed:
                bad.append((op.op, RejectReason.RELEASED_ARC))
            elif op.op.arc != arc:
                bad.append((op.op, RejectReason.OUTSIDE_ARC))
            else:
                good.append(op)
        return tuple(good), tuple(bad)

    def is_next(self, update: Update) -> bool:
        """No gap, no repetition."""
        arc = update.clock
        done = max(self.applied.get(arc, 0), self.writing.get(arc, 0))
        return arc in self.arcs.granted and update.prev == done and update.tick == done + 1

    def committed(
        self, arc: Arc, batch: int, tick: int, rejected: Iterable[tuple[IssuedId, RejectReason | Reason]]
    ) -> None:
        """A batch is durable, as part of a tick to come."""
        assert batch == self.applied.get(arc, 0) + 1, f"batch {batch} after {self.applied.get(arc, 0)}"
        self.applied[arc] = batch
        if self.writing.get(arc, 0) <= batch:
            self.writing.pop(arc, None)
        self.reject(arc, tick, [RejectOp(op, reason) for op, reason in rejected])

    def reject(self, arc: Arc, tick: int, rejected: Iterable[RejectOp]) -> None:
        """These have no effect from a tick to come on, and their system has to be told."""
        told = tuple((tick, each) for each in rejected)
        if told:
            self.rejections[arc] = (*self.rejections.get(arc, ()), *told)[-REJECTIONS_MAX:]

    def expose(self, follows: Iterable[FollowsEpoch]) -> None:
        """A tick is out that includes these."""
        for each in follows:
            if each.tick > self.exposed.get(each.clock, 0):
                self.exposed[each.clock] = each.tick

    def rejections_between(self, arc: Arc, after: int, until: int) -> tuple[RejectOp, ...]:
        """What a system that has seen `after` has to be told when it is moved to `until`."""
        return tuple(message for tick, message in self.rejections.get(arc, ()) if after < tick <= until)

    def seen(self, arc: Arc, tick: int) -> None:
        """The system has reached this tick: what was rejected up to there is known to it."""
        kept = tuple(each for each in self.rejections.get(arc, ()) if each[0] > tick)
        if kept:
            self.rejections[arc] = kept
        else:
            self.rejections.pop(arc, None)
