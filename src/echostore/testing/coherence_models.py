"""The models that are searched: small trees of real machines, and all that may happen to them.

Values are named after the tick at which they came to be, so that what is true at a tick is known: `Truth` is the
root's history. Every model checks C1 on every system: whatever is held over an interval is true at each of its ticks.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from echostore.kernel.coherence.batches import Batches
from echostore.kernel.coherence.cache import Cache
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import (
    UP,
    Advanced,
    ChildOpened,
    Effect,
    Evaluate,
    Evaluated,
    Event,
    EvictEntry,
    EvictRecord,
    Flush,
    Forget,
    LinkId,
    Opening,
    Send,
    Unanswered,
    Want,
)
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import IndexValue, Patch, Spec, SystemId, Token
from echostore.kernel.coherence.root import Root
from echostore.testing.coherence_search import Machine, Model, State, Step, clone

ROOT = SystemId(b"r" * 16)
LEAF_UP = LinkId("home")


class PlainCodec:
    """Values are their own tokens, and there are no deltas."""

    def token(self, value: IndexValue) -> Token:
        return Token(value)

    def diff(self, old: IndexValue, new: IndexValue) -> Patch | None:
        return None

    def patch(self, old: IndexValue, patch: Patch) -> IndexValue | None:
        return None


class DeltaCodec(PlainCodec):
    """A delta names both ends; applied to another value it gives one that is true nowhere."""

    def diff(self, old: IndexValue, new: IndexValue) -> Patch | None:
        return Patch(old[-1:] + b">" + new[-1:])

    def patch(self, old: IndexValue, patch: Patch) -> IndexValue | None:
        return IndexValue(old[:-1] + patch[-1:]) if old[-1:] == patch[:1] else IndexValue(b"wrong")


PLAIN, DELTAS = PlainCodec(), DeltaCodec()


def value_of(version: int) -> IndexValue:
    return IndexValue(b"value %d" % version)


class Truth(NamedTuple):
    """The root's history: for each tick, the tick at which each index last changed."""

    history: tuple[tuple[int, ...], ...]

    def value(self, spec: Spec, tick: int) -> IndexValue:
        return value_of(self.history[tick][spec[0]])


class IndexModel(Model):
    """A root, perhaps an edge, and leaves that read. No writes from below."""

    def __init__(
        self,
        name: str,
        *,
        specs: int = 1,
        ticks: int = 2,
        edge: bool = False,
        leaves: int = 1,
        crashes: tuple[int, int] = (0, 0),
        reconnects: int = 0,
        forgets: bool = False,
        evicts: bool = False,
        leaf_evicts: bool = False,
        deltas: bool = False,
        flushes: bool = True,
        ordered: bool = False,
        always_changes: bool = False,
        lanes: int = 0,
        window: int = 256,
        asks_again: bool = True,
    ) -> None:
        super().__init__()
        self.name, self.ordered, self.lanes, self.window = name, ordered, lanes, window
        self.specs = [Spec(bytes([each])) for each in range(specs)]
        self.ticks, self.has_edge, self.leaves = ticks, edge, leaves
        self.crashes, self.reconnects = crashes, reconnects
        self.forgets, self.evicts, self.leaf_evicts, self.flushes = forgets, evicts, leaf_evicts, flushes
        self.asks_again = asks_again
        self.codec = DELTAS if deltas else PLAIN
        self.first_leaf = 2 if edge else 1
        self.readers = list(range(self.first_leaf, self.first_leaf + leaves))
        above = self.first_leaf - 1
        # (upper system, its name for the link, lower system, its name for it)
        self.links = [(above, LinkId(f"l{leaf}"), leaf, LEAF_UP) for leaf in self.readers]
        if edge:
            self.links.insert(0, (0, LinkId("e"), 1, UP))
        self.changes = [(True,) * specs] if always_changes else list(product((False, True), repeat=specs))

    # Systems

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        machines = [Machine(self.new_root(0, None), Truth(((0,) * len(self.specs),)))]
        if self.has_edge:
            machines.append(Machine(Edge(self.codec)))
        machines += [Machine(Leaf(self.codec, LEAF_UP)) for _ in self.readers]
        for link, (upper, above, lower, below) in enumerate(self.links):
            self.converse(machines, [(upper, ChildOpened(above, 1)), (lower, Opening(below, 1, 100 + link))])
        return machines, (1, *self.crashes, self.reconnects)

    def new_root(self, tick: int, batches: Batches | None) -> Root:
        return Root(ROOT, self.codec, tick=tick, batches=batches, window_ticks=self.window)

    def converse(self, machines: list[Machine], events: list[tuple[int, Event]]) -> None:
        """Before the search begins: the links are opened, in peace."""
        while events:
            system, event = events.pop(0)
            for effect in machines[system].core.receive(event):
                if isinstance(effect, Send):
                    events.append(self.messages[self.message(system, effect)])

    def topology(self) -> dict[tuple[int, LinkId], tuple[int, LinkId]]:
        ends = {}
        for upper, above, lower, below in self.links:
            ends[upper, above] = (lower, below)
            ends[lower, below] = (upper, above)
        return ends

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        if isinstance(effect, Evaluate):
            tick = machine.core.holdings.cur if effect.at is None else effect.at
            yield Evaluated(effect.spec, tick, tick, machine.host.value(effect.spec, tick))

    def cache(self, state: State, system: int) -> Cache:
        core = self.core(state, system)
        cache: Cache = core.cache if isinstance(core, Edge) else core.caches[LEAF_UP]
        return cache

    # What may happen

    def local(self, state: State) -> Iterator[Step]:
        yield from self.root_steps(state)
        yield from self.serving_steps(state)
        yield from self.reader_steps(state)
        yield from self.breaking_steps(state)

    def root_steps(self, state: State) -> Iterator[Step]:
        machine = self.machines[state[0][0]]
        root: Root = machine.core
        tick = root.holdings.cur + 1
        if tick > self.ticks:
            return
        for changed in self.changes:
            now = tuple(tick if change else old for change, old in zip(changed, machine.host.history[-1], strict=True))
            yield f"tick {tick} changes {changed}", self.advanced(state, Truth((*machine.host.history, now)))

    def advanced(self, state: State, truth: Truth) -> State:
        """A new tick; the root is told of the indexes it watches."""
        number = state[0][0]
        tick = len(truth.history) - 1
        watched = self.machines[number].core.holdings
        changes = tuple(
            (spec, truth.value(spec, tick))
            for spec in self.specs
            if spec in watched and truth.value(spec, tick) != truth.value(spec, tick - 1)
        )
        fresh = Machine(self.machines[number].core, truth)
        return self.after(self.replaced(state, 0, fresh, state[1]), 0, Advanced(tick, changes))

    def serving_steps(self, state: State) -> Iterator[Step]:
        for upper, above, _, _ in self.links:
            directory = self.core(state, upper).serving.links.get(above)
            if directory is None:
                continue
            if self.flushes:
                yield f"system {upper} flushes {above}", self.after(state, upper, Flush(above))
            for spec, record in directory.records.items():
                if self.forgets and record.gm is not None:
                    yield f"system {upper} forgets {spec!r}", self.after(state, upper, Forget(above, spec))
                if self.evicts and record.live and not record.evict:
                    yield f"system {upper} evicts {spec!r}", self.after(state, upper, EvictRecord(above, spec))
        if self.has_edge and self.evicts:
            for spec in self.core(state, 1).cache.holdings.specs():
                yield f"the edge drops {spec!r}", self.after(state, 1, EvictEntry(spec))

    def reader_steps(self, state: State) -> Iterator[Step]:
        for leaf in self.readers:
            cache = self.cache(state, leaf)
            for spec in self.specs:
                if cache.read(spec) is None and (spec, None) not in cache.wanted:
                    yield f"leaf {leaf} wants {spec!r}", self.after(state, leaf, Want(LEAF_UP, spec))
                if self.leaf_evicts and spec in cache.holdings:
                    yield f"leaf {leaf} drops {spec!r}", self.after(state, leaf, EvictEntry(spec))
            waits = bool(cache.wanted) or cache.opening is not None
            if self.ordered and self.asks_again and waits and self.quiet(state):
                yield f"leaf {leaf} asks again", self.after(state, leaf, Unanswered(LEAF_UP))
        if self.ordered and self.has_edge and self.asks_again and self.quiet(state):
            yield "the edge asks again", self.after(state, 1, Unanswered(UP))

    def breaking_steps(self, state: State) -> Iterator[Step]:
        generation, root_crashes, edge_crashes, reconnects = state[1]
        if root_crashes:
            counters = (generation, root_crashes - 1, edge_crashes, reconnects)
            yield "the root crashes", self.cleared(self.replaced(state, 0, self.restarted(state), counters), 0)
        if edge_crashes and self.has_edge:
            counters = (generation, root_crashes, edge_crashes - 1, reconnects)
            yield "the edge crashes", self.cleared(self.replaced(state, 1, Machine(Edge(self.codec)), counters), 1)
        for link, (upper, above, lower, _) in enumerate(self.links):
            cache = self.cache(state, lower)
            broken = above not in self.core(state, upper).serving.generations or (
                cache.generation is None and cache.opening is None
            )
            if broken or reconnects:
                counters = (generation + 1, root_crashes, edge_crashes, reconnects - (not broken))
                yield f"link {link} opens again", self.reopened(state, link, counters)

    def restarted(self, state: State) -> Machine:
        """The root with what it has on disk: its history, and its account of batches."""
        machine = self.machines[state[0][0]]
        batches: Batches = clone(machine.core.batches)
        batches.writing.clear()
        return Machine(self.new_root(machine.core.holdings.cur, batches), machine.host)

    def reopened(self, state: State, link: int, counters: tuple[Any, ...]) -> State:
        upper, above, lower, below = self.links[link]
        state = self.cleared(state, lower, below)
        state = self.after(state, upper, ChildOpened(above, self.generation(counters)), counters)
        return self.after(state, lower, Opening(below, self.generation(counters), 100 + link))

    def generation(self, counters: tuple[Any, ...]) -> int:
        generation: int = counters[0]
        return generation

    # What must hold

    def watch(self, system: int, before: Machine, after: Machine) -> str | None:
        """C3: no system goes back."""
        if system == 0:
            return None
        old, new = [
            each.core.cache if system < self.first_leaf else each.core.caches[LEAF_UP] for each in (before, after)
        ]
        return f"C3: system {system} goes from {old.cur} to {new.cur}" if new.cur < old.cur else None

    def check(self, state: State) -> str | None:
        truth = self.machines[state[0][0]].host
        for system in range(1, len(state[0])):
            wrong = self.once(("C1", state[0][system], truth), self.untrue, state, system, truth)
            if wrong is not None:
                return wrong
        for link, (upper, _, lower, _) in enumerate(self.links):
            wrong = self.once(("C8", link, state[0][upper], state[0][lower]), self.not_included, state, link)
            if wrong is not None:
                return wrong
        return None

    def untrue(self, state: State, system: int, truth: Truth) -> str | None:
        """C1: a value is true at every tick of its interval. And no system is ahead of the root."""
        cache = self.cache(state, system)
        if cache.cur >= len(truth.history):
            return f"C3: system {system} is at {cache.cur}, the root was never there"
        for spec in self.specs:
            shown = cache.read(spec)
            if shown is not None and truth.value(spec, cache.cur) != shown.value:
                return f"C2: system {system} at {cache.cur} shows {shown} of {spec!r}"
            for version in cache.holdings.versions(spec):
                for tick in range(version.min, version.max + 1):
                    if tick >= len(truth.history) or truth.value(spec, tick) != version.value:
                        return f"C1: system {system} holds {version} of {spec!r}, untrue at {tick}"
        return None

    def not_included(self, state: State, link: int) -> str | None:
        """C8: what is live below has a record above that will end it; and C9, one record for each index."""
        upper, above, lower, _ = self.links[link]
        serving = self.core(state, upper).serving
        directory, cache = serving.links.get(above), self.cache(state, lower)
        if directory is None or directory.generation != cache.generation:
            return None
        if len(directory.records) > len(self.specs) or not directory.marks <= directory.records.keys():
            return "C9: more records than indexes"
        if directory.sent != cache.cur:
            return None
        for spec in self.specs:
            record = directory.records.get(spec)
            if cache.holdings.is_live(spec) and (record is None or not record.live):
                return f"C8: {spec!r} is live in system {lower}, and system {upper} does not watch it"
        return None

    def goal(self, state: State) -> bool | None:
        """L2: the root is at its last tick, and every leaf reads every index there."""
        for leaf in self.readers:
            cache = self.cache(state, leaf)
            if cache.cur != self.ticks or any(cache.read(spec) is None for spec in self.specs):
                return False
        return True
