"""Views, links, references and the tree of items: across parties, through deletion, and when moves collide."""

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.kernel.ids import ItemId
from echostore.kernel.values import Reference
from echostore.peer.party import Party
from echostore.peer.view_reading import view_states
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.signing import SigningKey
from echostore.wire.views import sign_view
from peer_builder import Circle, Liar, head_of


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob", "cat") as made:
        yield made


class Followed:
    """A query's live answer, kept from what it tells, beside what a fresh query says."""

    def __init__(self, party: Party, type: str) -> None:
        self.party, self.type = party, type
        self.items: set[ItemId] = set()
        self.told = 0
        self._watching = party.query(type=type).subscribe(self._tell, initial=True)

    def _tell(self, change: object) -> None:
        self.told += 1
        self.items |= {item.id for item in change.added}  # type: ignore[attr-defined]  # a Change
        self.items -= {item.id for item in change.removed}  # type: ignore[attr-defined]  # as above

    def right(self) -> bool:
        return self.items == {item.id for item in self.party.query(type=self.type).all()}


# views


@pytest.mark.parametrize("model", ["text", "property-set", "of tomorrow"])
def test_an_inception_key_on_something_else_is_no_view_and_hides_none(circle: Circle, model: str) -> None:
    view = planner(circle)
    circle.meet_all()
    liar, key = Liar.of(circle, "bob"), SigningKey.generate()
    genesis = pb.Genesis(model=model, version=2 if model == "property-set" else 1, type="view")
    genesis.view.inception_key = key.public
    made = liar.created()
    genesis.view.id_proof = sign_view(circle.key, made, genesis, key)
    liar.send(liar.message(pb.Operation(genesis=genesis)), to="ann")
    ann = circle.party("ann")
    assert ann.has(made)
    assert ann.views() == [view]
    assert ann.find_view(key.public) is None
    snapshot = ann.snapshot()
    assert view_states(snapshot.root, snapshot.blob, key.public) is None


def test_a_genesis_that_another_member_copies_is_not_the_view(circle: Circle) -> None:
    view = planner(circle)
    circle.meet_all()
    made, ann, said = view._record().genesis, circle.party("ann"), circle.party("ann").runtime.data
    assert said is not None
    copy = pb.Genesis(model=made.model, version=made.version, type=made.type)
    copy.view.inception_key, copy.view.id_proof = made.inception_key, made.id_proof
    liar = Liar.of(circle, "bob")
    copies = [pb.Operation(genesis=copy) for _ in range(9)]
    liar.send(liar.message(*copies, after=[head_of(ann, said.feed)]), to="ann")
    assert not any(ann.has(liar.created(position, ahead=-1)) for position in range(9))
    assert [reject.reason for reject in ann.rejected()] == ["bad-proof"] * 9
    assert ann.views() == [view]
    snapshot = ann.snapshot()
    found = view_states(snapshot.root, snapshot.blob, made.inception_key)
    assert found is not None
    assert list(found) == [view.id]


def planner(circle: Circle) -> echostore.Item:
    for peer in circle.peers.values():
        peer.view_classes.register("example.org/planner", "plans")
    return circle.party("ann").create_view("example.org/planner", "Summer", colour="red")


def test_a_view_has_its_three_properties_and_is_found_by_its_class(circle: Circle) -> None:
    view = planner(circle)
    circle.agree_after_loss()
    for name in circle.names:
        (found,) = circle.party(name).views("example.org/planner")
        assert found == circle.get(name, view)
        assert (found["view_class"], found["display_name"], found["colour"]) == ("example.org/planner", "Summer", "red")
        assert circle.party(name).views("example.org/other") == []


def test_a_view_is_resolved_by_its_locator_from_every_peer_of_the_party(circle: Circle, tmp_path: Path) -> None:
    view = planner(circle)
    circle.meet_all()
    for name in circle.names:
        assert circle.peers[name].resolve(view.locator).id == view.id
        assert circle.party(name).get(view.locator).id == view.id
    with echostore.open(tmp_path / "stranger", background=False) as stranger:
        assert stranger.resolve(view.locator) is None


def test_a_second_view_with_the_same_key_is_refused(circle: Circle) -> None:
    planner(circle)
    key = circle.peers["ann"].new_view_key()
    circle.party("ann").create_view("example.org/planner", "One", inception_key=key)
    with pytest.raises(Refused, match="inception key"):
        circle.party("ann").create_view("example.org/planner", "Two", inception_key=key)
    with pytest.raises(echostore.EchoError):
        circle.party("bob").create_view("example.org/planner", "Two", inception_key=key)


def test_registered_view_classes_survive_a_restart(circle: Circle) -> None:
    planner(circle)
    circle.restart("ann")
    assert circle.peers["ann"].view_classes.all() == {"example.org/planner": "plans"}
    for bad in ("", "Upper", "x" * 200, "../x", "a b"):
        with pytest.raises(UsageError):
            circle.peers["ann"].view_classes.register(bad)


def test_a_deleted_view_is_found_no_more_until_it_is_restored(circle: Circle) -> None:
    view = planner(circle)
    view.delete()
    assert circle.party("ann").views() == []
    view.restore()
    assert circle.party("ann").views() == [view]


# links and references


def test_a_link_is_an_item_with_two_ends(circle: Circle) -> None:
    party = circle.party("ann")
    one, other = party.create(type="note"), party.create(type="note")
    edge = one.link(other, type="likes", weight=3)
    circle.agree_after_loss()
    for name in circle.names:
        found = circle.get(name, edge)
        assert (found.source.id, found.target.id, found["weight"]) == (one.id, other.id, 3)
        assert circle.get(name, other).links("likes") == [found]
        assert circle.get(name, other).links("hates") == []
        assert not found.dangling
        assert [item.id for item in circle.party(name).query(type="likes").target().all()] == [other.id]


def test_a_deleted_end_dangles_visibly(circle: Circle) -> None:
    party = circle.party("ann")
    one, other = party.create(), party.create()
    edge = one.link(other)
    other.delete()
    assert edge.dangling
    other.restore()
    assert not edge.dangling
    edge.delete()
    assert one.links() == []


def test_a_link_to_an_item_that_is_excluded_later_dangles(circle: Circle) -> None:
    made = circle.party("cat").create(type="note")
    circle.meet("ann", "cat")
    edge = circle.party("bob").create().link(Reference(made.id))
    assert circle.get("bob", edge).dangling, "not here yet"
    assert circle.get("bob", edge).target is None
    circle.meet_all()
    assert not circle.get("bob", edge).dangling
    circle.agree()


def test_links_and_references_reach_into_other_parties(circle: Circle) -> None:
    peer = circle.peers["ann"]
    other = peer.create_party("Other")
    far = other.create(type="far", n=1)
    near = circle.party("ann").create(type="near")
    edge = near.link(far)
    near["see"] = far
    assert edge.target == far
    assert near["see"] == Reference(far.id, other.key)
    assert peer.resolve(str(near["see"])) == far
    with pytest.raises(UsageError, match="another party"):
        far.move(near)
    with pytest.raises(UsageError, match="another party"):
        circle.party("ann").create(parent=far)
    with pytest.raises(NotFound):
        circle.party("ann").get(far.locator)
    circle.agree_after_loss()
    assert circle.get("bob", edge).target is None, "bob is no member of the other party"
    assert circle.get("bob", edge).dangling


def test_references_are_followed_both_ways_also_inside_lists_and_after_a_restart(circle: Circle) -> None:
    party = circle.party("ann")
    target = party.create(type="target")
    by_value, by_list = party.create(type="source", deep={"a": [target]}), party.create("growable-array", type="source")
    by_list.append(target)
    for _ in range(2):
        found = {item.id for item in circle.party("ann").query(type="target").referrers().all()}
        assert found == {by_value.id, by_list.id}
        circle.restart("ann")
    del circle.get("ann", by_list)[0]
    assert [item.id for item in circle.party("ann").query(type="target").referrers().all()] == [by_value.id]


# the tree


def test_embedded_items_in_the_metadata_agree_with_the_tree(circle: Circle) -> None:
    party = circle.party("ann")
    board, shelf, card = party.create(), party.create(), party.create()
    card.move(board)
    card.embed_in(shelf)
    circle.agree_after_loss()
    for name in circle.names:
        assert circle.get(name, card).parent.id == board.id
        assert circle.get(name, board).metadata["embedded_items"] == [Reference(card.id)]
        assert circle.get(name, shelf).metadata["embedded_items"] == [Reference(card.id)]
        assert circle.get(name, shelf).children() == []
    circle.get("bob", card).unembed_from(circle.get("bob", shelf))
    circle.agree_after_loss()
    assert circle.get("ann", shelf).embedded() == []


def test_cycles_are_refused(circle: Circle) -> None:
    party = circle.party("ann")
    top = party.create()
    middle = party.create(parent=top)
    low = party.create(parent=middle)
    for cycle in (
        lambda: top.move(low),
        lambda: top.move(top),
        lambda: top.embed_in(low),
        lambda: middle.embed_in(low),
    ):
        with pytest.raises(Refused, match="below itself"):
            cycle()
    low.embed_in(top)  # a second way down is no cycle
    circle.agree()


def test_cycles_through_embeddings_are_refused(circle: Circle) -> None:
    party = circle.party("ann")
    one, other = party.create(), party.create()
    one.embed_in(other)
    with pytest.raises(Refused):
        other.move(one)
    one.unembed_from(other)
    other.move(one)
    circle.agree()


@pytest.mark.parametrize("order", list(itertools.permutations(("ann", "bob", "cat"))), ids="-".join)
def test_concurrent_moves_that_form_a_cycle_converge(circle: Circle, order: tuple[str, ...]) -> None:
    items = [circle.party("ann").create(type="node", n=number) for number in range(3)]
    circle.meet_all()
    for number, name in enumerate(circle.names):
        circle.get(name, items[number]).move(circle.get(name, items[(number + 1) % 3]))
    for one, other in itertools.pairwise((*order, order[0])):
        circle.meet(one, other)
    circle.agree_after_loss()
    party = circle.party("ann")
    homes = [circle.get("ann", item).parent for item in items]
    assert homes.count(None) == 1, "one move is void, the others hold"
    assert {item.id for item in party.query(type="node").all()} == {item.id for item in items}


@pytest.mark.parametrize("seed", range(4))
def test_children_parents_and_queries_agree_after_random_moves_and_restarts(circle: Circle, seed: int) -> None:
    chance = random.Random(seed)
    items = [circle.party("ann").create(type="node").id for _ in range(7)]
    circle.meet_all()
    for _ in range(60):
        party = circle.party(chance.choice(circle.names))
        one, other = (party.get(item) for item in chance.sample(items, 2))
        with suppress(Refused):  # a cycle
            chance.choice([one.move, one.move, one.embed_in, one.unembed_from])(other)
        if chance.random() < 0.2:
            circle.meet(*chance.sample(circle.names, 2))
        if chance.random() < 0.1:
            circle.restart(chance.choice(circle.names), crash=False)
    circle.agree_after_loss()
    party = circle.party("bob")
    for item in items:
        below = {child.id for child in party.get(item).children()}
        assert below == {other for other in items if getattr(party.get(other).parent, "id", None) == item}


# deletion hides the closure, in live answers too


def test_deleting_a_parent_hides_what_hangs_below_in_live_queries(circle: Circle) -> None:
    party = circle.party("ann")
    board = party.create(type="board")
    task = party.create(type="task", parent=board)
    party.create(type="task", parent=task)
    for fresh in (True, False):
        if not fresh:
            party = circle.restart("ann")  # once with the items in memory, once with all of them on disk
        followed = Followed(party, "task")
        assert len(followed.items) == 2
        party.get(board.id).delete()
        assert followed.items == set()
        assert followed.right()
        party.get(board.id).restore()
        assert len(followed.items) == 2
        assert followed.right()
        party.get(task.id).delete()
        assert followed.items == set()
        party.get(task.id).restore()


def test_moving_into_and_out_of_what_is_deleted_is_told(circle: Circle) -> None:
    party = circle.party("ann")
    board, trash = party.create(type="board"), party.create(type="board")
    task = party.create(type="task", parent=party.create(type="list", parent=board))
    trash.delete()
    party = circle.restart("ann")
    followed = Followed(party, "task")
    middle = party.get(task.id).parent
    middle.move(party.get(trash.id))
    assert followed.items == set()
    assert followed.right()
    middle.move(party.get(board.id))
    assert followed.items == {task.id}
    assert followed.right()


def test_a_deletion_that_arrives_from_elsewhere_is_told(circle: Circle) -> None:
    board = circle.party("ann").create(type="board")
    circle.party("ann").create(type="task", parent=board)
    circle.meet_all()
    followed = Followed(circle.party("bob"), "task")
    board.delete()
    circle.meet_all()
    assert followed.items == set()
    circle.party("ann").undo()
    circle.meet_all()
    assert len(followed.items) == 1
    assert followed.right()


def test_a_removal_that_takes_a_parent_away_is_told(circle: Circle) -> None:
    """Cat's last writes are beyond the cut: her board goes, and what others hung below it."""
    followed = Followed(circle.party("bob"), "task")
    circle.meet_all()
    board = circle.party("cat").create(type="board")
    circle.meet("bob", "cat")
    circle.party("bob").create(type="task", parent=circle.get("bob", board))
    assert len(followed.items) == 1
    circle.party("ann").members.remove(circle.peers["cat"].identity)
    circle.meet_all()
    assert followed.items == set()
    assert followed.right()
    circle.agree_after_loss()


@pytest.mark.parametrize("seed", range(6))
def test_maintained_answers_equal_fresh_ones_through_random_trees(circle: Circle, seed: int) -> None:
    chance = random.Random(seed)
    party = circle.party("ann")
    items = [party.create(type=chance.choice(["board", "task"])).id for _ in range(8)]
    circle.meet_all()
    party = circle.restart("ann") if seed % 2 else party
    followed = [Followed(party, "task"), Followed(party, "board")]
    for _ in range(60):
        name = chance.choice(["ann", "ann", "bob"])
        one, other = (circle.party(name).get(item) for item in chance.sample(items, 2))
        verb = chance.choice(["move", "delete", "restore", "undo", "meet", "create", "snapshot"])
        try:
            if verb == "move":
                one.move(chance.choice([other, None]))
            elif verb in ("delete", "restore"):
                getattr(one, verb)()
            elif verb == "undo":
                circle.party(name).undo()
            elif verb == "meet":
                circle.meet("ann", "bob")
            elif verb == "create":
                circle.party(name).create(type="task", parent=one)
            else:
                party.snapshot()
        except Refused:
            pass
        assert all(one.right() for one in followed), verb
    assert followed[0].told
