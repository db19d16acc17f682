"""A small root for tests of leaves: the kernel's Root machine over WebSocket, with items in memory.

It has no feed and no disk; what would be durable is kept in `Kept`, so that a server can fall over and come back. Tests
reach in: they write at the root, cut connections, hold back or bend what is sent.
"""

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from echostore.kernel.coherence.arcs import ArcLedger
from echostore.kernel.coherence.batches import Batches
from echostore.kernel.coherence.events import (
    Advanced,
    ChildOpened,
    Commit,
    Committed,
    Cut,
    Drop,
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Flush,
    LinkClosed,
    LinkId,
    Received,
    Send,
    Unavailable,
    Unwatch,
)
from echostore.kernel.coherence.messages import Arc, Grant, IndexValue, RejectReason, Spec, SystemId, Update
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.updates import frames_of
from echostore.kernel.ids import DeviceKey, FeedId, ItemId, PartyKey, item_id
from echostore.kernel.query.evaluate import compile_stage, finish
from echostore.kernel.query.source import Row
from echostore.thin.browser import page
from echostore.thin.overlay import Overlay
from echostore.wire.capabilities import (
    Grants,
    ReadPattern,
    capability_from_text,
    proof_statement,
    read_capability,
    sign_capability,
)
from echostore.wire.coherence import LinkFrame, decode_frame, encode_frame
from echostore.wire.index_spec import IndexCodec, IndexItem, MalformedIndex, index_query, index_value
from echostore.wire.signing import SigningKey, verify

PARTY = PartyKey(b"\x07" * 32)
FEED = FeedId(b"\x09" * 8)
ISSUER = SigningKey.from_seed(b"\x05" * 32)
ROOT = SystemId(b"\x0a" * 16)

Items = dict[ItemId, IndexItem]


def capability(*, write: tuple[str, ...] = ("*",), expires_ms: int = 0) -> bytes:
    grants = Grants(
        PARTY,
        DeviceKey(ISSUER.public),
        secrets.token_bytes(16),
        (ReadPattern(all_items=True),),
        write,
        messages=True,
        expires_ms=expires_ms,
    )
    return sign_capability(grants, ISSUER)


@dataclass
class Kept:
    """What a root has on disk: it survives the server."""

    batches: Batches = field(default_factory=lambda: Batches(ArcLedger(ROOT)))
    tick: int = 1
    states: dict[int, Items] = field(default_factory=lambda: {1: {}})
    applied: list[tuple[Arc, int]] = field(default_factory=list)
    made: int = 0


class ThinServer:
    """One root in a thread of its own. Methods are called from tests, and run on its loop."""

    def __init__(self, kept: Kept | None = None, *, port: int = 0) -> None:
        self.kept = Kept() if kept is None else kept
        self.root = Root(ROOT, IndexCodec(), tick=self.kept.tick, batches=self.kept.batches)
        self.watched: set[Spec] = set()
        self.sockets: dict[LinkId, ServerConnection] = {}
        self.queues: dict[LinkId, asyncio.Queue[bytes]] = {}
        self.refuse: set[bytes] = set()
        self.evaluations = 0
        self._silent = False
        self._held: list[tuple[LinkId, bytes]] = []
        self.deaf: tuple[type, ...] = ()
        """Kinds of messages that get lost on their way here."""
        self.bend: Callable[[Spec, IndexValue], IndexValue] = lambda spec, value: value
        self._links = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._port = port
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}/thin"

    @property
    def silent(self) -> bool:
        """Whether what is to be sent is held back."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        def switch() -> None:
            self._silent = silent
            held, self._held = self._held, []
            for link, frame in held:
                self._put(link, frame)

        self.call(switch)

    def _put(self, link: LinkId, frame: bytes) -> None:
        if self._silent:
            self._held.append((link, frame))
        elif link in self.queues:
            self.queues[link].put_nowait(frame)

    def call(self, fn: Callable[[], Any]) -> Any:
        """Run a function on the server's loop."""

        async def run() -> Any:
            return fn()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def close(self) -> None:
        """Fall over: connections break, what is kept stays."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    def __enter__(self) -> "ThinServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What happens at the root

    def create(self, type: str, model: str = "property-set", **values: Any) -> ItemId:
        """A write at the root."""

        def write() -> ItemId:
            self.kept.made += 1
            item = item_id(FEED, self.kept.made << 16)
            self.advance({item: IndexItem(item, type, model, values)})
            return item

        found: ItemId = self.call(write)
        return found

    def change(self, item: ItemId, **values: Any) -> None:
        def write() -> None:
            known = self.items[item]
            self.advance({item: replace(known, values={**known.values, **values})})

        self.call(write)

    def cut_links(self) -> None:
        """Every connection breaks at once."""

        def cut() -> None:
            for socket in self.sockets.values():
                socket.transport.abort()

        self.call(cut)

    @property
    def items(self) -> Items:
        return self.kept.states[self.kept.tick]

    def advance(self, changed: Items) -> None:
        """A new tick with these states of items."""
        self.kept.tick += 1
        self.kept.states[self.kept.tick] = {**self.kept.states[self.kept.tick - 1], **changed}
        changes = []
        for spec in self.watched:
            value = self.answer(spec, self.kept.tick)
            known = self.root.holdings.newest(spec)
            if value is not None and (known is None or known.value != value):
                changes.append((spec, value))
        self.step(Advanced(self.kept.tick, tuple(changes)))
        for link in self.root.serving.due():
            self.step(Flush(link))

    def answer(self, spec: Spec, tick: int) -> IndexValue | None:
        """What an index is at a tick; None when the spec is none."""
        try:
            asked = index_query(spec)
        except MalformedIndex:
            return None
        items = self.kept.states[tick]
        if asked.item is not None:
            return index_value([items[asked.item]] if asked.item in items else [])
        assert asked.query is not None
        test = compile_stage(asked.query.stages[0])
        rows = [(each.item, row(each)) for each in items.values() if test(row(each))]
        return index_value(items[token] for token in finish(asked.query, rows).tokens)

    # The machine

    def step(self, event: Event) -> None:
        for effect in self.root.receive(event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(link, generation, message):
                frames: Iterable[Any] = frames_of(message) if isinstance(message, Update) else [message]
                for each in frames:
                    if isinstance(each, Grant) and each.value is not None:
                        each = replace(each, value=self.bend(each.spec, each.value))
                    self._put(link, encode_frame(LinkFrame(generation, each)))
            case Evaluate(spec, at):
                self.evaluations += 1
                tick = self.kept.tick if at is None else at
                value = self.answer(spec, tick)
                if value is None:
                    self.step(Unavailable(spec, at, RejectReason.MALFORMED))
                else:
                    if at is None:
                        self.watched.add(spec)
                    self.step(Evaluated(spec, tick, tick, value))
            case Unwatch(spec):
                self.watched.discard(spec)
            case Commit():
                self._commit(effect)
            case Cut():
                self.advance({})
            case Drop(link, _):
                self.sockets[link].transport.abort()
            case _:
                pass

    def _commit(self, commit: Commit) -> None:
        """The operations of a batch, as one tick; one of the type `forbidden` is rejected."""
        changed: Items = {}
        rejected: list[Any] = list(commit.rejected)
        for op in commit.ops:
            item = ItemId(op.object)
            before = changed.get(item) or self.items.get(item)
            after, exact = Overlay(PARTY, FEED, [(item, op.delta)]).apply(item, before)
            if after is None or not exact or after.type == "forbidden":
                rejected.append((op.op, RejectReason.NO_ITEM if after is None else RejectReason.NOT_ALLOWED))
            else:
                changed[item] = after
        self.kept.applied.append((commit.clock, commit.batch))
        self.step(Committed(commit.clock, commit.batch, self.kept.tick + 1, tuple(rejected)))
        self.advance(changed)

    # Sockets

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ending = asyncio.Event()
        async with serve(
            self._connection,
            "127.0.0.1",
            self._port,
            subprotocols=["echostore-coherence-3"],  # type: ignore[list-item]
            process_request=self._page,
            compression=None,
            close_timeout=0.1,
        ) as server:
            self._port = next(iter(server.sockets)).getsockname()[1]
            self._ready.set()
            await self._ending.wait()
            for socket in list(self.sockets.values()):
                socket.transport.abort()

    def _page(self, connection: ServerConnection, request: Any) -> Any:
        found = page(request.path)
        if found is None:
            return None
        content_type, body = found
        response = connection.respond(200, "")
        response.headers.clear()
        response.headers["Content-Type"] = content_type
        response.headers["Content-Length"] = str(len(body))
        response.headers["Connection"] = "close"
        return replace(response, body=body)

    async def _connection(self, socket: ServerConnection) -> None:
        nonce = secrets.token_bytes(16)
        await socket.send(json.dumps({"hello": 1, "nonce": nonce.hex()}))
        opening = json.loads(await socket.recv())
        data = capability_from_text(opening["capability"])
        good = verify(bytes.fromhex(opening["key"]), proof_statement(nonce, data), bytes.fromhex(opening["proof"]))
        grants = read_capability(data)
        if not good or data in self.refuse:
            await socket.send(json.dumps({"refused": "revoked", "detail": "it was revoked"}))
            await socket.close(4401)
            return
        generation = secrets.randbits(63)
        await socket.send(
            json.dumps(
                {
                    "ok": True,
                    "party": grants.party.hex(),
                    "root": ROOT.root.hex(),
                    "generation": str(generation),
                    "tick": self.kept.tick,
                    "feed": FEED.hex(),
                }
            )
        )
        self._links += 1
        link = LinkId(f"link {self._links}")
        self.sockets[link], self.queues[link] = socket, asyncio.Queue()
        sending = asyncio.ensure_future(self._sending(link, socket))
        self.step(ChildOpened(link, generation))
        try:
            async for data in socket:
                assert isinstance(data, bytes)
                frame = decode_frame(data)
                if not isinstance(frame.message, self.deaf):
                    self.step(Received(link, frame.generation, frame.message))
        except ConnectionClosed:
            pass
        finally:
            sending.cancel()
            del self.sockets[link], self.queues[link]
            self.step(LinkClosed(link))

    async def _sending(self, link: LinkId, socket: ServerConnection) -> None:
        queue = self.queues[link]
        while True:
            await socket.send(await queue.get())


def row(item: IndexItem) -> Row:
    return Row(item.item, item.type, item.model, item.parent, item.deleted, item.values, item.source, item.target)
