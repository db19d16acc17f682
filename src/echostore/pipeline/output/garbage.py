"""Collecting what no commit will ever name: lost attempts, files of tasks that ran twice, remains of crashed writers.

    the number of the attempt is committed     by it       what its commit does not name, once it is old
                                               by another  all of it, once it is old: it can't commit any more
    the number is still free                   leased      nothing: its driver lives
                                               no lease    all of it, once it is old, and `collect` is decided

Files that a commit carries on were named by the commit of their own number, so that one record tells about them all.
An attempt that decided to commit and did not come back may still publish, and is left alone until its number is taken.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from echostore.kernel.errors import Corrupt
from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import COLLECT, COMMIT, create_exclusive
from echostore.pipeline.output.files import Step, no_step
from echostore.pipeline.output.layout import (
    DECISION,
    LEASE,
    STAGED_PREFIX,
    attempt_id,
    epoch_number,
    numbered,
)
from echostore.store.durable_file import file_error

AGE_S = 24 * 3600.0
"""Younger remains are left: a task of a job that was given up may still be writing."""


@dataclass(slots=True)
class Collected:
    """What was removed."""

    attempts: int = 0
    files: int = 0
    bytes: int = 0


def collect(out: Path, *, age_s: float = AGE_S, now_s: float | None = None, step: Step = no_step) -> Collected:
    """Remove garbage that has not been touched for `age_s` seconds."""
    now = time.time() if now_s is None else now_s
    removed = Collected()
    try:
        # The commits are listed after the epochs: an epoch that is seen here and committed meanwhile is known as such.
        epochs = sorted(number for number in map(epoch_number, _names(out)) if number is not None)
        for number in epochs:
            for name in _names(out / f"epoch={number}"):
                attempt = attempt_id(name)
                if attempt is not None:
                    folder = out / f"epoch={number}" / name
                    _collect_attempt(out, number, attempt, folder, now - age_s, removed, step)
        for name in _names(out):
            if name.startswith(STAGED_PREFIX) and _touched(out / name) <= now - age_s and not _leased(out / name):
                _remove_folder(out / name, removed)
    except OSError as error:
        raise file_error(error, f"collect garbage in {out}") from error
    return removed


def _collect_attempt(
    out: Path, number: int, attempt: UUID, folder: Path, before_s: float, removed: Collected, step: Step
) -> None:
    step("look")
    last = numbered(out)
    committed = bool(last) and number <= last[-1]
    if committed:
        commit, _ = reading.load(out, number)
        if commit.attempt == attempt:
            named = {out / path for path in commit.named()}
            keep = {folder / LEASE, folder / DECISION}
            for path in list(_files(folder)):
                if path not in named and path not in keep and _age_of(path) <= before_s:
                    step("remove file")
                    _remove_file(path, removed)
            return
    if _touched(folder) > before_s or _leased(folder):
        return
    if not committed and not _decided_to_collect(folder, step):
        return
    step("remove attempt")
    _remove_folder(folder, removed)


def _remove_folder(folder: Path, removed: Collected) -> None:
    for path in list(_files(folder)):
        if path.name != DECISION:
            _remove_file(path, removed)
    # The decision goes last: as long as anything of the attempt is there, it can be read that it was given up.
    try:
        shutil.rmtree(folder)
    except OSError:
        return  # a task of the dead attempt still writes here: the next collection finds it
    removed.attempts += 1


def _decided_to_collect(folder: Path, step: Step) -> bool:
    """Whether the attempt can't commit any more: `collect` stands in its decision, by this call or an earlier one."""
    path = folder / DECISION
    try:
        step("decide")
        create_exclusive(path, COLLECT, step=step)
    except FileExistsError:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return False  # somebody else is removing it
        if content not in (COMMIT, COLLECT):
            raise Corrupt(f"{path} holds neither decision", next_step="Remove the attempt by hand.") from None
        return content == COLLECT
    except FileNotFoundError:
        return False
    return True


def _leased(folder: Path) -> bool:
    """Whether the driver of an attempt lives. The lock goes with its process, however that ends."""
    try:
        descriptor = os.open(folder / LEASE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _touched(folder: Path) -> float:
    """When anything in a folder was last written."""
    return max([_age_of(folder), *(_age_of(path) for path in _files(folder))])


def _age_of(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_file(path: Path, removed: Collected) -> None:
    with contextlib.suppress(FileNotFoundError):
        size = path.stat(follow_symlinks=False).st_size
        path.unlink()
        removed.files += 1
        removed.bytes += size


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            yield Path(root, name)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
