"""Parcels: what demux sends to buckets. Rows of operations, packed by bucket as the bytes of an Arrow stream.

A bucket is a party and the first nibbles of the items' keys: a whole subtree of the snapshot tree (`kernel.snapshot`).
Small parties are one bucket. Spark moves a parcel as one row, whatever is in it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from echostore.kernel.ids import PartyKey
from echostore.pipeline.schemas import ASKED_ITEMS, PARCELS, PLAIN_CHANGES, REST_OPERATIONS
from echostore.pipeline.stages.property_columns import item_ids
from echostore.pipeline.stages.reduce_bucket import Bucket

NIBBLES_MAX = 2
MESSAGES_PER_BUCKET = 8192
"""Aimed at: buckets are read whole when one of their items changes, and each costs some milliseconds."""

REPORT = "report"
"""The bucket of parcels that go to no items."""

_CONTENTS = (("plain", PLAIN_CHANGES), ("rest", REST_OPERATIONS), ("asked", ASKED_ITEMS))


def bucket_nibbles(messages: int) -> int:
    """By how many nibbles the items of a party are spread, given how many messages (or items) there are to fold."""
    nibbles = 0
    while nibbles < NIBBLES_MAX and messages > MESSAGES_PER_BUCKET << 4 * nibbles:
        nibbles += 1
    return nibbles


def pack(
    party: PartyKey, nibbles: int, *, plain: pa.Table, rest: pa.Table, asked: pa.Table
) -> Iterator[dict[str, Any]]:
    """The parcels (PARCELS) of some operations."""
    parts: dict[str, dict[str, pa.Table]] = {}
    for (name, _), table in zip(_CONTENTS, (plain, rest, asked), strict=True):
        for bucket, part in _by_bucket(table, nibbles):
            parts.setdefault(bucket, {})[name] = part
    for bucket, tables in sorted(parts.items()):
        yield {
            "party": party,
            "bucket": bucket,
            "rows": sum(table.num_rows for table in tables.values()),
            **{name: packed(table) for name, table in tables.items()},
        }


def report(told: dict[str, Any]) -> dict[str, Any]:
    """A parcel that goes to no items: what a task has done, for the driver. Files are named by NamedFile."""
    note = json.dumps(told, default=asdict)
    return {"party": b"", "bucket": REPORT, "rows": 0, "note": note}


def parcels_batch(parcels: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(parcels, PARCELS)


def unpack(parcels: pa.Table, previous: pa.Table) -> Bucket:
    """What is to be reduced, of all parties and buckets that these parcels go to."""
    parties = sorted(set(parcels.column("party").to_pylist()))
    codes = {party: code for code, party in enumerate(parties)}
    tables: dict[str, list[pa.Table]] = {name: [] for name, _ in _CONTENTS}
    for parcel in parcels.to_pylist():
        for name, _ in _CONTENTS:
            if parcel[name] is not None:
                table = unpacked(parcel[name])
                code = pa.array(np.full(table.num_rows, codes[parcel["party"]], dtype=np.uint32))
                tables[name].append(table.add_column(0, "party", code))
    joined = {
        name: pa.concat_tables(tables[name])
        if tables[name]
        else schema.empty_table().add_column(0, "party", pa.array([], pa.uint32()))
        for name, schema in _CONTENTS
    }
    return Bucket([PartyKey(party) for party in parties], **joined, previous=previous)


def packed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def unpacked(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def _by_bucket(table: pa.Table, nibbles: int) -> Iterator[tuple[str, pa.Table]]:
    """A table of items (creator, local) cut into buckets."""
    if not table.num_rows:
        return
    if not nibbles:
        yield "", table
        return
    items = pl.DataFrame({"creator": table.column("creator").to_numpy(), "local": table.column("local").to_numpy()})
    distinct = items.unique()
    halves = item_ids(distinct["creator"].to_numpy(), distinct["local"].to_numpy())
    shift = 16 - 4 * nibbles
    places = np.array([int.from_bytes(sha256(item).digest()[:2], "big") >> shift for item in halves], dtype=np.uint32)
    coded = items.join(distinct.with_columns(place=places), on=["creator", "local"], how="left", maintain_order="left")
    codes = coded["place"].to_numpy()
    order = np.argsort(codes, kind="stable")
    arranged = table.take(pa.array(order)).combine_chunks()
    sorted_codes = codes[order]
    starts = np.flatnonzero(np.append(True, sorted_codes[1:] != sorted_codes[:-1]))
    ends = np.append(starts[1:], len(codes))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield f"{int(sorted_codes[start]):0{nibbles}x}", arranged.slice(start, end - start)
