"""The indexes that a root watches: each is a live query whose answer is kept as bytes.

    changed items --> which indexes can they concern? --> those live queries --> new values, where they differ

An index of one type is found by what pins it down (coherence_questions), an item by the indexes it is in, so that the
cost of a change does not grow with how many other indexes there are. Those that are a type and one value of a field are
kept as little more than that value. The others (queries that walk, or name no type) are all looked at; there are at most
`SCANNED_MAX`.

Everything here runs under the peer's lock.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Protocol, TypeVar

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
from echostore.peer.coherence_questions import Key, Pin, Question, make_pin, pin_name, read_question
from echostore.wire.generated import index_pb2
from echostore.wire.index_spec import ITEMS_MAX, IndexItem, IndexQuery, index_value, seal_statement
from echostore.wire.models import CODECS

SCANNED_MAX = 1000
"""Indexes that every change is held against. One more takes the place of the oldest."""

PINS_MAX = 1024
"""Fields whose questions share what they have in common."""

VALUE_BYTES_MAX = 15 * 1024 * 1024
"""One value has to fit a frame."""

K = TypeVar("K", bound=Hashable)


class Watched(Protocol):
    """One live answer, and its bytes."""

    @property
    def spec(self) -> Spec: ...

    @property
    def asked(self) -> IndexQuery: ...

    @property
    def key(self) -> Key | None: ...

    @property
    def item(self) -> ItemId | None: ...

    @property
    def members(self) -> Set[ItemId]:
        """All items that match, also those beyond a limit."""

    def update(self, changed: Set[ItemId]) -> bool:
        """Follow a change; whether the value is another one now. TooLarge when it grew too large."""

    def value(self, sign: Callable[[bytes], bytes]) -> IndexValue:
        """The bytes now."""


class PinnedIndex:
    """The answer to a plain question. There may be a hundred thousand, so each is as few objects as can be."""

    __slots__ = ("_pieces", "_value", "_watch", "pin", "spec")

    def __init__(self, spec: Spec, pin: Pin, value: Value, watch: "IndexWatch") -> None:
        self.spec = spec
        self.pin = pin
        self._value = value
        self._watch = watch
        self._pieces: dict[ItemId, bytes] | None = None
        source = watch.source
        self.update(frozenset(source.scan(type=pin.type, parent=None, equals={pin.field: value}, deleted=pin.deleted)))

    @property
    def asked(self) -> IndexQuery:
        return self.pin.question(self._value)

    @property
    def key(self) -> Key:
        return self.pin.type, self.pin.field, order_key(self._value)

    @property
    def item(self) -> None:
        return None

    @property
    def members(self) -> Set[ItemId]:
        return self._pieces.keys() if self._pieces is not None else frozenset()

    def update(self, changed: Set[ItemId]) -> bool:
        pin, watch, key = self.pin, self._watch, order_key(self._value)
        pieces = self._pieces if self._pieces is not None else {}
        differs = False
        for item in changed:
            row = watch.source.row(item)
            if row is not None and pin.test(row) and order_key(row.values.get(pin.field)) == key:
                piece = index_value([watch.plain(row)])
                differs = differs or pieces.get(item) != piece
                pieces[item] = piece
                if len(pieces) > ITEMS_MAX:
                    break
            elif item in pieces:
                del pieces[item]
                differs = True
        self._pieces = pieces or None
        if differs:
            _check_size(pieces)
        return differs

    def value(self, sign: Callable[[bytes], bytes]) -> IndexValue:
        pieces = self._pieces
        return IndexValue(b"".join([pieces[item] for item in sorted(pieces)]) if pieces else b"")


class WatchedIndex:
    """The answer to any other question: a live query."""

    def __init__(self, spec: Spec, question: Question, source: Source, make: Callable[[Row], IndexItem]) -> None:
        self.spec = spec
        self.asked = asked = question.asked
        self._source = source
        self._make = make
        query = _live_query(asked)
        reads = [(str(field), reader(field)) for field in query.select or ()]
        self._project = None if query.select is None else (lambda row: {name: read(row) for name, read in reads})
        self.key, self.item = question.key, question.item
        self._live = LiveQuery(query, source)
        self._live.start()
        self._shown: dict[ItemId, IndexItem] = {}
        self._pieces: dict[ItemId, bytes] = {}
        self._order: list[ItemId] = []
        self._refresh(frozenset())

    @property
    def members(self) -> Set[ItemId]:
        return self._live.members

    def update(self, changed: Set[ItemId]) -> bool:
        self._live.update(changed)
        return self._refresh(changed)

    def _refresh(self, changed: Set[ItemId]) -> bool:
        order = self._live.items()
        if len(order) > ITEMS_MAX:
            raise _too_many()
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
            _check_size(pieces)
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
        self.source = FieldSource(source)
        self._sign = sign
        self._record = record
        self.plain = self._maker(sealed=False)
        """A row as an index shows it."""
        self._watched: dict[Spec, Watched] = {}
        self._pins: dict[tuple[str, str, Deleted], Pin] = {}
        self._question: Question | None = None
        """The last one: each step of an answer wants to know, and reading it is much of the work."""
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

    def type_of(self, asked: IndexQuery) -> str | None:
        """The only type whose items can concern an index; None when there may be several."""
        return self._read(asked).type

    def _read(self, asked: IndexQuery) -> Question:
        if self._question is None or self._question.asked is not asked:
            self._question = read_question(asked)
        return self._question

    def _made(self, spec: Spec, question: Question) -> Watched:
        if not question.plain:
            make = self._maker(sealed=True) if question.asked.sealed else self.plain
            return WatchedIndex(spec, question, self.source, make)
        pin = self._pins.get(pin_name(question))
        if pin is None:
            if len(self._pins) >= PINS_MAX:
                self._pins.clear()  # their indexes have them still
            pin = self._pins[pin_name(question)] = make_pin(question)
        return PinnedIndex(spec, pin, question.value, self)

    def watch(self, spec: Spec, asked: IndexQuery) -> tuple[IndexValue, Spec | None]:
        """The value now, kept up to date from here on; and the index that gave way for it, if one had to."""
        found = self._watched.get(spec)
        if found is None:
            self.evaluations += 1
            found = self._made(spec, self._read(asked))
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
        for item in found.members:
            _drop(self._by_item, item, spec)

    def changed(self, items: Set[ItemId]) -> tuple[list[tuple[Spec, IndexValue]], list[Spec]]:
        """The indexes whose values are other ones now, and those that are too large from now on."""
        with self.source.still():
            self.source.changed(items)
            return self._follow(items)

    def _follow(self, items: Set[ItemId]) -> tuple[list[tuple[Spec, IndexValue]], list[Spec]]:
        fresh: list[tuple[Spec, IndexValue]] = []
        overgrown: list[Spec] = []
        for spec, concerned in self._concerned(items).items():
            found = self._watched[spec]
            differs = False
            try:
                differs = found.update(concerned)
            except TooLarge:
                overgrown.append(spec)
            if spec not in self._scanned:  # also of one that is too large: what left it is found by nothing else
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
            row = self.source.row(item)
            if row is not None:
                specs |= self._by_key.get((row.type, None, None), set())
                for field in self._fields.get(row.type, ()):
                    if field in row.values:
                        specs |= self._by_key.get((row.type, field, order_key(row.values[field])), set())
            for spec in specs:
                concerned.setdefault(spec, set()).add(item)
        return concerned

    def _index(self, found: Watched) -> None:
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
        self._settle(found, found.members)

    def _settle(self, found: Watched, items: Iterable[ItemId]) -> None:
        """Remember which items an index holds: one that stops to match is found by that alone."""
        members = found.members
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


def _check_size(pieces: Mapping[ItemId, bytes]) -> None:
    if len(pieces) > ITEMS_MAX:
        raise _too_many()
    if sum(map(len, pieces.values())) > VALUE_BYTES_MAX:
        raise TooLarge(f"a value of more than {VALUE_BYTES_MAX} bytes")


def _too_many() -> TooLarge:
    return TooLarge(f"more than {ITEMS_MAX} items match")


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
