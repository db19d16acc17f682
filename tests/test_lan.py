"""Finding members on the local network: what strangers can see, who is dialled, and real mDNS on the loopback."""

import asyncio
import builtins
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_process import Cli
from echostore.kernel.errors import Refused
from echostore.kernel.ids import PartyKey
from echostore.mesh.lan import (
    ANNOUNCED_MAX,
    PARTIES_MAX,
    ROW_TAGS,
    SALT_BYTES,
    TAG_BYTES,
    Heard,
    Neighbours,
    lan_tag,
    shares_party,
    text_records,
)
from echostore.mesh.lan_mdns import SERVICE, LanDiscovery
from echostore.peer.peer import Peer
from network_peers import converged, invited, peers, until

LOOPBACK = ("127.0.0.1",)
SALT = bytes(range(SALT_BYTES))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def key(number: int) -> PartyKey:
    return PartyKey(number.to_bytes(32, "big"))


# what is announced


def test_a_member_recognises_its_party_and_a_stranger_nothing() -> None:
    records = text_records([key(1), key(2)], SALT, 100)
    assert shares_party(records, [key(2), key(9)], 100)
    assert not shares_party(records, [key(3)], 100)
    assert not shares_party(records, [], 100)
    for hour in (99, 101):
        assert shares_party(records, [key(1)], hour), "clocks differ"
    for hour in (98, 102):
        assert not shares_party(records, [key(1)], hour)


def test_an_announcement_names_nothing_and_hides_how_many_parties_there_are() -> None:
    few, more = (text_records(map(key, range(count)), SALT, 7) for count in (1, ROW_TAGS))
    assert {name: len(value) for name, value in few.items()} == {name: len(value) for name, value in more.items()}
    text = b"".join(few.values())
    assert key(0) not in text
    other = text_records([key(0)], bytes(SALT_BYTES), 7)
    assert not set(rows(few)) & set(rows(other)), "another salt, other tags"
    assert not set(rows(few)) & set(rows(text_records([key(0)], SALT, 8))), "another hour, other tags"
    assert sorted(rows(more)) == rows(more)
    assert len(rows(text_records(map(key, range(1000)), SALT, 7))) == PARTIES_MAX
    assert max(len(row) + 4 for row in text_records(map(key, range(1000)), SALT, 7).values()) < 255


def rows(records: dict[bytes, bytes]) -> list[bytes]:
    tags = b"".join(value for name, value in sorted(records.items()) if name.startswith(b"t"))
    return [tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES)]


@given(records=st.dictionaries(st.binary(max_size=3), st.none() | st.binary(max_size=300), max_size=8), v=st.booleans())
def test_any_records_are_read_without_harm(records: dict[bytes, bytes | None], v: bool) -> None:
    if v:
        records |= {b"v": b"1", b"s": SALT}
    assert shares_party(records, [key(1)], 5) in (True, False)
    assert not shares_party({**records, b"v": b"2"}, [key(1)], 5)


def test_neighbours_are_bounded_and_an_address_is_kept_while_anyone_announces_it() -> None:
    here = Neighbours()
    good, bad = text_records([key(1)], SALT, 5), text_records([key(2)], SALT, 5)
    here.appeared("a", Heard((("192.0.2.1", 1), ("192.0.2.2", 1), ("192.0.2.3", 1)), good))
    here.appeared("b", Heard((("192.0.2.9", 1),), bad))
    assert here.to_dial([key(1)], 5) == {("192.0.2.1", 1), ("192.0.2.2", 1)}
    here.appeared("a2", Heard((("192.0.2.1", 1),), good))
    here.vanished("a")
    assert here.to_dial([key(1)], 5) == {("192.0.2.1", 1)}
    for number in range(2 * ANNOUNCED_MAX):
        here.appeared(f"flood {number}", Heard((), {}))
    assert len(here.heard) == ANNOUNCED_MAX
    assert here.turned_away == ANNOUNCED_MAX + 2
    here.vanished("nobody")
    assert lan_tag(key(1), SALT, 5) != lan_tag(key(1), SALT, 6)


# on the loopback


def lan(peer: Peer) -> LanDiscovery:
    assert peer.network.lan is not None
    return peer.network.lan


def test_members_find_each_other_and_strangers_are_not_dialled(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        eve.create_party("Trip")
        bob.network.disconnect(ann.network.addresses[0])
        until(lambda: not bob.network.connections())
        trip.create(type="task", title="while apart")
        for peer in (ann, bob, eve):
            peer.network.discover(interfaces=LOOPBACK)
            peer.network.discover(interfaces=LOOPBACK)  # once is enough
        until(lambda: bob.network.connections())
        converged(trip, theirs)
        # Eve hears both and knows neither; they hear eve.
        until(lambda: {lan(ann).name, lan(bob).name} <= set(lan(eve).neighbours.heard))
        assert lan(eve).dialled == set()
        assert not eve.network.connections()
        gone = lan(bob).name
        bob.close()
        until(lambda: gone not in lan(eve).neighbours.heard)
        until(lambda: not lan(ann).dialled)


def test_a_party_that_is_joined_later_is_announced_under_a_new_name(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        for peer in (ann, bob):
            peer.network.discover(interfaces=LOOPBACK)
        before = lan(ann).name
        until(lambda: before in lan(bob).neighbours.heard)
        assert lan(bob).dialled == set()
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        until(lambda: lan(ann).name != before and lan(ann).name in lan(bob).neighbours.heard)
        until(lambda: before not in lan(bob).neighbours.heard)
        until(lambda: lan(bob).dialled or lan(ann).dialled)
        converged(trip, theirs)
        announced = lan(bob).neighbours.heard[lan(ann).name].records
        text = repr(announced).encode() + lan(ann).name.encode()
        for secret in (trip.key, ann.identity, ann.device):
            assert secret not in text
            assert secret.hex().encode() not in text
        assert b"Trip" not in text
        assert b"ann" not in text


def test_a_new_hour_brings_a_new_name_and_salt(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        ann.create_party("Trip")
        now = [3600.0 * 1000]
        found: list[tuple[str, bytes | None]] = []

        async def play() -> None:
            alone = LanDiscovery(
                ann.network.node,
                addresses=lambda: [("127.0.0.1", 4711)],
                parties=lambda: [key(1)],
                interfaces=LOOPBACK,
                now_s=lambda: now[0],
            )
            await alone.start()
            try:
                for step in (0.0, 60.0, 3600.0):
                    now[0] += step
                    await alone._announce()
                    assert alone._announced is not None
                    found.append((alone.name, alone._announced.properties[b"s"]))
            finally:
                await alone.close()

        asyncio.run(play())
        assert found[0] == found[1], "nothing has changed"
        assert found[2][0] != found[0][0]
        assert found[2][1] != found[0][1]
        assert all(name.endswith(SERVICE) for name, _ in found)


def test_without_the_library_there_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "zeroconf":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with peers(tmp_path, "ann") as (ann,), pytest.raises(Refused, match="zeroconf") as caught:
        ann.network.discover()
    assert "echostore[lan]" in caught.value.next_step
    told = Cli(tmp_path / "bob", tmp_path / "state")("serve", "--lan", "--listen", "127.0.0.1:0")
    assert told.status == 4
    assert len([line for line in told.err.splitlines() if "echostore[lan]" in line]) == 1
