"""The change graph of a text or a list, as values: what its operations carry and what its state is.

    writer      64-bit id of (feed, item, generation); makes atoms numbered by a counter from 0
    Change      atoms of one writer without foreign news in between, and what it depends on
    run         atoms made by one edit or one stretch of typing: InsertText, InsertElements, Delete, Mark, ...

Loro cuts the same history differently on every replica (by commits, imports and its own block sizes). `ChangeBuilder`
undoes that: a change starts only where a dependency on another writer starts, and runs are as long as they can be,
counted from the start of the change. So equal sets of operations give equal graphs (law M1). Timestamps, commit
messages and lamports are not kept: the first two mean nothing here, the last follows from the dependencies.

Used by `_loro` (which translates to and from loro) and `echostore.wire.models.change_graph` (bytes).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

COUNTER_END_MAX = (1 << 31) - 1
"""Loro counts atoms with 32 signed bits."""

Atom = tuple[int, int]
"""(writer, counter)"""

MarkValue = None | bool | int | str


class InsertText(NamedTuple):
    """Text before the element now at `position`. Positions in runs count characters and the ends of marks."""

    position: int
    text: str


class InsertElements(NamedTuple):
    """List elements, each in the text form of `growable_array.element_text`."""

    position: int
    elements: tuple[str, ...]


class Delete(NamedTuple):
    """`length` elements with consecutive ids from (writer, counter); negative: from the last one backwards.

    Forwards all are deleted at `position`; backwards the first is at `position`, the next one left of it.
    """

    position: int
    length: int
    writer: int
    counter: int


class Mark(NamedTuple):
    """A style over [start, end); None takes it away."""

    start: int
    end: int
    key: str
    value: MarkValue


class SetElement(NamedTuple):
    """A new value for the element that atom (writer, lamport) made."""

    writer: int
    lamport: int
    element: str


class Move(NamedTuple):
    """The element that atom (writer, lamport) made goes from one position to another."""

    source: int
    target: int
    writer: int
    lamport: int


Run = InsertText | InsertElements | Delete | Mark | SetElement | Move


@dataclass(frozen=True, slots=True)
class Change:
    """Atoms `counter` .. `counter_end` of one writer. `after_own` says whether the writer's atom before is a dependency
    in its own right, or already among what the foreign ones depend on."""

    writer: int
    counter: int
    after_own: bool
    dependencies: tuple[Atom, ...]
    runs: tuple[Run, ...]

    @property
    def counter_end(self) -> int:
        return self.counter + sum(map(atom_count, self.runs))

    def frontier(self) -> list[Atom]:
        """The version in which the change was made."""
        own = [(self.writer, self.counter - 1)] if self.after_own else []
        return [*own, *self.dependencies]


ChangeGraph = tuple[Change, ...]
"""Ascending by writer and counter."""


def atom_count(run: Run) -> int:
    if isinstance(run, InsertText):
        return len(run.text)
    if isinstance(run, Delete):
        return abs(run.length)
    if isinstance(run, InsertElements):
        return len(run.elements)
    return 2 if isinstance(run, Mark) else 1


class ChangeBuilder:
    """Joins what one writer made, given in order of counters, into canonical changes."""

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._changes: list[Change] = []
        self._counter = 0
        self._after_own = False
        self._dependencies: tuple[Atom, ...] = ()
        self._runs: list[Run] = []

    def change(self, counter: int, *, after_own: bool, dependencies: tuple[Atom, ...]) -> None:
        """What is added from now on starts at `counter` and depends on these; a mere continuation changes nothing."""
        if after_own and not dependencies and self._runs:
            return
        self._close()
        self._counter = counter
        self._after_own = after_own
        self._dependencies = tuple(sorted(dependencies))

    def add(self, run: Run) -> None:
        runs = self._runs
        last = runs[-1] if runs else None
        if isinstance(run, Delete):
            if isinstance(last, Delete):
                runs.pop()
                runs.extend(_join_deletes(last, run))
            else:
                runs.append(_directed(run))
        elif isinstance(run, InsertText) and isinstance(last, InsertText) and _follows(run, last):
            runs[-1] = InsertText(last.position, last.text + run.text)
        elif isinstance(run, InsertElements) and isinstance(last, InsertElements) and _follows(run, last):
            runs[-1] = InsertElements(last.position, last.elements + run.elements)
        else:
            runs.append(run)

    def changes(self) -> list[Change]:
        self._close()
        return self._changes

    def _close(self) -> None:
        if self._runs:
            self._changes.append(
                Change(self._writer, self._counter, self._after_own, self._dependencies, tuple(self._runs))
            )
            self._runs = []


def _follows(run: InsertText | InsertElements, last: InsertText | InsertElements) -> bool:
    return last.position + len(last[1]) == run.position


def _join_deletes(left: Delete, right: Delete) -> Iterator[Delete]:
    """The greedy cut of both runs' atoms, which does not depend on where `right` begins.

    A run of one atom has no direction yet, so `right` may have to give its first atom to `left` and keep the rest.
    """
    length = right.length
    if left.writer != right.writer:
        yield left
        yield _directed(right)
        return
    first_position, first_counter = right.position, right.counter if length > 0 else right.counter - length - 1
    size = left.length
    if size > 0 and first_position == left.position and first_counter == left.counter + size:
        forwards = True
    elif (size == 1 or size < 0) and first_counter == left.counter - 1 and first_position == left.position - abs(size):
        forwards = False
    else:
        yield left
        yield _directed(right)
        return
    if abs(length) == 1 or (length > 0) == forwards:  # all of right goes on in left's direction
        joined = abs(size) + abs(length)
        if forwards:
            yield Delete(left.position, joined, left.writer, left.counter)
        else:
            yield Delete(left.position, -joined, left.writer, right.counter)
        return
    if forwards:
        yield Delete(left.position, size + 1, left.writer, left.counter)
        yield _directed(Delete(right.position - 1, length + 1, right.writer, right.counter))
    else:
        yield Delete(left.position, -(abs(size) + 1), left.writer, first_counter)
        yield _directed(Delete(right.position, length - 1, right.writer, right.counter + 1))


def _directed(run: Delete) -> Delete:
    """One atom counts as forwards, whatever loro calls it."""
    return run if run.length != -1 else Delete(run.position, 1, run.writer, run.counter)
