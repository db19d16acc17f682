"""Models of what goes up: batches through edges that vanish, arcs that are granted again, waiting, messages, two roots.

An operation is known by its id and by what it says. `Log` is the root's history: what was applied, in order, and how
much of that each tick includes.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from echostore.kernel.coherence.batches import Batches
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import (
    UP,
    Advanced,
    Begin,
    ChildOpened,
    Commit,
    Committed,
    Delivered,
    Effect,
    End,
    Evaluate,
    Event,
    Flush,
    LinkId,
    Lost,
    Opening,
    Post,
    Publish,
    Send,
    Unanswered,
    Unavailable,
    WaitFor,
    Want,
)
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import Arc, Attach, FollowsEpoch, IssuedId, SystemId, Witness
from echostore.kernel.coherence.root import Root
from echostore.testing.coherence_models import LEAF_UP, PLAIN, ROOT, IndexModel, Truth
from echostore.testing.coherence_search import Machine, Model, State, Step, clone

OTHER_ROOT = SystemId(b"s" * 16)
OTHER = LinkId("other")


class Entry(NamedTuple):
    """One operation as the root applied it."""

    op: IssuedId
    delta: bytes
    batch: int


class Log(NamedTuple):
    entries: tuple[Entry, ...] = ()
    lengths: tuple[int, ...] = (0,)
    """How many entries each tick includes."""

    def at(self, tick: int) -> tuple[Entry, ...]:
        return self.entries[: self.lengths[tick]]


class Writer(NamedTuple):
    """What the application of a leaf knows: which life this is, and what it wrote in it."""

    life: int = 0
    wrote: tuple[tuple[IssuedId, bytes], ...] = ()


class WriteModel(Model):
    """A root, edges, and one leaf that writes and moves between the edges. With no edges, it moves nowhere."""

    def __init__(
        self,
        name: str,
        *,
        batches: int = 2,
        ticks: int = 2,
        edges: int = 2,
        edge_crashes: int = 0,
        root_crashes: int = 0,
        leaf_crashes: int = 0,
        moves: int = 0,
        regrants: int = 0,
        ordered: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.ordered = name, ordered
        self.batches, self.ticks, self.edges = batches, ticks, edges
        self.budget = (1, edge_crashes, root_crashes, leaf_crashes, moves, regrants)
        self.leaf = edges + 1

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        machines = [Machine(Root(ROOT, PLAIN), Log())]
        machines += [Machine(Edge(PLAIN)) for _ in range(self.edges)]
        machines.append(Machine(Leaf(PLAIN, LEAF_UP), Writer()))
        for edge in range(1, self.edges + 1):
            self.converse(machines, [(0, ChildOpened(LinkId(f"e{edge}"), 1)), (edge, Opening(UP, 1, edge))])
        upper = self.upper(self.generation(1))
        self.converse(machines, [(upper, ChildOpened(LEAF_UP, self.generation(1))), (self.leaf, self.opening(1, 0))])
        return machines, self.budget

    def generation(self, number: int, edge: int = 1) -> int:
        """The generation tells which edge a link of the leaf leads to."""
        return 4 * number + edge if self.edges else number

    def opening(self, number: int, life: int, edge: int = 1) -> Opening:
        return Opening(LEAF_UP, self.generation(number, edge), 100 + life)

    def upper(self, generation: int) -> int:
        return generation % 4 if self.edges else 0

    def converse(self, machines: list[Machine], events: list[tuple[int, Event]]) -> None:
        while events:
            system, event = events.pop(0)
            for effect in machines[system].core.receive(event):
                if isinstance(effect, Send):
                    events.append(self.messages[self.message(system, effect)])

    def topology(self) -> dict[tuple[int, LinkId], tuple[int, LinkId]]:
        ends: dict[tuple[int, LinkId], tuple[int, LinkId]] = {}
        for edge in range(1, self.edges + 1):
            ends[0, LinkId(f"e{edge}")] = (edge, UP)
            ends[edge, UP] = (0, LinkId(f"e{edge}"))
        for upper in range(1, self.edges + 1) if self.edges else [0]:
            ends[upper, LEAF_UP] = (self.leaf, LEAF_UP)
        ends[self.leaf, LEAF_UP] = (1 if self.edges else 0, LEAF_UP)
        return ends

    def way(self, system: int, send: Send) -> tuple[int, LinkId]:
        if system == self.leaf:
            return self.upper(send.generation), LEAF_UP
        return super().way(system, send)

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        if isinstance(effect, Commit):
            log: Log = machine.host
            fresh = tuple(Entry(op.op, op.delta, effect.batch) for op in effect.ops)
            machine.host = log._replace(entries=log.entries + fresh)
            yield Committed(effect.clock, effect.batch, machine.core.holdings.cur + 1, effect.rejected)

    # What may happen

    def local(self, state: State) -> Iterator[Step]:
        yield from self.root_steps(state)
        yield from self.leaf_steps(state)
        yield from self.breaking_steps(state)

    def root_steps(self, state: State) -> Iterator[Step]:
        machine = self.machines[state[0][0]]
        tick = machine.core.holdings.cur + 1
        if tick <= self.ticks or len(machine.host.entries) > machine.host.lengths[-1]:
            log = machine.host._replace(lengths=(*machine.host.lengths, len(machine.host.entries)))
            fresh = self.replaced(state, 0, Machine(machine.core, log), state[1])
            yield f"tick {tick}", self.after(fresh, 0, Advanced(tick))
        for upper in range(self.edges + 1):
            for link in self.core(state, upper).serving.links:
                yield f"system {upper} flushes {link}", self.after(state, upper, Flush(link))

    def leaf_steps(self, state: State) -> Iterator[Step]:
        machine = self.machines[state[0][self.leaf]]
        writer: Writer = machine.host
        if len(writer.wrote) < self.batches and machine.core.arcs.arc is not None:
            delta = b"%d.%d" % (writer.life, len(writer.wrote))
            core = clone(machine.core)
            sent = core.receive(Publish(((b"item", delta),)))
            op = core.outbox.batches[-1].ops[0].op
            after = self.replaced(
                state, self.leaf, Machine(core, writer._replace(wrote=(*writer.wrote, (op, delta)))), state[1]
            )
            numbers = tuple(self.message(self.leaf, each) for each in sent)
            yield f"the leaf writes {delta!r}", (after[0], after[1], self.posted(after[2], numbers))
        if self.quiet(state):
            yield "the leaf asks again", self.after(state, self.leaf, Unanswered(LEAF_UP))
            for edge in range(1, self.edges + 1) if self.ordered else ():
                yield f"edge {edge} asks again", self.after(state, edge, Unanswered(UP))

    def breaking_steps(self, state: State) -> Iterator[Step]:
        number, edge_crashes, root_crashes, leaf_crashes, moves, regrants = state[1]
        leaf: Leaf = self.core(state, self.leaf)
        if edge_crashes:
            for edge in range(1, self.edges + 1):
                counters = (number + 1, edge_crashes - 1, *state[1][2:])
                link = LinkId(f"e{edge}")
                fresh = self.replaced(self.cleared(state, edge), edge, Machine(Edge(PLAIN)), counters)
                fresh = self.after(fresh, 0, ChildOpened(link, number + 1))
                yield f"edge {edge} crashes and is back", self.after(fresh, edge, Opening(UP, number + 1, edge))
        if root_crashes:
            counters = (number + 1, edge_crashes, root_crashes - 1, *state[1][3:])
            fresh = self.replaced(self.cleared(state, 0), 0, self.restarted(state), counters)
            for edge in range(1, self.edges + 1):
                fresh = self.after(fresh, 0, ChildOpened(LinkId(f"e{edge}"), number + 1))
                fresh = self.after(fresh, edge, Opening(UP, number + 1, edge))
            yield "the root crashes and is back", fresh
        cache = leaf.caches[LEAF_UP]
        current = cache.generation if cache.generation is not None else cache.opening
        standing = current is not None and (
            self.core(state, self.upper(current)).serving.generations.get(LEAF_UP) == current
        )
        life = self.machines[state[0][self.leaf]].host.life
        for edge in range(1, max(1, self.edges) + 1):
            if moves or not standing:
                counters = (number + 1, edge_crashes, root_crashes, leaf_crashes, moves - standing, regrants)
                yield f"the leaf links to {edge}", self.linked(state, number + 1, edge, life, counters)
        if leaf_crashes and leaf.systems:
            counters = (number + 1, edge_crashes, root_crashes, leaf_crashes - 1, moves, regrants)
            blank = Leaf(PLAIN, LEAF_UP)
            blank.systems.update(leaf.systems)
            fresh = self.replaced(state, self.leaf, Machine(blank, Writer(life + 1)), counters)
            yield "the leaf loses all it knew", self.linked(fresh, number + 1, 1, life + 1, counters)
        if regrants and leaf.systems and standing and cache.generation is not None:
            counters = (number, edge_crashes, root_crashes, leaf_crashes, moves, regrants - 1)
            attach = Attach(200 + regrants, leaf.systems[LEAF_UP], wants_arc=True, seen=cache.cur)
            message = self.message(self.leaf, Send(LEAF_UP, cache.generation, attach))
            yield "the leaf is short of ids", (state[0], counters, self.posted(state[2], (message,)))

    def linked(self, state: State, number: int, edge: int, life: int, counters: tuple[Any, ...]) -> State:
        opening = self.opening(number, life, edge)
        upper = self.upper(opening.generation)
        state = self.cleared(state, self.leaf)
        state = self.after(state, upper, ChildOpened(LEAF_UP, opening.generation), counters)
        return self.after(state, self.leaf, opening)

    def restarted(self, state: State) -> Machine:
        machine = self.machines[state[0][0]]
        batches: Batches = clone(machine.core.batches)
        batches.writing.clear()
        return Machine(Root(ROOT, PLAIN, tick=machine.core.holdings.cur, batches=batches), machine.host)

    # What must hold

    def watch(self, system: int, before: Machine, after: Machine) -> str | None:
        """C3: the leaf does not go back, whichever edge it is at."""
        if system != self.leaf:
            return None
        old, new = before.core.caches[LEAF_UP].cur, after.core.caches[LEAF_UP].cur
        return f"C3: the leaf goes from {old} to {new}" if new < old else None

    def check(self, state: State) -> str | None:
        root, leaf = state[0][0], state[0][self.leaf]
        return self.once((root, leaf), self.judge, self.machines[root], self.machines[leaf])

    def judge(self, root: Machine, machine: Machine) -> str | None:
        log: Log = root.host
        writer: Writer = machine.host
        ids = [entry.op for entry in log.entries]
        said = {(entry.op, entry.delta) for entry in log.entries}
        if len(ids) != len(set(ids)):
            return "C6: an operation was applied twice, or an id used twice"
        if len({op for op, _ in said | set(writer.wrote)}) != len(said | set(writer.wrote)):
            return "C7: one id says two things"
        for entry in log.entries:
            if not root.core.batches.arcs.allows(entry.op.arc, entry.batch):
                return f"C7: {entry} after its arc was released"
        wrote = [op for op, _ in writer.wrote]
        mine = [op for op in ids if op in wrote]
        if mine != wrote[: len(mine)]:
            return f"C6: {mine} were applied of {wrote}"
        return self.seen_once(log, wrote, machine.core)

    def seen_once(self, log: Log, wrote: list[IssuedId], leaf: Leaf) -> str | None:
        """C5: every own operation is in the state that is shown, or on top of it, and not in both."""
        cur = leaf.caches[LEAF_UP].cur
        if cur >= len(log.lengths):
            return f"C3: the leaf is at {cur}, the root was never there"
        below = [entry.op for entry in log.at(cur)]
        above = [op.op for op in leaf.outbox.overlay()]
        for op in wrote:
            if (op in below) == (op in above):
                return f"C5: {op} is shown {'twice' if op in below else 'nowhere'} at {cur}"
        return None

    def goal(self, state: State) -> bool | None:
        """L3: all is written, the root has it on disk, and the leaf sees it there."""
        machine = self.machines[state[0][self.leaf]]
        return len(machine.host.wrote) == self.batches and machine.core.released and not machine.core.outbox.batches


class WaitModel(IndexModel):
    """A leaf that does nothing but wait for the last tick, on links that nobody moves without need."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, flushes=False, **options)

    def reader_steps(self, state: State) -> Iterator[Step]:
        for leaf in self.readers:
            core: Leaf = self.core(state, leaf)
            clock = Arc(ROOT)
            if not core.reached(clock, self.ticks) and clock not in core.waits:
                wait = WaitFor(((Witness(clock, self.ticks),),))
                yield f"leaf {leaf} waits", self.after(state, leaf, wait)
            waits = bool(core.waits) or core.caches[LEAF_UP].opening is not None
            if self.ordered and waits and self.quiet(state):
                yield f"leaf {leaf} asks again", self.after(state, leaf, Unanswered(LEAF_UP))

    def goal(self, state: State) -> bool | None:
        """L1."""
        return all(self.core(state, leaf).reached(Arc(ROOT), self.ticks) for leaf in self.readers)


class Past(NamedTuple):
    """What an application knows of its one transaction."""

    begun: bool = False
    lost: int | None = None


class PinModel(IndexModel):
    """A leaf that reads at a tick it holds on to, once, while the root forgets."""

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        machines, counters = super().start()
        for leaf in self.readers:
            machines[leaf].host = Past()
        return machines, counters

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        if isinstance(effect, Lost):
            machine.host = machine.host._replace(lost=effect.at)
            return []
        if isinstance(effect, Evaluate) and effect.at is not None:
            return [Unavailable(effect.spec, effect.at, None)]
        return super().answer(system, machine, effect)

    def reader_steps(self, state: State) -> Iterator[Step]:
        for leaf in self.readers:
            core, past = self.core(state, leaf), self.machines[state[0][leaf]].host
            if not past.begun:
                yield from super().reader_steps(state)
                begun = self.replaced(state, leaf, Machine(core, Past(begun=True)), state[1])
                yield f"leaf {leaf} begins", self.after(begun, leaf, Begin(LEAF_UP))
            for tick in core.pins.get(LEAF_UP, ()):
                yield f"leaf {leaf} ends", self.after(state, leaf, End(LEAF_UP, tick))
                if core.read(LEAF_UP, self.specs[0], tick) is None and past.lost is None:
                    yield f"leaf {leaf} wants at {tick}", self.after(state, leaf, Want(LEAF_UP, self.specs[0], tick))

    def untrue(self, state: State, system: int, truth: Truth) -> str | None:
        core = self.core(state, system)
        for tick in core.pins.get(LEAF_UP, ()) if isinstance(core, Leaf) else ():
            for spec in self.specs:
                shown = core.read(LEAF_UP, spec, tick)
                if shown is not None and shown.value != truth.value(spec, tick):
                    return f"C2: leaf {system} reads {shown} of {spec!r} at {tick}"
        return super().untrue(state, system, truth)

    def goal(self, state: State) -> bool | None:
        """L2: every question is answered: by a value, or by the word that it is gone."""
        return all(not self.cache(state, leaf).wanted for leaf in self.readers)


class PostModel(IndexModel):
    """One leaf writes messages to another, each after a tick that it has seen."""

    def __init__(self, name: str, *, messages: int = 2, **options: Any) -> None:
        super().__init__(name, leaves=2, always_changes=True, flushes=False, **options)
        self.messages_max = messages

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        machines, counters = super().start()
        machines[self.readers[1]].host = ()
        return machines, counters

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        if isinstance(effect, Delivered):
            tick = effect.message.context[0][0].tick
            machine.host = (*machine.host, (effect.message.id.seq, tick, machine.core.caches[LEAF_UP].cur))
        return super().answer(system, machine, effect)

    def reader_steps(self, state: State) -> Iterator[Step]:
        one, two = self.readers
        core: Leaf = self.core(state, one)
        cur = core.caches[LEAF_UP].cur
        if cur < self.ticks and Arc(ROOT) not in core.waits:
            yield "the sender waits", self.after(state, one, WaitFor(((Witness(Arc(ROOT), cur + 1),),)))
        sent = core.sender.seqs.get(1, 0)
        target = self.core(state, two).systems.get(LEAF_UP)
        if sent < self.messages_max and target is not None and core.systems:
            context = ((Witness(Arc(ROOT), cur),),)
            yield "the sender posts", self.after(state, one, Post(target, 1, "note", b"%d" % sent, context))
        if core.sender.unreceived:
            yield "the sender asks again", self.after(state, one, Unanswered(LEAF_UP))

    def check(self, state: State) -> str | None:
        came = self.machines[state[0][self.readers[1]]].host
        if len({seq for seq, _, _ in came}) != len(came):
            return f"a message was delivered twice: {came}"
        if any(tick > cur for _, tick, cur in came):
            return f"C4: a message came before its context: {came}"
        return super().check(state)

    def goal(self, state: State) -> bool | None:
        """L4."""
        one, two = self.readers
        sender = self.core(state, one).sender
        return len(self.machines[state[0][two]].host) == self.messages_max and not sender.unreceived


class TwoRootsModel(Model):
    """Two roots, the first of which sees the second; a leaf reads both and wants one causal view."""

    def __init__(self, name: str, *, ticks: int = 2, reconnects: int = 0, ordered: bool = False) -> None:
        super().__init__()
        self.name, self.ticks, self.reconnects, self.ordered = name, ticks, reconnects, ordered
        self.links = [(0, LinkId("l"), LEAF_UP), (1, LinkId("l"), OTHER)]

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        leaf = Leaf(PLAIN, LEAF_UP)
        leaf.join(OTHER)
        machines = [Machine(Root(ROOT, PLAIN), (0,)), Machine(Root(OTHER_ROOT, PLAIN), (0,)), Machine(leaf)]
        for root, above, below in self.links:
            events: list[tuple[int, Event]] = [(root, ChildOpened(above, 1)), (2, Opening(below, 1, 7))]
            while events:
                system, event = events.pop(0)
                for effect in machines[system].core.receive(event):
                    if isinstance(effect, Send):
                        events.append(self.messages[self.message(system, effect)])
        return machines, (1, self.reconnects)

    def topology(self) -> dict[tuple[int, LinkId], tuple[int, LinkId]]:
        ends = {(root, above): (2, below) for root, above, below in self.links}
        return ends | {there: here for here, there in ends.items()}

    def local(self, state: State) -> Iterator[Step]:
        seen = self.core(state, 1).holdings.cur
        for root in (0, 1):
            machine = self.machines[state[0][root]]
            tick = machine.core.holdings.cur + 1
            if tick <= self.ticks:
                for other in range(machine.host[-1], seen + 1) if root == 0 else [0]:
                    fresh = self.replaced(state, root, Machine(machine.core, (*machine.host, other)), state[1])
                    follows = (FollowsEpoch(Arc(OTHER_ROOT), other),) if other else ()
                    yield f"root {root} at {tick}, {follows}", self.after(fresh, root, Advanced(tick, (), follows))
            yield f"root {root} flushes", self.after(state, root, Flush(LinkId("l")))
        leaf: Leaf = self.core(state, 2)
        home = leaf.caches[LEAF_UP]
        other = home.follows.get(Arc(OTHER_ROOT), 0)
        if not leaf.is_causal() and Arc(OTHER_ROOT) not in leaf.waits:
            yield "the leaf waits", self.after(state, 2, WaitFor(((Witness(Arc(OTHER_ROOT), other),),)))
        generation, reconnects = state[1]
        if reconnects:
            for root, above, below in self.links:
                fresh = self.after(state, root, ChildOpened(above, generation + 1), (generation + 1, reconnects - 1))
                yield f"link {below} opens again", self.after(fresh, 2, Opening(below, generation + 1, 7))

    def check(self, state: State) -> str | None:
        leaf: Leaf = self.core(state, 2)
        cur: dict[LinkId, int] = {link: cache.cur for link, cache in leaf.caches.items()}
        needs = self.machines[state[0][0]].host[cur[LEAF_UP]]
        if leaf.is_causal() and needs > cur[OTHER]:
            return f"C4: a view of {cur} includes {needs} of the other root"
        return None

    def goal(self, state: State) -> bool | None:
        leaf: Leaf = self.core(state, 2)
        return leaf.is_causal() and leaf.caches[LEAF_UP].cur == self.ticks


__all__ = ["Log", "PinModel", "PostModel", "TwoRootsModel", "WaitModel", "WriteModel", "Writer"]
