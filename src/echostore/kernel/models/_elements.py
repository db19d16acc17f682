"""List elements as text: how a value lives inside a loro list.

Loro's own values would lose types (its JSON writes bytes as lists, and knows no references), so an element is one
string: `s` and the text itself, or `j` and a tagged JSON of anything else. It never leaves the process in this form;
in operations and states elements are the protobuf values of `echostore.wire.values`.
"""

import json
import math
from typing import Any

from echostore.kernel.ids import Cid, ItemId, PartyKey
from echostore.kernel.values import BlobRef, Reference, Value, from_timestamp_us, timestamp_us

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_loads = json.JSONDecoder().decode


def element_text(value: Value) -> str:
    """The text form of a value that `check_value` or the wire has passed."""
    return "s" + value if type(value) is str else "j" + _dumps(_tagged(value))


def element_value(text: str) -> Value:
    return text[1:] if text[0] == "s" else _untagged(_loads(text[1:]))


def _tagged(value: Value) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is bool or kind is int:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if kind is list:
        return [_tagged(element) for element in value]
    if kind is dict:
        return {"m": {key: _tagged(element) for key, element in value.items()}}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is Reference:
        return {"r": [value.item.hex(), value.party.hex() if value.party else ""]}
    if kind is BlobRef:
        return {"c": [[cid.hex() for cid in value.cids], value.size, value.media_type, value.name]}
    return {"t": timestamp_us(value)}


def _untagged(form: Any) -> Value:
    if isinstance(form, list):
        return [_untagged(element) for element in form]
    if not isinstance(form, dict):
        return form
    ((tag, content),) = form.items()
    if tag == "m":
        return {key: _untagged(element) for key, element in content.items()}
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "r":
        item, party = content
        return Reference(ItemId(bytes.fromhex(item)), PartyKey(bytes.fromhex(party)) if party else None)
    if tag == "c":
        cids, size, media_type, name = content
        return BlobRef(tuple(Cid(bytes.fromhex(cid)) for cid in cids), size, media_type, name)
    if tag == "t":
        return from_timestamp_us(content)
    assert tag == "f", tag
    return float(content)
