"""The answer to a query from nothing: scan, walk, order, limit, reduce.

`evaluate` answers for one party. `matches` and `finish` are its two halves; a query over several parties runs the
first half in each and the second over the union. Items are named by *tokens*: an item id, or (party, item id). Tokens
break ties, so that the order of a result is total.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_never

from echostore.kernel.ids import ItemId
from echostore.kernel.query.fields import reader
from echostore.kernel.query.filters import Test, compile_filter
from echostore.kernel.query.order import descending, order_key
from echostore.kernel.query.reduce import Group, Reduction
from echostore.kernel.query.source import Deleted, Row, Source
from echostore.kernel.query.spec import Order, QuerySpec, Stage, Step

T = TypeVar("T")

Entry = tuple[Any, ...]
"""What a result is sorted by: a key for each order field, then the token, in one flat tuple.

Flat, because comparing nested tuples follows one more pointer, which is a cache miss in a large result. That is sound:
two keys of one kind have one length, and keys of two kinds differ in their first element.
"""


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The items of an answer in order, with their rows; `groups` when the query reduces them."""

    rows: tuple[tuple[T, Row], ...]
    groups: tuple[Group, ...] | None = None

    @property
    def tokens(self) -> tuple[T, ...]:
        return tuple(token for token, _ in self.rows)


@dataclass(frozen=True, slots=True)
class StageCount:
    """How much one stage of a query looked at, and how much passed."""

    examined: int
    passed: int


def evaluate(spec: QuerySpec, source: Source) -> Result[ItemId]:
    """The answer of one party."""
    return finish(spec, ((row.item, row) for row in matches(spec, source)))


def matches(spec: QuerySpec, source: Source, counts: list[StageCount] | None = None) -> Sequence[Row]:
    """The rows that the last stage holds, each once, in no order; `counts` is filled for `explain`."""
    rows: list[Row] = []
    for stage in spec.stages:
        candidates = first_candidates(spec, source) if stage.step is Step.ALL else _walk(stage.step, source, rows)
        test = compile_stage(stage)
        examined, passed = 0, []
        for item in candidates:
            examined += 1
            row = source.row(item)
            if row is not None and test(row):
                passed.append(row)
        rows = passed
        if counts is not None:
            counts.append(StageCount(examined, len(passed)))
    return rows


def finish(spec: QuerySpec, rows: Iterable[tuple[T, Row]]) -> Result[T]:
    """Order, limit and reduce what the last stage holds."""
    entry = entry_maker(spec.order)
    if spec.reduce is not None and spec.limit is None:
        ordered: Sequence[tuple[T, Row]] = tuple(rows)  # no order can be seen
    elif spec.limit is not None:
        ordered = heapq.nsmallest(spec.limit, rows, key=lambda pair: entry(*pair))
    else:
        ordered = sorted(rows, key=lambda pair: entry(*pair))
    if spec.reduce is None:
        return Result(tuple(ordered))
    reduction: Reduction[T] = Reduction(spec.reduce)
    for token, row in ordered:
        reduction.put(token, row)
    return Result(tuple(ordered), reduction.groups())


def first_candidates(spec: QuerySpec, source: Source) -> Iterable[ItemId]:
    """A superset of the first stage's items, each once, from the narrowest index there is."""
    hints = spec.hints()
    if hints.item is not None:
        return (hints.item,)
    return dict.fromkeys(
        source.scan(type=hints.type, parent=hints.parent, equals=hints.equals, deleted=spec.stages[0].deleted)
    )


def compile_stage(stage: Stage) -> Test:
    """Whether a row passes the stage's filter, its rule for deleted items, and is not the unasked-for system item."""
    passes = compile_filter(stage.filter)
    test = passes if stage.wants_system else lambda row: not row.system and passes(row)
    if stage.deleted is Deleted.SHOW:
        return test
    if stage.deleted is Deleted.ONLY:
        return lambda row: row.deleted and test(row)
    return lambda row: not row.deleted and test(row)


def entry_maker(order: Sequence[Order]) -> Callable[[Any, Row], Entry]:
    """A function from a token and its row to what the result is sorted by."""
    parts = [(reader(each.field), descending if each.descending else None) for each in order]
    if not parts:
        return lambda token, row: (token,)
    if len(parts) == 1 and parts[0][1] is None:  # the common case, without a loop
        read = parts[0][0]
        return lambda token, row: (*order_key(read(row)), token)

    def entry(token: Any, row: Row) -> Entry:
        keys: list[Any] = []
        for read, turn in parts:
            key = order_key(read(row))
            keys.extend(key if turn is None else turn(key))
        keys.append(token)
        return tuple(keys)

    return entry


def edges_out(step: Step, source: Source, row: Row) -> Iterable[ItemId]:
    """The items that a step leads to from one row; some may be missing here, and one may come twice."""
    match step:
        case Step.CHILDREN:
            return source.children(row.item)
        case Step.PARENT:
            return () if row.parent is None else (row.parent,)
        case Step.EMBEDDED:
            return source.embedded(row.item)
        case Step.LINKS:
            return source.links(row.item)
        case Step.SOURCE:
            return () if row.source is None else (row.source,)
        case Step.TARGET:
            return () if row.target is None or row.target_party is not None else (row.target,)
        case Step.REFERENCES:
            return source.references(row.item)
        case Step.REFERRERS:
            return source.referrers(row.item)
        case Step.ALL:
            raise AssertionError("only the first stage starts with all items")
        case _:
            assert_never(step)


def _walk(step: Step, source: Source, rows: Iterable[Row]) -> Iterator[ItemId]:
    seen: set[ItemId] = set()
    for row in rows:
        for item in edges_out(step, source, row):
            if item not in seen:
                seen.add(item)
                yield item
