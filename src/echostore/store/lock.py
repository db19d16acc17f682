"""The exclusive lock of a home: one process writes it, and a second one is told at once who has it.

The lock is `flock` on an open file, so it ends with the process, however that ends; the pid and command inside are
for people. A stale file is therefore no obstacle. Readers take no lock: SQLite lets them read beside the writer.
"""

import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import Self

from echostore.kernel.errors import NOTHING_CHANGED, Locked
from echostore.store.durable_file import PRIVATE_FILE, file_error

HOLDER_BYTES_MAX = 4096


class HomeLock:
    """Held from construction until `release`, or until the process ends."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            raise file_error(error, f"lock {path}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise Locked(
                    f"{path.parent} is open in another process ({holder}).",
                    unchanged=NOTHING_CHANGED,
                    next_step="Close it there, use the running peer, or open it read-only.",
                    pid=_pid(holder),
                ) from None
            raise file_error(error, f"lock {path}") from error
        self._descriptor: int | None = descriptor
        # The file is never removed: a third process could lock the removed one while a fourth makes a new one.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}: {_command()}\n".encode("utf-8", "replace")[:HOLDER_BYTES_MAX], 0)

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        """Let the next process in; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _holder(descriptor: int) -> str:
    """Who wrote the file. The holder may be between locking and writing; then nobody is named."""
    text = os.pread(descriptor, HOLDER_BYTES_MAX, 0).decode("utf-8", "replace").strip()
    return text if text.startswith("pid ") else "pid not known yet"


def _pid(holder: str) -> int | None:
    number = holder.removeprefix("pid ").partition(":")[0]
    return int(number) if number.isdecimal() else None


def _command() -> str:
    """The program and its first word that is no option. The rest stays out: arguments may hold a passcode or a phrase."""
    words = sys.argv[1:]
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] == "--home" else words[1:]
    return " ".join([os.path.basename(sys.argv[0] or "python"), *words[:1]])
