"""How the runs of one feed hang together: strands of blocks, and which blocks lie on the way to a tip.

    strand 0   0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5          pieces: runs of several files, end to end
                        \\
    strand 1             3'─ 4'─ 5'            begins inside strand 0

A tip names a block by length and link: that is an entry of a timeframe. The way to it is, in each strand on it, a first
part of that strand. So the blocks between two timeframes are, in each strand, one stretch: what a stream reads next.
How blocks are cut into runs and files makes no difference to tips, so compaction does not disturb a stream.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TIP_LINK_BYTES = 8
"""How much of a link a tip carries: it tells the branches of one feed apart, and a lake from another one."""


class Run(NamedTuple):
    """Consecutive blocks `start` to `end - 1`, the first of which follows `previous`."""

    start: int
    end: int
    previous: bytes
    last_link: bytes


class Tip(NamedTuple):
    """The end of a branch: how many blocks it has, and how the link of the last one begins."""

    length: int
    link: bytes


class Piece(NamedTuple):
    """A part of a strand that lies together; `where` is for whoever reads it."""

    run: Run
    where: Any
    cut: int = 0
    """Blocks before `run.start` that lie there too, and belong to the piece before."""


ReadLink = Callable[[Piece, int], bytes | None]
"""(piece, seq) -> the link of that block, read from where the blocks are. Asked only where branches meet."""


@dataclass(slots=True)
class Strand:
    """Pieces of one branch, end to end."""

    parent: int | None
    """The strand with the block before the first, when that is here."""
    pieces: list[Piece] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.pieces[0].run.start

    @property
    def end(self) -> int:
        return self.pieces[-1].run.end

    @property
    def last_link(self) -> bytes:
        return self.pieces[-1].run.last_link

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.starts.append(piece.run.start)

    def piece_at(self, seq: int) -> Piece:
        return self.pieces[bisect_right(self.starts, seq) - 1]


class Strands:
    """The strands of one feed. Runs are added in any order that puts a run behind the one that it follows."""

    def __init__(self, read_link: ReadLink) -> None:
        self._read_link = read_link
        self.strands: list[Strand] = []

    def add(self, run: Run, where: Any) -> None:
        """Take a run. Blocks that are here already, which two publishers may cause, are passed over."""
        piece = Piece(run, where)
        # Each round passes over what one strand has of the run, so there are no more rounds than strands.
        while (common := self._furthest(piece)) > piece.run.start:
            if common == run.end:
                return
            before = self._link_in(piece, common - 1) or b""
            piece = Piece(run._replace(start=common, previous=before), where, common - run.start)
        for strand in self.strands:
            if strand.end == piece.run.start and strand.last_link == piece.run.previous:
                strand.add(piece)
                return
        self.strands.append(Strand(self._parent(piece.run)))
        self.strands[-1].add(piece)

    def link_at(self, index: int, seq: int) -> bytes | None:
        """The link of a block of a strand."""
        return self._link_in(self.strands[index].piece_at(seq), seq)

    def tips(self) -> list[Tip]:
        """The ends of all strands, in order."""
        return sorted({Tip(strand.end, strand.last_link[:TIP_LINK_BYTES]) for strand in self.strands})

    def reach(self, tips: Iterable[Tip]) -> list[int] | None:
        """For each strand, up to which seq it lies on the way to one of the tips. None when a tip is not here."""
        reach = [strand.start for strand in self.strands]
        for tip in tips:
            at = self._find(tip)
            if at is None:
                return None
            length = tip.length
            while at is not None and reach[at] < length:
                reach[at] = length
                length, at = self.strands[at].start, self.strands[at].parent
        return reach

    def tips_of(self, reach: list[int]) -> list[Tip]:
        """The tips that lead to these ends."""
        found = set()
        for index, end in enumerate(reach):
            if end > self.strands[index].start:
                found.add(Tip(end, (self.link_at(index, end - 1) or b"")[:TIP_LINK_BYTES]))
        return sorted(found)

    def _link_in(self, piece: Piece, seq: int) -> bytes | None:
        return piece.run.last_link if seq == piece.run.end - 1 else self._read_link(piece, seq)

    def _find(self, tip: Tip) -> int | None:
        """The strand with the block that a tip names; the ends are looked at first."""
        for index, strand in enumerate(self.strands):
            if strand.end == tip.length and strand.last_link.startswith(tip.link):
                return index
        for index, strand in enumerate(self.strands):
            if strand.start < tip.length < strand.end and (self.link_at(index, tip.length - 1) or b"").startswith(
                tip.link
            ):
                return index
        return None

    def _parent(self, run: Run) -> int | None:
        for index, strand in enumerate(self.strands):
            if strand.start < run.start <= strand.end and self.link_at(index, run.start - 1) == run.previous:
                return index
        return None

    def _furthest(self, piece: Piece) -> int:
        """Up to which seq the blocks of a run are in one strand already; its start when none are."""
        start = piece.run.start
        overlapped = [index for index, strand in enumerate(self.strands) if strand.start <= start < strand.end]
        return max((self._common(index, piece) for index in overlapped), default=start)

    def _common(self, index: int, piece: Piece) -> int:
        """Up to which seq a run agrees with a strand that it overlaps; its start when not at all."""
        low, high = piece.run.start, min(self.strands[index].end, piece.run.end)
        if self.link_at(index, high - 1) == self._link_in(piece, high - 1):
            return high
        # Links are chained: they agree up to the fork and never again.
        while low < high:
            middle = (low + high) // 2
            same = self.link_at(index, middle) == self._link_in(piece, middle)
            low, high = (middle + 1, high) if same else (low, middle)
        return low
