"""Merging segments of an overlay: eight of one level become one of the next, and only the rows that count stay.

So a stream of a thousand micro-batches has two dozen segments, each row was written a few times, and what is read to fold
the next one does not grow with the number of those before. Neighbours are merged, never others: of an item the newest row
counts, and newer segments lie behind.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.overlay import KEPT, PLACED, Segment
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PLACEMENTS, PROPERTIES, table_kind
from echostore.pipeline.output.writing import NAMED, Place, named_files, named_rows
from echostore.pipeline.schemas import CLAIMS, ITEM_STATES, MOVES, STATE_INDEX
from echostore.pipeline.stages.state_files import StateWriter, by_bucket
from echostore.pipeline.streaming.jobs import Jobs

MERGED_AT = 8
"""Segments of one level that become one."""
ROWS_MAX = 1_000_000
"""Rows of states beyond which segments are left as they are: they would not fit into a task's memory well."""


def mergeable(segments: tuple[Segment, ...]) -> int | None:
    """Where the last segments begin that should be merged; None when none should."""
    if len(segments) < MERGED_AT:
        return None
    start = len(segments) - MERGED_AT
    last = segments[start:]
    rows = sum(file.rows for segment in last for file in segment.files.get("states", ()))
    return start if len({segment.level for segment in last}) == 1 and rows <= ROWS_MAX else None


@dataclass(frozen=True)
class Merging:
    """The task: the files of several segments into those of one."""

    place: Place
    files: dict[str, tuple[NamedFile, ...]]
    """By kind, older ones first."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not sum(batch.num_rows for batch in batches):
            return
        yield named_rows(self.merge())

    def merge(self) -> dict[str, list[NamedFile]]:
        made: dict[str, list[NamedFile]] = self._states()
        placed = _newest(self._rows("placed", PLACED), ["party"], "number")
        placements = self._frame(table_kind("placements"), PLACEMENTS)
        told = placed.select("party", commit="number")
        items = _newest(self._rows(table_kind("items"), ITEMS), ["party", "item"], "commit")
        place = ["party", "item", "commit"]
        frames: dict[str, tuple[pl.DataFrame, pa.Schema]] = {
            "kept": (_newest(self._rows("kept", KEPT), ["root"], "number"), KEPT),
            "placed": (placed, PLACED),
            "moves": (self._frame("moves", MOVES), MOVES),
            "claims": (self._frame("claims", CLAIMS).unique(), CLAIMS),
            table_kind("placements"): (placements.join(told, on=["party", "commit"], how="semi"), PLACEMENTS),
            table_kind("items"): (items, ITEMS),
        }
        for name, schema in (("properties", PROPERTIES), ("links", LINKS)):
            rows = self._frame(table_kind(name), schema)
            frames[table_kind(name)] = rows.join(items.select(place), on=place, how="semi"), schema
        for kind, (frame, schema) in frames.items():
            file = self.place.write(kind, schema, frame.to_arrow().cast(schema).to_batches())
            if file is not None:
                made[kind] = [file]
        return made

    def _rows(self, kind: str, schema: pa.Schema) -> pa.Table:
        tables = [read_table(self.place.out, file, schema) for file in self.files.get(kind, ())]
        return pa.concat_tables([schema.empty_table(), *tables])

    def _frame(self, kind: str, schema: pa.Schema) -> pl.DataFrame:
        found = pl.from_arrow(self._rows(kind, schema))
        assert isinstance(found, pl.DataFrame)
        return found

    def _states(self) -> dict[str, list[NamedFile]]:
        """The newest state of each item, bucket by bucket, under the highest turn of all."""
        index = self._rows("state_index", STATE_INDEX).to_pylist()
        if not index:
            return {}
        turns: dict[str, int] = {}
        nibbles: dict[bytes, tuple[int, int]] = {}
        for row in index:
            turns[row["path"]] = row["turn"]
            nibbles[row["party"]] = max(nibbles.get(row["party"], (-1, 0)), (row["turn"], len(row["bucket"])))
        tables = []
        for file in self.files["states"]:
            table = read_table(self.place.out, file, ITEM_STATES)
            tables.append(table.append_column("turn", pa.repeat(pa.scalar(turns[file.path]), len(table))))
        newest = _newest(pa.concat_tables(tables), ["party", "item_key"], "turn").sort("party", "item_key")
        states = newest.drop("turn").to_arrow().cast(ITEM_STATES).combine_chunks()
        depths = {party: depth for party, (_, depth) in nibbles.items()}
        return dict(StateWriter(self.place, max(turns.values())).write(list(by_bucket(states, depths))))


def _newest(table: pa.Table, keys: list[str], number: str) -> pl.DataFrame:
    """Of each key the rows of the highest number."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.sort(number, maintain_order=True).unique(subset=keys, keep="last", maintain_order=True)


def merged_files(jobs: Jobs, task: Merging) -> dict[str, tuple[NamedFile, ...]]:
    """Run a merge as a job of one task."""
    found = named_files(jobs.run(pa.table({"one": [1]}), task, NAMED))
    return {kind: tuple(files) for kind, files in found.items()}
