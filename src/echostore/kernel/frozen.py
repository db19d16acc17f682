"""Lists and maps that were read: equal to plain ones, and every attempt to change one raises.

A read gives a copy of the state; a change of that copy would be lost without a word. So lists and maps inside values come
as `FrozenList` and `FrozenDict`. They are lists and dicts to everything that only reads (equality, `json`, unpacking,
`isinstance`); copying and pickling gives plain ones, all the way down:

    tags = item["tags"].copy(); tags.append("x"); item["tags"] = tags
"""

from types import NoneType
from typing import Any, Final, Never, Self

from echostore.kernel.errors import ReadOnlyValue
from echostore.kernel.values import Value

_ATOMS: Final = frozenset((str, int, float, bool, bytes, NoneType))
"""Most values: they can't be changed anyway."""


def _refuse(self: object, *arguments: object, **more: object) -> Never:
    kind, write = ("list", 'item["tags"] = [*item["tags"], "x"]') if isinstance(self, list) else _MAP
    raise ReadOnlyValue(
        f"this {kind} is a copy of what was read, and changing it would change no item",
        next_step=f"Write the item instead: {write}. For a {kind} of your own, use its copy().",
    )


_MAP: Final = ("map", 'item["map", "key"] = 2')


class FrozenList(list[Any]):
    """A list that was read."""

    __slots__ = ()

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def copy(self) -> list[Any]:
        """A plain list; what is nested in it is plain too."""
        return [plain_copy(each) for each in self]

    def __copy__(self) -> list[Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> tuple[type[list[Any]], tuple[tuple[Any, ...]]]:
        return list, (tuple(self),)


class FrozenDict(dict[str, Any]):
    """A map that was read."""

    __slots__ = ()

    update = setdefault = pop = popitem = clear = _refuse
    __setitem__ = __delitem__ = _refuse

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]  # it never returns
        _refuse(self)

    def copy(self) -> dict[str, Any]:
        """A plain map; what is nested in it is plain too."""
        return {key: plain_copy(each) for key, each in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> tuple[type[dict[str, Any]], tuple[tuple[tuple[str, Any], ...]]]:
        return dict, (tuple(self.items()),)


def frozen(value: Value) -> Value:
    """A value as a reader gets it: lists and maps are copied and frozen."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is FrozenList or kind is FrozenDict:
        return value
    if isinstance(value, list):
        return FrozenList([each if type(each) in _ATOMS else frozen(each) for each in value])
    if isinstance(value, dict):
        return FrozenDict([(key, each if type(each) in _ATOMS else frozen(each)) for key, each in value.items()])
    return value


def plain_copy(value: Value) -> Value:
    """A value of the caller's own: lists and maps are copied and can be changed."""
    if isinstance(value, list):
        return [plain_copy(each) for each in value]
    if isinstance(value, dict):
        return {key: plain_copy(each) for key, each in value.items()}
    return value
