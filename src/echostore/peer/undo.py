"""Undo and redo of this device's own batches.

An undo is an ordinary message that takes an earlier own message back and says so (`undoes`), so the stacks can be
read off the own feed after a restart:

    written   m1  m2  u(m2)  m3        undo stack: m1 m3      redo stack: -
    written   m1  m2  u(m2)            undo stack: m1         redo stack: u(m2)

Of property sets it puts this feed's own entries back, so the best remaining write wins and nobody else's work is
erased. Created items are deleted, posts retracted, moved items moved back. Edits of texts and lists are reversed around
what others did since; what an earlier undo put back counts as what it once was (`kernel.models.stand_ins`).

An application's own models have no undo: undoing a message with one of their operations is refused, and the messages
before it stay as they are. Operations on an item that the same message created need none: the item is deleted.
"""

from dataclasses import dataclass
from typing import Any

from echostore.kernel.errors import Refused
from echostore.kernel.ids import FeedId, ItemId, Stamp, created_item_id
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, REFUSED, ItemOperation
from echostore.kernel.items.record import DELETED_KEY
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.property_set import Layer, Operation, PropertySet, Set, undo_of
from echostore.kernel.models.stand_ins import Originals
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import OwnPost, Post, Retract, Revive
from echostore.kernel.order import DATA, Envelope
from echostore.peer.runtime import PartyRuntime
from echostore.peer.undo_images import PROPERTY_FIELDS, Image, Place, layers_of, note
from echostore.wire.messages import decode_envelope, decode_operations

SEQUENCES = {model.name: model for model in (GrowableArray, ConcurrentText)}
"""Models whose edits are made in place."""

STACK_MESSAGES_MAX = 1000
"""How far back undo reaches: own messages that are read to find the stacks."""


@dataclass(frozen=True, slots=True)
class _Stacks:
    """Seqs of own messages. Of those that can be undone and redone the next one is last."""

    start: int
    undo: list[int]
    redo: list[int]
    undos: list[int]
    """The ones that took something back, redos too."""


def undo(runtime: PartyRuntime) -> bool:
    stacks = _stacks(runtime)
    return any(_take_back(runtime, seq, stacks) for seq in reversed(stacks.undo))


def redo(runtime: PartyRuntime) -> bool:
    stacks = _stacks(runtime)
    return any(_take_back(runtime, seq, stacks) for seq in reversed(stacks.redo))


def _stacks(runtime: PartyRuntime) -> _Stacks:
    if runtime.in_batch:
        raise Refused("a batch is open", next_step="Undo after it; a batch that raises is taken back as a whole.")
    runtime.flush()
    own = runtime.data
    if own is None:
        return _Stacks(0, [], [], [])
    undo_stack: list[int] = []
    redo_stack: list[int] = []
    undos: set[int] = set()
    undone: list[int] = []
    founded = runtime.processor.system_item == created_item_id(own.feed, 0, 0)  # the party itself stays
    start = max(1 if founded else 0, own.cursor.length - STACK_MESSAGES_MAX, _floor(runtime))
    for block in runtime.feeds.read(own.cursor.key, start, own.cursor.length):
        envelope = decode_envelope(block.payload, DATA)
        assert isinstance(envelope, Envelope), envelope
        if not envelope.body.operations:
            continue  # it stands for a batch that was rolled back
        target = envelope.body.undoes - 1
        if target < 0:
            undo_stack.append(block.seq)
            redo_stack.clear()
            continue
        undone.append(block.seq)
        if target in undos:
            _pop(redo_stack, target)
            undo_stack.append(block.seq)
        else:
            _pop(undo_stack, target)
            undos.add(block.seq)
            redo_stack.append(block.seq)
    return _Stacks(start, undo_stack, redo_stack, undone)


def _pop(stack: list[int], target: int) -> None:
    """Take a message off, and those above it: they had changed nothing and were passed over."""
    if target in stack:
        del stack[stack.index(target) :]


def _take_back(runtime: PartyRuntime, seq: int, stacks: _Stacks) -> bool:
    """Whether there was anything to take back; a message that changed nothing is passed over."""
    own = runtime.data
    assert own is not None
    length = own.cursor.length
    message = _own_message(runtime, seq)
    created = {operation.item for operation, _ in message if operation.field == GENESIS}
    properties: dict[Place, list[tuple[Operation, Stamp]]] = {}
    reversals: list[ItemOperation] = []
    with runtime.batch(undoes=seq):
        for operation, stamp in reversed(message):
            item, field, body = operation
            if field in PROPERTY_FIELDS:
                properties.setdefault((item, field), []).insert(0, (body, stamp))
            elif field in SEQUENCES:
                _reverse_edits(runtime, operation, stacks)
            elif field != CUSTOM or item not in created:
                reversals.extend(_reversal(runtime, operation, stamp))
        for place, operations in properties.items():
            reversals.extend(_restore_entries(runtime, place, operations, stacks))
        if reversals:
            runtime.operate(reversals)
    return own.cursor.length > length


def _own_message(runtime: PartyRuntime, seq: int) -> list[tuple[ItemOperation, Stamp]]:
    own = runtime.data
    assert own is not None
    envelope = decode_envelope(runtime.feeds.block(own.cursor.key, seq).payload, DATA)
    assert isinstance(envelope, Envelope), envelope
    operations = decode_operations(envelope.body, party=runtime.party, feed=own.feed, seq=seq)
    return [
        (operation, Stamp(envelope.depth, own.feed, seq, position)) for position, operation in enumerate(operations)
    ]


def _restore_entries(
    runtime: PartyRuntime, place: Place, operations: list[tuple[Operation, Stamp]], stacks: _Stacks
) -> list[ItemOperation]:
    """Put this feed's entries back that a message changed, as far as they still stand as it left them."""
    item, field = place
    record = runtime.state.record(item)
    layers = None if record is None else layers_of(record, field)
    if layers is None:
        return []
    feed, seq = operations[0][1].feed, operations[0][1].seq
    image = runtime.undo_images.get(seq, place, refolded=runtime.processor.counters.refolded_items)
    if image is None:
        image = _read_images(runtime, place, seq, stacks)
    before = {key: entry for key, entry in image.items() if entry is not None}
    model = PropertySet(item, {feed: dict(before)} if before else {})
    for operation, stamp in operations:
        model.apply(operation, stamp, 0)
    after = model.layers.get(feed, {})
    now = layers.get(feed, {})
    restores = undo_of(before, after)
    standing = tuple(restore for restore in restores if now.get(restore.key) == after.get(restore.key))
    return [ItemOperation(item, field, standing)] if standing else []


def _read_images(runtime: PartyRuntime, place: Place, wanted: int, stacks: _Stacks) -> Image:
    """Read the images of all messages that undo can reach from this feed's operations on one property set."""
    own = runtime.data
    assert own is not None
    item, field = place
    floor = _floor(runtime)
    model = PropertySet(item, _layers_at(runtime, place) if floor else {})
    found: Image = {}
    for seq in sorted(runtime.processor.touched.seqs(item, own.feed, floor)):
        image: Image = {}
        for operation, stamp in _own_message(runtime, seq):
            if operation.item == item and operation.field == field:
                note(image, model.layers.get(own.feed, {}), operation.body)
                model.apply(operation.body, stamp, 0)
        if seq >= stacks.start:
            runtime.undo_images.put(seq, place, image)
        if seq == wanted:
            found = image
    return found


def _floor(runtime: PartyRuntime) -> int:
    """From where on this device's own messages can be read: of a truncated feed those above the base epoch."""
    own, processor = runtime.data, runtime.processor
    assert own is not None
    return processor.base_length(own.feed) if runtime.feeds.feed(own.cursor.key).base else 0


def _layers_at(runtime: PartyRuntime, place: Place) -> dict[FeedId, Layer]:
    """This feed's layer of a property set as the base epoch has it."""
    own, base = runtime.data, runtime.processor.base
    assert own is not None
    assert base is not None, "a truncated party stands on an epoch"
    record = base.record(place[0])
    layer = (layers_of(record, place[1]) or {}).get(own.feed) if record is not None else None
    return {own.feed: dict(layer)} if layer else {}


def _reverse_edits(runtime: PartyRuntime, operation: ItemOperation, stacks: _Stacks) -> None:
    """Reverse the edits of a text or a list, as open edits that the batch seals."""
    record = runtime.state.record(operation.item)
    if record is None or not isinstance(record.model, SEQUENCES[operation.field]):
        return
    runtime.edit(record)
    originals = Originals()
    for seq in stacks.undos:
        for other, _ in _own_message(runtime, seq):
            if (
                other.item == operation.item
                and other.field == operation.field
                and record.model.holds(other.body.update)
            ):
                originals.add(other.body.update[0].writer, other.body.stand_ins)
    record.model.undo_operation(operation.body, originals)


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
    if field == REFUSED:
        return []
    assert field == CUSTOM, field
    raise Refused(
        f"the last change can't be undone: it holds an operation of the model {record.genesis.model}, which has no undo",
        next_step="Apply an operation that reverses it, or change the items by hand.",
    )


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
