"""Folding items again: when control says something new about blocks that were applied, or a rule arrives late.

Which blocks count is a matter of intervals per feed. Where the old and the new admission differ, the items that those
blocks wrote are folded again from all their allowed operations, in canonical order. Where an item thereby comes to
exist or ceases to, what was created below it or moved into it follows.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from echostore.kernel.ids import FeedId, ItemId, item_text
from echostore.kernel.items.operations import ItemOperation, WriterRole
from echostore.kernel.order import DATA, Envelope
from echostore.kernel.party.admission import Admission, Interval
from echostore.kernel.party.credentials import Role
from echostore.kernel.reasons import Reason
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor


LACKING = frozenset({Reason.NO_ITEM, Reason.NO_PARENT})
"""Reasons whose detail names an item that may still come."""


class _Message(NamedTuple):
    """A message to be folded again; sorts in canonical order."""

    depth: int
    feed: FeedId
    seq: int
    time_ms: int
    operations: list[ItemOperation]
    writer: WriterRole


def refold_moved(processor: "PartyProcessor", before: Admission, after: Admission) -> None:
    """Refold the items of processed blocks whose standing differs between two admissions."""
    items: set[ItemId] = set()
    for feed, cursor in processor.orderer.cursors.items():
        if cursor.kind != DATA or not cursor.length:
            continue
        old, new = before.by_id.get(feed), after.by_id.get(feed)
        below = processor.base_length(feed)
        for first, end in _differences(old.intervals if old else (), new.intervals if new else (), cursor.length):
            start = max(first, below)  # what the base holds counts for good
            processor.before_refold()  # own blocks may be among them, of a child party that was not flushed
            for seq in range(start, end):
                operations = processor.operations_at(feed, seq)
                items.update(operation.item for operation in operations)
                items |= processor.views.concerned(operations)
            _renew_block_rejects(processor, feed, start, end)
    if items:
        processor.state.settle()
        refold(processor, items)
        processor.counters.refolds += 1


def refold(processor: "PartyProcessor", items: Iterable[ItemId]) -> None:
    """Fold items again, and whatever depends on their existence."""
    processor.before_refold()
    state = processor.state
    todo = set(items)
    while todo:
        existed = {item for item in todo if state.record(item) is not None}
        _fold_again(processor, frozenset(todo))
        processor.counters.refolded_items += len(todo)
        processor.refolded |= todo
        flipped = {item for item in todo if (item in existed) != (state.record(item) is not None)}
        todo = _dependents(processor, flipped) if flipped else set()


def refold_found(processor: "PartyProcessor") -> None:
    """Refold what was refused for the lack of items that have come since."""
    while found := processor.state.found:
        processor.state.found = set()
        refold(processor, _lacking(processor, found))


def _fold_again(processor: "PartyProcessor", items: frozenset[ItemId]) -> None:
    state = processor.state
    base = processor.base
    messages = [
        message
        for feed, seq in processor.touched.places(items, below=False)
        if seq >= processor.base_length(feed) and (message := _message(processor, feed, seq)) is not None
    ]
    state.forget(items)
    if base is not None:
        records = (base.record(item) for item in items)
        state.restore((record for record in records if record is not None), base.moves_of(items))
    processor.forget_rejects(
        (message.feed, message.seq, position)
        for message in messages
        for position, operation in enumerate(message.operations)
        if operation.item in items
    )
    messages.sort()
    # Items first: an operation may sort below the genesis that its writer did not name as a cause.
    for creating in (True, False):
        for message in messages:
            state.apply(
                depth=message.depth,
                feed=message.feed,
                seq=message.seq,
                time_ms=message.time_ms,
                operations=message.operations,
                writer=message.writer,
                only=items,
                creating=creating,
            )
    state.settle()
    state.refold -= items


def _message(processor: "PartyProcessor", feed: FeedId, seq: int) -> _Message | None:
    """The message at a place, if it counts there."""
    writer = processor.writer(feed, seq)
    if writer is None:
        return None
    cursor = processor.orderer.cursors[feed]
    envelope = decode_envelope(processor.payload(cursor.key, seq), cursor.kind)
    assert isinstance(envelope, Envelope), (feed.hex(), seq, envelope)
    operations = processor.operations(feed, seq, envelope.body)
    return _Message(envelope.depth, feed, seq, envelope.body.time_ms, operations, writer)


def _dependents(processor: "PartyProcessor", parents: set[ItemId]) -> set[ItemId]:
    """Items whose genesis or moves name one of these as a parent, whether they came to exist or not."""
    state = processor.state
    found = {record.item for record in state.records.values() if record.genesis.parent in parents}
    found |= {move.item for move in state.tree.moves if move.parent in parents}
    if processor.items is not None:
        for parent in parents:
            found.update(processor.items.created_below(parent))
    return found | _lacking(processor, parents)


def _lacking(processor: "PartyProcessor", missing: set[ItemId]) -> set[ItemId]:
    """Items of operations that were refused for the lack of these."""
    texts = {item_text(item) for item in missing}
    return {
        processor.operations_at(FeedId(reject.feed), reject.seq)[reject.position].item
        for reject in processor.rejects()
        if reject.reason in LACKING
        and reject.detail in texts
        and reject.seq >= processor.base_length(FeedId(reject.feed))
    }


def _renew_block_rejects(processor: "PartyProcessor", feed: FeedId, start: int, end: int) -> None:
    """The rejects of whole blocks whose standing changed."""
    processor.forget_rejects((feed, seq, -1) for seq in range(start, end))
    for seq in range(start, end):
        if processor.writer(feed, seq) is not None:
            processor.check_form(feed, seq)
        else:
            processor.exclude(feed, seq)
            # Rejects of single operations would say twice why the block is not in the state.
            processor.forget_rejects(
                (feed, seq, position) for position in range(len(processor.operations_at(feed, seq)))
            )


def _differences(old: Iterable[Interval], new: Iterable[Interval], length: int) -> list[tuple[int, int]]:
    """Ranges below `length` in which a writer stood differently: in another role, or not at all."""
    before, after = list(old), list(new)
    if before == after:
        return []
    edges = {0, length}
    for interval in (*before, *after):
        edges.update(min(edge, length) for edge in (interval.start, interval.end) if edge is not None)
    ordered = sorted(edges)
    return [(start, end) for start, end in pairwise(ordered) if _role_at(before, start) != _role_at(after, start)]


def _role_at(intervals: list[Interval], seq: int) -> Role | None:
    """The role in which operations count; a reader's don't."""
    for start, end, role in intervals:
        if start <= seq and (end is None or seq < end):
            return None if role is Role.READER else role
    return None
