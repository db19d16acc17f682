"""`echostore.read_tables` and the format "echostore": the rows that `open_views` shows, without Spark and in any session."""

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import echostore
from echostore.kernel.errors import EngineFailed, NotFound, UsageError
from echostore.kernel.ids import item_text
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.java import find_java
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.output import stored_tables
from echostore.pipeline.output.tables import wide_table
from echostore.pipeline.output.views import open_views
from echostore.pipeline.run import At, RunRequest, chosen_tables, run_pipeline
from echostore.pipeline.source.tables_source import Target
from spark.lake_slices import Slices
from spark.stream_jobs import Steps

pytestmark = pytest.mark.timeout(600)
"""One test starts a Spark of its own, beside the one of all tests."""

NAMES = ("items", "properties", "links", "members", "rejects", "runs", "messages", "blocks", "parties")
MIXED = (("property-set", 40), ("text", 30), ("growable-array", 20), ("threaded-log", 10))


def build(lake: Path, out: Path) -> None:
    run_pipeline(None, RunRequest(lake=lake, out=out, tables=chosen_tables("all")))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of a lake with every fault: built at once, in five steps, and in two steps with a stream on top."""
    folder = tmp_path_factory.mktemp("tables")
    whole = Lake.create(folder / "whole")
    generate(Shape(parties=3, feeds=3, messages=500, items=60, mix=MIXED, faults=19, seed=21), whole)
    build(whole.path, folder / "once")
    slices = Slices(whole, folder / "lake", seed=5, slices=5)
    streamed = Slices(whole, folder / "streamed", seed=6, slices=5)
    while slices.publish():
        build(folder / "lake", folder / "steps")
    for _ in range(3):
        streamed.publish()
        build(folder / "streamed", folder / "overlay")
    steps = Steps(folder / "streamed", folder / "overlay")
    while streamed.publish():
        steps.step()
    return {name: folder / name for name in ("once", "steps", "overlay", "lake", "whole")}


def rows(table: pa.Table) -> Counter[str]:
    return Counter(map(repr, (tuple(row.items()) for row in table.to_pylist())))


# without Spark


@pytest.mark.parametrize("parts", [1, 50], ids=["many parts", "few parts"])
@pytest.mark.parametrize("built", ["once", "steps", "overlay"])
def test_tables_have_the_rows_that_spark_shows(
    spark: Any, outputs: dict[str, Path], built: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tables, "PART_ROWS", parts)
    views = open_views(spark, outputs[built])
    tables = echostore.read_tables(outputs[built])
    assert set(views) <= set(tables)
    for name, view in views.items():
        shown = view.select(*tables[name].column_names).toArrow().cast(tables[name].schema)
        assert rows(shown) == rows(tables[name]), name
        assert set(view.columns) == set(tables[name].column_names)
    assert len(tables["items"]) > 0
    assert {"types.task", "types.note"} <= set(tables)


def test_in_steps_or_at_once_the_tables_are_the_same(outputs: dict[str, Path]) -> None:
    one, other = (echostore.read_tables(outputs[name]) for name in ("once", "steps"))
    assert one.types == other.types
    for name in ("items", "properties", "links", "members", *(f"types.{each}" for each in one.types)):
        assert rows(one[name]) == rows(other[name]), name


def test_an_older_commit_can_be_read(outputs: dict[str, Path]) -> None:
    first, last = echostore.read_tables(outputs["steps"], commit=1), echostore.read_tables(outputs["steps"])
    assert len(first["messages"]) < len(last["messages"])
    assert set(first["runs"]["commit"].to_pylist()) == {1}
    with pytest.raises(NotFound, match="no commit 99"):
        echostore.read_tables(outputs["steps"], commit=99)


def test_pandas_polars_and_duckdb_have_the_same_rows(outputs: dict[str, Path]) -> None:
    tables = echostore.read_tables(outputs["steps"])
    database = tables.duckdb()
    for name in tables:
        count = len(tables[name])
        assert len(tables.pandas(name)) == count
        assert tables.polars(name).height == count
        schema, _, table = name.partition(".") if name.startswith("types.") else ("main", "", name)
        assert database.sql(f'SELECT count(*) FROM {schema}."{table}"').fetchall() == [(count,)]
    done = database.sql("SELECT count(*) FROM types.task WHERE done AND NOT deleted").fetchall()
    flags = zip(*(tables["types.task"][name].to_pylist() for name in ("done", "deleted")), strict=True)
    assert done == [(sum(bool(is_done) and not deleted for is_done, deleted in flags),)]


def test_a_wide_table_has_a_row_for_each_item_and_a_column_for_each_property(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        party = peer.create_party("Trip")
        when = datetime(2026, 5, 1, 12, tzinfo=UTC)
        one = party.create("property-set", type="task", text="tickets", votes=2, due=when, tags=["a", "b"], mixed=1)
        two = party.create("property-set", type="task", text="food", votes=2.5, mixed="x", plan={"step": 3})
        two["where"] = one
        two.delete()
        party.create("property-set", type="other", text="none of them")
        party.flush()
    publish(tmp_path / "home", tmp_path / "lake")
    build(tmp_path / "lake", tmp_path / "out")
    table = echostore.read_tables(tmp_path / "out")["types.task"]
    found = {row["text"]: row for row in table.to_pylist()}
    tickets, food = found["tickets"], found["food"]
    assert len(found) == 2
    assert list(tickets)[:5] == ["party", "item", "type", "parent", "deleted"]
    assert (tickets["item"], tickets["votes"], tickets["due"]) == (item_text(one.id), 2.0, when)
    assert (json.loads(tickets["tags"]), tickets["mixed"], food["mixed"]) == (["a", "b"], "1", '"x"')
    assert (food["plan/step"], tickets["plan/step"]) == (3, None)
    assert (food["deleted"], tickets["deleted"]) == (True, False)
    assert item_text(one.id) in food["where"]


def test_items_hang_where_they_were_moved_to(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        party = peer.create_party("Trip")
        one, two = (party.create("property-set", type="board", n=n) for n in range(2))
        card = party.create("property-set", type="card", parent=one)
        party.flush()
        publish(tmp_path / "home", tmp_path / "lake")
        build(tmp_path / "lake", tmp_path / "out")
        card.move(two)
        party.flush()
        publish(tmp_path / "home", tmp_path / "lake")
        build(tmp_path / "lake", tmp_path / "out")
    places = {}
    for commit in (1, 2):
        table = echostore.read_tables(tmp_path / "out", commit=commit)["items"].to_pylist()
        places[commit] = {row["item"]: (row["created_in"], row["parent"]) for row in table}[item_text(card.id)]
    first, second = item_text(one.id), item_text(two.id)
    assert places == {1: (first, first), 2: (first, second)}


def test_rows_from_before_a_party_was_built_from_scratch_do_not_count(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        party = peer.create_party("Trip")
        party.create("property-set", type="task", n=1)
        party.flush()
        anchor = party.anchor()
        party.create("property-set", type="task", n=2)
        party.flush()
    publish(tmp_path / "home", tmp_path / "lake")
    data, control = ({feed: at.seq + 1 for feed, at in each.entries.items()} for each in (anchor.data, anchor.control))
    at = At(party=anchor.party, data=data, control=control, text=str(anchor))
    build(tmp_path / "lake", tmp_path / "out")
    run_pipeline(None, RunRequest(lake=tmp_path / "lake", out=tmp_path / "out", at=at))
    build(tmp_path / "lake", tmp_path / "out")
    shown = {
        commit: sorted(echostore.read_tables(tmp_path / "out", commit=commit)["types.task"]["n"].to_pylist())
        for commit in (1, 2, 3)
    }
    assert shown == {1: [1, 2], 2: [1], 3: [1, 2]}


def made(*values: tuple[str, str, dict[str, Any]]) -> pa.Table:
    """A wide table of items `a`, `b`, ...: path, item, and the columns of `properties`."""
    from echostore.pipeline.output.stored_tables import SHOWN

    items = [
        {"party": "p", "item": name, "model": "m", "version": 1, "type": "t", "name": "", "deleted": False}
        | {"opaque": False, "creator": "", "depth": 1, "state_bytes": 0}
        for name in sorted({item for _, item, _ in values})
    ]
    cells = [{"party": "p", "item": item, "path": path, **cell} for path, item, cell in values]
    return wide_table(
        pa.Table.from_pylist(items, SHOWN["items"]), pa.Table.from_pylist(cells, SHOWN["properties"]), "t"
    )


def test_a_property_named_like_a_column_is_told_apart_also_by_sql() -> None:
    text = {"kind": "text", "text": "x"}
    table = made(("Item", "a", text), ("title", "a", text), ("Title", "a", text), ("property.item", "a", text))
    names = [name.lower() for name in table.column_names]
    assert len(set(names)) == len(names)
    assert table.column_names[:5] == ["party", "item", "type", "parent", "deleted"]
    assert "property.Item" in table.column_names


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        ([("boolean", True), ("null", None)], pa.bool_(), [True, None]),
        ([("integer", 7), ("integer", 8)], pa.int64(), [7, 8]),
        ([("integer", 7), ("number", 0.5)], pa.float64(), [7.0, 0.5]),
        ([("integer", (1 << 53) + 1), ("number", 0.5)], pa.string(), [str((1 << 53) + 1), "0.5"]),
        ([("bytes", "00ff"), ("null", None)], pa.binary(), [b"\x00\xff", None]),
        ([("text", "ü"), ("reference", "r")], pa.string(), ["ü", "r"]),
        ([("text", "ü"), ("boolean", False)], pa.string(), ['"ü"', "false"]),
        ([("list", "[1]"), ("map", "{}")], pa.string(), ["[1]", "{}"]),
        ([("list", "[1]"), ("text", "x")], pa.string(), ["[1]", '"x"']),
        ([("null", None), ("null", None)], pa.string(), [None, None]),
    ],
)
def test_a_column_has_the_type_of_its_values(cells: list[tuple[str, Any]], kind: Any, values: list[Any]) -> None:
    places = {"bytes": "text", "reference": "text", "list": "json", "map": "json", "blob": "json"}
    given = []
    for item, (name, value) in zip("ab", cells, strict=True):
        cell = {"kind": name} | ({} if name == "null" else {places.get(name, name): value})
        given.append(("x", item, cell))
    column = made(*given)["x"]
    assert (column.type, column.to_pylist()) == (kind, values)


def test_types_that_differ_in_letters_alone_are_all_in_duckdb(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        party = peer.create_party("Odd")
        for name in ("Task", "task", 'a"b; --', "items"):
            party.create("property-set", type=name, n=1)
        party.flush()
    publish(tmp_path / "home", tmp_path / "lake")
    build(tmp_path / "lake", tmp_path / "out")
    tables = echostore.read_tables(tmp_path / "out")
    database = tables.duckdb()
    found = database.sql("SELECT table_name FROM duckdb_tables() WHERE schema_name = 'types'").fetchall()
    assert {name for (name,) in found} >= {"Task", "task_", 'a"b; --', "items"}
    assert database.sql('SELECT sum(n) FROM types."a""b; --"').fetchall() == [(1,)]


# what is not there


@pytest.mark.parametrize(("library", "extra"), [("pandas", "arrow"), ("polars", "arrow"), ("duckdb", "sql")])
def test_a_library_that_is_missing_is_named_with_its_extra(
    outputs: dict[str, Path], library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = echostore.read_tables(outputs["once"])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(EngineFailed, match=rf"{library} is not installed.*echostore\[{extra}\]"):
        tables.duckdb() if library == "duckdb" else getattr(tables, library)("items")
    if library == "polars":
        with pytest.raises(EngineFailed, match=r"echostore\[arrow\]"):
            echostore.read_tables(outputs["once"])


def test_other_folders_are_refused_with_what_they_are(outputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"is a lake.*pipeline run"):
        echostore.read_tables(outputs["lake"])
    with echostore.open(tmp_path / "home", name="Ann", background=False):
        pass
    with pytest.raises(NotFound, match=r"is a home.*lake publish"):
        echostore.read_tables(tmp_path / "home")
    with pytest.raises(NotFound, match="nothing at"):
        echostore.read_tables(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no output of a pipeline, no lake and no home"):
        echostore.read_tables(tmp_path / "empty")
    with pytest.raises(UsageError, match="is an address"):
        echostore.read_tables("s3://bucket/out")


def test_a_table_that_no_run_wrote_is_named(outputs: dict[str, Path], tmp_path: Path) -> None:
    run_pipeline(None, RunRequest(lake=outputs["whole"], out=tmp_path / "out", tables=("members",)))
    tables = echostore.read_tables(tmp_path / "out")
    assert set(tables) == {"members", "parties"}
    with pytest.raises(NotFound, match=r"no table blocks.*--tables all"):
        tables.arrow("blocks")
    with pytest.raises(UsageError, match="no table 'nothing'"):
        tables.arrow("nothing")
    with pytest.raises(NotFound, match="no item has the type"):
        tables.arrow("types.task")
    with pytest.raises(KeyError):
        tables["blocks"]


# in Spark


def test_the_wheel_has_the_module_that_spark_looks_for() -> None:
    from setuptools import find_packages

    root = Path(__file__).resolve().parents[2]
    found = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert "pyspark_echostore" in find_packages(**{**found, "where": str(root / found["where"][0])})


PLAIN = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
read = lambda **options: spark.read.format("echostore").options(**options)
out, lake = sys.argv[1:]
print(json.dumps({
    "items": read().load(out).where("NOT deleted").count(),
    "types": sorted(row[0] for row in read().load(out).select("type").distinct().collect()),
    "parties": read(table="parties").load(out).count(),
    "blocks": read(table="blocks").load(lake).where("control").count(),
}))
"""


def test_a_session_of_somebody_else_reads_it_with_nothing_registered(outputs: dict[str, Path]) -> None:
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(outputs["steps"]), str(outputs["lake"])],
        capture_output=True,
        text=True,
        timeout=220,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tables = echostore.read_tables(outputs["steps"])
    runs = Lake.open(outputs["lake"]).at().runs()
    distinct = {
        (row["feed"], seq) for row in runs.to_pylist() if row["control"] for seq in range(row["start"], row["end"])
    }
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("blocks") >= len(distinct) > 0
    assert found == {
        "items": tables["items"]["deleted"].to_pylist().count(False),
        "types": sorted(set(tables["items"]["type"].to_pylist())),
        "parties": len(tables["parties"]),
    }


@pytest.mark.parametrize("built", ["steps", "overlay"])
def test_spark_reads_every_table_in_parts(
    spark: Any, outputs: dict[str, Path], built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = echostore.read_tables(outputs[built])
    for name in NAMES:
        frame = spark.read.format("echostore").option("table", name).load(str(outputs[built]))
        assert rows(frame.toArrow().cast(tables[name].schema)) == rows(tables[name]), name
    older = spark.read.format("echostore").option("commit", "1").load(str(outputs[built]))
    assert older.count() == len(echostore.read_tables(outputs[built], commit=1)["items"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "lake"}, "is a lake, which has blocks and no items"),
        ({"path": "lake", "table": "members"}, "has blocks and no members"),
        ({"path": "home"}, "is a home, which has blocks and no items"),
        ({"path": "out", "table": "nothing"}, "there is no table 'nothing'"),
        ({"path": "out", "party": "ab"}, "has no option 'party'"),
        ({"path": "nowhere"}, "There is nothing at"),
        ({"path": "empty"}, "no output of a pipeline, no lake and no home"),
        ({}, "needs a folder"),
        ({"path": "out", "lake": "lake"}, "can't be given together"),
    ],
)
def test_what_can_not_be_read_is_refused_with_the_reason(
    options: dict[str, str], words: str, outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "lake").symlink_to(outputs["lake"])
    (tmp_path / "out").symlink_to(outputs["once"])
    with echostore.open(tmp_path / "home", name="Ann", background=False):
        pass
    with pytest.raises((UsageError, NotFound), match=words):
        Target.of(options)


def test_an_error_of_the_source_reaches_the_person_at_spark(spark: Any, outputs: dict[str, Path]) -> None:
    with pytest.raises(Exception, match="has blocks and no items"):
        spark.read.format("echostore").load(str(outputs["lake"]))
    with pytest.raises(Exception, match="an output can't be streamed"):
        spark.readStream.format("echostore").load(str(outputs["once"])).writeStream.format("memory").queryName(
            "never"
        ).start().processAllAvailable()


def test_a_lake_and_a_home_are_loaded_by_their_path(spark: Any, tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        party = peer.create_party("Trip")
        party.create("property-set", type="task", n=1)
        party.flush()
    publish(tmp_path / "home", tmp_path / "lake")
    read = [
        spark.read.format("echostore").option("table", "blocks").load(str(tmp_path / name)).toArrow()
        for name in ("home", "lake")
    ]
    places = [Counter(zip(each["feed"].to_pylist(), each["seq"].to_pylist(), strict=True)) for each in read]
    assert places[0] == places[1]
    assert sum(places[0].values()) >= 3
