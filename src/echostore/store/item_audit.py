"""Read an items.db from end to end: every seal, and every group against its tally. For `doctor --full`."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from zlib import crc32

from echostore.kernel.snapshot import NIBBLES
from echostore.store.item_groups import count_item, count_reference, touch_value
from echostore.store.item_store import ItemStore
from echostore.store.item_tables import ItemRow
from echostore.store.lent_states import GetBlob
from echostore.store.placement_rows import PLACEMENTS_SINCE
from echostore.store.row_checks import TOTAL_MASK, Group, Tally, property_key, sum_of
from echostore.store.sqlite import Row

CHUNK_ROWS = 4096
"""Rows that are in memory at a time; the sums of all groups are too."""

_READ_WHOLE = {
    Group.CURSORS: "cursors",
    Group.ABOUT: "about",
    Group.MOVES: "moves",
    Group.REJECTS: "rejects",
    Group.FEEDS: "touch_feeds",
}


def audit_items(path: Path, get: GetBlob | None = None) -> int:
    """How many items an items.db holds; Corrupt when anything in it is not what was written.

    `get` has the blobs of the party: some states may be there alone.
    """
    with closing(ItemStore(path, writable=False)) as store:
        if get is not None:
            store.read_pages_with(get)
        count = _sealed_rows(store)
        try:
            _groups(store)
        except (TypeError, ValueError, AttributeError) as error:  # a column of another type than was written
            raise store.damage("a row is not what was written") from error
        return count


def _sealed_rows(store: ItemStore) -> int:
    items = {row[0] for row in _rows(store, "items", "item")}
    for item in items:
        if store.item(item) is None or store.state(item) is None:
            raise store.damage("a row is missing")
    if sum(len(store.states_under(nibble)) for nibble in NIBBLES) != len(items):
        raise store.damage("a row is missing")
    for (path,) in _rows(store, "nodes", "path"):
        if store.node(path) is None:
            raise store.damage("a node of the snapshot tree is missing")
    for (path,) in _rows(store, "placement_nodes", "path") if store.database.version >= PLACEMENTS_SINCE else ():
        if store.placements.node(path) is None:
            raise store.damage("a node of the placement tree is missing")
    return len(items)


def _groups(store: ItemStore) -> None:
    tally = Tally()
    for row in _rows(store, "items", "*"):
        count_item(ItemRow(*row[:-1]), 1, tally)
    for target, item in _rows(store, "refs", "target, item"):
        count_reference(target, item, 1, tally)
    for name, value, item in _rows(store, "props", "name, value, item"):
        tally.add(Group.PROPERTY, property_key(name, value), crc32(item))
    for item, number, seq in _rows(store, "touches", "item, feed, seq"):
        tally.add(Group.TOUCHES, item, touch_value(number, seq))
    for (item,) in _rows(store, "tree_dirty", "item"):
        tally.add(Group.DIRTY, b"", crc32(item))
    if store.database.version >= PLACEMENTS_SINCE:
        for (placement,) in _rows(store, "placement_dirty", "placement"):
            tally.add(Group.PLACEMENTS, b"", crc32(placement))
    for group, table in _READ_WHOLE.items():
        for row in _rows(store, table, "*"):
            tally.add(group, b"", sum_of([row]))
    counted = {place: (count, total & TOTAL_MASK) for place, (count, total) in tally.changes.items() if count}
    kept = {(kind, key): (count, total) for kind, key, count, total in _rows(store, "tallies", "*") if count or total}
    if counted != kept:
        raise store.damage("its rows are not those that were counted")


def _rows(store: ItemStore, table: str, columns: str) -> Iterator[Row]:
    """All rows of a table, from the table itself and not from an index of it."""
    start = 0
    while chunk := store.database.rows(f"SELECT {columns} FROM {table} NOT INDEXED LIMIT {CHUNK_ROWS} OFFSET {start}"):
        yield from chunk
        start += len(chunk)
