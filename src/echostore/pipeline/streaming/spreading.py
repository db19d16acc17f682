"""Folding a large step of one party on all cores: the stages of `folding`, each a job with as many tasks as there are cores.

    begin       who counts, what was known                     here: a few rows for each feed
    verify      the pieces of the step's new blocks            a task for some feeds        ──► scratch files
    order       what was verified, as it hangs together        one task: rows of pieces     ──► cuts
    demux       slices of new blocks into parcels              a task for some slices       ──► scratch files by share
    reduce      the buckets of a share                         a task for some buckets      ──► states, rejects, moves
    rows        states into rows of items                      a task for some files
    placements  the tree of moves                              one task, where something moved

Both ways use the same functions over the same rows, so that the answer is the same; a job costs some hundred milliseconds,
so that small steps stay in one task. The driver learns names of files and the cuts; blocks never come to it.
"""

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from echostore.kernel.errors import EchoError
from echostore.pipeline import engine_errors
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.writing import ITEM_TABLES, NAMED, Place, WritingTables, named_files, named_rows
from echostore.pipeline.schemas import PARCELS, PIECES, SLICES, STATE_INDEX, VERIFIED
from echostore.pipeline.stages.demux import Demux
from echostore.pipeline.stages.order_here import fresh_pieces, order_here, plan_here
from echostore.pipeline.stages.parcels import REPORT, packed, unpacked
from echostore.pipeline.stages.planning import Floors, Plan
from echostore.pipeline.stages.reduce import Inputs, Outcome, Reducing, reduce_items
from echostore.pipeline.stages.reduce_here import Files, HereEngine, TooMuchHistory, by_bucket
from echostore.pipeline.stages.verify import Verifying
from echostore.pipeline.stages.writers import read_arrow, write_arrow
from echostore.pipeline.streaming.folding import TOLD, TOO_MUCH, placing_of
from echostore.pipeline.streaming.jobs import Jobs, dealt
from echostore.pipeline.streaming.placing import PLACED_PARTIES, moved_parties
from echostore.pipeline.streaming.root_party import DEFERRED, Ground, RootParty
from echostore.pipeline.streaming.segment_files import SegmentFiles

SPREAD_BLOCKS = 12_288
"""Blocks that other cores have to take over for it to pay: their work, a second and a half, is about what six jobs cost."""
SLICE_BLOCKS_MIN = 256
"""Slices are not cut finer than this: each opens a file."""

SHARES = pa.schema([pa.field("share", pa.int64(), nullable=False), pa.field("path", pa.string(), nullable=False)])
"""Scratch files: which share of the buckets they hold."""
ORDERING = pa.schema([pa.field("tables", pa.binary(), nullable=False)])
CUTS_FOUND = pa.schema([pa.field("cuts", pa.binary(), nullable=False)])
REDUCING = pa.schema([pa.field("paths", pa.list_(pa.string()), nullable=False), pa.field("more", pa.binary())])
"""A share: the files with its parcels, and parcels that the driver has."""


def worth_spreading(blocks: int, step_blocks: int, width: int) -> bool:
    """Whether a party with so many new blocks, in a step with so many, is folded on all cores. Where other parties have as
    much to do, each core has one of them."""
    return blocks * (width - 1) >= SPREAD_BLOCKS * width and blocks * width > step_blocks


class Spreading:
    """Folds root parties of a step one after the other, each on all cores."""

    def __init__(self, jobs: Jobs, ground: Ground) -> None:
        self._jobs, self._ground = jobs, ground

    def fold(self, root: bytes, runs: pa.Table) -> list[dict[str, Any]]:
        """Rows as those of TOLD."""
        party = RootParty(self._ground, root, runs)
        segment = SegmentFiles(self._ground.place, self._ground.number, self._ground.turn, self._ground.models)
        try:
            told = self._fold(party, segment)
        except TooMuchHistory:
            told = party.told(DEFERRED, TOO_MUCH)
        except Exception as error:
            typed = engine_errors.of_a_party(error)
            if typed is None and (isinstance(error, EchoError | OSError) or engine_errors.is_sparks(error)):
                raise
            told = party.told(DEFERRED, typed.what if typed is not None else f"{type(error).__name__}: {error}")
        files = segment.files() if told["state"] != DEFERRED else {}
        named = named_rows(files).to_pylist()
        return [{**dict.fromkeys(TOLD.names), **row} for row in (told, *named)]

    def _fold(self, party: RootParty, segment: SegmentFiles) -> dict[str, Any]:
        ended = party.begin()
        if ended is not None:
            return ended
        plan = plan_here(party.data_runs, party.control["admission"], party.before.cuts, party.floors)
        with _scratch_files() as verified:
            verified += self._verify(plan)
            cuts = self._order(party, verified)
        inputs = party.inputs(cuts, plan)
        if inputs is None:
            return party.lost_ground()
        outcome = reduce_items(inputs, JobsEngine(inputs, self._jobs))
        segment.name({kind: outcome.files.get(kind, ()) for kind in ("states", "state_index", "moves", "claims")})
        segment.name(self._item_rows(outcome))
        moved = sorted(moved_parties(self._ground.out, outcome) & set(party.parties))
        if moved:
            rows = pa.table([pa.array(moved, pa.binary())], schema=PLACED_PARTIES)
            found = named_files(self._jobs.run(rows, placing_of(self._ground, outcome), NAMED))
            for kind, named in found.items():
                # Each file is of one party, which the task tells by its kind.
                segment.place(bytes.fromhex(kind), named)
        segment.keep(party.kept_row(cuts, outcome))
        return party.folded(cuts, plan)

    # order

    def _verify(self, plan: Plan) -> list[str]:
        """Scratch files with VERIFIED of the fresh pieces."""
        pieces = fresh_pieces(plan)
        if not len(pieces):
            return []
        sizes = [
            end - start for start, end in zip(*(pieces[name].to_pylist() for name in ("start", "end")), strict=True)
        ]
        rows = pieces.take(pa.array(dealt(sizes, self._jobs.width))).select(PIECES.names)
        return [row["path"] for row in self._jobs.run(rows, _Verifying(self._ground.lake, self._ground.place), SHARES)]

    def _order(self, party: RootParty, verified: list[str]) -> pa.Table:
        """CUTS, by one task over what was verified: rows of pieces, and columns of dependencies."""
        tables = {"runs": party.data_runs, "admission": party.control["admission"], "targets": party.control["targets"]}
        if party.before.cuts is not None:
            tables["previous"] = party.before.cuts
        rows = [{"name": name, "rows": packed(table)} for name, table in tables.items()]
        given = pa.Table.from_pylist([{"tables": packed(pa.Table.from_pylist(rows, _NAMED_TABLES))}], ORDERING)
        task = _Ordering(self._ground.lake, tuple(verified), party.floors)
        (found,) = self._jobs.run(given, task, CUTS_FOUND)
        return unpacked(bytes(found["cuts"]))

    # rows

    def _item_rows(self, outcome: Outcome) -> Files:
        """The tables of the items that changed."""
        ground, states = self._ground, outcome.files["states"]
        if not states:
            return {}
        rows = pa.Table.from_batches([named_rows({"states": states})])
        rows = rows.take(pa.array(dealt([file.rows for file in states], self._jobs.width)))
        superseded = _superseded(ground, outcome)
        task = WritingTables(ground.place, ground.number, ground.models, tuple(ITEM_TABLES), superseded)
        return named_files(self._jobs.run(rows, task, NAMED))


_NAMED_TABLES = pa.schema([pa.field("name", pa.string()), pa.field("rows", pa.binary())])


def _superseded(ground: Ground, outcome: Outcome) -> dict[str, frozenset[tuple[bytes, bytes]]]:
    """By path, the items of a file of states that a later round folded again."""
    if not outcome.again.rounds:
        return {}
    turns = {
        row["path"]: row["turn"]
        for file in outcome.files["state_index"]
        for row in read_table(ground.out, file, STATE_INDEX, columns=["path", "turn"]).to_pylist()
    }
    last = {(bytes(party), bytes(item)): number for (party, item), number in outcome.again.rounds.items()}
    return {
        path: frozenset(place for place, number in last.items() if number > turn - ground.turn)
        for path, turn in turns.items()
    }


class JobsEngine(HereEngine):
    """Runs rounds on all cores: planned here, demultiplexed and reduced by tasks."""

    def __init__(self, inputs: Inputs, jobs: Jobs) -> None:
        super().__init__(inputs)
        self._jobs = jobs

    def carry_out(self, demuxes: list[tuple[Demux, list[dict[str, Any]]]], more: pa.Table, task: Reducing) -> Files:
        width = self._jobs.width
        shares: dict[int, list[str]] = defaultdict(list)
        with _scratch_files() as paths:
            for demux, slices in demuxes:
                parts = cut_slices(slices, width)
                parts = [parts[at] for at in dealt([part["end"] - part["start"] for part in parts], width)]
                for row in self._dealt(demux, parts):
                    paths.append(row["path"])
                    shares[row["share"]].append(row["path"])
            kept = _by_share(more, width)
            rows = [
                {"paths": shares[share], "more": packed(kept[share]) if share in kept else None}
                for share in sorted({*shares, *kept})
            ]
            return self._reduced(rows, task)

    def _dealt(self, demux: Demux, slices: list[dict[str, Any]]) -> list[Any]:
        if not slices:
            return []
        task = _Dealing(demux, self.inputs.place, self._jobs.width)
        return self._jobs.run(pa.Table.from_pylist(slices, SLICES), task, SHARES)

    def _reduced(self, shares: list[dict[str, Any]], task: Reducing) -> Files:
        if not shares:
            return {}
        return named_files(self._jobs.run(pa.Table.from_pylist(shares, REDUCING), _ReducingShare(task), NAMED))


def cut_slices(slices: list[dict[str, Any]], width: int) -> list[dict[str, Any]]:
    """Slices, long ones in several parts: enough of them to deal out evenly."""
    total = sum(each["end"] - each["start"] for each in slices)
    most = max(SLICE_BLOCKS_MIN, -(-total // (4 * width)))
    return [
        {**each, "start": start, "end": min(start + most, each["end"]), "row": each["row"] + start - each["start"]}
        for each in slices
        for start in range(each["start"], each["end"], most)
    ]


@contextlib.contextmanager
def _scratch_files() -> Iterator[list[str]]:
    """Files that tasks leave for each other; removed in the end, for the overlay that names others beside them may stay."""
    paths: list[str] = []
    try:
        yield paths
    finally:
        for path in paths:
            Path(path).unlink(missing_ok=True)


# tasks


@dataclass(frozen=True)
class _Verifying:
    """The task: pieces into a scratch file of VERIFIED."""

    lake: str
    place: Place

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = pa.Table.from_batches(Verifying(self.lake)(batches), VERIFIED)
        path = write_arrow(self.place, "verified", found)
        yield pa.RecordBatch.from_pylist([{"share": 0, "path": path}], SHARES)


@dataclass(frozen=True)
class _Ordering:
    """The task: what was verified of one party, and what is known of it, into its cuts."""

    lake: str
    verified: tuple[str, ...]
    floors: Floors

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for data in (data for batch in batches for data in batch["tables"].to_pylist()):
            tables = {row["name"]: unpacked(row["rows"]) for row in unpacked(data).to_pylist()}
            fresh = pa.concat_tables([VERIFIED.empty_table(), *map(read_arrow, self.verified)])
            ordered = order_here(
                self.lake,
                tables["runs"],
                tables["admission"],
                tables["targets"],
                tables.get("previous"),
                self.floors,
                fresh,
            )
            yield pa.RecordBatch.from_pylist([{"cuts": packed(ordered.cuts)}], CUTS_FOUND)


@dataclass(frozen=True)
class _Dealing:
    """The task: slices into scratch files of parcels, one for each share of the buckets."""

    demux: Demux
    place: Place
    shares: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = pa.Table.from_batches(self.demux(batches), PARCELS)
        for share, parcels in _by_share(found, self.shares).items():
            path = write_arrow(self.place, "parcels", parcels)
            yield pa.RecordBatch.from_pylist([{"share": share, "path": path}], SHARES)


@dataclass(frozen=True)
class _ReducingShare:
    """The task: the parcels of shares through the reducer."""

    task: Reducing

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for row in (row for batch in batches for row in batch.to_pylist()):
            more = [] if row["more"] is None else [unpacked(row["more"])]
            yield from self.task(by_bucket([*map(read_arrow, row["paths"]), *more]))


def _by_share(parcels: pa.Table, shares: int) -> dict[int, pa.Table]:
    """Parcels by the share that their bucket belongs to; neighbouring buckets of a party lie in one."""
    places = zip(parcels["party"].to_pylist(), parcels["bucket"].to_pylist(), strict=True)
    rows: dict[int, list[int]] = defaultdict(list)
    for at, (party, bucket) in enumerate(places):
        rows[_share(party, bucket, shares)].append(at)
    return {share: parcels.take(pa.array(each, pa.int64())) for share, each in rows.items()}


def _share(party: bytes, bucket: str, shares: int) -> int:
    if not bucket or bucket == REPORT:
        return zlib.crc32(party) % shares
    return int(bucket, 16) * shares >> 4 * len(bucket)
