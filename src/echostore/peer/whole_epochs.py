"""Whether all blobs of an epoch are here, so that it may be stood on, folded from, kept or given to others.

    the base            every blob is looked for once in a process, before anything rests on it
    another epoch       looked at where its trees differ from the base's: it costs what changed in between
    the live trees      looked at where they differ from the base's

Blobs of an epoch come here in parts: pages that explain a dispute, items that are read before the rest has come, a fetch that
was cut short. Its root alone says nothing. What only members have is damage of the base (`base_damage`); placements follow
from the items, and the live trees from items.db where that holds the states itself, so those are made again.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import TreeTop
from echostore.peer.base_damage import missing, notice
from echostore.peer.control_floor import kept_blobs
from echostore.peer.epoch_fetching import Branches, Look, Survey, look_at_tree, survey
from echostore.peer.placement_checking import check_items
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.items import move_chunks
from echostore.wire.membership import membership_names
from echostore.wire.placements import PlacementReader
from echostore.wire.tree_nodes import IndexNode, parse_node, parse_placement_node
from echostore.wire.tree_reader import NodeReader, TreeReader

if TYPE_CHECKING:
    from echostore.peer.runtime import PartyRuntime
    from echostore.store.blob_store import BlobStore


def check_base(runtime: "PartyRuntime", seen: Survey | None = None) -> dict[Cid, bytes]:
    """Raise the damage of a base of which something is lost that only members have. Placements that are gone are made again,
    stored where the party is open to write, and returned. `seen` is what was found of the base just now, without the lock.
    """
    processor, base, blobs = runtime.processor, runtime.processor.base, runtime.blobs
    if processor.damage is not None:
        raise processor.damage.error()
    if base is None or blobs is None:
        return {}
    found = seen if seen is not None else survey(base.name, blobs)
    if found.lost:
        notice(processor, missing(found.lost))
        assert processor.damage is not None, "who stands on an epoch is told what is lost of it"
        raise processor.damage.error()
    made = check_items(base.reader, base.root.placements) if found.unplaced else {}
    gone = {cid: data for cid, data in made.items() if cid not in found.here}
    base.whole = not gone
    if gone and runtime.writable:
        blobs.drop_damaged(gone)
        blobs.put_many(gone)
        base.whole = True
    return gone


def check_live(runtime: "PartyRuntime") -> None:
    """Notice that the trees of live items have holes. Where items.db has the states itself, they are made again at the next
    snapshot; else the base and the blocks above it give them, and the damage of the base is raised until then.
    """
    items, processor = runtime.items, runtime.processor
    if items is None or not runtime.writable:
        return
    nodes, places = _live_holes(runtime)
    if places:
        items.placements.forget()
    if nodes and not items.lends:
        items.forget_tree()
    elif nodes:
        notice(processor, f"at least {nodes} pages of the tree of its items are missing")
        if processor.damage is not None:
            raise processor.damage.error()


def lost_beside(runtime: "PartyRuntime") -> dict[str, int]:
    """Blobs that are missing beside what only members have of the base: how many of what. Nothing is changed."""
    base, blobs = runtime.processor.base, runtime.blobs
    if base is None or blobs is None:
        return {}
    nodes, places = _live_holes(runtime)
    found = {
        "the placements of its epoch": survey(base.name, blobs).unplaced,
        "the trees of its items": nodes + places,
        "what newcomers are given": len(blobs.missing(kept_blobs(runtime.processor, blobs))),
    }
    return {what: count for what, count in found.items() if count}


def _live_holes(runtime: "PartyRuntime") -> tuple[int, int]:
    """How many blobs of the tree of live items are missing or damaged, and of their placements: at least."""
    items, blobs = runtime.items, runtime.blobs
    if items is None or blobs is None:
        return 0, 0
    base = runtime.processor.base
    base = base if base is not None and base.whole else None
    top, placed = items.node(""), items.placements.node("")
    nodes, places = Look(blobs), Look(blobs)
    item_tree, place_tree = _trees(base, blobs)
    tops = [None if each is None else each.cid for each in (top, placed)]
    whole = _sound(nodes, lambda: nodes(look_at_tree(nodes, tops[0], parse_node, item_tree)))
    right = _sound(places, lambda: look_at_tree(places, tops[1], parse_placement_node, place_tree))
    return (0 if whole else max(1, len(nodes.lost))), (0 if right else max(1, len(places.lost)))


def is_whole(runtime: "PartyRuntime", found: BaseEpoch) -> bool:
    """Whether all of an epoch is here, by what it does not share with the base."""
    blobs, root = runtime.blobs, found.root
    assert blobs is not None
    if found.whole or found.name.snapshot == runtime.follower.made:
        found.whole = True
        return True
    base = _whole_base(runtime)
    tops = {None} if base is None else {None, base.root.index_root, base.root.placements}
    look, (item_tree, place_tree) = Look(blobs), _trees(base, blobs)

    def looked() -> None:
        look([*membership_names(root.membership_root, blobs.get), root.tree, *move_chunks(blobs.get(root.tree))])
        if root.index_root not in tops:
            look(look_at_tree(look, root.index_root, parse_node, item_tree))
        if root.placements not in tops:
            look_at_tree(look, root.placements, parse_placement_node, place_tree)

    found.whole = _sound(look, looked)
    return found.whole


def _whole_base(runtime: "PartyRuntime") -> BaseEpoch | None:
    """The base, once nothing of it was found lost; None while something is."""
    base = runtime.processor.base
    if base is None or base.whole:
        return base
    try:
        gone = check_base(runtime)
    except Corrupt:
        return None
    return base if runtime.writable or not gone else None


def _sound(look: Look, looking: Callable[[], object]) -> bool:
    try:
        looking()
    except (NotFound, Corrupt):
        return False
    return not look.lost


def _trees(base: BaseEpoch | None, blobs: "BlobStore") -> tuple[list[Branches], list[Branches]]:
    """What is known to be whole of the items and of their placements. What is missing says nothing about the base."""
    if base is None:
        return [], []
    top = base.root.placements
    places = [] if top is None else [_known(PlacementReader(top, blobs.get))]
    return [_known(TreeReader(base.root.index_root, blobs.get))], places


def _known(reader: NodeReader[Any]) -> Branches:
    """The branches of a tree by the path of their node; each node is read once. Of one that is lost, none are known."""
    nodes: dict[str, IndexNode | None] = {}

    def at(path: str) -> IndexNode | None:
        if path not in nodes:
            above = at(path[:-1]) if path else None
            top = dict(above.branches).get(path[-1]) if above is not None else None
            node = None
            with contextlib.suppress(Corrupt):
                node = None if path and top is None else reader.open_node(top.cid if top else reader.top, path, top)
            nodes[path] = node if isinstance(node, IndexNode) else None
        return nodes[path]

    def branches(path: str) -> list[tuple[str, TreeTop]]:
        node = at(path)
        return [] if node is None else list(node.branches)

    return branches
