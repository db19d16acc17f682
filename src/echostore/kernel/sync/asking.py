"""The half of a session that asks: which feed next, how much at once, and what to do when nothing comes.

A feed that wants a range waits in one of four queues, control before limbo before data before data that is over its
quota. A request reserves its bytes from one credit until the store has taken what it brought.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from echostore.kernel.ids import FeedKey
from echostore.kernel.limits import APPEND_BLOCKS_MAX
from echostore.kernel.order import CONTROL
from echostore.kernel.sync.events import Ingest
from echostore.kernel.sync.frames import Blocks, Request
from echostore.kernel.sync.plan import Standing, Track

REQUESTS_MAX = 64
"""Open requests: enough to fill a long link with small feeds."""

CREDIT_BYTES = 4 * 1024 * 1024
"""Bytes asked for and not stored yet, per session: what a link of 1 Gbit/s carries in 30 ms."""

REQUEST_BYTES_MAX = 2 * 1024 * 1024
"""Half of the credit: two long feeds share a link, and one waits seldom for a round trip."""
REQUEST_BYTES_MIN = 16 * 1024
BLOCK_BYTES_GUESS = 1024
"""A request reserves by the blocks it lacks times this, so that a thousand short feeds are fetched side by side."""

REQUEST_BLOCKS_MAX = 16 * APPEND_BLOCKS_MAX

LIMBO_FEEDS_MAX = 64
LIMBO_RANGE_BYTES = 16 * 1024
"""Together 1 MiB of blocks of feeds that nobody admitted yet."""

REQUEST_TIMEOUT_S = 2.0
REST_S = 1.0
RETRY_MAX_S = 8.0
"""A request waits and a busy feed rests for the first values, doubled for each failure up to this one."""

CONTROL_PATIENCE_S = 3.0
"""Data waits for control this long without any progress: a control feed that can't be had must not stop the party."""


@dataclass(slots=True)
class Open:
    """A request in flight. `start` is the next expected block; ranges that came too soon wait in `early`."""

    track: Track
    start: int
    bytes_left: int
    deadline: float
    early: dict[int, Blocks] = field(default_factory=dict)

    @property
    def early_bytes(self) -> int:
        return sum(blocks.size_bytes for blocks in self.early.values())


class Asking:
    """Queues, open requests and credit. Dicts serve as ordered sets: feeds are asked for in that order."""

    def __init__(self, last: Callable[[FeedKey], bool] = lambda feed: False) -> None:
        self._last = last
        self._control: dict[FeedKey, Track] = {}
        self._limbo: dict[FeedKey, Track] = {}
        self._data: dict[FeedKey, Track] = {}
        self._over: dict[FeedKey, Track] = {}
        self._resting: dict[FeedKey, tuple[float, Track]] = {}
        self._open: dict[FeedKey, Open] = {}
        self._storable: dict[FeedKey, Track] = {}
        self._buffered_bytes = 0
        self._in_limbo: dict[FeedKey, None] = {}
        self._control_behind: dict[FeedKey, None] = {}
        self._control_moved = 0.0
        self._number = 0
        self.asked_bytes = 0

    # What others read

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def bytes_in_flight(self) -> int:
        return self._buffered_bytes + sum(each.bytes_left for each in self._open.values())

    def due(self, now: float) -> Iterator[float]:
        for open_ in self._open.values():
            yield open_.deadline
        for until, _ in self._resting.values():
            yield until
        patience_end = self._control_moved + CONTROL_PATIENCE_S
        if (self._data or self._over) and self._control_behind and patience_end > now:
            yield patience_end

    # Which feeds want something

    def place(self, track: Track, now: float) -> None:
        """Put a feed where its state says it belongs. Called after every change of a track."""
        feed, goal = track.feed, track.goal
        known = track.standing is Standing.KNOWN
        if not (known and track.kind == CONTROL and goal is not None and goal.probe is None):
            self._control_behind.pop(feed, None)
        elif feed not in self._control_behind:
            if not self._control_behind:
                self._control_moved = now
            self._control_behind[feed] = None
        if track.standing is not Standing.HEARD:
            self._in_limbo.pop(feed, None)
        wants = track.next_start() is not None and feed not in self._open and feed not in self._resting
        home = self._limbo if not known else self._control if track.kind == CONTROL else self._data
        if wants and home is self._data and self._last(feed):
            home = self._over
        for queue in (self._control, self._limbo, self._data, self._over):
            if wants and queue is home:
                queue.setdefault(feed, track)
            else:
                queue.pop(feed, None)

    def rest(self, track: Track, now: float) -> None:
        """Leave a feed alone for a while: the other side or our store is busy."""
        self._resting[track.feed] = (now + _backoff_s(REST_S, track), track)
        track.attempts += 1

    def control_moved(self, now: float) -> None:
        self._control_moved = now

    def expire(self, now: float) -> None:
        """End the requests and the rests whose time is over."""
        for open_ in [each for each in self._open.values() if each.deadline <= now]:
            self.end(open_.track)
            open_.track.attempts += 1
            self.place(open_.track, now)
        for track in [track for until, track in self._resting.values() if until <= now]:
            del self._resting[track.feed]
            self.place(track, now)

    def hurry(self, now: float) -> None:
        """The other side is heard again after a silence: what was asked during it is asked anew soon."""
        for open_ in self._open.values():
            open_.track.attempts = 0
            open_.deadline = min(open_.deadline, now + REQUEST_TIMEOUT_S)
        for feed, (_, track) in list(self._resting.items()):
            track.attempts = 0
            self._resting[feed] = (now, track)

    # Requests

    def requests(self, now: float) -> Iterator[Request]:
        """Open as many requests as credit allows: control first, and data only when control is not behind."""
        patient = bool(self._control_behind) and now < self._control_moved + CONTROL_PATIENCE_S
        while self._over and not self._last(feed := next(iter(self._over))):
            self._data[feed] = self._over.pop(feed)  # its quota has come back
        first = (self._control, self._limbo)
        for queue in first if patient else (*first, self._data, self._over):
            while queue and len(self._open) < REQUESTS_MAX:
                if queue is self._limbo and len(self._in_limbo) >= LIMBO_FEEDS_MAX:
                    break
                request = self._request(next(iter(queue.values())), now)
                if request is None:
                    return
                del queue[request.feed]
                yield request

    def _request(self, track: Track, now: float) -> Request | None:
        """The next request of a feed; None when credit does not allow one, and then no other feed goes before it."""
        start, goal = track.next_start(), track.goal
        assert start is not None, f"feed {track.feed.hex()[:16]} is queued and wants nothing"
        assert goal is not None, f"feed {track.feed.hex()[:16]} wants a range and has no goal"
        missing = goal.tip.length - start
        wish = min(max(missing * BLOCK_BYTES_GUESS, REQUEST_BYTES_MIN), REQUEST_BYTES_MAX)
        if track.standing is Standing.HEARD:
            wish = LIMBO_RANGE_BYTES
        in_flight = self.bytes_in_flight
        free = CREDIT_BYTES - in_flight
        if track.bytes_needed > wish:
            # A range that is larger than all credit goes alone.
            wish = track.bytes_needed
            if wish > free and in_flight:
                return None
        elif free < REQUEST_BYTES_MIN:
            return None
        else:
            wish = min(wish, free)
        if track.standing is Standing.HEARD:
            self._in_limbo[track.feed] = None
        self._number += 1
        self.asked_bytes += wish
        self._open[track.feed] = Open(track, start, wish, now + _backoff_s(REQUEST_TIMEOUT_S, track))
        return Request(self._number, track.feed, start, min(missing, REQUEST_BLOCKS_MAX), wish, goal.tip.link)

    def open_at(self, feed: FeedKey, start: int) -> bool:
        """Whether a request waits for exactly the block `start`."""
        open_ = self._open.get(feed)
        return open_ is not None and open_.start == start

    def end(self, track: Track) -> None:
        """The request of a feed, if there is one, is over."""
        self._open.pop(track.feed, None)

    # What arrives

    def take(self, blocks: Blocks, now: float) -> bool:
        """Take a range that an open request waits for; False for one that is late, repeated or too large."""
        open_ = self._open.get(blocks.feed)
        if open_ is None or blocks.start < open_.start or blocks.start in open_.early:
            return False
        if open_.early_bytes + blocks.size_bytes > open_.bytes_left or len(blocks.payloads) > APPEND_BLOCKS_MAX:
            return False  # perhaps the late answer to an earlier, larger request
        open_.early[blocks.start] = blocks
        while (following := open_.early.pop(open_.start, None)) is not None:
            self._arrived(open_, following, now)
        self.place(open_.track, now)
        return True

    def take_push(self, track: Track, blocks: Blocks) -> bool:
        """Take a range that nobody asked for and that is the very next of its feed; False when there is no room."""
        if track.feed in self._open or self.bytes_in_flight + blocks.size_bytes > CREDIT_BYTES:
            return False
        track.ready.append(blocks)
        self._storable[track.feed] = track
        self._buffered_bytes += blocks.size_bytes
        return True

    def _arrived(self, open_: Open, blocks: Blocks, now: float) -> None:
        """The next range in order: it goes to the store's queue."""
        track = open_.track
        open_.start = blocks.end
        open_.bytes_left -= blocks.size_bytes
        track.attempts = max(0, track.attempts - 1)
        track.bytes_needed = 0
        open_.deadline = now + _backoff_s(REQUEST_TIMEOUT_S, track)
        track.ready.append(blocks)
        self._storable[track.feed] = track
        self._buffered_bytes += blocks.size_bytes
        if not blocks.more:
            self.end(track)

    def ingests(self) -> Iterator[Ingest]:
        """Hand the store the next range of every feed of which it has none in hand."""
        for track in list(self._storable.values()):
            if track.ready and track.ingesting is None:
                blocks = track.ingesting = track.ready.popleft()
                limbo = track.standing is not Standing.KNOWN
                yield Ingest(track.feed, track.kind, blocks.start, blocks.payloads, blocks.head, limbo)
            if not track.ready:
                del self._storable[track.feed]

    def stored(self, track: Track) -> Blocks:
        """The store has answered for the range it was given."""
        blocks = track.ingesting
        assert blocks is not None, f"an answer for feed {track.feed.hex()[:16]}, of which nothing was handed in"
        track.ingesting = None
        self._buffered_bytes -= blocks.size_bytes
        return blocks

    def drop_arrivals(self, track: Track) -> None:
        """Forget what was asked for and what waits for the store: it follows on a range that was not taken."""
        self.end(track)
        self._buffered_bytes -= sum(blocks.size_bytes for blocks in track.ready)
        track.ready.clear()
        self._storable.pop(track.feed, None)


def _backoff_s(first_s: float, track: Track) -> float:
    return min(first_s * 2.0 ** min(track.attempts, 16), RETRY_MAX_S)
