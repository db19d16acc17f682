"""Links of thin clients over WebSocket, on the upper side: a root's service or an edge.

    connect --> hello (nonce) --> capability, key, proof --> ok or refused --> frames of wire.coherence

The opening is three small JSON texts, within `OPENING_S`. After it every message is binary and one frame. What breaks
a rule ends its own connection with a code and a counted reason, and disturbs nothing else. A link whose lower end reads
slowly is told to its owner as not writable, so that updates merge instead of queueing; one that does not read even its
answers is not read from either, and is dropped at `BUFFER_BYTES_MAX`.

Writing is for a thousand links at once: a message goes straight to the transport while that takes it, without a task
for each link, and is queued only behind others. What is equal for several links is encoded once.
"""

import asyncio
import contextlib
import logging
import secrets
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import Subprotocol

from echostore.kernel.coherence.events import LinkId
from echostore.kernel.coherence.messages import Message
from echostore.mesh.web_rules import PAGE_HEADERS, WebRules
from echostore.thin.browser import page
from echostore.wire.capabilities import (
    NONCE_BYTES,
    Credential,
    Grants,
    capability_from_text,
    proof_statement,
    read_capability,
)
from echostore.wire.coherence import LinkFrame, decode_frame, generation_bytes
from echostore.wire.coherence_parts import Parts
from echostore.wire.index_spec import MalformedIndex
from echostore.wire.signing import verify
from echostore.wire.sync import MalformedFrame

_log = logging.getLogger("echostore.thin")

SUBPROTOCOL: Final = Subprotocol("echostore-coherence-3")
PATH: Final = "/thin"

OPENING_S: Final = 10.0
ACCEPT_ROUNDS: Final = 4
"""Turns of the loop from the moment a connection is accepted until the server knows of it."""
OPENING_CHARACTERS_MAX: Final = 32 * 1024
FRAME_BYTES_MAX: Final = 8 * 1024 * 1024
"""What comes from below: batches, questions, and an edge's list of the systems behind it with what each showed."""

WRITABLE_BYTES: Final = 256 * 1024
"""Bytes that wait for a link. Beyond, it is told nothing new until they are gone."""

READ_BYTES: Final = 4 * 1024 * 1024
"""Beyond, nothing more is read from it: answers have to be taken before more is asked."""

BUFFER_BYTES_MAX: Final = 64 * 1024 * 1024
LINKS_MAX: Final = 10_000
TRACE_MAX: Final = 2048

REFUSED_STATUS: Final = {"host": HTTPStatus.MISDIRECTED_REQUEST, "origin": HTTPStatus.FORBIDDEN}
REFUSED_TEXT: Final = {
    "host": "This service does not go by that name. Allow it where the service is started: --thin-origin https://NAME, or --origin of an edge\n",
    "origin": "Pages of that origin may not connect. Allow it where the service is started: --thin-origin ORIGIN, or --origin of an edge\n",
}

# Close codes
PROTOCOL, UNAUTHORISED, NOT_ALLOWED, QUOTA, GOING_AWAY, FAILED, TRY_LATER = 4400, 4401, 4403, 4429, 1001, 1011, 1013


class OpeningRefused(Exception):
    """Why a connection is not let in."""

    def __init__(self, code: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.reason, self.detail = code, reason, detail


class ThinConnection(ServerConnection):
    """A connection that tells its link when the transport takes more again, or never will."""

    link: "ServedLink | None" = None

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.link is not None:
            self.link.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.link is not None:
            self.link.lost()


@dataclass(slots=True, eq=False)
class ServedLink:
    """One connection from below, once it is let in."""

    id: LinkId
    generation: int
    grants: Grants
    shown: Credential
    """What opened it."""
    address: str
    owner: "LinkOwner"
    connection: ThinConnection
    trace: "Trace"
    parts: Parts
    prefix: bytes = field(init=False)
    """The generation as it stands in each frame."""
    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    writable: bool = True
    closing: bool = False
    queue: deque[bytes] = field(default_factory=deque)
    queued: int = 0
    """Bytes that wait behind what the transport has."""
    ending: asyncio.Future[None] | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """For the reader, when it was held back."""

    def __post_init__(self) -> None:
        self.prefix = generation_bytes(self.generation)
        self.connection.link = self

    @property
    def key(self) -> bytes:
        """Whose proof opened it."""
        return self.shown.key

    @property
    def buffered(self) -> int:
        """Bytes that wait to be sent."""
        return self.queued + self.connection.transport.get_write_buffer_size()

    def send(self, message: Message) -> None:
        """Send a message, or queue it behind others; an update that is too large for one frame in parts."""
        if self.closing:
            return
        for part, data in self.parts.of(message):
            frame = self.prefix + data
            self.trace.add(self.id, "out", part, len(frame))
            if self.connection.paused:  # then, and only then, others wait too
                self.queue.append(frame)
                self.queued += len(frame)
            else:
                self._write(frame)
        if self.queued > BUFFER_BYTES_MAX:
            self.close(QUOTA, "it does not read")
        elif self.writable and self.connection.paused and self.buffered > WRITABLE_BYTES:
            self.writable = False
            self.owner.writable(self, writable=False)

    def drain(self) -> None:
        """The transport has room: what waits goes on, in order."""
        while self.queue and not self.closing and not self.connection.paused:
            frame = self.queue.popleft()
            self.queued -= len(frame)
            self._write(frame)
        buffered = self.buffered
        if not self.writable and buffered <= WRITABLE_BYTES // 2:
            self.writable = True
            self.owner.writable(self, writable=True)
        if buffered <= READ_BYTES:
            self.go_on.set()

    def lost(self) -> None:
        """Nothing that waits will be sent."""
        self.queue.clear()
        self.queued = 0
        self.go_on.set()

    @property
    def is_open(self) -> bool:
        return not self.closing and self.connection.protocol.state is State.OPEN

    def _write(self, frame: bytes) -> None:
        """As the library's own broadcast does, in a quarter of its time: nothing is awaited, `paused` was looked at."""
        connection = self.connection
        if connection.protocol.state is State.OPEN:  # else the reader is about to see that it is closed
            connection.transport.write(message_header(len(frame)) + frame)
            self.bytes_sent += len(frame)
            self.frames_sent += 1

    def close(self, code: int, reason: str) -> None:
        """End the connection; what is queued is dropped."""
        if not self.closing:
            self.closing = True
            self.lost()
            self.ending = asyncio.ensure_future(self.connection.close(code, reason[:100]))
            keep_until_done(self.ending)


class LinkOwner(Protocol):
    """Who the links belong to: a root's service or an edge. Called in the server's loop."""

    def admit(self, grants: Grants) -> "Door":
        """Who takes in a client whose capability is signed and whose key is proven; OpeningRefused when nobody does."""

    def writable(self, link: ServedLink, *, writable: bool) -> None: ...

    def received(self, link: ServedLink, frame: LinkFrame) -> None: ...

    def opened(self, link: ServedLink) -> None: ...

    def closed(self, link: ServedLink) -> None: ...

    def may_read(self, link: ServedLink) -> bool:
        """Whether more should be taken from a link now. When that changes, `ThinServer.read_on` has to be called."""


@dataclass(frozen=True, slots=True)
class Door:
    """What a client is told when it is let in."""

    fields: dict[str, Any]


class Trace:
    """The last messages of all links, for `echostore mesh`."""

    __slots__ = ("entries", "now_ms")

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.entries: deque[tuple[int, str, str, str, int]] = deque(maxlen=TRACE_MAX)

    def add(self, link: LinkId, direction: str, message: Message, size: int) -> None:
        self.entries.append((self.now_ms(), link, direction, type(message).__name__, size))

    def last(self, count: int) -> list[tuple[int, str, str, str, int]]:
        """Time, link, direction, kind and bytes of the last messages."""
        return list(self.entries)[-count:] if count else []


class ThinServer:
    """Takes connections and keeps their links."""

    def __init__(self, owner: LinkOwner, *, now_ms: Callable[[], int], origins: Sequence[str] = ()) -> None:
        """`origins`: of pages that are not this service's own and may connect."""
        self._owner = owner
        self._origins = tuple(origins)
        self._rules = WebRules("", origins)
        self._server: Server | None = None
        self.links: dict[LinkId, ServedLink] = {}
        self.refusals: dict[str, int] = {}
        self.trace = Trace(now_ms)
        self._parts = Parts()
        self._held_back: set[ServedLink] = set()
        """Links that are not read for now."""

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the URL in use."""
        self._rules = WebRules(host, self._origins)
        self._server = await serve(
            self._serve,
            host,
            port,
            subprotocols=[SUBPROTOCOL],
            select_subprotocol=_offered,
            process_request=self._first,
            compression=None,
            create_connection=ThinConnection,
            max_size=FRAME_BYTES_MAX,
            open_timeout=OPENING_S,
            ping_interval=20,
            ping_timeout=20,
        )
        address = self._server.sockets[0].getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"ws://{shown}:{address[1]}{PATH}"

    async def close(self) -> None:
        for link in list(self.links.values()):
            link.close(GOING_AWAY, "going away")
        if self._server is not None:
            # Nobody is accepted any more, and who just was is known to the server before it closes: it would forget them.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(ACCEPT_ROUNDS):
                await asyncio.sleep(0)
            self._server.close(close_connections=True)
            await self._server.wait_closed()

    def _first(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to a request for a page, or to one that is not let in; None: it is a WebSocket."""
        headers = request.headers
        why = self._rules.why_not(headers.get_all("Host"), headers.get_all("Origin"))
        if why is not None:
            self.count(why)
            return _answer(REFUSED_STATUS[why], "text/plain; charset=utf-8", REFUSED_TEXT[why].encode())
        return _page(request)

    def count(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    # one connection

    async def _serve(self, connection: ServerConnection) -> None:
        try:
            if connection.subprotocol != SUBPROTOCOL:
                raise OpeningRefused(PROTOCOL, "subprotocol", f"the subprotocol {SUBPROTOCOL} is wanted")
            if connection.request is None or connection.request.path != PATH:
                raise OpeningRefused(PROTOCOL, "path", f"thin clients are served at {PATH}")
            if len(self.links) >= LINKS_MAX:
                raise OpeningRefused(QUOTA, "too-many", f"{LINKS_MAX} clients are connected")
            link = await self._open(connection)
        except OpeningRefused as refused:
            await self._refuse(connection, refused)
            return
        except ConnectionClosed:
            self.count("gone-while-opening")
            return
        self.links[link.id] = link
        try:
            self._owner.opened(link)
            await self._read(link)
        except ConnectionClosed:
            link.closing = True
        finally:
            del self.links[link.id]
            link.closing = True
            self._owner.closed(link)
            if link.ending is not None:  # else the library would close it first, with a code that says nothing
                await link.ending

    async def _open(self, connection: ServerConnection) -> ServedLink:
        nonce = secrets.token_bytes(NONCE_BYTES)
        await connection.send(msgspec.json.encode({"hello": 1, "nonce": nonce.hex()}).decode())
        try:
            async with asyncio.timeout(OPENING_S):
                answer = await connection.recv()
        except TimeoutError:
            raise OpeningRefused(PROTOCOL, "timeout", f"no capability came in {OPENING_S:g} s") from None
        grants, shown = check_opening(answer, nonce)
        door = self._owner.admit(grants)
        generation = secrets.randbits(64)
        host, port = connection.remote_address[:2]
        assert isinstance(connection, ThinConnection), "the server makes them so"
        assert not connection.protocol.extensions, "none is offered"
        link = ServedLink(
            LinkId(secrets.token_hex(6)),
            generation,
            grants,
            shown,
            f"{host}:{port}",
            self._owner,
            connection,
            self.trace,
            self._parts,
        )
        told = {"ok": True, **door.fields, "generation": str(generation)}
        await connection.send(msgspec.json.encode(told).decode())
        return link

    async def _refuse(self, connection: ServerConnection, refused: OpeningRefused) -> None:
        self.count(refused.reason)
        with contextlib.suppress(ConnectionClosed):  # it did not wait to hear why
            if refused.code in (UNAUTHORISED, NOT_ALLOWED):  # for anything else a later attempt may go better
                told = {"refused": refused.reason, "detail": refused.detail}
                await connection.send(msgspec.json.encode(told).decode())
            await connection.close(refused.code, refused.reason)

    async def _read(self, link: ServedLink) -> None:
        while not link.closing:
            if self._must_wait(link):
                await self._wait(link)
                continue
            data = await link.connection.recv()
            if isinstance(data, str):
                self.count("text-frame")
                link.close(PROTOCOL, "after the opening, frames are binary")
                return
            link.bytes_received += len(data)
            link.frames_received += 1
            try:
                frame = decode_frame(data)
            except MalformedFrame as error:
                self.count("malformed-frame")
                link.close(PROTOCOL, str(error))
                return
            self.trace.add(link.id, "in", frame.message, len(data))
            self._owner.received(link, frame)

    def _must_wait(self, link: ServedLink) -> bool:
        """Whether a link has answers to take, or batches to get rid of, before more is read from it."""
        return link.is_open and (link.buffered > READ_BYTES or not self._owner.may_read(link))

    async def _wait(self, link: ServedLink) -> None:
        self._held_back.add(link)
        try:
            link.go_on.clear()
            await link.go_on.wait()
        finally:
            self._held_back.discard(link)

    def read_on(self) -> None:
        """The owner takes more again: links that were held back look for themselves."""
        for link in self._held_back:
            link.go_on.set()


def message_header(size: int) -> bytes:
    """The head of a whole binary message of a server: RFC 6455, section 5.2, not masked and without extensions."""
    if size < 126:
        return bytes((0x82, size))
    return struct.pack("!BBH", 0x82, 126, size) if size < 1 << 16 else struct.pack("!BBQ", 0x82, 127, size)


def check_opening(answer: str | bytes, nonce: bytes) -> tuple[Grants, Credential]:
    """What a client's answer to hello grants, and what it showed for that, if all of it is as it should be."""
    if not isinstance(answer, str) or len(answer) > OPENING_CHARACTERS_MAX:
        raise OpeningRefused(PROTOCOL, "malformed-opening", "the opening is a short JSON text")
    try:
        said = msgspec.json.decode(answer, type=_Answer)
        key, proof = bytes.fromhex(said.key), bytes.fromhex(said.proof)
        capability = capability_from_text(said.capability)
    except (msgspec.MsgspecError, ValueError) as error:
        raise OpeningRefused(PROTOCOL, "malformed-opening", str(error)) from None
    try:
        grants = read_capability(capability)
    except MalformedIndex as error:
        raise OpeningRefused(UNAUTHORISED, "bad-capability", str(error)) from None
    if not verify(key, proof_statement(nonce, capability), proof):
        raise OpeningRefused(UNAUTHORISED, "bad-proof", "the key did not sign this opening")
    if grants.holder and grants.holder != key:
        raise OpeningRefused(UNAUTHORISED, "not-holder", "the capability is for another key")
    return grants, Credential(capability, key, nonce, proof)


class _Answer(msgspec.Struct):
    capability: str
    key: str
    proof: str


def grants_fields(grants: Grants) -> dict[str, Any]:
    """What a capability grants, as the client is told."""
    return {
        "party": grants.party.hex(),
        "read": [{"types": list(each.types), "all_items": each.all_items} for each in grants.read],
        "write": list(grants.write),
        "messages": grants.messages,
        "expires_ms": grants.expires_ms,
    }


def _offered(connection: ServerConnection, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
    """None is no reason to refuse the handshake: the client is told by a close code."""
    return SUBPROTOCOL if SUBPROTOCOL in subprotocols else None


def _page(request: Request) -> Response | None:
    """A browser gets its page and module from here, so that both have one origin; None: it is a WebSocket."""
    if "upgrade" in request.headers:
        return None
    found = page(request.path)
    if found is None:
        return _answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not found\n")
    return _answer(HTTPStatus.OK, *found)


def _answer(status: HTTPStatus, content_type: str, data: bytes) -> Response:
    headers = Headers({"Content-Type": content_type, "Content-Length": str(len(data)), "Cache-Control": "no-cache"})
    headers.update(PAGE_HEADERS)
    headers["Connection"] = "close"
    return Response(status.value, status.phrase, headers, data)


_closing: set[asyncio.Future[Any]] = set()


def keep_until_done(task: asyncio.Future[Any]) -> None:
    """A task that nobody awaits must not be collected before its end."""
    _closing.add(task)
    task.add_done_callback(_closing.discard)
