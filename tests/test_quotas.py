"""Floods by members: token buckets per feed and per device, turns, and that nothing is lost or slowed without need."""

import asyncio
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from cli_process import Cli
from echostore.kernel.errors import UsageError
from echostore.kernel.ids import DeviceKey, FeedKey
from echostore.kernel.sync import turns
from echostore.kernel.sync.turns import BURST_S, DEBT_S, Cost, OverQuota, Quotas, Turns
from echostore.mesh.blob_exchange import BlobExchange
from echostore.mesh.intake import Intake
from echostore.mesh.policy import Flow
from echostore.peer.quotas import QUOTAS_SETTING, quotas_of
from echostore.peer.service import Service
from echostore.testing.memory_node import PARTY, MemoryNode
from echostore.testing.network import Faults
from echostore.testing.world import World
from echostore.wire.cids import RAW, cid_of
from echostore.wire.mesh import Blob, Want
from network_peers import converged, invited, peers


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


SMALL = Quotas(feed_blocks=50, feed_bytes=1e9, device_blocks=200, device_bytes=1e9)
"""Ten blocks per second: ten who flood have half of what a node takes in at PACE."""
PACE = 1000.0
STEADY = Faults(delay_min_s=0.005, delay_max_s=0.005)
"""Frames of a connection do not overtake each other."""
ATTACKERS = "cdefghijkl"
PADDING = "." * 4000
"""So that a range has a dozen blocks, as much work as one of a real peer."""
STAR = ",".join(f"a{other}" for other in "b" + ATTACKERS)


def feed(number: int) -> FeedKey:
    return FeedKey(number.to_bytes(32, "big"))


def device(number: int) -> DeviceKey:
    return DeviceKey(number.to_bytes(32, "big"))


def cost(number: int, blocks: int = 10, *, by: int | None = None, size_bytes: int = 0) -> Cost:
    return Cost(feed(number), device(number if by is None else by), blocks, size_bytes)


# buckets


def test_a_full_bucket_lets_a_burst_through_and_then_fills_by_the_second() -> None:
    order: Turns[str] = Turns(SMALL)
    taken = 0
    while order.take(cost(1, 1), "", 100.0):
        taken += 1
    assert taken == pytest.approx(BURST_S * SMALL.feed_blocks, abs=1)  # the last one may go into debt
    assert order.over(feed(1), device(1), 100.0) is OverQuota.FEED
    assert order.over(feed(1), device(1), 100.5) is None
    assert order.over(feed(2), device(1), 100.0) is None


def test_bytes_count_as_blocks_do() -> None:
    order: Turns[str] = Turns(Quotas(feed_blocks=1e6, feed_bytes=100, device_blocks=1e6, device_bytes=1e9))
    assert order.take(cost(1, 1, size_bytes=int(100 * BURST_S)), "", 0.0)
    assert order.over(feed(1), device(1), 0.0) is OverQuota.FEED


def test_a_device_with_many_feeds_has_one_bucket_for_all_of_them() -> None:
    order: Turns[str] = Turns(SMALL)
    for number in range(20):
        order.take(cost(number, 41, by=1), "", 0.0)
    assert order.over(feed(99), device(1), 0.0) is OverQuota.DEVICE
    assert order.over(feed(99), device(2), 0.0) is None


def test_debt_is_bounded_and_forgiven() -> None:
    order: Turns[str] = Turns(SMALL)
    order.take(cost(1, 1_000_000), "", 0.0)
    assert order.over(feed(1), device(1), DEBT_S - 0.1) is OverQuota.FEED
    assert order.over(feed(1), device(1), DEBT_S + 0.1) is None


def test_buckets_are_bounded_and_the_emptiest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "BUCKETS_MAX", 100)
    order: Turns[str] = Turns(SMALL)
    order.take(cost(0, 1000), "", 0.0)
    for number in range(1, 1000):
        order.take(cost(number, 1), "", 0.0)
    assert len(order._feeds) <= 100
    assert len(order._devices) <= 100
    assert order.over(feed(0), device(0), 1.0) is OverQuota.FEED


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "many", 1e13])
def test_a_quota_is_a_sensible_number(wrong: object) -> None:
    with pytest.raises(UsageError):
        Quotas(feed_blocks=wrong)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(UsageError):
        Quotas(device_bytes=wrong)  # type: ignore[arg-type]  # on purpose


# turns


def test_the_fullest_bucket_goes_first_and_equals_in_the_order_they_came() -> None:
    order: Turns[str] = Turns(SMALL)
    for number, taken in ((1, 900), (2, 300), (3, 300)):
        order.take(cost(number, taken), "", 0.0)
    for number, name in ((1, "heavy"), (2, "first"), (3, "second"), (4, "new")):
        order.wait(cost(number), name)
    assert [order.next(0.0) for _ in range(5)] == ["new", "first", "second", "heavy", None]


def test_within_one_device_the_feed_decides() -> None:
    """A peer that passes on a flood also passes on what others write: that goes first."""
    order: Turns[str] = Turns(SMALL)
    order.take(cost(1, 10_000, by=9), "", 0.0)
    order.wait(cost(1, by=9), "flood")
    order.wait(cost(2, by=9), "passed on")
    order.wait(cost(3, by=8), "from elsewhere")
    assert [order.next(0.0) for _ in range(3)] == ["from elsewhere", "passed on", "flood"]


def test_what_is_over_waits_for_nobody_when_nobody_else_is_there() -> None:
    order: Turns[int] = Turns(SMALL)
    for number in range(1000):
        if not order.take(cost(1, 1000), number, 0.0):
            assert order.next(0.0) == number
    assert order.over_blocks[OverQuota.FEED] > 900_000
    assert order.slowed_blocks == 0
    standing = order.of_feed(feed(1), 0.0)
    assert standing is not None
    assert standing.over
    assert standing.slowed == 0


def test_what_others_went_before_is_counted() -> None:
    order: Turns[str] = Turns(SMALL)
    order.take(cost(1, 1000), "", 0.0)
    assert not order.take(cost(1, 7), "flood", 0.0)
    assert order.take(cost(2, 1), "honest", 0.0)
    assert order.next(0.0) == "flood"
    standing = order.of_device(device(1), 0.0)
    assert standing is not None
    assert (order.slowed_blocks, standing.slowed) == (7, 7)
    honest = order.of_feed(feed(2), 0.0)
    assert honest is not None
    assert honest.slowed == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 60), st.booleans(), st.floats(0, 2)), max_size=60
    )
)
def test_turns_are_those_of_a_naive_search(steps: list[tuple[int, int, int, bool, float]]) -> None:
    """The heap gives what a search over all that waits would give, and everything comes out once."""
    order: Turns[int] = Turns(SMALL)
    waiting: dict[int, Cost] = {}
    now, came = 0.0, 0
    for number, (of, by, blocks, draw, pause) in enumerate(steps):
        now += pause
        one = cost(of, blocks, by=by)
        order.wait(one, number)
        waiting[number] = one
        if draw:
            best = min(waiting, key=lambda each: (*_rank(order, waiting[each]), each))
            assert order.next(now) == best
            del waiting[best]
            came += 1
    while (got := order.next(now)) is not None:
        del waiting[got]
        came += 1
    assert not waiting
    assert came == len(steps)


def _rank(order: Turns[int], of: Cost) -> tuple[float, float]:
    def empty_at(bucket: turns.Bucket | None) -> float:
        return -float("inf") if bucket is None else bucket.empty_at

    own = empty_at(order._feeds.get(of.feed))
    return max(own, empty_at(order._devices.get(of.device))), own


# a flood by ten members, in virtual time


def flooded(seed: int, *, attackers: str, bulk: bool, quotas: Quotas = SMALL, links: str = STAR) -> tuple[World, int]:
    """How many blocks of b the node a has taken in: what b writes steadily, or all at once after a while of flood."""
    pace = {"a": PACE, **dict.fromkeys("b" + ATTACKERS, 0.1)}  # the others are too slow to matter
    world = World(seed, peers=12, links=links, faults=STEADY, pace=pace, quotas=quotas, decode=False)
    chance = random.Random(seed)
    hub, honest = world.nodes["a"], world.nodes["b"]
    assert isinstance(hub, MemoryNode)
    assert isinstance(honest, MemoryNode)
    for name in attackers:
        for _ in range(chance.randrange(14, 18)):
            for number in range(25):
                world.nodes[name].write(f"flood {number} " + PADDING)
            world.nodes[name].flush()
    world.run(3.0 if bulk else 2.0)
    if bulk:
        for number in range(400):
            honest.write(f"work {number} " + PADDING)
            if number % 20 == 19:
                honest.flush()
        world.write("b")
        world.run(0.25)
    else:
        for _ in range(10):
            for number in range(4):
                honest.write(f"work {number}")
            world.write("b").run(0.1)
    return world, hub.length(honest.data)


@cache
def alone(bulk: bool) -> int:
    """What the node takes in of b when nobody floods."""
    return flooded(0, attackers="", bulk=bulk)[1]


NO_QUOTAS = Quotas(1e12, 1e12, 1e12, 1e12)


@pytest.mark.parametrize("seed", range(50))
def test_an_honest_feed_keeps_half_of_its_share_while_ten_members_flood(seed: int) -> None:
    bulk = seed % 2 == 1
    _, taken = flooded(seed, attackers=ATTACKERS, bulk=bulk)
    assert taken >= alone(bulk) / 2


@pytest.mark.parametrize("bulk", [False, True])
def test_without_quotas_the_same_flood_takes_more_than_half(bulk: bool) -> None:
    _, taken = flooded(0, attackers=ATTACKERS, bulk=bulk, quotas=NO_QUOTAS)
    assert taken < alone(bulk) / 2


def test_a_flood_that_is_passed_on_leaves_what_else_is_passed_on_its_share() -> None:
    """b and all who flood are behind one peer, c, on one connection to a: within it, turns are per feed."""
    links = "ac," + ",".join(f"c{other}" for other in "b" + ATTACKERS[1:])
    world = World(5, peers=12, links=links, faults=STEADY, pace={"a": PACE}, quotas=SMALL, decode=False)
    hub, honest = world.nodes["a"], world.nodes["b"]
    assert isinstance(hub, MemoryNode)
    assert isinstance(honest, MemoryNode)
    for name in ATTACKERS[1:]:
        for _ in range(12):
            for number in range(25):
                world.nodes[name].write(f"flood {number} " + PADDING)
            world.nodes[name].flush()
    world.run(1.0)
    for _ in range(5):
        world.write("b").run(0.1)
    assert len(world.intakes["a"].turns), "nobody waits: there is no flood"
    assert hub.length(honest.data) >= 4


def test_nothing_is_lost_and_all_agree_after_a_flood() -> None:
    quotas = Quotas(feed_blocks=1, feed_bytes=1, device_blocks=1, device_bytes=1)
    world = World(3, peers=4, faults=Faults(loss=0.1), pace=dict.fromkeys("abcd", 50.0), quotas=quotas)
    for _ in range(5):
        for name in "abcd":
            for number in range(20):
                world.nodes[name].write(f"{name} {number}")
            world.write(name)
        world.run(1.0)
    assert sum(intake.turns.slowed_blocks for intake in world.intakes.values()) > 0
    world.crash("b").run(1.0).restart("b").settle()
    timeframe, _ = world.nodes["a"].state()
    assert sorted(seq for seq, _ in timeframe.values()) == [104, 104, 104, 104]


# blobs


class AskingConnection:
    """A link's connection that takes everything."""

    writable, ended = True, None

    def __init__(self) -> None:
        self.blobs = 0

    def send(self, frame: object) -> None:
        assert isinstance(frame, Blob)
        self.blobs += 1


def test_a_device_that_asks_for_blobs_without_end_stands_behind_others() -> None:
    blob = bytes(64 * 1024)
    cids = [cid_of(str(number).encode(), RAW) for number in range(400)]

    async def ask() -> tuple[int, int]:
        here = SimpleNamespace(
            flow=lambda device: Flow.BOTH,
            blobs_here=lambda party, some, bytes_max: dict.fromkeys(some[:4], blob),
        )
        intake = Intake()
        intake.set_quotas(Quotas(device_bytes=2 * len(blob)))
        exchange = BlobExchange(SimpleNamespace(intake=intake), here)  # type: ignore[arg-type]  # what it needs of them
        links = [
            SimpleLink(
                device=device(number), connection=AskingConnection(), given_to=lambda channel, some: (PARTY, some)
            )
            for number in range(11)
        ]
        *attackers, honest = links
        for link in attackers:
            exchange._asked(link, PARTY, Want(1, tuple(cids)))  # type: ignore[arg-type]  # what it needs of a link
        while sum(link.connection.blobs for link in attackers) < 3000:
            await asyncio.sleep(0)
        before = sum(link.connection.blobs for link in attackers)
        exchange._asked(honest, PARTY, Want(1, tuple(cids[:100])))  # type: ignore[arg-type]  # as above
        while honest.connection.blobs < 100:
            await asyncio.sleep(0)
        meanwhile = sum(link.connection.blobs for link in attackers) - before
        while sum(link.connection.blobs for link in attackers) < 10 * len(cids):
            await asyncio.sleep(0)  # work goes on when nobody else waits
        return honest.connection.blobs, meanwhile

    honest, meanwhile = asyncio.run(ask())
    assert meanwhile <= honest


class SimpleLink(SimpleNamespace):
    __hash__ = object.__hash__


# real peers


def test_a_flood_of_a_real_peer_is_slowed_counted_and_shown_and_nothing_is_lost(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        ann.network.set_quotas({"feed_blocks": 1, "device_blocks": 1})
        party = ann.create_party("Trip")
        theirs = invited(ann, party, bob)
        for number in range(80):
            theirs.create("property-set", type="task", number=number)
            theirs.flush()
        converged(party, theirs)  # these may have come in one range; what comes now finds an empty bucket
        theirs.create("property-set", type="task", number=80)
        theirs.flush()
        converged(party, theirs)
        assert ann.network.intake.over_feed_blocks + ann.network.intake.over_device_blocks > 0
        assert ann.network.intake.waiting == 0
        (flooding,) = [each for each in party.status.feeds if each.key == theirs.runtime.data.cursor.key]
        assert flooding.over_quota
        assert not [each for each in party.status.feeds if each.own and each.over_quota]
        left = ann.network.quota_of_device(bob.device)
        assert left is not None
        assert left.over
        assert ann.network.quota_of_device(ann.device) is None


def test_metrics_tell_what_was_slowed(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="home") as peer:
        service = Service(peer, listen=["127.0.0.1:0"], metrics="127.0.0.1:0")
        try:
            peer.network.node.intake.turns.over_blocks[OverQuota.DEVICE] += 5
            assert service.http is not None
            with urlopen(f"http://{service.http.address}/metrics", timeout=30) as answer:
                told = answer.read().decode().splitlines()
        finally:
            service.close()
    for line in (
        'echostore_over_quota_blocks_total{quota="device"} 5.0',
        'echostore_over_quota_blocks_total{quota="feed"} 0.0',
        "echostore_slowed_blocks_total 0.0",
        "echostore_intake_waiting 0.0",
    ):
        assert line in told


def test_quotas_are_kept_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="home") as peer:
        assert peer.network.set_quotas({"feed_blocks": 7}) == Quotas(feed_blocks=7)
        for wrong in ({"feed_blocks": 0}, {"feeds": 3.0}, {"device_bytes": float("nan")}):
            with pytest.raises(UsageError):
                peer.network.set_quotas(wrong)
    with echostore.open(tmp_path / "home") as peer:
        assert peer.network.node.intake.turns.quotas == Quotas(feed_blocks=7)
        assert peer.network.set_quotas({"device_blocks": 9}) == Quotas(feed_blocks=7, device_blocks=9)
        assert peer.network.set_quotas({}, default=True) == Quotas()
        peer.meta.set_setting(QUOTAS_SETTING, {"feed_blocks": "many"})
        assert quotas_of(peer.meta) == Quotas(), "what can't be read is as by default"


def test_quotas_on_the_command_line(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("init").ok()
    shown = cli("quota", "show", "--json").ok().json()
    assert (shown["feed_blocks"], shown["slowed_blocks"]) == (1000, None)
    changed = cli("quota", "set", "--feed-blocks", "200", "--device-bytes", "1e6", "--json").ok().json()
    assert (changed["feed_blocks"], changed["device_bytes"], changed["slowed_blocks"]) == (200, 1e6, 0)
    assert "200 blocks/s" in cli("quota", "show").ok().out
    for wrong in ((), ("--feed-blocks", "0"), ("--feed-blocks", "many"), ("--device-blocks", "nan"), ("--feeds", "3")):
        assert cli("quota", "set", *wrong).status == 2
    assert cli("quota", "show", "--json").ok().json()["feed_blocks"] == 200
    assert cli("quota", "set", "--default", "--json").ok().json()["feed_blocks"] == 1000
