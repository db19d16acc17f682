"""What each writer of a text or a list had seen when it made its last atom: from memory, where the newest is asked for.

Whatever is not remembered is asked from the library's graph by `_shared_sequence`.
"""

from echostore.kernel.models.change_graph import Atom, Change

VIEWS_MAX = 256
"""Writers whose view is remembered; a view is as large as the number of writers. The others are asked from loro."""


class WriterViews:
    """Views of one item: the ends of the others as a writer last saw them, and from which of its atoms on."""

    def __init__(self) -> None:
        self._views: dict[int, dict[int, int]] = {}
        self._starts: dict[int, int] = {}

    def clear(self) -> None:
        self._views.clear()

    def of(self, writer: int) -> dict[int, int] | None:
        return self._views.get(writer)

    def past(self, atom: Atom) -> dict[int, int] | None:
        """Ends of all writers as of an atom, itself included."""
        writer, counter = atom
        view = self._views.get(writer)
        if view is None or counter < self._starts[writer]:
            return None
        past = dict(view)
        past[writer] = counter + 1
        return past

    def remember(self, writer: int, view: dict[int, int], start: int) -> None:
        if len(self._views) >= VIEWS_MAX and writer not in self._views:
            self._views.clear()
        self._views[writer] = view
        self._starts[writer] = start

    def note(self, change: Change) -> None:
        """The change is in; its dependencies have been checked."""
        writer = change.writer
        if change.counter == 0 and not change.dependencies:
            self.remember(writer, {}, 0)
        elif change.dependencies:
            view = self._views.get(writer)
            if view is None and change.counter > 0:
                return  # not remembered: it will be asked from the graph when somebody needs it
            pasts = [self.past(atom) for atom in change.dependencies]
            if None in pasts:
                self._views.pop(writer, None)
                return
            merged = dict(view or {})
            for past in pasts:
                for other, end in (past or {}).items():
                    if other != writer and end > merged.get(other, 0):
                        merged[other] = end
            self.remember(writer, merged, change.counter)
