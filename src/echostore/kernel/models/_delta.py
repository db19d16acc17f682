"""Deltas over a text: what to keep, insert and delete on the way through it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from echostore.kernel.models.change_graph import MarkValue

Marks = dict[str, MarkValue]


@dataclass(frozen=True, slots=True)
class Keep:
    length: int
    marks: Marks | None = None  # to set on what is kept


@dataclass(frozen=True, slots=True)
class Insert:
    text: str
    marks: Marks | None = None

    @property
    def length(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Drop:
    length: int


Step = Keep | Insert | Drop


def joined(steps: Iterable[Step]) -> list[Step]:
    """The same delta in as few steps as can be, without the rest that is only kept."""
    found: list[Step] = []
    for (kind, marks), alike in groupby(steps, key=_likeness):
        if kind is Insert:
            found.append(Insert("".join(step.text for step in alike if isinstance(step, Insert)), marks))
        elif kind is Drop:
            found.append(Drop(sum(step.length for step in alike)))
        else:
            found.append(Keep(sum(step.length for step in alike), marks))
    if found and isinstance(found[-1], Keep) and not found[-1].marks:
        del found[-1]
    return found


def _likeness(step: Step) -> tuple[type[Step], Marks | None]:
    return type(step), None if isinstance(step, Drop) else step.marks
