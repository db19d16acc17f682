"""How much is too much: token buckets for what systems below publish. Over quota means Backpressure, never loss.

A batch that is refused for its quota is not taken: it stays in its leaf's outbox and comes again.
"""

from typing import NamedTuple

OBJECT_OPS_PER_S = 100.0
"""Operations on one object. An object is a granule of storage; more belongs on several."""

OBJECT_OPS_BURST = 1000.0

ARC_OPS_PER_S = 1000.0
"""Operations of one arc."""

ARC_OPS_BURST = 10_000.0

BUCKETS_MAX = 10_000
"""Objects and arcs that are counted. A full bucket is the same as none, so the fullest are forgotten."""


class Bucket(NamedTuple):
    tokens: float
    at_s: float


class Quotas:
    """Buckets by key."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: dict[bytes, Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, costs: dict[bytes, int], *, rate: float, burst: float, now: float) -> float:
        """Take tokens for all keys, or for none: the seconds to wait, 0.0 when they were taken."""
        filled: dict[bytes, float] = {}
        wait_s = 0.0
        for key, cost in costs.items():
            bucket = self._buckets.get(key)
            tokens = burst if bucket is None else min(burst, bucket.tokens + (now - bucket.at_s) * rate)
            if tokens < min(cost, burst):
                wait_s = max(wait_s, (min(cost, burst) - tokens) / rate)
            filled[key] = tokens - cost
        if wait_s == 0.0:
            for key, tokens in filled.items():
                self._buckets[key] = Bucket(tokens, now)
            self._shrink(rate, burst, now)
        return wait_s

    def _shrink(self, rate: float, burst: float, now: float) -> None:
        if len(self._buckets) <= BUCKETS_MAX:
            return
        for key in [key for key, each in self._buckets.items() if each.tokens + (now - each.at_s) * rate >= burst]:
            del self._buckets[key]
        while len(self._buckets) > BUCKETS_MAX:
            del self._buckets[next(iter(self._buckets))]
