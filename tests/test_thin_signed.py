"""Batches are signed by the leaf that wrote them: an edge can hold them back, and can't write in its name."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import echostore
from echostore.kernel.coherence.messages import (
    Arc,
    Attach,
    GrantArc,
    GrantSystemId,
    IssuedId,
    MessageId,
    NotifyReplicated,
    PublishOp,
    RejectReason,
    SystemId,
    Undelivered,
    Update,
    UserMessage,
)
from echostore.kernel.coherence.updates import frames_of
from echostore.kernel.ids import FeedId
from echostore.kernel.items.operations import GENESIS, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.capabilities import Credential, capability_from_text, encode_credential, proof_statement
from echostore.wire.leaf_operations import arc_item, operation_delta
from echostore.wire.leaf_signing import signed, statement_bytes
from echostore.wire.signing import SigningKey
from edge_process import RunningEdge
from golden.encoded import statements
from network_peers import until
from test_thin_browser import HERE, module, node
from thin_client import ThinClient

__all__ = ["module"]

NONCE = b"n" * 16


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Thin")


class Behind:
    """A leaf behind an edge, and the edge: a client that says what an edge would, and more."""

    def __init__(self, edge: ThinClient, party: Party, feed: FeedId) -> None:
        self.edge, self.feed, self.key = edge, feed, SigningKey.generate()
        shown = capability_from_text(party.capability(write="*", holder=self.key.public).text)
        proof = self.key.sign(proof_statement(NONCE, shown))
        credential = encode_credential(Credential(shown, self.key.public, NONCE, proof))
        edge.send(Attach(7, None, True, 0, (), (9,), credential))
        edge.until(lambda: any(isinstance(each, GrantSystemId) and each.turn for each in edge.received))
        system = next(each.system for each in edge.received if isinstance(each, GrantSystemId) and each.turn)
        edge.until(lambda: self._granted(system))
        granted = self._granted(system)
        assert granted is not None
        self.arc, self.base = granted.arc, granted.base

    def _granted(self, system: object) -> GrantArc | None:
        found = [each for each in self.edge.received if isinstance(each, GrantArc) and each.arc.system == system]
        return found[0] if found else None

    def batch(self, number: int, *, ops: int = 1, type: str = "task") -> Update:
        """As the leaf makes it, unsigned: new items with numbers of its arc."""
        made = []
        for place in range(ops):
            n = 1000 * number + place
            item = arc_item(self.feed, self.base, n)
            operation = ItemOperation(item, GENESIS, Genesis(item, "property-set", 1, type, None, 0))
            made.append(PublishOp(IssuedId(self.arc, n), item, operation_delta(self.feed, operation)))
        return Update(self.arc, number - 1, number, (), tuple(made))

    def signed(self, number: int, **more: int) -> Update:
        return signed(self.batch(number, **more), self.key)

    def applied(self) -> int:
        told = [
            each.batch for each in self.edge.received if isinstance(each, NotifyReplicated) and each.clock == self.arc
        ]
        return max(told, default=0)


def items(party: Party) -> int:
    return len(party.query(type="task").all()) + len(party.query(type="loot").all())


def forged(peer: Peer) -> int:
    (shown,) = peer.thin_services[0].indexes()
    return dict(shown.refusals).get(RejectReason.FORGED, 0)


def test_an_edge_that_lies_writes_nothing_and_uses_up_no_number(peer: Peer, party: Party) -> None:
    url = peer.serve_thin("127.0.0.1:0")
    edge_key = SigningKey.generate()
    with ThinClient(url, party.capability(write="*", edge=True).text, key=edge_key) as edge:
        leaf = Behind(edge, party, FeedId(bytes.fromhex(edge.ok["feed"])))
        one, two, three, four = (leaf.signed(number) for number in range(1, 5))
        lies = [
            leaf.batch(1),  # by nobody
            signed(leaf.batch(1, type="loot"), edge_key),  # by the edge
            replace(leaf.batch(1, type="loot"), signature=one.signature),  # altered
            replace(one, items=()),  # emptied
            replace(one, signature=one.signature[:-1] + bytes([one.signature[-1] ^ 1])),
            replace(two, prev=0, tick=1),  # moved to another place
            replace(leaf.batch(1), signature=leaf.key.sign(b"something else")),
            replace(leaf.signed(1, ops=2), items=leaf.signed(1, ops=2).items[:1]),  # shortened
            replace(leaf.signed(1, ops=2), items=leaf.signed(1, ops=2).items[::-1]),  # in another order
        ]
        for lie in lies:
            edge.send(lie)
        until(lambda: forged(peer) == len(lies))
        assert items(party) == 0

        edge.send(two)  # before its turn: not refused, and not taken
        edge.send(one)
        edge.until(lambda: leaf.applied() == 1)
        edge.send(one)  # again
        edge.send(replace(two, items=leaf.batch(2, type="loot").items))
        edge.send(two)
        edge.until(lambda: leaf.applied() == 2)
        assert forged(peer) == len(lies) + 1
        for part in frames_of(
            replace(three, signature=b"")
        ):  # in parts, unsigned; a link that says so twice is dropped
            edge.send(part)
        until(lambda: forged(peer) == len(lies) + 2)
        edge.send(three)
        edge.until(lambda: leaf.applied() == 3)
        for part in frames_of(four):
            edge.send(part)
        edge.until(lambda: leaf.applied() == 4)
        assert items(party) == 4
        assert not party.query(type="loot").all()


def test_an_edges_right_to_messages_counts_for_nobody_behind_it(peer: Peer, party: Party) -> None:
    url = peer.serve_thin("127.0.0.1:0")
    with ThinClient(url, party.capability(messages=True, edge=True).text) as edge:
        leaf = Behind(edge, party, FeedId(bytes.fromhex(edge.ok["feed"])))
        id = MessageId(leaf.arc.system, 1, 1)
        edge.send(signed(UserMessage(id, 1, leaf.arc.system, (), "note", b"to itself"), leaf.key))
        edge.until(lambda: Undelivered(id, RejectReason.NOT_ALLOWED) in edge.received)
        assert not any(isinstance(each, UserMessage) for each in edge.received)


def test_what_is_signed_names_the_root_the_leaf_the_place_and_all_operations() -> None:
    key = SigningKey.generate()
    arc = Arc(SystemId(b"r" * 16, (1,)), 1)
    op = PublishOp(IssuedId(arc, 5), b"item", b"delta")
    batch = Update(arc, 2, 3, (), (op,))
    others = [
        replace(batch, clock=arc._replace(gen=2)),
        replace(batch, clock=arc._replace(system=arc.system._replace(path=(1, 1)))),
        replace(batch, clock=arc._replace(system=arc.system._replace(root=b"s" * 16))),
        replace(batch, tick=4),
        replace(batch, items=(replace(op, op=IssuedId(arc, 6)),)),
        replace(batch, items=(replace(op, op=IssuedId(arc._replace(gen=7), 5)),)),
        replace(batch, items=(replace(op, object=b"item2", delta=b"elta"),)),
        replace(batch, items=(replace(op, object=b"itemd", delta=b"elta"),)),
        replace(batch, items=(op, op)),
        replace(batch, items=()),
    ]
    said = {statement_bytes(each) for each in [batch, *others]}
    assert len(said) == 1 + len(others)
    assert signed(batch, key).signature == key.sign(statement_bytes(batch))


def test_leaves_sign_behind_an_edge_and_nowhere_else(peer: Peer, party: Party, module: Path) -> None:
    up = peer.serve_thin("127.0.0.1:0")
    given = party.capability(write="*", messages=True, edge=True).text
    with RunningEdge([up], given) as edge:
        with echostore.connect(edge.url, given) as leaf:
            leaf.create(type="task", title="python")
            leaf.fence("release")
            assert leaf.driver.welcome is not None
            assert leaf.driver.welcome.signs
        ran = subprocess.run(
            [node(), "--experimental-websocket", "--no-warnings", HERE / "signed.mjs", module, edge.url, given],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr[-2000:]
        assert json.loads(ran.stdout) == {name: statement_bytes(said).hex() for name, said in statements().items()}
    with echostore.connect(up, given) as leaf:
        assert leaf.driver.welcome is not None
        assert not leaf.driver.welcome.signs
    titles = {each["title"] for each in party.query(type="task").all()}
    assert titles == {"python", "browser", "browser again"}
    assert forged(peer) == 0
