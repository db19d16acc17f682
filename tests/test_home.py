"""The data folder, its lock, and which copy of it this is (FAULTS S7, S8, X4, D3)."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echostore.kernel.errors import EchoError, Locked, NotFound, Refused, StorageFailed, UsageError
from echostore.kernel.ids import PartyKey
from echostore.store import durable_file, instance
from echostore.store.home import Home
from echostore.store.instance import InstanceCheck, Standing, check_in, standing_of
from feed_builder import PARTY

# -- layout ------------------------------------------------------------------------------------------------------


def test_a_home_is_made_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "home"
    with pytest.raises(NotFound):
        Home.open(path)
    assert not path.exists()
    home = Home.open(path, create=True)
    assert Home.open(path) == Home.open(path, create=True) == home
    folder = home.make_party(PARTY)
    assert home.make_party(PARTY) == folder
    assert folder.feeds == path / "parties" / PARTY.hex() / "feeds.db"
    assert home.party_keys() == [PARTY]
    for made in (path, path / "parties", folder.path):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_only_folders_named_by_a_key_are_parties(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", create=True)
    home.make_party(PARTY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (home.parties / ("ab" * 32)).symlink_to(elsewhere)
    for name in ("..data", "AB" * 32, "ab" * 31, "ab" * 32 + ".gon", "x" * 64, ".gone"):
        (home.parties / name).mkdir()
    assert home.party_keys() == [PARTY]
    assert home.gone_folders() == []
    with pytest.raises(Refused):
        home.make_party(PartyKey(bytes.fromhex("ab" * 32)))
    assert list(elsewhere.iterdir()) == []


def test_a_place_that_can_not_be_a_home_is_refused_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("mine")
    for create in (False, True):
        with pytest.raises(UsageError):
            Home.open(file, create=create)
        with pytest.raises(UsageError):
            Home.open(file / "below", create=True)
    with pytest.raises(NotFound):
        Home.open(full)
    with pytest.raises(Refused, match="other files"):
        Home.open(full, create=True)
    assert [entry.name for entry in full.iterdir()] == ["letter.txt"]
    sly = tmp_path / "sly"
    sly.mkdir()
    (sly / "parties").symlink_to(full)
    with pytest.raises(EchoError):
        Home.open(sly, create=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert Home.open(empty, create=True).path == empty


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    # Root may write everywhere but in the kernel's own folders.
    place = Path("/sys") if os.geteuid() == 0 else tmp_path
    with pytest.raises((Refused, StorageFailed)):
        Home.open(place / "home", create=True)
    tmp_path.chmod(0o700)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(max_size=300)
    | st.sampled_from(["..", ".", "/", "\0", "a" * 5000, "CON", "\\\\x\\y", "../" * 9, "\ud800"])
)
def test_any_name_gives_a_home_or_a_typed_error(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base" / "deep"
    base.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(EchoError):
        Home.open(base / name.lstrip("/").replace("..", "dots"))


# -- the lock ----------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from echostore.store.home import Home
with Home.open(sys.argv[1]).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_at_once_with_the_pid(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", create=True)
    command = [sys.executable, "-c", HOLDER, str(home.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(Locked, match=f"pid {process.pid}:"):
            home.lock()
        assert process.poll() is None, "the answer came while the other one holds it"
        process.kill()
        process.wait()
        # Killed, the file is still there and names it: stale, and no obstacle.
        assert f"pid {process.pid}" in (home.path / "lock").read_text()
    with home.lock() as lock:
        assert lock.held
        with pytest.raises(Locked, match=f"pid {os.getpid()}:"):
            home.lock()
    assert not lock.held
    home.lock().release()


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", create=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (home.path / "lock").symlink_to(victim)
    with pytest.raises(Refused, match="symbolic link"):
        home.lock()
    assert victim.read_text() == "precious"


# -- which copy this is ------------------------------------------------------------------------------------------


class Machine:
    """A home with a state folder beside it, and starts that can be cut short."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.home = Home.open(folder / "home", create=True)

    def start(self, home: Path | None = None, machine: str = "m") -> InstanceCheck:
        return check_in(Home.open(home or self.home.path), state=self.state, machine=machine)

    def used(self) -> "Machine":
        """With a party, so that there is something to fork."""
        self.start()
        self.home.make_party(PARTY)
        return self


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_start_is_fresh_and_the_next_ones_are_the_same(machine: Machine) -> None:
    first = machine.start()
    assert (first.standing, first.boot, first.remembered) == (Standing.FRESH, 1, True)
    for boot in range(2, 5):
        check = machine.start()
        assert (check.standing, check.boot, check.instance_id) == (Standing.SAME, boot, first.instance_id)
        assert check.may_continue_feeds


def test_a_copied_home_gets_a_new_id_and_the_original_goes_on(machine: Machine) -> None:
    machine.used()
    original = machine.start()
    copy = machine.folder / "copy"
    shutil.copytree(machine.home.path, copy, copy_function=shutil.copy2)
    check = machine.start(copy)
    assert check.standing is Standing.COPIED
    assert check.instance_id != original.instance_id
    assert machine.start(copy).standing is Standing.SAME
    assert machine.start().standing is Standing.SAME


def test_a_home_on_another_machine_is_a_copy(machine: Machine) -> None:
    machine.used()
    assert machine.start(machine="another").standing is Standing.COPIED
    assert machine.start(machine="another").standing is Standing.SAME


def test_a_moved_home_is_the_same(machine: Machine) -> None:
    machine.used()
    moved = machine.folder / "moved"
    machine.home.path.rename(moved)
    assert machine.start(moved).standing is Standing.SAME


def test_a_restored_backup_is_found(machine: Machine) -> None:
    machine.used()
    machine.start()
    backup = machine.folder / "backup"
    shutil.copytree(machine.home.path, backup, copy_function=shutil.copy2)
    machine.start()
    shutil.rmtree(machine.home.path)
    shutil.copytree(backup, machine.home.path, copy_function=shutil.copy2)
    check = machine.start()
    assert check.standing is Standing.RESTORED
    assert machine.start().standing is Standing.SAME


def test_a_backup_restored_in_place_within_one_boot_is_found(machine: Machine) -> None:
    """The file keeps its inode and the boot agrees: only the time of change tells, and nobody can set that."""
    machine.used()
    machine.start()
    raw, before = machine.home.instance.read_bytes(), machine.home.instance.stat()
    with machine.home.instance.open("r+b") as file:
        file.write(raw)
    os.utime(machine.home.instance, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert machine.home.instance.stat().st_ino == before.st_ino
    assert machine.start().standing is Standing.RESTORED


@pytest.mark.parametrize(
    "lose",
    [
        lambda machine: shutil.rmtree(machine.state),
        lambda machine: machine.home.instance.unlink(),
        lambda machine: machine.home.instance.write_bytes(b"damaged"),
        lambda machine: machine.home.instance.write_bytes(
            b'{"id": "../../etc", "boot": 1, "machine": "m", "inode": 1}'
        ),
        lambda machine: machine.home.instance.write_bytes(b"x" * 100_000),
        lambda machine: [file.write_bytes(b"{}") for file in machine.state.iterdir()],
    ],
    ids=["no outside", "no inside", "damaged inside", "hostile inside", "huge inside", "damaged outside"],
)
def test_every_doubt_is_answered_with_a_new_id(machine: Machine, lose: Callable[[Machine], object]) -> None:
    machine.used()
    before = machine.start()
    lose(machine)
    check = machine.start()
    assert check.standing in (Standing.RESTORED, Standing.COPIED)
    assert check.instance_id != before.instance_id
    assert not check.may_continue_feeds
    assert machine.start().standing is Standing.SAME


def test_without_a_lasting_state_folder_every_start_is_a_new_one(machine: Machine) -> None:
    machine.used()
    shutil.rmtree(machine.state)
    machine.state.write_text("a file where the folder should be")
    ids = set()
    for _ in range(3):
        check = machine.start()
        assert (check.may_continue_feeds, check.remembered) == (False, False)
        ids.add(check.instance_id)
    assert len(ids) == 3


def test_the_state_folder_is_the_users_or_the_one_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path))
    assert instance.state_folder() == tmp_path / "instances"
    monkeypatch.delenv("ECHOSTORE_STATE")
    assert "echostore" in str(instance.state_folder())


class Cut(BaseException):
    """The power goes off."""


STEPS = ("write", "fsync", "rename")


def cut_at(monkeypatch: pytest.MonkeyPatch, step: int) -> list[str]:
    """Let the process end before the given call of the operating system; returns the calls that were made."""
    made: list[str] = []

    def wrapped(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*arguments: object) -> object:
            if len(made) == step:
                raise Cut
            made.append(name)
            return real(*arguments)

        return call

    for name in STEPS:
        monkeypatch.setattr(durable_file.os, name, wrapped(name))
    return made


def test_a_crash_at_any_step_is_neither_a_false_alarm_nor_a_false_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, finished = 0, False
    while not finished:
        machine = Machine(tmp_path / f"{step}").used()
        before = machine.start()
        backup = tmp_path / f"{step} backup"
        shutil.copytree(machine.home.path, backup, copy_function=shutil.copy2)
        with monkeypatch.context() as patch:
            made = cut_at(patch, step)
            try:
                machine.start()
                finished = True
            except Cut:
                assert len(made) == step
        crashed = tmp_path / f"{step} crashed copy"
        shutil.copytree(machine.home.path, crashed, copy_function=shutil.copy2)
        # Not a false `same` for the copy as long as the records are those of the crash: a start writes others.
        assert standing_of(Home.open(crashed), state=machine.state, machine="m") is not Standing.SAME, f"after {made}"
        # Not a false alarm: no block was written since, so going on with the feeds is right.
        check = machine.start()
        assert check.standing is Standing.SAME, f"after {made}"
        assert check.instance_id == before.instance_id
        assert check.boot > before.boot
        # Nor afterwards, and not for an older backup put back.
        assert not machine.start(crashed).may_continue_feeds
        shutil.rmtree(machine.home.path)
        shutil.copytree(backup, machine.home.path, copy_function=shutil.copy2)
        assert not machine.start().may_continue_feeds
        step += 1
    assert step > 12, "fewer steps than the protocol has"


def test_a_crash_at_any_step_of_the_first_start_leaves_a_home_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(12):
        machine = Machine(tmp_path / f"{step}")
        with monkeypatch.context() as patch:
            cut_at(patch, step)
            with contextlib.suppress(Cut):
                machine.start()
        assert machine.start().standing is not Standing.COPIED
        assert machine.start().standing is Standing.SAME
