"""A leaf's own batches: seen by its application at once, sent until its root has them, shown exactly once.

    view at cur  =  the root's state at cur  +  batches after follows(cur)

`follows` comes in the same EndUpdate as the state, so a batch is in exactly one of the two at any tick: no flicker and
no double sight. A batch is sent again until `NotifyReplicated` says that the *root* has it on disk; what an edge says
counts for nothing, because an edge may vanish with all it knew.

Batches are numbered from 1 within an arc. After a new arc came, those of the old one go first: until they are applied,
none of the new one is sent. Then the old arc is released.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from echostore.kernel.coherence.messages import Arc, IssuedId, PublishOp, ReleaseArc, Update

BATCHES_MAX = 10_000
"""Batches that wait for the root. A leaf that is offline for longer has to come back before it writes more."""

BATCH_OPS_MAX = 4096
"""Operations in one batch: it is applied in one piece, and held in memory by every system on its way."""


@dataclass(frozen=True, slots=True)
class Batch:
    arc: Arc
    number: int
    ops: tuple[PublishOp, ...]

    def as_update(self) -> Update:
        return Update(self.arc, self.number - 1, self.number, (), self.ops)


class Outbox:
    """What a leaf wrote and does not yet see in the root's state."""

    __slots__ = ("batches", "durable", "numbers", "refused", "released")

    def __init__(self) -> None:
        self.batches: tuple[Batch, ...] = ()
        self.numbers: dict[Arc, int] = {}
        """The last number of each arc in use."""
        self.durable: dict[Arc, int] = {}
        self.refused: frozenset[IssuedId] = frozenset()
        self.released: dict[Arc, int] = {}
        """Arcs that are promised to stay unused after a batch."""

    def add(self, arc: Arc, ops: tuple[PublishOp, ...]) -> Batch:
        assert arc not in self.released, f"{arc} is released"
        number = self.numbers[arc] = self.numbers.get(arc, 0) + 1
        batch = Batch(arc, number, ops)
        self.batches = (*self.batches, batch)
        return batch

    def release(self, arc: Arc) -> ReleaseArc:
        """Promise to use an arc no more."""
        return ReleaseArc(arc, self.released.setdefault(arc, self.numbers.get(arc, 0)))

    def to_send(self) -> list[Batch]:
        """What the root may not have: of the oldest arc alone, in order."""
        waiting = [batch for batch in self.batches if batch.number > self.durable.get(batch.arc, 0)]
        return [batch for batch in waiting if batch.arc == waiting[0].arc]

    def notified(self, arc: Arc, number: int) -> bool:
        """The root has batches of an arc up to this one on disk."""
        if number <= self.durable.get(arc, 0) or number > self.numbers.get(arc, 0):
            return False
        self.durable[arc] = number
        return True

    def followed(self, follows: dict[Arc, int]) -> bool:
        """The state that is shown now includes batches up to these: they leave the view on top of it."""
        kept = tuple(batch for batch in self.batches if batch.number > follows.get(batch.arc, 0))
        if len(kept) == len(self.batches):
            return False
        for batch in set(self.batches) - set(kept):
            self.durable[batch.arc] = max(self.durable.get(batch.arc, 0), batch.number)
        self.batches = kept
        self.refused &= {op.op for batch in kept for op in batch.ops}
        for arc in [arc for arc in self.released if self.durable.get(arc, 0) >= self.released[arc]]:
            if all(batch.arc != arc for batch in kept):
                self.numbers.pop(arc, None)
                self.durable.pop(arc, None)
        return True

    def reject(self, op: IssuedId) -> tuple[bytes, tuple[IssuedId, ...]]:
        """Take an operation out of the view, and those after it on an item that it was to make: its object, and those."""
        later = [each for batch in self.batches for each in batch.ops]
        refused = next((each for each in later if each.op == op), None)
        if refused is None:  # the state had it already, and leaves it out by itself
            return b"", ()
        same = [each.op for each in later if each.object == refused.object]
        # the first one on its item: the others have nothing to work on
        dependants = tuple(same[1:]) if same[0] == op else ()
        self.refused |= {op, *dependants}
        return refused.object, dependants

    def overlay(self) -> Iterator[PublishOp]:
        """What is shown on top of the root's state, in order."""
        for batch in self.batches:
            for op in batch.ops:
                if op.op not in self.refused:
                    yield op

    @property
    def drained(self) -> bool:
        """Whether the root has all of it on disk."""
        return not self.to_send()
