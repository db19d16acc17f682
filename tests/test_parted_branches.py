"""Who holds another branch of a forked feed than an attested epoch ends with the state of all others (DESIGN 3, 9)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Closed
from echostore.kernel.feed import Head
from echostore.peer import parting
from echostore.peer.epochs import Epochs
from echostore.peer.parting import pinned_elsewhere
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from network_peers import address, cid, converged, invited, peers, until
from peer_builder import Liar

Signed = tuple[int, list[bytes], Head]


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Forked:
    """Eve shows one branch of her feed to ann, bob and cat, who agree on an epoch with it, and another one to dan."""

    def __init__(self, folder: Path, ann: Peer, bob: Peer, cat: Peer, *, other: int) -> None:
        self.folder = folder
        self.trip = ann.create_party("Trip")
        self.item = self.trip.create("property-set", type="task", n=0)
        self.others = [invited(ann, self.trip, each) for each in (bob, cat)]
        with peers(folder, "eve", "dan") as (eve, dan):
            for each in (eve, dan):
                converged(self.trip, *self.others, invited(ann, self.trip, each))
            liars = [Liar(eve, eve.party(self.trip.key)) for _ in range(2)]
        self.feed = liars[0].key
        self.chosen = self._branch(liars[0], 3, "chosen")
        self.other = self._branch(liars[1], other, "other")
        for party in (self.trip, *self.others):
            self.give(party, self.chosen)

    def _branch(self, liar: Liar, length: int, name: str) -> Signed:
        return liar.signed(
            *(liar.message(liar.set(self.item.id, **{name: number}), number=number) for number in range(length))
        )

    def give(self, party: Party, branch: Signed) -> None:
        party.sync_port.ingest(self.feed, "data", *branch)

    def agree(self) -> None:
        Epochs(self.trip).create()
        until(lambda: all(each.runtime.processor.base is not None for each in (self.trip, *self.others)))

    @contextmanager
    def dan(self) -> Iterator[tuple[Peer, Party]]:
        with peers(self.folder, "dan") as (dan,):
            yield dan, dan.party(self.trip.key)


def write_on_it(party: Party, item: Any) -> list[Any]:
    """Own messages on top of the other branch: on an item of others, an item of its own, and a text."""
    party.get(item.id)["mine"] = "kept"
    note = party.create("property-set", type="note", said="before")
    note["said"] = "after"
    text = party.create("text")
    text.insert(0, "my words")
    party.flush()
    return [note, text]


@pytest.mark.parametrize("other", [2, 5], ids=["shorter", "longer"])
def test_who_held_the_other_branch_comes_over_and_loses_nothing_of_its_own(tmp_path: Path, other: int) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        story = Forked(tmp_path, ann, bob, cat, other=other)
        with echostore.open(tmp_path / "dan", background=False) as away:
            party = away.party(story.trip.key)
            story.give(party, story.other)
            assert party.get(story.item.id)["other"] == other - 1
            write_on_it(party, story.item)
        story.agree()
        told: list[Any] = []
        with story.dan() as (dan, party), party.query(type="task").subscribe(told.append):
            handle = party.get(story.item.id)
            dan.connect(address(ann))
            until(lambda: handle.get("chosen") == 2)
            converged(story.trip, *story.others, party)
            assert handle.get("other") is None
            for each in (story.trip, party):
                assert each.get(story.item.id)["mine"] == "kept"
                assert [note["said"] for note in each.query(type="note").all()] == ["after"]
                assert [str(item) for item in each.items() if item.model == "text"] == ["my words"]
            assert dan.network.bootstraps.outcomes[party.key].epoch == 1
            assert all(not change.removed for change in told), "it was changed, never gone"
            handle["more"] = True
            converged(story.trip, *story.others, party)
            before = cid(party)
        with story.dan() as (_, party):
            assert cid(party) == before, "and after a restart"
            assert story.item["more"] is True


def test_who_is_killed_while_it_comes_over_loses_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its feed has ended and it stands on the epoch, where what it wrote on top of the other branch can't be processed."""
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        story = Forked(tmp_path, ann, bob, cat, other=5)
        with echostore.open(tmp_path / "dan", background=False) as away:
            party = away.party(story.trip.key)
            story.give(party, story.other)
            write_on_it(party, story.item)
        story.agree()
        killed = threading.Event()

        def dies(*_: object) -> None:
            killed.set()
            raise Closed("killed")

        with monkeypatch.context() as patch:
            patch.setattr(parting, "write_again", dies)
            with story.dan() as (dan, _):
                dan.connect(address(ann))
                until(killed.is_set)
        with story.dan() as (dan, party):
            dan.connect(address(ann))
            converged(story.trip, *story.others, party)
            for each in (story.trip, party):
                assert each.get(story.item.id)["mine"] == "kept"
                assert [note["said"] for note in each.query(type="note").all()] == ["after"]
                assert [str(item) for item in each.items() if item.model == "text"] == ["my words"]


def test_who_is_on_the_chosen_branch_and_behind_fetches_nothing(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        story = Forked(tmp_path, ann, bob, cat, other=5)
        story.agree()
        with story.dan() as (dan, party):
            dan.connect(address(ann))
            converged(story.trip, party)
            story.give(party, story.other)
            until(lambda: story.feed in party.runtime.processor.membership.machine.forks)
            converged(story.trip, *story.others, party)
            assert party.get(story.item.id)["chosen"] == 2
            assert pinned_elsewhere(party.runtime) is None
            assert party.key not in dan.network.bootstraps.outcomes
