"""Dataclasses as items: an instance becomes a property set whose schema comes from the annotations, and back.

    @dataclass
    class Task:
        text: str                                            required string
        due: datetime | None = None                          optional timestamp
        owner: Person | None = None                          reference to an item of type "person"
        done: bool = field(default=False, metadata={"index": True})

The type is the class name in lower case ("RoadTrip" -> "road-trip") unless the class says `__echo_type__`. An instance
that another one holds becomes an item of its own, created before it in the same batch, and is read back as an
instance. Fields that `__init__` does not take are not stored.
"""

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from echostore.kernel.errors import SchemaViolation, UsageError
from echostore.kernel.frozen import plain_copy
from echostore.kernel.ids import item_text
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.values import BlobRef, Reference, Value
from echostore.peer.item_kinds import PropertySetItem
from echostore.peer.items import Item
from echostore.peer.schema_types import FieldType, SchemaField, python_field_type

if TYPE_CHECKING:
    from echostore.peer.party import Party

_VALUE_CLASSES = (Reference, BlobRef)
"""Dataclasses that are values themselves."""

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def is_dataclass_instance(obj: object) -> bool:
    return is_dataclass(obj) and not isinstance(obj, (type, *_VALUE_CLASSES))


def type_name(cls: Any) -> str:
    """The item type of a dataclass."""
    _check_dataclass(cls)
    named = cls.__dict__.get("__echo_type__")
    if named is None:
        return _WORD_START.sub("-", cls.__name__).replace("_", "-").lower()
    if not isinstance(named, str) or not named:
        raise UsageError(f"{cls.__name__}.__echo_type__ must be text, not {named!r}")
    return named


@cache
def fields_of(cls: type) -> Mapping[str, SchemaField]:
    """The schema's fields of a dataclass."""
    hints = _hints(cls)
    return {each.name: _schema_field(cls, each, hints[each.name]) for each in _stored_fields(cls)}


def create_from_dataclass(party: "Party", obj: Any, *, parent: Item | None, name: str) -> PropertySetItem:
    """Make an item of an instance. On first use the class defines the schema of its type, or adds what it lacks."""
    for cls in _with_referred(type(obj)):
        party.schemas.extend(type_name(cls), fields_of(cls))
    with party.batch():
        return _create(party, obj, parent, name, ())


def to_dataclass(item: PropertySetItem, cls: type) -> Any:
    """The instance that an item stands for now."""
    return _load(item, cls, ())


# out of an instance


def _create(party: "Party", obj: Any, parent: Item | None, name: str, holders: tuple[int, ...]) -> PropertySetItem:
    if id(obj) in holders:
        raise UsageError(
            f"a {type(obj).__name__} holds itself", next_step="Create one first and put its handle into the other."
        )
    inner = (*holders, id(obj))
    properties = {each.name: _plain(party, getattr(obj, each.name), inner) for each in _stored_fields(type(obj))}
    made: PropertySetItem = party._create(
        PropertySet.name,
        PropertySet.version,
        type=type_name(type(obj)),
        parent=parent,
        name=name,
        properties=properties,
    )
    return made


def _plain(party: "Party", value: Any, holders: tuple[int, ...]) -> Value:
    if is_dataclass_instance(value):
        return _create(party, value, None, "", holders).reference
    if isinstance(value, (list, tuple)):
        return [_plain(party, each, holders) for each in value]
    if isinstance(value, dict):
        return {key: _plain(party, each, holders) for key, each in value.items()}
    return value.value if isinstance(value, Enum) else value


# back into an instance


def _load(item: PropertySetItem, cls: type, above: tuple[PropertySetItem, ...]) -> Any:
    wanted = type_name(cls)
    if item.type != wanted:
        raise UsageError(f"item {item_text(item.id)[:8]} is a {item.type!r}, not a {wanted!r}")
    if any(item.id == each.id for each in above):
        raise UsageError(
            f"item {item_text(item.id)[:8]} leads back to itself",
            next_step=f"Annotate the field of {cls.__name__} with Reference.",
        )
    hints, values = _hints(cls), item.to_dict()
    arguments = {}
    for each in _stored_fields(cls):
        if each.name in values:
            arguments[each.name] = _shaped(item, values[each.name], hints[each.name], (*above, item))
        elif each.default is MISSING and each.default_factory is MISSING:
            if not fields_of(cls)[each.name].required:
                arguments[each.name] = None
            else:
                raise SchemaViolation(
                    f"item {item_text(item.id)[:8]} has no {each.name!r}, which {cls.__name__} needs",
                    next_step="party.schemas.violations() lists such items.",
                )
    return cls(**arguments)


def _shaped(item: PropertySetItem, value: Value, hint: Any, above: tuple[PropertySetItem, ...]) -> Any:
    """A stored value in the form that an annotation asks for. What does not fit it stays as it is."""
    hint = _without_none(hint)
    if value is None:
        return None
    if isinstance(value, Reference):
        return _referred(item, value, hint, above)
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if isinstance(value, list) and origin in (list, tuple):
        shaped = [_shaped(item, each, _element_hint(origin, inner, place), above) for place, each in enumerate(value)]
        return tuple(shaped) if origin is tuple else shaped
    if isinstance(value, dict) and origin is dict and len(inner) == 2:
        return {key: _shaped(item, each, inner[1], above) for key, each in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(hint, type) and issubclass(hint, Enum) and value in {each.value for each in hint}:
        return hint(value)
    return plain_copy(value)


def _referred(item: PropertySetItem, reference: Reference, hint: Any, above: tuple[PropertySetItem, ...]) -> Any:
    """What a reference leads to, as the annotation wants it; the reference itself when that is not here."""
    party = item.party
    if reference.party is not None or not party.has(reference.item):
        return reference
    target = party.handle(reference.item)
    if isinstance(hint, type) and issubclass(hint, Item):
        return target
    if _is_referred_class(hint) and isinstance(target, PropertySetItem) and target.type == type_name(hint):
        return _load(target, hint, above)
    return reference


# annotations


def _schema_field(cls: type, each: "Field[Any]", hint: Any) -> SchemaField:
    bare = _without_none(hint)
    kind, target = _kind(cls, each.name, bare)
    return SchemaField(
        kind,
        required=bare is hint and hint is not Any and hint is not type(None),
        target=each.metadata.get("target", target),
        index=bool(each.metadata.get("index", False)),
    )


def _kind(cls: type, name: str, hint: Any) -> tuple[FieldType, str]:
    """The field type of an annotation and, of references, the type they lead to."""
    origin = get_origin(hint) or hint
    plain = python_field_type(origin)
    if origin in (list, tuple):
        inner = get_args(hint)
        only = inner[0] if inner and (len(inner) == 1 or inner[1:] == (...,)) else None
        return FieldType.LIST, type_name(only) if _is_referred_class(only) else ""
    if plain is not None:
        return plain, ""
    if hint is type(None):
        return FieldType.NULL, ""
    if _is_referred_class(hint):
        return FieldType.REFERENCE, type_name(hint)
    if isinstance(hint, type) and issubclass(hint, Item):
        return FieldType.REFERENCE, ""
    if isinstance(hint, type) and issubclass(hint, Enum):
        base = next((base for base in (int, str) if base in hint.__mro__), None)
        if base is not None:
            return _kind(cls, name, base)
    if hint is Any or origin in (Union, types.UnionType):
        return FieldType.ANY, ""
    raise UsageError(
        f"{cls.__name__}.{name}: a field annotated {hint!r} can't be stored",
        next_step="Use str, int, float, bool, bytes, datetime, list, dict, Reference, BlobRef or a dataclass.",
    )


def _with_referred(cls: type) -> list[type]:
    """A dataclass and those that its annotations lead to, each once."""
    found: list[type] = []
    front = [cls]
    while front:
        at = front.pop()
        if at not in found:
            found.append(at)
            front.extend(each for hint in _hints(at).values() for each in _classes_in(hint))
    return found


def _classes_in(hint: Any) -> list[type]:
    if _is_referred_class(hint):
        return [hint]
    return [found for inner in get_args(hint) for found in _classes_in(inner)]


def _is_referred_class(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint) and hint not in _VALUE_CLASSES


def _without_none(hint: Any) -> Any:
    """`X` of `X | None`; the annotation itself when None is not among its choices."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    choices = get_args(hint)
    if type(None) not in choices:
        return hint
    kept = tuple(each for each in choices if each is not type(None))
    return kept[0] if len(kept) == 1 else Union[kept]  # noqa: UP007 a union of a computed tuple has no other spelling


def _element_hint(origin: Any, inner: tuple[Any, ...], place: int) -> Any:
    if not inner:
        return Any
    if origin is tuple and inner[-1] is not ...:
        return inner[place] if place < len(inner) else Any
    return inner[0]


def _stored_fields(cls: type) -> "list[Field[Any]]":
    _check_dataclass(cls)
    return [each for each in fields(cls) if each.init]


@cache
def _hints(cls: type) -> dict[str, Any]:
    _check_dataclass(cls)
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise UsageError(
            f"an annotation of {cls.__name__} can't be resolved: {error}",
            next_step="Define the classes it names at the top of a module.",
        ) from error
    return {each.name: hints[each.name] for each in fields(cls)}


def _check_dataclass(cls: Any) -> None:
    if not _is_referred_class(cls):
        raise UsageError(f"{cls!r:.60} is not a dataclass", next_step="Decorate the class with @dataclass.")
