"""Peers on a real network: loopback, one process, real sockets and real stores."""

import asyncio
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import Unreachable, UsageError
from echostore.mesh.node import Standing
from echostore.peer.network import parse_address
from echostore.wire.mesh import Offer, party_tag
from network_peers import PATIENCE_S, address, cid, converged, has, invited, peers, until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def test_two_peers_replicate_both_ways_and_receipts_say_who_holds(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        task = trip.create("property-set", type="task", n=0)
        theirs = invited(ann, trip, bob)
        task["n"] = 1
        receipt = trip.flush().wait(held_by=2, timeout=10)
        assert receipt.held_by == 2
        until(lambda: theirs.query(type="task").one()["n"] == 1)
        theirs.query(type="task").one()["n"] = 2
        theirs.flush().wait(held_by=2, timeout=10)
        until(lambda: task["n"] == 2)
        converged(trip, theirs)
        feed = next(row for row in trip.status.feeds if row.own and row.kind == "data")
        until(lambda: next(r for r in trip.status.feeds if r.key == feed.key).others[0].processed == feed.held)
        assert trip.status.unshared == 0


def test_gossip_reaches_a_peer_that_never_meets_the_writer(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob, "admin")
        cats = invited(bob, bobs, cat)
        assert [c.device for c in cat.network.connections()] == [bob.device], "cat knows bob alone"
        item = trip.create("property-set", type="task", text="over the middle")
        trip.flush()
        until(lambda: cats.query(type="task").all())
        cats.query(type="task").one()["text"] = "and back"
        cats.flush()
        until(lambda: item["text"] == "and back")
        converged(trip, bobs, cats)


def test_a_stranger_learns_nothing_even_if_it_knows_the_party(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        trip = ann.create_party("Trip")
        trip.create("property-set", type="secret", text="x")
        trip.flush()
        eve.request_join(trip.key)
        genesis = trip.runtime.processor.membership.machine.genesis
        assert genesis is not None
        eves = eve.enter(echostore.peer.identity.Welcome(trip.key, genesis.control_feed, "Trip"))
        eve.connect(address(ann))
        link = next(iter(eve.network.node.links.values()))
        tag = party_tag(link.connection.handshake_hash, trip.key)
        eve.network.soon(lambda: link.receive(Offer((tag,))))  # as if ann had offered it: eve does so in return
        until(lambda: ann.network.connections() and ann.network.connections()[0].parties == 1)
        time.sleep(0.5)
        assert ann.network.standing(trip.key, eve.device) is Standing.UNKNOWN
        assert eves.query(type="secret").all() == []
        assert [row.held for row in eves.status.feeds if not row.own] in ([], [0])
        assert ann.network.node.counters.frames_received < 50, "and nobody goes in circles"


def test_a_device_that_shares_no_party_gets_no_tag_at_all(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        ann.create_party("Trip")
        eve.create_party("Other")
        eve.connect(address(ann), device=ann.device)  # she knows it from elsewhere
        until(lambda: len(ann.network.connections()) == 1)
        link = next(iter(ann.network.node.links.values()))
        assert link._offered == set()
        assert link._heard == {}


def test_a_stranger_who_knows_an_address_alone_is_not_shown_who_is_there(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        ann.create_party("Trip")
        eve.create_party("Other")
        with pytest.raises(Unreachable, match=r"nothing-shared: .* Join a party of that peer first"):
            eve.connect(address(ann))
        until(lambda: ann.network.node.counters.refused == {"nothing-shared": 1})
        assert ann.network.node.counters.accepted == 0
        assert eve.network.connections() == []
        assert ann.device not in eve.network.seen


def test_an_address_is_enough_between_members(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        bob.network.disconnect(address(ann))
        until(lambda: not bob.network.connections())
        assert bob.connect(address(ann)) == ann.device
        item = trip.create("property-set", type="task")
        trip.flush()
        until(lambda: has(theirs, item))


def test_a_member_admitted_while_a_peer_was_away_introduces_itself(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        here = address(ann)
        bob.network.disconnect(here)
        until(lambda: not bob.network.connections())
        cats = invited(ann, trip, cat)
        cat.network.disconnect(here)
        until(lambda: not cat.network.connections())
        cats.create("property-set", type="task", text="from cat")
        cats.flush()
        assert bob.network.standing(trip.key, cat.device) is Standing.UNKNOWN
        cat.connect(address(bob))
        until(lambda: bobs.query(type="task").all())
        assert bob.network.standing(trip.key, cat.device) is Standing.MEMBER
        converged(bobs, cats)


def test_a_removed_member_gets_nothing_more(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        before = cid(theirs)
        trip.members.remove(bob.identity)
        trip.flush()
        until(lambda: ann.network.standing(trip.key, bob.device) is Standing.REMOVED)
        until(lambda: not any(link.channels for link in ann.network.node.links.values()))
        trip.create("property-set", type="secret", text="x")
        trip.flush()
        time.sleep(0.4)
        assert theirs.query(type="secret").all() == []
        assert before


def test_simultaneous_dials_collapse_to_one_connection(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        here = address(ann)
        for _ in range(3):
            bob.network.disconnect(here)
            until(lambda: not bob.network.connections() and not ann.network.connections())
            ways = [
                threading.Thread(target=ann.connect, args=(address(bob),)),
                threading.Thread(target=bob.connect, args=(here,)),
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()
            until(lambda: len(ann.network.connections()) == len(bob.network.connections()) == 1)
            ann.network.disconnect(address(bob))
            item = trip.create("property-set", type="n")
            trip.flush()
            bob.network.keep_connecting(here)
            until(lambda item=item: has(theirs, item))
        converged(trip, theirs)


def test_a_lost_connection_is_made_again(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        where = parse_address(address(ann))
        ann.close()
        until(lambda: not bob.network.connections())
        theirs.create("property-set", type="task", text="alone")
        theirs.flush()
        with echostore.open(tmp_path / "ann") as again:
            again.listen(f"{where[0]}:{where[1]}")
            mine = again.party(trip.key)
            until(lambda: mine.query(type="task").all())
            converged(mine, theirs)


def test_policies_let_data_flow_one_way(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        here = address(ann)
        for flow, gives, takes in (("up", True, False), ("down", False, True)):
            bob.network.disconnect(here)
            until(lambda: not bob.network.connections() and not ann.network.connections())
            bob.network.set_flow(ann.device, flow)
            mine = theirs.create("property-set", type=f"bob-{flow}")
            ours = trip.create("property-set", type=f"ann-{flow}")
            theirs.flush()
            trip.flush()
            bob.connect(here)
            until(lambda given=gives, item=mine: has(trip, item) or not given)
            until(lambda taken=takes, item=ours: has(theirs, item) or not taken)
            time.sleep(0.3)
            assert has(trip, mine) is gives
            assert has(theirs, ours) is takes
    with peers(tmp_path / "more", "ann") as (ann,), pytest.raises(UsageError):
        ann.network.set_flow(b"x", "sideways")


@pytest.mark.parametrize(("flow", "gives", "takes"), [("up", True, False), ("down", False, True)])
def test_policies_hold_for_what_is_written_while_connected(tmp_path: Path, flow: str, gives: bool, takes: bool) -> None:
    """Both have all that the other wrote, so that news would be sent at once."""
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        for party in (trip, theirs):
            party.create("property-set", type="first")
            party.flush().wait(held_by=2, timeout=20)
        converged(trip, theirs)
        bob.network.disconnect(address(ann))
        until(lambda: not bob.network.connections() and not ann.network.connections())
        bob.network.set_flow(ann.device, flow)
        bob.connect(address(ann))
        until(lambda: ann.network.connections() and ann.network.connections()[0].parties == 1)
        for _ in range(3):
            mine, ours = theirs.create("property-set", type="bob"), trip.create("property-set", type="ann")
            theirs.flush()
            trip.flush()
            until(lambda item=mine: has(trip, item) or not gives)
            until(lambda item=ours: has(theirs, item) or not takes)
        time.sleep(0.3)
        assert has(trip, mine) is gives
        assert has(theirs, ours) is takes


def test_a_paused_party_goes_on_holding(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        bob.pause_party(trip.key)
        for number in range(5):
            trip.create("property-set", type="task", n=number)
        trip.flush().wait(held_by=2, timeout=10)
        assert theirs.query(type="task").count() == 0
        bob.resume_party(trip.key)
        assert theirs.query(type="task").count() == 5
        converged(trip, theirs)


def test_what_can_not_be_reached_says_so(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            nobody = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Unreachable, match="refused"):
            ann.connect(nobody)
        with pytest.raises(Unreachable):
            ann.connect(address(ann), device=bytes(31) + b"\x07")
        with pytest.raises(Unreachable):
            ann.listen(address(ann))
        for wrong in ("", "host", "host:", ":1", "host:99999", "host:x"):
            with pytest.raises(UsageError):
                ann.connect(wrong)


def test_noise_on_the_port_disturbs_nobody(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        where = parse_address(address(ann))
        for number, data in enumerate(
            (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"ECHO\x02\x02" + b"\xff" * 900, b"ECHO\x01\x01", b"ECHO\x09\x09")
        ):
            with socket.create_connection(where, timeout=5) as raw:
                raw.sendall(data)
                raw.settimeout(5)
                while raw.recv(4096):
                    pass
            until(lambda wanted=number: sum(ann.network.node.counters.refused.values()) > wanted)
        assert set(ann.network.node.counters.refused) == {"not-echostore", "handshake-failed", "no-common-version"}
        trip.create("property-set", type="task")
        converged(trip, theirs)


def test_a_thousand_connections_are_turned_away_and_members_stay(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        limiter = ann.network.node.limiter
        limiter.limits = replace(limiter.limits, handshakes_max=20, handshakes_per_address_max=20)
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        where = parse_address(address(ann))

        async def flood() -> int:
            opened = await asyncio.gather(
                *(asyncio.open_connection(*where) for _ in range(1000)), return_exceptions=True
            )
            writers = [pair[1] for pair in opened if not isinstance(pair, BaseException)]
            assert len(writers) > 20, "more than may shake hands at a time"
            async with asyncio.timeout(PATIENCE_S):
                while not ann.network.node.counters.refused["too-many"]:
                    await asyncio.sleep(0.01)
            for writer in writers:
                writer.transport.abort()
            return len(writers)

        asyncio.run(flood())
        trip.create("property-set", type="task")
        converged(trip, theirs)
        assert len(ann.network.connections()) == 1
