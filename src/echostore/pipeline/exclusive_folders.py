"""Which folders can hold a lake or an output: those of file systems on which a name can be taken once and for all.

A version of a lake and a commit are each one file that is created only if there is none. That is a hard link here. Object
stores have conditional puts instead, which this program does not speak: it refuses their addresses, and mounts that have
no hard links, before any work is done.
"""

import errno
import os
import re
import uuid
from pathlib import Path

from echostore.kernel.errors import Refused, UsageError
from echostore.store.durable_file import file_error

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV})


def check_folder(path: str | os.PathLike[str], what: str) -> None:
    """Refuse the address of a store where a folder is meant. `what` is one word for it."""
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise UsageError(
            f"{text} is an address, and the {what} is a folder of a file system.",
            next_step="Keep it on a file system that all workers see, such as NFS, and copy finished commits to the store.",
        )


def check_links(folder: Path) -> None:
    """Refuse a folder of a file system that has no hard links. The folder is there already, and left as it was."""
    probe = folder / f".links-{uuid.uuid4().hex}"
    second = probe.with_suffix(".second")
    try:
        probe.touch(exist_ok=False)
        os.link(probe, second)
    except OSError as error:
        if error.errno in _NO_LINKS and probe.exists():
            raise Refused(
                f"{folder} is on a file system without hard links ({error.strerror}), on which nothing can be committed "
                "exactly once.",
                next_step="Name a folder on a local disk or on NFS.",
            ) from error
        raise file_error(error, f"write into {folder}") from error
    finally:
        for name in (second, probe):
            name.unlink(missing_ok=True)
