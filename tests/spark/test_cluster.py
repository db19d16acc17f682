"""The same job on other engines gives the same bytes: two workers of a standalone cluster, `local-cluster`, and one of
their executors killed in the middle of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.testing.lake_answers import PartyAnswer, lake_answers
from spark.standalone import cluster

DRIVER = """
import json, os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from echostore.pipeline.run import RunRequest, run_pipeline
from echostore.pipeline.session import SparkOptions, spark_session
from spark.standalone import executors

lake, out, master, _, kill, above = sys.argv[1:]
settings = {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.executor.memory": "512m",
    "spark.executor.cores": "1", "spark.ui.enabled": "false",
}
killed = []

def kill_one():
    until = time.monotonic() + 120
    while not killed and time.monotonic() < until:
        # A parcel of the reduce stage lies in the attempt's folder: the job is in its middle.
        if any(Path(out).glob("epoch=1/attempt=*/states/*")):
            found = executors(int(above))
            if found:
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])
                return
        time.sleep(0.02)

with spark_session("cluster", SparkOptions(master=master, memory="512m", short=True, settings=settings)) as spark:
    if kill == "kill":
        threading.Thread(target=kill_one, daemon=True).start()
    done = run_pipeline(spark, RunRequest(lake=Path(lake), out=Path(out)))
    print(json.dumps({
        "results": [result.document() for result in done.results()],
        "killed": len(killed),
        "cores": spark.sparkContext.defaultParallelism,
    }))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PartyAnswer]]:
    folder = tmp_path_factory.mktemp("cluster")
    lake = Lake.create(folder / "lake")
    generate(Shape(parties=2, feeds=3, messages=400, items=40, mix=(("property-set", 3), ("text", 1)), faults=4), lake)
    return lake.path, list(lake_answers(lake, folder / "observer"))


def drive(lake: Path, out: Path, master: str, *, kill: bool = False) -> dict[str, object]:
    """Run the job in a driver of its own. Executors are looked for below this process, and nowhere else."""
    script = out.parent / "driver.py"
    script.write_text(DRIVER)
    tests = str(Path(__file__).resolve().parents[1])
    above = str(os.getpid())
    done = subprocess.run(
        [sys.executable, str(script), str(lake), str(out), master, tests, "kill" if kill else "live", above],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check(answer: dict[str, object], answers: list[PartyAnswer]) -> None:
    found = {result["party"]: result["cid"] for result in answer["results"]}  # type: ignore[attr-defined]
    assert found == {each.party.hex(): each.cid for each in answers}
    assert answer["cores"] == 2


@pytest.mark.timeout(500)
def test_a_standalone_cluster_gives_the_same_cids(made: tuple[Path, list[PartyAnswer]], tmp_path: Path) -> None:
    lake, answers = made
    with cluster(tmp_path, workers=2) as master:
        check(drive(lake, tmp_path / "out", master), answers)


@pytest.mark.timeout(500)
def test_an_executor_killed_in_the_middle_changes_nothing(made: tuple[Path, list[PartyAnswer]], tmp_path: Path) -> None:
    lake, answers = made
    answer = drive(lake, tmp_path / "out", "local-cluster[2,1,1024]", kill=True)
    check(answer, answers)
    assert answer["killed"] == 1
