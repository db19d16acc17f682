"""A lost blobs.db is derived data: the next snapshot has the same CID and can be read again."""

from pathlib import Path

import pytest

import echostore


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
