"""Who was removed hears of it, with the proof, and of nothing that came after (DESIGN 5, 10)."""

import asyncio
from pathlib import Path

import pytest

from echostore.kernel.errors import Refused
from echostore.kernel.feed import Head
from echostore.kernel.ids import NO_LINK, DeviceKey, FeedKey
from echostore.kernel.order import CONTROL
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.endpoint import Endpoint
from echostore.kernel.sync.events import Progress
from echostore.kernel.sync.frames import (
    Ack,
    AckEntry,
    Blocks,
    FeedTip,
    Frame,
    Hello,
    Refusal,
    RefusalReason,
    Request,
    Tip,
)
from echostore.kernel.sync.port import Rejection
from echostore.mesh.farewell import FarewellPort
from echostore.mesh.node import Link as MeshLink
from echostore.mesh.node import Standing
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.status import REMOVED, REVOKED
from echostore.wire.mesh import Offer, channel_of, party_tag
from network_peers import address, converged, invited, peers, until
from test_mesh_fuzz import Wire


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def own_role(peer: Peer, party: Party) -> object:
    return next(member.role for member in party.members.all() if member.identity == peer.identity)


def test_a_removed_member_hears_of_it_and_the_connection_ends(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        assert theirs.status.standing == "editor"
        trip.members.remove(bob.identity)
        until(lambda: own_role(bob, theirs) is None)
        until(lambda: ann.network.node.counters.ended["removed"] == 1)
        until(lambda: bob.network.node.counters.ended["goodbye"] == 1)
        assert theirs.status.standing == REMOVED
        with pytest.raises(Refused, match="the member was removed"):
            theirs.create(type="note")
        assert any(step.act == "MemberRemove" for step in theirs.members.why(bob.identity))


def test_who_was_away_hears_of_it_on_its_return_and_of_nothing_later(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        bob.network.disconnect(address(ann))
        until(lambda: not ann.network.connections())
        trip.members.remove(bob.identity)
        invited(ann, trip, cat)
        trip.create("property-set", type="secret")
        trip.flush()
        blocks = {feed.key: feed.length for feed in theirs.runtime.feeds.feeds() if feed.kind != CONTROL}
        bob.connect(address(ann))
        until(lambda: own_role(bob, theirs) is None)
        until(lambda: ann.network.node.counters.ended["removed"] == 1)
        assert cat.identity not in {member.identity for member in theirs.members.all()}
        assert {feed.key: feed.length for feed in theirs.runtime.feeds.feeds() if feed.kind != CONTROL} == blocks


def test_a_revoked_device_hears_of_it(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (ann, phone):
        trip = ann.create_party("Trip")
        invitation = ann.invite_device()
        (theirs,) = phone.join_device(invitation.ticket, invitation.passcode)
        until(lambda: theirs.status.standing == "owner")
        until(lambda: ann.network.standing(trip.key, DeviceKey(phone.device)) is Standing.MEMBER)
        ann.revoke_device(phone.device)
        until(lambda: theirs.status.standing == REVOKED)
        with pytest.raises(Refused, match="the device was revoked"):
            theirs.create(type="note")


def test_another_shared_party_keeps_the_connection(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, work = ann.create_party("Trip"), ann.create_party("Work")
        theirs, shared = invited(ann, trip, bob), invited(ann, work, bob)
        trip.members.remove(bob.identity)
        until(lambda: theirs.status.standing == REMOVED)
        until(lambda: [len(link.channels) for link in ann.network.node.links.values()] == [1])
        work.create("property-set", type="task")
        converged(work, shared)
        assert ann.network.node.counters.ended["removed"] == 0
        # Once it was told, it may ask as often as it likes on this connection.
        (link,) = ann.network.node.links.values()
        tag = party_tag(link.connection.handshake_hash, trip.key)
        received = ann.network.node.counters.frames_received
        bob.network.call(_offered(bob, tag))
        until(lambda: ann.network.node.counters.frames_received > received)
        assert {channel.party for channel in link.channels.values()} == {work.key}


def test_who_knows_that_it_was_removed_is_quiet_and_can_come_back(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        trip.members.remove(bob.identity)
        until(lambda: ann.network.node.counters.ended["removed"] == 1)
        until(lambda: not bob.network.connections())
        bob.network.connect(address(ann), keep=False)
        (link,) = until(lambda: list(bob.network.node.links.values()))
        bob.network.call(_reviewed(bob))
        assert (link.channels, link._offered) == ({}, set())
        again = trip.invite("editor")
        with pytest.raises(Refused, match="was removed") as refused:
            bob.join(again.ticket, again.passcode)
        assert "forget" in refused.value.next_step
        bob.forget_party(trip.key)
        theirs = bob.join(again.ticket, again.passcode)
        until(lambda: theirs.status.standing == "editor")
        theirs.create("property-set", type="note")
        converged(trip, theirs)
        assert trip.query(type="note").all()


async def _reviewed(peer: Peer) -> None:
    peer.network.node.review()


async def _offered(peer: Peer, tag: bytes) -> None:
    (link,) = peer.network.node.links.values()
    link.connection.send(Offer((tag,)))


# what a removed device may ask for


def test_the_proof_ends_at_the_removal_and_nothing_else_is_given(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        trip.members.remove(bob.identity)
        trip.members.set_profile("Ann who stays")
        trip.create(type="secret")
        trip.flush()
        proof = ann.network.departure(trip.key, DeviceKey(bob.device))
        port = FarewellPort(trip.sync_port, proof)
        lengths = {feed.key: feed.length for feed in trip.runtime.feeds.feeds()}
        _hold_to_the_cut(port, trip, lengths)
        _ask_for_more(port, trip)


def _hold_to_the_cut(port: FarewellPort, trip: Party, lengths: dict[FeedKey, int]) -> None:
    own = trip.runtime.control
    assert own is not None
    ours = own.cursor.key
    assert {tip.kind for tip in port.feeds()} == {CONTROL}
    (tip,) = port.tips(ours)
    assert 0 < tip.tip.length < lengths[ours]
    found = port.read(ours, 0, 1 << 20, 1 << 30, tip.tip.link)
    assert found is not None
    payloads, head = found
    assert len(payloads) == head.length <= tip.tip.length
    assert port.read(ours, tip.tip.length, 10, 1 << 20, tip.tip.link) is None
    assert port.ingest(ours, CONTROL, 0, payloads, head) == Rejection(Reason.UNADMITTED)
    assert not port.heard(Progress(ours, tip.tip.length - 1, 0))
    others = [each for each in port.feeds() if each.feed != ours]
    assert [port.heard(Progress(each.feed, each.tip.length, 0)) for each in others] == [False] * len(others)
    assert port.heard(Progress(ours, tip.tip.length, 0))


def _ask_for_more(port: FarewellPort, trip: Party) -> None:
    """A session that greets and then asks for a data feed, and for control beyond the cut."""
    sent: list[Frame] = []
    endpoint = Endpoint(port, send=sent.append, clock=lambda: 0.0)
    endpoint.start()
    endpoint.receive(Hello(1, (), ()))
    data, control = trip.runtime.data, trip.runtime.control
    assert data is not None
    assert control is not None
    for number, own in enumerate((data, control), 1):
        endpoint.receive(Ack((AckEntry(own.cursor.key, 0, 0, own.cursor.link),)))
        endpoint.receive(Request(number, own.cursor.key, 0, 1 << 16, 1 << 22, own.cursor.link))
    (tip,) = port.tips(control.cursor.key)
    assert all(frame.feed != data.cursor.key for frame in sent if isinstance(frame, Blocks))
    assert [frame.reason for frame in sent if isinstance(frame, Refusal)] == [RefusalReason.UNKNOWN_FEED]
    given = [frame for frame in sent if isinstance(frame, Blocks)]
    assert given
    assert max(frame.end for frame in given) == tip.tip.length


def test_a_removed_device_is_no_member_while_it_is_told(tmp_path: Path) -> None:
    """So it gets no blob either, and no address."""
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        trip.members.remove(bob.identity)
        trip.flush()

        async def look() -> None:
            wire = Wire(DeviceKey(bob.device))
            link = MeshLink(ann.network.node, wire)  # type: ignore[arg-type]  # all that a link needs of a connection
            tag = party_tag(wire.handshake_hash, trip.key)
            link.receive(Offer((tag,)))
            assert [channel.farewell is not None for channel in link.channels.values()] == [True]
            assert (link.with_member, link.channel_for(trip.key), link.party_of(channel_of(tag))) == (False, None, None)
            link.stop()

        asyncio.run(look())


class OneRange:
    """A port whose only range is three blocks long."""

    def read(self, *arguments: object) -> tuple[list[bytes], Head]:
        return [b"x"] * 3, Head(3, NO_LINK, bytes(64))


def test_a_range_beyond_the_proof_is_not_given() -> None:
    feed = FeedKey(bytes(32))
    for length, given in ((2, False), (3, True)):
        port = FarewellPort(OneRange(), [FeedTip(feed, CONTROL, Tip(length, NO_LINK))])  # type: ignore[arg-type]
        assert (port.read(feed, 0, 10, 1 << 20, NO_LINK) is not None) == given
