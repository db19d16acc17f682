"""From a view to what tasks read: stretches between two timeframes, the end of the next batch, filters on feeds and seq.

Pure but for links and heads, which a view reads where branches meet and where a batch has to end inside a run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from echostore.kernel.errors import Corrupt
from echostore.kernel.limits import APPEND_BLOCKS_MAX
from echostore.pipeline.lake.strands import Strands, Tip
from echostore.pipeline.source.timeframes import FeedPlace, Timeframe
from echostore.pipeline.source.views import Stretch, View, ViewedFeed

PARTITION_BLOCKS = 50_000
"""Blocks of one task: a few seconds of work, and enough tasks for many cores."""
PARTITION_STRETCHES = 4096
"""Stretches of one task: what one open row group after the other can serve."""


@dataclass(frozen=True, slots=True)
class SeqRange:
    """Blocks that are asked for, by seq."""

    start: int = 0
    end: int = 1 << 62


def newest(view: View) -> dict[FeedPlace, tuple[Tip, ...]]:
    """The timeframe of all there is."""
    return {place: tuple(feed.strands.tips()) for place, feed in view.feeds.items()}


def between(view: View, start: Timeframe, end: Timeframe, seqs: SeqRange = SeqRange()) -> Iterator[Stretch]:  # noqa: B008  # a frozen default never changes
    """The blocks that `end` has and `start` has not, control first."""
    for place, feed in _ordered(view):
        if start.get(place, ()) == end.get(place, ()):
            continue
        taken = _reach(place, feed.strands, start.get(place, ()))
        wanted = _reach(place, feed.strands, end.get(place, ()))
        for index, strand in enumerate(feed.strands.strands):
            low, high = max(taken[index], seqs.start), min(wanted[index], seqs.end)
            if low >= high:
                continue
            for piece in strand.pieces:
                first, last = max(low, piece.run.start), min(high, piece.run.end)
                if first < last:
                    yield from view.cut(place, piece, first, last, PARTITION_BLOCKS)
    missing = [place for place in end if place not in view.feeds]
    if missing:
        raise _not_here(missing[0])


def partitions(stretches: Iterable[Stretch]) -> Iterator[list[Stretch]]:
    """Stretches put together for tasks: small ones share one."""
    group: list[Stretch] = []
    size = 0
    for stretch in stretches:
        if group and (size + stretch.blocks > PARTITION_BLOCKS or len(group) >= PARTITION_STRETCHES):
            yield group
            group, size = [], 0
        group.append(stretch)
        size += stretch.blocks
    if group:
        yield group


def advance(view: View, start: Timeframe, blocks_max: int) -> dict[FeedPlace, tuple[Tip, ...]]:
    """The end of a batch of about `blocks_max` blocks after `start`.

    Control feeds go first, because data depends on them; then every feed gets its share, so that a long one holds up no
    other. A feed is cut behind a head: what no signature covers could not be used. So a batch may be larger than asked
    for by one append, when nothing less ends at a head.
    """
    missing = [place for place in start if place not in view.feeds]
    if missing:
        raise _not_here(missing[0])
    end = {place: tips for place, tips in start.items() if tips}
    left = blocks_max
    for control in (True, False):
        waiting: dict[FeedPlace, tuple[ViewedFeed, list[int]]] = {}
        for place, feed in _ordered(view):
            if feed.control == control and start.get(place, ()) != tuple(feed.strands.tips()):
                waiting[place] = feed, _reach(place, feed.strands, start.get(place, ()))
        shares = _shares({place: _new(feed, reach) for place, (feed, reach) in waiting.items()}, left)
        for place, (feed, reach) in waiting.items():
            taken = _take(view, place, feed, reach, shares[place])
            if taken:
                left -= taken
                end[place] = tuple(feed.strands.tips_of(reach))
    if left == blocks_max:
        _one_append(view, start, end)
    return end


def _take(view: View, place: FeedPlace, feed: ViewedFeed, reach: list[int], share: int) -> int:
    """Move the ends of a feed's strands by at most `share` blocks, to heads; returns by how many."""
    left = share
    for index, strand in enumerate(feed.strands.strands):
        if strand.parent is not None and reach[strand.parent] < strand.start:
            continue
        wanted = min(strand.end, reach[index] + left)
        if wanted < strand.end and wanted > reach[index]:
            wanted = _head_before(view, place, feed.strands, index, reach[index], wanted)
        left -= wanted - reach[index]
        reach[index] = wanted
    return share - left


def _head_before(view: View, place: FeedPlace, strands: Strands, index: int, start: int, end: int) -> int:
    """The last end of a head up to `end`; `start` when there is none."""
    strand = strands.strands[index]
    while end > start:
        piece = strand.piece_at(end - 1)
        low = max(start, piece.run.start, end - APPEND_BLOCKS_MAX)
        found = view.heads(place, piece, low, end)
        if found:
            return found[-1]
        end = low
    return start


def _one_append(view: View, start: Timeframe, end: dict[FeedPlace, tuple[Tip, ...]]) -> None:
    """The first append there is, when the limit is smaller than each: a stream has to go on."""
    for place, feed in _ordered(view):
        if start.get(place, ()) == tuple(feed.strands.tips()):
            continue
        reach = _reach(place, feed.strands, start.get(place, ()))
        for index, strand in enumerate(feed.strands.strands):
            if reach[index] < strand.end:
                piece = strand.piece_at(reach[index])
                found = view.heads(place, piece, reach[index], min(piece.run.end, reach[index] + APPEND_BLOCKS_MAX))
                reach[index] = found[0] if found else piece.run.end
                end[place] = tuple(feed.strands.tips_of(reach))
                return


def _shares(new: Mapping[FeedPlace, int], blocks_max: int) -> dict[FeedPlace, int]:
    """Who gets how many blocks: the small ones all they have, the others the same."""
    shares: dict[FeedPlace, int] = {}
    left = max(0, blocks_max)
    for number, (place, count) in enumerate(sorted(new.items(), key=lambda each: (each[1], each[0]))):
        shares[place] = min(count, left // (len(new) - number))
        left -= shares[place]
    return shares


def _new(feed: ViewedFeed, reach: list[int]) -> int:
    return sum(strand.end - end for strand, end in zip(feed.strands.strands, reach, strict=True))


def _reach(place: FeedPlace, strands: Strands, tips: Iterable[Tip]) -> list[int]:
    reach = strands.reach(tips)
    if reach is None:
        raise _not_here(place)
    return reach


def _ordered(view: View) -> list[tuple[FeedPlace, ViewedFeed]]:
    return sorted(view.feeds.items(), key=lambda each: (not each[1].control, each[0]))


def _not_here(place: FeedPlace) -> Corrupt:
    return Corrupt(
        f"The stream has read blocks of feed {place[1].hex()} of party {place[0].hex()} that are not here.",
        next_step="This is another lake or home than the checkpoint belongs to, or it lost blocks; begin with a new "
        "checkpoint, or restore it.",
    )
