"""Planning: which stretches of which files a job reads. Runs of the lake in, `schemas.PIECES` out.

    runs of one feed       0 ────────────────────── 90000 ──────── 120000
                                    40000 ─── 52000                          a second branch, or the same blocks again
    buckets of seqs        0 ─────────────── 65536 ────────────────────
    pieces                 0 ───── 40000 ──── 52000 ─ 65536 ─ 90000 ── 120000
                                    40000 ─── 52000

Cut so, a piece follows another one exactly when it starts where that one ends, at its last link; and a dependency's seq
tells the bucket in which to look for the block that it names.

Blocks below the previous commit's cut are *old*: they are planned as targets of dependencies, and not verified again.
Feeds whose runs overlap are read whole: a late branch may lie below any cut.

Where a party stands on an epoch, its cut is a *floor*: what lies below is not read, whether the lake has it or not. It is
planned as old pieces without a file; dependencies on them are checked by the bound of depth alone (O8 of the orderer).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.limits import APPEND_BLOCKS_MAX
from echostore.pipeline import schemas
from echostore.pipeline.lake.versions import overlapping

BUCKET_BITS = 16
"""65,536 blocks: ten megabytes or so for one task, and few enough pieces to plan a billion blocks on one machine."""
BUCKET = 1 << BUCKET_BITS

TASK_BYTES = 32 << 20
"""What one task reads: seconds of work, so that losing one costs little and the last ones end together."""

Place = tuple[bytes, bytes]
"""(party, feed)"""


class Before(NamedTuple):
    """How far a feed was when the previous commit was made."""

    length: int
    link: bytes
    depth: int


Floors = Mapping[Place, Before]
"""Where the epochs end that parties stand on."""

NO_FILE = ""
"""The file of pieces below a floor. Their `row` is what the depth of a block there may exceed its seq by (O8)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read. `bases` are the feeds that go on where the previous commit left them, by their first piece."""

    pieces: pa.Table
    bases: dict[int, tuple[Place, Before]]
    forked: frozenset[Place]
    """Feeds whose runs overlap: they may have branches."""
    floors: Floors


def plan_pieces(
    runs: pa.Table,
    *,
    before: Mapping[Place, Before] | None = None,
    limits: Mapping[Place, int] | None = None,
    floors: Floors | None = None,
    tasks_min: int = 1,
) -> Plan:
    """The pieces of sorted runs. `limits` says of how many blocks of a feed a job wants to know."""
    before, limits, floors = before or {}, limits or {}, floors or {}
    rows: list[_Piece] = []
    bases: dict[int, tuple[Place, Before]] = {}
    forked = set()
    for place, stretches, overlap in _with_floors(_by_feed(runs), floors):
        limit = limits.get(place)
        known, floor = before.get(place), floors.get(place)
        if overlap:
            forked.add(place)
        if known is not None and (not known.length or overlap or not _continues(stretches, known)):
            known = None
        known = known or floor
        if known is not None:
            bases[len(rows)] = place, known
        if floor is not None:
            rows.extend(_below(place, floor, limit))
        taken = known.length if known is not None else 0
        for stretch in _cut(stretches) if overlap else stretches:
            rows.extend(_pieces(place, stretch, taken, known, limit))
    return Plan(_table(rows, tasks_min), bases, frozenset(forked), floors)


class _Stretch(NamedTuple):
    start: int
    end: int
    file: str
    row: int
    previous: bytes | None
    last_link: bytes
    bytes: int


class _Piece(NamedTuple):
    party: bytes
    feed: bytes
    start: int
    end: int
    file: str
    row: int
    previous: bytes | None
    limit: int | None
    old: bool
    bytes: int


def _by_feed(runs: pa.Table) -> Iterator[tuple[Place, list[_Stretch], bool]]:
    """The runs of each feed, ascending, and whether they overlap."""
    overlap = overlapping(runs).to_pylist()
    names = ("party", "feed", "start", "end", "file", "row", "previous", "last_link", "bytes")
    columns = [runs[name].to_pylist() for name in names]
    at: Place | None = None
    found: list[_Stretch] = []
    overlaps = False
    for index, (party, feed, *rest) in enumerate(zip(*columns, strict=True)):
        if (party, feed) != at:
            if at is not None:
                yield at, found, overlaps
            at, found, overlaps = (party, feed), [], bool(overlap[index])
        found.append(_Stretch(*rest))
    if at is not None:
        yield at, found, overlaps


def _with_floors(
    feeds: Iterator[tuple[Place, list[_Stretch], bool]], floors: Floors
) -> Iterator[tuple[Place, list[_Stretch], bool]]:
    """The same above the floors, and feeds of which there is a floor alone."""
    left = dict(floors)
    for place, stretches, overlap in feeds:
        floor = left.pop(place, None)
        if floor is None:
            yield place, stretches, overlap
            continue
        above = [_part(each, max(each.start, floor.length), each.end) for each in stretches if each.end > floor.length]
        above.sort(key=lambda each: each.start)
        yield place, above, any(one.end > other.start for one, other in pairwise(above))
    for place in sorted(left):
        yield place, [], False


def _below(place: Place, floor: Before, limit: int | None) -> Iterator[_Piece]:
    """What lies below a floor, by buckets."""
    for start in range(0, floor.length, BUCKET):
        end = min(start + BUCKET, floor.length)
        yield _Piece(*place, start, end, NO_FILE, floor.depth - floor.length + 1, None, limit, True, 0)


def _continues(stretches: list[_Stretch], known: Before) -> bool:
    """Whether the runs still lead to where the previous commit ended; inside a run, verify will see."""
    ends = {stretch.end: stretch.last_link for stretch in stretches}
    starts = {stretch.start: stretch.previous for stretch in stretches}
    if ends.get(known.length, known.link) != known.link or starts.get(known.length, known.link) != known.link:
        return False
    return any(stretch.start < known.length <= stretch.end for stretch in stretches)


def _cut(stretches: list[_Stretch]) -> Iterator[_Stretch]:
    """Overlapping runs, cut wherever any of them begins or ends; equal ones appear once per run."""
    edges = sorted({edge for stretch in stretches for edge in (stretch.start, stretch.end)})
    for stretch in stretches:
        inner = [edge for edge in edges if stretch.start < edge < stretch.end]
        for start, end in zip([stretch.start, *inner], [*inner, stretch.end], strict=True):
            yield _part(stretch, start, end)


def _pieces(place: Place, stretch: _Stretch, taken: int, known: Before | None, limit: int | None) -> Iterator[_Piece]:
    # A head that covers a block within the limit is at most one append beyond it.
    end = stretch.end if limit is None else min(stretch.end, limit + APPEND_BLOCKS_MAX)
    edges = [edge for edge in range((stretch.start // BUCKET + 1) * BUCKET, end, BUCKET) if edge != taken]
    if stretch.start < taken < end:
        edges = sorted([*edges, taken])
    for start, stop in zip([stretch.start, *edges], [*edges, end], strict=True):
        if start >= stop:
            continue
        part = _part(stretch, start, stop)
        previous = known.link if known is not None and taken and start == taken else part.previous
        yield _Piece(*place, start, stop, part.file, part.row, previous, limit, stop <= taken, part.bytes)


def _part(stretch: _Stretch, start: int, end: int) -> _Stretch:
    share = stretch.bytes * (end - start) // (stretch.end - stretch.start)
    previous = stretch.previous if start == stretch.start else None
    row = stretch.row + start - stretch.start
    return _Stretch(start, end, stretch.file, row, previous, stretch.last_link, share)


def _table(rows: list[_Piece], tasks_min: int) -> pa.Table:
    """Pieces with their tasks: neighbours in a file go to one task, up to a size."""
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in _Piece._fields]
    values = dict(zip(_Piece._fields, columns, strict=True))
    sizes = np.array(values["bytes"], np.int64)
    fresh = ~np.array(values["old"], bool)
    table = pa.table(
        {
            "piece": pa.array(np.arange(len(rows), dtype=np.int64)),
            **{
                field.name: pa.array(values[field.name], field.type)
                for field in schemas.PIECES
                if field.name not in ("piece", "task")
            },
        }
    )
    order = pc.sort_indices(table, [("file", "ascending"), ("row", "ascending")]).to_numpy()
    weights = np.where(fresh, sizes + 1, 0)[order]
    share = max(1, min(TASK_BYTES, int(weights.sum()) // max(1, tasks_min)))
    task = np.zeros(len(rows), np.int32)
    task[order] = (np.cumsum(weights) - weights) // share
    return table.append_column("task", pa.array(task)).select(schemas.PIECES.names).cast(schemas.PIECES)
