"""All end on the newest final epoch: who started from one that lost its number, and who can't make it (DESIGN 9)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.party.credentials import EpochAttest
from echostore.peer.base_following import outvoted
from echostore.peer.bootstrap import believable, bootstrap
from echostore.peer.epochs import Epochs
from echostore.peer.parting import pinned_elsewhere
from echostore.peer.party import Party
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
