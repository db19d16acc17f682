"""Real `echostore serve` processes on the loopback, with a fault proxy between each two of them.

Every history is judged by the independent checker: I1 to I7, I9, I11 and I12.
"""

import shutil
from pathlib import Path

import pytest

from echostore.testing.checker import Event, check_events
from process_lab import ProxyLab, chaos, cuts_and_drops, until


def test_three_processes_write_through_cuts_and_drops_and_agree(tmp_path: Path) -> None:
    with ProxyLab(tmp_path, "abc") as lab:
        cuts_and_drops(lab)
        lab.judge()
        sessions_count(lab.history())


def sessions_count(events: list[Event]) -> None:
    """What clients read was judged: the same history with one thing that a client must not see is found out (I9)."""
    reads = [event for event in events if event["kind"] == "read"]
    assert {event["client"] for event in reads} == {f"{role}-{name}" for role in ("client", "reader") for name in "abc"}
    last = events[-1]["time"]
    own = [event for event in reads if event["client"] == "client-b"]
    told = [event for event in events if event["kind"] == "live" and event["client"] == "reader-c"]
    assert told[-1]["shows"]
    first = next(event for event in told if event["added"])
    streamed = [event for event in events if event["kind"] == "stream" and event["entries"]]
    unseen = {**own[-1], "time": last, "client": "another", "timeframe": {}}
    mine = next(event for event in events if event["kind"] == "inv" and event["client"] == "client-b")
    broken = {
        "saw": [*events, {**own[0], "time": last}],
        "does not see its own write": [
            {**event, "client": "another"} if event is mine else event for event in [*events, unseen]
        ],
        "twice": [*events, {**first, "time": last}],
        "lacks": [event if event is not first else {**event, "added": event["added"][1:]} for event in events],
        "still shows": [event if event is not told[-1] else {**event, "shows": event["shows"][1:]} for event in events],
        "repeated": [*events, {**streamed[0], "time": last, "stream": "again", "after": streamed[0]["anchor"]}],
    }
    for found, history in broken.items():
        violations = [each for each in check_events(history).violations if found in each.what]
        assert violations, f"nobody noticed: {found}"
        assert {each.invariant for each in violations} == {"I9"}, found


@pytest.mark.parametrize(("names", "seed", "steps"), [("abc", 1, 40), ("abcde", 2, 40)])
def test_random_faults_lose_nothing(tmp_path: Path, names: str, seed: int, steps: int) -> None:
    with ProxyLab(tmp_path, names) as lab:
        lab.found()
        done = list(chaos(lab, seed, steps))
        lab.settle()
        for name in names:
            lab.look(name)
        report = lab.judge()
        assert report.events > 5 * steps, done


def test_a_service_killed_in_the_middle_of_writing_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    with ProxyLab(tmp_path, "ab") as lab:
        lab.found()
        for name in "abab":
            burst = lab.burst(name, 1000)
            until(lambda burst=burst: len(burst.acked) >= 5, "a few writes")
            lab.kill(name)
            burst.end()
            lab.start(name)
        lab.settle()
        lab.judge()
        assert sum(event["kind"] == "ok" for event in lab.events) >= 20


def test_what_is_written_reaches_those_who_never_meet_the_writer(tmp_path: Path) -> None:
    with ProxyLab(tmp_path, "abcd", links="ab,bc,cd") as lab:
        lab.found()
        for name in "abcd":
            lab.write(name)
        lab.settle()
        lab.kill("b")
        for name in "acd":
            lab.write(name)
        lab.start("b")
        lab.settle()
        ends = {name: {each.device for each in host.peer.network.connections()} for name, host in lab.hosts.items()}
        devices = {name: bytes(host.peer.device) for name, host in lab.hosts.items()}
        assert devices["d"] not in ends["a"] | ends["b"]
        assert ends["d"] == {devices["c"]}
        lab.judge()


@pytest.mark.parametrize("means_harm", [False, True])
def test_after_a_rollback_of_the_disk_a_device_opens_new_feeds_or_is_proven_to_fork(
    tmp_path: Path, means_harm: bool
) -> None:
    with ProxyLab(tmp_path, "abcd") as lab:
        lab.found()
        for name in "abcd":
            lab.write(name)
        lab.settle()
        lab.stop("d")
        kept = ("d", "d-state", "d.jsonl")
        for each in kept:
            _copy(tmp_path / each, tmp_path / f"kept-{each}")
        lab.partition("ac|b")
        lab.start("d", only="a")
        lab.write("d", size=2)
        until(lambda: lab.has("a", "d", 2), "a has the first branch")
        lab.kill("d")
        first = (tmp_path / "d.jsonl").read_text().splitlines()[_lines(tmp_path / "kept-d.jsonl") :]
        (tmp_path / "first-d.jsonl").write_text("\n".join(first) + "\n")
        for each in kept:
            _remove(tmp_path / each)
            (tmp_path / f"kept-{each}").rename(tmp_path / each)
        lab.drop("a", "d")
        lab.start("d", only="b", **({"LAB_FORKS": "yes"} if means_harm else {}))
        lab.write("d", size=3)
        until(lambda: lab.has("b", "d", 3), "b has the second branch")
        lab.kill("d")
        for name in "abc":
            lab.write(name)
        lab.heal()
        lab.settle(feeds_of="abc" if means_harm else None)
        lab.judge(byzantine="d")
        for kind, peers in (("fork", "abc"), ("exclude", "ab")):
            told = {event["peer"] for event in lab.history() if event["kind"] == kind and event["peer"] != "d"}
            assert told >= set(peers) if means_harm else not told


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.sock"))
    else:
        shutil.copy(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
