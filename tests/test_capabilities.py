"""Capabilities of thin clients: signed by a member, worth what the member may do, and taken back at once."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from cli_process import Cli
from echostore.cli.page_link import PLANNER
from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.kernel.ids import DeviceKey, PartyKey
from echostore.kernel.party.credentials import CapabilityRevoke
from echostore.kernel.query.spec import QuerySpec
from echostore.peer import coherence_service
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.capabilities import (
    ANY_TYPE,
    Grants,
    ReadPattern,
    capability_from_text,
    capability_text,
    read_capability,
    sign_capability,
)
from echostore.wire.generated import index_pb2 as pb
from echostore.wire.index_spec import IndexQuery, MalformedIndex
from echostore.wire.signing import SigningKey
from network_peers import address, invited, peers, until
from served import Serve
from thin_client import Closed, ThinClient

KEY = SigningKey.from_seed(b"k" * 32)
PARTY = PartyKey(b"p" * 32)
GRANTS = Grants(
    PARTY,
    DeviceKey(KEY.public),
    b"i" * 16,
    (ReadPattern(("note", "task")), ReadPattern(all_items=True)),
    ("task",),
    messages=True,
    holder=b"h" * 32,
    expires_ms=2000,
    issued_ms=1000,
    sealers=(DeviceKey(KEY.public),),
)


def test_a_capability_comes_back_as_it_was_signed() -> None:
    data = sign_capability(GRANTS, KEY)
    assert read_capability(data) == GRANTS
    assert capability_from_text(" " + capability_text(data) + "\n") == data
    assert len(capability_text(data)) < 600


@pytest.mark.parametrize(
    "bad",
    [
        {"id": b"short"},
        {"party": b"short"},
        {"holder": b"short"},
        {"write": ("",)},
        {"write": ("x" * 300,)},
        {"read": (ReadPattern(),) * 65},
        {"read": (ReadPattern(tuple(f"t{n}" for n in range(300))),)},
        {"sealers": (DeviceKey(b"short"),)},
    ],
)
def test_what_no_reader_would_take_is_never_signed(bad: dict[str, Any]) -> None:
    with pytest.raises(MalformedIndex):
        sign_capability(replace(GRANTS, **bad), KEY)


@given(st.integers(0, 2000), st.integers(0, 7))
def test_a_bent_capability_is_worth_nothing(place: int, bit: int) -> None:
    data = bytearray(sign_capability(GRANTS, KEY))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(MalformedIndex):
        read_capability(bytes(data))


def test_bytes_in_another_form_are_no_capability() -> None:
    data = sign_capability(GRANTS, KEY)
    message = pb.Capability.FromString(data)
    body = message.body + b"\x38\x01"  # `messages` once more: the same meaning in other bytes
    other = pb.Capability(body=body, signature=KEY.sign(b"echostore/capability/1" + body))
    with pytest.raises(MalformedIndex, match="canonical"):
        read_capability(other.SerializeToString())
    with pytest.raises(MalformedIndex):
        read_capability(b"x" * 20_000)
    with pytest.raises(MalformedIndex):
        capability_from_text("not base64 !")


def test_what_is_granted() -> None:
    tasks, boards, anything = (IndexQuery(PARTY, QuerySpec.start(each)) for each in ("task", "board", None))
    one = IndexQuery(PARTY, item=b"i" * 16)  # type: ignore[arg-type]
    narrow = replace(GRANTS, read=(ReadPattern(("task",)),))
    assert [narrow.may_read(each) for each in (tasks, boards, anything, one)] == [True, False, False, False]
    assert [narrow.may_read(one, "task"), narrow.may_read(one, "board")] == [True, False]
    any_type = replace(GRANTS, read=(ReadPattern(),))
    assert [any_type.may_read(each) for each in (tasks, boards, anything, one)] == [True, True, False, False]
    assert all(GRANTS.may_read(each) for each in (tasks, boards, anything, one))
    assert not GRANTS.may_read(IndexQuery(PartyKey(b"o" * 32), QuerySpec.start("task")))
    assert not replace(GRANTS, read=()).may_read(tasks)
    assert [GRANTS.may_write("task"), GRANTS.may_write("board")] == [True, False]
    assert replace(GRANTS, write=(ANY_TYPE,)).may_write("board")


# issued by a peer


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Thin")


def test_issued_listed_revoked_and_kept(tmp_path: Path) -> None:
    clock = count(time.time_ns() // 1_000_000)  # of two that were issued in one millisecond either may be the first
    with echostore.open(tmp_path / "home", name="Root", now_ms=lambda: next(clock)) as peer:
        party = peer.create_party("Thin")
        one = party.capability(read=["task", "note"], write="task", name="kiosk", expires_s=60)
        two = party.capability(messages=True)
        assert (one.read, one.write, two.read, two.write) == (("note", "task"), ("task",), ("*",), ())
        assert one.expires_ms - one.issued_ms == 60_000
        assert party.capabilities.revoke(one.id[:10]) == one.id
        party.capabilities.revoke(one.id)
        stranger = "ab" * 16
        party.capabilities.revoke(stranger)
    with echostore.open(tmp_path / "home") as peer:
        party = peer.party("@Thin")
        kept = party.capabilities.issued()
        assert [(each.id, each.revoked_ms is None) for each in kept] == [(one.id, False), (two.id, True)]
        assert kept[0].text == one.text
        assert party.capabilities.revoked() == sorted([bytes.fromhex(one.id) + peer.device, bytes.fromhex(stranger)])
        assert party.capabilities.why_not(read_capability(capability_from_text(one.text))) == "revoked"
        assert party.capabilities.why_not(read_capability(capability_from_text(two.text))) is None


def test_wrong_terms(party: Party) -> None:
    for terms in (
        {"expires_s": 0},
        {"expires_s": -5},
        {"expires_s": None},
        {"expires_s": "1h"},
        {"holder": b"short"},
        {"read": 5},
        {"write": [5]},
        {"messages": "yes"},
        {"write": ["x" * 300]},
    ):
        with pytest.raises((UsageError, TypeError)):
            party.capability(**terms)
    with pytest.raises(NotFound):
        party.capabilities.revoke("abcdef")
    with pytest.raises(NotFound):
        party.capabilities.revoke("")
    assert party.capabilities.issued() == []


def test_a_revoked_capability_is_cut_off_at_once_and_no_other(
    peer: Peer, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coherence_service, "SWEEP_S", 3600.0)  # not by looking now and then
    url = peer.serve_thin("127.0.0.1:0")
    bad, good = party.capability(write="*"), party.capability()
    party.create(type="task")
    with ThinClient(url, good.text) as stays:
        clients = [ThinClient(url, bad.text).open() for _ in range(2)]
        for client in clients:
            client.want(client.spec(QuerySpec.start("task")))
        party.capabilities.revoke(bad.id)
        for client in clients:
            closed = client.until_closed()
            assert (closed.code, closed.reason) == (4401, "revoked")
        with pytest.raises(Closed, match="4401 revoked"):
            ThinClient(url, bad.text).open()
        assert len(stays.want(stays.spec(QuerySpec.start("task")))) == 1
        assert peer.thin_services[0].refusals() == {"revoked": 3}


def test_what_one_peer_revoked_no_other_peer_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence_service, "SWEEP_S", 3600.0)
    with peers(tmp_path, "one", "two") as (one, two):
        party = one.create_party("Thin")
        theirs = invited(one, party, two)
        bad, good = party.capability(write="*"), party.capability(write="*")
        url = two.serve_thin("127.0.0.1:0")
        with ThinClient(url, good.text) as stays:
            client = ThinClient(url, bad.text).open()
            client.create("task", n=1)
            client.settle()
            party.capabilities.revoke(bad.id)
            closed = client.until_closed()
            assert (closed.code, closed.reason) == (4401, "revoked")
            stays.create("task", n=2)
            stays.settle()
        assert theirs.query("task").count() == 2
        assert party.members.why(bad.id)[0].act == "CapabilityRevoke"
    with echostore.open(tmp_path / "two") as two, pytest.raises(Closed, match="4401 revoked"):
        ThinClient(two.serve_thin("127.0.0.1:0"), bad.text).open()


def test_who_may_revoke_what(tmp_path: Path) -> None:
    with peers(tmp_path, "owner", "guest") as (owner, guest):
        party = owner.create_party("Thin")
        theirs = invited(owner, party, guest, "reader")
        mine, own = party.capability(), theirs.capability()
        with pytest.raises(Refused):
            theirs.capabilities.revoke(mine.id)  # a reader names no other's capability
        lie = CapabilityRevoke(bytes.fromhex(mine.id), DeviceKey(guest.device))
        theirs.members.issue_claim(lie)  # it speaks of another capability, which is the guest's to revoke
        theirs.capabilities.revoke(own.id)
        grants = [read_capability(capability_from_text(each.text)) for each in (mine, own)]
        until(lambda: party.capabilities.why_not(grants[1]) == "revoked")
        assert party.capabilities.why_not(grants[0]) is None
        another = theirs.capability()
        party.capabilities.revoke(another.id)  # an admin, whoever issued it
        until(lambda: theirs.capabilities.issued()[-1].revoked_ms is not None)


def test_a_capability_of_a_light_weight_party_is_revoked_above_it(peer: Peer, party: Party) -> None:
    child = peer.create_child(party, "Below")
    capability = child.capability()
    grants = read_capability(capability_from_text(capability.text))
    client = ThinClient(peer.serve_thin("127.0.0.1:0"), capability.text).open()
    child.capabilities.revoke(capability.id)
    assert client.until_closed().reason == "revoked"
    assert child.capabilities.why_not(grants) == "revoked"


def test_a_capability_ends(tmp_path: Path) -> None:
    now = [1_700_000_000_000]
    with echostore.open(tmp_path / "home", name="Root", now_ms=lambda: now[0]) as peer:
        party = peer.create_party("Thin")
        url = peer.serve_thin("127.0.0.1:0")
        short = party.capability(expires_s=10).text
        client = ThinClient(url, short).open()
        now[0] += 11_000
        service = peer.thin_services[0]
        service.call_soon(service._review)
        closed = client.until_closed()
        assert (closed.code, closed.reason) == (4401, "expired")
        with pytest.raises(Closed, match="4401 expired"):
            ThinClient(url, short).open()


def test_a_capability_is_worth_what_its_issuer_may_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "owner", "guest") as (owner, guest):
        party = owner.create_party("Thin")
        theirs = invited(owner, party, guest, "reader")
        with pytest.raises(Refused):
            theirs.capability(write=["task"])
        monkeypatch.setattr(coherence_service, "SWEEP_S", 3600.0)
        reading = theirs.capability()
        url = owner.serve_thin("127.0.0.1:0")
        client = ThinClient(url, reading.text).open()
        assert client.want(client.spec(QuerySpec.start("task"))) == []
        grants = read_capability(capability_from_text(reading.text))
        forged = replace(grants, write=(ANY_TYPE,), id=b"f" * 16)
        signed = sign_capability(forged, guest.keys.key(DeviceKey(guest.device)))
        with pytest.raises(Closed, match="4403 not-authorised"):
            ThinClient(url, capability_text(signed)).open()
        party.members.remove(guest.identity)
        closed = client.until_closed()
        assert (closed.code, closed.reason) == (4401, "issuer-unknown")
        with pytest.raises(Closed, match="4403 issuer-unknown"):
            ThinClient(url, reading.text).open()
        assert address(owner)


def test_the_commands_beside_a_running_service(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("init", "--name", "Root").ok()
    cli("party", "create", "Thin").ok()
    serve = Serve(cli, "--listen", "127.0.0.1:0", "--thin", "127.0.0.1:0")
    try:
        issued = (
            cli("party", "capability", "issue", "--write", "*", "--for", "2h", "--name", "phone", "--json").ok().json()
        )
        client = ThinClient(serve.told["thin"], issued["text"]).open()
        item = client.create("task", n=1)
        client.settle()
        assert "task" in cli("item", "tree").ok().out
        shown = cli("mesh", "--messages", "5", "--json").ok().json()
        assert (len(shown["links"]), len(shown["trace"])) == (1, 5)
        listed = cli("party", "capability", "list", "--json").ok().json()["capabilities"]
        shown = [(each["id"], each["state"], each["name"]) for each in listed if each["name"] != PLANNER]
        assert shown == [(issued["id"], "good", "phone")]  # beside that of the service's own link
        cli("party", "capability", "revoke", issued["id"][:12]).ok()
        assert client.until_closed().code == 4401
        until(lambda: cli("mesh", "--json").ok().json()["links"] == [])
        assert cli("party", "capability", "list", "--json").ok().json()["capabilities"][-1]["state"] == "revoked"
        assert cli("party", "capability", "revoke", "ffff").status == 3
        assert cli("party", "capability", "issue", "--for", "soon").status == 2
        assert cli("party", "capability", "issue", "--holder", "xyz").status == 2
    finally:
        serve.stop()
    text = cli("party", "capability", "issue", "--read", "task").ok().out.strip()
    assert read_capability(capability_from_text(text)).read == (ReadPattern(("task",)),)
    assert item
