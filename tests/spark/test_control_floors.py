"""Lakes of homes whose control feeds begin at a control state: folded to what a lake with all blocks gives. Without Spark."""

from pathlib import Path

import pyarrow as pa
import pytest

from control_floors import admit_many
from echostore.bench.many_epochs import Voter, add_epochs
from echostore.kernel.errors import Compacted, Corrupt
from echostore.kernel.ids import Cid, PartyKey, feed_id
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.peer.epoch_gc import run_gc
from echostore.peer.peer import open_peer
from echostore.pipeline.audit import audit_lake
from echostore.pipeline.lake.control_floors import damaged, floors_of
from echostore.pipeline.lake.layout import bases_of
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.lake.versions import Lake
from echostore.pipeline.run import RunRequest
from echostore.pipeline.stages.control import Limit, _planned, fold_control_here
from echostore.pipeline.stages.planning import NO_FILE
from echostore.pipeline.stages.snapshot import party_root
from echostore.wire.membership import membership_names
from echostore.wire.snapshot import read_state_root
from spark.engines import Engines


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


def test_a_state_of_three_thousand_members_is_gone_on_from(tmp_path: Path) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        admit_many(party, 3000)
        add_epochs(party, [Voter(party, f"voter {number}") for number in range(3)], 2)
        assert run_gc(party).control_blocks
        publish(home, lake)
        (file,) = (lake / bases_of(party.key)).glob("*.control")
        assert file.stat().st_size > BLOB_BYTES_MAX
        found = fold_control_here(str(lake), control_runs(lake))
        assert found["members"].num_rows == 3004
        assert found["parties"]["admission"].to_pylist() == [party.runtime.processor.admission.digest]
        (row,) = found["parties"].to_pylist()
        blobs: dict[Cid, bytes] = {}
        nothing = dict.fromkeys(("tops", "placements", "moves", "timeframe", "messages", "base", "base_number"))
        _, _, data, *_ = party_root({**nothing, **row}, party.runtime.processor.factory, blobs.__setitem__)
        root = read_state_root(data).membership_root
        assert root == party.snapshot().root.membership_root
        assert len({*membership_names(root, blobs.__getitem__)}) == 3, "a head and two chunks"


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


def test_a_damaged_state_that_nothing_needs_holds_nobody_up(lakes: tuple[PartyKey, Path, Path]) -> None:
    party, whole, _ = lakes
    before = fold_control_here(str(whole), control_runs(whole))
    (file,) = (whole / bases_of(party)).glob("*.control")
    file.write_bytes(b"nothing of the kind")
    assert not floors_of(whole, control_runs(whole), {}), "the blocks are there"
    assert fold_control_here(str(whole), control_runs(whole))["members"].equals(before["members"])
    assert [each.party for each in damaged(whole, [party])] == [party], "and it is told"


def test_an_older_state_serves_where_the_blocks_above_it_are_there(tmp_path: Path) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(4)]
        add_epochs(party, voters, 3)
        assert run_gc(party).control_blocks
        publish(home, lake)
        add_epochs(party, voters, 3)
        publish(home, lake)
        assert run_gc(party).control_blocks
        publish(home, lake)
        key = party.key
    newer, older = sorted((lake / bases_of(key)).glob("*.control"), reverse=True)
    whole = fold_control_here(str(lake), control_runs(lake))
    data = newer.read_bytes()
    newer.write_bytes(data[:-1])
    (stored,) = floors_of(lake, control_runs(lake), {}).values()
    assert sum(stored.state.lengths.values()) == int(older.stem.partition("-")[0])
    found = fold_control_here(str(lake), control_runs(lake))
    for name in ("members", "admission"):
        assert found[name].to_pylist() == whole[name].to_pylist(), name
    assert found["parties"]["membership"].equals(whole["parties"]["membership"])
    older.write_bytes(b"")
    with pytest.raises(Corrupt, match="is damaged") as refused:
        floors_of(lake, control_runs(lake), {})
    assert str(newer) in refused.value.what
    hurt: dict[bytes, Corrupt] = {}
    assert _planned(str(lake), control_runs(lake), {}, hurt).num_rows == 0
    assert list(hurt) == [key]


def test_an_older_state_does_not_serve_where_blocks_above_it_are_missing(tmp_path: Path) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(3)]
        for _ in range(2):
            add_epochs(party, voters, 4)
            assert run_gc(party).control_blocks
            publish(home, lake)
        key = party.key
    newer, _ = sorted((lake / bases_of(key)).glob("*.control"), reverse=True)
    assert list(floors_of(lake, control_runs(lake), {})) == [key]
    newer.write_bytes(b"")
    with pytest.raises(Corrupt, match="is damaged"):
        floors_of(lake, control_runs(lake), {})
    newer.unlink()
    with pytest.raises(Corrupt, match="is missing"):
        floors_of(lake, control_runs(lake), {})


def two_parties(home: Path, lake: Path) -> tuple[PartyKey, PartyKey, str]:
    """One whose control feeds begin late, and one that is whole, with its CID."""
    with open_peer(home, name="ann", background=False) as peer:
        party, other = peer.create_party("many"), peer.create_party("other")
        party.create("property-set", type="task", done=0)
        other.create("property-set", n=1)
        other.flush()
        add_epochs(party, [Voter(party, f"voter {number}") for number in range(3)], 3)
        assert run_gc(party).control_blocks
        publish(home, lake)
        return party.key, other.key, other.snapshot().cid


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_damaged_or_missing_state_is_told_for_its_party_alone(engines: Engines, tmp_path: Path, damage: str) -> None:
    home, lake = tmp_path / "home", tmp_path / "lake"
    party, other, cid = two_parties(home, lake)
    (file,) = (lake / bases_of(party)).glob("*.control")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    done = engines.run(RunRequest(lake=lake, out=tmp_path / "out"))
    results = {each.party: each for each in done.results()}
    assert (results[other].state, results[other].cid) == ("built", cid)
    assert results[party].cid is None
    assert results[party].state == "failed"
    assert (file.name if damage == "damaged" else "control state that stood for them") in results[party].detail
    audit = audit_lake(engines.session, lake)
    assert not audit.sound
    (finding, *_) = [each for each in audit.findings if each["party"] == party.hex()]
    assert (finding["reason"], damage in finding["detail"]) == ("damaged-file", True)
    assert 0 < audit.checked < audit.blocks
    assert {each["party"] for each in audit.findings} == {party.hex()}, "the other one is checked, and sound"
    file.unlink(missing_ok=True)
    publish(home, lake)
    assert audit_lake(engines.session, lake).sound
    mended = {each.party: each for each in engines.run(RunRequest(lake=lake, out=tmp_path / "mended")).results()}
    assert mended[party].state == "built"
