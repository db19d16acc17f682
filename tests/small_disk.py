"""A disk with little space, as tests of full disks use it: a real limit that the operating system enforces.

    tmpfs         a file system of a mebibyte, mounted for one test
    file size     no file of a process may grow beyond a size (RLIMIT_FSIZE); the limit can be given to other processes

Where mounting is not permitted the first kind says so on standard error and uses the second limit: nothing is skipped.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 1024 * 1024
KINDS = ("tmpfs", "file size")


class SmallDisk:
    """A folder in which the space can be used up and given back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int, *, process: int = 0) -> None:
        """Leave so many bytes for what feeds append to; for the process with that id where the limit is one of processes."""
        raise NotImplementedError

    def free(self, *, process: int = 0) -> None:
        """Give all of it back."""
        raise NotImplementedError


class _Mounted(SmallDisk):
    def fill(self, left: int, *, process: int = 0) -> None:
        space = os.statvfs(self.path)
        with (self.path / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, space.f_bavail * space.f_frsize - left))

    def free(self, *, process: int = 0) -> None:
        (self.path / "filler").unlink()


class _Limited(SmallDisk):
    def fill(self, left: int, *, process: int = 0) -> None:
        logs = list(self.path.rglob("feeds.db-wal")) or [file for file in self.path.rglob("*") if file.is_file()]
        self._limit(process, max(file.stat().st_size for file in logs) + left)

    def free(self, *, process: int = 0) -> None:
        self._limit(process, resource.RLIM_INFINITY)

    def _limit(self, process: int, size: int) -> None:
        _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))


@contextmanager
def small_disk(folder: Path, kind: str) -> Iterator[SmallDisk]:
    """A small disk below `folder`; what it limits ends with the block."""
    path = folder / "disk"
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if kind == "tmpfs":
        try:
            subprocess.run(mounting, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            print(f"no tmpfs can be mounted here ({why.strip()}): RLIMIT_FSIZE is used instead", file=sys.stderr)  # noqa: T201
            kind = "file size"
    if kind == "file size":
        limited = _Limited(path)
        try:
            yield limited
        finally:
            limited.free()
        return
    try:
        yield _Mounted(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
