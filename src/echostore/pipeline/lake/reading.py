"""Reading rows of a lake's files: only the row groups and columns that are asked for.

Runs inside Spark's workers as well as on the driver. Open files and the row group that was decoded last are kept per
thread, because runs of small parties lie side by side in one row group. Whatever is wrong with a file becomes
`Corrupt` with the file's name: the file is of someone else's making.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echostore.kernel.errors import Corrupt, EchoError
from echostore.kernel.limits import BLOCK_BYTES_MAX
from echostore.pipeline import schemas
from echostore.pipeline.lake.layout import path_of
from echostore.pipeline.lake.log import RunsFile
from echostore.store.durable_file import file_error

OPEN_FILES_MAX = 8
"""Per thread. Each keeps its footer and one decoded row group."""
ROW_GROUP_BYTES_MAX = 64 * 1024 * 1024 + BLOCK_BYTES_MAX
"""A row group of ours has a few MiB and at most one oversize block; what claims more is not decoded."""

MAGIC = b"PAR1"

Opened = Callable[[Path], Any]
"""How a file is opened; a test hands in one that counts bytes."""

_kept = threading.local()


def read_rows(
    lake: str | os.PathLike[str], file: str, row_start: int, row_end: int, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows `row_start` to `row_end - 1` of a blocks file, in order, in batches of at most a row group."""
    wanted = tuple(schemas.BLOCKS.names if columns is None else columns)
    reader = _reader(Path(lake), file)
    yield from reader.rows(row_start, row_end, wanted)


def open_plainly(path: Path) -> Any:
    # Not a memory map: a file that is cut short while it is read must be an error and not the end of the process.
    return pa.OSFile(str(path), "rb")


def use_opener(opener: Opened) -> Opened:
    """Open files of this thread by `opener` from now on; returns what was used before."""
    before: Opened = getattr(_kept, "opener", open_plainly)
    _kept.opener = opener
    _kept.readers = {}
    return before


def forget_files() -> None:
    """Close what this thread keeps open."""
    _kept.readers = {}


class BlocksReader:
    """One open blocks file."""

    def __init__(self, path: Path, opener: Opened) -> None:
        self.path = path
        self._file = _parquet(path, opener, schemas.BLOCKS)
        metadata = self._file.metadata
        self._ends: list[int] = []
        total = 0
        for at in range(metadata.num_row_groups):
            total += metadata.row_group(at).num_rows
            self._ends.append(total)
        self.row_count = total
        self._decoded: tuple[int, tuple[str, ...], pa.RecordBatch] | None = None

    def rows(self, start: int, end: int, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        if not 0 <= start <= end <= self.row_count:
            raise _damaged(self.path, f"rows {start} to {end} are asked for, and it has {self.row_count}")
        first = 0
        for group, last in enumerate(self._ends):
            if last > start and first < end:
                batch = self._group(group, columns)
                at = max(start, first)
                yield batch.slice(at - first, min(end, last) - at)
            first = last

    def _group(self, group: int, columns: tuple[str, ...]) -> pa.RecordBatch:
        if self._decoded is not None and self._decoded[:2] == (group, columns):
            return self._decoded[2]
        if self._file.metadata.row_group(group).total_byte_size > ROW_GROUP_BYTES_MAX:
            raise _damaged(self.path, f"row group {group} claims more than {ROW_GROUP_BYTES_MAX} bytes")
        table = _guarded(self.path, lambda: self._file.read_row_group(group, columns=list(columns), use_threads=False))
        rows = self._ends[group] - (self._ends[group - 1] if group else 0)
        if table.num_rows != rows:
            raise _damaged(self.path, f"row group {group} has {table.num_rows} rows, and claims {rows}")
        batches = table.combine_chunks().to_batches()
        batch = batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
        self._decoded = group, columns, batch.select(list(columns))
        return self._decoded[2]


class BlobsReader:
    """One open file of blobs: by CID, a row group at a time. Nothing is compared with its CID here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _parquet(path, getattr(_kept, "opener", open_plainly), schemas.BLOBS)
        self._places: dict[bytes, tuple[int, int]] = {}
        for group in range(self._file.metadata.num_row_groups):
            for row, cid in enumerate(self._column(group, "cid").to_pylist()):
                self._places[cid] = group, row
        self._decoded: dict[int, pa.ChunkedArray] = {}

    def __contains__(self, cid: bytes) -> bool:
        return cid in self._places

    def about(self, key: str) -> str | None:
        """What the file says of itself."""
        told = (self._file.metadata.metadata or {}).get(key.encode())
        return None if told is None else told.decode(errors="replace")

    def get(self, cid: bytes) -> bytes | None:
        place = self._places.get(cid)
        if place is None:
            return None
        group, row = place
        column = self._decoded.pop(group, None)
        if column is None:
            column = self._column(group, "data")
            while len(self._decoded) >= OPEN_FILES_MAX:
                self._decoded.pop(next(iter(self._decoded)))
        self._decoded[group] = column  # the newest is last
        data: bytes = column[row].as_py()
        return data

    def _column(self, group: int, name: str) -> pa.ChunkedArray:
        if self._file.metadata.row_group(group).total_byte_size > ROW_GROUP_BYTES_MAX:
            raise _damaged(self.path, f"row group {group} claims more than {ROW_GROUP_BYTES_MAX} bytes")
        return _guarded(
            self.path, lambda: self._file.read_row_group(group, columns=[name], use_threads=False).column(name)
        )


def read_runs(lake: Path, record: RunsFile, parties: Sequence[bytes] | None) -> pa.Table:
    """The rows of a runs file; with `parties`, at least theirs. Read whole, its hash is checked; in parts, its pages."""
    path = path_of(lake, record.file)
    if parties is None:
        file = _guarded(path, lambda: _hashed(path, record))
        return _table(path, _parquet(path, lambda _: file, schemas.RUNS), None, record.rows)
    parquet = _parquet(path, getattr(_kept, "opener", open_plainly), schemas.RUNS)
    metadata = parquet.metadata
    groups = [at for at in range(metadata.num_row_groups) if _may_hold(metadata.row_group(at).column(0), parties)]
    return _table(path, parquet, groups, record.rows)


def check_file(lake: Path, name: str, sha256: str, size: int) -> str | None:
    """What is wrong with a file by its size and hash, or None."""
    path = path_of(lake, name)
    hashed, length = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                hashed.update(chunk)
                length += len(chunk)
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    if length != size:
        return f"it has {length} bytes, and {size} are recorded"
    return None if hashed.hexdigest() == sha256 else "its content does not match its hash"


# inside


def _reader(lake: Path, name: str) -> BlocksReader:
    readers: dict[Path, BlocksReader] = getattr(_kept, "readers", None) or {}
    _kept.readers = readers
    path = path_of(lake, name)
    reader = readers.pop(path, None)
    if reader is None:
        reader = BlocksReader(path, getattr(_kept, "opener", open_plainly))
        while len(readers) >= OPEN_FILES_MAX:
            readers.pop(next(iter(readers)))
    readers[path] = reader  # the newest is last
    return reader


def _parquet(path: Path, opener: Opened, schema: pa.Schema) -> Any:
    file = _guarded(path, lambda: _opened(opener(path)))
    found = _guarded(path, lambda: file.schema_arrow)
    if not found.equals(schema, check_metadata=False):
        differing = [name for name in schema.names if name not in found.names] or [
            name for name in found.names if name not in schema.names or found.field(name) != schema.field(name)
        ]
        raise _damaged(path, f"its columns are not those of this format (see {', '.join(differing[:5])})")
    return file


def _opened(source: Any) -> Any:
    """An open Parquet file. Its footer is read here, because Arrow would read 64 KiB for any."""
    size = source.size()
    tail = source.read_at(8, max(0, size - 8))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or not 0 < length <= size - 12:
        raise ValueError("it does not end like a Parquet file")
    metadata = pq.read_metadata(pa.BufferReader(MAGIC + source.read_at(length, size - 8 - length) + tail))
    return pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=False)


def _table(path: Path, parquet: Any, groups: list[int] | None, rows: int) -> pa.Table:
    if parquet.metadata.num_rows != rows:
        raise _damaged(path, f"it has {parquet.metadata.num_rows} rows, and the log says {rows}")
    if groups is None:
        return _guarded(path, lambda: parquet.read(use_threads=False))
    if not groups:
        return schemas.RUNS.empty_table()
    return _guarded(path, lambda: parquet.read_row_groups(groups, use_threads=False))


def _hashed(path: Path, record: RunsFile) -> Any:
    content = path.read_bytes()
    if len(content) != record.bytes or hashlib.sha256(content).hexdigest() != record.sha256:
        raise _damaged(path, "its content does not match its hash")
    return pa.BufferReader(content)


def _may_hold(column: Any, parties: Sequence[bytes]) -> bool:
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return any(statistics.min <= party <= statistics.max for party in parties)


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    """What Arrow says about a bad file, as one error that names it."""
    try:
        return read()
    except EchoError:
        raise
    except FileNotFoundError:
        raise Corrupt(
            f"{path} is missing.",
            next_step="It was deleted, or a compaction replaced it and `lake compact` removed it: open the newest "
            "version of the lake again, or restore the file.",
        ) from None
    except (pa.ArrowException, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise _damaged(path, f"it can't be read as Parquet: {_first_line(error)}") from error
    except OSError as error:
        if error.errno is None:  # Arrow's word for broken pages
            raise _damaged(path, f"it can't be read as Parquet: {_first_line(error)}") from error
        raise file_error(error, f"read {path}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


def _damaged(path: Path, what: str) -> Corrupt:
    return Corrupt(
        f"{path} is damaged: {what}.",
        next_step="Restore the file from a copy of the lake, or publish the homes again into a new lake.",
    )
