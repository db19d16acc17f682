"""Item states -> rows of the tables items, properties and links. Arrow in, Arrow out.

Properties that were only set or deleted whole are merged by column kernels; what else is in a property set, and every
other model, is decoded by the kernel and asked for its value. Both ways give the same rows.

A path is written as its steps joined by `/`; inside a step `/` is written `~1` and `~` is written `~0`, as in JSON
Pointer. Maps are not rows of their own, their entries are; an empty map is one.
"""

import binascii
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import ModelFailed
from echostore.kernel.ids import ITEM_ID_BYTES, ItemId
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.ordered_fold import OrderedFold
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.values import BlobRef, Reference, Value
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, MOMENT, PROPERTIES
from echostore.pipeline.stages.message_columns import read_columns
from echostore.wire.generated import property_set_pb2 as pb
from echostore.wire.items import decode_record
from echostore.wire.models import property_set
from echostore.wire.values import value_from_bytes

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

KINDS = ("null", "boolean", "integer", "number", "text", "bytes", "time", "list", "map", "reference", "blob")


def item_tables(states: pa.RecordBatch, commit: int, factory: ModelFactory) -> dict[str, pa.RecordBatch]:
    """The rows that a batch of `schemas.ITEM_STATES` adds to the tables."""
    gone = states.column("gone").to_numpy(zero_copy_only=False)
    live = states.filter(pa.array(~gone)) if gone.any() else states
    columns = read_columns("ItemState", live.column("state"))
    party, item = hex_texts(live.column("party")), item_texts(live.column("item"))
    metadata = _metadata(columns.column("metadata"), live.column("item"))
    is_property_set = _is_property_set(live)
    values, opaque = _values(live, ~is_property_set, factory)
    rows = len(live)
    items = pa.record_batch(
        [
            party,
            item,
            live.column("model"),
            live.column("version"),
            columns.column("type"),
            pa.array([known.name for known in metadata], pa.string()) if metadata else repeated("", rows),
            pa.array([known.deleted for known in metadata]) if metadata else pa.array(np.zeros(rows, bool)),
            pa.array(opaque),
            _optional_items(columns.column("parent")),
            hex_texts(pc.binary_slice(live.column("item"), 0, 8)),
            columns.column("genesis_depth").cast(pa.int64()),
            _optional_hex(columns.column("inception_key")),
            _optional_items(columns.column("forked_from")),
            pc.binary_length(columns.column("state")).cast(pa.int64()),
            values,
            pa.array(np.full(rows, commit)),
            pa.array(np.zeros(rows, bool)),
        ],
        schema=ITEMS,
    )
    if gone.any():
        items = _join([items, _gone_rows(states.filter(pa.array(gone)), commit)], ITEMS)
    return {
        "items": items,
        "properties": _properties(live, columns, party, item, is_property_set, commit),
        "links": _links(columns, party, item, items, commit),
    }


class _Metadata:
    """What the items table shows of a metadata item."""

    __slots__ = ("deleted", "name")

    def __init__(self, record: ItemRecord | None) -> None:
        self.name = "" if record is None else record.name
        self.deleted = record is not None and record.deleted


_NO_METADATA = _Metadata(None)


def _metadata(column: pa.Array, items: pa.Array) -> list[_Metadata]:
    """Names and deletions; nothing at all when no item has metadata, which is how most batches are."""
    sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    found: list[_Metadata] = []
    if sizes.any():
        found = [_NO_METADATA] * len(column)
        for row in np.flatnonzero(sizes).tolist():
            item = ItemId(items[row].as_py())
            known = property_set.decode_state(item, column[row].as_py())
            record = ItemRecord(None, None, known)  # type: ignore[arg-type]  # only the metadata is asked
            found[row] = _Metadata(record)
    return found


def _is_property_set(live: pa.RecordBatch) -> np.ndarray[Any, Any]:
    named = pc.equal(live.column("model"), PropertySet.name).to_numpy(zero_copy_only=False)
    return named & (live.column("version").to_numpy() == PropertySet.version)  # type: ignore[no-any-return]  # pyarrow has no types


def _values(
    live: pa.RecordBatch, chosen: np.ndarray[Any, Any], factory: ModelFactory
) -> tuple[pa.Array, np.ndarray[Any, Any]]:
    """The values of items that are no property sets, as JSON, and which items this process can't read."""
    opaque = np.zeros(len(live), bool)
    if not chosen.any():
        return pa.nulls(len(live), pa.string()), opaque
    texts: list[str | None] = [None] * len(live)
    state = live.column("state")
    for row in np.flatnonzero(chosen).tolist():
        model = decode_record(state[row].as_py(), factory).model
        opaque[row] = isinstance(model, OrderedFold) and model.opaque
        if not opaque[row]:
            try:
                texts[row] = value_json(model.value())
            except ModelFailed:  # the item is in the table without a value; its rejects tell why
                texts[row] = None
    return pa.array(texts, pa.string()), opaque


def _gone_rows(gone: pa.RecordBatch, commit: int) -> pa.RecordBatch:
    rows = len(gone)
    columns: list[Any] = []
    for field in ITEMS:
        if field.name == "party":
            columns.append(hex_texts(gone.column("party")))
        elif field.name == "item":
            columns.append(item_texts(gone.column("item")))
        elif field.name == "commit":
            columns.append(pa.array(np.full(rows, commit)))
        elif field.name == "gone":
            columns.append(pa.array(np.ones(rows, bool)))
        elif field.nullable:
            columns.append(pa.nulls(rows, field.type))
        else:
            blank = {pa.string(): "", pa.bool_(): False, pa.int64(): 0}[field.type]
            columns.append(pa.array([blank] * rows, field.type))
    return pa.record_batch(columns, schema=ITEMS)


def _links(
    columns: pa.RecordBatch, party: pa.Array, item: pa.Array, items: pa.RecordBatch, commit: int
) -> pa.RecordBatch:
    source = columns.column("link_source")
    chosen = np.flatnonzero(pc.fill_null(pc.binary_length(source), 0).to_numpy(zero_copy_only=False))
    at = pa.array(chosen)
    return pa.record_batch(
        [
            party.take(at),
            item.take(at),
            columns.column("type").take(at),
            items.column("deleted").take(at),
            _optional_items(source.take(at)),
            _optional_items(columns.column("link_target").take(at)),
            _optional_hex(columns.column("link_party").take(at)),
            pa.array(np.full(len(chosen), commit)),
        ],
        schema=LINKS,
    )


# properties


def _properties(
    live: pa.RecordBatch,
    columns: pa.RecordBatch,
    party: pa.Array,
    item: pa.Array,
    chosen: np.ndarray[Any, Any],
    commit: int,
) -> pa.RecordBatch:
    rows = np.flatnonzero(chosen)
    states = columns.column("state").take(pa.array(rows))
    found = _plain_properties(states)
    slow = [
        (row, path, value)
        for at, keys in found.odd.items()
        for row in [int(rows[at])]
        for path, value in _merged(ItemId(live.column("item")[row].as_py()), states[at].as_py(), keys)
    ]
    parts = []
    if len(found.owners):
        table, deep = _value_columns(found.values)
        flat = pa.array(~deep)
        parts.append((rows[found.owners[~deep]], found.paths.filter(flat), table.filter(flat)))
        # A map is no row: its entries are.
        for at in np.flatnonzero(deep).tolist():
            value = value_from_bytes(found.values[at].as_py(), bytes_max=None)
            row, path = int(rows[found.owners[at]]), found.paths[at].as_py()
            slow += [(row, f"{path}/{below}" if below else path, each) for below, each in leaves(value)]
    if slow:
        shown = pa.Table.from_pylist([typed(value) for _, _, value in slow], _VALUE_SCHEMA).combine_chunks()
        paths = pa.array([path for _, path, _ in slow], pa.string())
        parts.append((np.array([row for row, _, _ in slow]), paths, shown.to_batches()[0]))
    batches = []
    for owner, path, value in parts:
        at = pa.array(owner)
        batches.append(
            pa.record_batch(
                [
                    party.take(at),
                    item.take(at),
                    path,
                    *(value.column(name) for name in _VALUE_SCHEMA.names),
                    pa.array(np.full(len(owner), commit)),
                ],
                schema=PROPERTIES,
            )
        )
    return _join(batches, PROPERTIES)


_VALUE_SCHEMA = pa.schema([PROPERTIES.field(name) for name in PROPERTIES.names[3:-1]])


@dataclass(frozen=True, slots=True)
class _Plain:
    """Merged properties by column: the state they belong to, path and encoded value. `odd` are the keys of states that
    columns can't merge."""

    owners: np.ndarray[Any, Any]
    paths: pa.Array
    values: pa.Array
    odd: dict[int, set[str]]


def _plain_properties(states: pa.Array) -> _Plain:
    """What is written under one key does not depend on other keys. A key is plain if all its entries set or delete it
    whole; then the last one in canonical order wins."""
    layers = read_columns("PropertyState", states).column("layers")
    layer_rows = np.repeat(np.arange(len(states)), np.diff(layers.offsets.to_numpy()))
    flat_layers = layers.flatten()
    entries = flat_layers.field("entries")
    counts = np.diff(entries.offsets.to_numpy())
    owners = np.repeat(layer_rows, counts)
    feeds = np.repeat(np.arange(len(flat_layers)), counts)  # a state's layers ascend by feed, so their numbers do too
    flat = entries.flatten()
    paths = flat.field("path")
    single = np.diff(paths.offsets.to_numpy()) == 1
    is_set = flat.field("set").is_valid().to_numpy(zero_copy_only=False)
    is_deleted = flat.field("deleted").is_valid().to_numpy(zero_copy_only=False)
    keys = pc.list_element(paths, 0) if len(paths) else pa.array([], pa.string())
    coded = keys.dictionary_encode()
    key = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    group = owners * (len(coded.dictionary) + 1) + key
    odd_entries = ~(single & (is_set | is_deleted))
    odd: dict[int, set[str]] = defaultdict(set)
    kept = np.arange(len(owners))
    if odd_entries.any():
        odd_groups, first = np.unique(group[odd_entries], return_index=True)
        places = np.flatnonzero(odd_entries)[first]
        for owner, name in zip(owners[places].tolist(), keys.take(pa.array(places)).to_pylist(), strict=True):
            odd[owner].add(name)
        kept = np.flatnonzero(~np.isin(group, odd_groups))
    stamp = flat.field("stamp").take(pa.array(kept))
    depth, seq, position = (stamp.field(name).to_numpy(zero_copy_only=False) for name in ("depth", "seq", "position"))
    order = np.lexsort((position, seq, feeds[kept], depth, group[kept]))
    last = np.ones(len(order), bool)
    last[:-1] = group[kept][order][1:] != group[kept][order][:-1]
    winners = kept[order[last]]
    winners = winners[is_set[winners]]
    at = pa.array(winners)
    return _Plain(owners[winners], _escaped(keys.take(at)), flat.field("set").take(at), odd)


def _escaped(steps: pa.Array) -> pa.Array:
    return pc.replace_substring(pc.replace_substring(steps, "~", "~0"), "/", "~1")


def _value_columns(values: pa.Array) -> tuple[pa.RecordBatch, np.ndarray[Any, Any]]:
    """The typed columns of encoded values, and which of them are maps."""
    columns = read_columns("Value", values)
    count = len(values)
    kinds = np.full(count, "null", dtype=object)
    named = (
        ("boolean", "boolean"),
        ("integer", "integer"),
        ("number", "number"),
        ("text", "text"),
        ("binary", "bytes"),
        ("timestamp_us", "time"),
        ("list", "list"),
        ("map", "map"),
        ("reference", "reference"),
        ("blob", "blob"),
    )
    for field, kind in named:
        column = columns.column(field)
        if column.null_count < count:
            kinds[column.is_valid().to_numpy(zero_copy_only=False)] = kind
    text = columns.column("text")
    structured: list[str | None] | None = None
    texts: list[str | None] | None = None
    for row in np.flatnonzero(np.isin(kinds, ("bytes", "reference", "list", "blob"))).tolist():
        texts = text.to_pylist() if texts is None else texts
        structured = [None] * count if structured is None else structured
        shown = typed(value_from_bytes(values[row].as_py(), bytes_max=None))
        texts[row], structured[row] = shown["text"], shown["json"]
    deep = kinds == "map"
    batch = pa.record_batch(
        [
            pa.array(kinds, pa.string()),
            text if texts is None else pa.array(texts, pa.string()),
            columns.column("integer"),
            columns.column("number"),
            columns.column("boolean"),
            columns.column("timestamp_us").cast(MOMENT),
            pa.nulls(count, pa.string()) if structured is None else pa.array(structured, pa.string()),
        ],
        schema=_VALUE_SCHEMA,
    )
    return batch, deep


def _merged(item: ItemId, state: bytes, keys: set[str]) -> Iterator[tuple[str, Value]]:
    """The merged properties under some keys, by the kernel."""
    message = pb.PropertySetState.FromString(state)
    for layer in message.layers:
        kept = [entry for entry in layer.entries if entry.path[0] in keys]
        del layer.entries[:]
        layer.entries.extend(kept)
    yield from flattened(property_set.decode_state(item, message.SerializeToString()).value(), ())


def leaves(value: Value) -> Iterator[tuple[str, Value]]:
    """What is in a map, with paths inside of it; an empty map is one leaf."""
    return flattened(value, ()) if value else iter([("", value)])


def flattened(value: Value, path: tuple[str, ...]) -> Iterator[tuple[str, Value]]:
    """The leaves of a value with their paths."""
    if isinstance(value, dict) and (value or not path):
        for key, element in value.items():
            yield from flattened(element, (*path, key))
    else:
        yield "/".join(step.replace("~", "~0").replace("/", "~1") for step in path), value


def typed(value: Value) -> dict[str, Any]:
    """A value as its kind and the one column that holds it."""
    row: dict[str, Any] = dict.fromkeys(_VALUE_SCHEMA.names)
    if value is None:
        row["kind"] = "null"
    elif isinstance(value, bool):
        row["kind"], row["boolean"] = "boolean", value
    elif isinstance(value, int):
        row["kind"], row["integer"] = "integer", value
    elif isinstance(value, float):
        row["kind"], row["number"] = "number", value
    elif isinstance(value, str):
        row["kind"], row["text"] = "text", value
    elif isinstance(value, bytes):
        row["kind"], row["text"] = "bytes", value.hex()
    elif isinstance(value, datetime):
        row["kind"], row["time"] = "time", value
    elif isinstance(value, Reference):
        row["kind"], row["text"] = "reference", str(value)
    else:
        row["kind"] = "list" if isinstance(value, list) else "map" if isinstance(value, dict) else "blob"
        row["json"] = value_json(value)
    return row


def value_json(value: Value) -> str:
    """A value as JSON text; what JSON lacks becomes text inside of it."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _plain(value: Value) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, BlobRef):
        cids = [cid.hex() for cid in value.cids]
        return {"cids": cids, "media_type": value.media_type, "name": value.name, "size": value.size}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# ids as text


def item_texts(items: pa.Array) -> pa.Array:
    """`kernel.ids.item_text` of a whole column."""
    raw = np.frombuffer(_contiguous(items, ITEM_ID_BYTES), dtype=">u8").astype(np.uint64).reshape(-1, 2)
    creator, local = raw[:, 0], raw[:, 1]
    mixed = local ^ creator
    mixed = (mixed ^ mixed >> np.uint64(30)) * _MIX_1
    mixed = (mixed ^ mixed >> np.uint64(27)) * _MIX_2
    mixed = mixed ^ mixed >> np.uint64(31)
    return _text_of(np.stack([mixed, creator], axis=1).astype(">u8").tobytes(), ITEM_ID_BYTES)


def hex_texts(column: pa.Array) -> pa.Array:
    """A column of equally long bytes as hex."""
    if not len(column):
        return pa.array([], pa.string())
    size = len(column[0].as_py())
    return _text_of(_contiguous(column, size), size)


def _text_of(data: bytes, size: int) -> pa.Array:
    count = len(data) // size
    offsets = np.arange(count + 1, dtype=np.int32) * (2 * size)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(binascii.hexlify(data)))


def _contiguous(column: pa.Array, size: int) -> bytes:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    assert len(column) == 0 or (np.diff(offsets) == size).all(), f"not all have {size} bytes"
    if not len(column):
        return b""
    return bytes(memoryview(column.buffers()[2])[int(offsets[0]) : int(offsets[-1])])


def _optional_items(column: pa.Array) -> pa.Array:
    return _where_given(column, item_texts)


def _optional_hex(column: pa.Array) -> pa.Array:
    return _where_given(column, hex_texts)


def _where_given(column: pa.Array, shown: Any) -> pa.Array:
    """Text where there are bytes, null where there are none."""
    given = pc.greater(pc.fill_null(pc.binary_length(column), 0), 0)
    at = np.flatnonzero(given.to_numpy(zero_copy_only=False))
    if not len(at):
        return pa.nulls(len(column), pa.string())
    texts = shown(column.take(pa.array(at)))
    if len(at) == len(column):
        return texts
    places = np.full(len(column), -1, dtype=np.int64)
    places[at] = np.arange(len(at))
    return texts.take(pa.array(places, mask=places < 0))


def repeated(text: str, count: int) -> pa.Array:
    """One text many times."""
    return pa.array([text], pa.string()).take(pa.array(np.zeros(count, dtype=np.int32)))


def _join(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    found = table.to_batches()
    return found[0] if found else pa.RecordBatch.from_pylist([], schema)
