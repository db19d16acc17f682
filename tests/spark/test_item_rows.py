"""Rows of the tables: by column kernels and item by item they are the same."""

from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from echostore.kernel.ids import FeedId, ItemId, Stamp, created_item_id, item_text
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.property_set import DELETED, PropertySet, Set
from echostore.kernel.values import Reference
from echostore.pipeline.output.item_rows import flattened, item_tables, item_texts, typed, value_json
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PROPERTIES
from echostore.wire.items import encode_record
from echostore.wire.values import value_from_bytes
from spark.state_rows import state_batch, state_row

PARTY = bytes(range(32))
FACTORY = ModelFactory(value_from_bytes)


def states(records: list[ItemRecord], gone: tuple[ItemId, ...] = ()) -> pa.RecordBatch:
    rows = [
        state_row(PARTY, record.item, record.genesis.model, encode_record(record).SerializeToString(deterministic=True))
        for record in records
    ]
    return state_batch([*rows, *(state_row(PARTY, item, "property-set", b"", gone=True) for item in gone)])


def expected_properties(records: list[ItemRecord]) -> list[dict[str, Any]]:
    return [
        {"party": PARTY.hex(), "item": item_text(record.item), "path": path, **typed(value), "commit": 3}
        for record in records
        if isinstance(record.model, PropertySet)
        for path, value in flattened(record.model.value(), ())
    ]


def by_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # NaN equals nothing, so compare what is shown.
    return sorted(({**row, "number": repr(row["number"])} for row in rows), key=lambda row: (row["item"], row["path"]))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(fold=0))
    | st.builds(Reference, st.binary(min_size=16, max_size=16).map(ItemId)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["a", "b", "a/b", "a~", "~1", "é"])
WRITES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 9),
        st.lists(KEYS, min_size=1, max_size=2).map(tuple),
        VALUES | st.just(DELETED),
    ),
    max_size=8,
)


@given(st.lists(WRITES, min_size=1, max_size=4))
def test_columns_and_kernel_give_the_same_properties(sets: list[list[tuple[int, int, tuple[str, ...], Any]]]) -> None:
    from echostore.kernel.items.record import Genesis

    records = []
    for number, writes in enumerate(sets):
        item = created_item_id(FeedId(b"creator!"), number, 0)
        model = PropertySet(item)
        for seq, (feed, depth, path, value) in enumerate(sorted(writes, key=lambda write: write[1])):
            model.apply((Set(path, value),), Stamp(depth, FeedId(bytes([feed]) * 8), seq, 0), 0)
        records.append(ItemRecord(Genesis(item, "property-set", 1, "t", None, 1), model, PropertySet(item)))
    tables = item_tables(states(records), 3, FACTORY)
    assert by_place(tables["properties"].to_pylist()) == by_place(expected_properties(records))
    assert tables["items"].num_rows == len(records)


@pytest.fixture
def party(tmp_path: Path) -> Any:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        yield peer.create_party("Trip")


def records_of(party: Any) -> list[ItemRecord]:
    party.flush()
    runtime = party.runtime
    runtime.state.settle()
    return [runtime.state.record(item) for item in runtime.all_items()]


def test_every_model_has_its_row(party: Any) -> None:
    board = party.create("property-set", type="board", title="Summer", tags=["a", 1], deep={"x": {"y": 1}, "z": {}})
    board["when"] = datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=UTC)
    tasks = party.create("growable-array", parent=board)
    tasks.name = "Tasks"
    tasks.append("one")
    tasks.append(2)
    notes = party.create("text", parent=board)
    notes.insert(0, "book early")
    log = party.create("threaded-log")
    log.post("hello")
    link = party.link(board, tasks, type="shows", weight=2)
    gone = party.create("property-set", type="old")
    gone.delete()
    records = records_of(party)
    tables = item_tables(states(records), 3, FACTORY)
    assert {name: table.schema for name, table in tables.items()} == {
        "items": ITEMS,
        "properties": PROPERTIES,
        "links": LINKS,
    }
    rows = {row["item"]: row for row in tables["items"].to_pylist()}
    assert set(rows) == {item_text(record.item) for record in records}
    assert rows[item_text(tasks.id)]["name"] == "Tasks"
    assert rows[item_text(tasks.id)]["created_in"] == item_text(board.id)
    assert rows[item_text(tasks.id)]["value"] == '["one",2]'
    assert rows[item_text(notes.id)]["value"] == value_json(notes.value())
    assert "hello" in rows[item_text(log.id)]["value"]
    assert rows[item_text(board.id)]["value"] is None
    assert rows[item_text(gone.id)]["deleted"]
    assert not rows[item_text(board.id)]["deleted"]
    assert by_place(tables["properties"].to_pylist()) == by_place(expected_properties(records))
    paths = {row["path"] for row in tables["properties"].to_pylist() if row["item"] == item_text(board.id)}
    assert paths == {"title", "tags", "deep/x/y", "deep/z", "when"}
    shown = tables["links"].to_pylist()
    assert [(row["item"], row["type"], row["source"], row["target"], row["target_party"]) for row in shown] == [
        (item_text(link.id), "shows", item_text(board.id), item_text(tasks.id), None)
    ]


def test_an_unknown_model_is_opaque(party: Any) -> None:
    class Tally:
        name, version = "tally", 1

        def __init__(self) -> None:
            self.count = 0

        def apply(self, operation: Any, *rest: Any) -> None:
            self.count += operation

        def value(self) -> int:
            return self.count

    party.peer.models.register(Tally)
    tally = party.create("tally")
    tally.apply(4)
    records = records_of(party)
    [row] = [r for r in item_tables(states(records), 1, FACTORY)["items"].to_pylist() if r["model"] == "tally"]
    assert row["opaque"]
    assert row["value"] is None
    known = ModelFactory(value_from_bytes)
    known.register(Tally)
    [row] = [r for r in item_tables(states(records), 1, known)["items"].to_pylist() if r["model"] == "tally"]
    assert not row["opaque"]
    assert row["value"] == "4"


def test_what_is_gone_leaves_a_mark_and_nothing_else(party: Any) -> None:
    records = records_of(party)
    vanished = created_item_id(FeedId(b"creator!"), 5, 0)
    tables = item_tables(states(records, (vanished,)), 7, FACTORY)
    [row] = [row for row in tables["items"].to_pylist() if row["gone"]]
    assert (row["item"], row["commit"]) == (item_text(vanished), 7)
    assert item_text(vanished) not in tables["properties"].column("item").to_pylist()
    only = item_tables(states([], (vanished,)), 7, FACTORY)
    assert [table.num_rows for table in only.values()] == [1, 0, 0]


def test_item_texts_are_those_of_the_kernel() -> None:
    random = Random(1)
    items = [ItemId(random.randbytes(16)) for _ in range(100)] + [ItemId(bytes(16)), ItemId(b"\xff" * 16)]
    column = pa.array([b"\1" * 16, *items], pa.binary()).slice(1)
    assert item_texts(column).to_pylist() == [item_text(item) for item in items]
