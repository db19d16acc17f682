"""What a program may get wrong: each mistake is a typed error, and the state is what it was."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import NotFound, Refused, TooLarge, UsageError
from echostore.kernel.limits import BLOCK_BYTES_MAX, OPERATIONS_MAX
from echostore.peer.party import Party
from echostore.testing.inmemory import link
from peer_builder import Circle

LONE = "\ud800"


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Things:
    """One party with an item of each model."""

    def __init__(self, party: Party) -> None:
        self.party = party
        self.set = party.create("property-set", type="note", n=1)
        self.text = party.create("text")
        self.text.insert(0, "hello")
        self.list = party.create("growable-array")
        self.list.append(1, 2)
        self.log = party.create("threaded-log")
        party.flush()


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


@pytest.fixture
def things(circle: Circle) -> Things:
    return Things(circle.party("ann"))


MISTAKES: dict[str, tuple[type[Exception], Callable[[Things], object]]] = {
    "a key with a lone surrogate": (UsageError, lambda it: it.set.__setitem__(LONE, 1)),
    "a value with a lone surrogate": (UsageError, lambda it: it.set.__setitem__("a", LONE)),
    "a name with a lone surrogate": (UsageError, lambda it: setattr(it.set, "name", LONE)),
    "text with a lone surrogate": (UsageError, lambda it: it.text.insert(0, LONE)),
    "an element with a lone surrogate": (UsageError, lambda it: it.list.append(LONE)),
    "a post with a lone surrogate": (UsageError, lambda it: it.log.post(LONE)),
    "a type with a lone surrogate": (UsageError, lambda it: it.party.create(type=LONE)),
    "a title with a lone surrogate": (UsageError, lambda it: it.party.peer.create_party(LONE)),
    "an empty title": (UsageError, lambda it: it.party.peer.create_party("  ")),
    "a title of a megabyte": (UsageError, lambda it: it.party.peer.create_party("x" * (1 << 20))),
    "a value of ten thousand levels": (TooLarge, lambda it: it.set.__setitem__("a", nested(10_000))),
    "a new item with a value of ten thousand levels": (TooLarge, lambda it: it.party.create(a=nested(10_000))),
    "an element of ten thousand levels": (TooLarge, lambda it: it.list.append(nested(10_000))),
    "a post of ten thousand levels": (TooLarge, lambda it: it.log.post(nested(10_000))),
    "a number beyond 64 bits": (TooLarge, lambda it: it.set.__setitem__("a", 1 << 64)),
    "an object": (UsageError, lambda it: it.set.__setitem__("a", object())),
    "a key that is no text": (UsageError, lambda it: it.set.__setitem__("a", {1: 2})),
    "an empty path": (UsageError, lambda it: it.set.__setitem__((), 1)),
    "a path of a hundred steps": (TooLarge, lambda it: it.set.__setitem__(("a",) * 100, 1)),
    "a long key": (TooLarge, lambda it: it.set.__setitem__("k" * 2000, 1)),
    "an increment by text": (UsageError, lambda it: it.set.increment("n", "1")),  # type: ignore[dict-item]  # the mistake
    "a list in a set": (UsageError, lambda it: it.set.add("tags", [1])),
    "a value larger than a block": (TooLarge, lambda it: it.set.__setitem__("a", "x" * (BLOCK_BYTES_MAX + 1))),
    "an insertion larger than a block": (TooLarge, lambda it: it.text.insert(0, "x" * (BLOCK_BYTES_MAX + 1))),
    "a type of a thousand characters": (UsageError, lambda it: it.party.create(type="x" * 1000)),
    "a type that is no text": (UsageError, lambda it: it.party.create(type=5)),  # type: ignore[arg-type]  # the mistake
    "a model that is not known": (UsageError, lambda it: it.party.create("no-such-model")),
    "a model of version -1": (UsageError, lambda it: it.party.create("property-set@-1")),
    "a model of version 2**40": (UsageError, lambda it: it.party.create(f"property-set@{1 << 40}")),
    "properties of a text": (UsageError, lambda it: it.party.create("text", a=1)),
    "an item that does not exist": (NotFound, lambda it: it.party.get(bytes(16))),
    "an id of wrong length": (UsageError, lambda it: it.party.get(b"short")),
    "an id that is no hex": (UsageError, lambda it: it.party.get("z" * 32)),
    "an inception key that is no hex": (UsageError, lambda it: it.party.get("z" * 64)),
    "an id that is a number": (UsageError, lambda it: it.party.get(5)),
    "a locator of another party": (NotFound, lambda it: it.party.get("echo://" + "00" * 32 + "/" + "00" * 16)),
    "a link to a number": (UsageError, lambda it: it.set.link(5)),
    "a reply to a number": (UsageError, lambda it: it.log.post("x", reply_to=5)),
    "an unknown role": (UsageError, lambda it: it.set.restrict(roles=["king"])),
    "a rule for nobody": (UsageError, lambda it: it.set.restrict()),
    "a view class that is not registered": (UsageError, lambda it: it.party.create_view("a.b/c", "C")),
    "a stream after nonsense": (UsageError, lambda it: it.party.stream("anchor:zzz")),
    "a moment that is no number": (UsageError, lambda it: it.party.as_of(5.5)),
    "an epoch that is not": (NotFound, lambda it: it.party.as_of(5)),
    "an undo in a batch": (Refused, lambda it: _in_batch(it, it.party.undo)),
    "a snapshot in a batch": (Refused, lambda it: _in_batch(it, it.party.snapshot)),
    "a position beyond the text": (echostore.EchoError, lambda it: it.text.insert(99, "x")),
    "a deletion beyond the text": (echostore.EchoError, lambda it: it.text.delete(3, 99)),
    "an index beyond the list": (IndexError, lambda it: it.list.__delitem__(7)),
}


def _in_batch(things: Things, work: Callable[[], object]) -> None:
    with things.party.batch():
        things.set["n"] = 99
        work()


@pytest.mark.parametrize("what", list(MISTAKES))
def test_a_mistake_has_a_typed_error_and_changes_nothing(circle: Circle, things: Things, what: str) -> None:
    before = things.party.snapshot().cid
    kind, mistake = MISTAKES[what]
    with pytest.raises(kind):
        mistake(things)
    assert things.party.snapshot().cid == before
    things.set["n"] = 2
    circle.agree()
    assert circle.restart("ann", lose=("items.db",)).get(things.set.id)["n"] == 2


def test_a_batch_beyond_the_limit_is_refused_whole(circle: Circle, things: Things) -> None:
    before = things.party.snapshot().cid

    def write_too_much() -> None:
        with things.party.batch():
            things.text.insert(0, "x")
            for number in range(OPERATIONS_MAX + 1):
                things.set["n"] = number

    with pytest.raises(TooLarge):
        write_too_much()
    assert things.party.snapshot().cid == before
    circle.agree()


def test_many_long_insertions_make_many_blocks(circle: Circle, things: Things) -> None:
    for _ in range(3):
        things.text.insert(0, "x" * (3 << 20))
    circle.agree()
    assert len(circle.get("bob", things.text)) == 9 * (1 << 20) + 5


def test_elements_that_do_not_fit_a_block_are_taken_back(circle: Circle, things: Things) -> None:
    before = things.party.snapshot().cid

    def append_in_a_batch() -> None:
        with things.party.batch():
            things.list.append(*["x" * ((1 << 20) - 16)] * 9)

    with pytest.raises(TooLarge):
        append_in_a_batch()
    assert things.list.to_list() == [1, 2]
    assert things.party.snapshot().cid == before
    things.list.append(3)
    circle.agree()


def test_a_batch_that_raises_leaves_no_trace_in_any_model(circle: Circle, things: Things) -> None:
    before = things.party.snapshot().cid

    def write_and_raise() -> None:
        with things.party.batch():
            made = things.party.create(type="note")
            things.set["n"] = 5
            things.text.insert(0, "x")
            things.list.append(made)
            things.log.post("x")
            things.set.move(made)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_raise()
    assert things.party.snapshot().cid == before
    assert things.set.parent is None
    assert things.party.query(type="note").count() == 1
    circle.agree()


def test_queries_inside_a_batch_see_what_it_wrote(things: Things) -> None:
    things.party.snapshot()
    with things.party.batch():
        things.set["n"] = 2
        child = things.party.create(type="note", n=2, parent=things.set)
        things.text.move(things.set)
        assert {item.id for item in things.party.query(type="note").where(n=2).all()} == {things.set.id, child.id}
        assert {item.id for item in things.set.children()} == {child.id, things.text.id}


def test_an_item_that_is_being_edited_stays_in_queries(things: Things) -> None:
    things.text.move(things.set)
    things.party.snapshot()
    things.text.insert(0, "more ")
    assert [item.id for item in things.set.children()] == [things.text.id]


def test_blocks_that_arrive_inside_a_batch_do_not_split_peers(circle: Circle, things: Things) -> None:
    circle.meet_all()
    for number in range(5):
        circle.get("bob", things.set)["b"] = number
    circle.party("bob").flush()
    with things.party.batch():
        things.set["n"] = 2
        link(circle.peers["ann"], circle.peers["bob"], circle.key).pump().cut()
        things.set["b"] = "ann's"
        things.text.insert(0, "x")
        things.party.create(type="late")
    circle.agree_after_loss()


def test_credentials_inside_a_batch_do_not_split_peers(circle: Circle, things: Things) -> None:
    with things.party.batch():
        things.set["n"] = 2
        for number in range(5):
            things.party.members.set_profile(f"Ann {number}")
        things.party.create(type="late")
    circle.agree_after_loss()
