"""A step of a stream in one task or on all cores: the same rows and the same states, which are those of a batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echostore.kernel.errors import Corrupt, StorageFailed
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.overlay import newest_overlay
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PLACEMENTS, PROPERTIES, table_kind
from echostore.pipeline.output.writing import Place
from echostore.pipeline.stages.writers import write_arrow
from echostore.pipeline.streaming import spreading
from echostore.pipeline.streaming.following import changed_parties
from echostore.pipeline.streaming.jobs import dealt
from echostore.pipeline.streaming.overlaying import Folded
from echostore.pipeline.streaming.spreading import SPREAD_BLOCKS, cut_slices, worth_spreading
from spark.lake_slices import Slices
from spark.party_stories import Stories
from spark.stream_jobs import HereJobs, Steps, held_moves, held_states

MODELS = "spark.story_models"
MIXED = (("property-set", 40), ("text", 30), ("growable-array", 20), ("threaded-log", 10))
STORIES = (0, 1, 4, 7, 15, 17, 22, 23)
TABLES = {"items": ITEMS, "properties": PROPERTIES, "links": LINKS, "placements": PLACEMENTS}


def always(blocks: int, step_blocks: int, width: int) -> bool:
    return True


def never(blocks: int, step_blocks: int, width: int) -> bool:
    return False


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parties are spread over many buckets, as large ones are."""
    monkeypatch.setattr("echostore.pipeline.stages.parcels.MESSAGES_PER_BUCKET", 8)
    monkeypatch.setattr(spreading, "SLICE_BLOCKS_MIN", 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """All models, lies, forks, removals, readers, children, moves; and a party of generated messages with faults."""
    folder = tmp_path_factory.mktemp("spread")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        with Stories(folder, seed=31) as stories:
            for number in STORIES:
                stories.tell(number)
            lake = stories.publish()
            generate(Shape(feeds=4, messages=300, items=20, mix=MIXED, faults=19), lake)
            yield lake


def rows(out: Path) -> dict[str, list[str]]:
    """What the overlay's tables hold, row by row."""
    overlay = newest_overlay(out)
    assert overlay is not None
    return {
        name: sorted(
            str(row) for file in overlay.files(table_kind(name)) for row in read_table(out, file, schema).to_pylist()
        )
        for name, schema in TABLES.items()
    }


def streamed(whole: Lake, folder: Path, **more: Any) -> tuple[Steps, list[Folded]]:
    slices = Slices(whole, folder / "lake", seed=2, slices=4)
    steps = Steps(folder / "lake", folder / "out", models=MODELS, **more)
    folded = []
    while slices.publish():
        folded.append(steps.step())
    return steps, folded


def test_one_task_or_all_cores_rows_states_and_verdicts_are_the_same(whole: Lake, tmp_path: Path) -> None:
    one, of_one = streamed(whole, tmp_path / "one", spread=never)
    all_cores, of_all = streamed(whole, tmp_path / "all", spread=always)
    assert [(each.blocks, each.waiting, each.deferred) for each in of_one] == [
        (each.blocks, each.waiting, each.deferred) for each in of_all
    ]
    assert sum(each.blocks for each in of_all) > 400
    assert held_states(one.out) == held_states(all_cores.out)
    assert held_moves(one.out) == held_moves(all_cores.out)
    assert held_moves(one.out), "something moved"
    assert rows(one.out) == rows(all_cores.out)


class Watched(HereJobs):
    """Tells what tasks were given, and how many of them had work."""

    width = 4

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}
        self.told: list[int] = []

    def run(self, rows: pa.Table, task: Any, schema: pa.Schema) -> list[Any]:
        sizes = self.parts.setdefault(type(task).__name__, [])
        size = -(-len(rows) // self.width)
        sizes += [len(rows.slice(at, size)) for at in range(0, len(rows), size)]
        found = super().run(rows, task, schema)
        self.told.append(sum(len(value) for row in found for value in row.values() if isinstance(value, bytes)))
        return found


def test_one_party_is_work_for_all_cores_and_no_blocks_come_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(feeds=6, messages=2400, items=60, seed=3), lake)
    jobs = Watched()
    monkeypatch.setattr("spark.stream_jobs.HereJobs", lambda: jobs)
    steps = Steps(tmp_path / "lake", tmp_path / "out", spread=always)
    folded = steps.step()
    assert folded.blocks == 2400
    assert len(jobs.parts["_Verifying"]) >= 3, "feeds are verified apart"
    assert len(jobs.parts["_Dealing"]) == 4
    assert jobs.parts["_ReducingShare"] == [1, 1, 1, 1], "each core has its buckets"
    assert "Folding" not in jobs.parts
    bytes_read = sum(file.stat().st_size for file in (tmp_path / "lake" / "blocks").rglob("*.parquet"))
    assert sum(jobs.told) < bytes_read / 10, "cuts, and names of files"
    fresh = Steps(tmp_path / "lake", tmp_path / "at-once", spread=never)
    fresh.step()
    assert held_states(steps.out) == held_states(fresh.out)


def test_a_step_with_little_that_is_new_stays_in_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(feeds=2, messages=400, items=20, seed=4), whole)
    slices = Slices(whole, tmp_path / "lake", seed=1, slices=2, disorder=0.0)
    seen: list[tuple[int, int]] = []

    def asked(blocks: int, step_blocks: int, width: int) -> bool:
        seen.append((blocks, step_blocks))
        return False

    steps = Steps(tmp_path / "lake", tmp_path / "out", spread=asked)
    slices.publish()
    steps.step()
    slices.publish()
    steps.step()
    assert len(seen) == 2
    assert all(blocks == of_step for blocks, of_step in seen)
    assert 195 < seen[1][0] < 205, "what is new, not what there is"
    anew = Steps(tmp_path / "lake", tmp_path / "out", spread=asked)
    anew.overlaying.advance(anew.follower.newest(), changed_parties({}, anew.follower.newest()))
    assert all(blocks == 0 for blocks, _ in seen[2:]), "after a start, what the overlay has is not new"


def test_it_is_spread_where_that_pays() -> None:
    much = 2 * SPREAD_BLOCKS
    assert worth_spreading(much, much, 2)
    assert not worth_spreading(much - 1, much, 2), "a small step"
    assert worth_spreading(much - 1, much, 4), "where three others share it"
    assert not worth_spreading(10 * much, 10 * much, 1), "one core"
    assert not worth_spreading(much, 2 * much, 2), "the other core has another party"
    assert worth_spreading(much, 2 * much, 4)


def test_damage_puts_off_the_party_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(parties=2, feeds=2, messages=200, items=10, seed=5), lake)
    bad = min(lake.at().runs()["party"].to_pylist())
    whole = spreading.order_here
    failing: list[Exception] = []

    def damaged(*given: Any) -> Any:
        if bad in given[1]["party"].to_pylist():
            raise failing[-1]
        return whole(*given)

    monkeypatch.setattr(spreading, "order_here", damaged)
    errors = {"a file is damaged": Corrupt("a file is damaged"), "KeyError: 'x'": KeyError("x")}
    for number, (why, error) in enumerate(errors.items()):
        failing.append(error)
        out = tmp_path / f"out-{number}"
        assert Steps(tmp_path / "lake", out, spread=always).step().deferred == {bad: why}
        others = set(lake.at().runs()["party"].to_pylist()) - {bad}
        assert {party for party, _ in held_states(out)} == others
    failing.append(StorageFailed("no space left"))
    with pytest.raises(StorageFailed):
        Steps(tmp_path / "lake", tmp_path / "full", spread=always).step()


def test_what_tasks_leave_for_each_other_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(feeds=2, messages=100, items=10, seed=6), lake)
    made: list[Path] = []

    def watched(place: Place, name: str, table: pa.Table) -> str:
        path = write_arrow(place, name, table)
        made.append(Path(path))
        assert made[-1].exists()
        return path

    monkeypatch.setattr(spreading, "write_arrow", watched)
    Steps(tmp_path / "lake", tmp_path / "out", spread=always).step()
    assert {path.name.split("-")[0] for path in made} == {"verified", "parcels"}
    assert not [path for path in made if path.exists()]


def test_rows_are_dealt_so_that_no_core_has_much_more_than_another() -> None:
    loads = [50, 1, 1, 1, 40, 30, 2, 2, 9]
    order = dealt(loads, 4)
    assert sorted(order) == list(range(9))
    parts = [sum(loads[row] for row in order[at : at + 3]) for at in range(0, 9, 3)]
    assert max(parts) <= 55
    assert dealt([5], 4) == [0]
    assert dealt([1, 2, 3], 1) == [0, 1, 2]
    slices = [{"start": 10, "end": 110, "row": 1000, "feed": b"f"}, {"start": 0, "end": 3, "row": 7, "feed": b"g"}]
    parts_of = cut_slices(slices, 2)
    assert [(each["start"], each["end"], each["row"]) for each in parts_of if each["feed"] == b"g"] == [(0, 3, 7)]
    cut = [each for each in parts_of if each["feed"] == b"f"]
    assert [each["start"] for each in cut[1:]] == [each["end"] for each in cut[:-1]]
    assert all(each["row"] - each["start"] == 990 for each in cut)
    assert (cut[0]["start"], cut[-1]["end"], len(cut) >= 7) == (10, 110, True)
