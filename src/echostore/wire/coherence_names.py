"""Names, numbers and small parts of the coherence protocol's messages <-> protobuf, with the limits they keep.

What is wrong with others' bytes raises `MalformedFrame`. The messages themselves are in `wire.coherence`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from echostore.kernel.coherence.arcs import ARC_IDS_MAX
from echostore.kernel.coherence.messages import (
    Arc,
    FollowsEpoch,
    IssuedId,
    MessageId,
    RejectOp,
    RejectReason,
    Spec,
    SystemId,
    Token,
    Turn,
)
from echostore.kernel.coherence.serving import ROUTES_MAX
from echostore.kernel.limits import DEPTH_MAX
from echostore.kernel.reasons import Reason
from echostore.wire.generated import coherence_pb2 as pb
from echostore.wire.sync import MalformedFrame

SPEC_BYTES_MAX = 64 * 1024
"""A canonical query: every link and every edge on the way keeps it."""

DELTA_BYTES_MAX = 1024 * 1024
"""What one operation, one message or one announcement may hold."""

TICK_MAX = DEPTH_MAX
"""Exact in a double, so that JavaScript can carry it."""

PATH_MAX = 16
"""Levels of a tree, and numbers in a turn."""

TOKEN_BYTES_MAX = 64
TEXT_CHARACTERS_MAX = 256

_ROOT_BYTES = 16
REASONS: dict[str, RejectReason | Reason] = {
    **{each.value: each for each in Reason},
    **{each.value: each for each in RejectReason},
}


def system_part(system: SystemId) -> pb.CoherenceSystem:
    return pb.CoherenceSystem(root=system.root, path=system.path)


def arc_part(arc: Arc) -> pb.CoherenceArc:
    return pb.CoherenceArc(system=system_part(arc.system), gen=arc.gen)


def issued_part(issued: IssuedId) -> pb.CoherenceIssuedId:
    return pb.CoherenceIssuedId(arc=arc_part(issued.arc), n=issued.n)


def follows_parts(follows: Iterable[FollowsEpoch]) -> list[pb.CoherenceWitness]:
    return [pb.CoherenceWitness(clock=arc_part(each.clock), tick=each.tick) for each in follows]


def message_id_part(id: MessageId) -> pb.CoherenceMessageId:
    return pb.CoherenceMessageId(sender=system_part(id.sender), stream=id.stream, seq=id.seq)


def reject_part(message: RejectOp) -> pb.CoherenceRejectOp:
    return pb.CoherenceRejectOp(op=issued_part(message.op), reason=message.reason.value, object=message.object)


def read_system(message: pb.CoherenceSystem) -> SystemId:
    if len(message.root) != _ROOT_BYTES:
        raise MalformedFrame(f"a root of {len(message.root)} bytes, not {_ROOT_BYTES}")
    return SystemId(message.root, check_numbers(message.path))


def read_arc(message: pb.CoherenceArc) -> Arc:
    return Arc(read_system(message.system), check_tick(message.gen))


def read_issued(message: pb.CoherenceIssuedId) -> IssuedId:
    if not 0 < message.n <= ARC_IDS_MAX:
        raise MalformedFrame(f"an id that no arc has, {message.n}")
    return IssuedId(read_arc(message.arc), message.n)


def read_follows(messages: Sequence[pb.CoherenceWitness]) -> tuple[FollowsEpoch, ...]:
    at_most(len(messages), ROUTES_MAX, "clocks")
    return tuple(FollowsEpoch(read_arc(each.clock), check_tick(each.tick)) for each in messages)


def read_message_id(message: pb.CoherenceMessageId) -> MessageId:
    return MessageId(read_system(message.sender), check_tick(message.stream), check_tick(message.seq))


def read_reject(message: pb.CoherenceRejectOp) -> RejectOp:
    # A reason of a later version: the operation has no effect all the same.
    reason = REASONS.get(message.reason, RejectReason.EXCLUDED)
    return RejectOp(read_issued(message.op), reason, check_object(message.object))


def read_rejected(messages: Sequence[pb.CoherenceRejectOp]) -> tuple[RejectOp, ...]:
    at_most(len(messages), ROUTES_MAX, "rejections")
    return tuple(read_reject(each) for each in messages)


def check_object(data: bytes) -> bytes:
    at_most(len(data), TEXT_CHARACTERS_MAX, "bytes of an object's id")
    return data


def check_tick(number: int) -> int:
    if number > TICK_MAX:
        raise MalformedFrame(f"{number} is above {TICK_MAX}")
    return number


def maybe_tick(message: Any, name: str) -> int | None:
    return check_tick(getattr(message, name)) if message.HasField(name) else None


def check_numbers(numbers: Sequence[int]) -> Turn:
    at_most(len(numbers), PATH_MAX, "numbers in a path")
    return tuple(check_tick(each) for each in numbers)


def check_spec(data: bytes) -> Spec:
    at_most(len(data), SPEC_BYTES_MAX, "bytes of a spec")
    if not data:
        raise MalformedFrame("an empty spec")
    return Spec(data)


def check_token(data: bytes) -> Token:
    at_most(len(data), TOKEN_BYTES_MAX, "bytes of a hash")
    return Token(data)


def check_delta(data: bytes) -> bytes:
    at_most(len(data), DELTA_BYTES_MAX, "bytes")
    return data


def check_text(text: str) -> str:
    at_most(len(text), TEXT_CHARACTERS_MAX, "characters")
    return text


def at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise MalformedFrame(f"{count} {what}, at most {most}")


def check_span(prev: int, tick: int) -> tuple[int, int]:
    if not prev < check_tick(tick):
        raise MalformedFrame(f"an update from {prev} to {tick}")
    return prev, tick
