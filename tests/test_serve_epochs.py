"""Epochs that a running service makes by itself, on a home that nobody connects to."""

import asyncio
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.party.epoch_policy import EPOCH_GRACE, EPOCH_MESSAGES
from echostore.peer.service import Service
from served import serve, until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def epochs(cli: Cli) -> int:
    """How many there are; a command that reads opens nothing in the service."""
    return len(cli("epoch", "list", "--json").ok().json()["epochs"])


@pytest.mark.parametrize("trigger", [("--age", "1s"), ("--size", "50"), ("--messages", "1")])
def test_a_policy_that_is_set_beside_serve_holds_at_once(tmp_path: Path, trigger: tuple[str, str]) -> None:
    with serve(tmp_path, "ada") as ada:
        ada.cli("party", "create", "Trip").ok()
        ada.cli("party", "policy", *trigger, "--grace", "1s").ok()
        item = ada.cli("item", "create", "property-set", "n=1", "--json").ok().json()["item"]
        before = until(lambda: epochs(ada.cli))
        ada.cli("item", "set", item, f"n={'more' * 100}").ok()
        until(lambda: epochs(ada.cli) > before)


def test_what_is_overdue_is_made_up_for_when_serve_starts(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "ada", tmp_path / "state")
    cli("init", "--name", "ada").ok()
    cli("party", "create", "Trip").ok()
    cli("party", "policy", "--messages", "1", "--grace", "0").ok()
    cli("item", "create", "property-set", "n=1").ok()
    assert epochs(cli) == 0
    with serve(tmp_path, "ada"):
        until(lambda: epochs(cli))


def test_a_service_opens_parties_with_triggers_and_no_others(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False) as peer:
        _, busy, before = (peer.create_party(title) for title in ("quiet", "busy", "before"))
        child = peer.create_child(busy, "below")
        for party in (busy, before):
            party.members.set_policy({EPOCH_MESSAGES: b"1", EPOCH_GRACE: b"0"})
        before.members.set_policy({EPOCH_MESSAGES: b"0"})
    with echostore.open(tmp_path / "home") as peer:
        service = Service(peer, listen=["127.0.0.1:0"])
        try:
            until(lambda: {busy.key, child.key} <= {party.key for party in peer.open_parties()})
            peer.network.call(asyncio.sleep(0))  # what the network does about opened parties is done
            assert {party.key for party in peer.open_parties()} == {busy.key, child.key}
        finally:
            service.close()
