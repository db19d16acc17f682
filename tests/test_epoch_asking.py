"""What epochs take away is told first and asked for: `epoch create --discard-before`, and `epoch gc`."""

import errno
import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest

from cli_process import Cli
from echostore.kernel.items.discarding import LeftOut
from echostore.peer.epochs import Epochs
from echostore.store.durable_file import file_error
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """A party with an item that was deleted, one below it, a log that lets posts go, and a text with a history."""
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        gone = party.create("property-set", title="gone")
        party.create("property-set", parent=gone, title="below")
        gone.delete()
        log = party.create("threaded-log")
        log.name = "log"
        log.set_retention(count_max=1)
        for body in "abc":
            log.post(body)
        text = party.create("text")
        text.name = "text"
        for letter in "hello":
            text.insert(0, letter)
            party.flush()
    return Cli(tmp_path / "home", tmp_path / "state")


def files(home: Path) -> dict[str, str]:
    """What is on disk. A reader's SQLite may make an index and an empty log."""
    found = [path for path in home.rglob("*") if path.is_file() and path.stat().st_size]
    found = [path for path in found if not path.name.endswith("-shm")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def later() -> str:
    """A time after everything that was written so far."""
    time.sleep(0.002)
    return "1ms"


# leaving out


def test_a_dry_run_says_what_an_epoch_would_leave_out_and_changes_nothing(cli: Cli) -> None:
    before = files(cli.home)
    plan = cli("epoch", "create", "--discard-before", later(), "--dry-run", "--json").ok()
    assert plan.json()["left_out"] == {"items": 2, "posts": 2, "histories": 1}
    assert (plan.json()["number"], plan.json()["items"], plan.json()["declared"]) == (1, 2, False)
    assert plan.err == "", "a program has it in the document"
    told = cli("epoch", "create", "--discard-before", later(), "--dry-run").ok()
    assert "2 deleted items" in told.err
    assert "2 posts" in told.err
    assert "the history of 1 text or list" in told.err
    assert files(cli.home) == before
    with open_quiet(cli.home) as peer:
        epochs = peer.epochs(peer.party("@Trip"))
        assert epochs.plan(discard_before_ms=peer.now_ms()).left_out == LeftOut(2, 2, 1)
        assert not epochs.plan().left_out, "nothing is left out that nobody asked for"
        assert epochs.all() == []


def test_nothing_is_left_out_without_a_yes(cli: Cli) -> None:
    ran = cli("epoch", "create", "--discard-before", later())
    assert ran.status == 2
    assert "2 deleted items" in ran.err
    assert "--yes" in ran.err
    (refused,) = cli("epoch", "create", "--discard-before", later(), "--json").err.splitlines()
    assert json.loads(refused)["error"]["exit_status"] == 2, "one document"
    assert cli("epoch", "list", "--json").ok().json()["epochs"] == []
    done = cli("epoch", "create", "--discard-before", later(), "--yes", "--json").ok().json()
    assert (done["number"], done["items"], done["declared"]) == (1, 2, True)
    assert len(done["party"]) == 64


def test_an_epoch_is_shown_with_what_it_left_out_while_that_can_be_told(cli: Cli) -> None:
    def shown(number: int) -> object:
        return cli("epoch", "show", str(number), "--json").ok().json()["left_out"]

    cli("epoch", "create").ok()
    cli("epoch", "create", "--discard-before", later(), "--yes").ok()
    nothing = {"items": 0, "posts": 0, "histories": 0}
    assert (shown(1), shown(2)) == (nothing, {"items": 2, "posts": 2, "histories": 1})
    assert "2 deleted items, 2 posts, the history of 1 text or list" in cli("epoch", "show", "2").ok().out
    cli("item", "create", "property-set", "n=1").ok()
    cli("epoch", "create").ok()
    assert shown(3) == nothing
    assert "nothing beyond what those before it did" in cli("epoch", "show", "3").ok().out
    cli("epoch", "gc", "--yes").ok()
    assert shown(2) is None
    assert "can't be told" in cli("epoch", "show", "2").ok().out


def test_an_epoch_that_leaves_nothing_out_asks_nothing(cli: Cli) -> None:
    cli("epoch", "create", "--discard-before", "2020-01-01").ok()
    cli("item", "create", "text", "x").ok()
    cli("epoch", "create").ok()


def test_items_are_counted_alike_everywhere(cli: Cli) -> None:
    made = cli("epoch", "create", "--json").ok().json()
    shown = cli("epoch", "show", "1", "--json").ok().json()
    fetched = cli("epoch", "fetch", "1", "--json").ok().json()
    known = cli("party", "show", "--json").ok().json()["items"]
    assert {made["items"], shown["items"], fetched["items"]} == {known}


# freeing


def truncatable(cli: Cli) -> None:
    with open_quiet(cli.home) as peer:
        party = peer.party("@Trip")
        for number in range(3):
            party.create("property-set", n=number)
            Epochs(party).create()


def another_member(cli: Cli, guest: Path) -> None:
    with open_quiet(cli.home) as peer, open_quiet(guest) as other:
        party = peer.party("@Trip")
        party.members.admit(other.request_join(party.key))


def test_the_only_copy_of_a_history_goes_only_with_a_yes(cli: Cli) -> None:
    truncatable(cli)
    ran = cli("epoch", "gc")
    assert ran.status == 2
    assert "nobody else is in the party, and the only copy of its history would go" in ran.err
    assert "--yes" in ran.err
    assert "--dry-run" in ran.err
    (refused,) = cli("epoch", "gc", "--json").err.splitlines()
    assert json.loads(refused)["error"]["exit_status"] == 2, "one document"
    assert cli("epoch", "gc", "--yes", "--json").ok().json()["blocks"] > 0


def test_the_help_says_what_happens_where_nobody_can_be_asked(cli: Cli) -> None:
    words = " ".join(cli("epoch", "gc", "--help").ok().out.split())
    assert "Where nobody can be asked it goes ahead" in words
    assert "needed where nobody can be asked" not in words


def test_a_person_is_asked_before_blocks_go_and_a_program_told(cli: Cli, tmp_path: Path) -> None:
    truncatable(cli)
    another_member(cli, tmp_path / "guest")
    ran = cli("epoch", "gc").ok()
    assert "below epoch 2" in ran.err
    assert "party export" in ran.err
    assert "only copy" not in ran.err
    assert " went" in ran.out
    again = cli("epoch", "gc", "--yes", "--json").ok()
    assert (again.json()["blocks"], again.err) == (0, ""), "where no block goes nothing is told"


def test_a_dry_run_counts_what_then_goes(cli: Cli) -> None:
    truncatable(cli)
    plan, done = (cli("epoch", "gc", option, "--json").ok().json() for option in ("--dry-run", "--yes"))
    for name in ("epoch", "blocks", "block_bytes", "control_blocks", "blobs", "blob_bytes"):
        assert plan[name] == done[name], name


def test_a_dry_run_needs_no_lock_and_no_place_to_write(cli: Cli, tmp_path: Path) -> None:
    truncatable(cli)
    expected = cli("epoch", "gc", "--dry-run", "--json").ok().json()["blocks"]
    copy = Cli(tmp_path / "copy", tmp_path / "state of the copy")
    shutil.copytree(cli.home, copy.home)
    with open_quiet(cli.home) as peer:
        assert cli("epoch", "gc", "--dry-run", "--json").ok().json()["blocks"] == expected
        peer.party("@Trip").create("text")
        peer.party("@Trip").flush()
        cli("epoch", "create", "--dry-run").ok()
    before = files(copy.home)
    assert copy("epoch", "gc", "--dry-run", "--json").ok().json()["blocks"] == expected
    assert files(copy.home) == before, "a copy gets new feeds when it writes, not before"


def test_read_only_media_are_not_to_be_repaired() -> None:
    told = file_error(OSError(errno.EROFS, "Read-only file system"), "open the home /x")
    assert "only read work there" in told.next_step
    assert "repair" not in told.next_step
