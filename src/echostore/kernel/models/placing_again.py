"""Where content goes that is issued again: beside what it stood beside, as far as that is still there."""

from collections.abc import Iterable, Sequence
from typing import Any

from echostore.kernel.models._loro import Element, ElementId
from echostore.kernel.models.change_graph import Atom, InsertElements, InsertText, atom_count


def inserted_atoms(operations: Iterable[Any]) -> list[Atom]:
    """The atoms with which operations of a text or list inserted something."""
    found: list[Atom] = []
    for operation in operations:
        for change in operation.update:
            counter = change.counter
            for run in change.runs:
                if isinstance(run, InsertText | InsertElements):
                    found.extend((change.writer, counter + offset) for offset in range(atom_count(run)))
                counter += atom_count(run)
    return found


def places_again(
    stood: Sequence[Element], now: Sequence[ElementId], mine: frozenset[ElementId]
) -> list[tuple[int, list[str]]]:
    """What of `mine` stood there and is not there now, with the place for each stretch: after the nearest neighbour
    before it that is there, else before the nearest one after it. The last place comes first, so that none is moved by
    another."""
    index = {identity: place for place, identity in enumerate(now)}
    stretches: list[tuple[int | None, list[str]]] = []
    anchor: int | None = None
    after_start = 0
    fresh = True
    for piece in stood:
        if piece.identity in index:
            if anchor is None:
                after_start = index[piece.identity]
            anchor = index[piece.identity]
            fresh = True
        elif piece.identity in mine:
            if fresh:
                stretches.append((anchor, []))
                fresh = False
            stretches[-1][1].append(piece.text)
    placed = [(after_start if before is None else before + 1, contents) for before, contents in stretches]
    return sorted(placed, key=lambda place: place[0], reverse=True)
