"""Progress is told whatever a peer is busy with, and work is cut into slices between which it moves."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.limits import APPEND_BLOCKS_MAX
from echostore.kernel.order import DATA
from echostore.kernel.sync.serving import RANGE_BYTES
from echostore.peer import runtime as runtimes
from echostore.peer.party import Party
from echostore.peer.progress import PartyProgress, party_progress
from echostore.store.item_store import Checkpoint, ItemStore

STUCK_S = 30.0
"""Nobody waits so long unless progress is not told at all."""


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Party, Party]]:
    """A writer's party and the same party of a joiner who knows the members and nothing else."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with (
        echostore.open(tmp_path / "writer", name="writer", background=False) as writer,
        echostore.open(tmp_path / "joiner", name="joiner", background=False) as joiner,
    ):
        party = writer.create_party("p")
        joined = joiner.enter(party.members.admit(joiner.request_join(party.key), role="editor"))
        take(joined, party, kinds=("control",))
        yield party, joined


def take(
    joined: Party, party: Party, kinds: tuple[str, ...] = ("control", "data"), range_bytes: int = RANGE_BYTES
) -> int:
    """Hand over what is lacking in ranges as a session cuts them; returns how many ranges that were."""
    count = 0
    port = party.sync_port
    for tip in sorted(port.feeds(), key=lambda tip: tip.kind):
        if tip.kind not in kinds:
            continue
        feeds = joined.runtime.feeds
        start = feeds.length(tip.feed) if feeds.has_feed(tip.feed) else 0
        while start < tip.tip.length:
            found = port.read(tip.feed, start, 1 << 16, range_bytes, tip.tip.link)
            assert found is not None
            payloads, head = found
            result = joined.sync_port.ingest(tip.feed, tip.kind, start, payloads, head)
            assert result == head.length
            start, count = head.length, count + 1
    return count


def items_of(party: Party) -> ItemStore:
    store = party.runtime.items
    assert store is not None
    return store


def asked_elsewhere(party: Party) -> PartyProgress:
    """What another thread is told, while this one keeps the lock."""
    told: list[PartyProgress] = []
    asking = threading.Thread(target=lambda: told.append(party_progress(party)), daemon=True)
    asking.start()
    asking.join(STUCK_S)
    assert told, "who asks for progress waits until the work is over"
    return told[0]


def test_progress_is_told_while_the_peer_is_busy(pair: tuple[Party, Party]) -> None:
    party, joined = pair
    with joined.lock:
        before = party_progress(joined)
        assert asked_elsewhere(joined) == before
    item = party.create("property-set", type="task", done=0)
    for number in range(9):
        item["done"] = number
        party.flush()
    with joined.lock:
        take(joined, party)
        busy = asked_elsewhere(joined)
    after = party_progress(joined)
    assert (busy.held, busy.processed) == (after.held, after.processed) > (before.held, before.processed)
    assert busy.known >= busy.held


def test_a_checkpoint_shows_what_was_taken_before_it(
    pair: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    party, joined = pair
    item = party.create("property-set", type="task", done=0)
    party.flush()
    take(joined, party)
    held = party_progress(joined).held
    for number in range(100):
        item["done"] = number
    party.flush()
    monkeypatch.setattr(runtimes, "CHECKPOINT_MESSAGES", 50)
    told: list[PartyProgress] = []
    store = items_of(joined)
    save = store.save

    def slow(checkpoint: Checkpoint) -> None:
        told.append(asked_elsewhere(joined))
        save(checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(store, "save", slow)
        take(joined, party)
    assert [(each.held, each.processed) for each in told] == [(held + 100, held + 100)]


def test_messages_count_as_processed_one_by_one(pair: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one long range: folding is slow, and every message of it is told."""
    party, joined = pair
    item = party.create("property-set", type="task", done=0)
    party.flush()
    take(joined, party)
    start = party_progress(joined)
    for number in range(1, 6):
        item["done"] = number
    item["text"] = "x" * 20_000  # more than is shown before it is durable
    party.flush()
    told: list[PartyProgress] = []
    processor = joined.runtime.processor
    apply = processor.apply_message

    def slow(*arguments: Any, **named: Any) -> None:
        told.append(asked_elsewhere(joined))
        apply(*arguments, **named)

    monkeypatch.setattr(processor, "apply_message", slow)
    assert take(joined, party) == 1
    assert [each.held for each in told] == [start.held + 6] * 6, "all of them are durable before any is folded"
    assert [each.processed - start.processed for each in told] == [1, 2, 3, 4, 5, 6]


def test_what_is_not_durable_yet_does_not_count_as_held(
    pair: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    party, joined = pair
    item = party.create("property-set", type="task", done=0)
    party.flush()
    take(joined, party)
    start = party_progress(joined)
    item["done"] = 1
    party.flush()
    told: list[PartyProgress] = []
    sync = joined.runtime.feeds.sync

    def slow() -> None:
        told.append(asked_elsewhere(joined))
        sync()

    monkeypatch.setattr(joined.runtime.feeds, "sync", slow)
    take(joined, party)
    assert [each.held for each in told] == [start.held]
    assert party_progress(joined).held == start.held + 1


@pytest.mark.parametrize("distinct", [True, False])
def test_a_checkpoint_is_bounded_by_what_it_writes(
    pair: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch, distinct: bool
) -> None:
    """Messages with many operations: the work between two tellings is one range, and what a checkpoint may gather."""
    party, joined = pair
    monkeypatch.setattr(runtimes, "CHECKPOINT_ITEMS", 200 if distinct else 1 << 30)
    monkeypatch.setattr(runtimes, "CHECKPOINT_TOUCHES", 1 << 30 if distinct else 400)
    with party.batch():
        items = [party.create("property-set", type="task", done=0) for _ in range(50)]
    for number in range(30):
        with party.batch():
            if distinct:
                for _ in range(50):
                    party.create("property-set", type="task", done=number)
            else:
                for item in items:
                    item["done"] = number
        party.flush()
    saved: list[tuple[int, int]] = []
    store = items_of(joined)
    save = store.save

    def noting(checkpoint: Checkpoint) -> None:
        saved.append((len(checkpoint.items), len(checkpoint.touches)))
        save(checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(store, "save", noting)
        assert take(joined, party, range_bytes=4096) >= 5
    assert len(saved) >= 3
    one_range = 50 * 8
    limit, column = (200, 0) if distinct else (400, 1)
    assert max(row[column] for row in saved) <= limit + one_range


def test_a_range_is_no_more_than_one_append(pair: tuple[Party, Party]) -> None:
    party, joined = pair
    item = party.create("property-set", type="task", done=0)
    for number in range(2 * APPEND_BLOCKS_MAX):
        item["done"] = number
    party.flush()
    take(joined, party, kinds=("control",))
    seen = [party_progress(joined).held]
    joined.sync_port.on_grow(lambda feed, length: seen.append(party_progress(joined).held))
    assert take(joined, party, kinds=(DATA,)) >= 2
    assert max(later - earlier for earlier, later in pairwise(seen)) <= APPEND_BLOCKS_MAX
