"""What an ItemStore keeps of the placement tree of its party (`echostore.wire.placements`).

    placement_nodes   path -> CID of each node of the tree at the last snapshot
    placement_dirty   placements that came or went since then

Items change often, placements nearly never: a checkpoint that creates and removes no item writes nothing here. Before the
first tree nothing is noted either, because that one is made from all rows at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from zlib import crc32

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.snapshot import (
    BELOW_END,
    LABELS,
    PLACEMENT_BYTES,
    Path,
    Placement,
    TreeTop,
    is_page,
    is_run,
    placed,
    placements_of,
)
from echostore.store.item_tables import ItemRow
from echostore.store.lent_states import LOOK_UP_ROWS, GetBlob
from echostore.store.row_checks import Group, Tally, is_sealed, seal_of, set_tally, tallied
from echostore.store.sqlite import Database, Row
from echostore.wire.tree_nodes import MalformedNode, page_placements

PLACEMENTS_SINCE = 7
"""The version of the tables since which there are placements."""

SCAN_ROWS = 2048
"""Rows of items that are in memory at a time when all are asked: some MiB."""


class PlacementRows:
    """The placement tree of one items.db. All that writes is called inside a transaction."""

    def __init__(self, database: Database, damage: Callable[[str], Corrupt]) -> None:
        self._db = database
        self.damage = damage
        self.known = False
        """Whether there is a tree: changes are noted only then."""
        if database.version >= PLACEMENTS_SINCE:
            self.known = database.row("SELECT 1 FROM placement_nodes WHERE path = ''") is not None

    # what changed

    def note(
        self, old: Mapping[ItemId, ItemRow], rows: Sequence[ItemRow], gone: Iterable[ItemId], tally: Tally
    ) -> None:
        """Rows are about to take the place of others, and some to go."""
        if not self.known:
            return
        changed: set[Placement] = set()
        for row in rows:
            before = old.get(row.item)
            if before is None or (before.origin, before.inception) != (row.origin, row.inception):
                changed.update(placements_in(row))
                changed.update(placements_in(before) if before is not None else ())
        for item in gone:
            changed.update(placements_in(old[item]) if item in old else ())
        if changed:
            fresh = changed - self._noted(changed)
            tally.add(Group.PLACEMENTS, b"", sum(map(crc32, fresh)), len(fresh))
            self._db.insert("INSERT INTO placement_dirty VALUES (?)", ((each,) for each in fresh))

    def _noted(self, placements: Iterable[Placement]) -> set[Placement]:
        """Those of some placements that were noted before."""
        todo, found = iter(placements), set[Placement]()
        while some := list(islice(todo, LOOK_UP_ROWS)):
            marks = ",".join("?" * len(some))
            rows = self._db.rows(f"SELECT placement FROM placement_dirty WHERE placement IN ({marks})", some)
            found.update(row[0] for row in rows)
        return found

    def dirty(self) -> list[Placement]:
        """Placements that came or went since the tree was last brought up to date."""
        found = [row[0] for row in self._db.rows("SELECT placement FROM placement_dirty")]
        sound = all(isinstance(each, bytes) and len(each) == PLACEMENT_BYTES for each in found)
        if not sound or not tallied(self._db, Group.PLACEMENTS, b"", len(found), sum(map(crc32, found))):
            raise self.damage("its list of changed placements is not what was written")
        return found

    # what is there

    def here(self, placements: Iterable[Placement]) -> set[Placement]:
        """Those of some placements that items have now."""
        wanted = set(placements)
        todo, found = iter({placed(each)[1] for each in wanted}), set[Placement]()
        while some := list(islice(todo, LOOK_UP_ROWS)):
            rows = self._db.rows(f"SELECT * FROM items WHERE item IN ({','.join('?' * len(some))})", some)
            found.update(each for row in self._items(rows) for each in placements_in(row))
        return found & wanted

    def all(self) -> Iterator[Placement]:
        """Those of all items, a few rows at a time."""
        count, total, last = 0, 0, b""
        while rows := self._db.rows("SELECT * FROM items WHERE item > ? ORDER BY item LIMIT ?", (last, SCAN_ROWS)):
            for row in self._items(rows):
                count, total, last = count + 1, total + crc32(row.item), row.item
                yield from placements_in(row)
        if not tallied(self._db, Group.ALL, b"", count, total):
            raise self.damage(f"{count} items were found, and that is not how many there are")

    def _items(self, rows: Iterable[Row]) -> Iterator[ItemRow]:
        for row in rows:
            if not is_sealed(row):
                raise self.damage("a row is not what was written")
            yield ItemRow(*row[:-1])

    # the tree

    def node(self, path: str) -> TreeTop | None:
        row = self._db.row("SELECT path, cid, count, size, seal FROM placement_nodes WHERE path = ?", (path,))
        return None if row is None else self._top(row)

    def branches(self, path: str) -> list[tuple[str, TreeTop]]:
        below = [path + label for label in LABELS]
        sql = f"SELECT path, cid, count, size, seal FROM placement_nodes WHERE path IN ({','.join('?' * len(below))})"
        found = {row[0]: self._top(row) for row in self._db.rows(sql, below)}
        return [(each[-1], found[each]) for each in below if each in found]

    def _top(self, row: Row) -> TreeTop:
        if not is_sealed(row):
            raise self.damage("a node of the placement tree is not what was written")
        return TreeTop(Cid(row[1]), row[2], row[3])

    def forget(self) -> None:
        """Blobs of the tree are gone: the next one is made from all items."""
        with self._db.transaction():
            self._db.execute("DELETE FROM placement_nodes")
        self.known = False

    def save(self, nodes: "PlacementChanges") -> None:
        """The tree is up to date."""
        if nodes.anew:
            self._db.execute("DELETE FROM placement_nodes")
        for path in nodes.forgotten:
            bounds = (path, path + BELOW_END)
            self._db.execute("DELETE FROM placement_nodes WHERE path >= ? AND path < ?", bounds)
        rows = ((path, top.cid, top.count, top.size) for path, top in nodes.kept.items())
        sealed = ((*row, seal_of(row)) for row in rows)
        self._db.insert("INSERT OR REPLACE INTO placement_nodes VALUES (?,?,?,?,?)", sealed)
        self._db.execute("DELETE FROM placement_dirty")
        set_tally(self._db, Group.PLACEMENTS, b"", 0, 0)
        self.known = True


class PlacementChanges:
    """A NodeCache over the tree that was kept; its changes are in memory until they are saved."""

    def __init__(self, rows: PlacementRows, get: GetBlob | None = None, *, anew: bool = False) -> None:
        self._rows = rows
        self._get = get
        self._seen: dict[str, TreeTop | None] = {}
        self.anew = anew
        """Whether it takes the place of all nodes that were kept."""
        self.kept: dict[str, TreeTop] = {}
        self.forgotten: list[str] = []

    def node(self, path: str) -> TreeTop | None:
        if path not in self._seen:
            self._seen[path] = self._rows.node(path)
        return self._seen[path]

    def branches(self, path: str) -> list[tuple[str, TreeTop]]:
        found = self._rows.branches(path)
        self._seen.update((path + label, top) for label, top in found)
        return found

    def keep(self, path: str, top: TreeTop) -> None:
        self.kept[path] = top

    def forget(self, path: str) -> None:
        # An update forgets a path before it keeps anything below it, so nothing in `kept` is affected.
        self.forgotten.append(path)

    def placements(self, path: Path) -> list[Placement]:
        """What was at or below a path; LostPage when that can't be read."""
        found: list[Placement] = []
        waiting = [path]
        while waiting:
            here = waiting.pop()
            top = self.node(here)
            if top is None:
                continue
            if is_run(here) or is_page(len(here), top.count, top.size):
                found += self._page(here, top)
            else:
                waiting += [here + label for label, _ in self.branches(here)]
        return found

    def _page(self, path: Path, top: TreeTop) -> tuple[Placement, ...]:
        try:
            found = page_placements(self._get(top.cid)) if self._get is not None else ()
        except (NotFound, Corrupt, MalformedNode) as error:
            raise LostPage(path) from error
        if len(found) != top.count:
            raise LostPage(path)
        return found


class LostPage(Exception):
    """A page of the placement tree is not here, or damaged: the tree has to be made from all items."""


def placements_in(row: ItemRow) -> tuple[Placement, ...]:
    return placements_of(row.item, row.origin, row.inception or b"")
