"""Bundles: several tables out of one pass over the data.

A task of Spark returns rows of one schema. A stage that makes several tables at once returns *bundles* instead: the name
of a table and many rows of it, as the bytes of an Arrow stream. `unbundled` gives a table back as a DataFrame.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.pipeline.stages.frames import mapped

BUNDLES = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("rows", pa.binary(), nullable=False)])
BUNDLE_ROWS = 4096
"""Rows that are collected before they are handed on."""


class Bundler:
    """Collects rows by table."""

    def __init__(self, tables: Mapping[str, pa.Schema]) -> None:
        self._schemas = tables
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in tables}
        self._count = 0

    def add(self, name: str, row: dict[str, Any]) -> None:
        self._rows[name].append(row)
        self._count += 1

    @property
    def full(self) -> bool:
        return self._count >= BUNDLE_ROWS

    def take(self) -> Iterator[pa.RecordBatch]:
        """What was collected, as a batch of bundles."""
        made = []
        for name, rows in self._rows.items():
            if rows:
                made.append({"name": name, "rows": packed(pa.RecordBatch.from_pylist(rows, self._schemas[name]))})
                self._rows[name] = []
        self._count = 0
        if made:
            yield pa.RecordBatch.from_pylist(made, BUNDLES)


def packed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def unbundled(bundles: Any, name: str, schema: pa.Schema) -> Any:
    """One table of bundles: a DataFrame of a DataFrame, a table of a table."""
    unbundling = _Unbundling(schema)
    if isinstance(bundles, pa.Table):
        chosen = bundles.filter(pc.equal(bundles["name"], name))
        return pa.Table.from_batches(unbundling(iter(chosen.to_batches())), schema)
    return mapped(bundles.filter(bundles["name"] == name), unbundling, schema)


@dataclass(frozen=True)
class _Unbundling:
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for rows in batch["rows"]:
                with pa.ipc.open_stream(rows.as_buffer()) as stream:
                    for found in stream:
                        yield found.cast(self.schema)
