"""The tree reducer against replaying everything: cycles, late moves, batches, and moves that are taken out again."""

import random
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.ids import Cid, FeedId, ItemId, Stamp, item_id
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED, Tree, TreeMove
from echostore.wire.items import decode_moves, encode_moves
from reference.tree import Homes, has_cycle, replay

FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(3)]
ITEMS = [item_id(FEEDS[0], number) for number in range(7)]
a, b, c, d, e, f, g = ITEMS
SEEDS = st.integers(0, 2**32)


def first_parents(chance: random.Random) -> Homes:
    """A forest: an item is created below an older one or below the system item."""
    return {item: chance.choice([None, *ITEMS[:number]]) for number, item in enumerate(ITEMS)}


def random_moves(chance: random.Random, count: int, *, start_seq: int = 0) -> list[TreeMove]:
    """Stamps in canonical order, several of one message among them."""
    moves = []
    for number in range(count):
        stamp = Stamp(1 + number // 3, FEEDS[number % 3], start_seq + number, chance.randrange(2))
        kind = chance.choices([MOVE, EMBED, UNEMBED], [6, 3, 2])[0]
        moves.append(TreeMove(stamp, chance.choice(ITEMS), kind, chance.choice([None, *ITEMS])))
    return moves


def shape(tree: Tree) -> tuple[Homes, set[tuple[ItemId, ItemId | None]], set[Stamp]]:
    homes = {item: tree.home(item) for item in ITEMS}
    return homes, {(item, parent) for item in ITEMS for parent in tree.embeddings(item)}, set(tree.void)


def assert_same(tree: Tree, first: Homes, moves: list[TreeMove]) -> None:
    homes, embedded, void = replay(first, moves)
    assert shape(tree) == (homes, set(embedded), void)
    assert not has_cycle(homes, embedded)
    assert tree.moves == sorted(moves)
    for parent in [None, *ITEMS]:
        assert tree.guests(parent) == {item for item, above in embedded if above == parent}


def changed_between(before: tuple[Homes, set[tuple[ItemId, ItemId | None]], set[Stamp]], tree: Tree) -> set[ItemId]:
    """Items whose place is another one now."""
    homes, embedded, _ = shape(tree)
    moved = {item for item in ITEMS if homes[item] != before[0][item]}
    return moved | {item for item, _ in embedded ^ before[1]}


@given(SEEDS, st.integers(0, 30))
def test_any_arrival_order_gives_the_tree_of_the_canonical_order(seed: int, count: int) -> None:
    chance = random.Random(seed)
    first, moves = first_parents(chance), random_moves(chance, count)
    arrival = list(moves)
    chance.shuffle(arrival)
    tree = Tree(first.get)
    for number, move in enumerate(arrival):
        before = shape(tree)
        touched = tree.apply(move)
        assert changed_between(before, tree) <= touched
        assert_same(tree, first, arrival[: number + 1])


@given(SEEDS, st.integers(1, 40))
def test_batches_equal_single_moves(seed: int, count: int) -> None:
    chance = random.Random(seed)
    first, moves = first_parents(chance), random_moves(chance, count)
    chance.shuffle(moves)
    tree = Tree(first.get)
    done = 0
    while done < count:
        size = chance.randrange(1, 8)
        before = shape(tree)
        touched = tree.apply_all(moves[done : done + size])
        assert changed_between(before, tree) <= touched
        done += size
    assert_same(tree, first, moves)
    assert shape(Tree(first.get, moves)) == shape(tree)


@given(SEEDS, st.integers(1, 30), st.integers(1, 4))
def test_taking_items_out_equals_never_having_moved_them(seed: int, count: int, out: int) -> None:
    chance = random.Random(seed)
    first, moves = first_parents(chance), random_moves(chance, count)
    gone = frozenset(chance.sample(ITEMS, out))
    tree = Tree(first.get, moves)
    before = shape(tree)
    touched = tree.without(gone)
    assert changed_between(before, tree) <= touched
    kept = [move for move in moves if move.item not in gone]
    assert_same(tree, first, kept)
    again = [move for move in moves if move.item in gone]
    chance.shuffle(again)
    tree.apply_all(again)
    assert shape(tree) == before


@settings(max_examples=50)
@given(SEEDS, st.integers(0, 20))
def test_the_moves_are_the_whole_state(seed: int, count: int) -> None:
    chance = random.Random(seed)
    first, moves = first_parents(chance), random_moves(chance, count)
    tree = Tree(first.get, moves)
    blobs: dict[Cid, bytes] = {}
    data = encode_moves(tree.moves, blobs.__setitem__)
    loaded = Tree(first.get, decode_moves(data, blobs.__getitem__))
    assert shape(loaded) == shape(tree)
    assert encode_moves(loaded.moves, blobs.__setitem__) == data
    late = random_moves(chance, 5, start_seq=100)
    assert loaded.apply_all(late) == tree.apply_all(late)
    assert shape(loaded) == shape(tree)


def move(depth: int, item: ItemId, parent: ItemId | None, kind: int = MOVE) -> TreeMove:
    return TreeMove(Stamp(depth, FEEDS[0], depth, 0), item, kind, parent)


def test_of_two_moves_below_each_other_the_later_one_is_void_in_either_order() -> None:
    moves = [move(1, b, a), move(2, a, b)]
    for arrival in permutations(moves):
        tree = Tree({}.get)
        for one in arrival:
            tree.apply(one)
        assert (tree.home(a), tree.home(b)) == (None, a)
        assert tree.void == {moves[1].stamp}


def test_a_late_move_revives_one_that_was_void() -> None:
    tree = Tree({}.get, [move(1, b, a), move(3, a, b)])
    assert tree.home(a) is None
    touched = tree.apply(move(2, b, c))
    assert (tree.home(a), tree.home(b)) == (b, c)
    assert not tree.void
    assert touched == {a, b, c}


def test_a_late_move_voids_one_that_was_valid() -> None:
    tree = Tree({}.get, [move(2, a, b)])
    assert tree.home(a) == b
    touched = tree.apply(move(1, b, a))
    assert (tree.home(a), tree.home(b)) == (None, a)
    assert tree.void == {move(2, a, b).stamp}
    assert touched == {a, b}


def test_an_item_can_not_hang_below_itself_or_below_what_it_is_embedded_in() -> None:
    tree = Tree({c: b}.get)
    assert tree.forms_cycle(a, a)
    tree.apply(move(1, b, a, EMBED))
    assert tree.forms_cycle(a, c)  # c hangs below b, and b is embedded in a
    assert not tree.forms_cycle(c, a)
    assert not tree.forms_cycle(a, None)
    tree.apply(move(2, b, a, UNEMBED))
    assert not tree.forms_cycle(a, c)


def test_embedding_leaves_the_home_and_unembedding_what_is_not_embedded_does_nothing() -> None:
    tree = Tree({b: a}.get)
    tree.apply_all([move(1, b, c, EMBED), move(2, b, None, EMBED), move(3, b, d, UNEMBED), move(4, b, a, UNEMBED)])
    assert tree.home(b) == a
    assert tree.embeddings(b) == {c, None}
    assert [tree.guests(parent) for parent in (c, None, d, a)] == [{b}, {b}, set(), set()]


def test_a_chain_as_long_as_the_history_needs_no_recursion() -> None:
    items = [item_id(FEEDS[1], number) for number in range(3000)]
    tree = Tree({}.get)
    tree.apply_all(
        TreeMove(Stamp(number, FEEDS[0], number, 0), items[number], MOVE, items[number - 1])
        for number in range(1, 3000)
        if number % 50
    )
    assert tree.forms_cycle(items[50], items[99])
    assert not tree.forms_cycle(items[99], items[50])
