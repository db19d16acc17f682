"""News is sent in the thread that wrote it, past the node's loop, and to nobody who may not have it."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey, Link
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.sync.endpoint import Endpoint
from echostore.kernel.sync.frames import PROTOCOL_VERSION, Ack, AckEntry, Blocks, FeedTip, Frame, Hello, Tip
from echostore.mesh import party_channel
from echostore.mesh.connection import Connection, Ended, Handshaken, accept, open_connection
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.mesh import MeshFrame, Sync
from echostore.wire.signing import SigningKey
from network_peers import PATIENCE_S, has, invited, peers, until

LINK = Link(bytes([5]) * 32)
ANN, BOB = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2))


# One endpoint


class Desk:
    """An endpoint whose thread does nothing until `catch_up`; the other side has all of a control and a data feed."""

    control, data = (
        FeedTip(FeedKey(bytes([each]) * 32), kind, Tip(5, LINK)) for each, kind in ((1, CONTROL), (2, DATA))
    )

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.straight: list[Blocks] = []
        self._waiting: list[Callable[[], None]] = []
        self.write: Callable[[FeedTip, Blocks], None] = lambda tip, written: None
        self._endpoint = Endpoint(
            self,  # type: ignore[arg-type]  # what is asked of a port here, and no more
            send=self.sent.append,
            clock=lambda: 0.0,
            defer=self._waiting.append,
            straight=self._take,
        )
        self._endpoint.start()
        self._endpoint.receive(Hello(PROTOCOL_VERSION, ()))
        self._endpoint.receive(Ack(tuple(AckEntry(tip.feed, 5, 5, LINK) for tip in (self.control, self.data))))
        self.sent.clear()

    def feeds(self) -> list[FeedTip]:
        return [self.control, self.data]

    def processed_length(self, key: FeedKey) -> int:
        return 5

    def fork_proofs(self) -> tuple[bytes, ...]:
        return ()

    def on_grow(self, callback: object) -> Callable[[], None]:
        return lambda: None

    def on_written(self, callback: Callable[[FeedTip, Blocks], None]) -> Callable[[], None]:
        self.write = callback
        return lambda: None

    def writes(self, tip: FeedTip, end: int) -> Blocks:
        head = Head(end, Link(end.to_bytes(32, "big")), bytes(64))
        written = Blocks(tip.feed, end - 1, (b"x",), head, more=False)
        self.write(FeedTip(tip.feed, tip.kind, Tip(end, head.link)), written)
        return written

    def catch_up(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()

    def _take(self, written: Blocks) -> bool:
        self.straight.append(written)
        return written.feed == self.data.feed  # as if something else waited to be sent, for control


def test_news_that_went_straight_is_not_sent_again() -> None:
    desk = Desk()
    one = desk.writes(desk.data, 6)
    assert desk.straight == [one]
    desk.catch_up()
    assert desk.sent == []
    two = desk.writes(desk.data, 7)
    assert desk.straight == [one, two]


def test_news_never_overtakes_what_was_written_before_it() -> None:
    desk = Desk()
    first = desk.writes(desk.control, 6)
    later = desk.writes(desk.data, 6)
    assert desk.straight == [first], "it could not go, and so the one after it is not even tried"
    desk.catch_up()
    assert desk.sent == [first, later]


def test_news_goes_straight_only_to_who_has_all_before_it() -> None:
    desk = Desk()
    desk.writes(desk.data, 8)
    assert desk.straight == []


# Two peers


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@contextmanager
def stuck(peer: Peer) -> Iterator[None]:
    """Meanwhile the peer's loop does nothing."""
    standing, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        go_on.wait(PATIENCE_S)

    peer.network.soon(stand)
    assert standing.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def ready(ann: Peer, bob: Peer) -> tuple[Party, Party]:
    """A party of two in which Bob has all that Ann wrote, and Ann knows it."""
    trip = ann.create_party("Trip")
    theirs = invited(ann, trip, bob)
    trip.create("property-set", type="first")
    trip.flush().wait(held_by=2, timeout=PATIENCE_S)
    quiet(ann)
    return trip, theirs


def quiet(peer: Peer) -> None:
    """The loop has done all that it was given so far, and everybody was looked at since the last change."""
    node = peer.network.node

    async def nothing() -> None:
        pass

    until(lambda: peer.network.call(nothing()) is None and node.reviews_asked == node.reviews_done)


def sent(peer: Peer) -> int:
    (link,) = peer.network.node.links.values()
    return link.connection.bytes_sent


def test_news_leaves_while_the_loop_is_busy_and_once_only(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = ready(ann, bob)
        (link,) = bob.network.node.links.values()
        (channel,) = link.channels.values()
        with stuck(ann):
            one = trip.create("property-set", type="task")
            before = sent(ann)
            trip.flush()
            assert sent(ann) > before
            until(lambda: has(theirs, one))
            two = trip.create("property-set", type="task")
            before = sent(ann)
            trip.flush()
            assert sent(ann) == before, "the loop has not heard of the one before"
        until(lambda: has(theirs, two))
        assert trip.flush().wait(held_by=2, timeout=PATIENCE_S).held_by == 2
        assert channel.lacking() == 0
        assert not ann.network.node.counters.scores
        assert not bob.network.node.counters.scores


def test_what_is_sent_past_the_loop_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = ready(ann, bob)
        feeds, order = trip.runtime.feeds, []
        append, send = feeds.append_many, Connection.send_straight

        def append_many(*given: Any) -> None:
            append(*given)
            order.append("durable" if not feeds._db.unsynced else "in the log")

        def send_straight(connection: Connection, frame: MeshFrame) -> bool:
            order.append("sent")
            return send(connection, frame)

        monkeypatch.setattr(feeds, "append_many", append_many)
        monkeypatch.setattr(Connection, "send_straight", send_straight)
        item = trip.create("property-set", type="task")
        trip.flush()
        assert order == ["durable", "sent"]
        until(lambda: has(theirs, item))


def test_a_removed_member_gets_no_news_before_the_loop_has_heard_of_the_removal(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = ready(ann, bob)
        (link,) = ann.network.node.links.values()
        review, reviewing, go_on = link.review, threading.Event(), threading.Event()

        def late() -> None:
            reviewing.set()
            assert go_on.wait(PATIENCE_S)
            review()

        link.review = late  # type: ignore[method-assign]
        try:
            trip.members.remove(bob.identity)
            assert reviewing.wait(PATIENCE_S), "and what was written before is on its way"
            before = sent(ann)
            secret = trip.create("property-set", type="secret")
            trip.flush()
            assert sent(ann) == before
        finally:
            go_on.set()
        until(lambda: not ann.network.connections())
        assert not has(theirs, secret)


@pytest.mark.parametrize("rule", ["policy", "links"])
def test_policies_and_many_links_send_news_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, theirs = ready(ann, bob)
        (link,) = ann.network.node.links.values()
        (channel,) = link.channels.values()
        if rule == "links":
            monkeypatch.setattr(party_channel, "STRAIGHT_LINKS_MAX", 0)
        else:
            channel._flow = party_channel.Flow.DOWN
        with stuck(ann):
            item = trip.create("property-set", type="task")
            before = sent(ann)
            trip.flush()
            assert sent(ann) == before
        if rule == "links":
            until(lambda: has(theirs, item))


# One connection


async def shaken_pair() -> tuple[Handshaken, Handshaken, asyncio.Server]:
    """Both ends of a connection over TCP."""
    accepted: asyncio.Future[Handshaken] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(await accept(reader, writer, BOB))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dialled = await open_connection("127.0.0.1", port, ANN, expected=DeviceKey(BOB.public))
    return dialled, await accepted, server


def numbered(number: int, size: int = 0) -> Sync:
    return Sync(1, number.to_bytes(4, "big") + bytes(size))


def numbers(frames: list[MeshFrame]) -> list[int]:
    return [int.from_bytes(frame.frame[:4], "big") for frame in frames if isinstance(frame, Sync)]


async def came(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("size", [0, 200_000])
def test_frames_from_threads_and_from_the_loop_arrive_whole_and_each_sender_in_order(size: int) -> None:
    async def run() -> None:
        one, other, server = await shaken_pair()
        got: list[MeshFrame] = []
        tasks = [asyncio.create_task(one.run(lambda frame: None)), asyncio.create_task(other.run(got.append))]
        straight, loops = list(range(1000, 1100)), list(range(2000, 2100))
        refused: list[int] = []

        def write() -> None:
            for number in straight:
                if not one.connection.send_straight(numbered(number, size)):
                    refused.append(number)

        thread = threading.Thread(target=write)
        thread.start()
        for number in loops:
            one.connection.send(numbered(number, size))
            await asyncio.sleep(0)
        await asyncio.to_thread(thread.join)
        expected = [number for number in straight if number not in refused]
        await came(lambda: len(got) == len(expected) + len(loops))
        assert [number for number in numbers(got) if number < 2000] == expected
        assert [number for number in numbers(got) if number >= 2000] == loops
        if not size:
            assert expected
        one.connection.end(Ended("closing"))
        other.connection.end(Ended("closing"))
        await asyncio.gather(*tasks)
        server.close()

    asyncio.run(run())


def test_what_the_socket_does_not_take_follows_by_the_loop_before_anything_else() -> None:
    async def run() -> None:
        one, other, server = await shaken_pair()
        connection, got = one.connection, list[MeshFrame]()
        sender = asyncio.create_task(one.run(lambda frame: None))
        size = 4 * 1024 * 1024  # more than the buffers of both ends take while nobody reads
        full = 0
        while connection.send_straight(numbered(full, size)):
            full += 1
            assert full < 50, "a socket that nobody reads from is never full"
        assert full, "the first one goes past the loop"
        connection.send(numbered(full))
        receiver = asyncio.create_task(other.run(got.append))
        await came(lambda: len(got) == full + 1)
        assert numbers(got) == list(range(full + 1))
        assert connection.send_straight(numbered(full + 1)), "once everything is out"
        await came(lambda: len(got) == full + 2)
        connection.end(Ended("closing"))
        await asyncio.gather(sender, receiver)
        server.close()

    asyncio.run(run())


def test_an_ended_connection_sends_nothing_and_lets_go_of_its_socket() -> None:
    async def run() -> None:
        one, other, server = await shaken_pair()
        connection = one.connection
        tasks = [asyncio.create_task(one.run(lambda frame: None)), asyncio.create_task(other.run(lambda frame: None))]
        assert connection.send_straight(numbered(1))
        copy = connection._straight
        assert isinstance(copy, socket.socket)
        connection.end(Ended("closing"))
        assert copy.fileno() == -1
        assert not connection.send_straight(numbered(2))
        ended = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert [each.reason for each in ended] == ["closing", "goodbye"]
        server.close()

    asyncio.run(run())


def test_a_broken_connection_is_no_concern_of_who_writes() -> None:
    async def run() -> None:
        one, other, server = await shaken_pair()
        sender = asyncio.create_task(one.run(lambda frame: None))
        assert one.connection.send_straight(numbered(1))
        other.connection._writer.transport.abort()
        while one.connection.send_straight(numbered(2)):
            await asyncio.sleep(0)
        ended = await asyncio.wait_for(sender, PATIENCE_S)
        assert ended.reason in ("broken", "closed")
        server.close()

    asyncio.run(run())
