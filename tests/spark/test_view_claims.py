"""Inception keys on Spark: of geneses with one key the same one makes the view as on every peer, to the same CID."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.kernel.ids import item_text
from echostore.store.key_store import KeyUse
from echostore.wire.signing import SigningKey
from peer_builder import Circle, Liar
from spark.circle_lake import NAMES, Told
from spark.engines import Engines
from spark.stream_jobs import Steps, held_states
from test_stale_messages import agreed_epoch
from test_view_claims import CLASS, claim, replay


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES, roles={"bob": "admin"}) as made:
        for peer in made.peers.values():
            peer.view_classes.register(CLASS)
        yield made


@pytest.fixture
def told(engines: Engines, circle: Circle, tmp_path: Path) -> Told:
    return Told(engines, circle, tmp_path)


def agreed(circle: Circle, told: Told, out: str = "out") -> list[tuple[str, int, int, str]]:
    """Spark has the CID and the rejects of the peers; returns the rejects."""
    told.agreed(out)
    mine = sorted(
        (each.feed.hex(), each.seq, each.position, str(each.reason), each.detail)
        for each in circle.party("ann").rejected()
    )
    theirs = sorted(
        (row["feed"], row["seq"], row["position"], row["reason"], row["detail"]) for row in told.rows("rejects", out)
    )
    assert theirs == mine
    return [(feed, seq, position, reason) for feed, seq, position, reason, _ in mine]


@pytest.mark.parametrize("inside_an_epoch", [False, True])
def test_a_copied_proof_takes_no_view_over(circle: Circle, told: Told, inside_an_epoch: bool) -> None:
    ann = circle.party("ann")
    for n in range(4):
        ann.create("property-set", n=n)
    view = ann.create_view(CLASS, "Summer")
    view.restrict(roles=["owner"])
    circle.meet("ann", "bob")
    liar = Liar.of(circle, "cat")
    if inside_an_epoch:
        agreed_epoch(circle, "ann", "bob")
        told.agreed()
    liar.send(replay(liar, view._record().genesis), to="ann")
    circle.meet("ann", "bob")
    rejects = agreed(circle, told)
    assert [reason for *_, reason in rejects] == ["bad-proof"]
    (row,) = (row for row in told.rows("items") if row["view_key"] is not None)
    assert (row["item"], view.locator.endswith(row["view_key"])) == (item_text(view.id), True)
    assert circle.party("bob").get(view.locator).id == view.id


def test_the_first_claim_makes_the_view_whatever_arrives_when(circle: Circle, told: Told, tmp_path: Path) -> None:
    """Each commit hears of one more claim, which sorts below those before; a fresh build hears of all at once."""
    key, ann = SigningKey.generate(), circle.party("ann")
    parent = ann.create("property-set", n=0)
    circle.meet("ann", "bob")
    bob = circle.party("bob")
    bob.create("property-set", n=1)
    circle.peers["bob"].keys.add(KeyUse.VIEW, key)
    second = bob.create_view(CLASS, "Bob's", inception_key=key.public, parent=circle.get("bob", parent))
    bob.create("property-set", parent=bob.create("property-set", parent=second), n=2)
    circle.meet("ann", "bob")
    assert agreed(circle, told) == []
    cat = Liar.of(circle, "cat")
    first, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    circle.meet("ann", "bob")
    assert circle.party("ann").find_view(key.public).id == first
    reasons = [reason for *_, reason in agreed(circle, told)]
    assert reasons.count("duplicate-view") == 1
    assert reasons.count("no-parent") == 2
    assert agreed(circle, told, "fresh") == agreed(circle, told)
    # Written to what was refused, and to what holds the key.
    circle.get("ann", circle.party("ann").find_view(key.public))["n"] = 5
    _, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    assert [reason for *_, reason in agreed(circle, told)].count("duplicate-view") == 2
    assert agreed(circle, told, "at last") == agreed(circle, told)


def test_a_claim_that_counts_no_longer_leaves_the_key_to_the_next(circle: Circle, told: Told) -> None:
    key, bob, cat = SigningKey.generate(), circle.party("bob"), Liar.of(circle, "cat")
    for n in range(3):
        bob.create("property-set", n=n)
    circle.peers["bob"].keys.add(KeyUse.VIEW, key)
    second = bob.create_view(CLASS, "Bob's", inception_key=key.public)
    inside = bob.create("property-set", parent=second, n=9)
    circle.meet("ann", "bob")
    first, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    agreed(circle, told)
    ann = circle.party("ann")
    assert (ann.has(first), ann.has(inside.id)) == (True, False)
    bob.members.remove(circle.peers["cat"].identity)
    circle.meet("ann", "bob")
    assert (ann.has(first), ann.has(inside.id)) == (False, True)
    agreed(circle, told)
    agreed(circle, told, "fresh")


def test_nothing_takes_its_key_from_a_view_in_a_final_epoch(circle: Circle, told: Told) -> None:
    key, ann, cat = SigningKey.generate(), circle.party("ann"), Liar.of(circle, "cat")
    for n in range(3):
        ann.create("property-set", n=n)
    circle.peers["ann"].keys.add(KeyUse.VIEW, key)
    view = ann.create_view(CLASS, "Summer", inception_key=key.public)
    ann.create("property-set", parent=view, n=9)
    circle.meet("ann", "bob")
    told.agreed()
    agreed_epoch(circle, "ann", "bob")
    told.agreed()
    other, payloads = claim(cat, key)
    cat.send(*payloads, to="ann")
    assert ann.find_view(key.public).id == view.id
    assert not ann.has(other)
    rejects = agreed(circle, told)
    assert [reason for *_, reason in rejects].count("duplicate-view") == 1
    assert agreed(circle, told, "fresh") == rejects
    agreed_epoch(circle, "ann", "bob")
    told.agreed()


def test_a_stream_gives_a_key_to_the_first_claim(circle: Circle, told: Told, tmp_path: Path) -> None:
    key, bob, cat = SigningKey.generate(), circle.party("bob"), Liar.of(circle, "cat")
    bob.create("property-set", n=1)
    circle.peers["bob"].keys.add(KeyUse.VIEW, key)
    view = bob.create_view(CLASS, "Bob's", inception_key=key.public)
    circle.meet("ann", "bob")
    told.agreed()
    steps = Steps(told.lake, tmp_path / "out")
    bob.create("property-set", parent=view, n=2)
    circle.meet("ann", "bob")
    told.publish()
    assert steps.step().deferred == {}
    for _ in range(2):
        _, payloads = claim(cat, key)
        cat.send(*payloads, to="ann")
        circle.meet("ann", "bob")
        told.publish()
        assert steps.step().deferred == {}
    told.compare(told.build("fresh"))
    assert held_states(tmp_path / "out") == held_states(tmp_path / "fresh")
