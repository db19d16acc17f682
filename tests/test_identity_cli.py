"""Devices and recovery on the command line, beside `echostore serve` and without it."""

import json
from pathlib import Path

from cli_process import Cli
from echostore.peer.recovery import phrase_of
from echostore.wire.signing import SigningKey
from served import agreed, serve, until


def devices(cli: Cli) -> dict[str, dict[str, object]]:
    return {each["device"]: each for each in cli("device", "list", "--json").ok().json()["devices"]}


def test_devices_and_recovery_beside_serve(tmp_path: Path) -> None:
    with serve(tmp_path, "ada") as ada, serve(tmp_path, "phone") as phone, serve(tmp_path, "back") as back:
        party = ada.cli("party", "create", "Trip", "--json").ok().json()["party"]
        ada.cli("item", "create", "property-set", "title=Tickets", "-p", party).ok()
        told = ada.cli("device", "invite", "--json").ok().json()
        kept = ada.cli("party", "invitations", "--json").ok().json()["invitations"]
        assert [(each["purpose"], each["party"], each["role"]) for each in kept] == [("device", None, "")]
        assert "device" in ada.cli("party", "invitations").ok().out
        wrong = "000000" if told["passcode"] != "000000" else "111111"
        refused = phone.cli("device", "join", told["ticket"], "--passcode", wrong)
        assert (refused.status, "2 tries left" in refused.err) == (4, True)
        joined = phone.cli("device", "join", told["ticket"], "--passcode", told["passcode"], "--json").ok().json()
        assert joined["identity"] == told["identity"]
        assert [(each["party"], each["title"]) for each in joined["parties"]] == [(party, "Trip")]
        agreed(party, ada.cli, phone.cli)
        assert {each["name"] for each in devices(ada.cli).values()} == {"ada", "phone"}
        assert all(each["parties"] == [party] for each in devices(ada.cli).values())
        twice = phone.cli("device", "join", told["ticket"], "--passcode", told["passcode"])
        assert (twice.status, "identity of its own" in twice.err) == (4, True)
        assert phone.cli("identity", "phrase").status == 4

        shown = ada.cli("identity", "phrase", "--json").ok().json()
        assert (len(shown["words"]), shown["identity"]) == (24, told["identity"])
        phrase = " ".join(shown["words"])
        assert " ".join(ada.cli("identity", "phrase").ok().out.split()) == phrase
        swapped = " ".join([*shown["words"][1:], shown["words"][0]])
        for words, status in (("", 2), ("one two", 2), (swapped, 2), (phrase_of(SigningKey.generate()), 4)):
            assert back.cli("identity", "recover", "--from", phone.address, stdin=words).status == status
        restored = back.cli("identity", "recover", "--from", phone.address, "--json", stdin=phrase).ok().json()
        assert restored["identity"] == told["identity"]
        assert [each["title"] for each in restored["parties"]] == ["Trip"]
        agreed(party, ada.cli, phone.cli, back.cli)
        until(lambda: len(devices(ada.cli)) == 3)

        # So far this device reaches nobody but the phone; nothing is missing, and from now on it finds ada too.
        again = back.cli("identity", "recover", "--from", ada.address, "--json", stdin=phrase).ok().json()
        assert again["parties"] == []
        until(lambda: joined["device"] in devices(back.cli))
        dry = back.cli("device", "revoke", joined["device"], "--dry-run", "--json").ok().json()
        assert dry == {"version": 1, "device": joined["device"], "parties": [party], "revoked": False}
        back.cli("device", "revoke", joined["device"][:12], "--yes").ok()
        until(lambda: devices(ada.cli)[joined["device"]]["revoked_in"] == [party])
        assert f"{joined['device'][:8]} (revoked)" in ada.cli("party", "members").ok().out
        assert back.cli("device", "revoke", joined["device"], "--yes").status == 3
        ada.cli("identity", "phrase", "--remove-key", "--yes").ok()
        assert ada.cli("identity", "phrase").status == 4
        for running in (ada, phone, back):
            assert phrase not in running.log.read_text()


def test_device_invite_and_join_without_serve(tmp_path: Path) -> None:
    ada, phone = (Cli(tmp_path / name, tmp_path / "state") for name in ("ada", "phone"))
    party = ada("party", "create", "Trip", "--name", "ada", "--json").ok().json()["party"]
    host = ada.start("device", "invite", "--listen", "127.0.0.1:0", "--json")
    try:
        assert host.stdout is not None
        told = json.loads(host.stdout.readline())
        joined = phone(
            "device", "join", "-", "--passcode", told["passcode"], "--name", "phone", "--json", stdin=told["ticket"]
        )
        assert joined.ok().json()["name"] == "ada"
        _, narration = host.communicate(timeout=60)
    finally:
        host.kill()
        host.communicate()
    assert host.returncode == 0, narration
    assert "admitted phone" in narration
    agreed(party, ada, phone)
    assert {each["name"] for each in devices(ada).values()} == {"ada", "phone"}
    assert phone("party", "list", "--json").ok().json()["parties"][0]["title"] == "Trip"
    usage = phone("party", "join", told["ticket"], "--passcode", "1")
    assert (usage.status, "device join" in usage.err) == (2, True)


def test_recovering_the_identity_alone_and_on_a_home_in_use(tmp_path: Path) -> None:
    ada, fresh, used = (Cli(tmp_path / name, tmp_path / "state") for name in ("ada", "fresh", "used"))
    ada("init", "--name", "ada").ok()
    phrase = " ".join(ada("identity", "phrase", "--json").ok().json()["words"])
    done = fresh("identity", "recover", "--json", stdin=phrase).ok().json()
    assert done["parties"] == []
    assert done["identity"] == ada("identity", "show", "--json").ok().json()["identity"]
    assert done["device"] != ada("identity", "show", "--json").ok().json()["device"]
    used("party", "create", "Mine").ok()
    before = used("identity", "show", "--json").ok().json()
    refused = used("identity", "recover", stdin=phrase)
    assert (refused.status, "empty home" in refused.err) == (4, True)
    assert used("identity", "show", "--json").ok().json() == before
    unreachable = Cli(tmp_path / "other", tmp_path / "state")(
        "identity", "recover", "--from", "127.0.0.1:1", stdin=phrase
    )
    assert unreachable.status == 5
    assert "has the identity back" in unreachable.err
    asked = ada("identity", "phrase", "--remove-key")
    assert (asked.status, "needs a yes" in asked.err) == (2, True)
    assert ada("identity", "phrase").status == 0, "nothing was removed"
