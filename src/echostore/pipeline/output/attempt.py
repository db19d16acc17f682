"""An attempt at one commit: a folder of its own, a lease while its driver lives, and one exclusive step at the end.

    begin    folder and lease                      files    written by tasks, synced, named by hash
    commit   decision `commit`, once               then commits/N.json by a hard link, which fails if it is there

Two drivers may work on the same number: both write, one links. The other finds the number taken and loses nothing but
its work. An attempt whose driver died is collected by somebody who put `collect` into its decision first; a driver
that was only slow and wakes later finds that, and loses too.
"""

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from echostore.kernel.errors import Corrupt, EchoError
from echostore.pipeline.exclusive_folders import check_folder, check_links
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import Step, no_step, write_file
from echostore.pipeline.output.layout import COMMITS, DECISION, LEASE, STAGED_PREFIX, attempt_folder, commit_name
from echostore.pipeline.output.record import Commit, CommitLost, LakePoint, NamedFile, StageTime, collected, encode
from echostore.store.durable_file import PRIVATE_FILE, PRIVATE_FOLDER, file_error, sync_folder

COMMIT, COLLECT = b"commit\n", b"collect\n"
"""What a decision holds."""


class Attempt:
    """The work on one commit, by one driver. Use it as a context: leaving it gives the lease back."""

    def __init__(self, out: Path, base: Commit | None, base_digest: str, *, now_ms: int, step: Step = no_step) -> None:
        self.out = out
        self.base = base
        self.base_digest = base_digest
        self.number = 1 if base is None else base.number + 1
        self.id = uuid.uuid4()
        self.created_ms = now_ms
        self.folder = attempt_folder(self.number, self.id)
        """Relative to the output folder; with it a task can write."""
        self.committed: Commit | None = None
        self._step = step
        self._lease = -1

    @staticmethod
    def begin(out: Path, *, now_ms: int | None = None, step: Step = no_step) -> "Attempt":
        """An attempt at the commit after the newest one."""
        base, base_digest = reading.newest(out)
        attempt = Attempt(
            out, base, base_digest, now_ms=time.time_ns() // 1_000_000 if now_ms is None else now_ms, step=step
        )
        attempt._take_lease()
        return attempt

    def _take_lease(self) -> None:
        # The folder appears with its lease already taken: nobody ever sees an attempt whose driver seems dead.
        check_folder(self.out, "output")
        staged = self.out / f"{STAGED_PREFIX}{self.id.hex}"
        where = self.out / self.folder
        try:
            self._step("make folder")
            (self.out / COMMITS).mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            where.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            check_links(self.out / COMMITS)
            staged.mkdir(mode=PRIVATE_FOLDER)
            self._lease = os.open(staged / LEASE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
            fcntl.flock(self._lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lease, json.dumps({"pid": os.getpid(), "created_ms": self.created_ms}).encode() + b"\n")
            self._step("show folder")
            os.rename(staged, where)
            for folder in (where.parent, self.out):
                sync_folder(folder)
        except EchoError:
            raise
        except OSError as error:
            raise file_error(error, f"begin an attempt below {self.out}") from error

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the lease back; without a commit, the attempt is garbage from now on."""
        if self._lease >= 0:
            os.close(self._lease)
            self._lease = -1

    # files

    def write(self, kind: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[NamedFile, ...]:
        """Write one file here, on the driver; for what is small."""
        file = write_file(self.out, self.folder, kind, schema, batches, step=self._step)
        return () if file is None else (file,)

    # the commit

    def commit(
        self,
        *,
        files: Mapping[str, Iterable[NamedFile]],
        lake: LakePoint,
        stages: Iterable[StageTime] = (),
        settings: Mapping[str, Any] | None = None,
        totals: Mapping[str, int] | None = None,
    ) -> Commit:
        """Make these files the output. CommitLost when another attempt was first; then nothing has changed."""
        commit = Commit(
            number=self.number,
            previous=self.base_digest,
            attempt=self.id,
            created_ms=self.created_ms,
            lake=lake,
            files={
                kind: tuple(sorted(set(named), key=lambda file: file.path)) for kind, named in sorted(files.items())
            },
            stages=tuple(stages),
            settings=dict(settings or {}),
            totals=dict(totals or {}),
        )
        self._check_files(commit)
        content = encode(commit)
        try:
            self._decide()
            self._publish(content)
        except EchoError:
            raise
        except OSError as error:
            raise file_error(error, f"commit to {self.out}") from error
        self.committed = commit
        return commit

    def _check_files(self, commit: Commit) -> None:
        """New files are this attempt's and are there; the others come from the commit before (invariants 2 and 3)."""
        carried = set() if self.base is None else self.base.named()
        own = self.folder + "/"
        for files in commit.files.values():
            for file in files:
                if file.path.startswith(own):
                    try:
                        size = os.stat(self.out / file.path).st_size
                    except OSError as error:
                        if not (self.out / self.folder / LEASE).exists():
                            raise collected(self.number) from None
                        raise Corrupt(f"{file.path} was written and can't be found: {error.strerror}") from error
                    if size != file.bytes:
                        raise Corrupt(f"{file.path} was written with {file.bytes} bytes and has {size}")
                else:
                    assert file.path in carried, (
                        f"{file.path} is neither of this attempt nor of commit {commit.number - 1}"
                    )

    def _decide(self) -> None:
        self._step("decide")
        try:
            create_exclusive(self.out / self.folder / DECISION, COMMIT, step=self._step)
        except FileExistsError:
            raise collected(self.number) from None
        except FileNotFoundError:
            raise collected(self.number) from None

    def _publish(self, content: bytes) -> None:
        self._step("publish")
        try:
            name = commit_name(self.number)
            create_exclusive(self.out / COMMITS / name, content, below=self.out / self.folder, step=self._step)
        except (FileExistsError, FileNotFoundError):
            # Where the attempt is gone, its number was taken: before that nobody collects one that has decided.
            raise CommitLost(self.number, "another run made it first") from None
        self._step("published")


def create_exclusive(path: Path, content: bytes, *, below: Path | None = None, step: Step = no_step) -> None:
    """Make a file that appears with its whole content or not at all, and only if there is none; FileExistsError if
    there is. It is written below another folder of the same disk first. When it returns, it survives a power cut."""
    temporary = (below or path.parent) / f".{path.name}.{uuid.uuid4().hex}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        step(f"link {path.name}")
        os.link(temporary, path)
        step(f"linked {path.name}")
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
