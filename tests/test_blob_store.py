"""BlobStore: content under its own name, checked on the way in and on the way out."""

import os
import random
import sqlite3
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.kernel.errors import Corrupt, NotFound, Refused, TooLarge
from echostore.kernel.ids import Cid
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.store import blob_store
from echostore.store.blob_store import BlobStore
from echostore.wire.cids import PROTOBUF, cid_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[BlobStore]:
    with BlobStore(path) as opened:
        yield opened


def some(count: int) -> dict[Cid, bytes]:
    contents = [f"blob {number}".encode() * (1 + number) for number in range(count)]
    return {cid_of(data): data for data in contents}


def test_blobs_come_back_under_their_cid(path: Path) -> None:
    blobs = some(5)
    with BlobStore(path) as store:
        assert store.put_many(blobs) == 5
        assert store.put_many(blobs) == 0
        node = store.put(b"a tree node", PROTOBUF)
        assert node == cid_of(b"a tree node", PROTOBUF)
    with BlobStore(path, writable=False) as store:
        assert {cid: store.get(cid) for cid in blobs} == blobs
        assert store.has(node)
        assert not store.has(cid_of(b"a tree node"))
        assert store.data_bytes() == sum(map(len, blobs.values())) + len(b"a tree node")
        assert store.missing([node, cid_of(b"nowhere")]) == [cid_of(b"nowhere")]
        with pytest.raises(NotFound):
            store.get(cid_of(b"nowhere"))


def test_what_does_not_match_its_cid_never_enters(store: BlobStore) -> None:
    blobs = some(3)
    for wrong in (cid_of(b"other"), Cid(b""), Cid(cid_of(b"poison")[4:])):
        with pytest.raises(Refused):
            store.put_many(blobs | {wrong: b"poison"})
    with pytest.raises(TooLarge):
        store.put(bytes(BLOB_BYTES_MAX + 1))
    assert list(store.list()) == []


def test_listing_goes_by_pages_in_the_order_of_cids(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "LIST_ROWS", 3)
    blobs = some(10)
    store.put_many(blobs)
    assert list(store.list()) == sorted((cid, len(data)) for cid, data in blobs.items())


def test_deleting(store: BlobStore) -> None:
    blobs = some(4)
    store.put_many(blobs)
    gone = list(blobs)[:2]
    assert store.delete([*gone, gone[0], cid_of(b"nowhere")]) == 2
    assert [store.has(cid) for cid in blobs] == [False, False, True, True]


@pytest.mark.parametrize("value", ["zeroblob(9)", "'text'", "7"])
def test_damage_is_found_and_named(path: Path, value: str) -> None:
    blobs = some(6)
    with BlobStore(path) as store:
        store.put_many(blobs)
    victim = list(blobs)[3]
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE blobs SET data = {value} WHERE cid = ?", (victim,))
    connection.commit()
    connection.close()
    seen: list[tuple[int, int]] = []
    with BlobStore(path) as store:
        verdict = store.verify(lambda done, total: seen.append((done, total)))
        assert (verdict.damaged, verdict.blobs, verdict.sound) == ((victim,), 6, False)
        assert seen[-1] == (6, 6)
        with pytest.raises(Corrupt):
            store.get(victim)
        store.delete([victim])
        store.put_many({victim: blobs[victim]})
        assert store.verify().sound
        assert store.get(victim, check=False) == blobs[victim]


def nodes(count: int) -> dict[Cid, bytes]:
    """Blobs that repeat themselves, and one that does not."""
    contents = [f"node {number} ".encode() * 200 for number in range(count)] + [os.urandom(300)]
    return {cid_of(data, PROTOBUF): data for data in contents}


def stored(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("SELECT sum(length(data)) FROM blobs").fetchone()[0])
    finally:
        connection.close()


def test_packed_nodes_are_named_listed_and_sent_as_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "PACK_BYTES", 3000)
    blobs = nodes(9)
    file = b"a file of somebody " * 100
    with BlobStore(path) as store:
        store.put_many(blobs)
        store.put(file)
        plain = stored(path)
        before = list(store.list()), store.data_bytes(), store.verify()
        store.pack()
        assert stored(path) < plain // 3
        assert stored(path) > len(file), "files are left alone"
        assert (list(store.list()), store.data_bytes(), store.verify()) == before
        assert {cid: store.get(cid) for cid in blobs} == blobs
        assert store.get_some(blobs, 1 << 20) == blobs
        assert len(store.get_some(blobs, 4000)) in (3, 4), "the room is counted in plain bytes"
        packed = stored(path)
        store.pack()
        assert stored(path) == packed, "what was looked at is not looked at again"
        assert store.put_many(blobs) == 0
    with BlobStore(path, writable=False) as store:
        assert {cid: store.get(cid) for cid in blobs} == blobs


def no_gain() -> bytes:
    """Bytes that are as long packed as they are."""
    chance = random.Random(1)
    found = (bytes(each % 30) + chance.randbytes(each % 40) for each in range(10_000))
    return next(data for data in found if len(zlib.compress(data)) == len(data))


def test_a_blob_that_packing_makes_no_shorter_stays_readable(path: Path) -> None:
    data = no_gain()
    with BlobStore(path) as store:
        cid = store.put(data, PROTOBUF)
        store.pack()
        assert store.get(cid) == data
        assert store.get_some([cid], 1 << 20) == {cid: data}
        assert store.verify().damaged == ()


def test_a_blob_that_was_packed_in_vain_is_read_all_the_same(path: Path) -> None:
    """Rows that an earlier version wrote: packed, and as long as before."""
    data = no_gain()
    with BlobStore(path) as store:
        cid = store.put(data, PROTOBUF)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE blobs SET data = ?, size = ?", (zlib.compress(data), len(data)))
    with BlobStore(path) as store:
        assert store.get(cid) == data
        assert store.get_some([cid], 1 << 20) == {cid: data}
        assert store.verify().damaged == ()


@pytest.mark.parametrize(
    "damage",
    [
        "data = x'00' || data",
        "size = size - 1",
        "size = size + 1",
        "size = NULL",
        "size = 'much'",
        "size = 1 << 60",
        "size = -1",
        "size = length(data)",
        "data = substr(data, 1, length(data) / 2)",
    ],
)
def test_a_damaged_packed_blob_is_noticed(path: Path, damage: str) -> None:
    blobs = nodes(2)
    with BlobStore(path) as store:
        store.put_many(blobs)
        store.pack()
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE blobs SET {damage} WHERE size > length(data)")
    connection.commit()
    connection.close()
    with BlobStore(path) as store:
        verdict = store.verify()
        assert len(verdict.damaged) == 2, "the one that could not be packed is sound"
        for cid in verdict.damaged:
            with pytest.raises(Corrupt):
                store.get(cid)
        assert set(store.get_some(blobs, 1 << 20)) == set(blobs) - set(verdict.damaged)
        store.pack()
        assert set(store.verify().damaged) == set(verdict.damaged)


def test_a_packed_blob_never_takes_more_memory_than_a_blob_may(path: Path) -> None:
    """A bomb: a few bytes that say they are as many as a blob may have, and inflate to far more."""
    bomb = zlib.compress(bytes(50 * BLOB_BYTES_MAX))
    cid = cid_of(b"x", PROTOBUF)
    with BlobStore(path) as store:
        store.put_many({cid: b"x"})
    connection = sqlite3.connect(path)
    connection.execute("UPDATE blobs SET data = ?, size = ?", (bomb, BLOB_BYTES_MAX))
    connection.commit()
    connection.close()
    with BlobStore(path) as store:
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt):
                store.get(cid)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 * BLOB_BYTES_MAX
