"""What it costs to open a party, counted: steps of the database, blocks decoded, items loaded. No clock is asked.

The same items after a short and after a long history cost the same. More items may cost more, which shows that the
counter counts.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echostore
from peer_builder import Circle

ITEMS = 40
SHORT, LONG = 8, 80
"""Messages for each item."""


class Steps:
    """Counts the steps of all databases: a row that is read is a few."""

    def __init__(self) -> None:
        self.taken = 0
        self._connect: Callable[..., Any] = sqlite3.connect

    def connect(self, *arguments: Any, **named: Any) -> Any:
        connection = self._connect(*arguments, **named)
        connection.set_progress_handler(self._step, 1)
        return connection

    def _step(self) -> int:
        self.taken += 1
        return 0


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    counter = Steps()
    monkeypatch.setattr(sqlite3, "connect", counter.connect)
    return counter


def history(circle: Circle, items: int, rounds: int) -> None:
    """Two members write every item in turn, a message each; half of what each round says is by the other one."""
    made = [circle.party("ann").create(type="task", n=-1).id for _ in range(items)]
    text = circle.party("ann").create("text", type="notes").id
    circle.meet("ann", "bob")
    for number in range(rounds):
        writer = circle.party(("ann", "bob")[number % 2])
        for item in made:
            writer.get(item)["n"] = number
        writer.get(text).append("x" if number % 3 else "")
        if number % 8 == 7:
            circle.meet("ann", "bob")
    circle.meet_all()


def opened(circle: Circle, steps: Steps) -> tuple[int, int, int]:
    """Closes and opens ann's peer, and asks for the tasks; gives steps, decoded data blocks, loaded items."""
    circle.peers["ann"].close()
    steps.taken = 0
    circle.peers["ann"] = peer = circle._open("ann")
    party: echostore.Party = peer.party(circle.key)
    party.query(type="task").where(n__ge=0).count()
    processor = party.runtime.processor
    control = sum(feed.held for feed in party.status.feeds if feed.kind == "control")
    return steps.taken, max(0, processor.reader.decodes - control), processor.state.loads


def costs(folder: Path, steps: Steps, items: int, rounds: int) -> int:
    with Circle(folder, "ann", "bob") as circle:
        history(circle, items, rounds)
        held = sum(feed.held for feed in circle.party("ann").status.feeds if feed.kind == "data")
        assert held >= items * rounds, "a message each, or there is no history"
        opened(circle, steps)  # what is worked out once for a process is not what is asked here
        taken, decoded, loaded = opened(circle, steps)
    assert decoded == 0, "no data block is decoded"
    assert loaded <= 1, "no item is loaded, but for the party's own"
    return taken


def test_opening_costs_what_lives_and_not_what_was(tmp_path: Path, steps: Steps) -> None:
    short = costs(tmp_path / "short", steps, ITEMS, SHORT)
    long = costs(tmp_path / "long", steps, ITEMS, LONG)
    many = costs(tmp_path / "many", steps, 4 * ITEMS, SHORT)
    assert long <= short * 1.1, f"{LONG // SHORT} times the history: {long} steps against {short}"
    assert many > short * 1.5, "the counter sees what is read"
