"""What travels over the local socket: plain values and small records by value, living objects by a number.

    null, true, 1, 1.5, "text", bytes     themselves
    [tag, ...]                            everything else: see `_TAGS`

Nothing arrives that could run code: records are dataclasses of the list below, made by their own constructors, and a
living object is only ever a number that the other side has given out.
"""

import dataclasses
import importlib
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

from echostore.kernel.errors import EchoError, UsageError
from echostore.kernel.frozen import FrozenDict, FrozenList
from echostore.kernel.models.property_set import DELETED
from echostore.kernel.query.expressions import FieldExpression

_TAGS: Final = """
l list   L list that was read   t tuple   s set   z frozenset   d map [key, value]...   D map that was read   v record, name, fields   e enum, name, value
n great number   m moment   p path   r living object, number, class, facts   f function, number   g what a function of the client gives   i iterator, number
c context manager, number   a Arrow table   x deleted
"""

_RECORDS: Final = {
    "echostore.peer.anchors": ("Anchor",),
    "echostore.peer.bootstrap": ("Fetched",),
    "echostore.peer.capabilities": ("IssuedCapability",),
    "echostore.peer.coherence_service": ("ThinIndexes", "ThinLink"),
    "echostore.peer.contacts": ("ContactDevice", "SharedContact", "SharedParty"),
    "echostore.peer.elsewhere": ("HeldElsewhere",),
    "echostore.peer.epoch_agreement": ("AcceptedEpoch", "Judged"),
    "echostore.peer.epoch_gc": ("Freed",),
    "echostore.peer.epochs": ("EpochPlan", "EpochView"),
    "echostore.peer.history": ("Revision", "ValueDiff"),
    "echostore.peer.identity": ("JoinRequest", "Welcome"),
    "echostore.peer.inviting": ("Issued",),
    "echostore.peer.made_anew": ("Revived",),
    "echostore.peer.network": ("Connected", "Seen"),
    "echostore.peer.delivered": ("Delivered",),
    "echostore.peer.progress": ("PartyProgress",),
    "echostore.peer.published_models": ("PublishedModel",),
    "echostore.peer.quotas": ("IntakeStatus",),
    "echostore.peer.schema": ("Violation",),
    "echostore.peer.schema_types": ("Schema", "SchemaField"),
    "echostore.peer.status": ("FeedStatus", "PartyStatus"),
    "echostore.store.home": ("Home",),
    "echostore.store.meta_store": ("Contact", "KnownFeed", "KnownParty"),
}
"""Records outside the kernel. Of the kernel every dataclass and named tuple is one."""

LIVING: Final = {
    "echostore.peer.capabilities": ("Capabilities",),
    "echostore.peer.coherence_service": ("ThinService",),
    "echostore.peer.epochs": ("Epochs",),
    "echostore.peer.files": ("Files",),
    "echostore.peer.inviting": ("Invitation", "Inviting"),
    "echostore.peer.item_kinds": ("ArrayItem", "CustomItem", "LogItem", "PropertySetItem", "TextItem"),
    "echostore.peer.items": ("Item",),
    "echostore.peer.members": ("Members",),
    "echostore.peer.network": ("Network",),
    "echostore.peer.party": ("Party",),
    "echostore.peer.peer": ("Peer",),
    "echostore.peer.query": ("MultiQuery", "Query"),
    "echostore.peer.query_live": ("Subscription", "Watch"),
    "echostore.peer.receipts": ("Receipt",),
    "echostore.peer.schema": ("Schemas",),
    "echostore.peer.snapshots": ("Snapshot",),
    "echostore.peer.streams": ("Stream",),
    "echostore.peer.view_classes": ("ViewClasses",),
    "echostore.store.meta_store": ("MetaStore",),
}
"""Objects that stay where they are and are used from the other side."""

_DEPTH_MAX = 64
"""Deeper than any value or record nests; a bound for hostile frames."""


class Codec:
    """Writes and reads values. `outgoing` names an object of this side that stays here, `incoming` finds or makes what
    stands for such a name."""

    def __init__(self, outgoing: Callable[[Any], list[Any] | None], incoming: Callable[[list[Any]], Any]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def pack(self, value: Any, depth: int = 0) -> Any:  # one line per kind of value
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else ["n", hex(value)]
        if depth > _DEPTH_MAX:
            raise UsageError("a value nested too deep to be sent to the running peer")
        if value is DELETED:
            return ["x"]
        if isinstance(value, Enum):
            return ["e", _name(type(value)), value.value]
        if isinstance(value, Path):
            return ["p", str(value)]
        named = self._outgoing(value)
        if named is not None:
            return named
        inner = depth + 1
        if _is_record(kind):
            return ["v", _name(kind), *(self.pack(getattr(value, each), inner) for each in _field_names(kind))]
        if isinstance(value, (bytearray, memoryview)):
            return bytes(value)
        if isinstance(value, dict):
            return [
                "D" if kind is FrozenDict else "d",
                *([self.pack(key, inner), self.pack(each, inner)] for key, each in value.items()),
            ]
        for kinds, tag in (((FrozenList,), "L"), ((list,), "l"), ((tuple,), "t"), ((set,), "s"), ((frozenset,), "z")):
            if isinstance(value, kinds):
                return [tag, *(self.pack(each, inner) for each in value)]
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise UsageError("a moment needs a time zone", next_step="Use datetime.now(timezone.utc).")
            return ["m", value.astimezone(UTC).isoformat()]
        if kind.__module__.startswith("pyarrow"):
            return ["a", _arrow_bytes(value)]
        if kind is FieldExpression:
            return self.pack(value.field, inner)
        if isinstance(value, (str, int, float)):  # a subclass of a plain value
            return next(plain(value) for plain in (str, int, float) if isinstance(value, plain))
        raise UsageError(
            f"a {kind.__name__} can't be used through a running peer",
            next_step="Stop `echostore serve` and open the home in this program, or use what the docs list.",
        )

    def unpack(self, value: Any, depth: int = 0) -> Any:  # one line per tag
        if not isinstance(value, list):
            return value
        if depth > _DEPTH_MAX or not value:
            raise UsageError("a value that can't be read came over the local socket")
        tag, *rest = value
        inner = depth + 1
        if tag in ("r", "f", "g", "i", "c"):
            return self._incoming(value)
        if tag in ("l", "L"):
            elements = [self.unpack(each, inner) for each in rest]
            return elements if tag == "l" else FrozenList(elements)
        if tag in ("d", "D"):
            entries = {self.unpack(key, inner): self.unpack(each, inner) for key, each in rest}
            return entries if tag == "d" else FrozenDict(entries)
        made: dict[str, Callable[..., Any]] = {"t": tuple, "s": set, "z": frozenset}
        if tag in made:
            return made[tag](self.unpack(each, inner) for each in rest)
        if tag == "v":
            kind = _record(rest[0])
            fields = [self.unpack(each, inner) for each in rest[1:]]
            return kind(**dict(zip(_field_names(kind), fields, strict=True)))
        if tag == "e":
            return _enum(rest[0])(rest[1])
        if tag == "n":
            return int(rest[0], 16)
        if tag == "m":
            return datetime.fromisoformat(rest[0])
        if tag == "p":
            return Path(rest[0])
        if tag == "a":
            return _arrow_table(rest[0])
        if tag == "x":
            return DELETED
        raise UsageError(f"a value of an unknown kind {tag!r} came over the local socket")


# errors


def pack_error(error: BaseException) -> list[Any]:
    """An error as a value: its class by name, and what it says."""
    if isinstance(error, EchoError):
        return [type(error).__name__, error.what, error.unchanged, error.next_step]
    if isinstance(error, tuple(_PLAIN_ERRORS.values())):
        first = error.args[0] if error.args else ""
        return [type(error).__name__, first if isinstance(first, (str, int)) else str(first), "", ""]
    return ["EchoError", f"the running peer failed: {type(error).__name__}: {error}", "What was durable stays so.", ""]


def unpack_error(packed: list[Any]) -> Exception:
    """The same error on this side."""
    name, what, unchanged, next_step = packed
    if name in _PLAIN_ERRORS:
        return _PLAIN_ERRORS[name](what)
    kind = _echo_errors(EchoError).get(name, EchoError)
    return kind(what, unchanged=unchanged, next_step=next_step)


_PLAIN_ERRORS: Final[dict[str, type[Exception]]] = {
    kind.__name__: kind for kind in (KeyError, IndexError, ValueError, TypeError, AttributeError)
}


def _echo_errors(kind: type[EchoError]) -> dict[str, type[EchoError]]:
    found = {kind.__name__: kind}
    for below in kind.__subclasses__():
        found |= _echo_errors(below)
    return found


# classes by name


@cache
def living_class(name: str) -> type:
    """The class of a living object by the name that was sent."""
    module, _, attribute = name.partition(":")
    if attribute not in LIVING.get(module, ()):
        raise UsageError(f"{name!r:.80} is not an object of a peer")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


_living_names: dict[type, str | None] = {}


def living_name(kind: type) -> str | None:
    """The name under which objects of a class, or of the nearest class above it, are known; None for values."""
    if kind not in _living_names:
        named = (each for each in kind.__mro__ if each.__name__ in LIVING.get(each.__module__, ()))
        _living_names[kind] = next((f"{each.__module__}:{each.__name__}" for each in named), None)
    return _living_names[kind]


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _field_names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, tuple):
        names: tuple[str, ...] = kind._fields
        return names
    return tuple(each.name for each in dataclasses.fields(kind) if each.init)


def _is_record(kind: type) -> bool:
    if not dataclasses.is_dataclass(kind) and not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return False
    if kind.__module__.startswith("echostore.kernel."):
        return True
    return kind.__name__ in _RECORDS.get(kind.__module__, ())


@cache
def _record(name: str) -> type:
    module, _, attribute = name.partition(":")
    allowed = module.startswith("echostore.kernel.") or attribute in _RECORDS.get(module, ())
    kind = getattr(importlib.import_module(module), attribute, None) if allowed and "." not in attribute else None
    if not isinstance(kind, type) or not _is_record(kind):
        raise UsageError(f"{name!r:.80} is not a record")
    return kind


@cache
def _enum(name: str) -> type[Enum]:
    module, _, attribute = name.partition(":")
    allowed = module.startswith("echostore.") and "." not in attribute
    kind = getattr(importlib.import_module(module), attribute, None) if allowed else None
    if not isinstance(kind, type) or not issubclass(kind, Enum):
        raise UsageError(f"{name!r:.80} is not an enumeration")
    return kind


def _arrow_bytes(table: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _arrow_table(data: bytes) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(data).read_all()
