"""Epochs as the floor of a party: lakes without what lies below, epochs that follow each other, and rules that come late."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.ids import FeedId, FeedKey, Link, feed_id
from echostore.kernel.order import DATA, Cut, FeedCursor, Orderer, Waits
from echostore.kernel.timeframe import Dependency
from echostore.peer.epoch_gc import run_gc
from echostore.pipeline.audit import audit_lake
from echostore.pipeline.lake.layout import bases_of
from echostore.pipeline.output import reading
from echostore.pipeline.run import RunRequest
from echostore.pipeline.schemas import RUNS
from echostore.pipeline.stages.lookups import MISSING, Target, named
from echostore.pipeline.stages.planning import BUCKET, NO_FILE, Before, plan_pieces
from echostore.pipeline.stages.verdicts import Interval, allowed_last
from peer_builder import Circle
from spark.circle_lake import NAMES, Told
from spark.engines import Engines
from spark.stream_jobs import Steps
from test_discarding import discarded, seen_by_all, stories
from test_stale_messages import agreed_epoch


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


def new_rows(out: Path, kind: str) -> int:
    """Rows of the files of a kind that the newest commit wrote."""
    commit, _ = reading.newest(out)
    assert commit is not None
    return sum(file.rows for file in commit.files.get(kind, ()) if f"epoch={commit.number}/" in file.path)


def without_a_blob(file: Path) -> None:
    """The same file, lacking its last blob."""
    about = pq.ParquetFile(file).metadata.metadata[b"echostore.base"].decode()
    table = pq.ParquetFile(file).read()
    file.unlink()
    with pq.ParquetWriter(file, table.schema, store_schema=False) as writer:
        writer.write_table(table.slice(0, len(table) - 1))
        writer.add_key_value_metadata({"echostore.base": about})


def test_a_lake_that_never_had_the_blocks_below_an_epoch_has_the_cid_of_the_peers(
    engines: Engines, circle: Circle, told: Told, tmp_path: Path
) -> None:
    ann = circle.party("ann")
    other = circle.peers["ann"].create_party("Other")
    other.create("property-set", n=1)
    other.flush()
    _, kept, _, posts = stories(ann)
    long = ann.create("text")
    long.insert(0, "many words " * 2000)
    seen_by_all(circle)
    discarded(circle, *NAMES)
    circle.get("bob", kept)["n"] = 3
    circle.get("cat", posts).post("between the epochs")
    seen_by_all(circle)
    agreed_epoch(circle, *NAMES)
    circle.get("bob", kept)["n"] = 4
    circle.get("bob", long).insert(3, "more ")
    circle.meet_all()
    assert run_gc(ann).blocks > 0
    assert told.publish().compacted[ann.key] > 0, "nobody has the beginning"
    told.compare(told.build())
    assert audit_lake(engines.session, told.lake).counts == {}, "what is not there was freed, not lost"
    # What comes later names blocks that the lake never had.
    circle.get("cat", kept).move(None)
    circle.get("cat", long).insert(0, "and ")
    circle.party("bob").create("property-set", parent=circle.get("bob", kept), n=5)
    circle.meet_all()
    found = told.agreed()
    assert new_rows(tmp_path / "out", "states") <= 3, "on the last commit"
    # A snapshot that is not whole is told for its party alone.
    files = sorted((told.lake / bases_of(ann.key)).glob("*.parquet"), key=lambda path: path.stat().st_mtime)
    without_a_blob(files[-1])
    done = engines.run(RunRequest(lake=told.lake, out=tmp_path / "damaged"))
    results = {each.party: each for each in done.results()}
    assert (results[ann.key].state, results[ann.key].cid) == ("failed", None)
    assert f"{files[-1].name} lacks the blob" in results[ann.key].detail
    assert (results[other.key].state, results[other.key].cid) == ("built", other.snapshot().cid)
    files[-1].unlink()
    assert told.publish().bases == 1
    assert told.agreed("mended").cid == found.cid


def test_the_next_epoch_costs_what_changed(circle: Circle, told: Told, tmp_path: Path) -> None:
    ann, out = circle.party("ann"), tmp_path / "out"
    items = [ann.create("property-set", n=number) for number in range(60)]
    stories(ann)
    seen_by_all(circle)
    told.agreed()
    first = new_rows(out, "states")
    assert first >= 60
    discarded(circle, *NAMES)
    told.agreed()
    assert 0 < new_rows(out, "states") < 20, "an epoch whose items are almost all known"
    gone, *_ = stories(ann)
    items[7]["n"] = 700
    told.agreed()
    seen_by_all(circle)
    discarded(circle, *NAMES)
    size = sum(path.stat().st_size for path in (told.lake / bases_of(ann.key)).iterdir())
    assert told.publish().bases == 1
    published = sum(path.stat().st_size for path in (told.lake / bases_of(ann.key)).iterdir()) - size
    assert published < size, "blobs that the lake has are not published again"
    found = told.agreed()
    assert not ann.has(gone.id)
    assert 0 < new_rows(out, "states") < 20
    assert found.since == 1, "built on what the first commit has"
    items[8]["n"] = 800
    circle.meet_all()
    told.agreed()
    agreed_epoch(circle, *NAMES)
    told.agreed()
    assert new_rows(out, "states") == 0, "an epoch that says nothing new"
    told.agreed("fresh")
    shown = {row["item"] for row in told.rows("items")}
    assert shown == {row["item"] for row in told.rows("items", "fresh")}


def test_a_rule_that_comes_late_refuses_nothing_inside_an_epoch_that_left_nothing_out(
    circle: Circle, told: Told, tmp_path: Path
) -> None:
    cat = circle.party("cat")
    ruled = cat.create("property-set", n=1)
    circle.meet_all()
    # Cat is away, and makes a rule that sorts below what Bob writes meanwhile.
    ruled.restrict(roles=["admin"])
    for n in range(3):
        circle.get("bob", ruled)["n"] = n
    circle.meet("ann", "bob")
    told.agreed()
    steps = Steps(told.lake, tmp_path / "out")
    agreed_epoch(circle, "ann", "bob")
    circle.get("bob", ruled)["n"] = "above the epoch"
    circle.meet("ann", "bob")
    assert told.publish().bases == 1
    folded = steps.step()
    assert (folded.deferred, folded.blocks > 0) == ({}, True), "a stream goes on from where it stood"
    told.agreed()
    circle.meet_all()
    found = told.agreed()
    assert circle.get("ann", ruled)["n"] == 2, "inside it counts, above it the rule does"
    assert told.agreed("fresh").cid == found.cid


# without Spark

FEED, OTHER = FeedKey(b"f" * 32), FeedKey(b"g" * 32)
LENGTH, DEPTH = 10, 14


@given(seq=st.integers(0, LENGTH + 1), depth=st.integers(0, DEPTH + 2), prefix=st.sampled_from([b"a" * 16, b"z" * 16]))
def test_below_the_floor_a_dependency_is_judged_as_the_orderer_judges_it(seq: int, depth: int, prefix: bytes) -> None:
    link = Link(b"a" * 32)
    orderer = Orderer(
        fetch=lambda cursor, at: pytest.fail("nothing is read"),
        lookup=lambda cursor, at: pytest.fail("nothing is looked up"),
        base={feed_id(FEED): Cut(LENGTH, link, DEPTH)},
    )
    cursor = FeedCursor(FEED, DATA, length=LENGTH, held=LENGTH, link=link, depth=DEPTH)
    orderer.add(cursor)
    verdict = orderer._check_dependency(Dependency(feed_id(FEED), seq, prefix, depth), cursor, None)
    row = {
        **dict.fromkeys(("party", "feed", "piece", "names", "bucket")),
        "seqs": np.array([3], np.int64).tobytes(),
        "named_seqs": np.array([seq], np.int64).tobytes(),
        "named_depths": np.array([depth], np.int64).tobytes(),
        "named_links": prefix,
        "backwards": False,
    }
    below = Target("lake", 0, np.array([0], np.int64).tobytes(), 0, LENGTH, NO_FILE, DEPTH - LENGTH + 1, None, None)
    fault = named(row, [below])["fault"]
    assert fault == (MISSING if isinstance(verdict, Waits) else None if verdict is None else str(verdict))


def runs(*stretches: tuple[int, int, bytes, bytes]) -> pa.Table:
    rows = [
        (b"p", FEED, False, start, end, previous, last, 0, "file", 1000 + start, 100)
        for start, end, previous, last in stretches
    ]
    return pa.Table.from_pylist([dict(zip(RUNS.names, row, strict=True)) for row in rows], RUNS)


def planned(
    floor: int, *stretches: tuple[int, int, bytes, bytes], before: Before | None = None
) -> list[tuple[Any, ...]]:
    at = Before(floor, b"c" * 32, floor + 4)
    known = {} if before is None else {(b"p", bytes(FEED)): before}
    plan = plan_pieces(runs(*stretches), before=known, floors={(b"p", bytes(FEED)): at})
    assert list(plan.bases) == [0]
    names = ("start", "end", "file", "row", "old", "previous")
    return [tuple(row[name] for name in names) for row in plan.pieces.to_pylist()]


def test_what_lies_below_a_floor_is_planned_without_a_file_whether_it_is_there_or_not() -> None:
    cut, last = b"c" * 32, b"l" * 32
    virtual = (0, 10, "", 5, True, None)
    above = (10, 30, "file", 1010, False, cut)
    assert planned(10, (0, 30, bytes(32), last)) == [virtual, above], "all is there"
    assert planned(10, (4, 30, b"x" * 32, last)) == [virtual, above], "the beginning is gone"
    assert planned(10, (10, 30, cut, last)) == [virtual, above], "just what is above"
    assert planned(10) == [virtual], "nothing but the epoch"
    assert planned(10, (0, 10, bytes(32), cut)) == [virtual]
    goes_on = planned(10, (0, 30, bytes(32), last), before=Before(20, b"m" * 32, 40))
    assert goes_on == [virtual, (10, 20, "file", 1010, True, None), (20, 30, "file", 1020, False, b"m" * 32)]
    behind = planned(10, (0, 30, bytes(32), last), before=Before(7, b"m" * 32, 40))
    assert behind == [virtual, above], "a commit below the epoch is of no use"
    rival = planned(10, (0, 30, bytes(32), last), (5, 12, b"r" * 32, b"q" * 32))
    assert {(row[0], row[1]) for row in rival if row[2]} == {(10, 12), (12, 30)}
    assert all(row[5] == cut for row in rival if row[0] == 10), "who does not follow the epoch's branch is found out"


def test_a_long_floor_is_cut_into_the_buckets_in_which_dependencies_are_looked_up() -> None:
    pieces = planned(BUCKET + 5, (BUCKET + 5, BUCKET + 9, b"c" * 32, b"l" * 32))
    assert [row[:3] for row in pieces] == [
        (0, BUCKET, ""),
        (BUCKET, BUCKET + 5, ""),
        (BUCKET + 5, BUCKET + 9, "file"),
    ]


def test_what_an_epoch_holds_is_in_the_timeframe_for_good() -> None:
    removed = [Interval(0, 4, "editor")]
    assert allowed_last(removed, 12) == 3
    assert allowed_last(removed, 12, floor=10) == 9
    assert allowed_last([Interval(0, None, "editor")], 12, floor=10) == 11
    assert allowed_last([], 0) is None


ABOUTS = ({"number": 1, "below": ["zz"]}, {"below": []}, {"number": 1, "below": ["ab" * 32] * 9}, [])


def test_a_file_that_does_not_say_what_it_relies_on_is_damaged(tmp_path: Path) -> None:
    from echostore.kernel.errors import Corrupt
    from echostore.pipeline.lake.bases import has_base, open_base
    from echostore.pipeline.models import model_factory
    from echostore.pipeline.schemas import BLOBS
    from echostore.wire.base_epoch import BaseName

    party, genesis = b"p" * 32, b"h" * 32
    folder = tmp_path / bases_of(party)
    folder.mkdir(parents=True)
    name = BaseName(1, genesis, FeedId(b"s" * 36), FeedId(b"c" * 36), discards=False)  # type: ignore[arg-type]  # no CIDs
    for about in (None, "nonsense", *map(json.dumps, ABOUTS)):
        with pq.ParquetWriter(folder / f"{genesis.hex()}.parquet", BLOBS, store_schema=False) as writer:
            writer.write_table(BLOBS.empty_table())
            if about is not None:
                writer.add_key_value_metadata({"echostore.base": about})
        assert has_base(tmp_path, party, genesis)
        with pytest.raises(Corrupt, match="which epoch it is of"):
            open_base(tmp_path, party, name, model_factory(None))
    with pq.ParquetWriter(folder / f"{genesis.hex()}.parquet", BLOBS, store_schema=False) as writer:
        writer.write_table(BLOBS.empty_table())
        writer.add_key_value_metadata({"echostore.base": json.dumps({"number": 2, "below": ["ab" * 32]})})
    with pytest.raises(Corrupt, match="is missing: a later snapshot relies on it"):
        open_base(tmp_path, party, name, model_factory(None))
