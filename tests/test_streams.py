"""Streams and anchors: exactly the messages after a position, none twice, causes first, at the cost of what is new."""

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import UsageError
from echostore.kernel.ids import Link
from echostore.kernel.timeframe import Position, Timeframe
from echostore.peer.anchors import Anchor
from echostore.peer.delivered import Delivered
from echostore.peer.streams import Stream
from peer_builder import Circle, Liar


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat") as made:
        yield made


def places(messages: list[Delivered]) -> list[tuple[bytes, int]]:
    return [(message.feed, message.seq) for message in messages]


def in_causal_order(party: echostore.Party, messages: list[Delivered], start: Anchor | None = None) -> bool:
    """Whether every message comes after its predecessor and after all that it names as a cause."""
    seen = {feed: at.seq for feed, at in start.data.entries.items()} if start else {}
    processor = party.runtime.processor
    for message in messages:
        if message.seq != seen.get(message.feed, -1) + 1:
            return False
        for dependency in processor.envelope(message.feed, message.seq).dependencies:
            kind = processor.orderer.cursors[dependency.feed].kind
            if kind == "data" and dependency.seq > seen.get(dependency.feed, -1):
                return False
        seen[message.feed] = message.seq
    return True


def work(circle: Circle, chance: random.Random, steps: int) -> None:
    for _ in range(steps):
        name = chance.choice(circle.names)
        party = circle.party(name)
        items = [item for item in party.items() if item.type == "note"]
        if not items or chance.random() < 0.3:
            party.create(type="note", by=name)
        else:
            chance.choice(items)["n"] = chance.randrange(100)
        if chance.random() < 0.3:
            circle.meet(*chance.sample(circle.names, 2))


# exactly what is after


def test_a_stream_from_the_beginning_yields_every_message_once_causes_first(circle: Circle) -> None:
    work(circle, random.Random(1), 60)
    circle.meet_all()
    party = circle.party("bob")
    messages = list(party.stream())
    assert len(set(places(messages))) == len(messages)
    held = sum(feed.processed for feed in party.status.feeds if feed.kind == "data")
    assert len(messages) == held
    assert in_causal_order(party, messages)


@pytest.mark.parametrize("seed", range(4))
def test_resuming_at_any_message_yields_the_rest_and_nothing_twice(circle: Circle, seed: int) -> None:
    chance = random.Random(seed)
    party, taken, anchor = circle.party("bob"), [], None
    for _ in range(8):
        work(circle, chance, 12)
        stream = circle.party("bob").stream(anchor)
        start = Anchor.parse(anchor) if anchor else None
        some: list[Delivered] = []
        stop_after = chance.randrange(1, 12)
        for message in stream:
            some.append(message)
            if len(some) == stop_after:
                break
        assert in_causal_order(circle.party("bob"), some, start)
        taken += some
        anchor = str(stream.anchor())
        if chance.random() < 0.4:
            party = circle.restart("bob")
    circle.meet_all()
    taken += list(circle.party("bob").stream(anchor))
    assert len(set(places(taken))) == len(taken), "none twice"
    assert set(places(taken)) == set(places(list(circle.party("bob").stream()))), "none left out"
    assert party.key == circle.key


def test_what_arrives_late_from_a_feed_that_was_behind_is_after_the_anchor(circle: Circle) -> None:
    item = circle.party("cat").create(type="note", by="cat")
    for _ in range(5):
        circle.party("ann").create(type="note")
    stream = circle.party("ann").stream()
    assert item.id not in {message.operations[0].item for message in stream}
    circle.meet("ann", "cat")
    late = list(circle.party("ann").stream(stream.anchor()))
    assert [message.operations[0].item for message in late] == [item.id]


def test_a_stream_goes_on_where_it_stood(circle: Circle) -> None:
    stream = circle.party("ann").stream()
    assert list(stream)
    item = circle.party("ann").create(type="note")
    assert [message.operations[0].item for message in stream] == [item.id]
    assert list(stream) == []


def test_an_anchor_of_one_peer_resumes_on_another_one_that_is_behind(circle: Circle) -> None:
    first = circle.party("ann").create(type="note")
    circle.meet_all()
    second = circle.party("ann").create(type="note")
    anchor = str(circle.party("ann").anchor())
    third = circle.party("ann").create(type="note")
    assert list(circle.party("bob").stream(anchor)) == [], "nothing after it is here yet"
    circle.meet_all()
    assert [message.operations[0].item for message in circle.party("bob").stream(anchor)] == [third.id]
    assert first.id != second.id


def test_an_anchor_survives_a_change_of_process(circle: Circle, tmp_path: Path) -> None:
    circle.party("ann").create(type="note")
    anchor = str(circle.party("ann").anchor())
    made = [circle.party("ann").create(type="note").id.hex() for _ in range(3)]
    circle.peers["ann"].close()
    code = (
        "import echostore, sys\n"
        f"with echostore.open({str(tmp_path / 'ann')!r}, background=False) as peer:\n"
        f"    stream = peer.party({circle.key.hex()!r}).stream(sys.argv[1])\n"
        "    print(*[message.operations[0].item.hex() for message in stream])\n"
        "    print(stream.anchor())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, anchor], capture_output=True, text=True, check=True, timeout=60)
    found, after = done.stdout.splitlines()
    assert found.split() == made
    circle.peers["ann"] = circle._open("ann")
    assert list(circle.party("ann").stream(after)) == []


def test_an_anchor_of_another_party_is_refused(circle: Circle) -> None:
    other = circle.peers["ann"].create_party("Other")
    with pytest.raises(UsageError, match="another party"):
        circle.party("ann").stream(other.anchor())


@pytest.mark.parametrize("text", ["", "anchor:", "anchor:AAAA", "hello", "anchor:" + "A" * 400, "anchor:é"])
def test_what_is_no_anchor_is_refused(circle: Circle, text: str) -> None:
    with pytest.raises(UsageError):
        circle.party("ann").stream(text)


def test_a_malformed_message_is_not_delivered_and_does_not_stop_the_stream(circle: Circle) -> None:
    liar = Liar.of(circle, "cat")
    item = circle.party("ann").create(type="note")
    anchor = circle.party("ann").anchor()
    liar.send(liar.message(liar.on(item.id)))
    liar.send(liar.message(liar.set(item.id, n=1)))
    stream = circle.party("ann").stream(anchor)
    assert places(list(stream)) == [(liar.feed, 1)]
    assert list(circle.party("ann").stream(stream.anchor())) == []


def test_what_a_removed_member_wrote_beyond_the_cut_is_not_delivered(circle: Circle) -> None:
    item = circle.party("ann").create(type="note")
    circle.meet_all()
    anchor = circle.party("ann").anchor()
    circle.get("cat", item)["unseen"] = 1
    circle.party("ann").members.remove(circle.peers["cat"].identity)
    circle.party("ann").get(item.id)["n"] = 1
    circle.meet_all()
    assert [message.writer.role for message in circle.party("bob").stream(anchor)] == ["owner"]


# one item


def test_an_item_stream_yields_what_wrote_the_item(circle: Circle) -> None:
    one, other = (circle.party("ann").create(type="note") for _ in range(2))
    circle.meet_all()
    stream = circle.get("bob", one).stream()
    assert len(list(stream)) == 1
    one["n"] = 1
    other["n"] = 1
    circle.get("bob", one)["m"] = 1
    circle.meet_all()
    later = list(stream)
    assert all(operation.item == one.id for message in later for operation in message.operations)
    assert len(later) == 2
    circle.restart("bob")
    assert list(circle.get("bob", one).stream(stream.anchor())) == []


def test_a_batch_over_several_items_is_on_the_stream_of_each(circle: Circle) -> None:
    party = circle.party("ann")
    one, other = party.create(type="note"), party.create(type="note")
    anchor = party.anchor()
    with party.batch():
        one["n"] = 1
        other["n"] = 1
    assert len(list(one.stream(anchor))) == len(list(other.stream(anchor))) == 1


# has it been delivered?


def test_a_stream_of_another_peer_tells_when_it_has_reached_a_write(circle: Circle) -> None:
    item = circle.party("ann").create(type="note")
    receipt = circle.party("ann").flush()
    stream = circle.party("bob").stream()
    list(stream)
    assert not stream.reached(receipt.anchor)
    assert not stream.wait(receipt.anchor, timeout=0.01)
    circle.meet_all()
    assert stream.wait(str(receipt.anchor), timeout=5)
    assert not stream.reached(receipt.anchor), "processed, but not yet yielded"
    list(stream)
    assert stream.reached(receipt.anchor)
    assert item.id


def test_waiting_ends_when_another_thread_delivers(circle: Circle) -> None:
    circle.party("ann").create(type="note")
    receipt = circle.party("ann").flush()
    stream: Stream = circle.party("bob").stream()
    delivering = threading.Timer(0.1, circle.meet, ("ann", "bob"))
    delivering.start()
    try:
        assert stream.wait(receipt.anchor, timeout=30)
    finally:
        delivering.join()


# what is old costs nothing


def test_resuming_in_a_large_party_reads_only_what_is_new(circle: Circle) -> None:
    party = circle.party("ann")
    item = party.create(type="note")
    for number in range(20_000):
        item["n"] = number
    anchor = str(party.anchor())
    other = party.create(type="note")
    item["n"] = "last"
    party = circle.restart("ann")
    before = party.runtime.processor.reader.decodes
    stream = party.stream(anchor)
    assert len(list(stream)) == 2
    assert stream.blocks_read == 2
    one = party.get(other.id).stream(anchor)
    assert len(list(one)) == 1
    assert one.blocks_read == 1
    assert party.runtime.processor.reader.decodes == before


def test_an_anchor_of_another_branch_is_refused(circle: Circle) -> None:
    party = circle.party("ann")
    party.create(type="note")
    stream = party.stream()
    assert list(stream)
    anchor = stream.anchor()
    assert list(party.stream(anchor)) == []
    ((feed, at), *_) = anchor.data.entries.items()
    other = Timeframe({**anchor.data.entries, feed: Position(at.seq, Link(bytes([at.link[0] ^ 1]) + at.link[1:]))})
    with pytest.raises(UsageError, match="another branch"):
        party.stream(Anchor(anchor.party, 0, other, anchor.control))
