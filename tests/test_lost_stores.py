"""What a home says when one of its files is gone: what is lost, what is not, and what to do (FAULTS S4, S5, S7)."""

import subprocess
import sys
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Corrupt, Locked
from echostore.kernel.ids import PartyKey
from echostore.store.feed_store import FeedStore
from echostore.store.item_store import ItemStore
from echostore.store.item_tables import Checkpoint


class Lab:
    """A home with one party, closed, and the command for it."""

    def __init__(self, folder: Path) -> None:
        self.cli = Cli(folder / "home", folder / "state")
        self.path = folder / "home"
        with echostore.open(self.path, name="Ann", background=False) as peer:
            party = peer.create_party("Trip")
            self.key = party.key
            self.item = party.create(type="note", n=1).id
            party.create("text").insert(0, "hello")
            self.cid = party.snapshot().cid
        self.folder = self.path / "parties" / self.key.hex()

    def lose(self, *patterns: str) -> None:
        for pattern in patterns:
            found = [*self.path.glob(pattern)]
            assert found, pattern
            for file in found:
                file.unlink()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    return Lab(tmp_path)


READS = [("query", "--type", "note", "--count"), ("party", "show"), ("item", "tree"), ("feed", "list")]


@pytest.mark.parametrize("how", ["lost", "an empty one in its place"])
def test_lost_feeds_are_damage_for_every_command_and_no_write_hides_it(lab: Lab, how: str) -> None:
    lab.lose("parties/*/feeds.db*")
    if how != "lost":  # as an earlier echostore left it
        FeedStore(lab.folder / "feeds.db", PartyKey(lab.key)).close()
    for _ in range(2):
        for command in READS[:3]:
            ran = lab.cli(*command)
            assert ran.status == 6, (command, ran)
            assert "feeds.db" in ran.err
            assert "Restore the file from a backup" in ran.err
        written = lab.cli("item", "create", "text", "x")
        assert written.status == 6
        assert "Restore the file from a backup" in written.err
        assert (lab.folder / "feeds.db").exists() == (how != "lost"), "a refused write leaves nothing"
        checked = lab.cli("doctor")
        assert checked.status == 6
        assert "0 blocks" not in checked.out
        assert lab.cli("status").status == 6


def test_a_reader_manages_without_meta_db_and_a_writer_makes_it_anew(lab: Lab) -> None:
    lab.lose("meta.db*")
    for _ in range(2):
        with echostore.open(lab.path, read_only=True) as peer:
            assert [known.title for known in peer.parties()] == ["Trip"]
            assert peer.party(lab.key).get(lab.item)["n"] == 1
            assert peer.party(lab.key).snapshot().cid == lab.cid
        assert not (lab.path / "meta.db").exists(), "a reader writes nothing"
    for command in READS:
        lab.cli(*command).ok()
    assert "echostore init" in lab.cli.process(*READS[0]).ok().err, "what to do about it"
    checked = next(each for each in lab.cli("doctor", "--json").ok().json()["checks"] if "meta.db" in each["what"])
    assert checked["level"] == "warning"
    assert "echostore init" in checked["next_step"]
    (told,) = (line for line in lab.cli.process("init").ok().err.splitlines() if "meta.db" in line)
    assert "addresses of others are not known any more" in told
    assert "echostore serve --connect HOST:PORT" in told
    assert "meta.db" not in lab.cli.process("init").ok().err, "once"
    with echostore.open(lab.path, background=False) as peer:
        assert peer.party(lab.key).snapshot().cid == lab.cid
    assert all("meta.db" not in each["what"] for each in lab.cli("doctor", "--json").ok().json()["checks"])
    assert lab.cli.process(*READS[0]).ok().err == ""


def test_a_full_check_finds_what_the_file_alone_does_not_show(lab: Lab) -> None:
    """An items.db that is sound in itself, and not what the feeds give."""
    lab.cli("doctor", "--full").ok()
    store = ItemStore(lab.folder / "items.db")
    row = next(row for row in store.scan_rows("1", ()) if row.type == "note")
    state = store.state(row.item)
    assert state is not None
    forged = state._replace(state=state.state.replace(b"note", b"nope"))
    assert forged != state
    store.save(Checkpoint([], [row], [forged], [], {}, {}, [], [], [], {}))
    store.close()
    ran = lab.cli("doctor", "--full")
    assert ran.status == 6, ran
    assert "the feeds give" in ran.out
    assert "Remove" in ran.out


def test_a_full_check_reads_the_rows_of_the_items(lab: Lab) -> None:
    file = lab.folder / "items.db"
    data = file.read_bytes()
    at = data.find(b"note")
    assert at > 0
    while at > 0:
        file.write_bytes(data[:at] + b"nope" + data[at + 4 :])
        assert lab.cli("doctor", "--full").status == 6, at
        at = data.find(b"note", at + 1)


HOLD = """
import sys, echostore
with echostore.open(sys.argv[1], background=False) as peer:
    print("open", flush=True)
    sys.stdin.readline()
"""

TRY = """
import sys, echostore
from echostore.kernel.errors import Locked
try:
    echostore.open(sys.argv[1])
except Locked as locked:
    heavy = [name for name in ("echostore.peer.peer", "nacl", "google.protobuf", "loro") if name in sys.modules]
    print(locked.pid, heavy)
"""


def test_a_locked_home_names_the_process_and_is_refused_before_anything_heavy_is_loaded(lab: Lab) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lab.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(Locked) as locked:
            echostore.open(lab.path)
        assert locked.value.pid == holder.pid
        tried = subprocess.run(
            [sys.executable, "-c", TRY, str(lab.path)], capture_output=True, text=True, timeout=60, check=True
        )
        assert tried.stdout == f"{holder.pid} []\n"
    finally:
        holder.communicate("\n", timeout=60)
    with echostore.open(lab.path, background=False) as peer:
        assert peer.party(lab.key).get(lab.item)["n"] == 1


def test_a_failed_opening_leaves_the_home_unlocked(lab: Lab) -> None:
    keys = (lab.path / "keys").read_bytes()
    (lab.path / "keys").write_bytes(b"no keys")
    with pytest.raises(Corrupt):
        echostore.open(lab.path)
    (lab.path / "keys").write_bytes(keys)
    echostore.open(lab.path, background=False).close()
