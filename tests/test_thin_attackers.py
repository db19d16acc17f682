"""Thin clients do not act for each other: over real sockets, with what the durable state and the counters say afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel.coherence.events import Post
from echostore.kernel.coherence.messages import (
    Arc,
    Attach,
    Attached,
    Below,
    GrantSystemId,
    MessageId,
    ReleaseArc,
    SystemId,
    UserMessage,
    UserReceipt,
)
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.capabilities import Credential, capability_from_text, encode_credential, proof_statement
from echostore.wire.leaf_signing import signed
from echostore.wire.signing import SigningKey
from edge_process import RunningEdge
from network_peers import until
from thin_client import HOME, ThinClient


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Thin")


def refused(peer: Peer) -> dict[str, int]:
    """As monitors see it."""
    return dict(peer.thin_services[0].numbers().refused)


def system(client: ThinClient) -> SystemId:
    return client.leaf.systems[HOME]


def arc(client: ThinClient) -> Arc:
    client.until(lambda: client.leaf.arcs.arc is not None)
    assert client.leaf.arcs.arc is not None
    return client.leaf.arcs.arc


def test_an_arc_is_released_by_its_owner_alone(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Thin")
        writes, reads = party.capability(write="*").text, party.capability(read=["note"]).text
        url = peer.serve_thin("127.0.0.1:0")
        victim = ThinClient(url, writes).open()
        with ThinClient(url, reads) as thief:
            thief.send(ReleaseArc(arc(victim), 0))
            until(lambda: refused(peer).get("unknown-system") == 1)
        item = victim.create("task", n=1)
        victim.settle()
        assert (party.get(item)["n"], victim.told) == (1, [])
        victim.close()
    with echostore.open(tmp_path / "home") as peer:  # nor is anything of it on disk
        victim.url = peer.serve_thin("127.0.0.1:0")
        with victim:
            victim.publish(victim.setting(item, n=2))
            victim.settle()
            assert victim.told == []
            victim.send(ReleaseArc(arc(victim), 0))  # by the owner, it counts
            victim.publish(victim.setting(item, n=3))
            victim.until(lambda: victim.told)


def test_who_reads_everything_hears_nothing_of_messages_between_others(peer: Peer, party: Party) -> None:
    url, talks = peer.serve_thin("127.0.0.1:0"), party.capability(messages=True).text
    with ThinClient(url, talks) as one, ThinClient(url, talks) as two, ThinClient(url, talks) as thief:
        thief.send(Attach(6, system(thief), False, 0, (Below(system(two), (9,)),)))
        thief.send(Attach(7, system(two), False, 0))  # by the same capability, and another key
        thief.send(Attach(8, system(two), False, 0, (), (9,)))
        until(lambda: refused(peer).get("not-allowed") == 3)
        one.give(Post(system(two), 1, "note", b"private"))
        two.until(lambda: two.delivered)
        thief.read(0.05)
        assert not any(isinstance(each, UserMessage | Attached) for each in thief.received)


def test_a_forged_message_does_not_take_the_place_of_the_genuine_one(peer: Peer, party: Party) -> None:
    """Neither a leaf at the root nor the edge itself speaks for a leaf behind the edge."""
    url, talks = peer.serve_thin("127.0.0.1:0"), party.capability(messages=True).text
    edges = party.capability(messages=True, edge=True).text
    with (
        RunningEdge([url], edges) as edge,
        ThinClient(edge.url, talks) as victim,
        ThinClient(edge.url, talks) as neighbour,
        ThinClient(url, talks) as target,
        ThinClient(url, edges) as stray,
    ):
        forged = UserMessage(MessageId(system(victim), 1, 1), 1, system(target), (), "note", b"forged")
        for liar in (neighbour, stray, target):
            liar.send(forged)
            liar.send(signed(forged, liar.key))
        until(lambda: refused(peer).get("unknown-system") == 4)
        until(lambda: dict(edge.ask(lambda node: node.status().refusals)).get("unknown-system") == 2)
        victim.give(Post(system(target), 1, "note", b"genuine"))
        target.until(lambda: target.delivered)
        victim.until(lambda: not victim.leaf.sender.unreceived)
        assert [each.message.payload for each in target.delivered] == [b"genuine"]


def test_an_edge_does_not_speak_for_the_leaves_behind_it(peer: Peer, party: Party) -> None:
    """An edge that lies: a client with the right of one, which has seen a leaf's credential."""
    url, talks = peer.serve_thin("127.0.0.1:0"), party.capability(messages=True)
    key, nonce = SigningKey.generate(), b"n" * 16
    shown = capability_from_text(talks.text)
    credential = encode_credential(Credential(shown, key.public, nonce, key.sign(proof_statement(nonce, shown))))
    edges = party.capability(messages=True, edge=True).text
    with ThinClient(url, edges) as edge, ThinClient(url, talks.text) as target:
        edge.send(Attach(7, None, True, 0, (), (9,), credential))
        edge.until(lambda: any(isinstance(each, GrantSystemId) and each.turn for each in edge.received))
        leaf = next(each.system for each in edge.received if isinstance(each, GrantSystemId) and each.turn)
        message = UserMessage(MessageId(leaf, 1, 1), 1, system(target), (), "note", b"genuine")
        genuine = signed(message, key)
        target.give(Post(leaf, 1, "note", b"an answer is owed"))
        owed = UserReceipt(MessageId(system(target), 1, 1), leaf)
        lies = [
            message,
            signed(message, edge.key),
            UserMessage(message.id, 1, system(target), (), "note", b"altered", signature=genuine.signature),
            UserMessage(message.id, 9, system(target), (), "note", b"genuine", signature=genuine.signature),
            owed,
            signed(owed, edge.key),
            ReleaseArc(Arc(leaf, 1), 0),
            signed(ReleaseArc(Arc(leaf, 1), 0), edge.key),
        ]
        for lie in lies:
            edge.send(lie)
        until(lambda: refused(peer).get("forged") == len(lies))
        assert target.leaf.sender.unreceived, "nobody but its target says that a message arrived"
        edge.send(genuine)
        target.until(lambda: target.delivered)
        edge.send(signed(owed, key))
        target.until(lambda: not target.leaf.sender.unreceived)
        assert [each.message.payload for each in target.delivered] == [b"genuine"]
        party.capabilities.revoke(talks.id)  # who is behind the edge is cut off as well
        edge.send(signed(UserMessage(MessageId(leaf, 1, 2), 1, leaf, (), "note", b"late"), key))
        until(lambda: refused(peer).get("unknown-system") == 1)
