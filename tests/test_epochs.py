"""Epochs: the chain that credentials give, whatever their order, and what declaring one writes."""

import dataclasses
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from echostore.kernel.errors import Corrupt, NotFound, Refused, UsageError
from echostore.kernel.ids import Cid, DeviceKey, FeedId, FeedKey, IdentityKey, Link, Stamp
from echostore.kernel.party.control_state import ChainStart
from echostore.kernel.party.credentials import EpochAttest, EpochGenesis, TimeframeEntry
from echostore.kernel.party.epoch_chain import Tally, chain
from echostore.kernel.party.roster import EpochAct
from echostore.kernel.timeframe import Dependency
from echostore.peer.epochs import Epochs
from echostore.testing.inmemory import link
from echostore.wire.cids import PROTOBUF, cid_of, cid_text
from echostore.wire.epochs import CUT_ENTRIES_PER_PAGE, FeedCut, encode_cut, read_cut
from echostore.wire.snapshot import state_root_bytes

MEMBERS = [IdentityKey(bytes([number]) * 32) for number in range(5)]
FEED = FeedKey(b"f" * 32)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def declared(name: str, number: int, previous: str = "", *, by: int = 0, reach: int = 0, depth: int = 1) -> EpochAct:
    said = EpochGenesis(
        number,
        previous.encode().ljust(32, b".") if previous else b"",
        cid_of(name.encode(), PROTOBUF),
        timeframe=(TimeframeEntry(FEED, reach or number, Link(bytes(32))),),
    )
    return act(said, name, by, depth)


def attested(name: str, number: int, by: int, depth: int = 2) -> EpochAct:
    said = EpochAttest(number, name.encode().ljust(32, b"."), cid_of(name.encode(), PROTOBUF))
    return act(said, f"attest {name} {by}", by, depth)


def act(said: EpochGenesis | EpochAttest, name: str, by: int, depth: int) -> EpochAct:
    stamp = Stamp(depth, FeedId(bytes([by]) * 8), depth, 0)
    return EpochAct(said, name.encode().ljust(32, b"."), MEMBERS[by], DeviceKey(MEMBERS[by]), stamp)


def names(acts: list[EpochAct]) -> list[str]:
    return [epoch.hash.rstrip(b".").decode() for epoch in chain(acts, MEMBERS)]


def test_epochs_follow_each_other_by_number_hash_and_timeframe() -> None:
    acts = [declared("a", 1), declared("b", 2, "a"), declared("c", 3, "b")]
    assert names(acts) == ["a", "b", "c"]
    assert names([*acts, declared("d", 4, "b")]) == ["a", "b", "c"], "its predecessor has another number"
    assert names([*acts, declared("d", 4, "c", reach=1)]) == ["a", "b", "c"], "it goes back"
    assert names([*acts, declared("e", 5, "c")]) == ["a", "b", "c"], "one is left out"


def test_of_two_with_one_number_the_one_with_more_votes_holds_then_the_lower_hash_until_one_has_a_quorum() -> None:
    acts = [declared("a", 1), declared("b", 1, by=1)]
    assert names(acts) == ["a"]
    assert names([*acts, attested("b", 1, 2)]) == ["b"], "more stand for it"
    assert names([*acts, attested("b", 1, 2), attested("a", 1, 3)]) == ["a"], "two each"
    assert not chain([*acts, attested("b", 1, 2)], MEMBERS)[0].final, "two of five are no majority"
    assert names([*acts, attested("b", 1, 2), attested("b", 1, 3)]) == ["b"]
    both = chain([*acts, attested("b", 1, 2), attested("b", 1, 3)], MEMBERS)[0]
    assert both.final
    assert both.rivals == (b"a".ljust(32, b"."),)
    assert not chain(acts, MEMBERS)[0].final


def test_a_ground_low_hash_does_not_replace_what_a_quorum_named() -> None:
    acts = [declared("m", 1), attested("m", 1, 1), attested("m", 1, 2), declared("n", 2, "m")]
    assert names([*acts, declared("a", 1, by=4, depth=9)]) == ["m", "n"]


def test_a_second_attest_by_one_identity_does_not_count() -> None:
    acts = [declared("a", 1), declared("b", 1, by=1), attested("a", 1, 2, depth=2), attested("b", 1, 3)]
    turncoat = attested("b", 1, 2, depth=7)
    assert names([*acts, turncoat]) == ["a"]
    assert len(chain([*acts, turncoat], MEMBERS)[0].attested_by) == 2


def test_attests_of_strangers_do_not_count() -> None:
    acts = [declared("a", 1), declared("b", 1, by=1), attested("b", 1, 2), attested("b", 1, 3)]
    assert [epoch.hash[:1] for epoch in chain(acts, MEMBERS[:2])] == [b"a"]


def test_a_chain_that_begins_later_knows_the_same_rivals() -> None:
    """Of others that were declared, one whose declarer was removed at the same time is no rival without a quorum."""
    acts = [
        declared("m", 1),
        attested("m", 1, 1),
        attested("m", 1, 2),
        declared("r", 1, by=3),
        replace(declared("v", 1, by=3, depth=2), voided=True),
        replace(declared("w", 1, by=4), voided=True, electorate=frozenset(MEMBERS[4:])),
        declared("n", 2, "m"),
    ]
    whole = Tally(acts, MEMBERS)
    hashes = tuple(name.encode().ljust(32, b".") for name in "rvw")
    assert whole.contenders(1) == hashes
    later = Tally(acts, MEMBERS, start=ChainStart(None, 1, whole.chain[0].hash, hashes, ()))
    assert later.chain == whole.chain
    assert later.chain[0].rivals == (hashes[0], hashes[2])
    assert Tally(acts[:3], MEMBERS, start=ChainStart(None, 1, whole.chain[0].hash, hashes, ())).chain[0].rivals == ()


@given(order=st.randoms(use_true_random=False), data=st.data())
def test_the_chain_is_the_same_in_every_order(order: random.Random, data: st.DataObject) -> None:
    acts: list[EpochAct] = []
    for number in range(1, 5):
        for letter in data.draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3)):
            before = data.draw(st.sampled_from("abc")) + str(number - 1) if number > 1 else ""
            acts.append(declared(f"{letter}{number}", number, before, by=data.draw(st.integers(0, 4))))
        for voter in range(5):
            if data.draw(st.booleans()):
                acts.append(attested(f"{data.draw(st.sampled_from('abc'))}{number}", number, voter))
    expected = chain(acts, MEMBERS)
    order.shuffle(acts)
    assert chain(acts, MEMBERS) == expected


# bytes


def test_a_cut_of_many_feeds_is_read_back_page_by_page() -> None:
    cuts = [
        FeedCut(
            FeedKey(number.to_bytes(32, "big")),
            number % 2 == 0,
            number + 1,
            Link(bytes(32)),
            number + 5,
            (Dependency(FeedId(b"12345678"), number, b"p" * 16, 3),) if number % 3 else (),
        )
        for number in range(2 * CUT_ENTRIES_PER_PAGE + 7)
    ]
    blobs: dict[Cid, bytes] = {}
    cid = encode_cut(reversed(cuts), blobs.__setitem__)
    assert len(blobs) == 4
    assert list(read_cut(cid, blobs.__getitem__)) == cuts
    torn = {each: data[:-1] if each != cid else data for each, data in blobs.items()}
    with pytest.raises(Corrupt):
        list(read_cut(cid, torn.__getitem__))


# declaring


def test_an_epoch_names_the_state_and_survives_a_restart(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann") as peer:
        party = peer.create_party("Trip")
        task = party.create("property-set", type="task", n=1)
        first = Epochs(party).create()
        assert first.cid == party.snapshot().cid
        with pytest.raises(Refused, match="nothing has changed"):
            Epochs(party).create()
        task["n"] = 2
        second = Epochs(party).create()
        assert (second.number, second.declarer, second.items, second.blocks) == (2, "Ann", 1, 3)
    with echostore.open(tmp_path / "home") as peer:
        epochs = Epochs(peer.party("@Trip"))
        assert [epoch.cid for epoch in epochs.all()] == [first.cid, second.cid]
        record = epochs.record(epochs.get(2))
        assert record.previous_snapshot is not None
        assert cid_text(record.previous_snapshot) == first.cid
        blobs = peer.party("@Trip").runtime.blobs
        assert blobs is not None
        cut = {entry.feed: entry for entry in read_cut(Cid(epochs.get(2).genesis.cut), blobs.get)}
        cursors = peer.party("@Trip").runtime.processor.orderer.cursors
        data = next(cursor for cursor in cursors.values() if cursor.kind == "data")
        assert cut[data.key].length == data.length == 3
        assert cut[data.key].depth == data.depth
        with pytest.raises(NotFound):
            epochs.get(3)


def test_a_pipelines_snapshot_is_declared_only_if_this_peer_has_the_same(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann") as peer:
        party = peer.create_party("Trip")
        task = party.create("property-set", type="task", n=1)
        first = party.snapshot()
        task["n"] = 2
        again = party.snapshot()
        blobs = party.runtime.blobs
        assert blobs is not None
        built = [(cid, blobs.get(cid)) for cid, _ in blobs.list()]
        (entry,) = again.root.timeframe
        for lie, why in (
            (replace(again.root, index_root=first.root.index_root), "this peer's own"),
            (replace(again.root, timeframe=(entry._replace(seq=entry.seq + 1),)), "does not hold the history"),
            (replace(again.root, timeframe=(entry._replace(link=Link(bytes(32))),)), "does not hold the history"),
        ):
            fields = {each.name: getattr(lie, each.name) for each in dataclasses.fields(lie)}
            cid, data = state_root_bytes(**fields)
            with pytest.raises(Refused, match=why):
                Epochs(party).create_from(cid, iter([*built, (cid, data)]))
        with pytest.raises(Corrupt):
            Epochs(party).create_from(cid_of(again.root_bytes, PROTOBUF), iter([(built[0][0], b"other")]))
        assert Epochs(party).all() == []
        assert Epochs(party).create_from(cid_of(again.root_bytes, PROTOBUF), iter(built)).cid == again.cid


def test_a_pipelines_snapshot_is_declared_though_the_party_has_gone_on(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann") as peer:
        party = peer.create_party("Trip")
        task = party.create("property-set", type="task", n=1)
        for n in (2, 3):
            before = party.snapshot()
            blobs = party.runtime.blobs
            assert blobs is not None
            built = [(cid, blobs.get(cid)) for cid, _ in blobs.list()]
            task["n"] = n
            made = Epochs(party).create_from(cid_of(before.root_bytes, PROTOBUF), iter(built))
            assert (made.number, made.cid) == (n - 1, before.cid)
            assert task["n"] == n, "what came later stands above the epoch"
        now = party.snapshot().cid
    with echostore.open(tmp_path / "home") as peer:
        assert peer.party("@Trip").snapshot().cid == now
        assert [epoch.number for epoch in Epochs(peer.party("@Trip")).all()] == [1, 2]


def test_two_declarers_at_once_end_with_one_chain(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "a", name="Ann") as ann, echostore.open(tmp_path / "b", name="Bob") as bob:
        trip = ann.create_party("Trip")
        theirs = bob.enter(trip.members.admit(bob.request_join(trip.key), role="admin"))
        joined = link(ann, bob, trip.key).pump()
        joined.cut()
        trip.create("property-set", type="a")
        theirs.create("property-set", type="b")
        Epochs(trip).create()
        Epochs(theirs).create()
        joined.heal().pump()
        assert [epoch.hash for epoch in Epochs(trip).all()] == [epoch.hash for epoch in Epochs(theirs).all()]
        assert Epochs(trip).all()[0].rivals == 1
        assert trip.snapshot().cid == theirs.snapshot().cid


def test_a_child_party_has_epochs_of_its_own(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Ann") as peer:
        parent = peer.create_party("Trip")
        child = peer.create_child(parent, "Chess")
        child.create("property-set", type="board")
        assert Epochs(child).create().number == 1
        assert Epochs(parent).all() == []
        assert Epochs(parent).create().number == 1


def test_wrong_numbers_and_times_of_epochs_are_usage_errors(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as peer:
        party = peer.create_party("Trip")
        epochs = peer.epochs(party)
        epochs.create()
        assert [each.number for each in peer.epochs("@Trip").all()] == [1]
        for wrong in ("1", 1.0, -1, None, True):
            for ask in (epochs.verify, epochs.get, epochs.fetch):
                with pytest.raises(UsageError):
                    ask(wrong)  # type: ignore[arg-type]  # that is what is asked
        for time in ("x", 1.5, True):
            for make in (epochs.create, epochs.plan):
                with pytest.raises(UsageError):
                    make(discard_before_ms=time)  # type: ignore[arg-type]  # as above
