"""Capabilities <-> bytes: what a thin client may read and write, signed by a device of a member.

    capability   {body, signature}; the body is signed as it is, under a tag

A capability is checked wherever a leaf connects: at the root and at every edge. Whether its issuer is a member, and
whether it was revoked, is for the caller to know; here is what the bytes say.
"""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from echostore.kernel.ids import CAPABILITY_ID_BYTES, KEY_BYTES, DeviceKey, PartyKey
from echostore.kernel.query.spec import QuerySpec
from echostore.wire.generated import index_pb2 as pb
from echostore.wire.index_spec import IndexQuery, MalformedIndex
from echostore.wire.messages import NAME_CHARACTERS_MAX
from echostore.wire.signing import SIGNATURE_BYTES, SigningKey, verify

CAPABILITY_TAG = b"echostore/capability/1"
PROOF_TAG = b"echostore:thin:1\0"
CAPABILITY_BYTES_MAX = 16 * 1024
NONCE_BYTES = 16
PATTERNS_MAX = 64
TYPES_MAX = 256
SEALERS_MAX = 16
SHOWN_MAX = 10_000
"""Credentials that are remembered as read."""

ANY_TYPE = "*"


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """Queries of one of these types (none named: of any one type); with `all_items` any query and any item."""

    types: tuple[str, ...] = ()
    all_items: bool = False

    def allows_type(self, type: str) -> bool:
        return self.all_items or not self.types or type in self.types

    def allows_query(self, query: QuerySpec) -> bool:
        """A query that walks may reach items of any type, so it needs `all_items`."""
        if self.all_items:
            return True
        type = query.hints().type
        return len(query.stages) == 1 and type is not None and self.allows_type(type)


@dataclass(frozen=True, slots=True)
class Grants:
    """What a capability says."""

    party: PartyKey
    issuer: DeviceKey
    id: bytes
    read: tuple[ReadPattern, ...] = ()
    write: tuple[str, ...] = ()
    messages: bool = False
    holder: bytes = b""
    expires_ms: int = 0
    issued_ms: int = 0
    sealers: tuple[DeviceKey, ...] = ()
    edge: bool = False
    """Whether it may speak for other systems, each of which shows its own credential. To read everything is no such right."""

    def may_read(self, asked: IndexQuery, item_type: str | None = None) -> bool:
        """Whether this index may be read; of one item, `item_type` is its type, None when there is none."""
        if asked.party != self.party:
            return False
        if asked.query is not None:
            query = asked.query
            return any(pattern.allows_query(query) for pattern in self.read)
        return any(
            pattern.all_items or (item_type is not None and pattern.allows_type(item_type)) for pattern in self.read
        )

    @property
    def name(self) -> bytes:
        """What a revocation calls it."""
        return self.id + self.issuer

    def may_write(self, item_type: str) -> bool:
        return ANY_TYPE in self.write or item_type in self.write


def sign_capability(grants: Grants, key: SigningKey) -> bytes:
    """The bytes of a capability, signed by its issuer's device."""
    body = _encode(grants)
    _decode(body)  # what no reader would take is never signed
    return pb.Capability(body=body, signature=key.sign(CAPABILITY_TAG + body)).SerializeToString(deterministic=True)


def read_capability(data: bytes) -> Grants:
    """What a capability grants, if its issuer signed it; MalformedIndex otherwise."""
    if len(data) > CAPABILITY_BYTES_MAX:
        raise MalformedIndex(f"a capability of {len(data)} bytes, at most {CAPABILITY_BYTES_MAX}")
    try:
        message = pb.Capability.FromString(data)
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    grants = _decode(message.body)
    if len(message.signature) != SIGNATURE_BYTES or not verify(
        grants.issuer, CAPABILITY_TAG + message.body, message.signature
    ):
        raise MalformedIndex("not signed by its issuer")
    return grants


def proof_statement(nonce: bytes, capability: bytes) -> bytes:
    """What a leaf signs to show that it has its key, for one connection and one capability."""
    return PROOF_TAG + nonce + hashlib.sha256(capability).digest()


class Credential(NamedTuple):
    """What a leaf showed where it connected. An edge passes it on, so that the root judges the leaf by its own rights."""

    capability: bytes
    key: bytes
    nonce: bytes
    proof: bytes


def encode_credential(credential: Credential) -> bytes:
    return pb.LeafCredential(**credential._asdict()).SerializeToString(deterministic=True)


def read_credential(data: bytes) -> tuple[Grants, Credential]:
    """What a leaf may do, as its issuer signed and its key proved; MalformedIndex when it did not."""
    try:
        message = pb.LeafCredential.FromString(data)
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    shown = Credential(message.capability, message.key, message.nonce, message.proof)
    grants = read_capability(shown.capability)
    proven = len(shown.nonce) == NONCE_BYTES and verify(
        shown.key, proof_statement(shown.nonce, shown.capability), shown.proof
    )
    if not proven:
        raise MalformedIndex("the proof is not of that key")
    if grants.holder and grants.holder != shown.key:
        raise MalformedIndex("the capability is for another key")
    return grants, shown


class ShownCredentials:
    """Credentials that were read before: the same one comes with every message of a system behind an edge."""

    def __init__(self) -> None:
        self._read: dict[bytes, tuple[Grants, bytes] | None] = {}

    def read(self, data: bytes) -> tuple[Grants, bytes] | None:
        """What a credential grants, and to which key; None when it proves nothing. Whether it still counts is not asked."""
        if data not in self._read:
            try:
                grants, shown = read_credential(data)
                self._read[data] = grants, shown.key
            except MalformedIndex:
                self._read[data] = None
            if len(self._read) > SHOWN_MAX:
                del self._read[next(iter(self._read))]
        return self._read[data]


def capability_text(data: bytes) -> str:
    """One line that a person can paste."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def capability_from_text(text: str) -> bytes:
    """The bytes of such a line; MalformedIndex when it is none."""
    try:
        raw = text.strip().encode("ascii")
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise MalformedIndex("not a capability in text form") from error


def _encode(grants: Grants) -> bytes:
    return pb.CapabilityBody(
        party=grants.party,
        issuer=grants.issuer,
        id=grants.id,
        holder=grants.holder,
        read=[pb.SpecPattern(types=sorted(set(each.types)), all_items=each.all_items) for each in grants.read],
        write=sorted(set(grants.write)),
        messages=grants.messages,
        expires_ms=grants.expires_ms,
        issued_ms=grants.issued_ms,
        sealers=grants.sealers,
        edge=grants.edge,
    ).SerializeToString(deterministic=True)


def _decode(body: bytes) -> Grants:
    try:
        message = pb.CapabilityBody.FromString(body)
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    types = [*message.write, *(each for pattern in message.read for each in pattern.types)]
    if (
        any(len(key) != KEY_BYTES for key in (message.party, message.issuer, *message.sealers))
        or len(message.id) != CAPABILITY_ID_BYTES
        or len(message.holder) not in (0, KEY_BYTES)
    ):
        raise MalformedIndex("a key or an id of wrong length in a capability")
    if len(message.read) > PATTERNS_MAX or len(types) > TYPES_MAX or len(message.sealers) > SEALERS_MAX:
        raise MalformedIndex("too many patterns, types or sealers in a capability")
    if any(not each or len(each) > NAME_CHARACTERS_MAX for each in types):
        raise MalformedIndex("a type name of wrong length in a capability")
    grants = Grants(
        party=PartyKey(message.party),
        issuer=DeviceKey(message.issuer),
        id=message.id,
        read=tuple(ReadPattern(tuple(each.types), each.all_items) for each in message.read),
        write=tuple(message.write),
        messages=message.messages,
        holder=message.holder,
        expires_ms=message.expires_ms,
        issued_ms=message.issued_ms,
        sealers=tuple(DeviceKey(each) for each in message.sealers),
        edge=message.edge,
    )
    if _encode(grants) != body:
        raise MalformedIndex("not in canonical form")
    return grants
