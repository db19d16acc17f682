"""Application data may use any property name: system arguments never take a property's place, on any surface."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore import aio
from echostore.kernel.errors import UsageError
from echostore.peer.local_server import LocalServer
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.thin import aio as thin_aio
from echostore.thin.thin_party import connect
from thin_server import ThinServer, capability

NAMES = (
    "name",
    "version",
    "model",
    "key",
    "self",
    "party",
    "provider",
    "properties",
    "source",
    "target",
    "item",
    "more",
    "id",
    "display_name",
    "view_class",
    "inception_key",
    "patience_s",
    "named",
    "method",
)
"""Names of arguments, attributes and parameters in the code below `create`, `update`, `link` and `query`."""

OWN = ("type", "parent")
"""What stays a system keyword: a property of such a name is given in a mapping."""

ANY = {name: f"the {name}" for name in (*NAMES, *OWN)}
KEYWORDS = {name: f"the {name}" for name in NAMES}

Create = Callable[..., Any]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home") as peer:
        yield peer


@pytest.fixture
def own(peer: Peer) -> Party:
    return peer.create_party("Trip")


@pytest.fixture(params=["peer", "child", "attached", "thin"])
def party(request: pytest.FixtureRequest, peer: Peer, own: Party) -> Iterator[Any]:
    """A party as each kind of program uses it."""
    if request.param == "peer":
        yield own
    elif request.param == "child":
        yield peer.create_child(own, "Chess")
    elif request.param == "attached":
        server = LocalServer(peer)
        try:
            with echostore.open(peer.home.path) as attached:
                yield attached.party(own.key)
        finally:
            server.close()
    else:
        with ThinServer() as root, connect(root.url, capability()) as thin:
            yield thin


def test_every_keyword_but_type_and_parent_is_a_property(party: Any) -> None:
    made = party.create(type="thing", **KEYWORDS)
    assert made.type == "thing"
    assert made.to_dict() == KEYWORDS


def test_a_mapping_gives_properties_of_any_name(party: Any) -> None:
    above = party.create(type="box")
    made = party.create("property-set", ANY, type="thing", parent=above)
    assert made.type == "thing"
    assert made.parent in (above, above.id)
    assert made.to_dict() == ANY


def test_update_takes_any_name(party: Any) -> None:
    made = party.create(type="thing", n=1)
    made.update(**ANY)
    assert made.to_dict() == {"n": 1, **ANY}
    made.update({"type": "other", "n": 2}, name="Ada")
    assert (made["type"], made["n"], made["name"]) == ("other", 2, "Ada")


def test_a_link_has_properties_of_any_name(party: Any) -> None:
    one, two = party.create(type="a"), party.create(type="b")
    assert party.link(one, two, ANY, type="near").to_dict() == ANY
    assert one.link(two, type="near", **KEYWORDS).to_dict() == KEYWORDS


@pytest.mark.parametrize("name", [name for name in NAMES if name != "item"])
def test_a_query_finds_a_property_of_any_name(party: Any, name: str) -> None:
    made = party.create(type="thing", **KEYWORDS)
    party.create(type="thing", **{name: "another"})
    assert [each.id for each in party.query(type="thing", **{name: f"the {name}"}).all()] == [made.id]
    assert [each.id for each in party.query("thing").where(**{name: f"the {name}"}).all()] == [made.id]


@pytest.mark.parametrize("name", ["item", *OWN])
def test_a_query_finds_a_property_named_as_what_an_item_has_of_its_own(party: Any, name: str) -> None:
    made = party.create("property-set", ANY, type="thing")
    found = party.query(type="thing").where(echostore.field(name) == f"the {name}").all()
    assert [each.id for each in found] == [made.id]


def test_a_property_that_is_given_twice_is_refused(party: Any) -> None:
    with pytest.raises(UsageError, match="given twice"):
        party.create("property-set", {"n": 1}, n=2)
    made = party.create(n=0)
    with pytest.raises(UsageError, match="given twice"):
        made.update({"n": 1}, n=2)
    assert made["n"] == 0


@pytest.mark.parametrize("given", [[("n", 1)], "n", 5])
def test_properties_that_are_no_mapping_are_refused(party: Any, given: Any) -> None:
    with pytest.raises(UsageError, match="given as a mapping"):
        party.create("property-set", given)


def test_a_key_that_no_peer_would_take_is_refused(party: Any) -> None:
    for key in ("", "k" * 2000):
        with pytest.raises(echostore.EchoError):
            party.create(**{key: 1})
        with pytest.raises(echostore.EchoError):
            party.create().update({key: 1})


def test_a_model_named_by_keyword_is_refused_with_both_readings(party: Any) -> None:
    with pytest.raises(UsageError, match="keywords are properties"):
        party.create(model="text")
    assert party.create("property-set", model="text")["model"] == "text"
    assert party.create(None, {"model": "text"})["model"] == "text"
    assert party.create(type="car", model=["unhashable"])["model"] == ["unhashable"]


def test_what_takes_no_properties_says_so(party: Any) -> None:
    with pytest.raises(UsageError, match="properties"):
        party.create("text", title="Notes")


def test_the_version_of_a_model_is_part_of_its_name(own: Party) -> None:
    assert own.create("text@1").version == 1
    made = own.create("nobody-has@7")
    assert (made.model, made.version, made.opaque) == ("nobody-has", 7, True)
    for wrong in ("text@x", "text@", "text@0", "text@-1", f"text@{1 << 40}"):
        with pytest.raises(UsageError, match="a model version"):
            own.create(wrong)


def test_properties_never_go_into_a_version_that_is_not_here(own: Party) -> None:
    with pytest.raises(UsageError, match="property-set@3 takes no properties"):
        own.create("property-set@3", title="Spec")
    assert own.items() == []


def test_old_keywords_warn_where_they_can_not_be_data(own: Party) -> None:
    with pytest.warns(DeprecationWarning, match=r"item\.name"):
        notes = own.create("text", name="Notes")
    assert notes.name == "Notes"
    with pytest.warns(DeprecationWarning, match="nobody-has@2"):
        made = own.create("nobody-has", version=2)
    assert made.version == 2
    with pytest.raises(UsageError, match="given twice"):
        own.create("nobody-has@2", version=3)


def test_a_view_has_properties_of_any_name(peer: Peer, own: Party) -> None:
    peer.view_classes.register("example.org/planner", "Boards")
    made = own.create_view("example.org/planner", "Plan", {"parent": "p", "inception_key": "i"}, key="k", name="n")
    assert made.to_dict() == {
        "view_class": "example.org/planner",
        "display_name": "Plan",
        "parent": "p",
        "inception_key": "i",
        "key": "k",
        "name": "n",
    }
    with pytest.raises(UsageError, match="given twice"):
        own.create_view("example.org/planner", "Plan", display_name="Other")
    with pytest.warns(DeprecationWarning, match="inception_key"):
        old = own.create_view("example.org/planner", "Plan", key=(key := peer.new_view_key()))
    assert own.find_view(key) == old
    assert "key" not in old


def test_the_same_names_over_asyncio(tmp_path: Path) -> None:
    async def story() -> None:
        async with aio.open(tmp_path / "other") as peer:
            party = await peer.create_party("Trip")
            made = await party.create("property-set", ANY, type="thing")
            assert await made.to_dict() == ANY
            await made.update({"type": "other"}, **KEYWORDS)
            assert await made["type"] == "other"
            assert len(await party.query(type="thing", self="the self", name="the name").all()) == 1

    asyncio.run(story())


def test_the_same_names_for_a_thin_client_over_asyncio() -> None:
    async def story(url: str) -> None:
        async with thin_aio.connect(url, capability()) as party:
            made = party.create("property-set", ANY, type="thing")
            made.update({"type": "other"}, **KEYWORDS)
            assert made.to_dict() == {**ANY, "type": "other"}
            assert len(await party.query(type="thing", self="the self", name="the name").all()) == 1

    with ThinServer() as root:
        asyncio.run(story(root.url))


def test_the_same_names_on_the_command_line(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    given = [f"{name}=the {name}" for name in ANY]
    made = (
        cli("item", "create", "property-set", "--type", "thing", "--name", "Shown", *given, "--json")
        .ok()
        .json()["item"]
    )
    assert cli("item", "get", made, "--json").ok().json()["value"] == ANY
    cli("item", "set", made, "name=Ada", "type=x", "--name", "Shown too").ok()
    after = cli("item", "get", made, "--json").ok().json()
    assert (after["type"], after["name"], after["value"]) == ("thing", "Shown too", {**ANY, "name": "Ada", "type": "x"})
    found = cli("query", "--type", "thing", "--where", "name=Ada", "--where", "type=x", "--json").ok().json()["items"]
    assert [each["item"] for each in found] == [made]
