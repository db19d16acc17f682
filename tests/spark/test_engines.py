"""Engines: with nothing new none is started, and a process and Spark build the same, each on top of the other."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from echostore.cli.app import run as run_command
from echostore.cli.output import Output
from echostore.kernel.errors import EchoError
from echostore.pipeline import engines as engine_choice
from echostore.pipeline import run as run_module
from echostore.pipeline.engines import Engine
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import checked_path
from echostore.pipeline.run import RunRequest, RunResult, chosen_tables, plan_run, run_pipeline
from echostore.pipeline.stages import reduce_here
from peer_builder import Circle
from spark.engines import NAMES, Engines
from spark.party_stories import Stories, Told
from spark.worker_paths import with_test_modules

pytestmark = pytest.mark.timeout(900)
"""The first test waits for three outputs to be built in steps, two of them on Spark."""

MODELS = "spark.story_models"
STEPS = ((0, 1, 4, 7, 23, 24), (15, 17, 22, 35, 38), (40, 41, 42, 43))
"""Stories with lies, forks, removals, readers, children, moves, bases, and a model that one peer alone knows."""

PLACES = frozenset({"path", "sha256", "bytes", "rows", "group", "nodes"})
"""Columns that say in which file something is, and tree nodes, whose order in their row is of no account."""


@dataclass(frozen=True, slots=True)
class Built:
    """Stories, and the outputs that each way of running built of them, step by step."""

    lake: Path
    told: list[Told]
    runs: dict[str, list[RunResult]]

    def last(self, name: str) -> RunResult:
        return self.runs[name][-1]


@pytest.fixture(scope="module")
def built(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("engines")
    found = Built(folder / "lake", [], {name: [] for name in NAMES})
    engines = {name: Engines(name, spark) for name in NAMES}
    with pytest.MonkeyPatch.context() as patch, with_test_modules(spark):
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        with Stories(folder, seed=23) as stories:
            for numbers in STEPS:
                found.told.extend(each for number in numbers for each in stories.tell(number))
                stories.publish()
                for name in NAMES:
                    out = folder / name
                    request = RunRequest(lake=found.lake, out=out, models=MODELS, tables=chosen_tables("all"))
                    found.runs[name].append(engines[name].run(request))
            yield found


def rows_of(run: RunResult, kind: str) -> Counter[str]:
    """All rows of a kind that a commit names, whatever files they are in."""
    found: Counter[str] = Counter()
    for file in run.record.files.get(kind, ()):
        table = pq.ParquetFile(checked_path(run.out, file)).read()
        kept = [name for name in table.column_names if name not in PLACES]
        found.update(map(repr, table.select(kept).to_pylist()))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_party_has_the_cid_of_its_peers_on_each_engine(built: Built, name: str) -> None:
    results = {result.party: result for result in built.last(name).results()}
    assert set(results) == {bytes(told.party) for told in built.told}
    for told in built.told:
        result = results[bytes(told.party)]
        expected = ("abstained", None) if told.unknown_model else ("built", told.cid)
        assert (result.state, result.cid, result.items) == (*expected, told.items), (told.number, told.deeds)


@pytest.mark.parametrize("name", ["local", "by turns"])
def test_every_row_of_a_commit_is_the_same_on_each_engine(built: Built, name: str) -> None:
    assert any("base epoch" in told.deeds for told in built.told), "bases are among the stories"
    for step in range(len(STEPS)):
        mine, theirs = built.runs[name][step], built.runs["spark"][step]
        assert mine.record.totals == theirs.record.totals
        assert {kind for kind, files in mine.record.files.items() if files} == {
            kind for kind, files in theirs.record.files.items() if files
        }
        for kind in theirs.record.files:
            if kind not in ("states", "state_index", "table_runs"):
                assert rows_of(mine, kind) == rows_of(theirs, kind), (step, kind)
        # Rows of a file of states are of one row group each; which is told by the index.
        assert rows_of(mine, "states") == rows_of(theirs, "states"), step
    assert reading.verify(built.last(name).out) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_engine_tells_the_same_stages(built: Built, name: str) -> None:
    names = ["control", "order", "demux", "reduce", "snapshot", "tables", "commit"]
    for mine, theirs in zip(built.runs[name], built.runs["spark"], strict=True):
        assert [stage.name for stage in mine.stages] == names
        assert [stage.rows for stage in mine.stages] == [stage.rows for stage in theirs.stages]


def test_a_process_gives_the_cid_of_its_peers_step_by_step(tmp_path: Path) -> None:
    """Without Spark: its stages are those of a process. Each step goes on from what the one before committed."""
    with Circle(tmp_path, "ann", "bob") as circle:
        party = circle.party("ann")
        box = party.create("property-set", type="box")
        items = [party.create("property-set", type="task", parent=box, n=number) for number in range(8)]
        for step in range(3):
            circle.meet_all()
            items[step]["n"] = 100 + step
            circle.get("bob", items[7])["by"] = f"bob {step}"
            items[step].move(None)
            items[step + 3].delete()
            cid = circle.agree()
            publish(tmp_path / "ann", tmp_path / "lake")
            result = run_pipeline(None, RunRequest(lake=tmp_path / "lake", out=tmp_path / "out"))
            assert [built.cid for built in result.results()] == [cid], step


def test_a_process_folds_items_from_any_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream leaves a long past to the next run; a run has nobody to leave it to."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(reduce_here, "HISTORY_BLOCKS_MAX", 0)
    histories: list[int] = []
    genuine = reduce_here.HereEngine.run

    def counted(self: Any, round: Any) -> Any:
        histories.extend([round.number] if round.history else [])
        return genuine(self, round)

    monkeypatch.setattr(reduce_here.HereEngine, "run", counted)
    with Circle(tmp_path / "homes", "ann", "bob", "cat") as circle:
        ruled = circle.party("cat").create("property-set", n=1)
        circle.meet_all()
        # Cat is away, and makes a rule that sorts below what Bob writes meanwhile.
        ruled.restrict(roles=["admin"])
        for n in range(3):
            circle.get("bob", ruled)["n"] = n
        circle.meet("ann", "bob")
        cids = []
        for _ in range(2):
            for name in ("ann", "bob", "cat"):
                circle.party(name).flush()
            publish(tmp_path / "homes" / "ann", tmp_path / "lake")
            done = run_pipeline(None, RunRequest(lake=tmp_path / "lake", out=tmp_path / "out"))
            cids.append(([result.cid for result in done.results()], [circle.party("ann").snapshot().cid]))
            circle.meet_all()
    assert all(mine == theirs for mine, theirs in cids), cids
    assert histories, "something was folded from its past"


# without an engine


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(parties=2, feeds=2, messages=60, items=10), lake, last=0.2)
    return lake.path


WATCHED = """
import sys
from echostore.cli.app import run
status = run(sys.argv[1:])
print("pyspark" in sys.modules, "py4j" in sys.modules, file=sys.stderr)
raise SystemExit(status)
"""


def command(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own, where nobody has Java; its last line on stderr tells what was loaded."""
    environment = {**os.environ, "ECHOSTORE_STATE": str(folder / "state"), "JAVA_HOME": "/nowhere", "PATH": "/nowhere"}
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd=folder,
    )


def test_a_small_lake_is_built_without_spark_and_answered_at_once_when_nothing_is_new(
    lake: Path, tmp_path: Path
) -> None:
    arguments = ("pipeline", "run", "--lake", str(lake), "--out", str(tmp_path / "out"))
    first = command(*arguments, "--json", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines()[-1] == "False False", "neither PySpark nor its gateway was loaded"
    parties = json.loads(first.stdout)["parties"]
    assert [party["epoch"] for party in parties] == [1, 1]
    again = command(*arguments, "--json", "--engine", "spark", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stderr.splitlines()[-1] == "False False", "with nothing new no engine is started"
    assert json.loads(again.stdout) == {"version": 1, "parties": parties, "stages": []}
    told = command(*arguments, folder=tmp_path)
    assert "nothing new since commit 1" in told.stderr


def test_with_nothing_new_no_stage_is_entered(lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = RunRequest(lake=lake, out=tmp_path / "out")
    assert plan_run(request).unchanged is None
    done = run_pipeline(None, request)

    def never(*given: object) -> None:
        raise AssertionError("a build was begun")

    monkeypatch.setattr(run_module, "build", never)
    unchanged = plan_run(request).unchanged
    assert unchanged is not None
    assert (unchanged.new, unchanged.commit, unchanged.stages) == (False, done.commit, ())
    assert list(unchanged.results()) == list(done.results())
    with pytest.raises(EchoError, match="was begun"):
        run_pipeline(None, RunRequest(lake=lake, out=tmp_path / "other"))


# which engine


def test_auto_takes_spark_above_the_threshold() -> None:
    most = engine_choice.LOCAL_BLOCKS_MAX
    assert [Engine.AUTO.decided(count) for count in (0, most, most + 1)] == [Engine.LOCAL, Engine.LOCAL, Engine.SPARK]
    for asked in (Engine.LOCAL, Engine.SPARK):
        assert {asked.decided(count) for count in (0, most + 1)} == {asked}


def test_blocks_are_those_of_the_parties_to_build_with_all_their_past(lake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    newest = max((lake / "log").iterdir())
    newest.rename(tmp_path / "later.json")
    runs = Lake.open(lake).at().runs()
    first = sum(row["end"] - row["start"] for row in runs.to_pylist())
    assert plan_run(RunRequest(lake=lake, out=out)).blocks() == first
    run_pipeline(None, RunRequest(lake=lake, out=out))
    (tmp_path / "later.json").rename(newest)
    runs = Lake.open(lake).at().runs()
    every = sum(row["end"] - row["start"] for row in runs.to_pylist())
    assert plan_run(RunRequest(lake=lake, out=out)).blocks() == every > first
    chosen = min(runs["party"].to_pylist())
    of_one = sum(row["end"] - row["start"] for row in runs.to_pylist() if row["party"] == chosen)
    assert plan_run(RunRequest(lake=lake, out=out, parties=(chosen.hex(),))).blocks() == of_one < every


@pytest.mark.parametrize(
    ("more", "limit", "engine"),
    [
        ((), 1000, "local"),
        ((), 10, "spark"),
        (("--engine", "local"), 10, "local"),
        (("--engine", "spark"), 1000, "spark"),
        (("--master", "local[2]"), 1000, "spark"),
        (("--memory", "1g"), 1000, "spark"),
    ],
)
def test_the_command_takes_the_engine_that_is_asked_for_or_suits(
    more: tuple[str, ...],
    limit: int,
    engine: str,
    lake: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shared_session: Any,
) -> None:
    monkeypatch.setattr(engine_choice, "LOCAL_BLOCKS_MAX", limit)
    seen: list[Any] = []
    genuine = run_pipeline

    def run(spark: Any, request: RunRequest, **given: Any) -> RunResult:
        seen.append(spark)
        return genuine(None, request, **given)

    monkeypatch.setattr(run_module, "run_pipeline", run)
    assert run_command(["pipeline", "run", "--lake", str(lake), "--out", str(tmp_path / "out"), *more]) == 0
    assert seen == [shared_session if engine == "spark" else None]
    assert f"engine {engine}: " in capsys.readouterr().err


def test_options_of_spark_and_the_local_engine_exclude_each_other(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pipeline", "run", "--lake", str(lake), "--out", str(tmp_path / "out"), "--engine", "local"]
    assert run_command([*arguments, "--master", "local[2]"]) == 2
    assert "--master and --memory are of Spark" in capsys.readouterr().err


# what goes wrong in a process


def test_a_process_that_runs_out_of_memory_says_so_and_commits_nothing(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echostore.kernel.errors import EngineFailed

    def full(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(run_module, "build", full)
    with pytest.raises(EngineFailed, match="out of memory"):
        run_pipeline(None, RunRequest(lake=lake, out=tmp_path / "out"))
    assert reading.newest(tmp_path / "out") == (None, "")


def test_whatever_a_stage_raises_over_one_party_stops_no_other(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, bad = run_module.build, min(Lake.open(lake).at().runs()["party"].to_pylist())

    def build(job: Any, parties: frozenset[bytes] | None, anew: frozenset[bytes]) -> Any:
        if parties is None or bad in parties:
            raise KeyError("what a hostile block made of it")
        return genuine(job, parties, anew)

    monkeypatch.setattr(run_module, "build", build)
    done = run_pipeline(None, RunRequest(lake=lake, out=tmp_path / "out"))
    states = {result.party: (result.state, result.detail) for result in done.results()}
    assert states.pop(bad) == ("failed", "KeyError: 'what a hostile block made of it'")
    assert {state for state, _ in states.values()} == {"built"}


# what is shown of Spark's start


def test_steps_of_the_start_are_told_in_order_as_lines(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start is stopped before Java would be: what comes until then is told."""
    from echostore.kernel.errors import EngineFailed

    def no_java() -> None:
        raise EngineFailed("no Java here")

    monkeypatch.setattr("echostore.pipeline.session.find_java", no_java)
    arguments = ["pipeline", "run", "--lake", str(lake), "--out", str(tmp_path / "out"), "--engine", "spark"]
    assert run_command(arguments) != 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("starting Spark on local[*]")]
    assert told == [
        "starting Spark on local[*]: checking the master local[*] and memory",
        "starting Spark on local[*]: looking for Java",
    ]


def test_on_a_terminal_the_start_is_shown_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, screen = os.openpty()
    monkeypatch.setenv("TERM", "xterm")

    def read_until(words: str) -> None:
        seen = ""
        while words not in seen:
            seen += os.read(keyboard, 65536).decode()

    with os.fdopen(screen, "w") as terminal, os.fdopen(keyboard, "rb", closefd=True):
        monkeypatch.setattr(sys, "stderr", terminal)
        with Output().waiting("starting Spark") as step:
            read_until("starting Spark")
            read_until("0:00:0")
            step("looking for Java")
            read_until("looking for Java")
        terminal.flush()
        read_until("ready after")
        monkeypatch.undo()


def test_the_steps_of_a_session_come_in_order(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second session in a process is refused after the steps that lead to Java."""
    from echostore.kernel.errors import EngineFailed
    from echostore.pipeline.session import SparkOptions, spark_session

    steps: list[str] = []
    with (
        pytest.raises(EngineFailed, match="already"),
        spark_session("second", SparkOptions(memory="512m"), step=steps.append),
    ):
        pass
    assert [step.split()[0] for step in steps] == ["checking", "looking", "loading"]
