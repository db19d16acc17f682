"""A leaf that goes over to another root of its party: contexts are timeframes there, and nothing goes back in time."""

import random
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Refused, TimedOut
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.thin.driver import HOME
from echostore.thin.thin_party import ThinParty
from edge_process import RunningEdge
from network_peers import address, invited, peers, until


def part(ann: Peer, bob: Peer) -> None:
    ann.network.disconnect(address(bob))
    bob.network.disconnect(address(ann))
    until(lambda: not ann.network.connections() and not bob.network.connections())


def serve(peer: Peer, party: Party) -> tuple[str, str]:
    return peer.serve_thin("127.0.0.1:0"), party.capability(read="*", write="*", messages=True, edge=True).text


def follows(leaf: ThinParty) -> dict[Any, int]:
    """How much of each feed a leaf was told to see."""
    with leaf.driver.lock:
        return {clock: tick for clock, tick in leaf.driver.leaf.caches[HOME].follows.items() if clock.gen == 0}


class View:
    """What a leaf saw in one transaction: counters that only grow, and copies that others made of them."""

    def __init__(self, leaf: ThinParty) -> None:
        def read(transaction: Any) -> tuple[dict[Any, int], dict[Any, int]]:
            rows = transaction.all(leaf.query(type="count"))
            copies = transaction.all(leaf.query(type="copy"))
            return {row["of"]: row["n"] for row in rows}, {row["of"]: row["n"] for row in copies}

        self.counts, self.copies = leaf.transaction(read)

    def check_causal(self) -> None:
        """C4: who sees a copy sees what it was made from."""
        for of, n in self.copies.items():
            assert self.counts.get(of, 0) >= n, f"C4: a copy of {n} of {of}, which is at {self.counts.get(of)}"

    def check_not_before(self, earlier: "View") -> None:
        """C3 over roots."""
        for mine, known in ((self.counts, earlier.counts), (self.copies, earlier.copies)):
            for of, n in known.items():
                assert mine.get(of, -1) >= n, f"{of} was seen at {n}, and now at {mine.get(of)}"


def test_a_leaf_that_changes_roots_sees_nothing_that_is_older(tmp_path: Path) -> None:
    """Judged by what is shown: two roots write and read each other, and a reader goes to and fro."""
    chance = random.Random(7)
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        doors = [serve(ann, trip), serve(bob, theirs)]
        with echostore.connect(*doors[0]) as one, echostore.connect(*doors[1]) as two:
            writers = [one, two]
            made: dict[Any, Any] = {}
            for place, leaf in enumerate(writers):
                made["count", place] = leaf.create(type="count", of=place, n=0)
                made["copy", place] = leaf.create(type="copy", of=1 - place, n=0)
            for leaf in writers:
                leaf.fence("release")
                until(lambda: len(leaf.query(type="copy").all()) == 2 == len(leaf.query(type="count").all()))  # noqa: B023
            seen, context, checked = None, None, 0
            for step in range(24):
                place = chance.randrange(2)
                made["count", place]["n"] = step + 1
                other = {row["of"]: row["n"] for row in writers[place].query(type="count").all()}[1 - place]
                made["copy", place]["n"] = other
                at = step % 2
                with echostore.connect(*doors[at], roams=True, after=context, timeout_s=60) as reader:
                    view = View(reader)
                    view.check_causal()
                    if seen is not None:
                        view.check_not_before(seen)
                        checked += 1
                    seen, context = view, reader.context()
            assert checked == 23
            assert max(seen.counts.values()) > 0  # type: ignore[union-attr]


def test_a_root_that_is_behind_answers_when_it_has_caught_up_and_tells_until_then(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        here, there = serve(ann, trip), serve(bob, theirs)
        with echostore.connect(*here, roams=True) as leaf:
            part(ann, bob)
            leaf.create(type="count", of="x", n=1)
            with leaf.driver.lock:  # nothing is heard of the root meanwhile
                leaf.create(type="count", of="y", n=1)
                with pytest.raises(Refused, match="own batches"):  # what no root has, no other can wait for
                    leaf.context()
            leaf.fence("release", timeout_s=60)
            context = leaf.context()
        ann.thin_services[0].close()  # the root that was seen is gone: its context says enough
        with pytest.raises(TimedOut):
            echostore.connect(*there, after=context, timeout_s=0.3)
        bob.connect(address(ann))
        with echostore.connect(*there, after=context, timeout_s=60) as moved:
            assert {row["of"] for row in moved.query(type="count").all()} == {"x", "y"}


def test_contexts_pass_an_edge(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        (up, given), there = serve(ann, trip), serve(bob, theirs)
        with RunningEdge([up], given) as edge, echostore.connect(edge.url, given) as plain:
            plain.query(type="count").all()
            with echostore.connect(edge.url, given, roams=True) as leaf:
                for number in range(3):
                    leaf.create(type="count", of=number, n=1)
                    leaf.fence("full")
                    with echostore.connect(*there, roams=True, after=leaf.context(), timeout_s=60) as moved:
                        assert len(moved.query(type="count").all()) == number + 1
                        moved.create(type="copy", of=number, n=1)
                        moved.fence("release")
                        leaf.fence("acquire", moved.context(), timeout_s=60)
                        assert len(leaf.query(type="copy").all()) == number + 1
                edge.ask(
                    lambda node: node._up._socket.transport.abort()
                )  # the edge comes back, and still hears of feeds
                until(lambda: leaf.driver.counts["links"] >= 1 and leaf.connected)
                trip.create(type="count", of="last", n=1)
                until(lambda: len(leaf.query(type="count").all()) == 4)
                here = ann.thin_services[0]._roots[trip.key].root
                until(lambda: follows(leaf) == here.others)
                with echostore.connect(*there, after=leaf.context(), timeout_s=60) as moved:
                    assert len(moved.query(type="count").all()) == 4
                # Who did not ask is not told of feeds.
                assert not follows(plain)
