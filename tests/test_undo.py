"""Undo and redo: every model, several steps, after a restart, beside others' work, which is never erased."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Refused, UsageError
from echostore.kernel.ids import ItemId
from echostore.peer import undo_images
from echostore.peer.party import Party
from peer_builder import Circle


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


class Desk:
    """One of each, with something in it."""

    def __init__(self, party: Party) -> None:
        self.party = party
        with party.batch():
            self.set = party.create(type="note", n=1, m={"a": 1, "b": {"c": 2}})
            self.other = party.create(type="note")
            self.text = party.create("text")
            self.list = party.create("growable-array")
            self.log = party.create("threaded-log")
        self.set.add("tags", "x")
        self.text.insert(0, "hello")
        party.flush()
        self.list.append(1, 2, 3)
        party.flush()
        self.log.post("first")
        party.flush()

    def seen(self) -> dict[str, Any]:
        """What a reader sees of the party."""
        items = {item.id.hex(): item.value() for item in self.party.items() if item.model != "threaded-log"}
        posts = [post.body for post in self.party.get(self.log.id).posts()]
        homes = {item.id.hex(): getattr(item.parent, "id", None) for item in self.party.items()}
        embedded = {
            item.id.hex(): [child.id for child in item.embedded() if not child.deleted] for item in self.party.items()
        }
        names = {item.id.hex(): item.name for item in self.party.items()}
        return {"items": items, "posts": posts, "homes": homes, "embedded": embedded, "names": names}


@pytest.fixture
def desk(circle: Circle) -> Desk:
    return Desk(circle.party("ann"))


def _batch(desk: Desk) -> None:
    with desk.party.batch():
        made = desk.party.create(type="note", n=9)
        desk.set["n"] = 2
        desk.text.insert(0, "oh ")
        desk.list.append(made)
        desk.log.post("second")
        desk.other.move(desk.set)
        desk.set.increment("n")


def _twice(desk: Desk) -> None:
    with desk.party.batch():
        for value in (2, 3):
            desk.set["n"] = value
            desk.set.add("tags", "y")
            desk.set.remove("tags", "x")
            desk.set["m"] = {"a": value}


STEPS: dict[str, Callable[[Desk], object]] = {
    "set": lambda desk: desk.set.__setitem__("n", 2),
    "set anew": lambda desk: desk.set.__setitem__("fresh", 2),
    "set nested": lambda desk: desk.set.__setitem__(("m", "b", "c"), 3),
    "set above nested": lambda desk: desk.set.__setitem__("m", 5),
    "delete": lambda desk: desk.set.__delitem__("n"),
    "delete nested": lambda desk: desk.set.__delitem__(("m", "a")),
    "add": lambda desk: desk.set.add("tags", "y"),
    "add the first": lambda desk: desk.set.add("fresh", "y"),
    "remove": lambda desk: desk.set.remove("tags", "x"),
    "increment": lambda desk: desk.set.increment("n", 5),
    "increment of nothing": lambda desk: desk.set.increment("fresh", 5),
    "update": lambda desk: desk.set.update(n=7, fresh=8),
    "create": lambda desk: desk.party.create(type="note", n=4, parent=desk.set),
    "delete the item": lambda desk: desk.other.delete(),
    "name": lambda desk: setattr(desk.set, "name", "Named"),
    "move": lambda desk: desk.other.move(desk.set),
    "embed": lambda desk: desk.other.embed_in(desk.set),
    "insert text": lambda desk: desk.text.insert(5, " world"),
    "delete text": lambda desk: desk.text.delete(1, 3),
    "append": lambda desk: desk.list.append("new", desk.set),
    "delete an element": lambda desk: desk.list.__delitem__(1),
    "set an element": lambda desk: desk.list.__setitem__(1, "two"),
    "move an element": lambda desk: desk.list.move_element(0, 2),
    "post": lambda desk: desk.log.post("second"),
    "a batch of everything": _batch,
    "the same twice in a batch": _twice,
}


@pytest.mark.parametrize("what", list(STEPS))
def test_undo_puts_back_what_was_and_redo_what_came(circle: Circle, desk: Desk, what: str) -> None:
    before = desk.seen()
    STEPS[what](desk)
    after = desk.seen()
    assert after != before
    for _ in range(2):
        assert desk.party.undo()
        assert desk.seen() == before
        assert desk.party.redo()
        assert desk.seen() == after
    assert desk.party.undo()
    circle.agree_after_loss()


@pytest.mark.parametrize("what", list(STEPS))
def test_undo_works_after_a_restart(circle: Circle, desk: Desk, what: str) -> None:
    before = desk.seen()
    STEPS[what](desk)
    after = desk.seen()
    desk.party = circle.restart("ann")
    assert desk.party.undo()
    assert desk.seen() == before
    desk.party = circle.restart("ann", lose=("items.db",))
    assert desk.party.redo()
    assert desk.seen() == after
    circle.agree()


@pytest.mark.parametrize("seed", range(16))
def test_many_steps_back_and_forth_pass_the_same_states(circle: Circle, desk: Desk, seed: int) -> None:
    chance = random.Random(seed)
    states = [desk.seen()]
    for _ in range(10):
        try:
            STEPS[chance.choice(list(STEPS))](desk)
        except (KeyError, Refused, UsageError):
            continue
        desk.party.flush()
        states.append(desk.seen())
    states = _without_repeats(states)
    for _ in range(2):
        assert _walk(desk, desk.party.undo, states[0]) == states[::-1]
        assert _walk(desk, desk.party.redo, None) == states
    assert not desk.party.redo()
    circle.agree_after_loss()


def _walk(desk: Desk, step: Callable[[], bool], until: object) -> list[dict[str, Any]]:
    """The states that steps lead through."""
    found = [desk.seen()]
    while found[-1] != until and step():
        found.append(desk.seen())
    return _without_repeats(found)


def _without_repeats(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [state for state, before in zip(states, [None, *states], strict=False) if state != before]


def test_typing_and_deleting_part_of_it_can_both_be_undone(desk: Desk) -> None:
    desk.text.insert(0, "oh ")
    desk.party.flush()
    desk.text.delete(1, 3)
    desk.party.flush()
    assert str(desk.text) == "oello"
    desk.party.undo()
    assert str(desk.text) == "oh hello"
    desk.party.undo()
    assert str(desk.text) == "hello"


def test_two_appends_that_are_undone_come_back_in_their_order(desk: Desk) -> None:
    desk.list.append("first")
    desk.party.flush()
    desk.list.append("second")
    desk.party.flush()
    for step in (desk.party.undo, desk.party.undo, desk.party.redo, desk.party.redo):
        assert step()
    assert desk.list.to_list() == [1, 2, 3, "first", "second"]


def test_undo_goes_on_right_when_images_are_forgotten(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images fit; the others are read from the feed."""
    monkeypatch.setattr(undo_images, "IMAGE_ENTRIES_MAX", 16)
    states = []
    for number in range(6):
        states.append(desk.seen())
        with desk.party.batch():
            desk.set.update(n=number + 10, fresh=number)
            desk.set.increment("n")
            desk.set.remove("tags", "x")
            desk.set.add("tags", "x" if number % 2 else number)
            desk.set["m"] = {"a": number}
    images = desk.party.runtime.undo_images
    assert 0 < images._entries == sum(map(len, images._kept.values())) <= 16
    for state in reversed(states):
        assert desk.party.undo()
        assert desk.seen() == state


def test_images_are_forgotten_when_items_were_folded_again() -> None:
    images = undo_images.UndoImages()
    place = (ItemId(bytes(16)), "property-set")
    images.put(3, place, {})
    assert images.get(3, place, refolded=0) == {}
    assert images.get(3, place, refolded=1) is None
    assert images.get(3, place, refolded=1) is None


def test_undo_of_properties_reads_none_of_the_history(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written since the start is undone from images: as many blocks are read as messages are taken back."""
    for number in range(50):
        desk.set["n"] = number
        desk.set.add("tags", f"t{number}")
    desk.party.flush()
    feeds = desk.party.runtime.feeds
    read: list[int] = []
    block = feeds.block
    monkeypatch.setattr(feeds, "block", lambda feed, seq: read.append(seq) or block(feed, seq))
    for _ in range(4):
        assert desk.party.undo()
    assert len(read) == 4
    assert desk.set["n"] == 47


def test_undo_passes_over_what_changed_nothing(desk: Desk) -> None:
    desk.other.embed_in(desk.set)
    desk.other.embed_in(desk.set)
    assert desk.party.undo()
    assert desk.set.embedded() == []
    desk.set.remove("tags", "x")
    desk.set.remove("tags", "x")
    assert desk.party.undo()
    assert desk.set["tags"] == ["x"]


def test_what_was_passed_over_is_not_undone_later(desk: Desk) -> None:
    del desk.list[0]
    desk.party.flush()
    desk.list.move_element(0, 1)
    desk.list.move_element(0, 1)
    desk.party.flush()
    assert desk.list.to_list() == [2, 3]
    assert desk.party.undo()
    assert desk.list.to_list() == [1, 2, 3]
    assert desk.party.undo()
    assert desk.list.to_list() == [1, 2, 3]
    assert desk.log.posts() == [], "it was the post before"


def test_a_new_write_ends_what_could_be_redone(desk: Desk) -> None:
    desk.set["n"] = 2
    desk.party.undo()
    desk.set["n"] = 3
    assert not desk.party.redo()
    assert desk.party.undo()
    assert desk.set["n"] == 1


def test_nothing_to_undo_says_so(circle: Circle) -> None:
    party = circle.party("bob")
    assert party.undo() is False
    assert party.redo() is False
    ann = circle.party("ann")
    while ann.undo():
        pass
    assert ann.system_item is not None, "the party itself can't be undone"
    assert not ann.system_item.deleted


# beside others


def test_undo_of_a_write_that_another_one_has_overwritten_changes_nothing(circle: Circle, desk: Desk) -> None:
    desk.set["n"] = 2
    circle.meet_all()
    circle.get("bob", desk.set)["n"] = "bob's"
    circle.meet_all()
    desk.party.undo()
    circle.agree()
    assert desk.set["n"] == "bob's"


def test_undo_of_the_winner_gives_way_to_the_concurrent_write(circle: Circle, desk: Desk) -> None:
    circle.meet_all()
    desk.set["n"] = "ann's"
    circle.get("bob", desk.set)["n"] = "bob's"
    circle.meet_all()
    winner = circle.get("bob", desk.set)["n"]
    loser = "bob's" if winner == "ann's" else "ann's"
    circle.party("ann" if winner == "ann's" else "bob").undo()
    circle.agree_after_loss()
    assert circle.get("ann", desk.set)["n"] == loser


def test_undo_of_typing_keeps_what_others_typed_in_between(circle: Circle, desk: Desk) -> None:
    desk.text.insert(5, " big world")
    circle.meet_all()
    circle.get("bob", desk.text).insert(9, "ger")
    circle.meet_all()
    assert str(desk.text) == "hello bigger world"
    desk.party.undo()
    circle.agree_after_loss()
    assert str(circle.get("bob", desk.text)) == "helloger"
    circle.party("ann").redo()
    circle.agree()
    assert str(circle.get("bob", desk.text)) == "hello bigger world"


def test_undo_of_elements_keeps_those_of_others(circle: Circle, desk: Desk) -> None:
    desk.list.append("ann's")
    circle.meet_all()
    circle.get("bob", desk.list).append("bob's")
    circle.meet_all()
    desk.party.undo()
    circle.agree_after_loss()
    assert circle.get("ann", desk.list).to_list() == [1, 2, 3, "bob's"]


def test_undo_of_an_increment_keeps_those_of_others(circle: Circle, desk: Desk) -> None:
    circle.meet_all()
    desk.set.increment("n", 10)
    circle.get("bob", desk.set).increment("n", 100)
    circle.meet_all()
    assert desk.set["n"] == 111
    desk.party.undo()
    circle.agree_after_loss()
    assert circle.get("ann", desk.set)["n"] == 101


def test_undo_of_a_set_element_keeps_the_concurrent_addition(circle: Circle, desk: Desk) -> None:
    circle.meet_all()
    desk.set.add("tags", "z")
    circle.get("bob", desk.set).add("tags", "z")
    circle.meet_all()
    desk.party.undo()
    circle.agree_after_loss()
    assert circle.get("ann", desk.set)["tags"] == ["x", "z"]


def test_undo_takes_back_own_work_only(circle: Circle, desk: Desk) -> None:
    circle.meet_all()
    desk.set["n"] = 2
    circle.meet_all()
    circle.get("bob", desk.set)["bob"] = 1
    circle.meet_all()
    assert desk.party.undo()
    circle.agree()
    assert desk.set.to_dict()["bob"] == 1
    assert desk.set["n"] == 1


def test_undo_of_a_delete_brings_the_closure_back(circle: Circle, desk: Desk) -> None:
    child = desk.party.create(type="leaf", parent=desk.other)
    desk.other.delete()
    assert child.deleted
    desk.party.undo()
    assert not child.deleted
    assert desk.party.query(type="leaf").count() == 1
    circle.agree()


def test_undo_of_a_create_that_others_wrote_to_hides_it_and_redo_shows_their_work(circle: Circle, desk: Desk) -> None:
    made = desk.party.create(type="leaf", n=1)
    circle.meet_all()
    circle.get("bob", made)["bob"] = 1
    circle.meet_all()
    desk.party.undo()
    circle.agree()
    assert circle.get("bob", made).deleted
    desk.party.redo()
    circle.agree_after_loss()
    assert circle.get("ann", made).to_dict() == {"n": 1, "bob": 1}


def test_undo_of_an_operation_of_a_custom_model_is_refused_and_changes_nothing(desk: Desk) -> None:
    class Counter:
        name, version = "counter", 1

        def __init__(self) -> None:
            self.count = 0

        def apply(self, operation: int, context: object) -> None:
            self.count += operation

        def value(self) -> int:
            return self.count

    desk.party.peer.models.register(Counter)
    counter = desk.party.create("counter")
    note = desk.party.create(type="note", title="first")
    note["title"] = "second"
    counter.apply(3)
    with pytest.raises(Refused, match="the model counter, which has no undo"):
        desk.party.undo()
    assert (note["title"], counter.instance.count, counter.deleted) == ("second", 3, False)
    with desk.party.batch():
        note["title"] = "third"
        counter.apply(1)
    with pytest.raises(Refused, match="can't be undone"):
        desk.party.undo()
    assert (note["title"], counter.instance.count) == ("third", 4)
    note["title"] = "fourth"
    assert desk.party.undo()
    assert (note["title"], counter.instance.count) == ("third", 4)
    with desk.party.batch():
        other = desk.party.create("counter")
        other.apply(5)
    assert desk.party.undo()
    assert other.deleted
    assert desk.party.redo()
    assert (other.deleted, other.value()) == (False, 5)
