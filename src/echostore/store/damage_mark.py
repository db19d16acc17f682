"""The mark beside an items.db that is damaged: it survives the process, and the next writing open heeds it."""

from pathlib import Path

DAMAGE_MARK = ".damaged"
"""Ends the name of the empty file that says: do not use what stands beside it."""


def mark_damaged(path: Path) -> None:
    """Say of an items.db that it is not to be used: the next writing open makes it anew."""
    path.with_name(path.name + DAMAGE_MARK).touch()


def is_marked(path: Path) -> bool:
    return path.with_name(path.name + DAMAGE_MARK).exists()


def discard(path: Path) -> None:
    """Remove an items.db, its log, and the mark last: a crash in between leaves the mark."""
    for suffix in ("", "-wal", "-shm", DAMAGE_MARK):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
