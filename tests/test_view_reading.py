"""A view read by its placements is the view read out of everything, and takes only the blobs that lead to it."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel import snapshot as shape
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, FeedId, ItemId, PartyKey, Stamp, created_item_id
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED, Tree, TreeMove
from echostore.kernel.snapshot import Placement, StateRoot, placed
from echostore.peer.early_reading import Toward
from echostore.peer.view_reading import LeftOut, nothing_left_out, view_among, view_states
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import encode_moves
from echostore.wire.placements import PlacementReader, build_placements, state_placements
from echostore.wire.snapshot import encode_item, read_state_root, state_root_bytes, unplaced_root
from echostore.wire.tree import build
from echostore.wire.tree_reader import TreeReader

FEED = FeedId(b"feed-one")


def item_at(number: int) -> ItemId:
    return created_item_id(FEED, number, 0)


def key_at(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def state_at(number: int, parent: int | None, *, view: bool = False, content: bytes = b"") -> pb.ItemState:
    return pb.ItemState(
        item=item_at(number),
        model="property-set",
        version=1,
        parent=b"" if parent is None else item_at(parent),
        inception_key=key_at(number) if view else b"",
        state=content,
    )


@dataclass
class Made:
    """A snapshot as blobs, and what is in it."""

    root: StateRoot
    blobs: dict[Cid, bytes]
    states: dict[ItemId, pb.ItemState]
    moves: list[TreeMove]

    def get(self, cid: Cid) -> bytes:
        return self.blobs[cid]


def made(
    states: Iterable[pb.ItemState],
    moves: Iterable[TreeMove] = (),
    lie: Callable[[set[Placement]], object] = lambda placements: None,
) -> Made:
    blobs: dict[Cid, bytes] = {}
    put = blobs.__setitem__
    kept = {ItemId(state.item): state for state in states}
    top = build([(item, encode_item(state, put)) for item, state in kept.items()], put)
    placements = {each for state in kept.values() for each in state_placements(state)}
    lie(placements)
    places = build_placements(placements, put)
    ordered = sorted(moves)
    data = encode_moves(ordered, put)
    put(cid_of(data, PROTOBUF), data)
    cid, root = state_root_bytes(
        party=PartyKey(bytes(32)),
        timeframe=[],
        admission_digest=bytes(32),
        base_epoch=None,
        models=[],
        item_count=top.count,
        membership_root=cid_of(b"members", PROTOBUF),
        index_root=top.cid,
        tree=cid_of(data, PROTOBUF),
        placements=places.cid,
    )
    blobs[cid] = root
    in_order = dict(TreeReader(top.cid, blobs.get).items())
    return Made(read_state_root(root), blobs, in_order, ordered)


# Random stories: parents that came before, explicit moves and embeddings in any order, items that an epoch left out.

ITEMS = 14
numbers = st.integers(0, ITEMS - 1)
stories = st.tuples(
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=ITEMS, max_size=ITEMS),
    st.lists(st.tuples(numbers, st.sampled_from([MOVE, MOVE, EMBED, UNEMBED]), st.none() | numbers), max_size=12),
    st.sets(numbers, max_size=6),
)


def told(story: tuple[list[tuple[int, bool]], list[tuple[int, int, int | None]], set[int]]) -> Made:
    born, acts, discarded = story
    states = []
    for number, (parent, view) in enumerate(born):
        if number not in discarded:
            states.append(state_at(number, parent % number if number and parent < 50 else None, view=view))
    moves = [
        TreeMove(Stamp(at, FEED, at, 0), item_at(item), kind, None if parent is None else item_at(parent))
        for at, (item, kind, parent) in enumerate(acts)
    ]
    return made(states, moves)


@given(stories)
def test_a_view_is_the_one_that_all_items_give(story: tuple[list, list, set]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "PAGE_ITEMS_MAX", 2)
        snapshot = told(story)
        older = read_state_root(unplaced_root(snapshot.root)[1])
        for number in range(ITEMS):
            name = item_at(number) if number % 3 else key_at(number)
            expected = view_among(snapshot.states, snapshot.moves, name)
            found = view_states(snapshot.root, snapshot.get, name)
            assert found == expected
            assert found is None or next(iter(found)) == next(iter(expected or {}))
        assert view_states(older, snapshot.get, name) == expected


def both(
    snapshot: Made, name: ItemId | bytes, left_out: LeftOut = nothing_left_out
) -> dict[ItemId, pb.ItemState] | None:
    """Read by the index, and out of everything."""
    found = view_states(snapshot.root, snapshot.get, name, left_out=left_out)
    older = read_state_root(unplaced_root(snapshot.root)[1])
    assert found == view_states(older, snapshot.get, name, left_out=left_out)
    return found


def test_the_first_of_views_with_one_key_is_the_one() -> None:
    """A member can write the genesis of a view once more; its id and the hash of that must not help it."""
    for first in range(6):
        states = [state_at(number, None, view=True) for number in range(6)]
        for number, state in enumerate(states):
            state.inception_key, state.genesis_depth = key_at(9), 2 if number == first else 5
        copy = state_at(7, None, view=True)
        copy.inception_key, copy.genesis_depth, copy.model = key_at(9), 1, "text"
        found = both(made([*states, copy, state_at(10, first)]), key_at(9))
        assert found is not None
        assert list(found) == [item_at(first), item_at(10)]


def test_what_is_left_out_takes_along_what_hangs_below_it() -> None:
    states = [state_at(0, None, view=True), state_at(1, 0), state_at(2, 1), state_at(3, 0), state_at(4, 1)]
    moves = [TreeMove(Stamp(1, FEED, 1, 0), item_at(4), EMBED, item_at(3))]
    snapshot = made(states, moves)
    found = both(snapshot, key_at(0), lambda state: state.item == item_at(1))
    assert found is not None
    assert set(found) == {item_at(0), item_at(3), item_at(4)}
    assert both(snapshot, key_at(0), lambda state: state.item == item_at(0)) is None
    assert both(snapshot, item_at(0), lambda state: True) == {item_at(0): states[0]}


def test_a_cycle_that_was_refused_takes_nothing_along() -> None:
    """Concurrent moves of two items below each other: the second in order is void, wherever the view is."""
    moves = [
        TreeMove(Stamp(1, FEED, 1, 0), item_at(1), MOVE, item_at(2)),
        TreeMove(Stamp(2, FEED, 2, 0), item_at(2), MOVE, item_at(1)),
    ]
    snapshot = made([state_at(0, None), state_at(1, 0), state_at(2, 0)], moves)
    found = view_states(snapshot.root, snapshot.get, item_at(0))
    assert found is not None
    assert set(found) == {item_at(0), item_at(1), item_at(2)}
    below = view_states(snapshot.root, snapshot.get, item_at(1))
    assert below is not None
    assert set(below) == {item_at(1)}


def test_a_replay_asks_for_no_first_parent_of_what_is_moved() -> None:
    """A party that moves much has few places and many moved items: only of the places it must be known where they hang."""
    asked: list[ItemId] = []

    def first_parent(item: ItemId) -> ItemId | None:
        asked.append(item)
        return None

    moves = [TreeMove(Stamp(n, FEED, n, 0), item_at(100 + n), MOVE, item_at(n % 3)) for n in range(50)]
    tree = Tree(first_parent, moves)
    assert set(asked) == {item_at(0), item_at(1), item_at(2)}
    assert tree.moved == {item_at(100 + n): item_at(n % 3) for n in range(50)}


# What is fetched.


def party_of_views(views: int, items: int, moves: Iterable[TreeMove] = ()) -> Made:
    """So many views, with items below boards in them."""
    chance = random.Random(5)
    states = [state_at(number, None, view=True) for number in range(views)]
    states += [state_at(views + number, number, content=chance.randbytes(30)) for number in range(views)]
    for number in range(items):
        states.append(state_at(2 * views + number, views + number % views, content=chance.randbytes(60)))
    return made(states, moves)


class Elsewhere:
    """Blobs that have to be fetched: what came, and in how many rounds."""

    def __init__(self, snapshot: Made) -> None:
        self._there = snapshot.blobs
        self.here: dict[Cid, bytes] = {snapshot.root.tree: snapshot.blobs[snapshot.root.tree]}
        self.rounds = 0

    def ahead(self, reader: TreeReader | PlacementReader, prefixes: Iterable[str]) -> None:
        walk = Toward(reader, prefixes)
        waiting = [reader.top]
        while waiting:
            self.rounds += any(cid not in self.here for cid in waiting)
            self.here.update((cid, self._there[cid]) for cid in waiting)
            waiting = [below for cid in waiting for below in walk.below(cid, self.here[cid])]
        assert not walk.chunks

    def get(self, cid: Cid) -> bytes:
        assert cid in self.here, "everything was fetched ahead, together with its neighbours"
        return self.here[cid]


def test_a_view_takes_the_blobs_that_lead_to_it_in_few_rounds() -> None:
    snapshot = party_of_views(100, 8000)
    elsewhere = Elsewhere(snapshot)
    found = view_states(snapshot.root, elsewhere.get, key_at(7), elsewhere.ahead)
    assert found is not None
    assert len(found) == 82
    whole = sum(map(len, snapshot.blobs.values()))
    assert sum(map(len, elsewhere.here.values())) < whole / 2, "its items are all over the tree"
    assert elsewhere.rounds <= 15
    # A small view of the same party: a few pages of hundreds.
    small = made([*snapshot.states.values(), state_at(20_000, None, view=True), state_at(20_001, 20_000)])
    elsewhere = Elsewhere(small)
    found = view_states(small.root, elsewhere.get, key_at(20_000), elsewhere.ahead)
    assert found is not None
    assert list(found) == [item_at(20_000), item_at(20_001)]
    assert len(elsewhere.here) < len(small.blobs) / 20


def test_where_moves_point_is_fetched_together() -> None:
    """A thousand moves below fifty boards: their places are asked for in one go, level by level."""
    moves = [TreeMove(Stamp(n, FEED, n, 0), item_at(200 + n), MOVE, item_at(100 + n % 50)) for n in range(1000)]
    snapshot = party_of_views(100, 2000, moves)
    elsewhere = Elsewhere(snapshot)
    found = view_states(snapshot.root, elsewhere.get, item_at(3), elsewhere.ahead)
    assert found == view_among(snapshot.states, snapshot.moves, item_at(3))
    assert elsewhere.rounds <= 15


def test_a_node_that_is_named_twice_leads_nowhere_twice() -> None:
    snapshot = party_of_views(2, 2)
    walk = Toward(TreeReader(snapshot.root.index_root, snapshot.get), [""])
    data = snapshot.blobs[snapshot.root.index_root]
    walk.below(snapshot.root.index_root, data)
    assert walk.below(snapshot.root.index_root, data) == []


# Lies.


@pytest.mark.parametrize("lie", ["elsewhere", "absent", "another's key"])
def test_an_index_that_claims_what_items_do_not_say_is_refused(lie: str) -> None:
    wrong = {
        "elsewhere": item_at(0) + item_at(3),
        "absent": item_at(0) + item_at(9),
        "another's key": shape.view_place(key_at(0)) + item_at(3),
    }[lie]
    states = [state_at(0, None, view=True), state_at(1, 0), state_at(2, None, view=True), state_at(3, 2)]
    snapshot = made(states, lie=lambda placements: placements.add(Placement(wrong)))
    with pytest.raises(Corrupt, match="where it does not stand"):
        view_states(snapshot.root, snapshot.get, key_at(0))
    found = view_states(snapshot.root, snapshot.get, item_at(2))
    assert found is not None, "what it says of other places is right"
    assert set(found) == {item_at(2), item_at(3)}


def test_foreign_placements_beside_a_place_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places whose keys begin alike stand together in the tree."""
    monkeypatch.setattr(shape, "PLACE_NIBBLES", 0)
    snapshot = made([state_at(0, None, view=True), state_at(1, 0), state_at(2, None, view=True), state_at(3, 2)])
    found = view_states(snapshot.root, snapshot.get, key_at(0))
    assert found is not None
    assert set(found) == {item_at(0), item_at(1)}
    places = PlacementReader(snapshot.root.placements or Cid(b""), snapshot.get)
    assert len({place for place, _ in map(placed, places.all())}) == 4
