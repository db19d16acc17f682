"""The pipeline: a verified build, an increment of 1 % and a skewed party, against a plain pass of Spark over the data.

The floor scans the same Parquet, shuffles it once and writes it back, in the same session. Everything runs on
local[2] with the settings of real jobs; the first pass of each is a warm-up. ECHOSTORE_BENCH_MESSAGES sets the size.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echostore.bench import Measure

MESSAGES = 300_000
FEEDS = 50
MESSAGES_PER_ITEM = 50
GOAL_BUILD, GOAL_INCREMENT, GOAL_SKEW = 3.0, 0.15, 1.5
LAST = 0.01

Narrate = Callable[[str], None]


def measure(folder: Path, narrate: Narrate) -> list[Measure]:
    from echostore.pipeline.session import SparkOptions, spark_session

    messages = int(os.environ.get("ECHOSTORE_BENCH_MESSAGES", MESSAGES))
    even, skewed = folder / "even", folder / "skewed"
    narrate(
        f"pipeline: making two lakes of {messages:,} messages, {FEEDS} feeds, {messages // MESSAGES_PER_ITEM:,} items"
    )
    _make(even, messages, skew=0.0, last=LAST)
    _make(skewed, messages, skew=0.5, last=0.0)
    held_back = _hold_back_the_last(even)
    with spark_session("bench", SparkOptions(master="local[2]")) as spark:
        narrate("pipeline: warming up")
        _make(folder / "warm", 5_000, skew=0.0, last=0.0)
        _build(spark, folder / "warm", folder / "warm-out")
        _floor(spark, folder / "warm", folder / "warm-floor")
        narrate("pipeline: the floor")
        floor = _floor(spark, even, folder / "floor")
        narrate("pipeline: a full build")
        full = _build(spark, even, folder / "out")
        narrate("pipeline: one percent more")
        held_back.rename(even / "log" / held_back.name)
        increment = _build(spark, even, folder / "out")
        narrate("pipeline: half of all messages on one item")
        skew = _build(spark, skewed, folder / "skewed-out")
    return [
        Measure(
            "pipeline-build", full / floor, GOAL_BUILD, f"{full:.1f} s against {floor:.1f} s, {messages:,} messages"
        ),
        Measure("pipeline-increment", increment / full, GOAL_INCREMENT, f"{increment:.1f} s against {full:.1f} s"),
        Measure("pipeline-skew", skew / full, GOAL_SKEW, f"{skew:.1f} s against {full:.1f} s"),
    ]


def _make(path: Path, messages: int, *, skew: float, last: float) -> None:
    from echostore.pipeline.generate.lakes import generate
    from echostore.pipeline.generate.shape import Shape
    from echostore.pipeline.lake import Lake

    shape = Shape(feeds=FEEDS, messages=messages, items=messages // MESSAGES_PER_ITEM, skew=skew)
    generate(shape, Lake.create(path), last=last)


def _hold_back_the_last(lake: Path) -> Path:
    """Take the last version out of a lake's log, to be put back later."""
    newest = max((lake / "log").iterdir())
    aside = lake.parent / newest.name
    shutil.move(newest, aside)
    return aside


def _build(spark: Any, lake: Path, out: Path) -> float:
    from echostore.pipeline.run import RunRequest, run_pipeline

    before = time.perf_counter()
    done = run_pipeline(spark, RunRequest(lake=lake, out=out, tables=()))
    assert done.new
    assert not done.failed
    return time.perf_counter() - before


def _floor(spark: Any, lake: Path, out: Path) -> float:
    """Scan, shuffle once by a key of the data, write back."""
    before = time.perf_counter()
    frame = spark.read.option("recursiveFileLookup", "true").parquet(str(lake / "blocks"))
    frame.repartition(64, "link").write.parquet(str(out))
    return time.perf_counter() - before
