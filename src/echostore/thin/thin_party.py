"""ThinParty: a party read and written through a peer, without holding it.

    party = echostore.connect("ws://127.0.0.1:8080/thin", capability)

Reads are answers of one state of the peer, with own writes on top. Writes are shown at once, kept in the outbox, and
sent until the peer has them on disk; without a connection both go on with what is held. Calls are safe from any thread.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

from echostore.kernel.coherence.events import NotDelivered, Post
from echostore.kernel.coherence.messages import (
    Arc,
    Context,
    RejectReason,
    Spec,
    SystemId,
    UserMessage,
    Witness,
)
from echostore.kernel.coherence.posting import CROSS_ROOT_STREAMS
from echostore.kernel.coherence.services import SERVICES_SPEC
from echostore.kernel.errors import EchoError, NotFound, Refused, TimedOut, Unreachable, UsageError
from echostore.kernel.ids import ITEM_ID_BYTES, FeedId, ItemId, PartyKey, item_from_text, item_text
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.values import Reference, Value, kind_of, merge_properties
from echostore.thin import operations
from echostore.thin.answers import Answer, Answers
from echostore.thin.driver import HOME, Driver
from echostore.thin.items import KINDS, ThinItem, parent_id, plain_value
from echostore.thin.link import capability_bytes
from echostore.thin.operations import PROPERTY_SET, Operation
from echostore.thin.overlay import Overlay
from echostore.thin.queries import ThinQuery
from echostore.thin.waiting import Gone, Rejection
from echostore.wire.index_spec import IndexItem, IndexQuery, index_spec
from echostore.wire.leaf_operations import arc_item

T = TypeVar("T")

PATIENCE_S: Final = 10.0
"""How long a read waits for an answer, unless told otherwise."""

RESTARTS_MAX: Final = 8
"""How often a transaction starts again. The window of a root is 256 ticks: who needs more should read less."""


@dataclass(frozen=True, slots=True)
class Message:
    """From another application; it has its effect once."""

    sender: str
    type: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message that was given up: for whom, which one of its stream, and why."""

    target: str
    stream: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Service:
    """What a system offers."""

    system: str
    name: str
    detail: bytes


class Receipt:
    """A batch on its way."""

    def __init__(self, party: "ThinParty", clock: Arc, batch: int) -> None:
        self._party = party
        self.clock, self.batch = clock, batch

    @property
    def durable(self) -> bool:
        """Whether the root has it on disk."""
        outbox = self._party.driver.leaf.outbox
        with self._party.driver.lock:
            waiting = [each for each in outbox.batches if (each.arc, each.number) == (self.clock, self.batch)]
            return not waiting or outbox.durable.get(self.clock, 0) >= self.batch

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Until the root has it on disk."""
        self._party.wait(
            self._party.driver.until(lambda: self.durable), timeout_s, "the root did not confirm the batch"
        )


def connect(
    url: str | Sequence[str],
    capability: str | bytes,
    *,
    path: str | Path | None = None,
    timeout_s: float = PATIENCE_S,
    roams: bool = False,
    after: bytes | None = None,
) -> "ThinParty":
    """Connect to a party through a peer or an edge, or through the first of several that answers.

    With `path`, the outbox and the ids are in that file and survive a restart; a leaf that has been connected once with
    it may start offline. Without, the call waits for the first connection.

    A leaf that `roams` knows of every feed how much it has seen, so that its `context()` counts at any peer of the party,
    also when the one it was at is gone. With `after`, such a context, the call returns when the peer has come that far:
    what is read then is never older than what was seen elsewhere.
    """
    urls: list[Any] = [url] if isinstance(url, str) else list(url)
    if not urls or not all(isinstance(each, str) and each.startswith(("ws://", "wss://")) for each in urls):
        raise UsageError(f"{url!r} is not the address of a thin service", next_step="Write ws://HOST:PORT/thin.")
    party = ThinParty(Driver(urls, capability_bytes(capability), path=path, vector=roams), timeout_s)
    try:
        party.wait_connected(timeout_s, needed=party.driver.leaf.arcs.arc is None)
        if after is not None:
            party.fence("acquire", after, timeout_s=timeout_s)
    except BaseException:
        party.close()
        raise
    return party


class ThinParty:
    """One party behind one connection."""

    def __init__(self, driver: Driver, patience_s: float = PATIENCE_S) -> None:
        self.driver = driver
        self.key: PartyKey = driver.grants.party
        self.answers = Answers(driver, self, patience_s)
        self._open = threading.local()

    # reading

    def query(self, /, type: str | None = None, **keywords: Value) -> ThinQuery:
        """`query(type="task", done=False)`; more with where, order_by, limit and others."""
        query = ThinQuery(self, QuerySpec.start(type))
        return query.where(**keywords) if keywords else query

    def get(self, item: "ItemId | str | Reference | ThinItem", *, sealed: bool = False) -> ThinItem:
        """One item by its id; NotFound when there is none."""
        found = self._get(item_of(item), sealed)
        if found is None:
            raise NotFound(f"item {item_text(item_of(item))[:8]} is not in the party")
        return found

    def has(self, item: "ItemId | str | Reference | ThinItem") -> bool:
        return self._get(item_of(item), sealed=False) is not None

    def _get(self, item: ItemId, sealed: bool) -> ThinItem | None:
        asked = IndexQuery(self.key, item=item, sealed=sealed)
        return next(iter(self.answers.get(asked, index_spec(asked))), None)

    def transaction(self, work: "Callable[[Transaction], T]", *, timeout_s: float = PATIENCE_S) -> T:
        """Run `work` with a Transaction: all it reads is one state. When that state is forgotten, it runs again."""
        for _ in range(RESTARTS_MAX):
            with self.driver.lock:
                tick = self.driver.begin()
                transaction = Transaction(self, tick, timeout_s)
            try:
                return work(transaction)
            except Gone as gone:
                moved = self.driver.wait_for_tick(gone.oldest)
            finally:
                self.driver.end(tick)
            self.wait(moved, timeout_s, "no newer state came")
        raise TimedOut(
            f"the transaction was started {RESTARTS_MAX} times, and each time its state was forgotten before its end",
            next_step="Read less in one transaction.",
        )

    # writing

    def create(
        self,
        model: str | None = None,
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        type: str = "",
        parent: ThinItem | None = None,
        **more: Value,
    ) -> Any:
        """A new item; its id is from the arc, so that it may be edited and linked before the root has it.

        `type` and `parent` are the item's own; every other keyword is a property. A mapping gives properties of any
        name, also of these two: `create("property-set", {"type": "saloon"}, type="car")`.
        """
        given = merge_properties(properties, more)
        if model is None and "model" in more and more["model"] in list(operations.VERSIONS):
            raise UsageError(
                "`model` is a keyword here, and keywords are properties",
                next_step=f'Write create("{more["model"]}", ...) for the model, create(None, {{"model": ...}}) for a property.',
            )
        kind = PROPERTY_SET if model is None else model
        if given and kind != PROPERTY_SET:
            raise UsageError(f"a {kind} has no properties", next_step="Create it first, then write into it.")
        where = parent_id(parent, self.key)
        item = self._new_item()
        written = [operations.create(self.feed, item, kind, type, parent=where)]
        return self._made(item, written, given)

    def link(
        self,
        source: ThinItem,
        target: "ThinItem | ItemId | Reference",
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        type: str = "link",
        **more: Value,
    ) -> Any:
        """A typed edge between two items, itself an item. Its properties are given as to `create`."""
        given = merge_properties(properties, more)
        if isinstance(target, ThinItem | Reference):
            end = target if isinstance(target, Reference) else target.reference
            if end.seen_from(self.key).party is not None:
                raise UsageError(
                    "a link that a thin client makes ends in its own party",
                    next_step="Refer to the item by a property.",
                )
        ends = (source.id_in(self.key), item_of(target))
        item = self._new_item()
        written = [operations.create(self.feed, item, PROPERTY_SET, type, ends=ends)]
        return self._made(item, written, given)

    def publish(self, ops: Sequence[Operation]) -> Receipt | None:
        """Write operations as one batch; inside `batch()` they join it, and there is no receipt yet."""
        batch = self._batch
        if batch is not None:
            batch.operations.extend(ops)
            return None
        published = self.driver.publish(ops)
        return Receipt(self, published.arc, published.number)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All that this thread writes inside is one batch: applied together, or not at all if it ends in an error."""
        if self._batch is not None:
            yield
            return
        batch = self._open.batch = OpenBatch()
        try:
            try:
                yield
            finally:
                del self._open.batch
            if batch.operations:
                self.driver.publish(batch.operations)
        except BaseException:
            batch.roll_back()
            raise

    @property
    def _batch(self) -> "OpenBatch | None":
        """The open batch of this thread."""
        found: OpenBatch | None = getattr(self._open, "batch", None)
        return found

    def changes(self, handle: ThinItem, before: IndexItem | None) -> None:
        """A handle is about to show something else: should the open batch fail, it shows `before` again."""
        if self._batch is not None:
            self._batch.shown.setdefault(id(handle), (handle, before))

    def rejected(self) -> list[Rejection]:
        """Own operations that have no effect, with their reasons; the newest thousand. Also those that had one at first,
        until the party left them out."""
        with self.driver.lock:
            return self.driver.rejections

    def on_rejected(self, fn: Callable[[Rejection], object]) -> None:
        """Call a function for each operation that is rejected from now on."""
        self.driver.on_rejected = fn

    # fences

    def fence(
        self,
        kind: Literal["release", "acquire", "full"] = "full",
        context: bytes | None = None,
        *,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """Wait: *release* until the root has all own batches on disk and what it refused of them is told here, *acquire*
        until what `context` names is shown here, *full* for both and for the state that the root has now."""
        if kind not in ("release", "acquire", "full"):
            raise UsageError(f"a fence is release, acquire or full, not {kind!r}")
        deadline = time.monotonic() + timeout_s
        driver = self.driver
        if kind != "acquire":
            self.wait(driver.until(lambda: driver.leaf.settled), timeout_s, "the root did not confirm all batches")
        if kind == "full":
            clocks = self._own_clocks()
            self._round_trip(deadline)
            self._acquire(clocks, deadline)
        if kind != "release" and context is not None:
            self._acquire(_read_context(context), deadline)

    def context(self) -> bytes:
        """What is shown here, own batches included, for another leaf of the same root to wait for; of a leaf that roams,
        for any leaf of the party."""
        with self.driver.lock:
            clock = self.driver.leaf.caches[HOME].clock
            clauses = list(self._feed_clocks() if self.driver.leaf.vector else self._own_clocks())
            if clock is not None and not self.driver.leaf.vector:
                clauses.append((Witness(clock, self.driver.tick),))
        return json.dumps([[_witness_json(each) for each in clause] for clause in clauses]).encode()

    def _feed_clocks(self) -> Context:
        """How much of each feed the shown state includes: the same at every root. Own batches are in the root's feed."""
        leaf = self.driver.leaf
        if leaf.outbox.batches:
            raise Refused(
                f"{len(leaf.outbox.batches)} own batches are shown that the root's state does not include yet",
                next_step="Wait for fence('release') first: no other peer could know when it has them.",
            )
        follows = leaf.caches[HOME].follows
        return tuple((Witness(*each),) for each in sorted(follows.items()) if each[0].gen == 0)

    def _own_clocks(self) -> Context:
        with self.driver.lock:
            outbox = self.driver.leaf.outbox
            return tuple((Witness(arc, number),) for arc, number in sorted(outbox.numbers.items()) if number)

    def _acquire(self, context: Context, deadline: float) -> None:
        if context:
            self.wait(self.driver.wait_for(context), deadline - time.monotonic(), "what was waited for did not come")

    def _round_trip(self, deadline: float) -> None:
        """An index that nobody has asked for before is answered by the root, and at its newest tick."""
        spec = index_spec(self._new_question(ItemId(secrets.token_bytes(ITEM_ID_BYTES))))
        self.wait(self.driver.ask(spec), deadline - time.monotonic(), "the root did not answer")
        self.driver.forget(spec)

    def _new_question(self, nobody: ItemId) -> IndexQuery:
        """Of an item that is not there, in a form that the capability allows."""
        read = self.driver.grants.read
        if not read or any(each.all_items for each in read):
            return IndexQuery(self.key, item=nobody)
        type = next((each.types[0] for each in read if each.types), "none")
        return self.query(type=type, item=nobody).asked

    # other applications

    @property
    def system(self) -> str:
        """The name of this leaf: what others send to."""
        system = self.driver.leaf.systems.get(HOME)
        if system is None:
            raise Refused("this leaf has no name yet", next_step="Connect once.")
        return system_text(system)

    def send(self, target: str, type: Any, payload: Any, *, stream: int = 0, context: bytes | None = None) -> None:
        """A message to another leaf: there once, whatever happens between, and not before its context is shown."""
        if not isinstance(payload, bytes) or not isinstance(type, str):
            raise UsageError(f"a message is a type and bytes, not {kind_of(type)} and {kind_of(payload)}")
        needed = () if context is None else _read_context(context)
        self.driver.post(Post(parse_system(target), stream, type, payload, needed))

    def on_undelivered(self, fn: Callable[[Undelivered], object]) -> None:
        """Call a function for each message that was given up from now on: nobody has that name, or it was not there in time."""

        def tell(given_up: NotDelivered) -> None:
            place = given_up.id.stream % CROSS_ROOT_STREAMS, given_up.id.seq
            fn(Undelivered(system_text(given_up.target), *place, given_up.reason.value))

        self.driver.on_undelivered = tell

    def on_message(self, fn: Callable[[Message], object]) -> None:
        """Call a function for each message, in a thread of its own; those that came before are not lost."""

        def tell(message: UserMessage) -> None:
            fn(Message(system_text(message.id.sender), message.type, message.payload))

        self.driver.listen(tell)

    def announce(self, name: str, detail: bytes = b"") -> None:
        """Offer a service for as long as this leaf is connected."""
        self.driver.offer(name, detail)

    def deannounce(self, name: str) -> None:
        self.driver.offer(name, None)

    def services(self, prefix: str = "", *, timeout_s: float = PATIENCE_S) -> list[Service]:
        """Who offers what, by the beginning of the name."""
        spec = Spec(SERVICES_SPEC + prefix.encode())
        version = self.driver.read(spec)
        if version is None:
            version = self.wait(self.driver.ask(spec), timeout_s, "the root did not answer")
        return [_service(line) for line in version.value.decode().splitlines()]

    # the connection

    @property
    def connected(self) -> bool:
        return self.driver.linked

    @property
    def tick(self) -> int:
        """The state of the root that reads show now."""
        return self.driver.tick

    @property
    def pending(self) -> int:
        """Own batches that the shown state does not include."""
        return len(self.driver.leaf.outbox.batches)

    @property
    def feed(self) -> FeedId:
        if self.driver.feed is None:
            raise Refused("this leaf was never connected", next_step="Connect once; after that it works offline.")
        return self.driver.feed

    def status(self) -> dict[str, Any]:
        """How things stand, for people and monitors."""
        driver = self.driver
        with driver.lock:
            system = driver.leaf.systems.get(HOME)
            return {
                "connected": driver.linked,
                "url": driver.url,
                "party": self.key.hex(),
                "system": None if system is None else system_text(system),
                "tick": driver.tick,
                "indexes": len(driver.leaf.caches[HOME].holdings),
                "outbox": len(driver.leaf.outbox.batches),
                "unsent": len(driver.leaf.outbox.to_send()),
                "rejected": len(driver.rejections),
                "last_error": None if driver.last_error is None else driver.last_error.what,
                **driver.counts,
            }

    def wait_connected(self, timeout_s: float = PATIENCE_S, *, needed: bool = True) -> bool:
        """Until there is a link and ids to write with. Without `needed`, whether there is one now."""
        driver = self.driver
        if not needed:
            return driver.linked
        waiting = driver.until(lambda: driver.linked and driver.leaf.arcs.arc is not None)
        self.wait(waiting, timeout_s, "no connection")
        return True

    def wait(self, future: Any, timeout_s: float, what: str) -> Any:
        try:
            return future.result(max(0.0, timeout_s))
        except EchoError:
            raise
        except TimeoutError:
            future.cancel()
            raise self._late(what) from None

    def _late(self, what: str) -> EchoError:
        driver = self.driver
        if driver.linked:
            return TimedOut(f"{what} in time", unchanged="What was written stays in the outbox.")
        because = f": {driver.last_error.what}" if driver.last_error is not None else ""
        return Unreachable(
            f"there is no connection{because}",
            unchanged="What was written stays in the outbox.",
            next_step="Check the address, or go on offline with what is held.",
        )

    def close(self) -> None:
        """End the connection. With a path, what was not sent is kept for the next time."""
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<party {self.key.hex()[:8]} through {self.driver.url or 'nobody now'}>"

    # inside

    def handle(self, state: IndexItem) -> ThinItem:
        return KINDS.get(state.model, ThinItem)(self, state)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def _new_item(self) -> ItemId:
        base, n = self.driver.issue()
        return arc_item(self.feed, base, n)

    def _made(self, item: ItemId, written: list[Operation], properties: dict[str, Value]) -> ThinItem:
        if properties:
            changes = {(name,): plain_value(value, self.key) for name, value in properties.items()}
            written.append(operations.change(self.feed, item, changes))
        self.publish(written)
        state, _ = Overlay(self.key, self.feed, written).apply(item, None)
        assert state is not None, "it was made by the first operation"
        handle = self.handle(state)
        self.changes(handle, None)
        return handle


class OpenBatch:
    """What a thread has written in its open batch, and what the handles it wrote through showed before."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.shown: dict[int, tuple[ThinItem, IndexItem | None]] = {}

    def roll_back(self) -> None:
        for handle, before in self.shown.values():
            handle.roll_back(before)


class Transaction:
    """Reads of one state. Own batches that it does not include are on top, as they were when it began."""

    def __init__(self, party: ThinParty, tick: int, timeout_s: float) -> None:
        self._party = party
        self.tick = tick
        self._deadline = time.monotonic() + timeout_s
        self._overlay = party.answers.overlay()

    def all(self, query: ThinQuery) -> Answer:
        """The answer to a query."""
        return self._party.answers.at(query.asked, query.spec, self.tick, self._overlay, self._deadline)

    def get(self, item: "ItemId | str | Reference | ThinItem") -> ThinItem | None:
        """An item, or None."""
        asked = IndexQuery(self._party.key, item=item_of(item))
        found = self._party.answers.at(asked, index_spec(asked), self.tick, self._overlay, self._deadline)
        return next(iter(found), None)


def item_of(value: Any) -> ItemId:
    """The item that a handle, a reference, an id or its text names."""
    if isinstance(value, ThinItem):
        return value.reference.item
    if isinstance(value, Reference):
        return value.item
    if isinstance(value, bytes) and len(value) == ITEM_ID_BYTES:
        return ItemId(value)
    try:
        return item_from_text(value)
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{value!r} does not name an item", next_step="Pass an item, its id, or its text.") from None


def system_text(system: SystemId) -> str:
    return "/".join([system.root.hex(), ".".join(map(str, system.path))])


def parse_system(text: str) -> SystemId:
    try:
        root, _, path = text.partition("/")
        return SystemId(bytes.fromhex(root), tuple(int(each) for each in path.split(".") if each))
    except (ValueError, AttributeError):
        raise UsageError(
            f"{text!r} does not name a system", next_step="Pass what `system` of that leaf says."
        ) from None


def _witness_json(witness: Witness) -> list[Any]:
    return [system_text(witness.clock.system), witness.clock.gen, witness.tick]


def _read_context(data: bytes) -> Context:
    try:
        return tuple(
            tuple(Witness(Arc(parse_system(system), int(gen)), int(tick)) for system, gen, tick in clause)
            for clause in json.loads(data)
        )
    except (ValueError, TypeError) as error:
        raise UsageError("this is not a context", next_step="Pass what `context()` of another leaf gave.") from error


def _service(line: str) -> Service:
    root, path, name, detail = line.split(" ")
    return Service(f"{root}/{path}", bytes.fromhex(name).decode(), bytes.fromhex(detail))


__all__ = [
    "Gone",
    "Message",
    "Receipt",
    "RejectReason",
    "Rejection",
    "Service",
    "ThinParty",
    "Transaction",
    "Undelivered",
    "connect",
]
