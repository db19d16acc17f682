"""Two live peers in one process, linked without a network: for demonstrations and tests.

    joined = link(laptop, phone, party.key)
    joined.pump()          # replicate until both are quiet
    joined.cut(); ...; joined.heal().pump()

Frames go through their bytes, as on a wire, in order and without loss. Time stands still except for what sessions
wait for.
"""

from collections import deque
from typing import Protocol, Self

from echostore.kernel.ids import PartyKey
from echostore.kernel.sync.endpoint import Endpoint
from echostore.kernel.sync.events import Effect, Score
from echostore.kernel.sync.frames import Frame
from echostore.kernel.sync.port import SyncPort
from echostore.wire.sync import decode_frame, encode_frame

PATIENCE_S = 5.0
"""How far virtual time may run ahead while nothing moves: past every delay of a session that is not a repetition."""

STEPS_MAX = 10_000_000
"""Frames after which a link that is still not quiet never will be."""


class SyncPeer(Protocol):
    """A peer that offers its parties to replication."""

    def sync_port(self, party: PartyKey) -> SyncPort: ...


def link(one: SyncPeer, other: SyncPeer, party: PartyKey) -> "MemoryLink":
    """Connect two peers for one party; nothing moves until `pump`."""
    return connect(one.sync_port(party), other.sync_port(party))


def connect(one: SyncPort, other: SyncPort) -> "MemoryLink":
    return MemoryLink((one, other))


class MemoryLink:
    """Both ends of one connection and what is under way between them."""

    def __init__(self, ports: tuple[SyncPort, SyncPort]) -> None:
        self.now = 0.0
        self.frames = 0
        self.bytes = 0
        self.scores: list[Score] = []
        self._ports = ports
        self._ends: list[Endpoint] = []
        self._under_way: deque[tuple[Endpoint, bytes]] = deque()
        self.heal()

    def pump(self) -> Self:
        """Deliver frames until neither side has anything to say."""
        quiet_since = self.now
        for _ in range(STEPS_MAX):
            if self._under_way:
                end, data = self._under_way.popleft()
                end.receive(decode_frame(data))
                quiet_since = self.now
                continue
            wakes = [wake for end in self._ends if (wake := end.session.wake_at()) is not None]
            if not wakes or (self.now - quiet_since >= PATIENCE_S or min(wakes) > quiet_since + PATIENCE_S):
                return self
            self.now = max(self.now, min(wakes))
            for end in list(self._ends):
                end.tick()
        raise AssertionError(f"the link is not quiet after {STEPS_MAX} steps")

    def cut(self) -> Self:
        """Break the connection: what is under way is lost."""
        for end in self._ends:
            end.stop()
        self._ends.clear()
        self._under_way.clear()
        return self

    def heal(self) -> Self:
        """A new connection, as after a reconnect."""
        self.cut()
        ends = [self._end(0), self._end(1)]
        self._ends.extend(ends)
        for end in ends:
            end.start()
        return self

    def _end(self, number: int) -> Endpoint:
        return Endpoint(
            self._ports[number],
            send=lambda frame: self._send(1 - number, frame),
            clock=lambda: self.now,
            tell=self._heed,
        )

    def _send(self, receiver: int, frame: Frame) -> None:
        if self._ends:
            data = encode_frame(frame)
            self.frames += 1
            self.bytes += len(data)
            self._under_way.append((self._ends[receiver], data))

    def _heed(self, effect: Effect) -> None:
        if isinstance(effect, Score):
            self.scores.append(effect)
