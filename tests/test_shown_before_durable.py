"""A keystroke from elsewhere is shown before it is durable, and called held only afterwards (decision 17)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash_disk import Disk, PowerCut, Survivors, Sync
from echostore.kernel.errors import StorageFailed
from echostore.kernel.ids import FeedKey
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.frames import Blocks, FeedTip
from echostore.kernel.sync.port import Rejection
from echostore.kernel.sync.serving import PUSH_BYTES_MAX
from echostore.store.feed_store import FeedStore, Ingested
from echostore.wire.signing import verify
from feed_builder import PARTY, Writer, payloads
from peer_builder import Circle

PATH = Path("feeds.db")


# the store


class Shelf:
    """A store on a recorded disk with an own feed and one of somebody else."""

    def __init__(self) -> None:
        self.disk, self.own, self.other = Disk(), Writer("own"), Writer("other")
        self.store = FeedStore(PATH, PARTY, connect=self.disk.connect)
        self.store.add_feed(self.own.key, "data", own=True)
        self.store.add_feed(self.other.key, "data")
        self.other.write(*payloads(2, "other"))
        assert isinstance(self.ingest(), Ingested)

    def ingest(self) -> Any:
        return self.store.ingest(self.other.key, 0, *self.other.range(0), verify, durable=False)

    def syncs(self) -> int:
        return sum(isinstance(event, Sync) and event.file.endswith("-wal") for event in self.disk.log)

    def lengths_after_a_cut(self) -> tuple[int, int]:
        left = Disk.left_by(PowerCut(self.disk.log), Survivors.NONE, 0)
        with FeedStore(PATH, PARTY, connect=left.connect) as store:
            return store.length(self.own.key), store.length(self.other.key)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.store.close()
    made.disk.close()


def test_what_is_not_synced_is_read_at_once_and_may_be_lost(shelf: Shelf) -> None:
    assert shelf.store.length(shelf.other.key) == 2
    assert shelf.lengths_after_a_cut() == (0, 0)


def test_after_sync_it_survives_and_a_second_sync_costs_nothing(shelf: Shelf) -> None:
    shelf.store.sync()
    assert shelf.lengths_after_a_cut() == (0, 2)
    before = shelf.syncs()
    shelf.store.sync()
    assert shelf.syncs() == before


def test_a_second_round_is_synced_as_well(shelf: Shelf) -> None:
    for expected in (4, 6, 8):
        shelf.store.sync()
        start = shelf.other.write(*payloads(2, f"more {expected}"))[0]
        shelf.store.ingest(shelf.other.key, start, *shelf.other.range(start), verify, durable=False)
        assert shelf.lengths_after_a_cut() == (0, expected - 2)
        shelf.store.sync()
        assert shelf.lengths_after_a_cut() == (0, expected)


def test_nothing_written_later_survives_without_it(shelf: Shelf) -> None:
    """So an own block never names a block that a crash has taken."""
    shelf.store.append(shelf.own.key, *shelf.own.write(b"builds on it"))
    assert shelf.lengths_after_a_cut() == (1, 2)
    before = shelf.syncs()
    shelf.store.sync()
    assert shelf.syncs() == before, "the append has synced it too"


def test_the_next_append_is_durable_on_return_also_after_a_failed_one(shelf: Shelf) -> None:
    assert not isinstance(
        shelf.store.ingest(shelf.other.key, 5, *shelf.other.range(0), verify, durable=False), Ingested
    )
    shelf.store.append(shelf.own.key, *shelf.own.write(b"own"))
    assert shelf.lengths_after_a_cut()[0] == 1


def test_a_durable_transaction_that_changes_nothing_has_synced_nothing(shelf: Shelf) -> None:
    """SQLite writes and syncs the log at a change only."""
    shelf.store.add_feed(shelf.other.key, "data")
    assert shelf.lengths_after_a_cut() == (0, 0)
    shelf.store.sync()
    assert shelf.lengths_after_a_cut() == (0, 2)


def test_both_kinds_of_commit_in_any_order_keep_their_promise(shelf: Shelf) -> None:
    for number in range(1, 4):
        shelf.store.append(shelf.own.key, *shelf.own.write(b"own"))
        assert shelf.lengths_after_a_cut() == (number, 2 * number), "synced with what was in the log before it"
        start = shelf.other.write(*payloads(2, f"more {number}"))[0]
        before = shelf.syncs()
        shelf.store.ingest(shelf.other.key, start, *shelf.other.range(start), verify, durable=False)
        assert shelf.syncs() == before
        assert shelf.lengths_after_a_cut() == (number, 2 * number)


# the port


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


class Arrival:
    """A write of Ann's on its way to Bob, and what Bob does with it, in order."""

    def __init__(self, circle: Circle, monkeypatch: pytest.MonkeyPatch, *, letters: int = 1) -> None:
        ann, self.bob = circle.party("ann"), circle.party("bob")
        note = ann.create("text", type="note")
        ann.flush()
        circle.meet_all()
        self.order: list[str] = []
        self.bob.query(type="note").subscribe(lambda change: self.order.append("shown"))
        self.bob.sync_port.on_grow(lambda key, length: self.order.append("told"))
        self.feeds = self.bob.runtime.feeds
        note.insert(0, "x" * letters)
        ann.flush()
        own = ann.runtime.data
        assert own is not None
        self.key: FeedKey = own.cursor.key
        self.start = self.feeds.length(self.key)
        found = ann.sync_port.read(self.key, self.start, 100, 1 << 20, own.cursor.link)
        assert found is not None
        self.payloads, self.head = found
        self.order.clear()
        sync = self.feeds.sync

        def noted() -> None:
            self.order.append("synced" if self.feeds._db.unsynced else "nothing to sync")
            self.fail()
            sync()

        monkeypatch.setattr(self.feeds, "sync", noted)

    def fail(self) -> None:
        """Nothing, unless a test puts something here."""

    def come(self) -> int | Rejection:
        return self.bob.sync_port.ingest(self.key, "data", self.start, self.payloads, self.head)


def test_a_letter_is_shown_then_synced_then_told(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    arrival = Arrival(circle, monkeypatch)
    assert arrival.come() == arrival.head.length
    assert arrival.order[:2] == ["shown", "synced"]
    assert set(arrival.order[2:]) == {"told"}


def test_a_long_range_is_durable_before_it_is_shown(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    arrival = Arrival(circle, monkeypatch, letters=PUSH_BYTES_MAX + 1)
    assert arrival.come() == arrival.head.length
    assert arrival.order[:2] == ["shown", "nothing to sync"]
    assert set(arrival.order[2:]) == {"told"}


def test_a_paused_party_tells_what_it_holds_and_shows_nothing(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    arrival = Arrival(circle, monkeypatch)
    arrival.bob.pause()
    arrival.order.clear()
    assert arrival.come() == arrival.head.length
    assert arrival.order == ["nothing to sync", "told"]


def test_nobody_hears_of_what_could_not_be_synced(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    arrival = Arrival(circle, monkeypatch)

    def fail() -> None:
        raise StorageFailed("the disk is gone")

    arrival.fail = fail  # type: ignore[method-assign]
    assert arrival.come() == Rejection(Reason.WAITING)
    assert "told" not in arrival.order


def test_what_a_subscriber_writes_in_answer_is_durable_with_what_it_saw(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = Arrival(circle, monkeypatch)
    party = arrival.bob

    def answer(change: Any) -> None:
        party.create(type="answer")
        party.flush()
        arrival.order.append("unsynced" if arrival.feeds._db.unsynced else "durable")

    party.query(type="note").subscribe(answer)
    arrival.come()
    assert "durable" in arrival.order
    assert "unsynced" not in arrival.order


def test_own_writes_are_handed_out_with_their_blocks_once_they_are_durable(circle: Circle) -> None:
    ann = circle.party("ann")
    handed: list[tuple[FeedTip, Blocks]] = []
    stop = ann.sync_port.on_written(lambda tip, written: handed.append((tip, written)))
    ann.create(type="note")
    assert handed == []
    ann.flush()
    ((tip, written),) = handed
    feeds = ann.runtime.feeds
    assert tip.tip.length == written.end == feeds.length(tip.feed)
    assert written.payloads == tuple(block.payload for block in feeds.read(tip.feed, written.start))
    stop()
    ann.create(type="note")
    ann.flush()
    assert len(handed) == 1


def test_a_write_stands_although_who_is_told_of_it_fails(circle: Circle) -> None:
    ann = circle.party("ann")

    def fail(tip: FeedTip, written: Blocks) -> None:
        raise RuntimeError("a defect on the way out")

    stop = ann.sync_port.on_written(fail)
    one = ann.create(type="note")
    with pytest.raises(RuntimeError):
        ann.flush()
    stop()
    two = ann.create(type="note")
    assert ann.flush().durable
    circle.meet_all()
    assert {item.id for item in circle.party("bob").query(type="note").all()} == {one.id, two.id}
