"""Values: what properties, list elements and posts hold, as plain Python objects.

    None  bool  int (64 bit)  float  str  bytes  datetime (aware, UTC, microseconds)  list  dict with str keys
    Reference (to an item)  BlobRef (to content in the blob store)

`check_value` is the gate for values of this program's own user: it names what is wrong. Values from other peers pass
through `echostore.wire.values`, which applies the same limits and answers with a typed refusal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from echostore.kernel.errors import TooLarge, UsageError
from echostore.kernel.ids import ITEM_ID_BYTES, KEY_BYTES, Cid, ItemId, PartyKey, item_from_text, item_text
from echostore.kernel.limits import KEY_CHARACTERS_MAX, PATH_STEPS_MAX, VALUE_DEPTH_MAX

Value = Any
"""One of the types above; Python has no finite way to write a recursive union that mypy checks without noise."""

Path = tuple[str, ...]

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CID_BYTES_MAX = 64
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Reference:
    """A soft pointer to an item, of this party or of another."""

    item: ItemId
    party: PartyKey | None = None
    within: PartyKey | None = field(default=None, compare=False, repr=False)
    """The party whose handle gave a reference without `party`; no part of the value, and never stored."""

    def seen_from(self, party: PartyKey) -> "Reference":
        """The same pointer as a value of a party: without `party` where it leads to an item of that one."""
        owner = self.party or self.within
        return Reference(self.item, None if owner == party else owner)

    def __str__(self) -> str:
        return locator(self.item, self.party) if self.party else item_text(self.item)


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Content that lives in the blob store as a list of chunks."""

    cids: tuple[Cid, ...]
    size: int
    media_type: str = ""
    name: str = ""


WHERE_CHARACTERS_MAX = 60
"""How much of a property's name an error shows."""


def locator(item: ItemId, party: PartyKey) -> str:
    """`echo://<party>/<item>`: names an item anywhere."""
    return f"echo://{party.hex()}/{item_text(item)}"


def parse_locator(text: str) -> tuple[PartyKey, str]:
    """The party and the item part of a locator; the latter is an item id or, for a view, its inception key."""
    head, _, rest = text.partition("://")
    party, _, item = rest.partition("/")
    try:
        key, named = bytes.fromhex(party), bytes.fromhex(item)
    except ValueError:
        key = named = b""
    whole = len(party + item) == 2 * len(key + named)  # fromhex passes over spaces
    if head != "echo" or not whole or len(key) != KEY_BYTES or len(named) not in (ITEM_ID_BYTES, KEY_BYTES):
        raise UsageError(f"{text!r} is not a locator", next_step="A locator reads echo://<party>/<item>.")
    return PartyKey(key), item


def reference_from_text(text: str) -> Reference:
    if text.startswith("echo://"):
        party, item = parse_locator(text)
        return Reference(item_from_text(item), party)
    return Reference(item_from_text(text))


def kind_of(value: object) -> str:
    """What a value is, in words for people."""
    for kinds, words in _KINDS:
        if isinstance(value, kinds):
            return words
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def named(path: object) -> str:
    """A property's path in an error: short, and always fit to print."""
    text = ".".join(map(str, path)) if isinstance(path, (tuple, list)) else str(path)
    shown = text.encode("utf-8", "backslashreplace").decode()
    return (
        repr("") if not shown else shown if len(shown) <= WHERE_CHARACTERS_MAX else shown[:WHERE_CHARACTERS_MAX] + "..."
    )


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "null"),
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "text"),
    ((bytes, bytearray, memoryview), "bytes"),
    (datetime, "a time"),
    (Reference, "an item"),
    (BlobRef, "a blob"),
    ((list, tuple), "a list"),
    (dict, "a map"),
)


def timestamp_us(moment: datetime) -> int:
    return (moment - EPOCH) // _MICROSECOND


def from_timestamp_us(microseconds: int) -> datetime:
    """OverflowError when the moment lies outside the years that Python knows."""
    return EPOCH + timedelta(microseconds=microseconds)


def check_value(value: Value, *, where: object = "value") -> Value:
    """The value in its plain form (tuples become lists, moments UTC); raises with the place of what can't be stored."""
    return _plain(value, where, 0)


def check_path(path: str | tuple[str, ...] | list[str]) -> Path:
    if not isinstance(path, (str, tuple, list)):
        raise UsageError(
            f"a property is named by text or a tuple of texts, not by {kind_of(path)}",
            next_step='Write item["a"] or item["a", "b"].',
        )
    steps: Path = (path,) if isinstance(path, str) else tuple(path)
    if not steps:
        raise UsageError("a property path needs at least one step")
    if len(steps) > PATH_STEPS_MAX:
        raise TooLarge(f"a property path has at most {PATH_STEPS_MAX} steps, got {len(steps)}")
    for step in steps:
        _check_key(step, steps)
    return steps


def merge_properties(mapping: object, keywords: Mapping[str, Value]) -> dict[str, Value]:
    """The properties that a caller gave, as a mapping (any key) and as keywords; none may be given twice."""
    for key in keywords:
        _check_key(key, "properties")
    if mapping is None:
        return dict(keywords)
    if not isinstance(mapping, Mapping):
        raise UsageError(
            f"properties are given as a mapping, not as {kind_of(mapping)}", next_step='Write {"title": "Tickets"}.'
        )
    for key in mapping:
        _check_key(key, "properties")
        if key in keywords:
            raise UsageError(f"the property {named(key)} is given twice: in the mapping and as a keyword")
    return {**mapping, **keywords}


def _plain(value: Value, where: object, depth: int) -> Value:
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is str:
        _check_text(value, where)
        return value
    if kind is int:
        if not INT_MIN <= value <= INT_MAX:
            raise TooLarge(f"{named(where)}: {value} does not fit 64 bits")
        return value
    if kind is bytes or kind is bytearray or kind is memoryview:
        return bytes(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise UsageError(f"{named(where)}: a moment needs a time zone", next_step="Use datetime.now(timezone.utc).")
        try:  # a plain datetime, whatever subclass it came as
            return from_timestamp_us(timestamp_us(value))
        except OverflowError:
            raise TooLarge(f"{named(where)}: {value} lies outside the calendar") from None
    if kind is Reference or kind is BlobRef:
        _check_pointer(value, where)
        return value
    if depth >= VALUE_DEPTH_MAX:
        raise TooLarge(f"{named(where)}: nested deeper than {VALUE_DEPTH_MAX} levels")
    if isinstance(value, (list, tuple)):
        return [_plain(element, where, depth + 1) for element in value]
    if isinstance(value, dict):
        for key in value:
            _check_key(key, where)
        return {key: _plain(element, where, depth + 1) for key, element in value.items()}
    if isinstance(value, str):  # a subclass such as an enum: its plain value
        return _plain(str.__str__(value), where, depth)
    if isinstance(value, int):
        return _plain(int.__int__(value), where, depth)
    if isinstance(value, float):
        return float.__float__(value)
    raise UsageError(f"{named(where)}: {kind_of(value)} can't be stored")


def _check_pointer(value: Reference | BlobRef, where: object) -> None:
    """Other peers refuse a message over one malformed reference, so it must not leave this one."""
    if isinstance(value, Reference):
        if len(value.item) != ITEM_ID_BYTES or (value.party is not None and len(value.party) != KEY_BYTES):
            raise UsageError(f"{named(where)}: a reference holds an item id of 16 bytes and a party key of 32, or none")
        return
    if not 0 <= value.size < 1 << 64 or not all(0 < len(cid) <= CID_BYTES_MAX for cid in value.cids):
        raise UsageError(f"{named(where)}: a blob reference holds a size and CIDs of 1 to {CID_BYTES_MAX} bytes")
    _check_text(value.media_type, where)
    _check_text(value.name, where)


def _check_key(key: object, where: object) -> None:
    if not isinstance(key, str):
        raise UsageError(f"{named(where)}: a key must be text, not {kind_of(key)}")
    if not key or len(key) > KEY_CHARACTERS_MAX:
        raise TooLarge(f"{named(where)}: a key has 1 to {KEY_CHARACTERS_MAX} characters, got {len(key)}")
    _check_text(key, where)


def _check_text(text: str, where: object) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{named(where)}: the text holds a lone surrogate, which is not Unicode text") from None
