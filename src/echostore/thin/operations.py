"""The operations a leaf writes: each as an item id and the delta of a PublishOp, and back for its own view.

They are checked here, before they take a place in the outbox: what no root would take is the caller's mistake.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from echostore.kernel.errors import TooLarge, UsageError
from echostore.kernel.ids import FeedId, ItemId, PartyKey
from echostore.kernel.items.operations import GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import DELETED_AT_KEY, DELETED_KEY, NAME_KEY, Genesis
from echostore.kernel.items.tree import MOVE
from echostore.kernel.limits import VALUE_BYTES_MAX
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.property_set import DELETED, PropertySet, Set
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import OwnPost, Post, PostId, ThreadedLog
from echostore.kernel.values import Value, check_path, check_value, kind_of
from echostore.wire.leaf_operations import ListEdit, TextEdit, edit_delta, operation_delta, read_delta
from echostore.wire.messages import NAME_CHARACTERS_MAX, decode_operation

Operation = tuple[ItemId, bytes]
"""An item, and what is done to it."""

PROPERTY_SET: Final = PropertySet.name
LIST: Final = GrowableArray.name
TEXT: Final = ConcurrentText.name
LOG: Final = ThreadedLog.name
VERSIONS: Final = {each.name: each.version for each in (PropertySet, GrowableArray, ConcurrentText, ThreadedLog)}


def create(
    feed: FeedId,
    item: ItemId,
    model: str,
    type: Any,
    *,
    parent: ItemId | None = None,
    ends: tuple[ItemId, ItemId] | None = None,
) -> Operation:
    """A new item; with `ends`, a link from one item to another."""
    if model not in VERSIONS:
        raise UsageError(
            f"{model!r} is not a model that a leaf can make", next_step=f"Models are {', '.join(VERSIONS)}."
        )
    if not isinstance(type, str) or len(type) > NAME_CHARACTERS_MAX:
        raise UsageError(f"a type is text of at most {NAME_CHARACTERS_MAX} characters, not {kind_of(type)}")
    source, target = ends or (None, None)
    genesis = Genesis(item, model, VERSIONS[model], type, parent, 0, source, target)
    return _operation(feed, ItemOperation(item, GENESIS, genesis))


def change(feed: FeedId, item: ItemId, changes: Mapping[Any, Value]) -> Operation:
    """Set properties; DELETED takes one away."""
    checked = [
        Set(check_path(path), value if value is DELETED else check_value(value, where=path))
        for path, value in changes.items()
    ]
    return _operation(feed, ItemOperation(item, PROPERTY_SET, tuple(checked)))


def delete(feed: FeedId, item: ItemId, now_ms: int) -> Operation:
    changes = (Set((DELETED_KEY,), True), Set((DELETED_AT_KEY,), now_ms))
    return _operation(feed, ItemOperation(item, METADATA, changes))


def restore(feed: FeedId, item: ItemId) -> Operation:
    changes = (Set((DELETED_KEY,), DELETED), Set((DELETED_AT_KEY,), DELETED))
    return _operation(feed, ItemOperation(item, METADATA, changes))


def rename(feed: FeedId, item: ItemId, name: str) -> Operation:
    return _operation(feed, ItemOperation(item, METADATA, (Set((NAME_KEY,), check_value(name, where="name")),)))


def move(feed: FeedId, item: ItemId, parent: ItemId | None) -> Operation:
    return _operation(feed, ItemOperation(item, PLACEMENT, (MOVE, parent)))


def post(feed: FeedId, item: ItemId, body: Value, reply_to: PostId | None = None) -> Operation:
    own = reply_to is not None and reply_to.feed == feed
    target = OwnPost(reply_to.seq, reply_to.position) if reply_to is not None and own else reply_to
    return _operation(feed, ItemOperation(item, LOG, Post(check_value(body, where="post"), target)))


def edit_text(item: ItemId, seen: str, position: int, removed: int, inserted: str) -> Operation:
    """Take characters out of a text as it was seen, and put others in."""
    if not 0 <= position <= len(seen) or removed < 0 or position + removed > len(seen):
        raise UsageError(f"the text has {len(seen)} characters: nothing stands at {position} to {position + removed}")
    check_value(inserted, where="what is inserted")
    before = seen[max(0, position - 32) : position]
    return item, _sized(edit_delta(TextEdit(position, seen[position : position + removed], inserted, before)))


def edit_list(item: ItemId, seen: list[Value], position: int, removed: int, inserted: list[Value]) -> Operation:
    """Take elements out of a list as it was seen, and put others in."""
    if not 0 <= position <= len(seen) or removed < 0 or position + removed > len(seen):
        raise UsageError(f"the list has {len(seen)} elements: nothing stands at {position} to {position + removed}")
    checked = tuple(check_value(each, where="element") for each in inserted)
    return item, _sized(edit_delta(ListEdit(position, tuple(seen[position : position + removed]), checked)))


def parse_post(text: str) -> PostId:
    """The post that `id` of a shown post names."""
    try:
        feed, seq, position = text.split("/")
        return PostId(FeedId(bytes.fromhex(feed)), int(seq), int(position))
    except ValueError:
        raise UsageError(f"{text!r} does not name a post", next_step="Pass the `id` of a post that is shown.") from None


@lru_cache(maxsize=4096)
def decoded(party: PartyKey, feed: FeedId, delta: bytes) -> Any:
    """What a delta of one's own does: an ItemOperation, a TextEdit or a ListEdit."""
    read = read_delta(delta)
    if isinstance(read, TextEdit | ListEdit):
        return read
    return decode_operation(read, party=party, feed=feed, seq=1, position=0, depth=1)


def _operation(feed: FeedId, operation: ItemOperation) -> Operation:
    return operation.item, _sized(operation_delta(feed, operation))


def _sized(delta: bytes) -> bytes:
    if len(delta) > VALUE_BYTES_MAX:
        raise TooLarge(
            f"an operation of {len(delta):,} bytes; at most {VALUE_BYTES_MAX:,} are written at once",
            next_step="Split it into several.",
        )
    return delta
