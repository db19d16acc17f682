"""Protobuf by column: the messages of the schema as Arrow columns, and back to their canonical bytes.

The messages here read the same bytes as `wire/schema`, but keep most submessages as bytes, so that a batch is decoded only
as far as it is looked at. They are made at run time; ptars does the work, half a microsecond a message.
"""

from functools import cache
from typing import Any

import numpy as np
import ptars
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, descriptor_pool

_FIELD = descriptor_pb2.FieldDescriptorProto
_BYTES, _TEXT, _BOOL = _FIELD.TYPE_BYTES, _FIELD.TYPE_STRING, _FIELD.TYPE_BOOL
_UINT, _UINT32, _SINT, _DOUBLE = _FIELD.TYPE_UINT64, _FIELD.TYPE_UINT32, _FIELD.TYPE_SINT64, _FIELD.TYPE_DOUBLE

# name -> fields (name, number, type or message, repeated, member of the oneof), as in wire/schema.
MESSAGES: dict[str, tuple[tuple[str, int, Any, bool, bool], ...]] = {
    "Message": (
        ("dependency_feeds", 1, _BYTES, False, False),
        ("dependency_seqs", 2, _UINT, True, False),
        ("dependency_links", 3, _BYTES, False, False),
        ("dependency_depths", 4, _UINT, True, False),
        ("depth", 5, _UINT, False, False),
        ("time_ms", 6, _SINT, False, False),
        ("operations", 7, _BYTES, True, False),
        ("undoes", 9, _UINT, False, False),
    ),
    "Operation": (
        ("feed", 1, _BYTES, False, False),
        ("local", 2, _UINT, False, False),
        ("genesis", 3, "Genesis", False, True),
        ("property_set", 4, "Properties", False, True),
        ("metadata", 5, "Properties", False, True),
        ("growable_array", 6, _BYTES, False, True),
        ("text", 7, _BYTES, False, True),
        ("threaded_log", 8, _BYTES, False, True),
        ("custom", 9, _BYTES, False, True),
        ("placement", 10, _BYTES, False, True),
    ),
    # The same as Operation, for finding out which items are concerned.
    "OperationHead": (
        ("feed", 1, _BYTES, False, False),
        ("local", 2, _UINT, False, False),
        ("genesis", 3, _BYTES, False, True),
    ),
    "Genesis": (
        ("model", 1, _TEXT, False, False),
        ("version", 2, _UINT32, False, False),
        ("type", 3, _TEXT, False, False),
        ("parent", 4, _BYTES, False, False),
        ("link", 5, _BYTES, True, False),  # read as repeated: an empty list says that it is absent
        ("view", 6, _BYTES, True, False),
        ("forked_from", 7, _BYTES, False, False),
    ),
    "Properties": (("changes", 1, "Change", True, False), ("restores", 2, _BYTES, True, False)),
    "Change": (
        ("path", 1, _TEXT, True, False),
        ("set", 2, _BYTES, False, True),
        ("delete", 3, _BOOL, False, True),
        ("add", 4, _BYTES, False, True),
        ("remove", 5, _BYTES, False, True),
        ("increment", 6, _BYTES, False, True),
    ),
    "Value": (
        ("null", 1, _BOOL, False, True),
        ("boolean", 2, _BOOL, False, True),
        ("integer", 3, _SINT, False, True),
        ("number", 4, _DOUBLE, False, True),
        ("text", 5, _TEXT, False, True),
        ("binary", 6, _BYTES, False, True),
        ("timestamp_us", 7, _SINT, False, True),
        ("list", 8, _BYTES, False, True),
        ("map", 9, _BYTES, False, True),
        ("reference", 10, _BYTES, False, True),
        ("blob", 11, _BYTES, False, True),
    ),
    "ListValue": (("values", 1, _BYTES, True, False),),
    "MapValue": (("keys", 1, _TEXT, True, False), ("values", 2, _BYTES, True, False)),
    "Reference": (("item", 1, _BYTES, False, False), ("party", 2, _BYTES, False, False)),
    # Snapshots: wire/schema/property_set.proto and snapshot.proto.
    "PropertyState": (("layers", 1, "Layer", True, False),),
    "LayerList": (("layers", 1, _BYTES, True, False),),  # the same, with layers as they are
    "Layer": (("feed", 1, _BYTES, False, False), ("entries", 2, "Entry", True, False)),
    "LayerHead": (("feed", 1, _BYTES, False, False),),  # the same, for finding out whose they are
    "Entry": (
        ("path", 1, _TEXT, True, False),
        ("stamp", 2, "EntryStamp", False, False),
        ("set", 3, _BYTES, False, True),
        ("deleted", 4, _BOOL, False, True),
        ("added", 5, _BYTES, False, True),
        ("removed", 6, _BYTES, False, True),
        ("increment", 7, _BYTES, False, True),
    ),
    "EntryStamp": (
        ("feed", 1, _BYTES, False, False),
        ("depth", 2, _UINT, False, False),
        ("seq", 3, _UINT, False, False),
        ("position", 4, _UINT, False, False),
    ),
    "ItemState": (
        ("item", 1, _BYTES, False, False),
        ("model", 2, _TEXT, False, False),
        ("version", 3, _UINT32, False, False),
        ("type", 4, _TEXT, False, False),
        ("parent", 5, _BYTES, False, False),
        ("link_source", 6, _BYTES, False, False),
        ("link_target", 7, _BYTES, False, False),
        ("link_party", 8, _BYTES, False, False),
        ("inception_key", 9, _BYTES, False, False),
        ("id_proof", 10, _BYTES, False, False),
        ("forked_from", 11, _BYTES, False, False),
        ("state", 12, _BYTES, False, False),
        ("state_cids", 13, _BYTES, True, False),
        ("metadata", 14, _BYTES, False, False),
        ("access", 15, _BYTES, True, False),
        ("genesis_depth", 16, _UINT, False, False),
    ),
}
_PACKAGE = "echostore.columns"


@cache
def _handlers() -> tuple[ptars.HandlerPool, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="echostore_columns.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, repeated, one_of in fields:
            field = message.field.add(
                name=field_name, number=number, label=_FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            )
            if isinstance(kind, str):
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = kind
            if one_of:
                if not message.oneof_decl:
                    message.oneof_decl.add(name="kind")
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName(file.name)
    return ptars.HandlerPool([found]), found


def read_columns(message: str, data: pa.Array) -> pa.RecordBatch:
    """One row for each message; ValueError when one of them can't be decoded."""
    pool, file = _handlers()
    return pool.get_for_message(file.message_types_by_name[message]).array_to_record_batch(data)


def write_columns(message: str, columns: pa.RecordBatch) -> pa.Array:
    """The canonical bytes of each row."""
    pool, file = _handlers()
    return pool.get_for_message(file.message_types_by_name[message]).record_batch_to_array(columns)


@cache
def columns_schema(message: str) -> pa.Schema:
    """The columns of a message, for those who write some."""
    pool, file = _handlers()
    return pool.get_for_message(file.message_types_by_name[message]).schema()


def same(written: pa.Array, given: pa.Array) -> np.ndarray[Any, Any]:
    """Which rows are written as they were given."""
    if written.equals(given):
        return np.ones(len(given), dtype=bool)
    return pc.equal(written, given.cast(written.type)).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow has no types


def one_of(columns: Any, message: str) -> np.ndarray[Any, Any]:
    """Rows in which exactly one member of the oneof is there. `columns` is a batch or a struct."""
    count = np.zeros(len(columns), dtype=np.int8)
    for name, _, _, _, member in MESSAGES[message]:
        if member:
            column = columns.field(name) if isinstance(columns, pa.StructArray) else columns.column(name)
            if column.null_count < len(column):
                count += column.is_valid().to_numpy(zero_copy_only=False)
    return count == 1  # type: ignore[no-any-return]  # pyarrow has no types


def sizes(column: pa.Array) -> np.ndarray[Any, Any]:
    """How many bytes each row has; none where it is null."""
    return pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow has no types
