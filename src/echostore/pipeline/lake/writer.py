"""LakeWriter: sorted rows in, one new version of the lake out.

    rows ──► control sink ──► blocks files ┐
         └─► data sink    ──► blocks files ┼─► runs files ──► one log entry
                                           ┘
Until the entry exists, nobody sees any of it. A writer that dies leaves files that no entry names; compaction collects
them when they are old.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import EchoError, Locked, StorageFailed, UsageError
from echostore.pipeline import schemas
from echostore.pipeline.lake import files, log
from echostore.pipeline.lake.layout import runs_name
from echostore.pipeline.lake.log import BlocksFile, Entry, RunsFile, State, Taken
from echostore.pipeline.lake.sinks import Sink
from echostore.pipeline.lake.versions import Lake, LakeVersion
from echostore.store.durable_file import file_error

COMMIT_TRIES_MAX = 256
"""Each lost try means that another writer succeeded, so this many in a row is a lake that is busy beyond reason."""
RUNS_KEPT_BYTES = 32 * 1024 * 1024
"""Runs files of this size are left alone when a whole state is written; smaller ones are put together."""

Still = Callable[[int, int], bool]
"""(version that the write was planned on, newest version now) -> whether the write still makes sense."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Files that are written and named, and not yet part of the lake."""

    adds: list[BlocksFile]
    runs: list[RunsFile]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.adds)


class LakeWriter:
    """Writes to one lake. `publisher` is told in the log, for people."""

    def __init__(self, lake: Lake, *, publisher: str = "") -> None:
        self.lake = lake
        self.publisher = publisher or socket.gethostname()

    def write(self, batches: Iterable[pa.RecordBatch], *, kind: str = "publish") -> Entry | None:
        """Add rows of `schemas.BLOCKS`, sorted by party, control first, feed and run. None when there are none.

        The first row of each run has `previous`; the others continue the row before them.
        """
        staged = self.stage(batches)
        return self.commit(staged, kind=kind) if staged.adds else None

    def stage(self, batches: Iterable[pa.RecordBatch]) -> Staged:
        """Write the files of some rows, durably; nobody sees them yet."""
        sinks = {True: Sink(self.lake.path, control=True), False: Sink(self.lake.path, control=False)}
        runs: list[RunsFile] = []
        with _told(f"write blocks to the lake {self.lake.path}"):
            try:
                for batch in batches:
                    for control, part in _by_kind(batch):
                        sinks[control].add(part)
                    if sum(len(table) for sink in sinks.values() for table in sink.runs) >= files.RUNS_FILE_ROWS:
                        runs += self._write_runs(sinks.values())
                for sink in sinks.values():
                    sink.finish()
                runs += self._write_runs(sinks.values())
            except BaseException:
                for sink in sinks.values():
                    sink.abandon()
                raise
        return Staged([each for sink in sinks.values() for each in sink.added], runs)

    def commit(
        self,
        staged: Staged,
        *,
        kind: str = "publish",
        removes: Sequence[str] = (),
        planned_on: int | None = None,
        still: Still | None = None,
    ) -> Entry | None:
        """Make staged files the next version.

        None when there is nothing to do: `still` says that what came in between makes it pointless, or files of just
        this content are in the lake already.
        """
        # What comes out just as it went in stays.
        removes = sorted(set(removes) - {each.file for each in staged.adds})
        for _ in range(COMMIT_TRIES_MAX):
            newest = self.lake.version()
            if still is not None and planned_on is not None and newest != planned_on and not still(planned_on, newest):
                return None
            state = log.state_at(self.lake.path, newest)
            staged = self._without(staged, {each.file for each in state.files})
            if not staged.adds and not removes:
                return None
            entry = self._entry(newest, state, staged, kind, removes)
            self._check_there(entry)
            with contextlib.suppress(Taken), _told(f"write to the lake {self.lake.path}"):
                log.create_entry(self.lake.path, entry)
                return entry
        raise Locked(
            f"The lake {self.lake.path} is written by others all the time; {COMMIT_TRIES_MAX} tries were in vain.",
            next_step="Try again when it is quieter.",
        )

    def _check_there(self, entry: Entry) -> None:
        """A compaction that was told to keep nothing may have taken files that lay here too long."""
        for each in entry.records():
            try:
                found = (self.lake.path / each.file).stat().st_size == each.bytes
            except OSError:
                found = False
            if not found:
                raise StorageFailed(
                    f"{self.lake.path / each.file} was written and is not there any more.",
                    unchanged="The lake is as it was.",
                    next_step="Run it again; see that no `lake compact --keep` with a short time runs beside it.",
                )

    def _without(self, staged: Staged, live: set[str]) -> Staged:
        """What is new of staged files: the same rows, written twice, are one file."""
        adds = [each for each in staged.adds if each.file not in live]
        if len(adds) == len(staged.adds):
            return staged
        with _told(f"write to the lake {self.lake.path}"):
            return Staged(adds, self._runs_files(LakeVersion(self.lake, 0, State(adds, staged.runs)).runs()))

    def _entry(self, newest: int, before: State, staged: Staged, kind: str, removes: Sequence[str]) -> Entry:
        previous = log.read_entry(self.lake.path, newest)[1] if newest else log.FIRST_PREVIOUS
        whole = (newest + 1) % log.STATE_EVERY == 0
        return Entry(
            format=log.FORMAT,
            version=newest + 1,
            previous=previous,
            kind=kind,
            adds=staged.adds,
            removes=list(removes),
            runs=staged.runs,
            created_ms=log.now_ms(),
            publisher=self.publisher,
            state=self._state(before, staged, removes) if whole else None,
        )

    def _state(self, before: State, staged: Staged, removes: Sequence[str]) -> State:
        """The whole state after an entry, with small runs files put together and runs of removed files dropped."""
        gone = set(removes)
        live = [each for each in before.files if each.file not in gone] + staged.adds
        kept = [each for each in (*before.runs, *staged.runs) if each.bytes >= RUNS_KEPT_BYTES]
        small = [each for each in (*before.runs, *staged.runs) if each.bytes < RUNS_KEPT_BYTES]
        runs = LakeVersion(self.lake, 0, State(live, small)).runs()
        with _told(f"write to the lake {self.lake.path}"):
            return State(live, kept + self._runs_files(runs))

    def _write_runs(self, sinks: Iterable[Sink]) -> list[RunsFile]:
        tables = [table for sink in sinks for table in sink.runs]
        for sink in sinks:
            sink.runs = []
        runs = pa.concat_tables([schemas.RUNS.empty_table(), *tables])
        return self._runs_files(runs.sort_by([("party", "ascending"), ("feed", "ascending"), ("start", "ascending")]))

    def _runs_files(self, runs: pa.Table) -> list[RunsFile]:
        """Write sorted runs to files of bounded size."""
        made = []
        for at in range(0, len(runs), files.RUNS_FILE_ROWS):
            part = runs.slice(at, files.RUNS_FILE_ROWS)
            file = files.HashedFile(self.lake.path)
            try:
                files.write_runs_table(file, part)
                sha256 = file.sha256
                file.keep(runs_name(sha256))
            except BaseException:
                file.drop()
                raise
            first, last = part["party"][0].as_py().hex(), part["party"][len(part) - 1].as_py().hex()
            made.append(RunsFile(runs_name(sha256), sha256, file.size, len(part), first, last))
        return made


def _by_kind(batch: pa.RecordBatch) -> Iterator[tuple[bool, pa.RecordBatch]]:
    """The control rows of a batch and its data rows, each in the order they had."""
    if not batch.schema.equals(schemas.BLOCKS, check_metadata=False):
        raise UsageError(f"rows of a lake have the columns {', '.join(schemas.BLOCKS.names)}, in that order and type")
    control = batch["control"]
    if not pc.any(control).as_py():
        yield False, batch
    elif pc.all(control).as_py():
        yield True, batch
    else:
        yield True, batch.filter(control)
        yield False, batch.filter(pc.invert(control))


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    """What the disk says while something is written, as an error that tells what stayed as it was."""
    try:
        yield
    except EchoError:
        raise
    except OSError as error:
        typed = file_error(error, doing)
        if isinstance(typed, StorageFailed):
            typed = StorageFailed(
                typed.what,
                unchanged="The lake is as it was; files that were begun are collected by `lake compact`.",
                next_step=typed.next_step,
            )
        raise typed from error
