"""The simulated world: one seed is one run, faults do what they say, and peers survive them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from echostore.testing.checker import check_events
from echostore.testing.inmemory import link
from echostore.testing.memory_node import MemoryNode
from echostore.testing.network import Faults, Network
from echostore.testing.peer_node import PeerNodes
from echostore.testing.world import NotSettled, World

SEEDS = int(os.environ.get("WORLD_SEEDS", "60"))
"""Seeds of the long test; the night run asks for more."""

PRINT_DIGEST = """
import sys
from echostore.testing.network import Faults
from echostore.testing.world import World
world = World(11, peers=3, faults=Faults(loss=0.2, duplication=0.3, delay_max_s=0.3)).chaos(10).revive().settle()
sys.stdout.write(world.digest())
"""


def test_one_seed_gives_one_trace_in_every_process() -> None:
    digests = set()
    for hash_seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", PRINT_DIGEST], check=True, capture_output=True, env=environment)
        digests.add(run.stdout)
    assert len(digests) == 1
    assert len(digests.pop()) == 64


def test_another_seed_gives_another_trace() -> None:
    digests = {World(seed, faults=Faults(loss=0.1)).chaos(3).digest() for seed in range(5)}
    assert len(digests) == 5


def test_a_partition_stops_messages_and_healing_lets_them_pass() -> None:
    world = World(1, peers=3).settle().partition("a|bc").write("a", "alone").run(20)
    assert world.nodes["a"].state() != world.nodes["b"].state()
    assert world.nodes["b"].state() == world.nodes["c"].state()
    world.heal().settle(limit_s=30)
    assert world.nodes["a"].state() == world.nodes["b"].state()


def test_a_one_way_partition_stops_one_direction() -> None:
    network = Network(random.Random(1), Faults())
    network.partition("a>bc", ["a", "b", "c"])
    assert not network.passes("a", "b")
    assert not network.passes("a", "c")
    assert network.passes("b", "a")
    assert not network.whole


def test_a_partition_may_have_three_sides_and_long_names() -> None:
    network = Network(random.Random(1), Faults())
    network.partition("ann,bob|cat", ["ann", "bob", "cat"])
    assert network.passes("ann", "bob")
    assert not network.passes("cat", "ann")
    network.heal()
    network.partition("x|y|z", ["x", "y", "z"])
    assert not any(network.passes(one, other) for one in "xyz" for other in "xyz" if one != other)


@pytest.mark.parametrize("split", ["abc", "a|q", ""])
def test_a_partition_of_nobody_is_an_error(split: str) -> None:
    with pytest.raises(ValueError, match=r"partition looks like|not among"):
        World(1).partition(split)


def test_a_clog_delays_and_loses_nothing() -> None:
    network = Network(random.Random(1), Faults())
    network.clog("a", "b", until=9.0)
    assert all(at >= 9.0 for at in network.arrivals("a", "b", now=1.0))
    assert all(at < 2.0 for at in network.arrivals("b", "a", now=1.0))


def test_loss_and_duplication_are_as_likely_as_said() -> None:
    network = Network(random.Random(1), Faults(loss=0.3, duplication=0.5))
    copies = [len(network.arrivals("a", "b", now=0.0)) for _ in range(10_000)]
    assert 0.27 < copies.count(0) / 10_000 < 0.33
    assert 0.45 < copies.count(2) / (10_000 - copies.count(0)) < 0.55


def test_a_crash_loses_what_was_not_flushed_and_nothing_else() -> None:
    world = World(1).write("a", "durable").write("a", "not durable", flush=False).crash("a").run(1).restart("a")
    world.write("a", "after").settle()
    node = world.nodes["b"]
    assert isinstance(node, MemoryNode)
    written = node._disk[world.nodes["a"].data].branches[0].payloads  # type: ignore[attr-defined]  # a MemoryNode too
    assert [b"not durable" in payload for payload in written] == [False, False]


def test_a_crashed_node_is_written_to_no_more_and_catches_up_after_its_restart() -> None:
    world = World(1).settle().crash("b").write("b", "nobody hears this").write("a").run(5).restart("b").settle()
    assert world.nodes["b"].state() == world.nodes["a"].state()
    assert not any("write b" in line for line in world.trace)


def test_flapping_links_do_not_keep_peers_apart() -> None:
    world = World(1, peers=3).settle().write("a").flap("a|bc", period_s=2, times=5).settle(limit_s=30)
    assert world.agreed()


def test_blocks_travel_over_a_peer_in_between() -> None:
    world = World(1, peers=4, links="ab,bc,cd").write("a").write("d").settle()
    assert all("a-d" not in line for line in world.trace)


def test_a_partitioned_world_does_not_settle() -> None:
    with pytest.raises(ValueError, match="heal it first"):
        World(1).partition("a|bc").settle()


def test_peers_that_never_agree_are_reported_with_their_seed() -> None:
    world = World(77, peers=2, links="ac").write("a")
    with pytest.raises(NotSettled, match="seed 77"):
        world.settle(limit_s=5)


def test_convergence_after_a_heal_takes_a_few_rounds_not_minutes() -> None:
    """N2: within one longest repetition and a few messages."""
    for seed in range(20):
        world = World(seed, peers=3).settle().partition("a|b|c")
        for name in "abc":
            world.write(name)
        # For as long as no repetition that doubles without an end comes round by itself soon after.
        world.run(80 + seed).heal()
        healed = world.now
        world.settle()
        assert world.now - healed < 10


@pytest.mark.parametrize("split", ["a|b", "a>b", "b>a"])
def test_peers_that_were_apart_from_the_start_meet_soon_after_a_heal(split: str) -> None:
    """N2: also those that never heard each other, or of which one alone heard the other."""
    for seed in range(10):
        world = World(seed, peers=2).partition(split).write("a").write("b").run(80 + seed).heal()
        healed = world.now
        world.settle()
        assert world.now - healed < 12, "the longest repetition, and a request that was lost before"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_memory_peers_keep_every_promise_in_chaos(seed: int) -> None:
    chance = random.Random(seed)
    links = chance.choice((None, None, "ab,bc,cd"))
    world = World(
        seed, peers=chance.choice((2, 3, 4)) if links is None else 4, faults=Faults.swarm(chance), links=links
    )
    world.chaos(10).revive().settle()
    assert world.scores == []
    report = check_events(world.history)
    assert report.good, f"seed {seed}: {report}"
    assert report.fates["stable"] > 0


@pytest.mark.parametrize("seed", range(max(2, SEEDS // 15)))
def test_real_peers_keep_every_promise_in_chaos(seed: int, tmp_path: Path) -> None:
    """Real stores, keys and snapshots: equal CIDs at the end, and a history without a violation."""
    chance = random.Random(seed)
    with PeerNodes(tmp_path, seed=seed) as make:
        world = World(seed, peers=3, make=make, faults=Faults.swarm(chance))
        world.chaos(5).revive().settle()
        assert world.scores == []
        report = check_events(world.history)
        assert report.good, f"seed {seed}: {report}"


def test_one_seed_gives_one_trace_with_real_peers(tmp_path: Path) -> None:
    digests = set()
    for run in ("first", "second"):
        with PeerNodes(tmp_path / run, seed=5) as make:
            digests.add(World(5, peers=2, make=make, faults=Faults(loss=0.2)).chaos(2).revive().settle().digest())
    assert len(digests) == 1


def test_a_receipt_sees_what_the_other_side_of_a_link_holds(tmp_path: Path) -> None:
    with PeerNodes(tmp_path, seed=1) as make:
        one, other = (make(name, lambda event: None) for name in "ab")
        joined = link(one.party.peer, other.party.peer, one.party.key).pump()
        one.write("hello")
        receipt = one.party.flush()
        assert receipt.held_by == 1
        joined.pump()
        assert receipt.held_by == 2
        assert one.state() == other.state()
