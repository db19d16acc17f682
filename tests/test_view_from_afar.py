"""`view open LOCATOR --from ADDRESS`: whatever is wrong is told in one line, with a status of its own (DESIGN 6, 13)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.cli import view
from echostore.mesh.blob_exchange import Unavailable
from echostore.peer import bootstrap
from echostore.peer.bootstrap import Bootstraps
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from network_peers import address, peers
from served import serve


@pytest.fixture(autouse=True)
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(bootstrap, "PATIENCE_S", 60.0)


class Away:
    """Ann has a view in an epoch; bob's device was admitted, and has nothing of it."""

    def __init__(self, folder: Path, ann: Peer, fill: Callable[[Party, Any], None] = lambda trip, view: None) -> None:
        self.folder = folder
        self.ann, self.trip = ann, ann.create_party("Trip")
        ann.view_classes.register("planner")
        self.view = self.trip.create_view("planner", "Plan")
        self.trip.create(type="task", parent=self.view)
        fill(self.trip, self.view)
        Epochs(self.trip).create()
        with echostore.open(folder / "bob", name="bob", background=False) as bob:
            self.identity = bob.identity
            bob.enter(self.trip.members.admit(bob.request_join(self.trip.key)))
        self.echo = Cli(folder / "bob", folder / "state")

    def open(self, locator: str) -> tuple[int, str]:
        ran = self.echo("view", "open", locator, "--from", address(self.ann))
        assert ran.err.strip().count("\n") == 0, ran.err
        return ran.status, ran.err


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    with peers(tmp_path, "ann") as (ann,):
        yield Away(tmp_path, ann)


def test_it_is_read_from_the_epoch(away: Away) -> None:
    shown = away.echo("view", "open", away.view.locator, "--from", address(away.ann), "--json").ok().json()
    assert (shown["display_name"], shown["epoch"], len(shown["items"])) == ("Plan", 1, 2)
    told = away.echo("view", "open", away.view.locator, "--from", address(away.ann)).ok().out
    assert "display_name=Plan" in told
    assert told.endswith("as of epoch 1\n")


def test_deleted_items_are_not_shown(tmp_path: Path) -> None:
    def fill(trip: Party, view: Any) -> None:
        gone = trip.create(type="gone", parent=view)
        trip.create(type="below", parent=gone)
        gone.delete()

    with peers(tmp_path, "ann") as (ann,):
        away = Away(tmp_path, ann, fill)
        shown = away.echo("view", "open", away.view.locator, "--from", address(ann), "--json").ok().json()
        assert (shown["epoch"], len(shown["items"])) == (1, 2)


@pytest.mark.parametrize("early", [True, False])
def test_an_item_inside_of_a_view_that_is_no_view(away: Away, early: bool) -> None:
    text = away.trip.create("text", parent=away.view)
    if early:
        Epochs(away.trip).create()
    status, said = away.open(text.locator)
    assert (status, "is not a view" in said) == (2, True), said


def test_a_view_with_any_values(away: Away) -> None:
    away.view["view_class"], away.view["display_name"] = b"class", {"x": 1}
    Epochs(away.trip).create()
    locator, forms = away.view.locator, (["--json"], [])
    for form in forms:
        away.echo("view", "open", locator, "--from", address(away.ann), *form).ok()
    del away.view["display_name"]
    away.ann.close()
    ann = Cli(away.folder / "ann", away.folder / "state")
    for command in (["list"], ["open", locator]):
        for form in forms:
            ann("view", *command, *form).ok()


def test_a_locator_that_is_none_or_of_another_party(away: Away) -> None:
    item = away.view.locator.rsplit("/", 1)[1]
    for wrong in ("echo://", "@Plan", away.view.locator[:-1], away.view.locator + "/x"):
        assert away.open(wrong)[0] == 2, wrong
    status, said = away.open(f"echo://{'ab' * 32}/{item}")
    assert (status, "in no party abababab" in said, "ticket" in said) == (3, True, True)


@pytest.mark.parametrize("where", ["in the epoch", "above it"])
def test_an_item_that_is_no_view(away: Away, where: str) -> None:
    item = away.trip.query(type="task").one() if where == "in the epoch" else away.trip.create(type="task", n=1)
    away.trip.flush()
    status, said = away.open(item.locator)
    assert (status, "is not a view" in said, "view list" in said) == (2, True, True), said


def test_a_view_that_is_nowhere(away: Away) -> None:
    away.trip.create(type="task", n=1)  # above the epoch
    key = away.trip.key.hex()
    for name in ("11" * 16, "22" * 32):
        status, said = away.open(f"echo://{key}/{name}")
        assert (status, f"no view {name[:8]} is in the party" in said) == (3, True), said
        assert "--from" in said
    with serve(away.folder, "bob") as running:
        ran = running.cli("view", "open", f"echo://{key}/{'22' * 32}", "--from", address(away.ann))
        assert (ran.status, "no view 22222222 is in the party" in ran.err) == (3, True), ran


def test_a_view_that_may_be_in_what_does_not_come(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PATIENCE_S", 3.0)
    monkeypatch.setattr(view, "_heard", lambda status, device: False)
    status, said = away.open(f"echo://{away.trip.key.hex()}/{'22' * 32}")
    assert (status, "no view 22222222 is in epoch 1, and what was written since did not come" in said) == (5, True), (
        said
    )


def test_a_device_that_holds_nothing_is_told_of_from(away: Away) -> None:
    for name in (away.view.locator, "@Plan"):
        ran = away.echo("view", "open", name)
        assert (ran.status, "nothing of the party is here yet" in ran.err) == (3, True), ran
        assert "view open LOCATOR --from HOST:PORT" in ran.err
    locator = f"echo://{away.trip.key.hex()}/{'22' * 32}"
    away.ann.close()
    ann = Cli(away.folder / "ann", away.folder / "state")
    assert "no view with the inception key 22222222" in ann("view", "open", locator).err


def test_a_device_that_was_removed(away: Away) -> None:
    assert away.open(away.view.locator)[0] == 0
    away.trip.members.remove(away.identity)
    later = away.trip.create_view("planner", "Later")
    status, said = away.open(later.locator)
    assert (status, "the member was removed" in said) == (4, True), said


def test_a_member_that_vanishes_midway(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, asked = Bootstraps._fetch, list[Any]()

    def vanish(self: Bootstraps, party: Any, cids: list[Any], *more: Any) -> None:
        """The first blobs are given, and then nobody is there."""
        asked.append(cids)
        if len(asked) > 1:
            raise Unavailable(set(cids))
        fetch(self, party, cids, *more)

    monkeypatch.setattr(Bootstraps, "_fetch", vanish)
    status, said = away.open(away.view.locator)
    assert len(asked) > 1
    assert (status, "came from nobody" in said, "--from" in said) == (5, True, True), said


def fill(trip: Party, view: Any) -> None:
    """Items in items, one that was moved, one that is embedded and has its home elsewhere, and a deleted one."""
    parents = [view]
    for n in range(12):
        parents.append(trip.create(type="task", parent=parents[n // 2], n=n))
    outside = trip.create(type="album", n=100)
    trip.create(type="photo", parent=outside, n=101)
    outside.embed_in(parents[3])
    parents[-1].move(view)
    parents[5].delete()


def test_it_looks_as_it_does_at_home(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        away = Away(tmp_path, ann, fill)
        home = Cli(tmp_path / "ann", tmp_path / "state")
        far = ("view", "open", away.view.locator, "--from", address(ann))
        shown = away.echo(*far, "--json").ok()
        assert shown.err == "", "what the command did not wait for is no matter of its reader"
        here = home("view", "open", away.view.locator, "--json").ok().json()
        assert (here.pop("epoch"), shown.json()["epoch"]) == (None, 1)
        assert {**shown.json(), "epoch": 0} == {**here, "epoch": 0}
        told = away.echo(*far).ok().out.splitlines()
        assert told == [*home("view", "open", away.view.locator).ok().out.splitlines(), "as of epoch 1"]
        assert any("↪ album" in line for line in told)
