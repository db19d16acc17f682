"""What epochs leave out: deleted items and old posts, the same on every peer, and only what everybody has seen."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Compacted, NotFound, UsageError
from echostore.kernel.ids import FeedId, Stamp
from echostore.kernel.models.base import Horizon
from echostore.kernel.models.threaded_log import Post, Retention, Retract, ThreadedLog, post_id
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.retiring import rebase_retired, retire_silent
from network_peers import cid, until
from peer_builder import Circle, reasons
from test_stale_messages import agreed_epoch, started
from two_peers import open_quiet, sync

FEED = FeedId(b"feed-one")
OTHER = FeedId(b"feed-two")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat") as made:
        yield made


def log(*posts: tuple[int, int], retention: Retention | None = None) -> ThreadedLog:
    """A log with posts at (seq, time)."""
    made = ThreadedLog(b"i" * 16)  # type: ignore[arg-type]  # an ItemId
    for seq, time_ms in posts:
        made.apply(Post(f"p{seq}"), Stamp(seq + 1, FEED, seq, 0), time_ms)
    if retention is not None:
        made.apply(retention, Stamp(1, OTHER, 0, 0), 0)
    return made


def left(made: ThreadedLog) -> list[int]:
    return [entry.stamp.seq for entry in made.entries()]


SEEN = {FEED: 100, OTHER: 100}


def test_a_log_loses_posts_by_age_and_by_count() -> None:
    posts = [(seq, 10 * seq) for seq in range(6)]
    assert not log(*posts).discard(Horizon(1000, SEEN)), "without a retention nothing goes"
    aged = log(*posts, retention=Retention(age_ms_max=20))
    assert aged.discard(Horizon(50, SEEN))
    assert left(aged) == [3, 4, 5], "older than 20 before 50"
    counted = log(*posts, retention=Retention(count_max=2))
    assert counted.discard(Horizon(1000, SEEN))
    assert left(counted) == [4, 5]
    recent = log(*posts, retention=Retention(count_max=2))
    assert recent.discard(Horizon(20, SEEN))
    assert left(recent) == [2, 3, 4, 5], "what is not before the time stays, however many there are"


def test_a_log_keeps_what_is_not_stable() -> None:
    posts = [(seq, 10 * seq) for seq in range(4)]
    made = log(*posts, retention=Retention(age_ms_max=1))
    assert not made.discard(Horizon(1000, {FEED: 100})), "the retention itself is not stable"
    assert made.discard(Horizon(1000, {FEED: 1, OTHER: 0}))
    assert left(made) == [2, 3]
    touched = log(*posts, retention=Retention(age_ms_max=1))
    touched.apply(Retract(post_id(Stamp(1, FEED, 0, 0))), Stamp(9, FEED, 8, 0), 0)
    assert touched.discard(Horizon(1000, {FEED: 5, OTHER: 0}))
    assert left(touched) == [0], "its retraction is not stable"


def seen_by_all(circle: Circle) -> None:
    """Everybody writes after having seen everything: so all of that is stable."""
    circle.meet_all()
    for name in circle.names:
        circle.party(name).system_item["seen by " + name] = circle.party(name).runtime.now_ms()
    circle.meet_all()


def later(party: Party) -> int:
    """A time after everything that was written so far."""
    written = party.runtime.now_ms()
    return until(lambda: now if (now := party.runtime.now_ms()) > written else 0)


def discarded(circle: Circle, *names: str) -> int:
    """An epoch that leaves out all that may go, on which these stand."""
    parties = [circle.party(name) for name in names]
    number = Epochs(parties[0]).create(discard_before_ms=later(parties[0])).number
    for _ in range(2):
        sync(*parties)
        for party in parties[1:]:
            assert all(judged.verdict != "disputed" for judged in Epochs(party).review())
    sync(*parties)
    for party in parties:
        base = party.runtime.processor.base
        assert base is not None
        assert base.name.number == number
    return number


def stories(party: Party) -> tuple[Any, Any, Any, Any]:
    gone, kept = party.create("property-set", type="a", n=1), party.create("property-set", type="b", n=2)
    child = party.create("text", parent=gone)
    child.insert(0, "below")
    posts = party.create("threaded-log")
    posts.post("old")
    posts.set_retention(count_max=1)
    posts.post("new")
    gone.delete()
    party.flush()
    return gone, kept, child, posts


def test_deleted_items_and_old_posts_go_on_every_peer(circle: Circle) -> None:
    gone, kept, child, posts = stories(circle.party("ann"))
    seen_by_all(circle)
    before = cid(circle.party("ann"))
    discarded(circle, *circle.names)
    for name in circle.names:
        party = circle.party(name)
        assert not party.has(gone.id)
        assert not party.has(child.id), "what hangs below goes with it"
        assert party.get(kept.id)["n"] == 2
        assert [post["body"] for post in party.get(posts.id).value()] == ["new"]
    assert circle.agree() != before
    circle.agree_after_loss()


def test_a_newcomer_has_the_same_state_as_who_discarded(circle: Circle) -> None:
    stories(circle.party("ann"))
    seen_by_all(circle)
    discarded(circle, *circle.names)
    ann = circle.party("ann")
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        theirs.create("property-set", type="tail")
        sync(ann, theirs, circle.party("bob"), circle.party("cat"))
        assert cid(theirs) == cid(ann)
        assert circle.agree() == cid(theirs)


def test_nothing_goes_that_somebody_has_not_seen(circle: Circle) -> None:
    gone, _, _, posts = stories(circle.party("ann"))
    circle.meet_all()
    for name in ("ann", "bob"):
        circle.party(name).system_item[name] = 1
    circle.meet_all()  # cat has all of it and has not written since: its next message might be older than the deletion
    discarded(circle, *circle.names)
    assert circle.party("bob").has(gone.id)
    assert len(circle.party("bob").get(posts.id).value()) == 2
    circle.party("cat").system_item["cat"] = 1
    circle.meet_all()
    discarded(circle, *circle.names)
    assert not circle.party("bob").has(gone.id)
    circle.agree()


def test_a_write_on_discarded_ground_is_quarantined_with_that_reason(circle: Circle) -> None:
    gone, _, _, _ = stories(circle.party("ann"))
    seen_by_all(circle)
    circle.party("cat").get(gone.id).restore()
    discarded(circle, "ann", "bob")
    circle.meet_all()
    for name in ("ann", "bob"):
        assert reasons(circle.party(name)) == ["discarded"]
        assert not circle.party(name).has(gone.id)


def test_the_past_before_a_discard_follows_the_earlier_snapshot(circle: Circle) -> None:
    ann = circle.party("ann")
    gone, _, _, _ = stories(ann)
    seen_by_all(circle)
    agreed_epoch(circle, *circle.names)
    ann.create("property-set")
    seen_by_all(circle)
    discarded(circle, *circle.names)
    assert not ann.has(gone.id)
    assert ann.as_of(1).has(gone.id)
    assert not ann.as_of(2).has(gone.id)
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        with pytest.raises(Compacted):
            theirs.as_of(1)
        assert not theirs.as_of(2).has(gone.id)


def test_an_epoch_never_discards_the_future(circle: Circle) -> None:
    ann = circle.party("ann")
    with pytest.raises(UsageError):
        Epochs(ann).create(discard_before_ms=later(ann) + 60_000)
    with pytest.raises(NotFound):
        Epochs(ann).get(1)


def test_the_command_line_discards_what_is_older(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    gone = cli("item", "create", "property-set", "title=Tickets", "--json").ok().json()["item"]
    cli("item", "delete", gone, "--yes").ok()
    assert cli("epoch", "create", "--discard-before", "epoch:1").status == 3
    cli("epoch", "create", "--discard-before", "1h").ok()
    cli("item", "get", gone).ok()
    cli("epoch", "create", "--discard-before", "now", "--yes").ok()
    assert cli("item", "get", gone).status != 0


def test_the_policy_discards_what_is_old_in_epochs_that_nobody_asked_for(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", now_ms=clock) as circle:
        ann, bob = circle.party("ann"), circle.party("bob")
        ann.members.set_policy({"epoch.messages": b"1", "epoch.discard_age_s": b"36000"})
        gone, recent = ann.create("property-set", n=1), ann.create("property-set", n=2)
        gone.delete()

        def declared() -> int:
            """The keeper makes an epoch; when it discards from."""
            seen_by_all(circle)
            (kept,) = circle.peers["ann"].epoch_keeper.tick()
            assert kept.declared is not None
            circle.meet_all()
            assert [judged.verdict for judged in Epochs(bob).review()] == ["attested"]
            circle.meet_all()
            assert Epochs(ann).chain()[-1].final
            return Epochs(ann).chain()[-1].genesis.discard_before_ms

        first = declared()
        assert clock.now - 36_000_000 - 1000 < first < clock.now - 36_000_000 + 1000
        assert ann.has(gone.id)
        clock.hours(11)
        recent.delete()
        assert declared() > first + 10 * 3_600_000
        for party in (ann, bob):
            assert not party.has(gone.id), "deleted eleven hours ago"
            assert party.has(recent.id), "deleted just now"
        last = Epochs(ann).chain()[-1].genesis.discard_before_ms
        ann.members.set_policy({"epoch.discard_age_s": b"72000"})
        assert declared() == last, "never before its predecessor's"
        ann.members.set_policy({"epoch.discard_age_s": b"0"})
        clock.hours(20)
        assert declared() == last, "nothing more is left out"
        circle.agree()


def test_the_command_line_sets_after_how_long_epochs_discard(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    assert cli("party", "policy", "--json").ok().json()["discard_after_s"] == 0
    assert "is kept" in cli("party", "policy").ok().out
    told = cli("party", "policy", "--discard-after", "30d").ok().out
    assert "is left out after 30d" in told
    gone = cli("item", "create", "property-set", "title=Tickets", "--json").ok().json()["item"]
    cli("item", "delete", gone, "--yes").ok()
    cli("epoch", "create").ok()
    age = datetime.now(UTC) - datetime.fromisoformat(cli("epoch", "show", "1", "--json").ok().json()["discard_before"])
    assert 30 <= age.days < 31
    cli("item", "get", gone).ok()
    assert cli("party", "policy", "--discard-after", "soon").status == 2
    assert cli("party", "policy", "--discard-after", "1s", "--json").ok().json()["discard_after_s"] == 1
    until(lambda: cli("epoch", "create").status == 0 and cli("item", "get", gone).status != 0)
    assert cli("party", "policy", "--discard-after", "none", "--json").ok().json()["discard_after_s"] == 0


# silent feeds


def test_a_silent_feed_is_retired_and_no_longer_holds_things_up(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", "cat", now_ms=clock) as circle:
        ann = circle.party("ann")
        gone = ann.create("property-set", n=1)
        kept = ann.create("property-set", n=2)
        circle.meet_all()
        cat = circle.party("cat")
        clock.hours(30)
        gone.delete()
        ann.members.set_policy({"epoch.silence_s": b"86400"})
        for name in ("ann", "bob"):
            circle.party(name).system_item[name] = 1
            sync(ann, circle.party("bob"))
        ann.system_item["again"] = 1
        sync(ann, circle.party("bob"))
        circle.party("bob").system_item["again"] = 2
        sync(ann, circle.party("bob"))
        clock.hours(1)
        discarded(circle, "ann", "bob")
        assert not ann.has(gone.id)
        # Cat wrote meanwhile, and comes back.
        cat.get(kept.id)["from_cat"] = 5
        note = cat.create("property-set", type="note", about=cat.reference_to(cat.get(kept.id)))
        cat.create("property-set", type="below", parent=note)
        cat.get(gone.id)["lost"] = True
        circle.meet_all()
        assert set(reasons(ann)) == {"retired"}
        Epochs(cat).review()
        assert not cat.has(gone.id)
        rebased = rebase_retired(cat)
        assert rebased is not None
        assert (rebased.operations, rebased.left) == (4, 1), "the write on discarded ground stays behind"
        assert rebase_retired(cat) is None
        circle.meet_all()
        assert ann.get(kept.id)["from_cat"] == 5
        (below,) = ann.query(type="below").all()
        assert below.parent.type == "note"
        assert below.parent["about"].item == kept.id
        assert len({cid(circle.party(name)) for name in circle.names}) == 1
        assert circle.restart("cat").create("property-set", type="more") is not None
        circle.meet_all()
        assert ann.query(type="more").count() == 1


@pytest.mark.parametrize("how", ["write", "batch", "text", "keeper"])
def test_a_running_device_whose_feed_was_retired_goes_on_by_itself(tmp_path: Path, how: str) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", "cat", now_ms=clock) as circle:
        ann, cat = circle.party("ann"), circle.party("cat")
        kept = ann.create("property-set", n=2)
        text = ann.create("text")
        circle.meet_all()
        clock.hours(30)
        cat.get(kept.id)["unseen"] = 1
        cat.flush()
        ann.members.set_policy({"epoch.silence_s": b"86400"})
        ann.members.retire_feed(cat.runtime.data.cursor.key)
        circle.meet_all()
        assert "unseen" not in ann.get(kept.id)
        if how == "write":
            cat.get(kept.id)["more"] = 2
        elif how == "batch":
            with cat.batch():
                cat.create("property-set", type="note")
                cat.get(kept.id)["more"] = 2
        elif how == "text":
            cat.get(text.id).insert(0, "hello")
        else:
            circle.peers["cat"].epoch_keeper.tick()
        circle.meet_all()
        assert ann.get(kept.id)["unseen"] == 1
        assert ann.get(kept.id).get("more") == (2 if how in ("write", "batch") else None)
        assert str(ann.get(text.id)) == ("hello" if how == "text" else "")
        assert len({cid(circle.party(name)) for name in circle.names}) == 1


def test_text_and_lists_of_a_retired_feed_are_written_again(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", "cat", now_ms=clock) as circle:
        ann = circle.party("ann")
        text, tasks = ann.create("text"), ann.create("growable-array")
        text.insert(0, "one three")
        tasks.append("first")
        circle.meet_all()
        cat = circle.party("cat")
        clock.hours(30)
        ann.members.set_policy({"epoch.silence_s": b"86400"})
        text.insert(9, " four")
        sync(ann, circle.party("bob"))
        assert len(retire_silent(ann)) >= 1
        # Cat wrote meanwhile, and comes back.
        cat.get(text.id).insert(4, "two ")
        cat.flush()
        cat.get(text.id).delete(0, 1)
        note = cat.create("property-set", type="note")
        mine = cat.create("text", parent=note)
        mine.insert(0, "mine alxne")
        cat.flush()
        mine.delete(7, 1)
        mine.insert(7, "o")
        cat.get(tasks.id).append(cat.reference_to(note))
        cat.get(tasks.id).insert(0, "zero")
        cat.flush()
        circle.meet_all()
        assert str(ann.get(text.id)) == "one three four"
        cat.runtime.reissues._generations[text.id] = 3
        rebased = rebase_retired(cat)
        assert cat.runtime.reissues.generation(cat.get(text.id)._record()) == 0, "the new feed begins anew"
        assert rebased is not None
        assert rebased.left == 0
        circle.meet_all()
        (there,) = ann.query(type="note").all()
        assert str(ann.get(text.id)) == "ne two three four", "what was deleted on the old feed is deleted again"
        assert [str(below) for below in ann.query(parent=there.id).all()] == ["mine alone"]
        assert list(ann.get(tasks.id))[:2] == ["zero", "first"]
        assert list(ann.get(tasks.id))[2].id == there.id, "a reference leads to the item as it is now"
        assert len({cid(circle.party(name)) for name in circle.names}) == 1
        assert rebase_retired(cat) is None
        again = circle.restart("cat")
        assert str(again.get(text.id)) == "ne two three four", "once"
        circle.meet_all()
        assert str(circle.party("ann").get(text.id)) == "ne two three four"


def test_a_feed_of_a_child_party_is_retired_and_written_again(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "cat", now_ms=clock) as circle:
        ann, cat = circle.party("ann"), circle.party("cat")
        game = circle.peers["ann"].create_child(ann, "Chess")
        circle.meet_all()
        theirs = circle.peers["cat"].enter_child(cat, game.key)
        board = game.create("property-set", type="board", turn="white")
        circle.meet_all()
        sync(game, theirs)
        clock.hours(30)
        ann.members.set_policy({"epoch.silence_s": b"86400"})
        (retired,) = retire_silent(game)
        assert theirs.runtime.data is not None
        assert retired == theirs.runtime.data.cursor.key
        theirs.get(board.id)["turn"] = "black"
        circle.meet_all()
        sync(game, theirs)
        assert game.get(board.id)["turn"] == "white"
        assert set(reasons(game)) == {"retired"}
        rebased = rebase_retired(theirs)
        assert rebased is not None
        assert (rebased.operations, rebased.left) == (1, 0)
        circle.meet_all()
        sync(game, theirs)
        assert game.get(board.id)["turn"] == "black"
        assert cid(game) == cid(theirs)
        assert rebase_retired(theirs) is None
        cat.create("property-set", type="still")
        circle.meet_all()
        assert ann.query(type="still").count() == 1, "its feed in the parent goes on"


def test_nobody_but_an_admin_retires_and_only_by_policy(circle: Circle) -> None:
    assert retire_silent(circle.party("ann")) == []
    circle.party("ann").members.set_policy({"epoch.silence_s": b"1"})
    circle.meet_all()
    assert retire_silent(circle.party("bob")) == []


SILENCE = {"epoch.silence_s": b"36000"}
"""Ten hours."""


def test_a_device_that_has_not_written_yet_is_silent_since_it_joined(tmp_path: Path) -> None:
    clock = Clock()
    with (
        Circle(tmp_path, "ann", now_ms=clock) as circle,
        echostore.open(tmp_path / "dan", name="dan", background=False, now_ms=clock) as dan,
    ):
        ann = circle.party("ann")
        ann.members.set_policy(SILENCE)
        clock.hours(50)
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key), role="editor"))
        sync(ann, theirs)
        assert theirs.runtime.data is not None
        assert theirs.runtime.data.cursor.length == 0
        clock.hours(9)
        assert retire_silent(ann) == []
        clock.hours(2)
        assert retire_silent(ann) == [theirs.runtime.data.cursor.key]


def test_a_control_message_is_a_sign_of_life(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", "cat", now_ms=clock) as circle:
        ann, bob, cat = (circle.party(name) for name in circle.names)
        ann.members.set_policy(SILENCE)
        circle.meet_all()
        for party in (bob, cat):
            party.system_item["here"] = 1
        circle.meet_all()
        clock.hours(9)
        ann.system_item["alive"] = 1
        Epochs(ann).create()
        circle.meet_all()
        assert [judged.verdict for judged in Epochs(bob).review()] == ["attested"]
        circle.meet_all()
        clock.hours(2)
        assert cat.runtime.data is not None
        assert retire_silent(ann) == [cat.runtime.data.cursor.key], "bob has attested"


def test_a_feed_that_begins_at_its_end_was_written_before_the_first_epoch_that_has_it(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", "cat", now_ms=clock) as circle:
        ann, bob, cat = (circle.party(name) for name in circle.names)
        ann.members.set_policy(SILENCE)
        circle.meet_all()

        def epoch() -> None:
            for party in (ann, cat):
                party.system_item["at"] = clock()
            agreed_epoch(circle, "ann", "cat")
            Epochs(ann).gc()

        clock.hours(20)
        bob.system_item["here"] = 1
        cat.system_item["here"] = 1
        circle.meet_all()
        clock.hours(1)
        epoch()
        epoch()
        assert bob.runtime.data is not None
        feed = bob.runtime.data.cursor.key
        held = ann.runtime.feeds.feed(feed)
        assert held.base == held.length > 0, "all that bob wrote is gone here"
        assert retire_silent(ann) == []
        for _ in range(3):
            clock.hours(2)
            epoch()
            assert retire_silent(ann) == []
        clock.hours(4)
        assert retire_silent(circle.restart("ann")) == [feed], "epochs that come later do not put it off"


def test_who_started_from_an_epoch_retires_nobody_who_wrote_shortly_before(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", now_ms=clock) as circle:
        ann, bob = circle.party("ann"), circle.party("bob")
        ann.members.set_policy(SILENCE)
        clock.hours(20)
        circle.meet_all()
        bob.system_item["here"] = 1
        ann.system_item["here"] = 1
        circle.meet_all()
        agreed_epoch(circle, "ann", "bob")
        ann.system_item["here"] = 2
        clock.hours(5)
        with echostore.open(tmp_path / "dan", name="dan", background=False, now_ms=clock) as dan:
            theirs = dan.enter(ann.members.admit(dan.request_join(circle.key), role="admin"))
            started(ann, theirs)
            assert bob.runtime.data is not None
            held = theirs.runtime.feeds.feed(bob.runtime.data.cursor.key)
            assert held.base == held.length > 0
            assert retire_silent(theirs) == []
            clock.hours(6)
            assert retire_silent(theirs) == [bob.runtime.data.cursor.key]


def test_two_who_are_active_make_epochs_final_while_three_are_silent(tmp_path: Path) -> None:
    clock = Clock()
    with Circle(tmp_path, "ann", "bob", "cat", "dan", "eve", now_ms=clock) as circle:
        ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
        ann.members.set_policy(SILENCE)
        kept = ann.create("property-set", n=1)
        circle.meet_all()

        def epoch(*parties: Party) -> tuple[int, bool]:
            for party in parties:
                party.get(kept.id)["n"] = clock()
                sync(*parties)
            made = Epochs(ann).create()
            for _ in range(2):
                sync(*parties)
                for party in parties[1:]:
                    Epochs(party).review()
            (view,) = (view for view in Epochs(ann).all() if view.number == made.number)
            return view.electorate, view.final

        assert epoch(ann, bob) == (5, False)
        clock.hours(8)
        for party in (ann, bob):
            party.get(kept.id)["n"] = 2
        sync(ann, bob)
        clock.hours(3)
        assert epoch(ann, bob) == (2, True)
        assert Epochs(ann).all()[0].final, "and with it what lies below"
        circle.meet_all()
        assert {epoch.electorate for epoch in Epochs(cat).chain()[1:]} == {
            frozenset(epoch.electorate) for epoch in Epochs(ann).chain()[1:]
        }
        circle.peers["cat"].epoch_keeper.tick()  # goes on with a new feed
        circle.meet_all()
        assert epoch(ann, bob, cat) == (3, True)
        assert Epochs(ann).chain()[-1].attested_by >= {circle.peers["cat"].opener.identity_in(cat)}
        circle.agree()


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now

    def hours(self, count: int) -> None:
        self.now += count * 3_600_000


# Who has no say in an epoch goes on from it all the same.


def agree_on_all(*parties: Party) -> None:
    for _ in range(4):
        sync(*parties)
        for party in parties:
            assert all(judged.verdict != "disputed" for judged in Epochs(party).review())
    sync(*parties)


def test_who_was_admitted_beside_an_epoch_stands_on_it_too(circle: Circle) -> None:
    """The declarer had not heard of it, so it is asked for nothing; it disputes no later epoch either."""
    ann, bob = circle.party("ann"), circle.party("bob")
    ann.members.change_role(circle.peers["bob"].identity, "admin")
    stories(ann)
    seen_by_all(circle)
    discarded(circle, *circle.names)
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        bob.create("property-set").delete()
        Epochs(bob).create(discard_before_ms=later(bob))
        parties = (ann, bob, circle.party("cat"), theirs)
        agree_on_all(*parties)
        assert {party.runtime.processor.base.name.number for party in parties} == {2}  # type: ignore[union-attr]  # all do
        assert len({cid(party) for party in parties}) == 1
        ann.create("property-set")
        Epochs(ann).create(discard_before_ms=later(ann))
        agree_on_all(*parties)
        assert {party.runtime.processor.base.name.number for party in parties} == {3}  # type: ignore[union-attr]  # as above
        assert len({cid(party) for party in parties}) == 1


def test_of_two_declarers_at_once_the_one_who_lost_stands_on_the_other_epoch(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat", "dan", roles=dict.fromkeys(("bob", "cat", "dan"), "admin")) as circle:
        parties = [circle.party(name) for name in circle.names]
        stories(parties[0])
        seen_by_all(circle)
        parties[1].create("property-set").delete()
        for party in parties[:2]:
            Epochs(party).create(discard_before_ms=later(party))
        agree_on_all(*parties)
        bases = {party.runtime.processor.base.name.genesis for party in parties}  # type: ignore[union-attr]  # as above
        assert len(bases) == 1
        assert len({cid(party) for party in parties}) == 1


def test_who_slept_through_two_epochs_disputes_neither(circle: Circle) -> None:
    """The second one is folded from the first, which counts, though this peer stood on neither when it heard of them."""
    ann, bob, cat = (circle.party(name) for name in circle.names)
    for number in range(3):
        stories(ann)
        seen_by_all(circle) if number < 2 else sync(ann, bob)
        if number:
            Epochs(ann).create(discard_before_ms=later(ann))
            agree_on_all(ann, bob)
        else:
            discarded(circle, *circle.names)
    agree_on_all(ann, bob, cat)
    assert {party.runtime.processor.base.name.number for party in (ann, bob, cat)} == {3}  # type: ignore[union-attr]  # as above
    assert len({cid(party) for party in (ann, bob, cat)}) == 1


def test_an_epoch_by_who_did_not_stand_on_the_one_before_is_disputed_by_nobody(circle: Circle) -> None:
    """It was worked out from where its declarer stood, which others have left."""
    ann, bob, cat = (circle.party(name) for name in circle.names)
    ann.members.change_role(circle.peers["bob"].identity, "admin")
    for number in range(2):
        stories(ann)
        seen_by_all(circle)
        Epochs(ann).create(discard_before_ms=later(ann))
        agree_on_all(ann, cat)
        sync(ann, bob, cat)
        bob.create("property-set", n=number)
        Epochs(bob).create(discard_before_ms=later(bob))
        agree_on_all(ann, bob, cat)
        bases = {party.runtime.processor.base.name.number for party in (ann, bob, cat)}  # type: ignore[union-attr]  # as above
        assert bases == {2 * number + 2}
        assert len({cid(party) for party in (ann, bob, cat)}) == 1
