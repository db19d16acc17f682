"""SortedKeys: distinct keys in order, cheap to change anywhere.

A plain list moves half of its entries for every insertion, which at 100,000 entries costs more than everything else a
live query does. Here the entries lie in runs of about a thousand:

    runs   [a b c] [f g] [k m p q]
    lasts    c       g       q        bisect here first, then in one run
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

RUN_KEYS = 1000
"""A run splits at twice this. Long runs cost memory moves, many runs cost `rank`; the two meet near a thousand."""


class SortedKeys:
    """A sorted set of tuples that compare with each other."""

    __slots__ = ("_count", "_lasts", "_runs")

    def __init__(self, keys: Iterable[Any] = ()) -> None:
        ordered = sorted(keys)
        self._count = len(ordered)
        self._runs = [ordered[start : start + RUN_KEYS] for start in range(0, len(ordered), RUN_KEYS)]
        self._lasts = [run[-1] for run in self._runs]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for run in self._runs:
            yield from run

    def first(self) -> Any:
        return self._runs[0][0]

    def last(self) -> Any:
        return self._lasts[-1]

    def head(self, count: int) -> list[Any]:
        return list(islice(self, count))

    def add(self, key: Any) -> None:
        """Put in a key that is not there."""
        self._count += 1
        if not self._runs:
            self._runs, self._lasts = [[key]], [key]
            return
        at = min(bisect_left(self._lasts, key), len(self._runs) - 1)
        run = self._runs[at]
        insort(run, key)
        if len(run) > 2 * RUN_KEYS:
            self._runs[at : at + 1] = [run[:RUN_KEYS], run[RUN_KEYS:]]
            self._lasts[at : at + 1] = [run[RUN_KEYS - 1], run[-1]]
        else:
            self._lasts[at] = run[-1]

    def remove(self, key: Any) -> None:
        """Take out a key that is there."""
        at, place = self._find(key)
        run = self._runs[at]
        del run[place]
        self._count -= 1
        if run:
            self._lasts[at] = run[-1]
        else:
            del self._runs[at], self._lasts[at]

    def rank(self, key: Any) -> int:
        """How many keys are less than this one, which is there."""
        at, place = self._find(key)
        return sum(map(len, self._runs[:at])) + place

    def _find(self, key: Any) -> tuple[int, int]:
        at = bisect_left(self._lasts, key)
        assert at < len(self._runs), f"greater than all keys: {key!r}"
        place = bisect_left(self._runs[at], key)
        assert self._runs[at][place] == key, f"not among the keys: {key!r}"
        return at, place
