"""Limbo: control feeds that wait for their admission, in memory. Whoever knows a party's key can fill it; so it is bounded.

    range of a feed that nobody admitted ── Limbo ──┬── admitted meanwhile ──► the store
                                                    └── SECONDS over, or evicted ──► forgotten

A feed whose first block shows that it opens itself (a member's device admits it) never waits here: the store has it. What
waits is what can't be judged yet, because the control blocks that would do so have not come.

Invariants (tests cite them by number)
    W1  At most FEEDS_MAX feeds and BYTES_MAX bytes of one party wait, each for SECONDS at the most.
    W2  One newcomer has at most NEWCOMER_FEEDS_MAX of them, and all newcomers half of the room. A newcomer evicts
        newcomers alone: of its own feeds the oldest when it has too many, else of the device that has the most.
    W3  A device that is known, or whose identity has proven itself on the connection, evicts newcomers first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey

FEEDS_MAX: Final = 64
BYTES_MAX: Final = 1024 * 1024
SECONDS: Final = 600.0
NEWCOMER_FEEDS_MAX: Final = 4
"""A device has one control feed in a party, and a new one when its home was copied."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The first range of a feed, signed by the feed's key."""

    feed: FeedKey
    payloads: Sequence[bytes]
    head: Head
    newcomer: DeviceKey | None
    """Who brought it, if that is nobody who is known."""
    since: float

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.payloads))


class Limbo:
    """Of one party."""

    def __init__(self) -> None:
        self._waiting: dict[FeedKey, Waiting] = {}
        self.expired = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._waiting.values()))

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._waiting.values())

    def keep(self, waiting: Waiting) -> bool:
        """Let a feed wait; False when there is no room for it."""
        self.expire(waiting.since)
        known = self._waiting.get(waiting.feed)
        if known is not None:
            return waiting.payloads == known.payloads  # it has been here since its first time
        newcomers = [each for each in self if each.newcomer is not None]
        share = 1 if waiting.newcomer is None else 2
        if waiting.size_bytes > BYTES_MAX // share:
            return False
        if waiting.newcomer is not None:
            own = [each for each in newcomers if each.newcomer == waiting.newcomer]
            if len(own) >= NEWCOMER_FEEDS_MAX:
                self._evict(own[0])
        while not self._fits(waiting):
            newcomers = [each for each in self if each.newcomer is not None]
            if newcomers:
                self._evict(_of_the_busiest(newcomers))
            elif waiting.newcomer is None:
                self._evict(next(iter(self)))
            else:
                return False
        self._waiting[waiting.feed] = waiting
        return True

    def expire(self, now: float) -> None:
        """Forget what has waited too long."""
        for each in self:
            if now - each.since >= SECONDS:
                del self._waiting[each.feed]
                self.expired += 1

    def remove(self, feed: FeedKey) -> None:
        """It is admitted, or can be judged now."""
        self._waiting.pop(feed, None)

    def _fits(self, waiting: Waiting) -> bool:
        """Room for it: of all, and for a newcomer of the half that newcomers have."""
        if len(self._waiting) >= FEEDS_MAX or self.size_bytes + waiting.size_bytes > BYTES_MAX:
            return False
        if waiting.newcomer is None:
            return True
        newcomers = [each for each in self if each.newcomer is not None]
        size_bytes = sum(each.size_bytes for each in newcomers) + waiting.size_bytes
        return len(newcomers) < FEEDS_MAX // 2 and size_bytes <= BYTES_MAX // 2

    def _evict(self, waiting: Waiting) -> None:
        del self._waiting[waiting.feed]
        self.evicted += 1


def _of_the_busiest(newcomers: list[Waiting]) -> Waiting:
    """The oldest feed of the device that has the most."""
    counts = Counter(each.newcomer for each in newcomers)
    most = max(counts.values())
    return next(each for each in newcomers if counts[each.newcomer] == most)
