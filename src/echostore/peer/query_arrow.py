"""Answers as tables: Arrow, and from there pandas and polars.

    whole items     item | type | parent | deleted | one column for each property
    with select     item | the selected fields, attributes without their @
    reduced         the field of `by` | the name of the reducer
    many parties    party | as above

A column has the Arrow type of its values: bool, int64, float64, string, binary, timestamp[us, UTC], list of one of
these. References become text. Kinds that do not mix, maps and blobs become JSON text; integers and floats mix when
every integer is exact as a float. A property named like one of the first columns is called `property.<name>`.
"""

import importlib
import json
import math
from datetime import datetime
from typing import Any

from echostore.kernel.errors import EchoError
from echostore.kernel.ids import item_text
from echostore.kernel.query.evaluate import Result
from echostore.kernel.query.fields import reader
from echostore.kernel.query.live import Token
from echostore.kernel.query.source import Row
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.values import INT_MAX, INT_MIN, BlobRef, Reference, Value

EXACT_FLOAT_MAX = 1 << 53

Columns = dict[str, list[Value]]

_FIXED = {
    "party": lambda pyarrow: pyarrow.string(),
    "item": lambda pyarrow: pyarrow.string(),
    "type": lambda pyarrow: pyarrow.string(),
    "parent": lambda pyarrow: pyarrow.string(),
    "deleted": lambda pyarrow: pyarrow.bool_(),
}
"""What the first columns hold, for an answer without rows: it goes together with others."""


def columns(spec: QuerySpec, result: Result[Token], several: bool) -> Columns:
    """The answer by column, as plain values; `several` adds the party."""
    if result.groups is not None:
        assert spec.reduce is not None
        named: Columns = {}
        if spec.reduce.by is not None:
            named[str(spec.reduce.by).removeprefix("@")] = [group.by for group in result.groups]
        _put(named, spec.reduce.reducer.name.lower(), [group.value for group in result.groups])
        return named
    rows = [row for _, row in result.rows]
    found: Columns = {"party": [party.hex() for (party, _), _ in result.rows]} if several else {}
    found["item"] = [item_text(row.item) for row in rows]
    if spec.select is None:
        _whole_items(found, rows)
    else:
        for field in spec.select:
            read = reader(field)
            values = [read(row) for row in rows]
            if field.attribute and field.steps == ("item",):
                continue  # it is the first column anyway
            _put(found, str(field).removeprefix("@") if field.attribute else str(field), values)
    return found


def arrow_table(named: Columns) -> Any:
    """A pyarrow.Table of these columns."""
    pyarrow = _module("pyarrow")
    arrays = {}
    for name, values in named.items():
        plain = [_plain(value) for value in values]
        kind = _FIXED[name](pyarrow) if not plain and name in _FIXED else _arrow_type(pyarrow, plain)
        if kind is None:
            kind, plain = pyarrow.string(), [None if value is None else _json(value) for value in values]
        arrays[name] = pyarrow.array(plain, type=kind)
    return pyarrow.table(arrays)


def to_pandas(table: Any) -> Any:
    _module("pandas")
    return table.to_pandas()


def to_polars(table: Any) -> Any:
    return _module("polars").from_arrow(table)


def _module(name: str) -> Any:
    """An optional library, imported when it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EchoError(
            f"this needs {name}, which is not installed",
            next_step="Install it with: pip install 'echostore[arrow]'",
        ) from error


def _whole_items(found: Columns, rows: list[Row]) -> None:
    found["type"] = [row.type for row in rows]
    found["parent"] = [None if row.parent is None else item_text(row.parent) for row in rows]
    found["deleted"] = [row.deleted for row in rows]
    for name in sorted({name for row in rows for name in row.values}):
        _put(found, name, [row.values.get(name) for row in rows])


def _put(found: Columns, name: str, values: list[Value]) -> None:
    while name in found:
        name = f"property.{name}"
    found[name] = values


def _plain(value: Value) -> Value:
    """References as text, also inside lists; everything else as it is."""
    if isinstance(value, Reference):
        return str(value)
    return [_plain(element) for element in value] if isinstance(value, list) else value


def _arrow_type(pyarrow: Any, values: list[Value]) -> Any:
    """The one Arrow type of these values; None when there is none, and the column becomes JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pyarrow.null()
    if kinds == {int}:
        fits = all(INT_MIN <= value <= INT_MAX for value in values if value is not None)
        return pyarrow.int64() if fits else None
    if kinds == {int, float}:
        exact = all(abs(value) <= EXACT_FLOAT_MAX for value in values if type(value) is int)
        return pyarrow.float64() if exact else None
    if kinds == {list}:
        inner = _arrow_type(pyarrow, [element for value in values if value is not None for element in value])
        return None if inner is None else pyarrow.list_(inner)
    if len(kinds) > 1:
        return None
    kind = kinds.pop()
    if issubclass(kind, datetime):
        return pyarrow.timestamp("us", tz="UTC")
    makers = {bool: pyarrow.bool_, float: pyarrow.float64, str: pyarrow.string, bytes: pyarrow.binary}
    return makers[kind]() if kind in makers else None


def _json(value: Value) -> str:
    return json.dumps(_json_value(value), ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _json_value(value: Value) -> Any:
    """What JSON lacks becomes text: bytes as hex, moments as ISO 8601, references as ids, NaN and infinities by name."""
    if isinstance(value, dict):
        return {key: _json_value(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_json_value(element) for element in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Reference):
        return str(value)
    if isinstance(value, BlobRef):
        cids = [cid.hex() for cid in value.cids]
        return {"cids": cids, "media_type": value.media_type, "name": value.name, "size": value.size}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
