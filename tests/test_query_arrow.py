"""Answers as tables: types of columns, names of columns, and what happens without the libraries."""

import importlib
import json
from datetime import UTC, datetime
from typing import Any

import pandas
import polars
import pyarrow
import pytest

from echostore.kernel.errors import EchoError
from echostore.kernel.ids import Cid, item_text
from echostore.kernel.values import BlobRef, Reference
from echostore.peer.query import MultiQuery
from reference.query_party import Party

MOMENT = datetime(2024, 6, 1, 12, 0, 0, 5, tzinfo=UTC)


def table_of(*values: Any) -> Any:
    party = Party()
    for number, value in enumerate(values):
        party.create(number, x=value)
    return party.query().to_arrow()


@pytest.mark.parametrize(
    ("values", "kind", "cells"),
    [
        ([True, None], "bool", [True, None]),
        ([1, -(2**63)], "int64", [1, -(2**63)]),
        ([1, 0.5], "double", [1.0, 0.5]),
        ([2**53 + 1, 0.5], "string", ["9007199254740993", "0.5"]),
        (["a", "é"], "string", ["a", "é"]),
        ([b"a"], "binary", [b"a"]),
        ([MOMENT, None], "timestamp[us, tz=UTC]", [MOMENT, None]),
        ([None, None], "null", [None, None]),
        ([[1, 2], [], None], "list<item: int64>", [[1, 2], [], None]),
        ([["a", 1]], "string", ['["a",1]']),
        ([{"b": 1, "a": [b"\x01"]}], "string", ['{"a":["01"],"b":1}']),
        ([True, 1, "a", None], "string", ["true", "1", '"a"', None]),
        ([MOMENT, float("nan")], "string", ['"2024-06-01T12:00:00.000005+00:00"', '"NaN"']),
        ([BlobRef((Cid(b"c"),), 3)], "string", ['{"cids":["63"],"media_type":"","name":"","size":3}']),
    ],
)
def test_a_column_has_the_type_of_its_values(values: list[Any], kind: str, cells: list[Any]) -> None:
    column = table_of(*values).column("x")
    assert str(column.type) == kind
    assert column.to_pylist() == cells


def test_references_are_text() -> None:
    party = Party()
    one = party.create(1)
    two = party.create(2, to=Reference(one.id), far=[Reference(one.id, party.party)])
    row = party.query(item=two).to_arrow().to_pylist()[0]
    assert row["to"] == item_text(one.id)
    assert row["far"] == [f"echo://{party.party.hex()}/{item_text(one.id)}"]


def test_whole_items_begin_with_their_own_columns() -> None:
    party = Party()
    board = party.create(1, "board", title="Summer")
    task = party.create(2, parent=board, done=False)
    party.write(task, item="mine")
    party.delete(task)
    table = party.query().deleted("show").to_arrow()
    assert table.to_pydict() == {
        "item": [item_text(board.id), item_text(task.id)],
        "type": ["board", "task"],
        "parent": [None, item_text(board.id)],
        "deleted": [False, True],
        "done": [None, False],
        "property.item": [None, "mine"],
        "title": ["Summer", None],
    }


def test_selected_fields_keep_their_order() -> None:
    party = Party()
    party.create(1, title="a", place={"city": "Rome"})
    query = party.query().select("place.city", "@type", "title")
    assert query.to_arrow().column_names == ["item", "place.city", "type", "title"]
    assert query.to_arrow().to_pylist()[0]["place.city"] == "Rome"


def test_an_empty_answer_has_its_columns() -> None:
    assert Party().query().to_arrow().column_names == ["item", "type", "parent", "deleted"]
    assert Party().query().select("a").to_arrow().column_names == ["item", "a"]


def test_reductions_are_tables_too() -> None:
    party = Party()
    for number in range(4):
        party.create(number, n=number, even=number % 2 == 0)
    assert party.query().reduce("sum", "n", by="even").to_arrow().to_pydict() == {"even": [False, True], "sum": [4, 2]}
    assert party.query().reduce("count", by="@type").to_arrow().to_pydict() == {"type": ["task"], "count": [4]}
    assert party.query().reduce("mean", "n").to_arrow().to_pydict() == {"mean": [1.5]}


def test_several_parties_are_told_apart() -> None:
    one, two = Party(b"1"), Party(b"2")
    one.create(1, n=1)
    two.create(1, n=2)
    table = MultiQuery([one, two]).select("n").to_arrow()
    assert table.column_names == ["party", "item", "n"]
    assert table.column("party").to_pylist() == [one.party.hex(), two.party.hex()]


def test_pandas_and_polars() -> None:
    party = Party()
    party.create(1, title="a", due=MOMENT, n=1)
    party.create(2, title="b", n=2)
    query = party.query().order_by("-n")
    assert list(query.to_pandas()["title"]) == ["b", "a"]
    assert query.to_pandas()["due"][1] == pandas.Timestamp(MOMENT)
    assert query.to_polars()["n"].to_list() == [2, 1]
    assert polars.DataFrame(query)["title"].to_list() == ["b", "a"], "through __arrow_c_stream__"
    assert pyarrow.table(query).column("n").to_pylist() == [2, 1]


@pytest.mark.parametrize(
    ("method", "library"), [("to_arrow", "pyarrow"), ("to_pandas", "pandas"), ("to_polars", "polars")]
)
def test_without_the_library_the_error_names_the_extra(
    method: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name == library:
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(EchoError, match=rf"needs {library}.*echostore\[arrow\]"):
        getattr(Party().query(), method)()


def test_json_text_can_be_read_back() -> None:
    cells = table_of({"a": [1, None, True]}, "x").column("x").to_pylist()
    assert [json.loads(cell) for cell in cells] == [{"a": [1, None, True]}, "x"]
