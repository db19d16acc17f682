"""Lists of rejects are a function of blocks, admission and base: equal on honest peers, in whatever order blocks came."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, PartyKey, feed_id
from echostore.kernel.items.operations import Reject
from echostore.kernel.order import DATA, FeedCursor
from echostore.kernel.party.admission import Admission, FeedAdmission, Interval
from echostore.kernel.party.credentials import FeedKind, Role
from echostore.kernel.reasons import Reason
from echostore.peer.opening import PartyOpener
from echostore.peer.rejections import listed_rejects
from peer_builder import Circle, Liar, head_of, reasons

FEED = FeedKey(b"f" * 32)
ID = feed_id(FEED)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat", roles={"bob": "admin"}) as made:
        yield made


def honest(circle: Circle) -> list[Reject]:
    """Ann and bob meet, and have equal states and lists, also after restarts and without their items; returns the list."""
    for _ in range(3):
        circle.meet("ann", "bob")
    cid, listed = circle.party("ann").snapshot().cid, circle.party("ann").rejected()
    for lose in (None, (), ("items.db",)):
        for name in ("ann", "bob"):
            party = circle.party(name) if lose is None else circle.restart(name, lose=lose)
            assert party.snapshot().cid == cid, (name, lose)
            assert party.rejected() == listed, (name, lose)
    return listed


# the rule


def admitted(fork: int | None, *intervals: Interval, reason: Reason | None = Reason.FORK) -> Admission:
    identity, device = IdentityKey(b"i" * 32), DeviceKey(b"d" * 32)
    feed = FeedAdmission(FEED, FeedKind.DATA, identity, device, None, intervals, reason, fork)
    return Admission.of(PartyKey(b"p" * 32), None, [feed])


def test_a_forked_feed_is_listed_once_at_the_first_block_that_has_rivals() -> None:
    noted = [Reject(ID, 1, 0, Reason.NO_ITEM, ""), *(Reject(ID, seq, -1, Reason.FORK, "") for seq in (4, 5, 6))]
    admission = admitted(4, Interval(0, 4, Role.EDITOR))
    assert listed_rejects(noted, admission, []) == [noted[0], Reject(ID, 4, -1, Reason.FORK, "")]
    assert listed_rejects(noted[:1], admission, []) == [noted[0], Reject(ID, 4, -1, Reason.FORK, "")]


@pytest.mark.parametrize("length", [2, 4, 9])
def test_what_ends_one_branch_of_a_forked_feed_is_not_listed(length: int) -> None:
    cursor = FeedCursor(FEED, DATA, length=length, held=length + 3, ended=Reason.UNDECODABLE)
    listed = listed_rejects([], admitted(4, Interval(0, 4, Role.EDITOR)), [cursor])
    ends = [Reject(ID, 2, -1, Reason.INVALID, Reason.UNDECODABLE), Reject(ID, 3, -1, Reason.AFTER_INVALID, "")]
    assert listed == [*(ends if length == 2 else []), Reject(ID, 4, -1, Reason.FORK, "")]


def test_a_cut_below_the_fork_is_listed_up_to_the_fork() -> None:
    admission = admitted(4, Interval(0, 2, Role.EDITOR), reason=Reason.BEYOND_CUT)
    noted = [Reject(ID, seq, -1, Reason.BEYOND_CUT, "") for seq in range(2, 8)]
    assert listed_rejects(noted, admission, []) == noted[:3]


def test_what_an_epoch_contains_behind_a_fork_is_listed_as_before() -> None:
    admission = admitted(4, Interval(0, 3, Role.EDITOR), Interval(3, 6, Role.ADMIN))
    noted = [Reject(ID, seq, 0, Reason.DENIED, "") for seq in range(3, 9)]
    assert listed_rejects(noted, admission, []) == [*noted[:3], Reject(ID, 6, -1, Reason.FORK, "")]
    assert listed_rejects(noted, admitted(4, Interval(0, None, Role.EDITOR), reason=None), []) == noted


# peers


@pytest.mark.parametrize("seed", range(8))
def test_peers_that_heard_branches_in_any_order_list_the_same(circle: Circle, seed: int) -> None:
    """Branches of different lengths, one of which ends with a block that nobody can read; a removal or not."""
    chance = random.Random(seed)
    ann, bob = circle.party("ann"), circle.party("bob")
    item = ann.create(n=1)
    circle.meet_all()
    first = Liar.of(circle, "cat")
    first.send(first.message(first.set(item.id, before=1), first.set(first.created(7), lost=1)), to="ann")
    circle.meet("ann", "bob")
    branches = []
    for number in range(chance.randint(2, 3)):
        liar = Liar.of(circle, "cat")
        liar.length, liar.link, liar.depth = first.length, first.link, first.depth
        messages = [
            liar.message(liar.genesis(), liar.set(liar.created(40), x=number), number=at)
            for at in range(chance.randint(1, 4))
        ]
        if chance.random() < 0.5:
            messages.append(b"\xff\xff")
        branches.append((liar, liar.signed(*messages)))
    removal = chance.random() < 0.5
    for party, name in ((ann, "ann"), (bob, "bob")):
        order = list(branches)
        chance.shuffle(order)
        for at, (liar, blocks) in enumerate(order):
            liar.deliver(blocks, to=name)
            if at == 0:  # honest work on what is about to leave the state
                inside = next((each for each in party.items() if each.id[:8] == liar.feed), None)
                if inside is not None:
                    inside["n"] = name
        if removal and name == "bob":
            bob.members.remove(circle.peers["cat"].identity)
        if chance.random() < 0.5:
            circle.restart(name)
    listed = honest(circle)
    assert [(each.seq, str(each.reason)) for each in listed if each.feed == first.feed and each.position < 0] == [
        (first.length, "fork")
    ]


def test_an_honest_message_that_names_a_branch_is_listed_alike(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    left, right = Liar.of(circle, "cat"), Liar.of(circle, "cat")
    made = left.created()
    left.send(left.message(left.genesis()), left.message(left.set(item.id, n=3), number=1), to="ann")
    right.send(right.message(right.set(item.id, n=2)), to="bob")
    circle.party("ann").get(made)["by"] = "ann"
    assert head_of(circle.party("ann"), left.feed).seq == left.length - 1
    listed = honest(circle)
    assert sorted(str(each.reason) for each in listed) == ["fork", "no-item"]


def test_a_forked_control_feed_is_told_once(tmp_path: Path, circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob's home is copied, and both copies go on: both change the role of cat."""
    monkeypatch.setattr(PartyOpener, "must_renew", lambda opener, feeds: False)
    circle.party("bob").members.change_role(circle.peers["cat"].identity, "reader")
    circle.meet_all()
    circle.peers["bob"].close()
    shutil.copytree(tmp_path / "bob", tmp_path / "evil")
    circle.peers["bob"], evil = circle._open("bob"), circle._open("evil")
    cat = circle.peers["cat"].identity
    circle.party("bob").members.change_role(cat, "editor")
    evil.party(circle.key).members.change_role(cat, "admin")
    evil.party(circle.key).members.change_role(cat, "reader")
    circle.peers["evil"] = evil
    circle.meet("ann", "bob")
    circle.meet("cat", "evil")
    lists: dict[str, Any] = {}
    for _ in range(3):
        circle.meet("ann", "cat")
    for name in ("ann", "cat"):
        lists[name] = circle.party(name).members.rejected(), circle.party(name).rejected()
    assert lists["ann"] == lists["cat"]
    assert [str(each.reason) for each in lists["ann"][0]].count("fork") == 1
    assert circle.party("ann").snapshot().cid == circle.party("cat").snapshot().cid
    for name in ("ann", "cat"):
        party = circle.restart(name, lose=("items.db",))
        assert (party.members.rejected(), party.rejected()) == lists[name]
    assert "fork" not in reasons(circle.party("ann"))
