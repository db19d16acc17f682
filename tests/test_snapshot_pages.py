"""How items share pages: the real numbers, what they cost, and trees that must keep their names for ever."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.ids import Cid, FeedId, ItemId, created_item_id
from echostore.kernel.snapshot import (
    CHUNK_BYTES,
    INLINE_ITEM_BYTES_MAX,
    LABELS,
    NIBBLES,
    PAGE_BYTES_MAX,
    PAGE_ITEMS_MAX,
    SPANS,
    TreeTop,
    Weight,
    branch_labels,
    entry_bytes,
    is_page,
    is_run,
    item_key,
    key_bounds,
    stays_divided,
    within,
)
from echostore.store.item_store import ItemStore, NodeChanges
from echostore.wire.cids import PROTOBUF, cid_of, cid_text
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.snapshot import EncodedItem, encode_item
from echostore.wire.tree import BadBlob, NodeMap, TreeReader, build, update, verify_tree
from echostore.wire.tree_nodes import Page
from reference.snapshot_tree import SlowTree

Blobs = dict[Cid, bytes]
FEED = FeedId(b"feed-one")


def state_of(number: int, content: bytes) -> pb.ItemState:
    item = created_item_id(FEED, number, 0)
    return pb.ItemState(item=item, model="property-set", version=1, type="task", state=content)


def encoded(state: pb.ItemState) -> tuple[ItemId, EncodedItem]:
    return ItemId(state.item), encode_item(state, lambda cid, blob: None)


def grown(sizes: list[int]) -> tuple[Cid, Blobs]:
    blobs: Blobs = {}
    return build([encoded(state_of(n, bytes(size))) for n, size in enumerate(sizes)], blobs.__setitem__).cid, blobs


# Computed once, by the slow tree.
GOLDEN = {
    0: "bafibeihdwdcefgh4dqkjv67uzcmw7ojee6xedzdetojuzjevtenxquvyku",
    1: "bafibeigxyxzg4sdv4j4abbg7kr75lswrxyle75pd2sz4al4wvm3jhj67pe",
    128: "bafibeibhr472zzr4bywne3ucguhqfg3t52vxod7uacntojkyoiocwdag3a",
    129: "bafibeiht2yfgr4ddluvlhmlnw2nhgeinff42kmigngwit3cmtu4ktpwlsy",
    1000: "bafibeigr5irfamdzdi4gptdbhpvr5j362mip7sjyfovgjkpyx2jgyvlecu",
}


@pytest.mark.parametrize("count", GOLDEN)
def test_golden_trees(count: int) -> None:
    blobs: Blobs = {}
    top = build([encoded(state_of(number, b"%d" % number)) for number in range(count)], blobs.__setitem__)
    assert cid_text(top.cid) == GOLDEN[count]


@given(st.lists(st.sampled_from([0, 60, 300, 1000, 2048]), max_size=120))
def test_a_build_is_the_tree_of_the_definition(sizes: list[int]) -> None:
    top, blobs = grown(sizes)
    oracle = SlowTree({state.item: state for state in (state_of(n, bytes(size)) for n, size in enumerate(sizes))})
    assert (top, blobs) == (oracle.top, oracle.blobs)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.integers(0, 150), st.sampled_from([None, 0, 200, 900, 2048])), max_size=5))
def test_an_update_is_a_fresh_build(steps: list[dict[int, int | None]]) -> None:
    """Pages split, join their neighbours and part again."""
    kept, items, blobs = NodeMap(), dict[ItemId, EncodedItem](), dict[Cid, bytes]()

    def items_under(path: str) -> list[tuple[ItemId, EncodedItem]]:
        first, last = key_bounds(path)
        return [(item, data) for item, data in items.items() if first <= item_key(item) <= last]

    for step in (dict.fromkeys(range(90), 100), *steps, dict.fromkeys(range(5, 151))):
        dirty = set()
        for number, size in step.items():
            item, data = encoded(state_of(number, bytes(size or 0)))
            dirty.add(item)
            items.pop(item, None)
            if size is not None:
                items[item] = data
        top = update(kept, dirty, items_under, blobs.__setitem__)
        whole, fresh = NodeMap(), dict[Cid, bytes]()
        assert top == build(items.items(), fresh.__setitem__, cache=whole)
        assert kept.nodes == whole.nodes
        assert fresh.items() <= blobs.items()
        assert verify_tree(top.cid, top.count, blobs.get).ok


def test_a_page_is_full_by_items_or_by_bytes() -> None:
    assert is_page(0, PAGE_ITEMS_MAX, PAGE_BYTES_MAX)
    assert not is_page(0, PAGE_ITEMS_MAX + 1, 0)
    assert not is_page(0, 2, PAGE_BYTES_MAX + 1)
    assert is_page(0, 1, PAGE_BYTES_MAX + 1), "one item is never split"
    assert is_page(16, 1000, 1 << 20), "depth ends"


def test_a_diff_goes_through_a_run_that_parted() -> None:
    before = [state_of(number, b"0") for number in range(400)]
    more = [each for each in (state_of(n, b"0") for n in range(400, 1200)) if item_key(ItemId(each.item))[0] == "5"][
        :13
    ]
    blobs: Blobs = {}
    old, new = NodeMap(), NodeMap()
    top = build(map(encoded, before), blobs.__setitem__, cache=old)
    other = build(map(encoded, before + more), blobs.__setitem__, cache=new)
    assert set(old.nodes) - set(new.nodes) == {"j"}
    assert set(new.nodes) - set(old.nodes) == {"o", "p"}
    added = tuple(sorted((ItemId(each.item) for each in more), key=item_key))
    assert TreeReader(top.cid, blobs.get).diff(other.cid).added == added
    assert TreeReader(other.cid, blobs.get).diff(top.cid).removed == added
    assert not TreeReader(top.cid, blobs.get).diff(other.cid).changed


def test_a_store_forgets_the_runs_below_a_node(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.db")
    changes = NodeChanges(store)
    for path in ("", "3", "3g", "3h", "4"):
        changes.keep(path, TreeTop(cid_of(path.encode(), PROTOBUF), 2, 40))
    store.save_tree(changes, ())
    assert [label for label, _ in store.branches("3")] == ["g", "h"]
    later = NodeChanges(store)
    later.forget("3")
    store.save_tree(later, ())
    assert [store.node(path) is not None for path in ("", "3", "3g", "3h", "4")] == [True, False, False, False, True]
    store.close()


def test_what_an_item_takes_in_its_page() -> None:
    assert [entry_bytes(size) for size in (18, 127, 128, INLINE_ITEM_BYTES_MAX)] == [20, 129, 131, 4099]
    assert entry_bytes(INLINE_ITEM_BYTES_MAX + 1) == 2 + 18 + 38, "a name of one chunk"
    assert entry_bytes(CHUNK_BYTES * 4) == 3 + 18 + 4 * 38


def test_labels_name_the_aligned_runs_of_nibbles() -> None:
    assert SPANS["g"] == list("01234567")
    assert SPANS["l"] == list("cdef")
    assert SPANS["t"] == list("ef")
    assert len(LABELS) == 30
    assert len({tuple(span) for span in SPANS.values()}) == 30
    assert within("j") == ("j", "o", "4", "5", "p", "6", "7")
    assert [is_run(path) for path in ("", "3", "3f", "3g", "t")] == [False, False, False, True, True]
    assert key_bounds("3n") == ("32" + "0" * 62, "33" + "f" * 62)


@given(st.dictionaries(st.sampled_from(NIBBLES), st.integers(1, 200), min_size=1))
def test_branches_are_the_widest_runs_that_fit(counts: dict[str, int]) -> None:
    labels = branch_labels(0, {nibble: Weight(count, 0) for nibble, count in counts.items()})
    spans = [SPANS[label] for label in labels]
    assert [nibble for span in spans for nibble in span if nibble in counts] == sorted(counts)
    for label, span in zip(labels, spans, strict=True):
        together = sum(counts.get(nibble, 0) for nibble in span)
        assert len(span) == 1 or together <= PAGE_ITEMS_MAX
        wider = [run for run in LABELS if label in within(run)[1:]]
        assert all(sum(counts.get(nibble, 0) for nibble in SPANS[run]) > PAGE_ITEMS_MAX for run in wider)


@given(st.dictionaries(st.sampled_from(NIBBLES), st.integers(1, 200), min_size=1), st.data())
def test_a_node_stays_divided_where_nothing_wider_fits(counts: dict[str, int], data: st.DataObject) -> None:
    """The quick answer to whether labels are the same is the one that working them out anew gives."""
    labels = branch_labels(0, {nibble: Weight(count, 0) for nibble, count in counts.items()})
    weights = {label: sum(counts.get(nibble, 0) for nibble in SPANS[label]) for label in labels}
    changed = data.draw(st.lists(st.sampled_from(labels), unique=True))
    for label in changed:
        weights[label] = data.draw(st.integers(1, PAGE_ITEMS_MAX if is_run(label) else 200))
    now = {label: Weight(count, 0) for label, count in weights.items()}
    assert stays_divided(0, now, changed) == (branch_labels(0, now) == labels)


@pytest.mark.parametrize(("count", "size"), [(3_000, 60), (5_000, 60), (9_000, 60), (3_000, 1000)])
def test_pages_are_well_filled(count: int, size: int) -> None:
    """Whatever the number of items: a newcomer pays by the blob."""
    top, blobs = grown([size] * count)
    pages = [node for _, _, node in TreeReader(top, blobs.get).nodes() if isinstance(node, Page)]
    mean = sum(page.size for page in pages) / len(pages)
    assert PAGE_BYTES_MAX * 0.5 < mean <= PAGE_BYTES_MAX
    index = [blob for blob in blobs.values() if blob[:1] == b"\x18"]
    assert len(index) < len(pages) / 2
    assert sum(map(len, index)) < 0.02 * sum(page.size for page in pages)


def test_a_hundredth_of_items_of_a_kibibyte_renews_less_than_a_tenth_of_the_bytes() -> None:
    chance = random.Random(7)
    items = dict(encoded(state_of(number, bytes(1000))) for number in range(5_000))
    before: Blobs = {}
    after: Blobs = {}
    build(items.items(), before.__setitem__)
    for number in chance.sample(range(5_000), 50):
        item, data = encoded(state_of(number, bytes(999) + b"x"))
        items[item] = data
    build(items.items(), after.__setitem__)
    new = sum(len(blob) for cid, blob in after.items() if cid not in before)
    assert new < sum(map(len, before.values())) * 0.10


def test_one_of_many_items_is_four_blobs_away() -> None:
    ids = [created_item_id(FEED, seq, 0) for seq in range(100_000)]
    blobs: Blobs = {}
    top = build(((item, EncodedItem(b"\x0a\x10" + item + bytes(40))) for item in ids), blobs.__setitem__)
    asked: list[Cid] = []

    def get(cid: Cid) -> bytes | None:
        asked.append(cid)
        return blobs.get(cid)

    reader = TreeReader(top.cid, get)
    _, node = reader._descend(item_key(ids[0]))
    assert isinstance(node, Page)
    assert ids[0] in {entry.item for entry in node.entries}
    assert len(asked) <= 4


def swap(values: list[Any]) -> list[Any]:
    return [values[1], values[0], *values[2:]]


@pytest.mark.parametrize("what", ["place", "count", "size", "bytes"])
def test_a_check_finds_a_page_that_is_not_what_was_promised(what: str) -> None:
    top, blobs = grown([100] * 400)
    TreeReader(top, blobs.get).check()
    node = pb.TreeNode.FromString(blobs[top])
    cids = [node.branches[at : at + 36] for at in range(0, len(node.branches), 36)]
    if what == "bytes":
        blobs[Cid(cids[0])] = blobs[Cid(cids[0])][:-1]
    if what == "place":
        node.branches = b"".join(swap(cids))
    if what in ("place", "count"):
        node.counts[:] = swap(list(node.counts)) if what == "place" else [node.counts[0] + 1, *node.counts[1:]]
    if what in ("place", "size"):
        node.sizes[:] = swap(list(node.sizes)) if what == "place" else [node.sizes[0] + 1, *node.sizes[1:]]
    data = node.SerializeToString(deterministic=True)
    blobs[cid_of(data, PROTOBUF)] = data
    with pytest.raises(BadBlob):
        TreeReader(cid_of(data, PROTOBUF), blobs.get).check()
