"""A lost blobs.db is derived data: the next snapshot has the same CID and can be read again, and epochs are recomputed."""

from pathlib import Path

import pytest

import echostore
from echostore.peer.epoch_agreement import Verdict
from echostore.peer.epochs import Epochs
from echostore.wire.tree_nodes import IndexNode
from peer_builder import Circle
from test_stale_messages import agreed_epoch


def test_a_snapshot_after_losing_the_blobs_is_whole_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "home", name="ann", background=False) as peer:
        party = peer.create_party("Trip")
        for number in range(50):
            party.create("property-set", type="row", number=number)
        text = party.create("text")
        text.insert(0, "long " * 2000)
        cid = party.snapshot().cid
    for file in (tmp_path / "home" / "parties" / party.key.hex()).glob("blobs.db*"):
        file.unlink()
    with echostore.open(tmp_path / "home", background=False) as peer:
        snapshot = peer.party(party.key).snapshot()
        assert snapshot.cid == cid
        reader = snapshot.reader()
        assert len(list(reader.items())) == snapshot.item_count == 52
        state = reader.item(text.id)
        assert state is not None
        assert len(reader.state_bytes(state)) > 2048


def test_an_epoch_above_one_with_lost_pages_is_recomputed_from_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this peer would say nothing of any epoch again, and hold up those of all others."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        ann, bob = circle.party("ann"), circle.party("bob")
        items = [ann.create("property-set", type="row", text="x" * 500, number=number) for number in range(50)]
        circle.meet_all()
        agreed_epoch(circle, "ann", "bob")
        base, blobs = bob.runtime.processor.base, bob.runtime.blobs
        assert base is not None
        assert blobs is not None
        pages = [cid for _, cid, node in base.reader.nodes() if not isinstance(node, IndexNode)]
        assert blobs.delete(pages) > 1
        for item in items:
            item["number"] += 1
        Epochs(ann).create()
        items[0]["number"] = 0  # bob is ahead of the epoch
        circle.meet_all()
        assert [(judged.number, judged.verdict) for judged in Epochs(bob).review()] == [(2, Verdict.ATTESTED)]
