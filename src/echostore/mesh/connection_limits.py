"""Which connections get room, how much a stranger may cost, and who is evicted. No sockets and no clock: `Node` asks.

    socket ── handshake ──┬── known device ── no limit but LINKS
                          └── stranger ────── slots, bytes, frames, seconds ──┬── known: it shares a party now
                                                                              └── evicted

A *known* device is a member of a party that is shared here, another device of this identity, or one that this peer
dialled. All others are strangers, also newcomers that name a party of ours: its key is in every ticket. Only strangers
and unfinished handshakes count against the quota of an address, since many members may share one address.

Invariants (tests cite them by number)
    L1  Strangers have at most STRANGERS slots, and never the last LINKS - STRANGERS: these are for known devices.
    L2  A known device is refused only when known devices alone take all LINKS.
    L3  A new stranger or handshake displaces an old one: of its own address when that is at its quota, else of the
        address that has the most. Of an address the one that names no party of ours goes first, then the oldest.
    L4  A stranger is evicted when it has cost more than its bytes or frames, or shares no party in time. One that brings
        what counts (blocks of admitted feeds) has both back.
    L5  All strangers together hold at most STRANGERS_BYTES; who has sent the most goes.
    L6  Every eviction and refusal is counted by its reason.
"""

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, Generic, TypeVar

LOCKOUT_S: Final = 60.0
"""So long a lock-out is reported after it was last seen."""

ADDRESSES_MAX: Final = 4096
"""Addresses of known devices that are remembered."""

HandshakeT = TypeVar("HandshakeT", bound=Hashable)
LinkT = TypeVar("LinkT", bound=Hashable)


class Eviction(StrEnum):
    """Why a stranger, or a handshake, had to go."""

    ROOM = "room"
    """Another one came, and all slots were taken."""
    ADDRESS = "address"
    """Another one came from the same address, which was at its quota."""
    TIME = "time"
    """It shared no party in time."""
    BYTES = "bytes"
    FRAMES = "frames"
    TOTAL_BYTES = "total-bytes"
    """All strangers together have sent too much, and this one the most."""
    KNOWN = "known"
    """A known device needed the slot."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What strangers may cost. An honest newcomer needs a few kilobytes, a dozen frames and a second."""

    links_max: int = 512
    strangers_max: int = 256
    strangers_per_address_max: int = 128
    handshakes_max: int = 384
    handshakes_per_address_max: int = 320
    """A handshake that is displaced was one of so many of its address: an honest one takes milliseconds."""
    seconds: float = 60.0
    bytes_max: int = 4 * 1024 * 1024
    frames_max: int = 512
    total_bytes_max: int = 32 * 1024 * 1024


@dataclass(slots=True)
class Stranger:
    address: str
    deadline: float
    size_bytes: int = 0
    frames: int = 0
    newcomer: bool = False
    """Whether it has named a party that is shared here."""


@dataclass(slots=True)
class LimitCounters:
    """What has happened since the start; shown as metrics."""

    evicted: Counter[Eviction] = field(default_factory=Counter)
    """Strangers, by reason."""
    displaced: Counter[Eviction] = field(default_factory=Counter)
    """Handshakes that had to go before they were over."""
    strangers_refused: int = 0
    known_refused: int = 0
    """Known devices that were turned away because known devices take all connections."""
    starved: int = 0
    """Handshakes that ran out of time while they waited for their turn."""
    size_bytes: int = 0
    frames: int = 0
    """What strangers have sent."""


class ConnectionLimiter(Generic[HandshakeT, LinkT]):
    """See the module. Links and handshakes are keys that the caller chooses; what it has to end is returned."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counters = LimitCounters()
        self._known: set[LinkT] = set()
        self._strangers: dict[LinkT, Stranger] = {}
        self._handshakes: dict[HandshakeT, str] = {}
        self._strangers_at: Counter[str] = Counter()
        self._handshakes_at: Counter[str] = Counter()
        self._total_bytes = 0
        self._known_addresses: dict[str, None] = {}
        self._lockouts: dict[str, float] = {}

    # What others read

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def handshakes(self) -> int:
        return len(self._handshakes)

    @property
    def strangers_bytes(self) -> int:
        """What the strangers that are connected now have sent."""
        return self._total_bytes

    def lockouts(self, now: float) -> list[str]:
        """Why members may be locked out, as of the last minute; empty when all is well."""
        return [why for why, at in self._lockouts.items() if now - at <= LOCKOUT_S]

    def preferred(self, address: str) -> bool:
        """Whether a known device was seen at an address: handshakes from there go first."""
        return address in self._known_addresses

    def remember(self, address: str) -> None:
        """A known device was seen there."""
        self._known_addresses.pop(address, None)
        self._known_addresses[address] = None
        if len(self._known_addresses) > ADDRESSES_MAX:
            del self._known_addresses[next(iter(self._known_addresses))]

    # Handshakes

    def handshake_began(self, key: HandshakeT, address: str, now: float) -> list[HandshakeT]:
        """Register a handshake; returns those that have to go for it (L3)."""
        displaced: list[HandshakeT] = []
        if self._handshakes_at[address] >= self.limits.handshakes_per_address_max:
            displaced.append(self._displace(address, Eviction.ADDRESS, now))
        elif len(self._handshakes) >= self.limits.handshakes_max:
            displaced.append(self._displace(_busiest(self._handshakes_at), Eviction.ROOM, now))
        self._handshakes[key] = address
        self._handshakes_at[address] += 1
        return displaced

    def _displace(self, address: str, why: Eviction, now: float) -> HandshakeT:
        oldest = next(key for key, at in self._handshakes.items() if at == address)
        self.handshake_ended(oldest)
        self.counters.displaced[why] += 1
        if self.preferred(address):
            self._lockouts["handshakes are displaced at an address of known devices"] = now
        return oldest

    def handshake_ended(self, key: HandshakeT) -> None:
        address = self._handshakes.pop(key, None)
        if address is not None:
            _count_down(self._handshakes_at, address)

    def handshake_starved(self, address: str, now: float) -> None:
        """A handshake ran out of time before it had its turn."""
        self.counters.starved += 1
        if self.preferred(address):
            self._lockouts["handshakes wait too long for their turn at an address of known devices"] = now

    def out_of_files(self, now: float) -> list[HandshakeT]:
        """The process may open no more files: who has to go so that the next connection can be taken."""
        self._lockouts["no more files can be opened, so that no connection can be taken"] = now
        oldest = next(iter(self._handshakes), None)
        if oldest is None:
            return []
        self.handshake_ended(oldest)
        self.counters.displaced[Eviction.ROOM] += 1
        return [oldest]

    # Links

    def link_began(
        self, key: LinkT, address: str, now: float, *, known: bool
    ) -> tuple[bool, list[tuple[LinkT, Eviction]]]:
        """Give a link a slot. False when there is none for it; beside it the strangers that have to go."""
        full = len(self._known) + len(self._strangers) >= self.limits.links_max
        if known:
            evicted = [*self._evict_crowded(Eviction.KNOWN)] if full else []
            if full and not evicted:
                self.counters.known_refused += 1
                self._lockouts[f"known devices were refused: {self.limits.links_max} are connected"] = now
                return False, []
            self._known.add(key)
            self.remember(address)
            return True, evicted
        if self._strangers_at[address] >= self.limits.strangers_per_address_max:
            evicted = [*self._evict_of(address, Eviction.ADDRESS)]
        elif full or len(self._strangers) >= self.limits.strangers_max:
            evicted = [*self._evict_crowded(Eviction.ROOM)]
            if not evicted:
                self.counters.strangers_refused += 1
                return False, []
        else:
            evicted = []
        self._strangers[key] = Stranger(address, now + self.limits.seconds)
        self._strangers_at[address] += 1
        return True, evicted

    def link_ended(self, key: LinkT) -> None:
        self._known.discard(key)
        stranger = self._strangers.pop(key, None)
        if stranger is not None:
            self._total_bytes -= stranger.size_bytes
            _count_down(self._strangers_at, stranger.address)

    def became_known(self, key: LinkT) -> None:
        """The device shares a party now: nothing of what it sent counts any more."""
        stranger = self._strangers.get(key)
        if stranger is not None:
            self.link_ended(key)
            self._known.add(key)
            self.remember(stranger.address)

    def became_stranger(self, key: LinkT, address: str, now: float) -> list[tuple[LinkT, Eviction]]:
        """The device was removed from all that it shared: it has a stranger's time from now on."""
        if key not in self._known:
            return []
        self._known.discard(key)
        fits, evicted = self.link_began(key, address, now, known=False)
        assert fits, "its own slot has just become free"
        return evicted

    def newcomer(self, key: LinkT) -> None:
        """The stranger has named a party of ours: it is evicted after those that have not (L3)."""
        if key in self._strangers:
            self._strangers[key].newcomer = True

    # Budgets

    def received(self, key: LinkT, size_bytes: int) -> list[tuple[LinkT, Eviction]]:
        """A link has sent bytes, whole frames or not; returns who has to go (L4, L5)."""
        stranger = self._strangers.get(key)
        if stranger is None:
            return []
        self.counters.size_bytes += size_bytes
        stranger.size_bytes += size_bytes
        self._total_bytes += size_bytes
        if stranger.size_bytes > self.limits.bytes_max:
            return [self._evict(key, Eviction.BYTES)]
        if self._total_bytes > self.limits.total_bytes_max:
            most = max(self._strangers, key=lambda each: self._strangers[each].size_bytes)
            return [self._evict(most, Eviction.TOTAL_BYTES)]
        return []

    def frame(self, key: LinkT) -> list[tuple[LinkT, Eviction]]:
        """A link has sent one more frame."""
        stranger = self._strangers.get(key)
        if stranger is None:
            return []
        self.counters.frames += 1
        stranger.frames += 1
        return [self._evict(key, Eviction.FRAMES)] if stranger.frames > self.limits.frames_max else []

    def useful(self, key: LinkT, now: float) -> None:
        """What a stranger has sent counts here: it has its budget and its time back (L4)."""
        stranger = self._strangers.get(key)
        if stranger is not None:
            self._total_bytes -= stranger.size_bytes
            stranger.size_bytes = stranger.frames = 0
            stranger.deadline = now + self.limits.seconds

    def expired(self, now: float) -> list[tuple[LinkT, Eviction]]:
        """Strangers whose time is over."""
        late = [key for key, stranger in self._strangers.items() if stranger.deadline <= now]
        return [self._evict(key, Eviction.TIME) for key in late]

    def next_deadline(self) -> float | None:
        return min((stranger.deadline for stranger in self._strangers.values()), default=None)

    # Eviction

    def _evict(self, key: LinkT, why: Eviction) -> tuple[LinkT, Eviction]:
        self.link_ended(key)
        self.counters.evicted[why] += 1
        return key, why

    def _evict_crowded(self, why: Eviction) -> Iterator[tuple[LinkT, Eviction]]:
        if self._strangers:
            yield from self._evict_of(_busiest(self._strangers_at), why)

    def _evict_of(self, address: str, why: Eviction) -> Iterator[tuple[LinkT, Eviction]]:
        there = [(stranger.newcomer, key) for key, stranger in self._strangers.items() if stranger.address == address]
        silent = (key for newcomer, key in there if not newcomer)
        yield self._evict(next(silent, there[0][1]), why)


class WorkShare:
    """How much of one thread's time a kind of work may take: a share of it in the long run, and a burst at once."""

    def __init__(self, share: float, burst_s: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._paid_until = -burst_s / share
        self.spent_s = 0.0

    def wait_s(self, now: float) -> float:
        """How long the next piece of work has to wait."""
        return max(0.0, self._paid_until - self._burst_s / self._share - now)

    def spent(self, seconds: float, now: float) -> None:
        self.spent_s += seconds
        self._paid_until = max(self._paid_until, now) + seconds / self._share


@lru_cache(4096)
def address_group(host: str) -> str:
    """What counts as one address: of IPv6 the network of 64 bits, of which one customer has all addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)


def _busiest(counts: Counter[str]) -> str:
    return max(counts, key=counts.__getitem__)


def _count_down(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if not counts[address]:
        del counts[address]
