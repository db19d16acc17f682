"""The undo of one operation on a list, in terms of its elements.

    inserted    goes, unless somebody else has set it to another value since
    deleted     comes back, unless somebody else deleted it too
    set         becomes what it would be without the operation, unless somebody else has set it since
    moved       goes where it would be without the operation, unless somebody else has moved it since; goes altogether
                when somebody else deleted it, which the move had undone

What "would be without the operation" is read from the version that holds everything except the operation and what was
built on it. An element is put behind the nearest one that stood before it there and has kept its place. An element that
an earlier undo brought back is the one that had been deleted (`stand_ins`).
"""

from dataclasses import dataclass, field

from echostore.kernel.models._loro import Element, ElementId, LoroDocument, placings
from echostore.kernel.models.change_graph import (
    Atom,
    ChangeGraph,
    Delete,
    InsertElements,
    Move,
    SetElement,
    atom_count,
)
from echostore.kernel.models.stand_ins import Originals


@dataclass(slots=True)
class _Effect:
    """What an operation did to elements, by their first identity."""

    inserted: set[ElementId] = field(default_factory=set)
    deleted: dict[ElementId, Atom] = field(default_factory=dict)  # with the atom that had put them where they were
    texts: dict[ElementId, str] = field(default_factory=dict)  # what it inserted or set last
    moves: dict[ElementId, Atom] = field(default_factory=dict)  # where it put them last

    @property
    def needs_past(self) -> bool:
        return bool(self.deleted or self.moves or self.texts.keys() - self.inserted)


class ListUndo:
    """Edits a list, and remembers which atoms the edits stand for."""

    def __init__(
        self, document: LoroDocument, root: str, update: ChangeGraph, originals: Originals, writer: int
    ) -> None:
        self._document = document
        self._root = root
        self._target = document.movable_list(root)
        self._originals = originals
        self._maker = update[0].writer
        self._own = {self._maker, writer}
        self._past = document.past(update[0].frontier())  # ends of writers
        self._first = self._first_identities()
        self._effect = self._effect_of(update)
        self._order: list[Element] = []  # the list as it is, in step with the edits
        self.put_back: list[Atom] = []
        """The original of each atom that an insertion or a move made, in their order."""

    @property
    def needs_past(self) -> bool:
        return self._effect.needs_past

    def apply(self, without: LoroDocument | None) -> None:
        """`without` is the list without the operation; it may be left out when `needs_past` says so."""
        self._order = self._elements(self._document)
        self._take_away()
        if without is not None:
            past = self._elements(without)
            texts = {element.identity: element.text for element in past}
            self._delete_what_only_moves_saved(texts)
            self._set_back(texts)
            self._place_back(past)

    # What the operation did

    def _first_identities(self) -> dict[ElementId, ElementId]:
        """Elements that were brought back -> the ones that they are."""
        pairs = list(self._originals.pairs())
        identities = self._document.element_ids(atom for pair in pairs for atom in pair)
        first: dict[ElementId, ElementId] = {}
        for atom, original in pairs:
            identity, was = identities.get(atom), identities.get(original)
            if identity is not None and was is not None and identity != was:
                first[identity] = first.get(was, was)
        return first

    def _effect_of(self, update: ChangeGraph) -> _Effect:
        effect = _Effect()
        removed = [atom for change in update for run in change.runs if isinstance(run, Delete) for atom in _atoms(run)]
        made = [(self._maker, counter) for counter, _ in placings(update)]
        identities = {
            atom: self._first.get(identity, identity)
            for atom, identity in self._document.element_ids([*removed, *made]).items()
        }
        for change in update:
            counter = change.counter
            for run in change.runs:
                if isinstance(run, InsertElements):
                    for offset, text in enumerate(run.elements):
                        identity = identities[(self._maker, counter + offset)]
                        effect.inserted.add(identity)
                        effect.texts[identity] = text
                elif isinstance(run, SetElement):
                    identity = (run.writer, run.lamport)
                    effect.texts[self._first.get(identity, identity)] = run.element
                elif isinstance(run, Move):
                    effect.moves[identities[(self._maker, counter)]] = (self._maker, counter)
                elif isinstance(run, Delete):
                    effect.deleted.update((identities[atom], atom) for atom in _atoms(run))
                counter += atom_count(run)
        for identity in effect.inserted:
            effect.deleted.pop(identity, None)
        return effect

    def _elements(self, document: LoroDocument) -> list[Element]:
        """By their first identities."""
        first = self._first
        return [
            element._replace(identity=first.get(element.identity, element.identity))
            for element in document.elements(self._root)
        ]

    # Edits

    def _take_away(self) -> None:
        effect = self._effect
        for index in range(len(self._order) - 1, -1, -1):
            identity, text, _ = self._order[index]
            if identity in effect.inserted and effect.texts[identity] == text:
                self._target.delete(index, 1)
                del self._order[index]

    def _delete_what_only_moves_saved(self, past: dict[ElementId, str]) -> None:
        """An element that somebody deleted while the operation moved it lives on because of the move alone."""
        effect = self._effect
        for index in range(len(self._order) - 1, -1, -1):
            element = self._order[index]
            move = effect.moves.get(element.identity)
            if move is None or element.identity in past or element.identity in effect.inserted:
                continue
            if self._is_where_it_was_put(element, move):
                self._target.delete(index, 1)
                del self._order[index]

    def _set_back(self, past: dict[ElementId, str]) -> None:
        effect = self._effect
        for index, element in enumerate(self._order):
            identity = element.identity
            if identity in effect.inserted or effect.texts.get(identity) != element.text or identity not in past:
                continue
            if self._target.get_last_editor_at(index) in self._own:
                self._target.set(index, past[identity])
                self._order[index] = element._replace(text=past[identity])

    def _place_back(self, past: list[Element]) -> None:
        effect = self._effect
        here = {element.identity: element for element in self._order}
        placed: list[ElementId] = []  # those of `past` so far that are where they were
        for element in past:
            identity = element.identity
            now = here.get(identity)
            if now is None:
                if not self._is_missing_because_of_it(element):
                    continue
                index = self._place(placed)
                self._target.insert(index, element.text)
                self._order.insert(index, element)
                self.put_back.append(self._originals.of(element.atom))
            elif identity in effect.moves and self._is_where_it_was_put(now, effect.moves[identity]):
                source = self._order.index(now)
                del self._order[source]
                index = self._place(placed)
                self._order.insert(index, now)
                if index != source:
                    self._target.mov(source, index)
                    self.put_back.append(self._originals.of(element.atom))
            elif not self._is_where_it_was_put(now, element.atom):
                continue  # it says nothing about its old neighbours any more
            placed.append(identity)

    def _is_missing_because_of_it(self, element: Element) -> bool:
        """A deletion does not reach an element that somebody moved away meanwhile: then another one has deleted it."""
        identity = element.identity
        deleted = self._effect.deleted
        return deleted.get(identity) == element.atom or (identity in deleted and identity in self._effect.moves)

    def _is_where_it_was_put(self, now: Element, atom: Atom) -> bool:
        """Nobody else has moved it since. Later moves of one's own have been undone before this one, perhaps without a
        trace: who moves an element to where it is makes no atom. And what only the past of the operation can have put
        somewhere is there because an undo put it back."""
        place = self._originals.of(now.atom)
        writer, counter = place
        return place == self._originals.of(atom) or writer in self._own or counter < self._past.get(writer, 0)

    def _place(self, placed: list[ElementId]) -> int:
        """Behind the nearest one that stood before."""
        if not placed:
            return 0
        nearest = placed[-1]
        return next(index for index, element in enumerate(self._order) if element.identity == nearest) + 1


def _atoms(run: Delete) -> list[Atom]:
    return [(run.writer, run.counter + offset) for offset in range(abs(run.length))]
