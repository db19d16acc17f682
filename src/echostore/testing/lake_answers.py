"""What a real peer says of the blocks in a lake: the answers that the Spark pipeline is measured by.

    lake ──► ranges under heads ──► PartySyncPort.ingest ──► a peer's stores and processor ──► snapshot().cid, rejected()

The peer is an observer: it has asked to join each party and was never admitted, so nothing it holds of its own is part
of any state. It gets control feeds first and then the data feeds side by side, as replication would bring them.

Two things a peer can't say of a lake, because it has no lake: what it would not hold (`unheld`, with the answer that
`ingest` gave), and a fork that nobody has proven yet. A member who sees both branches proves the fork, whereby the
party changes; the answer for the lake *as it is* is that of a peer who has seen neither branch.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

import echostore
from echostore.kernel.errors import Corrupt, StorageFailed
from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedId, FeedKey, Link, PartyKey, feed_id
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX
from echostore.kernel.order import CONTROL, DATA, Envelope
from echostore.kernel.party.credentials import PartyGenesis
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.port import Rejection
from echostore.peer.identity import Welcome
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.pipeline.lake import Lake, LakeVersion
from echostore.pipeline.lake.reading import read_rows
from echostore.store.instance import forget_instance
from echostore.wire.credentials import verify_credentials
from echostore.wire.messages import decode_envelope

_COLUMNS = ("seq", "link", "payload", "signature")
_NOT_PROCESSED = frozenset({Reason.INVALID, Reason.AFTER_INVALID})


@dataclass(frozen=True, slots=True)
class Unheld:
    """Blocks of a feed that are in the lake and that no peer would hold; the reason is that of the first of them."""

    feed: FeedKey
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row of `party.rejected()`, with the whole key of its feed."""

    feed: FeedKey
    seq: int
    position: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PartyAnswer:
    """One party. messages = applied + rejected blocks + waiting + branches + unheld."""

    party: PartyKey
    cid: str
    items: int
    messages: int
    """Data blocks in the lake, each branch of a fork counted."""
    applied: int
    """Blocks in the state; single operations of theirs may be rejected."""
    waiting: int
    """Held blocks at and after one that lacks a dependency."""
    branches: int
    """Blocks of second branches, which are evidence and no more."""
    rejected: tuple[Rejected, ...]
    unheld: tuple[Unheld, ...]
    rejected_blocks: int
    """Blocks that the rejects stand for: the one of a forked feed is about all its blocks from there on."""


def lake_answers(
    lake: Lake,
    home: Path,
    *,
    version: int | None = None,
    parties: Collection[bytes] | None = None,
    models: Iterable[type[Any]] = (),
) -> Iterator[PartyAnswer]:
    """The answer for each party with control feeds of its own, ascending by key.

    `home` is made for the observer, and may be deleted afterwards; `models` are those of applications that it knows.
    """
    at = lake.at(version)
    runs = at.runs(parties)
    by_party: dict[bytes, list[dict[str, Any]]] = defaultdict(list)
    for run in runs.to_pylist():
        by_party[run["party"]].append(run)
    with echostore.open(home, name="observer", background=False) as peer:
        try:
            for model in models:
                peer.models.register(model)
            for party, found in sorted(by_party.items()):
                if any(run["control"] for run in found):
                    yield _Observation(peer, PartyKey(party), at, found).answer()
                    peer.forget_party(PartyKey(party))  # so many parties are never open at once
        finally:
            forget_instance(peer.home)


@dataclass(slots=True)
class _Feed:
    """The runs of one feed: those of the branch that comes first, and the others."""

    key: FeedKey
    kind: str
    main: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fork(self) -> int | None:
        return min((run["start"] for run in self.others), default=None)


class _Observation:
    def __init__(self, peer: Peer, party: PartyKey, at: LakeVersion, runs: list[dict[str, Any]]) -> None:
        self._peer = peer
        self._lake = at.lake.path
        self._unheld: list[Unheld] = []
        self._feeds: dict[FeedKey, _Feed] = {}
        for run in runs:
            key = FeedKey(run["feed"])
            feed = self._feeds.setdefault(key, _Feed(key, CONTROL if run["control"] else DATA))
            reached = max((known["end"] for known in feed.main), default=0)
            (feed.main if run["start"] >= reached else feed.others).append(run)
        self._party = self._enter(party)
        self._port = peer.sync_port(party)

    def answer(self) -> PartyAnswer:
        control = [feed for feed in self._feeds.values() if feed.kind == CONTROL]
        # A feed may be admitted by another that comes later: those that were refused are tried again.
        waiting = sorted(control, key=lambda feed: feed.key != self._genesis)
        while waiting:
            refused = [feed for feed in waiting if not self._give([feed], again=True)]
            if len(refused) == len(waiting):
                break
            waiting = refused
        self._give(waiting)
        self._give([feed for feed in self._feeds.values() if feed.kind == DATA])
        return self._collected()

    def _enter(self, party: PartyKey) -> Party:
        for feed in self._feeds.values():
            if feed.kind == CONTROL and feed.main[0]["start"] == 0:
                rows = next(read_rows(self._lake, feed.main[0]["file"], feed.main[0]["row"], feed.main[0]["row"] + 1))
                envelope = decode_envelope(rows["payload"][0].as_py(), CONTROL)
                credentials = envelope.body.credentials if isinstance(envelope, Envelope) else ()
                for verified in verify_credentials(credentials, party):
                    said = verified.claim.assertion if verified.claim is not None else None
                    if isinstance(said, PartyGenesis) and verified.fault is None:
                        self._genesis = feed.key
                        self._peer.request_join(party)
                        return self._peer.enter(Welcome(party, feed.key, said.title))
        raise Corrupt(f"no control feed of party {party.hex()} in the lake begins with its genesis")

    # giving

    def _give(self, feeds: list[_Feed], *, again: bool = False) -> bool:
        """Hand feeds over side by side, so that little waits. False when the first was refused and will be tried again."""
        proven = self._party.runtime.processor.membership.machine.forks
        todo: deque[tuple[_Feed, Iterator[_Range]]] = deque()
        for feed in feeds:
            limit = None if feed.fork is None or feed.key in proven else feed.fork
            todo.append((feed, self._ranges(feed.main, limit)))
            if limit is not None:
                end = max(run["end"] for run in feed.main)
                self._unheld.append(Unheld(feed.key, limit, end, Reason.FORK))
        while todo:
            feed, ranges = todo.popleft()
            received = next(ranges, None)
            if received is None:
                continue
            refused = self._ingest(feed, received)
            if refused is None:
                todo.append((feed, ranges))
                continue
            start, reason = refused
            if again and reason is Reason.UNADMITTED:
                return False
            self._unheld.append(Unheld(feed.key, start, max(run["end"] for run in feed.main), reason))
        for feed in feeds:
            if feed.fork is not None and feed.key in proven:
                for run in feed.others:
                    for received in self._ranges([run], None):
                        self._ingest(feed, received)
        return True

    def _ingest(self, feed: _Feed, received: "_Range") -> tuple[int, Reason] | None:
        """None when the range was taken in, or kept as evidence; else from where on it was not."""
        if self._offer(feed, *received.whole()) is None:
            return None
        for part in received.parts():
            reason = self._offer(feed, *part)
            if reason is not None:
                return part[0], reason
        return None

    def _offer(self, feed: _Feed, start: int, payloads: list[bytes], head: Head) -> Reason | None:
        result = self._port.ingest(feed.key, feed.kind, start, payloads, head)
        if not isinstance(result, Rejection) or result.reason is Reason.FORK:
            return None
        if result.reason is Reason.WAITING:
            raise StorageFailed("the observer's disk does not take more blocks")
        return result.reason

    def _ranges(self, runs: list[dict[str, Any]], limit: int | None) -> Iterator["_Range"]:
        """The blocks of runs, cut at heads, as much at a time as a peer takes. Blocks after the last head are left out:
        no peer can hold them, and where they are it says so."""
        for run in runs:
            waiting = _Range(run["start"])
            rows = read_rows(self._lake, run["file"], run["row"], run["row"] + run["end"] - run["start"], _COLUMNS)
            for batch in rows:
                for seq, link, payload, signature in zip(*[_column(batch, name) for name in _COLUMNS], strict=True):
                    if limit is not None and seq >= limit:
                        break
                    waiting.add(payload)
                    if signature is not None:
                        waiting.heads.append(Head(seq + 1, Link(link), signature))
                        if waiting.full:
                            yield waiting
                            waiting = _Range(seq + 1)
            if waiting.heads:
                yield waiting

    # what came of it

    def _collected(self) -> PartyAnswer:
        party = self._party
        snapshot = party.snapshot()
        processor = party.runtime.processor
        keys = {feed_id(key): key for key in self._feeds}
        rejected = tuple(
            Rejected(keys[FeedId(reject.feed)], reject.seq, reject.position, str(reject.reason), reject.detail)
            for reject in party.rejected()
        )
        data = [feed for feed in self._feeds.values() if feed.kind == DATA]
        cursors = [cursor for feed in data if (cursor := processor.orderer.cursors.get(feed_id(feed.key))) is not None]
        lengths = {cursor.key: cursor.length for cursor in cursors}
        blocks = [
            (reject.reason, max(0, lengths[reject.feed] - reject.seq) if reject.reason == "fork" else 1)
            for reject in rejected
            if reject.position < 0 and (reject.reason != "fork" or reject.feed in lengths)
        ]
        excluded = sum(count for reason, count in blocks if reason not in _NOT_PROCESSED)
        return PartyAnswer(
            party=party.key,
            cid=snapshot.cid,
            items=snapshot.item_count,
            messages=sum(run["end"] - run["start"] for feed in data for run in (*feed.main, *feed.others)),
            applied=sum(cursor.length for cursor in cursors) - excluded,
            waiting=sum(cursor.held - cursor.length for cursor in cursors if cursor.waits_for is not None),
            branches=sum(run["end"] - run["start"] for feed in data for run in feed.others),
            rejected=tuple(sorted(rejected, key=lambda reject: (reject.feed, reject.seq, reject.position))),
            unheld=tuple(sorted(self._unheld, key=lambda each: (each.feed, each.start))),
            rejected_blocks=sum(count for _, count in blocks),
        )


@dataclass(slots=True)
class _Range:
    """Consecutive blocks with the heads among them; the last head covers all that is handed over."""

    start: int
    payloads: list[bytes] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    size: int = 0

    def add(self, payload: bytes) -> None:
        self.payloads.append(payload)
        self.size += len(payload)

    @property
    def full(self) -> bool:
        """Half of what one range may have: the next head is no farther away."""
        return len(self.payloads) >= APPEND_BLOCKS_MAX // 2 or self.size >= APPEND_BYTES_MAX // 2

    @property
    def end(self) -> int:
        return self.heads[-1].length

    def whole(self) -> tuple[int, list[bytes], Head]:
        return self.start, self.payloads[: self.end - self.start], self.heads[-1]

    def parts(self) -> Iterator[tuple[int, list[bytes], Head]]:
        """Head by head: what is good of a range that was refused as a whole."""
        start = self.start
        for head in self.heads:
            yield start, self.payloads[start - self.start : head.length - self.start], head
            start = head.length


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    values: list[Any] = batch[name].to_pylist()
    return values
