"""Messages of the coherence protocol <-> protobuf. One frame holds one message and the generation of its link.

Decoding is where others' bytes come in: whatever is wrong with them raises `MalformedFrame`, never more, and the size
is checked before anything is parsed. Whether a message is allowed is not decided here.

    frame = generation_bytes(link) + message_bytes(message)

The two parts are independent, so that what goes to a thousand links is encoded once. A whole update is one frame on a
link that keeps the order, and is cut where it would be too large for one (`wire.coherence_parts`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, EncodeError

from echostore.kernel.coherence.arcs import ARC_IDS_BITS, ARC_IDS_MAX, ARCS_MAX
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
    Delta,
    Denied,
    EndUpdate,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    IndexValue,
    Invalidate,
    LaneItem,
    Linked,
    Message,
    NotifyReplicated,
    NullUpdate,
    Patch,
    Pin,
    PublishOp,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Service,
    Subscribed,
    Touched,
    Undelivered,
    Update,
    UpdateItem,
    UserMessage,
    UserQueued,
    UserReceipt,
    WaitForEpoch,
    Witness,
)
from echostore.kernel.coherence.serving import ROUTES_MAX
from echostore.kernel.coherence.updates import LANES_MAX, PENDING_ITEMS_MAX
from echostore.wire.coherence_names import (
    REASONS,
    arc_part,
    at_most,
    check_delta,
    check_numbers,
    check_object,
    check_span,
    check_spec,
    check_text,
    check_tick,
    check_token,
    follows_parts,
    issued_part,
    maybe_tick,
    message_id_part,
    read_arc,
    read_follows,
    read_issued,
    read_message_id,
    read_reject,
    read_rejected,
    read_system,
    reject_part,
    system_part,
)
from echostore.wire.generated import coherence_pb2 as pb
from echostore.wire.signing import SIGNATURE_BYTES
from echostore.wire.sync import MalformedFrame

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""The value of a large index. What is larger is asked for in parts, by queries with a limit."""

CREDENTIAL_BYTES_MAX = 32 * 1024
"""A capability, a key and a proof."""

UPDATE_ITEMS_MAX = 4096
"""Items of an update in one frame: those of the largest batch of a leaf."""

UPDATE_BYTES_MAX = 1024 * 1024
"""And their bytes, about. What is larger is cut, so that nothing else has to wait behind it."""

CLAUSES_MAX = 1024
WITNESSES_MAX = 16
RETRY_S_MAX = 3600.0


class LinkFrame(NamedTuple):
    """What one frame says."""

    generation: int
    message: Message


def encode_frame(frame: LinkFrame) -> bytes:
    return generation_bytes(frame.generation) + message_bytes(frame.message)


def generation_bytes(generation: int) -> bytes:
    """What a frame says of its link."""
    return pb.CoherenceFrame(generation=generation).SerializeToString()


def message_bytes(message: Message) -> bytes:
    """A frame without the generation of its link."""
    kind, encode, _ = _BY_TYPE[type(message)]
    return pb.CoherenceFrame(**{kind: encode(message)}).SerializeToString()


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


# Messages: to protobuf


def _attach(message: Attach) -> pb.CoherenceAttach:
    return pb.CoherenceAttach(
        nonce=message.nonce,
        system=None if message.system is None else system_part(message.system),
        wants_arc=message.wants_arc,
        seen=message.seen,
        below=[
            pb.CoherenceTurned(system=system_part(each.system), turn=each.turn, credential=each.credential)
            for each in message.below
        ],
        turn=message.turn,
        credential=message.credential,
        vector=message.vector,
    )


def _lane_item(message: LaneItem) -> pb.CoherenceLaneItem:
    return pb.CoherenceLaneItem(
        clock=arc_part(message.clock), tick=message.tick, lane=message.lane, index=message.index, **_item(message.item)
    )


def _update(message: Update) -> pb.CoherenceUpdate:
    return pb.CoherenceUpdate(
        clock=arc_part(message.clock),
        prev=message.prev,
        tick=message.tick,
        follows=follows_parts(message.follows),
        items=[pb.CoherenceUpdateItem(**_item(item)) for item in message.items],
        signature=message.signature,
    )


def _item(item: UpdateItem) -> dict[str, Any]:
    match item:
        case Subscribed(spec, gm):
            return {"subscribed": pb.CoherenceSubscribed(spec=spec, gm=gm)}
        case Invalidate(spec):
            return {"invalidate": spec}
        case Delta(spec, gm, patch):
            return {"delta": pb.CoherenceDelta(spec=spec, gm=gm, patch=patch)}
        case RejectOp():
            return {"reject_op": reject_part(item)}
        case PublishOp(op, object, delta):
            return {"publish_op": pb.CoherencePublishOp(op=issued_part(op), object=object, delta=delta)}


def _end_update(message: EndUpdate) -> pb.CoherenceEndUpdate:
    return pb.CoherenceEndUpdate(
        clock=arc_part(message.clock),
        prev=message.prev,
        tick=message.tick,
        follows=follows_parts(message.follows),
        lanes=[lane for lane, _ in message.lanes],
        counts=[count for _, count in message.lanes],
        signature=message.signature,
    )


def _begin(message: BeginUpdate | NullUpdate) -> pb.CoherenceBeginUpdate:
    return pb.CoherenceBeginUpdate(clock=arc_part(message.clock), prev=message.prev, tick=message.tick)


def _grant(message: Grant) -> pb.CoherenceGrant:
    frame = pb.CoherenceGrant(spec=message.spec, at=message.at, min=message.min, max=message.max)
    if message.value is not None:
        frame.value = message.value
    elif message.token is not None:
        frame.same = message.token
    return frame


def _announce(message: Announce | Deannounce) -> pb.CoherenceAnnounce:
    return pb.CoherenceAnnounce(
        system=system_part(message.service.system),
        name=message.service.name,
        gen=message.gen,
        seq=message.seq,
        detail=message.detail if isinstance(message, Announce) else b"",
        signature=message.signature,
    )


def _user_message(message: UserMessage) -> pb.CoherenceUserMessage:
    return pb.CoherenceUserMessage(
        id=message_id_part(message.id),
        floor=message.floor,
        target=system_part(message.target),
        context=[
            pb.CoherenceClause(
                witnesses=[pb.CoherenceWitness(clock=arc_part(each.clock), tick=each.tick) for each in clause]
            )
            for clause in message.context
        ],
        type=message.type,
        payload=message.payload,
        cross_root=message.cross_root,
        after=message.after,
        signature=message.signature,
    )


# Messages: from protobuf


def _read_attach(message: pb.CoherenceAttach) -> Attach:
    at_most(len(message.below), ROUTES_MAX, "systems")
    return Attach(
        message.nonce,
        read_system(message.system) if message.HasField("system") else None,
        message.wants_arc,
        check_tick(message.seen),
        tuple(
            Below(read_system(each.system), check_numbers(each.turn), _check_credential(each.credential))
            for each in message.below
        ),
        check_numbers(message.turn),
        _check_credential(message.credential),
        message.vector,
    )


def _read_grant_arc(message: pb.CoherenceGrantArc) -> GrantArc:
    if message.base > (ARCS_MAX - 1) << ARC_IDS_BITS or message.base & ARC_IDS_MAX:
        raise MalformedFrame(f"an arc at {message.base}, where none begins")
    return GrantArc(read_arc(message.arc), message.base)


def _read_lane_item(message: pb.CoherenceLaneItem) -> LaneItem:
    item = _read_item(message)
    if message.lane >= LANES_MAX or message.index >= PENDING_ITEMS_MAX:
        raise MalformedFrame(f"lane {message.lane}, item {message.index}")
    return LaneItem(read_arc(message.clock), check_tick(message.tick), message.lane, message.index, item)


def _read_update(message: pb.CoherenceUpdate) -> Update:
    at_most(len(message.items), UPDATE_ITEMS_MAX, "items in one frame")
    prev, tick = check_span(message.prev, message.tick)
    items = tuple([_read_item(each) for each in message.items])
    signature = _check_signature(message.signature)
    return Update(read_arc(message.clock), prev, tick, read_follows(message.follows), items, signature)


def _read_item(message: pb.CoherenceLaneItem | pb.CoherenceUpdateItem) -> UpdateItem:
    kind = message.WhichOneof("item")
    if kind == "subscribed":
        return Subscribed(check_spec(message.subscribed.spec), check_tick(message.subscribed.gm))
    if kind == "invalidate":
        return Invalidate(check_spec(message.invalidate))
    if kind == "delta":
        return Delta(check_spec(message.delta.spec), check_tick(message.delta.gm), Patch(message.delta.patch))
    if kind == "reject_op":
        return read_reject(message.reject_op)
    if kind == "publish_op":
        op = message.publish_op
        return PublishOp(read_issued(op.op), check_object(op.object), check_delta(op.delta))
    raise MalformedFrame("an item without a kind")


def _read_end_update(message: pb.CoherenceEndUpdate) -> EndUpdate:
    if len(message.lanes) != len(message.counts) or len(message.lanes) > LANES_MAX:
        raise MalformedFrame("a manifest with unequal columns, or too many lanes")
    lanes = tuple(zip(message.lanes, message.counts, strict=True))
    at_most(sum(count for _, count in lanes), PENDING_ITEMS_MAX, "items")
    prev, tick = check_span(message.prev, message.tick)
    signature = _check_signature(message.signature)
    return EndUpdate(read_arc(message.clock), prev, tick, read_follows(message.follows), lanes, signature)


def _check_credential(data: bytes) -> bytes:
    at_most(len(data), CREDENTIAL_BYTES_MAX, "bytes of a credential")
    return data


def _check_signature(data: bytes) -> bytes:
    if len(data) not in (0, SIGNATURE_BYTES):
        raise MalformedFrame(f"a signature of {len(data)} bytes")
    return data


def _read_grant(message: pb.CoherenceGrant) -> Grant:
    answer = message.WhichOneof("answer")
    if answer is None or message.min > check_tick(message.max):
        raise MalformedFrame("a grant of nothing, or of no tick")
    at = maybe_tick(message, "at")
    if at is not None and not message.min <= at <= message.max:
        raise MalformedFrame("a grant for a tick that it does not cover")
    value = IndexValue(message.value) if answer == "value" else None
    token = None if answer == "value" else check_token(message.same)
    return Grant(check_spec(message.spec), at, message.min, message.max, value, token)


def _read_denied(message: pb.CoherenceDenied) -> Denied:
    reason = REASONS.get(message.reason)
    return Denied(check_spec(message.spec), reason if isinstance(reason, RejectReason) else RejectReason.NOT_ALLOWED)


def _read_undelivered(message: pb.CoherenceUndelivered) -> Undelivered:
    reason = REASONS.get(message.reason)
    known = reason if isinstance(reason, RejectReason) else RejectReason.NOT_ALLOWED
    return Undelivered(read_message_id(message.id), known)


def _read_touched(message: pb.CoherenceTouched) -> Touched:
    at_most(len(message.specs), PENDING_ITEMS_MAX, "specs")
    return Touched(tuple(check_spec(each) for each in message.specs))


def _read_service(message: pb.CoherenceAnnounce) -> Service:
    return Service(read_system(message.system), check_text(message.name))


def _read_witness(message: pb.CoherenceWitness) -> Witness:
    return Witness(read_arc(message.clock), check_tick(message.tick))


def _read_user_message(message: pb.CoherenceUserMessage) -> UserMessage:
    at_most(len(message.context), CLAUSES_MAX, "clauses")
    for clause in message.context:
        if not 0 < len(clause.witnesses) <= WITNESSES_MAX:
            raise MalformedFrame(f"a clause of {len(clause.witnesses)} witnesses, 1 to {WITNESSES_MAX}")
    context = tuple(tuple(_read_witness(each) for each in clause.witnesses) for clause in message.context)
    return UserMessage(
        read_message_id(message.id),
        check_tick(message.floor),
        read_system(message.target),
        context,
        check_text(message.type),
        check_delta(message.payload),
        message.cross_root,
        check_tick(message.after),
        _check_signature(message.signature),
    )


def _read_backpressure(message: pb.CoherenceBackpressure) -> Backpressure:
    if not math.isfinite(message.retry_after_s) or not 0 <= message.retry_after_s <= RETRY_S_MAX:
        raise MalformedFrame(f"a wait of {message.retry_after_s} s")
    return Backpressure(check_text(message.what), message.retry_after_s)


_KINDS: list[tuple[str, type, Callable[[Any], Any], Callable[[Any], Message]]] = [
    ("attach", Attach, _attach, _read_attach),
    (
        "attached",
        Attached,
        lambda each: pb.CoherenceAttached(
            turn=each.turn,
            system=system_part(each.system),
            tick=each.tick,
            follows=follows_parts(each.follows),
            rejected=[reject_part(told) for told in each.rejected],
        ),
        lambda each: Attached(
            check_numbers(each.turn),
            read_system(each.system),
            check_tick(each.tick),
            read_follows(each.follows),
            read_rejected(each.rejected),
        ),
    ),
    (
        "grant_system_id",
        GrantSystemId,
        lambda each: pb.CoherenceGrantSystemId(nonce=each.nonce, system=system_part(each.system), turn=each.turn),
        lambda each: GrantSystemId(each.nonce, read_system(each.system), check_numbers(each.turn)),
    ),
    (
        "grant_arc",
        GrantArc,
        lambda each: pb.CoherenceGrantArc(arc=arc_part(each.arc), base=each.base),
        _read_grant_arc,
    ),
    (
        "release_arc",
        ReleaseArc,
        lambda each: pb.CoherenceReleaseArc(arc=arc_part(each.arc), batch=each.batch, signature=each.signature),
        lambda each: ReleaseArc(read_arc(each.arc), check_tick(each.batch), _check_signature(each.signature)),
    ),
    (
        "linked",
        Linked,
        lambda each: pb.CoherenceLinked(
            clock=arc_part(each.clock),
            tick=each.tick,
            follows=follows_parts(each.follows),
            rejected=[reject_part(told) for told in each.rejected],
        ),
        lambda each: Linked(
            read_arc(each.clock), check_tick(each.tick), read_follows(each.follows), read_rejected(each.rejected)
        ),
    ),
    (
        "begin_update",
        BeginUpdate,
        _begin,
        lambda each: BeginUpdate(read_arc(each.clock), *check_span(each.prev, each.tick)),
    ),
    ("lane_item", LaneItem, _lane_item, _read_lane_item),
    ("end_update", EndUpdate, _end_update, _read_end_update),
    (
        "null_update",
        NullUpdate,
        _begin,
        lambda each: NullUpdate(read_arc(each.clock), *check_span(each.prev, each.tick)),
    ),
    ("reject_op", RejectOp, reject_part, read_reject),
    (
        "acquire",
        Acquire,
        lambda each: pb.CoherenceAcquire(spec=each.spec, at=each.at, have=each.have),
        lambda each: Acquire(
            check_spec(each.spec), maybe_tick(each, "at"), check_token(each.have) if each.HasField("have") else None
        ),
    ),
    ("grant", Grant, _grant, _read_grant),
    (
        "gone",
        Gone,
        lambda each: pb.CoherenceGone(spec=each.spec, at=each.at, oldest=each.oldest),
        lambda each: Gone(check_spec(each.spec), check_tick(each.at), check_tick(each.oldest)),
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
        lambda each: Pin(maybe_tick(each, "tick")),
    ),
    (
        "notify_replicated",
        NotifyReplicated,
        lambda each: pb.CoherenceNotifyReplicated(
            clock=arc_part(each.clock), batch=each.batch, root=system_part(each.root), tick=each.tick
        ),
        lambda each: NotifyReplicated(
            read_arc(each.clock), check_tick(each.batch), read_system(each.root), check_tick(each.tick)
        ),
    ),
    (
        "wait_for_epoch",
        WaitForEpoch,
        lambda each: pb.CoherenceWitness(clock=arc_part(each.clock), tick=each.tick),
        lambda each: WaitForEpoch(*_read_witness(each)),
    ),
    (
        "announce",
        Announce,
        _announce,
        lambda each: Announce(
            _read_service(each),
            check_tick(each.gen),
            check_tick(each.seq),
            check_delta(each.detail),
            _check_signature(each.signature),
        ),
    ),
    (
        "deannounce",
        Deannounce,
        _announce,
        lambda each: Deannounce(
            _read_service(each), check_tick(each.gen), check_tick(each.seq), _check_signature(each.signature)
        ),
    ),
    (
        "connectivity",
        Connectivity,
        lambda each: pb.CoherenceConnectivity(
            system=system_part(each.system), affects_all_services=each.affects_all_services, turn=each.turn
        ),
        lambda each: Connectivity(read_system(each.system), each.affects_all_services, check_numbers(each.turn)),
    ),
    ("user_message", UserMessage, _user_message, _read_user_message),
    (
        "user_receipt",
        UserReceipt,
        lambda each: pb.CoherenceUserReceipt(
            id=message_id_part(each.id), target=system_part(each.target), signature=each.signature
        ),
        lambda each: UserReceipt(read_message_id(each.id), read_system(each.target), _check_signature(each.signature)),
    ),
    (
        "undelivered",
        Undelivered,
        lambda each: pb.CoherenceUndelivered(id=message_id_part(each.id), reason=each.reason.value),
        _read_undelivered,
    ),
    (
        "user_queued",
        UserQueued,
        lambda each: message_id_part(each.id),
        lambda each: UserQueued(read_message_id(each)),
    ),
    (
        "backpressure",
        Backpressure,
        lambda each: pb.CoherenceBackpressure(what=each.what, retry_after_s=each.retry_after_s),
        _read_backpressure,
    ),
    ("update", Update, _update, _read_update),
]
_BY_TYPE = {type: (kind, encode, decode) for kind, type, encode, decode in _KINDS}
_BY_KIND = {kind: decode for kind, _, _, decode in _KINDS}
