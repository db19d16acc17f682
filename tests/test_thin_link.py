"""Frames of a leaf's connection: each once, in order, whether they were waited for or came straight from the socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from echostore.kernel.errors import Unreachable
from echostore.kernel.ids import FeedId, PartyKey
from echostore.thin.link import CapabilityRefused, Link, Welcome, _connection_class

PATIENCE_S = 60.0
WELCOME = Welcome(b"r" * 16, 7, 1, PartyKey(b"p" * 32), FeedId(b"f" * 8), {})

Script = Callable[[ServerConnection], Awaitable[None]]
Reader = Callable[[Link], Awaitable[None]]


def talk(script: Script, reader: Reader) -> None:
    """One connection: what the upper side does, and what the leaf does with its link."""

    async def both() -> None:
        async with serve(script, "127.0.0.1", 0, compression=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            socket: Any = await connect(
                f"ws://127.0.0.1:{port}", compression=None, proxy=None, create_connection=_connection_class()
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await reader(Link(socket, WELCOME))
            finally:
                await socket.close()

    asyncio.run(both())


async def arrived(link: Link, count: int) -> None:
    """Until so many messages wait to be received."""
    while link._socket.waiting < count:
        await asyncio.sleep(0.001)


def test_frames_keep_their_order_however_they_come() -> None:
    taken: list[bytes] = []

    async def script(socket: ServerConnection) -> None:
        await socket.send(b"early 1")
        await socket.send([b"early", b" 2"])  # in fragments
        await socket.recv()
        for number in range(50):
            await socket.send(b"whole %d" % number)
            if number % 7 == 0:
                await socket.send([b"frag", b"ment ", b"%d" % number])
        await socket.close()

    async def reader(link: Link) -> None:
        await arrived(link, 2)  # before anybody reads
        await link.send(b"go")
        await link.read(taken.append)

    talk(script, reader)
    wanted = [b"early 1", b"early 2"]
    for number in range(50):
        wanted.append(b"whole %d" % number)
        if number % 7 == 0:
            wanted.append(b"fragment %d" % number)
    assert taken == wanted


def test_a_frame_that_nothing_waits_before_is_handed_over_from_the_socket() -> None:
    """Without a turn of the loop: nobody has received it by then."""
    received: list[bytes] = []
    taken: list[bytes] = []

    async def script(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(b"one")
        await socket.recv()
        await socket.close()

    async def reader(link: Link) -> None:
        async def recv(decode: bool | None = None) -> Any:
            message = await type(link._socket).recv(link._socket, decode)
            received.append(message)
            return message

        link._socket.recv = recv
        reading = asyncio.ensure_future(link.read(taken.append))
        await asyncio.sleep(0)
        await link.send(b"go")
        while not taken:
            await asyncio.sleep(0.001)
        await link.send(b"done")
        await reading

    talk(script, reader)
    assert taken == [b"one"]
    assert received == []


@pytest.mark.parametrize("early", [True, False])
def test_what_a_frame_is_refused_for_ends_the_connection(early: bool) -> None:
    taken: list[bytes] = []

    async def script(socket: ServerConnection) -> None:
        if not early:
            await socket.recv()
        for frame in (b"good", b"bad", b"never seen"):
            await socket.send(frame)
        await socket.wait_closed()

    async def reader(link: Link) -> None:
        def take(frame: bytes) -> None:
            if frame == b"bad":
                raise Unreachable("a frame that can't be read")
            taken.append(frame)

        if early:
            await arrived(link, 3)
        else:
            await link.send(b"go")
        with pytest.raises(Unreachable, match="can't be read"):
            await link.read(take)

    talk(script, reader)
    assert taken == [b"good"]


def test_text_after_the_opening_ends_the_connection() -> None:
    taken: list[bytes] = []

    async def script(socket: ServerConnection) -> None:
        await socket.send(b"good")
        await socket.send("text")
        await socket.send(b"never seen")
        await socket.wait_closed()

    async def reader(link: Link) -> None:
        with pytest.raises(Unreachable, match="text"):
            await link.read(taken.append)
        await link.close()

    talk(script, reader)
    assert taken == [b"good"]


def test_a_capability_that_is_refused_later_is_told_as_that() -> None:
    async def script(socket: ServerConnection) -> None:
        await socket.send(b"good")
        await socket.close(4401, "revoked")

    async def reader(link: Link) -> None:
        with pytest.raises(CapabilityRefused):
            await link.read(lambda frame: None)

    talk(script, reader)
