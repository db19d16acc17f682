"""The tables of an items.db, and its rows as the ItemStore takes and gives them."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from echostore.kernel.ids import FeedId, FeedKey, ItemId, Link, Stamp
from echostore.kernel.items.operations import Reject
from echostore.store.row_checks import TALLIES_TABLE
from echostore.store.sqlite import Schema

SCHEMA = Schema(
    application_id=0x45434849,
    readers_from=5,
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
        # Rows got check values.
        (
            "DELETE FROM cursors",
            "DELETE FROM about",
            "DELETE FROM tree_dirty",
            "DELETE FROM refs",
            "DELETE FROM props",
            "DELETE FROM touches",
            "DELETE FROM touch_feeds",
            "DELETE FROM moves",
            "DELETE FROM rejects",
            "DELETE FROM items",
            "DELETE FROM states",
            "DELETE FROM nodes",
            "ALTER TABLE items ADD COLUMN seal INTEGER",
            "ALTER TABLE states ADD COLUMN seal INTEGER",
            "ALTER TABLE states ADD COLUMN encoded_seal INTEGER",
            "ALTER TABLE nodes ADD COLUMN seal INTEGER",
            TALLIES_TABLE,
        ),
        # The snapshot tree got another shape: it is built again by the next snapshot.
        (
            "DROP TABLE nodes",
            """CREATE TABLE nodes (
                path TEXT PRIMARY KEY, cid BLOB NOT NULL, count INTEGER NOT NULL, size INTEGER NOT NULL, seal INTEGER
                ) WITHOUT ROWID""",
        ),
        # Texts and lists remember which messages brought what: all is folded anew.
        tuple(
            f"DELETE FROM {table}"
            for table in (
                "cursors",
                "about",
                "tree_dirty",
                "refs",
                "props",
                "touches",
                "touch_feeds",
                "moves",
                "rejects",
                "items",
                "states",
                "nodes",
                "tallies",
            )
        ),
        # States that the snapshot tree has need not be here as well: `no` is the start of an item's key (lent_states).
        ("CREATE TABLE lent (no INTEGER PRIMARY KEY)",),
        # The placement tree: the next snapshot makes it from all items (placement_rows).
        (
            """CREATE TABLE placement_nodes (
                path TEXT PRIMARY KEY, cid BLOB NOT NULL, count INTEGER NOT NULL, size INTEGER NOT NULL, seal INTEGER
                ) WITHOUT ROWID""",
            "CREATE TABLE placement_dirty (placement BLOB PRIMARY KEY) WITHOUT ROWID",
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
    moves: list[MoveRow]
    """Those that are new."""
    rejects: list[Reject]
    about: dict[str, bytes]
    moves_gone: list[Stamp] = field(default_factory=list)
    """Those that are no more, or are folded again: their rows go before new ones come."""
    rejects_gone: Collection[tuple[FeedId, int, int]] = ()
    """Places of rejects that hold no more: they go before new ones come."""
