"""Parcels as a task gets them, sorted by bucket, in chunks of whole buckets that it works on at once."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.pipeline.stages.parcels import REPORT

CHUNK_ROWS = 1 << 18
"""Operations that a task reduces at once: many buckets of small parties, or one of a large one."""


def notes_in(chunk: pa.Table) -> Iterator[tuple[bytes, str, str]]:
    """(party, bucket, JSON) of parcels that tell where something is."""
    noted = chunk.filter(pc.is_valid(chunk["note"])).select(["party", "bucket", "note"])
    return zip(*(column.to_pylist() for column in noted.columns), strict=True)


def chunks_of(batches: Iterator[pa.RecordBatch], reports: list[dict[str, Any]]) -> Iterator[pa.Table]:
    """Sorted parcels in chunks of whole buckets; reports aside."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        start = 0
        places = list(zip(batch["party"].to_pylist(), batch["bucket"].to_pylist(), strict=True))
        counts = batch["rows"].to_pylist()
        for at, (_, bucket) in enumerate(places):
            if bucket == REPORT:
                reports.append(json.loads(batch["note"][at].as_py()))
            last = held[-1] if held else None
            before = places[at - 1] if at > start else (_last_place(last) if last is not None and at == start else None)
            if rows >= CHUNK_ROWS and before is not None and before != places[at]:
                if at > start:
                    held.append(batch.slice(start, at - start))
                yield _work(held)
                held, rows, start = [], 0, at
            rows += counts[at]
        if len(places) > start:
            held.append(batch.slice(start))
    if held:
        yield _work(held)


def _last_place(batch: pa.RecordBatch) -> tuple[bytes, str]:
    return batch["party"][batch.num_rows - 1].as_py(), batch["bucket"][batch.num_rows - 1].as_py()


def _work(held: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(held)
    return table.filter(pc.not_equal(table["bucket"], REPORT))
