"""What callers of the API pass in: checked where it comes in, refused with what was wanted and what was given."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import ITEM_ID_BYTES, KEY_BYTES, ItemId
from echostore.kernel.values import check_value, kind_of

T = TypeVar("T")


def text(value: Any, what: str) -> str:
    """A text that can be stored."""
    if not isinstance(value, str):
        raise UsageError(f"{what} is text, not {kind_of(value)}")
    checked: str = check_value(value, where=what)
    return checked


def texts(values: Any, what: str) -> list[str]:
    """Several texts. One text alone is refused: its letters would be taken for them."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UsageError(f"{what} are a list of texts, not {kind_of(values)}")
    return [text(value, what) for value in values]


def key(value: Any, what: str) -> bytes:
    """A public key."""
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        given = f"{len(value)} bytes" if isinstance(value, bytes) else kind_of(value)
        raise UsageError(f"{what} is a key of {KEY_BYTES} bytes, not {given}")
    return value


def item_id(value: Any) -> ItemId:
    """The id of an item as bytes."""
    if not isinstance(value, bytes) or len(value) != ITEM_ID_BYTES:
        given = f"{len(value)} bytes" if isinstance(value, bytes) else kind_of(value)
        raise UsageError(
            f"an item id has {ITEM_ID_BYTES} bytes, not {given}", next_step="party.get(...) also takes its text."
        )
    return ItemId(value)


def whole(value: Any, what: str, *, least: int | None = None) -> int:
    """A whole number that fits 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} is a whole number, not {kind_of(value)}")
    if least is not None and value < least:
        raise UsageError(f"{what} counts from {least}, not {value}")
    checked: int = check_value(value, where=what)
    return checked


def seconds(value: Any, what: str) -> float | None:
    """A length of time, or None for ever."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise UsageError(f"{what} is a number of seconds, not {kind_of(value)}")
    return None if value is None else float(value)


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} is true or false, not {kind_of(value)}")
    return value


def function(value: Any, what: str) -> Callable[..., object]:
    if not callable(value):
        raise UsageError(f"{what} is a function, not {kind_of(value)}")
    found: Callable[..., object] = value
    return found


def instance(value: Any, kind: type[T], what: str) -> T:
    """An object of one of the API's own classes."""
    if not isinstance(value, kind):
        raise UsageError(f"{what} is a {kind.__name__}, not {kind_of(value)}")
    return value
