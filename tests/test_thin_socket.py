"""The upper end of a WebSocket link: written to without tasks, read when there is room, and one version of frames."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection

from echostore.kernel.coherence.messages import Delta, EndUpdate, Grant, IndexValue, Message, Patch, Pin, Spec, Update
from echostore.kernel.errors import Unreachable
from echostore.mesh import coherence_socket
from echostore.mesh.coherence_socket import Door, ServedLink, ThinServer, message_header
from echostore.thin.link import SUBPROTOCOL, open_link
from echostore.wire.capabilities import Grants, capability_text, proof_statement
from echostore.wire.coherence import UPDATE_ITEMS_MAX, LinkFrame, decode_frame, encode_frame
from echostore.wire.signing import SigningKey
from network_peers import until
from test_coherence_wire import CLOCK
from thin_client import PATIENCE_S, dial
from thin_server import capability

SPEC = Spec(b"spec")
WAITING_BYTES = 30_000_000


class Service:
    """A server in a thread of its own, and its owner, who takes frames or does not."""

    def __init__(self) -> None:
        self.taking = True
        self.received_messages: list[Message] = []
        self.told: list[bool] = []
        self.gone = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = ThinServer(self, now_ms=lambda: 0)
        self.url = self.run(self.server.start("127.0.0.1", 0))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def do(self, action: Callable[[], Any]) -> Any:
        async def act() -> Any:
            return action()

        return self.run(act())

    def close(self) -> None:
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @property
    def link(self) -> ServedLink:
        return next(iter(self.server.links.values()))

    def admit(self, grants: Grants) -> Door:
        return Door({"party": grants.party.hex()})

    def opened(self, link: ServedLink) -> None: ...

    def closed(self, link: ServedLink) -> None:
        self.gone += 1

    def received(self, link: ServedLink, frame: LinkFrame) -> None:
        self.received_messages.append(frame.message)

    def writable(self, link: ServedLink, *, writable: bool) -> None:
        self.told.append(writable)

    def may_read(self, link: ServedLink) -> bool:
        return self.taking


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@contextmanager
def connected(service: Service, **more: Any) -> Iterator[ClientConnection]:
    connection = dial(service.url, **more)
    try:
        hello = json.loads(connection.recv(PATIENCE_S))
        key, data = SigningKey.generate(), capability()
        proof = key.sign(proof_statement(bytes.fromhex(hello["nonce"]), data)).hex()
        connection.send(json.dumps({"capability": capability_text(data), "key": key.public.hex(), "proof": proof}))
        assert json.loads(connection.recv(PATIENCE_S))["ok"]
        until(lambda: service.server.links)
        yield connection
    finally:
        connection.close_socket()


def heard(connection: ClientConnection) -> Message:
    data = connection.recv(PATIENCE_S)
    assert isinstance(data, bytes)
    return decode_frame(data).message


def large(number: int) -> Grant:
    return Grant(SPEC, None, number, number, IndexValue(bytes(500_000)))


def filled(service: Service) -> list[Grant]:
    """Send to a client that does not read until more waits than both systems could hold on the way; what was sent."""
    sent: list[Grant] = []

    def send() -> bool:
        sent.append(large(len(sent)))
        service.link.send(sent[-1])
        return service.link.queued > WAITING_BYTES

    until(lambda: service.do(send))
    return sent


def end(connection: ClientConnection) -> tuple[int, str]:
    """Read until the connection ends; the code and the reason."""
    with suppress(ConnectionClosed):
        while True:
            heard(connection)
    assert connection.close_code is not None
    return connection.close_code, connection.close_reason or ""


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 70_000])
def test_the_head_of_a_message_is_that_of_the_library(size: int) -> None:
    whole = Frame(Opcode.BINARY, bytes(size)).serialize(mask=False)
    assert message_header(size) + bytes(size) == whole


def test_messages_of_all_sizes_arrive(service: Service) -> None:
    with connected(service) as connection:
        sent = [Grant(SPEC, None, 1, 1, IndexValue(bytes(size))) for size in (0, 80, 100, 65_000, 66_000, 3_000_000)]
        for message in sent:
            service.do(partial(service.link.send, message))
        assert [heard(connection) for _ in sent] == sent
        assert service.do(lambda: (service.link.buffered, service.link.frames_sent)) == (0, len(sent))


def test_an_update_that_is_too_large_for_a_frame_comes_in_parts(service: Service) -> None:
    items = tuple(Delta(SPEC, 0, Patch(b"%d" % number)) for number in range(UPDATE_ITEMS_MAX + 1))
    with connected(service) as connection:
        service.do(lambda: service.link.send(Update(CLOCK, 0, 1, (), items)))
        frames = [heard(connection) for _ in range(len(items) + 2)]
        assert isinstance(frames[-1], EndUpdate)
        service.do(lambda: service.link.send(Update(CLOCK, 1, 2, (), items[:-1])))
        assert heard(connection) == Update(CLOCK, 1, 2, (), items[:-1])


def test_who_does_not_read_is_told_to_the_owner_and_gets_all_in_order_later(service: Service) -> None:
    with connected(service, max_queue=1) as connection:
        sent = filled(service)
        assert service.told[-1:] == [False]
        assert service.do(lambda: service.link.buffered) > coherence_socket.WRITABLE_BYTES
        assert [heard(connection) for _ in sent] == sent
        until(lambda: service.told[-1:] == [True])
        until(lambda: service.do(lambda: (service.link.buffered, len(service.link.queue))) == (0, 0))
        assert service.do(lambda: service.link.frames_sent) == len(sent)


def test_what_is_queued_is_dropped_when_the_link_ends(service: Service) -> None:
    with connected(service, max_queue=1) as connection:
        sent = filled(service)
        service.do(lambda: service.link.close(4401, "revoked"))
        assert service.do(lambda: service.link.queued) == 0
        got = []
        with suppress(ConnectionClosed):
            while True:
                got.append(heard(connection))
        assert got == sent[: len(got)]
        assert len(got) < len(sent)
        assert end(connection) == (4401, "revoked")
        until(lambda: service.gone == 1)


def test_a_link_that_takes_nothing_is_dropped(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence_socket, "BUFFER_BYTES_MAX", 2_000_000)
    with connected(service, max_queue=1) as connection:
        link = service.link

        def send() -> bool:
            link.send(large(1))
            return link.closing

        until(lambda: service.do(send))
        assert end(connection)[0] == 4429


def test_a_link_that_is_held_back_goes_on_when_its_owner_says_so(service: Service) -> None:
    service.taking = False
    with connected(service) as connection:
        until(lambda: service.do(lambda: len(service.server._held_back)))
        for number in range(3):
            connection.send(encode_frame(LinkFrame(1, Pin(number))))
        service.do(service.server.read_on)  # for nothing: it looks, and waits again
        until(lambda: service.do(lambda: service.link in service.server._held_back and not service.link.go_on.is_set()))
        assert service.received_messages == []
        service.taking = True
        service.do(service.server.read_on)
        until(lambda: len(service.received_messages) == 3)
        assert service.received_messages == [Pin(0), Pin(1), Pin(2)]
        assert service.do(lambda: len(service.server._held_back)) == 0


def test_a_link_with_answers_to_take_is_read_when_it_has_taken_them(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coherence_socket, "READ_BYTES", 1_000_000)
    with connected(service, max_queue=1) as connection:
        sent = filled(service)
        connection.send(encode_frame(LinkFrame(1, Pin(0))))  # for which the reader waits already
        until(lambda: service.received_messages == [Pin(0)])
        connection.send(encode_frame(LinkFrame(1, Pin(1))))
        until(lambda: service.do(lambda: len(service.server._held_back)))
        assert service.received_messages == [Pin(0)]
        assert [heard(connection) for _ in sent] == sent
        until(lambda: service.received_messages == [Pin(0), Pin(1)])


@pytest.mark.parametrize("by", ["client", "owner"])
def test_a_link_that_is_held_back_can_end(service: Service, by: str) -> None:
    """Also when nobody ever takes more."""
    service.taking = False
    with connected(service) as connection:
        until(lambda: service.do(lambda: len(service.server._held_back)))
        if by == "client":
            connection.close_socket()
        else:
            service.do(lambda: service.link.close(4401, "revoked"))
        until(lambda: service.gone == 1)
    assert service.server.links == {}
    assert service.do(lambda: len(service.server._held_back)) == 0


def test_a_client_of_another_version_is_told_so_and_counted(service: Service) -> None:
    connection = dial(service.url, subprotocols=["echostore-coherence-1"])
    with pytest.raises(ConnectionClosed) as closed:
        connection.recv(PATIENCE_S)
    connection.close()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4400, "subprotocol")
    until(lambda: service.server.refusals == {"subprotocol": 1})


def test_a_leaf_says_that_the_other_side_is_of_another_version() -> None:
    async def other(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def meet() -> None:
        async with serve(other, "127.0.0.1", 0, select_subprotocol=lambda connection, offered: None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            with pytest.raises(Unreachable, match=SUBPROTOCOL) as refused:
                await open_link(f"ws://127.0.0.1:{port}/thin", capability(), SigningKey.generate())
            assert "same version" in str(refused.value)

    asyncio.run(meet())


@pytest.mark.parametrize("turns", range(4))
def test_nobody_is_left_behind_who_comes_while_the_server_closes(service: Service, turns: int) -> None:
    """Accepted, and not yet known to the server: it would not wait for them."""
    host, port = service.url.removeprefix("ws://").removesuffix("/thin").split(":")

    async def come_and_close() -> int:
        comers = [socket.create_connection((host, int(port))) for _ in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for comer in comers:
            comer.close()
        await service.server.close()
        return len(asyncio.all_tasks()) - 1

    assert service.run(come_and_close()) == 0
