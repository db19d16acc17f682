"""`@created` as a time, and the system item that nobody asked for: in fresh and in live queries of a real party."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore import field
from echostore.kernel.errors import UsageError
from echostore.kernel.query.filters import And, Compare, Op
from echostore.kernel.query.spec import ITEM, TYPE, Stage, Step
from peer_builder import Circle

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock:
    """Milliseconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def at(milliseconds: int) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circle(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob", now_ms=clock) as made:
        yield made


def created(party: echostore.Party) -> dict[str, Any]:
    rows = party.query(type="task").select("title", "@created").rows()
    return {row["title"]: row["@created"] for row in rows}


def three(circle: Circle, clock: Clock) -> dict[str, datetime]:
    """Items made at three times: one by one, and two in a batch of one time."""
    party = circle.party("ann")
    clock.now = 5_000
    party.create(type="task", title="late")
    clock.now = 2_000
    with party.batch():
        party.create(type="task", title="early")
        clock.now = 9_000
        party.create(type="task", title="same")
    return {"late": at(5_000), "early": at(2_000), "same": at(2_000)}


def test_the_time_is_what_the_makers_clock_showed_wherever_it_is_read_from(circle: Circle, clock: Clock) -> None:
    expected = three(circle, clock)
    ann = circle.party("ann")
    assert created(ann) == expected, "from memory"
    ann.runtime.checkpoint()
    ann.runtime.state.records.clear()
    assert created(ann) == expected, "from the blocks"
    circle.meet_all()
    assert created(circle.party("bob")) == expected, "elsewhere"
    clock.now = 77_000
    assert created(circle.restart("ann")) == expected, "after a restart"
    assert created(circle.restart("bob", lose=("items.db",))) == expected, "folded anew"
    assert created(circle.party("ann").as_of(circle.party("ann").anchor())) == expected, "in the past"


def test_queries_compare_and_sort_by_the_time(circle: Circle, clock: Clock) -> None:
    three(circle, clock)
    query = circle.party("ann").query(type="task")

    def titles(asked: Any) -> list[str]:
        return [item["title"] for item in asked.all()]

    assert titles(query.where(field("@created") > at(2_000))) == ["late"]
    assert sorted(titles(query.where(field("@created") <= "1970-01-01T00:00:02Z"))) == ["early", "same"]
    assert titles(query.where(field("@created").in_([at(5_000), at(1)]))) == ["late"]
    assert titles(query.where(field("@created") == "1970-01-01T01:00:05+01:00")) == ["late"]
    assert titles(query.where(field("@created").exists(False))) == []
    assert titles(query.order_by("@created"))[-1] == "late"
    assert titles(query.order_by("-@created"))[0] == "late"
    assert query.reduce("min", "@created").value() == at(2_000)
    for wrong in (3, "noon", "1970-01-01T00:00:02", datetime(1970, 1, 1)):  # noqa: DTZ001  # a time without a zone
        with pytest.raises(UsageError, match="time with a zone"):
            query.where(field("@created") > wrong)


def test_a_live_query_by_the_time_says_what_a_fresh_one_says(circle: Circle, clock: Clock) -> None:
    ann = circle.party("ann")
    asked = ann.query(type="task").where(field("@created") >= at(3_000)).order_by("-@created")
    told: list[Any] = []
    with asked.subscribe(told.append):
        three(circle, clock)
        assert [[item["title"] for item in change.added] for change in told] == [["late"]]
        clock.now = 6_000
        newer = ann.create(type="task", title="newer")
        assert told[-1].positions[0][0] == 0, "the newest comes first"
        ann.runtime.checkpoint()
        newer["title"] = "newest"
        assert [item.id for item in told[-1].changed] == [newer.id]
        newer.delete()
        assert [item.id for item in told[-1].removed] == [newer.id]
    assert [item["title"] for item in asked.all()] == ["late"]


def test_a_clock_that_shows_nonsense_reads_as_unknown(circle: Circle, clock: Clock) -> None:
    clock.now = 1 << 62
    item = circle.party("ann").create(type="task", title="when?")
    assert created(circle.party("ann")) == {"when?": None}
    assert circle.party("ann").query(type="task").where(field("@created") == None).ids() == [item.id]  # noqa: E711


def test_the_system_item_is_left_out_unless_it_is_named(circle: Circle) -> None:
    ann = circle.party("ann")
    system = ann.system_item
    assert system is not None
    assert ann.query().all() == ann.items() == []
    assert ann.query(title="Trip").all() == []
    assert ann.status.items == 0
    assert ann.query(type="system").ids() == [system.id]
    assert ann.query(item=system).ids() == [system.id]
    ann.runtime.checkpoint()
    ann.runtime.state.records.clear()
    assert ann.query().all() == ann.items() == ann.roots() == []
    assert ann.query(type="system").ids() == [system.id]
    made = ann.create(type="note", to=system)
    assert ann.query().ids() == [made.id]
    assert ann.query().references().ids() == [system.id], "a walk may lead there"
    assert circle.peers["ann"].query().ids() == [made.id]
    assert circle.peers["ann"].query().count() == 1


def test_a_live_query_does_not_hear_of_the_system_item(circle: Circle) -> None:
    ann = circle.party("ann")
    told: list[Any] = []
    named: list[Any] = []
    with ann.query().subscribe(told.append), ann.query(type="system").subscribe(named.append):
        ann.title = "Journey"
        assert told == []
        assert len(named) == 1
        made = ann.create(type="note")
        assert [item.id for change in told for item in change.added] == [made.id]


def test_which_conditions_name_the_system_item() -> None:
    by_type = Compare(TYPE, Op.EQ, "system")
    for condition, named in (
        (by_type, True),
        (Compare(ITEM, Op.EQ, None), True),
        (Compare(TYPE, Op.IN, ("system",)), True),
        (And((by_type, Compare(TYPE, Op.EXISTS))), True),
        (Compare(TYPE, Op.EQ, "task"), False),
        (Compare(TYPE, Op.IN, ("system", "task")), False),
        (~Compare(TYPE, Op.EQ, "task"), False),
        (And(()), False),
    ):
        assert Stage(filter=condition).wants_system is named, condition
    assert Stage(Step.CHILDREN).wants_system


def test_embedded_items_are_found_without_a_walk_over_all_embeddings(circle: Circle) -> None:
    """What is embedded in one item costs what is embedded there, not what is embedded anywhere."""
    ann = circle.party("ann")
    shelf, guest = ann.create(type="shelf"), ann.create(type="book")
    with ann.batch():
        for number in range(200):
            ann.create(type="book").embed_in(ann.create(type="shelf", n=number))
        guest.embed_in(shelf)
    tree = ann.runtime.state.tree
    assert tree.guests(shelf.id) == {guest.id}

    class Counted(dict[Any, Any]):
        looks = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.looks += 1
            return super().__getitem__(key)

        def get(self, key: Any, default: Any = None) -> Any:
            Counted.looks += 1
            return super().get(key, default)

        def items(self) -> Any:
            raise AssertionError("all embeddings were walked over")

        __iter__ = items

    tree._embeddings = Counted(tree._embeddings)
    tree._guests = Counted(tree._guests)
    assert shelf.embedded() == [guest]
    assert ann.query(item=shelf).embedded().ids() == [guest.id]
    assert Counted.looks < 20
    guest.unembed_from(shelf)
    assert shelf.embedded() == []
