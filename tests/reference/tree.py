"""The embedding tree, slowly: sort all moves, replay them from the first parents, and look for cycles by trying.

A move is tried on a copy of the whole graph; if any item can then reach itself upwards, the move is void. Nothing is
kept from one call to the next.
"""

from collections.abc import Iterable

from echostore.kernel.ids import ItemId, Stamp
from echostore.kernel.items.tree import EMBED, MOVE, TreeMove

Homes = dict[ItemId, ItemId | None]
Edges = frozenset[tuple[ItemId, ItemId | None]]


def replay(first: Homes, moves: Iterable[TreeMove]) -> tuple[Homes, Edges, set[Stamp]]:
    """The home of every item, the further embeddings as (item, parent), and the stamps of the void moves."""
    homes, embedded = dict(first), frozenset[tuple[ItemId, ItemId | None]]()
    void: set[Stamp] = set()
    for move in sorted(moves, key=lambda move: move.stamp):
        tried, edges = dict(homes), embedded
        if move.kind == MOVE:
            tried[move.item] = move.parent
        elif move.kind == EMBED:
            edges = embedded | {(move.item, move.parent)}
        else:
            edges = embedded - {(move.item, move.parent)}
        if has_cycle(tried, edges):
            void.add(move.stamp)
        else:
            homes, embedded = tried, edges
    return homes, embedded, void


def has_cycle(homes: Homes, embedded: Edges) -> bool:
    above: dict[ItemId, set[ItemId]] = {item: {parent} for item, parent in homes.items() if parent is not None}
    for item, parent in embedded:
        if parent is not None:
            above.setdefault(item, set()).add(parent)
    # Whatever has nothing above it can't be on a cycle; take it away until nothing changes.
    while True:
        ends = {parent for parents in above.values() for parent in parents} - above.keys()
        bare = {item for item, parents in above.items() if not parents}
        if not ends and not bare:
            return bool(above)
        above = {item: parents - ends - bare for item, parents in above.items() if item not in bare}
