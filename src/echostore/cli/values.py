"""Values as people type and read them: JSON in, JSON or one line of text out.

JSON has fewer kinds of values than an item. The others are written as a map with one key, both ways, so that what a
command prints can be given back to it:

    {"$item": "<id or locator>"}   {"$time": "2026-05-01T10:00:00Z"}   {"$bytes": "<base64>"}   {"$float": "nan"}
    {"$blob": {"cids": [...], "size": 1, "media_type": "", "name": ""}}   {"$map": {...}} for a map that looks like one
"""

import base64
import binascii
import json
import math
import re
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from echostore.kernel.errors import EchoError, TooLarge, UsageError
from echostore.kernel.values import BlobRef, Reference, Value, reference_from_text

_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would act on instead of showing it. Texts come from other people's peers."""

_KEPT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


# in


def parse_value(text: str) -> Value:
    """A value as typed: JSON if it is JSON, else the text itself."""
    try:
        return from_json(load_json(text))
    except _NotJson:
        return text


def looks_like_json(text: str) -> bool:
    """Whether a person who typed this text probably meant JSON."""
    return text[:1] in ("{", "[", '"')


def parse_document(text: str, what: str) -> Value:
    """A value that has to be JSON."""
    try:
        return from_json(load_json(text))
    except _NotJson as error:
        raise UsageError(
            f"{what} is not JSON: {error}", next_step='Write JSON, such as {"title": "Tickets"}.'
        ) from None


class _NotJson(ValueError):
    """The text is not JSON."""


def load_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise TooLarge("the JSON is nested too deeply") from None
    except ValueError as error:
        raise _NotJson(str(error)) from None


def _refuse_constant(name: str) -> Any:
    # Python's parser takes NaN and Infinity, which are not JSON; a person who types them means the words.
    raise ValueError(f"{name} is not JSON")


def from_json(value: Any) -> Value:
    """The value that its JSON form stands for."""
    if isinstance(value, list):
        return [from_json(element) for element in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in _READERS:
            try:
                return _READERS[tag](inner)
            except EchoError:
                raise
            except (ValueError, binascii.Error) as error:
                raise UsageError(f"{json.dumps(value)[:80]} is not a value: {error}") from None
    return {key: from_json(element) for key, element in value.items()}


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{what} is written as text")
    return given


def _item(given: Any) -> Reference:
    text = _text(given, "an item")
    try:
        return reference_from_text(text)
    except ValueError:
        raise ValueError("an item is written as its id of 32 hex digits, or as a locator") from None


def _bytes(given: Any) -> bytes:
    try:
        return base64.b64decode(_text(given, "bytes in base64"), validate=True)
    except binascii.Error:
        raise ValueError("bytes are written in base64") from None


def _float(given: Any) -> float:
    try:
        return float(_text(given, "a special number"))
    except ValueError:
        raise ValueError('a special number is "nan", "inf" or "-inf"') from None


def _map(given: Any) -> Value:
    if not isinstance(given, dict):
        raise ValueError("a map is written as a JSON object")
    return {key: from_json(element) for key, element in given.items()}


def _time(given: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(_text(given, "a time"))
    except ValueError:
        raise ValueError("a time is written as text, such as 2026-05-01T10:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError("a time needs a zone, such as Z")
    return moment.astimezone(UTC)


def _blob(fields: Any) -> BlobRef:
    from echostore.wire.cids import cid_from_text

    match fields:
        case {"cids": [*cids], "size": int(size), **more} if more.keys() <= {"media_type", "name"}:
            texts = [_text(more.get(name, ""), name) for name in ("media_type", "name")]
            return BlobRef(tuple(cid_from_text(_text(cid, "a CID")) for cid in cids), size, *texts)
    raise ValueError("a blob has cids, size, media_type and name")


_READERS: dict[str, Callable[[Any], Value]] = {
    "$item": _item,
    "$time": _time,
    "$bytes": _bytes,
    "$float": _float,
    "$blob": _blob,
    "$map": _map,
}


# out


def to_json(value: Value) -> Any:
    """The JSON form of a value; `from_json` gives the value back."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, datetime):
        return {"$time": iso(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Reference):
        return {"$item": str(value)}
    if isinstance(value, BlobRef):
        return {"$blob": _blob_fields(value)}
    if isinstance(value, dict):
        plain = {key: to_json(element) for key, element in value.items()}
        return {"$map": plain} if len(value) == 1 and next(iter(value)) in _READERS else plain
    if isinstance(value, (list, tuple)):
        return [to_json(element) for element in value]
    raise AssertionError(f"{type(value).__name__} is no value")


def _blob_fields(value: BlobRef) -> dict[str, Any]:
    from echostore.wire.cids import cid_text

    cids = [cid_text(cid) for cid in value.cids]
    return {"cids": cids, "size": value.size, "media_type": value.media_type, "name": value.name}


def untagged(document: Any) -> Any:
    """The JSON form of a value without its tag, for cells of a table: a time as its text, an item as its id."""
    if isinstance(document, dict) and len(document) == 1:
        ((tag, inner),) = document.items()
        if tag in ("$time", "$item", "$bytes", "$float"):
            return inner
    return document


def shown_json(document: Any) -> str:
    """The JSON form of a value for a person, as `shown` shows the value itself."""
    match document:
        case None:
            return ""
        case str():
            return document
        case {"$time": str(text)} if len(document) == 1:
            return text
        case {"$item": str(text)} if len(document) == 1:
            return text if text.startswith("echo://") else f"→{short(text)}"
    return compact(document)


def shown(value: Value) -> str:
    """A value for a person: texts bare, times in ISO form, items by their short id, the rest as compact JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, Reference):
        return f"→{short(str(value))}" if value.party is None else str(value)
    return compact(to_json(value))


def compact(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def iso_ms(time_ms: int) -> str:
    """A writer's wall time. It may be any number: it is display only, and clocks lie."""
    try:
        moment = datetime.fromtimestamp(time_ms // 1000, UTC).replace(microsecond=time_ms % 1000 * 1000)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return str(time_ms)


def short(key: str) -> str:
    """The first eight digits of an id."""
    return key[:8]


def short_place(place: str) -> str:
    """A place in a feed, `<feed>:<seq>`, with the short form of the feed's id."""
    feed, sign, seq = place.partition(":")
    return short(feed) + sign + seq


def one_line(text: str, width: int | None = None) -> str:
    """A text made harmless for a terminal and put on one line, cut to a width if given."""
    line = harmless(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def harmless(text: str) -> str:
    """A text without what a terminal would act on; line ends and tabs stay."""
    return _HIDDEN.sub(lambda found: found[0] if found[0] in "\n\t" else _escape(found[0]), text)


def _escape(character: str) -> str:
    number = ord(character)
    return _KEPT.get(character) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")


def columns_wide(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(_character_columns(character) for character in text)


def _character_columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


# paths


def parse_path(text: str) -> tuple[str, ...]:
    """A property path: `address.city`, or a JSON list of its steps when one holds a dot."""
    if text.startswith("["):
        steps = parse_document(text, "the path")
        if not isinstance(steps, list) or not all(isinstance(step, (str, int)) for step in steps):
            raise UsageError(f"{text!r} is not a path", next_step='Write a.b, or ["a.b","c"].')
        return tuple(map(str, steps))
    steps = text.split(".")
    if not all(steps):
        raise UsageError(f"{text!r} is not a path", next_step='Write a.b, or ["a.b","c"].')
    return tuple(steps)


def parse_assignment(text: str) -> tuple[tuple[str, ...], Value]:
    """`KEY=VALUE`: where to put which value."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UsageError(f"{text!r} is not KEY=VALUE", next_step="Write for example done=true or address.city=Rome.")
    return parse_path(key), parse_value(value)
