"""The rejects table of a party with forked feeds: the list of the peers, whichever branch was published first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peer_builder import Circle, Liar
from spark.circle_lake import NAMES, Told
from spark.engines import Engines


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES, roles={"bob": "admin"}) as made:
        yield made


def test_a_fork_is_one_row_whoever_publishes_which_branch_when(
    engines: Engines, circle: Circle, tmp_path: Path
) -> None:
    """Ann publishes the longer branch before she hears of the other, bob the shorter one, which nobody can read to its end."""
    told = Told(engines, circle, tmp_path)
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    first = Liar.of(circle, "cat")
    first.send(first.message(first.set(item.id, before=1), first.set(first.created(7), lost=1)), to="ann")
    circle.meet("ann", "bob")
    left, right = Liar.of(circle, "cat"), Liar.of(circle, "cat")
    for liar in (left, right):
        liar.length, liar.link, liar.depth = first.length, first.link, first.depth
    long = [left.message(left.genesis(), left.set(left.created(9), x=1), number=at) for at in range(4)]
    left.deliver(left.signed(*long), to="ann")
    told.agreed()
    right.deliver(right.signed(right.message(right.set(item.id, y=1)), b"\xff\xff"), to="bob")
    for _ in range(3):
        circle.meet("ann", "bob")
    told.publish("bob")
    expected = sorted(
        (each.feed.hex(), each.seq, each.position, str(each.reason), each.detail)
        for each in circle.party("bob").rejected()
    )
    assert [(seq, position, reason) for _, seq, position, reason, _ in expected] == [(0, 1, "no-item"), (1, -1, "fork")]
    for out in ("out", "fresh"):
        told.agreed(out)
        rows = told.rows("rejects", out)
        assert (
            sorted((row["feed"], row["seq"], row["position"], row["reason"], row["detail"]) for row in rows) == expected
        )
