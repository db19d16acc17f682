"""A member that asks for everything and takes nothing: what the sender keeps for it is bounded, and nobody else waits.

Real sockets. Eve has her keys and a program of her own, which never reads what it asked for.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey, PartyKey
from echostore.kernel.sync.frames import PROTOCOL_VERSION, Ack, Frame, Hello, Request
from echostore.mesh.connection import WRITE_BYTES_HIGH, Connection, open_connection
from echostore.peer.network import parse_address
from echostore.peer.peer import Peer
from echostore.wire.mesh import Offer, Sync, channel_of, encode_mesh_frame, party_tag
from echostore.wire.signing import SigningKey
from echostore.wire.sync import encode_frame
from network_peers import PATIENCE_S, address, converged, invited, peers, until

BLOCKS = 40
VALUE_BYTES = 900_000
ROUNDS = 5
"""She asks for the same 36 MB so many times: 180 MB, if somebody were to keep them for her."""
MEMORY_BYTES_MAX = 64 << 20


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def test_what_is_kept_for_a_member_that_never_reads_is_bounded(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        invited(ann, trip, eve)
        key = eve.network.device_key
        eve.close()
        until(lambda: DeviceKey(key.public) not in ann.network.node.links)
        for number in range(BLOCKS):
            trip.create("property-set", type="load", props={"bytes": bytes([number]) * VALUE_BYTES})
        converged(trip, bobs)
        writer = trip.runtime.data
        assert writer is not None
        feed, head = writer.cursor.key, Head(writer.cursor.length, writer.cursor.link, bytes(64))
        before = resident_bytes()
        waiting: list[int] = []

        async def look(connection: Connection) -> None:
            ask_for_all(connection, trip.key, feed, head)
            async with asyncio.timeout(PATIENCE_S):
                while not (waiting and waiting[-1] > WRITE_BYTES_HIGH):
                    await asyncio.sleep(0.02)
                    waiting.append(buffered(ann, key))
            item = await asyncio.to_thread(trip.create, "property-set", type="small")
            await asyncio.to_thread(until, lambda: bobs.runtime.state.record(item.id) is not None)
            for _ in range(25):
                waiting.append(buffered(ann, key))
                await asyncio.sleep(0.02)
            waiting.append(resident_bytes() - before)

        asyncio.run(hold_open(ann, key, look))
        grown = waiting.pop()
        assert max(waiting) < MEMORY_BYTES_MAX
        # Of the whole process, in which Bob's peer works too; all that she asked for would be 180 MB.
        assert grown < 2 * MEMORY_BYTES_MAX
        assert ann.network.node.counters.failures == {}


async def hold_open(peer: Peer, key: SigningKey, look: Callable[[Connection], Awaitable[None]]) -> None:
    shaken = await open_connection(*parse_address(address(peer)), key, expected=peer.device)
    # Not a byte is taken from the socket from here on.
    shaken.connection._reader._transport.pause_reading()  # type: ignore[attr-defined]
    try:
        await look(shaken.connection)
    finally:
        writer = shaken.connection._writer
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def ask_for_all(connection: Connection, party: PartyKey, feed: FeedKey, head: Head) -> None:
    tag = party_tag(connection.handshake_hash, party)
    frames: list[Frame] = [Hello(PROTOCOL_VERSION, (), ()), Ack(())]
    frames += [
        Request(number, feed, number % head.length, head.length, 64 << 20, head.link)
        for number in range(head.length * ROUNDS)
    ]
    data = [encode_mesh_frame(Offer((tag,)))]
    data += [encode_mesh_frame(Sync(channel_of(tag), encode_frame(frame))) for frame in frames]
    for one in data:
        connection._writer.write(connection._channel.send(one))


def buffered(peer: Peer, key: SigningKey) -> int:
    """Bytes that wait for a device to take them."""
    link = peer.network.node.links.get(DeviceKey(key.public))
    return 0 if link is None else link.connection._writer.transport.get_write_buffer_size()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
