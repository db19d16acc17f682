"""Feeds: append-only, hash-linked logs with one writer key.

    link[n] = SHA-256("echostore/block/1" || feed key || seq as u64 || link[n-1] || SHA-256(payload))

A head signs (party, feed key, length, link): one signature covers every block up to it, because each link covers all
that came before. Over the payload's hash, so that a proof of a block needs no payloads.

The kernel states the rule over hashes that are handed in; `echostore.wire.links` hashes and signs.
"""

from dataclasses import dataclass

from echostore.kernel.ids import FeedKey, Link, PartyKey


@dataclass(frozen=True, slots=True)
class Head:
    """The signed end of an append: the feed had `length` blocks and its last link was `link`."""

    length: int
    link: Link
    signature: bytes


@dataclass(frozen=True, slots=True)
class Block:
    """The entry at (feed, seq): the received payload bytes and the link over them."""

    seq: int
    payload: bytes
    link: Link


@dataclass(frozen=True, slots=True)
class ChainStep:
    """What a proof needs of one block: its link follows from the previous one and this hash."""

    payload_hash: bytes


@dataclass(frozen=True, slots=True)
class ForkProof:
    """Two signed heads of one feed that disagree at `seq`, with the link steps from there up to each head.

    Valid from anyone: whoever holds it can recompute both chains from the common link before `seq` and check both
    signatures. Blocks from `seq` on leave the state of every peer.
    """

    party: PartyKey
    feed: FeedKey
    seq: int
    link_before: Link
    left: tuple[ChainStep, ...]
    left_head: Head
    right: tuple[ChainStep, ...]
    right_head: Head
