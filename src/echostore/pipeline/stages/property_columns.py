"""Property sets by column: what `kernel.models.property_set` does one operation at a time, for plain changes only.

    rows    (party, item, metadata?, feed)   the layer        place, change   their order in it
            path, value                      what they write  fresh           of this run, not of the state before

A layer is a function of its feed's operations in feed order. Of plain changes alone it is simple: at each path the
last one counts, unless a later one wrote above it. So changes of one layer can be combined wherever they meet, in any
grouping: before the shuffle, in the bucket, on top of the state before. `test_reduce_bucket.py` compares every byte
with the kernel's own fold.

An entry of the state before may stand below a later one of its own layer (an undo put it back): only fresh rows drop
what lies below them.
"""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from echostore.kernel.ids import FEED_ID_BYTES
from echostore.pipeline.stages.message_columns import columns_schema, read_columns, write_columns
from echostore.pipeline.stages.operation_columns import PATH_SEPARATOR
from echostore.wire.varint import varint

ITEM = ["party", "creator", "local"]
MODEL = [*ITEM, "metadata"]
LAYER = [*MODEL, "feed"]
_ENTRY = [*LAYER, "path"]
_LAYER_TAG = b"\x0a"
ODD_KINDS = ("added", "removed", "increment")
"""What an entry may be that plain changes do not make."""
_POSITION_MASK = np.uint64(0xFFFF)


def combine(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that are left of these; in no particular order. `rows` needs the columns of LAYER, place, change, path
    and, where some of them are not, `fresh`."""
    return _without_overwritten(_last(rows))


def combine_upon(before: pl.DataFrame, fresh: pl.DataFrame) -> pl.DataFrame:
    """The same of the rows of states, which have each path of a layer once already, and fresh ones."""
    met = before.join(fresh, on=_ENTRY, how="semi")
    unmet = before.join(fresh, on=_ENTRY, how="anti") if met.height else before
    return _without_overwritten(pl.concat([unmet, _last(pl.concat([met, fresh]))]))


def _last(rows: pl.DataFrame) -> pl.DataFrame:
    """The last row of each path."""
    if rows.height <= 1:
        return rows
    return rows.sort("place", "change").unique(subset=_ENTRY, keep="last", maintain_order=False)


def _without_overwritten(rows: pl.DataFrame) -> pl.DataFrame:
    """Drop what lies below a later fresh row of its layer, level by level."""
    nested = rows.filter(pl.col("path").str.contains(PATH_SEPARATOR, literal=True))
    if nested.is_empty():
        return rows
    above = rows.filter(pl.col("fresh")) if "fresh" in rows.columns else rows
    above = above.select(*_ENTRY, above_place="place", above_change="change")
    below = nested.with_columns(steps=pl.col("path").str.split(PATH_SEPARATOR))
    doomed = []
    for level in range(1, int(below["steps"].list.len().max())):  # type: ignore[arg-type]  # there are some
        deeper = below.filter(pl.col("steps").list.len() > level).with_columns(
            whole=pl.col("path"), path=pl.col("steps").list.head(level).list.join(PATH_SEPARATOR)
        )
        later = (pl.col("above_place") > pl.col("place")) | (
            (pl.col("above_place") == pl.col("place")) & (pl.col("above_change") > pl.col("change"))
        )
        met = deeper.join(above, on=_ENTRY, how="inner").filter(later)
        doomed.append(met.select(*LAYER, path="whole"))
    gone = pl.concat(doomed)
    return rows if gone.is_empty() else rows.join(gone.unique(), on=_ENTRY, how="anti")


def encode_layers(rows: pl.DataFrame) -> pl.DataFrame:
    """The bytes of each layer, as they stand in a state: the columns of LAYER, and `layer`. Rows of one path stay in
    their order."""
    rows = rows.sort(_ENTRY, maintain_order=True)
    count = rows.height
    if not count:
        return rows.select(LAYER).with_columns(layer=pl.lit(b""))
    starts = np.flatnonzero(_changes(rows, LAYER))
    schema = columns_schema("Layer")
    entries_type = schema.field("entries").type
    entries = _entries(rows, entries_type.value_type)
    columns = [
        number_bytes(rows["feed"].to_numpy()[starts]),
        pa.ListArray.from_arrays(_offsets(starts, count), entries, type=entries_type),
    ]
    data = write_columns("Layer", pa.record_batch(columns, schema=schema))
    return rows.select(LAYER)[starts].with_columns(layer=_series(data))


def join_layers(layers: pl.DataFrame) -> pl.DataFrame:
    """The bytes of each property set out of its layers: the columns of MODEL, and `data` as the wire module's
    `encode_state` writes it."""
    layers = layers.sort(LAYER)
    if layers.is_empty():
        return layers.select(MODEL).with_columns(data=pl.lit(b""))
    starts = np.flatnonzero(_changes(layers, MODEL))
    schema = columns_schema("LayerList")
    column = pa.ListArray.from_arrays(
        _offsets(starts, layers.height), _plain_arrow(layers["layer"], pa.binary()), type=schema.field("layers").type
    )
    data = write_columns("LayerList", pa.record_batch([column], schema=schema))
    return layers.select(MODEL)[starts].with_columns(data=_series(data))


def _changes(rows: pl.DataFrame, names: list[str]) -> np.ndarray[Any, Any]:
    """Where sorted rows differ from the one before in any of these columns."""
    changed = np.ones(rows.height, dtype=bool)
    changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in map(rows.__getitem__, names)])
    return changed


def _entries(rows: pl.DataFrame, kind: pa.StructType) -> pa.StructArray:
    count = rows.height
    places = rows["place"].to_numpy()
    stamp_type = kind.field("stamp").type
    stamps = pa.StructArray.from_arrays(
        [
            number_bytes(np.zeros(0, dtype=np.uint64), empty=count),
            pa.array(rows["depth"].to_numpy()),
            pa.array(places >> np.uint64(16)),
            pa.array(places & _POSITION_MASK),
        ],
        fields=list(stamp_type),
    )
    columns = {name: _plain_arrow(rows[name], pa.binary()) for name in ODD_KINDS if name in rows.columns}
    columns["set"] = _plain_arrow(rows["value"], pa.binary())
    kept = np.zeros(count, dtype=bool)
    for column in columns.values():
        if column.null_count < count:
            kept |= np.asarray(column.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    columns["deleted"] = pa.array(np.ones(count, dtype=bool), mask=kept)
    columns |= {"path": _paths(rows["path"], kind.field("path").type), "stamp": stamps}
    arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in kind]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _paths(paths: pl.Series, kind: pa.ListType) -> pa.ListArray:
    if paths.str.contains(PATH_SEPARATOR, literal=True).any():
        split = paths.str.split(PATH_SEPARATOR)
        steps = _plain_arrow(split.explode(), pa.string())
        sizes = split.list.len().to_numpy()
        return pa.ListArray.from_arrays(_sums(sizes), steps, type=kind)
    return pa.ListArray.from_arrays(
        pa.array(np.arange(len(paths) + 1, dtype=np.int32)), _plain_arrow(paths, pa.string()), type=kind
    )


def split_states(models: pl.DataFrame) -> pl.DataFrame:
    """The layers of encoded property sets, each as its bytes. `models` has the columns of MODEL and `data`."""
    lists = read_columns("LayerList", _plain_arrow(models["data"], pa.binary())).column("layers")
    layers = lists.flatten()
    owners = np.repeat(np.arange(models.height), np.diff(lists.offsets.to_numpy()))
    feeds = read_columns("LayerHead", layers).column("feed") if len(layers) else pa.array([], pa.binary())
    return models.select(MODEL)[owners].with_columns(feed=pl.Series(bytes_numbers(feeds)), layer=_series(layers))


def decode_layers(layers: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of layers, each with its `top` key and, where it is odd, its bytes by kind (ODD_KINDS); and the odd keys:
    LAYER, `top`, and whether columns can't even carry them (`apart`), because a step of a path holds the separator."""
    lists = read_columns("Layer", _plain_arrow(layers["layer"], pa.binary())).column("entries")
    entries = lists.flatten()
    owners = np.repeat(np.arange(layers.height), np.diff(lists.offsets.to_numpy()))
    steps = _series(entries.field("path"))
    apart = np.zeros(len(entries), dtype=bool)
    if len(steps):
        apart = steps.list.eval(pl.element().str.contains(PATH_SEPARATOR, literal=True)).list.any().to_numpy()
    odd = apart.copy()
    for name in ODD_KINDS:
        odd |= entries.field(name).is_valid().to_numpy(zero_copy_only=False)
    stamps = entries.field("stamp")
    seqs, positions = (stamps.field(name).to_numpy(zero_copy_only=False) for name in ("seq", "position"))
    rows = layers.select(LAYER)[owners].with_columns(
        depth=pl.Series(stamps.field("depth").to_numpy(zero_copy_only=False)),
        place=pl.Series((seqs << np.uint64(16)) | positions),
        change=pl.lit(0, dtype=pl.UInt32),
        path=steps.list.join(PATH_SEPARATOR),
        value=_series(entries.field("set")),
        fresh=pl.lit(False),
        top=steps.list.first(),
        **{name: _series(entries.field(name)) for name in ODD_KINDS},
    )
    keys = rows.select(*LAYER, "top").with_columns(apart=pl.Series(apart, dtype=pl.Boolean))
    keys = keys.filter(pl.Series(odd, dtype=pl.Boolean))
    return rows, keys.group_by(*LAYER, "top").agg(pl.col("apart").any())


def layer_state(layer: bytes) -> bytes:
    """A property set of this one layer."""
    return _LAYER_TAG + varint(len(layer)) + layer


def state_layer(state: bytes) -> bytes:
    """The layer of a property set that has one."""
    at = 1
    while state[at] & 0x80:
        at += 1
    return state[at + 1 :]


def number_bytes(numbers: np.ndarray[Any, Any], *, empty: int = 0) -> pa.Array:
    """Numbers as columns of 8 bytes each, or so many empty ones."""
    if empty:
        return pa.Array.from_buffers(
            pa.binary(), empty, [None, pa.py_buffer(bytes(4 * (empty + 1))), pa.py_buffer(b"")]
        )
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * FEED_ID_BYTES
    data = numbers.astype(">u8").tobytes()
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data)])


def bytes_numbers(column: pa.Array) -> np.ndarray[Any, Any]:
    """The reverse of `number_bytes`."""
    if not len(column):
        return np.zeros(0, dtype=np.uint64)
    start = int(np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset])
    return np.frombuffer(column.buffers()[2], dtype=">u8", count=len(column), offset=start).astype(np.uint64)


def item_ids(creators: np.ndarray[Any, Any], local: np.ndarray[Any, Any]) -> list[bytes]:
    """Item ids from their two halves."""
    joined = np.empty((len(creators), 2), dtype=">u8")
    joined[:, 0], joined[:, 1] = creators, local
    data = joined.tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def item_halves(items: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The two halves of item ids."""
    column = items.combine_chunks() if isinstance(items, pa.ChunkedArray) else items
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.binary())
    if not len(column):
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64)
    start = int(np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset])
    pairs = np.frombuffer(column.buffers()[2], dtype=">u8", count=2 * len(column), offset=start).reshape(-1, 2)
    return pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)


def _plain_arrow(series: pl.Series, kind: pa.DataType) -> pa.Array:
    """A polars column as the plain Arrow kind that others read: polars prefers views and 64-bit offsets."""
    array = series.to_arrow()
    return array if array.type.equals(kind) else array.cast(kind)


def _series(array: pa.Array) -> pl.Series:
    found = pl.from_arrow(array)
    assert isinstance(found, pl.Series)
    return found


def _offsets(starts: np.ndarray[Any, Any], end: int) -> pa.Array:
    return pa.array(np.append(starts, end).astype(np.int32))


def _sums(sizes: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(sizes))).astype(np.int32))
