"""The commit record <-> its JSON. One form of bytes for one record, because its hash is in the next one."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from uuid import UUID

from echostore.kernel.errors import Corrupt, Refused
from echostore.pipeline.output.layout import is_kind, parse_file

FORMAT: Final = 4

RECORD_BYTES_MAX: Final = 256 * 1024 * 1024
"""About a million files. A record beyond that is damage, and reading it would fill the memory."""


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that is there, by content. Paths are relative to the output folder."""

    path: str
    sha256: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class StageTime:
    """What one stage did: rows out, seconds of wall time."""

    name: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LakePoint:
    """Which lake was read, up to which entry of its log."""

    version: int
    entry: str
    """SHA-256 of that entry: another lake with the same number of entries is not mistaken for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit: all that is live after it, whoever wrote it."""

    number: int
    previous: str
    """SHA-256 of the record before; empty for the first."""
    attempt: UUID
    created_ms: int
    lake: LakePoint
    files: dict[str, tuple[NamedFile, ...]]
    """Kind -> files, new ones and those carried on."""
    stages: tuple[StageTime, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """What the run was told (parties, anchor, models, tables): the next run reads from it what it may build on."""
    totals: dict[str, int] = field(default_factory=dict)
    """Sums over the parties."""

    def named(self) -> set[str]:
        """The paths of all files."""
        return {file.path for files in self.files.values() for file in files}


class CommitLost(Refused):
    """Somebody else made the commit of this number, or the attempt was collected. Nothing of it is visible."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(
            f"commit {number} was not made: {why}",
            unchanged="The output is as the other one left it; nothing of this attempt is visible.",
            next_step="Run again: it goes on from the newest commit, and costs what is new since then.",
        )
        self.number = number


def collected(number: int) -> CommitLost:
    """How an attempt is told that it was collected."""
    return CommitLost(number, "the attempt was given up for dead and collected")


def encode(commit: Commit) -> bytes:
    """The one JSON of a commit."""
    document = {
        "format": FORMAT,
        "number": commit.number,
        "previous": commit.previous,
        "attempt": commit.attempt.hex,
        "created_ms": commit.created_ms,
        "lake": asdict(commit.lake),
        "files": {kind: [asdict(file) for file in files] for kind, files in commit.files.items()},
        "stages": [asdict(stage) for stage in commit.stages],
        "settings": commit.settings,
        "totals": commit.totals,
    }
    return (json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def decode(content: bytes, name: str) -> Commit:
    """The commit that these bytes are; Corrupt, naming the file, when `encode` would not have written them."""
    try:
        document = json.loads(content)
        if document["format"] != FORMAT:
            older = isinstance(document["format"], int) and document["format"] < FORMAT
            build = "Build into a new folder: the lake has everything that is needed"
            raise Corrupt(
                f"{name} is a commit of format {document['format']}, this program reads {FORMAT}",
                next_step=f"{build}." if older else "Use the echostore that wrote it, or a newer one.",
            )
        commit = Commit(
            number=document["number"],
            previous=document["previous"],
            attempt=UUID(document["attempt"]),
            created_ms=document["created_ms"],
            lake=LakePoint(**document["lake"]),
            files={kind: tuple(NamedFile(**file) for file in files) for kind, files in document["files"].items()},
            stages=tuple(StageTime(**stage) for stage in document["stages"]),
            settings=document["settings"],
            totals=document["totals"],
        )
        problem = "" if encode(commit) == content else "is not in its one form"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(name, f"can't be read ({type(error).__name__}: {str(error)[:120]})") from error
    problem = problem or _problem(commit)
    if problem:
        raise _damaged(name, problem)
    return commit


def _problem(commit: Commit) -> str:
    """What is wrong with a record that has the right form; empty when nothing is."""
    seen: set[str] = set()
    for kind, files in commit.files.items():
        if not is_kind(kind):
            return f"names a kind of files {kind[:40]!r}"
        for file in files:
            parsed = parse_file(file.path)
            if parsed is None:
                return f"names the file {file.path[:120]!r}, which is no name of an output"
            number, _, of_kind, sha256 = parsed
            if of_kind != kind or sha256 != file.sha256 or number > commit.number:
                return f"names the file {file.path} as {kind} with hash {file.sha256[:16]}"
            if file.bytes < 0 or file.rows < 0 or file.path in seen:
                return f"names the file {file.path} twice or with a negative size"
            seen.add(file.path)
    return ""


def _damaged(name: str, problem: str) -> Corrupt:
    return Corrupt(
        f"the commit record {name} {problem}",
        next_step="Restore it from a copy; until then earlier commits can be read.",
    )
