"""Subtrees of buckets: the nodes of the snapshot tree below each bucket of items, and the tops that stand for them.

    states of a bucket, nodes it had ──► nodes above changed items anew (wire.tree) ──► blobs, TOPS

A bucket is a whole subtree, so its nodes depend on its items alone. The task that reduces a bucket has its items at hand
and makes its subtree; `snapshot` does it for buckets that were folded again, cut anew or merged, and joins the tops.
The one thing a bucket can't know is whether few items form a page of their own or share one with its neighbours: up to
a page of items go up as they are, and are put where they belong when the tops are joined.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.snapshot import PAGE_ITEMS_MAX, ItemKey, TreeTop, entry_bytes, is_page, key_bounds
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import BLOBS, TOPS, TREE_NODES
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import packed, unpacked
from echostore.pipeline.stages.state_files import by_bucket
from echostore.wire.snapshot import EncodedItem, Put
from echostore.wire.tree import NodeMap, build_keyed, update_below

ENTRIES = pa.schema([pa.field("item", pa.binary(), nullable=False), pa.field("encoded", pa.binary(), nullable=False)])
STATE_COLUMNS = ["party", "item_key", "item", "gone", "model", "version", "state", "encoded"]

ANEW_SHARE = 5
"""When more than one item in so many has changed, hardly a page stays: growing the whole subtree is quicker."""

BATCH_ROWS = 4096
"""Blobs that are copied at once to be written."""

Nodes = Callable[[bytes, str], bytes | None]
"""(party, bucket) -> the packed TREE_NODES that it had."""


class Subtrees:
    """Collects the subtrees of buckets and writes them as files."""

    def __init__(self, place: Place, turn: int) -> None:
        self._place, self._turn = place, turn
        self._blobs: dict[Cid, bytes] = {}
        self._tops: list[tuple[Any, ...]] = []

    def add_changed(self, states: pa.Table, previous: pa.Table, nibbles: Mapping[bytes, int], nodes: Nodes) -> None:
        """The buckets of some changed states, `previous` being all states that they had. Both ascend by party and key."""
        dirty = {(party, bucket): part["item"].to_pylist() for party, bucket, part in by_bucket(states, nibbles)}
        for party, bucket, part in by_bucket(_latest(previous, states), nibbles):
            changed = dirty.pop((party, bucket), None)
            if changed is not None:
                self.add(party, bucket, nodes(party, bucket), changed, part)
        for party, bucket in dirty:  # where nothing is left
            self.add(party, bucket, None, [], states.slice(0, 0))

    def add(self, party: bytes, bucket: str, nodes: bytes | None, dirty: list[ItemId], live: pa.Table) -> None:
        """One bucket with the items that are in it now, ascending by key; without nodes before, all of them are new."""
        models = sorted(set(zip(live["model"].to_pylist(), live["version"].to_pylist(), strict=True)))
        place = (party, bucket, self._turn)
        size = sum(entry_bytes(len(data)) for data in _encoded(live)) if live.num_rows <= PAGE_ITEMS_MAX else 0
        if live.num_rows <= PAGE_ITEMS_MAX and is_page(len(bucket), live.num_rows, size):
            pairs = list(zip(live["item"].to_pylist(), _encoded(live), strict=True))
            entries = packed(rows_table(pairs, ENTRIES)) if pairs else None
            self._tops.append((*place, None, live.num_rows, size, json.dumps(models), entries, None))
            return
        top, kept = subtree(bucket, nodes, dirty, live, self._blobs.__setitem__)
        below = pack_nodes(party, kept)
        self._tops.append((*place, top.cid, top.count, top.size, json.dumps(models), None, below))

    def write(self) -> dict[str, list[NamedFile]]:
        files: dict[str, list[NamedFile]] = {}
        for kind, rows, schema in (("blobs", iter(self._blobs.items()), BLOBS), ("tops", iter(self._tops), TOPS)):
            file = self._place.write(kind, schema, _batches(rows, schema))
            files[kind] = [] if file is None else [file]
        return files


def _batches(rows: Iterator[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as they are written, some megabytes at a time."""
    while some := list(islice(rows, BATCH_ROWS)):
        yield from rows_table(some, schema).to_batches()


def _latest(previous: pa.Table, states: pa.Table) -> pa.Table:
    """The states that are there after a change, ascending by party and key."""
    now = states.select(STATE_COLUMNS)
    if not previous.num_rows:
        return _live(now).combine_chunks()
    table = pa.concat_tables([previous.select(STATE_COLUMNS), now])
    frame = pl.DataFrame(
        {"party": pl.from_arrow(table["party"]), "key": pl.from_arrow(table["item_key"]), "row": np.arange(len(table))}
    )
    rows = frame.unique(subset=["party", "key"], keep="last", maintain_order=True).sort("party", "key")["row"]
    return _live(table.combine_chunks().take(pa.array(rows.to_numpy())))


def _live(states: pa.Table) -> pa.Table:
    """Without items that are gone; most often none is, and nothing is copied."""
    gone = states["gone"]
    return states.filter(pc.invert(gone)) if pc.any(gone).as_py() else states


def _encoded(states: pa.Table) -> list[EncodedItem]:
    encoded, state = states["encoded"], states["state"]
    found = state if encoded.null_count == len(encoded) else pc.coalesce(encoded, state)
    return cast(list[EncodedItem], found.to_pylist())


def pack_nodes(party: bytes, cache: NodeMap) -> bytes:
    """Nodes as TREE_NODES, packed."""
    paths = sorted(cache.nodes)
    tops = [cache.nodes[path] for path in paths]
    columns = [
        pa.repeat(pa.scalar(party, pa.binary()), len(paths)),
        pa.array(paths, pa.string()),
        pa.array([top.cid for top in tops], pa.binary()),
        pa.array([top.count for top in tops], pa.int64()),
        pa.array([top.size for top in tops], pa.int64()),
    ]
    return packed(pa.table(columns, schema=TREE_NODES))


def node_map(nodes: bytes) -> NodeMap:
    """The reverse of `pack_nodes`."""
    cache = NodeMap()
    columns = (unpacked(nodes)[name].to_pylist() for name in ("path", "cid", "count", "size"))
    for path, cid, count, size in zip(*columns, strict=True):
        cache.keep(path, TreeTop(Cid(cid), count, size))
    return cache


def subtree(bucket: str, nodes: bytes | None, dirty: list[ItemId], live: pa.Table, put: Put) -> tuple[TreeTop, NodeMap]:
    """The subtree of a bucket whose items are `live` (ascending by key); `nodes` are those it had before."""
    cache = NodeMap() if nodes is None else node_map(nodes)
    items, encoded = live["item"].to_pylist(), _encoded(live)
    if nodes is None or len(dirty) * ANEW_SHARE >= len(items):
        keys = [ItemKey(key.hex()) for key in live["item_key"].to_pylist()]
        known = {top.cid for top in cache.nodes.values()}
        return _grown(bucket, known, keys, list(zip(items, encoded, strict=True)), put)
    keys = [key.hex() for key in live["item_key"].to_pylist()]

    def items_under(path: str) -> list[tuple[ItemId, EncodedItem]]:
        first, last = key_bounds(path)
        start, end = bisect_left(keys, first), bisect_right(keys, last)
        return [(ItemId(items[at]), encoded[at]) for at in range(start, end)]

    top = update_below(cache, dirty, items_under, put, path=bucket)
    assert top is not None, bucket
    return top, cache


def _grown(
    bucket: str, known: set[Cid], keys: list[ItemKey], items: list[tuple[ItemId, EncodedItem]], put: Put
) -> tuple[TreeTop, NodeMap]:
    """All nodes anew, and the blobs of those that were not there."""

    def put_new(cid: Cid, blob: bytes) -> None:
        if cid not in known:
            put(cid, blob)

    cache = NodeMap()
    return build_keyed(keys, items, put_new, cache=cache, path=bucket), cache


class TopsBefore:
    """The nodes that buckets had, read from the files of TOPS that notes of parcels name."""

    def __init__(self, out: str, notes: Iterable[tuple[bytes, str, str]]) -> None:
        """Notes are (party, bucket, JSON)."""
        self._out = out
        self._places: dict[tuple[bytes, str], tuple[NamedFile, int]] = {}
        self._read: dict[str, dict[tuple[bytes, str, int], bytes | None]] = {}
        for party, bucket, note in notes:
            top = json.loads(note).get("top")
            if top is not None and top["bucket"] == bucket:
                file = NamedFile(top["path"], top["sha256"], top["bytes"], top["rows"])
                self._places[party, bucket] = file, top["turn"]

    def nodes(self, party: bytes, bucket: str) -> bytes | None:
        found = self._places.get((party, bucket))
        if found is None:
            return None
        file, turn = found
        if file.path not in self._read:
            names = ["party", "bucket", "turn", "nodes"]
            rows = read_table(self._out, file, TOPS, columns=names).select(names)
            columns = zip(*(column.to_pylist() for column in rows.columns), strict=True)
            self._read[file.path] = {(row[0], row[1], row[2]): row[3] for row in columns}
        return self._read[file.path][party, bucket, turn]


def latest_tops(out: str, files: Iterable[NamedFile], nibbles: Mapping[bytes, int]) -> pa.Table:
    """The newest top of each bucket of these parties, of buckets as they are cut now: TOPS without nodes, and where
    they are (`path`, `sha256`, `bytes`, `rows`)."""
    tables = []
    for file in files:
        rows = read_table(out, file, TOPS, columns=_TOP_COLUMNS).select(_TOP_COLUMNS)
        for name, value in (("path", file.path), ("sha256", file.sha256), ("bytes", file.bytes), ("rows", file.rows)):
            rows = rows.append_column(name, pa.repeat(pa.scalar(value), len(rows)))
        tables.append(rows)
    if not tables:
        return pa.schema([TOPS.field(name) for name in _TOP_COLUMNS]).empty_table()
    rows = pa.concat_tables(tables).combine_chunks()
    last: dict[tuple[bytes, str], tuple[int, int]] = {}
    columns = zip(*(rows[name].to_pylist() for name in ("party", "bucket", "turn")), strict=True)
    for at, (party, bucket, turn) in enumerate(columns):
        if len(bucket) == nibbles.get(party, -1):
            last[party, bucket] = max(last.get((party, bucket), (-1, -1)), (turn, at))
    return rows.take(pa.array(sorted(at for _, at in last.values()), pa.int64()))


_TOP_COLUMNS = [name for name in TOPS.names if name != "nodes"]


def tops_parcels(tops: pa.Table) -> list[dict[str, Any]]:
    """Parcels that tell buckets where their tops are."""
    return [
        {
            "party": row["party"],
            "bucket": row["bucket"],
            "rows": 0,
            "note": json.dumps({"top": {name: row[name] for name in _TOP_PLACE}}),
        }
        for row in (tops.select(["party", *_TOP_PLACE]).to_pylist() if len(tops) else ())
    ]


_TOP_PLACE = ["bucket", "turn", "path", "sha256", "bytes", "rows"]
