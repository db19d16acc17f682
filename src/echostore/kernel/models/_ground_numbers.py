"""A document on ground, and its numbers.

The library has no way to open a document without its beginning. So the ground becomes the first change of a new document,
made by a writer of its own, `GROUND`, and everybody else counts from where the ground ends:

    outside             in the document
    ann 7   standing    GROUND 3            its place among the pieces, by writer and counter
    ann 10  after it    ann 0               minus the end of ann's history
    ann 5   gone        nothing

Pieces are numbered by writer and counter, not by where they stand: so what is consecutive outside is consecutive inside,
and a run of deletes stays one. Lamports after the ground differ by the same number for all, since each of them comes
after all of it. Nothing in the document depends on how atoms of the ground compare with others: that matters only
between edits of which neither had seen the other.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import (
    Atom,
    Change,
    Delete,
    InsertElements,
    InsertText,
    Mark,
    Move,
    Run,
    SetElement,
)
from echostore.kernel.models.ground import Ground
from echostore.kernel.reasons import Reason

GROUND = 0
"""The writer of the ground, inside a document only. No feed has this number (`_shared_sequence.writer_id`)."""

_NO_END = 1 << 62


class _Span(NamedTuple):
    """Numbers `start` .. `end` of one writer are `target` .. of another."""

    start: int
    end: int
    writer: int
    target: int


class _Spans:
    """Spans by writer, each found by a number inside it."""

    def __init__(self, spans: Iterable[tuple[int, _Span]]) -> None:
        self._starts: dict[int, list[int]] = {}
        self._spans: dict[int, list[_Span]] = {}
        for writer, span in sorted(spans):
            self._starts.setdefault(writer, []).append(span.start)
            self._spans.setdefault(writer, []).append(span)

    def at(self, writer: int, number: int) -> _Span | None:
        index = bisect_right(self._starts.get(writer, ()), number) - 1
        if index < 0:
            return None
        span = self._spans[writer][index]
        return span if number < span.end else None


class GroundNumbers:
    """Translates between the numbers of a model's history and those of a document that begins with its ground."""

    def __init__(self, ground: Ground, *, of_text: bool) -> None:
        self.ground = ground
        self._of_text = of_text
        self._order = sorted(range(len(ground.pieces)), key=lambda index: ground.pieces[index][:2])
        inward, outward, elements_in, elements_out = [], [], [], []
        made = 0
        for index in self._order:
            piece = ground.pieces[index]
            end = made + piece.length
            inward.append((piece.writer, _Span(piece.counter, piece.counter + piece.length, GROUND, made)))
            outward.append((GROUND, _Span(made, end, piece.writer, piece.counter)))
            if not of_text:
                elements_in.append((piece.maker, _Span(piece.lamport, piece.lamport + piece.length, GROUND, made)))
                elements_out.append((GROUND, _Span(made, end, piece.maker, piece.lamport)))
            made = end
        self._inward, self._outward = _Spans(inward), _Spans(outward)
        self._elements_in, self._elements_out = _Spans(elements_in), _Spans(elements_out)
        self.standing = made
        """How many characters or elements the ground has."""
        self._made = made + 2 * len(ground.marks) + 2
        self.head: Atom = (GROUND, self._made - 1)
        """The last atom of the ground: whoever depends on anything below depends on this."""
        self._lamport_gap = ground.lamport - self._made

    # Atoms

    def start(self, writer: int) -> int:
        """The first counter of a writer that is in the document."""
        return self.ground.ends.get(writer, 0)

    def atom_in(self, atom: Atom) -> Atom | None:
        """An atom as the document has it; None for one that is gone."""
        span = self._span_in(*atom)
        return None if span is None else (span.writer, span.target + atom[1] - span.start)

    def atom_out(self, atom: Atom) -> Atom | None:
        """The other way; None for what stands for nothing outside."""
        span = self._span_out(*atom)
        return None if span is None else (span.writer, span.target + atom[1] - span.start)

    def frontier_in(self, atoms: Iterable[Atom]) -> list[Atom]:
        found: list[Atom] = []
        for atom in atoms:
            if not self.ground.holds(atom):
                inside = self.atom_in(atom)
                assert inside is not None, atom
                found.append(inside)
        return found or [self.head]

    def frontier_out(self, atoms: Iterable[Atom]) -> list[Atom]:
        found: list[Atom] = []
        for atom in atoms:
            if atom[0] == GROUND:
                found.extend(self.ground.frontier())
            else:
                found.append((atom[0], atom[1] + self.start(atom[0])))
        return found

    def ends_out(self, ends: dict[int, int]) -> dict[int, int]:
        found = dict(self.ground.ends)
        for writer, end in ends.items():
            if writer != GROUND:
                found[writer] = end + self.start(writer)
        return found

    # Lamports and elements

    def lamport_out(self, lamport: int) -> int:
        """Of an atom that came after the ground."""
        return lamport + self._lamport_gap

    def element_in(self, identity: Atom) -> Atom | None:
        maker, lamport = identity
        if lamport >= self.ground.lamport:
            return maker, lamport - self._lamport_gap
        span = self._elements_in.at(maker, lamport)
        return None if span is None else (GROUND, span.target + lamport - span.start)

    def element_out(self, identity: Atom) -> Atom:
        maker, lamport = identity
        span = self._elements_out.at(maker, lamport)
        return (
            (maker, lamport + self._lamport_gap) if span is None else (span.writer, span.target + lamport - span.start)
        )

    # Changes

    def change_in(self, change: Change) -> Change:
        """A change that is on this ground (`_shared_sequence`, L6) as the document takes it."""
        counter = change.counter - self.start(change.writer)
        own = (change.writer, counter - 1)
        frontier = self.frontier_in(change.frontier())
        return Change(
            change.writer,
            counter,
            own in frontier,
            tuple(atom for atom in frontier if atom != own),
            tuple(part for run in change.runs for part in self.run_in(run)),
        )

    def run_in(self, run: Run) -> Iterator[Run]:
        """OperationRefused when it is about something that is gone."""
        if isinstance(run, Delete):
            yield from _split(run, self._span_in)
        elif isinstance(run, SetElement | Move):
            element = self.element_in((run.writer, run.lamport))
            if element is None:
                raise _gone()
            yield run._replace(writer=element[0], lamport=element[1])
        else:
            yield run

    def delete_in(self, run: Delete) -> list[Delete]:
        return list(_split(run, self._span_in))

    def check_standing(self, run: Run) -> None:
        """OperationRefused when a run is about something that is gone."""
        for _ in self.run_in(run):
            pass

    def run_out(self, run: Run) -> Iterator[Run]:
        if isinstance(run, Delete):
            yield from _split(run, self._span_out)
        elif isinstance(run, SetElement | Move):
            maker, lamport = self.element_out((run.writer, run.lamport))
            yield run._replace(writer=maker, lamport=lamport)
        else:
            yield run

    def first_change(self) -> Change:
        """The ground as the first change of a document. It ends with an atom that leaves nothing behind, so that there
        is one also when nothing stands."""
        made = self.standing + 2 * len(self.ground.marks)
        filler: Run = InsertText(0, "-") if self._of_text else InsertElements(0, ("s",))
        return Change(GROUND, 0, False, (), (*self._inserts(), *self._marks(), filler, Delete(0, 1, GROUND, made)))

    def _inserts(self) -> Iterator[Run]:
        ground = self.ground
        starts = [0]
        for piece in ground.pieces:
            starts.append(starts[-1] + piece.length)
        before = _PrefixSums(len(ground.pieces))
        for index in self._order:
            start, end = starts[index], starts[index + 1]
            position = before.below(index)
            before.add(index, end - start)
            if self._of_text:
                yield InsertText(position, ground.text[start:end])
            else:
                yield InsertElements(position, ground.elements[start:end])

    def _marks(self) -> Iterator[Run]:
        places = sorted(place for mark in self.ground.marks for place in (mark.start, mark.end))
        there: list[int] = []  # of those that are made

        def position(place: int) -> int:
            return place - bisect_left(places, place) + bisect_left(there, place)

        for mark in self.ground.marks:
            yield Mark(position(mark.start), position(mark.end), mark.key, mark.value)
            insort(there, mark.start)
            insort(there, mark.end)

    def _span_in(self, writer: int, number: int) -> _Span | None:
        start = self.start(writer)
        return _Span(start, _NO_END, writer, 0) if number >= start else self._inward.at(writer, number)

    def _span_out(self, writer: int, number: int) -> _Span | None:
        if writer == GROUND:
            return self._outward.at(writer, number)
        return _Span(0, _NO_END, writer, self.start(writer))


class _PrefixSums:
    """Sums over the first of many numbers, while these are added to: a binary indexed tree."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)

    def add(self, index: int, number: int) -> None:
        index += 1
        while index < len(self._sums):
            self._sums[index] += number
            index += index & -index

    def below(self, index: int) -> int:
        total = 0
        while index:
            total += self._sums[index]
            index &= index - 1
        return total


def _split(run: Delete, span_at: Callable[[int, int], _Span | None]) -> Iterator[Delete]:
    """A run of deletes in other numbers: one for each span that its targets lie in, in the order of its atoms."""
    size, done = abs(run.length), 0
    while done < size:
        number = run.counter + (done if run.length > 0 else size - 1 - done)
        span = span_at(run.writer, number)
        if span is None:
            raise _gone()
        target = span.target + number - span.start
        if run.length > 0:
            count = min(size - done, span.end - number)
            yield Delete(run.position, count, span.writer, target)
        else:
            count = min(size - done, number - span.start + 1)
            yield Delete(run.position - done, -count if count > 1 else 1, span.writer, target - count + 1)
        done += count


def _gone() -> OperationRefused:
    return OperationRefused(Reason.DISCARDED, "an edit of what an epoch discarded")
