"""Hash links of feeds and what a head signs: the one place where the bytes of `echostore.kernel.feed` are written.

    payload hash   SHA-256(payload)
    link[n]        SHA-256("echostore/block/1" | feed key 32 | seq u64 big-endian | link[n-1] 32 | payload hash 32)
    head bytes     "echostore/head/1" | party 32 | feed key 32 | length u64 big-endian | link 32

Called by the writer before it signs, by the FeedStore before it keeps a range, and by Spark's checks. It signs
nothing and stores nothing; the signature check is handed in.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

from echostore.kernel.feed import ForkProof, Head
from echostore.kernel.ids import KEY_BYTES, LINK_BYTES, FeedKey, Link, PartyKey
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, BLOCK_BYTES_MAX, SEQ_MAX
from echostore.kernel.reasons import Reason

BLOCK_TAG = b"echostore/block/1"
HEAD_TAG = b"echostore/head/1"

Verify = Callable[[bytes, bytes, bytes], bool]
"""(public key, message, signature) -> whether the signature is good; `echostore.wire.signing.verify` is one."""

# Copying an empty hash object is a third faster than making one: OpenSSL 3 looks the algorithm up for each new one.
_EMPTY = hashlib.sha256()


def payload_hash(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def block_link(feed_key: FeedKey, seq: int, previous: Link, payload_hash: bytes) -> Link:
    """The link of one block, from the link before it and the hash of its payload."""
    return Link(hashlib.sha256(BLOCK_TAG + feed_key + seq.to_bytes(8, "big") + previous + payload_hash).digest())


def head_bytes(party: PartyKey, feed_key: FeedKey, length: int, link: Link) -> bytes:
    """What the feed's key signs at the end of an append."""
    return HEAD_TAG + party + feed_key + length.to_bytes(8, "big") + link


def chain(feed_key: FeedKey, start_seq: int, previous: Link, payloads: Iterable[bytes]) -> list[Link]:
    """The links of consecutive blocks. Hot path: about 1.2 us a block of 150 bytes."""
    links: list[Link] = []
    empty, prefixed = _EMPTY, hashlib.sha256(BLOCK_TAG + feed_key)
    link: bytes = previous
    for seq, payload in enumerate(payloads, start_seq):
        content, linked = empty.copy(), prefixed.copy()
        content.update(payload)
        linked.update(seq.to_bytes(8, "big") + link + content.digest())
        link = linked.digest()
        links.append(link)  # type: ignore[arg-type]  # a call to Link() per block would cost a tenth
    return links


def chain_hashes(feed_key: FeedKey, start_seq: int, previous: Link, payload_hashes: Iterable[bytes]) -> list[Link]:
    """The same links from payload hashes alone: what proofs carry."""
    links: list[Link] = []
    for seq, hashed in enumerate(payload_hashes, start_seq):
        previous = block_link(feed_key, seq, previous, hashed)
        links.append(previous)
    return links


def check_range(
    party: PartyKey,
    feed_key: FeedKey,
    start_seq: int,
    previous_link: Link,
    payloads: Sequence[bytes],
    head: Head,
    verify: Verify,
) -> list[Link] | Reason:
    """The links of a received range that ends at `head`, or why it can't be kept.

    Bounds come first, then the hash, then the signature, so that a liar pays for each step before we do.
    """
    if within_bounds(start_seq, payloads) is not None:
        return Reason.OVERSIZE
    if head.length != start_seq + len(payloads) or len(head.link) != LINK_BYTES:
        return Reason.BAD_LINK
    links = chain(feed_key, start_seq, previous_link, payloads)
    if (links[-1] if links else previous_link) != head.link:
        return Reason.BAD_LINK
    if not head_signed(party, feed_key, head, verify):
        return Reason.BAD_SIGNATURE
    return links


def within_bounds(start_seq: int, payloads: Sequence[bytes]) -> str | None:
    """None when one head may cover these blocks, else which limit they break."""
    if start_seq < 0 or start_seq + len(payloads) - 1 > SEQ_MAX:
        return f"seq {start_seq} + {len(payloads)} blocks is outside 0..{SEQ_MAX}"
    if len(payloads) > APPEND_BLOCKS_MAX:
        return f"{len(payloads)} blocks under one head, at most {APPEND_BLOCKS_MAX}"
    sizes = [len(payload) for payload in payloads]
    if sizes and max(sizes) > BLOCK_BYTES_MAX:
        return f"a block of {max(sizes)} bytes, at most {BLOCK_BYTES_MAX}"
    if sum(sizes) > APPEND_BYTES_MAX:
        return f"{sum(sizes)} bytes under one head, at most {APPEND_BYTES_MAX}"
    return None


def head_signed(party: PartyKey, feed_key: FeedKey, head: Head, verify: Verify) -> bool:
    """Whether the feed's key signed this head of this party."""
    return verify(feed_key, head_bytes(party, feed_key, head.length, head.link), head.signature)


def fork_proven(proof: ForkProof, verify: Verify) -> bool:
    """Whether `proof` shows two branches of one feed: both chains reach a signed head and differ at `proof.seq`.

    It comes from anyone, so every length is checked before it is used.
    """
    sides = ((proof.left, proof.left_head), (proof.right, proof.right_head))
    if not 0 <= proof.seq <= SEQ_MAX or len(proof.link_before) != LINK_BYTES or len(proof.feed) != KEY_BYTES:
        return False
    for steps, head in sides:
        if not 1 <= len(steps) <= APPEND_BLOCKS_MAX or head.length != proof.seq + len(steps):
            return False
        if any(len(step.payload_hash) != LINK_BYTES for step in steps):
            return False
        hashes = (step.payload_hash for step in steps)
        if chain_hashes(proof.feed, proof.seq, proof.link_before, hashes)[-1] != head.link:
            return False
    if proof.left[0] == proof.right[0]:
        return False
    return all(head_signed(proof.party, proof.feed, head, verify) for _, head in sides)
