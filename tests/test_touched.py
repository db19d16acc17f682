"""The past of items below an epoch, where its blocks are held: also without an index that was written as they came."""

from pathlib import Path

import pytest

import echostore
from echostore.peer.party import Party


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def lose(items: Path) -> None:
    for each in items.parent.glob(items.name + "*"):
        each.unlink()


def told(party: Party, item: object) -> list[list[str]]:
    return [revision.what for revision in party.get(item).history()]


def test_a_reader_beside_the_writer_of_an_epoch_lists_what_lies_below_it(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as writer:
        party = writer.create_party("T")
        note = party.create(type="note", n=1)
        party.snapshot()  # the checkpoint that the epoch makes too old for a reader
        note["n"] = 2
        writer.epochs(party.key).create()
        note["n"] = 3
        party.flush()
        expected = told(party, note.id)
        assert len(expected) == 3
        with echostore.open(tmp_path / "home", read_only=True) as reader:
            read = reader.party(party.key)
            assert read.runtime.processor.items is None, "it does without the checkpoint"
            assert read.get(note.id)["n"] == 3
            assert told(read, note.id) == expected
            assert [change.after for change in read.get(note.id).diff("epoch:1")] == [3]


def test_items_made_anew_from_an_epoch_keep_their_past(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as writer:
        party = writer.create_party("T")
        note = party.create(type="note", n=1)
        note["n"] = 2
        writer.epochs(party.key).create()
        expected = told(party, note.id)
        lost = writer.home.party(party.key).items
    lose(lost)
    for _ in range(2):  # the second time from the checkpoint that was made
        with echostore.open(tmp_path / "home", background=False) as again:
            party = again.party(party.key)
            assert party.runtime.processor.base is not None
            assert told(party, note.id) == expected
            party.runtime.checkpoint()


def test_a_past_party_tells_the_past_of_its_items(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as writer:
        party = writer.create_party("T")
        note = party.create(type="note", n=1)
        writer.epochs(party.key).create()
        expected = told(party, note.id)
        note["n"] = 2
        assert told(party.as_of("epoch:1"), note.id) == expected
        assert len(told(party, note.id)) == 2


def test_starting_from_an_epoch_reads_no_block_below_it_until_somebody_asks(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as writer:
        party = writer.create_party("T")
        note = party.create(type="note", n=1)
        for n in range(2, 40):
            note["n"] = n
            party.flush()
        writer.epochs(party.key).create()
        expected = told(party, note.id)
        lost = writer.home.party(party.key).items
    lose(lost)
    with echostore.open(tmp_path / "home", background=False) as again:
        party = again.party(party.key)
        store, own = party.runtime.processor.items, party.runtime.data
        assert store is not None
        assert own is not None
        assert store.touches(note.id) == [], "the start costs what lives, not what was"
        note = party.get(note.id)
        note["n"] = 40
        assert party.undo()
        assert store.touches(note.id) == [], "nor does what was written since ask for it"
        assert told(party, note.id)[: len(expected)] == expected
        assert len(store.touches(note.id)) == len(expected), "it is kept for the next time"
    with echostore.open(tmp_path / "home", background=False) as again:
        party = again.party(party.key)
        assert party.runtime.processor.touched.unread is None
        assert len(told(party, note.id)) == len(expected) + 2


def test_what_nobody_asked_for_before_a_restart_is_read_after_it(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as writer:
        party = writer.create_party("T")
        note = party.create(type="note", n=1)
        note["n"] = 2
        party.flush()
        writer.epochs(party.key).create()
        expected = told(party, note.id)
        lost = writer.home.party(party.key).items
    lose(lost)
    for _ in range(2):
        with echostore.open(tmp_path / "home", background=False) as again:
            assert again.party(party.key).get(note.id)["n"] == 2
    with echostore.open(tmp_path / "home", background=False) as again:
        assert told(again.party(party.key), note.id) == expected
