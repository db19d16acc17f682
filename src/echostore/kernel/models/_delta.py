"""Deltas over a text: how the undo of one change is carried over to what others have made of the text since.

A delta walks over a text and says what to keep, insert and delete. Undo needs three of them:

    before --change--> after --(everything since)--> current
       \\--(what others did without the change)--> without

`inverse` (after -> before) is moved over `since` (after -> current) and becomes edits on the current text. What others
had deleted as well (before -> without) is not brought back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


def dropped(delta: Iterable[Step]) -> Iterator[int]:
    """The positions, in the text before, of what a delta deletes."""
    position = 0
    for step in delta:
        if isinstance(step, Drop):
            yield from range(position, position + step.length)
        if not isinstance(step, Insert):
            position += step.length


def without_dropped_by_others(inverse: Iterable[Step], change: list[Step], others: list[Step]) -> list[Step]:
    """The inverse of `change`, except for bringing back what others have deleted too.

    What the inverse inserts is, in order, what the change deleted.
    """
    also = set(dropped(others))
    keeps = iter([position not in also for position in dropped(change)])
    result: list[Step] = []
    for step in inverse:
        if isinstance(step, Insert):
            text = "".join(character for character in step.text if next(keeps, True))
            if text:
                result.append(Insert(text, step.marks))
        else:
            result.append(step)
    return result


def carry_over(delta: list[Step], since: list[Step]) -> list[Step]:
    """`delta` as edits on what `since` made of the text both start from. Where both touch one mark, `since` stays."""
    result: list[Step] = []
    mine, theirs = _Walk(delta), _Walk(since)
    while not mine.at_end():
        step = mine.step()
        other = theirs.step()
        if isinstance(other, Insert):
            result.append(Keep(other.length))
            theirs.take(other.length)
        elif isinstance(step, Insert):
            result.append(step)
            mine.take(step.length)
        else:
            length = min(step.length, other.length)
            if isinstance(other, Keep):
                if isinstance(step, Drop):
                    result.append(Drop(length))
                else:
                    result.append(Keep(length, _remaining(step.marks, other.marks)))
            mine.take(length)
            theirs.take(length)
    return result


def _remaining(marks: Marks | None, since: Marks | None) -> Marks | None:
    if not marks or not since:
        return marks
    return {key: value for key, value in marks.items() if key not in since} or None


class _Walk:
    """A delta read in pieces; after its end everything is kept."""

    _REST = Keep(1 << 62)

    def __init__(self, delta: list[Step]) -> None:
        self._steps = delta
        self._index = 0
        self._offset = 0

    def at_end(self) -> bool:
        return self._index >= len(self._steps)

    def step(self) -> Step:
        if self.at_end():
            return self._REST
        step = self._steps[self._index]
        if isinstance(step, Insert):
            return step
        length = step.length - self._offset
        return Drop(length) if isinstance(step, Drop) else Keep(length, step.marks)

    def take(self, length: int) -> None:
        if self.at_end():
            return
        self._offset += length
        if self._offset >= self._steps[self._index].length:
            self._index += 1
            self._offset = 0
