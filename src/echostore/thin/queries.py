"""Queries of a thin client: built as those of a party are, answered from what is held, followed by watching.

    party.query(type="task").where(done=False).order_by("-due").limit(10).all()
    for change in party.query(type="task").watch():
        ...

A query is a value: every call returns another one.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

from echostore.kernel.coherence.messages import Spec
from echostore.kernel.errors import EchoError, NotFound, TooLarge, UsageError
from echostore.kernel.ids import ItemId
from echostore.kernel.query.expressions import FieldExpression, comparisons
from echostore.kernel.query.fields import Field, FieldName, parse_field
from echostore.kernel.query.filters import And, Compare, Filter, Not, Or
from echostore.kernel.query.live import Change
from echostore.kernel.query.order import identical
from echostore.kernel.query.source import Deleted
from echostore.kernel.query.spec import Order, QuerySpec, Stage, Step
from echostore.kernel.values import Value
from echostore.thin.answers import Answer, Answers
from echostore.wire.index_spec import ITEMS_MAX, IndexQuery, MalformedIndex, index_spec

if TYPE_CHECKING:
    from echostore.thin.items import ThinItem
    from echostore.thin.thin_party import ThinParty

AnyField = FieldName | FieldExpression


class ThinQuery:
    """A query over the party behind a connection."""

    __slots__ = ("_answers", "_asked", "_kept", "_spec", "party")

    def __init__(self, party: "ThinParty", query: QuerySpec, *, sealed: bool = False) -> None:
        self.party = party
        self._answers: Answers = party.answers
        self._kept = party.answers.kept
        self._asked = IndexQuery(party.key, query.seen_from(party.key).check().normal(), sealed=sealed)
        try:
            self._spec: Spec = index_spec(self._asked)
        except MalformedIndex as error:
            raise TooLarge(f"no peer answers this query: {error}", next_step=f"At most {ITEMS_MAX} items.") from error

    # building

    def where(self, /, *filters: Filter, **keywords: Value) -> Self:
        """Keep items that pass: `where(done=False, priority__ge=3)`, `where(field("a.b") >= 3)`."""
        for each in filters:
            if not isinstance(each, Compare | And | Or | Not):
                raise UsageError(
                    f"where wants filters, not {type(each).__name__}",
                    next_step='Write where(done=False) or where(field("done") == False).',
                )
        stage = self._stage
        return self._last(replace(stage, filter=And((stage.filter, *filters, *comparisons(keywords)))))

    def deleted(self, rule: Literal["hide", "show", "only"]) -> Self:
        if rule not in list(Deleted):
            raise UsageError(f"deleted is one of {', '.join(Deleted)}, not {rule!r}")
        return self._last(replace(self._stage, deleted=Deleted(rule)))

    def children(self) -> Self:
        """On to the items whose home parent is among these."""
        return self._walk(Step.CHILDREN)

    def links(self, type: str | None = None) -> Self:
        """On to the links that start or end at these."""
        onward = self._walk(Step.LINKS)
        return onward if type is None else onward.where(type=type)

    def source(self) -> Self:
        return self._walk(Step.SOURCE)

    def target(self) -> Self:
        return self._walk(Step.TARGET)

    def order_by(self, *fields: AnyField | Order) -> Self:
        """Sort by fields, "-due" downwards; equal items by their id."""
        return self._with(order=tuple(map(_order, fields)))

    def limit(self, count: int) -> Self:
        return self._with(limit=count)

    def select(self, *fields: AnyField) -> Self:
        """Only these fields travel; items are for reading then."""
        return self._with(select=tuple(map(_field, fields)))

    def sealed(self) -> Self:
        """Ask for records and the root's signature, and check them: no edge can forge such an answer."""
        return type(self)(self.party, self._query, sealed=True)

    # answers

    def all(self) -> Answer:
        """The items at the current tick, with own edits applied. A held answer costs one lookup."""
        found = self._kept.get(self._spec)
        return self._answers.get(self._asked, self._spec) if found is None else found

    def held(self) -> Answer | None:
        """The answer if it is held here; nothing is asked for."""
        return self._answers.held(self._asked, self._spec)

    def __iter__(self) -> "Iterator[ThinItem]":
        return iter(self.all())

    def ids(self) -> list[ItemId]:
        return [each.id for each in self.all()]

    def first(self) -> "ThinItem | None":
        return next(iter(self.all()), None)

    def one(self) -> "ThinItem":
        """The only item."""
        found = self.all()
        if not found:
            raise NotFound("no item matches this query", next_step="Use first() where there may be none.")
        if len(found) > 1:
            raise UsageError("more than one item matches this query", next_step="Narrow it, or use first().")
        return found[0]

    def count(self) -> int:
        return len(self.all())

    def watch(self, *, timeout_s: float | None = None, initial: bool = False) -> "ThinWatch":
        """An iterator over changes from now on; it ends when nothing changed for `timeout_s`."""
        return ThinWatch(self, timeout_s=timeout_s, initial=initial)

    @property
    def asked(self) -> IndexQuery:
        return self._asked

    @property
    def spec(self) -> Spec:
        """The canonical bytes that name the index."""
        return self._spec

    def __repr__(self) -> str:
        return f"ThinQuery({'; '.join(self._query.describe())})"

    # inside

    @property
    def _query(self) -> QuerySpec:
        assert self._asked.query is not None, "a query"
        return self._asked.query

    @property
    def _stage(self) -> Stage:
        return self._query.stages[-1]

    def _with(self, **parts: Any) -> Self:
        return type(self)(self.party, replace(self._query, **parts), sealed=self._asked.sealed)

    def _last(self, stage: Stage) -> Self:
        return self._with(stages=(*self._query.stages[:-1], stage))

    def _walk(self, step: Step) -> Self:
        return self._with(stages=(*self._query.stages, Stage(step)))


class ThinWatch:
    """An iterator over the changes of an answer. Changes that nobody took merge into one."""

    def __init__(self, query: ThinQuery, *, timeout_s: float | None, initial: bool) -> None:
        self._query = query
        self._driver = query.party.driver
        self.timeout_s = timeout_s
        self._news = threading.Event()
        self._closed = False
        self._before: Answer | None = Answer.of([], 0, pending=False) if initial else None
        self._end_watch = self._driver.watch(query.spec)
        self._driver.listeners.append(self._changed)
        if not initial:
            try:
                self._before = query.all()
            except EchoError:
                self.close()
                raise
        self._news.set()

    def _changed(self, specs: frozenset[Spec] | None) -> None:
        if specs is None or self._query.spec in specs:
            self._news.set()

    def __iter__(self) -> "Iterator[Change[ThinItem]]":
        return self

    def __next__(self) -> "Change[ThinItem]":
        change = self.poll(self.timeout_s)
        if change is None:
            self.close()
            raise StopIteration
        return change

    def poll(self, wait_s: float | None) -> "Change[ThinItem] | None":
        """The next change; None when none has come in that time, or the watch is closed."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while self._news.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            if self._closed:
                return None
            self._news.clear()
            answer = self._query.held()
            if answer is None:  # it was invalidated, and is asked for again
                denied = self._driver.denied.get(self._query.spec)
                if denied is not None:
                    raise denied
                continue
            before, self._before = self._before, answer
            change = difference(before or (), answer)
            if change is not None:
                return change
        return None

    @property
    def answer(self) -> Answer | None:
        """The answer after the last change that was taken."""
        return self._before

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end_watch()
            self._driver.listeners.remove(self._changed)
            self._news.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def difference(before: "Sequence[ThinItem]", after: "Sequence[ThinItem]") -> "Change[ThinItem] | None":
    """How an answer differs from the one before; None when it does not."""
    old = {each.id: (place, each) for place, each in enumerate(before)}
    new = {each.id for each in after}
    added = [each for each in after if each.id not in old]
    removed = [each for each in before if each.id not in new]
    stay = [(old[each.id][0], each) for each in after if each.id in old]
    changed = [each for _, each in stay if not _same(old[each.id][1], each)]
    unmoved = _rising([place for place, _ in stay])
    moved = [each for index, (_, each) in enumerate(stay) if index not in unmoved]
    if not (added or removed or changed or moved):
        return None
    placed = {each.id for each in (*added, *moved)}
    positions = tuple((place, each) for place, each in enumerate(after) if each.id in placed)
    return Change(tuple(added), tuple(changed), tuple(removed), tuple(moved), positions)


def _same(one: "ThinItem", other: "ThinItem") -> bool:
    return (one.deleted, one.parent) == (other.deleted, other.parent) and identical(
        one._state.values, other._state.values
    )


def _rising(places: list[int]) -> set[int]:
    """The indexes of a longest rising run of places: what did not move."""
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for index, place in enumerate(places):
        at = bisect_left(tails, place)
        previous.append(ends[at - 1] if at else -1)
        tails[at : at + 1] = [place]
        ends[at : at + 1] = [index]
    kept: set[int] = set()
    index = ends[-1] if ends else -1
    while index >= 0:
        kept.add(index)
        index = previous[index]
    return kept


def _field(name: AnyField | Field) -> Field:
    return name.field if isinstance(name, FieldExpression) else parse_field(name)


def _order(name: AnyField | Order) -> Order:
    if isinstance(name, Order):
        return name
    if isinstance(name, str) and name.startswith("-"):
        return Order(parse_field(name[1:]), descending=True)
    return Order(_field(name))
