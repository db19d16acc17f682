"""Whether the positions of an operation are those of an honest edit (L5 of `_shared_sequence`).

    certain   all of them are within the room that the version in which it was made has at least (`_room`)
    try out   otherwise it is made on a document of that version (`_shadows`)

Both say the same of an operation for which both can be asked, so it does not matter who asks what.
"""

from collections.abc import Mapping

from echostore.kernel.models._introductions import Introductions
from echostore.kernel.models._loro import LoroDocument
from echostore.kernel.models._room import fits, gain
from echostore.kernel.models._shadows import Shadows
from echostore.kernel.models.change_graph import Change, ChangeGraph, Delete, Mark, atom_count


class Positions:
    """What is known about positions in one item. `root` is that of its text; empty for other models."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._shadows = Shadows(root)
        self._surplus = 0  # by how much a version had more places than its room
        self._surplus_ends: dict[
            int, int
        ] = {}  # that version; all that include it have as many more, or more than that
        self.first_marks: dict[int, int] = {}
        """writer -> the first atom with which it marked something."""

    def note(self, change: Change) -> None:
        """A change is in."""
        if self._root and change.writer not in self.first_marks and Mark in map(type, change.runs):
            counter = change.counter
            for run in change.runs:
                if isinstance(run, Mark):
                    self.first_marks[change.writer] = counter
                    return
                counter += atom_count(run)

    def take_back(self, ends: Mapping[int, int]) -> None:
        """What came in after the writers stood here is out again."""
        self._shadows.clear()
        self._surplus, self._surplus_ends = 0, {}
        self.first_marks = {writer: first for writer, first in self.first_marks.items() if first < ends.get(writer, 0)}

    def certain(self, introductions: Introductions, changes: ChangeGraph, pasts: list[dict[int, int]]) -> bool:
        """Whether all positions are right for sure."""
        first = changes[0]
        own = introductions.room({first.writer: first.counter} if first.counter else {})
        marks = bool(self.first_marks)
        for change, past in zip(changes, pasts, strict=True):
            marks = marks or Mark in map(type, change.runs)
            if marks and Delete in map(type, change.runs):
                return False
            others = introductions.room({other: end for other, end in past.items() if other != first.writer})
            if own is None or others is None or not fits(change, own + others + self._surplus_in(past, change)):
                return False
            own += gain(change.runs)
        return True

    def try_out(
        self,
        document: LoroDocument,
        introductions: Introductions,
        changes: ChangeGraph,
        pasts: list[dict[int, int]],
    ) -> None:
        """OperationRefused when the changes can't be made on what their writer had seen."""
        length = self._shadows.check(document, changes, pasts, self.first_marks)
        first = changes[0]
        ends = {**pasts[-1], first.writer: first.counter}
        room = introductions.room({writer: end for writer, end in ends.items() if end})
        if room is not None:
            surplus = length - room - sum(gain(change.runs) for change in changes)
            if surplus > self._surplus:
                self._surplus = surplus
                self._surplus_ends = {**ends, first.writer: changes[-1].counter_end}

    def _surplus_in(self, past: Mapping[int, int], change: Change) -> int:
        if not self._surplus:
            return 0
        covered = all(
            (change.counter if writer == change.writer else past.get(writer, 0)) >= end
            for writer, end in self._surplus_ends.items()
        )
        return self._surplus if covered else 0
