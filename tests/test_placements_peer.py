"""The placement tree of a live party: kept with its items, recomputed with its epochs, and noticed where it lies."""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, item_text
from echostore.kernel.snapshot import Placement, StateRoot, placed
from echostore.peer.bootstrap import believable, bootstrap, fetch_epoch
from echostore.peer.early_reading import EarlyReader
from echostore.peer.epoch_agreement import Verdict
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs, EpochView
from echostore.peer.party import Party
from echostore.peer.placement_checking import FalseIndex
from echostore.peer.snapshots import Snapshot
from echostore.peer.transfer import export_party, import_party
from echostore.wire.base_epoch import snapshot_blobs
from echostore.wire.car import read_car
from echostore.wire.cids import cid_from_text, cid_text
from echostore.wire.placements import PlacementReader, build_placements, state_placements
from echostore.wire.snapshot import read_state_root, state_root_bytes
from test_epoch_agreement import Circle, give_blobs, verdicts
from test_stale_messages import control_from
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    with open_quiet(tmp_path / "home") as peer:
        yield peer.create_party("Trip")


def fill(party: Party, count: int = 40) -> tuple[Any, list[Any]]:
    """A view with items below a board in it, and as many elsewhere."""
    party.peer.view_classes.register("example.org/planner")
    view = party.create_view("example.org/planner", "Planner")
    board = party.create("property-set", type="board", parent=view)
    with party.batch():
        for number in range(count):
            party.create("property-set", type="other", n=number)
        return view, [party.create("property-set", type="task", parent=board, n=number) for number in range(count)]


def places(snapshot: Snapshot) -> PlacementReader:
    assert snapshot.root.placements is not None
    return PlacementReader(snapshot.root.placements, snapshot.blob)


def checked(party: Party) -> Snapshot:
    """A snapshot whose placements are those of its items."""
    snapshot = party.snapshot()
    found = {each for _, state in snapshot.reader().items() for each in state_placements(state)}
    assert set(places(snapshot).all()) == found
    assert snapshot.root.placements == build_placements(found, lambda cid, blob: None).cid
    return snapshot


def items_file(party: Party) -> Path:
    return party.peer.home.party(party.key).items


def noted(party: Party) -> int:
    with sqlite3.connect(items_file(party)) as connection:
        return int(connection.execute("SELECT count(*) FROM placement_dirty").fetchone()[0])


# Upkeep.


def test_placements_follow_what_is_created_and_not_what_is_written_or_moved(party: Party) -> None:
    view, tasks = fill(party)
    before = checked(party)
    assert len(places(before).at(view.id)) == 1
    for task in tasks[:9]:
        task["n"] = 100
    tasks[3].move(None)
    tasks[4].delete()
    after = checked(party)
    assert after.cid != before.cid
    assert after.root.placements == before.root.placements
    assert noted(party) == 0
    made = party.create("property-set", parent=tasks[0])
    party.flush()
    party.runtime.checkpoint()
    assert noted(party) == 1
    last = checked(party)
    assert places(last).at(tasks[0].id) == [made.id]
    assert noted(party) == 0


def test_a_snapshot_makes_few_nodes_of_the_placement_tree(party: Party) -> None:
    _, tasks = fill(party, 1500)
    first = checked(party)
    tasks[0]["n"] = -1
    second = party.snapshot()
    before, after = set(places(first).reachable()), set(places(second).reachable())
    assert after == before
    party.create("property-set", parent=tasks[7])
    third = checked(party)
    fresh = set(places(third).reachable()) - before
    assert 0 < len(fresh) <= 8 < len(before)


def test_before_the_first_tree_nothing_is_noted(party: Party) -> None:
    fill(party, 5)
    party.flush()
    party.runtime.checkpoint()
    assert noted(party) == 0
    checked(party)


def test_every_way_to_a_state_gives_the_same_placements(tmp_path: Path) -> None:
    """A restart, items.db made anew, blobs lost, read-only, the past."""
    home = tmp_path / "home"
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        _, tasks = fill(party)
        party.snapshot()
        for task in tasks[:5]:
            party.create("text", parent=task).insert(0, "hello")
        cid, anchor = checked(party).cid, party.flush().anchor
        party.create("property-set", parent=tasks[9])
        assert party.as_of(anchor).snapshot().cid == cid
        last, folder = checked(party).cid, items_file(party).parent
    with echostore.open(home, read_only=True, background=False) as peer:
        assert peer.party("@Trip").snapshot().cid == last
    for lost in ("items.db*", "blobs.db*", "*s.db*"):
        if lost != "*s.db*":
            for file in folder.glob(lost):
                file.unlink()
        with open_quiet(home) as peer:
            party = peer.party("@Trip")
            assert checked(party).cid == last
            made = party.create("property-set", parent=party.query(type="task").all()[0])
            changed = checked(party).cid
            assert changed != last
            made.delete()
            last = checked(party).cid


def test_a_lost_page_is_made_again_from_the_items(party: Party) -> None:
    _, tasks = fill(party, 400)
    snapshot = party.snapshot()
    assert party.runtime.blobs is not None
    tree = list(places(snapshot).nodes())
    assert len(tree) > 3
    party.runtime.blobs.delete([cid for path, cid, _ in tree if path])
    with party.batch():  # pages of their place are asked for, and divided in another way
        for number in range(400):
            party.create("property-set", parent=tasks[3].parent, n=number)
    after = {path: cid for path, cid, _ in places(checked(party)).nodes()}
    with sqlite3.connect(items_file(party)) as connection:
        assert dict(connection.execute("SELECT path, cid FROM placement_nodes")) == after


@pytest.mark.parametrize("before", [False, True])
def test_placements_of_what_an_epoch_leaves_out_go(tmp_path: Path, before: bool) -> None:
    """Also where the epoch before has no placements."""
    now = 1_000_000
    with echostore.open(tmp_path / "home", background=False, now_ms=lambda: now) as peer:
        party = peer.create_party("Trip")
        _, tasks = fill(party)
        declare_as_before(party) if before else Epochs(party).create()
        below = party.create("property-set", parent=tasks[3])
        tasks[3].delete()
        party.flush()
        now += 1_000_000
        Epochs(party).create(discard_before_ms=now - 1)
        assert party.runtime.processor.base is not None
        assert party.runtime.processor.base.name.discards
        snapshot = checked(party)
        gone = {tasks[3].id, below.id}
        assert not gone & {item for _, item in map(placed, places(snapshot).all())}
        base = party.runtime.processor.base.placements
        assert base is not None
        assert base.top == snapshot.root.placements, "the fold and the live party have one tree"


def test_damage_of_what_is_kept_is_noticed(party: Party) -> None:
    fill(party, 400)
    party.snapshot()
    party.create("property-set", parent=party.query(type="task").all()[0])
    party.flush()
    party.runtime.checkpoint()
    items = party.runtime.items
    assert items is not None
    damages: list[tuple[str, str, Callable[[], object]]] = [
        ("DELETE FROM placement_dirty", "placements", items.placements.dirty),
        ("UPDATE placement_dirty SET placement = x'00'", "placements", items.placements.dirty),
        (
            "UPDATE placement_nodes SET count = count + 1 WHERE path = ''",
            "placement tree",
            lambda: items.placements.node(""),
        ),
        ("DELETE FROM items WHERE type = 'board'", "not how many", lambda: list(items.placements.all())),
    ]
    for sql, what, read in damages:

        def damaged(sql: str = sql, read: Callable[[], object] = read) -> None:
            with items.database.transaction():
                items.database.execute(sql)
                read()

        with pytest.raises(Corrupt, match=what):
            damaged()


# Epochs.


def declare(party: Party, root: StateRoot, blobs: dict[Cid, bytes], **lies: Any) -> EpochView:
    """A genesis that names this root with other fields."""
    names = ("party", "timeframe", "admission_digest", "base_epoch", "models", "item_count", "membership_root")
    fields = {name: getattr(root, name) for name in (*names, "index_root", "tree", "placements")} | lies
    cid, data = state_root_bytes(**fields)
    assert party.runtime.blobs is not None
    party.runtime.blobs.put_many({**blobs, cid: data})
    return Epochs(party)._declare(read_state_root(data), cid)


def declare_as_before(party: Party) -> EpochView:
    """An epoch as a program makes it that knows no placements."""
    return declare(party, party.snapshot().root, {}, placements=None)


def declare_false_index(party: Party, lie: Callable[[set[Placement]], object]) -> EpochView:
    snapshot = party.snapshot()
    placements = set(places(snapshot).all())
    lie(placements)
    blobs: dict[Cid, bytes] = {}
    top = build_placements(placements, blobs.__setitem__)
    return declare(party, snapshot.root, blobs, placements=top.cid)


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    made = Circle(tmp_path)
    yield made
    made.close()


def test_an_epoch_of_the_version_before_is_attested_by_who_stands_there_and_by_who_is_ahead(circle: Circle) -> None:
    _, tasks = fill(circle.party("a"))
    circle.meet()
    for number in (1, 2):
        view = declare_as_before(circle.party("a"))
        assert read_state_root(circle.party("a").runtime.blobs.get(cid_from_text(view.cid))).encoding_version == 2
        circle.party("c").create("property-set", n=number)
        circle.party("c").flush()
        circle.meet()
        assert verdicts(circle.review()) == {"a": [], "b": [Verdict.ATTESTED], "c": [Verdict.ATTESTED]}
        circle.party("a").create("property-set", parent=circle.party("a").get(tasks[number].id))
        circle.meet()
    for name in "abc":
        base = circle.party(name).runtime.processor.base
        assert base is not None
        assert (base.name.number, base.root.encoding_version, base.placements) == (2, 2, None)
    # The next one, on top of it, has placements again.
    circle.epochs("b").create()
    circle.party("c").create("property-set", n=3)
    circle.meet()
    assert verdicts(circle.review()) == {"a": [Verdict.ATTESTED], "b": [], "c": [Verdict.ATTESTED]}
    assert len(circle.cids()) == 1
    assert {run_gc(circle.party(name)).epoch for name in "abc"} == {2}
    assert {checked(circle.party(name)).cid for name in "abc"} == circle.cids()


@pytest.mark.parametrize("grown", [False, True])
def test_an_epoch_is_recomputed_though_the_index_of_the_one_before_is_lost(circle: Circle, grown: bool) -> None:
    _, tasks = fill(circle.party("a"), 200)
    circle.meet()
    circle.epochs("a").create()
    circle.meet()
    circle.review()
    theirs = circle.party("c")
    base = theirs.runtime.processor.base
    assert base is not None
    assert base.placements is not None
    assert theirs.runtime.blobs is not None
    theirs.runtime.blobs.delete(list(base.placements.reachable()))
    tasks[0]["n"] = 7
    if grown:
        circle.party("a").create("property-set", parent=tasks[0])
    circle.epochs("a").create()
    circle.meet()
    theirs.create("property-set")  # it is ahead of the epoch, and folds back to it
    assert [judged.verdict for judged in circle.epochs("c").review()] == [Verdict.ATTESTED]
    checked(theirs)


@pytest.mark.parametrize("what", ["hides", "adds"])
def test_an_epoch_with_a_false_index_is_disputed_and_the_item_is_named(circle: Circle, what: str) -> None:
    view, tasks = fill(circle.party("a"))
    board = tasks[0].parent
    circle.meet()
    stands, absent = Placement(board.id + tasks[5].id), Placement(view.id + tasks[5].id)
    declare_false_index(
        circle.party("b"),
        (lambda placements: placements.discard(stands)) if what == "hides" else lambda each: each.add(absent),
    )
    circle.meet()
    for name in "ac":
        give_blobs(circle.party("b"), circle.party(name))
    circle.party("c").create("property-set")  # one is ahead of the epoch
    found = circle.review()
    assert verdicts(found) == {"a": [Verdict.DISPUTED], "b": [], "c": [Verdict.DISPUTED]}
    how = "not where it stands" if what == "hides" else "where it does not stand"
    for name in "ac":
        assert found[name][0].detail == f"another index of places: item {item_text(tasks[5].id)} is {how}"


def newcomer(party: Party, peer: echostore.Peer) -> tuple[Party, Callable[..., None], list[Cid]]:
    """Somebody who has the party's control feeds, gets blobs from it, and remembers which."""
    theirs = peer.enter(party.members.admit(peer.request_join(party.key), role="admin"))
    control_from(party, theirs)
    fetched: list[Cid] = []

    def fetch(cids: list[Cid], follow: Any = None) -> None:
        assert party.runtime.blobs is not None
        assert theirs.runtime.blobs is not None
        waiting = list(cids)
        while waiting:
            fresh = {cid: party.runtime.blobs.get(cid) for cid in theirs.runtime.blobs.missing(waiting)}
            theirs.runtime.blobs.put_many(fresh)
            fetched.extend(fresh)
            here = theirs.runtime.blobs.get
            waiting = [below for cid in waiting for below in follow(cid, here(cid))] if follow else []

    return theirs, fetch, fetched


def test_a_newcomer_makes_the_index_itself_and_serves_views_of_it(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob, open_quiet(tmp_path / "cat") as cat:
        party = ann.create_party("Trip")
        view, tasks = fill(party, 300)
        Epochs(party).create()
        theirs, fetch, fetched = newcomer(party, bob)
        epoch = believable(theirs.runtime)
        assert epoch is not None
        bootstrap(theirs, epoch, fetch)
        snapshot = checked(party)
        assert not set(places(snapshot).reachable()) & set(fetched), "none of it is fetched"
        assert checked(theirs).root.placements == snapshot.root.placements
        assert noted(theirs) == 0
        made = theirs.create("property-set", parent=theirs.get(tasks[0].id))
        assert checked(theirs).root.placements != snapshot.root.placements
        assert theirs.runtime.blobs is not None
        kept = theirs.runtime.blobs.missing(snapshot_blobs(read_state_root(snapshot.root_bytes), snapshot.blob))
        assert kept == []
        # A third one opens the view from the second.
        last, fetch, fetched = newcomer(theirs, cat)
        reader = EarlyReader(last, epoch, fetch)
        records = reader.view(view._record().genesis.inception_key)
        assert set(records) == {view.id, tasks[0].parent.id, *(task.id for task in tasks)}
        assert made.id not in records


def test_a_newcomer_notices_a_false_index_before_it_stands_on_it(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob:
        party = ann.create_party("Trip")
        fill(party)
        declare_false_index(party, lambda placements: placements.pop())
        theirs, fetch, _ = newcomer(party, bob)
        epoch = believable(theirs.runtime)
        assert epoch is not None
        with pytest.raises(FalseIndex, match="index of what hangs where is false"):
            bootstrap(theirs, epoch, fetch)
        assert theirs.runtime.processor.base is None
        assert all(held.base == 0 for held in theirs.runtime.feeds.feeds())
        with pytest.raises(FalseIndex):
            fetch_epoch(theirs, 1, fetch)


def test_who_has_the_snapshot_alone_finds_a_false_index_when_asked(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob:
        party = ann.create_party("Trip")
        _, tasks = fill(party)
        declare_false_index(party, lambda placements: placements.pop())
        tasks[0]["n"] = 7
        Epochs(party).create()
        theirs, fetch, _ = newcomer(party, bob)
        epoch = believable(theirs.runtime)
        assert epoch is not None
        bootstrap(theirs, epoch, fetch)
        assert epoch.number == 2
        judged = Epochs(theirs).verify(1)
        assert judged.verdict in (Verdict.ABSTAINS, Verdict.WAITS)
        give_blobs(party, theirs)
        judged = Epochs(theirs).verify(1)
        assert (judged.verdict, "index of what hangs where" in judged.detail) == (Verdict.DISPUTED, True)


def test_a_view_of_an_epoch_of_the_version_before_is_read_out_of_all_pages(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "bob") as bob:
        party = ann.create_party("Trip")
        view, tasks = fill(party, 300)
        declare_as_before(party)
        theirs, fetch, fetched = newcomer(party, bob)
        epoch = believable(theirs.runtime)
        assert epoch is not None
        records = EarlyReader(theirs, epoch, fetch).view(view.id)
        assert set(records) == {view.id, tasks[0].parent.id, *(task.id for task in tasks)}
        pages = set(party.snapshot().reader().reachable())
        assert pages <= set(fetched)
        bootstrap(theirs, epoch, fetch)
        assert checked(theirs).root.placements == checked(party).root.placements


# Blobs.


def test_gc_keeps_the_placements_that_are_needed_and_no_others(party: Party) -> None:
    _, tasks = fill(party, 400)
    first = party.snapshot()
    Epochs(party).create()
    for number in range(3):
        party.create("property-set", parent=tasks[number])
        Epochs(party).create()
    run_gc(party)
    assert party.runtime.blobs is not None
    base = party.runtime.processor.base
    assert base is not None
    live = checked(party)
    kept = set(snapshot_blobs(live.root, live.blob)) | set(base.names())
    assert first.root.placements is not None
    old = {first.root.placements} - kept
    assert old
    assert set(party.runtime.blobs.missing(old)) == old


def test_a_file_carries_the_placements_and_one_from_before_is_taken(
    party: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(party)
    snapshot = party.snapshot()
    export_party(party, tmp_path / "new.car")
    with (tmp_path / "new.car").open("rb") as file:
        carried = {cid for cid, _ in read_car(file)[1]}
    assert set(places(snapshot).reachable()) <= carried
    assert set(snapshot_blobs(snapshot.root, snapshot.blob)) <= carried

    cid, data = snapshot.unplaced()
    before = replace(snapshot, cid=cid_text(cid), root=read_state_root(data), root_bytes=data)
    with monkeypatch.context() as patch:
        patch.setattr(Party, "snapshot", lambda self: before)
        export_party(party, tmp_path / "old.car")
    for name in ("new.car", "old.car"):
        with open_quiet(tmp_path / name.replace(".car", "-home")) as other:
            assert import_party(other, tmp_path / name).snapshot().cid == snapshot.cid


def test_the_size_of_an_epoch_counts_its_placements(party: Party) -> None:
    _, tasks = fill(party)
    Epochs(party).create()
    snapshot = party.snapshot()
    whole = {cid: len(snapshot.blob(cid)) for cid in snapshot_blobs(snapshot.root, snapshot.blob)}
    assert Epochs(party).sizes() == {1: sum(whole.values()) + len(snapshot.root_bytes)}
    tasks[0]["n"] = 5
    Epochs(party).create()
    assert Epochs(party).sizes()[2] < sum(whole.values())
