"""The tables of a commit as Arrow, without Spark: the rows that count, as `output.views` shows them on Spark.

    of an item              the row of the stream, if it has one; else that of the highest commit since its party was
                            built from scratch; none when that row says that the item is gone
    properties, links       the rows that came with the row of their item that counts
    all other tables        the rows of the last build of their party

A table is read in parts, each some files: a reader that has many cores takes one part for each. To know whether a row of a
part counts, the keys of the items in it are looked up in the other files, and nothing else of these is read. Every file is
compared with its hash first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa

from echostore.kernel.errors import NotFound, UsageError
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.layout import parse_file
from echostore.pipeline.output.overlay import PLACED, Overlay, freshest
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.table_schemas import ITEMS, PARTIES, PLACEMENTS, TABLES, table_kind

PART_ROWS: Final = 1_000_000
"""Rows of a part, about: what a task keeps in memory."""
BATCH_ROWS: Final = 64 * 1024

OF_ITEMS: Final = ("items", "properties", "links")
BY_BUILD: Final = ("members", "rejects", "messages", "blocks")

_PLACED_COLUMNS: Final = [pa.field("parent", pa.string()), pa.field("embedded_in", pa.list_(pa.string()))]
_HIDDEN: Final = {"parties": ("root", "control", "since", "built", "commit"), "runs": ()}


def _shown(name: str, stored: pa.Schema) -> pa.Schema:
    fields = [field for field in stored if field.name not in _HIDDEN.get(name, ("commit", "gone"))]
    return pa.schema([*fields, *(_PLACED_COLUMNS if name == "items" else ())])


STORED: Final[dict[str, pa.Schema]] = {**TABLES, "parties": PARTIES}
SHOWN: Final[dict[str, pa.Schema]] = {name: _shown(name, schema) for name, schema in STORED.items()}
"""The columns of each table as its readers see them."""


def check_table(name: str) -> None:
    if name not in SHOWN:
        raise UsageError(f"there is no table {name!r}", next_step=f"Tables: {', '.join(SHOWN)}.")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a table. `above`: it is of the stream's overlay, whose rows count more than those of the commit."""

    file: NamedFile
    above: bool


@dataclass(frozen=True)
class StoredTables:
    """The tables of one commit, with the overlay of a stream if one lies over it. It travels to the tasks of a reader."""

    out: Path
    commit: Commit | None
    overlay: Overlay | None

    @staticmethod
    def open(out: str | Path, commit: int | None = None) -> "StoredTables":
        """Those of the newest commit and overlay, or of a commit that is named."""
        folder = Path(out)
        found = (reading.load(folder, commit)[0], None) if commit is not None else freshest(folder)
        if found == (None, None):
            raise NotFound(f"there is no commit in {out}", next_step="Run `echostore pipeline run` first.")
        return StoredTables(folder, *found)

    @property
    def names(self) -> tuple[str, ...]:
        """The tables that there are, also where they have no rows."""
        asked = self.commit.settings.get("tables", ()) if self.commit is not None else ()
        return tuple(name for name in SHOWN if self.files(name) or name in asked or name == "parties")

    def files(self, name: str) -> list[StoredFile]:
        check_table(name)
        return self._files("parties" if name == "parties" else table_kind(name))

    def read(self, name: str) -> pa.Table:
        """All rows of a table that count."""
        self.check(name)
        parts = [self.read_part(name, part) for part in self.parts(name)]
        return pa.concat_tables([SHOWN[name].empty_table(), *parts]).combine_chunks()

    def check(self, name: str) -> None:
        """Refuse a table that nobody asked a run for."""
        check_table(name)
        if name not in self.names:
            raise NotFound(
                f"the commit in {self.out} has no table {name}",
                next_step=f"It has {', '.join(self.names)}. Run the pipeline with --tables all for every table.",
            )

    def parts(self, name: str) -> Iterator[list[StoredFile]]:
        """The files of a table, some at a time."""
        part: list[StoredFile] = []
        rows = 0
        for each in self.files(name):
            if part and rows + each.file.rows > PART_ROWS:
                yield part
                part, rows = [], 0
            part.append(each)
            rows += each.file.rows
        if part:
            yield part

    def read_part(self, name: str, files: Iterable[StoredFile]) -> pa.Table:
        """The rows of some files that count."""
        given = list(files)
        stored = STORED[name]
        rows = pa.concat_tables([stored.empty_table(), *(read_table(self.out, one.file, stored) for one in given)])
        keys = self._keys(rows, given)
        if name in OF_ITEMS:
            keys = self._of_items(keys)
        elif name in BY_BUILD:
            keys = self._of_last_build(keys)
        elif name == "parties":
            keys = keys.join(self._newest_parties, on=["party", "commit"], how="semi")
        keys = keys.sort("row")
        found = rows.take(pa.array(keys["row"].to_numpy(), pa.int64()))
        if name == "items":
            found = self._placed(found, keys)
        return found.select(SHOWN[name].names).cast(SHOWN[name])

    # which rows count

    def _files(self, kind: str) -> list[StoredFile]:
        below = () if self.commit is None else self.commit.files.get(kind, ())
        above = () if self.overlay is None else self.overlay.files(kind)
        return [*(StoredFile(file, False) for file in below), *(StoredFile(file, True) for file in above)]

    def _keys(self, rows: pa.Table, files: list[StoredFile]) -> pl.DataFrame:
        """What tells rows apart, the place of each, and whether it is of the overlay."""
        names = [name for name in ("party", "item", "commit", "gone") if name in rows.column_names]
        found = _frame(rows.select(names)).with_row_index("row")
        above = [part for one in files for part in [one.above] * one.file.rows]
        return found.with_columns(above=pl.Series(above, dtype=pl.Boolean))

    def _of_items(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Rows of items, or of what belongs to items, that came with the row of the item that counts."""
        if self._written_at_once:
            return keys.filter(~pl.col("gone")) if "gone" in keys.columns else keys
        asked = keys.select("party", "item").unique()
        known = []
        for one in self._files(table_kind("items")):
            rows = read_table(self.out, one.file, ITEMS, columns=["party", "item", "commit", "gone"])
            frame = _frame(rows).join(asked, on=["party", "item"], how="semi")
            known.append(frame.select("party", "item", "commit", "gone", pl.lit(one.above).alias("above")))
        if not known:
            return keys.clear()
        every = pl.concat(known)
        if self.commit is not None:
            since = self._parties.filter(pl.col("since") > 1).select("party", "since")
            every = every.join(since, on="party", how="left")
            every = every.filter(pl.col("above") | pl.col("since").is_null() | (pl.col("commit") >= pl.col("since")))
        counting = every.sort("above", "commit").unique(["party", "item"], keep="last")
        counting = counting.filter(~pl.col("gone")).select("party", "item", "commit", "above")
        return keys.join(counting, on=["party", "item", "commit", "above"], how="semi")

    def _of_last_build(self, keys: pl.DataFrame) -> pl.DataFrame:
        last = self._parties.select("party", pl.col("built").alias("commit"))
        return keys.join(last, on=["party", "commit"], how="semi")

    @cached_property
    def _written_at_once(self) -> bool:
        """Whether the first commit wrote all rows of items: then no row replaces another."""
        files = self._files(table_kind("items"))
        parsed = [parse_file(one.file.path) for one in files]
        return not any(one.above for one in files) and {each[0] for each in parsed if each is not None} <= {1}

    @cached_property
    def _newest_parties(self) -> pl.DataFrame:
        rows = [read_table(self.out, one.file, PARTIES, columns=["party", "commit"]) for one in self.files("parties")]
        found = (
            _frame(pa.concat_tables(rows)) if rows else pl.DataFrame(schema={"party": pl.String, "commit": pl.Int64})
        )
        return found.group_by("party").agg(pl.col("commit").max())

    @cached_property
    def _parties(self) -> pl.DataFrame:
        """Since when rows of each party count, and when it was last built."""
        names = ["party", "commit", "since", "built"]
        rows = [read_table(self.out, one.file, PARTIES, columns=names).select(names) for one in self.files("parties")]
        empty = pa.schema([PARTIES.field(name) for name in names]).empty_table()
        return _frame(pa.concat_tables([empty, *rows])).join(self._newest_parties, on=["party", "commit"], how="semi")

    # where items hang

    def _placed(self, items: pa.Table, keys: pl.DataFrame) -> pa.Table:
        """Items with the parent that they have now: the one of their genesis, unless they were moved."""
        created = pl.Series(items["created_in"].to_pylist(), dtype=pl.String)
        frame = keys.select("party", "item").with_columns(created_in=created)
        moved = self._placements
        embedded: list[list[str]] = [[] for _ in range(len(items))]
        if moved is None:
            parents = items["created_in"]
        else:
            joined = frame.join(moved, on=["party", "item"], how="left", maintain_order="left")
            chosen = pl.when(pl.col("moved")).then(pl.col("parent")).otherwise(pl.col("created_in"))
            parents = pa.array(joined.select(chosen.alias("parent"))["parent"].to_list(), pa.string())
            embedded = [each or [] for each in joined["embedded_in"].to_list()]
        items = items.append_column(_PLACED_COLUMNS[0], parents)
        return items.append_column(_PLACED_COLUMNS[1], pa.array(embedded, pa.list_(pa.string())))

    @cached_property
    def _placements(self) -> pl.DataFrame | None:
        """Items that were moved or embedded: of each party as the stream says, if it says anything of it."""
        files = self._files(table_kind("placements"))
        if not files:
            return None
        rows = pa.concat_tables([read_table(self.out, one.file, PLACEMENTS) for one in files])
        keys = self._keys(rows, files)
        placed = () if self.overlay is None else self.overlay.files("placed")
        told = pl.concat(
            [
                pl.DataFrame(schema={"party": pl.String, "number": pl.Int64}),
                *(_frame(read_table(self.out, file, PLACED)) for file in placed),
            ]
        )
        told = told.group_by("party").agg(commit=pl.col("number").max())
        above = keys.filter(pl.col("above")).join(told, on=["party", "commit"], how="semi")
        below = self._of_last_build(keys.filter(~pl.col("above"))).join(told, on="party", how="anti")
        chosen = pl.concat([above, below])["row"].to_numpy()
        found = _frame(rows.take(pa.array(chosen, pa.int64())).select(["party", "item", "parent", "embedded_in"]))
        return found.with_columns(moved=pl.lit(True))


def _frame(rows: pa.Table) -> pl.DataFrame:
    found: Any = pl.from_arrow(rows)
    assert isinstance(found, pl.DataFrame)
    return found


def batches_of(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """A table as batches of a bounded size."""
    yield from table.to_batches(max_chunksize=BATCH_ROWS)
