"""Full disks (FAULTS S3): real small file systems under peers and under the service.

The rule: a change is refused before anything of it happened, or it is shown and counted as not stored until it is stored.
Writing goes on by itself once there is space. A failed fsync is another matter (FAULTS S2): see tests/test_crash_store.py.
"""

import json
import random
import shutil
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import DiskFull, EchoError, StorageFailed
from echostore.kernel.items.operations import Reject
from echostore.kernel.reasons import Reason
from echostore.peer import peer as peer_module
from echostore.peer import runtime as runtime_module
from echostore.peer.party import Party
from echostore.store.sqlite import sqlite_error
from served import serve, until
from small_disk import KINDS, SmallDisk, small_disk
from two_peers import admitted, open_quiet, sync

ROUNDS = {"tmpfs": 50, "file size": 20}
LEFT_MAX = 100_000
"""Bytes that are left at most when a round begins; the disk is refused at another place in each."""


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, "tmpfs") as made:
        yield made


def write_until_full(party: Party, chance: random.Random) -> tuple[list[Any], DiskFull]:
    """Items that were made, and what the first refusal said; it came from a write or from a flush."""
    made = []
    for number in range(1000):
        try:
            made.append(party.create(type="note", n=number, body="x" * chance.choice([10, 500, 4000])))
            if chance.random() < 0.5:
                party.flush()
        except DiskFull as error:
            return made, error
    raise AssertionError("the disk was never full")


def notes(party: Party) -> set[int]:
    return {item["n"] for item in party.query(type="note")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("background", [False, True], ids=["quiet", "background"])
def test_a_party_goes_on_by_itself_once_there_is_space(disk: SmallDisk, request: Any, background: bool) -> None:
    kind = request.node.callspec.params["disk"]
    for seed in range(ROUNDS[kind] // 2):
        chance = random.Random(f"{seed} {background}")
        home = disk.path / f"home{seed}"
        with echostore.open(home, name="Ada", background=background) as peer:
            party = peer.create_party("Trip")
            peer.flush()
            disk.fill(chance.randrange(LEFT_MAX))
            made, error = write_until_full(party, chance)
            shown = notes(party)
            assert shown == set(range(len(made))), "what was refused is not shown, all else is"
            assert "Nothing was changed" not in str(error)
            status = party.status
            assert (status.disk_full, status.writable) == (True, False)
            assert status.unstored >= 1, "what is shown and not stored is counted"
            disk.free()
            after = party.create(type="note", n=len(made))
            party.flush()
            assert (party.status.failure, party.status.unstored, party.status.writable) == ("", 0, True)
            assert after["n"] == len(made)
        with open_quiet(home) as peer:
            assert notes(peer.party(party.key)) == shown | {len(made)}
        shutil.rmtree(home)


def test_what_waits_is_stored_in_the_background_without_another_write(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "FULL_RETRY_S", 0.02)
    with echostore.open(disk.path / "home", name="Ada") as peer:
        party = peer.create_party("Trip")
        space = threading.Event()
        party.runtime.on_space.append(space.set)
        disk.fill(20_000)
        made, _ = write_until_full(party, random.Random(1))
        disk.free()
        assert space.wait(30)
        assert party.runtime.failure is None
        assert party.runtime.unstored == 0
        assert notes(party) == set(range(len(made)))


def test_a_refused_flush_says_how_much_waits_and_a_refused_write_that_it_was_not_made(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home") as peer:
        party = peer.create_party("Trip")
        disk.fill(0)
        for number in range(3):
            party.create(type="note", n=number, body="x" * 30_000)
        with pytest.raises(DiskFull, match="3 changes are in memory only, shown and not stored") as flushed:
            party.flush()
        with pytest.raises(DiskFull, match=r"This change was not made\. 3 changes are in memory only"):
            party.create(type="note", n=3)
        assert "feeds.db" in flushed.value.what
        assert notes(party) == {0, 1, 2}
        disk.free()


def test_who_closes_on_a_full_disk_is_told_what_is_lost(disk: SmallDisk) -> None:
    peer = open_quiet(disk.path / "home")
    party = peer.create_party("Trip")
    party.create(type="note", n=0)
    party.flush()
    disk.fill(0)
    for number in (1, 2):
        party.create(type="note", n=number, body="x" * 30_000)
    with pytest.raises(DiskFull, match="2 changes were not stored and are lost"):
        peer.close()
    disk.free()
    with open_quiet(disk.path / "home") as again:
        assert notes(again.party(party.key)) == {0}


def test_a_network_peer_releases_its_home_when_it_closes_on_a_full_disk(disk: SmallDisk) -> None:
    peer = open_quiet(disk.path / "home")
    party = peer.create_party("Trip")
    peer.listen("127.0.0.1:0")
    disk.fill(0)
    party.create(type="note", n=0, body="x" * 60_000)
    with pytest.raises(DiskFull, match="1 change was not stored and is lost"):
        peer.close()
    disk.free()
    open_quiet(disk.path / "home").close()


def test_a_batch_on_a_full_disk_is_shown_as_a_whole_or_not_at_all(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home") as peer:
        party = peer.create_party("Trip")
        disk.fill(0)
        with party.batch():
            party.create(type="note", n=0, body="x" * 30_000)
            party.create(type="note", n=1)
        with pytest.raises(DiskFull):
            party.flush()
        with pytest.raises(DiskFull), party.batch():
            party.create(type="note", n=2)
        assert notes(party) == {0, 1}
        disk.free()
        party.flush()
        assert (party.status.unstored, party.status.failure) == (0, "")


def test_text_that_was_typed_before_the_disk_was_full_stays_and_is_stored(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home") as peer:
        party = peer.create_party("Trip")
        text = party.create("text", type="doc")
        party.flush()
        disk.fill(0)
        text.insert(0, "typed " * 8000)
        with pytest.raises(DiskFull):
            party.flush()
        with pytest.raises(DiskFull):
            text.insert(0, "more")
        assert str(text) == "typed " * 8000
        disk.free()
        text.insert(0, "more ")
        party.flush()
    with open_quiet(disk.path / "home") as peer:
        assert str(peer.party(party.key).get(text.id)) == "more " + "typed " * 8000


def test_a_credential_that_can_not_be_stored_is_taken_back(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home", "Ada") as peer:
        party = peer.create_party("Trip")
        disk.fill(0)
        with pytest.raises(DiskFull) as refused:  # noqa: PT012  # credentials are small: some fit into what is left
            for number in range(200):
                party.members.set_profile(f"Ada {number}")
        before = party.members.all()[0].name
        assert "Nothing was changed" not in str(refused.value)
        assert party.runtime.unstored == 0
        disk.free()
        assert party.members.all()[0].name == before
        party.members.set_profile("Countess")
        party.create(type="note", n=1)
        party.flush()
    with open_quiet(disk.path / "home") as peer:
        again = peer.party(party.key)
        assert again.members.all()[0].name == "Countess"
        assert again.rejected() == []


def test_blocks_of_others_are_taken_once_there_is_space(disk: SmallDisk, tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(disk.path / "bob") as bob:
        trip = ann.create_party("Trip")
        theirs = admitted(trip, bob)
        for number in range(12):
            trip.create(type="note", n=number, body="x" * 3000)
            trip.flush()
        disk.fill(0)
        sync(trip, theirs)
        assert notes(theirs) < set(range(12))
        assert theirs.status.disk_full
        disk.free()
        sync(trip, theirs)
        assert notes(theirs) == set(range(12))
        assert not theirs.status.disk_full
        assert trip.snapshot().cid == theirs.snapshot().cid


def test_items_are_folded_again_from_what_is_not_stored_too(disk: SmallDisk, tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann, open_quiet(disk.path / "bob") as bob:
        trip = ann.create_party("Trip")
        theirs = admitted(trip, bob)
        shared = theirs.create(type="note", n=0)
        sync(trip, theirs)
        trip.get(shared.id)["by"] = "ann"
        theirs.get(shared.id)["by"] = "bob"
        sync(trip, theirs)
        disk.fill(0)
        shared["body"] = "x" * 60_000
        with pytest.raises(DiskFull):
            theirs.flush()
        theirs.runtime.processor.refold({shared.id})
        assert (shared["n"], shared["by"], len(shared["body"])) == (0, theirs.get(shared.id)["by"], 60_000)
        disk.free()
        theirs.flush()
        sync(trip, theirs)
        assert trip.snapshot().cid == theirs.snapshot().cid


# files other than the feeds


def pages(party: Party, store: str) -> Any:
    database = getattr(party.runtime, store)
    return database.database if store == "items" else database._db


def test_a_checkpoint_without_space_refuses_writes_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "CHECKPOINT_ITEMS", 20)
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.runtime.checkpoint()
        items = party.runtime.items.database
        items.rows(f"PRAGMA max_page_count = {items.row('PRAGMA page_count')[0]}")
        made, error = write_until_full(party, random.Random(1))
        assert "items.db" in error.what
        assert notes(party) == set(range(len(made)))
        party.flush()  # the feeds have space
        assert party.status.disk_full
        items.rows("PRAGMA max_page_count = 1000000")
        party.create(type="note", n=len(made))
        assert party.status.failure == ""
        assert len(party.runtime.state.dirty) < 20, "the checkpoint was taken"
    with open_quiet(tmp_path / "home") as peer:
        again = peer.party(party.key)
        assert again.runtime.processor.counters.rebuilds == 0
        assert notes(again) == set(range(len(made) + 1))


def test_closing_without_space_for_a_checkpoint_loses_nothing_and_is_no_error(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.runtime.checkpoint()
        items = party.runtime.items.database
        items.rows(f"PRAGMA max_page_count = {items.row('PRAGMA page_count')[0]}")
        for number in range(50):
            party.create(type="note", n=number, body="x" * 500)
        party.flush()
    with open_quiet(tmp_path / "home") as peer:
        assert notes(peer.party(party.key)) == set(range(50))


def test_a_reject_that_holds_no_more_is_dropped_by_the_next_checkpoint_and_not_written_before(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.flush()
        runtime, processor = party.runtime, party.runtime.processor
        items = runtime.items
        assert runtime.data is not None
        assert items is not None
        place = (runtime.data.feed, 0, 1)
        processor.new_rejects.append(Reject(*place, Reason.NO_ITEM, ""))
        runtime.checkpoint()
        assert len(items.rejects()) == len(party.rejected()) == 1
        processor.forget_rejects([place])
        assert (len(items.rejects()), party.rejected()) == (1, [])
        runtime.checkpoint()
        assert items.rejects() == []
    with open_quiet(tmp_path / "home") as peer:
        assert peer.party(party.key).rejected() == []


def test_a_file_that_can_not_be_stored_is_refused_and_can_be_added_later(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home") as peer:
        party = peer.create_party("Trip")
        disk.fill(50_000)
        with pytest.raises(DiskFull, match=r"blobs\.db"):
            party.files.add(bytes(200_000), name="photo")
        disk.free()
        photo = party.files.add(bytes(200_000), name="photo")
        assert party.files.read(photo) == bytes(200_000)


def test_a_party_that_can_not_be_made_leaves_nothing_and_can_be_made_later(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home", "Ada") as peer:
        trip = peer.create_party("Trip")
        trip.create(type="note", n=0)
        peer.flush()
        folders = sorted((disk.path / "home" / "parties").iterdir())
        for left in range(0, 400_000, 40_000):
            disk.fill(left)
            try:
                peer.create_party("Other")
                break
            except DiskFull:
                pass
            finally:
                disk.free()
            assert sorted((disk.path / "home" / "parties").iterdir()) == folders, left
            assert [known.title for known in peer.parties()] == ["Trip"]
        else:
            pytest.fail("the party could never be made")
        assert left > 0, "some were refused"
        assert notes(trip) == {0}


def test_a_light_weight_party_that_can_not_be_made_leaves_nothing(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home", "Ada") as peer:
        trip = peer.create_party("Trip")
        peer.flush()
        folders = sorted((disk.path / "home" / "parties").iterdir())
        disk.fill(0)
        with pytest.raises(EchoError):
            peer.create_child(trip, "Packing")
        assert sorted((disk.path / "home" / "parties").iterdir()) == folders
        disk.free()
        assert peer.create_child(trip, "Packing").title == "Packing"
        assert [title for _, title in trip.child_parties()] == ["Packing"]


def test_settings_that_can_not_be_stored_stay_as_they_were(disk: SmallDisk) -> None:
    with open_quiet(disk.path / "home", "Ada") as peer:
        disk.fill(0)
        with pytest.raises(DiskFull) as refused:  # noqa: PT012  # names are small: some fit into what is left
            for number in range(200):
                peer.meta.set_setting("note", "x" * 1000 * number)
        kept = peer.meta.setting("note")
        assert "meta.db" in refused.value.what
        disk.free()
        assert peer.meta.setting("note") == kept
        peer.meta.set_setting("note", "y")
        assert peer.meta.setting("note") == "y"


# which errors are a lack of space


def code(number: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = number
    return error


def test_a_failed_fsync_is_never_taken_for_a_lack_of_space(disk: SmallDisk) -> None:
    (disk.path / "file.db").write_bytes(bytes(5000))
    disk.fill(0)
    for number in (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC, sqlite3.SQLITE_IOERR_READ):
        assert type(sqlite_error(code(number), disk.path / "file.db")) is StorageFailed
    disk.free()


def test_a_failed_write_is_a_lack_of_space_only_where_there_is_none(disk: SmallDisk) -> None:
    (disk.path / "file.db").write_bytes(bytes(5000))
    disk.fill(0)
    assert type(sqlite_error(code(sqlite3.SQLITE_IOERR_WRITE), disk.path / "file.db")) is DiskFull
    disk.free()
    assert type(sqlite_error(code(sqlite3.SQLITE_IOERR_WRITE), disk.path / "file.db")) is StorageFailed
    assert [file.name for file in disk.path.iterdir()] == ["file.db"], "the probe is gone"


def test_after_another_failure_of_the_store_space_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.create(type="note", n=0)
        tried = []

        def fail(*_: Any) -> None:
            tried.append(1)
            raise StorageFailed("fsync failed")

        monkeypatch.setattr(party.runtime.feeds, "append_many", fail)
        for _ in range(3):
            with pytest.raises(StorageFailed, match="fsync failed"):
                party.flush()
        assert party.status.failure
        assert not party.status.disk_full
        assert len(tried) == 1


# the service


def health(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.timeout(600)
def test_a_service_and_its_clients_go_on_by_themselves_once_there_is_space(disk: SmallDisk, tmp_path: Path) -> None:
    with serve(disk.path, "home", "--metrics", "127.0.0.1:0") as running:
        process, url = running.process.pid, f"http://{running.told['metrics']}/healthz"
        with echostore.open(disk.path / "home") as client:
            party = client.create_party("Trip")
            total = 0
            for seed in range(6):
                chance = random.Random(seed)
                disk.fill(chance.randrange(20_000), process=process)
                refused = None
                while refused is None:
                    try:
                        party.create(type="note", n=total, body="x" * chance.choice([10, 500, 4000]))
                        total += 1
                        party.flush()
                    except DiskFull as error:
                        refused = error
                assert "Nothing was changed" not in str(refused)
                assert {item["n"] for item in party.query(type="note")} == set(range(total))
                status, told = health(url)
                assert (status, told["ok"]) == (503, False)
                assert any("No space left" in problem for problem in told["problems"])
                shown = running.cli("status", "--json").ok().json()["parties"][0]
                assert shown["disk_full"]
                assert shown["unstored"] == party.status.unstored
                assert "the disk is full" in shown["truth"]
                disk.free(process=process)
                until(lambda: health(url)[0] == 200)
                assert party.status.unstored == 0
                party.create(type="note", n=total)
                total += 1
                party.flush()
        assert running.stop() == 0
        events = [event["event"] for event in running.events()]
        assert events.count("no space left") == events.count("there is space again") == 6
    with open_quiet(disk.path / "home") as peer:
        assert notes(peer.party(party.key)) == set(range(total))


def test_a_command_on_a_full_disk_says_that_its_change_is_lost(tmpfs: SmallDisk, tmp_path: Path) -> None:
    from cli_process import Cli

    cli = Cli(tmpfs.path / "home", tmp_path / "state")
    cli("init", "--name", "Ada").ok()
    cli("party", "create", "Trip").ok()
    tmpfs.fill(150_000)
    ran = cli("item", "create", "property-set", "--type", "note", f"body={'x' * 200_000}")
    assert ran.status == 1
    assert "E-STORAGE" in ran.err
    assert "1 change was not stored and is lost" in ran.err
    tmpfs.free()
    with open_quiet(tmpfs.path / "home") as peer:
        assert peer.parties()
        assert peer.party("@Trip").query(type="note").count() == 0
