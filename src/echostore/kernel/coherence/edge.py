"""An edge: a cache between a root and many leaves. It owns nothing, mints nothing, and may vanish at any moment.

It uses the root's own ticks, so a leaf may change its edge without any translation. Values go down as far as the edge
itself holds them (inclusion, rule U4); batches and questions that it can't answer go up unchanged. A leaf is linked
only once the edge has reached what the leaf has seen, and knows how much of the leaf's batches that includes.
"""

from collections.abc import Iterable
from dataclasses import replace

from echostore.kernel.coherence.cache import Cache
from echostore.kernel.coherence.events import (
    UP,
    ChildOpened,
    Drop,
    Effect,
    Event,
    EvictEntry,
    EvictRecord,
    Flush,
    Forget,
    LinkClosed,
    LinkId,
    Opening,
    Received,
    Refusal,
    Send,
    Unanswered,
    Writable,
)
from echostore.kernel.coherence.guard import Guard, Proofs
from echostore.kernel.coherence.holdings import Codec
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
    Deannounce,
    Denied,
    EndUpdate,
    FollowsEpoch,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    LaneItem,
    Linked,
    Message,
    NotifyReplicated,
    NullUpdate,
    Pin,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Spec,
    SystemId,
    Touched,
    Turn,
    Undelivered,
    Update,
    UserMessage,
    UserReceipt,
    WaitForEpoch,
)
from echostore.kernel.coherence.serving import ROUTES_MAX, Serving
from echostore.kernel.coherence.updates import UpdateReader


class Edge:
    """`receive(event)` returns effects."""

    __slots__ = ("attaching", "cache", "guard", "nonce", "reader", "rejected", "ripe", "serving", "system", "waiting")

    def __init__(self, codec: Codec, *, proofs: Proofs | None = None) -> None:
        """`proofs` says who is at the other end of each link below; without it everybody is believed."""
        self.cache = Cache(codec)
        self.serving = Serving(self.cache.holdings, codec)
        self.guard = None if proofs is None else Guard(proofs, self.serving)
        self.reader = UpdateReader()
        self.system: SystemId | None = None
        self.nonce: int | None = None
        self.attaching: dict[LinkId, Attach] = {}
        """Links below that do not stand yet, and what they asked."""
        self.waiting: tuple[Attached, ...] = ()
        """What the root said of systems below, at ticks that are not reached yet."""
        self.rejected: tuple[RejectOp, ...] = ()
        """For systems below whose links do not stand yet: told when they do."""
        self.ripe: frozenset[Spec] = frozenset()
        """Indexes that are known ahead of the current tick, and asked for."""

    def receive(self, event: Event) -> list[Effect]:
        match event:
            case Received(link, generation, message):
                if link == UP:
                    return self._take_from_above(generation, message)
                if self.serving.generations.get(link) != generation:
                    return []
                return self._take_from_below(link, message)
            case Opening(link, generation, nonce):
                return self._opening(generation, nonce)
            case ChildOpened(link, generation):
                self.attaching.pop(link, None)
                return self._lost(self.serving.connect(link, generation))
            case LinkClosed(link):
                return self._closed(link)
            case Flush() | Writable() | Forget() | EvictRecord():
                return self.serving.receive(event)
            case EvictEntry(spec):
                self._evict(spec)
                return []
            case Unanswered():
                return self._ask_again()
            case _:
                raise AssertionError(f"{event} does not happen to an edge")

    # The way up

    def _up(self, message: Message | None) -> list[Effect]:
        generation = self.cache.generation
        return [] if message is None or generation is None else [Send(UP, generation, message)]

    def _opening(self, generation: int, nonce: int) -> list[Effect]:
        self._break_off()
        self.cache.opening = generation
        if self.nonce is None:
            self.nonce = nonce
        return [Send(UP, generation, self._attach())]

    def _attach(self) -> Attach:
        assert self.nonce is not None, "an edge asks once a way up stands"
        vector = any(each.vector for each in self.serving.links.values())
        return Attach(self.nonce, self.system, False, self.cache.cur, self._below(), vector=vector)

    def _below(self) -> tuple[Below, ...]:
        """All systems below, each by its latest connection and with what it showed there."""
        serving = self.serving
        found = []
        for system, ways in sorted(serving.routes.items()):
            link = max(ways, key=lambda each: (serving.turns[each], ways[each]))
            shown = serving.credentials.get((link, ways[link]), b"")
            found.append(Below(system, (serving.turns[link], *ways[link]), shown))
        return tuple(found)

    def _break_off(self) -> None:
        """What was live is live no more, here and so below."""
        self.cache.close()
        self.reader.clear()
        self.waiting = self.rejected = ()
        self.serving.mark_all()

    def _closed(self, link: LinkId) -> list[Effect]:
        if link == UP:
            self._break_off()
            return []
        self.attaching.pop(link, None)
        return self._lost(self.serving.close(link))

    def _lost(self, systems: list[tuple[SystemId, Turn]]) -> list[Effect]:
        """Systems have left: nothing about them is kept, and the root is told."""
        follows, gone = self.cache.follows, {system for system, _ in systems if system not in self.serving.routes}
        for clock in [clock for clock in follows if clock.system in gone]:
            del follows[clock]
        told = [Connectivity(system, affects_all_services=True, turn=turn) for system, turn in systems]
        return [effect for each in told for effect in self._up(each)]

    def _ask_again(self) -> list[Effect]:
        if self.cache.opening is not None:
            return [Send(UP, self.cache.opening, self._attach())]
        questions: list[Message] = [*self.cache.ask_again(), *self._attaches()]
        return [effect for each in questions for effect in self._up(each)]

    def _attaches(self) -> list[Attach]:
        return [self._forwarded(link, attach) for link, attach in self.attaching.items()]

    def _forwarded(self, link: LinkId, attach: Attach) -> Attach:
        """An Attach as it is passed on: with the turn of the link it came by."""
        turn = self.serving.turns[link]
        below = tuple(each._replace(turn=(turn, *each.turn)) for each in attach.below)
        return replace(attach, turn=(turn, *attach.turn), below=below)

    def _evict(self, spec: Spec) -> None:
        """U4: what is not held is not vouched for."""
        self.cache.holdings.evict(spec)
        self.serving.mark([spec])

    # From above

    def _take_from_above(self, generation: int, message: Message) -> list[Effect]:
        if isinstance(message, Linked):
            return self._linked(generation, message)
        if isinstance(message, GrantSystemId):  # comes before Linked
            return self._named(message) if generation in (self.cache.opening, self.cache.generation) else []
        if generation != self.cache.generation:
            return []
        serving = self.serving
        match message:
            case Update():
                return self._update(message)
            case BeginUpdate() | LaneItem() | EndUpdate() | NullUpdate():
                return self._frame(message)
            case Grant():
                return self._granted(message)
            case Gone(spec, at):
                return serving.tell_askers(spec, at, message) if self.cache.take_gone(message) else []
            case Denied(spec, reason):
                self.cache.take_denied(message)
                return serving.denied(spec, reason)
            case Attached():
                return self._attached(message)
            case GrantArc(arc):
                return serving.to_system(arc.system, message)
            case NotifyReplicated(clock):
                return serving.to_system(clock.system, message)
            case RejectOp():
                self._reject([message])
                return []
            case UserMessage():
                return self._user_message(UP, message)
            case UserReceipt(id) | Undelivered(id):
                return serving.to_system(id.sender, message)
            case Connectivity() | Backpressure():
                return [serving.send(link, message) for link in serving.links]
            case _:
                return [Refusal(UP, RejectReason.MALFORMED, f"{type(message).__name__} does not travel downwards")]

    def _linked(self, generation: int, linked: Linked) -> list[Effect]:
        questions = self.cache.open(generation, linked)
        if questions is None:
            return []
        self.serving.clock = linked.clock
        self._follow(linked.follows)
        self._reject(linked.rejected)
        again: list[Message] = [*questions, *self._attaches()]
        return [*(effect for each in again for effect in self._up(each)), *self.serving.wake()]

    def _named(self, grant: GrantSystemId) -> list[Effect]:
        if grant.turn:
            link = self._link_of(grant.turn)
            return [] if link is None else [self.serving.send(link, replace(grant, turn=grant.turn[1:]))]
        if grant.nonce == self.nonce:
            self.system = grant.system
        return []

    def _link_of(self, turn: Turn) -> LinkId | None:
        """The link that a turn begins with, if it is still the same connection."""
        return next((link for link, each in self.serving.turns.items() if turn[:1] == (each,)), None)

    def _frame(self, frame: BeginUpdate | LaneItem | EndUpdate | NullUpdate) -> list[Effect]:
        wrong = self.reader.take(frame, self.cache.cur)
        if wrong is not None:
            return [Drop(UP, wrong)]
        effects: list[Effect] = []
        while (update := self.reader.next(frame.clock, self.cache.cur)) is not None:
            effects += self._update(update)
        return effects

    def _update(self, update: Update) -> list[Effect]:
        if not self.cache.may_come_from_above(update):
            return [Drop(UP, "operations do not travel downwards")]
        specs = self.cache.apply(update)
        if specs is None:
            return []
        serving = self.serving
        serving.mark(specs)
        self._follow(update.follows)
        self._reject(item for item in update.items if isinstance(item, RejectOp))
        effects = [effect for spec in sorted(self.ripe) for effect in self._answer(spec)]
        return [*effects, *self._attach_below(), *serving.wake(), *serving.release_messages()]

    def _follow(self, follows: tuple[FollowsEpoch, ...]) -> None:
        """Each system below hears of its own clocks, and of those that mean the same everywhere if it wants to."""
        serving = self.serving
        for each in follows:
            if each.clock.gen == 0:
                serving.follow_feed(each.clock, each.tick)
                continue
            for directory in serving.directories(each.clock.system):
                directory.follow(each.clock, each.tick)
            for directory in serving.waiting_for(each.clock, each.tick):
                directory.follow(each.clock, each.tick)

    def _reject(self, rejected: Iterable[RejectOp]) -> None:
        """Passed on with the update that says so below; of a system that is about to be linked, with its link."""
        coming = {attach.system for attach in self.attaching.values()}
        for each in rejected:
            system = each.op.arc.system
            for directory in self.serving.directories(system):
                directory.rejections += (each,)
            if system in coming:
                self.rejected = (*self.rejected, each)[-ROUTES_MAX:]

    def _granted(self, grant: Grant) -> list[Effect]:
        taken = self.cache.take_grant(grant)
        if isinstance(taken, Acquire):
            return self._up(taken)
        if not taken:
            return []
        evicted = self.cache.make_room()
        if evicted is not None:
            self.serving.mark([evicted])
        return self._answer(grant.spec) if grant.at is None else self.serving.learned(grant.spec, grant.at)

    def _answer(self, spec: Spec) -> list[Effect]:
        effects = self.serving.learned(spec, None)
        if (spec, None) in self.serving.asked:
            self.ripe |= {spec}
        else:
            self.ripe -= {spec}
        return effects

    def _attached(self, attached: Attached) -> list[Effect]:
        """The root knows a system below: it has a way from now on, and a link once this tick is reached."""
        if not attached.turn:
            return self._included(attached)
        link = self._link_of(attached.turn)
        if link is None or not self.serving.route([Below(attached.system, attached.turn[1:])], link):
            return []
        if len(attached.turn) > 1:
            passed = self.serving.send(link, replace(attached, turn=attached.turn[1:]))
            clock = self.serving.clock
            if clock is None or link not in self.serving.links:
                return [passed]
            return [passed, *self.serving.wait(link, clock, attached.tick)]  # the edge below waits for that tick
        if attached not in self.waiting and len(self.waiting) < ROUTES_MAX:
            self.waiting = (*self.waiting, attached)
        return self._attach_below()

    def _included(self, attached: Attached) -> list[Effect]:
        """What the current tick includes of other clocks: whoever waits for it below is told."""
        if attached.tick > self.cache.cur:
            return []
        self.cache.follow(attached.follows)
        waiting = [
            (link, each)
            for each in attached.follows
            for link, directory in self.serving.links.items()
            if 0 < directory.waits.get(each.clock, 0) <= each.tick
        ]
        return [effect for link, each in waiting for effect in self.serving.include(link, each.clock, each.tick)]

    def _attach_below(self) -> list[Effect]:
        """Link the systems of which enough is known at the current tick."""
        effects: list[Effect] = []
        known = [each for each in self.waiting if each.tick <= self.cache.cur]
        self.waiting = tuple(each for each in self.waiting if each.tick > self.cache.cur)
        for each in known:
            link = self._link_of(each.turn)
            attach = None if link is None else self.attaching.pop(link, None)
            if link is None or attach is None:
                continue
            self.cache.follow(each.follows)
            if link not in self.serving.links and self.serving.route(attach.below, link):
                later = tuple(told for told in self.rejected if told.op.arc.system == each.system)
                rejected = (*each.rejected, *(told for told in later if told not in each.rejected))
                follows = self._follows_of(each)
                effects.append(self.serving.open(link, follows, rejected, vector=attach.vector))
        coming = {attach.system for attach in self.attaching.values()}
        self.rejected = tuple(told for told in self.rejected if told.op.arc.system in coming)
        return effects

    def _follows_of(self, attached: Attached) -> tuple[FollowsEpoch, ...]:
        """What the current tick includes: as the root said, or more where later updates did."""
        known = self.cache.follows
        return tuple(FollowsEpoch(each.clock, max(each.tick, known.get(each.clock, 0))) for each in attached.follows)

    # From below

    def _take_from_below(self, link: LinkId, message: Message) -> list[Effect]:
        serving = self.serving
        refused = None if self.guard is None else self.guard.refusal(link, message)
        if refused is not None and self.guard is not None:
            return self.guard.refuse(link, message, refused)
        if isinstance(message, Attach):
            return self._attach_above(link, message)
        if link not in serving.links:
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, f"{type(message).__name__} before Linked")]
        match message:
            case Acquire():
                return self._acquire(link, message)
            case Update(clock) | BeginUpdate(clock) | LaneItem(clock) | EndUpdate(clock) | NullUpdate(clock):
                return self._pass_up(link, clock.system, message)
            case ReleaseArc(arc):
                return self._pass_up(link, arc.system, message)
            case Announce(service) | Deannounce(service):
                return self._pass_up(link, service.system, message)
            case Connectivity(system, _, turn):
                gone = [(system, (serving.turns[link], *turn))]
                return self._lost(gone) if serving.unroute(system, link, turn) else []
            case Touched(specs):
                for spec in specs:
                    serving.links[link].touch(spec)
                return self._up(message)
            case Pin():
                return self._pin(link, message)
            case WaitForEpoch(clock, tick):
                return self._wait(link, clock, tick)
            case UserMessage():
                return self._user_message(link, message)
            case UserReceipt(id, target):
                if not serving.leads_to(target, link):
                    return [
                        Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a receipt of a system that is not reached this way")
                    ]
                return serving.to_system(id.sender, UserReceipt(id, target)) or self._up(message)
            case _:
                return [Refusal(link, RejectReason.MALFORMED, f"{type(message).__name__} does not travel upwards")]

    def _attach_above(self, link: LinkId, attach: Attach) -> list[Effect]:
        """Pass on who is below, with what each showed. Only the root knows whose each system is."""
        serving, effects = self.serving, list[Effect]()
        if self.guard is not None:
            proven = tuple(each for each in attach.below if self.guard.proves(link, each) is not None)
            lies = len(attach.below) - len(proven)
            effects += [Refusal(link, RejectReason.NOT_ALLOWED, "a system that did not show itself")] * lies
            attach = replace(attach, below=proven)
        if attach.credential and not serving.show(link, attach.turn, attach.credential):
            return [*effects, serving.send(link, Backpressure("attach", 30.0))]
        if not attach.turn:
            self.attaching[link] = attach
        elif attach.vector and link in serving.links:
            serving.links[link].vector = True
        return [*effects, *self._up(self._forwarded(link, attach))]

    def _acquire(self, link: LinkId, asked: Acquire) -> list[Effect]:
        """Answered from what is held; else asked above, once for all who ask."""
        answer = self.serving.answer(link, asked)
        if answer is not None:
            return answer
        if not self.serving.put_off(link, asked):
            return [self.serving.send(link, Backpressure("acquire", 1.0))]
        return self._up(self.cache.want(asked.spec, asked.at))

    def _pass_up(self, link: LinkId, system: SystemId, message: Message) -> list[Effect]:
        if not self.serving.leads_to(system, link):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "of a system that is not reached this way")]
        return self._up(message)

    def _pin(self, link: LinkId, pin: Pin) -> list[Effect]:
        """Above, the oldest pin stands for all."""
        pins = self.serving.pins
        if pin.tick is None:
            pins.pop(link, None)
        else:
            pins[link] = pin.tick
        oldest = min(pins.values(), default=None)
        self.cache.holdings.floor = oldest
        return self._up(Pin(oldest))

    def _wait(self, link: LinkId, clock: Arc, tick: int) -> list[Effect]:
        """Here, or on to where it may be: nothing but the reader waits."""
        if clock != self.cache.clock and self.cache.reached(clock, tick):
            return self.serving.include(link, clock, tick)
        effects = self.serving.wait(link, clock, tick)
        if not self.cache.reached(clock, tick):
            effects += self._up(WaitForEpoch(clock, tick))
        return effects

    def _user_message(self, link: LinkId, message: UserMessage) -> list[Effect]:
        if link != UP and not self.serving.leads_to(message.id.sender, link):
            return [Refusal(link, RejectReason.UNKNOWN_SYSTEM, "a message of a system that is not reached this way")]
        if message.target not in self.serving.routes:
            return [] if link == UP else self._up(message)
        if message.signature:  # it was checked here, and is for nobody below
            message = replace(message, signature=b"")
        passed = self.serving.pass_down(message)
        if passed is None:
            return [] if link == UP else [self.serving.send(link, Backpressure("messages", 1.0))]
        if message in self.serving.held:
            for clause in message.context:
                for witness in clause:
                    for way in self.serving.routes[message.target]:
                        if way in self.serving.links:
                            passed += self._wait(way, witness.clock, witness.tick)
        return passed
