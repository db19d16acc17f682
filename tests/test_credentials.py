"""Credentials on the wire: round trips, signatures, device chains, proofs, and every way to send nonsense."""

import hashlib
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.feed import ChainStep, ForkProof, Head
from echostore.kernel.ids import (
    NO_LINK,
    Cid,
    DeviceKey,
    FeedId,
    FeedKey,
    IdentityKey,
    Link,
    PartyKey,
    feed_id,
)
from echostore.kernel.party.credentials import (
    AdoptLocal,
    Assertion,
    CapabilityRevoke,
    ChildParty,
    Claim,
    ControlMessage,
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
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.reasons import Reason
from echostore.wire.claims import decode_claim, encode_claim
from echostore.wire.credentials import (
    CLAIM_TAG,
    credential_hash,
    sign_credential,
    verify_bytes,
    verify_credential,
    verify_credentials,
    with_adoption_proof,
    with_feed_proof,
)
from echostore.wire.generated import credential_pb2 as pb
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.membership import membership_state
from echostore.wire.signing import SigningKey
from party_story import CHILD, Story, change, feed, person, remove


def signer(name: str) -> SigningKey:
    return SigningKey.from_seed(hashlib.sha256(name.encode()).digest())


PARTY_SIGNER, ANN, LAPTOP, PHONE, FEED = (signer(name) for name in ("party", "ann", "laptop", "phone", "feed"))
PARTY = PartyKey(PARTY_SIGNER.public)
IDENTITY = IdentityKey(ANN.public)
DEVICE = DeviceKey(LAPTOP.public)
LINK = Link(bytes(range(32)))


def claim(said: Assertion, *, device: SigningKey = LAPTOP, party: PartyKey = PARTY) -> Claim:
    return Claim(party, IDENTITY, DeviceKey(device.public), said, (LINK,), 1_700_000_000_000)


def fault(credential: pb.Credential) -> Reason | None:
    return verify_credential(credential, PARTY).fault


def feed_admit(**changes: object) -> FeedAdmit:
    admit = FeedAdmit(FeedKey(FEED.public), FeedKind.DATA, IDENTITY, DEVICE, CHILD)
    return with_feed_proof(replace(admit, **changes), PARTY, FEED)  # type: ignore[arg-type]  # named fields of the test


def fork_proof(*, same: bool = False, signed_by: SigningKey = FEED, tamper: bool = False) -> ForkProof:
    """Two branches of FEED at block 3, one and two blocks long."""
    key = FeedKey(FEED.public)

    def branch(*payloads: bytes) -> tuple[tuple[ChainStep, ...], Head]:
        link = LINK
        hashes = [payload_hash(payload) for payload in payloads]
        for seq, hashed in enumerate(hashes, 3):
            link = block_link(key, seq, link, hashed)
        length = 3 + len(payloads)
        head = Head(length, link, signed_by.sign(head_bytes(PARTY, key, length, link)))
        return tuple(ChainStep(hashed) for hashed in hashes), head

    left, left_head = branch(b"left")
    right, right_head = branch(b"left" if same else b"right", b"more")
    if tamper:
        right = (right[0], ChainStep(payload_hash(b"other")))
    return ForkProof(PARTY, key, 3, LINK, left, left_head, right, right_head)


ENTRY = TimeframeEntry(feed("a"), 7, LINK)
EVERY_ASSERTION: list[Assertion] = [
    PartyGenesis(PARTY, IDENTITY, DEVICE, feed("c"), feed("d"), "Road trip", PartyKind.LOCAL, 5),
    MemberAdmit(person("bob"), Role.EDITOR, "Bob"),
    DeviceAdmit(IDENTITY, DeviceKey(PHONE.public), "phone"),
    feed_admit(),
    feed_admit(kind=FeedKind.CONTROL, child=None),
    Profile("Ann", b"cid", (("a", b"1"), ("b", b""))),
    RoleChange(person("bob"), Role.READER, (FeedBound(FeedId(b"12345678"), 3, LINK),)),
    MemberRemove(person("bob"), (FeedBound(FeedId(b"12345678"), 0),)),
    DeviceRevoke(IDENTITY, DEVICE, (FeedBound(FeedId(b"12345678"), 9, LINK),)),
    FeedRetire(feed("a"), 4),
    Invitation(bytes(32), Role.ADMIN, 99, 3),
    InvitationCancel(bytes(32)),
    CapabilityRevoke(bytes(16), DEVICE, 99),
    CapabilityRevoke(bytes(16)),
    GroupAdmit(person("family"), "family", Role.EDITOR, tuple(sorted((person("bob"), person("cyd"))))),
    ChildParty(CHILD, "chess"),
    with_adoption_proof(AdoptLocal(IDENTITY, DEVICE, "Ann"), PARTY, ANN),
    ForkEvidence(fork_proof()),
    EpochGenesis(2, LINK, Cid(b"cid"), b"record", b"cut", (ENTRY,), (ENTRY,), LINK, 1, (("text", 1),), 8, 9, CHILD),
    EpochAttest(2, LINK, Cid(b"cid")),
    EpochDispute(2, LINK, b"", "differs"),
    ModelPublish("chess", 3, b"descriptor", LINK),
    Policy((("epoch.declarers", b"elect"), ("retention", b"\x01"))),
]


@pytest.mark.parametrize("said", EVERY_ASSERTION, ids=lambda said: type(said).__name__)
def test_every_assertion_survives_the_wire(said: Assertion) -> None:
    made = claim(said)
    verified = verify_credential(sign_credential(made, LAPTOP), PARTY)
    assert (verified.claim, verified.fault) == (made, None)
    assert verified.hash == credential_hash(encode_claim(made))


def test_the_bytes_of_a_claim_are_pinned() -> None:
    raw = encode_claim(claim(MemberAdmit(person("bob"), Role.EDITOR, "Bob")))
    assert credential_hash(raw).hex() == "79f42943fe3ea5a1251d497b230e188e7c992dff0cd40189777294ce1ef0e345"


def test_signed_bytes_are_the_received_bytes() -> None:
    """Unknown fields and odd field order are kept and covered; nothing is written again to be checked."""
    raw = encode_claim(claim(Profile("Ann")))
    odd = b"\xfa\x7f\x03abc" + raw  # an unknown field before the known ones
    credential = pb.Credential(claim=odd, signature=LAPTOP.sign(CLAIM_TAG + odd))
    assert verify_credential(credential, PARTY).fault is None
    assert fault(pb.Credential(claim=raw, signature=credential.signature)) is Reason.BAD_SIGNATURE


# --- what is refused --------------------------------------------------------------------------------------------------


def test_forged_signatures_are_refused() -> None:
    good = sign_credential(claim(Profile("Ann")), LAPTOP)
    assert fault(pb.Credential(claim=good.claim, signature=PHONE.sign(CLAIM_TAG + good.claim))) is Reason.BAD_SIGNATURE
    assert fault(pb.Credential(claim=good.claim, signature=LAPTOP.sign(good.claim))) is Reason.BAD_SIGNATURE
    assert fault(pb.Credential(claim=good.claim)) is Reason.BAD_SIGNATURE
    for index in range(0, len(good.signature), 7):
        flipped = bytearray(good.signature)
        flipped[index] ^= 1
        assert fault(pb.Credential(claim=good.claim, signature=bytes(flipped))) is Reason.BAD_SIGNATURE


def test_a_credential_of_another_party_is_refused() -> None:
    credential = sign_credential(claim(Profile("Ann"), party=CHILD), LAPTOP)
    assert fault(credential) is Reason.OTHER_PARTY
    assert fault(sign_credential(claim(Profile("Ann"), party=PartyKey(b"")), LAPTOP)) is Reason.OTHER_PARTY


def signed(message: pb.Claim) -> pb.Credential:
    message.party, message.issuer, message.device = PARTY, IDENTITY, DEVICE
    raw = message.SerializeToString()
    return pb.Credential(claim=raw, signature=LAPTOP.sign(CLAIM_TAG + raw))


@pytest.mark.parametrize(
    "message",
    [
        pb.Claim(),
        pb.Claim(member_admit=pb.MemberAdmit(member=b"short", role=pb.ROLE_EDITOR)),
        pb.Claim(member_admit=pb.MemberAdmit(member=bytes(32))),
        pb.Claim(feed_admit=pb.FeedAdmit(feed=bytes(32), identity=bytes(32), device=bytes(32))),
        pb.Claim(member_remove=pb.MemberRemove(member=bytes(32), cut=[pb.FeedBound(feed=b"x")])),
        pb.Claim(member_remove=pb.MemberRemove(member=bytes(32), cut=[pb.FeedBound(feed=bytes(8))] * 2)),
        pb.Claim(group_admit=pb.GroupAdmit(group=bytes(32), role=1, members=[b"\1" * 32, bytes(32)])),
        pb.Claim(policy=pb.Policy(keys=["a"])),
        pb.Claim(policy=pb.Policy(keys=["b", "a"], values=[b"", b""])),
        pb.Claim(epoch_attest=pb.EpochAttest(number=1, genesis=b"short", snapshot=b"cid")),
        pb.Claim(epoch_attest=pb.EpochAttest(number=1, genesis=bytes(32))),
        pb.Claim(fork_proof=pb.ForkEvidence(feed=bytes(32), link_before=bytes(32), left_hashes=b"odd")),
        pb.Claim(feed_retire=pb.FeedRetire(feed=bytes(32), length_end=1 << 60)),
        pb.Claim(invitation=pb.Invitation(key=bytes(31), role=1)),
        pb.Claim(parents=[b"short"], profile=pb.Profile()),
    ],
)
def test_malformed_claims_are_refused(message: pb.Claim) -> None:
    verified = verify_credential(signed(message), PARTY)
    assert (verified.claim, verified.fault) == (None, Reason.MALFORMED)


def test_oversize_texts_are_refused() -> None:
    assert fault(sign_credential(claim(Profile("x" * 2000)), LAPTOP)) is Reason.OVERSIZE


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise(raw: bytes) -> None:
    assert verify_bytes(raw, PARTY).fault is not None
    assert verify_credential(pb.Credential(claim=raw), PARTY).fault is not None


@given(st.sampled_from(EVERY_ASSERTION), st.data())
def test_a_changed_byte_never_passes(said: Assertion, data: st.DataObject) -> None:
    raw = bytearray(sign_credential(claim(said), LAPTOP).SerializeToString())
    index = data.draw(st.integers(0, len(raw) - 1))
    raw[index] ^= data.draw(st.integers(1, 255))
    verified = verify_bytes(bytes(raw), PARTY)
    assert verified.fault is not None or verified.claim == claim(said)  # the change may hit an unsigned tag byte


def test_deep_nesting_is_refused() -> None:
    raw = b""
    for _ in range(500):
        raw = b"\x1a" + len(raw).to_bytes(1, "little") + raw if len(raw) < 128 else b"\x1a" + _varint(len(raw)) + raw
    assert verify_bytes(raw, PARTY).fault is Reason.UNDECODABLE


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


# --- device chains ----------------------------------------------------------------------------------------------------


def link(by: SigningKey, admits: SigningKey, *, identity: IdentityKey = IDENTITY, party: bytes = b"") -> pb.Credential:
    said = DeviceAdmit(identity, DeviceKey(admits.public))
    return sign_credential(Claim(PartyKey(party), identity, DeviceKey(by.public), said), by)


def chained(*links: pb.Credential, device: SigningKey = PHONE) -> Reason | None:
    return fault(sign_credential(claim(Profile("Ann"), device=device), device, links))


def test_a_device_chain_leads_from_the_identity_to_the_device() -> None:
    assert chained(link(ANN, LAPTOP), link(LAPTOP, PHONE)) is None
    assert chained(link(ANN, PHONE, party=PARTY)) is None


def test_broken_device_chains_are_refused() -> None:
    other = IdentityKey(signer("eve").public)
    assert chained(link(LAPTOP, PHONE)) is Reason.CHAIN_BROKEN  # does not start at the identity
    assert chained(link(ANN, LAPTOP)) is Reason.CHAIN_BROKEN  # does not reach the device
    assert chained(link(LAPTOP, PHONE), link(ANN, LAPTOP)) is Reason.CHAIN_BROKEN  # upside down
    assert chained(link(ANN, PHONE, identity=other)) is Reason.CHAIN_BROKEN
    assert chained(link(ANN, PHONE, party=CHILD)) is Reason.CHAIN_BROKEN
    forged = link(ANN, PHONE)
    forged.signature = signer("eve").sign(CLAIM_TAG + forged.claim)
    assert chained(forged) is Reason.CHAIN_BROKEN
    assert chained(sign_credential(claim(Profile("x"), device=ANN), ANN)) is Reason.CHAIN_BROKEN
    assert chained(pb.Credential(claim=b"\xff")) is Reason.CHAIN_BROKEN


def test_cyclic_device_chains_are_refused() -> None:
    cycle = [link(ANN, LAPTOP), link(LAPTOP, PHONE), link(PHONE, LAPTOP), link(LAPTOP, PHONE)]
    assert chained(*cycle) is Reason.CHAIN_BROKEN
    assert chained(link(ANN, ANN), link(ANN, PHONE)) is Reason.CHAIN_BROKEN


def test_endless_device_chains_are_refused() -> None:
    keys = [ANN, *(signer(f"device {number}") for number in range(17))]
    links = [link(by, admits) for by, admits in pairwise(keys)]
    assert chained(*links[:16], device=keys[16]) is None
    assert chained(*links, device=keys[17]) is Reason.CHAIN_BROKEN


# --- proofs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": person("eve")},
        {"device": DeviceKey(PHONE.public)},
        {"kind": FeedKind.CONTROL},
        {"child": None},
        {"feed": FeedKey(PHONE.public)},
        {"proof": b""},
    ],
)
def test_nobody_claims_anothers_feed(changes: dict[str, object]) -> None:
    stolen = replace(feed_admit(), **changes)  # type: ignore[arg-type]  # named fields of the test
    assert fault(sign_credential(claim(stolen), LAPTOP)) is Reason.BAD_PROOF


def test_an_adoption_needs_the_identitys_consent() -> None:
    consent = with_adoption_proof(AdoptLocal(IDENTITY, DEVICE), PARTY, ANN)
    stolen = replace(consent, identity=IdentityKey(PHONE.public))
    assert fault(sign_credential(claim(stolen), LAPTOP)) is Reason.BAD_PROOF


@pytest.mark.parametrize(
    "proof",
    [
        fork_proof(same=True),
        fork_proof(signed_by=PHONE),
        fork_proof(tamper=True),
        replace(fork_proof(), seq=2),
        replace(fork_proof(), link_before=NO_LINK),
        replace(fork_proof(), left=()),
    ],
)
def test_fork_evidence_must_prove_a_fork(proof: ForkProof) -> None:
    assert fault(sign_credential(claim(ForkEvidence(proof)), LAPTOP)) is Reason.BAD_PROOF


# --- together with the machine ----------------------------------------------------------------------------------------


def test_a_signed_party_folds() -> None:
    control, data = signer("control"), signer("data")
    genesis = PartyGenesis(PARTY, IDENTITY, DEVICE, FeedKey(control.public), FeedKey(data.public), "Road trip")
    first = sign_credential(Claim(PARTY, IDENTITY, DeviceKey(PARTY), genesis), PARTY_SIGNER)
    joined = sign_credential(claim(MemberAdmit(person("bob"), Role.EDITOR, "Bob")), LAPTOP)
    forked = sign_credential(claim(ForkEvidence(fork_proof())), LAPTOP)
    forged = sign_credential(claim(MemberAdmit(person("eve"), Role.OWNER)), LAPTOP)
    forged.signature = bytes(64)
    machine = PartyMachine(PARTY)
    key = FeedKey(control.public)
    for seq, credentials in enumerate(([first], [joined, feed_credential()], [forked, forged])):
        verified = verify_credentials(credentials, PARTY)
        clock = {feed_id(key): seq - 1} if seq else {}
        machine.receive(ControlMessage(feed_id(key), key, seq, seq + 1, clock, verified))
    assert [member.role for member in machine.members if member.name == "Bob"] == [Role.EDITOR]
    assert [(rejection.seq, rejection.position, rejection.reason) for rejection in machine.rejected] == [
        (2, 1, Reason.BAD_SIGNATURE)
    ]
    assert machine.admission().why_excluded(feed_id(FeedKey(FEED.public)), 3) is Reason.FORK
    assert machine.admission().why_excluded(feed_id(FeedKey(FEED.public)), 2) is None


def feed_credential() -> pb.Credential:
    return sign_credential(claim(feed_admit(child=None)), LAPTOP)


def test_membership_state_is_equal_for_equal_sets() -> None:
    story = Story()
    story.say("ann", *story.join("bob", Role.EDITOR), *story.join("cyd", Role.ADMIN))
    base = story.messages[-1]
    story.say("ann", change("bob", Role.READER, bob_data=3), Policy((("b", b"2"), ("a", b"1"))), sees=[base])
    story.say("cyd", remove("bob", bob_data=2), ChildParty(CHILD, "chess"), sees=[base])
    there = membership_state(story.machine())
    back = membership_state(story.machine([*story.messages[:2], story.messages[3], story.messages[2]]))
    assert there == back
    state = pb.MembershipState.FromString(there)
    assert [entry.key for entry in state.policy] == ["a", "b"]
    assert [child.title for child in state.children] == ["chess"]
    assert {member.name: member.role for member in state.members}["bob"] == pb.ROLE_NONE
    cut = next(admitted for admitted in state.feeds if admitted.feed == feed("bob.data"))
    assert [(interval.start, interval.end, interval.open) for interval in cut.intervals] == [(0, 2, False)]
    assert decode_claim(encode_claim(claim(Profile("x")))).assertion == Profile("x")
