"""Where content goes that is issued again: beside what it stood beside, as far as that is still there."""

from collections.abc import Sequence

from echostore.kernel.models._loro import Element, ElementId


def places_again(
    stood: Sequence[Element], now: Sequence[ElementId], mine: frozenset[ElementId]
) -> list[tuple[int, list[Element]]]:
    """What of `mine` stood there and is not there now, with the place for each stretch: after the nearest neighbour
    before it that is there, else before the nearest one after it. The last place comes first, so that none is moved by
    another."""
    index = {identity: place for place, identity in enumerate(now)}
    stretches: list[tuple[int | None, list[Element]]] = []
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
            stretches[-1][1].append(piece)
    placed = [(after_start if before is None else before + 1, pieces) for before, pieces in stretches]
    return sorted(placed, key=lambda place: place[0], reverse=True)
