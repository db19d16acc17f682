"""The replication session: its invariants S1 to S14, its frames, and convergence over bad links."""

import random
from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.limits import APPEND_BYTES_MAX
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.asking import (
    BLOCK_BYTES_GUESS,
    CONTROL_PATIENCE_S,
    CREDIT_BYTES,
    LIMBO_FEEDS_MAX,
    LIMBO_RANGE_BYTES,
    REQUEST_TIMEOUT_S,
    REQUESTS_MAX,
    RETRY_MAX_S,
)
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
    Ingest,
    Ingested,
    IngestRejected,
    LocalHead,
    Malformed,
    Misbehaviour,
    Processed,
    Progress,
    RangeMissing,
    RangeRead,
    Read,
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
    TIPS_PER_FRAME_MAX,
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
from echostore.kernel.sync.serving import PUSH_BYTES_MAX, READS_MAX, SERVES_MAX
from echostore.kernel.sync.session import Session
from echostore.kernel.sync.telling import ANNOUNCE_RETRY_S
from echostore.testing.inmemory import connect
from echostore.testing.memory_node import MemoryNode
from echostore.testing.network import Faults
from echostore.testing.world import World
from echostore.wire.generated import sync_pb2 as pb
from echostore.wire.sync import FRAME_BYTES_MAX, MalformedFrame, decode_frame, encode_frame


def key(number: int) -> FeedKey:
    return FeedKey(number.to_bytes(32, "big"))


def link(number: int) -> Link:
    return Link(number.to_bytes(32, "little"))


def tip(length: int, branch: int = 0) -> Tip:
    return Tip(length, link(length + 1000 * branch)) if length else NO_TIP


def feed(number: int, length: int, kind: str = DATA, *, branch: int = 0, evidence: bool = False) -> FeedTip:
    return FeedTip(key(number), kind, tip(length, branch), evidence)


def blocks(number: int, start: int, count: int, *, size: int = 10, more: bool = False, branch: int = 0) -> Blocks:
    end = start + count
    return Blocks(key(number), start, (bytes(size),) * count, Head(end, tip(end, branch).link, bytes(64)), more)


class Driver:
    """A session under test: feeds it events and sorts its effects."""

    def __init__(
        self, *feeds: FeedTip, greeted: bool = True, proofs: tuple[bytes, ...] = (), over: Collection[FeedKey] = ()
    ) -> None:
        self.session = Session(lambda feed: feed in over)
        self.now = 0.0
        self.effects: list[Effect] = self.session.receive(Started(feeds, proofs), self.now)
        if greeted:
            self.hears(Hello(PROTOCOL_VERSION, ()))

    def tell(self, event: Event, *, after_s: float = 0.0) -> "Driver":
        self.now += after_s
        self.effects = self.session.receive(event, self.now)
        return self

    def hears(self, frame: Frame, *, after_s: float = 0.0) -> "Driver":
        return self.tell(Received(frame), after_s=after_s)

    def wake(self) -> "Driver":
        """Let time pass until the session wants to be woken."""
        wake_at = self.session.wake_at()
        assert wake_at is not None, "the session waits for nothing"
        self.now = max(self.now, wake_at)
        return self.tell(Tick())

    def wakes_until(self, kind: type[Any]) -> list[Any]:
        """Let time pass until a frame of this kind is sent."""
        for _ in range(100):
            if self.wake().sent(kind):
                return self.sent(kind)
        raise AssertionError(f"no {kind.__name__} within 100 wakes")

    def sent(self, kind: type[Any]) -> list[Any]:
        return [effect.frame for effect in self.effects if isinstance(effect, Send) and isinstance(effect.frame, kind)]

    def all(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


def test_S1_only_hello_is_said_before_the_other_sides_hello() -> None:
    driver = Driver(feed(1, 3), greeted=False)
    assert [type(effect.frame) for effect in driver.all(Send)] == [Hello]
    driver.hears(Announce((feed(1, 9),)))
    assert driver.effects == []
    assert driver.tell(LocalHead(feed(1, 4))).effects == []


def test_S1_another_version_ends_the_session() -> None:
    driver = Driver(greeted=False).hears(Hello(PROTOCOL_VERSION + 1, ()))
    assert driver.all(Close) == [Close(Misbehaviour.WRONG_VERSION)]


def test_S8_hello_is_repeated_more_and_more_slowly_until_it_is_answered() -> None:
    driver = Driver(feed(1, 3), greeted=False)
    times = []
    for _ in range(6):
        assert driver.wake().sent(Hello)
        times.append(driver.now)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == [2.0, 4.0, 8.0, 8.0, 8.0]
    driver.hears(Hello(PROTOCOL_VERSION, ())).hears(Ack((AckEntry(key(1), 3, 0, tip(3).link),)))
    assert driver.session.wake_at() is None


def test_S8_a_hello_is_answered_with_an_ack_even_when_there_is_nothing_to_say() -> None:
    driver = Driver(greeted=False).hears(Hello(PROTOCOL_VERSION, ()))
    assert driver.sent(Ack) == [Ack(())]
    assert driver.hears(Hello(PROTOCOL_VERSION, ())).sent(Ack) == [Ack(())]


def test_S8_a_tip_is_announced_until_it_is_held() -> None:
    driver = Driver().hears(Ack(()))
    assert driver.tell(LocalHead(feed(1, 5))).sent(Announce) == [Announce((feed(1, 5),))]
    assert driver.wake().sent(Announce) == [Announce((feed(1, 5),))]
    driver.hears(Ack((AckEntry(key(1), 2, 0, tip(5).link),)))
    assert driver.wake().sent(Announce), "heard is not held"
    driver.hears(Ack((AckEntry(key(1), 5, 0, tip(5).link),)))
    assert driver.session.wake_at() is None


def test_S8_a_newer_tip_replaces_the_one_that_waits() -> None:
    driver = Driver().hears(Ack(())).tell(LocalHead(feed(1, 5))).tell(LocalHead(feed(1, 7)))
    assert driver.wake().sent(Announce) == [Announce((feed(1, 7),))]


def test_S8_constant_news_does_not_starve_a_lost_announcement() -> None:
    driver = Driver().hears(Ack(())).tell(LocalHead(feed(1, 5)))
    repeated = 0
    for number in range(40):
        driver.tell(LocalHead(feed(2, number + 1)), after_s=0.1)
        repeated += sum(feed(1, 5) in frame.tips for frame in driver.sent(Announce))
    assert repeated >= 2


def test_S8_a_party_of_many_feeds_is_told_in_several_frames() -> None:
    count = TIPS_PER_FRAME_MAX + 10
    driver = Driver(*(feed(number, 1) for number in range(1, count + 1)), greeted=False)
    first = driver.sent(Hello)[0].tips
    driver.hears(Hello(PROTOCOL_VERSION, ()))
    rest = [each for frame in driver.sent(Announce) for each in frame.tips]
    assert len(first) == TIPS_PER_FRAME_MAX
    assert {each.feed for each in (*first, *rest)} == {key(number) for number in range(1, count + 1)}


def test_S8_a_repeated_announcement_provokes_the_ack_that_was_lost() -> None:
    driver = Driver(feed(1, 5)).hears(Announce((feed(1, 5),)), after_s=1)
    assert driver.sent(Ack) == [Ack((AckEntry(key(1), 5, 0, tip(5).link),))]
    assert driver.hears(Announce((feed(1, 5),)), after_s=1).sent(Ack) == [Ack((AckEntry(key(1), 5, 0, tip(5).link),))]


def test_a_feed_that_is_behind_is_asked_for_from_where_it_ends() -> None:
    driver = Driver(feed(1, 3)).hears(Announce((feed(1, 10),)))
    request = driver.sent(Request)[0]
    assert (request.feed, request.start, request.blocks_max, request.toward) == (key(1), 3, 7, tip(10).link)


def test_S2_requests_are_bounded() -> None:
    feeds = [feed(number, 0) for number in range(1, 201)]
    driver = Driver(*feeds).hears(Announce(tuple(feed(number, 5) for number in range(1, 201))))
    requests = driver.sent(Request)
    assert len(requests) == len({request.feed for request in requests}) == REQUESTS_MAX
    assert driver.session.requests_open == REQUESTS_MAX


def test_S3_credit_is_never_exceeded() -> None:
    feeds = [feed(number, 0) for number in range(1, 41)]
    driver = Driver(*feeds).hears(Announce(tuple(feed(number, 100_000) for number in range(1, 41))))
    assert sum(request.bytes_max for request in driver.sent(Request)) <= CREDIT_BYTES
    assert driver.session.bytes_in_flight <= CREDIT_BYTES


def test_S3_a_range_larger_than_all_credit_goes_alone() -> None:
    driver = Driver(feed(1, 0), feed(2, 0)).hears(Announce((feed(1, 3), feed(2, 3))))
    driver.hears(Refusal(key(1), 0, RefusalReason.OVERSIZE, APPEND_BYTES_MAX))
    assert driver.sent(Request) == [], "another request is open"
    driver.hears(blocks(2, 0, 3)).tell(Ingested(key(2), tip(3)))
    assert [request.bytes_max for request in driver.sent(Request)] == [APPEND_BYTES_MAX]
    assert driver.hears(Announce((feed(2, 9),))).sent(Request) == []


def test_S3_a_refusal_with_an_impossible_size_is_given_up() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 3),)))
    driver.hears(Refusal(key(1), 0, RefusalReason.OVERSIZE, APPEND_BYTES_MAX + 1))
    assert driver.all(Unobtainable) == [Unobtainable(key(1), 0, RefusalReason.OVERSIZE)]
    assert driver.sent(Request) == []


def test_S4_a_feed_that_nobody_admitted_is_reported_and_not_asked_for() -> None:
    driver = Driver().hears(Announce((feed(7, 5),)))
    assert driver.all(FeedHeard) == [FeedHeard(key(7), DATA)]
    assert driver.sent(Request) == []
    assert driver.hears(Announce((feed(7, 6),))).all(FeedHeard) == []
    assert driver.tell(FeedKnown(feed(7, 0))).sent(Request)[0].start == 0


def test_S4_the_beginning_of_an_unknown_control_feed_goes_to_limbo_and_no_more_until_it_is_decided() -> None:
    driver = Driver().hears(Announce((feed(7, 5, CONTROL),)))
    request = driver.sent(Request)[0]
    assert (request.start, request.bytes_max) == (0, LIMBO_RANGE_BYTES)
    ingest = driver.hears(blocks(7, 0, 2)).all(Ingest)[0]
    assert ingest.limbo
    driver.tell(Ingested(key(7), tip(2)))
    assert driver.sent(Request) == []
    assert driver.tell(FeedKnown(feed(7, 2, CONTROL))).sent(Request)[0].start == 2


def test_S4_limbo_is_bounded() -> None:
    driver = Driver().hears(Announce(tuple(feed(number, 5, CONTROL) for number in range(1, 200))))
    requests = driver.sent(Request)
    assert len(requests) == LIMBO_FEEDS_MAX
    for request in requests:
        driver.hears(Blocks(request.feed, 0, (b"x",), Head(1, tip(1).link, bytes(64)), more=False))
        driver.tell(Ingested(request.feed, tip(1)))
        assert driver.sent(Request) == [], "the place is taken until the feed is decided"
    assert len(driver.tell(FeedRefused(key(1), Reason.UNADMITTED)).sent(Request)) == 1


def test_S4_a_refused_feed_is_left_alone() -> None:
    driver = Driver().hears(Announce((feed(7, 5, CONTROL),)))
    driver.tell(FeedRefused(key(7), Reason.UNADMITTED))
    assert driver.hears(Announce((feed(7, 9, CONTROL),))).sent(Request) == []
    assert driver.tell(FeedKnown(feed(7, 0, CONTROL))).sent(Request)


def test_what_is_held_no_more_is_asked_for_again() -> None:
    """The store went back behind an epoch that did not hold."""
    driver = Driver(feed(1, 9)).hears(Announce((feed(1, 9),)))
    assert driver.sent(Request) == []
    assert [request.start for request in driver.tell(LocalHead(feed(1, 2))).sent(Request)] == [2]
    driver.hears(blocks(1, 2, 7)).tell(Ingested(key(1), tip(9)))
    assert driver.sent(Request) == []
    assert driver.tell(LocalHead(feed(1, 4), own=True)).sent(Request) == [], "of an own feed it is old news"


def test_S5_data_waits_for_control() -> None:
    driver = Driver(feed(1, 0, CONTROL), feed(2, 0)).hears(Announce((feed(2, 5), feed(1, 5, CONTROL))))
    # The data feed was heard of first, in the same frame.
    assert [request.feed for request in driver.sent(Request)] == [key(1)]
    driver.hears(blocks(1, 0, 5))
    assert driver.sent(Request) == []
    assert [request.feed for request in driver.tell(Ingested(key(1), tip(5))).sent(Request)] == [key(2)]


def test_S5_control_that_brings_nothing_does_not_stop_data_for_ever() -> None:
    driver = Driver(feed(1, 0, CONTROL), feed(2, 0)).hears(Announce((feed(1, 5, CONTROL), feed(2, 5))))
    asked = set()
    for _ in range(20):
        asked |= {(driver.now, request.feed) for request in driver.wake().sent(Request)}
    assert min(now for now, feed_key in asked if feed_key == key(2)) == CONTROL_PATIENCE_S


def test_S6_ranges_reach_the_store_in_order_one_at_a_time() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 9),)))
    assert driver.hears(blocks(1, 6, 3)).all(Ingest) == []
    assert driver.hears(blocks(1, 3, 3, more=True)).all(Ingest) == []
    assert [ingest.start for ingest in driver.hears(blocks(1, 0, 3, more=True)).all(Ingest)] == [0]
    assert [ingest.start for ingest in driver.tell(Ingested(key(1), tip(3))).all(Ingest)] == [3]
    assert [ingest.start for ingest in driver.tell(Ingested(key(1), tip(6))).all(Ingest)] == [6]
    assert driver.tell(Ingested(key(1), tip(9))).all(Ingest) == []
    assert driver.session.bytes_in_flight == 0
    assert driver.session.lacking() == []


def test_S6_what_follows_a_range_that_was_not_taken_is_dropped() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 9),)))
    driver.hears(blocks(1, 0, 3, more=True)).hears(blocks(1, 3, 3, more=True))
    driver.tell(IngestRejected(key(1), Reason.WAITING))
    assert driver.all(Ingest) == []
    assert driver.session.bytes_in_flight == 0
    assert driver.wakes_until(Request)[0].start == 0


def test_S6_a_range_that_does_not_end_at_its_head_is_misbehaviour() -> None:
    bad = Blocks(key(1), 0, (b"x",), Head(2, link(2), bytes(64)), more=False)
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 9),))).hears(bad)
    assert driver.all(Close) == [Close(Misbehaviour.MALFORMED)]
    assert driver.all(Ingest) == []


def test_S7_a_lost_request_is_repeated_ever_more_slowly() -> None:
    driver = Driver(feed(1, 0)).hears(Ack(())).hears(Announce((feed(1, 5),)))
    times = [driver.now]
    for _ in range(6):
        driver.wakes_until(Request)
        times.append(driver.now)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == [REQUEST_TIMEOUT_S, 2 * REQUEST_TIMEOUT_S, *[RETRY_MAX_S] * 4]
    assert driver.session.requests_open == 1


def test_S7_a_stream_that_breaks_off_is_taken_up_where_it_ended() -> None:
    driver = Driver(feed(1, 0)).hears(Ack(())).hears(Announce((feed(1, 9),))).hears(blocks(1, 0, 3, more=True))
    driver.tell(Ingested(key(1), tip(3)))
    assert driver.wakes_until(Request)[0].start == 3


def test_S7_after_a_silence_nothing_waits_for_its_time() -> None:
    driver = Driver(feed(1, 0), feed(2, 4)).hears(Ack(())).hears(Announce((feed(1, 5),)))
    for _ in range(12):
        driver.wake()
    driver.hears(Ack(()), after_s=0.001)
    assert driver.sent(Announce) == [Announce((feed(2, 4),))]


def test_S7_a_busy_other_side_is_asked_again_later() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 5),)))
    assert driver.hears(Refusal(key(1), 0, RefusalReason.BUSY)).sent(Request) == []
    assert driver.wakes_until(Request)
    assert driver.now >= 1.0


@pytest.mark.parametrize("reason", [RefusalReason.UNKNOWN_FEED, RefusalReason.COMPACTED])
def test_what_the_other_side_cannot_give_is_reported_and_tried_again_only_when_we_have_come_further(
    reason: RefusalReason,
) -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 5),))).hears(Refusal(key(1), 0, reason))
    assert driver.all(Unobtainable) == [Unobtainable(key(1), 0, reason)]
    assert driver.hears(Announce((feed(1, 5),))).sent(Request) == []
    # An epoch brought us past what was compacted.
    assert driver.tell(LocalHead(feed(1, 4))).sent(Request)[0].start == 4


def test_a_stale_refusal_does_not_end_a_newer_request() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 5),))).hears(blocks(1, 0, 2, more=True))
    driver.hears(Refusal(key(1), 0, RefusalReason.UNKNOWN_FEED))
    assert driver.session.requests_open == 1


def test_S9_a_shorter_tip_of_another_branch_is_fetched_from_ever_earlier_places() -> None:
    driver = Driver(feed(1, 20)).hears(Announce((feed(1, 10, branch=1),)))
    assert driver.all(Compare) == [Compare(key(1), tip(10, 1))]
    starts = [driver.tell(Compared(key(1), tip(10, 1), held=False)).sent(Request)[0].start]
    assert driver.sent(Announce) == [Announce((feed(1, 20),))], "the other side does not know our branch either"
    while starts[-1] > 2:
        driver.hears(blocks(1, starts[-1], 10 - starts[-1], branch=1))
        starts.append(driver.tell(IngestRejected(key(1), Reason.BAD_LINK)).sent(Request)[0].start)
    assert starts == [9, 8, 6, 2]
    driver.hears(blocks(1, 2, 8, branch=1)).tell(ForkFound(key(1)))
    assert driver.sent(Request) == []
    assert driver.session.lacking() == []


def test_S9_a_longer_tip_of_another_branch_shows_when_its_blocks_do_not_hook() -> None:
    driver = Driver(feed(1, 4)).hears(Announce((feed(1, 6, branch=1),)))
    assert driver.sent(Request)[0].start == 4
    driver.hears(blocks(1, 4, 2, branch=1)).tell(IngestRejected(key(1), Reason.BAD_LINK))
    assert [request.start for request in driver.sent(Request)] == [3]
    driver.hears(blocks(1, 3, 1, branch=1)).tell(ForkFound(key(1)))
    assert driver.sent(Announce) == [Announce((feed(1, 4),))], "the other side does not know our branch either"
    # The rest of their branch is fetched too: others may depend on it.
    assert [request.start for request in driver.sent(Request)] == [4]
    driver.hears(blocks(1, 4, 2, branch=1)).tell(ForkFound(key(1)))
    assert driver.session.lacking() == []
    assert driver.hears(Announce((feed(1, 8, branch=1),))).sent(Request)[0].start == 6


def test_S9_a_probe_that_lands_before_the_parting_moves_forward() -> None:
    driver = Driver(feed(1, 20)).hears(Announce((feed(1, 10, branch=1),)))
    driver.tell(Compared(key(1), tip(10, 1), held=False)).hears(blocks(1, 9, 1, branch=1))
    driver.tell(IngestRejected(key(1), Reason.BAD_LINK)).hears(blocks(1, 8, 1))
    assert driver.tell(Ingested(key(1), tip(20))).sent(Request)[0].start == 9


def test_S9_a_tip_that_we_are_past_is_no_fork() -> None:
    driver = Driver(feed(1, 20)).hears(Announce((feed(1, 10),)))
    assert driver.tell(Compared(key(1), tip(10), held=True)).sent(Request) == []
    assert driver.hears(Announce((feed(1, 10),))).all(Compare) == []


def test_S9_equal_lengths_with_different_links_are_compared() -> None:
    driver = Driver(feed(1, 5)).hears(Announce((feed(1, 5, branch=1),)))
    assert driver.all(Compare) == [Compare(key(1), tip(5, 1))]


def test_S9_a_branch_that_the_other_side_keeps_as_evidence_is_fetched() -> None:
    driver = Driver(feed(1, 5)).hears(Announce((feed(1, 5), feed(1, 4, branch=1, evidence=True))))
    assert driver.all(Compare) == [Compare(key(1), tip(4, 1))]
    request = driver.tell(Compared(key(1), tip(4, 1), held=False)).sent(Request)[0]
    assert (request.start, request.toward) == (3, tip(4, 1).link)


def test_S9_blocks_that_hook_nowhere_are_a_lie() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 5),))).hears(blocks(1, 0, 5))
    driver.tell(IngestRejected(key(1), Reason.BAD_LINK))
    assert driver.all(Score)[0].misbehaviour is Misbehaviour.LYING_HEAD
    assert driver.all(Close) == [Close(Misbehaviour.LYING_HEAD)]


@pytest.mark.parametrize(
    ("reason", "fatal", "misbehaviour"),
    [
        (Reason.BAD_SIGNATURE, False, Misbehaviour.BAD_SIGNATURE),
        (Reason.OVERSIZE, False, Misbehaviour.REJECTED),
        (Reason.INVALID, True, Misbehaviour.REJECTED),
        (Reason.BAD_LINK, True, Misbehaviour.REJECTED),
    ],
)
def test_what_no_honest_peer_sends_ends_the_session(reason: Reason, fatal: bool, misbehaviour: Misbehaviour) -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 5),))).hears(blocks(1, 0, 5))
    assert driver.tell(IngestRejected(key(1), reason, fatal)).all(Close) == [Close(misbehaviour)]


def test_a_feed_that_ended_is_left_alone_and_the_session_goes_on() -> None:
    driver = Driver(feed(1, 0), feed(2, 0)).hears(Announce((feed(1, 5),))).hears(blocks(1, 0, 5))
    driver.tell(IngestRejected(key(1), Reason.AFTER_INVALID))
    assert driver.hears(Announce((feed(1, 9), feed(2, 2)))).sent(Request)[0].feed == key(2)
    assert not driver.session.closed


def test_S10_a_request_is_served_range_by_range_within_its_bytes() -> None:
    driver = Driver(feed(1, 9)).hears(Request(1, key(1), 0, 9, 100, tip(9).link))
    assert [(read.start, read.blocks_max) for read in driver.all(Read)] == [(0, 9)]
    driver.tell(RangeRead(key(1), 0, (bytes(40),) * 2, Head(2, tip(2).link, bytes(64))))
    assert driver.sent(Blocks)[0].more
    assert [read.start for read in driver.all(Read)] == [2]
    driver.tell(RangeRead(key(1), 2, (bytes(40),), Head(3, tip(3).link, bytes(64))))
    assert driver.sent(Refusal) == [Refusal(key(1), 2, RefusalReason.OVERSIZE, 40)]
    assert driver.all(Read) == []


def test_S10_the_last_range_says_so() -> None:
    driver = Driver(feed(1, 3)).hears(Request(1, key(1), 1, 9, 1000, tip(3).link))
    driver.tell(RangeRead(key(1), 1, (b"x", b"y"), Head(3, tip(3).link, bytes(64))))
    assert [frame.more for frame in driver.sent(Blocks)] == [False]


def test_S10_serving_is_bounded() -> None:
    feeds = [feed(number, 9) for number in range(1, 101)]
    driver = Driver(*feeds)
    reads = refusals = 0
    for number in range(1, 101):
        driver.hears(Request(number, key(number), 0, 9, 1000, tip(9).link))
        reads += len(driver.all(Read))
        refusals += len(driver.sent(Refusal))
    assert (reads, refusals) == (READS_MAX, 100 - SERVES_MAX)


def test_S10_nothing_is_read_while_the_transport_is_full() -> None:
    driver = Driver(feed(1, 9)).tell(Writable(False)).hears(Request(1, key(1), 0, 9, 1000, tip(9).link))
    assert driver.all(Read) == []
    assert driver.tell(LocalHead(feed(1, 10))).sent(Announce) == []
    driver.tell(Writable(True))
    assert len(driver.all(Read)) == 1
    assert driver.sent(Announce) == [Announce((feed(1, 10),))]


def test_S10_a_repeated_request_is_served_once() -> None:
    driver = Driver(feed(1, 3))
    request = Request(1, key(1), 0, 3, 1000, tip(3).link)
    driver.hears(request).tell(RangeRead(key(1), 0, (b"x",) * 3, Head(3, tip(3).link, bytes(64))))
    assert driver.hears(request).effects == []


def test_S10_a_newer_request_replaces_one_that_is_being_read() -> None:
    driver = Driver(feed(1, 3)).hears(Request(1, key(1), 0, 3, 1000, tip(3).link))
    driver.hears(Request(2, key(1), 1, 2, 1000, tip(3).link))
    driver.tell(RangeRead(key(1), 0, (b"x",), Head(1, tip(1).link, bytes(64))))
    assert driver.sent(Blocks) == []
    assert [read.start for read in driver.all(Read)] == [1]


def test_blocks_that_are_gone_and_feeds_that_are_unknown_are_refused() -> None:
    driver = Driver(feed(1, 3)).hears(Request(1, key(1), 0, 3, 1000, tip(3).link))
    driver.tell(RangeMissing(key(1), 0, RefusalReason.COMPACTED))
    assert driver.sent(Refusal) == [Refusal(key(1), 0, RefusalReason.COMPACTED)]
    driver.hears(Request(2, key(9), 0, 3, 1000, tip(3).link))
    assert driver.sent(Refusal) == [Refusal(key(9), 0, RefusalReason.UNKNOWN_FEED)]


def test_S11_after_close_there_is_silence() -> None:
    driver = Driver(feed(1, 3)).tell(Malformed("no frame"))
    assert driver.effects == [Score(Misbehaviour.MALFORMED, "no frame"), Close(Misbehaviour.MALFORMED)]
    assert driver.hears(Announce((feed(1, 9),))).effects == []
    assert driver.session.wake_at() is None


def test_blocks_that_nobody_asked_for_are_dropped_and_a_flood_ends_the_session() -> None:
    driver = Driver(feed(1, 0))
    flood = blocks(1, 0, 1, size=8 * 1024 * 1024)
    for _ in range(8):
        assert driver.hears(flood).effects == []
    assert driver.hears(flood).all(Close) == [Close(Misbehaviour.FLOOD)]


def caught_up(length: int = 5) -> Driver:
    """The other side holds all that we have, and we know it."""
    return Driver(feed(1, length)).hears(Ack((AckEntry(key(1), length, length, tip(length).link),)))


def read(start: int, count: int, *, size: int = 10) -> RangeRead:
    one = blocks(1, start, count, size=size)
    return RangeRead(key(1), start, one.payloads, one.head)


def test_S13_what_we_write_is_sent_at_once_and_not_announced_beside() -> None:
    driver = caught_up().tell(LocalHead(feed(1, 6), own=True))
    assert driver.all(Read) == [Read(key(1), 5, 1, PUSH_BYTES_MAX, tip(6).link)]
    assert driver.sent(Announce) == []
    assert driver.tell(read(5, 1)).sent(Blocks) == [blocks(1, 5, 1)]
    # And the next one at once too, though nothing was acknowledged meanwhile.
    assert driver.tell(LocalHead(feed(1, 7), own=True)).all(Read)
    assert driver.tell(read(6, 1)).sent(Blocks) == [blocks(1, 6, 1)]


def test_S13_what_is_at_hand_is_sent_without_a_look_at_the_store() -> None:
    driver = caught_up().tell(LocalHead(feed(1, 6), own=True, written=blocks(1, 5, 1)))
    assert (driver.sent(Blocks), driver.all(Read), driver.sent(Announce)) == ([blocks(1, 5, 1)], [], [])
    assert driver.tell(LocalHead(feed(1, 6), own=True)).effects == [], "the store tells of it as well"
    again = driver.tell(LocalHead(feed(1, 7), own=True, written=blocks(1, 6, 1)))
    assert again.sent(Blocks) == [blocks(1, 6, 1)]
    assert again.wakes_until(Announce) == [Announce((feed(1, 7),))]


def test_S13_what_is_at_hand_is_read_from_the_store_when_it_is_not_all_that_lacks() -> None:
    gap = caught_up().tell(LocalHead(feed(1, 7), own=True, written=blocks(1, 6, 1)))
    assert (gap.sent(Blocks), [each.start for each in gap.all(Read)]) == ([], [5])
    large = caught_up().tell(LocalHead(feed(1, 6), own=True, written=blocks(1, 5, 1, size=PUSH_BYTES_MAX + 1)))
    assert large.sent(Blocks) == []
    behind = Driver(feed(1, 5)).hears(Ack((AckEntry(key(1), 4, 4, tip(5).link),)))
    assert behind.tell(LocalHead(feed(1, 6), own=True, written=blocks(1, 5, 1))).sent(Blocks) == []
    busy = caught_up().tell(LocalHead(feed(1, 6), own=True))
    assert busy.tell(LocalHead(feed(1, 7), own=True, written=blocks(1, 6, 1))).sent(Blocks) == [], (
        "after the one before"
    )


def test_S13_what_went_out_already_is_not_sent_again_and_is_expected_to_be_acknowledged() -> None:
    driver = caught_up()
    assert driver.session.may_push(blocks(1, 5, 1))
    driver.tell(LocalHead(feed(1, 6), own=True, written=blocks(1, 5, 1), sent=True))
    assert driver.effects == []
    assert driver.session.may_push(blocks(1, 6, 1)), "the next one too, before the ack"
    assert driver.wakes_until(Announce) == [Announce((feed(1, 6),))]


def test_S13_nothing_goes_out_early_that_would_not_go_out_at_once() -> None:
    news = blocks(1, 5, 1)
    assert not Driver(feed(1, 5)).session.may_push(news), "they have not said what they have"
    assert not Driver(feed(1, 5), greeted=False).session.may_push(news)
    assert not caught_up().session.may_push(blocks(2, 0, 1)), "a feed that nobody knows"
    assert not caught_up().session.may_push(blocks(1, 6, 1)), "one before it is not on its way yet"
    assert not caught_up().session.may_push(blocks(1, 5, 1, size=PUSH_BYTES_MAX + 1))
    assert not caught_up().tell(Writable(False)).session.may_push(news)
    assert not caught_up().hears(Announce((feed(1, 7),))).session.may_push(news), "they have more of our feed"
    assert not caught_up().tell(LocalHead(feed(1, 9, branch=1, evidence=True))).session.may_push(news), "it is forked"
    assert not caught_up().tell(Malformed("x")).session.may_push(news)
    waiting = caught_up().tell(LocalHead(feed(1, 6), own=True))
    assert waiting.all(Read)
    assert not waiting.session.may_push(blocks(1, 6, 1)), "the store still reads what comes before"


def test_S13_what_is_not_acknowledged_is_announced_after_all() -> None:
    driver = caught_up().tell(LocalHead(feed(1, 6), own=True)).tell(read(5, 1))
    assert driver.wakes_until(Announce) == [Announce((feed(1, 6),))]
    confirmed = caught_up().tell(LocalHead(feed(1, 6), own=True)).tell(read(5, 1))
    confirmed.hears(Ack((AckEntry(key(1), 6, 6, tip(6).link),)))
    assert confirmed.session.wake_at() is None


def test_S13_what_does_not_fit_is_announced() -> None:
    driver = caught_up().tell(LocalHead(feed(1, 6), own=True))
    assert driver.tell(read(5, 1, size=PUSH_BYTES_MAX + 1)).sent(Blocks) == []
    assert driver.sent(Announce) == [Announce((feed(1, 6),))]
    driver = caught_up().tell(LocalHead(feed(1, 9), own=True)).tell(read(5, 2))
    assert (driver.sent(Blocks), driver.sent(Announce)) == ([], [Announce((feed(1, 9),))])
    driver = caught_up().tell(LocalHead(feed(1, 6), own=True)).tell(RangeMissing(key(1), 5, RefusalReason.COMPACTED))
    assert (driver.sent(Refusal), driver.sent(Announce)) == ([], [Announce((feed(1, 6),))])


@pytest.mark.parametrize("held", [4, 6])
def test_S13_only_to_a_side_that_has_all_before_and_only_own_blocks(held: int) -> None:
    behind = Driver(feed(1, 5)).hears(Ack((AckEntry(key(1), held, held, tip(5).link),)))
    assert behind.tell(LocalHead(feed(1, 7), own=True)).all(Read) == []
    relayed = caught_up().tell(LocalHead(feed(1, 6)))
    assert (relayed.all(Read), relayed.sent(Announce)) == ([], [Announce((feed(1, 6),))])
    full = caught_up().tell(Writable(False)).tell(LocalHead(feed(1, 6), own=True))
    assert full.all(Read) == []


def test_S13_news_that_follows_on_news_which_waits_for_the_store_is_taken_too() -> None:
    driver = caught_up().hears(Announce((feed(1, 5),))).hears(blocks(1, 5, 1))
    driver.hears(blocks(1, 6, 1)).hears(blocks(1, 7, 1))
    assert driver.all(Ingest) == [], "one at a time"
    assert [each.start for each in driver.tell(Ingested(key(1), tip(6))).all(Ingest)] == [6]
    assert [each.start for each in driver.tell(Ingested(key(1), tip(7))).all(Ingest)] == [7]
    driver.tell(Ingested(key(1), tip(8)))
    assert (driver.sent(Request), driver.session.bytes_in_flight, driver.session.lacking()) == ([], 0, [])
    behind = caught_up().hears(blocks(1, 5, 1)).hears(Announce((feed(1, 9),))).hears(blocks(1, 6, 1))
    assert behind.session.bytes_in_flight >= 3, "what was asked for comes as an answer, not as news"
    fresh = caught_up().hears(blocks(1, 5, 1)).hears(blocks(1, 7, 1))
    assert fresh.tell(Ingested(key(1), tip(6))).all(Ingest) == [], "one in between is missing"


def test_S14_data_that_is_over_its_quota_is_asked_for_last() -> None:
    over = {key(2), key(3)}
    feeds = [feed(number, 0) for number in range(1, 6)]
    driver = Driver(*feeds, over=over).hears(Announce(tuple(feed(number, 5) for number in (2, 3, 4, 5))))
    assert [request.feed for request in driver.sent(Request)] == [key(4), key(5), key(2), key(3)]


def test_S14_a_feed_whose_quota_has_come_back_waits_like_the_others() -> None:
    over = {key(1)}
    long = 10 * CREDIT_BYTES // BLOCK_BYTES_GUESS
    driver = Driver(feed(1, 0), feed(2, 0), feed(3, 0), feed(4, 0), over=over)
    driver.hears(Announce(tuple(feed(number, long) for number in (1, 2, 3, 4))))
    assert [request.feed for request in driver.sent(Request)] == [key(2), key(3)], "credit is for two"
    asked: list[FeedKey] = []
    waiting, held = [2, 3], dict.fromkeys(range(1, 5), 0)
    for round_number in range(12):
        if round_number == 6:
            assert key(1) not in asked, "others want something all the time"
            over.clear()
        number = waiting.pop(0)
        driver.hears(blocks(number, held[number], 5))
        fresh = [request.feed for request in driver.sent(Request)]
        held[number] += 5
        driver.tell(Ingested(key(number), tip(held[number])))
        fresh += [request.feed for request in driver.sent(Request)]
        asked += fresh
        waiting += [each for each in held for one in fresh if one == key(each)]
    assert key(1) in asked


def test_S13_news_is_taken_when_it_is_the_next_of_a_known_feed() -> None:
    driver = caught_up().hears(Announce((feed(1, 5),))).hears(blocks(1, 5, 1))
    assert [(each.start, each.limbo) for each in driver.all(Ingest)] == [(5, False)]
    assert driver.all(Progress) == [Progress(key(1), 6, 5)]
    assert driver.sent(Request) == []
    done = driver.tell(Ingested(key(1), tip(6)), after_s=1)
    assert AckEntry(key(1), 6, 0, tip(6).link) in done.sent(Ack)[0].entries
    assert done.session.lacking() == []
    assert done.session.bytes_in_flight == 0


def test_S13_news_is_acknowledged_as_soon_as_it_is_held_and_what_was_asked_for_is_gathered() -> None:
    driver = caught_up().hears(Announce((feed(1, 5),)), after_s=1)
    for length in (6, 7, 8):
        assert driver.hears(blocks(1, length - 1, 1)).sent(Ack) == [], "not before the store has it"
        assert driver.tell(Ingested(key(1), tip(length))).sent(Ack) == [
            Ack((AckEntry(key(1), length, 0, tip(length).link),))
        ]
    driver.hears(Announce((feed(1, 9),))).hears(blocks(1, 8, 1))
    assert driver.tell(Ingested(key(1), tip(9))).sent(Ack) == []
    assert driver.wakes_until(Ack)[0].entries[-1] == AckEntry(key(1), 9, 0, tip(9).link)


def test_S13_news_goes_to_the_store_before_anybody_is_told_who_has_it() -> None:
    driver = caught_up().hears(Announce((feed(1, 5),))).hears(blocks(1, 5, 1))
    assert [type(each) for each in driver.effects if isinstance(each, Ingest | Progress)] == [Ingest, Progress]


@pytest.mark.parametrize(
    "news", [blocks(1, 6, 1), blocks(1, 4, 1), blocks(2, 0, 1), blocks(1, 5, 1, size=PUSH_BYTES_MAX + 1)]
)
def test_S13_nothing_else_is_taken_that_was_not_asked_for(news: Blocks) -> None:
    assert caught_up().hears(news).all(Ingest) == []


def test_S13_news_that_the_store_does_not_take_is_asked_for() -> None:
    driver = caught_up().hears(blocks(1, 5, 1)).tell(IngestRejected(key(1), Reason.WAITING))
    assert driver.wakes_until(Request)[0].start == 5


def test_progress_tells_what_the_other_side_has() -> None:
    driver = Driver(feed(1, 5)).hears(Ack((AckEntry(key(1), 3, 1, tip(5).link),)))
    assert driver.all(Progress) == [Progress(key(1), 3, 1)]
    assert driver.hears(Ack((AckEntry(key(1), 2, 1, tip(5).link),))).all(Progress) == []


def test_what_we_process_is_acknowledged() -> None:
    driver = Driver(feed(1, 5)).hears(Announce((feed(1, 5),))).tell(Processed(key(1), 4), after_s=1)
    assert driver.sent(Ack) == [Ack((AckEntry(key(1), 5, 4, tip(5).link),))]


def test_what_was_stored_is_acknowledged() -> None:
    driver = Driver(feed(1, 0)).hears(Announce((feed(1, 5),)), after_s=1).hears(blocks(1, 0, 5), after_s=1)
    assert driver.tell(Ingested(key(1), tip(5))).sent(Ack) == [Ack((AckEntry(key(1), 5, 0, tip(5).link),))]


def test_fork_proofs_that_are_news_are_reported_once() -> None:
    driver = Driver(greeted=False, proofs=(b"a" * 32,))
    hello = Hello(PROTOCOL_VERSION, (), (b"a" * 32, b"b" * 32))
    assert driver.hears(hello).all(ForkHeard) == [ForkHeard(b"b" * 32)]
    assert driver.hears(hello).all(ForkHeard) == []


# Frames and bytes

keys = st.binary(min_size=32, max_size=32)
lengths = st.integers(0, 1 << 47)
tips = st.lists(
    st.builds(
        FeedTip,
        keys.map(FeedKey),
        st.sampled_from((CONTROL, DATA)),
        st.builds(Tip, lengths, keys.map(Link)),
        st.booleans(),
    ),
    max_size=5,
).map(tuple)
frames = st.one_of(
    st.builds(Hello, st.integers(0, 1 << 31), tips, st.lists(keys, max_size=3).map(tuple)),
    st.builds(Announce, tips),
    st.builds(
        Request, lengths, keys.map(FeedKey), lengths, st.integers(1, 1 << 20), st.integers(1, 1 << 24), keys.map(Link)
    ),
    st.builds(
        lambda feed_key, start, payloads, head_link, signature, more: Blocks(
            feed_key, start, tuple(payloads), Head(start + len(payloads), head_link, signature), more
        ),
        keys.map(FeedKey),
        st.integers(0, 1 << 40),
        st.lists(st.binary(max_size=20), min_size=1, max_size=5),
        keys.map(Link),
        st.binary(min_size=64, max_size=64),
        st.booleans(),
    ),
    st.builds(Refusal, keys.map(FeedKey), lengths, st.sampled_from(RefusalReason), st.integers(0, 1 << 40)),
    st.builds(
        Ack,
        st.lists(st.builds(AckEntry, keys.map(FeedKey), lengths, lengths, keys.map(Link)), max_size=5).map(tuple),
    ),
)


@given(frames)
def test_frames_survive_their_bytes(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@given(frames, st.data())
def test_damaged_bytes_are_a_frame_or_malformed_and_nothing_else(frame: Frame, data: st.DataObject) -> None:
    good = bytearray(encode_frame(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        if good:
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    with suppress(MalformedFrame):
        decode_frame(bytes(good[:cut]))


K, S = bytes(32), bytes(64)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (pb.SyncFrame(), "without a kind"),
        (pb.SyncFrame(announce=pb.SyncTips(feeds=K, lengths=[1, 2], links=K, flags=b"\0")), "unequal columns"),
        (pb.SyncFrame(announce=pb.SyncTips(feeds=K, lengths=[1], links=K + K, flags=b"\0")), "unequal columns"),
        (pb.SyncFrame(announce=pb.SyncTips(feeds=K, lengths=[1], links=K, flags=b"\4")), "unknown flag"),
        (pb.SyncFrame(announce=pb.SyncTips(feeds=K[1:], lengths=[1], links=K, flags=b"\0")), "of 32 each"),
        (pb.SyncFrame(announce=pb.SyncTips(feeds=K, lengths=[1 << 60], links=K, flags=b"\0")), "a length above"),
        (pb.SyncFrame(ack=pb.SyncAck(feeds=K, held=[1], processed=[], heard=K)), "unequal columns"),
        (pb.SyncFrame(ack=pb.SyncAck(feeds=K, held=[1], processed=[1 << 60], heard=K)), "a length above"),
        (pb.SyncFrame(request=pb.SyncRequest(feed=K, toward=K, bytes_max=9)), "a request for nothing"),
        (pb.SyncFrame(request=pb.SyncRequest(feed=K[1:], toward=K, blocks_max=9, bytes_max=9)), "31 bytes where 32"),
        (pb.SyncFrame(blocks=pb.SyncBlocks(feed=K, head_link=K, head_signature=S)), "a range of 0 blocks"),
        (
            pb.SyncFrame(blocks=pb.SyncBlocks(feed=K, payloads=[b""] * 70_000, head_link=K, head_signature=S)),
            "a range of 70000 blocks",
        ),
        (
            pb.SyncFrame(blocks=pb.SyncBlocks(feed=K, payloads=[b"x"], head_link=K, head_signature=S[1:])),
            "63 bytes where 64",
        ),
        (pb.SyncFrame(refusal=pb.SyncRefusal(feed=K, evidence=b"x")), "no CID"),
    ],
)
def test_a_sound_message_that_breaks_a_rule_of_frames_is_malformed(message: pb.SyncFrame, what: str) -> None:
    """What the parser takes and we do not: damaged bytes seldom get so far."""
    with pytest.raises(MalformedFrame, match=what):
        decode_frame(message.SerializeToString())


def test_a_frame_of_every_kind_has_the_same_bytes_as_ever() -> None:
    """A golden vector: what older peers say is understood for ever."""
    frame = Request(1, key(2), 3, 4, 5, link(6))
    assert encode_frame(frame).hex() == (f"1a4c08011220{key(2).hex()}1803200428053220{link(6).hex()}"), encode_frame(
        frame
    ).hex()


def test_an_oversize_frame_is_refused_before_it_is_parsed() -> None:
    """By a frame that is sound but for its size, and by what it says: the parser would take it."""
    announce = encode_frame(Announce(()))
    padding = FRAME_BYTES_MAX + 1 - len(announce) - len(FIELD_NOBODY_KNOWS) - 4
    data = announce + FIELD_NOBODY_KNOWS + length_of_four_bytes(padding) + bytes(padding)
    assert len(data) == FRAME_BYTES_MAX + 1
    with pytest.raises(MalformedFrame, match=f"{FRAME_BYTES_MAX + 1} bytes, at most {FRAME_BYTES_MAX}"):
        decode_frame(data)
    shorter = announce + FIELD_NOBODY_KNOWS + length_of_four_bytes(padding - 1) + bytes(padding - 1)
    assert decode_frame(shorter) == Announce(())


FIELD_NOBODY_KNOWS = b"\xfa\x7f"
"""Number 2047, of bytes."""


def length_of_four_bytes(length: int) -> bytes:
    """As protobuf writes it, in four bytes where fewer would do too."""
    return bytes([length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21])


# Whole sessions over bad links


def bounded(world: World) -> None:
    for end in world.endpoints():
        assert end.session.requests_open <= REQUESTS_MAX, "S2"
        assert end.session.bytes_in_flight <= max(CREDIT_BYTES, APPEND_BYTES_MAX), "S3"


@given(
    seed=st.integers(0, 1 << 32),
    peers=st.integers(2, 3),
    loss=st.floats(0, 0.3),
    duplication=st.floats(0, 0.5),
    delay_s=st.floats(0.002, 0.5),
)
def test_sessions_converge_over_lossy_repeating_reordering_links(
    seed: int, peers: int, loss: float, duplication: float, delay_s: float
) -> None:
    world = World(seed, peers=peers, faults=Faults(loss=loss, duplication=duplication, delay_max_s=delay_s))
    for _ in range(5):
        world.chaos(1)
        bounded(world)
    world.revive().settle()
    bounded(world)
    assert world.scores == []


def test_a_quiet_link_stays_quiet() -> None:
    """S7, S8: once all is held and acknowledged, not one frame more is sent."""
    world = World(3, peers=3)
    world.write("a").write("b").settle().run(30)
    frames_before = len(world.trace)
    world.run(600)
    assert len(world.trace) == frames_before


def test_a_dead_link_costs_little() -> None:
    """S7: nobody answers for ten minutes; what is repeated stays within one frame of a kind per RETRY_MAX_S."""
    world = World(3, peers=2).settle().partition("a|b").write("a").write("b")
    before = len(world.trace)
    world.run(600)
    assert len(world.trace) - before < 2 * 3 * 600 / RETRY_MAX_S


@pytest.mark.parametrize("seed", range(20))
def test_S9_a_fork_reaches_everybody(seed: int) -> None:
    """A writer forks between two peers that do not see each other: all end with both branches and one state."""
    chance = random.Random(seed)
    world = World(seed, peers=3, faults=Faults.swarm(chance), links=chance.choice(("ab,bc", "ab,bc,ac")))
    for number in range(chance.randrange(2, 30)):
        world.write("abc"[number % 3])
    world.settle().partition("a|bc")
    for _ in range(chance.randrange(1, 5)):
        world.write("a")
    victim, clone = world.nodes["a"], world.nodes["b"]
    assert isinstance(victim, MemoryNode)
    assert isinstance(clone, MemoryNode)
    # While b is down, the end of a's feed on its disk is replaced by what a clone of a would have written.
    world.crash("b")
    at = chance.randrange(0, clone.length(victim.data))
    clone.forge(victim.data, [f"another truth {number}" for number in range(chance.randrange(1, 20))], at=at)
    world.restart("b")
    world.heal()
    for name in "abc":
        world.write(name)
    world.run(60)
    held = [sorted(each.tip for each in world.nodes[name].port().tips(victim.data)) for name in "abc"]
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 2
    assert len({world.nodes[name].state()[1] for name in "abc"}) == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("links", ["ab,bc,cd", None])
def test_S9_a_proof_reaches_everybody_within_three_rounds(seed: int, links: str | None) -> None:
    """A round is the time after which a tip is told again. It counts from when the first peer holds both branches."""
    world = World(seed, peers=4, links=links)
    for number in range(12):
        world.write("abcd"[number % 4])
    world.settle().partition("ab|cd").write("a").run(5).crash("d")
    victim, clone = world.nodes["a"], world.nodes["d"]
    assert isinstance(victim, MemoryNode)
    assert isinstance(clone, MemoryNode)
    clone.forge(victim.data, ["another truth"], at=clone.length(victim.data))
    world.restart("d").run(60).heal()

    def holds_proof(name: str) -> bool:
        return len(list(world.nodes[name].port().tips(victim.data))) == 2

    while not any(map(holds_proof, "abcd")):
        world.run(0.05)
        assert world.now < 600
    world.run(3 * ANNOUNCE_RETRY_S)
    assert all(map(holds_proof, "abcd"))


def test_two_ports_are_linked_cut_and_healed_in_memory() -> None:
    one, other = MemoryNode("a"), MemoryNode("b")
    joined = connect(one, other).pump()
    one.write("first")
    one.flush()
    joined.pump()
    assert one.state() == other.state()
    joined.cut()
    one.write("second")
    one.flush()
    joined.pump()
    assert one.state() != other.state()
    assert joined.heal().pump() is joined
    assert one.state() == other.state()
    assert joined.scores == []


def test_a_long_feed_arrives_in_large_ranges() -> None:
    one, other = MemoryNode("a"), MemoryNode("b")
    for _ in range(100):
        for number in range(100):
            one.write(f"message {number} with some content, to have a size")
        one.flush()
    joined = connect(one, other).pump()
    assert one.state() == other.state()
    assert joined.frames < 150, "about one frame for each 256 KiB, and few others"


def test_a_range_larger_than_the_credit_arrives() -> None:
    one, other = MemoryNode("a"), MemoryNode("b")
    one.write("x" * (CREDIT_BYTES + 1))
    one.flush()
    connect(one, other).pump()
    assert one.state() == other.state()
