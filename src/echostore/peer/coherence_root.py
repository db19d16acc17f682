"""CoherenceRoot: one party of a peer as the root of a tree of thin clients.

    leaf or edge --message--> Root machine --effects--> queries, batches, ticks --events--> Root machine --> Send

    Evaluate   a query, kept live from then on (coherence_watch)
    Commit     a message of the data feed, with its account in the same commit (coherence_batches)
    Advanced   a tick: all that was applied so far is durable, and these indexes have other values

A tick is cut when somebody asks about a state that has moved on, when a batch was written, and else at most every
`TICK_S` or every `TICK_ITEMS` changed items. It is exposed only after a flush, and numbered from a reserve that is on
disk before (coherence_ledger), so that nothing a leaf saw is ever taken back and no number names two states.

All methods run in one thread, the service's; only `_changed` is called by whoever writes to the party, and takes a note
under the peer's lock.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Protocol

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
    Excluded,
    Forget,
    FromRoot,
    GiveUp,
    Keep,
    LinkClosed,
    LinkId,
    Received,
    Refusal,
    RootMet,
    RootParted,
    Send,
    Sideways,
    Unanswered,
    Unavailable,
    Unwatch,
    Writable,
)
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    Backpressure,
    BeginUpdate,
    Denied,
    EndUpdate,
    LaneItem,
    Message,
    NullUpdate,
    RejectReason,
    ReleaseArc,
    Service,
    Spec,
    SystemId,
    Update,
)
from echostore.kernel.coherence.quotas import Quotas
from echostore.kernel.coherence.root import WINDOW_TICKS, Root
from echostore.kernel.coherence.services import SERVICE_TTL_S, SERVICES_SPEC
from echostore.kernel.errors import TooLarge
from echostore.kernel.ids import DeviceKey, FeedId, ItemId
from echostore.mesh.coherence_numbers import ThinNumbers
from echostore.peer.coherence_batches import BatchWriter, over_quota
from echostore.peer.coherence_exclusions import ExclusionWatch
from echostore.peer.coherence_feeds import FeedClocks
from echostore.peer.coherence_ledger import CoherenceLedger, root_system
from echostore.peer.coherence_mail import MailRows
from echostore.peer.coherence_rights import LinkRights
from echostore.peer.coherence_watch import IndexWatch
from echostore.wire.capabilities import Grants
from echostore.wire.index_spec import (
    FENCE_SPEC,
    REVOCATIONS_SPEC,
    IndexQuery,
    TickCodec,
    index_query,
    revocations_value,
)
from echostore.wire.items import encode_record

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

TICK_S = 0.01
"""At most so often is a tick cut for its own sake."""

TICK_ITEMS = 256
"""So many changed items make a tick at once."""

ANNOUNCE_S = SERVICE_TTL_S

IDLE_S = 60.0
"""An index that no link has a record of is watched for so long, in case it is asked for again."""

WATCHED_MAX = 250_000
"""Watched indexes. One more takes the place of the oldest."""

ACQUIRES_PER_S, ACQUIRES_BURST = 2_000.0, 20_000.0
"""Questions of one link. A leaf that reconnects asks for all it holds at once."""

ATTACHES_PER_S, ATTACHES_BURST = 100.0, 10_000.0
"""Systems that attach over one link: each may cost a name for ever."""

COMMITS_WAITING_MAX = 256
"""Batches that wait for their quota or their turn, of all links; beyond, links that publish are not read."""


class Outlet(Protocol):
    """Where a root's messages go; the service."""

    def send(self, link: LinkId, generation: int, message: Message) -> None: ...

    def drop(self, link: LinkId, detail: str) -> None:
        """End a link that broke a rule."""

    def aside(self, root: bytes, message: Message) -> None:
        """To another root, if it is connected."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call in the service's thread after a while. May be called from any thread."""


class CoherenceRoot:
    """Binds the Root machine to a party."""

    def __init__(self, party: "Party", outlet: Outlet, *, now: Callable[[], float] = time.monotonic) -> None:
        self.party = party
        self._outlet = outlet
        self._now = now
        peer = party.peer
        device_key = peer.keys.key(DeviceKey(peer.device))
        self._quotas = Quotas()
        self._commits: deque[tuple[Commit, Grants | None]] = deque()
        self._commits_at_s: float | None = None
        self._cut_due = False
        self._last_cut_s = 0.0
        self._writers: dict[Arc, Grants | None] = {}
        self._heard: dict[Service, float] = {}
        self._idle: dict[Spec, float] = {}
        self._types: deque[tuple[int, frozenset[str] | None]] = deque()
        """Ticks of the window with the types of items that changed in them; None: any may have."""
        self.refusals: dict[str, int] = {}
        self.acquires = 0
        self._last_asked: tuple[Spec | None, IndexQuery | None] = (None, None)
        with party.reading() as runtime:
            writer = runtime.data.cursor.key if runtime.data is not None else peer.device
            self.system: SystemId = root_system(party.key, writer)
            self.feed: bytes = writer[:8]
            self.device: bytes = device_key.public
            self._ledger = CoherenceLedger(runtime.feeds, self.system)
            self.rights = LinkRights(party)
            runtime.flush()
            tick, self._reserved_end = self._ledger.start()
            self._codec = TickCodec()
            batches = self._ledger.load()
            self.root = Root(self.system, self._codec, tick=tick, batches=batches, proofs=self.rights)
            self._mail = MailRows(runtime.feeds, self.system)
            self.root.courier.restore(self._mail.load())
            self._feeds = FeedClocks(runtime, party.key, FeedId(self.feed))
            self.root.others.update((each.clock, each.tick) for each in self._feeds.news())
            self.watch = IndexWatch(runtime.source, sign=device_key.sign, record=self._record)
            self._batches = BatchWriter(party, self._ledger)
            self.exclusions = ExclusionWatch(self._ledger, FeedId(self.feed))
            self.exclusions.forget_settled(runtime)
            self._touched: set[ItemId] = set()
            self._known_from = tick
            self._end = party.live.listen(self._changed)
            runtime.processor.on_revocation.append(self._revoked)
            runtime.processor.on_admission.append(self._admission_moved)
        self._outlet.later(0.0, self.cut)  # what was excluded while nobody served is told from here on

    @property
    def tick(self) -> int:
        return self.root.holdings.cur

    @property
    def full(self) -> bool:
        """Whether so many batches wait that no more should be read."""
        return len(self._commits) >= COMMITS_WAITING_MAX

    # links

    def open_link(self, link: LinkId, generation: int, grants: Grants, key: bytes) -> None:
        self.rights.open(link, grants, key)
        self._happens(ChildOpened(link, generation))

    def close_link(self, link: LinkId) -> None:
        self.rights.close(link)
        self._happens(LinkClosed(link))

    def writable(self, link: LinkId, writable: bool) -> None:
        self._happens(Writable(link, writable))

    def receive(self, link: LinkId, generation: int, message: Message) -> None:
        """A message of a link that stands."""
        grants = self.rights.grants.get(link)
        if grants is None:
            return
        if self.root.serving.generations.get(link) != generation:
            self._count("foreign-generation")
            return
        if not self._may_ask(link, generation, message, grants):
            return
        kept = self._kept_of(message)
        effects = self.root.receive(Received(link, generation, message))
        if self._kept_of(message) != kept:
            self._save([self._named_by(message)])
        self._note(link, message, effects)
        self._perform(effects)
        if isinstance(message, Acquire) and message.spec.startswith(FENCE_SPEC):  # asked for once, and never again
            self._perform(self.root.receive(Forget(link, message.spec)))
            self._perform(self.root.receive(EvictEntry(message.spec)))
        self._tell()

    def _may_ask(self, link: LinkId, generation: int, message: Message, grants: Grants) -> bool:
        """Whether a link may read what it asks for, and asks no more than its quota. What it may say the kernel decides."""
        if isinstance(message, Acquire):
            self.acquires += 1
            wait_s = self._charge(b"acquire " + link.encode(), ACQUIRES_PER_S, ACQUIRES_BURST)
            if wait_s:
                self._outlet.send(link, generation, Backpressure("acquire", wait_s))
                return False
            reason = self.rights.why_not_read(message.spec, grants, self._asked)
            if reason is not None:
                self._count(reason)
                self._outlet.send(link, generation, Denied(message.spec, reason))
            return reason is None
        if isinstance(message, Attach):
            wait_s = self._charge(b"attach " + link.encode(), ATTACHES_PER_S, ATTACHES_BURST)
            if wait_s:
                self._outlet.send(link, generation, Backpressure("attach", wait_s))
            return not wait_s
        return True

    def _note(self, link: LinkId, message: Message, effects: Iterable[Effect]) -> None:
        """Of what was taken: by whose rights a batch is written, and when a service was heard of."""
        if isinstance(message, Update | BeginUpdate | LaneItem | EndUpdate | NullUpdate):
            if self.root.serving.leads_to(message.clock.system, link):
                rights = self.rights.of_system(link, message.clock.system, self.root.serving)
                self._writers[message.clock] = rights
        elif isinstance(message, Announce) and not any(isinstance(each, Refusal) for each in effects):
            self._heard[message.service] = self._now()

    def _asked(self, spec: Spec) -> IndexQuery:
        """What a spec asks for. Each step of a question wants to know, and reading it is much of the work."""
        known, asked = self._last_asked
        if known != spec or asked is None:
            asked = self.watch.asked(spec) or index_query(spec)
            self._last_asked = (spec, asked)
        return asked

    def _charge(self, key: bytes, rate: float, burst: float) -> float:
        return self._quotas.charge({key: 1}, rate=rate, burst=burst, now=self._now())

    def _named_by(self, message: Message) -> SystemId | None:
        """The system whose names and arcs a message may change."""
        if isinstance(message, ReleaseArc):
            return message.arc.system
        if isinstance(message, Attach):
            return message.system or self.root.batches.arcs.nonces.get(message.nonce)
        return None

    def _kept_of(self, message: Message) -> tuple[object, ...] | None:
        """What is on disk of that system: names, owners, arcs and releases are kept before anybody hears of them."""
        system, arcs = self._named_by(message), self.root.batches.arcs
        if system is None or system not in arcs.gens:
            return None
        return system, arcs.owners.get(system), arcs.asked.get(system), tuple(arcs.of_system(system))

    def _save(self, systems: Iterable[SystemId | None]) -> None:
        with self.party.reading():
            self._ledger.save_systems([each for each in systems if each is not None], self.root.batches.arcs)

    # other roots

    def root_met(self, root: bytes) -> None:
        self._happens(RootMet(root))

    def root_parted(self, root: bytes) -> None:
        self._happens(RootParted(root))

    def from_root(self, root: bytes, message: Message) -> None:
        self._happens(FromRoot(root, message))

    # effects

    def _happens(self, event: Event) -> None:
        self._perform(self.root.receive(event))
        self._tell()

    def _perform(self, effects: Iterable[Effect]) -> None:
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case Send(link, generation, message):
                    self._outlet.send(link, generation, message)
                case Evaluate(spec, at):
                    todo.extend(self._evaluate(spec, at))
                case Unwatch(spec):
                    with self.party.lock:
                        self.watch.unwatch(spec)
                case Commit():
                    self._commits.append((effect, self._writers.get(effect.clock)))
                    self._commit_soon(0.0)
                case Refusal(_, reason, _):
                    self._count(reason)
                case Drop(link, detail):
                    self._outlet.drop(link, detail)
                case Cut():
                    todo.extend(self._cut(force=True))
                case Keep(rows):
                    with self.party.lock:
                        self._mail.keep(rows, self.party.peer.now_ms())
                case Sideways(root, message):
                    self._outlet.aside(root, message)
                case _:
                    raise AssertionError(f"{effect} is not for a root's host")

    def _count(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def _tell(self) -> None:
        """Bring all links up to the current tick for which there is something to say."""
        self._perform(self.root.serving.tell())

    # indexes

    def _evaluate(self, spec: Spec, at: int | None) -> list[Effect]:
        """The index now; and how far back it was the same."""
        with self.party.reading():
            effects = self._cut()
            cur = self.tick
            special = spec == REVOCATIONS_SPEC or spec.startswith(SERVICES_SPEC)
            first = cur if special else self._unchanged_since(self._asked(spec))
            if at is not None and at < first:
                return [*effects, *self.root.receive(Unavailable(spec, at, None))]
            if spec.startswith(SERVICES_SPEC):
                value = self.root.services.value(spec)
            elif special:
                value = revocations_value(self.party.capabilities.revoked())
            else:
                try:
                    value, gives_way = self.watch.watch(spec, self._asked(spec))
                except TooLarge:
                    self._count(RejectReason.TOO_LARGE)
                    return [*effects, *self.root.receive(Unavailable(spec, at, RejectReason.TOO_LARGE))]
                if gives_way is None and len(self.watch) > WATCHED_MAX:
                    gives_way = self.watch.oldest()
                if gives_way is not None:
                    effects += self.root.receive(EvictEntry(gives_way))
            return [*effects, *self.root.receive(Evaluated(spec, first, cur, value))]

    def _unchanged_since(self, asked: IndexQuery) -> int:
        """The first tick of the window from which on no item changed that could concern the index."""
        type = self.watch.type_of(asked)
        if type is None:
            return self._types[-1][0] if self._types else self._known_from
        for tick, types in reversed(self._types):
            if types is None or type in types:
                return tick
        return self._known_from

    def _record(self, item: ItemId) -> bytes:
        record = self.party.runtime.state.record(item)
        assert record is not None, f"a row without a record: {item.hex()}"
        return encode_record(record).SerializeToString(deterministic=True)

    # ticks

    def _changed(self, items: Set[ItemId]) -> None:
        """Whoever writes tells, under the peer's lock."""
        few = len(self._touched) < TICK_ITEMS
        self._touched |= items
        many = len(self._touched) >= TICK_ITEMS
        if not self._cut_due or (few and many):
            self._cut_due = True
            due_s = 0.0 if many else max(0.0, self._last_cut_s + TICK_S - self._now())
            self._outlet.later(due_s, self.cut)

    def _admission_moved(self) -> None:
        """Under the peer's lock: blocks count that did not, or don't any more."""
        self._outlet.later(0.0, self.cut)

    def cut(self) -> None:
        """Cut a tick, if anything happened, and tell everybody."""
        if not self.party.runtime.closed:
            self._perform(self._cut())
            self._tell()

    def _cut(self, *, force: bool = False) -> list[Effect]:
        with self.party.reading() as runtime:
            if runtime.writable:
                runtime.flush()
            return self._advance(runtime, force=force)

    def _advance(self, runtime: "PartyRuntime", *, force: bool) -> list[Effect]:
        """The next tick, if anything happened; all that it holds is on disk."""
        touched, self._touched = self._touched, set()
        self._cut_due = False
        if self._batches.doubtful:
            self._batches.doubtful = False
            self.exclusions.suspect()
        excluded = self.exclusions.look(runtime)
        if not touched and not force and not excluded:
            return []
        self._last_cut_s = self._now()
        self._codec.forget()
        with self.watch.source.still():
            types = self._types_of(touched)
            fresh, overgrown = self.watch.changed(touched)
        tick = self.tick + 1
        if tick >= self._reserved_end:
            self._reserved_end = self._ledger.extend(tick)
        if touched:
            self._types.append((tick, types))
        while self._types and self._types[0][0] <= tick - 2 * WINDOW_TICKS:
            self._known_from = self._types.popleft()[0]
        effects: list[Effect] = []
        for spec in overgrown:
            effects += self.root.receive(EvictEntry(spec))
        if excluded:
            for clock, rejected in self.exclusions.keep(excluded, self.root.batches, tick):
                effects += self.root.receive(Excluded(clock, tick, rejected))
        if REVOCATIONS_SPEC in self.root.holdings:
            value = revocations_value(self.party.capabilities.revoked())
            known = self.root.holdings.newest(REVOCATIONS_SPEC)
            if known is None or known.value != value:
                fresh.append((REVOCATIONS_SPEC, value))
        return [*effects, *self.root.receive(Advanced(tick, tuple(fresh), self._feeds.news()))]

    def _types_of(self, items: Set[ItemId]) -> frozenset[str] | None:
        rows = [self.watch.source.row(item) for item in items]
        return None if any(row is None for row in rows) else frozenset(row.type for row in rows if row is not None)

    # batches

    def _commit_soon(self, delay_s: float) -> None:
        at_s = self._now() + delay_s
        if self._commits_at_s is None or at_s < self._commits_at_s:
            self._commits_at_s = at_s
            self._outlet.later(delay_s, self.write_batches)

    def write_batches(self) -> None:
        """Write what waits, as far as quotas allow: one flush for all of it, then the tick that holds it."""
        self._commits_at_s = None
        if self.party.runtime.closed:
            return
        ready, wait_s = self._ready_commits()
        if ready:
            with self.party.reading() as runtime:
                runtime.flush()
                tick = self.tick + 1
                batches = self.root.batches
                effects: list[Effect] = []
                for commit, rights in ready:
                    told = batches.rejections.get(commit.clock, ())
                    rejected = self._batches.write(commit, rights=rights, arcs=batches.arcs, told=told, tick=tick)
                    effects += self.root.receive(Committed(commit.clock, commit.batch, tick, rejected))
                self._batches.settle()  # only then is anything said of it
                effects += self._cut(force=True)
            self._perform(effects)
            self._tell()
        if wait_s:
            self._commit_soon(wait_s)

    def _ready_commits(self) -> tuple[list[tuple[Commit, Grants | None]], float]:
        """Those that are within their quotas, in the order of their arcs; and how long the first of the others waits."""
        ready: list[tuple[Commit, Grants | None]] = []
        waiting: deque[tuple[Commit, Grants | None]] = deque()
        blocked: set[Arc] = set()
        wait_s = 0.0
        for commit, rights in self._commits:
            over_s = 0.0 if commit.clock in blocked else over_quota(self._quotas, commit, self._now())
            if over_s:
                blocked.add(commit.clock)
                wait_s = min(wait_s, over_s) if wait_s else over_s
                self._count("over-quota")
                self._perform(self.root.serving.to_system(commit.clock.system, Backpressure("publish", over_s)))
            (waiting if commit.clock in blocked else ready).append((commit, rights))
        self._commits = waiting
        return ready, wait_s

    # from time to time

    def sweep(self) -> None:
        """Services that fell silent, indexes that nobody watches, blocks that can't be excluded any more."""
        with self.party.reading() as runtime:
            self.exclusions.forget_settled(runtime)
        now = self._now()
        silent = [service for service, heard_s in self._heard.items() if now - heard_s > ANNOUNCE_S]
        for service in silent:
            del self._heard[service]
            self._perform(self.root.expire_service(service))
        for id in self._mail.overdue(self.party.peer.now_ms()):
            self._count(RejectReason.EXPIRED)
            self._perform(self.root.receive(GiveUp(id)))
        self._perform(self.root.receive(Unanswered(ROOTS)))
        self._perform(self.root.review())
        recorded = {spec for directory in self.root.serving.links.values() for spec in directory.records}
        idle = [spec for spec in self.root.holdings.specs() if spec not in recorded]
        self._idle = {spec: self._idle.get(spec, now) for spec in idle}
        for spec in [spec for spec, since_s in self._idle.items() if now - since_s > IDLE_S]:
            del self._idle[spec]
            self._perform(self.root.receive(EvictEntry(spec)))
        for clock in [clock for clock in self._writers if clock.system not in self.root.serving.routes]:
            if not any(commit.clock == clock for commit, _ in self._commits):
                del self._writers[clock]
        self._tell()

    def _revoked(self) -> None:
        """Under the peer's lock, by whoever revoked or replicates: the index of revocations has another value."""
        self._outlet.later(0.0, self._cut_for_revocation)

    def _cut_for_revocation(self) -> None:
        if not self.party.runtime.closed:
            self._perform(self.root.review())
            self._perform(self._cut(force=True))
            self._tell()

    def numbers(self) -> ThinNumbers:
        """What is counted, for monitors."""
        return ThinNumbers(
            systems=len(self.root.serving.routes),
            indexes=len(self.root.holdings),
            hits=max(0, self.acquires - self.watch.evaluations),
            misses=self.watch.evaluations,
            excluded=self.exclusions.told,
            refused=dict(self.refusals),
        )

    def close(self) -> None:
        """Listen no more. Links are the service's to end."""
        self._end()
        self._feeds.close()
        processor = self.party.runtime.processor
        if self._admission_moved in processor.on_admission:
            processor.on_admission.remove(self._admission_moved)
        if self._revoked in processor.on_revocation:
            processor.on_revocation.remove(self._revoked)
