"""Reductions that can be kept up to date: an item is added, removed or changed, and the value follows.

The value depends on the set of items alone, never on the order in which they came. For floats that needs exact sums:
every double is a whole multiple of 2^-1074, so a sum is kept as one big integer and rounded once, when it is read.

    count   items, or items whose field is not null
    sum     of the numbers in the field; other kinds are passed over; 0 when there are none
    mean    of the same numbers; None when there are none
    min     the least value that is not null, in the total order; None when there is none
    max     the greatest
"""

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic, TypeVar

from echostore.kernel.query.fields import reader
from echostore.kernel.query.order import Key, normal, order_key
from echostore.kernel.query.order import identical as same
from echostore.kernel.query.sorted_keys import SortedKeys
from echostore.kernel.query.source import Row
from echostore.kernel.query.spec import Reduce, Reducer
from echostore.kernel.values import Value

T = TypeVar("T")

_SCALE_BITS: Final = 1074
_NO_GROUP: Final[Key] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """One line of a reduction: the value of `by` (None without it) and what the items of that group amount to."""

    by: Value
    value: Value


class Reduction(Generic[T]):
    """The reduction of a changing set of items, named by tokens that compare."""

    def __init__(self, reduce: Reduce) -> None:
        self._kind = reduce.reducer
        self._read = None if reduce.field is None else reader(reduce.field)
        self._by = None if reduce.by is None else reader(reduce.by)
        self._parts: dict[T, tuple[Key, Value]] = {}  # what each item put in: its group and its value
        self._groups: dict[Key, _Group[T]] = {}
        if self._by is None:  # the one group is there even when no item is
            self._groups[_NO_GROUP] = _Group(None, self._kind)
        self._before: dict[Key, Group | None] = {}  # groups touched since `settle`, as they were

    def put(self, token: T, row: Row) -> None:
        """Add an item, or change what it puts in."""
        by = None if self._by is None else self._by(row)
        group = _NO_GROUP if self._by is None else order_key(by)
        value: Value = True if self._read is None else self._read(row)
        part = self._parts.get(token)
        if part is not None:
            if part[0] == group and same(part[1], value):
                return
            self.drop(token)
        self._remember(group)
        if group not in self._groups:
            self._groups[group] = _Group(normal(by), self._kind)
        self._groups[group].add(token, value)
        self._parts[token] = (group, value)

    def drop(self, token: T) -> None:
        group, value = self._parts[token]
        self._remember(group)
        del self._parts[token]
        self._groups[group].remove(token, value)
        if self._groups[group].items == 0 and self._by is not None:
            del self._groups[group]

    def settle(self) -> tuple[tuple[Group, ...], tuple[Value, ...]]:
        """Since the last call: the groups whose value is new, and the `by` of those that are gone."""
        fresh, gone = [], []
        for key in sorted(self._before):
            before, after = self._before[key], self._line(key)
            if after is None:
                if before is not None:
                    gone.append(before.by)
            elif before is None or not same(before.value, after.value):
                fresh.append(after)
        self._before.clear()
        return tuple(fresh), tuple(gone)

    def groups(self) -> tuple[Group, ...]:
        """All groups, in the order of `by`."""
        return tuple(
            Group(group.by, self._value(group)) for _, group in sorted(self._groups.items(), key=itemgetter(0))
        )

    def _remember(self, key: Key) -> None:
        if key not in self._before:
            self._before[key] = self._line(key)

    def _line(self, key: Key) -> Group | None:
        group = self._groups.get(key)
        return None if group is None else Group(group.by, self._value(group))

    def _value(self, group: "_Group[T]") -> Value:
        if self._kind is Reducer.COUNT:
            return group.counted
        if self._kind is Reducer.SUM:
            return group.numbers.sum()
        if self._kind is Reducer.MEAN:
            return group.numbers.mean()
        if not group.keys:
            return None
        entry = group.keys.first() if self._kind is Reducer.MIN else group.keys.last()
        return self._parts[entry[-1]][1]


class _Group(Generic[T]):
    """The items of one group, kept as far as the kind of reduction needs them."""

    __slots__ = ("by", "counted", "items", "keys", "numbers", "sorts")

    def __init__(self, by: Value, kind: Reducer) -> None:
        self.by = by
        self.items = 0
        self.counted = 0
        self.sorts = kind in (Reducer.MIN, Reducer.MAX)
        self.numbers = Numbers()
        self.keys = SortedKeys()

    def add(self, token: T, value: Value) -> None:
        self.items += 1
        self.counted += value is not None
        if not self.sorts:
            self.numbers.add(value)
        elif value is not None:
            self.keys.add((*order_key(value), token))

    def remove(self, token: T, value: Value) -> None:
        self.items -= 1
        self.counted -= value is not None
        if not self.sorts:
            self.numbers.remove(value)
        elif value is not None:
            self.keys.remove((*order_key(value), token))


class Numbers:
    """An exact running sum of integers and floats, from which numbers can be taken again."""

    __slots__ = ("_count", "_floats", "_infinite", "_integers", "_nans", "_scaled")

    def __init__(self) -> None:
        self._count = 0
        self._floats = 0
        self._nans = 0
        self._infinite = {math.inf: 0, -math.inf: 0}
        self._integers = 0
        self._scaled = 0  # the finite floats, times 2^1074

    def add(self, value: Value) -> None:
        self._change(value, 1)

    def remove(self, value: Value) -> None:
        self._change(value, -1)

    def sum(self) -> int | float:
        if not self._floats:
            return self._integers
        return self._special() or _divide((self._integers << _SCALE_BITS) + self._scaled, 1 << _SCALE_BITS)

    def mean(self) -> float | None:
        if not self._count:
            return None
        return self._special() or _divide((self._integers << _SCALE_BITS) + self._scaled, self._count << _SCALE_BITS)

    def _change(self, value: Value, sign: int) -> None:
        kind = type(value)
        if kind is int:
            self._integers += sign * value
        elif kind is not float:
            return
        else:
            self._floats += sign
            if math.isnan(value):
                self._nans += sign
            elif math.isinf(value):
                self._infinite[value] += sign
            else:
                over, under = value.as_integer_ratio()  # `under` is a power of two
                self._scaled += sign * (over << (_SCALE_BITS + 1 - under.bit_length()))
        self._count += sign

    def _special(self) -> float | None:
        """NaN or an infinity when the numbers hold one; None when the sum is finite."""
        up, down = self._infinite[math.inf], self._infinite[-math.inf]
        if self._nans or (up and down):
            return math.nan
        return math.inf if up else -math.inf if down else None


def _divide(over: int, under: int) -> float:
    """The nearest float to a quotient of integers."""
    try:
        return over / under
    except OverflowError:
        return math.inf if over > 0 else -math.inf
