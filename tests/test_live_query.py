"""Live queries: the maintained answer equals a fresh one, is told only when it differs, and costs what changed.

Run as a script it measures the cost of one change over 1,000 and over 100,000 items.
"""

import math
import random
import statistics
import sys
import time
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.ids import PartyKey
from echostore.kernel.query import sorted_keys
from echostore.kernel.query.evaluate import evaluate, finish, matches
from echostore.kernel.query.expressions import comparisons
from echostore.kernel.query.fields import parse_field
from echostore.kernel.query.filters import And
from echostore.kernel.query.live import Change, LiveQuery, LiveUnion
from echostore.kernel.query.order import normal
from echostore.kernel.query.sorted_keys import RUN_KEYS, SortedKeys
from echostore.kernel.query.source import Deleted
from echostore.kernel.query.spec import Order, QuerySpec, Reduce, Reducer, Stage, Step
from echostore.kernel.values import Reference
from echostore.wire.values import value_bytes
from reference.query import Answer, Graph, answer, answer_of_parties, item, shown
from reference.query_examples import ITEMS, OTHER_PARTY, graphs, mutations, specs

PARTIES = (PartyKey(b"1" * 32), PartyKey(b"2" * 32))


def maintained(spec: QuerySpec, live: LiveQuery, graph: Graph) -> Answer:
    """The live answer in the oracle's form."""
    if spec.reduce is not None:
        return Answer(tuple((group.by, group.value) for group in live.groups()))
    return Answer(tuple((each, *shown(spec, graph.rows[each])) for each in live.items()))


def check_told(spec: QuerySpec, before: Answer, after: Answer, change: Change[Any] | None) -> None:
    """The change is exactly the difference of the two answers."""
    if before == after:
        assert change is None, "told although the answer is the same"
        return
    assert change is not None, "not told although the answer differs"
    if spec.reduce is not None:
        return
    old, new = ({line[0]: Answer((line,)) for line in each.lines} for each in (before, after))
    assert set(change.added) == new.keys() - old.keys()
    assert set(change.removed) == old.keys() - new.keys()
    assert set(change.changed) == {each for each in new.keys() & old.keys() if new[each] != old[each]}
    assert [each for each in after.tokens if each in change.added] == list(change.added)
    if spec.order:
        assert change.replay(before.tokens) == after.tokens


def replayed_groups(before: Answer, change: Change[Any] | None) -> Answer:
    """The groups after a change, from those before; `by` may be unhashable, so by its canonical bytes."""
    lines = {value_bytes(normal(line[0])): line for line in before.lines}
    if change is not None:
        for by in change.groups_removed:
            del lines[value_bytes(normal(by))]
        lines.update({value_bytes(normal(group.by)): (group.by, group.value) for group in change.groups})
    return Answer(tuple(line for _, line in sorted(lines.items(), key=lambda entry: entry[0])))


@given(specs(), graphs(), st.data())
def test_the_maintained_answer_equals_a_fresh_one_after_every_batch(
    spec: QuerySpec, graph: Graph, data: st.DataObject
) -> None:
    live = LiveQuery(spec, graph)
    live.start()
    before = answer(spec, graph)
    assert maintained(spec, live, graph) == before
    for _ in range(data.draw(st.integers(1, 6), label="batches")):
        for _ in range(data.draw(st.integers(1, 4), label="mutations")):
            data.draw(mutations(graph))
        changed = graph.take_changed() | {item(n) for n in data.draw(st.sets(st.integers(0, ITEMS), max_size=2))}
        change = live.update(changed)
        after = answer(spec, graph)
        assert maintained(spec, live, graph) == after
        check_told(spec, before, after, change)
        if spec.reduce is not None:
            assert replayed_groups(before, change) == replayed_groups(after, None)
        before = after


WALKS = [step for step in Step if step is not Step.ALL]


@pytest.mark.parametrize("step", WALKS)
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_walks_are_maintained_through_long_histories(step: Step, seed: int) -> None:
    """Few items, many edges, long histories: what random specs hit too seldom."""
    chance = random.Random(seed)
    further = [Stage(chance.choice(WALKS), deleted=Deleted.SHOW)] if chance.random() < 0.4 else []
    first = Stage(filter=where(on=True), deleted=chance.choice([Deleted.SHOW, Deleted.HIDE]))
    order = (Order(parse_field("n"), chance.random() < 0.5),) if chance.random() < 0.5 else ()
    limit = chance.choice([None, None, 2])
    spec = QuerySpec((first, Stage(step, deleted=chance.choice([Deleted.SHOW, Deleted.HIDE])), *further), order, limit)
    graph = Graph()
    live = LiveQuery(spec, graph)
    live.start()
    before = answer(spec, graph)
    for _ in range(30):
        for _ in range(chance.randint(1, 3)):
            rewire(graph, chance)
        change = live.update(graph.take_changed())
        after = answer(spec, graph)
        assert maintained(spec, live, graph) == after
        check_told(spec, before, after, change)
        before = after


@pytest.mark.parametrize("reducer", Reducer)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_reductions_are_maintained_through_long_histories(reducer: Reducer, seed: int) -> None:
    chance = random.Random(seed)
    by = parse_field("g") if chance.random() < 0.5 else None
    order = (Order(parse_field("n")),) if chance.random() < 0.5 else ()
    spec = QuerySpec(
        (Stage(filter=where(on=True)),), order, chance.choice([None, 3]), reduce=Reduce(reducer, parse_field("n"), by)
    )
    graph, numbers = Graph(), [None, 1, 2, 2.0, 0.1, 1e16, -1e16, 1e308, math.nan, math.inf, -math.inf, "x", True]
    live = LiveQuery(spec, graph)
    live.start()
    before = answer(spec, graph)
    for _ in range(30):
        for _ in range(chance.randint(1, 3)):
            kept = chance.sample(numbers[:8] if seed % 2 else numbers, 1)[0]
            graph.create(chance.randrange(6), on=chance.random() < 0.7, n=kept, g=chance.choice([1, 1.0, None, "a"]))
        change = live.update(graph.take_changed())
        after = answer(spec, graph)
        assert maintained(spec, live, graph) == after
        check_told(spec, before, after, change)
        assert replayed_groups(before, change) == replayed_groups(after, None)
        before = after


def rewire(graph: Graph, chance: random.Random) -> None:
    """One random change of an edge, or of what lets an item through."""
    some = [item(number) for number in range(6)]
    one, other = chance.choice(some), chance.choice(some)
    if one not in graph.rows or chance.random() < 0.1:
        ends: dict[str, Any] = {}
        if chance.random() < 0.6:
            ends = {"source": other, "target": chance.choice(some), "target_party": chance.choice([None, OTHER_PARTY])}
        graph.create(some.index(one), "x", chance.choice(some), on=chance.random() < 0.6, n=chance.randrange(3), **ends)
    elif (kind := chance.randrange(7)) == 0:
        graph.move(one, chance.choice([None, other]))
    elif kind == 1:
        graph.embed(one, other, (one, other) not in graph.embeddings)
    elif kind == 2:
        graph.write(one, "to", [Reference(each) for each in chance.sample(some, chance.randrange(4))])
    elif kind == 3:
        graph.write(one, "on", not graph.rows[one].values["on"])
    elif kind == 4:
        graph.write(one, "n", chance.randrange(3))
    elif kind == 5:
        graph.delete(one, not graph.rows[one].deleted)
    elif chance.random() < 0.3:
        graph.remove(one)


@given(specs(), graphs(), graphs(), st.data())
def test_a_union_of_parties_is_maintained_too(spec: QuerySpec, one: Graph, two: Graph, data: st.DataObject) -> None:
    parties = dict(zip(PARTIES, (one, two), strict=True))
    live = LiveUnion(spec)
    for party in reversed(PARTIES):
        live.add(party, parties[party])
    before = answer_of_parties(spec, parties)
    for _ in range(data.draw(st.integers(0, 4), label="batches")):
        party = data.draw(st.sampled_from(PARTIES))
        data.draw(mutations(parties[party]))
        change = live.update(party, parties[party].take_changed())
        after = answer_of_parties(spec, parties)
        check_told(spec, before, after, change)
        before = after
    fresh = finish(spec, [((party, row.item), row) for party in PARTIES for row in matches(spec, parties[party])])
    if spec.reduce is None:
        assert live.items() == list(fresh.tokens) == before.tokens
    else:
        lines = tuple((group.by, group.value) for group in live.groups())
        assert Answer(lines) == before
        assert fresh.groups is not None
        assert Answer(tuple((group.by, group.value) for group in fresh.groups)) == before


@pytest.mark.parametrize("run_keys", [1, 2, 3])
@given(start=st.sets(st.integers(0, 20)), steps=st.lists(st.integers(0, 20), max_size=60))
def test_sorted_keys_are_a_sorted_list(run_keys: int, start: set[int], steps: list[int]) -> None:
    """Short runs, so that every step is at the end of one."""
    with mock.patch.object(sorted_keys, "RUN_KEYS", run_keys):
        keys, expected = SortedKeys(start), set(start)
        for number in steps:
            (keys.remove if number in expected else keys.add)(number)
            expected ^= {number}
            assert list(keys) == sorted(expected)
            assert len(keys) == len(expected)
            assert [keys.rank(each) for each in sorted(expected)] == list(range(len(expected)))
            if expected:
                assert (keys.first(), keys.last()) == (min(expected), max(expected))


def test_sorted_keys_split_their_runs() -> None:
    keys = SortedKeys()
    numbers = list(range(5 * RUN_KEYS))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        keys.add(number)
    assert list(keys) == sorted(numbers)
    assert [keys.rank(number) for number in (0, 2500, 4999)] == [0, 2500, 4999]


def where(**keywords: Any) -> And:
    return And(tuple(comparisons(keywords)))


def test_a_change_of_what_is_not_selected_is_not_told() -> None:
    graph = Graph()
    task = graph.create(1, title="a", note="x")
    live = LiveQuery(QuerySpec(select=(parse_field("title"),)), graph)
    live.start()
    graph.write(task, "note", "y")
    assert live.update({task}) is None
    graph.write(task, "title", "b")
    assert live.update({task}) == Change(changed=(task,))


def test_an_item_that_sorts_elsewhere_is_moved() -> None:
    graph = Graph()
    tasks = [graph.create(n, due=n * 10) for n in range(4)]
    spec = QuerySpec(order=(Order(parse_field("due")),), select=(parse_field("title"),))
    live = LiveQuery(spec, graph)
    live.start()
    graph.write(tasks[1], "due", 15)
    assert live.update({tasks[1]}) is None, "it kept its place"
    graph.write(tasks[1], "due", 25)
    assert live.update({tasks[1]}) == Change(moved=(tasks[1],), positions=((2, tasks[1]),))


def test_a_limit_lets_the_next_one_in() -> None:
    graph = Graph()
    tasks = [graph.create(n, due=n) for n in range(5)]
    live = LiveQuery(QuerySpec(order=(Order(parse_field("due")),), limit=2), graph)
    assert live.start().added == (tasks[0], tasks[1])
    graph.delete(tasks[0])
    change = live.update(graph.take_changed())
    assert change == Change(added=(tasks[2],), removed=(tasks[0],), positions=((1, tasks[2]),))
    graph.write(tasks[4], "title", "outside the limit")
    assert live.update({tasks[4]}) is None


def test_ties_are_broken_upwards_by_item_also_in_descending_order() -> None:
    graph = Graph()
    tasks = [graph.create(n, due=1) for n in (3, 1, 2)]
    spec = QuerySpec(order=(Order(parse_field("due"), descending=True),))
    live = LiveQuery(spec, graph)
    live.start()
    assert live.items() == sorted(tasks) == list(evaluate(spec, graph).tokens)


def test_an_item_reached_twice_stays_until_both_ways_are_gone() -> None:
    graph = Graph()
    home, other = graph.create(1, "board"), graph.create(2, "board")
    task = graph.create(3, "task", home)
    graph.embed(other, task)
    spec = QuerySpec((Stage(filter=where(type="board")), Stage(Step.EMBEDDED)))
    live = LiveQuery(spec, graph)
    live.start()
    graph.take_changed()
    graph.delete(home)
    assert live.update(graph.take_changed()) is None
    graph.delete(other)
    assert live.update(graph.take_changed()) == Change(removed=(task,))


def test_naming_items_that_did_not_change_is_harmless() -> None:
    graph = Graph()
    for number in range(5):
        graph.create(number, n=number)
    live = LiveQuery(QuerySpec(reduce=Reduce(Reducer.SUM, parse_field("n"))), graph)
    live.start()
    assert live.update({item(number) for number in range(9)}) is None


def test_a_sum_of_floats_does_not_drift() -> None:
    graph = Graph()
    graph.create(0, n=1e16)
    live = LiveQuery(QuerySpec(reduce=Reduce(Reducer.SUM, parse_field("n"))), graph)
    live.start()
    for number in range(1, 50):
        graph.create(number, n=0.1)
        live.update(graph.take_changed())
    graph.remove(item(0))
    live.update(graph.take_changed())
    assert live.groups()[0].value == math.fsum([0.1] * 49)


# cost

PLANS = {
    "filter": QuerySpec((Stage(filter=where(type="task", done=False)),)),
    "order": QuerySpec((Stage(filter=where(type="task")),), order=(Order(parse_field("due"), True),)),
    "order, limit": QuerySpec((Stage(filter=where(type="task")),), order=(Order(parse_field("due")),), limit=100),
    "children": QuerySpec((Stage(filter=where(type="board")), Stage(Step.CHILDREN, where(done=False)))),
    "parent": QuerySpec((Stage(filter=where(done=False)), Stage(Step.PARENT))),
    "references": QuerySpec((Stage(filter=where(type="task")), Stage(Step.REFERENCES))),
    "sum by": QuerySpec(
        (Stage(filter=where(type="task")),), reduce=Reduce(Reducer.SUM, parse_field("due"), parse_field("done"))
    ),
    "max": QuerySpec((Stage(filter=where(type="task")),), reduce=Reduce(Reducer.MAX, parse_field("due"))),
}


def board_of(size: int) -> Graph:
    """One board with all tasks, so that a parent listed again would show."""
    chance = random.Random(size)
    graph = Graph()
    board = graph.create(0, "board")
    for number in range(1, size):
        graph.create(number, "task", board, due=chance.randrange(10 * size), done=bool(number % 2))
    graph.take_changed()
    return graph


@pytest.mark.parametrize("plan", PLANS)
def test_the_rows_read_for_one_change_do_not_depend_on_the_size(plan: str) -> None:
    reads = []
    for size in (100, 3000):
        graph = board_of(size)
        live = LiveQuery(PLANS[plan], graph)
        live.start()
        graph.reads = 0
        for number in range(1, 50):
            graph.write(item(number), "due", number)
            graph.write(item(number), "done", not graph.rows[item(number)].values["done"])
            assert live.update({item(number), item(0)}) is not None or plan in (
                "parent",
                "references",
                "order, limit",
                "max",
            )
        reads.append(graph.reads)
    assert reads[0] == pytest.approx(reads[1], rel=0.1)


class Measured:
    """One live query over a board of some size, and the times it took to be told of single changes."""

    def __init__(self, plan: str, size: int) -> None:
        self.graph, self.size, self.chance = board_of(size), size, random.Random(7)
        self.live = LiveQuery(PLANS[plan], self.graph)
        self.live.start()
        self.times: list[float] = []

    def change(self) -> None:
        target = item(self.chance.randrange(1, self.size))
        self.graph.write(target, "due", self.chance.randrange(10 * self.size))
        self.graph.write(target, "done", not self.graph.rows[target].values["done"])
        changed = {target, item(0)}  # the board is named too, as after a move
        begin = time.perf_counter()
        self.live.update(changed)
        self.times.append(time.perf_counter() - begin)

    def median_us(self) -> float:
        return statistics.median(self.times) * 1e6


def main() -> None:
    sys.stdout.write(f"{'plan':14} {'1,000':>9} {'100,000':>9}  ratio\n")
    for plan in PLANS:
        small, large = Measured(plan, 1_000), Measured(plan, 100_000)
        for _ in range(3000):  # in turns, so that a busy machine slows both
            small.change()
            large.change()
        ratio = large.median_us() / small.median_us()
        sys.stdout.write(f"{plan:14} {small.median_us():6.1f} us {large.median_us():6.1f} us  {ratio:.2f}\n")


if __name__ == "__main__":
    main()
