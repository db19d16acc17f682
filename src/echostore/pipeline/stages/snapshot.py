"""snapshot: item states -> subtrees, bucket by bucket -> tops -> state roots and CIDs.

    changed buckets ──► subtree of each (wire.tree)         blobs that are new, TOPS
    all tops of a party ──► the nodes above the buckets ─┐
    moves, membership, timeframe, models ────────────────┴► state root, CID        ROOTS

A bucket is a whole subtree, so its nodes depend on its items alone, and only the nodes above changed items are made anew.
The one thing a bucket can't know is whether few items form a page of their own or share one with its neighbours: up to
a page of items go up as they are, and are put where they belong when the tops are joined.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import EchoError
from echostore.kernel.ids import Cid, FeedKey, ItemId, Link, PartyKey
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.snapshot import NIBBLES, ModelVersion, TimeframeEntry, TreeTop, is_page
from echostore.pipeline.models import model_factory
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import BLOBS, MOVES, PARCELS, ROOTS, STATE_INDEX, TOPS, TREE_NODES
from echostore.pipeline.stages.frames import frame_of, mapped
from echostore.pipeline.stages.move_rows import party_moves
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import bucket_nibbles, packed, parcels_batch, unpacked
from echostore.pipeline.stages.reduce import TURNS, ReadIndex, index_to_parcels
from echostore.pipeline.stages.state_files import StateWriter, read_states, spread, states_noted
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.items import encode_moves
from echostore.wire.snapshot import EncodedItem, Put, state_root_bytes
from echostore.wire.tree import NodeMap, build, join, update_below

MERGE_AT = 8
"""Row groups of one bucket beyond which it is written whole."""
TASK_BUCKETS = 64

_ENTRIES = pa.schema([pa.field("item", pa.binary(), nullable=False), pa.field("encoded", pa.binary(), nullable=False)])
_STATE_COLUMNS = ["party", "item_key", "item", "gone", "model", "version", "state", "encoded"]


@dataclass(frozen=True, kw_only=True)
class SnapshotInputs:
    """What snapshots are made from. `parties` and `timeframe` are DataFrames; files are all that count now: those of the
    last commit and those of this run."""

    spark: Any
    parties: Any
    timeframe: Any
    cuts: Any
    place: Place
    turn: int
    collect: Collect
    models: str | None = None
    index: tuple[NamedFile, ...] = ()
    tops: tuple[NamedFile, ...] = ()
    """Of the last commit."""
    moves: tuple[NamedFile, ...] = ()
    anew: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshots:
    """New files by kind: blobs, tops, roots (ROOTS), and states with state_index where buckets were written whole."""

    files: dict[str, list[NamedFile]]


def build_snapshots(inputs: SnapshotInputs) -> Snapshots:
    """The snapshots of all parties of a run."""
    trees = _build_trees(inputs)
    roots = _build_roots(inputs, (*inputs.tops, *trees.get("tops", ())))
    files: dict[str, list[NamedFile]] = defaultdict(list)
    for found in (trees, roots):
        for kind, named in found.items():
            files[kind] += named
    return Snapshots(dict(files))


def roots_frame(spark: Any, place: Place, files: Iterable[NamedFile]) -> Any:
    """The rows of files of ROOTS, as a DataFrame."""
    frame = frame_of(spark, pa.Table.from_batches([named_rows({"roots": list(files)})]))
    return mapped(frame, ReadFiles(place.out, ROOTS), ROOTS)


# subtrees


def _build_trees(inputs: SnapshotInputs) -> dict[str, list[NamedFile]]:
    if not inputs.index:
        return {}
    from pyspark.sql import functions as f

    spark = inputs.spark
    data = inputs.cuts.filter("NOT control AND length > 0")
    totals = data.groupBy("party").agg(f.sum("length").alias("messages"))
    index = frame_of(spark, pa.Table.from_batches([named_rows({"state_index": inputs.index})]))
    rows = mapped(index.repartition(min(len(inputs.index), 64)), ReadIndex(inputs.place.out), STATE_INDEX)
    if inputs.anew:
        rows = rows.filter((rows["turn"] >= inputs.turn) | ~rows["party"].isin(*sorted(inputs.anew)))
    work = mapped(rows.join(totals, "party"), index_to_parcels, PARCELS)
    tops = _tops_frame(inputs, inputs.tops)
    if tops is not None:
        work = work.unionByName(mapped(tops.join(totals, "party"), tops_to_parcels, PARCELS))
    tasks = max(int(spark.sparkContext.defaultParallelism), min(4096, len(inputs.index)))
    work = work.repartition(tasks, "party", "bucket").sortWithinPartitions("party", "bucket")
    found = mapped(work, BuildingTrees(inputs.place, inputs.turn), NAMED)
    return named_files(inputs.collect(found))


def _tops_frame(inputs: SnapshotInputs, files: Iterable[NamedFile]) -> Any | None:
    named = list(files)
    if not named:
        return None
    frame = frame_of(inputs.spark, pa.Table.from_batches([named_rows({"tops": named})]))
    rows = mapped(frame.repartition(min(len(named), 64)), ReadFiles(inputs.place.out, TOPS), TOPS)
    if inputs.anew:
        rows = rows.filter((rows["turn"] >= inputs.turn) | ~rows["party"].isin(*sorted(inputs.anew)))
    return rows


@dataclass(frozen=True)
class ReadFiles:
    """The task: names of files into their rows."""

    out: str
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
                yield from read_table(self.out, file, self.schema).to_batches()


def tops_to_parcels(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Tops of the last commit, with the messages of their party, to the buckets of this run."""
    for batch in batches:
        parcels = []
        for row in batch.to_pylist():
            note = json.dumps({"top": {"bucket": row["bucket"], "turn": row["turn"]}})
            for bucket in spread(row["bucket"], bucket_nibbles(row["messages"])):
                parcels.append(
                    {"party": row["party"], "bucket": bucket, "rows": 0, "note": note, "plain": row["nodes"]}
                )
        yield parcels_batch(parcels)


@dataclass(frozen=True)
class BuildingTrees:
    """The task: where the states of buckets are, sorted by bucket -> their subtrees."""

    place: Place
    turn: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = _Made(self.place, self.turn)
        pending: list[_Work] = []
        for work in _each_bucket(batches):
            if work.changed(self.turn):
                pending.append(work)
                if len(pending) >= TASK_BUCKETS:
                    self._build(pending, made)
                    pending = []
        self._build(pending, made)
        yield named_rows(made.write())

    def _build(self, works: list["_Work"], made: "_Made") -> None:
        """Buckets are read together, since they lie together in few files."""
        by_depth: dict[int, list[_Work]] = defaultdict(list)
        for work in works:
            by_depth[len(work.bucket)].append(work)
        for depth, each in by_depth.items():
            buckets: dict[bytes, set[str]] = defaultdict(set)
            places: list[dict[str, Any]] = []
            for work in each:
                buckets[work.party].add(work.bucket)
                work.states = states_noted(work.notes)
                places += work.states
            columns = None if any(len(work.states) > MERGE_AT for work in each) else _STATE_COLUMNS
            table, turns = read_states(self.place.out, places, buckets, columns)
            found = _rows_of(table, depth)
            for work in each:
                start, end = found.get((work.party, work.bucket), (0, 0))
                made.add(work, table.slice(start, end - start), turns[start:end])


@dataclass(slots=True)
class _Work:
    """One bucket: notes about its states, and the nodes it had."""

    party: bytes
    bucket: str
    notes: list[str] = field(default_factory=list)
    nodes: bytes | None = None
    top_turn: int = -1
    reshaped: bool = False
    states: list[dict[str, Any]] = field(default_factory=list)

    def changed(self, turn: int) -> bool:
        """Whether something was written into it in this run, or it was no bucket before."""
        fresh = any(json.loads(note).get("state", {}).get("turn", -1) >= turn for note in self.notes)
        return fresh or self.reshaped


def _each_bucket(batches: Iterator[pa.RecordBatch]) -> Iterator[_Work]:
    work: _Work | None = None
    for batch in batches:
        for row in batch.select(["party", "bucket", "note", "plain"]).to_pylist():
            if work is None or (row["party"], row["bucket"]) != (work.party, work.bucket):
                if work is not None:
                    yield work
                work = _Work(row["party"], row["bucket"])
            top = json.loads(row["note"]).get("top")
            if top is None:
                work.notes.append(row["note"])
            elif top["bucket"] != row["bucket"]:
                work.reshaped = True
            elif top["turn"] > work.top_turn:
                work.top_turn, work.nodes = top["turn"], row["plain"]
    if work is not None:
        yield work


def _rows_of(table: pa.Table, depth: int) -> dict[tuple[bytes, str], tuple[int, int]]:
    """Where each bucket lies in states that ascend by party and key."""
    found: dict[tuple[bytes, str], tuple[int, int]] = {}
    parties, keys = table.column("party").to_pylist(), table.column("item_key").to_pylist()
    for at, (party, key) in enumerate(zip(parties, keys, strict=True)):
        place = (party, key.hex()[:depth])
        found[place] = (found.get(place, (at, at))[0], at + 1)
    return found


class _Made:
    """Collects subtrees and writes them as files."""

    def __init__(self, place: Place, turn: int) -> None:
        self._place, self._turn = place, turn
        self._blobs: dict[Cid, bytes] = {}
        self._tops: list[tuple[Any, ...]] = []
        self._whole: list[tuple[bytes, str, pa.Table]] = []

    def add(self, work: _Work, states: pa.Table, turns: np.ndarray[Any, Any]) -> None:
        gone = states["gone"].to_numpy(zero_copy_only=False)
        fresh = turns >= self._turn if work.nodes is not None else np.ones(len(turns), dtype=bool)
        dirty = [ItemId(item) for item in states["item"].filter(pa.array(fresh)).to_pylist()]
        live = states.filter(pa.array(~gone))
        if len(work.states) > MERGE_AT:
            self._whole.append((work.party, work.bucket, live))
        models = sorted(set(zip(live["model"].to_pylist(), live["version"].to_pylist(), strict=True)))
        place = (work.party, work.bucket, self._turn)
        if is_page(len(work.bucket), live.num_rows):
            pairs = list(zip(live["item"].to_pylist(), _encoded(live), strict=True))
            entries = packed(rows_table(pairs, _ENTRIES)) if pairs else None
            self._tops.append((*place, None, live.num_rows, json.dumps(models), entries, None))
            return
        top, nodes = subtree(work.bucket, work.nodes, dirty, live, self._blobs.__setitem__)
        kept = [(work.party, path, node.cid, node.count) for path, node in sorted(nodes.nodes.items())]
        self._tops.append((*place, top.cid, top.count, json.dumps(models), None, packed(rows_table(kept, TREE_NODES))))

    def write(self) -> dict[str, list[NamedFile]]:
        # Whole buckets get the highest turn of this run.
        files = StateWriter(self._place, self._turn + TURNS - 1).write(self._whole, whole=True)
        for kind, rows, schema in (("blobs", list(self._blobs.items()), BLOBS), ("tops", self._tops, TOPS)):
            file = self._place.write(kind, schema, rows_table(rows, schema).to_batches(max_chunksize=4096))
            files[kind] += [] if file is None else [file]
        return files


def _encoded(states: pa.Table) -> list[EncodedItem]:
    return [EncodedItem(data) for data in pc.coalesce(states["encoded"], states["state"]).to_pylist()]


def subtree(bucket: str, nodes: bytes | None, dirty: list[ItemId], live: pa.Table, put: Put) -> tuple[TreeTop, NodeMap]:
    """The subtree of a bucket whose items are `live` (ascending by key); `nodes` are those it had before."""
    cache = NodeMap()
    if nodes is not None:
        for row in unpacked(nodes).to_pylist():
            cache.keep(row["path"], TreeTop(Cid(row["cid"]), row["count"]))
    keys = [key.hex() for key in live["item_key"].to_pylist()]
    items, encoded = live["item"].to_pylist(), _encoded(live)

    def items_under(path: str) -> list[tuple[ItemId, EncodedItem]]:
        start, end = bisect_left(keys, path), bisect_left(keys, path + "g")  # "g" sorts after every nibble
        return [(ItemId(items[at]), encoded[at]) for at in range(start, end)]

    top = update_below(cache, dirty, items_under, put, path=bucket)
    assert top is not None, bucket
    return top, cache


# state roots


def _build_roots(inputs: SnapshotInputs, tops: tuple[NamedFile, ...]) -> dict[str, list[NamedFile]]:
    from pyspark.sql import functions as f

    spark = inputs.spark
    places = f.collect_list(f.struct("feed", "seq", "link")).alias("timeframe")
    data = inputs.cuts.filter("NOT control AND length > 0")
    totals = data.groupBy("party").agg(f.sum("length").alias("messages"))
    frame = inputs.parties.select("party", "admission", "membership").join(totals, "party", "left")
    frame = frame.join(inputs.timeframe.groupBy("party").agg(places), "party", "left")
    found = _tops_frame(inputs, tops)
    empty = f.expr("CAST(NULL AS ARRAY<BINARY>)")
    if found is None:
        frame = frame.withColumn("tops", empty)
    else:
        slim = mapped(found.drop("nodes"), pack_rows, _PARTY_ROWS)
        frame = frame.join(slim.groupBy("party").agg(f.collect_list("data").alias("tops")), "party", "left")
    if not inputs.moves:
        frame = frame.withColumn("moves", empty)
    else:
        names = frame_of(spark, pa.Table.from_batches([named_rows({"moves": inputs.moves})]))
        moves = mapped(names.repartition(min(len(inputs.moves), 64)), ReadFiles(inputs.place.out, MOVES), MOVES)
        if inputs.anew:
            moves = moves.filter((moves["turn"] >= inputs.turn) | ~moves["party"].isin(*sorted(inputs.anew)))
        grouped = mapped(moves, pack_rows, _PARTY_ROWS).groupBy("party").agg(f.collect_list("data").alias("moves"))
        frame = frame.join(grouped, "party", "left")
    tasks = int(spark.sparkContext.defaultParallelism)
    task = BuildingRoots(inputs.place, inputs.models)
    return named_files(inputs.collect(mapped(frame.repartition(tasks, "party"), task, NAMED)))


_PARTY_ROWS = pa.schema([pa.field("party", pa.binary(), nullable=False), pa.field("data", pa.binary(), nullable=False)])


def pack_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of any schema with a party, packed by party."""
    for batch in batches:
        table = pa.Table.from_batches([batch])
        rows = [
            {"party": party, "data": packed(table.filter(pc.equal(table["party"], party)))}
            for party in table["party"].unique().to_pylist()
        ]
        yield pa.RecordBatch.from_pylist(rows, _PARTY_ROWS)


@dataclass(frozen=True)
class BuildingRoots:
    """The task: tops, moves and the rest of each party -> its state root."""

    place: Place
    models: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        factory = model_factory(self.models)
        blobs: dict[Cid, bytes] = {}
        rows = []
        for batch in batches:
            for row in batch.to_pylist():
                try:
                    rows.append(party_root(row, factory, blobs.__setitem__))
                except EchoError as error:  # a state root that is too large: this party alone goes without
                    rows.append((row["party"], None, None, 0, "", "", error.what))
        files = {
            kind: self.place.write(kind, schema, table.to_batches(max_chunksize=4096))
            for kind, schema, table in (
                ("blobs", BLOBS, rows_table(list(blobs.items()), BLOBS)),
                ("roots", ROOTS, rows_table(rows, ROOTS)),
            )
        }
        yield named_rows({kind: [file] for kind, file in files.items() if file is not None})


def party_root(row: dict[str, Any], factory: ModelFactory, put: Put) -> tuple[Any, ...]:
    """The row of ROOTS of a party, its blobs above the buckets put."""
    tops = [top for data in row["tops"] or () for top in unpacked(data).to_pylist()]
    depth = bucket_nibbles(row["messages"] or 0)
    latest: dict[str, dict[str, Any]] = {}
    for top in sorted(tops, key=lambda one: one["turn"]):
        if len(top["bucket"]) == depth:
            latest[top["bucket"]] = top
    top = join_tops(latest, put)
    used = sorted({ModelVersion(*model) for one in latest.values() for model in json.loads(one["models"])})
    names = [f"{model}@{version}" for model, version in used]
    unknown = ",".join(name for name, model in zip(names, used, strict=True) if not factory.known(*model))
    moves = encode_moves(party_moves(row["moves"] or ()), put)
    membership = bytes(row["membership"])
    moves_cid, membership_cid = cid_of(moves, PROTOBUF), cid_of(membership, PROTOBUF)
    if unknown:  # what a model of another's making amounts to is not known here, so nothing is claimed
        return row["party"], None, None, top.count, ",".join(names), unknown, ""
    cid, data = state_root_bytes(
        party=PartyKey(row["party"]),
        timeframe=[
            TimeframeEntry(FeedKey(one["feed"]), one["seq"], Link(one["link"])) for one in row["timeframe"] or ()
        ],
        admission_digest=row["admission"],
        base_epoch=None,
        models=used,
        item_count=top.count,
        membership_root=membership_cid,
        index_root=top.cid,
        tree=moves_cid,
    )
    for each, blob in ((moves_cid, moves), (membership_cid, membership), (cid, data)):
        put(each, blob)
    return row["party"], cid, data, top.count, ",".join(names), "", ""


def join_tops(tops: dict[str, dict[str, Any]], put: Put) -> TreeTop:
    """The top of a party's tree over the tops of its buckets, all of one depth."""
    found = _join(tops, "", put)
    return found if found is not None else build([], put)


def _join(tops: dict[str, dict[str, Any]], path: str, put: Put) -> TreeTop | None:
    """The node at a path that is above buckets, or one."""
    below = {bucket: top for bucket, top in tops.items() if bucket.startswith(path)}
    count = sum(top["count"] for top in below.values())
    if not count:
        return None
    if is_page(len(path), count):
        items = [
            (ItemId(row["item"]), EncodedItem(row["encoded"]))
            for top in below.values()
            if top["entries"] is not None
            for row in unpacked(top["entries"]).to_pylist()
        ]
        return build(items, put, path=path)
    if path in below:
        return TreeTop(Cid(below[path]["cid"]), count)
    branches = [(nibble, _join(below, path + nibble, put)) for nibble in NIBBLES]
    return join([(nibble, top) for nibble, top in branches if top is not None], put, path=path)
