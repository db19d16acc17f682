"""Filling an ItemStore from a base epoch's tree: rows, indexes and tree nodes, in batches of bounded memory.

A store that was filled only in part has no mark of its base; it is cleared and filled again. Models that edit in place
(texts) are not opened for it: their canonical state is stored, and read when somebody touches the item.
"""

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ItemId
from echostore.kernel.items.tree import Tree
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.order import DATA, FeedCursor
from echostore.kernel.snapshot import TreeTop
from echostore.peer.checkpoints import add_record, cursor_rows, item_row, move_rows
from echostore.peer.positions import cursor_at
from echostore.peer.touched import UNREAD_MARK
from echostore.store.item_store import Checkpoint, ItemStore, NodeChanges, StateRow
from echostore.store.placement_rows import PlacementChanges
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.items import decode_record
from echostore.wire.tree_nodes import Page

BATCH_ITEMS = 2048
"""Items of one transaction: a few MiB."""

BASE_MARK = "base"
"""The entry of `about` that names the base whose items are in the store."""

_READ_MODELS = frozenset({PropertySet.name, GrowableArray.name})
"""Models whose values queries look at."""


def install_items(
    items: ItemStore,
    base: BaseEpoch,
    factory: ModelFactory,
    declared: frozenset[str],
    about: dict[str, bytes],
) -> None:
    """Make an ItemStore hold exactly what the base holds. `about` comes with the last transaction.

    It costs what lives. Which held blocks below the cut wrote an item is read when somebody asks (`touched`).
    """
    items.clear()
    moved = {move.item for move in base.moves}
    nodes = NodeChanges(items)
    batch, encoded = _blank(), list[tuple[ItemId, bytes]]()
    for path, cid, node in base.reader.nodes():
        nodes.keep(path, TreeTop(cid, node.count, node.size))
        if not isinstance(node, Page):
            continue
        for entry, state in base.reader.page_items(node, path):
            whole = base.whole_state(state) if entry.large or state.state_cids else entry.data
            record = decode_record(whole, factory, model=None if state.model in _READ_MODELS else _UNREAD)
            # Of items that were moved the parent follows below, once all of them are there.
            row = item_row(None if record.item in moved else record.genesis.parent, record)
            add_record(batch, record, row, StateRow(record.item, whole, None, None), declared)
            if state.state_cids:
                encoded.append((record.item, state.SerializeToString(deterministic=True)))
        if len(batch.items) >= BATCH_ITEMS:
            items.save(batch)
            batch = _blank()
    items.save(batch)
    items.save_tree(nodes, encoded, _placement_nodes(items, base))
    items.set_parents(_homes(items, base, moved))
    last = _blank()
    last.moves = move_rows(base.moves)
    last.cursors = cursor_rows(base_cursors(base))
    last.about = {**about, BASE_MARK: base.name.genesis, UNREAD_MARK: base.name.genesis}
    items.save(last)


def base_cursors(base: BaseEpoch) -> list[FeedCursor]:
    """Where the data feeds of a base stand."""
    return [cursor_at(cut.feed, DATA, cut) for cut in base.cuts.values() if not cut.control]


def _placement_nodes(items: ItemStore, base: BaseEpoch) -> PlacementChanges | None:
    """The nodes of the base's placement tree; None where it has none, or they are lost: a snapshot makes them anew."""
    if base.placements is None:
        return None
    nodes = PlacementChanges(items.placements, anew=True)
    try:
        for path, cid, node in base.placements.nodes():
            nodes.keep(path, TreeTop(cid, node.count, node.size))
    except Corrupt:
        return None
    return nodes


def _homes(items: ItemStore, base: BaseEpoch, moved: set[ItemId]) -> list[tuple[ItemId, ItemId | None]]:
    tree = Tree(items.origin, base.moves)
    return [(item, tree.home(item)) for item in sorted(moved)]


_UNREAD = object()


def _blank() -> Checkpoint:
    return Checkpoint(
        cursors=[],
        items=[],
        states=[],
        gone=[],
        references={},
        properties={},
        touches=[],
        moves=[],
        rejects=[],
        about={},
    )
