"""Rows of many parties, party by party: how the steps that need all of a party's feeds together are run.

Such a step gets a few rows per piece and never a block. Where they are few they are gathered and worked on where the job
is driven, which saves a handful of Spark jobs; where they are many, Spark brings the rows of each party together and
many tasks share the work. The step itself is the same function of batches that are sorted by party.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.pipeline.stages.frames import Rows, Task, as_frame, gathered, mapped, repartitioned, sorted_within

PARTY_TASK_BYTES = 16 << 20
"""What one task takes of tables that are small per party."""

HERE_ROWS_MAX = 100_000
"""Up to so many rows about pieces, feeds or buckets are gathered on the driver: some 20 MB."""


def run_by_party(spark: Any, parts: Mapping[str, Rows], task: Task, schema: pa.Schema, tasks: int) -> Rows:
    """A step over several tables, told apart by a column `kind`. With no tasks: here, and the result is a table."""
    if not tasks:
        tables = [_tagged(gathered(rows), kind) for kind, rows in parts.items()]
        table = pa.concat_tables(tables, promote_options="default").sort_by("party").combine_chunks()
        return pa.Table.from_batches(task(iter(table.to_batches())), schema)
    from pyspark.sql import functions as f

    found = None
    for kind, rows in parts.items():
        frame = as_frame(spark, rows).withColumn("kind", f.lit(kind))
        found = frame if found is None else found.unionByName(frame, allowMissingColumns=True)
    return mapped(together(found, tasks), task, schema).persist()


def together(frame: Any, partitions: int) -> Any:
    """The frame with all rows of a party in one partition, side by side."""
    return sorted_within(repartitioned(frame, partitions, "party"), "party")


class Tables:
    """Tables of a stage by name, each here or in Spark; `frame` gives any of them as a DataFrame."""

    def __init__(self, spark: Any, rows: Mapping[str, Rows]) -> None:
        self.spark = spark
        self.rows = dict(rows)
        self._frames: dict[str, Any] = {}

    def frame(self, name: str) -> Any:
        if name not in self._frames:
            self._frames[name] = as_frame(self.spark, self.rows[name])
        return self._frames[name]


def parties(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[bytes, pa.Table]]:
    """The rows of each party of sorted batches."""
    held: list[pa.RecordBatch] = []
    at: bytes | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        coded = pc.run_end_encode(batch["party"])
        start = 0
        for party, end in zip(coded.values.to_pylist(), coded.run_ends.to_pylist(), strict=True):
            if party != at:
                if at is not None:
                    yield at, pa.Table.from_batches(held)
                at, held = party, []
            held.append(batch.slice(start, end - start))
            start = end
    if at is not None:
        yield at, pa.Table.from_batches(held)


def _tagged(table: pa.Table, kind: str) -> pa.Table:
    return table.append_column("kind", pa.array([kind], pa.string()).take(pa.array([0] * len(table), pa.int32())))
