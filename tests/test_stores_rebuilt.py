"""Stores: lost, damaged, locked, read beside the writer, behind a passphrase (FAULTS S4, S5, S7, X7)."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import Corrupt, DiskFull, Locked, NotFound, Refused, StorageFailed, WrongPassphrase
from peer_builder import Circle

DAMAGES = ("garbage", "truncated", "halved", "emptied")


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Home:
    """Ann's home with two parties, closed; Bob has the first one too."""

    def __init__(self, folder: Path) -> None:
        self.circle = Circle(folder, "ann", "bob")
        party = self.circle.party("ann")
        self.item = party.create(type="note", n=1, tags=["a"])
        text = party.create("text", parent=self.item)
        text.insert(0, "hello")
        party.create("growable-array", parent=self.item).append(1, self.item)
        party.create("threaded-log").post("first")
        text.move(None)
        self.cid = self.circle.agree()
        self.other = self.circle.peers["ann"].create_party("Other").key
        self.circle.peers["ann"].close()
        self.path = folder / "ann"
        self.party_path = self.path / "parties" / self.circle.key.hex()

    def open(self, **more: object) -> echostore.Peer:
        self.circle.peers["ann"] = echostore.open(self.path, **{"background": False, **more})
        return self.circle.peers["ann"]

    def same(self) -> bool:
        return self.open().party(self.circle.key).snapshot().cid == self.cid


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.circle.close()


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    for beside in file.parent.glob(file.name + "-*"):
        beside.unlink()
    file.write_bytes(
        {"garbage": os.urandom(8192), "truncated": data[:100], "halved": data[: len(data) // 2], "emptied": b""}[how]
    )


# lost and damaged


@pytest.mark.parametrize("lost", [("items.db",), ("meta.db",), ("items.db", "meta.db")], ids=" and ".join)
def test_derived_stores_that_are_lost_are_rebuilt_to_the_same_state(home: Home, lost: tuple[str, ...]) -> None:
    for name in lost:
        for file in [*home.path.glob(name + "*"), *home.party_path.glob(name + "*")]:
            file.unlink()
    assert home.same()
    home.circle.peers["ann"].party(home.circle.key).get(home.item.id)["n"] = 2
    home.circle.agree_after_loss()
    assert home.circle.get("bob", home.item)["n"] == 2
    assert home.circle.party("ann").runtime.feeds.forks() == []


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["items.db", "meta.db"])
def test_derived_stores_that_are_damaged_are_rebuilt_to_the_same_state(home: Home, name: str, how: str) -> None:
    damage((home.path if name == "meta.db" else home.party_path) / name, how)
    assert home.same()
    assert home.circle.peers["ann"].party(home.other).create(n=1)["n"] == 1


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_feeds_are_an_error_that_touches_no_other_party(home: Home, how: str) -> None:
    damage(home.party_path / "feeds.db", how)
    peer = home.open()
    with pytest.raises(Corrupt):
        peer.party(home.circle.key)
    assert peer.party(home.other).create(n=1)["n"] == 1


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_key_file_is_refused_and_left_as_it_is(home: Home, how: str) -> None:
    damage(home.path / "keys", how)
    before = (home.path / "keys").read_bytes()
    with pytest.raises(Corrupt, match="key"):
        home.open()
    assert (home.path / "keys").read_bytes() == before


def test_a_missing_key_file_is_refused_while_parties_are_there(home: Home) -> None:
    (home.path / "keys").unlink()
    with pytest.raises(Refused, match="keys is missing") as refused:
        home.open()
    assert "backup" in refused.value.next_step
    assert not (home.path / "keys").exists(), "no new keys are made over it"


def test_one_flipped_byte_in_a_block_is_noticed_and_placed(home: Home) -> None:
    file = home.party_path / "feeds.db"
    data = bytearray(file.read_bytes())
    at = data.find(b"hello")
    assert at > 0
    data[at] ^= 0xFF
    file.write_bytes(bytes(data))
    for beside in home.party_path.glob("items.db*"):
        beside.unlink()
    with pytest.raises(Corrupt, match="Block"):
        home.open().party(home.circle.key)


def test_a_read_only_folder_is_an_error_not_a_loss(home: Home) -> None:
    home.path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert _refused_without_privileges(home)
    finally:
        home.path.chmod(stat.S_IRWXU)
    assert home.same()


def _refused_without_privileges(home: Home) -> bool:
    """Whether a process that may not write everywhere gets a typed error. Root becomes nobody for it, in a child."""
    if os.geteuid() != 0:
        with pytest.raises(echostore.EchoError):
            home.open()
        return True
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            home.open()
        except echostore.EchoError:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_full_disk_refuses_the_write_and_keeps_what_was_acknowledged(home: Home) -> None:
    peer = home.open()
    party = peer.party(home.circle.key)
    item = party.get(home.item.id)
    item["n"] = 2
    party.flush()
    pages = party.runtime.feeds._db.row("PRAGMA page_count")[0]
    party.runtime.feeds._db.rows(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for _ in range(50):
            item["big"] = "x" * 100_000
            party.flush()

    with pytest.raises(StorageFailed):
        fill()
    with pytest.raises(StorageFailed):
        item["n"] = 3
    with pytest.raises(DiskFull, match=r"1 change was not stored and is lost\."):
        peer.close()
    reopened = home.open().party(home.circle.key)
    assert reopened.get(home.item.id)["n"] == 2
    reopened.get(home.item.id)["n"] = 4
    home.circle.agree_after_loss()


# locked


def test_a_second_process_is_refused_at_once_and_told_who_has_it(home: Home) -> None:
    home.open()
    code = f"import echostore, sys\ntry: echostore.open({str(home.path)!r})\nexcept echostore.EchoError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    with pytest.raises(Locked, match=f"pid {os.getpid()}"):
        echostore.open(home.path)
    assert f"pid {os.getpid()}" in done.stdout
    assert done.returncode == 0


# read-only


def test_a_reader_beside_the_writer_sees_what_is_durable(home: Home) -> None:
    item = home.open().party(home.circle.key).get(home.item.id)
    item["n"] = 2
    item.party.flush()
    item["n"] = 3
    with echostore.open(home.path, read_only=True) as reader:
        assert reader.party(home.circle.key).get(home.item.id)["n"] == 2
    item.party.flush()
    with echostore.open(home.path, read_only=True) as reader:
        party = reader.party(home.circle.key)
        assert party.get(home.item.id)["n"] == 3
        assert party.snapshot().cid == item.party.snapshot().cid


def test_a_reader_keeps_to_one_moment_while_the_writer_goes_on(home: Home) -> None:
    party = home.open().party(home.circle.key)
    items = [party.create(n=0) for _ in range(30)]
    cid = party.snapshot().cid
    with echostore.open(home.path, read_only=True) as reader:
        seen = reader.party(home.circle.key)
        for item in items:
            item["n"] = 1
        party.snapshot()
        assert [seen.get(item.id)["n"] for item in items] == [0] * 30
        assert seen.snapshot().cid == cid


def test_a_reader_manages_without_a_checkpoint_that_fits(home: Home, tmp_path: Path) -> None:
    party = home.open().party(home.circle.key)
    with echostore.open(tmp_path / "cat", name="cat", background=False) as cat:
        party.members.admit(cat.request_join(party.key))
    party.get(home.item.id)["n"] = 2
    party.flush()
    with echostore.open(home.path, read_only=True) as reader:
        seen = reader.party(home.circle.key)
        assert seen.get(home.item.id)["n"] == 2
        assert seen.snapshot().cid == party.snapshot().cid


def test_a_reader_refuses_every_write(home: Home) -> None:
    with echostore.open(home.path, read_only=True) as reader:
        party = reader.party(home.circle.key)
        item = party.get(home.item.id)
        text = next(found for found in party.items() if found.model == "text")
        for write in (
            lambda: item.__setitem__("n", 2),
            lambda: party.create(n=1),
            lambda: text.insert(0, "x"),
            lambda: reader.create_party("New"),
            lambda: reader.close_party(party.key),
            lambda: reader.forget_party(party.key),
            party.pause,
            party.undo,
            party.flush,
        ):
            with pytest.raises(Refused):
                write()
        assert party.snapshot().cid == home.cid
    assert home.same()


def test_a_reader_of_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        echostore.open(tmp_path / "nothing", read_only=True)
    assert not (tmp_path / "nothing").exists()


# passphrase


def test_a_passphrase_opens_what_it_closed(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", passphrase="right", background=False) as peer:
        party = peer.create_party("Secret")
        item = party.create(n=1)
        identity = peer.identity
    for wrong in ("wrong", None):
        with pytest.raises((WrongPassphrase, Refused)):
            echostore.open(tmp_path / "home", passphrase=wrong, background=False)
    with echostore.open(tmp_path / "home", passphrase="right", background=False) as peer:
        assert peer.identity == identity
        peer.party(party.key).get(item.id)["n"] = 2
