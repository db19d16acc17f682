"""Reading rows of a lake's files: only the row groups and columns that are asked for.

Runs inside Spark's workers as well as on the driver. Open files and the row group that was decoded last are kept per
thread, because runs of small parties lie side by side in one row group. Whatever is wrong with a file becomes
`Corrupt` with the file's name: the file is of someone else's making.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from echostore.kernel.errors import Corrupt, EchoError
from echostore.kernel.limits import BLOCK_BYTES_MAX
from echostore.pipeline import schemas
from echostore.pipeline.lake.layout import path_of
from echostore.pipeline.lake.log import RunsFile
from echostore.pipeline.lake.pages import read_pages
from echostore.store.durable_file import file_error

OPEN_FILES_MAX = 8
"""Per thread. Each keeps its footer and one decoded row group."""
ROW_GROUP_BYTES_MAX = 64 * 1024 * 1024 + BLOCK_BYTES_MAX
"""A row group of ours has a few MiB and at most one oversize block. What decodes to more is refused: pages as their headers
claim, and rows as they are, also where a dictionary holds each of their values once."""
FOOTER_BYTES_MAX = 16 * 1024 * 1024
NAMES_BYTES_MAX = 512 * 1024 * 1024
"""What is kept of one file at once beyond a row group: a million runs, or the names of as many blobs."""

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


class ParquetParts:
    """One open Parquet file of a pinned schema, decoded by row groups and within bounds."""

    def __init__(self, path: Path, opener: Opened, schema: pa.Schema) -> None:
        self.path = path
        self._schema = schema
        self._source, self.metadata = _guarded(path, lambda: _opened(opener(path)))
        found = _guarded(path, self.metadata.schema.to_arrow_schema)
        if not found.equals(schema, check_metadata=False):
            differing = [name for name in schema.names if name not in found.names] or [
                name for name in found.names if name not in schema.names or found.field(name) != schema.field(name)
            ]
            raise _damaged(path, f"its columns are not those of this format (see {', '.join(differing[:5])})")
        self._files: dict[tuple[str, ...], Any] = {}

    @property
    def groups(self) -> int:
        return int(self.metadata.num_row_groups)

    def rows_of(self, group: int) -> int:
        return int(self.metadata.row_group(group).num_rows)

    def group(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Columns of a row group. What would decode to more than ROW_GROUP_BYTES_MAX is refused before it does."""
        return _guarded(self.path, lambda: self._group(group, columns))

    def _group(self, group: int, columns: Sequence[str]) -> pa.Table:
        about = self.metadata.row_group(group)
        rows = about.num_rows
        if rows == 0:
            return self._schema.empty_table().select(list(columns))
        left = ROW_GROUP_BYTES_MAX - rows * sum(_width(self._schema.field(name).type) for name in columns)
        if rows < 0 or left < 0 or about.total_byte_size > ROW_GROUP_BYTES_MAX:
            raise _damaged(self.path, f"row group {group} claims more than {ROW_GROUP_BYTES_MAX} bytes")
        repeated = []
        for name in columns:
            chunk = about.column(self._schema.get_field_index(name))
            if chunk.num_values != rows:  # Arrow reads as many as the column claims
                raise _damaged(self.path, f"row group {group} has {chunk.num_values} values of {name}, and {rows} rows")
            pages = read_pages(self._source, chunk, ROW_GROUP_BYTES_MAX)
            left -= pages.bytes
            if pages.dictionary and _is_variable(self._schema.field(name).type):
                repeated.append(name)
        if left < 0:
            raise _damaged(self.path, f"row group {group} claims more than {ROW_GROUP_BYTES_MAX} bytes")
        table = self._file(tuple(repeated)).read_row_group(group, columns=list(columns), use_threads=False)
        if table.num_rows != rows:
            raise _damaged(self.path, f"row group {group} has {table.num_rows} rows, and claims {rows}")
        return self._spelled_out(group, table.select(list(columns)), repeated, left)

    def _spelled_out(self, group: int, table: pa.Table, repeated: list[str], left: int) -> pa.Table:
        """The table with the values of dictionaries in their rows, where there is room for them."""
        for name in repeated:
            column = table[name]
            for chunk in column.chunks:
                lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
                left -= pc.sum(lengths.take(chunk.indices)).as_py() or 0
            if left < 0:
                raise _damaged(self.path, f"row group {group} decodes to more than {ROW_GROUP_BYTES_MAX} bytes")
            plain = self._schema.field(name)
            table = table.set_column(table.schema.get_field_index(name), plain, column.cast(plain.type))
        return table

    def _file(self, repeated: tuple[str, ...]) -> Any:
        """Arrow's reader, which leaves some columns as indices into their dictionaries."""
        file = self._files.get(repeated)
        if file is None:
            file = self._files[repeated] = pq.ParquetFile(
                self._source,
                metadata=self.metadata,
                read_dictionary=list(repeated),
                page_checksum_verification=True,
                pre_buffer=False,
            )
        return file


class BlocksReader:
    """One open blocks file."""

    def __init__(self, path: Path, opener: Opened) -> None:
        self.path = path
        self._parts = ParquetParts(path, opener, schemas.BLOCKS)
        self._ends = list(accumulate(self._parts.rows_of(group) for group in range(self._parts.groups)))
        self.row_count = self._ends[-1] if self._ends else 0
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
        table = self._parts.group(group, columns)
        batches = table.combine_chunks().to_batches()
        batch = batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
        self._decoded = group, columns, batch
        return batch


class BlobsReader:
    """One open file of blobs: by CID, a row group at a time. Nothing is compared with its CID here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = ParquetParts(path, getattr(_kept, "opener", open_plainly), schemas.BLOBS)
        self._places: dict[bytes, tuple[int, int]] = {}
        left = NAMES_BYTES_MAX
        for group in range(self._parts.groups):
            names = self._parts.group(group, ["cid"])
            left -= names.nbytes
            if left < 0:
                raise _damaged(path, f"the names of its blobs take more than {NAMES_BYTES_MAX} bytes")
            for row, cid in enumerate(names["cid"].to_pylist()):
                self._places[cid] = group, row
        self._decoded: dict[int, pa.ChunkedArray] = {}

    def __contains__(self, cid: bytes) -> bool:
        return cid in self._places

    def about(self, key: str) -> str | None:
        """What the file says of itself."""
        told = (self._parts.metadata.metadata or {}).get(key.encode())
        return None if told is None else told.decode(errors="replace")

    def get(self, cid: bytes) -> bytes | None:
        place = self._places.get(cid)
        if place is None:
            return None
        group, row = place
        column = self._decoded.pop(group, None)
        if column is None:
            column = self._parts.group(group, ["data"])["data"]
            while len(self._decoded) >= OPEN_FILES_MAX:
                self._decoded.pop(next(iter(self._decoded)))
        self._decoded[group] = column  # the newest is last
        data: bytes = column[row].as_py()
        return data


def read_runs(lake: Path, record: RunsFile, parties: Sequence[bytes] | None) -> pa.Table:
    """The rows of a runs file; with `parties`, at least theirs. Read whole, its hash is checked; in parts, its pages."""
    path = path_of(lake, record.file)
    if parties is None:
        file = _guarded(path, lambda: _hashed(path, record))
        parts = ParquetParts(path, lambda _: file, schemas.RUNS)
    else:
        parts = ParquetParts(path, getattr(_kept, "opener", open_plainly), schemas.RUNS)
    if parts.metadata.num_rows != record.rows:
        raise _damaged(path, f"it has {parts.metadata.num_rows} rows, and the log says {record.rows}")
    tables, left = [schemas.RUNS.empty_table()], NAMES_BYTES_MAX
    for group in range(parts.groups):
        if parties is None or _may_hold(parts.metadata.row_group(group).column(0), parties):
            tables.append(parts.group(group, schemas.RUNS.names))
            left -= tables[-1].nbytes
            if left < 0:
                raise _damaged(path, f"its runs take more than {NAMES_BYTES_MAX} bytes")
    return pa.concat_tables(tables).cast(schemas.RUNS)


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


def _opened(source: Any) -> tuple[Any, Any]:
    """An open file and its footer, which is read here because Arrow would read 64 KiB for any."""
    size = source.size()
    tail = source.read_at(8, max(0, size - 8))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or not 0 < length <= size - 12:
        raise ValueError("it does not end like a Parquet file")
    if length > FOOTER_BYTES_MAX:
        raise ValueError(f"its footer has {length} bytes, and {FOOTER_BYTES_MAX} are the most")
    footer = pa.BufferReader(MAGIC + source.read_at(length, size - 8 - length) + tail)
    # Nothing in a footer has more parts than the footer has bytes.
    file = pq.ParquetFile(footer, thrift_string_size_limit=length, thrift_container_size_limit=length)
    return source, file.metadata


def _is_variable(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))


def _width(kind: pa.DataType) -> int:
    """Bytes of a value, beside those that the value itself has."""
    return 4 if _is_variable(kind) else 1 if pa.types.is_boolean(kind) else kind.bit_width // 8


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
