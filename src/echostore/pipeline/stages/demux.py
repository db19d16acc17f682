"""demux: blocks -> operations -> parcels for buckets of items. SLICES in, PARCELS out; files of rejects beside.

    slice of a feed ──► which blocks count ──► operations by column ──► combined ──► parcels
                        the others are         (operation_columns)      per feed
                        rejects                                         and item

A task reads its slices itself, straight from the lake. Plain changes of one feed to one property are combined to the
last one before anything is shuffled, so an item that everybody writes to costs little more than any other.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedId, FeedKey, PartyKey, feed_id
from echostore.kernel.reasons import Reason
from echostore.pipeline.lake.reading import read_rows
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import (
    ASKED_ITEMS,
    HARD_ITEMS,
    PARCELS,
    PLAIN_CHANGES,
    REJECTS,
    REST_OPERATIONS,
    RUNS,
    SLICES,
)
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, mapped
from echostore.pipeline.stages.operation_columns import TOUCHED, Operations, concerned, read_operations, rows_table
from echostore.pipeline.stages.parcels import bucket_nibbles, pack, parcels_batch, report
from echostore.pipeline.stages.property_columns import combine, item_halves

SLICE_BLOCKS = 1 << 16
"""One slice at most: what a task reads of a feed in one go."""
COMBINE_ROWS = 1 << 19
"""Changes that a task keeps before it combines and sends them: some fifty megabytes."""
PARCEL_BATCH_BYTES = 8 << 20
EXCLUDED_ROWS = 1 << 16

READER = "reader"


# planning: which stretches


def plan_slices(spark: Any, lake: str, runs: pa.Table, cuts: Rows, admission: Rows, before: Rows | None) -> Rows:
    """The stretches between earlier cuts (`before`: party, feed, control, length) and those of this run; without, all
    below the latter. Given tables they are planned here, given DataFrames by tasks."""
    if isinstance(cuts, pa.Table) and isinstance(admission, pa.Table) and not _elsewhere(before):
        return _plan_here(lake, runs, cuts, admission, before)
    from pyspark.sql import functions as f

    cuts, admission = as_frame(spark, cuts), as_frame(spark, admission)
    data = cuts.filter("NOT control AND length > 0").select("party", "feed", "length", "link")
    totals = data.groupBy("party").agg(f.sum("length").alias("messages"))
    counted = admission.filter("NOT control").groupBy("party", "feed")
    standing = counted.agg(
        f.collect_list(f.struct("start", "end", "role")).alias("intervals"), f.first("end_reason").alias("end_reason")
    )
    frame = frame_of(spark, runs.select(RUNS.names)).filter("NOT control").join(data, ["party", "feed"])
    frame = frame.join(totals, "party").join(standing, ["party", "feed"], "left")
    if before is None:
        frame = frame.withColumn("after", f.lit(0).cast("long"))
    else:
        known = as_frame(spark, before).filter("NOT control").select("party", "feed", f.col("length").alias("after"))
        frame = frame.join(known, ["party", "feed"], "left").fillna(0, ["after"])
    ordered = frame.repartition("party", "feed").sortWithinPartitions("party", "feed", "start")
    return mapped(ordered, _Slicing(lake), SLICES)


def _elsewhere(rows: Rows | None) -> bool:
    return rows is not None and not isinstance(rows, pa.Table)


def _plan_here(lake: str, runs: pa.Table, cuts: pa.Table, admission: pa.Table, before: pa.Table | None) -> pa.Table:
    """The same on the driver, for as many feeds as its memory is made for."""
    lengths = {(row["party"], row["feed"]): row for row in _of_data(cuts, ["party", "feed", "length", "link"])}
    messages = messages_by_party(cuts)
    known = () if before is None else _of_data(before, ["party", "feed", "length"])
    after = {(row["party"], row["feed"]): row["length"] for row in known}
    intervals: dict[tuple[bytes, bytes], list[dict[str, Any]]] = defaultdict(list)
    for row in _of_data(admission, ["party", "feed", "start", "end", "role", "end_reason"]):
        intervals[row["party"], row["feed"]].append(row)
    rows: list[dict[str, Any]] = []
    of_data = runs.filter(pc.invert(runs["control"])).select(RUNS.names).to_pylist()
    for place, found in groupby(of_data, key=lambda run: (run["party"], run["feed"])):
        cut = lengths.get(place)
        if cut is None or cut["length"] <= after.get(place, 0):
            continue
        standing = intervals.get(place)
        about = {
            "length": cut["length"],
            "link": cut["link"],
            "messages": messages[place[0]],
            "intervals": standing,
            "end_reason": standing[0]["end_reason"] if standing else None,
            "after": after.get(place, 0),
        }
        rows += slices_of(lake, [run | about for run in found])
    return pa.Table.from_pylist(rows, SLICES)


def _of_data(rows: pa.Table, names: list[str]) -> list[dict[str, Any]]:
    return rows.filter(pc.invert(rows["control"])).select(names).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


def messages_by_party(cuts: pa.Table) -> dict[bytes, int]:
    """How many messages of each party are processed, of those that have some."""
    data = cuts.filter(pc.and_(pc.invert(cuts["control"]), pc.greater(cuts["length"], 0)))
    sums = data.group_by("party").aggregate([("length", "sum")])
    return dict(zip(sums["party"].to_pylist(), sums["length_sum"].to_pylist(), strict=True))


@dataclass(frozen=True)
class _Slicing:
    """The task: runs of a feed, clipped to what is wanted and cut into slices."""

    lake: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        for batch in batches:
            for row in batch.to_pylist():
                if rows and (row["party"], row["feed"]) != (rows[-1]["party"], rows[-1]["feed"]):
                    yield pa.RecordBatch.from_pylist(list(slices_of(self.lake, rows)), SLICES)
                    rows = []
                rows.append(row)
        if rows:
            yield pa.RecordBatch.from_pylist(list(slices_of(self.lake, rows)), SLICES)


def slices_of(lake: str, runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The slices of one feed, out of its runs (RUNS with length, link, after, messages, intervals, end_reason)."""
    head = runs[0]
    standing = json.dumps(
        {
            "intervals": [[one["start"], one["end"], one["role"]] for one in head["intervals"] or ()],
            "end_reason": head["end_reason"],
            "admitted": head["intervals"] is not None,
        }
    )
    for start, end, run in _chain(lake, runs):
        for at in range(start, end, SLICE_BLOCKS):
            yield {
                "party": head["party"],
                "feed": head["feed"],
                "start": at,
                "end": min(at + SLICE_BLOCKS, end),
                "file": run["file"],
                "row": run["row"] + at - run["start"],
                "nibbles": bucket_nibbles(head["messages"]),
                "standing": standing,
            }


def _chain(lake: str, runs: list[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Stretches of runs that make up the feed from `after` to its cut. Where branches overlap, those that lead to the
    link of the cut."""
    need, link = runs[0]["length"], runs[0]["link"]
    found: list[tuple[int, int, dict[str, Any]]] = []
    while need > runs[0]["after"]:
        run = next((run for run in runs if run["start"] < need <= run["end"] and _link(lake, run, need) == link), None)
        if run is None:
            raise Corrupt(
                f"block {need - 1} of feed {runs[0]['feed'].hex()} was ordered and is in no run of the lake any more",
                next_step="Run again; the lake may have changed in between.",
            )
        start = max(run["start"], runs[0]["after"])
        found.append((start, need, run))
        need, link = run["start"], run["previous"]
    yield from reversed(found)


def _link(lake: str, run: dict[str, Any], length: int) -> bytes:
    """The link of the block before `length` in a run."""
    if length == run["end"]:
        return run["last_link"]  # type: ignore[no-any-return]  # pyarrow has no types
    row = run["row"] + length - 1 - run["start"]
    for batch in read_rows(lake, run["file"], row, row + 1, ["link"]):
        return batch.column("link")[0].as_py()  # type: ignore[no-any-return]  # pyarrow has no types
    return b""


# the task


@dataclass(frozen=True)
class Demux:
    """The task: slices into parcels. With `wanted` (files of HARD_ITEMS) single operations on those items alone, and no
    rejects of blocks: the first round has told them. With `touching`, which items the blocks write and what is to be said
    of the blocks themselves; it is for blocks whose standing changed."""

    lake: str
    place: Place
    wanted: str | None = None
    touching: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = None if self.wanted is None else wanted_items(self.wanted)
        sender = _Sender()
        rejects = _Rejects()
        blocks = 0
        for batch in batches:
            for each in batch.to_pylist():
                blocks += each["end"] - each["start"]
                items = None if wanted is None else wanted.get(each["party"])
                if wanted is not None and items is None:
                    continue
                for found in self._slice(each, items, rejects):
                    yield from sender.add(PartyKey(each["party"]), each["nibbles"], found)
        yield from sender.flush()
        if self.wanted is None:
            file = self.place.write("rejects", REJECTS, rejects.batches())
            yield parcels_batch([report({"blocks": blocks, "rejects": [] if file is None else [file]})])

    def _slice(self, each: dict[str, Any], items: pl.DataFrame | None, rejects: "_Rejects") -> Iterator[Operations]:
        party, feed = PartyKey(each["party"]), feed_id(FeedKey(each["feed"]))
        standing = Standing.of(each["standing"])
        seq = each["start"]
        rows = read_rows(
            self.lake, each["file"], each["row"], each["row"] + each["end"] - seq, ["feed", "seq", "payload"]
        )
        for batch in rows:
            seqs = batch.column("seq").to_numpy()
            if seqs[0] != seq or batch.column("feed")[0].as_py() != each["feed"]:
                raise Corrupt(f"{each['file']} has other blocks in row {each['row']} than its runs say")
            seq += len(seqs)
            payloads = batch.column("payload")
            counts = standing.counts(seqs)
            if not counts.all():
                if items is None:
                    rejects.exclude(party, feed, seqs[~counts], standing)
                if not self.touching:
                    payloads, seqs = payloads.filter(pa.array(counts)), seqs[counts]
            if items is not None and len(seqs):
                chosen = concerned(payloads, seqs, feed, items)
                payloads, seqs = payloads.filter(pa.array(chosen)), seqs[chosen]
            if not len(seqs):
                continue
            found = read_operations(payloads, seqs, party=party, feed=feed, split=items is None and not self.touching)
            if items is None:
                there = set(seqs[standing.counts(seqs)].tolist()) if self.touching else None
                rejects.malformed(party, feed, found.malformed, there)
                yield touches(found) if self.touching else found
            else:
                yield found.of(items)


@dataclass(frozen=True, slots=True)
class Standing:
    """As what the blocks of a feed count."""

    intervals: tuple[tuple[int, int | None, str | None], ...]
    end_reason: str | None
    admitted: bool

    @staticmethod
    def of(text: str) -> "Standing":
        told = json.loads(text)
        return Standing(tuple(tuple(one) for one in told["intervals"]), told["end_reason"], told["admitted"])

    def counts(self, seqs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where operations count: a role other than a reader's."""
        found = np.zeros(len(seqs), dtype=bool)
        for start, end, role in self.intervals:
            if role is not None and role != READER:
                found |= (seqs >= start) & (seqs < (np.iinfo(np.int64).max if end is None else end))
        return found

    def why_excluded(self, seq: int) -> str:
        """As `kernel.party.admission.Admission.why_excluded` says it."""
        if not self.admitted:
            return str(Reason.UNADMITTED)
        for start, end, role in self.intervals:
            if role == READER and start <= seq and (end is None or seq < end):
                return str(Reason.READER)
        return self.end_reason or str(Reason.BEYOND_CUT)


def touches(found: Operations) -> Operations:
    """Nothing but questions about the items that some operations write."""
    children = found.rest.select(["creator", "local"])
    count = children.num_rows
    nothing = pa.array(np.zeros(count, dtype=np.uint64))
    why = pa.array(np.full(count, TOUCHED, dtype=np.uint8))
    asked = pa.table([*children.columns, *children.columns, nothing, nothing, nothing, why], schema=ASKED_ITEMS)
    return Operations(PLAIN_CHANGES.empty_table(), REST_OPERATIONS.empty_table(), asked, [])


def wanted_items(path: str) -> dict[bytes, pl.DataFrame]:
    """The items of a file of HARD_ITEMS, by party."""
    with pa.OSFile(path, "rb") as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.schema.equals(HARD_ITEMS), table.schema
    found = {}
    for party in table.column("party").unique().to_pylist():
        chosen = table.filter(pc.equal(table["party"], party)).column("item")
        creators, local = item_halves(chosen)
        found[party] = pl.DataFrame({"creator": creators, "local": local}).unique()
    return found


class _Sender:
    """Collects the operations of one party at a time, combines them and packs them into parcels."""

    def __init__(self) -> None:
        self._party: PartyKey | None = None
        self._nibbles = 0
        self._plain: list[pa.Table] = []
        self._rest: list[pa.Table] = []
        self._asked: list[pa.Table] = []
        self._rows = 0
        self._parcels: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, party: PartyKey, nibbles: int, found: Operations) -> Iterator[pa.RecordBatch]:
        if party != self._party:
            self._pack()
            self._party, self._nibbles = party, nibbles
        self._plain.append(found.plain)
        self._rest.append(found.rest)
        self._asked.append(found.asked)
        self._rows += found.plain.num_rows + found.rest.num_rows
        if self._rows >= COMBINE_ROWS:
            self._pack()
        if self._bytes >= PARCEL_BATCH_BYTES:
            yield self._take()

    def flush(self) -> Iterator[pa.RecordBatch]:
        self._pack()
        if self._parcels:
            yield self._take()

    def _take(self) -> pa.RecordBatch:
        taken, self._parcels, self._bytes = self._parcels, [], 0
        return parcels_batch(taken)

    def _pack(self) -> None:
        if self._party is None or not self._plain:
            return
        plain, rest, asked = (pa.concat_tables(each) for each in (self._plain, self._rest, self._asked))
        parcels = pack(self._party, self._nibbles, plain=combined(plain), rest=rest, asked=asked)
        for parcel in parcels:
            self._parcels.append(parcel)
            self._bytes += sum(len(parcel.get(name) or b"") for name in ("plain", "rest", "asked"))
        self._plain, self._rest, self._asked, self._rows = [], [], [], 0


def combined(plain: pa.Table) -> pa.Table:
    """Plain changes of one party, without those that later ones of their feed make void."""
    frame = pl.from_arrow(plain)
    assert isinstance(frame, pl.DataFrame)
    kept = combine(frame.with_columns(party=pl.lit(0, dtype=pl.UInt32)))
    return kept.select(PLAIN_CHANGES.names).to_arrow().cast(PLAIN_CHANGES)


class _Rejects:
    """Collects rejects of whole blocks."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._tables: list[pa.Table] = []

    def exclude(self, party: PartyKey, feed: FeedId, seqs: np.ndarray[Any, Any], standing: Standing) -> None:
        for seq in seqs.tolist():
            self._rows.append((party, feed, seq, -1, standing.why_excluded(seq), "", None))
            if len(self._rows) >= EXCLUDED_ROWS:
                self._settle()

    def malformed(
        self, party: PartyKey, feed: FeedId, found: list[tuple[int, str]], there: set[int] | None = None
    ) -> None:
        """Messages that are malformed; of those that count, when not all do."""
        for seq, detail in found:
            if there is None or seq in there:
                self._rows.append((party, feed, seq, -1, str(Reason.MALFORMED), detail, None))

    def batches(self) -> Iterator[pa.RecordBatch]:
        self._settle()
        for table in self._tables:
            yield from table.to_batches()

    def _settle(self) -> None:
        if self._rows:
            self._tables.append(rows_table(self._rows, REJECTS))
            self._rows = []


def demultiplex(spark: Any, slices: Rows, task: Demux, tasks: int) -> Any:
    """The parcels of all slices, as a DataFrame. Slices that are known here are dealt out evenly, neighbours in a file
    together; others by chance."""
    if isinstance(slices, pa.Table):
        return mapped(_dealt(spark, slices, tasks), task, PARCELS)
    return mapped(slices.repartition(tasks, "party", "feed", "start"), task, PARCELS)


def _dealt(spark: Any, slices: pa.Table, tasks: int) -> Any:
    ordered = slices.sort_by([("party", "ascending"), ("file", "ascending"), ("row", "ascending")])
    blocks = np.cumsum(ordered["end"].to_numpy() - ordered["start"].to_numpy())
    share = -(-int(blocks[-1]) // tasks) if len(blocks) else 1
    number = pa.array(((blocks - 1) // share).astype(np.int32))
    return frame_of(spark, ordered.append_column("task", number)).repartitionById(tasks, "task")
