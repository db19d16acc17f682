"""Whom a newcomer believes, over the network: an epoch with enough independent attests or a final one, else the history."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echostore.peer.bootstrap import Outcome
from echostore.peer.epochs import Epochs, EpochView
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from network_peers import address, cid, invited, peers, until
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Declared:
    """Ann has declared an epoch. Some members hold the history and are off line; the others never came on line."""

    def __init__(self, folder: Path, ann: Peer, holders: tuple[str, ...], members: int, **policy: bytes) -> None:
        self.folder, self.ann, self.party = folder, ann, ann.create_party("Trip")
        if policy:
            self.party.members.set_policy({f"epoch.{key}": value for key, value in policy.items()})
        self.item = self.party.create("property-set", type="task", n=1)
        for name in holders:
            with peers(folder, name) as (holder,):
                invited(ann, self.party, holder)
        for number in range(members - 1 - len(holders)):
            with open_quiet(folder / f"absent {number}") as absent:
                self.party.members.admit(absent.request_join(self.party.key))
        Epochs(self.party).create()
        self.item["n"] = 2
        self.party.flush()
        assert self.epoch.electorate == members

    @property
    def epoch(self) -> EpochView:
        return Epochs(self.party).all()[0]

    def attested_by(self, *names: str) -> None:
        """They come on line, recompute it, and go."""
        for name in names:
            before = self.epoch.attested_by
            with peers(self.folder, name) as (holder,):
                holder.connect(address(self.ann))
                until(lambda before=before: self.epoch.attested_by > before)

    def newcomer(self, name: str) -> Outcome:
        with peers(self.folder, name) as (guest,):
            joined = invited(self.ann, self.party, guest)
            assert joined.get(self.item.id)["n"] == 2
            assert cid(joined) == cid(self.party)
            outcome = guest.network.bootstraps.outcomes[self.party.key]
            assert _begins(joined, self.party) == (outcome.epoch is not None), (
                "blocks below the epoch are not asked for"
            )
            where = "its whole history" if outcome.epoch is None else f"epoch {outcome.epoch}"
            assert joined.status.began == f"from {where}: {outcome.why}"
            return outcome


def _begins(theirs: Party, party: Party) -> bool:
    assert party.runtime.data is not None
    return theirs.runtime.feeds.feed(party.runtime.data.cursor.key).base > 0


@contextmanager
def declared(folder: Path, *holders: str, members: int, **policy: bytes) -> Iterator[Declared]:
    with peers(folder, "ann") as (ann,):
        yield Declared(folder, ann, holders, members, **policy)


def test_an_epoch_that_nobody_attested_is_not_believed_and_the_history_replayed(tmp_path: Path) -> None:
    with declared(tmp_path, "bob", members=3) as story:
        outcome = story.newcomer("cat")
        assert (story.epoch.attested_by, story.epoch.final) == (1, False)
        assert outcome.epoch is None
        assert outcome.why == "the party has no epoch that a newcomer may believe"


def test_one_independent_attest_is_enough(tmp_path: Path) -> None:
    with declared(tmp_path, "bob", members=5) as story:
        story.attested_by("bob")
        assert (story.epoch.attested_by, story.epoch.final) == (2, False)
        assert story.newcomer("cat").epoch == 1


def test_the_policy_may_ask_for_two(tmp_path: Path) -> None:
    with declared(tmp_path, "bob", "dan", members=7, join_attests=b"2") as story:
        story.attested_by("bob")
        assert story.newcomer("cat").epoch is None
        story.attested_by("dan")
        assert not story.epoch.final
        assert story.newcomer("eve").epoch == 1


def test_a_final_epoch_is_believed_whatever_the_policy_asks_for(tmp_path: Path) -> None:
    with declared(tmp_path, "bob", members=3, join_attests=b"2") as story:
        assert story.newcomer("cat").epoch is None
        story.attested_by("bob")
        assert (story.epoch.attested_by, story.epoch.final) == (2, True)
        assert story.newcomer("eve").epoch == 1
