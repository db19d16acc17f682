"""The placement tree: what hangs where by the genesis of every item, so that one view is read without all the others.

    build_placements            all placements -> nodes
    update_placements_below     those that came or went -> the nodes above them
    PlacementReader             what hangs at one place, all of them, what is wrong

It is an item tree with other pages: shape, index nodes and the checks of a reader are `echostore.wire.tree`'s and
`echostore.wire.tree_reader`'s. A placement counts for its 32 bytes; what a page has around them counts nowhere, so that
sizes add up over the branches.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.snapshot import (
    PLACEMENT_BYTES,
    Path,
    Placement,
    TreeTop,
    item_key,
    key_bounds,
    place_path,
    placed,
    placement_key,
    placements_of,
)
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.snapshot import Put
from echostore.wire.tree import Entries, Kind, NodeCache, Part, grow, renew
from echostore.wire.tree_nodes import PlacementPage, parse_placement_node, placement_page_bytes
from echostore.wire.tree_reader import NodeReader

PlacementsUnder = Callable[[Path], Iterable[Placement]]
"""All placements below a path as they are now, in any order."""


def _size(placement: Placement) -> int:
    assert len(placement) == PLACEMENT_BYTES, f"a placement of {len(placement)} bytes"
    return PLACEMENT_BYTES


def _page(placements: list[Placement], size: int, put: Put) -> bytes:
    return placement_page_bytes(placements)


PLACEMENTS = Kind(placement_key, _size, _page)


def build_placements(
    placements: Iterable[Placement], put: Put, *, cache: NodeCache | None = None, path: Path = ""
) -> TreeTop:
    """The tree of all these placements, or the subtree at `path`; `cache` is filled for later updates."""
    return grow(Entries.of(PLACEMENTS, placements, path), put, cache=cache, path=path)


def update_placements_below(
    cache: NodeCache, dirty: Iterable[Placement], placements_under: PlacementsUnder, put: Put, *, path: Path
) -> TreeTop | None:
    """The subtree at `path` after the placements `dirty` came or went; None when none is left, and there is a path."""

    def parts_under(below: Path) -> Part:
        return placement_part(placements_under(below), below)

    return renew(cache, sorted(map(placement_key, dirty)), parts_under, put, path=path)


def update_placements(
    cache: NodeCache, dirty: Iterable[Placement], placements_under: PlacementsUnder, put: Put
) -> TreeTop:
    """The whole tree after the placements `dirty` came or went."""
    top = update_placements_below(cache, dirty, placements_under, put, path="")
    assert top is not None, "there is always a top"
    return top


def placement_part(placements: Iterable[Placement], path: Path) -> Part:
    """Placements that have no node yet, to be joined with others."""
    return Part.holding(Entries.of(PLACEMENTS, placements, path))


class SortedPlacements:
    """Placements by their keys: an update asks for those below a path, again and again."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        keyed = sorted((placement_key(each), each) for each in placements)
        self._keys = [key for key, _ in keyed]
        self._placements = [each for _, each in keyed]

    def under(self, path: Path) -> list[Placement]:
        first, last = key_bounds(path)
        start = bisect_left(self._keys, first)
        return self._placements[start : bisect_right(self._keys, last, start)]


def state_placements(state: pb.ItemState) -> tuple[Placement, ...]:
    """Where an item stands, by its state in a snapshot."""
    return placements_of(ItemId(state.item), ItemId(state.parent) if state.parent else None, state.inception_key)


class PlacementReader(NodeReader[PlacementPage]):
    """The placement tree with this top. Every method raises BadBlob or MissingBlob for what it can't trust."""

    _tree = "placement tree"
    _parse = staticmethod(parse_placement_node)

    def at(self, place: ItemId) -> list[ItemId]:
        """The items that hang at a place, ascending by their keys; reads the nodes that have them and those above."""
        return self.at_each([place])[place]

    def at_each(self, places: Iterable[ItemId]) -> dict[ItemId, list[ItemId]]:
        """The same for several places at a time: nodes that they share are read once."""
        found: dict[ItemId, list[ItemId]] = {place: [] for place in places}
        for _, page in self.pages_toward({place_path(place) for place in found}) if found else ():
            for place, item in map(placed, page.placements):
                if place in found:
                    found[place].append(item)
        return {place: sorted(items, key=item_key) for place, items in found.items()}

    def all(self) -> Iterator[Placement]:
        """All placements, ascending by their keys."""
        for _, _, node in self._walk():
            if isinstance(node, PlacementPage):
                yield from node.placements

    def reachable(self) -> Iterator[Cid]:
        """Every CID of the tree once, a name before what it leads to."""
        for _, cid, _ in self._walk():
            yield cid
