"""Blobs of the epoch that a truncated party stands on are lost: members give them back, and nothing that was written is lost."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Corrupt, Refused
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.snapshot import PAGE_ITEMS_MAX
from echostore.peer import bootstrap as bootstrap_module
from echostore.peer.base_mending import mend, mend_control
from echostore.peer.control_floor import kept_blobs
from echostore.peer.epoch_fetching import holes
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.store.blob_store import BlobStore
from echostore.wire.base_epoch import MENDING_KEY, BaseEpoch
from echostore.wire.cids import RAW, cid_codec
from echostore.wire.control_state import EVIDENCE_KEY
from network_peers import address, cid, converged, invited, peers, until
from peer_builder import Circle
from served import Serve, serve
from served import until as served_until
from test_stale_messages import agreed_epoch
from two_peers import open_quiet, sync

ITEMS = PAGE_ITEMS_MAX * 6
"""Enough for an index node with several pages."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Story:
    """Ann, Bob and Cat share a party with epochs. Bob has truncated his feeds; his last write is on no other peer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with Circle(folder, "ann", "bob", "cat") as circle:
            party = circle.party("ann")
            self.key = circle.key
            with party.batch():
                made = [party.create("property-set", type="task", n=number) for number in range(ITEMS)]
            text = party.create("text", type="note")
            text.insert(0, "a long text " * 2000)
            sync(*(circle.party(name) for name in ("ann", "bob", "cat")))
            for number in range(2):
                made[number]["n"] = 1000 + number
                agreed_epoch(circle, "ann", "bob", "cat")
            bob = circle.party("bob")
            done = run_gc(bob)
            assert done.blocks
            assert done.control_blocks
            self.items: list[ItemId] = [item.id for item in made]
            self.text: ItemId = text.id
            cats = circle.party("cat").create("property-set", type="task", n="cat's")
            sync(bob, circle.party("cat"))
            self.cats: ItemId = cats.id  # of a feed that the epoch never saw, like Bob's own
            bob.get(self.items[2])["n"] = -2
            self.own: ItemId = bob.create("property-set", type="task", n="only here").id
            self.base: BaseEpoch = bob.runtime.processor.base
            self.number = self.base.name.number
            bob.flush()
            taken = bob.snapshot()
            self.cid = taken.cid
            blobs = bob.runtime.blobs
            names = list(dict.fromkeys(self.base.names()))
            heads = {self.base.name.snapshot, self.base.name.cut, self.base.root.index_root}
            self.pages = [each for each in names if each not in heads and b"task" in blobs.get(each)]
            live = set(taken.reader().reachable())
            self.lent = [each for each in self.pages if each in live]
            self.names, self.blobs = set(names), len(names)
            self.chunks = [each for each in names if cid_codec(each) == RAW]
        assert len(self.pages) > 2
        assert self.chunks
        assert self.lent, "pages that items are read from"

    @property
    def home(self) -> Path:
        return self.folder / "bob"

    @property
    def file(self) -> Path:
        return self.home / "parties" / self.key.hex() / "blobs.db"

    def lose(self, *cids: Cid) -> None:
        with BlobStore(self.file) as blobs:
            assert blobs.delete(cids) == len(cids)

    def damage(self, *cids: Cid) -> None:
        database = sqlite3.connect(self.file)
        with database:
            for each in cids:
                database.execute("UPDATE blobs SET data = x'00112233', size = NULL WHERE cid = ?", (each,))
        database.close()

    def lose_file(self, name: str = "blobs.db") -> None:
        found = [*self.file.parent.glob(f"{name}*")]
        assert found
        for file in found:
            file.unlink()

    def check(self, party: Party) -> None:
        """All that was there is there."""
        runtime = party.runtime
        assert runtime.processor.damage is None
        assert runtime.processor.base.name == self.base.name
        assert holes(self.base.name, runtime.blobs) == 0
        assert runtime.feeds.about(MENDING_KEY) is None
        assert cid(party) == self.cid
        assert party.get(self.own)["n"] == "only here"
        assert party.get(self.items[2])["n"] == -2
        assert party.get(self.cats)["n"] == "cat's"
        assert [party.get(item)["n"] for item in self.items[3:]] == list(range(3, ITEMS))
        assert str(party.get(self.text)) == "a long text " * 2000


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


@contextmanager
def online(story: Story, name: str) -> Iterator[Peer]:
    with echostore.open(story.folder / name) as peer:
        peer.listen("127.0.0.1:0")
        yield peer


def from_member(giver: Party, taker: Party, stop: Callable[[], None] = lambda: None) -> Any:
    """What a network fetches, one blob at a time."""

    def fetch(cids: list[Cid], follow: Any = None) -> None:
        mine, theirs = taker.runtime.blobs, giver.runtime.blobs
        assert mine is not None
        assert theirs is not None
        waiting = list(cids)
        while waiting:
            each = waiting.pop()
            if not mine.has(each):
                stop()
                mine.put_many({each: theirs.get(each)})
            waiting += follow(each, mine.get(each)) if follow is not None else ()

    return fetch


# nothing can be read


LOSSES: dict[str, Callable[[Story], None]] = {
    "all blobs": Story.lose_file,
    "a file that is no database": lambda story: _overwritten(story, 0),
    "the root": lambda story: story.lose(story.base.name.snapshot),
    "the cut, damaged": lambda story: story.damage(story.base.name.cut),
    "the top of the tree, and items.db": lambda story: _and_items(story, story.base.root.index_root),
    "one page, and items.db": lambda story: _and_items(story, story.pages[1]),
}


def _and_items(story: Story, lost: Cid) -> None:
    story.lose(lost)
    story.lose_file("items.db")


def _overwritten(story: Story, at: int) -> None:
    """Pages of the file itself are no database pages any more."""
    data = bytearray(story.file.read_bytes())
    size = min(8192, len(data) - at)
    data[at : at + size] = b"\xaa" * size
    story.file.write_bytes(bytes(data))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_base_is_fetched_from_a_member_and_stood_on_again(story: Story, loss: str) -> None:
    LOSSES[loss](story)
    with online(story, "bob") as bob, online(story, "ann") as ann:
        with pytest.raises(Corrupt, match="the epoch that the party stands on is lost") as refused:
            bob.party(story.key)
        assert "Connect to a member" in refused.value.next_step
        held = bob.held(story.key)
        assert held.status.closed
        assert f"epoch {story.number}" in held.status.lost
        begins = [each.base for each in held.runtime.feeds.feeds()]
        bob.connect(address(ann))
        until(lambda: held.runtime.processor.damage is None)
        theirs = bob.party(story.key)
        assert theirs is held
        assert [each.base for each in held.runtime.feeds.feeds()] == begins, "no more of the history goes for it"
        converged(theirs, ann.party(story.key))
        story.check(theirs)
        assert ann.party(story.key).get(story.own)["n"] == "only here"
        assert "fetched again" in theirs.status.began
        theirs.get(story.own)["n"] = "and goes on"
        converged(theirs, ann.party(story.key))
        after = cid(theirs)
    with open_quiet(story.home) as bob:
        assert cid(bob.party(story.key)) == after
        assert bob.party(story.key).runtime.processor.counters.rebuilds == 0


def test_while_the_base_is_lost_nothing_is_written_and_the_feeds_stay(story: Story) -> None:
    story.lose_file()
    for _ in range(2):
        with open_quiet(story.home) as bob:
            held = bob.held(story.key)
            lengths = {each.key: each.length for each in held.runtime.feeds.feeds()}
            for act in (Epochs(held).create, Epochs(held).gc, held.snapshot):
                with pytest.raises(Corrupt, match="is lost"):
                    act()
            assert {each.key: each.length for each in held.runtime.feeds.feeds()} == lengths
            assert held.members.all()
    with echostore.open(story.home, read_only=True) as bob, pytest.raises(Corrupt, match="is lost"):
        bob.party(story.key)


def test_others_get_what_only_this_peer_wrote_before_its_base_is_back(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ann has lost hers too: nobody can help, and still nothing is lost."""
    story.lose_file()
    monkeypatch.setattr(bootstrap_module, "PATIENCE_S", 0.3)
    with online(story, "bob") as bob, online(story, "ann") as ann:
        party = ann.party(story.key)
        party.runtime.blobs.delete([story.pages[0]])
        bob.connect(address(ann))
        until(lambda: party.runtime.state.record(story.own) is not None)
        assert party.get(story.cats)["n"] == "cat's", "which Bob's write builds on"
        late = party.create("property-set", type="task", n="while Bob waited")
        until(lambda: "could not be had" in bob.held(story.key).status.lost)
        with online(story, "cat") as cat:
            bob.connect(address(cat))
            until(lambda: bob.held(story.key).runtime.processor.damage is None)
            converged(bob.party(story.key), cat.party(story.key), party)
            assert bob.party(story.key).get(late.id)["n"] == "while Bob waited"
            assert bob.party(story.key).get(story.own)["n"] == "only here"


class Killed(BaseException):
    """The process ends here."""


def test_killed_after_every_blob_it_goes_on_at_the_next_start(story: Story) -> None:
    story.lose_file()
    with open_quiet(story.folder / "ann") as ann:
        giver = ann.party(story.key)
        came, done = 0, False
        while not done:
            bob, fresh = open_quiet(story.home), 0
            held = bob.held(story.key)
            assert held.runtime.processor.damage is not None

            def stop() -> None:
                nonlocal fresh
                if fresh:
                    raise Killed
                fresh += 1

            try:
                mend(held, story.base.name, from_member(giver, held, stop))
                done = True
            except Killed:
                came += 1
            _killed(bob)
        assert came + 1 == story.blobs, "one at each start, and none of them twice"
    with open_quiet(story.home) as bob:
        story.check(bob.party(story.key))


@pytest.mark.parametrize("step", ["clear", "save", "save_tree", "set_parents"])
def test_killed_while_the_items_are_made_anew_nothing_is_asked_for_again(
    story: Story, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.lose_file()
    with open_quiet(story.folder / "ann") as ann:
        bob = open_quiet(story.home)
        held = bob.held(story.key)
        with monkeypatch.context() as dying:

            def die(*_: object) -> None:
                raise Killed

            dying.setattr(held.runtime.items, step, die)
            with pytest.raises(Killed):
                mend(held, story.base.name, from_member(ann.party(story.key), held))
        assert held.runtime.processor.closed
        _killed(bob)
    with open_quiet(story.home) as bob:
        story.check(bob.party(story.key))


def _killed(peer: Peer) -> None:
    """The process is gone, its files stay."""
    peer._file_lock.release()  # type: ignore[union-attr]  # a writing peer has one


# single pages


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_lost_page_takes_its_items_along_and_members_give_it_back(story: Story, how: str) -> None:
    (story.lose if how == "lost" else story.damage)(*story.lent[:1])
    with open_quiet(story.home) as bob:
        party = bob.party(story.key)
        readable = [item for item in story.items if _reads(party, item)]
        assert 0 < len(readable) < ITEMS
        assert party.query(type="task").count() == ITEMS + 2, "queries read no pages"
        party.get(story.own)["n"] = "written meanwhile"
        with pytest.raises(Corrupt, match="pages of the epoch"):
            party.snapshot()
        assert "pages of the epoch" in party.status.lost
    with online(story, "bob") as bob, online(story, "ann") as ann:
        party = bob.party(story.key)
        assert party.get(story.own)["n"] == "written meanwhile"
        assert not party.status.closed
        handle = party.get(readable[0])
        bob.connect(address(ann))
        until(lambda: party.runtime.processor.damage is None)
        assert handle["n"] == party.get(readable[0])["n"]
        converged(party, ann.party(story.key))
        assert all(_reads(party, item) for item in story.items)
        assert holes(story.base.name, party.runtime.blobs) == 0
        assert ann.party(story.key).get(story.own)["n"] == "written meanwhile"


def test_a_party_of_which_all_pages_are_lost_still_tells_how_it_is(story: Story) -> None:
    story.lose(*story.pages)
    with open_quiet(story.home) as bob:
        assert not all(_reads(bob.party(story.key), item) for item in story.items)
        told = bob.party(story.key).status
        assert (told.title, told.closed) == ("Trip", False)
        assert told.items == ITEMS + 3
        assert bob.party(story.key).get(story.own)["n"] == "only here"
    assert Cli(story.home, story.folder / "state")("party", "show").status == 6


def _reads(party: Party, item: ItemId) -> bool:
    try:
        party.get(item).value()
    except Corrupt:
        return False
    return True


def test_a_page_that_nobody_has_read_is_missed_when_the_peer_comes_onto_the_network(story: Story) -> None:
    story.lose(story.pages[0])
    assert Cli(story.home, story.folder / "state")("doctor").status == 6
    with online(story, "bob") as bob, online(story, "ann") as ann:
        party = bob.party(story.key)
        assert holes(story.base.name, party.runtime.blobs) == 1
        bob.connect(address(ann))
        until(lambda: party.runtime.blobs.has(story.pages[0]))
        until(lambda: party.runtime.processor.damage is None)
        converged(party, ann.party(story.key))
        story.check(party)


def test_writes_of_others_on_items_of_a_lost_page_are_there_once_it_is_back(story: Story) -> None:
    story.lose(*story.pages)
    with open_quiet(story.folder / "ann") as ann, open_quiet(story.home) as bob:
        theirs, party = ann.party(story.key), bob.party(story.key)
        with theirs.batch():
            for number, item in enumerate(story.items[3:]):
                theirs.get(item)["n"] = number * 10
        sync(theirs, party)
        assert party.runtime.processor.damage is not None
    with open_quiet(story.folder / "ann") as ann, open_quiet(story.home) as bob:
        theirs, held = ann.party(story.key), bob.held(story.key)
        sync(theirs, held)
        mend(held, story.base.name, from_member(theirs, held))
        sync(theirs, held)
        assert [held.get(item)["n"] for item in story.items[3:]] == [n * 10 for n in range(ITEMS - 3)]
        assert cid(bob.party(story.key)) == cid(theirs)


def test_a_lost_page_of_the_live_tree_needs_nobody(story: Story) -> None:
    """It is not the base's: the base and the blocks above it give it again, at the next start."""
    with open_quiet(story.home) as bob:
        party = bob.party(story.key)
        run_gc(party)
        live = [each for each, _ in party.runtime.blobs.list() if each not in story.names]
        lost = [each for each in live if b"task" in party.runtime.blobs.get(each) and cid_codec(each) != RAW]
        assert lost
        before = cid(party)
    story.lose(*lost)
    with open_quiet(story.home) as bob:
        assert not all(_reads(bob.party(story.key), item) for item in story.items)
    with open_quiet(story.home) as bob:
        party = bob.party(story.key)
        assert all(_reads(party, item) for item in story.items)
        assert cid(party) == before
        assert party.status.lost == ""


def test_where_the_history_is_whole_a_lost_page_is_folded_from_it(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        with party.batch():
            items = [party.create("property-set", type="task", n=number) for number in range(ITEMS)]
        Epochs(party).create()
        run_gc(party)
        assert party.runtime.items.lends
        base = party.runtime.processor.base
        ids = [item.id for item in items]
        page = next(each for each in base.names() if b"task" in party.runtime.blobs.get(each))
        party.runtime.blobs.delete([page])
    with open_quiet(tmp_path / "ann") as ann:
        assert not all(_reads(ann.party(party.key), item) for item in ids)
    for _ in range(2):
        with open_quiet(tmp_path / "ann") as ann:
            party = ann.party(party.key)
            assert all(_reads(party, item) for item in ids)
            assert party.status.epoch is None
            party.get(ids[0])["n"] = 0  # as it was
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(party.key)
        party.get(ids[0])["n"] = 7
        assert Epochs(party).create().number == 2
        assert party.status.epoch == 2


# others


def test_where_nobody_has_it_any_more_a_newer_epoch_is_taken_as_by_who_slept(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_module, "PATIENCE_S", 0.5)
    with open_quiet(story.folder / "ann") as ann, open_quiet(story.folder / "cat") as cat:
        parties = [ann.party(story.key), cat.party(story.key)]
        for number in (1, 2):
            for each in story.items[::7]:
                parties[0].get(each)["n"] = f"later {number}"
            Epochs(parties[0]).create()
            sync(*parties)
            Epochs(parties[1]).review()
            sync(*parties)
        for party in parties:
            assert party.runtime.processor.base.name.number == story.number + 2
            run_gc(party)
            assert holes(story.base.name, party.runtime.blobs)
    story.lose_file()
    with online(story, "bob") as bob, online(story, "ann") as ann:
        held = bob.held(story.key)
        bob.connect(address(ann))
        until(lambda: held.runtime.processor.damage is None)
        party = bob.party(story.key)
        assert party.status.epoch == story.number + 2
        assert party.get(story.own)["n"] == "only here"
        converged(party, ann.party(story.key))
        assert party.get(story.items[7])["n"] == "later 2"
        assert ann.party(story.key).get(story.own)["n"] == "only here"
        assert party.runtime.feeds.about(MENDING_KEY) is None


def test_bytes_that_are_not_what_they_should_be_never_land(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.lose_file()
    monkeypatch.setattr(bootstrap_module, "PATIENCE_S", 0.5)
    with online(story, "bob") as bob:
        with online(story, "ann") as ann:
            given = ann.network.blobs_here

            def poisoned(*asked: Any) -> dict[Cid, bytes]:
                return {each: data[:-1] + bytes([data[-1] ^ 1]) for each, data in given(*asked).items()}

            monkeypatch.setattr(ann.network, "blobs_here", poisoned)
            bob.connect(address(ann))
            until(lambda: bob.network.blobs.poisoners)
            until(lambda: "could not be had" in bob.held(story.key).status.lost)
            blobs = bob.held(story.key).runtime.blobs
            assert blobs.verify().sound
            assert bob.held(story.key).runtime.processor.closed
        with online(story, "cat") as cat:
            bob.connect(address(cat))
            until(lambda: bob.held(story.key).runtime.processor.damage is None)
            converged(bob.party(story.key), cat.party(story.key))
            story.check(bob.party(story.key))


def test_another_state_under_the_right_names_is_refused(story: Story) -> None:
    """Without the network's check: the store takes nothing that its CID does not name."""
    story.lose_file()
    with open_quiet(story.home) as bob:
        held = bob.held(story.key)

        def lie(cids: list[Cid], follow: Any = None) -> None:
            held.runtime.blobs.put_many(dict.fromkeys(cids, b"another state"))

        with pytest.raises(Refused):
            mend(held, story.base.name, lie)
        assert held.runtime.processor.closed
        assert not list(held.runtime.blobs.list())


def test_a_file_of_which_pages_are_damaged_keeps_what_can_be_read(story: Story) -> None:
    with open_quiet(story.home) as bob:
        party = bob.party(story.key)
        photos = [party.runtime.blobs.put(bytes([number]) * 5000) for number in range(20)]
    size = story.file.stat().st_size
    _overwritten(story, size // 8 // 4096 * 4096)
    with online(story, "bob") as bob, online(story, "ann") as ann:
        bob.connect(address(ann))
        held = bob.held(story.key)
        until(lambda: held.runtime.processor.damage is None and holes(story.base.name, held.runtime.blobs) == 0)
        converged(bob.party(story.key), ann.party(story.key))
        story.check(bob.party(story.key))
        assert held.runtime.blobs.verify().sound
        saved = [each for each in photos if held.runtime.blobs.has(each)]
        assert len(saved) > len(photos) / 2, "what nobody else has is kept as far as it can be read"


def test_evidence_for_newcomers_is_made_again(story: Story) -> None:
    story.lose_file()
    with online(story, "bob") as bob:
        with online(story, "ann") as ann:
            bob.connect(address(ann))
            until(lambda: bob.held(story.key).runtime.processor.damage is None)
        party = bob.party(story.key)
        blobs = party.runtime.blobs
        until(lambda: not blobs.missing(kept_blobs(party.runtime.processor, blobs)))
        assert blobs.has(Cid(party.runtime.feeds.about(EVIDENCE_KEY)))


def test_evidence_that_can_not_be_made_comes_from_others(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quiet(story.folder / "ann") as ann, open_quiet(story.home) as bob:
        party = bob.party(story.key)
        name = Cid(party.runtime.feeds.about(EVIDENCE_KEY))
        ann.party(story.key).runtime.blobs.put_many({name: party.runtime.blobs.get(name)})
        party.runtime.blobs.delete([name])
        monkeypatch.setattr("echostore.peer.control_floor._evidence_for", lambda *_: b"")
        mend_control(party, from_member(ann.party(story.key), party))
        assert party.runtime.blobs.has(name)
        assert party.runtime.feeds.about(EVIDENCE_KEY) == name


def test_records_and_cuts_around_the_base_come_too(story: Story) -> None:
    story.lose_file()
    with online(story, "bob") as bob, online(story, "ann") as ann:
        bob.connect(address(ann))
        until(lambda: bob.held(story.key).runtime.processor.damage is None)
        party = bob.party(story.key)
        chain = Epochs(party).chain()[-2:]
        wanted = [Cid(each) for epoch in chain for each in (epoch.genesis.record, epoch.genesis.cut)]
        until(lambda: not party.runtime.blobs.missing(wanted))
        converged(party, ann.party(story.key))
        until(lambda: "never had" not in plan_gc(party).why)
        run_gc(party)
        story.check(party)


def test_who_was_mended_serves_a_newcomer(story: Story) -> None:
    story.lose_file()
    with online(story, "bob") as bob, online(story, "ann") as ann:
        bob.connect(address(ann))
        until(lambda: bob.held(story.key).runtime.processor.damage is None)
        welcome = None
        with echostore.open(story.folder / "dan", name="dan") as dan:
            welcome = ann.party(story.key).members.admit(dan.request_join(story.key))
            converged(bob.party(story.key), ann.party(story.key))
            ann.close()
            theirs = dan.enter(welcome)
            dan.connect(address(bob))
            converged(theirs, bob.party(story.key))
            assert theirs.get(story.own)["n"] == "only here"


@pytest.mark.parametrize("whose", ["child", "parent", "both"])
def test_a_child_party_is_mended_like_its_parent_and_needs_only_its_control(tmp_path: Path, whose: str) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        child = ann.create_child(party, "Tasks")
        for each in (child, party):
            item = each.create("property-set", type="task", n=0)
            for number in (1, 2):
                item["n"] = number
                Epochs(each).create()
        run_gc(child)
        run_gc(party)
        theirs = invited(ann, party, bob)
        entered = bob.enter_child(theirs, child.key)
        converged(entered, child)
        made = {each.key: each.create("property-set", n="bob's").id for each in (entered, theirs)}
        converged(entered, child)
        converged(theirs, party)
        before = {each.key: cid(each) for each in (entered, theirs)}
    lost = {"child": [child.key], "parent": [party.key], "both": [party.key, child.key]}[whose]
    for key in lost:
        for file in (tmp_path / "bob" / "parties" / key.hex()).glob("blobs.db*"):
            file.unlink()
    with echostore.open(tmp_path / "bob") as bob, echostore.open(tmp_path / "ann") as ann:
        ann.listen("127.0.0.1:0")
        for key in before:
            assert bob.held(key).status.closed == (key in lost)
            if key not in lost:
                assert cid(bob.party(key)) == before[key]
        bob.connect(address(ann))
        until(lambda: not any(bob.held(key).status.lost for key in before))
        for key in before:
            converged(bob.party(key), ann.party(key))
            assert cid(bob.party(key)) == before[key]
            assert bob.party(key).get(made[key])["n"] == "bob's"


# by the command line


def test_what_is_lost_is_told_and_fetched_by_the_command_line(story: Story) -> None:
    story.lose_file()
    cli = Cli(story.home, story.folder / "state")
    shown = cli("party", "show", "--json")
    assert (shown.status, shown.json()["items"]) == (6, None)
    assert f"(epoch {story.number})" in shown.json()["lost"]
    assert f"epoch fetch {story.number} --from" in shown.json()["next_step"]
    told = cli("status")
    assert told.status == 6
    assert "is lost" in told.out
    assert "--connect HOST:PORT" in told.err
    checked = cli("doctor")
    assert checked.status == 6
    assert "fetched again by itself" in checked.out
    alone = cli("epoch", "fetch", str(story.number))
    assert alone.status != 0
    assert "no member is connected" in alone.err
    with serve(story.folder, "ann") as ann:
        fetched = cli("epoch", "fetch", str(story.number), "--from", ann.address, "--json").ok().json()
        assert (fetched["epoch"], fetched["items"]) == (story.number, ITEMS + 1)
        listed = {each["number"]: each["items"] for each in cli("epoch", "list", "--json").ok().json()["epochs"]}
        assert listed[story.number] == fetched["items"], "the party's own item is counted nowhere"
        assert fetched["fetched"] >= story.blobs
    assert cli("party", "show", "--snapshot", "--json").ok().json()["snapshot"] == story.cid
    assert cli("doctor", "--full").ok()
    assert cli("status").ok()


def test_a_service_mends_what_it_serves(story: Story) -> None:
    story.lose_file()
    with serve(story.folder, "bob") as bob:
        assert bob.cli("item", "tree").status == 6
        told = bob.cli("status", "--json")
        assert told.status == 6
        assert "once a member is connected" in told.json()["parties"][0]["lost"]
        with serve(story.folder, "ann", "--connect", bob.address) as ann:
            served_until(lambda: bob.cli("status").status == 0)
            served_until(lambda: _snapshot(bob) == _snapshot(ann))
        assert _snapshot(bob) == story.cid
        assert any(event["event"] == "a party stands on its epoch again" for event in bob.events())
        bob.cli("doctor", "--full").ok()


def _snapshot(running: Serve) -> str:
    found: str = running.cli("party", "show", "--snapshot", "--json").ok().json()["snapshot"]
    return found
