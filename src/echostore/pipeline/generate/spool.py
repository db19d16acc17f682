"""Spool: rows of many feeds in the order in which they are made, given back party by party and feed by feed.

Feeds name each other's blocks, so they grow side by side; a lake wants them one after another. In between, batches lie
in one unnamed file, of which memory holds the places.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Self

import pyarrow as pa

from echostore.kernel.ids import FeedKey
from echostore.pipeline.schemas import BLOCKS
from echostore.store.durable_file import file_error

BATCH_ROWS: Final = 16_384
"""Rows of a batch that leaves: small feeds are put together."""


class Spool:
    """Batches of feeds. A context: its file is gone afterwards, whatever happened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._places: dict[tuple[bytes, bool, FeedKey], list[tuple[int, int]]] = {}
        self._end = 0

    def __enter__(self) -> Self:
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder)
        except OSError as error:
            raise file_error(error, f"write to {self._folder}") from error
        return self

    def __exit__(self, *error: object) -> None:
        assert self._file is not None
        self._file.close()

    def give(self, key: FeedKey, batch: pa.RecordBatch) -> None:
        """Keep the next rows of a feed."""
        assert self._file is not None
        data = batch.serialize()
        place = (batch["party"][0].as_py(), not batch["control"][0].as_py(), key)
        try:
            self._file.write(data)
        except OSError as error:
            raise file_error(error, f"write to {self._folder}") from error
        self._places.setdefault(place, []).append((self._end, data.size))
        self._end += data.size

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows: ascending by party, control feeds first, ascending by key; each feed as it was given."""
        assert self._file is not None
        waiting: list[pa.RecordBatch] = []
        rows = 0
        for place in sorted(self._places):
            for start, length in self._places[place]:
                batch = self._read(start, length)
                if rows + batch.num_rows > BATCH_ROWS and waiting:
                    yield _joined(waiting)
                    waiting, rows = [], 0
                waiting.append(batch)
                rows += batch.num_rows
        if waiting:
            yield _joined(waiting)

    def _read(self, start: int, length: int) -> pa.RecordBatch:
        assert self._file is not None
        self._file.seek(start)
        return pa.ipc.read_record_batch(pa.py_buffer(self._file.read(length)), BLOCKS)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
