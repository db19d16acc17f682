"""The root of a tree: a peer that owns durable state and gives it a clock of ticks.

A tick names one state of the peer. The host tells it with `Advanced` only after it is on disk, so nothing that a leaf
ever saw is taken back by a crash. A batch of operations becomes part of the state by `Commit`, and of a tick by the
next `Advanced`; both survive a restart with `Durable`.
"""

from dataclasses import replace

from echostore.kernel.coherence.arcs import ArcLedger
from echostore.kernel.coherence.batches import Batches
from echostore.kernel.coherence.courier import Courier
from echostore.kernel.coherence.events import (
    ROOTS,
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
    EvictEntry,
    EvictRecord,
    Excluded,
    Flush,
    Forget,
    FromRoot,
    GiveUp,
    LinkClosed,
    LinkId,
    Received,
    Refusal,
    RootMet,
    RootParted,
    Sideways,
    Unanswered,
    Unavailable,
    Unwatch,
    Writable,
)
from echostore.kernel.coherence.guard import Guard, Proofs
from echostore.kernel.coherence.holdings import Codec, Holdings, Version
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    Attached,
    Backpressure,
    BeginUpdate,
    Below,
    Connectivity,
    Context,
    Deannounce,
    EndUpdate,
    FollowsEpoch,
    Gone,
    GrantSystemId,
    IndexValue,
    LaneItem,
    Message,
    NotifyReplicated,
    NullUpdate,
    Pin,
    PublishOp,
    RejectReason,
    ReleaseArc,
    Service,
    Spec,
    SystemId,
    Touched,
    Turn,
    Undelivered,
    Update,
    UserMessage,
    UserQueued,
    UserReceipt,
    WaitForEpoch,
    Witness,
)
from echostore.kernel.coherence.posting import satisfied
from echostore.kernel.coherence.services import SERVICES_SPEC, Services
from echostore.kernel.coherence.serving import Serving

WINDOW_TICKS = 256
"""How far back a transaction may read. Older versions are forgotten."""


class Root:
    """`receive(event)` returns effects."""

    __slots__ = (
        "batches",
        "clock",
        "courier",
        "guard",
        "holdings",
        "others",
        "services",
        "services_changed",
        "serving",
        "unexposed",
        "window_ticks",
    )

    def __init__(
        self,
        system: SystemId,
        codec: Codec,
        *,
        tick: int = 0,
        batches: Batches | None = None,
        window_ticks: int = WINDOW_TICKS,
        proofs: Proofs | None = None,
    ) -> None:
        """After a restart: the last tick that was exposed, and the account of batches as it is on disk.

        `proofs` says who is at the other end of each link; without it everybody is believed, as models without attackers do.
        """
        self.clock = Arc(system)
        self.window_ticks = window_ticks
        self.holdings = Holdings(tick)
        self.holdings.floor = max(0, tick - window_ticks)
        self.batches = Batches(ArcLedger(system)) if batches is None else batches
        self.serving = Serving(self.holdings, codec, self.clock)
        self.guard = None if proofs is None else Guard(proofs, self.serving)
        applied, exposed = self.batches.applied, self.batches.exposed
        self.unexposed: tuple[tuple[int, FollowsEpoch], ...] = tuple(
            (tick + 1, FollowsEpoch(clock, batch)) for clock, batch in applied.items() if batch > exposed.get(clock, 0)
        )
        """Batches that are on disk and in no tick yet."""
        self.others: dict[Arc, int] = {}
        """What the current tick includes of other clocks that mean the same at every root: those of feeds."""
        self.services = Services()
        self.services_changed = False
        self.courier = Courier(system.root)

    def receive(self, event: Event) -> list[Effect]:
        serving = self.serving
        match event:
            case Received(link, generation, message):
                if serving.generations.get(link) != generation:
                    return []
                return self._take(link, message)
            case Advanced():
                return self._advance(event)
            case Evaluated():
                return self._learn(event)
            case Unavailable():
                return self._unavailable(event)
            case Committed():
                return self._committed(event)
            case Excluded():
                return self._excluded(event)
            case ChildOpened(link, generation):
                return self._lost(serving.connect(link, generation))
            case LinkClosed(link):
                return self._lost(serving.close(link))
            case Flush() | Writable() | Forget() | EvictRecord():
                return serving.receive(event)
            case RootMet() | RootParted() | FromRoot() | GiveUp() | Unanswered():
                return self._sideways(event)
            case EvictEntry(spec):
                if spec not in self.holdings:
                    return []
                self.holdings.evict(spec)
                serving.mark([spec])
                return [Unwatch(spec)]
            case _:
                raise AssertionError(f"{event} does not happen to a root")

    def reached(self, clock: Arc, tick: int) -> bool:
        """Whether the current tick includes that tick of that clock."""
        if clock == self.clock:
            return tick <= self.holdings.cur
        return tick <= max(self.batches.exposed.get(clock, 0), self.others.get(clock, 0))

    # The host

    def _advance(self, event: Advanced) -> list[Effect]:
        assert event.tick == self.holdings.cur + 1, f"tick {event.tick} after {self.holdings.cur}"
        changes = dict(event.changes)
        if self.services_changed:
            changes.update(self._services_changes())
            self.services_changed = False
        self.holdings.floor = max(0, min([event.tick - self.window_ticks, *self._pinned(event.tick)]))
        for spec, value in changes.items():
            self.holdings.succeed(spec, event.tick, value)
        self.holdings.cur = event.tick
        self.serving.mark(changes)
        self._expose(event)
        return [*self.serving.wake(), *self.serving.release_messages(), *(self._forward() if self.courier.held else ())]

    def _pinned(self, tick: int) -> list[int]:
        """Pins reach back at most twice as far as the window: one forgotten leaf does not hold all history."""
        return [max(pin, tick - 2 * self.window_ticks) for pin in self.serving.pins.values()]

    def _expose(self, event: Advanced) -> None:
        """The tick includes the batches that were committed for it, and says so in the same update as their effect."""
        out = [each for tick, each in self.unexposed if tick <= event.tick]
        self.unexposed = tuple(each for each in self.unexposed if each[0] > event.tick)
        self.batches.expose(out)
        for clock, batch in {each.clock: each.tick for each in out}.items():
            for directory in self.serving.waiting_for(clock, batch):
                directory.follow(clock, batch)
            for directory in self.serving.directories(clock.system):
                directory.follow(clock, batch)
                directory.rejections += self.batches.rejections_between(clock, event.tick - 1, event.tick)
        for each in event.follows:
            if each.tick > self.others.get(each.clock, 0):
                self.others[each.clock] = each.tick
                self.serving.follow_feed(each.clock, each.tick)

    def _services_changes(self) -> dict[Spec, IndexValue]:
        changes = {}
        for spec in [spec for spec in self.holdings.specs() if spec.startswith(SERVICES_SPEC)]:
            value = self.services.value(spec)
            known = self.holdings.at(spec, self.holdings.cur)
            if known is None or known.value != value:
                changes[spec] = value
        return changes

    def _learn(self, event: Evaluated) -> list[Effect]:
        live = event.max == self.holdings.cur
        self.holdings.learn(event.spec, Version(event.min, event.max, event.value, live))
        effects: list[Effect] = []
        for at in [at for spec, at in self.serving.asked if spec == event.spec]:
            if live if at is None else event.min <= at <= event.max:
                effects += self.serving.learned(event.spec, at)
            elif at is None:  # a tick came in between
                effects.append(Evaluate(event.spec, None))
        return effects

    def _unavailable(self, event: Unavailable) -> list[Effect]:
        if event.reason is not None:
            return self.serving.denied(event.spec, event.reason)
        assert event.at is not None, "only an older tick can be gone"
        return self.serving.tell_askers(event.spec, event.at, Gone(event.spec, event.at, self.holdings.floor or 0))

    def _committed(self, event: Committed) -> list[Effect]:
        assert event.tick > self.holdings.cur, f"a batch for tick {event.tick}, which is out"
        self.batches.committed(event.clock, event.batch, event.tick, event.rejected)
        self.unexposed = (*self.unexposed, (event.tick, FollowsEpoch(event.clock, event.batch)))
        return self.serving.to_system(event.clock.system, self._notify(event.clock))

    def _excluded(self, event: Excluded) -> list[Effect]:
        """Told in the update that shows the state without them; to one that is away, when it is back."""
        assert event.tick == self.holdings.cur + 1, f"excluded from tick {event.tick} on, {self.holdings.cur} is out"
        self.batches.reject(event.clock, event.tick, event.rejected)
        for directory in self.serving.directories(event.clock.system):
            directory.rejections += event.rejected
        return []

    def _notify(self, clock: Arc) -> NotifyReplicated:
        """What is on disk of a clock, and the tick that includes it."""
        ticks = [tick for tick, each in self.unexposed if each.clock == clock]
        tick = ticks[-1] if ticks else self.holdings.cur
        return NotifyReplicated(clock, self.batches.applied[clock], self.clock.system, tick)

    # The systems below

    def _take(self, link: LinkId, message: Message) -> list[Effect]:
        serving = self.serving
        refused = None if self.guard is None else self.guard.refusal(link, message)
        if refused is not None and self.guard is not None:
            return self.guard.refuse(link, message, refused)
        if isinstance(message, Attach):
            return self._attach(link, message)
        directory = serving.links.get(link)
        if directory is None:
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, f"{type(message).__name__} before Attach")]
        match message:
            case Acquire():
                return self._acquire(link, message)
            case Update():
                return self._batch(link, message)
            case BeginUpdate() | LaneItem() | EndUpdate() | NullUpdate():
                return self._frame(link, message)
            case Touched(specs):
                for spec in specs:
                    directory.touch(spec)
                return []
            case Pin(tick):
                if tick is None:
                    serving.pins.pop(link, None)
                else:
                    serving.pins[link] = tick
                return []
            case WaitForEpoch(clock, tick):
                return self._wait(link, clock, tick)
            case ReleaseArc(arc):
                if not serving.leads_to(arc.system, link):
                    return [
                        Refusal(link, RejectReason.UNKNOWN_SYSTEM, "an arc of a system that is not reached this way")
                    ]
                self.batches.arcs.release(message)
                return []
            case Announce() | Deannounce():
                return self._announced(link, message)
            case Connectivity(system, _, turn):
                return self._lost([(system, turn)] if serving.unroute(system, link, turn) else [])
            case UserMessage():
                return self._user_message(link, message)
            case UserReceipt():
                return self._receipt(link, message)
            case _:
                return [Refusal(link, RejectReason.MALFORMED, f"{type(message).__name__} does not travel upwards")]

    def _attach(self, link: LinkId, attach: Attach) -> list[Effect]:
        serving, arcs = self.serving, self.batches.arcs
        effects: list[Effect] = []
        key = b""
        if self.guard is not None:
            shown = self.guard.attaches(link, attach)
            assert shown is not None, "an Attach that proves nothing was refused"
            key = shown.key
            named = attach.system or arcs.nonces.get(attach.nonce)
            if named in arcs.gens and arcs.owners.get(named) != key:
                return [Refusal(link, RejectReason.NOT_ALLOWED, "Attach of a system of another key")]
            proven = tuple(each for each in attach.below if self._is_behind(link, each))
            lies = len(attach.below) - len(proven)
            effects += [Refusal(link, RejectReason.NOT_ALLOWED, "a system that did not show itself")] * lies
            attach = replace(attach, below=proven)
        system = attach.system
        if system is None:
            if link in serving.links and not attach.turn and attach.nonce not in arcs.nonces:
                return [Refusal(link, RejectReason.NOT_ALLOWED, "one system is one link, and it has a name")]
            system = arcs.name(attach.nonce)
            effects.append(serving.send(link, GrantSystemId(attach.nonce, system, attach.turn)))
            arcs.owners.setdefault(system, key)
        systems = [system, *(each.system for each in attach.below)]
        if any(each not in arcs.gens for each in systems):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "Attach of a system that was never named")]
        if attach.seen > self.holdings.cur:
            return [Refusal(link, RejectReason.MALFORMED, f"tick {attach.seen} was never told, {self.holdings.cur} is")]
        own = Below(system, attach.turn, attach.credential if attach.turn else b"")
        if not serving.route([own, *attach.below], link):
            return [serving.send(link, Backpressure("attach", 30.0))]
        clocks = [clock for each in systems for clock in self._clocks(each)]
        follows = tuple(FollowsEpoch(clock, self.batches.exposed.get(clock, 0)) for clock in clocks)
        if attach.vector:
            follows += tuple(FollowsEpoch(clock, tick) for clock, tick in sorted(self.others.items()))
        for clock in self._clocks(system):
            self.batches.seen(clock, attach.seen)
        missed = tuple(
            each for clock in clocks for each in self.batches.rejections_between(clock, attach.seen, self.holdings.cur)
        )
        if link in serving.links:
            effects.append(serving.send(link, Attached(attach.turn, system, self.holdings.cur, follows, missed)))
            serving.links[link].told.update((each.clock, each.tick) for each in follows)
            serving.links[link].vector |= attach.vector
            effects += serving.flush(link)
        else:
            effects.append(serving.open(link, follows, missed, vector=attach.vector))
        if attach.wants_arc:
            grant = arcs.grant(system, attach.nonce)
            arcs.retire(system, self.batches.applied)
            effects.append(serving.send(link, grant))
        effects += [serving.send(link, self._notify(each)) for each in clocks if each in self.batches.applied]
        return [*effects, *(each for known in systems for each in self._hand_on(known))]

    def _is_behind(self, link: LinkId, below: Below) -> bool:
        """Whether a system that an edge names showed itself there by its own key."""
        assert self.guard is not None, "somebody is asked for proofs"
        shown = self.guard.proves(link, below)
        return shown is not None and self.batches.arcs.owners.get(below.system) == shown.key

    def review(self) -> list[Effect]:
        """What systems behind edges showed may be worth nothing any more: nothing goes to those, or comes from them."""
        guard, serving = self.guard, self.serving
        if guard is None:
            return []
        routes = [(system, link, turn) for system, ways in serving.routes.items() for link, turn in ways.items()]
        gone = [
            (system, turn)
            for system, link, turn in routes
            if turn and guard.right(link, system) is None and serving.unroute(system, link, turn)
        ]
        return self._lost(gone)

    def _clocks(self, system: SystemId) -> list[Arc]:
        gen = self.batches.arcs.gens.get(system, 0)
        arcs = [Arc(system, each) for each in range(max(1, gen - 8), gen + 1)]
        return [arc for arc in arcs if arc in self.batches.arcs.granted]

    def _acquire(self, link: LinkId, asked: Acquire) -> list[Effect]:
        """Answered from what is held; else evaluated, once for all who ask."""
        serving = self.serving
        if asked.at is not None and not (self.holdings.floor or 0) <= asked.at <= self.holdings.cur:
            return [serving.send(link, Gone(asked.spec, asked.at, self.holdings.floor or 0))]
        answer = serving.answer(link, asked)
        if answer is not None:
            return answer
        if asked.spec.startswith(SERVICES_SPEC) and asked.at is None:
            cur = self.holdings.cur
            self.holdings.learn(asked.spec, Version(cur, cur, self.services.value(asked.spec), live=True))
            return serving.answer(link, asked) or []
        known = (asked.spec, asked.at) in serving.asked
        if not serving.put_off(link, asked):
            return [serving.send(link, Backpressure("acquire", 1.0))]
        return [] if known else [Evaluate(asked.spec, asked.at)]

    def _frame(self, link: LinkId, frame: BeginUpdate | LaneItem | EndUpdate | NullUpdate) -> list[Effect]:
        done = max(self.batches.applied.get(frame.clock, 0), self.batches.writing.get(frame.clock, 0))
        gathered = self.serving.gather(link, frame, done)
        if isinstance(gathered, Drop):
            return [gathered]
        return [] if gathered is None else self._batch(link, gathered)

    def _batch(self, link: LinkId, update: Update) -> list[Effect]:
        if not all(isinstance(item, PublishOp) for item in update.items) or update.follows:
            return [Refusal(link, RejectReason.MALFORMED, "a batch holds operations and nothing else")]
        if not self.serving.leads_to(update.clock.system, link):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a batch of a system that is not reached this way")]
        if update.tick <= self.batches.applied.get(update.clock, 0):  # it came before; whoever sent it did not hear so
            return [self.serving.send(link, self._notify(update.clock))]
        if not self.batches.is_next(update):
            return []
        if self.guard is not None and not self.guard.wrote(
            link, update.clock.system, update
        ):  # nor is its number used up
            return [Refusal(link, RejectReason.FORGED, "a batch that its system did not sign")]
        taken = self.batches.take(update)
        assert taken is not None, "it is its turn"
        return [Commit(update.clock, update.tick, *taken)]

    def _wait(self, link: LinkId, clock: Arc, tick: int) -> list[Effect]:
        directory = self.serving.links[link]
        if clock != self.clock and self.reached(clock, tick):
            directory.follow(clock, max(tick, self.others.get(clock, 0)))
        effects = self.serving.wait(link, clock, tick)
        # The link is at the current tick already, and no update of it can say that the clock is included.
        return [*effects, Cut()] if clock in directory.due and directory.sent == self.holdings.cur else effects

    def _announced(self, link: LinkId, message: Announce | Deannounce) -> list[Effect]:
        if not self.serving.leads_to(message.service.system, link):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a service of a system that is not reached this way")]
        if not self.services.take(message):
            return []
        return [*self._services_news(), *self._tell_roots(message)]

    def _lost(self, systems: list[tuple[SystemId, Turn]]) -> list[Effect]:
        """Systems can't be reached: what they offered is gone with them."""
        gone = [system for system, _ in systems if system not in self.serving.routes]
        said = [Connectivity(system, affects_all_services=True) for system in gone]
        news = [each for each in said if self.services.lost(each)]
        told = [effect for each in news for effect in self._tell_roots(each)]
        return [*self._services_news(), *told] if news else []

    def _services_news(self) -> list[Effect]:
        self.services_changed = True
        return [Cut()] if any(spec.startswith(SERVICES_SPEC) for spec in self.holdings.specs()) else []

    def _user_message(self, link: LinkId, message: UserMessage) -> list[Effect]:
        serving = self.serving
        if not serving.leads_to(message.id.sender, link):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a message of a system that is not reached this way")]
        if message.signature:  # it was for this root; what goes on is not as it was signed
            message = replace(message, signature=b"")
        if message.target in serving.routes:
            passed = serving.pass_down(message)
            if passed is None:
                return [serving.send(link, Backpressure("messages", 1.0))]
            return [*passed, *self._include_context(message)] if message in serving.held else passed
        if message.target.root != self.clock.system.root and message.cross_root:
            posted = self.courier.post(message)
            if posted is None:
                return [serving.send(link, Backpressure("messages", 1.0))]
            return [*self._aside(posted), *self._forward()]
        if message.target.root == self.clock.system.root and message.target not in self.batches.arcs.gens:
            return serving.to_system(message.id.sender, Undelivered(message.id, RejectReason.UNKNOWN_SYSTEM))
        return [serving.send(link, Connectivity(message.target, affects_all_services=False))]

    def _receipt(self, link: LinkId, receipt: UserReceipt) -> list[Effect]:
        courier, sender = self.courier, receipt.id.sender
        if not self.serving.leads_to(receipt.target, link):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a receipt of a system that is not reached this way")]
        if sender.root == self.clock.system.root:
            return self.serving.to_system(sender, UserReceipt(receipt.id, receipt.target))
        pair = courier.where.get(receipt.id)
        if pair is None:
            return []
        if pair.target != receipt.target:
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a receipt for a message to another system")]
        return [*courier.received(receipt.id), *self._hand_on(pair.target)]

    # Other roots

    def _sideways(self, event: RootMet | RootParted | FromRoot | GiveUp | Unanswered) -> list[Effect]:
        courier = self.courier
        match event:
            case RootMet(root):
                courier.meet(root)
                return [*self._forward(), *(Sideways(root, each) for each in self._own_services())]
            case RootParted(root):
                courier.part(root)
                return self._services_news() if self.services.forget_root(root) else []
            case FromRoot(root, message):
                return self._from_root(root, message) if root in courier.met else []
            case GiveUp(id):
                pair = courier.where.get(id)
                given_up = self._aside(courier.give_up(id))
                return [*given_up, *(self._forward() if pair is None else self._hand_on(pair.target))]
            case Unanswered():
                assert event.link == ROOTS, f"a root asks nobody above, {event}"
                courier.ask_again()
                return [*self._forward(), *self._hand_on(None)]

    def _from_root(self, root: bytes, message: Message) -> list[Effect]:
        """A root speaks of its own systems, and of messages to and from them; whatever else it says is refused."""
        courier = self.courier
        match message:
            case UserMessage(id, _, target) if id.sender.root == root and target.root == self.clock.system.root:
                taken = courier.take(root, message, self.batches.arcs.gens.__contains__)
                return [*taken, *self._hand_on(target)]
            case UserQueued(id):
                return [*courier.queued(root, id), *self._forward()]
            case UserReceipt() | Undelivered():
                return [*self._aside(courier.over(root, message)), *self._forward()]
            case Announce(service) | Deannounce(service) if service.system.root == root:
                return self._services_news() if self.services.take(message) else []
            case Connectivity(system) if system.root == root:
                return self._services_news() if self.services.lost(message) else []
            case Backpressure():
                return []  # it stays, and goes again
            case _:
                return [
                    Refusal(ROOTS, RejectReason.NOT_ALLOWED, f"{type(message).__name__} is not for this root to say")
                ]

    def _forward(self) -> list[Effect]:
        return self._aside(self.courier.forward(lambda context: satisfied(context, self.reached), self._vector))

    def _vector(self) -> Context:
        """What the current tick includes, in words that every root understands."""
        return tuple((Witness(clock, tick),) for clock, tick in sorted(self.others.items()))

    def _aside(self, effects: list[Effect]) -> list[Effect]:
        """What the courier says to its own root is for the sender below."""
        own, found = self.clock.system.root, list[Effect]()
        for each in effects:
            if isinstance(each, Sideways) and each.root == own:
                assert isinstance(each.message, UserReceipt | Undelivered), f"{each} is for nobody"
                found += self.serving.to_system(each.message.id.sender, each.message)
            else:
                found.append(each)
        return found

    def _hand_on(self, target: SystemId | None) -> list[Effect]:
        """To the systems below that are here, or to one: the next message of each sender of another root."""
        effects: list[Effect] = []
        for message in self.courier.heads(target) if self.courier.inbox else ():
            if message.target in self.serving.routes:
                effects += self.serving.pass_down(message) or []
                if message in self.serving.held:
                    effects += self._include_context(message)
        return effects

    def _own_services(self) -> list[Announce]:
        own = self.clock.system.root
        return [each for each in self.services.announcements() if each.service.system.root == own]

    def _tell_roots(self, message: Announce | Deannounce | Connectivity) -> list[Effect]:
        return [Sideways(root, message) for root in sorted(self.courier.met)]

    def expire_service(self, service: Service) -> list[Effect]:
        """Not heard of for too long. What other roots' systems offer lasts as long as the way to their root."""
        register = self.services.registers.get(service)
        if register is None or service.system.root != self.clock.system.root or not self.services.expire(service):
            return []
        self.services_changed = True
        return [Cut(), *self._tell_roots(Deannounce(service, register.gen, register.seq + 1))]

    def _include_context(self, message: UserMessage) -> list[Effect]:
        """The links to its target are told of what they wait for, where it is included already: nothing else would."""
        ways = [link for link in self.serving.routes[message.target] if link in self.serving.links]
        here = [
            each for clause in message.context for each in clause if self.reached(*each) and each.clock != self.clock
        ]
        return [effect for each in here for link in ways for effect in self.serving.include(link, *each)]
