"""Parquet files of a lake: how they are written, and how one becomes part of the lake.

A file is written under a random name, hashed on the way, synced, and renamed to its hash. Row groups are small where
parties are small: whoever wants one party of a thousand reads its row group, and not the file.

    row group   ends at the next change of party once it has ROW_GROUP_SMALL bytes, and at ROW_GROUP_LARGE in any case
    file        ends with the row group that brings it to FILE_BYTES
"""

import hashlib
import os
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echostore.pipeline import schemas
from echostore.pipeline.lake.layout import WRITING
from echostore.store.durable_file import file_error, sync_folder

FILE_BYTES = 64 * 1024 * 1024
"""Rows of one file, before compression: large enough to scan fast, small enough that many tasks share a party."""
ROW_GROUP_SMALL = 128 * 1024
ROW_GROUP_SMALL_CONTROL = 32 * 1024
"""Below these, row groups hold several parties. Smaller ones would make the footer, which every reader reads, longer than
what they save. Control feeds are short."""
ROW_GROUP_LARGE = 4 * 1024 * 1024
ROW_BYTES = 64
"""What a row takes beside its payload and signature, about."""
RUNS_ROW_GROUPS = 64
"""Row groups of a runs file: who wants one party reads one of them and the footer, and both stay small."""
RUNS_ROW_GROUP_MIN = 128
RUNS_FILE_ROWS = 1_000_000
"""Rows of one runs file: what a writer keeps in memory of them."""

_HASHES = ("link", "signature", "previous")
"""Columns of random bytes: compressing them costs time and saves nothing."""


class HashedFile:
    """A new file that nobody reads yet. `keep` gives it its name in the lake, `drop` removes it."""

    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._path = lake / WRITING / f"{uuid.uuid4().hex}.parquet"
        self._hash = hashlib.sha256()
        self.size = 0
        self._dropped = False
        try:
            self._file = open(self._path, "xb")  # noqa: SIM115  # closed by keep or drop
        except OSError as error:
            raise file_error(error, f"write into the lake {lake}") from error

    # What Arrow asks of a file.

    def write(self, data: Any) -> int:
        length = len(memoryview(data))
        # A writer whose file was dropped still wants to end it properly when it is collected.
        if not self._dropped:
            self._hash.update(data)
            self._file.write(data)
            self.size += length
        return length

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._dropped:
            self._file.flush()

    def close(self) -> None:
        """Arrow closes what it writes to; `keep` still has to sync it."""

    @property
    def closed(self) -> bool:
        return False

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    # The end of it.

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def keep(self, name: str) -> None:
        """Sync the file and put it into its place. One of the same content that is there already is replaced by it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = self._lake / name
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            sync_folder(path.parent.parent)
        os.replace(self._path, path)
        sync_folder(path.parent)

    def drop(self) -> None:
        self._dropped = True
        self._file.close()
        self._path.unlink(missing_ok=True)


def blocks_writer(file: HashedFile) -> Any:
    """A Parquet writer for rows of blocks. Pages carry checksums: a flipped bit is an error and not another block."""
    names = schemas.BLOCKS.names
    return pq.ParquetWriter(
        pa.PythonFile(file, mode="w"),
        schemas.BLOCKS,
        compression={name: "none" if name in _HASHES else "zstd" for name in names},
        compression_level={name: 1 for name in names if name not in _HASHES},
        use_dictionary=["party", "feed"],
        column_encoding={"seq": "DELTA_BINARY_PACKED", "depth": "DELTA_BINARY_PACKED"},
        # The runs say where everything is; the footer, which every reader reads, stays short.
        write_statistics=["party"],
        write_page_checksum=True,
        store_schema=False,
    )


def write_runs_table(file: HashedFile, runs: pa.Table) -> None:
    """Runs, sorted by party, in row groups that can be passed over by it."""
    with pq.ParquetWriter(
        pa.PythonFile(file, mode="w"),
        schemas.RUNS,
        compression="zstd",
        compression_level=1,
        use_dictionary=["party", "feed", "file"],
        write_statistics=["party"],
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(runs, row_group_size=max(RUNS_ROW_GROUP_MIN, len(runs) // RUNS_ROW_GROUPS))
