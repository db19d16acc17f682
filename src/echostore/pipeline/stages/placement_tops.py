"""The placement tree: changes of placements -> lists and subtrees of buckets -> tops, which `snapshot` joins to state roots.

    PLACE_CHANGES of the rounds ──► by bucket of the placement's key ──► list, subtree     blobs, PLACE_LISTS, PLACE_TOPS
    PLACE_TOPS of the last commit ──┘ (one shuffle; here where they are few)

Items are cut by their own key, placements by that of the place: so what came and went is shuffled once, 73 bytes for each
placement. Where nothing came or went nothing is read or written, whatever else a run changes. All that hangs at one place
is in one bucket, and so in one task.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import NIBBLES, PLACEMENT_BYTES, TreeTop, is_page
from echostore.pipeline.output.files import checked_path, read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import BLOBS, PARCELS, PLACE_CHANGES, PLACE_LISTS, PLACE_TOPS
from echostore.pipeline.stages.demux import messages_by_party
from echostore.pipeline.stages.fold_rounds import Again
from echostore.pipeline.stages.frames import (
    Rows,
    as_frame,
    frame_of,
    mapped,
    repartitioned,
    sorted_within,
    united,
    width_of,
)
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import bucket_nibbles, parcels_batch
from echostore.pipeline.stages.placement_changes import AGAIN, without_void
from echostore.pipeline.stages.placement_lists import CHANGE, Changed, PlacementList, array_of, split
from echostore.pipeline.stages.reduce import by_task
from echostore.pipeline.stages.state_files import parcels_table, spread
from echostore.pipeline.stages.subtrees import node_map, pack_nodes
from echostore.pipeline.stages.writers import read_arrow, write_arrow
from echostore.wire.placements import placement_part
from echostore.wire.snapshot import Put
from echostore.wire.tree import NodeMap, Part, finish, join

MERGE_AT = 8
"""Rows of one list beyond which it is written whole."""
GROUP_BYTES = 1 << 20
"""Neighbouring lists share a row group up to this size."""
FILE_BYTES = 64 << 20
"""Lists that a task keeps before it writes them as one file."""
HERE_CHANGES = 8192
HERE_PLACEMENTS = 1 << 17
"""Up to so many changes of buckets with so many placements are worked in on the driver: less than a job costs."""

Files = dict[str, list[NamedFile]]


@dataclass(frozen=True, kw_only=True)
class PlacementInputs:
    """What the placement trees of a run are made from: what the rounds say that came and went, and the tops before.
    `here`: whether the tops are few, and `cuts` a table."""

    spark: Any
    place: Place
    turn: int
    collect: Collect
    cuts: Rows
    changes: tuple[NamedFile, ...]
    tops: tuple[NamedFile, ...]
    again: Again
    here: bool


def renew_placements(inputs: PlacementInputs, turn: int) -> Files:
    """Blobs, lists and tops of the buckets in which placements came or went. `turn` is above all others so far."""
    if not inputs.changes:
        return {}
    again = None
    if inputs.again.rounds:
        rows = [(party, item, last) for (party, item), last in inputs.again.rounds.items()]
        again = rows_table(rows, AGAIN)
    if inputs.here:
        nibbles = {party: bucket_nibbles(count) for party, count in messages_by_party(inputs.cuts).items()}
        tops = read_place_tops(inputs.place.out, inputs.tops)
        if sum(file.rows for file in inputs.changes) <= HERE_CHANGES:
            found = _worked_in_here(inputs, again, tops, nibbles, turn)
            if found is not None:
                return found
        notes = frame_of(inputs.spark, parcels_table(list(_tops_parcels(tops, nibbles))))
    else:
        notes = _noted(inputs)
    names = frame_of(inputs.spark, pa.Table.from_batches([named_rows({"place_changes": inputs.changes})]))
    scratch = None if again is None else write_arrow(inputs.place, "again", again)
    dealing = Dealing(inputs.place.out, inputs.turn, scratch)
    work = mapped(repartitioned(names, min(len(inputs.changes), 64)), dealing, PARCELS)
    tasks = max(width_of(inputs.spark), min(4096, sum(file.rows for file in inputs.changes) // TASK_CHANGES))
    work = work if notes is None else united(work, notes)
    work = sorted_within(by_task(work, tasks), "party", "bucket")
    return named_files(inputs.collect(mapped(work, Placing(inputs.place, turn), NAMED)))


TASK_CHANGES = 1 << 18
"""Changes for one task, at least: seconds of work."""


def _worked_in_here(
    inputs: PlacementInputs, again: pa.Table | None, tops: pa.Table, nibbles: Mapping[bytes, int], turn: int
) -> Files | None:
    """The same on the driver; None when the buckets are too large for that."""
    out = inputs.place.out
    changes = pa.concat_tables([read_table(out, file, PLACE_CHANGES) for file in inputs.changes])
    work = list(deal(without_void(changes, inputs.turn, again)))
    touched = {(each["party"], each["bucket"]) for each in work}
    depths = {party: nibbles.get(party, 0) for party, _ in touched}
    # A bucket of another depth is cut anew.
    large = sum(
        count
        for (party, bucket), count in _counts(tops).items()
        if (party, bucket) in touched or len(bucket) != depths.get(party, len(bucket))
    )
    if large > HERE_PLACEMENTS:
        return None
    table = pa.concat_tables([parcels_table(work), parcels_table(list(_tops_parcels(tops, depths)))])
    table = table.sort_by([("party", "ascending"), ("bucket", "ascending")]).combine_chunks()
    (made,) = Placing(inputs.place, turn)(iter(table.to_batches()))
    return named_files(made.to_pylist())


def _counts(tops: pa.Table) -> dict[tuple[bytes, str], int]:
    """How many placements each bucket has, by its newest row."""
    found: dict[tuple[bytes, str], tuple[int, int]] = {}
    for party, bucket, turn, count in zip(
        *(tops[name].to_pylist() for name in ("party", "bucket", "turn", "count")), strict=True
    ):
        found[party, bucket] = max(found.get((party, bucket), (-1, 0)), (turn, count))
    return {place: count for place, (_, count) in found.items()}


def read_place_tops(out: str, files: Iterable[NamedFile]) -> pa.Table:
    return pa.concat_tables([PLACE_TOPS.empty_table(), *(read_table(out, file, PLACE_TOPS) for file in files)])


# parcels


def deal(changes: pa.Table) -> Iterator[dict[str, Any]]:
    """PLACE_CHANGES as parcels: `plain` has the rows of one bucket as CHANGE."""
    if not changes.num_rows:
        return
    records = np.zeros(changes.num_rows, CHANGE)
    for name in ("key", "placement"):
        data = b"".join(changes[name].to_pylist())
        records[name] = np.frombuffer(data, np.uint8).reshape(-1, PLACEMENT_BYTES)
    records["turn"], records["gone"] = changes["turn"].to_numpy(), changes["gone"].to_numpy()
    places = changes.select(["party", "bucket"]).append_column("row", pa.array(np.arange(changes.num_rows)))
    for group in places.group_by(["party", "bucket"]).aggregate([("row", "list")]).to_pylist():
        plain = records[np.array(group["row_list"], np.int64)].tobytes()
        yield {"party": group["party"], "bucket": group["bucket"], "rows": len(group["row_list"]), "plain": plain}


@dataclass(frozen=True)
class Dealing:
    """The task: names of files of PLACE_CHANGES into parcels. `again`: where rows of AGAIN are."""

    out: str
    first: int
    again: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        again = None if self.again is None else read_arrow(self.again)
        for row in (row for batch in batches for row in batch.to_pylist()):
            file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
            changes = read_table(self.out, file, PLACE_CHANGES)
            yield parcels_batch(list(deal(without_void(changes, self.first, again))))


def _tops_parcels(tops: pa.Table, nibbles: Mapping[bytes, int]) -> Iterator[dict[str, Any]]:
    """PLACE_TOPS as parcels for the buckets of this run: a note, and `rest` with the entries."""
    for row in tops.to_pylist():
        depth = nibbles.get(row["party"])
        if depth is not None:
            yield from _noting(row, depth)


def _noting(row: dict[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    note = json.dumps({name: row[name] for name in _NOTED})
    for bucket in spread(row["bucket"], depth):
        yield {"party": row["party"], "bucket": bucket, "rows": 0, "rest": row["entries"], "note": note}


_NOTED = ("bucket", "turn", "whole", "path", "sha256", "bytes", "group", "rows")


def _noted(inputs: PlacementInputs) -> Any | None:
    """The same in Spark."""
    if not inputs.tops:
        return None
    from pyspark.sql import functions as f

    data = as_frame(inputs.spark, inputs.cuts).filter("NOT control AND length > 0")
    totals = data.groupBy("party").agg(f.sum("length").alias("messages"))
    names = frame_of(inputs.spark, pa.Table.from_batches([named_rows({"place_tops": inputs.tops})]))
    rows = mapped(names.repartition(min(len(inputs.tops), 64)), ReadPlaceTops(inputs.place.out), PLACE_TOPS)
    return mapped(rows.join(totals, "party"), place_tops_to_parcels, PARCELS)


@dataclass(frozen=True)
class ReadPlaceTops:
    """The task: names of files into their rows."""

    out: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
                yield from read_table(self.out, file, PLACE_TOPS).to_batches()


def place_tops_to_parcels(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """PLACE_TOPS with the messages of their party into parcels."""
    for batch in batches:
        rows = batch.to_pylist()
        yield parcels_batch([each for row in rows for each in _noting(row, bucket_nibbles(row["messages"]))])


# buckets


@dataclass(frozen=True)
class Placing:
    """The task: parcels, sorted by bucket -> lists and subtrees of those in which something changed."""

    place: Place
    turn: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written, lists = _Written(self.place, self.turn), _Lists(self.place.out)
        for bucket in _each_bucket(batches):
            if bucket.stale:
                self._renew(bucket, lists, written)
        yield named_rows(written.files())

    def _renew(self, bucket: "_Bucket", lists: "_Lists", written: "_Written") -> None:
        before = bucket.before(lists)
        changes = np.frombuffer(b"".join(bucket.changes), CHANGE)
        changed = before.list.changed(changes)
        if not changed and not bucket.cut_anew:
            return
        if is_page(len(bucket.bucket), len(changed.now), len(changed.now) * PLACEMENT_BYTES):
            written.add_few(bucket, changed.now)
            return
        top, nodes = changed.subtree(bucket.bucket, before.nodes, written.blobs.__setitem__)
        whole = before.nodes is None or before.rows >= MERGE_AT or changed.keys is not None
        written.add_list(bucket, changed, top, nodes, whole=whole)


@dataclass(frozen=True, slots=True)
class _Before:
    """What a bucket was: its list, how many rows that is in, and the nodes above it, if there were any."""

    list: PlacementList
    rows: int
    nodes: NodeMap | None


@dataclass(slots=True)
class _Bucket:
    """One bucket: what is said of its placements, and rows of PLACE_TOPS that lead to those before."""

    party: bytes
    bucket: str
    changes: list[bytes] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        return bool(self.changes) or self.cut_anew

    @property
    def cut_anew(self) -> bool:
        """Whether the party was cut into buckets of another depth: then each gets a row, also an empty one."""
        return bool(self.notes) and len(self._newest["bucket"]) != len(self.bucket)

    @property
    def _newest(self) -> dict[str, Any]:
        return max(self.notes, key=lambda note: int(note["turn"]))

    def before(self, lists: "_Lists") -> _Before:
        if not self.notes:
            return _Before(PlacementList(array_of(b"")), 0, None)
        depth = len(self._newest["bucket"])
        chains: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for note in sorted(self.notes, key=lambda note: int(note["turn"])):
            if len(note["bucket"]) == depth:
                if note["whole"]:
                    chains[note["bucket"]] = []
                chains[note["bucket"]].append(note)
        if depth != len(self.bucket):
            parts = [lists.read(self.party, chains[bucket])[0].below(self.bucket) for bucket in sorted(chains)]
            return _Before(PlacementList(np.concatenate([part.rows for part in parts])), 0, None)
        (chain,) = chains.values()
        found, nodes = lists.read(self.party, chain)
        return _Before(found, len(chain), nodes)


class _Lists:
    """Reads lists out of files. Neighbouring buckets share row groups, so the last few of these are kept."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._groups: dict[tuple[str, int], pa.Table] = {}

    def read(self, party: bytes, chain: list[dict[str, Any]]) -> tuple[PlacementList, NodeMap | None]:
        """A list out of its rows, oldest first, and the nodes of the last one."""
        parts: list[tuple[bytes, bytes]] = []
        nodes: bytes | None = None
        for note in chain:
            if note["path"] is None:
                parts.append((note["entries"] or b"", b""))
                nodes = None
                continue
            table = self._group(note)
            is_mine = pc.equal(table["party"], pa.scalar(party, pa.binary()))
            (row,) = table.filter(pc.and_(is_mine, pc.equal(table["bucket"], note["bucket"]))).to_pylist()
            parts.append((row["added"], row["gone"]))
            nodes = row["nodes"]
        return PlacementList.of(parts), None if nodes is None else node_map(nodes)

    def _group(self, note: dict[str, Any]) -> pa.Table:
        place = (note["path"], note["group"])
        found = self._groups.pop(place, None)
        if found is None:
            file = NamedFile(note["path"], note["sha256"], note["bytes"], note["rows"])
            found = pq.ParquetFile(checked_path(self._out, file)).read_row_group(note["group"])
            while len(self._groups) >= 2 * MERGE_AT:
                self._groups.pop(next(iter(self._groups)))
        self._groups[place] = found
        return found


def _each_bucket(batches: Iterator[pa.RecordBatch]) -> Iterator[_Bucket]:
    found: _Bucket | None = None
    for batch in batches:
        for row in batch.select(["party", "bucket", "plain", "rest", "note"]).to_pylist():
            if found is None or (row["party"], row["bucket"]) != (found.party, found.bucket):
                if found is not None:
                    yield found
                found = _Bucket(row["party"], row["bucket"])
            if row["note"] is None:
                found.changes.append(row["plain"])
            else:
                found.notes.append({**json.loads(row["note"]), "entries": row["rest"]})
    if found is not None:
        yield found


class _Written:
    """Collects what buckets came to, and writes it as files."""

    def __init__(self, place: Place, turn: int) -> None:
        self.blobs: dict[Cid, bytes] = {}
        self._place, self._turn = place, turn
        self._tops: list[dict[str, Any]] = []
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._size = 0
        self._files: Files = defaultdict(list)

    def add_few(self, bucket: _Bucket, now: PlacementList) -> None:
        """Placements that fit a page."""
        entries = now.rows.tobytes() or None
        self._tops.append({**self._top(bucket), "whole": True, "count": len(now), "entries": entries})

    def add_list(self, bucket: _Bucket, changed: Changed, top: TreeTop, nodes: NodeMap, *, whole: bool) -> None:
        added, gone = (changed.now.rows, array_of(b"")) if whole else (changed.added, changed.gone)
        row = {
            "party": bucket.party,
            "bucket": bucket.bucket,
            "added": added.tobytes(),
            "gone": gone.tobytes(),
            "nodes": pack_nodes(bucket.party, nodes),
        }
        self._held.append(({**self._top(bucket), "whole": whole, "cid": top.cid, "count": top.count}, row))
        self._size += _bytes_of(row)
        if self._size >= FILE_BYTES:
            self._write_lists()

    def _top(self, bucket: _Bucket) -> dict[str, Any]:
        return {"party": bucket.party, "bucket": bucket.bucket, "turn": self._turn}

    def _write_lists(self) -> None:
        groups: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []
        size = 0
        for pair in self._held:
            if not groups or size + _bytes_of(pair[1]) > GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(pair)
            size += _bytes_of(pair[1])
        batches = (pa.RecordBatch.from_pylist([row for _, row in group], PLACE_LISTS) for group in groups)
        file = self._place.write("place_lists", PLACE_LISTS, batches)
        self._held, self._size = [], 0
        if file is None:
            return
        self._files["place_lists"].append(file)
        where = {"path": file.path, "sha256": file.sha256, "bytes": file.bytes, "rows": file.rows}
        for number, group in enumerate(groups):
            self._tops += [{**top, **where, "group": number} for top, _ in group]

    def files(self) -> Files:
        self._write_lists()
        blobs = rows_table(list(self.blobs.items()), BLOBS).to_batches(max_chunksize=4096)
        tops = pa.Table.from_pylist(self._tops, PLACE_TOPS).to_batches()
        for kind, schema, batches in (("blobs", BLOBS, blobs), ("place_tops", PLACE_TOPS, tops)):
            file = self._place.write(kind, schema, batches)
            self._files[kind] += [] if file is None else [file]
        return self._files


def _bytes_of(row: dict[str, Any]) -> int:
    return len(row["added"]) + len(row["gone"]) + len(row["nodes"])


# roots


def party_placements(rows: Iterable[dict[str, Any]], put: Put) -> TreeTop:
    """The top of a party's placement tree, of its rows of PLACE_TOPS."""
    ordered = sorted(rows, key=lambda row: int(row["turn"]))
    depth = len(ordered[-1]["bucket"]) if ordered else 0
    tops = {row["bucket"]: row for row in ordered if len(row["bucket"]) == depth}
    return finish(_joined({bucket: row for bucket, row in tops.items() if row["count"]}, "", put), put)


def _joined(tops: dict[str, dict[str, Any]], path: str, put: Put) -> Part:
    """What is at a path that is above buckets, or one."""
    if path in tops:
        top = tops[path]
        if top["cid"] is None:
            return placement_part(split(array_of(top["entries"])), path)
        return Part.standing(TreeTop(Cid(top["cid"]), top["count"], top["count"] * PLACEMENT_BYTES))
    parts = {}
    for nibble in NIBBLES if tops else ():
        below = {bucket: top for bucket, top in tops.items() if bucket.startswith(path + nibble)}
        if below:
            parts[nibble] = _joined(below, path + nibble, put)
    return join(parts, put, path=path)
