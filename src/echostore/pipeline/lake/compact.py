"""compact: many small files become few large ones, and files that nobody needs any more are deleted.

    before   ▂▂▂▂▂▂▂▂ one small file per publish          after   █ sorted by party, runs joined

One round takes as many small files as fit into memory and replaces them in one log entry. A reader of an older version
keeps its files: what a compaction replaced is deleted by a later one, when it is older than `keep_s`. So is what a
publisher left behind that died before its entry.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.pipeline import schemas
from echostore.pipeline.lake import files, log
from echostore.pipeline.lake.layout import BLOCKS_FOLDER, RUNS_FOLDER, WRITING, path_of
from echostore.pipeline.lake.reading import check_file, forget_files, read_rows
from echostore.pipeline.lake.versions import Lake, LakeVersion
from echostore.pipeline.lake.writer import LakeWriter
from echostore.store.durable_file import file_error

SMALL_BYTES = files.FILE_BYTES // 2
"""Rows of a file, before compression, below which it is worth merging."""
ROUND_BYTES = 2 * files.FILE_BYTES
"""Rows of one round, which are in memory together."""
KEEP_S = 24 * 3600.0
"""How long a reader may hold on to an old version, by default."""
UNNAMED_S = 6 * 3600.0
"""A file that no entry names may be on its way: it is left alone for so long, whatever `keep_s` says."""
ROUNDS_MAX = 10_000

Tell = Callable[[int, int], None]


@dataclass(slots=True)
class Compacted:
    """What a compaction did."""

    version: int
    files_before: int
    files_after: int = 0
    rounds: int = 0
    duplicates: int = 0
    """Blocks that were there twice, and once now."""
    deleted_files: int = 0
    deleted_bytes: int = 0


def compact(lake: Lake, *, keep_s: float = KEEP_S, publisher: str = "", tell: Tell | None = None) -> Compacted:
    """Merge small files, then delete what no version of the last `keep_s` seconds needs."""
    done = Compacted(lake.version(), len(lake.at().files))
    for _ in range(ROUNDS_MAX):
        at = lake.at()
        small = _small(at)
        if tell:
            tell(done.rounds, done.rounds + (1 if small else 0))
        if not small:
            break
        _merge(lake, at, small, publisher, done)
    done.version = lake.version()
    done.files_after = len(lake.at().files)
    forget_files()
    _collect(lake, keep_s, done)
    return done


def dead_files(lake: Lake, keep_s: float) -> Iterator[tuple[Path, int]]:
    """Files that no version of the last `keep_s` seconds names, and that are as old, with their sizes."""
    needed = _needed(lake, keep_s)
    named = _named(lake) if keep_s < UNNAMED_S else set()
    now = time.time()
    for folder in (lake.path / RUNS_FOLDER, *sorted((lake.path / BLOCKS_FOLDER).iterdir()), lake.path / WRITING):
        if not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(lake.path).as_posix()
                if name in needed or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another compaction was faster
                if found.st_mtime <= now - (keep_s if name in named else max(keep_s, UNNAMED_S)):
                    yield Path(entry.path), found.st_size


# merging


def _small(at: LakeVersion) -> list[log.BlocksFile]:
    """Files to merge in one round: of one kind, at least two, as many as fit."""
    weights = _weights(at)
    for control in (True, False):
        mine = [each for each in at.files if each.control == control and weights.get(each.file, 0) < SMALL_BYTES]
        chosen: list[log.BlocksFile] = []
        total = 0
        for each in sorted(mine, key=lambda file: weights.get(file.file, 0)):
            total += weights.get(each.file, 0)
            if total > ROUND_BYTES:
                break
            chosen.append(each)
        if len(chosen) > 1:
            return chosen
    return []


def _weights(at: LakeVersion) -> dict[str, int]:
    sums = at.runs().group_by("file").aggregate([("bytes", "sum")])
    return dict(zip(sums["file"].to_pylist(), sums["bytes_sum"].to_pylist(), strict=True))


def _merge(lake: Lake, at: LakeVersion, small: list[log.BlocksFile], publisher: str, done: Compacted) -> None:
    for each in small:
        # Nothing is deleted for good on the word of a file that is not what the log says.
        wrong = check_file(lake.path, each.file, each.sha256, each.bytes)
        if wrong is not None:
            raise Corrupt(
                f"{path_of(lake.path, each.file)} is damaged: {wrong}.",
                next_step="Restore the file, or publish the homes again into a new lake.",
            )
    names = [each.file for each in small]
    runs = at.runs()
    runs = runs.filter(pc.is_in(runs["file"], value_set=pa.array(names)))
    table, duplicates = merged(lake.path, runs, {each.file: each.rows for each in small})
    writer = LakeWriter(lake, publisher=publisher)
    staged = writer.stage(table.to_batches())

    def still(_: int, newest: int) -> bool:
        live = {each.file for each in log.state_at(lake.path, newest).files}
        return live.issuperset(names)

    if writer.commit(staged, kind="compact", removes=names, planned_on=at.version, still=still) is not None:
        done.rounds += 1
        done.duplicates += duplicates


def merged(lake: Path, runs: pa.Table, rows_of: dict[str, int]) -> tuple[pa.Table, int]:
    """The rows of some runs in the order of the lake, adjacent runs joined, equal runs once; and how many rows were twice."""
    bases: dict[str, int] = {}
    parts: list[pa.RecordBatch] = []
    total = 0
    for name, rows in rows_of.items():
        bases[name] = total
        parts += read_rows(lake, name, 0, rows)
        total += rows
    kept: list[dict[str, int]] = []
    joined: list[bool] = []
    ordered, duplicates = _chained(runs.to_pylist())
    for run, follows in ordered:
        kept.append({"from": bases[run["file"]] + run["row"], "count": run["end"] - run["start"]})
        joined.append(follows)
    places = np.concatenate([np.arange(run["from"], run["from"] + run["count"]) for run in kept])
    table = pa.Table.from_batches(parts, schemas.BLOCKS).combine_chunks().take(pa.array(places))
    firsts = np.cumsum([0, *(run["count"] for run in kept[:-1])])[np.array(joined, bool)]
    keep = np.ones(len(table), bool)
    keep[firsts] = False
    for name in ("previous", "previous_depth"):
        at = schemas.BLOCKS.get_field_index(name)
        field = schemas.BLOCKS.field(name)
        table = table.set_column(at, field, pc.if_else(pa.array(keep), table[name], pa.scalar(None, field.type)))
    return table, duplicates


def _chained(runs: list[dict[str, Any]]) -> tuple[list[tuple[dict[str, Any], bool]], int]:
    """Sorted runs, each behind the one that it follows where there is one, and whether it does; equal runs once.

    Branches would lie between the pieces of the branch that they leave; what follows its piece goes before them.
    """
    ordered: list[tuple[dict[str, Any], bool]] = []
    duplicates = 0
    for _, group in groupby(runs, key=lambda run: (run["party"], run["control"], run["feed"])):
        seen: set[tuple[int, int, bytes]] = set()
        waiting: dict[tuple[int, bytes], list[dict[str, Any]]] = {}
        order: list[dict[str, Any]] = []
        for run in group:
            if (run["start"], run["end"], run["last_link"]) in seen:
                duplicates += run["end"] - run["start"]
                continue
            seen.add((run["start"], run["end"], run["last_link"]))
            waiting.setdefault((run["start"], run["previous"]), []).append(run)
            order.append(run)
        for run in order:
            same = waiting[run["start"], run["previous"]]
            if not same or same[0] is not run:
                continue  # taken behind the run that it follows
            next_run, follows = same.pop(0), False
            while True:
                ordered.append((next_run, follows))
                behind = waiting.get((next_run["end"], next_run["last_link"]))
                if not behind:
                    break
                next_run, follows = behind.pop(0), True
    return ordered, duplicates


# collecting


def _needed(lake: Lake, keep_s: float) -> set[str]:
    """Every file that is live now or was in a version of the last `keep_s` seconds."""
    since = log.now_ms() - int(keep_s * 1000)
    newest = at = lake.version()
    needed: set[str] = set()
    while at > 0:
        entry, _ = log.read_entry(lake.path, at)
        if entry.created_ms < since:
            break
        needed.update(each.file for each in entry.records())
        at -= 1
    for version in {at, newest}:
        state = log.state_at(lake.path, version)
        needed.update(each.file for each in state.files)
        needed.update(each.file for each in state.runs)
    return needed


def _named(lake: Lake) -> set[str]:
    """Every file that any entry ever named."""
    entries = (log.read_entry(lake.path, version)[0] for version in range(1, lake.version() + 1))
    return {each.file for entry in entries for each in entry.records()}


def _collect(lake: Lake, keep_s: float, done: Compacted) -> None:
    try:
        for path, size in dead_files(lake, keep_s):
            # A publisher may just now bring a file of the same content: moved aside first, then looked at again.
            aside = lake.path / WRITING / f"{path.name}.dead"
            os.rename(path, aside)
            if aside.stat().st_mtime > time.time() - keep_s:
                os.rename(aside, path)
                continue
            aside.unlink()
            done.deleted_files += 1
            done.deleted_bytes += size
    except OSError as error:
        raise file_error(error, f"delete old files of {lake.path}") from error
