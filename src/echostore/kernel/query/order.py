"""The total order over values of all kinds, and two notions of equality.

    null < bool < numbers < NaN < text < bytes < time < reference < blob < list < map

`order_key` turns a value into a tuple that compares and hashes at C speed. Integers and floats compare numerically
and exactly; NaN equals itself and is a kind of its own, so `>= 3` never matches it. Text compares by code point, which
is also the order of its UTF-8 bytes; lists compare element by element, maps as sorted pairs.

Two values are *equal in order* when their keys are equal: 3 and 3.0 are, 1 and True are not. They are *identical* when
no reader could tell them apart: 3 and 3.0 are not. Filters and groups use the former, change detection the latter.
"""

import math
from datetime import datetime
from functools import total_ordering
from typing import Any, Final

from echostore.kernel.values import EPOCH, INT_MAX, INT_MIN, BlobRef, Reference, Value

Key = tuple[Any, ...]

NULL, BOOL, NUMBER, NAN, TEXT, BYTES, TIME, REFERENCE, BLOB, LIST, MAP = range(11)

NULL_KEY: Final[Key] = (NULL,)
_NAN_KEY: Final[Key] = (NAN,)


def order_key(value: Value) -> Key:
    """The value's place in the total order; the first element is its kind."""
    kind = type(value)
    if kind is str:
        return (TEXT, value)
    if kind is int:
        return (NUMBER, value)
    if value is None:
        return NULL_KEY
    if kind is bool:
        return (BOOL, value)
    if kind is float:
        return _NAN_KEY if math.isnan(value) else (NUMBER, value)
    if kind is bytes:
        return (BYTES, value)
    if isinstance(value, datetime):
        return (TIME, value)
    if kind is Reference:
        return (REFERENCE, value.party or b"", value.item)
    if kind is BlobRef:
        return (BLOB, value.cids, value.size, value.media_type, value.name)
    if isinstance(value, (list, tuple)):
        return (LIST, tuple([order_key(element) for element in value]))
    assert isinstance(value, dict), f"not a value: {value!r}"
    return (MAP, tuple([(key, order_key(value[key])) for key in sorted(value)]))


def normal(value: Value) -> Value:
    """The one value that stands for all that are equal in order: whole floats become integers."""
    if type(value) is float and value.is_integer() and INT_MIN <= value <= INT_MAX:
        return int(value)
    if isinstance(value, (list, tuple)):
        return [normal(element) for element in value]
    if isinstance(value, dict):
        return {key: normal(value[key]) for key in sorted(value)}
    return value


def identical(one: Value, other: Value) -> bool:
    """Whether no reader could tell the two apart: same kinds, NaN is NaN, 0.0 is not -0.0."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        if math.isnan(one):
            return math.isnan(other)
        return bool(one == other) and math.copysign(1.0, one) == math.copysign(1.0, other)
    if kind is list:
        return len(one) == len(other) and all(map(identical, one, other))
    if kind is dict:
        return len(one) == len(other) and all(key in other and identical(one[key], other[key]) for key in one)
    return bool(one == other)


def descending(key: Key) -> Key:
    """A key that sorts the other way round, so that one tuple can mix directions."""
    kind = key[0]
    if kind == NUMBER:  # numbers and times, the usual ones, stay comparable at C speed
        return (-kind, -key[1])
    if kind == TIME:
        return (-kind, EPOCH - key[1])
    return (-kind, *map(Descending, key[1:]))


@total_ordering
class Descending:
    """A part of a key that sorts the other way round."""

    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part

    def __lt__(self, other: "Descending") -> bool:
        return bool(other.part < self.part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descending) and bool(self.part == other.part)

    def __hash__(self) -> int:
        return hash(self.part)

    def __repr__(self) -> str:
        return f"Descending({self.part!r})"
