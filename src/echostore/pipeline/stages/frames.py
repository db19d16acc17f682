"""Rows here or in Spark, alike: the calls by which the stages speak with an engine.

    spark is given      rows are DataFrames (or small tables, where a step is better done on the driver)
    spark is None       rows are tables, and a task is called where the job is driven

Spark deals rows out and brings them together; the tasks are the same functions of Arrow batches on both engines. What a
verb below does to a DataFrame it does to a table, as far as a table has such a thing: one has no partitions to deal out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What runs in a worker: a function of a module of ours, or a small object with its parameters. It travels by name."""

Rows = Any
"""A table here (pa.Table), or a DataFrame of Spark."""


def mapped(rows: Rows, task: Task, schema: pa.Schema) -> Rows:
    """Rows through a task, as rows of a schema: each partition of a DataFrame in a worker, a table as a whole and here."""
    if isinstance(rows, pa.Table):
        return pa.Table.from_batches(task(iter(rows.combine_chunks().to_batches())), schema)
    from pyspark.sql.pandas.types import from_arrow_schema

    return rows.mapInArrow(task, from_arrow_schema(schema))


def frame_of(spark: Any, table: pa.Table) -> Rows:
    """A table of the driver as a DataFrame; without Spark, itself."""
    if spark is None:
        return table
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(table, from_arrow_schema(table.schema))


def as_frame(spark: Any, rows: Rows) -> Rows:
    return frame_of(spark, rows) if isinstance(rows, pa.Table) else rows


def width_of(spark: Any) -> int:
    """How many tasks run at the same time."""
    return 1 if spark is None else int(spark.sparkContext.defaultParallelism)


def repartitioned(rows: Rows, partitions: int, *keys: str) -> Rows:
    """Rows dealt out to so many tasks, those with the same keys to one of them."""
    return rows if isinstance(rows, pa.Table) else rows.repartition(partitions, *keys)


def sorted_within(rows: Rows, *keys: str) -> Rows:
    """Rows that ascend by keys, in each partition."""
    if isinstance(rows, pa.Table):
        return rows.sort_by([(key, "ascending") for key in keys])
    return rows.sortWithinPartitions(*keys)


def united(one: Rows, other: Rows) -> Rows:
    """The rows of two, both here or both in Spark."""
    if isinstance(one, pa.Table):
        return pa.concat_tables([one, other.select(one.column_names).cast(one.schema)])
    return one.unionByName(other)


def chosen(rows: Rows, names: list[str]) -> Rows:
    """Rows with some of their columns."""
    return rows.select(names) if isinstance(rows, pa.Table) else rows.select(*names)


def gathered(rows: Rows) -> pa.Table:
    return rows if isinstance(rows, pa.Table) else rows.toArrow()


def collected(rows: Rows) -> list[Any]:
    """A few rows on the driver; the value of a column is asked for by its name."""
    return list(rows.to_pylist() if isinstance(rows, pa.Table) else rows.collect())


def released(rows: Rows) -> None:
    """Frees what Spark keeps of a result."""
    if not isinstance(rows, pa.Table):
        rows.unpersist()
