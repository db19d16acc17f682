"""One file of an output: written whole and synced under its hash, and checked before it is read.

Tasks call `write_file`, so that bytes are hashed where they are made and the driver sees only names. A task that runs
twice writes twice; the driver names the files of one of them, and the others are garbage.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echostore.kernel.errors import Corrupt, EchoError
from echostore.pipeline.output.layout import PART_SUFFIX, epoch_of, is_kind
from echostore.pipeline.output.record import NamedFile, collected
from echostore.store.durable_file import PRIVATE_FOLDER, file_error, sync_folder

ROW_GROUP_ROWS = 64 * 1024
"""Small enough that one party of many can be read by itself, large enough that columns compress."""

READ_BYTES = 1 << 20

Step = Callable[[str], None]
"""Told before each step that another process could see, by name. Tests stop, kill or interleave there."""


def no_step(name: str) -> None:
    """What steps do outside of tests: nothing."""


def write_file(
    out: str | Path,
    folder: str,
    kind: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    row_group_rows: int = ROW_GROUP_ROWS,
    step: Step = no_step,
) -> NamedFile | None:
    """Write one Parquet file of a kind below `folder` (an attempt's, relative to `out`); None when there are no rows.

    When it returns, content and name survive a power cut.
    """
    assert is_kind(kind), kind
    below = Path(out, folder, kind)
    part = below / f".{uuid.uuid4().hex}{PART_SUFFIX}"
    rows = 0
    try:
        # Not with its parents: a task that outlived its attempt must not bring the folder back.
        below.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        writer: pq.ParquetWriter | None = None
        try:
            for batch in batches:
                if batch.num_rows:
                    if writer is None:
                        step(f"open {kind}")
                        writer = pq.ParquetWriter(part, schema, **_encoding(kind, schema))
                    writer.write_batch(_as(batch, schema), row_group_size=row_group_rows)
                    rows += batch.num_rows
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            return None
        step(f"sync {kind}")
        sha256, size = _sync_and_hash(part)
        step(f"name {kind}")
        os.rename(part, below / f"{sha256}.parquet")
        sync_folder(below)
        _remember(below / f"{sha256}.parquet", sha256)
    except FileNotFoundError:
        raise collected(epoch_of(folder)) from None
    except OSError as error:
        part.unlink(missing_ok=True)
        raise file_error(error, f"write {kind} below {out}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return NamedFile(f"{folder}/{kind}/{sha256}.parquet", sha256, size, rows)


_BULK = frozenset({"states", "blobs", "place_lists", "place_changes"})
"""Kinds that hold the bytes of whole items, and hashes. Each run writes many of them and reads most of them once."""
_DISTINCT = frozenset({"item_key", "item", "state", "encoded", "native", "cid", "data", "key", "placement", "added"})
"""Their columns of which hardly two rows are alike: a dictionary of them would be a second copy."""


def _encoding(kind: str, schema: pa.Schema) -> dict[str, Any]:
    """How Parquet is to write a kind: small, or in the bulk, quickly."""
    if kind not in _BULK:
        return {"compression": "zstd", "compression_level": 1}
    return {"compression": "snappy", "use_dictionary": [name for name in schema.names if name not in _DISTINCT]}


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return batch if batch.schema.equals(schema) else batch.select(schema.names).cast(schema)


def _sync_and_hash(path: Path) -> tuple[str, int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        os.fsync(descriptor)
        return _hash(file)


def _hash(file: object) -> tuple[str, int]:
    hasher, size, buffer = hashlib.sha256(), 0, bytearray(READ_BYTES)
    view = memoryview(buffer)
    while count := file.readinto(view):  # type: ignore[attr-defined]  # an unbuffered binary file
        hasher.update(view[:count])
        size += count
    return hasher.hexdigest(), size


_checked: dict[tuple[str, int, int, int], str] = {}
"""Files whose hash this process has seen, by path, inode, size and time: a hash costs more than most reads."""

_CHECKED_MAX = 65_536


def _checked_key(path: Path, status: os.stat_result) -> tuple[str, int, int, int]:
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns


def _remember(path: Path, sha256: str, status: os.stat_result | None = None) -> None:
    if len(_checked) >= _CHECKED_MAX:
        _checked.clear()
    _checked[_checked_key(path, status or path.stat())] = sha256


def checked_path(out: str | Path, file: NamedFile) -> Path:
    """Where a named file is, once its bytes have been compared with its hash."""
    path = Path(out, file.path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            status = os.fstat(descriptor)
            known = _checked.get(_checked_key(path, status))
            if known is None:
                known, _ = _hash(opened)
                _remember(path, known, status)
    except FileNotFoundError:
        raise _broken(file, "is missing") from None
    except OSError as error:
        raise file_error(error, f"read {path}") from error
    if status.st_size != file.bytes or known != file.sha256:
        raise _broken(
            file, f"has {status.st_size} bytes with hash {known[:16]}, not {file.bytes} with {file.sha256[:16]}"
        )
    return path


def read_table(
    out: str | Path, file: NamedFile, schema: pa.Schema, *, columns: list[str] | None = None, filters: object = None
) -> pa.Table:
    """The rows of a named file, of one schema and no other."""
    path = checked_path(out, file)
    try:
        table = pq.ParquetFile(path)
        stored = table.schema_arrow
        if not stored.equals(schema):
            raise _broken(file, f"has the columns {stored.names[:20]}, not {schema.names[:20]}")
        return pq.read_table(path, columns=columns, filters=filters, partitioning=None)
    except EchoError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _broken(file, f"can't be read as Parquet: {str(error)[:200]}") from error


def _broken(file: NamedFile, problem: str) -> Corrupt:
    return Corrupt(
        f"{file.path}, which a commit names, {problem}",
        next_step="Restore the file from a copy, or run the pipeline into a new folder.",
    )
