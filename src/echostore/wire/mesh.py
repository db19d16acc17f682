"""Mesh frames <-> protobuf: what travels on an authenticated channel between two devices.

Like `echostore.wire.sync`, decoding is where the other side's bytes come in: whatever is wrong raises `MalformedFrame`.
A replication frame inside is handed on as bytes, for `wire.sync.decode_frame`.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, assert_never

from google.protobuf.message import DecodeError, EncodeError

from echostore.kernel.ids import Cid, PartyKey
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.wire.cids import is_cid
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.sync import MalformedFrame

TAG_BYTES: Final = 32
CID_BYTES: Final = 36
INVITATION_ID_BYTES: Final = 16
OFFERS_MAX: Final = 10_000
"""Parties that two devices may share."""
WANTS_MAX: Final = 1_024
"""CIDs in one frame."""
TEXT_CHARACTERS_MAX: Final = 400

_TAG: Final = b"echostore/party-tag/1"

Channel = int
"""A party on one connection: the first 8 bytes of its tag."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tags of the parties that the sender would replicate."""

    tags: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Sync:
    channel: Channel
    frame: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    channel: Channel
    reason: str


@dataclass(frozen=True, slots=True)
class Want:
    channel: Channel
    cids: tuple[Cid, ...]
    only_ask: bool = False


@dataclass(frozen=True, slots=True)
class Have:
    channel: Channel
    cids: tuple[Cid, ...]
    missing: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Blob:
    channel: Channel
    cid: Cid
    data: bytes


@dataclass(frozen=True, slots=True)
class Invitation:
    """One step of an invitation; `step` is a message of the schema, read by `echostore.mesh.invitation`."""

    invitation: bytes
    step: pb.MeshInvitation


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    number: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    reason: str
    detail: str


MeshFrame = Offer | Sync | Leave | Want | Have | Blob | Invitation | Ping | Pong | Goodbye


def party_tag(handshake_hash: bytes, party: PartyKey) -> bytes:
    """What stands for a party on one connection: of use only to those who know the party's key."""
    return hmac.new(handshake_hash, _TAG + party, hashlib.sha256).digest()


def channel_of(tag: bytes) -> Channel:
    return int.from_bytes(tag[:8], "big")


def encode_mesh_frame(frame: MeshFrame) -> bytes:
    match frame:
        case Sync(channel, data):
            message = pb.MeshFrame(sync=pb.MeshSync(channel=channel, frame=data))
        case Offer(tags):
            message = pb.MeshFrame(offer=pb.MeshOffer(tags=b"".join(tags)))
        case Leave(channel, reason):
            message = pb.MeshFrame(leave=pb.MeshLeave(channel=channel, reason=reason[:TEXT_CHARACTERS_MAX]))
        case Want(channel, cids, only_ask):
            message = pb.MeshFrame(want=pb.MeshWant(channel=channel, cids=b"".join(cids), only_ask=only_ask))
        case Have(channel, cids, missing):
            message = pb.MeshFrame(have=pb.MeshHave(channel=channel, cids=b"".join(cids), missing=b"".join(missing)))
        case Blob(channel, cid, data):
            message = pb.MeshFrame(blob=pb.MeshBlob(channel=channel, cid=cid, data=data))
        case Invitation(invitation, step):
            wrapped = pb.MeshInvitation()
            wrapped.CopyFrom(step)
            wrapped.invitation = invitation
            message = pb.MeshFrame(invitation=wrapped)
        case Ping(number):
            message = pb.MeshFrame(ping=number)
        case Pong(number):
            message = pb.MeshFrame(pong=number)
        case Goodbye(reason, detail):
            message = pb.MeshFrame(
                goodbye=pb.MeshGoodbye(reason=reason[:TEXT_CHARACTERS_MAX], detail=detail[:TEXT_CHARACTERS_MAX])
            )
        case _:
            assert_never(frame)
    return message.SerializeToString()


def decode_mesh_frame(data: bytes) -> MeshFrame:
    """The frame in these bytes; MalformedFrame says what is wrong with them."""
    try:
        message = pb.MeshFrame.FromString(data)
    except (DecodeError, EncodeError) as error:
        raise MalformedFrame("undecodable") from error
    kind = message.WhichOneof("kind")
    if kind == "sync":
        return Sync(message.sync.channel, message.sync.frame)
    if kind == "blob":
        return _blob(message.blob)
    if kind == "want":
        want = message.want
        return Want(want.channel, _cids(want.cids), want.only_ask)
    if kind == "have":
        have = message.have
        return Have(have.channel, _cids(have.cids), _cids(have.missing))
    if kind == "offer":
        return Offer(tuple(_split(message.offer.tags, TAG_BYTES, OFFERS_MAX)))
    if kind == "leave":
        return Leave(message.leave.channel, message.leave.reason[:TEXT_CHARACTERS_MAX])
    if kind == "invitation":
        if len(message.invitation.invitation) != INVITATION_ID_BYTES or not message.invitation.WhichOneof("step"):
            raise MalformedFrame("an invitation without its id or without a step")
        return Invitation(message.invitation.invitation, message.invitation)
    if kind == "ping":
        return Ping(message.ping)
    if kind == "pong":
        return Pong(message.pong)
    if kind == "goodbye":
        goodbye = message.goodbye
        return Goodbye(goodbye.reason[:TEXT_CHARACTERS_MAX], goodbye.detail[:TEXT_CHARACTERS_MAX])
    raise MalformedFrame("a frame without a kind")


def _blob(message: pb.MeshBlob) -> Blob:
    if len(message.data) > BLOB_BYTES_MAX:
        raise MalformedFrame(f"a blob of {len(message.data)} bytes, at most {BLOB_BYTES_MAX}")
    if not is_cid(message.cid):
        raise MalformedFrame("a blob without a CID")
    return Blob(message.channel, Cid(message.cid), message.data)


def _cids(data: bytes) -> tuple[Cid, ...]:
    found = _split(data, CID_BYTES, WANTS_MAX)
    if not all(is_cid(cid) for cid in found):
        raise MalformedFrame("a CID of a kind that is not used here")
    return tuple(Cid(cid) for cid in found)


def _split(data: bytes, size: int, count_max: int) -> list[bytes]:
    if len(data) % size or len(data) > size * count_max:
        raise MalformedFrame(f"a column of {len(data)} bytes, of {size} each and at most {count_max}")
    return [data[at : at + size] for at in range(0, len(data), size)]
