"""CAR v1: blobs in one file, for backups, for carrying an epoch by hand and for other tools of the CID world.

    varint length | header     { "roots": [CID, ...], "version": 1 } in DAG-CBOR
    varint length | CID | blob    any number of times

    3a a2 65 726f6f7473 81 d82a 58 25 00 <36-byte CID> 67 76657273696f6e 01
    |  |  |  "roots"    |  |    |     |                |  "version"       1
    |  |  text of 5     |  |    |     multibase        text of 7
    |  map of 2         |  |    37 bytes
    58 bytes            |  tag 42: a CID
                        one root

Both directions stream: one block is in memory at a time. The reader takes what this writer writes, in any order of
blocks, and nothing looser: every blob is checked against its CID, and what is wrong is told with its byte offset.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.wire.cids import CID_BYTES, cid_text, is_cid, matches
from echostore.wire.varint import varint

ROOTS_MAX: Final = 1000
"""A file for one snapshot has one root, a backup one per party and epoch."""

_VARINT_BYTES_MAX = 4
"""Enough for the largest block that is allowed."""

_MAP_AND_ROOTS = b"\xa2\x65roots"
_VERSION = b"\x67version\x01"
_CID_HEAD = b"\xd8\x2a\x58" + bytes((CID_BYTES + 1, 0))
_ROOT_BYTES = len(_CID_HEAD) + CID_BYTES
_HEADER_BYTES_MAX = len(_MAP_AND_ROOTS) + 3 + ROOTS_MAX * _ROOT_BYTES + len(_VERSION)


class Readable(Protocol):
    """What a CAR is read from: a binary file, or anything that reads like one."""

    def read(self, size: int, /) -> bytes: ...


class Writable(Protocol):
    """What a CAR is written to."""

    def write(self, data: bytes, /) -> object: ...


def write_car(file: Writable, roots: Sequence[Cid], blocks: Iterable[tuple[Cid, bytes]]) -> int:
    """Write all blocks in the order they come and return the size of the file in bytes.

    A block that does not match its CID raises Corrupt: a backup that can't be read back is worse than none.
    """
    assert 0 < len(roots) <= ROOTS_MAX, f"{len(roots)} roots, a file has 1 to {ROOTS_MAX}"
    assert all(map(is_cid, roots)), f"a root that is no CID: {roots}"
    header = _header_bytes(roots)
    head = varint(len(header)) + header
    file.write(head)
    written = len(head)
    for cid, data in blocks:
        if len(data) > BLOB_BYTES_MAX or not matches(cid, data):
            raise Corrupt(
                f"Block {cid.hex()} with {len(data)} bytes is too large or does not match its CID.",
                unchanged="The file is incomplete.",
            )
        head = varint(CID_BYTES + len(data)) + cid
        file.write(head)
        file.write(data)
        written += len(head) + len(data)
    return written


def read_car(file: Readable) -> tuple[tuple[Cid, ...], Iterator[tuple[Cid, bytes]]]:
    """The roots, and the blocks as they are iterated. Corrupt where the file ends early or is not what it should be."""
    source = _Source(file)
    size = source.length(_HEADER_BYTES_MAX, "header")
    if size is None:
        raise Corrupt("At byte 0 of the CAR file: it is empty.")
    start = source.offset
    header = source.take(size, "header")
    roots = _roots(header)
    # Encoding again is the strict check: there is one DAG-CBOR for these roots.
    if not roots or not all(map(is_cid, roots)) or _header_bytes(roots) != header:
        raise Corrupt(f"At byte {start} of the CAR file: not a header of CAR version 1 with SHA-256 CIDs.")
    return roots, _blocks(source)


def _blocks(source: "_Source") -> Iterator[tuple[Cid, bytes]]:
    while (size := source.length(CID_BYTES + BLOB_BYTES_MAX, "block")) is not None:
        start = source.offset
        if size < CID_BYTES:
            raise Corrupt(f"At byte {start} of the CAR file: a block of {size} bytes can't hold a CID.")
        cid = Cid(source.take(CID_BYTES, "CID"))
        if not is_cid(cid):
            raise Corrupt(f"At byte {start} of the CAR file: {cid.hex()} is not a CID that is in use here.")
        data = source.take(size - CID_BYTES, "block")
        if not matches(cid, data):
            raise Corrupt(f"At byte {start} of the CAR file: the block does not match its CID {cid_text(cid)}.")
        yield cid, data


class _Source:
    """A file that is read to the end once, and the offset reached in it."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.offset = 0

    def take(self, size: int, what: str) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:  # a pipe or socket answers with what it has
            part = self._file.read(missing)
            if not part:
                end = self.offset + size - missing
                raise Corrupt(f"At byte {end} of the CAR file: it ends, {missing} bytes of a {what} are missing.")
            parts.append(part)
            missing -= len(part)
        self.offset += size
        return b"".join(parts)

    def length(self, largest: int, what: str) -> int | None:
        """The next length, or None where the file ends as it should."""
        start = self.offset
        first = self._file.read(1)
        if not first:
            return None
        self.offset += 1
        encoded = first
        while encoded[-1] > 0x7F and len(encoded) < _VARINT_BYTES_MAX:
            encoded += self.take(1, "length")
        size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(encoded))
        if encoded[-1] > 0x7F or size > largest or varint(size) != encoded:
            raise Corrupt(f"At byte {start} of the CAR file: not the length of a {what} of at most {largest} bytes.")
        return size


def _header_bytes(roots: Sequence[Cid]) -> bytes:
    return b"".join((_MAP_AND_ROOTS, _array_head(len(roots)), *(_CID_HEAD + root for root in roots), _VERSION))


def _array_head(length: int) -> bytes:
    """CBOR's head of an array: the length in the first byte, or in one or two bytes after it."""
    if length < 24:
        return bytes((0x80 | length,))
    return bytes((0x98, length)) if length < 256 else b"\x99" + length.to_bytes(2, "big")


def _roots(header: bytes) -> tuple[Cid, ...]:
    """What stands where the roots of a good header stand: the number of roots follows from its length."""
    room = len(header) - len(_MAP_AND_ROOTS) - len(_VERSION)
    count = max(0, room - 1) // _ROOT_BYTES
    start = len(_MAP_AND_ROOTS) + len(_array_head(count)) + len(_CID_HEAD)
    return tuple(Cid(header[at : at + CID_BYTES]) for at in range(start, start + count * _ROOT_BYTES, _ROOT_BYTES))
