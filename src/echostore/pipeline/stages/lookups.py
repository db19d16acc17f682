"""Lookups: does the block that a dependency names exist, with that link and depth? VERIFIED and TARGETS in, NAMED out.

    dependencies of a piece on a feed's bucket ──┐  shuffled by (party, named feed, bucket): some rows of packed columns
    the held pieces of that bucket ──────────────┴─► one task reads the links and depths of the pieces and compares

Below the epoch that a party stands on nobody looks: there the depth is checked by a bound, and the link not at all, also
where the lake has the block. Peers do the same, or those that have deleted it would disagree.

Blocks themselves are never shuffled. A dependency that is not met now may be met by no other block later: what it names
is a hash. Whether the block that it names is *processed* is not asked here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import LINK_BYTES, LINK_PREFIX_BYTES
from echostore.kernel.reasons import Reason
from echostore.pipeline import schemas
from echostore.pipeline.lake.reading import read_rows
from echostore.pipeline.stages.envelopes import Longs
from echostore.pipeline.stages.frames import mapped
from echostore.pipeline.stages.planning import NO_FILE

MISSING = "missing"
"""What is wrong with a dependency on a block that is not held."""
ROWS_OUT = 256

_KEY = ("party", "names", "bucket")
_DEPENDENCY = ("feed", "piece", "seqs", "named_seqs", "named_links", "named_depths", "backwards")
_TARGET = ("twig", "path", "start", "end", "file", "row", "links", "depths")

Prefixes = npt.NDArray[np.uint64]
"""Two numbers for the 16 bytes of a link that a dependency names."""


def look_up(lake: str, dependencies: Any, targets: Any, partitions: int) -> Any:
    """`schemas.NAMED` of dependencies (rows of `schemas.VERIFIED` that name a feed). Not computed yet."""
    found = dependencies.select(*_KEY, *_DEPENDENCY).unionByName(
        targets.select(*_KEY, *_TARGET), allowMissingColumns=True
    )
    # Nulls come first: targets have no piece, and so stand before the dependencies that lead to them.
    sorted_rows = found.repartition(partitions, *_KEY).sortWithinPartitions(*_KEY, "piece", "seqs")
    return mapped(sorted_rows, _LookingUp(lake), schemas.NAMED)


def sorted_lookup(lake: str, dependencies: pa.Table, targets: pa.Table) -> pa.Table:
    """The same of tables, where they are."""
    parts = [dependencies.select([*_KEY, *_DEPENDENCY]), targets.select([*_KEY, *_TARGET])]
    rows = pa.concat_tables(parts, promote_options="permissive")
    # Targets have no piece, and stand before the dependencies that lead to them.
    rows = rows.append_column("order", pc.fill_null(rows["piece"], -1))
    rows = rows.sort_by([(name, "ascending") for name in (*_KEY, "order", "seqs")]).combine_chunks()
    return pa.Table.from_batches(_LookingUp(lake)(iter(rows.to_batches())), schemas.NAMED)


@dataclass(frozen=True)
class _LookingUp:
    lake: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        key: tuple[Any, ...] | None = None
        targets: list[Target] = []
        rows: list[dict[str, Any]] = []
        for batch in batches:
            for row in batch.to_pylist():
                at = tuple(row[name] for name in _KEY)
                if at != key:
                    key, targets = at, []
                if row["piece"] is None:
                    targets.append(Target(self.lake, *(row[name] for name in _TARGET)))
                else:
                    rows.append(named(row, targets))
            if len(rows) >= ROWS_OUT:
                yield pa.RecordBatch.from_pylist(rows, schemas.NAMED)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schemas.NAMED)


@dataclass(slots=True)
class Target:
    """A held piece, or a stretch of processed control blocks. Links and depths are read when they are asked for."""

    lake: str
    twig: int
    path: bytes
    start: int
    end: int
    file: str | None
    row: int | None
    links: bytes | None
    depths: bytes | None
    _marks: tuple[int, int, Prefixes, Longs] | None = field(default=None, init=False)
    """From and up to which block they were read."""

    @property
    def below_floor(self) -> bool:
        """Whether the party's epoch has it: then the bound of depth alone is checked (O8)."""
        return self.file == NO_FILE

    def marks(self, first: int, end: int) -> tuple[int, Prefixes, Longs]:
        """Links and depths of at least these blocks, and the block with which they begin."""
        if self._marks is None or not self._marks[0] <= first <= end <= self._marks[1]:
            if self._marks is not None:
                first, end = self.start, self.end  # asked for more than once: now for all
            if self.file is None or self.row is None:
                first, end = self.start, self.end
                links = np.frombuffer(self.links or b"", np.uint8).reshape(-1, LINK_BYTES)
                depths: Longs = np.frombuffer(self.depths or b"", np.int64)
            else:
                at = self.row - self.start
                links, depths = read_marks(self.lake, self.file, at + first, at + end)
            self._marks = first, end, _prefixes(links[:, :LINK_PREFIX_BYTES]), depths
        return self._marks[0], self._marks[2], self._marks[3]


def read_marks(lake: str, file: str, start: int, end: int) -> tuple[npt.NDArray[np.uint8], Longs]:
    """Links and depths of rows of a file, 32 bytes and a number each."""
    links, depths = [], []
    for batch in read_rows(lake, file, start, end, ("link", "depth")):
        column = batch["link"]
        offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
        if (np.diff(offsets) != LINK_BYTES).any():
            raise Corrupt(f"{file} has a link of wrong length.", next_step="Run `echostore lake stat --full`.")
        links.append(np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(-1, LINK_BYTES))
        depths.append(batch["depth"].to_numpy(zero_copy_only=False))
    return np.concatenate(links), np.concatenate(depths)


def named(row: dict[str, Any], targets: list[Target]) -> dict[str, Any]:
    """One row of NAMED: the entries up to the first that is wrong, that one included."""
    seqs, wanted, depths = (np.frombuffer(row[name], np.int64) for name in ("seqs", "named_seqs", "named_depths"))
    prefixes = _prefixes(np.frombuffer(row["named_links"], np.uint8).reshape(-1, LINK_PREFIX_BYTES))
    twigs = np.full(len(wanted), -1, np.int64)
    right = np.zeros(len(wanted), bool)
    for target in targets:
        inside = np.flatnonzero((wanted >= target.start) & (wanted < target.end) & (twigs == -1))
        if not len(inside):
            continue
        if target.below_floor:
            bound = wanted[inside] + (target.row or 0)
            twigs[inside] = target.twig
            right[inside] = (depths[inside] > 0) & (depths[inside] <= bound)
            continue
        # A few new blocks name a few old ones: what lies before those need not be read.
        first, links, found_depths = target.marks(int(wanted[inside].min()), int(wanted[inside].max()) + 1)
        at = wanted[inside] - first
        same = (links[at] == prefixes[inside]).all(axis=1)
        twigs[inside[same]] = target.twig
        right[inside[same]] = found_depths[at[same]] == depths[inside[same]]
    paths = {target.twig: target.path for target in targets}
    end, fault = _first_fault(twigs, right, paths)
    if row["backwards"]:
        end, fault = 1, str(Reason.TIMEFRAME_BACKWARDS)
    several = len(np.unique(twigs[:end])) > 1
    last = end - 1
    return {
        **{name: row[name] for name in ("party", "feed", "piece", "names", "bucket")},
        "first_seq": int(seqs[0]),
        "last_seq": int(seqs[last]),
        "first_named": int(wanted[0]),
        "last_named": int(wanted[last]),
        "last_link": row["named_links"][last * LINK_PREFIX_BYTES : end * LINK_PREFIX_BYTES],
        "first_twig": int(twigs[0]),
        "last_twig": int(twigs[last]),
        "first_path": paths.get(int(twigs[0])),
        "fault": fault,
        "seqs": seqs[:end].tobytes(),
        "named_seqs": wanted[:end].tobytes(),
        "named_links": row["named_links"][: end * LINK_PREFIX_BYTES],
        "twigs": twigs[:end].tobytes() if several else None,
    }


def _first_fault(twigs: Longs, right: npt.NDArray[np.bool_], paths: dict[int, bytes]) -> tuple[int, str | None]:
    """(entries to keep, what is wrong with the last of them)"""
    wrong = (twigs == -1) | ~right
    moved = np.flatnonzero(twigs[1:] != twigs[:-1]) + 1
    for index in moved.tolist():
        before, after = int(twigs[index - 1]), int(twigs[index])
        if before != -1 and after != -1 and before not in np.frombuffer(paths[after], np.int64):
            wrong[index] = True
    if not wrong.any():
        return len(twigs), None
    first = int(np.argmax(wrong))
    if twigs[first] == -1:
        return first + 1, MISSING
    return first + 1, str(Reason.TIMEFRAME_BRANCH if right[first] else Reason.LYING_DEPTH)


def _prefixes(links: npt.NDArray[np.uint8]) -> Prefixes:
    return np.ascontiguousarray(links).view(np.uint64).reshape(-1, 2)
