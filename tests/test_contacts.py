"""Contacts follow from shared parties; groups are admitted, changed and removed as one."""

from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Refused, UsageError
from echostore.peer.peer import Peer
from network_peers import address, converged, invited, peers, until
from test_own_devices import joined


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def seen(peer: Peer) -> dict[str, list[tuple[str, str]]]:
    return {each.name: [(party.title, party.role) for party in each.parties] for each in peer.contacts}


def test_contacts_are_the_members_of_shared_parties(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        assert ann.contacts == []
        trip, garden = ann.create_party("Trip"), ann.create_party("Garden")
        invited(ann, trip, bob, role="reader")
        invited(ann, garden, bob)
        invited(ann, garden, cat, role="admin")
        assert seen(ann) == {"bob": [("Trip", "reader"), ("Garden", "editor")], "cat": [("Garden", "admin")]}
        bobs = next(each for each in ann.contacts if each.name == "bob")
        assert bobs.identity == bob.identity
        assert [device.device for device in bobs.devices] == [bob.device]
        assert bobs.seen_ms == bobs.devices[0].seen_ms == ann.network.seen[bob.device].at_ms
        assert (bobs.connected, bobs.devices[0].connected) == (True, True)
        until(lambda: set(seen(cat)) == {"ann", "bob"})
        assert next(each for each in cat.contacts if each.name == "bob").seen_ms is None, "they have never met"
        cat.party(garden.key).members.set_profile("Catherine")
        until(lambda: "Catherine" in seen(ann))
        garden.members.remove(cat.identity)
        assert set(seen(ann)) == {"bob"}
        ann.close_party(garden.key)
        assert seen(ann) == {"bob": [("Trip", "reader")]}
        bob.close()
        until(lambda: not ann.contacts[0].connected)
        assert not ann.contacts[0].devices[0].connected


def test_own_devices_are_no_contacts_and_those_of_others_are_counted(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "phone") as (ann, bob, phone):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        joined(bob, phone)
        until(lambda: len(ann.contacts[0].devices) == 2)
        assert seen(bob) == {"ann": [("Trip", "owner")]}
        until(lambda: seen(phone) == {"ann": [("Trip", "owner")]})
        bob.revoke_device(phone.device)
        converged(trip, bobs)
        assert [device.device for device in ann.contacts[0].devices] == [bob.device]


def test_contacts_on_the_command_line(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        invited(ann, ann.create_party("Trip"), bob)
        identity, device = bob.identity.hex(), bob.device.hex()
    cli = Cli(tmp_path / "ann", tmp_path / "state")
    (shown,) = cli("contact", "list", "--json").ok().json()["contacts"]
    assert (shown["identity"], shown["name"], shown["seen"]) == (identity, "bob", None)
    assert [(party["title"], party["role"]) for party in shown["parties"]] == [("Trip", "editor")]
    assert [each["device"] for each in shown["devices"]] == [device]
    assert "Trip" in cli("contact", "list").ok().out
    alone = Cli(tmp_path / "alone", tmp_path / "state")
    alone("init").ok()
    assert "nobody shares a party" in alone("contact", "list").ok().err


# groups


def roles(peer: Peer) -> dict[str, str | None]:
    return {m.name: m.role.label if m.role else None for m in peer.party("@Trip").members.all()}


def test_a_group_is_admitted_changed_and_removed_as_one(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        key = trip.members.new_group("Drivers", "editor", [bob.identity, cat.identity])
        parties = [trip, *(invited(ann, trip, guest, role="reader") for guest in (bob, cat))]
        converged(*parties)
        assert roles(ann) == {"ann": "owner", "bob": "editor", "cat": "editor"}, "the greater of the two roles"
        (group,) = trip.members.groups()
        assert (group.name, group.members) == ("Drivers", tuple(sorted([bob.identity, cat.identity])))
        task = parties[1].create(type="task", title="by bob")
        converged(*parties)
        assert trip.get(task.id)["title"] == "by bob"
        trip.members.change_role(key, "admin")
        until(lambda: all(roles(peer)["cat"] == "admin" for peer in (ann, bob, cat)))
        trip.members.remove(key)
        assert roles(ann) == {"ann": "owner", "bob": None, "cat": None}, "they were in by the group alone"
        assert trip.members.groups()[0].role is None
        with pytest.raises(Refused):
            parties[1].members.new_group("Coup", "owner", [cat.identity])
        for wrong in ([], [b"short"]):
            with pytest.raises(UsageError):
                trip.members.new_group("Nobody", "editor", wrong)


def test_groups_on_the_command_line(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        invited(ann, ann.create_party("Trip"), bob, role="reader")
        invited(ann, ann.create_party("Garden"), bob)
        bobs = bob.identity.hex()
        assert address(ann)
    cli = Cli(tmp_path / "ann", tmp_path / "state")
    stranger = "ab" * 32
    made = cli("party", "group", "Drivers", "@bob", stranger, "-p", "@Trip", "--json").ok().json()
    assert made["members"] == sorted([bobs, stranger])
    (shown,) = cli("party", "groups", "-p", "@Trip", "--json").ok().json()["groups"]
    assert (shown["group"], shown["name"], shown["role"]) == (made["group"], "Drivers", "editor")
    assert {each["identity"]: each["name"] for each in shown["members"]} == {bobs: "bob", stranger: stranger[:8]}
    assert "Drivers" in cli("party", "groups", "-p", "@Trip").ok().out
    assert cli("party", "groups", "-p", "@Garden", "--json").ok().json()["groups"] == []
    cli("party", "role", "@Trip", "@Drivers", "admin").ok()
    why = cli("party", "why", "@Drivers", "-p", "@Trip", "--json").ok().json()["steps"]
    assert [step["act"] for step in why][:2] == ["GroupAdmit", "RoleChange"]
    assert all(step["valid"] for step in why)
    dry = cli("party", "remove", "@Trip", "@Drivers", "--dry-run").ok()
    assert "role to 2 members" in dry.err
    cli("party", "remove", "@Trip", made["group"][:10], "--yes").ok()
    assert cli("party", "groups", "-p", "@Trip", "--json").ok().json()["groups"][0]["role"] is None
    assert cli("party", "group", "X", "@nobody", "-p", "@Trip").status == 3
    assert cli("party", "group", "X", "-p", "@Trip").status == 2
    assert cli("party", "group", "X", "@bob", "--role", "king", "-p", "@Trip").status == 2
    with echostore.open(tmp_path / "ann") as ann:
        assert len(ann.party("@Trip").members.groups()) == 1
