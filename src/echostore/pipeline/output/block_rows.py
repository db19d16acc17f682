"""Rows of the tables blocks and messages: one for each block of the lake. Written on demand.

Tasks read the columns they need of their runs from the lake themselves; payloads are decoded by column, and those that
can't be have zeros for what they would say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import FEED_ID_BYTES
from echostore.pipeline.lake.reading import read_rows
from echostore.pipeline.output.item_rows import hex_texts, repeated
from echostore.pipeline.output.table_schemas import BLOCKS, MESSAGES, MOMENT
from echostore.pipeline.schemas import RUNS
from echostore.pipeline.stages.frames import Rows, frame_of, mapped, repartitioned, width_of
from echostore.pipeline.stages.message_columns import read_columns

APPLIED, REJECTED, WAITING = "applied", "rejected", "waiting"

TASK_BLOCKS = 200_000

READER = "reader"
_RUN_COLUMNS = ["party", "feed", "control", "start", "end", "file", "row"]

_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""Moments that tables can show; a writer's clock may say anything."""


def block_table(spark: Any, lake: str, runs: pa.Table, commit: int) -> Rows:
    """Rows of the table blocks for runs of a lake."""
    return mapped(_spread(spark, runs), _Blocks(lake, commit), BLOCKS)


def message_table(spark: Any, lake: str, runs: pa.Table, control: Any, order: Any, commit: int) -> Rows:
    """Rows of the table messages for data runs of a lake, with what became of them."""
    if spark is None:
        return mapped(
            _judged_runs(runs, control.rows["admission"], order.rows["cuts"]), _Messages(lake, commit), MESSAGES
        )
    from pyspark.sql import functions as f

    cuts = order.cuts.filter("NOT control").select("party", "feed", "length", "held", "state")
    counted = control.admission.filter("NOT control AND role IS NOT NULL AND role <> 'reader'")
    intervals = counted.groupBy("party", "feed").agg(f.collect_list(f.struct("start", "end")).alias("intervals"))
    frame = _spread(spark, runs).join(cuts, ["party", "feed"], "left").join(intervals, ["party", "feed"], "left")
    return mapped(frame, _Messages(lake, commit), MESSAGES)


_JUDGED = pa.schema(
    [
        *(RUNS.field(name) for name in _RUN_COLUMNS),
        pa.field("length", pa.int64()),
        pa.field("held", pa.int64()),
        pa.field("state", pa.string()),
        pa.field("intervals", pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64())]))),
    ]
)
"""Runs, with where their feed is cut and which of its blocks count."""


def _judged_runs(runs: pa.Table, admission: pa.Table, cuts: pa.Table) -> pa.Table:
    """What `message_table` joins in Spark, of tables."""
    ends = {(row["party"], row["feed"]): row for row in cuts.to_pylist() if not row["control"]}
    intervals: dict[tuple[bytes, bytes], list[dict[str, Any]]] = {}
    for row in admission.to_pylist():
        if not row["control"] and row["role"] not in (None, READER):
            found = intervals.setdefault((row["party"], row["feed"]), [])
            found.append({"start": row["start"], "end": row["end"]})
    rows = []
    for run in runs.select(_RUN_COLUMNS).to_pylist():
        place = (run["party"], run["feed"])
        cut = ends.get(place, {})
        told = {name: cut.get(name) for name in ("length", "held", "state")}
        rows.append({**run, **told, "intervals": intervals.get(place)})
    return pa.Table.from_pylist(rows, _JUDGED)


def without_malformed(messages: Rows, refused: Rows) -> Rows:
    """Messages that were refused as a whole (`party, feed, seq`, with feed ids) are no longer called applied."""
    if isinstance(messages, pa.Table):
        return _marked_refused(messages, refused)
    from pyspark.sql import functions as f

    marked = refused.select(
        f.lower(f.hex("party")).alias("party"),
        f.lower(f.hex("feed")).alias("feed_id"),
        "seq",
        f.lit(True).alias("refused"),
    ).distinct()
    joined = messages.withColumn("feed_id", f.substring("feed", 1, 2 * FEED_ID_BYTES)).join(
        marked, ["party", "feed_id", "seq"], "left"
    )
    state = f.when(f.col("refused"), f.lit(REJECTED)).otherwise(f.col("state"))
    return joined.withColumn("state", state).select(*MESSAGES.names)


def _marked_refused(messages: pa.Table, refused: pa.Table) -> pa.Table:
    """The same of tables."""
    names = ("party", "feed", "seq")
    places = {
        (party.hex(), feed.hex(), seq)
        for party, feed, seq in zip(*(refused[n].to_pylist() for n in names), strict=True)
    }
    if not places:
        return messages
    columns = zip(*(messages[name].to_pylist() for name in (*names, "state")), strict=True)
    states = [
        REJECTED if (party, feed[: 2 * FEED_ID_BYTES], seq) in places else state for party, feed, seq, state in columns
    ]
    at = messages.column_names.index("state")
    return messages.set_column(at, MESSAGES.field("state"), pa.array(states, pa.string()))


def _spread(spark: Any, runs: pa.Table) -> Rows:
    blocks = int((runs["end"].to_numpy() - runs["start"].to_numpy()).sum())
    tasks = max(2 * width_of(spark), blocks // TASK_BLOCKS)
    return repartitioned(frame_of(spark, runs.cast(RUNS).select(_RUN_COLUMNS)), tasks, "file", "row")


@dataclass(frozen=True)
class _Blocks:
    """The task: rows of blocks."""

    lake: str
    commit: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        columns = ("seq", "link", "depth", "payload", "signature")
        for run, rows in _rows(self.lake, batches, columns):
            count = rows.num_rows
            yield pa.record_batch(
                [
                    repeated(run["party"].hex(), count),
                    repeated(run["feed"].hex(), count),
                    pa.array(np.full(count, run["control"])),
                    rows.column("seq"),
                    hex_texts(rows.column("link")),
                    rows.column("depth"),
                    pc.binary_length(rows.column("payload")).cast(pa.int64()),
                    rows.column("signature").is_valid(),
                    pa.array(np.full(count, self.commit)),
                ],
                schema=BLOCKS,
            )


@dataclass(frozen=True)
class _Messages:
    """The task: rows of messages."""

    lake: str
    commit: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for run, rows in _rows(self.lake, batches, ("seq", "depth", "payload")):
            count = rows.num_rows
            times, operations, dependencies = said(rows.column("payload"))
            yield pa.record_batch(
                [
                    repeated(run["party"].hex(), count),
                    repeated(run["feed"].hex(), count),
                    rows.column("seq"),
                    rows.column("depth"),
                    pa.array(times).cast(MOMENT),
                    pa.array(operations),
                    pa.array(dependencies),
                    pc.binary_length(rows.column("payload")).cast(pa.int64()),
                    states(run, rows.column("seq").to_numpy()),
                    pa.array(np.full(count, self.commit)),
                ],
                schema=MESSAGES,
            )


def _rows(
    lake: str, batches: Iterator[pa.RecordBatch], columns: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    runs = [run for batch in batches for run in batch.to_pylist()]
    for run in sorted(runs, key=lambda run: (run["file"], run["row"])):
        for rows in read_rows(lake, run["file"], run["row"], run["row"] + run["end"] - run["start"], columns):
            if rows.num_rows:
                yield run, rows


def said(payloads: pa.Array) -> tuple[Any, Any, Any]:
    """Microseconds of the writer's clock, operations and dependencies of each message; zeros of what can't be read."""
    try:
        messages = read_columns("Message", payloads)
    except ValueError:
        if len(payloads) == 1:
            nothing = np.zeros(1, np.int64)
            return nothing, nothing, nothing
        middle = len(payloads) // 2
        low, high = said(payloads.slice(0, middle)), said(payloads.slice(middle))
        times, operations, dependencies = map(np.concatenate, zip(low, high, strict=True))
        return times, operations, dependencies
    times = np.clip(messages.column("time_ms").to_numpy(zero_copy_only=False), _FIRST_MS, _LAST_MS) * 1000
    operations = np.diff(messages.column("operations").offsets.to_numpy()).astype(np.int64)
    dependencies = np.diff(messages.column("dependency_seqs").offsets.to_numpy()).astype(np.int64)
    return times, operations, dependencies


def states(run: dict[str, Any], seqs: Any) -> pa.Array:
    """What became of the blocks of a run: by the feed's cut, and by the intervals that count."""
    found = np.full(len(seqs), REJECTED, dtype=object)
    if run["length"] is not None:
        if run["state"] != "ended":
            found[(seqs >= run["length"]) & (seqs < run["held"])] = WAITING
        for interval in run["intervals"] or ():
            end = run["length"] if interval["end"] is None else min(interval["end"], run["length"])
            found[(seqs >= interval["start"]) & (seqs < end)] = APPLIED
    return pa.array(found, pa.string())
