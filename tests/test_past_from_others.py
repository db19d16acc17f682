"""A past that is not here is fetched from members that kept it; who does not get it is told whether anybody was asked."""

from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Compacted
from echostore.kernel.ids import Cid
from echostore.mesh.blob_exchange import Unavailable
from echostore.peer import asking_past
from echostore.peer.bootstrap import fetch_epoch
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.network import Network
from echostore.peer.party import Party
from echostore.wire.cids import cid_text
from network_peers import address, invited, peers, until
from served import agreed, let_in, serve

ITEMS = 60
"""Enough that the tree of items has more than one node."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(asking_past, "PATIENCE_S", 0.6)


def story(party: Party) -> Any:
    """Two epochs: in the first an item that the second leaves out."""
    gone = party.create("property-set", type="gone", n=1)
    for number in range(ITEMS):
        party.create("property-set", type="kept", number=number, text="x" * 400)
    Epochs(party).create()
    gone["n"] = 2
    between = party.anchor()
    gone.delete()
    written = party.runtime.now_ms()
    now = until(lambda: now if (now := party.runtime.now_ms()) > written else 0)
    Epochs(party).create(discard_before_ms=now)
    assert not party.has(gone.id)
    return gone, between


def test_a_discarded_past_is_read_from_the_earlier_snapshot_that_a_member_kept(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        gone, between = story(party)
        theirs = invited(ann, party, bob)
        assert theirs.status.began.startswith("from epoch 2")
        first = Epochs(party).get(1)
        assert not theirs.runtime.blobs.has(first.genesis.snapshot)
        past = theirs.as_of("epoch:1")
        assert past.get(gone.id).value() == {"n": 1}
        assert past.snapshot().cid == cid_text(first.genesis.snapshot)
        assert not theirs.as_of(2).has(gone.id)
        assert not theirs.has(gone.id), "the party of today is what it was"
        assert past.timeframe == theirs.as_of(past.timeframe).timeframe, "a timeframe finds the epoch as well"
        with pytest.raises(Compacted, match="no snapshot was taken"):
            theirs.as_of(between)


def test_a_difference_to_a_discarded_past_is_told(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        item = party.create("property-set", n=0)
        for number in (1, 2):
            item["n"] = number
            Epochs(party).create()
        theirs = invited(ann, party, bob)
        (change,) = theirs.get(item.id).diff(1)
        assert (change.before, change.after) == (1, 2)


def test_an_epoch_below_where_control_begins_is_fetched_too(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve", "bob") as (ann, eve, bob):
        party = ann.create_party("Trip")
        item = party.create("property-set", n=0)
        for number in range(1, 5):
            item["n"] = number
            Epochs(party).create()
        kept = invited(ann, party, eve, role="admin")
        theirs, mine = kept.runtime.blobs, party.runtime.blobs
        assert theirs is not None
        assert mine is not None
        theirs.put_many({cid: mine.get(cid) for cid, _ in mine.list() if not theirs.has(cid)})
        assert run_gc(party).control_blocks
        guest = invited(ann, party, bob)
        with pytest.raises(Compacted, match="nobody who is connected has it"):
            guest.as_of(1)
        bob.connect(address(eve))
        assert guest.as_of(1).get(item.id)["n"] == 1


def test_off_the_network_nobody_is_asked_and_that_is_said(tmp_path: Path) -> None:
    import echostore

    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        story(party)
        invited(ann, party, bob)
    with echostore.open(tmp_path / "bob") as bob:
        with pytest.raises(Compacted, match="nobody was asked: this peer is not on the network") as said:
            bob.party(party.key).as_of(1)
        assert "epoch fetch 1" in said.value.next_step
        bob.listen("127.0.0.1:0")
        with pytest.raises(Compacted, match="nobody who is connected has it"):
            bob.party(party.key).as_of(1)


def test_what_came_before_a_fetch_was_cut_short_is_kept_and_not_taken_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        gone, _ = story(party)
        theirs = invited(ann, party, bob)
        heads, fetch = [0], Network.fetch

        def short(self: Network, party: Any, cids: Any, **named: Any) -> int:
            heads[0] += 1
            if named.get("follow") is not None:
                raise Unavailable({Cid(b"lost")})
            return fetch(self, party, cids, **named)

        with monkeypatch.context() as patched:
            patched.setattr(Network, "fetch", short)
            for _ in range(2):
                with pytest.raises(Compacted, match="nobody who is connected"):
                    theirs.as_of(1)
        assert theirs.runtime.blobs.has(Epochs(party).get(1).genesis.snapshot), "what came is kept"
        assert theirs.as_of(1).get(gone.id)["n"] == 1


def test_inside_a_batch_nothing_is_waited_for(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        story(party)
        theirs = invited(ann, party, bob)
        with theirs.lock, pytest.raises(Compacted, match="inside a batch"):
            theirs.as_of(1)


def test_fetching_an_epoch_brings_all_of_its_tree(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        gone, _ = story(party)
        theirs = invited(ann, party, bob)
        fetched = Epochs(theirs).fetch(1)
        assert fetched.items == ITEMS + 1
        bob.network.disconnect(address(ann))
        until(lambda: not bob.network.connections())
        assert theirs.as_of(1).get(gone.id)["n"] == 1
        assert Epochs(theirs).fetch(1).blobs == 0, "all of it is here"


def test_the_command_line_reads_it_through_the_running_service(tmp_path: Path) -> None:
    with serve(tmp_path, "ann") as ann, serve(tmp_path, "bob") as bob:
        party = ann.cli("party", "create", "Trip", "--json").ok().json()["party"]
        gone = ann.cli("item", "create", "property-set", "title=Tickets", "--json").ok().json()["item"]
        ann.cli("epoch", "create").ok()
        ann.cli("item", "delete", gone, "--yes").ok()
        ann.cli("epoch", "create", "--discard-before", "now", "--yes").ok()
        let_in(ann, party, bob)
        agreed(party, ann.cli, bob.cli)
        assert bob.cli("item", "get", gone).status == 3
        assert "Tickets" in bob.cli("item", "get", gone, "--at", "epoch:1").ok().out
        assert "Tickets" in bob.cli("item", "get", "@Tickets", "--at", "epoch:1").ok().out
        assert "Tickets" in bob.cli("item", "tree", "--at", "epoch:1").ok().out
        ann.stop()
        assert "Tickets" in bob.cli("item", "get", gone, "--at", "epoch:1").ok().out, "it was kept"


def test_the_command_line_says_that_nobody_was_asked(tmp_path: Path) -> None:
    with serve(tmp_path, "ann") as ann, serve(tmp_path, "bob") as bob:
        party = ann.cli("party", "create", "Trip", "--json").ok().json()["party"]
        item = ann.cli("item", "create", "property-set", "n=1", "--json").ok().json()["item"]
        ann.cli("epoch", "create").ok()
        ann.cli("item", "set", item, "n=2").ok()
        ann.cli("epoch", "create").ok()
        let_in(ann, party, bob)
        agreed(party, ann.cli, bob.cli)
        bob.stop()
        said = bob.cli("item", "get", item, "--at", "epoch:1")
        assert said.status == 3
        assert "nobody was asked" in said.err
        assert "epoch fetch 1 --from" in said.err


def test_an_epoch_that_is_whole_is_never_marked_as_cut_short(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        story(party)
        theirs = invited(ann, party, bob)
        base = theirs.runtime.processor.base
        assert base is not None

        def dies(cids: list[Cid], follow: Any = None) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fetch_epoch(theirs, 2, dies)
        assert theirs.runtime.feeds.about_under("fetching:") == {}
