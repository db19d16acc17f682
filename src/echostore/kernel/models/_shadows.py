"""Shadows: a text or a list as one writer saw it, to try an operation on that may lie about positions.

The library goes by positions and believes them. A lie that it would notice alone may pass beside other operations that
make up for it. And where a text has marks, their ends stand between the characters, and a lying delete can hit one of
them, which no honest edit does: the library then fails in some orders of arrival and not in others. So an operation
that is not plainly within its room is made once more, run by run, on a document that holds exactly what its writer had
seen. In a text with marks deletes are made by where their atoms are, and have to come out as the operation says.

A writer's view only grows, so its shadow follows at the cost of what is new.
"""

from collections.abc import Mapping

from echostore.kernel.errors import EchoError
from echostore.kernel.models._loro import LoroDocument
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import Atom, Change, ChangeGraph, Delete, Mark, atom_count
from echostore.kernel.reasons import Reason

SHADOWS_MAX = 8
"""Writers whose shadow is kept: each is as large as the document. Another one costs a copy when it is needed again."""


class Shadows:
    """The shadows of one item. `root` is that of its text, if it is one."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._kept: dict[int, LoroDocument] = {}  # the one used last stands last

    def clear(self) -> None:
        self._kept.clear()

    def check(
        self, document: LoroDocument, changes: ChangeGraph, pasts: list[dict[int, int]], first_marks: Mapping[int, int]
    ) -> int:
        """Make the changes of one writer on its shadow, each on its past (ends of all writers, all in `document` or
        among the changes before); OperationRefused when one can't be made, or a delete does not come out as it says.
        Returns how many places there are then, at least: ends of marks are not counted."""
        writer, start = changes[0].writer, changes[0].counter
        shadow = self._at(document, writer, {**pasts[0], writer: start})
        marked = writer in first_marks
        try:
            for change, past in zip(changes, pasts, strict=True):
                _advance(shadow, document, {**past, writer: change.counter})
                marked = (
                    marked
                    or Mark in map(type, change.runs)
                    or any(past.get(other, 0) > first for other, first in first_marks.items())
                )
                self._make(shadow, change, marked)
        except EchoError:  # the shadow is lost with it
            raise OperationRefused(Reason.MALFORMED, "edits that can't be made on what their writer had seen") from None
        self._kept[writer] = shadow  # only now: after a refusal it has what its writer's text never had
        if len(self._kept) > SHADOWS_MAX:
            del self._kept[next(iter(self._kept))]
        return shadow.visible_length()

    def _at(self, document: LoroDocument, writer: int, ends: Mapping[int, int]) -> LoroDocument:
        shadow = self._kept.pop(writer, None)
        if shadow is None or any(end > ends.get(other, 0) for other, end in shadow.ends().items()):
            shadow = document.at(document.version_of_ends(dict(ends)))
            shadow.write_as(writer)
        return shadow

    def _make(self, shadow: LoroDocument, change: Change, marked: bool) -> None:
        after_own, dependencies = change.after_own, change.dependencies
        counter = change.counter
        for run in change.runs:
            if marked and isinstance(run, Delete):
                self._delete(shadow, run, (change.writer, counter))
            else:
                shadow.import_changes([Change(change.writer, counter, after_own, dependencies, (run,))])
            after_own, dependencies = True, ()
            counter += atom_count(run)

    def _delete(self, shadow: LoroDocument, run: Delete, made: Atom) -> None:
        size = abs(run.length)
        place = shadow.atom_position(self._root, (run.writer, run.counter))
        if run.length > 0:
            for part in shadow.parts(run):  # at once the library would begin with the last of them
                shadow.delete_text(self._root, place, part.length)
        else:
            for offset in range(size - 1, -1, -1):
                shadow.delete_text(self._root, place + offset, 1)
        shadow.commit()
        found = shadow.export_changes(*made, made[1] + size)
        if len(found) != 1 or found[0].runs != (run,):
            raise OperationRefused(Reason.MALFORMED, "a delete of what does not stand at its position")


def _advance(shadow: LoroDocument, document: LoroDocument, ends: Mapping[int, int]) -> None:
    known = shadow.ends()
    news = [
        change
        for writer, end in ends.items()
        if end > known.get(writer, 0)
        for change in document.export_changes(writer, known.get(writer, 0), end)
    ]
    if news:
        shadow.import_changes(news)
