"""Applying an epoch is quiet: handles stay, and live queries are told of what really changed and of nothing else (DESIGN 8, 9).

Random parties of three: items, texts, lists, logs and a view, written and deleted by all. Epochs are declared, adopted by who
has the history, installed by who slept, with and without what they leave out. Every change that live queries tell meanwhile is
held against what was to be seen before and after.
"""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.peer.bootstrap import believable, bootstrap
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from peer_builder import Circle
from test_stale_messages import blobs_of, control_from
from two_peers import sync

NAMES = ("ann", "bob", "cat")
START_MS = 1_700_000_000_000


def content(item: Any) -> object:
    """What can be seen of an item."""
    shown = {"text": _words, "growable-array": list, "threaded-log": _posts}.get(item.model, dict)
    return item.deleted, item.parent, shown(item)


def _words(item: Any) -> str:
    return str(item)


def _posts(item: Any) -> list[object]:
    return [(post.body, post.time_ms) for post in item.posts()]


QUERIES: dict[str, Callable[[Party], Any]] = {
    "tasks": lambda party: party.query(type="task"),
    "open": lambda party: party.query(type="task").where(done=False),
    "first": lambda party: party.query(type="task").order_by("n").limit(3),
    "all": lambda party: party.query(),
    "deleted": lambda party: party.query(type="task").deleted("show"),
    "below": lambda party: party.query(type="board").children(),
}


class Ear:
    """Listens to all queries of one party, and knows what was to be seen when it began to."""

    def __init__(self, party: Party) -> None:
        self.party = party
        self.told: dict[str, list[Any]] = {name: [] for name in QUERIES}
        self.before = self._seen()
        self.handles = {item.id: item for item in party.items()}
        self._ends = [make(party).subscribe(self.told[name].append) for name, make in QUERIES.items()]

    def _seen(self) -> dict[str, dict[bytes, object]]:
        return {name: {item.id: content(item) for item in make(self.party).all()} for name, make in QUERIES.items()}

    def judge(self) -> None:
        """One application was all that happened: nothing comes and goes, and nothing is told that did not change."""
        after = self._seen()
        for end in self._ends:
            end.close()
        for name, told in self.told.items():
            was, now = self.before[name], after[name]
            added = [item.id for change in told for item in change.added]
            removed = [item.id for change in told for item in change.removed]
            changed = [item.id for change in told for item in change.changed]
            assert sorted(added) == sorted(now.keys() - was.keys()), name
            assert sorted(removed) == sorted(was.keys() - now.keys()), name
            assert sorted(changed) == sorted(item for item in was.keys() & now.keys() if was[item] != now[item]), name
            assert not told or added or removed or changed or any(change.moved for change in told), name
        for item, handle in self.handles.items():
            if self.party.has(item):
                fresh = self.party.get(item)
                assert handle == fresh
                assert type(handle) is type(fresh)
                assert content(handle) == content(fresh)


class Story:
    """A circle that writes by chance."""

    def __init__(self, folder: Path, draw: Callable[[int], int]) -> None:
        self.now_ms, self.draw = START_MS, draw
        self.circle = Circle(folder, *NAMES, now_ms=lambda: self.now_ms)
        ann = self.circle.party("ann")
        self.circle.peers["ann"].view_classes.register("planner")
        self.board = ann.create("property-set", type="board", title="Summer")
        self.view = ann.create_view("planner", "Plan", title="Plan")
        self.circle.meet_all()

    def write(self, name: str, times: int) -> None:
        party = self.circle.party(name)
        for _ in range(times):
            self.now_ms += 1000
            items = [item for item in party.items() if item.type in ("task", "words", "list", "log")]
            chosen = items[self.draw(len(items))] if items else None
            self._act(party, self.draw(8), chosen)

    def _act(self, party: Party, kind: int, chosen: Any) -> None:
        parent = party.get(self.board.id) if self.draw(2) else party.get(self.view.id)
        if kind <= 1 or chosen is None:
            party.create("property-set", type="task", parent=parent, n=self.draw(9), done=bool(self.draw(2)))
        elif kind == 2:
            party.create("text", type="words", parent=parent).insert(0, "words")
        elif kind == 3:
            log = party.create("threaded-log", type="log", parent=parent)
            log.set_retention(count_max=1)
            for number in range(3):
                log.post(f"post {number}")
        elif kind == 4:
            chosen.delete()
        elif kind == 5:
            chosen.move(parent)
        elif chosen.model == "text":
            chosen.insert(0, f"more {self.draw(9)} ")
        elif chosen.model == "threaded-log":
            chosen.post("again")
        else:
            chosen["n"], chosen["done"] = self.draw(9), bool(self.draw(2))

    def epoch(self, *, discard: bool) -> None:
        """Ann declares, bob attests: both adopt it. Nothing else happens to their data."""
        ann, bob = self.circle.party("ann"), self.circle.party("bob")
        sync(ann, bob)
        self.now_ms += 60_000
        ears = [Ear(party) for party in (ann, bob)]
        number = Epochs(ann).create(discard_before_ms=self.now_ms - 1000 if discard else None).number
        for _ in range(2):
            sync(ann, bob)
            Epochs(bob).review()
        sync(ann, bob)
        for party in (ann, bob):
            base = party.runtime.processor.base
            assert base is not None
            assert base.name.number == number
        for ear in ears:
            ear.judge()

    def wake(self) -> None:
        """Cat slept: the newest epoch takes the place of what it had."""
        ann, cat = self.circle.party("ann"), self.circle.party("cat")
        cat.flush()
        control_from(ann, cat)
        epoch = believable(cat.runtime)
        base = cat.runtime.processor.base
        if epoch is None or (base is not None and base.name.number >= epoch.number):
            return
        ear = Ear(cat)
        bootstrap(cat, epoch, blobs_of(ann, cat))
        ear.judge()


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_an_epoch_is_applied_quietly(seed: int) -> None:
    chance = random.Random(seed)

    def draw(count: int) -> int:
        return chance.randrange(count)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"ECHOSTORE_STATE": str(Path(folder, "state"))}),
    ):
        story = Story(Path(folder), draw)
        with story.circle as circle:
            for round_ in range(2):
                for name in NAMES:
                    story.write(name, 1 + draw(5))
                if draw(2) or not round_:
                    circle.meet_all()
                    for name in NAMES:  # all have seen all: it may be left out
                        circle.party(name).get(story.board.id)["seen by " + name] = round_
                    circle.meet_all()
                story.epoch(discard=bool(draw(2)))
                if draw(2):
                    run_gc(circle.party("ann"))
                if draw(2):
                    story.wake()
            story.wake()
            sync(*(circle.party(name) for name in NAMES))
            assert len({circle.party(name).snapshot().cid for name in NAMES}) == 1


def test_what_an_epoch_left_out_leaves_the_answers_of_who_slept(tmp_path: Path) -> None:
    now_ms = [START_MS]
    with (
        mock.patch.dict(os.environ, {"ECHOSTORE_STATE": str(tmp_path / "state")}),
        Circle(tmp_path, *NAMES, now_ms=lambda: now_ms[0]) as circle,
    ):
        ann, bob, cat = (circle.party(name) for name in NAMES)
        gone, kept = ann.create(type="task", n=1), ann.create(type="task", n=2)
        gone.delete()
        for name in NAMES:
            circle.meet_all()
            circle.party(name).get(kept.id)["seen by " + name] = True
        circle.meet_all()
        now_ms[0] += 60_000
        kept["n"] = 3
        Epochs(ann).create(discard_before_ms=now_ms[0] - 1000)
        sync(ann, bob)
        Epochs(bob).review()
        sync(ann, bob)
        told: list[Any] = []
        with cat.query(type="task").deleted("show").subscribe(told.append):
            control_from(ann, cat)
            epoch = believable(cat.runtime)
            assert epoch is not None
            bootstrap(cat, epoch, blobs_of(ann, cat))
        assert not cat.has(gone.id)
        (change,) = told
        assert [item.id for item in change.removed] == [gone.id]
        assert [item.id for item in change.changed] == [kept.id]
        assert change.added == ()
