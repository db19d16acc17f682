"""One authenticated connection over TCP: whole frames in and out, with bounds on time and memory.

    stream -> SecureChannel -> on_frame(frame)          send(frame) -> SecureChannel -> stream

A connection to a stranger is metered (`Meter`): it is read in small pieces, each of which waits for its turn.

It ends, with a reason that both sides can count, when the other side says goodbye, breaks the channel, is silent for
SILENCE_S, takes longer than FRAME_PATIENCE_S over one frame, or does not take what it is sent. What is under way to a
slow peer is bounded: `writable` turns False at WRITE_BYTES_HIGH and the sessions stop reading from disk for it.

Lives in one asyncio loop. One thing may be done from other threads: to send a frame past the loop when nothing waits to be
sent (`send_straight`). A lock keeps the order of what leaves; nobody waits for anything else while holding it.
"""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from echostore.kernel.ids import DeviceKey
from echostore.kernel.limits import BLOCK_BYTES_MAX
from echostore.mesh.secure_channel import ChannelFailed, KnownKeys, Recognise, SecureChannel
from echostore.wire.mesh import Goodbye, MeshFrame, Ping, Pong, decode_mesh_frame, encode_mesh_frame
from echostore.wire.signing import SigningKey
from echostore.wire.sync import MalformedFrame

HANDSHAKE_S: Final = 10.0
PING_S: Final = 15.0
SILENCE_S: Final = 45.0
"""Three pings without an answer: the other side is gone."""
FRAME_PATIENCE_S: Final = 60.0
STALL_S: Final = 60.0
"""So long may a peer not take anything of what it is sent."""
FAREWELL_S: Final = 1.0
"""So long may the last words take."""
WRITE_BYTES_HIGH: Final = 4 * 1024 * 1024
WRITE_BYTES_LOW: Final = 1024 * 1024
READ_BYTES: Final = 256 * 1024
METERED_READ_BYTES: Final = 4 * 1024
"""Of a stranger, or in a handshake: what is done at once with so much delays nobody."""
FRAME_BYTES_MAX: Final = BLOCK_BYTES_MAX + 128 * 1024
"""The longest block, what wraps it and its encryption. More is taken only after it was asked for (`expect_frame`)."""
BUFFER_BYTES: Final = 64 * 1024
"""What waits to be read of one connection, about; then the other side's kernel keeps it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a connection ended. `theirs` says that the other side misbehaved."""

    reason: str
    detail: str = ""
    theirs: bool = False


class Meter(Protocol):
    """Counts what a stranger sends, and lets it wait for its turn."""

    def received(self, size_bytes: int) -> None: ...
    def frame(self) -> None: ...
    async def turn(self, act: Callable[[], None]) -> None:
        """Do something for the stranger when it may be done."""
        ...


Turn = Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]]
"""Does a step of a handshake when it may be done."""


class ConnectionFailed(Exception):
    """A connection could not be made."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(f"{ended.reason}: {ended.detail}" if ended.detail else ended.reason)
        self.ended = ended


class Connection:
    """See the module. Made by `open_connection` and `accept`, after the handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: SecureChannel, *, dialled: bool
    ) -> None:
        assert channel.remote is not None, "before the handshake is over"
        self.remote: DeviceKey = channel.remote
        self.handshake_hash = channel.handshake_hash
        self.dialled = dialled
        self.bytes_received = 0
        self.bytes_sent = 0
        self.round_trip_s: float | None = None
        self.ended: Ended | None = None
        self._frame_bytes_max = FRAME_BYTES_MAX
        self._frame_bytes = 0
        """What has come of a frame whose end has not."""
        self.meter: Meter | None = None
        """While the device is a stranger."""
        self._reader, self._writer, self._channel = reader, writer, channel
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._frame_at = self._drained_at = self._loop.time()
        self._pings: dict[int, float] = {}
        self._ping_number = 0
        self._writable = True
        self._leaving = threading.Lock()
        """Around each frame that is encrypted and handed on: both must happen in one order."""
        self._straight: socket.socket | None = None
        self._rest = bytearray()
        """What the transport has to take before anything else: it did not fit when it was sent past the loop."""
        self._stirred = asyncio.Event()
        """Set when `_keep` has to look at once: the connection has ended, or waits for the other side to take more."""
        self.on_writable: Callable[[bool], None] = lambda writable: None
        writer.transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH, low=WRITE_BYTES_LOW)

    @property
    def address(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "")

    @property
    def host(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else str(peer or "")

    @property
    def writable(self) -> bool:
        return self._writable

    def read_at_once(self, size_bytes: int) -> None:
        """How much is taken from the socket at a time."""
        read_at_once(self._writer, size_bytes)

    def expect_frame(self, size_bytes: int) -> None:
        """A range of this size was asked for: frames up to it are taken from now on."""
        self._frame_bytes_max = max(self._frame_bytes_max, size_bytes + FRAME_BYTES_MAX - BLOCK_BYTES_MAX)

    def send(self, frame: MeshFrame) -> None:
        """Queue a frame; nothing happens on a connection that has ended."""
        if self.ended is not None or self._writer.transport.is_closing():
            return
        plain = encode_mesh_frame(frame)
        with self._leaving:
            data = self._channel.send(plain)
            self.bytes_sent += len(data)
            if self._rest:
                self._rest += data
            else:
                self._writer.write(data)
        if self._writable and self._writer.transport.get_write_buffer_size() > WRITE_BYTES_HIGH:
            self._writable = False
            self._drained_at = self._loop.time()
            self._stirred.set()
            self.on_writable(False)

    def send_straight(self, frame: MeshFrame) -> bool:
        """Send a frame from any thread, past the loop; False, and nothing happens, when something else goes first."""
        plain = encode_mesh_frame(frame)
        with self._leaving:
            transport = self._writer.transport
            if self.ended is not None or self._rest or transport.is_closing() or transport.get_write_buffer_size():
                return False
            if self._straight is None:
                # Our own: the transport's may be closed by the loop at any moment, and its number given to another file.
                try:
                    self._straight = transport.get_extra_info("socket").dup()
                except OSError:
                    return False
            data = self._channel.send(plain)
            self.bytes_sent += len(data)
            try:
                sent = self._straight.send(data)
            except OSError:
                sent = 0  # full, or broken: the transport will find out which
            if sent < len(data):
                self._rest += data[sent:]
                with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the connection
                    self._loop.call_soon_threadsafe(self._send_rest)
        return True

    def _send_rest(self) -> None:
        with self._leaving:
            rest, self._rest = self._rest, bytearray()
            if self.ended is None:
                self._writer.write(rest)

    async def run(self, on_frame: Callable[[MeshFrame], None], first: list[bytes]) -> Ended:
        """Hand over frames until the connection ends; returns why it did. `first` came with the handshake."""
        keeper = asyncio.create_task(self._keep())
        try:
            if self.meter is None or not first:
                self._take(first, on_frame)
            else:
                await self.meter.turn(lambda: self._take(first, on_frame))
            while self.ended is None:
                meter = self.meter
                data = await self._reader.read(READ_BYTES if meter is None else METERED_READ_BYTES)
                if not data:
                    self.end(Ended("closed"))
                    break
                self.bytes_received += len(data)
                self._heard_at = self._loop.time()
                if meter is None:
                    self._take(self._receive(data), on_frame)
                else:
                    meter.received(len(data))
                    await meter.turn(lambda data=data: self._take_metered(data, on_frame))  # type: ignore[misc]  # bound now
        except ChannelFailed as failure:
            self.end(Ended(str(failure.reason), failure.detail, theirs=True))
        except MalformedFrame as error:
            self.end(Ended("malformed", str(error), theirs=True))
        except OSError as error:
            self.end(Ended("broken", type(error).__name__))
        finally:
            keeper.cancel()
            if self.ended is None:  # cancelled: the node closes
                self.end(Ended("closing"))
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
            await _finish(self._writer)
        assert self.ended is not None
        return self.ended

    def end(self, ended: Ended) -> None:
        """End the connection, telling the other side why if it still listens."""
        if self.ended is not None:
            return
        if ended.reason not in ("closed", "broken", "goodbye", "silent"):
            self.send(Goodbye(ended.reason, ended.detail))
        with self._leaving:
            self.ended = ended
            if self._rest:
                self._writer.write(self._rest)
                self._rest = bytearray()
            if self._straight is not None:
                self._straight.close()
        self._stirred.set()
        self._writer.close()
        # What is still to be sent goes first; a peer that does not take it does not keep the connection for ever.
        self._loop.call_later(FAREWELL_S, self._writer.transport.abort)

    def _take_metered(self, data: bytes, on_frame: Callable[[MeshFrame], None]) -> None:
        if self.ended is None:
            self._take(self._receive(data), on_frame)

    def _receive(self, data: bytes) -> list[bytes]:
        """The frames that are whole now; a frame that has become too long ends the connection."""
        frames = self._channel.receive(data)
        self._frame_bytes = len(data) if frames else self._frame_bytes + len(data)
        if not self._channel.in_frame:
            self._frame_bytes = 0
        elif self._frame_bytes > self._frame_bytes_max:
            self.end(Ended("oversize", f"a frame of more than {self._frame_bytes_max} bytes", theirs=True))
        if max(map(len, frames), default=0) > self._frame_bytes_max:
            self.end(Ended("oversize", f"a frame of more than {self._frame_bytes_max} bytes", theirs=True))
        return [] if self.ended is not None else frames

    def _take(self, frames: list[bytes], on_frame: Callable[[MeshFrame], None]) -> None:
        now = self._loop.time()
        if frames or not self._channel.in_frame:
            self._frame_at = now
        for data in frames:
            if self.meter is not None:
                self.meter.frame()
                if self.ended is not None:
                    return
            frame = decode_mesh_frame(data)
            if isinstance(frame, Ping):
                self.send(Pong(frame.number))
            elif isinstance(frame, Pong):
                sent_at = self._pings.pop(frame.number, None)
                if sent_at is not None:
                    self.round_trip_s = now - sent_at
            elif isinstance(frame, Goodbye):
                self.end(Ended("goodbye", f"{frame.reason}: {frame.detail}" if frame.detail else frame.reason))
                return
            else:
                on_frame(frame)
            if self.ended is not None:
                return

    async def _keep(self) -> None:
        """Ping when it is quiet, notice drained buffers, and end what is dead."""
        while self.ended is None:
            pause = 0.05 if not self._writable else 1.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), pause)
            self._stirred.clear()
            now = self._loop.time()
            if not self._writable:
                size = self._writer.transport.get_write_buffer_size()
                if size <= WRITE_BYTES_LOW:
                    self._writable = True
                    self.on_writable(True)
                elif now - self._drained_at > STALL_S:
                    self.end(Ended("stalled", f"{size} bytes not taken for {STALL_S:g} s", theirs=True))
            if now - self._heard_at > SILENCE_S:
                self.end(Ended("silent", f"nothing heard for {SILENCE_S:g} s"))
            elif self._channel.in_frame and now - self._frame_at > FRAME_PATIENCE_S:
                self.end(Ended("slow", f"one frame took more than {FRAME_PATIENCE_S:g} s", theirs=True))
            elif now - self._heard_at > PING_S and not self._pings:
                self._ping_number += 1
                self._pings = {self._ping_number: now}
                self.send(Ping(self._ping_number))
            elif self._pings and now - next(iter(self._pings.values())) > PING_S:
                self._pings = {}

    def ping(self) -> None:
        """Measure the round trip."""
        self._ping_number += 1
        self._pings[self._ping_number] = self._loop.time()
        self.send(Ping(self._ping_number))


@dataclass(slots=True)
class Handshaken:
    """A connection whose handshake is over, and the frames that came with its last message."""

    connection: Connection
    first: list[bytes]

    async def run(self, on_frame: Callable[[MeshFrame], None]) -> Ended:
        return await self.connection.run(on_frame, self.first)


async def open_connection(
    host: str,
    port: int,
    device: SigningKey,
    *,
    expected: DeviceKey | None,
    known: KnownKeys | None = None,
    timeout_s: float = HANDSHAKE_S,
) -> Handshaken:
    """Dial, and shake hands; ConnectionFailed says why not. `known` is what is shared with whoever answers, where the
    device is not known."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise ConnectionFailed(Ended("no-answer", f"{host}:{port} did not answer in {timeout_s:g} s")) from None
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConnectionFailed(Ended("unreachable", f"{host}:{port}: {why}")) from None
    channel = SecureChannel(device, initiator=True, expected=expected, known=known)
    return await _shake(reader, writer, channel, timeout_s)


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    device: SigningKey,
    *,
    recognise: Recognise | None = None,
    timeout_s: float = HANDSHAKE_S,
    turn: Turn | None = None,
) -> Handshaken:
    """Shake hands with who dialled us; ConnectionFailed says why not. The device is shown to those whom `recognise`
    knows, and without it to those who know the device. Each step waits for its turn."""
    return await _shake(reader, writer, SecureChannel(device, initiator=False, recognise=recognise), timeout_s, turn)


async def _shake(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    channel: SecureChannel,
    timeout_s: float,
    turn: Turn | None = None,
) -> Handshaken:
    first: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            while not channel.ready or channel.outgoing_pending:
                outgoing = channel.take_outgoing()
                if outgoing:
                    writer.write(outgoing)
                    await writer.drain()
                if channel.ready:
                    break
                data = await reader.read(METERED_READ_BYTES)
                if not data:
                    raise ConnectionFailed(Ended("closed", "during the handshake"))
                if turn is None:
                    first += channel.receive(data)
                else:
                    first += await turn(lambda data=data: channel.receive(data))  # type: ignore[misc]  # bound now
    except ChannelFailed as failure:
        writer.write(channel.take_outgoing())  # what tells the other side why
        await _finish(writer)
        raise ConnectionFailed(Ended(str(failure.reason), failure.detail, theirs=True)) from None
    except TimeoutError:
        await _finish(writer)
        raise ConnectionFailed(Ended("slow", f"no handshake in {timeout_s:g} s", theirs=True)) from None
    except OSError as error:
        await _finish(writer)
        raise ConnectionFailed(Ended("broken", type(error).__name__)) from None
    except ConnectionFailed:
        await _finish(writer)
        raise
    except asyncio.CancelledError:  # displaced by another handshake, or the node closes
        writer.transport.abort()
        raise
    return Handshaken(Connection(reader, writer, channel, dialled=channel.initiator), first)


def read_at_once(writer: asyncio.StreamWriter, size_bytes: int) -> None:
    """How much is taken from a socket at a time: asyncio's transports keep that in an attribute."""
    writer.transport.max_size = size_bytes  # type: ignore[attr-defined]  # of a socket's transport


async def _finish(writer: asyncio.StreamWriter) -> None:
    """Close a stream without waiting for a peer that does not read."""
    writer.close()
    try:
        async with asyncio.timeout(FAREWELL_S):
            await writer.wait_closed()
    except (TimeoutError, OSError):
        writer.transport.abort()
