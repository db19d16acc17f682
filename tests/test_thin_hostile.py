"""A root without sockets: whatever well-formed messages a link sends, it refuses and counts, and goes on."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.coherence.events import LinkId
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    BeginUpdate,
    Below,
    Connectivity,
    Deannounce,
    Delta,
    EndUpdate,
    FollowsEpoch,
    Grant,
    GrantSystemId,
    Invalidate,
    IssuedId,
    LaneItem,
    Message,
    MessageId,
    NullUpdate,
    Patch,
    Pin,
    PublishOp,
    RejectReason,
    ReleaseArc,
    Service,
    Spec,
    SystemId,
    Token,
    Touched,
    Undelivered,
    UserMessage,
    UserQueued,
    UserReceipt,
    WaitForEpoch,
    Witness,
)
from echostore.kernel.query.spec import QuerySpec
from echostore.peer.coherence_root import CoherenceRoot
from echostore.peer.peer import Peer
from echostore.wire.capabilities import (
    Credential,
    capability_from_text,
    encode_credential,
    proof_statement,
    read_capability,
)
from echostore.wire.coherence import FRAME_BYTES_MAX, LinkFrame, decode_frame, encode_frame
from echostore.wire.coherence_parts import parts_of
from echostore.wire.index_spec import IndexQuery, index_items, index_spec
from echostore.wire.leaf_operations import TextEdit, edit_delta
from echostore.wire.signing import SigningKey
from test_coherence_wire import MESSAGES

MESSAGES_MANY = 4000


class Sink:
    """An outlet that encodes all that is sent, and does at once what is to be done later."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.dropped: list[LinkId] = []
        self.todo: list[Callable[[], None]] = []

    def send(self, link: LinkId, generation: int, message: Message) -> None:
        for part in parts_of(message):
            data = encode_frame(LinkFrame(generation, part))
            assert len(data) <= FRAME_BYTES_MAX
            assert decode_frame(data).message == part
        self.sent.append(message)

    def drop(self, link: LinkId, detail: str) -> None:
        self.dropped.append(link)

    def aside(self, root: bytes, message: Message) -> None:
        self.sent.append(message)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.todo.append(action)

    def work(self) -> None:
        todo, self.todo = self.todo, []
        for action in todo:
            action()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


def test_a_root_outlives_whatever_another_root_says(peer: Peer) -> None:
    """A member's device that serves as a root may say anything: of others' systems nothing counts, and all stays bounded."""
    rng = random.Random(5)
    party = peer.create_party("Thin")
    sink = Sink()
    root = CoherenceRoot(party, sink)
    other, grants = b"o" * 16, read_capability(capability_from_text(party.capability(messages=True).text))
    root.open_link(LinkId("a"), 1, grants, b"k" * 32)
    root.receive(LinkId("a"), 1, Attach(7, None, True, 0))
    (named,) = [each.system for each in sink.sent if isinstance(each, GrantSystemId)]
    root.root_met(other)
    for number in range(10_000):
        sender = SystemId(rng.choice([other, b"x" * 16, root.system.root]), (rng.randrange(3),))
        id = MessageId(sender, rng.randrange(40), rng.randrange(1, 30))
        target = rng.choice([named, SystemId(root.system.root, (99,)), SystemId(b"x" * 16)])
        said = rng.choice(
            [
                UserMessage(id, rng.randrange(30), target, (), "note", b"x", True, rng.randrange(3)),
                UserReceipt(id, target),
                UserQueued(id),
                Undelivered(id, RejectReason.EXPIRED),
                Announce(Service(sender, f"s{rng.randrange(50)}"), 0, number, b""),
                Connectivity(sender, affects_all_services=True),
                rng.choice(MESSAGES),
            ]
        )
        root.from_root(rng.choice([other, b"y" * 16]), said)
        if rng.random() < 0.01:
            rng.choice([root.root_met, root.root_parted])(other)
            root.root_met(other)
        if rng.random() < 0.05:
            root.receive(LinkId("a"), 1, UserReceipt(id, named))
    sink.work()
    courier = root.root.courier
    assert not courier.out
    assert {pair.sender.root for pair in courier.last} == {other}, "of its own systems alone"
    assert {pair.target for pair in courier.last} == {named}
    assert all(
        [each.id.seq for each in queue] == sorted({each.id.seq for each in queue}) for queue in courier.inbox.values()
    )
    assert {service.system.root for service in root.root.services.registers} <= {other}
    assert root.refusals["not-allowed"] > 1000
    delivered = [each for each in sink.sent if isinstance(each, UserMessage) and each.target == named]
    assert {each.id.sender.root for each in delivered} == {other}
    again = CoherenceRoot(party, Sink()).root.courier
    assert (again.inbox, again.last) == (courier.inbox, courier.last), "what is on disk is what was kept"


@pytest.mark.parametrize("seed", range(4))
def test_a_root_outlives_any_messages(peer: Peer, seed: int) -> None:
    rng = random.Random(seed)
    party = peer.create_party("Thin")
    task = party.create(type="task", n=0)
    sink = Sink()
    root = CoherenceRoot(party, sink)
    grants = read_capability(capability_from_text(party.capability(write="*", messages=True, edge=True).text))
    specs = [
        index_spec(IndexQuery(party.key, QuerySpec.start("task"))),
        index_spec(IndexQuery(party.key, item=task.id)),
        Spec(b"services/"),
        Spec(b"revocations"),
        Spec(b"junk"),
    ]
    links = [LinkId("a"), LinkId("b")]
    make = _Maker(rng, root, specs, task.id)
    for number in range(MESSAGES_MANY):
        link = rng.choice(links)
        if link not in root.rights.grants or rng.random() < 0.01:
            if link in root.rights.grants:
                root.close_link(link)
            root.open_link(link, rng.choice([1, 2]), grants, b"k" * 32)
        root.receive(link, rng.choice([1, 1, 2]), make.message())
        if rng.random() < 0.1:
            sink.work()
        if rng.random() < 0.02:
            task["n"] = number
        if rng.random() < 0.01:
            root.sweep()
        for dropped in sink.dropped:
            if dropped in root.rights.grants:
                root.close_link(dropped)
        sink.dropped.clear()
    sink.work()
    assert party.runtime.failure is None
    assert sum(root.refusals.values()) > MESSAGES_MANY // 20
    tick = root.tick
    fresh = LinkId("honest")
    root.open_link(fresh, 9, grants, b"h" * 32)
    root.receive(fresh, 9, Attach(1 << 60, None, True, tick))
    sink.sent.clear()
    root.receive(fresh, 9, Acquire(specs[0]))
    assert [type(each).__name__ for each in sink.sent][:1] == ["Grant"], "an honest client is served as before"
    root.close()


class _Maker:
    """Messages that fit their types, with values that are sometimes right."""

    def __init__(self, rng: random.Random, root: CoherenceRoot, specs: list[Spec], item: bytes) -> None:
        self._rng, self._root, self._specs, self._item = rng, root, specs, item
        given, key, nonce = (
            capability_from_text(root.party.capability(write="*").text),
            SigningKey.generate(),
            b"n" * 16,
        )
        good = Credential(given, key.public, nonce, key.sign(proof_statement(nonce, given)))
        self._shown = [b"", b"\xff" * 20, encode_credential(good._replace(nonce=b"m" * 16)), encode_credential(good)]

    def message(self) -> Message:
        rng = self._rng
        if rng.random() < 0.1:
            return decode_frame(encode_frame(LinkFrame(1, rng.choice(MESSAGES)))).message
        system, arc, number = self._system(), self._arc(), rng.choice([0, 1, 2, 3, 10**6, 1 << 50])
        spec = rng.choice(self._specs)
        makers: list[Callable[[], Message]] = [
            lambda: Attach(rng.randrange(5), rng.choice([None, system]), rng.random() < 0.5, rng.choice([0, number])),
            lambda: Attach(rng.randrange(9), None, False, 0, (Below(system, (1,)),), (rng.randrange(3),)),
            lambda: Attach(
                rng.randrange(9), rng.choice([None, system]), True, 0, (), (rng.randrange(3),), rng.choice(self._shown)
            ),
            lambda: Acquire(spec, rng.choice([None, 0, self._root.tick, number]), rng.choice([None, Token(b"t")])),
            lambda: ReleaseArc(arc, number),
            lambda: Touched((spec, Spec(b"unknown"))),
            lambda: Pin(rng.choice([None, number])),
            lambda: WaitForEpoch(arc, number),
            lambda: BeginUpdate(arc, 0, 1),
            lambda: LaneItem(arc, rng.randrange(4), rng.randrange(2), rng.randrange(3), self._item_of_update(arc)),
            lambda: EndUpdate(arc, rng.randrange(3), rng.randrange(4), self._follows(), ((0, rng.randrange(3)),)),
            lambda: NullUpdate(arc, rng.randrange(3), rng.randrange(4)),
            lambda: Announce(Service(system, "s"), rng.randrange(3), rng.randrange(3), b"d"),
            lambda: Deannounce(Service(system, "s"), rng.randrange(3), rng.randrange(3)),
            lambda: Connectivity(system, rng.random() < 0.5, (rng.randrange(3),)),
            lambda: UserMessage(
                MessageId(system, 1, rng.randrange(1, 4)), 0, self._system(), ((Witness(arc, number),),), "t", b"p"
            ),
            lambda: UserReceipt(MessageId(system, 1, rng.randrange(1, 4)), self._system()),
        ]
        return rng.choice(makers)()

    def _system(self) -> SystemId:
        known = list(self._root.root.batches.arcs.gens)
        return self._rng.choice([*known, self._root.system, SystemId(b"x" * 16, (1,))])

    def _arc(self) -> Arc:
        known = list(self._root.root.batches.arcs.granted)
        return self._rng.choice([*known, *known, Arc(self._root.system), Arc(self._system(), 7)])

    def _item_of_update(self, arc: Arc) -> Any:
        rng = self._rng
        op = IssuedId(rng.choice([arc, self._arc()]), rng.randrange(5))
        delta = rng.choice([b"", b"\xff", edit_delta(TextEdit(0, "", "x"))])
        return rng.choice(
            [PublishOp(op, rng.choice([self._item, b"short"]), delta)] * 4
            + [Invalidate(self._specs[0]), Delta(self._specs[0], 1, Patch(b"x"))]  # type: ignore[list-item]
        )

    def _follows(self) -> tuple[FollowsEpoch, ...]:
        return self._rng.choice([(), (), (FollowsEpoch(self._arc(), 1),)])


def test_a_question_about_a_state_that_has_moved_on_makes_a_tick(peer: Peer) -> None:
    """What was written since the last tick belongs to the next one, and is on disk before anybody is shown it."""
    party = peer.create_party("Thin")
    task = party.create(type="task", n=0)
    sink = Sink()
    root = CoherenceRoot(party, sink)
    grants = read_capability(capability_from_text(party.capability().text))
    one = index_spec(IndexQuery(party.key, QuerySpec.start("task")))
    two = index_spec(IndexQuery(party.key, item=task.id))
    link = LinkId("a")
    root.open_link(link, 1, grants, b"k" * 32)
    root.receive(link, 1, Attach(1, None, False, 0))
    root.receive(link, 1, Acquire(one))
    before = sink.sent[-1]
    assert isinstance(before, Grant)
    task["n"] = 1
    own = party.runtime.data
    assert own is not None
    assert own.open_blocks == 1, "nothing has made it durable yet"
    root.receive(link, 1, Acquire(two))
    after = next(each for each in sink.sent if isinstance(each, Grant) and each.spec == two)
    assert own.open_blocks == 0
    assert after.min > before.max, "no tick holds both the old and the new state"
    assert after.value is not None
    assert index_items(after.value)[0].values == {"n": 1}
    root.close()
