"""Loading from a saved snapshot: one item, one view with its closure, or everything."""

from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import EchoError, NotFound
from echostore.wire.items import encode_record


@pytest.fixture
def party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "home", name="ann", background=False) as peer:
        peer.view_classes.register("example.org/planner")
        yield peer.create_party("Trip")


def test_a_view_is_loaded_with_its_closure_and_nothing_else(party: echostore.Party) -> None:
    view = party.create_view("example.org/planner", "Planner")
    board = party.create("growable-array", parent=view)
    task = party.create("property-set", parent=board, text="tent")
    notes = party.create("text", parent=task)
    notes.insert(0, "pegs " * 1000)
    moved = party.create("property-set", text="moved in")
    moved.move(task)
    guest = party.create("property-set", text="embedded")
    guest.embed_in(board)
    gone = party.create("property-set", parent=board, text="moved out")
    gone.move(None)
    loaded = party.snapshot().load_view(view.id)
    assert set(loaded) == {view.id, board.id, task.id, notes.id, moved.id, guest.id}
    assert str(loaded[notes.id].model) == "pegs " * 1000
    assert loaded[task.id].values() == {"text": "tent"}


def test_a_saved_snapshot_gives_back_the_state_of_its_moment(party: echostore.Party) -> None:
    task = party.create("property-set", type="task", n=1)
    text = party.create("text")
    text.insert(0, "before")
    snapshot = party.snapshot()
    task["n"] = 2
    text.insert(0, "after ")
    party.snapshot()
    opened = party.open_snapshot(snapshot.cid)
    assert opened.timeframe == snapshot.timeframe
    assert opened.load_item(task.id).values() == {"n": 1}
    assert opened.load_item(text.id).values() == {"value": "before"}
    everything = opened.load()
    assert len(everything) == opened.item_count
    past = party.as_of(party.open_snapshot(snapshot.cid).timeframe)
    for item, record in everything.items():
        assert encode_record(record) == encode_record(past.runtime.state.record(item))


def test_what_is_not_there_says_so(party: echostore.Party) -> None:
    snapshot = party.snapshot()
    task = party.create("property-set")
    with pytest.raises(NotFound):
        snapshot.load_item(task.id)
    with pytest.raises(NotFound):
        snapshot.load_view(task.id)
    with pytest.raises(EchoError):
        party.open_snapshot("bafibeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi")
    with pytest.raises(EchoError):
        party.open_snapshot("nonsense")
