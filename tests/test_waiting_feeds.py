"""Feeds that wait for their admission in a peer: who knows the party's key alone can't keep new devices out.

The bounds themselves are in `test_limbo.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.cli.party import truth
from echostore.kernel.errors import TimedOut
from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, Link
from echostore.kernel.order import CONTROL
from echostore.kernel.party.credentials import Claim, DeviceAdmit, FeedAdmit, FeedKind
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.limbo import FEEDS_MAX, NEWCOMER_FEEDS_MAX, SECONDS
from echostore.kernel.sync.port import Rejection
from echostore.peer.party import Party
from echostore.peer.sync_port import PartySyncPort
from echostore.wire.credentials import sign_credential, with_feed_proof
from echostore.wire.generated import credential_pb2
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import chain, head_bytes
from echostore.wire.signing import SigningKey
from network_peers import address, converged, invited, peers, until
from peer_builder import Circle

WAITING = Rejection(Reason.WAITING)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", "ann", "bob", "eve", roles={"bob": "admin"}) as made:
        yield made


def junk(party: Party, *, newcomer: bytes | None, size: int = 100) -> int | Rejection:
    """A soundly signed control feed that nobody admitted, as whoever knows the party's key can make it."""
    key = SigningKey.generate()
    payload = pb.Message(depth=1, credentials=[_credential(size)]).SerializeToString()
    feed = FeedKey(key.public)
    (link,) = chain(feed, 0, Link(bytes(32)), [payload])
    head = Head(1, link, key.sign(head_bytes(party.key, feed, 1, link)))
    brought_by = None if newcomer is None else DeviceKey(newcomer)
    return party.sync_port.ingest(feed, CONTROL, 0, [payload], head, newcomer=brought_by)


def _credential(size: int) -> credential_pb2.Credential:
    return credential_pb2.Credential(claim=bytes(size), signature=bytes(64))


def opening(party: Party, identity: SigningKey, *, named: SigningKey | None = None) -> tuple[FeedKey, bytes, Head]:
    """The first block of a control feed by which a new device of an identity admits itself; `named`: another feed instead."""
    device, feed = SigningKey.generate(), SigningKey.generate()
    who, own = IdentityKey(identity.public), DeviceKey(device.public)
    admitted = named or feed
    admit = FeedAdmit(FeedKey(admitted.public), FeedKind.CONTROL, who, own)
    credentials = [
        sign_credential(Claim(party.key, who, DeviceKey(who), DeviceAdmit(who, own, "new")), identity),
        sign_credential(Claim(party.key, who, own, with_feed_proof(admit, party.key, admitted)), device),
    ]
    dependencies = [
        (cursor.id, cursor.length - 1, cursor.link, cursor.depth)
        for cursor in sorted(party.runtime.processor.orderer.cursors.values(), key=lambda cursor: cursor.id)
        if cursor.kind == CONTROL and cursor.length
    ]
    message = pb.Message(
        dependency_feeds=b"".join(feed for feed, _, _, _ in dependencies),
        dependency_seqs=[seq for _, seq, _, _ in dependencies],
        dependency_links=b"".join(bytes(link)[:16] for _, _, link, _ in dependencies),
        dependency_depths=[depth for _, _, _, depth in dependencies],
        depth=1 + max(depth for _, _, _, depth in dependencies),
        credentials=credentials,
    )
    payload, key = message.SerializeToString(), FeedKey(feed.public)
    (link,) = chain(key, 0, Link(bytes(32)), [payload])
    return key, payload, Head(1, link, feed.sign(head_bytes(party.key, key, 1, link)))


def stored(party: Party) -> set[bytes]:
    return {bytes(held.key) for held in party.runtime.feeds.feeds()}


def test_a_feed_that_nobody_admits_is_not_stored(circle: Circle) -> None:
    ann = circle.party("ann")
    before = stored(ann)
    assert junk(ann, newcomer=SigningKey.generate().public) == WAITING
    assert junk(ann, newcomer=None) == WAITING
    assert stored(ann) == before
    assert len(ann.sync_port.limbo) == 2


def test_a_feed_that_a_members_identity_opens_is_stored_and_counts(circle: Circle) -> None:
    ann, identity = circle.party("ann"), circle.peers["bob"].myself.identity_key
    key, payload, head = opening(ann, identity)
    stranger = DeviceKey(SigningKey.generate().public)
    assert ann.sync_port.ingest(key, CONTROL, 0, [payload], head, newcomer=stranger) == 1
    assert key in stored(ann)
    assert ann.sync_port.tips(key) != []


def test_a_feed_that_an_outsider_opens_soundly_is_not_stored(circle: Circle) -> None:
    ann = circle.party("ann")
    key, payload, head = opening(ann, SigningKey.generate())
    assert ann.sync_port.ingest(key, CONTROL, 0, [payload], head) == WAITING
    assert key not in stored(ann)


def test_a_feed_that_a_removed_member_opens_is_not_stored(circle: Circle) -> None:
    ann, identity = circle.party("ann"), circle.peers["bob"].myself.identity_key
    ann.members.remove(circle.peers["bob"].identity)
    key, payload, head = opening(ann, identity)
    assert ann.sync_port.ingest(key, CONTROL, 0, [payload], head) == WAITING
    assert key not in stored(ann)


def test_a_block_that_opens_another_feed_does_not_open_its_own(circle: Circle) -> None:
    ann, identity = circle.party("ann"), circle.peers["bob"].myself.identity_key
    key, payload, head = opening(ann, identity, named=SigningKey.generate())
    assert ann.sync_port.ingest(key, CONTROL, 0, [payload], head) == WAITING
    assert key not in stored(ann)


def test_a_feed_with_a_false_signature_does_not_wait(circle: Circle) -> None:
    ann = circle.party("ann")
    key, payload, head = opening(ann, SigningKey.generate())
    forged = Head(head.length, head.link, bytes(64))
    assert ann.sync_port.ingest(key, CONTROL, 0, [payload], forged) == Rejection(Reason.BAD_SIGNATURE, fatal=True)
    assert len(ann.sync_port.limbo) == 0


def test_what_waits_is_forgotten_after_ten_minutes(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    ann, now = circle.party("ann"), [1_000_000]
    monkeypatch.setattr(circle.peers["ann"], "now_ms", lambda: now[0])
    junk(ann, newcomer=SigningKey.generate().public)
    now[0] += int(SECONDS * 1000) - 1
    junk(ann, newcomer=SigningKey.generate().public)
    assert len(ann.sync_port.limbo) == 2
    now[0] += 1
    junk(ann, newcomer=SigningKey.generate().public)
    assert (len(ann.sync_port.limbo), ann.sync_port.limbo.expired) == (2, 1)


def test_one_newcomer_has_few_slots(circle: Circle) -> None:
    ann, eve = circle.party("ann"), SigningKey.generate().public
    for _ in range(20):
        junk(ann, newcomer=eve)
    assert len(ann.sync_port.limbo) == NEWCOMER_FEEDS_MAX


def test_a_feed_that_came_before_its_admission_is_stored_with_it(circle: Circle) -> None:
    dan = circle.peers["dan"] = circle._open("dan")
    dan.enter(circle.party("ann").members.admit(dan.request_join(circle.key), role="editor"))
    circle.meet("ann", "dan")
    circle.party("dan").members.set_profile("Dan")
    circle.party("dan").flush()
    eve, dans = circle.party("eve"), circle.party("dan")
    own = dans.runtime.control
    assert own is not None
    found = dans.sync_port.read(own.cursor.key, 0, 100, 1 << 20, own.cursor.link)
    assert isinstance(found, tuple)
    payloads, head = found
    assert eve.sync_port.ingest(own.cursor.key, CONTROL, 0, payloads, head) == WAITING
    assert own.cursor.key not in stored(eve)
    circle.meet("ann", "eve")  # who has the admission, and nothing that dan wrote
    assert eve.runtime.feeds.length(own.cursor.key) == len(payloads)
    assert len(eve.sync_port.limbo) == 0
    assert "Dan" in {member.name for member in eve.members.all()}


def test_a_recovered_device_gets_in_while_others_fill_the_slots(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        phrase = ann.recovery_phrase()
        ann.close()
        for _ in range(4 * FEEDS_MAX):
            assert junk(bobs, newcomer=SigningKey.generate().public) == WAITING
        assert len(bobs.sync_port.limbo) == FEEDS_MAX // 2
        (party,) = fresh.recover(phrase, address(bob))
        assert party.arrived
        party.create(type="task")
        converged(party, bobs)
        assert party.status.arrived


def test_a_recovered_device_is_told_when_nobody_takes_its_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        phrase = ann.recovery_phrase()
        ann.close()
        real = PartySyncPort._refuse

        def refuse(port: PartySyncPort, key: FeedKey, *others: Any) -> Rejection | None:
            return Rejection(Reason.UNADMITTED) if port is bobs.sync_port else real(port, key, *others)

        monkeypatch.setattr(PartySyncPort, "_refuse", refuse)
        with pytest.raises(TimedOut, match="no member has taken the admission of this device"):
            fresh.recover(phrase, address(bob), timeout=3.0)
        party = fresh.party(trip.key)
        until(lambda: not party.status.arrived)
        assert "what it writes counts nowhere else yet" in truth(party.status)
        monkeypatch.setattr(PartySyncPort, "_refuse", real)
        for each in fresh.network.connections():
            fresh.network.disconnect(each.address)
        until(lambda: not fresh.network.connections())
        fresh.connect(address(bob))
        party.wait_arrived(30.0)
        assert party.status.arrived
