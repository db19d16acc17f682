"""What a commit keeps for the next run does not grow with the number of commits, and the next run is none the wiser."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echostore.pipeline import kept
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.output import merging
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import Commit
from echostore.pipeline.output.results import party_results
from echostore.pipeline.output.table_schemas import PARTIES
from echostore.pipeline.output.views import open_views
from echostore.pipeline.run import RunRequest
from echostore.pipeline.schemas import PLACE_TOPS, STATE_INDEX, TOPS
from spark.engines import Engines
from spark.lake_slices import Slices

SCHEMAS = {
    "cuts": kept.KEPT_CUTS,
    "admission": kept.KEPT_ADMISSION,
    "rejected": kept.KEPT_REJECTS,
    "tops": TOPS,
    "parties": PARTIES,
    "state_index": STATE_INDEX,
    "place_tops": PLACE_TOPS,
}
TABLES = ("items", "properties", "members", "rejects")
"""Those that are compared."""


def rows_of(out: Path, commit: Commit, kind: str) -> list[dict[str, Any]]:
    return [row for file in commit.files.get(kind, ()) for row in read_table(out, file, SCHEMAS[kind]).to_pylist()]


def test_rows_that_later_builds_replaced_are_dropped_and_nothing_else(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Lake.create(tmp_path / "whole")
    generate(Shape(parties=3, feeds=3, messages=400, items=30, faults=8, seed=21), whole)
    slices = Slices(whole, tmp_path / "lake", seed=5, slices=5)
    out = tmp_path / "out"
    monkeypatch.setattr(merging, "FILES_MAX", 1)
    while slices.publish():
        done = engines.run(RunRequest(lake=tmp_path / "lake", out=out, tables=TABLES))
    commit = done.record
    assert commit.number >= 5
    results = {result.party: result for result in party_results(out, commit)}
    for kind in ("cuts", "admission", "rejected"):
        for row in rows_of(out, commit, kind):
            assert row["commit"] == results[row["party"]].built, kind
    assert max(Counter(row["party"] for row in rows_of(out, commit, "parties")).values()) == 1
    for kind in ("tops", "place_tops"):
        assert max(Counter((row["party"], row["bucket"]) for row in rows_of(out, commit, kind)).values()) == 1, kind
    named = {row["path"] for row in rows_of(out, commit, "state_index")}
    assert {file.path for file in commit.files["states"]} == named
    monkeypatch.undo()
    fresh = engines.run(RunRequest(lake=tmp_path / "whole", out=tmp_path / "fresh", tables=TABLES))
    assert {result.party: (result.cid, result.items) for result in fresh.results()} == {
        result.party: (result.cid, result.items) for result in results.values()
    }
    # Of whole blocks that are not held, rejects say in which pieces they came.
    for table, chosen in (("items", "true"), ("properties", "true"), ("members", "true"), ("rejects", "position >= 0")):
        views = [open_views(engines.session, each)[table].where(chosen) for each in (out, tmp_path / "fresh")]
        shown = [sorted(map(str, each.collect())) for each in views]
        assert shown[0] == shown[1], table
