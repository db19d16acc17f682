"""Plain questions share a pin: each answers as a fresh query would, is told when that changes, and costs little."""

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.coherence.messages import IndexValue, Spec
from echostore.kernel.errors import TooLarge
from echostore.kernel.ids import FeedId, ItemId, PartyKey, item_id
from echostore.kernel.query.evaluate import evaluate
from echostore.kernel.query.expressions import comparisons
from echostore.kernel.query.filters import And
from echostore.kernel.query.source import Deleted, Row
from echostore.kernel.query.spec import QuerySpec, Stage
from echostore.kernel.values import Value
from echostore.peer import coherence_watch
from echostore.peer.coherence_questions import read_question
from echostore.peer.coherence_watch import IndexWatch
from echostore.wire.index_spec import IndexItem, IndexQuery, index_query, index_spec, index_value

PARTY = PartyKey(b"p" * 32)
FEED = FeedId(b"f" * 8)
VALUES: list[Value] = [0, 1, 1.0, True, False, 0.5, -0.0, "1", "", "a", b"a", b"", 2**60]


class Rows:
    """A source of plain rows."""

    def __init__(self) -> None:
        self.rows: dict[ItemId, Row] = {}

    def put(self, number: int, type: str, values: dict[str, Value], *, deleted: bool = False) -> ItemId:
        item = item_id(FEED, number)
        self.rows[item] = Row(item, type, "property-set", None, deleted, values)
        return item

    def row(self, item: ItemId) -> Row | None:
        return self.rows.get(item)

    def scan(self, *, type: str | None, **more: Any) -> list[ItemId]:
        return [item for item, row in self.rows.items() if row.type == type]

    def none(self, item: ItemId) -> list[ItemId]:
        return []

    children = embedded = embedders = links = references = referrers = none


def asking(value: Value, deleted: Deleted = Deleted.HIDE, *, field: str = "n", **more: Any) -> IndexQuery:
    where = And(tuple(comparisons({"type": "task", field: value, **more})))
    return IndexQuery(PARTY, QuerySpec((Stage(filter=where, deleted=deleted),)).normal())


def fresh_value(rows: Rows, asked: IndexQuery) -> IndexValue:
    """What a query from nothing shows."""
    assert asked.query is not None
    found = evaluate(asked.query, rows).rows
    return index_value(
        IndexItem(item, row.type, row.model, dict(row.values), deleted=row.deleted)
        for item, row in sorted(found, key=lambda pair: pair[0])
    )


def watching(rows: Rows) -> IndexWatch:
    return IndexWatch(rows, sign=lambda data: b"", record=lambda item: b"")


steps = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["task", "task", "note", None]),
        st.sampled_from([*VALUES, None, ["a"], {"k": 1}]),
        st.booleans(),
    ),
    max_size=25,
)


@given(steps, st.sampled_from(list(Deleted)))
def test_a_pinned_index_is_what_a_fresh_query_shows(
    steps: list[tuple[int, str | None, Value, bool]], deleted: Deleted
) -> None:
    rows = Rows()
    watch = watching(rows)
    questions = {index_spec(asked): asked for asked in (asking(value, deleted) for value in VALUES)}
    values: dict[Spec, IndexValue] = {}
    for place, spec in enumerate(questions):
        assert read_question(index_query(spec)).plain
        if place % 2:  # the others are asked for when there is something to find
            values[spec] = watch.watch(spec, questions[spec])[0]
    for number, type, value, gone in steps:
        if type is None:
            rows.rows.pop(item_id(FEED, number), None)
        else:
            rows.put(number, type, {"n": value, "text": "words"}, deleted=gone)
        told, overgrown = watch.changed({item_id(FEED, number)})
        assert not overgrown
        values.update(told)
        now = {spec: fresh_value(rows, questions[spec]) for spec in values}
        assert values == now, "every index is told, and none that did not change"
        for spec in list(questions)[::2]:
            values.setdefault(spec, watch.watch(spec, questions[spec])[0])
    for spec, asked in questions.items():
        if spec in watch:
            assert watch.asked(spec) == asked
            watch.unwatch(spec)
    assert not watch._by_key
    assert not watch._by_item
    assert not watch._fields


def test_one_field_is_asked_for_with_and_without_what_is_deleted() -> None:
    rows = Rows()
    watch = watching(rows)
    item = rows.put(1, "task", {"n": 1}, deleted=True)
    found = {}
    for deleted in Deleted:
        asked = asking(1, deleted)
        found[deleted] = watch.watch(index_spec(asked), asked)[0]
        assert found[deleted] == fresh_value(rows, asked)
        assert watch.asked(index_spec(asked)) == asked
    assert [bool(found[deleted]) for deleted in (Deleted.HIDE, Deleted.SHOW, Deleted.ONLY)] == [False, True, True]
    rows.put(1, "task", {"n": 1})
    told = dict(watch.changed({item})[0])
    assert {spec: fresh_value(rows, index_query(spec)) for spec in told} == told
    assert len(told) == 3


def test_what_is_not_told_twice() -> None:
    rows = Rows()
    item = rows.put(1, "task", {"n": 1})
    watch = watching(rows)
    watch.watch(index_spec(asking(1)), asking(1))
    assert watch.changed({item}) == ([], []), "nothing is other than it was"
    rows.put(1, "task", {"n": 2})
    assert watch.changed({item}) == ([(index_spec(asking(1)), IndexValue(b""))], [])
    rows.put(1, "task", {"n": 3})
    assert watch.changed({item}) == ([], []), "it is in no index any more"


@pytest.mark.parametrize(
    "asked",
    [
        asking(1, done=False),
        asking(["a"]),
        asking({"k": 1}),
        asking(1, field="n__ge"),
        asking(1, field="a.b"),
        IndexQuery(PARTY, asking(1).query, sealed=True),
        IndexQuery(PARTY, QuerySpec(asking(1).query.stages, limit=3)),  # type: ignore[union-attr]
        IndexQuery(PARTY, item=item_id(FEED, 1)),
    ],
)
def test_other_questions_are_kept_as_live_queries(asked: IndexQuery) -> None:
    rows = Rows()
    item = rows.put(1, "task", {"n": 1, "done": False, "a": {"b": 1}})
    watch = watching(rows)
    watch.watch(index_spec(asked), asked)
    assert not read_question(asked).plain
    assert watch.asked(index_spec(asked)) is asked
    rows.put(1, "task", {"n": ["a"], "done": True, "a": {"b": 2}})
    watch.changed({item})
    watch.unwatch(index_spec(asked))
    assert not watch._by_item


@pytest.mark.parametrize("asked", [asking(1), asking(1, done=False)])
def test_one_that_grew_too_large_leaves_nothing_behind(asked: IndexQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not for what left it in the very step in which it grew too large."""
    monkeypatch.setattr(coherence_watch, "ITEMS_MAX", 3)
    rows = Rows()
    items = [rows.put(number, "task", {"n": 1, "done": False}) for number in range(3)]
    watch = watching(rows)
    spec = index_spec(asked)
    watch.watch(spec, asked)
    rows.put(0, "task", {"n": 2, "done": False})
    more = [rows.put(number, "task", {"n": 1, "done": False}) for number in (7, 8, 9)]
    assert watch.changed({items[0], *more}) == ([], [spec])
    assert spec not in watch
    assert not watch._by_item
    assert watch.changed({items[0], *more}) == ([], [])
    with pytest.raises(TooLarge):
        watch.watch(spec, asked)
    assert spec not in watch


def test_pins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence_watch, "PINS_MAX", 10)
    rows = Rows()
    watch = watching(rows)
    for number in range(100):
        asked = asking(1, field=f"field{number}")
        watch.watch(index_spec(asked), asked)
    assert len(watch._pins) <= 10
    item = rows.put(1, "task", {"field3": 1})
    assert [spec for spec, _ in watch.changed({item})[0]] == [index_spec(asking(1, field="field3"))]


def test_a_pinned_index_is_a_few_objects() -> None:
    """What Python looks through for garbage grows with them: a live query each would be fifty."""
    rows = Rows()
    watch = watching(rows)
    asked = [asking(number) for number in range(1_000)]
    specs = [index_spec(each) for each in asked]
    watch.watch(specs[0], asked[0])
    gc.collect()
    before = len(gc.get_objects())
    for spec, each in zip(specs, asked, strict=True):
        watch.watch(spec, each)
    assert len(gc.get_objects()) - before < 8 * len(specs)
