"""The replication session: one connection between two member devices for one party, without sockets.

    transport, store, party                                    the other side's Session
         | Event                                                          ^
         v                                                                |
      Session.receive(event, now) --> [Effect] --> Send(frame) -----------+
                                         |
                                         +--> Read, Ingest, Compare, FeedHeard, Progress, Score, Close

Both sides run the same machine: each tells its tips (`telling`), asks for what it lacks (`asking`, `plan`) and serves
what it is asked for (`serving`). The link may lose, repeat and reorder frames. The session checks no hash and no
signature: the store does, on Ingest. It never ends a silent connection: that is the transport's decision.

Invariants (tests cite them by number)
    S1  Nothing but Hello is sent before the other side's Hello of the same version was heard.
    S2  At most REQUESTS_MAX requests are open, at most one per feed.
    S3  Bytes asked for and not yet stored stay within CREDIT_BYTES, or are one range that alone is larger.
    S4  Only feeds that the party follows (admitted, or in vain) are asked for, and the beginning of control feeds in
        limbo: at most LIMBO_FEEDS_MAX ranges of at most LIMBO_RANGE_BYTES.
    S5  While an admitted control feed is behind, no data feed is asked for, unless control brought nothing for
        CONTROL_PATIENCE_S.
    S6  Ranges of a feed reach the store in the order of their blocks, one at a time, each ending at a head; a range
        that was not taken takes those after it along.
    S7  Every request ends: by its last range, a refusal or its deadline; a lost one is repeated, ever more slowly.
    S8  A tip is announced until the other side has heard it and holds as much; a Hello until it is answered.
    S9  When their tip is not on our branch, their branch is fetched and handed to the store, and our tip is told again:
        a fork can't stay unseen between two honest peers.
    S10 Serving is bounded: SERVES_MAX requests wait, READS_MAX are read, none while the transport is not writable.
    S11 After Close the session is silent.
    S12 Equal events at equal times give equal effects.
    S13 What this peer writes is sent without being asked for, at most PUSH_BYTES_MAX, to a side that has all before it; it
        is announced as well when that does not fit or is not acknowledged. Nothing else is taken that was not asked for.
    S14 A data feed that is over its quota is asked for when no other data feed wants anything, and then as any other.
"""

from collections.abc import Callable, Iterable
from typing import assert_never

from echostore.kernel.ids import FeedKey
from echostore.kernel.limits import APPEND_BYTES_MAX
from echostore.kernel.order import CONTROL
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.asking import LIMBO_RANGE_BYTES, Asking
from echostore.kernel.sync.events import (
    Close,
    Compare,
    Compared,
    Effect,
    Event,
    FeedHeard,
    FeedKnown,
    FeedRefused,
    ForkFound,
    ForkHeard,
    Ingested,
    IngestRejected,
    LocalHead,
    Malformed,
    Misbehaviour,
    Processed,
    Progress,
    RangeMissing,
    RangeRead,
    Received,
    Score,
    Send,
    Started,
    Tick,
    Unobtainable,
    Writable,
)
from echostore.kernel.sync.frames import (
    NO_TIP,
    PROTOCOL_VERSION,
    Ack,
    AckEntry,
    Announce,
    Blocks,
    FeedTip,
    Frame,
    Hello,
    Refusal,
    RefusalReason,
    Request,
    Tip,
)
from echostore.kernel.sync.plan import BRANCHES_MAX, Standing, Track
from echostore.kernel.sync.serving import PUSH_BYTES_MAX, Serving
from echostore.kernel.sync.telling import Telling

TRACKS_HEARD_MAX = 4096
"""Feeds that only the other side knows. Beyond, announcements are not answered and so come again later."""

SILENCE_S = 3.0
"""After so long without a frame the link counts as having been down: on the next frame nothing waits for its time."""

UNASKED_BYTES_MAX = 64 * 1024 * 1024
"""Blocks that answer no open request: late and repeated ones are normal, this much beyond what we asked for is not."""


class Session:
    """See the module. `receive` is the only way in; `wake_at` says when a Tick is due."""

    def __init__(
        self, last: Callable[[FeedKey], bool] = lambda feed: False, *, heard_max: int = TRACKS_HEARD_MAX
    ) -> None:
        """`last` says which feeds are asked for after all others, as of now (`turns`); `heard_max`, how many feeds that
        are not followed here the other side may name."""
        self.closed = False
        self._started = False
        self._writable = True
        self._now = 0.0
        self._effects: list[Effect] = []
        self._progress: list[Progress] = []
        self._tracks: dict[FeedKey, Track] = {}
        self._heard_of: set[FeedKey] = set()
        """Feeds that only the other side knows, also those that were refused since."""
        self._heard_max = heard_max
        self._heard_at = 0.0
        self._unasked_bytes = 0
        self._telling = Telling()
        self._asking = Asking(last)
        self._serving = Serving()

    # What others read

    def wake_at(self) -> float | None:
        """The next moment at which time alone changes something; None when only events do."""
        if self.closed or not self._started:
            return None
        due = [*self._telling.due(writable=self._writable), *self._asking.due(self._now)]
        return min(due, default=None)

    @property
    def requests_open(self) -> int:
        return self._asking.open_count

    @property
    def bytes_in_flight(self) -> int:
        return self._asking.bytes_in_flight

    def lacking(self) -> list[FeedKey]:
        """Feeds of which the other side is known to have more than we hold."""
        return [track.feed for track in self._tracks.values() if track.goal is not None or track.wishes]

    def may_push(self, written: Blocks) -> bool:
        """Whether what was just written may go out before the session hears of it, which has to follow (S13).

        Other threads ask too: it changes nothing, and an answer that has just become wrong costs one range that the
        other side does not take.
        """
        track = self._tracks.get(written.feed)
        return (
            not self.closed
            and track is not None
            and track.held.length == written.start
            and self._has_all_before(track, track.held)
            and self._serving.free(track, written)
        )

    # The one way in

    def receive(self, event: Event, now: float) -> list[Effect]:
        if self.closed:
            return []
        self._now = now
        effects: list[Effect] = []
        self._effects, self._progress = effects, []
        self._take(event)
        self._decide()
        effects.extend(self._progress)  # last: what arrived with it is shown first
        return effects

    def _take(self, event: Event) -> None:
        """Update the state; what follows from it is decided afterwards, in one place."""
        match event:
            case Received(frame):
                self._take_frame(frame)
            case LocalHead(feed, own, written, sent):
                self._take_known(feed, own=own, written=written, sent=sent)
            case FeedKnown(feed):
                self._take_known(feed)
            case Ingested(feed, tip):
                self._take_ingested(self._tracks[feed], tip)
            case ForkFound(feed):
                self._take_fork(self._tracks[feed])
            case IngestRejected(feed, reason, fatal):
                self._take_rejected(self._tracks[feed], reason, fatal=fatal)
            case Compared(feed, tip, held):
                self._tracks[feed].compared(tip, held=held)
                if not held:
                    self._telling.tell_again(self._tracks[feed].as_tip())
                self._review(self._tracks[feed])
            case FeedRefused(feed, _):
                self._refuse(self._tracks[feed])
            case Processed(feed, length):
                self._take_processed(feed, length)
            case RangeRead() | RangeMissing():
                self._send(self._serving.answered(event))
                while self._serving.not_pushed:
                    self._telling.tell_again(self._tracks[self._serving.not_pushed.pop()].as_tip())
            case Started(feeds, fork_proofs, processed):
                assert not self._started, "a session starts once"
                self._started = True
                self._telling.start(self._now, fork_proofs)
                for each in feeds:
                    self._take_known(each)
                for feed, length in processed:
                    self._take_processed(feed, length)
            case Malformed(detail):
                self._misbehaved(Misbehaviour.MALFORMED, detail)
            case Writable(writable):
                self._writable = writable
            case Tick():
                pass
            case _:
                assert_never(event)

    def _decide(self) -> None:
        """All that the session does of its own accord, from its state and the time alone."""
        if self.closed or not self._started:
            return
        now = self._now
        self._asking.expire(now)
        self._effects.extend(map(Send, self._telling.hello(self._tracks, now)))
        if not self._telling.greeted:
            return
        # The next request is on its way while the store is busy with what the last one brought.
        self._effects.extend(map(Send, self._asking.requests(now)))
        self._effects.extend(self._asking.ingests())
        if self._writable:
            self._effects.extend(self._serving.reads())
            self._effects.extend(map(Send, self._telling.frames(self._tracks, now)))

    # Frames

    def _take_frame(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self._take_hello(frame)
            return
        if not self._telling.greeted:
            return  # it overtook the Hello; whatever it said comes again
        self._telling.answered = True
        if self._now - self._heard_at > SILENCE_S:
            self._telling.hurry(self._now)
            self._asking.hurry(self._now)
        self._heard_at = self._now
        match frame:
            case Announce(tips):
                self._take_tips(tips)
            case Blocks():
                self._take_blocks(frame)
            case Ack(entries):
                self._take_ack(entries)
            case Request():
                self._send(self._serving.asked(frame, self._tracks.get(frame.feed)))
            case Refusal():
                self._take_refusal(frame)
            case _:
                assert_never(frame)

    def _take_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self._misbehaved(Misbehaviour.WRONG_VERSION, f"speaks version {hello.version}, not {PROTOCOL_VERSION}")
            return
        if not self._telling.greeted:
            self._telling.greeted = True
            known = set(self._telling.fork_proofs)
            self._effects.extend(ForkHeard(proof) for proof in hello.fork_proofs if proof not in known)
        self._telling.answer_at_once()
        self._take_tips(hello.tips)

    def _take_tips(self, tips: Iterable[FeedTip]) -> None:
        for each in tips:
            track = self._tracks.get(each.feed)
            if track is None:
                if len(self._heard_of) >= self._heard_max:
                    continue
                track = self._tracks[each.feed] = Track(each.feed, each.kind, Standing.HEARD)
                self._heard_of.add(each.feed)
                self._effects.append(FeedHeard(each.feed, each.kind))
            if each.branch:
                # A branch of a feed that is not known yet is not answered, so it is announced again when it is.
                if track.standing is Standing.KNOWN:
                    self._telling.acknowledge(each.feed, each.tip.link)
                    if track.notice_branch(each.tip):
                        self._effects.append(Compare(each.feed, each.tip))
                continue
            self._telling.acknowledge(each.feed, each.tip.link)
            self._has(track, each.tip.length, 0)
            track.heard(each.tip)
            self._review(track)

    def _take_ack(self, entries: Iterable[AckEntry]) -> None:
        self._telling.take_ack(entries)
        for entry in entries:
            track = self._tracks.get(entry.feed)
            if track is not None:
                self._has(track, entry.held, entry.processed)
                if track.processed > track.processed_told:
                    # Of a feed that they had from us they never spoke before, so nothing has told them this yet.
                    self._telling.acknowledge(track.feed, track.theirs.link)

    def _has(self, track: Track, held: int, processed: int) -> None:
        """The other side has this much of a feed."""
        if held > track.theirs_held or processed > track.theirs_processed:
            track.theirs_held = max(track.theirs_held, held)
            track.theirs_processed = max(track.theirs_processed, processed)
            self._progress.append(Progress(track.feed, track.theirs_held, track.theirs_processed))

    def _take_blocks(self, blocks: Blocks) -> None:
        if not blocks.payloads or blocks.head.length != blocks.end:
            self._misbehaved(Misbehaviour.MALFORMED, "a range that does not end at its head")
        elif not self._asking.take(blocks, self._now) and not self._take_push(blocks):
            self._unasked_bytes += blocks.size_bytes
            if self._unasked_bytes > UNASKED_BYTES_MAX + 4 * self._asking.asked_bytes:
                self._misbehaved(Misbehaviour.FLOOD, f"{self._unasked_bytes} bytes that nobody asked for")

    def _take_push(self, blocks: Blocks) -> bool:
        """News that was sent at once: the next range of a feed of which we have all that we know of (S13)."""
        track = self._tracks.get(blocks.feed)
        if (
            track is None
            or track.standing is not Standing.KNOWN
            or track.wishes
            or blocks.start != track.arrived_end()
            or blocks.size_bytes > PUSH_BYTES_MAX
            or not self._asking.take_push(track, blocks)
        ):
            return False
        tip = Tip(blocks.head.length, blocks.head.link)
        track.news_end = tip.length
        self._has(track, tip.length, 0)
        track.heard(tip)
        self._review(track)
        return True

    def _push(self, track: Track, before: Tip, written: Blocks | None, *, sent: bool) -> None:
        """Send what we have just written to a side that has all before it, without waiting to be asked (S13)."""
        if not self._has_all_before(track, before):
            return
        if written is not None and written.start == before.length and self._serving.free(track, written):
            self._send(None if sent else written)
        elif not self._serving.push(track, before.length):
            return
        track.pushed = track.held.length
        self._telling.expect(track.as_tip(), self._now)

    def _has_all_before(self, track: Track, before: Tip) -> bool:
        """Whether the other side can take what follows `before` in a feed of ours, and we may send it."""
        return (
            self._telling.greeted
            and self._telling.answered
            and self._writable
            and track.goal is None
            and not track.branches
            and 0 < before.length in (track.theirs_held, track.pushed)
            and track.theirs_held <= before.length
        )

    def _take_refusal(self, refusal: Refusal) -> None:
        if not self._asking.open_at(refusal.feed, refusal.start):
            return  # of a request that is over
        track = self._tracks[refusal.feed]
        self._asking.end(track)
        limit = APPEND_BYTES_MAX if track.standing is Standing.KNOWN else LIMBO_RANGE_BYTES
        if refusal.reason is RefusalReason.BUSY:
            self._asking.rest(track, self._now)
        elif refusal.reason is RefusalReason.OVERSIZE and 0 < refusal.bytes_needed <= limit:
            track.bytes_needed = refusal.bytes_needed
        else:
            self._effects.append(Unobtainable(refusal.feed, refusal.start, refusal.reason, refusal.evidence))
            if track.standing is Standing.KNOWN:
                track.give_up()
            else:
                self._refuse(track)
        self._review(track)

    # Local facts

    def _take_known(
        self, feed: FeedTip, *, own: bool = False, written: Blocks | None = None, sent: bool = False
    ) -> None:
        """A feed is admitted, and we hold it up to a tip."""
        track = self._tracks.get(feed.feed)
        if track is None:
            track = self._tracks[feed.feed] = Track(feed.feed, feed.kind, Standing.KNOWN)
        elif track.standing is not Standing.KNOWN:
            self._heard_of.discard(feed.feed)
            # What limbo asked for was asked under other limits.
            self._asking.drop_arrivals(track)
            track.standing, track.goal = Standing.KNOWN, None
        if not feed.branch:
            before = track.held
            if feed.tip.length < track.held.length and not own:
                self._asking.drop_arrivals(track)
                track.went_back(feed.tip)
            elif track.grew(feed.tip):
                track.given_up = NO_TIP
                self._acknowledge(track)
                if own:
                    self._push(track, before, written, sent=sent)
        elif feed.tip.link not in track.branches and len(track.branches) < BRANCHES_MAX:
            track.branches[feed.tip.link] = feed.tip
            self._telling.tell(feed)
        self._review(track)

    def _take_processed(self, feed: FeedKey, length: int) -> None:
        track = self._tracks.get(feed)
        if track is not None and length > track.processed:
            track.processed = length
            self._acknowledge(track)

    def _refuse(self, track: Track) -> None:
        """Nothing more is asked of this feed."""
        track.standing = Standing.REFUSED
        self._asking.drop_arrivals(track)
        self._review(track)

    def _take_ingested(self, track: Track, tip: Tip) -> None:
        end = self._asking.stored(track).end
        if track.standing is Standing.HEARD:
            track.limbo_full = True
        else:
            if track.kind == CONTROL:
                self._asking.control_moved(self._now)
            track.took(end, tip)
            self._acknowledge(track)
            if end == track.news_end:
                self._telling.answer_at_once()
        self._review(track)

    def _take_fork(self, track: Track) -> None:
        end = self._asking.stored(track).end
        self._asking.drop_arrivals(track)
        track.kept_evidence(end)
        self._telling.tell_again(track.as_tip())
        self._review(track)

    def _take_rejected(self, track: Track, reason: Reason, *, fatal: bool) -> None:
        blocks = self._asking.stored(track)
        self._asking.drop_arrivals(track)
        where = f"feed {track.feed.hex()[:16]}, blocks {blocks.start} to {blocks.end}"
        if reason is Reason.BAD_LINK and not fatal:
            if not track.broke(blocks.start):
                self._misbehaved(Misbehaviour.LYING_HEAD, where)
        elif reason is Reason.BAD_SIGNATURE:
            self._misbehaved(Misbehaviour.BAD_SIGNATURE, where)
        elif fatal or reason is Reason.OVERSIZE:
            self._misbehaved(Misbehaviour.REJECTED, f"{where}: {reason}")
        elif reason is Reason.WAITING and track.standing is Standing.HEARD:
            track.limbo_full = True
        elif reason is Reason.GAP and track.goal is not None and track.goal.probe is not None:
            track.give_up()  # the parting lies below what the store still keeps
        elif reason in (Reason.GAP, Reason.WAITING):
            self._asking.rest(track, self._now)  # the store is behind what we believed, or busy
        else:
            self._refuse(track)
        self._review(track)

    # What both halves need

    def _review(self, track: Track) -> None:
        """Set a feed's goal anew, and let the queues and the announcements follow."""
        if self.closed:
            return
        compare = track.review()
        if compare is not None:
            self._effects.append(Compare(track.feed, compare))
        # While we extend towards their tip they have all that we have, and need not be told.
        extends = track.goal is not None and track.goal.probe is None
        if track.standing is Standing.KNOWN and track.held.length and track.held != track.theirs and not extends:
            self._telling.tell(track.as_tip())
        self._asking.place(track, self._now)

    def _acknowledge(self, track: Track) -> None:
        """Tell how far we are in a feed that the other side has spoken of."""
        if track.theirs.length:
            self._telling.acknowledge(track.feed, track.theirs.link)

    def _send(self, frame: Frame | None) -> None:
        if frame is not None:
            self._effects.append(Send(frame))

    def _misbehaved(self, misbehaviour: Misbehaviour, detail: str) -> None:
        self._effects.append(Score(misbehaviour, detail))
        self._effects.append(Close(misbehaviour))
        self.closed = True
