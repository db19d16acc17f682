"""A party whose base is lost boots from the epoch that the MetaStore keeps, if that is final and all of it is here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_process import Cli
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid
from echostore.peer.epoch_agreement import ACCEPTED_SETTING, AcceptedEpoch
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.store.blob_store import BlobStore
from echostore.store.feed_store import FeedStore
from echostore.store.home import Home
from echostore.store.meta_store import MetaStore
from echostore.wire.base_epoch import BASE_KEY, BaseName
from echostore.wire.cids import PROTOBUF, cid_of
from peer_builder import Circle
from test_stale_messages import agreed_epoch


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Story:
    """Ann and bob agreed on epochs, and ann deleted the blocks below them; then her files are tampered with."""

    def __init__(self, folder: Path) -> None:
        self.circle = Circle(folder, "ann", "bob", roles={"bob": "admin"})
        ann = self.circle.party("ann")
        self.item = ann.create("property-set", n=0)
        for number in (1, 2, 3):
            self.item["n"] = number
            agreed_epoch(self.circle, "ann", "bob")
        assert run_gc(ann).blocks
        self.item["n"] = 4
        ann.flush()
        self.cid = ann.snapshot().cid
        accepted = Epochs(ann).accepted()
        assert accepted is not None
        self.accepted: AcceptedEpoch = accepted
        assert accepted.number == 3
        self.previous = Epochs(ann).get(2).genesis
        self.key = ann.key
        home = Home.open(folder / "ann")
        self.files, self.meta = home.party(self.key), home.meta
        self.circle.peers["ann"].close()

    def feeds(self) -> FeedStore:
        return FeedStore(self.files.feeds, self.key)

    def base(self) -> bytes | None:
        with self.feeds() as feeds:
            return feeds.about(BASE_KEY)

    def forget_base(self) -> None:
        with self.feeds() as feeds:
            feeds.set_about({BASE_KEY: None})

    def stand_on_what_is_lost(self) -> None:
        """The base of before, none of whose blobs is here: as if she had died before she named the new one."""
        genesis = self.previous
        name = BaseName(2, b"h" * 32, cid_of(b"snapshot", PROTOBUF), Cid(genesis.cut), discards=False)
        with self.feeds() as feeds:
            feeds.set_about({BASE_KEY: name.encode()})

    def keep(self, kept: Any) -> None:
        with MetaStore(self.meta) as meta:
            meta.set_setting(ACCEPTED_SETTING, kept, party=self.key)

    def lose(self, *cids: Cid) -> None:
        with BlobStore(self.files.blobs) as blobs:
            blobs.delete(cids)

    def opened(self) -> Any:
        self.circle.peers["ann"] = self.circle._open("ann")
        return self.circle.party("ann")


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    made = Story(tmp_path)
    yield made
    for peer in made.circle.peers.values():
        peer.close()


def test_a_base_that_feeds_db_does_not_name_any_more(story: Story) -> None:
    before = story.base()
    story.forget_base()
    ann = story.opened()
    assert ann.get(story.item.id)["n"] == 4
    assert ann.snapshot().cid == story.cid
    assert story.base() == before, "it is named again"
    ann.get(story.item.id)["n"] = 5
    story.circle.meet_all()
    story.circle.agree()
    assert story.circle.restart("ann").get(story.item.id)["n"] == 5


def test_a_base_whose_snapshot_is_lost_while_that_of_the_accepted_epoch_is_here(story: Story) -> None:
    before = story.base()
    story.stand_on_what_is_lost()
    ann = story.opened()
    assert ann.snapshot().cid == story.cid
    assert story.base() == before


@pytest.mark.parametrize("why", ["nothing kept", "not readable", "another genesis", "blobs lost"])
def test_what_is_not_final_or_not_here_is_not_stood_on(story: Story, why: str) -> None:
    story.stand_on_what_is_lost()
    if why == "nothing kept":
        story.keep(None)
    elif why == "not readable":
        story.keep({"number": "three"})
    elif why == "another genesis":
        story.keep({**story.accepted.to_json(), "hash": "ab" * 32})
    else:
        story.lose(story.accepted.snapshot)
    stood = story.base()
    with pytest.raises(Corrupt, match="the snapshot of the epoch that the party stands on is lost"):
        story.opened()
    assert story.base() == stood


def test_neither_named_nor_kept_is_said_in_one_line(story: Story) -> None:
    story.forget_base()
    story.keep(None)
    with pytest.raises(Corrupt, match="does not say on which epoch the party stands"):
        story.opened()


def test_doctor_warns_when_the_two_disagree(story: Story, tmp_path: Path) -> None:
    doctor = Cli(tmp_path / "ann", tmp_path / "state")

    def found() -> list[tuple[str, str]]:
        checks = doctor("doctor", "--json").json()["checks"]
        return [(each["level"], each["what"]) for each in checks if each["name"].endswith(" epoch")]

    assert found() == [("ok", "stands on epoch 3")]
    story.keep({**story.accepted.to_json(), "hash": "ab" * 32})
    assert found() == [("warning", "meta.db keeps another epoch 3 than feeds.db stands on")]
    story.keep(story.accepted.to_json())
    assert found() == [("ok", "stands on epoch 3")]
