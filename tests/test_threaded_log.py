"""ThreadedLog: posts, replies, retracting, retention, and the laws of models."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedId, Stamp, item_id
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.threaded_log import (
    LogOperation,
    OwnPost,
    Post,
    PostId,
    Retention,
    Retract,
    Revive,
    ThreadedLog,
    post_id,
)
from echostore.kernel.reasons import Reason
from echostore.wire.models import threaded_log as codec

FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(3)]
ITEM = item_id(FEEDS[0], 3)
BODIES: list[Any] = ["hello", "", None, 7, {"text": "rich", "tags": [1, 2.5]}, b"\x00"]

Entry = tuple[LogOperation, Stamp, int]
STEPS = st.lists(st.tuples(*[st.integers(0, 255)] * 4), min_size=40, max_size=60)


def entries(steps: list[tuple[int, int, int, int]]) -> list[list[Entry]]:
    """Operations per feed. Depths rise with the step, so that the canonical order is causal."""
    written: list[list[Entry]] = [[] for _ in FEEDS]
    posts: list[PostId] = []
    for number, (action, who, a, b) in enumerate(steps):
        who %= len(FEEDS)
        feed = FEEDS[who]
        stamp = Stamp(number // 2 + 1, feed, len(written[who]), a % 2)
        own = [post for post in posts if post.feed == feed]
        operation: LogOperation
        if action < 130 or not own:
            reply: PostId | OwnPost | None = None
            if posts and b < 150:
                reply = posts[b % len(posts)]
                if reply.feed == feed and b % 2:
                    reply = OwnPost(reply.seq, reply.position)
            elif b > 240:
                reply = PostId(FEEDS[2], 10_000 + b, 0)  # never written
            operation = Post(BODIES[a % len(BODIES)], reply)
            posts.append(post_id(stamp))
        elif action < 170:
            operation = Retention(a * 1000, b)
        else:
            target = own[a % len(own)]
            name: PostId | OwnPost = target if b % 2 else OwnPost(target.seq, target.position)
            operation = Retract(name) if action < 215 else Revive(name)
        written[who].append((operation, stamp, 1_000 + number - b))
    return written


def shuffle(written: list[list[Entry]], chance: random.Random) -> list[Entry]:
    """Feeds interleaved at random: more than causal delivery would allow, and the log takes even that."""
    queues = [list(queue) for queue in written]
    order = []
    while any(queues):
        order.append(chance.choice([queue for queue in queues if queue]).pop(0))
    return order


def over_the_wire(operation: LogOperation) -> LogOperation:
    message = codec.encode_operation(operation)
    return codec.decode_operation(type(message).FromString(message.SerializeToString()))


def fold(order: list[Entry], log: ThreadedLog | None = None) -> ThreadedLog:
    log = log or ThreadedLog(ITEM)
    for operation, stamp, time_ms in order:
        log.apply(over_the_wire(operation), stamp, time_ms)
    return log


@given(STEPS, st.integers(0, 1 << 32))
def test_logs_converge_in_every_order(steps: list[tuple[int, int, int, int]], seed: int) -> None:
    chance = random.Random(seed)
    written = entries(steps)
    logs = [fold(shuffle(written, chance)) for _ in range(3)]
    assert len({codec.encode_state(log) for log in logs}) == 1
    assert logs[0].value() == logs[1].value() == logs[2].value()
    assert logs[0].threads() == logs[1].threads()


@given(STEPS, st.integers(0, 1 << 32))
def test_a_restored_log_continues_as_the_original(steps: list[tuple[int, int, int, int]], seed: int) -> None:
    chance = random.Random(seed)
    order = shuffle(entries(steps), chance)
    cut = chance.randrange(len(order) + 1)
    original = fold(order[:cut])
    state = codec.encode_state(original)
    restored = codec.decode_state(ITEM, state)
    assert codec.encode_state(restored) == state
    assert restored.value() == original.value()
    fold(order[cut:], original)
    fold(order[cut:], restored)
    assert codec.encode_state(restored) == codec.encode_state(original)
    assert restored.threads() == original.threads()


@given(STEPS, st.integers(0, 1 << 32))
def test_the_log_agrees_with_a_slow_reading_of_all_operations(
    steps: list[tuple[int, int, int, int]], seed: int
) -> None:
    written = entries(steps)
    log = fold(shuffle(written, random.Random(seed)))
    everything = sorted((entry for queue in written for entry in queue), key=lambda entry: entry[1])
    retracted = {}
    for operation, stamp, _ in sorted(everything, key=lambda entry: (entry[1].feed, entry[1].seq)):
        if isinstance(operation, Retract | Revive):
            name = operation.post
            name = name.of(stamp.feed) if isinstance(name, OwnPost) else name
            retracted[name] = isinstance(operation, Retract)
    expected = [
        (str(post_id(stamp)), time_ms, operation.body)
        for operation, stamp, time_ms in everything
        if isinstance(operation, Post) and not retracted.get(post_id(stamp))
    ]
    assert [(post["id"], post["time_ms"], post["body"]) for post in log.value()] == expected
    settings = [operation for operation, _, _ in everything if isinstance(operation, Retention)]
    assert log.retention == (settings[-1] if settings else Retention())
    shown: list[str] = []
    pending = list(reversed(log.threads()))
    while pending:
        thread = pending.pop()
        shown.append(str(thread.entry.id))
        pending.extend(reversed(thread.replies))
    assert sorted(shown) == sorted(name for name, _, _ in expected)


def at(feed: int, seq: int, depth: int | None = None) -> Stamp:
    return Stamp(depth if depth is not None else seq + 1, FEEDS[feed], seq, 0)


def test_replies_form_threads() -> None:
    log = ThreadedLog(ITEM)
    log.apply(Post("question"), at(0, 0), 1)
    log.apply(Post("answer", PostId(FEEDS[0], 0, 0)), at(1, 0, 2), 2)
    log.apply(Post("thanks", PostId(FEEDS[1], 0, 0)), at(0, 1, 3), 3)
    log.apply(Post("other"), at(2, 0, 4), 4)
    first, second = log.threads()
    assert first.entry.body == "question"
    assert first.replies[0].replies[0].entry.body == "thanks"
    assert second.entry.body == "other"


def test_a_reply_to_a_missing_or_retracted_post_dangles() -> None:
    log = ThreadedLog(ITEM)
    log.apply(Post("early", PostId(FEEDS[0], 0, 0)), at(1, 0, 2), 2)
    assert log.value()[0]["dangling"]
    log.apply(Post("late"), at(0, 0, 1), 1)
    assert [post["dangling"] for post in log.value()] == [False, False]
    log.apply(Retract(OwnPost(0, 0)), at(0, 1), 3)
    assert [(post["body"], post["dangling"]) for post in log.value()] == [("early", True)]
    log.apply(Revive(OwnPost(0, 0)), at(0, 2), 4)
    assert [post["body"] for post in log.value()] == ["late", "early"]


def test_posts_that_reply_to_each_other_do_not_close_a_circle() -> None:
    log = ThreadedLog(ITEM)
    log.apply(Post("a", PostId(FEEDS[1], 0, 0)), at(0, 0, 1), 1)
    log.apply(Post("b", PostId(FEEDS[0], 0, 0)), at(1, 0, 2), 1)
    (thread,) = log.threads()
    assert thread.dangling
    assert thread.replies[0].entry.body == "b"


def test_only_its_writer_retracts_a_post() -> None:
    log = ThreadedLog(ITEM)
    log.apply(Post("mine"), at(0, 0), 1)
    for operation in (Retract(PostId(FEEDS[0], 0, 0)), Revive(PostId(FEEDS[0], 0, 0))):
        with pytest.raises(OperationRefused) as refused:
            log.apply(operation, at(1, 0), 2)
        assert refused.value.reason is Reason.DENIED
    assert len(log.value()) == 1


def test_retracting_what_is_not_there_and_posting_twice_are_refused() -> None:
    log = ThreadedLog(ITEM)
    log.apply(Post("once"), at(0, 0), 1)
    state = codec.encode_state(log)
    with pytest.raises(OperationRefused) as refused:
        log.apply(Retract(OwnPost(9, 0)), at(0, 1), 2)
    assert refused.value.reason is Reason.BUILDS_ON_EXCLUDED
    with pytest.raises(OperationRefused) as refused:
        log.apply(Post("twice"), at(0, 0), 1)
    assert refused.value.reason is Reason.DUPLICATE
    assert codec.encode_state(log) == state


def test_the_latest_retention_in_canonical_order_holds() -> None:
    log = ThreadedLog(ITEM)
    assert log.retention == Retention()
    log.apply(Retention(5, 0), at(1, 0, 9), 1)
    log.apply(Retention(7, 1), at(0, 0, 4), 1)
    assert log.retention == Retention(5, 0)


def test_malformed_operations_are_refused() -> None:
    message = codec.encode_operation(Post("x", PostId(FEEDS[0], 1, 0)))
    bad = type(message)()
    with pytest.raises(OperationRefused) as refused:
        codec.decode_operation(bad)
    assert refused.value.reason is Reason.MALFORMED
    message.post.reply_to.feed = b"short"
    with pytest.raises(OperationRefused):
        codec.decode_operation(message)
    message.post.reply_to.feed = FEEDS[0]
    message.post.reply_to.seq = 1 << 60
    with pytest.raises(OperationRefused):
        codec.decode_operation(message)
    message.post.ClearField("reply_to")
    message.post.ClearField("body")
    with pytest.raises(OperationRefused):
        codec.decode_operation(message)
    with pytest.raises(Corrupt):
        codec.decode_state(ITEM, b"\xff\xff")
