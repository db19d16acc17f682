"""Schemas: local writes that break one are refused whole, arriving ones are shown; dataclasses go in and come out."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum, StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.errors import SchemaViolation, UsageError
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.models.property_set import PropertySet, Set
from echostore.kernel.values import BlobRef, Reference
from echostore.peer.dataclass_mapping import fields_of, type_name
from echostore.peer.items import Item
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.schema import FieldType, SchemaField
from echostore.peer.schema_types import schema_field
from two_peers import admitted, open_quiet, sync

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)

EXAMPLES: dict[str, Any] = {
    "null": None,
    "bool": True,
    "int": 3,
    "float": 2.5,
    "string": "text",
    "bytes": b"raw",
    "timestamp": NOON,
    "list": [1],
    "map": {"a": 1},
    "blob": BlobRef((), 0),
}
"""One value of each type that needs no party; references are tested by themselves."""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with open_quiet(tmp_path / "laptop") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Road trip")


def task_schema(party: Party, *, closed: bool = False) -> None:
    fields = {"text": {"type": "string", "required": True}, "due": "timestamp", "done": "bool"}
    party.schemas.define("task", fields, closed=closed)


def write_unchecked(item: Any, **values: Any) -> None:
    """Write as a peer would that has not heard of the schema."""
    changes = tuple(Set((name,), value) for name, value in values.items())
    item.party.runtime.operate([ItemOperation(item.id, PropertySet.name, changes)])


# types


@pytest.mark.parametrize("wanted", EXAMPLES)
@pytest.mark.parametrize("given_type", EXAMPLES)
def test_a_field_takes_its_own_type_and_no_other(party: Party, wanted: str, given_type: str) -> None:
    party.schemas.define("thing", {"x": {"type": wanted, "required": True}})
    fits = wanted == given_type or (wanted, given_type) == ("float", "int")
    if fits:
        assert party.create("property-set", type="thing", x=EXAMPLES[given_type])["x"] == EXAMPLES[given_type]
    else:
        with pytest.raises(SchemaViolation, match=f"field 'x' expects a {wanted}, given {given_type}"):
            party.create("property-set", type="thing", x=EXAMPLES[given_type])


def test_any_takes_everything(party: Party) -> None:
    party.schemas.define("thing", {"x": "any"})
    for value in EXAMPLES.values():
        assert party.create("property-set", type="thing", x=value)["x"] == value


def test_a_bool_is_not_an_int(party: Party) -> None:
    party.schemas.define("thing", {"x": "int"})
    with pytest.raises(SchemaViolation, match="expects a int, given bool True"):
        party.create("property-set", type="thing", x=True)


def test_an_optional_field_may_be_absent_or_null_and_a_required_one_neither(party: Party) -> None:
    task_schema(party)
    task = party.create("property-set", type="task", text="x", due=None)
    assert task["due"] is None
    with pytest.raises(SchemaViolation, match=r"'text' is required \(a string\) and missing"):
        party.create("property-set", type="task", done=False)
    with pytest.raises(SchemaViolation, match="'text' expects a string, given null"):
        party.create("property-set", type="task", text=None)


# changes


def test_a_refused_change_leaves_everything_as_it_was(party: Party) -> None:
    task_schema(party)
    task = party.create("property-set", type="task", text="tickets", done=False)
    before = party.snapshot().cid
    with pytest.raises(SchemaViolation) as refused:
        task["due"] = "tomorrow"
    assert "field 'due' expects a timestamp, given string 'tomorrow'" in refused.value.what
    assert refused.value.unchanged == "Nothing was changed."
    assert task.to_dict() == {"text": "tickets", "done": False}
    assert party.snapshot().cid == before


def test_one_bad_field_of_an_update_refuses_all_of_it(party: Party) -> None:
    task_schema(party)
    task = party.create("property-set", type="task", text="tickets")
    with pytest.raises(SchemaViolation, match=r"'due'.*'done'"):
        task.update(text="hotel", due=5, done="no")
    assert task.to_dict() == {"text": "tickets"}


def test_a_required_field_can_not_be_deleted(party: Party) -> None:
    task_schema(party)
    task = party.create("property-set", type="task", text="tickets", done=True)
    with pytest.raises(SchemaViolation, match="'text' is required"):
        del task["text"]
    del task["done"]
    assert task.to_dict() == {"text": "tickets"}


def test_a_refused_change_rolls_its_batch_back(party: Party) -> None:
    task_schema(party)
    task = party.create("property-set", type="task", text="tickets")

    def change() -> None:
        with party.batch():
            task["text"] = "hotel"
            task["done"] = "yes"

    with pytest.raises(SchemaViolation):
        change()
    assert task.to_dict() == {"text": "tickets"}


def test_nested_writes_sets_and_increments_are_seen_by_what_they_leave_behind(party: Party) -> None:
    party.schemas.define("thing", {"n": "int", "address": "map", "note": "string", "tags": "list"})
    thing = party.create("property-set", type="thing", n=1, note="x")
    thing["address", "city"] = "Oslo"
    thing.add("tags", "red")
    thing.increment("n", 2)
    for refused in (
        lambda: thing.increment("n", 0.5),
        lambda: thing.add("note", "red"),
        lambda: thing.__setitem__(("note", "inner"), 1),
        lambda: thing.__setitem__("tags", "red"),
    ):
        with pytest.raises(SchemaViolation):
            refused()
    assert thing.to_dict() == {"n": 3, "note": "x", "address": {"city": "Oslo"}, "tags": ["red"]}


def test_the_last_element_of_a_required_set_stays(party: Party) -> None:
    party.schemas.define("thing", {"tags": "list"})
    thing = party.create("property-set", type="thing")
    thing.add("tags", "red")
    thing.add("tags", "blue")
    party.schemas.define("thing", {"tags": {"type": "list", "required": True}})
    thing.remove("tags", "red")
    with pytest.raises(SchemaViolation, match="'tags' is required"):
        thing.remove("tags", "blue")
    assert thing["tags"] == ["blue"]


def test_a_closed_schema_refuses_what_it_does_not_name(party: Party) -> None:
    task_schema(party, closed=True)
    task = party.create("property-set", type="task", text="x")
    with pytest.raises(SchemaViolation, match="'colour' is not a field of 'task', whose schema is closed"):
        task["colour"] = "red"
    task_schema(party, closed=False)
    task["colour"] = "red"
    task_schema(party, closed=True)
    del task["colour"]


def test_an_item_that_broke_its_schema_can_be_repaired_step_by_step(party: Party) -> None:
    task = party.create("property-set", type="task", text=5, due="tomorrow")
    task_schema(party)
    assert {violation.field for violation in party.schemas.violations()} == {"text", "due"}
    task["text"] = "tickets"
    assert {violation.field for violation in party.schemas.violations()} == {"due"}
    del task["due"]
    assert party.schemas.violations() == []


def test_schemas_rule_property_sets_only(party: Party) -> None:
    task_schema(party)
    assert party.create("text", type="task").type == "task"
    assert party.schemas.violations() == []


# references


def test_a_reference_leads_to_an_item_of_the_party_of_the_target_type(party: Party) -> None:
    party.schemas.define("task", {"owner": SchemaField(FieldType.REFERENCE, target="person")})
    person = party.create("property-set", type="person")
    car = party.create("property-set", type="car")
    task = party.create("property-set", type="task", owner=person)
    with pytest.raises(SchemaViolation, match=r"expects a reference to an item of type 'person', item .* is a 'car'"):
        task["owner"] = car
    with pytest.raises(SchemaViolation, match="which is not in the party"):
        task["owner"] = Reference(bytes(16))  # type: ignore[arg-type]  # an id that names nothing
    assert task["owner"] == person.reference
    with party.batch():  # also one that is made in the same batch
        task["owner"] = party.create("property-set", type="person")


def test_a_list_with_a_target_holds_references_to_that_type(party: Party) -> None:
    party.schemas.define("team", {"members": {"type": "list", "target": "person"}})
    person, car = (party.create("property-set", type=type) for type in ("person", "car"))
    team = party.create("property-set", type="team", members=[person])
    with pytest.raises(SchemaViolation, match="element 1 expects a reference"):
        team["members"] = [person, car]
    with pytest.raises(SchemaViolation, match="element 0 is string 'Ada'"):
        team["members"] = ["Ada"]


def test_a_reference_into_another_party_is_checked_when_that_is_open(peer: Peer, party: Party) -> None:
    other = peer.create_party("Elsewhere")
    person, car = (other.create("property-set", type=type) for type in ("person", "car"))
    party.schemas.define("task", {"owner": {"type": "reference", "target": "person"}})
    task = party.create("property-set", type="task", owner=person)
    with pytest.raises(SchemaViolation, match="is a 'car'"):
        task["owner"] = car
    task["owner"] = Reference(car.id, b"\1" * 32)  # type: ignore[arg-type]  # a party that is not here


# the schema as an item


def test_a_schema_is_an_item(party: Party) -> None:
    task_schema(party)
    item = party.query(type="schema").one()
    assert item.to_dict() == {
        "for_type": "task",
        "closed": False,
        "fields": {
            "text": {"type": "string", "required": True},
            "due": {"type": "timestamp"},
            "done": {"type": "bool"},
        },
    }


def test_defining_the_same_again_writes_nothing(party: Party) -> None:
    task_schema(party)
    before = party.timeframe
    task_schema(party)
    assert party.timeframe == before


def test_defining_anew_replaces_fields(party: Party) -> None:
    task_schema(party)
    party.schemas.define("task", {"text": "int", "size": "int"})
    schema = party.schemas.get("task")
    assert schema is not None
    assert dict(schema.fields) == {"text": SchemaField(FieldType.INT), "size": SchemaField(FieldType.INT)}
    assert party.schemas.all() == [schema]


def test_a_schema_item_edited_by_hand_counts_at_once_and_must_make_sense(party: Party) -> None:
    task_schema(party)
    item = party.query(type="schema").one()
    task = party.create("property-set", type="task", text="x")
    item["fields", "text"] = {"type": "int"}
    task["text"] = 5
    with pytest.raises(SchemaViolation, match=r"'fields\.text' has the type 'number'"):
        item["fields", "text"] = {"type": "number"}
    with pytest.raises(SchemaViolation, match="'for_type' must name a type"):
        del item["for_type"]
    with pytest.raises(SchemaViolation, match="must name a type"):
        party.create("property-set", type="schema", fields={})


def test_a_deleted_schema_asks_for_nothing_and_a_restored_one_again(party: Party) -> None:
    task_schema(party)
    item = party.query(type="schema").one()
    item.delete()
    assert party.schemas.get("task") is None
    task = party.create("property-set", type="task", text=5)
    item.restore()
    with pytest.raises(SchemaViolation):
        task["due"] = 5


def test_a_schema_changed_in_a_batch_counts_for_the_rest_of_it(party: Party) -> None:
    def define_and_break() -> None:
        with party.batch():
            task_schema(party)
            party.create("property-set", type="task", text=5)

    with pytest.raises(SchemaViolation):
        define_and_break()
    assert party.schemas.all() == []
    assert not party.has_schemas
    party.create("property-set", type="task", text=5)
    task_schema(party)
    item = party.query(type="schema").one()
    with party.batch():
        item["fields", "text"] = {"type": "int"}
        party.create("property-set", type="task", text=5)
        item.delete()
        party.create("property-set", type="task", text=b"")


def test_the_schema_with_the_lowest_id_counts(party: Party) -> None:
    first = party.create("property-set", type="schema", for_type="task", fields={"x": {"type": "int"}})
    second = party.create("property-set", type="schema", for_type="task", fields={"x": {"type": "string"}})
    assert first.id < second.id
    party.create("property-set", type="task", x=1)
    with pytest.raises(SchemaViolation):
        party.create("property-set", type="task", x="one")
    first.delete()
    party.create("property-set", type="task", x="one")


def test_undoing_a_definition_takes_it_back(party: Party) -> None:
    task_schema(party)
    party.undo()
    assert party.schemas.get("task") is None
    party.create("property-set", type="task", text=5)


def test_a_party_without_schemas_checks_nothing(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a check without schemas")

    monkeypatch.setattr(party.schemas, "check_new", never)
    monkeypatch.setattr(party.schemas, "check_change", never)
    party.create("property-set", type="task", text=5)["text"] = 6


def test_a_check_looks_at_no_other_item(party: Party) -> None:
    task_schema(party)
    tasks = [party.create("property-set", type="task", text="x") for _ in range(50)]
    party.snapshot()
    state = party.runtime.state
    state.records.clear()
    party.schemas.get("task")
    loads = state.loads
    tasks[7]["text"] = "y"
    assert state.loads == loads + 1


def test_schemas_hold_after_a_restart(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "laptop") as peer:
        party = peer.create_party("Road trip")
        task_schema(party)
        key = party.key
    with open_quiet(tmp_path / "laptop") as peer:
        party = peer.party(key)
        with pytest.raises(SchemaViolation):
            party.create("property-set", type="task", text=5)


def test_the_past_shows_the_schema_of_its_time(party: Party) -> None:
    task_schema(party)
    anchor = party.anchor()
    party.schemas.define("task", {"text": "int"})
    past = party.as_of(anchor).schemas.get("task")
    assert past is not None
    assert past.fields["text"].type is FieldType.STRING


@pytest.mark.parametrize(
    "bad",
    [
        {"x": "number"},
        {"x": {"type": "int", "default": 3}},
        {"x": {"type": "int", "required": "yes"}},
        {"x": {}},
        {"x": 3},
        {"x": complex},
    ],
)
def test_a_definition_must_make_sense(party: Party, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="schema field"):
        party.schemas.define("task", bad)
    with pytest.raises(UsageError):
        party.schemas.define("schema", {})
    assert not party.has_schemas


# what arrives from elsewhere


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Party, Party]]:
    with open_quiet(tmp_path / "a") as a, open_quiet(tmp_path / "b") as b:
        ours = a.create_party("Road trip")
        yield ours, admitted(ours, b)


def test_a_schema_counts_on_every_peer_once_it_arrives(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    task = theirs.create("property-set", type="task", text=5)
    task_schema(ours)
    theirs.create("property-set", type="task", text=6)
    sync(ours, theirs)
    with pytest.raises(SchemaViolation):
        theirs.create("property-set", type="task", text=7)
    with pytest.raises(SchemaViolation):
        task["text"] = 8
    for party in pair:
        listed = party.schemas.violations()
        assert [(each.type, each.field) for each in listed] == [("task", "text"), ("task", "text")]
        assert "expects a string, given int" in str(listed[0])
    assert len(ours.query(type="task").all()) == 2  # shown, not dropped
    assert ours.snapshot().cid == theirs.snapshot().cid


def test_a_schema_edited_elsewhere_replaces_what_was_parsed_here(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    task_schema(ours)
    sync(ours, theirs)
    theirs.create("property-set", type="task", text="x")
    ours.schemas.define("task", {"text": "int"})
    sync(ours, theirs)
    with pytest.raises(SchemaViolation):
        theirs.create("property-set", type="task", text="x")
    theirs.create("property-set", type="task", text=5)


def test_fields_changed_at_the_same_time_both_stand(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.schemas.define("task", {"a": "int", "b": "int"})
    sync(ours, theirs)
    ours.schemas.define("task", {"a": "string", "b": "int"})
    theirs.schemas.define("task", {"a": "int", "b": "string"})
    sync(ours, theirs)
    for party in pair:
        schema = party.schemas.get("task")
        assert schema is not None
        assert {name: str(each.type) for name, each in schema.fields.items()} == {"a": "string", "b": "string"}


def test_two_definitions_at_the_same_time_count_as_one_on_both_sides(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.schemas.define("task", {"x": "int"})
    theirs.schemas.define("task", {"x": "string"})
    sync(ours, theirs)
    assert ours.schemas.get("task") == theirs.schemas.get("task")
    assert len(ours.query(type="schema").all()) == 2


def test_a_schema_item_that_makes_no_sense_is_listed_and_asks_for_nothing(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    task_schema(theirs)
    broken = theirs.query(type="schema").one()
    write_unchecked(broken, fields={"text": 5, "due": {"type": "epoch"}, "done": {"type": "bool"}}, closed="very")
    nameless = theirs.create("property-set", type="schema", for_type="x")
    write_unchecked(nameless, for_type=7)
    sync(ours, theirs)
    task = ours.create("property-set", type="task", text=1, due=2)
    with pytest.raises(SchemaViolation):
        task["done"] = 3
    listed = {each.field for each in ours.schemas.violations()}
    assert listed == {"fields.text", "fields.due", "closed", "for_type"}


def test_violations_are_listed_after_a_restart_and_a_missing_target_is_one(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    task_schema(ours)
    ours.schemas.define("link", {"to": {"type": "reference", "target": "task"}})
    link = theirs.create("property-set", type="link", to=Reference(bytes(16)))  # type: ignore[arg-type]  # no such item
    sync(ours, theirs)
    ours.runtime.checkpoint()
    ours.runtime.state.records.clear()
    (found,) = ours.schemas.violations("link")
    assert (found.item.id, found.field) == (link.id, "to")
    assert ours.schemas.violations("task") == []


def test_indexed_fields_are_declared_on_every_peer(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.schemas.define("task", {"done": {"type": "bool", "index": True}})
    assert ours.runtime.declared == {"done"}
    task = ours.create("property-set", type="task", done=False)
    ours.create("property-set", type="task", done=True)
    sync(ours, theirs)
    assert theirs.runtime.declared == set()
    assert theirs.query(type="task").where(done=False).ids() == [task.id]
    assert theirs.runtime.declared == {"done"}
    theirs.runtime.checkpoint()
    assert theirs.query(type="task").where(done=False).ids() == [task.id]


# dataclasses


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Person:
    name: str
    mail: str | None = None


@dataclass
class Everything:
    __echo_type__: ClassVar[str] = "everything"

    text: str
    number: int
    ratio: float
    flag: bool
    raw: bytes
    moment: datetime
    words: list[str]
    pair: tuple[int, str]
    sizes: dict[str, list[float]]
    anything: Any
    size: Size
    level: Level
    owner: Person
    friends: list[Person]
    maybe: int | None = 7
    later: datetime | None = None
    either: int | str = 0
    blob: BlobRef | None = None
    type: str = field(default="a name that party.create uses itself", metadata={"index": True})
    noted: int = field(default=0, init=False)


integers = st.integers(-(1 << 63), (1 << 63) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
floats = st.floats(allow_nan=False)
zones = st.sampled_from([UTC, timezone(timedelta(hours=2)), timezone(timedelta(hours=-9, minutes=-30))])
moments = st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2200, 1, 1), timezones=zones)  # noqa: DTZ001 Hypothesis wants bounds without a zone
people = st.builds(Person, texts, st.none() | texts)
everything = st.builds(
    Everything,
    text=texts,
    number=integers,
    ratio=floats,
    flag=st.booleans(),
    raw=st.binary(max_size=20),
    moment=moments,
    words=st.lists(texts, max_size=4),
    pair=st.tuples(integers, texts),
    sizes=st.dictionaries(texts.filter(bool), st.lists(floats, max_size=3), max_size=3),
    anything=st.none() | st.booleans() | texts | st.lists(integers, max_size=3),
    size=st.sampled_from(Size),
    level=st.sampled_from(Level),
    owner=people,
    friends=st.lists(people, max_size=2),
    maybe=st.none() | integers,
    later=st.none() | moments,
    either=integers | texts,
    blob=st.none() | st.just(BlobRef((), 3, "text/plain", "x")),
    type=texts,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    with open_quiet(tmp_path_factory.mktemp("shared") / "home") as peer:
        yield peer.create_party("Round trips")


@given(thing=everything)
def test_what_goes_in_comes_out(shared: Party, thing: Everything) -> None:
    handle = shared.create(thing)
    back = handle.to(Everything)
    assert back == thing
    for name in ("flag", "ratio", "pair", "size", "level", "anything"):
        assert type(getattr(back, name)) is type(getattr(thing, name)), name


@settings(max_examples=40)  # each one looks at all that came before it
@given(things=st.lists(everything, min_size=1, max_size=3))
def test_what_went_in_fits_its_schema_after_a_checkpoint(shared: Party, things: list[Everything]) -> None:
    handles = [shared.create(thing) for thing in things]
    shared.runtime.checkpoint()
    shared.runtime.state.records.clear()
    assert [handle.to(Everything) for handle in handles] == things
    assert shared.schemas.violations() == []


@dataclass
class Node:
    label: str
    next: "Node | None" = None
    peers: list[Reference] = field(default_factory=list)
    parent: Item | None = None


@dataclass(frozen=True, slots=True)
class HTTPServer2:
    port: int


def test_the_type_is_the_class_name_in_lower_case_unless_the_class_says_otherwise() -> None:
    assert [type_name(each) for each in (Person, HTTPServer2, Everything)] == ["person", "http-server2", "everything"]


def test_annotations_become_fields() -> None:
    assert fields_of(Node) == {
        "label": SchemaField(FieldType.STRING, required=True),
        "next": SchemaField(FieldType.REFERENCE, target="node"),
        "peers": SchemaField(FieldType.LIST, required=True),
        "parent": SchemaField(FieldType.REFERENCE),
    }
    fields = fields_of(Everything)
    assert fields["friends"] == SchemaField(FieldType.LIST, required=True, target="person")
    assert fields["type"].index
    assert fields["maybe"] == SchemaField(FieldType.INT)
    assert fields["anything"] == SchemaField()
    assert "noted" not in fields


def test_creating_a_dataclass_defines_its_schema_once(party: Party) -> None:
    first = party.create(Person("Ada"))
    first.name = "first"
    assert (first.type, first.name, first.to_dict()) == ("person", "first", {"name": "Ada", "mail": None})
    party.create(Person("Bob"), parent=first)
    assert [schema.for_type for schema in party.schemas.all()] == ["person"]
    assert len(party.query(type="schema").all()) == 1
    with pytest.raises(SchemaViolation):
        first["name"] = 5


def test_a_class_adds_to_a_schema_and_changes_nothing_it_says(party: Party) -> None:
    party.schemas.define("person", {"name": "any", "shoe": "int"}, closed=True)
    party.create(Person("Ada"))
    schema = party.schemas.get("person")
    assert schema is not None
    assert schema.fields.keys() == {"name", "shoe", "mail"}
    assert schema.fields["name"].type is FieldType.ANY
    assert schema.closed
    party.schemas.define(Person)
    schema = party.schemas.get("person")
    assert schema is not None
    assert dict(schema.fields) == dict(fields_of(Person))


def test_instances_inside_become_items_of_the_same_batch(party: Party) -> None:
    party.create(Node("warm-up"))
    length = party.runtime.data.cursor.length  # type: ignore[union-attr]  # an own party has a data feed
    head = party.create(Node("a", Node("b", Node("c"))))
    assert party.runtime.data.cursor.length == length + 1  # type: ignore[union-attr]  # as above
    assert head.to(Node) == Node("a", Node("b", Node("c")))
    assert party.query(Node).count() == 4
    party.undo()
    assert party.query(Node).count() == 1
    assert party.schemas.get("node") is not None


def test_handles_and_references_can_stand_for_instances(party: Party) -> None:
    last = party.create(Node("last"))
    first = party.create(Node("first", last, peers=[last.reference], parent=last))
    assert first["next"] == last.reference
    assert first.to(Node) == Node("first", Node("last"), [last.reference], last)
    with pytest.raises(SchemaViolation):
        party.create(Node("x", party.create(Person("no node"))))


def test_items_that_lead_to_each_other_are_not_followed_for_ever(party: Party) -> None:
    node = party.create(Node("a"))
    node["next"] = node
    with pytest.raises(UsageError, match="leads back to itself"):
        node.to(Node)
    knot = Node("a")
    knot.next = knot
    with pytest.raises(UsageError, match="holds itself"):
        party.create(knot)
    assert party.query(Node).count() == 1


def test_reading_copes_with_what_others_left_out_or_changed(party: Party) -> None:
    node = party.create(Node("a"))
    write_unchecked(node, next=Reference(bytes(16)), label=5)
    assert node.to(Node) == Node(5, Reference(bytes(16)))  # type: ignore[arg-type]  # what stands there is shown
    bare = party.create("property-set", type="person-2")
    with pytest.raises(UsageError, match="is a 'person-2', not a 'person'"):
        bare.to(Person)
    person = party.create(Person("Ada"))
    party.query(type="schema").where(for_type="person").one().delete()
    del person["name"]
    with pytest.raises(SchemaViolation, match="has no 'name', which Person needs"):
        person.to(Person)


@dataclass
class Unstorable:
    x: complex


@dataclass
class Unresolved:
    x: "Nowhere"  # type: ignore[name-defined]  # noqa: F821 the point of the test


def test_a_class_that_can_not_be_stored_says_why(party: Party) -> None:
    with pytest.raises(UsageError, match=r"Unstorable\.x: a field annotated .*complex"):
        party.create(Unstorable(1j))
    with pytest.raises(UsageError, match="Nowhere"):
        party.create(Unresolved(1))
    with pytest.raises(UsageError, match="not a dataclass"):
        party.query(int)
    with pytest.raises(UsageError, match="a model's name, a model class or a dataclass instance"):
        party.create(5)
    with pytest.raises(UsageError, match="brings its own type"):
        party.create(Person("Ada"), type="x")
    with pytest.raises(UsageError, match="no further properties"):
        party.create(Person("Ada"), text="x")
    assert not party.has_schemas


def test_python_types_name_fields_too() -> None:
    assert schema_field(str) == schema_field("string") == schema_field({"type": "string"})


# the guide


def test_the_guide_runs(peer: Peer, party: Party) -> None:
    run_guide("schemas.md", {"peer": peer, "party": party})


def run_guide(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the Python blocks of a page as one program."""
    text = (Path(__file__).resolve().parent.parent / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    module = ModuleType("guide")
    vars(module).update(names)
    sys.modules["guide"] = module  # dataclasses look their module up there
    try:
        for block in blocks:
            exec(compile(block, name, "exec"), vars(module))
    finally:
        del sys.modules["guide"]
    return vars(module)
