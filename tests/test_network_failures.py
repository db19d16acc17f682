"""What goes wrong on one connection stays there: defects here, and peers that take for ever."""

import functools
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Closed
from echostore.mesh import connection as mesh_connection
from echostore.mesh import node as mesh_node
from echostore.mesh.node import Link
from echostore.peer.network import parse_address
from echostore.wire.mesh import Offer, encode_mesh_frame
from network_peers import address, converged, invited, peers, until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def test_a_defect_ends_one_connection_is_counted_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        real = Link.receive

        def receive(link: Link, frame: Any) -> None:
            if link.node is ann.network.node and link.device == eve.device and isinstance(frame, Offer):
                raise ZeroDivisionError("a defect")
            real(link, frame)

        monkeypatch.setattr(Link, "receive", receive)
        with caplog.at_level(logging.ERROR, "echostore.mesh"):
            eve.connect(address(ann), device=ann.device)
            (link,) = eve.network.node.links.values()
            eve.network.soon(lambda: link.connection.send(Offer((bytes(32),))))
            until(lambda: ann.network.node.counters.ended["internal"] == 1)
        assert ann.network.node.counters.failures == {"ZeroDivisionError": 1}
        assert "a defect" in caplog.text
        until(lambda: link.connection.ended is not None)
        assert "internal" in link.connection.ended.detail, "the other side is told"
        until(lambda: eve.network.connections())  # it may come again
        trip.create(type="task")
        converged(trip, theirs)


def test_a_defect_when_a_connection_begins_ends_that_one_alone(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)

        def look(link: Link) -> None:
            if link.device == eve.device:
                raise KeyError("a defect")

        ann.network.node.on_link.append(look)
        eve.network.keep_connecting(address(ann), device=ann.device)
        until(lambda: ann.network.node.counters.failures["KeyError"])
        until(lambda: ann.network.node.counters.ended["internal"])
        trip.create(type="task")
        converged(trip, theirs)


def test_a_party_that_is_closed_while_blocks_are_under_way_ends_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip, garden = ann.create_party("Trip"), ann.create_party("Garden")
        theirs = invited(ann, trip, bob), invited(ann, garden, bob)
        real = mesh_node.PartyChannel.receive
        closed: list[bool] = []

        def receive(channel: Any, data: bytes) -> None:
            # The party goes between the arrival of a frame and its handling.
            if channel.party == trip.key and not closed and channel._link.node is ann.network.node:
                closed.append(True)
                ann.close_party(trip.key)
            real(channel, data)

        monkeypatch.setattr(mesh_node.PartyChannel, "receive", receive)
        theirs[0].create(type="task")
        theirs[0].flush()
        until(lambda: closed)
        theirs[1].create(type="bed")
        converged(garden, theirs[1])
        counters = ann.network.node.counters
        assert (counters.failures, counters.ended["internal"]) == ({}, 0)
        with pytest.raises(Closed):
            trip.create(type="task")


def test_a_stranger_that_shakes_hands_for_ever_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_node, "accept", functools.partial(mesh_connection.accept, timeout_s=0.3))
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        with socket.create_connection(parse_address(address(ann)), timeout=20) as raw:
            raw.sendall(b"ECHO")
            while raw.recv(4096):
                pass  # it is greeted, and then hung up on
        until(lambda: ann.network.node.counters.refused["slow"] == 1)
        trip = ann.create_party("Trip")
        converged(trip, invited(ann, trip, bob))


def test_a_peer_that_sends_one_frame_for_ever_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_connection, "FRAME_PATIENCE_S", 0.5)
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        eve.connect(address(ann), device=ann.device)
        (link,) = eve.network.node.links.values()
        loop, inside = eve.network.loop, link.connection

        def begin() -> None:
            data = inside._channel.send(encode_mesh_frame(Offer(tuple(bytes(32) for _ in range(1000)))))
            drip(data, 0)

        def drip(data: bytes, at: int) -> None:
            """A byte now and then: the connection is never silent, and the frame never whole."""
            if inside.ended is None and at < len(data) - 1:
                inside._writer.write(data[at : at + 1])
                loop.call_later(0.02, drip, data, at + 1)

        eve.network.soon(begin)
        until(lambda: ann.network.node.counters.ended["slow"] == 1)
        trip.create(type="task")
        converged(trip, theirs)


def test_the_module_for_asyncio_can_be_imported_by_its_name() -> None:
    code = (
        "import sys, echostore.aio\n"
        "assert 'echostore.peer' not in sys.modules, 'it costs nothing before it is used'\n"
        "from echostore.aio import open\n"
        "import echostore.aio as aio\n"
        "assert aio.open is open is echostore.aio.open\n"
        "assert not hasattr(aio, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
