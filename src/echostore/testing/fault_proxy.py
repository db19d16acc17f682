"""A TCP relay in user space that misbehaves on demand: what stands between two processes in network tests.

    with FaultProxy("127.0.0.1:4711") as line:
        peer.connect(line.address)
        line.drop()                     nothing passes in either direction; what is under way waits (TCP would resend it)
        line.drop(Way.TO_TARGET)        one way alone
        line.cut()                      connections are reset, new ones too
        line.shape(delay_s=0.05)        every byte arrives so much later; order is kept
        line.shape(bytes_per_s=10_000)
        line.heal()

A dropped packet is never seen by a program that speaks TCP: it is sent again until it arrives or the connection is
given up. So `drop` holds bytes back, in bounded memory, and stops reading; `heal` lets them pass. `target` may be moved,
so that a process that comes back at another port is found at the same address.

It has a thread with a loop of its own and may be used from any other. As a process of its own, to stand in a network
namespace for example:

    python -m echostore.testing.fault_proxy         lines [method, name, positional, named] in, one line of JSON out for each

`open NAME LISTEN` makes a proxy and answers with its address; every other word is a method. It ends with its input.
"""

import asyncio
import contextlib
import json
import sys
import threading
from collections import deque
from collections.abc import Coroutine
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, TypeVar

CHUNK_BYTES: Final = 64 * 1024
HELD_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes read and not passed on, per direction: what a long link of high bandwidth holds. Then the sender has to wait."""
CALL_S: Final = 30.0

_T = TypeVar("_T")


class Way(StrEnum):
    """A direction: towards the target, or back to who dialled."""

    TO_TARGET = "to-target"
    TO_DIALLER = "to-dialler"


BOTH: Final = (Way.TO_TARGET, Way.TO_DIALLER)


class FaultProxy:
    """See the module. Everything that is set holds for the connections that stand and for those to come."""

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0") -> None:
        self._target = _split(target)
        self._is_cut = False
        self._dropping: set[Way] = set()
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._pairs: set[_Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.address = self._call(self._listen(listen))

    # faults, as sentences

    def retarget(self, target: str) -> None:
        """Lead new connections elsewhere."""
        self._target = _split(target)

    def drop(self, *ways: Way) -> None:
        """Let nothing pass in these directions, in both by default."""
        self._do(lambda: self._dropping.update(ways or BOTH))

    def cut(self) -> None:
        """Reset what stands and whatever comes, until healed."""

        def act() -> None:
            self._is_cut = True
            for pair in list(self._pairs):
                pair.reset()

        self._do(act)

    def reset(self) -> None:
        """Reset the connections that stand, once; new ones pass."""

        def act() -> None:
            for pair in list(self._pairs):
                pair.reset()

        self._do(act)

    def shape(self, *, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """Make the line long, or thin."""

        def act() -> None:
            self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

        self._do(act)

    def heal(self) -> None:
        """Let everything pass again, at once, also what was held back."""

        def act() -> None:
            self._is_cut = False
            self._dropping.clear()
            self._delay_s, self._bytes_per_s = 0.0, None

        self._do(act)

    @property
    def connections(self) -> int:
        return len(self._pairs)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # inside

    async def _listen(self, address: str) -> str:
        host, port = _split(address)
        self._server = await asyncio.start_server(self._accepted, host, port)
        name = self._server.sockets[0].getsockname()
        return f"{name[0]}:{name[1]}"

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(self, (reader, writer), there)
        self._pairs.add(pair)
        try:
            if not self._is_cut:
                await pair.run()
        finally:
            pair.reset()
            self._pairs.discard(pair)

    async def _end(self) -> None:
        self._server.close()
        for pair in list(self._pairs):
            pair.reset()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def passes(self, way: Way) -> bool:
        return way not in self._dropping

    @property
    def delay_s(self) -> float:
        return self._delay_s

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s

    def _do(self, action: Any) -> None:
        """Change something, and let every line that waits look again."""

        async def act() -> None:
            action()
            for pair in self._pairs:
                pair.wake()

        self._call(act())

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)


class _Pair:
    """One connection through the proxy: a pump for each direction."""

    def __init__(
        self,
        proxy: FaultProxy,
        here: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy, self._here, self._there = proxy, here, there
        self._waiting: set[asyncio.Future[None]] = set()
        self._lines = [_Line(proxy, self, Way.TO_TARGET), _Line(proxy, self, Way.TO_DIALLER)]

    async def run(self) -> None:
        """Until both directions have ended, or one breaks."""
        pumps = [
            asyncio.create_task(self._lines[0].run(self._here[0], self._there[1])),
            asyncio.create_task(self._lines[1].run(self._there[0], self._here[1])),
        ]
        try:
            await asyncio.gather(*pumps)
        except OSError:
            return  # one side is gone; the other is reset by who called
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def reset(self) -> None:
        for _, writer in (self._here, self._there):
            writer.transport.abort()

    def wake(self) -> None:
        """Something has moved, or the faults are others: all that wait look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def woken(self, most_s: float | None = None) -> None:
        """Wait for `wake`, or for a time. Counts from the call on: between a look and this nothing is missed."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait((waiting,), timeout=most_s)
        finally:
            self._waiting.discard(waiting)


class _Line:
    """One direction: bytes come in, wait for their time, and go out."""

    def __init__(self, proxy: FaultProxy, pair: _Pair, way: Way) -> None:
        self._proxy, self._pair, self._way = proxy, pair, way
        self._held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taking = asyncio.create_task(self._take(reader))
        try:
            await self._give(writer)
        finally:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):  # the giving side ended this direction
                await taking

    async def _take(self, reader: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(CHUNK_BYTES):
                self._hold(loop.time(), data)
                while self._held_bytes > HELD_BYTES_MAX:
                    await self._pair.woken()
        finally:
            self._hold(loop.time(), b"")

    def _hold(self, now: float, data: bytes) -> None:
        self._held.append((now, data))
        self._held_bytes += len(data)
        self._pair.wake()

    async def _give(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._held or not self._proxy.passes(self._way):
                await self._pair.woken()
                continue
            came_at, data = self._held[0]
            early = came_at + self._proxy.delay_s - loop.time()
            if early > 0:
                await self._pair.woken(early)
                continue
            self._held.popleft()
            self._held_bytes -= len(data)
            self._pair.wake()
            if not data:
                writer.write_eof()
                return
            await self._write(writer, data)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data:
            rate = self._proxy.bytes_per_s
            size = len(data) if rate is None else max(1, min(len(data), int(rate / 50)))
            writer.write(data[:size])
            await writer.drain()
            data = data[size:]
            if rate is not None:
                resume_at = loop.time() + size / rate
                while self._proxy.bytes_per_s is not None and loop.time() < resume_at:
                    await self._pair.woken(resume_at - loop.time())


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main() -> None:
    """Run proxies by words on the standard input."""
    proxies: dict[str, FaultProxy] = {}
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            method, name, positional, named = json.loads(line)
            if method == "open":
                proxies[name] = stack.enter_context(FaultProxy("127.0.0.1:9", listen=positional[0]))
            else:
                getattr(proxies[name], method)(*positional, **named)
            sys.stdout.write(json.dumps(proxies[name].address) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
