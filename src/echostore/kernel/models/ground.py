"""Ground: what is left of the history of a text or a list that an epoch discarded. Only the sequence as it stood.

    history   atoms 0..9 of ann, 0..4 of bob        ground   ends       ann 10, bob 5
              half of them deleted since                     pieces     "sho" ann 0..2, "rt" bob 3..4
                                                             marks      as they lie over it

Every change that comes later was made by somebody who had seen all of it, so what was deleted, and in which order things
came about, can't matter any more (`_laying_ground` says why). Atoms keep the numbers they had: later deletes, moves and
cursors name them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import Atom, Change, MarkValue
from echostore.kernel.reasons import Reason


class Piece(NamedTuple):
    """Neighbours whose atoms are consecutive. Of list elements also the identity of the first one: (maker, lamport);
    those of the others follow it."""

    writer: int
    counter: int
    length: int
    maker: int = 0
    lamport: int = 0


class StandingMark(NamedTuple):
    """A mark by the places of its two ends, counted over characters and ends of marks."""

    start: int
    end: int
    key: str
    value: MarkValue


@dataclass(frozen=True, slots=True)
class Ground:
    """A sequence without its history."""

    ends: dict[int, int]
    """writer -> the counter after its last atom in that history. All who wrote are here, also those whose work is gone."""
    heads: tuple[int, ...]
    """Writers whose last atom nobody else's depends on, ascending: what the next change depends on."""
    lamport: int
    """The number of the first atom that comes after all of these."""
    pieces: tuple[Piece, ...]
    text: str = ""
    elements: tuple[str, ...] = ()
    marks: tuple[StandingMark, ...] = field(default=())
    """Of two on one character the later one counts."""

    def frontier(self) -> set[Atom]:
        return {(writer, self.ends[writer] - 1) for writer in self.heads}

    def holds(self, atom: Atom) -> bool:
        """Whether an atom is part of the history that is gone."""
        return atom[1] < self.ends.get(atom[0], 0)

    def carries(self, change: Change) -> bool:
        """Whether a change is its writer's first above the ground, and made on the ground alone: then it depends on the
        heads. OperationRefused when it was made on a part of what is gone."""
        if change.counter != self.ends.get(change.writer, 0):
            return False
        frontier = change.frontier()
        if frontier and not any(map(self.holds, frontier)):
            return False
        if len(frontier) != len(self.heads) or set(frontier) != self.frontier():
            raise OperationRefused(Reason.DISCARDED, "made on a part of what an epoch discarded")
        return True

    @property
    def room(self) -> int:
        """Places in the sequence: characters or elements, and ends of marks."""
        return sum(piece.length for piece in self.pieces) + 2 * len(self.marks)
