"""The WebSocket service of thin clients: openings, bad input, quotas, slow readers, messages and services."""

import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from websockets.exceptions import ConnectionClosed

import echostore
from echostore.kernel.coherence.events import Offer, Post, Want
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Attach,
    Below,
    Denied,
    Grant,
    IssuedId,
    LaneItem,
    Message,
    PublishOp,
    RejectReason,
    Service,
    Spec,
    SystemId,
    Token,
    Touched,
    Update,
)
from echostore.kernel.errors import Refused, Unreachable, UsageError
from echostore.kernel.ids import PartyKey
from echostore.kernel.query.fields import parse_field
from echostore.kernel.query.filters import And, Compare, Op
from echostore.kernel.query.spec import QuerySpec, Stage, Step
from echostore.mesh import coherence_socket
from echostore.peer import coherence_batches, coherence_root, coherence_service
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.capabilities import capability_from_text, capability_text, proof_statement
from echostore.wire.coherence import LinkFrame, encode_frame
from echostore.wire.index_spec import FENCE_SPEC, IndexQuery, index_spec
from echostore.wire.signing import SigningKey
from network_peers import until
from thin_client import HOME, PATIENCE_S, Closed, ThinClient, dial

TASKS = QuerySpec.start("task")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.create_party("Thin")


@pytest.fixture
def url(peer: Peer, party: Party) -> str:
    return peer.serve_thin("127.0.0.1:0")


@pytest.fixture
def capability(party: Party) -> str:
    return party.capability(write="*", messages=True).text


def refusals(peer: Peer) -> dict[str, int]:
    return peer.thin_services[0].refusals()


def at_root(peer: Peer) -> dict[str, int]:
    return dict(peer.thin_services[0].indexes()[0].refusals)


# openings


def answer(url: str, said: str | bytes | None, **more: Any) -> tuple[int, str]:
    """What becomes of a connection that says this after hello: the close code and what was said before it."""
    connection = dial(url, **more)
    heard: list[str] = []

    def converse() -> None:
        if said is not None:
            json.loads(connection.recv(PATIENCE_S))
            connection.send(said)
        for _ in range(3):
            heard.append(str(connection.recv(PATIENCE_S)))

    with pytest.raises(ConnectionClosed) as closed:
        converse()
    connection.close()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, heard[-1] if heard else ""


def test_hostile_openings_are_refused_and_counted(peer: Peer, url: str, capability: str) -> None:
    key = SigningKey.generate()
    good = {"capability": capability, "key": key.public.hex(), "proof": "00" * 64}
    bent = bytearray(capability_from_text(capability))
    bent[20] ^= 1
    cases: list[tuple[str | bytes, int, str]] = [
        ("no json", 4400, "malformed-opening"),
        (b"\x00\x01", 4400, "malformed-opening"),
        ("{}", 4400, "malformed-opening"),
        (json.dumps(good | {"key": 5}), 4400, "malformed-opening"),
        (json.dumps(good | {"key": "xy"}), 4400, "malformed-opening"),
        (json.dumps(good | {"capability": "ä"}), 4400, "malformed-opening"),
        (" " * 40_000 + "{}", 4400, "malformed-opening"),
        (json.dumps(good | {"capability": capability_text(bytes(bent))}), 4401, "bad-capability"),
        (json.dumps(good | {"capability": ""}), 4401, "bad-capability"),
        (json.dumps(good), 4401, "bad-proof"),
    ]
    for said, code, reason in cases:
        before = refusals(peer).get(reason, 0)
        found, heard = answer(url, said)
        assert (found, refusals(peer)[reason]) == (code, before + 1), said
        assert code == 4400 or json.loads(heard)["refused"] == reason
    with ThinClient(url, capability) as client:
        assert client.want(client.spec(TASKS)) == [], "nobody else was disturbed"


def test_a_proof_is_for_one_connection_and_one_key(peer: Peer, url: str, party: Party, capability: str) -> None:
    raw = capability_from_text(capability)
    key = SigningKey.generate()
    old = key.sign(proof_statement(secrets.token_bytes(16), raw)).hex()
    replayed = {"capability": capability, "key": key.public.hex(), "proof": old}
    assert answer(url, json.dumps(replayed))[0] == 4401
    bound = party.capability(holder=key.public).text
    with pytest.raises(Closed, match="4401 not-holder"):
        ThinClient(url, bound).open()
    with ThinClient(url, bound, key=key) as client:
        client.want(client.spec(TASKS))


def test_another_subprotocol_or_path_is_refused(peer: Peer, url: str) -> None:
    assert answer(url, None, subprotocols=None)[0] == 4400
    assert answer(url.removesuffix("/thin") + "/other", None)[0] == 4400
    assert refusals(peer) == {"path": 1, "subprotocol": 1}


def test_who_says_nothing_is_sent_away(peer: Peer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence_socket, "OPENING_S", 0.05)
    assert answer(url, None)[0] == 4400
    assert refusals(peer) == {"timeout": 1}


def test_too_many_clients(peer: Peer, url: str, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence_socket, "LINKS_MAX", 1)
    with ThinClient(url, capability), pytest.raises(Closed, match="4429 too-many"):
        ThinClient(url, capability).open()
    until(lambda: not peer.thin_services[0].links())
    with ThinClient(url, capability):
        assert len(peer.thin_services[0].links()) == 1


def test_a_browser_gets_its_page_and_nothing_else(url: str) -> None:
    base = url.replace("ws://", "http://").removesuffix("/thin")
    with urllib.request.urlopen(base + "/echostore-leaf.js") as found:
        assert found.headers["Content-Type"].startswith("text/javascript")
    with pytest.raises(HTTPError) as missing:
        urllib.request.urlopen(base + "/../../etc/passwd")
    assert missing.value.code == 404
    missing.value.close()


def test_an_address_that_is_taken_and_a_reader(peer: Peer, url: str, tmp_path: Path) -> None:
    taken = url.removeprefix("ws://").removesuffix("/thin")
    with pytest.raises(Unreachable, match="can't be served"):
        peer.serve_thin(taken)
    with pytest.raises(UsageError):
        peer.serve_thin("nowhere")
    with echostore.open(tmp_path / "home", read_only=True) as reader, pytest.raises(Refused):
        reader.serve_thin("127.0.0.1:0")


# after the opening


@pytest.mark.parametrize("data", [b"", b"\xff" * 50, b"\x08\x01", "text"])
def test_a_frame_that_can_not_be_read_ends_its_own_link(peer: Peer, url: str, capability: str, data: Any) -> None:
    with ThinClient(url, capability) as other:
        client = ThinClient(url, capability).open()
        assert client.connection is not None
        client.connection.send(data)
        assert client.until_closed().code == 4400
        assert sum(refusals(peer).values()) == 1
        assert other.want(other.spec(TASKS)) == []


def test_what_does_not_belong_is_refused_and_counted(peer: Peer, url: str, capability: str) -> None:
    with ThinClient(url, capability) as client:
        root = client.leaf.caches[HOME].clock
        assert root is not None
        client.until(lambda: client.leaf.arcs.arc)
        unknown = SystemId(root.system.root, (99,))
        foreign = [client.sent[-1], Acquire(client.spec(TASKS)), Touched((Spec(b"x"),))]
        for message in foreign:
            client.send(message, generation=7)
        until(lambda: at_root(peer).get("foreign-generation") == 3)
        wrong: list[Message] = [
            Grant(Spec(b"x"), None, 1, 1, None, Token(b"x")),
            Attach(5, unknown, False, 0),
            Attach(6, client.leaf.systems[HOME], False, 10**9),
            Attach(7, None, False, 0),
            Announce(Service(unknown, "printer"), 1, 1, b""),
            Update(root, 0, 1, (), (PublishOp(client.leaf.arcs.issue(), b"o" * 16, b""),)),
        ]
        for message in wrong:
            client.send(message)
        until(lambda: sum(at_root(peer).values()) == 3 + len(wrong))
        assert client.want(client.spec(TASKS)) == []
        client.send(LaneItem(root, 5, 999, 0, PublishOp(client.leaf.arcs.issue(), b"", b"")))
        client.send(LaneItem(root, 5, 999, 0, PublishOp(client.leaf.arcs.issue(), b"", b"")))
        assert client.until_closed().code == 4400


def test_a_leaf_does_not_speak_for_another(tmp_path: Path) -> None:
    """Names are known to others: they stand in lists of services. Whoever uses one that is not its own gets nothing."""
    for restarted in (False, True):
        with echostore.open(tmp_path / "home", name="Root") as peer:
            party = peer.party("@Thin") if restarted else peer.create_party("Thin")
            url = peer.serve_thin("127.0.0.1:0")
            if not restarted:
                first, second = (party.capability(read=["task"], write=["task"]) for _ in range(2))
                victim = ThinClient(url, first.text)
            victim.url = url
            if restarted:  # the owner is not back yet, and its name is still its own
                with ThinClient(url, second.text) as early:
                    early.send(Attach(4, victim.leaf.systems[HOME], True, 0))
                    until(lambda: at_root(peer).get("not-allowed") == 1)
            with victim, ThinClient(url, second.text) as thief:
                item = victim.create("task", n=1)
                victim.settle()
                name, clock = victim.leaf.systems[HOME], victim.leaf.arcs.arc
                assert clock is not None
                thief.send(Attach(5, name, True, 0))
                thief.send(Attach(6, None, False, 0, (Below(name, (9,)),)))
                thief.send(Attach(7, None, False, 0, (), (9,)))
                until(lambda more=int(restarted): at_root(peer).get("not-allowed") == 3 + more)
                batch = victim.leaf.outbox.numbers[clock] + 1
                stolen = PublishOp(IssuedId(clock, 90), *thief.setting(item, n=66))
                thief.send(Update(clock, batch - 1, batch, (), (stolen,)))
                until(lambda: at_root(peer).get("unknown-system") == 1)
                victim.publish(victim.setting(item, n=2))
                victim.settle()
                assert party.get(item)["n"] == 2
                assert victim.told == []


def test_specs_that_are_not_for_this_client_are_denied(peer: Peer, party: Party, url: str) -> None:
    board = party.create(type="board")
    task = party.create(type="task")
    narrow = party.capability(read=["task"]).text
    kind = Compare(parse_field("@type"), Op.EQ, "task")
    with ThinClient(url, narrow) as client:
        allowed = [TASKS, QuerySpec((Stage(filter=And((kind, Compare(parse_field("a"), Op.EQ, 1)))),))]
        for query in allowed:
            client.want(client.spec(query))
        assert client.want(client.item_spec(task.id))[0].item == task.id
        denied = [
            client.spec(QuerySpec.start("board")),
            client.spec(QuerySpec.start()),
            client.spec(QuerySpec((Stage(filter=kind), Stage(Step.PARENT)))),
            client.item_spec(board.id),
            index_spec(IndexQuery(PartyKey(b"o" * 32), TASKS)),
            Spec(b"services/"),
        ]
        malformed = [Spec(b"\xff"), Spec(b"x" * 60_000), Spec(client.spec(TASKS) + b"\x28\x00")]
        for spec in [*denied, *malformed]:
            client.give(Want(HOME, spec))
        client.until(lambda: len(client.lost) == len(denied) + len(malformed))
        reasons = {each.spec: each.reason for each in client.lost}
        assert [reasons[spec] for spec in denied] == [RejectReason.NOT_ALLOWED] * len(denied)
        assert [reasons[spec] for spec in malformed] == [RejectReason.MALFORMED] * len(malformed)
        assert at_root(peer) == {"malformed": len(malformed), "not-allowed": len(denied)}
        client.create("task")
        client.until(lambda: client.told)
        assert {each.reason for each in client.told} == {RejectReason.NOT_ALLOWED, RejectReason.NO_ITEM}
    assert [each.id for each in party.query("task").all()] == [task.id]


def test_too_many_questions_are_put_off_and_answered_later(
    peer: Peer, party: Party, url: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coherence_root, "ACQUIRES_BURST", 3.0)
    monkeypatch.setattr(coherence_root, "ACQUIRES_PER_S", 5.0)
    party.create(type="task", n=1)
    with ThinClient(url, capability) as client:
        specs = [client.spec(QuerySpec(TASKS.stages, limit=number)) for number in range(1, 7)]
        for spec in specs:
            client.give(Want(HOME, spec))
        for spec in specs:
            client.sees(spec, bool)
        assert {each.what for each in client.slow} == {"acquire"}


def test_too_many_operations_wait_and_none_is_lost(
    peer: Peer, party: Party, url: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coherence_batches, "OBJECT_OPS_BURST", 3.0)
    monkeypatch.setattr(coherence_batches, "OBJECT_OPS_PER_S", 20.0)
    with ThinClient(url, capability) as client, ThinClient(url, capability) as other:
        item = client.create("task", n=0)
        for number in range(1, 9):
            client.publish(client.setting(item, n=number))
        swift = other.create("task", n=0)
        other.settle()
        assert party.get(swift)["n"] == 0
        client.settle()
        assert {each.what for each in client.slow} == {"publish"}
        assert client.told == []
    assert party.get(item)["n"] == 8
    written = [each for message in party.stream() for each in message.operations if each.item == item]
    assert len(written) == 10


def test_a_client_that_does_not_read_costs_its_specs_and_not_its_updates(
    peer: Peer, party: Party, url: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coherence_socket, "READ_BYTES", 1_000_000)
    small = party.create(type="note", n=0)
    party.create(type="task", text="x" * 900_000)
    with ThinClient(url, capability, max_queue=1, close_timeout=0.2) as deaf, ThinClient(url, capability) as awake:
        notes = deaf.spec(QuerySpec.start("note"))
        for client in (deaf, awake):
            client.sees(notes, bool)
            client.until(lambda reader=client: reader.is_live(notes) or reader.tick == 0)
        for number in range(1, 46):
            deaf.give(Want(HOME, deaf.spec(QuerySpec(TASKS.stages, limit=number))))
        full = until(lambda: [each for each in peer.thin_services[0].links() if each.buffered > 1_000_000])
        for number in range(1, 40):
            small["n"] = number
            awake.sees(notes, lambda items, n=number: items[0].values["n"] == n)
        (after,) = [each for each in peer.thin_services[0].links() if each.link == full[0].link]
        assert after.buffered < 4_000_000
        trace = peer.thin_services[0].trace(2048)
        updates = {id: sum(each[1:4] == (id, "out", "Update") for each in trace) for id in {each[1] for each in trace}}
        assert updates[after.link] < 10 < 39 <= max(updates.values()), "updates are merged for it, and not queued"
        deaf.sees(notes, lambda items: items[0].values["n"] == 39)


def test_a_client_that_never_takes_its_answers_is_not_read(
    peer: Peer, party: Party, url: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coherence_socket, "READ_BYTES", 1_000_000)
    party.create(type="task", text="x" * 900_000)
    with ThinClient(url, capability, max_queue=1, close_timeout=0.2) as greedy, ThinClient(url, capability) as other:
        specs = [greedy.spec(QuerySpec(TASKS.stages, limit=number)) for number in range(1, 46)]
        for spec in specs:
            greedy.give(Want(HOME, spec))
        until(lambda: max(each.buffered for each in peer.thin_services[0].links()) > 1_000_000)
        assert len(other.want(other.spec(TASKS))) == 1
        assert max(each.buffered for each in peer.thin_services[0].links()) < 5_000_000
        for spec in specs:
            greedy.sees(spec, bool)


# between clients


def test_messages_have_their_effect_once(url: str, capability: str, party: Party) -> None:
    mute = party.capability().text
    with ThinClient(url, capability) as one, ThinClient(url, capability) as two, ThinClient(url, mute) as silent:
        target = two.leaf.systems[HOME]
        one.give(Post(target, 1, "chat", b"hello"))
        one.give(Post(target, 1, "chat", b"again"))
        silent.give(Post(target, 1, "chat", b"from nobody"))
        two.until(lambda: len(two.delivered) == 2)
        assert [each.message.payload for each in two.delivered] == [b"hello", b"again"]
        one.until(lambda: not one.leaf.sender.pending())
        for message in [each for each in one.sent if type(each).__name__ == "UserMessage"]:
            one.send(message)
        one.give(Post(target, 1, "chat", b"third"))
        two.until(lambda: len(two.delivered) == 3)
        assert two.delivered[2].message.payload == b"third"


def test_services_come_and_go(peer: Peer, url: str, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(b"services/print")

    def offers(client: ThinClient, count: int) -> bool:
        version = client.leaf.read(HOME, spec)
        if version is None and (spec, None) not in client.leaf.caches[HOME].wanted:
            client.give(Want(HOME, spec))
        return version is not None and len(version.value.decode().splitlines()) == count

    with ThinClient(url, capability) as watching:
        watching.give(Want(HOME, spec))
        with ThinClient(url, capability) as offering:
            offering.give(Offer("printer", b"A4"))
            watching.until(lambda: offers(watching, 1))
            offering.give(Offer("printer", None))
            watching.until(lambda: offers(watching, 0))
            offering.give(Offer("printer", b"A3"))
            watching.until(lambda: offers(watching, 1))
        watching.until(lambda: offers(watching, 0))
        with ThinClient(url, capability) as silent:
            silent.give(Offer("printer", b"A5"))
            watching.until(lambda: offers(watching, 1))
            monkeypatch.setattr(coherence_root, "ANNOUNCE_S", -1.0)
            peer.thin_services[0].call(_sweep(peer))
            watching.until(lambda: offers(watching, 0))


async def _sweep(peer: Peer) -> None:
    service = peer.thin_services[0]
    for root in service._roots.values():
        root.sweep()


def test_indexes_that_nobody_watches_are_let_go(
    peer: Peer, party: Party, url: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    party.create(type="task", n=1)
    with ThinClient(url, capability) as stays:
        with ThinClient(url, capability) as client:
            client.want(client.spec(TASKS))
            client.want(client.spec(QuerySpec(TASKS.stages, limit=3)))
        stays.want(stays.spec(TASKS))
        until(lambda: len(peer.thin_services[0].links()) == 1)
        monkeypatch.setattr(coherence_root, "IDLE_S", -1.0)
        peer.thin_services[0].call(_sweep(peer))
        assert peer.thin_services[0].indexes()[0].watched == 1
        party.create(type="task", n=2)
        stays.sees(stays.spec(TASKS), lambda items: len(items) == 2)


def test_a_fence_is_answered_by_the_root_and_leaves_nothing_behind(peer: Peer, party: Party, url: str) -> None:
    narrow = party.capability(read=["task"]).text
    with ThinClient(url, narrow) as client:
        for number in range(20):
            spec = Spec(FENCE_SPEC + str(number).encode())
            client.give(Want(HOME, spec))
            client.until(lambda spec=spec: client.leaf.read(HOME, spec) is not None)
        (link,) = peer.thin_services[0].links()
        assert link.indexes == 0
        root = next(iter(peer.thin_services[0]._roots.values()))
        assert len(root.root.holdings) == 0


def test_a_closed_party_sends_its_clients_away_and_no_others(
    peer: Peer, party: Party, url: str, capability: str
) -> None:
    other = peer.create_party("Other")
    with ThinClient(url, other.capability().text) as stays:
        client = ThinClient(url, capability).open()
        client.want(client.spec(TASKS))
        party.close()
        client.send(Acquire(client.spec(QuerySpec.start("note"))))
        assert client.until_closed().code == 1001
        assert stays.want(stays.spec(TASKS)) == []
        with pytest.raises(Closed, match="4403 no-party"):
            ThinClient(url, capability).open()


def test_the_service_ends_with_its_peer(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Thin")
        client = ThinClient(peer.serve_thin("127.0.0.1:0"), party.capability(write="*").text).open()
        item = client.create("task", n=1)
        client.settle()
    assert client.until_closed().code == 1001
    with echostore.open(tmp_path / "home") as peer:
        assert peer.party("@Thin").get(item)["n"] == 1


def test_frames_of_the_trace_and_the_links_are_shown(peer: Peer, party: Party, url: str, capability: str) -> None:
    with ThinClient(url, capability) as client:
        client.want(client.spec(TASKS))
        client.want(client.spec(TASKS))
        service = peer.thin_services[0]
        (link,) = service.links()
        assert (link.indexes, link.party, link.writable) == (1, party.key.hex(), True)
        (indexes,) = service.indexes()
        assert (indexes.watched, indexes.acquires, indexes.evaluations, indexes.hit_rate) == (1, 1, 1, 0.0)
        kinds = [(direction, kind) for _, _, direction, kind, _ in service.trace()]
        assert kinds[0] == ("in", "Attach")
        assert ("in", "Acquire") in kinds
        assert ("out", "Grant") in kinds
        assert len(service.trace(2)) == 2
    assert coherence_service.ThinIndexes("", 0, 0, 0, 0, 0, ()).hit_rate is None
    assert encode_frame(LinkFrame(1, Denied(Spec(b"x"), RejectReason.MALFORMED)))
