"""A leaf: what serves one application. It reads indexes at one tick, writes ahead of its root, and works offline.

    read      from the cache, at the current tick of a link or at a pinned one
    view      what was read, with the leaf's own batches on top that the tick does not include
    publish   ids from the arc, into the outbox, and up when there is a link

The first link is *home*: its root grants ids and takes batches. Links to other roots are for reading.
"""

from collections.abc import Iterable

from echostore.kernel.coherence.arcs import ArcHolder
from echostore.kernel.coherence.cache import Cache
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
from echostore.kernel.coherence.holdings import Codec, Version
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    Attached,
    Backpressure,
    BeginUpdate,
    Connectivity,
    Context,
    Deannounce,
    Denied,
    EndUpdate,
    FollowsEpoch,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    IssuedId,
    LaneItem,
    Linked,
    Message,
    MessageId,
    NotifyReplicated,
    NullUpdate,
    Pin,
    PublishOp,
    RejectOp,
    RejectReason,
    Service,
    Spec,
    SystemId,
    Undelivered,
    Update,
    UserMessage,
    UserReceipt,
    WaitForEpoch,
)
from echostore.kernel.coherence.outbox import BATCH_OPS_MAX, BATCHES_MAX, Outbox
from echostore.kernel.coherence.posting import CROSS_ROOT_STREAMS, HELD_MAX, Receiver, Sender, satisfied
from echostore.kernel.coherence.services import Services
from echostore.kernel.coherence.updates import UpdateReader
from echostore.kernel.errors import Refused, UsageError

TOLD_MAX = 1000
"""Rejections that a leaf remembers."""


class Leaf:
    """`receive(event)` returns effects."""

    __slots__ = (
        "arcs",
        "caches",
        "codec",
        "held",
        "home",
        "nonces",
        "offers",
        "outbox",
        "pins",
        "readers",
        "receiver",
        "sender",
        "services",
        "systems",
        "told",
        "vector",
        "waits",
    )

    def __init__(self, codec: Codec, home: LinkId, *, vector: bool = False) -> None:
        """`vector`: hear of every feed how much a tick includes, to go on at another root of the party."""
        self.codec = codec
        self.vector = vector
        self.home = home
        self.caches: dict[LinkId, Cache] = {home: Cache(codec)}
        self.readers: dict[LinkId, UpdateReader] = {home: UpdateReader()}
        self.systems: dict[LinkId, SystemId] = {}
        self.nonces: dict[LinkId, int] = {}
        """Of questions for a name or an arc that are open."""
        self.arcs = ArcHolder()
        self.outbox = Outbox()
        self.told: dict[IssuedId, Told] = {}
        """The last operations that were rejected: each is told once, however often and over however many ways it comes."""
        self.pins: dict[LinkId, tuple[int, ...]] = {}
        self.waits: dict[Arc, int] = {}
        self.sender = Sender()
        self.receiver = Receiver()
        self.held: tuple[UserMessage, ...] = ()
        self.services = Services()
        self.offers: dict[str, tuple[int, bytes | None]] = {}

    def receive(self, event: Event) -> list[Effect]:
        match event:
            case Received(link, generation, message):
                return self._take(link, generation, message)
            case Opening(link, generation, nonce):
                return self._opening(link, generation, nonce)
            case LinkClosed(link):
                self._break_off(link)
                return []
            case Want(link, spec, at):
                return self._up(link, self.caches[link].want(spec, at))
            case Publish(ops):
                return self._publish(ops)
            case WaitFor(context):
                return self._wait(context)
            case Begin(link):
                return self._pin(link, (*self.pins.get(link, ()), self.caches[link].cur))
            case End(link, tick):
                kept = list(self.pins.get(link, ()))
                kept.remove(tick)
                return self._pin(link, tuple(kept))
            case EvictEntry(spec):
                for cache in self.caches.values():
                    cache.holdings.evict(spec)
                return []
            case Unanswered(link):
                return self._ask_again(link)
            case Post():
                return self._post(event)
            case Offer(name, detail):
                return self._offer(name, detail)
            case _:
                raise AssertionError(f"{event} does not happen to a leaf")

    # What the application sees

    def read(self, link: LinkId, spec: Spec, at: int | None = None) -> Version | None:
        return self.caches[link].read(spec, at)

    def reached(self, clock: Arc, tick: int) -> bool:
        """Whether what is shown includes that tick of that clock."""
        return any(cache.reached(clock, tick) for cache in self.caches.values())

    def waited(self, context: Context) -> bool:
        """Whether a context is there: what an acquire fence waits for."""
        return satisfied(context, self.reached)

    def is_causal(self) -> bool:
        """Whether the current ticks of all links make one view: none includes what another has not reached.

        A transaction over several roots begins only then. Updates never wait for each other.
        """
        cur = {cache.clock: cache.cur for cache in self.caches.values()}
        return all(
            cur.get(clock, tick) >= tick for cache in self.caches.values() for clock, tick in cache.follows.items()
        )

    @property
    def released(self) -> bool:
        """Whether the root has all batches on disk: nothing is lost any more, whatever happens here."""
        return self.outbox.drained

    @property
    def settled(self) -> bool:
        """Whether all batches are in the state, and what of them was rejected is told: what a release fence waits for."""
        return not self.outbox.batches

    @property
    def asks(self) -> bool:
        """Whether anything is awaited from home."""
        home = self.caches[self.home]
        asked = home.opening is not None or home.wanted or self.waits or self.arcs.is_short
        return bool(asked or self.sender.unreceived or self.outbox.to_send())

    # Links

    def join(self, link: LinkId) -> None:
        """Another root to read from, before any link opens: each has to tell how much of the other it includes."""
        self.vector = True
        self.caches.setdefault(link, Cache(self.codec))
        self.readers.setdefault(link, UpdateReader())

    def _up(self, link: LinkId, message: Message | None) -> list[Effect]:
        generation = self.caches[link].generation
        return [] if message is None or generation is None else [Send(link, generation, message)]

    def _opening(self, link: LinkId, generation: int, nonce: int) -> list[Effect]:
        self._break_off(link)
        self.caches[link].opening = generation
        self.nonces.setdefault(link, nonce)
        return [Send(link, generation, self._attach(link))]

    def _attach(self, link: LinkId) -> Attach:
        wants_arc = link == self.home and self.arcs.is_short
        seen = self.caches[link].cur
        return Attach(self.nonces[link], self.systems.get(link), wants_arc, seen, vector=self.vector)

    def _break_off(self, link: LinkId) -> None:
        self.caches[link].close()
        self.readers[link].clear()

    def _ask_again(self, link: LinkId) -> list[Effect]:
        cache = self.caches[link]
        if cache.opening is not None:
            return [Send(link, cache.opening, self._attach(link))]
        questions: list[Message] = [*cache.ask_again()]
        questions += [WaitForEpoch(clock, tick) for clock, tick in self.waits.items() if not self.reached(clock, tick)]
        if link == self.home:
            if self.arcs.is_short and link in self.nonces:
                questions.append(self._attach(link))
            questions += [batch.as_update() for batch in self.outbox.to_send()]
            questions += [self.outbox.release(arc) for arc in self.outbox.released]
            questions += self.sender.pending()
            questions += self._announcements()
        if self.pins.get(link):
            questions.append(Pin(min(self.pins[link])))
        return [effect for each in questions for effect in self._up(link, each)]

    # From above

    def _take(self, link: LinkId, generation: int, message: Message) -> list[Effect]:
        cache = self.caches[link]
        if isinstance(message, Linked):
            return self._linked(link, generation, message)
        early = isinstance(message, GrantSystemId | GrantArc | NotifyReplicated)  # may come before Linked
        if generation != cache.generation and not (early and generation == cache.opening):  # D1
            return []
        match message:
            case GrantSystemId(nonce, system):
                if nonce == self.nonces.get(link):
                    self.systems[link] = system
                return []
            case Attached(turn, _, tick, follows):
                return [] if turn else self._included(link, tick, follows)
            case Update():
                return self._update(link, message)
            case BeginUpdate() | LaneItem() | EndUpdate() | NullUpdate():
                return self._frame(link, message)
            case Grant():
                return self._granted(link, message)
            case Gone(spec, at, oldest):
                return [Lost(link, spec, at, oldest, None)] if cache.take_gone(message) else []
            case Denied(spec, reason):
                return [Lost(link, spec, at, None, reason) for at in cache.take_denied(message)]
            case GrantArc():
                return self._new_arc(message)
            case NotifyReplicated(clock, batch):
                return self._notified(clock, batch)
            case RejectOp():
                return self._rejected([message])
            case UserMessage():
                return self._user_message(link, message)
            case UserReceipt():
                self.sender.received(message)
                return []
            case Undelivered(id, reason):
                given_up = self.sender.undelivered(message)
                return [] if given_up is None else [NotDelivered(id, given_up.target, reason)]
            case Announce() | Deannounce():
                self.services.take(message)
                return []
            case Connectivity():
                self.services.lost(message)
                return []
            case Backpressure(what, retry_after_s):
                return [Slow(what, retry_after_s)]
            case _:
                return [Refusal(link, RejectReason.MALFORMED, f"{type(message).__name__} does not travel downwards")]

    def _linked(self, link: LinkId, generation: int, linked: Linked) -> list[Effect]:
        cache = self.caches[link]
        if cache.open(generation, linked) is None:
            return []
        told = self._rejected(linked.rejected)
        self._followed(link)
        self._forget_waits()
        if link != self.home or not self.arcs.is_short:
            self.nonces.pop(link, None)
        return [*self._ask_again(link), *told, Changed(link, cache.cur, ()), *self._deliver()]

    def _frame(self, link: LinkId, frame: BeginUpdate | LaneItem | EndUpdate | NullUpdate) -> list[Effect]:
        cache, reader = self.caches[link], self.readers[link]
        wrong = reader.take(frame, cache.cur)
        if wrong is not None:
            return [Drop(link, wrong)]
        effects: list[Effect] = []
        while (update := reader.next(frame.clock, cache.cur)) is not None:
            effects += self._update(link, update)
        return effects

    def _update(self, link: LinkId, update: Update) -> list[Effect]:
        cache = self.caches[link]
        if not cache.may_come_from_above(update):
            return [Drop(link, "operations do not travel downwards")]
        specs = cache.apply(update)
        if specs is None:
            return []
        told = self._rejected(item for item in update.items if isinstance(item, RejectOp))
        self._followed(link)
        self._forget_waits()
        return [*told, Changed(link, cache.cur, tuple(specs)), *self._deliver()]

    def _included(self, link: LinkId, tick: int, follows: tuple[FollowsEpoch, ...]) -> list[Effect]:
        """The state that is shown includes this much of other clocks. Of its own a leaf hears with the tick alone."""
        cache = self.caches[link]
        others = [each for each in follows if each.clock.system != self.systems.get(link)]
        if tick > cache.cur or not others:
            return []
        cache.follow(others)
        self._forget_waits()
        return [Changed(link, cache.cur, ()), *self._deliver()]

    def _rejected(self, rejected: Iterable[RejectOp]) -> list[Effect]:
        effects: list[Effect] = []
        for each in rejected:
            if each.op.arc.system == self.systems.get(self.home) and each.op not in self.told:
                object, dependants = self.outbox.reject(each.op)
                self.told[each.op] = told = Told(each.op, each.reason, dependants, each.object or object)
                effects.append(told)
        while len(self.told) > TOLD_MAX:
            del self.told[next(iter(self.told))]
        return effects

    def _followed(self, link: LinkId) -> None:
        """What the state includes leaves the outbox in the same step: a batch is seen exactly once."""
        if link == self.home:
            self.outbox.followed(self.caches[link].follows)

    def _granted(self, link: LinkId, grant: Grant) -> list[Effect]:
        cache = self.caches[link]
        taken = cache.take_grant(grant)
        if isinstance(taken, Acquire):
            return self._up(link, taken)
        if not taken:
            return []
        cache.make_room()
        return [Changed(link, cache.cur, (grant.spec,))]

    # Writing

    def _new_arc(self, grant: GrantArc) -> list[Effect]:
        """The greater arc is used from now on, and the lesser one released."""
        old = self.arcs.arc
        if grant.arc.system != self.systems.get(self.home) or not self.arcs.take(grant):
            return []
        if self.caches[self.home].opening is None:
            self.nonces.pop(self.home, None)
        return [] if old is None else self._up(self.home, self.outbox.release(old))

    def _publish(self, ops: tuple[tuple[bytes, bytes], ...]) -> list[Effect]:
        if not 0 < len(ops) <= BATCH_OPS_MAX:
            raise UsageError(f"a batch has 1 to {BATCH_OPS_MAX} operations, got {len(ops)}")
        if len(self.outbox.batches) >= BATCHES_MAX:
            raise Refused(f"{BATCHES_MAX} batches wait for the root", next_step="Connect, so that they can be sent.")
        issued = tuple(PublishOp(self.arcs.issue(), object, delta) for object, delta in ops)
        assert self.arcs.arc is not None, "an id was issued"
        batch = self.outbox.add(self.arcs.arc, issued)
        return self._up(self.home, batch.as_update()) if batch in self.outbox.to_send() else []

    def _notified(self, clock: Arc, batch: int) -> list[Effect]:
        before = self.outbox.to_send()
        if not self.outbox.notified(clock, batch):
            return []
        fresh = [each for each in self.outbox.to_send() if each not in before]
        return [effect for each in fresh for effect in self._up(self.home, each.as_update())]

    # Waiting

    def _wait(self, context: Context) -> list[Effect]:
        """Ask for each clause that is not there, by its first witness."""
        effects: list[Effect] = []
        for clause in context:
            if not clause:
                raise UsageError("a clause without a witness is never satisfied")
            if any(self.reached(witness.clock, witness.tick) for witness in clause):
                continue
            witness = clause[0]
            own = self.systems.get(self.home)
            if witness.clock.system == own and witness.tick > self.outbox.numbers.get(witness.clock, 0):
                raise UsageError("waiting for a batch of one's own that is not published")
            self.waits[witness.clock] = max(witness.tick, self.waits.get(witness.clock, 0))
            links = [link for link, cache in self.caches.items() if cache.clock == witness.clock] or [self.home]
            effects += self._up(links[0], WaitForEpoch(*witness))
        return effects

    def _forget_waits(self) -> None:
        for clock in [clock for clock, tick in self.waits.items() if self.reached(clock, tick)]:
            del self.waits[clock]

    def _pin(self, link: LinkId, pins: tuple[int, ...]) -> list[Effect]:
        self.pins[link] = pins
        oldest = min(pins, default=None)
        self.caches[link].holdings.floor = oldest
        return self._up(link, Pin(oldest))

    # Other applications

    def _post(self, post: Post) -> list[Effect]:
        sender = self.systems.get(self.home)
        if sender is None:
            raise Refused("this leaf has no name yet", next_step="Connect once.")
        crosses = post.target.root != sender.root
        stream = post.stream + (CROSS_ROOT_STREAMS if crosses else 0)
        message = UserMessage(
            MessageId(sender, stream, 0), 0, post.target, post.context, post.type, post.payload, crosses
        )
        numbered = self.sender.post(message)
        if numbered is None:
            raise Refused("too many messages are on their way", next_step="Wait until some have arrived.")
        return self._up(self.home, numbered)

    def _user_message(self, link: LinkId, message: UserMessage) -> list[Effect]:
        if message.target not in self.systems.values():
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a message for another system")]
        if message.id not in {each.id for each in self.held} and len(self.held) < HELD_MAX:
            self.held = (*self.held, message)
        return self._deliver()

    def _deliver(self) -> list[Effect]:
        """Messages whose context is shown by now, each once; a receipt for each that came."""
        effects: list[Effect] = []
        ready = [each for each in self.held if self.waited(each.context)]
        self.held = tuple(each for each in self.held if each not in ready)
        for message in ready:
            if self.receiver.take(message.id, message.floor):
                effects.append(Delivered(message))
            link = next(each for each, system in self.systems.items() if system == message.target)
            effects += self._up(link, UserReceipt(message.id, message.target))
        return effects

    def _offer(self, name: str, detail: bytes | None) -> list[Effect]:
        seq, _ = self.offers.get(name, (0, None))
        self.offers[name] = (seq + 1, detail)
        return [effect for each in self._announcements() for effect in self._up(self.home, each)]

    def _announcements(self) -> list[Announce | Deannounce]:
        system = self.systems.get(self.home)
        if system is None:
            return []
        gen = 0 if self.arcs.arc is None else self.arcs.arc.gen
        return [
            Deannounce(Service(system, name), gen, seq)
            if detail is None
            else Announce(Service(system, name), gen, seq, detail)
            for name, (seq, detail) in sorted(self.offers.items())
        ]
