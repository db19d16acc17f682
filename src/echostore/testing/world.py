"""A whole party in one thread and in virtual time: peers, links, faults. One seed replays one run, event by event.

    world = World(seed=7, peers=3, faults=Faults(loss=0.1))
    world.write("a", "hello").partition("a|bc").run(5).crash("b").run(2).restart("b").heal().settle()

A run has two phases, as in TigerBeetle: `chaos` breaks things while peers write (safety), then everything is healed
and `settle` demands that all peers agree (liveness). Each event leaves a line in `trace`, and the nodes leave a
history that `echostore.testing.checker` reads.
"""

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from echostore.kernel.sync.endpoint import Endpoint
from echostore.kernel.sync.events import Close, Effect, Ingest, Score
from echostore.kernel.sync.frames import Frame
from echostore.kernel.sync.port import SyncPort
from echostore.kernel.sync.turns import Quotas
from echostore.testing.memory_node import MemoryNode
from echostore.testing.network import Faults, Network
from echostore.testing.paced_intake import PacedIntake
from echostore.wire.sync import decode_frame, encode_frame

RECONNECT_S = 0.5
"""How long after a connection broke the next one stands."""

SETTLE_LIMIT_S = 600.0
"""Virtual seconds after which peers that do not agree never will: 20 of the longest repetitions."""

EVENTS_PER_INSTANT_MAX = 10_000
"""Events at one moment of virtual time after which somebody keeps waking up without doing anything."""

Record = Callable[[dict[str, Any]], None]


class Node(Protocol):
    """What the world needs of a peer. `echostore.testing.memory_node` and `peer_node` have one each."""

    name: str
    up: bool

    def port(self) -> SyncPort:
        """The party as replication sees it; a new one after every restart."""
        ...

    def write(self, text: str) -> None:
        """One client write, not durable yet."""
        ...

    def flush(self) -> None:
        """Make what was written durable."""
        ...

    def crash(self) -> None:
        """End as a process does: without closing anything."""
        ...

    def restart(self) -> None: ...

    def state(self) -> tuple[dict[str, tuple[int, str]], str]:
        """The data timeframe (feed -> last seq and its hash) and the hash of the state."""
        ...


class NotSettled(AssertionError):
    """Peers did not come to agree; the message names the seed and shows the end of the trace."""


@dataclass(slots=True)
class Connection:
    """One connection between two nodes; frames of an earlier connection never reach a later one."""

    number: int
    names: tuple[str, str]
    ends: dict[str, Endpoint] = field(default_factory=dict)
    alive: bool = True
    ticking: dict[str, float] = field(default_factory=dict)

    def other(self, name: str) -> str:
        return self.names[1] if self.names[0] == name else self.names[0]


class World:
    """See the module. Methods that change the world return it, so that scenarios read as sentences."""

    def __init__(
        self,
        seed: int,
        *,
        peers: int = 3,
        faults: Faults | None = None,
        links: str | None = None,
        make: Callable[[str, Record], Node] = MemoryNode,
        decode: bool = True,
        pace: Mapping[str, float] | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """`links` names the pairs that are connected ("ab,bc"); all are by default. `pace`: the blocks that some
        nodes take in per second, in the turns that `quotas` give; the others, any number at once."""
        self.seed = seed
        self.now = 0.0
        self.trace: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.scores: list[tuple[str, str, Score]] = []
        self.chance = random.Random(seed)
        self.network = Network(self.chance, faults or Faults())
        self._decode = decode
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._written = 0
        names = [chr(ord("a") + number) for number in range(peers)]
        self.nodes: dict[str, Node] = {name: make(name, self._record) for name in names}
        self.intakes = {
            name: PacedIntake(blocks_per_s, quotas or Quotas(), clock=lambda: self.now, after=self._after)
            for name, blocks_per_s in (pace or {}).items()
        }
        pairs = [pair.strip() for pair in links.split(",")] if links else None
        self._pairs = [
            (one, other)
            for at, one in enumerate(names)
            for other in names[at + 1 :]
            if pairs is None or one + other in pairs or other + one in pairs
        ]
        self._connections: dict[tuple[str, str], Connection] = {}
        self._connected = 0
        for pair in self._pairs:
            self._connect(pair)

    # Faults and work, as sentences

    def write(self, name: str, text: str | None = None, *, flush: bool = True) -> Self:
        node = self.nodes[name]
        if node.up:
            self._written += 1
            text = text or f"message {self._written}"
            self._say(f"write {name} {text}")
            node.write(text)
            if flush:
                node.flush()
            self._look_after_all()
        return self

    def partition(self, split: str) -> Self:
        self._say(f"partition {split}")
        self.network.partition(split, self.nodes)
        return self

    def heal(self) -> Self:
        self._say("heal")
        self.network.heal()
        return self

    def clog(self, sender: str, receiver: str, seconds: float) -> Self:
        self._say(f"clog {sender}>{receiver} {seconds:.3f}")
        self.network.clog(sender, receiver, self.now + seconds)
        return self

    def flap(self, split: str, *, period_s: float, times: int) -> Self:
        """A partition that comes and goes: half a period cut, half a period whole."""
        for _ in range(times):
            self.partition(split).run(period_s / 2).heal().run(period_s / 2)
        return self

    def crash(self, name: str) -> Self:
        node = self.nodes[name]
        if node.up:
            self._say(f"crash {name}")
            for connection in self._connections_of(name):
                self._break(connection)
            node.crash()
        return self

    def restart(self, name: str) -> Self:
        node = self.nodes[name]
        if not node.up:
            self._say(f"restart {name}")
            node.restart()
        return self

    def run(self, seconds: float) -> Self:
        """Let virtual time pass."""
        end = self.now + seconds
        at_once = 0
        while self._queue and self._queue[0][0] <= end:
            at_once = at_once + 1 if self._queue[0][0] <= self.now else 0
            if at_once > EVENTS_PER_INSTANT_MAX:
                raise NotSettled(f"seed {self.seed}: time stands still at {self.now}\n" + "\n".join(self.trace[-30:]))
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end
        return self

    def chaos(self, seconds: float, *, partitions: bool = True, crashes: bool = True) -> Self:
        """Random writes and faults, all from the seed."""
        end = self.now + seconds
        names = sorted(self.nodes)
        while self.now < end:
            roll, name = self.chance.random(), self.chance.choice(names)
            if roll < 0.6:
                self.write(name, flush=self.chance.random() < 0.8)
            elif roll < 0.7 and partitions:
                self.partition(self._random_split(names))
            elif roll < 0.8:
                self.heal()
            elif roll < 0.85:
                self.clog(name, self.chance.choice(names), self.chance.uniform(0, 5))
            elif roll < 0.92 and crashes:
                self.crash(name)
            elif crashes:
                self.restart(name)
            self.run(self.chance.expovariate(5))
        return self

    def revive(self) -> Self:
        """Heal every link and restart every node: what comes before `settle`."""
        for name in self.nodes:
            self.restart(name)
        return self.heal()

    def settle(self, limit_s: float = SETTLE_LIMIT_S) -> Self:
        """Let time pass until all nodes that are up agree; NotSettled if they do not."""
        if not self.network.whole:
            raise ValueError("a partitioned world does not settle: heal it first")
        for node in self.nodes.values():
            if node.up:
                node.flush()
        self._look_after_all()
        end = self.now + limit_s
        while not self.agreed():
            if self.now >= end:
                tail = "\n".join(self.trace[-30:])
                raise NotSettled(f"seed {self.seed}: no agreement after {limit_s} s\n{self._differences()}\n{tail}")
            self.run(0.25)
        self._say("settled")
        for name, node in self.nodes.items():
            if node.up:
                timeframe, state_hash = node.state()
                event = {"kind": "state", "peer": name, "timeframe": timeframe, "state_hash": state_hash}
                self._record({**event, "admission": "all", "base": ""})
        self._record({"kind": "quiesce", "peers": [name for name, node in self.nodes.items() if node.up]})
        return self

    # What to look at

    def agreed(self) -> bool:
        """Whether all nodes that are up hold the same feeds and have the same state."""
        up = [node for node in self.nodes.values() if node.up]
        tips = [sorted((tip.feed, tip.tip) for tip in node.port().feeds()) for node in up]
        if any(each != tips[0] for each in tips):
            return False
        states = [node.state() for node in up]
        return all(each == states[0] for each in states)

    def digest(self) -> str:
        """The hash of the whole trace and history: equal for equal seeds, in every process."""
        lines = [*self.trace, *map(json.dumps, self.history)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def endpoints(self) -> list[Endpoint]:
        return [
            end for connection in self._connections.values() if connection.alive for end in connection.ends.values()
        ]

    # Connections

    def _connect(self, pair: tuple[str, str]) -> None:
        if not all(self.nodes[name].up for name in pair):
            self._after(RECONNECT_S, lambda: self._connect(pair))
            return
        self._connected += 1
        connection = self._connections[pair] = Connection(self._connected, pair)
        self._say(f"connect {pair[0]}-{pair[1]} #{connection.number}")
        for name in pair:
            connection.ends[name] = self._endpoint(connection, name)
        for name in pair:
            connection.ends[name].start()
            self._look_after(connection, name)

    def _endpoint(self, connection: Connection, name: str) -> Endpoint:
        intake = self.intakes.get(name)

        def arrived(effect: Ingest, act: Callable[[], None]) -> None:
            if intake is None:
                act()
            else:
                intake.arrived(connection.other(name), effect, lambda: self._take_in(act))

        return Endpoint(
            self.nodes[name].port(),
            send=lambda frame: self._send(connection, name, frame),
            clock=lambda: self.now,
            tell=lambda effect: self._heed(connection, name, effect),
            intake=arrived,
            last=lambda feed: intake is not None and intake.last(feed),
        )

    def _take_in(self, act: Callable[[], None]) -> None:
        act()
        self._look_after_all()

    def _break(self, connection: Connection) -> None:
        if connection.alive:
            connection.alive = False
            for end in connection.ends.values():
                end.stop()
            self._say(f"broken {connection.names[0]}-{connection.names[1]} #{connection.number}")
            self._after(RECONNECT_S, lambda: self._connect(connection.names))

    def _heed(self, connection: Connection, name: str, effect: Effect) -> None:
        if isinstance(effect, Score):
            self._say(f"score {name} about {connection.other(name)}: {effect.misbehaviour}")
            self.scores.append((name, connection.other(name), effect))
        elif isinstance(effect, Close):
            self._break(connection)

    def _send(self, connection: Connection, sender: str, frame: Frame) -> None:
        receiver = connection.other(sender)
        arrivals = self.network.arrivals(sender, receiver, self.now)
        data = encode_frame(frame) if self._decode else b""
        fate = " ".join(f"@{at:.6f}" for at in arrivals) or "lost"
        self._say(f"{sender}>{receiver} #{connection.number} {type(frame).__name__} {len(data)} {fate}")
        for at in arrivals:
            self._at(at, lambda: self._arrive(connection, receiver, decode_frame(data) if self._decode else frame))

    def _arrive(self, connection: Connection, receiver: str, frame: Frame) -> None:
        # A partition also stops what was under way when it came.
        if connection.alive and self.network.passes(connection.other(receiver), receiver):
            connection.ends[receiver].receive(frame)
            self._look_after_all()

    def _look_after_all(self) -> None:
        for connection in list(self._connections.values()):
            for name in connection.names:
                self._look_after(connection, name)

    def _look_after(self, connection: Connection, name: str) -> None:
        """Wake a session when it wants to be woken."""
        wake_at = connection.ends[name].session.wake_at()
        if not connection.alive or wake_at is None or connection.ticking.get(name, wake_at + 1) <= wake_at:
            return
        connection.ticking[name] = wake_at
        self._at(max(wake_at, self.now), lambda: self._tick(connection, name, wake_at))

    def _tick(self, connection: Connection, name: str, due: float) -> None:
        if connection.alive and connection.ticking.get(name) == due:
            del connection.ticking[name]
            connection.ends[name].tick()
            self._look_after_all()

    # Inside

    def _connections_of(self, name: str) -> list[Connection]:
        return [each for each in self._connections.values() if name in each.names]

    def _random_split(self, names: list[str]) -> str:
        shuffled = list(names)
        self.chance.shuffle(shuffled)
        cut = self.chance.randrange(1, len(shuffled)) if len(shuffled) > 1 else 1
        return "".join(shuffled[:cut]) + self.chance.choice("||>") + "".join(shuffled[cut:])

    def _differences(self) -> str:
        lines = []
        for name, node in self.nodes.items():
            if node.up:
                tips = ", ".join(f"{tip.feed.hex()[:6]}:{tip.tip.length}" for tip in node.port().feeds())
                lines.append(f"{name}: {tips} state {node.state()[1][:8]}")
        return "\n".join(lines)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (time, self._scheduled, action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def _say(self, line: str) -> None:
        self.trace.append(f"{self.now:.6f} {line}")

    def _record(self, event: dict[str, Any]) -> None:
        self.history.append({"time": round(self.now, 6), **event})
