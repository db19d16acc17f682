"""`echostore pipeline stream` as a process: killed, stopped, started again, beside a peer that goes on writing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.cli.app import run
from echostore.pipeline.lake import Lake
from echostore.pipeline.output import reading
from echostore.pipeline.output.results import party_results
from network_peers import until
from spark.stream_jobs import held_states

WAIT_S = 240.0


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Streams that are ended whatever happens."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def arguments(folder: Path, *more: str) -> list[str]:
    given = ["--home", str(folder / "ann"), "pipeline", "stream", "--publish", "--lake", str(folder / "lake")]
    given += ["--out", str(folder / "out"), "--trigger", "0.2", "--json", *more]
    return [*given, "--master", "local[2]", "--memory", "512m"]


def start(running: list[subprocess.Popen[str]], folder: Path) -> tuple[subprocess.Popen[str], Path]:
    words = folder / f"words-{len(running)}.json"
    command = [sys.executable, "-m", "echostore", *arguments(folder)]
    with open(words, "w") as output, open(folder / f"errors-{len(running)}.txt", "w") as errors:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            text=True,
            start_new_session=True,
            # An engine that lives for seconds has no use for code that is compiled well.
            env={**os.environ, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"},
        )
    running.append(process)
    return process, words


def lines(words: Path) -> list[dict[str, Any]]:
    whole = words.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def folded(words: Path) -> int:
    return sum(line.get("rows", 0) for line in lines(words))


@pytest.mark.timeout(600)
def test_killed_stopped_and_started_again_it_ends_with_what_the_peer_has(
    tmp_path: Path,
    running: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shared_session: Any,
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "ann", name="ann") as peer:
        party = peer.create_party("Live")
        item = party.create("property-set", type="task", number=0)
        party.flush()

        def write(count: int) -> None:
            for number in range(count):
                item["number"] = number
                party.create("text", parent=item)
                party.flush()

        write(3)
        process, words = start(running, tmp_path)
        until(lambda: len(lines(words)) > 0 or process.poll() is not None, seconds=WAIT_S)
        write(5)
        until(lambda: folded(words) >= 5 or process.poll() is not None, seconds=WAIT_S)
        assert process.poll() is None, (tmp_path / "errors-0.txt").read_text()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

        write(4)
        process, words = start(running, tmp_path)
        until(lambda: folded(words) >= 4 or process.poll() is not None, seconds=WAIT_S)
        write(2)
        assert party.system_item is not None
        everything = {bytes(each.id) for each in (*party.items(), party.system_item)}
        until(
            lambda: {place[1] for place in held_states(tmp_path / "out")} == everything or process.poll() is not None,
            seconds=WAIT_S,
        )
        assert process.poll() is None, (tmp_path / "errors-1.txt").read_text()
        until(lambda: any(line["lag_p95_s"] is not None for line in lines(words)), seconds=WAIT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, (tmp_path / "errors-1.txt").read_text()
        assert lines(words)[-1]["ended"] is True

        assert run(arguments(tmp_path, "--once")) == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [each["cid"] for each in last["parties"]] == [party.snapshot().cid]
        commit, _ = reading.newest(tmp_path / "out")
        assert commit is not None
        assert [result.waiting for result in party_results(tmp_path / "out", commit)] == [0]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--trigger", "0"), "--trigger"),
        (("--trigger", "soon"), "length of time"),
        (("--epoch-every", "0"), "counts from 1"),
        (("--models", "no.such.module"), "no module"),
    ],
)
def test_what_can_not_be_done_is_refused_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], what: str
) -> None:
    Lake.create(tmp_path / "lake")
    status = run(["pipeline", "stream", "--lake", str(tmp_path / "lake"), "--out", str(tmp_path / "out"), *more])
    assert status == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
