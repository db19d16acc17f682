"""A disk in memory for SQLite that can lose power: every write and sync is recorded, and any crash can be replayed.

    disk = Disk(); connect = disk.connect            run the code under test on it
    for crash in crashes(disk.log): Disk.after(...)  the same disk as a power cut could have left it

What a crash may leave of the writes since a file's last sync is chosen by a `Survivors` rule: none, all, some, or
some 512-byte sectors of each. What was synced is always there. A file that was never synced may be missing.
"""

import hashlib
import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

import apsw

SECTOR = 512


@dataclass(frozen=True)
class Write:
    file: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    file: str
    size: int


@dataclass(frozen=True)
class Sync:
    file: str


@dataclass(frozen=True)
class Delete:
    file: str


@dataclass(frozen=True)
class Mark:
    """A note of the test in the log, such as "this much was acknowledged"."""

    value: Any


Event = Write | Truncate | Sync | Delete | Mark


class Survivors(StrEnum):
    """Which unsynced writes a crash leaves."""

    NONE = "none"
    ALL = "all"
    SOME = "some"
    OTHERS = "others"
    LAST = "last"
    TORN = "torn"
    TORN_MORE = "torn more"
    GARBAGE = "garbage"


@dataclass
class Disk:
    """Files by name, the log of what happened to them, and an optional fault: called before each event."""

    files: dict[str, bytearray] = field(default_factory=dict)
    log: list[Event] = field(default_factory=list)
    fault: Callable[[Event], None] | None = None
    _names: Iterator[int] = field(default_factory=lambda: _NUMBERS)

    def __post_init__(self) -> None:
        self.name = f"crash-disk-{next(self._names)}"
        self._vfs = _VFS(self)

    @staticmethod
    def after(log: Iterable[Event], survivors: Survivors, seed: object) -> "Disk":
        """The disk that a power cut after `log` leaves."""
        return Disk.left_by(PowerCut(log), survivors, seed)

    @staticmethod
    def left_by(cut: "PowerCut", survivors: Survivors, seed: object) -> "Disk":
        """The same, of a record that was read once for many seeds."""
        return Disk(files=cut.survivors(survivors, random.Random(repr((survivors, seed)))))

    def fingerprint(self) -> bytes:
        """Equal for disks with equal files: what one of them does, the other does too."""
        told = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            told.update(b"%s %d " % (name.encode(), len(content)))
            told.update(content)
        return told.digest()

    def mark(self, value: Any) -> None:
        self.log.append(Mark(value))

    def record(self, event: Event) -> None:
        if self.fault is not None:
            self.fault(event)
        self.log.append(event)
        apply(self.files, event)

    def connect(self, path: Path, writable: bool) -> "Connection":
        """A `Connect` for `Database`: the same SQL on this disk."""
        return Connection(apsw.Connection(path.name, vfs=self.name))

    def close(self) -> None:
        self._vfs.unregister()


_NUMBERS = count()


def apply(files: dict[str, bytearray], event: Event) -> None:
    match event:
        case Write(file, offset, data):
            content = files.setdefault(file, bytearray())
            if len(content) < offset:
                content.extend(bytes(offset - len(content)))
            content[offset : offset + len(data)] = data
        case Truncate(file, size):
            del files.setdefault(file, bytearray())[size:]
        case Delete(file):
            files.pop(file, None)
        case Sync() | Mark():
            pass


class PowerCut:
    """A record that ends in a power cut: what was synced by then, and the writes that may be lost."""

    def __init__(self, log: Iterable[Event]) -> None:
        events = list(log)
        synced_until = {event.file: number for number, event in enumerate(events) if isinstance(event, Sync | Delete)}
        self._synced: dict[str, bytearray] = {}
        self._unsynced: list[Write | Truncate] = []
        for number, event in enumerate(events):
            if isinstance(event, Write | Truncate) and number > synced_until.get(event.file, -1):
                self._unsynced.append(event)
            else:
                apply(self._synced, event)

    def survivors(self, rule: Survivors, chance: random.Random) -> dict[str, bytearray]:
        """The files that the cut leaves when the rule decides over the unsynced writes."""
        files = {name: bytearray(content) for name, content in self._synced.items()}
        for number, event in enumerate(self._unsynced):
            match rule:
                case Survivors.NONE:
                    keep = False
                case Survivors.ALL:
                    keep = True
                case Survivors.LAST:
                    keep = number == len(self._unsynced) - 1
                case Survivors.SOME | Survivors.OTHERS:
                    keep = chance.random() < 0.5
                case Survivors.TORN | Survivors.TORN_MORE | Survivors.GARBAGE:
                    keep = False
                    if isinstance(event, Truncate):
                        keep = chance.random() < 0.5
                    else:
                        _tear(files, event, chance, garbage=rule is Survivors.GARBAGE)
            if keep:
                apply(files, event)
        return files


def _tear(files: dict[str, bytearray], write: Write, chance: random.Random, *, garbage: bool) -> None:
    """Some sectors of a write reach the disk, the others stay as they were or become garbage."""
    for piece in _sectors(write):
        if chance.random() < 0.6:
            apply(files, piece)
        elif garbage:
            apply(files, Write(piece.file, piece.offset, chance.randbytes(len(piece.data))))


def _sectors(write: Write) -> Iterator[Write]:
    at, end = write.offset, write.offset + len(write.data)
    while at < end:
        until = min(end, (at // SECTOR + 1) * SECTOR)
        yield Write(write.file, at, write.data[at - write.offset : until - write.offset])
        at = until


class _VFS(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        super().__init__(disk.name, base="")

    def xOpen(self, name: Any, flags: list[int]) -> "_File":
        file = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        flags[1] = flags[0]
        self._disk.files.setdefault(file, bytearray())
        return _File(self._disk, file)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        if filename in self._disk.files:
            self._disk.record(Delete(filename))

    def xAccess(self, pathname: str, flags: int) -> bool:
        return pathname in self._disk.files

    def xFullPathname(self, name: str) -> str:
        return name


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str) -> None:
        self._disk, self._name = disk, name

    def _content(self) -> bytearray:
        return self._disk.files.get(self._name, bytearray())

    def xRead(self, amount: int, offset: int) -> bytes:
        return bytes(self._content()[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.record(Write(self._name, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        self._disk.record(Truncate(self._name, newsize))

    def xSync(self, flags: int) -> None:
        self._disk.record(Sync(self._name))

    def xFileSize(self) -> int:
        return len(self._content())

    def xClose(self) -> None:
        pass

    def xLock(self, level: int) -> None:
        pass

    def xUnlock(self, level: int) -> None:
        pass

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, ptr: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return SECTOR

    def xDeviceCharacteristics(self) -> int:
        return 0


_CODES = {apsw.FullError: sqlite3.SQLITE_FULL, apsw.IOError: sqlite3.SQLITE_IOERR}


class Connection:
    """An apsw connection with the face of a sqlite3 one, errors included."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        # Exclusive locking keeps the index of the log in memory; a disk in Python has no shared memory.
        self.execute("PRAGMA locking_mode = EXCLUSIVE")

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Any = (), /) -> "Cursor":
        return self._translated(lambda: Cursor(self._connection.execute(sql, tuple(parameters)).fetchall()))

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> "Cursor":
        return self._translated(lambda: Cursor(self._connection.executemany(sql, parameters).fetchall()))

    def close(self) -> None:
        self._translated(lambda: Cursor(self._connection.close() or []))

    def _translated(self, work: Callable[[], "Cursor"]) -> "Cursor":
        try:
            return work()
        except apsw.Error as error:
            translated = sqlite3.OperationalError(str(error))
            # An error that the disk raised on purpose has no code of its own.
            translated.sqlite_errorcode = getattr(error, "extendedresult", _CODES.get(type(error), 0))
            raise translated from error


class Cursor:
    """Rows that were all fetched."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = iter(rows)

    def __iter__(self) -> Iterator[Any]:
        return self._rows

    def fetchone(self) -> Any:
        return next(self._rows, None)

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    def close(self) -> None:
        pass
