"""Which operation introduced which atoms: what the order of causes in a text or a list is judged by.

An operation may build only on atoms that an accepted operation *below* it in the canonical order introduced. A writer
that hides a cause (its message does not name the message that made the atoms it builds on) may stand anywhere in that
order, so what has arrived does not decide; the stamps do:

    bob   @4  makes atoms 0..5
    cat   @3  builds on bob's atom 5, and does not name bob's message       refused: at @3 there was no such atom
    dan   @9  builds on bob's atom 5, and does not name bob's message       accepted, wherever it arrives

If dan's operation comes first it is refused for now and its atom is *lacking*; when bob's comes, the item is
`overtaken` and has to be folded again. So every order of arrival ends where folding one by one in canonical order does.
An honest operation is above everything that it builds on, and never notices.

Of a stamp the depth is enough, beside the writer's feed: operations of one feed arrive in its order, and a message has
one depth. Nothing here is part of the state or of its address; it is kept beside the library's own form in the
ItemStore, and made again when the item is folded again.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise

import msgspec

from echostore.kernel.ids import Stamp
from echostore.kernel.models._room import gain
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import Atom, ChangeGraph
from echostore.kernel.models.ground import Ground
from echostore.kernel.reasons import Reason

_BASE_DEPTH = 0
"""Of what a state was restored with: messages have depth 1 and more, so it is below them all."""


class AtomMissing(OperationRefused):
    """An operation builds on an atom that nothing below it has introduced, as far as is known here."""

    def __init__(self, atom: Atom) -> None:
        super().__init__(Reason.BUILDS_ON_EXCLUDED, f"atom {atom[1]} of {atom[0]:016x} is missing")
        self.atom = atom


class IntroductionRows(msgspec.Struct, array_like=True):
    """The stored form. Ends, depths and rooms are differences to the row before."""

    writers: list[tuple[int, bytes, list[int], list[int], list[int]]]
    lacking: list[tuple[int, int, int, bytes]]


class _Writer:
    """What one writer introduced: `depths[n]` is that of the operation with the atoms below `ends[n]`, `rooms[n]` the
    room that all of these make together."""

    __slots__ = ("depths", "ends", "feed", "rooms")

    def __init__(self, feed: bytes) -> None:
        self.feed = feed
        self.ends = array("q")
        self.depths = array("Q")
        self.rooms = array("q")


class Introductions:
    """For each writer of one item, the depths at which its atoms came in."""

    def __init__(self) -> None:
        self._writers: dict[int, _Writer] = {}
        self._lacking: dict[int, set[tuple[int, int, bytes]]] = {}
        self.overtaken = False
        """Whether something came in that a refused operation above it lacked."""

    @classmethod
    def of_base(cls, changes: ChangeGraph, ground: Ground | None = None) -> "Introductions":
        """Of a state without stamps: all of it is below whatever follows. Whoever has seen one writer's part of a ground
        has seen all of it, so its room may count as that of any of them."""
        base = cls()
        if ground is not None:
            for number, writer in enumerate(sorted(ground.ends)):
                base._add(writer, ground.ends[writer], _BASE_DEPTH, b"", 0 if number else ground.room)
        for change in changes:
            base._add(change.writer, change.counter_end, _BASE_DEPTH, b"", gain(change.runs))
        return base

    def add(self, writer: int, end: int, stamp: Stamp, gained: int) -> None:
        """The operation at `stamp` has brought the writer's atoms up to `end`, and has gained so much room."""
        self._add(writer, end, stamp.depth, stamp.feed, gained)
        if self._lacking:
            for counter, depth, feed in self._lacking.get(writer, ()):
                if counter < end and (stamp.depth, stamp.feed) < (depth, feed):
                    self.overtaken = True

    def below(self, atom: Atom, stamp: Stamp) -> bool:
        """Whether an atom of the document was introduced below `stamp`. What this replica has sealed and not yet put
        into a message is: nobody else can know it."""
        writer = self._writers.get(atom[0])
        if writer is None:
            return True
        index = bisect_right(writer.ends, atom[1])
        if index == len(writer.ends):
            return True
        depth = writer.depths[index]
        return depth < stamp.depth or (depth == stamp.depth and writer.feed <= stamp.feed)

    def room(self, ends: Mapping[int, int]) -> int | None:
        """The room that the atoms below these ends make; None when one of them is not where an operation ended."""
        total = 0
        for number, end in ends.items():
            writer = self._writers.get(number)
            if writer is None:
                return None
            index = bisect_left(writer.ends, end)
            if index == len(writer.ends) or writer.ends[index] != end:
                return None
            total += writer.rooms[index]
        return total

    def lack(self, atom: Atom, stamp: Stamp) -> None:
        """The operation at `stamp` was refused since this atom is not there."""
        self._lacking.setdefault(atom[0], set()).add((atom[1], stamp.depth, stamp.feed))

    def take_back(self, ends: Mapping[int, int]) -> None:
        """Forget what came in after the writers stood here."""
        for number, writer in self._writers.items():
            while writer.ends and writer.ends[-1] > ends.get(number, 0):
                writer.ends.pop()
                writer.depths.pop()
                writer.rooms.pop()

    def rows(self) -> IntroductionRows:
        return IntroductionRows(
            [
                (
                    number,
                    writer.feed,
                    _differences(writer.ends),
                    _differences(writer.depths),
                    _differences(writer.rooms),
                )
                for number, writer in sorted(self._writers.items())
            ],
            sorted((number, *lacking) for number, entries in self._lacking.items() for lacking in entries),
        )

    @classmethod
    def from_rows(cls, rows: IntroductionRows) -> "Introductions":
        made = cls()
        for number, feed, ends, depths, rooms in rows.writers:
            writer = made._writers[number] = _Writer(feed)
            writer.ends.extend(accumulate(ends))
            writer.depths.extend(accumulate(depths))
            writer.rooms.extend(accumulate(rooms))
        for number, counter, depth, feed in rows.lacking:
            made._lacking.setdefault(number, set()).add((counter, depth, feed))
        return made

    def _add(self, number: int, end: int, depth: int, feed: bytes, gained: int) -> None:
        writer = self._writers.get(number)
        if writer is None:
            writer = self._writers[number] = _Writer(feed)
        elif not writer.feed:
            writer.feed = feed
        if not writer.ends or end > writer.ends[-1]:
            writer.rooms.append(gained + (writer.rooms[-1] if writer.rooms else 0))
            writer.ends.append(end)
            writer.depths.append(depth)


def _differences(numbers: "array[int]") -> list[int]:
    return [*numbers[:1], *(right - left for left, right in pairwise(numbers))]
