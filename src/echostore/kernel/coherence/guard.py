"""Who may say what over which link. What no rule allows is refused.

    link     showed a capability and a key when it opened: a `Right`
    system   is reached over links; behind an edge by its own credential, which every edge on the way passes on
    RULES    for each type of message what a link needs to say it

A link speaks for its own system. A link with the right of an edge speaks for those behind it as well, each of which showed a
credential, and signed what it says: an edge can hold it back and can't change it. To read everything is no right to speak for
anybody.

A connection behind an edge (`turn`) has one credential for as long as it lasts, so that what the root confirms is what was
shown here. Roots and edges use the same rules; a root knows besides whose each system is.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from echostore.kernel.coherence.events import Effect, LinkId, Refusal
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Attach,
    Attached,
    Backpressure,
    BeginUpdate,
    Below,
    Connectivity,
    Deannounce,
    Denied,
    EndUpdate,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    LaneItem,
    Linked,
    Message,
    NotifyReplicated,
    NullUpdate,
    Pin,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Statement,
    SystemId,
    Touched,
    Undelivered,
    Update,
    UserMessage,
    UserQueued,
    UserReceipt,
    WaitForEpoch,
)
from echostore.kernel.coherence.serving import Serving


class Right(NamedTuple):
    """What somebody showed: a key, and what a capability lets its holder say."""

    key: bytes
    edge: bool = False
    messages: bool = False


class Proofs(Protocol):
    """What a host knows of its links, and how it checks signatures."""

    def of_link(self, link: LinkId) -> Right | None:
        """What a link showed when it opened; None: it may not be here."""

    def shown(self, credential: bytes) -> Right | None:
        """What a system behind an edge showed there; None: it proves nothing, or is worth nothing any more."""

    def signed(self, message: Update | Statement, key: bytes) -> bool:
        """Whether the holder of a key said this, as it is."""


class Guard:
    """The rules at one root or edge."""

    __slots__ = ("proofs", "serving")

    def __init__(self, proofs: Proofs, serving: Serving) -> None:
        self.proofs = proofs
        self.serving = serving

    def refusal(self, link: LinkId, message: Message) -> RejectReason | None:
        """Why a message is not for this link to say; None when it is."""
        rule = RULES.get(type(message))
        return RejectReason.NOT_ALLOWED if rule is None else rule(self, link, message)

    def refuse(self, link: LinkId, message: Message, reason: RejectReason) -> list[Effect]:
        """Nothing happens; who sent a message that it wrote itself and may not send is told."""
        refusal = Refusal(link, reason, f"{type(message).__name__} is not for this link to say")
        if isinstance(message, UserMessage) and reason is RejectReason.NOT_ALLOWED:
            return [refusal, self.serving.send(link, Undelivered(message.id, reason))]
        return [refusal]

    def right(self, link: LinkId, system: SystemId) -> Right | None:
        """By what a system speaks over a link; None: it is not reached this way, or by nothing that counts."""
        turn = self.serving.routes.get(system, {}).get(link)
        if turn is None:
            return None
        if not turn:
            return self.proofs.of_link(link)
        return self.proofs.shown(self.serving.credentials.get((link, turn), b""))

    def wrote(self, link: LinkId, system: SystemId, message: Update | Statement) -> bool:
        """Whether a system said this. A link of its own has shown its key; what an edge brings is signed."""
        right = self.right(link, system)
        if right is None:
            return False
        return not self.serving.routes[system][link] or self.proofs.signed(message, right.key)

    def attaches(self, link: LinkId, attach: Attach) -> Right | None:
        """By what an Attach is made: the link's own right, or what the system behind it showed."""
        return self.proofs.of_link(link) if not attach.turn else self.proofs.shown(attach.credential)

    def proves(self, link: LinkId, below: Below) -> Right | None:
        """By what a system that an edge names is behind it."""
        known = self.serving.credentials.get((link, below.turn), below.credential)
        return self.proofs.shown(below.credential) if known == below.credential else None


def _attach(guard: Guard, link: LinkId, attach: Attach) -> RejectReason | None:
    own, shown = guard.proofs.of_link(link), guard.attaches(link, attach)
    if own is None or shown is None:
        return RejectReason.NOT_ALLOWED
    if (attach.turn and not own.edge) or (attach.below and not shown.edge):
        return RejectReason.NOT_ALLOWED
    known = guard.serving.credentials.get((link, attach.turn), attach.credential) if attach.turn else attach.credential
    return None if known == attach.credential else RejectReason.NOT_ALLOWED


def _of_itself(guard: Guard, link: LinkId, message: Message) -> RejectReason | None:
    """What concerns nobody but the link."""
    return None if guard.proofs.of_link(link) is not None else RejectReason.NOT_ALLOWED


def _batch(
    guard: Guard, link: LinkId, batch: Update | BeginUpdate | LaneItem | EndUpdate | NullUpdate
) -> RejectReason | None:
    """Its signature is checked once it is whole and it is its turn (`wrote`)."""
    return None if guard.right(link, batch.clock.system) is not None else RejectReason.UNKNOWN_SYSTEM


def _says(guard: Guard, link: LinkId, system: SystemId, message: Statement) -> RejectReason | None:
    right = guard.right(link, system)
    if right is None:
        return RejectReason.UNKNOWN_SYSTEM
    if not guard.wrote(link, system, message):
        return RejectReason.FORGED
    return None if right.messages or isinstance(message, ReleaseArc) else RejectReason.NOT_ALLOWED


def _connectivity(guard: Guard, link: LinkId, message: Connectivity) -> RejectReason | None:
    own = guard.proofs.of_link(link)
    if own is None or not own.edge:
        return RejectReason.NOT_ALLOWED
    return None if guard.serving.leads_to(message.system, link) else RejectReason.UNKNOWN_SYSTEM


def _never(guard: Guard, link: LinkId, message: Message) -> RejectReason | None:
    """It does not travel upwards."""
    return RejectReason.MALFORMED


RULES: Final[dict[type, Callable[[Guard, LinkId, Any], RejectReason | None]]] = {
    Attach: _attach,
    Acquire: _of_itself,
    Touched: _of_itself,
    Pin: _of_itself,
    WaitForEpoch: _of_itself,
    Update: _batch,
    BeginUpdate: _batch,
    LaneItem: _batch,
    EndUpdate: _batch,
    NullUpdate: _batch,
    ReleaseArc: lambda guard, link, said: _says(guard, link, said.arc.system, said),
    Announce: lambda guard, link, said: _says(guard, link, said.service.system, said),
    Deannounce: lambda guard, link, said: _says(guard, link, said.service.system, said),
    UserMessage: lambda guard, link, said: _says(guard, link, said.id.sender, said),
    UserReceipt: lambda guard, link, said: _says(guard, link, said.target, said),
    Connectivity: _connectivity,
    Attached: _never,
    GrantSystemId: _never,
    GrantArc: _never,
    Linked: _never,
    RejectOp: _never,
    Grant: _never,
    Gone: _never,
    Denied: _never,
    NotifyReplicated: _never,
    Undelivered: _never,
    UserQueued: _never,
    Backpressure: _never,
}
"""Every type of message has one: a type that is added without a rule is refused."""
