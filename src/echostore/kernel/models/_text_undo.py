"""The undo of one operation on a text, in terms of its characters.

    inserted    goes
    deleted     comes back, unless somebody else deleted it too
    marked      gets the mark that it would have without the operation, unless somebody else has marked it since

What "would be without the operation" is read from the version that holds everything except the operation and what was
built on it. A character comes back behind the nearest one that stood before it there. A character that an earlier undo
brought back is the one that had been deleted (`stand_ins`).
"""

from echostore.kernel.models._delta import Drop, Insert, Keep, Marks, Step, joined
from echostore.kernel.models._loro import LoroDocument, text_steps
from echostore.kernel.models.change_graph import Atom, ChangeGraph, Delete, InsertText, Mark, atom_count
from echostore.kernel.models.stand_ins import Originals


class TextUndo:
    """The edits that undo an operation, and the atoms that the edits stand for."""

    def __init__(self, document: LoroDocument, root: str, update: ChangeGraph, originals: Originals) -> None:
        self._root = root
        self._originals = originals
        self._inserted: set[Atom] = set()
        deleted: set[Atom] = set()
        self.has_marks = False
        for change in update:
            counter = change.counter
            for run in change.runs:
                count = atom_count(run)
                if isinstance(run, InsertText):
                    self._inserted.update(originals.of((change.writer, counter + offset)) for offset in range(count))
                elif isinstance(run, Delete):
                    deleted.update(originals.of((run.writer, run.counter + offset)) for offset in range(count))
                elif isinstance(run, Mark):
                    self.has_marks = True
                counter += count
        self._deleted = deleted - self._inserted
        self._here = self._atoms(document)
        self._marks_here = marks_of(document, root) if self.has_marks else []
        self.put_back: list[Atom] = []
        """The original of each character that is inserted, in their order."""

    @property
    def needs_past(self) -> bool:
        return bool(self._deleted) or self.has_marks

    def steps(self, without: LoroDocument | None, marks: dict[Atom, Marks]) -> list[Step]:
        """The edits as a delta over the text. `without` is the text without the operation; it may be left out when
        `needs_past` says so. `marks` is what `marks_set` found."""
        back = self._coming_back(without) if without is not None else {}
        unmarked = self._marks_back(without, marks) if without is not None and marks else {}
        inserted = self._inserted
        dropped = {index for index, atom in enumerate(self._here) if atom in inserted} if inserted else set()
        steps: list[Step] = []
        done = 0
        for index in sorted({*back, *dropped, *unmarked}):
            steps.append(Keep(index - done))
            for atom, character, character_marks in back.get(index, ()):
                steps.append(Insert(character, character_marks or None))
                self.put_back.append(atom)
            done = index
            if index in dropped:
                steps.append(Drop(1))
                done += 1
            elif index in unmarked:
                steps.append(Keep(1, unmarked[index]))
                done += 1
        return joined(step for step in steps if step.length)

    def marks_set(self, before: LoroDocument, after: LoroDocument) -> dict[Atom, Marks]:
        """What the operation made of the marks of characters that were there before it."""
        was = self._by_original(before)
        found = {}
        for atom, marks in self._by_original(after).items():
            if atom in was and was[atom] != marks:
                keys = was[atom].keys() | marks.keys()
                found[atom] = {key: marks.get(key) for key in keys if was[atom].get(key) != marks.get(key)}
        return found

    def _coming_back(self, without: LoroDocument) -> dict[int, list[tuple[Atom, str, Marks]]]:
        """Index in the text -> what is to be inserted there."""
        places = {atom: index for index, atom in enumerate(self._here)}
        deleted = self._deleted
        found: dict[int, list[tuple[Atom, str, Marks]]] = {}
        atoms = self._atoms(without)
        characters = _Characters(without, self._root)
        index = 0
        for position, atom in enumerate(atoms):
            place = places.get(atom)
            if place is not None:
                index = place + 1
            elif atom in deleted:
                found.setdefault(index, []).append((atom, *characters.at(position)))
        return found

    def _marks_back(self, without: LoroDocument, marks: dict[Atom, Marks]) -> dict[int, Marks]:
        """Index in the text -> the marks to set there, as far as they still are what the operation made of them."""
        past = self._by_original(without)
        found = {}
        for index, (atom, now) in enumerate(zip(self._here, self._marks_here, strict=True)):
            if atom in marks and atom in past:
                was = past[atom]
                back = {
                    key: was.get(key) for key, value in marks[atom].items() if now.get(key) == value != was.get(key)
                }
                if back:
                    found[index] = back
        return found

    def _by_original(self, document: LoroDocument) -> dict[Atom, Marks]:
        return dict(zip(self._atoms(document), marks_of(document, self._root), strict=True))

    def _atoms(self, document: LoroDocument) -> list[Atom]:
        return self._originals.of_all(document.text_atoms(self._root))


class _Characters:
    """The characters of a text with their marks, asked for from left to right."""

    def __init__(self, document: LoroDocument, root: str) -> None:
        self._runs = [step for step in text_steps(document.text(root)) if isinstance(step, Insert)]
        self._run = 0
        self._start = 0

    def at(self, position: int) -> tuple[str, Marks]:
        while position >= self._start + self._runs[self._run].length:
            self._start += self._runs[self._run].length
            self._run += 1
        run = self._runs[self._run]
        return run.text[position - self._start], dict(run.marks or {})


def marks_of(document: LoroDocument, root: str) -> list[Marks]:
    """The marks of each character, in order."""
    runs = [step for step in text_steps(document.text(root)) if isinstance(step, Insert)]
    return [marks for step in runs for marks in [dict(step.marks or {})] * step.length]
