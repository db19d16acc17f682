"""Feeds that end before others have stopped building on them: Spark has the state of the peers, now and at an anchor."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer_builder import Circle
from spark.circle_lake import NAMES, Told
from spark.engines import Engines


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES, roles={"bob": "admin", "cat": "admin"}) as made:
        yield made


def test_what_was_built_on_cut_and_void_feeds_has_the_cid_of_the_peers(
    engines: Engines, circle: Circle, tmp_path: Path
) -> None:
    told = Told(engines, circle, tmp_path)
    ann, bob, cat = (circle.party(name) for name in NAMES)
    old = cat.create("property-set", n=1)
    circle.meet_all()
    ann.members.remove(circle.peers["cat"].identity)
    old["n"] = 2
    dan = circle.peers["dan"] = circle._open("dan")
    dan.enter(cat.members.admit(dan.request_join(circle.key), role="editor"))
    circle.meet("cat", "dan")
    circle.party("dan").members.set_profile("Dan")
    lost = circle.party("dan").create("property-set", n=9)
    circle.meet("cat", "dan")
    circle.meet("cat", "bob")
    assert bob.has(lost.id)
    bob.members.set_profile("Robert")
    kept = bob.create("property-set", n=3)
    circle.meet("ann", "bob")
    circle.meet("ann", "bob")
    assert ann.snapshot().cid == bob.snapshot().cid
    assert ann.has(kept.id)
    assert not ann.has(lost.id)
    assert ann.get(old.id)["n"] == 1
    told.agreed()
    expected = Counter((reject.feed.hex(), reject.seq, str(reject.reason)) for reject in ann.rejected())
    assert len(expected) >= 2
    assert Counter((row["feed"], row["seq"], row["reason"]) for row in told.rows("rejects")) == expected
    anchor = str(ann.flush().anchor)
    assert ann.as_of(anchor).snapshot().cid == ann.snapshot().cid
    assert told.build_at(anchor).cid == ann.snapshot().cid
