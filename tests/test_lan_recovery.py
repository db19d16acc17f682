"""Recovery on the local network: who is found, and that strangers learn nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_process import Cli
from echostore.kernel.errors import Unreachable
from echostore.kernel.ids import DeviceKey, IdentityKey
from echostore.mesh.connection import Ended
from echostore.peer.peer import Peer
from echostore.peer.recovery import key_of, phrase_of
from echostore.peer.seeking import SEEKS_MAX
from echostore.wire.mesh import (
    MeshFrame,
    Seek,
    decode_mesh_frame,
    encode_mesh_frame,
    found_tag,
    introduction_bytes,
    seek_bytes,
    seek_tag,
)
from echostore.wire.signing import SigningKey
from echostore.wire.sync import MalformedFrame
from network_peers import converged, invited, peers, until
from test_own_devices import writes

LOOPBACK = ("127.0.0.1",)
HASH = bytes(range(32))
_ENDED = Ended("closing")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


# the question, and who answers it


class Asker:
    """A link on which somebody asks, and what it is told."""

    def __init__(self, peer: Peer, device: SigningKey) -> None:
        self.sent: list[MeshFrame] = []
        self._peer = peer
        connection = SimpleNamespace(handshake_hash=HASH, send=self.sent.append)
        self._link: Any = SimpleLink(device=DeviceKey(device.public), connection=connection)

    def ask(self, frame: Seek) -> bytes:
        self._peer.network.own_devices.seeking.receive(self._link, frame)
        answer = self.sent[-1]
        assert isinstance(answer, Seek)
        assert answer.proof == b""
        return answer.tag


class SimpleLink(SimpleNamespace):
    __hash__ = object.__hash__


def question(key: SigningKey, device: SigningKey, *, signed: bytes | None = None, by: SigningKey | None = None) -> Seek:
    identity = IdentityKey(key.public)
    signed = seek_bytes(HASH, identity, DeviceKey(device.public)) if signed is None else signed
    return Seek(seek_tag(HASH, identity), (by or key).sign(signed))


def test_only_the_identity_itself_is_told_that_it_is_known(tmp_path: Path) -> None:
    device, eve = SigningKey.generate(), SigningKey.generate()
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        invited(ann, ann.create_party("Trip"), bob)
        key = ann.myself.identity_key
        yes = found_tag(HASH, IdentityKey(key.public))
        for peer in (ann, bob):
            assert Asker(peer, device).ask(question(key, device)) == yes
        own = DeviceKey(device.public)
        told = [
            Asker(bob, device).ask(question(key, device, by=eve)),
            Asker(bob, device).ask(question(eve, device)),
            Asker(bob, eve).ask(question(key, device)),  # of another device: it was overheard
            Asker(bob, device).ask(
                question(key, device, signed=introduction_bytes(HASH, IdentityKey(key.public), own))
            ),
            Asker(bob, device).ask(Seek(bytes(32), question(key, device).proof)),
        ]
        assert yes not in told
        assert len(set(told)) == len(told), "random, each time anew"


def test_who_was_removed_is_not_known_any_more(tmp_path: Path) -> None:
    device = SigningKey.generate()
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        invited(ann, party, bob)
        key = bob.myself.identity_key
        yes = found_tag(HASH, IdentityKey(key.public))
        assert Asker(ann, device).ask(question(key, device)) == yes
        party.members.remove(bob.identity)
        assert Asker(ann, device).ask(question(key, device)) != yes


def test_questions_on_one_connection_are_bounded(tmp_path: Path) -> None:
    device = SigningKey.generate()
    with peers(tmp_path, "ann") as (ann,):
        asker = Asker(ann, device)
        for _ in range(SEEKS_MAX):
            asker.ask(question(device, device))
        with pytest.raises(MalformedFrame):
            asker.ask(question(device, device))


def test_a_question_says_nothing_to_who_does_not_know_the_identity() -> None:
    key, device = SigningKey.generate(), SigningKey.generate()
    sent = question(key, device)
    data = encode_mesh_frame(sent)
    assert decode_mesh_frame(data) == sent
    for secret in (key.public, key.seed, device.public):
        assert secret not in data
    assert seek_tag(HASH, IdentityKey(key.public)) != seek_tag(bytes(32), IdentityKey(key.public)), "per connection"
    assert seek_tag(HASH, IdentityKey(key.public)) != found_tag(HASH, IdentityKey(key.public)), "an echo is no answer"
    for wrong in (Seek(b"", bytes(64)), Seek(bytes(31), b""), Seek(bytes(32), bytes(63))):
        with pytest.raises(MalformedFrame):
            decode_mesh_frame(encode_mesh_frame(wrong))


# on the loopback


def test_an_identity_comes_back_without_an_address(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve", "fresh") as (ann, bob, eve, fresh):
        trip = ann.create_party("Trip")
        trip.create(type="task", title="Tickets")
        bobs = invited(ann, trip, bob)
        eve.create_party("Trip")
        phrase = ann.recovery_phrase()
        ann.close()
        for peer in (bob, eve):
            peer.network.discover(interfaces=LOOPBACK)

        def back() -> list[Any]:
            try:
                return fresh.recover(phrase, timeout=60, lan=True, interfaces=LOOPBACK)
            except Unreachable:  # announcements get lost on a busy machine; then it is run again, as people do
                return []

        (party,) = until(back)
        until(lambda: writes(party))
        party.create(type="task", title="Maps")
        converged(bobs, party)
        assert {task["title"] for task in bobs.query(type="task").all()} == {"Tickets", "Maps"}
        # A stranger was dialled at most, and shares nothing.
        assert not [each for each in fresh.network.connections() if each.device == eve.device and each.parties]
        assert fresh.network.lan is None, "nothing of this machine is announced"


def test_nobody_is_found_among_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echostore.peer.recovery.LAN_S", 1.0)
    with peers(tmp_path, "eve", "fresh") as (eve, fresh):
        eve.create_party("Trip")
        eve.network.discover(interfaces=LOOPBACK)
        key = SigningKey.generate()
        with pytest.raises(Unreachable, match="nobody on the local network"):
            fresh.recover(phrase_of(key), lan=True, interfaces=LOOPBACK)
        assert fresh.identity == key.public
        assert fresh.parties() == []
        until(lambda: not fresh.network.connections())


def test_a_stranger_that_echoes_the_question_is_not_believed(tmp_path: Path) -> None:
    with peers(tmp_path, "eve", "fresh") as (eve, fresh):
        key = SigningKey.generate()
        eve.network.own_devices.seeking.receive = lambda link, frame: link.connection.send(Seek(frame.tag))  # type: ignore[method-assign]  # a liar
        seeking, (host, port) = fresh.network.own_devices.seeking, eve.network.addresses[0].split(":")
        assert fresh.network.call(seeking._ask(host, int(port), key)) is None
        eve.network.own_devices.seeking.receive = lambda link, frame: link.connection.end(_ENDED)  # type: ignore[method-assign]  # one that hangs up
        assert fresh.network.call(seeking._ask(host, int(port), key)) is None
        assert fresh.network.call(seeking._ask(host, 1, key)) is None


def test_strangers_are_let_go_and_a_connection_that_stood_before_stays(tmp_path: Path) -> None:
    with peers(tmp_path, "eve", "fresh") as (eve, fresh):
        key = SigningKey.generate()
        seeking, (host, port) = fresh.network.own_devices.seeking, eve.network.addresses[0].split(":")
        assert fresh.network.call(seeking._ask(host, int(port), key)) is None
        until(lambda: not fresh.network.connections())
        until(lambda: not eve.network.connections())
        fresh.network.connect(eve.network.addresses[0], device=eve.device, keep=False)
        assert fresh.network.call(seeking._ask(host, int(port), key)) is None
        (stands,) = fresh.network.connections()
        assert stands.device == eve.device


def test_a_device_knows_its_own_identity_before_it_is_in_any_party(tmp_path: Path) -> None:
    device = SigningKey.generate()
    with peers(tmp_path, "ann") as (ann,):
        key = ann.myself.identity_key
        assert Asker(ann, device).ask(question(key, device)) == found_tag(HASH, IdentityKey(key.public))


def test_the_command_says_when_only_the_identity_came_back(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    phrase = phrase_of(SigningKey.generate())
    alone = cli("identity", "recover", "--no-lan", "--json", stdin=phrase).ok().json()
    assert (alone["identity"], alone["parties"]) == (key_of(phrase).public.hex(), [])
    searched = cli("identity", "recover", "--timeout", "1s", "--json", stdin=phrase).ok()
    assert searched.json()["parties"] == []
    assert "run it again with --from" in searched.err
    assert cli("identity", "recover", "--timeout", "1s", stdin="one two").status == 2
