"""What two sessions say to each other. Values only; `echostore.wire.sync` gives them bytes.

    Hello     first, and again until the other side shows that it heard: protocol version, tips, known fork proofs
    Announce  new tips, several in one frame
    Request   a range of one feed, as a wish in blocks and bytes
    Blocks    a range that ends at a signed head; `more` says that the same request will bring another
    Refusal   why a request brings nothing now
    Ack       how far we hold and have processed feeds; what receipts wait for

A *tip* is the end of a feed as somebody holds it: its length and the link of its last block. A forked feed has more
than one tip; all but the one that is in use are marked as branches.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from echostore.kernel.feed import Head
from echostore.kernel.ids import NO_LINK, FeedKey, Link

PROTOCOL_VERSION = 1

TIPS_PER_FRAME_MAX = 4096
"""Tips in one Hello or Announce: about 300 kB, so that a party of many feeds needs several frames, not a huge one."""

ACKS_PER_FRAME_MAX = 4096
"""Entries in one Ack, for the same reason."""

FORK_PROOFS_MAX = 1024
"""Hashes of fork proofs in a Hello. A party with more forks has other worries; proofs also travel in control feeds."""


class Tip(NamedTuple):
    """Where a feed ends: `length` blocks, the last of which has this link."""

    length: int
    link: Link


NO_TIP = Tip(0, NO_LINK)


@dataclass(frozen=True, slots=True)
class FeedTip:
    """One line of a Hello or an Announce: a feed as its sender holds it."""

    feed: FeedKey
    kind: str
    tip: Tip
    branch: bool = False
    """Another branch of a forked feed, held as evidence beside the one in use."""


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    tips: tuple[FeedTip, ...]
    fork_proofs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Announce:
    tips: tuple[FeedTip, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """`number` grows within a session, so that a repeated frame is known as such. `toward` is the link of the tip that
    is wanted: it tells the branches of a forked feed apart."""

    number: int
    feed: FeedKey
    start: int
    blocks_max: int
    bytes_max: int
    toward: Link


@dataclass(frozen=True, slots=True)
class Blocks:
    feed: FeedKey
    start: int
    payloads: tuple[bytes, ...]
    head: Head
    more: bool

    @property
    def end(self) -> int:
        return self.start + len(self.payloads)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.payloads))


class RefusalReason(StrEnum):
    """Why a request brings nothing. BUSY passes by itself, the others do not."""

    BUSY = "busy"
    UNKNOWN_FEED = "unknown-feed"
    OVERSIZE = "oversize"
    """The shortest range that ends at a head is larger than the request allows."""
    COMPACTED = "compacted"
    """The blocks lie below an epoch and are gone here; the epoch's snapshot stands for them."""


@dataclass(frozen=True, slots=True)
class Refusal:
    feed: FeedKey
    start: int
    reason: RefusalReason
    bytes_needed: int = 0
    """With OVERSIZE: what the shortest range weighs."""
    evidence: bytes = b""
    """With COMPACTED, of a control feed: the name of what to start from instead."""


class AckEntry(NamedTuple):
    """How many blocks of one feed the sender has on disk and has applied, and which tip it was told last."""

    feed: FeedKey
    held: int
    processed: int
    heard: Link


@dataclass(frozen=True, slots=True)
class Ack:
    entries: tuple[AckEntry, ...]


Frame = Hello | Announce | Request | Blocks | Refusal | Ack
