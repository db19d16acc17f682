"""What a session is told (`Event`) and what it asks for (`Effect`).

Every Read, Ingest and Compare is answered by exactly one local event, in any order and at any later time:

    Read      ->  RangeRead | RangeMissing
    Ingest    ->  Ingested | IngestRejected | ForkFound
    Compare   ->  Compared

Of a feed in limbo, Ingested says only that its first range was kept for later. Whether the feed is taken is said by
FeedKnown or FeedRefused, before or after.
"""

from dataclasses import dataclass
from enum import StrEnum

from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.frames import Blocks, FeedTip, Frame, RefusalReason, Tip

# What happens to a session.


@dataclass(frozen=True, slots=True)
class Started:
    """The connection stands. `feeds` is what we hold, admitted feeds of which we hold nothing included."""

    feeds: tuple[FeedTip, ...]
    fork_proofs: tuple[bytes, ...] = ()
    processed: tuple[tuple[FeedKey, int], ...] = ()
    """Up to which lengths we have applied them."""


@dataclass(frozen=True, slots=True)
class Received:
    """The other side sent a frame."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Malformed:
    """The other side sent bytes that are no frame."""

    detail: str


@dataclass(frozen=True, slots=True)
class LocalHead:
    """Our store holds a feed up to a new tip, wherever the blocks came from. The feed is admitted. `own`: we wrote them;
    `written` is then the last range, where it is at hand, and `sent` says that it went out already."""

    feed: FeedTip
    own: bool = False
    written: Blocks | None = None
    sent: bool = False


@dataclass(frozen=True, slots=True)
class FeedKnown:
    """A feed is admitted; we hold it up to `feed.tip`, which may be nothing yet."""

    feed: FeedTip


@dataclass(frozen=True, slots=True)
class FeedRefused:
    """A feed that was heard of will not be taken, for this session."""

    feed: FeedKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class Processed:
    """We have applied a feed up to `length`."""

    feed: FeedKey
    length: int


@dataclass(frozen=True, slots=True)
class RangeRead:
    feed: FeedKey
    start: int
    payloads: tuple[bytes, ...]
    head: Head


@dataclass(frozen=True, slots=True)
class RangeMissing:
    feed: FeedKey
    start: int
    reason: RefusalReason
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class Ingested:
    """The range is on disk or was there before; the branch in use now ends at `tip`."""

    feed: FeedKey
    tip: Tip


@dataclass(frozen=True, slots=True)
class IngestRejected:
    """The range was not kept. `fatal`: nobody honest sends this."""

    feed: FeedKey
    reason: Reason
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class ForkFound:
    """The range is signed and disagrees with what we hold: it is kept as evidence."""

    feed: FeedKey


@dataclass(frozen=True, slots=True)
class Compared:
    """Whether we hold a block with exactly this link at this length, on whatever branch."""

    feed: FeedKey
    tip: Tip
    held: bool


@dataclass(frozen=True, slots=True)
class Writable:
    """The transport's send queue is full (False) or has drained (True)."""

    writable: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `Session.wake_at()`, harmless at any other moment."""


Event = (
    Started
    | Received
    | Malformed
    | LocalHead
    | FeedKnown
    | FeedRefused
    | Processed
    | RangeRead
    | RangeMissing
    | Ingested
    | IngestRejected
    | ForkFound
    | Compared
    | Writable
    | Tick
)

# What a session asks for.


class Misbehaviour(StrEnum):
    """What no honest peer does, however bad the link."""

    MALFORMED = "malformed"
    WRONG_VERSION = "wrong-version"
    BAD_SIGNATURE = "bad-signature"
    LYING_HEAD = "lying-head"
    """Its blocks do not lead to a head that the feed's key signed, from wherever we ask."""
    OVERSIZE = "oversize"
    FLOOD = "flood"
    REJECTED = "rejected"
    """The store called a range fatal."""


@dataclass(frozen=True, slots=True)
class Send:
    frame: Frame


@dataclass(frozen=True, slots=True)
class Read:
    """Read a range that starts at `start` and ends at a head, on the branch that `toward` names if there are several.

    The longest such range within both limits; the shortest one there is if none fits.
    """

    feed: FeedKey
    start: int
    blocks_max: int
    bytes_max: int
    toward: Link


@dataclass(frozen=True, slots=True)
class Ingest:
    """Check and keep a range. `limbo`: the feed is not admitted yet and may never be."""

    feed: FeedKey
    kind: str
    start: int
    payloads: tuple[bytes, ...]
    head: Head
    limbo: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """Do we hold this tip on any branch?"""

    feed: FeedKey
    tip: Tip


@dataclass(frozen=True, slots=True)
class FeedHeard:
    """The other side has a feed that we do not know. Said once per feed and session."""

    feed: FeedKey
    kind: str


@dataclass(frozen=True, slots=True)
class ForkHeard:
    """The other side knows a fork proof that we do not; it will arrive in a control feed."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Unobtainable:
    """The other side can't give what it announced: an epoch has to be fetched, or another peer asked."""

    feed: FeedKey
    start: int
    reason: RefusalReason
    evidence: bytes = b""
    """Of a control feed that begins later there: the name of what to start from instead."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the other side is now known to have of a feed; lengths."""

    feed: FeedKey
    held: int
    processed: int


@dataclass(frozen=True, slots=True)
class Score:
    """The other side misbehaved."""

    misbehaviour: Misbehaviour
    detail: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection; the session does nothing more."""

    reason: Misbehaviour


Effect = Send | Read | Ingest | Compare | FeedHeard | ForkHeard | Unobtainable | Progress | Score | Close
