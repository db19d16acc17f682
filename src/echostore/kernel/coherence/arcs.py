"""Where ids come from: systems, arcs, and the two registers that make granting and releasing safe to repeat.

    system   root hash ++ path        permanent
    arc      system . gen             `gen` rises with each grant, so a lesser arc is a smaller prefix
    id       system . gen . n         n counts from 1 and is never used twice

A root names systems and grants arcs; edges pass both on and mint nothing. The lower end keeps the greatest gen it was
granted, the upper end the least batch after which a gen was promised to stay unused. Both are joins: messages may come
twice and in any order. A system that lost its state is granted the next gen, so no id is ever issued again.

An item made under an arc has a number of the root's own feed, from the half that is reserved for arcs:
`ARC_BIT | base + n`, where `base` comes with the grant.
"""

from typing import NamedTuple

from echostore.kernel.coherence.messages import Arc, GrantArc, IssuedId, ReleaseArc, SystemId
from echostore.kernel.errors import Refused
from echostore.kernel.ids import ARC_BIT

ARC_IDS_BITS = 24
"""Ids in one arc: sixteen million. 39 bits are left for the number of arcs of one feed."""

ARC_IDS_MAX = (1 << ARC_IDS_BITS) - 1

ARC_IDS_LOW = 1 << 20
"""With fewer ids left, a leaf asks for another arc while it still has some: it may be offline when they end."""

ARCS_MAX = 1 << (63 - ARC_IDS_BITS)

GENS_OPEN_MAX = 4
"""Unreleased gens of one system. A leaf that loses its state every day would else leave an open arc for each day."""

NONCES_MAX = 10_000
"""Questions for a name that are remembered. One that is repeated later than that costs a name, which are many."""


class ArcHolder:
    """The lower end: the greatest arc granted so far, and how much of it is used."""

    __slots__ = ("arc", "base", "used")

    def __init__(self) -> None:
        self.arc: Arc | None = None
        self.base = 0
        self.used = 0

    def take(self, grant: GrantArc) -> bool:
        """Use this arc from now on, if it is greater than the one in use."""
        if self.arc is not None and grant.arc.gen <= self.arc.gen:
            return False
        self.arc, self.base, self.used = grant.arc, grant.base, 0
        return True

    @property
    def is_short(self) -> bool:
        """Whether it is time to ask for another arc."""
        return self.arc is None or ARC_IDS_MAX - self.used < ARC_IDS_LOW

    def issue(self) -> IssuedId:
        """The next id. Works without a connection for as long as the arc lasts."""
        if self.arc is None:
            raise Refused("no ids were granted yet", next_step="Connect once; after that ids last while offline.")
        if self.used >= ARC_IDS_MAX:
            raise Refused(f"all {ARC_IDS_MAX} ids of the arc are used", next_step="Connect, so that more are granted.")
        self.used += 1
        return IssuedId(self.arc, self.used)

    def item_number(self, issued: IssuedId) -> int:
        """The number of an item with this id in the root's feed."""
        assert issued.arc == self.arc, f"{issued} is not of the arc in use, {self.arc}"
        return ARC_BIT | self.base + issued.n


class Granted(NamedTuple):
    """What a root remembers of one arc."""

    base: int
    release: int | None
    """The last batch that may use it, once that is promised."""


class ArcLedger:
    """The upper end, at the root: which systems and arcs exist. Durable together with the batches."""

    __slots__ = ("arcs_count", "asked", "gens", "granted", "nonces", "owners", "root", "systems_count")

    def __init__(self, root: SystemId) -> None:
        self.root = root
        self.systems_count = 0
        self.arcs_count = 0
        self.gens: dict[SystemId, int] = {}
        self.granted: dict[Arc, Granted] = {}
        self.asked: dict[SystemId, int] = {}
        self.owners: dict[SystemId, bytes] = {}
        """Whose each system is: the key that was shown when it was named. Nobody else is ever attached as it."""
        self.nonces: dict[int, SystemId] = {}

    def name(self, nonce: int) -> SystemId:
        """The id of the system that asks with this nonce: the same one however often it asks."""
        system = self.nonces.get(nonce)
        if system is None:
            self.systems_count += 1
            system = self.nonces[nonce] = SystemId(self.root.root, (*self.root.path, self.systems_count))
            self.gens[system] = 0
            if len(self.nonces) > NONCES_MAX:
                del self.nonces[next(iter(self.nonces))]
        return system

    def grant(self, system: SystemId, nonce: int) -> GrantArc:
        """A greater arc for each new question, the same one for a repeated question."""
        gen = self.gens[system]
        if gen == 0 or self.asked.get(system) != nonce:
            if self.arcs_count >= ARCS_MAX:
                raise Refused(f"all {ARCS_MAX} arcs of the feed are granted", next_step="Open a new feed.")
            gen = self.gens[system] = gen + 1
            self.asked[system] = nonce
            self.granted[Arc(system, gen)] = Granted(self.arcs_count << ARC_IDS_BITS, None)
            self.arcs_count += 1
        arc = Arc(system, gen)
        return GrantArc(arc, self.granted[arc].base)

    def release(self, message: ReleaseArc) -> bool:
        """Keep the least batch ever promised."""
        known = self.granted.get(message.arc)
        if known is None or (known.release is not None and known.release <= message.batch):
            return False
        self.granted[message.arc] = known._replace(release=message.batch)
        return True

    def retire(self, system: SystemId, applied: dict[Arc, int]) -> None:
        """Close the oldest gens of a system that has too many: what was not applied by now is refused."""
        arc = Arc(system, self.gens[system] - GENS_OPEN_MAX)
        known = self.granted.get(arc)
        if known is not None and known.release is None:
            self.granted[arc] = known._replace(release=applied.get(arc, 0))

    def of_system(self, system: SystemId) -> list[tuple[Arc, Granted]]:
        """All arcs that were granted to a system, oldest first."""
        arcs = [Arc(system, gen) for gen in range(1, self.gens.get(system, 0) + 1)]
        return [(arc, self.granted[arc]) for arc in arcs if arc in self.granted]

    def allows(self, arc: Arc, batch: int) -> bool:
        """Whether this arc may still be used in this batch."""
        known = self.granted.get(arc)
        return known is not None and (known.release is None or batch <= known.release)
