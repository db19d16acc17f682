"""Reading an output: the chain of commits, and what the newest one names. Takes no lock and changes nothing.

A reader holds one commit and opens only files that it names, so what a run does meanwhile is invisible to it. Every
file is compared with its hash before a row of it is believed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echostore.kernel.errors import Corrupt, NotFound
from echostore.pipeline.output.files import checked_path
from echostore.pipeline.output.layout import COMMITS, commit_name, numbered
from echostore.pipeline.output.record import RECORD_BYTES_MAX, Commit, NamedFile, decode, digest
from echostore.store.durable_file import file_error, read_bounded


def newest(out: Path) -> tuple[Commit | None, str]:
    """The newest commit and the hash of its record; None and nothing when there is none yet."""
    numbers = numbered(out)
    if not numbers:
        return None, ""
    commit, own = load(out, numbers[-1])
    if commit.number > 1:
        _, before = load(out, commit.number - 1)
        _check_follows(commit, before)
    return commit, own


def load(out: Path, number: int) -> tuple[Commit, str]:
    """One commit by its number, and the hash of its record."""
    path = out / COMMITS / commit_name(number)
    try:
        content = read_bounded(path, RECORD_BYTES_MAX)
    except FileNotFoundError:
        if numbered(out) and number < numbered(out)[-1]:
            raise Corrupt(f"{path} is missing, and later commits build on it") from None
        raise NotFound(f"there is no commit {number} in {out}") from None
    except OSError as error:
        raise file_error(error, f"read {path}") from error
    commit = decode(content, str(path))
    if commit.number != number:
        raise Corrupt(f"{path} holds commit {commit.number}")
    return commit, digest(content)


def commits(out: Path, *, last: int | None = None) -> Iterator[Commit]:
    """The commits, newest first, each checked against the one after it."""
    following: Commit | None = None
    for number in reversed(numbered(out)[-(last or 0) :]):
        commit, own = load(out, number)
        if following is not None:
            _check_follows(following, own)
        yield commit
        following = commit


@dataclass(frozen=True, slots=True)
class Broken:
    """A named file that is not what its commit says."""

    path: str
    problem: str


def verify(out: Path) -> list[Broken]:
    """Check the whole chain and every byte that any commit names. Corrupt when the chain itself is broken."""
    found: dict[str, Broken] = {}
    seen: set[NamedFile] = set()
    for commit in commits(out):
        for files in commit.files.values():
            for file in files:
                if file not in seen:
                    seen.add(file)
                    try:
                        checked_path(out, file)
                    except Corrupt as error:
                        found[file.path] = Broken(file.path, error.what)
    return [found[path] for path in sorted(found)]


def _check_follows(commit: Commit, before: str) -> None:
    if commit.previous != before:
        raise Corrupt(
            f"commit {commit.number} follows a commit {commit.number - 1} with the hash {commit.previous[:16]}, "
            f"and the one that is here has {before[:16]}",
            next_step="Restore the folder commits from a copy, or run the pipeline into a new folder.",
        )
