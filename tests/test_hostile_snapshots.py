"""Snapshots whose items and moves no honest program wrote: whoever reads one says what is wrong, and does little for it."""

from collections.abc import Iterable

import pytest

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, FeedId, ItemId, Stamp, created_item_id
from echostore.kernel.items.tree import MOVE, TreeMove
from echostore.kernel.snapshot import TreeTop, placements_of, view_place
from echostore.peer.early_reading import Toward
from echostore.peer.epoch_fetching import _CHUNK_HEAD, _TreeWalk
from echostore.peer.placement_checking import FalseIndex, check_items
from echostore.wire.cids import PROTOBUF, RAW, cid_of
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import decode_moves, encode_moves, move_chunks
from echostore.wire.placements import build_placements
from echostore.wire.snapshot import EncodedItem
from echostore.wire.tree import build
from echostore.wire.tree_nodes import ITEM_HEAD, large_item_bytes, page_bytes
from echostore.wire.tree_reader import TreeReader

FEED = FeedId(b"feed-one")
KEY = b"k" * 32


def item_at(number: int) -> ItemId:
    return created_item_id(FEED, number, 0)


def tree_of(*states: pb.ItemState) -> tuple[TreeTop, dict[Cid, bytes]]:
    blobs: dict[Cid, bytes] = {}
    encoded = [(ItemId(each.item), EncodedItem(each.SerializeToString(deterministic=True))) for each in states]
    return build(encoded, blobs.__setitem__), blobs


# Items.


def test_an_item_below_something_that_is_no_item_is_refused() -> None:
    top, blobs = tree_of(pb.ItemState(item=item_at(0), model="property-set", version=1, parent=b"short"))
    index = build_placements([], blobs.__setitem__)
    with pytest.raises(Corrupt, match="a parent of 5 bytes"):
        check_items(TreeReader(top.cid, blobs.get), index.cid)


def test_a_view_below_the_place_of_its_own_key_stands_there_once() -> None:
    """The place is a hash, and the ids of some items can be chosen."""
    item = item_at(0)
    assert placements_of(item, view_place(KEY), KEY) == (view_place(KEY) + item,)
    state = pb.ItemState(item=item, model="property-set", version=1, parent=view_place(KEY), inception_key=KEY)
    top, blobs = tree_of(state)
    index = build_placements(placements_of(item, view_place(KEY), KEY), blobs.__setitem__)
    assert index.count == 1
    check_items(TreeReader(top.cid, blobs.get), index.cid)
    with pytest.raises(FalseIndex):
        check_items(TreeReader(top.cid, blobs.get), build_placements([], blobs.__setitem__).cid)


@pytest.mark.parametrize(
    "data",
    [
        ITEM_HEAD + item_at(0) + b"\xff\xff\xff" + _CHUNK_HEAD,
        pb.ItemState(item=item_at(0), state_cids=[b"junk" + _CHUNK_HEAD]).SerializeToString(),
        pb.ItemState(item=item_at(0), state_cids=[cid_of(_CHUNK_HEAD, PROTOBUF)], type="U").SerializeToString(),
    ],
)
def test_an_item_that_leads_nowhere_ends_a_download(data: bytes) -> None:
    blobs: dict[Cid, bytes] = {}
    top = build([(item_at(0), EncodedItem(data))], blobs.__setitem__)
    walk = _TreeWalk(top.cid, 1, lambda done, total: None, chunks_too=True)
    with pytest.raises(Corrupt, match="an item of the epoch's tree"):
        walk.below(top.cid, blobs[top.cid])


def test_an_item_in_very_many_chunks_is_put_together_by_nobody() -> None:
    page = page_bytes([], [large_item_bytes(item_at(0), [cid_of(b"chunk", RAW)] * 5000)])
    top = cid_of(page, PROTOBUF)
    walk = _TreeWalk(top, 1, lambda done, total: None, chunks_too=True)
    with pytest.raises(Corrupt, match="in 5000 chunks"):
        walk.below(top, page)
    toward = Toward(TreeReader(top, {top: page}.get), [""])
    assert toward.below(top, page) == []


# Moves.


def moves(numbers: Iterable[int]) -> list[TreeMove]:
    return [TreeMove(Stamp(number, FEED, number, 0), item_at(1), MOVE, item_at(2)) for number in numbers]


@pytest.mark.parametrize(
    "wrong",
    [
        [2, 1],
        [1, 1],
        [
            TreeMove(Stamp(1, FEED, 0, 0), item_at(1), MOVE, item_at(2)),
            TreeMove(Stamp(1, FEED, 0, 0), item_at(1), MOVE, None),
        ],
    ],
)
def test_moves_in_no_order_are_refused(wrong: list) -> None:
    told = [each if isinstance(each, TreeMove) else moves([each])[0] for each in wrong]
    with pytest.raises(Corrupt, match="repeated or out of order"):
        decode_moves(encode_moves(told, {}.__setitem__), {}.__getitem__)


@pytest.mark.parametrize("count", [0, 10])
def test_a_chunk_of_moves_that_is_named_very_often_is_read_twice(count: int) -> None:
    chunk = encode_moves(moves(range(count)), {}.__setitem__)
    asked: list[Cid] = []

    def get(cid: Cid) -> bytes:
        asked.append(cid)
        return chunk

    data = pb.TreeState(chunks=[cid_of(chunk, PROTOBUF)] * 20_000).SerializeToString()
    with pytest.raises(Corrupt, match="a tree state with"):
        decode_moves(data, get)
    assert len(asked) <= 2


def test_a_chunk_of_moves_has_the_name_of_a_blob() -> None:
    for name in (b"junk", cid_of(b"", RAW)):
        data = pb.TreeState(chunks=[name]).SerializeToString()
        with pytest.raises(Corrupt, match="not named by a protobuf CID"):
            move_chunks(data)
        with pytest.raises(Corrupt, match="not named by a protobuf CID"):
            decode_moves(data, {}.__getitem__)
