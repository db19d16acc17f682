"""The overlay of a stream: what is newer than the last commit, published with every micro-batch.

    OUT/commits/7.json                      the last commit: epochs, CIDs, all tables
    OUT/stream/commits/412.json             what the stream knows beyond it, as records of the same form

An overlay has segments: the files of one micro-batch each, or of several that were merged. Of an item the row of the
highest number counts, and any row of the overlay counts more than those of the commit below. When a later commit has taken
in what an overlay holds, the next overlay begins on top of that one.

Readers take the newest overlay if it knows at least as much of the lake as the newest commit, and otherwise the commit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from echostore.kernel.errors import Corrupt, NotFound
from echostore.pipeline.output import reading
from echostore.pipeline.output.layout import numbered
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PLACEMENTS, PROPERTIES, table_kind
from echostore.pipeline.schemas import CLAIMS, MOVES, STATE_INDEX

STREAM: Final = "stream"
"""The folder of a stream, below the output."""

KEPT: Final = pa.schema(
    [
        pa.field("root", pa.binary(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        # What control and data runs there were, as hashes: equal ones need not be looked at again.
        pa.field("control_mark", pa.binary(), nullable=False),
        pa.field("data_mark", pa.binary(), nullable=False),
        # Packed tables: those of control by name, CUTS of data feeds, and REJECTS that lack an item.
        pa.field("control", pa.binary(), nullable=False),
        pa.field("cuts", pa.binary(), nullable=False),
        pa.field("lacking", pa.binary(), nullable=False),
    ]
)
"""Where the stream is with a root party and its children; of each the row with the highest number counts."""

PLACED: Final = pa.schema(
    [pa.field("party", pa.string(), nullable=False), pa.field("number", pa.int64(), nullable=False)]
)
"""Parties whose placements are told anew by this number."""

SCHEMAS: Final[dict[str, pa.Schema]] = {
    "kept": KEPT,
    "state_index": STATE_INDEX,
    "moves": MOVES,
    "claims": CLAIMS,
    "placed": PLACED,
    table_kind("items"): ITEMS,
    table_kind("properties"): PROPERTIES,
    table_kind("links"): LINKS,
    table_kind("placements"): PLACEMENTS,
}
"""The kinds of files that an overlay has, beside the states that its index names."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Files that were written together, oldest segments first. `level`: how often it was merged."""

    level: int
    files: dict[str, tuple[NamedFile, ...]]

    def document(self) -> dict[str, Any]:
        return {"level": self.level, "files": [file.path for named in self.files.values() for file in named]}


@dataclass(frozen=True, slots=True)
class Overlay:
    """One published overlay. Paths of files are relative to the output folder."""

    number: int
    base: int
    """The commit below it; 0 for none."""
    covers: int
    """The version of the lake up to which nothing is missing."""
    batches: int
    """How many micro-batches since the commit below."""
    messages: int
    """Blocks that were folded since then."""
    segments: tuple[Segment, ...]

    def files(self, kind: str) -> tuple[NamedFile, ...]:
        return tuple(file for segment in self.segments for file in segment.files.get(kind, ()))


def folder_of(out: Path) -> Path:
    return out / STREAM


def newest_overlay(out: Path) -> Overlay | None:
    """The newest overlay that was published; None when no stream ever ran."""
    # What a stream prunes while this looks is older than what it published since: looking again finds that.
    for _ in range(8):
        try:
            record, _ = reading.newest(folder_of(out))
        except (NotFound, Corrupt):
            if not numbered(folder_of(out)):
                return None
            continue
        return None if record is None else overlay_of(record)
    record, _ = reading.newest(folder_of(out))
    return None if record is None else overlay_of(record)


def overlay_of(record: Commit) -> Overlay:
    """The overlay that a record of a stream is."""
    told = record.settings
    by_path = {
        file.path: (kind, NamedFile(f"{STREAM}/{file.path}", file.sha256, file.bytes, file.rows))
        for kind, files in record.files.items()
        for file in files
    }
    segments = []
    try:
        for each in told["segments"]:
            files: dict[str, list[NamedFile]] = {}
            for path in each["files"]:
                kind, file = by_path[path]
                files.setdefault(kind, []).append(file)
            segments.append(Segment(each["level"], {kind: tuple(named) for kind, named in files.items()}))
        return Overlay(record.number, told["base"], told["covers"], told["batches"], told["messages"], tuple(segments))
    except (KeyError, TypeError) as error:
        raise Corrupt(
            f"the record {record.number} of the stream is not one of a stream ({error})",
            next_step="Delete the folder `stream` of the output: a stream begins again from the last commit.",
        ) from error


def freshest(out: Path) -> tuple[Commit | None, Overlay | None]:
    """What readers see: a commit, and the overlay on top of it if one counts."""
    commit, _ = reading.newest(out)
    overlay = newest_overlay(out)
    if overlay is None or (commit is None and overlay.base):
        return commit, None
    if commit is not None and overlay.base != commit.number and overlay.covers <= commit.lake.version:
        return commit, None
    if not overlay.base:
        return None, overlay
    return reading.load(out, overlay.base)[0], overlay
