"""Snapshots of live parties, and parties as files: the same state has the same CID, however it came about."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel import snapshot as shape
from echostore.kernel.errors import Corrupt, EchoError, Refused, UsageError
from echostore.kernel.ids import Cid, ItemId
from echostore.peer.party import Party
from echostore.peer.transfer import export_party, import_party
from echostore.wire.car import read_car, write_car
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.generated import archive_pb2
from echostore.wire.tree import TreeReader
from peer_builder import Circle


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


def many(party: Party, count: int) -> list[echostore.Item]:
    made: list[echostore.Item] = []
    for start in range(0, count, 2000):
        with party.batch():
            made += [party.create(type="row", n=n, text=f"row {n}") for n in range(start, min(count, start + 2000))]
    return made


def mixed(party: Party) -> None:
    """All models, a move, a deletion, an excluded nothing."""
    board = party.create(type="board", title="Summer")
    text = party.create("text", parent=board)
    text.insert(0, "hello")
    text.mark(0, 3, "bold")
    party.create("growable-array", parent=board).append(1, board, [2, {"a": b"b"}])
    party.create("threaded-log").post("first")
    text.move(None)
    party.create(type="gone").delete()
    board.increment("n", 0.5)
    board.add("tags", "x")


# equal states


def test_restored_rebuilt_replayed_and_read_only_have_one_cid(circle: Circle, tmp_path: Path) -> None:
    mixed(circle.party("ann"))
    cid = circle.agree_after_loss()
    party = circle.party("ann")
    assert party.as_of(party.anchor()).snapshot().cid == cid, "replayed"
    with echostore.open(tmp_path / "ann", read_only=True) as reader:
        assert reader.party(circle.key).snapshot().cid == cid
    assert circle.restart("ann", crash=True).snapshot().cid == cid


def test_a_snapshot_taken_step_by_step_equals_one_taken_at_once(circle: Circle) -> None:
    chance = random.Random(3)
    party = circle.party("ann")
    items = many(party, 60)
    for _ in range(15):
        for _ in range(5):
            item = chance.choice(items)
            chance.choice([lambda: item.update(n=1), item.delete, item.restore, lambda: item.move(items[0])])()  # noqa: B023
        if chance.random() < 0.5:
            party.create("text").insert(0, "x")
        party.snapshot()
    assert circle.agree()


def test_taking_a_snapshot_twice_makes_nothing_new(circle: Circle) -> None:
    mixed(circle.party("ann"))
    first = circle.party("ann").snapshot()
    second = circle.party("ann").snapshot()
    assert (second.cid, second.new_blobs) == (first.cid, 0)


def test_a_snapshot_inside_a_batch_is_refused(circle: Circle) -> None:
    party = circle.party("ann")
    with party.batch():
        party.create(n=1)
        with pytest.raises(Refused, match="batch"):
            party.snapshot()


def test_open_edits_are_in_the_snapshot(circle: Circle) -> None:
    text = circle.party("ann").create("text")
    before = circle.party("ann").snapshot().cid
    text.insert(0, "x")
    assert circle.party("ann").snapshot().cid != before


# sharing and lazy reading


def test_one_percent_changed_moves_few_bytes(circle: Circle) -> None:
    """Of items of 1 KiB; of tiny ones a page has a hundred, and most pages have one that changed."""
    party = circle.party("ann")
    with party.batch():
        items = [party.create("property-set", text="x" * 1000) for _ in range(2_000)]
    first = party.snapshot()
    chance = random.Random(1)
    with party.batch():
        for item in chance.sample(items, 20):
            item["text"] = "y" * 1000
    second = party.snapshot()
    assert second.cid != first.cid
    assert first.new_bytes > 2_000 * 1000, "at least every item's text"
    assert second.new_bytes > 20 * 1000
    assert second.new_bytes <= 0.15 * first.new_bytes


def test_one_item_of_a_large_snapshot_costs_few_blobs(circle: Circle) -> None:
    party = circle.party("ann")
    items = many(party, 20_000)
    snapshot = party.snapshot()
    assert snapshot.item_count == 20_001
    gets = 0

    def blob(cid: Cid) -> bytes:
        nonlocal gets
        gets += 1
        return snapshot.blob(cid)

    reader = TreeReader(snapshot.root.index_root, blob)
    found = reader.item(items[12_345].id)
    assert found is not None
    assert found.type == "row"
    assert gets <= 20


# a party as a file


def exported(circle: Circle, tmp_path: Path) -> Path:
    mixed(circle.party("ann"))
    circle.agree()
    file = tmp_path / "trip.car"
    done = export_party(circle.party("ann"), file)
    assert done.cid == circle.party("ann").snapshot().cid
    assert done.bytes == file.stat().st_size
    return file


def test_a_party_survives_the_way_through_a_file(circle: Circle, tmp_path: Path) -> None:
    file = exported(circle, tmp_path)
    cid = circle.party("ann").snapshot().cid
    with echostore.open(tmp_path / "new", background=False) as stranger:
        party = import_party(stranger, file)
        assert party.snapshot().cid == cid
        assert party.title == "Trip"
        with pytest.raises(Refused):
            party.create(n=1)
        assert import_party(stranger, file).snapshot().cid == cid, "again is nothing"
    with echostore.open(tmp_path / "new", background=False) as stranger:
        assert stranger.party(circle.key).snapshot().cid == cid


def test_a_member_takes_from_a_file_what_it_lacks(circle: Circle, tmp_path: Path) -> None:
    file = exported(circle, tmp_path)
    item = circle.party("ann").create(n=1)
    newer = tmp_path / "newer.car"
    export_party(circle.party("ann"), newer)
    circle.party("bob").create(n="bob's own")
    import_party(circle.peers["bob"], newer)
    assert circle.get("bob", item)["n"] == 1
    import_party(circle.peers["bob"], file)
    circle.get("bob", item)["n"] = 2
    circle.agree_after_loss()


def test_a_file_is_never_written_over(circle: Circle, tmp_path: Path) -> None:
    file = exported(circle, tmp_path)
    with pytest.raises(Refused, match="exists"):
        export_party(circle.party("ann"), file)
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_that_is_not_there_or_is_none_is_refused(circle: Circle, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        import_party(circle.peers["ann"], tmp_path / "nothing.car")
    (tmp_path / "none.car").write_bytes(b"hello")
    with pytest.raises(EchoError):
        import_party(circle.peers["ann"], tmp_path / "none.car")


def test_a_file_whose_claim_its_feeds_do_not_bear_out_is_refused(circle: Circle, tmp_path: Path) -> None:
    file, lie = exported(circle, tmp_path), tmp_path / "lie.car"
    with file.open("rb") as source:
        roots, found = read_car(source)
        blocks = list(found)
    manifest = archive_pb2.Manifest.FromString(blocks[0][1])
    manifest.state_root = cid_of(b"another state", PROTOBUF)
    changed = manifest.SerializeToString(deterministic=True)
    with lie.open("wb") as target:
        write_car(target, [cid_of(changed, PROTOBUF), roots[1]], [(cid_of(changed, PROTOBUF), changed), *blocks[1:]])
    with echostore.open(tmp_path / "new", background=False) as stranger:
        with pytest.raises(Corrupt, match="claims"):
            import_party(stranger, lie)
        assert stranger.parties() == []
        assert not list((tmp_path / "new" / "parties").iterdir())


@pytest.mark.parametrize("seed", range(20))
def test_a_tampered_file_is_refused_and_leaves_no_party_or_gives_the_same_one(
    circle: Circle, tmp_path: Path, seed: int
) -> None:
    """A flipped byte, a cut, a doubled piece: an error and nothing imported, unless the state is the claimed one."""
    file = exported(circle, tmp_path)
    cid = circle.party("ann").snapshot().cid
    chance, data = random.Random(seed), bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if seed % 4 == 0:
        del data[at:]
    elif seed % 4 == 1:
        data[at:at] = data[at : at + 50]
    else:
        data[at] ^= 1 << chance.randrange(8)
    bad = tmp_path / "bad.car"
    bad.write_bytes(bytes(data))
    with echostore.open(tmp_path / "new", background=False) as stranger:
        try:
            party = import_party(stranger, bad)
        except EchoError:
            assert stranger.parties() == []
            assert import_party(stranger, file).snapshot().cid == cid, "the good file still works"
        else:
            assert party.snapshot().cid == cid


def test_the_next_snapshot_reads_the_page_that_changed_and_the_nodes_above_it(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "PAGE_ITEMS_MAX", 12)
    party = circle.party("ann")
    items = many(party, 600)
    party.snapshot()
    store, blobs = party.runtime.items, party.runtime.blobs
    assert store is not None
    assert blobs is not None
    pages: list[str] = []
    read: list[ItemId] = []
    looks: list[object] = []
    states_under, states_of, node, get_some = store.states_under, store.states_of, store.node, blobs.get_some
    monkeypatch.setattr(store, "states_under", lambda path: pages.append(path) or states_under(path))
    monkeypatch.setattr(store, "states_of", lambda items: read.extend(items) or states_of(items))
    monkeypatch.setattr(store, "node", lambda path: looks.append(path) or node(path))
    monkeypatch.setattr(blobs, "get_some", lambda cids, most: looks.extend(cids) or get_some(cids, most))
    items[7]["n"] = -1
    party.snapshot()
    assert pages == [], "of the others in its page nothing is read but the page"
    assert read == [items[7].id]
    assert 3 <= len(looks) <= 6, "one look for each node on the way, and the top"


def test_a_page_that_is_lost_is_made_from_the_rows(circle: Circle) -> None:
    party = circle.party("ann")
    items = many(party, 300)
    first = party.snapshot()
    blobs = party.runtime.blobs
    assert blobs is not None
    gone = [cid for cid in first.reader().reachable() if cid != first.root.index_root]
    assert gone
    blobs.delete(gone)
    items[7]["n"] = -1
    changed = party.snapshot().cid
    assert party.runtime.items is not None
    party.runtime.items.forget_tree()
    again = party.snapshot()
    assert again.cid == changed, "the same as built from all rows"
    assert len(list(again.reader().items())) == again.item_count
