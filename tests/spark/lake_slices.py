"""A lake published again, slice by slice: the same blocks in random pieces and in a random order, as replication brings them.

    slices = Slices(lake, folder / "again", seed=3)
    while slices.publish(): ...                       # each call is one version of the second lake

A piece may come before the one that it follows, so that there are gaps for a while; control and data come in any order.
"""

import shutil
from pathlib import Path
from random import Random

from echostore.pipeline.lake import Lake, LakeWriter
from echostore.pipeline.lake.layout import BASES_FOLDER
from echostore.pipeline.source.views import Chosen, LakeView, Stretch

Piece = tuple[bytes, bool, bytes, int, Stretch]
"""Party, is data, feed, start, and what to read: they sort as a lake's rows do."""


class Slices:
    def __init__(self, source: Lake, target: Path, *, seed: int, slices: int = 5, disorder: float = 0.3) -> None:
        """With no disorder, control comes first and every feed grows evenly."""
        self.lake = Lake.create(target)
        if (source.path / BASES_FOLDER).is_dir():
            shutil.copytree(source.path / BASES_FOLDER, target / BASES_FOLDER)
        self._left: list[list[Piece]] = [[] for _ in range(slices)]
        chance = Random(seed)
        view = LakeView(str(source.path), Chosen())
        for place, feed in sorted(view.feeds.items()):
            for strand in feed.strands.strands:
                length = strand.end - strand.start
                if disorder:
                    cuts = sorted(chance.randrange(strand.start, strand.end + 1) for _ in range(slices - 1))
                else:
                    cuts = [
                        strand.end if feed.control else strand.start + length * n // slices for n in range(1, slices)
                    ]
                for number, (start, end) in enumerate(zip([strand.start, *cuts], [*cuts, strand.end], strict=True)):
                    late = chance.random() < disorder
                    turn = chance.randrange(number, slices) if late else number
                    for piece in strand.pieces:
                        first, last = max(start, piece.run.start), min(end, piece.run.end)
                        if first < last:
                            self._left[turn] += [
                                (place[0], not feed.control, place[1], first, stretch)
                                for stretch in view.cut(place, piece, first, last, 1 << 30)
                            ]

    def hold_back(self, party: bytes) -> "Slices":
        """Take the first data blocks of a party out, as slices of their own for later."""
        firsts = {
            piece[2]: piece for pieces in reversed(self._left) for piece in pieces if piece[0] == party and piece[1]
        }
        feed = min(firsts)
        late = Slices.__new__(Slices)
        late.lake = self.lake
        late._left = [[firsts[feed]]]
        self._left = [[piece for piece in pieces if piece is not firsts[feed]] for pieces in self._left]
        return late

    def publish(self) -> bool:
        """Publish the next slice; whether there was one."""
        while self._left:
            pieces = sorted(self._left.pop(0), key=lambda piece: piece[:4])
            if pieces:
                LakeWriter(self.lake).write(batch for piece in pieces for batch in piece[4].read())
                return True
        return False
