"""Identifiers, their text forms, timeframes and stamps."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.ids import (
    ARC_BIT,
    BlockRef,
    FeedId,
    FeedKey,
    ItemId,
    Link,
    PartyKey,
    Stamp,
    created_item_id,
    feed_id,
    item_creator,
    item_from_text,
    item_id,
    item_local,
    item_text,
)
from echostore.kernel.limits import OPERATIONS_MAX, SEQ_MAX
from echostore.kernel.timeframe import EMPTY, Position, Timeframe, link_prefix
from echostore.kernel.values import Reference, locator, parse_locator, reference_from_text

ITEM_IDS = st.binary(min_size=16, max_size=16).map(ItemId)
PARTY = PartyKey(bytes(range(32)))


@given(ITEM_IDS)
def test_the_text_of_an_item_id_reads_back(item: ItemId) -> None:
    text = item_text(item)
    assert len(text) == 32
    assert item_from_text(text) == item
    assert item_from_text(text.upper()) == item
    assert item_id(item_creator(item), item_local(item)) == item


def test_the_text_of_an_item_id_is_what_it_always_was() -> None:
    """Texts of ids are in links and notes of people: the mixing never changes."""
    assert item_text(ItemId(bytes(16))) == "0" * 32
    assert item_text(created_item_id(FeedId(b"\x01" * 8), 5, 3)) == "51fe95e67f7b59d70101010101010101"
    assert item_text(ItemId(bytes(range(16)))) == "12bde81c0c57d7560001020304050607"


def test_short_prefixes_tell_the_items_of_one_feed_apart() -> None:
    feed = FeedId(b"\x01" * 8)
    prefixes = {item_text(created_item_id(feed, seq, position))[:8] for seq in range(200) for position in range(5)}
    assert len(prefixes) == 1000


@pytest.mark.parametrize("text", ["", "00", "0" * 31, "0" * 33, "g" * 32, "0" * 30 + "é", " " + "0" * 32, "0 " * 32])
def test_a_text_that_is_no_item_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        item_from_text(text)


def test_created_items_have_numbers_below_the_arcs_and_sort_by_place() -> None:
    feed = feed_id(FeedKey(bytes(range(32))))
    assert feed == bytes(range(8))
    last = created_item_id(feed, SEQ_MAX, OPERATIONS_MAX - 1)
    assert item_local(last) == ARC_BIT - 1
    assert item_creator(last) == feed
    places = [(0, 0), (0, 1), (0, OPERATIONS_MAX - 1), (1, 0), (SEQ_MAX, 0)]
    ids = [created_item_id(feed, seq, position) for seq, position in places]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_stamps_compare_as_the_canonical_order() -> None:
    a, b = FeedId(b"a" * 8), FeedId(b"b" * 8)
    order = [
        Stamp(1, a, 9, 9),
        Stamp(1, b, 0, 0),
        Stamp(2, a, 0, 5),
        Stamp(2, a, 1, 0),
        Stamp(2, a, 1, 1),
        Stamp(3, a, 0, 0),
    ]
    shuffled = list(order)
    random.Random(1).shuffle(shuffled)
    assert sorted(shuffled) == order


def test_two_blocks_at_one_place_are_two_references() -> None:
    feed = FeedId(b"a" * 8)
    assert BlockRef(feed, 1, b"x") != BlockRef(feed, 1, b"y")


# locators


@given(ITEM_IDS)
def test_a_locator_reads_back(item: ItemId) -> None:
    text = locator(item, PARTY)
    assert parse_locator(text) == (PARTY, item_text(item))
    assert reference_from_text(text) == Reference(item, PARTY)
    assert reference_from_text(item_text(item)) == Reference(item)
    assert reference_from_text(str(Reference(item, PARTY))) == Reference(item, PARTY)
    assert str(Reference(item)) == item_text(item)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "echo://",
        "http://" + "00" * 32 + "/" + "00" * 16,
        "echo://" + "00" * 31 + "/" + "00" * 16,
        "echo://" + "00" * 32,
        "echo://" + "00" * 32 + "/" + "00" * 15,
        "echo://" + "00" * 32 + "/" + "zz" * 16,
        "echo://" + "00 " * 32 + "/" + "00" * 16,
        "echo://" + "00" * 32 + "/ " + "00" * 16,
        "echo://" + "00" * 32 + "/" + "00" * 15 + "  ",
        "echo://" + "00" * 32 + "/" + "00" * 16 + "/more",
    ],
)
def test_a_text_that_is_no_locator_is_refused(text: str) -> None:
    from echostore.kernel.errors import UsageError

    with pytest.raises(UsageError, match="is not a locator"):
        parse_locator(text)


def test_a_view_is_named_by_its_inception_key() -> None:
    assert parse_locator("echo://" + "01" * 32 + "/" + "02" * 32) == (b"\x01" * 32, "02" * 32)


# timeframes

FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(4)]
LINKS = [Link(bytes([number]) * 32) for number in range(3)]
TIMEFRAMES = st.dictionaries(
    st.sampled_from(FEEDS), st.tuples(st.integers(0, 3), st.sampled_from(LINKS)).map(lambda pair: Position(*pair))
).map(lambda entries: Timeframe.of(entries.items()))


@given(TIMEFRAMES, TIMEFRAMES, TIMEFRAMES)
def test_the_join_of_timeframes_is_the_same_in_any_order(one: Timeframe, two: Timeframe, three: Timeframe) -> None:
    assert one.join(two) == two.join(one)
    assert one.join(two).join(three) == one.join(two.join(three))
    assert one.join(one) == one
    assert one.join(EMPTY) == one
    assert list(one.join(two)) == sorted(one.join(two))
    joined = one.join(two)
    for feed in FEEDS:
        assert joined.length(feed) == max(one.length(feed), two.length(feed))
        assert joined.includes_seqs(one)


@given(TIMEFRAMES, TIMEFRAMES)
def test_a_timeframe_includes_what_it_covers_on_the_same_branch(one: Timeframe, two: Timeframe) -> None:
    expected = all(
        one.covers(feed, at.seq) and (one[feed].seq > at.seq or one[feed].link == at.link)
        for feed, at in two.entries.items()
    )
    assert one.includes(two) is expected
    assert one.includes(one)
    assert one.includes(EMPTY)
    assert one.includes_seqs(two) == all(one.length(feed) >= two.length(feed) for feed in FEEDS)


def test_a_timeframe_is_a_map_of_what_was_reached() -> None:
    timeframe = Timeframe.of([(FEEDS[1], Position(4, LINKS[0])), (FEEDS[0], Position(0, LINKS[1]))])
    assert list(timeframe) == FEEDS[:2]
    assert (len(timeframe), FEEDS[0] in timeframe, FEEDS[2] in timeframe) == (2, True, False)
    assert (timeframe.length(FEEDS[1]), timeframe.length(FEEDS[2])) == (5, 0)
    assert timeframe.covers(FEEDS[1], 4)
    assert not timeframe.covers(FEEDS[1], 5)
    assert not timeframe.covers(FEEDS[2], 0)
    assert str(timeframe) == "{41414141:0, 42424242:4}"
    assert link_prefix(LINKS[2]) == b"\2" * 16
