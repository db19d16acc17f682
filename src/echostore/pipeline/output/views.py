"""The tables of a commit as Spark DataFrames and SQL views: what an analyst reads.

views = open_views(spark, "OUT")               # every table of the newest commit, also as a temporary view
views["items"].groupBy("type").count()
spark.sql("SELECT type, count(*) FROM items GROUP BY type")

Files are compared with their hashes by the tasks that are going to read them, before the first row. Rows that a later
commit replaced are left out here: of an item the row of the highest commit counts, and its properties and links of the
same commit with it; of all other tables, those of the last commit that built their party.

Where a stream keeps the output fresh, its overlay (`output.overlay`) lies over the newest commit: items, properties and
links are those of the stream, all other tables those of the commit.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from echostore.kernel.errors import Corrupt, NotFound, UsageError
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import checked_path
from echostore.pipeline.output.layout import parse_file
from echostore.pipeline.output.overlay import PLACED, Overlay, freshest
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.table_schemas import ITEMS, PARTIES, PLACEMENTS, TABLES, table_kind
from echostore.pipeline.stages.frames import frame_of, mapped

CHECK_HERE_BYTES = 64 << 20
"""Less than this is hashed on the driver; a job would take longer to start."""

_FILES = pa.schema([("path", pa.string()), ("sha256", pa.string()), ("bytes", pa.int64()), ("rows", pa.int64())])
_PROBLEMS = pa.schema([("problem", pa.string())])


def open_views(
    spark: Any, out: str | Path, *, commit: int | None = None, tables: Iterable[str] | None = None
) -> dict[str, Any]:
    """The tables by name, each also registered as a temporary view. Of the newest commit unless one is named."""
    folder = Path(out)
    overlay: Overlay | None = None
    if commit is not None:
        found: Commit | None = reading.load(folder, commit)[0]
    else:
        found, overlay = freshest(folder)
    if found is None:
        raise NotFound(f"there is no commit in {out}", next_step="Run `echostore pipeline run` first.")
    wanted = tuple(TABLES) if tables is None else tuple(tables)
    for name in wanted:
        if name not in TABLES:
            raise UsageError(f"there is no table {name!r}", next_step=f"Tables: {', '.join(TABLES)}.")
    stored = _Stored(spark, folder, found, overlay)
    views = {}
    for name in wanted:
        frame = _view(stored, name)
        if frame is not None:
            frame.createOrReplaceTempView(name)
            views[name] = frame
    parties = stored.frame("parties", PARTIES)
    if parties is not None:
        views["parties"] = _newest(parties, ["party"]).drop("root", "control", "since", "built", "commit")
        views["parties"].createOrReplaceTempView("parties")
    return views


class _Stored:
    """The stored rows of one commit."""

    def __init__(self, spark: Any, out: Path, commit: Commit, overlay: Overlay | None = None) -> None:
        self.spark = spark
        self.out = out
        self.commit = commit
        self.overlay = overlay

    def frame(self, kind: str, schema: pa.Schema) -> Any:
        """All rows of a kind, as they were written; None where the commit has no files of it."""
        return self._rows(self.commit.files.get(kind, ()), schema)

    def fresher(self, kind: str, schema: pa.Schema) -> Any:
        """The rows of a kind that a stream wrote on top of the commit; None where it has none."""
        return None if self.overlay is None else self._rows(self.overlay.files(kind), schema)

    def _rows(self, files: tuple[NamedFile, ...], schema: pa.Schema) -> Any:
        if not files:
            return None
        check_files(self.spark, self.out, files)
        paths = [str(self.out / file.path) for file in files]
        # Folder names like epoch=3 are ours, and no columns.
        return self.spark.read.schema(self.empty(schema).schema).option("recursiveFileLookup", "true").parquet(*paths)

    def written_at_once(self, kind: str) -> bool:
        """Whether the first commit wrote all files of a kind: then no row replaces another."""
        parsed = [parse_file(file.path) for file in self.commit.files.get(kind, ())]
        return {each[0] for each in parsed if each is not None} <= {1}

    def empty(self, schema: pa.Schema) -> Any:
        return frame_of(self.spark, schema.empty_table())


def _view(stored: _Stored, name: str) -> Any:
    schema = TABLES[name]
    frame = stored.frame(table_kind(name), schema)
    if name in ("items", "properties", "links") and stored.fresher(table_kind("items"), ITEMS) is not None:
        return _fresh(stored, name, frame)
    if frame is None:
        # A table that was built and is empty is shown; one that nobody asked for is not there.
        return _shown(stored.empty(schema), name) if name in stored.commit.settings.get("tables", ()) else None
    if name == "items":
        frame = _counting(stored, frame).where("NOT gone")
        placements = stored.frame(table_kind("placements"), PLACEMENTS)
        frame = _placed(frame, None if placements is None else _of_last_build(stored, placements))
    elif name in ("properties", "links"):
        if not stored.written_at_once(table_kind("items")):
            items = stored.frame(table_kind("items"), TABLES["items"])
            newest = _counting(stored, items).where("NOT gone").select("party", "item", "commit")
            frame = frame.join(newest, ["party", "item", "commit"], "left_semi")
    elif name in ("members", "rejects", "messages", "blocks"):
        frame = _of_last_build(stored, frame)
    return _shown(frame, name)


def _fresh(stored: _Stored, name: str, below: Any) -> Any:
    """A table of items with what a stream says on top: of an item that it has, nothing of the commit counts."""
    schema = TABLES[name]
    items = _newest(stored.fresher(table_kind("items"), ITEMS), ["party", "item"])
    known = items.select("party", "item")
    above = items if name == "items" else stored.fresher(table_kind(name), schema)
    if above is None:
        above = stored.empty(schema)
    elif name != "items":
        above = above.join(
            items.where("NOT gone").select("party", "item", "commit"), ["party", "item", "commit"], "left_semi"
        )
    if below is not None:
        if not stored.written_at_once(table_kind("items")):
            counting = _counting(stored, stored.frame(table_kind("items"), ITEMS))
            below = below.join(counting.select("party", "item", "commit"), ["party", "item", "commit"], "left_semi")
        above = above.unionByName(below.join(known, ["party", "item"], "left_anti").select(*schema.names))
    if name == "items":
        above = _placed(above.where("NOT gone"), _fresh_placements(stored))
    return _shown(above, name)


def _fresh_placements(stored: _Stored) -> Any:
    """Where moved items hang: of each party as the stream says, if it says anything of it."""
    below = stored.frame(table_kind("placements"), PLACEMENTS)
    below = None if below is None else _of_last_build(stored, below)
    placed = stored.fresher("placed", PLACED)
    if placed is None:
        return below
    told = placed.groupBy("party").agg({"number": "max"}).withColumnRenamed("max(number)", "commit")
    above = stored.fresher(table_kind("placements"), PLACEMENTS)
    above = stored.empty(PLACEMENTS) if above is None else above.join(told, ["party", "commit"], "left_semi")
    if below is None:
        return above
    return above.unionByName(below.join(told.select("party"), "party", "left_anti"))


def _counting(stored: _Stored, items: Any) -> Any:
    """Of each item the row that counts: the one of the highest commit, since its party was last built from scratch."""
    if stored.written_at_once(table_kind("items")):
        return items
    since = _newest(stored.frame("parties", PARTIES), ["party"]).where("since > 1").select("party", "since")
    items = items.join(since, "party", "left").where("since IS NULL OR commit >= since").drop("since")
    return _newest(items, ["party", "item"])


def _newest(frame: Any, keys: list[str]) -> Any:
    """Of each key the row with the highest commit."""
    last = frame.groupBy(*keys).agg({"commit": "max"}).withColumnRenamed("max(commit)", "commit")
    return frame.join(last, [*keys, "commit"], "left_semi")


def _of_last_build(stored: _Stored, frame: Any) -> Any:
    """Rows of the last commit that built their party. A build writes all of them anew."""
    if stored.written_at_once("parties"):
        return frame
    parties = _newest(stored.frame("parties", PARTIES), ["party"])
    last = parties.select("party", parties["built"].alias("commit"))
    return frame.join(last, ["party", "commit"], "left_semi")


def _placed(items: Any, placements: Any) -> Any:
    """Items with the parent that they have now: the one of their genesis, unless they were moved."""
    from pyspark.sql import functions as f

    if placements is None:
        return items.withColumn("parent", f.col("created_in")).withColumn(
            "embedded_in", f.array().cast("array<string>")
        )
    moved = placements.select(
        "party", "item", f.col("parent").alias("moved_to"), "embedded_in", f.lit(True).alias("moved")
    )
    joined = items.join(moved, ["party", "item"], "left")
    parent = f.when(f.col("moved"), f.col("moved_to")).otherwise(f.col("created_in"))
    embedded = f.coalesce("embedded_in", f.array().cast("array<string>"))
    return joined.withColumn("parent", parent).withColumn("embedded_in", embedded).drop("moved_to", "moved")


def _shown(frame: Any, name: str) -> Any:
    if name == "items" and "parent" not in frame.columns:
        frame = _placed(frame, None)
    return frame.drop("gone") if name == "runs" else frame.drop("commit", "gone")


# hashes


def check_files(spark: Any, out: Path, files: Iterable[NamedFile]) -> None:
    """Compare files with their hashes; Corrupt names the first that differs. Much is done by tasks, little here."""
    named = list(files)
    if sum(file.bytes for file in named) <= CHECK_HERE_BYTES:
        for file in named:
            checked_path(out, file)
        return
    rows = pa.Table.from_pylist(
        [{"path": file.path, "sha256": file.sha256, "bytes": file.bytes, "rows": file.rows} for file in named], _FILES
    )
    frame = frame_of(spark, rows).repartition(min(len(named), 4 * spark.sparkContext.defaultParallelism))
    problems = mapped(frame, _Checking(str(out)), _PROBLEMS).limit(1).collect()
    if problems:
        raise Corrupt(problems[0]["problem"], next_step="Restore the file from a copy, or run into a new folder.")


class _Checking:
    """The task: hash some files."""

    def __init__(self, out: str) -> None:
        self.out = out

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        problems = []
        for batch in batches:
            for row in batch.to_pylist():
                try:
                    checked_path(self.out, NamedFile(**row))
                except Corrupt as error:
                    problems.append(error.what)
        yield pa.record_batch([pa.array(problems, pa.string())], schema=_PROBLEMS)
