"""PropertySet operations and states <-> protobuf."""

import math
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from echostore.kernel.errors import TooLarge
from echostore.kernel.ids import FEED_ID_BYTES, FeedId, ItemId, Stamp
from echostore.kernel.limits import DEPTH_MAX, KEY_CHARACTERS_MAX, PATH_STEPS_MAX, SEQ_MAX, VALUE_BYTES_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.property_set import (
    ADDED,
    DELETED,
    INCREMENT,
    REMOVED,
    SET,
    Add,
    Change,
    Entry,
    EntryKey,
    Increment,
    Layer,
    Operation,
    PropertySet,
    Remove,
    Restore,
    Set,
    entry_order,
)
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Path, Value
from echostore.wire.generated import property_set_pb2 as pb
from echostore.wire.generated import value_pb2
from echostore.wire.values import MalformedValue, decode_value, encode_value, value_bytes


def encode_operation(operation: Operation) -> pb.PropertySetOperation:
    message = pb.PropertySetOperation()
    for change in operation:
        if isinstance(change, Restore):
            message.restores.append(_encode_restore(change))
        else:
            message.changes.append(_encode_change(change))
    return message


def decode_operation(message: pb.PropertySetOperation, stamp: Stamp) -> Operation:
    """The operation at `stamp`. It names other operations only as its writer can have seen them: a removal or an
    increment those of its past, a restore the writer's own, earlier entries."""
    try:
        changes: list[Change | Restore] = [_decode_change(change, stamp) for change in message.changes]
        changes.extend(_decode_restore(restore, stamp) for restore in message.restores)
    except MalformedValue as error:
        raise OperationRefused(Reason.MALFORMED, str(error)) from None
    if not changes:
        raise OperationRefused(Reason.MALFORMED, "no change")
    return tuple(changes)


def encode_state(model: PropertySet) -> bytes:
    state = pb.PropertySetState()
    for feed in sorted(model.layers):
        layer = state.layers.add(feed=feed)
        entries = model.layers[feed]
        keys = list(entries) if len(entries) == 1 else sorted(entries, key=entry_order)
        layer.entries.extend(_encode_entry(key, entries[key], feed) for key in keys)
    return state.SerializeToString(deterministic=True)


def decode_state(item: ItemId, data: bytes) -> PropertySet:
    """The model that `encode_state` wrote; MalformedValue when the bytes are none."""
    try:
        state = pb.PropertySetState.FromString(data)
    except DecodeError as error:
        raise MalformedValue("undecodable property set") from error
    layers: dict[FeedId, Layer] = {}
    for layer in state.layers:
        feed = _feed(layer.feed)
        layers[feed] = dict(_decode_entry(entry, feed) for entry in layer.entries)
    return PropertySet(item, layers)


def _encode_change(change: Change) -> pb.PropertyChange:
    if type(change) is Set:
        if change.value is DELETED:
            return pb.PropertyChange(path=change.path, delete=True)
        return pb.PropertyChange(path=change.path, set=_encode_bounded(change.value, change.path))
    if isinstance(change, Add):
        return pb.PropertyChange(path=change.path, add=_encode_bounded(change.element, change.path))
    if isinstance(change, Remove):
        remove = pb.RemoveElement(
            element=encode_value(change.element),
            feeds=[seen.feed for seen in change.observed],
            depths=[seen.depth for seen in change.observed],
            seqs=[seen.seq for seen in change.observed],
            positions=[seen.position for seen in change.observed],
        )
        return pb.PropertyChange(path=change.path, remove=remove)
    assert isinstance(change, Increment), change
    return pb.PropertyChange(path=change.path, increment=_encode_increment(change.delta, change.base))


def _decode_change(message: pb.PropertyChange, stamp: Stamp) -> Change:
    path = _path(message.path)
    kind = message.WhichOneof("kind")
    if kind == "set":
        return Set(path, _decode_bounded(message.set))
    if kind == "delete":
        return Set(path, DELETED)
    if kind == "add":
        element = _decode_bounded(message.add)
        return Add(path, element, value_bytes(element))
    if kind == "remove":
        remove = message.remove
        element = decode_value(remove.element)
        columns = (remove.feeds, remove.depths, remove.seqs, remove.positions)
        if len({len(column) for column in columns}) != 1:
            raise MalformedValue("unequal columns")
        observed = tuple(
            _seen(_stamp(depth, _feed(feed), seq, position), stamp)
            for feed, depth, seq, position in zip(*columns, strict=True)
        )
        return Remove(path, element, value_bytes(element), observed)
    if kind == "increment":
        delta, base = _decode_increment(message.increment)
        return Increment(path, delta, base and _seen(base, stamp))
    raise MalformedValue("a change without a kind")


def _encode_bounded(value: Value, path: Path) -> value_pb2.Value:
    message = encode_value(value)
    size = message.ByteSize()
    if size > VALUE_BYTES_MAX:
        raise TooLarge(
            f"the value of {'.'.join(path)} takes {size} bytes; a property holds at most {VALUE_BYTES_MAX}",
            unchanged="Nothing was written.",
            next_step="Keep large content as a blob and refer to it.",
        )
    return message


def _decode_bounded(message: value_pb2.Value) -> Value:
    if message.ByteSize() > VALUE_BYTES_MAX:
        raise OperationRefused(Reason.OVERSIZE, f"a property value of more than {VALUE_BYTES_MAX} bytes")
    return decode_value(message)


def _encode_restore(restore: Restore) -> pb.PropertyRestore:
    if restore.entry is not None:
        feed = restore.entry.stamp.feed
        return pb.PropertyRestore(entry=_encode_entry(restore.key, restore.entry, feed))
    # Only the key matters; a placeholder entry carries it.
    key = restore.key
    blank = Stamp(0, FeedId(b""), 0, 0)
    value: Value = 0 if key.kind == INCREMENT else None
    entry = _encode_entry(key, Entry(blank, value, blank), FeedId(b""), element=key.element)
    return pb.PropertyRestore(entry=entry, absent=True)


def _decode_restore(message: pb.PropertyRestore, stamp: Stamp) -> Restore:
    key, entry = _decode_entry(message.entry, stamp.feed)
    if message.absent:
        return Restore(key, None)
    # The restored entry must be the writer's own and older: a stamp it could not have would win over everybody.
    if entry.stamp.feed != stamp.feed or entry.stamp.seq >= stamp.seq:
        raise MalformedValue("restores an entry that is not the writer's own past")
    if entry.stamp.depth > stamp.depth - (stamp.seq - entry.stamp.seq):
        raise MalformedValue("restores an entry from a depth its writer had not reached")
    if entry.upto is not None:
        _seen(entry.upto, stamp)
    if key.kind == INCREMENT and key.other is not None:
        _seen(key.other, stamp)
    return Restore(key, entry)


def _encode_entry(key: EntryKey, entry: Entry, feed: FeedId, element: bytes | None = None) -> pb.PropertyEntry:
    stamp = entry.stamp
    message = pb.PropertyEntry(
        path=key.path, stamp=pb.PropertyStamp(depth=stamp.depth, seq=stamp.seq, position=stamp.position)
    )
    if key.kind == SET:
        if entry.value is DELETED:
            message.deleted = True
        else:
            message.set.CopyFrom(encode_value(entry.value))
    elif key.kind == ADDED:
        message.added.CopyFrom(_element(entry, element))
    elif key.kind == REMOVED:
        assert entry.upto is not None
        upto = entry.upto._replace(feed=key.other)
        message.removed.CopyFrom(pb.RemovedElement(element=_element(entry, element), upto=_encode_stamp(upto)))
    else:
        message.increment.CopyFrom(_encode_increment(entry.value, key.other))
    return message


def _element(entry: Entry, element: bytes | None) -> value_pb2.Value:
    return encode_value(entry.value) if element is None else value_pb2.Value.FromString(element)


def _decode_entry(message: pb.PropertyEntry, feed: FeedId) -> tuple[EntryKey, Entry]:
    path = _path(message.path)
    at = message.stamp
    stamp = _stamp(at.depth, feed, at.seq, at.position)
    kind = message.WhichOneof("kind")
    if kind == "set":
        return EntryKey(path, SET, b"", None), Entry(stamp, decode_value(message.set))
    if kind == "deleted":
        return EntryKey(path, SET, b"", None), Entry(stamp, DELETED)
    if kind == "added":
        element = decode_value(message.added)
        return EntryKey(path, ADDED, value_bytes(element), None), Entry(stamp, element)
    if kind == "removed":
        element = decode_value(message.removed.element)
        upto = _decode_stamp(message.removed.upto)
        return EntryKey(path, REMOVED, value_bytes(element), upto.feed), Entry(stamp, element, upto)
    if kind == "increment":
        delta, base = _decode_increment(message.increment)
        return EntryKey(path, INCREMENT, b"", base), Entry(stamp, delta)
    raise MalformedValue("an entry without a kind")


def _encode_increment(delta: int | float, base: Stamp | None) -> pb.Increment:
    stamp = _encode_stamp(base) if base else None
    if isinstance(delta, float):
        return pb.Increment(number=delta or 0.0, base=stamp)  # a negative zero would not be read back as one
    return pb.Increment(integer=delta, base=stamp)


def _decode_increment(message: pb.Increment) -> tuple[int | float, Stamp | None]:
    delta = message.number or message.integer
    if isinstance(delta, float) and not math.isfinite(delta):
        raise MalformedValue("an increment that is no number")
    return delta, _decode_stamp(message.base) if message.HasField("base") else None


def _encode_stamp(stamp: Stamp) -> pb.PropertyStamp:
    return pb.PropertyStamp(feed=stamp.feed, depth=stamp.depth, seq=stamp.seq, position=stamp.position)


def _decode_stamp(message: pb.PropertyStamp) -> Stamp:
    return _stamp(message.depth, _feed(message.feed), message.seq, message.position)


def _stamp(depth: int, feed: FeedId, seq: int, position: int) -> Stamp:
    if depth > DEPTH_MAX or seq > SEQ_MAX or position > 0xFFFF:
        raise MalformedValue("a stamp out of range")
    return Stamp(depth, feed, seq, position)


def _seen(named: Stamp, stamp: Stamp) -> Stamp:
    """An operation that the one at `stamp` builds on: less deep, or of the same message. A removal of what is still to
    come would ban an element for ever."""
    if named.depth >= stamp.depth and (named[:3] != stamp[:3] or named.position > stamp.position):
        raise MalformedValue("names an operation that its writer can't have seen")
    return named


def _feed(feed: bytes) -> FeedId:
    if len(feed) != FEED_ID_BYTES:
        raise MalformedValue("a feed id of wrong length")
    return FeedId(feed)


def _path(steps: Iterable[str]) -> Path:
    path = tuple(steps)
    if len(path) == 1:
        if 0 < len(path[0]) <= KEY_CHARACTERS_MAX:
            return path
    elif 0 < len(path) <= PATH_STEPS_MAX and all(0 < len(step) <= KEY_CHARACTERS_MAX for step in path):
        return path
    raise MalformedValue("a path that is empty, too long or has an empty step")
