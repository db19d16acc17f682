"""What a stream holds is what a batch over the same timeframe gives, in whichever slices and order the blocks come."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from echostore.kernel.errors import Corrupt, Locked, Refused, UsageError
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.overlay import freshest, newest_overlay
from echostore.pipeline.output.results import party_results
from echostore.pipeline.output.views import open_views
from echostore.pipeline.run import RunRequest, run_pipeline
from echostore.pipeline.schemas import STATE_INDEX
from echostore.pipeline.source.blocks_source import BlocksStream, Settings
from echostore.pipeline.stages import order_here
from echostore.pipeline.streaming.following import Arrival, offset_of, percentile_s
from echostore.pipeline.streaming.overlaying import Folded
from echostore.pipeline.streaming.publishing import only_stream
from echostore.pipeline.streaming.stream import Progress, StreamRequest, check_stream, run_stream
from spark.commit_story import drive
from spark.lake_slices import Slices
from spark.party_stories import Stories, Told
from spark.stream_jobs import Steps, held_moves, held_states

MODELS = "spark.story_models"
TESTS = Path(__file__).resolve().parents[1]
MIXED = (("property-set", 40), ("text", 30), ("growable-array", 20), ("threaded-log", 10))
STORIES = (0, 1, 4, 7, 15, 17, 22, 23, 24)
"""With lies, forks, removals, readers, children, moves, custom models, and one that nobody else knows."""
TABLES = ("items", "properties", "links")


@pytest.fixture(scope="module")
def engine(spark: Any) -> Iterator[Any]:
    """A session whose workers can import the models of the stories."""
    environment = spark.sparkContext.environment
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(TESTS)
    yield spark
    del environment["PYTHONPATH"]
    if before is not None:
        environment["PYTHONPATH"] = before


@dataclass(slots=True)
class Whole:
    """A lake with everything in it, what peers say of it, and what a batch makes of it."""

    lake: Lake
    told: list[Told]
    out: Path
    rows: dict[str, list[str]]


def test_a_batch_that_ends_below_what_is_folded_takes_nothing_back(tmp_path: Path) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(feeds=2, messages=200, items=10, seed=11), whole)
    slices = Slices(whole, tmp_path / "lake", seed=1, slices=3, disorder=0.0)
    steps = Steps(tmp_path / "lake", tmp_path / "out")
    slices.publish()
    steps.step()
    early = steps.end
    slices.publish()
    slices.publish()
    later = steps.step()
    assert (later.overlay is not None, later.deferred) == (True, {})
    again = steps.overlaying.advance(early, set(steps.follower.parties()))
    assert (again.blocks, again.deferred, again.overlay) == (0, {}, later.overlay)
    anew = Steps(tmp_path / "lake", tmp_path / "out")
    again = anew.overlaying.advance(early, set(anew.follower.parties()))
    assert (again.blocks, again.deferred, again.overlay) == (0, {}, later.overlay)


def test_a_start_folds_what_came_since_the_commit_whatever_the_query_says(tmp_path: Path) -> None:
    generate(Shape(parties=2, feeds=2, messages=100, items=8, seed=12), Lake.create(tmp_path / "lake"))
    steps = Steps(tmp_path / "lake", tmp_path / "out")
    folded = steps.overlaying.advance(steps.follower.newest(), set())
    assert folded.blocks == 100


def test_a_step_verifies_and_folds_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(feeds=2, messages=120, items=8, seed=13), whole)
    slices = Slices(whole, tmp_path / "lake", seed=1, slices=3, disorder=0.0)
    steps = Steps(tmp_path / "lake", tmp_path / "out")
    verified: list[int] = []

    class Watched(order_here.Verifying):
        def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            pieces = list(batches)
            verified.append(sum(row["end"] - row["start"] for each in pieces for row in each.to_pylist()))
            return super().__call__(iter(pieces))

    monkeypatch.setattr(order_here, "Verifying", Watched)
    turns = []
    while slices.publish():
        verified.clear()
        folded = steps.step()
        assert folded.overlay is not None
        if folded.blocks:
            assert sum(verified) <= folded.blocks + folded.waiting + 40, "old blocks are not looked at again"
        index = folded.overlay.segments[-1].files.get("state_index", ())
        turns += [row["turn"] for file in index for row in read_table(steps.out, file, STATE_INDEX).to_pylist()]
    assert len(set(turns)) >= 2
    assert turns == sorted(turns), "what came later counts more"


@pytest.fixture(scope="module")
def whole(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        with Stories(folder, seed=23) as stories:
            told = [each for number in STORIES for each in stories.tell(number)]
            lake = stories.publish()
            generate(Shape(feeds=4, messages=150, items=20, mix=MIXED, faults=19), lake)
            batch(engine, lake.path, folder / "batch")
            yield Whole(lake, told, folder / "batch", rows_of(engine, folder / "batch"))


def batch(spark: Any, lake: Path, out: Path) -> None:
    run_pipeline(spark, RunRequest(lake=lake, out=out, models=MODELS))


def rows_of(spark: Any, out: Path, tables: tuple[str, ...] = TABLES) -> dict[str, list[str]]:
    views = open_views(spark, out, tables=tables)
    return {name: sorted(map(str, views[name].collect())) for name in tables}


def put_off(whole: Whole, folded: Folded) -> set[bytes]:
    """Parties that wait for a commit, with children that their roots could not claim yet."""
    children = {bytes(each.party) for each in whole.told if each.parent is not None and each.parent in folded.deferred}
    return set(folded.deferred) | children


def cids(out: Path) -> dict[bytes, str | None]:
    commit, _ = reading.newest(out)
    assert commit is not None
    return {result.party: result.cid for result in party_results(out, commit)}


# what a stream holds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slices_in_any_order_lead_to_the_states_of_a_batch(whole: Whole, tmp_path: Path, seed: int) -> None:
    slices = Slices(whole.lake, tmp_path / "lake", seed=seed, slices=5)
    steps = Steps(tmp_path / "lake", tmp_path / "out", models=MODELS)
    folded = steps.step()
    while slices.publish():
        folded = steps.step()
    lost, rebased = "a feed lost ground: the party has to be built from scratch", "the party stands on another epoch"
    assert all(why == lost or why.startswith(rebased) for why in folded.deferred.values())
    assert sum(why == lost for why in folded.deferred.values()) <= 4, "a party that waits for a commit is rare"
    based = {each.party for each in whole.told if "base epoch" in each.deeds}
    families = {bytes(each.party) for each in whole.told if each.party in based or each.parent in based}
    assert {party for party, why in folded.deferred.items() if why != lost} <= families
    apart = put_off(whole, folded)
    ours, theirs = held_states(tmp_path / "out"), held_states(whole.out)
    for place in ours.keys() | theirs.keys():
        if place[0] not in apart:
            assert ours.get(place) == theirs.get(place), (seed, place[0].hex(), place[1].hex())
    moves = {party: each for party, each in held_moves(whole.out).items() if party not in apart}
    assert {party: each for party, each in held_moves(tmp_path / "out").items() if party in moves} == moves


def test_rows_are_those_of_a_batch_and_a_commit_in_between_changes_nothing(
    engine: Any, whole: Whole, tmp_path: Path
) -> None:
    out, lake = tmp_path / "out", tmp_path / "lake"
    slices = Slices(whole.lake, lake, seed=1, slices=6)
    steps = Steps(lake, out, models=MODELS)
    slices.publish()
    batch(engine, lake, out)
    folded = steps.step()
    while slices.publish():
        folded = steps.step()
    assert folded.deferred, "this order has a fork that is found late"
    before = rows_of(engine, out)
    commit, overlay = freshest(out)
    assert commit is not None
    assert overlay is not None
    assert (commit.number, overlay.base) == (1, 1)
    apart = {party.hex() for party in put_off(whole, folded)}
    for name in TABLES:
        ours = [row for row in before[name] if not any(party in row for party in apart)]
        assert ours == [row for row in whole.rows[name] if not any(party in row for party in apart)], name
    # The next commit takes in everything, those that were put off too; the stream goes on top of it.
    batch(engine, lake, out)
    assert freshest(out)[1] is None, "the commit knows as much and more"
    folded = steps.step()
    assert not folded.deferred
    assert (folded.overlay is not None, folded.blocks) == (True, 0)
    assert rows_of(engine, out, ("items",))["items"] == whole.rows["items"]
    assert held_states(out) == held_states(whole.out)
    assert cids(out) == cids(whole.out)


def test_a_query_over_slices_ends_with_the_cids_of_the_peers(engine: Any, whole: Whole, tmp_path: Path) -> None:
    """The real thing: Structured Streaming, stopped and started again with every slice."""
    out, lake = tmp_path / "out", tmp_path / "lake"
    slices = Slices(whole.lake, lake, seed=2, slices=2)
    told: list[Progress] = []
    while slices.publish():
        request = StreamRequest(lake=lake, out=out, models=MODELS, once=True, trigger_s=0.2, batch_blocks=300)
        run_stream(engine, request, tell=told.append, note=lambda text: None, stop=threading.Event())
    assert cids(out) == cids(whole.out)
    for each in whole.told:
        assert cids(out)[bytes(each.party)] == (None if each.unknown_model else each.cid), (each.number, each.deeds)
    assert rows_of(engine, out, ("properties",))["properties"] == whole.rows["properties"]
    assert sum(step.rows for step in told) > 50, "steps of the query folded something"
    assert all(step.waiting >= 0 and step.seconds > 0 for step in told)


# waiting


def test_what_lacks_a_block_waits_and_holds_up_nobody_else(tmp_path: Path) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(parties=2, feeds=4, messages=800, items=40, seed=5), whole)
    one, other = sorted(set(whole.at().runs()["party"].to_pylist()))
    slices = Slices(whole, tmp_path / "lake", seed=1, slices=2, disorder=0.0)
    late = slices.hold_back(one)
    steps = Steps(tmp_path / "lake", tmp_path / "out")
    slices.publish()
    slices.publish()
    folded = steps.step()
    assert folded.waiting > 0
    assert folded.blocks >= 400, "the other party is whole"
    parties = {party for party, _ in held_states(tmp_path / "out")}
    assert other in parties
    late.publish()
    more = steps.step()
    assert (more.waiting, more.deferred) == (0, {})
    assert folded.blocks + more.blocks == 800
    at_once = Steps(whole.path, tmp_path / "at-once")
    at_once.step()
    assert held_states(tmp_path / "out") == held_states(tmp_path / "at-once")


# what does not grow


def test_an_overlay_has_few_files_however_many_batches_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(feeds=2, messages=600, items=30, seed=6), whole)
    slices = Slices(whole, tmp_path / "lake", seed=1, slices=20, disorder=0.0)
    monkeypatch.setattr("echostore.pipeline.streaming.merging.MERGED_AT", 3)
    out = tmp_path / "out"
    steps = Steps(tmp_path / "lake", out, keep_s=-1.0)
    folded = 0
    while slices.publish():
        folded += steps.step().blocks
    assert folded == 600, "each block once"
    overlay = newest_overlay(out)
    assert overlay is not None
    assert overlay.batches >= 18
    assert len(overlay.segments) <= 2 * 3, "merged by threes: at most two of each level"
    assert {segment.level for segment in overlay.segments} & {2, 3}
    assert len(list((out / "stream" / "commits").iterdir())) <= 5, "overlays that were replaced are gone"
    named = {file.path for segment in overlay.segments for files in segment.files.values() for file in files}
    there = {str(path.relative_to(out)) for path in (out / "stream").rglob("*.parquet")}
    assert named <= there
    assert len(there - named) < 60, "and so are their files, but for those of the last few"
    at_once = Steps(whole.path, tmp_path / "at-once")
    at_once.step()
    assert held_states(out) == held_states(tmp_path / "at-once")


def test_a_batch_that_is_done_again_changes_nothing(tmp_path: Path) -> None:
    whole = Lake.create(tmp_path / "lake")
    generate(Shape(feeds=2, messages=200, items=10, seed=7), whole)
    steps = Steps(tmp_path / "lake", tmp_path / "out")
    first = steps.step()
    assert first.blocks == 200
    again = steps.overlaying.advance(steps.end, set(steps.follower.parties()))
    assert (again.blocks, again.overlay) == (0, first.overlay)
    anew = Steps(tmp_path / "lake", tmp_path / "out").step()
    assert (anew.blocks, anew.overlay) == (0, first.overlay)


def test_a_driver_that_dies_between_any_two_steps_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that another process could see; what the dead one left is removed by the next."""
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(feeds=2, messages=60, items=6, seed=8), whole)
    monkeypatch.setattr("echostore.pipeline.streaming.merging.MERGED_AT", 2)
    monkeypatch.setattr("echostore.pipeline.streaming.publishing.KEPT_MIN", 2)
    Steps(whole.path, tmp_path / "at-once").step()
    wanted = held_states(tmp_path / "at-once")
    deadly, seen = 0, set()
    while True:
        out, lake = tmp_path / f"out-{deadly}", tmp_path / f"lake-{deadly}"
        slices = Slices(whole, lake, seed=1, slices=3, disorder=0.0)
        died = False
        left = [deadly]

        def step(name: str, left: list[int] = left) -> None:
            seen.add(name.split(" ")[0])
            if left[0] == 0:
                raise Died(name)
            left[0] -= 1

        try:
            steps = Steps(lake, out, keep_s=-1.0, step=step)
            while slices.publish():
                steps.step()
        except Died:
            died = True
            newest_overlay(out)  # a reader finds the one before, or none
        steps = Steps(lake, out)
        while True:
            steps.step()
            if not slices.publish():
                break
        steps.step()
        assert held_states(out) == wanted, deadly
        garbage = list((out / "stream").rglob("*.part"))
        assert not garbage
        if not died:
            break
        deadly += 1
    assert {"make", "show", "decide", "link", "publish", "published", "prune"} <= seen
    assert deadly > 10


class Died(BaseException):
    """The driver is gone."""


def test_a_query_without_a_checkpoint_begins_behind_what_a_commit_has(tmp_path: Path) -> None:
    generate(Shape(feeds=2, messages=80, items=4), Lake.create(tmp_path / "lake"), last=0.5)
    options = {"lake": str(tmp_path / "lake")}
    newest = BlocksStream(Settings.of(options)).latestOffset({}, ReadAllAvailable())
    assert BlocksStream(Settings.of(options)).initialOffset() == {}
    assert BlocksStream(Settings.of({**options, "afterVersion": "2"})).initialOffset() == newest
    before = BlocksStream(Settings.of({**options, "afterVersion": "1"})).initialOffset()
    assert before.keys() == newest.keys()
    assert before != newest
    with pytest.raises(UsageError, match="afterVersion"):
        Settings.of({"home": "data", "afterVersion": "1"})


# who else is there


def test_one_stream_at_a_time_works_on_an_output(tmp_path: Path) -> None:
    with only_stream(tmp_path / "out"), pytest.raises(Locked, match="another stream"), only_stream(tmp_path / "out"):
        pass
    with only_stream(tmp_path / "out"):
        pass


def test_a_damaged_file_of_an_overlay_is_told_by_its_name(tmp_path: Path) -> None:
    whole = Lake.create(tmp_path / "lake")
    generate(Shape(feeds=2, messages=60, items=6, seed=9), whole)
    steps = Steps(tmp_path / "lake", tmp_path / "out")
    overlay = steps.step().overlay
    assert overlay is not None
    for kind in ("kept", "state_index"):
        path = tmp_path / "out" / overlay.files(kind)[0].path
        good = path.read_bytes()
        path.write_bytes(good[:-3] + b"xyz")
        with pytest.raises(Corrupt, match=path.name):
            held_states(tmp_path / "out") if kind == "state_index" else open_kept(steps)
        path.write_bytes(good)


def open_kept(steps: Steps) -> None:
    from echostore.pipeline.output.files import read_table
    from echostore.pipeline.output.overlay import KEPT

    overlay = steps.overlaying.overlay
    assert overlay is not None
    for file in overlay.files("kept"):
        read_table(steps.out, file, KEPT)


def test_another_lake_is_refused_before_spark_is_started(tmp_path: Path) -> None:
    generate(Shape(feeds=2, messages=40, items=4), Lake.create(tmp_path / "lake"))
    check_stream(StreamRequest(lake=tmp_path / "lake", out=tmp_path / "out"))
    drive(tmp_path / "out", "somebody", lambda name: None)
    with pytest.raises(Refused, match="another lake"):
        check_stream(StreamRequest(lake=tmp_path / "lake", out=tmp_path / "out"))


def test_a_checkpoint_that_holds_no_timeframe_is_told(tmp_path: Path) -> None:
    assert offset_of(tmp_path, 3) is None
    (tmp_path / "offsets").mkdir()
    for content in ("v1\n{}\n", "v1\n{}\nnonsense", 'v1\n{}\n{"a": 1}'):
        (tmp_path / "offsets" / "3").write_text(content)
        with pytest.raises(Corrupt):
            offset_of(tmp_path, 3)


def test_lags_are_weighed_by_blocks() -> None:
    arrivals = [Arrival(90, 9_000), Arrival(9, 5_000), Arrival(1, 1_000)]
    assert percentile_s(arrivals, 10_000, 0.5) == 1.0
    assert percentile_s(arrivals, 10_000, 0.95) == 5.0
    assert percentile_s(arrivals, 10_000, 1.0) == 9.0
    assert percentile_s([], 10_000, 0.5) is None
