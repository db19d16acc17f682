"""Parties of real peers that make epochs: stores, signatures, sessions, folds, gc; one seed is one run."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli_process import Cli
from echostore.peer import epoch_states
from echostore.peer.epoch_states import EpochStates
from echostore.testing.checker import check_events
from echostore.testing.real_epoch_world import RealEpochWorld
from echostore.testing.world import NotSettled

SEEDS = 8
KEPT = Path(__file__).parent / "golden" / "real_epoch_seeds.json"
"""Seeds that once failed, with their sizes: they run for ever."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def run(folder: Path, seed: int, **sizes: int) -> RealEpochWorld:
    with RealEpochWorld(folder, seed, **sizes) as world:
        world.run()
    report = check_events(world.history)
    assert report.good, f"seed {seed} {sizes}: {report}"
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_real_peers_keep_every_promise(tmp_path: Path, seed: int) -> None:
    """More of them: `echostore simulate --real --peers 5 --epochs 4 --runs 100`."""
    world = run(tmp_path, seed, peers=4, epochs=3)
    assert world.finals() >= 3


@pytest.mark.parametrize("kept", json.loads(KEPT.read_text()), ids=str)
def test_seeds_that_once_failed_stay_good(tmp_path: Path, kept: dict[str, int]) -> None:
    run(tmp_path, **kept)


def test_a_seed_replays_its_run(tmp_path: Path) -> None:
    digests = [run(tmp_path / str(number), 9, peers=3, epochs=2).digest() for number in range(2)]
    assert digests[0] == digests[1]


def test_runs_hold_what_they_are_for(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in (3, 4, 5, 7):
        world = run(tmp_path / str(seed), seed, peers=5, epochs=4)
        seen |= {event["kind"] for event in world.history}
        seen |= {
            word for line in world.trace for word in ("starts from epoch", "deletes", "joins late") if word in line
        }
        seen |= {
            word for line in world.trace for word in ("leaves out", "crash", "partition", "removes") if word in line
        }
    wanted = {"declare", "attest", "dispute", "truth", "starts from epoch", "deletes", "joins late", "leaves out"}
    assert wanted | {"crash", "partition", "removes"} <= seen


# the simulator finds what is broken


def broken(folder: Path, seeds: range) -> bool:
    for seed in seeds:
        try:
            with RealEpochWorld(folder / str(seed), seed, peers=4, epochs=3) as world:
                world.run()
        except NotSettled:
            return True
        if not check_events(world.history).good:
            return True
    return False


def test_folding_from_whatever_one_stands_on_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def standing(states: EpochStates, genesis: Any) -> Any:
        base = states._party.runtime.processor.base
        return iter([base.name.genesis if base is not None and base.name.number < genesis.number else b""])

    monkeypatch.setattr(epoch_states.EpochStates, "_predecessors", standing)
    assert broken(tmp_path, range(1, 14, 3))


def test_staying_behind_the_final_epoch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from echostore.peer.epoch_agreement import Agreement

    monkeypatch.setattr(Agreement, "_follow_final", lambda agreement: None)
    assert broken(tmp_path, range(1, 14, 3))


def test_the_command_runs_real_peers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    told = cli("simulate", "--real", "--peers", "3", "--epochs", "2", "--seed", "9", "--json").ok().json()
    assert told["good"]
    (record,) = told["runs"]
    assert (record["agreed"], record["good"]) == (True, True)
    assert record["final_epochs"] >= 2
    assert not (tmp_path / "home").exists()
    assert cli("simulate", "--real", "--peers", "3").status == 2, "without epochs nothing needs real peers"
