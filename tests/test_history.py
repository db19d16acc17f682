"""The past: as_of, history and diff say what was read at the time."""

import random
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import EchoError, Refused, UsageError
from echostore.kernel.models.property_set import DELETED
from peer_builder import Circle


class Clock:
    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        self.ms += 1000
        return self.ms

    @property
    def now(self) -> datetime:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.ms)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob", now_ms=clock) as made:
        yield made


def busy(circle: Circle, chance: random.Random) -> None:
    """Moves, deletions, texts, lists, logs, by both."""
    party = circle.party(chance.choice(circle.names))
    notes = [item for item in party.items() if item.type == "note"]
    verb = chance.choice(["create", "set", "move", "delete", "type", "append", "post", "undo", "meet"])
    if verb == "create" or len(notes) < 2:
        party.create(type="note", parent=chance.choice([None, *notes]), n=0)
    elif verb == "set":
        chance.choice(notes)["n"] = chance.randrange(9)
    elif verb == "move":
        with suppress(Refused):  # a cycle
            chance.choice(notes).move(chance.choice(notes))
    elif verb == "delete":
        chance.choice(notes).delete()
    elif verb == "undo":
        party.undo()
    elif verb == "meet":
        circle.meet_all()
    else:
        model = {"type": "text", "append": "growable-array", "post": "threaded-log"}[verb]
        found = [item for item in party.items() if item.model == model]
        item = found[0] if found else party.create(model)
        if verb == "type":
            item.insert(chance.randrange(len(item) + 1), "ab")
        elif verb == "append":
            item.append(chance.choice(notes))
        else:
            item.post("x")


@pytest.mark.parametrize("seed", range(4))
def test_the_past_has_the_cid_that_was_taken_then(circle: Circle, clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    moments = []
    for _ in range(6):
        for _ in range(12):
            busy(circle, chance)
        circle.meet_all()
        party = circle.party("ann")
        cid = party.snapshot().cid
        moments.append((party.anchor(), party.timeframe, clock.now, cid))
    for anchor, timeframe, when, cid in moments:
        for name in circle.names:
            assert circle.party(name).as_of(anchor).snapshot().cid == cid
            assert circle.party(name).as_of(str(anchor)).snapshot().cid == cid
        assert circle.party("ann").as_of(timeframe).snapshot().cid == cid
        assert circle.party("ann").as_of(when).snapshot().cid == cid
    circle.restart("bob", lose=("items.db",))
    assert circle.party("bob").as_of(moments[0][0]).snapshot().cid == moments[0][3]


def test_the_past_shows_what_was_deleted_moved_and_typed_since(circle: Circle) -> None:
    party = circle.party("ann")
    board, task = party.create(type="board"), party.create(type="task", n=1)
    text = party.create("text", parent=task)
    text.insert(0, "first")
    anchor = party.anchor()
    task.move(board)
    text.insert(0, "not ")
    task["n"] = 2
    board.delete()
    then = party.as_of(anchor)
    assert then.get(task.id)["n"] == 1
    assert then.get(task.id).parent is None
    assert str(then.get(text.id)) == "first"
    assert not then.get(task.id).deleted
    assert then.query(type="task").count() == 1
    assert party.query(type="task").count() == 0


def test_the_past_holds_under_the_membership_of_then(circle: Circle) -> None:
    party = circle.party("ann")
    item = party.create(n=1)
    circle.meet_all()
    circle.get("bob", item)["n"] = 2
    circle.meet_all()
    anchor, cid = party.anchor(), party.snapshot().cid
    circle.get("bob", item)["n"] = "unseen"
    party.members.remove(circle.peers["bob"].identity)
    circle.meet_all()
    assert party.as_of(anchor).snapshot().cid == cid
    assert item["n"] == 2


def test_the_past_can_not_be_written(circle: Circle) -> None:
    party = circle.party("ann")
    item = party.create(n=1)
    then = party.as_of(party.anchor())
    for write in (lambda: then.get(item.id).__setitem__("n", 2), lambda: then.create(n=1), then.undo):
        with pytest.raises(Refused):
            write()
    assert item["n"] == 1


def test_a_moment_of_another_party_is_refused(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    other = circle.peers["ann"].create_party("Other")
    for asked in (circle.party("ann").as_of, item.diff):
        with pytest.raises(UsageError, match="another party"):
            asked(other.anchor())


def test_a_moment_that_is_not_here_yet_is_refused(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    item["n"] = 2
    ahead = circle.party("ann").anchor()
    for asked in (circle.party("bob").as_of, circle.get("bob", item).diff):
        with pytest.raises(EchoError, match="not here yet"):
            asked(ahead)
    circle.meet_all()
    assert circle.party("bob").as_of(ahead).get(item.id)["n"] == 2


def test_a_time_without_a_zone_is_refused(circle: Circle) -> None:
    with pytest.raises(UsageError, match="time zone"):
        circle.party("ann").as_of(datetime(2024, 1, 1))  # noqa: DTZ001  # the mistake under test


def test_before_the_party_there_was_nothing(circle: Circle) -> None:
    circle.party("ann").create(n=1)
    assert circle.party("ann").as_of(datetime(2000, 1, 1, tzinfo=UTC)).items() == []


# one item


def test_history_names_who_when_and_what(circle: Circle) -> None:
    item = circle.party("ann").create(type="note", n=1)
    circle.meet_all()
    circle.get("bob", item)["n"] = 2
    circle.meet_all()
    del item["n"]
    circle.party("ann").create(type="other")
    item.move(None)
    item.name = "Named"
    history = item.history()
    assert [revision.author for revision in history] == ["ann", "bob", "ann", "ann", "ann"]
    assert [revision.what[-1] for revision in history] == [
        "n = 1",
        "n = 2",
        "n deleted",
        "moved",
        "metadata display_name = 'Named'",
    ]
    assert history[0].what[0] == "created as property-set@1"
    assert [revision.depth for revision in history] == sorted(revision.depth for revision in history)
    circle.restart("bob", lose=("items.db",))
    circle.meet_all()
    assert circle.get("bob", item).history() == history


def test_diff_between_two_moments(circle: Circle) -> None:
    party = circle.party("ann")
    item = party.create(n=1, m={"a": 1, "b": 2}, gone=True)
    first = party.anchor()
    item["n"] = 2
    item["m", "a"] = 5
    second = party.anchor()
    del item["gone"]
    item["fresh"] = [1]
    found = {".".join(one.path): (one.kind, one.before, one.after) for one in item.diff(first)}
    assert found == {
        "n": ("changed", 1, 2),
        "m.a": ("changed", 1, 5),
        "gone": ("removed", True, DELETED),
        "fresh": ("added", DELETED, [1]),
    }
    assert {".".join(one.path) for one in item.diff(first, second)} == {"n", "m.a"}
    assert item.diff(second, second) == []


def test_diff_from_before_an_item_was_made(circle: Circle) -> None:
    party = circle.party("ann")
    before = party.anchor()
    text = party.create("text", parent=party.create(type="board"))
    text.insert(0, "hello")
    assert [(one.kind, one.after) for one in text.diff(before)] == [("added", "hello")]


def test_diff_of_texts_equals_what_as_of_reads(circle: Circle) -> None:
    text = circle.party("ann").create("text")
    text.insert(0, "hello")
    circle.meet_all()
    anchor = circle.party("ann").anchor()
    circle.get("bob", text).insert(5, " world")
    circle.meet_all()
    (one,) = text.diff(anchor)
    assert (one.before, one.after) == ("hello", "hello world")
    assert str(circle.party("bob").as_of(anchor).get(text.id)) == one.before


def test_conflicts_show_what_lost(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    item["n"] = "ann's"
    circle.get("bob", item)["n"] = "bob's"
    circle.meet_all()
    assert [item["n"], *item.conflicts("n")] in (["ann's", "bob's"], ["bob's", "ann's"])
    item["n"] = "settled"
    assert item.conflicts("n") == []
    assert echostore.Item is not None
