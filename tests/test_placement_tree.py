"""The placement tree: equal placements give equal trees, one place is read alone, and nothing wrong goes unnoticed."""

import random
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel import snapshot as shape
from echostore.kernel.errors import Corrupt, TooLarge
from echostore.kernel.ids import Cid, FeedId, ItemId, created_item_id
from echostore.kernel.snapshot import (
    NIBBLES,
    Path,
    Placement,
    TreeTop,
    is_page,
    item_key,
    key_bounds,
    place_path,
    placed,
    placement_key,
    placements_of,
    view_place,
)
from echostore.wire.cids import PROTOBUF, RAW, cid_of
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.placements import (
    PlacementReader,
    SortedPlacements,
    build_placements,
    placement_part,
    state_placements,
    update_placements,
    update_placements_below,
)
from echostore.wire.snapshot import EncodedItem
from echostore.wire.tree import BadBlob, MissingBlob, NodeMap, Part, build, finish, join
from echostore.wire.tree_nodes import MalformedNode, PlacementPage, parse_node, parse_placement_node
from reference.snapshot_tree import SlowPlacements

SMALL = 6
"""Placements of a page here: trees are deep with few of them then."""
Blobs = dict[Cid, bytes]
FEED = FeedId(b"feed-one")
PLACES = [created_item_id(FEED, 0, position) for position in range(5)]


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "PAGE_ITEMS_MAX", SMALL)
        yield


@cache
def crowd() -> tuple[Placement, ...]:
    """Much at the first two places, little at others, and some views."""
    found: list[Placement] = []
    for seq in range(1, 90):
        item = created_item_id(FEED, seq, 0)
        parent = None if seq % 11 == 0 else PLACES[(0, 0, 0, 1, 1, 2, 3)[seq % 7]]
        found += placements_of(item, parent, bytes([seq]) * 32 if seq % 13 == 0 else b"")
    return tuple(found)


def built(placements: Iterable[Placement]) -> tuple[TreeTop, Blobs]:
    blobs: Blobs = {}
    return build_placements(placements, blobs.__setitem__), blobs


def below(placements: Iterable[Placement], path: Path) -> list[Placement]:
    first, last = key_bounds(path)
    return [each for each in placements if first <= placement_key(each) <= last]


some = st.sets(st.sampled_from(crowd()))


# What a placement is.


def test_an_item_stands_below_its_parent_and_under_its_inception_key() -> None:
    item, parent, key = created_item_id(FEED, 7, 0), PLACES[0], b"k" * 32
    under_key = ItemId(sha256(b"echostore/view-place/1" + key).digest()[:16])
    assert view_place(key) == under_key
    assert placements_of(item, None, b"") == ()
    assert placements_of(item, parent, b"") == (parent + item,)
    assert placements_of(item, None, key) == (under_key + item,)
    assert placements_of(item, parent, key) == (parent + item, under_key + item)
    state = pb.ItemState(item=item, model="text", version=1, parent=parent, inception_key=key)
    assert state_placements(state) == placements_of(item, parent, key)
    assert state_placements(pb.ItemState(item=item, model="text", version=1)) == ()


def test_a_key_begins_with_its_place_and_is_of_one_placement() -> None:
    item, place = created_item_id(FEED, 7, 0), PLACES[0]
    placement = Placement(place + item)
    key = placement_key(placement)
    assert len(key) == 64
    assert key[:8] == place_path(place) == item_key(place)[:8]
    assert key[8:] == sha256(placement).hexdigest()[:56]
    assert placed(placement) == (place, item)


def test_two_places_that_begin_alike_keep_their_items_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds an inception key whose place begins as the parent's does neither hides an item nor stops a snapshot."""
    monkeypatch.setattr(shape, "PLACE_NIBBLES", 1)
    item = created_item_id(FEED, 7, 0)
    like = [place for place in (created_item_id(FEED, 9, n) for n in range(99)) if item_key(place)[0] == "a"][:2]
    crowded = [Placement(place + item) for place in like]
    crowded += [Placement(like[0] + created_item_id(FEED, 8, n)) for n in range(20)]
    top, blobs = built(crowded)
    reader = PlacementReader(top.cid, blobs.get)
    assert reader.at(like[1]) == [item]
    assert len(reader.at(like[0])) == 21


# Building.


@given(some)
def test_a_build_is_the_tree_of_the_definition(chosen: set[Placement]) -> None:
    top, blobs = built(chosen)
    slow = SlowPlacements(dict.fromkeys(chosen, pb.ItemState()), page_max=SMALL)
    assert (top.cid, top.count, top.size) == (slow.top, len(chosen), 32 * len(chosen))
    assert blobs == {Cid(cid): slow.blobs[cid] for cid in blobs}


@given(some, st.randoms(use_true_random=False))
def test_the_order_of_the_placements_does_not_matter(chosen: set[Placement], chance: random.Random) -> None:
    shuffled = sorted(chosen)
    chance.shuffle(shuffled)
    assert built(shuffled) == built(sorted(chosen))


@given(some, st.lists(some, max_size=4))
def test_updates_give_the_tree_of_a_build(first: set[Placement], steps: list[set[Placement]]) -> None:
    """Also along any way: what is there counts, never how it came."""
    cache, blobs, now = NodeMap(), {}, set(first)
    build_placements(first, blobs.__setitem__, cache=cache)
    for flipped in steps:
        now ^= flipped
        top = update_placements(cache, flipped, lambda path, now=frozenset(now): below(now, path), blobs.__setitem__)
        fresh, nodes = built(now), NodeMap()
        build_placements(now, lambda cid, blob: None, cache=nodes)
        assert top == fresh[0]
        assert cache.nodes == nodes.nodes
        assert fresh[1].items() <= blobs.items()


@given(some)
def test_parts_made_apart_join_to_the_same_tree(chosen: set[Placement]) -> None:
    blobs: Blobs = {}
    parts = {}
    for nibble in NIBBLES:
        mine = below(chosen, nibble)
        part = placement_part(mine, nibble)
        if not is_page(1, part.count, part.size):
            part = Part.standing(build_placements(mine, blobs.__setitem__, path=nibble))
        parts[nibble] = part
    top = finish(join(parts, blobs.__setitem__), blobs.__setitem__)
    fresh = built(chosen)
    assert top == fresh[0]
    assert fresh[1].items() <= blobs.items()


@pytest.mark.parametrize("path", ["", "0", "7", "f", "g", "0m", place_path(PLACES[0]), place_path(PLACES[0])[:1]])
def test_those_below_a_path_are_found_by_their_keys(path: Path) -> None:
    assert SortedPlacements(crowd()).under(path) == sorted(below(crowd(), path), key=placement_key)


def test_a_subtree_is_brought_up_to_date_alone() -> None:
    path = place_path(PLACES[0])[0]
    cache, blobs, mine = NodeMap(), {}, below(crowd(), path)
    build_placements(mine, blobs.__setitem__, cache=cache, path=path)
    left = mine[1:]
    top = update_placements_below(cache, mine[:1], lambda at: below(left, at), blobs.__setitem__, path=path)
    assert top == build_placements(left, lambda cid, blob: None, path=path)
    assert update_placements_below(cache, left, lambda at: [], blobs.__setitem__, path=path) is None
    assert cache.nodes == {}


def test_an_update_without_changes_reads_nothing() -> None:
    cache = NodeMap()
    top = build_placements(crowd(), lambda cid, blob: None, cache=cache)

    def not_asked(path: Path) -> list[Placement]:
        raise AssertionError("asked")

    assert update_placements(cache, [], not_asked, lambda cid, blob: None) == top


def test_an_empty_tree_is_one_empty_page() -> None:
    top, blobs = built([])
    assert blobs == {top.cid: b""}
    assert top.cid == build([], lambda cid, blob: None).cid
    assert finish(join({}, blobs.__setitem__), blobs.__setitem__) == top
    assert list(PlacementReader(top.cid, blobs.get).all()) == []


def test_what_a_caller_got_wrong_is_refused() -> None:
    one = crowd()[0]
    with pytest.raises(AssertionError, match="twice"):
        built([one, one])
    with pytest.raises(AssertionError, match="for the path"):
        build_placements([one], lambda cid, blob: None, path="0" if placement_key(one)[0] != "0" else "1")
    with pytest.raises(AssertionError, match="31 bytes"):
        built([Placement(one[1:])])
    item = PLACES[0]
    of_items = Part.of([(item, EncodedItem(b"\x0a\x10" + item))], item_key(item)[0])
    other = next(each for each in crowd() if placement_key(each)[0] != item_key(item)[0])
    with pytest.raises(AssertionError, match="two kinds"):
        join(
            {item_key(item)[0]: of_items, placement_key(other)[0]: placement_part([other], placement_key(other)[0])},
            lambda cid, blob: None,
        )


# The bytes.


def test_golden_page() -> None:
    item = created_item_id(FEED, 1, 0)
    top, blobs = built([Placement(PLACES[0] + item)])
    assert blobs[top.cid].hex() == "3a20" + PLACES[0].hex() + item.hex()
    assert top.cid.hex() == "0150122044e5d948d661326821803dd31924105b93d95c8a989cbab06d29d0ec01f67c9e"
    assert (top.count, top.size) == (1, 32)


def test_pages_are_what_the_generated_class_encodes() -> None:
    _, blobs = built(crowd())
    for blob in blobs.values():
        assert pb.TreeNode.FromString(blob).SerializeToString(deterministic=True) == blob


# Reading.


@given(some, st.sampled_from([*PLACES, view_place(bytes([13]) * 32)]))
def test_a_place_has_what_was_put_there(chosen: set[Placement], place: ItemId) -> None:
    top, blobs = built(chosen)
    reader = PlacementReader(top.cid, blobs.get)
    assert reader.at(place) == sorted((item for at, item in map(placed, chosen) if at == place), key=item_key)
    assert list(reader.all()) == sorted(chosen, key=placement_key)
    assert sorted(reader.reachable()) == sorted(blobs)
    assert reader.count == len(chosen)


def test_a_place_is_read_without_the_others() -> None:
    placements = [
        Placement(created_item_id(FEED, 0, at % 200) + created_item_id(FEED, 1 + at, 0)) for at in range(4000)
    ]
    top, blobs = built(placements)
    asked: list[Cid] = []

    def get(cid: Cid) -> bytes | None:
        asked.append(cid)
        return blobs.get(cid)

    assert len(PlacementReader(top.cid, get).at(created_item_id(FEED, 0, 3))) == 20
    assert len(asked) < len(blobs) / 20
    assert len(asked) == len(set(asked))


def test_a_missing_blob_is_named() -> None:
    top, blobs = built(crowd())
    for gone in blobs:
        left = {cid: blob for cid, blob in blobs.items() if cid != gone}
        with pytest.raises(MissingBlob, match="placement tree") as caught:
            list(PlacementReader(top.cid, left.get).all())
        assert caught.value.cid == gone


def page(*placements: Placement) -> bytes:
    return pb.TreeNode(placements=b"".join(placements)).SerializeToString(deterministic=True)


SORTED = sorted(crowd(), key=placement_key)
INDEX = pb.TreeNode(present=1, branches=cid_of(b"", PROTOBUF), counts=[SMALL + 1], sizes=[900])


@pytest.mark.parametrize(
    ("data", "path", "problem"),
    [
        (b"", "0", "an empty page below the top"),
        (page(SORTED[1], SORTED[0]), "", "repeated or out of order"),
        (page(SORTED[0], SORTED[0]), "", "repeated or out of order"),
        (page(Placement(SORTED[0] + b"x")), "", "placements of 33 bytes"),
        (page(SORTED[0])[:-1], "", "placements of 32 bytes"),
        (page(SORTED[0]) + b"x", "", "placements of 32 bytes"),
        (page(SORTED[0]) + page(SORTED[1]), "", "placements of 32 bytes"),
        (b"\x3a\xa0\x00" + SORTED[0], "", "canonical"),
        (b"\x3a\x00", "", "canonical"),
        (b"\x3a", "", "does not end"),
        (page(*SORTED[: SMALL + 1]), "", "where an index node belongs"),
        (page(SORTED[0], SORTED[-1]), placement_key(SORTED[0])[0], "lies elsewhere"),
        (page(SORTED[0], SORTED[-1]), placement_key(SORTED[-1])[0], "lies elsewhere"),
        (pb.TreeNode(items=[pb.ItemState(item=bytes(16))]).SerializeToString(), "", "unexpected tag"),
        (INDEX.SerializeToString(), "0" * 16, "where a page belongs"),
        (INDEX.SerializeToString() + page(SORTED[0]), "", "canonical"),
        (bytes(2 << 20), "", "a node of"),
    ],
)
def test_each_rule_of_a_node_is_checked(data: bytes, path: Path, problem: str) -> None:
    with pytest.raises(MalformedNode, match=problem):
        parse_placement_node(data, path)


def test_a_page_of_one_tree_is_none_of_the_other() -> None:
    with pytest.raises(MalformedNode, match="unexpected tag 0x3a"):
        parse_node(page(SORTED[0]), "")


def test_at_the_greatest_depth_all_is_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "PATH_NIBBLES_MAX", 0)
    top, blobs = built(crowd())
    assert blobs == {top.cid: page(*SORTED)}
    assert list(PlacementReader(top.cid, blobs.get).all()) == SORTED


@settings(max_examples=300)
@given(st.data())
def test_a_node_is_parsed_or_refused(data: st.DataObject) -> None:
    _, blobs = built(crowd())
    blob = bytearray(data.draw(st.sampled_from(sorted(blobs.values()))))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(blob)))
        blob[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        node = parse_placement_node(bytes(blob), "")
    except MalformedNode:
        return
    if isinstance(node, PlacementPage):
        assert page(*node.placements) == blob
    assert pb.TreeNode.FromString(bytes(blob)).SerializeToString(deterministic=True) == blob


def test_every_changed_blob_is_found() -> None:
    top, blobs = built(crowd())
    for cid, blob in blobs.items():
        for at in range(0, len(blob), 7):
            lying = blobs | {cid: blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]}
            with pytest.raises(BadBlob, match="do not match"):
                list(PlacementReader(top.cid, lying.get).all())


def test_a_bomb_of_shared_nodes_goes_off_early() -> None:
    """16 ** 14 nodes in 15 blobs, with counts that add up."""
    node = page(*SORTED[:SMALL])
    blobs, cid, count, size = {cid_of(node, PROTOBUF): node}, cid_of(node, PROTOBUF), SMALL, 32 * SMALL
    for _ in range(14):
        node = pb.TreeNode(
            present=(1 << 16) - 1, branches=cid * 16, counts=[count] * 16, sizes=[size] * 16
        ).SerializeToString()
        cid, count, size = cid_of(node, PROTOBUF), 16 * count, 16 * size
        blobs[cid] = node
    asked: list[Cid] = []

    def get(one: Cid) -> bytes | None:
        asked.append(one)
        return blobs.get(one)

    for read in (lambda reader: list(reader.all()), lambda reader: list(reader.reachable())):
        asked.clear()
        with pytest.raises(BadBlob):
            read(PlacementReader(cid, get))
        assert len(asked) <= 20
    asked.clear()
    with pytest.raises(BadBlob):
        PlacementReader(cid, get).at(PLACES[0])
    assert len(asked) <= 40


def test_a_walk_stops_at_its_limit_of_nodes() -> None:
    top, blobs = built(crowd())
    with pytest.raises(TooLarge, match="placement tree"):
        list(PlacementReader(top.cid, blobs.get, nodes_max=3).all())
    with pytest.raises(TooLarge, match="placement tree"):
        PlacementReader(top.cid, blobs.get, nodes_max=3).at(PLACES[0])


def test_a_top_that_is_no_node_is_refused() -> None:
    with pytest.raises(Corrupt, match="not the CID of a node"):
        PlacementReader(cid_of(b"", RAW), {cid_of(b"", RAW): b""}.get).at(PLACES[0])
