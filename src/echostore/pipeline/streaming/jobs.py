"""How the tasks of a stream are run: one job on Spark for each, few tasks in it."""

import heapq
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from echostore.pipeline.stages.frames import Task, frame_of, mapped


class Jobs(Protocol):
    """Runs a task over rows, which it spreads over as many workers as `width` says."""

    @property
    def width(self) -> int: ...

    def run(self, rows: pa.Table, task: Task, schema: pa.Schema) -> list[Any]:
        """What the task says of all rows; equal parts of them go to the workers."""
        ...


class SparkJobs:
    """On Spark. A job without a shuffle, and with Python workers that live on: some hundred milliseconds."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    @property
    def width(self) -> int:
        return max(1, int(self._spark.sparkContext.defaultParallelism))

    def run(self, rows: pa.Table, task: Task, schema: pa.Schema) -> list[Any]:
        # A table of the driver is cut into as many equal parts as there are cores.
        return list(mapped(frame_of(self._spark, rows), task, schema).collect())


def dealt(loads: Sequence[int], width: int) -> list[int]:
    """Rows with these loads in a sequence of which equal parts, as jobs cut them, are about equally much work."""
    if width == 1 or len(loads) <= width:
        return list(range(len(loads)))
    size = -(-len(loads) // width)
    parts: list[list[int]] = [[] for _ in range(width)]
    # The last part is shorter where the rows do not fill all parts.
    room = [max(0, min(size, len(loads) - size * at)) for at in range(width)]
    heap = [(0, at) for at in range(width) if room[at]]
    for row in sorted(range(len(loads)), key=lambda row: -loads[row]):
        load, at = heapq.heappop(heap)
        parts[at].append(row)
        if len(parts[at]) < room[at]:
            heapq.heappush(heap, (load + loads[row], at))
    return [row for part in parts for row in part]
