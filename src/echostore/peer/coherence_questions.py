"""What pins an index down: the items that can concern it are found by that, and not by looking at every index.

    (type, field, value)    type = T and field = const
    (type, -, -)            type = T and anything else
    item                    one item

A question of exactly the first form is a `Pin` and a value: all that ask for one field of a type share the pin, so that
a hundred thousand of them are little more than their values.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from echostore.kernel.ids import ItemId
from echostore.kernel.query.evaluate import compile_stage
from echostore.kernel.query.fields import TYPE
from echostore.kernel.query.filters import And, Compare, Op, Test
from echostore.kernel.query.order import NAN, order_key
from echostore.kernel.query.source import Deleted
from echostore.kernel.query.spec import QuerySpec, Stage
from echostore.kernel.values import Value
from echostore.wire.index_spec import IndexQuery

Key = tuple[str, str | None, Hashable]

PINNED_KINDS: Final = (str, int, bool, float, bytes)
"""Values that can be read off their own key."""


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """All questions `type = T and field = value` about one field of a type, whatever the value."""

    asked: IndexQuery
    """One of them."""
    type: str
    field: str
    test: Test
    """Whether a row is of the type, and shown at all."""
    deleted: Deleted

    def question(self, value: Value) -> IndexQuery:
        """The one about this value."""
        assert self.asked.query is not None, "a pin is a query"
        stage = self.asked.query.stages[0]
        assert isinstance(stage.filter, And), stage.filter
        parts = [part if _names_type(part) else Compare(part.field, Op.EQ, value) for part in _compares(stage)]
        query = QuerySpec((Stage(filter=And(tuple(parts)), deleted=self.deleted),))
        return IndexQuery(self.asked.party, query)


@dataclass(frozen=True, slots=True)
class Question:
    """An index as it is looked for."""

    asked: IndexQuery
    type: str | None
    """The only type whose items can concern it, if there is one."""
    key: Key | None
    item: ItemId | None
    value: Value
    """What its field is held against, where it could be a pin's."""
    plain: bool


def read_question(asked: IndexQuery) -> Question:
    """What pins an index down; neither key nor item when nothing does."""
    query = asked.query
    if query is None:
        return Question(asked, None, None, asked.item, None, plain=False)
    if len(query.stages) != 1:
        return Question(asked, None, None, None, None, plain=False)
    hints = query.hints()
    if hints.item is not None:
        return Question(asked, hints.type, None, hints.item, None, plain=False)
    if hints.type is None:
        return Question(asked, None, None, None, None, plain=False)
    for field in sorted(hints.equals):
        value = hints.equals[field]
        key = order_key(value)
        return Question(asked, hints.type, (hints.type, field, key), None, value, plain=_is_plain(asked, value))
    return Question(asked, hints.type, (hints.type, None, None), None, None, plain=False)


def pin_name(question: Question) -> tuple[str, str, Deleted]:
    """What the pin of a plain question is told from others by."""
    assert question.plain, question
    assert question.key is not None, "a plain question has a key"
    assert question.key[1] is not None, "and a field"
    assert question.asked.query is not None, "and is a query"
    return question.key[0], question.key[1], question.asked.query.stages[0].deleted


def make_pin(question: Question) -> Pin:
    """What is common to all plain questions about its field of its type."""
    type, field, deleted = pin_name(question)
    assert question.asked.query is not None, "a plain question is a query"
    stage = question.asked.query.stages[0]
    named = next(part for part in _compares(stage) if _names_type(part))
    return Pin(question.asked, type, field, compile_stage(Stage(filter=named, deleted=deleted)), deleted)


def _is_plain(asked: IndexQuery, value: Value) -> bool:
    """Whether a query asks for nothing but a type and one value of one field, in no order of its own."""
    query = asked.query
    assert query is not None, "an item has no value"
    if asked.sealed or query.order or query.limit is not None or query.select is not None or query.reduce is not None:
        return False
    if type(value) not in PINNED_KINDS or order_key(value)[0] == NAN:
        return False
    parts = _compares(query.stages[0])
    return len(parts) == 2 and sum(map(_names_type, parts)) == 1


def _compares(stage: Stage) -> list[Compare]:
    """The parts of a conjunction of plain equalities; none when it is anything else."""
    parts = stage.filter.parts if isinstance(stage.filter, And) else ()
    found = [part for part in parts if isinstance(part, Compare) and part.op is Op.EQ]
    return found if len(found) == len(parts) else []


def _names_type(part: Compare) -> bool:
    return part.field == TYPE
