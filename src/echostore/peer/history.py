"""The past of a party and of its items: as_of, history, diff, and what lost against a standing value.

A past state is folded from the blocks at or below a timeframe, under what the control feeds said by then. One item's
past folds that item's own blocks only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import Compacted, UsageError
from echostore.kernel.frozen import frozen
from echostore.kernel.ids import FeedId, ItemId, feed_id
from echostore.kernel.items.operations import GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.models.property_set import DELETED, PropertySet
from echostore.kernel.order import DATA, Envelope, FeedCursor
from echostore.kernel.party.epoch_chain import Tally
from echostore.kernel.timeframe import Position, Timeframe
from echostore.kernel.values import Path, Value, timestamp_us
from echostore.peer.anchors import Anchor
from echostore.peer.asking_past import EpochNotHere, with_others
from echostore.peer.base_following import open_epoch
from echostore.peer.control_standing import fold_whole, no_epoch
from echostore.peer.delivered import Delivered
from echostore.peer.positions import length_at
from echostore.peer.processor import PartyProcessor
from echostore.peer.runtime import PartyRuntime
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.item_kinds import PropertySetItem
    from echostore.peer.items import Item
    from echostore.peer.party import Party


@dataclass(frozen=True, slots=True)
class Revision:
    """One message that wrote an item: who, when, what, and the anchor of the moment after it."""

    feed: FeedId
    seq: int
    depth: int
    time_ms: int
    author: str
    identity: bytes
    what: list[str]


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """One difference between two states of an item. DELETED stands for "not there"."""

    path: Path
    before: Value
    after: Value

    @property
    def kind(self) -> str:
        if self.before is DELETED:
            return "added"
        return "removed" if self.after is DELETED else "changed"


EPOCH_PREFIX = "epoch:"


def party_as_of(party: "Party", moment: Any) -> "Party":
    """The party at a moment, read-only and in memory. What lies below an epoch that is not here is asked of others."""
    return with_others(party, lambda: _party_then(party, moment))


def _party_then(party: "Party", moment: Any) -> "Party":
    from echostore.peer.older_epochs import party_at_older
    from echostore.peer.party import Party

    runtime = party.runtime
    if runtime.writable:
        runtime.flush()
    number = _number_of_epoch(moment)
    older = party_at_older(party, number) if number is not None else None
    if older is not None:
        return older
    data, control = resolve_moment(runtime, moment)
    _check_held(runtime, data)
    processor = PastProcessor(runtime.processor, data, control, base=base_for(runtime, data))
    processor.open()
    past = PartyRuntime(processor, feeds=runtime.feeds, items=None, blobs=None, now_ms=runtime.now_ms, writable=False)
    return Party(party.peer, past, title=party._title, lock=party.lock)


class PastProcessor(PartyProcessor):
    """A processor that sees the feeds only up to a timeframe. `control` of None sees all of control."""

    def __init__(
        self, live: PartyProcessor, data: Timeframe, control: Timeframe | None, base: BaseEpoch | None = None
    ) -> None:
        self._data = data
        self._control = control
        parent = None if live.parent is None else PastProcessor(live.parent, Timeframe({}), control, live.parent.base)
        super().__init__(
            live.party,
            feeds=live.feeds,
            items=None,
            factory=live.factory,
            parent=parent,
        )
        self.base = base
        if parent is not None:
            parent.open()

    def held_length(self, kind: str, key: Any) -> int:
        length = super().held_length(kind, key)
        if kind == DATA:
            return length_at(self._data, self.admission, key, length)
        return length if self._control is None else min(length, self._control.length(feed_id(key)))


def resolve_moment(runtime: PartyRuntime, moment: Any) -> tuple[Timeframe, Timeframe | None]:
    """The data and control timeframes that a moment names: an anchor, a timeframe, a time, or an epoch's number."""
    if isinstance(moment, Timeframe):
        return moment, None
    number = _number_of_epoch(moment)
    if number is not None:
        return _timeframes_of_epoch(runtime, number)
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise UsageError("a time needs a time zone", next_step="Use datetime.now(timezone.utc).")
        _check_time(runtime, timestamp_us(moment) // 1000)
        return _timeframe_at(runtime, timestamp_us(moment) // 1000, DATA), _timeframe_at(
            runtime, timestamp_us(moment) // 1000, "control"
        )
    anchor = Anchor.parse(moment)
    if anchor.party != runtime.party:
        raise UsageError("the anchor belongs to another party")
    return anchor.data, anchor.control


def _number_of_epoch(moment: Any) -> int | None:
    """The number of the epoch that a moment names; None for another kind of moment."""
    if isinstance(moment, int) and not isinstance(moment, bool):
        return moment
    if not isinstance(moment, str) or not moment.startswith(EPOCH_PREFIX):
        return None
    number = moment.removeprefix(EPOCH_PREFIX)
    if not (number.isascii() and number.isdigit() and len(number) <= 10):
        raise UsageError(f"{moment[:40]!r} names no epoch", next_step="Write its number, as in epoch:3.")
    return int(number)


def _timeframes_of_epoch(runtime: PartyRuntime, number: int) -> tuple[Timeframe, Timeframe]:
    epoch = _tally(runtime).accepted(number)
    if epoch is None:
        raise no_epoch(runtime.processor, number)
    data, control = (
        Timeframe.of((feed_id(entry.feed), Position(entry.seq, entry.link)) for entry in entries)
        for entries in (epoch.genesis.timeframe, epoch.genesis.control_timeframe)
    )
    return data, control


def _check_time(runtime: PartyRuntime, time_ms: int) -> None:
    """Blocks tell times, and below the base of a truncated party there are none."""
    base = runtime.processor.base
    if base is None or not any(_beginning(runtime, cursor) for cursor in _data_cursors(runtime)):
        return
    epoch = _tally(runtime).accepted(base.name.number)
    if epoch is not None and time_ms < epoch.genesis.created_ms:
        raise Compacted(
            f"that time lies before epoch {epoch.number}, and the blocks inside it are gone here",
            next_step="Name an epoch by its number, or ask a member that kept its history.",
        )


def _tally(runtime: PartyRuntime) -> Tally:
    child = runtime.processor.child_key
    fold_whole(runtime.processor)
    return runtime.processor.membership.machine.epoch_tally(child)


def _timeframe_at(runtime: PartyRuntime, time_ms: int, kind: str) -> Timeframe:
    """Per feed, the blocks before the first one that was written later. Clocks are their writers' own."""
    entries = []
    feeds = runtime.processor.feeds_of(kind)
    for feed, cursor in runtime.processor.orderer.cursors.items():
        if cursor.kind != kind:
            continue
        last = None
        base = feeds.feed(cursor.key).base if feeds.has_feed(cursor.key) else 0
        if base:
            link = feeds.link_at(cursor.key, base - 1)
            assert link is not None, "the link at a feed's beginning is kept"
            last = Position(base - 1, link)
        for block in feeds.read(cursor.key, base, cursor.length):
            envelope = decode_envelope(block.payload, kind)
            if not isinstance(envelope, Envelope) or envelope.body.time_ms > time_ms:
                break
            last = Position(block.seq, block.link)
        if last is not None:
            entries.append((feed, last))
    return Timeframe.of(entries)


def _check_held(runtime: PartyRuntime, timeframe: Timeframe) -> None:
    for feed, at in timeframe.entries.items():
        cursor = runtime.processor.orderer.cursors.get(feed)
        if cursor is None or cursor.length <= at.seq:
            raise Compacted(
                f"block {at.seq} of feed {feed.hex()} is not here yet",
                next_step="Wait until the party has caught up with the peer that made the anchor.",
            )
        beginning = _beginning(runtime, cursor)
        if at.seq < beginning - 1:
            continue  # `base_for` says whether an epoch can stand for it
        if at.seq == beginning - 1:
            here = runtime.feeds.link_at(cursor.key, at.seq)  # the block is gone, its link is kept
        else:
            here = runtime.processor.orderer.mark(feed, at.seq).link
        if here is None or not here.startswith(at.link[:16]):
            raise UsageError(f"the moment names another branch of feed {feed.hex()}")


def _beginning(runtime: PartyRuntime, cursor: FeedCursor) -> int:
    return runtime.feeds.feed(cursor.key).base if runtime.feeds.has_feed(cursor.key) else 0


def base_for(runtime: PartyRuntime, data: Timeframe) -> BaseEpoch | None:
    """The epoch from which a past is folded: the newest one inside it whose tail is here. None: from the beginning.

    Compacted when the blocks are gone and no epoch ends just where they begin; EpochNotHere when one does whose snapshot
    is with others.
    """
    live = runtime.processor
    for base in [] if live.base is None else [live.base, *earlier_epochs(runtime, live.base)]:
        if _leads_to(runtime, data, {feed: cut.length for feed, cut in base.cuts.items() if not cut.control}):
            return base
    if not any(_beginning(runtime, cursor) for cursor in _data_cursors(runtime)):
        return None
    for epoch in reversed(_tally(runtime).chain):
        if _leads_to(runtime, data, {feed_id(entry.feed): entry.seq + 1 for entry in epoch.genesis.timeframe}):
            raise EpochNotHere(epoch.number)
    raise Compacted(
        "that moment lies inside an epoch whose blocks are gone here, where no snapshot was taken",
        next_step="Name an epoch by its number, or ask a member that kept its history.",
    )


def _data_cursors(runtime: PartyRuntime) -> list[FeedCursor]:
    return [cursor for cursor in runtime.processor.orderer.cursors.values() if cursor.kind == DATA]


def _leads_to(runtime: PartyRuntime, data: Timeframe, lengths: dict[FeedId, int]) -> bool:
    """Whether a moment can be folded from an epoch that ends at these lengths: nothing in between is gone."""
    return all(data.length(feed) >= length for feed, length in lengths.items()) and all(
        data.length(cursor.id) == lengths.get(cursor.id, 0) or lengths.get(cursor.id, 0) >= _beginning(runtime, cursor)
        for cursor in _data_cursors(runtime)
    )


def earlier_epochs(runtime: PartyRuntime, base: BaseEpoch) -> Iterator[BaseEpoch]:
    """The epochs below a base whose snapshots are still here, newest first."""
    for epoch in reversed(_tally(runtime).chain):
        if epoch.number < base.name.number:
            found = open_epoch(runtime, epoch)
            if found is not None:
                yield found


def item_history(item: "Item") -> list[Revision]:
    party = item.party
    names = {member.identity: member.name for member in party.runtime.processor.membership.machine.members}
    revisions = []
    for message in item.stream():
        what = [_describe(operation) for operation in message.operations if operation.item == item.id]
        revisions.append(
            Revision(
                message.feed,
                message.seq,
                message.depth,
                message.time_ms,
                names.get(message.writer.identity, ""),
                message.writer.identity,
                what,
            )
        )
    return revisions


def _describe(operation: ItemOperation) -> str:
    if operation.field == GENESIS:
        return f"created as {operation.body.model}@{operation.body.version}"
    if operation.field == METADATA:
        return "metadata " + _describe_changes(operation.body)
    if operation.field == PLACEMENT:
        return "moved"
    if operation.field == "property-set":
        return _describe_changes(operation.body)
    generation = getattr(operation.body, "generation", 0)
    if generation and operation.body.update[0].counter == 0:
        return f"{operation.field} written again as generation {generation}: what it built on before was excluded"
    return f"{operation.field} edited"


def _describe_changes(changes: Any) -> str:
    parts = []
    for change in changes:
        path = ".".join(change.key.path if hasattr(change, "key") and hasattr(change.key, "path") else change.path)
        verb = type(change).__name__.lower()
        if verb == "set":
            parts.append(f"{path} deleted" if change.value is DELETED else f"{path} = {change.value!r}")
        else:
            parts.append(f"{verb} {path}")
    return ", ".join(parts)


def item_at(runtime: PartyRuntime, item: ItemId, data: Timeframe) -> ItemRecord | None:
    """One item as it was at a timeframe, folded from its own blocks."""
    processor = runtime.processor
    base = base_for(runtime, data)
    state = PartyState(runtime.party, processor.factory, load=lambda _: None, identity_of=processor.identity_of)
    known = base.record(item) if base is not None else None
    if known is not None:
        state.restore([known], [])
    for message in messages_of(runtime, item, base, data):
        operations = [without_parent(operation) for operation in message.operations]
        state.apply(
            depth=message.depth,
            feed=message.feed,
            seq=message.seq,
            time_ms=message.time_ms,
            operations=operations,
            writer=message.writer,
            only=frozenset({item}),
        )
    state.settle()
    return state.records.get(item)


def messages_of(
    runtime: PartyRuntime, item: ItemId, base: BaseEpoch | None, data: Timeframe | None = None
) -> list[Delivered]:
    """The messages above a base that write an item and are here, in canonical order; only those inside `data` if given."""
    processor = runtime.processor
    found: list[Delivered] = []
    for feed, seq in processor.touched.places(frozenset({item})):
        cursor = processor.orderer.cursors[feed]
        begins = max(_beginning(runtime, cursor), base.length(feed) if base is not None else 0)
        if seq < begins or (data is not None and not data.covers(feed, seq)):
            continue
        block = runtime.feeds.block(cursor.key, seq)
        envelope = decode_envelope(block.payload, DATA)
        assert isinstance(envelope, Envelope), envelope
        message = processor.delivered(feed, seq, block.link, envelope)
        if message is not None:
            found.append(message)
    return sorted(found, key=lambda message: (message.depth, message.feed, message.seq))


def without_parent(operation: ItemOperation) -> ItemOperation:
    """Folding one item alone, its parent does not matter."""
    if operation.field != GENESIS or operation.body.parent is None:
        return operation
    from dataclasses import replace

    return operation._replace(body=replace(operation.body, parent=None))


def item_diff(item: "Item", before: Any, after: Any) -> list[ValueDiff]:
    return with_others(item.party, lambda: _difference(item, before, after))


def _difference(item: "Item", before: Any, after: Any) -> list[ValueDiff]:
    runtime = item.party.runtime
    if runtime.writable:
        runtime.flush()
    old = _item_then(runtime, item.id, before)
    new = item._record() if after is None else _item_then(runtime, item.id, after)
    differences: list[ValueDiff] = []
    _compare((), _plain_value(old), _plain_value(new), differences)
    return differences


def _item_then(runtime: PartyRuntime, item: ItemId, moment: Any) -> ItemRecord | None:
    data, _ = resolve_moment(runtime, moment)
    _check_held(runtime, data)
    return item_at(runtime, item, data)


def _plain_value(record: ItemRecord | None) -> Value:
    if record is None or record.deleted:
        return DELETED
    return record.model.value()


def _compare(path: Path, before: Value, after: Value, found: list[ValueDiff]) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            _compare((*path, key), before.get(key, DELETED), after.get(key, DELETED), found)
    elif before is not after and (type(before) is not type(after) or before != after):
        found.append(ValueDiff(path, frozen(before), frozen(after)))


def losing_values(item: "PropertySetItem", path: Path) -> list[Value]:
    """Values that other feeds wrote at a path without having seen the standing one, and vice versa."""
    with item.party.reading() as runtime:
        if runtime.writable:
            runtime.flush()
        model: PropertySet = item._record().model
        writes = model.writes(path)
        if len(writes) < 2:
            return []
        (winner, standing), *others = writes
        lost = []
        for stamp, value in others:
            seen = asserted_seq(runtime, winner.feed, winner.seq, stamp.feed)
            if seen < stamp.seq and value is not DELETED and value != standing:
                lost.append(frozen(value))
        return lost


def asserted_seq(runtime: PartyRuntime, feed: FeedId, seq: int, other: FeedId) -> int:
    """The last block of `other` that happened before a block of `feed`; -1 for none. Walks dependencies backwards."""
    best: dict[FeedId, int] = {}
    front = [(feed, seq)]
    while front:
        at_feed, at_seq = front.pop()
        if best.get(at_feed, -1) >= at_seq:
            continue
        known = best.get(at_feed, -1)
        best[at_feed] = at_seq
        cursor = runtime.processor.orderer.cursors.get(at_feed)
        if cursor is None:
            continue
        base = runtime.processor.base
        if base is not None and at_feed in base.cuts and known + 1 < _beginning(runtime, cursor):
            # What is gone can't be asked; the last message inside the base had processed no less.
            front.extend((seen.feed, seen.seq) for seen in base.cuts[at_feed].asserted)
        for block in runtime.processor.feeds_of(cursor.kind).read(cursor.key, known + 1, at_seq + 1):
            envelope = decode_envelope(block.payload, cursor.kind)
            if isinstance(envelope, Envelope):
                front.extend((dependency.feed, dependency.seq) for dependency in envelope.dependencies)
    return best.get(other, -1) if other != feed else seq - 1
