"""GrowableArray: a list of values that several writers insert into, delete from, set and move in at once.

An element keeps its identity when it is moved or set: a move and a set of one element by two writers both take effect.
Of two moves, and of two sets, of one element at once one wins, the same everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echostore.kernel.errors import UsageError
from echostore.kernel.models._elements import element_text, element_value
from echostore.kernel.models._loro import ElementId, LoroDocument, Version, element_at, guarded, no_writer
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.change_graph import Change, ChangeGraph, Delete, InsertElements, Move, SetElement
from echostore.kernel.values import Value, check_value

_ROOT = "list"


@dataclass(frozen=True, slots=True)
class ArrayOperation:
    """What one writer did to the list between two seals."""

    update: ChangeGraph
    generation: int


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

    def undo_operation(self, operation: ArrayOperation) -> None:
        """Take back what an operation of this item did, as new edits that the caller seals.

        What it inserted goes, what it deleted and nobody else deleted comes back, what it set or moved is set or moved
        back; an element that somebody else has set or moved since stays as that one left it. Undoing the undo's
        operation is the redo.
        """
        self._check_writer()
        for change in reversed(operation.update):
            guarded(_undo, self._document, change, self._version_without(change))

    # The writer

    def _open(self) -> None:
        self._list = self._document.movable_list(_ROOT)

    def _bind(self) -> None:
        """Edits check for a writer themselves: they check their value as well."""

    def _check_writer(self) -> None:
        if self._writer is None:
            no_writer()

    def _operation(self, update: ChangeGraph, generation: int) -> ArrayOperation:
        return ArrayOperation(update, generation)


def _undo(document: LoroDocument, change: Change, without: Version) -> None:
    """Undo one change by comparing four versions of the list, element by element."""
    before = document.elements(_ROOT, document.version(change.frontier()))
    after = document.elements(_ROOT, document.version([(change.writer, change.counter_end - 1)]))
    others = document.elements(_ROOT, without)
    current = document.elements(_ROOT, document.latest())
    target = document.movable_list(_ROOT)
    order: list[ElementId] = list(current)  # kept in step with the list

    for identity, element in after.items():
        now = current.get(identity)
        if now is None or now.text != element.text:
            continue  # deleted, or set by somebody since
        was = before.get(identity)
        if was is None:
            target.delete(order.index(identity), 1)
            order.remove(identity)
        elif was.text != element.text:
            target.set(order.index(identity), others.get(identity, was).text)

    placed: list[ElementId] = []  # the elements of `before` so far, to find each one's place
    for identity, was in before.items():
        left = after.get(identity)
        now = current.get(identity)
        if left is None and now is None and identity in others:
            index = _place(order, placed)
            target.insert(index, others[identity].text)
            order.insert(index, identity)
        elif left is not None and now is not None and left.atom != was.atom and now.atom == left.atom:
            source = order.index(identity)
            del order[source]
            index = _place(order, placed)
            if index != source:
                target.mov(source, index)
            order.insert(index, identity)
        placed.append(identity)


def _place(order: list[ElementId], placed: list[ElementId]) -> int:
    """After the nearest one that used to stand before it and is there."""
    for identity in reversed(placed):
        if identity in order:
            return order.index(identity) + 1
    return 0
