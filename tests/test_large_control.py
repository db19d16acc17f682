"""Control states of more than one blob: named, agreed on, truncated at and started from like small ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_floors import admit_many, told
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.peer.control_floor import Floor, fetch_floor, kept_blobs
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.wire import control_blobs
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_of
from echostore.wire.control_blobs import as_blobs, chunks_named, name_of, read_blobs
from echostore.wire.control_evidence import read_evidence
from echostore.wire.control_state import EVIDENCE_KEY, FLOOR_KEY, read_control_state
from echostore.wire.generated import control_state_pb2 as pb
from echostore.wire.membership import membership_names
from network_peers import cid, converged, invited, peers
from peer_builder import Circle
from test_stale_messages import agreed_epoch, started
from two_peers import open_quiet, sync

SMALL = 1000
"""Bytes of a blob, where tests want many of them."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def small_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every control state and every evidence is in chunks."""
    monkeypatch.setattr(control_blobs, "BLOB_BYTES_MAX", SMALL)


def control_base(party: Party) -> int:
    return sum(held.base for held in party.runtime.feeds.feeds() if held.kind == "control")


def raw_blobs(party: Party) -> set[Cid]:
    assert party.runtime.blobs is not None
    return {found for found, _ in party.runtime.blobs.list() if cid_codec(found) == RAW}


# --- three thousand members -------------------------------------------------------------------------------------------


def test_a_party_of_three_thousand_is_truncated_and_started_from(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat", roles={"bob": "admin"}) as circle:
        ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
        item = ann.create("property-set", n=0)
        circle.meet_all()
        cat.get(item.id)["mine"] = True  # and cat sleeps
        cat.flush()
        admit_many(ann, 3000)
        for number in range(1, 3):
            item["n"] = number
            agreed_epoch(circle, "ann", "bob")
        first = Epochs(ann).chain()[0]
        assert all(epoch.final and epoch.genesis.control for epoch in Epochs(bob).chain())
        before = told(ann)
        done = run_gc(ann)
        assert (done.epoch, done.control_why) == (1, "")
        assert done.control_blocks == control_base(ann) > 3000 // 256
        assert told(ann) == before
        data = ann.runtime.feeds.about(FLOOR_KEY)
        assert len(data) > BLOB_BYTES_MAX
        assert name_of(data) == first.genesis.control
        snapshot = ann.snapshot()
        members = {*membership_names(snapshot.root.membership_root, snapshot.blob)} - {snapshot.root.membership_root}
        assert raw_blobs(ann) == members | {*as_blobs(data)} - {name_of(data)}
        assert len(members) == 2, "the membership of the snapshot is more than one blob too"
        started(ann, cat)
        sync(ann, cat)
        assert item["mine"] is True
        assert control_base(cat) == control_base(ann)
        with open_quiet(tmp_path / "dan") as dan:
            newcomer = dan.enter(ann.members.admit(dan.request_join(ann.key)))
            started(ann, newcomer)
            sync(ann, bob, newcomer)
            assert (control_base(newcomer), control_base(bob)) == (control_base(ann), 0)
            assert told(newcomer) == told(bob), "who started from the state, and who has all messages"
            assert cid(newcomer) == cid(ann)
            assert len(newcomer.members.all()) == 3004


# --- as blobs ---------------------------------------------------------------------------------------------------------


@given(size=st.integers(0, 5 * SMALL))
def test_bytes_have_one_name_and_are_found_by_it(size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_blobs, "BLOB_BYTES_MAX", SMALL)
        data = pb.ControlState(party=bytes(size)).SerializeToString()
        blobs = as_blobs(data)
        name = next(iter(blobs))
        assert name_of(data) == name
        assert all(cid_of(each, cid_codec(found)) == found for found, each in blobs.items())
        assert max(map(len, blobs.values())) <= SMALL
        assert read_blobs(name, blobs.__getitem__) == data
        if len(data) <= SMALL:
            assert blobs == {cid_of(data, PROTOBUF): data}, "what fits one blob is one"
        else:
            assert set(chunks_named(name, blobs[name])) == blobs.keys() - {name}


def test_what_fits_is_named_as_it_always_was() -> None:
    data = bytes(BLOB_BYTES_MAX)
    assert name_of(data) == cid_of(data, PROTOBUF)
    assert len(as_blobs(data + b"\0")) == 3, "a head, and two chunks"


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("chunks swapped", "other sizes"),
        ("last chunk missing", "more or fewer chunks"),
        ("a chunk too many", "more or fewer chunks"),
        ("chunk short", "other sizes"),
        ("chunk long", "not what its CID says"),
        ("half a CID", "more or fewer chunks"),
        ("chunk is a node", "has no CID"),
        ("chunk is nothing", "has no CID"),
        ("size of a blob", "says 1000 bytes"),
        ("size beyond all", "says 33554433 bytes"),
        ("no size", "says 0 bytes"),
        ("another field", "canonical"),
        ("bytes of another chunk", "not what its CID says"),
    ],
)
def test_a_head_that_nobody_writes_is_refused(small_blobs: None, lie: str, why: str) -> None:
    data = bytes(range(250)) * 10
    blobs = as_blobs(data)
    name = next(iter(blobs))
    head = pb.ControlChunks.FromString(blobs[name])
    first, second, third = chunks_named(name, blobs[name])
    asked: list[Cid] = []
    match lie:
        case "chunks swapped":
            head.chunks = third + second + first
        case "last chunk missing":
            head.chunks = first + second
        case "a chunk too many":
            head.chunks += first
        case "chunk short":
            blobs[cid_of(b"x")] = b"x"
            head.chunks = first + cid_of(b"x") + third
        case "chunk long":
            blobs[cid_of(bytes(1001))] = bytes(1001)
            head.chunks = first + cid_of(bytes(1001)) + third
        case "half a CID":
            head.chunks += first[:18]
        case "chunk is a node":
            head.chunks = first + cid_of(blobs[second], PROTOBUF) + third
        case "chunk is nothing":
            head.chunks = first + bytes(36) + third
        case "size of a blob":
            head.size = SMALL
        case "size beyond all":
            head.size = control_blobs.CONTROL_BYTES_MAX + 1
        case "no size":
            head.size = 0
        case "another field":
            head.MergeFromString(pb.ControlState(party=b"p").SerializeToString())
        case "bytes of another chunk":
            blobs[second] = blobs[third]
    told = head.SerializeToString(deterministic=True)
    lying = cid_of(told, PROTOBUF)

    def get(found: Cid) -> bytes:
        asked.append(found)
        return told if found == lying else blobs[found]

    with pytest.raises(Corrupt, match=why):
        read_blobs(lying, get)
    if why not in ("other sizes", "not what its CID says"):
        assert asked == [lying], "no chunk is asked for"
        with pytest.raises(Corrupt, match=why):
            chunks_named(lying, told)


def test_more_than_anybody_reads_is_refused_before_it_is_decoded() -> None:
    party = bytes(32)
    for data, why in (
        (bytes(control_blobs.CONTROL_BYTES_MAX + 1), "larger than it may be"),
        (b"\x1a\x00" * BLOB_BYTES_MAX, "an entry of 0 bytes"),
        (_inside(b"\x22", b"\x2a\x00"), "an entry of 0 bytes"),  # pins of a chain
        (_inside(b"\x1a", b"\x3a\x01."), "an entry of 1 bytes"),  # credentials of a message
        (b"\x1a\xff\xff\xff\x7f" + bytes(BLOB_BYTES_MAX), "ends too early"),
        (b"\x1d" + bytes(BLOB_BYTES_MAX), "another kind"),
        (b"\xff" * 2 * BLOB_BYTES_MAX, "does not end"),
    ):
        with pytest.raises(Corrupt, match=why):
            read_control_state(data, party)  # type: ignore[arg-type]  # any key will do
    with pytest.raises(Corrupt, match="an entry of 0 bytes"):
        read_evidence(b"\x1a\x00" * BLOB_BYTES_MAX, party)  # type: ignore[arg-type]


def _inside(tag: bytes, entry: bytes) -> bytes:
    """One field of a million small ones."""
    many = entry * (BLOB_BYTES_MAX // 2)
    return tag + _varint(len(many)) + many


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7) if number > 0x7F else bytes([number])


# --- in chunks, every one ---------------------------------------------------------------------------------------------


@pytest.fixture
def pair(small_blobs: None, tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", roles={"bob": "admin"}) as found:
        yield found


def grown(circle: Circle, item: Any, epochs: int) -> None:
    for _ in range(epochs):
        item["n"] += 1
        agreed_epoch(circle, "ann", "bob")


def test_the_chunks_of_states_that_nobody_begins_at_any_more_go(pair: Circle) -> None:
    ann, bob = pair.party("ann"), pair.party("bob")
    item = ann.create("property-set", n=0)
    grown(pair, item, 3)
    run_gc(ann)
    run_gc(bob)
    processor, blobs = ann.runtime.processor, ann.runtime.blobs
    assert blobs is not None
    kept = kept_blobs(processor, blobs)
    assert len(kept) > 4
    assert not blobs.missing(kept), "what newcomers are given stays"
    assert raw_blobs(ann) == {each for each in kept if cid_codec(each) == RAW}
    grown(pair, item, 2)
    assert run_gc(ann).control_blocks
    later = kept_blobs(processor, blobs)
    assert not blobs.missing(later)
    assert raw_blobs(ann) == {each for each in later if cid_codec(each) == RAW}
    assert set(blobs.missing(kept)) == set(kept) - set(later)


def test_a_state_of_which_a_chunk_is_gone_is_made_again(pair: Circle) -> None:
    ann, bob = pair.party("ann"), pair.party("bob")
    item = ann.create("property-set", n=0)
    grown(pair, item, 3)
    run_gc(bob)
    theirs, blobs = bob.runtime.blobs, ann.runtime.blobs
    assert theirs is not None
    assert blobs is not None
    kept = kept_blobs(bob.runtime.processor, theirs)
    blobs.put_many({each: theirs.get(each) for each in kept if cid_codec(each) == PROTOBUF})
    assert run_gc(ann).control_blocks
    assert not blobs.missing(kept)


def test_a_guest_gets_all_chunks_over_the_network(small_blobs: None, tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cyd") as (ann, bob, cyd):
        party = ann.create_party("Trip")
        item = party.create("property-set", type="task", done=0)
        for number in range(4):
            item["done"] = number
            Epochs(party).create()
        assert run_gc(party).control_blocks
        guest = invited(ann, party, bob, role="admin")
        assert control_base(guest) == control_base(party) > 0
        assert not bob.network.bootstraps.refused
        converged(party, guest)
        ann.close()
        third = invited(bob, guest, cyd)
        assert control_base(third) == control_base(guest)
        converged(guest, third)


def test_a_server_with_a_hostile_head_is_refused(pair: Circle, tmp_path: Path) -> None:
    ann, bob = pair.party("ann"), pair.party("bob")
    grown(pair, ann.create("property-set", n=0), 3)
    run_gc(ann)
    blobs = ann.runtime.blobs
    assert blobs is not None
    evidence = Cid(ann.runtime.feeds.about(EVIDENCE_KEY) or b"")
    true = fetch_floor(evidence, bob.runtime.processor, blobs.get)
    assert isinstance(true, Floor)
    head = pb.ControlChunks.FromString(blobs.get(name_of(true.data)))
    head.size += 1
    lie = {cid_of(data, PROTOBUF): data for data in (head.SerializeToString(deterministic=True),)}
    said = pb.ControlEvidence.FromString(true.evidence)
    said.state = next(iter(lie))
    lie |= as_blobs(said.SerializeToString(deterministic=True))
    with pytest.raises(Corrupt, match="other sizes"):
        fetch_floor(
            name_of(said.SerializeToString(deterministic=True)),
            bob.runtime.processor,
            lambda found: lie[found] if found in lie else blobs.get(found),
        )
    assert control_base(bob) == 0
