"""The log of a lake: what was added and removed, one entry per version, each created exactly once.

    1.json ◄── 2.json ◄── 3.json          previous = SHA-256 of the entry before
                 │
                 └─ adds    blocks files that are part of the lake from here on
                    removes blocks files that compaction replaced
                    runs    where the blocks of the added files are
                    state   now and then: all live files and runs, so that a reader begins here and not at 1

An entry is written beside, synced, and put into its place by a hard link, which fails when the place is taken. So two
publishers never overwrite each other: one gets the number, the other looks again and takes the next. An entry is never
changed or deleted. Readers hold on to a version: what later entries add or remove does not concern them.
"""

import hashlib
import os
import time
import uuid
from pathlib import Path

import msgspec

from echostore.kernel.errors import Corrupt, NotFound, Refused
from echostore.pipeline.lake.layout import LOG, WRITING, entry_name, hash_in_name, is_blocks_name, version_in_name
from echostore.store.durable_file import file_error, sync_folder

FORMAT = 1
STATE_EVERY = 32
"""An entry in so many holds the whole state. Opening a version reads at most this many entries, however long the log."""
ENTRY_BYTES_MAX = 1 << 30
"""A state of a million files has some 250 MB; more is no log of ours."""
FIRST_PREVIOUS = "0" * 64


class BlocksFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of blocks. Control feeds have files of their own, so that reading all control touches no data."""

    file: str
    sha256: str
    bytes: int
    rows: int
    control: bool


class RunsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of runs, sorted by party; the first and last party let readers pass it over."""

    file: str
    sha256: str
    bytes: int
    rows: int
    first_party: str
    last_party: str


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is live at a version."""

    files: list[BlocksFile]
    runs: list[RunsFile]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of the lake, as a change to the one before."""

    format: int
    version: int
    previous: str
    kind: str
    adds: list[BlocksFile]
    removes: list[str]
    runs: list[RunsFile]
    created_ms: int
    publisher: str
    state: State | None = None

    def records(self) -> list[BlocksFile | RunsFile]:
        """Every file that the entry names as a part of the lake."""
        state = self.state or State([], [])
        return [*self.adds, *self.runs, *state.files, *state.runs]


class Taken(Exception):
    """Another writer created this version first. Never leaves the package: the writer looks again."""


def versions(lake: Path) -> int:
    """The newest version; 0 for an empty lake. Corrupt when an entry in between is missing."""
    try:
        with os.scandir(lake / LOG) as entries:
            found = [number for entry in entries if (number := version_in_name(entry.name)) is not None]
    except OSError as error:
        raise file_error(error, f"list the log of {lake}") from error
    newest = max(found, default=0)
    if len(found) != newest:
        have = set(found)
        missing = next(number for number in range(1, newest + 1) if number not in have)
        raise _damaged(lake, missing, "it is missing, while later ones are there")
    return newest


def read_entry(lake: Path, version: int) -> tuple[Entry, str]:
    """An entry and its hash."""
    path = lake / entry_name(version)
    try:
        if path.stat().st_size > ENTRY_BYTES_MAX:
            raise _damaged(lake, version, f"it has more than {ENTRY_BYTES_MAX} bytes")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(
            f"The lake {lake} has no version {version}.", next_step="`echostore lake stat` shows them."
        ) from None
    except OSError as error:
        raise file_error(error, f"read {path}") from error
    return _decoded(lake, version, raw), hashlib.sha256(raw).hexdigest()


def state_at(lake: Path, version: int) -> State:
    """What is live at a version: the last whole state at or before it, and the changes since. The chain is checked."""
    if version == 0:
        return State([], [])
    first = max(1, version - version % STATE_EVERY)
    files: dict[str, BlocksFile] = {}
    runs: list[RunsFile] = []
    expected: str | None = FIRST_PREVIOUS if first == 1 else None
    for number in range(first, version + 1):
        entry, hashed = read_entry(lake, number)
        if expected is not None and entry.previous != expected:
            raise _damaged(lake, number, "it does not follow the entry before it; one of the two was altered")
        expected = hashed
        if entry.state is not None:
            files, runs = {each.file: each for each in entry.state.files}, list(entry.state.runs)
            continue
        _change(lake, entry, files)
        runs += entry.runs
    return State(list(files.values()), runs)


def check_chain(lake: Path) -> int:
    """Follow the whole chain from the first entry to the newest; returns how many there are."""
    expected = FIRST_PREVIOUS
    newest = versions(lake)
    for number in range(1, newest + 1):
        entry, hashed = read_entry(lake, number)
        if entry.previous != expected:
            raise _damaged(lake, number, "it does not follow the entry before it; one of the two was altered")
        expected = hashed
    return newest


def check_states(lake: Path) -> None:
    """Compute every whole state again from the entries before it; Corrupt when one says something else."""
    files: dict[str, BlocksFile] = {}
    for number in range(1, versions(lake) + 1):
        entry, _ = read_entry(lake, number)
        _change(lake, entry, files)
        if entry.state is not None and {each.file: each for each in entry.state.files} != files:
            raise _damaged(lake, number, "its whole state is not what the entries before it lead to")


def create_entry(lake: Path, entry: Entry) -> None:
    """Make an entry the newest version, durable on return; `Taken` when another writer was first."""
    raw = msgspec.json.format(msgspec.json.encode(entry), indent=1)
    path = lake / entry_name(entry.version)
    writing = lake / WRITING / f"{uuid.uuid4().hex}.json"
    try:
        try:
            with open(writing, "xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.link(writing, path)
        finally:
            writing.unlink(missing_ok=True)
        sync_folder(lake / LOG)
    except FileExistsError:
        raise Taken(entry.version) from None
    except OSError as error:
        raise file_error(error, f"write {path}") from error


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _change(lake: Path, entry: Entry, files: dict[str, BlocksFile]) -> None:
    for name in entry.removes:
        if files.pop(name, None) is None:
            raise _damaged(lake, entry.version, f"it removes {name}, which is not in the lake")
    for added in entry.adds:
        if added.file in files:
            raise _damaged(lake, entry.version, f"it adds {added.file}, which is in the lake already")
        files[added.file] = added


def _decoded(lake: Path, version: int, raw: bytes) -> Entry:
    try:
        found = msgspec.json.decode(raw)
        number = found.get("format") if isinstance(found, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise Refused(
                f"The lake {lake} has format {number}; this echostore knows formats up to {FORMAT}.",
                next_step="Read it with the newer echostore that wrote it.",
            )
        entry = msgspec.json.decode(raw, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(lake, version, f"it can't be read: {error}") from None
    if entry.version != version or entry.format != FORMAT:
        raise _damaged(lake, version, f"it says that it is version {entry.version} of format {entry.format}")
    if (version % STATE_EVERY == 0) != (entry.state is not None):
        raise _damaged(lake, version, "a whole state is where none belongs, or is missing")
    for record in entry.records():
        if hash_in_name(record.file) != record.sha256 or record.bytes < 0 or record.rows < 0:
            raise _damaged(lake, version, f"what it says about {record.file[:100]!r} does not fit the name")
    if not all(map(is_blocks_name, entry.removes)):
        raise _damaged(lake, version, "it removes what is no file of blocks")
    return entry


def _damaged(lake: Path, version: int, what: str) -> Corrupt:
    return Corrupt(
        f"{lake / entry_name(version)} is damaged: {what}.",
        next_step="Restore that file from a backup, or publish again into a new lake.",
    )
