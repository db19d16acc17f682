"""States that an ItemStore does not hold a second time, because the pages of its snapshot tree have them.

    items.db   lent ( start of an item's key )      nodes ( path -> CID )
                      |                                        |
    blobs.db          `------------- page at that path ◄-------'        the item's bytes, as they stand there

An item is lent by gc and held again from its next write on. What is lent is in the tree that `nodes` names: a change
of the tree takes it along, because it asks for all items of a page. A page that is lost or damaged is no damage of
items.db, so nothing is made anew for it: it has to come from another member.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import islice

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.snapshot import (
    BELOW_END,
    NIBBLES,
    SPANS,
    Path,
    is_page,
    is_run,
    key_bounds,
    within,
)
from echostore.store.row_checks import is_sealed
from echostore.store.sqlite import Database, Row
from echostore.wire.cids import cid_text
from echostore.wire.tree_nodes import MalformedNode, small_items

LENT_SINCE = 6
"""The version of the tables since which there are such states."""

LOOK_UP_ROWS = 500
"""Rows that one statement looks up by key."""

_FIRST_LOOK = 17
"""The top and what may stand in the four levels below: no party has so many items that a page lies deeper."""

_NUMBER_BYTES = 8
_HALF = 1 << 8 * _NUMBER_BYTES - 1

GetBlob = Callable[[Cid], bytes]


class LentStates:
    """The states of one items.db that are in its tree."""

    def __init__(self, database: Database, damage: Callable[[str], Corrupt]) -> None:
        self._db = database
        self._damage = damage
        self.get: GetBlob | None = None
        """Where the pages are; who opens the party says."""
        self.any = False
        """Whether there are any: where there are none, nothing is asked for."""
        if database.version >= LENT_SINCE:
            self.any = database.row("SELECT 1 FROM lent LIMIT 1") is not None

    def has(self, item: ItemId) -> bool:
        return self.any and self._db.row("SELECT 1 FROM lent WHERE no = ?", (number_of(item),)) is not None

    def state(self, item: ItemId) -> bytes:
        """The state of an item that is lent."""
        path, cid = self._page_of(sha256(item).hexdigest())
        found = self._items_in(path, cid).get(item)
        if found is None:
            raise self._damage(f"item {item.hex()} is in no page of the snapshot tree")
        return found

    def under(self, path: Path) -> list[tuple[ItemId, bytes]]:
        """All that are lent below a path of the tree."""
        if not self.any:
            return []
        first, last = (_number(bytes.fromhex(bound)) for bound in key_bounds(path))
        rows = self._db.rows("SELECT no FROM lent WHERE no >= ? AND no <= ?", (first, last))
        missing = {row[0] for row in rows}
        found: list[tuple[ItemId, bytes]] = []
        for page, cid in self._pages(path) if missing else ():
            for item, state in self._items_in(page, cid).items():
                number = number_of(item)
                if number in missing:
                    missing.remove(number)
                    found.append((item, state))
        if missing:
            raise self._damage(f"{len(missing)} items below {path!r} are in no page of the snapshot tree")
        return found

    def pages(self) -> Iterator[tuple[Path, Mapping[ItemId, bytes]]]:
        """Every page of the tree, with the items that stand in it whole."""
        for path, cid in self._pages(""):
            yield path, self._items_in(path, cid)

    def add(self, items: Iterable[ItemId]) -> list[ItemId]:
        """Say of items that they are lent, inside a transaction; returns those of which that could be said."""
        added = []
        for item in items:
            number = number_of(item)
            if self._db.row("SELECT 1 FROM lent WHERE no = ?", (number,)) is None:  # two keys may begin alike
                self._db.execute("INSERT INTO lent VALUES (?)", (number,))
                added.append(item)
        self.any = self.any or bool(added)
        return added

    def drop(self, items: Iterable[ItemId]) -> None:
        """These are held again, or gone. Inside a transaction."""
        if self.any:
            self._db.insert("DELETE FROM lent WHERE no = ?", ((number_of(item),) for item in items))

    # pages

    def _page_of(self, key: str) -> tuple[Path, Cid]:
        """The page that has the item with a key: from the top down, four looks at most for each level."""
        paths = (above + label for above in _prefixes(key) for label in _labels(key, len(above)))
        waiting = iter(["", *paths])
        while some := list(islice(waiting, _FIRST_LOOK)):
            for row in self._rows(f"path IN ({','.join('?' * len(some))})", some):
                if _is_page(row):
                    return row[0], Cid(row[1])
        raise self._damage("the snapshot tree has no page for an item that it should have")

    def _pages(self, path: Path) -> list[tuple[Path, Cid]]:
        """The pages at or below a path; the one above it where there are none."""
        places = [path[:-1] + label for label in within(path[-1:])] if path else [""]
        bounds = [bound for place in places for bound in (place, place + BELOW_END)]
        rows = self._rows(" OR ".join(["(path >= ? AND path < ?)"] * len(places)), bounds)
        pages = [(row[0], Cid(row[1])) for row in rows if _is_page(row)]
        return pages or [self._page_of(key_bounds(path)[0])]

    def _rows(self, where: str, parameters: list[str]) -> list[Row]:
        rows = self._db.rows(f"SELECT path, cid, count, size, seal FROM nodes WHERE {where} ORDER BY path", parameters)
        if not all(map(is_sealed, rows)):
            raise self._damage("a node of the snapshot tree is not what was written")
        return rows

    def _items_in(self, path: Path, cid: Cid) -> Mapping[ItemId, bytes]:
        try:
            if self.get is None:
                raise NotFound("The blobs of the party are not here.")
            return small_items(self.get(cid))
        except (NotFound, Corrupt, MalformedNode) as error:
            raise Corrupt(
                f"The page {cid_text(cid)} at {path!r} of the snapshot tree is not here, or damaged: {error}",
                unchanged="Items of other pages can be read.",
                next_step="Connect to a member, and it is fetched again: `echostore serve`, or `echostore epoch fetch` of its epoch.",
            ) from error


def number_of(item: ItemId) -> int:
    """The start of an item's key as an integer of SQLite; in the order of keys."""
    return _number(sha256(item).digest())


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_NUMBER_BYTES], "big") - _HALF


def _is_page(row: Row) -> bool:
    path, _, count, size, _ = row
    return is_run(path) or is_page(len(path), count, size)


def _prefixes(key: str) -> Iterator[str]:
    return (key[:depth] for depth in range(2 * _NUMBER_BYTES))


_LABELS = {nibble: [label for label, span in SPANS.items() if nibble in span] for nibble in NIBBLES}


def _labels(key: str, depth: int) -> list[str]:
    """The labels of branches below which the key may lie."""
    return _LABELS[key[depth]]
