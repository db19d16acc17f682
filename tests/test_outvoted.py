"""All end on the newest final epoch: who started from one that lost its number, and who can't make it (DESIGN 9)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Refused
from echostore.kernel.party.credentials import EpochAttest
from echostore.peer import base_following
from echostore.peer.base_following import outvoted
from echostore.peer.bootstrap import believable, bootstrap
from echostore.peer.epoch_agreement import Verdict
from echostore.peer.epochs import Epochs
from echostore.peer.parting import pinned_elsewhere
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.testing.inmemory import link
from echostore.wire.base_epoch import snapshot_blobs
from network_peers import cid, invited, peers, until
from test_epoch_agreement import TUSK, Circle, Counter, declare_a_lie
from test_stale_messages import blobs_of, control_from
from two_peers import sync


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Conspiracy:
    """B and E stand for a lie; a joiner whom B admits believes them, as the policy lets it. A, C and D know better."""

    def __init__(self, folder: Path) -> None:
        self.circle = Circle(folder, "abcde")
        founder = self.circle.party("a")
        self.item = founder.create("property-set", type="task", n=1)
        self.other = founder.create("property-set", type="task", n=2)
        self.circle.meet()
        for name in "acd":
            self.circle.apart(name)
        liar = self.circle.party("b")
        self.hidden = liar.create("property-set", type="hidden")
        declare_a_lie(liar, lambda states: states[bytes(self.item.id)].MergeFrom(TUSK))
        self.circle.meet()
        epoch = Epochs(self.circle.party("e")).get(1)
        self.circle.party("e").members.issue_claim(EpochAttest(1, epoch.hash, epoch.genesis.snapshot))
        self.circle.meet()
        self.joiner = echostore.open(folder / "z", name="z", background=False, now_ms=lambda: self.circle.now_ms)
        self.party = self.joiner.enter(liar.members.admit(self.joiner.request_join(self.circle.key), role="editor"))
        control_from(liar, self.party)
        self.start(liar)

    def start(self, giver: Party) -> None:
        epoch = pinned_elsewhere(self.party.runtime) or believable(self.party.runtime)
        assert epoch is not None
        bootstrap(self.party, epoch, blobs_of(giver, self.party))

    @property
    def parties(self) -> list[Party]:
        return [*(self.circle.party(name) for name in "abcde"), self.party]

    def agree(self, epochs: int) -> None:
        """The others make epochs of their own, which become final."""
        self.circle.together()
        founder = self.circle.party("a")
        for number in range(epochs):
            for _ in range(2):
                sync(*self.parties)
                self.circle.review()
            self.other["n"] = 100 + number
            Epochs(founder).create()
        for _ in range(2):
            sync(*self.parties)
            self.circle.review()
        sync(*self.parties)
        assert Epochs(founder).tally.latest_final is not None

    def close(self) -> None:
        self.joiner.close()
        self.circle.close()


@pytest.fixture
def conspiracy(tmp_path: Path) -> Iterator[Conspiracy]:
    made = Conspiracy(tmp_path)
    yield made
    made.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if who stands on an epoch heard of its rival and of the votes for that in one breath."""
    monkeypatch.setattr(base_following, "unfounded", lambda runtime: False)


@pytest.mark.usefixtures("at_once")
def test_the_newest_final_epoch_takes_the_place_of_a_lie(conspiracy: Conspiracy) -> None:
    party, founder = conspiracy.party, conspiracy.circle.party("a")
    assert party.get(conspiracy.item.id).type != "task", "it believed two members"
    mine: Any = party.create("property-set", type="mine", n=1)
    conspiracy.agree(3)
    assert outvoted(party.runtime)
    assert party.runtime.processor.base.name.number == 1, "nothing is adopted on top of it"
    conspiracy.start(founder)
    assert not outvoted(party.runtime)
    sync(*conspiracy.parties)
    assert party.get(conspiracy.item.id).type == "task"
    assert founder.get(mine.id)["n"] == 1, "what it wrote itself stays"
    assert party.has(conspiracy.hidden.id), "and so do true messages that only the liar had had"
    assert len({cid(each) for each in conspiracy.parties}) == 1
    party.get(conspiracy.other.id)["n"] = 7
    sync(*conspiracy.parties)
    assert len({cid(each) for each in conspiracy.parties}) == 1


@pytest.mark.usefixtures("at_once")
def test_feeds_go_back_to_the_cut_of_the_epoch_that_won(conspiracy: Conspiracy) -> None:
    """The lie held more of a feed than the epoch that took its number: those blocks are asked for again."""
    circle, party = conspiracy.circle, conspiracy.party
    liar = circle.party("b").runtime.data.cursor.key
    begun = party.runtime.feeds.feed(liar).base
    honest = [circle.party(name) for name in "acd"]
    Epochs(honest[0]).create()
    for _ in range(2):
        sync(*honest)
        for each in honest[1:]:
            Epochs(each).review()
    sync(*honest)
    latest = Epochs(honest[0]).tally.latest_final
    assert latest is not None
    assert all(entry.feed != liar for entry in latest.genesis.timeframe), "it had not heard of what the lie holds"
    sync(*conspiracy.parties)
    assert outvoted(party.runtime)
    conspiracy.start(honest[0])
    assert party.runtime.feeds.feed(liar).base == 0 < begun
    sync(*conspiracy.parties)
    assert party.has(conspiracy.hidden.id)
    assert len({cid(each) for each in conspiracy.parties}) == 1


class Removed:
    """C lets a joiner in, who starts from an epoch of C and D; A has removed D before it heard of that."""

    def __init__(self, folder: Path, *, wrote: bool = True, declarer: str = "d") -> None:
        self.circle = circle = Circle(folder, "abcd")
        self.folder = folder
        self.item = circle.party("a").create("property-set", type="task", n=1)
        circle.meet()
        for name in "ab":
            circle.apart(name)
        self.late = circle.party("d").create("property-set", type="task", n=9) if wrote else None
        circle.meet()
        Epochs(circle.party(declarer)).create()
        circle.meet()
        Epochs(circle.party("c" if declarer == "d" else "d")).review()
        circle.meet()
        self.joiner = self.opened()
        self.party = self.joiner.enter(
            circle.party("c").members.admit(self.joiner.request_join(circle.key), role="editor")
        )
        control_from(circle.party("c"), self.party)
        epoch = believable(self.party.runtime)
        assert epoch is not None
        assert not epoch.final
        bootstrap(self.party, epoch, blobs_of(circle.party("c"), self.party))
        circle.party("a").members.remove(circle.peers["d"].identity)
        circle.together()
        self.parties = [*(circle.party(name) for name in "abc"), self.party]

    def opened(self) -> Peer:
        return echostore.open(self.folder / "z", name="z", background=False, now_ms=lambda: self.circle.now_ms)

    def close(self) -> None:
        self.joiner.close()
        self.circle.close()


@pytest.mark.parametrize(
    ("wrote", "declarer"),
    [(True, "d"), (False, "d"), (True, "c")],
    ids=["both", "the chain has left it", "blocks inside count otherwise"],
)
def test_who_began_from_an_epoch_that_a_removal_voids_takes_the_history(
    tmp_path: Path, wrote: bool, declarer: str
) -> None:
    story = Removed(tmp_path, wrote=wrote, declarer=declarer)
    party, others = story.party, story.parties
    mine = party.create("property-set", type="mine", n=1)
    handle = party.get(story.item.id)
    heard: list[Any] = []
    party.query(type="task").subscribe(heard.append)
    assert party.query(type="task").count() == 1 + wrote
    sync(*others)
    assert party.runtime.processor.base is None
    sync(*others)
    assert Epochs(party).tally.latest_final is None
    assert story.late is None or not party.has(story.late.id)
    assert handle["n"] == 1, "the handle is the same"
    assert {item.id for item in party.query(type="task")} == {story.item.id}
    assert heard or not wrote, "live queries hear of what went"
    assert all(each.get(mine.id)["n"] == 1 for each in others)
    assert len({cid(each) for each in others}) == 1
    handle["n"] = 5
    sync(*others)
    if declarer == "d":
        Epochs(others[0]).create()
        sync(*others)
        found = {judged.verdict for judged in Epochs(party).review()}
        assert found == {Verdict.ATTESTED}, "it can judge, and is counted on"
    assert len({cid(each) for each in others}) == 1
    story.joiner.close()
    story.joiner = story.opened()
    assert cid(story.joiner.party(story.circle.key)) == cid(others[0])
    story.close()


def test_what_was_written_waits_for_the_history_that_it_rests_on(tmp_path: Path) -> None:
    story = Removed(tmp_path)
    party = story.party
    party.create("property-set", type="mine", n=1)
    party.flush()
    control_from(story.circle.party("a"), party)
    assert party.runtime.processor.base is None
    with pytest.raises(Refused, match="rests on messages that are not here"):
        party.create("property-set", type="mine", n=2)
    sync(*story.parties)
    party.create("property-set", type="mine", n=2)
    sync(*story.parties)
    assert len({cid(each) for each in story.parties}) == 1
    story.close()


def test_gc_keeps_what_the_party_stands_on_though_the_chain_has_left_it(tmp_path: Path, at_once: None) -> None:
    story = Removed(tmp_path)
    sync(*story.parties)
    base = story.party.runtime.processor.base
    assert base is not None
    assert Epochs(story.party).tally.accepted(1) is None
    Epochs(story.party).gc()
    blobs = story.party.runtime.blobs
    assert blobs is not None
    assert blobs.missing([base.name.snapshot, base.name.cut, *snapshot_blobs(base.root, blobs.get)]) == []
    story.joiner.close()
    story.joiner = story.opened()
    assert story.joiner.party(story.circle.key).get(story.item.id)["n"] == 1, "it can be opened"
    story.close()


def test_a_running_connection_asks_again_for_what_is_held_no_more(tmp_path: Path) -> None:
    story = Removed(tmp_path)
    joined = link(story.joiner, story.circle.peers["c"], story.circle.key)
    joined.pump()
    sync(story.circle.party("a"), story.circle.party("c"))
    joined.pump()
    assert story.party.runtime.processor.base is None
    assert cid(story.party) == cid(story.circle.party("c")), "over the connection that stood all the while"
    joined.cut()
    story.close()


def test_a_newcomer_prefers_a_final_epoch_to_a_newer_one(tmp_path: Path) -> None:
    """The newer one may still lose, and those who have the history stand on the final one."""
    circle = Circle(tmp_path, "abc")
    founder = circle.party("a")
    item = founder.create("property-set", n=1)
    circle.meet()
    Epochs(founder).create()
    circle.meet()
    circle.review()
    item["n"] = 2
    circle.meet()
    for name in "b":
        circle.apart(name)
    circle.now_ms += 60_000
    Epochs(founder).create(discard_before_ms=circle.now_ms - 1000)
    circle.meet()
    with echostore.open(tmp_path / "z", name="z", background=False, now_ms=lambda: circle.now_ms) as joiner:
        party = joiner.enter(founder.members.admit(joiner.request_join(circle.key), role="editor"))
        control_from(founder, party)
        assert len(party.runtime.processor.membership.machine.epoch_tally().chain) == 2
        epoch = believable(party.runtime)
        assert epoch is not None
        assert (epoch.number, epoch.final) == (1, True)
    circle.close()


def test_an_epoch_that_left_something_out_is_believed_once_it_is_final(tmp_path: Path) -> None:
    circle = Circle(tmp_path, "ab")
    founder = circle.party("a")
    founder.create("property-set", n=1)
    founder.members.set_policy({"epoch.join_attests": b"0"})
    circle.meet()
    circle.apart("b")
    circle.now_ms += 60_000
    Epochs(founder).create(discard_before_ms=circle.now_ms - 1000)
    with echostore.open(tmp_path / "z", name="z", background=False, now_ms=lambda: circle.now_ms) as joiner:
        party = joiner.enter(founder.members.admit(joiner.request_join(circle.key), role="editor"))
        control_from(founder, party)
        assert believable(party.runtime) is None
        circle.together()
        circle.review()
        control_from(founder, party)
        found = believable(party.runtime)
        assert found is not None
        assert found.final
    circle.close()


def test_who_lacks_a_model_stands_on_final_epochs_all_the_same(tmp_path: Path) -> None:
    """It can't make the snapshot, so it fetches it: what the epoch left out goes here too, and gc has something to go by."""
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        for knows in (ann, bob):
            knows.models.register(Counter)
        party = ann.create_party("Trip")
        invited(ann, party, bob, role="admin")
        invitation = party.invite("editor")
        lacking = cat.join(invitation.ticket, invitation.passcode)
        party.create("counter").apply(3)
        task = party.create("property-set", type="task", n=1)
        party.flush()
        until(lambda: lacking.has(task.id))
        for number in (1, 2):
            task["n"] = 10 + number
            Epochs(party).create()
            until(partial(_stands_on, party, number))
            until(partial(_stands_on, lacking, number))
        assert [view.here for view in Epochs(lacking).all()] == ["abstains: unknown here: counter@1"] * 2
        until(lambda: lacking.get(task.id)["n"] == 12)
        assert Epochs(lacking).gc(dry_run=True).epoch == 1


def _stands_on(party: Party, number: int) -> bool:
    base = party.runtime.processor.base
    return base is not None and base.name.number == number
