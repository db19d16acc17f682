"""Edges between a root and thin clients: they answer from their cache, pass on the rest, and may vanish."""

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.coherence.events import Post, Want
from echostore.kernel.coherence.messages import Attach, Attached, GrantSystemId, RejectReason, Spec
from echostore.kernel.errors import Refused
from echostore.kernel.query.spec import QuerySpec
from echostore.mesh.coherence_edge import check_capability
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.capabilities import (
    Credential,
    Grants,
    ReadPattern,
    capability_from_text,
    capability_text,
    encode_credential,
    proof_statement,
    sign_capability,
)
from echostore.wire.signing import SigningKey
from edge_process import RunningEdge
from network_peers import until
from tcp_relay import Relay
from thin_client import HOME, Closed, ThinClient

TASKS = QuerySpec.start("task")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Thin")


@pytest.fixture
def up(peer: Peer, party: Party) -> str:
    return peer.serve_thin("127.0.0.1:0")


@pytest.fixture
def capability(party: Party) -> str:
    return party.capability(write="*", messages=True, edge=True).text


def test_many_leaves_are_one_question(peer: Peer, party: Party, up: str, capability: str) -> None:
    task = party.create(type="task", n=0)
    with RunningEdge([up], capability) as edge:
        clients = [ThinClient(edge.url, capability).open() for _ in range(6)]
        spec = clients[0].spec(TASKS)
        for client in clients:
            client.give(Want(HOME, spec))
        for client in clients:
            assert [each.values for each in client.want(spec)] == [{"n": 0}]
        for number in range(1, 4):
            task["n"] = number
            for client in clients:
                client.sees(spec, lambda items, n=number: items[0].values["n"] == n)
        (indexes,) = peer.thin_services[0].indexes()
        assert indexes.evaluations == 1, "the root was asked to evaluate once"
        status = edge.ask(lambda node: node.status())
        assert (status.acquires, status.links, status.systems) >= (6, 6, 6)
        assert status.upstream < status.acquires
        for client in clients:
            client.close()
        until(lambda: edge.ask(lambda node: node.status().systems) == 0)


def test_writes_pass_an_edge_and_survive_its_loss(peer: Peer, party: Party, up: str, capability: str) -> None:
    """A leaf goes from edge to edge to the root: no tick backwards, every batch once, nothing lost."""
    with RunningEdge([up], capability) as one, RunningEdge([up], capability) as two:
        client = ThinClient(one.url, capability).open()
        spec = client.spec(TASKS)
        item = client.create("task", n=0)
        client.settle()
        client.sees(spec, lambda items: [each.values for each in items] == [{"n": 0}])
        ticks = [client.tick]
        for number, url in enumerate([two.url, one.url, up, two.url], 1):
            client.publish(client.setting(item, n=number))
            client.drop()
            client.url = url
            client.open()
            client.settle()
            client.sees(spec, lambda items, n=number: [each.values for each in items] == [{"n": n}])
            ticks.append(client.tick)
        one.close()
        client.publish(client.setting(item, n=9))
        client.settle()
        client.close()
        assert ticks == sorted(ticks)
        assert client.told == []
    written = [each for message in party.stream() for each in message.operations if each.item == item]
    assert len(written) == 1 + 1 + 4 + 1, "the genesis and every batch once"
    assert party.get(item)["n"] == 9


def test_an_edge_finds_its_root_again(tmp_path: Path) -> None:
    """The root restarts elsewhere: the edge goes on to the next address, and its leaf hears nothing of it."""
    home = tmp_path / "home"
    with Relay() as first, Relay() as second:
        with echostore.open(home, name="Root") as peer:
            party = peer.create_party("Thin")
            capability = party.capability(write="*", edge=True).text
            item = party.create(type="task", n=0).id
            first.point(peer.serve_thin("127.0.0.1:0"))
            edge = RunningEdge([first.url, second.url], capability)
            client = ThinClient(edge.url, capability).open()
            spec = client.spec(TASKS)
            client.sees(spec, bool)
            before = client.tick
        first.cut()
        with edge, echostore.open(home) as peer:
            assert client.shown(spec), "what was held can still be read"
            client.publish(client.setting(item, n=1))
            second.point(peer.serve_thin("127.0.0.1:0"))
            client.sees(spec, lambda items: items[0].values["n"] == 1)
            client.settle()
            assert client.tick > before
            assert peer.party("@Thin").get(item)["n"] == 1
            client.close()


def test_a_capability_is_checked_at_the_edge(peer: Peer, party: Party, up: str, capability: str) -> None:
    narrow = party.capability(read=["task"])
    board, task = party.create(type="board"), party.create(type="task")
    stranger = SigningKey.generate()
    grants = Grants(party.key, stranger.public, b"i" * 16, (ReadPattern(all_items=True),), expires_ms=1 << 50)  # type: ignore[arg-type]
    other = peer.create_party("Other").capability().text
    with RunningEdge([up], capability) as edge:
        with pytest.raises(Closed, match="4403 issuer-unknown"):
            ThinClient(edge.url, capability_text(sign_capability(grants, stranger))).open()
        with pytest.raises(Closed, match="4403 no-party"):
            ThinClient(edge.url, other).open()
        with ThinClient(edge.url, capability) as wide, ThinClient(edge.url, narrow.text) as client:
            assert len(wide.want(wide.item_spec(board.id))) == 1
            assert len(client.want(client.spec(TASKS))) == 1
            assert client.want(client.item_spec(task.id))[0].item == task.id
            refused = [client.spec(QuerySpec.start("board")), client.item_spec(board.id), client.item_spec(b"n" * 16)]  # type: ignore[arg-type]
            for spec in [*refused, Spec(b"\xff")]:
                client.give(Want(HOME, spec))
            client.until(lambda: len(client.lost) == 4)
            reasons = {each.spec: each.reason for each in client.lost}
            assert [reasons[spec] for spec in refused] == [RejectReason.NOT_ALLOWED] * 3
            assert reasons[Spec(b"\xff")] is RejectReason.MALFORMED
            party.capabilities.revoke(narrow.id)
            closed = client.until_closed()
            assert (closed.code, closed.reason) == (4401, "revoked")
            assert len(wide.want(wide.spec(TASKS))) == 1
        with pytest.raises(Closed, match="4401 revoked"):
            ThinClient(edge.url, narrow.text).open()


def test_a_leaf_writes_through_an_edge_by_its_own_rights(
    tmp_path: Path, peer: Peer, party: Party, up: str, capability: str
) -> None:
    """Neither the edge's rights nor those of other leaves count: the root sees what the leaf showed to the edge."""
    own = party.capability(messages=True, edge=True).text  # of an edge that may write nothing
    narrow, reads = party.capability(write=["task"]), party.capability()
    with RunningEdge([up], own) as edge, RunningEdge([edge.url], own) as lower:
        for url in (edge.url, lower.url):
            with ThinClient(url, narrow.text) as client, ThinClient(url, reads.text) as reader:
                assert client.ok["write"] == ["task"]
                made, _ = client.create("task", n=1), client.create("board", n=1)
                client.settle()
                assert [each.reason for each in client.told] == [RejectReason.NOT_ALLOWED, RejectReason.NO_ITEM]
                assert party.get(made)["n"] == 1
                reader.create("task", n=2)
                reader.settle()
                assert [each.reason for each in reader.told] == [RejectReason.NOT_ALLOWED, RejectReason.NO_ITEM]
    assert not party.query("board").all()
    assert party.query("task").count() == 2


def test_an_edge_that_comes_back_names_its_leaves_and_they_write_on(tmp_path: Path) -> None:
    """The root starts anew, and the edge shows what its leaves showed. Then a capability is revoked, and the edge is late."""
    relay = Relay()
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Thin")
        own, narrow = party.capability(edge=True).text, party.capability(write=["task"])
        relay.point(peer.serve_thin("127.0.0.1:0"))
        edge = RunningEdge([relay.url], own)
        client = ThinClient(edge.url, narrow.text).open()
        item = client.create("task", n=1)
        client.settle()
    with relay, edge, echostore.open(tmp_path / "home") as peer:
        relay.point(peer.serve_thin("127.0.0.1:0"))
        client.publish(client.setting(item, n=2))
        client.settle()
        party = peer.party("@Thin")
        assert (party.get(item)["n"], client.told) == (2, [])
        edge.ask(lambda node: setattr(node, "_why_not", lambda grants: None))  # an edge that does not care
        party.capabilities.revoke(narrow.id)
        client.publish(client.setting(item, n=3))
        until(lambda: dict(peer.thin_services[0].indexes()[0].refusals).get("unknown-system", 0) > 0)
        assert party.get(item)["n"] == 2
        client.close()


def test_an_edge_shows_what_its_leaves_showed(party: Party, up: str, capability: str) -> None:
    """Nobody is attached behind an edge by a credential that is bent, foreign, of another key or worth nothing."""
    own, holder = party.capability(write="*", edge=True), SigningKey.generate()
    bound = capability_from_text(party.capability(holder=holder.public).text)
    stale, other = party.capability(), party.capability(read=["task"]).text
    party.capabilities.revoke(stale.id)
    nonce, thief = b"n" * 16, SigningKey.generate()

    def shown(capability: bytes, key: SigningKey, nonce: bytes = nonce) -> bytes:
        proof = key.sign(proof_statement(nonce, capability))
        return encode_credential(Credential(capability, key.public, nonce, proof))

    good = shown(bound, holder)
    bent = [bytes([*good[:place], good[place] ^ 1, *good[place + 1 :]]) for place in range(0, len(good), 7)]
    wrong = [
        b"",
        b"\xff" * 64,
        shown(bound, thief),
        shown(bound, holder, b"short"),
        shown(capability_from_text(stale.text), holder),
        encode_credential(Credential(bound, holder.public, nonce, thief.sign(proof_statement(nonce, bound)))),
        *bent,
    ]
    with ThinClient(up, own.text) as edge:
        for number, credential in enumerate(wrong):
            edge.send(Attach(1000 + number, None, False, 0, (), (9,), credential))
        edge.send(Attach(77, None, False, 0, (), (9,), good))
        edge.until(lambda: any(isinstance(each, GrantSystemId) and each.turn for each in edge.received))
        named = [each for each in edge.received if isinstance(each, GrantSystemId) and each.turn]
        assert [each.nonce for each in named] == [77]
        edge.send(Attach(78, named[0].system, False, 0, (), (10,), shown(capability_from_text(other), thief)))
        edge.send(Attach(79, named[0].system, False, 0, (), (11,), shown(bound, holder)))
        edge.until(lambda: any(isinstance(each, Attached) and each.turn == (11,) for each in edge.received))
        assert not any(isinstance(each, Attached) and each.turn == (10,) for each in edge.received)


def test_a_leaf_does_not_speak_for_another_at_an_edge(peer: Peer, party: Party, up: str, capability: str) -> None:
    one, two = (party.capability(read=["task"]).text for _ in range(2))
    with RunningEdge([up], capability) as edge, ThinClient(edge.url, one) as victim, ThinClient(edge.url, two) as thief:
        thief.send(Attach(6, None, False, 0, (), (9,)))
        until(lambda: dict(edge.ask(lambda node: node.status().refusals)) == {"not-allowed": 1})
        thief.send(Attach(5, victim.leaf.systems[HOME], False, 0))  # whose it is only the root knows
        until(lambda: dict(peer.thin_services[0].indexes()[0].refusals).get("not-allowed", 0) > 0)
        victim.drop()
        victim.open()
        assert victim.want(victim.spec(TASKS)) == []


def test_an_edge_whose_capability_is_revoked_serves_nobody(party: Party, up: str, capability: str) -> None:
    own = party.capability(write="*", edge=True)
    with RunningEdge([up], own.text) as edge:
        client = ThinClient(edge.url, capability).open()
        party.capabilities.revoke(own.id)
        assert client.until_closed().code in (1001, 4401)
        until(lambda: edge.ask(lambda node: node.refused_up))


def test_an_edge_below_an_edge_and_messages_across_both(party: Party, up: str, capability: str) -> None:
    with (
        RunningEdge([up], capability) as upper,
        RunningEdge([upper.url], capability) as lower,
        ThinClient(lower.url, capability) as below,
        ThinClient(up, capability) as above,
    ):
        item = below.create("task", n=1)
        below.settle()
        assert [each.item for each in above.want(above.spec(TASKS))] == [item]
        above.give(Post(below.leaf.systems[HOME], 1, "note", b"down"))
        below.give(Post(above.leaf.systems[HOME], 1, "note", b"up"))
        below.until(lambda: below.delivered)
        above.until(lambda: above.delivered)
        assert below.delivered[0].message.payload == b"down"
        assert above.delivered[0].message.payload == b"up"


def test_nobody_is_let_in_before_the_root_is_known(capability: str) -> None:
    with RunningEdge(["ws://127.0.0.1:9/thin"], capability, wait=False) as edge:
        with pytest.raises(Closed, match="1013 not-ready"):
            ThinClient(edge.url, capability).open()
        assert dict(edge.ask(lambda node: node.status().refusals)) == {"not-ready": 1}


def test_a_leaf_waits_for_an_edge_that_has_not_reached_its_root(peer: Peer, party: Party, capability: str) -> None:
    with Relay() as up, RunningEdge([up.url], capability, wait=False) as edge, ThreadPoolExecutor(1) as other:
        connecting = other.submit(echostore.connect, edge.url, capability, timeout_s=60)
        until(lambda: dict(edge.ask(lambda node: node.status().refusals)).get("not-ready", 0) > 0)
        assert not connecting.done()
        up.point(peer.serve_thin("127.0.0.1:0"))
        with connecting.result(60) as leaf:
            leaf.create(type="task", n=1)
            leaf.fence("release")
        assert party.query(type="task", n=1).count() == 1


def test_an_edge_reads_everything(party: Party) -> None:
    with pytest.raises(Refused, match="some types only"):
        check_capability(capability_from_text(party.capability(read=["task"], edge=True).text))


def test_to_read_everything_is_not_to_be_an_edge(party: Party) -> None:
    with pytest.raises(Refused, match="not for an edge"):
        check_capability(capability_from_text(party.capability(write="*", messages=True).text))


def test_the_commands_edge_and_mesh(tmp_path: Path, peer: Peer, party: Party, up: str, capability: str) -> None:
    cli = Cli(tmp_path / "none", tmp_path / "state")
    file = tmp_path / "edge.capability"
    file.write_text(capability + "\n")
    arguments = ["edge", "--listen", "127.0.0.1:0", "--up", up, "--capability", str(file)]
    process = subprocess.Popen(
        cli.command(*arguments, "--status", "127.0.0.1:0", "--json"),
        stdout=subprocess.PIPE,
        text=True,
        env=cli.environment(),
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        client = until(lambda: _opened(told["url"], capability))
        with client:
            client.want(client.spec(TASKS))
            shown = cli("mesh", "--at", told["status"], "--messages", "50", "--json").ok().json()
            assert (len(shown["links"]), shown["indexes"][0]["party"]) == (1, party.key.hex())
            assert {each[3] for each in shown["trace"]} >= {"Attach", "Acquire", "Grant"}
            assert "1 questions" in cli("mesh", "--at", told["status"]).ok().out
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    file.write_text("nonsense")
    assert "holds no capability" in cli(*arguments).err
    assert cli(*arguments).status == 2
    assert cli(*arguments[:-1], str(tmp_path / "missing")).status == 3
    assert "no edge answers" in cli("mesh", "--at", told["status"]).err
    assert cli("mesh").status == 3
    file.write_text(party.capability(read=["task"], edge=True).text)
    assert cli(*arguments).status == 4
    file.write_text(capability)
    assert "not on the loopback" in cli(*arguments, "--status", "192.0.2.1:0").err


def _opened(url: str, capability: str) -> ThinClient | None:
    """The edge prints its address before it has reached its root."""
    client = ThinClient(url, capability)
    try:
        client.open()
    except Closed as closed:
        if closed.code != 1013:
            raise
        return None
    client.close()
    return client
