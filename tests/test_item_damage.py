"""A flipped bit in items.db: the same answers, or `Corrupt` and then the same answers made anew (FAULTS S5)."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Corrupt
from echostore.peer.party import Party
from echostore.store.item_audit import audit_items
from echostore.store.item_store import ItemStore

FLIPS = 40
PAGE = 4096


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Damageable:
    """A home with one party of many kinds of items, closed; what it answers, and the bytes of its items.db."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.open() as peer:
            party = peer.create_party("T")
            self.key = party.key
            party.index("i")
            board = party.create(type="board", title="b")
            notes = [party.create(type="n", parent=board, i=n, pad="y" * 50) for n in range(80)]
            self.board, self.first = board.id, notes[0].id
            for n in range(20):
                party.link(notes[n], notes[n + 1], type="next")
                notes[n]["after"] = notes[n + 1]
            for note in notes[:10]:
                note.move(notes[70])
            party.create("text", parent=board).insert(0, "hello" * 100)
            party.create("growable-array").append(*notes[:5])
            party.create("threaded-log").post("first")
            party.snapshot()
            notes[3]["i"] = 1000
            notes[4]["pad"] = "late"
        self.items = path / "parties" / self.key.hex() / "items.db"
        self.bytes = self.items.read_bytes()
        self.expected = self.answers(read_only=True)

    def open(self, **more: Any) -> echostore.Peer:
        return echostore.open(self.path, background=False, **more)

    def answers(self, **more: Any) -> dict[str, Any]:
        with self.open(**more) as peer:
            return ask(peer.party(self.key))

    def try_answers(self, **more: Any) -> dict[str, Any] | Corrupt:
        try:
            return self.answers(**more)
        except Corrupt as error:
            return error

    def put(self, data: bytes) -> None:
        for beside in self.items.parent.glob("items.db?*"):
            beside.unlink()
        self.items.write_bytes(data)

    def damage(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Change rows behind the store's back."""
        self.put(self.bytes)
        connection = sqlite3.connect(self.items)
        work(connection)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()


def ask(party: Party) -> dict[str, Any]:
    """One of each kind of question."""
    items = {item.id: str(item.value()) for item in party.query()}
    board = next(iter(party.query(type="board")))
    return {
        "items": items,
        "typed": sorted(item.id for item in party.query(type="n")),
        "one": [item.id for item in party.query(i=9)],
        "thousandth": [item.id for item in party.query(i=1000)],
        "children": sorted(item.id for item in party.query(type="board").children()),
        "links": sorted(item.id for item in party.query(type="n").links()),
        "referrers": sorted(item.id for item in party.query(type="n").referrers()),
        "read": {item: str(party.get(item).value()) for item in items},
        "history": len(board.history()),
        "count": party.status.items,
        "cid": party.snapshot().cid,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damageable]:
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        yield Damageable(folder / "home")


@pytest.fixture
def home(whole: Damageable, monkeypatch: pytest.MonkeyPatch) -> Damageable:
    monkeypatch.setenv("ECHOSTORE_STATE", str(whole.path.parent / "state"))
    whole.put(whole.bytes)
    return whole


@pytest.fixture
def fresh(tmp_path: Path) -> Damageable:
    """One that a test may write to."""
    return Damageable(tmp_path / "home")


def test_a_reader_gives_the_same_answers_or_says_that_the_file_is_damaged(home: Damageable) -> None:
    rng = random.Random(9)
    found = 0
    for _ in range(FLIPS):
        place, bit = rng.randrange(PAGE, len(home.bytes)), rng.randrange(8)
        home.put(flipped(home.bytes, place, bit))
        answers = home.try_answers(read_only=True)
        if isinstance(answers, Corrupt):
            found += 1
            assert "items.db" in answers.what, (place, bit)
            assert "feeds" in answers.unchanged
            assert f"Remove {home.items}" in answers.next_step
        else:
            assert answers == home.expected, (place, bit)
    assert found > FLIPS // 10, "the flips hit something"


def test_a_writer_gives_the_same_answers_at_the_latest_when_it_opens_again(home: Damageable) -> None:
    rng = random.Random(10)
    found = 0
    for _ in range(FLIPS):
        place, bit = rng.randrange(PAGE, len(home.bytes)), rng.randrange(8)
        home.put(flipped(home.bytes, place, bit))
        answers = home.try_answers()
        if isinstance(answers, Corrupt):
            found += 1
            assert "Open the peer again" in answers.next_step, (place, bit)
            answers = home.answers()
            assert not list(home.items.parent.glob("*.damaged")), "made anew"
        assert answers == home.expected, (place, bit)
    assert found > FLIPS // 10, "the flips hit something"


def test_removing_the_file_is_enough_even_when_its_log_stays(fresh: Damageable) -> None:
    log = fresh.items.with_name("items.db-wal")
    with fresh.open() as peer:
        party = peer.party(fresh.key)
        for n in range(50):
            party.create(type="late", n=n)
        cid = party.snapshot().cid
        kept = log.read_bytes()
        assert kept
    fresh.items.unlink()
    log.write_bytes(kept)
    with fresh.open() as peer:
        assert peer.party(fresh.key).snapshot().cid == cid
    audit_items(fresh.items)


ROW_DAMAGES = {
    "a value": "UPDATE items SET vals = CAST(replace(vals, 'yyy', 'yyz') AS BLOB) WHERE type = 'n'",
    "a type": "UPDATE items SET type = 'm' WHERE item = (SELECT max(item) FROM items WHERE type = 'n')",
    "a lost item": "DELETE FROM items WHERE item = (SELECT max(item) FROM items WHERE type = 'n')",
    "a state": "UPDATE states SET state = CAST(state || x'00' AS BLOB) WHERE rowid = (SELECT min(rowid) FROM states)",
    "a lost state": "DELETE FROM states WHERE rowid = (SELECT min(rowid) FROM states)",
    "a last stamp": "UPDATE states SET last = x'94010203' WHERE rowid = (SELECT min(rowid) FROM states)",
    "a lost property": "DELETE FROM props WHERE value = 9",
    "a moved property": "UPDATE props SET value = 9 WHERE value = 10",
    "a lost reference": "DELETE FROM refs WHERE target = (SELECT max(target) FROM refs)",
    "a lost move": "DELETE FROM moves WHERE seq = (SELECT max(seq) FROM moves)",
    "a cursor": "UPDATE cursors SET length = length - 1",
    "a lost cursor": "DELETE FROM cursors",
    "a lost feed": "DELETE FROM touch_feeds",
    "a lost mark": "DELETE FROM about WHERE name = 'base'",
    "a tally": "UPDATE tallies SET count = count + 1 WHERE kind = 1",
    "a lost tally": "DELETE FROM tallies WHERE kind = 0",
    "a model": "UPDATE tallies SET key = CAST(replace(key, 'text', 'tect') AS BLOB) WHERE kind = 7",
}


@pytest.mark.parametrize("name", ROW_DAMAGES)
def test_a_changed_or_lost_row_is_noticed_and_made_anew(home: Damageable, name: str) -> None:
    home.damage(lambda connection: connection.execute(ROW_DAMAGES[name]))
    with pytest.raises(Corrupt):
        audit_items(home.items)
    answers = home.try_answers(read_only=True)
    assert isinstance(answers, Corrupt) or answers == home.expected
    answers = home.try_answers()
    assert isinstance(answers, Corrupt) or answers == home.expected
    assert home.answers() == home.expected
    audit_items(home.items)


TREE_DAMAGES = {
    "a node": "UPDATE nodes SET cid = CAST(substr(cid, 1, 35) || x'00' AS BLOB) WHERE path = ''",
    "a lost dirty item": "DELETE FROM tree_dirty WHERE item = (SELECT max(item) FROM tree_dirty)",
    "an encoded state": "UPDATE states SET encoded = CAST(encoded || x'00' AS BLOB) WHERE encoded IS NOT NULL",
}


@pytest.mark.parametrize("name", TREE_DAMAGES)
def test_damage_to_what_snapshots_are_made_from_never_gives_another_cid(fresh: Damageable, name: str) -> None:
    fresh.damage(lambda connection: connection.execute(TREE_DAMAGES[name]))
    with pytest.raises(Corrupt):
        audit_items(fresh.items)
    with fresh.open() as peer:
        party = peer.party(fresh.key)
        party.create("text", parent=party.get(fresh.board)).delete()  # its page and those above it are made anew
        try:
            cid = party.snapshot().cid
        except Corrupt:
            cid = ""
    with fresh.open() as peer:
        again = peer.party(fresh.key).snapshot().cid
        assert cid in ("", again)
    fresh.items.unlink()
    with fresh.open() as peer:
        assert peer.party(fresh.key).snapshot().cid == again


def test_a_snapshot_of_too_few_items_is_not_taken(fresh: Damageable) -> None:
    last_link = "SELECT max(item) FROM items WHERE type = 'next'"
    fresh.damage(lambda connection: connection.execute(f"DELETE FROM states WHERE item = ({last_link})"))
    with fresh.open() as peer:
        party = peer.party(fresh.key)
        assert party.runtime.items is not None
        party.runtime.items.forget_tree()  # so that every page is made from the states
        with pytest.raises(Corrupt, match="that is not how many there are"):
            party.snapshot()
    assert fresh.answers() == fresh.expected


def test_what_was_written_after_the_damage_was_noticed_is_kept(fresh: Damageable) -> None:
    fresh.damage(lambda connection: connection.execute("DELETE FROM props WHERE value = 9"))
    with fresh.open() as peer:
        party = peer.party(fresh.key)
        with pytest.raises(Corrupt):
            party.query(i=9).all()
        late = party.create(type="late", i=7).id
        with pytest.raises(Corrupt, match="no checkpoints"):
            party.snapshot()
    with fresh.open() as peer:
        party = peer.party(fresh.key)
        assert party.get(late)["i"] == 7
        assert len(party.query(i=9).all()) == 1


def test_the_audit_of_a_sound_file_finds_nothing(fresh: Damageable) -> None:
    audit_items(fresh.items)
    with fresh.open() as peer:
        party = peer.party(fresh.key)
        party.query(type="n").all()[0]["i"] = 5
        party.query(type="n").all()[1].delete()
        party.index("pad")
        party.snapshot()
    audit_items(fresh.items)
    store = ItemStore(fresh.items)
    store.clear()
    store.close()
    audit_items(fresh.items)


def flipped(data: bytes, place: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    return bytes(damaged)
