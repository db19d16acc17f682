"""`epoch fetch`: what is said of an epoch is judged when it has come, and nobody waits for nobody."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import NotFound, Refused, TimedOut, Unreachable
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.testing.inmemory import link
from network_peers import address
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[Peer, Party, Peer]]:
    """A peer that listens, its party with two epochs, and a guest who is admitted and holds nothing of it."""
    with echostore.open(tmp_path / "ann", name="ann") as ann, open_quiet(tmp_path / "bob", "bob") as bob:
        ann.listen("127.0.0.1:0")
        party = ann.create_party("Trip")
        item = party.create("property-set", n=0)
        for number in (1, 2):
            item["n"] = number
            Epochs(party).create()
        bob.enter(party.members.admit(bob.request_join(party.key)))
        yield ann, party, bob


def test_an_admitted_device_that_holds_nothing_fetches_at_the_first_try(host: tuple[Peer, Party, Peer]) -> None:
    ann, party, bob = host
    guest = bob.party(party.key)
    with pytest.raises(Unreachable, match="nothing of the party has come yet"):
        Epochs(guest).fetch(2)
    assert Epochs(guest).fetch(2, address=address(ann)).items == 1
    assert Epochs(guest).fetch(1).items == 1, "it is still connected"
    begun = time.monotonic()
    with pytest.raises(NotFound, match="no epoch 9"):
        Epochs(guest).fetch(9, timeout_s=20)
    assert time.monotonic() - begun < 15, "that there is none is known once control is here"


def test_what_came_meanwhile_is_heard_of_first(host: tuple[Peer, Party, Peer]) -> None:
    ann, party, bob = host
    guest = bob.party(party.key)
    joined = link(ann, bob, party.key)
    joined.pump()
    joined.cut()
    party.create("property-set", n=3)
    Epochs(party).create()
    with pytest.raises(NotFound, match="no epoch 3"):
        Epochs(guest).fetch(3)
    assert Epochs(guest).fetch(3, address=address(ann)).items == 2


def test_who_says_nothing_is_not_waited_for_for_ever(host: tuple[Peer, Party, Peer], tmp_path: Path) -> None:
    _, party, bob = host
    with echostore.open(tmp_path / "eve", name="eve") as eve:
        eve.listen("127.0.0.1:0")
        with pytest.raises(Unreachable, match="nothing-shared"):
            Epochs(bob.party(party.key)).fetch(2, address=address(eve), timeout_s=0.2)
        invitation = eve.create_party("Other").invite("editor")  # they know each other, and not by this party
        bob.join(invitation.ticket, invitation.passcode)
        with pytest.raises(TimedOut, match="did not come in"):
            Epochs(bob.party(party.key)).fetch(2, address=address(eve), timeout_s=0.2)
        bob.close()
        ran = Cli(tmp_path / "bob", tmp_path / "state")(
            "epoch", "fetch", "2", "--party", party.key.hex(), "--from", address(eve), "--timeout", "0.2s", "--json"
        )
        (failed,) = map(json.loads, ran.err.splitlines())
        assert (ran.status, failed["error"]["unchanged"]) == (5, "Nothing came, and nothing was changed.")


def test_the_command_says_at_once_that_nobody_is_connected(host: tuple[Peer, Party, Peer], tmp_path: Path) -> None:
    ann, party, bob = host
    bob.close()
    cli = Cli(tmp_path / "bob", tmp_path / "state")
    begun = time.monotonic()
    ran = cli("epoch", "fetch", "2")
    assert (ran.status, "no member is connected" in ran.err) == (5, True), ran
    assert "--from" in ran.err
    assert time.monotonic() - begun < 10
    told = cli("epoch", "fetch", "2", "--from", address(ann), "--timeout", "20s", "--json").ok()
    assert told.json()["items"] == 1
    missing = cli("epoch", "fetch", "9", "--from", address(ann))
    assert (missing.status, "no epoch 9" in missing.err) == (3, True), missing
    assert party.key.hex() == told.json()["party"]


def test_a_device_that_holds_nothing_is_told_to_connect(host: tuple[Peer, Party, Peer], tmp_path: Path) -> None:
    _, _, bob = host
    bob.close()
    cli = Cli(tmp_path / "bob", tmp_path / "state")
    for command in (("epoch", "list"), ("status",)):
        ran = cli(*command).ok()
        assert "nothing of the party has come yet: connect to a member" in ran.out + ran.err
        assert "all 0 blocks" not in ran.out
        assert "epoch create" not in ran.out + ran.err


def test_an_epoch_of_what_did_not_change_says_what_to_do(host: tuple[Peer, Party, Peer]) -> None:
    _, party, _ = host
    made = Epochs(party).create()  # the guest's admission changed something
    with pytest.raises(Refused, match=f"nothing has changed since epoch {made.number}") as refused:
        Epochs(party).create()
    assert refused.value.next_step
