"""Query: what a person writes to ask a party, or several.

    party.query(type="board").children().where(done=False).order_by("-due").limit(10).all()

A query is a value: every call returns another one, nothing runs until a result is asked for, and each time it is asked
the answer is fresh. `subscribe` and `watch` follow the answer from then on. The party hands in a `SourceProvider`; how
queries are answered is the kernel's affair (`echostore.kernel.query`), how they are followed that of `query_live`, how
they become tables that of `query_arrow`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Generic, Literal, Self, TypeVar

from echostore.kernel.errors import NotFound, UsageError
from echostore.kernel.frozen import frozen
from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.query.doubts import doubts
from echostore.kernel.query.evaluate import Result, StageCount, finish, matches
from echostore.kernel.query.expressions import FieldExpression, comparisons, field
from echostore.kernel.query.fields import Field, FieldName, parse_field, reader
from echostore.kernel.query.filters import And, Compare, Filter, Not, Or, has_order
from echostore.kernel.query.live import Change, Token
from echostore.kernel.query.source import Deleted, Row
from echostore.kernel.query.spec import Order, QuerySpec, Reduce, Reducer, Stage, Step
from echostore.kernel.values import Value
from echostore.peer import arguments, query_arrow
from echostore.peer.query_live import Following, SourceProvider, Subscription, Watch

__all__ = ["Change", "MultiQuery", "Query", "SourceProvider", "Subscription", "Watch", "field", "query_over"]

I = TypeVar("I")  # noqa: E741  # the handle of an item, as the peer makes it
R = TypeVar("R")
AnyField = FieldName | FieldExpression
ReducerName = Literal["count", "sum", "min", "max", "mean"]


def query_over(provider: SourceProvider[I], /, *, type: str | None = None, **keywords: Value) -> "Query[I]":
    """What `party.query(type="task", done=False)` is."""
    start = Query(provider)
    if type is not None:
        start = start.where(type=type)
    return start.where(**keywords) if keywords else start


class MultiQuery(Generic[I]):
    """A query over several parties: the union of their answers, ordered, limited and reduced as one."""

    def __init__(self, providers: Iterable[SourceProvider[I]], spec: QuerySpec | None = None) -> None:
        self._providers = tuple(sorted(providers, key=lambda provider: provider.party))
        self.spec = (QuerySpec() if spec is None else spec).seen_from(self._only_party).check().normal()

    @property
    def _only_party(self) -> PartyKey | None:
        return self._providers[0].party if len(self._providers) == 1 else None

    def _with(self, **parts: Any) -> Self:
        """The same query with some parts of its spec replaced."""
        other = object.__new__(type(self))
        MultiQuery.__init__(other, self._providers, replace(self.spec, **parts))
        return other

    # conditions

    def where(self, /, *filters: Filter, **keywords: Value) -> Self:
        """Keep items that pass: `where(done=False, priority__ge=3)`, `where(field("a.b") >= 3)`."""
        self._must_be_open("where")
        for each in filters:
            if not isinstance(each, (Compare, And, Or, Not)):
                raise UsageError(
                    f"where wants filters, not {type(each).__name__}",
                    next_step='Write where(done=False) or where(field("done") == False).',
                )
        stage = self.spec.stages[-1]
        return self._last(replace(stage, filter=And((stage.filter, *filters, *comparisons(keywords)))))

    def deleted(self, rule: Literal["hide", "show", "only"]) -> Self:
        """Whether deleted items are hidden (as without this), shown too, or shown alone; for the last step."""
        self._must_be_open("deleted")
        if rule not in list(Deleted):
            raise UsageError(f"deleted is one of {', '.join(Deleted)}, not {rule!r}")
        return self._last(replace(self.spec.stages[-1], deleted=Deleted(rule)))

    # traversal

    def children(self) -> Self:
        """On to the items whose home parent is among these."""
        return self._walk(Step.CHILDREN)

    def parent(self) -> Self:
        """On to the home parents of these."""
        return self._walk(Step.PARENT)

    def embedded(self) -> Self:
        """On to the children of these, and what is embedded in them besides."""
        return self._walk(Step.EMBEDDED)

    def links(self, type: str | None = None) -> Self:
        """On to the links that start or end at these."""
        onward = self._walk(Step.LINKS)
        return onward if type is None else onward.where(type=type)

    def source(self) -> Self:
        """From links on to the items they start at."""
        return self._walk(Step.SOURCE)

    def target(self) -> Self:
        """From links on to the items they end at; targets in other parties are not followed."""
        return self._walk(Step.TARGET)

    def references(self) -> Self:
        """On to the items that values of these point to."""
        return self._walk(Step.REFERENCES)

    def referrers(self) -> Self:
        """On to the items whose values point to these."""
        return self._walk(Step.REFERRERS)

    # shape

    def order_by(self, *fields: AnyField | Order) -> Self:
        """Sort by fields, "-due" downwards; equal items by their id. Replaces an earlier order."""
        self._must_be_open("order_by", limited=False)
        return self._with(order=tuple(map(_order, fields)))

    def limit(self, count: int) -> Self:
        """Only the first so many."""
        self._must_be_open("limit", limited=False)
        return self._with(limit=count)

    def select(self, *fields: AnyField) -> Self:
        """Only these fields matter, for `rows`, tables, and for what counts as a change."""
        self._must_be_open("select", limited=False)
        return self._with(select=tuple(map(_field, fields)))

    def reduce(self, reducer: ReducerName, field: AnyField | None = None, *, by: AnyField | None = None) -> Self:
        """One value for all items, or one for each value of `by`; read it with `value` or `groups`."""
        self._must_be_open("reduce", limited=False)
        if str(reducer).upper() not in Reducer.__members__:
            raise UsageError(f"reduce knows {', '.join(Reducer.__members__).lower()}, not {reducer!r}")
        return self._with(
            reduce=Reduce(
                Reducer[reducer.upper()],
                None if field is None else _field(field),
                None if by is None else _field(by),
            )
        )

    # results

    def all(self) -> list[I]:
        """The items."""
        self._must_be_items("all")
        return [self._handle(token) for token in self._run().tokens]

    def __iter__(self) -> Iterator[I]:
        return iter(self.all())

    def ids(self) -> list[ItemId]:
        """The ids of the items."""
        self._must_be_items("ids")
        return [item for _, item in self._run().tokens]

    def first(self) -> I | None:
        """The first item, or None."""
        self._must_be_items("first")
        return next(iter(self._with(limit=1).all()), None)

    def one(self) -> I:
        """The only item; NotFound when there is none, UsageError when there are more."""
        self._must_be_items("one")
        found = self._with(limit=min(self.spec.limit or 2, 2)).all()
        if not found:
            raise NotFound("no item matches this query", next_step="Use first() where there may be none.")
        if len(found) > 1:
            raise UsageError(
                "more than one item matches this query, and one() wants exactly one",
                next_step="Narrow it with where(...), or use first() or all().",
            )
        return found[0]

    def count(self) -> int:
        """How many items there are, within the limit."""
        self._must_be_items("count")
        with self._reading():
            found = sum(len(matches(self.spec, provider.source())) for provider in self._providers)
            if not found:
                self._refuse_hopeless()
        return found if self.spec.limit is None else min(found, self.spec.limit)

    def rows(self) -> list[dict[str, Value]]:
        """The selected fields of each item, or all its properties; lists and maps inside are read-only."""
        self._must_be_items("rows")
        if self.spec.select is None:
            return self._read(lambda result: [_shown(row) for _, row in result.rows])
        reads = [(str(field), reader(field)) for field in self.spec.select]
        return self._read(lambda result: [{name: frozen(read(row)) for name, read in reads} for _, row in result.rows])

    def value(self) -> Value:
        """What a reduction amounts to."""
        if self.spec.reduce is None or self.spec.reduce.by is not None:
            raise UsageError("value() wants a reduction without groups", next_step='Write reduce("count").value().')
        return self.groups()[0][1]

    def groups(self) -> list[tuple[Value, Value]]:
        """What a reduction amounts to for each group: (value of `by`, result), in the order of `by`."""
        groups = self._run().groups
        if groups is None:
            raise UsageError("groups() wants a reduction", next_step='Write reduce("count", by="@type").groups().')
        return [(frozen(group.by), frozen(group.value)) for group in groups]

    def explain(self) -> str:
        """What the query does, what its first step could look up in an index, and how many items each step saw."""
        counts: list[list[StageCount]] = []
        with self._reading():
            for provider in self._providers:
                counts.append([])
                matches(self.spec, provider.source(), counts[-1])
        lines = self.spec.describe()
        for number in range(len(self.spec.stages)):
            examined = sum(each[number].examined for each in counts)
            passed = sum(each[number].passed for each in counts)
            lines[number] += f"   [{examined} looked at, {passed} kept]"
        hints = self.spec.hints()
        named = {"item": hints.item and hints.item.hex(), "type": hints.type, "parent": hints.parent and "given"}
        known = [f"{name} {value!r}" for name, value in {**named, **hints.equals}.items() if value is not None]
        lines.insert(1, f"  looked up by: {', '.join(known) or 'nothing, all items are looked at'}")
        return "\n".join(lines)

    # tables

    def to_arrow(self) -> Any:
        """A pyarrow.Table; columns item, type, parent, deleted and the properties, or item and what is selected."""
        several = not isinstance(self, Query)
        return query_arrow.arrow_table(self._read(lambda result: query_arrow.columns(self.spec, result, several)))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The Arrow PyCapsule protocol: polars, duckdb, pandas and others read a query as a table."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_pandas(self) -> Any:
        return query_arrow.to_pandas(self.to_arrow())

    def to_polars(self) -> Any:
        return query_arrow.to_polars(self.to_arrow())

    # live

    def subscribe(self, fn: Callable[[Change[I]], object], *, initial: bool = False) -> Subscription:
        """Call `fn` with a Change once for each batch that changes the answer, until the handle is closed.

        With `initial` the first call is at once, with everything as added. `fn` runs while the party applies the
        batch: it should be quick. What it raises reaches whoever applied the batch.
        """
        told = arguments.function(fn, "what is told of changes")
        return Subscription(Following(self._providers, self.spec, told, initial=arguments.flag(initial, "initial")))

    def watch(self, *, timeout_s: float | None = None, initial: bool = False) -> Watch[I]:
        """An iterator over changes from now on; it ends when nothing changed for `timeout_s`."""
        patience_s = arguments.seconds(timeout_s, "timeout_s")
        return Watch(self._providers, self.spec, timeout_s=patience_s, initial=arguments.flag(initial, "initial"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(self.spec.describe())})"

    @property
    def parties(self) -> list[PartyKey]:
        """The parties that it ranges over."""
        return [provider.party for provider in self._providers]

    # running

    def _run(self) -> Result[Token]:
        return self._read(lambda result: result)

    def _read(self, use: Callable[[Result[Token]], R]) -> R:
        """Evaluate, and use the result before writers go on: the values of its rows may be live."""
        with self._reading():
            rows = [
                ((provider.party, row.item), row)
                for provider in self._providers
                for row in matches(self.spec, provider.source())
            ]
            if not rows:
                self._refuse_hopeless()
            return use(finish(self.spec, rows))

    def doubts(self) -> list[str]:
        """Why this query may find nothing: a property of another kind than it is compared with, a misspelt name."""
        with self._reading():
            found = [doubt.text for provider in self._providers for doubt in doubts(self.spec, provider.source())]
        return list(dict.fromkeys(found))

    def _refuse_hopeless(self) -> None:
        """An order between values of two kinds never holds: nothing found means something else than nothing there."""
        if not any(map(has_order, (stage.filter for stage in self.spec.stages[:1]))):
            return
        for provider in self._providers:
            for doubt in doubts(self.spec, provider.source()):
                if doubt.hopeless:
                    raise UsageError(f"nothing can match: {doubt.text}", next_step="Compare with a value of its kind.")

    def _reading(self) -> ExitStack:
        """Hold off writers of all parties, always in the order of party keys."""
        stack = ExitStack()
        for provider in self._providers:
            stack.enter_context(provider.reading())
        return stack

    def _handle(self, token: Token) -> I:
        party, item = token
        return next(each for each in self._providers if each.party == party).handle(item)

    # building

    def _last(self, stage: Stage) -> Self:
        return self._with(stages=(*self.spec.stages[:-1], stage))

    def _walk(self, step: Step) -> Self:
        self._must_be_open(step.name.lower())
        if self.spec.order or self.spec.select:
            raise UsageError(
                f"{step.name.lower()}() after order_by or select would forget them",
                next_step="Order and select after the last step.",
            )
        return self._with(stages=(*self.spec.stages, Stage(step)))

    def _must_be_open(self, method: str, *, limited: bool = True) -> None:
        """Refuse what would have to act before something that was already said."""
        said = "reduce" if self.spec.reduce else "limit" if limited and self.spec.limit is not None else None
        if said:
            raise UsageError(
                f"{method} after {said}: it would read as if it acted on what {said} left",
                next_step=f"Call {method} before {said}.",
            )

    def _must_be_items(self, method: str) -> None:
        if self.spec.reduce is not None:
            raise UsageError(
                f"{method}() wants items, and this query reduces them", next_step="Use value() or groups()."
            )


class Query(MultiQuery[I]):
    """A query over one party."""

    def __init__(self, provider: SourceProvider[I], spec: QuerySpec | None = None) -> None:
        super().__init__((provider,), spec)


def _shown(row: Row) -> dict[str, Value]:
    return {name: frozen(value) for name, value in row.values.items()}


def _field(name: AnyField | Field) -> Field:
    return name.field if isinstance(name, FieldExpression) else parse_field(name)


def _order(name: AnyField | Order) -> Order:
    if isinstance(name, Order):
        return name
    if isinstance(name, str) and name.startswith("-"):
        return Order(parse_field(name[1:]), descending=True)
    return Order(_field(name))
