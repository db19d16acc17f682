"""Feeds that wait for their admission: how many, how long, of whom. Invariants W1 to W3 of `kernel.sync.limbo`."""

import pytest

from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey, Link
from echostore.kernel.sync.limbo import BYTES_MAX, FEEDS_MAX, NEWCOMER_FEEDS_MAX, SECONDS, Limbo, Waiting


def feed(number: int) -> FeedKey:
    return FeedKey(number.to_bytes(32, "big"))


def device(number: int) -> DeviceKey:
    return DeviceKey(number.to_bytes(32, "little"))


def waiting(number: int, newcomer: int | None = None, *, size: int = 100, since: float = 0.0) -> Waiting:
    brought_by = None if newcomer is None else device(newcomer)
    return Waiting(feed(number), (bytes(size),), Head(1, Link(bytes(32)), bytes(64)), brought_by, since)


def feeds(limbo: Limbo) -> list[int]:
    return [int.from_bytes(each.feed, "big") for each in limbo]


@pytest.fixture
def limbo() -> Limbo:
    return Limbo()


def test_w1_feeds_and_bytes_are_bounded(limbo: Limbo) -> None:
    for number in range(200):
        assert limbo.keep(waiting(number))
    assert feeds(limbo) == list(range(200 - FEEDS_MAX, 200)), "the oldest go"
    for number in range(200, 300):
        assert limbo.keep(waiting(number, size=BYTES_MAX // 10))
    assert limbo.size_bytes <= BYTES_MAX
    assert not limbo.keep(waiting(999, size=BYTES_MAX + 1))


def test_w1_what_waits_too_long_is_forgotten(limbo: Limbo) -> None:
    limbo.keep(waiting(1, since=100.0))
    limbo.keep(waiting(2, since=200.0))
    limbo.expire(99.0 + SECONDS)
    assert feeds(limbo) == [1, 2]
    limbo.expire(100.0 + SECONDS)
    assert feeds(limbo) == [2]
    limbo.keep(waiting(3, since=200.0 + SECONDS))
    assert feeds(limbo) == [3]
    assert limbo.expired == 2


def test_w1_to_bring_a_feed_again_gives_it_no_more_time(limbo: Limbo) -> None:
    limbo.keep(waiting(1, 7, since=0.0))
    assert limbo.keep(waiting(1, 7, since=SECONDS - 1))
    assert not limbo.keep(waiting(1, 7, size=99, since=SECONDS - 1)), "another beginning of the same feed"
    limbo.expire(SECONDS)
    assert feeds(limbo) == []


def test_w2_one_newcomer_has_few_and_loses_its_own(limbo: Limbo) -> None:
    limbo.keep(waiting(1, 7))
    for number in range(10, 10 + NEWCOMER_FEEDS_MAX + 2):
        assert limbo.keep(waiting(number, 8))
    assert feeds(limbo) == [1, 12, 13, 14, 15]


def test_w2_newcomers_have_half_of_the_room_and_the_busiest_loses(limbo: Limbo) -> None:
    limbo.keep(waiting(1, 1))
    for number in range(2, 500):
        assert limbo.keep(waiting(number, 1_000 + number % 8))
    assert len(limbo) == FEEDS_MAX // 2
    assert 1 in feeds(limbo), "who brought one feed keeps it while others bring several"


def test_w2_newcomers_evict_no_feed_of_a_known_device(limbo: Limbo) -> None:
    for number in range(FEEDS_MAX):
        limbo.keep(waiting(number))
    assert not limbo.keep(waiting(100, 7))
    assert feeds(limbo) == list(range(FEEDS_MAX))


def test_w2_newcomers_have_half_of_the_bytes(limbo: Limbo) -> None:
    for number in range(20):
        limbo.keep(waiting(number, number, size=BYTES_MAX // 10))
    assert limbo.size_bytes <= BYTES_MAX // 2
    assert not limbo.keep(waiting(100, 100, size=BYTES_MAX // 2 + 1))


def test_w3_a_known_device_always_has_room_and_evicts_newcomers_first(limbo: Limbo) -> None:
    for number in range(FEEDS_MAX // 2):
        limbo.keep(waiting(number, number))
    for number in range(100, 100 + FEEDS_MAX // 2):
        limbo.keep(waiting(number))
    assert len(limbo) == FEEDS_MAX
    assert limbo.keep(waiting(200))
    assert feeds(limbo)[0] == 1, "the oldest newcomer went"
    assert limbo.evicted == 1
