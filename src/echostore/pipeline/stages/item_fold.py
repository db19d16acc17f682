"""One item folded by the kernel, from its operations, on top of the state before: for all that columns can't fold.

The item is folded by itself. Whether its parents exist is nothing that its bucket can know, so creations and placements
are folded without them, and get them back afterwards; which parents are `absent` is an argument, found out elsewhere.
Creations come first, as everywhere: an operation may sort below the genesis that its writer did not name as a cause.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import (
    ARC_BIT,
    POSITION_BITS,
    FeedId,
    IdentityKey,
    ItemId,
    PartyKey,
    Stamp,
    item_creator,
    item_local,
    item_text,
)
from echostore.kernel.items.operations import GENESIS, METADATA, PLACEMENT, ItemOperation, Reject, WriterRole
from echostore.kernel.items.record import ACCESS_KEY, ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.items.tree import TreeMove
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.property_set import DELETED, Restore, Set
from echostore.kernel.reasons import Reason
from echostore.pipeline.stages.lost_keys import LostKeys
from echostore.pipeline.stages.operation_columns import PATH_SEPARATOR
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.generated import snapshot_pb2
from echostore.wire.items import decode_record
from echostore.wire.messages import decode_operation
from echostore.wire.values import value_from_bytes

WriterAt = Callable[[FeedId, int], WriterRole]
IdentityOf = Callable[[FeedId], IdentityKey | None]
BaseLength = Callable[[FeedId], int]

NOBODY = WriterRole(IdentityKey(b""), "")
"""The writer of operations on an item without access rules: nobody asks."""


class Given(NamedTuple):
    """One operation on the item at its place. Sorts in canonical order."""

    stamp: Stamp
    order: int
    time_ms: int
    operation: ItemOperation


@dataclass(slots=True)
class Folded:
    """What became of an item. `ruled`: an operation writes access rules and who wrote it is not known here; `late`:
    something below what was folded before makes it void."""

    record: ItemRecord | None = None
    rejects: list[Reject] = field(default_factory=list)
    moves: list[TreeMove] = field(default_factory=list)
    ruled: bool = False
    late: bool = False


def fold_item(
    party: PartyKey,
    item: ItemId,
    factory: ModelFactory,
    *,
    previous: ItemRecord | None,
    given: Iterable[Given],
    absent: frozenset[ItemId] = frozenset(),
    lost: frozenset[ItemId] = frozenset(),
    writer_at: WriterAt | None = None,
    identity_of: IdentityOf = lambda feed: None,
    base_length: BaseLength = lambda feed: 0,
) -> Folded:
    """Fold operations of one item. Without `writer_at` an item that has access rules, or gets some, is not folded.

    `lost` are views whose inception key names another item. `base_length` is how much of each feed lies inside the epoch that the party stands on: what was made there and is
    missing was discarded.
    """
    ordered = sorted(given, key=lambda one: (one.stamp, one.order))
    folded = Folded()
    if writer_at is None and ((previous is not None and previous.access) or any(_rules(one) for one in ordered)):
        folded.ruled = True
        return folded
    state = PartyState(
        party,
        factory,
        load=lambda _: previous,
        identity_of=identity_of,
        base_length=base_length,
        views=LostKeys(lost),
    )
    parents: dict[Stamp, ItemId] = {}
    for one in ordered:
        if one.operation.field == GENESIS:
            _create(state, one, frozenset() if item in lost else absent, base_length)
    for stamp, _, time_ms, operation in ordered:
        if operation.field == GENESIS:
            continue
        if operation.field == PLACEMENT:
            kind, parent = operation.body
            if parent is not None:
                parents[stamp] = parent
            operation = ItemOperation(item, PLACEMENT, (kind, None))
        writer = NOBODY if writer_at is None else writer_at(stamp.feed, stamp.seq)
        state.apply_operation(operation, stamp, time_ms, writer)
    state.settle()
    folded.record = state.record(item)
    folded.late = item in state.refold
    folded.rejects = state.rejects
    for move in state.tree.moves:
        parent = parents.get(move.stamp)
        if parent is not None and parent in absent:
            folded.rejects.append(_no_parent(move.stamp, parent, base_length))
        else:
            folded.moves.append(move._replace(parent=parent))
    return folded


def _create(state: PartyState, one: Given, absent: frozenset[ItemId], base_length: BaseLength) -> None:
    stamp, _, time_ms, operation = one
    genesis = operation.body
    before = state.record(genesis.item)
    if before is None and genesis.parent is not None and genesis.parent in absent:
        state.rejects.append(_no_parent(stamp, genesis.parent, base_length))
        return
    rootless = operation._replace(body=replace(genesis, parent=None))
    state.apply_operation(rootless, stamp, time_ms, NOBODY)
    record = state.record(genesis.item)
    if record is not None and record is not before:
        record.genesis = genesis


def _no_parent(stamp: Stamp, parent: ItemId, base_length: BaseLength) -> Reject:
    local = item_local(parent)
    discarded = not local & ARC_BIT and local >> POSITION_BITS < base_length(item_creator(parent))
    reason = Reason.DISCARDED if discarded else Reason.NO_PARENT
    return Reject(stamp.feed, stamp.seq, stamp.position, reason, item_text(parent))


def _rules(one: Given) -> bool:
    """Whether an operation writes access rules, or tries to."""
    if one.operation.field != METADATA:
        return False
    return any(
        (change.key.path if isinstance(change, Restore) else change.path)[0] == ACCESS_KEY
        for change in one.operation.body
    )


def given_plain(item: ItemId, stamp: Stamp, order: int, path: str, value: bytes | None, *, metadata: bool) -> Given:
    """A plain change as the kernel's operation."""
    change = Set(
        tuple(path.split(PATH_SEPARATOR)), DELETED if value is None else value_from_bytes(value, bytes_max=None)
    )
    return Given(stamp, order, 0, ItemOperation(item, METADATA if metadata else "property-set", (change,)))


def given_rest(party: PartyKey, stamp: Stamp, time_ms: int, data: bytes) -> Given | Reject:
    """An operation from its bytes, or why its message is refused as a whole."""
    try:
        message = pb.Operation.FromString(data)
    except (DecodeError, ValueError) as error:
        raise Corrupt(
            f"an operation of block {stamp.seq} of feed {stamp.feed.hex()} was let through and can't be decoded: {error}",
            next_step="Run the audit over the lake; a block like this ends its feed when links are verified.",
        ) from None
    try:
        operation = decode_operation(
            message, party=party, feed=stamp.feed, seq=stamp.seq, position=stamp.position, depth=stamp.depth
        )
    except OperationRefused as refusal:
        return Reject(stamp.feed, stamp.seq, -1, refusal.reason, refusal.detail)
    return Given(stamp, 0, time_ms, operation)


def restore_record(state: bytes, native: bytes | None, last: Stamp | None, factory: ModelFactory) -> ItemRecord:
    """The record of a kept item."""
    model: Any = None
    if native is not None:
        head = snapshot_pb2.ItemState.FromString(state)
        blank = factory.create(head.model, head.version, ItemId(head.item))
        model = type(blank).from_native(ItemId(head.item), native)
    record = decode_record(state, factory, model=model)
    record.last = last
    return record


def native_form(record: ItemRecord) -> bytes | None:
    """What a model keeps beside its canonical state, to go on faster and to know what it had refused."""
    return record.model.native() if isinstance(record.model, SharedSequence) else None
