"""FeedStore: what it holds, refuses, keeps of forks, and finds damaged. F1 to F5 are named in feed_store.py."""

import dataclasses
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from crash_disk import Disk
from echostore.kernel.errors import Closed, Corrupt, EchoError, NotFound, Refused, TooLarge, UsageError
from echostore.kernel.feed import Head
from echostore.kernel.ids import LINK_PREFIX_BYTES, NO_LINK, FeedKey, PartyKey
from echostore.kernel.limits import APPEND_BLOCKS_MAX, BLOCK_BYTES_MAX
from echostore.kernel.reasons import Reason
from echostore.store import feed_store
from echostore.store.feed_store import Append, FeedStore, Ingested, Range, Rejection
from echostore.store.sqlite import Connect, connect_file
from echostore.wire.links import fork_proven
from echostore.wire.signing import verify
from feed_builder import PARTY, Writer, payloads, signing_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feeds.db"


@pytest.fixture
def store(path: Path) -> Iterator[FeedStore]:
    with FeedStore(path, PARTY) as opened:
        yield opened


def held(store: FeedStore, key: FeedKey) -> list[bytes]:
    return [block.payload for block in store.read(key)]


def filled(store: FeedStore, *appends: int, name: str = "a", own: bool = False) -> Writer:
    writer = Writer(name)
    store.add_feed(writer.key, "data", own=own)
    for number, count in enumerate(appends):
        store.append(writer.key, *writer.write(*payloads(count, f"{name} {number}")))
    return writer


# -- appending and reading ---------------------------------------------------------------------------------------


def test_appended_blocks_are_read_back_after_opening_again(path: Path) -> None:
    with FeedStore(path, PARTY) as store:
        writer = filled(store, 3, 2, own=True)
    with FeedStore(path, PARTY) as store:
        assert held(store, writer.key) == writer.payloads
        assert [block.link for block in store.read(writer.key)] == writer.links
        assert (store.length(writer.key), store.last_link(writer.key)) == (5, writer.links[-1])
        (feed,) = store.feeds()
        assert (feed.key, feed.kind, feed.own, feed.length) == (writer.key, "data", True, 5)
        assert store.heads(writer.key) == [writer.head(3), writer.head(5)]
        assert store.heads(writer.key, 3) == [writer.head(5)]
        assert store.head_covering(writer.key, 2) == writer.head(3)
        assert store.head_covering(writer.key, 3) == writer.head(5)
        assert store.head_covering(writer.key, 5) is None
        assert [store.link_at(writer.key, seq) for seq in (-1, 0, 4, 5)] == [
            None,
            writer.links[0],
            writer.links[4],
            None,
        ]
        assert store.block(writer.key, 4).payload == writer.payloads[4]
        assert store.verify(writer.key).sound


def test_an_empty_feed_has_length_zero(store: FeedStore) -> None:
    writer = filled(store)
    assert (store.length(writer.key), store.last_link(writer.key)) == (0, NO_LINK)
    assert held(store, writer.key) == []
    assert store.verify(writer.key).sound
    assert store.range_ending_at_head(writer.key, 0) is None


def test_a_feed_that_was_not_added_is_not_found(store: FeedStore) -> None:
    stranger = Writer("stranger")
    assert not store.has_feed(stranger.key)
    for call in (store.length, store.last_link, store.verify, store.heads, store.branches):
        with pytest.raises(NotFound):
            call(stranger.key)
    with pytest.raises(NotFound):
        store.ingest(stranger.key, 0, *stranger.range(0), verify)


def test_adding_a_feed_twice_is_nothing_and_changing_it_is_refused(store: FeedStore) -> None:
    writer = filled(store, 1)
    store.add_feed(writer.key, "data")
    assert store.length(writer.key) == 1
    with pytest.raises(Refused):
        store.add_feed(writer.key, "control")


def test_append_many_is_all_or_none(store: FeedStore) -> None:
    a, b = filled(store, 1, name="a"), filled(store, name="b")
    good, wrong = Append(a.key, *a.write(b"x")), Append(b.key, *b.write(b"y", b"z"))
    with pytest.raises(UsageError):
        store.append_many([good, dataclasses.replace(wrong, start_seq=1)])
    assert (store.length(a.key), store.length(b.key)) == (1, 0)
    again = a.payloads[1:]
    store.append_many([good, wrong])
    assert held(store, a.key)[1:] == again
    assert held(store, b.key) == b.payloads


def test_facts_beside_an_append_are_kept_with_it_or_not_at_all(store: FeedStore) -> None:
    writer = filled(store)
    first = Append(writer.key, *writer.write(b"1"))
    with pytest.raises(UsageError):
        store.append_many([dataclasses.replace(first, start_seq=5)], {"count/a": b"1"})
    assert store.about_under("count/") == {}
    store.append_many([first], {"count/a": b"1", "count/b": b"2"})
    store.append_many([Append(writer.key, *writer.write(b"2"))], {"count/a": b"3", "countless": b"4"})
    assert store.about_under("count/") == {"count/a": b"3", "count/b": b"2"}
    assert store.about_names("count/") == ["count/a", "count/b"]
    store._db.execute("UPDATE about SET value = ? WHERE name = ?", (b"9", "count/b"))
    with pytest.raises(Corrupt):
        store.about_under("count/")
    with pytest.raises(Corrupt):
        store.about("count/b")


def test_two_appends_to_one_feed_in_one_commit(store: FeedStore) -> None:
    writer = filled(store)
    store.append_many([Append(writer.key, *writer.write(b"1")), Append(writer.key, *writer.write(b"2", b"3"))])
    assert held(store, writer.key) == [b"1", b"2", b"3"]
    assert store.verify(writer.key).heads == 2


def test_an_append_that_does_not_fit_is_refused_and_changes_nothing(store: FeedStore) -> None:
    writer = filled(store, 2)
    start, blocks, links, head = writer.write(*payloads(2, "new"))
    for wrong in (
        (start - 1, blocks, links, head),
        (start + 1, blocks, links, head),
        (start - 1, blocks, links, dataclasses.replace(head, length=head.length - 1)),
        (start + 1, blocks, links, dataclasses.replace(head, length=head.length + 1)),
        (start, [], [], head),
        (start, blocks, links[:1], head),
        (start, blocks, links, dataclasses.replace(head, length=9)),
        (start, blocks, links, dataclasses.replace(head, link=NO_LINK)),
    ):
        with pytest.raises(UsageError):
            store.append(writer.key, *wrong)
    assert store.length(writer.key) == 2
    large = Writer("a").write(bytes(BLOCK_BYTES_MAX + 1))
    store.add_feed(Writer("large").key, "data")
    with pytest.raises(TooLarge):
        store.append(Writer("large").key, *large)


def test_reading_goes_by_chunks_and_stops_at_a_number_of_bytes(
    store: FeedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_store, "CHUNK_BLOCKS", 3)
    monkeypatch.setattr(feed_store, "CHUNK_BYTES", 100)
    writer = filled(store, 10, 7)
    assert held(store, writer.key) == writer.payloads
    assert [block.seq for block in store.read(writer.key, 4, 9)] == [4, 5, 6, 7, 8]
    assert [block.seq for block in store.read(writer.key, 15, 99)] == [15, 16]
    assert list(store.read(writer.key, 17)) == []
    size = len(writer.payloads[0])
    assert len(list(store.read(writer.key, limit_bytes=1))) == 1
    assert len(list(store.read(writer.key, limit_bytes=size))) == 1
    assert len(list(store.read(writer.key, limit_bytes=5 * size + 1))) == 6


def test_a_block_that_is_not_held_is_not_found(store: FeedStore) -> None:
    writer = filled(store, 2)
    for seq in (-1, 2, 1 << 45):
        with pytest.raises(NotFound):
            store.block(writer.key, seq)


def test_a_feed_may_begin_at_a_base(path: Path) -> None:
    writer = Writer("a")
    writer.write(*payloads(5))
    writer.write(*payloads(3, "tail"))
    with FeedStore(path, PARTY) as store:
        store.add_feed(writer.key, "data", base=5, base_link=writer.links[4])
        assert store.length(writer.key) == 5
        early = store.ingest(writer.key, 3, *writer.range(3), verify)
        assert isinstance(early, Rejection)
        assert early.reason is Reason.GAP
        assert store.ingest(writer.key, 5, *writer.range(5), verify) == Ingested(5, writer.links[5:])
    with FeedStore(path, PARTY) as store:
        assert held(store, writer.key) == writer.payloads[5:]
        assert store.link_at(writer.key, 4) == writer.links[4]
        assert store.link_at(writer.key, 3) is None
        assert store.verify(writer.key).sound


# -- receiving ---------------------------------------------------------------------------------------------------


def test_a_received_range_is_checked_and_held(store: FeedStore) -> None:
    writer = Writer("a")
    store.add_feed(writer.key, "data")
    writer.write(*payloads(4))
    assert store.ingest(writer.key, 0, *writer.range(0), verify) == Ingested(0, writer.links)
    writer.write(*payloads(3, "more"))
    overlapping = store.ingest(writer.key, 2, *writer.range(2), verify)
    assert overlapping == Ingested(4, writer.links[4:])
    assert store.ingest(writer.key, 0, *writer.range(0, 5), verify) == Ingested(7, [])
    assert held(store, writer.key) == writer.payloads
    assert store.verify(writer.key).sound


def test_a_range_that_can_not_be_checked_is_not_held(store: FeedStore) -> None:
    writer = filled(store, 3)
    writer.write(*payloads(3, "more"))
    blocks, head = writer.range(3)
    assert rejected(store, writer, 4, *writer.range(4)) is Reason.GAP
    assert rejected(store, writer, 3, blocks[:2], head) is Reason.BAD_LINK
    assert rejected(store, writer, 3, [*blocks[:2], b"altered"], head) is Reason.BAD_LINK
    assert rejected(store, writer, 3, blocks, dataclasses.replace(head, signature=bytes(64))) is Reason.BAD_SIGNATURE
    assert rejected(store, writer, 3, [b""] * (APPEND_BLOCKS_MAX + 1), head) is Reason.OVERSIZE
    assert rejected(store, writer, -1, blocks, head) is Reason.OVERSIZE
    assert rejected(store, writer, 3, [], Head(1 << 70, NO_LINK, b"")) is Reason.BAD_LINK
    assert store.length(writer.key) == 3
    assert store.forks() == []


def rejected(store: FeedStore, writer: Writer, start: int, blocks: list[bytes], head: Head) -> Reason:
    outcome = store.ingest(writer.key, start, blocks, head, verify)
    assert isinstance(outcome, Rejection)
    return outcome.reason


def test_a_genuine_head_over_other_links_hints_at_an_earlier_fork(store: FeedStore) -> None:
    writer = filled(store, 4)
    other = writer.branch(1)
    other.write(*payloads(6, "other"))
    outcome = store.ingest(writer.key, 4, *other.range(4), verify)
    assert isinstance(outcome, Rejection)
    assert (outcome.reason, outcome.head_signed) == (Reason.BAD_LINK, True)


def test_ranges_of_many_feeds_share_a_commit_and_are_judged_alone(store: FeedStore) -> None:
    writers = [filled(store, name=name) for name in "abc"]
    for writer in writers:
        writer.write(*payloads(2, writer.name))
    ranges = [Range(writer.key, 0, *writer.range(0)) for writer in writers]
    ranges[1] = dataclasses.replace(ranges[1], payloads=[b"altered", b"altered"])
    outcomes = store.ingest_many(ranges, verify)
    assert [isinstance(outcome, Ingested) for outcome in outcomes] == [True, False, True]
    assert [store.length(writer.key) for writer in writers] == [2, 0, 2]


def test_a_range_for_a_peer_ends_at_a_head(store: FeedStore) -> None:
    writer = filled(store, 3, 4, 5)
    size = len(writer.payloads[0])
    assert store.range_ending_at_head(writer.key, 0) == writer.range(0)
    assert store.range_ending_at_head(writer.key, 1, max_blocks=7) == writer.range(1, 7)
    assert store.range_ending_at_head(writer.key, 0, max_blocks=6) == writer.range(0, 3)
    assert store.range_ending_at_head(writer.key, 4, max_blocks=1) == writer.range(4, 7)
    assert store.range_ending_at_head(writer.key, 0, max_bytes=8 * size) == writer.range(0, 7)
    assert store.range_ending_at_head(writer.key, 0, max_bytes=1) == writer.range(0, 3)
    assert store.range_ending_at_head(writer.key, 12) is None
    assert store.range_ending_at_head(writer.key, -1) is None


def test_what_one_store_sends_another_holds(tmp_path: Path) -> None:
    with FeedStore(tmp_path / "a.db", PARTY) as source, FeedStore(tmp_path / "b.db", PARTY) as target:
        writer = filled(source, *range(1, 60))
        target.add_feed(writer.key, "data")
        while (found := source.range_ending_at_head(writer.key, target.length(writer.key), max_blocks=100)) is not None:
            assert isinstance(target.ingest(writer.key, target.length(writer.key), *found, verify), Ingested)
        assert held(target, writer.key) == writer.payloads
        assert target.verify(writer.key).sound


# -- forks -------------------------------------------------------------------------------------------------------


def test_a_fork_keeps_both_branches_and_proves_itself(path: Path) -> None:
    with FeedStore(path, PARTY) as store:
        left = filled(store, 2, 3)
        right = left.branch(3)
        right.write(*payloads(2, "right"))
        outcome = store.ingest(left.key, 1, *right.range(1), verify)
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.FORK
        assert outcome.proof is not None
    with FeedStore(path, PARTY) as store:
        assert store.forks() == [outcome.proof]
        assert (outcome.proof.seq, outcome.proof.left_head, outcome.proof.right_head) == (3, left.head(), right.head())
        assert fork_proven(outcome.proof, verify)
        assert held(store, left.key) == left.payloads
        for seq in (3, 4):
            prefix = right.links[seq][:LINK_PREFIX_BYTES]
            block = store.fork_block(left.key, seq, prefix)
            assert block is not None
            assert (block.payload, block.link) == (right.payloads[seq], right.links[seq])
        held_prefix = left.links[3][:LINK_PREFIX_BYTES]
        assert store.fork_block(left.key, 3, held_prefix) == store.block(left.key, 3)
        assert store.fork_block(left.key, 3, bytes(LINK_PREFIX_BYTES)) is None
        assert store.verify(left.key).sound


def test_both_branches_go_on_and_can_branch_again(store: FeedStore) -> None:
    left = filled(store, 4)
    right = left.branch(2)
    right.write(*payloads(2, "right"))
    store.ingest(left.key, 0, *right.range(0), verify)
    assert isinstance(store.ingest(left.key, 4, *_written(left, 1), verify), Ingested)
    right.write(b"right goes on")
    third = right.branch(4)
    third.write(b"third", b"fourth")
    for writer, start in ((right, 4), (third, 4), (third, 0)):
        outcome = store.ingest(left.key, start, *writer.range(start), verify)
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.FORK
    assert held(store, left.key) == left.payloads
    assert [[block.payload for block in branch.blocks] for branch in store.branches(left.key)] == [
        right.payloads[2:],
        third.payloads[2:],
    ]
    assert [branch.start_seq for branch in store.branches(left.key)] == [2, 2]
    (proof,) = store.forks()
    assert (proof.seq, fork_proven(proof, verify)) == (2, True)
    assert store.branch_heads(left.key) == [right.head(), third.head()]
    assert store.branch_range(left.key, 2, right.links[3]) == right.range(2)
    assert store.branch_range(left.key, 3, third.links[5]) == third.range(3)
    assert store.branch_range(left.key, 3, left.links[3]) is None
    assert store.branch_range(left.key, 1, right.links[3]) is None


def test_a_long_branch_is_sent_in_bounded_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FeedStore(tmp_path / "a.db", PARTY) as source, FeedStore(tmp_path / "b.db", PARTY) as target:
        left = filled(source, 3)
        target.add_feed(left.key, "data")
        target.ingest(left.key, 0, *left.range(0), verify)
        right = left.branch(1)
        for number in range(30):
            start = len(right.payloads)
            right.write(*payloads(4, f"right {number}"))
            source.ingest(left.key, start, *right.range(start), verify)
        monkeypatch.setattr(feed_store, "APPEND_BLOCKS_MAX", 10)
        at, rounds = 1, 0
        while (found := source.branch_range(left.key, at, right.links[-1])) is not None:
            assert len(found[0]) <= 10
            outcome = target.ingest(left.key, at, *found, verify)
            assert isinstance(outcome, Rejection)
            assert outcome.reason is Reason.FORK
            at, rounds = at + len(found[0]), rounds + 1
        assert (at, rounds) == (len(right.payloads), 15)
        assert [block.payload for block in target.branches(left.key)[0].blocks] == right.payloads[1:]


def _written(writer: Writer, count: int) -> tuple[list[bytes], Head]:
    start, blocks, _, head = writer.write(*payloads(count, "next"))
    assert start >= 0
    return blocks, head


def test_an_earlier_fork_takes_the_place_of_a_later_one(store: FeedStore) -> None:
    left = filled(store, 2, 2, 2)
    for at in (5, 3, 1):
        other = left.branch(at)
        other.write(*payloads(3, f"at {at}"))
        outcome = store.ingest(left.key, 0, *other.range(0), verify)
        assert isinstance(outcome, Rejection)
        assert outcome.proof is not None
        assert outcome.proof.seq == at
        assert fork_proven(outcome.proof, verify)
    assert [branch.start_seq for branch in store.branches(left.key)] == [5, 3, 1]


def test_an_unsigned_branch_is_no_fork(store: FeedStore) -> None:
    left = filled(store, 3)
    right = left.branch(1)
    right.write(*payloads(3, "right"))
    blocks, head = right.range(0)
    assert rejected(store, left, 0, blocks, dataclasses.replace(head, signature=left.head().signature)) is (
        Reason.BAD_SIGNATURE
    )
    assert store.forks() == []


def test_evidence_is_bounded(store: FeedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_store, "EVIDENCE_BYTES_MAX", 500)
    left = filled(store, 3)
    for number in range(40):
        other = left.branch(1)
        other.write(*payloads(3, f"other {number}"))
        outcome = store.ingest(left.key, 0, *other.range(0), verify)
        assert isinstance(outcome, Rejection)
        assert (outcome.reason, outcome.proof is not None) == (Reason.FORK, True)
    assert sum(len(block.payload) for branch in store.branches(left.key) for block in branch.blocks) <= 500


@pytest.mark.parametrize("cut", [0, 2, 3])
def test_a_branch_that_a_quarantine_left_in_the_air_is_sound(store: FeedStore, cut: int) -> None:
    left = filled(store, 2, 1, 2)
    right = left.branch(4)
    right.write(*payloads(3, "right"))
    store.ingest(left.key, 0, *right.range(0), verify)
    assert store.quarantine_from(left.key, cut) == cut
    assert store.verify(left.key).sound
    assert store.forks() == []
    assert isinstance(store.ingest(left.key, cut, *left.range(cut), verify), Ingested)
    (proof,) = store.forks()
    assert (proof.seq, fork_proven(proof, verify)) == (4, True)


def test_after_a_quarantine_either_branch_may_become_the_held_one(store: FeedStore) -> None:
    left = filled(store, 2, 2)
    right = left.branch(2)
    right.write(*payloads(3, "right"))
    store.ingest(left.key, 0, *right.range(0), verify)
    assert store.quarantine_from(left.key, 2) == 2
    assert store.forks() == []
    right.write(b"right goes on")
    outcome = store.ingest(left.key, 5, *right.range(5), verify)
    assert isinstance(outcome, Rejection)
    assert (outcome.reason, outcome.proof) == (Reason.FORK, None)
    assert isinstance(store.ingest(left.key, 2, *right.range(2), verify), Ingested)
    outcome = store.ingest(left.key, 0, *left.range(0), verify)
    assert isinstance(outcome, Rejection)
    assert outcome.proof is not None
    assert fork_proven(outcome.proof, verify)
    assert [[block.payload for block in branch.blocks] for branch in store.branches(left.key)] == [left.payloads[2:]]
    assert store.verify(left.key).sound


# -- damage (S4) -------------------------------------------------------------------------------------------------


def damage(path: Path, sql: str, *parameters: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(sql, parameters)
    connection.commit()
    connection.close()


def number_of(seq: int) -> int:
    return 1 << 40 | seq


@pytest.mark.parametrize(
    ("sql", "parameters"),
    [
        ("UPDATE blocks SET payload = CAST(x'00' || substr(payload, 2) AS BLOB) WHERE id = ?", (number_of(3),)),
        ("UPDATE blocks SET link = CAST(x'00' || substr(link, 2) AS BLOB) WHERE id = ?", (number_of(3),)),
        ("UPDATE blocks SET link = x'00' || substr(link, 2) WHERE id = ?", (number_of(3),)),
        ("UPDATE blocks SET payload = 7 WHERE id = ?", (number_of(3),)),
        ("DELETE FROM blocks WHERE id = ?", (number_of(3),)),
    ],
)
def test_damage_is_found_with_its_place_and_fetched_again(path: Path, sql: str, parameters: tuple[object]) -> None:
    with FeedStore(path, PARTY) as store:
        writer = filled(store, 3, 2, 3)
    damage(path, sql, *parameters)
    with FeedStore(path, PARTY) as store:
        verdict = store.verify(writer.key)
        assert verdict.damage is not None
        assert verdict.damage[0] == 3
        with pytest.raises(Corrupt, match=f"Block 3 of feed {writer.key.hex()}"):
            held(store, writer.key)
        with pytest.raises(Corrupt):
            store.block(writer.key, 3)
        with pytest.raises(Corrupt):
            store.range_ending_at_head(writer.key, 0)
        assert store.quarantine_from(writer.key, 3) == 3
        assert held(store, writer.key) == writer.payloads[:3]
        assert isinstance(store.ingest(writer.key, 3, *writer.range(3), verify), Ingested)
        assert held(store, writer.key) == writer.payloads
        assert store.verify(writer.key).sound


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE heads SET signature = zeroblob(64) WHERE length = 5",
        "UPDATE heads SET link = zeroblob(32) WHERE length = 5",
        "UPDATE heads SET length = 4 WHERE length = 5",
    ],
)
def test_a_damaged_head_is_found(path: Path, sql: str) -> None:
    with FeedStore(path, PARTY) as store:
        writer = filled(store, 3, 2, 3)
    damage(path, sql)
    with FeedStore(path, PARTY) as store:
        assert not store.verify(writer.key).sound


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE feeds SET own = 1",
        "UPDATE feeds SET kind = 'control'",
        "UPDATE feeds SET key = zeroblob(32)",
        "DELETE FROM feeds",
        "UPDATE about SET value = zeroblob(32) WHERE name = 'party'",
        "DELETE FROM about",
        "DELETE FROM heads WHERE length = 8",
        "DELETE FROM blocks WHERE id = (SELECT max(id) FROM blocks)",
    ],
)
def test_lost_and_altered_rows_are_found_on_opening(path: Path, sql: str) -> None:
    with FeedStore(path, PARTY) as store:
        filled(store, 3, 2, 3)
    damage(path, sql)
    with pytest.raises(Corrupt), FeedStore(path, PARTY) as store:
        store.feeds()


@pytest.mark.parametrize(("seq", "length"), [(0, 0), (2, 0), (3, 3), (4, 3), (5, 5), (7, 5), (8, 8), (99, 8)])
def test_a_quarantine_cuts_at_the_last_head_at_or_below(store: FeedStore, seq: int, length: int) -> None:
    writer = filled(store, 3, 2, 3)
    assert store.quarantine_from(writer.key, seq) == length
    assert held(store, writer.key) == writer.payloads[:length]
    assert store.verify(writer.key).sound


def test_an_own_feed_is_never_cut(store: FeedStore) -> None:
    writer = filled(store, 3, own=True)
    with pytest.raises(Refused, match="own"):
        store.quarantine_from(writer.key, 1)
    assert store.length(writer.key) == 3


def contents(path: Path, connect: Connect = connect_file) -> object:
    """All that a store says, audited: equal for equal content, an EchoError for damage."""
    with FeedStore(path, PARTY, writable=True, connect=connect) as store:
        feeds = store.feeds()
        for feed in feeds:
            verdict = store.verify(feed.key)
            if verdict.damage is not None:
                raise Corrupt(str(verdict.damage))
        said = [(feed, list(store.read(feed.key)), store.heads(feed.key)) for feed in feeds]
        evidence = {block for feed in feeds for branch in store.branches(feed.key) for block in branch.blocks}
        return said, evidence, store.about("party")


FLIP_PARTS = 3
FLIP_STEP = int(os.environ.get("ECHOSTORE_FLIP_STEP", "61"))
"""Bytes between two flips in long runs of zeros, where SQLite keeps nothing; all others are flipped each. A prime step
visits all parts of all pages; at night it is 1."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two feeds, many heads and a fork."""
    original = tmp_path_factory.mktemp("flips") / "feeds.db"
    with FeedStore(original, PARTY) as store:
        writer = filled(store, 20, 20, name="a")
        filled(store, 15, 1, 1, name="b", own=True)
        other = writer.branch(25)
        other.write(*payloads(12, "other"))
        store.ingest(writer.key, 0, *other.range(0), verify)
        store.checkpoint()
    return original


def flip(raw: bytes, at: int) -> bytearray:
    flipped = bytearray(raw)
    flipped[at] ^= 1 << at % 8
    return flipped


@pytest.mark.parametrize("part", range(FLIP_PARTS))
def test_every_flipped_byte_is_harmless_or_found(audited: Path, part: int) -> None:
    """On a disk in memory: nothing is synced, so that every byte can have its turn."""
    expected, raw = contents(audited), audited.read_bytes()
    blank = {at for run in re.finditer(rb"\0{32,}", raw) for at in range(*run.span())}
    places = [at for at in range(len(raw)) if at not in blank or at % FLIP_STEP == 0]
    assert len(places) > 9_000
    found = harmless = 0
    for at in places[part::FLIP_PARTS]:
        disk = Disk(files={"feeds.db": flip(raw, at)})
        try:
            said = contents(Path("feeds.db"), disk.connect)
        except EchoError:
            found += 1
        else:
            harmless += 1
            assert said == expected, f"byte {at} was flipped and nobody noticed"
        disk.close()
    assert found > harmless / 10


def test_flipped_bytes_in_a_real_file_are_harmless_or_found(audited: Path, tmp_path: Path) -> None:
    expected, raw, copy = contents(audited), audited.read_bytes(), tmp_path / "copy.db"
    found = 0
    for at in range(0, len(raw), 307):
        copy.write_bytes(flip(raw, at))
        for suffix in ("-wal", "-shm"):
            copy.with_name(copy.name + suffix).unlink(missing_ok=True)
        try:
            assert contents(copy) == expected, f"byte {at} was flipped and nobody noticed"
        except EchoError:
            found += 1
    assert found > 10


# -- the file ----------------------------------------------------------------------------------------------------


def test_a_reader_sees_commits_of_a_running_writer(path: Path) -> None:
    with FeedStore(path, PARTY) as store:
        writer = filled(store, 2)
        with FeedStore(path, PARTY, writable=False) as reader:
            assert held(reader, writer.key) == writer.payloads
            store.append(writer.key, *writer.write(b"later"))
            other = filled(store, 1, name="b")
            assert held(reader, writer.key) == writer.payloads
            assert {feed.key for feed in reader.feeds()} == {writer.key, other.key}
            with pytest.raises(Refused):
                reader.add_feed(Writer("c").key, "data")


def test_a_closed_file_is_read_without_a_writer(path: Path) -> None:
    with FeedStore(path, PARTY) as store:
        writer = filled(store, 2)
    with FeedStore(path, PARTY, writable=False) as reader:
        assert held(reader, writer.key) == writer.payloads
    with pytest.raises(NotFound):
        FeedStore(path.with_name("none.db"), PARTY, writable=False)


def test_files_of_another_kind_party_or_future_are_refused(path: Path, tmp_path: Path) -> None:
    FeedStore(path, PARTY).close()
    with pytest.raises(Corrupt, match="another party"):
        FeedStore(path, PartyKey(signing_key("other").public))
    future = tmp_path / "future.db"
    shutil.copy(path, future)
    damage(future, "PRAGMA user_version = 99")
    with pytest.raises(Refused, match="format 99"):
        FeedStore(future, PARTY)
    damage(path, "PRAGMA application_id = 7")
    with pytest.raises(Corrupt, match="not the kind"):
        FeedStore(path, PARTY)
    noise = tmp_path / "noise.db"
    noise.write_bytes(b"not a database " * 400)
    with pytest.raises(Corrupt):
        FeedStore(noise, PARTY)


def test_altered_tables_are_found_on_opening(path: Path) -> None:
    with FeedStore(path, PARTY) as store:
        filled(store, 2)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'own INTEGER', 'own INTEGEQ') WHERE name = 'feeds'")
    connection.commit()
    connection.close()
    with pytest.raises(Corrupt, match="tables"):
        FeedStore(path, PARTY)


def test_a_link_in_place_of_the_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(Refused, match="symbolic link"):
        FeedStore(path, PARTY)
    assert not (tmp_path / "elsewhere.db").exists()


def test_the_file_is_private(path: Path, store: FeedStore) -> None:
    filled(store, 1)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_closed_store_says_so(path: Path) -> None:
    store = FeedStore(path, PARTY)
    store.close()
    store.close()
    with pytest.raises(Closed):
        store.feeds()


def test_a_block_of_150_bytes_takes_at_most_230_on_disk(path: Path, store: FeedStore) -> None:
    writer = Writer("a")
    store.add_feed(writer.key, "data")
    for number in range(100):
        store.append(writer.key, *writer.write(*payloads(64, f"{number}", size=150)))
    store.checkpoint()
    assert store.disk_bytes() / 6400 <= 230


def test_what_the_file_says_of_itself(path: Path) -> None:
    with FeedStore(path, PARTY) as store:
        store.set_about({"title": b"Road trip"})
    with FeedStore(path, PARTY, writable=False) as store:
        assert store.about("title") == b"Road trip"
        assert store.about("party") == PARTY
        assert store.about("nothing") is None


# -- any order of calls ------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Ranges of two branches of one feed in any order, with reopening: the store equals a list of payloads."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.left = Writer("a")
        self.left.write(*payloads(30, "left"))
        self.right = self.left.branch(12)
        self.right.write(*payloads(18, "right"))
        self.store = FeedStore(self.folder / "feeds.db", PARTY)
        self.store.add_feed(self.left.key, "data")
        self.main: list[bytes] = []

    @rule(of_left=st.booleans(), start=st.integers(0, 30), count=st.integers(0, 12), spoil=st.sampled_from("nnnnps"))
    def receive(self, of_left: bool, start: int, count: int, spoil: str) -> None:
        writer = self.left if of_left else self.right
        end = min(30, start + count)
        blocks, head = writer.range(start, max(start, end))
        if spoil == "p" and blocks:
            blocks = [*blocks[:-1], b"spoiled"]
        if spoil == "s":
            head = dataclasses.replace(head, signature=bytes(64))
        outcome = self.store.ingest(self.left.key, start, blocks, head, verify)
        follows = self.main[:start] == writer.payloads[:start] and start <= len(self.main)
        if isinstance(outcome, Ingested):
            assert spoil == "n" or (spoil == "p" and not blocks)
            assert follows
            self.main += blocks[len(self.main) - start :]
        elif outcome.reason is Reason.FORK:
            assert spoil == "n"
            assert (outcome.proof is None) == (len(self.main) <= 12)
            if outcome.proof is not None:
                assert outcome.proof.seq == 12
                assert fork_proven(outcome.proof, verify)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = FeedStore(self.folder / "feeds.db", PARTY)

    @rule(seq=st.integers(0, 30))
    def quarantine(self, seq: int) -> None:
        if seq < len(self.main):
            self.main = self.main[: self.store.quarantine_from(self.left.key, seq)]

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "store"):
            assert held(self.store, self.left.key) == self.main
            assert self.store.verify(self.left.key).sound
            for proof in self.store.forks():
                assert fork_proven(proof, verify)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


AnyOrder.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_order_of_calls = AnyOrder.TestCase
