"""Holding: what of a feed's verified pieces a peer would hold, and where the feed forks. Used by `control` and `order`.

    pieces            0 ──── 40 ──── 90 ── 120          a piece follows the one that ends where it starts, at its link
                              ╲                         blocks are held up to the last signed head that they lead to
                               40'─── 52'      200 ──   what follows nothing: a gap, or a wrong link

    twigs             [0 ─ 40) ── [40 ─ 120)            named by their first piece; a dependency on a block is met when
                              ╲── [40' ─ 52')           its twig is processed that far

The bounds of one append (1,024 blocks, 16 MiB under one head) hold here as they do in a peer's FeedStore: what no peer
could have taken in is not held.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from echostore.kernel.ids import NO_LINK
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX
from echostore.kernel.reasons import Reason


class Stretch(NamedTuple):
    """A verified piece: the columns of `schemas.VERIFIED` that say how it hangs together."""

    piece: int
    start: int
    end: int
    limit: int | None
    previous: bytes
    last_link: bytes
    last_depth: int
    good_end: int
    fault: str | None
    size: int
    first_head: int | None
    first_head_bytes: int
    last_head: int | None
    tail_bytes: int
    bad_head: int | None
    first_depth: int | None
    first_deepest: int
    bad_seq: int | None
    bad_reason: str | None
    bad_late: bool | None

    @staticmethod
    def of(row: dict[str, Any]) -> "Stretch":
        return Stretch(*(row[_COLUMNS.get(name, name)] for name in Stretch._fields))

    @staticmethod
    def base(piece: int, length: int, link: bytes, depth: int) -> "Stretch":
        """What an earlier commit verified, as one piece: under heads from its beginning to its end."""
        return Stretch(
            piece=piece,
            start=0,
            end=length,
            limit=None,
            previous=NO_LINK,
            last_link=link,
            last_depth=depth,
            good_end=length,
            fault=None,
            size=0,
            first_head=0,
            first_head_bytes=0,
            last_head=length,
            tail_bytes=0,
            bad_head=None,
            first_depth=None,
            first_deepest=0,
            bad_seq=None,
            bad_reason=None,
            bad_late=None,
        )


_COLUMNS = {"size": "bytes"}


class Unheld(NamedTuple):
    start: int
    end: int
    reason: str
    detail: str


@dataclass(slots=True, eq=False)
class HeldPiece:
    """A piece that is held, at least in part. `end` is where what is held ends."""

    stretch: Stretch
    parent: "HeldPiece | None"
    end: int = 0
    twig: int = 0
    path: tuple[int, ...] = ()
    children: list["HeldPiece"] = field(default_factory=list)
    open_blocks: int = 0
    """Blocks before this piece that no head covers yet, and their bytes."""
    open_bytes: int = 0
    covered: bool = False

    @property
    def bad(self) -> tuple[int, str, bool] | None:
        """The first block that can't be delivered, whatever else is held; checks the depth of the first block too."""
        at = self.stretch
        found = None if at.bad_seq is None else (at.bad_seq, at.bad_reason or "", bool(at.bad_late))
        if at.first_depth is not None and (found is None or found[0] > at.start or found[2]):
            before = self.parent.stretch.last_depth if self.parent is not None else 0
            if at.first_depth != 1 + max(before, at.first_deepest):
                return at.start, Reason.LYING_DEPTH, True
        return found


@dataclass(slots=True)
class HeldFeed:
    """What is held of one feed, root first, and what is not."""

    pieces: list[HeldPiece] = field(default_factory=list)
    unheld: list[Unheld] = field(default_factory=list)

    @property
    def fork(self) -> int | None:
        """The earliest seq at which the feed forks."""
        twigs = {held.twig for held in self.pieces}
        starts = [held.stretch.start for held in self.pieces if held.twig == held.stretch.piece]
        return sorted(starts)[1] if len(twigs) > 1 else None

    def main(self) -> list[HeldPiece]:
        """The pieces of the branch that is processed: the longest one, of equal ones that with the lower links."""
        if not self.pieces:
            return []
        reach: dict[int, tuple[int, bytes]] = {}
        for held in reversed(self.pieces):
            best = min((reach[child.stretch.piece] for child in held.children), default=(-held.end, b""))
            reach[held.stretch.piece] = best[0], held.stretch.last_link
        roots = [held for held in self.pieces if held.parent is None]
        at: HeldPiece | None = min(roots, key=lambda held: reach[held.stretch.piece])
        path = []
        while at is not None:
            path.append(at)
            at = min(at.children, key=lambda held: reach[held.stretch.piece], default=None)
        return path


def hold(stretches: Iterable[Stretch]) -> HeldFeed:
    """Puts the pieces of one feed together."""
    ordered, spare = _distinct(stretches)
    reached = _reach(ordered)
    for held in reversed(reached):
        _cover(held)
    feed = HeldFeed([held for held in reached if held.end > held.stretch.start])
    for held in feed.pieces:
        held.children = [child for child in held.children if child.end > child.stretch.start]
    if any(held.stretch.limit is not None for held in feed.pieces):
        _limit(feed)
    _name(feed)
    _tell(ordered, reached, spare, feed)
    return feed


def _distinct(stretches: Iterable[Stretch]) -> tuple[list[Stretch], list[Stretch]]:
    """The pieces, ascending, each once; and damaged copies of pieces that are there without damage."""
    places: dict[tuple[int, int, bytes], dict[bytes, Stretch]] = {}
    for stretch in stretches:
        whole = stretch.good_end == stretch.end
        copies = places.setdefault((stretch.start, stretch.end, stretch.previous), {})
        name = stretch.last_link if whole else b""
        copies[name] = _better(copies[name], stretch) if name in copies else stretch
    kept, spare = [], []
    for copies in places.values():
        damaged = copies.pop(b"", None)
        if damaged is not None and not copies:
            kept.append(damaged)
        elif damaged is not None:
            spare.append(damaged)
        kept += copies.values()
    return sorted(kept, key=lambda stretch: (stretch.start, stretch.piece)), spare


def _better(one: Stretch, other: Stretch) -> Stretch:
    """Of two copies of the same blocks: all heads that either has. Of two damaged ones: the longer one."""
    if one.good_end != one.end:
        return max(one, other, key=lambda stretch: (stretch.last_head or 0, -stretch.piece))
    first = min(
        (at for at in (one, other) if at.first_head is not None), key=lambda at: at.first_head or 0, default=one
    )
    last = max(one, other, key=lambda at: at.last_head or 0)
    return min(one, other, key=lambda at: at.piece)._replace(
        first_head=first.first_head,
        first_head_bytes=first.first_head_bytes,
        last_head=last.last_head,
        tail_bytes=last.tail_bytes,
    )


def _reach(ordered: list[Stretch]) -> list[HeldPiece]:
    """The pieces that lead back to the feed's first block."""
    ends: dict[tuple[int, bytes], HeldPiece] = {}
    reached: list[HeldPiece] = []
    for stretch in ordered:
        parent = ends.get((stretch.start, stretch.previous))
        if parent is None and not (stretch.start == 0 and stretch.previous == NO_LINK):
            continue
        held = HeldPiece(stretch, parent)
        if parent is not None:
            parent.children.append(held)
            held.open_blocks, held.open_bytes = _open_after(parent)
        held.covered = _under_head(held)
        reached.append(held)
        if stretch.good_end == stretch.end:
            ends.setdefault((stretch.end, stretch.last_link), held)
    return reached


def _under_head(held: HeldPiece) -> bool:
    """Whether a peer that holds what is covered so far could take in the blocks up to the nearest head."""
    at = held.stretch
    if at.first_head is None:
        return False
    blocks = held.open_blocks + at.first_head - at.start
    return blocks <= APPEND_BLOCKS_MAX and held.open_bytes + at.first_head_bytes <= APPEND_BYTES_MAX


def _open_after(held: HeldPiece) -> tuple[int, int]:
    at = held.stretch
    if held.covered and at.last_head is not None:
        return at.end - at.last_head, at.tail_bytes
    return held.open_blocks + at.end - at.start, held.open_bytes + at.size


def _cover(held: HeldPiece) -> None:
    """Where what is held of a piece ends: at its last head, or at its end when something held follows."""
    at = held.stretch
    held.end = at.last_head if held.covered and at.last_head is not None else at.start
    if any(child.end > child.stretch.start for child in held.children):
        held.end = at.end


def _limit(feed: HeldFeed) -> None:
    """Forget what lies beyond the moment that is asked about."""
    kept = []
    for held in feed.pieces:
        limit = held.stretch.limit
        if limit is not None:
            held.end = min(held.end, limit)
        if held.end > held.stretch.start:
            kept.append(held)
    feed.pieces = kept
    for held in kept:
        held.children = [child for child in held.children if child.end > child.stretch.start]


def _name(feed: HeldFeed) -> None:
    for held in feed.pieces:
        parent = held.parent
        if parent is not None and len(parent.children) == 1:
            held.twig, held.path = parent.twig, parent.path
        else:
            held.twig = held.stretch.piece
            held.path = (*(parent.path if parent is not None else ()), held.twig)


def _tell(ordered: list[Stretch], reached: list[HeldPiece], spare: list[Stretch], feed: HeldFeed) -> None:
    """What is not held, and why."""
    for stretch in spare:
        reason, _, detail = (stretch.fault or "").partition(": ")
        feed.unheld.append(Unheld(stretch.good_end, stretch.end, reason, f"block {stretch.good_end}: {detail}"))
    linked = {id(held.stretch) for held in reached}
    length = max((held.end for held in feed.pieces), default=0)
    for held in reached:
        at = held.stretch
        if held.end < at.end and (at.limit is None or held.end < at.limit):
            feed.unheld.append(_why(held))
    for stretch in ordered:
        if id(stretch) in linked:
            continue
        if stretch.start > length:
            reason, detail = Reason.GAP, f"{length} blocks are held, and none at {stretch.start - 1}"
        else:
            reason, detail = Reason.BAD_LINK, f"it does not follow any block held at {stretch.start - 1}"
        feed.unheld.append(Unheld(stretch.start, stretch.end, reason, detail))
    feed.unheld.sort()


def _why(held: HeldPiece) -> Unheld:
    at = held.stretch
    start = held.end
    if at.fault is not None:
        reason, _, detail = at.fault.partition(": ")
        return Unheld(start, at.end, reason, f"block {at.good_end}: {detail}")
    if at.bad_head is not None and at.bad_head >= start:
        return Unheld(
            start, at.end, Reason.BAD_SIGNATURE, f"the head at {at.bad_head + 1} is not signed by the feed's key"
        )
    if at.first_head is not None and not held.covered:
        return Unheld(
            start, at.end, Reason.OVERSIZE, f"the head at {at.first_head} covers more than one append may hold"
        )
    return Unheld(start, at.end, Reason.BAD_SIGNATURE, "no signed head covers it")
