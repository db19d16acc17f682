"""Items by the value of a field: what is kept is always what a fresh look would find."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from echostore.kernel.coherence.messages import Spec
from echostore.kernel.ids import FeedId, ItemId, item_id
from echostore.kernel.query.expressions import comparisons
from echostore.kernel.query.filters import And
from echostore.kernel.query.order import order_key
from echostore.kernel.query.source import Deleted, Row
from echostore.kernel.query.spec import QuerySpec, Stage
from echostore.kernel.values import Value
from echostore.peer import coherence_fields
from echostore.peer.coherence_fields import ASKED_MIN, FieldSource
from echostore.peer.coherence_watch import IndexWatch
from echostore.wire.index_spec import IndexQuery, index_items, index_spec

FEED = FeedId(b"f" * 8)
VALUES: list[Value] = [None, 1, 1.0, True, "1", "a", ["a"], {"k": 1}]


class Rows:
    """A source of plain rows that counts how often it is read."""

    def __init__(self) -> None:
        self.rows: dict[ItemId, Row] = {}
        self.scans = 0

    def put(self, number: int, type: str, values: dict[str, Value]) -> ItemId:
        item = item_id(FEED, number)
        self.rows[item] = Row(item, type, "property-set", None, False, values)
        return item

    def row(self, item: ItemId) -> Row | None:
        return self.rows.get(item)

    def scan(self, *, type: str | None, **more: Any) -> list[ItemId]:
        self.scans += 1
        return [item for item, row in self.rows.items() if row.type == type]

    def none(self, item: ItemId) -> list[ItemId]:
        return []

    children = embedded = embedders = links = references = referrers = none


def found(source: FieldSource, type: str, field: str, value: Value) -> list[ItemId]:
    """What is offered for a question, and has the value."""
    items = source.scan(type=type, parent=None, equals={field: value}, deleted=Deleted.HIDE)
    rows = [source.row(item) for item in items]
    key = order_key(value)
    return sorted(row.item for row in rows if row and row.type == type and order_key(row.values.get(field)) == key)


steps = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(["task", "note"]), st.sampled_from(["n", "m"]), st.sampled_from(VALUES)
    ),
    max_size=40,
)


@given(steps, st.integers(0, 10))
def test_what_is_kept_is_what_a_fresh_look_finds(steps: list[tuple[int, str, str, Value]], asked: int) -> None:
    rows = Rows()
    source = FieldSource(rows)
    for field in ("n", "m"):
        for _ in range(asked):
            found(source, "task", field, 1)
    for number, type, field, value in steps:
        item = item_id(FEED, number)
        if value == ["a"]:
            rows.rows.pop(item, None)
        else:
            rows.put(number, type, {field: value})
        source.changed({item})
        for other in VALUES[1:]:
            for name in ("n", "m"):
                fresh = [
                    row.item
                    for row in rows.rows.values()
                    if row.type == "task" and order_key(row.values.get(name)) == order_key(other)
                ]
                assert found(source, "task", name, other) == sorted(fresh), (name, other)


def test_a_type_is_read_once_and_not_with_each_question() -> None:
    rows = Rows()
    for number in range(50):
        rows.put(number, "task", {"n": number})
    source = FieldSource(rows)
    for number in range(200):
        assert len(found(source, "task", "n", number)) == (number < 50)
    assert rows.scans == ASKED_MIN, "a scan for each of the first questions, the last of which reads all values"
    source.scan(type="task", parent=None, equals={}, deleted=Deleted.HIDE)
    assert rows.scans == ASKED_MIN + 1, "what names no value is not for it"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence_fields, "FIELDS_MAX", 2)
    monkeypatch.setattr(coherence_fields, "ITEMS_MAX", 10)
    rows = Rows()
    for number in range(10):
        rows.put(number, "task", dict.fromkeys("abc", number))
    source = FieldSource(rows)
    for name in "abc":
        for _ in range(ASKED_MIN):
            found(source, "task", name, 1)
    assert sorted(source._kept) == [("task", "b"), ("task", "c")], "the one that was asked for longest ago is let go"
    source.changed({rows.put(10, "task", {"b": 1, "c": 1})})
    assert source._kept == {}, "a field of too many items is read each time"
    for _ in range(2 * ASKED_MIN):
        assert len(found(source, "task", "b", 1)) == 2
    assert source._kept == {}
    for number in range(1000):
        found(source, "task", f"field {number}", 1)
    assert len(source._asked) <= 16 * 2


def test_what_is_gone_is_not_offered_any_more() -> None:
    rows = Rows()
    items = [rows.put(number, "task", {"n": 1}) for number in range(3)]
    source = FieldSource(rows)
    for _ in range(ASKED_MIN):
        found(source, "task", "n", 1)
    del rows.rows[items[0]]
    rows.put(1, "note", {"n": 1})
    source.changed(set(items[:2]))
    assert list(source.scan(type="task", parent=None, equals={"n": 1}, deleted=Deleted.HIDE)) == [items[2]]


def test_rows_are_read_once_while_indexes_follow() -> None:
    rows = Rows()
    item = rows.put(1, "task", {"n": 1})
    source = FieldSource(rows)
    with source.still():
        before = source.row(item)
        rows.put(1, "task", {"n": 2})
        assert source.row(item) is before
        with source.still():
            assert source.row(item) is before
        assert source.row(item) is before, "it is left by the outermost alone"
    after = source.row(item)
    assert after is not None
    assert after.values == {"n": 2}


def test_many_indexes_of_a_field_follow_their_items(tmp_path: Path) -> None:
    """Through all there is: an index that is asked for late finds what came before, and sees what comes after."""
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Thin")
        tasks = [party.create(type="task", n=number % 5) for number in range(10)]
        deleted = party.create(type="task", n=0)
        deleted.delete()
        specs: dict[int, Spec] = {}
        with party.reading() as runtime:
            watch = IndexWatch(runtime.source, sign=lambda data: b"", record=lambda item: b"")
            end = party.live.listen(lambda items: changes.append(watch.changed(items)))
            changes: list[Any] = []

            def ask(number: int) -> list[ItemId]:
                where = QuerySpec((Stage(filter=And(tuple(comparisons({"type": "task", "n": number})))),))
                specs[number] = index_spec(IndexQuery(party.key, where))
                value, _ = watch.watch(specs[number], IndexQuery(party.key, where))
                return [each.item for each in index_items(value)]

            assert [len(ask(number)) for number in range(20)] == [2] * 5 + [0] * 15
            tasks[0]["n"] = 17
            tasks[1]["n"] = 30
            assert {spec for fresh, _ in changes for spec, _ in fresh} == {specs[0], specs[17], specs[1]}
            assert ask(30) == [tasks[1].id]
            tasks[1].delete()
            assert ask(30) == []
            end()
