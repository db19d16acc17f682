"""Handles as a program holds them: what they show when all is closed, where they insert, what they take."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Closed, UsageError
from echostore.peer.local_server import LocalServer
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.thin.thin_party import connect
from thin_server import ThinServer, capability


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home") as peer:
        peer.create_party("Trip")
        yield peer


@pytest.fixture
def own(peer: Peer) -> Party:
    return peer.party("@Trip")


@pytest.fixture(params=["peer", "attached", "thin"])
def party(request: pytest.FixtureRequest, peer: Peer, own: Party) -> Iterator[Any]:
    if request.param == "peer":
        yield own
    elif request.param == "attached":
        server = LocalServer(peer)
        try:
            with echostore.open(peer.home.path) as attached:
                yield attached.party("@Trip")
        finally:
            server.close()
    else:
        with ThinServer() as root, connect(root.url, capability()) as thin:
            yield thin


# repr


def test_every_handle_has_a_repr_after_close(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.title = "Summer"
        kinds = [party.create(model) for model in ("property-set", "growable-array", "text", "threaded-log")]
        held = [peer, party, *kinds, party.query(type="x"), party.stream(), party.flush(), party.as_of(party.anchor())]
        assert repr(party) == f"<party {party.key.hex()[:8]} 'Summer'>"
        opened = [repr(each) for each in held]
    for each, before in zip(held, opened, strict=True):
        assert repr(each), before
    assert "closed" in repr(kinds[0])
    assert "'Summer'" in repr(party)


def test_an_attached_handle_has_a_repr_when_the_other_process_is_gone(peer: Peer) -> None:
    server = LocalServer(peer)
    attached = echostore.open(peer.home.path)
    party = attached.party("@Trip")
    item = party.create(type="task")
    server.close()
    assert "Party" in repr(party)
    assert "PropertySetItem" in repr(item)
    with pytest.raises(Closed):
        attached.close()


# streams


def test_next_gives_one_message_of_a_stream(own: Party) -> None:
    own.create(n=1)
    own.create(n=2)
    everything = [each.seq for each in own.stream()]
    stream = own.stream()
    assert [next(stream).seq for _ in everything] == everything
    with pytest.raises(StopIteration):
        next(stream)
    own.create(n=3)
    assert next(stream).seq == everything[-1] + 1
    assert next(stream, None) is None


def test_next_sees_what_came_while_it_was_under_way(own: Party) -> None:
    own.create(n=1)
    stream = own.stream()
    before = len(list(own.stream()))
    next(stream)
    own.create(n=2)
    assert len(list(stream)) == before
    assert next(stream, None) is None


def test_taking_with_next_and_looping_yield_each_message_once(own: Party) -> None:
    for number in range(4):
        own.create(n=number)
    everything = [each.seq for each in own.stream()]
    stream = own.stream()
    taken = [next(stream).seq]
    for message in stream:
        taken.append(message.seq)
        if len(taken) == 3:
            break
    taken.append(next(stream).seq)
    taken += [each.seq for each in stream]
    assert taken == everything
    assert stream.reached(own.flush().anchor)


def test_next_works_for_an_item_and_from_an_attached_program(peer: Peer, own: Party) -> None:
    item = own.create(n=1)
    item["n"] = 2
    stream = item.stream()
    assert next(stream).seq < next(stream).seq
    server = LocalServer(peer)
    try:
        with echostore.open(peer.home.path) as attached:
            there = attached.party("@Trip").stream()
            assert next(there).seq == next(own.stream()).seq
            assert len([*there]) == len([*own.stream()]) - 1
            with pytest.raises(StopIteration):
                next(there)
    finally:
        server.close()


# posts


def test_a_post_may_hold_items(party: Any) -> None:
    task, log = party.create(type="task"), party.create("threaded-log")
    log.post({"re": task, "all": [task]})
    log.post(task)
    (first, second) = [each["body"] for each in log.value()]
    assert first == {"re": task.reference, "all": [task.reference]}
    assert second == task.reference


# positions


def test_a_negative_position_counts_from_the_end_of_a_text(party: Any) -> None:
    text = party.create("text")
    text.append("helo")
    text.insert(-1, "l")
    assert str(text) == "hello"
    text.splice(-5, 1, "J")
    assert str(text) == "Jello"
    text.insert(-5, ">")
    assert str(text) == ">Jello"


def test_a_negative_position_counts_from_the_end_of_a_list(party: Any) -> None:
    items = party.create("growable-array")
    items.append(1, 3)
    items.insert(-1, 2)
    items.insert(-3, 0)
    assert items.to_list() == [0, 1, 2, 3]
    items[-1] = 4
    del items[-4]
    assert (items.to_list(), items[-1]) == ([1, 2, 4], 4)


def test_deleting_marking_and_cursors_count_from_the_end_too(own: Party) -> None:
    text = own.create("text")
    text.insert(0, "hello")
    text.delete(-1)
    assert str(text) == "hell"
    text.mark(-2, 4, "bold")
    assert [(run.text, dict(run.marks)) for run in text.runs()] == [("he", {}), ("ll", {"bold": True})]
    assert text.cursor_position(text.cursor(-1)) == 3


@pytest.mark.parametrize("position", [-6, 6, 99, -99])
def test_a_position_outside_is_refused_in_our_words(party: Any, position: int) -> None:
    text, items = party.create("text"), party.create("growable-array")
    text.append("hello")
    items.append(1, 2, 3, 4, 5)
    with pytest.raises(UsageError, match=f"no position {position} in a text of 5"):
        text.insert(position, "x")
    with pytest.raises(UsageError, match=f"no position {position} in a list of 5"):
        items.insert(position, 0)
    assert (str(text), items.to_list()) == ("hello", [1, 2, 3, 4, 5])


def test_a_stretch_outside_is_refused_in_our_words(own: Party) -> None:
    text = own.create("text")
    text.insert(0, "hello")
    with pytest.raises(UsageError, match="no characters 3 to 102 in a text of 5"):
        text.delete(3, 99)
    with pytest.raises(UsageError, match="no position 9 in a text of 5"):
        text.mark(0, 9, "bold")
    with pytest.raises(UsageError, match="ends before it begins"):
        text.mark(3, 1, "bold")
    for wrong in ("1", 1.5, None):
        with pytest.raises(UsageError, match="a whole number"):
            text.insert(wrong, "x")  # type: ignore[arg-type]  # the mistake
    assert str(text) == "hello"
