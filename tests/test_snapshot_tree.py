"""The item tree: equal items give equal trees, updates equal builds, and nothing wrong with a tree goes unnoticed."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel import snapshot as shape
from echostore.kernel.errors import Corrupt, NotFound, TooLarge
from echostore.kernel.ids import Cid, FeedId, FeedKey, ItemId, Link, PartyKey, created_item_id
from echostore.kernel.snapshot import (
    CHUNK_BYTES,
    ENCODING_VERSION,
    INLINE_ITEM_BYTES_MAX,
    INLINE_STATE_BYTES_MAX,
    LABELS,
    NIBBLES,
    SPANS,
    ModelVersion,
    Path,
    TimeframeEntry,
    TreeTop,
    item_key,
    key_bounds,
)
from echostore.wire import tree_nodes
from echostore.wire.cids import PROTOBUF, RAW, cid_of, cid_text
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.snapshot import EncodedItem, encode_item, read_state_root, state_root_bytes
from echostore.wire.tree import (
    BadBlob,
    MissingBlob,
    NodeMap,
    Part,
    TreeReader,
    build,
    finish,
    join,
    update,
    verify_tree,
)
from echostore.wire.tree_nodes import MalformedNode, parse_node
from reference.snapshot_tree import SlowTree

SMALL = 12
"""Items of a page here: trees are deep with few items then. `test_snapshot_pages.py` has the real numbers."""
Blobs = dict[Cid, bytes]
FEED = FeedId(b"feed-one")


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "PAGE_ITEMS_MAX", SMALL)
        yield


# Builders.


@cache
def crowded_ids() -> tuple[ItemId, ...]:
    """Ids of which many share the first nibbles of their keys, so that small sets make deep trees."""
    groups: dict[str, list[ItemId]] = {"000": [], "00": [], "": []}
    for seq in range(60_000):
        item = created_item_id(FEED, seq, 0)
        next(ids for path, ids in groups.items() if item_key(item).startswith(path)).append(item)
    return (*groups["000"][:14], *groups["00"][:26], *groups[""][:30])


def state_of(item: ItemId, content: bytes = b"", *, metadata: bytes = b"") -> pb.ItemState:
    return pb.ItemState(item=item, model="property-set", version=1, type="task", state=content, metadata=metadata)


def states(count: int, seed: int = 1) -> dict[ItemId, pb.ItemState]:
    chance = random.Random(seed)
    ids = [created_item_id(FEED, seq, 0) for seq in range(count)]
    return {item: state_of(item, chance.randbytes(40)) for item in ids}


def encoded(items: dict[ItemId, pb.ItemState], blobs: Blobs) -> list[tuple[ItemId, EncodedItem]]:
    return [(item, encode_item(state, blobs.__setitem__)) for item, state in items.items()]


def built(items: dict[ItemId, pb.ItemState]) -> tuple[TreeTop, Blobs]:
    blobs: Blobs = {}
    return build(encoded(items, blobs), blobs.__setitem__), blobs


class Recording:
    """A `get` that remembers what was asked for."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.asked: list[Cid] = []

    def __call__(self, cid: Cid) -> bytes | None:
        self.asked.append(cid)
        return self.blobs.get(cid)


class Peer:
    """What a peer keeps: its items, the node cache, the blobs; `change` is one update."""

    def __init__(self) -> None:
        self.items: dict[ItemId, EncodedItem] = {}
        self.cache = NodeMap()
        self.blobs: Blobs = {}
        self.put: list[Cid] = []
        self.asked: list[tuple[Path, int]] = []

    def change(self, changes: dict[ItemId, bytes | None]) -> TreeTop:
        for item, content in changes.items():
            if content is None:
                self.items.pop(item, None)
            else:
                self.items[item] = encode_item(state_of(item, content), self.blobs.__setitem__)
        self.put, self.asked = [], []
        return update(self.cache, set(changes), self.items_under, self.keep_blob)

    def items_under(self, path: Path) -> list[tuple[ItemId, EncodedItem]]:
        first, last = key_bounds(path)
        found = [(item, data) for item, data in self.items.items() if first <= item_key(item) <= last]
        self.asked.append((path, len(found)))
        return found

    def keep_blob(self, cid: Cid, data: bytes) -> None:
        self.put.append(cid)
        self.blobs[cid] = data


contents = st.one_of(
    st.binary(max_size=8),
    st.binary(max_size=8),
    st.integers(0, 1500).map(bytes),
    st.sampled_from([INLINE_STATE_BYTES_MAX, INLINE_STATE_BYTES_MAX + 1, CHUNK_BYTES, CHUNK_BYTES + 1]).map(bytes),
)
item_ids = st.sampled_from(crowded_ids())
item_sets = st.dictionaries(item_ids, contents, max_size=60)


# The tree and its oracle.


@given(item_sets, st.dictionaries(item_ids, st.integers(4000, 5000), max_size=2))
def test_a_build_is_the_tree_of_the_definition(chosen: dict[ItemId, bytes], metadata: dict[ItemId, int]) -> None:
    whole = {item: state_of(item, content) for item, content in chosen.items()}
    whole |= {item: state_of(item, metadata=bytes(size)) for item, size in metadata.items()}
    top, blobs = built(whole)
    oracle = SlowTree(dict(whole), page_max=SMALL)
    assert (top.cid, top.count) == (oracle.top, len(whole))
    assert top.size == oracle.size([""])
    assert blobs == oracle.blobs


@given(item_sets, st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(chosen: dict[ItemId, bytes], chance: random.Random) -> None:
    whole = [(item, state_of(item, content)) for item, content in chosen.items()]
    shuffled = chance.sample(whole, len(whole))
    assert built(dict(whole)) == built(dict(shuffled))


@pytest.mark.parametrize("count", [0, SMALL])
def test_few_items_are_one_page(count: int) -> None:
    top, blobs = built(states(count))
    assert (top.count, len(blobs)) == (count, 1)


def test_one_item_more_splits_the_page() -> None:
    items = states(SMALL + 1)
    top, blobs = built(items)
    assert (top.count, len(blobs)) == (len(items), 3), "two runs of eight nibbles, and the index node over them"


def test_at_the_greatest_depth_all_is_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "PATH_NIBBLES_MAX", 2)
    whole = {item: state_of(item) for item in crowded_ids()}
    top, blobs = built(whole)
    assert blobs == SlowTree(dict(whole), page_max=SMALL, depth_max=2).blobs
    assert verify_tree(top.cid, top.count, blobs.get).ok
    assert dict(TreeReader(top.cid, blobs.get).items()) == whole


def test_golden_empty_tree() -> None:
    digest = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    assert built({}) == (TreeTop(Cid(b"\x01\x50\x12\x20" + digest), 0, 0), {b"\x01\x50\x12\x20" + digest: b""})


def test_nodes_are_what_the_generated_class_encodes() -> None:
    _, blobs = built(states(300))
    for blob in blobs.values():
        assert pb.TreeNode.FromString(blob).SerializeToString(deterministic=True) == blob


@pytest.mark.parametrize("count", [0, 5, 13, 30, 60, 120, 500])
def test_subtrees_built_apart_join_to_the_same_tree(count: int) -> None:
    items, blobs = encoded(states(count), {}), {}
    parts: dict[str, Part] = {}
    for nibble in NIBBLES:
        mine = Part.of([(item, data) for item, data in items if item_key(item)[0] == nibble], nibble)
        if mine.count > SMALL:
            share = [(item, data) for item, data in items if item_key(item)[0] == nibble]
            mine = Part.standing(build(share, blobs.__setitem__, path=nibble))
        parts[nibble] = mine
    whole: Blobs = {}
    assert finish(join(parts, blobs.__setitem__), blobs.__setitem__) == build(items, whole.__setitem__)
    assert blobs == whole


def test_a_part_that_shares_a_page_comes_with_its_items() -> None:
    items = encoded(states(SMALL + 1), {})
    top = build([pair for pair in items if item_key(pair[0])[0] == "f"], lambda cid, blob: None, path="f")
    others = {nibble: Part.of([p for p in items if item_key(p[0])[0] == nibble], nibble) for nibble in NIBBLES[:-1]}
    with pytest.raises(AssertionError, match="were not given"):
        join({**others, "f": Part.standing(top)}, lambda cid, blob: None)


def test_a_builder_refuses_what_its_caller_got_wrong() -> None:
    item, data = encoded(states(1), {})[0]
    other = ItemId(bytes(16))
    with pytest.raises(AssertionError, match="given twice"):
        build([(item, data), (item, data)], lambda cid, blob: None)
    with pytest.raises(AssertionError, match="starts"):
        build([(other, data)], lambda cid, blob: None)
    with pytest.raises(AssertionError, match="for the path"):
        build([(item, data)], lambda cid, blob: None, path="0" if item_key(item)[0] != "0" else "1")


# Updates.

changes = st.dictionaries(item_ids, st.one_of(st.none(), st.binary(max_size=3)), max_size=40)


@given(st.lists(changes, min_size=1, max_size=8))
def test_an_update_is_a_fresh_build(steps: list[dict[ItemId, bytes | None]]) -> None:
    peer = Peer()
    for step in steps:
        top = peer.change(step)
        fresh, kept = {}, NodeMap()
        assert top == build(peer.items.items(), fresh.__setitem__, cache=kept)
        assert peer.cache.nodes == kept.nodes
        assert set(peer.put) <= fresh.keys(), "a blob was put that the tree does not name"
        assert verify_tree(top.cid, top.count, peer.blobs.get).ok


def test_an_update_costs_what_changed() -> None:
    peer = Peer()
    ids = [created_item_id(FEED, seq, 0) for seq in range(5_000)]
    peer.change(dict.fromkeys(ids, b"old"))
    peer.change(dict.fromkeys(ids[:10], b"new"))
    assert all(count <= SMALL for _, count in peer.asked)
    assert len(peer.asked) <= 10
    assert len(peer.put) <= 10 * 4


def test_children_are_put_before_their_parents() -> None:
    seen: Blobs = {}

    def put(cid: Cid, data: bytes) -> None:
        if data[:1] == b"\x18":
            branches = pb.TreeNode.FromString(data).branches
            assert all(branches[at : at + 36] in seen for at in range(0, len(branches), 36))
        seen[cid] = data

    build(encoded(states(400), {}), put)


def test_a_failing_store_leaves_the_cache_as_it_was() -> None:
    peer = Peer()
    peer.change(dict.fromkeys(crowded_ids(), b"old"))
    before = dict(peer.cache.nodes)

    def failing(path: Path) -> Iterable[tuple[ItemId, EncodedItem]]:
        if len(peer.asked) > 3:
            raise OSError("disk")
        return peer.items_under(path)

    peer.asked = []
    with pytest.raises(OSError, match="disk"):
        update(peer.cache, crowded_ids(), failing, peer.keep_blob)
    assert peer.cache.nodes == before


def test_a_cache_that_does_not_add_up_is_refused() -> None:
    peer = Peer()
    peer.change(dict.fromkeys(crowded_ids(), b"old"))
    peer.cache.nodes.pop("0")
    with pytest.raises(Corrupt, match="do not add up"):
        peer.change({crowded_ids()[-1]: b"new"})


def test_an_update_without_changes_reads_nothing() -> None:
    peer = Peer()
    top = peer.change(dict.fromkeys(crowded_ids(), b"old"))
    assert peer.change({}) == top
    assert not peer.put
    assert not peer.asked


# Reading.


@given(item_sets, item_ids)
def test_every_item_can_be_opened(chosen: dict[ItemId, bytes], absent: ItemId) -> None:
    whole = {item: state_of(item, content) for item, content in chosen.items() if item != absent}
    top, blobs = built(whole)
    reader = TreeReader(top.cid, blobs.get)
    assert reader.count == len(whole)
    assert reader.item(absent) is None
    for item, state in whole.items():
        read = reader.item(item)
        assert read is not None
        assert reader.state_bytes(read) == state.state
    assert [item for item, _ in reader.items()] == sorted(whole, key=item_key)
    assert set(reader.reachable()) == blobs.keys()
    assert max(Counter(reader.reachable()).values()) == 1


def test_a_large_item_is_read_back() -> None:
    items = states(30)
    item = next(iter(items))
    items[item] = state_of(item, bytes(CHUNK_BYTES * 2), metadata=bytes(range(256)) * 3000)
    top, blobs = built(items)
    reader = TreeReader(top.cid, blobs.__getitem__)
    read = reader.item(item)
    assert read is not None
    assert read.metadata == items[item].metadata
    assert reader.state_bytes(read) == items[item].state
    assert set(reader.reachable()) == blobs.keys()
    with pytest.raises(TooLarge):
        TreeReader(top.cid, blobs.get, bytes_max=CHUNK_BYTES).item(item)


@given(item_sets, changes)
def test_a_diff_names_what_changed(chosen: dict[ItemId, bytes], step: dict[ItemId, bytes | None]) -> None:
    old = {item: state_of(item, content) for item, content in chosen.items()}
    new = dict(old)
    for item, content in step.items():
        new.pop(item, None)
        if content is not None:
            new[item] = state_of(item, content)
    (old_top, blobs), (new_top, new_blobs) = built(old), built(new)
    diff = TreeReader(old_top.cid, blobs.get).diff(new_top.cid, new_blobs.get)
    assert diff.added == tuple(sorted(new.keys() - old.keys(), key=item_key))
    assert diff.removed == tuple(sorted(old.keys() - new.keys(), key=item_key))
    changed = {item for item in old.keys() & new.keys() if old[item] != new[item]}
    assert diff.changed == tuple(sorted(changed, key=item_key))


def test_a_diff_visits_only_what_differs() -> None:
    items = states(3_000)
    top, blobs = built(items)
    changed = next(iter(items))
    new_top, new_blobs = built(items | {changed: state_of(changed, b"other")})
    get = Recording(blobs | new_blobs)
    assert TreeReader(top.cid, get).diff(new_top.cid).changed == (changed,)
    assert len(get.asked) <= 2 * 5


@pytest.mark.parametrize("prefix", ["", "0", "00", "000", "0000", "00000000", "f", "ffffff"])
def test_the_node_for_a_prefix_covers_its_items(prefix: Path) -> None:
    whole = {item: state_of(item) for item in crowded_ids()}
    top, blobs = built(whole)
    covering = TreeReader(top.cid, blobs.get).node_for_prefix(prefix)
    below = [item for item in whole if item_key(item).startswith(prefix)]
    if not below:
        assert covering is None
        return
    assert covering is not None
    first, last = key_bounds(covering.path)
    assert first <= min(map(item_key, below))
    assert max(map(item_key, below)) <= last
    node = parse_node(blobs[covering.top.cid], covering.path)
    assert node.count == covering.top.count >= len(below)
    assert covering.path == prefix or covering.top.count <= SMALL


# What is wrong with a tree is found.


def paths_of(top: Cid, blobs: Blobs) -> dict[Path, Cid]:
    return {path: cid for path, cid, _ in TreeReader(top, blobs.get)._walk()}


def forged(paths: dict[Path, Cid], blobs: Blobs, path: Path, node: bytes) -> tuple[TreeTop, Blobs]:
    """The tree of a liar: another node at `path`, and everything above it hashed again."""
    lying = dict(blobs)
    lying[cid_of(node, PROTOBUF)] = node
    for depth in reversed(range(len(path))):
        cid = cid_of(node, PROTOBUF)
        parent = pb.TreeNode.FromString(blobs[paths[path[:depth]]])
        labels = [label for bit, label in enumerate(LABELS) if parent.present >> bit & 1]
        place = sorted(labels, key=SPANS.__getitem__).index(path[depth])
        at = 36 * place
        parent.sizes[place] = sum(pb.TreeNode.FromString(node).sizes) if node[:1] == b"\x18" else len(node)
        parent.branches = parent.branches[:at] + cid + parent.branches[at + 36 :]
        node = parent.SerializeToString(deterministic=True)
        lying[cid_of(node, PROTOBUF)] = node
    return TreeTop(cid_of(node, PROTOBUF), parse_total(node), 0), lying


def parse_total(node: bytes) -> int:
    message = pb.TreeNode.FromString(node)
    return sum(message.counts) or len(message.items) + len(message.large_items)


def test_every_changed_blob_is_found() -> None:
    """B10, B11: any blob of the tree, changed in any way under its name."""
    items = states(120)
    first, second = list(items)[:2]
    items[first] = state_of(first, bytes(5000))
    items[second] = state_of(second, metadata=bytes(5000))
    top, blobs = built(items)
    chance = random.Random(3)
    tried = 0
    for cid, blob in blobs.items():
        damages = [blob + b"\x00", blob[:-1], b"", None]
        for at in chance.sample(range(len(blob)), min(len(blob), 100)):
            damages.append(blob[:at] + bytes([blob[at] ^ 1 << chance.randrange(8)]) + blob[at + 1 :])
        for damage in damages:
            damaged = dict(blobs)
            if damage is None:
                del damaged[cid]
            else:
                damaged[cid] = damage
            tried += 1
            report = verify_tree(top.cid, top.count, damaged.get)
            assert len(report.problems) == 1
            assert cid_text(cid) in report.problems[0]
    assert tried > 1500


ITEM_MUTATIONS: dict[str, Callable[[pb.ItemState], object]] = {
    "model": lambda state: setattr(state, "model", state.model + "x"),
    "version": lambda state: setattr(state, "version", state.version + 1),
    "type": lambda state: setattr(state, "type", ""),
    "parent": lambda state: setattr(state, "parent", bytes(16)),
    "link_source": lambda state: setattr(state, "link_source", bytes(16)),
    "link_target": lambda state: setattr(state, "link_target", bytes(16)),
    "link_party": lambda state: setattr(state, "link_party", bytes(32)),
    "inception_key": lambda state: setattr(state, "inception_key", bytes(32)),
    "id_proof": lambda state: setattr(state, "id_proof", bytes(64)),
    "forked_from": lambda state: setattr(state, "forked_from", bytes(16)),
    "state": lambda state: setattr(state, "state", state.state[:-1]),
    "metadata": lambda state: setattr(state, "metadata", b"m"),
    "access": lambda state: state.access.add(feed=bytes(8), depth=3),
    "genesis_depth": lambda state: setattr(state, "genesis_depth", 9),
}


def test_an_edited_item_is_named_by_the_diff() -> None:
    """B10: a liar edits one field of one item and hashes everything again; who recomputes finds exactly that item."""
    assert {*ITEM_MUTATIONS, "item", "state_cids"} == set(pb.ItemState.DESCRIPTOR.fields_by_name)
    items = states(400)
    top, blobs = built(items)
    paths = paths_of(top.cid, blobs)
    tried = 0
    for path, cid in paths.items():
        page = pb.TreeNode.FromString(blobs[cid])
        for position, honest in enumerate(page.items):
            for mutate in ITEM_MUTATIONS.values():
                node = pb.TreeNode.FromString(blobs[cid])
                mutate(node.items[position])
                lying_top, lying = forged(paths, blobs, path, node.SerializeToString(deterministic=True))
                assert lying_top.cid != top.cid
                assert TreeReader(top.cid, blobs.get).diff(lying_top.cid, lying.get).changed == (honest.item,)
                tried += 1
    assert tried > 5_000


def lie(change: Callable[[pb.TreeNode], object]) -> Callable[[bytes], bytes]:
    def changed(blob: bytes) -> bytes:
        node = pb.TreeNode.FromString(blob)
        change(node)
        return node.SerializeToString(deterministic=True)

    return changed


def swap_items(node: pb.TreeNode) -> None:
    items = list(node.items)
    del node.items[:]
    node.items.extend([items[1], items[0], *items[2:]])


def make_inline_and_large(node: pb.TreeNode) -> None:
    node.large_items.add(item=node.items[0].item, cids=[cid_of(b"", RAW)])


NOT_A_PAGE = {
    "items out of order": lie(swap_items),
    "an item twice": lie(lambda node: node.items[0].CopyFrom(node.items[1])),
    "an item fewer than promised": lie(lambda node: node.items.pop()),
    "an item that lies elsewhere": lie(lambda node: setattr(node.items[0], "item", bytes(16))),
    "an item id that is too short": lie(lambda node: setattr(node.items[0], "item", bytes(15))),
    "an item without an id": lie(lambda node: node.items[0].ClearField("item")),
    "an item both small and large": lie(make_inline_and_large),
    "an item state that is too large": lie(lambda node: setattr(node.items[0], "metadata", bytes(5000))),
    "a model state that is too large": lie(lambda node: setattr(node.items[0], "state", bytes(2049))),
    "chunks and an inline state": lie(lambda node: node.items[0].state_cids.append(cid_of(b"", RAW))),
    "access out of order": lie(lambda node: node.items[0].access.extend([pb.AccessEntry(depth=2), pb.AccessEntry()])),
    "a bitmap in a page": lie(lambda node: setattr(node, "present", 1)),
    "empty": lambda blob: b"",
    "an unknown field": lambda blob: blob + b"\x32\x01x",
    "an unknown field in an item": lambda blob: (
        b"\x0a" + bytes([blob[1] + 3]) + blob[2 : 2 + blob[1]] + b"\xaa\x01\x00" + blob[2 + blob[1] :]
    ),
    "a default that is spelt out": lambda blob: (
        b"\x0a" + bytes([blob[1] + 3]) + blob[2 : 2 + blob[1]] + b"\x80\x01\x00" + blob[2 + blob[1] :]
    ),
    "a second id": lambda blob: (
        b"\x0a" + bytes([blob[1] + 18]) + blob[2 : 2 + blob[1]] + b"\x0a\x10" + bytes(16) + blob[2 + blob[1] :]
    ),
    "a length in too many bytes": lambda blob: b"\x0a" + bytes([blob[1] | 0x80, 0]) + blob[2:],
    "garbage at the end": lambda blob: blob + b"\xff\xff",
}

NOT_AN_INDEX = {
    "a count that is wrong": lie(lambda node: node.counts.__setitem__(0, node.counts[0] + 1)),
    "a count of nothing": lie(lambda node: node.counts.__setitem__(0, 0)),
    "a branch less in the bitmap": lie(lambda node: setattr(node, "present", node.present & node.present - 1)),
    "a bit beyond the branches": lie(lambda node: setattr(node, "present", node.present | 1 << 30)),
    "branches swapped": lie(lambda n: setattr(n, "branches", n.branches[36:72] + n.branches[:36] + n.branches[72:])),
    "half a CID": lie(lambda node: setattr(node, "branches", node.branches[:-18])),
    "a branch named as raw": lie(lambda node: setattr(node, "branches", b"\x01\x55" + node.branches[2:])),
    "items in an index node": lie(lambda node: node.items.add(item=bytes(16))),
    "a size that is wrong": lie(lambda node: node.sizes.__setitem__(0, node.sizes[0] + 1)),
    "a size less": lie(lambda node: node.sizes.pop()),
    "counts that are not packed": lambda blob: (
        blob[: blob.index(b"\x2a", 4 + len(pb.TreeNode.FromString(blob).branches))]
        + b"".join(bytes([0x28, count]) for count in pb.TreeNode.FromString(blob).counts)
        + blob[blob.index(b"\x32", 6 + len(pb.TreeNode.FromString(blob).branches)) :]
    ),
    "an unknown field": lambda blob: blob + b"\x3a\x01x",
}


@pytest.mark.parametrize("name", NOT_A_PAGE)
def test_a_page_that_breaks_the_rules_is_found(name: str) -> None:
    top, blobs = built(states(100))
    paths = paths_of(top.cid, blobs)
    path, cid = next((path, cid) for path, cid in paths.items() if path and parse_total(blobs[cid]) in (7, 8))
    lying_top, lying = forged(paths, blobs, path, NOT_A_PAGE[name](blobs[cid]))
    assert len(verify_tree(lying_top.cid, lying_top.count, lying.get).problems) >= 1
    with pytest.raises(Corrupt):
        list(TreeReader(lying_top.cid, lying.get).items())


@pytest.mark.parametrize("name", NOT_AN_INDEX)
@pytest.mark.parametrize("path", ["", "0"])
def test_an_index_node_that_breaks_the_rules_is_found(name: str, path: Path) -> None:
    top, blobs = built(states(400))
    paths = paths_of(top.cid, blobs)
    lying_top, lying = forged(paths, blobs, path, NOT_AN_INDEX[name](blobs[paths[path]]))
    assert not verify_tree(lying_top.cid, lying_top.count, lying.get).ok
    with pytest.raises(Corrupt):
        list(TreeReader(lying_top.cid, lying.get).items())


def test_a_tree_of_another_shape_is_found() -> None:
    """The right items in order, with right counts, but split where they should not be or not split where they should."""
    items = states(SMALL + 1)
    page = pb.TreeNode(items=[items[item] for item in sorted(items, key=item_key)]).SerializeToString()
    over_full = cid_of(page, PROTOBUF)
    assert "where an index node belongs" in verify_tree(over_full, SMALL + 1, {over_full: page}.get).problems[0]

    split = SlowTree(dict(states(SMALL)), page_max=1)
    blobs = {Cid(cid): blob for cid, blob in split.blobs.items()}
    assert "where a page belongs" in verify_tree(Cid(split.top), SMALL, blobs.get).problems[0]


def small_page(*ids: ItemId) -> pb.TreeNode:
    return pb.TreeNode(items=[state_of(item) for item in sorted(ids, key=item_key)])


def one_branch_empty() -> pb.TreeNode:
    node = pb.TreeNode(present=3, branches=cid_of(b"", PROTOBUF) * 2)
    node.counts.extend([SMALL + 1, 0])
    node.sizes.extend([900, 0])
    return node


ONE, OTHER = crowded_ids()[:2]


@pytest.mark.parametrize(
    ("node", "path", "problem"),
    [
        (pb.TreeNode(), "0", "an empty page below the top"),
        (pb.TreeNode(items=[state_of(ONE), state_of(ONE)]), "", "repeated or out of order"),
        (
            pb.TreeNode(large_items=[pb.LargeItem(item=ONE, cids=[cid_of(b"", RAW)])] * 2),
            "",
            "repeated or out of order",
        ),
        (
            pb.TreeNode(items=[state_of(ONE)], large_items=[pb.LargeItem(item=ONE, cids=[cid_of(b"", RAW)])]),
            "",
            "both small and large",
        ),
        (pb.TreeNode(large_items=[pb.LargeItem(item=ONE)]), "", "raw CIDs"),
        (pb.TreeNode(large_items=[pb.LargeItem(item=ONE, cids=[cid_of(b"", PROTOBUF)])]), "", "raw CIDs"),
        (small_page(ONE, OTHER), "f", "lies elsewhere"),
        (one_branch_empty(), "", "an empty branch"),
        (
            pb.TreeNode(present=1, branches=cid_of(b"", RAW), counts=[99], sizes=[900]),
            "",
            "not named by a protobuf CID",
        ),
        (pb.TreeNode(present=1, branches=cid_of(b"", PROTOBUF), counts=[12], sizes=[900]), "", "where a page belongs"),
        (
            pb.TreeNode(present=1, branches=cid_of(b"", PROTOBUF), counts=[99], sizes=[9000]),
            "0" * 16,
            "where a page belongs",
        ),
        (
            pb.TreeNode(present=1, branches=cid_of(b"", PROTOBUF), counts=[99], sizes=[9000]),
            "0n",
            "where a page belongs",
        ),
        (
            pb.TreeNode(present=15, branches=cid_of(b"", PROTOBUF) * 4, counts=[5, 5, 5, 5], sizes=[9] * 4),
            "",
            "divided in another way",
        ),
        (
            pb.TreeNode(present=1 | 1 << 16, branches=cid_of(b"", PROTOBUF) * 2, counts=[5, 9], sizes=[9] * 2),
            "",
            "divided in another way",
        ),
        (small_page(ONE, OTHER), "0h", "lies elsewhere"),
    ],
)
def test_each_rule_of_a_node_is_checked(node: pb.TreeNode, path: Path, problem: str) -> None:
    """One at a time: in a whole tree, most of these would also be found by a wrong count."""
    with pytest.raises(MalformedNode, match=problem):
        parse_node(node.SerializeToString(deterministic=True), path)


def test_a_large_item_of_another_id_is_found() -> None:
    raw = state_of(OTHER, metadata=bytes(5000)).SerializeToString()
    page = pb.TreeNode(large_items=[pb.LargeItem(item=ONE, cids=[cid_of(raw, RAW)])]).SerializeToString()
    top = TreeTop(cid_of(page, PROTOBUF), 1, len(page))
    assert "belongs" in verify_tree(top.cid, top.count, {cid_of(raw, RAW): raw, top.cid: page}.get).problems[0]


@pytest.mark.parametrize(("size", "blobs"), [(INLINE_ITEM_BYTES_MAX, 1), (INLINE_ITEM_BYTES_MAX + 1, 2)])
def test_an_item_is_large_when_its_state_is(size: int, blobs: int) -> None:
    room = size - len(state_of(ONE, metadata=bytes(4000)).SerializeToString()) + 4000
    items = {ONE: state_of(ONE, metadata=bytes(room))}
    assert len(items[ONE].SerializeToString()) == size
    assert len(built(items)[1]) == blobs
    assert built(items)[1] == SlowTree(dict(items)).blobs


def test_a_wrong_total_is_found() -> None:
    top, blobs = built(states(40))
    assert not verify_tree(top.cid, top.count + 1, blobs.get).ok


@settings(max_examples=500)
@given(st.data())
def test_a_node_is_parsed_or_refused(data: st.DataObject) -> None:
    """Whatever the bytes, the parser either refuses them in its own way or they are the only encoding of the result."""
    _, blobs = built({item: state_of(item, b"x") for item in crowded_ids()})
    blob = bytearray(data.draw(st.sampled_from(sorted(blobs.values()))))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(blob)))
        blob[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    counted = tree_nodes.page_count(bytes(blob), "")
    try:
        node = parse_node(bytes(blob), "")
    except MalformedNode:
        assert counted is None, "what is counted without being parsed is sound"
        return
    assert counted in (None, node.count)
    again = (
        tree_nodes.index_bytes(node.branches)
        if isinstance(node, tree_nodes.IndexNode)
        else tree_nodes.page_bytes(
            [e.data for e in node.entries if not e.large], [e.data for e in node.entries if e.large]
        )
    )
    assert again == blob


def test_a_page_of_small_items_is_counted_without_being_parsed() -> None:
    whole = {item: state_of(item, b"x" * 150) for item in crowded_ids()[:12]}
    top, blobs = built(whole)
    data = blobs[top.cid]
    assert tree_nodes.page_count(data, "") == 12
    assert tree_nodes.page_count(data, "0123456789") is None, "it belongs elsewhere"
    assert tree_nodes.page_count(data[:-1], "") is None
    assert tree_nodes.page_count(data + data, "") is None
    large, blobs = built({item: state_of(item, metadata=bytes(4500)) for item in crowded_ids()[:2]})
    assert tree_nodes.page_count(blobs[large.cid], "") is None, "a large item leads to more blobs"


@pytest.mark.parametrize("absent", [KeyError, NotFound, None])
def test_a_missing_blob_is_named(absent: type[Exception] | None) -> None:
    def get(cid: Cid) -> bytes | None:
        if absent is None:
            return None
        raise absent("not here")

    top, _ = built(states(30))
    with pytest.raises(MissingBlob) as caught:
        TreeReader(top.cid, get).item(ItemId(bytes(16)))
    assert caught.value.cid == top.cid
    assert not verify_tree(top.cid, top.count, get).ok


# B12: trees made to waste a reader's time.


def index_over(cid: Cid, branches: int, count: int, size: int) -> bytes:
    return pb.TreeNode(
        present=(1 << branches) - 1, branches=cid * branches, counts=[count] * branches, sizes=[size] * branches
    ).SerializeToString()


@pytest.mark.parametrize(("branches", "levels"), [(1, 60), (2, 16), (2, 40), (16, 3), (16, 14)])
def test_a_bomb_of_shared_nodes_goes_off_early(branches: int, levels: int) -> None:
    """Up to 16 ** 14 nodes in 15 blobs, with counts that add up."""
    items = states(SMALL)
    node = pb.TreeNode(items=[items[item] for item in sorted(items, key=item_key)]).SerializeToString()
    blobs, cid, count = {cid_of(node, PROTOBUF): node}, cid_of(node, PROTOBUF), SMALL
    size = len(node)
    for _ in range(levels):
        node = index_over(cid, branches, count, size)
        size *= branches
        cid, count = cid_of(node, PROTOBUF), branches * count
        blobs[cid] = node
    empty = cid_of(b"", PROTOBUF)
    for read in (
        lambda reader: list(reader.items()),
        lambda reader: list(reader.reachable()),
        lambda reader: reader.diff(empty, {empty: b""}.get),
    ):
        get = Recording(blobs)
        with pytest.raises(BadBlob):
            read(TreeReader(cid, get))
        assert len(get.asked) <= 2 * (levels + 2)
    get = Recording(blobs)
    assert not verify_tree(cid, count, get).ok
    assert len(get.asked) <= 200 + levels, "the report is cut at 100 problems"
    get = Recording(blobs)
    with suppress(BadBlob):
        assert TreeReader(cid, get).item(ItemId(bytes(16))) is None
    assert len(get.asked) <= 17


def test_a_walk_stops_at_its_limit_of_nodes() -> None:
    top, blobs = built(states(500))
    with pytest.raises(TooLarge):
        list(TreeReader(top.cid, blobs.get, nodes_max=10).items())
    assert "more than 10 nodes" in verify_tree(top.cid, top.count, blobs.get, nodes_max=10).problems[0]


def test_an_oversize_node_is_not_hashed() -> None:
    huge = b"\x0a" + bytes(1 << 20)
    with pytest.raises(BadBlob, match="1048577 bytes, where at most"):
        TreeReader(cid_of(huge, PROTOBUF), {cid_of(huge, PROTOBUF): huge}.get).item(ItemId(bytes(16)))


def test_a_bomb_of_chunks_is_not_put_together() -> None:
    chunk = bytes(CHUNK_BYTES)
    state = state_of(ItemId(bytes(16)))
    state.state_cids.extend([cid_of(chunk, RAW)] * 100)
    get = Recording({cid_of(chunk, RAW): chunk})
    with pytest.raises(TooLarge):
        TreeReader(cid_of(b"", PROTOBUF), get, bytes_max=1 << 20).state_bytes(state)
    assert not get.asked


@pytest.mark.parametrize("sizes", [[INLINE_STATE_BYTES_MAX], [CHUNK_BYTES - 1, 5], [CHUNK_BYTES, 0], [CHUNK_BYTES + 1]])
def test_chunks_of_other_sizes_are_found(sizes: list[int]) -> None:
    chunks = [bytes(size) for size in sizes]
    blobs = {cid_of(chunk, RAW): chunk for chunk in chunks}
    state = state_of(ItemId(bytes(16)))
    state.state_cids.extend(cid_of(chunk, RAW) for chunk in chunks)
    page = pb.TreeNode(items=[state]).SerializeToString()
    top = TreeTop(cid_of(page, PROTOBUF), 1, len(page))
    blobs[top.cid] = page
    assert not verify_tree(top.cid, top.count, blobs.get).ok
    reader = TreeReader(top.cid, blobs.get)
    with pytest.raises(Corrupt):
        reader.state_bytes(state)


def test_a_large_item_must_be_large() -> None:
    raw = state_of(ItemId(bytes(16)), b"small").SerializeToString()
    page = pb.TreeNode(large_items=[pb.LargeItem(item=bytes(16), cids=[cid_of(raw, RAW)])]).SerializeToString()
    top = TreeTop(cid_of(page, PROTOBUF), 1, len(page))
    assert not verify_tree(top.cid, top.count, {cid_of(raw, RAW): raw, top.cid: page}.get).ok
    assert len(raw) <= INLINE_ITEM_BYTES_MAX


# State roots.


def root_fields() -> dict[str, object]:
    return {
        "party": PartyKey(bytes(range(32))),
        "timeframe": [TimeframeEntry(FeedKey(bytes([n]) * 32), n, Link(bytes([n + 1]) * 32)) for n in (3, 1, 2)],
        "admission_digest": sha256(b"admitted").digest(),
        "base_epoch": sha256(b"epoch").digest(),
        "models": [ModelVersion("text", 1), ModelVersion("log", 2), ModelVersion("text", 1)],
        "item_count": 12,
        "membership_root": cid_of(b"members", PROTOBUF),
        "index_root": cid_of(b"index", PROTOBUF),
        "tree": cid_of(b"tree", PROTOBUF),
        "placements": cid_of(b"placements", PROTOBUF),
    }


def root_bytes(**fields: object) -> tuple[Cid, bytes]:
    return state_root_bytes(**(root_fields() | fields))


def test_a_state_root_is_read_back_sorted() -> None:
    cid, data = root_bytes()
    root = read_state_root(data)
    assert cid == cid_of(data, PROTOBUF)
    assert [entry.seq for entry in root.timeframe] == [1, 2, 3]
    assert root.models == (ModelVersion("log", 2), ModelVersion("text", 1))
    assert root.base_epoch == sha256(b"epoch").digest()
    assert read_state_root(root_bytes(base_epoch=None)[1]).base_epoch is None
    assert cid == root_bytes(timeframe=root.timeframe, models=root.models)[0]


def test_a_changed_state_root_is_refused_or_says_something_else() -> None:
    _, data = root_bytes()
    honest = read_state_root(data)
    for at in range(len(data)):
        for bit in range(8):
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            try:
                assert read_state_root(changed) != honest
            except Corrupt:
                continue


@pytest.mark.parametrize(
    "fields",
    [
        {"party": b"short"},
        {"timeframe": [TimeframeEntry(FeedKey(bytes(32)), seq, Link(bytes(32))) for seq in (1, 2)]},
        {"timeframe": [TimeframeEntry(FeedKey(bytes(32)), 1, Link(b"short"))]},
        {"admission_digest": b""},
        {"base_epoch": b"short"},
        {"models": [ModelVersion("", 1)]},
        {"index_root": cid_of(b"index", RAW)},
        {"tree": b""},
        {"placements": cid_of(b"placements", RAW)},
        {"placements": b""},
    ],
)
def test_a_malformed_state_root_is_neither_written_nor_read(fields: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        root_bytes(**fields)
    message = pb.StateRoot.FromString(root_bytes()[1])
    for name, value in fields.items():
        if name == "timeframe":
            del message.timeframe[:]
            message.timeframe.extend(pb.TimeframeEntry(feed_key=e.feed_key, seq=e.seq, link=e.link) for e in value)
        elif name == "models":
            message.models.append(pb.ModelVersion(version=1))
        else:
            setattr(message, name, value)
    with pytest.raises(Corrupt):
        read_state_root(message.SerializeToString())


@pytest.mark.parametrize("tail", [b"\x58\x01", b"\x38\x0c", b"\x08\x01", b"\xff"])
def test_a_state_root_has_one_encoding(tail: bytes) -> None:
    with pytest.raises(Corrupt):
        read_state_root(root_bytes()[1] + tail)


def test_a_state_root_without_placements_is_one_of_the_version_before() -> None:
    _, data = root_bytes(placements=None)
    root = read_state_root(data)
    assert (root.placements, root.encoding_version) == (None, 2)
    assert pb.StateRoot.FromString(data).encoding_version == 2
    root = read_state_root(root_bytes()[1])
    assert (root.placements, root.encoding_version) == (cid_of(b"placements", PROTOBUF), 3)


@pytest.mark.parametrize(("placements", "version"), [(None, 3), (cid_of(b"placements", PROTOBUF), 2)])
def test_a_state_root_has_the_fields_of_its_version(placements: Cid | None, version: int) -> None:
    message = pb.StateRoot.FromString(root_bytes(placements=placements)[1])
    message.encoding_version = version
    with pytest.raises(Corrupt, match="other fields"):
        read_state_root(message.SerializeToString())


def test_a_state_root_of_a_newer_version_asks_for_an_update() -> None:
    message = pb.StateRoot.FromString(root_bytes()[1])
    message.encoding_version = ENCODING_VERSION + 1
    with pytest.raises(Corrupt, match="Update echostore"):
        read_state_root(message.SerializeToString())


def test_a_state_root_of_an_older_version_is_refused_with_a_way_on() -> None:
    message = pb.StateRoot.FromString(root_bytes()[1])
    message.encoding_version = 1
    with pytest.raises(Corrupt, match="newer epoch, or from the history"):
        read_state_root(message.SerializeToString())


def test_a_state_root_that_no_blob_can_hold_is_refused() -> None:
    feeds = [TimeframeEntry(FeedKey(n.to_bytes(32, "big")), n, Link(bytes(32))) for n in range(20_000)]
    with pytest.raises(TooLarge):
        root_bytes(timeframe=feeds)
