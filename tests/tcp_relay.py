"""An address that stays while what answers behind it comes, goes and moves: no test needs a port that is free twice.

relay = Relay()                 relay.url is in use from here on
relay.point(server.url)         new connections go there
relay.cut()                     all connections are reset, without a word; those to come find nobody
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any

CHUNK_BYTES = 65_536


class Relay:
    """Passes bytes on between whoever connects and one address on the loopback."""

    def __init__(self, url: str | None = None) -> None:
        self._target: tuple[str, int] | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = self._await(self._start())
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/thin"
        if url is not None:
            self.point(url)

    def point(self, url: str) -> None:
        host, port = url.removeprefix("ws://").removesuffix("/thin").split(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """What a process leaves behind that is killed: resets."""
        self._target = None
        self._await(self._abort())

    def close(self) -> None:
        self.cut()
        self._server.close()
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _abort(self) -> None:
        for writer in list(self._open):
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it may be gone already
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        try:
            if self._target is not None:
                with contextlib.suppress(OSError):  # nobody is there, or no longer: the other side sees it closed
                    above, below = await asyncio.open_connection(*self._target)
                    self._open.add(below)
                    try:
                        await asyncio.gather(self._pass(reader, below), self._pass(above, writer))
                    finally:
                        self._open.discard(below)
                        below.transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        finally:
            if not writer.is_closing():
                writer.close()
