"""Strangers on real sockets: slots, budgets, eviction and what is counted. Nothing here is timed: limits are made small.

How it feels for a member is measured by `echostore bench strangers`.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import echostore
from echostore.kernel.ids import DeviceKey, FeedKey
from echostore.kernel.ids import Link as BlockLink
from echostore.kernel.sync.frames import PROTOCOL_VERSION, Announce, FeedTip, Hello, Tip
from echostore.mesh import node as mesh_node
from echostore.mesh.connection import Connection, open_connection
from echostore.mesh.connection_limits import Eviction, WorkShare
from echostore.mesh.party_channel import NEWCOMER_FEEDS_MAX
from echostore.mesh.work_queue import Rank, WorkQueue
from echostore.peer.network import parse_address
from echostore.peer.peer import Peer
from echostore.peer.service import Service
from echostore.wire.mesh import Offer, Ping, Sync, channel_of, party_tag
from echostore.wire.signing import SigningKey
from echostore.wire.sync import encode_frame
from network_peers import PATIENCE_S, address, converged, invited, peers, until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def limit(peer: Peer, **limits: Any) -> None:
    limiter = peer.network.node.limiter
    limiter.limits = replace(limiter.limits, **limits)


@contextlib.asynccontextmanager
async def stranger(peer: Peer) -> AsyncIterator[Connection]:
    """A connection with a key that nobody knows, of somebody who has seen a ticket; the peer has taken it."""
    key = SigningKey.generate()
    shaken = await open_connection(*parse_address(address(peer)), key, expected=DeviceKey(peer.device))
    async with asyncio.timeout(PATIENCE_S):
        while DeviceKey(key.public) not in peer.network.node.links:
            await asyncio.sleep(0.005)
    try:
        yield shaken.connection
    finally:
        shaken.connection._writer.transport.abort()


async def thrown_out(connection: Connection) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(OSError):
            while await connection._reader.read(1 << 16):
                pass


def attack(act: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(act())  # type: ignore[arg-type]  # a coroutine function is given


def evicted(peer: Peer) -> dict[Eviction, int]:
    return dict(peer.network.node.limiter.counters.evicted)


def test_offers_without_end_are_forgotten_and_then_end_the_connection(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        heard = 0

        async def act() -> None:
            nonlocal heard
            async with stranger(ann) as connection:
                (link,) = [each for each in ann.network.node.links.values() if not each.known]
                for _ in range(20):
                    connection.send(Offer(tuple(secrets.token_bytes(32) for _ in range(10_000))))
                await thrown_out(connection)
                heard = len(link._heard)

        attack(act)
        assert evicted(ann) == {Eviction.BYTES: 1}
        assert heard == mesh_node.STRANGER_OFFERS_MAX
        assert ann.network.node.counters.offers_forgotten > 10_000
        assert ann.network.node.limiter.strangers_bytes == 0
        trip.create(type="task")
        converged(trip, theirs)


def test_a_member_that_offers_without_end_is_forgotten_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_node, "OFFERS_MAX", 100)
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        (link,) = bob.network.node.links.values()
        bob.network.soon(lambda: link.connection.send(Offer(tuple(secrets.token_bytes(32) for _ in range(5_000)))))
        until(lambda: ann.network.node.counters.offers_forgotten >= 4_900)
        (here,) = ann.network.node.links.values()
        assert len(here._heard) == 100
        trip.create(type="task")
        converged(trip, theirs)


def test_small_frames_without_end_end_the_connection(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):

        async def act() -> None:
            async with stranger(ann) as connection:
                for number in range(2_000):
                    connection.send(Ping(number))
                await thrown_out(connection)

        attack(act)
        limiter = ann.network.node.limiter
        assert evicted(ann) == {Eviction.FRAMES: 1}
        assert limiter.counters.frames == limiter.limits.frames_max + 1, "nothing beyond is looked at"


def test_frames_that_are_never_whole_are_bounded_together(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        limit(ann, bytes_max=1 << 20, total_bytes_max=1 << 20)

        async def act() -> None:
            async with stranger(ann) as small, stranger(ann) as large:
                small._writer.write(small._channel.send(bytes(500_000))[:400_000])
                async with asyncio.timeout(PATIENCE_S):
                    while ann.network.node.limiter.strangers_bytes < 400_000:
                        await asyncio.sleep(0.005)
                large._writer.write(large._channel.send(bytes(900_000))[:-1])
                await thrown_out(large)
                assert ann.network.node.limiter.strangers == 1
                assert ann.network.node.limiter.strangers_bytes == 400_000

        attack(act)
        assert evicted(ann) == {Eviction.TOTAL_BYTES: 1}


def test_who_shares_nothing_in_time_goes_and_the_other_side_is_told(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        limit(ann, seconds=0.0)
        eve.network.connect(address(ann), device=ann.device, keep=False)
        (link,) = eve.network.node.links.values()
        until(lambda: evicted(ann) == {Eviction.TIME: 1})
        until(lambda: link.connection.ended is not None)
        assert link.connection.ended.detail.startswith(mesh_node.SHARES_NOTHING)
        assert [each.device for each in ann.network.connections()] == [bob.device]


def test_keys_that_nobody_knows_keep_no_member_out(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        bob.network.disconnect(address(ann))
        until(lambda: not ann.network.connections())
        limit(ann, links_max=8, strangers_max=6, strangers_per_address_max=6)

        async def act() -> None:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(20):
                    await stack.enter_async_context(stranger(ann))
                assert ann.network.node.limiter.strangers == 6
                await asyncio.to_thread(bob.connect, address(ann))
                trip.create(type="task")
                await asyncio.to_thread(converged, trip, theirs)
                assert ann.network.node.limiter.known == 1

        attack(act)
        assert evicted(ann) == {Eviction.ADDRESS: 14}
        assert ann.network.node.limiter.counters.known_refused == 0


def test_strangers_leave_nothing_behind(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):

        async def act() -> None:
            for _ in range(5):
                async with stranger(ann):
                    pass

        attack(act)
        until(lambda: not ann.network.node.links)
        assert ann.network.seen == {}
        assert ann.network.node.limiter.strangers == ann.network.node.limiter.handshakes == 0


def test_sockets_that_never_shake_hands_are_displaced_by_a_member(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        bob.network.disconnect(address(ann))
        until(lambda: not ann.network.connections())
        limit(ann, handshakes_max=16, handshakes_per_address_max=16)

        async def act() -> None:
            opened = [await asyncio.open_connection(*parse_address(address(ann))) for _ in range(64)]
            for _, writer in opened:
                writer.write(b"ECHO")
            async with asyncio.timeout(PATIENCE_S):
                while sum(ann.network.node.limiter.counters.displaced.values()) < 48:
                    await asyncio.sleep(0.005)
            assert ann.network.node.limiter.handshakes == 16
            await asyncio.to_thread(bob.connect, address(ann))
            trip.create(type="task")
            await asyncio.to_thread(converged, trip, theirs)
            for _, writer in opened:
                writer.transport.abort()

        attack(act)
        assert ann.network.node.limiter.counters.displaced == {Eviction.ADDRESS: 49}
        until(lambda: ann.network.node.counters.refused["too-many"] == 49)


def test_many_members_at_one_address_are_no_strangers(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat", "dan") as (ann, *others):
        limit(ann, strangers_per_address_max=1, strangers_max=1, handshakes_per_address_max=4)
        trip = ann.create_party("Trip")
        theirs = [invited(ann, trip, each) for each in others]
        trip.create(type="task")
        converged(trip, *theirs)
        assert (ann.network.node.limiter.known, ann.network.node.limiter.strangers) == (3, 0)


def test_a_newcomer_may_name_few_feeds_and_is_not_believed(tmp_path: Path) -> None:
    """Who has seen a ticket knows the party's key, and is a stranger all the same."""
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        named: set[bytes] = set()

        async def act() -> None:
            async with stranger(ann) as connection:
                tag = party_tag(connection.handshake_hash, trip.key)
                connection.send(Offer((tag,)))
                tips = tuple(
                    FeedTip(FeedKey(secrets.token_bytes(32)), "data", Tip(7, BlockLink(secrets.token_bytes(32))))
                    for _ in range(1_000)
                )
                named.update(tip.feed for tip in tips)
                for frame in (Hello(PROTOCOL_VERSION, (), ()), Announce(tips)):
                    connection.send(Sync(channel_of(tag), encode_frame(frame)))
                (link,) = [each for each in ann.network.node.links.values() if not each.known]
                async with asyncio.timeout(PATIENCE_S):
                    while not link.channels:
                        await asyncio.sleep(0.005)
                    (channel,) = link.channels.values()
                    session = channel._endpoint.session
                    while len(session._heard_of) < NEWCOMER_FEEDS_MAX:
                        await asyncio.sleep(0.005)
                assert len(session._heard_of) == NEWCOMER_FEEDS_MAX
                assert channel.newcomer

        attack(act)
        assert not named & trip.known_feeds()
        trip.create(type="task")
        converged(trip, theirs)


def test_a_removed_device_is_a_stranger_from_then_on(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invited(ann, trip, bob)
        assert (ann.network.node.limiter.known, ann.network.node.limiter.strangers) == (1, 0)
        trip.members.remove(bob.identity)
        trip.flush()
        until(lambda: ann.network.node.limiter.known == 0)
        until(lambda: ann.network.seen[bob.device].ended != "")


def test_lock_out_is_in_healthz_and_all_is_counted(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="ann") as peer:
        service = Service(peer, listen=["127.0.0.1:0"], metrics="127.0.0.1:0")
        try:
            assert service.http is not None
            url = f"http://{service.http.address}"
            with urlopen(f"{url}/healthz", timeout=30) as answer:
                assert json.load(answer)["problems"] == []
            limit(peer, links_max=0)
            limiter = peer.network.node.limiter

            async def refuse() -> None:
                now = asyncio.get_running_loop().time()
                assert limiter.link_began(object(), "10.0.0.1", now, known=True) == (False, [])  # type: ignore[arg-type]

            peer.network.call(refuse())
            with pytest.raises(HTTPError) as unwell:
                urlopen(f"{url}/healthz", timeout=30)
            assert unwell.value.code == 503
            (problem,) = json.load(unwell.value)["problems"]
            assert problem.startswith("members may be locked out: known devices were refused")
            with urlopen(f"{url}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            assert "echostore_known_refused_total 1.0" in text
            for name in ("strangers", "strangers_held_bytes", "handshakes", "strangers_frames_total"):
                assert f"\nechostore_{name} 0.0" in text
            for name in ("strangers_evicted", "handshakes_displaced"):
                assert f"# TYPE echostore_{name}_total counter" in text
        finally:
            service.close()


# turns


def test_begun_handshakes_go_first_then_known_addresses_then_the_newest() -> None:
    async def run() -> list[str]:
        share = WorkShare(0.5, 0.0)
        queue = WorkQueue(share)
        done: list[str] = []

        async def work(name: str, rank: Rank) -> None:
            await queue.turn(rank=rank)
            done.append(name)

        share.spent(0.01, asyncio.get_running_loop().time())
        async with asyncio.TaskGroup() as group:
            for name, rank in (
                ("old", Rank.OTHER),
                ("member", Rank.PREFERRED),
                ("new", Rank.OTHER),
                ("begun", Rank.BEGUN),
                ("begun later", Rank.BEGUN),
            ):
                group.create_task(work(name, rank))
        return done

    assert asyncio.run(run()) == ["begun", "begun later", "member", "new", "old"]


def test_frames_of_strangers_are_taken_in_the_order_they_came() -> None:
    async def run() -> list[int]:
        share = WorkShare(0.5, 0.0)
        queue = WorkQueue(share)
        done: list[int] = []

        async def work(number: int) -> None:
            await queue.turn(number)
            done.append(number)

        share.spent(0.01, asyncio.get_running_loop().time())
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(work(number))
        assert queue.waiting == 0
        return done

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]


def test_who_is_evicted_does_not_wait_for_its_turn() -> None:
    async def run() -> None:
        share = WorkShare(0.5, 0.0)
        queue = WorkQueue(share)
        share.spent(1_000.0, asyncio.get_running_loop().time())
        waits = asyncio.create_task(queue.turn("gone"))
        cancelled = asyncio.create_task(queue.turn("late"))
        await asyncio.sleep(0)
        assert queue.waiting == 2
        queue.release("gone")
        await waits
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        assert queue.waiting == 0

    asyncio.run(run())
