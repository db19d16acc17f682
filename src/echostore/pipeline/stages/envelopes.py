"""Envelopes by column: what ordering needs of many payloads at once, with the verdicts of `wire.messages.decode_envelope`.

    payloads ──► parsed by the schema's own parser, result thrown away      is it a message at all? (0.4 us)
             ──► ptars, operations and credentials as bytes                 the columns (0.25 us)
             ──► put together again, compared with the payload              are these its only contents? (0.25 us)
             ──► rows that differ, or look odd: `decode_envelope`           one by one

Two parsers may disagree about odd bytes: a field twice, a number written too long, an unknown tag. A payload that is the
one canonical encoding of the columns leaves nothing to disagree about; what is not goes the slow way, whose word counts.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from echostore.kernel.ids import FEED_ID_BYTES, LINK_PREFIX_BYTES
from echostore.kernel.limits import DEPENDENCIES_MAX, DEPTH_MAX, OPERATIONS_MAX, SEQ_MAX
from echostore.kernel.order import DATA
from echostore.kernel.reasons import Reason
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.messages import decode_envelope

Longs = npt.NDArray[np.int64]

NAMED_DEPTH_MAX = (1 << 62) - 1
"""Named depths above this are false, whatever they are; cut to it they stay so and fit."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SHELL = (
    ("dependency_feeds", 1, _FIELD.TYPE_BYTES, _FIELD.LABEL_OPTIONAL),
    ("dependency_seqs", 2, _FIELD.TYPE_UINT64, _FIELD.LABEL_REPEATED),
    ("dependency_links", 3, _FIELD.TYPE_BYTES, _FIELD.LABEL_OPTIONAL),
    ("dependency_depths", 4, _FIELD.TYPE_UINT64, _FIELD.LABEL_REPEATED),
    ("depth", 5, _FIELD.TYPE_UINT64, _FIELD.LABEL_OPTIONAL),
    ("time_ms", 6, _FIELD.TYPE_SINT64, _FIELD.LABEL_OPTIONAL),
    ("operations", 7, _FIELD.TYPE_BYTES, _FIELD.LABEL_REPEATED),
    ("credentials", 8, _FIELD.TYPE_BYTES, _FIELD.LABEL_REPEATED),
    ("undoes", 9, _FIELD.TYPE_UINT64, _FIELD.LABEL_OPTIONAL),
)


@dataclass(frozen=True, slots=True)
class Envelopes:
    """The envelopes of consecutive data blocks, up to and without the first that has none.

    Dependencies are rows of their own, ascending by `block`: the place of their message in the batch.
    """

    depths: Longs
    block: Longs
    names: npt.NDArray[np.uint64]
    """Feed ids as big-endian numbers, which sort as the bytes do."""
    named_seqs: Longs
    named_links: npt.NDArray[np.uint8]
    """One row of 16 bytes each."""
    named_depths: Longs
    fault: Reason | None
    """What is wrong with the block after the last."""


def read_envelopes(payloads: pa.Array, rows: list[bytes]) -> Envelopes:
    """The envelopes of data blocks; `rows` are the payloads once more, as objects."""
    end = _parsed(rows)
    fault = None if end == len(rows) else Reason.UNDECODABLE
    columns = _columns(payloads.slice(0, end)) if end else None
    if columns is None:
        return _one_by_one(rows, end, fault)
    odd = np.flatnonzero(_odd(columns, payloads.slice(0, end)))
    found = _from_columns(columns, odd, rows)
    if found.fault is None and fault is not None:
        return replace(found, fault=fault)
    return found


def _parsed(rows: list[bytes]) -> int:
    """How many payloads, from the first, are messages of the schema."""
    parse = pb.Message.FromString
    try:
        deque(map(parse, rows), maxlen=0)
    except (DecodeError, ValueError):
        return next(at for at, payload in enumerate(rows) if not _parses(payload))
    return len(rows)


def _parses(payload: bytes) -> bool:
    try:
        pb.Message.FromString(payload)
    except (DecodeError, ValueError):
        return False
    return True


@cache
def _handler() -> Any:
    """Made once per process, where it is used: it does not travel."""
    import ptars

    file = descriptor_pb2.FileDescriptorProto(name="shell.proto", package="echostore.shell", syntax="proto3")
    message = file.message_type.add(name="Shell")
    for name, number, kind, label in _SHELL:
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    shell = pool.FindMessageTypeByName("echostore.shell.Shell")
    return ptars.HandlerPool([shell.file]).get_for_message(shell)


def _columns(payloads: pa.Array) -> pa.RecordBatch | None:
    """The columns, or None when some payload is beyond this parser."""
    try:
        return _handler().array_to_record_batch(payloads)
    except (ValueError, RuntimeError, pa.ArrowException):
        return None


def _odd(columns: pa.RecordBatch, payloads: pa.Array) -> npt.NDArray[np.bool_]:
    """Which rows are not to be taken by column."""
    again = _handler().record_batch_to_array(columns)
    canonical = _flags(pc.equal(again, payloads))
    depth = columns["depth"].to_numpy(zero_copy_only=False)
    seqs = _lengths(columns["dependency_seqs"])
    odd: npt.NDArray[np.bool_] = (
        ~canonical
        | (depth == 0)
        | (depth > DEPTH_MAX)
        | (_lengths(columns["credentials"]) > 0)
        | (_lengths(columns["operations"]) > OPERATIONS_MAX)
        | (seqs > DEPENDENCIES_MAX)
        | (_sizes(columns["dependency_feeds"]) != seqs * FEED_ID_BYTES)
        | (_sizes(columns["dependency_links"]) != seqs * LINK_PREFIX_BYTES)
        | (_lengths(columns["dependency_depths"]) != seqs)
    )
    return odd


def _from_columns(columns: pa.RecordBatch, odd: Longs, rows: list[bytes]) -> Envelopes:
    end = columns.num_rows
    depths = np.minimum(columns["depth"].to_numpy(zero_copy_only=False), NAMED_DEPTH_MAX).astype(np.int64)
    slow: dict[int, Envelopes] = {}
    fault: Reason | None = None
    for row in odd.tolist():
        one = _one_by_one([rows[row]], 1, None)
        if one.fault is not None:
            end, fault = row, one.fault
            break
        slow[row] = one
        depths[row] = one.depths[0]
    plain = np.ones(columns.num_rows, bool)
    plain[odd] = False
    plain[end:] = False
    taken = columns if plain.all() else columns.filter(pa.array(plain))
    block = np.repeat(np.flatnonzero(plain), _lengths(taken["dependency_seqs"]))
    names = _bytes_of(taken["dependency_feeds"]).view(">u8").astype(np.uint64)
    links = _bytes_of(taken["dependency_links"]).reshape(-1, LINK_PREFIX_BYTES)
    seqs = _values(taken["dependency_seqs"])
    named_depths = np.minimum(_values(taken["dependency_depths"]), NAMED_DEPTH_MAX).astype(np.int64)
    # Ascending feeds and possible seqs are asked of all dependencies at once; whoever breaks that goes the slow way.
    broken = seqs > SEQ_MAX
    broken[1:] |= (block[1:] == block[:-1]) & (names[1:] <= names[:-1])
    if broken.any():
        again = np.union1d(odd, np.unique(block[broken]))
        if len(again) > len(odd):
            return _from_columns(columns, again, rows)
    found = Envelopes(depths[:end], block, names, seqs.astype(np.int64), links, named_depths, fault)
    return _with_slow(found, slow) if slow else found


def _with_slow(found: Envelopes, slow: dict[int, Envelopes]) -> Envelopes:
    """Put dependencies that were read one by one among the others, in the order of blocks."""
    parts = [found, *slow.values()]
    block = np.concatenate([found.block, *(one.block + row for row, one in slow.items())])
    order = np.argsort(block, kind="stable")
    return Envelopes(
        found.depths,
        block[order],
        np.concatenate([part.names for part in parts])[order],
        np.concatenate([part.named_seqs for part in parts])[order],
        np.concatenate([part.named_links for part in parts])[order],
        np.concatenate([part.named_depths for part in parts])[order],
        found.fault,
    )


def _one_by_one(rows: list[bytes], end: int, fault: Reason | None) -> Envelopes:
    depths: list[int] = []
    named: list[tuple[int, bytes, int, bytes, int]] = []
    for at in range(end):
        envelope = decode_envelope(rows[at], DATA)
        if isinstance(envelope, Reason):
            fault = envelope
            break
        depths.append(envelope.depth)
        named += [
            (at, dependency.feed, dependency.seq, dependency.link_prefix, min(dependency.depth, NAMED_DEPTH_MAX))
            for dependency in envelope.dependencies
        ]
    block, names, seqs, links, named_depths = zip(*named, strict=True) if named else ((), (), (), (), ())
    return Envelopes(
        np.array(depths, np.int64),
        np.array(block, np.int64),
        np.frombuffer(b"".join(names), ">u8").astype(np.uint64),
        np.array(seqs, np.int64),
        np.frombuffer(b"".join(links), np.uint8).reshape(-1, LINK_PREFIX_BYTES),
        np.array(named_depths, np.int64),
        fault,
    )


def _flags(array: pa.Array) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return flags


def _lengths(array: pa.Array) -> Longs:
    lengths: Longs = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _sizes(array: pa.Array) -> Longs:
    sizes: Longs = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


def _values(array: pa.Array) -> npt.NDArray[np.uint64]:
    """The numbers of all lists, one after the other."""
    values: npt.NDArray[np.uint64] = pc.list_flatten(array).to_numpy(zero_copy_only=False)
    return values


def _bytes_of(array: pa.Array) -> npt.NDArray[np.uint8]:
    """The bytes of all rows, one after the other."""
    data = array.buffers()[2]
    if data is None or not len(array):
        return np.zeros(0, np.uint8)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
