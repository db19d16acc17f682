"""Real `echostore serve` processes on the loopback, with a fault proxy between each two of them.

Every history is judged by the independent checker: I1 to I7, I9, I11 and I12.
"""

import shutil
from pathlib import Path

import pytest

from process_lab import ProxyLab, chaos, cuts_and_drops, until


def test_three_processes_write_through_cuts_and_drops_and_agree(tmp_path: Path) -> None:
    with ProxyLab(tmp_path, "abc") as lab:
        cuts_and_drops(lab)
        lab.judge()


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
