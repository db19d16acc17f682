"""An epoch of which only some blobs are here is never taken for whole: not stood on, not folded from, not kept."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.snapshot import PAGE_ITEMS_MAX
from echostore.peer.base_following import open_epoch
from echostore.peer.base_mending import mend_beside
from echostore.peer.bootstrap import fetch_epoch
from echostore.peer.early_reading import EarlyReader
from echostore.peer.epoch_agreement import Agreement
from echostore.peer.epoch_fetching import fetch_heads, fetch_tree, holes, survey
from echostore.peer.epoch_fold import Folded
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.wire.base_epoch import BaseName
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree_nodes import IndexNode
from network_peers import cid
from peer_builder import Circle
from test_base_mending import Killed, from_member
from test_stale_messages import agreed_epoch
from two_peers import open_quiet, sync

ITEMS = PAGE_ITEMS_MAX * 6


class Story:
    """Ann, Bob and Cat stand on epoch 1. Ann declared epoch 2, in which every page is another; Bob has its blocks and no blob."""

    def __init__(self, circle: Circle) -> None:
        self.circle = circle
        self.ann, self.bob, self.cat = (circle.party(name) for name in ("ann", "bob", "cat"))
        with self.ann.batch():
            made = [self.ann.create("property-set", type="task", n=number) for number in range(ITEMS)]
        sync(self.ann, self.bob, self.cat)
        agreed_epoch(circle, "ann", "bob", "cat")
        with self.ann.batch():
            for item in made:
                item["n"] += 1000
        self.items: list[ItemId] = [item.id for item in made]
        Epochs(self.ann).create()
        sync(self.ann, self.bob, self.cat)
        self.epoch = Epochs(self.bob).chain()[-1]
        self.name = BaseName.of(self.epoch.genesis, self.epoch.hash)
        self.root = read_state_root(self.ann.runtime.blobs.get(self.name.snapshot))
        self.bob.get(self.items[7])["n"] = "above"
        self.bob.flush()
        assert (self.name.number, self.epoch.final) == (2, False)
        assert holes(self.name, self.bob.runtime.blobs)

    def fetch(self, stop: Callable[[], None] = lambda: None) -> Any:
        return from_member(self.ann, self.bob, stop)

    def becomes_final(self) -> None:
        """Bob hears that Cat stands for it too; what he stands on is whole then, and after his own look at it."""
        Epochs(self.cat).review()
        sync(self.ann, self.cat)
        sync(self.bob, self.cat)
        assert Epochs(self.bob).tally.latest_final.number == 2
        self.stands_whole()
        Epochs(self.bob).review()
        assert self.bob.runtime.processor.base.name.number == 2
        self.stands_whole()
        sync(self.ann, self.bob, self.cat)
        assert len({cid(each) for each in (self.ann, self.bob, self.cat)}) == 1
        assert self.bob.get(self.items[7])["n"] == "above"
        run_gc(self.bob)
        self.stands_whole()

    def stands_whole(self) -> None:
        processor = self.bob.runtime.processor
        assert processor.damage is None
        found = survey(processor.base.name, self.bob.runtime.blobs)
        assert (found.lost, found.unplaced) == (0, 0), processor.base.name.number


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        yield Story(circle)


def early_item(story: Story) -> None:
    EarlyReader(story.bob, story.epoch, story.fetch()).item(story.items[0])


def early_view(story: Story) -> None:
    EarlyReader(story.bob, story.epoch, story.fetch()).view(story.items[0])


def explained_dispute(story: Story) -> None:
    """Bob, who found another state there, looks for the first item that differs, and whom he asks goes away."""
    agreement, base = Agreement(story.bob), story.bob.runtime.processor.base
    came: list[Cid] = []

    def fetched(cid: Cid) -> None:
        if len(came) == 4:
            raise NotFound("nobody is there any more")
        came.append(cid)
        story.fetch()([cid])

    agreement._fetch = fetched  # type: ignore[method-assign]
    root = replace(story.root, index_root=base.root.index_root)
    mine = Folded(Cid(b"another"), root, base.name.cut, {each: base.blob(each) for each in base.names()}, 0)
    assert "not all of the declared one is here" in agreement._first_difference(story.epoch, mine)
    mend_beside(story.bob, story.fetch())  # its cut comes by another way


def heads_alone(story: Story) -> None:
    fetch_heads(story.bob.runtime.blobs, story.name, story.fetch())


FLOWS = (early_item, early_view, explained_dispute, heads_alone)


@pytest.mark.parametrize("freed", [False, True], ids=["", "gc"])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda each: each.__name__)
def test_what_came_in_parts_is_not_stood_on(story: Story, flow: Callable[[Story], None], freed: bool) -> None:
    flow(story)
    blobs = story.bob.runtime.blobs
    assert blobs.has(story.name.snapshot)
    assert holes(story.name, blobs)
    assert open_epoch(story.bob.runtime, story.epoch) is None
    if freed:
        run_gc(story.bob)
        story.stands_whole()
    story.becomes_final()


def test_a_fetch_that_was_cut_short_after_any_blob_is_not_stood_on(story: Story) -> None:
    """Also where its root had come before by another way, so that no mark says what is missing."""
    heads_alone(story)
    bob, came = story.bob, 0

    def stop() -> None:
        nonlocal came
        came += 1
        if came > 1:
            raise Killed

    while holes(story.name, bob.runtime.blobs):
        came = 0
        with contextlib.suppress(Killed):
            fetch_epoch(bob, 2, story.fetch(stop))
        found = survey(story.name, bob.runtime.blobs)
        whole = not (found.lost or found.unplaced)
        assert (open_epoch(bob.runtime, story.epoch) is not None) == whole
    story.becomes_final()


def test_nothing_is_folded_over_a_predecessor_with_holes(story: Story) -> None:
    """Bob judges epoch 3 over epoch 2, which he believes by then, and of which pages are missing here."""
    blobs, ann = story.bob.runtime.blobs, story.ann
    fetch_heads(blobs, story.name, story.fetch())
    Epochs(story.cat).review()
    sync(ann, story.cat)
    ann.get(story.items[0])["n"] = "in epoch 3"
    Epochs(ann).create()
    sync(ann, story.cat)
    Epochs(story.cat).review()
    sync(ann, story.cat, story.bob)
    story.stands_whole()
    Epochs(story.bob).review()
    assert story.bob.runtime.processor.base.name.number == 3
    story.stands_whole()


def test_an_epoch_that_shares_a_lost_page_with_the_base_is_not_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        with party.batch():
            items = [party.create("property-set", type="task", n=number).id for number in range(ITEMS)]
        Epochs(party).create()
        page = next(each for each in party.snapshot().reader().reachable() if each in _pages(party))
        untouched = next(item for item in items if bytes(item) not in party.runtime.blobs.get(page))
        party.runtime.blobs.delete([page])
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(party.key)
        party.get(untouched)["n"] = "later"
        with pytest.raises(Corrupt, match="pages of the epoch"):
            Epochs(party).create()
        assert len(Epochs(party).chain()) == 1
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(party.key)  # from its history, which is whole
        assert Epochs(party).create().number == 2
        base = party.runtime.processor.base
        assert survey(base.name, party.runtime.blobs).lost == 0


def _pages(party: Party) -> set[Cid]:
    nodes = party.runtime.processor.base.reader.nodes()
    return {cid for _, cid, node in nodes if not isinstance(node, IndexNode)}


def test_looking_at_the_next_epoch_costs_what_changed(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.becomes_final()
    bob = story.bob
    story.ann.get(story.items[0])["n"] = "one more"
    agreed: list[int] = []
    Epochs(story.ann).create()
    sync(story.ann, bob, story.cat)
    fetch = story.fetch()
    epoch = Epochs(bob).chain()[-1]
    name = BaseName.of(epoch.genesis, epoch.hash)
    fetch_heads(bob.runtime.blobs, name, fetch)
    fetch_tree(bob.runtime.blobs, name, fetch)
    assert open_epoch(bob.runtime, epoch) is not None
    read = bob.runtime.blobs.get_some

    def counted(cids: Any, bytes_max: int) -> Any:
        agreed.append(len(list(cids)))
        return read(cids, bytes_max)

    monkeypatch.setattr(bob.runtime.blobs, "get_some", counted)
    assert open_epoch(bob.runtime, epoch) is not None
    assert sum(agreed) < 10 < len(survey(name, bob.runtime.blobs).here)
