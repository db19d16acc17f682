"""Following a lake: which parties have something new, which runs of theirs there are up to a timeframe, and how long ago
their blocks came.

The offsets of the stream are timeframes (`source.timeframes`). A micro-batch reads up to its end and no further, so that
doing it again reads the same.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from echostore.kernel.errors import Corrupt
from echostore.pipeline.lake import Lake, log
from echostore.pipeline.lake.strands import Tip
from echostore.pipeline.schemas import RUNS
from echostore.pipeline.source import planning
from echostore.pipeline.source.timeframes import FeedPlace, from_offset
from echostore.pipeline.source.views import Chosen, LakeView

BYTES_PER_BLOCK = 100
"""What a block has at the least, about: runs of a stream are weighed by their blocks."""
ARRIVALS_MAX = 100_000
"""Files whose moment of arrival is remembered until their blocks are in the tables."""

Timeframe = dict[FeedPlace, tuple[Tip, ...]]


class Arrival(NamedTuple):
    """Some blocks, and when they came."""

    blocks: int
    at_ms: int


class Follower:
    """A lake as a stream sees it, on the driver. Looking again costs what was published since."""

    def __init__(self, lake: Path) -> None:
        self.lake = Lake.open(lake)
        self._view = LakeView(str(self.lake.path), Chosen())
        self._arrivals: dict[str, tuple[int, int]] = {}
        """File -> the version that added it, and when."""
        self._came: dict[int, int] = {}

    def came(self, version: int, at_ms: int) -> None:
        """Say when the blocks of a version came, where that is known better than from the lake."""
        self._came[version] = at_ms
        while len(self._came) > ARRIVALS_MAX:
            self._came.pop(next(iter(self._came)))

    @property
    def version(self) -> int:
        return self._view.version

    def look(self) -> None:
        """Take in what was published."""
        before = self._view.version
        self._view.refresh()
        for version in range(before + 1, self._view.version + 1):
            entry, _ = log.read_entry(self.lake.path, version)
            if entry.kind != "compact":
                self._arrivals.update((each.file, (version, entry.created_ms)) for each in entry.adds)
        while len(self._arrivals) > ARRIVALS_MAX:
            self._arrivals.pop(next(iter(self._arrivals)))

    def newest(self) -> Timeframe:
        return planning.newest(self._view)

    def at_version(self, version: int) -> Timeframe:
        """The timeframe of what the lake had at a version."""
        return planning.newest(LakeView(str(self.lake.path), Chosen(), version)) if version else {}

    def joined(self, one: Timeframe, other: Timeframe) -> Timeframe:
        """The least timeframe that has all of two."""
        found = dict(one)
        for place, tips in other.items():
            known = found.get(place, ())
            if known == tips or place not in self._view.feeds:
                continue
            strands = self._view.feeds[place].strands
            reach = strands.reach({*known, *tips})
            found[place] = (*known, *tips) if reach is None else tuple(strands.tips_of(reach))
        return found

    def parties(self) -> set[bytes]:
        return {party for party, _ in self._view.feeds}

    def roots(self) -> set[bytes]:
        """Parties with control feeds of their own."""
        return {party for (party, _), feed in self._view.feeds.items() if feed.control}

    def runs(self, parties: Iterable[bytes], end: Timeframe) -> pa.Table:
        """The runs of some parties up to a timeframe, sorted as a lake's are."""
        wanted = set(parties)
        rows: list[tuple[Any, ...]] = []
        for place, feed in self._view.feeds.items():
            if place[0] in wanted and end.get(place):
                rows += self._feed_runs(place, feed.control, end[place])
        rows.sort(key=lambda row: (row[0], not row[2], row[1], row[3], row[4], row[6]))
        columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in RUNS]
        return pa.table(
            [pa.array(column, field.type) for column, field in zip(columns, RUNS, strict=True)], schema=RUNS
        )

    def _feed_runs(self, place: FeedPlace, control: bool, tips: tuple[Tip, ...]) -> Iterator[tuple[Any, ...]]:
        strands = self._view.feeds[place].strands
        reach = strands.reach(tips)
        if reach is None:
            raise Corrupt(
                f"The stream has read blocks of feed {place[1].hex()} that are not in {self.lake.path} any more.",
                next_step="Name the lake that the output was built from, or another output folder.",
            )
        for index, strand in enumerate(strands.strands):
            for piece in strand.pieces:
                run = piece.run
                end = min(run.end, reach[index])
                if end <= run.start:
                    continue
                last = run.last_link if end == run.end else strands.link_at(index, end - 1) or b""
                file, row = piece.where
                size = (end - run.start) * BYTES_PER_BLOCK
                yield *place, control, run.start, end, run.previous, last, 0, file, row + piece.cut, size

    def blocks_between(self, start: Timeframe, end: Timeframe) -> dict[bytes, int]:
        """How many blocks of each party lie between two timeframes."""
        found: dict[bytes, int] = {}
        for place, tips in end.items():
            if place not in self._view.feeds or start.get(place, ()) == tips:
                continue
            strands = self._view.feeds[place].strands
            taken, wanted = strands.reach(start.get(place, ())), strands.reach(tips)
            if taken is not None and wanted is not None:
                more = sum(max(0, last - first) for first, last in zip(taken, wanted, strict=True))
                found[place[0]] = found.get(place[0], 0) + more
        return found

    def arrivals(self, start: Timeframe, end: Timeframe) -> list[Arrival]:
        """When the blocks between two timeframes came, as far as that was seen."""
        found = []
        for place, feed in self._view.feeds.items():
            if start.get(place, ()) == end.get(place, ()):
                continue
            taken, wanted = feed.strands.reach(start.get(place, ())), feed.strands.reach(end.get(place, ()))
            if taken is None or wanted is None:
                continue
            for index, strand in enumerate(feed.strands.strands):
                for piece in strand.pieces:
                    first, last = max(taken[index], piece.run.start), min(wanted[index], piece.run.end)
                    seen = self._arrivals.get(piece.where[0])
                    if first < last and seen is not None:
                        found.append(Arrival(last - first, self._came.get(*seen)))
        return found


def changed_parties(start: Timeframe, end: Timeframe) -> set[bytes]:
    return {party for (party, feed), tips in end.items() if start.get((party, feed), ()) != tips}


def blocks_between(arrivals: Iterable[Arrival]) -> int:
    return sum(arrival.blocks for arrival in arrivals)


def percentile_s(arrivals: list[Arrival], now_ms: int, share: float) -> float | None:
    """How long ago the blocks came of which `share` came later; None when none was seen coming."""
    left = share * sum(arrival.blocks for arrival in arrivals)
    for arrival in sorted(arrivals, key=lambda arrival: -arrival.at_ms):
        left -= arrival.blocks
        if left <= 0:
            return round(max(0, now_ms - arrival.at_ms) / 1000, 3)
    return None


def last_offset(checkpoint: Path) -> Timeframe:
    """The end of the last micro-batch that Spark planned; nothing when there is no checkpoint."""
    try:
        numbers = [int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return {}
    return (offset_of(checkpoint, max(numbers)) or {}) if numbers else {}


def offset_of(checkpoint: Path, batch: int) -> Timeframe | None:
    """The end of a micro-batch, as Spark wrote it down before the batch began; None when that is gone."""
    path = checkpoint / "offsets" / str(batch)
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    try:
        offset = json.loads(lines[2])
    except (IndexError, ValueError) as error:
        raise Corrupt(
            f"{path} holds no offset: {error}",
            next_step="Delete the folder `stream/checkpoint` of the output; the stream goes on from its overlay.",
        ) from None
    return from_offset(offset)
