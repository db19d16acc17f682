"""Writes tests/golden/vectors.json: bytes that must mean the same for ever.

    python tests/golden/write.py          add vectors for messages and fields that have none; change no other

`schema` holds, for every message of the schema, filled instances as text (by field name) and as bytes (by field number):
a field that is renumbered, renamed or retyped no longer matches. `encoded` holds what our own encoders make of fixed
kernel values: an encoding that changes changes CIDs and view proofs. tests/test_messages.py compares both.

A vector that is there is never written again: whoever needs that changes the format, and says so in the change log.
"""

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import echostore.wire.generated as generated

HERE = Path(__file__).parent
VECTORS = HERE / "vectors.json"
DEPTH_MAX = 3
"""Messages that hold themselves are filled so deep."""


def message_types() -> dict[str, type[Message]]:
    """Every message of every schema file, nested ones by their dotted name."""
    found: dict[str, type[Message]] = {}
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            loaded = importlib.import_module(f"{generated.__name__}.{module.name}")
            for name in loaded.DESCRIPTOR.message_types_by_name:
                found[name] = getattr(loaded, name)
    return dict(sorted(found.items()))


def instances(kind: type[Message]) -> list[Message]:
    """One instance with all fields filled, and for each further alternative of a oneof one with that alone."""
    whole = kind()
    _fill(whole, 0)
    found = [whole]
    for group in kind.DESCRIPTOR.oneofs:
        for field in group.fields[1:]:
            single = kind()
            _set(single, field, 0)
            found.append(single)
    return found


def covered(kind: type[Message], texts: list[str]) -> set[str]:
    """The fields of a message that some vector sets."""
    fields: set[str] = set()
    for text in texts:
        fields |= {field.name for field, _ in text_format.Parse(text, kind()).ListFields()}
    return fields


def schema_vector(message: Message) -> dict[str, str]:
    return {
        "text": text_format.MessageToString(message, as_one_line=True),
        "bytes": message.SerializeToString(deterministic=True).hex(),
    }


def _fill(message: Message, depth: int) -> None:
    done: set[str] = set()
    for field in message.DESCRIPTOR.fields:
        group = field.containing_oneof
        if group is not None:
            if group.name in done:
                continue
            done.add(group.name)
        _set(message, field, depth)


def _set(message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        if depth >= DEPTH_MAX and _holds_itself(field.message_type):
            return
        inner = getattr(message, field.name)
        for target in (inner.add(), inner.add()) if field.is_repeated else (inner,):
            target.SetInParent()
            _fill(target, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).extend([_scalar(field, 0), _scalar(field, 1)])
    else:
        setattr(message, field.name, _scalar(field, 0))


def _holds_itself(descriptor: Descriptor, seen: frozenset[str] = frozenset()) -> bool:
    if descriptor.full_name in seen:
        return True
    below = seen | {descriptor.full_name}
    return any(
        field.message_type is not None and _holds_itself(field.message_type, below) for field in descriptor.fields
    )


def _scalar(field: FieldDescriptor, index: int) -> Any:
    """A value that says which field it is of, and needs more than one byte where it can."""
    number = field.number * 300 + index
    if field.enum_type is not None:
        return field.enum_type.values[-1 - index].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = f"{field.name}-{index}"
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else f"{text}-é"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return index == 0
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return number + 0.5
    return -number if field.type in (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64) else number


def main() -> None:
    sys.path.insert(0, str(HERE))
    from encoded import encoded

    known = json.loads(VECTORS.read_text()) if VECTORS.exists() else {"schema": {}, "encoded": {}}
    for name, kind in message_types().items():
        vectors = known["schema"].setdefault(name, [])
        for message in instances(kind):
            fields = {field.name for field, _ in message.ListFields()}
            if not vectors or not fields <= covered(kind, [vector["text"] for vector in vectors]):
                vectors.append(schema_vector(message))
    for name, data in encoded().items():
        known["encoded"].setdefault(name, data.hex())
    known["schema"] = dict(sorted(known["schema"].items()))
    VECTORS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
