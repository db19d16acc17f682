"""BlobStore: content-addressed bytes of one party: pages of snapshot trees, large values.

A blob enters only if it is what its CID says, and leaves only if it still is. Order of arrival, duplicates and who
sent it do not matter. The store knows nothing of trees: who still needs a blob is the caller's question.

`pack` compresses nodes of trees where they lie: pages repeat themselves, and what is kept for long is read seldom. A blob
is named, sent and counted by its plain bytes.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from echostore.kernel.errors import Corrupt, DamagedHere, NotFound, Refused, TooLarge
from echostore.kernel.ids import Cid
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.store.sqlite import Connect, Database, Row, Schema, connect_file
from echostore.wire.cids import PROTOBUF, RAW, cid_of, cid_text, is_cid, matches

LIST_ROWS = 1000
LOOKUP_ROWS = 500
"""Blobs that one statement looks for: pages of snapshots come and go by the thousand."""

PACK_BYTES = 4 * 1024 * 1024
"""Blobs that one transaction compresses: a writer waits for a tenth of a second."""

_PACKED_SINCE = 2
"""The version of the tables since which blobs may be packed."""

SCHEMA = Schema(
    application_id=0x45434F62,
    readers_from=1,
    steps=(
        (
            # A table with row numbers and an index: blobs are large, and a tree keyed by CID would carry them inside.
            "CREATE TABLE blobs (no INTEGER PRIMARY KEY, cid BLOB NOT NULL UNIQUE, data BLOB NOT NULL)",
        ),
        # `size` is NULL for a blob that was not looked at, else its plain length; packed data are shorter than that.
        ("ALTER TABLE blobs ADD COLUMN size INTEGER",),
    ),
)


@dataclass(frozen=True, slots=True)
class BlobVerdict:
    """What a check of all blobs found."""

    blobs: int
    data_bytes: int
    damaged: tuple[Cid, ...]

    @property
    def sound(self) -> bool:
        return not self.damaged


class BlobStore:
    """All blobs of one party in one SQLite file."""

    def __init__(self, path: Path, *, writable: bool = True, connect: Connect = connect_file) -> None:
        self._connect, self._writable = connect, writable
        self.broken = False
        """Whether SQLite found the file itself damaged, beyond single blobs."""
        self.on_broken: Callable[[], None] = lambda: None
        self._db = self._opened(path)
        self._size = "size" if self._db.version >= _PACKED_SINCE else "NULL"

    def _opened(self, path: Path) -> Database:
        found = Database(path, SCHEMA, writable=self._writable, connect=self._connect)
        found.on_corrupt, self.broken = self._noted, False
        return found

    def _noted(self, damage: Corrupt) -> Corrupt:
        if not self.broken:
            self.broken = True
            self.on_broken()
        return damage

    def renew(self) -> int:
        """Go on with a new file, where SQLite can't read all of the old one any more; how many blobs it has."""
        from echostore.store.blob_salvage import renew

        path = self._db.path
        self._db.close()
        saved = renew(path)
        self._db = self._opened(path)
        return saved

    def put(self, data: bytes, codec: int = RAW) -> Cid:
        """Store `data` and return its CID; durable on return."""
        cid = cid_of(data, codec)
        self.put_many({cid: data})
        return cid

    def put_many(self, blobs: Mapping[Cid, bytes], *, checked: bool = False) -> int:
        """Store blobs under the CIDs they came with, in one durable commit; returns how many were new.

        All or none: one that does not match its CID refuses the lot before anything is written, because the caller
        checks blobs from others one by one (`matches`) to know whom to blame. Who has just done that says `checked`.
        """
        for cid, data in blobs.items():
            if len(data) > BLOB_BYTES_MAX:
                raise TooLarge(f"A blob of {len(data)} bytes; at most {BLOB_BYTES_MAX} are allowed.")
            if not checked and not matches(cid, data):
                raise Refused(f"The bytes for {_named(cid)} are not what that content id names.")
        with self._db.transaction():
            before = self._changes()
            # In the order of CIDs: the index is then walked once, from left to right. Many rows by one statement: each
            # statement that runs lets other threads in, and waits for them.
            ordered = sorted(blobs)
            for some in _batches(ordered):
                rows = ",".join(["(?, ?)"] * len(some))
                values = [value for cid in some for value in (cid, blobs[cid])]
                self._db.execute(f"INSERT OR IGNORE INTO blobs (cid, data) VALUES {rows}", values)
            return self._changes() - before

    def get(self, cid: Cid, *, check: bool = True) -> bytes:
        """The blob; NotFound when it is not here, DamagedHere when `check` finds that it is not what it was."""
        row = self._db.row(f"SELECT data, {self._size} FROM blobs WHERE cid = ?", (cid,))
        if row is None:
            raise NotFound(f"The blob {_named(cid)} is not here.")
        data = _plain(*row)
        if check and (data is None or not matches(cid, data)):
            data = _packed_in_vain(cid, *row)
        if data is None:
            raise DamagedHere(
                f"The blob {_named(cid)} in {self._db.path} is damaged.", next_step="Delete it; it is fetched again."
            )
        return data

    def has(self, cid: Cid) -> bool:
        return self._db.row("SELECT 1 FROM blobs WHERE cid = ?", (cid,)) is not None

    def missing(self, cids: Iterable[Cid]) -> list[Cid]:
        """Those that are not here, in the order given: what to ask other peers for."""
        asked = list(cids)
        here: set[bytes] = set()
        for some in _batches(asked):
            here.update(row[0] for row in self._db.rows(f"SELECT cid FROM blobs WHERE cid IN ({_marks(some)})", some))
        return [cid for cid in asked if cid not in here]

    def get_some(self, cids: Iterable[Cid], bytes_max: int) -> dict[Cid, bytes]:
        """Of these blobs the ones that are here and sound, until they have `bytes_max` bytes together."""
        found: dict[Cid, bytes] = {}
        room = bytes_max
        for some in _batches(list(cids)):
            while some and room > 0:
                rows = self._db.rows_until(
                    f"SELECT cid, data, {self._size} FROM blobs WHERE cid IN ({_marks(some)})",
                    some,
                    size_of=_row_bytes,
                    bytes_max=room,
                )
                plain = ((cid, sound_blob(cid, data, size)) for cid, data, size in rows)
                sound = {cid: data for cid, data in plain if data is not None}
                found |= sound
                cut_short = sum(map(_row_bytes, rows)) >= room
                room -= sum(map(len, sound.values()))
                seen = {row[0] for row in rows}
                # Damaged ones take no room: those behind them are looked for once more.
                some = [cid for cid in some if cid not in seen] if cut_short else []
        return found

    def drop_damaged(self, cids: Iterable[Cid]) -> int:
        """Remove those of these blobs that are not what their CIDs name, so that they can come again; how many were."""
        here = list(dict.fromkeys(cids))
        absent = set(self.missing(here))
        here = [cid for cid in here if cid not in absent]
        while here and (sound := self.get_some(here, 4 * BLOB_BYTES_MAX)):
            here = [cid for cid in here if cid not in sound]
        return self.delete(here) if here else 0

    def delete(self, cids: Iterable[Cid]) -> int:
        """Remove blobs in one commit; returns how many were here. The file keeps the space for later blobs."""
        with self._db.transaction():
            present = [(cid,) for cid in dict.fromkeys(cids) if self.has(cid)]
            self._db.insert("DELETE FROM blobs WHERE cid = ?", present)
        return len(present)

    def list(self) -> Iterator[tuple[Cid, int]]:
        """Every blob's CID and size, in the order of CIDs, read in pages."""
        after = b""
        while rows := self._db.rows(
            f"SELECT cid, coalesce({self._size}, length(data)) FROM blobs WHERE cid > ? ORDER BY cid LIMIT ?",
            (after, LIST_ROWS),
        ):
            yield from ((Cid(cid), size) for cid, size in rows)
            after = rows[-1][0]

    def _changes(self) -> int:
        row = self._db.row("SELECT total_changes()")
        assert row is not None
        return int(row[0])

    def verify(self, progress: Callable[[int, int], None] | None = None) -> BlobVerdict:
        """Hash every blob again."""
        found = self._db.row("SELECT count(*) FROM blobs")
        total, at, count, size = (found[0] if found else 0), 0, 0, 0
        damaged: list[Cid] = []
        while rows := self._db.rows_until(
            f"SELECT no, cid, data, {self._size} FROM blobs WHERE no > ? ORDER BY no",
            (at,),
            size_of=lambda row: _row_bytes(row[1:]),
            bytes_max=4 * BLOB_BYTES_MAX,
        ):
            for _, cid, stored, length in rows:
                data = _plain(stored, length)
                whole = sound_blob(Cid(cid), stored, length) if isinstance(cid, bytes) else None
                sound = whole is not None and self.has(Cid(cid))
                if not sound:
                    damaged.append(Cid(cid if isinstance(cid, bytes) else b""))
                count, size = count + 1, size + (len(data) if data is not None else 0)
            at = rows[-1][0]
            if progress is not None:
                progress(count, total)
        return BlobVerdict(count, size, tuple(damaged))

    def data_bytes(self) -> int:
        """The size of all blobs together."""
        row = self._db.row(f"SELECT sum(coalesce({self._size}, length(data))) FROM blobs")
        return int(row[0] or 0) if row else 0

    def pack(self) -> None:
        """Compress the nodes of trees that are not yet, in small transactions. Damaged ones stay as they are."""
        at = 0
        while rows := self._db.rows_until(
            "SELECT no, cid, data FROM blobs WHERE no > ? AND size IS NULL AND cid >= ? AND cid < ? ORDER BY no",
            (at, bytes((1, PROTOBUF)), bytes((1, PROTOBUF + 1))),
            size_of=lambda row: _row_bytes(row[1:]),
            bytes_max=PACK_BYTES,
        ):
            sound = [(no, data) for no, cid, data in rows if isinstance(data, bytes) and matches(cid, data)]
            with self._db.transaction():
                self._db.insert(
                    "UPDATE blobs SET data = ?, size = ? WHERE no = ?",
                    # As it is where packing gains nothing: equal lengths say that it is not packed.
                    ((min(data, zlib.compress(data), key=len), len(data), no) for no, data in sound),
                )
            at = rows[-1][0]

    def shrink(self) -> None:
        """Give the space of deleted blobs back to the disk."""
        self._db.shrink(small_pages=True)

    def disk_bytes(self) -> int:
        return self._db.disk_bytes()

    @property
    def failure(self) -> str | None:
        """Why the store takes no more writes, once that is so."""
        return self._db.failure

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _batches(cids: list[Cid]) -> Iterator[list[Cid]]:
    return (cids[start : start + LOOKUP_ROWS] for start in range(0, len(cids), LOOKUP_ROWS))


def _row_bytes(row: Row) -> int:
    """What a row (cid, data, size or nothing) takes in memory, at least 1."""
    size = row[2] if len(row) > 2 else None
    if isinstance(size, int):
        return max(1, size)
    return len(row[1]) if isinstance(row[1], bytes) else 1


def sound_blob(cid: Cid, data: object, size: object) -> bytes | None:
    """The blob of a row, where it is what its CID names."""
    plain = _plain(data, size)
    return plain if plain is not None and matches(cid, plain) else _packed_in_vain(cid, data, size)


def _packed_in_vain(cid: Cid, data: object, size: object) -> bytes | None:
    """A blob that is as long packed as it was before: such rows were once written, and look as if they were not packed."""
    if not isinstance(data, bytes) or size != len(data):
        return None
    plain = _inflated(data, len(data))
    return plain if plain is not None and matches(cid, plain) else None


def _plain(data: object, size: object) -> bytes | None:
    """The blob of a row, also where it is packed; None for what nobody wrote. Never more than a blob may have."""
    if not isinstance(data, bytes) or size is None or size == len(data):
        return data if isinstance(data, bytes) else None
    if not isinstance(size, int) or not len(data) < size <= BLOB_BYTES_MAX:
        return None
    return _inflated(data, size)


def _inflated(data: bytes, size: int) -> bytes | None:
    try:
        found = zlib.decompressobj().decompress(data, size)
    except zlib.error:
        return None
    return found if len(found) == size else None


def _marks(cids: list[Cid]) -> str:
    return ",".join("?" * len(cids))


def _named(cid: Cid) -> str:
    """A CID for a message, also when it is none."""
    return cid_text(cid) if is_cid(cid) else f"{cid[:40].hex()} (not a content id)"
