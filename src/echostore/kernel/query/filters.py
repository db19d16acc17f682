"""Filters: conditions on one row, combined with and, or, not.

Logic is two-valued: a filter holds or it does not, and `~` is its exact opposite. A missing field reads as null, so
`due == None` finds items with no due date; only `exists` tells missing from null. `<`, `<=`, `>`, `>=` hold between
values of one kind only: text is never greater than a number. A constant that is the text of a time ("2026-06-01",
"2026-06-01T10:00:00Z"; without a zone it is UTC) also compares as that time with values that are times.

`normalise` gives filters that differ only in how they were written one form: not stands before comparisons only, and
and or are flat, sorted and free of repetition, a list of one is a plain comparison.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, assert_never

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import PartyKey
from echostore.kernel.query.fields import Field, Read, presence, reader
from echostore.kernel.query.order import BYTES, LIST, MAP, TEXT, Key, normal, order_key
from echostore.kernel.query.source import Row
from echostore.kernel.values import Reference, Value

Test = Callable[[Row], bool]


class Op(IntEnum):
    """How a field is compared. The numbers are part of the wire format; `!=` is not-EQ."""

    EQ = 1
    LT = 2
    LE = 3
    GT = 4
    GE = 5
    IN = 6
    CONTAINS = 7
    STARTSWITH = 8
    EXISTS = 9


SYMBOLS = {Op.EQ: "==", Op.LT: "<", Op.LE: "<=", Op.GT: ">", Op.GE: ">=", Op.IN: "in"}


class Combinable:
    """What all filters share: the operators, and equality by structure (1 and True differ, 3 and 3.0 do not)."""

    __slots__ = ()

    def structure(self) -> Key:
        """A key that is equal for equal filters and sorts them."""
        raise NotImplementedError

    def __and__(self, other: "Filter") -> "Filter":
        return And((_filter(self), _filter(other)))

    def __or__(self, other: "Filter") -> "Filter":
        return Or((_filter(self), _filter(other)))

    def __invert__(self) -> "Filter":
        return Not(_filter(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Combinable) and self.structure() == other.structure()

    def __hash__(self) -> int:
        return hash(self.structure())

    def __bool__(self) -> bool:
        raise UsageError(
            "a filter has no truth value of its own",
            next_step="Combine filters with & | ~ instead of and, or, not, and put comparisons in parentheses.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Compare(Combinable):
    """field op value. The value of IN is a tuple; EXISTS has none."""

    field: Field
    op: Op
    value: Value = None

    def structure(self) -> Key:
        return (0, self.field.attribute, self.field.steps, int(self.op), order_key(self.value))


@dataclass(frozen=True, slots=True, eq=False)
class Not(Combinable):
    """Holds where `part` does not."""

    part: "Filter"

    def structure(self) -> Key:
        return (1, self.part.structure())


@dataclass(frozen=True, slots=True, eq=False)
class And(Combinable):
    """Holds where all parts do; without parts, everywhere."""

    parts: tuple["Filter", ...]

    def structure(self) -> Key:
        return (2, tuple([part.structure() for part in self.parts]))


@dataclass(frozen=True, slots=True, eq=False)
class Or(Combinable):
    """Holds where any part does; without parts, nowhere."""

    parts: tuple["Filter", ...]

    def structure(self) -> Key:
        return (3, tuple([part.structure() for part in self.parts]))


Filter = Compare | Not | And | Or

EVERYTHING: Filter = And(())
NOTHING: Filter = Or(())


def normalise(condition: Filter) -> Filter:
    return _normalise(condition, negated=False)


def conjuncts(condition: Filter) -> tuple[Filter, ...]:
    """The parts of a normalised filter that must all hold."""
    return condition.parts if isinstance(condition, And) else (condition,)


def compile_filter(condition: Filter) -> Test:
    """A function that says whether a row passes."""
    match condition:
        case Compare():
            return _compile_compare(condition)
        case Not(part):
            test = compile_filter(part)
            return lambda row: not test(row)
        case And(parts):
            return _compile_all([compile_filter(part) for part in parts])
        case Or(parts):
            tests = [compile_filter(part) for part in parts]
            return lambda row: any(test(row) for test in tests)
        case _:
            assert_never(condition)


def describe(condition: Filter) -> str:
    """The filter as a person would write it."""
    match condition:
        case Compare(field, Op.EXISTS):
            return f"{field} exists"
        case Compare(field, op, value):
            return f"{field} {SYMBOLS.get(op, op.name.lower())} {list(value) if op is Op.IN else value!r}"
        case Not(Compare(field, Op.EQ, value)):
            return f"{field} != {value!r}"
        case Not(part):
            return f"not ({describe(part)})"
        case And(()):
            return "everything"
        case Or(()):
            return "nothing"
        case And(parts):
            return " and ".join(f"({describe(part)})" if isinstance(part, Or) else describe(part) for part in parts)
        case Or(parts):
            return " or ".join(f"({describe(part)})" if isinstance(part, And) else describe(part) for part in parts)
        case _:
            assert_never(condition)


def has_order(condition: Filter) -> bool:
    """Whether a filter compares by order somewhere."""
    match condition:
        case Compare(_, op):
            return op in (Op.LT, Op.LE, Op.GT, Op.GE)
        case Not(part):
            return has_order(part)
        case And(parts) | Or(parts):
            return any(map(has_order, parts))
        case _:
            assert_never(condition)


def size(condition: Filter) -> int:
    """How many comparisons and combinations a filter has: what its limit counts."""
    match condition:
        case Compare():
            return len(condition.value) + 1 if condition.op is Op.IN else 1
        case Not(part):
            return 1 + size(part)
        case And(parts) | Or(parts):
            return 1 + sum(map(size, parts))
        case _:
            assert_never(condition)


def depth(condition: Filter) -> int:
    """How deep a filter is nested, its constants included."""
    match condition:
        case Compare():
            return 1 + _value_depth(condition.value)
        case Not(part):
            return 1 + depth(part)
        case And(parts) | Or(parts):
            return 1 + max(map(depth, parts), default=0)
        case _:
            assert_never(condition)


def _value_depth(value: Value) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_value_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


def _filter(part: Any) -> Filter:
    if isinstance(part, (Compare, Not, And, Or)):
        return part
    raise UsageError(
        f"a filter can't be combined with {type(part).__name__}",
        next_step='Put parentheses round each comparison: (field("a") >= 1) & (field("b") == 2).',
    )


# references


def seen_from(condition: Filter, party: PartyKey | None) -> Filter:
    """The filter for the rows of one party: references in it read as that party's values do. With None, for the rows of
    several: an item is found by a reference of its own party and by one of another."""
    match condition:
        case Compare(field, op, value):
            if op is Op.IN:
                spread = [each for element in value for each in _seen_from(element, party)]
                return Compare(field, op, tuple(spread))
            several = [Compare(field, op, each) for each in _seen_from(value, party)]
            return several[0] if len(several) == 1 else Or(tuple(several))
        case Not(part):
            return Not(seen_from(part, party))
        case And(parts):
            return And(tuple(seen_from(part, party) for part in parts))
        case Or(parts):
            return Or(tuple(seen_from(part, party) for part in parts))
        case _:
            assert_never(condition)


def _seen_from(value: Value, party: PartyKey | None) -> list[Value]:
    if type(value) is not Reference:
        return [value]
    if party is not None:
        return [value.seen_from(party)]
    owner = value.party or value.within
    return [Reference(value.item)] if owner is None else [Reference(value.item), Reference(value.item, owner)]


# normal form


def _normalise(condition: Filter, *, negated: bool) -> Filter:
    match condition:
        case Compare():
            return _normalise_compare(condition, negated)
        case Not(part):
            return _normalise(part, negated=not negated)
        case And(parts) | Or(parts):
            wants_all = isinstance(condition, And) is not negated  # De Morgan: not-or is and of nots
            return _flat([_normalise(part, negated=negated) for part in parts], wants_all)
        case _:
            assert_never(condition)


def _normalise_compare(condition: Compare, negated: bool) -> Filter:
    op, value = condition.op, condition.value
    if op is Op.IN:
        distinct = {order_key(element): normal(element) for element in value}
        value = tuple(distinct[key] for key in sorted(distinct))
        if not value:
            return EVERYTHING if negated else NOTHING
        if len(value) == 1:
            op, value = Op.EQ, value[0]
    elif op is Op.EXISTS:
        value = None
    else:
        value = normal(value)
    plain = Compare(condition.field, op, value)
    return Not(plain) if negated else plain


def _flat(parts: Iterable[Filter], wants_all: bool) -> Filter:
    kind, absorbing = (And, NOTHING) if wants_all else (Or, EVERYTHING)
    found: dict[Key, Filter] = {}
    for part in parts:
        for inner in part.parts if isinstance(part, kind) else (part,):
            found[inner.structure()] = inner
    if absorbing.structure() in found:
        return absorbing
    ordered = tuple(found[key] for key in sorted(found))
    return ordered[0] if len(ordered) == 1 else kind(ordered)


# compiled tests


def _compile_all(tests: list[Test]) -> Test:
    if not tests:
        return lambda row: True
    if len(tests) == 1:
        return tests[0]
    if len(tests) == 2:
        first, second = tests
        return lambda row: first(row) and second(row)
    return lambda row: all(test(row) for test in tests)


def _compile_compare(condition: Compare) -> Test:
    read, op, value = reader(condition.field), condition.op, condition.value
    if op is Op.EXISTS:
        return presence(condition.field)
    if op is Op.CONTAINS:
        return lambda row: _contains(read(row), value)
    if op is Op.STARTSWITH:
        kind = type(value)
        return lambda row: type(found := read(row)) is kind and found.startswith(value)
    if op is Op.IN:
        times = [moment for element in value if (moment := time_named(element)) is not None]
        keys = frozenset(order_key(element) for element in (*value, *times))
        return lambda row: order_key(read(row)) in keys
    moment = time_named(value)
    if moment is not None:
        as_text, as_time = (_compile_ordered(read, op, order_key(each)) for each in (value, moment))
        return lambda row: as_text(row) or as_time(row)
    if op is Op.EQ and type(value) in (str, bytes):  # the common case: these equal only their own kind
        return lambda row: bool(read(row) == value)
    return _compile_ordered(read, op, order_key(value))


def time_named(value: Value) -> datetime | None:
    """The time whose text a constant is; None for any other constant."""
    if type(value) is not str or not _TIME.fullmatch(value):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:\d\d)?)?", re.ASCII)


def _compile_ordered(read: Read, op: Op, key: Key) -> Test:
    kind = key[0]

    def found(row: Row) -> Key | None:
        """The row's key when it is of the constant's kind."""
        other = order_key(read(row))
        return other if other[0] == kind else None

    if op is Op.EQ:
        return lambda row: found(row) == key
    if op is Op.LT:
        return lambda row: (other := found(row)) is not None and other < key
    if op is Op.LE:
        return lambda row: (other := found(row)) is not None and other <= key
    if op is Op.GT:
        return lambda row: (other := found(row)) is not None and other > key
    assert op is Op.GE, op
    return lambda row: (other := found(row)) is not None and other >= key


def _contains(found: Value, wanted: Value) -> bool:
    """Text in text, bytes in bytes, an element in a list, a key in a map."""
    holder, key = order_key(found)[0], order_key(wanted)
    if holder in (TEXT, BYTES):
        return key[0] == holder and wanted in found
    if holder == LIST:
        return any(order_key(element) == key for element in found)
    return holder == MAP and key[0] == TEXT and wanted in found
