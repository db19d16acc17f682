"""Check values of derived rows: what makes a flipped bit or a lost row an error, and not an answer.

    seal    a CRC of a row's other columns, kept in the row; compared whenever the row is read
    tally   of each group of rows that are read together (the items of one type, below one parent, ...): how many they
            are and the sum of their check values; compared whenever the group is read

Both are for accidents. Against somebody who edits the file there is nothing to be had here: the feeds are signed, and
whatever is derived from them can be made again.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any
from zlib import crc32

import msgspec

from echostore.store.sqlite import Database, Row

TALLIES_TABLE = """CREATE TABLE tallies (
    kind INTEGER, key BLOB, count INTEGER NOT NULL, total INTEGER NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"""

TOTAL_MASK = (1 << 62) - 1
"""Sums are kept modulo 2^62, so that adding two of them stays inside SQLite's integers."""

_TEXT = b"\xc1"
"""No value of msgpack begins so."""

_encode = msgspec.msgpack.Encoder().encode


class Group(IntEnum):
    """What a tally counts; its key is in brackets. The numbers are stored."""

    ALL = 0
    """Every item []."""
    TYPE = 1
    PARENT = 2
    ORIGIN = 3
    SOURCE = 4
    TARGET = 5
    VIEWS = 6
    """Items with an inception key []."""
    MODEL = 7
    """Items of a model [encoded name and version]."""
    REFERRERS = 8
    REFERENCES = 9
    PROPERTY = 10
    """Items with an indexed property [encoded name, encoded value]."""
    TOUCHES = 11
    DIRTY = 12
    CURSORS = 13
    ABOUT = 14
    MOVES = 15
    REJECTS = 16
    FEEDS = 17
    PLACEMENTS = 18
    """Placements that changed since the last snapshot []."""


def seal_of(columns: Sequence[Any]) -> int:
    """The check value of a row."""
    return crc32(_encode(columns))


def is_sealed(row: Row) -> bool:
    """Whether a row is what was written; its last column is the seal."""
    try:
        return bool(crc32(_encode(row[:-1])) == row[-1])
    except UnicodeEncodeError:  # damage turned a column into text that is none
        return False


def sum_of(rows: Iterable[Sequence[Any]]) -> int:
    """The check value of a table that is read whole; -1 when it holds what nobody wrote."""
    try:
        return sum(crc32(_encode(row)) for row in rows) & TOTAL_MASK
    except UnicodeEncodeError:
        return -1


class Tally:
    """Counts the members of groups, then adds that to what the file has: inside the transaction that changes them."""

    def __init__(self) -> None:
        self.changes: dict[tuple[int, bytes], list[int]] = {}

    def add(self, group: Group, key: bytes, value: int, count: int = 1) -> None:
        """`count` members more with check values that sum up to `value`; both may be negative."""
        place = (group.value, key)  # an enum's own hash is slow
        change = self.changes.get(place)
        if change is None:
            self.changes[place] = [count, value]
        else:
            change[0] += count
            change[1] += value

    def save(self, database: Database) -> None:
        rows = [
            (kind, key, count, total & TOTAL_MASK)
            for (kind, key), (count, total) in self.changes.items()
            if count or total
        ]
        database.insert(
            f"""INSERT INTO tallies VALUES (?,?,?,?) ON CONFLICT (kind, key)
                DO UPDATE SET count = count + excluded.count, total = (total + excluded.total) & {TOTAL_MASK}""",
            rows,
        )
        shrunk = [(kind, key) for kind, key, count, _ in rows if count < 0]
        if shrunk:
            database.insert("DELETE FROM tallies WHERE kind = ? AND key = ? AND count = 0 AND total = 0", shrunk)


def set_tally(database: Database, group: Group, key: bytes, count: int, total: int) -> None:
    """Say what a group holds that was counted anew."""
    database.execute("INSERT OR REPLACE INTO tallies VALUES (?,?,?,?)", (group, key, count, total & TOTAL_MASK))


def tally_of(database: Database, group: Group, key: bytes = b"") -> tuple[int, int]:
    """(count, total) that a group should have."""
    row = database.row("SELECT count, total FROM tallies WHERE kind = ? AND key = ?", (group, key))
    return (0, 0) if row is None else (row[0], row[1])


def tallied(database: Database, group: Group, key: bytes, count: int, total: int) -> bool:
    """Whether a group that was read is whole."""
    return tally_of(database, group, key) == (count, total & TOTAL_MASK)


def property_key(name: str, value: object) -> bytes:
    """The key of the items with a property. SQLite holds 1 and 1.0 for equal, so they share a group."""
    if type(value) is float and value.is_integer() and -(2**63) <= value < 2**63:
        value = int(value)
    if isinstance(value, str):
        return property_prefix(name) + _TEXT + _bytes(value)
    return property_prefix(name) + _encode(value)


def property_prefix(name: str) -> bytes:
    return _encode(_bytes(name))


def _bytes(text: str) -> bytes:
    """Also of text that damage made."""
    return text.encode("utf-8", "surrogateescape")


def model_key(name: str, version: int) -> bytes:
    return _encode((name, version))


def read_model_key(key: bytes) -> tuple[str, int]:
    name, version = msgspec.msgpack.decode(key, type=tuple[str, int])
    return name, version
