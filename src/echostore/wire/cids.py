"""Content ids: binary CIDv1 over SHA-256, and their base32 text.

    01 | codec | 12 20 | 32-byte SHA-256 digest        36 bytes, because every codec in use fits one varint byte

`raw` (0x55) is for leaves: blobs and large item states. `protobuf` (0x50) is for nodes of a snapshot tree, whose bytes
are one of our protobuf messages. Any other version, hash or codec is refused: one content has one CID here.
"""

import base64
import hashlib
from typing import Final

from echostore.kernel.ids import Cid

RAW: Final = 0x55
PROTOBUF: Final = 0x50
CODECS: Final = frozenset((RAW, PROTOBUF))
CID_BYTES: Final = 36
CID_CHARACTERS: Final = 59
"""The multibase letter 'b' and 58 base32 characters."""

_SHA2_256 = b"\x12\x20"
_PREFIXES = {codec: bytes((1, codec)) + _SHA2_256 for codec in CODECS}


def cid_of(data: bytes, codec: int = RAW) -> Cid:
    return Cid(_PREFIXES[codec] + hashlib.sha256(data).digest())


def cid_codec(cid: Cid) -> int:
    return cid[1]


def is_cid(raw: bytes) -> bool:
    """Whether `raw` is a CID of the only form in use."""
    return len(raw) == CID_BYTES and raw[0] == 1 and raw[1] in CODECS and raw[2:4] == _SHA2_256


def matches(cid: Cid, data: bytes) -> bool:
    """Whether `data` is what `cid` names; False for a malformed CID."""
    return is_cid(cid) and hashlib.sha256(data).digest() == cid[4:]


def cid_text(cid: Cid) -> str:
    """The multibase form 'b' + lower-case base32, as every CID tool prints it."""
    return "b" + base64.b32encode(cid).decode().rstrip("=").lower()


def cid_from_text(text: str) -> Cid:
    """The CID that `cid_text` printed; ValueError for every other text, also for another spelling of the same CID."""
    if len(text) != CID_CHARACTERS or text[0] != "b" or text != text.lower():
        raise ValueError(f"a content id is 'b' and {CID_CHARACTERS - 1} lower-case base32 characters: {text[:80]!r}")
    raw = base64.b32decode(text[1:].upper() + "======")
    if not is_cid(raw) or cid_text(Cid(raw)) != text:
        raise ValueError(f"not a CIDv1 of sha2-256 with codec raw or protobuf: {text!r}")
    return Cid(raw)
