"""The half of a session that serves: the other side's requests, read range by range from our store.

A request is a wish in blocks and bytes. It is answered by as many ranges as fit, each of which ends at a head, so
that the other side can check and keep each one alone. A range that does not fit is refused with its size, and asked
for again by who has room for it: so neither side ever buffers more than it agreed to.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.limits import APPEND_BLOCKS_MAX
from echostore.kernel.sync.events import RangeMissing, RangeRead, Read
from echostore.kernel.sync.frames import Blocks, Refusal, RefusalReason, Request
from echostore.kernel.sync.plan import Track

SERVES_MAX = 64
"""Requests that wait or are being served: as many as an honest other side opens."""

READS_MAX = 4
"""Ranges read at once: what the transport has to take from us at the next turn."""

PUSH_BYTES_MAX = 16 * 1024
"""What is sent without having been asked for: what somebody types, not what a program writes in bulk."""

RANGE_BYTES = 256 * 1024
"""A range is about this large, so that the first blocks are applied while the next ones travel."""


@dataclass(slots=True)
class Serve:
    """One request on its way: the next range starts at `start` and the last one ends at `end` at the latest."""

    start: int
    end: int
    bytes_left: int
    toward: Link
    reading: int | None = None
    """The start of the range that the store is reading; that of an older request if it was replaced meanwhile."""
    asked: bool = True
    """Whether the other side waits for it; else it is news that is sent at once, in one range or not at all."""


class Serving:
    """All requests of the other side, at most one per feed: a newer one replaces an older one."""

    def __init__(self) -> None:
        self._serves: dict[FeedKey, Serve] = {}
        self._numbers: dict[FeedKey, int] = {}
        self.not_pushed: list[FeedKey] = []
        """News that did not fit: it has to be announced."""

    def asked(self, request: Request, track: Track | None) -> Refusal | None:
        """Take a request; a refusal if nothing comes of it."""
        if request.number <= self._numbers.get(request.feed, -1):
            return None  # the link repeated it
        end = _end(track, request) if track else 0
        if request.start >= end:
            return Refusal(request.feed, request.start, RefusalReason.UNKNOWN_FEED)
        older = self._serves.get(request.feed)
        if older is None and len(self._serves) >= SERVES_MAX:
            return Refusal(request.feed, request.start, RefusalReason.BUSY)
        self._numbers[request.feed] = request.number
        reading = older.reading if older else None
        self._serves[request.feed] = Serve(request.start, end, request.bytes_max, request.toward, reading)
        return None

    def push(self, track: Track, start: int) -> bool:
        """Send our newest blocks from `start` on to a side that has all before them; False when it is busy with others."""
        if track.feed in self._serves or len(self._serves) >= SERVES_MAX:
            return False
        self._serves[track.feed] = Serve(start, track.held.length, PUSH_BYTES_MAX, track.held.link, asked=False)
        return True

    def free(self, track: Track, written: Blocks) -> bool:
        """Whether a range at hand may go out at once: it is small, and nothing of its feed is on its way."""
        return track.feed not in self._serves and written.size_bytes <= PUSH_BYTES_MAX

    def reads(self) -> Iterator[Read]:
        """Start as many reads as are allowed, in the order of the requests."""
        reading = sum(serve.reading is not None for serve in self._serves.values())
        for feed, serve in self._serves.items():
            if reading >= READS_MAX:
                return
            if serve.reading is None:
                reading += 1
                serve.reading = serve.start
                blocks_max = min(serve.end - serve.start, APPEND_BLOCKS_MAX)
                yield Read(feed, serve.start, blocks_max, min(serve.bytes_left, RANGE_BYTES), serve.toward)

    def answered(self, answer: RangeRead | RangeMissing) -> Blocks | Refusal | None:
        """The store has read a range, or has none: what the other side is told."""
        serve = self._serves.get(answer.feed)
        if serve is None:
            return None
        serve.reading = None
        if serve.start != answer.start:
            return None  # the request was replaced while the store read
        if not serve.asked:
            return self._pushed(serve, answer)
        if isinstance(answer, RangeMissing):
            del self._serves[answer.feed]
            return Refusal(answer.feed, answer.start, answer.reason, evidence=answer.evidence)
        size = sum(map(len, answer.payloads))
        if size > serve.bytes_left:
            del self._serves[answer.feed]
            return Refusal(answer.feed, answer.start, RefusalReason.OVERSIZE, size)
        serve.start += len(answer.payloads)
        serve.bytes_left -= size
        more = serve.start < serve.end and serve.bytes_left > 0
        # To the end of the queue, so that a long feed does not hold up short ones.
        del self._serves[answer.feed]
        if more:
            self._serves[answer.feed] = serve
        return Blocks(answer.feed, answer.start, answer.payloads, answer.head, more)

    def _pushed(self, serve: Serve, answer: RangeRead | RangeMissing) -> Blocks | None:
        del self._serves[answer.feed]
        if isinstance(answer, RangeMissing) or not _whole(serve, answer):
            self.not_pushed.append(answer.feed)
            return None
        return Blocks(answer.feed, answer.start, answer.payloads, answer.head, more=False)


def _whole(serve: Serve, answer: RangeRead) -> bool:
    return answer.head.length >= serve.end and sum(map(len, answer.payloads)) <= serve.bytes_left


def _end(track: Track, request: Request) -> int:
    """Where the request ends at the latest: at its own limit or at the end of the branch it asks for."""
    tip = track.branches.get(request.toward, track.held)
    return min(request.start + request.blocks_max, tip.length)
