"""Why a query finds nothing: a comparison with another kind of value than the property has, or a misspelt name.

Both are found by a look at some items of the type that was asked for, and only when the answer is empty.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple

from echostore.kernel.query.fields import reader
from echostore.kernel.query.filters import Compare, Not, Op, conjuncts, normalise, time_named
from echostore.kernel.query.order import NULL, TIME, order_key
from echostore.kernel.query.source import Row, Source
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.values import kind_of

ROWS_MAX = 200
"""Items that are looked at; a look costs what reading them costs."""

_COMPARED = (Op.EQ, Op.LT, Op.LE, Op.GT, Op.GE)


class Doubt(NamedTuple):
    """One reason. With `hopeless`, no item can pass as things are: an order between values of two kinds."""

    text: str
    hopeless: bool


def doubts(spec: QuerySpec, source: Source) -> list[Doubt]:
    """What is odd about the conditions of the first stage, seen from the items that are here."""
    stage = spec.stages[0]
    parts = [part.part if isinstance(part, Not) else part for part in conjuncts(normalise(stage.filter))]
    compared = [part for part in parts if isinstance(part, Compare) and not part.field.attribute]
    if not compared:
        return []
    found = source.scan(type=spec.hints().type, parent=None, equals={}, deleted=stage.deleted)
    rows = [row for item in islice(found, ROWS_MAX) if (row := source.row(item)) is not None and not row.system]
    rows = [row for row in rows if spec.hints().type in (None, row.type)]
    return [doubt for part in compared if (doubt := _doubt(part, rows)) is not None]


def _doubt(part: Compare, rows: Sequence[Row]) -> Doubt | None:
    read = reader(part.field)
    values = [value for value in map(read, rows) if value is not None]
    if not values:
        if any(part.field.steps[0] in row.values for row in rows):
            return None
        names = {name for row in rows for name in row.values}
        near = get_close_matches(part.field.steps[0], names, n=1, cutoff=0.7)
        return Doubt(f"no item has {str(part.field)!r}; did you mean {near[0]!r}?", hopeless=False) if near else None
    if part.op not in _COMPARED or part.value is None:
        return None
    kinds = {order_key(value)[0] for value in values} - {NULL}
    wanted = {order_key(part.value)[0], *([TIME] if time_named(part.value) is not None else [])}
    if kinds & wanted:
        return None
    has, given = kind_of(values[0]), kind_of(part.value)
    return Doubt(f"{part.field} is {has}, and it is compared with {given}", hopeless=part.op is not Op.EQ)
