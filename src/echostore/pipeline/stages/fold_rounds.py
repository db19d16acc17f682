"""Reduce everything by column once, then fold the hard items again, until none is left.

    round 1   the new blocks, combined                      almost always the only one
    round 2   the new blocks, single operations, of items that turned out hard
    round 3.. all blocks, of items whose past has to be folded again: a late rule, an item that came after operations
              that lacked it, blocks that count no longer or again

What a round says about an item replaces what earlier ones said. Rounds are the same with and without Spark: an engine
runs one, and this module decides about the next.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import ItemId, PartyKey
from echostore.pipeline.schemas import EDGES
from echostore.pipeline.stages.asking import close_edges, close_lacking
from echostore.pipeline.stages.operation_columns import CREATED, LACKED, PLACED, RIVAL, TOUCHED

Items = Mapping[PartyKey, frozenset[ItemId]]


@dataclass(frozen=True, slots=True)
class Round:
    """One round. Without `wanted` it takes the new blocks of all parties; with it, single operations on those items
    out of the new blocks, or out of all blocks and without the states before (`history`)."""

    number: int
    wanted: Items | None = None
    history: bool = False
    absent: Items = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a round leaves to be done: HARD_ITEMS, those EDGES that are not simply fine, and the parties of items that
    ceased to exist."""

    hard: pa.Table
    flagged: pa.Table
    gone: frozenset[PartyKey] = frozenset()


class Engine(Protocol):
    """Runs rounds and keeps their results."""

    def run(self, round: Round) -> Findings: ...

    def edges(self, parties: frozenset[PartyKey]) -> pa.Table:
        """All edges (EDGES) of these parties: of this run's rounds, and of items that were not folded from their past.
        `absent` is what was answered, unless the item has come or gone since."""
        ...

    def rivals(self, touched: Items) -> Items:
        """Items that claim inception keys which several claim, of keys that this run or these items have to do with. Each
        is told once, and again when somebody else claims its key."""
        ...

    def lacking(self, parties: frozenset[PartyKey]) -> Iterable[tuple[PartyKey, ItemId, ItemId]]:
        """What earlier rejects lacked: party, item, what it lacked."""
        ...


def flagged(edges: pa.Table) -> pa.Table:
    """The edges that ask for something: an absent or doubtful parent, something lacked that has come, a touched item."""
    return edges.filter(pc.or_(pc.and_(edges["absent"], pc.less_equal(edges["why"], PLACED)), edges["doubt"]))


@dataclass(frozen=True, slots=True)
class Again:
    """Items that were folded again: the round that counts for each, and those that were folded from their whole past
    (what earlier commits rejected or moved of them is void)."""

    rounds: Mapping[tuple[PartyKey, ItemId], int]
    history: frozenset[tuple[PartyKey, ItemId]]


NEVER_AGAIN = Again({}, frozenset())


def run_rounds(engine: Engine) -> Again:
    """All rounds of a job. What is known to be absent, and what was folded from its past, only grows: so it ends."""
    todo = _Todo()
    number = 1
    todo.take(engine, engine.run(Round(number)))
    rounds: dict[tuple[PartyKey, ItemId], int] = {}
    while wanted := todo.next():
        number += 1
        findings = engine.run(Round(number, wanted, todo.from_history, dict(todo.absent)))
        rounds.update({(party, item): number for party, items in wanted.items() for item in items})
        todo.take(engine, findings)
    return Again(rounds, frozenset(todo.folded_from_history))


class _Todo:
    """What is still to be folded again."""

    def __init__(self) -> None:
        self.absent: dict[PartyKey, frozenset[ItemId]] = {}
        self.from_history = False
        """Whether what `next` gave is to be folded from the whole past."""
        self.folded_from_history: set[tuple[PartyKey, ItemId]] = set()
        self._again: dict[PartyKey, set[ItemId]] = defaultdict(set)
        self._history: dict[PartyKey, set[ItemId]] = defaultdict(set)
        self._gone: set[PartyKey] = set()

    def next(self) -> Items:
        """The items of the next round; none when all is done. New blocks first, since more may turn out late there."""
        for party, items in self._history.items():
            self._again[party] -= items
        chosen = {party: frozenset(items) for party, items in self._again.items() if items}
        self.from_history = not chosen
        if chosen:
            self._again.clear()
            return chosen
        chosen = {party: frozenset(items) for party, items in self._history.items() if items}
        self._history.clear()
        self.folded_from_history |= {(party, item) for party, items in chosen.items() for item in items}
        return chosen

    def take(self, engine: Engine, findings: Findings) -> None:
        for row in findings.hard.to_pylist():
            self._add(PartyKey(row["party"]), ItemId(row["item"]), history=row["history"])
        parties: set[PartyKey] = set()
        parties.update(findings.gone)
        self._gone.update(findings.gone)
        found: dict[PartyKey, set[ItemId]] = defaultdict(set)
        touched: dict[PartyKey, set[ItemId]] = defaultdict(set)
        for row in findings.flagged.to_pylist():
            party = PartyKey(row["party"])
            if row["why"] == LACKED:
                found[party].add(ItemId(row["parent"]))
            elif row["why"] == TOUCHED:
                touched[party].add(ItemId(row["item"]))
            else:
                parties.add(party)
        for party, rivals in engine.rivals({party: frozenset(items) for party, items in touched.items()}).items():
            touched[party] |= rivals
            found[party] |= rivals  # who gets a key is one that others may have lacked
        for party, items in touched.items():
            for item in items:
                self._add(party, item, history=True)
        if found:
            self._find(engine, found)
        if parties:
            self._close(engine, frozenset(parties))

    def _add(self, party: PartyKey, item: ItemId, *, history: bool) -> None:
        if history or (party, item) in self.folded_from_history:
            self._history[party].add(item)
        else:
            self._again[party].add(item)

    def _find(self, engine: Engine, found: dict[PartyKey, set[ItemId]]) -> None:
        lacking: dict[PartyKey, list[tuple[ItemId, ItemId]]] = defaultdict(list)
        for party, item, missing in engine.lacking(frozenset(found)):
            lacking[party].append((item, missing))
        for party, items in found.items():
            for item in close_lacking(lacking[party], items):
                if (party, item) not in self.folded_from_history:
                    self._add(party, item, history=True)

    def _close(self, engine: Engine, parties: frozenset[PartyKey]) -> None:
        """Which parents are absent, and who has to be told of those that were not known to be."""
        edges: dict[PartyKey, list[tuple[ItemId, ItemId | None, int, bool]]] = defaultdict(list)
        table = engine.edges(parties)
        assert table.schema.equals(EDGES), table.schema
        for row in table.to_pylist():
            if row["why"] in (CREATED, PLACED, RIVAL):
                parent = None if row["parent"] is None else ItemId(row["parent"])
                edges[PartyKey(row["party"])].append((ItemId(row["item"]), parent, row["why"], row["absent"]))
        for party in parties:
            closed = close_edges(edges[party])
            changed = closed.absent ^ self.absent.get(party, frozenset())
            self.absent[party] = closed.absent
            for item in {item for item, parent, _, _ in edges[party] if parent in changed}:
                # Where something has gone that existed before, those below it have operations in old blocks.
                self._add(party, item, history=party in self._gone)
