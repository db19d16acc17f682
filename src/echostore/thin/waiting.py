"""What callers of a leaf wait for, and what they are told instead."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from echostore.kernel.coherence.messages import RejectReason
from echostore.kernel.errors import Compacted, EchoError
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


def fulfil(future: "Future[Any]", value: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def disappoint(future: "Future[Any]", error: EchoError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
