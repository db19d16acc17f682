"""Whose blocks are taken in next: token buckets per feed and per device, and turns for those who have emptied theirs.

    range arrives ──► both buckets have something left ──► taken at once
                  └─► one of them is empty ──► waits; the fullest bucket goes first, whenever there is time

A quota says nothing about right and wrong. What waits is taken later, none of it is lost, and while nobody else wants
anything it does not wait at all: a newcomer who takes a million blocks of one feed gets them as fast as ever. Who stays
within the quota is always served first, however many flood. A bucket can be in debt, so that who floods for a minute
stands behind who begins now, until both have had as much.

A bucket is counted in seconds: a range costs the time that the quota allows for it, by its blocks or by its bytes, whichever
is more, and one second flows back per second. So one number tells of both, and the order of two buckets does not change
while time passes. No I/O; the clock is an argument. Used by every session of one peer together.
"""

import heapq
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import DeviceKey, FeedKey

BURST_S = 4.0
"""What a full bucket holds, as time: four seconds of its quota may come at once."""

DEBT_S = 60.0
"""How far a bucket can be in debt: what somebody took more than a minute's worth ago is forgiven."""

BUCKETS_MAX = 10_000
"""Feeds and devices that are counted, each. A full bucket is the same as none; beyond, the fullest are forgotten."""

RATE_MAX = 1e12

JobT = TypeVar("JobT")


class OverQuota(StrEnum):
    """Which bucket is empty."""

    FEED = "feed"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Quotas:
    """How much of one feed, and from one device, goes before others, per second. Settings of one peer."""

    feed_blocks: float = 1000.0
    """More than people and most programs write; a tenth of what one processor core takes in and applies."""
    feed_bytes: float = 1024.0 * 1024.0
    device_blocks: float = 4000.0
    """A device passes on the feeds of others too."""
    device_bytes: float = 4.0 * 1024.0 * 1024.0

    def __post_init__(self) -> None:
        for name in ("feed_blocks", "feed_bytes", "device_blocks", "device_bytes"):
            rate = getattr(self, name)
            if not isinstance(rate, int | float) or isinstance(rate, bool) or not 1 <= rate <= RATE_MAX:
                raise UsageError(
                    f"a quota is a number from 1 to {RATE_MAX:g}, and {name.replace('_', '-')} is {rate!r}",
                    next_step="Give blocks or bytes per second.",
                )


@dataclass(slots=True)
class Bucket:
    """`empty_at`: the moment at which the bucket was or will be exactly empty; it holds now - empty_at seconds."""

    empty_at: float
    slowed: int = 0
    """Blocks that others went before."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a feed or a device has left. `left` is 1 for a full bucket, 0 for an empty one, below when in debt."""

    left: float
    slowed: int

    @property
    def over(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True, slots=True)
class Cost:
    """One range of one feed that came from one device."""

    feed: FeedKey
    device: DeviceKey
    blocks: int
    size_bytes: int


@dataclass(slots=True)
class _Waiting(Generic[JobT]):
    cost: Cost
    job: JobT
    turn: int
    """How many turns there had been when it came."""


class Turns(Generic[JobT]):
    """Buckets, and what waits. A job is whatever the caller wants to be handed back when its turn has come."""

    def __init__(self, quotas: Quotas | None = None) -> None:
        self.quotas = quotas or Quotas()
        self.over_blocks: Counter[OverQuota] = Counter()
        """Blocks that came while a bucket was empty, by which one: they waited, were it for a moment."""
        self.slowed_blocks = 0
        """Of these, blocks that others went before."""
        self._feeds: dict[FeedKey, Bucket] = {}
        self._devices: dict[DeviceKey, Bucket] = {}
        self._heap: list[tuple[float, float, int, _Waiting[JobT]]] = []
        self._number = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._heap)

    # What others read

    def over(self, feed: FeedKey, device: DeviceKey, now: float) -> OverQuota | None:
        """Which bucket is empty; None when both have something left."""
        if now <= _empty_at(self._feeds.get(feed)):
            return OverQuota.FEED
        return OverQuota.DEVICE if now <= _empty_at(self._devices.get(device)) else None

    def feed_over(self, feed: FeedKey, now: float) -> bool:
        return now <= _empty_at(self._feeds.get(feed))

    def of_feed(self, feed: FeedKey, now: float) -> Standing | None:
        """None for a feed of which nothing was taken in lately."""
        return _standing(self._feeds.get(feed), now)

    def of_device(self, device: DeviceKey, now: float) -> Standing | None:
        return _standing(self._devices.get(device), now)

    # Turns

    def take(self, cost: Cost, job: JobT, now: float) -> bool:
        """True: it may be done at once. False: it waits until `next` hands it back."""
        over = self.over(cost.feed, cost.device, now)
        if over is None:
            self._turn += 1
            self._charge(cost, now)
            return True
        self.over_blocks[over] += cost.blocks
        self.wait(cost, job)
        return False

    def drawn(self, device: DeviceKey, count: int, size_bytes: int, now: float) -> None:
        """A device was given something outside of the turns."""
        cost_s = max(count / self.quotas.device_blocks, size_bytes / self.quotas.device_bytes)
        _draw(self._devices, device, cost_s, now)

    def wait(self, cost: Cost, job: JobT) -> None:
        """Let it wait, whatever is left: for who can do one thing at a time only."""
        self._number += 1
        heapq.heappush(self._heap, (*self._rank(cost), self._number, _Waiting(cost, job, self._turn)))

    def next(self, now: float) -> JobT | None:
        """The job whose turn it is: the one with the fullest bucket, of equals the one that came first."""
        while self._heap:
            feed_first, then, number, waiting = heapq.heappop(self._heap)
            rank = self._rank(waiting.cost)
            if rank > (feed_first, then) and self._heap:
                # Its buckets were drawn on since it was put there; they never fill faster than others'.
                heapq.heappush(self._heap, (*rank, number, waiting))
                if self._heap[0][2] != number:
                    continue
                heapq.heappop(self._heap)
            if waiting.turn != self._turn:
                self._slowed(waiting.cost)
            self._turn += 1
            self._charge(waiting.cost, now)
            return waiting.job
        return None

    def _rank(self, cost: Cost) -> tuple[float, float]:
        """Small goes first: the emptier of the two buckets decides, of equals that of the feed."""
        feed, device = self._feeds.get(cost.feed), self._devices.get(cost.device)
        empty_at = _empty_at(feed)
        return max(empty_at, _empty_at(device)), empty_at

    def _slowed(self, cost: Cost) -> None:
        self.slowed_blocks += cost.blocks
        for bucket in (self._feeds.get(cost.feed), self._devices.get(cost.device)):
            if bucket is not None:
                bucket.slowed += cost.blocks

    def _charge(self, cost: Cost, now: float) -> None:
        cost_s = max(cost.blocks / self.quotas.feed_blocks, cost.size_bytes / self.quotas.feed_bytes)
        _draw(self._feeds, cost.feed, cost_s, now)
        self.drawn(cost.device, cost.blocks, cost.size_bytes, now)


_KeyT = TypeVar("_KeyT", FeedKey, DeviceKey)


def _draw(buckets: dict[_KeyT, Bucket], key: _KeyT, cost_s: float, now: float) -> None:
    bucket = buckets.get(key)
    if bucket is None:
        if len(buckets) >= BUCKETS_MAX:
            _forget(buckets, now)
        bucket = buckets[key] = Bucket(now - BURST_S)
    bucket.empty_at = min(max(bucket.empty_at, now - BURST_S) + cost_s, now + DEBT_S)


def _forget(buckets: dict[_KeyT, Bucket], now: float) -> None:
    """Those that are full; when that is not a tenth of them, the fullest."""
    fullest = sorted(buckets, key=lambda key: buckets[key].empty_at)
    full = sum(bucket.empty_at <= now - BURST_S for bucket in buckets.values())
    for key in fullest[: max(full, len(fullest) // 10)]:
        del buckets[key]


def _empty_at(bucket: Bucket | None) -> float:
    return -float("inf") if bucket is None else bucket.empty_at


def _standing(bucket: Bucket | None, now: float) -> Standing | None:
    if bucket is None:
        return None
    return Standing(min(1.0, (now - bucket.empty_at) / BURST_S), bucket.slowed)
