"""The commit: one per number, whole or not at all, whoever dies, sleeps or comes second."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from uuid import uuid4

import pyarrow as pa
import pytest

from echostore.kernel.errors import Corrupt, NotFound, StorageFailed
from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import COLLECT, COMMIT, Attempt, create_exclusive
from echostore.pipeline.output.files import checked_path, no_step, read_table, write_file
from echostore.pipeline.output.garbage import Collected, collect
from echostore.pipeline.output.layout import DECISION, file_path, parse_file
from echostore.pipeline.output.record import (
    FORMAT,
    Commit,
    CommitLost,
    LakePoint,
    NamedFile,
    StageTime,
    decode,
    encode,
)
from spark.commit_story import LAKE, SCHEMA, drive, read_whole, rows, seen
from spark.interleaving import Actor, interleave

LATER = 1e12
"""A time at which everything is old."""

INTERLEAVINGS = int(os.environ.get("ECHOSTORE_INTERLEAVINGS", "1000"))
KILL_ROUNDS = int(os.environ.get("ECHOSTORE_KILL_ROUNDS", "5"))


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs take no time there."""
    below = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="echostore-commits-", dir=below))
    yield folder
    shutil.rmtree(folder)


# one after the other


def test_a_commit_names_its_files_and_the_commit_before(tmp_path: Path) -> None:
    first, second = drive(tmp_path, "a", no_step), drive(tmp_path, "b", no_step)
    assert (first.number, second.number) == (1, 2)
    newest, _ = reading.newest(tmp_path)
    assert newest == second
    assert newest.lake == LAKE
    assert newest.stages == (StageTime("all", 4, 0.5),)
    assert first.previous == ""
    assert second.previous == reading.load(tmp_path, 1)[1]
    assert read_whole(tmp_path) == ["a", "b"]
    assert [commit.number for commit in reading.commits(tmp_path)] == [2, 1]
    assert [commit.number for commit in reading.commits(tmp_path, last=1)] == [2]
    assert reading.verify(tmp_path) == []


def test_an_output_without_a_commit_is_empty(tmp_path: Path) -> None:
    assert reading.newest(tmp_path / "nowhere") == (None, "")
    with Attempt.begin(tmp_path) as attempt:
        attempt.write("items", SCHEMA, rows("a"))
    assert reading.newest(tmp_path) == (None, "")
    with pytest.raises(NotFound):
        reading.load(tmp_path, 1)


def test_the_second_of_two_committers_loses_and_changes_nothing(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as slow:
        files = slow.write("items", SCHEMA, rows("slow"))
        winner = drive(tmp_path, "quick", no_step)
        before = (tmp_path / "commits" / "1.json").read_bytes()
        with pytest.raises(CommitLost) as lost:
            slow.commit(files={"items": files}, lake=LAKE)
    assert lost.value.exit_status == 4
    assert lost.value.number == 1
    assert "Run again" in lost.value.next_step
    assert (tmp_path / "commits" / "1.json").read_bytes() == before
    assert reading.newest(tmp_path)[0] == winner
    assert os.listdir(tmp_path / "commits") == ["1.json"]


def test_a_zombie_that_slept_over_several_commits_loses(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as zombie:
        files = zombie.write("items", SCHEMA, rows("zombie"))
        for writer in "abc":
            drive(tmp_path, writer, no_step)
        with pytest.raises(CommitLost):
            zombie.commit(files={"items": files}, lake=LAKE)
    assert read_whole(tmp_path) == ["a", "b", "c"]


def test_a_commit_carries_only_what_the_one_before_named(tmp_path: Path) -> None:
    drive(tmp_path, "a", no_step)
    with Attempt.begin(tmp_path) as lost:
        stray = lost.write("items", SCHEMA, rows("stray"))
    with Attempt.begin(tmp_path) as attempt, pytest.raises(AssertionError, match="neither of this attempt"):
        attempt.commit(files={"items": stray}, lake=LAKE)


def test_a_file_that_vanished_or_shrank_is_not_committed(tmp_path: Path) -> None:
    for damage in (Path.unlink, lambda path: path.write_bytes(b"short")):
        with Attempt.begin(tmp_path) as attempt:
            files = attempt.write("items", SCHEMA, rows("a"))
            damage(tmp_path / files[0].path)
            with pytest.raises(Corrupt):
                attempt.commit(files={"items": files}, lake=LAKE)
    assert reading.newest(tmp_path) == (None, "")


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as attempt:
        assert attempt.write("items", SCHEMA, []) == ()
        assert attempt.write("items", SCHEMA, [pa.record_batch([[], []], schema=SCHEMA)]) == ()
        assert list((tmp_path / attempt.folder).rglob("*.parquet")) == []


def test_equal_rows_make_one_file(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as attempt:
        assert attempt.write("items", SCHEMA, rows("a")) == attempt.write("items", SCHEMA, rows("a"))
        assert len(os.listdir(tmp_path / attempt.folder / "items")) == 1


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield rows("a")[0]
        raise OSError(28, "No space left on device")

    with Attempt.begin(tmp_path) as attempt:
        with pytest.raises(StorageFailed, match="No space left"):
            attempt.write("items", SCHEMA, failing())
        assert os.listdir(tmp_path / attempt.folder / "items") == []


def test_create_exclusive_never_replaces(tmp_path: Path) -> None:
    create_exclusive(tmp_path / "x", b"one")
    with pytest.raises(FileExistsError):
        create_exclusive(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["x"]


# what is read is what was written


def damaged(tmp_path: Path) -> tuple[Path, NamedFile]:
    commit = drive(tmp_path, "a", no_step)
    file = commit.files["items"][0]
    return tmp_path / file.path, file


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path, file = damaged(tmp_path)
    read_table(tmp_path, file, SCHEMA)
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), max(1, len(content) // 40)):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(Corrupt, match=file.sha256[:16]):
            read_table(tmp_path, file, SCHEMA)
    path.write_bytes(content)
    assert read_table(tmp_path, file, SCHEMA).num_rows == 3


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "link"])
def test_a_broken_file_is_named(tmp_path: Path, damage: str) -> None:
    path, file = damaged(tmp_path)
    content = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        path.write_bytes(b"" if damage == "empty" else content[:-1])
    with pytest.raises(Exception) as failure:
        checked_path(tmp_path, file)
    assert file.sha256[:16] in str(failure.value) or file.path in str(failure.value)
    if damage != "link":
        assert [broken.path for broken in reading.verify(tmp_path)] == [file.path]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    _, file = damaged(tmp_path)
    with pytest.raises(Corrupt, match="columns"):
        read_table(tmp_path, file, pa.schema([("other", pa.string())]))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path, _ = damaged(tmp_path)
    path.write_bytes(b"PAR1 nonsense PAR1")
    import hashlib

    content = path.read_bytes()
    lying = NamedFile(str(path.relative_to(tmp_path)), hashlib.sha256(content).hexdigest(), len(content), 3)
    with pytest.raises(Corrupt, match="Parquet"):
        read_table(tmp_path, lying, SCHEMA)


def test_a_changed_record_breaks_the_chain(tmp_path: Path) -> None:
    drive(tmp_path, "a", no_step)
    drive(tmp_path, "b", no_step)
    path = tmp_path / "commits" / "1.json"
    commit = decode(path.read_bytes(), "1.json")
    path.write_bytes(encode(Commit(**{**_fields(commit), "created_ms": 2})))
    with pytest.raises(Corrupt, match="follows a commit 1"):
        reading.newest(tmp_path)
    with pytest.raises(Corrupt, match="follows a commit 1"):
        reading.verify(tmp_path)
    path.unlink()
    with pytest.raises(Corrupt, match="missing"):
        reading.newest(tmp_path)


def _fields(commit: Commit) -> dict[str, object]:
    return {name: getattr(commit, name) for name in Commit.__dataclass_fields__}


HOSTILE = {
    "path": "../../etc/passwd",
    "absolute": "/etc/passwd",
    "other-kind": file_path(1, uuid4(), "links", "00" * 32),
    "other-hash": file_path(1, uuid4(), "items", "11" * 32),
    "later": file_path(2, uuid4(), "items", "00" * 32),
    "newline": file_path(1, uuid4(), "items", "00" * 32) + "\n",
}


@pytest.mark.parametrize("path", HOSTILE.values(), ids=HOSTILE)
def test_a_record_that_names_strange_files_is_refused(path: str) -> None:
    commit = Commit(
        number=1,
        previous="",
        attempt=uuid4(),
        created_ms=1,
        lake=LakePoint(1, ""),
        files={"items": (NamedFile(path, "00" * 32, 1, 1),)},
    )
    with pytest.raises(Corrupt, match=r"here\.json"):
        decode(encode(commit), "here.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"format":1}', b'{"format":2}', b"\xff\xfe", b'{"format":1,"number":"1"}']
)
def test_garbage_is_no_record(content: bytes) -> None:
    with pytest.raises(Corrupt, match=r"x\.json"):
        decode(content, "x.json")


def test_a_record_has_one_form(tmp_path: Path) -> None:
    content = encode(drive(tmp_path, "a", no_step))
    form = f'"format":{FORMAT}'.encode()
    assert encode(decode(content, "x")) == content
    with pytest.raises(Corrupt, match="one form"):
        decode(json.dumps(json.loads(content), indent=1).encode(), "x")
    with pytest.raises(Corrupt):
        decode(content.replace(form, form + b',"more":0'), "x")


def test_paths_of_files_are_parsed_back() -> None:
    attempt = uuid4()
    assert parse_file(file_path(12, attempt, "items", "ab" * 32)) == (12, attempt, "items", "ab" * 32)
    assert parse_file("epoch=0/attempt=" + "0" * 32 + "/items/" + "ab" * 32 + ".parquet") is None


# garbage


def test_a_dead_attempt_is_collected_when_it_is_old(tmp_path: Path) -> None:
    drive(tmp_path, "a", no_step)
    with Attempt.begin(tmp_path) as dead:
        dead.write("items", SCHEMA, rows("dead"))
    assert collect(tmp_path) == Collected()
    removed = collect(tmp_path, age_s=0, now_s=LATER)
    assert (removed.attempts, removed.files) == (1, 2)
    assert list(tmp_path.glob("epoch=2/*")) == []
    assert read_whole(tmp_path) == ["a"]


def test_a_living_attempt_is_never_collected(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as living:
        files = living.write("items", SCHEMA, rows("living"))
        log = living.write("log", SCHEMA, rows("living", 1))
        assert collect(tmp_path, age_s=0, now_s=LATER) == Collected()
        living.commit(files={"items": files, "log": log}, lake=LAKE)
    assert read_whole(tmp_path) == ["living"]


def test_a_collected_attempt_can_not_commit(tmp_path: Path) -> None:
    """Invariant 5, for a driver whose lease was lost though it lives."""
    with Attempt.begin(tmp_path) as zombie:
        files = zombie.write("items", SCHEMA, rows("zombie"))
        zombie.release()
        assert collect(tmp_path, age_s=0, now_s=LATER).attempts == 1
        with pytest.raises(CommitLost):
            zombie.commit(files={"items": files}, lake=LAKE)
        with pytest.raises(CommitLost):
            write_file(tmp_path, zombie.folder, "items", SCHEMA, rows("zombie"))
    assert reading.newest(tmp_path) == (None, "")


def test_an_attempt_that_decided_to_commit_is_left_until_its_number_is_taken(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as dying:
        dying.write("items", SCHEMA, rows("dying"))
    create_exclusive(tmp_path / dying.folder / DECISION, COMMIT)
    assert collect(tmp_path, age_s=0, now_s=LATER).attempts == 0
    drive(tmp_path, "a", no_step)
    assert collect(tmp_path, age_s=0, now_s=LATER).attempts == 1
    assert read_whole(tmp_path) == ["a"]


def test_a_collection_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as dead:
        dead.write("items", SCHEMA, rows("dead"))
    create_exclusive(tmp_path / dead.folder / DECISION, COLLECT)
    assert collect(tmp_path, age_s=0, now_s=LATER).attempts == 1


def test_files_of_a_commit_that_it_does_not_name_are_collected(tmp_path: Path) -> None:
    with Attempt.begin(tmp_path) as attempt:
        items = attempt.write("items", SCHEMA, rows("a"))
        log = attempt.write("log", SCHEMA, rows("a", 1))
        attempt.write("items", SCHEMA, rows("twice"))  # of a task that ran twice
        (tmp_path / attempt.folder / "items" / ".x.part").write_bytes(b"half")
        attempt.commit(files={"items": items, "log": log}, lake=LAKE)
        (tmp_path / attempt.folder / ".1.json.0").write_bytes(b"half")
    for writer in "bc":
        drive(tmp_path, writer, no_step)
    assert collect(tmp_path) == Collected()
    assert collect(tmp_path, age_s=0, now_s=LATER).files == 3
    assert read_whole(tmp_path) == ["a", "b", "c"]
    assert reading.verify(tmp_path) == []
    assert collect(tmp_path, age_s=0, now_s=LATER) == Collected()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "epoch=1" / "notes").mkdir(parents=True)
    (tmp_path / "epoch=x").mkdir()
    (tmp_path / "epoch=1" / "notes" / "file").write_text("mine")
    assert collect(tmp_path, age_s=0, now_s=LATER) == Collected()
    assert (tmp_path / "epoch=1" / "notes" / "file").read_text() == "mine"


# all at once


@pytest.mark.timeout(600)
def test_of_all_interleavings_one_committer_wins_each_number_and_readers_see_no_half(memory_folder: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(INTERLEAVINGS):
        outcomes.update(interleaved(memory_folder / str(seed), seed))
        shutil.rmtree(memory_folder / str(seed))
    # The simulator reaches what it is for.
    assert all(outcomes[name] for name in ("lost to another", "lost to the collector", "two commits", "zombie won"))


def interleaved(out: Path, seed: int) -> list[str]:
    """Two committers, a zombie without its lease, and a collector that takes everything for old."""
    random = Random(seed)
    out.mkdir()
    if random.random() < 0.5:
        drive(out, "before", no_step)
    started = 0 if reading.newest(out)[0] is None else 1
    actors = [
        Actor("a", lambda step: drive(out, "a", step)),
        Actor("b", lambda step: drive(out, "b", step)),
        Actor("zombie", lambda step: drive(out, "zombie", step, forget_lease=True)),
        Actor("collector", lambda step: collect(out, age_s=0, now_s=LATER, step=step)),
        Actor("late collector", lambda step: collect(out, age_s=0, now_s=LATER, step=step)),
    ]
    newest = started

    def look(where: str) -> None:
        nonlocal newest
        if "collector" not in where and "linked" not in where:
            return  # nothing that a reader could see has changed
        found = seen(out)
        assert found >= newest, f"seed {seed}: commit {newest} is gone after {where}"
        newest = found

    order = interleave(actors, random, look)
    told = f"seed {seed}: {' '.join(order)}"
    committers, collectors = actors[:3], actors[3:]
    assert all(actor.error is None for actor in collectors), (told, [actor.error for actor in collectors])
    won = {actor.name: actor.result for actor in committers if actor.error is None}
    for actor in committers:
        assert actor.error is None or isinstance(actor.error, CommitLost), (told, actor.name, repr(actor.error))
    final = read_whole(out)
    assert len(final) == len(won) + started, told
    assert sorted(commit.number for commit in won.values()) == list(range(started + 1, len(final) + 1)), told
    for name, commit in won.items():
        assert final[commit.number - 1] == name, told
    assert won, told
    assert reading.verify(out) == [], told
    collect(out, age_s=0, now_s=LATER)
    assert len(list(out.glob("epoch=*/attempt=*"))) == len(final), f"{told}: garbage is left"
    assert read_whole(out) == final
    lost = [str(actor.error) for actor in committers if actor.error is not None]
    outcomes = ["lost to the collector" if "collected" in why else "lost to another" for why in lost]
    return [*outcomes, *(["two commits"] if len(won) > 1 else []), *(["zombie won"] if "zombie" in won else [])]


def test_equal_seeds_give_equal_interleavings(memory_folder: Path) -> None:
    assert interleaved(memory_folder / "x", 5) == interleaved(memory_folder / "y", 5)


def test_a_driver_killed_at_any_step_leaves_a_whole_output(memory_folder: Path) -> None:
    script = Path(__file__).with_name("commit_kills.py")
    done = subprocess.run(
        [sys.executable, str(script), str(memory_folder), str(KILL_ROUNDS)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = {line["step"] for line in lines}
    assert len(lines) >= 10 * KILL_ROUNDS, sorted(steps)
    assert {"show folder", "sync items", "name log", "decide", "link decision", "link 2.json", "linked 2.json"} <= steps
    for line in lines:
        writer = f"writer-{next(iter(set(line['after_kill'] + line['after_retry']) - {'writer-None'}), 'lost')[7:]}"
        whole = ["writer-None"], ["writer-None", writer]
        assert line["after_kill"] in whole, line
        # The retry goes on from there: nothing twice, nothing missing.
        assert line["after_retry"] == [*line["after_kill"], "writer-None"], line
        assert line["left"] == [], line
        assert line["attempts"] == len(line["after_retry"]), line
    visible = [line["step"] for line in lines if len(line["after_kill"]) == 2]
    hidden = [line["step"] for line in lines if len(line["after_kill"]) == 1]
    assert "linked 2.json" in visible
    assert "linked 2.json" not in hidden
    assert "link 2.json" in hidden
    # The decision comes before the record: a driver that published without one could not be told from a zombie.
    assert {"decide", "link decision", "linked decision", "publish"}.isdisjoint(visible)
