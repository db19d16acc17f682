"""A small thin client for tests of roots and edges: the kernel's Leaf machine over a real WebSocket, without threads.

Nothing is read but by `until`: a test decides when a client looks, and can leave it deaf.
"""

import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from echostore.kernel.coherence.events import (
    Delivered,
    Event,
    LinkClosed,
    LinkId,
    Lost,
    Opening,
    Publish,
    Received,
    Send,
    Slow,
    Told,
    Unanswered,
    Want,
)
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import Acquire, Message, Spec, Statement, Update
from echostore.kernel.ids import FeedId, ItemId, PartyKey
from echostore.kernel.items.operations import GENESIS, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.models.property_set import Set
from echostore.kernel.query.spec import QuerySpec
from echostore.wire.capabilities import capability_from_text, proof_statement
from echostore.wire.coherence import FRAME_BYTES_MAX, LinkFrame, decode_frame, encode_frame
from echostore.wire.coherence_parts import parts_of
from echostore.wire.index_spec import IndexCodec, IndexItem, IndexQuery, index_items, index_spec
from echostore.wire.leaf_operations import arc_item, operation_delta
from echostore.wire.leaf_signing import signed
from echostore.wire.signing import SigningKey

HOME = LinkId("home")
SUBPROTOCOL = Subprotocol("echostore-coherence-3")
PATIENCE_S = 60.0


class Closed(Exception):
    """The server ended the connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code, self.reason = code, reason


def dial(url: str, **more: Any) -> ClientConnection:
    """A connection that its caller closes."""
    settings: dict[str, Any] = {"subprotocols": [SUBPROTOCOL], "compression": None, "max_size": FRAME_BYTES_MAX}
    return connect(url, **settings | more).__enter__()


class ThinClient:
    """One leaf. It outlives its connections."""

    def __init__(self, url: str, capability: str, *, key: SigningKey | None = None, **settings: Any) -> None:
        """`settings` are those of the connection: with `max_queue=1` nothing is taken that is not asked for."""
        self.url = url
        self.settings = settings
        self.capability = capability_from_text(capability)
        self.key = key or SigningKey.generate()
        self.leaf = Leaf(IndexCodec(), HOME)
        self.told: list[Told] = []
        self.lost: list[Lost] = []
        self.slow: list[Slow] = []
        self.delivered: list[Delivered] = []
        self.received: list[Message] = []
        self.sent: list[Message] = []
        self.connection: ClientConnection | None = None
        self.ok: dict[str, Any] = {}
        self.followed: set[Spec] = set()
        """Indexes that were asked for over this connection, so that word of them comes by itself."""

    # connections

    def open(self) -> "ThinClient":
        """Connect and attach; returns once the link stands."""
        self.connection = dial(self.url, **self.settings)
        try:
            hello = json.loads(self.connection.recv(PATIENCE_S))
            if "refused" in hello:
                self.connection.recv(PATIENCE_S)
            proof = self.key.sign(proof_statement(bytes.fromhex(hello["nonce"]), self.capability))
            text = json.dumps(
                {"capability": _text(self.capability), "key": self.key.public.hex(), "proof": proof.hex()}
            )
            self.connection.send(text)
            self.ok = json.loads(self.connection.recv(PATIENCE_S))
            if "refused" in self.ok:
                self.connection.recv(PATIENCE_S)
        except ConnectionClosed as closed:
            raise _closed(closed) from None
        self.followed.clear()
        self.give(Opening(HOME, int(self.ok["generation"]), secrets.randbits(63)))
        self.until(lambda: self.leaf.caches[HOME].generation is not None)
        return self

    def drop(self) -> None:
        """The connection is gone, without a word."""
        if self.connection is not None:
            self.connection.close_socket()
            self.connection = None
            self.give(LinkClosed(HOME))

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.give(LinkClosed(HOME))

    def __enter__(self) -> "ThinClient":
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # the machine

    def give(self, event: Event) -> None:
        for effect in self.leaf.receive(event):
            if isinstance(effect, Send):
                self.send(effect.message, effect.generation)
            elif isinstance(effect, Told):
                self.told.append(effect)
            elif isinstance(effect, Lost):
                self.lost.append(effect)
            elif isinstance(effect, Slow):
                self.slow.append(effect)
            elif isinstance(effect, Delivered):
                self.delivered.append(effect)

    def send(self, message: Message, generation: int | None = None) -> None:
        """One message, also one that the machine would not send."""
        if self.connection is None:
            return
        link = int(self.ok["generation"]) if generation is None else generation
        says = isinstance(message, Statement) or (isinstance(message, Update) and message.items)
        if says and not message.signature and self.ok.get("sign"):  # type: ignore[union-attr]
            message = signed(message, self.key)  # type: ignore[type-var]
        for part in parts_of(message):
            self.sent.append(part)
            with suppress(ConnectionClosed):  # it may be closed between two frames: `read` tells why
                self.connection.send(encode_frame(LinkFrame(link, part)))

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
        """Read until something is so. Asks again now and then, as a real leaf does."""
        deadline = time.monotonic() + seconds
        asked = time.monotonic()
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not happen in time"
            self.read(0.05)
            if time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                self.give(Unanswered(HOME))
        return found

    def read(self, seconds: float) -> None:
        """Take one frame, if one comes in that time."""
        assert self.connection is not None, "not connected"
        try:
            data = self.connection.recv(seconds)
        except TimeoutError:
            return
        except ConnectionClosed as closed:
            self.connection = None
            self.give(LinkClosed(HOME))
            raise _closed(closed) from None
        assert isinstance(data, bytes), data
        frame = decode_frame(data)
        self.received.append(frame.message)
        self.give(Received(HOME, frame.generation, frame.message))

    def until_closed(self) -> Closed:
        """Read until the server ends the connection."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, "it was not closed in time"
            try:
                self.read(0.05)
            except Closed as closed:
                return closed

    # reading

    @property
    def party(self) -> PartyKey:
        return PartyKey(bytes.fromhex(self.ok["party"]))

    @property
    def tick(self) -> int:
        return self.leaf.caches[HOME].cur

    def spec(self, query: QuerySpec, *, sealed: bool = False) -> Spec:
        return index_spec(IndexQuery(self.party, query, sealed=sealed))

    def item_spec(self, item: ItemId) -> Spec:
        return index_spec(IndexQuery(self.party, item=item))

    def shown(self, spec: Spec, at: int | None = None) -> list[IndexItem] | None:
        """What is held of an index now, without asking."""
        version = self.leaf.read(HOME, spec, at)
        return None if version is None else index_items(version.value)

    def want(self, spec: Spec, at: int | None = None) -> list[IndexItem]:
        """The index, asked for where it is not held."""
        if self.shown(spec, at) is None:
            if at is None:
                self.followed.add(spec)
            self.give(Want(HOME, spec, at))
        found = self.until(lambda: [items] if (items := self.shown(spec, at)) is not None else None)
        return list(found[0])

    def sees(self, spec: Spec, condition: Callable[[list[IndexItem]], Any]) -> list[IndexItem]:
        """Read, and ask again whenever the index is not held, until it is so."""

        def seen() -> list[list[IndexItem]] | None:
            items = self.shown(spec)
            if (items is None or spec not in self.followed) and (spec, None) not in self.leaf.caches[HOME].wanted:
                self.followed.add(spec)
                self.give(Want(HOME, spec))
            return [items] if items is not None and condition(items) else None

        return list(self.until(seen)[0])

    def is_live(self, spec: Spec) -> bool:
        return self.leaf.caches[HOME].holdings.is_live(spec)

    def acquired(self, spec: Spec) -> int:
        return sum(isinstance(message, Acquire) and message.spec == spec for message in self.sent)

    # writing

    @property
    def feed(self) -> FeedId:
        return FeedId(bytes.fromhex(self.ok["feed"]))

    def new_item(self) -> ItemId:
        self.until(lambda: self.leaf.arcs.arc is not None)
        return arc_item(self.feed, self.leaf.arcs.base, self.leaf.arcs.issue().n)

    def create(self, type: str, **values: Any) -> ItemId:
        """A property set, made and filled in one batch."""
        item = self.new_item()
        self.publish(self.genesis(item, type), self.setting(item, **values))
        return item

    def genesis(self, item: ItemId, type: str, model: str = "property-set", **more: Any) -> tuple[bytes, bytes]:
        made = Genesis(item, model, 1, type, None, 0, **more)
        return item, operation_delta(self.feed, ItemOperation(item, GENESIS, made))

    def setting(self, item: ItemId, **values: Any) -> tuple[bytes, bytes]:
        changes = tuple(Set((name,), value) for name, value in values.items())
        return item, operation_delta(self.feed, ItemOperation(item, "property-set", changes))

    def publish(self, *ops: tuple[bytes, bytes]) -> None:
        self.give(Publish(ops))

    def settle(self) -> None:
        """All batches are on the root's disk, and in the state that is shown."""
        self.until(lambda: self.leaf.outbox.drained and not self.leaf.outbox.batches)


def _closed(closed: ConnectionClosed) -> Closed:
    frame = closed.rcvd
    return Closed(frame.code if frame else 1006, frame.reason if frame else "")


def _text(data: bytes) -> str:
    from echostore.wire.capabilities import capability_text

    return capability_text(data)
