"""What a model is: the replicated state machine of one item.

A model folds operations into state. Its laws, property-tested for every model:

    M1  the snapshot depends on the set of operations since the base epoch, not on arrival order or grouping, as long
        as each feed's operations arrive in feed order and causes before effects;
    M2  restore(snapshot(s)) continues exactly as s would;
    M3  no clock, randomness or I/O.

A model may have `discard(horizon) -> bool`: it loses what its own rules let go at an epoch, and says whether it did. Then
`waits(horizon)` says what holds the rest up: as long as no operation comes, no horizon takes more that ends none of these.

Models work on kernel values. How operations and states become bytes is the business of `echostore.wire.models`: each
model there has a codec. A model of an application's own has bytes for operations and is folded by `OrderedFold`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol, runtime_checkable

from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.reasons import Reason


class OperationRefused(Exception):
    """An operation that this item's state or rules refuse; it is quarantined alone, with the reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Wait(NamedTuple):
    """What holds something up that an epoch may discard: not before a feed is stable up to `seq`, and ages count to beyond
    `time_ms`."""

    feed: FeedId
    seq: int
    time_ms: int


NO_WAIT: Final = Wait(FeedId(b""), -1, -1)
"""It is over already: something may go at any epoch."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """Up to where an epoch may discard: what `stable` covers, and ages by `before_ms` alone."""

    before_ms: int
    stable: Mapping[FeedId, int]
    """The last stable seq of each feed."""

    def covers(self, stamp: Stamp) -> bool:
        return stamp.seq <= self.stable.get(stamp.feed, -1)

    def ends(self, wait: Wait) -> bool:
        return wait.seq <= self.stable.get(wait.feed, -1) and wait.time_ms < self.before_ms


@runtime_checkable
class Model(Protocol):
    """The state machine of one item. `value()` is what queries, diffs and people see."""

    name: ClassVar[str]
    version: ClassVar[int]
    item: ItemId

    def apply(self, operation: Any, stamp: Stamp, time_ms: int) -> None:
        """Fold in one operation; raise OperationRefused (state untouched) when it can't be."""

    def value(self) -> Any:
        """The state as plain values, equal exactly when a reader could not tell two states apart."""
