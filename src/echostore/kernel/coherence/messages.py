"""What systems say to each other, under the names of the September document. Values only.

    down   Attached GrantSystemId GrantArc Linked Grant Gone Denied NotifyReplicated Backpressure Deannounce
           an update: BeginUpdate, then Subscribed | Invalidate | Delta | RejectOp, then EndUpdate; or NullUpdate
    up     Attach ReleaseArc Acquire Touched Pin WaitForEpoch
           a batch: BeginUpdate, then PublishOp, then EndUpdate
    both   Announce Deannounce Connectivity UserMessage UserReceipt Undelivered
    roots  the same five between two roots of a party, and UserQueued

Its "epoch" is a *tick* here: the ticks of a root are its clock, and the batches of a leaf are the leaf's. Both are
named by an `Arc`: a root's own is gen 0 of itself. Every index message is a fact about the root's history, true for
ever once it is true; so a repeated or late one can't do harm.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from echostore.kernel.reasons import Reason

Spec = NewType("Spec", bytes)
"""A canonical query over a party: what names an index."""

IndexValue = NewType("IndexValue", bytes)
"""The answer to a query at some tick, encoded so that equal answers have equal bytes."""

Patch = NewType("Patch", bytes)
"""What takes the value of an index from one tick to another."""

Token = NewType("Token", bytes)
"""A hash of a value."""


Turn = tuple[int, ...]
"""Which connection of a system is meant: each edge on the way puts the number of its own link in front.

A system may be gone and back before the word of its going has arrived. A greater turn is a later connection.
"""


class SystemId(NamedTuple):
    """A running process: the hash of its root's key, and a path below it."""

    root: bytes
    path: tuple[int, ...] = ()


class Arc(NamedTuple):
    """Ids of one system, and the clock of its batches. Gen 0 of a root is the clock of its ticks."""

    system: SystemId
    gen: int = 0


class IssuedId(NamedTuple):
    """An id from an arc."""

    arc: Arc
    n: int


class MessageId(NamedTuple):
    """A user message: its sender, one of the sender's streams, and its place there, from 1."""

    sender: SystemId
    stream: int
    seq: int


class Service(NamedTuple):
    """What a system offers."""

    system: SystemId
    name: str


class Witness(NamedTuple):
    """An event as one clock names it."""

    clock: Arc
    tick: int


Context = tuple[tuple[Witness, ...], ...]
"""What has to be there first: every clause, each by any one of its witnesses."""


class Below(NamedTuple):
    """A system that is reached through an edge, by which connection, and what it showed where it connected."""

    system: SystemId
    turn: Turn
    credential: bytes = b""


class RejectReason(StrEnum):
    """Why an operation or a question is refused. The string is stable."""

    OUTSIDE_ARC = "outside-arc"
    RELEASED_ARC = "released-arc"
    NOT_ALLOWED = "not-allowed"
    MALFORMED = "malformed"
    NO_ITEM = "no-item"
    TOO_LARGE = "too-large"
    EXCLUDED = "excluded"
    CONFLICT = "conflict"
    """What it changes is not there any more."""
    EXPIRED = "expired"
    UNKNOWN_SYSTEM = "unknown-system"
    FORGED = "forged"
    """Not signed by the system that it is said to be of."""


# Identifiers


@dataclass(frozen=True, slots=True)
class Attach:
    """The first message of a link, and passed on by edges: a system is reached this way.

    `system` is None when it has no name yet; the same question has the same `nonce`. `wants_arc`: it has no ids, or
    few. `seen` is the tick it has reached: it won't go back, and knows of rejections up to there. `below` are the
    systems that are reached through it, where it is an edge, each with its turn and its own credential. `credential` is for
    the hosts: what the system showed where it connected, added by the first edge on its way. `vector`: it wants to know of every feed how
    much a tick includes, so that it can go on at another root.
    """

    nonce: int
    system: SystemId | None
    wants_arc: bool
    seen: int
    below: tuple[Below, ...] = ()
    turn: Turn = ()
    credential: bytes = b""
    vector: bool = False


@dataclass(frozen=True, slots=True)
class Attached:
    """From the root, past edges: at `tick` it included this much of the asker's clocks, and had rejected these.

    Without a turn, from next above: what the current tick includes of clocks that the lower end waits for.
    """

    turn: Turn
    system: SystemId
    tick: int
    follows: tuple["FollowsEpoch", ...]
    rejected: tuple["RejectOp", ...] = ()


@dataclass(frozen=True, slots=True)
class GrantSystemId:
    nonce: int
    system: SystemId
    turn: Turn = ()


@dataclass(frozen=True, slots=True)
class GrantArc:
    arc: Arc
    base: int


@dataclass(frozen=True, slots=True)
class ReleaseArc:
    """The arc is used in no batch later than `batch`. Only the system whose arc it is may say so."""

    arc: Arc
    batch: int
    signature: bytes = b""
    """Here and below: by the leaf that says it, where an edge is between. For the hosts."""


# Updates


@dataclass(frozen=True, slots=True)
class FollowsEpoch:
    """The tick that this stands in includes those of `clock` up to `tick`. Travels inside EndUpdate only."""

    clock: Arc
    tick: int


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The value valid at `gm` is valid through this update, and stays so until told."""

    spec: Spec
    gm: int


@dataclass(frozen=True, slots=True)
class Invalidate:
    """The index has changed, or nobody watches it any more."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class Delta:
    """As Invalidate, and this is what takes the value valid at `gm` to the one at this update."""

    spec: Spec
    gm: int
    patch: Patch


@dataclass(frozen=True, slots=True)
class RejectOp:
    """The operation has no effect, from this tick on. Comes with the tick, or with the link to one that was away.

    `object` is the item it was for, where the one that wrote it may not remember: it was taken first, and excluded since.
    """

    op: IssuedId
    reason: RejectReason | Reason
    object: bytes = b""


@dataclass(frozen=True, slots=True)
class PublishOp:
    """A change to original data."""

    op: IssuedId
    object: bytes
    delta: bytes


UpdateItem = Subscribed | Invalidate | Delta | RejectOp | PublishOp


@dataclass(frozen=True, slots=True)
class Update:
    """An indivisible bundle: all that happened on `clock` in (prev, tick], as far as the link cares."""

    clock: Arc
    prev: int
    tick: int
    follows: tuple[FollowsEpoch, ...] = ()
    items: tuple[UpdateItem, ...] = ()
    signature: bytes = b""
    """Of a batch: by the leaf that wrote it. For the hosts."""


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Items that follow belong to this update. Only on ordered links, where it spares each item its key."""

    clock: Arc
    prev: int
    tick: int


@dataclass(frozen=True, slots=True)
class LaneItem:
    """One item of an update, with its key."""

    clock: Arc
    tick: int
    lane: int
    index: int
    item: UpdateItem


@dataclass(frozen=True, slots=True)
class EndUpdate:
    """The manifest of an update: how many items travel on which lane. It may overtake them."""

    clock: Arc
    prev: int
    tick: int
    follows: tuple[FollowsEpoch, ...]
    lanes: tuple[tuple[int, int], ...]
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class NullUpdate:
    """Nothing that this link cares for happened in (prev, tick]."""

    clock: Arc
    prev: int
    tick: int


@dataclass(frozen=True, slots=True)
class Linked:
    """The link stands, and begins at this tick, which includes these; `rejected` since the tick that was seen last."""

    clock: Arc
    tick: int
    follows: tuple[FollowsEpoch, ...] = ()
    rejected: tuple[RejectOp, ...] = ()


# Indexes


@dataclass(frozen=True, slots=True)
class Acquire:
    """Wanted: an index, now or at a tick. `have` is the hash of a value that is held. May be lost or repeated."""

    spec: Spec
    at: int | None = None
    have: Token | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """`value` is the index at every tick in [min, max]. None: the value whose hash is `token`, which is held."""

    spec: Spec
    at: int | None
    min: int
    max: int
    value: IndexValue | None
    token: Token | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """The state at `at` is forgotten; the oldest that can be asked for is `oldest`."""

    spec: Spec
    at: int
    oldest: int


@dataclass(frozen=True, slots=True)
class Denied:
    """This index is not for this link."""

    spec: Spec
    reason: RejectReason


@dataclass(frozen=True, slots=True)
class Touched:
    """These indexes were read lately: their deltas are worth sending."""

    specs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """Somebody reads at this tick: please keep it. None: nobody does any more."""

    tick: int | None


# Epochs


@dataclass(frozen=True, slots=True)
class NotifyReplicated:
    """Batches of `clock` up to `batch` are durable at `root`, and part of its tick `tick`."""

    clock: Arc
    batch: int
    root: SystemId
    tick: int


@dataclass(frozen=True, slots=True)
class WaitForEpoch:
    """Tell me when you include this tick of that clock."""

    clock: Arc
    tick: int


# Systems


@dataclass(frozen=True, slots=True)
class Announce:
    """A last-writer register: the greater (gen, seq) wins."""

    service: Service
    gen: int
    seq: int
    detail: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Deannounce:
    service: Service
    gen: int
    seq: int
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Connectivity:
    """A system can't be reached; with `affects_all_services`, whatever it offers is gone with it."""

    system: SystemId
    affects_all_services: bool
    turn: Turn = ()


@dataclass(frozen=True, slots=True)
class UserMessage:
    """From one application to another, at most once, and never before its context is there.

    Those of the stream below `floor` were received, so nobody needs to remember them. Between roots those for one target
    come in order: `after` is the place of the one before that may not be there yet, 0 when all are.
    """

    id: MessageId
    floor: int
    target: SystemId
    context: Context
    type: str
    payload: bytes
    cross_root: bool = False
    after: int = 0
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class UserReceipt:
    """The target has it, and nobody else says so; sent back to the sender."""

    id: MessageId
    target: SystemId
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """The message is given up, for this reason; sent back to the sender."""

    id: MessageId
    reason: RejectReason


@dataclass(frozen=True, slots=True)
class UserQueued:
    """The root of the target has it on disk; said to the root of the sender."""

    id: MessageId


@dataclass(frozen=True, slots=True)
class Backpressure:
    """Too much of something: nothing was lost, and nothing more is taken for a while."""

    what: str
    retry_after_s: float


Statement = ReleaseArc | Announce | Deannounce | UserMessage | UserReceipt
"""What a leaf says of itself, and signs where an edge is between; besides its batches."""

Frame = BeginUpdate | LaneItem | EndUpdate | NullUpdate
"""What an update travels as."""

Message = (
    Attach
    | Attached
    | GrantSystemId
    | GrantArc
    | ReleaseArc
    | Linked
    | Update
    | RejectOp
    | Frame
    | Acquire
    | Grant
    | Gone
    | Denied
    | Touched
    | Pin
    | NotifyReplicated
    | WaitForEpoch
    | Announce
    | Deannounce
    | Connectivity
    | UserMessage
    | UserReceipt
    | Undelivered
    | UserQueued
    | Backpressure
)
"""Anything that a link carries. `Update` is a whole one, before it is cut into frames or after."""
