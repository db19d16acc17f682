"""Stand-ins: what an undo puts back is new to the document; these say which atoms it takes the place of.

A deleted character or element can't be revived: an undo inserts a copy of it, and of a move it makes another move. For
what comes after, the copy has to be the thing itself:

    m1 types "oh "   m2 deletes "h "   u(m2) inserts "h " again   u(m1) has to take away "o", and those two as well

So the operation of an undo names, for each atom that it made to put something back, the atom that first put it there:
its *original*. Two atoms with one original are the same thing. Stand-ins are no part of a model's state; they are read
again from this device's own feed by `echostore.peer.undo`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from echostore.kernel.models.change_graph import Atom


class StandIn(NamedTuple):
    """Atoms `counter` .. of the operation's writer stand for the atoms `original` .. of `writer`, `length` of them."""

    counter: int
    writer: int
    original: int
    length: int


class Originals:
    """The originals of atoms: what the undos of one item have noted, added in their order."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = {}
        self._runs: dict[int, list[StandIn]] = {}

    def add(self, writer: int, runs: Iterable[StandIn]) -> None:
        """The stand-ins of one operation, made by this writer."""
        for run in runs:
            self._starts.setdefault(writer, []).append(run.counter)
            self._runs.setdefault(writer, []).append(run)

    def of(self, atom: Atom) -> Atom:
        """The atom that this one stands for; itself when it stands for no other."""
        starts = self._starts.get(atom[0])
        if starts is None:
            return atom
        index = bisect_right(starts, atom[1]) - 1
        if index < 0:
            return atom
        run = self._runs[atom[0]][index]
        offset = atom[1] - run.counter
        return (run.writer, run.original + offset) if offset < run.length else atom

    def of_all(self, atoms: list[Atom]) -> list[Atom]:
        """The same for each of many."""
        return [self.of(atom) for atom in atoms] if self._runs else atoms

    def pairs(self) -> Iterator[tuple[Atom, Atom]]:
        """Every atom that stands for another one, and that one."""
        for writer, runs in self._runs.items():
            for run in runs:
                for offset in range(run.length):
                    yield (writer, run.counter + offset), (run.writer, run.original + offset)


def stand_ins(counters: Iterable[int], originals: Iterable[Atom]) -> Iterator[StandIn]:
    """Pairs of a counter and an original, in ascending order of counters, as runs that are as long as they can be."""
    run: StandIn | None = None
    for counter, (writer, original) in zip(counters, originals, strict=True):
        if run is not None and (counter, writer, original) == (
            run.counter + run.length,
            run.writer,
            run.original + run.length,
        ):
            run = run._replace(length=run.length + 1)
        else:
            if run is not None:
                yield run
            run = StandIn(counter, writer, original, 1)
    if run is not None:
        yield run
