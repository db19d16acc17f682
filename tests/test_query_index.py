"""The query index after a checkpoint: references, moments and failing models read as before it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import pytest

import echostore
from echostore.kernel.values import BlobRef, Reference


class Fragile:
    """A model that can't show what it holds."""

    name: ClassVar[str] = "fragile"
    version: ClassVar[int] = 1

    def apply(self, operation: object, stamp: object) -> None:
        pass

    def value(self) -> object:
        raise ValueError("never")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "home", name="ann", background=False) as opened:
        yield opened


def test_references_and_moments_survive_a_checkpoint(peer: echostore.Peer) -> None:
    party = peer.create_party("Trip")
    target = party.create("property-set", type="target")
    when = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    blob = BlobRef((), 3, "text/plain", "note")
    source = party.create("property-set", type="source", to=target, deep={"list": [target]}, when=when, blob=blob)
    before = party.query(type="source").references().ids()
    party.runtime.checkpoint()
    party.runtime.state.records.clear()
    row = party.runtime.source.row(source.id)
    assert row is not None
    expected = {"to": Reference(target.id), "deep": {"list": [Reference(target.id)]}, "when": when, "blob": blob}
    assert dict(row.values) == expected
    assert party.query(type="source").references().ids() == before == [target.id]
    assert party.query(type="target").referrers().ids() == [source.id]


def test_a_failing_model_does_not_stop_queries(peer: echostore.Peer) -> None:
    peer.models.register(Fragile)
    party = peer.create_party("Trip")
    broken = party.create("fragile", type="row")
    whole = party.create("property-set", type="row", n=1)
    broken.apply({"any": "thing"})
    assert {item.id for item in party.query(type="row").all()} == {broken.id, whole.id}
    assert party.query(type="row").where(n=1).ids() == [whole.id]
    assert "never" in broken.failed
    party.runtime.checkpoint()
    assert party.query(type="row").where(n=1).ids() == [whole.id]
