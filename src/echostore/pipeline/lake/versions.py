"""Lake and LakeVersion: what is in a block lake, by version.

lake = Lake.open("lake")
version = lake.at(lake.version())       # stays what it is, whatever is published or compacted meanwhile
runs = version.runs(parties=[key])      # which blocks of the party are where

Nothing here is believed by the stages: runs say where blocks are and how they hang together, the blocks prove it.
"""

import os
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt, UsageError
from echostore.kernel.ids import KEY_BYTES, LINK_BYTES
from echostore.pipeline import schemas
from echostore.pipeline.lake import log
from echostore.pipeline.lake.layout import find_lake, make_lake, path_of
from echostore.pipeline.lake.log import BlocksFile, RunsFile
from echostore.pipeline.lake.reading import read_runs

FeedPlace = tuple[bytes, bytes]
"""(party, feed)"""


class Lake:
    """A block lake that exists. Opening reads nothing but the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "Lake":
        return Lake(find_lake(path))

    @staticmethod
    def create(path: str | os.PathLike[str]) -> "Lake":
        """The lake at `path`, made when it is missing."""
        return Lake(make_lake(path))

    def version(self) -> int:
        """The newest version; 0 when nothing was published yet."""
        return log.versions(self.path)

    def at(self, version: int | None = None) -> "LakeVersion":
        """The lake as it was at a version; the newest one unless named."""
        newest = self.version()
        version = newest if version is None else version
        if not 0 <= version <= newest:
            raise UsageError(f"the lake {self.path} has versions 0 to {newest}, and not {version}")
        return LakeVersion(self, version, log.state_at(self.path, version))


class LakeVersion:
    """One version of a lake: a fixed set of files."""

    def __init__(self, lake: Lake, version: int, state: log.State) -> None:
        self.lake = lake
        self.version = version
        self.files: tuple[BlocksFile, ...] = tuple(state.files)
        self.runs_files: tuple[RunsFile, ...] = tuple(state.runs)
        """For jobs over so many parties that their runs don't fit on one machine: read these as tables, and keep the rows
        whose file is one of `files`."""

    @cached_property
    def rows_of(self) -> dict[str, int]:
        return {each.file: each.rows for each in self.files}

    def runs(
        self,
        parties: Collection[bytes] | None = None,
        control: bool | None = None,
        feeds: Collection[bytes] | None = None,
        after: Mapping[FeedPlace, int] | None = None,
    ) -> pa.Table:
        """The runs (`schemas.RUNS`), sorted by party, control first, feed and start.

        `after` leaves out runs that end at or below a length that was taken already. A run across that length stays
        whole, and so do all runs of a feed with branches: a late branch may lie below any length.
        """
        wanted = None if parties is None else sorted(parties)
        tables = [
            _chosen(read_runs(self.lake.path, record, wanted), wanted, control, feeds)
            for record in self.runs_files
            if wanted is None or any(record.first_party <= party.hex() <= record.last_party for party in wanted)
        ]
        runs = pa.concat_tables([schemas.RUNS.empty_table(), *tables])
        runs = self._live(runs)
        runs = runs.append_column("first", pc.invert(runs["control"])).sort_by(
            [(name, "ascending") for name in ("party", "first", "feed", "start", "end", "last_link")]
        )
        runs = runs.drop_columns(["first"]).combine_chunks()
        return runs if after is None else _beyond(runs, after)

    def _live(self, runs: pa.Table) -> pa.Table:
        """The runs of files that are part of this version, checked against what the log says about the files."""
        if not len(runs):
            return runs
        coded = runs["file"].combine_chunks().dictionary_encode()
        names = coded.dictionary.to_pylist()
        counts = np.array([self.rows_of.get(name, -1) for name in names], np.int64)
        rows = counts[coded.indices.to_numpy()]
        live = rows >= 0
        if not live.all():
            runs, rows = runs.filter(pa.array(live)), rows[live]
        start, end, row = (runs[name].to_numpy() for name in ("start", "end", "row"))
        sound = (start >= 0) & (end > start) & (row >= 0) & (end - start <= rows - row)
        for name, length in (
            ("party", KEY_BYTES),
            ("feed", KEY_BYTES),
            ("previous", LINK_BYTES),
            ("last_link", LINK_BYTES),
        ):
            sound &= pc.equal(pc.binary_length(runs[name]), length).to_numpy()
        if not sound.all():
            file = runs["file"][int(np.flatnonzero(~sound)[0])].as_py()
            raise Corrupt(
                f"What the lake says about the runs in {path_of(self.lake.path, file)} can't be true.",
                next_step="Run `echostore lake stat --full`; publish again into a new lake if it stays so.",
            )
        return runs


def overlapping(runs: pa.Table) -> pa.Array:
    """For each of some sorted runs, whether its feed has runs that overlap: branches, or the same blocks twice."""
    count = len(runs)
    if not count:
        return pa.array([], pa.bool_())
    party, feed = runs["party"].combine_chunks(), runs["feed"].combine_chunks()
    new = np.ones(count, bool)
    if count > 1:
        new[1:] = pc.or_(
            pc.not_equal(party.slice(1), party.slice(0, count - 1)),
            pc.not_equal(feed.slice(1), feed.slice(0, count - 1)),
        ).to_numpy(zero_copy_only=False)
    number = np.cumsum(new) - 1
    start, end = runs["start"].to_numpy(), runs["end"].to_numpy()
    # Lengths stay below 2^47; with the feed's number above them one running maximum serves all feeds.
    reach = np.maximum.accumulate(end + number * (1 << 48))
    hit = np.zeros(count, bool)
    hit[1:] = ~new[1:] & (start[1:] + number[1:] * (1 << 48) < reach[:-1])
    forked = np.zeros(int(number[-1]) + 1, bool)
    forked[number[hit]] = True
    return pa.array(forked[number])


def _chosen(
    runs: pa.Table, parties: list[bytes] | None, control: bool | None, feeds: Collection[bytes] | None
) -> pa.Table:
    if parties is not None:
        runs = runs.filter(pc.is_in(runs["party"], value_set=pa.array(parties, pa.binary())))
    if control is not None:
        runs = runs.filter(pc.equal(runs["control"], control))
    if feeds is not None:
        runs = runs.filter(pc.is_in(runs["feed"], value_set=pa.array(sorted(feeds), pa.binary())))
    return runs


def _beyond(runs: pa.Table, after: Mapping[FeedPlace, int]) -> pa.Table:
    places = zip(runs["party"].to_pylist(), runs["feed"].to_pylist(), strict=True)
    taken = np.array([after.get(place, 0) for place in places], np.int64)
    new = runs["end"].to_numpy() > taken
    return runs.filter(pc.or_(pa.array(new), overlapping(runs)))
