"""Reading one view out of a snapshot: the items below it, with the few blobs that lead to them.

    placements     what the genesis of items put at a place       one range of a tree, for each place of the view
    moves          what explicit moves took away and brought      one blob, which is read anyway
    items          the states of what is left                     the pages on their paths

It goes down level by level. What hangs at the places of one level is asked for together, and the items of all levels are
at the end, so that who fetches blobs from elsewhere waits a few times for each level and not for each blob. A snapshot
without placements is read whole.

What an index claims is believed of no item: its own state must say the same. What an index hides is not seen here; who has
the whole snapshot compares (`placement_checking`).

An inception key names one item. Epochs from before that rule may have more under one key: the first in canonical order is
the view, as in a live party (`Party.views`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ITEM_ID_BYTES, Cid, ItemId, item_text
from echostore.kernel.items.tree import Tree, TreeMove
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.snapshot import StateRoot, item_key, place_path, view_place
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import decode_moves
from echostore.wire.placements import PlacementReader, state_placements
from echostore.wire.tree_reader import TreeReader

States = dict[ItemId, pb.ItemState]

Places = dict[ItemId, dict[ItemId, bool]]
"""What stands at each place of a view, in the order of ids, and whether it is embedded there and has its home elsewhere."""

Ahead = Callable[["TreeReader | PlacementReader", Iterable[str]], None]
"""Gets the nodes of a tree that lead to keys beginning with some nibbles, before they are read."""


def nothing_ahead(reader: "TreeReader | PlacementReader", prefixes: Iterable[str]) -> None:
    """For who has all blobs."""


LeftOut = Callable[[pb.ItemState], bool]
"""Says of which items nothing is wanted, nor of what is there because of them alone."""


def nothing_left_out(state: pb.ItemState) -> bool:
    """For who wants all."""
    return False


def view_states(
    root: StateRoot,
    get: Callable[[Cid], bytes],
    name: ItemId | bytes,
    ahead: Ahead = nothing_ahead,
    left_out: LeftOut = nothing_left_out,
    places: Places | None = None,
) -> States | None:
    """A view by its item or its inception key, itself first, with all that hangs below it or is embedded in it.

    None when it is not in the snapshot. One that is left out is found by its item only. `places` is told what stands where.
    """
    moves = decode_moves(get(root.tree), get)
    items = TreeReader(root.index_root, get)
    if root.placements is None:
        ahead(items, [""])
        return view_among(dict(items.items()), moves, name, left_out, places)
    return _ViewReader(items, PlacementReader(root.placements, get), ahead, left_out).read(moves, name, places)


def view_among(
    states: Mapping[ItemId, pb.ItemState],
    moves: Iterable[TreeMove],
    name: ItemId | bytes,
    left_out: LeftOut = nothing_left_out,
    places: Places | None = None,
) -> States | None:
    """The same, of the states of all items."""
    top = _named(states.values(), name, left_out)
    if top is None:
        return None
    tree = Tree({item: _parent(state) for item, state in states.items()}.get, moves)
    below: dict[ItemId | None, list[ItemId]] = {}
    for item in states:
        for parent in (tree.home(item), *tree.embeddings(item)):
            below.setdefault(parent, []).append(item)
    here = {place: [item for item in items if not left_out(states[item])] for place, items in below.items()}
    found = {item: states[item] for item in _closure(top, lambda level: {each: here.get(each, []) for each in level})}
    _tell_places(places, tree, {place: here.get(place, []) for place in found})
    return found


def _tell_places(places: Places | None, tree: Tree, here: Mapping[ItemId, Iterable[ItemId]]) -> None:
    if places is not None:
        places.update(
            {place: {item: tree.home(item) != place for item in sorted(items)} for place, items in here.items()}
        )


def _named(states: Iterable[pb.ItemState], name: ItemId | bytes, left_out: LeftOut) -> ItemId | None:
    """The item with this id, or the first that was made with this inception key."""
    if len(name) == ITEM_ID_BYTES:
        return next((ItemId(state.item) for state in states if state.item == name), None)
    kind = (PropertySet.name, PropertySet.version)
    views = (state for state in states if state.inception_key == name and (state.model, state.version) == kind)
    first = min(views, key=lambda state: (state.genesis_depth, state.item), default=None)
    return None if first is None or left_out(first) else ItemId(first.item)


def _closure(top: ItemId, below: Callable[[list[ItemId]], Mapping[ItemId, Iterable[ItemId]]]) -> Iterator[ItemId]:
    """An item and all below it, level by level."""
    found, level = {top}, [top]
    while level:
        yield from level
        children = below(level)
        level = list(dict.fromkeys(child for place in level for child in children[place] if child not in found))
        found.update(level)


class _ViewReader:
    """Reads one view of a snapshot that has placements."""

    def __init__(self, items: TreeReader, placements: PlacementReader, ahead: Ahead, left_out: LeftOut) -> None:
        self._items, self._placements, self._ahead, self._left_out = items, placements, ahead, left_out
        self._states: dict[ItemId, pb.ItemState | None] = {}
        """What was read so far; None for items that are not in the snapshot."""
        self._claims: list[tuple[ItemId, ItemId]] = []
        """Places and items of the index that were not checked yet."""
        self._here: dict[ItemId, list[ItemId]] = {}
        """What is at the places of the view."""

    def read(self, moves: list[TreeMove], name: ItemId | bytes, places: Places | None) -> States | None:
        top = self._find(name)
        if top is None:
            return None
        self._tree = Tree(self._first_parent, self._with_ancestors(moves))
        self._brought: dict[ItemId, list[ItemId]] = {}
        for item, home in self._tree.moved.items():
            if home is not None:
                self._brought.setdefault(home, []).append(item)
        self._load(_closure(top, self._below))
        self._check()
        found = {item: state for item in _closure(top, self._wanted) if (state := self._states[item]) is not None}
        wanted = self._wanted(list(found))
        _tell_places(places, self._tree, {place: found.keys() & set(items) for place, items in wanted.items()})
        return found

    def _find(self, name: ItemId | bytes) -> ItemId | None:
        if len(name) == ITEM_ID_BYTES:
            candidates = [ItemId(name)]
        else:
            place = view_place(name)
            candidates = self._hanging([place])[place]
        self._load(candidates)
        self._check()
        return _named((state for item in candidates if (state := self._states[item]) is not None), name, self._left_out)

    def _hanging(self, places: list[ItemId]) -> dict[ItemId, list[ItemId]]:
        """What the genesis of items put at each of some places, as the index claims."""
        self._ahead(self._placements, {place_path(place) for place in places})
        found = self._placements.at_each(places)
        self._claims += [(place, item) for place in places for item in found[place]]
        return found

    def _check(self) -> None:
        """Compare what the index claimed with what items say of themselves; all of them are read by then."""
        self._load(item for _, item in self._claims)
        for place, item in self._claims:
            state = self._states[item]
            if state is None or place + item not in state_placements(state):
                raise Corrupt(
                    f"the index of the snapshot has item {item_text(item)} where it does not stand",
                    next_step="Start from another epoch, or from the history.",
                )
        self._claims.clear()

    def _below(self, places: list[ItemId]) -> dict[ItemId, list[ItemId]]:
        """What hangs below each of some places or is embedded there, after all moves."""
        moved = self._tree.moved
        hanging = self._hanging(places)
        came = {place: {*self._brought.get(place, ()), *self._tree.guests(place)} for place in places}
        self._load(item for items in came.values() for item in items)  # an epoch may have left them out
        for place in places:
            stayed = [item for item in hanging[place] if moved.get(item, place) == place]
            others = (item for item in came[place].difference(stayed) if self._states[item] is not None)
            self._here[place] = [*stayed, *sorted(others, key=item_key)]
        return self._here

    def _wanted(self, places: list[ItemId]) -> dict[ItemId, list[ItemId]]:
        """The same once more, all items being read, without what is left out."""
        states = self._states
        return {
            place: [item for item in self._here[place] if (state := states[item]) is None or not self._left_out(state)]
            for place in places
        }

    def _with_ancestors(self, moves: list[TreeMove]) -> list[TreeMove]:
        """The moves; where their targets hang is read first, level by level: a replay asks for it one by one."""
        asked: set[ItemId] = set()
        level = {move.parent for move in moves if move.parent is not None}
        while level:
            asked |= level
            self._load(level)
            parents = {self._first_parent(item) for item in level}
            level = {parent for parent in parents if parent is not None} - asked
        return moves

    def _first_parent(self, item: ItemId) -> ItemId | None:
        self._load([item])
        state = self._states[item]
        return None if state is None else _parent(state)

    def _load(self, items: Iterable[ItemId]) -> None:
        missing = {item for item in items if item not in self._states}
        if missing:
            self._ahead(self._items, {item_key(item) for item in missing})
            found = self._items.some(missing)
            self._states.update((item, found.get(item)) for item in missing)


def _parent(state: pb.ItemState) -> ItemId | None:
    return ItemId(state.parent) if state.parent else None
