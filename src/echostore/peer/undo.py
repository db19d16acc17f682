"""Undo and redo of this device's own batches.

An undo is an ordinary message that takes an earlier own message back and says so (`undoes`), so the stacks can be
read off the own feed after a restart:

    written   m1  m2  u(m2)  m3        undo stack: m1 m3      redo stack: -
    written   m1  m2  u(m2)            undo stack: m1         redo stack: u(m2)

Of property sets it puts this feed's own entries back, so the best remaining write wins and nobody else's work is
erased. Created items are deleted, posts retracted, moved items moved back, edits in place reversed around what
others did since.
"""

from typing import Any

from echostore.kernel.errors import Refused
from echostore.kernel.ids import ItemId, Stamp, created_item_id
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import DELETED_KEY
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED
from echostore.kernel.models.property_set import PropertySet, Set, undo_of
from echostore.kernel.models.threaded_log import OwnPost, Post, Retract, Revive
from echostore.kernel.order import DATA, Envelope
from echostore.peer.runtime import PartyRuntime
from echostore.wire.messages import decode_envelope, decode_operations

STACK_MESSAGES_MAX = 1000
"""How far back undo reaches: own messages that are read to find the stacks."""


def undo(runtime: PartyRuntime) -> bool:
    _check_no_batch(runtime)
    runtime.flush()
    undo_stack, _ = _stacks(runtime)
    return any(_take_back(runtime, seq) for seq in reversed(undo_stack))


def redo(runtime: PartyRuntime) -> bool:
    _check_no_batch(runtime)
    runtime.flush()
    _, redo_stack = _stacks(runtime)
    return any(_take_back(runtime, seq) for seq in reversed(redo_stack))


def _check_no_batch(runtime: PartyRuntime) -> None:
    if runtime.in_batch:
        raise Refused("a batch is open", next_step="Undo after it; a batch that raises is taken back as a whole.")


def _stacks(runtime: PartyRuntime) -> tuple[list[int], list[int]]:
    """Seqs of own messages that can be undone and redone, the next one last."""
    own = runtime.data
    if own is None:
        return [], []
    undo_stack: list[int] = []
    redo_stack: list[int] = []
    undos: set[int] = set()
    founded = runtime.processor.system_item == created_item_id(own.feed, 0, 0)  # the party itself stays
    start = max(1 if founded else 0, own.cursor.length - STACK_MESSAGES_MAX)
    for block in runtime.feeds.read(own.cursor.key, start, own.cursor.length):
        envelope = decode_envelope(block.payload, DATA)
        assert isinstance(envelope, Envelope), envelope
        target = envelope.body.undoes - 1
        if target < 0:
            undo_stack.append(block.seq)
            redo_stack.clear()
        elif target in undos:
            redo_stack = [seq for seq in redo_stack if seq != target]
            undo_stack.append(block.seq)
        else:
            undo_stack = [seq for seq in undo_stack if seq != target]
            undos.add(block.seq)
            redo_stack.append(block.seq)
    return undo_stack, redo_stack


def _take_back(runtime: PartyRuntime, seq: int) -> bool:
    """Whether there was anything to take back; a message that changed nothing is passed over."""
    own = runtime.data
    assert own is not None
    length = own.cursor.length
    block = runtime.feeds.block(own.cursor.key, seq)
    envelope = decode_envelope(block.payload, DATA)
    assert isinstance(envelope, Envelope), envelope
    operations = decode_operations(envelope.body, party=runtime.party, feed=own.feed, seq=seq)
    reversals: list[ItemOperation] = []
    done: set[tuple[ItemId, str]] = set()
    with runtime.batch(undoes=seq):
        for position in range(len(operations) - 1, -1, -1):
            operation = operations[position]
            place = (operation.item, operation.field)
            if operation.field in (PropertySet.name, METADATA):
                if place not in done:
                    reversals.extend(_restore_layer(runtime, operation, seq))
                    done.add(place)
            else:
                stamp = Stamp(envelope.depth, own.feed, seq, position)
                reversals.extend(_reversal(runtime, operation, stamp))
        if reversals:
            runtime.operate(reversals)
    return own.cursor.length > length


def _restore_layer(runtime: PartyRuntime, operation: ItemOperation, seq: int) -> list[ItemOperation]:
    """Put this feed's entries back that a message changed, as far as they still stand as it left them."""
    own = runtime.data
    assert own is not None
    record = runtime.state.record(operation.item)
    if record is None:
        return []
    before, after = PropertySet(operation.item), PropertySet(operation.item)
    for model, end in ((before, seq), (after, seq + 1)):
        for feed, at in runtime.processor.places(frozenset({operation.item})):
            if feed == own.feed and at < end:
                _fold_own(runtime, model, operation, at)
    current = record.metadata if operation.field == METADATA else record.model
    now = current.layers.get(own.feed, {})
    restores = undo_of(before.layers.get(own.feed, {}), after.layers.get(own.feed, {}))
    standing = tuple(
        restore for restore in restores if now.get(restore.key) == after.layers.get(own.feed, {}).get(restore.key)
    )
    return [ItemOperation(operation.item, operation.field, standing)] if standing else []


def _fold_own(runtime: PartyRuntime, model: PropertySet, wanted: ItemOperation, seq: int) -> None:
    own = runtime.data
    assert own is not None
    block = runtime.feeds.block(own.cursor.key, seq)
    envelope = decode_envelope(block.payload, DATA)
    assert isinstance(envelope, Envelope), envelope
    operations = decode_operations(envelope.body, party=runtime.party, feed=own.feed, seq=seq)
    for position, operation in enumerate(operations):
        if operation.item == wanted.item and operation.field == wanted.field:
            model.apply(operation.body, Stamp(envelope.depth, own.feed, seq, position), 0)


def _reversal(runtime: PartyRuntime, operation: ItemOperation, stamp: Stamp) -> list[ItemOperation]:
    item, field, body = operation
    record = runtime.state.record(item)
    if record is None:
        return []
    if field == GENESIS:
        return [ItemOperation(item, METADATA, (Set((DELETED_KEY,), True),))]
    if field == PLACEMENT:
        back = _placement_back(runtime, item, body, stamp)
        return [] if back is None else [ItemOperation(item, PLACEMENT, back)]
    if field == "threaded-log":
        return _log_back(item, body, stamp)
    if field == CUSTOM:
        raise Refused(f"an operation of the model {record.genesis.model} can't be undone")
    runtime.edit(record)
    record.model.undo_operation(body)
    return []


def _placement_back(runtime: PartyRuntime, item: ItemId, body: Any, stamp: Stamp) -> tuple[int, ItemId | None] | None:
    """The placement that puts an item where it was before; None when the one at `stamp` changed nothing."""
    kind, parent = body
    earlier = [move for move in runtime.state.tree.moves if move.item == item and move.stamp < stamp]
    if kind != MOVE:
        there = [move.kind == EMBED for move in earlier if move.kind != MOVE and move.parent == parent]
        was_embedded = bool(there) and there[-1]
        if was_embedded == (kind == EMBED):
            return None
        return (EMBED if was_embedded else UNEMBED), parent
    earlier = [move for move in earlier if move.kind == MOVE]
    record = runtime.state.record(item)
    assert record is not None
    return MOVE, earlier[-1].parent if earlier else record.genesis.parent


def _log_back(item: ItemId, body: Any, stamp: Stamp) -> list[ItemOperation]:
    if isinstance(body, Post):
        return [ItemOperation(item, "threaded-log", Retract(OwnPost(stamp.seq, stamp.position)))]
    if isinstance(body, Retract):
        return [ItemOperation(item, "threaded-log", Revive(body.post))]
    if isinstance(body, Revive):
        return [ItemOperation(item, "threaded-log", Retract(body.post))]
    raise Refused("a retention setting can't be undone", next_step="Set it again.")
