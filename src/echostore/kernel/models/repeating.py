"""Doing own edits of a text or a list once more, on what it is now: after their feed was cut or their ground excluded.

    inserted    is inserted beside what it stood beside, with its marks, unless somebody deleted it
    deleted     is deleted, unless somebody has moved it since
    set, moved  is set or moved beside what it was moved beside, unless somebody has set or moved it since
    marked      gets the mark, unless somebody has marked it otherwise since

What somebody else has changed since stays as that one left it: the edits may be old. Nothing is done about what is no more
there. So an edit whose whole effect others have overtaken is not repeated at all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from echostore.kernel.models._delta import Marks
from echostore.kernel.models._elements import element_value
from echostore.kernel.models._loro import Element, ElementId
from echostore.kernel.models.change_graph import (
    Atom,
    Delete,
    InsertElements,
    InsertText,
    Mark,
    Move,
    SetElement,
    atom_count,
)
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.placing_again import places_again
from echostore.kernel.models.text import ConcurrentText


@dataclass(slots=True)
class _Effect:
    """What operations did, by atoms and identities."""

    inserted: list[Atom] = field(default_factory=list)
    deleted: list[Atom] = field(default_factory=list)
    texts: dict[ElementId, str] = field(default_factory=dict)
    moved: set[ElementId] = field(default_factory=set)
    marks: bool = False

    @classmethod
    def of(cls, operations: Iterable[Any]) -> "_Effect":
        effect = cls()
        for operation in operations:
            for change in operation.update:
                counter = change.counter
                for run in change.runs:
                    count = atom_count(run)
                    if isinstance(run, InsertText | InsertElements):
                        effect.inserted.extend((change.writer, counter + offset) for offset in range(count))
                    elif isinstance(run, Delete):
                        effect.deleted.extend((run.writer, run.counter + offset) for offset in range(count))
                    elif isinstance(run, SetElement):
                        effect.texts[run.writer, run.lamport] = run.element
                    elif isinstance(run, Move):
                        effect.moved.add((run.writer, run.lamport))
                    elif isinstance(run, Mark):
                        effect.marks = True
                    counter += count
        return effect


def repeat_edits(
    model: Any, seen: Any, lost: list[Any], deleted: set[Atom], content: Callable[[str], str] = lambda piece: piece
) -> bool:
    """Do on `model` what the operations `lost` of one writer did on `seen`, which holds them. `deleted` are atoms of that
    writer that others have deleted; `content` makes each piece what it is now. Whether anything was to be done.

    The caller has begun an edit of `model`, and seals it.
    """
    return _Repetition(model, seen, lost, deleted, content).run()


class _Repetition:
    def __init__(
        self, model: Any, seen: Any, lost: list[Any], deleted: set[Atom], content: Callable[[str], str]
    ) -> None:
        self._model, self._seen, self._content = model, seen, content
        self._effect = _Effect.of(lost)
        first, last = lost[0].update[0], lost[-1].update[-1]
        self._last: Atom = (last.writer, last.counter_end - 1)
        self._frontier = first.frontier()
        self._mine = frozenset(seen.identified(self._effect.inserted).values())
        self._before = {piece.identity: piece for piece in seen.pieces(*self._frontier)} if self._frontier else {}
        self._after: list[Element] = seen.pieces(self._last)
        self._stood = [piece for piece in self._after if piece.atom not in deleted]
        self._now: list[Element] = model.pieces()
        self._order = [piece.identity for piece in self._now]
        """The sequence while it is edited; what is inserted again counts as what it was."""

    def run(self) -> bool:
        done = False
        if isinstance(self._model, GrowableArray):
            done |= self._set()
        elif self._effect.marks:
            done |= self._mark()
        done |= self._insert_and_delete()
        if self._effect.moved:
            done |= self._move()
        return done

    def _set(self) -> bool:
        done = False
        for index, piece in enumerate(self._now):
            text = self._effect.texts.get(piece.identity)
            was = self._before.get(piece.identity)
            if text is not None and was is not None and piece.text == was.text != self._content(text):
                self._model.set(index, element_value(self._content(text)))
                done = True
        return done

    def _mark(self) -> bool:
        was = self._seen.marks_at(*self._frontier) if self._frontier else {}
        then = self._seen.marks_at(self._last)
        now = self._model.marks_at()
        wanted = []
        for index, piece in enumerate(self._now):
            before, after = was.get(piece.atom), then.get(piece.atom)
            if before is not None and after is not None:
                wanted += [
                    (index, key, after.get(key))
                    for key in before.keys() | after.keys()
                    if before.get(key) == now[piece.atom].get(key) != after.get(key)
                ]
        self._model.put_marks(wanted)
        return bool(wanted)

    def _insert_and_delete(self) -> bool:
        taken = {
            identity: atom
            for atom, identity in self._seen.identified(self._effect.deleted).items()
            if identity not in self._mine
        }
        steps: list[tuple[int, list[Element] | None]] = [
            (index, None) for index, piece in enumerate(self._now) if taken.get(piece.identity) == piece.atom
        ]
        steps += places_again(self._stood, self._order, self._mine)
        # From the end, so that no place is moved by another; what stands at a place goes before something comes there.
        for index, pieces in sorted(steps, key=lambda step: (-step[0], step[1] is not None)):
            if pieces is None:
                self._model.delete(index, 1)
                del self._order[index]
            else:
                self._model.put(index, [self._content(piece.text) for piece in pieces])
                self._order[index:index] = [piece.identity for piece in pieces]
                if isinstance(self._model, ConcurrentText):
                    self._paint(index, pieces)
        return bool(steps)

    def _paint(self, index: int, pieces: list[Element]) -> None:
        """Give characters that were inserted again the marks that they had."""
        wanted: dict[Atom, Marks] = self._seen.marks_at(self._last)
        given = self._model.marks_in(index, index + len(pieces))
        self._model.put_marks(
            (place, key, wanted[piece.atom].get(key))
            for place, (piece, marks) in enumerate(zip(pieces, given, strict=True), index)
            for key in wanted[piece.atom].keys() | marks.keys()
            if wanted[piece.atom].get(key) != marks.get(key)
        )

    def _move(self) -> bool:
        done = False
        there = set(self._order)
        atoms = {piece.identity: piece.atom for piece in self._now}
        before: ElementId | None = None
        for piece in self._after:
            identity = piece.identity
            was = self._before.get(identity)
            if identity not in there:
                continue
            if identity in self._effect.moved and was is not None and atoms.get(identity) == was.atom:
                source = self._order.index(identity)
                del self._order[source]
                target = 0 if before is None else self._order.index(before) + 1
                self._order.insert(target, identity)
                if source != target:
                    self._model.move(source, target)
                    done = True
            before = identity
        return done
