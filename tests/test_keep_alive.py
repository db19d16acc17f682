"""A connection on which nobody says anything: pings keep it, and who does not answer them is let go.

Real sockets. The loop's clock is set forward instead of waiting.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from echostore.kernel.ids import DeviceKey
from echostore.mesh.connection import PING_S, SILENCE_S, Connection, Handshaken, accept, open_connection
from echostore.wire.signing import SigningKey
from network_peers import PATIENCE_S

QUIET_S = PING_S + 1
"""Long enough for a ping, too short for an end."""


class ForwardLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward: what was to happen by then happens next."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run(story: Callable[[ForwardLoop], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=ForwardLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ForwardLoop)
        runner.run(story(loop))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Handshaken, Handshaken]]:
    """Who dialled, and who was dialled. Neither says or reads anything yet."""
    accepted: asyncio.Queue[Handshaken] = asyncio.Queue()
    key = SigningKey.generate()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(await accept(reader, writer, key))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        dialled = await open_connection("127.0.0.1", port, SigningKey.generate(), expected=DeviceKey(key.public))
        other = await accepted.get()
        yield dialled, other
        for each in (dialled, other):
            each.connection._writer.transport.abort()
    finally:
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def running(side: Handshaken) -> asyncio.Task[object]:
    return asyncio.create_task(side.run(lambda frame: None))


def test_a_quiet_connection_is_kept_by_pings() -> None:
    async def story(loop: ForwardLoop) -> None:
        async with connected() as (ann, bob):
            tasks = [running(ann), running(bob)]
            both = [ann.connection, bob.connection]
            for _ in range(2 * int(SILENCE_S // QUIET_S)):
                heard = [_heard(connection) for connection in both]
                loop.ahead_s += QUIET_S
                await until(lambda heard=heard: all(_heard(c) > at + PING_S for c, at in zip(both, heard, strict=True)))
            assert [connection.ended for connection in both] == [None, None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(story)


def test_who_does_not_answer_is_let_go() -> None:
    async def story(loop: ForwardLoop) -> None:
        async with connected() as (ann, _mute):
            task = running(ann)
            loop.ahead_s += QUIET_S
            await until(lambda: bool(ann.connection._pings))
            assert ann.connection.ended is None
            loop.ahead_s += SILENCE_S - QUIET_S + 1
            await until(lambda: ann.connection.ended is not None)
            assert ann.connection.ended is not None
            assert (ann.connection.ended.reason, ann.connection.ended.theirs) == ("silent", False)
            await task

    run(story)


def _heard(connection: Connection) -> float:
    return connection._heard_at
