"""Publishing from a home that deleted what lies below an epoch: what is there goes, and what is missing is said."""

from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.pipeline.lake.publish import publish


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def written(home: Path) -> None:
    """A party with two epochs: the blocks below the first may go."""
    with echostore.open(home, background=False) as peer:
        party = peer.create_party("Trip")
        item = party.create("property-set", n=0)
        for number in range(2):
            for step in range(5):
                item["n"] = 10 * number + step
                party.flush()
            Epochs(party).create()


def truncated(home: Path) -> int:
    with echostore.open(home, background=False) as peer:
        return run_gc(peer.party("@Trip")).blocks


def test_what_neither_the_home_nor_the_lake_has_is_named(tmp_path: Path) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    written(home)
    gone = truncated(home)
    assert gone > 0
    cli = Cli(home, tmp_path / "state")
    done = cli("lake", "publish", "--lake", str(lake), "--json").ok()
    assert [entry["blocks"] for entry in done.json()["compacted"]] == [gone]
    assert f"{gone} blocks were deleted here below an epoch" in done.err
    assert done.json()["blocks"] > 0, "what is here is published"


def test_a_lake_that_has_the_beginning_takes_the_rest_from_a_truncated_home(tmp_path: Path) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    written(home)
    assert publish(home, lake).compacted == {}
    truncated(home)
    with echostore.open(home, background=False) as peer:
        peer.party("@Trip").create("property-set", n=99)
    done = publish(home, lake)
    assert done.compacted == {}
    assert done.blocks > 0
