"""Lists and maps that a read gives can't be changed by accident: each attempt raises, and no state is touched."""

import asyncio
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from echostore import aio
from echostore.kernel.errors import ReadOnlyValue, UsageError
from echostore.kernel.frozen import FrozenDict, FrozenList, frozen, plain_copy
from echostore.peer.local_server import LocalServer
from echostore.peer.peer import Peer
from echostore.thin.thin_party import connect
from thin_server import ThinServer, capability

VALUE = {"tags": ["a", ["b"]], "m": {"z": 1, "deep": {"list": [{}]}}, "n": 1}

LIST_CHANGES: list[Callable[[Any], object]] = [
    lambda it: it.append(1),
    lambda it: it.extend([1]),
    lambda it: it.insert(0, 1),
    lambda it: it.pop(),
    lambda it: it.remove(1),
    lambda it: it.clear(),
    lambda it: it.sort(),
    lambda it: it.reverse(),
    lambda it: it.__setitem__(0, 1),
    lambda it: it.__setitem__(slice(0, 1), [1]),
    lambda it: it.__delitem__(0),
    lambda it: it.__iadd__([1]),
    lambda it: it.__imul__(2),
]
MAP_CHANGES: list[Callable[[Any], object]] = [
    lambda it: it.__setitem__("z", 2),
    lambda it: it.__delitem__("z"),
    lambda it: it.update(z=2),
    lambda it: it.setdefault("y", 2),
    lambda it: it.pop("z"),
    lambda it: it.popitem(),
    lambda it: it.clear(),
    lambda it: it.__ior__({"z": 2}),
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home") as peer:
        peer.create_party("Trip")
        yield peer


@pytest.fixture(params=["peer", "attached", "thin", "as_of"])
def item(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Any]:
    """An item that holds VALUE, as each kind of program reads it."""
    own = peer.party("@Trip")
    if request.param == "peer":
        yield own.create("property-set", VALUE, type="thing")
    elif request.param == "as_of":
        made = own.create("property-set", VALUE, type="thing")
        past = own.as_of(own.flush().anchor)
        made["tags"] = ["later"]
        yield past.get(made.id)
    elif request.param == "attached":
        own.create("property-set", VALUE, type="thing")
        server = LocalServer(peer)
        try:
            with echostore.open(peer.home.path) as attached:
                yield attached.party("@Trip").query(type="thing").one()
        finally:
            server.close()
    else:
        with ThinServer() as root, connect(root.url, capability()) as party:
            root.create("thing", **VALUE)
            yield party.query(type="thing").first()


def nested(item: Any) -> list[Any]:
    """Every list and map that reading an item gives."""
    return [
        item["tags"],
        item["tags"][1],
        item["m"],
        item["m"]["deep"],
        item["m", "deep", "list"],
        item["m", "deep", "list"][0],
        item.get("tags"),
        item.get("m"),
        item.value(),
        item.value()["tags"],
        item.to_dict()["tags"],
        item.to_dict()["m"]["deep"]["list"][0],
    ]


def test_no_value_that_was_read_can_be_changed(item: Any) -> None:
    for value in nested(item):
        for change in LIST_CHANGES if isinstance(value, list) else MAP_CHANGES:
            with pytest.raises(ReadOnlyValue, match="Write the item instead"):
                change(value)
    assert item.to_dict() == VALUE


def test_augmented_assignment_of_a_property_raises_and_changes_nothing(item: Any) -> None:
    with pytest.raises(ReadOnlyValue):
        item["tags"] += ["x"]
    assert item["tags"] == VALUE["tags"]


def test_a_dict_of_all_properties_is_the_callers_own(item: Any) -> None:
    item.to_dict()["n"] = 2
    assert item["n"] == 1


@pytest.mark.parametrize("item", ["peer", "attached", "thin"], indirect=True)
def test_what_was_read_can_be_written_back(item: Any) -> None:
    tags = item["tags"].copy()
    tags[1].append("c")
    item["tags"] = tags
    item["again"] = item["m"]
    assert (item["tags"], item["again"]) == (["a", ["b", "c"]], VALUE["m"])


@given(values)
def test_a_frozen_value_is_to_readers_what_the_plain_one_is(value: Any) -> None:
    shown = frozen(value)
    assert shown == value
    assert value == shown
    assert repr(shown) == repr(value)
    assert frozen(shown) == value
    for plain in (plain_copy(shown), copy.copy(shown), copy.deepcopy(shown), pickle.loads(pickle.dumps(shown))):
        assert plain == value
        assert not _holds_frozen(plain)


@given(values.filter(lambda value: "\\x" not in repr(value) and "b'" not in repr(value) and 'b"' not in repr(value)))
def test_a_frozen_value_is_json_like_the_plain_one(value: Any) -> None:
    assert json.dumps(frozen(value)) == json.dumps(value)


def test_new_lists_and_maps_are_made_of_frozen_ones() -> None:
    shown = frozen(VALUE)
    assert [*shown["tags"], "x"] == ["a", ["b"], "x"]
    assert type(shown["tags"] + ["x"]) is list
    assert type(shown["m"] | {"z": 2}) is dict
    assert {**shown["m"], "z": 2}["z"] == 2
    assert sorted([3, *frozen([2, 1])]) == [1, 2, 3]


def test_the_error_is_a_type_error_as_well() -> None:
    with pytest.raises(TypeError):
        frozen([1]).append(2)
    with pytest.raises(UsageError, match='item\\["map", "key"\\] = 2'):
        frozen({})["a"] = 1


@pytest.mark.parametrize("item", ["peer", "attached", "as_of"], indirect=True)
def test_rows_and_groups_of_a_query_are_read_only(item: Any) -> None:
    query = item.party.query(type="thing")
    for row in (query.rows()[0], query.select("tags", "m").rows()[0]):
        assert isinstance(row["tags"], FrozenList)
        assert isinstance(row["m"], FrozenDict)
    (group, _), *_ = query.reduce("count", by="tags").groups()
    assert isinstance(group, FrozenList)
    assert item.to_dict() == VALUE


def test_elements_posts_marks_and_metadata_are_read_only(peer: Peer) -> None:
    party = peer.party("@Trip")
    items = party.create("growable-array")
    items.append({"a": [1]})
    log = party.create("threaded-log")
    first = log.post({"re": [1]})
    log.post(["reply"], reply_to=first)
    text = party.create("text")
    text.insert(0, "bold")
    text.mark(0, 4, "bold")
    text.set_foreign_key("crm", "42")
    text.restrict(roles=["admin"])
    (thread,) = log.threads()
    for value in (
        items[0],
        items[0]["a"],
        next(iter(items)),
        items.to_list()[0],
        items.value(),
        log.posts()[0].body,
        log.posts()[0].body["re"],
        thread.entry.body,
        thread.replies[0].entry.body,
        log.value()[0]["body"],
        text.runs()[0].marks,
        text.metadata,
        text.foreign_keys,
        text.access,
        (text.access or {})["roles"],
    ):
        for change in LIST_CHANGES if isinstance(value, list) else MAP_CHANGES:
            with pytest.raises(ReadOnlyValue):
                change(value)
    assert (items.to_list(), log.posts()[0].body) == ([{"a": [1]}], {"re": [1]})


def test_differences_are_read_only(peer: Peer) -> None:
    party = peer.party("@Trip")
    made = party.create(tags=[1])
    before = party.flush().anchor
    made["tags"] = [1, 2]
    (found,) = made.diff(before)
    for value in (found.before, found.after):
        with pytest.raises(ReadOnlyValue):
            value.append(3)
    assert made["tags"] == [1, 2]


def test_values_over_asyncio_are_read_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with aio.open(tmp_path / "other") as peer:
            party = await peer.create_party("Trip")
            made = await party.create("property-set", VALUE, type="thing")
            for value in (await made["tags"], await made["m"], (await made.to_dict())["m"]):
                with pytest.raises(ReadOnlyValue):
                    value.clear()

    asyncio.run(story())


@dataclass
class Plan:
    """A dataclass whose fields hold lists and maps."""

    tags: list[str] = field(default_factory=list)
    anything: Any = None


def test_the_fields_of_a_dataclass_are_the_programs_own(peer: Peer) -> None:
    made = peer.party("@Trip").create(Plan(["a"], {"x": [1]}))
    plan = made.to(Plan)
    plan.tags.append("b")
    plan.anything["x"].append(2)
    assert made.to(Plan) == Plan(["a"], {"x": [1]})


def _holds_frozen(value: Any) -> bool:
    if isinstance(value, (FrozenList, FrozenDict)):
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_holds_frozen, inner))
