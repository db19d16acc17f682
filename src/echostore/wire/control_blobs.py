"""Control states, the evidence for them and memberships as blobs: one where they fit, else a head that names chunks.

    up to 1 MiB     the bytes are the blob
    above           head (`ControlChunks`)  size, CIDs  ──►  chunk  chunk  chunk  rest       each 1 MiB but the last

One content has one name: what fits one blob has no head, and chunks are full. Whoever reads a head checks that before it
asks for a chunk, and every chunk against its CID and its size.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.wire.cids import CID_BYTES, PROTOBUF, RAW, cid_codec, cid_of, is_cid, matches
from echostore.wire.generated import control_state_pb2 as pb
from echostore.wire.snapshot import canonical_message

CONTROL_BYTES_MAX: Final = 32 * BLOB_BYTES_MAX
"""A control state of some 20,000 members. Whoever starts from one has it in memory before it can judge it."""

Get = Callable[[Cid], bytes]

Least = Mapping[int, tuple[int, "Least"]]
"""By number of a field, how many bytes an entry of it has at least, and the same of the fields in it."""


def name_of(data: bytes) -> Cid:
    """Under which CID these bytes are asked for."""
    return next(iter(as_blobs(data)))


def as_blobs(data: bytes) -> dict[Cid, bytes]:
    """The blobs that these bytes are kept and sent as; the one that the others are found by comes first."""
    if len(data) <= BLOB_BYTES_MAX:
        return {cid_of(data, PROTOBUF): data}
    assert len(data) <= CONTROL_BYTES_MAX, f"{len(data)} bytes are more than anybody reads"
    cut = [data[at : at + BLOB_BYTES_MAX] for at in range(0, len(data), BLOB_BYTES_MAX)]
    cids = [cid_of(chunk, RAW) for chunk in cut]
    head = pb.ControlChunks(size=len(data), chunks=b"".join(cids)).SerializeToString(deterministic=True)
    return {cid_of(head, PROTOBUF): head, **dict(zip(cids, cut, strict=True))}


def read_blobs(name: Cid, get: Get) -> bytes:
    """The bytes that a CID stands for; Corrupt when what `get` gives is not what was asked for, or more than is read."""
    first = _checked(name, get, BLOB_BYTES_MAX)
    found = _chunks(first) if cid_codec(name) == PROTOBUF else None
    if found is None:
        return first
    size, cids = found
    rest = [_checked(cid, get, BLOB_BYTES_MAX) for cid in cids]
    if any(len(chunk) != BLOB_BYTES_MAX for chunk in rest[:-1]) or sum(map(len, rest)) != size:
        raise Corrupt("what control amounts to is in chunks of other sizes than its head says")
    return b"".join(rest)


def chunks_named(cid: Cid, data: bytes) -> list[Cid]:
    """The chunks that a blob leads to; Corrupt when it is a head that nobody writes."""
    found = _chunks(data) if cid_codec(cid) == PROTOBUF else None
    return found[1] if found is not None else []


def _checked(cid: Cid, get: Get, bytes_max: int) -> bytes:
    data = get(cid)
    if len(data) > bytes_max or not matches(cid, data):
        raise Corrupt("what control amounts to is not what its CID says")
    return data


def _chunks(data: bytes) -> tuple[int, list[Cid]] | None:
    """Size and chunks of a head; None for bytes that are none."""
    try:
        told = pb.ControlChunks.FromString(data)
    except DecodeError:
        return None  # whoever reads it as what it should be says what is wrong with it
    if not told.size and not told.chunks:
        return None
    head = canonical_message(pb.ControlChunks, data, "the head of a control state")
    if not BLOB_BYTES_MAX < head.size <= CONTROL_BYTES_MAX:
        raise Corrupt(f"the head of a control state that says {head.size} bytes")
    cids = [head.chunks[at : at + CID_BYTES] for at in range(0, len(head.chunks), CID_BYTES)]
    if len(cids) != -(-head.size // BLOB_BYTES_MAX):
        raise Corrupt("the head of a control state with more or fewer chunks than it has bytes for")
    if not all(is_cid(cid) and cid_codec(Cid(cid)) == RAW for cid in cids):
        raise Corrupt("the head of a control state with a chunk that has no CID")
    return head.size, [Cid(cid) for cid in cids]


# what is large has few entries


def check_dense(data: bytes, least: Least, name: str) -> None:
    """Corrupt when bytes of many blobs hold smaller entries than any that are written.

    Decoded, an empty entry takes fifty times its bytes. What fits one blob can't do harm.
    """
    if len(data) > CONTROL_BYTES_MAX:
        raise Corrupt(f"{name} of {len(data)} bytes is larger than it may be")
    if len(data) > BLOB_BYTES_MAX:
        _dense(memoryview(data), least, name)


def _dense(data: memoryview, least: Least, name: str) -> None:
    for number, entry in _entries(data, name):
        wanted = least.get(number)
        if wanted is not None:
            if len(entry) < wanted[0]:
                raise Corrupt(f"{name} with an entry of {len(entry)} bytes")
            if wanted[1]:
                _dense(entry, wanted[1], name)


def _entries(data: memoryview, name: str) -> Iterator[tuple[int, memoryview]]:
    """The fields of a message that have a length, by number."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at, name)
        value, at = _number(data, at, name)
        if tag & 7 == 2:
            if value > len(data) - at:
                raise Corrupt(f"{name} that ends too early")
            yield tag >> 3, data[at : at + value]
            at += value
        elif tag & 7:
            raise Corrupt(f"{name} with a field of another kind")


def _number(data: memoryview, at: int, name: str) -> tuple[int, int]:
    found = 0
    for place in range(10):
        if at + place >= len(data):
            break
        found |= (data[at + place] & 0x7F) << 7 * place
        if data[at + place] < 0x80:
            return found, at + place + 1
    raise Corrupt(f"{name} with a number that does not end")
