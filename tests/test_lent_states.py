"""States that gc leaves to the pages of the snapshot tree: the same answers, whatever happens to either side."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echostore
from crash_disk import Disk, PowerCut, Survivors
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.snapshot import NIBBLES, PAGE_ITEMS_MAX, key_bounds
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.store.blob_store import BlobStore
from echostore.store.item_audit import audit_items
from echostore.store.item_store import Checkpoint, ItemRow, ItemStore, StateRow
from echostore.store.lent_states import number_of
from two_peers import open_quiet

ITEMS = PAGE_ITEMS_MAX * 3
"""Enough for an index node with pages at runs."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def collected(home: Path, items: int = ITEMS) -> dict[ItemId, dict[str, Any]]:
    """A party after gc, with one item written above its base; what each item holds."""
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        with party.batch():
            made = [party.create("property-set", type="task", n=number) for number in range(items)]
        party.create("text", type="note").insert(0, "hello")
        Epochs(party).create()
        made[0]["n"] = -1
        Epochs(party).create()
        made[1]["n"] = -2
        run_gc(party)
        return values(party)


def values(party: Party) -> dict[ItemId, Any]:
    return {item.id: party.get(item.id).value() for item in party.query()}


def files(home: Path) -> Path:
    (folder,) = (home / "parties").iterdir()
    return folder


def rows(home: Path, table: str) -> int:
    connection = sqlite3.connect(files(home) / "items.db")
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        connection.close()


def change(home: Path, name: str, sql: str) -> None:
    """Change rows behind the store's back."""
    connection = sqlite3.connect(files(home) / name)
    connection.execute(sql)
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def audited(home: Path) -> int:
    with BlobStore(files(home) / "blobs.db", writable=False) as blobs:
        return audit_items(files(home) / "items.db", blobs.get)


def folded_anew(peer: Peer, party: Party) -> str:
    """The CID of the party as its feeds and its base give it."""
    anew = peer.opener.folded_anew(peer.meta.party(party.key))
    try:
        return anew.snapshot().cid
    finally:
        anew.runtime.abandon()


def test_what_is_as_the_base_has_it_is_kept_once(tmp_path: Path) -> None:
    expected = collected(tmp_path / "home")
    assert rows(tmp_path / "home", "lent") + rows(tmp_path / "home", "states") == len(expected) + 1
    held = rows(tmp_path / "home", "states")
    assert held == 2, "what was written above the base, and the text in the form of its model"
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        assert values(party) == expected
        assert party.snapshot().cid == folded_anew(peer, party)
    assert audited(tmp_path / "home") == len(expected) + 1
    with echostore.open(tmp_path / "home", read_only=True, background=False) as reader:
        assert values(reader.party("@Trip")) == expected


def test_a_written_item_is_held_again(tmp_path: Path) -> None:
    expected = collected(tmp_path / "home")
    written, deleted = list(expected)[5], list(expected)[6]
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        party.get(written)["n"] = 5000
        party.get(deleted).delete()
        party.create("property-set", type="task", n=1)
        before = party.snapshot().cid
        assert before == folded_anew(peer, party)
    lent = rows(tmp_path / "home", "lent")
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        assert party.snapshot().cid == before
        assert party.get(written)["n"] == 5000
        Epochs(party).create()
        run_gc(party)
        assert party.snapshot().cid == before
    assert rows(tmp_path / "home", "lent") > lent
    assert audited(tmp_path / "home") == len(expected) + 2


def test_items_come_and_go_until_pages_join_and_part(tmp_path: Path) -> None:
    """The tree asks for lent items below every kind of node: pages, runs, branches that become one page."""
    collected(tmp_path / "home")
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        with party.batch():
            for number in range(ITEMS):
                party.create("property-set", type="more", n=number)
        assert party.snapshot().cid == folded_anew(peer, party)
        with party.batch():
            for item in party.query(type="more").all():
                item.delete()
        assert party.snapshot().cid == folded_anew(peer, party)
        store = party.runtime.items
        assert store is not None
        known = {item for path in NIBBLES for item in (ItemId(row.item) for row in store.states_under(path))}
        assert known == {ItemId(row.item) for row in store.states_under("")}
        assert len(known) == 2 * ITEMS + 2
        for path in ("g", "m", "3", "3f"):
            first, last = key_bounds(path)
            below = {ItemId(row.item) for row in store.states_under(path)}
            assert below == {
                item for item in known if int(first[:16], 16) <= number_of(item) + 2**63 <= int(last[:16], 16)
            }


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "create", "delete", "epoch", "gc", "snapshot", "open"]), st.integers(0, 99)),
    min_size=4,
    max_size=14,
)


@settings(max_examples=12, deadline=None)
@given(steps=STEPS)
def test_lending_never_shows(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    home = tmp_path_factory.mktemp("lending") / "home"
    peer = open_quiet(home)
    try:
        party = peer.create_party("Trip")
        for number in range(12):
            party.create("property-set", type="task", n=number)
        for what, number in [("epoch", 0), ("epoch", 0), ("gc", 0), *steps, ("epoch", 0), ("gc", 0)]:
            items = sorted(party.query(type="task").all(), key=lambda item: item.id)
            if what == "write" and items:
                items[number % len(items)]["n"] = number
            elif what == "create":
                party.create("property-set", type="task", n=number)
            elif what == "delete" and items:
                items[number % len(items)].delete()
            elif what == "epoch":
                party.create("property-set", type="mark")  # an epoch of nothing new is refused
                Epochs(party).create()
            elif what == "gc":
                run_gc(party)
            elif what == "snapshot":
                party.snapshot()
            elif what == "open":
                peer.close()
                peer = open_quiet(home)
                party = peer.party("@Trip")
            expected = {item.id: item["n"] for item in party.query(type="task").all()}
            assert {item: party.get(item)["n"] for item in expected} == expected
        assert party.snapshot().cid == folded_anew(peer, party)
    finally:
        peer.close()
    audited(home)


DAMAGES = {
    "a lost mark": "DELETE FROM lent WHERE no = (SELECT min(no) FROM lent)",
    "another mark": "UPDATE lent SET no = no + 1 WHERE no = (SELECT max(no) FROM lent)",
    "one mark more": "INSERT INTO lent VALUES (77)",
    "a lost row": "DELETE FROM items WHERE item = (SELECT max(item) FROM items WHERE type = 'task')",
    "a lost node": "DELETE FROM nodes WHERE path <> ''",
    "a changed node": "UPDATE nodes SET count = count - 1 WHERE path <> ''",
    "another page": "UPDATE nodes SET cid = (SELECT cid FROM nodes WHERE path = '') WHERE path <> ''",
}


UNSEEN = {"one mark more"}
"""What changes no answer, and is found by who reads everything."""


def tried(home: Path, expected: dict[ItemId, Any]) -> Corrupt | None:
    """Read all, change one, take a snapshot."""
    try:
        with open_quiet(home) as peer:
            party = peer.party("@Trip")
            assert values(party) == expected
            party.get(next(iter(expected))).delete()
            party.snapshot()
    except Corrupt as error:
        return error
    return None


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_and_the_items_are_made_anew(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    expected = collected(home)
    change(home, "items.db", DAMAGES[name])
    with pytest.raises(Corrupt):
        audited(home)
    found = tried(home, expected)
    assert found is not None or name in UNSEEN
    if found is not None:
        assert "made anew" in found.next_step
    with open_quiet(home) as peer:
        party = peer.party("@Trip")
        assert len(values(party)) in (len(expected), len(expected) - 1)
        assert party.snapshot().cid == folded_anew(peer, party)


def test_a_lost_page_takes_its_own_items_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    expected = collected(home)
    with BlobStore(files(home) / "blobs.db") as blobs:
        connection = sqlite3.connect(files(home) / "items.db")
        page = connection.execute("SELECT cid FROM nodes WHERE path <> '' ORDER BY path LIMIT 1").fetchone()[0]
        connection.close()
        kept = blobs.get(page)
        blobs.delete([page])
    with open_quiet(home) as peer:
        party = peer.party("@Trip")
        read, lost = set(), []
        for item in expected:
            try:
                assert party.get(item).value() == expected[item]
                read.add(item)
            except Corrupt as error:
                lost.append(error)
        assert lost
        assert len(read) >= len(expected) // 2
        assert "epoch fetch" in lost[0].next_step
        assert not (files(home) / "items.db.damaged").exists(), "the rows are sound"
    with BlobStore(files(home) / "blobs.db") as blobs:
        blobs.put_many({page: kept})
    with open_quiet(home) as peer:
        assert values(peer.party("@Trip")) == expected


def test_homes_from_before_are_read_and_written(tmp_path: Path) -> None:
    """items.db of version 5 and blobs.db of version 1, by a reader as they are, and then by a writer."""
    home = tmp_path / "home"
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        for number in range(30):
            party.create("property-set", type="task", n=number)
        Epochs(party).create()
        expected, cid = values(party), party.snapshot().cid
    for name, version, sql in (
        ("items.db", 5, "DROP TABLE lent"),
        ("items.db", 5, "DROP TABLE placement_nodes"),
        ("items.db", 5, "DROP TABLE placement_dirty"),
        ("blobs.db", 1, "ALTER TABLE blobs DROP COLUMN size"),
    ):
        change(home, name, sql)
        change(home, name, f"PRAGMA user_version = {version}")
    with echostore.open(home, read_only=True, background=False) as reader:
        party = reader.party("@Trip")
        assert (values(party), party.snapshot().cid) == (expected, cid)
        assert party.runtime.processor.items is not None, "the rows are used as they are"
        assert party.runtime.blobs is not None
        assert party.runtime.blobs.data_bytes() == sum(size for _, size in party.runtime.blobs.list()) > 0
        assert party.runtime.blobs.verify().sound
    with open_quiet(home) as peer:
        party = peer.party("@Trip")
        assert party.runtime.processor.counters.rebuilds == 0
        assert (values(party), party.snapshot().cid) == (expected, cid)
        last = party.create("property-set", type="task", n=30)
        Epochs(party).create()
        run_gc(party)
        assert values(party) == {**expected, last.id: {"n": 30}}
        assert party.snapshot().cid == folded_anew(peer, party)
    assert rows(home, "lent") == 32


def test_what_is_secured_survives_a_power_cut() -> None:
    """Before blobs go, the rows that no longer name them are on the disk."""
    disk = Disk()
    store = ItemStore(Path("items.db"), connect=disk.connect)
    item = ItemId(bytes(16))
    row = ItemRow(item, "task", "property-set", 1, None, False, None, None, None, None, 0, None, None)
    store.save(blank(items=[row], states=[StateRow(item, b"state", None, None)]))
    with store.database.transaction():
        store._lent.add([ItemId(bytes(15) + b"\1")])
    store.save(blank(items=[row._replace(type="late")], states=[StateRow(item, b"state", None, None)]))
    store.secure()
    disk.mark("secured")
    store.close()
    end = max(at for at, event in enumerate(disk.log) if getattr(event, "value", None) == "secured")
    after = Disk.left_by(PowerCut(disk.log[: end + 1]), Survivors.NONE, 0)
    kept = ItemStore(Path("items.db"), connect=after.connect)
    found = kept.item(item)
    assert found is not None
    assert found.type == "late"
    kept.close()


def blank(**more: Any) -> Checkpoint:
    empty: dict[str, Any] = dict.fromkeys(("cursors", "items", "states", "gone", "touches", "moves", "rejects"))
    made = {name: [] for name in empty} | {"references": {}, "properties": {}, "about": {"a": b"b"}}
    return Checkpoint(**{**made, **more})


def test_touches_of_a_feed_from_a_place_on(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.db")
    first, second = (ItemId(bytes(15) + bytes((number,))) for number in (1, 2))
    feed, other = FeedId(b"feed-one"), FeedId(b"feed-two")
    store.save(blank(touches=[(first, feed, 3), (second, feed, 4), (second, other, 9)]))
    assert store.touched_from(feed, 4) == [second]
    assert sorted(store.touched_from(feed, 3)) == [first, second]
    assert store.touched_from(other, 10) == []
    store.close()


def test_a_lent_item_whose_row_is_lost_is_not_taken_for_one_that_never_was(tmp_path: Path) -> None:
    home = tmp_path / "home"
    collected(home, items=5)
    connection = sqlite3.connect(files(home) / "items.db")
    lost = ItemId(connection.execute("SELECT max(item) FROM items WHERE type = 'task'").fetchone()[0])
    connection.close()
    change(home, "items.db", "DELETE FROM items WHERE item = (SELECT max(item) FROM items WHERE type = 'task')")
    store = ItemStore(files(home) / "items.db")
    with BlobStore(files(home) / "blobs.db") as blobs:
        store.read_pages_with(blobs.get)
        for ask in (store.state, store.item):
            with pytest.raises(Corrupt, match="is missing"):
                ask(lost)
        assert store.state(ItemId(bytes(16))) is None
    store.close()
