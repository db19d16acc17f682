"""The placement tree that Spark makes: that of the peers, kept from commit to commit, and left alone where values change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ItemId
from echostore.kernel.snapshot import Placement, view_place
from echostore.pipeline.output import reading
from echostore.pipeline.output.epochs import latest
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.layout import COMMITS, commit_name
from echostore.pipeline.output.record import FORMAT, Commit
from echostore.pipeline.output.results import PartyResult
from echostore.pipeline.schemas import BLOBS
from echostore.pipeline.stages import placement_tops, snapshot
from echostore.pipeline.stages.reduce import by_task
from echostore.wire.placements import PlacementReader, build_placements, state_placements
from peer_builder import Circle
from spark.circle_lake import NAMES, Told
from spark.engines import Engines
from test_discarding import discarded, seen_by_all

PLACE_KINDS = ("place_tops", "place_lists")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path / "homes", *NAMES) as made:
        yield made


class Placed(Told):
    """Also looks at the placement tree of every build: that it is the one of the items, and whole."""

    def compare(self, found: PartyResult) -> None:
        super().compare(found)
        assert self.placements() == self.placements("out")

    def placements(self, out: str = "out") -> set[Placement]:
        ready = latest(self._folder / out, self._circle.key)
        assert ready is not None
        assert ready.root.placements is not None
        wanted = {each for _, state in ready.reader().items() for each in state_placements(state)}
        blobs = dict(ready.blobs())
        found = set(PlacementReader(ready.root.placements, blobs.get).all())
        assert found == wanted
        assert ready.root.placements == build_placements(wanted, {}.__setitem__).cid
        return found

    def commit(self, out: str = "out") -> Commit:
        commit, _ = reading.newest(self._folder / out)
        assert commit is not None
        return commit

    def new_files(self, *kinds: str) -> list[str]:
        """Files of these kinds that the last commit wrote."""
        commit = self.commit()
        return [
            file.path for kind in kinds for file in commit.files.get(kind, ()) if _number(file.path) == commit.number
        ]

    def new_blobs(self) -> set[bytes]:
        commit = self.commit()
        files = [file for file in commit.files.get("blobs", ()) if _number(file.path) == commit.number]
        return {row["cid"] for file in files for row in read_table(self._folder / "out", file, BLOBS).to_pylist()}

    def place_blobs(self) -> set[bytes]:
        ready = latest(self._folder / "out", self._circle.key)
        assert ready is not None
        assert ready.root.placements is not None
        return set(PlacementReader(ready.root.placements, ready.blob).reachable())


def _number(path: str) -> int:
    return int(path.partition("/")[0].removeprefix("epoch="))


@pytest.fixture
def told(spark: Any, circle: Circle, tmp_path: Path) -> Placed:
    return Placed(Engines("spark", spark), circle, tmp_path)


def hanging(told: Placed, place: ItemId) -> set[bytes]:
    return {each[16:] for each in told.placements() if each[:16] == place}


def test_parents_views_and_moves_come_to_the_tree_of_the_peers(circle: Circle, told: Placed) -> None:
    for peer in circle.peers.values():
        peer.view_classes.register("board")
    ann, bob = circle.party("ann"), circle.party("bob")
    told.agreed()
    assert told.placements() == set()
    board = ann.create_view("board", "Plans")
    wide = ann.create("property-set", n=0)
    with ann.batch():
        leaves = [ann.create("property-set", parent=wide, n=n) for n in range(140)]
    deep = [board]
    for n in range(12):
        deep.append(ann.create("text" if n % 3 else "property-set", parent=deep[-1]))
    leaves[3].move(deep[5])
    found = told.agreed()
    key = bytes.fromhex(board.locator.rpartition("/")[2])
    assert hanging(told, view_place(key)) == {board.id}
    assert hanging(told, wide.id) == {leaf.id for leaf in leaves}, "moves stand by themselves"
    assert hanging(told, deep[4].id) == {deep[5].id}
    # Values, metadata, moves and deletions place nothing.
    circle.meet_all()
    before = told.place_blobs()
    circle.get("bob", leaves[9])["n"] = "other"
    circle.get("bob", leaves[8]).delete()
    circle.get("bob", deep[3]).move(circle.get("bob", wide))
    circle.get("bob", board)["note"] = "Other plans"
    circle.meet_all()
    assert told.agreed().cid != found.cid
    assert told.new_files(*PLACE_KINDS) == []
    assert told.place_blobs() == before
    assert not told.new_blobs() & before
    # One more item is the nodes on its way.
    more = bob.create("property-set", parent=circle.get("bob", wide), n=1)
    circle.meet_all()
    told.agreed()
    assert more.id in hanging(told, wide.id)
    fresh = told.place_blobs() - before
    assert fresh <= told.new_blobs()
    assert len(fresh) <= 12
    assert told.agreed("fresh").cid == told.build().cid


def test_items_that_go_and_come_again_are_placed_by_what_counts_in_the_end(circle: Circle, told: Placed) -> None:
    ann, cat = circle.party("ann"), circle.party("cat")
    top = ann.create("property-set", n=0)
    circle.meet_all()
    # Cat works on, bob builds on that; ann has not heard of it and removes her: all of that goes again.
    doomed = cat.create("property-set", parent=circle.get("cat", top), n=1)
    below = cat.create("property-set", parent=doomed, n=2)
    circle.meet("cat", "bob")
    bob = circle.party("bob")
    last = bob.create("property-set", parent=circle.get("bob", below), n=3)
    late = bob.create("property-set", parent=circle.get("bob", top), n=3)
    bob.flush()
    told.publish("bob")
    assert told.build().cid == bob.snapshot().cid
    assert hanging(told, top.id) == {doomed.id, late.id}
    assert hanging(told, below.id) == {last.id}
    ann.members.remove(circle.peers["cat"].identity)
    for _ in range(2):
        circle.meet("ann", "bob")
    told.agreed()
    assert hanging(told, top.id) == {late.id}
    assert hanging(told, below.id) == set()
    assert told.agreed("fresh").cid == told.build().cid


def test_what_an_epoch_discards_is_placed_no_more(circle: Circle, told: Placed) -> None:
    ann = circle.party("ann")
    kept, gone = ann.create("property-set", n=0), ann.create("property-set", n=0)
    below = [ann.create("property-set", parent=each, n=n) for each in (kept, gone) for n in range(3)]
    gone.delete()
    told.agreed()
    assert hanging(told, gone.id) == {each.id for each in below[3:]}
    seen_by_all(circle)
    discarded(circle, *NAMES)
    told.agreed()
    assert hanging(told, gone.id) == set()
    assert hanging(told, kept.id) == {each.id for each in below[:3]}
    ann.create("property-set", parent=kept, n=9)
    told.agreed()
    assert told.agreed("fresh").cid == told.build().cid
    seen_by_all(circle)
    discarded(circle, *NAMES)
    told.agreed()
    assert len(hanging(told, kept.id)) == 4


def test_a_run_that_dies_after_the_trees_leaves_nothing_behind(
    circle: Circle, told: Placed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = circle.party("ann")
    top = ann.create("property-set", n=0)
    told.agreed()
    for n in range(3):
        ann.create("property-set", parent=top, n=n)
    ann.flush()
    told.publish()
    before = told.commit()

    def dies(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_roots_here", dies)
        with pytest.raises(KeyboardInterrupt):
            told.build()
    assert told.commit() == before
    told.agreed()
    assert len(hanging(told, top.id)) == 3


@pytest.mark.parametrize("few", [True, False])
def test_few_changes_are_worked_in_on_the_driver_and_many_by_tasks(
    few: bool, circle: Circle, told: Placed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = circle.party("ann")
    jobs: list[Any] = []
    monkeypatch.setattr(placement_tops, "HERE_PLACEMENTS", 1000 if few else -1)
    monkeypatch.setattr(placement_tops, "by_task", lambda *given: jobs.append(given) or by_task(*given))
    top = ann.create("property-set", n=0)
    for count in (150, 2):
        with ann.batch():
            for n in range(count):
                ann.create("property-set", parent=top, n=n)
        told.agreed()
    assert len(hanging(told, top.id)) == 152
    assert len(jobs) == (0 if few else 2)


def test_an_output_of_an_earlier_program_is_refused_and_says_what_to_do(told: Placed, tmp_path: Path) -> None:
    told.agreed()
    path = tmp_path / "out" / COMMITS / commit_name(1)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(f'"format":{FORMAT}'.encode(), b'"format":2'))
    with pytest.raises(Corrupt, match="format 2") as refused:
        told.build()
    assert "new folder" in str(refused.value.next_step)
