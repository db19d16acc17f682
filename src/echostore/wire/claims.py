"""Claims <-> bytes. What is decoded here has well-formed fields; who signed it is `echostore.wire.credentials`' affair.

Received claim bytes are what was signed and are never written again; `encode_claim` is for new claims only. Lists that
have an order on the wire (bounds, members, policy keys) are checked for it, so that one claim has one meaning.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, assert_never

from google.protobuf.message import DecodeError

from echostore.kernel.feed import ChainStep, ForkProof, Head
from echostore.kernel.ids import (
    CAPABILITY_ID_BYTES,
    FEED_ID_BYTES,
    KEY_BYTES,
    LINK_BYTES,
    Cid,
    DeviceKey,
    FeedId,
    FeedKey,
    IdentityKey,
    Link,
    PartyKey,
)
from echostore.kernel.limits import SEQ_MAX
from echostore.kernel.party.credentials import (
    AdoptLocal,
    Assertion,
    CapabilityRevoke,
    ChildParty,
    Claim,
    DeviceAdmit,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedBound,
    FeedKind,
    FeedRetire,
    ForkEvidence,
    GroupAdmit,
    Invitation,
    InvitationCancel,
    MemberAdmit,
    MemberRemove,
    ModelPublish,
    PartyGenesis,
    PartyKind,
    Policy,
    Profile,
    Role,
    RoleChange,
    TimeframeEntry,
)
from echostore.kernel.reasons import Reason
from echostore.wire.generated import credential_pb2 as pb
from echostore.wire.generated import snapshot_pb2

NAME_CHARACTERS_MAX: Final = 1024
"""Names, titles, details: what a person reads in one line."""

ENTRIES_MAX: Final = 65_536
"""Bounds, timeframe entries, group members: as many as a message may have dependencies."""

BYTES_MAX: Final = 1024 * 1024
"""Descriptors, policy values: as much as a property value."""

HASH_BYTES: Final = 32
CID_BYTES_MAX: Final = 64

FEED_KINDS: Final = {FeedKind.CONTROL: pb.FEED_CONTROL, FeedKind.DATA: pb.FEED_DATA}
PARTY_KINDS: Final = {PartyKind.ORDINARY: pb.PARTY_ORDINARY, PartyKind.LOCAL: pb.PARTY_LOCAL}
_FEED_KIND_OF: Final = {number: kind for kind, number in FEED_KINDS.items()}
_PARTY_KIND_OF: Final = {number: kind for kind, number in PARTY_KINDS.items()}


class ClaimRefused(Exception):
    """Bytes that are no well-formed claim; becomes the credential's fault and goes no further."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def encode_claim(claim: Claim) -> bytes:
    """The bytes to be signed, of a claim that is made here and now."""
    field, body = _encode_assertion(claim.assertion)
    message = pb.Claim(
        party=claim.party,
        issuer=claim.issuer,
        device=claim.device,
        parents=claim.parents,
        issued_ms=claim.issued_ms,
    )
    getattr(message, field).CopyFrom(body)
    return message.SerializeToString(deterministic=True)


def decode_claim(raw: bytes) -> Claim:
    """The claim in received bytes, or ClaimRefused. The party may be absent (an identity's own device chain)."""
    try:
        message = pb.Claim.FromString(raw)
    except (DecodeError, ValueError) as broken:
        raise ClaimRefused(Reason.UNDECODABLE, str(broken)) from broken
    field = message.WhichOneof("assertion")
    if field is None:
        raise ClaimRefused(Reason.MALFORMED, "a claim without an assertion that is known here")
    party = PartyKey(message.party)
    if party:
        _exactly(party, KEY_BYTES, "party")
    assertion = _DECODERS[field](getattr(message, field), party)
    return Claim(
        party=party,
        issuer=_identity(message.issuer),
        device=_device(message.device),
        assertion=assertion,
        parents=tuple(_exactly(parent, HASH_BYTES, "parent") for parent in message.parents),
        issued_ms=message.issued_ms,
    )


# --- to the wire ------------------------------------------------------------------------------------------------------


def _encode_assertion(said: Assertion) -> tuple[str, Any]:
    """The field of the oneof and its message."""
    match said:
        case PartyGenesis():
            return "party_genesis", pb.PartyGenesis(
                party=said.party,
                identity=said.identity,
                device=said.device,
                control_feed=said.control_feed,
                data_feed=said.data_feed,
                title=said.title,
                kind=PARTY_KINDS[said.kind],
                created_ms=said.created_ms,
            )
        case MemberAdmit():
            return "member_admit", pb.MemberAdmit(member=said.member, role=encode_role(said.role), name=said.name)
        case DeviceAdmit():
            return "device_admit", pb.DeviceAdmit(identity=said.identity, device=said.device, name=said.name)
        case FeedAdmit():
            return "feed_admit", pb.FeedAdmit(
                feed=said.feed,
                kind=FEED_KINDS[said.kind],
                identity=said.identity,
                device=said.device,
                child=said.child or b"",
                proof=said.proof,
            )
        case Profile():
            keys, values = [key for key, _ in said.entries], [value for _, value in said.entries]
            return "profile", pb.Profile(display_name=said.display_name, avatar=said.avatar, keys=keys, values=values)
        case RoleChange():
            body = pb.RoleChange(member=said.member, role=encode_role(said.role), bounds=_encode_bounds(said.bounds))
            return "role_change", body
        case MemberRemove():
            return "member_remove", pb.MemberRemove(member=said.member, cut=_encode_bounds(said.cut))
        case DeviceRevoke():
            return "device_revoke", pb.DeviceRevoke(
                identity=said.identity, device=said.device, cut=_encode_bounds(said.cut)
            )
        case FeedRetire():
            return "feed_retire", pb.FeedRetire(feed=said.feed, length_end=said.length_end)
        case Invitation():
            return "invitation", pb.Invitation(
                key=said.key, role=encode_role(said.role), expires_ms=said.expires_ms, uses=said.uses
            )
        case InvitationCancel():
            return "invitation_cancel", pb.InvitationCancel(key=said.key)
        case GroupAdmit():
            return "group_admit", pb.GroupAdmit(
                group=said.group, name=said.name, role=encode_role(said.role), members=sorted(said.members)
            )
        case ChildParty():
            return "child_party", pb.ChildParty(child=said.child, title=said.title)
        case AdoptLocal():
            return "adopt_local", pb.AdoptLocal(
                identity=said.identity, device=said.device, name=said.name, proof=said.proof
            )
        case ForkEvidence():
            return "fork_proof", _encode_fork(said.proof)
        case EpochGenesis():
            return "epoch_genesis", _encode_epoch(said)
        case EpochAttest():
            return "epoch_attest", pb.EpochAttest(number=said.number, genesis=said.genesis, snapshot=said.snapshot)
        case EpochDispute():
            return "epoch_dispute", pb.EpochDispute(
                number=said.number, genesis=said.genesis, snapshot=said.snapshot, detail=said.detail
            )
        case ModelPublish():
            return "model_publish", pb.ModelPublish(
                name=said.name, version=said.version, descriptor_bytes=said.descriptor, hash=said.hash
            )
        case Policy():
            entries = sorted(said.entries)
            return "policy", pb.Policy(keys=[key for key, _ in entries], values=[value for _, value in entries])
        case CapabilityRevoke():
            return "capability_revoke", pb.CapabilityRevoke(
                id=said.id, issuer=said.issuer or b"", expires_ms=said.expires_ms
            )
        case _:
            assert_never(said)


def encode_role(role: Role | None) -> pb.MemberRole.ValueType:
    """The roles' numbers are those of the schema; 0 is nobody's."""
    return pb.MemberRole.ValueType(role or 0)


def _encode_bounds(bounds: Iterable[FeedBound]) -> list[pb.FeedBound]:
    ordered = sorted(bounds, key=lambda entry: entry.feed)
    return [pb.FeedBound(feed=entry.feed, length_end=entry.length_end, link=entry.link) for entry in ordered]


def _encode_fork(proof: ForkProof) -> pb.ForkEvidence:
    return pb.ForkEvidence(
        feed=proof.feed,
        seq=proof.seq,
        link_before=proof.link_before,
        left_hashes=b"".join(step.payload_hash for step in proof.left),
        left_length=proof.left_head.length,
        left_link=proof.left_head.link,
        left_signature=proof.left_head.signature,
        right_hashes=b"".join(step.payload_hash for step in proof.right),
        right_length=proof.right_head.length,
        right_link=proof.right_head.link,
        right_signature=proof.right_head.signature,
    )


def _encode_epoch(said: EpochGenesis) -> pb.EpochGenesis:
    return pb.EpochGenesis(
        number=said.number,
        previous=said.previous,
        snapshot=said.snapshot,
        record=said.record,
        cut=said.cut,
        timeframe=_encode_timeframe(said.timeframe),
        control_timeframe=_encode_timeframe(said.control_timeframe),
        admission_digest=said.admission_digest,
        encoding_version=said.encoding_version,
        models=[snapshot_pb2.ModelVersion(model=model, version=version) for model, version in sorted(said.models)],
        discard_before_ms=said.discard_before_ms,
        created_ms=said.created_ms,
        child=said.child or b"",
        control=said.control,
    )


def _encode_timeframe(entries: Iterable[TimeframeEntry]) -> list[snapshot_pb2.TimeframeEntry]:
    ordered = sorted(entries, key=lambda entry: entry.feed)
    return [snapshot_pb2.TimeframeEntry(feed_key=entry.feed, seq=entry.seq, link=entry.link) for entry in ordered]


# --- from the wire ----------------------------------------------------------------------------------------------------


def _decode_genesis(body: pb.PartyGenesis, _: PartyKey) -> PartyGenesis:
    if body.kind not in _PARTY_KIND_OF:
        raise ClaimRefused(Reason.MALFORMED, "an unknown kind of party")
    return PartyGenesis(
        party=PartyKey(_exactly(body.party, KEY_BYTES, "party")),
        identity=_identity(body.identity),
        device=_device(body.device),
        control_feed=_feed(body.control_feed),
        data_feed=_feed(body.data_feed),
        title=_text(body.title),
        kind=_PARTY_KIND_OF[body.kind],
        created_ms=body.created_ms,
    )


def _decode_feed_admit(body: pb.FeedAdmit, _: PartyKey) -> FeedAdmit:
    if body.kind not in _FEED_KIND_OF:
        raise ClaimRefused(Reason.MALFORMED, "an unknown kind of feed")
    return FeedAdmit(
        feed=_feed(body.feed),
        kind=_FEED_KIND_OF[body.kind],
        identity=_identity(body.identity),
        device=_device(body.device),
        child=_child(body.child),
        proof=body.proof,
    )


def _decode_fork(body: pb.ForkEvidence, party: PartyKey) -> ForkEvidence:
    def side(hashes: bytes, length: int, link: bytes, signature: bytes) -> tuple[tuple[ChainStep, ...], Head]:
        if len(hashes) % HASH_BYTES:
            raise ClaimRefused(Reason.MALFORMED, "payload hashes of wrong length")
        starts = range(0, len(hashes), HASH_BYTES)
        steps = tuple(ChainStep(hashes[start : start + HASH_BYTES]) for start in starts)
        return steps, Head(length, Link(_exactly(link, LINK_BYTES, "link")), signature)

    left, left_head = side(body.left_hashes, body.left_length, body.left_link, body.left_signature)
    right, right_head = side(body.right_hashes, body.right_length, body.right_link, body.right_signature)
    before = Link(_exactly(body.link_before, LINK_BYTES, "link"))
    seq = _length(body.seq)
    return ForkEvidence(ForkProof(party, _feed(body.feed), seq, before, left, left_head, right, right_head))


def _decode_epoch(body: pb.EpochGenesis, _: PartyKey) -> EpochGenesis:
    return EpochGenesis(
        number=body.number,
        previous=_exactly(body.previous, HASH_BYTES, "genesis hash") if body.previous else b"",
        snapshot=_cid(body.snapshot),
        record=_short(body.record),
        cut=_short(body.cut),
        timeframe=_timeframe(body.timeframe),
        control_timeframe=_timeframe(body.control_timeframe),
        admission_digest=_exactly(body.admission_digest, HASH_BYTES, "digest") if body.admission_digest else b"",
        encoding_version=body.encoding_version,
        models=tuple((_text(entry.model), entry.version) for entry in _bounded(body.models)),
        discard_before_ms=body.discard_before_ms,
        created_ms=body.created_ms,
        child=_child(body.child),
        control=_cid(body.control) if body.control else b"",
    )


def _decode_group(body: pb.GroupAdmit, _: PartyKey) -> GroupAdmit:
    members = tuple(_identity(member) for member in _bounded(body.members))
    _ascending(members)
    return GroupAdmit(_identity(body.group), _text(body.name), _role(body.role), members)


_DECODERS: Final[dict[str, Callable[[Any, PartyKey], Assertion]]] = {
    "party_genesis": _decode_genesis,
    "member_admit": lambda body, _: MemberAdmit(_identity(body.member), _role(body.role), _text(body.name)),
    "device_admit": lambda body, _: DeviceAdmit(_identity(body.identity), _device(body.device), _text(body.name)),
    "feed_admit": _decode_feed_admit,
    "profile": lambda body, _: Profile(_text(body.display_name), _short(body.avatar), _entries(body)),
    "role_change": lambda body, _: RoleChange(_identity(body.member), _role(body.role), _bounds(body.bounds)),
    "member_remove": lambda body, _: MemberRemove(_identity(body.member), _bounds(body.cut)),
    "device_revoke": lambda body, _: DeviceRevoke(_identity(body.identity), _device(body.device), _bounds(body.cut)),
    "feed_retire": lambda body, _: FeedRetire(_feed(body.feed), _length(body.length_end)),
    "invitation": lambda body, _: Invitation(
        _exactly(body.key, KEY_BYTES, "invitation key"), _role(body.role), body.expires_ms, body.uses
    ),
    "invitation_cancel": lambda body, _: InvitationCancel(_exactly(body.key, KEY_BYTES, "invitation key")),
    "group_admit": _decode_group,
    "child_party": lambda body, _: ChildParty(PartyKey(_exactly(body.child, KEY_BYTES, "child")), _text(body.title)),
    "adopt_local": lambda body, _: AdoptLocal(
        _identity(body.identity), _device(body.device), _text(body.name), body.proof
    ),
    "fork_proof": _decode_fork,
    "epoch_genesis": _decode_epoch,
    "epoch_attest": lambda body, _: EpochAttest(
        body.number, _exactly(body.genesis, HASH_BYTES, "genesis hash"), _cid(body.snapshot)
    ),
    "epoch_dispute": lambda body, _: EpochDispute(
        body.number, _exactly(body.genesis, HASH_BYTES, "genesis hash"), _short(body.snapshot), _text(body.detail)
    ),
    "model_publish": lambda body, _: ModelPublish(
        _text(body.name), body.version, _large(body.descriptor_bytes), _exactly(body.hash, HASH_BYTES, "hash")
    ),
    "policy": lambda body, _: Policy(_entries(body)),
    "capability_revoke": lambda body, _: CapabilityRevoke(
        _exactly(body.id, CAPABILITY_ID_BYTES, "capability id"),
        _device(body.issuer) if body.issuer else None,
        body.expires_ms,
    ),
}


def _exactly(data: bytes, size: int, what: str) -> bytes:
    if len(data) != size:
        raise ClaimRefused(Reason.MALFORMED, f"a {what} of {len(data)} bytes")
    return data


def _identity(data: bytes) -> IdentityKey:
    return IdentityKey(_exactly(data, KEY_BYTES, "identity key"))


def _device(data: bytes) -> DeviceKey:
    return DeviceKey(_exactly(data, KEY_BYTES, "device key"))


def _feed(data: bytes) -> FeedKey:
    return FeedKey(_exactly(data, KEY_BYTES, "feed key"))


def _child(data: bytes) -> PartyKey | None:
    return PartyKey(_exactly(data, KEY_BYTES, "child")) if data else None


def _cid(data: bytes) -> Cid:
    if not data:
        raise ClaimRefused(Reason.MALFORMED, "no CID")
    return Cid(_short(data))


def _short(data: bytes) -> bytes:
    if len(data) > CID_BYTES_MAX:
        raise ClaimRefused(Reason.MALFORMED, "a CID that is too long")
    return data


def _large(data: bytes) -> bytes:
    if len(data) > BYTES_MAX:
        raise ClaimRefused(Reason.OVERSIZE, "a value that is too large")
    return data


def _text(text: str) -> str:
    if len(text) > NAME_CHARACTERS_MAX:
        raise ClaimRefused(Reason.OVERSIZE, "a text that is too long")
    return text


def _role(number: int) -> Role:
    try:
        return Role(number)
    except ValueError as unknown:
        raise ClaimRefused(Reason.MALFORMED, f"role {number}") from unknown


def _length(length: int) -> int:
    if length > SEQ_MAX + 1:
        raise ClaimRefused(Reason.MALFORMED, "a place beyond any feed")
    return length


def _bounded(entries: Sequence[Any]) -> Sequence[Any]:
    if len(entries) > ENTRIES_MAX:
        raise ClaimRefused(Reason.OVERSIZE, "too many entries")
    return entries


def _ascending(keys: Sequence[Any]) -> None:
    if any(keys[index] >= keys[index + 1] for index in range(len(keys) - 1)):
        raise ClaimRefused(Reason.MALFORMED, "entries that are not ascending")


def _bounds(entries: Sequence[pb.FeedBound]) -> tuple[FeedBound, ...]:
    found = tuple(
        FeedBound(
            FeedId(_exactly(entry.feed, FEED_ID_BYTES, "feed id")),
            _length(entry.length_end),
            _exactly(entry.link, LINK_BYTES, "link") if entry.link else b"",
        )
        for entry in _bounded(entries)
    )
    _ascending([entry.feed for entry in found])
    return found


def _timeframe(entries: Sequence[Any]) -> tuple[TimeframeEntry, ...]:
    found = tuple(
        TimeframeEntry(_feed(entry.feed_key), _length(entry.seq), Link(_exactly(entry.link, LINK_BYTES, "link")))
        for entry in _bounded(entries)
    )
    _ascending([entry.feed for entry in found])
    return found


def _entries(body: pb.Profile | pb.Policy) -> tuple[tuple[str, bytes], ...]:
    if len(body.keys) != len(body.values):
        raise ClaimRefused(Reason.MALFORMED, "keys without values")
    found = tuple((_text(key), _large(value)) for key, value in zip(body.keys, body.values, strict=True))
    _ascending([key for key, _ in _bounded(found)])
    return found
