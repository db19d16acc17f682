"""The placement tree of a live party, brought up to date with its snapshots.

It costs what came and went since the last one, and nothing where only values changed. Where a page of it was lost, or
there is none yet, all items are asked once.
"""

from collections.abc import Iterator
from typing import NamedTuple

from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import Path, Placement, TreeTop
from echostore.store.blob_store import BlobStore
from echostore.store.item_store import ItemStore
from echostore.store.placement_rows import LostPage, PlacementChanges
from echostore.wire.placements import SortedPlacements, build_placements, update_placements


class UpdatedPlacements(NamedTuple):
    """The tree at the state as it is."""

    top: TreeTop
    nodes: PlacementChanges | None
    """Saved after the blobs; None where nothing changed."""


def bring_up_to_date(store: ItemStore, kept: BlobStore, blobs: dict[Cid, bytes]) -> UpdatedPlacements:
    """The tree of the placements that the store has now; new nodes go to `blobs`."""
    rows = store.placements
    known = rows.node("")
    if known is not None and kept.has(known.cid):
        dirty = rows.dirty()
        if not dirty:
            return UpdatedPlacements(known, None)
        nodes = PlacementChanges(rows, kept.get)
        try:
            return UpdatedPlacements(_update(nodes, dirty, rows.here(dirty), blobs), nodes)
        except LostPage:
            pass  # the items say the same
    nodes = PlacementChanges(rows, anew=True)
    return UpdatedPlacements(build_placements(rows.all(), blobs.__setitem__, cache=nodes), nodes)


def _update(nodes: PlacementChanges, dirty: list[Placement], here: set[Placement], blobs: dict[Cid, bytes]) -> TreeTop:
    came, changed = SortedPlacements(here), frozenset(dirty)

    def under(path: Path) -> Iterator[Placement]:
        yield from (each for each in nodes.placements(path) if each not in changed)
        yield from came.under(path)

    return update_placements(nodes, dirty, under, blobs.__setitem__)
