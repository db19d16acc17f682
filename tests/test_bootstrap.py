"""Standing on an epoch: a peer with the whole history, one that truncated it and one that never had it agree."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Compacted, Corrupt, NotFound
from echostore.kernel.ids import Cid, ItemId, item_text
from echostore.mesh.blob_exchange import Follow
from echostore.peer.base_following import newest_final, open_epoch
from echostore.peer.base_standing import install
from echostore.peer.bootstrap import believable, bootstrap
from echostore.peer.early_reading import EarlyReader
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.wire import tree, tree_nodes
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_of, is_cid
from echostore.wire.generated import epoch_pb2 as pb
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree_reader import TreeReader
from network_peers import address, converged, invited, peers, until
from test_stale_messages import blobs_of, control_from
from two_peers import open_quiet, sync


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def fill(party: Party, count: int = 30) -> list[Any]:
    items = [party.create("property-set", type="task", n=number) for number in range(count)]
    text = party.create("text", type="note")
    text.insert(0, "hello world")
    array = party.create("growable-array", parent=items[0])
    array.append("one")
    log = party.create("threaded-log")
    log.post("first")
    party.flush()
    return [*items, text, array, log]


def test_adopting_an_epoch_changes_nothing(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        items = fill(party)
        before = party.snapshot().cid
        Epochs(party).create()
        assert party.runtime.processor.base is not None
        assert party.snapshot().cid == before
        items[3]["n"] = 77
        items[-3].insert(5, ",")
        after = party.snapshot().cid
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(ann.parties()[0].key)
        assert party.snapshot().cid == after
        assert party.runtime.processor.counters.rebuilds == 0
        folder = tmp_path / "ann" / "parties" / party.key.hex()
    for file in folder.glob("items.db*"):
        file.unlink()
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(ann.parties()[0].key)
        assert party.runtime.processor.counters.applied == 2
        assert party.snapshot().cid == after


def blobs_from(giver: Party, taker: Party) -> None:
    assert giver.runtime.blobs is not None
    assert taker.runtime.blobs is not None
    taker.runtime.blobs.put_many({cid: giver.runtime.blobs.get(cid) for cid, _ in giver.runtime.blobs.list()})


def test_a_newcomer_on_an_epoch_and_its_tail_has_the_same_state(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob:
        party = ann.create_party("Trip")
        items = fill(party)
        Epochs(party).create()
        items[3]["n"] = 77
        items[-3].insert(5, ",")
        items[4].delete()
        party.flush()
        theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
        for tip in party.sync_port.feeds():
            if tip.kind == "control" and tip.tip.length:
                payloads, head = party.sync_port.read(tip.feed, 0, 100, 1 << 20, tip.tip.link)
                theirs.sync_port.ingest(tip.feed, tip.kind, 0, payloads, head)
        blobs_from(party, theirs)
        found = newest_final(theirs.runtime)
        assert found is not None
        install(theirs.runtime.processor, open_epoch(theirs.runtime, found))
        sync(party, theirs)
        assert theirs.runtime.processor.counters.applied <= 3
        assert theirs.snapshot().cid == party.snapshot().cid
        mine = theirs.create("property-set", n=5)
        theirs.get(items[2].id)["n"] = 9
        sync(party, theirs)
        assert party.get(mine.id)["n"] == 5
        assert theirs.snapshot().cid == party.snapshot().cid
        cid = theirs.snapshot().cid
        assert theirs.query(type="task").where(n=77).count() == 1
    with open_quiet(tmp_path / "bob") as bob:
        assert bob.party(bob.parties()[0].key).snapshot().cid == cid


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("none", "does not name where it ends"),
        ("no CID", "does not name where it ends"),
        ("pages without CIDs", "a page that has no CID"),
        ("of another epoch", "is not where it ends"),
    ],
)
def test_an_epoch_with_a_false_cut_is_not_stood_on(tmp_path: Path, lie: str, why: str) -> None:
    """And nobody is asked for what is no CID: whoever is, takes it for an attack and hangs up."""
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob:
        party = ann.create_party("Trip")
        items = fill(party)
        Epochs(party).create()
        items[3]["n"] = 77
        Epochs(party).create()
        first, epoch = Epochs(party).chain()
        assert party.runtime.blobs is not None
        pages = pb.EpochCut(pages=[b"junk", b""]).SerializeToString()
        party.runtime.blobs.put_many({cid_of(pages, PROTOBUF): pages})
        cuts = {"none": b"", "no CID": b"x" * 36, "pages without CIDs": cid_of(pages, PROTOBUF)}
        lying = replace(epoch, genesis=replace(epoch.genesis, cut=cuts.get(lie, first.genesis.cut)))
        theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
        control_from(party, theirs)
        fetch = blobs_of(party, theirs)

        def checked(cids: list[Cid], follow: Follow | None = None) -> None:
            assert all(map(is_cid, cids))
            fetch(cids, follow)

        with pytest.raises(Corrupt, match=why):
            bootstrap(theirs, lying, checked)
        assert theirs.runtime.processor.base is None
        bootstrap(theirs, epoch, checked)
        assert theirs.snapshot().cid == party.snapshot().cid


def test_a_page_that_breaks_the_rules_is_found_before_anything_stands_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are what its CID names and its parent promised; only its items are out of order."""
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob:
        party = ann.create_party("Trip")
        fill(party, 200)
        theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
        with monkeypatch.context() as lying:
            lying.setattr(tree, "page_bytes", lambda items, large: tree_nodes.page_bytes(list(items)[::-1], large))
            Epochs(party).create()
        for tip in party.sync_port.feeds():
            if tip.kind == "control" and tip.tip.length:
                payloads, head = party.sync_port.read(tip.feed, 0, 100, 1 << 20, tip.tip.link)
                theirs.sync_port.ingest(tip.feed, tip.kind, 0, payloads, head)
        epoch = believable(theirs.runtime)
        assert epoch is not None
        fetched: list[Cid] = []

        def fetch(cids: list[Cid], follow: Follow | None = None) -> None:
            waiting = list(cids)
            while waiting:
                cid = waiting.pop()
                data = party.runtime.blobs.get(cid)
                theirs.runtime.blobs.put_many({cid: data})
                fetched.append(cid)
                waiting += follow(cid, data) if follow is not None else ()

        with pytest.raises(Corrupt, match="out of order"):
            bootstrap(theirs, epoch, fetch)
        assert len(fetched) > 5, "the pages came"
        assert theirs.runtime.processor.base is None
        assert all(held.base == 0 for held in theirs.runtime.feeds.feeds())


# truncation


def epoch_after(party: Party, item: object, number: int) -> None:
    item["n"] = number  # type: ignore[index]  # a property set
    Epochs(party).create()


def test_gc_truncates_below_the_epoch_before_the_base(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        items = fill(party)
        assert plan_gc(party).epoch is None
        Epochs(party).create()
        assert "one epoch old" in plan_gc(party).why
        own = party.runtime.data.cursor
        first = own.length
        epoch_after(party, items[0], 50)
        items[1]["n"] = 51
        before = party.snapshot().cid
        plan = plan_gc(party)
        assert (plan.epoch, plan.blocks - plan.control_blocks, plan.control_blocks) == (1, first, 1)
        assert party.runtime.feeds.feed(own.key).base == 0
        done = run_gc(party)
        assert done.disk_after < done.disk_before
        assert (done.blocks, done.blobs) == (plan.blocks, plan.blobs)
        assert party.runtime.feeds.feed(own.key).base == first
        assert party.runtime.feeds.verify(own.key).sound
        assert plan_gc(party).blocks == 0
        assert party.snapshot().cid == before
        items[1]["n"] = 52
        after = party.snapshot().cid
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(ann.parties()[0].key)
        assert party.snapshot().cid == after
        assert party.runtime.processor.counters.rebuilds == 0
        assert party.undo()
        assert party.get(items[1].id)["n"] == 51
        folder = tmp_path / "ann" / "parties" / party.key.hex()
    for file in folder.glob("items.db*"):
        file.unlink()
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(ann.parties()[0].key)
        assert party.get(items[1].id)["n"] == 51
        assert party.query(type="task").count() == 30


# over the network


def test_a_guest_starts_from_the_epoch_and_takes_only_the_tail(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        items = fill(party, 60)
        Epochs(party).create()
        items[1]["n"] = 1000
        guest = invited(ann, party, bob)
        assert bob.network.bootstraps.outcomes[party.key].epoch == 1
        feed = party.runtime.data.cursor
        assert guest.runtime.feeds.feed(feed.key).base == feed.length - 1
        assert guest.runtime.processor.counters.applied == 1
        assert guest.get(items[1].id)["n"] == 1000
        assert str(guest.get(items[-3].id)) == "hello world"
        guest.get(items[2].id)["n"] = 5
        converged(party, guest)
        assert items[2]["n"] == 5


def test_without_an_epoch_a_guest_replays_the_history_and_says_so(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        fill(party, 3)
        invited(ann, party, bob)
        outcome = bob.network.bootstraps.outcomes[party.key]
        assert outcome.epoch is None
        assert "no epoch" in outcome.why


def test_a_truncated_peer_serves_a_guest(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        items = fill(party)
        Epochs(party).create()
        epoch_after(party, items[0], 50)
        run_gc(party)
        items[3]["n"] = 99
        guest = invited(ann, party, bob)
        assert bob.network.bootstraps.outcomes[party.key].epoch == 2
        assert guest.get(items[3].id)["n"] == 99
        assert guest.get(items[0].id)["n"] == 50


def waiting_guest(host: Party, guest_home: Path) -> None:
    """A device that is admitted and holds nothing yet."""
    with echostore.open(guest_home, name="guest", background=False) as guest:
        guest.enter(host.members.admit(guest.request_join(host.key)))
        host.flush()


def story_with_view(party: Party) -> tuple[Any, Any]:
    party.peer.view_classes.register("example.org/planner")
    view = party.create_view("example.org/planner", "Planner")
    text = party.create("text", parent=view)
    text.insert(0, "in the view " * 1000)
    for number in range(40):
        party.create("text", parent=None).insert(0, f"elsewhere {number} " * 1000)
    return view, text


def test_a_view_opens_on_a_device_that_holds_nothing_but_its_locator(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        party = ann.create_party("Trip")
        view, text = story_with_view(party)
        Epochs(party).create()
        waiting_guest(party, tmp_path / "guest")
        cli = Cli(tmp_path / "guest", tmp_path / "state")
        shown = cli("view", "open", view.locator, "--from", address(ann), "--json").ok().json()
        assert (shown["display_name"], shown["epoch"]) == ("Planner", 1)
        assert shown["items"] == [item_text(view.id), item_text(text.id)]


def test_a_view_is_read_before_the_rest_of_the_epoch_is_here(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        view, text = story_with_view(party)
        Epochs(party).create()
        theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
        control_from(party, theirs)
        asked: list[Cid] = []

        def fetch(cids: list[Cid], follow: Any = None) -> None:
            assert party.runtime.blobs is not None
            assert theirs.runtime.blobs is not None
            while cids:
                asked.extend(cids)
                theirs.runtime.blobs.put_many({cid: party.runtime.blobs.get(cid) for cid in cids})
                cids = [below for cid in cids for below in follow(cid, party.runtime.blobs.get(cid))] if follow else []

        epoch = believable(theirs.runtime)
        assert epoch is not None
        reader = EarlyReader(theirs, epoch, fetch)
        alone = reader.item(view.id)
        assert alone.model.value()["display_name"] == "Planner"
        few = len(asked)
        records = reader.view(view._record().genesis.inception_key)
        assert list(records) == [view.id, text.id]
        assert str(records[text.id].model.value()) == "in the view " * 1000
        assert len([cid for cid in asked if cid_codec(cid) == RAW]) == 1, "one large state, of forty-one"
        assert few < len(asked)
        with pytest.raises(NotFound):
            reader.item(ItemId(bytes(16)))
        with pytest.raises(NotFound):
            reader.view(b"k" * 32)


def test_a_particular_epoch_is_fetched_and_can_be_read(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        party = ann.create_party("Trip")
        others = [party.create("property-set", text="x" * 500) for _ in range(60)]
        item = party.create("property-set", n=0)
        epoch_after(party, item, 1)
        for other in others:
            other["text"] = "y" * 500
        epoch_after(party, item, 2)
        root = read_state_root(party.runtime.blobs.get(Epochs(party).get(1).genesis.snapshot))
        tree_of_first = list(TreeReader(root.index_root, party.runtime.blobs.get).reachable())
        assert len(tree_of_first) > 2, "there is something to fetch below the top"
        with echostore.open(tmp_path / "guest", name="guest") as guest:
            guest.listen("127.0.0.1:0")
            joined = invited(ann, party, guest)
            assert guest.network.bootstraps.outcomes[party.key].epoch == 2
            assert len(joined.runtime.blobs.missing(tree_of_first)) > 2
        with echostore.open(tmp_path / "guest") as guest, pytest.raises(Compacted):
            guest.party("@Trip").as_of(1)
        cli = Cli(tmp_path / "guest", tmp_path / "state")
        got = cli("epoch", "fetch", "1", "--from", address(ann), "--json").ok().json()
        assert (got["epoch"], got["items"]) == (1, 61)
        assert got["fetched"] > 2
        assert cli("epoch", "fetch", "1", "--json").ok().json()["fetched"] == 0
        assert cli("epoch", "fetch", "7").status == 3
        with echostore.open(tmp_path / "guest") as guest:
            past = guest.party("@Trip").as_of(1)
            assert past.get(item.id)["n"] == 1
            assert {past.get(other.id)["text"] for other in others} == {"x" * 500}
            assert guest.party("@Trip").runtime.blobs.missing(tree_of_first) == []


def test_a_start_that_fails_for_no_known_reason_stops_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann") as (ann,):
        party, bootstraps = ann.create_party("Trip"), ann.network.bootstraps
        failed: list[object] = []
        looked: list[Party] = []

        def looks(each: Party) -> None:
            looked.append(each)
            assert len(looked) > 1, "a mistake in the program"

        monkeypatch.setattr(threading, "excepthook", failed.append)
        monkeypatch.setattr(bootstraps, "_one", looks)
        bootstraps._start(party.key)
        until(lambda: failed)
        bootstraps._start(party.key)
        until(lambda: len(looked) == 2)
