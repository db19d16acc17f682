"""Many moves: the tree state of a snapshot is cut into chunks, and reads back."""

from pathlib import Path

import pytest

import echostore
from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.items.tree import TreeMove
from echostore.peer.transfer import export_party, import_party
from echostore.wire import items
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.items import MOVES_PER_CHUNK, decode_moves, encode_moves, move_chunks


def made(count: int) -> list[TreeMove]:
    feed = FeedId(b"f" * 8)
    return [
        TreeMove(Stamp(n + 1, feed, n, 0), ItemId(feed + n.to_bytes(8, "big")), 0, ItemId(bytes(16)) if n % 2 else None)
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, MOVES_PER_CHUNK, MOVES_PER_CHUNK + 1, 3 * MOVES_PER_CHUNK + 5])
def test_moves_read_back_and_no_blob_is_too_large(count: int) -> None:
    blobs: dict[bytes, bytes] = {}
    top = encode_moves(made(count), blobs.__setitem__)
    assert decode_moves(top, lambda cid: blobs[cid]) == made(count)
    assert move_chunks(top) == [cid_of(data, PROTOBUF) for data in blobs.values()]
    assert (len(blobs) > 0) == (count > MOVES_PER_CHUNK)
    assert max(map(len, [top, *blobs.values()])) <= 1 << 20


def test_a_party_with_chunked_moves_goes_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(items, "MOVES_PER_CHUNK", 10)
    with (
        echostore.open(tmp_path / "one", name="one", background=False) as one,
        echostore.open(tmp_path / "two", name="two", background=False) as two,
    ):
        party = one.create_party("Trip")
        folder = party.create("property-set")
        things = [party.create("property-set", n=number) for number in range(35)]
        for thing in things:
            thing.move(folder)
        snapshot = party.snapshot()
        assert len(move_chunks(snapshot.blob(snapshot.root.tree))) == 4
        export_party(party, tmp_path / "party.car")
        assert import_party(two, tmp_path / "party.car").snapshot().cid == snapshot.cid
