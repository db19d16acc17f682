"""Committers for the tests of the commit: a driver that writes two small files and commits them."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import Attempt
from echostore.pipeline.output.files import checked_path, read_table
from echostore.pipeline.output.record import Commit, LakePoint, StageTime

SCHEMA = pa.schema([("writer", pa.string()), ("number", pa.int64())])
LAKE = LakePoint(7, "ab" * 32)


def rows(writer: str, count: int = 3) -> list[pa.RecordBatch]:
    return [pa.record_batch([[writer] * count, list(range(count))], schema=SCHEMA)]


def drive(
    out: Path, writer: str, step: Callable[[str], None], *, forget_lease: bool = False, now_ms: int = 1
) -> Commit:
    """One run: an attempt on top of the newest commit, whose `items` are replaced and whose `log` grows."""
    with Attempt.begin(out, now_ms=now_ms, step=step) as attempt:
        if forget_lease:
            attempt.release()
        items = attempt.write("items", SCHEMA, rows(writer))
        log = attempt.write("log", SCHEMA, rows(writer, 1))
        carried = () if attempt.base is None else attempt.base.files["log"]
        return attempt.commit(
            files={"items": items, "log": (*carried, *log)}, lake=LAKE, stages=(StageTime("all", 4, 0.5),)
        )


def seen(out: Path) -> int:
    """The number of the newest commit, of which every file is there with its hash."""
    commit, _ = reading.newest(out)
    if commit is None:
        return 0
    for files in commit.files.values():
        for file in files:
            checked_path(out, file)
    return commit.number


def read_whole(out: Path) -> list[str]:
    """The writers of all commits up to the newest, by what its files hold; checks that nothing of them is missing."""
    if not seen(out):
        return []
    commit, _ = reading.newest(out)
    assert commit is not None
    log = [str(read_table(out, file, SCHEMA).column("writer")[0]) for file in commit.files["log"]]
    items = [read_table(out, file, SCHEMA) for file in commit.files["items"]]
    assert len(log) == commit.number, "the log has one file for each commit"
    assert [table.num_rows for table in items] == [3], "the items are those of one whole run"
    assert set(items[0].column("writer").to_pylist()) <= set(log)
    return log
