"""Checkpoints and the tree's moves: what came or went is written, and the rows are the moves of the state, always."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Refused
from echostore.kernel.ids import Cid, FeedId, ItemId, Stamp
from echostore.kernel.items.tree import MOVE, Tree, TreeMove
from echostore.peer.checkpoints import load_moves
from echostore.peer.party import Party
from echostore.peer.refolding import refold
from echostore.store.item_audit import audit_items
from echostore.wire import items as wire_items
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.items import MOVES_PER_CHUNK, MoveChunks, decode_moves, encode_moves, move_chunks
from peer_builder import Circle


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as peers:
        yield peers


class Written:
    """Rows of moves that checkpoints put in and took out."""

    def __init__(self, party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
        store = party.runtime.items
        assert store is not None
        self.put = self.taken = 0
        insert = store.database.insert

        def counting(sql: str, rows: Any) -> None:
            found = list(rows)
            if sql.startswith("INSERT INTO moves"):
                self.put += len(found)
            if sql.startswith("DELETE FROM moves"):
                self.taken += len(found)
            insert(sql, found)

        monkeypatch.setattr(store.database, "insert", counting)


def moved(party: Party, count: int) -> tuple[echostore.Item, list[echostore.Item]]:
    """A folder with items that were moved into it, as of a checkpoint."""
    with party.batch():
        folder = party.create(type="folder")
        items = [party.create(type="page", n=number) for number in range(count)]
    with party.batch():
        for item in items:
            item.move(folder)
    party.runtime.checkpoint()
    return folder, items


def check(circle: Circle, name: str) -> None:
    """The rows are the moves of the state, and their tally is right."""
    runtime = circle.party(name).runtime
    assert runtime.items is not None
    runtime.checkpoint()
    assert load_moves(runtime.items) == runtime.state.tree.moves
    audit_items(circle.folder / name / "parties" / circle.key.hex() / "items.db")


def test_a_checkpoint_writes_the_moves_that_came(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    party = circle.party("ann")
    folder, items = moved(party, 60)
    written = Written(party, monkeypatch)
    items[7].move(None)
    items[8].embed_in(items[9])
    party.runtime.checkpoint()
    assert (written.put, written.taken) == (2, 0), "and none of the sixty before them"
    folder["n"] = 1
    party.runtime.checkpoint()
    assert (written.put, written.taken) == (2, 0)
    check(circle, "ann")


def test_late_moves_stand_where_they_belong(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    party = circle.party("ann")
    _, items = moved(party, 20)
    circle.meet_all()
    for item in items[:3]:
        circle.get("bob", item).move(None)  # not seen by ann, whose next moves are deeper
    for item in items[3:8]:
        item.move(None)
    check(circle, "ann")
    written = Written(party, monkeypatch)
    circle.meet_all()
    party.runtime.checkpoint()
    assert (written.put, written.taken) == (3, 0)
    assert [move.item for move in party.runtime.state.tree.moves[-3:]] != [item.id for item in items[:3]], "late"
    check(circle, "ann")
    cid = circle.agree()
    assert circle.restart("ann").snapshot().cid == cid
    check(circle, "ann")


def test_items_that_are_folded_again_take_their_moves_with_them(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = circle.party("ann")
    _, items = moved(party, 30)
    cid = party.snapshot().cid
    items[4].embed_in(items[5])  # not saved yet
    items[4].unembed_from(items[5])
    written = Written(party, monkeypatch)
    refold(party.runtime.processor, {items[4].id, items[6].id})
    party.runtime.checkpoint()
    assert written.put == 4, "of two items"
    assert written.taken <= 4
    check(circle, "ann")
    assert circle.restart("ann").snapshot().cid != cid
    check(circle, "ann")


def test_a_checkpoint_that_fails_loses_no_moves(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    party = circle.party("ann")
    _, items = moved(party, 10)
    items[3].move(None)
    refold(party.runtime.processor, {items[5].id})
    store = party.runtime.items
    assert store is not None
    with monkeypatch.context() as failing:
        failing.setattr(store, "_replace", lambda *arguments: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            party.runtime.checkpoint()
    check(circle, "ann")


def test_moves_of_an_item_that_is_gone_go_too(circle: Circle) -> None:
    party = circle.party("ann")
    _, items = moved(party, 10)
    items[2].move(None)  # not saved yet
    party.runtime.state.drop(frozenset([items[2].id]))
    runtime = party.runtime
    runtime.checkpoint()
    assert runtime.items is not None
    assert ItemId(items[2].id) not in {move.item for move in load_moves(runtime.items)}
    assert len(load_moves(runtime.items)) == 9
    audit_items(circle.folder / "ann" / "parties" / circle.key.hex() / "items.db")


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_the_moves_of_the_state_whatever_happens(circle: Circle, seed: int) -> None:
    chance = random.Random(seed)
    _, made = moved(circle.party("ann"), 8)
    circle.meet_all()
    ids = [item.id for item in made]
    for _ in range(25):
        name = chance.choice(["ann", "bob"])
        party = circle.party(name)
        item, other = chance.sample(ids, 2)
        verb = chance.randrange(7)
        if verb < 3:
            with suppress(Refused):  # below itself
                party.get(item).move(party.get(other) if verb else None)
        elif verb == 3:
            refold(party.runtime.processor, {item, other})
        elif verb == 4:
            circle.meet("ann", "bob")
        elif verb == 5:
            check(circle, name)
        else:
            circle.restart(name, crash=chance.random() < 0.5)
    cid = circle.agree()
    for name in circle.names:
        check(circle, name)
        assert circle.restart(name, lose=["items.db"]).snapshot().cid == cid
        check(circle, name)


# chunks of moves in snapshots


def whole(party: Party, made: list[int]) -> int:
    """Take a snapshot; its moves must be those of the state. Returns how many of them were encoded."""
    made.clear()
    snapshot = party.snapshot()
    encoded = sum(made)
    blobs: dict[Cid, bytes] = {}
    moves = party.runtime.state.tree.moves
    assert snapshot.root.tree == cid_of(encode_moves(moves, blobs.__setitem__), PROTOBUF)
    assert decode_moves(snapshot.blob(snapshot.root.tree), snapshot.blob) == moves
    return encoded


def test_a_snapshot_makes_the_chunks_of_moves_that_changed(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_items, "MOVES_PER_CHUNK", 10)
    made: list[int] = []
    encode = wire_items._encode_moves
    monkeypatch.setattr(wire_items, "_encode_moves", lambda moves: made.append(len(moves)) or encode(moves))
    party = circle.party("ann")
    _, items = moved(party, 35)
    circle.meet_all()
    assert whole(party, made) == 35
    items[0]["n"] = -1
    assert whole(party, made) == 5, "the chunk that is not full"
    items[1].move(None)
    assert whole(party, made) == 6
    for item in items[2:8]:
        item.move(None)
    assert whole(party, made) == 12, "one was filled up, one begun"
    circle.get("bob", items[9]).move(None)
    circle.meet_all()
    late = next(at for at, move in enumerate(party.runtime.state.tree.moves) if move.stamp.feed != items[0].id[:8])
    assert 30 < late < 41, "it lies among the later ones"
    assert whole(party, made) == 13, "the chunks from there on"
    refold(party.runtime.processor, {items[15].id})
    assert whole(party, made) == 33, "those from its first move on"
    blobs = party.runtime.blobs
    assert blobs is not None
    snapshot = party.snapshot()
    blobs.delete(move_chunks(snapshot.blob(snapshot.root.tree))[:1])
    items[0]["n"] = -2
    assert whole(party, made) == 43, "one was lost"
    cid = circle.agree()
    assert circle.restart("ann").snapshot().cid == cid


def test_chunks_behind_a_move_that_went_are_made_again() -> None:
    feed = FeedId(b"f" * 8)
    ids = [ItemId(feed + number.to_bytes(8, "big")) for number in range(3 * MOVES_PER_CHUNK)]
    tree = Tree(
        lambda item: None, [TreeMove(Stamp(at + 1, feed, at, 0), item, MOVE, None) for at, item in enumerate(ids)]
    )
    blobs: dict[Cid, bytes] = {}
    chunks = MoveChunks()
    first = move_chunks(chunks.encode(tree, blobs.__setitem__, lambda cids: []))
    assert first == list(blobs)
    tree.without(frozenset([ids[MOVES_PER_CHUNK + 7]]))
    blobs.clear()
    data = chunks.encode(tree, blobs.__setitem__, lambda cids: [])
    assert data == encode_moves(tree.moves, lambda cid, blob: None)
    assert move_chunks(data)[:1] == first[:1]
    assert list(blobs) == move_chunks(data)[1:], "those behind it, and no others"
