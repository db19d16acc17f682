"""Stages with their times: what a run tells, and what a commit keeps of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from echostore.pipeline.driver_bytes import status_of_stages
from echostore.pipeline.output.record import StageTime


@dataclass(slots=True)
class Told:
    """What a stage says about itself when it is done."""

    rows: int = 0
    rows_before: int = 0
    """Of the stage that ran in the same job before it."""
    seconds_before: float | None = None
    """What that one took; None where Spark knows."""


class Clock:
    """Measures stages. A stage that several builds go through is told once, with sums."""

    def __init__(self, spark: Any = None, note: Callable[[str], None] | None = None) -> None:
        self._spark = spark
        self._note = note
        self._stages: dict[str, tuple[int, float]] = {}

    @contextmanager
    def stage(self, name: str, *, before: str = "") -> Iterator[Told]:
        """Time a stage. With `before`, the jobs in it do the work of two stages, of which the earlier is named so."""
        told = Told()
        first = self._newest_stage() if before else 0
        started = time.perf_counter()
        try:
            yield told
        finally:
            seconds = time.perf_counter() - started
            if before:
                earlier = told.seconds_before
                if earlier is None:
                    earlier = seconds * self._share_before(first)
                self._add(before, told.rows_before, earlier)
                seconds -= earlier
            self._add(name, told.rows, seconds)
        if self._note is not None:
            self._note(f"{name}: {told.rows:,} rows in {seconds:.1f} s")

    def times(self) -> tuple[StageTime, ...]:
        return tuple(StageTime(name, rows, round(seconds, 3)) for name, (rows, seconds) in self._stages.items())

    def _add(self, name: str, rows: int, seconds: float) -> None:
        rows_so_far, seconds_so_far = self._stages.get(name, (0, 0.0))
        self._stages[name] = rows_so_far + rows, seconds_so_far + seconds

    def _share_before(self, first: int) -> float:
        """What part of the tasks' time went to the sides of shuffles that send; the rest receives."""
        sending = total = 0
        for stage in self._spark_stages():
            if stage.stageId() > first:
                total += stage.executorRunTime()
                if stage.shuffleWriteBytes() > 0:
                    sending += stage.executorRunTime()
        return sending / total if total else 0.0

    def _newest_stage(self) -> int:
        return max((stage.stageId() for stage in self._spark_stages()), default=-1)

    def _spark_stages(self) -> Iterator[Any]:
        return status_of_stages(self._spark) if self._spark is not None else iter(())
