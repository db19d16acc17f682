"""Calls with arguments of the wrong kind: a typed error that says what was wanted, and nothing is changed by it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import EchoError, UsageError

WRONG: list[Any] = [
    None,
    -1,
    3,
    3.5,
    True,
    "",
    "x",
    "\ud800",
    b"",
    b"x" * 16,
    b"x" * 32,
    [],
    [1],
    {},
    {"a": 1},
    (),
    ("a", 1),
    object(),
    int,
    10**30,
]


class Scene:
    """A peer with one item of each model."""

    def __init__(self, folder: Path) -> None:
        self.peer = echostore.open(folder / "home", name="ann", background=False)
        self.party = self.peer.create_party("Trip")
        self.set = self.party.create("property-set", type="task", title="A")
        self.list = self.party.create("growable-array")
        self.list.append(1, 2)
        self.text = self.party.create("text")
        self.text.insert(0, "abc")
        self.log = self.party.create("threaded-log")
        self.peer.view_classes.register("example.org/planner")
        self.party.flush()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        made = Scene(folder)
        yield made
        made.peer.close()


Call = Callable[[Scene, Any], object]

CALLS: dict[str, Call] = {
    # Peer
    "peer.party": lambda s, v: s.peer.party(v),
    "peer.create_party(local=)": lambda s, v: s.peer.create_party("t", local=v) if not isinstance(v, bool) else None,
    "peer.create_party": lambda s, v: s.peer.create_party(v) if v != "x" else None,
    "peer.create_child": lambda s, v: s.peer.create_child(v, "t"),
    "peer.enter_child": lambda s, v: s.peer.enter_child(v, s.party.key),
    "peer.enter_child(key)": lambda s, v: s.peer.enter_child(s.party, v),
    "peer.enter": lambda s, v: s.peer.enter(v),
    "peer.request_join": lambda s, v: s.peer.request_join(v) if v != b"x" * 32 else None,
    "peer.resolve": lambda s, v: s.peer.resolve(v),
    "peer.query": lambda s, v: s.peer.query(v).all(),
    "peer.pause_party": lambda s, v: s.peer.pause_party(v),
    "peer.resume_party": lambda s, v: s.peer.resume_party(v),
    "peer.close_party": lambda s, v: s.peer.close_party(v),
    "peer.forget_party": lambda s, v: s.peer.forget_party(v),
    "peer.sync_port": lambda s, v: s.peer.sync_port(v),
    # Party
    "party.create": lambda s, v: s.party.create(v),
    "party.create(type=)": lambda s, v: s.party.create("text", type=v),
    "party.create(parent=)": lambda s, v: s.party.create("text", parent=v),
    "party.create(properties)": lambda s, v: s.party.create("property-set", v),
    "party.create(a=)": lambda s, v: s.party.create("property-set", a=v),
    "party.link": lambda s, v: s.party.link(v, s.set),
    "party.link(target)": lambda s, v: s.party.link(s.set, v),
    "party.create_view": lambda s, v: s.party.create_view(v, "d"),
    "party.create_view(name)": lambda s, v: s.party.create_view("example.org/planner", v),
    "party.create_view(inception_key=)": lambda s, v: s.party.create_view("example.org/planner", "d", inception_key=v),
    "party.find_view": lambda s, v: s.party.find_view(v),
    "party.views": lambda s, v: s.party.views(v),
    "party.get": lambda s, v: s.party.get(v),
    "party.handle": lambda s, v: s.party.handle(v),
    "party.has": lambda s, v: s.party.has(v),
    "party.is_deleted": lambda s, v: s.party.is_deleted(v),
    "party.query": lambda s, v: s.party.query(v).all(),
    "party.index": lambda s, v: s.party.index(v),
    "party.stream": lambda s, v: s.party.stream(v),
    "party.as_of": lambda s, v: s.party.as_of(v),
    "party.open_snapshot": lambda s, v: s.party.open_snapshot(v),
    "party.reference_to": lambda s, v: s.party.reference_to(v),
    "party.title": lambda s, v: setattr(s.party, "title", v),
    # Item
    "item.name": lambda s, v: setattr(s.set, "name", v),
    "item.set_foreign_key": lambda s, v: s.set.set_foreign_key(v, "k"),
    "item.set_foreign_key(key)": lambda s, v: s.set.set_foreign_key("s", v),
    "item.restrict(roles=)": lambda s, v: s.log.restrict(roles=v),
    "item.restrict(members=)": lambda s, v: s.log.restrict(members=v),
    "item.move": lambda s, v: s.set.move(v),
    "item.embed_in": lambda s, v: s.set.embed_in(v) if v is not None else None,
    "item.link": lambda s, v: s.set.link(v),
    "item.diff": lambda s, v: s.set.diff(v),
    "item.stream": lambda s, v: s.set.stream(v),
    "item.upgrade": lambda s, v: s.set.upgrade(v),
    "set[]": lambda s, v: s.set[v],
    "set[]=": lambda s, v: s.set.__setitem__(v, 1),
    "set.get": lambda s, v: s.set.get(v),
    "in set": lambda s, v: v in s.set,
    "set.add": lambda s, v: s.set.add(v, 1),
    "set.add(element)": lambda s, v: s.set.add("tags", v),
    "set.remove": lambda s, v: s.set.remove(v, 1),
    "set.increment": lambda s, v: s.set.increment(v),
    "set.increment(by)": lambda s, v: s.set.increment("n", v),
    "set.conflicts": lambda s, v: s.set.conflicts(v),
    "list[]": lambda s, v: s.list[v],
    "list[]=": lambda s, v: s.list.__setitem__(v, 1),
    "list.insert": lambda s, v: s.list.insert(v, 1),
    "list.append": lambda s, v: s.list.append(v),
    "list.move_element": lambda s, v: s.list.move_element(v, 0),
    "list.move_element(end)": lambda s, v: s.list.move_element(0, v),
    "text.insert": lambda s, v: s.text.insert(v, "x"),
    "text.insert(text)": lambda s, v: s.text.insert(0, v),
    "text.append": lambda s, v: s.text.append(v),
    "text.delete": lambda s, v: s.text.delete(v) if v is not None else None,
    "text.delete(length)": lambda s, v: s.text.delete(0, v) if v is not True else None,
    "text.splice": lambda s, v: s.text.splice(v, 0, "x"),
    "text.splice(length)": lambda s, v: s.text.splice(0, v, "x"),
    "text.splice(text)": lambda s, v: s.text.splice(0, 0, v),
    "text.mark": lambda s, v: s.text.mark(v, 1, "bold"),
    "text.mark(key)": lambda s, v: s.text.mark(0, 1, v),
    "text.unmark": lambda s, v: s.text.unmark(0, v, "bold"),
    "text.cursor": lambda s, v: s.text.cursor(v),
    "text.cursor_position": lambda s, v: s.text.cursor_position(v),
    "log.post": lambda s, v: s.log.post(v),
    "log.post(reply_to=)": lambda s, v: s.log.post("x", reply_to=v),
    "log.set_retention(age)": lambda s, v: s.log.set_retention(age_ms_max=v),
    "log.set_retention(count)": lambda s, v: s.log.set_retention(count_max=v),
    # Query
    "query.where": lambda s, v: s.party.query().where(v),
    "query.where(a=)": lambda s, v: s.party.query().where(a=v).all(),
    "query.where(type=)": lambda s, v: s.party.query().where(type=v).all(),
    "query.where(parent=)": lambda s, v: s.party.query().where(parent=v).all(),
    "query.where(a__in=)": lambda s, v: s.party.query().where(a__in=v).all(),
    "query.deleted": lambda s, v: s.party.query().deleted(v),
    "query.order_by": lambda s, v: s.party.query().order_by(v).all(),
    "query.limit": lambda s, v: s.party.query().limit(v).all(),
    "query.select": lambda s, v: s.party.query().select(v).rows(),
    "query.reduce": lambda s, v: s.party.query().reduce(v).value(),
    "query.reduce(by=)": lambda s, v: s.party.query().reduce("count", by=v).groups(),
    "query.links": lambda s, v: s.party.query().links(v).all(),
    "query.subscribe": lambda s, v: s.party.query(type="none").subscribe(v).close(),
    "query.watch": lambda s, v: s.party.query(type="none").watch(timeout_s=v).close(),
    "query @created": lambda s, v: s.party.query().where(echostore.field("@created") > v).all(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_a_typed_error(scene: Scene, name: str) -> None:
    told: list[str] = []
    by_custom = (KeyError, IndexError) if name in ("set[]", "list[]", "list[]=") else ()  # as mappings and lists do
    for value in WRONG:
        try:
            CALLS[name](scene, value)
        except EchoError as error:
            told.append(error.what)
        except by_custom:
            continue
    assert all(told)
    assert not any("object has no attribute" in what for what in told)
    scene.party.flush()
    assert scene.set.get("title") == "A"
    assert not scene.peer.closed


def test_what_was_wanted_and_what_was_given_is_said(scene: Scene) -> None:
    for call, words in (
        (lambda: scene.peer.party(3), "a party is named by its key, by text or by @title, not by a number"),  # type: ignore[arg-type]  # the mistake
        (lambda: scene.party.get(None), "an item is named by its id, not by null"),  # type: ignore[arg-type]  # as above
        (lambda: scene.set[3], "a property is named by text or a tuple of texts, not by a number"),
        (lambda: scene.list["a"], "an index is a whole number, not text"),
        (
            lambda: scene.party.create_view("example.org/planner", "d", inception_key=b"x"),
            "a key of 32 bytes, not 1 bytes",
        ),
        (lambda: scene.party.query().subscribe("print"), "what is told of changes is a function, not text"),  # type: ignore[arg-type]  # as above
        (lambda: scene.party.index(["a"]), "names of properties is text, not a list"),  # type: ignore[arg-type]  # as above
        (lambda: scene.set.restrict(roles="owner"), "roles are a list of texts, not text"),  # type: ignore[arg-type]  # as above
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert words in caught.value.what
