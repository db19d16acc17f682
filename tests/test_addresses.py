"""Devices tell where they are, so that one lost address is not the loss of everybody."""

from pathlib import Path

import pytest

from echostore.kernel.ids import DeviceKey
from echostore.mesh.ticket import read_ticket
from echostore.peer.peer import Peer
from echostore.peer.service import remembered_addresses
from echostore.wire.mesh import (
    ADDRESSES_CHARACTERS_MAX,
    REACH_DEVICES_MAX,
    MeshFrame,
    Reach,
    decode_mesh_frame,
    encode_mesh_frame,
)
from echostore.wire.sync import MalformedFrame
from network_peers import address, converged, invited, peers, until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def knows(peer: Peer, other: Peer) -> bool:
    return address(other) in peer.network.reach_book.known().get(DeviceKey(other.device), ())


def joins_identity(host: Peer, device: Peer) -> None:
    invitation = host.invite_device()
    device.join_device(invitation.ticket, invitation.passcode)
    until(lambda: all(party.status.standing == "owner" for party in device.open_parties()))


def say(peer: Peer, to: Peer, frame: MeshFrame) -> None:
    """One frame on the connection between two peers."""

    async def send() -> None:
        peer.network.node.links[DeviceKey(to.device)].connection.send(frame)

    peer.network.call(send())


def test_an_open_invitation_is_honoured_by_another_admin_while_its_host_is_gone(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob, role="admin")
        until(lambda: knows(ann, bob))
        invitation = trip.invite("editor", open=True)
        assert address(bob) in read_ticket(invitation.ticket).addresses
        until(lambda: len(bobs.runtime.processor.membership.machine.invitations) == 1)
        ann.close()
        cats = cat.join(invitation.ticket)
        until(lambda: cats.status.standing == "editor")
        cats.create("property-set", type="task")
        converged(bobs, cats)


def test_who_came_by_an_open_invitation_finds_the_other_admins_when_its_host_is_gone(tmp_path: Path) -> None:
    """The ticket has Bob's address too. It is not taken for Ann's: then Bob would be sent away for not being her."""
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob, role="admin")
        until(lambda: knows(ann, bob))
        invitation = trip.invite("editor", open=True)
        cats = cat.join(invitation.ticket)
        assert remembered_addresses(cat) == {ann.device: [address(ann)], None: [address(bob)]}
        assert address(bob) not in cat.network.reach_book.known()[DeviceKey(ann.device)]
        assert all(cat.network.reach_book.known()), "what is told on has a device for each address"
        until(lambda: DeviceKey(bob.device) in cat.network.node.links)
        ann.close()
        cats.create("property-set", type="task")
        converged(bobs, cats)
        assert cat.network.node.counters.refused["wrong-device"] == 0


def test_other_invitations_name_the_host_alone(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob, role="admin")
        until(lambda: knows(ann, bob))
        assert read_ticket(trip.invite("editor").ticket).addresses == (address(ann),)


def test_a_recovered_identity_finds_its_other_devices_by_way_of_a_member(tmp_path: Path) -> None:
    """Bob is in one of the parties; where the tablet is, he knows, and the tablet has the other one."""
    with peers(tmp_path, "laptop", "tablet", "bob", "phone") as (laptop, tablet, bob, phone):
        trip, diary = laptop.create_party("Trip"), laptop.create_party("Diary")
        bobs = invited(laptop, trip, bob)
        joins_identity(laptop, tablet)
        converged(trip, bobs, tablet.party(trip.key))
        tablet.connect(address(bob))
        until(lambda: knows(bob, tablet))
        phrase = laptop.recovery_phrase()
        laptop.close()
        entered = {party.key for party in phone.recover(phrase, address(bob))}
        assert entered == {trip.key, diary.key}
        until(lambda: DeviceKey(tablet.device) in phone.network.node.links)


def test_devices_of_one_identity_find_each_other(tmp_path: Path) -> None:
    with peers(tmp_path, "laptop", "tablet", "phone") as (laptop, tablet, phone):
        laptop.create_party("Trip")
        joins_identity(laptop, tablet)
        joins_identity(laptop, phone)
        until(lambda: DeviceKey(phone.device) in tablet.network.node.links)
        until(lambda: DeviceKey(tablet.device) in phone.network.node.links)


def test_who_listens_later_tells_it_then(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        until(lambda: knows(ann, bob))
        second = bob.listen("127.0.0.1:0")
        until(lambda: second in ann.network.reach_book.known()[DeviceKey(bob.device)])


def test_a_member_speaks_for_itself_alone_and_a_stranger_for_nobody(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        until(lambda: knows(ann, bob))
        other = DeviceKey(bytes(32))
        say(bob, ann, Reach({other: ("127.0.0.1:1",), DeviceKey(bob.device): ("127.0.0.1:2",)}))
        until(lambda: ann.network.reach_book.known()[DeviceKey(bob.device)][0] == "127.0.0.1:2")
        assert other not in ann.network.reach_book.known()
        eve.connect(address(ann), device=ann.device)
        until(lambda: DeviceKey(ann.device) in eve.network.node.links)
        received = ann.network.node.counters.frames_received
        say(eve, ann, Reach({DeviceKey(eve.device): ("127.0.0.1:3",)}))
        until(lambda: ann.network.node.counters.frames_received > received)
        assert DeviceKey(eve.device) not in ann.network.reach_book.known()
        assert DeviceKey(ann.device) not in eve.network.reach_book.known(), "and is told nothing"


def test_what_is_no_address_ends_the_connection(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        say(bob, ann, Reach({DeviceKey(bob.device): ("nowhere",)}))
        until(lambda: ann.network.node.counters.ended["malformed"] == 1)
        assert ann.network.node.counters.failures == {}


def test_reach_frames_are_bounded() -> None:
    many = {DeviceKey(number.to_bytes(32, "big")): ("127.0.0.1:1",) for number in range(REACH_DEVICES_MAX)}
    assert decode_mesh_frame(encode_mesh_frame(Reach(many))) == Reach(many)
    many[DeviceKey(b"\xff" * 32)] = ()
    long = {DeviceKey(bytes(32)): ("x" * (ADDRESSES_CHARACTERS_MAX + 1),)}
    for wrong in (many, long):
        with pytest.raises(MalformedFrame):
            decode_mesh_frame(encode_mesh_frame(Reach(wrong)))
