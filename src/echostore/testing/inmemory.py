"""Two live peers in one process, linked without a network: for demonstrations and tests.

    joined = link(laptop, phone, party.key)
    joined.pump()          # replicate until both are quiet
    joined.cut(); ...; joined.heal().pump()

Frames go through their bytes, as on a wire, in order and without loss. Time stands still except for what sessions
wait for.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, Self

from echostore.kernel.ids import PartyKey
from echostore.kernel.sync.endpoint import Endpoint
from echostore.kernel.sync.events import Effect, Progress, Score, Unobtainable
from echostore.kernel.sync.frames import Blocks, Frame, Request
from echostore.kernel.sync.port import SyncPort
from echostore.wire.sync import decode_frame, encode_frame

PATIENCE_S = 5.0
"""How far virtual time may run ahead while nothing moves: past every delay of a session that is not a repetition."""

WAKES_MAX = 10_000
"""Wakes without a frame after which a link that is still not quiet never will be."""


class SyncParty(Protocol):
    """A party that keeps account of what other devices hold."""

    def acknowledge(
        self, device: bytes, lengths: Mapping[bytes, int], processed: Mapping[bytes, int] | None = None
    ) -> None: ...
    def announced(self, feed: bytes, length: int) -> None: ...


class SyncPeer(Protocol):
    """A peer that offers its parties to replication."""

    @property
    def device(self) -> bytes: ...
    def sync_port(self, party: PartyKey) -> SyncPort: ...
    def party(self, which: PartyKey) -> SyncParty: ...


Lost = Callable[[int, Unobtainable], None]
"""Told when one side, by its number, can't have what it wants."""


def _told_nobody(number: int, effect: Unobtainable) -> None:
    """Who does not ask is not told."""


def link(one: SyncPeer, other: SyncPeer, party: PartyKey, lost: Lost = _told_nobody) -> "MemoryLink":
    """Connect two peers for one party; nothing moves until `pump`. Receipts on both sides see what the other holds."""
    peers = (one, other)

    def account(number: int, progress: Progress) -> None:
        known = peers[number].party(party)
        known.announced(progress.feed, progress.held)
        feed = progress.feed
        known.acknowledge(peers[1 - number].device, {feed: progress.held}, {feed: progress.processed})

    return MemoryLink((one.sync_port(party), other.sync_port(party)), account, lost)


def connect(one: SyncPort, other: SyncPort) -> "MemoryLink":
    """Connect two ports; see `link`."""
    return MemoryLink((one, other))


class MemoryLink:
    """Both ends of one connection and what is under way between them."""

    def __init__(
        self,
        ports: tuple[SyncPort, SyncPort],
        account: Callable[[int, Progress], None] = lambda number, progress: None,
        lost: Lost = _told_nobody,
    ) -> None:
        self.now = 0.0
        self.frames = 0
        self.bytes = 0
        self.scores: list[Score] = []
        self._ports = ports
        self._account, self._lost = account, lost
        self._ends: list[Endpoint] = []
        self._under_way: deque[tuple[Endpoint, bytes]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        """What peers called back from their own threads; `pump` runs it in its own."""
        self.heal()

    def pump(self, frames_max: int | None = None) -> Self:
        """Deliver frames until neither side has anything to say, or so many have passed."""
        quiet_since, wakes_in_vain = self.now, 0
        delivered = 0
        while wakes_in_vain < WAKES_MAX:
            if self._calls:
                self._calls.popleft()()
            elif frames_max is not None and delivered >= frames_max:
                return self
            elif self._under_way:
                delivered += 1
                end, data = self._under_way.popleft()
                frame = decode_frame(data)
                end.receive(frame)
                if isinstance(frame, (Blocks, Request)):  # tips that the other side won't take are told for ever
                    quiet_since, wakes_in_vain = self.now, 0
            else:
                wakes_in_vain += 1
                wakes = [wake for end in self._ends if (wake := end.session.wake_at()) is not None]
                if not wakes or min(wakes) > quiet_since + PATIENCE_S:
                    return self
                self.now = max(self.now, min(wakes))
                for end in list(self._ends):
                    end.tick()
        raise AssertionError(f"a session keeps waking up at {self.now} and has nothing to say")

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
            tell=lambda effect: self._heed(number, effect),
            defer=self._calls.append,
        )

    def _send(self, receiver: int, frame: Frame) -> None:
        if self._ends:
            data = encode_frame(frame)
            self.frames += 1
            self.bytes += len(data)
            self._under_way.append((self._ends[receiver], data))

    def _heed(self, number: int, effect: Effect) -> None:
        if isinstance(effect, Score):
            self.scores.append(effect)
        elif isinstance(effect, Progress):
            self._account(number, effect)
        elif isinstance(effect, Unobtainable):
            self._lost(number, effect)
