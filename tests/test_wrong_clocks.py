"""Clocks decide nothing (FAULTS N4, D4): ten years ahead, ten years behind, stopped or jumping, the state is the same."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import echostore
from echostore.kernel.ids import feed_id
from echostore.peer.peer import Peer
from peer_builder import Circle

YEARS_MS = 10 * 365 * 86_400_000
NOW_MS = 1_760_000_000_000
NAMES = ("ann", "bob", "cat")


def ahead() -> int:
    return NOW_MS + YEARS_MS


def behind() -> int:
    return NOW_MS - YEARS_MS


def stopped() -> int:
    return NOW_MS


def jumping(seed: int) -> Callable[[], int]:
    chance = random.Random(seed)
    return lambda: NOW_MS + chance.randint(-YEARS_MS, YEARS_MS)


class Skewed(Circle):
    """Peers of one party, each with a clock of its own."""

    def __init__(self, folder: Path, clocks: dict[str, Callable[[], int]]) -> None:
        self.clocks = clocks
        super().__init__(folder, *NAMES)

    def _open(self, name: str) -> Peer:
        return echostore.open(self.folder / name, name=name, background=False, now_ms=self.clocks[name])


@pytest.mark.parametrize("clocks", list(itertools.permutations((ahead, behind, stopped))))
def test_the_causally_last_write_wins_whatever_the_clocks_say(
    tmp_path: Path, clocks: tuple[Callable[[], int], ...]
) -> None:
    with Skewed(tmp_path, dict(zip(NAMES, clocks, strict=True))) as circle:
        item = circle.party("ann").create("property-set", n=0)
        for number, name in enumerate(("bob", "cat", "ann", "cat"), 1):
            circle.meet_all()
            assert circle.get(name, item)["n"] == number - 1
            circle.get(name, item)["n"] = number
        circle.agree()
        assert {circle.get(name, item)["n"] for name in NAMES} == {4}
        assert all(circle.get(name, item).conflicts("n") == [] for name in NAMES)


@pytest.mark.parametrize("clocks", [(ahead, behind), (behind, ahead)])
def test_of_concurrent_writes_the_feed_decides_and_not_the_clock(
    tmp_path: Path, clocks: tuple[Callable[[], int], ...]
) -> None:
    with Skewed(tmp_path, {"ann": stopped, "bob": clocks[0], "cat": clocks[1]}) as circle:
        items = [circle.party("ann").create("property-set") for _ in range(5)]
        circle.meet_all()
        for item in items:
            for name in ("bob", "cat"):
                circle.get(name, item)["by"] = name
        circle.agree()
        winner = max(("bob", "cat"), key=lambda name: feed_id(circle.party(name).runtime.data.cursor.key))
        assert {circle.get(name, item)["by"] for name in NAMES for item in items} == {winner}


@pytest.mark.parametrize("seed", range(8))
def test_random_work_under_jumping_clocks_converges(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Skewed(tmp_path, {name: jumping(seed * 10 + place) for place, name in enumerate(NAMES)}) as circle:
        item = circle.party("ann").create("property-set", n=0)
        log = circle.party("ann").create("threaded-log")
        text = circle.party("ann").create("text")
        circle.meet_all()
        posted = 0
        for number in range(40):
            name = chance.choice(NAMES)
            kind = chance.randrange(4)
            if kind == 0:
                circle.get(name, item)["n"] = number
            elif kind == 1:
                circle.get(name, log).post(f"{name} {number}")
                posted += 1
            elif kind == 2:
                circle.get(name, text).insert(0, f"{number} ")
            else:
                circle.meet(*chance.sample(NAMES, 2))
        circle.agree_after_loss()
        assert len(circle.get("cat", log).posts()) == posted, "nothing is too old or too new"
