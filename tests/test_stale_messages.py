"""Messages that reach a peer on an epoch late: at the cut, around it, from strangers to it, from sleepers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_floors import control_from
from echostore.kernel.errors import NotFound
from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.order import Cut, FeedCursor, Orderer
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.port import Rejection
from echostore.peer.bootstrap import believable, bootstrap
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from network_peers import cid
from peer_builder import Circle, Liar, head_of, reasons
from two_peers import open_quiet, sync


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    """Ann and Bob attest; Cat sleeps when it matters."""
    with Circle(tmp_path, "ann", "bob", "cat") as made:
        yield made


def agreed_epoch(circle: Circle, *names: str) -> int:
    """An epoch by the first, attested by the others, which stand on it then."""
    first = circle.party(names[0])
    number = Epochs(first).create().number
    parties = [circle.party(name) for name in names]
    for _ in range(2):
        sync(*parties)
        for party in parties[1:]:
            Epochs(party).review()
    sync(*parties)
    for party in parties:
        base = party.runtime.processor.base
        assert base is not None
        assert base.name.number == number
    return number


def blobs_of(giver: Party, taker: Party) -> Any:
    """What a network fetches, from one store to another."""

    def fetch(cids: list[Any], follow: Any = None) -> None:
        assert giver.runtime.blobs is not None
        assert taker.runtime.blobs is not None
        while cids:
            missing = taker.runtime.blobs.missing(cids)
            taker.runtime.blobs.put_many({each: giver.runtime.blobs.get(each) for each in missing})
            cids = [below for each in cids for below in follow(each, giver.runtime.blobs.get(each))] if follow else []

    return fetch


def started(giver: Party, taker: Party) -> None:
    """The taker starts from the newest epoch."""
    control_from(giver, taker)
    epoch = believable(taker.runtime)
    assert epoch is not None
    assert bootstrap(taker, epoch, blobs_of(giver, taker)).epoch == epoch.number


def test_blocks_at_and_below_the_cut_are_inside_already(circle: Circle) -> None:
    item = circle.party("ann").create("property-set", n=0)
    for number in range(5):
        item["n"] = number
    circle.meet_all()
    circle.party("bob").get(item.id)["m"] = 1
    sync(circle.party("ann"), circle.party("bob"))
    agreed_epoch(circle, "ann", "bob")
    with open_quiet(circle.folder / "dan") as dan:
        ann = circle.party("ann")
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        own = circle.party("bob").runtime.data.cursor
        before = cid(theirs)
        cut = theirs.runtime.processor.base.length(own.id)
        for start in (cut - 1, 0):
            payloads, head = circle.party("bob").sync_port.read(own.key, start, 100, 1 << 20, own.link)
            result = theirs.sync_port.ingest(own.key, "data", start, payloads, head)
            assert isinstance(result, Rejection), "what an epoch stands for is not taken again"
        assert cid(theirs) == before
        assert theirs.get(item.id)["m"] == 1


def test_one_above_the_cut_applies_though_its_writer_had_not_heard_of_the_epoch(circle: Circle) -> None:
    item = circle.party("ann").create("property-set", n=0)
    circle.meet_all()
    circle.party("cat").get(item.id)["late"] = True
    agreed_epoch(circle, "ann", "bob")
    with open_quiet(circle.folder / "dan") as dan:
        ann = circle.party("ann")
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        sync(theirs, circle.party("cat"), ann, circle.party("bob"))
        assert theirs.get(item.id)["late"] is True
        assert cid(theirs) == cid(circle.party("cat")) == cid(ann)
        assert reasons(theirs) == []


def test_one_below_the_cut_on_another_branch_changes_nothing(circle: Circle) -> None:
    """A second branch that parts below the cut: the epoch pins the one it holds."""
    item = circle.party("ann").create("property-set", n=0)
    circle.meet_all()
    liar = Liar.of(circle, "cat")
    fork = Liar.of(circle, "cat")
    assert not isinstance(liar.send(liar.message(liar.set(item.id, m=1)), to="ann"), Rejection)
    sync(circle.party("ann"), circle.party("bob"))
    agreed_epoch(circle, "ann", "bob")
    with open_quiet(circle.folder / "dan") as dan:
        ann = circle.party("ann")
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        start, payloads, head = fork.signed(fork.message(fork.set(item.id, m=666)))
        assert isinstance(theirs.sync_port.ingest(fork.key, "data", start, payloads, head), Rejection)
        assert theirs.get(item.id)["m"] == 1


def test_a_feed_that_the_epoch_never_saw_counts_from_its_first_block(circle: Circle) -> None:
    item = circle.party("ann").create("property-set", n=0)
    circle.meet_all()
    with open_quiet(circle.folder / "eve") as eve:
        ann = circle.party("ann")
        hers = eve.enter(ann.members.admit(eve.request_join(circle.key)))
        sync(ann, hers)
        hers.get(item.id)["from_eve"] = 1
        agreed_epoch(circle, "ann", "bob", "cat")
        with open_quiet(circle.folder / "dan") as dan:
            theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
            started(ann, theirs)
            assert hers.runtime.data.feed not in theirs.runtime.processor.base.cuts
            sync(theirs, hers, ann)
            assert theirs.get(item.id)["from_eve"] == 1
            assert cid(theirs) == cid(ann)


def test_a_dependency_below_the_cut_is_checked_by_the_bound_alone(circle: Circle) -> None:
    """O8: a depth that lies within the bound passes on every peer, whether it has the block or not."""
    ann, bob = circle.party("ann"), circle.party("bob")
    item = ann.create("property-set", n=0)
    for number in range(4):
        item["n"] = number
    circle.meet_all()
    agreed_epoch(circle, "ann", "bob")
    feed = ann.runtime.data.feed
    tip = head_of(ann, feed)
    liar = Liar.of(circle, "cat")
    known = {d.feed: d for d in circle.party("cat").runtime.data.cursor.asserted.values()}
    assert feed not in known, "cat has not written yet"
    below = tip._replace(seq=tip.seq - 1, depth=1, link_prefix=bytes(16))
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        sync(ann, bob, theirs)
        blocks = liar.signed(liar.message(liar.set(item.id, n=77), after=[below], depth=2))
        for party in (ann, bob, theirs):
            party.sync_port.ingest(liar.key, "data", *blocks[:1], *blocks[1:])
        assert {party.get(item.id)["n"] for party in (ann, bob, theirs)} == {ann.get(item.id)["n"]}
        assert len({cid(party) for party in (ann, bob, theirs)}) == 1
        assert ann.runtime.processor.orderer.cursors[liar.feed].ended is None


def test_a_peer_that_slept_through_three_epochs_keeps_its_own_writes(circle: Circle) -> None:
    ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
    item = ann.create("property-set", n=0)
    circle.meet_all()
    cat.get(item.id)["dream"] = "unsent"
    mine = cat.create("property-set", type="dream")
    for number in range(1, 4):
        item["n"] = number
        agreed_epoch(circle, "ann", "bob")
    for party in (ann, bob):
        run_gc(party)
    feed = ann.runtime.data.cursor
    assert ann.runtime.feeds.feed(feed.key).base > cat.runtime.feeds.length(feed.key), "what it lacks is gone"
    control_from(ann, cat)
    epoch = believable(cat.runtime)
    assert epoch is not None
    assert epoch.number == 3
    bootstrap(cat, epoch, blobs_of(ann, cat))
    sync(ann, bob, cat)
    assert ann.get(item.id)["dream"] == "unsent"
    assert ann.get(mine.id).type == "dream"
    assert cat.get(item.id)["n"] == 3
    assert cid(ann) == cid(bob) == cid(cat)


def test_disjoint_heads_meet_on_the_same_state(circle: Circle) -> None:
    """Two peers that each hold an end of the party the other does not, on either side of an epoch."""
    ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
    items = [ann.create("property-set", n=number) for number in range(3)]
    circle.meet_all()
    items[0]["n"] = 10
    bob.get(items[1].id)["n"] = 11
    agreed_epoch(circle, "ann", "bob")
    items[0]["n"] = 20
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        cat.get(items[2].id)["n"] = 12
        theirs.get(items[1].id)["n"] = 21
        control_from(ann, cat)
        sync(theirs, cat)
        sync(ann, bob, theirs, cat)
        assert [ann.get(item.id)["n"] for item in items] == [20, 21, 12]
        assert len({cid(party) for party in (ann, bob, cat, theirs)}) == 1


def test_live_queries_and_handles_outlive_a_new_epoch(circle: Circle) -> None:
    ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
    items = [ann.create("property-set", type="task", n=number) for number in range(20)]
    circle.meet_all()
    handle = cat.get(items[0].id)
    changes: list[Any] = []
    with cat.query(type="task").subscribe(changes.append):
        for number in range(1, 4):
            items[0]["n"] = 100 + number
            agreed_epoch(circle, "ann", "bob")
        for party in (ann, bob):
            run_gc(party)
        started(ann, cat)
        sync(ann, cat)
    assert handle["n"] == 103
    assert not any(change.added or change.removed for change in changes), "nothing came or went"
    assert {item.id for change in changes for item in change.changed} == {items[0].id}


def test_a_missing_epoch_is_said(circle: Circle) -> None:
    with pytest.raises(NotFound):
        circle.party("ann").as_of(1)


def test_a_late_rule_does_not_reach_into_the_epoch(circle: Circle) -> None:
    """Cat narrowed who may write, unheard; by canonical order that would refuse what the epoch contains."""
    ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
    item = cat.create("property-set", n=0)
    circle.meet_all()
    item.restrict(roles=["admin"])
    for number in range(5):
        bob.get(item.id)["n"] = number
    sync(ann, bob)
    agreed_epoch(circle, "ann", "bob")
    sync(ann, bob, cat)
    assert item["n"] == 0, "refused before the epoch was looked at"
    Epochs(cat).review()
    assert cat.runtime.processor.base is not None
    assert item["n"] == 4, "inside the epoch, it counts for good"
    sync(ann, bob, cat)
    assert cid(ann) == cid(bob) == cid(cat)


def test_a_new_base_lets_a_feed_go_on_that_had_ended_over_a_depth_below_it() -> None:
    def none(*_: Any) -> Any:
        raise AssertionError("nothing is read")

    orderer = Orderer(fetch=none, lookup=none)
    lied = FeedCursor(FeedKey(b"l" * 32), "data", length=3, held=3, ended=Reason.LYING_DEPTH)
    broken = FeedCursor(FeedKey(b"b" * 32), "data", length=3, held=3, ended=Reason.UNDECODABLE)
    orderer.add(lied)
    orderer.add(broken)
    orderer.set_base({lied.id: Cut(2, Link(bytes(32)), 2)})
    assert (lied.ended, broken.ended) == (None, Reason.UNDECODABLE)
    assert orderer.mark(lied.id, 1).depth == 2


def test_a_feed_that_forks_above_where_it_begins_here_is_followed_from_there(circle: Circle) -> None:
    """Blocks below the cut are gone, or never came: the other branch shares them, and they are not asked for."""
    ann = circle.party("ann")
    item = ann.create("property-set", n=0)
    circle.meet_all()
    for number in range(3):
        circle.get("cat", item)["n"] = number
    circle.meet_all()
    agreed_epoch(circle, "ann", "bob")
    honest, fork = Liar.of(circle, "cat"), Liar.of(circle, "cat")
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        assert theirs.runtime.feeds.feed(honest.key).base == honest.length
        blocks = honest.signed(honest.message(honest.set(item.id, m=1)))
        rival = fork.signed(fork.message(fork.set(item.id, m=2)))
        for party, told in ((ann, (blocks, rival)), (theirs, (rival, blocks))):
            for start, payloads, head in told:
                party.sync_port.ingest(honest.key, "data", start, payloads, head)
        sync(ann, circle.party("bob"), theirs)
        assert cid(theirs) == cid(ann)
        before = cid(theirs)
    with open_quiet(circle.folder / "dan") as dan:
        assert cid(dan.party(circle.key)) == before, "and it opens again"
