"""Inception keys: who holds one, whatever was signed twice or copied, in whatever order it arrives."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Refused
from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.items.record import Genesis
from echostore.kernel.items.view_claims import Claim, key_holder
from echostore.peer.checkpoints import RULES_MARK
from echostore.peer.epochs import Epochs
from echostore.store.home import Home
from echostore.store.item_store import ItemStore
from echostore.store.key_store import KeyUse
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.messages import encode_genesis
from echostore.wire.signing import SigningKey
from echostore.wire.views import itemless_statement, sign_view
from peer_builder import Circle, Liar, reasons
from test_stale_messages import agreed_epoch

CLASS = "example.org/planner"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat", roles={"bob": "admin"}) as made:
        for peer in made.peers.values():
            peer.view_classes.register(CLASS)
        yield made


def proved(party: PartyKey, item: ItemId, key: SigningKey, **fields: Any) -> pb.Operation:
    """The genesis of a view, signed by its key for this item."""
    genesis = pb.Genesis(model="property-set", version=1, type="view", **fields)
    genesis.view.inception_key = key.public
    genesis.view.id_proof = sign_view(party, item, genesis, key)
    return pb.Operation(genesis=genesis)


def claim(liar: Liar, key: SigningKey, **fields: Any) -> tuple[ItemId, list[bytes]]:
    """The next two messages of a feed: a view with a note inside it, and a write to both."""
    view, note = liar.created(0), liar.created(1)
    first = liar.message(proved(liar.party, view, key, **fields), liar.genesis(parent=view))
    second = liar.message(liar.set(view, display_name="mine"), liar.set(note, text="inside"), number=1)
    return view, [first, second]


def replay(liar: Liar, genesis: Genesis) -> bytes:
    """The genesis of a view once more, key and proof copied, as low in the canonical order as its feed allows."""
    copied = encode_genesis(genesis)
    return liar.message(pb.Operation(genesis=copied))


def resolved(circle: Circle, locator: str) -> set[ItemId]:
    return {circle.peers[name].resolve(locator).id for name in circle.names}


# copied proofs


@pytest.mark.parametrize("restricted", [False, True])
def test_a_partitioned_editor_does_not_take_a_view_over_by_copying_its_proof(circle: Circle, restricted: bool) -> None:
    """Cat hears of the view, writes its genesis on a branch of the party that knows nothing, and the others meet it."""
    for n in range(5):
        circle.party("ann").create("property-set", n=n)
    view = circle.party("ann").create_view(CLASS, "Summer")
    if restricted:
        view.restrict(roles=["owner"])
    liar = Liar.of(circle, "cat")
    assert liar.depth < view._record().genesis.depth, "the copy sorts below the view"
    copied = liar.signed(replay(liar, view._record().genesis))
    copy = liar.created(ahead=-1)
    liar.deliver(copied, to="bob")
    circle.meet("ann", "bob")
    circle.meet("ann", "cat")
    locator = view.locator
    circle.agree_after_loss()
    assert resolved(circle, locator) == {view.id}
    for name in circle.names:
        assert not circle.party(name).has(copy)
        assert [found.id for found in circle.party(name).views()] == [view.id]
        assert reasons(circle.party(name)) == ["bad-proof"]


def test_a_copied_proof_does_not_take_over_a_view_inside_a_final_epoch(circle: Circle) -> None:
    for n in range(5):
        circle.party("ann").create("property-set", n=n)
    view = circle.party("ann").create_view(CLASS, "Summer")
    view.restrict(roles=["owner"])
    circle.meet("ann", "bob")
    liar = Liar.of(circle, "cat")
    agreed_epoch(circle, "ann", "bob")
    liar.send(replay(liar, view._record().genesis), to="ann")
    circle.meet("ann", "bob")
    for name in ("ann", "bob"):
        party = circle.party(name)
        assert party.get(view.locator).id == view.id
        assert reasons(party) == ["bad-proof"]
    assert circle.party("ann").snapshot().cid == circle.party("bob").snapshot().cid


def test_a_proof_of_the_earlier_form_is_refused_and_says_so(circle: Circle) -> None:
    key, liar = SigningKey.generate(), Liar.of(circle, "cat")
    genesis = pb.Genesis(model="property-set", version=1, type="view")
    genesis.view.inception_key = key.public
    genesis.view.id_proof = key.sign(itemless_statement(circle.key, genesis))
    liar.send(liar.message(pb.Operation(genesis=genesis)), to="ann")
    (reject,) = circle.party("ann").rejected()
    assert (reject.reason, reject.detail) == (
        "bad-proof",
        "a proof of the earlier form, which names no item; create the view again",
    )


def test_a_view_has_no_granted_id(circle: Circle) -> None:
    """Such an id may be used twice by its feed; the proof of a view would then name two geneses."""
    from echostore.kernel.ids import ARC_BIT, item_id

    key, liar = SigningKey.generate(), Liar.of(circle, "cat")
    operation = proved(circle.key, item_id(liar.feed, ARC_BIT | 7), key)
    operation.local = ARC_BIT | 7
    liar.send(liar.message(operation), to="ann")
    assert reasons(circle.party("ann")) == ["bad-proof"]


# one key, signed twice


def test_the_holder_is_the_base_s_or_the_first_in_canonical_order() -> None:
    low, high = Claim(3, ItemId(b"b" * 16)), Claim(3, ItemId(b"c" * 16))
    assert key_holder([high, low], in_base=None) == low.item
    assert key_holder([Claim(2, ItemId(b"z" * 16)), low], in_base=None) == b"z" * 16
    assert key_holder([low], in_base=high.item) == high.item
    assert key_holder([], in_base=None) is None


@pytest.mark.parametrize("order", list(itertools.permutations(["ann", "bob", "cat"])))
def test_of_geneses_with_one_key_all_peers_take_the_same_in_any_order(circle: Circle, order: tuple[str, ...]) -> None:
    """Three devices that can't reach each other use one key. Whoever hears of the three in this order agrees with all."""
    key = SigningKey.generate()
    circle.party("ann").create("property-set", n=1)  # ann's claim sorts above the others
    circle.meet_all()
    liars = {name: Liar.of(circle, name) for name in circle.names}
    views, blocks = {}, {}
    for name in circle.names:
        views[name], payloads = claim(liars[name], key)
        blocks[name] = liars[name].signed(*payloads)
    depths = {name: Liar.of(circle, name).depth for name in circle.names}
    winner = min(circle.names, key=lambda name: (depths[name], views[name]))
    for name in order:
        liars[name].deliver(blocks[name], to="bob")
    for name in reversed(order):
        liars[name].deliver(blocks[name], to="cat")
    for name in circle.names:
        liars[name].deliver(blocks[name], to="ann")
    cid = circle.agree_after_loss()
    locator = f"echo://{circle.key.hex()}/{key.public.hex()}"
    assert resolved(circle, locator) == {views[winner]}
    for name in circle.names:
        party = circle.party(name)
        assert [party.has(view) for view in views.values()] == [each == winner for each in circle.names]
        assert reasons(party).count("duplicate-view") == 2
        assert reasons(party).count("no-parent") == 2
        assert party.snapshot().cid == cid


def test_a_claim_that_counts_no_longer_leaves_the_key_to_the_next(circle: Circle) -> None:
    """Cat's genesis comes first; bob, who has not heard of it, removes cat: then his own makes the view everywhere."""
    key = SigningKey.generate()
    cat, bob = Liar.of(circle, "cat"), circle.party("bob")
    for n in range(3):
        bob.create("property-set", n=n)
    circle.peers["bob"].keys.add(KeyUse.VIEW, key)
    second = bob.create_view(CLASS, "Bob's", inception_key=key.public).id
    circle.meet("ann", "bob")
    first, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    ann = circle.party("ann")
    assert (ann.has(first), ann.has(second)) == (True, False)
    ann = circle.restart("ann")
    assert (ann.has(first), ann.has(second)) == (True, False)
    bob.members.remove(circle.peers["cat"].identity)
    circle.meet("ann", "bob")
    assert (ann.has(first), ann.has(second)) == (False, True)
    assert ann.get(second)["display_name"] == "Bob's"
    for name in ("ann", "bob"):
        for lose in ((), ("items.db",)):
            party = circle.restart(name, lose=lose)
            assert (party.has(first), party.has(second)) == (False, True)
            assert party.find_view(key.public).id == second
    assert circle.party("ann").rejected() == circle.party("bob").rejected()
    assert circle.party("ann").snapshot().cid == circle.party("bob").snapshot().cid


def test_the_past_shows_who_held_the_key_then(circle: Circle) -> None:
    key = SigningKey.generate()
    for n in range(3):
        circle.party("ann").create("property-set", n=n)
    circle.meet("ann", "bob")
    cat, ann = Liar.of(circle, "cat"), Liar.of(circle, "ann")
    later, payloads = claim(ann, key)
    ann.send(*payloads, to="bob")
    bob = circle.party("bob")
    moment = bob.anchor()
    earlier, payloads = claim(cat, key)
    cat.send(*payloads, to="bob")
    assert bob.find_view(key.public).id == earlier
    assert bob.as_of(moment).find_view(key.public).id == later


def test_nothing_takes_its_key_from_a_view_in_a_final_epoch(circle: Circle) -> None:
    """The epoch has ann's view; cat signed the same key on a branch that sorts below it and is heard of later."""
    key = SigningKey.generate()
    for n in range(3):
        circle.party("ann").create("property-set", n=n)
    circle.peers["ann"].keys.add(KeyUse.VIEW, key)
    view = circle.party("ann").create_view(CLASS, "Summer", inception_key=key.public)
    circle.meet("ann", "bob")
    cat = Liar.of(circle, "cat")
    assert cat.depth < view._record().genesis.depth
    agreed_epoch(circle, "ann", "bob")
    other, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    circle.meet("ann", "bob")
    for lose in ((), ("items.db",)):
        for name in ("ann", "bob"):
            party = circle.restart(name, lose=lose)
            assert party.find_view(key.public).id == view.id
            assert not party.has(other)
            assert reasons(party).count("duplicate-view") == 1
    assert circle.party("ann").rejected() == circle.party("bob").rejected()
    assert circle.party("ann").snapshot().cid == circle.party("bob").snapshot().cid
    agreed_epoch(circle, "ann", "bob")
    assert circle.party("bob").find_view(key.public).id == view.id
    assert not circle.party("bob").has(other)


def test_a_peer_that_heard_another_claim_first_takes_the_epoch_s_when_it_is_final(circle: Circle) -> None:
    """Bob has folded cat's claim, which sorts below ann's, before he hears of the epoch that has ann's view."""
    key = SigningKey.generate()
    for n in range(3):
        circle.party("ann").create("property-set", n=n)
    circle.peers["ann"].keys.add(KeyUse.VIEW, key)
    view = circle.party("ann").create_view(CLASS, "Summer", inception_key=key.public)
    inside = circle.party("ann").create("property-set", parent=view, n=9)
    circle.meet("ann", "bob")
    cat = Liar.of(circle, "cat")
    number = Epochs(circle.party("ann")).create().number
    other, payloads = claim(cat, key)
    cat.send(*payloads, to="bob")
    assert circle.party("bob").find_view(key.public).id == other
    assert not circle.party("bob").has(inside.id)
    circle.meet("ann", "bob")
    Epochs(circle.party("bob")).review()
    circle.meet("ann", "bob")
    for name in ("ann", "bob"):
        party = circle.party(name)
        assert party.runtime.processor.base is not None
        assert party.runtime.processor.base.name.number == number
        assert party.find_view(key.public).id == view.id
        assert party.has(inside.id)
        assert not party.has(other)
    assert circle.party("ann").rejected() == circle.party("bob").rejected()
    assert circle.party("ann").snapshot().cid == circle.party("bob").snapshot().cid


def test_a_claim_whose_parent_is_missing_still_holds_the_key(circle: Circle) -> None:
    """Else a view below another with the same key would exist if and only if it does not."""
    key, cat = SigningKey.generate(), Liar.of(circle, "cat")
    nowhere = ItemId(b"nowhere!" + bytes(7) + b"\x01")
    held, payloads = claim(cat, key, parent=nowhere)
    cat.send(*payloads, to="ann")
    second, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    ann = circle.party("ann")
    assert (ann.has(held), ann.has(second)) == (False, False)
    assert ann.find_view(key.public) is None
    circle.agree_after_loss()


# deleted views


def test_a_deleted_view_keeps_its_key_and_says_how_to_go_on(circle: Circle) -> None:
    ann = circle.party("ann")
    key = circle.peers["ann"].new_view_key()
    view = ann.create_view(CLASS, "Summer", inception_key=key)
    view.delete()
    with pytest.raises(Refused) as refused:
        ann.create_view(CLASS, "Winter", inception_key=key)
    assert "was deleted" in refused.value.what
    _, named, rest = refused.value.next_step.split('"')
    assert rest == ").restore(), or create a view with another key."
    assert ann.views() == []
    ann.get(named).restore()
    assert [found.id for found in ann.views()] == [view.id]
    assert ann.get(view.locator).id == view.id


# homes from before


@pytest.mark.parametrize("writable", [True, False])
def test_items_that_were_folded_by_earlier_rules_are_folded_again(circle: Circle, writable: bool) -> None:
    """The checkpoint of a peer of before has a view whose proof names no item, and no index of claims."""
    ann = circle.party("ann")
    ann.create_view(CLASS, "Summer")
    ann.flush()
    cid = ann.snapshot().cid
    circle.peers["ann"].close()
    with closing(ItemStore(Home.open(circle.folder / "ann").party(circle.key).items)) as items:
        items.set_about({RULES_MARK: b"1"})
    with echostore.open(circle.folder / "ann", background=False, read_only=not writable) as peer:
        party = peer.party(circle.key)
        assert party.runtime.processor.counters.rebuilds == 1
        assert party.snapshot().cid == cid
    circle.peers["ann"] = circle._open("ann")
    assert circle.party("ann").runtime.processor.counters.rebuilds == (0 if writable else 1)
