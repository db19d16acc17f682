"""FieldSource: items of one type by the value of a field, for a root that is asked `field = value` again and again.

    scan(type = T, field = v)  --> the items that have v now, and no others

A source finds items of a type, and looks at each of them for each question; a hundred thousand leaves that each watch
one value would make it read the whole type as often. After `ASKED_MIN` questions about a field of a type its values are
kept here, and followed: `changed` is told every item whose row is new, other or gone before anything is asked again.

Everything here runs under the peer's lock.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

from echostore.kernel.ids import ItemId
from echostore.kernel.query.order import order_key
from echostore.kernel.query.source import Deleted, Row, Source
from echostore.kernel.values import Value

ASKED_MIN = 8
"""Questions about a field before its values are kept: one question is not worth reading the type for."""

FIELDS_MAX = 16
"""Fields whose values are kept. One more takes the place of the one that was asked for longest ago."""

ITEMS_MAX = 500_000
"""Items of one field. A type with more is read each time."""

Field = tuple[str, str]
"""A type, and a property of its items."""


class FieldSource:
    """A source with quicker scans. See `kernel.query.source.Source`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._asked: dict[Field, int] = {}
        self._kept: dict[Field, _FieldValues] = {}
        """The one that was asked for last stands last."""
        self._rows: dict[ItemId, Row | None] | None = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Inside, nothing changes: each row is read once, however many indexes it concerns. May be entered again."""
        outer, self._rows = self._rows, {} if self._rows is None else self._rows
        try:
            yield
        finally:
            self._rows = outer

    def row(self, item: ItemId) -> Row | None:
        rows = self._rows
        if rows is None:
            return self._source.row(item)
        if item not in rows:
            rows[item] = self._source.row(item)
        return rows[item]

    def scan(
        self, *, type: str | None, parent: ItemId | None, equals: Mapping[str, Value], deleted: Deleted
    ) -> Iterable[ItemId]:
        if type is not None and equals:
            field = min(equals)
            values = self._values((type, field))
            if values is not None:
                return sorted(values.items.get(order_key(equals[field]), ()))
        return self._source.scan(type=type, parent=parent, equals=equals, deleted=deleted)

    def children(self, item: ItemId) -> Iterable[ItemId]:
        return self._source.children(item)

    def embedded(self, item: ItemId) -> Iterable[ItemId]:
        return self._source.embedded(item)

    def embedders(self, item: ItemId) -> Iterable[ItemId]:
        return self._source.embedders(item)

    def links(self, item: ItemId) -> Iterable[ItemId]:
        return self._source.links(item)

    def references(self, item: ItemId) -> Iterable[ItemId]:
        return self._source.references(item)

    def referrers(self, item: ItemId) -> Iterable[ItemId]:
        return self._source.referrers(item)

    def changed(self, items: Set[ItemId]) -> None:
        """These have other rows now, or none."""
        if not self._kept:
            return
        for item in items:
            row = self.row(item)
            for (type, field), values in list(self._kept.items()):
                values.put(item, row.values.get(field) if row is not None and row.type == type else None)
                if len(values.keys) > ITEMS_MAX:
                    del self._kept[type, field]

    def _values(self, field: Field) -> "_FieldValues | None":
        values = self._kept.pop(field, None)
        if values is None:
            count = self._asked.pop(field, 0) + 1
            if count < ASKED_MIN:
                self._asked[field] = count
                while len(self._asked) > 16 * FIELDS_MAX:
                    del self._asked[next(iter(self._asked))]
                return None
            values = self._read(field)
            if values is None:
                return None
        self._kept[field] = values
        while len(self._kept) > FIELDS_MAX:
            del self._kept[next(iter(self._kept))]
        return values

    def _read(self, field: Field) -> "_FieldValues | None":
        """The values of all items of a type; None when there are too many."""
        type, name = field
        values = _FieldValues()
        for item in self._source.scan(type=type, parent=None, equals={}, deleted=Deleted.SHOW):
            row = self._source.row(item)
            if row is not None and row.type == type:
                values.put(item, row.values.get(name))
                if len(values.keys) > ITEMS_MAX:
                    return None
        return values


class _FieldValues:
    """One field: items by value, and back."""

    __slots__ = ("items", "keys")

    def __init__(self) -> None:
        self.items: dict[Hashable, set[ItemId]] = defaultdict(set)
        self.keys: dict[ItemId, Hashable] = {}

    def put(self, item: ItemId, value: Value) -> None:
        """None is also what a missing property is, and is never asked for by an index."""
        key = None if value is None else order_key(value)
        before = self.keys.get(item)
        if key == before:
            return
        if before is not None:
            self.items[before].discard(item)
            if not self.items[before]:
                del self.items[before]
            del self.keys[item]
        if key is not None:
            self.items[key].add(item)
            self.keys[item] = key
