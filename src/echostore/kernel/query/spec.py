"""QuerySpec: what a query asks of one party, as a value.

    stages   where it starts and how it walks      query(type="board") .children().where(done=False)
    order    fields, each up or down               .order_by("-due", "title")   ties: by item id, always upwards
    limit    the first so many                     .limit(10)
    select   the fields that matter                .select("title", "due")
    reduce   one number, or one per group          .reduce("sum", "price", by="@type")

They apply in this order. A stage takes a set of items to a set of items: an item that is reached twice counts once.
Specs that ask the same in different words have one `normal()` form; its canonical bytes are written by
`echostore.wire.queries`, and their hash names the query in the coherence protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from echostore.kernel.errors import TooLarge, UsageError
from echostore.kernel.ids import SYSTEM_TYPE, ItemId, PartyKey
from echostore.kernel.query.fields import ITEM, PARENT, TYPE, Field
from echostore.kernel.query.filters import (
    EVERYTHING,
    Compare,
    Filter,
    Op,
    conjuncts,
    depth,
    describe,
    normalise,
    seen_from,
    size,
    time_named,
)
from echostore.kernel.query.order import NAN, order_key
from echostore.kernel.query.source import Deleted
from echostore.kernel.values import Reference, Value

# A spec may come from another machine and be kept for long; each limit bounds what one can cost.
STAGES_MAX = 16
FILTER_SIZE_MAX = 10_000
FILTER_DEPTH_MAX = 32
"""Nested constants included. One level is two messages on the wire, where protobuf stops at 100."""
ORDER_FIELDS_MAX = 16
SELECT_FIELDS_MAX = 1024
LIMIT_MAX = (1 << 53) - 1


class Step(IntEnum):
    """How a stage reaches its items. The numbers are part of the wire format."""

    ALL = 1
    CHILDREN = 2
    PARENT = 3
    EMBEDDED = 4
    LINKS = 5
    SOURCE = 6
    TARGET = 7
    REFERENCES = 8
    REFERRERS = 9


class Reducer(IntEnum):
    """What a reduction computes. The numbers are part of the wire format."""

    COUNT = 1
    SUM = 2
    MIN = 3
    MAX = 4
    MEAN = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """Items reached by a step from those of the stage before, as far as they pass."""

    step: Step = Step.ALL
    filter: Filter = EVERYTHING
    deleted: Deleted = Deleted.HIDE

    @property
    def wants_system(self) -> bool:
        """Whether the party's system item may pass: a walk may reach it, else its type or its id has to be named."""
        if self.step is not Step.ALL:
            return True
        named = [part for part in conjuncts(normalise(self.filter)) if isinstance(part, Compare) and part.op is Op.EQ]
        return any(part.field == ITEM or (part.field == TYPE and part.value == SYSTEM_TYPE) for part in named)


@dataclass(frozen=True, slots=True)
class Order:
    """One field to sort by."""

    field: Field
    descending: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """One value for all items, or one for each value of `by`. Only COUNT may be without a field."""

    reducer: Reducer
    field: Field | None = None
    by: Field | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """What a Source may use to find the items of the first stage without looking at all of them."""

    item: ItemId | None
    type: str | None
    parent: ItemId | None
    equals: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """A whole query over one party."""

    stages: tuple[Stage, ...] = (Stage(),)
    order: tuple[Order, ...] = ()
    limit: int | None = None
    select: tuple[Field, ...] | None = None
    reduce: Reduce | None = None

    @staticmethod
    def start(type: str | None = None) -> "QuerySpec":
        """All items, or all of a type: where every query begins."""
        return QuerySpec((Stage(filter=EVERYTHING if type is None else Compare(TYPE, Op.EQ, type)),))

    def normal(self) -> "QuerySpec":
        """The one spec that stands for all that ask the same in different words."""
        order: dict[Field, Order] = {}
        for each in self.order:
            order.setdefault(each.field, each)
            if each.field == ITEM:  # nothing after it can matter
                break
        matters = self.reduce is None or self.limit is not None  # else no order can be seen
        return replace(
            self,
            stages=tuple(replace(stage, filter=normalise(stage.filter)) for stage in self.stages),
            order=_without_default(tuple(order.values())) if matters else (),
            select=None if self.select is None else tuple(dict.fromkeys(self.select)),
        )

    def seen_from(self, party: PartyKey | None) -> "QuerySpec":
        """The spec for the rows of one party, or of several: see `filters.seen_from`."""
        return replace(
            self, stages=tuple(replace(stage, filter=seen_from(stage.filter, party)) for stage in self.stages)
        )

    def check(self) -> "QuerySpec":
        """The spec itself; UsageError or TooLarge when no peer would answer it."""
        if not self.stages or any((stage.step is Step.ALL) is not (n == 0) for n, stage in enumerate(self.stages)):
            raise UsageError("a query starts with all items, and only its first stage does")
        for what, count, most in (
            ("stages", len(self.stages), STAGES_MAX),
            ("order fields", len(self.order), ORDER_FIELDS_MAX),
            ("selected fields", len(self.select or ()), SELECT_FIELDS_MAX),
            ("levels of a filter", max(depth(stage.filter) for stage in self.stages), FILTER_DEPTH_MAX),
            ("filter parts", sum(size(stage.filter) for stage in self.stages), FILTER_SIZE_MAX),
        ):
            if count > most:
                raise TooLarge(f"a query has at most {most} {what}, got {count}")
        if self.limit is not None and not (type(self.limit) is int and 1 <= self.limit <= LIMIT_MAX):
            raise UsageError(f"a limit is a whole number from 1, not {self.limit!r}")
        if self.select is not None and (not self.select or self.reduce is not None):
            raise UsageError("select wants at least one field, and no reduce beside it")
        if self.reduce is not None and self.reduce.field is None and self.reduce.reducer is not Reducer.COUNT:
            name = self.reduce.reducer.name.lower()
            raise UsageError(f"{name} wants a field", next_step=f'Write reduce("{name}", "price").')
        return self

    def hints(self) -> Hints:
        """What the first stage pins down, for indexes here and for routing writes to specs elsewhere."""
        found: dict[str, Any] = {"item": None, "type": None, "parent": None}
        equals: dict[str, Value] = {}
        for part in conjuncts(normalise(self.stages[0].filter)):
            if not isinstance(part, Compare) or part.op is not Op.EQ or part.value is None:
                continue  # null also means missing, which no index lists
            if part.field == TYPE:
                found["type"] = part.value if isinstance(part.value, str) else None
            elif part.field in (ITEM, PARENT):
                if isinstance(part.value, Reference) and part.value.party is None:
                    found[part.field.steps[0]] = part.value.item
            elif (
                not part.field.attribute
                and len(part.field.steps) == 1
                and order_key(part.value)[0] != NAN
                and time_named(part.value) is None
            ):
                equals[part.field.steps[0]] = part.value
        return Hints(**found, equals=equals)

    def describe(self) -> list[str]:
        """One line for each thing the query does."""
        lines = []
        for stage in self.stages:
            kept = "" if stage.deleted is Deleted.HIDE else f", deleted: {stage.deleted}"
            lines.append(f"{stage.step.name.lower()} where {describe(stage.filter)}{kept}")
        if self.order:
            lines.append("order by " + ", ".join(f"{'-' * each.descending}{each.field}" for each in self.order))
        if self.limit is not None:
            lines.append(f"limit {self.limit}")
        if self.select is not None:
            lines.append("select " + ", ".join(map(str, self.select)))
        if self.reduce is not None:
            by = "" if self.reduce.by is None else f" by {self.reduce.by}"
            lines.append(f"{self.reduce.reducer.name.lower()} of {self.reduce.field or 'items'}{by}")
        return lines


def _without_default(order: tuple[Order, ...]) -> tuple[Order, ...]:
    """Upwards by item id at the end is what every query does anyway."""
    return order[:-1] if order and order[-1] == Order(ITEM) else order
