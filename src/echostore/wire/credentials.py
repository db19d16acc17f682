"""Credentials: signing and verifying claims. What the party machine is given has passed `verify_credential`.

    hash        SHA-256("echostore/credential/1" | claim bytes)
    signature   by the claim's device key over "echostore/claim/1" | claim bytes, as received
    feed proof  by the feed key over "echostore/feed/1" | party | kind u8 | identity | device | child or zeros
    adoption    by the identity key over "echostore/adopt/1" | party | device

A *device chain* shows that an identity itself vouches for the signing device: DeviceAdmits from the identity key down
to the device, each signed by the device that the one before it admits. It is optional, because a party admits devices
by its own credentials; where one is given, it must hold. Its links may be made for no party: they are the identity's.

    identity key ─signs─► DeviceAdmit(laptop) ; laptop ─signs─► DeviceAdmit(phone) ; phone signs the claim

Nothing raises on what another peer sent: a credential that fails has its reason as `fault`, and the machine lists it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

from echostore.kernel.ids import KEY_BYTES, DeviceKey, IdentityKey, PartyKey
from echostore.kernel.limits import BLOCK_BYTES_MAX
from echostore.kernel.party.credentials import (
    AdoptLocal,
    Claim,
    DeviceAdmit,
    FeedAdmit,
    FeedKind,
    ForkEvidence,
    Profile,
    VerifiedCredential,
)
from echostore.kernel.reasons import Reason
from echostore.wire.claims import ClaimRefused, decode_claim, encode_claim
from echostore.wire.generated import credential_pb2 as pb
from echostore.wire.links import fork_proven
from echostore.wire.signing import SigningKey, verify

CLAIM_TAG: Final = b"echostore/claim/1"
HASH_TAG: Final = b"echostore/credential/1"
FEED_TAG: Final = b"echostore/feed/1"
ADOPT_TAG: Final = b"echostore/adopt/1"

CHAIN_LINKS_MAX: Final = 16
"""Devices between an identity and a signature: nobody replaces devices that often, and each link costs a check."""


def credential_hash(claim: bytes) -> bytes:
    """The name of a credential: of what it claims, not of one of the signatures that could be made over it."""
    return hashlib.sha256(HASH_TAG + claim).digest()


def sign_credential(claim: Claim, key: SigningKey, chain: Iterable[pb.Credential] = ()) -> pb.Credential:
    """A new credential. `key` is the claim's device (the party key for a genesis, the identity key for its root)."""
    assert key.public == claim.device, f"{claim.device.hex()} is claimed as device, {key!r} signs"
    raw = encode_claim(claim)
    return pb.Credential(claim=raw, signature=key.sign(CLAIM_TAG + raw), chain=chain)


def verify_bytes(raw: bytes, party: PartyKey) -> VerifiedCredential:
    """The verified credential in received bytes (tickets, files); blocks carry them decoded already."""
    if len(raw) > BLOCK_BYTES_MAX:
        return VerifiedCredential(None, credential_hash(raw), Reason.OVERSIZE)
    try:
        return verify_credential(pb.Credential.FromString(raw), party)
    except (DecodeError, ValueError):
        return VerifiedCredential(None, credential_hash(raw), Reason.UNDECODABLE)


def verify_credentials(credentials: Iterable[pb.Credential], party: PartyKey) -> tuple[VerifiedCredential, ...]:
    """Those of one message, for `ControlMessage`."""
    return tuple(verify_credential(credential, party) for credential in credentials)


def verify_credential(credential: pb.Credential, party: PartyKey) -> VerifiedCredential:
    """Decodes and checks all that needs no other credential of the party."""
    digest = credential_hash(credential.claim)
    try:
        claim = decode_claim(credential.claim)
    except ClaimRefused as refused:
        return VerifiedCredential(None, digest, refused.reason)
    return VerifiedCredential(claim, digest, _fault(credential, claim, party))


def _fault(credential: pb.Credential, claim: Claim, party: PartyKey) -> Reason | None:
    if claim.party != party:
        return Reason.OTHER_PARTY
    if not verify(claim.device, CLAIM_TAG + credential.claim, credential.signature):
        return Reason.BAD_SIGNATURE
    if credential.chain and not _chain_holds(credential.chain, claim):
        return Reason.CHAIN_BROKEN
    said = claim.assertion
    if isinstance(said, FeedAdmit) and not verify(said.feed, feed_proof_bytes(party, said), said.proof):
        return Reason.BAD_PROOF
    if isinstance(said, AdoptLocal) and not verify(said.identity, adoption_bytes(party, said), said.proof):
        return Reason.BAD_PROOF
    if isinstance(said, ForkEvidence) and not fork_proven(said.proof, verify):
        return Reason.BAD_PROOF
    return None


def device_vouched(chain: Iterable[pb.Credential], identity: IdentityKey, device: DeviceKey) -> bool:
    """Whether a device chain shows that an identity vouches for a device, outside any party: before it is admitted."""
    return _chain_holds(chain, Claim(PartyKey(b""), identity, device, Profile("")))


def _chain_holds(chain: Iterable[pb.Credential], claim: Claim) -> bool:
    """Whether the chain leads from the issuer's identity key to the device that signed `claim`, without a circle."""
    links = list(chain)
    signer, passed = DeviceKey(claim.issuer), {bytes(claim.issuer)}
    if len(links) > CHAIN_LINKS_MAX:
        return False
    for link in links:
        try:
            admitting = decode_claim(link.claim)
        except ClaimRefused:
            return False
        said = admitting.assertion
        if not isinstance(said, DeviceAdmit) or link.chain or admitting.party not in (b"", claim.party):
            return False
        if admitting.device != signer or admitting.issuer != claim.issuer or said.identity != claim.issuer:
            return False
        if said.device in passed or not verify(signer, CLAIM_TAG + link.claim, link.signature):
            return False
        passed.add(bytes(said.device))
        signer = said.device
    return signer == claim.device


# --- proofs inside claims ---------------------------------------------------------------------------------------------


def feed_proof_bytes(party: PartyKey, admit: FeedAdmit) -> bytes:
    """What a feed's key signs to belong to a device in a party."""
    kind = b"\x01" if admit.kind is FeedKind.CONTROL else b"\x02"
    return FEED_TAG + party + kind + admit.identity + admit.device + (admit.child or bytes(KEY_BYTES))


def with_feed_proof(admit: FeedAdmit, party: PartyKey, feed_key: SigningKey) -> FeedAdmit:
    """The admission with its feed's consent; the feed's writer makes it, an admin may then put it in a claim."""
    assert feed_key.public == admit.feed, f"{feed_key!r} is not the key of {admit.feed.hex()}"
    return replace(admit, proof=feed_key.sign(feed_proof_bytes(party, admit)))


def adoption_bytes(party: PartyKey, adoption: AdoptLocal) -> bytes:
    """What an identity signs to adopt a local party."""
    return ADOPT_TAG + party + adoption.device


def with_adoption_proof(adoption: AdoptLocal, party: PartyKey, identity_key: SigningKey) -> AdoptLocal:
    assert identity_key.public == adoption.identity, f"{identity_key!r} is not {adoption.identity.hex()}"
    return replace(adoption, proof=identity_key.sign(adoption_bytes(party, adoption)))
