"""Feeds that somebody took for admitted who had heard less: nothing of them counts, and nobody waits for ever for what
others built on them."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.order import CONTROL
from echostore.kernel.party.credentials import FeedAdmit, FeedKind, MemberAdmit, Profile, Role
from echostore.kernel.party.verdicts import CLAIMS_PER_ISSUER_MAX
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.port import Rejection
from echostore.peer.epoch_agreement import Verdict
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.testing.inmemory import link
from echostore.wire.signing import SigningKey
from party_story import Story, device, feed, fid, linearisations, person, remove
from peer_builder import Circle, Liar
from test_child_epochs import Play

NAMES = ("ann", "bob", "cat", "eve")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES, roles={"bob": "admin", "cat": "admin"}) as made:
        yield made


def waiting(party: Party) -> list[str]:
    return [feed.waits_for for feed in party.status.feeds if feed.waits_for]


def split(circle: Circle) -> Any:
    """Ann removes cat, eve hears of it; cat lets dan in, and bob hears of that. Returns what dan made."""
    circle.party("ann").members.remove(circle.peers["cat"].identity)
    circle.meet("ann", "eve")
    dan = circle.peers["dan"] = circle._open("dan")
    dan.enter(circle.party("cat").members.admit(dan.request_join(circle.key), role="editor"))
    circle.meet("cat", "dan")
    circle.party("dan").members.set_profile("Dan")
    made = circle.party("dan").create("property-set", n=9)
    circle.meet("cat", "dan")
    circle.meet("cat", "bob")
    return made


def agreed(circle: Circle, *names: str) -> str:
    """All of these have met; they wait for nothing, and have one state and one list of rejects."""
    for _ in range(3):
        for name in names[1:]:
            circle.meet(names[0], name)
    assert {name: waiting(circle.party(name)) for name in names} == {name: [] for name in names}
    cids = {circle.party(name).snapshot().cid for name in names}
    assert len(cids) == 1
    assert len({tuple(circle.party(name).rejected()) for name in names}) == 1
    return cids.pop()


@pytest.mark.parametrize("writes", ["control", "data", "both"])
def test_what_was_built_on_a_feed_that_a_removed_admin_let_in_reaches_everybody(circle: Circle, writes: str) -> None:
    made = split(circle)
    bob = circle.party("bob")
    assert bob.has(made.id)
    if writes != "data":
        bob.members.set_profile("Robert")
    item = bob.create("property-set", n=1) if writes != "control" else None
    agreed(circle, "ann", "bob", "eve")
    for name in ("ann", "bob", "eve"):
        party = circle.party(name)
        assert not party.has(made.id), "who let its writer in had been removed"
        assert item is None or party.get(item.id)["n"] == 1
        assert Reason.UNADMITTED in {reject.reason for reject in party.rejected()}
        if writes != "data":
            assert "Robert" in {member.name for member in party.members.all()}


def test_who_is_connected_all_the_while_hears_of_void_feeds_at_once(circle: Circle) -> None:
    """Nothing that counts changes by them, and they are asked for all the same."""
    split(circle)
    item = circle.party("bob").create("property-set", n=1)
    joined = link(circle.peers["ann"], circle.peers["eve"], circle.key)
    joined.pump()
    for _ in range(3):
        circle.meet("ann", "bob")
        joined.pump()
    joined.cut()
    assert waiting(circle.party("eve")) == []
    assert circle.party("eve").has(item.id)


def test_such_a_party_goes_on_over_epochs_and_restarts(circle: Circle, tmp_path: Path) -> None:
    split(circle)
    bob = circle.party("bob")
    bob.members.set_profile("Robert")
    item = bob.create("property-set", n=1)
    cid = agreed(circle, "ann", "bob", "eve")
    for name in ("ann", "bob", "eve"):
        for lose in ((), ("items.db",)):
            assert circle.restart(name, lose=lose).snapshot().cid == cid
    Epochs(circle.party("ann")).create()
    for name in ("bob", "eve"):
        circle.meet("ann", name)
        assert [judged.verdict for judged in Epochs(circle.party(name)).review()] == [Verdict.ATTESTED]
        circle.meet("ann", name)
    (view,) = Epochs(circle.party("ann")).all()
    assert view.final
    circle.party("bob").get(item.id)["n"] = 2
    agreed(circle, "ann", "bob", "eve")
    fay = circle.peers["fay"] = circle._open("fay")
    fay.enter(circle.party("ann").members.admit(fay.request_join(circle.key)))
    agreed(circle, "ann", "bob", "eve", "fay")
    assert circle.party("fay").get(item.id)["n"] == 2


def test_a_removed_member_with_new_feeds_stops_nobody(circle: Circle, tmp_path: Path) -> None:
    """It restored its home from a copy and takes new feeds, before it hears of its removal."""
    circle.party("ann").members.remove(circle.peers["eve"].identity)
    home, kept = tmp_path / "homes" / "eve", tmp_path / "kept"
    circle.peers["eve"].close()
    shutil.copytree(home, kept)
    shutil.rmtree(home)
    kept.rename(home)
    circle.peers["eve"] = circle._open("eve")
    circle.meet("ann", "eve")
    ann = circle.party("ann")
    ann.members.set_profile("Anna")
    item = ann.create("property-set", n=1)
    agreed(circle, "ann", "bob", "cat")
    assert circle.party("bob").has(item.id)


def lone_control_feed(circle: Circle) -> Liar:
    """Ann has the first block of a control feed that nobody admits, from a time when such blocks were stored."""
    liar = Liar.of(circle, "cat", kind=CONTROL)
    liar._key = SigningKey.generate()
    liar.key = liar._key.public  # type: ignore[assignment]  # a feed of its own
    liar.length, liar.link, liar.depth = 0, bytes(32), 0  # type: ignore[assignment]  # that begins
    start, payloads, head = liar.signed(liar.message(depth=1))
    assert isinstance(liar.deliver((start, payloads, head)), Rejection), "it is not taken any more"
    assert not isinstance(circle.party("ann").sync_port._store(liar.key, CONTROL, start, payloads, head), Rejection)
    return liar


def test_a_control_feed_that_no_credential_names_is_named_by_nobody(circle: Circle) -> None:
    liar = lone_control_feed(circle)
    ann = circle.party("ann")
    assert any(cursor.key == liar.key and cursor.length for cursor in ann.runtime.processor.orderer.cursors.values())
    ann.members.set_profile("Anna")
    ann.create("property-set", n=1)
    anchor = ann.flush().anchor
    agreed(circle, *NAMES)
    assert circle.party("bob").as_of(anchor).snapshot().cid == ann.snapshot().cid


def test_the_past_of_a_party_with_cut_feeds_is_its_state(circle: Circle) -> None:
    """At the anchor of now: blocks behind a cut are in no timeframe, and are still causes of what counts."""
    eve, bob = circle.party("eve"), circle.party("bob")
    first = eve.create("property-set", n=1)
    circle.meet_all()
    circle.party("ann").members.remove(circle.peers["eve"].identity)
    first["n"] = 2
    circle.meet("eve", "bob")
    mine = bob.create("property-set", n=3)
    agreed(circle, "ann", "bob", "cat")
    ann = circle.party("ann")
    assert ann.get(first.id)["n"] == 1
    assert ann.has(mine.id)
    assert ann.as_of(ann.flush().anchor).snapshot().cid == ann.snapshot().cid


def declared_and_attested(circle: Circle, *names: str) -> None:
    """The first of these declares an epoch, and the others attest it."""
    Epochs(circle.party(names[0])).create()
    for name in names[1:]:
        circle.meet(names[0], name)
        assert [judged.verdict for judged in Epochs(circle.party(name)).review()] == [Verdict.ATTESTED]
        circle.meet(names[0], name)
    assert Epochs(circle.party(names[0])).all()[-1].final


def test_a_control_feed_that_was_admitted_in_vain_and_goes_on_stops_no_epoch(circle: Circle) -> None:
    split(circle)
    circle.party("bob").members.set_profile("Robert")
    for name in ("Daniel", "Danny"):  # nobody builds on these
        circle.party("dan").members.set_profile(name)
    circle.meet("cat", "dan")
    circle.meet("ann", "cat")
    agreed(circle, "ann", "bob", "eve")
    declared_and_attested(circle, "ann", "bob", "eve")


def test_the_past_contains_what_data_alone_was_built_on(circle: Circle) -> None:
    split(circle)
    circle.party("bob").create("property-set", n=1)
    agreed(circle, "ann", "bob", "eve")
    ann = circle.party("ann")
    assert ann.as_of(ann.flush().anchor).snapshot().cid == ann.snapshot().cid


def test_a_control_feed_that_no_credential_names_is_in_no_epoch(circle: Circle) -> None:
    lone_control_feed(circle)
    circle.party("ann").create("property-set", n=1)
    agreed(circle, *NAMES)
    declared_and_attested(circle, *NAMES)


def test_a_child_party_goes_on_over_void_feeds(circle: Circle) -> None:
    play = Play(circle, "bob", "cat", "eve")

    def meet(one: str, other: str) -> None:
        circle.meet(one, other)
        for name in (one, other):
            play.party(name).flush()
        link(circle.peers[one], circle.peers[other], play.key).pump().cut()

    split(circle)
    circle.peers["dan"].enter_child(circle.party("dan"), play.key)
    circle.meet("cat", "dan")
    made = play.party("dan").create("property-set", n=9)
    meet("cat", "dan")
    meet("cat", "bob")
    assert play.party("bob").has(made.id)
    circle.party("bob").members.set_profile("Robert")
    item = play.party("bob").create("property-set", n=1)
    names = ("ann", "bob", "eve")
    for _ in range(3):
        for name in names[1:]:
            meet("ann", name)
    assert [waiting(play.party(name)) for name in names] == [[], [], []]
    assert len({play.party(name).snapshot().cid for name in names}) == 1
    assert len({tuple(play.party(name).rejected()) for name in names}) == 1
    ann = play.party("ann")
    assert ann.has(item.id)
    assert not ann.has(made.id)
    assert ann.as_of(ann.flush().anchor).snapshot().cid == ann.snapshot().cid
    play.epochs("ann").create()
    for name in names[1:]:
        meet("ann", name)
        assert [judged.verdict for judged in play.epochs(name).review()] == [Verdict.ATTESTED]
        meet("ann", name)


@pytest.mark.parametrize("lose", [(), ("items.db",)])
@pytest.mark.parametrize("feeds", ["void", "cut"])
def test_a_paused_party_has_its_state_after_a_restart(circle: Circle, feeds: str, lose: tuple[str, ...]) -> None:
    if feeds == "void":
        split(circle)
    else:
        eve = circle.party("eve").create("property-set", n=1)
        circle.meet_all()
        circle.party("ann").members.remove(circle.peers["eve"].identity)
        eve["n"] = 2
        circle.meet("eve", "bob")
    circle.party("bob").create("property-set", n=1)
    cid = agreed(circle, "ann", "bob", "eve" if feeds == "void" else "cat")
    circle.party("ann").pause()
    assert circle.restart("ann", lose=lose).snapshot().cid == cid


# the party machine


def claims(story: Story) -> set[bytes]:
    """The void feeds, once every order of arrival has given the same."""
    expected = set(story.machine().admission().void)
    for count, order in enumerate(linearisations(story.messages)):
        assert set(story.machine(order).admission().void) == expected
        if count == 200:
            break
    return {bytes(feed) for feed in expected}


def test_what_a_removed_admin_admitted_at_the_same_time_is_void_and_not_admitted() -> None:
    story = Story()
    story.say("ann", *story.join("cat", Role.ADMIN))
    story.say("cat", *story.join("dan", Role.EDITOR))
    story.say("dan", FeedAdmit(feed("more"), FeedKind.DATA, person("dan"), device("dan.d")))
    story.say("ann", remove("cat"), sees=story.messages[:2])
    admission = story.machine().admission()
    assert claims(story) == {fid("dan"), fid("dan.data"), fid("more")}
    assert not admission.void.keys() & admission.by_id.keys()
    assert admission.why_excluded(fid("dan.data"), 0) is Reason.UNADMITTED
    story.messages.pop()
    assert claims(story) == set(), "without the removal they count"


def test_what_stands_behind_a_fork_is_void_however_late_it_comes() -> None:
    story = Story()
    story.say("ann", *story.join("cat", Role.ADMIN))
    before = list(story.messages)
    story.say("cat", *story.join("dan", Role.EDITOR), sees=before)
    story.say("cat", Profile("Cat"), sees=before, seq=0)  # another message at the same place
    story.say("dan", FeedAdmit(feed("more"), FeedKind.DATA, person("dan"), device("dan.d")), sees=story.messages[:3])
    assert claims(story) == {fid("dan"), fid("dan.data"), fid("more")}


def test_feeds_that_nobody_could_have_let_in_are_not_followed() -> None:
    story = Story()
    story.say("ann", *story.join("cat", Role.EDITOR))
    story.say("cat", FeedAdmit(feed("theirs"), FeedKind.DATA, person("zoe"), device("zoe.d")))
    story.writer("zoe")
    story.say("zoe", FeedAdmit(feed("zoe"), FeedKind.CONTROL, person("zoe"), device("zoe.d")))
    assert claims(story) == set()


def test_how_many_feeds_a_hostile_admin_has_followed_is_bounded() -> None:
    story = Story()
    story.say("ann", *story.join("cat", Role.ADMIN))
    for number in range(CLAIMS_PER_ISSUER_MAX + 20):
        story.say("cat", FeedAdmit(feed(f"f{number}"), FeedKind.DATA, person("nobody"), device("no")))
    assert len(story.machine().admission().void) == CLAIMS_PER_ISSUER_MAX


def test_who_let_many_in_before_has_others_followed_all_the_same() -> None:
    story = Story()
    story.say("ann", *story.join("cat", Role.ADMIN))
    for number in range(CLAIMS_PER_ISSUER_MAX):
        story.say("cat", *story.join(f"p{number}", Role.EDITOR))
    seen = list(story.messages)
    story.say("cat", *story.join("dan", Role.EDITOR))
    story.say("ann", remove("cat"), sees=seen)
    assert set(story.machine().admission().void) == {fid("dan"), fid("dan.data")}


def test_which_feeds_of_many_are_followed_does_not_depend_on_what_comes_first() -> None:
    story = Story()
    story.say("ann", *story.join("cat", Role.ADMIN))
    story.writer("second", identity="cat")
    story.say("cat", FeedAdmit(feed("second"), FeedKind.CONTROL, person("cat"), device("cat.d")))
    seen = list(story.messages)
    for name in ("cat", "second"):
        many = [feed(f"{name}{number}") for number in range(CLAIMS_PER_ISSUER_MAX - 50)]
        story.say(name, *(FeedAdmit(each, FeedKind.DATA, person("nobody"), device("no")) for each in many), sees=seen)
    assert len(claims(story)) == CLAIMS_PER_ISSUER_MAX


def test_who_was_let_in_at_the_same_time_had_nothing_to_say() -> None:
    """Whichever comes first: nobody could have taken its feeds for admitted."""
    story = Story()
    seen = list(story.messages)
    story.writer("zed")
    own = (person("zed"), device("zed.d"))
    story.say(
        "zed", FeedAdmit(feed("zed"), FeedKind.CONTROL, *own), FeedAdmit(feed("z"), FeedKind.DATA, *own), sees=seen
    )
    story.say("ann", MemberAdmit(person("zed"), Role.EDITOR, "zed"), sees=seen)
    assert claims(story) == set()
