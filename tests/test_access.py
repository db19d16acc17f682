"""Access metadata: who may write an item, judged at the place of each write, the same on every peer in every order."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.kernel.errors import Refused
from echostore.kernel.ids import FeedId
from echostore.kernel.models.property_set import Set
from echostore.wire.models import property_set
from peer_builder import Circle, Liar, head_of, reasons


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    """Ann owns, Bob administers, Cat and Dan edit."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob", "cat", "dan", roles={"bob": "admin"}) as made:
        yield made


def test_an_item_can_be_left_to_roles(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    item.restrict(roles=["admin"])
    circle.meet_all()
    circle.get("bob", item)["n"] = 2
    with pytest.raises(Refused, match="admin"):
        circle.get("cat", item)["n"] = 3
    circle.agree_after_loss()
    assert item.id in {found.id for found in circle.party("cat").items()}
    assert circle.get("ann", item)["n"] == 2


def test_an_item_can_be_left_to_members(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    item.restrict(members=[circle.peers["cat"].identity])
    circle.meet_all()
    circle.get("cat", item)["n"] = 2
    for name in ("bob", "dan"):
        with pytest.raises(Refused):
            circle.get(name, item)["n"] = 3
    circle.get("ann", item)["n"] = 4  # owners always may
    circle.agree_after_loss()


@pytest.mark.parametrize("model", ["text", "growable-array", "threaded-log"])
def test_the_rule_holds_for_every_model(circle: Circle, model: str) -> None:
    item = circle.party("ann").create(model)
    item.restrict(roles=["admin"])
    circle.meet_all()
    write = {"text": ("insert", 0, "x"), "growable-array": ("append", 1), "threaded-log": ("post", 1)}[model]
    with pytest.raises(Refused):
        getattr(circle.get("cat", item), write[0])(*write[1:])
    getattr(circle.get("bob", item), write[0])(*write[1:])
    circle.agree_after_loss()
    assert len(circle.get("ann", item)) == 1


def test_moving_naming_and_deleting_are_writes_too(circle: Circle) -> None:
    item, other = circle.party("ann").create(n=1), circle.party("ann").create()
    item.restrict(roles=["admin"])
    circle.meet_all()
    mine = circle.get("cat", item)
    for write in (lambda: mine.move(circle.get("cat", other)), mine.delete, lambda: setattr(mine, "name", "x")):
        with pytest.raises(Refused):
            write()
    assert circle.party("cat").create(parent=mine).parent == mine, "what hangs below is not meant"


@pytest.mark.parametrize("model", ["text", "growable-array"])
def test_an_edit_made_before_a_rule_of_the_same_batch_counts(circle: Circle, model: str) -> None:
    item = circle.party("cat").create(model)
    write = ("insert", 0, "x") if model == "text" else ("append", 1)
    with circle.party("cat").batch():
        getattr(item, write[0])(*write[1:])
        item.restrict(roles=["admin"])
    circle.meet_all()
    circle.agree_after_loss()
    assert len(circle.get("ann", item)) == 1


def test_lifting_a_rule_lets_everybody_write_again(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    item.restrict(roles=["admin"])
    circle.meet_all()
    circle.get("bob", item).unrestrict()
    circle.meet_all()
    assert circle.get("cat", item).access is None
    circle.get("cat", item)["n"] = 2
    circle.agree_after_loss()
    assert item.id
    assert circle.get("ann", item)["n"] == 2


def test_the_creator_may_narrow_and_widen_their_own_item(circle: Circle) -> None:
    item = circle.party("cat").create(n=1)
    item.restrict(members=[circle.peers["cat"].identity])
    circle.meet_all()
    with pytest.raises(Refused):
        circle.get("dan", item)["n"] = 2
    item.unrestrict()
    circle.meet_all()
    circle.get("dan", item)["n"] = 3
    circle.agree_after_loss()
    assert circle.get("ann", item)["n"] == 3


def test_a_rule_by_somebody_else_does_not_count(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    liar = Liar.of(circle, "dan")
    rule = (Set(("access",), {"roles": [], "members": [circle.peers["dan"].identity]}),)
    after = [head_of(circle.party("ann"), FeedId(item.id[:8]))]
    liar.send(liar.message(liar.on(item.id, metadata=property_set.encode_operation(rule)), after=after))
    circle.names = ("ann", "bob", "cat")
    assert reasons(circle.party("ann")) == ["denied"]
    circle.meet_all()
    circle.get("cat", item)["n"] = 2
    circle.agree_after_loss()
    assert circle.get("ann", item)["n"] == 2


def test_writes_past_the_rule_are_denied_on_every_peer(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    item.restrict(roles=["admin"])
    circle.meet_all()
    liar = Liar.of(circle, "dan")
    after = [head_of(circle.party("ann"), FeedId(item.id[:8]))]
    liar.send(liar.message(liar.set(item.id, n=666), liar.move(item.id, None), after=after))
    circle.names = ("ann", "bob", "cat")
    circle.agree_after_loss()
    assert reasons(circle.party("cat")) == ["denied", "denied"]
    assert circle.get("cat", item)["n"] == 1


def test_a_rule_judges_what_sorts_after_it_and_nothing_before(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    circle.get("cat", item)["before"] = 1
    circle.meet_all()
    item.restrict(roles=["admin"])
    circle.agree_after_loss()
    assert circle.get("dan", item)["before"] == 1


@pytest.mark.parametrize("order", list(itertools.permutations(("bob", "cat", "dan"))), ids="-".join)
def test_a_rule_that_arrives_late_refolds_the_item_alike_everywhere(circle: Circle, order: tuple[str, ...]) -> None:
    """Bob's rule is written beside writes of Cat and Dan, which sort before it and after it."""
    item = circle.party("ann").create(n=0)
    text = circle.party("ann").create("text")
    circle.meet_all()
    circle.get("cat", item)["c"] = "early"
    for _ in range(3):
        circle.party("bob").create()
    circle.get("bob", item).restrict(roles=["admin"])
    circle.get("bob", text).restrict(roles=["admin"])
    for number in range(8):
        circle.get("dan", item)["d"] = number
        circle.get("dan", text).insert(0, "d")
        circle.party("dan").flush()
    for name in order:
        circle.meet("ann", name)
    circle.agree_after_loss()
    assert circle.get("ann", item)["c"] == "early"
    assert "denied" in reasons(circle.party("ann")), "the later ones of Dan's sort above the rule"
    assert circle.get("ann", item)["d"] < 7


def test_lifting_that_arrives_late_revives_what_was_denied(circle: Circle) -> None:
    item = circle.party("ann").create(n=0)
    item.restrict(roles=["admin"])
    circle.meet_all()
    after = [head_of(circle.party("ann"), FeedId(item.id[:8]))]
    circle.get("bob", item).unrestrict()
    circle.party("bob").flush()
    liar = Liar.of(circle, "dan")
    circle.names = ("ann", "bob", "cat")
    liar.send(liar.message(liar.set(item.id, n=1), after=after))
    for number in range(2, 6):
        liar.send(liar.message(liar.set(item.id, n=number)))
    assert set(reasons(circle.party("ann"))) == {"denied"}
    circle.restart("ann")
    circle.agree_after_loss()
    assert circle.get("ann", item)["n"] == 5


def test_a_role_that_changed_meanwhile_is_judged_at_the_place_of_the_write(circle: Circle) -> None:
    item = circle.party("ann").create(n=0)
    item.restrict(roles=["admin"])
    circle.meet_all()
    circle.get("bob", item)["n"] = "as admin"
    circle.meet_all()
    circle.get("bob", item)["n"] = "unseen"
    circle.party("bob").flush()
    circle.party("ann").members.change_role(circle.peers["bob"].identity, "editor")
    circle.agree_after_loss()
    assert circle.get("cat", item)["n"] == "as admin"
    assert reasons(circle.party("cat")) == ["denied"]
    with pytest.raises(Refused):
        circle.get("bob", item)["n"] = "again"


def test_a_malformed_rule_lets_owners_write_and_nobody_else(circle: Circle) -> None:
    item = circle.party("ann").create(n=0)
    circle.meet_all()
    liar = Liar.of(circle, "bob")
    change = property_set.encode_operation((Set(("access",), "nonsense"),))
    after = [head_of(circle.party("ann"), FeedId(item.id[:8]))]
    liar.send(liar.message(liar.on(item.id, metadata=change), after=after))
    circle.names = ("ann", "cat", "dan")
    circle.meet_all()
    with pytest.raises(Refused):
        circle.get("cat", item)["n"] = 1
    circle.get("ann", item)["n"] = 2
    circle.get("ann", item).unrestrict()
    circle.meet_all()
    circle.get("cat", item)["n"] = 3
    circle.agree_after_loss()


def test_part_of_a_rule_can_not_be_written(circle: Circle) -> None:
    item = circle.party("ann").create(n=0)
    item.restrict(roles=["admin"])
    circle.meet_all()
    liar = Liar.of(circle, "bob")
    change = property_set.encode_operation((Set(("access", "roles"), ["editor"]),))
    after = [head_of(circle.party("ann"), FeedId(item.id[:8]))]
    liar.send(liar.message(liar.on(item.id, metadata=change), after=after))
    assert reasons(circle.party("ann")) == ["malformed"]
    circle.names = ("ann", "cat", "dan")
    circle.agree_after_loss()
    assert circle.get("ann", item).access == {"roles": ["admin"], "members": []}
