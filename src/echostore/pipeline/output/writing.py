"""Jobs that write files of an attempt: tasks write and hash, the driver learns the names.

A task returns one row of `NAMED` for each file it wrote. A task that runs twice returns rows twice to Spark, which takes
those of one run: the files of the other are garbage that no commit names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from echostore.pipeline.output.files import read_table, write_file
from echostore.pipeline.output.item_rows import item_tables
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PROPERTIES, table_kind
from echostore.pipeline.schemas import ITEM_STATES
from echostore.pipeline.stages.bundles import BUNDLES, packed
from echostore.pipeline.stages.frames import Rows, chosen, frame_of, mapped, repartitioned, width_of

NAMED = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)

STATE_ROWS = 8192
"""Item states that a task turns into rows at once: a few megabytes, unless the items are large."""

FILE_ROWS_MAX = 2_000_000
"""Rows of one file. A task that has more begins another."""

Collect = Callable[[Any], list[Any]]
"""How a small DataFrame comes to the driver; the run counts what passes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where tasks write: the output folder and an attempt's folder in it."""

    out: str
    folder: str

    def write(self, kind: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> NamedFile | None:
        return write_file(self.out, self.folder, kind, schema, batches)


def named_rows(files: Mapping[str, Iterable[NamedFile]]) -> pa.RecordBatch:
    """Files as rows of NAMED."""
    rows = [
        {"kind": kind, "path": file.path, "sha256": file.sha256, "bytes": file.bytes, "rows": file.rows}
        for kind, named in files.items()
        for file in named
    ]
    return pa.RecordBatch.from_pylist(rows, NAMED)


def named_files(rows: Iterable[Any]) -> dict[str, list[NamedFile]]:
    """Rows of NAMED, as Spark collects them, by kind."""
    found: dict[str, list[NamedFile]] = {}
    for row in rows:
        file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
        found.setdefault(row["kind"], []).append(file)
    return found


def write_frame(rows: Rows, place: Place, kind: str, schema: pa.Schema, collect: Collect) -> list[NamedFile]:
    """Write rows as files of one kind, one or more for each of their partitions."""
    named = collect(mapped(chosen(rows, schema.names), _WritingRows(place, kind, schema), NAMED))
    return named_files(named).get(kind, [])


def write_frames(
    spark: Any, place: Place, frames: Mapping[str, tuple[Rows, pa.Schema]], collect: Collect, *, apart: bool = False
) -> dict[str, list[NamedFile]]:
    """Write rows as files of their kinds. Small ones in one job, with few files each; `apart`: a job for each, and
    files by partition."""
    if apart or spark is None:
        return {kind: write_frame(frame, place, kind, schema, collect) for kind, (frame, schema) in frames.items()}
    bundled = None
    for kind, (frame, schema) in frames.items():
        rows = mapped(frame.select(*schema.names), _Bundling(kind), BUNDLES)
        bundled = rows if bundled is None else bundled.unionByName(rows)
    schemas = tuple((kind, schema) for kind, (_, schema) in frames.items())
    few = bundled.coalesce(width_of(spark))  # type: ignore[union-attr]  # not empty
    return named_files(collect(mapped(few, _WritingBundles(place, schemas), NAMED)))


@dataclass(frozen=True)
class _Bundling:
    """The task: rows of one kind as bytes, so that kinds can travel together."""

    kind: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield pa.record_batch([[self.kind], [packed(batch)]], schema=BUNDLES)


@dataclass(frozen=True)
class _WritingBundles:
    """The task: bundles into files, one for each kind."""

    place: Place
    schemas: tuple[tuple[str, pa.Schema], ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: dict[str, list[pa.RecordBatch]] = {kind: [] for kind, _ in self.schemas}
        for batch in batches:
            for kind, rows in zip(batch["name"].to_pylist(), batch["rows"], strict=True):
                with pa.ipc.open_stream(rows.as_buffer()) as stream:
                    held[kind].extend(stream)
        files = {kind: self.place.write(kind, schema, held[kind]) for kind, schema in self.schemas}
        yield named_rows({kind: [file] for kind, file in files.items() if file is not None})


def write_item_tables(
    spark: Any,
    place: Place,
    states: Iterable[NamedFile],
    commit: int,
    *,
    models: str | None,
    tables: Iterable[str],
    collect: Collect,
    superseded: Mapping[str, frozenset[tuple[bytes, bytes]]] | None = None,
) -> dict[str, list[NamedFile]]:
    """The tables items, properties and links of files of changed item states (`schemas.ITEM_STATES`).

    `superseded` says by path which items of a file were folded again later in the same run.
    """
    named = list(states)
    wanted = tuple(name for name in ITEM_TABLES if name in tables)
    if not named or not wanted:
        return {}
    frame = frame_of(spark, pa.Table.from_batches([named_rows({"states": named})]))
    tasks = min(len(named), 8 * width_of(spark))
    task = WritingTables(place, commit, models, wanted, superseded or {})
    return named_files(collect(mapped(repartitioned(frame, tasks), task, NAMED)))


ITEM_TABLES = {"items": ITEMS, "properties": PROPERTIES, "links": LINKS}


@dataclass(frozen=True)
class _WritingRows:
    """The task: rows into files of one kind."""

    place: Place
    kind: str
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stream = iter(batches)
        files = []
        while (file := self.place.write(self.kind, self.schema, _up_to(stream, FILE_ROWS_MAX))) is not None:
            files.append(file)
        yield named_rows({self.kind: files})


def _up_to(stream: Iterator[pa.RecordBatch], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Batches with some rows in all, at least one if there is one."""
    rows = 0
    for batch in stream:
        yield batch
        rows += batch.num_rows
        if rows >= rows_max:
            return


@dataclass(frozen=True)
class WritingTables:
    """The task: files of item states into files of tables."""

    place: Place
    commit: int
    models: str | None
    tables: tuple[str, ...]
    superseded: Mapping[str, frozenset[tuple[bytes, bytes]]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from echostore.pipeline.models import model_factory

        factory = model_factory(self.models)
        rows: dict[str, list[pa.RecordBatch]] = {name: [] for name in self.tables}
        for file in (file for batch in batches for file in named_files(batch.to_pylist())["states"]):
            states = _without(read_table(self.place.out, file, ITEM_STATES), self.superseded.get(file.path))
            # Row groups are buckets, and small: together they make fewer and larger batches.
            for part in states.combine_chunks().to_batches(max_chunksize=STATE_ROWS):
                made = item_tables(part, self.commit, factory)
                for name in self.tables:
                    rows[name].append(made[name])
        files = {name: self.place.write(table_kind(name), ITEM_TABLES[name], rows[name]) for name in self.tables}
        yield named_rows({table_kind(name): [file] for name, file in files.items() if file is not None})


def _without(states: pa.Table, items: frozenset[tuple[bytes, bytes]] | None) -> pa.Table:
    """States without those of some items."""
    if not items:
        return states
    places = zip(states["party"].to_pylist(), states["item"].to_pylist(), strict=True)
    return states.filter(pa.array([place not in items for place in places], pa.bool_()))
