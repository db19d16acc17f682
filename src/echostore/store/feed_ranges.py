"""What goes into a FeedStore and what it answers, as values.

Append -> stored                     own blocks, linked and signed here
Range  -> Ingested | Rejection       blocks of someone else, judged by the store
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echostore.kernel.errors import TooLarge, UsageError
from echostore.kernel.feed import ForkProof, Head
from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.reasons import Reason
from echostore.store.feed_tables import FeedKind
from echostore.wire.links import within_bounds

Beginnings = Mapping[FeedKey, tuple[int, Link]]
"""By feed, the length at which it is to begin, and the link of the block before."""


@dataclass(frozen=True, slots=True)
class HeldFeed:
    """A feed and how much of it is here: blocks `base` to `length - 1`."""

    key: FeedKey
    kind: FeedKind
    own: bool
    base: int
    length: int
    last_link: Link


@dataclass(frozen=True, slots=True)
class Append:
    """Own blocks, linked and signed, on their way to disk."""

    feed: FeedKey
    start_seq: int
    payloads: Sequence[bytes]
    links: Sequence[Link]
    head: Head


@dataclass(frozen=True, slots=True)
class Range:
    """Blocks of someone else, as received: nothing about them is known yet."""

    feed: FeedKey
    start_seq: int
    payloads: Sequence[bytes]
    head: Head


@dataclass(frozen=True, slots=True)
class Ingested:
    """The links of the blocks that were new, from `start_seq` on; empty when all of them were held already."""

    start_seq: int
    links: list[Link]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a range was not held.

    FORK: its blocks were kept as evidence, unless too much of this feed is kept already; `proof` is set, except while a
    quarantined feed does not reach up to its fork.
    BAD_LINK with `head_signed`: the feed's own key signed this head, so either the payloads were altered on the way or
    the feed forks below `start_seq`. Ask again from an earlier seq to find out.
    """

    reason: Reason
    detail: str
    proof: ForkProof | None = None
    head_signed: bool = False


def check_append(append: Append, length: int) -> None:
    """Whether an append follows a feed of that length and is whole; UsageError or TooLarge says why not."""
    end = append.start_seq + len(append.payloads)
    if append.start_seq != length or not append.payloads:
        raise UsageError(f"An append of {len(append.payloads)} at {append.start_seq} to {length} blocks.")
    if len(append.links) != len(append.payloads) or append.head.length != end:
        raise UsageError(f"Links or head do not belong to the blocks {append.start_seq} to {end - 1}.")
    if append.links[-1] != append.head.link:
        raise UsageError(f"The head at {end} names another link than the last block.")
    too_large = within_bounds(append.start_seq, append.payloads)
    if too_large is not None:
        raise TooLarge(f"An append of {too_large}.", next_step="Write less at once, or put it into a blob.")
