"""Several devices of one identity: joining by ticket and passcode, sharing all parties, being revoked."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import EchoError, Refused, Unreachable, UsageError
from echostore.kernel.ids import DeviceKey
from echostore.mesh.invitation import TRIES_MAX
from echostore.mesh.ticket import read_ticket
from echostore.peer import inviting
from echostore.peer.own_devices import FRAMES_MAX
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.welcomes import device_request_bytes
from echostore.wire.mesh import Introduction, Parties, PartyEntry
from network_peers import address, cid, converged, invited, peers, until
from test_invitations import Relay


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def joined(host: Peer, device: Peer) -> list[Party]:
    """The device joins the host's identity, and may write in all its parties."""
    invitation = host.invite_device()
    entered = device.join_device(invitation.ticket, invitation.passcode)
    until(lambda: all(writes(party) for party in entered))
    return entered


def writes(party: Party) -> bool:
    """Whether this device's data feed counts in the party, as far as this peer knows."""
    own = party.runtime.data
    return own is not None and own.feed in party.runtime.processor.admission.by_id


def devices(party: Party, name: str) -> set[str]:
    return {each.name for member in party.members.all() if member.name == name for each in member.devices}


def test_a_second_device_gets_all_parties_and_writes_in_them(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (laptop, phone):
        trip, garden = laptop.create_party("Trip"), laptop.create_party("Garden")
        trip.create(type="task", title="Tickets")
        theirs = {party.title or party.key.hex(): party for party in joined(laptop, phone)}
        assert phone.identity == laptop.identity
        assert phone.device != laptop.device
        assert (phone.name, phone.myself.device_name) == ("ann", "phone")
        assert set(theirs) == {"Trip", "Garden"}
        converged(trip, theirs["Trip"])
        theirs["Trip"].create(type="task", title="Maps")
        theirs["Garden"].create(type="bed", title="Roses")
        converged(trip, theirs["Trip"])
        converged(garden, theirs["Garden"])
        assert {task["title"] for task in trip.query(type="task").all()} == {"Tickets", "Maps"}
        assert [member.name for member in trip.members.all()] == ["ann"], "one member with two devices"
        assert len(trip.members.all()[0].devices) == 2
        assert trip.rejected() == []
        assert trip.members.rejected() == []


def test_both_devices_replicate_with_other_members_and_a_reader_stays_one(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "phone") as (ann, laptop, phone):
        trip = ann.create_party("Trip")
        task = trip.create(type="task", title="Tickets")
        bobs = invited(ann, trip, laptop, role="reader")
        (phones,) = joined(laptop, phone)
        phone.connect(address(ann))
        converged(trip, bobs, phones)
        laptop.close()
        task["title"] = "Maps"
        converged(trip, phones)
        assert phones.query(type="task").all()[0]["title"] == "Maps"
        assert [(m.name, m.role.label, len(m.devices)) for m in trip.members.all() if m.name == "bob"] == [
            ("bob", "reader", 2)
        ]


def test_parties_made_or_joined_later_reach_the_other_devices_both_ways(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone", "tablet", "cat") as (laptop, phone, tablet, cat):
        assert joined(laptop, phone) == [], "an identity without parties can have devices too"
        first = laptop.create_party("First")
        until(lambda: [known.title for known in phone.parties()] == ["First"])
        converged(first, phone.party("@First"))
        (tablets,) = joined(phone, tablet)
        assert len(tablet.myself.chain()) == 3
        tablet.connect(address(laptop))
        second = tablet.create_party("Second")
        until(lambda: all("Second" in {known.title for known in peer.parties()} for peer in (laptop, phone)))
        for peer in (laptop, phone):
            until(lambda peer=peer: writes(peer.party("@Second")))
            converged(second, peer.party("@Second"))
        theirs = cat.create_party("Third")
        invitation = theirs.invite("reader")
        laptop.join(invitation.ticket, invitation.passcode)
        until(lambda: "Third" in {known.title for known in tablet.parties()})
        until(lambda: writes(tablet.party("@Third")))
        converged(first, tablets)


def test_a_device_is_the_same_after_a_restart_also_without_its_meta_store(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (laptop, phone):
        trip = laptop.create_party("Trip")
        (phones,) = joined(laptop, phone)
        converged(trip, phones)
        device = phone.device
        phone.close()
        for file in (tmp_path / "phone").glob("meta.db*"):
            file.unlink()
        with echostore.open(tmp_path / "phone") as again:
            assert (again.identity, again.device) == (laptop.identity, device)
            again.connect(address(laptop))
            party = again.party("@Trip")
            party.create(type="task", title="Maps")
            converged(trip, party)
            assert trip.members.rejected() == []
            assert len(trip.query(type="task").all()) == 1


def test_a_party_that_was_forgotten_on_a_device_does_not_come_back_by_itself(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (laptop, phone):
        laptop.create_party("Trip")
        (phones,) = joined(laptop, phone)
        phone.forget_party(phones.key)
        laptop.create_party("Garden")
        until(lambda: [known.title for known in phone.parties()] == ["Garden"])


def test_a_revoked_device_is_cut_off_and_told_of_no_party_any_more(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "phone") as (laptop, bob, phone):
        trip = laptop.create_party("Trip")
        bobs = invited(laptop, trip, bob)
        (phones,) = joined(laptop, phone)
        phones.create(type="task", title="Before")
        converged(trip, bobs, phones)
        phone.network.disconnect(address(laptop))
        until(lambda: not phone.network.connections())
        phones.create(type="task", title="Beyond the cut")
        phones.flush()
        trip.members.revoke_device(laptop.identity, phone.device)
        trip.create(type="task", title="Secret")
        converged(trip, bobs)
        garden = laptop.create_party("Garden")
        phone.network.connect(address(laptop), keep=False)
        until(lambda: laptop.network.node.counters.ended["removed"] == 1)  # it was told, and that was all
        until(lambda: not phone.network.connections())
        for peer in (laptop, bob):
            phone.network.connect(address(peer), keep=False)
        until(lambda: len(phone.network.connections()) == 2)
        # Both have looked at the connection once they have answered something on it.
        for link in list(phone.network.node.links.values()):
            answer = phone.network.call(phone.network.own_devices.ask(link, prove=False))
            assert answer == Parties(())
        converged(trip, bobs)
        for party in (trip, bobs):
            assert {task["title"] for task in party.query(type="task").all()} == {"Before", "Secret"}
        assert {task["title"] for task in phones.query(type="task").all()} == {"Before"}, "it knows the cut as well"
        assert [known.title for known in phone.parties()] == ["Trip"]
        assert len(garden.members.all()[0].devices) == 1


@pytest.mark.parametrize("use", ["own party", "forgotten party", "adopted local party"])
def test_a_home_whose_identity_is_in_use_keeps_it(tmp_path: Path, use: str) -> None:
    with peers(tmp_path, "ann", "bob") as (laptop, bob):
        laptop.create_party("Trip")
        mine = bob.create_party("Mine", local=use.startswith("adopted"))
        if use == "forgotten party":
            bob.forget_party(mine.key)
        elif use == "adopted local party":
            mine.members.adopt()
        identity, invitation = bob.identity, laptop.invite_device()
        with pytest.raises(Refused, match="identity of its own"):
            bob.join_device(invitation.ticket, invitation.passcode)
        assert bob.identity == identity
        assert invitation.state.tries == {}


def test_a_local_party_does_not_stand_in_the_way(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (laptop, phone):
        laptop.create_party("Trip")
        notes = phone.create_party("Notes", local=True)
        joined(laptop, phone)
        notes.create(type="note", title="still mine")
        assert len(notes.query(type="note").all()) == 1


def test_tickets_for_devices_and_for_parties_are_not_mixed_up(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        for_device, for_party = ann.invite_device(), trip.invite()
        with pytest.raises(UsageError, match="one more device"):
            bob.join(for_device.ticket, for_device.passcode)
        with pytest.raises(UsageError, match="for a party"):
            bob.join_device(for_party.ticket, for_party.passcode)
        # A guest that lies about the purpose gets what the host has issued, and nothing else.
        bent = replace(read_ticket(for_device.ticket), purpose=read_ticket(for_party.ticket).purpose, party=trip.key)
        with pytest.raises(Refused):
            bob.join(bent.text(), for_device.passcode)
        bent = replace(read_ticket(for_party.ticket), purpose=read_ticket(for_device.ticket).purpose)
        with pytest.raises(Refused):
            bob.join_device(bent.text(), for_party.passcode)
        assert bob.identity != ann.identity
        assert len(trip.members.all()) == 1
        assert len(trip.members.all()[0].devices) == 1


def test_three_wrong_passcodes_end_a_device_invitation_for_that_device(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        ann.create_party("Trip")
        invitation = ann.invite_device()
        wrong = "000000" if invitation.passcode != "000000" else "111111"
        for left in ("2 tries", "1 try", "0 tries"):
            with pytest.raises(Refused, match=f"{left} left"):
                eve.join_device(invitation.ticket, wrong)
        with pytest.raises(Refused, match="too many wrong passcodes"):
            eve.join_device(invitation.ticket, invitation.passcode)
        assert (invitation.state.ended, invitation.state.tries_left) == ("", TRIES_MAX - 3)
        assert eve.identity != ann.identity


def test_a_used_cancelled_or_expired_device_invitation_says_so(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone", "eve") as (ann, phone, eve):
        invitation = ann.invite_device()
        phone.join_device(invitation.ticket, invitation.passcode)
        assert invitation.wait(timeout=5).events == ("admitted phone", "used")
        with pytest.raises(Refused, match="has been used"):
            eve.join_device(invitation.ticket, invitation.passcode)
        cancelled = ann.invite_device()
        cancelled.cancel()
        with pytest.raises(Refused, match="cancelled"):
            eve.join_device(cancelled.ticket, cancelled.passcode)
        brief = ann.invite_device(expires_s=0.1)
        time.sleep(0.2)
        lying = replace(read_ticket(brief.ticket), expires_ms=2**50)  # the guest's own word does not count
        for ticket in (brief.ticket, lying.text()):
            with pytest.raises(Refused, match="expired"):
                eve.join_device(ticket, brief.passcode)
        with pytest.raises(UsageError):
            ann.invite_device(expires_s=0)
    with echostore.open(tmp_path / "deaf") as deaf, pytest.raises(Refused, match="listens nowhere"):
        deaf.invite_device()


def test_someone_in_the_middle_gets_no_device_in(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone", "eve") as (ann, phone, eve):
        trip = ann.create_party("Trip")
        invitation = ann.invite_device()
        relay = Relay(eve, ann)
        bent = replace(read_ticket(invitation.ticket), addresses=(address(eve),), host=DeviceKey(eve.device))
        with pytest.raises(EchoError):
            phone.join_device(bent.text(), invitation.passcode)
        assert relay.handed_on >= 2, "it did reach the host"
        assert invitation.state.tries_left == TRIES_MAX - 1
        straight = replace(read_ticket(invitation.ticket), addresses=(address(eve),))
        with pytest.raises(Unreachable, match="wrong-device"):
            phone.join_device(straight.text(), invitation.passcode)
        assert phone.identity != ann.identity
        assert len(trip.members.all()[0].devices) == 1


def test_a_welcome_whose_chain_leads_elsewhere_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "phone") as (ann, phone):
        identity, invitation = phone.identity, ann.invite_device()
        monkeypatch.setattr(ann.myself, "vouch_for", lambda device, name: ann.myself.chain())
        with pytest.raises(Refused, match="did not understand"):
            phone.join_device(invitation.ticket, invitation.passcode)
        assert phone.identity == identity


def test_a_request_for_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        ann.create_party("Trip")
        invitation = ann.invite_device()
        monkeypatch.setattr(
            inviting, "device_request_bytes", lambda device, name: device_request_bytes(b"x" * 32, name)
        )
        with pytest.raises(Refused, match="for someone else"):
            eve.join_device(invitation.ticket, invitation.passcode)
        assert ann.network.own_devices.known() == {}
        for malformed in (b"", b"\xc1", b"\x93\x01\xc0\xc0"):
            monkeypatch.setattr(inviting, "device_request_bytes", lambda device, name, sent=malformed: sent)
            with pytest.raises(Refused, match="did not understand"):
                eve.join_device(invitation.ticket, invitation.passcode)


# introductions


def ended(peer: Peer, frame: Any) -> str:
    """How the other side of this peer's only connection ends it when it gets a frame."""
    (link,) = peer.network.node.links.values()
    peer.network.soon(lambda: link.connection.send(frame))
    until(lambda: link.connection.ended is not None)
    return link.connection.ended.detail


def test_a_stranger_who_introduces_itself_learns_nothing(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone", "eve") as (ann, phone, eve):
        trip = ann.create_party("Trip")
        joined(ann, phone)
        chains = {
            "another device's chain": tuple(each.SerializeToString() for each in phone.myself.chain()),
            "no credential": (b"\xff\xff",),
        }
        for chain in chains.values():
            eve.connect(address(ann), device=ann.device)
            assert "malformed" in ended(eve, Introduction(ann.myself.identity, chain))
            eve.network.disconnect(address(ann))
            until(lambda: not eve.network.connections())
        eve.connect(address(ann), device=ann.device)
        own = tuple(each.SerializeToString() for each in eve.myself.chain())
        assert "malformed" in ended(eve, Introduction(eve.myself.identity, own, bytes(64)))
        eve.network.disconnect(address(ann))
        until(lambda: not eve.network.connections())
        eve.connect(address(ann), device=ann.device)
        (link,) = eve.network.node.links.values()
        for prove in (False, True):
            assert eve.network.call(eve.network.own_devices.ask(link, prove=prove)) == Parties(())
        # Parties of someone who is no device of this identity are not entered.
        entry = PartyEntry(eve.create_party("Bait").key, trip.runtime.control.cursor.key, "Bait")
        eve.network.soon(lambda: link.connection.send(Parties((entry,))))
        assert eve.network.call(eve.network.own_devices.ask(link, prove=False)) == Parties(())
        assert [known.title for known in ann.parties()] == ["Trip"]


def test_introductions_without_end_end_the_connection(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (ann, phone):
        joined(ann, phone)
        (link,) = phone.network.node.links.values()
        for _ in range(FRAMES_MAX):
            phone.network.soon(lambda: link.connection.send(Parties(())))
        assert "without end" in ended(phone, Parties(()))


def test_the_parties_of_both_devices_have_equal_states(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone") as (laptop, phone):
        trip = laptop.create_party("Trip")
        for number in range(50):
            trip.create(type="task", number=number)
        (phones,) = joined(laptop, phone)
        with phones.batch():
            for number in range(50, 60):
                phones.create(type="task", number=number)
        converged(trip, phones)
        assert cid(trip) == cid(phones)
        assert len(phones.query(type="task").all()) == 60
