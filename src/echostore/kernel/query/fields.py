"""Fields: places in a row that queries filter, order, group and project by.

    "title"           the property title
    "address.city"    the property city inside the map address; a missing step reads as null
    ("a.b", "c")      the same as a tuple, for keys that hold a dot
    "@type"           an attribute of the item itself, see `Attribute`

A property whose name starts with @ is written as a tuple.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from echostore.kernel.errors import EchoError, UsageError
from echostore.kernel.ids import ItemId
from echostore.kernel.query.source import Row
from echostore.kernel.values import Path, Reference, Value, check_path, kind_of

Read = Callable[[Row], Value]
FieldName = str | tuple[str, ...]


class Attribute(StrEnum):
    """What an item has besides its properties. Items are read as references, `created` as a time: what the clock of
    its maker showed, null when the block that made it is not here."""

    ITEM = "item"
    TYPE = "type"
    MODEL = "model"
    PARENT = "parent"
    DELETED = "deleted"
    SOURCE = "source"
    TARGET = "target"
    CREATED = "created"
    VIEW_CLASS = "view_class"


@dataclass(frozen=True, slots=True)
class Field:
    """A property path, or the name of an attribute."""

    steps: Path
    attribute: bool = False

    def __str__(self) -> str:
        return "@" + self.steps[0] if self.attribute else ".".join(self.steps)


def attribute(name: Attribute) -> Field:
    return Field((name.value,), attribute=True)


ITEM, TYPE, PARENT = attribute(Attribute.ITEM), attribute(Attribute.TYPE), attribute(Attribute.PARENT)
CREATED = attribute(Attribute.CREATED)


def parse_field(name: FieldName | Field) -> Field:
    """The field that a person named; UsageError with the fix when it names none."""
    if isinstance(name, Field):
        return name
    if isinstance(name, str) and name.startswith("@"):
        if name[1:] not in list(Attribute):
            known = ", ".join("@" + each for each in Attribute)
            raise UsageError(
                f"{name!r} is not an attribute of an item",
                next_step=f"Attributes are {known}; write a property of this name as a tuple: ({name!r},).",
            )
        return Field((name[1:],), attribute=True)
    if not isinstance(name, (str, tuple)):
        raise UsageError(
            f"a field is named by text or a tuple of texts, not by {kind_of(name)}",
            next_step='Write "a.b" or ("a", "b").',
        )
    if isinstance(name, str) and not all(name.split(".")):
        raise UsageError(f"{name!r} is not a field path: a step of it is empty", next_step='Write "a" or "a.b".')
    try:
        return Field(check_path(tuple(name.split(".")) if isinstance(name, str) else name))
    except EchoError as error:
        raise UsageError(
            f"{name!r} is not a field path: {error.what}",
            next_step='Write the steps with single dots, "a.b", or as a tuple, ("a", "b"), when a key holds a dot.',
        ) from error


def reader(field: Field) -> Read:
    """A function that reads the field from a row; what is missing reads as None."""
    if field.attribute:
        return _ATTRIBUTES[Attribute(field.steps[0])]
    steps = field.steps
    if len(steps) == 1:
        name = steps[0]
        return lambda row: row.values.get(name)
    return lambda row: _walk(row, steps, None)


def presence(field: Field) -> Callable[[Row], bool]:
    """Whether the row has the field at all; a property that holds null is there."""
    if field.attribute:
        read = reader(field)
        return lambda row: read(row) is not None
    steps = field.steps
    return lambda row: _walk(row, steps, _MISSING) is not _MISSING


_MISSING = object()


def _walk(row: Row, steps: Path, missing: Value) -> Value:
    value = row.values.get(steps[0], missing)
    for step in steps[1:]:
        if not isinstance(value, dict) or step not in value:
            return missing
        value = value[step]
    return value


def _reference(item: ItemId | None) -> Reference | None:
    return None if item is None else Reference(item)


def _moment(time_ms: int | None) -> datetime | None:
    """A writer's clock may show anything; what no calendar has reads as unknown."""
    try:
        return None if time_ms is None else _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_ATTRIBUTES: dict[Attribute, Read] = {
    Attribute.ITEM: lambda row: Reference(row.item),
    Attribute.TYPE: lambda row: row.type,
    Attribute.MODEL: lambda row: row.model,
    Attribute.PARENT: lambda row: _reference(row.parent),
    Attribute.DELETED: lambda row: row.deleted,
    Attribute.SOURCE: lambda row: _reference(row.source),
    Attribute.TARGET: lambda row: None if row.target is None else Reference(row.target, row.target_party),
    Attribute.CREATED: lambda row: _moment(row.time_of(row.item)),
    Attribute.VIEW_CLASS: lambda row: row.view_class,
}
