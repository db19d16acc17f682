"""Links, heads, signatures, fork proofs and content ids."""

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.feed import ChainStep, ForkProof, Head
from echostore.kernel.ids import NO_LINK, Cid, FeedKey, Link, PartyKey
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, BLOCK_BYTES_MAX, SEQ_MAX
from echostore.kernel.reasons import Reason
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_from_text, cid_of, cid_text, is_cid, matches
from echostore.wire.links import block_link, chain, chain_hashes, check_range, fork_proven, head_bytes, payload_hash
from echostore.wire.signing import SMALL_ORDER_KEYS, SigningKey, usable_public_key, verify
from feed_builder import PARTY, Writer, payloads, signing_key


def slow_link(feed: bytes, seq: int, previous: bytes, payload: bytes) -> bytes:
    """The rule of kernel.feed, written out by hand."""
    inner = hashlib.sha256(payload).digest()
    return hashlib.sha256(b"echostore/block/1" + feed + seq.to_bytes(8, "big") + previous + inner).digest()


@given(st.binary(min_size=32, max_size=32), st.integers(0, SEQ_MAX - 8), st.lists(st.binary(max_size=200), max_size=8))
def test_a_chain_is_the_rule_applied_block_by_block(feed: bytes, start: int, blocks: list[bytes]) -> None:
    expected, previous = [], bytes(NO_LINK)
    for seq, payload in enumerate(blocks, start):
        previous = slow_link(feed, seq, previous, payload)
        expected.append(previous)
    assert chain(FeedKey(feed), start, NO_LINK, blocks) == expected
    assert chain_hashes(FeedKey(feed), start, NO_LINK, map(payload_hash, blocks)) == expected


def test_the_bytes_of_the_format_do_not_change() -> None:
    feed, party = FeedKey(bytes(range(32))), PartyKey(bytes(range(32, 64)))
    link = block_link(feed, 7, NO_LINK, payload_hash(b"hello"))
    assert link.hex() == "cfc77f1a9a69e06996d4860fef369a90789e705874907c937631a8c5ceab687e"
    assert head_bytes(party, feed, 8, link) == b"echostore/head/1" + party + feed + bytes(7) + b"\x08" + link


def check(writer: Writer, start: int, blocks: list[bytes], head: Head) -> list[Link] | Reason:
    previous = writer.links[start - 1] if start else NO_LINK
    return check_range(PARTY, writer.key, start, previous, blocks, head, verify)


def test_a_good_range_gives_its_links() -> None:
    writer = Writer("a")
    writer.write(*payloads(3))
    writer.write(*payloads(2))
    assert check(writer, 0, *writer.range(0)) == writer.links
    assert check(writer, 3, *writer.range(3)) == writer.links[3:]


def test_a_bad_range_gives_its_reason() -> None:
    writer = Writer("a")
    writer.write(*payloads(4))
    blocks, head = writer.range(0)
    assert check(writer, 0, blocks[:-1], head) is Reason.BAD_LINK
    assert check(writer, 0, [*blocks[:-1], b"other"], head) is Reason.BAD_LINK
    assert check(writer, 0, [blocks[1], blocks[0], *blocks[2:]], head) is Reason.BAD_LINK
    assert check(writer, 0, blocks, dataclasses.replace(head, link=Link(b"short"))) is Reason.BAD_LINK
    assert check(writer, 0, blocks, dataclasses.replace(head, signature=bytes(64))) is Reason.BAD_SIGNATURE
    assert check(writer, 0, blocks, dataclasses.replace(head, signature=b"")) is Reason.BAD_SIGNATURE
    elsewhere = Writer("a", party=PartyKey(signing_key("other party").public), payloads=blocks, links=writer.links)
    assert check(writer, 0, blocks, elsewhere.head()) is Reason.BAD_SIGNATURE


def test_a_range_beyond_a_limit_is_oversize_before_anything_is_hashed() -> None:
    head = Head(1, NO_LINK, bytes(64))
    writer = Writer("a")
    assert check(writer, 0, [b""] * (APPEND_BLOCKS_MAX + 1), head) is Reason.OVERSIZE
    assert check(writer, 0, [bytes(BLOCK_BYTES_MAX + 1)], head) is Reason.OVERSIZE
    assert (
        check(writer, 0, [bytes(BLOCK_BYTES_MAX)] * (APPEND_BYTES_MAX // BLOCK_BYTES_MAX + 1), head) is Reason.OVERSIZE
    )
    assert check_range(PARTY, writer.key, SEQ_MAX + 1, NO_LINK, [b""], head, verify) is Reason.OVERSIZE
    assert check_range(PARTY, writer.key, -1, NO_LINK, [b""], head, verify) is Reason.OVERSIZE


def fork_proof() -> ForkProof:
    left = Writer("a")
    left.write(*payloads(2))
    right = left.branch(2)
    left.write(*payloads(3, "left"))
    right.write(*payloads(2, "right"))
    return ForkProof(
        party=PARTY,
        feed=left.key,
        seq=2,
        link_before=left.links[1],
        left=tuple(ChainStep(payload_hash(payload)) for payload in left.payloads[2:]),
        left_head=left.head(),
        right=tuple(ChainStep(payload_hash(payload)) for payload in right.payloads[2:]),
        right_head=right.head(),
    )


def test_a_fork_proof_is_checked_without_payloads() -> None:
    proof = fork_proof()
    assert fork_proven(proof, verify)
    for broken in (
        dataclasses.replace(proof, right=proof.left, right_head=proof.left_head),
        dataclasses.replace(proof, seq=3),
        dataclasses.replace(proof, seq=-1),
        dataclasses.replace(proof, link_before=NO_LINK),
        dataclasses.replace(proof, left=()),
        dataclasses.replace(proof, left=(ChainStep(b""),) * 3),
        dataclasses.replace(proof, party=PartyKey(bytes(32))),
        dataclasses.replace(proof, feed=FeedKey(b"")),
        dataclasses.replace(proof, left_head=dataclasses.replace(proof.left_head, signature=bytes(64))),
        dataclasses.replace(proof, left_head=dataclasses.replace(proof.left_head, length=1 << 70)),
    ):
        assert not fork_proven(broken, verify), broken


def test_a_signature_is_good_for_its_message_and_key_only() -> None:
    key, other = signing_key("a"), signing_key("b")
    signature = key.sign(b"message")
    assert verify(key.public, b"message", signature)
    assert not verify(key.public, b"massage", signature)
    assert not verify(other.public, b"message", signature)
    for malformed in (b"", signature[:-1], signature + b"x", bytes(64), b"\xff" * 64):
        assert not verify(key.public, b"message", malformed)
    for nobody in (b"", b"\xff" * 32, bytes(31), bytes(33)):
        assert not verify(nobody, b"message", signature)
        assert not usable_public_key(nobody)
    assert usable_public_key(key.public)


@pytest.mark.parametrize("key", sorted(SMALL_ORDER_KEYS), ids=bytes.hex)
def test_a_key_of_small_order_signs_nothing(key: bytes) -> None:
    assert not usable_public_key(key)
    for first in SMALL_ORDER_KEYS:
        assert not verify(key, b"anything", first + bytes(32))


def test_a_secret_does_not_show() -> None:
    key = SigningKey.generate()
    assert key.seed.hex() not in repr(key)
    assert SigningKey.from_seed(key.seed).public == key.public
    with pytest.raises(TypeError):
        key.__reduce__()
    with pytest.raises(ValueError):
        SigningKey(b"short")


def test_content_ids_are_those_of_other_tools() -> None:
    # By hand: base32 of 01 55 12 20 and the SHA-256 of "hello".
    text = "bafkreibm6jg3ux5qumhcn2b3flc3tyu6dmlb4xa7u5bf44yegnrjhc4yeq"
    cid = cid_of(b"hello")
    assert (cid_text(cid), cid_from_text(text), cid_codec(cid)) == (text, cid, RAW)
    assert cid_codec(cid_of(b"hello", PROTOBUF)) == PROTOBUF
    assert cid_of(b"hello", PROTOBUF) != cid
    assert matches(cid, b"hello")
    assert not matches(cid, b"hallo")


@given(st.binary(max_size=60))
def test_only_the_one_form_is_a_content_id(raw: bytes) -> None:
    assert is_cid(raw) == (
        len(raw) == 36 and raw[:1] == b"\x01" and raw[1:2] in b"\x50\x55" and raw[2:4] == b"\x12\x20"
    )
    assert is_cid(cid_of(raw))


def test_other_spellings_are_refused() -> None:
    text = cid_text(cid_of(b"hello"))
    other_codec = cid_text(Cid(b"\x01\x70\x12\x20" + bytes(32)))
    for wrong in (
        "",
        "b",
        text.upper(),
        "B" + text[1:],
        text[1:],
        text + "a",
        "z" + text[1:],
        "b" + "!" * 58,
        other_codec,
    ):
        with pytest.raises(ValueError):
            cid_from_text(wrong)
    # The last character has two unused bits: a second spelling of the same bytes would be a second name.
    assert sum(_decodes(text[:-1] + last) for last in "abcdefghijklmnopqrstuvwxyz234567") == 8


def _decodes(text: str) -> bool:
    try:
        cid_from_text(text)
    except ValueError:
        return False
    return True
