"""The whole pipeline: what it says of a party is what its peers say, at once and step by step, whoever else is broken."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from echostore.cli.app import run as run_command
from echostore.kernel.errors import Refused, UsageError
from echostore.peer.anchors import Anchor
from echostore.pipeline import driver_bytes
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake, LakeWriter
from echostore.pipeline.lake.reading import read_rows
from echostore.pipeline.output import reading
from echostore.pipeline.output.epochs import latest
from echostore.pipeline.output.garbage import collect
from echostore.pipeline.output.record import CommitLost
from echostore.pipeline.output.results import PartyResult
from echostore.pipeline.output.views import open_views
from echostore.pipeline.run import At, RunRequest, RunResult, chosen_tables, run_pipeline
from echostore.testing.lake_answers import PartyAnswer, lake_answers
from echostore.wire.cids import cid_text
from echostore.wire.tree import verify_tree
from spark.engines import Engines
from spark.party_stories import Stories, Told
from spark.worker_paths import with_test_modules

MIXED = (("property-set", 40), ("text", 30), ("growable-array", 20), ("threaded-log", 10))
FAULTS = 19
EARLY, LATE = (0, 1, 4, 7, 23, 24), (15, 17, 22, 35, 38)
"""Stories with lies, a fork, removals, readers, children, moves, and a model that one peer alone knows."""


@pytest.fixture(scope="module")
def engine(spark: Any) -> Iterator[Any]:
    """A session whose workers can import the models of the stories."""
    with with_test_modules(spark):
        yield spark


@dataclass(slots=True)
class Story:
    """A lake with stories of real peers, and the answers of the pipeline."""

    lake: Path
    told: list[Told]
    out: Path
    runs: list[RunResult] = field(default_factory=list)

    def results(self) -> dict[bytes, PartyResult]:
        return {result.party: result for result in self.runs[-1].results()}


def run(engine: Any, lake: Path, out: Path, **more: Any) -> RunResult:
    request = RunRequest(lake=lake, out=out, **more)
    return engine.run(request) if isinstance(engine, Engines) else run_pipeline(engine, request)


@pytest.fixture(scope="module")
def story(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Half of the stories published and built, then the rest of them."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        with Stories(folder, seed=23) as stories:
            made = Story(folder / "lake", [], folder / "out")
            for numbers in (EARLY, LATE):
                made.told += [each for number in numbers for each in stories.tell(number)]
                stories.publish()
                made.runs.append(run(engine, made.lake, made.out, models="spark.story_models"))
            yield made


# what peers say


def test_every_party_has_the_cid_that_its_peers_agree_on(story: Story) -> None:
    results = story.results()
    assert set(results) == {bytes(each.party) for each in story.told}
    for told in story.told:
        result = results[bytes(told.party)]
        if told.unknown_model:
            assert (result.cid, result.state) == (None, "abstained"), told.number
            assert "gadget@1" in result.detail
        else:
            assert (result.cid, result.state, result.items) == (told.cid, "built", told.items), (
                told.number,
                told.deeds,
            )
        assert result.root_party == (told.parent or told.party)
    assert any(told.unknown_model for told in story.told)
    assert any(told.parent for told in story.told)


def test_rejects_are_those_of_a_peer(engine: Any, story: Story) -> None:
    rows = open_views(engine, story.out)["rejects"].collect()
    for told in story.told:
        found = sorted(
            (row["feed"], row["seq"], row["position"], row["reason"], row["detail"])
            for row in rows
            if row["party"] == told.party.hex()
        )
        expected = sorted((r.feed.hex(), r.seq, r.position, str(r.reason), r.detail) for r in told.rejected)
        assert found == expected, (told.number, told.deeds)


def test_tables_show_every_item_once(engine: Any, story: Story) -> None:
    views = open_views(engine, story.out)
    items = [(row["party"], row["item"]) for row in views["items"].select("party", "item").collect()]
    assert len(items) == len(set(items))
    for told in story.told:
        assert sum(party == told.party.hex() for party, _ in items) == told.items, (told.number, told.deeds)
    places = [tuple(row) for row in views["properties"].select("party", "item", "path").collect()]
    assert len(places) == len(set(places)) > 0


def test_counts_add_up_and_little_comes_to_the_driver(story: Story) -> None:
    for result in story.results().values():
        assert result.messages == result.applied + result.rejected + result.waiting
    last = story.runs[-1]
    totals = last.record.totals
    assert totals["messages"] == totals["applied"] + totals["rejected"] + totals["waiting"]
    assert totals["parties"] == len(story.told) == last.parties
    assert 0 < last.driver_bytes < driver_bytes.DRIVER_BYTES_MAX
    assert [stage.name for stage in last.stages] == [
        "control", "order", "demux", "reduce", "snapshot", "tables", "commit",
    ]  # fmt: skip


def test_only_what_is_new_is_built(engine: Any, story: Story) -> None:
    first, second = story.runs
    assert (first.commit, second.commit) == (1, 2)
    built = {result.party for result in second.results() if result.commit == 2}
    assert built == {bytes(told.party) for told in story.told if told.number in LATE}
    again = run(engine, story.lake, story.out, models="spark.story_models")
    assert (again.new, again.commit) == (False, 2)
    assert [result.cid for result in again.results()] == [result.cid for result in second.results()]
    assert reading.verify(story.out) == []


def test_a_peer_can_take_the_snapshot_over(story: Story) -> None:
    for told in story.told[:6]:
        ready = latest(story.out, told.party)
        if told.unknown_model:
            assert ready is None
            continue
        assert ready is not None
        assert cid_text(ready.cid) == told.cid
        assert verify_tree(ready.root.index_root, ready.root.item_count, dict(ready.blobs()).get).ok
        assert ready.control_timeframe


def test_a_model_that_becomes_known_gives_the_party_its_cid(
    engine: Any, story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = next(each for each in story.told if each.unknown_model)
    (tmp_path / "gadgets.py").write_text(
        "from spark.story_models import SHARED, Gadget\n\n\ndef register(models):\n"
        "    for model in (*SHARED, Gadget):\n        models.register(model)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = engine.sparkContext.environment
    monkeypatch.setitem(environment, "PYTHONPATH", f"{environment['PYTHONPATH']}:{tmp_path}")
    out = tmp_path / "out"
    shutil.copytree(story.out, out)
    done = run(engine, story.lake, out, models="gadgets")
    assert done.new
    results = {result.party: result for result in done.results()}
    assert results[bytes(told.party)].cid == told.cid
    assert {result.cid for result in results.values()} == {each.cid for each in story.told}


def test_the_state_at_an_anchor(engine: Any, story: Story, tmp_path: Path) -> None:
    told = next(each for each in story.told if each.moments and not each.unknown_model and each.parent is None)
    out = tmp_path / "out"
    shutil.copytree(story.out, out)
    for text, cid in told.moments[:2]:
        anchor = Anchor.parse(text)
        at = At(
            party=anchor.party,
            data={feed: position.seq + 1 for feed, position in anchor.data.entries.items()},
            control={feed: position.seq + 1 for feed, position in anchor.control.entries.items()},
            text=text,
        )
        [result] = run(engine, story.lake, out, at=at, models="spark.story_models").results()
        assert (result.cid, result.at) == (cid, text), (told.number, told.deeds)
    done = run(engine, story.lake, out, models="spark.story_models")
    assert {result.party: result.cid for result in done.results()}[bytes(told.party)] == told.cid
    items = {row["item"] for row in open_views(engine, out)["items"].where(f"party = '{told.party.hex()}'").collect()}
    assert len(items) == told.items
    other = next(each for each in story.told if each.party != told.party)
    with pytest.raises(UsageError, match="another party"):
        run(engine, story.lake, out, at=at, parties=(other.party.hex(),))


# made lakes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, PartyAnswer]]:
    """A lake with every fault there is, in two versions."""
    folder = tmp_path_factory.mktemp("made")
    lake = Lake.create(folder / "lake")
    generate(Shape(parties=3, feeds=4, messages=1500, items=150, mix=MIXED, faults=FAULTS, seed=3), lake, last=0.1)
    return folder / "lake", {bytes(answer.party): answer for answer in lake_answers(lake, folder / "observer")}


def test_step_by_step_a_lake_comes_to_what_a_peer_says(
    engines: Engines, made: tuple[Path, dict[bytes, PartyAnswer]], tmp_path: Path
) -> None:
    lake, answers = made
    younger = tmp_path / "lake"
    shutil.copytree(lake, younger)
    entries = sorted((younger / "log").iterdir())
    entries[-1].rename(tmp_path / "later.json")
    first = run(engines, younger, tmp_path / "out")
    (tmp_path / "later.json").rename(entries[-1])
    second = run(engines, younger, tmp_path / "out")
    assert (first.commit, second.commit) == (1, 2)
    at_once = run(engines, lake, tmp_path / "other", tables=chosen_tables("all"))
    for done in (second, at_once):
        results = {result.party: result for result in done.results()}
        for party, answer in answers.items():
            found = results[party]
            assert (found.cid, found.items, found.applied) == (answer.cid, answer.items, answer.applied)
            assert found.messages == answer.messages
    verified = {stage.name: stage.rows for stage in second.stages}
    assert 0 < verified["order"] < at_once.record.totals["messages"] / 2, "blocks below the cut are not read again"
    _same_tables(engines.session, tmp_path / "out", tmp_path / "other")
    _blocks_are_counted(engines.session, tmp_path / "other", at_once)


def _same_tables(spark: Any, one: Path, other: Path) -> None:
    """Built in steps or at once, the tables show the same."""
    for name in ("items", "properties", "links", "members", "rejects"):
        rows = [sorted(map(str, open_views(spark, out)[name].collect())) for out in (one, other)]
        assert rows[0] == rows[1], name
        assert rows[0] or name == "links", name


def _blocks_are_counted(spark: Any, out: Path, done: RunResult) -> None:
    views = open_views(spark, out)
    states = {row["state"]: row["count"] for row in views["messages"].groupBy("state").count().collect()}
    totals = done.record.totals
    assert states["applied"] == totals["applied"]
    assert sum(states.values()) == totals["messages"]
    assert views["blocks"].where("NOT control").count() == totals["messages"]
    assert views["blocks"].where("signed").count() > 0


def test_one_bad_party_stops_no_other(engines: Engines, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    for seed in (1, 2):
        generate(Shape(parties=1, feeds=2, messages=60, items=10, seed=seed), lake)
    answers = {bytes(answer.party): answer for answer in lake_answers(lake, tmp_path / "observer")}
    data = [file for file in lake.at().files if not file.control]
    broken = lake.path / data[0].file
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    done = run(engines, lake.path, tmp_path / "out")
    results = {result.party: result for result in done.results()}
    failed = [result for result in results.values() if result.state == "failed"]
    assert len(failed) == done.failed == 1
    assert data[0].file in failed[0].detail
    assert failed[0].cid is None
    good = next(result for result in results.values() if result.state == "built")
    assert good.cid == answers[good.party].cid
    broken.write_bytes(whole)
    mended = {result.party: result.cid for result in run(engines, lake.path, tmp_path / "out").results()}
    assert mended == {party: answer.cid for party, answer in answers.items()}


def test_of_two_runs_at_once_one_commits(engines: Engines, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(parties=1, feeds=2, messages=60, items=10), lake)
    request = RunRequest(lake=lake.path, out=tmp_path / "out")
    inner: list[RunResult] = []

    def step(name: str) -> None:
        if name == "publish" and not inner:
            inner.append(engines.run(request))

    with pytest.raises(CommitLost, match="first"):
        run_pipeline(None if engines.name == "local" else engines.session, request, step=step)
    assert inner[0].commit == 1
    assert engines.run(request).new is False
    assert reading.verify(tmp_path / "out") == []
    assert collect(tmp_path / "out", age_s=0, now_s=1e12).attempts == 1
    assert reading.verify(tmp_path / "out") == []


def test_another_lake_is_refused(engines: Engines, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("other", 2)):
        generate(Shape(parties=1, feeds=2, messages=20, items=2, seed=seed), Lake.create(tmp_path / name))
    run(engines, tmp_path / "one", tmp_path / "out")
    with pytest.raises(Refused, match="another lake"):
        run(engines, tmp_path / "other", tmp_path / "out")


def test_a_party_of_which_there_is_data_alone_is_told_as_stray(engines: Engines, tmp_path: Path) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(parties=2, feeds=2, messages=40, items=4), whole)
    runs = whole.at().runs()
    alone = min(runs["party"].unique().to_pylist())
    kept = runs.filter(pc.or_(pc.invert(runs["control"]), pc.not_equal(runs["party"], alone))).to_pylist()
    lake = Lake.create(tmp_path / "lake")
    rows = (
        row
        for run in kept
        for row in read_rows(whole.path, run["file"], run["row"], run["row"] + run["end"] - run["start"])
    )
    LakeWriter(lake).write(rows)
    done = run(engines, lake.path, tmp_path / "out")
    results = {result.party: result for result in done.results()}
    stray = results.pop(alone)
    assert (stray.state, stray.cid, stray.messages, stray.rejected) == ("stray", None, stray.messages, stray.messages)
    assert stray.messages > 0
    assert [result.state for result in results.values()] == ["built"]
    assert run(engines, lake.path, tmp_path / "out").new is False


def test_some_parties_then_all(engines: Engines, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(parties=3, feeds=2, messages=90, items=9), lake)
    answers = {bytes(answer.party): answer.cid for answer in lake_answers(lake, tmp_path / "observer")}
    chosen = sorted(answers)[0]
    some = run(engines, lake.path, tmp_path / "out", parties=(chosen.hex()[:12],))
    assert [(result.party, result.cid) for result in some.results()] == [(chosen, answers[chosen])]
    every = run(engines, lake.path, tmp_path / "out")
    assert {result.party: result.cid for result in every.results()} == answers


def test_tables_are_chosen_by_name() -> None:
    assert chosen_tables(" items, links,items") == ("items", "links")
    assert chosen_tables("none") == ()
    assert "messages" in chosen_tables("all")
    with pytest.raises(UsageError, match="no table 'nothing'"):
        chosen_tables("items,nothing")


# from outside


QUICK_JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
"""An engine that lives for seconds has no use for code that is compiled well."""


def shown_by(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """What a command prints that is run in this process."""
    assert run_command([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def command(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "ECHOSTORE_STATE": str(folder / "state"), **QUICK_JAVA}
    return subprocess.run(
        [sys.executable, "-m", "echostore", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd=folder,
    )


def test_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shared_session: Any
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    lake, out = str(tmp_path / "lake"), str(tmp_path / "out")
    shape = ("--feeds", "3", "--messages", "200", "--items", "20", "--faults", "3")
    monkeypatch.chdir(tmp_path)
    shown_by(capsys, "lake", "generate", "--lake", lake, *shape, "--expect", "expected.json")
    expected = json.loads((tmp_path / "expected.json").read_text())
    spark = ("--master", "local[2]", "--memory", "1g")
    done = command("pipeline", "run", "--lake", lake, "--out", out, *spark, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document) == {"version", "parties", "stages"}
    [party] = document["parties"]
    assert list(party) == ["party", "epoch", "cid", "messages", "items", "rejected", "waiting"]
    assert (party["cid"], party["epoch"]) == (expected["parties"][0]["cid"], 1)
    assert all(list(stage) == ["name", "rows", "seconds"] for stage in document["stages"])
    shown = shown_by(capsys, "pipeline", "show", "--out", out)
    assert [each["commit"] for each in shown["commits"]] == [1]
    assert shown_by(capsys, "pipeline", "show", "--out", out, "--parties")["parties"] == [party]
    sound = shown_by(capsys, "pipeline", "show", "--out", out, "--verify")
    assert sound == {"version": 1, "sound": True, "damage": []}
    report = shown_by(capsys, "pipeline", "audit", "--lake", lake, *spark, status=6)
    assert report["sound"] is False
    assert set(report["counts"]) >= {"bad-link"}
    assert all(list(each) == ["party", "feed", "seq", "blocks", "reason", "detail"] for each in report["findings"])


def test_bad_requests_fail_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("echostore.pipeline.session._started", _never)
    for arguments, status, words in (
        (("run", "--lake", "nowhere", "--out", "out"), 3, "nowhere"),
        (("run", "--lake", "nowhere", "--out", "out", "--tables", "nothing"), 2, "no table"),
        (("run", "--lake", "nowhere", "--out", "out", "--at", "yesterday"), 2, "not an anchor"),
        (("run", "--lake", "nowhere", "--out", "out", "--models", "no_such_module"), 2, "no_such_module"),
        (("run", "--lake", "nowhere", "--out", "out", "--models", "json"), 2, "register"),
        (("audit", "--lake", "nowhere"), 3, "nowhere"),
        (("show", "--out", "out"), 3, "no folder out"),
        (("show", "--out", "out", "--verify"), 3, "no folder out"),
    ):
        assert run_command(["pipeline", *arguments]) == status, arguments
        assert words in capsys.readouterr().err, arguments
    assert not (tmp_path / "out").exists()


def _never(*given: object) -> None:
    raise AssertionError("an engine was started")


KILLED = """
import os, signal, sys
from pathlib import Path
from echostore.pipeline.run import RunRequest, run_pipeline
from echostore.pipeline.session import SparkOptions, spark_session

def step(name):
    if name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

with spark_session("killed", SparkOptions(master="local[2]", memory="512m", short=True)) as spark:
    run_pipeline(spark, RunRequest(lake=Path(sys.argv[1]), out=Path(sys.argv[2])), step=step)
"""


def test_a_killed_driver_leaves_nothing_half_and_the_next_run_goes_on(spark: Any, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(parties=1, feeds=2, messages=60, items=10), lake)
    [answer] = lake_answers(lake, tmp_path / "observer")
    (tmp_path / "killed.py").write_text(KILLED)
    out = tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "killed.py", str(lake.path), str(out), "link 1.json"], cwd=tmp_path, timeout=200
    )
    assert killed.returncode == -signal.SIGKILL
    assert reading.newest(out) == (None, "")
    assert len(list(out.glob("epoch=1/attempt=*"))) == 1
    done = run(spark, lake.path, out)
    assert [(result.cid, result.epoch) for result in done.results()] == [(answer.cid, 1)]
    assert collect(out, age_s=0, now_s=1e12).attempts == 1
    assert reading.verify(out) == []
