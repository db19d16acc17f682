"""The block lake: rows into files and back, versions, publishing from homes, compaction. Bad input is in test_lake_damage."""

import io
import multiprocessing
import os
from itertools import pairwise
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echostore
from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.pipeline import schemas
from echostore.pipeline.lake import Lake, LakeWriter, files, log
from echostore.pipeline.lake.compact import UNNAMED_S, compact
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.lake.reading import forget_files, read_rows, use_opener
from echostore.pipeline.lake.stat import stat
from echostore.store.feed_store import FeedStore
from feed_builder import PARTY, Writer, payloads
from peer_builder import Circle
from spark.lake_builder import (
    HomeOf,
    block_ids,
    feed_rows,
    lake_blocks,
    many_parties,
    message,
    party_key,
    rows_of,
    written,
)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def sound(lake: Lake) -> None:
    assert stat(lake, full=True).damage == []


# writing and reading


def test_rows_come_back_as_they_went_in(lake: Lake) -> None:
    one, two = written("one", 300), written("two", 200)
    control = written("control", 5)
    batches = [
        feed_rows(control, control=True),
        *(feed_rows(w, heads=(100, 200)) for w in sorted((one, two), key=lambda w: w.key)),
    ]
    entry = LakeWriter(lake).write(batches)
    assert entry is not None
    assert [(each.control, each.rows) for each in entry.adds] == [(True, 5), (False, 500)]
    rows = list(rows_of(lake.at()))
    assert rows == [row for batch in batches for row in batch.to_pylist()]
    runs = lake.at().runs().to_pylist()
    assert [(run["feed"], run["start"], run["end"], run["row"]) for run in runs] == [
        (control.key, 0, 5, 0),
        *(
            (w.key, 0, len(w.links), row)
            for w, row in zip(sorted((one, two), key=lambda w: w.key), (0, runs[1]["end"]), strict=True)
        ),
    ]
    assert {run["last_link"] for run in runs} == {one.links[-1], two.links[-1], control.links[-1]}
    sound(lake)


def test_files_and_row_groups_are_cut_by_size_and_runs_go_on_in_the_next_file(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 20_000)
    monkeypatch.setattr(files, "ROW_GROUP_LARGE", 5_000)
    monkeypatch.setattr(files, "ROW_GROUP_SMALL", 1_000)
    writer = written("long", 1000)
    batch = feed_rows(writer)
    cuts = [0, 1, 17, 400, 401, 990, 1000]
    parts = [batch.slice(a, b - a) for a, b in pairwise(cuts)]
    entry = LakeWriter(lake).write(parts)
    assert entry is not None
    assert len(entry.adds) > 4
    runs = lake.at().runs().to_pylist()
    assert [run["row"] for run in runs] == [0] * len(entry.adds), "one run per file"
    assert [run["start"] for run in runs] == [0, *(run["end"] for run in runs[:-1])]
    assert [run["previous"] for run in runs] == [bytes(32), *(run["last_link"] for run in runs[:-1])]
    assert sum(run["bytes"] for run in runs) == pc.sum(pc.binary_length(batch["payload"])).as_py() + 64 * 1001
    for run in runs:
        first = next(read_rows(lake.path, run["file"], 0, 1)).to_pylist()[0]
        assert (first["previous"], first["previous_depth"]) == (run["previous"], run["start"])
        groups = pq.ParquetFile(lake.path / run["file"]).metadata
        assert all(groups.row_group(at).num_rows < 60 for at in range(groups.num_row_groups))
    assert [row["link"] for row in rows_of(lake.at())] == writer.links
    sound(lake)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_any_batches_of_any_feeds_give_the_same_rows_and_runs(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random = Random(seed)
    lake = Lake.create(tmp_path_factory.mktemp("lake"))
    expected, batches = [], []
    for number in range(random.randint(1, 6)):
        for kind in (True, False):
            for feed in range(random.randint(0, 3)):
                writer = written(
                    f"{seed} {kind} {feed}", random.randint(1, 40), party_key(number), random.choice((5, 200))
                )
                at = 0
                while at < len(writer.links):  # several runs of one feed, as after several publishes
                    end = random.randint(at + 1, len(writer.links))
                    batches.append(feed_rows(writer, at, end, control=kind))
                    expected.append((party_key(number), writer.key, kind, at, end, writer.links[end - 1]))
                    at = end
    if not batches:
        return
    table = pa.Table.from_batches(batches).combine_chunks()
    cut, parts = 0, []
    while cut < len(table):
        size = random.randint(1, 60)
        parts += table.slice(cut, size).combine_chunks().to_batches()
        cut += size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "FILE_BYTES", 1 << 40)  # runs stay whole
        patch.setattr(files, "ROW_GROUP_LARGE", random.choice((500, 5_000)))
        patch.setattr(files, "ROW_GROUP_SMALL", random.choice((100, 400)))
        LakeWriter(lake).write(parts)
    runs = lake.at().runs()
    names = ("party", "feed", "control", "start", "end", "last_link")
    assert sorted(tuple(run[name] for name in names) for run in runs.to_pylist()) == sorted(expected)
    assert sorted(block_ids(rows_of(lake.at()))) == sorted(block_ids(table.to_pylist()))
    sound(lake)


def test_rows_that_are_not_sorted_or_do_not_follow_are_refused_and_nothing_is_left(lake: Lake) -> None:
    one, two = written("one", 10, party_key(1)), written("two", 10, party_key(2))
    gap = pa.RecordBatch.from_pylist([feed_rows(one).to_pylist()[at] for at in (0, 1, 3)], schemas.BLOCKS)
    for batches, what in (
        ([feed_rows(two), feed_rows(one)], "sorted"),
        ([gap], "follows"),
        ([feed_rows(one).slice(1)], "follows"),
        ([feed_rows(one).slice(0, 2), feed_rows(one).slice(3)], "follows"),
        ([feed_rows(one).drop_columns(["depth"])], "columns"),
    ):
        with pytest.raises(UsageError, match=what):
            LakeWriter(lake).write(batches)
    assert lake.version() == 0
    assert list((lake.path / "writing").iterdir()) == []


def test_the_same_rows_again_are_no_new_version(lake: Lake) -> None:
    one, two = written("one", 10, party_key(1)), written("two", 10, party_key(2), 50)
    assert LakeWriter(lake).write([feed_rows(one)]) is not None
    assert LakeWriter(lake).write([feed_rows(one)]) is None
    assert LakeWriter(lake).write([]) is None
    assert LakeWriter(lake).write([feed_rows(two)]) is not None
    assert lake.version() == 2
    sound(lake)


# versions and runs


def test_a_version_stays_what_it_is_and_the_log_is_read_from_the_last_whole_state(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = written("grows", 200)
    seen = {}
    for number in range(70):
        LakeWriter(lake).write([feed_rows(writer, number * 2, number * 2 + 2)])
        seen[number + 1] = lake.at()
    for version, old in seen.items():
        again = lake.at(version)
        assert again.files == old.files
        assert sum(run["end"] - run["start"] for run in again.runs().to_pylist()) == 2 * version
    read: list[int] = []
    real = log.read_entry
    monkeypatch.setattr(log, "read_entry", lambda path, version: read.append(version) or real(path, version))
    at = lake.at()
    assert read == list(range(64, 71))
    assert len(at.runs_files) == 7, "the small runs files before are put together"
    with pytest.raises(UsageError, match="0 to 70"):
        lake.at(71)
    sound(lake)


def test_runs_are_chosen_by_party_kind_feed_and_what_is_taken(lake: Lake) -> None:
    LakeWriter(lake).write(many_parties(5, 10))
    data = {number: written(f"data {number}", 10, party_key(number)) for number in range(5)}
    version = lake.at()
    assert {run["party"] for run in version.runs(parties=[party_key(1), party_key(3)]).to_pylist()} == {
        party_key(1),
        party_key(3),
    }
    assert len(version.runs(control=True)) == len(version.runs(control=False)) == 5
    assert [run["party"] for run in version.runs(feeds=[data[2].key]).to_pylist()] == [party_key(2)]
    assert len(version.runs(parties=[])) == 0
    taken = {(party_key(n), data[n].key): length for n, length in ((0, 10), (1, 9), (2, 99))}
    left = version.runs(control=False, after=taken)
    assert [run["party"] for run in left.to_pylist()] == [party_key(n) for n in (1, 3, 4)]


def test_all_runs_of_a_forked_feed_stay_whatever_is_taken(lake: Lake) -> None:
    writer = written("forks", 10)
    branch = writer.branch(3)
    branch.write(*payloads(4, "other"))
    plain = written("plain", 10)
    for rows in ((writer, 0, 10), (plain, 0, 10), (branch, 3, 7)):
        LakeWriter(lake).write([feed_rows(*rows)])
    left = lake.at().runs(after={(PARTY, writer.key): 10, (PARTY, plain.key): 10}).to_pylist()
    assert sorted((run["feed"], run["start"], run["end"]) for run in left) == [(writer.key, 0, 10), (writer.key, 3, 7)]
    assert stat(lake).forked_feeds == 1


def test_one_party_of_a_thousand_touches_two_percent_of_the_bytes(lake: Lake) -> None:
    """As Spark reads it: the filter is pushed to the source, and every byte of log, runs and blocks is counted."""
    from pyspark.sql.datasource import EqualTo

    from echostore.pipeline.source.blocks_source import FilteredBlocksReader, Settings

    LakeWriter(lake).write(many_parties(1000, 60, 300, noise=150))
    total = sum(path.stat().st_size for path in lake.path.rglob("*") if path.is_file())
    touched = 0

    class Counted:
        """A file with one way to read it, which counts."""

        closed = False

        def __init__(self, path: Path) -> None:
            self._file = io.BytesIO(path.read_bytes())
            self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close
            self.readable = self.seekable = lambda: True

        def read(self, size: int = -1) -> bytes:
            nonlocal touched
            found = self._file.read(size)
            touched += len(found)
            return found

    before = use_opener(lambda path: pa.PythonFile(Counted(path), mode="r"))
    try:
        for number in (0, 500, 999):
            touched = sum(path.stat().st_size for path in (lake.path / "log").iterdir())
            forget_files()
            reader = FilteredBlocksReader(Settings.of({"lake": str(lake.path)}))
            assert list(reader.pushFilters([EqualTo(("party",), bytes(party_key(number)))])) == []
            rows = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
            assert rows == 62
            assert touched <= total * 0.02, (number, touched, total)
    finally:
        use_opener(before)


# publishing


def test_publish_takes_all_parties_with_children_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    home, lake = tmp_path / "home", Lake.create(tmp_path / "lake")
    with echostore.open(home, name="A", background=False) as peer:
        first, second = peer.create_party("First"), peer.create_party("Second")
        child = peer.create_child(first, "Game")
        for party in (first, second, child):
            party.create("property-set", n=1)
            party.flush()
        done = publish(home, lake.path)  # beside the running peer
        assert (done.version, done.parties, done.damaged) == (1, 3, [])
        assert {block[0] for block in lake_blocks(lake)} == {first.key, second.key, child.key}
        assert not any(block[2] for block in lake_blocks(lake) if block[0] == child.key), "a child has no control feeds"
        again = publish(home, lake.path)
        assert (again.version, again.blocks) == (1, 0)
        child.create("property-set", n=2)
        child.flush()
        more = publish(home, lake.path)
        assert (more.version, more.feeds, more.files) == (2, 1, 1)
        assert more.blocks == 1
        assert set(lake_blocks(lake)) == HomeOf(home).blocks()
        assert len(lake_blocks(lake)) == len(set(lake_blocks(lake)))
        heads = [row for row in rows_of(lake.at()) if row["signature"] is not None]
        assert {row["link"] for row in heads} >= {run["last_link"] for run in lake.at().runs().to_pylist()}
        assert all(row["depth"] > 0 for row in rows_of(lake.at()))
        only = Lake.create(tmp_path / "only")
        publish(home, only.path, parties=[second.key])
        assert {block[0] for block in lake_blocks(only)} == {second.key}
        with pytest.raises(NotFound):
            publish(home, only.path, parties=[party_key(9)])
    sound(lake)


def test_publish_keeps_every_branch_once_and_its_heads(tmp_path: Path) -> None:
    writer = written("forks", 20)
    branch = writer.branch(5)
    branch.write(*payloads(8, "other"))
    third = branch.branch(9)  # leaves the second branch, late
    third.write(*payloads(3, "third"))
    one, two, lake = HomeOf(tmp_path / "one"), HomeOf(tmp_path / "two"), Lake.create(tmp_path / "lake")
    one.receive(writer)
    publish(one.path, lake.path)
    one.receive(branch, start=0)
    one.receive(third, start=0)
    assert publish(one.path, lake.path).blocks == 8 + 3
    assert set(lake_blocks(lake)) == one.blocks()
    # Another home holds another branch as its own: only what is new of it is added.
    two.receive(third)
    assert publish(two.path, lake.path).blocks == 0
    third.write(*payloads(2, "more"))
    two.receive(third)
    assert publish(two.path, lake.path).blocks == 2
    assert len(lake_blocks(lake)) == len(set(lake_blocks(lake))) == 20 + 8 + 3 + 2
    signed = {row["link"] for row in rows_of(lake.at()) if row["signature"] is not None}
    assert signed >= {writer.links[-1], branch.links[-1], third.links[-1]}
    starts = {(run["start"], run["previous"]) for run in lake.at().runs().to_pylist()}
    assert starts >= {(5, writer.links[4]), (9, branch.links[8])}
    sound(lake)


def test_a_shorter_or_differently_cut_home_adds_nothing_and_a_longer_one_only_the_rest(tmp_path: Path) -> None:
    writer = written("feed", 50)
    lake = Lake.create(tmp_path / "lake")
    counts = []
    for number, end in enumerate((30, 10, 30, 45, 50, 20)):
        home = HomeOf(tmp_path / f"home {number}")
        home.receive(writer, end=end)
        counts.append(publish(home.path, lake.path).blocks)
    assert counts == [30, 0, 0, 15, 5, 0]


def test_depths_are_those_that_messages_claim_and_zero_for_what_is_no_message(tmp_path: Path) -> None:
    writer = Writer("depths")
    home, lake = HomeOf(tmp_path / "home"), Lake.create(tmp_path / "lake")
    home.hold(writer, message(1), message(7), b"\xff no message", message(1 << 60), message(9))
    publish(home.path, lake.path)
    home.hold(writer, message(11))
    publish(home.path, lake.path)
    rows = list(rows_of(lake.at()))
    assert [row["depth"] for row in rows] == [1, 7, 0, 0, 9, 11]
    assert [row["previous_depth"] for row in rows] == [0, None, None, None, None, 9]


def test_a_damaged_party_is_told_and_stops_no_other(tmp_path: Path) -> None:
    home, lake = HomeOf(tmp_path / "home"), Lake.create(tmp_path / "lake")
    for number in (1, 2, 3):
        home.hold(Writer(f"w{number}", party_key(number)), *payloads(50))
    path = home.home.party(party_key(2)).feeds
    raw = bytearray(path.read_bytes())
    at = raw.find(b"block 30 ")
    raw[at] ^= 1
    path.write_bytes(raw)
    done = publish(home.path, lake.path)
    assert [party for party, _ in done.damaged] == [party_key(2)]
    assert "Block 30" in done.damaged[0][1]
    assert {block[0] for block in lake_blocks(lake)} >= {party_key(1), party_key(3)}
    raw[at] ^= 1
    path.write_bytes(raw)
    mended = publish(home.path, lake.path)
    assert mended.damaged == []
    assert set(lake_blocks(lake)) == home.blocks()
    assert len(lake_blocks(lake)) == 150
    sound(lake)


def test_a_lake_is_not_made_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(Refused, match="other files"):
        Lake.create(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        Lake.create(tmp_path / "file")
    with pytest.raises(NotFound):
        Lake.open(tmp_path / "nowhere")
    with pytest.raises(NotFound):
        Lake.open(tmp_path / "mine")


# two at once


def _publish_often(home: str, lake: str, seed: int, rounds: int) -> None:
    """A process that writes to its home, publishes and compacts."""
    random = Random(seed)
    own = HomeOf(Path(home))
    shared = [Writer(f"shared {number}") for number in range(3)]
    for _ in range(rounds):
        for writer in shared:  # the same blocks come to both homes, at their own pace
            writer.payloads, writer.links = [], []
            writer.write(*payloads(40, writer.name))
            with FeedStore(own.home.make_party(PARTY).feeds, PARTY) as store:
                held = store.length(writer.key) if store.has_feed(writer.key) else 0
            if held < 40:
                own.receive(writer, end=min(40, held + random.randint(1, 6)))
        publish(home, lake)
        if random.random() < 0.2:
            compact(Lake.open(lake), keep_s=120)
    for writer in shared:
        own.receive(writer)
    publish(home, lake)


def test_publishers_and_compactions_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    context = multiprocessing.get_context("spawn")
    running = [
        context.Process(target=_publish_often, args=(str(tmp_path / f"home {n}"), str(lake.path), n, 7))
        for n in range(3)
    ]
    for process in running:
        process.start()
    checked = 0
    while any(process.is_alive() for process in running):
        version = lake.at()  # a reader sees whole versions, whatever happens beside it
        found = block_ids(rows_of(version)) if version.version else []
        if lake.version() - version.version < 2:
            assert len(found) == len(set(found))
            checked += 1
        forget_files()
    for process in running:
        process.join()
        assert process.exitcode == 0
    assert checked
    blocks = lake_blocks(lake)
    assert len(blocks) == len(set(blocks)) == 3 * 40
    assert set(blocks) == HomeOf(tmp_path / "home 0").blocks()
    assert log.check_chain(lake.path) == lake.version()
    sound(lake)


def test_every_place_where_another_publisher_may_come_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another publisher acts just before each attempt to create an entry: overlapping, equal, unrelated, compaction."""
    writer = written("feed", 30)
    other = written("other", 10, party_key(7))
    real = log.create_entry
    for what in ("equal", "part", "unrelated", "compact", "branch"):
        lake = Lake.create(tmp_path / what)
        base, mine, theirs = (HomeOf(tmp_path / f"{what} {name}") for name in ("base", "mine", "theirs"))
        base.receive(writer, end=5)
        publish(base.path, lake.path)
        base.receive(writer, end=8)
        publish(base.path, lake.path)
        mine.receive(writer, end=20)
        if what == "equal":
            theirs.receive(writer, end=20)
        elif what == "part":
            theirs.receive(writer, end=13)
        elif what == "branch":
            fork = writer.branch(10)
            fork.write(*payloads(5, "fork"))
            theirs.receive(fork)
        else:
            theirs.receive(other)
        came: list[int] = []

        def create(
            path: Path,
            entry: log.Entry,
            lake: Lake = lake,
            what: str = what,
            theirs: HomeOf = theirs,
            came: list[int] = came,
        ) -> None:
            if not came:
                came.append(entry.version)
                if what == "compact":
                    assert compact(lake, keep_s=0).rounds == 1
                else:
                    assert publish(theirs.path, lake.path).blocks > 0
            real(path, entry)

        monkeypatch.setattr(log, "create_entry", create)
        publish(mine.path, lake.path)
        monkeypatch.setattr(log, "create_entry", real)
        assert came == [3], what
        expected = mine.blocks() | (theirs.blocks() if what != "compact" else set())
        assert set(lake_blocks(lake)) == expected, what
        assert len(lake_blocks(lake)) == len(expected), what
        sound(lake)


# compaction


def test_compact_joins_runs_keeps_every_block_and_disturbs_no_reader(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    home = HomeOf(tmp_path / "home")
    writers = [Writer(f"w{number}", party_key(number % 3)) for number in range(6)]
    for step in range(8):
        for writer in writers:
            home.hold(writer, *payloads(3, f"{writer.name} {step}"), control=writer is writers[0])
        publish(home.path, lake.path)
    fork = writers[1].branch(10)
    fork.write(*payloads(4, "fork"))
    home.receive(fork, start=0)
    publish(home.path, lake.path)
    old = lake.at()
    before = lake_blocks(lake)
    done = compact(lake)
    assert (done.files_after, done.deleted_files, done.duplicates) == (2, 0, 0)
    assert lake_blocks(lake) == before == sorted(home.blocks())
    runs = lake.at().runs().to_pylist()
    assert [(run["start"], run["end"]) for run in runs].count((0, 24)) == 6
    assert len(runs) == 7
    assert sorted(block_ids(rows_of(old))) == before, "who reads an old version still can"
    again = compact(lake)
    assert (again.rounds, again.version) == (0, done.version)
    gone = compact(lake, keep_s=0)
    assert gone.deleted_files >= 10
    assert lake_blocks(lake) == before
    forget_files()
    with pytest.raises(echostore.kernel.errors.Corrupt, match="missing"):
        list(rows_of(lake.at(old.version)))
    assert publish(home.path, lake.path).blocks == 0
    sound(lake)


def test_compact_drops_what_is_there_twice_and_keeps_what_comes_out_as_it_went_in(lake: Lake) -> None:
    writer, other = written("one", 20, party_key(1)), written("two", 20, party_key(2))
    both = [feed_rows(writer), feed_rows(other)]
    LakeWriter(lake).write(both)
    LakeWriter(lake).write([feed_rows(writer)])  # by hand: a publisher would not
    assert len(lake_blocks(lake)) == 60
    done = compact(lake, keep_s=0)
    assert done.duplicates == 20
    assert len(lake_blocks(lake)) == 40, "the merged file is the first file again, and stays"
    assert lake.at().files == lake.at(1).files
    sound(lake)


def test_compact_works_in_rounds_of_bounded_memory(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from echostore.pipeline.lake import compact as module

    monkeypatch.setattr(files, "FILE_BYTES", 4_000)
    monkeypatch.setattr(module, "SMALL_BYTES", 2_000)
    monkeypatch.setattr(module, "ROUND_BYTES", 8_000)
    writer = written("long", 400)
    for at in range(0, 400, 5):
        LakeWriter(lake).write([feed_rows(writer, at, at + 5)])
    done = compact(lake)
    assert done.rounds > 3
    assert 5 < done.files_after < 30
    assert [row["link"] for row in rows_of(lake.at())] == writer.links
    sound(lake)


def test_unnamed_files_are_collected_when_they_are_old_and_no_sooner(lake: Lake) -> None:
    staged = LakeWriter(lake).stage([feed_rows(written("lost", 10))])
    left = lake.path / "writing" / "half.parquet"
    left.write_bytes(b"half")
    LakeWriter(lake).write([feed_rows(written("kept", 10))])
    assert compact(lake, keep_s=0).deleted_files == 0, "they may be on their way"
    for path in (lake.path / staged.adds[0].file, lake.path / staged.runs[0].file, left):
        os.utime(path, (path.stat().st_mtime - UNNAMED_S - 60,) * 2)
    done = compact(lake, keep_s=0)
    assert done.deleted_files == 3
    assert not left.exists()
    assert len(lake_blocks(lake)) == 10
    sound(lake)


def test_a_real_party_with_a_fork_is_published_from_every_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    lake = Lake.create(tmp_path / "lake")
    with Circle(tmp_path, "ann", "bob") as circle:
        item = circle.party("ann").create("property-set", n=0)
        circle.meet_all()
        for name in ("ann", "bob"):
            circle.get(name, item)["n"] = name
            circle.party(name).flush()
            publish(tmp_path / name, lake.path)
        circle.meet_all()
        for name in ("ann", "bob"):
            circle.party(name).flush()
            publish(tmp_path / name, lake.path)
        expected = HomeOf(tmp_path / "ann").blocks() | HomeOf(tmp_path / "bob").blocks()
    assert set(lake_blocks(lake)) == expected
    assert len(lake_blocks(lake)) == len(expected)
    sound(lake)
