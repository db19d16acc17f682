"""Datings: which messages brought the atoms of a text or a list. What an epoch may discard of it is judged by them.

    ann    atoms below 40    with message 17 at 9:58:12
           atoms below 95    with message 23 at 9:59:58

They are part of the state, for nobody could tell from a restored one what is stable. What one feed wrote within a minute
of its clock is one row, so typing costs a few bytes for each minute; when the history goes, its rows go with it. Rows are
a function of what one feed wrote, in its order, hence of the set of operations (law M1).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from echostore.kernel.ids import FeedId, Stamp
from echostore.kernel.models.base import Horizon, Wait

ROW_MS = 60_000
"""What was written in one such stretch of time shares a row: it becomes stable together, a minute late at most."""


class Row(NamedTuple):
    """The atoms below `counter_end`, and not below that of the row before, came with messages up to `seq`."""

    counter_end: int
    seq: int
    time_ms: int
    """The latest time that these messages name."""


class Dated(NamedTuple):
    """What one writer wrote, and on which feed."""

    writer: int
    feed: FeedId
    rows: tuple[Row, ...]


class Datings:
    """The rows of one item."""

    def __init__(self, dated: Iterable[Dated] = ()) -> None:
        self._feeds: dict[int, FeedId] = {}
        self._rows: dict[int, list[Row]] = {}
        for writer, feed, rows in dated:
            self._feeds[writer] = feed
            self._rows[writer] = list(rows)

    def add(self, writer: int, counter_end: int, stamp: Stamp, time_ms: int) -> None:
        """The operation at `stamp` has brought the writer's atoms up to there."""
        rows = self._rows.get(writer)
        if rows is None:
            rows = self._rows[writer] = []
            self._feeds[writer] = stamp.feed
        last = rows[-1] if rows else None
        if last is not None and counter_end <= last.counter_end:
            return
        if last is not None and last.time_ms // ROW_MS == time_ms // ROW_MS:
            rows[-1] = Row(counter_end, stamp.seq, max(time_ms, last.time_ms))
        else:
            rows.append(Row(counter_end, stamp.seq, time_ms))

    def settled(self, horizon: Horizon) -> dict[int, int]:
        """writer -> the end of those of its atoms, from the first on, that are stable and old enough."""
        found = {}
        for writer, rows in self._rows.items():
            stable = horizon.stable.get(self._feeds[writer], -1)
            end = 0
            for row in rows:
                if row.seq > stable or row.time_ms >= horizon.before_ms:
                    break
                end = row.counter_end
            if end:
                found[writer] = end
        return found

    def waits(self, horizon: Horizon) -> list[Wait]:
        """For each writer the first row that `settled` stops at: until one of these is over, it finds nothing more."""
        found = []
        for writer, rows in self._rows.items():
            feed = self._feeds[writer]
            waits = (Wait(feed, row.seq, row.time_ms) for row in rows)
            first = next((wait for wait in waits if not horizon.ends(wait)), None)
            if first is not None:
                found.append(first)
        return found

    def beyond(self, ends: Mapping[int, int]) -> "Datings":
        """Without the rows of what lies below these ends."""
        kept = (
            Dated(writer, feed, tuple(row for row in rows if row.counter_end > ends.get(writer, 0)))
            for writer, feed, rows in self.dated()
        )
        return Datings(dated for dated in kept if dated.rows)

    def dated(self) -> tuple[Dated, ...]:
        """All of it, ascending by writer."""
        return tuple(Dated(writer, self._feeds[writer], tuple(rows)) for writer, rows in sorted(self._rows.items()))
