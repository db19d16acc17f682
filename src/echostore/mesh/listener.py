"""Takes connections at one address: a few per turn of the loop, so that a flood of them delays nobody who is connected.

Lives in the node's loop.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

ACCEPTS_PER_TURN: Final = 16
BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are taken."""
FULL_PAUSE_S: Final = 0.05
"""After the process could open no more files."""
_FULL: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """Listens until it is closed. `accepted` gets each socket with the host that dialled; `full` hears that none can be
    taken for lack of files."""

    def __init__(
        self, sock: socket.socket, accepted: Callable[[socket.socket, str], None], full: Callable[[], None]
    ) -> None:
        self._sock, self._accepted, self._full = sock, accepted, full
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        name = sock.getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if sock.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"
        self._listen()

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._sock, self._take_some)

    def _take_some(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, name = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._full()
                self._loop.remove_reader(self._sock)
                self._timer = self._loop.call_later(FULL_PAUSE_S, self._listen)
                return
            connected.setblocking(False)
            self._accepted(connected, str(name[0]))


async def listen(
    host: str, port: int, accepted: Callable[[socket.socket, str], None], full: Callable[[], None]
) -> list[Listener]:
    """Listen at every address that a host name stands for; OSError when one of them can't be had."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[Listener] = []
    try:
        for family, _, _, _, name in dict.fromkeys(found):
            # A name of two families means the same port in both.
            where = (name[0], listeners[0].port if listeners and port == 0 else port, *name[2:])
            sock = socket.create_server(where, family=family, backlog=BACKLOG)
            sock.setblocking(False)
            listeners.append(Listener(sock, accepted, full))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
