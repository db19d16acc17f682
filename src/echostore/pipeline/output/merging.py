"""Merging small files: every commit adds a few for each kind, and a run opens all of them.

When a kind has many small files, they are written anew as few. Tables are merged row by row as they are. Of what a commit
keeps for the next run, rows that a later build has replaced are left out, so that it grows with parties and buckets and
not with commits:

    cuts, admission, rejected, bases    rows of the last build of their party stay
    parties                             the last row of each stays
    tops                                the last of each bucket stays
    state_index, place_tops             what lies below the last whole writing of its bucket goes, and with it the files
                                        of states and of lists that nobody names any more
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from echostore.pipeline.output.files import checked_path, read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import PLACE_TOPS, STATE_INDEX
from echostore.pipeline.stages.frames import frame_of, mapped, repartitioned

SMALL_BYTES = 4 << 20
FILES_MAX = 64
"""Small files of a kind beyond which they are merged."""
MERGED_BYTES = 64 << 20

INDEXES = {"state_index": ("states", STATE_INDEX), "place_tops": ("place_lists", PLACE_TOPS)}
"""Kinds that name files of other kinds, by row group: those are never written anew here."""
NAMED_BY_OTHERS = frozenset(kind for kind, _ in INDEXES.values())

BY_BUILD = frozenset({"cuts", "admission", "rejected", "standing"})
NEWEST = {"parties": (["party"], "commit"), "tops": (["party", "bucket"], "turn")}
"""Kinds of which the row with the highest number counts, by key."""
REPLACED = BY_BUILD | NEWEST.keys() | INDEXES.keys()


def merge_small_files(
    spark: Any,
    place: Place,
    files: Mapping[str, list[NamedFile]],
    collect: Collect,
    builds: Mapping[bytes, int],
) -> dict[str, list[NamedFile]]:
    """The files of a commit, with small ones merged where there are too many. `builds` is the last build of each party."""
    merged = {kind: list(named) for kind, named in files.items()}
    for kind, named in files.items():
        small = sorted((file for file in named if file.bytes < SMALL_BYTES), key=lambda file: file.path)
        if kind in NAMED_BY_OTHERS or len(small) <= FILES_MAX:
            continue
        chosen = list(named) if kind in REPLACED else small
        together = kind in REPLACED - BY_BUILD
        parts = 1 if together else max(1, sum(file.bytes for file in chosen) // MERGED_BYTES)
        frame = repartitioned(frame_of(spark, pa.Table.from_batches([named_rows({kind: chosen})])), int(parts))
        task = _Merging(place, kind, _noted(place, builds) if kind in BY_BUILD else None)
        made = named_files(collect(mapped(frame, task, NAMED))).get(kind, [])
        merged[kind] = [file for file in named if file not in set(chosen)] + made
        if kind in INDEXES:
            others, schema = INDEXES[kind]
            live = {path for file in made for path in read_table(place.out, file, schema)["path"].to_pylist()}
            merged[others] = [file for file in merged.get(others, ()) if file.path in live]
    return merged


def _noted(place: Place, builds: Mapping[bytes, int]) -> str:
    """The builds as a file for the tasks, in the attempt's folder. No commit names it."""
    path = Path(place.out, place.folder, f"builds-{uuid.uuid4().hex}.arrow")
    table = pa.table({"party": pa.array(list(builds), pa.binary()), "commit": pa.array(builds.values(), pa.int64())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


@dataclass(frozen=True)
class _Merging:
    """The task: files of one kind into one."""

    place: Place
    kind: str
    builds: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        paths = [
            checked_path(self.place.out, NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"]))
            for batch in batches
            for row in batch.to_pylist()
        ]
        if not paths:
            return
        schema = pq.ParquetFile(paths[0]).schema_arrow
        stored = (batch for path in paths for batch in pq.ParquetFile(path).iter_batches())
        rows: Iterable[pa.RecordBatch] = self._counting(stored, schema) if self.kind in REPLACED else stored
        file = self.place.write(self.kind, schema, rows)
        yield named_rows({self.kind: [] if file is None else [file]})

    def _counting(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows that no later ones have replaced, in the order they were in."""
        if self.builds is not None:
            with pa.OSFile(self.builds, "rb") as file:
                built = pl.DataFrame(pa.ipc.open_file(file).read_all())
            for batch in batches:
                yield from _taken(
                    pa.Table.from_batches([batch]), _frame(batch).join(built, on=["party", "commit"], how="semi")
                )
            return
        table = pa.Table.from_batches(list(batches), schema)
        frame = _frame(table)
        if self.kind in INDEXES:
            whole = frame.filter(pl.col("whole")).group_by("party", "bucket").agg(last=pl.col("turn").max())
            frame = frame.join(whole, on=["party", "bucket"], how="left")
            frame = frame.filter(pl.col("last").is_null() | (pl.col("turn") >= pl.col("last")))
        else:
            keys, number = NEWEST[self.kind]
            frame = frame.sort(number, maintain_order=True).unique(subset=keys, keep="last", maintain_order=True)
        yield from _taken(table, frame)


def _frame(rows: pa.Table | pa.RecordBatch) -> pl.DataFrame:
    """What tells rows apart, and the place of each."""
    names = [name for name in ("party", "bucket", "commit", "turn", "whole") if name in rows.schema.names]
    found = pl.from_arrow(rows.select(names))
    assert isinstance(found, pl.DataFrame)
    return found.with_row_index("row")


def _taken(table: pa.Table, frame: pl.DataFrame) -> Iterator[pa.RecordBatch]:
    chosen = table.take(pa.array(frame["row"].sort().to_numpy())).combine_chunks()
    yield from chosen.to_batches()
