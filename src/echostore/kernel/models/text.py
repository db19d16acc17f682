"""ConcurrentText: plain and marked text that several writers edit at once.

All positions count Unicode code points. A mark grows with text typed at its end. Cursors are bytes that keep their
place while the text changes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from echostore.kernel.errors import UsageError
from echostore.kernel.limits import KEY_CHARACTERS_MAX
from echostore.kernel.models._delta import Insert, Marks
from echostore.kernel.models._loro import (
    Element,
    LoroDocument,
    apply_text_steps,
    guarded,
    no_writer,
    raise_typed,
    text_steps,
)
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models._text_undo import TextUndo, marks_of
from echostore.kernel.models.change_graph import Atom, ChangeGraph, Delete, InsertText, Mark, MarkValue
from echostore.kernel.models.stand_ins import Originals, StandIn
from echostore.kernel.values import INT_MAX, INT_MIN

_ROOT = "text"


@dataclass(frozen=True, slots=True)
class TextOperation:
    """What one writer did to the text between two seals."""

    update: ChangeGraph
    generation: int
    stand_ins: tuple[StandIn, ...] = ()


@dataclass(frozen=True, slots=True)
class TextRun:
    """A stretch of text under the same marks."""

    text: str
    marks: Marks


class ConcurrentText(SharedSequence):
    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    _container: ClassVar[str] = f"cid:root-{_ROOT}:Text"
    _run_kinds: ClassVar[frozenset[type]] = frozenset({InsertText, Delete, Mark})
    _marked_root: ClassVar[str] = _ROOT

    def value(self) -> str:
        return self._text.to_string()

    def __str__(self) -> str:
        return self._text.to_string()

    def __len__(self) -> int:
        return self._text.len_unicode

    def to_delta(self) -> list[TextRun]:
        """The text with its marks, as runs."""
        return [
            TextRun(step.text, dict(step.marks or {})) for step in text_steps(self._text) if isinstance(step, Insert)
        ]

    # Edits

    def insert(self, position: int, text: str) -> None:
        try:
            self._insert(position, text)
        except BaseException as error:  # noqa: BLE001  # loro raises bare ones
            raise_typed(error)

    def delete(self, position: int, length: int) -> None:
        try:
            self._delete(position, length)
        except BaseException as error:  # noqa: BLE001  # loro raises bare ones
            raise_typed(error)

    def raw_edits(self) -> tuple[Callable[[int, str], None], Callable[[int, int], None]]:
        """The library's own insert and delete, for the hottest path: valid until the next operation is applied, and
        what they raise is to be passed to `raise_edit_error`."""
        self._check_writer()
        return self._insert, self._delete

    raise_edit_error = staticmethod(raise_typed)

    def splice(self, position: int, length: int, text: str) -> None:
        """Replace `length` characters."""
        if position < 0 or length < 0 or position + length > len(self):
            raise UsageError(f"no characters {position} to {position + length} in a text of {len(self)}")
        if length:
            self.delete(position, length)
        if text:
            self.insert(position, text)

    def append(self, text: str) -> None:
        self.insert(self._text.len_unicode, text)

    def mark(self, start: int, end: int, key: str, value: MarkValue = True) -> None:
        """Put a mark on [start, end)."""
        self._check_writer()
        if not key or len(key) > KEY_CHARACTERS_MAX:
            raise UsageError(f"the key of a mark has 1 to {KEY_CHARACTERS_MAX} characters, got {len(key)}")
        if not (
            value is None or isinstance(value, (bool, str)) or (type(value) is int and INT_MIN <= value <= INT_MAX)
        ):
            raise UsageError(f"a mark holds text, a whole number, a truth value or nothing, not {value!r}")
        guarded(self._text.mark, start, end, key, value)

    def unmark(self, start: int, end: int, key: str) -> None:
        self._check_writer()
        guarded(self._text.unmark, start, end, key)

    # Cursors

    def cursor(self, position: int) -> bytes:
        """A place that stays before the character now at `position`, or at the end."""
        if not 0 <= position <= len(self):
            raise UsageError(f"no position {position} in a text of {len(self)}")
        return self._document.cursor(self._text, position, at_end=position == len(self))

    def cursor_position(self, cursor: bytes) -> int:
        return self._document.cursor_position(cursor)

    # Undo

    def undo_operation(self, operation: TextOperation, originals: Originals | None = None) -> None:
        """Take back what an operation of this item did, as new edits that the caller seals.

        What it inserted goes, also where an earlier undo has put it back; what it deleted and nobody else deleted comes
        back; everything that others did stays. Undoing the undo's operation is the redo. `originals` are those of the
        undos since the operation; what this one puts back is added.
        """
        self._check_writer()
        if self.holds(operation.update):
            self._put_back(*self._undo(operation.update, originals or Originals()))

    def _undo(self, update: ChangeGraph, originals: Originals) -> tuple[Originals, list[Atom]]:
        document = self._document
        document.commit()
        undo = TextUndo(document, _ROOT, update, originals)
        without = document.at(self._version_without(update[0])) if undo.needs_past else None
        marks: dict[Atom, Marks] = {}
        if undo.has_marks:
            before, after = self._versions_around(update)
            marks = undo.marks_set(document.at(before), document.at(after))
        steps = undo.steps(without, marks)
        if steps:
            apply_text_steps(self._text, steps)
        return originals, undo.put_back

    # Issuing again

    def marks_at(self, *atoms: Atom) -> dict[Atom, Marks]:
        """The marks of each character by its atom: now, or in the version that these atoms make."""
        document = self._at(*atoms)
        return dict(zip(document.text_atoms(_ROOT), marks_of(document, _ROOT), strict=True))

    def marks_in(self, start: int, end: int) -> list[Marks]:
        """The marks of the characters at `start` .. `end`."""
        return marks_of(self._document, _ROOT)[start:end]

    def put_marks(self, wanted: Iterable[tuple[int, str, MarkValue]]) -> None:
        """Give characters at these places marks, or take those away; neighbours that get the same get it together."""
        here: list[Any] = []
        for index, key, value in sorted(wanted, key=lambda each: (each[1], each[0])):
            if here and here[1:] == [index, key, value]:
                here[1] += 1
            else:
                self._put_mark(*here)
                here = [index, index + 1, key, value]
        self._put_mark(*here)

    def _put_mark(self, *where: Any) -> None:
        if where:
            start, end, key, value = where
            if value is None:
                self.unmark(start, end, key)
            else:
                self.mark(start, end, key, value)

    def put(self, index: int, contents: list[str]) -> None:
        self.insert(index, "".join(contents))

    def _pieces(self, document: LoroDocument) -> list[Element]:
        atoms = document.text_atoms(_ROOT)
        return [
            Element(atom, character, atom)
            for atom, character in zip(atoms, document.text(_ROOT).to_string(), strict=True)
        ]

    # The writer

    def _open(self) -> None:
        self._text = self._document.text(_ROOT)
        self._insert: Callable[[int, str], None] = no_writer
        self._delete: Callable[[int, int], None] = no_writer

    def _bind(self) -> None:
        self._insert = self._text.insert
        self._delete = self._text.delete

    def _check_writer(self) -> None:
        if self._writer is None:
            no_writer()

    def _operation(self, update: ChangeGraph, generation: int) -> TextOperation:
        return TextOperation(update, generation, self._taken_stand_ins())
