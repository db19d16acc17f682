"""Merging small files: every commit adds a few for each kind, and a run opens all of them.

When a kind has many small files, they are written anew as few, row by row as they are: nothing is dropped or changed
but the files. Kinds that other files point into (states, by row group) are left alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echostore.pipeline.output.files import checked_path
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.stages.frames import frame_of, mapped

SMALL_BYTES = 4 << 20
FILES_MAX = 64
"""Small files of a kind beyond which they are merged."""
MERGED_BYTES = 64 << 20

KEPT_APART = frozenset({"states"})
"""Kinds whose files are named by other files."""


def merge_small_files(
    spark: Any, place: Place, files: Mapping[str, list[NamedFile]], collect: Collect
) -> dict[str, list[NamedFile]]:
    """The files of a commit, with small ones merged where there are too many."""
    merged = {kind: list(named) for kind, named in files.items()}
    for kind, named in files.items():
        small = sorted((file for file in named if file.bytes < SMALL_BYTES), key=lambda file: file.path)
        if kind in KEPT_APART or len(small) <= FILES_MAX:
            continue
        parts = max(1, sum(file.bytes for file in small) // MERGED_BYTES)
        frame = frame_of(spark, pa.Table.from_batches([named_rows({kind: small})])).repartition(int(parts))
        made = named_files(collect(mapped(frame, _Merging(place, kind), NAMED))).get(kind, [])
        merged[kind] = [file for file in named if file not in set(small)] + made
    return merged


@dataclass(frozen=True)
class _Merging:
    """The task: files of one kind into one."""

    place: Place
    kind: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        paths = [
            checked_path(self.place.out, NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"]))
            for batch in batches
            for row in batch.to_pylist()
        ]
        if not paths:
            return
        schema = pq.ParquetFile(paths[0]).schema_arrow
        rows = (batch for path in paths for batch in pq.ParquetFile(path).iter_batches())
        file = self.place.write(self.kind, schema, rows)
        yield named_rows({self.kind: [] if file is None else [file]})
