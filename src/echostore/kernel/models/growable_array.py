"""GrowableArray: a list of values that several writers insert into, delete from, set and move in at once.

An element keeps its identity when it is moved or set: a move and a set of one element by two writers both take effect.
Of two moves, and of two sets, of one element at once one wins, the same everywhere.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from echostore.kernel.errors import UsageError
from echostore.kernel.models._elements import element_text, element_value
from echostore.kernel.models._list_undo import ListUndo
from echostore.kernel.models._loro import Element, ElementId, LoroDocument, element_at, guarded, no_writer
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.change_graph import Atom, ChangeGraph, Delete, InsertElements, Move, SetElement
from echostore.kernel.models.stand_ins import Originals, StandIn
from echostore.kernel.values import Value, check_value

_ROOT = "list"


@dataclass(frozen=True, slots=True)
class ArrayOperation:
    """What one writer did to the list between two seals."""

    update: ChangeGraph
    generation: int
    stand_ins: tuple[StandIn, ...] = ()


class GrowableArray(SharedSequence):
    name: ClassVar[str] = "growable-array"
    version: ClassVar[int] = 1
    _container: ClassVar[str] = f"cid:root-{_ROOT}:MovableList"
    _run_kinds: ClassVar[frozenset[type]] = frozenset({InsertElements, Delete, SetElement, Move})

    def value(self) -> list[Value]:
        return list(self)

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Value]:
        for text in self._list.to_vec():
            assert isinstance(text, str), text
            yield element_value(text)

    def get(self, index: int) -> Value:
        """The element at `index`; negative ones count from the end, as in Python."""
        return element_value(element_at(self._list, self._index(index)))

    # Edits

    def insert(self, index: int, value: Value) -> None:
        self._check_writer()
        guarded(self._list.insert, index, element_text(check_value(value)))

    def append(self, value: Value) -> None:
        self.insert(len(self._list), value)

    def delete(self, index: int, length: int = 1) -> None:
        self._check_writer()
        if index < 0 or length < 0 or index + length > len(self):
            raise UsageError(f"no elements {index} to {index + length} in a list of {len(self)}")
        guarded(self._list.delete, index, length)

    def set(self, index: int, value: Value) -> None:
        self._check_writer()
        guarded(self._list.set, self._index(index), element_text(check_value(value)))

    def move(self, source: int, target: int) -> None:
        """Take the element at `source` out and put it where it then is the one at `target`."""
        self._check_writer()
        source, target = self._index(source), self._index(target)
        if source != target:
            guarded(self._list.mov, source, target)

    def _index(self, index: int) -> int:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise UsageError(f"no element {index} in a list of {len(self)}")
        return position

    # Undo

    def undo_operation(self, operation: ArrayOperation, originals: Originals | None = None) -> None:
        """Take back what an operation of this item did, as new edits that the caller seals.

        What it inserted goes, also where an earlier undo has put it back; what it deleted and nobody else deleted comes
        back, what it set or moved is set or moved back; an element that somebody else has set or moved since stays as
        that one left it. Undoing the undo's operation is the redo. `originals` are those of the undos since the
        operation; what this one puts back is added.
        """
        self._check_writer()
        if self.holds(operation.update):
            self._put_back(*guarded(self._undo, operation.update, originals or Originals()))

    def _undo(self, update: ChangeGraph, originals: Originals) -> tuple[Originals, list[Atom]]:
        assert self._writer is not None
        self._document.commit()
        undo = ListUndo(self._document, _ROOT, update, originals, self._writer)
        undo.apply(self._document.at(self._version_without(update[0])) if undo.needs_past else None)
        return originals, undo.put_back

    # Issuing again

    def identified(self, atoms: Iterable[Atom]) -> dict[Atom, ElementId]:
        return self._document.element_ids(atoms)

    def put(self, index: int, contents: list[str]) -> None:
        self._check_writer()
        for offset, content in enumerate(contents):
            guarded(self._list.insert, index + offset, content)

    def _pieces(self, document: LoroDocument) -> list[Element]:
        return document.elements(_ROOT)

    # The writer

    def _open(self) -> None:
        self._list = self._document.movable_list(_ROOT)

    def _bind(self) -> None:
        """Edits check for a writer themselves: they check their value as well."""

    def _check_writer(self) -> None:
        if self._writer is None:
            no_writer()

    def _operation(self, update: ChangeGraph, generation: int) -> ArrayOperation:
        return ArrayOperation(update, generation, self._taken_stand_ins())
