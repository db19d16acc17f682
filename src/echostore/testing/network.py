"""A network of datagrams in virtual time, with every fault that the protocols must survive. Seeded, no real waiting.

partition  "a|bc"   nothing passes between the sides        "a>bc"   nothing passes from a to b or c; back it does
clog       messages wait until the clog ends, then all arrive
loss, duplication, delay (and with it reordering) by chance, from the world's own seed
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

LOSS_MAX = 0.3
DUPLICATION_MAX = 0.5
DELAY_MAX_S = 0.5
"""The ranges of a swarm: those of TigerBeetle's simulator."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the links are. Probabilities per message; delays are uniform, so that messages overtake each other."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_min_s: float = 0.001
    delay_max_s: float = 0.02

    @staticmethod
    def swarm(chance: random.Random) -> "Faults":
        """Faults drawn for one run. Each kind is left out in some runs: a fault that is always on can mask another."""
        return Faults(
            loss=chance.choice((0.0, chance.uniform(0, LOSS_MAX))),
            duplication=chance.choice((0.0, chance.uniform(0, DUPLICATION_MAX))),
            delay_max_s=chance.choice((0.002, chance.uniform(0.002, DELAY_MAX_S))),
        )


class Network:
    """Decides for every message when it arrives, how often, or that it does not."""

    def __init__(self, chance: random.Random, faults: Faults) -> None:
        self.faults = faults
        self._chance = chance
        self._blocked: set[tuple[str, str]] = set()
        self._clogged: dict[tuple[str, str], float] = {}

    def partition(self, split: str, names: Iterable[str]) -> None:
        """Block what `split` says, in addition to what is blocked. Nodes that it does not name are on no side."""
        names = sorted(names)
        for separator in "|>":
            if separator in split:
                sides = [side_members(side, names) for side in split.split(separator)]
                break
        else:
            raise ValueError(f"a partition looks like 'a|bc' or 'a>bc', not {split!r}")
        for number, side in enumerate(sides):
            others = [each for other in sides[number + 1 :] for each in other]
            self._blocked.update((one, other) for one in side for other in others)
            if separator == "|":
                self._blocked.update((other, one) for one in side for other in others)

    def heal(self) -> None:
        self._blocked.clear()
        self._clogged.clear()

    def clog(self, sender: str, receiver: str, until: float) -> None:
        self._clogged[sender, receiver] = until

    @property
    def whole(self) -> bool:
        return not self._blocked

    def passes(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self._blocked

    def arrivals(self, sender: str, receiver: str, now: float) -> list[float]:
        """When copies of one message arrive; empty when it is lost."""
        if not self.passes(sender, receiver) or self._chance.random() < self.faults.loss:
            return []
        copies = 2 if self._chance.random() < self.faults.duplication else 1
        departs = max(now, self._clogged.get((sender, receiver), 0.0))
        return [departs + self._delay_s() for _ in range(copies)]

    def _delay_s(self) -> float:
        return self._chance.uniform(self.faults.delay_min_s, self.faults.delay_max_s)


def side_members(side: str, names: Iterable[str]) -> list[str]:
    """The nodes of one side: comma-separated names, or single letters when all names are single letters."""
    names = list(names)
    wanted = side.split(",") if "," in side or side in names else list(side)
    unknown = [each for each in wanted if each not in names]
    if unknown:
        raise ValueError(f"{side!r} names {unknown}, which are not among {names}")
    return wanted
