"""The feeds of a home as runs of blocks: the held branch of each feed, and what other branches add to it.

A home is opened read-only, beside a peer that writes it. What a run names is durable before it is seen here, so a
reader never gets half an append. Used by `publish` and by the source over a home.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError

from echostore.kernel.errors import NotFound
from echostore.kernel.feed import Block
from echostore.kernel.ids import FeedKey, Link, PartyKey
from echostore.kernel.limits import DEPTH_MAX
from echostore.pipeline import schemas
from echostore.pipeline.lake.strands import Run
from echostore.store.feed_store import FeedStore, HeldFeed
from echostore.store.fork_evidence import Branch
from echostore.store.home import Home
from echostore.wire.generated import message_pb2 as pb

BATCH_ROWS = 4096
BATCH_BYTES = 8 * 1024 * 1024
"""Payloads of one batch, about: what a reader keeps in memory."""


def open_feeds(home: Home, party: PartyKey) -> FeedStore | None:
    """The feeds of one party, read-only; None when the party is gone or not made yet."""
    try:
        return FeedStore(home.party(party).feeds, party, writable=False)
    except NotFound:
        return None


def claimed_depth(payload: bytes) -> int:
    """The depth that a message claims; 0 when it can't be decoded or claims none that can be true."""
    try:
        depth: int = pb.Message.FromString(payload).depth
    except (DecodeError, ValueError):
        return 0
    return depth if 0 < depth <= DEPTH_MAX else 0


@dataclass(frozen=True, slots=True)
class HomeRun:
    """A run of a feed in a home. `branch` counts the kept branches from 0; None is the held one."""

    run: Run
    branch: int | None


class HomeFeed:
    """One feed of a home at one moment."""

    def __init__(self, store: FeedStore, feed: HeldFeed) -> None:
        self.store = store
        self.key: FeedKey = feed.key
        self.control = feed.kind == "control"
        self.beginning: int = feed.base
        """Blocks before this one were deleted here, below an epoch."""
        self._held = feed
        self._branches: Sequence[Branch] = store.branches(feed.key)
        self.runs = self._find_runs()

    def link_at(self, index: int, seq: int) -> bytes | None:
        """The link of a block of one of the runs, or of the block before it."""
        found = self.runs[index]
        if found.branch is None:
            return self.store.link_at(self.key, seq)
        branch = self._branches[found.branch]
        if seq < branch.start_seq:
            return self.store.link_at(self.key, seq)
        return branch.links[seq - branch.start_seq]

    def batches(self, index: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Blocks of a run as rows of `schemas.BLOCKS`; the first one says what it follows."""
        found = self.runs[index]
        first = start == found.run.start
        previous = found.run.previous if first else (self.link_at(index, start - 1) or b"")
        depth = self._depth_before(index, start)
        rows: list[tuple[Block, int]] = []
        size = 0
        following: tuple[bytes, int | None] | None = (previous, depth)
        for block in self._blocks(found.branch, start, end):
            rows.append((block, claimed_depth(block.payload)))
            size += len(block.payload)
            if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield self._batch(found.branch, rows, following)
                rows, size, following = [], 0, None
        if rows:
            yield self._batch(found.branch, rows, following)

    def _find_runs(self) -> list[HomeRun]:
        held = self._held
        runs = []
        if held.length > held.base:
            base_link = self.store.link_at(self.key, held.base - 1) if held.base else None
            previous = base_link if base_link is not None else Link(bytes(32))
            runs.append(HomeRun(Run(held.base, held.length, previous, held.last_link), None))
        seen: set[bytes] = set()
        for number, branch in enumerate(self._branches):
            # Branches that part late share their first blocks: those belong to the one that came first.
            skip = 0
            while skip < len(branch.links) and branch.links[skip] in seen:
                skip += 1
            seen.update(branch.links)
            if skip < len(branch.links):
                start = branch.start_seq + skip
                before = branch.links[skip - 1] if skip else self.store.link_at(self.key, start - 1)
                end = branch.start_seq + len(branch.links)
                runs.append(HomeRun(Run(start, end, before or Link(bytes(32)), branch.links[-1]), number))
        return runs

    def _blocks(self, branch: int | None, start: int, end: int) -> Iterator[Block]:
        if branch is None:
            yield from self.store.read(self.key, start, end)
            return
        kept = self._branches[branch]
        for offset in range(start - kept.start_seq, end - kept.start_seq):
            yield kept.blocks[offset]

    def _signatures(self, branch: int | None, start: int, end: int) -> dict[bytes, bytes]:
        heads = self.store.heads(self.key, start, end) if branch is None else self.store.branch_heads(self.key)
        return {head.link: head.signature for head in heads}

    def _depth_before(self, index: int, start: int) -> int | None:
        """The depth that the block before claims: 0 before the first, None when that block is not here any more."""
        if start == 0:
            return 0
        branch = self.runs[index].branch
        if branch is not None and start > self._branches[branch].start_seq:
            return claimed_depth(next(self._blocks(branch, start - 1, start)).payload)
        if start <= self._held.base:
            return None
        return claimed_depth(self.store.block(self.key, start - 1).payload)

    def _batch(
        self, branch: int | None, rows: list[tuple[Block, int]], following: tuple[bytes, int | None] | None
    ) -> pa.RecordBatch:
        count = len(rows)
        signatures = self._signatures(branch, rows[0][0].seq, rows[-1][0].seq + 1)
        previous: list[bytes | None] = [None] * count
        previous_depth: list[int | None] = [None] * count
        if following is not None:
            previous[0], previous_depth[0] = following
        columns: list[Any] = [
            [self.store.party] * count,
            [self.key] * count,
            [self.control] * count,
            [block.seq for block, _ in rows],
            [block.link for block, _ in rows],
            [depth for _, depth in rows],
            [block.payload for block, _ in rows],
            [signatures.get(block.link) for block, _ in rows],
            previous,
            previous_depth,
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schemas.BLOCKS, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schemas.BLOCKS)


def feeds_of(store: FeedStore, only: bytes | None = None) -> list[HomeFeed]:
    """The feeds of a party in the order of a lake: control first, then by key; or one of them, if it is here."""
    held = [feed for feed in store.feeds() if only is None or feed.key == only]
    return [HomeFeed(store, feed) for feed in sorted(held, key=lambda each: (each.kind != "control", each.key))]
