"""The local socket of a home: how programs of this machine reach the one that has the home open.

    <home>/serve.sock      mode 0600 inside a folder of mode 0700: whoever may open it may read the keys as well

A frame is four bytes of length and one MessagePack value. What the frames mean is told in `local_server` (the side that
has the peer) and `attached` (the side that uses it).
"""

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from echostore.kernel.errors import TooLarge

SOCKET_NAME = "serve.sock"
PROTOCOL_VERSION = 2
FRAME_BYTES_MAX = 64 << 20
"""Above every value, list of items and chunk of a file; a bound on what one frame may take."""
_PATH_BYTES_MAX = 100
"""What every system allows as the address of a local socket; longer homes are reached through a short link."""
_LENGTH = struct.Struct(">I")


class Disconnected(Exception):
    """The other side is gone, or does not speak this protocol."""


class Silent(Exception):
    """No frame has come in the time."""


class Frames:
    """A connected socket that carries frames. Not shared between threads, except that any may send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()

    def send(self, value: Any) -> None:
        data = msgspec.msgpack.encode(value)
        if len(data) > FRAME_BYTES_MAX:
            raise TooLarge(f"{len(data)} bytes do not fit one frame of the local socket")
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise Disconnected(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next frame; `Silent` when none has come in the time."""
        try:
            self._socket.settimeout(timeout_s)
            (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise Disconnected(f"a frame of {length} bytes")
            return msgspec.msgpack.decode(self._take(length))
        except TimeoutError:
            raise Silent from None
        except OSError as error:
            raise Disconnected(str(error)) from None
        except msgspec.DecodeError as error:
            raise Disconnected(f"a frame that can't be read: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()  # of a thread that has ended

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            more = self._socket.recv(min(1 << 20, max(1 << 16, count - len(self._buffer))))
            if not more:
                raise Disconnected("the other side has ended the connection")
            self._buffer += more
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


def listen_locally(home: Path) -> socket.socket:
    """Take connections of this machine. Called by the one process that holds the home's lock: what is left of an
    earlier one, which may have been killed, is replaced."""
    path = home / SOCKET_NAME
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as reachable:
            listening.bind(reachable)
        path.chmod(0o600)
        listening.listen(64)
    except BaseException:
        listening.close()
        raise
    return listening


def connect_locally(home: Path) -> Frames | None:
    """A connection to the process that serves a home; None when there is none."""
    path = home / SOCKET_NAME
    if not path.exists():
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as reachable:
            connected.connect(reachable)
    except OSError:
        connected.close()
        return None  # nobody listens: it was left by a process that was killed
    return Frames(connected)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of a socket that fits an address; for a deep folder, through a link that is gone again afterwards."""
    if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
        yield str(path)
        return
    folder = tempfile.mkdtemp(prefix="echo-")
    link = os.path.join(folder, "h")
    try:
        os.symlink(path.parent, link)
        yield os.path.join(link, path.name)
    finally:
        with contextlib.suppress(FileNotFoundError):  # the link could not be made
            os.unlink(link)
        os.rmdir(folder)
