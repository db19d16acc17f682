"""Exhaustive search: the machines of the coherence protocol, run through every order of events.

    state   one number for each system, a few counters, and what is on the network
    step    one event at one system; what it sends joins the network

The machines are the product's own, not a model of them. Each distinct state of a machine is kept once and has a
number; what an event does to it is computed once and looked up from then on. So a step of the search costs a
dictionary lookup, and a million states are searched in a minute.

The network is a *set* of messages that only grows: any of them may come at any time, again and again, or never. That
is loss, repetition and reordering at once. With `ordered=True` it is one queue for each direction instead, from which
a message is taken once.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from echostore.kernel.coherence.events import Effect, Event, LinkId, Received, Send
from echostore.kernel.coherence.messages import Update
from echostore.kernel.coherence.updates import frames_of

Step = tuple[str, "State"]
State = tuple[tuple[int, ...], tuple[Any, ...], Any]
"""Numbers of the machines, the model's own counters, the network."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    name: str
    states: int
    steps: int
    complete: bool
    violation: str | None = None
    trace: tuple[str, ...] = ()
    stuck: int = 0
    stuck_trace: tuple[str, ...] = ()


class Broken(Exception):
    """An event did what no event may do."""


class Machine:
    """One system as the search sees it: the real machine, and what its host knows. Never changed once it has a number."""

    __slots__ = ("core", "host")

    def __init__(self, core: Any, host: Any = None) -> None:
        self.core = core
        self.host = host


def freeze(thing: Any) -> Hashable:
    """Equal states have equal frozen forms. Order in dictionaries is no part of a state."""
    kind = type(thing)
    if kind is dict:
        return frozenset((key, freeze(value)) for key, value in thing.items())
    if kind is set:
        return frozenset(thing)
    slots = _MUTABLE.get(kind)
    if slots is None:
        slots = _slots_of(kind)
    if slots:
        return (kind.__name__, *[freeze(getattr(thing, name)) for name in slots])
    return thing  # type: ignore[no-any-return]  # everything else in a machine is an immutable value


def clone(thing: Any, known: dict[int, Any] | None = None) -> Any:
    """A copy that shares immutable values only; what two parts of a machine share, their copies share too."""
    kind = type(thing)
    if kind is dict or kind is set:
        if known is None:
            known = {}
        found = known.get(id(thing))
        if found is None:
            found = {key: clone(value, known) for key, value in thing.items()} if kind is dict else set(thing)
            known[id(thing)] = found
        return found
    slots = _MUTABLE.get(kind)
    if slots is None:
        slots = _slots_of(kind)
    if not slots:
        return thing
    if known is None:
        known = {}
    found = known.get(id(thing))
    if found is None:
        found = known[id(thing)] = object.__new__(kind)
        for name in slots:
            setattr(found, name, clone(getattr(thing, name), known))
    return found


_MUTABLE: dict[type, tuple[str, ...]] = {}


def _slots_of(kind: type) -> tuple[str, ...]:
    """The parts of a mutable machine; none for an immutable value. Frozen dataclasses and tuples are values."""
    fields = getattr(kind, "__slots__", ())
    params = getattr(kind, "__dataclass_params__", None)
    mutable = bool(fields) and not issubclass(kind, tuple) and params is None
    slots = _MUTABLE[kind] = tuple(fields) if mutable else ()
    return slots


class Model:
    """Systems, the links between them, what may happen, and what must hold. Subclasses say which."""

    name = "model"
    ordered = False
    lanes = 0
    """How many lanes an update is spread over; 0 for updates that travel in one piece."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self._numbers: dict[Hashable, int] = {}
        self.messages: list[tuple[int, Received]] = []
        """By number: the system that a message is for, and the event that it is there."""
        self._message_numbers: dict[tuple[int, Received], int] = {}
        self._memo: dict[tuple[int, int, Event], tuple[int, tuple[int, ...]]] = {}
        self._deliveries: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._checked: dict[Hashable, str | None] = {}

    # What a model says of itself

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        raise NotImplementedError

    def topology(self) -> dict[tuple[int, LinkId], tuple[int, LinkId]]:
        """Where each system's links lead: (system, its name for the link) to the same at the other end."""
        raise NotImplementedError

    def local(self, state: State) -> Iterator[Step]:
        """What may happen other than a delivery."""
        raise NotImplementedError

    def check(self, state: State) -> str | None:
        """What is wrong with a state."""
        raise NotImplementedError

    def watch(self, system: int, before: Machine, after: Machine) -> str | None:
        """What is wrong with a step."""
        return None

    def goal(self, state: State) -> bool | None:
        """Whether the least active client has what it wants; None for models without a goal."""
        return None

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        """What the host does about an effect that is not a Send."""
        return ()

    # Running machines

    def number(self, machine: Machine) -> int:
        key = freeze(machine)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.machines)
            self.machines.append(machine)
        return found

    def run(self, system: int, number: int, event: Event) -> tuple[int, tuple[int, ...]]:
        """The machine after an event, and the numbers of the messages it sent."""
        key = (system, number, event)
        found = self._memo.get(key)
        if found is None:
            machine: Machine = clone(self.machines[number])
            sent: list[int] = []
            events: list[Event] = [event]
            while events:
                for effect in machine.core.receive(events.pop(0)):
                    if isinstance(effect, Send):
                        sent += [self.message(system, each) for each in self.cut(effect)]
                    else:
                        events.extend(self.answer(system, machine, effect))
            wrong = self.watch(system, self.machines[number], machine)
            if wrong is not None:
                raise Broken(wrong)
            found = self._memo[key] = (self.number(machine), tuple(sent))
        return found

    def cut(self, send: Send) -> list[Send]:
        if not self.lanes or not isinstance(send.message, Update):
            return [send]
        return [Send(send.link, send.generation, frame) for frame in frames_of(send.message, self.lanes)]

    def way(self, system: int, send: Send) -> tuple[int, LinkId]:
        """The system at the other end of a link, and its name for it."""
        return self._ends[system, send.link]

    def message(self, system: int, send: Send) -> int:
        other, link = self.way(system, send)
        key = (other, Received(link, send.generation, send.message))
        found = self._message_numbers.get(key)
        if found is None:
            found = self._message_numbers[key] = len(self.messages)
            self.messages.append(key)
        return found

    def core(self, state: State, system: int) -> Any:
        return self.machines[state[0][system]].core

    def after(self, state: State, system: int, event: Event, counters: tuple[Any, ...] | None = None) -> State:
        """The state after an event at one system."""
        numbers, before, network = state
        number, sent = self.run(system, numbers[system], event)
        numbers = (*numbers[:system], number, *numbers[system + 1 :])
        return numbers, before if counters is None else counters, self.posted(network, sent)

    def posted(self, network: Any, sent: tuple[int, ...]) -> Any:
        if not self.ordered:
            for each in sent:
                network |= 1 << each
            return network
        for each in sent:
            lane = self._lanes[self.messages[each][0], self.messages[each][1].link]
            network = (*network[:lane], (*network[lane], each), *network[lane + 1 :])
        return network

    def quiet(self, state: State) -> bool:
        """Whether nothing is under way: the moment at which one who waits asks again."""
        return not any(state[2]) if self.ordered else True

    def cleared(self, state: State, system: int, link: LinkId | None = None) -> State:
        """On ordered links, what is under way on a link of a system, or on all of them, is lost with the connection."""
        if not self.ordered:
            return state
        here = {end for end in self._lanes if end[0] == system and link in (None, end[1])}
        lost = here | {self._ends[end] for end in here} | {end for end, other in self._ends.items() if other in here}
        lanes = {self._lanes[end] for end in lost}
        return state[0], state[1], tuple(() if lane in lanes else queue for lane, queue in enumerate(state[2]))

    def replaced(self, state: State, system: int, machine: Machine, counters: tuple[Any, ...]) -> State:
        """A system starts anew; its queues are gone with it."""
        numbers, _, network = state
        numbers = (*numbers[:system], self.number(machine), *numbers[system + 1 :])
        return numbers, counters, network

    def once(self, key: Hashable, judge: Callable[..., str | None], *arguments: Any) -> str | None:
        """A judgement that depends on the key alone."""
        if key not in self._checked:
            self._checked[key] = judge(*arguments)
        return self._checked[key]

    # Searching

    def initial(self) -> State:
        self._ends = self.topology()
        self._lanes = {end: lane for lane, end in enumerate(sorted({*self._ends, *self._ends.values()}))}
        machines, counters = self.start()
        numbers = tuple(self.number(machine) for machine in machines)
        return numbers, counters, tuple(() for _ in self._lanes) if self.ordered else 0

    def steps(self, state: State) -> Iterator[Step]:
        yield from self.local(state)
        if self.ordered:
            yield from self._deliver_in_order(state)
        else:
            yield from self._deliver_any(state)

    def _deliver_any(self, state: State) -> Iterator[Step]:
        numbers, counters, network = state
        rest, place = network, 0
        deliveries = self._deliveries
        while rest:
            low = (rest & -rest).bit_length()
            place += low
            rest >>= low
            message = place - 1
            system = self.messages[message][0]
            key = message << 32 | numbers[system]
            found = deliveries.get(key)
            if found is None:
                number, sent = self.run(system, numbers[system], self.messages[message][1])
                mask = 0
                for each in sent:
                    mask |= 1 << each
                found = deliveries[key] = (number, sent, mask)
            number, _, mask = found
            if number != numbers[system] or mask | network != network:
                after = (*numbers[:system], number, *numbers[system + 1 :])
                yield "deliver", (after, counters, network | mask)

    def _deliver_in_order(self, state: State) -> Iterator[Step]:
        numbers, counters, network = state
        for lane, queue in enumerate(network):
            if queue:
                system, event = self.messages[queue[0]]
                number, sent = self.run(system, numbers[system], event)
                after = (*numbers[:system], number, *numbers[system + 1 :])
                rest = (*network[:lane], queue[1:], *network[lane + 1 :])
                yield "deliver", (after, counters, self.posted(rest, sent))

    def describe(self, before: State, after: State) -> str:
        """The step between two states, for people."""
        for label, state in self.local(before):
            if state == after:
                return label
        for message, (system, event) in enumerate(self.messages):
            if self.ordered:
                break
            if before[2] >> message & 1:
                number, sent = self.run(system, before[0][system], event)
                after_numbers = (*before[0][:system], number, *before[0][system + 1 :])
                if (after_numbers, before[1], self.posted(before[2], sent)) == after:
                    return f"system {system} hears {event.message}"
        return "deliver"


@dataclass(slots=True)
class _Graph:
    states: list[State] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    followers: list[tuple[int, ...]] = field(default_factory=list)


def search(model: Model, *, limit: int = 1_000_000, liveness: bool = True) -> Found:
    """Every state that can be reached, up to a limit. Stops at the first that breaks an invariant.

    With a goal: the number of states from which the goal can't be reached any more.
    """
    graph = _Graph()
    start = model.initial()
    index: dict[State, int] = {start: 0}
    graph.states.append(start)
    graph.parents.append(-1)
    liveness = liveness and model.goal(start) is not None
    steps = place = 0
    wrong = model.check(start)
    while place < len(graph.states) and wrong is None and len(graph.states) <= limit:
        followers = []
        try:
            for _, after in model.steps(graph.states[place]):
                steps += 1
                found = index.get(after)
                if found is None:
                    found = index[after] = len(graph.states)
                    graph.states.append(after)
                    graph.parents.append(place)
                    wrong = model.check(after)
                    if wrong is not None:
                        break
                if liveness:
                    followers.append(found)
        except (Broken, AssertionError) as error:  # a machine's own assertion is an invariant too
            return Found(model.name, len(index), steps, False, str(error), _trace(model, graph, place))
        if liveness:
            graph.followers.append(tuple(followers))
        place += 1
    count = len(graph.states)
    if wrong is not None:
        return Found(model.name, count, steps, False, wrong, _trace(model, graph, count - 1))
    complete = place == count
    if not liveness or not complete:
        return Found(model.name, count, steps, complete)
    stuck = _stuck(model, graph)
    trace = _trace(model, graph, stuck[0]) if stuck else ()
    return Found(model.name, count, steps, True, stuck=len(stuck), stuck_trace=trace)


def _stuck(model: Model, graph: _Graph) -> list[int]:
    """States from which no goal can be reached: swept backwards until nothing changes."""
    good = bytearray(1 if model.goal(state) else 0 for state in graph.states)
    changed = True
    while changed:
        changed = False
        for place in range(len(good) - 1, -1, -1):
            if not good[place]:
                for follower in graph.followers[place]:
                    if good[follower]:
                        good[place] = 1
                        changed = True
                        break
    return [place for place, each in enumerate(good) if not each]


def _trace(model: Model, graph: _Graph, place: int) -> tuple[str, ...]:
    path = []
    while graph.parents[place] >= 0:
        parent = graph.parents[place]
        path.append(model.describe(graph.states[parent], graph.states[place]))
        place = parent
    return tuple(reversed(path))
