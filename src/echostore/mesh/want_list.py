"""Which blob to ask of whom: rarest first, several sources at once, nobody twice for the same lie. No sockets, no clock.

    add(cids)                    blobs that are wanted
    source(s) / lost(s)          who may have them
    heard(s, have, missing)      what a source says of them
    arrived(s, cid) / poisoned   what came
    plan(now) -> [Ask | Fetch]   what to send now

A source is first asked which of the blobs it has, unless it is the only one: then it is asked for the blobs at once.
How many blobs a source has under way depends on how large they turn out to be: about UNDER_WAY_BYTES of them, so that
round trips cost nothing and one link holds little. A blob that does not come in PATIENCE_S is asked of another.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from echostore.kernel.ids import Cid
from echostore.wire.mesh import WANTS_MAX

FETCHES_MAX: Final = 128
"""Blobs under way from a source that has given none yet: how large they are is not known."""
FETCHES_LEAST: Final = 16
FETCHES_MOST: Final = 2 * WANTS_MAX
UNDER_WAY_BYTES: Final = 16 * 1024 * 1024
PATIENCE_S: Final = 10.0
ASK_AGAIN_S: Final = 5.0
"""A source that had a blob not may have got it since."""

S = TypeVar("S", bound=Hashable)


class Ask(NamedTuple, Generic[S]):
    """Ask a source which of these it has."""

    source: S
    cids: tuple[Cid, ...]


class Fetch(NamedTuple, Generic[S]):
    """Ask a source for these."""

    source: S
    cids: tuple[Cid, ...]


@dataclass(slots=True)
class _Source:
    has: set[Cid] = field(default_factory=set)
    lacks: dict[Cid, float] = field(default_factory=dict)
    """With the time at which it said so."""
    asked: dict[Cid, float] = field(default_factory=dict)
    under_way: dict[Cid, float] = field(default_factory=dict)
    delivered: int = 0
    delivered_bytes: int = 0

    @property
    def room(self) -> int:
        """How many blobs it may have under way."""
        if not self.delivered:
            return FETCHES_MAX
        average = max(1, self.delivered_bytes // self.delivered)
        return max(FETCHES_LEAST, min(FETCHES_MOST, UNDER_WAY_BYTES // average))


class WantList(Generic[S]):
    """See the module."""

    def __init__(self) -> None:
        self.wanted: set[Cid] = set()
        self._sources: dict[S, _Source] = {}
        self._open: dict[Cid, None] = {}
        """Wanted, and under way from nobody; the longest wanted first."""

    def add(self, cids: Iterable[Cid]) -> None:
        for cid in cids:
            if cid not in self.wanted:
                self.wanted.add(cid)
                self._open[cid] = None

    def source(self, source: S) -> None:
        self._sources.setdefault(source, _Source())

    def lost(self, source: S) -> None:
        gone = self._sources.pop(source, None)
        if gone is not None:
            for cid in gone.under_way:
                self._release(cid)

    def heard(self, source: S, have: Iterable[Cid], missing: Iterable[Cid], now: float) -> None:
        known = self._sources.get(source)
        if known is None:
            return
        for cid in have:
            if cid in self.wanted:
                known.has.add(cid)
                known.asked.pop(cid, None)
                known.lacks.pop(cid, None)
        for cid in missing:
            known.asked.pop(cid, None)
            known.has.discard(cid)
            if cid in self.wanted:
                known.lacks[cid] = now
            if known.under_way.pop(cid, None) is not None:
                self._release(cid)

    def arrived(self, source: S, cid: Cid, size: int = 0) -> bool:
        """A blob that is what its CID says has come; False when nobody wants it."""
        known = self._sources.get(source)
        if cid not in self.wanted:
            return False
        if known is not None:
            known.delivered += 1
            known.delivered_bytes += size
        self._done(cid)
        return True

    def idle(self) -> bool:
        """Whether a source could be asked for more than a few blobs: planning is worth its while."""
        return any(len(known.under_way) <= known.room // 2 for known in self._sources.values())

    def delivered(self) -> dict[S, int]:
        """How many blobs each source has given."""
        return {source: known.delivered for source, known in self._sources.items()}

    def plan(self, now: float) -> list[Ask[S] | Fetch[S]]:
        """What to send now."""
        self._give_up_waiting(now)
        if len(self._sources) == 1:
            return self._of_one(now)
        steps = self._asks(now)
        rarity: dict[Cid, int] = {}
        for known in self._sources.values():
            for cid in known.has:
                rarity[cid] = rarity.get(cid, 0) + 1
        # The least busy source chooses first, then the one with the fewest choices: one that has all leaves the others
        # their share.
        by_load = sorted(self._sources.items(), key=lambda pair: (len(pair[1].under_way), len(pair[1].has)))
        for source, known in by_load:
            # Its share of all that is wanted, what is under way counted: a source that answers late finds work left.
            share = -(-len(self.wanted) // len(self._sources)) + 1
            free = min(known.room, share) - len(known.under_way)
            if free > 0:
                open_here = [cid for cid in known.has if cid in self._open]
                steps += self._fetch(source, sorted(open_here, key=lambda cid: (rarity[cid], cid))[:free], now)
        return steps

    def _of_one(self, now: float) -> list[Ask[S] | Fetch[S]]:
        """The only source is asked for blobs at once, in the order they were wanted: costs what is asked for."""
        ((source, known),) = self._sources.items()
        free = known.room - len(known.under_way)
        worth = (cid for cid in self._open if self._worth_asking(known, cid, now))
        return self._fetch(source, list(islice(worth, max(0, free))), now)

    def _fetch(self, source: S, chosen: list[Cid], now: float) -> list[Ask[S] | Fetch[S]]:
        under_way = self._sources[source].under_way
        for cid in chosen:
            under_way[cid] = now
            self._open.pop(cid, None)
        return [Fetch(source, tuple(chosen))] if chosen else []

    def _asks(self, now: float) -> list[Ask[S] | Fetch[S]]:
        steps: list[Ask[S] | Fetch[S]] = []
        for source, known in self._sources.items():
            unknown = sorted(
                cid for cid in self.wanted if cid not in known.has and self._worth_asking(known, cid, now)
            )[:WANTS_MAX]
            if unknown:
                known.asked.update(dict.fromkeys(unknown, now))
                steps.append(Ask(source, tuple(unknown)))
        return steps

    def _worth_asking(self, known: _Source, cid: Cid, now: float) -> bool:
        said, asked = known.lacks.get(cid), known.asked.get(cid)
        return (said is None or now - said > ASK_AGAIN_S) and (asked is None or now - asked > PATIENCE_S)

    def _give_up_waiting(self, now: float) -> None:
        for known in self._sources.values():
            for cid in [cid for cid, since in known.under_way.items() if now - since > PATIENCE_S]:
                del known.under_way[cid]
                known.has.discard(cid)
                known.lacks[cid] = now
                self._release(cid)

    def _release(self, cid: Cid) -> None:
        if cid in self.wanted:
            self._open[cid] = None

    def _done(self, cid: Cid) -> None:
        self.wanted.discard(cid)
        self._open.pop(cid, None)
        for known in self._sources.values():
            known.has.discard(cid)
            known.lacks.pop(cid, None)
            known.asked.pop(cid, None)
            known.under_way.pop(cid, None)
