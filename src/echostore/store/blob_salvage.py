"""A blobs.db that SQLite can't read any more, or not all of: what is sound of it goes into a new file.

    blobs.db ──► blobs.db.new     what can be read, blob by blob, each checked against its CID
    blobs.db ──► blobs.db.aside   the damaged file stays: people's files may be in it that nobody else has
    blobs.db.new ──► blobs.db

A crash before the second step leaves the damaged file as it was, one after it leaves the new one to be put in place. What is
lost of the base of a party comes from other members; of people's files, whoever has them.
"""

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from echostore.kernel.errors import Corrupt, EchoError
from echostore.kernel.ids import Cid
from echostore.store.blob_store import BlobStore, sound_blob
from echostore.store.sqlite import Connection, connect_file
from echostore.wire.cids import is_cid

_log = logging.getLogger("echostore")

_FRESH, _ASIDE = ".new", ".aside"
_LOGS = ("-wal", "-shm")

_PUT_BLOBS = 256
"""Blobs of one transaction."""


def open_blobs(path: Path) -> BlobStore:
    """The blobs of a party, to write to; of a file that is no database, what can be saved of it."""
    _finish(path)
    try:
        return BlobStore(path)
    except Corrupt as error:
        _log.warning("%s What can be read of it goes into a new file; it stays as %s.", error.what, path.name + _ASIDE)
        renew(path)
        return BlobStore(path)


def renew(path: Path) -> int:
    """Put a damaged file aside, and a new one with all that can be read in its place; how many blobs that is."""
    fresh, saved = _beside(path, _FRESH), 0
    _remove(fresh)
    with BlobStore(fresh) as store:
        batch: dict[Cid, bytes] = {}
        for cid, data in _readable(path):
            batch[cid] = data
            if len(batch) >= _PUT_BLOBS:
                saved, batch = saved + store.put_many(batch, checked=True), {}
        saved += store.put_many(batch, checked=True)
        store.shrink()  # everything in one file, nothing in the log
    for suffix in ("", *_LOGS):
        source = _beside(path, suffix)
        if source.exists():
            source.replace(_beside(path, _ASIDE + suffix))
    _finish(path)
    return saved


def _finish(path: Path) -> None:
    """Where the old file is gone, the new one takes its place; a log without its file would be read into the next one."""
    fresh = _beside(path, _FRESH)
    if path.exists():
        _remove(fresh)
        return
    for suffix in _LOGS:
        _beside(path, suffix).unlink(missing_ok=True)
    if fresh.exists():
        fresh.replace(path)


def _readable(path: Path) -> Iterator[tuple[Cid, bytes]]:
    """Blobs that are what their CIDs say; pages of the file that can't be read are stepped over."""
    try:
        connection = connect_file(path, False)
    except (sqlite3.Error, EchoError, OSError):
        return
    try:
        for number in range(1, _last_number(connection) + 1):
            try:
                row = connection.execute("SELECT cid, data, size FROM blobs WHERE no = ?", (number,)).fetchone()
            except (sqlite3.Error, UnicodeDecodeError):
                continue
            if row is not None and isinstance(row[0], bytes) and is_cid(row[0]):
                data = sound_blob(Cid(row[0]), row[1], row[2])
                if data is not None:
                    yield Cid(row[0]), data
    finally:
        connection.close()


def _last_number(connection: Connection) -> int:
    """The number of the last blob, by the table or else by its index; 0 when neither can be read."""
    found = 0
    for order in ("no", "cid"):
        try:
            rows = connection.execute(f"SELECT no FROM blobs ORDER BY {order} DESC")
            for (number,) in rows:
                found = max(found, number if isinstance(number, int) else 0)
                if order == "no":
                    return found
        except (sqlite3.Error, UnicodeDecodeError):
            continue
    return found


def _remove(path: Path) -> None:
    for suffix in ("", *_LOGS):
        _beside(path, suffix).unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
