"""Custom models over time: unknown ones are kept and revived, failing ones stand alone, versions fork (FAULTS X1-X3)."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import echostore
from echostore.kernel.errors import ModelFailed, Refused, UsageError
from echostore.kernel.models.ordered_fold import OrderedFold
from echostore.peer.item_kinds import CustomItem
from echostore.peer.model_fork import FORKED_TO, successor
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from test_schema import run_guide
from two_peers import admitted, open_quiet, sync


class Counter1:
    """Adds numbers."""

    name: ClassVar[str] = "counter"
    version: ClassVar[int] = 1

    def __init__(self) -> None:
        self.total = 0

    def apply(self, operation: Any, stamp: object) -> None:
        self.total += operation

    def value(self) -> Any:
        return self.total


class Counter2(Counter1):
    """Adds numbers and counts the additions."""

    version: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def apply(self, operation: Any, stamp: object) -> None:
        self.total += operation["by"]
        self.steps += 1

    def value(self) -> Any:
        return {"total": self.total, "steps": self.steps}


class Counter3(Counter1):
    """Takes the operations of version 1 as they are, and keeps them in order."""

    version: ClassVar[int] = 3

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def apply(self, operation: Any, stamp: object) -> None:
        self.seen.append(operation)

    def value(self) -> Any:
        return list(self.seen)


class Fragile(Counter1):
    """Can't stand a seven."""

    name: ClassVar[str] = "fragile"

    def apply(self, operation: Any, stamp: object) -> None:
        if operation == 7:
            raise ZeroDivisionError("seven")
        super().apply(operation, stamp)


class Sturdy(Counter1):
    """What another peer runs under the name of Fragile."""

    name: ClassVar[str] = "fragile"


def to_second(value: Any) -> list[Any]:
    return [{"by": value}]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with open_quiet(tmp_path / "laptop") as opened:
        opened.models.register(Counter1)
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Road trip")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Party, Party]]:
    """A party on two peers, without any model registered."""
    with open_quiet(tmp_path / "a") as a, open_quiet(tmp_path / "b") as b:
        ours = a.create_party("Road trip")
        yield ours, admitted(ours, b)


def counted(party: Party, *numbers: int) -> CustomItem:
    item: CustomItem = party.create("counter", type="score")
    for number in numbers:
        item.apply(number)
    return item


# unknown models


def test_an_unknown_model_is_kept_and_replicated_and_snapshotted(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter1)
    item = counted(ours, 2, 3)
    sync(ours, theirs)
    opaque = theirs.get(item.id)
    assert isinstance(opaque, CustomItem)
    assert opaque.opaque
    assert opaque.value() is None
    assert opaque._record().model.operations == item._record().model.operations
    assert theirs.snapshot().cid == ours.snapshot().cid
    with pytest.raises(Refused, match="counter@1 is not registered here"):
        opaque.apply(1)


def test_an_opaque_item_revives_when_its_model_is_registered(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter1)
    item = counted(ours, 2, 3)
    sync(ours, theirs)
    changes: list[Any] = []
    theirs.query(type="score").subscribe(changes.append)
    opaque = theirs.get(item.id)
    theirs.peer.models.register(Counter1)
    assert not opaque.opaque
    assert opaque.value() == 5
    assert [[handle.id for handle in change.changed] for change in changes] == [[item.id]]
    opaque.apply(4)
    sync(ours, theirs)
    assert item.value() == 9
    assert theirs.snapshot().cid == ours.snapshot().cid


def test_an_opaque_item_that_only_the_store_holds_revives_too(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter1)
    item = counted(ours, 2, 3)
    sync(ours, theirs)
    cid = theirs.snapshot().cid
    theirs.runtime.state.records.clear()
    theirs.peer.models.register(Counter1)
    assert theirs.get(item.id).value() == 5
    assert theirs.snapshot().cid == cid


@pytest.mark.parametrize("when", ["before the party is opened", "after"])
def test_an_opaque_item_revives_after_a_restart(tmp_path: Path, when: str) -> None:
    with open_quiet(tmp_path / "a") as a, open_quiet(tmp_path / "b") as b:
        a.models.register(Counter1)
        ours = a.create_party("Road trip")
        theirs = admitted(ours, b)
        item = counted(ours, 2, 3)
        sync(ours, theirs)
        cid = ours.snapshot().cid
    with open_quiet(tmp_path / "b") as b:
        if when == "after":
            assert b.party(ours.key).get(item.id).opaque
        b.models.register(Counter1)
        party = b.party(ours.key)
        assert party.get(item.id).value() == 5
        assert party.snapshot().cid == cid
    with open_quiet(tmp_path / "b") as b:
        party = b.party(ours.key)
        assert party.get(item.id).opaque  # the class is gone again, the item is not
        assert party.snapshot().cid == cid


def test_operations_that_arrive_while_opaque_count_later(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter3)
    item = ours.create(Counter3)
    item.apply("a")
    sync(ours, theirs)
    theirs.runtime.checkpoint()
    theirs.runtime.state.records.clear()
    item.apply("b")
    sync(ours, theirs)
    theirs.peer.models.register(Counter3)
    assert theirs.get(item.id).value() == ["a", "b"]


def test_registering_in_an_open_batch_revives_as_well(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter1)
    item = counted(ours, 2)
    sync(ours, theirs)
    with theirs.batch():
        theirs.create("property-set", type="note")
        theirs.peer.models.register(Counter1)
        theirs.get(item.id).apply(3)
    assert theirs.get(item.id).value() == 5


def test_a_batch_shows_the_time_that_its_message_will_say(tmp_path: Path) -> None:
    """Operations are kept with their time: one clock reading for each would make the writer's state differ."""
    ticks = itertools.count(1_000)
    with (
        echostore.open(tmp_path / "a", background=False, now_ms=lambda: next(ticks)) as a,
        open_quiet(tmp_path / "b") as b,
    ):
        a.models.register(Counter1)
        ours = a.create_party("Road trip")
        theirs = admitted(ours, b)
        with ours.batch():
            counted(ours, 1, 2)
        sync(ours, theirs)
        assert ours.snapshot().cid == theirs.snapshot().cid


# models with a snapshot of their own


class Total(Counter1):
    """Adds numbers, in whatever order they come, and keeps the sum alone."""

    name: ClassVar[str] = "total"
    commutes: ClassVar[bool] = True

    def snapshot(self) -> Any:
        return self.total

    def restore(self, state: Any) -> None:
        self.total = state


def test_a_commuting_model_revives_from_the_operations_kept(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Total)
    one, other = ours.create(Total), ours.create(Total)
    for item in (one, other):
        item.apply(2)
        item.apply(3)
    sync(ours, theirs)
    theirs.snapshot()
    theirs.runtime.state.records.clear()
    assert theirs.get(one.id).opaque
    theirs.peer.models.register(Total)
    assert [theirs.get(item.id).value() for item in (one, other)] == [5, 5]
    theirs.get(one.id).apply(4)
    sync(ours, theirs)
    assert one.value() == 9
    assert theirs.snapshot().cid == ours.snapshot().cid


def test_a_commuting_model_comes_and_goes_over_restarts(tmp_path: Path) -> None:
    """Its stored state is readable by its class alone; without it the operations come back from the feeds."""
    with open_quiet(tmp_path / "laptop") as peer:
        peer.models.register(Total)
        party = peer.create_party("x")
        item = party.create(Total)
        item.apply(2)
        item.apply(3)
        cid = party.snapshot().cid
    for registered in (False, False, True, True, False, True):
        with open_quiet(tmp_path / "laptop") as peer:
            if registered:
                peer.models.register(Total)
            here = peer.party(party.key)
            assert here.get(item.id).value() == (5 if registered else None)
            assert (here.snapshot().cid == cid) is registered  # an opaque one is snapshotted as its operations


def test_a_model_that_commutes_must_write_its_state_down(peer: Peer) -> None:
    class Half(Counter1):
        name: ClassVar[str] = "half"
        commutes: ClassVar[bool] = True

    with pytest.raises(UsageError, match="needs a method `snapshot`"):
        peer.models.register(Half)
    assert not peer.models.known("half", 1)


# failing models


def test_a_model_that_raises_takes_only_its_own_item_out(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Sturdy)
    theirs.peer.models.register(Fragile)
    broken, fine = ours.create(Sturdy), ours.create(Sturdy)
    for number in (1, 7, 2):
        broken.apply(number)
    fine.apply(4)
    note = ours.create("property-set", type="note", text="x")
    sync(ours, theirs)
    theirs_broken = theirs.get(broken.id)
    assert "ZeroDivisionError: seven" in str(theirs_broken.failed)
    with pytest.raises(ModelFailed):
        theirs_broken.value()
    assert theirs.get(fine.id).failed is None
    assert theirs.get(fine.id).value() == 4
    assert theirs.query(type="note").one().to_dict() == {"text": "x"}
    theirs.get(note.id)["text"] = "y"
    sync(ours, theirs)
    assert broken.value() == 10
    assert theirs.snapshot().cid == ours.snapshot().cid  # the state is the operations, not what a class made of them


def test_a_failing_item_is_still_failing_and_whole_after_a_restart(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "laptop") as peer:
        peer.models.register(Sturdy)
        party = peer.create_party("x")
        item = party.create(Sturdy)
        item.apply(7)
        cid = party.snapshot().cid
    with open_quiet(tmp_path / "laptop") as peer:
        peer.models.register(Fragile)
        assert peer.party(party.key).get(item.id).failed
        assert peer.party(party.key).snapshot().cid == cid
    with open_quiet(tmp_path / "laptop") as peer:
        peer.models.register(Sturdy)  # a repaired class of the same version
        assert peer.party(party.key).get(item.id).value() == 7


# forks


def test_a_fork_continues_an_item_under_the_new_version(peer: Peer, party: Party) -> None:
    peer.models.register(Counter2)
    board = party.create("property-set", type="board")
    old = party.create("counter@1", type="score", parent=board)
    old.name = "Goals"
    old.apply(2)
    old.apply(3)
    old.set_foreign_key("crm", "42")
    old.restrict(roles=["admin"])
    child = party.create("property-set", parent=old)
    guest = party.create("property-set")
    guest.embed_in(old)
    new = old.upgrade(2, to_second)
    assert new.value() == {"total": 5, "steps": 1}
    assert (new.model, new.version, new.type, new.name) == ("counter", 2, "score", "Goals")
    assert new._record().genesis.forked_from == old.id
    assert new.parent is not None
    assert new.parent.id == board.id
    assert new.foreign_keys == {"crm": "42"}
    assert new.access == {"roles": ["admin"], "members": []}
    assert [item.id for item in new.children()] == [child.id]
    assert {item.id for item in new.embedded()} == {child.id, guest.id}
    assert not child.deleted
    assert old.deleted
    (link,) = old.links(FORKED_TO)
    assert link.target is not None
    assert link.target.id == new.id
    assert successor(old).id == new.id
    assert successor(new).id == new.id


def test_a_fork_is_one_message_and_one_undo(peer: Peer, party: Party) -> None:
    peer.models.register(Counter3)
    old = party.create("counter@1")
    old.apply(2)
    data = party.runtime.data
    assert data is not None
    length = data.cursor.length
    new = old.upgrade(3)
    assert data.cursor.length == length + 1
    assert new.value() == [2]  # without `convert`: the operations as they were


def test_a_fork_that_the_new_version_can_not_take_changes_nothing(peer: Peer, party: Party) -> None:
    peer.models.register(Counter2)
    old = party.create("counter@1")
    old.apply(2)
    before = party.snapshot().cid
    with pytest.raises(Refused, match=r"can't take over.*TypeError"):
        old.upgrade(2)
    with pytest.raises(Refused, match="counter@9 is not registered"):
        old.upgrade(9)
    with pytest.raises(UsageError, match="is a counter@1 already"):
        old.upgrade(1)
    with pytest.raises(RuntimeError, match="no idea"):
        old.upgrade(2, _no_idea)
    assert party.snapshot().cid == before
    assert old.value() == 2
    assert not old.deleted


def _no_idea(value: Any) -> list[Any]:
    raise RuntimeError("no idea")


def test_an_item_is_forked_once(peer: Peer, party: Party) -> None:
    peer.models.register(Counter3)
    old = party.create("counter@1")
    new = old.upgrade(3)
    with pytest.raises(Refused, match="is deleted; it continues as"):
        old.upgrade(3)
    new.delete()
    assert successor(old).id == new.id


def test_only_who_may_write_an_item_may_fork_it(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    for party in pair:
        party.peer.models.register(Counter1)
        party.peer.models.register(Counter3)
    item = ours.create("counter@1")
    item.restrict(roles=["admin"])
    sync(ours, theirs)
    with pytest.raises(Refused, match="may be written by admin only"):
        theirs.get(item.id).upgrade(3)
    assert not theirs.get(item.id).deleted
    assert theirs.snapshot().cid == ours.snapshot().cid


def test_a_link_alone_makes_no_successor(peer: Peer, party: Party) -> None:
    one, other = counted(party, 1), counted(party, 2)
    one.link(other, type=FORKED_TO)
    assert successor(one).id == one.id


def test_base_models_have_one_version(party: Party) -> None:
    note = party.create("property-set")
    with pytest.raises(Refused, match="property-set@2 is not registered"):
        note.upgrade(2)


def test_an_item_can_not_be_converted_by_who_can_not_read_it(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter1)
    item = counted(ours, 2)
    sync(ours, theirs)
    theirs.peer.models.register(Counter2)
    with pytest.raises(Refused, match="counter@1 is not registered here, so its value can't be converted"):
        theirs.get(item.id).upgrade(2, to_second)


def test_forks_at_the_same_time_leave_one_successor_on_every_peer(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    for party in pair:
        party.peer.models.register(Counter1)
        party.peer.models.register(Counter3)
    item = ours.create("counter@1")
    item.apply(2)
    sync(ours, theirs)
    item.upgrade(3)
    theirs.get(item.id).upgrade(3)
    sync(ours, theirs)
    assert successor(item).id == successor(theirs.get(item.id)).id
    assert len(item.links(FORKED_TO)) == 2
    assert ours.snapshot().cid == theirs.snapshot().cid


# three versions, old and new peers (X1)

VERSIONS = {1: Counter1, 2: Counter2, 3: Counter3}
CONVERSIONS = {(1, 2): to_second, (1, 3): None, (2, 3): lambda value: [value["total"]]}


@pytest.mark.parametrize("seed", range(12))
def test_peers_of_three_versions_keep_one_state(tmp_path: Path, seed: int) -> None:
    """Peer k knows the versions up to k. All hold the same bytes throughout; what two of them can read, they read
    alike; and after the last one has learnt all versions, it reads what the newest peer reads."""
    chance = random.Random(seed)
    peers = {number: open_quiet(tmp_path / f"peer{number}") for number in VERSIONS}
    try:
        for number, peer in peers.items():
            for version in range(1, number + 1):
                peer.models.register(VERSIONS[version])
        first = peers[1].create_party("Versions")
        parties = {1: first, 2: admitted(first, peers[2]), 3: admitted(first, peers[3])}
        items = [first.create("counter@1").id for _ in range(3)]
        sync(*parties.values())
        for _ in range(25):
            _random_step(chance, parties, items)
        sync(*parties.values())
        assert len({party.snapshot().cid for party in parties.values()}) == 1
        shown = {number: _shown(party, items) for number, party in parties.items()}
        for low, high in ((1, 2), (2, 3)):
            assert all(value is None or value == shown[high][item] for item, value in shown[low].items())
        for version in (2, 3):
            peers[1].models.register(VERSIONS[version])
        assert _shown(parties[1], items) == shown[3]
        assert None not in shown[3].values()
    finally:
        for peer in peers.values():
            peer.close()


def _random_step(chance: random.Random, parties: dict[int, Party], items: list[Any]) -> None:
    number = chance.choice(list(parties))
    party = parties[number]
    here = [party.get(item) for item in items if party.has(item)]
    alive = [item for item in here if not item.deleted and not item.opaque]
    action = chance.choice(["apply", "apply", "upgrade", "sync", "sync"])
    if action == "sync":
        sync(*chance.sample(list(parties.values()), 2))
    elif alive and action == "apply":
        item = chance.choice(alive)
        by = chance.randint(1, 9)
        item.apply({"by": by} if item.version == 2 else by)
    elif alive:
        item = chance.choice(alive)
        later = range(item.version + 1, number + 1)
        if later:
            version = chance.choice(later)
            items.append(item.upgrade(version, CONVERSIONS[item.version, version]).id)


def _shown(party: Party, items: list[Any]) -> dict[Any, Any]:
    return {item: party.get(item).value() for item in items}


# published descriptors


def test_a_published_model_is_listed_on_every_peer(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    ours.peer.models.register(Counter1)
    ours.peer.models.register(Counter2)
    ours.publish_model(Counter2)
    published = ours.publish_model(Counter1)
    assert published.description == "Adds numbers."
    sync(ours, theirs)
    assert [(each.name, each.version) for each in theirs.published_models()] == [("counter", 1), ("counter", 2)]
    assert theirs.published_models()[0] == published
    assert not theirs.peer.models.known("counter", 1)  # a descriptor is no code


def test_a_version_is_published_once_and_by_admins(pair: tuple[Party, Party]) -> None:
    ours, theirs = pair
    for party in pair:
        party.peer.models.register(Counter1)
    with pytest.raises(Refused):
        theirs.publish_model(Counter1)
    sync(ours, theirs)
    ours.publish_model(Counter1)
    with pytest.raises(Refused):
        ours.publish_model(Counter1)
    assert len(ours.published_models()) == 1


def test_only_a_registered_class_with_a_source_can_be_published(peer: Peer, party: Party) -> None:
    with pytest.raises(UsageError, match="not a registered model"):
        party.publish_model(Counter2)
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("class Ghost:\n    name, version = 'ghost', 1\n    apply = value = lambda *_: None", namespace)
    peer.models.register(namespace["Ghost"])
    with pytest.raises(UsageError, match="source file of Ghost is not here"):
        party.publish_model(namespace["Ghost"])


def test_the_guide_runs(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "laptop") as peer:
        run_guide("models.md", {"peer": peer, "party": peer.create_party("Models")})


def test_an_unknown_model_is_an_ordered_fold(party: Party) -> None:
    item = party.create("nothing-we-know@4")
    assert isinstance(item._record().model, OrderedFold)
    assert item.opaque
