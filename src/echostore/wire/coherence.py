"""Messages of the coherence protocol <-> protobuf. One frame holds one message and the generation of its link.

Decoding is where others' bytes come in: whatever is wrong with them raises `MalformedFrame`, never more, and the size
is checked before anything is parsed. Whether a message is allowed is not decided here. A whole `Update` has no bytes of
its own: `frames_of` cuts it first.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, EncodeError

from echostore.kernel.coherence.arcs import ARC_IDS_BITS, ARC_IDS_MAX, ARCS_MAX
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    Attached,
    Backpressure,
    BeginUpdate,
    Connectivity,
    Deannounce,
    Delta,
    Denied,
    EndUpdate,
    FollowsEpoch,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    IndexValue,
    Invalidate,
    IssuedId,
    LaneItem,
    Linked,
    Message,
    MessageId,
    NotifyReplicated,
    NullUpdate,
    Patch,
    Pin,
    PublishOp,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Service,
    Spec,
    Subscribed,
    SystemId,
    Token,
    Touched,
    Turn,
    UserMessage,
    UserReceipt,
    WaitForEpoch,
    Witness,
)
from echostore.kernel.coherence.serving import ROUTES_MAX
from echostore.kernel.coherence.updates import LANES_MAX, PENDING_ITEMS_MAX
from echostore.kernel.limits import DEPTH_MAX
from echostore.kernel.reasons import Reason
from echostore.wire.generated import coherence_pb2 as pb
from echostore.wire.sync import MalformedFrame

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""The value of a large index. What is larger is asked for in parts, by queries with a limit."""

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
CLAUSES_MAX = 64
WITNESSES_MAX = 16
RETRY_S_MAX = 3600.0

_ROOT_BYTES = 16
_REASONS: dict[str, RejectReason | Reason] = {
    **{each.value: each for each in Reason},
    **{each.value: each for each in RejectReason},
}


class LinkFrame(NamedTuple):
    """What one frame says."""

    generation: int
    message: Message


def encode_frame(frame: LinkFrame) -> bytes:
    kind, encode, _ = _BY_TYPE[type(frame.message)]
    message = pb.CoherenceFrame(generation=frame.generation, **{kind: encode(frame.message)})
    return message.SerializeToString()


def decode_frame(data: bytes) -> LinkFrame:
    """The message in these bytes; MalformedFrame says what is wrong with them."""
    if len(data) > FRAME_BYTES_MAX:
        raise MalformedFrame(f"{len(data)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        frame = pb.CoherenceFrame.FromString(data)
    except (DecodeError, EncodeError) as error:
        raise MalformedFrame("undecodable") from error
    kind = frame.WhichOneof("kind")
    if kind is None:
        raise MalformedFrame("a frame without a kind")
    return LinkFrame(frame.generation, _BY_KIND[kind](getattr(frame, kind)))


# Parts


def _system(system: SystemId) -> pb.CoherenceSystem:
    return pb.CoherenceSystem(root=system.root, path=system.path)


def _arc(arc: Arc) -> pb.CoherenceArc:
    return pb.CoherenceArc(system=_system(arc.system), gen=arc.gen)


def _issued(issued: IssuedId) -> pb.CoherenceIssuedId:
    return pb.CoherenceIssuedId(arc=_arc(issued.arc), n=issued.n)


def _follows(follows: Iterable[FollowsEpoch]) -> list[pb.CoherenceWitness]:
    return [pb.CoherenceWitness(clock=_arc(each.clock), tick=each.tick) for each in follows]


def _message_id(id: MessageId) -> pb.CoherenceMessageId:
    return pb.CoherenceMessageId(sender=_system(id.sender), stream=id.stream, seq=id.seq)


def _reject(message: RejectOp) -> pb.CoherenceRejectOp:
    return pb.CoherenceRejectOp(op=_issued(message.op), reason=message.reason.value)


def _read_system(message: pb.CoherenceSystem) -> SystemId:
    if len(message.root) != _ROOT_BYTES:
        raise MalformedFrame(f"a root of {len(message.root)} bytes, not {_ROOT_BYTES}")
    return SystemId(message.root, _numbers(message.path))


def _read_arc(message: pb.CoherenceArc) -> Arc:
    return Arc(_read_system(message.system), _tick(message.gen))


def _read_issued(message: pb.CoherenceIssuedId) -> IssuedId:
    if not 0 < message.n <= ARC_IDS_MAX:
        raise MalformedFrame(f"an id that no arc has, {message.n}")
    return IssuedId(_read_arc(message.arc), message.n)


def _read_follows(messages: Sequence[pb.CoherenceWitness]) -> tuple[FollowsEpoch, ...]:
    _at_most(len(messages), ROUTES_MAX, "clocks")
    return tuple(FollowsEpoch(_read_arc(each.clock), _tick(each.tick)) for each in messages)


def _read_message_id(message: pb.CoherenceMessageId) -> MessageId:
    return MessageId(_read_system(message.sender), _tick(message.stream), _tick(message.seq))


def _read_reject(message: pb.CoherenceRejectOp) -> RejectOp:
    # A reason of a later version: the operation has no effect all the same.
    return RejectOp(_read_issued(message.op), _REASONS.get(message.reason, RejectReason.EXCLUDED))


def _tick(number: int) -> int:
    if number > TICK_MAX:
        raise MalformedFrame(f"{number} is above {TICK_MAX}")
    return number


def _maybe_tick(message: Any, name: str) -> int | None:
    return _tick(getattr(message, name)) if message.HasField(name) else None


def _numbers(numbers: Sequence[int]) -> Turn:
    _at_most(len(numbers), PATH_MAX, "numbers in a path")
    return tuple(_tick(each) for each in numbers)


def _spec(data: bytes) -> Spec:
    _at_most(len(data), SPEC_BYTES_MAX, "bytes of a spec")
    if not data:
        raise MalformedFrame("an empty spec")
    return Spec(data)


def _token(data: bytes) -> Token:
    _at_most(len(data), TOKEN_BYTES_MAX, "bytes of a hash")
    return Token(data)


def _delta(data: bytes) -> bytes:
    _at_most(len(data), DELTA_BYTES_MAX, "bytes")
    return data


def _text(text: str) -> str:
    _at_most(len(text), TEXT_CHARACTERS_MAX, "characters")
    return text


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise MalformedFrame(f"{count} {what}, at most {most}")


def _span(prev: int, tick: int) -> tuple[int, int]:
    if not prev < _tick(tick):
        raise MalformedFrame(f"an update from {prev} to {tick}")
    return prev, tick


# Messages: to protobuf


def _attach(message: Attach) -> pb.CoherenceAttach:
    return pb.CoherenceAttach(
        nonce=message.nonce,
        system=None if message.system is None else _system(message.system),
        wants_arc=message.wants_arc,
        seen=message.seen,
        below=[pb.CoherenceTurned(system=_system(system), turn=turn) for system, turn in message.below],
        turn=message.turn,
    )


def _lane_item(message: LaneItem) -> pb.CoherenceLaneItem:
    frame = pb.CoherenceLaneItem(clock=_arc(message.clock), tick=message.tick, lane=message.lane, index=message.index)
    match message.item:
        case Subscribed(spec, gm):
            frame.subscribed.CopyFrom(pb.CoherenceSubscribed(spec=spec, gm=gm))
        case Invalidate(spec):
            frame.invalidate = spec
        case Delta(spec, gm, patch):
            frame.delta.CopyFrom(pb.CoherenceDelta(spec=spec, gm=gm, patch=patch))
        case RejectOp():
            frame.reject_op.CopyFrom(_reject(message.item))
        case PublishOp(op, object, delta):
            frame.publish_op.CopyFrom(pb.CoherencePublishOp(op=_issued(op), object=object, delta=delta))
    return frame


def _end_update(message: EndUpdate) -> pb.CoherenceEndUpdate:
    return pb.CoherenceEndUpdate(
        clock=_arc(message.clock),
        prev=message.prev,
        tick=message.tick,
        follows=_follows(message.follows),
        lanes=[lane for lane, _ in message.lanes],
        counts=[count for _, count in message.lanes],
    )


def _begin(message: BeginUpdate | NullUpdate) -> pb.CoherenceBeginUpdate:
    return pb.CoherenceBeginUpdate(clock=_arc(message.clock), prev=message.prev, tick=message.tick)


def _grant(message: Grant) -> pb.CoherenceGrant:
    frame = pb.CoherenceGrant(spec=message.spec, at=message.at, min=message.min, max=message.max)
    if message.value is not None:
        frame.value = message.value
    elif message.token is not None:
        frame.same = message.token
    return frame


def _announce(message: Announce | Deannounce) -> pb.CoherenceAnnounce:
    return pb.CoherenceAnnounce(
        system=_system(message.service.system),
        name=message.service.name,
        gen=message.gen,
        seq=message.seq,
        detail=message.detail if isinstance(message, Announce) else b"",
    )


def _user_message(message: UserMessage) -> pb.CoherenceUserMessage:
    return pb.CoherenceUserMessage(
        id=_message_id(message.id),
        floor=message.floor,
        target=_system(message.target),
        context=[
            pb.CoherenceClause(
                witnesses=[pb.CoherenceWitness(clock=_arc(each.clock), tick=each.tick) for each in clause]
            )
            for clause in message.context
        ],
        type=message.type,
        payload=message.payload,
        cross_root=message.cross_root,
    )


# Messages: from protobuf


def _read_attach(message: pb.CoherenceAttach) -> Attach:
    _at_most(len(message.below), ROUTES_MAX, "systems")
    return Attach(
        message.nonce,
        _read_system(message.system) if message.HasField("system") else None,
        message.wants_arc,
        _tick(message.seen),
        tuple((_read_system(each.system), _numbers(each.turn)) for each in message.below),
        _numbers(message.turn),
    )


def _read_grant_arc(message: pb.CoherenceGrantArc) -> GrantArc:
    if message.base > (ARCS_MAX - 1) << ARC_IDS_BITS or message.base & ARC_IDS_MAX:
        raise MalformedFrame(f"an arc at {message.base}, where none begins")
    return GrantArc(_read_arc(message.arc), message.base)


def _read_lane_item(message: pb.CoherenceLaneItem) -> LaneItem:
    kind = message.WhichOneof("item")
    item: Subscribed | Invalidate | Delta | RejectOp | PublishOp
    if kind == "subscribed":
        item = Subscribed(_spec(message.subscribed.spec), _tick(message.subscribed.gm))
    elif kind == "invalidate":
        item = Invalidate(_spec(message.invalidate))
    elif kind == "delta":
        item = Delta(_spec(message.delta.spec), _tick(message.delta.gm), Patch(message.delta.patch))
    elif kind == "reject_op":
        item = _read_reject(message.reject_op)
    elif kind == "publish_op":
        op = message.publish_op
        _at_most(len(op.object), TEXT_CHARACTERS_MAX, "bytes of an object's id")
        item = PublishOp(_read_issued(op.op), op.object, _delta(op.delta))
    else:
        raise MalformedFrame("an item without a kind")
    if message.lane >= LANES_MAX or message.index >= PENDING_ITEMS_MAX:
        raise MalformedFrame(f"lane {message.lane}, item {message.index}")
    return LaneItem(_read_arc(message.clock), _tick(message.tick), message.lane, message.index, item)


def _read_end_update(message: pb.CoherenceEndUpdate) -> EndUpdate:
    if len(message.lanes) != len(message.counts) or len(message.lanes) > LANES_MAX:
        raise MalformedFrame("a manifest with unequal columns, or too many lanes")
    lanes = tuple(zip(message.lanes, message.counts, strict=True))
    _at_most(sum(count for _, count in lanes), PENDING_ITEMS_MAX, "items")
    prev, tick = _span(message.prev, message.tick)
    return EndUpdate(_read_arc(message.clock), prev, tick, _read_follows(message.follows), lanes)


def _read_grant(message: pb.CoherenceGrant) -> Grant:
    answer = message.WhichOneof("answer")
    if answer is None or message.min > _tick(message.max):
        raise MalformedFrame("a grant of nothing, or of no tick")
    at = _maybe_tick(message, "at")
    if at is not None and not message.min <= at <= message.max:
        raise MalformedFrame("a grant for a tick that it does not cover")
    value = IndexValue(message.value) if answer == "value" else None
    token = None if answer == "value" else _token(message.same)
    return Grant(_spec(message.spec), at, message.min, message.max, value, token)


def _read_denied(message: pb.CoherenceDenied) -> Denied:
    reason = _REASONS.get(message.reason)
    return Denied(_spec(message.spec), reason if isinstance(reason, RejectReason) else RejectReason.NOT_ALLOWED)


def _read_touched(message: pb.CoherenceTouched) -> Touched:
    _at_most(len(message.specs), PENDING_ITEMS_MAX, "specs")
    return Touched(tuple(_spec(each) for each in message.specs))


def _read_service(message: pb.CoherenceAnnounce) -> Service:
    return Service(_read_system(message.system), _text(message.name))


def _read_witness(message: pb.CoherenceWitness) -> Witness:
    return Witness(_read_arc(message.clock), _tick(message.tick))


def _read_user_message(message: pb.CoherenceUserMessage) -> UserMessage:
    _at_most(len(message.context), CLAUSES_MAX, "clauses")
    for clause in message.context:
        if not 0 < len(clause.witnesses) <= WITNESSES_MAX:
            raise MalformedFrame(f"a clause of {len(clause.witnesses)} witnesses, 1 to {WITNESSES_MAX}")
    context = tuple(tuple(_read_witness(each) for each in clause.witnesses) for clause in message.context)
    return UserMessage(
        _read_message_id(message.id),
        _tick(message.floor),
        _read_system(message.target),
        context,
        _text(message.type),
        _delta(message.payload),
        message.cross_root,
    )


def _read_backpressure(message: pb.CoherenceBackpressure) -> Backpressure:
    if not math.isfinite(message.retry_after_s) or not 0 <= message.retry_after_s <= RETRY_S_MAX:
        raise MalformedFrame(f"a wait of {message.retry_after_s} s")
    return Backpressure(_text(message.what), message.retry_after_s)


_KINDS: list[tuple[str, type, Callable[[Any], Any], Callable[[Any], Message]]] = [
    ("attach", Attach, _attach, _read_attach),
    (
        "attached",
        Attached,
        lambda each: pb.CoherenceAttached(
            turn=each.turn, system=_system(each.system), tick=each.tick, follows=_follows(each.follows)
        ),
        lambda each: Attached(
            _numbers(each.turn), _read_system(each.system), _tick(each.tick), _read_follows(each.follows)
        ),
    ),
    (
        "grant_system_id",
        GrantSystemId,
        lambda each: pb.CoherenceGrantSystemId(nonce=each.nonce, system=_system(each.system), turn=each.turn),
        lambda each: GrantSystemId(each.nonce, _read_system(each.system), _numbers(each.turn)),
    ),
    (
        "grant_arc",
        GrantArc,
        lambda each: pb.CoherenceGrantArc(arc=_arc(each.arc), base=each.base),
        _read_grant_arc,
    ),
    (
        "release_arc",
        ReleaseArc,
        lambda each: pb.CoherenceReleaseArc(arc=_arc(each.arc), batch=each.batch),
        lambda each: ReleaseArc(_read_arc(each.arc), _tick(each.batch)),
    ),
    (
        "linked",
        Linked,
        lambda each: pb.CoherenceLinked(clock=_arc(each.clock), tick=each.tick, follows=_follows(each.follows)),
        lambda each: Linked(_read_arc(each.clock), _tick(each.tick), _read_follows(each.follows)),
    ),
    (
        "begin_update",
        BeginUpdate,
        _begin,
        lambda each: BeginUpdate(_read_arc(each.clock), *_span(each.prev, each.tick)),
    ),
    ("lane_item", LaneItem, _lane_item, _read_lane_item),
    ("end_update", EndUpdate, _end_update, _read_end_update),
    ("null_update", NullUpdate, _begin, lambda each: NullUpdate(_read_arc(each.clock), *_span(each.prev, each.tick))),
    ("reject_op", RejectOp, _reject, _read_reject),
    (
        "acquire",
        Acquire,
        lambda each: pb.CoherenceAcquire(spec=each.spec, at=each.at, have=each.have),
        lambda each: Acquire(
            _spec(each.spec), _maybe_tick(each, "at"), _token(each.have) if each.HasField("have") else None
        ),
    ),
    ("grant", Grant, _grant, _read_grant),
    (
        "gone",
        Gone,
        lambda each: pb.CoherenceGone(spec=each.spec, at=each.at, oldest=each.oldest),
        lambda each: Gone(_spec(each.spec), _tick(each.at), _tick(each.oldest)),
    ),
    (
        "denied",
        Denied,
        lambda each: pb.CoherenceDenied(spec=each.spec, reason=each.reason.value),
        _read_denied,
    ),
    ("touched", Touched, lambda each: pb.CoherenceTouched(specs=each.specs), _read_touched),
    (
        "pin",
        Pin,
        lambda each: pb.CoherencePin(tick=each.tick),
        lambda each: Pin(_maybe_tick(each, "tick")),
    ),
    (
        "notify_replicated",
        NotifyReplicated,
        lambda each: pb.CoherenceNotifyReplicated(
            clock=_arc(each.clock), batch=each.batch, root=_system(each.root), tick=each.tick
        ),
        lambda each: NotifyReplicated(
            _read_arc(each.clock), _tick(each.batch), _read_system(each.root), _tick(each.tick)
        ),
    ),
    (
        "wait_for_epoch",
        WaitForEpoch,
        lambda each: pb.CoherenceWitness(clock=_arc(each.clock), tick=each.tick),
        lambda each: WaitForEpoch(*_read_witness(each)),
    ),
    (
        "announce",
        Announce,
        _announce,
        lambda each: Announce(_read_service(each), _tick(each.gen), _tick(each.seq), _delta(each.detail)),
    ),
    (
        "deannounce",
        Deannounce,
        _announce,
        lambda each: Deannounce(_read_service(each), _tick(each.gen), _tick(each.seq)),
    ),
    (
        "connectivity",
        Connectivity,
        lambda each: pb.CoherenceConnectivity(
            system=_system(each.system), affects_all_services=each.affects_all_services, turn=each.turn
        ),
        lambda each: Connectivity(_read_system(each.system), each.affects_all_services, _numbers(each.turn)),
    ),
    ("user_message", UserMessage, _user_message, _read_user_message),
    (
        "user_receipt",
        UserReceipt,
        lambda each: _message_id(each.id),
        lambda each: UserReceipt(_read_message_id(each)),
    ),
    (
        "backpressure",
        Backpressure,
        lambda each: pb.CoherenceBackpressure(what=each.what, retry_after_s=each.retry_after_s),
        _read_backpressure,
    ),
]
_BY_TYPE = {type: (kind, encode, decode) for kind, type, encode, decode in _KINDS}
_BY_KIND = {kind: decode for kind, _, _, decode in _KINDS}
