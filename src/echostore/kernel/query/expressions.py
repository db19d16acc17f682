"""How a person writes filters: keywords with a suffix, or `field(...)` with operators.

    where(done=False, priority__ge=3, title__contains="x", tag__in=["a", "b"], due__exists=True)
    where((field("address.city") == "Rome") | ~(field("priority") < 3))

The keywords `item`, `type` and `parent` mean the item's own; a property of such a name is written `field("type")`.
Every mistake is a UsageError that says how to write it instead.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import ITEM_ID_BYTES, ItemId, PartyKey, item_from_text
from echostore.kernel.query.fields import CREATED, ITEM, PARENT, TYPE, Field, FieldName, parse_field
from echostore.kernel.query.filters import Compare, Filter, Not, Op
from echostore.kernel.query.spec import Order
from echostore.kernel.values import Reference, Value, check_value, kind_of

SUFFIXES = ("eq", "ne", "lt", "le", "gt", "ge", "in", "contains", "startswith", "exists")
_OPS = {suffix: Op[suffix.upper()] for suffix in SUFFIXES if suffix != "ne"}
_OWN = {"item": ITEM, "type": TYPE, "parent": PARENT}
_ORDERED = (Op.LT, Op.LE, Op.GT, Op.GE)


class FieldExpression:
    """A field in a Python expression; comparing it gives a filter."""

    __slots__ = ("field",)
    __hash__ = None  # type: ignore[assignment]  # == gives a filter, so a hash could only mislead

    def __init__(self, name: FieldName | Field) -> None:
        self.field = parse_field(name)

    def __eq__(self, value: Value) -> Filter:  # type: ignore[override]  # the point of the class
        return compare(self.field, "eq", value)

    def __ne__(self, value: Value) -> Filter:  # type: ignore[override]  # as above
        return compare(self.field, "ne", value)

    def __lt__(self, value: Value) -> Filter:
        return compare(self.field, "lt", value)

    def __le__(self, value: Value) -> Filter:
        return compare(self.field, "le", value)

    def __gt__(self, value: Value) -> Filter:
        return compare(self.field, "gt", value)

    def __ge__(self, value: Value) -> Filter:
        return compare(self.field, "ge", value)

    def in_(self, values: Iterable[Value]) -> Filter:
        return compare(self.field, "in", values)

    def contains(self, value: Value) -> Filter:
        return compare(self.field, "contains", value)

    def startswith(self, value: str | bytes) -> Filter:
        return compare(self.field, "startswith", value)

    def exists(self, wanted: bool = True) -> Filter:
        return compare(self.field, "exists", wanted)

    def __neg__(self) -> Order:
        """Downwards, in order_by."""
        return Order(self.field, descending=True)

    def __bool__(self) -> bool:
        raise UsageError(
            f"the field {self.field} has no truth value of its own",
            next_step=f'Compare it: field("{self.field}") == True, or ask for .exists().',
        )

    def __repr__(self) -> str:
        return f"field({str(self.field)!r})"


def field(name: FieldName) -> FieldExpression:
    """A field to compare: `field("a.b") >= 3`, `field(("a.b", "c")).contains("x")`, `field("@type") == "task"`."""
    return FieldExpression(name)


def comparisons(keywords: Mapping[str, Value]) -> list[Filter]:
    """The filters that keyword arguments such as `priority__ge=3` stand for."""
    return [_keyword(keyword, value) for keyword, value in keywords.items()]


def compare(place: Field, suffix: str, value: Value) -> Filter:
    """One comparison, with its value checked."""
    if suffix == "ne":
        return Not(compare(place, "eq", value))
    op = _OPS[suffix]
    if op is Op.EXISTS:
        if not isinstance(value, bool):
            raise UsageError(f"{place}: exists wants true or false, not {kind_of(value)}")
        return Compare(place, op) if value else Not(Compare(place, op))
    if op is Op.IN:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise UsageError(
                f"{place}: in wants a list of values, not {kind_of(value)}",
                next_step="Write ...__in=[one, two], or ...__contains=... to look inside a text or list.",
            )
        return Compare(place, op, tuple(_constant(place, element) for element in value))
    constant = _constant(place, value)
    if op is Op.STARTSWITH and not isinstance(constant, (str, bytes)):
        raise UsageError(f"{place}: startswith wants text or bytes, not {kind_of(value)}")
    if op in _ORDERED and constant is None:
        raise UsageError(
            f"{place}: nothing is less or greater than null",
            next_step=f"Ask for {place}__exists=False, or compare with a value.",
        )
    return Compare(place, op, constant)


def item_of(value: Any) -> ItemId | None:
    """The item that a handle, reference, id or its text names; None when it names none."""
    if isinstance(value, Reference):
        return value.item
    if isinstance(value, str):
        try:
            return item_from_text(value)
        except ValueError:
            return None
    raw = value if isinstance(value, bytes) else getattr(value, "id", None)
    return ItemId(raw) if isinstance(raw, bytes) and len(raw) == ITEM_ID_BYTES else None


def _keyword(keyword: str, value: Value) -> Filter:
    name, separator, suffix = keyword.rpartition("__")
    if not separator:
        name, suffix = keyword, "eq"
    elif suffix not in SUFFIXES or not name:
        raise UsageError(
            f"{keyword!r}: {suffix!r} is not a comparison",
            next_step=f"Comparisons are {', '.join(SUFFIXES)}. A nested property or a name with __ in it is written "
            f'field("{keyword.replace("__", ".")}") == ... .',
        )
    return compare(_OWN.get(name) or parse_field(name), suffix, value)


def _constant(place: Field, value: Any) -> Value:
    """The value to compare with: item handles become references, for item and parent so do ids and texts."""
    if place.attribute and place in (ITEM, PARENT):
        item = item_of(value)
        if item is None and value is not None:
            raise UsageError(
                f"{place}: {value!r} does not name an item", next_step="Pass an item, its id, or its 32 hex digits."
            )
        return None if item is None else Reference(item, *_owner(value))
    if place == CREATED:
        return _moment(value)
    if place == TYPE and not isinstance(value, (str, type(None))):
        raise UsageError(f"{place}: a type is text, not {kind_of(value)}")
    item = None if isinstance(value, (str, bytes, Reference)) else item_of(value)
    return Reference(item, *_owner(value)) if item is not None else check_value(value, where=str(place))


def _owner(value: Any) -> tuple[PartyKey | None, PartyKey | None]:
    """The party that a reference names and the one whose handle gave it; of an item's handle the latter."""
    if isinstance(value, Reference):
        return value.party, value.within
    reference = None if isinstance(value, (str, bytes)) else getattr(value, "reference", None)
    return (None, reference.within) if isinstance(reference, Reference) else (None, None)


def _moment(value: Any) -> datetime | None:
    """The time that `@created` is compared with: a datetime, or its text; both with a zone."""
    moment = value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if moment is not None and (not isinstance(moment, datetime) or moment.tzinfo is None):
        moment = None
    if moment is None and value is not None:
        raise UsageError(
            f"{CREATED}: {value!r} is not a time with a zone",
            next_step='Compare with a datetime that has one, or with text such as "2026-05-01T10:00:00Z".',
        )
    return None if moment is None else moment.astimezone(UTC)
