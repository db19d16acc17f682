"""SQLite as the stores use it: how a file is opened, what a transaction is, and what its errors mean.

`Database` wraps one connection with explicit transactions. Stores share it; it knows no table but those it is given.

Errors:
    no space, quota used up  `DiskFull`; nothing was written, the next transaction may try again. SQLite names some of these
                             I/O errors (it could not extend the log's index); then the folder is asked for space
    I/O error, failed fsync  `StorageFailed`; the database takes no more writes until it is opened again. After a
                             failed fsync nobody knows which pages reached the disk, so it is never asked twice
    read-only                `StorageFailed`, reads go on
    malformed, not a database `Corrupt`
    busy                     `Locked`

A reader in another process opens the same file with `writable=False` and sees committed transactions only.

A transaction that need not be durable yet is in the log, in its order, and survives the end of the process; `sync`, or
the next transaction that is durable, makes it survive the end of the machine as well.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from echostore.kernel.errors import (
    Closed,
    Corrupt,
    DamagedHere,
    DiskFull,
    EchoError,
    Locked,
    NotFound,
    Refused,
    StorageFailed,
)
from echostore.store.durable_file import PRIVATE_FILE, file_error, lacks_space

BUSY_TIMEOUT_MS = 2000
"""Only a reader that recovers the log, or a tool that someone left open, makes us wait."""

CACHE_KIB = 4096
"""Per open file. A peer may have hundreds of parties open; the operating system caches the rest."""

CHECKPOINT_BYTES = 4000 * 4096
"""16 MiB of log between checkpoints: a third more appends per second than SQLite's 4 MiB."""

PAGE_BYTES = 4096
SMALL_PAGE_BYTES = 1024
SMALL_FILE_BYTES = 1024 * 1024
"""A file of many tables has a page for each, also for those that are empty. Where that is much of the file, small pages
make it smaller by a third; in larger files large pages read faster."""

LOG_BYTES_KEPT = 16 * 1024 * 1024

_MAY_LACK_SPACE = frozenset(
    {
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMOPEN,
        sqlite3.SQLITE_IOERR_SHMMAP,
    }
)
"""I/O errors that a full disk or a quota can cause. A failed fsync is never one of them: what it left on disk is unknown."""

Parameters = Sequence[object]
Row = tuple[Any, ...]


class Connection(Protocol):
    """What is asked of a connection. `sqlite3` has it; the crash tests hand in `apsw` behind the same face."""

    @property
    def in_transaction(self) -> bool: ...
    def execute(self, sql: str, parameters: Any = ..., /) -> Any: ...
    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Any: ...
    def close(self) -> None: ...


Connect = Callable[[Path, bool], Connection]
"""(path, writable) -> an open connection in autocommit mode. Errors are those of `sqlite3`."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one kind of file. `steps[n]` takes version n to n + 1; a new file runs them all."""

    application_id: int
    steps: tuple[tuple[str, ...], ...]
    readers_from: int | None = None
    """The oldest version that a reader takes as it is; the present one unless said."""

    @property
    def version(self) -> int:
        return len(self.steps)


def connect_file(path: Path, writable: bool) -> Connection:
    """A connection to a file on disk; the normal `Connect`."""
    if writable:
        # Made here first, so that it is private from its first byte; SQLite gives the log the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE))
    elif path.is_symlink() or not path.is_file():
        raise NotFound(f"There is no {path}.")
    elif path.with_name(path.name + "-journal").exists():
        _roll_back(path)
    mode = "rw" if writable else "ro&immutable=1" if never_changes(path) else "ro"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,
        check_same_thread=False,
    )
    # Damage can turn any column into text that is no UTF-8. It must arrive as a value of the wrong type, which the
    # stores notice and place, and not as an error that hides the row.
    connection.text_factory = _lenient_text
    return connection


def _roll_back(path: Path) -> None:
    """Undo what a writer left behind that was killed while it wrote the whole file anew: a mere reader may not.

    SQLite does so when it reads the file, unless the writer lives. Where it can't, the opening that follows says why.
    """
    if not os.access(path, os.W_OK):
        return
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)) as writer, suppress(sqlite3.Error):
        writer.execute("SELECT count(*) FROM sqlite_schema").fetchone()


def connect_memory(path: Path, writable: bool) -> Connection:
    """A connection to nothing on disk: what is put into it is gone when it is closed."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def never_changes(path: Path) -> bool:
    """Whether a reader may take the file for fixed: nobody has it open, and its folder can't be written from here.

    A reader of a file with a write-ahead log needs the index of that log (-shm) and makes it if it is missing, which
    it can't on read-only media. Without a log there is nothing to index. A log that is there has to be read, and a -shm
    that is there belongs to a writer, or is left from one that crashed: then SQLite goes its normal way.
    """
    if os.access(path.parent, os.W_OK):
        return False
    log, index = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    return _size(log) == 0 and not index.exists()


class Database:
    """One SQLite file. Calls from several threads are taken one at a time; a transaction belongs to one thread."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        *,
        writable: bool = True,
        connect: Connect = connect_file,
        cache_kib: int = CACHE_KIB,
    ) -> None:
        self.path = path
        self.writable = writable
        self.failure: str | None = None
        """Why no more writes are taken, once that is so."""
        self.version = schema.version
        """Of the tables; a reader may have an older one."""
        self.on_corrupt: Callable[[Corrupt], Corrupt] = lambda found: found
        """What an owner has to say about damage that SQLite finds once the file is open."""
        self._lock = threading.RLock()
        self._unsynced = False
        self._durable = True
        self._connection: Connection | None = None
        try:
            self._connection = connect(path, writable)
            self._prepare(schema, cache_kib)
        except EchoError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise file_error(error, f"open {path}") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self.close()
            raise self._typed(error) from error
        except BaseException:
            self.close()
            raise

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All of it durable when the block ends, or none of it. May be nested; the outermost one counts.

        With `durable=False` it is in the log when the block ends, and durable after `sync`.
        """
        with self._lock:
            connection = self._writer()
            if connection.in_transaction:
                yield
                return
            try:
                self._sync_at_commit(connection, durable)
                before = _changes(connection) if durable and self._unsynced else None
                connection.execute("BEGIN IMMEDIATE")
                yield
                connection.execute("COMMIT")
                # A commit that changes nothing writes and syncs nothing, also not what others left in the log.
                self._unsynced = not durable or (before is not None and _changes(connection) == before)
            except BaseException as error:
                self._roll_back(connection)
                if isinstance(error, sqlite3.Error | UnicodeDecodeError):
                    raise self._typed(error) from error
                raise

    @property
    def unsynced(self) -> bool:
        """Whether something is in the log that the end of the machine would take."""
        return self._unsynced

    def execute(self, sql: str, parameters: Parameters = ()) -> None:
        """Run one writing statement inside a transaction."""
        self._run(lambda connection: connection.execute(sql, parameters))

    def insert(self, sql: str, rows: Iterable[Parameters]) -> None:
        """Run one writing statement for many rows, inside a transaction."""
        self._run(lambda connection: connection.executemany(sql, rows))

    def row(self, sql: str, parameters: Parameters = ()) -> Row | None:
        """The first row, if any."""
        found: Row | None = self._run(lambda connection: connection.execute(sql, parameters).fetchone())
        return found

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """All rows. For results that are bounded by nature or by a LIMIT."""
        found: list[Row] = self._run(lambda connection: connection.execute(sql, parameters).fetchall())
        return found

    def rows_until(
        self, sql: str, parameters: Parameters, *, size_of: Callable[[Row], int], bytes_max: int
    ) -> list[Row]:
        """Rows until their sizes reach `bytes_max`, at least one: a chunk of bounded memory."""

        def fetch(connection: Connection) -> list[Row]:
            cursor, taken, size = connection.execute(sql, parameters), [], 0
            for row in cursor:
                taken.append(row)
                size += size_of(row)
                if size >= bytes_max:
                    break
            cursor.close()
            return taken

        found: list[Row] = self._run(fetch)
        return found

    def disk_bytes(self) -> int:
        """What the file and its log take on disk."""
        return sum(_size(self.path.with_name(self.path.name + suffix)) for suffix in ("", "-wal"))

    def checkpoint(self) -> None:
        """Move the log into the file and empty it, as far as readers allow."""
        with self._lock:
            self._writer()
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def shrink(self, *, small_pages: bool = False) -> None:
        """Give free pages back to the disk: the file is written anew, all of it or not at all.

        With `small_pages` a small file gets small pages, and one that has grown large ones.
        """
        with self._lock:
            self._sync_at_commit(self._writer(), True)
            if not (small_pages and self._repaged()):
                self.rows("VACUUM")
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def _repaged(self) -> bool:
        """Write the file anew with pages of the size that suits it; False when it has them, or others have it open."""
        size, pages, free = (self._pragma(name) for name in ("page_size", "page_count", "freelist_count"))
        wanted = SMALL_PAGE_BYTES if (pages - free) * size <= SMALL_FILE_BYTES else PAGE_BYTES
        if wanted == size:
            return False
        # SQLite changes the size of pages only without a log, and gives that up only where nobody else looks at it.
        self.rows("PRAGMA busy_timeout = 0")
        try:
            if self.rows("PRAGMA journal_mode = DELETE") != [("delete",)]:
                return False
            self._write_anew(wanted)
            if wanted == SMALL_PAGE_BYTES and self._pragma("page_count") * wanted > (pages - free) * size:
                self._write_anew(size)  # rows too long for a small page take whole pages of their own
            return True
        except Locked:
            return False
        finally:
            self.rows(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            self._keep_log()

    def _write_anew(self, page_bytes: int) -> None:
        self.rows(f"PRAGMA page_size = {page_bytes}")
        self.rows("VACUUM")

    def _keep_log(self) -> None:
        """Writers append to a log; it goes into the file by and by."""
        self.rows("PRAGMA journal_mode = WAL")
        self.rows(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // self._pragma('page_size')}")
        self.rows(f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}")

    def _pragma(self, name: str) -> int:
        row = self.row(f"PRAGMA {name}")
        assert row is not None, f"PRAGMA {name} has a value"
        return int(row[0])

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _prepare(self, schema: Schema, cache_kib: int) -> None:
        connection = self._open()
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_MS}",
            f"cache_size = -{cache_kib}",
            "temp_store = MEMORY",
            # Both turn a damaged or hostile file into an error instead of a surprise.
            "trusted_schema = OFF",
            "cell_size_check = ON",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        found_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        if not (empty and found_id == 0 and version == 0) and found_id != schema.application_id:
            raise Corrupt(f"{self.path} is not the kind of file its name says.", next_step="Restore or remove it.")
        if version > schema.version or version < 0:
            raise Refused(
                f"{self.path} has format {version}; this echostore knows formats up to {schema.version}.",
                next_step="Open it with the newer echostore that wrote it.",
            )
        if version < (schema.readers_from or schema.version) and not self.writable:
            raise Refused(
                f"{self.path} has the older format {version}.",
                next_step="Open it once for writing to bring it up to date.",
            )
        if version == schema.version:
            found = set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall())
            if not schema_rows(schema) <= found:
                # One flipped bit in the text of a table can turn its rows into others.
                raise DamagedHere(
                    f"The tables of {self.path} are not what they were.", next_step="Run `echostore doctor`."
                )
        if self.writable:
            self._keep_log()
            connection.execute("PRAGMA synchronous = FULL").fetchall()
            if version < schema.version:
                self._upgrade(schema, version)
        else:
            self.version = version

    def _upgrade(self, schema: Schema, version: int) -> None:
        """One transaction: a crash leaves the old format or the new one."""
        with self.transaction():
            for step in schema.steps[version:]:
                for statement in step:
                    self.execute(statement)
            self.execute(f"PRAGMA application_id = {schema.application_id}")
            self.execute(f"PRAGMA user_version = {schema.version}")

    def _run(self, work: Callable[[Connection], Any]) -> Any:
        with self._lock:
            connection = self._open()
            try:
                return work(connection)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if connection.in_transaction and self.writable:
                    raise  # `transaction` rolls back first, then gives it a type.
                raise self._typed(error) from error

    def _open(self) -> Connection:
        if self._connection is None:
            raise Closed(f"{self.path} has been closed.")
        return self._connection

    def _writer(self) -> Connection:
        connection = self._open()
        if not self.writable:
            raise Refused(f"{self.path} was opened read-only.")
        if self.failure is not None:
            raise StorageFailed(
                f"{self.path} takes no writes since: {self.failure}.",
                next_step="Repair the disk, then open the store again; reading goes on.",
            )
        return connection

    def _sync_at_commit(self, connection: Connection, durable: bool) -> None:
        """Whether the next commit syncs the log. Set before it begins, and only when the last one was of the other kind."""
        if self._durable is not durable:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}").fetchall()
            self._durable = durable

    def _roll_back(self, connection: Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self.failure = f"could not roll back: {error}"

    def _typed(self, error: sqlite3.Error | UnicodeDecodeError) -> EchoError:
        if isinstance(error, UnicodeDecodeError):
            # The text of an error quotes the schema, and that is damaged.
            text = f"{self.path} is damaged: its schema is not readable."
            return self.on_corrupt(DamagedHere(text, next_step="Run `echostore doctor`."))
        typed = sqlite_error(error, self.path)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM) and not isinstance(typed, DiskFull):
            self.failure = str(error)
        return self.on_corrupt(typed) if isinstance(typed, Corrupt) else typed


@cache
def schema_rows(schema: Schema) -> frozenset[Row]:
    """What SQLite itself writes down for the tables and indexes of a schema."""
    connection = sqlite3.connect(":memory:")
    try:
        for step in schema.steps:
            for statement in step:
                connection.execute(statement)
        return frozenset(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall())
    finally:
        connection.close()


def sqlite_error(error: sqlite3.Error, path: Path) -> EchoError:
    """The typed error for what SQLite said about `path`."""
    extended = getattr(error, "sqlite_errorcode", 0)
    match extended & 0xFF:
        case sqlite3.SQLITE_FULL:
            return DiskFull(f"No space left to write {path}.", next_step="Free space and try again.")
        case sqlite3.SQLITE_IOERR if extended == sqlite3.SQLITE_IOERR_SHMSIZE or (
            extended in _MAY_LACK_SPACE and lacks_space(path.parent, _largest(path))
        ):
            return DiskFull(f"No space left to write {path}.", next_step="Free space and try again.")
        case sqlite3.SQLITE_CANTOPEN if _size(path.with_name(path.name + "-wal")) and not os.access(
            path.parent, os.W_OK
        ):
            return StorageFailed(
                f"{path} was not closed by its last writer, and its folder can't be written to finish that.",
                next_step="Copy the home to a folder that can be written, and open the copy.",
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            return StorageFailed(f"{path} can't be opened or written: {error}.", next_step="Check its owner and mode.")
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_NOMEM:
            return StorageFailed(
                f"Reading or writing {path} failed: {error}.",
                unchanged="What was acknowledged before is kept; no more is written.",
                next_step="Repair the disk, then open the store again.",
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return DamagedHere(f"{path} is damaged: {error}.", next_step="Run `echostore doctor`.")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Locked(f"{path} is busy in another process.", next_step="Close it there and try again.")
        case _:
            return StorageFailed(f"SQLite refused a statement on {path}: {error}.")


def _changes(connection: Connection) -> int:
    """Rows that were changed since the connection was opened."""
    found: int = connection.execute("SELECT total_changes()").fetchone()[0]
    return found


def _lenient_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _largest(path: Path) -> int:
    """The size of the larger one of the file and its log."""
    return max(_size(path), _size(path.with_name(path.name + "-wal")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
