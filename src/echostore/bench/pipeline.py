"""The pipeline: verified builds, an increment of 1 %, a skewed party, mixed models, growth, memory, bytes to the driver.

Everything runs in one session on local[2], with the settings of real jobs; the first build of all is a warm-up. The floor
of a build scans the same Parquet, shuffles it once and writes it back. The floor of mixed models folds the same operations
by the models alone, in two processes. ECHOSTORE_BENCH_MESSAGES sets the size.
"""

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echostore.bench import Measure
from echostore.bench.process_tree import Watch

MESSAGES = 300_000
LARGE = 1_000_000
"""From here on what any run costs is no matter; below, it is taken off an increment, which would be nothing else."""
FEEDS = 50
MESSAGES_PER_ITEM = 50
MIX = (("property-set", 40), ("text", 30), ("growable-array", 20), ("threaded-log", 10))
LAST = 0.01
GOAL_BUILD, GOAL_INCREMENT, GOAL_SKEW, GOAL_MIXED, GOAL_GROWTH = 3.0, 0.15, 1.5, 2.0, 1.05
MEMORY_MAX = 6 << 30

Narrate = Callable[[str], None]


def measure(folder: Path, narrate: Narrate) -> list[Measure]:
    from echostore.pipeline.session import SparkOptions, spark_session

    messages = int(os.environ.get("ECHOSTORE_BENCH_MESSAGES", MESSAGES))
    with spark_session("bench", SparkOptions(master="local[2]")) as spark, Watch() as watch:
        bench = _Bench(spark, folder, messages, narrate)
        bench.warm_up()
        found = [*bench.even(), bench.skewed(), bench.mixed(), bench.growth(), bench.driver()]
    memory = watch.peak_bytes
    detail = f"{memory / 2**30:.2f} GiB of driver, JVM and workers at the most, 6 GiB are allowed"
    return [*found, Measure("pipeline-memory", memory / MEMORY_MAX, 1.0, detail)]


@dataclass(slots=True)
class _Bench:
    spark: Any
    folder: Path
    messages: int
    narrate: Narrate
    driver_bytes: int = 0
    times: dict[int, float] = field(default_factory=dict)
    """Messages -> seconds of a full build."""

    def warm_up(self) -> None:
        self.narrate("pipeline: warming up")
        lake = self._lake("warm", 5_000)
        self._build(lake, "warm-out")
        self._floor(lake)
        self._forget("warm-out")

    def next_to_nothing(self) -> float:
        """What any run costs, as warm as the session is by now: the better of two builds of the small lake."""
        times = []
        for _ in range(2):
            times.append(self._build(self.folder / "warm", "warm-out"))
            self._forget("warm-out")
        return min(times)

    def even(self) -> list[Measure]:
        """The full build against its floor, and the last percent on top of it."""
        lake = self._lake("even", self.messages, last=LAST)
        held_back = _hold_back_the_last(lake)
        self.narrate("pipeline: the floor")
        floor = self._floor(lake)
        self.narrate("pipeline: a full build")
        full = self.times[self.messages] = self._build(lake, "out")
        off = self.next_to_nothing() if self.messages < LARGE else 0.0
        held_back.rename(lake / "log" / held_back.name)
        self.narrate("pipeline: one percent more")
        increment = self._build(lake, "out")
        self._forget("even", "out")
        ratio = max(0.0, increment - off) / (full - off)
        note = f", without the {off:.1f} s that any run costs" if off else ""
        return [
            Measure(
                "pipeline-build",
                full / floor,
                GOAL_BUILD,
                f"{full:.1f} s against {floor:.1f} s, {self.messages:,} messages",
            ),
            Measure("pipeline-increment", ratio, GOAL_INCREMENT, f"{increment:.1f} s against {full:.1f} s{note}"),
        ]

    def skewed(self) -> Measure:
        lake = self._lake("skewed", self.messages, skew=0.5)
        self.narrate("pipeline: half of all messages on one item")
        seconds, even = self._build(lake, "skewed-out"), self.times[self.messages]
        self._forget("skewed", "skewed-out")
        return Measure("pipeline-skew", seconds / even, GOAL_SKEW, f"{seconds:.1f} s against {even:.1f} s")

    def mixed(self) -> Measure:
        from echostore.bench.model_folds import bare_folds_s

        # Texts and lists cost many times what properties do, to make and to fold; an item has as many messages as ever.
        messages = self.messages // (5 if self.messages >= LARGE else 3)
        lake = self._lake("mixed", messages, mix=MIX)
        self.narrate("pipeline: bare folds of mixed models")
        floor = bare_folds_s(lake)
        self.narrate("pipeline: a build of mixed models")
        seconds = self._build(lake, "mixed-out")
        self._forget("mixed", "mixed-out")
        detail = f"{seconds:.1f} s against {floor:.1f} s, {messages:,} messages"
        return Measure("pipeline-mixed", seconds / floor, GOAL_MIXED, detail)

    def growth(self) -> Measure:
        """The exponent of time over the number of messages: 1 is linear."""
        sizes = (self.messages // 5, self.messages * 5) if self.messages >= LARGE else (self.messages // 4,)
        for messages in sizes:
            name = f"growth-{messages}"
            lake = self._lake(name, messages)
            self.narrate(f"pipeline: a full build of {messages:,} messages")
            self.times[messages] = self._build(lake, f"{name}-out")
            self._forget(name, f"{name}-out")
        told = ", ".join(f"{messages:,} in {seconds:.1f} s" for messages, seconds in sorted(self.times.items()))
        return Measure("pipeline-growth", _exponent(self.times), GOAL_GROWTH, told)

    def driver(self) -> Measure:
        from echostore.pipeline.driver_bytes import DRIVER_BYTES_MAX

        detail = f"{self.driver_bytes / 1e6:.1f} MB came to the driver at the most, {DRIVER_BYTES_MAX >> 20} MiB may"
        return Measure("pipeline-driver", self.driver_bytes / DRIVER_BYTES_MAX, 1.0, detail)

    def _lake(self, name: str, messages: int, *, last: float = 0.0, **more: Any) -> Path:
        from echostore.pipeline.generate.lakes import generate
        from echostore.pipeline.generate.shape import Shape
        from echostore.pipeline.lake import Lake

        items = messages // MESSAGES_PER_ITEM
        self.narrate(f"pipeline: making a lake of {messages:,} messages, {FEEDS} feeds, {items:,} items")
        path = self.folder / name
        shape = Shape(feeds=FEEDS, messages=messages, items=items, **more)
        generate(shape, Lake.create(path), last=last, processes=2)
        return path

    def _build(self, lake: Path, out: str) -> float:
        from echostore.pipeline.run import RunRequest, run_pipeline

        before = time.perf_counter()
        done = run_pipeline(self.spark, RunRequest(lake=lake, out=self.folder / out, tables=()))
        seconds = time.perf_counter() - before
        assert done.new
        assert not done.failed
        self.driver_bytes = max(self.driver_bytes, done.driver_bytes)
        return seconds

    def _floor(self, lake: Path) -> float:
        """Scan, shuffle once by a key of the data, write back."""
        out = self.folder / "floor"
        before = time.perf_counter()
        frame = self.spark.read.option("recursiveFileLookup", "true").parquet(str(lake / "blocks"))
        frame.repartition(64, "link").write.parquet(str(out))
        seconds = time.perf_counter() - before
        shutil.rmtree(out)
        return seconds

    def _forget(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.folder / name)


def _hold_back_the_last(lake: Path) -> Path:
    """Take the last version out of a lake's log, to be put back later."""
    newest = max((lake / "log").iterdir())
    aside = lake.parent / newest.name
    shutil.move(newest, aside)
    return aside


def _exponent(times: dict[int, float]) -> float:
    """The slope of the line nearest to log time over log messages."""
    points = [(math.log(messages), math.log(seconds)) for messages, seconds in times.items()]
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    rise = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return rise / sum((x - middle_x) ** 2 for x, _ in points)
