"""The data source "echostore": batch and stream, over lakes and homes, with filters, limits and restarts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from echostore.kernel.errors import Corrupt, Refused, UsageError
from echostore.kernel.ids import PartyKey
from echostore.pipeline.lake import Lake, LakeWriter
from echostore.pipeline.lake.compact import compact
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.lake.reading import forget_files
from echostore.pipeline.lake.strands import Run, Strands, Tip
from echostore.pipeline.source import planning, register, timeframes
from echostore.pipeline.source.blocks_source import FilteredBlocksReader, Settings
from echostore.pipeline.source.timeframes import from_offset, to_offset
from echostore.pipeline.source.views import Chosen, HomeView, LakeView, View
from feed_builder import Writer, payloads
from spark.lake_builder import BlockId, HomeOf, block_ids, feed_rows, lake_blocks, many_parties, party_key, written


@pytest.fixture(scope="module")
def source(spark: Any) -> Any:
    register(spark)
    return spark


def forked_home(folder: Path) -> HomeOf:
    """Three parties; one feed has three branches, and every feed several heads."""
    home = HomeOf(folder)
    for number in range(3):
        control, data = Writer(f"control {number}", party_key(number)), Writer(f"data {number}", party_key(number))
        for step in range(4):
            home.hold(control, *payloads(2, f"{step}"), control=True)
            home.hold(data, *payloads(10, f"{step}"))
        if number == 1:
            for at, name in ((5, "left"), (8, "right")):
                branch = data.branch(at)
                branch.write(*payloads(6, name))
                home.receive(branch, start=0)
    return home


def collected(frame: Any) -> list[BlockId]:
    names = ("party", "feed", "control", "seq", "link", "payload")
    rows = (tuple(row[name] for name in names) for row in frame.collect())
    return sorted(tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in rows)  # type: ignore[misc]


def read_all(view: View, start: dict[str, Any], end: dict[str, Any]) -> list[BlockId]:
    stretches = planning.between(view, from_offset(start), from_offset(end))
    rows = [row for stretch in stretches for batch in stretch.read() for row in batch.to_pylist()]
    return block_ids(rows)


# batch


def test_a_lake_and_a_home_are_the_same_table(source: Any, tmp_path: Path) -> None:
    home = forked_home(tmp_path / "home")
    publish(home.path, tmp_path / "lake")
    expected = sorted(home.blocks())
    for option in ("home", "lake"):
        frame = source.read.format("echostore").option(option, str(tmp_path / option)).load()
        assert frame.schema.names == [
            "party",
            "feed",
            "control",
            "seq",
            "link",
            "depth",
            "payload",
            "signature",
            "previous",
            "previous_depth",
        ]
        assert collected(frame) == expected, option


def test_filters_are_pushed_down_and_answered_exactly(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.functions import col

    home = forked_home(tmp_path / "home")
    publish(home.path, tmp_path / "lake")
    blocks = sorted(home.blocks())
    feed = next(block[1] for block in blocks if block[0] == party_key(1) and not block[2])
    party = col("party")
    for condition, wanted in (
        (party == bytes(party_key(1)), lambda b: b[0] == party_key(1)),
        (party.isin(bytes(party_key(0)), bytes(party_key(2))), lambda b: b[0] != party_key(1)),
        ((col("feed") == feed) & (col("seq") >= 4) & (col("seq") < 9), lambda b: b[1] == feed and 4 <= b[3] < 9),
        ((col("seq") > 3) & (col("seq") <= 7), lambda b: 3 < b[3] <= 7),
        (col("seq") == 6, lambda b: b[3] == 6),
        (col("seq").isin(1, 6), lambda b: b[3] in (1, 6)),
        (col("control"), lambda b: b[2]),
        (~col("control"), lambda b: not b[2]),
        (col("control") & ~col("control"), lambda b: False),
        ((party == bytes(party_key(1))) & (party == bytes(party_key(2))), lambda b: False),
        ((party == bytes(party_key(1))) | (col("seq") == 0), lambda b: b[0] == party_key(1) or b[3] == 0),
    ):
        frame = source.read.format("echostore").option("lake", str(tmp_path / "lake")).load().where(condition)
        assert collected(frame) == [block for block in blocks if wanted(block)], condition


def test_a_pushed_filter_leaves_files_unread() -> None:
    """What a reader keeps of filters is what the lake is asked for; test_lake measures the bytes of that."""
    from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThanOrEqual

    reader = FilteredBlocksReader(Settings.of({"lake": "x"}))
    keys = [bytes(party_key(n)) for n in (1, 2)]
    asked = [
        In(("party",), tuple(keys)),
        EqualTo(("party",), keys[0]),
        GreaterThan(("seq",), 5),
        LessThanOrEqual(("seq",), 9),
        IsNotNull(("seq",)),
    ]
    assert list(reader.pushFilters(asked)) == [IsNotNull(("seq",))]
    assert reader._chosen == Chosen(frozenset(keys[:1]))
    assert (reader._seqs.start, reader._seqs.end) == (6, 10)


def test_partitions_are_ranges_of_feeds_and_each_says_what_it_follows(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PARTITION_BLOCKS", 7)
    home = forked_home(tmp_path / "home")
    publish(home.path, tmp_path / "lake")
    links = {(block[1], block[3], block[4]) for block in home.blocks()}
    for view in (HomeView(str(home.path), Chosen()), LakeView(str(tmp_path / "lake"), Chosen())):
        groups = list(planning.partitions(planning.between(view, {}, planning.newest(view))))
        assert len(groups) > 15
        assert all(sum(stretch.blocks for stretch in group) <= 7 for group in groups)
        rows: list[dict[str, Any]] = []
        for group in groups:
            for stretch in group:
                part = [row for batch in stretch.read() for row in batch.to_pylist()]
                assert len(part) == stretch.blocks
                first = part[0]
                assert [row["previous"] is None for row in part] == [False] + [True] * (len(part) - 1)
                before = (first["feed"], first["seq"] - 1, first["previous"])
                assert before in links if first["seq"] else first["previous"] == bytes(32)
                rows += part
        assert sorted(block_ids(rows)) == sorted(home.blocks())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "one of the options"),
        ({"lake": "a", "home": "b"}, "one of the options"),
        ({"lake": "a", "colour": "red"}, "no option 'colour'"),
        ({"lake": "a", "party": "12"}, "64 hex"),
        ({"lake": "a", "control": "maybe"}, "true or false"),
        ({"lake": "a", "maxBlocksPerTrigger": "0"}, "from 1 on"),
        ({"home": "a", "version": "1"}, "no versions"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Settings.of(options)


# strands


def test_strands_find_the_way_to_a_tip_across_branches_and_doubles() -> None:
    main = written("main", 10)
    left, right = main.branch(4), main.branch(4)
    left.write(*payloads(4, "left"))
    right = left.branch(6)
    right.write(*payloads(3, "right"))
    writers = {"main": main, "left": left, "right": right}

    def add(strands: Strands, name: str, start: int, end: int) -> None:
        writer = writers[name]
        previous = writer.links[start - 1] if start else bytes(32)
        strands.add(Run(start, end, previous, writer.links[end - 1]), (name, start))

    strands = Strands(lambda piece, seq: writers[piece.where[0]].links[seq])
    for step in (
        ("main", 0, 6),
        ("left", 4, 8),
        ("main", 6, 10),
        ("main", 2, 9),
        ("right", 6, 9),
        ("main", 0, 10),
        ("left", 2, 8),
    ):
        add(strands, *step)
    assert [(s.start, s.end, s.parent) for s in strands.strands] == [(0, 10, None), (4, 8, 0), (6, 9, 1)]
    tip = {name: Tip(len(w.links), w.links[-1][:8]) for name, w in writers.items()}
    assert strands.tips() == sorted(tip.values())
    assert strands.reach([]) == [0, 4, 6]
    assert strands.reach([tip["right"]]) == [4, 6, 9]
    assert strands.reach([Tip(5, main.links[4][:8]), tip["left"]]) == [5, 8, 6]
    assert strands.reach([Tip(5, b"elsewher")]) is None
    assert strands.tips_of([7, 8, 6]) == [Tip(7, main.links[6][:8]), Tip(8, left.links[7][:8])]


def test_a_run_that_goes_on_where_another_stops_and_overlaps_it_is_taken_once(tmp_path: Path) -> None:
    writer = written("feed", 20)
    lake = Lake.create(tmp_path / "lake")
    for start, end in ((0, 10), (5, 15), (12, 20)):
        LakeWriter(lake).write([feed_rows(writer, start, end)])
    view = LakeView(str(lake.path), Chosen())
    found = read_all(view, {}, to_offset(planning.newest(view)))
    assert [block[3] for block in found] == list(range(20))
    stretches = list(planning.between(view, {}, planning.newest(view)))
    firsts = [next(stretch.read()).to_pylist()[0] for stretch in stretches]
    assert [(row["seq"], row["previous"]) for row in firsts] == [
        (0, bytes(32)),
        (10, writer.links[9]),
        (15, writer.links[14]),
    ]


# offsets


def test_offsets_are_timeframes_and_damaged_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = {
        (b"p" * 32, b"f" * 32): (Tip(3, b"12345678"), Tip(7, b"abcdefgh")),
        (b"q" * 32, b"g" * 32): (Tip(1, b"zzzzzzzz"),),
    }
    offset = to_offset(frame)
    assert from_offset(json.loads(json.dumps(offset))) == frame
    assert offset["70" * 32] == {"66" * 32: "3:3132333435363738,7:6162636465666768"}
    for bad in ({"xy": {}, "zz": {"00": "1:00"}}, {"00": {"00": "1"}}, {"00": "1:00"}, {"00": {"00": 5}}):
        with pytest.raises(Corrupt, match="no timeframe"):
            from_offset(bad)
    monkeypatch.setattr(timeframes, "FEEDS_MAX", 1)
    with pytest.raises(Refused, match="fewer parties"):
        to_offset(frame)


@pytest.mark.parametrize("seed", range(12))
def test_any_limits_and_compactions_give_every_block_once_and_end_at_heads(tmp_path: Path, seed: int) -> None:
    """A stream without Spark: batches of random limits over a home or lake that grows, forks and is compacted."""
    random = Random(seed)
    home, lake = HomeOf(tmp_path / "home"), Lake.create(tmp_path / "lake")
    writers = [Writer(f"w{number}", party_key(number % 3)) for number in range(6)]
    over_home = seed % 2 == 0
    view: View | None = None
    offset: dict[str, Any] = {}
    taken: list[BlockId] = []
    for step in range(10):
        for writer in writers:
            for _ in range(random.randint(0, 3)):
                home.hold(
                    writer, *payloads(random.randint(1, 9), f"{writer.name} {step}"), control=writer is writers[0]
                )
        if step in (4, 7):
            fork = writers[step - 2].branch(random.randint(0, len(writers[step - 2].links) - 1))
            fork.write(*payloads(5, f"fork {step}"))
            home.receive(fork, start=0)
        publish(home.path, lake.path)
        if random.random() < 0.3:
            compact(lake, keep_s=0)
        if random.random() < 0.3:
            view = None  # as after a restart
            forget_files()
        if view is None:
            view = HomeView(str(home.path), Chosen()) if over_home else LakeView(str(lake.path), Chosen())
        view.refresh()
        for _ in range(random.randint(0, 3) if step < 9 else 1000):
            limit = random.randint(1, 60)
            end = to_offset(planning.advance(view, from_offset(offset), limit))
            end = json.loads(json.dumps(end))
            batch = read_all(view, offset, end)
            assert len(batch) <= max(limit, 9), "an append is the least that is taken"
            if end == offset:
                assert batch == []
                break
            assert batch
            taken += batch
            offset = end
    assert sorted(taken) == sorted(home.blocks())
    assert offset == to_offset(planning.newest(view)) if view else False


def test_a_limit_takes_control_first_shares_among_feeds_and_ends_at_heads(tmp_path: Path) -> None:
    home = HomeOf(tmp_path / "home")
    control, long, short = Writer("control"), Writer("long"), Writer("short")
    home.hold(control, *payloads(5), control=True)
    for _ in range(20):
        home.hold(long, *payloads(10))
    home.hold(short, *payloads(4))
    publish(home.path, tmp_path / "lake")
    for view in (HomeView(str(home.path), Chosen()), LakeView(str(tmp_path / "lake"), Chosen())):
        lengths = {place[1]: tips[0].length for place, tips in planning.advance(view, {}, 50).items()}
        assert lengths == {control.key: 5, short.key: 4, long.key: 40}
        lengths = {place[1]: tips[0].length for place, tips in planning.advance(view, {}, 3).items()}
        assert lengths == {control.key: 5}, "less than one append can't be taken"


def test_a_checkpoint_of_another_lake_is_refused(tmp_path: Path) -> None:
    one, two = Lake.create(tmp_path / "one"), Lake.create(tmp_path / "two")
    writer, branch = written("feed", 10), written("feed", 5).branch(3)
    branch.write(*payloads(6, "else"))
    LakeWriter(one).write([feed_rows(writer)])
    LakeWriter(two).write([feed_rows(branch)])
    start = planning.newest(LakeView(str(one.path), Chosen()))
    view = LakeView(str(two.path), Chosen())
    for attempt in (
        lambda: planning.advance(view, start, 5),
        lambda: list(planning.between(view, start, planning.newest(view))),
    ):
        with pytest.raises(Corrupt, match="not here"):
            attempt()
    with pytest.raises(Corrupt, match="not here"):
        planning.advance(view, {(party_key(5), b"f" * 32): (Tip(1, b"12345678"),)}, 5)


def test_a_view_of_a_growing_lake_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(tmp_path / "lake")
    LakeWriter(lake).write(many_parties(50, 3))
    view = LakeView(str(lake.path), Chosen())
    writer = written("new", 10, party_key(60))
    from echostore.pipeline.lake import versions

    read: list[int] = []
    real = versions.read_runs
    monkeypatch.setattr(
        versions, "read_runs", lambda path, record, parties: read.append(record.rows) or real(path, record, parties)
    )
    for at in (0, 5):
        LakeWriter(lake).write([feed_rows(writer, at, at + 5)])
        view.refresh()
    view.refresh()
    assert read == [1, 1]
    assert len(view.feeds) == 101


# streams


def streamed(folder: Path) -> Iterator[BlockId]:
    """What a sink of Parquet files holds: only batches that Spark has committed there."""
    from pyspark.sql import SparkSession

    spark = SparkSession.active()
    if (folder / "_spark_metadata").exists():
        yield from collected(spark.read.parquet(str(folder)))


def run_stream(source: Any, option: str, path: Path, out: Path, checkpoint: Path, limit: int | None = 40) -> Any:
    reading = source.readStream.format("echostore").option(option, str(path))
    if limit:
        reading = reading.option("maxBlocksPerTrigger", limit)
    writing = reading.load().writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
    return writing.option("path", str(out)).trigger(availableNow=True).start()


@pytest.mark.parametrize("option", ["home", "lake"])
def test_a_stream_takes_every_block_once_across_restarts_compaction_and_growth(
    source: Any, tmp_path: Path, option: str
) -> None:
    home = forked_home(tmp_path / "home")
    publish(home.path, tmp_path / "lake")
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    query = run_stream(source, option, tmp_path / option, out, checkpoint)
    query.awaitTermination(120)
    assert len([progress for progress in query.recentProgress if progress["numInputRows"]]) >= 3, "bounded batches"
    assert all(progress["numInputRows"] <= 40 for progress in query.recentProgress)
    assert sorted(streamed(out)) == sorted(home.blocks())
    home.hold(Writer("new", party_key(9)), *payloads(12))
    publish(home.path, tmp_path / "lake")
    compact(Lake.open(tmp_path / "lake"), keep_s=0)
    forget_files()
    run_stream(source, option, tmp_path / option, out, checkpoint, None).awaitTermination(120)
    assert sorted(streamed(out)) == sorted(home.blocks())
    again = run_stream(source, option, tmp_path / option, out, checkpoint)
    again.awaitTermination(120)
    assert sum(progress["numInputRows"] for progress in again.recentProgress) == 0
    assert sorted(streamed(out)) == sorted(home.blocks())


STREAM = """
import sys
from echostore.pipeline.session import SparkOptions, spark_session
from echostore.pipeline.source import register
lake, out, checkpoint = sys.argv[1:]
with spark_session("kill", SparkOptions(master="local[2]", memory="512m", short=True)) as spark:
    register(spark)
    frame = spark.readStream.format("echostore").option("lake", lake).option("maxBlocksPerTrigger", 500).load()
    query = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint).option("path", out)
    query = query.trigger(availableNow=True).start()
    print("running", flush=True)
    query.awaitTermination()
"""


def test_a_stream_that_is_killed_repeats_and_loses_nothing(source: Any, tmp_path: Path) -> None:
    """Killed between the decision about a batch and its end: driver, JVM and workers at once."""
    lake = Lake.create(tmp_path / "lake")
    LakeWriter(lake).write(many_parties(6, 200, 60))
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"

    def count(folder: str) -> int:
        return len(list((checkpoint / folder).glob("[0-9]*")))

    command = [sys.executable, "-c", STREAM, str(lake.path), str(out), str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        deadline = time.monotonic() + 100
        while not (count("offsets") == 2 and count("commits") == 1):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)  # the group of this one process
    assert len(list(streamed(out))) < 1212
    run_stream(source, "lake", lake.path, out, checkpoint, 500).awaitTermination(120)
    assert sorted(streamed(out)) == lake_blocks(lake)


def test_party_option_chooses_for_streams_too(source: Any, tmp_path: Path) -> None:
    home = forked_home(tmp_path / "home")
    reading = source.readStream.format("echostore").option("home", str(home.path))
    wanted: PartyKey = party_key(2)
    out = tmp_path / "out"
    writing = reading.option("party", wanted.hex()).option("control", "false").load().writeStream.format("parquet")
    query = (
        writing.option("checkpointLocation", str(tmp_path / "c"))
        .option("path", str(out))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    assert sorted(streamed(out)) == sorted(block for block in home.blocks() if block[0] == wanted and not block[2])
