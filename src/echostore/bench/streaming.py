"""Streaming: how long after a live peer wrote something it is in the item tables, and how fast a stream takes in a backlog.

A peer in a process of its own writes a thousand messages a second to its home; a stream publishes and follows them. The lag
is from the look at the home before the one that found a block, which is before it was written, to the published overlay.
The rate is that of micro-batches, against a full build of the same lake in the same session.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echostore.bench import Measure

if TYPE_CHECKING:
    from echostore.pipeline.streaming.stream import Progress

SECONDS = 20
RATE = 1_000
ITEMS = 500
APPEND = 25
"""Messages that the peer writes at once, forty times a second."""
BACKLOG_MESSAGES = 200_000
BACKLOG_LAST = 0.3
FEEDS = 20
MESSAGES_PER_ITEM = 50
GOAL_LAG_S = 5.0
GOAL_RATE = 1 / 0.3
WAIT_S = 300.0

Narrate = Callable[[str], None]


def measure(folder: Path, narrate: Narrate) -> list[Measure]:
    from echostore.pipeline.session import SparkOptions, spark_session

    with spark_session("bench", SparkOptions(master="local[2]")) as spark:
        return [_lag(spark, folder, narrate), _rate(spark, folder, narrate)]


def _lag(spark: Any, folder: Path, narrate: Narrate) -> Measure:
    from echostore.pipeline.streaming.stream import StreamRequest, run_stream

    seconds = int(os.environ.get("ECHOSTORE_BENCH_SECONDS", SECONDS))
    narrate(f"streaming: a peer writes {RATE:,} messages a second for {seconds} s")
    command = [sys.executable, "-m", "echostore.bench.streaming", str(folder / "home"), str(seconds)]
    steps: list[Progress] = []
    stop = threading.Event()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        asked, answers = writer.stdin, writer.stdout
        assert asked is not None
        assert answers is not None
        answers.readline()  # the party is there
        request = StreamRequest(lake=folder / "lake", out=folder / "out", home=folder / "home", trigger_s=0.5)
        wanted = RATE * seconds
        words = ["go\n", "first\n"]

        def tell(step: "Progress") -> None:
            # The first step finds what was there. One message then brings the query to life, which takes Spark a while,
            # and with its first micro-batch the peer begins.
            if words and step.batch >= 1 - len(words):
                asked.write(words.pop())
                asked.flush()
                return
            steps.append(step)
            if sum(each.rows for each in steps) >= wanted:
                stop.set()

        late = threading.Timer(WAIT_S, stop.set)
        late.start()
        run_stream(spark, request, tell=tell, note=narrate, stop=stop)
        late.cancel()
        writer.communicate()
    seen = sorted((step.lag_p95_s, step.rows) for step in steps if step.lag_p95_s is not None and step.rows)
    rows = sum(count for _, count in seen)
    assert rows >= wanted * 0.9, f"{rows} of {wanted} messages reached the tables in {WAIT_S:.0f} s"
    left = 0.95 * rows
    p95 = seen[-1][0]
    for lag, count in seen:
        left -= count
        if left <= 0:
            p95 = lag
            break
    longest = max(step.seconds for step in steps)
    detail = f"95 % in {p95:.2f} s or less, {rows:,} messages at {RATE:,} a second, {len(seen)} steps, longest {longest:.1f} s"
    return Measure("streaming-lag", p95 / GOAL_LAG_S, 1.0, detail)


def _rate(spark: Any, folder: Path, narrate: Narrate) -> Measure:
    from echostore.pipeline.generate.lakes import generate
    from echostore.pipeline.generate.shape import Shape
    from echostore.pipeline.lake import Lake
    from echostore.pipeline.run import RunRequest, run_pipeline
    from echostore.pipeline.streaming.following import Follower, changed_parties
    from echostore.pipeline.streaming.jobs import SparkJobs
    from echostore.pipeline.streaming.overlaying import Overlaying
    from echostore.pipeline.streaming.publishing import only_stream

    messages = int(os.environ.get("ECHOSTORE_BENCH_MESSAGES", BACKLOG_MESSAGES))
    narrate(f"streaming: a backlog of {BACKLOG_LAST:.0%} of {messages:,} messages")
    lake, out = folder / "backlog", folder / "backlog-out"
    shape = Shape(feeds=FEEDS, messages=messages, items=messages // MESSAGES_PER_ITEM)
    generate(shape, Lake.create(lake), last=BACKLOG_LAST)
    newest = max((lake / "log").iterdir())
    newest.rename(folder / newest.name)
    run_pipeline(spark, RunRequest(lake=lake, out=out))
    (folder / newest.name).rename(newest)
    with only_stream(out):
        follower = Follower(lake)
        overlaying = Overlaying(SparkJobs(spark), follower, out)
        end = follower.newest()
        started = time.perf_counter()
        folded = overlaying.advance(end, changed_parties({}, end))
        streaming = folded.blocks / (time.perf_counter() - started)
    narrate("streaming: a full build of the same lake")
    started = time.perf_counter()
    done = run_pipeline(spark, RunRequest(lake=lake, out=folder / "full"))
    batch = done.record.totals["messages"] / (time.perf_counter() - started)
    detail = f"{streaming:,.0f} messages a second in a micro-batch, {batch:,.0f} in a full build"
    return Measure("streaming-rate", batch / streaming, GOAL_RATE, detail)


def write_for(home: Path, seconds: int) -> None:
    """The peer: says that it is there, writes one message at the first word, and at the second many at an even pace."""
    import echostore

    with echostore.open(home, name="writer") as peer:
        party = peer.create_party("Live")
        items = [party.create("property-set", type="thing", number=number) for number in range(ITEMS)]
        party.flush()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        items[0]["number"] = -1
        party.flush()
        sys.stdin.readline()
        started = time.monotonic()
        for number in range(0, RATE * seconds, APPEND):
            time.sleep(max(0.0, started + number / RATE - time.monotonic()))
            for each in range(number, number + APPEND):
                items[each * 7 % ITEMS]["number"] = each
            party.flush()


if __name__ == "__main__":
    write_for(Path(sys.argv[1]), int(sys.argv[2]))
