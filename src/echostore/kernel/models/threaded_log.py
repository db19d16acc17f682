"""ThreadedLog: posts with replies, append-only; the messenger among the models.

A post is named by the operation that wrote it. Its writer, and nobody else, may retract it and revive it again (undo
and redo): a retracted post is kept but not shown. A reply to a post that is not there, or not shown, dangles: it is
kept and shown as such. What an epoch may discard is a setting of the log, last writer wins.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, assert_never

from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.models.base import Horizon, OperationRefused, Wait
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Value


class PostId(NamedTuple):
    """Where the operation that wrote a post stands."""

    feed: FeedId
    seq: int
    position: int

    def __str__(self) -> str:
        return f"{self.feed.hex()}/{self.seq}/{self.position}"


class OwnPost(NamedTuple):
    """A post of the feed that names it: in its operations it leaves its own id out."""

    seq: int
    position: int

    def of(self, feed: FeedId) -> PostId:
        return PostId(feed, self.seq, self.position)


@dataclass(frozen=True, slots=True)
class Post:
    body: Value
    reply_to: PostId | OwnPost | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """What an epoch may discard: posts older than this, posts beyond this many. Zero means no limit."""

    age_ms_max: int = 0
    count_max: int = 0


@dataclass(frozen=True, slots=True)
class Retract:
    post: PostId | OwnPost


@dataclass(frozen=True, slots=True)
class Revive:
    post: PostId | OwnPost


LogOperation = Post | Retention | Retract | Revive


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A post as it stands. `changed` is the (seq, position) at which its writer last retracted or revived it."""

    stamp: Stamp
    time_ms: int
    body: Value
    reply_to: PostId | None
    retracted: bool = False
    changed: tuple[int, int] | None = None

    @property
    def id(self) -> PostId:
        return post_id(self.stamp)


@dataclass(frozen=True, slots=True)
class Thread:
    """A post and the replies to it, in canonical order. `dangling`: it replies to what is not shown."""

    entry: LogEntry
    dangling: bool
    replies: "list[Thread]" = field(default_factory=list)


class ThreadedLog:
    name: ClassVar[str] = "threaded-log"
    version: ClassVar[int] = 1

    def __init__(self, item: ItemId) -> None:
        self.item = item
        self._entries: dict[PostId, LogEntry] = {}
        self._retentions: dict[FeedId, tuple[Stamp, Retention]] = {}  # the last one of each feed
        self._ordered: list[LogEntry] | None = []  # None: to be sorted again

    @classmethod
    def from_state(
        cls, item: ItemId, entries: list[LogEntry], retentions: dict[FeedId, tuple[Stamp, Retention]]
    ) -> "ThreadedLog":
        log = cls(item)
        log._entries = {entry.id: entry for entry in entries}
        log._retentions = dict(retentions)
        log._ordered = None
        return log

    def apply(self, operation: LogOperation, stamp: Stamp, time_ms: int) -> None:
        if isinstance(operation, Post):
            self._post(operation, stamp, time_ms)
        elif isinstance(operation, Retention):
            last = self._retentions.get(stamp.feed)
            if last is None or last[0] < stamp:
                self._retentions[stamp.feed] = (stamp, operation)
        elif isinstance(operation, Retract | Revive):
            self._change(operation.post, stamp, retracted=isinstance(operation, Retract))
        else:
            assert_never(operation)

    def entries(self) -> list[LogEntry]:
        """Every post, the retracted ones as well, in canonical order."""
        if self._ordered is None:
            self._ordered = sorted(self._entries.values(), key=lambda entry: entry.stamp)
        return self._ordered

    @property
    def post_count(self) -> int:
        """Posts, the retracted ones as well."""
        return len(self._entries)

    def get(self, post: PostId) -> LogEntry | None:
        return self._entries.get(post)

    def retentions(self) -> dict[FeedId, tuple[Stamp, Retention]]:
        return self._retentions

    @property
    def retention(self) -> Retention:
        return max(self._retentions.values(), key=lambda kept: kept[0])[1] if self._retentions else Retention()

    def value(self) -> list[dict[str, Any]]:
        """The posts that are shown, in canonical order."""
        return [
            {
                "id": str(entry.id),
                "author": entry.stamp.feed.hex(),
                "time_ms": entry.time_ms,
                "body": entry.body,
                "reply_to": str(entry.reply_to) if entry.reply_to else None,
                "dangling": self._dangles(entry),
            }
            for entry in self.entries()
            if not entry.retracted
        ]

    def threads(self) -> list[Thread]:
        """The posts that are shown as trees, roots in canonical order; a dangling reply is a root."""
        threads: dict[PostId, Thread] = {}
        roots = []
        for entry in self.entries():
            if entry.retracted:
                continue
            dangling = self._dangles(entry)
            thread = threads[entry.id] = Thread(entry, dangling)
            if entry.reply_to is None or dangling:
                roots.append(thread)
            else:
                threads[entry.reply_to].replies.append(thread)
        return roots

    def discard(self, horizon: Horizon) -> bool:
        """Lose the posts that the retention lets go; whether there were any. A retention that is not stable waits."""
        if not self._retentions:
            return False
        set_at, retention = max(self._retentions.values(), key=lambda kept: kept[0])
        if not horizon.covers(set_at):
            return False
        ordered = self.entries()
        beyond = len(ordered) - retention.count_max if retention.count_max else 0
        gone = [
            entry.id
            for number, entry in enumerate(ordered)
            if _settled(entry, horizon) and _outlived(entry, horizon.before_ms, retention, beyond=number < beyond)
        ]
        for post in gone:
            del self._entries[post]
        if gone:
            self._ordered = None
        return bool(gone)

    def waits(self, horizon: Horizon) -> list[Wait]:
        """After `discard(horizon)`: what is to be over before another horizon can take more of the log as it is.

        One for each feed, by the first seq and the first time among its posts: a little early where these are of two posts.
        """
        if not self._retentions:
            return []
        set_at, retention = max(self._retentions.values(), key=lambda kept: kept[0])
        if not horizon.covers(set_at):
            return [Wait(set_at.feed, set_at.seq, -1)]
        ordered = self.entries()
        beyond = len(ordered) - retention.count_max if retention.count_max else 0
        found: dict[FeedId, Wait] = {}
        for number, entry in enumerate(ordered):
            lasts_ms = [*([0] if number < beyond else ()), *([retention.age_ms_max] if retention.age_ms_max else ())]
            if not lasts_ms:
                break
            seq, time_ms = _last_seq(entry), entry.time_ms + min(lasts_ms)
            known = found.get(entry.stamp.feed, Wait(entry.stamp.feed, seq, time_ms))
            found[entry.stamp.feed] = Wait(known.feed, min(seq, known.seq), min(time_ms, known.time_ms))
        return list(found.values())

    def _dangles(self, entry: LogEntry) -> bool:
        """A reply to a later post dangles too: only a forger writes one, and it could close a circle."""
        if entry.reply_to is None:
            return False
        parent = self._entries.get(entry.reply_to)
        return parent is None or parent.retracted or parent.stamp >= entry.stamp

    def _post(self, post: Post, stamp: Stamp, time_ms: int) -> None:
        entry = LogEntry(stamp, time_ms, post.body, _resolved(post.reply_to, stamp.feed))
        if entry.id in self._entries:
            raise OperationRefused(Reason.DUPLICATE, str(entry.id))
        self._entries[entry.id] = entry
        ordered = self._ordered
        if ordered is not None:
            if not ordered or ordered[-1].stamp < stamp:
                ordered.append(entry)
            else:
                self._ordered = None

    def _change(self, post: PostId | OwnPost, stamp: Stamp, *, retracted: bool) -> None:
        name = _resolved(post, stamp.feed)
        assert name is not None
        if name.feed != stamp.feed:
            raise OperationRefused(Reason.DENIED, "only its writer may retract or revive a post")
        entry = self._entries.get(name)
        if entry is None:
            raise OperationRefused(Reason.BUILDS_ON_EXCLUDED, f"no post {name}")
        place = (stamp.seq, stamp.position)
        if entry.changed is None or entry.changed < place:
            self._entries[name] = replace(entry, retracted=retracted, changed=place)
            self._ordered = None


def _settled(entry: LogEntry, horizon: Horizon) -> bool:
    """Whether a post and what its writer last did to it are stable."""
    return horizon.covers(entry.stamp._replace(seq=_last_seq(entry)))


def _last_seq(entry: LogEntry) -> int:
    return max(entry.changed[0] if entry.changed is not None else 0, entry.stamp.seq)


def _outlived(entry: LogEntry, before_ms: int, retention: Retention, *, beyond: bool) -> bool:
    aged = bool(retention.age_ms_max) and entry.time_ms < before_ms - retention.age_ms_max
    return aged or (beyond and entry.time_ms < before_ms)


def post_id(stamp: Stamp) -> PostId:
    return PostId(stamp.feed, stamp.seq, stamp.position)


def _resolved(post: PostId | OwnPost | None, feed: FeedId) -> PostId | None:
    return post.of(feed) if isinstance(post, OwnPost) else post
