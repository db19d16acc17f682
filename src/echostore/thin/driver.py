"""The kernel's Leaf machine with what it lacks: a thread, connections, timers, a disk, and callers that wait.

    any thread   reads, publishes, waits: takes the lock, steps the machine, queues what is to be sent
    the loop     connects, sends, receives (way_up), asks again; one thread, `echostore-thin`
    the teller   runs the application's functions for messages and rejections, `echostore-thin-tell`

Steps of the machine happen under one lock, in whichever thread has news. What an application asked for is a Future: the
synchronous facade waits for it, the asynchronous one awaits it.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

from echostore.kernel.coherence.events import (
    Begin,
    Changed,
    Delivered,
    Drop,
    Effect,
    End,
    Event,
    EvictEntry,
    LinkClosed,
    LinkId,
    Lost,
    NotDelivered,
    Offer,
    Opening,
    Post,
    Publish,
    Received,
    Refusal,
    Send,
    Slow,
    Told,
    Unanswered,
    WaitFor,
    Want,
)
from echostore.kernel.coherence.holdings import Version
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Context,
    Grant,
    GrantArc,
    GrantSystemId,
    Message,
    NotifyReplicated,
    RejectReason,
    Spec,
    Statement,
    Touched,
    Update,
    UserMessage,
    UserReceipt,
    Witness,
)
from echostore.kernel.coherence.outbox import Batch
from echostore.kernel.errors import Closed, EchoError, StorageFailed, Unreachable
from echostore.kernel.ids import FeedId
from echostore.thin.leaf_store import LeafStore
from echostore.thin.link import Welcome
from echostore.thin.teller import Teller
from echostore.thin.touches import Touches
from echostore.thin.waiting import Rejection, disappoint, fulfil, not_to_be_had
from echostore.thin.way_up import WayUp
from echostore.wire.capabilities import Grants, read_capability
from echostore.wire.coherence import LinkFrame, decode_frame, encode_frame
from echostore.wire.coherence_parts import parts_of
from echostore.wire.index_spec import IndexCodec
from echostore.wire.leaf_signing import signed
from echostore.wire.sync import MalformedFrame

HOME: Final = LinkId("home")

BEAT_S: Final = 0.5
"""How often timers are looked at."""

ASK_S: Final = 1.0
ASK_S_MAX: Final = 30.0
ANNOUNCE_S: Final = 10.0
"""A service is forgotten when it is not announced for 30 s."""

TOLD_MAX: Final = 1000
"""Messages that are kept for an application that does not take them."""


class Driver:
    """One leaf."""

    def __init__(
        self, urls: Sequence[str], capability: bytes, *, path: str | Path | None, vector: bool = False
    ) -> None:
        self.grants: Grants = read_capability(capability)
        self.lock = threading.RLock()
        self.store = LeafStore(path)
        self._durable = path is not None
        try:
            self.key = self.store.signing_key()
            self.leaf = Leaf(IndexCodec(), HOME, vector=vector)
            self.store.restore(self.leaf)
            self.feed: FeedId | None = self.store.feed
        except BaseException:
            self.store.close()
            raise
        self.welcome: Welcome | None = None
        self._way = WayUp(urls, capability, self.key, self)
        self.refused: EchoError | None = None
        """Why no address takes the capability; then nothing is tried any more."""
        self.counts = {"links": 0, "answers": 0, "questions": 0, "refusals": 0, "lost_links": 0}
        self.denied: dict[Spec, EchoError] = {}
        """Watched indexes that are not for this leaf, in this life of the link."""
        self.listeners: list[Callable[[frozenset[Spec] | None], None]] = []
        """Told under the lock what may show otherwise now: these indexes, or (None) any."""
        self._reads: dict[tuple[Spec, int | None], list[Future[Version]]] = {}
        self._waits: list[tuple[Callable[[], bool], Future[None]]] = []
        self._watched: dict[Spec, int] = {}
        self._promised: set[Spec] = set()
        """Indexes that the system above has granted over this link: it tells of their changes."""
        self._touches = Touches()
        self._word_waits = False
        self._unsaved = False
        self._ask_wait_s, self._ask_at = ASK_S, 0.0
        self._announced_at = 0.0
        self._closed = False
        self._teller = Teller()
        self.on_message: Callable[[UserMessage], object] | None = None
        self._undelivered: deque[UserMessage] = deque(maxlen=TOLD_MAX)
        self.on_undelivered: Callable[[NotDelivered], object] | None = None
        self.on_rejected: Callable[[Rejection], object] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="echostore-thin", daemon=True)
        self._thread.start()

    # What the application does

    @property
    def linked(self) -> bool:
        return self.leaf.caches[HOME].generation is not None

    @property
    def url(self) -> str | None:
        """Where the connection leads that stands now."""
        return self._way.url

    @property
    def last_error(self) -> EchoError | None:
        """Why the last connection ended or was not made."""
        return self._way.last_error

    @property
    def tick(self) -> int:
        return self.leaf.caches[HOME].cur

    @property
    def rejections(self) -> list[Rejection]:
        return [Rejection.of(each) for each in self.leaf.told.values()]

    def read(self, spec: Spec, at: int | None = None) -> Version | None:
        """What is held of an index at a tick; None when it has to be asked for."""
        with self.lock:
            self.check_open()
            found = self.leaf.read(HOME, spec, at)
            if found is not None:
                self.counts["answers"] += 1
                if self._touches.note(spec) and not self._word_waits:
                    # By another thread: to wake the loop here would give it the interpreter before the reader has its answer.
                    self._word_waits = True
                    self._teller.put(self._say_soon, None)
                if at is None:
                    self._hold(spec)
            return found

    def ask(self, spec: Spec, at: int | None = None) -> "Future[Version]":
        """The index, as soon as it is there."""
        with self.lock:
            self.check_open()
            future: Future[Version] = Future()
            self.counts["questions"] += 1
            self._reads.setdefault((spec, at), []).append(future)
            self._want(spec, at)
            self._settle()
            return future

    def publish(self, ops: Sequence[tuple[bytes, bytes]]) -> Batch:
        """One batch: on disk, shown, and on its way."""
        with self.lock:
            self.check_open()
            self._step(Publish(tuple(ops)))
            return self.leaf.outbox.batches[-1]

    def issue(self) -> tuple[int, int]:
        """An id for an item: the base of the arc, and a number in it."""
        with self.lock:
            self.check_open()
            issued = self.leaf.arcs.issue()
            return self.leaf.arcs.base, issued.n

    def watch(self, spec: Spec) -> Callable[[], None]:
        """Hold an index for as long as somebody looks at it; the function that ends this."""
        with self.lock:
            self.check_open()
            self._watched[spec] = self._watched.get(spec, 0) + 1
            self._hold(spec)
        done = [False]

        def end() -> None:
            with self.lock:
                if not done[0]:
                    done[0] = True
                    self._watched[spec] -= 1
                    if not self._watched[spec]:
                        del self._watched[spec]

        return end

    def until(self, condition: Callable[[], bool]) -> "Future[None]":
        """Done when a condition on the machine's state holds."""
        with self.lock:
            self.check_open()
            future: Future[None] = Future()
            self._waits.append((condition, future))
            self._settle()
            return future

    def wait_for(self, context: Context) -> "Future[None]":
        with self.lock:
            self._step(WaitFor(context))
            return self.until(lambda: self.leaf.waited(context))

    def wait_for_tick(self, tick: int) -> "Future[None]":
        """Until reads show this tick of the root."""
        with self.lock:
            self.check_open()
            clock = self.leaf.caches[HOME].clock
            return self.until(lambda: False) if clock is None else self.wait_for(((Witness(clock, tick),),))

    def begin(self) -> int:
        with self.lock:
            tick = self.tick
            self._step(Begin(HOME))
            return tick

    def end(self, tick: int) -> None:
        with self.lock:
            if not self._closed:
                self._step(End(HOME, tick))

    def post(self, post: Post) -> None:
        with self.lock:
            self.check_open()
            self._step(post)

    def offer(self, name: str, detail: bytes | None) -> None:
        with self.lock:
            self.check_open()
            self._step(Offer(name, detail))

    def forget(self, spec: Spec) -> None:
        """Drop what is held of an index."""
        with self.lock:
            self._step(EvictEntry(spec))
            self._tell(None)

    def listen(self, fn: Callable[[UserMessage], object]) -> None:
        """Hand messages to a function, also those that came before."""
        with self.lock:
            self.on_message = fn
            while self._undelivered:
                self._teller.put(fn, self._undelivered.popleft())

    def check_open(self) -> None:
        if self._closed:
            raise Closed("this connection is closed")
        if self.refused is not None:
            raise self.refused

    def drop_link(self, why: str) -> None:
        """End the connection; another one is made at once."""
        self._way.drop(why)

    def close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._fail(Closed("this connection was closed"))
            self._tell(None)
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._teller.close()
        with self.lock:
            try:
                if self._durable:
                    self.store.save(self.leaf, feed=self.feed)
                    self.store.keep_held(self.leaf)
            finally:
                self.store.close()

    # Steps of the machine

    def _step(self, event: Event) -> None:
        """Under the lock: one event, and all that follows from it."""
        outbox = self.leaf.outbox
        before = outbox.batches
        effects = self.leaf.receive(event)
        if isinstance(event, Publish):
            self._keep(before, outbox.batches[len(before) :])
        elif self._durable and self._matters(event):
            self.store.save(self.leaf, feed=self.feed)
        shown: set[Spec] | None = set() if outbox.batches == before else None
        with self._teller.quiet:  # what is told can be seen by then
            for effect in effects:
                shown = self._carry_out(effect, shown)
            if shown is None or shown or any(isinstance(each, Changed) for each in effects):
                self._unsaved = True
                self._tell(None if shown is None else frozenset(shown))
        if self._reads or self._waits:
            self._settle()

    def _keep(self, before: tuple[Batch, ...], fresh: tuple[Batch, ...]) -> None:
        """A batch is on disk before anybody sees it; one that can't be kept is taken back, its ids stay used."""
        if not self._durable:
            return
        try:
            self.store.save(self.leaf, published=fresh, feed=self.feed)
        except StorageFailed:
            outbox = self.leaf.outbox
            outbox.batches = before
            for batch in fresh:
                outbox.numbers[batch.arc] -= 1
            raise

    def _matters(self, event: Event) -> bool:
        """Whether an event changed something that must not be forgotten."""
        said = event.message if isinstance(event, Received) else event
        return isinstance(said, GrantSystemId | GrantArc | UserMessage | Post)

    def _carry_out(self, effect: Effect, shown: set[Spec] | None) -> set[Spec] | None:
        match effect:
            case Send(_, generation, message):
                self._send(generation, message)
            case Changed(_, _, specs):
                self._ask_wait_s = ASK_S
                if shown is not None:
                    shown.update(specs)
                for spec in list(self._watched):
                    self._hold(spec)
            case Told():
                if self.on_rejected is not None:
                    self._teller.put(self.on_rejected, Rejection.of(effect))
                return None
            case Lost(_, spec, at, oldest, reason):
                self._lost(spec, at, oldest, reason)
            case Delivered(message):
                if self.on_message is not None:
                    self._teller.put(self.on_message, message)
                else:
                    self._undelivered.append(message)
            case NotDelivered():
                self._unsaved = True
                if self.on_undelivered is not None:
                    self._teller.put(self.on_undelivered, effect)
            case Slow(_, retry_after_s):
                self._ask_at = time.monotonic() + retry_after_s
            case Refusal():
                self.counts["refusals"] += 1
            case Drop(_, detail):
                self.counts["refusals"] += 1
                self.drop_link(detail)
            case _:
                raise AssertionError(f"{effect} is not of a leaf")
        return shown

    def _send(self, generation: int, message: Message) -> None:
        if self._word_waits:  # nothing overtakes it
            self._say_what_is_read()
        if isinstance(message, Update | Statement) and self.welcome is not None and self.welcome.signs:
            message = signed(message, self.key)
        self._way.send(encode_frame(LinkFrame(generation, each)) for each in parts_of(message))

    def _say_soon(self, _: object) -> None:
        with self.lock:
            if self._word_waits and not self._closed:
                self._say_what_is_read()

    def _say_what_is_read(self) -> None:
        self._word_waits = False
        generation = self.leaf.caches[HOME].generation
        if generation is not None:
            self._send(generation, Touched(self._touches.take()))

    def _want(self, spec: Spec, at: int | None) -> None:
        if not self.leaf.caches[HOME].wanted:
            self._ask_at = time.monotonic() + ASK_S
        self._step(Want(HOME, spec, at))

    def _hold(self, spec: Spec) -> None:
        """Ask for an index that is not there, or that is there and nobody would tell of its changes."""
        cache = self.leaf.caches[HOME]
        if (spec, None) in cache.wanted or spec in self.denied:
            return
        told = spec in self._promised or cache.holdings.is_live(spec)
        if not told or cache.read(spec) is None:
            message = cache.want(spec, anew=True)
            if message is not None and cache.generation is not None:
                self._send(cache.generation, message)

    def _settle(self) -> None:
        """Whoever waits for what is there by now is told; what slipped away is asked for again."""
        for key in list(self._reads):
            found = self.leaf.read(HOME, *key)
            if found is not None:
                for future in self._reads.pop(key):
                    fulfil(future, found)
            elif key not in self.leaf.caches[HOME].wanted:
                message = self.leaf.caches[HOME].want(*key)
                generation = self.leaf.caches[HOME].generation
                if message is not None and generation is not None:
                    self._send(generation, message)
        for each in [each for each in self._waits if each[0]()]:
            self._waits.remove(each)
            fulfil(each[1], None)

    def _lost(self, spec: Spec, at: int | None, oldest: int | None, reason: RejectReason | None) -> None:
        error = not_to_be_had(at, oldest, reason)
        if reason is not None and spec in self._watched:
            self.denied[spec] = error
        for future in self._reads.pop((spec, at), ()):
            disappoint(future, error)
        self._tell(frozenset((spec,)))

    def _fail(self, error: EchoError) -> None:
        """Nobody who waits now will be answered."""
        for futures in self._reads.values():
            for future in futures:
                disappoint(future, error)
        self._reads.clear()
        for _, waiting in self._waits:
            disappoint(waiting, error)
        self._waits.clear()

    def _tell(self, specs: frozenset[Spec] | None) -> None:
        for listener in list(self.listeners):
            listener(specs)

    # The loop

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._task = asyncio.gather(self._going(), self._beating())
        with suppress(asyncio.CancelledError):
            await self._task
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # connections that are being closed
            await asyncio.wait(left, timeout=2 * BEAT_S)

    def _stop(self) -> None:
        self._task.cancel()

    async def _going(self) -> None:
        refused = await self._way.follow()
        with self.lock:
            self.refused = refused
            self._fail(refused)
            self._tell(None)

    # For the way up: see way_up.Traveller

    def opened(self, url: str, welcome: Welcome) -> None:
        clock = self.leaf.caches[HOME].clock
        known = self.leaf.systems.get(HOME) or (None if clock is None else clock.system)
        if known is not None and known.root != welcome.root:
            raise Unreachable(f"{url} serves another root than the one this leaf has its ids from")
        if welcome.party != self.grants.party:
            raise Unreachable(f"{url} serves another party")
        with self.lock:
            self.welcome, self.feed = welcome, welcome.feed
            self._step(Opening(HOME, welcome.generation, secrets.randbits(63)))

    def lost(self) -> None:
        with self.lock:
            if not self._closed:
                self.counts["lost_links"] += 1
                self._step(LinkClosed(HOME))
            self._tell(frozenset())
            self._settle()

    def take(self, data: bytes) -> None:
        try:
            frame = decode_frame(data)
        except MalformedFrame as error:
            self.counts["refusals"] += 1
            raise Unreachable(f"{self.url} sent a frame that can't be read: {error}") from error
        with self.lock:
            was = self.linked
            if isinstance(frame.message, Grant) and frame.message.at is None:
                self._promised.add(frame.message.spec)
                self._touches.told(frame.message.spec)
            self._step(Received(HOME, frame.generation, frame.message))
            self._touches.received(frame.message, self.leaf.caches[HOME].holdings)
            if isinstance(frame.message, NotifyReplicated | UserReceipt):
                self._unsaved = True
                self._ask_wait_s = ASK_S
            if self.linked and not was:
                self.counts["links"] += 1
                self._ask_at = time.monotonic() + ASK_S
                self.denied.clear()
                self._promised.clear()
                self._touches.clear()
                for spec in list(self._watched):
                    self._hold(spec)
                self._tell(None)  # nothing is live in a new generation

    async def _beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with self.lock:
                self._beat(time.monotonic())

    def _beat(self, now: float) -> None:
        """Timers: ask again, say what is read, repeat what is offered, save."""
        leaf, cache = self.leaf, self.leaf.caches[HOME]
        if cache.generation is not None or cache.opening is not None:
            if not leaf.asks:
                self._ask_wait_s, self._ask_at = ASK_S, now + ASK_S
            elif now >= self._ask_at:
                self._ask_wait_s = min(2 * self._ask_wait_s, ASK_S_MAX)
                self._ask_at = now + self._ask_wait_s
                self._step(Unanswered(HOME))
            elif leaf.offers and now - self._announced_at >= ANNOUNCE_S:
                self._announced_at = now
                self._step(Unanswered(HOME))
        if self._touches.read:
            self._say_what_is_read()
        if self._unsaved and self._durable and not self._closed:
            self._unsaved = False
            self.store.save(leaf, feed=self.feed)
