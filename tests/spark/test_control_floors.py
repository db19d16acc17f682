"""Lakes of homes whose control feeds begin at a control state: folded to what a lake with all blocks gives. Without Spark."""

from pathlib import Path

import pyarrow as pa
import pytest

from echostore.bench.many_epochs import Voter, add_epochs
from echostore.kernel.errors import Compacted, Corrupt
from echostore.kernel.ids import PartyKey, feed_id
from echostore.peer.epoch_gc import run_gc
from echostore.peer.peer import open_peer
from echostore.pipeline.lake.control_floors import floors_of
from echostore.pipeline.lake.layout import bases_of
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.lake.versions import Lake
from echostore.pipeline.stages.control import Limit, _planned, fold_control_here
from echostore.pipeline.stages.planning import NO_FILE


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def lakes(tmp_path: Path) -> tuple[PartyKey, Path, Path]:
    """The party, a lake that was published before its control feeds were truncated, and one after."""
    home, whole, short = tmp_path / "home", tmp_path / "whole", tmp_path / "short"
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(4)]
        add_epochs(party, voters, 3)
        party.members.remove(voters[-1].identity)
        add_epochs(party, voters[:-1], 3)
        publish(home, whole)
        assert run_gc(party).control_blocks
        publish(home, short)
        publish(home, whole)
        return party.key, whole, short


def control_runs(lake: Path) -> pa.Table:
    return Lake.open(lake).at().runs(control=True)


def test_a_lake_without_the_blocks_below_a_control_state_says_the_same(lakes: tuple[PartyKey, Path, Path]) -> None:
    party, whole, short = lakes
    assert not floors_of(whole, control_runs(whole), {}), "who has all blocks needs no state"
    assert list(floors_of(short, control_runs(short), {})) == [party]
    there, here = (fold_control_here(str(lake), control_runs(lake)) for lake in (whole, short))
    assert here["unheld"].num_rows == 0, "what is not there was freed, not lost"
    for name in ("admission", "members", "models"):
        assert here[name].to_pylist() == there[name].to_pylist(), name
    for name in ("admission", "membership", "title", "base_number", "base"):
        assert here["parties"][name].to_pylist() == there["parties"][name].to_pylist(), name
    for name in ("feed", "length", "link", "depth", "state"):
        assert sorted(here["cuts"][name].to_pylist(), key=str) == sorted(there["cuts"][name].to_pylist(), key=str), name
    below = [row for row in here["targets"].to_pylist() if row["file"] == NO_FILE]
    assert below
    reach = {row["names"]: row["end"] for row in below}
    exact = {row["names"]: row for row in there["targets"].to_pylist()}
    for row in below:
        last = row["end"] - 1
        depth = memoryview(exact[row["names"]]["depths"]).cast("q")[last]
        assert last + row["row"] == depth, "the bound of depth at the cut is the depth there"
    assert reach.keys() <= exact.keys()


def test_a_moment_below_the_state_is_compacted(lakes: tuple[PartyKey, Path, Path]) -> None:
    party, whole, short = lakes
    (stored,) = floors_of(short, control_runs(short), {}).values()
    cut = {feed_id(key): length for key, length in stored.state.lengths.items()}
    assert _planned(str(short), control_runs(short), {party: Limit(control=cut)}).num_rows
    first = min(cut)
    early = {party: Limit(control={**cut, first: cut[first] - 1})}
    with pytest.raises(Compacted, match="below what the lake has"):
        _planned(str(short), control_runs(short), early)
    assert _planned(str(whole), control_runs(whole), early).num_rows, "the blocks are there"


@pytest.mark.parametrize("damage", ["cut short", "another's bytes"])
def test_a_damaged_state_is_said(lakes: tuple[PartyKey, Path, Path], damage: str) -> None:
    party, _, short = lakes
    (file,) = (short / bases_of(party)).glob("*.control")
    file.write_bytes(file.read_bytes()[:-1] if damage == "cut short" else b"nothing of the kind")
    with pytest.raises(Corrupt, match="is damaged"):
        fold_control_here(str(short), control_runs(short))
