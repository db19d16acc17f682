"""From lake to CIDs: subtrees joined without Spark, and the stages on Spark against real peers."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echostore.kernel.ids import Cid, ItemId, item_text
from echostore.kernel.snapshot import entry_bytes, is_page, item_key
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.schemas import ITEM_STATES, MOVES, TREE_NODES
from echostore.pipeline.stages.asking import close_edges, close_lacking
from echostore.pipeline.stages.move_rows import party_moves
from echostore.pipeline.stages.operation_columns import CREATED, PLACED, RIVAL, rows_table
from echostore.pipeline.stages.parcels import packed, unpacked
from echostore.pipeline.stages.snapshot import join_tops
from echostore.pipeline.stages.state_files import spread, states_noted
from echostore.pipeline.stages.subtrees import ENTRIES, subtree
from echostore.wire.snapshot import EncodedItem
from echostore.wire.tree import build
from peer_builder import Circle
from spark.stage_runner import Stages

# subtrees


def _states(items: dict[ItemId, EncodedItem]) -> pa.Table:
    rows = sorted((bytes.fromhex(item_key(item)), item, data) for item, data in items.items())
    columns = {
        "item_key": [row[0] for row in rows],
        "item": [row[1] for row in rows],
        "state": [row[2] for row in rows],
    }
    table = pa.table({name: pa.array(values, pa.binary()) for name, values in columns.items()})
    return table.append_column(ITEM_STATES.field("encoded"), pa.nulls(len(rows), pa.binary()))


def _item(number: int) -> tuple[ItemId, EncodedItem]:
    item = ItemId(b"feed-one" + number.to_bytes(8, "big"))
    return item, EncodedItem(b"\x0a\x10" + item + b"\x20" + bytes([number % 7]))


def _tops(items: dict[ItemId, EncodedItem], depth: int, before: dict[str, Any], blobs: dict[Cid, bytes], dirty: set[ItemId]) -> dict[str, Any]:  # fmt: skip
    tops: dict[str, Any] = {}
    for bucket in spread("", depth):
        mine = {item: data for item, data in items.items() if item_key(item).startswith(bucket)}
        size = sum(entry_bytes(len(data)) for data in mine.values())
        if is_page(depth, len(mine), size):
            pairs = sorted(mine.items())
            tops[bucket] = {"count": len(mine), "size": size, "entries": packed(rows_table(pairs, ENTRIES)) if mine else None, "cid": None, "nodes": None}  # fmt: skip
            continue
        known = before.get(bucket, {}).get("nodes")
        changed = [item for item in (dirty if known else set(mine)) if item_key(item).startswith(bucket)]
        top, nodes = subtree(bucket, known, changed, _states(mine), blobs.__setitem__)
        kept = [(b"", path, node.cid, node.count, node.size) for path, node in sorted(nodes.nodes.items())]
        tops[bucket] = {"count": top.count, "size": top.size, "cid": top.cid, "entries": None, "nodes": packed(rows_table(kept, TREE_NODES))}  # fmt: skip
    return tops


@pytest.mark.parametrize(
    ("count", "depth"), [(0, 0), (5, 1), (12, 2), (130, 1), (500, 2), (3000, 1), (6000, 2), (900, 0)]
)
def test_buckets_joined_are_the_tree_of_all_items(count: int, depth: int) -> None:
    """At once, after changes and after removals; and no blob is put that the tree does not name."""
    chance = random.Random(count)
    items = dict(_item(number) for number in range(count))
    before: dict[str, Any] = {}
    dirty: set[ItemId] = set(items)
    kept: set[Cid] = set()
    for _ in range(4):
        blobs: dict[Cid, bytes] = {}
        before = _tops(items, depth, before, blobs, dirty)
        top = join_tops(before, blobs.__setitem__)
        wanted: dict[Cid, bytes] = {}
        assert top == build(items.items(), wanted.__setitem__)
        assert set(blobs) <= set(wanted)
        kept |= set(blobs)
        assert set(wanted) <= kept
        dirty = set(chance.sample(sorted(items), min(len(items), count // 3)))
        for item in dirty:
            if chance.random() < 0.5:
                del items[item]
            else:
                items[item] = EncodedItem(items[item][:-1] + bytes([chance.randrange(99)]))
        fresh = dict(_item(chance.randrange(10**6)) for _ in range(count // 9))
        items |= fresh
        dirty |= set(fresh)


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_only_blobs_that_were_not_there_are_put(share: float) -> None:
    """Whether a few items changed, and the nodes above them are renewed, or so many that all are grown anew."""
    items = dict(_item(number) for number in range(4000))
    first: dict[Cid, bytes] = {}
    top, nodes = subtree("", None, [], _states(items), first.__setitem__)
    assert top == build(items.items(), {}.__setitem__)
    before = packed(
        rows_table([(b"", path, node.cid, node.count, node.size) for path, node in nodes.nodes.items()], TREE_NODES)
    )
    again: dict[Cid, bytes] = {}
    changed = sorted(items, key=item_key)[: int(4000 * share)]  # neighbours: the pages of the others stay
    items |= {item: EncodedItem(items[item][:-1] + b"\x63") for item in changed}
    wanted: dict[Cid, bytes] = {}
    renewed, _ = subtree("", before, changed, _states(items), again.__setitem__)
    assert renewed == build(items.items(), wanted.__setitem__)
    assert again == {cid: blob for cid, blob in wanted.items() if cid not in first}


def test_notes_below_a_whole_bucket_are_left_out() -> None:
    def note(bucket: str, turn: int, *, whole: bool, party: str = "aa") -> str:
        return json.dumps({"state": {"party": party, "bucket": bucket, "turn": turn, "whole": whole}})

    notes = [
        note("3f", 1, whole=False),
        note("3f", 5, whole=True),
        note("3f", 6, whole=False),
        note("3e", 1, whole=False),
    ]
    assert [(place["bucket"], place["turn"]) for place in states_noted(notes)] == [("3f", 5), ("3f", 6), ("3e", 1)]
    others = [note("3f", 1, whole=False, party="bb")]
    assert states_noted(others + notes)[0]["party"] == "bb", "another party's bucket of that name is another bucket"
    assert spread("3f", 1) == ["3"]
    assert spread("3", 2)[:2] == ["30", "31"]
    assert len(spread("", 2)) == 256


def test_moves_that_were_taken_back_are_gone() -> None:
    rows = [
        (b"p", 1, 4, b"feed-one", 3, 0, b"item-a", 0, None),
        (b"p", 1, 4, b"feed-one", 4, 0, b"item-b", 0, b"parent"),
        (b"p", 5, 0, b"", 0, 0, b"item-a", -1, None),
        (b"p", 6, 2, b"feed-one", 1, 0, b"item-a", 1, None),
    ]
    moves = party_moves([packed(rows_table([row], MOVES)) for row in rows])
    assert [(move.stamp.seq, move.item) for move in moves] == [(1, b"item-a"), (4, b"item-b")]


# who exists


def test_edges_are_closed_like_a_slow_search_says() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        items = [ItemId(bytes([number]) * 16) for number in range(9)]
        roots = {item for item in items if chance.random() < 0.2}
        edges = []
        for item in items:
            if item not in roots and chance.random() < 0.8:
                for _ in range(chance.choice((1, 1, 2))):
                    edges.append((item, chance.choice(items), CREATED))
            if chance.random() < 0.2:
                edges.append((item, None, RIVAL))
            if chance.random() < 0.3:
                edges.append((item, chance.choice(items), PLACED))
        created = {item for item, _, why in edges if why in (CREATED, RIVAL)}
        exists = roots | {item for item, _, why in edges if why == RIVAL}
        for _ in items:
            exists |= {item for item, parent, why in edges if why == CREATED and parent in exists}
        told = [(item, parent, why, parent not in roots | created) for item, parent, why in edges]
        closed = close_edges(told)
        named = {parent for _, parent, why in edges if why in (CREATED, PLACED) and parent is not None}
        assert closed.absent & named == named - exists
        assert closed.naming == {item for item, parent, why in edges if why != RIVAL and parent not in exists}


def test_what_lacked_something_that_came_is_folded_again_all_the_way_down() -> None:
    a, b, c, d = (ItemId(bytes([number]) * 16) for number in range(4))
    assert close_lacking([(b, a), (c, b), (d, d)], [a]) == {b, c}
    assert close_lacking([(a, a)], [a]) == {a}


# on Spark, against peers


def _publish(circle: Circle, lake: Path, name: str = "ann") -> None:
    circle.peers[name].party(circle.key).flush()
    publish(circle.folder / name, lake)


def _rejected(circle: Circle, name: str = "ann") -> set[tuple[bytes, int, int, str, str]]:
    rows = circle.party(name).rejected()
    return {(bytes(row.feed), row.seq, row.position, str(row.reason), row.detail) for row in rows}


def test_cids_and_rejects_are_the_peers_at_once_and_in_steps(spark: Any, tmp_path: Path) -> None:
    """Two parties in one lake: all models, moves, access rules, deletes, undo; then more of it; then a removal."""
    lake = tmp_path / "lake"
    trip = Circle(tmp_path / "trip", "ann", "bob", "cat")
    other = Circle(tmp_path / "other", "ann", "bob")
    stages = Stages(spark, lake, tmp_path / "out")
    ann = trip.party("ann")
    board = ann.create("property-set", type="board", title="Summer")
    tasks = [ann.create("property-set", type="task", parent=board, text=f"t{number}").id for number in range(30)]
    text, array, log = (ann.create(model, parent=board).id for model in ("text", "growable-array", "threaded-log"))
    trip.agree()
    for number, name in enumerate(("bob", "cat")):
        party = trip.party(name)
        for task in tasks[number::3]:
            party.get(task)["done"] = name
        party.get(text).insert(0, name)
        party.get(array).append(number)
        party.get(log).post(f"from {name}")
        party.get(tasks[number]).move(party.get(tasks[number + 4]))
        party.get(tasks[5]).delete()
    ann.get(tasks[7]).restrict(roles=["owner"])
    other.party("bob").create("property-set", n=1)
    # Cat has not heard of the rule: by the canonical order some of this is denied.
    for number in range(3):
        trip.party("cat").get(tasks[7])["late"] = number
    cids = {trip.key: trip.agree(), other.key: other.agree()}
    _publish(trip, lake)
    _publish(other, lake)
    assert stages.run() == cids
    assert stages.rejected(trip.key) == _rejected(trip)
    assert _rejected(trip), "something was denied"

    cat = trip.party("cat")
    with cat.batch():
        fresh = cat.create("property-set", parent=cat.get(tasks[1]), n=1)
        cat.get(text).insert(2, "!")
    cat.get(tasks[2])["done"] = None
    cat.undo()
    trip.party("bob").get(fresh.id if fresh.id in _ids(trip, "bob") else tasks[3])["n"] = 2
    cids[trip.key] = trip.agree()
    _publish(trip, lake)
    assert stages.run() == cids
    assert stages.rejected(trip.key) == _rejected(trip)
    changed = {row["item"] for row in stages.states()}
    assert len(changed) <= 6, "only what changed is written"

    # Bob hears of more work by cat, and builds on it; ann has not, and removes her: all of that goes again.
    doomed = cat.create("property-set", parent=cat.get(tasks[1]), n=1)
    below = cat.create("property-set", parent=doomed, n=2)
    cat.get(tasks[8])["done"] = "cat"
    cat.get(tasks[9]).move(doomed)
    trip.meet("cat", "bob")
    bob = trip.party("bob")
    bob.get(below.id)["n"] = 3
    bob.create("property-set", parent=bob.get(below.id), n=4)
    bob.get(tasks[10]).move(bob.get(below.id))
    bob.flush()
    cids[trip.key] = bob.snapshot().cid
    _publish(trip, lake, "bob")
    assert stages.run() == cids
    ann.members.remove(trip.peers["cat"].identity)
    cids[trip.key] = trip.agree()
    _publish(trip, lake)
    assert stages.run() == cids
    assert stages.rejected(trip.key) == _rejected(trip)
    assert {"beyond-cut", "no-parent", "no-item"} <= {reason for *_, reason, _ in _rejected(trip)}
    assert stages.outcome is not None
    assert stages.outcome.again.history


def _ids(circle: Circle, name: str) -> set[ItemId]:
    return {item.id for item in circle.party(name).query().all()}


def test_a_party_with_an_unknown_model_gets_no_cid(spark: Any, tmp_path: Path) -> None:
    circle = Circle(tmp_path / "homes", "ann")
    circle.peers["ann"].models.register(_Counter)
    circle.party("ann").create("story-counter")
    circle.agree()
    _publish(circle, tmp_path / "lake")
    stages = Stages(spark, tmp_path / "lake", tmp_path / "out")
    assert stages.run() == {circle.key: None}
    assert stages.roots[circle.key]["unknown"] == "story-counter@1"
    assert stages.roots[circle.key]["items"] == 2
    assert item_text(ItemId(stages.states()[0]["item"]))
    assert unpacked(packed(pa.table({"a": [1]}))).to_pylist() == [{"a": 1}]


class _Counter:
    name, version = "story-counter", 1

    def __init__(self) -> None:
        self.count = 0

    def apply(self, operation: Any, stamp: Any) -> None:
        self.count += 1

    def value(self) -> int:
        return self.count
