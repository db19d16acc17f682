"""A model of messages between two roots: what is lost, repeated, overtaken, and which root falls over between two steps.

Disks are what `Keep` wrote: a root that starts again knows that, the names it gave, and nothing else.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from echostore.kernel.coherence.events import (
    ROOTS,
    ChildOpened,
    Delivered,
    Effect,
    Event,
    FromRoot,
    GiveUp,
    Keep,
    KeptRow,
    LinkId,
    NotDelivered,
    Opening,
    Post,
    Received,
    RootMet,
    RootParted,
    Send,
    Sideways,
    Unanswered,
)
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import SystemId
from echostore.kernel.coherence.root import Root
from echostore.testing.coherence_models import LEAF_UP, PLAIN, ROOT
from echostore.testing.coherence_search import Machine, Model, State, Step, clone
from echostore.testing.coherence_write_models import OTHER_ROOT

BELOW = LinkId("l")
NAMES = (ROOT, OTHER_ROOT)
SENDING, TARGET = 2, 3


class Neighbour:
    """A root whose way to the other one is a link like any: so that the search loses and repeats what goes over it."""

    __slots__ = ("other", "root")

    def __init__(self, root: Root, other: SystemId) -> None:
        self.root, self.other = root, other

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Received) and event.link == ROOTS:
            event = FromRoot(self.other.root, event.message)
        return [
            Send(ROOTS, 0, effect.message) if isinstance(effect, Sideways) else effect
            for effect in self.root.receive(event)
        ]


class RootsModel(Model):
    """A leaf of one root writes to a leaf of another."""

    def __init__(
        self,
        name: str,
        *,
        messages: int = 2,
        crashes: tuple[int, int] = (0, 0),
        partings: int = 0,
        gives_up: int = 0,
        repeats: bool = True,
        ordered: bool = False,
    ) -> None:
        """Without `repeats` the sender has handed over what it says and is gone: its root has to see to it."""
        super().__init__()
        self.name, self.messages_max, self.repeats, self.ordered = name, messages, repeats, ordered
        self.crashes, self.partings, self.gives_up = crashes, partings, gives_up

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        roots = [Neighbour(Root(own, PLAIN), other) for own, other in (NAMES, NAMES[::-1])]
        machines = [Machine(each, ()) for each in roots]
        machines += [Machine(Leaf(PLAIN, LEAF_UP), ()) for _ in NAMES]
        for root, leaf in ((0, SENDING), (1, TARGET)):
            events: list[tuple[int, Event]] = [(root, ChildOpened(BELOW, 1)), (leaf, Opening(LEAF_UP, 1, leaf))]
            while events:
                system, event = events.pop(0)
                for effect in machines[system].core.receive(event):
                    if isinstance(effect, Send):
                        events.append(self.messages[self.message(system, effect)])
        for each in roots:
            each.receive(RootMet(each.other.root))
        return machines, (1, self.crashes, self.partings, self.gives_up)

    def topology(self) -> dict[tuple[int, LinkId], tuple[int, LinkId]]:
        ends = {(0, BELOW): (SENDING, LEAF_UP), (1, BELOW): (TARGET, LEAF_UP), (0, ROOTS): (1, ROOTS)}
        return ends | {there: here for here, there in ends.items()}

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        match effect:
            case Keep(rows):
                machine.host = written(machine.host, rows)
            case Delivered(message):
                machine.host = (*machine.host, message.id.seq)
            case NotDelivered(id):
                machine.host = (*machine.host, id.seq)
            case _:
                pass
        return ()

    def local(self, state: State) -> Iterator[Step]:
        generation, crashes, partings, gives_up = state[1]
        sender: Leaf = self.core(state, SENDING)
        target = self.core(state, TARGET).systems[LEAF_UP]
        posted = sum(sender.sender.seqs.values())
        gone = not self.repeats and crashes[0] < self.crashes[0]
        if posted < self.messages_max and not gone:
            said = self.after(state, SENDING, Post(target, 0, "note", b"%d" % posted))
            yield "the sender posts", said if self.repeats else self._handed_over(said)
        if sender.sender.unreceived and self.repeats and self.quiet(state):
            yield "the sender asks again", self.after(state, SENDING, Unanswered(LEAF_UP))
        for root in (0, 1):
            courier = self.core(state, root).root.courier
            if (courier.flying.get(NAMES[1 - root].root) or courier.inbox) and self.quiet(state):
                yield f"root {root} asks again", self.after(state, root, Unanswered(ROOTS))
            if crashes[root]:
                left = tuple(each - (at == root) for at, each in enumerate(crashes))
                yield f"root {root} crashes", self.restarted(state, root, (generation + 1, left, partings, gives_up))
            if gives_up:
                for id in [*courier.out, *courier.where]:
                    fresh = (generation, crashes, partings, gives_up - 1)
                    yield f"root {root} gives up {id.seq}", self.after(state, root, GiveUp(id), fresh)
        if partings:
            yield "the roots part and meet", self._met_again(state, (generation, crashes, partings - 1, gives_up))

    def _handed_over(self, state: State) -> State:
        generation = self.core(state, 0).root.serving.generations[BELOW]
        return self.after(state, 0, Received(BELOW, generation, self.core(state, SENDING).sender.pending()[-1]))

    def _met_again(self, state: State, counters: tuple[Any, ...]) -> State:
        state = self.cleared(state, 0, ROOTS)
        for root in (0, 1):
            other = NAMES[1 - root].root
            state = self.after(self.after(state, root, RootParted(other), counters), root, RootMet(other))
        return state

    def restarted(self, state: State, root: int, counters: tuple[Any, ...]) -> State:
        """With what is on its disk; the leaf and the other root find it again."""
        before = self.machines[state[0][root]]
        core: Neighbour = before.core
        fresh = Root(NAMES[root], PLAIN, batches=clone(core.root.batches))
        fresh.courier.restore(before.host)
        state = self.replaced(state, root, Machine(Neighbour(fresh, core.other), before.host), counters)
        state = self.cleared(state, root)
        state = self.after(state, root, ChildOpened(BELOW, counters[0]))
        if self.repeats or root:
            state = self.after(state, SENDING + root, Opening(LEAF_UP, counters[0], SENDING + root))
        return self._met_again(state, counters)

    def check(self, state: State) -> str | None:
        came = self.machines[state[0][TARGET]].host
        given_up = self.machines[state[0][SENDING]].host
        if list(came) != sorted(set(came)):
            return f"messages came twice, or not in order: {came}"
        sender: Leaf = self.core(state, SENDING)
        unreceived = {seq for _, seq in sender.sender.unreceived}
        posted = range(1, sum(sender.sender.seqs.values()) + 1)
        lost = [seq for seq in posted if seq not in unreceived and seq not in came and seq not in given_up]
        if lost:
            return f"the sender was told that {lost} came, and {came} did"
        if len(set(given_up)) != len(given_up):
            return f"told twice as given up: {given_up}"
        return None

    def goal(self, state: State) -> bool | None:
        """L4: everything has come, and the sender knows."""
        sender: Leaf = self.core(state, SENDING)
        if not self.repeats:
            wanted: int = sum(sender.sender.seqs.values()) - self.gives_up + state[1][3]
            return len(self.machines[state[0][TARGET]].host) >= wanted
        done = len(self.machines[state[0][TARGET]].host) + len(self.machines[state[0][SENDING]].host)
        return done >= self.messages_max and not sender.sender.unreceived


def written(disk: tuple[KeptRow, ...], rows: Iterable[KeptRow]) -> tuple[KeptRow, ...]:
    """A disk after a commit, in the order of its names."""
    kept = {row[:3]: row for row in disk}
    for row in rows:
        kept.pop(row[:3], None)
        if row.value is not None:
            kept[row[:3]] = row
    return tuple(kept[name] for name in sorted(kept))


__all__ = ["Neighbour", "RootsModel", "written"]
