"""snapshot: subtrees of buckets -> tops -> state roots and CIDs.

    buckets whose newest top is older than their states ──► subtree of each (`subtrees`)      blobs, TOPS
    placements that came or went ──► those of the placement tree (`placement_tops`)           blobs, PLACE_TOPS, PLACE_LISTS
    all tops of a party ──► the nodes above the buckets ─┐
    moves, membership, timeframe, models ────────────────┴► state root, CID                   ROOTS

Most subtrees are there already: reducing a bucket makes its own. What is left are buckets that were folded again, that are
cut anew because their party has grown, or that lie in too many row groups and are written whole. Roots of a few parties
are made on the driver, of many by tasks.
"""

import json
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
from echostore.kernel.snapshot import NIBBLES, ModelVersion, TimeframeEntry, TreeTop
from echostore.pipeline.models import model_factory
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import BLOBS, MOVES, PARCELS, PLACE_TOPS, ROOTS, STATE_INDEX, TOPS
from echostore.pipeline.stages.by_party import HERE_ROWS_MAX
from echostore.pipeline.stages.demux import messages_by_party
from echostore.pipeline.stages.fold_rounds import NEVER_AGAIN, Again
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, mapped, sorted_within, width_of
from echostore.pipeline.stages.move_rows import party_moves
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import bucket_nibbles, packed, parcels_batch, unpacked
from echostore.pipeline.stages.placement_tops import (
    PlacementInputs,
    party_placements,
    read_place_tops,
    renew_placements,
)
from echostore.pipeline.stages.reduce import TURNS, ReadIndex, by_task, index_to_parcels
from echostore.pipeline.stages.standing import base_lacking
from echostore.pipeline.stages.state_files import (
    StateWriter,
    index_parcels,
    parcels_table,
    read_index,
    read_states,
    spread,
    states_noted,
)
from echostore.pipeline.stages.subtrees import STATE_COLUMNS, Subtrees, TopsBefore, latest_tops, tops_parcels
from echostore.wire.base_epoch import BaseName
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.items import encode_moves
from echostore.wire.membership import membership_blobs
from echostore.wire.snapshot import EncodedItem, Put, state_root_bytes
from echostore.wire.tree import Part, finish, join

MERGE_AT = 8
"""Row groups of one bucket beyond which it is written whole."""
TASK_BUCKETS = 64
HERE_PARTIES_MAX = 256
"""State roots that the driver makes itself: some milliseconds each."""


@dataclass(frozen=True, kw_only=True)
class SnapshotInputs:
    """What snapshots are made from. `parties`, `timeframe` and `cuts` are tables here, or DataFrames; files are all that
    count now: those of the last commit and those of this run."""

    spark: Any
    parties: Rows
    timeframe: Rows
    cuts: Rows
    place: Place
    turn: int
    collect: Collect
    models: str | None = None
    index: tuple[NamedFile, ...] = ()
    tops: tuple[NamedFile, ...] = ()
    moves: tuple[NamedFile, ...] = ()
    place_tops: tuple[NamedFile, ...] = ()
    """Those of the last commit."""
    place_changes: tuple[NamedFile, ...] = ()
    """Those of this run."""
    again: Again = NEVER_AGAIN
    anew: frozenset[bytes] = frozenset()

    @property
    def here(self) -> bool:
        """Whether what is known of parties and buckets is on the driver."""
        if self.spark is None:
            return True
        tables = all(isinstance(rows, pa.Table) for rows in (self.parties, self.timeframe, self.cuts))
        files = (*self.index, *self.tops, *self.moves, *self.place_tops)
        return tables and not self.anew and sum(file.rows for file in files) <= HERE_ROWS_MAX


@dataclass(frozen=True, slots=True)
class Snapshots:
    """New files by kind: blobs, tops, roots (ROOTS), place_tops and place_lists; states with state_index where buckets
    were written whole."""

    files: dict[str, list[NamedFile]]


def build_snapshots(inputs: SnapshotInputs) -> Snapshots:
    """The snapshots of all parties of a run."""
    trees = _renew_trees(inputs) if inputs.here else _build_trees(inputs)
    places = renew_placements(_placement_inputs(inputs), inputs.turn + TURNS - 1)
    tops = _Tops((*inputs.tops, *trees.get("tops", ())), (*inputs.place_tops, *places.get("place_tops", ())))
    here = inputs.spark is None or (inputs.here and len(inputs.parties) <= HERE_PARTIES_MAX)
    roots = _roots_here(inputs, tops) if here else _build_roots(inputs, tops)
    files: dict[str, list[NamedFile]] = defaultdict(list)
    for found in (trees, places, roots):
        for kind, named in found.items():
            files[kind] += named
    return Snapshots(dict(files))


@dataclass(frozen=True, slots=True)
class _Tops:
    """The files of tops that count now, of items and of placements."""

    items: tuple[NamedFile, ...]
    placements: tuple[NamedFile, ...]


def _placement_inputs(inputs: SnapshotInputs) -> PlacementInputs:
    return PlacementInputs(
        spark=inputs.spark,
        place=inputs.place,
        turn=inputs.turn,
        collect=inputs.collect,
        cuts=inputs.cuts,
        changes=inputs.place_changes,
        tops=inputs.place_tops,
        again=inputs.again,
        here=inputs.here,
    )


# subtrees


def _renew_trees(inputs: SnapshotInputs) -> dict[str, list[NamedFile]]:
    """The subtrees that are not there yet, found on the driver: almost always none."""
    nibbles = {party: bucket_nibbles(count) for party, count in messages_by_party(inputs.cuts).items()}
    index = read_index(inputs.place.out, [_named(file) for file in inputs.index])
    tops = latest_tops(inputs.place.out, inputs.tops, nibbles)
    known = {(row["party"], row["bucket"]): row["turn"] for row in tops.select(["party", "bucket", "turn"]).to_pylist()}
    notes: dict[tuple[bytes, str], list[str]] = defaultdict(list)
    parcels = index_parcels(index, nibbles)
    for parcel in parcels:
        notes[parcel["party"], parcel["bucket"]].append(parcel["note"])
    stale = set()
    for bucket, noted in notes.items():
        states = states_noted(noted)
        if len(states) > MERGE_AT or max(state["turn"] for state in states) > known.get(bucket, -1):
            stale.add(bucket)
    if not stale:
        return {}
    work = [each for each in (*parcels, *tops_parcels(tops)) if (each["party"], each["bucket"]) in stale]
    return _trees_of(inputs, frame_of(inputs.spark, parcels_table(work)), width_of(inputs.spark))


def _named(file: NamedFile) -> dict[str, Any]:
    return {"path": file.path, "sha256": file.sha256, "bytes": file.bytes, "rows": file.rows}


def _build_trees(inputs: SnapshotInputs) -> dict[str, list[NamedFile]]:
    if not inputs.index:
        return {}
    from pyspark.sql import functions as f

    spark = inputs.spark
    data = as_frame(spark, inputs.cuts).filter("NOT control AND length > 0")
    totals = data.groupBy("party").agg(f.sum("length").alias("messages"))
    index = frame_of(spark, pa.Table.from_batches([named_rows({"state_index": inputs.index})]))
    rows = mapped(index.repartition(min(len(inputs.index), 64)), ReadIndex(inputs.place.out), STATE_INDEX)
    if inputs.anew:
        rows = rows.filter((rows["turn"] >= inputs.turn) | ~rows["party"].isin(*sorted(inputs.anew)))
    work = mapped(rows.join(totals, "party"), index_to_parcels, PARCELS)
    tops = _tops_frame(inputs, inputs.tops)
    if tops is not None:
        work = work.unionByName(mapped(tops.join(totals, "party"), tops_to_parcels, PARCELS))
    tasks = max(width_of(spark), min(4096, len(inputs.index)))
    return _trees_of(inputs, work, tasks)


def _trees_of(inputs: SnapshotInputs, work: Any, tasks: int) -> dict[str, list[NamedFile]]:
    work = sorted_within(by_task(work, tasks), "party", "bucket")
    return named_files(inputs.collect(mapped(work, BuildingTrees(inputs.place, inputs.turn + TURNS - 1), NAMED)))


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
    """The task: where the states of buckets are, sorted by bucket -> their subtrees. `turn` is above all others so far."""

    place: Place
    turn: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = Subtrees(self.place, self.turn)
        whole: list[tuple[bytes, str, pa.Table]] = []
        pending: list[_Work] = []
        for work in _each_bucket(batches):
            if work.stale:
                pending.append(work)
                if len(pending) >= TASK_BUCKETS:
                    whole += self._build(pending, made)
                    pending = []
        whole += self._build(pending, made)
        files = StateWriter(self.place, self.turn).write(whole, whole=True)
        for kind, named in made.write().items():
            files[kind] += named
        yield named_rows(files)

    def _build(self, works: list["_Work"], made: Subtrees) -> Iterator[tuple[bytes, str, pa.Table]]:
        """Buckets are read together, since they lie together in few files. Those in many come out whole."""
        by_depth: dict[int, list[_Work]] = defaultdict(list)
        for work in works:
            by_depth[len(work.bucket)].append(work)
        for depth, each in by_depth.items():
            buckets: dict[bytes, set[str]] = defaultdict(set)
            places: list[dict[str, Any]] = []
            for work in each:
                buckets[work.party].add(work.bucket)
                places += work.states
            columns = None if any(len(work.states) > MERGE_AT for work in each) else STATE_COLUMNS
            table, turns = read_states(self.place.out, places, buckets, columns)
            found = _rows_of(table, depth)
            for work in each:
                start, end = found.get((work.party, work.bucket), (0, 0))
                live = self._add(work, table.slice(start, end - start), turns[start:end], made)
                if len(work.states) > MERGE_AT:
                    yield work.party, work.bucket, live

    def _add(self, work: "_Work", states: pa.Table, turns: np.ndarray[Any, Any], made: Subtrees) -> pa.Table:
        nodes = (
            work.nodes if work.top is None else TopsBefore(self.place.out, [work.top]).nodes(work.party, work.bucket)
        )
        fresh = turns > work.top_turn if nodes is not None else np.ones(len(turns), dtype=bool)
        dirty = [ItemId(item) for item in states["item"].filter(pa.array(fresh)).to_pylist()]
        live = states.filter(pc.invert(states["gone"]))
        made.add(work.party, work.bucket, nodes, dirty, live)
        return live


@dataclass(slots=True)
class _Work:
    """One bucket: where its states are, and the nodes it had: those themselves, or a note about where they are."""

    party: bytes
    bucket: str
    notes: list[str] = field(default_factory=list)
    nodes: bytes | None = None
    top: tuple[bytes, str, str] | None = None
    top_turn: int = -1
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """Whether something was written into it since its top was made, or it is in too many places."""
        self.states = states_noted(self.notes)
        return len(self.states) > MERGE_AT or any(state["turn"] > self.top_turn for state in self.states)


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
            elif top["bucket"] == row["bucket"] and top["turn"] > work.top_turn:
                work.top_turn, work.nodes = top["turn"], row["plain"]
                work.top = (row["party"], row["bucket"], row["note"]) if "path" in top else None
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


# state roots


_OF_PARTIES = ["party", "admission", "membership", "base", "base_name", "base_number"]


def _roots_here(inputs: SnapshotInputs, tops: _Tops) -> dict[str, list[NamedFile]]:
    messages = messages_by_party(inputs.cuts)
    nibbles = {party: bucket_nibbles(count) for party, count in messages.items()}
    found = _by_party(latest_tops(inputs.place.out, tops.items, nibbles))
    placed = _by_party(read_place_tops(inputs.place.out, tops.placements))
    moves = [read_table(inputs.place.out, file, MOVES) for file in inputs.moves]
    moved = _by_party(pa.concat_tables([MOVES.empty_table(), *moves]))
    frames = _by_party(inputs.timeframe.select(["party", "feed", "seq", "link"]))
    rows = [
        {
            **row,
            "messages": messages.get(row["party"]),
            "timeframe": frames[row["party"]].to_pylist() if row["party"] in frames else None,
            "tops": [packed(found[row["party"]])] if row["party"] in found else None,
            "moves": [packed(moved[row["party"]])] if row["party"] in moved else None,
            "placements": [packed(placed[row["party"]])] if row["party"] in placed else None,
        }
        for row in inputs.parties.select(_OF_PARTIES).to_pylist()
    ]
    return _write_roots(inputs.place, model_factory(inputs.models), rows)


def _by_party(rows: pa.Table) -> dict[bytes, pa.Table]:
    return {
        party: rows.filter(pc.equal(rows["party"], pa.scalar(party, pa.binary())))
        for party in rows["party"].unique().to_pylist()
    }


def _build_roots(inputs: SnapshotInputs, tops: _Tops) -> dict[str, list[NamedFile]]:
    from pyspark.sql import functions as f

    spark = inputs.spark
    places = f.collect_list(f.struct("feed", "seq", "link")).alias("timeframe")
    data = as_frame(spark, inputs.cuts).filter("NOT control AND length > 0")
    totals = data.groupBy("party").agg(f.sum("length").alias("messages"))
    named = as_frame(spark, inputs.parties).select(*_OF_PARTIES)
    frame = named.join(totals, "party", "left")
    frame = frame.join(as_frame(spark, inputs.timeframe).groupBy("party").agg(places), "party", "left")
    found = _tops_frame(inputs, tops.items)
    empty = f.expr("CAST(NULL AS ARRAY<BINARY>)")
    if found is None:
        frame = frame.withColumn("tops", empty)
    else:
        slim = mapped(found.drop("nodes"), pack_rows, _PARTY_ROWS)
        frame = frame.join(slim.groupBy("party").agg(f.collect_list("data").alias("tops")), "party", "left")
    if not tops.placements:
        frame = frame.withColumn("placements", empty)
    else:
        names = frame_of(spark, pa.Table.from_batches([named_rows({"place_tops": tops.placements})]))
        rows = mapped(
            names.repartition(min(len(tops.placements), 64)), ReadFiles(inputs.place.out, PLACE_TOPS), PLACE_TOPS
        )
        grouped = mapped(rows, pack_rows, _PARTY_ROWS).groupBy("party").agg(f.collect_list("data").alias("placements"))
        frame = frame.join(grouped, "party", "left")
    if not inputs.moves:
        frame = frame.withColumn("moves", empty)
    else:
        names = frame_of(spark, pa.Table.from_batches([named_rows({"moves": inputs.moves})]))
        moves = mapped(names.repartition(min(len(inputs.moves), 64)), ReadFiles(inputs.place.out, MOVES), MOVES)
        if inputs.anew:
            moves = moves.filter((moves["turn"] >= inputs.turn) | ~moves["party"].isin(*sorted(inputs.anew)))
        grouped = mapped(moves, pack_rows, _PARTY_ROWS).groupBy("party").agg(f.collect_list("data").alias("moves"))
        frame = frame.join(grouped, "party", "left")
    tasks = width_of(spark)
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
        rows = (row for batch in batches for row in batch.to_pylist())
        yield named_rows(_write_roots(self.place, model_factory(self.models), rows))


def _write_roots(place: Place, factory: ModelFactory, parties: Iterable[dict[str, Any]]) -> dict[str, list[NamedFile]]:
    blobs: dict[Cid, bytes] = {}
    rows = []
    for party in parties:
        try:
            rows.append(party_root(party, factory, blobs.__setitem__))
        except EchoError as error:  # a state root that is too large: this party alone goes without
            rows.append((party["party"], None, None, 0, "", "", error.what))
    files = {
        kind: place.write(kind, schema, table.to_batches(max_chunksize=4096))
        for kind, schema, table in (
            ("blobs", BLOBS, rows_table(list(blobs.items()), BLOBS)),
            ("roots", ROOTS, rows_table(rows, ROOTS)),
        )
    }
    return {kind: [file] for kind, file in files.items() if file is not None}


def party_root(row: dict[str, Any], factory: ModelFactory, put: Put) -> tuple[Any, ...]:
    """The row of ROOTS of a party, its blobs above the buckets put."""
    tops = [top for data in row["tops"] or () for top in unpacked(data).to_pylist()]
    depth = bucket_nibbles(row["messages"] or 0)
    latest: dict[str, dict[str, Any]] = {}
    for top in sorted(tops, key=lambda one: one["turn"]):
        if len(top["bucket"]) == depth:
            latest[top["bucket"]] = top
    top = join_tops(latest, put)
    placements = party_placements([one for data in row["placements"] or () for one in unpacked(data).to_pylist()], put)
    used = sorted({ModelVersion(*model) for one in latest.values() for model in json.loads(one["models"])})
    names = [f"{model}@{version}" for model, version in used]
    unknown = ",".join(name for name, model in zip(names, used, strict=True) if not factory.known(*model))
    moves = encode_moves(party_moves(row["moves"] or ()), put)
    moves_cid, membership = cid_of(moves, PROTOBUF), membership_blobs(bytes(row["membership"]))
    if unknown:  # what a model of another's making amounts to is not known here, so nothing is claimed
        return row["party"], None, None, top.count, ",".join(names), unknown, ""
    if row["base"] is None and row["base_number"] is not None:
        return row["party"], None, None, top.count, ",".join(names), "", base_lacking(row["base_number"])
    cid, data = state_root_bytes(
        party=PartyKey(row["party"]),
        timeframe=[
            TimeframeEntry(FeedKey(one["feed"]), one["seq"], Link(one["link"])) for one in row["timeframe"] or ()
        ],
        admission_digest=row["admission"],
        base_epoch=_base_mark(row),
        models=used,
        item_count=top.count,
        membership_root=next(iter(membership)),
        index_root=top.cid,
        tree=moves_cid,
        placements=placements.cid,
    )
    for each, blob in ((moves_cid, moves), *reversed(membership.items()), (cid, data)):
        put(each, blob)
    return row["party"], cid, data, top.count, ",".join(names), "", ""


def _base_mark(row: dict[str, Any]) -> bytes | None:
    """What a state root says of its base, as `wire.base_epoch.base_mark` does: nothing where it left nothing out."""
    if row["base"] is None or not BaseName.decode(bytes(row["base_name"])).discards:
        return None
    return bytes(row["base"])


def join_tops(tops: dict[str, dict[str, Any]], put: Put) -> TreeTop:
    """The top of a party's tree over the tops of its buckets, all of one depth."""
    return finish(_joined(tops, "", put), put)


def _joined(tops: dict[str, dict[str, Any]], path: str, put: Put) -> Part:
    """What is at a path that is above buckets, or one."""
    below = {bucket: top for bucket, top in tops.items() if bucket.startswith(path) and top["count"]}
    if path not in below:
        return join({nibble: _joined(below, path + nibble, put) for nibble in NIBBLES if below}, put, path=path)
    top = below[path]
    if top["cid"] is not None:
        return Part.standing(TreeTop(Cid(top["cid"]), top["count"], top["size"]))
    rows = unpacked(top["entries"]).to_pylist()
    return Part.of([(ItemId(row["item"]), EncodedItem(row["encoded"])) for row in rows], path)
