"""Messages as bytes: golden vectors, unknown fields, and a typed refusal for whatever is malformed."""

import json
import random
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.ids import ARC_BIT, NO_LINK, FeedId, FeedKey, PartyKey, Stamp, created_item_id, item_id
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, REFUSED, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.items.tree import MOVE, UNEMBED
from echostore.kernel.limits import CREDENTIALS_MAX, DEPENDENCIES_MAX, DEPTH_MAX, OPERATIONS_MAX, SEQ_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.property_set import Set
from echostore.kernel.order import CONTROL, DATA, Envelope
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import block_link, payload_hash
from echostore.wire.messages import (
    NAME_CHARACTERS_MAX,
    decode_envelope,
    decode_operations,
    encode_genesis,
    encode_operation,
)
from echostore.wire.models import property_set
from echostore.wire.signing import SigningKey
from echostore.wire.values import value_from_bytes
from echostore.wire.views import sign_view
from golden.encoded import VALUES, encoded, operations
from golden.write import VECTORS, covered, message_types

GOLDEN = json.loads(VECTORS.read_text())
TYPES = message_types()
PARTY = PartyKey(b"p" * 32)
FEED, OTHER = FeedId(b"feedfeed"), FeedId(b"otherfed")
ITEM = created_item_id(FEED, 4, 0)
ADD_VECTORS = "run `python tests/golden/write.py`, which adds vectors for new messages and fields"


# golden vectors


@pytest.mark.parametrize("name", sorted(GOLDEN["schema"]))
def test_the_schema_means_what_it_always_meant(name: str) -> None:
    for vector in GOLDEN["schema"][name]:
        kind, data = TYPES[name], bytes.fromhex(vector["bytes"])
        named = text_format.Parse(vector["text"], kind())
        assert named.SerializeToString(deterministic=True) == data
        decoded = kind.FromString(data)
        assert decoded == named
        assert len(UnknownFieldSet(decoded)) == 0


def test_every_message_and_field_of_the_schema_has_a_vector() -> None:
    for name, kind in TYPES.items():
        texts = [vector["text"] for vector in GOLDEN["schema"].get(name, [])]
        missing = {field.name for field in kind.DESCRIPTOR.fields} - covered(kind, texts)
        assert not missing, f"{name}: {sorted(missing)} have no golden vector; {ADD_VECTORS}"


def test_our_encoders_write_what_they_always_wrote() -> None:
    fresh = {name: data.hex() for name, data in encoded().items()}
    assert fresh == GOLDEN["encoded"], f"an encoding changed, and with it CIDs or proofs; if one is new, {ADD_VECTORS}"


def test_golden_operations_and_values_read_back() -> None:
    from golden.encoded import FEED as WRITER
    from golden.encoded import ITEM as WRITTEN

    for name, operation in operations().items():
        data = bytes.fromhex(GOLDEN["encoded"][f"operation {name}"])
        built = pb.Message(depth=300, operations=[pb.Operation.FromString(data)])
        (read,) = decode_operations(built, party=PARTY, feed=WRITER, seq=200)
        if operation.field != GENESIS:
            assert read == operation
        elif "view" in name:
            assert read.field == REFUSED  # the proof is made up
        else:
            expected = created_item_id(WRITER, 200, 0) if operation.item == WRITTEN else operation.item
            assert read.item == expected
            assert encode_genesis(read.body) == encode_genesis(operation.body)


@pytest.mark.parametrize("name", sorted(VALUES))
def test_golden_values_read_back(name: str) -> None:
    data = bytes.fromhex(GOLDEN["encoded"][f"value {name}"])
    value = value_from_bytes(data)
    assert type(value) is type(VALUES[name])
    assert value == VALUES[name] or name == "nan"


# the envelope


def message(*operations: pb.Operation, depth: int = 7, dependencies: tuple[Dependency, ...] = ()) -> pb.Message:
    return pb.Message(
        depth=depth,
        time_ms=-5,
        operations=operations,
        dependency_feeds=b"".join(dependency.feed for dependency in dependencies),
        dependency_seqs=[dependency.seq for dependency in dependencies],
        dependency_links=b"".join(dependency.link_prefix for dependency in dependencies),
        dependency_depths=[dependency.depth for dependency in dependencies],
    )


DEPENDENCIES = (Dependency(OTHER, 3, b"l" * 16, 6), Dependency(FeedId(b"p" * 8), SEQ_MAX, b"m" * 16, DEPTH_MAX))


@pytest.mark.parametrize("dependencies", [(), DEPENDENCIES[:1], DEPENDENCIES])
@pytest.mark.parametrize("kind", [CONTROL, DATA])
def test_an_envelope_reads_back(dependencies: tuple[Dependency, ...], kind: str) -> None:
    envelope = decode_envelope(message(dependencies=dependencies).SerializeToString(), kind)
    assert isinstance(envelope, Envelope)
    assert (envelope.dependencies, envelope.depth, envelope.body.time_ms) == (dependencies, 7, -5)


def changed(**fields: Any) -> bytes:
    built = message(dependencies=DEPENDENCIES)
    for name, value in fields.items():
        built.ClearField(name)  # type: ignore[arg-type]  # a field's name
        if isinstance(value, list):
            getattr(built, name).extend(value)
        else:
            setattr(built, name, value)
    return built.SerializeToString()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff", Reason.UNDECODABLE),
        (message(dependencies=DEPENDENCIES).SerializeToString()[:-1], Reason.UNDECODABLE),
        (b"", Reason.LYING_DEPTH),
        (changed(depth=0), Reason.LYING_DEPTH),
        (changed(depth=DEPTH_MAX + 1), Reason.LYING_DEPTH),
        (changed(dependency_feeds=b""), Reason.UNDECODABLE),
        (changed(dependency_feeds=OTHER + b"p" * 7), Reason.UNDECODABLE),
        (changed(dependency_links=b"l" * 31), Reason.UNDECODABLE),
        (changed(dependency_depths=[1]), Reason.UNDECODABLE),
        (changed(dependency_depths=[1, 2, 3]), Reason.UNDECODABLE),
        (changed(dependency_seqs=[]), Reason.UNDECODABLE),
        (changed(dependency_seqs=[1]), Reason.UNDECODABLE),
        (changed(dependency_seqs=[1, SEQ_MAX + 1]), Reason.UNDECODABLE),
        (changed(dependency_feeds=b"p" * 8 + OTHER), Reason.UNDECODABLE),
        (changed(dependency_feeds=OTHER * 2), Reason.UNDECODABLE),
    ],
)
def test_an_envelope_that_is_none_has_a_reason(payload: bytes, reason: Reason) -> None:
    for kind in (CONTROL, DATA):
        assert decode_envelope(payload, kind) is reason


def test_data_and_credentials_stay_in_their_feeds() -> None:
    operation = pb.Message(depth=1, operations=[pb.Operation()]).SerializeToString()
    credential = pb.Message(depth=1, credentials=[{}]).SerializeToString()
    assert decode_envelope(operation, CONTROL) is Reason.WRONG_KIND
    assert decode_envelope(credential, DATA) is Reason.WRONG_KIND
    assert isinstance(decode_envelope(operation, DATA), Envelope)
    assert isinstance(decode_envelope(credential, CONTROL), Envelope)


def test_a_message_has_limits() -> None:
    def full(count: int) -> bytes:
        return pb.Message(depth=1, operations=[pb.Operation()] * count).SerializeToString()

    assert isinstance(decode_envelope(full(OPERATIONS_MAX), DATA), Envelope)
    assert decode_envelope(full(OPERATIONS_MAX + 1), DATA) is Reason.OVERSIZE
    credentials = pb.Message(depth=1, credentials=[{}] * (CREDENTIALS_MAX + 1)).SerializeToString()
    assert decode_envelope(credentials, CONTROL) is Reason.OVERSIZE
    many = DEPENDENCIES_MAX + 1
    wide = pb.Message(
        depth=1, dependency_seqs=[1] * many, dependency_depths=[1] * many, dependency_feeds=bytes(8 * many)
    )
    assert decode_envelope(wide.SerializeToString(), DATA) is Reason.OVERSIZE


@settings(max_examples=400)
@given(st.integers(0, 2**32))
def test_damaged_bytes_are_an_envelope_or_a_reason_and_operations_or_a_refusal(seed: int) -> None:
    """Whatever a member signs: nothing but the typed answers comes out of the decoders."""
    chance = random.Random(seed)
    chosen = [encode_operation(FEED, one) for one in chance.sample(list(operations().values()), 3)]
    data = bytearray(message(*chosen, dependencies=DEPENDENCIES).SerializeToString())
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(data))
        action = chance.randrange(3)
        if action == 0:
            data[at] = chance.randrange(256)
        elif action == 1:
            data[at:at] = chance.randbytes(chance.randrange(1, 5))
        else:
            del data[at : at + chance.randrange(1, 5)]
    envelope = decode_envelope(bytes(data), DATA)
    if isinstance(envelope, Reason):
        return
    try:
        read = decode_operations(envelope.body, party=PARTY, feed=FEED, seq=SEQ_MAX)
    except OperationRefused as refusal:
        assert refusal.reason in (Reason.MALFORMED, Reason.FORGED_WRITER)  # noqa: PT017  # the other way out is fine too
        return
    assert len(read) == len(envelope.body.operations)
    assert all(len(operation.item) == 16 for operation in read)


# unknown fields


UNKNOWN = bytes([15 << 3 | 2, 3]) + b"new" + bytes([126 << 3 & 127 | 128, 7, 9])
"""A field 15 of bytes and a field 126 of a number, as a later version might write them."""


def test_unknown_fields_are_kept_and_covered_by_the_link() -> None:
    known = message(encode_operation(FEED, ItemOperation(ITEM, "property-set", (Set(("t",), 1),)))).SerializeToString()
    payload = known + UNKNOWN
    envelope = decode_envelope(payload, DATA)
    assert isinstance(envelope, Envelope)
    assert envelope.depth == 7
    assert envelope.body.SerializeToString() == payload
    assert decode_operations(envelope.body, party=PARTY, feed=FEED, seq=9)[0].item == ITEM
    key = FeedKey(b"k" * 32)
    assert block_link(key, 0, NO_LINK, payload_hash(payload)) != block_link(key, 0, NO_LINK, payload_hash(known))


def test_unknown_fields_inside_operations_are_kept_too() -> None:
    operation = encode_operation(FEED, ItemOperation(ITEM, "property-set", (Set(("t",), 1),)))
    inner = operation.property_set.SerializeToString() + UNKNOWN
    outer = pb.Operation(local=operation.local).SerializeToString()
    whole = outer + bytes([4 << 3 | 2, len(inner)]) + inner + UNKNOWN
    payload = pb.Message(depth=7).SerializeToString() + bytes([7 << 3 | 2, len(whole)]) + whole
    envelope = decode_envelope(payload, DATA)
    assert isinstance(envelope, Envelope)
    assert envelope.body.SerializeToString().count(b"new") == 2
    (read,) = decode_operations(envelope.body, party=PARTY, feed=FEED, seq=9)
    assert read == ItemOperation(ITEM, "property-set", (Set(("t",), 1),))


# operations


def decode(operation: pb.Operation, *, feed: FeedId = FEED, seq: int = 4) -> ItemOperation:
    built = pb.Message.FromString(message(operation).SerializeToString())
    (read,) = decode_operations(built, party=PARTY, feed=feed, seq=seq)
    return read


def refused(operation: pb.Operation) -> str:
    with pytest.raises(OperationRefused) as caught:
        decode(operation)
    assert caught.value.reason is Reason.MALFORMED
    return caught.value.detail


def test_an_item_of_the_own_feed_is_named_by_its_number_alone() -> None:
    own = encode_operation(FEED, ItemOperation(ITEM, METADATA, (Set(("x",), 1),)))
    foreign = encode_operation(OTHER, ItemOperation(ITEM, METADATA, (Set(("x",), 1),)))
    assert (own.feed, foreign.feed) == (b"", FEED)
    assert decode(own).item == decode(foreign, feed=OTHER).item == ITEM


@pytest.mark.parametrize("body", [(MOVE, None), (MOVE, ITEM), (UNEMBED, ITEM)])
def test_placements_read_back(body: tuple[int, Any]) -> None:
    assert decode(encode_operation(FEED, ItemOperation(ITEM, PLACEMENT, body))) == ItemOperation(ITEM, PLACEMENT, body)


def test_a_stamp_of_the_past_is_measured_by_the_place_of_the_operation() -> None:
    """Restores are checked against depth and seq of the message that carries them."""
    from echostore.kernel.models.property_set import SET, Entry, EntryKey, Restore

    restore = Restore(EntryKey(("t",), SET, b"", None), Entry(Stamp(3, FEED, 2, 0), "x"))
    for field in ("property-set", METADATA):
        operation = encode_operation(FEED, ItemOperation(ITEM, field, (restore,)))
        assert decode(operation, seq=3).body == (restore,)
        with pytest.raises(OperationRefused):
            decode(operation, seq=2)
        with pytest.raises(OperationRefused):
            decode(operation, seq=7)  # four blocks lie between, so it can't have been deeper than 2


@pytest.mark.parametrize(
    "operation",
    [
        pb.Operation(),
        pb.Operation(local=1),
        pb.Operation(feed=b"short", custom=b"x"),
        pb.Operation(feed=b"longer than eight", custom=b"x"),
        pb.Operation(local=1, property_set={}),
        pb.Operation(local=1, metadata={}),
        pb.Operation(local=1, placement=pb.Placement(kind=7)),  # type: ignore[arg-type]  # of a later version
        pb.Operation(local=1, placement=pb.Placement(parent=b"short")),
        pb.Operation(genesis=pb.Genesis(version=1)),
        pb.Operation(genesis=pb.Genesis(model="m")),
        pb.Operation(genesis=pb.Genesis(model="m" * (NAME_CHARACTERS_MAX + 1), version=1)),
        pb.Operation(genesis=pb.Genesis(model="m", version=1, type="t" * (NAME_CHARACTERS_MAX + 1))),
        pb.Operation(genesis=pb.Genesis(model="m", version=1, parent=b"short")),
        pb.Operation(genesis=pb.Genesis(model="m", version=1, forked_from=b"short")),
        pb.Operation(genesis=pb.Genesis(model="m", version=1, link=pb.LinkEnds())),
        pb.Operation(genesis=pb.Genesis(model="m", version=1, link=pb.LinkEnds(source=ITEM))),
        pb.Operation(
            genesis=pb.Genesis(model="m", version=1, link=pb.LinkEnds(source=ITEM, target=ITEM, target_party=b"short"))
        ),
        pb.Operation(feed=OTHER, genesis=pb.Genesis(model="m", version=1)),
        pb.Operation(feed=FEED, genesis=pb.Genesis(model="m", version=1)),
        pb.Operation(local=5, genesis=pb.Genesis(model="m", version=1)),
    ],
)
def test_a_malformed_operation_is_refused(operation: pb.Operation) -> None:
    assert refused(operation)


def test_one_malformed_operation_rejects_its_message() -> None:
    good = encode_operation(FEED, ItemOperation(ITEM, CUSTOM, b"x"))
    with pytest.raises(OperationRefused):
        decode_operations(message(good, pb.Operation()), party=PARTY, feed=FEED, seq=0)


# geneses


def test_a_genesis_gets_its_id_from_its_place_or_from_an_arc() -> None:
    plain = pb.Operation(genesis=pb.Genesis(model="m", version=1))
    built = message(pb.Operation(local=1, custom=b""), plain)
    read = decode_operations(built, party=PARTY, feed=FEED, seq=4)[1]
    assert read.item == read.body.item == created_item_id(FEED, 4, 1)
    assert read.body.depth == 7
    arc = decode(pb.Operation(local=ARC_BIT | 5, genesis=pb.Genesis(model="m", version=1)))
    assert arc.item == item_id(FEED, ARC_BIT | 5)


def view(party: PartyKey, key: SigningKey, **fields: Any) -> pb.Genesis:
    genesis = encode_genesis(Genesis(ITEM, "property-set", 1, "board", None, 1, inception_key=key.public))
    genesis.view.id_proof = sign_view(party, ITEM, genesis, key)
    for name, value in fields.items():
        setattr(genesis, name, value)
    return genesis


def test_a_view_is_signed_by_its_inception_key_for_this_party_and_genesis() -> None:
    key = SigningKey.from_seed(b"s" * 32)
    good = decode(pb.Operation(genesis=view(PARTY, key)))
    assert good.field == GENESIS
    assert good.body.inception_key == key.public
    forged = view(PARTY, key)
    forged.view.inception_key = SigningKey.from_seed(b"t" * 32).public
    short = view(PARTY, key)
    short.view.inception_key = key.public[:31]
    unsigned = view(PARTY, key)
    unsigned.view.id_proof = b""
    for genesis in (view(PartyKey(b"q" * 32), key), view(PARTY, key, type="other"), forged, short, unsigned):
        bad = decode(pb.Operation(genesis=genesis))
        assert (bad.field, bad.body[0]) == (REFUSED, Reason.BAD_PROOF)


def test_the_proof_of_a_view_does_not_depend_on_how_the_genesis_is_encoded() -> None:
    """Protobuf takes fields in any order, twice, and numbers in more bytes than they need: one meaning, one verdict."""
    key = SigningKey.from_seed(b"s" * 32)
    genesis = view(PARTY, key)
    parts = {
        "model": b"\x0a\x0cproperty-set",
        "version": b"\x10\x81\x80\x00",  # 1 in three bytes
        "type": b"\x1a\x05board",
        "key": b"\x32\x22\x0a\x20" + key.public,
        "proof": b"\x32\x42\x12\x40" + genesis.view.id_proof,  # the same field once more: protobuf merges them
    }
    for order in (list(parts), list(reversed(parts)), ["proof", "type", "model", "key", "version"]):
        raw = b"".join(parts[name] for name in order)
        assert raw != genesis.SerializeToString()
        body = pb.Message(depth=7).SerializeToString()
        operation = b"\x1a" + bytes([len(raw) & 127 | 128, len(raw) >> 7]) + raw
        payload = body + b"\x3a" + bytes([len(operation) & 127 | 128, len(operation) >> 7]) + operation
        envelope = decode_envelope(payload, DATA)
        assert isinstance(envelope, Envelope), envelope
        (read,) = decode_operations(envelope.body, party=PARTY, feed=FEED, seq=4)
        assert (read.field, read.body.inception_key) == (GENESIS, key.public)


@pytest.mark.parametrize(
    "change",
    [
        lambda genesis: setattr(genesis, "model", "property-setb"),
        lambda genesis: setattr(genesis, "version", 2),
        lambda genesis: setattr(genesis, "parent", ITEM),
        lambda genesis: setattr(genesis, "forked_from", ITEM),
        lambda genesis: genesis.link.CopyFrom(pb.LinkEnds(source=ITEM, target=ITEM)),
        lambda genesis: genesis.MergeFromString(UNKNOWN),
        lambda genesis: genesis.view.MergeFromString(UNKNOWN),
        lambda genesis: genesis.view.MergeFromString(b"\xa3\x01\x08\x01\xa4\x01"),  # a group
    ],
)
def test_the_proof_of_a_view_covers_all_that_its_genesis_says(change: Any) -> None:
    key = SigningKey.from_seed(b"s" * 32)
    genesis = view(PARTY, key)
    change(genesis)
    assert decode(pb.Operation(genesis=genesis)).field == REFUSED
    genesis.view.id_proof = sign_view(PARTY, ITEM, genesis, key)
    assert decode(pb.Operation(genesis=genesis)).field == GENESIS


def test_the_proof_of_a_view_covers_fields_that_we_do_not_know() -> None:
    key = SigningKey.from_seed(b"s" * 32)
    newer = pb.Genesis.FromString(
        encode_genesis(Genesis(ITEM, "m", 1, "", None, 1, inception_key=key.public)).SerializeToString() + UNKNOWN
    )
    newer.view.id_proof = sign_view(PARTY, ITEM, newer, key)
    data = newer.SerializeToString()
    assert decode(pb.Operation(genesis=pb.Genesis.FromString(data))).field == GENESIS
    stripped = pb.Genesis.FromString(data)
    stripped.DiscardUnknownFields()
    assert decode(pb.Operation(genesis=stripped)).field == REFUSED


def test_operations_of_models_are_checked_by_their_codecs() -> None:
    """A message of any base model that says nothing is malformed or harmless, never an error of another kind."""
    for field in ("growable_array", "text", "threaded_log", "property_set"):
        operation = pb.Operation(local=1)
        getattr(operation, field).SetInParent()
        try:
            read = decode(operation)
        except OperationRefused as refusal:
            assert refusal.reason is Reason.MALFORMED  # noqa: PT017  # decoding is fine too
        else:
            assert read.item == item_id(FEED, 1)
    assert property_set.encode_operation((Set(("a",), 1),)).changes
