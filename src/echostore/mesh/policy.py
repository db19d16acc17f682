"""What may flow between this device and another: both ways, only up (we give) or only down (we take).

A replication session always speaks both ways. A policy narrows what it sees and says, frame by frame, so that the
session itself need not know:

    up      the other side's tips and news are not heard, so nothing is asked for
    down    our tips and news are not said, and what is asked for is refused
"""

from dataclasses import replace
from enum import StrEnum

from echostore.kernel.sync.frames import Announce, Blocks, Frame, Hello, Refusal, RefusalReason, Request


class Flow(StrEnum):
    BOTH = "both"
    UP = "up"
    DOWN = "down"


def outgoing(flow: Flow, frame: Frame) -> Frame | None:
    """What of a frame may be said."""
    if flow is not Flow.DOWN:
        return frame
    if isinstance(frame, Hello):
        return replace(frame, tips=())
    return None if isinstance(frame, Announce | Blocks) else frame


def incoming(flow: Flow, frame: Frame) -> Frame | None:
    """What of a frame may be heard."""
    if flow is not Flow.UP:
        return frame
    if isinstance(frame, Hello):
        return replace(frame, tips=())
    return None if isinstance(frame, Announce | Blocks) else frame


def refused(flow: Flow, frame: Frame) -> Frame | None:
    """The answer to a request that the policy does not allow."""
    if flow is Flow.DOWN and isinstance(frame, Request):
        return Refusal(frame.feed, frame.start, RefusalReason.UNKNOWN_FEED, 0)
    return None
