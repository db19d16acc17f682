"""What happens to a system (`Event`), and what it asks its host for (`Effect`).

A link has a generation, chosen at random by its upper end and changed whenever either side lost what it knew of the
link. Messages carry it; one of another generation is left unread (rule D1).

Every Evaluate is answered by one Evaluated or Unavailable, every Commit by one Committed, at any later time.
"""

from dataclasses import dataclass
from typing import NamedTuple, NewType

from echostore.kernel.coherence.messages import (
    Arc,
    Context,
    FollowsEpoch,
    IndexValue,
    IssuedId,
    Message,
    MessageId,
    PublishOp,
    RejectOp,
    RejectReason,
    Spec,
    SystemId,
    UserMessage,
)
from echostore.kernel.reasons import Reason

LinkId = NewType("LinkId", str)
"""How a system calls one of its links. Never sent."""

UP = LinkId("up")
"""The one link of an edge towards its root."""

ROOTS = LinkId("roots")
"""The way of a root to all others, where something is to be asked again."""


# Links, for every system


@dataclass(frozen=True, slots=True)
class Received:
    link: LinkId
    generation: int
    message: Message


@dataclass(frozen=True, slots=True)
class Opening:
    """A way upwards stands: the upper end chose the generation. `nonce` is for the questions asked over it."""

    link: LinkId
    generation: int
    nonce: int


@dataclass(frozen=True, slots=True)
class ChildOpened:
    """A way downwards stands, in this generation."""

    link: LinkId
    generation: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The link is gone. What was held stays as history."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Writable:
    """The transport of a link can take more, or can't."""

    link: LinkId
    writable: bool


@dataclass(frozen=True, slots=True)
class Flush:
    """A good moment to tell a link below what is new."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop what is remembered of a Grant that is not subscribed yet."""

    link: LinkId
    spec: Spec


@dataclass(frozen=True, slots=True)
class EvictRecord:
    """Watch an index for a link no longer; the next update tells it so."""

    link: LinkId
    spec: Spec


@dataclass(frozen=True, slots=True)
class EvictEntry:
    """Drop what is held of an index."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Time has passed since something was asked for over this link: ask again."""

    link: LinkId


# What a root is told by its peer


@dataclass(frozen=True, slots=True)
class Advanced:
    """A new tick is durable. `changes` are the watched indexes whose value differs from that of the tick before."""

    tick: int
    changes: tuple[tuple[Spec, IndexValue], ...] = ()
    follows: tuple[FollowsEpoch, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The value of an index over [min, max]. One that reaches the current tick is watched from here on."""

    spec: Spec
    min: int
    max: int
    value: IndexValue


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The index can't be had: at that tick no more, or not at all."""

    spec: Spec
    at: int | None
    reason: RejectReason | None


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch is durable, together with the fact that it was applied; it will be part of the tick `tick`."""

    clock: Arc
    batch: int
    tick: int
    rejected: tuple[tuple[IssuedId, RejectReason | Reason], ...] = ()


@dataclass(frozen=True, slots=True)
class Excluded:
    """Operations of a clock that were taken have no effect any more, from the tick `tick` on; on disk, as rejections."""

    clock: Arc
    tick: int
    rejected: tuple[RejectOp, ...]


@dataclass(frozen=True, slots=True)
class RootMet:
    """Another root of the party can be reached."""

    root: bytes


@dataclass(frozen=True, slots=True)
class RootParted:
    root: bytes


@dataclass(frozen=True, slots=True)
class FromRoot:
    """Said by another root of the party."""

    root: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A message between roots has waited for too long."""

    id: MessageId


# What a leaf is told by its application


@dataclass(frozen=True, slots=True)
class Want:
    """The application reads an index, now or at a pinned tick, and has no value for it."""

    link: LinkId
    spec: Spec
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """One batch of the application: seen at once, and sent."""

    ops: tuple[tuple[bytes, bytes], ...]
    """Pairs of object and delta."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The application waits for a context, and nothing else does."""

    context: Context


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction starts: hold on to the current tick of this link."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class End:
    """The transaction that read at `tick` is over."""

    link: LinkId
    tick: int


@dataclass(frozen=True, slots=True)
class Post:
    """A message to another system's application."""

    target: SystemId
    stream: int
    type: str
    payload: bytes
    context: Context = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """The application offers a service, or (None) no longer does."""

    name: str
    detail: bytes | None


Event = (
    Received
    | Opening
    | ChildOpened
    | LinkClosed
    | Writable
    | Flush
    | Forget
    | EvictRecord
    | EvictEntry
    | Unanswered
    | Advanced
    | Evaluated
    | Unavailable
    | Committed
    | Excluded
    | RootMet
    | RootParted
    | FromRoot
    | GiveUp
    | Want
    | Publish
    | WaitFor
    | Begin
    | End
    | Post
    | Offer
)


# What a system asks for


@dataclass(frozen=True, slots=True)
class Send:
    link: LinkId
    generation: int
    message: Message


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A root needs the value of an index, at the current tick or at an older one."""

    spec: Spec
    at: int | None


@dataclass(frozen=True, slots=True)
class Unwatch:
    """A root watches an index for nobody any more."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class Commit:
    """A root has a batch to apply: make it durable with its number, once."""

    clock: Arc
    batch: int
    ops: tuple[PublishOp, ...]
    rejected: tuple[tuple[IssuedId, RejectReason], ...] = ()


@dataclass(frozen=True, slots=True)
class Changed:
    """What a leaf shows has changed: the tick, these indexes, or its own batches."""

    link: LinkId
    tick: int
    specs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """An operation of the application was refused, with the ones of its own that built on it."""

    op: IssuedId
    reason: RejectReason | Reason
    dependants: tuple[IssuedId, ...]
    object: bytes = b""


@dataclass(frozen=True, slots=True)
class Lost:
    """What an application asked for can't be had: a tick that is gone, an index that is denied."""

    link: LinkId
    spec: Spec
    at: int | None
    oldest: int | None
    reason: RejectReason | None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message for the application."""

    message: UserMessage


@dataclass(frozen=True, slots=True)
class Slow:
    """The system above asks to wait."""

    what: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that came in was refused: counted, and nothing else is disturbed."""

    link: LinkId
    reason: RejectReason
    detail: str


@dataclass(frozen=True, slots=True)
class Drop:
    """End this link; a new generation will start afresh."""

    link: LinkId
    detail: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A root has something to tell that only a new tick can carry."""


@dataclass(frozen=True, slots=True)
class Sideways:
    """Something for another root, by its name: to be sent if the two are connected."""

    root: bytes
    message: Message


class KeptRow(NamedTuple):
    """One thing about a message between roots that must not be forgotten; None: it may be."""

    kind: str
    id: MessageId
    target: SystemId
    value: UserMessage | RejectReason | int | None


@dataclass(frozen=True, slots=True)
class Keep:
    """These are on disk before any effect that follows is carried out."""

    rows: tuple[KeptRow, ...]


@dataclass(frozen=True, slots=True)
class NotDelivered:
    """A message of the application was given up."""

    id: MessageId
    target: SystemId
    reason: RejectReason


Effect = (
    Send
    | Evaluate
    | Unwatch
    | Commit
    | Changed
    | Told
    | Lost
    | Delivered
    | NotDelivered
    | Slow
    | Refusal
    | Drop
    | Cut
    | Sideways
    | Keep
)
