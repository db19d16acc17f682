"""Nodes of the snapshot tree read ahead: few looks, bounded memory, and never another tree."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel import snapshot as shape
from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import INLINE_ITEM_BYTES_MAX, item_key
from echostore.peer import snapshots
from echostore.peer.party import Party
from echostore.store import nodes_ahead
from echostore.store.nodes_ahead import NodesAhead
from echostore.wire.tree_nodes import IndexNode
from peer_builder import Circle

ITEMS = 400


@pytest.fixture
def party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Party]:
    """Four hundred items in pages of twelve, as of a snapshot."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(shape, "PAGE_ITEMS_MAX", 12)
    with Circle(tmp_path, "ann") as circle:
        made = circle.party("ann")
        with made.batch():
            for number in range(ITEMS):
                made.create(type="row", n=number)
        made.snapshot()
        yield made


class Looks:
    """What is asked of the blobs of a party."""

    def __init__(self, party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
        blobs = party.runtime.blobs
        assert blobs is not None
        self.count = self.most = 0
        get_some = blobs.get_some

        def counting(cids: list[Cid], bytes_max: int) -> dict[Cid, bytes]:
            self.count += 1
            self.most = max(self.most, len(cids))
            return get_some(cids, bytes_max)

        monkeypatch.setattr(blobs, "get_some", counting)


def rows(party: Party) -> list[echostore.Item]:
    return sorted(party.query(type="row").all(), key=lambda item: item["n"])


def same_as_built(party: Party) -> str:
    """The CID of a snapshot, which is that of a tree made from all rows."""
    cid = party.snapshot().cid
    assert party.runtime.items is not None
    party.runtime.items.forget_tree()
    assert party.snapshot().cid == cid
    return cid


def depth(party: Party) -> int:
    """The levels of the tree."""
    return max(len(path) for path, _, _ in party.snapshot().reader().nodes()) + 1


def test_an_update_looks_once_for_each_level(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = depth(party)
    assert levels >= 3
    for item in rows(party)[::10]:
        item["text"] = "another"
    looks = Looks(party, monkeypatch)
    party.snapshot()
    assert looks.count == levels
    same_as_built(party)


@pytest.mark.parametrize("window", [1, 2, 7, 1000])
def test_windows_bound_what_is_read_at_a_time(party: Party, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    for module in (nodes_ahead, snapshots):
        monkeypatch.setattr(module, "AHEAD_ITEMS", window)
    every = rows(party)
    for item in every[::5]:
        item["text"] = "another"
    for item in every[:40:4]:
        item.delete()
    with party.batch():
        for number in range(30):
            party.create(type="row", n=ITEMS + number, text="x" * number * 9)
    looks = Looks(party, monkeypatch)
    party.snapshot()
    assert looks.most <= window
    same_as_built(party)


def test_what_has_no_room_ahead_is_read_by_itself(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_ahead, "AHEAD_BYTES", 1)
    for item in rows(party)[::10]:
        item["text"] = "another"
    looks = Looks(party, monkeypatch)
    party.snapshot()
    assert looks.count > depth(party)
    same_as_built(party)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_nodes_that_are_lost_are_made_from_the_rows(party: Party, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    nodes = [(len(path), cid) for path, cid, _ in party.snapshot().reader().nodes() if path]
    at = sorted({length for length, _ in nodes})[which]
    blobs = party.runtime.blobs
    assert blobs is not None
    lost = [cid for length, cid in nodes if length == at]
    levels = depth(party)
    blobs.delete(lost)
    for item in rows(party)[::10]:
        item["text"] = "another"
    looks = Looks(party, monkeypatch)
    party.snapshot()
    assert which != -1 or looks.count <= levels + len(lost), "a page that is lost is looked for once more, by itself"
    same_as_built(party)


@pytest.mark.parametrize("size", [10, INLINE_ITEM_BYTES_MAX, 3 * INLINE_ITEM_BYTES_MAX])
def test_an_item_that_grows_in_its_page(party: Party, size: int) -> None:
    """In its place where it may stay whole; a large one goes into chunks and behind the others."""
    every = rows(party)
    for number in (3, 70, 71):
        every[number]["text"] = "y" * size
    same_as_built(party)
    every[70]["text"] = "z"
    same_as_built(party)


def test_an_item_that_is_too_large_for_its_page_leaves_its_place(party: Party) -> None:
    item = rows(party)[3]
    item.name = "n" * (INLINE_ITEM_BYTES_MAX + 1)
    same_as_built(party)
    rows(party)[4]["text"] = "beside it, perhaps"
    same_as_built(party)
    item.name = "short"
    same_as_built(party)


def test_only_the_nodes_above_the_keys_are_read(party: Party) -> None:
    blobs = party.runtime.blobs
    assert blobs is not None
    snapshot = party.snapshot()
    nodes = {path: (cid, node) for path, cid, node in snapshot.reader().nodes()}
    asked: list[Cid] = []

    def get_some(cids: list[Cid], bytes_max: int) -> dict[Cid, bytes]:
        asked.extend(cids)
        return blobs.get_some(cids, bytes_max)

    key = item_key(rows(party)[5].id)
    ahead = NodesAhead(get_some, snapshot.root.index_root, [key])
    top = nodes[""][1]
    assert isinstance(top, IndexNode)
    assert ahead.branches("", snapshot.root.index_root) == list(top.branches)
    way = [path for path in nodes if shape.key_bounds(path)[0] <= key <= shape.key_bounds(path)[1]]
    assert sorted(asked) == sorted(nodes[path][0] for path in way)
    other = next(path for path in nodes if path not in way)
    assert ahead.page(other, nodes[other][0]) or ahead.branches(other, nodes[other][0])
    assert asked[len(way) :] == [nodes[other][0]], "one that lies elsewhere by itself"
