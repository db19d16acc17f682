"""Fresh queries: filters, order, traversal, reductions, the fluent API, canonical bytes, and what the guide shows."""

import doctest
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import NotFound, TooLarge, UsageError
from echostore.kernel.query.evaluate import evaluate
from echostore.kernel.query.fields import parse_field
from echostore.kernel.query.filters import And, Compare, Filter, Not, Op, Or, compile_filter, normalise
from echostore.kernel.query.order import descending, identical, normal, order_key
from echostore.kernel.query.spec import FILTER_DEPTH_MAX, STAGES_MAX, Order, QuerySpec, Stage, Step
from echostore.kernel.values import Reference, Value
from echostore.peer import query_live
from echostore.peer.query import Change, MultiQuery, field
from echostore.wire.generated import query_pb2 as pb
from echostore.wire.queries import MalformedQuery, query_bytes, query_from_bytes, query_key
from reference.query import Answer, Graph, answer, compare, item, passes, shown
from reference.query_examples import filters, graphs, specs, values
from reference.query_party import Handle, Party

GUIDE = Path(__file__).parent.parent / "docs" / "queries.md"


def tasks() -> tuple[Party, Handle, list[Handle]]:
    """A board with five tasks of priority 1 to 5, every other one done."""
    party = Party()
    board = party.create(0, "board", title="Summer")
    made = [party.create(n, parent=board, title=f"t{n}", priority=n, done=n % 2 == 0) for n in range(1, 6)]
    return party, board, made


# against the oracle


@given(specs(), graphs())
def test_a_fresh_answer_equals_the_oracle(spec: QuerySpec, graph: Graph) -> None:
    result, expected = evaluate(spec, graph), answer(spec, graph)
    if result.groups is not None:
        assert Answer(tuple((group.by, group.value) for group in result.groups)) == expected
    else:
        assert Answer(tuple((token, *shown(spec, row)) for token, row in result.rows)) == expected


@given(specs(), graphs())
def test_the_normal_form_asks_the_same(spec: QuerySpec, graph: Graph) -> None:
    assert answer(spec.normal(), graph) == answer(spec, graph)
    assert spec.normal().normal() == spec.normal()


@given(filters, graphs())
def test_compiled_filters_equal_the_oracle(condition: Filter, graph: Graph) -> None:
    for row in graph.rows.values():
        assert compile_filter(condition)(row) is passes(row, condition)


@given(st.lists(st.booleans(), min_size=3, max_size=3), st.data())
def test_normal_filters_hold_where_the_written_ones_do(flags: list[bool], data: st.DataObject) -> None:
    flag = st.sampled_from([Compare(parse_field(name), Op.EQ, True) for name in "abc"])
    condition: Filter = data.draw(
        st.recursive(
            flag,
            lambda inner: st.one_of(
                st.builds(Not, inner),
                st.builds(And, st.lists(inner, max_size=3).map(tuple)),
                st.builds(Or, st.lists(inner, max_size=3).map(tuple)),
            ),
        )
    )
    graph = Graph()
    row = graph.rows[graph.create(1, **dict(zip("abc", flags, strict=True)))]
    assert passes(row, normalise(condition)) is passes(row, condition)


@given(values, values)
def test_the_order_of_values_is_the_oracle_s(one: Value, other: Value) -> None:
    keys = order_key(one), order_key(other)
    assert (keys[0] > keys[1]) - (keys[0] < keys[1]) == compare(one, other)
    turned = descending(keys[0]), descending(keys[1])
    assert (turned[0] > turned[1]) - (turned[0] < turned[1]) == -compare(one, other)
    assert (keys[0] == keys[1]) is identical(normal(one), normal(other)) or {repr(one), repr(other)} == {"0.0", "-0.0"}


# the order of kinds


def test_values_of_all_kinds_sort_in_one_order() -> None:
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    ordered: list[Value] = [
        None, False, True, float("-inf"), -1, 0.5, 1, float("inf"), float("nan"), "", "a", "é", b"", b"a",
        moment, moment + timedelta(microseconds=1), Reference(item(1)), Reference(item(2)), [], [1], [1, 2], {}, {"a": 1},
    ]  # fmt: skip  # one line for each kind reads worse
    backwards = ordered[::-1]
    assert sorted(backwards, key=order_key) == ordered


def test_integers_compare_exactly_with_floats() -> None:
    assert order_key(2**53 + 1) > order_key(2.0**53)
    assert order_key(3) == order_key(3.0)
    assert order_key(1) != order_key(True)


# what a person writes


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"priority": 3}, [3]),
        ({"priority": 3.0}, [3]),
        ({"priority__ne": 3}, [1, 2, 4, 5]),
        ({"priority__lt": 3}, [1, 2]),
        ({"priority__le": 3}, [1, 2, 3]),
        ({"priority__gt": 3}, [4, 5]),
        ({"priority__ge": 3, "done": False}, [3, 5]),
        ({"priority__in": [1, 5, 9]}, [1, 5]),
        ({"priority__in": []}, []),
        ({"title__contains": "4"}, [4]),
        ({"title__startswith": "t"}, [1, 2, 3, 4, 5]),
        ({"due__exists": True}, []),
        ({"due": None}, [1, 2, 3, 4, 5]),
        ({"priority": True}, []),
    ],
)
def test_keyword_comparisons(keywords: dict[str, Any], expected: list[int]) -> None:
    party, _, made = tasks()
    assert party.query(type="task").where(**keywords).all() == [made[n - 1] for n in expected]


def test_items_can_be_compared_with() -> None:
    party, board, made = tasks()
    party.write(made[0], blocks=Reference(made[1].id))
    assert party.query(blocks=made[1]).all() == [made[0]]
    assert party.query(parent=board).count() == 5
    assert party.query(parent=None).all() == [board]
    assert party.query(item=made[2]).parent().all() == [board]
    assert party.query(type__in=["board", "nothing"]).all() == [board]


def test_a_property_named_type_is_not_the_type() -> None:
    party = Party()
    odd = party.create(1, "task")
    party.write(odd, type="board")
    assert party.query(type="board").all() == []
    assert party.query().where(field("type") == "board").all() == [odd]


def test_fields_nest_by_dots_or_tuples() -> None:
    party = Party()
    one = party.create(1, place={"city": "Rome", "a.b": 1})
    party.create(2, place="Rome")
    assert party.query().where(field("place.city") == "Rome").all() == [one]
    assert party.query().where(field(("place", "a.b")) == 1).all() == [one]
    assert party.query(place__contains="city").all() == [one]


def test_moments_compare_across_time_zones() -> None:
    party = Party()
    one = party.create(1, due=datetime(2024, 1, 1, 11, tzinfo=UTC))
    noon = datetime(2024, 1, 1, 12, tzinfo=timezone(timedelta(hours=1)))
    assert party.query(due=noon).all() == [one]
    assert party.query(due__lt=noon).all() == []


MISTAKES: list[tuple[Any, str]] = [
    (lambda q: q.where(priority__above=3), "'above' is not a comparison"),
    (lambda q: q.where(address__city="x"), r'field\("address.city"\)'),
    (lambda q: q.where(field("a..b") == 1), "not a field path"),
    (lambda q: q.where(field("") == 1), "not a field path"),
    (lambda q: q.where(field("@kind") == 1), "Attributes are @item"),
    (lambda q: q.where(field(3) == 1), "named by text or a tuple"),
    (lambda q: q.where(priority__in=3), "wants a list"),
    (lambda q: q.where(priority__in="abc"), "__contains"),
    (lambda q: q.where(priority__lt=None), "__exists=False"),
    (lambda q: q.where(due__exists="yes"), "true or false"),
    (lambda q: q.where(title__startswith=3), "text or bytes"),
    (lambda q: q.where(title=object()), "can't be stored"),
    (lambda q: q.where(due__lt=datetime(2024, 1, 1)), "time zone"),  # noqa: DTZ001  # the mistake that is tested
    (lambda q: q.where(parent="board"), "does not name an item"),
    (lambda q: q.where(type=3), "a type is text"),
    (lambda q: q.where(lambda row: True), "where wants filters"),
    (lambda q: q.where((field("a") == 1) and (field("b") == 2)), "& | ~"),
    (lambda q: q.where(1 < field("a") < 3), "& | ~"),
    (lambda q: q.where((field("a") == 1) & 3), "can't be combined"),
    (lambda q: q.where(not field("a")), "no truth value"),
    (lambda q: q.deleted("maybe"), "hide, show, only"),
    (lambda q: q.limit(0), "from 1"),
    (lambda q: q.limit(True), "from 1"),
    (lambda q: q.limit(3).where(a=1), "before limit"),
    (lambda q: q.order_by("a").children(), "after the last step"),
    (lambda q: q.select(), "at least one field"),
    (lambda q: q.reduce("median", "a"), "count, sum, min, max, mean"),
    (lambda q: q.reduce("sum"), "wants a field"),
    (lambda q: q.reduce("count").all(), r"value\(\) or groups"),
    (lambda q: q.reduce("count").limit(1), "before reduce"),
    (lambda q: q.reduce("count", by="a").value(), "without groups"),
    (lambda q: q.groups(), "wants a reduction"),
    (lambda q: q.one(), "exactly one"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_mistake_is_refused_with_the_fix(call: Any, message: str) -> None:
    party, _, _ = tasks()
    with pytest.raises(UsageError, match=message):
        call(party.query())


def test_a_query_has_limits() -> None:
    query = tasks()[0].query()
    for _ in range(STAGES_MAX - 1):
        query = query.children()
    with pytest.raises(TooLarge, match="stages"):
        query.children()
    with pytest.raises(TooLarge, match="filter parts"):
        query.where(priority__in=range(20_000))


# results


def test_results() -> None:
    party, board, made = tasks()
    query = party.query(type="task").order_by("-priority")
    assert query.all() == list(query) == made[::-1]
    assert query.ids() == [each.id for each in made[::-1]]
    assert query.first() == made[4]
    assert party.query(type="none").first() is None
    assert party.query(type="board").one() == board
    with pytest.raises(NotFound):
        party.query(type="none").one()
    assert (query.count(), query.limit(2).count()) == (5, 2)
    assert query.limit(2).select("title", "@type").rows() == [
        {"title": "t5", "@type": "task"},
        {"title": "t4", "@type": "task"},
    ]
    assert party.query(type="board").rows() == [{"title": "Summer"}]
    assert repr(query) == "Query(all where @type == 'task'; order by -priority)"


def test_calls_do_not_change_the_query_they_are_made_on() -> None:
    party, _, made = tasks()
    query = party.query(type="task")
    query.where(done=True).limit(1)
    assert query.all() == made


def test_each_step_of_a_walk_has_its_own_rule_for_deleted_items() -> None:
    party, board, made = tasks()
    party.delete(board)
    party.delete(made[0])
    assert party.query(type="board").children().all() == []
    assert party.query(type="board").deleted("only").children().all() == made[1:]
    assert party.query(type="board").deleted("show").children().deleted("only").all() == [made[0]]


def test_walks() -> None:
    party, board, made = tasks()
    link = party.create(10, "blocks", source=made[0].id, target=made[1].id)
    away = party.create(11, "blocks", source=made[0].id, target=made[2].id, target_party=party.party)
    party.write(made[3], after=[Reference(made[4].id), {"x": Reference(board.id)}])
    assert party.query(item=made[0]).links().all() == [link, away]
    assert party.query(item=made[1]).links("blocks").all() == [link]
    assert party.query(item=made[1]).links("likes").all() == []
    assert party.query(item=link).source().all() == [made[0]]
    assert party.query(type="blocks").target().all() == [made[1]]
    assert party.query(item=made[3]).references().all() == [board, made[4]]
    assert party.query(item=made[4]).referrers().all() == [made[3]]
    assert party.query(type="task").parent().all() == [board]


def test_reductions() -> None:
    party, _, _ = tasks()
    query = party.query(type="task")
    results = [query.reduce(each, "priority").value() for each in ("count", "sum", "min", "max", "mean")]  # type: ignore[arg-type]  # a list of literals is not one
    assert results == [5, 15, 1, 5, 3.0]
    assert query.reduce("sum", "priority", by="done").groups() == [(False, 9), (True, 6)]
    assert query.order_by("-priority").limit(2).reduce("sum", "priority").value() == 9
    assert query.where(done=None).reduce("sum", "priority").value() == 0
    assert query.where(done=None).reduce("mean", "priority").value() is None
    assert query.where(done=None).reduce("count", by="done").groups() == []


# several parties


def test_a_query_over_parties_is_one_answer() -> None:
    one, two = Party(b"1"), Party(b"2")
    low, high = one.create(1, n=1), one.create(2, n=9)
    middle = two.create(1, n=5)
    both = MultiQuery([two, one])
    assert both.all() == [low, high, middle], "in the order of party keys"
    assert both.order_by("-n").limit(2).all() == [high, middle]
    assert both.reduce("sum", "n").value() == 15
    assert both.where(n__ge=5).count() == 2
    told: list[Change[Handle]] = []
    with both.order_by("-n").limit(2).subscribe(told.append, initial=True):
        assert told.pop().added == (high, middle)
        two.write(middle, n=0)
        assert told.pop() == Change(added=(low,), removed=(middle,), positions=((1, low),))
    two.write(middle, n=10)
    assert not told


# subscriptions and watches


def test_a_subscription_is_told_once_per_batch() -> None:
    party, _, made = tasks()
    told: list[Change[Handle]] = []
    subscription = party.query(type="task", done=False).subscribe(told.append)
    with party.batch():
        party.write(made[0], done=True)
        party.write(made[1], done=False)
        party.delete(made[2])
    assert told == [Change(added=(made[1],), removed=(made[0], made[2]))]
    subscription()
    party.write(made[4], done=True)
    assert len(told) == 1
    assert party.listeners == []


def test_a_subscriber_that_writes_is_told_in_order() -> None:
    party, _, made = tasks()
    told: list[Change[Handle]] = []

    def follow(change: Change[Handle]) -> None:
        if not told:
            party.write(made[1], title="second")
        told.append(change)

    party.query(type="task").subscribe(follow)
    party.write(made[0], title="first")
    assert told == [Change(changed=(made[0],)), Change(changed=(made[1],))]


def test_what_a_subscriber_raises_is_not_swallowed_and_stops_nothing() -> None:
    party, _, made = tasks()
    told: list[Change[Handle]] = []

    def follow(change: Change[Handle]) -> None:
        told.append(change)
        raise RuntimeError("subscriber")

    party.query(type="task").subscribe(follow)
    for number in range(2):
        with pytest.raises(RuntimeError, match="subscriber"):
            party.write(made[0], title=f"x{number}")
    assert len(told) == 2


def test_a_watch_sees_changes_from_its_making_on_and_ends_with_its_timeout() -> None:
    party, _, made = tasks()
    watch = party.query(type="task").watch(timeout_s=0)
    party.write(made[0], title="x")
    party.write(made[1], title="y")
    assert list(watch) == [Change(changed=(made[0],)), Change(changed=(made[1],))]
    assert party.listeners == []


def test_a_watch_begins_with_everything_when_asked() -> None:
    party, _, made = tasks()
    assert [change.added for change in party.query(type="task").watch(timeout_s=0, initial=True)] == [tuple(made)]


def test_a_watch_that_is_left_stops_listening() -> None:
    party, _, _ = tasks()
    for _ in party.query(type="task").watch(initial=True):
        break
    assert party.listeners == []


def test_a_watch_wakes_for_another_thread_and_for_close() -> None:
    party, _, made = tasks()
    watch = party.query(type="task").watch(timeout_s=30)
    seen: list[Change[Handle]] = []
    first = threading.Event()

    def read() -> None:
        for change in watch:
            seen.append(change)
            first.set()

    thread = threading.Thread(target=read)
    thread.start()
    party.write(made[0], title="x")
    assert first.wait(30)
    watch.close()
    thread.join(30)
    assert not thread.is_alive()
    assert seen == [Change(changed=(made[0],))]


def test_a_slow_reader_gets_one_change_for_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_live, "WATCH_CHANGES_MAX", 2)
    party, _, made = tasks()
    watch = party.query(type="task").watch(timeout_s=0)
    for each in made:
        party.write(each, title="x")
    party.write(made[0], title="y")
    changes = list(watch)
    assert [change.changed for change in changes] == [(made[0],), (made[1],), (made[0], *made[2:])]


# canonical bytes


GOLDEN = QuerySpec(
    stages=(
        Stage(
            filter=And((Compare(parse_field("@type"), Op.EQ, "board"), Compare(parse_field("n"), Op.IN, (2.0, "x"))))
        ),
        Stage(Step.CHILDREN, Or((Not(Compare(parse_field("a.b"), Op.EXISTS)), Compare(parse_field("n"), Op.GE, 3)))),
    ),
    order=(Order(parse_field("due"), descending=True),),
    limit=10,
    select=(parse_field("title"),),
)
GOLDEN_BYTES = (
    "0a330801122f1a2d0a120a100a030a016e10061a0218041a032a01780a170a150a080a0474797065100110011a072a05626f"
    "6172640a2508021221221f0a0d0a0b0a030a016e10051a0218060a0e120c0a0a0a060a01610a0162100912090a050a036475"
    "651001180a22070a057469746c65"
)
GOLDEN_KEY = "8a270df74d96abd4d8eac803fd5edcca9b5fdb3d7db879a4e700916266767449"


def test_the_bytes_of_a_query_are_fixed() -> None:
    assert query_bytes(GOLDEN).hex() == GOLDEN_BYTES
    assert query_key(GOLDEN).hex() == GOLDEN_KEY
    assert query_from_bytes(bytes.fromhex(GOLDEN_BYTES)) == GOLDEN.normal()


@given(specs())
def test_bytes_come_back_as_the_normal_form(spec: QuerySpec) -> None:
    assert query_from_bytes(query_bytes(spec)) == spec.normal()


def test_what_asks_the_same_has_the_same_bytes() -> None:
    party = Party()
    a, b, c = field("a") == 1, field("b") > 2, field("c").in_([3, 1, 3])
    same = [
        party.query().where(a & b, c),
        party.query().where(c).where(~~b).where(a, a),
        party.query().where(~(~a | ~b)).where(field("c").in_([1, 3.0])),
        party.query(a=1.0).where(b & (c & a)),
        party.query(a__in=[1]).where(b, c).order_by("@item"),
    ]
    assert len({query_bytes(each.spec) for each in same}) == 1
    other = [party.query().where(a | b, c), party.query(a=True).where(b, c), party.query().where(a, b)]
    assert len({query_bytes(each.spec) for each in (*same, *other)}) == 4


@given(st.binary(max_size=60))
def test_any_bytes_are_a_query_or_malformed(data: bytes) -> None:
    try:
        spec = query_from_bytes(data)
    except MalformedQuery:
        return
    assert query_bytes(spec) == data


@given(st.data())
def test_damaged_bytes_are_a_query_or_malformed(data: st.DataObject) -> None:
    raw = bytearray(query_bytes(data.draw(specs())))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        spec = query_from_bytes(bytes(raw))
    except MalformedQuery:
        return
    assert query_bytes(spec) == raw


def deep(levels: int) -> pb.QueryFilter:
    message = pb.QueryFilter(compare=pb.QueryCompare(field=pb.QueryField(steps=["a"]), op=9))
    for _ in range(levels):
        message = pb.QueryFilter(negated=message)
    return message


@pytest.mark.parametrize(
    "message",
    [
        pb.QuerySpec(),
        pb.QuerySpec(stages=[pb.QueryStage(step=2)]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1), pb.QueryStage(step=99)]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1, deleted=3)]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1, filter=pb.QueryFilter())]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1, filter=deep(FILTER_DEPTH_MAX + 2))]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1)], select=[pb.QueryField(steps=["x"], attribute=True)]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1)], select=[pb.QueryField()]),
        pb.QuerySpec(stages=[pb.QueryStage(step=1)], reduce=pb.QueryReduce(reducer=2)),
        pb.QuerySpec(stages=[pb.QueryStage(step=1, filter=deep(2))]),
        pb.QuerySpec(
            stages=[pb.QueryStage(step=1)], order=[pb.QueryOrder(field=pb.QueryField(steps=["item"], attribute=True))]
        ),
    ],
)
def test_malformed_queries_are_refused(message: pb.QuerySpec) -> None:
    with pytest.raises(MalformedQuery):
        query_from_bytes(message.SerializeToString())


def test_hints_name_what_an_index_can_find() -> None:
    party = Party()
    hints = (
        party.query(type="task", done=False, n=3.0, due=None, title__contains="x").where(field("a.b") == 1).spec.hints()
    )
    assert (hints.type, dict(hints.equals)) == ("task", {"done": False, "n": 3})
    either = (field("n") == 1) | (field("n") == 2)
    assert dict(party.query().where(either).spec.hints().equals) == {}


def test_normal_forms_of_nothing_and_everything() -> None:
    a = Compare(parse_field("a"), Op.EQ, 1)
    never: Filter = Compare(parse_field("a"), Op.IN, ())
    assert normalise(And((a, never))) == Or(())
    assert normalise(Or((a, Not(never)))) == And(())
    assert normalise(Or((a, never))) == a


# the guide


class Named(Handle):
    """A handle that shows its name in the guide."""

    names: ClassVar[dict[bytes, str]] = {}

    def __repr__(self) -> str:
        return f"<{self.names[self.id]}>"


def test_the_guide_s_examples_run() -> None:
    party = Party()
    party.handle = lambda item: Named(item, party.party)  # type: ignore[method-assign]  # shows names
    board = party.create(0, "board", title="Summer")
    june = [datetime(2024, 6, day, tzinfo=UTC) for day in (1, 3)]
    tickets = party.create(
        1, parent=board, title="tickets", priority=3, done=False, due=june[0], tags=["travel", "urgent"]
    )
    hotel = party.create(2, parent=board, title="hotel", priority=2, done=True, due=june[1], place={"city": "Rome"})
    food = party.create(3, parent=board, title="food", priority=2, done=False)
    old = party.create(4, parent=board, title="old plan")
    party.delete(old)
    known = {"board": board, "tickets": tickets, "hotel": hotel, "food": food, "old": old}
    Named.names = {handle.id: name for name, handle in known.items()}

    def print_change(change: Change[Handle]) -> None:
        print("added", list(change.added), "changed", list(change.changed), "removed", list(change.removed))  # noqa: T201  # what the guide's reader sees

    known_names: dict[str, Any] = {**known, "party": party, "field": field, "print_change": print_change}
    text = GUIDE.read_text(encoding="utf-8").replace("```", "")
    examples = doctest.DocTestParser().get_doctest(text, known_names, "queries.md", str(GUIDE), 0)
    assert len(examples.examples) > 15
    problems: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=problems.append)
    assert not problems, "".join(problems)
