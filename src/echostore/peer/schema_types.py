"""What a schema says: the fields of a type, and whether a value fits one. Values only; nothing here reads a party.

A schema lives in the party as a property-set item of type "schema":

    for_type  "task"
    fields    {"text": {"type": "string", "required": True}, "owner": {"type": "reference", "target": "person"}}
    closed    False

It may have been written by anybody, with any version of this program. So reading one never fails: what can't be
understood asks for nothing, and `schema_problems` lists it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import ItemId
from echostore.kernel.models.property_set import DELETED
from echostore.kernel.values import BlobRef, Reference, Value

SCHEMA_TYPE = "schema"
"""The type of schema items."""

SHOWN_CHARACTERS_MAX = 60
"""How much of an offending value a message repeats: enough to recognise it."""


class FieldType(StrEnum):
    """What a field holds."""

    NULL = "null"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STRING = "string"
    BYTES = "bytes"
    TIMESTAMP = "timestamp"
    LIST = "list"
    MAP = "map"
    REFERENCE = "reference"
    BLOB = "blob"
    ANY = "any"


_PYTHON_TYPES: dict[type, FieldType] = {
    bool: FieldType.BOOL,
    int: FieldType.INT,
    float: FieldType.FLOAT,
    str: FieldType.STRING,
    bytes: FieldType.BYTES,
    datetime: FieldType.TIMESTAMP,
    list: FieldType.LIST,
    dict: FieldType.MAP,
    Reference: FieldType.REFERENCE,
    BlobRef: FieldType.BLOB,
}

TargetProblem = Callable[[Reference, str], str | None]
"""What is wrong with a reference that should lead to an item of a type ("" for any); None when nothing is."""


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One field. An optional one may be absent or null; a required one is there and says something.

    `target` is the type of the item that a reference leads to; of a list, that of the items its elements refer to.
    """

    type: FieldType = FieldType.ANY
    required: bool = False
    target: str = ""
    index: bool = False

    def problem(self, value: Value, target_problem: TargetProblem) -> str | None:
        """Why a value (DELETED when there is none) does not fit; None when it does."""
        wanted = self.type
        if value is DELETED:
            return f"is required (a {wanted}) and missing" if self.required else None
        if wanted is FieldType.ANY or (value is None and not self.required):
            return None
        given = field_type_of(value)
        # A whole number is a float that happens to be one: `price = 3` is no mistake.
        if given is not wanted and not (wanted is FieldType.FLOAT and given is FieldType.INT):
            return f"expects a {wanted}, given {_shown(given, value)}"
        if wanted is FieldType.REFERENCE:
            return target_problem(value, self.target)
        if wanted is FieldType.LIST and self.target:
            return self._element_problem(value, target_problem)
        return None

    def _element_problem(self, elements: list[Value], target_problem: TargetProblem) -> str | None:
        for place, element in enumerate(elements):
            if not isinstance(element, Reference):
                given = _shown(field_type_of(element), element)
                return f"expects references to items of type {self.target!r}, element {place} is {given}"
            problem = target_problem(element, self.target)
            if problem:
                return f"element {place} {problem}"
        return None

    def to_value(self) -> dict[str, Value]:
        """How the schema item holds it: what is as usual is left out."""
        value: dict[str, Value] = {"type": str(self.type)}
        if self.required:
            value["required"] = True
        if self.target:
            value["target"] = self.target
        if self.index:
            value["index"] = True
        return value


@dataclass(frozen=True, slots=True)
class Schema:
    """What holds for the items of one type. `item` is the schema item that says so."""

    item: ItemId
    for_type: str
    fields: Mapping[str, SchemaField]
    closed: bool = False

    def field_problem(self, name: str, value: Value, target_problem: TargetProblem) -> str | None:
        """Why a value can't stand at a field; DELETED stands for no value."""
        field = self.fields.get(name)
        if field is not None:
            return field.problem(value, target_problem)
        if self.closed and value is not DELETED:
            return f"is not a field of {self.for_type!r}, whose schema is closed"
        return None

    def problems(self, values: Mapping[str, Value], target_problem: TargetProblem) -> Iterator[tuple[str, str]]:
        """Every field of an item that does not fit, with the reason."""
        for name in sorted({*self.fields, *values}):
            problem = self.field_problem(name, values.get(name, DELETED), target_problem)
            if problem:
                yield name, problem

    @property
    def indexed(self) -> list[str]:
        """Fields that queries filter on often."""
        return [name for name, field in self.fields.items() if field.index]


def field_type_of(value: Value) -> FieldType:
    """The type of a plain value."""
    if value is None:
        return FieldType.NULL
    found = _PYTHON_TYPES.get(type(value))
    if found is not None:
        return found
    assert isinstance(value, datetime), type(value)  # the only value type that may come as a subclass
    return FieldType.TIMESTAMP


def schema_field(given: Any) -> SchemaField:
    """A field as people write it: a SchemaField, the name of a type, a map like the stored one, or a Python type."""
    if isinstance(given, SchemaField):
        return given
    if isinstance(given, str):
        given = {"type": given}
    if isinstance(given, Mapping):
        problem = _field_definition_problem(dict(given))
        if problem:
            raise UsageError(f"a schema field {problem}")
        return _read_field(given)
    if isinstance(given, type) and given in _PYTHON_TYPES:
        return SchemaField(_PYTHON_TYPES[given])
    raise UsageError(
        f"{given!r} is not a schema field", next_step=f"Give one of {', '.join(FieldType)}, or a SchemaField."
    )


def python_field_type(kind: object) -> FieldType | None:
    """The field type that a plain Python type stands for."""
    return _PYTHON_TYPES.get(kind) if isinstance(kind, type) else None


def read_schema(item: ItemId, values: Mapping[str, Value]) -> Schema | None:
    """The schema that an item's properties are; None when they don't say for which type."""
    for_type = values.get("for_type")
    if not isinstance(for_type, str) or not for_type:
        return None
    fields = values.get("fields")
    read = {name: _read_field(each) for name, each in fields.items()} if isinstance(fields, dict) else {}
    return Schema(item, for_type, read, closed=values.get("closed") is True)


def schema_problems(values: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """What a schema item says that can't be understood, and therefore asks for nothing."""
    for_type, fields, closed = values.get("for_type"), values.get("fields", {}), values.get("closed", False)
    if not isinstance(for_type, str) or not for_type:
        yield "for_type", "must name a type"
    if not isinstance(closed, bool):
        yield "closed", "must be true or false"
    if not isinstance(fields, dict):
        yield "fields", "must be a map from names to fields"
        return
    for name, value in fields.items():
        problem = _field_definition_problem(value)
        if problem:
            yield f"fields.{name}", problem


_PARTS: dict[str, type] = {"type": str, "required": bool, "target": str, "index": bool}


def _field_definition_problem(value: Value) -> str | None:
    if not isinstance(value, dict):
        return f"must be a map, not {_shown(field_type_of(value), value)}"
    if value.get("type") not in list(FieldType):
        return f"has the type {value.get('type')!r}; types are {', '.join(FieldType)}"
    for name, part in value.items():
        if name not in _PARTS:
            return f"has an unknown part {name!r}; parts are {', '.join(_PARTS)}"
        if not isinstance(part, _PARTS[name]):
            return f"has {part!r} for {name!r}, which must be a {_PYTHON_TYPES[_PARTS[name]]}"
    return None


def _read_field(value: Value) -> SchemaField:
    """A stored field; what is malformed in it asks for nothing."""
    if not isinstance(value, Mapping):
        return SchemaField()
    kind, target = value.get("type"), value.get("target")
    return SchemaField(
        FieldType(kind) if isinstance(kind, str) and kind in list(FieldType) else FieldType.ANY,
        required=value.get("required") is True,
        target=target if isinstance(target, str) else "",
        index=value.get("index") is True,
    )


def _shown(given: FieldType, value: Value) -> str:
    if value is None:
        return "null"
    text = repr(value)
    cut = text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"
    return f"{given} {cut}"
