"""The embedding tree of a party: where every item hangs, after all moves.

An item's genesis names its first parent; that can't form a cycle, since nothing hangs below an item that does not
exist yet. Explicit moves and embeddings are replayed in canonical order, and one that would form a cycle *at its
place in that order* is void. So all peers with the same set of moves see the same tree, and a late move can void one
that was valid and revive one that was void:

    order 1: move b under a, move a under b -> the second is void
    a late "move b under c" sorts between   -> now "move a under b" is fine

The moves are the state (kept in the snapshot until they are stable); everything else here is derived.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from echostore.kernel.ids import ItemId, Stamp

MOVE, EMBED, UNEMBED = 0, 1, 2


class TreeMove(NamedTuple):
    """One explicit placement. A parent of None is the party's system item."""

    stamp: Stamp
    item: ItemId
    kind: int
    parent: ItemId | None


FirstParent = Callable[[ItemId], ItemId | None]
"""Where an item's genesis put it; None for the system item, and for items that are not known."""


class Tree:
    """The party-level tree reducer. `moves` is its whole state."""

    def __init__(self, first_parent: FirstParent, moves: Iterable[TreeMove] = ()) -> None:
        self._first_parent = first_parent
        self.moves: list[TreeMove] = sorted(moves)
        self.unchanged = 0
        """How many of the first moves are the same as when somebody set this: whoever keeps what they amount to."""
        self._homes: dict[ItemId, ItemId | None] = {}
        self._embeddings: dict[ItemId, set[ItemId | None]] = {}
        self._guests: dict[ItemId | None, set[ItemId]] = {}
        """The embeddings from their other end."""
        self.void: set[Stamp] = set()
        self._replay()

    def home(self, item: ItemId) -> ItemId | None:
        """The parent an item hangs below now; None for the system item."""
        return self._homes[item] if item in self._homes else self._first_parent(item)

    @property
    def moved(self) -> Mapping[ItemId, ItemId | None]:
        """Where explicit moves put items; all others are where their genesis put them."""
        return self._homes

    def embeddings(self, item: ItemId) -> frozenset[ItemId | None]:
        """Further parents that an item is embedded in, beside its home."""
        return frozenset(self._embeddings.get(item, ()))

    def guests(self, parent: ItemId | None) -> frozenset[ItemId]:
        """Items that are embedded in a parent beside their home."""
        return frozenset(self._guests.get(parent, ()))

    def apply(self, move: TreeMove) -> set[ItemId]:
        """Fold in one move; returns the items whose place changed, with all parents they left or reached."""
        return self.apply_all([move])

    def apply_all(self, moves: Iterable[TreeMove]) -> set[ItemId]:
        """Fold in moves; one replay covers them all when any sorts before what is already there."""
        fresh = sorted(moves)
        if not fresh:
            return set()
        if self.moves and fresh[0] < self.moves[-1]:
            before = self._places()
            self.unchanged = min(self.unchanged, bisect_left(self.moves, fresh[0]))
            for move in fresh:
                insort(self.moves, move)
            self._replay()
            return self._changed(before)
        touched: set[ItemId] = set()
        for move in fresh:
            self.moves.append(move)
            touched |= self._step(move)
        return touched

    def without(self, items: frozenset[ItemId]) -> set[ItemId]:
        """Drop the moves of some items, which are about to be folded again; returns what changed."""
        kept = [move for move in self.moves if move.item not in items]
        if len(kept) == len(self.moves):
            return set()
        before = self._places()
        dropped = next(at for at, move in enumerate(self.moves) if move.item in items)
        self.unchanged = min(self.unchanged, dropped)
        self.moves = kept
        self._replay()
        return self._changed(before)

    def forms_cycle(self, item: ItemId, parent: ItemId | None) -> bool:
        """Whether hanging `item` below `parent` now would close a cycle over homes and embeddings."""
        if parent is None:
            return False
        seen: set[ItemId] = set()
        front = [parent]
        while front:
            at = front.pop()
            if at == item:
                return True
            if at in seen:
                continue
            seen.add(at)
            front.extend(above for above in (self.home(at), *self._embeddings.get(at, ())) if above is not None)
        return False

    def _replay(self) -> None:
        self._homes.clear()
        self._embeddings.clear()
        self._guests.clear()
        self.void.clear()
        for move in self.moves:
            self._place(move)

    def _step(self, move: TreeMove) -> set[ItemId]:
        """Place one move; returns the items that it touches, with the parent that the item leaves."""
        left = self.home(move.item) if move.kind == MOVE else None
        if not self._place(move):
            return set()
        return {each for each in (move.item, move.parent, left) if each is not None}

    def _place(self, move: TreeMove) -> bool:
        """Let one move count, unless it is void. Of the moved item itself no first parent is asked."""
        item, parent = move.item, move.parent
        if move.kind == UNEMBED:
            self._embeddings.get(item, set()).discard(parent)
            self._guests.get(parent, set()).discard(item)
            return True
        if self.forms_cycle(item, parent):
            self.void.add(move.stamp)
            return False
        if move.kind == MOVE:
            self._homes[item] = parent
        else:
            self._embeddings.setdefault(item, set()).add(parent)
            self._guests.setdefault(parent, set()).add(item)
        return True

    def _places(self) -> dict[ItemId, tuple[ItemId | None, frozenset[ItemId | None]]]:
        moved = {move.item for move in self.moves}
        return {item: (self.home(item), self.embeddings(item)) for item in moved}

    def _changed(self, before: dict[ItemId, tuple[ItemId | None, frozenset[ItemId | None]]]) -> set[ItemId]:
        after = self._places()
        changed: set[ItemId] = set()
        for item in before.keys() | after.keys():
            old = before.get(item) or (self._first_parent(item), frozenset())
            new = after.get(item) or (self._first_parent(item), frozenset())
            if old != new:
                changed.add(item)
                changed.update(parent for parent in (old[0], new[0], *old[1], *new[1]) if parent is not None)
        return changed
