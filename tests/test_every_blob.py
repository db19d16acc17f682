"""One blob of what a truncated party needs is lost, whichever: it is told as damage or made again, and nothing rests on it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, PartyKey
from echostore.peer.control_floor import kept_blobs
from echostore.peer.epoch_fetching import holes, survey
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.store.blob_store import BlobStore
from echostore.wire.base_epoch import snapshot_blobs
from echostore.wire.placements import PlacementReader
from network_peers import address, cid, converged, until
from peer_builder import Circle
from served import serve
from served import until as served_until
from test_stale_messages import agreed_epoch
from two_peers import open_quiet

VIEWS = 40
"""Their placements take an index node and several pages."""


class Home:
    """A party without its history, on an epoch: Bob's, who freed his disk, or Dan's, who came late."""

    def __init__(self, folder: Path, who: str) -> None:
        self.folder, self.who = folder, who
        with Circle(folder, "ann", "bob") as circle:
            ann = circle.party("ann")
            self.key: PartyKey = circle.key
            with ann.batch():
                views = [ann.create("property-set", type="view", n=number) for number in range(VIEWS)]
                items = [
                    ann.create("property-set", parent=view, type="task", n=number)
                    for view in views
                    for number in range(12)
                ]
            text = ann.create("text", type="note")
            text.insert(0, "a long text " * 2000)
            items[0].move(views[1])
            circle.meet_all()
            for number in range(2):
                items[number]["n"] = 1000 + number
                agreed_epoch(circle, "ann", "bob")
            run_gc(circle.party("bob"))
        if who == "dan":
            self._join()
        with open_quiet(self.home) as peer:
            party = peer.party(self.key)
            party.get(items[20].id)["n"] = -2
            party.create("property-set", type="task", parent=party.get(views[3].id), n="only here")
            run_gc(party)
            self.cid = cid(party)
            runtime = party.runtime
            self.base = runtime.processor.base
            live = party.snapshot()
            needed = {self.base.name.snapshot, self.base.name.cut}
            needed |= set(survey(self.base.name, runtime.blobs).here)
            needed |= set(snapshot_blobs(live.root, live.blob)) | set(kept_blobs(runtime.processor, runtime.blobs))
            record = next(
                e.genesis.record for e in Epochs(party).chain() if e.genesis.snapshot == self.base.name.snapshot
            )
            self.record = Cid(record)
            self.needed = sorted({*needed, self.record})
            self.items = {item: party.get(item).value() for item in runtime.all_items()}
            self.placements = set(PlacementReader(self.base.root.placements, runtime.blobs.get).reachable())
            self.whole = set(runtime.blobs.list())
        assert len(self.placements) > 4

    def _join(self) -> None:
        with echostore.open(self.folder / "ann") as ann, echostore.open(self.home, name="dan") as dan:
            ann.listen("127.0.0.1:0")
            dan.listen("127.0.0.1:0")
            welcome = ann.party(self.key).members.admit(dan.request_join(self.key))
            theirs = dan.enter(welcome)
            dan.connect(address(ann))
            converged(theirs, ann.party(self.key))
            assert "from epoch 2" in theirs.status.began

    @property
    def home(self) -> Path:
        return self.folder / self.who

    @property
    def file(self) -> Path:
        return self.home / "parties" / self.key.hex() / "blobs.db"

    def lost(self, cids: list[Cid]) -> Iterator[Cid]:
        """Each of these is lost in its turn, and put back afterwards if nobody did."""
        for each in cids:
            with BlobStore(self.file) as blobs:
                data = blobs.get(each)
                assert blobs.delete([each])
            yield each
            with BlobStore(self.file) as blobs:
                blobs.put_many({each: data})

    def check(self, party: Party) -> None:
        assert party.runtime.processor.damage is None
        assert cid(party) == self.cid
        assert {item: party.get(item).value() for item in party.runtime.all_items()} == self.items


@pytest.fixture(params=["bob", "dan"])
def home(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    return Home(tmp_path, request.param)


def test_freeing_the_disk_goes_on_or_names_the_damage_and_deletes_nothing(home: Home) -> None:
    refused = []
    for lost in home.lost(home.needed):
        with BlobStore(home.file) as blobs:
            before = set(blobs.list())
        for free in (plan_gc, run_gc):
            told = _refused(home, free)
            refused += [told] if told is not None else []
            with BlobStore(home.file) as blobs:
                assert told is None or set(blobs.list()) >= before
                assert told is not None or free is plan_gc or blobs.has(lost), "what can be made again is"
                assert told is not None or free is plan_gc or not holes(home.base.name, blobs)
    assert len(refused) > 20
    for each in refused:
        assert "the epoch that the party stands on" in each.what, each
        assert "epoch fetch 2 --from" in each.next_step
    with open_quiet(home.home) as peer:
        home.check(peer.party(home.key))


def _refused(home: Home, free: Callable[[Party], object]) -> Corrupt | None:
    try:
        with echostore.open(home.home, read_only=free is plan_gc, background=False) as peer:
            free(peer.party(home.key))
    except Corrupt as error:
        return error
    return None


def test_placements_and_records_that_are_lost_are_made_again_when_the_disk_is_freed(home: Home) -> None:
    for lost in home.lost([*sorted(home.placements), home.record]):
        with open_quiet(home.home) as peer:
            party = peer.party(home.key)
            assert plan_gc(party).blobs == 0
            run_gc(party)
            assert party.runtime.blobs.has(lost)
            home.check(party)


def test_a_running_peer_heals_every_one(home: Home) -> None:
    """By what it does when it comes onto the network, and when somebody notices a loss."""
    with echostore.open(home.folder / "ann") as ann, echostore.open(home.home) as peer:
        ann.listen("127.0.0.1:0")
        peer.listen("127.0.0.1:0")
        party = peer.party(home.key)
        peer.connect(address(ann))
        converged(party, ann.party(home.key))
        blobs = party.runtime.blobs
        for lost in home.needed:
            assert blobs.delete([lost])
            assert peer.network.bootstraps.mend(party) == ""
            until(lambda: party.runtime.processor.damage is None)
            assert cid(party) == home.cid
            assert blobs.has(lost)
            run_gc(party)
        home.check(party)


def test_the_doctor_says_so(home: Home) -> None:
    some = [home.record, *(each for each in home.needed if each != home.record)]
    silent = []
    for lost in home.lost(some):
        with echostore.open(home.home, read_only=True, background=False) as peer:
            from echostore.cli.checkup import Level, _party
            from echostore.cli.output import Output

            known = next(each for each in peer.parties() if each.key == home.key)
            found = list(_party(peer, known, Output(), full=False))
            if not any(each.level is Level.BROKEN and each.next_step for each in found):
                silent.append(lost)
    with open_quiet(home.home) as peer:
        live = peer.party(home.key).snapshot()
        assert set(silent) <= {live.root.membership_root, live.root.tree, home.record}, "what every snapshot makes"
    for _ in home.lost(sorted(home.placements)[:1]):
        assert Cli(home.home, home.folder / "state")("doctor").status == 6


@pytest.mark.parametrize("told_before", [False, True])
def test_a_service_fetches_it_and_gc_says_what_to_do_until_then(home: Home, told_before: bool) -> None:
    lost = home.base.root.membership_root
    with BlobStore(home.file) as blobs:
        assert blobs.delete([lost])
    cli = Cli(home.home, home.folder / "state")
    if told_before:
        for more in ("--dry-run", "--yes"):
            told = cli("epoch", "gc", more)
            assert told.status == 6, told.err
            assert "epoch fetch 2 --from HOST:PORT" in told.err
        assert cli("doctor").status == 6

    def here() -> bool:
        with BlobStore(home.file, writable=False) as blobs:
            return blobs.has(lost)

    with serve(home.folder, "ann") as ann, serve(home.folder, home.who, "--connect", ann.address) as served:
        served_until(here)
        served_until(lambda: served.cli("status").status == 0)
    cli("epoch", "gc", "--yes").ok()
    cli("doctor").ok()
