"""A read-only peer follows the writer of its home when it asks: `party.refresh()`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Refused
from echostore.peer.party import Party
from echostore.testing.inmemory import link
from echostore.wire.base_epoch import BASE_KEY
from peer_builder import Circle


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Pair:
    """A writer of a home, and a reader beside it."""

    def __init__(self, path: Path) -> None:
        self.writer = echostore.open(path, background=False)
        self.written = self.writer.create_party("T")
        self.note = self.written.create(type="note", n=1)
        self.written.snapshot()
        self.reader = echostore.open(path, read_only=True)
        self.read: Party = self.reader.party(self.written.key)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "home")
    yield made
    made.close()


def test_queries_items_and_snapshots_give_what_is_new(pair: Pair) -> None:
    assert not pair.read.refresh(), "nothing is new"
    pair.note["n"] = 2
    pair.written.create(type="note", n=3)
    text = pair.written.create("text")
    text.insert(0, "hello")
    pair.written.flush()
    assert [item["n"] for item in pair.read.query(type="note")] == [1], "it keeps to its moment until it is asked"
    assert pair.read.refresh()
    assert sorted(item["n"] for item in pair.read.query(type="note")) == [2, 3]
    assert str(pair.read.get(text.id)) == "hello"
    assert pair.read.snapshot().cid == pair.written.snapshot().cid
    assert not pair.read.refresh()


def test_it_goes_on_across_checkpoints_of_the_writer(pair: Pair) -> None:
    for n in range(3):
        pair.note["n"] = 10 + n
        late = pair.written.create(type="note", n=20 + n)
        pair.written.snapshot()
        assert pair.read.refresh()
        assert pair.read.get(pair.note.id)["n"] == 10 + n
        assert pair.read.get(late.id)["n"] == 20 + n
        assert pair.read.snapshot().cid == pair.written.snapshot().cid


def test_streams_and_live_queries_are_told(pair: Pair) -> None:
    stream, of_item = pair.read.stream(), pair.read.get(pair.note.id).stream()
    old, old_of_item = len(list(stream)), len(list(of_item))
    assert old
    assert old_of_item
    told: list[Any] = []
    with pair.read.query(type="note").subscribe(told.append):
        told.clear()
        pair.written.create(type="note", n=2)
        receipt = pair.written.flush()
        assert list(stream) == []
        pair.read.refresh()
    assert len(list(stream)) == 1
    assert list(of_item) == []
    assert stream.reached(receipt.anchor)
    assert len(told) == 1


def test_members_and_child_parties_are_followed(tmp_path: Path) -> None:
    circle = Circle(tmp_path, "ann", "bob")
    party = circle.party("ann")
    child = circle.peers["ann"].create_child(party, "Game")
    move = child.create(type="move", n=1)
    child.flush()
    with echostore.open(tmp_path / "ann", read_only=True) as reader:
        read = reader.party(child.key)
        move["n"] = 2
        child.flush()
        theirs = circle.party("bob").create(type="note", n=7)
        circle.agree()
        assert read.refresh()
        assert read.get(move.id)["n"] == 2
        above = reader.party(party.key)
        assert above.get(theirs.id)["n"] == 7, "its parent was refreshed with it"
    circle.close()


def test_a_member_who_came_since_is_followed(tmp_path: Path) -> None:
    with (
        echostore.open(tmp_path / "ann", name="ann", background=False) as ann,
        echostore.open(tmp_path / "bob", name="bob", background=False) as bob,
    ):
        party = ann.create_party("Trip")
        with echostore.open(tmp_path / "ann", read_only=True) as reader:
            read = reader.party(party.key)
            theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
            link(ann, bob, party.key).pump()
            theirs.members.set_profile("Bobby")  # a block of a control feed that the reader has not seen
            note = theirs.create(type="note", n=7)
            theirs.flush()
            link(ann, bob, party.key).pump()
            assert len(read.members) == 1
            assert read.refresh()
            assert {member.name for member in read.members} == {"ann", "Bobby"}
            assert read.get(note.id)["n"] == 7
            assert read.snapshot().cid == party.snapshot().cid


def test_a_writer_has_nothing_to_refresh(pair: Pair) -> None:
    pair.note["n"] = 5
    assert pair.written.refresh() is False
    assert pair.note["n"] == 5


def test_a_reader_on_an_older_epoch_is_told_to_open_again(pair: Pair) -> None:
    pair.written.runtime.feeds.set_about({BASE_KEY: b"another"})
    with pytest.raises(Refused, match="newer epoch") as refused:
        pair.read.refresh()
    assert "open it again" in refused.value.next_step
    assert pair.read.get(pair.note.id)["n"] == 1
