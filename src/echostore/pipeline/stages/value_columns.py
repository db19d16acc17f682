"""Values by column: which bytes are the one canonical encoding of a value that `wire.values` accepts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import ITEM_ID_BYTES, KEY_BYTES
from echostore.kernel.limits import KEY_CHARACTERS_MAX, VALUE_DEPTH_MAX
from echostore.pipeline.stages.message_columns import one_of, read_columns, same, sizes, write_columns
from echostore.wire.values import MalformedValue, value_bytes, value_from_bytes

_CALENDAR_US = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The first and the last moment that Python knows; see `kernel.values.from_timestamp_us`."""


def canonical_values(values: pa.Array, depth: int = 0) -> np.ndarray[Any, Any]:
    """Which of these bytes are the canonical encoding of a value that the wire module accepts."""
    try:
        columns = read_columns("Value", values)
    except ValueError:
        return _in_halves(canonical_values, values, depth)
    good = same(write_columns("Value", columns), values) & one_of(columns, "Value")
    if columns.column("null").null_count < len(values):
        good &= pc.fill_null(columns.column("null"), True).to_numpy(zero_copy_only=False)
    moments = columns.column("timestamp_us")
    if moments.null_count < len(values):
        first, last = _CALENDAR_US
        inside = pc.and_(pc.greater_equal(moments, first), pc.less_equal(moments, last))
        good &= pc.fill_null(inside, True).to_numpy(zero_copy_only=False)
    for name, check in (("list", _canonical_lists), ("map", _canonical_maps), ("reference", _canonical_references)):
        column = columns.column(name)
        if column.null_count < len(values):
            rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False) & good)
            good[rows] = check(column.take(pa.array(rows)), depth)
    doubt: np.ndarray[Any, Any] = columns.column("blob").is_valid().to_numpy(zero_copy_only=False)
    if columns.column("number").null_count < len(values):
        doubt |= pc.fill_null(pc.is_nan(columns.column("number")), False).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(doubt & good).tolist():
        good[row] = _is_canonical(values[row].as_py())
    return good  # type: ignore[no-any-return]  # pyarrow has no types


def _in_halves(
    check: Callable[[pa.Array, int], np.ndarray[Any, Any]], data: pa.Array, depth: int
) -> np.ndarray[Any, Any]:
    """A check of a batch in which something can't be decoded: that one alone is not canonical."""
    if len(data) == 1:
        return np.zeros(1, dtype=bool)
    middle = len(data) // 2
    return np.concatenate([check(data.slice(0, middle), depth), check(data.slice(middle), depth)])


def _canonical_lists(lists: pa.Array, depth: int) -> np.ndarray[Any, Any]:
    try:
        return _canonical_parts("ListValue", lists, depth)
    except ValueError:
        return _in_halves(_canonical_lists, lists, depth)


def _canonical_maps(maps: pa.Array, depth: int) -> np.ndarray[Any, Any]:
    """Keys ascend by their bytes, each once, none empty or too long."""
    try:
        columns = read_columns("MapValue", maps)
    except ValueError:
        return _in_halves(_canonical_maps, maps, depth)
    keys = columns.column("keys")
    counts = np.diff(keys.offsets.to_numpy())
    good = counts == np.diff(columns.column("values").offsets.to_numpy())
    owners = np.repeat(np.arange(len(maps)), counts)
    texts = keys.flatten()
    lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
    bad = (lengths == 0) | (lengths > KEY_CHARACTERS_MAX)
    if len(texts) > 1:
        data = texts.cast(pa.binary())
        follows = pc.less(data.slice(0, len(data) - 1), data.slice(1)).to_numpy(zero_copy_only=False)
        bad[1:] |= ~follows & (owners[1:] == owners[:-1])
    good[owners[bad]] = False
    return good & _canonical_parts("MapValue", maps, depth)  # type: ignore[no-any-return]  # pyarrow has no types


def _canonical_parts(message: str, data: pa.Array, depth: int) -> np.ndarray[Any, Any]:
    """Lists or maps whose values are canonical and not nested too deep."""
    if depth >= VALUE_DEPTH_MAX:
        return np.zeros(len(data), dtype=bool)
    columns = read_columns(message, data)
    good = same(write_columns(message, columns), data)
    values = columns.column("values")
    inner = values.flatten()
    if len(inner):
        owners = np.repeat(np.arange(len(data)), np.diff(values.offsets.to_numpy()))
        good[owners[~canonical_values(inner, depth + 1)]] = False
    return good


def _canonical_references(references: pa.Array, depth: int) -> np.ndarray[Any, Any]:
    try:
        columns = read_columns("Reference", references)
    except ValueError:
        return _in_halves(_canonical_references, references, depth)
    party = sizes(columns.column("party"))
    good = (sizes(columns.column("item")) == ITEM_ID_BYTES) & ((party == 0) | (party == KEY_BYTES))
    return good & same(write_columns("Reference", columns), references)  # type: ignore[no-any-return]  # pyarrow has no types


def _is_canonical(data: bytes) -> bool:
    try:
        return value_bytes(value_from_bytes(data, bytes_max=None)) == data
    except MalformedValue:
        return False
