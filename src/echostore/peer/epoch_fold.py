"""Folding a party to an epoch's timeframe, beside the live party, to see what its snapshot should be.

    genesis: data timeframe, control timeframe          an earlier epoch whose blobs are here
              │ which blocks, under which admission               │ items read when they are touched
              ▼                                                   ▼
            FoldProcessor ── messages between the two ──► dirty items ──► tree over the earlier tree ──► CID

It costs the messages and items since the earlier epoch, times the depth of the tree. Without one it folds from the
beginning. It reads the feeds through a connection of its own and changes nothing, so it needs no lock.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from echostore.kernel.errors import Closed, Corrupt
from echostore.kernel.ids import Cid, FeedId, FeedKey, ItemId, PartyKey, feed_id
from echostore.kernel.items.discarding import LeftOut, Waits
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.order import CONTROL, DATA, Delivery
from echostore.kernel.party.credentials import EpochGenesis, TimeframeEntry
from echostore.kernel.snapshot import (
    UNPLACED_VERSION,
    ItemKey,
    ModelVersion,
    Placement,
    StateRoot,
    TreeTop,
    item_key,
    key_bounds,
    placements_of,
)
from echostore.kernel.snapshot import TimeframeEntry as RootEntry
from echostore.kernel.timeframe import Dependency, Position, Timeframe
from echostore.peer.base_install import base_cursors
from echostore.peer.discarding import Settled, discard_at
from echostore.peer.positions import counts_alike, length_at
from echostore.peer.processor import PartyProcessor
from echostore.store.feed_store import FeedStore
from echostore.wire.base_epoch import BaseEpoch, base_mark
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.epochs import FeedCut, encode_cut
from echostore.wire.items import encode_moves, encode_record
from echostore.wire.membership import membership_blobs, membership_state
from echostore.wire.placements import (
    PlacementReader,
    SortedPlacements,
    build_placements,
    state_placements,
    update_placements,
)
from echostore.wire.snapshot import EncodedItem, encode_item, read_state_root, state_root_bytes
from echostore.wire.tree import TreeReader, build, update
from echostore.wire.tree_nodes import IndexNode, Page
from echostore.wire.tree_reader import NodeReader, P


@dataclass(frozen=True, slots=True)
class Folded:
    """The state at an epoch's timeframe, as this peer has it."""

    cid: Cid
    root: StateRoot
    cut: Cid
    blobs: dict[Cid, bytes]
    """Those that the earlier epoch does not have."""
    messages: int
    """How many data messages were folded."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """What the genesis' `discard_before` takes out of it, beyond what the earlier epoch had left out already."""
    stored: bool = False
    """Whether it is the state as the ItemStore has it, and was not folded from blocks."""
    settled: Settled | None = None
    """Of an epoch that discards: what its items wait for."""


class UnlikeBase(Exception):
    """Blocks inside the base count otherwise under the admission that a genesis names."""


class OpenTimeframe(Exception):
    """A genesis names messages without what they build on: no state is at such a place, whoever looks."""


class FoldProcessor(PartyProcessor):
    """Sees the feeds up to an epoch's timeframes, and stands on an earlier epoch or on nothing."""

    def __init__(
        self,
        party: PartyKey,
        *,
        feeds: FeedStore,
        factory: ModelFactory,
        data: Timeframe,
        control: Timeframe,
        base: BaseEpoch | None = None,
        parent: "FoldProcessor | None" = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._data, self._control = data, control
        self._cancelled = cancelled
        super().__init__(party, feeds=feeds, items=None, factory=factory, parent=parent)
        self.base = base
        self.base_nodes = None if base is None else _NodesOver(base.reader)
        """Those that were read, for items and then for the tree over them."""

    def open(self) -> None:
        if self.base is not None:
            self.orderer.set_base(self.order_cuts())
        self._follow_control()
        if self.base is not None:
            self.state.start_over(self.base.moves)
            for cursor in base_cursors(self.base):
                self.follow(cursor)
        self.follow_data()
        self.advance(list(self.orderer.cursors))

    def _take_data(self, delivery: Delivery) -> None:
        if self._cancelled():
            raise Closed("the peer is being closed", next_step="The epoch is looked at again when it is open.")
        super()._take_data(delivery)

    def _load(self, item: ItemId) -> ItemRecord | None:
        if self.base is None or self.base_nodes is None:
            return None
        place = self.base_nodes.page_of(item_key(item))
        states = self.base.reader.page_items(place[1], place[0], item) if place is not None else ()
        return next((self.base.record_of(state) for _, state in states), None)

    def held_length(self, kind: str, key: FeedKey) -> int:
        length = self.feeds_of(kind).length(key)
        if kind != DATA:
            return min(length, self._control.length(feed_id(key)))
        return length_at(self._data, self.admission, key, length)


def fold_to(
    genesis: EpochGenesis,
    party: PartyKey,
    *,
    feeds: FeedStore,
    factory: ModelFactory,
    base: BaseEpoch | None,
    parent_feeds: FeedStore | None = None,
    parent: PartyKey | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    waits: Waits | None = None,
) -> Folded | None:
    """The state that a genesis speaks of, folded from `base`; None when this peer does not hold all of it.

    `waits` are those of the base, for who knows them: without, all its items are read where the genesis discards.

    UnlikeBase when it can't be folded from that one. OpenTimeframe when there is no such state, because a message is named and its cause, which is here, is not.
    """
    data, control = timeframe_of(genesis.timeframe), timeframe_of(genesis.control_timeframe)
    above = None
    if parent is not None:
        assert parent_feeds is not None
        above = FoldProcessor(parent, feeds=parent_feeds, factory=factory, data=Timeframe({}), control=control)
        above.open()
    processor = FoldProcessor(
        party,
        feeds=feeds,
        factory=factory,
        data=data,
        control=control,
        base=base,
        parent=above,
        cancelled=cancelled,
    )
    processor.open()
    if base is not None and not counts_alike(base, processor.admission):
        raise UnlikeBase
    if _short_of(processor, data, control):
        left_out = _cause_left_out(processor, data, control)
        if left_out is not None:
            raise OpenTimeframe(left_out)
        return None
    processor.finish()
    settled = None
    if genesis.discard_before_ms:
        settled = discard_at(processor, genesis.discard_before_ms, _asserted(processor), waits)
    blobs: dict[Cid, bytes] = {}
    dirty = {*processor.state.dirty, *processor.state.gone}
    if base is None:
        top = build(_encoded(processor, sorted(processor.state.records), blobs), blobs.__setitem__)
        changed = None
        models = {(each.genesis.model, each.genesis.version) for each in processor.state.records.values()}
    else:
        assert processor.base_nodes is not None
        over = _TreeOver(base.reader, processor.base_nodes, processor, blobs)
        top = update(over, dirty, over.items_under, blobs.__setitem__)
        changed = over.changed_places()
        models = _models(base, processor, dirty, top, blobs)
    placed = None
    if genesis.encoding_version != UNPLACED_VERSION:
        placed = _placements(processor, changed, blobs)
    made = _rooted(processor, top, placed, models, blobs)
    return made if settled is None else replace(made, left_out=settled.left_out, settled=settled)


def cuts_at(processor: PartyProcessor, root: StateRoot, control: Timeframe | None = None) -> list[FeedCut]:
    """Where an epoch ends in each feed: data feeds as the state root says, control feeds as `control` does.

    Without `control`, those end where they were processed to.
    """
    lengths = {feed_id(entry.feed_key): entry.seq + 1 for entry in root.timeframe}
    found = []
    for feed, cursor in processor.orderer.cursors.items():
        mine = cursor.kind == CONTROL
        length = lengths.get(feed, 0)
        if mine:
            length = cursor.length if control is None else control.length(feed)
        if not length:
            continue
        mark = processor.orderer.mark(feed, length - 1)
        # A child party follows its parent's control feeds and does not read them.
        asserted = cursor.asserted
        if length != cursor.length and not (mine and processor.parent is not None):
            asserted = _asserted_at(processor, feed, length)
        found.append(FeedCut(cursor.key, mine, length, mark.link, mark.depth, tuple(asserted.values())))
    return found


def _asserted(processor: PartyProcessor) -> dict[FeedId, dict[FeedId, Dependency]]:
    """What the last message inside the epoch had processed, by data feed."""
    found = {}
    for feed, at in processor.timeframe.entries.items():
        cursor = processor.orderer.cursors[feed]
        whole = at.seq + 1 == cursor.length
        found[feed] = cursor.asserted if whole else _asserted_at(processor, feed, at.seq + 1)
    return found


def _asserted_at(processor: PartyProcessor, feed: FeedId, length: int) -> dict[FeedId, Dependency]:
    """What a feed had processed at an earlier length: of feeds with excluded blocks behind it, which end there."""
    found: dict[FeedId, Dependency] = {}
    start = 0
    cut = processor.base.cuts.get(feed) if processor.base is not None else None
    if cut is None or cut.length > length:
        cut = processor.control_floor.get(feed)
    if cut is not None:
        start = cut.length
        found.update((known.feed, known) for known in cut.asserted)
    for seq in range(start, length):
        found.update((dependency.feed, dependency) for dependency in processor.envelope(feed, seq).dependencies)
    return found


def timeframe_of(entries: Iterable[TimeframeEntry | RootEntry]) -> Timeframe:
    found: list[tuple[FeedId, Position]] = []
    for entry in entries:
        key = entry.feed_key if isinstance(entry, RootEntry) else entry.feed
        found.append((feed_id(key), Position(entry.seq, entry.link)))
    return Timeframe.of(found)


def _short_of(processor: FoldProcessor, data: Timeframe, control: Timeframe) -> bool:
    """Whether some block of the timeframes was not processed, or on another branch."""
    cursors = processor.orderer.cursors
    for feed, at in (*data.entries.items(), *control.entries.items()):
        cursor = cursors.get(feed)
        if cursor is None or cursor.length <= at.seq or processor.orderer.mark(feed, at.seq).link != at.link:
            return True
    return False


def _cause_left_out(processor: FoldProcessor, data: Timeframe, control: Timeframe) -> str | None:
    """A block inside the timeframes that waits for one outside them, though that one is here."""
    cursors = processor.orderer.cursors
    for feed, at in (*data.entries.items(), *control.entries.items()):
        cursor = cursors.get(feed)
        if cursor is None or cursor.length > at.seq or cursor.waits_for is None:
            continue
        cause, seq = cursor.waits_for
        known = cursors.get(cause)
        if known is None or seq < max(data.length(cause), control.length(cause)):
            continue
        feeds = processor.feeds_of(known.kind)
        if feeds.has_feed(known.key) and feeds.length(known.key) > seq:
            return f"it names block {cursor.length} of feed {feed.hex()} and not its cause, {seq} of {cause.hex()}"
    return None


def _encoded(
    processor: FoldProcessor, items: Iterable[ItemId], blobs: dict[Cid, bytes]
) -> Iterator[tuple[ItemId, EncodedItem]]:
    for item in items:
        record = processor.state.record(item)
        if record is not None:
            yield item, encode_item(encode_record(record), blobs.__setitem__)


@dataclass(frozen=True, slots=True)
class _ChangedPlaces:
    """Placements that came and went since an earlier epoch."""

    came: frozenset[Placement]
    went: frozenset[Placement]


def _placements(processor: FoldProcessor, changed: _ChangedPlaces | None, blobs: dict[Cid, bytes]) -> Cid:
    """The top of the placement tree: over that of the base, where it has one here, else of all items."""
    base = processor.base
    if base is not None and changed is not None and base.placements is not None:
        over = _PlacesOver(base.placements, changed)
        try:
            return update_placements(over, changed.came | changed.went, over.placements_under, blobs.__setitem__).cid
        except Corrupt:
            pass  # blobs of it are lost, and the items say the same
    found = {
        each
        for record in processor.state.records.values()
        for each in placements_of(record.item, record.genesis.parent, record.genesis.inception_key)
    }
    if base is not None and changed is not None:
        for _, state in base.reader.items():
            found.update(state_placements(state))
        found = (found | changed.came) - changed.went
    return build_placements(found, blobs.__setitem__).cid


class _PlacesOver:
    """The nodes of an earlier placement tree, with what came and went since."""

    def __init__(self, reader: PlacementReader, changed: _ChangedPlaces) -> None:
        self._nodes = _NodesOver(reader)
        self._came, self._went = SortedPlacements(changed.came), changed.went
        self.node, self.branches = self._nodes.node, self._nodes.branches
        self.keep, self.forget = self._nodes.keep, self._nodes.forget

    def placements_under(self, path: str) -> list[Placement]:
        pages = self._nodes.pages(path)
        found = [each for _, page in pages for each in page.placements if each not in self._went]
        return [*found, *self._came.under(path)]


class _TreeOver:
    """The nodes of an earlier tree, and its items with those that changed since in their places."""

    def __init__(
        self, reader: TreeReader, nodes: "_NodesOver[Page]", processor: FoldProcessor, blobs: dict[Cid, bytes]
    ) -> None:
        self._reader = reader
        self._processor = processor
        self._blobs = blobs
        keyed = sorted((item_key(item), item) for item in {*processor.state.dirty, *processor.state.gone})
        self._keys = [key for key, _ in keyed]
        self._changed = [item for _, item in keyed]
        self._nodes = nodes
        self.node, self.branches = self._nodes.node, self._nodes.branches
        self.keep, self.forget = self._nodes.keep, self._nodes.forget

    def items_under(self, path: str) -> list[tuple[ItemId, EncodedItem]]:
        found: dict[ItemId, EncodedItem] = {}
        for at, page in self._nodes.pages(path):
            for entry, state in self._reader.page_items(page, at):
                found[entry.item] = EncodedItem(
                    state.SerializeToString(deterministic=True) if entry.large else bytes(entry.data)
                )
        first, last = key_bounds(path)
        changed = self._changed[bisect_left(self._keys, first) : bisect_right(self._keys, last)]
        for item in changed:
            found.pop(item, None)
        found.update(_encoded(self._processor, changed, self._blobs))
        return list(found.items())

    def changed_places(self) -> _ChangedPlaces:
        """Where items stand that came or went. The pages that have them were read for the update."""
        came: set[Placement] = set()
        went: set[Placement] = set()
        for key, item in zip(self._keys, self._changed, strict=True):
            page = self._nodes.page_of(key)
            states = self._reader.page_items(page[1], page[0], item) if page is not None else ()
            before = {each for _, state in states for each in state_placements(state)}
            record = self._processor.state.record(item)
            genesis = record.genesis if record is not None else None
            after = set(placements_of(item, genesis.parent, genesis.inception_key)) if genesis is not None else set()
            came |= after - before
            went |= before - after
        return _ChangedPlaces(frozenset(came), frozenset(went))


class _NodesOver(Generic[P]):
    """The nodes of an earlier tree, each read once: what an update sees of it."""

    def __init__(self, reader: NodeReader[P]) -> None:
        self._reader: NodeReader[P] = reader
        self._seen: dict[str, tuple[TreeTop, P | IndexNode] | None] = {}

    def node(self, path: str) -> TreeTop | None:
        found = self._at(path)
        return found[0] if found else None

    def branches(self, path: str) -> list[tuple[str, TreeTop]]:
        found = self._at(path)
        return list(found[1].branches) if found and isinstance(found[1], IndexNode) else []

    def keep(self, path: str, top: TreeTop) -> None:
        """Nobody updates this tree again."""

    def forget(self, path: str) -> None:
        """As above."""

    def pages(self, path: str) -> list[tuple[str, P]]:
        """The pages at or below a path."""
        at = self._at(path)
        if at is None:
            return []
        node = at[1]
        if isinstance(node, IndexNode):
            return [page for label, _ in node.branches for page in self.pages(path + label)]
        return [(path, node)]

    def page_of(self, key: ItemKey) -> tuple[str, P] | None:
        """The page that has a key, if any does."""
        path = ""
        while (at := self._at(path)) is not None:
            node = at[1]
            if not isinstance(node, IndexNode):
                return path, node
            place = node.toward(key, len(path))
            if place is None:
                break
            path += place[0]
        return None

    def _at(self, path: str) -> tuple[TreeTop, P | IndexNode] | None:
        if path not in self._seen:
            self._seen[path] = self._open(path)
        return self._seen[path]

    def _open(self, path: str) -> tuple[TreeTop, P | IndexNode] | None:
        if not path:
            node = self._reader.open_node(self._reader.top, "")
            return TreeTop(self._reader.top, node.count, node.size), node
        above = self._at(path[:-1])
        if above is None or not isinstance(above[1], IndexNode):
            return None
        top = dict(above[1].branches).get(path[-1])
        return None if top is None else (top, self._reader.open_node(top.cid, path, top))


def _models(
    base: BaseEpoch, processor: FoldProcessor, dirty: set[ItemId], top: TreeTop, blobs: dict[Cid, bytes]
) -> set[tuple[str, int]]:
    """The models in use. One can only fall out of use with an item, and then items are asked until one still has it."""
    records = {item: processor.state.record(item) for item in dirty}
    written = {(each.genesis.model, each.genesis.version) for each in records.values() if each is not None}
    went = base.reader.some(item for item, record in records.items() if record is None)
    sought = {(state.model, state.version) for state in went.values()} - written
    if sought:
        reader = TreeReader(top.cid, lambda cid: blobs.get(cid) or base.blob(cid))
        for _, state in reader.items():
            sought.discard((state.model, state.version))
            if not sought:
                break
    return ({(model, version) for model, version in base.root.models} - sought) | written


def _rooted(
    processor: FoldProcessor,
    top: TreeTop,
    placed: Cid | None,
    models: set[tuple[str, int]],
    blobs: dict[Cid, bytes],
) -> Folded:
    moves: Any = encode_moves(processor.state.tree.moves, blobs.__setitem__)
    membership = membership_blobs(membership_state(processor.membership.machine))
    moves_cid = cid_of(moves, PROTOBUF)
    blobs.update({moves_cid: moves, **membership})
    cid, data = state_root_bytes(
        party=processor.party,
        timeframe=[
            RootEntry(processor.feed_key(feed), at.seq, at.link) for feed, at in processor.timeframe.entries.items()
        ],
        admission_digest=processor.admission.digest,
        base_epoch=base_mark(processor.base),
        models=[ModelVersion(model, version) for model, version in models],
        item_count=top.count,
        membership_root=next(iter(membership)),
        index_root=top.cid,
        tree=moves_cid,
        placements=placed,
    )
    blobs[cid] = data
    root = read_state_root(data)
    cut = encode_cut(cuts_at(processor, root), blobs.__setitem__)
    return Folded(cid, root, cut, blobs, processor.counters.delivered)
