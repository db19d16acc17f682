"""Window: the first so many of a sorted set of items, kept up to date.

    inside   [a b c]        at most `limit` entries; without a limit, all of them
    outside  [d e f g ...]  the rest

An entry that comes in front pushes the last one out; one that goes lets the next one in. Both are a few steps in a
`SortedKeys`, whatever the size.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from echostore.kernel.query.evaluate import Entry
from echostore.kernel.query.sorted_keys import SortedKeys

T = TypeVar("T")


class Window(Generic[T]):
    """Sorted entries by token, of which the first `limit` are inside."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._entries: dict[T, Entry] = {}
        self._inside = SortedKeys()
        self._outside = SortedKeys()
        self._before: dict[T, bool] = {}  # who was inside, of those that crossed since `settle`

    def fill(self, entries: dict[T, Entry]) -> None:
        """Start with these entries, all at once."""
        self._entries = entries
        ordered = sorted(entries.values())
        edge = len(ordered) if self._limit is None else self._limit
        self._inside, self._outside = SortedKeys(ordered[:edge]), SortedKeys(ordered[edge:])

    def __iter__(self) -> Iterator[T]:
        """The tokens inside, in order."""
        return (entry[-1] for entry in self._inside)

    def __contains__(self, token: T) -> bool:
        """Whether the token is inside."""
        entry = self._entries.get(token)
        return entry is not None and self._is_inside(entry)

    def entry(self, token: T) -> Entry:
        return self._entries[token]

    def rank(self, token: T) -> int:
        """The index of a token that is inside."""
        return self._inside.rank(self._entries[token])

    def put(self, token: T, entry: Entry) -> None:
        """Add an entry, or give a token another one."""
        if token in self._entries:
            self.drop(token)
        self._before.setdefault(token, False)
        self._entries[token] = entry
        if self._limit is None or len(self._inside) < self._limit:
            self._inside.add(entry)
        elif entry < (last := self._inside.last()):
            self._inside.remove(last)
            self._outside.add(last)
            self._before.setdefault(last[-1], True)
            self._inside.add(entry)
        else:
            self._outside.add(entry)

    def drop(self, token: T) -> None:
        entry = self._entries[token]
        inside = self._is_inside(entry)
        self._before.setdefault(token, inside)
        del self._entries[token]
        if not inside:
            self._outside.remove(entry)
            return
        self._inside.remove(entry)
        if self._outside:
            following = self._outside.first()
            self._outside.remove(following)
            self._inside.add(following)
            self._before.setdefault(following[-1], False)

    def settle(self) -> tuple[list[T], list[T]]:
        """Since the last call: who came inside, and who went out or away."""
        came: list[T] = []
        went: list[T] = []
        for token, was_inside in self._before.items():
            if was_inside is not (token in self):
                (went if was_inside else came).append(token)
        self._before.clear()
        return came, went

    def ordered(self, tokens: Iterable[T]) -> list[T]:
        """These tokens in the order of their entries."""
        return sorted(tokens, key=self._entries.__getitem__)

    def _is_inside(self, entry: Entry) -> bool:
        return not self._outside or bool(entry < self._outside.first())
