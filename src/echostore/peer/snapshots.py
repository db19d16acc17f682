"""Snapshots of a live party: flush, checkpoint, then the tree nodes above what changed since the last one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.kernel.ids import Cid, ItemId, feed_id, item_text
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.snapshot import (
    INLINE_ITEM_BYTES_MAX,
    ModelVersion,
    Placement,
    StateRoot,
    TimeframeEntry,
    TreeTop,
    item_key,
    key_bounds,
    placements_of,
)
from echostore.kernel.timeframe import Position, Timeframe
from echostore.peer.base_damage import notice
from echostore.peer.checkpoints import record_of
from echostore.peer.placement_upkeep import bring_up_to_date
from echostore.peer.view_reading import view_states
from echostore.store.blob_store import BlobStore
from echostore.store.item_store import ItemStore, NodeChanges, TreeRow
from echostore.store.nodes_ahead import AHEAD_ITEMS, NodesAhead
from echostore.wire.base_epoch import base_mark
from echostore.wire.cids import PROTOBUF, cid_from_text, cid_of, cid_text
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import decode_record, encode_moves, encode_record
from echostore.wire.membership import membership_blobs, membership_state
from echostore.wire.placements import build_placements
from echostore.wire.snapshot import EncodedItem, encode_item, read_state_root, state_root_bytes, unplaced_root
from echostore.wire.tree import TreeReader, build, update
from echostore.wire.tree_nodes import WholePage

if TYPE_CHECKING:
    from echostore.peer.runtime import PartyRuntime


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state by content. `cid` is the text form of the state root's CID."""

    cid: str
    root: StateRoot
    root_bytes: bytes
    timeframe: Timeframe
    runtime: "PartyRuntime"
    new_blobs: int
    new_bytes: int
    unsaved: dict[Cid, bytes]
    """The blobs themselves, where there is no store to keep them: of the past and of a read-only party."""

    @property
    def item_count(self) -> int:
        return self.root.item_count

    def reader(self) -> TreeReader:
        """Reads items out of the snapshot, each with the few blobs on its path."""
        return TreeReader(self.root.index_root, self.blob)

    def blob(self, cid: Cid) -> bytes:
        found = self.unsaved.get(cid)
        if found is not None:
            return found
        blobs = self.runtime.blobs
        if blobs is None:
            raise Refused("a snapshot of the past or of a read-only party is not saved; take one of the live party")
        return blobs.get(cid)

    # loading

    def load_item(self, item: ItemId) -> ItemRecord:
        """One item, from the few blobs on its path."""
        reader = self.reader()
        state = reader.item(item)
        if state is None:
            raise NotFound(f"item {item_text(item)[:8]} is not in the snapshot")
        return self._record(reader, state)

    def load(self) -> dict[ItemId, ItemRecord]:
        """Every item."""
        reader = self.reader()
        return {item: self._record(reader, state) for item, state in reader.items()}

    def load_view(self, view: ItemId) -> dict[ItemId, ItemRecord]:
        """An item with its closure: all that hangs below it or is embedded in it, and nothing else is read."""
        reader = self.reader()
        states = view_states(self.root, self.blob, view)
        if states is None:
            raise NotFound(f"item {item_text(view)[:8]} is not in the snapshot")
        return {item: self._record(reader, states[item]) for item in sorted(states)}

    def unplaced(self) -> tuple[Cid, bytes]:
        """The state root as programs wrote it that knew no placements: what their epochs and files name."""
        return unplaced_root(self.root)

    def _record(self, reader: TreeReader, state: pb.ItemState) -> ItemRecord:
        whole = pb.ItemState()
        whole.CopyFrom(state)
        whole.state = reader.state_bytes(state)
        whole.ClearField("state_cids")
        return decode_record(whole.SerializeToString(), self.runtime.processor.factory)


def open_snapshot(runtime: "PartyRuntime", cid: str) -> Snapshot:
    """A snapshot that was saved here before, by its CID."""
    if runtime.blobs is None:
        raise NotFound("this party keeps no snapshots here")
    try:
        wanted = cid_from_text(cid)
    except ValueError as error:
        raise UsageError(f"{cid!r} is not a CID: {error}") from None
    data = runtime.blobs.get(wanted)
    root = read_state_root(data)
    if root.party != runtime.party:
        raise UsageError("the snapshot belongs to another party")
    timeframe = Timeframe.of((feed_id(entry.feed_key), Position(entry.seq, entry.link)) for entry in root.timeframe)
    return Snapshot(cid, root, data, timeframe, runtime, 0, 0, {})


def take_snapshot(runtime: "PartyRuntime") -> Snapshot:
    """The snapshot at the exact timeframe that is processed now."""
    if runtime.in_batch:
        raise Refused("a batch is open", next_step="Take the snapshot after it.")
    blobs: dict[Cid, bytes] = {}
    if runtime.items is None or not runtime.writable or runtime.blobs is None:
        runtime.state.settle()
        items, placements = _all_encoded(runtime, blobs)
        top, placed = build(items, blobs.__setitem__), build_placements(placements, blobs.__setitem__)
        moves = encode_moves(runtime.state.tree.moves, blobs.__setitem__)
        snapshot = _finish(runtime, top, placed, moves, blobs)
        return replace(snapshot, unsaved=blobs, new_bytes=sum(map(len, blobs.values())))
    runtime.checkpoint()
    updated = _update_tree(runtime, runtime.items, runtime.blobs, blobs)
    places = bring_up_to_date(runtime.items, runtime.blobs, blobs)
    moves = runtime.move_chunks.encode(runtime.state.tree, blobs.__setitem__, runtime.blobs.missing)
    snapshot = _finish(runtime, updated.top, places.top, moves, blobs)
    # One durable commit of all blobs, before the nodes that name them.
    missing = runtime.blobs.missing(blobs)
    runtime.blobs.put_many({cid: blobs[cid] for cid in missing})
    runtime.items.save_tree(updated.nodes, updated.encoded.items(), places.nodes)
    return replace(snapshot, new_blobs=len(missing), new_bytes=sum(len(blobs[cid]) for cid in missing))


def _finish(runtime: "PartyRuntime", top: TreeTop, placed: TreeTop, moves: bytes, blobs: dict[Cid, bytes]) -> Snapshot:
    """Add the blobs above the trees."""
    processor = runtime.processor
    membership = membership_blobs(membership_state(processor.membership.machine))
    moves_cid = cid_of(moves, PROTOBUF)
    blobs |= {moves_cid: moves, **membership}
    timeframe = processor.timeframe
    cid, data = state_root_bytes(
        party=runtime.party,
        timeframe=[TimeframeEntry(processor.feed_key(feed), at.seq, at.link) for feed, at in timeframe.entries.items()],
        admission_digest=processor.admission.digest,
        base_epoch=base_mark(processor.base),
        models=[ModelVersion(model, version) for model, version in runtime.models_in_use()],
        item_count=top.count,
        membership_root=next(iter(membership)),
        index_root=top.cid,
        tree=moves_cid,
        placements=placed.cid,
    )
    blobs[cid] = data
    return Snapshot(cid_text(cid), read_state_root(data), data, timeframe, runtime, 0, 0, {})


class _UpdatedTree(NamedTuple):
    """The tree at the state as it is; its nodes are saved after its blobs."""

    top: TreeTop
    nodes: NodeChanges
    encoded: dict[ItemId, EncodedItem]


def _update_tree(runtime: "PartyRuntime", store: ItemStore, kept: BlobStore, blobs: dict[Cid, bytes]) -> _UpdatedTree:
    known = store.node("")
    if known is not None and not kept.has(known.cid):
        if store.lends:
            notice(runtime.processor, "the top of the tree of items is not here")
        if runtime.processor.damage is not None:
            raise runtime.processor.damage.error()
        store.forget_tree()  # the blobs were lost: build all of them again
        known = None
    encoded: dict[ItemId, EncodedItem] = {}
    dirty = store.tree_dirty()
    changed = _Changed(store, dirty if known is not None else [])
    nodes = NodeChanges(store, NodesAhead(kept.get_some, known.cid, changed.keys) if known is not None else None)

    def items_under(path: str) -> Iterable[tuple[ItemId, EncodedItem]]:
        page = nodes.page(path) if known is not None else None
        if page is None:
            return ((ItemId(row.item), _encoded(runtime, row, blobs, encoded)) for row in store.states_under(path))
        # What stands in the page and did not change is there as it is; what changed takes the place that it had.
        below = changed.under(path)
        fresh = {item: _encoded(runtime, row, blobs, encoded) for item, row in below.items() if row is not None}
        in_place = len(fresh) == len(below) and fresh.keys() <= page.keys()
        if in_place and all(len(data) <= INLINE_ITEM_BYTES_MAX for data in fresh.values()):
            return WholePage.of(page | fresh)
        return [*((item, data) for item, data in page.items() if item not in below), *fresh.items()]

    top = update(nodes, dirty, items_under, blobs.__setitem__)
    store.check_count(top.count)
    return _UpdatedTree(top, nodes, encoded)


class _Changed:
    """Items that changed since the tree was last brought up to date, by their keys; rows are read for many at once."""

    def __init__(self, store: ItemStore, items: list[ItemId]) -> None:
        self._store = store
        keyed = sorted((item_key(item), item) for item in items)
        self.keys = [key for key, _ in keyed]
        self._items = [item for _, item in keyed]
        self._read = range(0)
        self._rows: dict[ItemId, TreeRow] = {}

    def under(self, path: str) -> dict[ItemId, TreeRow | None]:
        """Those below a path, with their rows; None for one that is gone."""
        first, last = key_bounds(path)
        start = bisect_left(self.keys, first)
        end = bisect_right(self.keys, last, start)
        if not self._read.start <= start <= end <= self._read.stop:
            self._read = range(start, max(end, start + AHEAD_ITEMS))
            rows = self._store.states_of(self._items[start : self._read.stop])
            self._rows = {ItemId(row.item): row for row in rows}
        return {item: self._rows.get(item) for item in self._items[start:end]}


def _encoded(
    runtime: "PartyRuntime", row: TreeRow, blobs: dict[Cid, bytes], fresh: dict[ItemId, EncodedItem]
) -> EncodedItem:
    """The canonical bytes of an item. Those of models that edit in place are made here and kept for the next time."""
    if row.encoded is not None:
        return EncodedItem(row.encoded)
    if row.native is None:
        state = pb.ItemState.FromString(row.state)
    else:
        record: ItemRecord = runtime.state.records.get(row.item) or record_of(
            row.state, row.native, None, runtime.processor.factory
        )
        state = encode_record(record)
    data = encode_item(state, blobs.__setitem__)
    if data != row.state:
        fresh[ItemId(row.item)] = data
    return data


def _all_encoded(
    runtime: "PartyRuntime", blobs: dict[Cid, bytes]
) -> tuple[list[tuple[ItemId, EncodedItem]], list[Placement]]:
    """All items, and where they stand."""
    found, placements = [], list[Placement]()
    for item in runtime.all_items():
        record = runtime.state.record(item)
        assert record is not None
        found.append((item, encode_item(encode_record(record), blobs.__setitem__)))
        placements += placements_of(item, record.genesis.parent, record.genesis.inception_key)
    return found, placements
