"""Epochs and the end of the machine: every commit of every file is a place where it may end, and nothing is lost there.

While an epoch is made, followed, fetched, started from, discards or frees the disk, the home is copied after each commit:
what a killed process leaves. For a power cut, files whose commits are not synced are put back to where they last were. Each
copy is opened, examined as `doctor --full` does, built anew from its feeds, and goes on with what was interrupted.
"""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echostore.cli import checkup
from echostore.cli.output import Output
from echostore.kernel.ids import Cid
from echostore.mesh.blob_exchange import Follow
from echostore.peer import peer as peer_module
from echostore.peer.bootstrap import believable, bootstrap, fetch_epoch
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.store import feed_truncation
from echostore.store.home import Home
from echostore.store.instance import InstanceCheck, Standing
from echostore.store.sqlite import Database
from test_discarding import later
from test_stale_messages import blobs_of, control_from
from two_peers import admitted, open_quiet, sync

SYNCED = 2
"""PRAGMA synchronous = FULL."""


@pytest.fixture(autouse=True)
def copies_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied home would open new feeds; here a copy stands for the home itself."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(peer_module, "check_in", lambda home: InstanceCheck(Standing.SAME, "0", 1))


@dataclass
class Crash:
    """What is left at one place: the folder of a killed process, and the files that a power cut takes back."""

    after: str
    folder: Path
    older: dict[str, dict[str, bytes]]


@dataclass
class Recorder:
    """Copies a home after each commit of one of its files."""

    home: Path
    into: Path
    crashes: list[Crash] = field(default_factory=list)
    synced: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By file: its bytes and its log's, when it was last synced."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, path: Path) -> None:
        """Now the file is on disk for good."""
        names = (path.name, f"{path.name}-wal")
        found = {name: path.with_name(name) for name in names if path.with_name(name).exists()}
        self.synced[str(path.relative_to(self.home))] = {name: file.read_bytes() for name, file in found.items()}

    def committed(self, path: Path, *, synced: bool, what: str) -> None:
        if self.home not in path.parents:
            return
        with self.lock:
            if synced:
                self.keep(path)
            folder = self.into / str(len(self.crashes))
            shutil.copytree(self.home, folder, ignore=shutil.ignore_patterns("*-shm", "lock", "*.sock"))
            current = {
                name: bytes_
                for name, bytes_ in self.synced.items()
                if any((folder / name).with_name(file).read_bytes() != data for file, data in bytes_.items())
            }
            self.crashes.append(Crash(f"{len(self.crashes)} {path.name} {what}", folder, current))


@contextmanager
def recorded(home: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder(home, into)
    for path in home.rglob("*.db"):
        recorder.keep(path)
    transaction, shrink, checkpoint = Database.transaction, Database.shrink, Database.checkpoint

    @contextmanager
    def commits(self: Database, *, durable: bool = True) -> Iterator[None]:
        outermost = self._connection is None or not self._connection.in_transaction
        with transaction(self, durable=durable):
            yield
        if outermost:
            recorder.committed(self.path, synced=self.rows("PRAGMA synchronous") == [(SYNCED,)], what="commit")

    def shrunk(self: Database, *, small_pages: bool = False) -> None:
        shrink(self, small_pages=small_pages)
        recorder.committed(self.path, synced=True, what="shrink")

    def emptied(self: Database) -> None:
        checkpoint(self)
        recorder.committed(self.path, synced=True, what="checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr(Database, "transaction", commits)
        patched.setattr(Database, "shrink", shrunk)
        patched.setattr(Database, "checkpoint", emptied)
        yield recorder


def left_by(recorder: Recorder, home: Path) -> Iterator[str]:
    """Puts each crash in the home's place: first as a killed process leaves it, then as a power cut does."""
    for crash in recorder.crashes:
        for older in ({}, crash.older) if crash.older else ({},):
            shutil.rmtree(home)
            shutil.copytree(crash.folder, home)
            for name, files in older.items():
                path = home / name
                for part in (path, path.with_name(f"{path.name}-wal")):
                    part.unlink(missing_ok=True)
                for file, data in files.items():
                    path.with_name(file).write_bytes(data)
            yield f"{crash.after}, {'without what was not synced' if older else 'killed'}"


def examined(home: Path, where: str) -> None:
    findings = list(checkup._data(Home.open(home), Output(quiet=True), full=True))
    assert [finding for finding in findings if finding.level is not checkup.Level.OK] == [], where


def rebuilt(home: Path) -> str:
    """The CID of a party whose items are folded from its feeds and its base alone."""
    for file in home.glob("parties/*/items.db*"):
        file.unlink()
    with open_quiet(home) as peer:
        return peer.party("@Trip").snapshot().cid


def values(party: Party) -> dict[Any, Any]:
    return {item.id: item.value() for item in party.query(type="task").all()}


def each_crash(
    recorder: Recorder,
    home: Path,
    before: dict[Any, Any] | None,
    again: Callable[[Party], None],
    *,
    cids: set[str] | None = None,
    after: dict[Any, Any] | None = None,
) -> int:
    """Whatever is left has all values, and one of the CIDs; it goes on, and is the same when it is built anew."""
    tried = 0
    for where in left_by(recorder, home):
        with open_quiet(home) as peer:
            party = peer.party("@Trip") if before is not None else peer.party(peer.parties()[0].key)
            assert before in (None, values(party)), where
            assert cids is None or party.snapshot().cid in cids, where
        examined(home, where)
        with open_quiet(home) as peer:
            party = peer.party(peer.parties()[0].key)
            again(party)
            assert values(party) == (after or before), where
            cid = party.snapshot().cid
        assert rebuilt(home) == cid, where
        tried += 1
    examined(home, "at the end")
    return tried


def filled(party: Party, count: int = 6) -> list[Any]:
    items = [party.create("property-set", type="task", n=number, long="x" * 3000) for number in range(count)]
    items[0]["file"] = party.files.add(b"photo" * 100)
    party.flush()
    return items


def test_making_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        items = filled(party)
        Epochs(party).create()
        items[1]["n"] = 10
        cid, expected = party.snapshot().cid, values(party)
        with recorded(home, tmp_path / "crashes", monkeypatch) as recorder:
            Epochs(party).create()

    def again(party: Party) -> None:
        if Epochs(party).chain()[-1].number == 1:
            Epochs(party).create()
        assert Epochs(party).verify(2).verdict == "attested"

    assert each_crash(recorder, home, expected, again, cids={cid}) >= 3


def test_making_an_epoch_that_discards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        items = filled(party)
        Epochs(party).create()
        gone = party.create("property-set", type="gone")
        gone.delete()
        items[1]["n"] = 10
        cid, expected = party.snapshot().cid, values(party)
        with recorded(home, tmp_path / "crashes", monkeypatch) as recorder:
            Epochs(party).create(discard_before_ms=later(party))
        cids = {cid, party.snapshot().cid}
        assert len(cids) == 2, "something was left out"
        assert not party.has(gone.id)

    def again(party: Party) -> None:
        if Epochs(party).chain()[-1].number == 1:
            Epochs(party).create(discard_before_ms=later(party))
        assert not party.has(gone.id)

    assert each_crash(recorder, home, expected, again, cids=cids) >= 3


def test_freeing_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill of a real process after each step is in `test_epoch_gc`; here every commit, and the power goes too."""
    monkeypatch.setattr(feed_truncation, "STEP_BLOCKS", 7)
    home = tmp_path / "home"
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        items = filled(party)
        for number in range(6):
            if number == 3:
                run_gc(party)  # the second time states are lent to the tree, and control feeds begin at a state
            items[1]["long"] = str(number) * 40_000
            items[2]["n"] = number
            Epochs(party).create()
        items[3]["n"] = 400
        party.snapshot()
        items[4]["n"] = 500  # a power cut may bring back the tree from before, whose pages gc deletes
        party.flush()
        expected = values(party)
        with recorded(home, tmp_path / "crashes", monkeypatch) as recorder:
            assert run_gc(party).control_blocks
        cid = party.snapshot().cid

    def again(party: Party) -> None:
        run_gc(party)
        left = plan_gc(party)
        assert (left.blocks, left.blobs) == (0, 0)
        assert party.files.read(party.get(items[0].id)["file"]) == b"photo" * 100

    assert each_crash(recorder, home, expected, again, cids={cid}) >= 8


def test_following_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob takes in the blocks, recomputes, attests and stands on it."""
    home = tmp_path / "bob"
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        with open_quiet(home) as bob:
            theirs = admitted(party, bob)
            items = filled(party)
            sync(party, theirs)
            items[1]["n"] = 10
            Epochs(party).create()
            with recorded(home, tmp_path / "crashes", monkeypatch) as recorder:
                sync(party, theirs)
                Epochs(theirs).review()
                theirs.runtime.checkpoint()
            expected = values(party)

        def again(theirs: Party) -> None:
            sync(party, theirs)
            Epochs(theirs).review()
            sync(party, theirs)
            assert [(epoch.number, epoch.final) for epoch in Epochs(theirs).chain()] == [(1, True)]
            assert theirs.snapshot().cid == party.snapshot().cid

        assert each_crash(recorder, home, None, again, after=expected) >= 4


def test_starting_from_an_epoch_and_fetching_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "bob"
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        items = filled(party)
        for number in range(3):
            items[1]["n"] = number
            Epochs(party).create()
        items[1]["n"] = 30
        with open_quiet(home) as bob:
            theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
            party.flush()
            with recorded(home, tmp_path / "crashes", monkeypatch) as recorder:
                begin(party, theirs)
                sync(party, theirs)
                fetch_epoch(theirs, 1, blobs_of(party, theirs))
            expected = values(party)

        def again(theirs: Party) -> None:
            if theirs.runtime.processor.base is None:
                begin(party, theirs)
            sync(party, theirs)
            fetch_epoch(theirs, 1, blobs_of(party, theirs))
            assert theirs.as_of(1).get(items[1].id)["n"] == 0
            assert theirs.snapshot().cid == party.snapshot().cid

        assert each_crash(recorder, home, None, again, after=expected) >= 8


def begin(party: Party, theirs: Party) -> None:
    control_from(party, theirs)
    epoch = believable(theirs.runtime)
    assert epoch is not None
    bootstrap(theirs, epoch, blobs_of(party, theirs))


@pytest.mark.parametrize("fetches", [1, 2, 3, 4])
def test_a_newcomer_that_is_killed_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetches: int
) -> None:
    """A real process and a real kill, at each round of blobs; the home is its own, not a copy."""
    monkeypatch.undo()
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    home = tmp_path / "bob"
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        items = filled(party)
        Epochs(party).create()
        items[1]["n"] = 30
        with open_quiet(home) as bob:
            theirs = bob.enter(party.members.admit(bob.request_join(party.key)))
            party.flush()
            control_from(party, theirs)
        assert party.runtime.blobs is not None
        blobs = {cid: party.runtime.blobs.get(cid) for cid, _ in party.runtime.blobs.list()}
        child = os.fork()
        if child == 0:
            try:
                with open_quiet(home) as bob:
                    killed_at(bob.party("@Trip"), blobs, fetches)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it was to be killed"
        with open_quiet(home) as bob:
            theirs = bob.party("@Trip")
            begin(party, theirs)
            sync(party, theirs)
            assert theirs.runtime.processor.base is not None
            assert values(theirs) == values(party)
            cid = theirs.snapshot().cid
            assert cid == party.snapshot().cid
    assert rebuilt(home) == cid
    examined(home, f"killed at round {fetches}")


def killed_at(theirs: Party, blobs: dict[Cid, bytes], fetches: int) -> None:
    """Starts from the newest epoch; ends itself when so many rounds of blobs were asked for, with half of the last."""
    done = 0

    def fetch(cids: list[Cid], follow: Follow | None = None) -> None:
        nonlocal done
        assert theirs.runtime.blobs is not None
        while cids:
            done += 1
            if done == fetches:
                theirs.runtime.blobs.put_many({cid: blobs[cid] for cid in cids[: len(cids) // 2]})
                os.kill(os.getpid(), signal.SIGKILL)
            theirs.runtime.blobs.put_many({cid: blobs[cid] for cid in cids})
            cids = [below for cid in cids for below in follow(cid, blobs[cid])] if follow is not None else []

    epoch = believable(theirs.runtime)
    assert epoch is not None
    bootstrap(theirs, epoch, fetch)
