"""The half of a session that tells: the Hello, announcements of our tips, and acks of theirs.

Nothing is told once only. A Hello is repeated until the other side answers; a tip until an ack says that it was heard
and that as much is held; an ack is provoked by the repeated announcement. Repetitions double their distance.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from echostore.kernel.ids import NO_LINK, FeedKey, Link
from echostore.kernel.sync.frames import (
    ACKS_PER_FRAME_MAX,
    FORK_PROOFS_MAX,
    PROTOCOL_VERSION,
    TIPS_PER_FRAME_MAX,
    Ack,
    AckEntry,
    Announce,
    FeedTip,
    Frame,
    Hello,
)
from echostore.kernel.sync.plan import Track

HELLO_RETRY_S = 1.0
ANNOUNCE_RETRY_S = 1.0
RETRY_MAX_S = 8.0
"""Repetitions start at the first values and double up to this one: a link that works again is noticed within it."""

ACK_DELAY_S = 0.05
"""Acks are gathered this long after the previous one; the first leaves at once, and so does that of news."""


@dataclass(slots=True)
class Told:
    """A tip that the other side was told and has not confirmed; told again at `due`."""

    tip: FeedTip
    due: float
    retry_s: float = ANNOUNCE_RETRY_S


class Telling:
    """What the other side still has to hear. `greeted`: we heard its Hello; `answered`: it heard ours."""

    def __init__(self) -> None:
        self.greeted = False
        self.answered = False
        self.fork_proofs: tuple[bytes, ...] = ()
        self._hello_due = 0.0
        self._hello_retry_s = HELLO_RETRY_S
        self._fresh: dict[tuple[FeedKey, Link], FeedTip] = {}
        self._unconfirmed: dict[tuple[FeedKey, Link], Told] = {}
        self._repeats: list[tuple[float, tuple[FeedKey, Link]]] = []
        """A heap of when to repeat what; an entry whose time is not that of its `Told` is void."""
        self._confirmed: dict[tuple[FeedKey, Link], Link] = {}
        self._acks: dict[tuple[FeedKey, Link], None] = {}
        self._ack_at_once = False
        self._ack_due = 0.0

    def start(self, now: float, fork_proofs: tuple[bytes, ...]) -> None:
        self.fork_proofs = fork_proofs[:FORK_PROOFS_MAX]
        self._hello_due = self._ack_due = now

    # What there is to tell

    def tell(self, feed: FeedTip) -> None:
        """Announce a tip, unless that was done or it was confirmed. It replaces an older tip of the same branch."""
        key = _key(feed)
        told = self._unconfirmed.get(key)
        if (told is None or told.tip != feed) and self._confirmed.get(key) != feed.tip.link:
            self._fresh[key] = feed

    def expect(self, feed: FeedTip, now: float) -> None:
        """A tip goes out with its blocks: it is announced only if no ack comes."""
        self._fresh.pop(_key(feed), None)
        self._wait_for(_key(feed), Told(feed, now + ANNOUNCE_RETRY_S))

    def tell_again(self, feed: FeedTip) -> None:
        """Announce a tip although it was confirmed: the other side's branch turned out to be another one."""
        self._confirmed.pop(_key(feed), None)
        self._fresh[_key(feed)] = feed

    def acknowledge(self, feed: FeedKey, heard: Link) -> None:
        """Let the other side know how far we are in a feed, and that we heard this tip."""
        self._acks[feed, heard] = None

    def answer_at_once(self) -> None:
        """Let the next ack wait for nothing: to show that a Hello was heard, by an empty one if need be, or that news
        is held, for which somebody may wait."""
        self._ack_at_once = True

    def take_ack(self, entries: Iterable[AckEntry]) -> None:
        for entry in entries:
            for key in ((entry.feed, NO_LINK), (entry.feed, entry.heard)):
                told = self._unconfirmed.get(key)
                if told is None or told.tip.tip.link != entry.heard:
                    continue
                # A branch may be longer than the one they use, so that `held` says nothing about it.
                if told.tip.branch or entry.held >= told.tip.tip.length:
                    del self._unconfirmed[key]
                    self._confirmed[key] = entry.heard

    def hurry(self, now: float) -> None:
        """The other side is heard again after a silence: say at once what it may have missed."""
        for key, told in list(self._unconfirmed.items()):
            self._wait_for(key, Told(told.tip, now))

    # When and as what

    def due(self, *, writable: bool) -> Iterator[float]:
        if not self.answered:
            yield self._hello_due
        if self.greeted and writable:
            if self._next_repeat() is not None:
                yield self._repeats[0][0]
            if self._acks:
                yield self._ack_due

    def hello(self, tracks: Mapping[FeedKey, Track], now: float) -> Iterator[Frame]:
        """The Hello with as many tips as it may hold; the others are announced."""
        if self.answered or now < self._hello_due:
            return
        self._hello_due = now + self._hello_retry_s
        self._hello_retry_s = min(2 * self._hello_retry_s, RETRY_MAX_S)
        tips: list[FeedTip] = []
        for track in tracks.values():
            if track.held.length and len(tips) < TIPS_PER_FRAME_MAX:
                tip = track.as_tip()
                tips.append(tip)
                self._fresh.pop(_key(tip), None)
                self._wait_for(_key(tip), Told(tip, now + ANNOUNCE_RETRY_S))
        yield Hello(PROTOCOL_VERSION, tuple(tips), self.fork_proofs)

    def frames(self, tracks: Mapping[FeedKey, Track], now: float) -> Iterator[Frame]:
        """Announcements and acks that are due."""
        while (key := self._next_repeat()) is not None and self._repeats[0][0] <= now:
            told = self._unconfirmed[key]
            self._fresh.setdefault(key, told.tip)
            self._wait_for(key, Told(told.tip, now + told.retry_s, min(2 * told.retry_s, RETRY_MAX_S)))
        for key, tip in self._fresh.items():
            waiting = self._unconfirmed.get(key)
            if waiting is None or waiting.tip != tip or waiting.due <= now:
                self._wait_for(key, Told(tip, now + ANNOUNCE_RETRY_S))
        tips, self._fresh = iter(self._fresh.values()), {}
        while some := tuple(islice(tips, TIPS_PER_FRAME_MAX)):
            yield Announce(some)
        if self._ack_at_once or (self._acks and now >= self._ack_due):
            keys, self._acks = iter(self._acks), {}
            entries = (_entry(tracks[feed], heard) for feed, heard in keys)
            first = tuple(islice(entries, ACKS_PER_FRAME_MAX))
            yield Ack(first)
            while more := tuple(islice(entries, ACKS_PER_FRAME_MAX)):
                yield Ack(more)
            self._ack_at_once = False
            self._ack_due = now + ACK_DELAY_S

    def _wait_for(self, key: tuple[FeedKey, Link], told: Told) -> None:
        self._unconfirmed[key] = told
        heappush(self._repeats, (told.due, key))

    def _next_repeat(self) -> tuple[FeedKey, Link] | None:
        """What is repeated first, after dropping what was confirmed or replaced."""
        while self._repeats:
            due, key = self._repeats[0]
            told = self._unconfirmed.get(key)
            if told is not None and told.due == due:
                return key
            heappop(self._repeats)
        return None


def _key(feed: FeedTip) -> tuple[FeedKey, Link]:
    """One place per branch: the branch in use has no name, the others are named by their tip."""
    return (feed.feed, feed.tip.link if feed.branch else NO_LINK)


def _entry(track: Track, heard: Link) -> AckEntry:
    track.processed_told = track.processed
    return AckEntry(track.feed, track.held.length, track.processed, heard)
