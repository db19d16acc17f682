"""Parties that stand on an epoch which left something out: Spark folds from it as every peer does, to the same CID."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import POSITION_BITS, Cid, FeedKey, feed_id, item_text
from echostore.kernel.party.credentials import EpochGenesis, TimeframeEntry
from echostore.kernel.reasons import Reason
from echostore.peer.epochs import Epochs
from echostore.pipeline.counting import MOVED
from echostore.pipeline.lake.bases import has_base
from echostore.pipeline.lake.layout import BASES_FOLDER
from echostore.pipeline.output.epochs import latest
from echostore.pipeline.stages.standing import STANDING, Bases, above_bases, check_reached
from echostore.wire.cids import cid_text
from echostore.wire.tree import verify_tree
from peer_builder import Circle
from spark.circle_lake import NAMES, Told
from spark.engines import Engines
from spark.stream_jobs import Steps, held_states
from test_discarding import discarded, seen_by_all, stories


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES) as made:
        yield made


@pytest.fixture
def told(engines: Engines, circle: Circle, tmp_path: Path) -> Told:
    return Told(engines, circle, tmp_path)


def test_a_party_that_discarded_has_the_cid_of_its_peers(circle: Circle, told: Told, tmp_path: Path) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    gone, kept, child, posts = stories(ann)
    rescued = ann.create("property-set", parent=gone, n=1)
    rescued.move(kept)
    long = ann.create("text")
    long.insert(0, "many words " * 9000)
    circle.meet_all()
    told.agreed()
    seen_by_all(circle)
    discarded(circle, *NAMES)
    base = ann.runtime.processor.base
    assert base is not None
    assert base.record(gone.id) is None
    assert base.record(rescued.id) is not None
    assert told.publish().bases == 1
    assert has_base(told.lake, ann.key, base.name.genesis)
    found = told.agreed()
    shown = {row["item"] for row in told.rows("items")}
    assert {item_text(each.id) for each in (kept, rescued, posts, long)} <= shown
    assert not {item_text(each.id) for each in (gone, child)} & shown
    # What is built on top of it costs what is new, and is the same as built at once.
    circle.get("bob", kept)["n"] = 3
    circle.get("bob", posts).post("newer")
    circle.get("bob", long).insert(0, "more ")
    bob.create("property-set", parent=circle.get("bob", kept), n=4)
    circle.get("bob", rescued).move(None)
    circle.meet_all()
    later = told.agreed()
    assert later.since == found.since, "built on the last commit"
    assert told.agreed("fresh").cid == later.cid
    ready = latest(tmp_path / "out", ann.key)
    assert ready is not None
    assert cid_text(ready.cid) == later.cid
    assert verify_tree(ready.root.index_root, ready.root.item_count, dict(ready.blobs()).get).ok


def test_the_epoch_beside_one_that_nobody_accepts_is_the_base_in_spark_as_well(circle: Circle, told: Told) -> None:
    ann, cat = circle.party("ann"), circle.party("cat")
    ann.members.change_role(cat.peer.identity, "admin")
    gone, kept, _, _ = stories(ann)
    seen_by_all(circle)
    true = EpochGenesis(1, b"", Cid(ann.snapshot().root.index_root), timeframe=place_of(ann))
    ahead = tuple(replace(entry, seq=entry.seq + 1000) for entry in true.timeframe)
    cat.members.issue_claim(replace(true, discard_before_ms=10**15))
    cat.members.issue_claim(replace(true, timeframe=ahead, created_ms=1))
    circle.meet_all()
    assert [epoch.final for epoch in Epochs(ann).chain()] == [False]
    told.agreed()
    assert discarded(circle, *NAMES) == 1, "it has the number of what is passed over"
    assert told.publish().bases == 1
    told.agreed()
    shown = {row["item"] for row in told.rows("items")}
    assert item_text(kept.id) in shown
    assert item_text(gone.id) not in shown, "the epoch left it out"
    ann.members.remove(circle.party("cat").peer.identity)
    circle.get("bob", kept)["n"] = 9
    circle.meet("ann", "bob")
    told.agreed()


def place_of(party: Any) -> tuple[TimeframeEntry, ...]:
    entries = party.snapshot().root.timeframe
    return tuple(TimeframeEntry(entry.feed_key, entry.seq, entry.link) for entry in entries)


def test_what_comes_late_is_folded_from_the_epoch(circle: Circle, told: Told) -> None:
    ann, cat = circle.party("ann"), circle.party("cat")
    gone, kept, _, _ = stories(ann)
    circle.meet_all()
    ruled, diary = cat.create("property-set", n=1), cat.create("threaded-log")
    diary.post("old")
    diary.set_retention(count_max=1)
    diary.post("new")
    diary.move(circle.get("cat", kept))
    seen_by_all(circle)
    # Cat is away while the others go on: a write on ground that is discarded, and a rule that comes late.
    circle.get("cat", gone).restore()
    cat.create("property-set", parent=circle.get("cat", gone), n=1)
    circle.get("cat", kept).move(circle.get("cat", gone))
    for item in (ruled, diary):
        item.restrict(roles=["admin"])
    for n in range(3):
        circle.get("bob", ruled)["n"] = n
    circle.meet("ann", "bob")
    told.agreed()
    discarded(circle, "ann", "bob")
    told.agreed()
    circle.get("bob", ruled)["n"] = "above the epoch"
    circle.get("bob", diary).post("above the epoch")
    circle.meet("ann", "bob")
    told.agreed()
    circle.meet_all()
    found = told.agreed()
    assert told.agreed("fresh").cid == found.cid
    mine = sorted((each.feed.hex(), each.seq, str(each.reason)) for each in ann.rejected())
    assert sum(reason == Reason.DISCARDED for _, _, reason in mine) >= 3
    for out in ("out", "fresh"):
        assert sorted((row["feed"], row["seq"], row["reason"]) for row in told.rows("rejects", out)) == mine


def test_the_next_epoch_takes_the_place_of_the_last(circle: Circle, told: Told) -> None:
    ann = circle.party("ann")
    stories(ann)
    seen_by_all(circle)
    discarded(circle, *NAMES)
    told.agreed()
    other, *_ = stories(ann)
    anchor, before = str(ann.anchor()), ann.snapshot().cid
    seen_by_all(circle)
    discarded(circle, *NAMES)
    assert not ann.has(other.id)
    told.agreed()
    ann.create("property-set", n=9)
    told.agreed()
    moment = told.build_at(anchor)
    assert (moment.state, moment.cid) == ("built", before), moment.detail


def test_without_the_snapshot_nothing_is_claimed_until_somebody_publishes_it(circle: Circle, told: Told) -> None:
    ann = circle.party("ann")
    _, kept, _, _ = stories(ann)
    seen_by_all(circle)
    discarded(circle, *NAMES)
    told.publish()
    (file,) = (told.lake / BASES_FOLDER).rglob("*.parquet")
    whole = file.read_bytes()
    file.unlink()
    found = told.build()
    assert (found.state, found.cid) == ("failed", None)
    assert "publish from a home that stands on this epoch" in found.detail
    # Damaged, it is as good as missing, and named.
    file.write_bytes(whole[: len(whole) // 2] + bytes(8) + whole[len(whole) // 2 + 8 :])
    found = told.build("damaged")
    assert (found.state, found.cid) == ("failed", None)
    assert file.name in found.detail
    file.unlink()
    assert told.publish("bob").bases == 1
    circle.get("bob", kept)["n"] = 5
    circle.meet_all()
    told.agreed()


def test_a_stream_goes_on_from_the_epoch_and_leaves_the_next_one_to_a_run(
    circle: Circle, told: Told, tmp_path: Path
) -> None:
    ann = circle.party("ann")
    gone, kept, _, posts = stories(ann)
    seen_by_all(circle)
    circle.get("cat", gone).restore()
    discarded(circle, "ann", "bob")
    told.agreed()
    steps = Steps(told.lake, tmp_path / "out")
    circle.meet_all()
    circle.get("bob", kept)["n"] = 7
    circle.get("bob", posts).post("newer")
    circle.meet_all()
    told.publish()
    folded = steps.step()
    assert (folded.deferred, folded.blocks > 0) == ({}, True)
    told.compare(told.build("fresh"))
    assert held_states(tmp_path / "out") == held_states(tmp_path / "fresh")
    seen_by_all(circle)
    discarded(circle, *NAMES)
    told.publish()
    assert set(steps.step().deferred) == {circle.key}
    told.compare(told.build())


# without Spark


def standing(lengths: dict[bytes, int]) -> Bases:
    """A party `p` that stands on an epoch with so many blocks of each feed."""
    row = {
        "party": b"p",
        "base": b"h" * 32,
        "base_name": b"",
        "base_feeds": b"".join(lengths),
        "base_lengths": np.array(list(lengths.values()), np.int64).tobytes(),
        "base_links": b"".join(bytes(32) for _ in lengths),
        "base_depths": np.array(list(lengths.values()), np.int64).tobytes(),
    }
    return Bases("lake", pa.Table.from_pylist([row], STANDING))


def moved(party: bytes, feed: bytes, start: int, end: int) -> dict[str, Any]:
    return {"party": party, "feed": feed, "start": start, "end": end, "lost": False}


def test_what_lies_inside_an_epoch_counts_for_good_whatever_control_says_later() -> None:
    feed, other = b"f" * 32, b"g" * 32
    bases = standing({feed: 10})
    rows = [moved(b"p", feed, 2, 9), moved(b"p", feed, 4, 15), moved(b"p", other, 2, 9), moved(b"q", feed, 2, 9)]
    table = pa.Table.from_pylist(rows, MOVED)
    assert [(row["party"], row["feed"], row["start"], row["end"]) for row in above_bases(table, bases).to_pylist()] == [
        (b"p", feed, 10, 15),
        (b"p", other, 2, 9),
        (b"q", feed, 2, 9),
    ]
    assert above_bases(table, bases.only([])).equals(table)


def test_an_item_is_inside_an_epoch_by_the_block_that_made_it() -> None:
    feed = b"f" * 32
    bases = standing({feed: 10})
    for seq, inside in ((9, True), (10, False)):
        assert bases.inside(b"p", feed_id(FeedKey(feed)) + (seq << POSITION_BITS).to_bytes(8, "big")) is inside
    assert not bases.inside(b"q", feed_id(FeedKey(feed)) + bytes(8))


def test_an_epoch_whose_blocks_are_not_all_here_is_no_ground_to_stand_on() -> None:
    feed = b"f" * 32
    cuts = pa.table({"party": [b"p"], "feed": [feed], "length": [9]})
    with pytest.raises(Corrupt, match="10 blocks of feed"):
        check_reached(standing({feed: 10}), cuts)
    check_reached(standing({feed: 9}), cuts)
    with pytest.raises(Corrupt, match="and 0 of them"):
        check_reached(standing({b"g" * 32: 1}), cuts)
