"""Epochs below where control feeds begin: named by the records above them, fetched from whoever kept them, read as moments."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Compacted, Corrupt, NotFound, TimedOut
from echostore.kernel.ids import Cid
from echostore.mesh.blob_exchange import Unavailable
from echostore.peer import older_epochs
from echostore.peer.bootstrap import fetch_epoch
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.older_epochs import first_known, kept_records, record_of_older
from echostore.peer.party import Party
from echostore.wire.cids import PROTOBUF, cid_of, cid_text
from echostore.wire.epochs import encode_epoch_record, read_epoch_record
from network_peers import address, converged, invited, peers
from peer_builder import Circle
from test_stale_messages import agreed_epoch, blobs_of
from two_peers import open_quiet

EPOCHS = 6


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    """Six epochs, in each of which the item has the epoch's number; ann has freed what she could, bob kept everything."""
    with Circle(tmp_path, "ann", "bob", roles={"bob": "admin"}) as found:
        item = found.party("ann").create("property-set", type="task", n=0)
        for number in range(1, EPOCHS + 1):
            item["n"] = number
            if number == 2:
                found.party("ann").create("text", type="note", parent=item).insert(0, "of the second")
            agreed_epoch(found, "ann", "bob")
        assert run_gc(found.party("ann")).control_blocks
        yield found


def value(party: Party) -> Any:
    (item,) = party.query(type="task").all()
    return item["n"]


def nobody(cids: list[Cid], follow: Any = None) -> None:
    raise Unavailable(set(cids))


def first_number(party: Party) -> int:
    first = first_known(party.runtime)
    assert first is not None
    return first.number


def test_an_epoch_below_the_floor_is_fetched_and_read_as_its_moment(circle: Circle) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    assert first_number(ann) > 3
    wanted = {epoch.number: epoch.genesis.snapshot for epoch in Epochs(bob).chain()}
    for number in (2, 1, 3):
        with pytest.raises(Compacted, match=f"`echostore epoch fetch {number}"):
            ann.as_of(f"epoch:{number}")
        base = fetch_epoch(ann, number, blobs_of(bob, ann))
        assert base.name.snapshot == wanted[number]
        for past in (ann.as_of(number), ann.as_of(f"epoch:{number}")):
            assert value(past) == number
            assert past.query(type="note").count() == (number > 1)
            assert past.snapshot().cid == cid_text(wanted[number])
            assert past.timeframe == bob.as_of(number).timeframe
    assert value(ann) == EPOCHS, "the party of today is what it was"
    assert value(ann.as_of(EPOCHS)) == EPOCHS
    for number in range(first_number(ann), EPOCHS + 1):
        fetch_epoch(ann, number, blobs_of(bob, ann))
        assert value(ann.as_of(number)) == number, "also the one that control tells of and can't be folded to"


def test_what_only_control_could_tell_of_such_a_moment_is_not_told(circle: Circle) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    fetch_epoch(ann, 1, blobs_of(bob, ann))
    past = ann.as_of(1)
    with pytest.raises(Compacted, match="control messages that are gone"):
        past.members.all()
    assert len(bob.as_of(1).members.all()) == 2


def test_an_epoch_that_was_never_made_is_not_found(circle: Circle) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    for number in (0, EPOCHS + 1, 10**9):
        with pytest.raises(NotFound):
            fetch_epoch(ann, number, blobs_of(bob, ann))
        with pytest.raises(NotFound):
            ann.as_of(number)


def test_nobody_has_it_is_said_and_the_next_try_goes_on(circle: Circle) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    with pytest.raises(TimedOut, match=r"^1 blob of epoch 1 came from nobody") as said:
        fetch_epoch(ann, 1, nobody)
    assert "kept" in said.value.next_step
    fetch_epoch(ann, 1, blobs_of(bob, ann))
    assert value(ann.as_of(1)) == 1


def test_gc_keeps_the_newest_records_and_drops_what_was_fetched(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    blobs = ann.runtime.blobs
    assert blobs is not None
    kept = kept_records(ann.runtime)
    assert [read_epoch_record(blobs.get(cid)).number for cid in kept] == list(range(EPOCHS, 0, -1))
    assert record_of_older(ann.runtime, 1, blobs.get).snapshot == Epochs(bob).get(1).genesis.snapshot
    fetch_epoch(ann, 1, blobs_of(bob, ann))
    plan = plan_gc(ann)
    assert run_gc(ann).blobs == plan.blobs > 0
    with pytest.raises(Compacted):
        ann.as_of(1)
    monkeypatch.setattr(older_epochs, "RECORDS_KEPT_MAX", 4)
    run_gc(ann)
    assert [cid for cid in kept if blobs.has(cid)] == kept[:4]
    fetch_epoch(ann, 1, blobs_of(bob, ann))
    assert value(ann.as_of(1)) == 1, "records that are not here are asked for"


def test_an_epoch_of_a_child_party_below_its_parents_floor_is_read(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        child = ann.create_child(party, "Tasks")
        item = child.create("property-set", type="task", n=0)
        for number in range(1, 4):
            item["n"] = number
            Epochs(child).create()
            party.create("property-set", n=number)
            Epochs(party).create()
        assert run_gc(party).control_blocks
        assert first_number(child) == 2
        past = child.as_of(1)
        assert value(past) == 1
        with pytest.raises(Compacted, match="control messages that are gone"):
            past.members.all()
        assert value(child.as_of(2)) == 2, "one that control still tells of"
        assert value(child) == 3


@pytest.mark.parametrize("lie", ["another number", "another party", "no way back"])
def test_a_record_that_leads_elsewhere_is_refused(circle: Circle, lie: str) -> None:
    """Attested by all, which is what it would take."""
    ann = circle.party("ann")
    blobs, first = ann.runtime.blobs, first_known(ann.runtime)
    assert blobs is not None
    assert first is not None
    true = read_epoch_record(blobs.get(Cid(first.genesis.record)))
    changes: dict[str, Any] = {
        "another number": {"number": true.number - 1},
        "another party": {"party": bytes(32)},
        "no way back": {"previous_record": None},
    }
    record = {name: getattr(true, name) for name in true.__slots__} | changes[lie]
    data = encode_epoch_record(type(true)(**record))
    why = "does not name the one before" if lie == "no way back" else "that of another one"
    with pytest.raises(Corrupt, match=why):
        record_of_older(ann.runtime, 1, lambda cid: data)
    assert cid_of(data, PROTOBUF) != first.genesis.record, "its CID gives it away before"


def test_a_newcomer_fetches_an_old_epoch_by_number_over_the_network(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve", "bob") as (ann, eve, bob):
        party = ann.create_party("Trip")
        item = party.create("property-set", type="task", n=0)
        for number in range(1, 5):
            item["n"] = number
            made = Epochs(party).create()
            assert made.number == number
        kept = invited(ann, party, eve, role="admin")  # replayed from its beginning, or started: she keeps what she has
        assert value(kept) == 4
        old = cid_text(Epochs(party).get(1).genesis.snapshot)
        theirs, mine = kept.runtime.blobs, party.runtime.blobs
        assert theirs is not None
        assert mine is not None
        theirs.put_many({cid: mine.get(cid) for cid, _ in mine.list() if not theirs.has(cid)})
        assert run_gc(party).control_blocks
        guest = invited(ann, party, bob)
        converged(party, guest)
        assert first_number(guest) > 1
        bob.connect(address(eve))
        assert Epochs(guest).fetch(1).items == 1
        past = guest.as_of("epoch:1")
        assert value(past) == 1
        assert past.snapshot().cid == old
