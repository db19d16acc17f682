"""Nothing is left open and nothing grows: a whole life of two peers, over and over (FAULTS S7, S9).

For a real soak set ECHOSTORE_SOAK_S to the seconds it should take; the limits are the same however long it runs.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore import field
from echostore.kernel.errors import Locked
from echostore.testing.inmemory import link

SOAK_S = float(os.environ.get("ECHOSTORE_SOAK_S", "6"))
WARM_UP = 6
"""Cycles until caches, interned texts and the pools of the libraries have their size."""
CYCLES_MIN = 12
BLOCKS_PER_CYCLE_MAX = 60
"""Objects that Python may keep per cycle: jitter of caches, and far less than one party or peer is made of."""
GROWTH_KIB_MAX = 6 * 1024
"""How much the process may grow over the whole soak, fragmentation included."""


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


class Life:
    """Two peers that stay; everything else about them comes and goes with each cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with echostore.open(folder / "ann", name="ann") as ann, echostore.open(folder / "bob", name="bob") as bob:
            party = ann.create_party("Soak")
            self.key = party.key
            bob.enter(party.members.admit(bob.request_join(party.key), role="editor"))
            link(ann, bob, party.key).pump().cut()
            note = party.create("property-set", type="note", n=0)
            self.note = note.id
            self.text = party.create("text", parent=note).id
            self.list = party.create("growable-array").id

    def cycle(self, number: int) -> None:
        """Open, write, replicate, ask, follow, look back, snapshot, pause, make and forget a party, close."""
        folder = self.folder
        with (
            echostore.open(folder / "ann", background=number % 2 == 0) as ann,
            echostore.open(folder / "bob", background=False) as bob,
        ):
            ours, theirs = ann.party(self.key), bob.party(self.key)
            joined = link(ann, bob, self.key)
            told: list[Any] = []
            with ours.query(type="note").where(field("n") >= 0).subscribe(told.append):
                before = ours.anchor()
                with ours.batch():
                    ours.get(self.note)["n"] = number
                    ours.get(self.text).splice(0, min(1, len(ours.get(self.text))), "x")
                ours.get(self.list).append(number)
                if len(ours.get(self.list)) > 3:
                    del ours.get(self.list)[0]
                ours.flush()
                joined.pump()
                theirs.get(self.note)["by"] = "bob"
                theirs.flush()
                joined.pump()
            assert told
            assert theirs.snapshot().cid == ours.snapshot().cid
            assert len(list(ours.stream(before))) >= 2
            ours.as_of(before).query().count()
            ours.undo()
            joined.pump()
            theirs.pause()
            bob.resume_party(self.key)
            joined.cut()
            scratch = ann.create_party("Scratch")
            scratch.create("property-set", type="note", n=1)
            ann.forget_party(scratch.key)
        with echostore.open(folder / "bob", read_only=True) as reader:
            reader.party(self.key).query().all()


@pytest.mark.timeout(SOAK_S + 240)
def test_a_long_life_leaves_nothing_open_and_does_not_grow(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for number in range(WARM_UP):
        life.cycle(number)
    gc.collect()
    files, objects, size_kib = open_files(), sys.getallocatedblocks(), resident_kib()
    started, cycles = time.monotonic(), 0
    while cycles < CYCLES_MIN or time.monotonic() - started < SOAK_S:
        life.cycle(WARM_UP + cycles)
        cycles += 1
    gc.collect()
    assert open_files() == files
    # The history of the party itself is long by now; what is read of it is gone when the peer is closed.
    assert sys.getallocatedblocks() - objects < BLOCKS_PER_CYCLE_MAX * cycles
    assert resident_kib() - size_kib < GROWTH_KIB_MAX


def test_a_refused_opening_leaves_nothing_open(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", background=False):
        with pytest.raises(Locked):
            echostore.open(tmp_path / "home", background=False)
        files = open_files()
        for _ in range(50):
            with pytest.raises(Locked):
                echostore.open(tmp_path / "home", background=False)
        assert open_files() == files


ROUNDS = 50
RIVALS = 3


def test_of_processes_that_open_one_home_at_once_one_wins_and_the_others_hear_at_once(tmp_path: Path) -> None:
    """Each round starts anew, with the lock free; who wins holds it until all others have had their answer."""
    home = tmp_path / "home"
    echostore.open(home, background=False).close()
    for number in range(ROUNDS):
        go_read, go_write = os.pipe()
        told_read, told_write = os.pipe()
        end_read, end_write = os.pipe()
        children = [_rival(home, go_read, told_write, end_read, (go_write, end_write)) for _ in range(RIVALS)]
        for each in (go_read, told_write, end_read):
            os.close(each)
        os.close(go_write)  # all start now
        with os.fdopen(told_read) as pipe:
            answers = [json.loads(pipe.readline()) for _ in children]
            os.close(end_write)  # the winner may go
            assert pipe.read() == ""
        for child in children:
            os.waitpid(child, 0)
        assert sorted(answer["outcome"] for answer in answers) == ["E-LOCKED"] * (RIVALS - 1) + ["won"], (
            number,
            answers,
        )


def _rival(home: Path, go: int, told: int, end: int, parents: tuple[int, int]) -> int:
    """A process that opens the home when `go` is closed, tells how that went, and holds on until `end` is closed."""
    child = os.fork()
    if child:
        return child
    try:
        for each in parents:
            os.close(each)
        os.read(go, 1)
        peer, outcome = None, "won"
        try:
            peer = echostore.open(home, background=False)
        except Locked as error:
            outcome = error.code
        os.write(told, json.dumps({"outcome": outcome}).encode() + b"\n")
        os.read(end, 1)
        if peer is not None:
            peer.close()
    finally:
        os._exit(0)
