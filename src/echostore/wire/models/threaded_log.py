"""ThreadedLog operations and states <-> protobuf."""

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FEED_ID_BYTES, FeedId, ItemId, Stamp
from echostore.kernel.limits import SEQ_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.threaded_log import (
    LogEntry,
    LogOperation,
    OwnPost,
    Post,
    PostId,
    Retention,
    Retract,
    Revive,
    ThreadedLog,
)
from echostore.kernel.reasons import Reason
from echostore.wire.generated import threaded_log_pb2 as pb
from echostore.wire.values import MalformedValue, decode_value, encode_value

POSITION_MAX = (1 << 16) - 1


def encode_operation(operation: LogOperation) -> pb.ThreadedLogOperation:
    if isinstance(operation, Post):
        return pb.ThreadedLogOperation(post=_encode_post(operation))
    if isinstance(operation, Retention):
        return pb.ThreadedLogOperation(retention=_encode_retention(operation))
    if isinstance(operation, Retract):
        return pb.ThreadedLogOperation(retract=_encode_post_id(operation.post))
    return pb.ThreadedLogOperation(revive=_encode_post_id(operation.post))


def decode_operation(message: pb.ThreadedLogOperation) -> LogOperation:
    kind = message.WhichOneof("kind")
    try:
        if kind == "post":
            return _decode_post(message.post)
        if kind == "retention":
            return _decode_retention(message.retention)
        if kind == "retract":
            return Retract(_decode_post_id(message.retract))
        if kind == "revive":
            return Revive(_decode_post_id(message.revive))
    except MalformedValue as error:
        raise OperationRefused(Reason.MALFORMED, str(error)) from None
    raise OperationRefused(Reason.MALFORMED, "an operation without a kind")


def encode_state(model: ThreadedLog) -> bytes:
    state = pb.ThreadedLogState()
    for entry in model.entries():
        seq, position = entry.changed or (0, 0)
        state.entries.add(
            feed=entry.stamp.feed,
            depth=entry.stamp.depth,
            seq=entry.stamp.seq,
            position=entry.stamp.position,
            time_ms=entry.time_ms,
            post=_encode_post(Post(entry.body, _own_form(entry.reply_to, entry.stamp.feed))),
            retracted=entry.retracted,
            retracted_seq=seq,
            retracted_position=position,
        )
    retentions = model.retentions()
    for feed in sorted(retentions):
        stamp, retention = retentions[feed]
        state.retentions.add(
            feed=feed,
            depth=stamp.depth,
            seq=stamp.seq,
            position=stamp.position,
            retention=_encode_retention(retention),
        )
    return state.SerializeToString(deterministic=True)


def decode_state(item: ItemId, data: bytes) -> ThreadedLog:
    try:
        state = pb.ThreadedLogState.FromString(data)
        entries = [_decode_entry(entry) for entry in state.entries]
        retentions = {
            FeedId(kept.feed): (_decode_stamp(kept), _decode_retention(kept.retention)) for kept in state.retentions
        }
    except (DecodeError, MalformedValue) as error:
        raise Corrupt(f"the state of a ThreadedLog can't be read: {error}") from None
    return ThreadedLog.from_state(item, entries, retentions)


def _encode_post(post: Post) -> pb.Post:
    reply_to = _encode_post_id(post.reply_to) if post.reply_to is not None else None
    return pb.Post(body=encode_value(post.body), reply_to=reply_to)


def _decode_post(message: pb.Post) -> Post:
    reply_to = _decode_post_id(message.reply_to) if message.HasField("reply_to") else None
    return Post(decode_value(message.body), reply_to)


def _encode_post_id(post: PostId | OwnPost) -> pb.PostId:
    feed = post.feed if isinstance(post, PostId) else b""
    return pb.PostId(feed=feed, seq=post.seq, position=post.position)


def _decode_post_id(message: pb.PostId) -> PostId | OwnPost:
    if message.seq > SEQ_MAX or message.position > POSITION_MAX or len(message.feed) not in (0, FEED_ID_BYTES):
        raise MalformedValue("a post id out of range")
    if message.feed:
        return PostId(FeedId(message.feed), message.seq, message.position)
    return OwnPost(message.seq, message.position)


def _own_form(post: PostId | None, feed: FeedId) -> PostId | OwnPost | None:
    """A state says `own` wherever it can, whatever the operation said: one state, one encoding."""
    return OwnPost(post.seq, post.position) if post is not None and post.feed == feed else post


def _encode_retention(retention: Retention) -> pb.Retention:
    return pb.Retention(age_ms_max=retention.age_ms_max, count_max=retention.count_max)


def _decode_retention(message: pb.Retention) -> Retention:
    return Retention(message.age_ms_max, message.count_max)


def _decode_entry(message: pb.LogEntry) -> LogEntry:
    stamp = _decode_stamp(message)
    post = _decode_post(message.post)
    reply_to = post.reply_to.of(stamp.feed) if isinstance(post.reply_to, OwnPost) else post.reply_to
    # A change of mind comes after the post, so (0, 0) means there was none.
    changed = (message.retracted_seq, message.retracted_position)
    return LogEntry(stamp, message.time_ms, post.body, reply_to, message.retracted, changed if any(changed) else None)


def _decode_stamp(message: pb.LogEntry | pb.RetentionEntry) -> Stamp:
    if len(message.feed) != FEED_ID_BYTES:
        raise MalformedValue("a feed id of wrong length")
    return Stamp(message.depth, FeedId(message.feed), message.seq, message.position)
