"""Values <-> protobuf. Encoding is canonical: equal values give equal bytes (map keys sorted, one NaN).

Decoding is where values from other peers come in: whatever is wrong with one raises `MalformedValue`, never more.
"""

import math
import struct

from echostore.kernel.ids import ITEM_ID_BYTES, KEY_BYTES, Cid, ItemId, PartyKey
from echostore.kernel.limits import KEY_CHARACTERS_MAX, VALUE_BYTES_MAX, VALUE_DEPTH_MAX
from echostore.kernel.values import CID_BYTES_MAX, BlobRef, Reference, Value, from_timestamp_us, timestamp_us
from echostore.wire.generated import value_pb2 as pb

_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000))[0]


class MalformedValue(ValueError):
    """A received value breaks a limit or lacks a kind."""


def encode_value(value: Value) -> pb.Value:
    """The canonical message of a value that `check_value` or `decode_value` has passed."""
    kind = type(value)
    if kind is str:
        return pb.Value(text=value)
    if kind is bool:
        return pb.Value(boolean=value)
    if kind is int:
        return pb.Value(integer=value)
    if kind is float:
        return pb.Value(number=_NAN if math.isnan(value) else value)
    if value is None:
        return pb.Value(null=True)
    if kind is bytes:
        return pb.Value(binary=value)
    if kind is list:
        return pb.Value(list=pb.ListValue(values=[encode_value(element) for element in value]))
    if kind is dict:
        pairs = sorted((key.encode(), key) for key in value)
        return pb.Value(
            map=pb.MapValue(keys=[key for _, key in pairs], values=[encode_value(value[key]) for _, key in pairs])
        )
    if kind is Reference:
        return pb.Value(reference=pb.Reference(item=value.item, party=value.party or b""))
    if kind is BlobRef:
        return pb.Value(
            blob=pb.BlobReference(cids=value.cids, size=value.size, media_type=value.media_type, name=value.name)
        )
    return pb.Value(timestamp_us=timestamp_us(value))


def decode_value(message: pb.Value, depth: int = 0) -> Value:
    kind = message.WhichOneof("kind")
    if kind == "text":
        return message.text
    if kind == "boolean":
        return message.boolean
    if kind == "integer":
        return message.integer
    if kind == "number":
        number = message.number
        return _NAN if math.isnan(number) else number
    if kind == "null":
        return None
    if kind == "binary":
        return message.binary
    if kind == "timestamp_us":
        try:
            return from_timestamp_us(message.timestamp_us)
        except OverflowError:
            raise MalformedValue("a timestamp outside the calendar") from None
    if kind == "reference":
        return _reference(message.reference)
    if kind == "blob":
        blob = message.blob
        if not all(0 < len(cid) <= CID_BYTES_MAX for cid in blob.cids):
            raise MalformedValue("a blob reference with a malformed CID")
        return BlobRef(tuple(Cid(cid) for cid in blob.cids), blob.size, blob.media_type, blob.name)
    if depth >= VALUE_DEPTH_MAX:
        raise MalformedValue("nested too deep")
    if kind == "list":
        return [decode_value(element, depth + 1) for element in message.list.values]
    if kind == "map":
        return _map(message.map, depth)
    raise MalformedValue("a value without a kind")


def value_bytes(value: Value) -> bytes:
    """The canonical bytes: equal exactly when the values are."""
    return encode_value(value).SerializeToString(deterministic=True)


def value_from_bytes(data: bytes, *, bytes_max: int | None = VALUE_BYTES_MAX) -> Value:
    if bytes_max is not None and len(data) > bytes_max:
        raise MalformedValue("a value over the limit")
    try:
        message = pb.Value.FromString(data)
    except Exception as error:  # upb raises DecodeError, and RecursionError-like ones on deep nesting
        raise MalformedValue("undecodable") from error
    return decode_value(message)


def _reference(message: pb.Reference) -> Reference:
    if len(message.item) != ITEM_ID_BYTES or len(message.party) not in (0, KEY_BYTES):
        raise MalformedValue("a reference of wrong length")
    return Reference(ItemId(message.item), PartyKey(message.party) if message.party else None)


def _map(message: pb.MapValue, depth: int) -> dict[str, Value]:
    keys = message.keys
    if len(keys) != len(message.values):
        raise MalformedValue("a map with unequal columns")
    result = {}
    for key, element in zip(keys, message.values, strict=True):
        if not key or len(key) > KEY_CHARACTERS_MAX or key in result:
            raise MalformedValue("a map key that is empty, too long or repeated")
        result[key] = decode_value(element, depth + 1)
    return result
