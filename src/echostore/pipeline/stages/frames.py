"""DataFrames from Arrow and through Arrow: the two calls by which the stages speak with Spark."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What runs in a worker: a function of a module of ours, or a small object with its parameters. It travels by name."""


def mapped(frame: Any, task: Task, schema: pa.Schema) -> Any:
    """The frame's partitions through a task, as rows of a schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return frame.mapInArrow(task, from_arrow_schema(schema))


def frame_of(spark: Any, table: pa.Table) -> Any:
    """A table of the driver as a DataFrame."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(table, from_arrow_schema(table.schema))
