"""What a leaf writes <-> the delta of a PublishOp.

An operation on properties, metadata, places and logs travels as it would stand in a data message, and an item that a
leaf makes has a number of its arc (`kernel.coherence.arcs`). Texts and lists can't: an update of theirs names its
writer, which is the root. So a leaf says what it did to the text it saw, and the root does the same to the text it has.
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from echostore.kernel.coherence.arcs import ARC_IDS_MAX
from echostore.kernel.ids import ARC_BIT, FeedId, ItemId, item_id
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.limits import VALUE_BYTES_MAX
from echostore.kernel.values import Value
from echostore.wire.generated import index_pb2 as pb
from echostore.wire.generated import message_pb2
from echostore.wire.index_spec import MalformedIndex
from echostore.wire.messages import encode_operation
from echostore.wire.values import MalformedValue, decode_value, encode_value

BEFORE_CHARACTERS_MAX = 32
ELEMENTS_MAX = 10_000
"""Elements that one edit of a list takes out or puts in."""

OPERATION_KINDS = frozenset({"genesis", "property_set", "metadata", "placement", "threaded_log"})
"""Kinds of a data message's operation that a leaf may send as they are."""


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Characters at a place: these go, those come. `before` are the last ones before the place."""

    position: int
    removed: str = ""
    inserted: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True)
class ListEdit:
    """Elements at a place: these go, those come."""

    position: int
    removed: tuple[Value, ...] = ()
    inserted: tuple[Value, ...] = ()


LeafOperation = message_pb2.Operation | TextEdit | ListEdit
"""A parsed operation of a data message, or an edit."""


def arc_item(feed: FeedId, base: int, n: int) -> ItemId:
    """The id of the item that a leaf makes with the n-th id of the arc that was granted with `base`."""
    assert 0 < n <= ARC_IDS_MAX, f"{n} is not an id of an arc"
    return item_id(feed, ARC_BIT | base + n)


def operation_delta(feed: FeedId, operation: ItemOperation) -> bytes:
    """An operation as it would stand in a message of the root's data feed."""
    return pb.LeafOperation(operation=encode_operation(feed, operation)).SerializeToString(deterministic=True)


def edit_delta(edit: TextEdit | ListEdit) -> bytes:
    if isinstance(edit, TextEdit):
        text = pb.TextEdit(
            position=edit.position,
            removed=edit.removed,
            inserted=edit.inserted,
            before=edit.before[-BEFORE_CHARACTERS_MAX:],
        )
        return pb.LeafOperation(text=text).SerializeToString(deterministic=True)
    elements = pb.ListEdit(
        position=edit.position,
        removed=[encode_value(each) for each in edit.removed],
        inserted=[encode_value(each) for each in edit.inserted],
    )
    return pb.LeafOperation(list=elements).SerializeToString(deterministic=True)


def read_delta(delta: bytes) -> LeafOperation:
    """What a leaf did; MalformedIndex when the bytes say nothing that a leaf may do."""
    if len(delta) > VALUE_BYTES_MAX:
        raise MalformedIndex(f"an operation of {len(delta)} bytes, at most {VALUE_BYTES_MAX}")
    try:
        message = pb.LeafOperation.FromString(delta)
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    kind = message.WhichOneof("kind")
    if kind == "operation":
        if message.operation.WhichOneof("kind") not in OPERATION_KINDS:
            raise MalformedIndex("an operation that only the root can write")
        return message.operation
    if kind == "text":
        if len(message.text.before) > BEFORE_CHARACTERS_MAX:
            raise MalformedIndex("surroundings that are too long")
        edit = message.text
        return TextEdit(edit.position, edit.removed, edit.inserted, edit.before)
    if kind == "list":
        if len(message.list.removed) + len(message.list.inserted) > ELEMENTS_MAX:
            raise MalformedIndex("too many elements in one edit")
        try:
            removed = tuple(decode_value(each) for each in message.list.removed)
            inserted = tuple(decode_value(each) for each in message.list.inserted)
        except MalformedValue as error:
            raise MalformedIndex(str(error)) from error
        return ListEdit(message.list.position, removed, inserted)
    raise MalformedIndex("an operation without a kind")
