"""Snapshots in an output, as a peer takes them over: all blobs, nothing else, and never a wrong byte."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import echostore
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import PartyKey
from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import Attempt
from echostore.pipeline.output.epochs import latest
from echostore.pipeline.output.record import LakePoint
from echostore.pipeline.output.results import ABSTAINED, BUILT, PartyResult, results_table
from echostore.pipeline.output.table_schemas import PARTIES
from echostore.pipeline.schemas import BLOBS
from echostore.wire.cids import cid_text, matches
from echostore.wire.placements import PlacementReader
from echostore.wire.tree import verify_tree


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Any]:
    with echostore.open(tmp_path / "home", name="Ann", background=False) as peer:
        yield peer.create_party("Trip")


def fill(party: Any, count: int) -> None:
    items = [party.create("property-set", type="task", n=n) for n in range(count)]
    party.create("text", parent=items[0]).insert(0, "long " * 2000)
    for item in items[1:4]:
        item.move(items[0])


def commit(out: Path, party: Any, known: set[bytes], **changes: Any) -> set[bytes]:
    """Commit a peer's snapshot as the pipeline does: blobs that no earlier pack has."""
    snapshot = party.snapshot()
    root = snapshot.root
    assert root.placements is not None
    placed = PlacementReader(root.placements, snapshot.blob).reachable()
    names = {root.membership_root, root.tree, *placed, *snapshot.reader().reachable()}
    fresh = sorted(names - known)
    columns = [fresh, [snapshot.blob(cid) for cid in fresh]]
    with Attempt.begin(out) as attempt:
        result = {
            "party": party.key, "root_party": party.key, "state": BUILT, "epoch": attempt.number, "cid": snapshot.cid,
            "root": snapshot.root_bytes, "messages": 1, "applied": 1, "rejected": 0, "waiting": 0, "items": 1, "since": 1,
            "built": attempt.number,
            "commit": attempt.number,
        }  # fmt: skip
        rows = results_table([PartyResult(**{**result, **changes})]).to_batches()
        files = {
            "blobs": attempt.write("blobs", BLOBS, [pa.record_batch(columns, schema=BLOBS)]),
            "parties": attempt.write("parties", PARTIES, rows),
        }
        if attempt.base is not None:
            files = {kind: (*attempt.base.files[kind], *files[kind]) for kind in files}
        attempt.commit(files=files, lake=LakePoint(1, ""))
    return names | known


def test_everything_below_the_root_comes_out_once(party: Any, tmp_path: Path) -> None:
    fill(party, 50)
    known = commit(tmp_path / "out", party, set())
    ready = latest(tmp_path / "out", party.key)
    assert ready is not None
    assert cid_text(ready.cid) == party.snapshot().cid
    blobs = list(ready.blobs())
    assert {cid for cid, _ in blobs} == known | {ready.cid}
    assert len(blobs) == len({cid for cid, _ in blobs})
    assert all(matches(cid, data) for cid, data in blobs)
    assert blobs[-1] == (ready.cid, ready.root_bytes)
    stored = dict(blobs)
    assert verify_tree(ready.root.index_root, ready.root.item_count, stored.get).ok


def test_blobs_of_several_commits_are_found(party: Any, tmp_path: Path) -> None:
    fill(party, 50)
    first = commit(tmp_path / "out", party, set())
    party.items()[3]["n"] = "changed"
    commit(tmp_path / "out", party, first)
    ready = latest(tmp_path / "out", party.key)
    assert ready is not None
    assert (ready.commit, ready.epoch) == (2, 2)
    assert {cid for cid, _ in ready.blobs()} & first, "unchanged pages stay in the first pack"
    assert cid_text(ready.cid) == party.snapshot().cid
    assert verify_tree(ready.root.index_root, ready.root.item_count, dict(ready.blobs()).get).ok


def test_the_claim_says_what_the_root_says(party: Any, tmp_path: Path) -> None:
    fill(party, 3)
    commit(tmp_path / "out", party, set())
    ready = latest(tmp_path / "out", party.key)
    assert ready is not None
    claim = ready.claims(1, b"", created_ms=5)
    assert (claim.number, claim.previous, claim.snapshot, claim.created_ms) == (1, b"", ready.cid, 5)
    assert [(entry.feed, entry.seq, entry.link) for entry in claim.timeframe] == [
        tuple(entry) for entry in ready.root.timeframe
    ]
    assert claim.admission_digest == party.runtime.processor.admission.digest
    assert claim.models == (("property-set", 1), ("text", 1))


def test_without_a_cid_there_is_nothing_to_declare(party: Any, tmp_path: Path) -> None:
    assert latest(tmp_path / "out", party.key) is None
    commit(tmp_path / "out", party, set(), state=ABSTAINED, cid=None)
    assert latest(tmp_path / "out", party.key) is None
    assert latest(tmp_path / "out", PartyKey(b"\0" * 32)) is None


def test_a_root_that_is_not_what_its_cid_names_is_refused(party: Any, tmp_path: Path) -> None:
    commit(tmp_path / "out", party, set(), root=b"other")
    with pytest.raises(Corrupt, match="not what its CID names"):
        latest(tmp_path / "out", party.key)


def test_a_missing_blob_and_a_broken_pack_are_told(party: Any, tmp_path: Path) -> None:
    fill(party, 30)
    snapshot = party.snapshot()
    commit(tmp_path / "out", party, {snapshot.root.index_root})
    ready = latest(tmp_path / "out", party.key)
    assert ready is not None
    with pytest.raises(Corrupt):
        list(ready.blobs())
    newest, _ = reading.newest(tmp_path / "out")
    assert newest is not None
    (tmp_path / "out" / newest.files["blobs"][0].path).write_bytes(b"other")
    ready = latest(tmp_path / "out", party.key)
    assert ready is not None
    with pytest.raises(Corrupt, match="blobs"):
        list(ready.blobs())


def test_a_pack_that_lies_about_a_blob_is_not_believed(party: Any, tmp_path: Path) -> None:
    out, snapshot = tmp_path / "out", party.snapshot()
    commit(out, party, {snapshot.root.membership_root})
    with Attempt.begin(out) as attempt:
        lie = pa.record_batch([[snapshot.root.membership_root], [b"other"]], schema=BLOBS)
        assert attempt.base is not None
        blobs = (*attempt.base.files["blobs"], *attempt.write("blobs", BLOBS, [lie]))
        attempt.commit(files={**attempt.base.files, "blobs": blobs}, lake=LakePoint(1, ""))
    ready = latest(out, party.key)
    assert ready is not None
    with pytest.raises(Corrupt, match="no pack"):
        ready.blob(snapshot.root.membership_root)
