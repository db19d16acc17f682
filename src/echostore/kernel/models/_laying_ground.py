"""How a text or a list loses its history at an epoch: which part of it may go, and what is left as ground.

What is stable and old enough is known per writer (`_datings`). Not all of that may go. Edits that were made side by side
are merged by what each of them had seen, so history can be cut only where all of it comes together:

    ann   a1 ─── a2 ─────── a4 ── ...            stable: a1 a2 b3 a4. b5 has not seen a4, so a4 has to stay,
             ╲        ╱                           and a cut is after a1 a2 b3: whatever is not below it
    bob       b3 ──────────── b5 ── ...           has seen all of it
                     ▲ cut

Such a cut is *critical*: every atom above it has all atoms below it in its past. Two critical cuts together are one as
well, so there is a greatest, and it follows from the graph alone. What is written later is above it, since its writer
had processed everything stable with its last message inside the epoch.

The greatest cut within fewer atoms lies within the greatest one within more. So where none was found above the ground, there is
none until further atoms settle, and the item need not be looked at before. Only where a cut was found whose ground can't be
laid (`lay_ground`), fewer atoms might give one that can.

Above a critical cut nobody can tell what was deleted below it: positions count what stands there, and edits that compete
for a place are all above. The ends of marks do count as places, so all marks stay, also those that others cover.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from echostore.kernel.models._ground_numbers import GROUND, GroundNumbers
from echostore.kernel.models._loro import LoroDocument
from echostore.kernel.models.change_graph import Atom, Change, ChangeGraph, Delete, InsertText, Mark, Run, atom_count
from echostore.kernel.models.ground import Ground, Piece, StandingMark

PROBE = 1
"""Who takes out what stands in a document that is thrown away then. No feed has this number."""

End = tuple[int, int]
"""(which mark, counted from the one that counts least; 0 for its start and 1 for its end)"""


def critical_ends(document: LoroDocument, changes: ChangeGraph, settled: Mapping[int, int]) -> dict[int, int]:
    """The ends of the greatest critical cut that holds only settled atoms. `changes` are those above the ground, which is
    below every cut."""
    ends = {} if document.numbers is None else dict(document.numbers.ground.ends)
    for writer, end in settled.items():
        ends[writer] = max(end, ends.get(writer, 0))
    above = {writer: list(made) for writer, made in groupby(changes, key=lambda change: change.writer)}
    moved = True
    while moved:
        moved = False
        for writer, made in above.items():
            while made and made[-1].counter_end > ends.get(writer, 0):
                past = document.past(made.pop().frontier())
                for other, end in ends.items():
                    if other != writer and end > past.get(other, 0):
                        ends[other] = past.get(other, 0)
                        moved = True
    return {writer: end for writer, end in ends.items() if end}


def lay_ground(document: LoroDocument, container: str, ends: Mapping[int, int], *, of_text: bool) -> Ground | None:
    """What stands at a critical cut. None when a list can't be put down without its history: when it has places that
    hold nothing (two members moved one element at once), which later positions count."""
    known = document.numbers
    below = [change for writer in sorted(ends) for change in document.export_changes(writer, 0, ends[writer])]
    standing = LoroDocument.on_ground(container, known, _plain)
    standing.import_changes([_plain(change) for change in below])
    if not of_text and standing.at(standing.latest()).hidden_places(PROBE):
        return None
    heads = _heads(document, ends)
    marks = _Marks(document, known, below)
    content = standing.contents()
    pieces: list[Piece] = []
    kept: list[str] = []
    place = 0
    for atom, count, end in _spans(standing.take_out_all(PROBE), known, marks):
        if end is not None:
            marks.put(end, place)
        else:
            pieces.append(Piece(*atom, count))
            kept.extend(content[place : place + count])
        place += count
    return Ground(
        ends=dict(ends),
        heads=heads,
        lamport=1 + max(document.lamport((writer, ends[writer] - 1)) for writer in heads),
        pieces=tuple(_joined(pieces if of_text else _with_identities(document, pieces))),
        text="".join(kept) if of_text else "",
        elements=() if of_text else tuple(kept),
        marks=marks.standing(),
    )


def _plain(change: Change) -> Change:
    """The same change with a character in the place of each end of a mark: then these can be seen."""
    return Change(change.writer, change.counter, change.after_own, change.dependencies, tuple(_plain_runs(change.runs)))


def _plain_runs(runs: Iterable[Run]) -> Iterator[Run]:
    for run in runs:
        if isinstance(run, Mark):
            yield InsertText(run.start, "[")
            yield InsertText(run.end + 1, "]")
        else:
            yield run


def _heads(document: LoroDocument, ends: Mapping[int, int]) -> tuple[int, ...]:
    """Writers whose last atom below a cut is in nobody else's past there. Whoever wrote above the old ground has all of
    that in its past."""
    ground = {} if document.numbers is None else document.numbers.ground.ends
    last = {writer: end for writer, end in ends.items() if end > ground.get(writer, 0)}
    pasts = {writer: document.past([(writer, end - 1)]) for writer, end in last.items()}
    return tuple(
        writer
        for writer in sorted(last)
        if all(past.get(writer, 0) < last[writer] for other, past in pasts.items() if other != writer)
    )


class _Marks:
    """The marks below a cut, in the order in which they count: those of the old ground, then by lamport and writer."""

    def __init__(self, document: LoroDocument, known: GroundNumbers | None, below: Sequence[Change]) -> None:
        old = [] if known is None else known.ground.marks
        made = sorted(_mark_atoms(below), key=lambda mark: (document.lamport(mark[0]), mark[0]))
        self._known = known
        self._kinds = [*((mark.key, mark.value) for mark in old), *((run.key, run.value) for _, run in made)]
        self._ends: dict[Atom, End] = {}
        self.counters: dict[int, list[int]] = {}
        """writer -> the counters of its ends of marks, ascending; in the numbers of the document for the ground."""
        if known is not None:
            for number in range(len(old)):
                for side in (0, 1):
                    self._add((GROUND, known.standing + 2 * number + side), (number, side))
        for number, ((writer, counter), _) in enumerate(made, len(old)):
            for side in (0, 1):
                self._add((writer, counter + side), (number, side))
        for counters in self.counters.values():
            counters.sort()
        self._places: dict[End, int] = {}

    def _add(self, atom: Atom, end: End) -> None:
        self._ends[atom] = end
        self.counters.setdefault(atom[0], []).append(atom[1])

    def at(self, atom: Atom) -> End | None:
        return self._ends.get(atom)

    def put(self, end: End, place: int) -> None:
        self._places[end] = place

    def standing(self) -> tuple[StandingMark, ...]:
        return tuple(
            StandingMark(self._places[number, 0], self._places[number, 1], key, value)
            for number, (key, value) in enumerate(self._kinds)
        )


def _mark_atoms(changes: Iterable[Change]) -> Iterator[tuple[Atom, Mark]]:
    for change in changes:
        counter = change.counter
        for run in change.runs:
            if isinstance(run, Mark):
                yield (change.writer, counter), run
            counter += atom_count(run)


def _spans(
    found: Iterable[Delete], known: GroundNumbers | None, marks: _Marks
) -> Iterator[tuple[Atom, int, End | None]]:
    """What was found in a document, in its order and in the numbers of the history: consecutive atoms, or one end of a
    mark."""
    for run in found:
        start, run_end = run.counter, run.counter + run.length
        shift = 0 if known is None or run.writer == GROUND else known.start(run.writer)
        counters = marks.counters.get(run.writer, [])
        while start < run_end:
            end = marks.at((run.writer, start + shift))
            if end is not None:
                yield (run.writer, start), 1, end
                start += 1
                continue
            after = bisect_left(counters, start + shift)
            stop = min(run_end, counters[after] - shift) if after < len(counters) else run_end
            parts: Iterable[Run] = [Delete(0, stop - start, run.writer, start)]
            if known is not None:
                parts = known.run_out(Delete(0, stop - start, run.writer, start))
            for part in parts:
                assert isinstance(part, Delete), part
                yield (part.writer, part.counter), part.length, None
            start = stop


def _with_identities(document: LoroDocument, pieces: list[Piece]) -> list[Piece]:
    """One piece for each element, with its identity."""
    atoms = [(piece.writer, piece.counter + offset) for piece in pieces for offset in range(piece.length)]
    identities = document.element_ids(atoms)
    return [Piece(*atom, 1, *identities[atom]) for atom in atoms]


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """As few pieces as there can be."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and _follows(piece, last):
            last = last._replace(length=last.length + piece.length)
        else:
            if last is not None:
                yield last
            last = piece
    if last is not None:
        yield last


def _follows(piece: Piece, last: Piece) -> bool:
    if (piece.writer, piece.counter) != (last.writer, last.counter + last.length):
        return False
    return piece.maker == last.maker and piece.lamport == (last.lamport + last.length if last.maker else 0)
