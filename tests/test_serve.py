"""`echostore serve` with real processes: joining, converging, dying and coming back, and commands on its home."""

import inspect
import json
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

import echostore
from cli_process import Cli
from echostore.cli.app import make_app
from echostore.kernel.errors import Closed, Locked, NotFound, StorageFailed, UsageError
from echostore.peer import local_socket, service
from echostore.peer.reachable import reachable_addresses
from echostore.peer.service_http import ServiceHttp
from served import Serve, agreed, let_in, serve, until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, Serve, str]]:
    """Two services that share a party, which was made, shared and joined by commands alone."""
    folder = tmp_path_factory.mktemp("serve")
    with serve(folder, "ada", "--metrics", "127.0.0.1:0") as ada, serve(folder, "bob") as bob:
        party = ada.cli("party", "create", "Trip", "--json").ok().json()["party"]
        let_in(ada, party, bob)
        yield ada, bob, party


def test_two_homes_write_and_agree(pair: tuple[Serve, Serve, str]) -> None:
    ada, bob, party = pair
    here = ada.cli("item", "create", "property-set", "title=here", "-p", party, "--json").ok().json()
    there = bob.cli("item", "create", "property-set", "title=there", "-p", party, "--json").ok().json()
    assert here["durable"]
    agreed(party, ada.cli, bob.cli)
    assert ada.cli("item", "get", there["item"], "-p", party, "--json").ok().json()["value"]["title"] == "there"


def test_status_tells_what_only_the_service_knows(pair: tuple[Serve, Serve, str]) -> None:
    ada, bob, party = pair
    bob.cli("item", "create", "property-set", "title=x", "-p", party).ok()

    def told() -> bool:
        status = bob.cli("status", "--json").ok().json()
        (found,) = [each for each in status["parties"] if each["party"] == party]
        (device,) = status["devices"]
        return (
            found["unshared"] == 0
            and device["device"] == ada.told["device"]
            and device["connected"]
            and device["name"] == "ada"
            and all(feed["held"] == feed["processed"] == feed["known"] for feed in found["feeds"])
        )

    until(told)
    watching = bob.cli.start("status", "--watch", "--interval", "0.1", "--json")
    assert watching.stdout is not None

    def known(line: str) -> int:
        return sum(feed["known"] for each in json.loads(line)["parties"] for feed in each["feeds"])

    before = known(watching.stdout.readline())
    ada.cli("item", "create", "property-set", "title=y", "-p", party).ok()
    # A line comes with every change; the one that is waited for need not be the next.
    while known(watching.stdout.readline()) <= before:
        assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=30)
    assert watching.returncode == 130


def test_metrics_and_health(pair: tuple[Serve, Serve, str]) -> None:
    ada, _, party = pair
    with urllib.request.urlopen(f"http://{ada.told['metrics']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["echostore_connections"]) == 1
    assert float(values["echostore_received_bytes_total"]) > 0
    held, processed, known = (
        float(values[f'echostore_party_blocks{{party="{party[:16]}",state="{state}"}}'])
        for state in ("held", "processed", "known")
    )
    assert held >= processed > 0
    assert known >= held
    with urllib.request.urlopen(f"http://{ada.told['metrics']}/healthz", timeout=10) as answer:
        assert json.load(answer)["ok"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{ada.told['metrics']}/", timeout=10)


# every writing command works beside the service

WRITING = {
    ("init",): "init --name ada",
    ("identity", "profile"): "identity profile --name ada",
    ("identity", "phrase"): "identity phrase",
    ("identity", "recover"): "",
    ("device", "invite"): "device invite",
    ("device", "join"): "",
    ("quota", "set"): "quota set --feed-blocks 500",
    ("party", "create"): "party create Second --json",
    ("party", "enter"): "party enter {child} -p {third}",
    ("party", "use"): "party use {party}",
    ("party", "rename"): "party rename Renamed -p {third}",
    ("party", "pause"): "party pause {second}",
    ("party", "resume"): "party resume {second}",
    ("party", "close"): "party close {second}",
    ("party", "import"): "party import {car}",
    ("party", "invite"): "party invite {party} --for {stranger} --json",
    ("party", "uninvite"): "party uninvite {invitation}",
    ("party", "role"): "party role {party} {bob} reader",
    ("party", "group"): "party group Both {bob} {stranger} -p {party}",
    ("item", "create"): "item create growable-array 1 2 -p {party} --json",
    ("item", "append"): "item append {list} 3 -p {party}",
    ("item", "set"): "item set {item} a.b=1 -p {party}",
    ("item", "move"): "item move {item} {list} -p {party}",
    ("item", "delete"): "item delete {item} --yes -p {party}",
    ("item", "restore"): "item restore {item} -p {party}",
    ("epoch", "create"): "epoch create -p {party}",
    ("epoch", "fetch"): "epoch fetch 1 -p {party}",
    ("epoch", "gc"): "epoch gc -p {party} --yes",
    ("party", "revive"): "party revive {gone} -p {fourth}",
    ("party", "policy"): "party policy --messages 100 -p {party}",
    ("party", "capability", "issue"): "party capability issue -p {party} --json",
    ("party", "capability", "revoke"): "party capability revoke {capability} -p {party}",
    ("party", "remove"): "party remove {party} {bob} --yes",
    ("device", "revoke"): "device revoke {bobs_device} --yes -p {third}",
    ("party", "forget"): "party forget {second} --yes",
    ("party", "join"): "party join {ticket}",
    ("serve",): "",
}
"""In this order. `serve` is the one that does not want to share; recovering and joining need a home that is not in use
(test_identity_cli.py)."""


def writing_commands() -> set[tuple[str, ...]]:
    """Commands whose function takes the home to write."""
    found = set()
    app = make_app()
    for noun in app:
        command = app[noun]
        if noun.startswith("-"):
            continue
        found |= _writing_below((noun,), command)
    return found


def _writing_below(path: tuple[str, ...], command: App) -> set[tuple[str, ...]]:
    verbs = [verb for verb in command if not verb.startswith("-")]
    if verbs:
        return {each for verb in verbs for each in _writing_below((*path, verb), command[verb])}
    source = inspect.getsource(command.default_command)  # type: ignore[arg-type]  # what has no verbs has a function
    return {path} if re.search(r"\b(writing|_item_to_write|_change_state|serving)\(", source) else set()


def test_every_writing_command_is_in_the_table() -> None:
    assert writing_commands() == set(WRITING)


def test_every_writing_command_works_beside_serve(tmp_path: Path) -> None:
    with serve(tmp_path, "ada") as ada, serve(tmp_path, "bob") as bob:
        cli = ada.cli
        party = cli("party", "create", "Trip", "--json").ok().json()["party"]
        third = cli("party", "create", "Third", "--json").ok().json()["party"]
        for each in (party, third):
            let_in(ada, each, bob)
        item = cli("item", "create", "property-set", "title=x", "-p", party, "--json").ok().json()["item"]
        bobs = bob.cli("identity", "show", "--json").ok().json()
        other = bob.cli("party", "create", "Bobs", "--json").ok().json()["party"]
        elsewhere = bob.cli("party", "invite", other, "--open", "--json").ok().json()
        names = {"party": party, "third": third, "item": item, "bob": bobs["identity"], "bobs_device": bobs["device"]}
        names["child"] = cli("party", "create", "Chess", "--below", third, "--json").ok().json()["party"]
        names["fourth"] = fourth = cli("party", "create", "Fourth", "--json").ok().json()["party"]
        names["gone"] = gone = cli("item", "create", "text", "x", "-p", fourth, "--json").ok().json()["item"]
        cli("item", "delete", gone, "--yes", "-p", fourth).ok()
        cli("epoch", "create", "--discard-before", "now", "--yes", "-p", fourth).ok()
        names |= {"stranger": "ab" * 32, "ticket": elsewhere["ticket"], "car": str(tmp_path / "second.car")}
        for path, line in WRITING.items():
            if path == ("party", "import"):
                cli("party", "export", names["party"], names["car"]).ok()
            done = cli(*line.format(**names).split()).ok() if line else None
            if path == ("party", "create"):
                names["second"] = done.json()["party"]  # type: ignore[union-attr]  # it has a line
            if path == ("party", "invite"):
                names["invitation"] = done.json()["invitation"]  # type: ignore[union-attr]  # as above
            if path == ("party", "capability", "issue"):
                names["capability"] = done.json()["id"]  # type: ignore[union-attr]  # as above
            if path == ("epoch", "create"):
                cli("epoch", "verify", "1", "-p", party).ok()  # it only looks, and asks the service
            if path == ("item", "create"):
                names["list"] = done.json()["item"]  # type: ignore[union-attr]  # as above
        refused = cli("serve")
        assert refused.status == 7
        assert str(ada.process.pid) in refused.err
        # It is all there, and durable.
        assert cli("item", "get", names["list"], "-p", party, "--json").ok().json()["value"] == [1, 2, 3]
        shown = cli("item", "get", item, "-p", party, "--json").ok().json()
        assert shown["value"] == {"title": "x", "a": {"b": 1}}
        members = {each["identity"]: each for each in cli("party", "members", party, "--json").ok().json()["members"]}
        assert members[bobs["identity"]]["status"] == "removed"
        (revoked,) = [
            device
            for each in cli("party", "members", third, "--json").ok().json()["members"]
            for device in each["devices"]
            if device["device"] == bobs["device"]
        ]
        assert revoked["revoked"]
        states = {each["party"]: each["state"] for each in cli("party", "list", "--json").ok().json()["parties"]}
        assert names["second"] not in states
        assert states[other] == "active"
        (kept,) = [
            each
            for each in cli("party", "invitations", "--json").ok().json()["invitations"]
            if each["invitation"] == names["invitation"]
        ]
        assert kept["state"] == "cancelled"
        devices = cli("device", "list", "--json").ok().json()["devices"]
        assert [each["device"] for each in devices if each["this"]] == [ada.told["device"]]


def test_a_failing_command_fails_the_same_way(pair: tuple[Serve, Serve, str]) -> None:
    ada, _, party = pair
    missing = ada.cli("item", "set", "abcdef99", "a=1", "-p", party, "--json")
    assert missing.status == 3
    assert json.loads(missing.err)["error"]["code"] == "E-NOT-FOUND"
    wrong = ada.cli("party", "invite", party, "--role", "king")
    assert wrong.status == 2
    assert "king" in wrong.err


def test_content_from_standard_input(pair: tuple[Serve, Serve, str]) -> None:
    ada, _, party = pair
    made = ada.cli("item", "create", "text", "-", "-p", party, "--json", stdin="from a pipe").ok().json()
    assert ada.cli("item", "get", made["item"], "-p", party, "--json").ok().json()["value"] == "from a pipe"


# life and death


def test_kill_and_restart_at_the_same_address(tmp_path: Path) -> None:
    with serve(tmp_path, "ada") as ada, serve(tmp_path, "bob") as bob:
        party = ada.cli("party", "create", "Trip", "--json").ok().json()["party"]
        let_in(ada, party, bob)
        assert ada.stop(signal.SIGKILL) == -signal.SIGKILL
        assert (ada.cli.home / local_socket.SOCKET_NAME).exists()
        # Nobody answers at the socket that was left: the command opens the home itself.
        ada.cli("item", "create", "property-set", "title=meanwhile", "-p", party).ok()
        bob.cli("item", "create", "property-set", "title=alone", "-p", party).ok()
        with serve(tmp_path, "ada", listen=ada.address):
            agreed(party, ada.cli, bob.cli)
            assert ada.cli("party", "show", party, "--json").ok().json()["items"] == 2
        assert bob.stop(signal.SIGINT) == 0
        with serve(tmp_path, "bob") as alone:
            (device,) = alone.cli("status", "--json").ok().json()["devices"]
            assert (device["device"], device["connected"]) == (ada.told["device"], False)
        # What was remembered is dialled again by the one that joined.
        with serve(tmp_path, "ada", listen=ada.address), serve(tmp_path, "bob") as again:
            until(lambda: any(each["connected"] for each in again.cli("status", "--json").ok().json()["devices"]))
        events = bob.events()
        assert {"serving", "stopping", "connected"} <= {event["event"] for event in events}
        assert all({"time", "level", "part"} <= event.keys() for event in events)
    assert "Traceback" not in ada.log.read_text() + bob.log.read_text()


def test_the_file_of_the_socket_is_private_and_deep_homes_work(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 5)
    deep.mkdir(parents=True)
    with serve(deep, "ada") as ada:
        path = ada.cli.home / local_socket.SOCKET_NAME
        assert len(str(path)) > 108
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        ada.cli("party", "create", "Deep").ok()
        with pytest.raises(Locked):
            echostore.open(ada.cli.home, attach=False)


def test_metrics_stay_on_the_loopback() -> None:
    with pytest.raises(UsageError, match="loopback"):
        ServiceHttp(None, "192.0.2.1:0")  # type: ignore[arg-type]  # refused before the service is looked at


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        struct.pack(">I", 1 << 31) + b"x",
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x01",
    ],
)
def test_garbage_on_the_socket_ends_that_connection_alone(pair: tuple[Serve, Serve, str], data: bytes) -> None:
    ada, _, party = pair
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as garbage:
        garbage.connect(str(ada.cli.home / local_socket.SOCKET_NAME))
        garbage.sendall(data)
        garbage.shutdown(socket.SHUT_WR)
        garbage.settimeout(20)
        while garbage.recv(65536):
            pass
    ada.cli("item", "create", "property-set", "-p", party).ok()


def test_a_client_of_another_version_is_told(pair: tuple[Serve, Serve, str]) -> None:
    frames = local_socket.connect_locally(pair[0].cli.home)
    assert frames is not None
    frames.send(["attach", 99, b"token"])
    kind, error = frames.receive(20)
    assert (kind, error[0]) == ("fail", "Refused")
    assert "version" in error[1]
    frames.close()


def test_a_writer_that_dies_in_a_batch_leaves_nothing(pair: tuple[Serve, Serve, str]) -> None:
    ada, _, party = pair
    code = f"""
import echostore, os, signal
peer = echostore.open({str(ada.cli.home)!r})
party = peer.party({party!r})
with party.batch():
    party.create(type="ghost")
    print("inside", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ada.cli.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "inside\n", done.stderr
    ada.cli("item", "create", "property-set", "-p", party).ok()
    assert ada.cli("query", "--type", "ghost", "-p", party, "--json").ok().json()["items"] == []


# without a service


def test_invite_and_join_without_a_service(tmp_path: Path) -> None:
    ada, bob = Cli(tmp_path / "ada", tmp_path / "state"), Cli(tmp_path / "bob", tmp_path / "state")
    ada("init", "--name", "ada").ok()
    party = ada("party", "create", "Trip", "--json").ok().json()["party"]
    ada("item", "create", "property-set", "title=x").ok()
    hosting = ada.start("party", "invite", "--listen", "127.0.0.1:0", "--json")
    assert hosting.stdout is not None
    told = json.loads(hosting.stdout.readline())
    wrong = bob(
        "party", "join", told["ticket"], "--passcode", "000000" if told["passcode"] != "000000" else "1", "--json"
    )
    assert wrong.status == 4
    assert "2 tries left" in wrong.err
    assert bob("party", "join", told["ticket"]).status == 2
    joined = bob("party", "join", told["ticket"], "--passcode", told["passcode"], "--json").ok().json()
    assert (joined["party"], joined["items"], joined["title"]) == (party, 1, "Trip")
    _, err = hosting.communicate(timeout=60)
    assert hosting.returncode == 0, err
    assert "admitted" in err
    agreed(party, ada, bob)
    assert bob("party", "join", told["ticket"], "--passcode", told["passcode"]).status == 4
    assert ada("status", "--watch").status == 3
    assert ada("status", "--json").ok().json()["devices"] is None


def test_an_invitation_that_nobody_uses_ends_in_time(tmp_path: Path) -> None:
    ada = Cli(tmp_path / "ada", tmp_path / "state")
    ada("party", "create", "Trip").ok()
    assert ada("party", "invite", "--listen", "127.0.0.1:0", "--expires", "1s").status == 5


def test_the_bot_holds_files_before_anyone_asks(tmp_path: Path) -> None:
    with serve(tmp_path, "ada") as ada, serve(tmp_path, "bot", "--bot") as bot:
        party = ada.cli("party", "create", "Trip", "--json").ok().json()["party"]
        let_in(ada, party, bot)
        with echostore.open(ada.cli.home) as peer:
            opened = peer.party(party)
            photo = opened.files.add(bytes(range(256)) * 4096, name="photo.raw")
            opened.create(type="photo", content={"list": [photo]})
            opened.flush()
        with echostore.open(bot.cli.home) as peer:
            opened = peer.party(party)
            until(lambda: opened.query(type="photo").first() is not None)
            until(lambda: not opened.files.missing(photo))
            ada.stop()
            assert opened.files.read(photo, timeout=1) == bytes(range(256)) * 4096


# the service in this process


def test_health_tells_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOCK_S", 0.05)
    with echostore.open(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        running = service.Service(peer, listen=["127.0.0.1:0"], metrics="127.0.0.1:0")
        assert running.http is not None
        url = f"http://{running.http.address}/healthz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert json.load(answer) == {"ok": True, "problems": [], "addresses": running.addresses}
        with peer.lock, pytest.raises(urllib.error.HTTPError) as busy:
            urllib.request.urlopen(url, timeout=10)
        assert busy.value.code == 503
        assert "busy" in json.load(busy.value)["problems"][0]
        busy.value.close()
        party.runtime.failure = StorageFailed("the disk is full")
        well, told = running.health()
        assert not well
        assert "the disk is full" in told["problems"][0]
        party.runtime.failure = None
        running.close()
        assert not running.http._thread.is_alive()


def test_the_address_of_the_last_time_is_taken_again(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "one") as one, echostore.open(tmp_path / "two") as two:
        one.meta.set_setting(service.LISTEN_SETTING, "127.0.0.1:0")
        address = service.listen_as_before(one)
        assert one.meta.setting(service.LISTEN_SETTING) == address
        two.meta.set_setting(service.LISTEN_SETTING, address)
        other = service.listen_as_before(two)
        assert other != address
        assert two.meta.setting(service.LISTEN_SETTING) == other
    with echostore.open(tmp_path / "one") as again:
        assert service.listen_as_before(again) == address


def test_progress_is_a_fraction_of_what_is_known(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.create()
        party.flush()
        before = peer.network.progress(party.key)
        assert (before.held, before.processed, before.known, before.unshared) == (3, 3, 3, 3)
        assert before.caught_up
        data = next(feed.key for feed in party.status.feeds if feed.kind == "data")
        party.announced(data, 10)
        party.announced(b"f" * 32, 7)
        party.acknowledge(b"d" * 32, {data: 1})
        after = peer.network.progress(party.key)
        assert (after.held, after.known, after.unshared) == (3, 3 + 8 + 7, 2)
        assert not after.caught_up
        assert [(feed.held, feed.known) for feed in party.status.feeds if feed.key == b"f" * 32] == [(0, 7)]


# details


def test_addresses_that_mean_everywhere_are_told_as_real_ones() -> None:
    assert reachable_addresses(["127.0.0.1:5"]) == ("127.0.0.1:5",)
    told = reachable_addresses(["0.0.0.0:5"])
    assert told
    assert all(address.endswith(":5") and not address.startswith("0.0.0.0") for address in told)


def test_attaching_needs_a_service(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home") as peer:
        with pytest.raises(Locked):
            echostore.open(tmp_path / "home")
        assert peer.parties() == []


def test_a_client_is_told_when_the_service_ends(tmp_path: Path) -> None:
    with serve(tmp_path, "ada") as ada:
        peer = echostore.open(ada.cli.home)
        assert peer.name == "ada"
        ada.stop()
        with pytest.raises(Closed, match="ended"):
            peer.parties()
        with pytest.raises(Closed):
            peer.close()
    with echostore.open(ada.cli.home) as own, pytest.raises(NotFound):
        own.party("@Nothing")


def test_party_show_and_feed_list_know_what_the_service_knows(tmp_path: Path) -> None:
    with serve(tmp_path, "ada") as ada, serve(tmp_path, "bob") as bob:
        party = ada.cli("party", "create", "Trip", "--json").ok().json()["party"]
        let_in(ada, party, bob)
        ada.cli("item", "create", "text", "x", "-p", party).ok()
        until(lambda: not ada.cli("status", "--json").ok().json()["parties"][0]["unshared"])
        shown = ada.cli("party", "show", party, "--snapshot", "--json").ok().json()
        assert shown["unshared"] == 0
        assert "not known to be on another" not in shown["truth"]
        assert shown["snapshot"]
        assert ada.cli("party", "forget", party, "--dry-run", "--json").ok().json()["unshared"] == 0
        listed = ada.cli("feed", "list", "-p", party, "--json").ok().json()["feeds"]
        assert any(feed["others"] for feed in listed)
