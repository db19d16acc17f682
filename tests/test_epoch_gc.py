"""Freeing the disk below epochs: what goes, what stays, and that no crash on the way loses anything."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli_process import Cli
from echostore.kernel.errors import Compacted
from echostore.kernel.feed import Block
from echostore.kernel.snapshot import ENCODING_VERSION
from echostore.peer.base_following import newest_final, open_epoch
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.transfer import export_party
from echostore.store import feed_truncation
from echostore.wire.base_epoch import FETCHING_KEY
from echostore.wire.cids import RAW, cid_codec
from echostore.wire.snapshot import OldEncoding
from two_peers import open_quiet

LARGE = 40_000


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def written(home: Path) -> tuple[str, Any]:
    """A party with three epochs and a tail; a large text whose old chunks go, and a file that stays."""
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        items = [party.create("property-set", type="task", n=number) for number in range(20)]
        items[0]["file"] = party.files.add(b"photo" * 100)
        items[1]["long"] = "x" * LARGE
        for number in range(3):
            items[1]["long"] = str(number) * LARGE
            items[2]["n"] = number
            items[3].delete()
            Epochs(party).create()
        items[4]["n"] = 400
        return party.snapshot().cid, items[0].id


def opened(party: Party) -> tuple[str, bytes]:
    """The state, and the content of the file."""
    file = next(item["file"] for item in party.query(type="task").all() if "file" in item.value())
    return party.snapshot().cid, party.files.read(file)


def test_what_goes_and_what_stays(tmp_path: Path) -> None:
    cid, _ = written(tmp_path / "home")
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        plan = plan_gc(party)
        assert (plan.epoch, plan.disk_after) == (2, None)
        assert plan.blobs > 0
        done = run_gc(party)
        assert (done.blocks, done.blobs, done.blob_bytes) == (plan.blocks, plan.blobs, plan.blob_bytes)
        assert done.disk_after is not None
        assert done.disk_after < done.disk_before - 2 * LARGE
        assert opened(party) == (cid, b"photo" * 100)
        again = plan_gc(party)
        assert (again.blocks, again.blobs) == (0, 0), "all of it went at once"
        for held in party.runtime.feeds.feeds():
            assert party.runtime.feeds.verify(held.key).sound, "the chain is verifiable from the cut on"


def steps_of(home: Path) -> int:
    names: list[str] = []
    with open_quiet(home) as peer:
        run_gc(peer.party("@Trip"), names.append)
    return len(names)


def killed(home: Path, after: int) -> None:
    """A process that is killed right after a step of gc."""
    child = os.fork()
    if child == 0:
        done = 0

        def step(name: str) -> None:
            nonlocal done
            done += 1
            if done == after:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with open_quiet(home) as peer:
                run_gc(peer.party("@Trip"), step)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it was to be killed"


def test_a_kill_after_any_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_truncation, "STEP_BLOCKS", 7)
    cid, _ = written(tmp_path / "count")
    steps = steps_of(tmp_path / "count")
    assert steps >= 8
    for number in range(1, steps + 1):
        home = tmp_path / f"home{number}"
        cid, _ = written(home)
        killed(home, number)
        with open_quiet(home) as peer:
            party = peer.party("@Trip")
            assert opened(party) == (cid, b"photo" * 100), number
            for held in party.runtime.feeds.feeds():
                assert party.runtime.feeds.verify(held.key).sound, number
            run_gc(party)
            assert plan_gc(party).blocks == 0
            assert opened(party) == (cid, b"photo" * 100), number
        for file in (home / "parties" / party.key.hex()).glob("items.db*"):
            file.unlink()
        with open_quiet(home) as peer:
            assert opened(peer.party("@Trip")) == (cid, b"photo" * 100), number


def test_anchors_and_moments_in_the_compacted_range_say_so(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        item = party.create("property-set", n=0)
        early = party.flush().anchor
        item["n"] = 1
        Epochs(party).create()
        item["n"] = 2
        Epochs(party).create()
        late = party.flush().anchor
        item["n"] = 3
        party.flush()
        assert party.as_of(early).get(item.id)["n"] == 0
        run_gc(party)
        with pytest.raises(Compacted):
            party.stream(after=early)
        with pytest.raises(Compacted):
            party.as_of(early)
        with pytest.raises(Compacted):
            item.diff(early, late)
        assert [message.seq for message in party.stream(after=late)] == [party.runtime.data.cursor.length - 1]
        assert party.as_of(late).get(item.id)["n"] == 2
        assert party.as_of(2).get(item.id)["n"] == 2
        assert item.id in [each.id for each in party.as_of(2).query().all()]
        with pytest.raises(Compacted):
            party.as_of(1)
        whole = party.stream()
        assert whole.compacted == party.runtime.feeds.feed(party.runtime.data.cursor.key).base
        assert len(list(whole)) == 2
        assert item.diff(late, None)[0].after == 3
        assert export_party(party, tmp_path / "trip.car").epoch == 2


def test_undo_ends_at_the_base_of_a_truncated_feed(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        item = party.create("property-set", n=0, other=0)
        item["other"] = 1
        for number in (1, 2):
            item["n"] = number
            Epochs(party).create()
        run_gc(party)
        item["n"] = 7
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        assert party.undo()
        assert party.get(item.id).value() == {"n": 2, "other": 1}
        assert not party.undo(), "what is inside the base stays"
        assert party.redo()
        assert party.get(item.id)["n"] == 7


def test_a_truncated_feed_takes_blocks_only_from_its_beginning_on(tmp_path: Path) -> None:
    written(tmp_path / "home")
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        own = party.runtime.data.cursor
        blocks: list[Block] = list(party.runtime.feeds.read(own.key))
        run_gc(party)
        held = party.runtime.feeds.feed(own.key)
        assert party.sync_port.read(own.key, 0, 10, 1 << 20, own.link) is None
        assert party.sync_port.read(own.key, held.base, 10, 1 << 20, own.link) is not None
        assert party.sync_port.holds(own.key, held.base, blocks[held.base - 1].link)
        assert not party.sync_port.holds(own.key, held.base, blocks[0].link)
        assert party.sync_port.holds(own.key, 1, blocks[0].link), "an epoch stands for it"


def test_the_command_shows_bytes_before_and_after(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home)
    cli = Cli(home, tmp_path / "state")
    dry = cli("epoch", "gc", "--dry-run", "--json").ok().json()
    assert (dry["dry_run"], dry["epoch"], dry["disk_after"]) == (True, 2, None)
    done = cli("epoch", "gc", "--yes").ok().out
    assert "disk before" in done
    assert "disk after" in done
    assert "below epoch 2" in done
    assert "blocks stay" not in done


def test_heads_below_the_cut_go_with_their_blocks(tmp_path: Path) -> None:
    written(tmp_path / "home")
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        run_gc(party)
        held = party.runtime.feeds.feed(party.runtime.data.cursor.key)
        assert held.base > 0
        assert all(head.length > held.base for head in party.runtime.feeds.heads(held.key))


def test_a_file_with_the_bytes_of_an_old_state_stays(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        text = party.create("property-set", n=0, long="x" * LARGE)
        keeper = party.create("property-set")
        Epochs(party).create()
        epoch = party.snapshot()
        chunk = next(cid for cid in epoch.reader().reachable() if cid_codec(cid) == RAW)
        keeper["file"] = party.files.add(epoch.blob(chunk))
        for number in (1, 2):
            text["long"] = str(number)
            Epochs(party).create()
        run_gc(party)
        assert party.files.missing(keeper["file"]) == []


def test_an_epoch_with_holes_is_no_base(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        Epochs(party).create()
        found = newest_final(party.runtime)
        assert found is not None
        assert open_epoch(party.runtime, found) is not None
        party.runtime.feeds.set_about({FETCHING_KEY: found.genesis.snapshot})
        assert open_epoch(party.runtime, found) is None


# an older program


def test_a_base_of_an_older_encoding_is_left_where_the_history_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(version: int) -> None:
        """From here on the program reads this version."""
        monkeypatch.setattr("echostore.wire.snapshot.ENCODING_VERSION", version)
        monkeypatch.setattr("echostore.wire.snapshot.READ_VERSIONS", (version,))

    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        for number in range(2):
            party.create(type="task", number=number)
            Epochs(party).create()
        party.create(type="task", number=2)
        before = party.snapshot().cid
        assert party.runtime.processor.base is not None
    program(ENCODING_VERSION + 1)
    with open_quiet(tmp_path / "home") as peer:
        party = peer.party("@Trip")
        assert party.runtime.processor.base is None, "folded from the history"
        assert sorted(each["number"] for each in party.query(type="task").all()) == [0, 1, 2]
        assert [epoch.items for epoch in Epochs(party).all()] == [None, None]
    program(ENCODING_VERSION)
    with open_quiet(tmp_path / "home") as peer:
        assert peer.party("@Trip").snapshot().cid == before
        assert run_gc(peer.party("@Trip")).blocks
    program(ENCODING_VERSION + 1)
    with open_quiet(tmp_path / "home") as peer, pytest.raises(OldEncoding, match="newer epoch"):
        peer.party("@Trip")
