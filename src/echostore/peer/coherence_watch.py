"""The indexes that a root watches: each is a live query whose answer is kept as bytes.

    changed items --> which indexes can they concern? --> those live queries --> new values, where they differ

An index of one type is found by what it pins down, an item by the indexes it is in, so that the cost of a change does
not grow with how many other indexes there are:

    (type, field, value)    type = T and field = const
    (type, -, -)            type = T and anything else
    item                    one item, and all indexes that hold it now

The others (queries that walk, or name no type) are all looked at; there are at most `SCANNED_MAX`.

Everything here runs under the peer's lock.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import replace
from typing import TypeVar

from echostore.kernel.coherence.messages import IndexValue, Spec
from echostore.kernel.errors import EchoError, TooLarge
from echostore.kernel.ids import ItemId
from echostore.kernel.query.fields import ITEM, reader
from echostore.kernel.query.filters import Compare, Op
from echostore.kernel.query.live import LiveQuery
from echostore.kernel.query.order import order_key
from echostore.kernel.query.source import Deleted, Row, Source
from echostore.kernel.query.spec import QuerySpec, Stage
from echostore.kernel.values import Reference, Value, check_value
from echostore.peer.coherence_fields import FieldSource
from echostore.wire.generated import index_pb2
from echostore.wire.index_spec import ITEMS_MAX, IndexItem, IndexQuery, index_value, seal_statement
from echostore.wire.models import CODECS

SCANNED_MAX = 1000
"""Indexes that every change is held against. One more takes the place of the oldest."""

VALUE_BYTES_MAX = 15 * 1024 * 1024
"""One value has to fit a frame."""

Key = tuple[str, str | None, Hashable]
K = TypeVar("K", bound=Hashable)


class WatchedIndex:
    """One live answer, and its bytes."""

    def __init__(self, spec: Spec, asked: IndexQuery, source: Source, make: Callable[[Row], IndexItem]) -> None:
        self.spec = spec
        self.asked = asked
        self._source = source
        self._make = make
        query = _live_query(asked)
        reads = [(str(field), reader(field)) for field in query.select or ()]
        self._project = None if query.select is None else (lambda row: {name: read(row) for name, read in reads})
        self.key, self.item = _key(asked)
        self.live = LiveQuery(query, source)
        self.live.start()
        self._shown: dict[ItemId, IndexItem] = {}
        self._pieces: dict[ItemId, bytes] = {}
        self._order: list[ItemId] = []

    def update(self, changed: Set[ItemId]) -> bool:
        """Follow a change; whether the value is another one now. TooLarge when it grew too large."""
        self.live.update(changed)
        return self.refresh(changed)

    def refresh(self, changed: Set[ItemId]) -> bool:
        order = self.live.items()
        if len(order) > ITEMS_MAX:
            raise TooLarge(f"more than {ITEMS_MAX} items match")
        pieces = self._pieces
        differs = order != self._order
        for item in order:
            if item in changed or item not in pieces:
                piece = self._piece(item)
                differs = differs or pieces.get(item) != piece
                pieces[item] = piece
        if differs:
            self._order = order
            inside = set(order)
            for item in [item for item in pieces if item not in inside]:
                del pieces[item]
                self._shown.pop(item, None)
            if sum(map(len, pieces.values())) > VALUE_BYTES_MAX:
                raise TooLarge(f"a value of more than {VALUE_BYTES_MAX} bytes")
        return differs

    def value(self, sign: Callable[[bytes], bytes]) -> IndexValue:
        """The bytes: those of the items one after the other are those of the whole."""
        items = b"".join([self._pieces[item] for item in self._order])
        if not self.asked.sealed:
            return IndexValue(items)
        shown = [self._shown[item] for item in self._order]
        seal = index_pb2.IndexValue(seal=sign(seal_statement(self.spec, shown)))
        return IndexValue(items + seal.SerializeToString(deterministic=True))

    def _piece(self, item: ItemId) -> bytes:
        row = self._source.row(item)
        assert row is not None, f"a member without a row: {item.hex()}"
        made = self._make(row)
        if self._project is not None:
            made = replace(made, values=self._project(row))
        if self.asked.sealed:
            self._shown[item] = made
        return index_value([made])


class IndexWatch:
    """All watched indexes of one party."""

    def __init__(self, source: Source, *, sign: Callable[[bytes], bytes], record: Callable[[ItemId], bytes]) -> None:
        self._source = FieldSource(source)
        self._sign = sign
        self._record = record
        self._watched: dict[Spec, WatchedIndex] = {}
        self._by_key: dict[Key, set[Spec]] = defaultdict(set)
        self._fields: dict[str, dict[str, int]] = defaultdict(dict)
        """By type: the fields that some index pins down, with how many do."""
        self._by_item: dict[ItemId, set[Spec]] = defaultdict(set)
        self._scanned: dict[Spec, None] = {}
        self.evaluations = 0
        """How many answers were made from nothing."""

    def __len__(self) -> int:
        return len(self._watched)

    def __contains__(self, spec: Spec) -> bool:
        return spec in self._watched

    def asked(self, spec: Spec) -> IndexQuery | None:
        """What a watched index is asked for."""
        found = self._watched.get(spec)
        return None if found is None else found.asked

    def oldest(self) -> Spec:
        return next(iter(self._watched))

    def watch(self, spec: Spec, asked: IndexQuery) -> tuple[IndexValue, Spec | None]:
        """The value now, kept up to date from here on; and the index that gave way for it, if one had to."""
        found = self._watched.get(spec)
        if found is None:
            self.evaluations += 1
            found = WatchedIndex(spec, asked, self._source, self._maker(asked.sealed))
            found.refresh(frozenset())
            self._watched[spec] = found
            self._index(found)
        gives_way = None
        if len(self._scanned) > SCANNED_MAX:
            gives_way = next(iter(self._scanned))
            self.unwatch(gives_way)
        return found.value(self._sign), gives_way

    def unwatch(self, spec: Spec) -> None:
        found = self._watched.pop(spec, None)
        if found is None:
            return
        self._scanned.pop(spec, None)
        if found.key is not None:
            _drop(self._by_key, found.key, spec)
            type, field, _ = found.key
            if field is not None:
                count = self._fields[type][field] - 1
                self._fields[type][field] = count
                if not count:
                    del self._fields[type][field]
                if not self._fields[type]:
                    del self._fields[type]
        if found.item is not None:
            _drop(self._by_item, found.item, spec)
        for item in found.live.members:
            _drop(self._by_item, item, spec)

    def changed(self, items: Set[ItemId]) -> tuple[list[tuple[Spec, IndexValue]], list[Spec]]:
        """The indexes whose values are other ones now, and those that are too large from now on."""
        with self._source.still():
            self._source.changed(items)
            return self._follow(items)

    def _follow(self, items: Set[ItemId]) -> tuple[list[tuple[Spec, IndexValue]], list[Spec]]:
        fresh: list[tuple[Spec, IndexValue]] = []
        overgrown: list[Spec] = []
        for spec, concerned in self._concerned(items).items():
            found = self._watched[spec]
            try:
                differs = found.update(concerned)
            except TooLarge:
                overgrown.append(spec)
                continue
            if spec not in self._scanned:
                self._settle(found, concerned)
            if differs:
                fresh.append((spec, found.value(self._sign)))
        for spec in overgrown:
            self.unwatch(spec)
        return fresh, overgrown

    def _concerned(self, items: Set[ItemId]) -> dict[Spec, set[ItemId]]:
        concerned: dict[Spec, set[ItemId]] = {spec: set(items) for spec in self._scanned}
        for item in items:
            specs = set(self._by_item.get(item, ()))
            row = self._source.row(item)
            if row is not None:
                specs |= self._by_key.get((row.type, None, None), set())
                for field in self._fields.get(row.type, ()):
                    if field in row.values:
                        specs |= self._by_key.get((row.type, field, order_key(row.values[field])), set())
            for spec in specs:
                concerned.setdefault(spec, set()).add(item)
        return concerned

    def _index(self, found: WatchedIndex) -> None:
        if found.key is not None:
            type, field, _ = found.key
            self._by_key[found.key].add(found.spec)
            if field is not None:
                self._fields[type][field] = self._fields[type].get(field, 0) + 1
        elif found.item is not None:
            self._by_item[found.item].add(found.spec)
        else:
            self._scanned[found.spec] = None
            return
        self._settle(found, found.live.members)

    def _settle(self, found: WatchedIndex, items: Iterable[ItemId]) -> None:
        """Remember which items an index holds: one that stops to match is found by that alone."""
        members = found.live.members
        for item in items:
            if item in members or item == found.item:
                self._by_item[item].add(found.spec)
            else:
                _drop(self._by_item, item, found.spec)

    def _maker(self, sealed: bool) -> Callable[[Row], IndexItem]:
        record = self._record if sealed else None

        def make(row: Row) -> IndexItem:
            return IndexItem(
                item=row.item,
                type=row.type,
                model=row.model,
                values=_plain(row),
                parent=row.parent,
                deleted=row.deleted,
                source=row.source,
                target=row.target,
                record=b"" if record is None else record(row.item),
            )

        return make


def _drop(index: dict[K, set[Spec]], key: K, spec: Spec) -> None:
    specs = index.get(key)
    if specs is not None:
        specs.discard(spec)
        if not specs:
            del index[key]


def _live_query(asked: IndexQuery) -> QuerySpec:
    """The query to keep; without a limit, one item more than a value may hold shows that it is too large."""
    if asked.item is not None:
        return QuerySpec((Stage(filter=Compare(ITEM, Op.EQ, Reference(asked.item)), deleted=Deleted.SHOW),))
    assert asked.query is not None, "a spec is a query or an item"
    return asked.query if asked.query.limit is not None else replace(asked.query, limit=ITEMS_MAX + 1)


def _key(asked: IndexQuery) -> tuple[Key | None, ItemId | None]:
    """What pins an index down, for `IndexWatch`; neither when nothing does."""
    if asked.item is not None:
        return None, asked.item
    assert asked.query is not None, "a spec is a query or an item"
    if len(asked.query.stages) != 1:
        return None, None
    hints = asked.query.hints()
    if hints.item is not None:
        return None, hints.item
    if hints.type is None:
        return None, None
    for field in sorted(hints.equals):
        return (hints.type, field, order_key(hints.equals[field])), None
    return (hints.type, None, None), None


def _plain(row: Row) -> dict[str, Value]:
    """A row's values; those of a model of one's own may be anything, and what is no value is not shown."""
    values = dict(row.values)
    if row.model in CODECS or row.model == "property-set":
        return values
    try:
        plain = check_value(values, where=row.model)
    except EchoError:
        return {}
    assert isinstance(plain, dict), plain
    return plain
