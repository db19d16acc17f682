"""Texts and lists that lost their history at an epoch: Spark goes on from what is left of them, to the CID of the peers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.kernel.reasons import Reason
from peer_builder import Circle
from spark.engines import Engines
from spark.test_base_epochs import NAMES, Told
from test_discarded_history import long_story
from test_discarding import discarded


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES) as made:
        yield made


def test_texts_and_lists_without_their_history_have_the_cid_of_their_peers(
    engines: Engines, circle: Circle, tmp_path: Path
) -> None:
    told = Told(engines, circle, tmp_path)
    text, tasks = long_story(circle)
    discarded(circle, *NAMES)
    found = told.agreed()
    for name in NAMES:
        party = circle.party(name)
        party.get(text).insert(3, f" {name} ")
        party.get(text).delete(0, 2)
        party.get(tasks).move_element(0, 2)
        party.get(tasks)[1] = name
    circle.meet_all()
    later = told.agreed()
    assert later.cid != found.cid
    assert told.agreed("fresh").cid == later.cid, "built at once or on the last commit"
    assert all(row["reason"] != Reason.DISCARDED for row in told.rows("rejects", "fresh"))
