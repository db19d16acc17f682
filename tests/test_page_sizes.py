"""Small files get small pages when they are written anew, large ones large pages; nobody who looks is disturbed."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.store import sqlite as sqlite_module
from echostore.store.sqlite import PAGE_BYTES, SMALL_PAGE_BYTES, Database, Schema

SCHEMA = Schema(
    0x45434F70, (("CREATE TABLE rows (no INTEGER PRIMARY KEY, data BLOB)", "CREATE INDEX i ON rows (data)"),)
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "rows.db", SCHEMA)
    yield opened
    opened.close()


def fill(database: Database, count: int) -> None:
    with database.transaction():
        database.execute("DELETE FROM rows")
        database.insert("INSERT INTO rows VALUES (?, ?)", ((number, bytes(100)) for number in range(count)))


def page_bytes(database: Database) -> int:
    row = database.row("PRAGMA page_size")
    assert row is not None
    return int(row[0])


def test_pages_follow_the_size_of_the_file(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module, "SMALL_FILE_BYTES", 64 * 1024)
    fill(database, 50)
    database.shrink()
    assert page_bytes(database) == PAGE_BYTES, "unless asked for"
    before = database.disk_bytes()
    database.shrink(small_pages=True)
    assert page_bytes(database) == SMALL_PAGE_BYTES
    assert database.disk_bytes() < before
    assert database.rows("PRAGMA journal_mode") == [("wal",)]
    assert database.row("PRAGMA wal_autocheckpoint") == (sqlite_module.CHECKPOINT_BYTES // SMALL_PAGE_BYTES,)
    fill(database, 1000)
    database.shrink(small_pages=True)
    assert page_bytes(database) == PAGE_BYTES
    assert database.row("PRAGMA wal_autocheckpoint") == (sqlite_module.CHECKPOINT_BYTES // PAGE_BYTES,)
    assert database.row("SELECT count(*) FROM rows") == (1000,)
    fill(database, 5)
    size = database.disk_bytes()
    database.shrink(small_pages=True)
    assert database.disk_bytes() < size
    database.close()
    again = Database(database.path, SCHEMA)
    assert again.row("SELECT count(*) FROM rows") == (5,)
    again.close()


def test_while_somebody_reads_the_pages_stay_as_they_are(database: Database) -> None:
    fill(database, 50)
    reader = Database(database.path, SCHEMA, writable=False)
    reader.rows("BEGIN")
    assert reader.row("SELECT count(*) FROM rows") == (50,)
    database.shrink(small_pages=True)
    assert page_bytes(database) == PAGE_BYTES
    fill(database, 7)
    assert reader.row("SELECT count(*) FROM rows") == (50,), "it sees what it saw"
    reader.close()
    database.shrink(small_pages=True)
    assert page_bytes(database) == SMALL_PAGE_BYTES
    assert database.row("SELECT count(*) FROM rows") == (7,)


def test_another_program_may_hold_the_file_open(database: Database) -> None:
    fill(database, 50)
    other = sqlite3.connect(database.path)
    assert other.execute("SELECT count(*) FROM rows").fetchone() == (50,)
    database.shrink(small_pages=True)
    fill(database, 8)
    assert other.execute("SELECT count(*) FROM rows").fetchone() == (8,)
    other.close()


def test_rows_too_long_for_small_pages_keep_large_ones(tmp_path: Path) -> None:
    """In a tree by key such a row leaves its page, and takes one of its own."""
    schema = Schema(0x45434F70, (("CREATE TABLE rows (no INTEGER PRIMARY KEY, data BLOB) WITHOUT ROWID",),))
    long = Database(tmp_path / "long.db", schema)
    fill_long = ((number, bytes(250)) for number in range(1000))
    with long.transaction():
        long.insert("INSERT INTO rows VALUES (?, ?)", fill_long)
    long.shrink()
    before = long.disk_bytes()
    for _ in range(2):
        long.shrink(small_pages=True)
        assert long.disk_bytes() <= before
        assert page_bytes(long) == PAGE_BYTES
    assert long.rows("PRAGMA journal_mode") == [("wal",)]
    assert long.row("SELECT count(*), sum(length(data)) FROM rows") == (1000, 250_000)
    long.close()
