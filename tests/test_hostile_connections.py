"""A device that has shaken hands and then breaks every rule: its connection ends with a counted reason, and only that.

Real sockets. Eve is a member whose program is not ours: she has her keys and says what she likes.
"""

import asyncio
import contextlib
import itertools
import resource
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey
from echostore.kernel.sync.frames import PROTOCOL_VERSION, Ack, Announce, Blocks, FeedTip, Frame, Hello, Tip
from echostore.mesh.connection import FRAME_BYTES_MAX as CONNECTION_FRAME_BYTES_MAX
from echostore.mesh.connection import Connection, open_connection
from echostore.mesh.secure_channel import FRAME_BYTES_MAX
from echostore.peer.network import parse_address
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.mesh import Offer, Sync, channel_of, encode_mesh_frame, party_tag
from echostore.wire.signing import SigningKey
from echostore.wire.sync import encode_frame
from network_peers import PATIENCE_S, address, converged, invited, peers, until

MEMORY_KIB_MAX = 64 * 1024


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@dataclass
class Scene:
    ann: Peer
    trip: Party
    bobs: Party
    eve: SigningKey
    stolen: Blocks
    """Blocks of another party, soundly signed by their writer."""
    feed: FeedKey
    """Of Eve, admitted, with nothing in it."""

    def say(self, act: Callable[[Connection], Awaitable[None]]) -> None:
        """Eve connects, does something, and waits until she is thrown out."""

        async def run() -> None:
            shaken = await open_connection(*parse_address(address(self.ann)), self.eve, expected=self.ann.device)
            # Thrown out in the middle of a word, or after it: that is what the tests are about.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(PATIENCE_S):
                    await act(shaken.connection)
                    while await shaken.connection._reader.read(1 << 16):
                        pass
            writer = shaken.connection._writer
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        asyncio.run(run())

    def replicate(self, *frames: Frame) -> Callable[[Connection], Awaitable[None]]:
        async def act(connection: Connection) -> None:
            tag = party_tag(connection.handshake_hash, self.trip.key)
            connection.send(Offer((tag,)))
            for frame in (Hello(PROTOCOL_VERSION, (), ()), Ack(()), *frames):
                connection.send(Sync(channel_of(tag), encode_frame(frame)))

        return act

    def counted(self, reason: str) -> int:
        """Of connections that ended for a reason; one that came with the handshake's last word never stood."""
        counters = self.ann.network.node.counters
        return counters.ended[reason] + counters.refused[reason]

    def undisturbed(self) -> None:
        """Ann and Bob go on."""
        self.trip.create("property-set", type="task")
        converged(self.trip, self.bobs)
        assert self.ann.network.node.counters.failures == {}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        eves = invited(ann, trip, eve)
        own = eves.runtime.data
        assert own is not None
        other = eve.create_party("Other")
        other.create("property-set", type="task")
        other.flush()
        writer = other.runtime.data
        assert writer is not None
        found = other.sync_port.read(writer.cursor.key, 0, 100, 1 << 20, writer.cursor.link)
        assert found is not None
        stolen = Blocks(own.cursor.key, 0, tuple(found[0]), found[1], more=False)
        key = eve.network.device_key
        feed = own.cursor.key
        eve.close()
        until(lambda: DeviceKey(key.public) not in ann.network.node.links)
        yield Scene(ann, trip, bobs, key, stolen, feed)


def raw(frame: bytes) -> Callable[[Connection], Awaitable[None]]:
    async def act(connection: Connection) -> None:
        connection._writer.write(connection._channel.send(frame))

    return act


def declared(size: int) -> Callable[[Connection], Awaitable[None]]:
    """A frame that says it has so many bytes."""

    async def act(connection: Connection) -> None:
        connection._writer.write(b"".join(connection._channel._seal(size.to_bytes(4, "big") + b"x")))

    return act


def cut_off() -> Callable[[Connection], Awaitable[None]]:
    async def act(connection: Connection) -> None:
        data = connection._channel.send(encode_mesh_frame(Offer((bytes(32),))))
        connection._writer.write(data[: len(data) // 2])
        connection._writer.write_eof()

    return act


def bent() -> Callable[[Connection], Awaitable[None]]:
    async def act(connection: Connection) -> None:
        data = bytearray(connection._channel.send(encode_mesh_frame(Offer((bytes(32),)))))
        data[-1] ^= 1
        connection._writer.write(bytes(data))

    return act


def nested(depth: int) -> bytes:
    """Groups within groups, of a field that nobody knows: what recursion would run into."""
    start, end = (15 << 3 | 3).to_bytes(1, "big"), (15 << 3 | 4).to_bytes(1, "big")
    return start * depth + end * depth


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (raw(b"\xff" * 300), "malformed"),
        (raw(nested(100_000)), "malformed"),
        (raw(b""), "malformed"),
        (declared(FRAME_BYTES_MAX + 1), "oversize"),
        (declared(2**32 - 1), "oversize"),
        (bent(), "tampered"),
        (cut_off(), "closed"),
    ],
    ids=["random", "depth bomb", "empty", "giant", "greatest", "bent", "cut off"],
)
def test_what_is_no_frame_ends_the_connection(
    scene: Scene, act: Callable[[Connection], Awaitable[None]], reason: str
) -> None:
    before = scene.counted(reason)
    scene.say(act)
    until(lambda: scene.counted(reason) == before + 1)
    scene.undisturbed()


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "never whole"])
def test_a_frame_of_more_than_a_block_that_nobody_asked_for_ends_the_connection(scene: Scene, whole: bool) -> None:
    before = scene.counted("oversize")

    async def act(connection: Connection) -> None:
        data = connection._channel.send(bytes(CONNECTION_FRAME_BYTES_MAX + (1 << 20)))
        connection._writer.write(data if whole else data[:-1])
        await connection._writer.drain()

    scene.say(act)
    until(lambda: scene.counted("oversize") == before + 1)
    scene.undisturbed()


def test_a_range_of_more_than_a_block_arrives_when_it_is_asked_for(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        with ann.lock:  # nothing is signed before all is written
            for _ in range(10):
                trip.create("property-set", type="large", data=bytes(900_000))
            trip.flush()
        assert trip.runtime.data is not None
        own = trip.runtime.data.cursor.key
        covered = [head.length for head in trip.runtime.feeds.heads(own)]
        sizes = [len(block.payload) for block in trip.runtime.feeds.read(own, 0, 10_000)]
        ranges = [sum(sizes[start:end]) for start, end in itertools.pairwise((0, *covered))]
        assert max(ranges) > CONNECTION_FRAME_BYTES_MAX
        until(lambda: bobs.query(type="large").count() == 10)
        assert bob.network.node.counters.ended["oversize"] == ann.network.node.counters.ended["oversize"] == 0


def test_blocks_of_another_party_are_refused_and_counted(scene: Scene) -> None:
    """Their writer signed them for the other party: here the signature says nothing."""
    tip = FeedTip(scene.feed, "data", Tip(scene.stolen.head.length, scene.stolen.head.link))
    length = scene.trip.runtime.feeds.length(scene.feed)
    scene.say(scene.replicate(Announce((tip,)), scene.stolen))
    counters = scene.ann.network.node.counters
    until(lambda: counters.scores["bad-signature"] + counters.scores["lying-head"] == 1)
    assert scene.trip.runtime.feeds.length(scene.feed) == length
    scene.undisturbed()


def test_a_replication_of_another_version_is_refused_and_counted(scene: Scene) -> None:
    scene.say(scene.replicate(Hello(PROTOCOL_VERSION + 1, (), ())))
    until(lambda: scene.ann.network.node.counters.scores["wrong-version"] == 1)
    scene.undisturbed()


def test_a_flood_that_nobody_asked_for_ends_and_memory_stays(scene: Scene) -> None:
    """More than may be sent unasked, in frames of a megabyte: none is kept."""
    block = bytes(1 << 20)
    junk = Blocks(scene.feed, 7, (block,), Head(8, scene.stolen.head.link, bytes(64)), more=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def act(connection: Connection) -> None:
        tag = party_tag(connection.handshake_hash, scene.trip.key)
        connection.send(Offer((tag,)))
        for frame in (Hello(PROTOCOL_VERSION, (), ()), Ack(())):
            connection.send(Sync(channel_of(tag), encode_frame(frame)))
        frame = encode_frame(junk)
        for _ in range(200):
            connection.send(Sync(channel_of(tag), frame))
            await connection._writer.drain()

    scene.say(act)
    until(lambda: scene.ann.network.node.counters.scores["flood"] == 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KIB_MAX
    scene.undisturbed()
