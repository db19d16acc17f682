"""Blobs between peers: several sources, rarest first, resumed, and no poison."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import Refused, TimedOut, UsageError
from echostore.kernel.ids import Cid, PartyKey
from echostore.kernel.values import BlobRef
from echostore.mesh import blob_exchange
from echostore.mesh.want_list import FETCHES_MAX, FETCHES_MOST, PATIENCE_S, Ask, Fetch, WantList
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_of
from echostore.wire.mesh import Blob, Blobs, Want
from network_peers import address, converged, invited, peers, until

Serve = Callable[[PartyKey, Sequence[Cid], int], dict[Cid, bytes]]
CIDS = [cid_of(str(number).encode(), RAW) for number in range(1000)]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


# the plan


def test_the_rarest_blob_is_asked_for_first_and_sources_share_the_rest() -> None:
    wants: WantList[str] = WantList()
    wants.add(CIDS[:10])
    for source in "abc":
        wants.source(source)
    asks = wants.plan(0.0)
    assert {step.source for step in asks if isinstance(step, Ask)} == set("abc")
    wants.heard("a", CIDS[:10], [], 1.0)
    wants.heard("b", CIDS[:9], [CIDS[9]], 1.0)
    wants.heard("c", CIDS[:9], [CIDS[9]], 1.0)
    fetches = {step.source: step.cids for step in wants.plan(1.0) if isinstance(step, Fetch)}
    assert fetches["a"][0] == CIDS[9], "only a has it"
    assert len(fetches) == 3
    given_out = [cid for cids in fetches.values() for cid in cids]
    assert len(given_out) == len(set(given_out)), "nobody is asked for what another was asked for"


def test_a_single_source_is_asked_for_the_blobs_at_once() -> None:
    wants: WantList[str] = WantList()
    wants.add(CIDS[:500])
    wants.source("a")
    (fetch,) = wants.plan(0.0)
    assert isinstance(fetch, Fetch)
    assert len(fetch.cids) == FETCHES_MAX
    assert wants.plan(0.1) == [], "so many are under way, and no more"


def test_what_does_not_come_is_asked_of_another() -> None:
    wants: WantList[str] = WantList()
    wants.add(CIDS[:4])
    wants.source("a")
    wants.source("b")
    wants.plan(0.0)
    for source in "ab":
        wants.heard(source, CIDS[:4], [], 0.0)
    first = {cid: step.source for step in wants.plan(0.0) if isinstance(step, Fetch) for cid in step.cids}
    late = {cid: step.source for step in wants.plan(PATIENCE_S + 1) if isinstance(step, Fetch) for cid in step.cids}
    assert late
    assert all(late[cid] != first[cid] for cid in late)
    wants.lost("b")
    again = {cid: step.source for step in wants.plan(PATIENCE_S + 20) if isinstance(step, Fetch) for cid in step.cids}
    assert set(again.values()) <= {"a"}


@given(data=st.data(), sources=st.integers(1, 5), count=st.integers(1, 40))
def test_everything_that_someone_has_arrives(data: st.DataObject, sources: int, count: int) -> None:
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    holdings = {number: {cid for cid in CIDS[:count] if chance.random() < 0.5} for number in range(sources)}
    wants: WantList[int] = WantList()
    wants.add(CIDS[:count])
    for number in holdings:
        wants.source(number)
    now = 0.0
    for _ in range(200):
        for step in wants.plan(now):
            if step.source not in holdings:
                continue
            have = [cid for cid in step.cids if cid in holdings[step.source]]
            missing = [cid for cid in step.cids if cid not in holdings[step.source]]
            if isinstance(step, Ask):
                wants.heard(step.source, have, missing, now)
            else:
                wants.heard(step.source, [], missing, now)
                for cid in have:
                    if chance.random() < 0.8:  # the others are lost
                        assert wants.arrived(step.source, cid)
        now += 4.0
    assert wants.wanted == set(CIDS[:count]) - set().union(*holdings.values())


# between peers


def shared(ann: Peer, *others: Peer) -> list[Party]:
    trip = ann.create_party("Trip")
    return [trip, *(invited(ann, trip, other, "admin") for other in others)]


def test_a_file_travels_with_its_name_and_is_whole(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = shared(ann, bob)
        content = random.Random(1).randbytes(700_000)
        (tmp_path / "beach.jpg").write_bytes(content)
        task = trip.create("property-set", type="task")
        task["photo"] = trip.files.add(tmp_path / "beach.jpg")
        converged(trip, theirs)
        pointer = theirs.query(type="task").one()["photo"]
        assert (pointer.name, pointer.media_type, pointer.size) == ("beach.jpg", "image/jpeg", 700_000)
        assert len(theirs.files.missing(pointer)) == 3
        steps: list[tuple[int, int]] = []
        theirs.files.fetch(pointer, progress=lambda done, total: steps.append((done, total)))
        assert steps[-1] == (3, 3)
        assert theirs.files.read(pointer) == content
        theirs.files.save(pointer, tmp_path / "copy.jpg")
        assert (tmp_path / "copy.jpg").read_bytes() == content
        assert theirs.files.add(content).cids == pointer.cids, "the same content has the same CIDs"
        assert theirs.files.read(theirs.files.add(b"")) == b""


def test_three_sources_each_deliver_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "bob", "cat", "dan") as (ann, bob, cat, dan):
        trip, *rest = shared(ann, bob, cat, dan)
        content = random.Random(2).randbytes(60 * 262_144)
        pointer = trip.files.add(content)
        for party in rest[:2]:
            party.files.fetch(pointer)
        dans = rest[2]
        for other in (bob, cat):
            dan.connect(address(other))
        until(lambda: all(link.channel_for(trip.key) for link in dan.network.node.links.values()))
        assert len(dan.network.node.links) == 3
        served = dict.fromkeys((ann, bob, cat), False)

        def when_all_serve(peer: Peer, real: Serve) -> Serve:
            def blobs_here(party: PartyKey, cids: Sequence[Cid], bytes_max: int) -> dict[Cid, bytes]:
                served[peer] = True
                until(lambda: all(served.values()))
                return real(party, cids, bytes_max)

            return blobs_here

        for peer in served:
            monkeypatch.setattr(peer.network, "blobs_here", when_all_serve(peer, peer.network.blobs_here))
        dans.files.fetch(pointer)
        given_by = dan.network.blobs.given
        assert set(given_by) == {ann.device, bob.device, cat.device}
        assert sum(given_by.values()) == 60
        assert dans.files.read(pointer) == content


def test_a_poisoner_is_dropped_after_one_bad_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "eve", "bob") as (ann, eve, bob):
        trip, eves, bobs = shared(ann, eve, bob)
        content = random.Random(3).randbytes(8 * 262_144)
        pointer = trip.files.add(content)
        eves.files.fetch(pointer)
        bob.connect(address(eve))
        until(lambda: sum(link.channel_for(trip.key) is not None for link in bob.network.node.links.values()) == 2)
        monkeypatch.setattr(eve.network, "blobs_here", lambda party, cids, bytes_max: dict.fromkeys(cids, b"poison"))
        real = ann.network.blobs_here

        def after_the_poison(party: PartyKey, cids: Sequence[Cid], bytes_max: int) -> dict[Cid, bytes]:
            until(lambda: bob.network.blobs.poisoners)
            return real(party, cids, bytes_max)

        monkeypatch.setattr(ann.network, "blobs_here", after_the_poison)
        bobs.files.fetch(pointer)
        assert bobs.files.read(pointer) == content
        assert set(bob.network.blobs.poisoners) == {eve.device}
        assert bob.network.node.counters.scores["poison"] == 1
        assert bob.network.blobs.given == {ann.device: 8}


def test_a_cut_transfer_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_exchange, "STORE_BLOBS", 4)
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = shared(ann, bob)
        content = random.Random(4).randbytes(40 * 262_144)
        pointer = trip.files.add(content)
        here = address(ann)
        real = ann.network.blobs_here
        served: list[Cid] = []

        def half(party: PartyKey, cids: Sequence[Cid], bytes_max: int) -> dict[Cid, bytes]:
            if len(served) >= 20:
                bob.network.disconnect(here)
                until(lambda: not bob.network.node.links)
            found = real(party, cids, bytes_max)
            served.extend(found)
            return found

        monkeypatch.setattr(ann.network, "blobs_here", half)
        with pytest.raises(TimedOut, match="of 40 chunks"):
            theirs.files.fetch(pointer, timeout=1.0)
        left = len(theirs.files.missing(pointer))
        assert 0 < left < 40
        monkeypatch.setattr(ann.network, "blobs_here", real)
        served.clear()
        bob.connect(here)
        until(lambda: all(link.channel_for(trip.key) for link in bob.network.node.links.values()))
        theirs.files.fetch(pointer)
        assert theirs.files.read(pointer) == content
        assert bob.network.blobs.given[ann.device] <= 40 + FETCHES_MAX


def small_blobs(party: Party, count: int) -> dict[Cid, bytes]:
    """Pages of a snapshot are like these: hundreds of bytes each."""
    found = {cid_of(data): data for data in (f"{number} ".encode() * 40 for number in range(count))}
    assert party.runtime.blobs is not None
    party.runtime.blobs.put_many(found)
    return found


def test_small_blobs_travel_together_and_are_stored_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = shared(ann, bob)
        wanted = small_blobs(trip, 5000)
        frames: list[int] = []
        commits: list[int] = []
        receive, keep = bob.network.blobs.receive, bob.network.keep_blobs

        def counted(link: Any, frame: Any) -> None:
            if isinstance(frame, Blobs):
                frames.append(len(frame.cids))
            assert not isinstance(frame, Blob)
            receive(link, frame)

        def kept(party: PartyKey, blobs: dict[Cid, bytes]) -> None:
            commits.append(len(blobs))
            keep(party, blobs)

        monkeypatch.setattr(bob.network.blobs, "receive", counted)
        monkeypatch.setattr(bob.network, "keep_blobs", kept)
        assert bob.network.fetch(trip.key, wanted) == 5000
        assert sum(frames) == 5000
        assert len(frames) < 100, "one frame carries many"
        assert commits == [5000], "one transaction takes all"
        assert theirs.runtime.blobs is not None
        assert theirs.runtime.blobs.get_some(wanted, 1 << 24) == wanted
        assert bob.network.fetch(trip.key, wanted) == 0, "all of it is here"


def test_who_does_not_know_packs_gets_single_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, _ = shared(ann, bob)
        wanted = small_blobs(trip, 50)
        came: list[type] = []
        asked, receive = ann.network.blobs._asked, bob.network.blobs.receive

        def unpacked(link: Any, party: PartyKey, want: Want) -> None:
            asked(link, party, replace(want, packed=False))

        def noted(link: Any, frame: Any) -> None:
            came.append(type(frame))
            receive(link, frame)

        monkeypatch.setattr(ann.network.blobs, "_asked", unpacked)
        monkeypatch.setattr(bob.network.blobs, "receive", noted)
        assert bob.network.fetch(trip.key, wanted) == 50
        assert came.count(Blob) == 50
        assert Blobs not in came


def test_one_bad_blob_in_a_pack_ends_it_and_what_came_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        trip, eves = shared(ann, eve)
        wanted = small_blobs(eves, 100)
        real = eve.network.blobs_here
        order: list[Cid] = []

        def seventh_is_bad(party: PartyKey, cids: Sequence[Cid], bytes_max: int) -> dict[Cid, bytes]:
            found = real(party, cids, bytes_max)
            order.extend(found)
            return {cid: b"poison" if cid == order[7] else data for cid, data in found.items()}

        monkeypatch.setattr(eve.network, "blobs_here", seventh_is_bad)
        with pytest.raises(blob_exchange.Unavailable):
            ann.network.fetch(trip.key, wanted, patience_s=0.5)
        assert set(ann.network.blobs.poisoners) == {eve.device}
        assert trip.runtime.blobs is not None
        assert set(trip.runtime.blobs.get_some(wanted, 1 << 24)) == set(order[:7])


def test_what_blobs_lead_to_is_fetched_while_others_are_under_way(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = shared(ann, bob)
        assert trip.runtime.blobs is not None
        assert theirs.runtime.blobs is not None
        leaves = list(small_blobs(trip, 3000))
        nodes = [trip.runtime.blobs.put(b"".join(leaves[at : at + 30]), PROTOBUF) for at in range(0, 3000, 30)]
        top = trip.runtime.blobs.put(b"".join(nodes), PROTOBUF)
        theirs.runtime.blobs.put_many({nodes[0]: trip.runtime.blobs.get(nodes[0])})
        followed: list[Cid] = []

        def below(cid: Cid, data: bytes) -> list[Cid]:
            followed.append(cid)
            named = cid_codec(cid) == PROTOBUF
            return [Cid(data[at : at + 36]) for at in range(0, len(data), 36)] if named else []

        assert bob.network.fetch(trip.key, [top], follow=below) == 3100, "all but the node that was here"
        assert theirs.runtime.blobs.missing([top, *nodes, *leaves]) == []
        assert sorted(cid for cid in followed if cid_codec(cid) == PROTOBUF) == sorted([top, *nodes]), "each once"


def test_a_blob_that_is_damaged_here_does_not_hide_those_behind_it(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        trip = ann.create_party("Trip")
        wanted = small_blobs(trip, 20)
        store = trip.runtime.blobs
        assert store is not None
        bad = sorted(wanted)[0]
        with store._db.transaction():
            store._db.execute("UPDATE blobs SET data = ? WHERE cid = ?", (b"x" * 100_000, bad))
        found = store.get_some(wanted, 1000)
        assert bad not in found
        assert sum(map(len, found.values())) >= 1000, "as much as there is room for"
        assert set(store.get_some(wanted, 1 << 20)) == set(wanted) - {bad}


def test_how_many_are_under_way_follows_their_size() -> None:
    wants: WantList[str] = WantList()
    cids = [cid_of(str(number).encode()) for number in range(10_000)]
    wants.add(cids)
    wants.source("a")
    (fetch,) = wants.plan(0.0)
    for cid in fetch.cids:
        wants.arrived("a", cid, 300)
    (fetch,) = wants.plan(0.0)
    assert len(fetch.cids) == FETCHES_MOST, "small ones: many"
    for cid in fetch.cids:
        wants.arrived("a", cid, 1 << 20)
    (fetch,) = wants.plan(0.0)
    assert len(fetch.cids) < 32, "large ones: few"


def test_only_members_get_blobs_and_lies_about_size_are_found(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = shared(ann, bob)
        pointer = trip.files.add(b"x" * 100)
        with pytest.raises(Refused, match="says it has 99"):
            trip.files.read(BlobRef(pointer.cids, 99))
        trip.members.remove(bob.identity)
        trip.flush()
        until(lambda: not any(link.channels for link in list(ann.network.node.links.values())))
        with pytest.raises(TimedOut):
            theirs.files.fetch(pointer, timeout=0.5)
        with pytest.raises(UsageError):
            trip.files.add(7)  # type: ignore[arg-type]
