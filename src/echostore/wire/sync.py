"""Session frames <-> protobuf. The transport adds lengths and encryption, and cuts what is longer than its own frames.

Decoding is where the other side's bytes come in: whatever is wrong with them raises `MalformedFrame`, never more, and
the size is checked before anything is parsed. No hash or signature is checked here.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

from google.protobuf.message import DecodeError, EncodeError

from echostore.kernel.feed import Head
from echostore.kernel.ids import KEY_BYTES, LINK_BYTES, FeedKey, Link
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, SEQ_MAX
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.sync.frames import (
    ACKS_PER_FRAME_MAX,
    FORK_PROOFS_MAX,
    TIPS_PER_FRAME_MAX,
    Ack,
    AckEntry,
    Announce,
    Blocks,
    FeedTip,
    Frame,
    Hello,
    Refusal,
    RefusalReason,
    Request,
    Tip,
)
from echostore.wire.cids import is_cid
from echostore.wire.generated import sync_pb2 as pb
from echostore.wire.signing import SIGNATURE_BYTES

FRAME_BYTES_MAX = APPEND_BYTES_MAX + 64 * 1024
"""The longest range under one head, and the few bytes around each of its blocks."""

_PROOF_BYTES = 32
_CONTROL_FLAG, _BRANCH_FLAG = 1, 2
_REFUSALS = {
    RefusalReason.BUSY: pb.SyncRefusal.BUSY,
    RefusalReason.UNKNOWN_FEED: pb.SyncRefusal.UNKNOWN_FEED,
    RefusalReason.OVERSIZE: pb.SyncRefusal.OVERSIZE,
    RefusalReason.COMPACTED: pb.SyncRefusal.COMPACTED,
}
_REFUSAL_REASONS = {number: reason for reason, number in _REFUSALS.items()}


class MalformedFrame(ValueError):
    """Bytes that are no frame, or a frame beyond a limit."""


def encode_frame(frame: Frame) -> bytes:
    match frame:
        case Hello(version, tips, proofs):
            message = pb.SyncFrame(hello=pb.SyncHello(version=version, tips=_tips(tips), fork_proofs=b"".join(proofs)))
        case Announce(tips):
            message = pb.SyncFrame(announce=_tips(tips))
        case Request(number, feed, start, blocks_max, bytes_max, toward):
            message = pb.SyncFrame(
                request=pb.SyncRequest(
                    number=number, feed=feed, start=start, blocks_max=blocks_max, bytes_max=bytes_max, toward=toward
                )
            )
        case Blocks(feed, start, payloads, head, more):
            assert head.length == frame.end, f"a range ends at {frame.end}, its head at {head.length}"
            message = pb.SyncFrame(
                blocks=pb.SyncBlocks(
                    feed=feed,
                    start=start,
                    payloads=payloads,
                    head_link=head.link,
                    head_signature=head.signature,
                    more=more,
                )
            )
        case Refusal(feed, start, reason, bytes_needed, evidence):
            message = pb.SyncFrame(
                refusal=pb.SyncRefusal(
                    feed=feed, start=start, reason=_REFUSALS[reason], bytes_needed=bytes_needed, evidence=evidence
                )
            )
        case Ack(entries):
            message = pb.SyncFrame(
                ack=pb.SyncAck(
                    feeds=b"".join(entry.feed for entry in entries),
                    held=[entry.held for entry in entries],
                    processed=[entry.processed for entry in entries],
                    heard=b"".join(entry.heard for entry in entries),
                )
            )
        case _:
            assert_never(frame)
    return message.SerializeToString()


def decode_frame(data: bytes) -> Frame:
    """The frame in these bytes; MalformedFrame says what is wrong with them."""
    if len(data) > FRAME_BYTES_MAX:
        raise MalformedFrame(f"{len(data)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        message = pb.SyncFrame.FromString(data)
    except (DecodeError, EncodeError) as error:
        raise MalformedFrame("undecodable") from error
    kind = message.WhichOneof("kind")
    if kind == "blocks":
        return _decode_blocks(message.blocks)
    if kind == "ack":
        return _decode_ack(message.ack)
    if kind == "announce":
        return Announce(_decode_tips(message.announce))
    if kind == "request":
        return _decode_request(message.request)
    if kind == "hello":
        proofs = _split(message.hello.fork_proofs, _PROOF_BYTES, FORK_PROOFS_MAX)
        return Hello(message.hello.version, _decode_tips(message.hello.tips), tuple(proofs))
    if kind == "refusal":
        return _decode_refusal(message.refusal)
    raise MalformedFrame("a frame without a kind")


def _tips(tips: Iterable[FeedTip]) -> pb.SyncTips:
    tips = tuple(tips)
    return pb.SyncTips(
        feeds=b"".join(each.feed for each in tips),
        lengths=[each.tip.length for each in tips],
        links=b"".join(each.tip.link for each in tips),
        flags=bytes((each.kind == CONTROL) * _CONTROL_FLAG | each.branch * _BRANCH_FLAG for each in tips),
    )


def _decode_tips(message: pb.SyncTips) -> tuple[FeedTip, ...]:
    feeds = _split(message.feeds, KEY_BYTES, TIPS_PER_FRAME_MAX)
    links = _split(message.links, LINK_BYTES, TIPS_PER_FRAME_MAX)
    lengths, flags = message.lengths, message.flags
    if not len(feeds) == len(links) == len(lengths) == len(flags):
        raise MalformedFrame("tips with unequal columns")
    _check_lengths(lengths)
    if any(flag > _CONTROL_FLAG | _BRANCH_FLAG for flag in flags):
        raise MalformedFrame("a tip with an unknown flag")
    return tuple(
        FeedTip(
            FeedKey(feed), CONTROL if flag & _CONTROL_FLAG else DATA, Tip(length, Link(link)), bool(flag & _BRANCH_FLAG)
        )
        for feed, length, link, flag in zip(feeds, lengths, links, flags, strict=True)
    )


def _decode_request(message: pb.SyncRequest) -> Request:
    _check_lengths([message.start])
    if not message.blocks_max or not message.bytes_max:
        raise MalformedFrame("a request for nothing")
    return Request(
        message.number,
        _feed(message.feed),
        message.start,
        message.blocks_max,
        message.bytes_max,
        Link(_exactly(message.toward, LINK_BYTES)),
    )


def _decode_blocks(message: pb.SyncBlocks) -> Blocks:
    payloads = tuple(message.payloads)
    if not 0 < len(payloads) <= APPEND_BLOCKS_MAX:
        raise MalformedFrame(f"a range of {len(payloads)} blocks, at most {APPEND_BLOCKS_MAX}")
    if sum(map(len, payloads)) > APPEND_BYTES_MAX:
        raise MalformedFrame(f"a range of more than {APPEND_BYTES_MAX} bytes")
    end = message.start + len(payloads)
    _check_lengths([end])
    link = Link(_exactly(message.head_link, LINK_BYTES))
    head = Head(end, link, _exactly(message.head_signature, SIGNATURE_BYTES))
    return Blocks(_feed(message.feed), message.start, payloads, head, message.more)


def _decode_refusal(message: pb.SyncRefusal) -> Refusal:
    _check_lengths([message.start])
    # A reason of a later version: the request will not be answered, which is what BUSY means too.
    reason = _REFUSAL_REASONS.get(message.reason, RefusalReason.BUSY)
    if message.evidence and not is_cid(message.evidence):
        raise MalformedFrame("a refusal with something that is no CID")
    return Refusal(_feed(message.feed), message.start, reason, message.bytes_needed, message.evidence)


def _decode_ack(message: pb.SyncAck) -> Ack:
    feeds = _split(message.feeds, KEY_BYTES, ACKS_PER_FRAME_MAX)
    heard = _split(message.heard, LINK_BYTES, ACKS_PER_FRAME_MAX)
    if not len(feeds) == len(heard) == len(message.held) == len(message.processed):
        raise MalformedFrame("acks with unequal columns")
    _check_lengths(message.held)
    _check_lengths(message.processed)
    columns = zip(feeds, message.held, message.processed, heard, strict=True)
    return Ack(tuple(AckEntry(FeedKey(feed), held, done, Link(link)) for feed, held, done, link in columns))


def _feed(data: bytes) -> FeedKey:
    return FeedKey(_exactly(data, KEY_BYTES))


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise MalformedFrame(f"{len(data)} bytes where {size} belong")
    return data


def _split(data: bytes, size: int, count_max: int) -> list[bytes]:
    if len(data) % size or len(data) > size * count_max:
        raise MalformedFrame(f"a column of {len(data)} bytes, of {size} each and at most {count_max}")
    return [data[at : at + size] for at in range(0, len(data), size)]


def _check_lengths(lengths: Sequence[int]) -> None:
    if any(length > SEQ_MAX + 1 for length in lengths):
        raise MalformedFrame(f"a length above {SEQ_MAX + 1}")
