"""Random queries and random histories for the tests of fresh and live queries."""

from datetime import UTC, datetime

from hypothesis import strategies as st

from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.query.fields import parse_field
from echostore.kernel.query.filters import And, Compare, Filter, Not, Op, Or
from echostore.kernel.query.source import Deleted
from echostore.kernel.query.spec import Order, QuerySpec, Reduce, Reducer, Stage, Step
from echostore.kernel.values import BlobRef, Reference, Value
from reference.query import Graph, item

ITEMS = 6
TYPES = ("board", "task", "link", "system")
OTHER_PARTY = PartyKey(b"p" * 32)

items = st.integers(0, ITEMS - 1).map(item)
numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([0.5, -0.0, 0.0, 2.0, 1e308, 0.1, float("nan"), float("inf"), float("-inf"), 2**62, 2.0**62]),
)
scalars = st.one_of(
    numbers,
    st.booleans(),
    st.none(),
    st.sampled_from(["", "a", "ab", "b"]),
    st.sampled_from([b"", b"a", b"ab"]),
    st.sampled_from([datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=UTC)]),
    st.sampled_from([datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)]),
    items.map(Reference),
    st.builds(Reference, items, st.just(OTHER_PARTY)),
    st.just(BlobRef((), 3)),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.sampled_from(["x", "y"]), scalars, max_size=2),
)
property_fields = st.sampled_from(["a", "b", "n", "m.x", ("m", "x", "y")]).map(parse_field)
fields = st.one_of(
    property_fields,
    st.sampled_from(["@item", "@type", "@parent", "@source", "@target", "@created", "@deleted", "@model"]).map(
        parse_field
    ),
)


@st.composite
def compares(draw: st.DrawFn) -> Filter:
    field, op = draw(fields), draw(st.sampled_from(Op))
    if draw(st.integers(0, 2)) == 0:  # often enough, something that many items pass
        return Compare(parse_field("@type"), Op.EQ, draw(st.sampled_from(TYPES)))
    if op is Op.EXISTS:
        return Compare(field, op)
    if op is Op.IN:
        return Compare(field, op, tuple(draw(st.lists(values, max_size=3))))
    if op is Op.STARTSWITH:
        return Compare(field, op, draw(st.sampled_from(["", "a", b"a"])))
    return Compare(field, op, draw(values))


filters: st.SearchStrategy[Filter] = st.recursive(
    compares(),
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(And, st.lists(inner, max_size=2).map(tuple)),
        st.builds(Or, st.lists(inner, max_size=3).map(tuple)),
    ),
    max_leaves=3,
)
# Most stages let most items through: a walk that reaches nothing tests nothing.
EVERYTHING = st.just(And(()))
passing: st.SearchStrategy[Filter] = st.one_of(EVERYTHING, EVERYTHING, filters)
rules = st.sampled_from([Deleted.SHOW, Deleted.HIDE, Deleted.HIDE, Deleted.ONLY])
stages = st.builds(Stage, st.sampled_from([step for step in Step if step is not Step.ALL]), passing, rules)
reduces = st.builds(
    Reduce, st.sampled_from(Reducer), st.one_of(st.just(parse_field("n")), fields), st.one_of(st.none(), fields)
)


@st.composite
def specs(draw: st.DrawFn) -> QuerySpec:
    first = Stage(Step.ALL, draw(passing), draw(rules))
    rest = draw(st.lists(stages, max_size=3))
    reduce = draw(st.one_of(st.none(), st.none(), reduces))
    select = None if reduce else draw(st.one_of(st.none(), st.lists(fields, min_size=1, max_size=2).map(tuple)))
    return QuerySpec(
        stages=(first, *rest),
        order=tuple(draw(st.lists(st.builds(Order, fields, st.booleans()), max_size=2))),
        limit=draw(st.one_of(st.none(), st.integers(1, 4))),
        select=select,
        reduce=reduce,
    ).check()


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    graph = Graph()
    for number in range(ITEMS):
        if draw(st.integers(0, 3)):
            create(draw, graph, number)
    for outer, inner in draw(st.lists(st.tuples(items, items), max_size=3)):
        graph.embed(outer, inner)
    graph.take_changed()
    return graph


def create(draw: st.DrawFn, graph: Graph, number: int) -> None:
    type = draw(st.sampled_from(TYPES))
    parent = draw(st.one_of(st.none(), items))
    kinds = {"n": numbers, "a": values, "b": scalars, "m": values}
    content = {name: draw(kind) for name, kind in kinds.items() if draw(st.booleans())}
    if type == "link":
        party = draw(st.sampled_from([None, None, OTHER_PARTY]))
        graph.create(number, type, parent, source=draw(items), target=draw(items), target_party=party, **content)
    else:
        graph.create(number, type, parent, **content)
    if draw(st.integers(0, 4)) == 0:
        graph.delete(item(number))


@st.composite
def mutations(draw: st.DrawFn, graph: Graph) -> None:
    """One random write to the graph; drawn step by step because it depends on what there is."""
    there: list[ItemId] = sorted(graph.rows)
    kind = draw(st.sampled_from(["set", "set", "unset", "move", "delete", "embed", "create", "remove", "retype"]))
    if kind == "create" or not there:
        create(draw, graph, draw(st.integers(0, ITEMS - 1)))
        return
    target = draw(st.sampled_from(there))
    if kind == "set":
        name = draw(st.sampled_from(["n", "a", "b", "m"]))
        value: Value = draw(numbers if name == "n" else values)
        graph.write(target, name, value)
    elif kind == "unset":
        graph.erase(target, draw(st.sampled_from(["n", "a", "b", "m"])))
    elif kind == "move":
        graph.move(target, draw(st.one_of(st.none(), items)))
    elif kind == "delete":
        graph.delete(target, not graph.rows[target].deleted)
    elif kind == "embed":
        inner = draw(items)
        graph.embed(target, inner, (target, inner) not in graph.embeddings)
    elif kind == "retype":
        graph.retype(target, draw(st.sampled_from(TYPES)))
    else:
        graph.remove(target)
