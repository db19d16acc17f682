"""Slots, budgets and eviction of strangers, without sockets. Invariants L1 to L6 of `mesh.connection_limits`."""

from dataclasses import replace

import pytest

from echostore.mesh.connection_limits import (
    LOCKOUT_S,
    ConnectionLimiter,
    Eviction,
    Limits,
    WorkShare,
    address_group,
)

SMALL = Limits(
    links_max=8,
    strangers_max=5,
    strangers_per_address_max=3,
    handshakes_max=5,
    handshakes_per_address_max=3,
    seconds=60.0,
    bytes_max=100,
    frames_max=10,
    total_bytes_max=250,
)


@pytest.fixture
def limiter() -> ConnectionLimiter[str, str]:
    return ConnectionLimiter(SMALL)


def enter(
    limiter: ConnectionLimiter[str, str], key: str, address: str = "x", *, known: bool = False, now: float = 0.0
) -> list[tuple[str, Eviction]]:
    fits, evicted = limiter.link_began(key, address, now, known=known)
    assert fits
    return evicted


def test_l1_strangers_leave_room_for_known_devices(limiter: ConnectionLimiter[str, str]) -> None:
    for number in range(100):
        enter(limiter, f"s{number}", f"address {number}")
    assert limiter.strangers == SMALL.strangers_max
    for number in range(SMALL.links_max - SMALL.strangers_max):
        assert enter(limiter, f"k{number}", known=True) == []


def test_l2_a_known_device_takes_the_slot_of_a_stranger(limiter: ConnectionLimiter[str, str]) -> None:
    for number in range(5):
        enter(limiter, f"s{number}", f"address {number}")
    for number in range(3):
        enter(limiter, f"k{number}", known=True)
    assert enter(limiter, "k3", known=True) == [("s0", Eviction.KNOWN)]
    assert (limiter.known, limiter.strangers) == (4, 4)


def test_l2_known_devices_alone_can_fill_all_and_the_next_is_refused_and_reported(
    limiter: ConnectionLimiter[str, str],
) -> None:
    for number in range(8):
        enter(limiter, f"k{number}", known=True)
    assert limiter.lockouts(10.0) == []
    assert limiter.link_began("late", "y", 10.0, known=True) == (False, [])
    assert limiter.counters.known_refused == 1
    assert limiter.lockouts(10.0) == ["known devices were refused: 8 are connected"]
    assert limiter.lockouts(10.0 + LOCKOUT_S + 1) == []
    assert limiter.link_began("stranger", "y", 10.0, known=False) == (False, [])
    assert limiter.counters.strangers_refused == 1


def test_l2_known_devices_do_not_count_against_an_address(limiter: ConnectionLimiter[str, str]) -> None:
    for number in range(6):
        assert enter(limiter, f"k{number}", "home", known=True) == []
    assert enter(limiter, "s", "home") == []


def test_l3_an_address_at_its_quota_loses_its_own_oldest(limiter: ConnectionLimiter[str, str]) -> None:
    enter(limiter, "other", "y")
    for number in range(3):
        enter(limiter, f"s{number}")
    assert enter(limiter, "s3") == [("s0", Eviction.ADDRESS)]
    assert enter(limiter, "s4") == [("s1", Eviction.ADDRESS)]
    assert limiter.counters.evicted == {Eviction.ADDRESS: 2}


def test_l3_without_room_the_busiest_address_loses_its_oldest(limiter: ConnectionLimiter[str, str]) -> None:
    for key, address in (("a", "y"), ("b", "x"), ("c", "x"), ("d", "z"), ("e", "x")):
        enter(limiter, key, address)
    assert enter(limiter, "f", "w") == [("b", Eviction.ROOM)]


def test_l3_who_names_a_party_of_ours_goes_last(limiter: ConnectionLimiter[str, str]) -> None:
    for number in range(3):
        enter(limiter, f"s{number}")
    limiter.newcomer("s0")
    assert enter(limiter, "s3") == [("s1", Eviction.ADDRESS)]
    limiter.newcomer("s2")
    limiter.newcomer("s3")
    assert enter(limiter, "s4") == [("s0", Eviction.ADDRESS)]


def test_l3_handshakes_displace_the_oldest_of_the_busiest_address(limiter: ConnectionLimiter[str, str]) -> None:
    assert [limiter.handshake_began(f"h{number}", "x", 0.0) for number in range(3)] == [[], [], []]
    assert limiter.handshake_began("h3", "x", 0.0) == ["h0"]
    assert limiter.handshake_began("y0", "y", 0.0) == []
    assert limiter.handshake_began("z0", "z", 0.0) == []
    assert limiter.handshake_began("w0", "w", 0.0) == ["h1"]
    assert limiter.handshakes == SMALL.handshakes_max
    assert limiter.counters.displaced == {Eviction.ADDRESS: 1, Eviction.ROOM: 1}
    limiter.handshake_ended("h2")
    limiter.handshake_ended("h2")
    assert limiter.handshakes == SMALL.handshakes_max - 1


def test_displaced_handshakes_are_a_lock_out_where_known_devices_were_seen(
    limiter: ConnectionLimiter[str, str],
) -> None:
    for number in range(4):
        limiter.handshake_began(f"h{number}", "x", 0.0)
    assert limiter.lockouts(0.0) == []
    limiter.remember("x")
    limiter.handshake_began("h4", "x", 0.0)
    assert limiter.lockouts(0.0) == ["handshakes are displaced at an address of known devices"]
    limiter.handshake_starved("x", 100.0)
    assert limiter.lockouts(100.0) == ["handshakes wait too long for their turn at an address of known devices"]
    assert limiter.counters.starved == 1


def test_without_files_the_oldest_handshake_goes(limiter: ConnectionLimiter[str, str]) -> None:
    limiter.handshake_began("h0", "x", 0.0)
    limiter.handshake_began("h1", "y", 0.0)
    assert limiter.out_of_files(0.0) == ["h0"]
    assert limiter.lockouts(0.0) == ["no more files can be opened, so that no connection can be taken"]


def test_l4_bytes_frames_and_seconds_are_bounded(limiter: ConnectionLimiter[str, str]) -> None:
    for key in ("bytes", "frames", "time"):
        enter(limiter, key, now=5.0)
    assert limiter.received("bytes", 100) == []
    assert limiter.received("bytes", 1) == [("bytes", Eviction.BYTES)]
    assert [limiter.frame("frames") for _ in range(10)] == [[]] * 10
    assert limiter.frame("frames") == [("frames", Eviction.FRAMES)]
    assert limiter.next_deadline() == 65.0
    assert limiter.expired(64.9) == []
    assert limiter.expired(65.0) == [("time", Eviction.TIME)]
    assert limiter.strangers == limiter.strangers_bytes == 0
    assert limiter.next_deadline() is None
    assert limiter.counters.evicted == {Eviction.BYTES: 1, Eviction.FRAMES: 1, Eviction.TIME: 1}
    assert (limiter.counters.size_bytes, limiter.counters.frames) == (101, 11)


def test_l4_what_counts_here_gives_budget_and_time_back(limiter: ConnectionLimiter[str, str]) -> None:
    enter(limiter, "s")
    limiter.received("s", 100)
    for _ in range(10):
        limiter.frame("s")
    limiter.useful("s", 30.0)
    assert limiter.strangers_bytes == 0
    assert limiter.received("s", 100) == []
    assert [limiter.frame("s") for _ in range(10)] == [[]] * 10
    assert limiter.expired(89.9) == []
    assert limiter.expired(90.0) == [("s", Eviction.TIME)]


def test_l4_a_known_device_has_no_budget(limiter: ConnectionLimiter[str, str]) -> None:
    enter(limiter, "k", known=True)
    enter(limiter, "s")
    limiter.received("s", 90)
    limiter.became_known("s")
    assert limiter.strangers_bytes == 0
    assert limiter.preferred("x")
    for key in ("k", "s"):
        assert limiter.received(key, 10_000) == []
        assert [limiter.frame(key) for _ in range(20)] == [[]] * 20
    assert limiter.expired(1e9) == []


def test_l4_a_removed_device_has_a_strangers_time(limiter: ConnectionLimiter[str, str]) -> None:
    enter(limiter, "k", known=True)
    assert limiter.became_stranger("k", "x", 100.0) == []
    assert (limiter.known, limiter.strangers) == (0, 1)
    assert limiter.expired(160.0) == [("k", Eviction.TIME)]
    assert limiter.became_stranger("k", "x", 200.0) == [], "it is gone already"
    assert limiter.strangers == 0


def test_l5_all_strangers_together_are_bounded_and_the_greatest_goes(limiter: ConnectionLimiter[str, str]) -> None:
    for number, size in enumerate((80, 90, 79)):
        enter(limiter, f"s{number}", f"address {number}")
        assert limiter.received(f"s{number}", size) == []
    enter(limiter, "s3", "address 3")
    assert limiter.received("s3", 2) == [("s1", Eviction.TOTAL_BYTES)]
    assert limiter.strangers_bytes == 161


def test_addresses_of_known_devices_are_bounded() -> None:
    limiter: ConnectionLimiter[str, str] = ConnectionLimiter()
    for number in range(5_000):
        limiter.remember(str(number))
    assert not limiter.preferred("0")
    assert limiter.preferred("4999")
    assert sum(limiter.preferred(str(number)) for number in range(5_000)) == 4096


def test_the_usual_limits_fit_each_other() -> None:
    usual = Limits()
    assert usual.strangers_max <= usual.links_max // 2, "half of all connections is for known devices"
    assert usual.strangers_per_address_max <= usual.strangers_max
    assert usual.handshakes_per_address_max <= usual.handshakes_max
    assert replace(usual, links_max=1).links_max == 1


def test_an_ipv6_network_is_one_address() -> None:
    assert address_group("2001:db8::1") == address_group("2001:db8::ffff:1") != address_group("2001:db8:0:1::1")
    assert address_group("::ffff:10.0.0.1") == address_group("10.0.0.1") == "10.0.0.1"
    assert address_group("fe80::1%eth0") == address_group("fe80::2%eth0")


def test_work_takes_its_share_and_a_burst() -> None:
    share = WorkShare(0.25, 0.1)
    assert share.wait_s(0.0) == 0.0
    share.spent(0.1, 0.0)
    assert share.wait_s(0.0) == 0.0, "the burst"
    share.spent(0.1, 0.0)
    assert share.wait_s(0.0) == pytest.approx(0.4), "a tenth of a second is paid for by four"
    assert share.wait_s(0.4) == pytest.approx(0.0)
    assert share.wait_s(1_000.0) == 0.0
    share.spent(0.1, 1_000.0)
    assert share.wait_s(1_000.0) == 0.0, "idle time saves up no more than the burst"
    share.spent(0.2, 1_000.0)
    assert share.wait_s(1_000.0) == pytest.approx(0.8)
    assert share.spent_s == pytest.approx(0.5)
