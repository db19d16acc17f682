"""Power cuts, full disks and failing disks at every write and sync of the stores (FAULTS S1, S2, S3, S6).

F1 is the claim: what was acknowledged survives; what was not is there whole or not at all. The workload runs once on a
recorded disk; then every prefix of the record, in every survivor variant, must open, hold that, and go on.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

from crash_disk import Disk, Event, Mark, PowerCut, Survivors, Sync, Write
from echostore.kernel.errors import EchoError, StorageFailed
from echostore.store.blob_store import BlobStore
from echostore.store.feed_store import Append, FeedStore, Ingested, Rejection
from echostore.store.meta_store import KnownParty, MetaStore
from echostore.wire.cids import cid_of
from echostore.wire.links import fork_proven
from echostore.wire.signing import verify
from feed_builder import PARTY, Writer, payloads

PATH = Path("feeds.db")
STRIDE = int(os.environ.get("ECHOSTORE_CRASH_STRIDE", "1"))
"""At every point by default."""
SEEDS = int(os.environ.get("ECHOSTORE_CRASH_SEEDS", "20"))
"""Of each random variant: 20 make about 20,000 crash states of the one workload. At night there are more."""
CERTAIN = (Survivors.NONE, Survivors.ALL, Survivors.LAST)


@dataclass(frozen=True)
class Held:
    """What was acknowledged: blocks of the own feed and of the received one, and whether the fork is kept."""

    own: int
    received: int
    fork: bool
    feeds: int


class Workload:
    """A life in the small: own appends, a group commit, received ranges, a checkpoint, a fork."""

    def __init__(self) -> None:
        self.own, self.other = Writer("own"), Writer("other")
        self.branch = self.other.branch(0)

    def run(self, disk: Disk) -> None:
        def acknowledge() -> None:
            disk.mark(Held(store.length(self.own.key), store.length(self.other.key), bool(store.forks()), 2))

        store = FeedStore(PATH, PARTY, connect=disk.connect)
        store.add_feed(self.own.key, "data", own=True)
        store.add_feed(self.other.key, "data")
        acknowledge()
        for number in range(3):
            store.append(self.own.key, *self.own.write(*payloads(6, f"own {number}", size=300)))
            acknowledge()
        self.other.write(*payloads(8, "other", size=700))
        assert isinstance(store.ingest(self.other.key, 0, *self.other.range(0), verify), Ingested)
        acknowledge()
        store.checkpoint()
        self.branch = self.other.branch(5)
        self.branch.write(*payloads(4, "branch", size=200))
        assert isinstance(store.ingest(self.other.key, 2, *self.branch.range(2), verify), Rejection)
        acknowledge()
        store.append_many(
            [
                Append(self.own.key, *self.own.write(*payloads(9, "group", size=900))),
                Append(self.own.key, *self.own.write(b"and one more")),
            ]
        )
        acknowledge()
        store.checkpoint()
        store.append(self.own.key, *self.own.write(*payloads(2, "tail")))
        acknowledge()
        store.close()

    def check(self, disk: Disk, acknowledged: Held, following: Held) -> None:
        """The store opens, holds one of two states for each feed, and takes the next block."""
        store = FeedStore(PATH, PARTY, connect=disk.connect)
        try:
            feeds = {feed.key: feed for feed in store.feeds()}
            assert len(feeds) >= acknowledged.feeds
            for writer, least, most in (
                (self.own, acknowledged.own, following.own),
                (self.other, acknowledged.received, following.received),
            ):
                if writer.key not in feeds:
                    assert least == 0
                    continue
                blocks = [block.payload for block in store.read(writer.key)]
                assert len(blocks) in (least, most), f"{len(blocks)} blocks, {least} acknowledged, {most} in flight"
                assert blocks == writer.payloads[: len(blocks)]
                assert store.verify(writer.key).sound
            proofs = store.forks()
            assert bool(proofs) in (acknowledged.fork, following.fork)
            assert all(fork_proven(proof, verify) for proof in proofs)
            if self.own.key in feeds:
                continued = self.own.branch(store.length(self.own.key))
                store.append(self.own.key, *continued.write(b"after the crash"))
                assert store.block(self.own.key, len(continued.payloads) - 1).payload == b"after the crash"
        finally:
            store.close()


@pytest.fixture(scope="module")
def recorded() -> tuple[Workload, list[Event]]:
    workload, disk = Workload(), Disk()
    workload.run(disk)
    disk.close()
    return workload, disk.log


def crash_points(log: list[Event]) -> Iterator[tuple[int, Held, Held]]:
    """(events before the crash, what was acknowledged, what is acknowledged next)."""
    marks = [(number, event.value) for number, event in enumerate(log) if isinstance(event, Mark)]
    nothing = Held(0, 0, False, 0)
    for point in range(0, len(log) + 1, STRIDE):
        before = [value for number, value in marks if number < point]
        after = [value for number, value in marks if number >= point]
        acknowledged = before[-1] if before else nothing
        yield point, acknowledged, after[0] if after else acknowledged


@pytest.mark.parametrize("survivors", list(Survivors))
def test_acknowledged_survives_and_the_rest_is_whole_or_absent(
    recorded: tuple[Workload, list[Event]], survivors: Survivors
) -> None:
    workload, log = recorded
    seeds = 1 if survivors in CERTAIN else SEEDS
    states, seen = 0, set()
    for point, acknowledged, following in crash_points(log):
        cut = PowerCut(log[:point])
        for seed in range(seeds):
            disk = Disk.left_by(cut, survivors, (point, seed))
            # Where little was unsynced, many a choice of survivors leaves the same disk; once is enough.
            state = (disk.fingerprint(), acknowledged, following)
            if state not in seen:
                seen.add(state)
                workload.check(disk, acknowledged, following)
            disk.close()
            states += 1
    assert states > 190 * seeds // STRIDE, "the workload is too small to prove anything"
    assert len(seen) > (25 if seeds == 1 else 50 * seeds) // STRIDE, "hardly two of them differ"


@pytest.mark.parametrize("survivors", [Survivors.TORN, Survivors.SOME, Survivors.NONE])
def test_a_second_crash_inside_recovery_changes_nothing(
    recorded: tuple[Workload, list[Event]], survivors: Survivors
) -> None:
    workload, log = recorded
    for point, acknowledged, following in list(crash_points(log))[:: 11 * STRIDE]:
        first = Disk.after(log[:point], survivors, point)
        # What survived the first crash is what the second one starts from, synced.
        base: list[Event] = [event for name, content in first.files.items() for event in _written(name, content)]
        store = FeedStore(PATH, PARTY, connect=first.connect)
        store.checkpoint()
        store.close()
        recovery = list(first.log)
        first.close()
        for second in range(0, len(recovery) + 1, 3):
            disk = Disk.after(base + recovery[:second], survivors, (point, second))
            workload.check(disk, acknowledged, following)
            disk.close()


def _written(name: str, content: bytearray) -> list[Event]:
    return [Write(name, 0, bytes(content)), Sync(name)]


def test_a_disk_that_lies_about_sync_is_found_out(recorded: tuple[Workload, list[Event]]) -> None:
    """The test of the test: without its syncs the same record must lose something that was acknowledged."""
    workload, log = recorded
    lies = [event for event in log if not isinstance(event, Sync)]
    found = 0
    for point, acknowledged, following in list(crash_points(lies))[::7]:
        disk = Disk.after(lies[:point], Survivors.NONE, point)
        try:
            workload.check(disk, acknowledged, following)
        except (AssertionError, EchoError):
            found += 1
        disk.close()
    assert found > 5


class Fault:
    """Raises once the given write or sync comes, and then each time until it is mended."""

    def __init__(self, at: int, error: type[apsw.Error], kinds: tuple[type[Event], ...]) -> None:
        self._left, self._error, self._kinds, self.struck, self.mended = at, error, kinds, False, False

    def __call__(self, event: Event) -> None:
        if not isinstance(event, self._kinds) or self.mended:
            return
        self._left -= 1
        if self._left < 0:
            self.struck = True
            raise self._error("injected")


def opened_with_blocks(disk: Disk) -> tuple[FeedStore, Writer]:
    store, writer = FeedStore(PATH, PARTY, connect=disk.connect), Writer("own")
    store.add_feed(writer.key, "data", own=True)
    store.append(writer.key, *writer.write(*payloads(5, size=200)))
    return store, writer


def test_a_full_disk_refuses_the_write_stays_readable_and_goes_on_when_there_is_space() -> None:
    for at in range(60):
        disk = Disk()
        store, writer = opened_with_blocks(disk)
        fault = disk.fault = Fault(at, apsw.FullError, (Write,))
        refused = failed(store, writer, *writer.branch(5).write(*payloads(8, "lost", size=2000)))
        fault.mended = True
        assert (refused is None) is not fault.struck
        if refused is None:
            assert at > 10, "the write needs more room than that"
            break
        assert "space" in refused.what
        assert store.failure is None
        assert [block.payload for block in store.read(writer.key)] == writer.payloads
        store.append(writer.key, *writer.write(*payloads(3, "kept")))
        assert [block.payload for block in store.read(writer.key)] == writer.payloads
        store.close()
        disk.close()
    else:
        pytest.fail("the write never succeeded")


def failed(store: FeedStore, writer: Writer, *append: Any) -> StorageFailed | None:
    """The error of an append, if it failed."""
    try:
        store.append(writer.key, *append)
    except StorageFailed as error:
        return error
    return None


@pytest.mark.parametrize("kinds", [(Write,), (Sync,)], ids=["write", "sync"])
def test_a_failing_disk_stops_all_writing_until_it_is_opened_again(kinds: tuple[type[Event], ...]) -> None:
    struck = 0
    for at in range(12):
        disk = Disk()
        store, writer = opened_with_blocks(disk)
        fault = disk.fault = Fault(at, apsw.IOError, kinds)
        attempted = writer.branch(5)
        if failed(store, writer, *attempted.write(*payloads(8, "lost", size=2000))):
            struck += 1
            fault.mended = True
            written = len(disk.log)
            with pytest.raises(StorageFailed, match="takes no writes"):
                store.append(writer.key, *writer.branch(5).write(b"not tried again"))
            assert len(disk.log) == written, "a failed sync was followed by more writing"
            assert store.failure is not None
            assert [block.payload for block in store.read(writer.key)] == writer.payloads
        fault.mended = True
        store.close()
        store = FeedStore(PATH, PARTY, connect=disk.connect)
        assert [block.payload for block in store.read(writer.key)] in (writer.payloads, attempted.payloads)
        store.close()
        disk.close()
    assert struck > 0


@pytest.mark.parametrize("survivors", [Survivors.NONE, Survivors.SOME, Survivors.TORN, Survivors.GARBAGE])
def test_blobs_and_parties_survive_too(survivors: Survivors) -> None:
    blobs = [f"blob {number} ".encode() * 200 for number in range(6)]
    party = KnownParty(PARTY, "Road trip", None, 1)
    disk = Disk()
    store, meta = BlobStore(Path("blobs.db"), connect=disk.connect), MetaStore(Path("meta.db"), connect=disk.connect)
    disk.mark((0, False))
    for number, data in enumerate(blobs, 1):
        store.put_many({cid_of(data): data, cid_of(data[1:]): data[1:]})
        disk.mark((number, number > 3))
        if number == 3:
            meta.put_party(party)
            disk.mark((number, True))
    store.close()
    meta.close()
    disk.close()
    for point in range(0, len(disk.log) + 1, 2):
        marks = [event.value for event in disk.log[:point] if isinstance(event, Mark)]
        kept, known = marks[-1] if marks else (0, False)
        after = Disk.after(disk.log[:point], survivors, point)
        store, meta = (
            BlobStore(Path("blobs.db"), connect=after.connect),
            MetaStore(Path("meta.db"), connect=after.connect),
        )
        present = [store.has(cid_of(data)) for data in blobs]
        assert present == [store.has(cid_of(data[1:])) for data in blobs]
        assert sum(present) in (kept, kept + 1)
        assert store.verify().sound
        assert not known or meta.parties() == [party]
        store.close()
        meta.close()
        after.close()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from feed_builder import PARTY, Writer, payloads
from echostore.store.feed_store import FeedStore
store, writer = FeedStore(Path(sys.argv[1]), PARTY), Writer("own")
store.add_feed(writer.key, "data", own=True)
for number in range(100_000):
    store.append(writer.key, *writer.write(*payloads(1 + number % 7, f"{number}")))
    print(len(writer.payloads), flush=True)
"""


@pytest.mark.parametrize("acknowledgements", range(1, 60, 12))
def test_a_killed_process_loses_nothing_it_acknowledged(tmp_path: Path, acknowledgements: int) -> None:
    path = tmp_path / "feeds.db"
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(acknowledgements)]
        os.kill(process.pid, signal.SIGKILL)
        said += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
    writer = Writer("own")
    for number in range(len(said) + 1):
        writer.write(*payloads(1 + number % 7, f"{number}"))
    with FeedStore(path, PARTY) as store:
        found = [block.payload for block in store.read(writer.key)]
        assert len(found) in (said[-1], len(writer.payloads))
        assert found == writer.payloads[: len(found)]
        assert store.verify(writer.key).sound
