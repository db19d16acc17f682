"""ItemStore: the items of one party as of a checkpoint, with the indexes that queries use.

Everything here is derived from the feeds. It may lag behind them (the tail is folded again at opening), it may be
deleted (it is rebuilt to the same state), and one checkpoint is one transaction: items, indexes, the positions they
correspond to, the rejects list and the cached nodes of the snapshot tree always agree with each other.

    cursors    how far each feed was processed        items    one row per item, what queries filter on
    states     encoded records                        touches  which blocks wrote which item
    moves      the tree's explicit moves              nodes    snapshot tree nodes by path
    tallies    what each group of rows should hold     lent     items whose state is read from the tree's pages
    placement_nodes, placement_dirty: the tree of placements (`placement_rows`)

Rows carry check values (`row_checks`), and every read compares them: damage is `Corrupt`, never another answer. A
writer then leaves a mark beside the file, and the next writing open makes the items anew from the feeds.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

from echostore.kernel.errors import Corrupt, DamagedHere
from echostore.kernel.ids import Cid, FeedId, ItemId, item_text
from echostore.kernel.items.operations import Reject
from echostore.kernel.snapshot import BELOW_END, LABELS, TreeTop, key_bounds
from echostore.store.damage_mark import mark_damaged
from echostore.store.item_groups import TOUCH_SHIFT, count_item, count_reference, touch_value
from echostore.store.item_tables import SCHEMA, Checkpoint, CursorRow, ItemRow, MoveRow, StateRow, TreeRow
from echostore.store.lent_states import LOOK_UP_ROWS, GetBlob, LentStates
from echostore.store.node_changes import NodeChanges
from echostore.store.placement_rows import PlacementChanges, PlacementRows
from echostore.store.row_checks import (
    TOTAL_MASK,
    Group,
    Tally,
    is_sealed,
    property_key,
    property_prefix,
    read_model_key,
    seal_of,
    set_tally,
    sum_of,
    tallied,
    tally_of,
)
from echostore.store.sqlite import Connect, Database, Row, connect_file
from echostore.store.tree_moves import save_moves

__all__ = ["Checkpoint", "CursorRow", "ItemRow", "ItemStore", "MoveRow", "NodeChanges", "StateRow", "TreeRow"]

LEND_PAGES = 64
"""Pages whose items one transaction lends: some thousand."""

_SCANS = {
    "1": Group.ALL,
    "type = ?": Group.TYPE,
    "parent = ?": Group.PARENT,
    "parent IS NULL": Group.PARENT,
    "source = ?": Group.SOURCE,
    "target = ?": Group.TARGET,
    "inception IS NOT NULL": Group.VIEWS,
}
"""Conditions over `items` whose answers are tallied."""

_TREE_ROWS = "SELECT encoded, encoded_seal, item, state, native, last, seal FROM states WHERE"

_REJECT_AT = "SELECT * FROM rejects WHERE feed = ? AND seq = ? AND position = ?"


class ItemStore:
    """One party's items.db."""

    def __init__(self, path: Path, *, writable: bool = True, connect: Connect = connect_file) -> None:
        self.damaged = False
        """Whether a row was found that nobody wrote, or one was missed."""
        self._path = path
        self.database = Database(path, SCHEMA, writable=writable, connect=connect)
        self.database.on_corrupt = lambda found: self.damage(found.what)
        try:
            if writable:
                # Derived data: losing the last checkpoint to a power cut costs a longer tail, nothing else.
                self.database.rows("PRAGMA synchronous = NORMAL")
            else:
                # One checkpoint for as long as it is open: the next one belongs to blocks that are not folded here.
                self.database.rows("BEGIN")
            rows = self._whole(Group.FEEDS, "SELECT no, feed FROM touch_feeds")
        except BaseException:
            self.database.close()
            raise
        self._feed_numbers: dict[FeedId, int] = {FeedId(feed): number for number, feed in rows}
        self._lent = LentStates(self.database, self.damage)
        self.placements = PlacementRows(self.database, self.damage)

    def read_pages_with(self, get: GetBlob) -> None:
        """Where the blobs of the snapshot tree are: some states are only there."""
        self._lent.get = get

    def disk_bytes(self) -> int:
        return self.database.disk_bytes()

    def shrink(self) -> None:
        """Give the space of deleted rows back to the disk."""
        self.database.shrink(small_pages=True)

    def close(self) -> None:
        self.database.close()

    # damage

    def damage(self, what: str) -> Corrupt:
        """The error for a damaged row or file; a writer leaves a mark, so that the next one makes the items anew."""
        self.damaged = True
        if self.database.writable:
            mark_damaged(self._path)
            step = "Open the peer again: the items are then made anew from the feeds."
        else:
            step = f"Remove {self._path} while no peer is open: it is then made anew from the feeds."
        what = what if str(self._path) in what else f"{self._path} is damaged: {what}"
        return DamagedHere(what, unchanged="It is derived: the feeds hold all of the data.", next_step=step)

    def _whole(self, group: Group, sql: str) -> list[Row]:
        """The rows of a table that is read whole, none changed and none missing."""
        rows = self.database.rows(sql)
        if not tallied(self.database, group, b"", len(rows), sum_of(rows)):
            raise self.damage(f"its table of {group.name.lower()} is not what was written")
        return rows

    def _members(self, group: Group, key: bytes, ids: list[ItemId]) -> list[ItemId]:
        """The members of a group as an index gave them; Corrupt when one is missing or wrong."""
        if not tallied(self.database, group, key, len(ids), sum(map(crc32, ids))):
            raise self.damage(f"its index of {group.name.lower()} is not what was written")
        return ids

    def _checked(self, row: Row) -> Row:
        if not is_sealed(row):
            raise self.damage("a row is not what was written")
        return row

    # writing

    def save(self, checkpoint: Checkpoint) -> None:
        """One transaction."""
        database, numbers = self.database, dict(self._feed_numbers)
        with database.transaction():
            tally = Tally()
            changed = [row.item for row in checkpoint.items] + checkpoint.gone
            self._put_items(checkpoint.items, checkpoint.gone, tally)
            self._lent.drop(changed)
            database.insert("DELETE FROM states WHERE key = ?", ((_key(item),) for item in checkpoint.gone))
            database.insert(
                "INSERT OR REPLACE INTO states VALUES (?,?,?,?,?,NULL,?,NULL)",
                ((_key(row.item), *row, seal_of(row)) for row in checkpoint.states),
            )
            self._mark_dirty(changed, tally)
            self._save_indexes(checkpoint, changed, tally)
            self._save_touches(checkpoint.touches, numbers, tally)
            self._drop_rejects(checkpoint.rejects_gone, tally)
            self._save_rejects(checkpoint.rejects, tally)
            save_moves(database, checkpoint.moves, checkpoint.moves_gone, tally)
            tally.save(database)
            self._replace(Group.CURSORS, "cursors", checkpoint.cursors)
            self._replace(Group.ABOUT, "about", list(checkpoint.about.items()))
        self._feed_numbers = numbers

    def add_touches(self, touches: Sequence[tuple[ItemId, FeedId, int]]) -> None:
        """Blocks that were not processed here, and wrote items all the same. One transaction."""
        numbers, tally = dict(self._feed_numbers), Tally()
        with self.database.transaction():
            self._save_touches(touches, numbers, tally)
            tally.save(self.database)
        self._feed_numbers = numbers

    def set_about(self, entries: dict[str, bytes]) -> None:
        with self.database.transaction():
            self._replace(Group.ABOUT, "about", list(entries.items()))

    def _replace(self, group: Group, table: str, rows: Sequence[Sequence[object]]) -> None:
        """Put rows into a small table, by their first column."""
        if rows:
            kept = {row[0]: row for row in self._whole(group, f"SELECT * FROM {table}")}
            kept.update((row[0], tuple(row)) for row in rows)
            marks = ",".join("?" * len(rows[0]))
            self.database.insert(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
            set_tally(self.database, group, b"", len(kept), sum_of(kept.values()))

    def _put_items(self, rows: Sequence[ItemRow], gone: Sequence[ItemId], tally: Tally) -> None:
        old = {row.item: row for row in self._items([*(row.item for row in rows), *gone])}
        self.placements.note(old, rows, gone, tally)
        for item in gone:
            if item in old:
                count_item(old[item], -1, tally)
        for row in rows:
            before = old.get(row.item)
            if before is None:
                count_item(row, 1, tally)
            elif before[1:5] != row[1:5] or before[6:12] != row[6:12]:  # all but deletion and values
                count_item(before, -1, tally)
                count_item(row, 1, tally)
        self.database.insert("DELETE FROM items WHERE item = ?", ((item,) for item in gone))
        self.database.insert(
            "INSERT OR REPLACE INTO items VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            ((*columns, seal_of(columns)) for columns in map(_columns, rows)),
        )

    def _items(self, items: Iterable[ItemId]) -> Iterator[ItemRow]:
        """The rows of those of some items that are here."""
        for row in self._look_up("SELECT * FROM items WHERE item IN", items):
            yield ItemRow(*self._checked(row)[:-1])

    def _look_up(self, sql: str, keys: Iterable[object]) -> Iterator[Row]:
        todo = iter(keys)
        while chunk := list(islice(todo, LOOK_UP_ROWS)):
            yield from self.database.rows(f"{sql} ({','.join('?' * len(chunk))})", chunk)

    def _mark_dirty(self, items: Sequence[ItemId], tally: Tally) -> None:
        if not items:
            return
        known = {row[0] for row in self._look_up("SELECT item FROM tree_dirty WHERE item IN", items)}
        fresh = {item for item in items if item not in known}
        tally.add(Group.DIRTY, b"", sum(map(crc32, fresh)), len(fresh))
        self.database.insert("INSERT INTO tree_dirty VALUES (?)", ((item,) for item in fresh))

    def _save_indexes(self, checkpoint: Checkpoint, changed: Sequence[ItemId], tally: Tally) -> None:
        database = self.database
        if self._has_rows("refs") or checkpoint.references:
            for target, item in self._look_up("SELECT target, item FROM refs WHERE item IN", changed):
                if not isinstance(target, bytes):
                    raise self.damage("a row is not what was written")
                count_reference(target, item, -1, tally)
            database.insert("DELETE FROM refs WHERE item = ?", ((item,) for item in changed))
            pairs = [(target, item) for item, targets in checkpoint.references.items() for target in targets]
            for target, item in pairs:
                count_reference(target, item, 1, tally)
            database.insert("INSERT INTO refs VALUES (?,?)", pairs)
        if self._has_rows("props") or checkpoint.properties:
            for name, value, item in self._look_up("SELECT name, value, item FROM props WHERE item IN", changed):
                tally.add(Group.PROPERTY, property_key(name, value), -crc32(item), -1)
            database.insert("DELETE FROM props WHERE item = ?", ((item,) for item in changed))
            self._put_properties(
                ((name, value, item) for item, pairs in checkpoint.properties.items() for name, value in pairs), tally
            )

    def _put_properties(self, found: Iterable[tuple[str, object, ItemId]], tally: Tally) -> None:
        rows = [row for row in found if row[1] == row[1]]  # NaN equals nothing and is not indexed
        for name, value, item in rows:
            tally.add(Group.PROPERTY, property_key(name, value), crc32(item))
        self.database.insert("INSERT INTO props VALUES (?,?,?)", rows)

    def _save_touches(
        self, touches: Sequence[tuple[ItemId, FeedId, int]], numbers: dict[FeedId, int], tally: Tally
    ) -> None:
        fresh = {feed for _, feed, _ in touches} - numbers.keys()
        for feed in sorted(fresh):
            numbers[feed] = len(numbers) + 1
            self.database.execute("INSERT INTO touch_feeds VALUES (?, ?)", (numbers[feed], feed))
        if fresh:
            rows = [(number, feed) for feed, number in numbers.items()]
            set_tally(self.database, Group.FEEDS, b"", len(rows), sum_of(rows))
        before = self._changes()
        placed = sorted([(item, numbers[feed], seq) for item, feed, seq in touches])
        self.database.insert("INSERT OR IGNORE INTO touches VALUES (?,?,?)", placed)
        if self._changes() - before == len(placed):
            sums: dict[ItemId, list[int]] = {}
            for item, number, seq in placed:
                sums.setdefault(item, []).append(number << TOUCH_SHIFT | seq)  # a hot loop
            for item, values in sums.items():
                tally.add(Group.TOUCHES, item, sum(values), len(values))
        else:  # some were known
            for item in {item for item, _, _ in placed}:
                found = self._touches(item)
                set_tally(self.database, Group.TOUCHES, item, len(found), sum(found))

    def _touches(self, item: ItemId) -> list[int]:
        rows = self.database.rows("SELECT feed, seq FROM touches WHERE item = ?", (item,))
        if not all(isinstance(number, int) and isinstance(seq, int) for number, seq in rows):
            raise self.damage("a row is not what was written")
        return [touch_value(number, seq) for number, seq in rows]

    def _changes(self) -> int:
        row = self.database.row("SELECT total_changes()")
        assert row is not None
        return int(row[0])

    def _save_rejects(self, rejects: Iterable[Reject], tally: Tally) -> None:
        fresh = {(FeedId(row.feed), row.seq, row.position): row for row in rejects}
        self._uncount_rejects(fresh, tally)
        for row in fresh.values():
            tally.add(Group.REJECTS, b"", seal_of(row))
        self.database.insert("INSERT OR REPLACE INTO rejects VALUES (?,?,?,?,?)", fresh.values())

    def _uncount_rejects(self, places: Iterable[tuple[FeedId, int, int]], tally: Tally) -> None:
        for place in places:
            row = self.database.row(_REJECT_AT, place)
            if row is not None:
                tally.add(Group.REJECTS, b"", -sum_of([row]), -1)

    def _has_rows(self, table: str) -> bool:
        return self.database.row(f"SELECT 1 FROM {table} LIMIT 1") is not None

    def rejects_at(self, places: Iterable[tuple[FeedId, int, int]]) -> set[tuple[FeedId, int, int]]:
        """Those of the places for which a reject is stored."""
        return {place for place in places if self.database.row(_REJECT_AT, place) is not None}

    def _drop_rejects(self, places: Collection[tuple[FeedId, int, int]], tally: Tally) -> None:
        self._uncount_rejects(places, tally)
        self.database.insert("DELETE FROM rejects WHERE feed = ? AND seq = ? AND position = ?", places)

    def save_tree(
        self, nodes: NodeChanges, encoded: Iterable[tuple[ItemId, bytes]], placed: PlacementChanges | None = None
    ) -> None:
        """The snapshot tree is up to date, and that of placements where it is given: keep nodes, forget what was dirty."""
        database = self.database
        with database.transaction():
            for path in nodes.forgotten:
                database.execute("DELETE FROM nodes WHERE path >= ? AND path < ?", (path, path + BELOW_END))
            rows = ((path, top.cid, top.count, top.size) for path, top in nodes.kept.items())
            database.insert("INSERT OR REPLACE INTO nodes VALUES (?,?,?,?,?)", ((*row, seal_of(row)) for row in rows))
            database.insert(
                "UPDATE states SET encoded = ?, encoded_seal = ? WHERE key = ?",
                ((data, crc32(data), _key(item)) for item, data in encoded),
            )
            database.execute("DELETE FROM tree_dirty")
            set_tally(database, Group.DIRTY, b"", 0, 0)
            if placed is not None:
                self.placements.save(placed)

    def lend(self, keep: frozenset[ItemId]) -> None:
        """Hold the states no longer that the snapshot tree has just so, but for those to be kept; in small steps.

        The highest stamp that was folded in goes with them: of items that the base has so, nobody asks for it.
        """
        pages = self._lent.pages()
        while some := list(islice(pages, LEND_PAGES)):
            with self.database.transaction():
                equal = [
                    ItemId(row.item)
                    for path, entries in some
                    for row in self.states_under(path)
                    if row.native is None
                    and row.encoded is None
                    and row.item not in keep
                    and entries.get(ItemId(row.item)) == row.state
                    and not self._lent.has(ItemId(row.item))
                ]
                lent = self._lent.add(equal)
                self.database.insert("DELETE FROM states WHERE key = ?", ((_key(item),) for item in lent))

    def secure(self) -> None:
        """Let what was written survive the end of the machine, before blobs go that the tree named until now.

        Otherwise a checkpoint from before could come back, with states lent to pages that are gone.
        """
        if self._lent.any:
            self.database.rows("PRAGMA synchronous = FULL")
            try:
                with self.database.transaction():
                    # A transaction that writes nothing syncs nothing.
                    self.database.execute("INSERT INTO tree_dirty VALUES (x'')")
                    self.database.execute("DELETE FROM tree_dirty WHERE item = x''")
            finally:
                self.database.rows("PRAGMA synchronous = NORMAL")

    def touched_from(self, feed: FeedId, start: int) -> list[ItemId]:
        """Items that a feed writes from `start` on. All touches are looked at."""
        number = self._feed_numbers.get(feed)
        return self._ids("SELECT DISTINCT item FROM touches WHERE feed = ? AND seq >= ?", (number, start))

    def set_parents(self, homes: Iterable[tuple[ItemId, ItemId | None]]) -> None:
        """Where items hang that were moved."""
        parents = dict(homes)
        with self.database.transaction():
            tally = Tally()
            rows = [row._replace(parent=parents[row.item]) for row in self._items(parents)]
            self._put_items(rows, [], tally)
            tally.save(self.database)

    def drop_touches(self, feed: FeedId, end: int) -> None:
        """Forget which blocks before `end` wrote what: they are gone, and so are their rejects."""
        number = self._feed_numbers.get(feed, 0)
        with self.database.transaction():
            tally = Tally()
            for item, seq in self.database.rows(
                "SELECT item, seq FROM touches WHERE feed = ? AND seq < ?", (number, end)
            ):
                tally.add(Group.TOUCHES, item, -touch_value(number, seq), -1)
            for row in self.database.rows("SELECT * FROM rejects WHERE feed = ? AND seq < ?", (feed, end)):
                tally.add(Group.REJECTS, b"", -sum_of([row]), -1)
            tally.save(self.database)
            self.database.execute("DELETE FROM touches WHERE feed = ? AND seq < ?", (number, end))
            self.database.execute("DELETE FROM rejects WHERE feed = ? AND seq < ?", (feed, end))

    def clear(self) -> None:
        """Forget everything: the items are about to be folded from the feeds anew."""
        with self.database.transaction():
            for (table,) in self.database.rows("SELECT name FROM sqlite_schema WHERE type = 'table'"):
                self.database.execute(f"DELETE FROM {table}")
        self._feed_numbers.clear()
        self._lent.any = self.placements.known = False

    @property
    def lends(self) -> bool:
        """Whether states of items are in the pages of the snapshot tree alone."""
        return self._lent.any

    def forget_tree(self) -> None:
        """The blobs of the snapshot tree are gone: nothing of it is known any more."""
        if self._lent.any:
            raise self.damage("states that stood in the pages of its snapshot tree are lost with them")
        with self.database.transaction():
            self.database.execute("DELETE FROM nodes")
            self.database.execute("UPDATE states SET encoded = NULL, encoded_seal = NULL")

    def declare_property(self, name: str, rows: Iterable[tuple[object, ItemId]]) -> None:
        """Fill the index of a property that was declared after items had it."""
        prefix = property_prefix(name)
        with self.database.transaction():
            tally = Tally()
            # A property may have been declared before, by a peer whose settings were lost since.
            self.database.execute("DELETE FROM props WHERE name = ?", (name,))
            self.database.execute(
                "DELETE FROM tallies WHERE kind = ? AND key >= ? AND key < ?",
                (Group.PROPERTY, prefix, prefix + b"\xff" * 16),
            )
            self._put_properties(((name, value, item) for value, item in rows), tally)
            tally.save(self.database)

    # reading

    def cursors(self) -> list[CursorRow]:
        return [CursorRow(*row) for row in self._whole(Group.CURSORS, "SELECT * FROM cursors")]

    def about(self, name: str) -> bytes | None:
        entries: dict[str, bytes] = dict(self._whole(Group.ABOUT, "SELECT name, value FROM about"))
        return entries.get(name)

    def item(self, item: ItemId) -> ItemRow | None:
        row = self.database.row("SELECT * FROM items WHERE item = ?", (item,))
        if row is not None:
            return ItemRow(*self._checked(row)[:-1])
        if self._lent.has(item) or self.database.row("SELECT 1 FROM states WHERE key = ?", (_key(item),)) is not None:
            raise self.damage(f"the row of item {item_text(item)[:8]} is missing")
        return None

    def state(self, item: ItemId) -> StateRow | None:
        row = self.database.row("SELECT item, state, native, last, seal FROM states WHERE key = ?", (_key(item),))
        if row is not None and self._checked(row)[0] == item:
            return StateRow(*row[:-1])
        known = self.database.row("SELECT 1 FROM items WHERE item = ?", (item,)) is not None
        if row is None and known and self._lent.has(item):
            return StateRow(item, self._lent.state(item), None, None)
        if row is not None or known or self._lent.has(item):
            raise self.damage(f"the state of item {item_text(item)[:8]} is missing")
        return None

    def tree_dirty(self) -> list[ItemId]:
        """Items that changed since the snapshot tree was last brought up to date."""
        return self._members(Group.DIRTY, b"", self._ids("SELECT item FROM tree_dirty"))

    def states_under(self, path: str) -> list[TreeRow]:
        """The items below a path of the snapshot tree."""
        first, last = (bytes.fromhex(bound) for bound in key_bounds(path))
        rows = self._tree_rows(self.database.rows(f"{_TREE_ROWS} key >= ? AND key <= ?", (first, last)))
        lent = self._lent.under(path)
        if any(item in rows for item, _ in lent) or not all(first <= _key(item) <= last for item in rows):
            raise self.damage(f"the states of items below {path!r} are not what was written")
        return [*rows.values(), *(TreeRow(item, state, None, None) for item, state in lent)]

    def states_of(self, items: Iterable[ItemId]) -> list[TreeRow]:
        """Those of some items that are here."""
        found = {item: _key(item) for item in items}
        rows = self._tree_rows(list(self._look_up(f"{_TREE_ROWS} key IN", found.values())))
        lent = [item for item in found if item not in rows and self._lent.has(item)]
        if not rows.keys() <= found.keys():
            raise self.damage("the state of an item stands where that of another belongs")
        return [*rows.values(), *(TreeRow(item, self._lent.state(item), None, None) for item in lent)]

    def _tree_rows(self, found: Iterable[Row]) -> dict[ItemId, TreeRow]:
        rows: dict[ItemId, TreeRow] = {}
        for encoded, encoded_seal, *rest in found:
            item, state, native, _, _ = self._checked(tuple(rest))
            sound = encoded is None or (isinstance(encoded, bytes) and crc32(encoded) == encoded_seal)
            if not sound or item in rows:
                raise self.damage(f"the state of item {item_text(item)[:8]} is not what was written")
            rows[item] = TreeRow(item, state, native, encoded)
        return rows

    def models_in_use(self) -> list[tuple[str, int]]:
        """The models of all items, from the tallies: no item is looked at."""
        rows = self.database.rows("SELECT key, count, total FROM tallies WHERE kind = ?", (Group.MODEL,))
        sound = all(
            isinstance(key, bytes) and isinstance(count, int) and crc32(key) * count & TOTAL_MASK == total
            for key, count, total in rows
        )
        if not sound or sum(count for _, count, _ in rows) != tally_of(self.database, Group.ALL)[0]:
            raise self.damage("its list of models is not what was written")
        return [read_model_key(key) for key, _, _ in rows]

    def moves(self) -> list[MoveRow]:
        rows = self._whole(Group.MOVES, "SELECT * FROM moves ORDER BY depth, feed, seq, position")
        return [MoveRow(*row) for row in rows]

    def count(self) -> int:
        row = self.database.row("SELECT count(*) FROM items")
        assert row is not None
        self.check_count(row[0])
        return int(row[0])

    def check_count(self, found: int) -> None:
        """Corrupt when so many items are not all."""
        if found != tally_of(self.database, Group.ALL)[0]:
            raise self.damage(f"{found} items were found, and that is not how many there are")

    def scan(self, where: str, parameters: Sequence[Any]) -> list[ItemId]:
        """Ids of the items whose row meets a condition over `items`."""
        group = _SCANS.get(where)
        if group is None:
            return [row.item for row in self.scan_rows(where, parameters)]
        found = self._ids(f"SELECT item FROM items WHERE {where}", parameters)
        return self._members(group, _group_key(parameters[0]) if parameters else b"", found)

    def scan_rows(self, where: str, parameters: Sequence[object]) -> list[ItemRow]:
        """The rows that meet a condition. No index is asked: all rows are read, and counted."""
        rows = self.database.rows(f"SELECT {where}, * FROM items NOT INDEXED", parameters)
        self._members(Group.ALL, b"", [row[1] for row in rows])
        return [ItemRow(*self._checked(row[1:])[:-1]) for row in rows if row[0]]

    def with_property(self, name: str, value: object) -> list[ItemId]:
        """Ids of items whose declared property has this value."""
        found = self._ids("SELECT item FROM props WHERE name = ? AND value IS ?", (name, value))
        return self._members(Group.PROPERTY, property_key(name, value), found)

    def referrers(self, target: ItemId) -> list[ItemId]:
        return self._members(Group.REFERRERS, target, self._ids("SELECT item FROM refs WHERE target = ?", (target,)))

    def references(self, item: ItemId) -> list[ItemId]:
        return self._members(Group.REFERENCES, item, self._ids("SELECT target FROM refs WHERE item = ?", (item,)))

    def origin(self, item: ItemId) -> ItemId | None:
        """Where the genesis of an item put it; None for the system item, and for one that is not here."""
        row = self.item(item)
        return row.origin if row else None

    def created_below(self, parent: ItemId) -> list[ItemId]:
        """Items whose genesis put them below `parent`, wherever they hang now."""
        return self._members(Group.ORIGIN, parent, self._ids("SELECT item FROM items WHERE origin = ?", (parent,)))

    def touches(self, item: ItemId) -> list[tuple[FeedId, int]]:
        """The blocks that wrote an item."""
        found = self._touches(item)
        if not tallied(self.database, Group.TOUCHES, item, len(found), sum(found)):
            raise self.damage(f"its index of the blocks of item {item_text(item)[:8]} is not what was written")
        feeds = {number: feed for feed, number in self._feed_numbers.items()}
        return [(feeds[place >> TOUCH_SHIFT], place & ((1 << TOUCH_SHIFT) - 1)) for place in found]

    def touches_after(self, item: ItemId, feed: FeedId, start: int) -> list[int]:
        """Seqs from `start` on at which a feed writes an item. Not tallied: it must cost what is new alone."""
        number = self._feed_numbers.get(feed)
        found = self.database.rows(
            "SELECT seq FROM touches WHERE item = ? AND feed = ? AND seq >= ?", (item, number, start)
        )
        return [row[0] for row in found]

    def rejects(self) -> list[Reject]:
        rows = self._whole(Group.REJECTS, "SELECT * FROM rejects ORDER BY feed, seq, position")
        return [Reject(*row) for row in rows]

    def node(self, path: str) -> TreeTop | None:
        row = self.database.row("SELECT path, cid, count, size, seal FROM nodes WHERE path = ?", (path,))
        return TreeTop(Cid(self._checked(row)[1]), row[2], row[3]) if row else None

    def branches(self, path: str) -> list[tuple[str, TreeTop]]:
        """The nodes right below one, by label, in one look."""
        below = [path + label for label in LABELS]
        marks = ",".join("?" * len(below))
        rows = self.database.rows(f"SELECT path, cid, count, size, seal FROM nodes WHERE path IN ({marks})", below)
        found = {row[0]: TreeTop(Cid(self._checked(row)[1]), row[2], row[3]) for row in rows}
        return [(each[-1], found[each]) for each in below if each in found]

    def _ids(self, sql: str, parameters: Sequence[object] = ()) -> list[ItemId]:
        found = [row[0] for row in self.database.rows(sql, parameters)]
        if not all(isinstance(item, bytes) for item in found):
            raise self.damage("a row is not what was written")
        return found


def _key(item: ItemId) -> bytes:
    return sha256(item).digest()


def _columns(row: ItemRow) -> list[Any]:
    """A row as SQLite gives it back."""
    columns = list(row)
    columns[5] = int(row.deleted)
    return columns


def _group_key(parameter: str | bytes) -> bytes:
    return parameter.encode() if isinstance(parameter, str) else parameter
