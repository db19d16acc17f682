"""What a root and an edge do for the systems below them: links, questions, waits, and the way to each system.

The two differ in where a value comes from that is not held: a root evaluates it, an edge asks above. So `Serving`
answers what it can from the holdings, remembers who asked for the rest, and leaves getting it to its owner.
"""

from collections.abc import Iterable
from typing import NamedTuple

from echostore.kernel.coherence.directory import Directory, Shared
from echostore.kernel.coherence.events import Drop, Effect, EvictRecord, Flush, Forget, LinkId, Send, Writable
from echostore.kernel.coherence.holdings import Codec, Holdings, Version
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Attached,
    Below,
    Denied,
    FollowsEpoch,
    Frame,
    Gone,
    Linked,
    Message,
    RejectOp,
    RejectReason,
    Spec,
    SystemId,
    Token,
    Turn,
    Update,
    UserMessage,
)
from echostore.kernel.coherence.posting import HELD_MAX, satisfied
from echostore.kernel.coherence.updates import UpdateReader

ROUTES_MAX = 100_000
"""Systems that are reached through this one."""

SHOWN_BYTES_MAX = 6 * 1024 * 1024
"""Credentials of the systems below, together: an edge that comes back shows them all in one message."""

ASKED_MAX = 100_000
"""Questions that wait for an answer from above, of all links."""


class Asker(NamedTuple):
    """Who waits for an index, and the hash of what it holds of it."""

    link: LinkId
    have: Token | None


class Serving:
    """The systems below."""

    __slots__ = (
        "asked",
        "clock",
        "codec",
        "credentials",
        "generations",
        "held",
        "holdings",
        "links",
        "pins",
        "readers",
        "routes",
        "shown_bytes",
        "turns",
        "turns_count",
    )

    def __init__(self, holdings: Holdings, codec: Codec, clock: Arc | None = None) -> None:
        self.holdings = holdings
        self.codec = codec
        self.clock = clock
        self.generations: dict[LinkId, int] = {}
        """Ways that stand; those that are links have a directory too."""
        self.links: dict[LinkId, Directory] = {}
        self.readers: dict[LinkId, UpdateReader] = {}
        self.asked: dict[tuple[Spec, int | None], tuple[Asker, ...]] = {}
        self.routes: dict[SystemId, dict[LinkId, Turn]] = {}
        """The ways to a system. It may have gone over to another link before the old one is known to be gone; until
        then what is for it is sent both ways."""
        self.credentials: dict[tuple[LinkId, Turn], bytes] = {}
        """What each connection below showed, by its link and its turn there. It never changes while the connection lasts."""
        self.shown_bytes = 0
        self.turns: dict[LinkId, int] = {}
        self.turns_count = 0
        self.pins: dict[LinkId, int] = {}
        self.held: tuple[UserMessage, ...] = ()
        """User messages for below that came before their context."""

    def receive(self, event: Flush | Writable | Forget | EvictRecord) -> list[Effect]:
        """What the host decides about one link. Of a link that is gone, nothing."""
        directory = self.links.get(event.link)
        if directory is None:
            return []
        match event:
            case Flush(link):
                return self.flush(link)
            case Writable(_, writable):
                directory.writable = writable
                return self.wake() if writable else []
            case Forget(_, spec):
                directory.forget(spec)
            case EvictRecord(_, spec):
                directory.evict(spec)
        return []

    # Links

    def connect(self, link: LinkId, generation: int) -> list[tuple[SystemId, Turn]]:
        lost = self.close(link)
        self.generations[link] = generation
        self.turns_count += 1
        self.turns[link] = self.turns_count
        self.readers[link] = UpdateReader()
        return lost

    def open(
        self,
        link: LinkId,
        follows: tuple[FollowsEpoch, ...],
        rejected: tuple[RejectOp, ...] = (),
        *,
        vector: bool = False,
    ) -> Send:
        """The link stands, at the current tick. What was rejected meanwhile comes in the same message as the tick."""
        assert self.clock is not None, "a link is opened by a system that knows its root"
        directory = Directory(self.generations[link], self.holdings.cur, vector=vector)
        directory.told.update((each.clock, each.tick) for each in follows)
        self.links[link] = directory
        return self.send(link, Linked(self.clock, self.holdings.cur, follows, rejected))

    def close(self, link: LinkId) -> list[tuple[SystemId, Turn]]:
        """The systems that can't be reached over this link any more."""
        turn = self.turns.pop(link, 0)
        self.generations.pop(link, None)
        self.links.pop(link, None)
        self.readers.pop(link, None)
        self.pins.pop(link, None)
        for key in [key for key, askers in self.asked.items() if any(asker.link == link for asker in askers)]:
            askers = tuple(asker for asker in self.asked[key] if asker.link != link)
            if askers:
                self.asked[key] = askers
            else:
                del self.asked[key]
        for shown in [shown for shown in self.credentials if shown[0] == link]:
            self._forget_shown(*shown)
        lost = [(system, (turn, *ways[link])) for system, ways in self.routes.items() if link in ways]
        for system, _ in lost:
            self._unroute(system, link)
        return lost

    def show(self, link: LinkId, turn: Turn, credential: bytes) -> bool:
        """Remember what a connection below showed. False if there is no room."""
        if (link, turn) in self.credentials:
            return True
        if len(self.credentials) >= ROUTES_MAX or self.shown_bytes + len(credential) > SHOWN_BYTES_MAX:
            return False
        self.credentials[link, turn] = credential
        self.shown_bytes += len(credential)
        return True

    def _forget_shown(self, link: LinkId, turn: Turn) -> None:
        self.shown_bytes -= len(self.credentials.pop((link, turn), b""))

    def route(self, systems: Iterable[Below], link: LinkId) -> bool:
        """Systems are reached through a link from now on. False if there is no room for them."""
        told = list(systems)
        if not all(self.show(link, each.turn, each.credential) for each in told if each.credential):
            return False
        fresh = {each.system: each.turn for each in told}
        if len(self.routes) + len(fresh) > ROUTES_MAX and len({**self.routes, **fresh}) > ROUTES_MAX:
            return False
        for system, turn in fresh.items():
            ways = self.routes.setdefault(system, {})
            known = ways.get(link, turn)
            ways[link] = max(turn, known)
            if known < turn:
                self._forget_shown(link, known)
        return True

    def unroute(self, system: SystemId, link: LinkId, turn: Turn) -> bool:
        """A connection is gone. False if the system is back by now, or was never there."""
        known = self.routes.get(system, {}).get(link)
        if known is None or known > turn:
            return False
        self._unroute(system, link)
        return True

    def _unroute(self, system: SystemId, link: LinkId) -> None:
        ways = self.routes[system]
        self._forget_shown(link, ways.pop(link))
        if not ways:
            del self.routes[system]
        directory = self.links.get(link)
        if directory is not None:
            for clock in [clock for clock in directory.told if clock.system == system]:
                del directory.told[clock]

    def leads_to(self, system: SystemId, link: LinkId) -> bool:
        return link in self.routes.get(system, ())

    def directories(self, system: SystemId) -> list[Directory]:
        """The links over which a system is reached."""
        return [self.links[link] for link in self.routes.get(system, ()) if link in self.links]

    def follow_feed(self, clock: Arc, tick: int) -> None:
        """A clock that is nobody's below: those are told who asked to hear of all, or who wait for it."""
        for each in self.links.values():
            if each.vector or 0 < each.waits.get(clock, 0) <= tick:
                each.follow(clock, tick)

    def waiting_for(self, clock: Arc, tick: int) -> list[Directory]:
        """The links whose lower end waits for a tick of this clock, up to this one."""
        return [each for each in self.links.values() if 0 < each.waits.get(clock, 0) <= tick]

    def send(self, link: LinkId, message: Message) -> Send:
        return Send(link, self.generations[link], message)

    def to_system(self, system: SystemId, message: Message) -> list[Effect]:
        return [self.send(link, message) for link in self.routes.get(system, ())]

    def gather(self, link: LinkId, frame: Frame, reached: int) -> Update | Drop | None:
        """A whole batch, once its frames are there."""
        wrong = self.readers[link].take(frame, reached)
        if wrong is not None:
            return Drop(link, wrong)
        return self.readers[link].next(frame.clock, reached)

    # Questions

    def answer(self, link: LinkId, asked: Acquire) -> list[Effect] | None:
        """The Grant, if a value that fits is held; None if it has to be got."""
        version = self.holdings.at(asked.spec, self.holdings.cur if asked.at is None else asked.at)
        return None if version is None else self._grant(link, asked, version)

    def put_off(self, link: LinkId, asked: Acquire) -> bool:
        """Remember who asked. False if there is no room."""
        key = (asked.spec, asked.at)
        askers = self.asked.get(key, ())
        if not askers and len(self.asked) >= ASKED_MAX:
            return False
        self.asked[key] = (*(each for each in askers if each.link != link), Asker(link, asked.have))
        return True

    def learned(self, spec: Spec, at: int | None) -> list[Effect]:
        """Those who asked for an index are answered, unless what is known of it lies ahead of the current tick."""
        version = self.holdings.newest(spec) if at is None else self.holdings.at(spec, at)
        if version is None or (at is None and version.min > self.holdings.cur):
            return []
        effects: list[Effect] = []
        for asker in self.asked.pop((spec, at), ()):
            effects += self._grant(asker.link, Acquire(spec, at, asker.have), version)
        return effects

    def tell_askers(self, spec: Spec, at: int | None, message: Gone | Denied) -> list[Effect]:
        return [self.send(asker.link, message) for asker in self.asked.pop((spec, at), ())]

    def denied(self, spec: Spec, reason: RejectReason) -> list[Effect]:
        """Nobody gets this index."""
        keys = [key for key in self.asked if key[0] == spec]
        return [effect for key in keys for effect in self.tell_askers(*key, Denied(spec, reason))]

    def _grant(self, link: LinkId, asked: Acquire, version: Version) -> list[Effect]:
        directory = self.links[link]
        grant = directory.grant(asked, version, self.codec)
        effects: list[Effect] = [self.send(link, grant)]
        if directory.must_advance(grant):
            effects += self.flush(link)
        return effects

    # Updates

    def mark(self, specs: Iterable[Spec]) -> None:
        """Something happened to these indexes."""
        for spec in specs:
            for directory in self.links.values():
                directory.mark(spec)

    def mark_all(self) -> None:
        """Nothing is certain any more."""
        for directory in self.links.values():
            directory.marks.update(directory.records)

    def tell(self) -> list[Effect]:
        """Flush all links for which an update would say something. What those that stand alike are told is worked out
        once."""
        shared: Shared = {}
        return [effect for link in self.due() for effect in self.flush(link, shared)]

    def flush(self, link: LinkId, shared: Shared | None = None) -> list[Effect]:
        """Tell a link all that is new, if it can take it."""
        directory = self.links.get(link)
        if directory is None or self.clock is None:
            return []
        if not directory.writable:
            directory.wait(self.clock, self.holdings.cur)
            return []
        update = directory.update(self.clock, self.holdings, self.codec, shared)
        if update is None:
            return []
        if directory.waits:
            reached = [clock for clock, tick in directory.waits.items() if directory.reached(self.clock, clock, tick)]
            for clock in reached:
                del directory.waits[clock]
        return [self.send(link, update), *(self.release_messages() if self.held else ())]

    def wait(self, link: LinkId, clock: Arc, tick: int) -> list[Effect]:
        """Move a link to a tick that it waits for, now or when it comes."""
        directory = self.links[link]
        assert self.clock is not None, "links stand only where the root is known"
        if not directory.reached(self.clock, clock, tick):
            directory.wait(clock, tick)
        return self.wake()

    def include(self, link: LinkId, clock: Arc, tick: int) -> list[Effect]:
        """The current tick includes a tick of another clock that is waited for below, and nothing new would say so."""
        directory = self.links[link]
        assert self.clock is not None, "links stand only where the root is known"
        if directory.reached(self.clock, clock, tick):
            return []
        if directory.sent < self.holdings.cur:  # the update to the current tick says it
            directory.follow(clock, tick)
            return self.wait(link, clock, tick)
        directory.told[clock] = tick
        directory.waits.pop(clock, None)
        said = (FollowsEpoch(clock, tick),)
        return [self.send(link, Attached((), clock.system, directory.sent, said)), *self.release_messages()]

    def wake(self) -> list[Effect]:
        """Move on all links that wait for something that is here."""
        shared: Shared = {}
        return [effect for link in list(self.links) if self._has_waited(link) for effect in self.flush(link, shared)]

    def _has_waited(self, link: LinkId) -> bool:
        """Without this, a system below that only waits would wait for ever: nothing else moves its link."""
        directory = self.links[link]
        if not directory.waits or not directory.writable:
            return False
        return any(
            tick <= (self.holdings.cur if clock == self.clock else directory.due.get(clock, 0))
            for clock, tick in directory.waits.items()
        )

    def due(self) -> list[LinkId]:
        """Links for which an update would say something."""
        return [
            link
            for link, directory in self.links.items()
            if directory.writable and directory.sent < self.holdings.cur and directory.has_news()
        ]

    # User messages

    def pass_down(self, message: UserMessage) -> list[Effect] | None:
        """Towards its target below, once the next system has been told of the context. None: too many wait."""
        ways = self._open_ways(message)
        if ways:
            return [self.send(link, message) for link in ways]
        if message.id in {each.id for each in self.held}:
            return []
        if len(self.held) >= HELD_MAX:
            return None
        self.held = (*self.held, message)
        for directory in self.directories(message.target):
            for clause in message.context:
                for witness in clause:
                    directory.wait(witness.clock, witness.tick)
        return self.wake()

    def release_messages(self) -> list[Effect]:
        """Held messages whose context is there by now; those whose target is gone are dropped, and come again."""
        ready = [(each, self._open_ways(each)) for each in self.held]
        self.held = tuple(each for each, ways in ready if not ways and each.target in self.routes)
        return [self.send(link, each) for each, ways in ready for link in ways]

    def _open_ways(self, message: UserMessage) -> list[LinkId]:
        """Links to the target whose lower end includes the context."""
        return [link for link in self.routes.get(message.target, ()) if self._may_pass(message, link)]

    def _may_pass(self, message: UserMessage, link: LinkId) -> bool:
        directory, clock = self.links.get(link), self.clock
        if directory is None or clock is None:
            return False
        return satisfied(message.context, lambda other, tick: directory.reached(clock, other, tick))
