"""Light-weight parties that stand on epochs of their own: Spark has the same CIDs, from whole and from truncated homes."""

from pathlib import Path

import pytest

import echostore
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.run import RunRequest
from network_peers import until
from spark.engines import Engines


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def test_a_light_weight_party_that_discarded_and_truncated(engines: Engines, tmp_path: Path) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    with echostore.open(home, name="ann", background=False) as ann:
        trip = ann.create_party("Trip")
        games = [ann.create_child(trip, title) for title in ("Chess", "Go")]
        for game in games:
            gone, kept = game.create(type="piece", n=1), game.create(type="piece", n=2)
            gone.delete()
            kept["moved"] = True
            game.flush()
            written = ann.now_ms()
            until(lambda written=written: ann.now_ms() > written)
            Epochs(game).create(discard_before_ms=ann.now_ms())
            kept["moved"] = False
            Epochs(game).create()
            kept["again"] = True
            assert not game.has(gone.id)
        assert run_gc(games[1]).blocks > 0, "of one the history is gone before it was published"
        trip.create(type="note")
        ann.flush()
        expected = {party.key: party.snapshot().cid for party in (trip, *games)}
    assert publish(home, lake).bases == 2
    done = engines.run(RunRequest(lake=lake, out=tmp_path / "out"))
    assert {each.party: each.cid for each in done.results()} == expected, [each.detail for each in done.results()]
