"""`pipeline audit` over lakes with damaged files: what can be checked is, and what could not be is not counted as checked."""

from pathlib import Path
from typing import Any

import pytest

from echostore.cli.app import run as run_command
from echostore.pipeline.audit import DAMAGED_FILE, audit_lake
from echostore.pipeline.lake import Lake


def generated(lake: Path, *more: str) -> None:
    shape = ("--feeds", "2", "--messages", "40", "--items", "5")
    assert run_command(["lake", "generate", "--lake", str(lake), *shape, *more, "--quiet"]) == 0


@pytest.mark.parametrize("engine", ["spark", "local"])
def test_one_damaged_file_keeps_no_other_party_from_being_checked(
    spark: Any, engine: str, tmp_path: Path, shared_session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = tmp_path / "lake"
    session = spark if engine == "spark" else None
    generated(lake, "--seed", "1")
    [whole] = Lake.open(lake).at().runs()["party"].unique().to_pylist()
    generated(lake, "--seed", "2", "--faults", "1")
    audit = audit_lake(session, lake)
    assert audit.checked == audit.blocks
    assert set(audit.counts) == {"bad-link"}, "so far only the fault that was made"

    runs = Lake.open(lake).at().runs()
    hurt = next(row for row in runs.to_pylist() if row["party"] == whole and not row["control"])
    rows = sum(row["end"] - row["start"] for row in runs.to_pylist() if row["file"] == hurt["file"])
    of_party = sum(row["end"] - row["start"] for row in runs.to_pylist() if row["party"] == whole)
    file = lake / hurt["file"]
    file.write_bytes(file.read_bytes()[:-10])
    audit = audit_lake(session, lake)
    assert audit.counts == {DAMAGED_FILE: rows, "bad-link": 8}, "the other party is checked all the same"
    assert audit.checked == audit.blocks - of_party
    assert not audit.sound
    capsys.readouterr()
    assert run_command(["pipeline", "audit", "--lake", str(lake), "--engine", engine]) == 6
    assert f"{audit.checked} of {audit.blocks} blocks" in capsys.readouterr().err

    for each in lake.glob("blocks/*/*.parquet"):
        each.write_bytes(b"")
    audit = audit_lake(session, lake)
    assert (audit.checked, set(audit.counts)) == (0, {DAMAGED_FILE})


def test_each_engine_finds_the_same(spark: Any, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    generated(lake, "--seed", "3", "--faults", "19", "--parties", "2")
    found = [audit_lake(session, lake) for session in (spark, None)]
    assert found[0].counts == found[1].counts
    assert len(found[0].counts) > 5
    key = [sorted(map(repr, each.findings)) for each in found]
    assert key[0] == key[1]
    assert found[0].checked == found[1].checked == found[0].blocks
