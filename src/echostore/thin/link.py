"""One connection of a leaf: a WebSocket, its opening, then frames of the coherence protocol.

    server   {"hello": 1, "nonce"}
    leaf     {"capability", "key", "proof"}        proof: the leaf's key signs the nonce and the capability's hash
    server   {"ok": true, "party", "root", "generation", "tick", "feed", ...}    or {"refused": reason, "detail"}

After that every binary message is one frame. What is wrong with what the other side says raises `Unreachable`; a
capability that it does not accept raises `CapabilityRefused`, because no later attempt will go better.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from echostore.kernel.errors import EchoError, Refused, Unreachable, UsageError
from echostore.kernel.ids import FEED_ID_BYTES, KEY_BYTES, FeedId, PartyKey
from echostore.wire.capabilities import (
    NONCE_BYTES,
    capability_from_text,
    capability_text,
    proof_statement,
    read_capability,
)
from echostore.wire.coherence import FRAME_BYTES_MAX
from echostore.wire.coherence_names import TICK_MAX
from echostore.wire.index_spec import MalformedIndex
from echostore.wire.signing import SigningKey

SUBPROTOCOL: Final = "echostore-coherence-3"
OPENING_S: Final = 10.0
"""How long the opening may take. It is two small messages."""

PING_S: Final = 20.0
"""A connection that answers no ping for so long is gone."""

ROOT_BYTES: Final = 16
OPENING_CHARACTERS_MAX: Final = 64 * 1024

REFUSED_CODES: Final = (4401, 4403)
"""Closed because of the capability."""


class CapabilityRefused(Refused):
    """The other side does not accept the capability: it is malformed, expired, revoked, or not for this."""

    code = "E-CAPABILITY"


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the opening told."""

    root: bytes
    generation: int
    tick: int
    party: PartyKey
    feed: FeedId
    """The root's data feed: ids of items that this leaf makes begin with it."""
    rights: dict[str, Any]

    @property
    def signs(self) -> bool:
        """Whether batches and statements are to be signed: between here and the root are others."""
        return self.rights.get("sign") is True


def capability_bytes(capability: str | bytes) -> bytes:
    """The capability that a person was given: its bytes, or their text form."""
    if not isinstance(capability, str | bytes):
        raise UsageError("a capability is text or bytes", next_step="Paste what `party capability issue` printed.")
    try:
        data = capability if isinstance(capability, bytes) else capability_from_text(capability)
        read_capability(data)
    except MalformedIndex as error:
        raise UsageError(
            f"this is not a capability: {error}", next_step="Paste what `party capability issue` printed."
        ) from error
    return data


class Link:
    """An open connection."""

    def __init__(self, socket: Any, welcome: Welcome) -> None:
        self._socket = socket
        self.welcome = welcome

    async def send(self, frame: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(frame)
        except ConnectionClosed as closed:
            raise Unreachable("the connection is gone") from closed

    async def read(self, take: Callable[[bytes], None]) -> None:
        """Hand over frames until the connection ends, as `frames` does, and for one that nothing waits before at once: as
        it comes from the socket, without a turn of the loop and a task between. Ends with what `take` raises."""
        self._socket.take = take
        try:
            async for frame in self.frames():
                take(frame)
        finally:
            self._socket.take = None
        if self._socket.failure is not None:
            raise self._socket.failure

    async def frames(self) -> AsyncIterator[bytes]:
        """Frames until the connection ends; CapabilityRefused when it ended for the capability."""
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                message = await self._socket.recv()
                if not isinstance(message, bytes):
                    raise Unreachable("a text message after the opening")
                yield message
        except ConnectionClosed as closed:
            _raise_if_refused(closed)

    async def close(self, why: str = "") -> None:
        await self._socket.close(1000, why[:100])


async def open_link(url: str, capability: bytes, key: SigningKey) -> Link:
    """Connect and go through the opening."""
    try:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidURI, WebSocketException
    except ImportError:
        raise Refused("a thin client needs the package websockets", next_step="pip install 'echostore[web]'") from None
    try:
        socket = await connect(
            url,
            create_connection=_connection_class(),
            subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]  # a NewType of str
            max_size=FRAME_BYTES_MAX,
            open_timeout=OPENING_S,
            ping_interval=PING_S,
            ping_timeout=PING_S,
            close_timeout=1.0,
            compression=None,
            proxy=None,
        )
    except InvalidURI as error:
        raise UsageError(f"{url!r} is not the address of a thin service", next_step="ws://HOST:PORT/thin") from error
    except (OSError, WebSocketException, TimeoutError) as error:
        raise Unreachable(f"{url} can't be reached: {error}") from error
    try:
        if socket.subprotocol != SUBPROTOCOL:
            raise Unreachable(
                f"{url} does not speak {SUBPROTOCOL}, but another version or something else",
                next_step="Use the same version of echostore on both sides.",
            )
        async with asyncio.timeout(OPENING_S):
            return Link(socket, await _opening(socket, capability, key))
    except TimeoutError:
        await socket.close()
        raise Unreachable(f"{url} did not finish the opening in {OPENING_S:.0f} s") from None
    except ConnectionClosed as closed:
        _raise_if_refused(closed)
        raise Unreachable(f"{url} closed the connection: {closed}") from closed
    except BaseException:
        await socket.close()
        raise


@cache
def _connection_class() -> Any:
    """Made when one is opened: websockets is there only where thin clients are."""
    from websockets.asyncio.client import ClientConnection
    from websockets.frames import Frame, Opcode

    class LeafConnection(ClientConnection):
        """Gives whole binary messages to `take` as they come, and all else to whoever receives."""

        take: Callable[[bytes], None] | None = None
        failure: EchoError | None = None
        waiting = 0
        """Messages that somebody has to receive first."""

        def process_event(self, event: Any) -> None:
            if isinstance(event, Frame):
                take = self.take
                if take is not None and not self.waiting and event.opcode is Opcode.BINARY and event.fin:
                    if self.failure is None:
                        self._give(take, bytes(event.data))
                    return
                self.waiting += event.opcode in (Opcode.TEXT, Opcode.BINARY)
            super().process_event(event)

        def _give(self, take: Callable[[bytes], None], frame: bytes) -> None:
            try:
                take(frame)
            except EchoError as error:
                self.failure = error
                self.transport.abort()

        async def recv(self, decode: bool | None = None) -> Any:
            message = await super().recv(decode)
            self.waiting -= 1
            return message

    return LeafConnection


async def _opening(socket: Any, capability: bytes, key: SigningKey) -> Welcome:
    hello = _json(await socket.recv())
    if hello.get("hello") != 1:
        raise Unreachable("the other side speaks another protocol")
    nonce = _hex(hello, "nonce", NONCE_BYTES)
    await socket.send(
        json.dumps(
            {
                "capability": capability_text(capability),
                "key": key.public.hex(),
                "proof": key.sign(proof_statement(nonce, capability)).hex(),
            }
        )
    )
    answer = _json(await socket.recv())
    if answer.get("ok") is not True:
        raise _refusal(str(answer.get("refused", "")), str(answer.get("detail", "")))
    return Welcome(
        root=_hex(answer, "root", ROOT_BYTES),
        generation=_number(answer.get("generation"), (1 << 64) - 1),
        tick=_number(answer.get("tick"), TICK_MAX),
        party=PartyKey(_hex(answer, "party", KEY_BYTES)),
        feed=FeedId(_hex(answer, "feed", FEED_ID_BYTES)),
        rights=answer,
    )


def _json(message: Any) -> dict[str, Any]:
    if not isinstance(message, str) or len(message) > OPENING_CHARACTERS_MAX:
        raise Unreachable("the opening is not as agreed")
    try:
        found = json.loads(message)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreachable("the opening is not as agreed")
    return found


def _hex(message: dict[str, Any], name: str, size: int) -> bytes:
    try:
        data = bytes.fromhex(str(message.get(name)))
    except ValueError:
        data = b""
    if len(data) != size:
        raise Unreachable(f"the opening is not as agreed: {name} is not {size} bytes")
    return data


def _number(value: object, most: int) -> int:
    """A number, or its decimal text: JSON in a browser has no whole 64 bits."""
    text = str(value)
    if not text.isdecimal() or len(text) > 20 or int(text) > most:
        raise Unreachable("the opening is not as agreed: not a number")
    return int(text)


def _refusal(reason: str, detail: str) -> Refused:
    return CapabilityRefused(
        f"the capability is refused ({reason or 'no reason given'}){': ' + detail if detail else ''}",
        next_step="Ask a member of the party for another one.",
    )


def _raise_if_refused(closed: Any) -> None:
    received = closed.rcvd
    if received is not None and received.code in REFUSED_CODES:
        raise _refusal(str(received.code), received.reason) from closed
