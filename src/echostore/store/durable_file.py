"""Small private files that survive a crash whole: written beside, synced, renamed over, folder synced.

Used for the key store and the instance record. A reader sees the old bytes or the new ones, never a mixture; when
`replace` returns, the new ones survive a power cut. Nothing here follows a symbolic link in the last step of a path.
"""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from echostore.kernel.errors import Corrupt, DiskFull, EchoError, Refused, StorageFailed, UsageError

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when there is no space, a quota is used up, or the process may write no larger file."""

PROBE_BYTES = 64 * 1024
"""More than any single write of SQLite asks for: a page, or a piece of the index of its log."""


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """The content of a small file. FileNotFoundError passes through: whether that is a fault is the caller's to say."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise Corrupt(f"{path} is larger than the {bytes_max} bytes it can ever need.")
    return content


class Replacement:
    """New content for `path`, written and synced beside it but not yet in its place.

    Two steps, because the inode is known after the first: the instance record holds its own inode number.
    """

    __slots__ = ("_temporary", "descriptor", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".new")
        # A leftover of a crashed writer is removed, not opened: it could be a link to somewhere else by now.
        self._temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(self._temporary, flags, PRIVATE_FILE)

    def write(self, content: bytes) -> None:
        """Write and sync, once. An error here is final: a failed fsync is never asked again on the same file."""
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(self.descriptor, view) :]
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)

    def commit(self) -> None:
        os.rename(self._temporary, self.path)
        sync_folder(self.path.parent)


def replace(path: Path, content: bytes) -> None:
    """Give `path` this content atomically and durably, readable by its owner alone."""
    replacement = Replacement(path)
    replacement.write(content)
    replacement.commit()


def open_private(path: Path) -> BinaryIO:
    """A new file for content that is its owner's alone, in the place of whatever was there."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb")


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lacks_space(folder: Path, size: int) -> bool:
    """Whether a file in `folder` of `size` bytes can't grow by PROBE_BYTES: no space, no quota, or not so large a file.

    Asked by trying: the number of free blocks says nothing of quotas and limits.
    """
    probe = folder / f".space-probe-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        return error.errno in NO_SPACE
    try:
        os.ftruncate(descriptor, size)  # takes no space
        written = 0
        while written < PROBE_BYTES:
            written += os.pwrite(descriptor, bytes(PROBE_BYTES - written), size + written)
        os.fsync(descriptor)  # some file systems find out only now
    except OSError as error:
        return error.errno in NO_SPACE
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
    return False


def make_folder(folder: Path) -> None:
    """Make one private folder whose name survives a crash; an existing real folder is left as it is."""
    try:
        os.mkdir(folder, PRIVATE_FOLDER)
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            raise Refused(
                f"{folder} should be a folder of its own, and is a link or a file.", next_step="Move it away."
            ) from None
        return
    sync_folder(folder.parent)


def file_error(error: OSError | ValueError, doing: str) -> EchoError:
    """The typed error for what the operating system said while `doing` (a phrase like 'open the home /x')."""
    if isinstance(error, ValueError):
        return UsageError(f"Can't {doing}: {error}.")
    reason = error.strerror or str(error)
    if error.errno in NO_SPACE:
        return DiskFull(f"Can't {doing}: {reason}.", next_step="Free space and try again.")
    if error.errno == errno.EIO:
        return StorageFailed(f"Can't {doing}: {reason}.", next_step="Repair the disk, then try again.")
    if error.errno == errno.EROFS:
        return StorageFailed(
            f"Can't {doing}: {reason}.",
            next_step="Commands that only read work there; to write, copy the home to a disk that takes writes.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused(f"Can't {doing}: {reason}.", next_step="Check owner and mode of the path.")
    if error.errno == errno.ELOOP:
        return Refused(f"Can't {doing}: it is a symbolic link.", next_step="Replace the link with the real file.")
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EEXIST):
        return UsageError(f"Can't {doing}: {reason}.", next_step="Name another path.")
    return StorageFailed(f"Can't {doing}: {reason}.")
