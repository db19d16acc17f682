"""What callers of a leaf wait for, and what they are told instead."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from echostore.kernel.coherence.events import Told
from echostore.kernel.coherence.messages import RejectReason
from echostore.kernel.errors import Compacted, EchoError, Refused
from echostore.kernel.reasons import Reason


class Gone(Compacted):
    """The tick that a transaction reads at is forgotten above; the transaction starts again."""

    code = "E-GONE"
    oldest = 0
    """The oldest state that can be asked for."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An operation of one's own that had no effect."""

    item: bytes
    reason: RejectReason | Reason
    dependants: int
    """How many later operations on an item that was never made fell with it."""

    @classmethod
    def of(cls, told: Told) -> "Rejection":
        return cls(told.object, told.reason, len(told.dependants))


def not_to_be_had(at: int | None, oldest: int | None, reason: RejectReason | None) -> EchoError:
    """Why an index that was asked for does not come: its tick is forgotten, or (with a reason) nobody here gets it."""
    if reason is not None:
        return Refused(f"this index is refused: {reason.value}", next_step="Ask for less, or with other rights.")
    gone = Gone(f"the state at tick {at} is forgotten", next_step="Read again, at a newer one.")
    gone.oldest = oldest or 0
    return gone


def fulfil(future: "Future[Any]", value: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def disappoint(future: "Future[Any]", error: EchoError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
