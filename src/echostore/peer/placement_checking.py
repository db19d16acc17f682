"""Whether the placements of a snapshot are those of its items: what only who has all of it can see.

An index that hides an item, or has one that stands elsewhere, is a lie like any other: who recomputes an epoch finds
another CID. Who has nothing but the snapshot makes the index from its items and compares.
"""

from collections.abc import Callable

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, item_text
from echostore.kernel.snapshot import Placement, StateRoot, placed, placement_key
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.placements import PlacementReader, build_placements, state_placements
from echostore.wire.tree_reader import TreeReader


class FalseIndex(Corrupt):
    """The placements of a snapshot are not those of its items."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the snapshot's index of what hangs where is false: {what}",
            unchanged="Nothing was taken over from it.",
            next_step="Start from another epoch, or from the history.",
        )


def check_items(reader: TreeReader, placements: Cid | None) -> dict[Cid, bytes]:
    """Read every node of an item tree once, and make the placement tree of its items: its blobs.

    BadBlob for a node that can't stand where it does, FalseIndex when `placements` is the top of another tree. Where the
    snapshot has none, nothing is made.
    """
    if placements is None:
        reader.check()
        return {}
    found: list[Placement] = []

    def told(state: pb.ItemState) -> None:
        found.extend(state_placements(state))

    reader.check(told)
    blobs: dict[Cid, bytes] = {}
    top = build_placements(found, blobs.__setitem__)
    if top.cid != placements:
        raise FalseIndex(f"its items have {top.count} places, and it is of others")
    return blobs


def index_problem(root: StateRoot, get: Callable[[Cid], bytes]) -> str:
    """What is wrong with the placements of a snapshot that is here whole; empty when nothing is."""
    try:
        check_items(TreeReader(root.index_root, get), root.placements)
    except FalseIndex as error:
        return error.what
    return ""


def first_misplaced(mine: Cid, theirs: Cid, get: Callable[[Cid], bytes]) -> str:
    """Where two placement trees part, in words."""
    here, there = PlacementReader(mine, get).all(), PlacementReader(theirs, get).all()
    while True:
        right, claimed = next(here, None), next(there, None)
        if right == claimed:
            assert right is not None, "trees with other tops have other placements"
            continue
        first = min((each for each in (right, claimed) if each is not None), key=placement_key)
        how = "not where it stands" if first == right else "where it does not stand"
        return f"another index of places: item {item_text(placed(first)[1])} is {how}"
