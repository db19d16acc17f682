"""Mesh frames <-> protobuf: what travels on an authenticated channel between two devices.

Like `echostore.wire.sync`, decoding is where the other side's bytes come in: whatever is wrong raises `MalformedFrame`.
A replication frame inside is handed on as bytes, for `wire.sync.decode_frame`.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, assert_never

from google.protobuf.message import DecodeError, EncodeError

from echostore.kernel.ids import KEY_BYTES, Cid, DeviceKey, FeedKey, IdentityKey, PartyKey
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.wire.cids import is_cid
from echostore.wire.credentials import CHAIN_LINKS_MAX
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.sync import MalformedFrame

TAG_BYTES: Final = 32
CID_BYTES: Final = 36
INVITATION_ID_BYTES: Final = 16
OFFERS_MAX: Final = 10_000
"""Parties that two devices may share."""
WANTS_MAX: Final = 1_024
"""CIDs in one frame."""
PACK_BLOBS_MAX: Final = 4_096
"""Blobs in one frame: pages of snapshots have a few hundred bytes each."""
TEXT_CHARACTERS_MAX: Final = 400
REACH_DEVICES_MAX: Final = 256
"""Devices in one frame: those of one identity, and of the members that it is likely to meet."""
ADDRESSES_CHARACTERS_MAX: Final = 1_024
ROOT_BYTES: Final = 16
_SIGNATURE_BYTES: Final = 64
_CHAIN_BYTES_MAX: Final = 64 * 1024
"""A link is two keys, a name and a signature."""

_TAG: Final = b"echostore/party-tag/1"
_INTRODUCTION: Final = b"echostore/introduction/1"
_SEEK: Final = b"echostore/seek/1"
_FOUND: Final = b"echostore/found/1"

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
    packed: bool = False
    """Small blobs may come together, as `Blobs`."""


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
class Blobs:
    """Several small blobs, each with its CID."""

    channel: Channel
    cids: tuple[Cid, ...]
    data: tuple[bytes, ...]


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


@dataclass(frozen=True, slots=True)
class Introduction:
    """The sender acts for an identity: by a chain of credentials, and perhaps the identity key's own signature."""

    identity: IdentityKey
    chain: tuple[bytes, ...]
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Seek:
    """With a proof: whether the other side knows an identity, which a tag stands for. Without: the answer."""

    tag: bytes
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Roots:
    """Between roots of a party's thin clients: who answers here, and perhaps a frame of the coherence protocol."""

    channel: Channel
    root: bytes
    frame: bytes = b""


@dataclass(frozen=True, slots=True)
class PartyEntry:
    party: PartyKey
    genesis_feed: FeedKey
    title: str


@dataclass(frozen=True, slots=True)
class Parties:
    """Answers an introduction: the parties that the identity and the sender are in, and the identity's name there."""

    entries: tuple[PartyEntry, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where devices take connections. What it says is a hint: who answers there has to show the device's key."""

    addresses: dict[DeviceKey, tuple[str, ...]]


MeshFrame = (
    Offer
    | Sync
    | Leave
    | Want
    | Have
    | Blob
    | Blobs
    | Invitation
    | Ping
    | Pong
    | Goodbye
    | Introduction
    | Parties
    | Reach
    | Seek
    | Roots
)


def party_tag(handshake_hash: bytes, party: PartyKey) -> bytes:
    """What stands for a party on one connection: of use only to those who know the party's key."""
    return hmac.new(handshake_hash, _TAG + party, hashlib.sha256).digest()


def introduction_bytes(handshake_hash: bytes, identity: IdentityKey, device: DeviceKey) -> bytes:
    """What an identity key signs to show, on one connection, that a device may act for it."""
    return _INTRODUCTION + handshake_hash + identity + device


def seek_tag(handshake_hash: bytes, identity: IdentityKey) -> bytes:
    """What stands for an identity that is looked for on one connection: of use only to those who know its key."""
    return hmac.new(handshake_hash, _SEEK + identity, hashlib.sha256).digest()


def found_tag(handshake_hash: bytes, identity: IdentityKey) -> bytes:
    """What says on one connection that the identity is known."""
    return hmac.new(handshake_hash, _FOUND + identity, hashlib.sha256).digest()


def seek_bytes(handshake_hash: bytes, identity: IdentityKey, device: DeviceKey) -> bytes:
    """What an identity key signs to be looked for on one connection, by a device."""
    return _SEEK + handshake_hash + identity + device


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
        case Want(channel, cids, only_ask, packed):
            message = pb.MeshFrame(
                want=pb.MeshWant(channel=channel, cids=b"".join(cids), only_ask=only_ask, packed=packed)
            )
        case Have(channel, cids, missing):
            message = pb.MeshFrame(have=pb.MeshHave(channel=channel, cids=b"".join(cids), missing=b"".join(missing)))
        case Blob(channel, cid, data):
            message = pb.MeshFrame(blob=pb.MeshBlob(channel=channel, cid=cid, data=data))
        case Blobs(channel, cids, several):
            message = pb.MeshFrame(blobs=pb.MeshBlobs(channel=channel, cids=b"".join(cids), data=several))
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
        case Introduction(identity, chain, proof):
            message = pb.MeshFrame(introduction=pb.MeshIntroduction(identity=identity, chain=chain, proof=proof))
        case Parties(entries, name):
            message = pb.MeshFrame(
                parties=pb.MeshParties(
                    parties=b"".join(entry.party for entry in entries),
                    genesis_feeds=b"".join(entry.genesis_feed for entry in entries),
                    titles=[entry.title[:TEXT_CHARACTERS_MAX] for entry in entries],
                    name=name[:TEXT_CHARACTERS_MAX],
                )
            )
        case Reach(known):
            message = pb.MeshFrame(reach=pb.MeshReach(devices=b"".join(known), addresses=map(" ".join, known.values())))
        case Seek(tag, proof):
            message = pb.MeshFrame(seek=pb.MeshSeek(tag=tag, proof=proof))
        case Roots(channel, root, data):
            message = pb.MeshFrame(roots=pb.MeshRoots(channel=channel, root=root, frame=data))
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
    if kind == "blobs":
        return _blobs(message.blobs)
    if kind == "want":
        want = message.want
        return Want(want.channel, _cids(want.cids), want.only_ask, want.packed)
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
    if kind == "introduction":
        return _introduction(message.introduction)
    if kind == "parties":
        return _parties(message.parties)
    if kind == "reach":
        return _reach(message.reach)
    if kind == "seek":
        seek = message.seek
        if len(seek.tag) != TAG_BYTES or len(seek.proof) not in (0, _SIGNATURE_BYTES):
            raise MalformedFrame("looking for an identity without its tag, or with a proof that is none")
        return Seek(seek.tag, seek.proof)
    if kind == "roots":
        if len(message.roots.root) != ROOT_BYTES:
            raise MalformedFrame("a root without its name")
        return Roots(message.roots.channel, message.roots.root, message.roots.frame)
    raise MalformedFrame("a frame without a kind")


def _introduction(message: pb.MeshIntroduction) -> Introduction:
    chain = tuple(message.chain)
    if len(message.identity) != KEY_BYTES or len(message.proof) > _SIGNATURE_BYTES:
        raise MalformedFrame("an introduction without an identity, or with a proof that is none")
    if not 1 <= len(chain) <= CHAIN_LINKS_MAX or sum(len(link) for link in chain) > _CHAIN_BYTES_MAX:
        raise MalformedFrame(f"a device chain of {len(chain)} links")
    return Introduction(IdentityKey(message.identity), chain, message.proof)


def _parties(message: pb.MeshParties) -> Parties:
    keys = _split(message.parties, KEY_BYTES, OFFERS_MAX)
    feeds = _split(message.genesis_feeds, KEY_BYTES, OFFERS_MAX)
    titles = list(message.titles)
    if not len(keys) == len(feeds) == len(titles):
        raise MalformedFrame("parties without genesis or title")
    rows = zip(keys, feeds, titles, strict=True)
    entries = (PartyEntry(PartyKey(key), FeedKey(feed), title[:TEXT_CHARACTERS_MAX]) for key, feed, title in rows)
    return Parties(tuple(entries), message.name[:TEXT_CHARACTERS_MAX])


def _reach(message: pb.MeshReach) -> Reach:
    devices, told = _split(message.devices, KEY_BYTES, REACH_DEVICES_MAX), list(message.addresses)
    if len(devices) != len(told) or any(len(each) > ADDRESSES_CHARACTERS_MAX for each in told):
        raise MalformedFrame("devices without their addresses, or with too many")
    return Reach({DeviceKey(device): tuple(each.split()) for device, each in zip(devices, told, strict=True)})


def _blob(message: pb.MeshBlob) -> Blob:
    if len(message.data) > BLOB_BYTES_MAX:
        raise MalformedFrame(f"a blob of {len(message.data)} bytes, at most {BLOB_BYTES_MAX}")
    if not is_cid(message.cid):
        raise MalformedFrame("a blob without a CID")
    return Blob(message.channel, Cid(message.cid), message.data)


def _blobs(message: pb.MeshBlobs) -> Blobs:
    cids, data = _cids(message.cids, PACK_BLOBS_MAX), tuple(message.data)
    if len(cids) != len(data):
        raise MalformedFrame(f"{len(data)} blobs with {len(cids)} CIDs")
    if any(len(blob) > BLOB_BYTES_MAX for blob in data):
        raise MalformedFrame(f"a blob of more than {BLOB_BYTES_MAX} bytes")
    return Blobs(message.channel, cids, data)


def _cids(data: bytes, count_max: int = WANTS_MAX) -> tuple[Cid, ...]:
    found = _split(data, CID_BYTES, count_max)
    if not all(is_cid(cid) for cid in found):
        raise MalformedFrame("a CID of a kind that is not used here")
    return tuple(Cid(cid) for cid in found)


def _split(data: bytes, size: int, count_max: int) -> list[bytes]:
    if len(data) % size or len(data) > size * count_max:
        raise MalformedFrame(f"a column of {len(data)} bytes, of {size} each and at most {count_max}")
    return [data[at : at + size] for at in range(0, len(data), size)]
