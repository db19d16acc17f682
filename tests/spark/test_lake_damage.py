"""Lakes with bad files, lying logs, drifted schemas and full disks: clear errors, nothing changed, mending helps."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echostore.kernel.errors import Corrupt, EchoError, Locked, Refused, StorageFailed
from echostore.pipeline import schemas
from echostore.pipeline.lake import Lake, LakeWriter, files, log
from echostore.pipeline.lake.compact import compact
from echostore.pipeline.lake.layout import entry_name
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.lake.reading import forget_files, read_rows
from echostore.pipeline.lake.stat import stat
from feed_builder import Writer, payloads
from spark.lake_builder import HomeOf, feed_rows, lake_blocks, many_parties, party_key, rows_of, written


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake of two versions, one with control and data of five parties."""
    made = Lake.create(tmp_path / "lake")
    LakeWriter(made).write(many_parties(5, 40))
    LakeWriter(made).write([feed_rows(written("late", 30, party_key(7)))])
    return made


def read_everything(lake: Lake) -> list[Any]:
    forget_files()
    return lake_blocks(lake)


def data_file(lake: Lake) -> Path:
    return lake.path / next(each.file for each in lake.at().files if not each.control)


def runs_file(lake: Lake) -> Path:
    return lake.path / lake.at().runs_files[0].file


def refused_and_mended(lake: Lake, path: Path, damage: Callable[[Path], None], what: str) -> None:
    """Damage one file: reading names it, the full check finds it, and after mending all is as before."""
    before = read_everything(lake)
    good = path.read_bytes()
    damage(path)
    with pytest.raises(Corrupt, match=what) as told:
        read_everything(lake)
    assert path.name in told.value.what
    assert told.value.next_step
    assert told.value.exit_status == 6
    found = stat(lake, full=True).damage
    assert any(path.name in file or path.name in wrong for file, wrong in found), found
    path.write_bytes(good)
    assert read_everything(lake) == before
    assert stat(lake, full=True).damage == []


# files


def test_truncated_empty_missing_and_foreign_files_are_named(lake: Lake) -> None:
    for path in (data_file(lake), runs_file(lake)):
        size = path.stat().st_size
        refused_and_mended(lake, path, lambda p, size=size: os.truncate(p, size // 2), "damaged")
        refused_and_mended(lake, path, lambda p: os.truncate(p, 0), "damaged")
        refused_and_mended(lake, path, lambda p: p.write_bytes(b"PAR1 not really PAR1"), "damaged")
        refused_and_mended(lake, path, Path.unlink, "missing")


def test_a_flipped_bit_in_a_page_is_found_by_its_checksum(lake: Lake) -> None:
    path = data_file(lake)
    group = pq.ParquetFile(path).metadata.row_group(0)
    for name in ("payload", "link", "seq", "previous"):
        column = group.column(schemas.BLOCKS.get_field_index(name))
        last = column.data_page_offset + column.total_compressed_size - 2

        def flip(p: Path, at: int = last) -> None:
            raw = bytearray(p.read_bytes())
            raw[at] ^= 4
            p.write_bytes(raw)

        refused_and_mended(lake, path, flip, "damaged")


def test_other_columns_are_refused_by_name(lake: Lake) -> None:
    path = data_file(lake)
    table = pq.read_table(path)

    def rewritten(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
        return lambda p: pq.write_table(change(table), p)

    for change, name in (
        (lambda t: t.drop_columns(["depth"]), "depth"),
        (lambda t: t.append_column("colour", pa.repeat("red", len(t))), "colour"),
        (lambda t: t.set_column(3, "seq", t["seq"].cast(pa.string())), "seq"),
        (lambda t: t.rename_columns([*t.schema.names[:-1], "older"]), "previous_depth"),
    ):
        refused_and_mended(lake, path, rewritten(change), f"columns.*{name}")
    before = read_everything(lake)
    good = runs_file(lake).read_bytes()
    pq.write_table(lake.at().runs().drop_columns(["bytes"]), runs_file(lake))
    with pytest.raises(Corrupt, match="hash"):
        lake.at().runs()
    with pytest.raises(Corrupt, match=r"columns.*bytes"):
        lake.at().runs(parties=[party_key(1)])
    runs_file(lake).write_bytes(good)
    assert read_everything(lake) == before


MUTATE = """
import sys
from pathlib import Path
from random import Random
from echostore.kernel.errors import EchoError
from echostore.pipeline.lake.reading import forget_files, read_rows
lake, file, rows, seed, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
path = Path(lake) / file
good = path.read_bytes()
random = Random(seed)
refused = read = 0
for _ in range(count):
    raw = bytearray(good)
    for _ in range(random.randint(1, 6)):
        # The footer decides most: half of the changes go there.
        at = random.randrange(len(raw)) if random.random() < 0.5 else random.randrange(max(0, len(raw) - 6000), len(raw))
        raw[at] = random.randrange(256)
    if random.random() < 0.2:
        del raw[random.randrange(len(raw)):]
    path.write_bytes(raw)
    forget_files()
    try:
        for batch in read_rows(lake, file, 0, rows):
            batch.validate()
        read += 1
    except EchoError as error:
        assert path.name in str(error), error
        refused += 1
path.write_bytes(good)
print(refused, read)
"""


def test_mutated_files_give_typed_errors_and_never_end_the_process(lake: Lake) -> None:
    path = data_file(lake)
    rows = pq.read_metadata(path).num_rows
    arguments = [str(lake.path), path.relative_to(lake.path).as_posix(), str(rows), "7", "500"]
    done = subprocess.run(
        [sys.executable, "-c", MUTATE, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, read = map(int, done.stdout.split())
    assert refused + read == 500
    assert refused > 400, "the rest changed bytes that nobody reads"


def test_a_row_group_that_claims_too_much_is_not_decoded(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from echostore.pipeline.lake import reading

    monkeypatch.setattr(reading, "ROW_GROUP_BYTES_MAX", 1000)
    with pytest.raises(Corrupt, match="claims more than 1000"):
        read_everything(lake)


READ_ONE_ROW = """
import resource, sys
from echostore.kernel.errors import Corrupt
from echostore.pipeline.lake.reading import read_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for batch in read_rows(sys.argv[1], sys.argv[2], 0, 1):
        print("read", batch.num_rows)
except Corrupt as error:
    print(error.what)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def bomb_rows(count: int, payload: bytes) -> pa.Table:
    """Rows of one feed that all have the same payload."""
    repeated = pa.array([0] * count, pa.int32())
    columns = {
        "payload": pa.DictionaryArray.from_arrays(repeated, pa.array([payload], pa.binary())),
        "signature": pa.nulls(count, pa.binary()),
        "previous": pa.nulls(count, pa.binary()),
        "previous_depth": pa.nulls(count, pa.int64()),
        "control": pa.array([False] * count),
        "seq": pa.array(range(count), pa.int64()),
        "depth": pa.array(range(1, count + 1), pa.int64()),
    }
    key = pa.DictionaryArray.from_arrays(repeated, pa.array([bytes(32)], pa.binary()))
    schema = pa.schema(
        [pa.field(field.name, columns.get(field.name, key).type, nullable=field.nullable) for field in schemas.BLOCKS]
    )
    return pa.table([columns.get(name, key) for name in schemas.BLOCKS.names], schema=schema)


def repeating_dictionary(path: Path) -> None:
    pq.write_table(bomb_rows(2300, bytes(1 << 20)), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000


def repeating_prefixes(path: Path) -> None:
    rows = bomb_rows(300, bytes(1 << 20)).cast(schemas.BLOCKS)
    encoding = {name: "DELTA_BYTE_ARRAY" if name == "payload" else "PLAIN" for name in schemas.BLOCKS.names}
    pq.write_table(rows, path, compression="zstd", use_dictionary=False, column_encoding=encoding, store_schema=False)


def lying_footer(path: Path) -> None:
    """One page of 600 MiB of zeros, with a footer that calls everything small."""
    rows = bomb_rows(1, bytes(600 << 20)).cast(schemas.BLOCKS)
    pq.write_table(rows, path, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False)
    group = pq.read_metadata(path).row_group(0)
    payload = group.column(schemas.BLOCKS.get_field_index("payload"))
    raw = path.read_bytes()
    for claim in (group.total_byte_size, payload.total_uncompressed_size):
        said = varint(claim * 2)
        assert said in raw
        raw = raw.replace(said, b"\x80" * (len(said) - 1) + b"\x00")
    path.write_bytes(raw)
    assert pq.read_metadata(path).row_group(0).total_byte_size == 0


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def many_equal_rows(path: Path) -> None:
    pq.write_table(bomb_rows(3_000_000, b"x"), path, compression="zstd", store_schema=False, row_group_size=3_000_000)


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (repeating_dictionary, "decodes to more than"),
        (repeating_prefixes, "encoding 7"),
        (lying_footer, "the pages of column payload claim more than"),
        (many_equal_rows, "claims more than"),
    ],
)
def test_what_a_file_decodes_to_is_bounded_whatever_it_claims(
    lake: Lake, bomb: Callable[[Path], None], reason: str
) -> None:
    path = data_file(lake)
    bomb(path)
    name = path.relative_to(lake.path).as_posix()
    done = subprocess.run(
        [sys.executable, "-c", READ_ONE_ROW, str(lake.path), name],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip  # one argument a line would hide what matters
    assert done.returncode == 0, done.stderr[-2000:]
    told, grown = done.stdout.splitlines()
    assert reason in told
    assert path.name in told
    assert int(grown) < 150, f"{grown} MiB to read one row"


def test_a_footer_that_claims_many_parts_is_refused_before_they_are_made(lake: Lake) -> None:
    path = data_file(lake)
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[-8:-4], "little")
    # version 2, and a schema of five million elements
    claimed = bytes([0x15, 0x04, 0x19, 0xFC]) + varint(5_000_000)
    raw[-8 - length : -8 - length + len(claimed)] = claimed
    path.write_bytes(raw)
    with pytest.raises(Corrupt, match="can't be read as Parquet"):
        read_everything(lake)


def test_rows_beyond_a_file_and_names_outside_the_lake_are_refused(lake: Lake) -> None:
    file = data_file(lake).relative_to(lake.path).as_posix()
    with pytest.raises(Corrupt, match="rows 5 to 9999999"):
        list(read_rows(lake.path, file, 5, 9_999_999))
    for name in ("../secret", "blocks/ab/../../x.parquet", "/etc/passwd", "blocks/00/" + "a" * 64 + ".parquet", ""):
        with pytest.raises(Corrupt, match="not the name"):
            list(read_rows(lake.path, name, 0, 1))


# the log


def edited(lake: Lake, version: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        entry = json.loads(path.read_text())
        changed = change(entry)
        path.write_text(json.dumps(entry if changed is None else changed))

    return damage


def test_a_log_that_lies_is_refused(lake: Lake) -> None:
    path = lake.path / entry_name(1)
    for change, what in (
        (lambda e: e.update(version=5), "says that it is version 5"),
        (lambda e: e["adds"][0].update(sha256="0" * 64), "does not fit the name"),
        (lambda e: e["adds"][0].update(file="../../etc/passwd"), "does not fit the name"),
        (lambda e: e["adds"].append(e["adds"][0]), "in the lake already"),
        (lambda e: e.update(removes=[e["adds"][0]["file"]]), "not in the lake"),
        (lambda e: e.update(removes=["x"]), "no file of blocks"),
        (lambda e: e["adds"][0].update(rows=-1), "does not fit"),
        (lambda e: e["adds"][0].update(rows="many"), "can't be read"),
        (lambda e: e.pop("adds"), "can't be read"),
        (lambda e: e.update(colour="red"), "can't be read"),
        (lambda e: e.update(state={"files": [], "runs": []}), "whole state"),
        (lambda e: [e], "can't be read"),
    ):
        refused_and_mended(lake, path, edited(lake, 1, change), what)
    refused_and_mended(lake, path, lambda p: p.write_text('{"format": 1, "ver'), "can't be read")
    refused_and_mended(lake, path, lambda p: p.write_bytes(b"\xff\xfe"), "can't be read")


def test_an_altered_entry_breaks_the_chain(lake: Lake) -> None:
    path = lake.path / entry_name(1)
    good = path.read_text()
    path.write_text(good.replace(json.loads(good)["publisher"], "somebody"))
    with pytest.raises(Corrupt, match="does not follow the entry before it"):
        lake.at()
    path.write_text(good)
    (lake.path / entry_name(1)).rename(lake.path / "aside")
    with pytest.raises(Corrupt, match=r"0001\.json is damaged: it is missing"):
        lake.at()
    with pytest.raises(Corrupt, match="missing"):
        LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))])
    (lake.path / "aside").rename(path)
    assert LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))]) is not None


def test_a_newer_format_is_refused_and_not_called_damaged(lake: Lake) -> None:
    path = lake.path / entry_name(2)
    path.write_text(json.dumps({"format": 2, "something": "else"}))
    with pytest.raises(Refused, match="format 2"):
        lake.at()


def test_runs_that_lie_are_found(tmp_path: Path) -> None:
    """Runs that can't be true are refused; those that could be, the full check finds, and the stages by the links."""
    real = files.write_runs_table
    for name, value, when in (
        ("row", 10_000, "reading"),
        ("end", 10_000, "reading"),
        ("start", -1, "reading"),
        ("party", b"short", "reading"),
        ("last_link", bytes(32), "checking"),
        ("previous", b"x" * 32, "checking"),
        ("last_depth", 99, "checking"),
        ("control", True, "checking"),
        ("feed", b"f" * 32, "checking"),
    ):
        lake = Lake.create(tmp_path / name)
        writer = LakeWriter(lake)

        def lying(file: Any, runs: pa.Table, name: str = name, value: Any = value) -> None:
            rows = runs.to_pylist()
            rows[0][name] = value
            real(file, pa.Table.from_pylist(rows, schemas.RUNS))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "write_runs_table", lying)
            writer.write([feed_rows(written("w", 20))])
        if when == "reading":
            with pytest.raises(Corrupt, match="can't be true"):
                lake.at().runs()
        else:
            assert len(lake.at().runs()) == 1
        found = stat(lake, full=True)
        assert found.damage != [], name
        assert (found.version, found.blocks) == (lake.at().version, 20), "what the log says is told all the same"


def test_a_whole_state_that_lies_is_found(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that leaves a file out of a whole state: the chain is good, and the entries before say otherwise."""
    writer = written("grows", 200, party_key(9))
    real = LakeWriter._state

    def lying(self: LakeWriter, *arguments: Any) -> log.State:
        state = real(self, *arguments)
        return log.State(state.files[1:], state.runs)

    monkeypatch.setattr(LakeWriter, "_state", lying)
    for at in range(log.STATE_EVERY):
        LakeWriter(lake).write([feed_rows(writer, at, at + 1)])
    assert log.check_chain(lake.path) == log.STATE_EVERY + 2
    assert any("whole state" in what for _, what in stat(lake, full=True).damage)


# writing while read, full disks, others' processes


def test_compact_keeps_its_hands_off_a_lake_with_a_damaged_file(lake: Lake) -> None:
    path = data_file(lake)
    good = path.read_bytes()
    raw = bytearray(good)
    raw[len(raw) // 3] ^= 1
    path.write_bytes(raw)
    names = sorted(each.name for each in lake.path.rglob("*") if each.is_file())
    with pytest.raises(Corrupt, match=path.name):
        compact(lake, keep_s=0)
    assert path.exists()
    assert set(names) <= {each.name for each in lake.path.rglob("*")}, "nothing was deleted"
    path.write_bytes(good)
    assert compact(lake, keep_s=0).files_after == 2
    assert stat(lake, full=True).damage == []


class FullDisk:
    """A disk that has room for so many bytes of new files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        real = files.HashedFile.write

        def write(file: files.HashedFile, data: Any) -> int:
            nonlocal room
            room -= len(memoryview(data))
            if room < 0 and not file._dropped:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(file, data)

        monkeypatch.setattr(files.HashedFile, "write", write)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.99])
def test_a_full_disk_leaves_the_lake_as_it_was_and_a_retry_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    home, lake = HomeOf(tmp_path / "home"), Lake.create(tmp_path / "lake")
    for number in range(3):
        home.hold(Writer(f"w{number}", party_key(number)), *payloads(60, size=90))
    publish(home.path, lake.path)
    for number in range(3):
        home.hold(Writer(f"x{number}", party_key(number)), *payloads(60, size=90))
    before = read_everything(lake)
    shutil.copytree(lake.path, tmp_path / "copy")
    publish(home.path, tmp_path / "copy")
    needed = sum(each.bytes for each in Lake.open(tmp_path / "copy").at().files[1:])
    needed += Lake.open(tmp_path / "copy").at().runs_files[-1].bytes
    with monkeypatch.context() as patch:
        FullDisk(patch, int(needed * share))
        with pytest.raises(StorageFailed, match="No space left") as told:
            publish(home.path, lake.path)
    assert "The lake is as it was" in told.value.unchanged
    assert lake.version() == 1
    assert list((lake.path / "writing").iterdir()) == []
    assert read_everything(lake) == before
    assert publish(home.path, lake.path).blocks == 180
    assert set(read_everything(lake)) == home.blocks()


def test_a_log_entry_that_does_not_fit_is_not_half_there(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(log.os, "fsync", no_space)
        with pytest.raises(StorageFailed, match="No space left"):
            LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))])
    assert lake.version() == 2
    assert list((lake.path / "writing").iterdir()) == []
    assert LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))]) is not None


def test_a_writer_that_dies_at_any_step_leaves_the_lake_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that makes something durable is a step; the process ends before it. Then the next writer succeeds."""

    class Died(BaseException):
        pass

    home = HomeOf(tmp_path / "home")
    home.hold(Writer("w", party_key(1)), *payloads(20))
    home.hold(Writer("c", party_key(1)), *payloads(3), control=True)
    steps = 0
    for fatal in range(100):
        lake = Lake.create(tmp_path / f"lake {fatal}")
        steps = 0
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "link"):
                real = getattr(os, name)

                def step(*arguments: Any, real: Any = real, fatal: int = fatal, **more: Any) -> Any:
                    nonlocal steps
                    steps += 1
                    if steps > fatal:
                        raise Died
                    return real(*arguments, **more)

                patch.setattr(os, name, step)
            try:
                publish(home.path, lake.path)
                alive = True
            except Died:
                alive = False
        forget_files()
        found = set(lake_blocks(lake))
        assert found in (set(), home.blocks()), fatal
        publish(home.path, lake.path)
        assert set(lake_blocks(lake)) == home.blocks()
        assert len(lake_blocks(lake)) == 23
        assert stat(lake, full=True).damage == []
        if alive:
            break
    assert steps > 12, "there were steps to die at"


def test_a_lake_that_is_busy_beyond_reason_says_so(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(path: Path, entry: log.Entry) -> None:
        raise log.Taken(entry.version)

    monkeypatch.setattr(log, "create_entry", taken)
    with pytest.raises(Locked, match="all the time"):
        LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))])


def test_files_that_vanish_before_the_commit_are_noticed(lake: Lake) -> None:
    writer = LakeWriter(lake)
    staged = writer.stage([feed_rows(written("more", 3, party_key(8)))])
    (lake.path / staged.adds[0].file).unlink()
    with pytest.raises(StorageFailed, match="not there any more"):
        writer.commit(staged)
    assert lake.version() == 2


def test_a_version_whose_files_were_collected_says_what_to_do(lake: Lake) -> None:
    old = lake.at()
    compact(lake, keep_s=0)
    forget_files()
    with pytest.raises(Corrupt, match="missing") as told:
        list(rows_of(old))
    assert "newest version" in told.value.next_step


def test_random_files_in_the_folders_are_passed_over(lake: Lake) -> None:
    before = read_everything(lake)
    for name in ("log/notes.txt", "log/1.json", "runs/x.tmp", "blocks/README"):
        (lake.path / name).write_text("hello")
    assert read_everything(lake) == before
    assert stat(lake, full=True).damage == []
    shutil.rmtree(lake.path / "writing")
    with pytest.raises(EchoError, match="write"):
        LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))])
    Lake.create(lake.path)
    assert LakeWriter(lake).write([feed_rows(written("more", 3, party_key(8)))]) is not None


def test_everything_random_once_more(tmp_path: Path) -> None:
    """Random damage to random files of a lake: reading gives the right blocks or an error, and never other blocks."""
    lake = Lake.create(tmp_path / "lake")
    LakeWriter(lake).write(many_parties(3, 30))
    LakeWriter(lake).write([feed_rows(written("late", 30, party_key(7)))])
    good = set(read_everything(lake))
    random = Random(5)
    refused = 0
    paths = [each for each in lake.path.rglob("*") if each.is_file()]
    for _ in range(150):
        path = random.choice(paths)
        content = path.read_bytes()
        raw = bytearray(content)
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        path.write_bytes(raw)
        try:
            assert set(read_everything(lake)) == good
        except EchoError:
            refused += 1
        path.write_bytes(content)
    assert refused > 60
    assert set(read_everything(lake)) == good
