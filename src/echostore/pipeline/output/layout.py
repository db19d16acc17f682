"""Names inside an output folder. Everything that a commit names is checked against these before it is opened."""

import os
import re
from pathlib import Path
from typing import Final
from uuid import UUID

COMMITS: Final = "commits"
LEASE: Final = "lease"
DECISION: Final = "decision"

STAGED_PREFIX: Final = ".attempt-"
"""Of the folder of an attempt whose lease is not taken yet."""

PART_SUFFIX: Final = ".part"
"""Of a file that is still being written."""

_COMMIT = re.compile(r"([1-9][0-9]{0,17})\.json")
_EPOCH = re.compile(r"epoch=([1-9][0-9]{0,17})")
_ATTEMPT = re.compile(r"attempt=([0-9a-f]{32})")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,40}")
_FILE = re.compile(r"epoch=([1-9][0-9]{0,17})/attempt=([0-9a-f]{32})/([a-z][a-z0-9_]{0,40})/([0-9a-f]{64})\.parquet")


def commit_name(number: int) -> str:
    return f"{number}.json"


def commit_number(name: str) -> int | None:
    """The number of a commit by the name of its file; None for other files."""
    found = _COMMIT.fullmatch(name)
    return int(found[1]) if found else None


def attempt_folder(number: int, attempt: UUID) -> str:
    return f"epoch={number}/attempt={attempt.hex}"


def epoch_number(name: str) -> int | None:
    found = _EPOCH.fullmatch(name)
    return int(found[1]) if found else None


def epoch_of(folder: str) -> int:
    """The number of the commit that an attempt's folder works for."""
    number = next((found for part in folder.split("/") if (found := epoch_number(part)) is not None), None)
    assert number is not None, folder
    return number


def attempt_id(name: str) -> UUID | None:
    found = _ATTEMPT.fullmatch(name)
    return UUID(found[1]) if found else None


def is_kind(name: str) -> bool:
    """Whether files may be kept under this name."""
    return _KIND.fullmatch(name) is not None


def file_path(number: int, attempt: UUID, kind: str, sha256: str) -> str:
    """The path of a file, relative to the output folder; its name is its hash."""
    return f"{attempt_folder(number, attempt)}/{kind}/{sha256}.parquet"


def parse_file(path: str) -> tuple[int, UUID, str, str] | None:
    """Epoch, attempt, kind and hash of a relative path; None for every path that `file_path` does not make."""
    found = _FILE.fullmatch(path)
    return (int(found[1]), UUID(found[2]), found[3], found[4]) if found else None


def numbered(folder: Path) -> list[int]:
    """The numbers of all commits, ascending."""
    try:
        names = os.listdir(folder / COMMITS)
    except FileNotFoundError:
        return []
    return sorted(number for number in map(commit_number, names) if number is not None)
