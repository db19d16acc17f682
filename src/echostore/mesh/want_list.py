"""Which blob to ask of whom: rarest first, several sources at once, nobody twice for the same lie. No sockets, no clock.

    add(cids)                    blobs that are wanted
    source(s) / lost(s)          who may have them
    heard(s, have, missing)      what a source says of them
    arrived(s, cid) / poisoned   what came
    plan(now) -> [Ask | Fetch]   what to send now

A source is first asked which of the blobs it has, unless it is the only one: then it is asked for the blobs at once.
Each source has at most FETCHES_MAX blobs under way. A blob that does not come in PATIENCE_S is asked of another.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from echostore.kernel.ids import Cid
from echostore.wire.mesh import WANTS_MAX

FETCHES_MAX: Final = 128
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


class WantList(Generic[S]):
    """See the module."""

    def __init__(self) -> None:
        self.wanted: set[Cid] = set()
        self._sources: dict[S, _Source] = {}
        self._assigned: dict[Cid, S] = {}

    def add(self, cids: Iterable[Cid]) -> None:
        self.wanted.update(cids)

    def source(self, source: S) -> None:
        self._sources.setdefault(source, _Source())

    def lost(self, source: S) -> None:
        gone = self._sources.pop(source, None)
        if gone is not None:
            for cid in gone.under_way:
                self._assigned.pop(cid, None)

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
                self._assigned.pop(cid, None)

    def arrived(self, source: S, cid: Cid) -> bool:
        """A blob that is what its CID says has come; False when nobody wants it."""
        known = self._sources.get(source)
        if cid not in self.wanted:
            return False
        if known is not None:
            known.delivered += 1
        self._done(cid)
        return True

    def idle(self) -> bool:
        """Whether a source could be asked for more than a few blobs: planning is worth its while."""
        return any(len(known.under_way) <= FETCHES_MAX // 2 for known in self._sources.values())

    def delivered(self) -> dict[S, int]:
        """How many blobs each source has given."""
        return {source: known.delivered for source, known in self._sources.items()}

    def plan(self, now: float) -> list[Ask[S] | Fetch[S]]:
        """What to send now."""
        self._give_up_waiting(now)
        alone = len(self._sources) == 1
        steps: list[Ask[S] | Fetch[S]] = []
        if alone:
            for known in self._sources.values():
                known.has.update(cid for cid in self.wanted if self._worth_asking(known, cid, now))
        else:
            steps += self._asks(now)
        rarity: dict[Cid, int] = {}
        for known in self._sources.values():
            for cid in known.has:
                rarity[cid] = rarity.get(cid, 0) + 1
        # The least busy source chooses first, then the one with the fewest choices: one that has all leaves the others
        # their share.
        by_load = sorted(self._sources.items(), key=lambda pair: (len(pair[1].under_way), len(pair[1].has)))
        for source, known in by_load:
            free = FETCHES_MAX - len(known.under_way)
            if free <= 0:
                continue
            open_here = [cid for cid in known.has if cid not in self._assigned]
            if len(self._sources) > 1:
                # Its share of all that is wanted, what is under way counted: a source that answers late finds work left.
                share = -(-len(self.wanted) // len(self._sources)) + 1
                free = max(0, min(free, share - len(known.under_way)))
            chosen = sorted(open_here, key=lambda cid: (rarity[cid], cid))[:free]
            for cid in chosen:
                known.under_way[cid] = now
                self._assigned[cid] = source
            if chosen:
                steps.append(Fetch(source, tuple(chosen)))
        return steps

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
                self._assigned.pop(cid, None)

    def _done(self, cid: Cid) -> None:
        self.wanted.discard(cid)
        self._assigned.pop(cid, None)
        for known in self._sources.values():
            known.has.discard(cid)
            known.lacks.pop(cid, None)
            known.asked.pop(cid, None)
            known.under_way.pop(cid, None)
