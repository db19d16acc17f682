"""Parties that make epochs, simulated: many seeds, and a checker that notices when one goes wrong."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.party import epoch_chain
from echostore.kernel.party.credentials import EpochAttest
from echostore.testing.checker import check_events
from echostore.testing.epoch_node import HONEST, EpochNode
from echostore.testing.epoch_world import EpochWorld
from echostore.testing.history_epochs import fold
from echostore.testing.world import NotSettled

SEEDS = 300
KEPT = Path(__file__).parent / "golden" / "epoch_seeds.json"
"""Seeds that once failed, with their sizes: they run for ever."""


def run(seed: int, **sizes: int) -> EpochWorld:
    world = EpochWorld(seed, **sizes).run()  # type: ignore[arg-type]  # numbers
    report = check_events(world.history)
    assert report.good, f"seed {seed} {sizes}: {report}"
    return world


@pytest.mark.parametrize("part", range(10))
def test_three_hundred_parties_keep_every_promise(part: int) -> None:
    """The full size is `echostore simulate --peers 7 --epochs 20 --seed N`."""
    for seed in range(part * SEEDS // 10, (part + 1) * SEEDS // 10):
        run(seed, peers=4 + seed % 2, epochs=3)


def test_one_party_of_seven_makes_twenty_epochs() -> None:
    world = run(1, peers=7, epochs=20)
    assert world.finals() >= 20
    conducts = sorted(node.conduct for node in world.nodes.values())
    assert conducts[0] == "disputer"
    assert "liar" in conducts
    assert len(world.nodes) == 11, "two joined late, one was invited in the end, and one came back"


@pytest.mark.parametrize("kept", json.loads(KEPT.read_text()), ids=str)
def test_seeds_that_once_failed_stay_good(kept: dict[str, int]) -> None:
    run(**kept)


def test_a_seed_replays_its_run() -> None:
    assert run(5, peers=4, epochs=2).digest() == run(5, peers=4, epochs=2).digest()
    assert run(6, peers=4, epochs=2).digest() != run(5, peers=4, epochs=2).digest()


def test_runs_hold_what_they_are_for() -> None:
    """Over some seeds: lies, disputes, rivals, removals, crashes, partitions, starts from an epoch."""
    seen: set[str] = set()
    for seed in range(25):
        world = run(seed, peers=5, epochs=4)
        seen |= {event["kind"] for event in world.history}
        seen |= {"from epoch" for event in world.history if event["kind"] == "boot" and event.get("base")}
        seen |= {line.split()[1] for line in world.trace}
        for node in world.nodes.values():
            if node.conduct == HONEST:
                seen |= {"rivals" for epoch in node.machine.epoch_tally().chain if epoch.rivals}
                seen |= {"truncated" for log in node.logs.values() if log.start}
    assert {"declare", "attest", "dispute", "from epoch", "rivals", "truncated", "crash", "partition", "a"} <= seen


# the simulator finds what is broken


def broken(seeds: range, **sizes: int) -> list[str]:
    """Invariants that some seed breaks; "stuck" for runs that do not end."""
    found: list[str] = []
    for seed in seeds:
        world = EpochWorld(seed, peers=5, epochs=3, **sizes)  # type: ignore[arg-type]  # numbers
        try:
            world.run()
        except AssertionError:
            found.append("stuck")
            continue
        found += list(check_events(world.history).counts)
        if found:
            break
    return found


def test_attesting_without_recomputing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(node: EpochNode, epoch: epoch_chain.Epoch) -> bool:
        said = epoch.genesis
        fields = {"number": epoch.number, "genesis": epoch.hash.hex(), "snapshot": said.snapshot.hex()}
        node.tell("attest", identity=node.identity.hex(), **fields)
        node.say(EpochAttest(epoch.number, epoch.hash, said.snapshot))
        return True

    monkeypatch.setattr(EpochNode, "_judge", believe)
    assert "I8" in broken(range(20))


def test_voting_for_what_contradicts_an_earlier_vote_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_chain.Tally, "fear", lambda *arguments: None)
    # Partitions alone do it: with honest members only, whose votes are split.
    assert "I10" in broken(range(62, 80), liars=0, disputers=0, hostile=0, joiners=0)


def test_pins_that_are_missing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from echostore.kernel.party.machine import PartyMachine
    from echostore.kernel.party.pins import NO_PINS

    monkeypatch.setattr(PartyMachine, "_pins_of", lambda machine, child, kept=(): NO_PINS)
    assert broken(range(60))


def test_waiting_for_ever_for_what_a_hostile_admin_declared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The founder does not remove anybody who stalls the party here: it must go on all the same."""
    monkeypatch.setattr(EpochWorld, "_remove", lambda world: None)
    run(0, peers=4, epochs=2, hostile=1)
    monkeypatch.setattr(EpochNode, "passed", lambda node: frozenset())
    monkeypatch.setattr("echostore.testing.epoch_world.STEPS_MAX", 4_000)
    with pytest.raises(NotSettled):
        run(0, peers=4, epochs=2, hostile=1)
    world = EpochWorld(0, peers=4, epochs=0, hostile=1).run()
    assert "I14" in check_events(world.history).counts


def test_hostile_admins_are_there_and_declare_what_nobody_accepts() -> None:
    said: set[str] = set()
    for seed in range(0, 12, 3):
        world = run(seed, peers=5, epochs=3)
        assert "hostile" in {node.conduct for node in world.nodes.values()}
        said |= {line.rpartition(": ")[2] for line in world.trace if "nobody can accept" in line}
    assert said == {"ahead", "discards", "models"}


# the checker finds what is wrong in a history


def good_history() -> list[dict[str, Any]]:
    world = EpochWorld(3, peers=4, epochs=3, liars=0, disputers=0, hostile=0, joiners=0, removals=False).run()
    assert check_events(world.history).good
    return copy.deepcopy(world.history)


def first(history: list[dict[str, Any]], kind: str, **fields: Any) -> dict[str, Any]:
    return next(
        event
        for event in history
        if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items())
    )


def _another_state(history: list[dict[str, Any]]) -> None:
    first(history, "declare")["snapshot"] = "00" * 32
    for event in history:
        if event["kind"] == "attest" and event["genesis"] == first(history, "declare")["genesis"]:
            event["snapshot"] = "00" * 32


def _final_without_quorum(history: list[dict[str, Any]]) -> None:
    for event in list(history):
        if event["kind"] == "attest":
            history.remove(event)


def _chain_with_a_gap(history: list[dict[str, Any]]) -> None:
    long = next(event for event in history if event["kind"] == "chain" and len(event["epochs"]) > 1)
    del long["epochs"][0]


def _two_votes(history: list[dict[str, Any]]) -> None:
    attest = copy.deepcopy(first(history, "attest"))
    declare = copy.deepcopy(first(history, "declare", genesis=attest["genesis"]))
    declare["genesis"] = attest["genesis"] = "ff" * 32
    at = history.index(first(history, "attest"))
    history[at + 1 : at + 1] = [{**declare, "identity": "ee" * 32}, attest]


def _goes_back(history: list[dict[str, Any]]) -> None:
    second = first(history, "declare", number=2)
    second["timeframe"] = {}


def _different_ends(history: list[dict[str, Any]]) -> None:
    last = [event for event in history if event["kind"] == "chain"][-1]
    last["epochs"] = last["epochs"][:-1]
    history.insert(-1, copy.deepcopy(last))


def _lost_in_the_epoch(history: list[dict[str, Any]]) -> None:
    first([*reversed(history)], "state")["state_hash"] = "00" * 32


def _disputes_the_truth(history: list[dict[str, Any]]) -> None:
    declared = first(history, "declare")
    event = {"kind": "dispute", "peer": "a", "number": 1, "genesis": declared["genesis"]}
    history.insert(history.index(declared) + 1, event)


def _no_epoch_when_asked(history: list[dict[str, Any]]) -> None:
    first(history, "ask", what="epoch")["timeframe"] = {first(history, "append")["feed"]: [9_999, ""]}


def _nobody_comes_in(history: list[dict[str, Any]]) -> None:
    guest = first(history, "ask", what="invitation")["peer"]
    history[:] = [event for event in history if event["kind"] == "ask" or event.get("peer") != guest]
    history[-1]["peers"].remove(guest)


def _nobody_comes_back(history: list[dict[str, Any]]) -> None:
    asked = first(history, "ask", what="recovery")
    (feed, place), *_ = asked["timeframe"].items()
    asked["timeframe"][feed] = [place[0] + 1, place[1]]
    state = first([*reversed(history)], "state", peer=asked["peer"])
    state["timeframe"] = {name: at for name, at in state["timeframe"].items() if name != feed}


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (_another_state, "I8"),
        (_lost_in_the_epoch, "I8"),
        (_final_without_quorum, "I10"),
        (_chain_with_a_gap, "I10"),
        (_two_votes, "I10"),
        (_goes_back, "I10"),
        (_different_ends, "I10"),
        (_disputes_the_truth, "I10"),
        (_no_epoch_when_asked, "I14"),
        (_nobody_comes_in, "I14"),
        (_nobody_comes_back, "I14"),
    ],
)
def test_the_checker_finds_it(spoil: Any, invariant: str) -> None:
    history = good_history()
    spoil(history)
    assert invariant in check_events(history).counts


def test_the_checker_folds_by_itself() -> None:
    places = {"f": {0: "aa", 1: "bb"}, "g": {0: "cc"}}
    whole = fold(places, {"f": [1, "bb"], "g": [0, "cc"]})
    assert whole is not None
    assert whole == fold(places, {"g": [0, "cc"], "f": [1, "bb"]})
    assert whole != fold(places, {"f": [0, "aa"], "g": [0, "cc"]})
    assert fold(places, {"f": [2, "dd"]}) is None
    assert fold(places, {"f": [1, "aa"]}) is None, "another branch"
