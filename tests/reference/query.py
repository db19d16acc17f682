"""Queries the slow way: every item is looked at, every pair compared, nothing is kept.

`Graph` is a party in dictionaries. It is a `Source` (with indexes, so that live queries can be measured over it) and
collects the changed ids of a batch. `answer` is the oracle: it reads only `Graph.rows` and `Graph.embeddings`, and
shares no algorithm with the kernel: no sort keys, no normal form, no running sums.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cmp_to_key
from math import copysign, inf, isinf, isnan, nan
from typing import Any

from echostore.kernel.ids import SYSTEM_TYPE, FeedId, ItemId, PartyKey, Stamp, item_id
from echostore.kernel.query.fields import Field
from echostore.kernel.query.filters import And, Compare, Filter, Not, Op, Or
from echostore.kernel.query.source import Deleted, Row
from echostore.kernel.query.spec import QuerySpec, Reducer, Step
from echostore.kernel.values import BlobRef, Reference, Value

FEED = FeedId(b"feed-one")


def item(number: int) -> ItemId:
    return item_id(FEED, number)


def clock(target: ItemId) -> int | None:
    """When items were made, by clocks that disagree with the order of their ids, that stand still or show nonsense."""
    return (1_000, None, 10**18, 999, 1_000, 2_500)[target[-1] % 6]


class Graph:
    """A party in dictionaries. Rows hand out the live mapping of values, as the real one may."""

    def __init__(self) -> None:
        self.rows: dict[ItemId, Row] = {}
        self.embeddings: set[tuple[ItemId, ItemId]] = set()  # (outer, inner), besides home parents
        self.changed: set[ItemId] = set()
        self.reads = 0
        self._types: dict[str, set[ItemId]] = defaultdict(set)
        self._children: dict[ItemId, set[ItemId]] = defaultdict(set)
        self._inner: dict[ItemId, set[ItemId]] = defaultdict(set)
        self._outer: dict[ItemId, set[ItemId]] = defaultdict(set)
        self._links: dict[ItemId, set[ItemId]] = defaultdict(set)
        self._referrers: dict[ItemId, set[ItemId]] = defaultdict(set)

    def take_changed(self) -> set[ItemId]:
        changed, self.changed = self.changed, set()
        return changed

    # writing

    def create(
        self,
        number: int,
        type: str = "task",
        parent: ItemId | None = None,
        *,
        source: ItemId | None = None,
        target: ItemId | None = None,
        target_party: PartyKey | None = None,
        **values: Value,
    ) -> ItemId:
        new = item(number)
        stamp = Stamp(number, FEED, number, 0)
        row = Row(new, type, "property-set", parent, False, values, source, target, target_party, stamp, time_of=clock)
        self.remove(new)
        self._put(row)
        return new

    def write(self, target: ItemId, name: str, value: Value) -> None:
        self._unreference(target)
        self.rows[target].values[name] = value  # type: ignore[index]  # the live mapping is a dict
        self._reference(target)

    def erase(self, target: ItemId, name: str) -> None:
        self._unreference(target)
        self.rows[target].values.pop(name, None)  # type: ignore[attr-defined]  # as above
        self._reference(target)

    def move(self, target: ItemId, parent: ItemId | None) -> None:
        self._put(replace(self._take(target), parent=parent))

    def delete(self, target: ItemId, deleted: bool = True) -> None:
        self._put(replace(self._take(target), deleted=deleted))

    def retype(self, target: ItemId, type: str) -> None:
        self._put(replace(self._take(target), type=type))

    def embed(self, outer: ItemId, inner: ItemId, embedded: bool = True) -> None:
        self.changed |= {outer, inner}
        if embedded:
            self.embeddings.add((outer, inner))
            self._inner[outer].add(inner)
            self._outer[inner].add(outer)
        else:
            self.embeddings.discard((outer, inner))
            self._inner[outer].discard(inner)
            self._outer[inner].discard(outer)

    def remove(self, target: ItemId) -> None:
        """The item is gone altogether, as when its block was excluded."""
        if target in self.rows:
            self._take(target)

    def _put(self, row: Row) -> None:
        row = replace(row, system=row.type == SYSTEM_TYPE and row.item == item(0))
        self.rows[row.item] = row
        self._types[row.type].add(row.item)
        if row.parent is not None:
            self._children[row.parent].add(row.item)
        for end in self._ends(row):
            self._links[end].add(row.item)
        self.changed |= {row.item, *filter(None, (row.parent,)), *self._ends(row)}
        self._reference(row.item)

    def _take(self, target: ItemId) -> Row:
        self._unreference(target)
        row = self.rows.pop(target)
        self._types[row.type].discard(target)
        if row.parent is not None:
            self._children[row.parent].discard(target)
        for end in self._ends(row):
            self._links[end].discard(target)
        self.changed |= {target, *filter(None, (row.parent,)), *self._ends(row)}
        return row

    def _reference(self, target: ItemId) -> None:
        for other in self.references(target):
            self._referrers[other].add(target)
            self.changed.add(other)
        self.changed.add(target)

    def _unreference(self, target: ItemId) -> None:
        for other in self.references(target):
            self._referrers[other].discard(target)
            self.changed.add(other)
        self.changed.add(target)

    @staticmethod
    def _ends(row: Row) -> set[ItemId]:
        return {end for end in (row.source, None if row.target_party else row.target) if end is not None}

    # the Source

    def row(self, target: ItemId) -> Row | None:
        self.reads += 1
        return self.rows.get(target)

    def scan(
        self, *, type: str | None, parent: ItemId | None, equals: Mapping[str, Value], deleted: Deleted
    ) -> Iterable[ItemId]:
        if parent is not None:
            return tuple(self._children[parent])
        return tuple(self.rows) if type is None else tuple(self._types[type])

    def children(self, target: ItemId) -> Iterable[ItemId]:
        return tuple(self._children[target])

    def embedded(self, target: ItemId) -> Iterable[ItemId]:
        return (*self._children[target], *self._inner[target])

    def embedders(self, target: ItemId) -> Iterable[ItemId]:
        row = self.rows.get(target)
        return (*((row.parent,) if row and row.parent else ()), *self._outer[target])

    def links(self, target: ItemId) -> Iterable[ItemId]:
        return tuple(self._links[target])

    def references(self, target: ItemId) -> Iterable[ItemId]:
        row = self.rows.get(target)
        return () if row is None else tuple(sorted(set(_references(row.values))))

    def referrers(self, target: ItemId) -> Iterable[ItemId]:
        return tuple(self._referrers[target])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query shows: (token, projected values) in order, or (by, value) of groups."""

    lines: tuple[tuple[Any, ...], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and _same(self.lines, other.lines)

    @property
    def tokens(self) -> list[Any]:
        return [line[0] for line in self.lines]


def answer(spec: QuerySpec, graph: Graph) -> Answer:
    return answer_of_parties(spec, {None: graph})


def answer_of_parties(spec: QuerySpec, graphs: Mapping[Any, Graph]) -> Answer:
    """The oracle over one party (named None) or several: tokens are item ids, or (party, item id)."""
    found = []
    for party, graph in graphs.items():
        for row in _stages(spec, graph):
            found.append((row.item if party is None else (party, row.item), row))
    found.sort(key=cmp_to_key(lambda one, other: _before(spec, one, other)))
    if spec.limit is not None:
        found = found[: spec.limit]
    if spec.reduce is None:
        return Answer(tuple((token, *shown(spec, row)) for token, row in found))
    groups: list[tuple[Value, list[tuple[Any, Value]]]] = [] if spec.reduce.by else [(None, [])]
    for token, row in found:
        by = read(row, spec.reduce.by) if spec.reduce.by else None
        group = next((members for known, members in groups if compare(known, by) == 0), None)
        if group is None:
            groups.append((by, group := []))
        group.append((token, read(row, spec.reduce.field) if spec.reduce.field else True))
    groups.sort(key=cmp_to_key(lambda one, other: compare(one[0], other[0])))
    return Answer(tuple((_whole(by), _reduce(spec.reduce.reducer, members)) for by, members in groups))


def shown(spec: QuerySpec, row: Row) -> tuple[Value, ...]:
    if spec.select is not None:
        return tuple(read(row, field) for field in dict.fromkeys(spec.select))  # a field named twice is shown once
    ends = (row.source, row.target, row.target_party)
    return (dict(row.values), row.type, row.model, row.parent, row.deleted, *ends, row.created, row.view_class)


def read(row: Row, field: Field) -> Value:
    return _find(row, field)[1]


def passes(row: Row, condition: Filter) -> bool:
    if isinstance(condition, Not):
        return not passes(row, condition.part)
    if isinstance(condition, And):
        return all(passes(row, part) for part in condition.parts)
    if isinstance(condition, Or):
        return any(passes(row, part) for part in condition.parts)
    assert isinstance(condition, Compare)
    there, value = _find(row, condition.field)
    wanted = condition.value
    match condition.op:
        case Op.EXISTS:
            return there
        case Op.EQ:
            return compare(value, wanted) == 0
        case Op.IN:
            return any(compare(value, each) == 0 for each in wanted)
        case Op.CONTAINS:
            if isinstance(value, (str, bytes)):
                return type(value) is type(wanted) and wanted in value
            if isinstance(value, list):
                return any(compare(each, wanted) == 0 for each in value)
            return isinstance(value, dict) and isinstance(wanted, str) and wanted in value
        case Op.STARTSWITH:
            return type(value) is type(wanted) and value.startswith(wanted)
    if _kind(value) != _kind(wanted):
        return False
    sign = compare(value, wanted)
    return {Op.LT: sign < 0, Op.LE: sign <= 0, Op.GT: sign > 0, Op.GE: sign >= 0}[condition.op]


def compare(one: Value, other: Value) -> int:
    """-1, 0 or 1 in the total order of values."""
    kinds = _kind(one), _kind(other)
    if kinds[0] != kinds[1]:
        return -1 if kinds[0] < kinds[1] else 1
    if kinds[0] in (0, 3):  # null, NaN
        return 0
    if isinstance(one, Reference):
        return _sign((one.party or b"", one.item), (other.party or b"", other.item))
    if isinstance(one, BlobRef):
        return _sign(
            (one.cids, one.size, one.media_type, one.name), (other.cids, other.size, other.media_type, other.name)
        )
    if isinstance(one, dict):
        pairs = [[[key, each[key]] for key in sorted(each)] for each in (one, other)]
        return compare(pairs[0], pairs[1])
    if isinstance(one, list):
        for left, right in zip(one, other, strict=False):
            if sign := compare(left, right):
                return sign
        return _sign(len(one), len(other))
    return _sign(one, other)


def _sign(one: Any, other: Any) -> int:
    return (one > other) - (one < other)


def _kind(value: Value) -> int:
    if isinstance(value, float) and isnan(value):
        return 3
    if value is None or isinstance(value, bool):
        return 0 if value is None else 1
    kinds = ((int, float), (), str, bytes, datetime, Reference, BlobRef, list, dict)
    return next(number for number, kind in enumerate(kinds, 2) if isinstance(value, kind))


def _find(row: Row, field: Field) -> tuple[bool, Value]:
    if field.attribute:
        if field.steps[0] == "created":
            shown_ms = row.time_of(row.item)
            sane = shown_ms is not None and shown_ms < 10**14
            return sane, datetime.fromtimestamp(shown_ms / 1000, UTC) if sane else None
        value = getattr(row, field.steps[0])
        if field.steps[0] in ("item", "parent", "source", "target") and value is not None:
            value = Reference(value, row.target_party if field.steps[0] == "target" else None)
        return value is not None, value
    value = row.values
    for step in field.steps:
        if not isinstance(value, dict) or step not in value:
            return False, None
        value = value[step]
    return True, value


def _stages(spec: QuerySpec, graph: Graph) -> list[Row]:
    rows: list[Row] = []
    for stage in spec.stages:
        reached = [row for row in graph.rows.values() if stage.step is Step.ALL or _leads(graph, stage.step, rows, row)]
        wanted = {Deleted.HIDE: (False,), Deleted.SHOW: (False, True), Deleted.ONLY: (True,)}[stage.deleted]
        reached = [row for row in reached if stage.wants_system or not row.system]
        rows = [row for row in reached if row.deleted in wanted and passes(row, stage.filter)]
    return rows


def _leads(graph: Graph, step: Step, rows: list[Row], y: Row) -> bool:
    """Whether any of the rows leads to y."""
    local = None if y.target_party else y.target
    tests = {
        Step.CHILDREN: lambda x: y.parent == x.item,
        Step.PARENT: lambda x: x.parent == y.item,
        Step.EMBEDDED: lambda x: y.parent == x.item or (x.item, y.item) in graph.embeddings,
        Step.LINKS: lambda x: x.item in (y.source, local),
        Step.SOURCE: lambda x: x.source == y.item,
        Step.TARGET: lambda x: x.target == y.item and x.target_party is None,
        Step.REFERENCES: lambda x: y.item in list(_references(x.values)),
        Step.REFERRERS: lambda x: x.item in list(_references(y.values)),
    }
    return any(tests[step](x) for x in rows)


def _references(value: Value) -> Iterator[ItemId]:
    if isinstance(value, Reference) and value.party is None:
        yield value.item
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _references(inner)


def _before(spec: QuerySpec, one: tuple[Any, Row], other: tuple[Any, Row]) -> int:
    for order in spec.order:
        sign = compare(read(one[1], order.field), read(other[1], order.field))
        if sign:
            return -sign if order.descending else sign
    return _sign(one[0], other[0])


def _reduce(reducer: Reducer, members: list[tuple[Any, Value]]) -> Value:
    members = [(token, value) for token, value in members if value is not None]
    if reducer is Reducer.COUNT:
        return len(members)
    if reducer in (Reducer.MIN, Reducer.MAX):
        members.sort(key=cmp_to_key(lambda one, other: compare(one[1], other[1]) or _sign(one[0], other[0])))
        return members[0 if reducer is Reducer.MIN else -1][1] if members else None
    numbers = [value for _, value in members if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if reducer is Reducer.MEAN and not numbers:
        return None
    if any(isnan(number) for number in numbers) or {inf, -inf} <= set(numbers):
        return nan
    infinite = [number for number in numbers if isinf(number)]
    if infinite:
        return infinite[0]
    total = sum(map(Fraction, numbers), Fraction(0))
    if reducer is Reducer.SUM and not any(isinstance(number, float) for number in numbers):
        return int(total)
    try:
        return float(total / len(numbers) if reducer is Reducer.MEAN else total)
    except OverflowError:
        return inf if total > 0 else -inf


def _whole(value: Value) -> Value:
    if isinstance(value, float) and not isnan(value) and not isinf(value) and value == int(value):
        return int(value) if -(2**63) <= value < 2**63 else value
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return {key: _whole(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from True and 1.0, and takes NaN for NaN."""
    if (isinstance(one, tuple) and isinstance(other, tuple)) or (isinstance(one, list) and isinstance(other, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return (isnan(one) and isnan(other)) or (one == other and copysign(1, one) == copysign(1, other))
    return type(one) is type(other) and one == other
