"""ItemStore: the items of one party as of a checkpoint, with the indexes that queries use.

Everything here is derived from the feeds. It may lag behind them (the tail is folded again at opening), it may be
deleted (it is rebuilt to the same state), and one checkpoint is one transaction: items, indexes, the positions they
correspond to, the rejects list and the cached nodes of the snapshot tree always agree with each other.

    cursors    how far each feed was processed        items    one row per item, what queries filter on
    states     encoded records                        touches  which blocks wrote which item
    moves      the tree's explicit moves              nodes    snapshot tree nodes by path
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from echostore.kernel.ids import Cid, FeedId, FeedKey, ItemId, Link
from echostore.kernel.items.operations import Reject
from echostore.kernel.snapshot import NIBBLES, TreeTop, key_bounds
from echostore.store.sqlite import Connect, Database, Schema, connect_file

SCHEMA = Schema(
    application_id=0x45434849,
    steps=(
        (
            """CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID""",
            """CREATE TABLE cursors (
                key BLOB PRIMARY KEY, kind TEXT NOT NULL, length INTEGER NOT NULL, link BLOB NOT NULL,
                depth INTEGER NOT NULL, asserted BLOB NOT NULL, ended TEXT) WITHOUT ROWID""",
            """CREATE TABLE items (
                item BLOB PRIMARY KEY, type TEXT NOT NULL, model TEXT NOT NULL, version INTEGER NOT NULL, parent BLOB,
                deleted INTEGER NOT NULL, source BLOB, target BLOB, target_party BLOB, inception BLOB, depth INTEGER,
                origin BLOB, vals BLOB) WITHOUT ROWID""",
            "CREATE INDEX items_type ON items (type)",
            "CREATE INDEX items_parent ON items (parent)",
            "CREATE INDEX items_origin ON items (origin) WHERE origin IS NOT NULL",
            "CREATE INDEX items_source ON items (source) WHERE source IS NOT NULL",
            "CREATE INDEX items_target ON items (target) WHERE target IS NOT NULL",
            "CREATE INDEX items_inception ON items (inception) WHERE inception IS NOT NULL",
            """CREATE TABLE states (
                key BLOB PRIMARY KEY, item BLOB NOT NULL, state BLOB NOT NULL, native BLOB, last BLOB,
                encoded BLOB)""",
            """CREATE TABLE tree_dirty (item BLOB PRIMARY KEY) WITHOUT ROWID""",
            """CREATE TABLE refs (target BLOB, item BLOB, PRIMARY KEY (target, item)) WITHOUT ROWID""",
            "CREATE INDEX refs_item ON refs (item)",
            """CREATE TABLE props (
                name TEXT, value, item BLOB, PRIMARY KEY (name, value, item)) WITHOUT ROWID""",
            "CREATE INDEX props_item ON props (item)",
            """CREATE TABLE touches (
                item BLOB, feed INTEGER, seq INTEGER, PRIMARY KEY (item, feed, seq)) WITHOUT ROWID""",
            """CREATE TABLE touch_feeds (no INTEGER PRIMARY KEY, feed BLOB UNIQUE)""",
            """CREATE TABLE moves (
                depth INTEGER, feed BLOB, seq INTEGER, position INTEGER, item BLOB, kind INTEGER, parent BLOB,
                PRIMARY KEY (depth, feed, seq, position)) WITHOUT ROWID""",
            """CREATE TABLE rejects (
                feed BLOB, seq INTEGER, position INTEGER, reason TEXT, detail TEXT,
                PRIMARY KEY (feed, seq, position)) WITHOUT ROWID""",
            """CREATE TABLE nodes (path TEXT PRIMARY KEY, cid BLOB NOT NULL, count INTEGER NOT NULL) WITHOUT ROWID""",
        ),
        # `states.native` holds more than it did. Without cursors nothing is taken for processed: all is folded anew.
        (
            "DELETE FROM cursors",
            "DELETE FROM about",
            "DELETE FROM items",
            "DELETE FROM states",
            "DELETE FROM tree_dirty",
            "DELETE FROM refs",
            "DELETE FROM props",
            "DELETE FROM touches",
            "DELETE FROM touch_feeds",
            "DELETE FROM moves",
            "DELETE FROM rejects",
            "DELETE FROM nodes",
        ),
    ),
)


class CursorRow(NamedTuple):
    """How far one feed was processed when the checkpoint was taken."""

    key: FeedKey
    kind: str
    length: int
    link: Link
    depth: int
    asserted: bytes
    ended: str | None


class ItemRow(NamedTuple):
    """What queries filter on. `vals` holds the encoded properties of property sets."""

    item: ItemId
    type: str
    model: str
    version: int
    parent: ItemId | None
    deleted: bool
    source: ItemId | None
    target: ItemId | None
    target_party: bytes | None
    inception: bytes | None
    depth: int
    origin: ItemId | None
    """Where its genesis put it."""
    vals: bytes | None


class StateRow(NamedTuple):
    """An encoded record. A model that edits in place keeps its own fast form in `native`, and its canonical state is
    encoded when a snapshot needs it; `last` is the highest stamp folded in."""

    item: ItemId
    state: bytes
    native: bytes | None
    last: bytes | None


class TreeRow(NamedTuple):
    """What a snapshot needs of an item; `encoded` is the canonical form where it is known and differs from `state`."""

    item: ItemId
    state: bytes
    native: bytes | None
    encoded: bytes | None


class MoveRow(NamedTuple):
    """One explicit move of the tree."""

    depth: int
    feed: bytes
    seq: int
    position: int
    item: bytes
    kind: int
    parent: bytes | None


@dataclass(slots=True)
class Checkpoint:
    """Everything that changed since the last one."""

    cursors: list[CursorRow]
    items: list[ItemRow]
    states: list[StateRow]
    gone: list[ItemId]
    references: dict[ItemId, list[ItemId]]
    properties: dict[ItemId, list[tuple[str, object]]]
    touches: list[tuple[ItemId, FeedId, int]]
    moves: list[MoveRow] | None
    """All of them, when any changed."""
    rejects: list[Reject]
    about: dict[str, bytes]


class ItemStore:
    """One party's items.db."""

    def __init__(self, path: Path, *, writable: bool = True, connect: Connect = connect_file) -> None:
        self.database = Database(path, SCHEMA, writable=writable, connect=connect)
        if writable:
            # Derived data: losing the last checkpoint to a power cut costs a longer tail, nothing else.
            self.database.rows("PRAGMA synchronous = NORMAL")
        self._feed_numbers: dict[FeedId, int] = {
            FeedId(feed): number for number, feed in self.database.rows("SELECT no, feed FROM touch_feeds")
        }

    def close(self) -> None:
        self.database.close()

    # writing

    def save(self, checkpoint: Checkpoint) -> None:
        """One transaction."""
        database = self.database
        with database.transaction():
            changed = [(row.item,) for row in checkpoint.items] + [(item,) for item in checkpoint.gone]
            database.insert("DELETE FROM items WHERE item = ?", ((item,) for item in checkpoint.gone))
            database.insert("DELETE FROM states WHERE key = ?", ((_key(item),) for item in checkpoint.gone))
            database.insert("INSERT OR REPLACE INTO items VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", checkpoint.items)
            database.insert(
                "INSERT OR REPLACE INTO states VALUES (?,?,?,?,?,NULL)",
                ((_key(row.item), *row) for row in checkpoint.states),
            )
            database.insert("INSERT OR IGNORE INTO tree_dirty VALUES (?)", changed)
            self._save_indexes(checkpoint, changed)
            self._save_touches(checkpoint.touches)
            if checkpoint.moves is not None:
                database.execute("DELETE FROM moves")
                database.insert("INSERT INTO moves VALUES (?,?,?,?,?,?,?)", checkpoint.moves)
            database.insert("INSERT OR REPLACE INTO rejects VALUES (?,?,?,?,?)", checkpoint.rejects)
            database.insert("INSERT OR REPLACE INTO cursors VALUES (?,?,?,?,?,?,?)", checkpoint.cursors)
            database.insert("INSERT OR REPLACE INTO about VALUES (?,?)", checkpoint.about.items())

    def _save_indexes(self, checkpoint: Checkpoint, changed: Sequence[tuple[ItemId]]) -> None:
        database = self.database
        if self._has_rows("refs") or checkpoint.references:
            database.insert("DELETE FROM refs WHERE item = ?", changed)
            pairs = [(target, item) for item, targets in checkpoint.references.items() for target in targets]
            database.insert("INSERT OR IGNORE INTO refs VALUES (?,?)", pairs)
        if self._has_rows("props") or checkpoint.properties:
            database.insert("DELETE FROM props WHERE item = ?", changed)
            triples = [(name, value, item) for item, pairs in checkpoint.properties.items() for name, value in pairs]
            database.insert("INSERT OR IGNORE INTO props VALUES (?,?,?)", triples)

    def _save_touches(self, touches: Sequence[tuple[ItemId, FeedId, int]]) -> None:
        numbers = self._feed_numbers
        for feed in {feed for _, feed, _ in touches}:
            if feed not in numbers:
                self.database.execute("INSERT INTO touch_feeds (feed) VALUES (?)", (feed,))
                row = self.database.row("SELECT no FROM touch_feeds WHERE feed = ?", (feed,))
                assert row is not None
                numbers[feed] = row[0]
        rows = ((item, numbers[feed], seq) for item, feed, seq in sorted(touches))
        self.database.insert("INSERT OR IGNORE INTO touches VALUES (?,?,?)", rows)

    def _has_rows(self, table: str) -> bool:
        return self.database.row(f"SELECT 1 FROM {table} LIMIT 1") is not None

    def drop_rejects(self, places: Iterable[tuple[FeedId, int, int]]) -> None:
        with self.database.transaction():
            self.database.insert("DELETE FROM rejects WHERE feed = ? AND seq = ? AND position = ?", places)

    def save_tree(self, nodes: "NodeChanges", encoded: Iterable[tuple[ItemId, bytes]]) -> None:
        """The snapshot tree is up to date: keep its nodes and forget which items were dirty."""
        database = self.database
        with database.transaction():
            for path in nodes.forgotten:
                database.execute("DELETE FROM nodes WHERE path >= ? AND path < ?", (path, path + "g"))
            rows = ((path, top.cid, top.count) for path, top in nodes.kept.items())
            database.insert("INSERT OR REPLACE INTO nodes VALUES (?,?,?)", rows)
            database.insert(
                "UPDATE states SET encoded = ? WHERE key = ?", ((data, _key(item)) for item, data in encoded)
            )
            database.execute("DELETE FROM tree_dirty")

    def clear(self) -> None:
        """Forget everything: the items are about to be folded from the feeds anew."""
        with self.database.transaction():
            for (table,) in self.database.rows("SELECT name FROM sqlite_schema WHERE type = 'table'"):
                self.database.execute(f"DELETE FROM {table}")
        self._feed_numbers.clear()

    def forget_tree(self) -> None:
        """The blobs of the snapshot tree are gone: nothing of it is known any more."""
        with self.database.transaction():
            self.database.execute("DELETE FROM nodes")
            self.database.execute("UPDATE states SET encoded = NULL")

    def declare_property(self, name: str, rows: Iterable[tuple[object, ItemId]]) -> None:
        """Fill the index of a property that was declared after items had it."""
        with self.database.transaction():
            self.database.insert(
                "INSERT OR IGNORE INTO props VALUES (?,?,?)", ((name, value, item) for value, item in rows)
            )

    # reading

    def cursors(self) -> list[CursorRow]:
        return [CursorRow(*row) for row in self.database.rows("SELECT * FROM cursors")]

    def about(self, name: str) -> bytes | None:
        row = self.database.row("SELECT value FROM about WHERE name = ?", (name,))
        return row[0] if row else None

    def item(self, item: ItemId) -> ItemRow | None:
        row = self.database.row("SELECT * FROM items WHERE item = ?", (item,))
        return ItemRow(*row) if row else None

    def state(self, item: ItemId) -> StateRow | None:
        row = self.database.row("SELECT item, state, native, last FROM states WHERE key = ?", (_key(item),))
        return StateRow(*row) if row else None

    def tree_dirty(self) -> list[ItemId]:
        """Items that changed since the snapshot tree was last brought up to date."""
        return [ItemId(row[0]) for row in self.database.rows("SELECT item FROM tree_dirty")]

    def states_under(self, path: str) -> list[TreeRow]:
        """The items below a path of the snapshot tree."""
        first, last = (bytes.fromhex(bound) for bound in key_bounds(path))
        found = self.database.rows(
            "SELECT item, state, native, encoded FROM states WHERE key >= ? AND key <= ?", (first, last)
        )
        return [TreeRow(*row) for row in found]

    def models_in_use(self) -> list[tuple[str, int]]:
        return [(row[0], row[1]) for row in self.database.rows("SELECT DISTINCT model, version FROM items")]

    def moves(self) -> list[MoveRow]:
        return [MoveRow(*row) for row in self.database.rows("SELECT * FROM moves ORDER BY depth, feed, seq, position")]

    def count(self) -> int:
        row = self.database.row("SELECT count(*) FROM items")
        assert row is not None
        return int(row[0])

    def scan(self, where: str, parameters: Sequence[object]) -> list[ItemId]:
        """Ids of the items whose row meets a condition over `items`."""
        found = self.database.rows(f"SELECT item FROM items WHERE {where}", parameters)
        return [ItemId(row[0]) for row in found]

    def scan_rows(self, where: str, parameters: Sequence[object]) -> list[ItemRow]:
        return [ItemRow(*row) for row in self.database.rows(f"SELECT * FROM items WHERE {where}", parameters)]

    def with_property(self, name: str, value: object) -> list[ItemId]:
        """Ids of items whose declared property has this value."""
        found = self.database.rows("SELECT item FROM props WHERE name = ? AND value IS ?", (name, value))
        return [ItemId(row[0]) for row in found]

    def referrers(self, target: ItemId) -> list[ItemId]:
        return [ItemId(row[0]) for row in self.database.rows("SELECT item FROM refs WHERE target = ?", (target,))]

    def references(self, item: ItemId) -> list[ItemId]:
        return [ItemId(row[0]) for row in self.database.rows("SELECT target FROM refs WHERE item = ?", (item,))]

    def created_below(self, parent: ItemId) -> list[ItemId]:
        """Items whose genesis put them below `parent`, wherever they hang now."""
        return [ItemId(row[0]) for row in self.database.rows("SELECT item FROM items WHERE origin = ?", (parent,))]

    def touches(self, item: ItemId) -> list[tuple[FeedId, int]]:
        """The blocks that wrote an item."""
        found = self.database.rows(
            "SELECT f.feed, t.seq FROM touches t JOIN touch_feeds f ON f.no = t.feed WHERE t.item = ?", (item,)
        )
        return [(FeedId(feed), seq) for feed, seq in found]

    def touches_after(self, item: ItemId, feed: FeedId, start: int) -> list[int]:
        """Seqs from `start` on at which a feed writes an item."""
        number = self._feed_numbers.get(feed)
        found = self.database.rows(
            "SELECT seq FROM touches WHERE item = ? AND feed = ? AND seq >= ?", (item, number, start)
        )
        return [row[0] for row in found]

    def rejects(self) -> list[Reject]:
        return [Reject(*row) for row in self.database.rows("SELECT * FROM rejects ORDER BY feed, seq, position")]

    def node(self, path: str) -> TreeTop | None:
        row = self.database.row("SELECT cid, count FROM nodes WHERE path = ?", (path,))
        return TreeTop(Cid(row[0]), row[1]) if row else None


class NodeChanges:
    """A NodeCache over the store whose changes are kept in memory until `save_tree`."""

    def __init__(self, store: ItemStore) -> None:
        self._store = store
        self.kept: dict[str, TreeTop] = {}
        self.forgotten: list[str] = []

    def node(self, path: str) -> TreeTop | None:
        return self._store.node(path)

    def branches(self, path: str) -> list[tuple[str, TreeTop]]:
        found = ((nibble, self._store.node(path + nibble)) for nibble in NIBBLES)
        return [(nibble, top) for nibble, top in found if top is not None]

    def keep(self, path: str, top: TreeTop) -> None:
        self.kept[path] = top

    def forget(self, path: str) -> None:
        # An update forgets a path before it keeps anything below it, so nothing in `kept` is affected.
        self.forgotten.append(path)


def _key(item: ItemId) -> bytes:
    return sha256(item).digest()
