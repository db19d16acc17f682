"""The orderer, slowly: what a set of held blocks amounts to, from section 4 of the design alone.

It keeps no cursors, queues or marks. Whether a block counts is asked again and again of the whole set until nothing
changes any more, and every fact (what a writer named before, how deep a block is, which branch holds it) is looked up
in the lists each time. Quadratic, and meant to be read.

A feed here is the list of its branches, and a branch is the whole list of its blocks from seq 0: two branches of a fork
share their first blocks by value.

Where a block is wrong in several ways, its dependencies are judged in the order they are named and the first one that
is missing or false decides. The design leaves that open; whatever decides must not depend on what arrived first.
"""

from dataclasses import dataclass, field

from echostore.kernel.ids import LINK_PREFIX_BYTES, FeedId
from echostore.kernel.order import CONTROL, DATA, Cut
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency

Place = tuple[FeedId, int]
"""A feed and the number of a branch."""

Missing = tuple[FeedId, int]
"""A feed and a seq at which the wanted block is not there, or not yet."""


@dataclass(frozen=True)
class Block:
    """A block as its writer made it. `fault` stands for an envelope that can't be decoded."""

    link: bytes
    dependencies: tuple[Dependency, ...]
    depth: int
    fault: Reason | None = None


@dataclass
class Feed:
    """All that is held of one feed."""

    id: FeedId
    kind: str
    branches: list[list[Block]]


@dataclass
class Outcome:
    """What a peer that holds exactly these blocks ends up with, whatever the order they came in."""

    lengths: dict[Place, int]
    ended: dict[Place, Reason] = field(default_factory=dict)
    missing: dict[Place, Missing] = field(default_factory=dict)
    """For each place whose next held block waits: the first dependency it lacks."""


def settle(feeds: list[Feed], base: dict[FeedId, Cut] | None = None) -> Outcome:
    base = base or {}
    by_id = {feed.id: feed for feed in feeds}
    outcome = Outcome(
        {(feed.id, number): _start(base, feed.id) for feed in feeds for number in range(len(feed.branches))}
    )
    changed = True
    while changed:
        changed = False
        for feed in feeds:
            for number, blocks in enumerate(feed.branches):
                place = (feed.id, number)
                outcome.missing.pop(place, None)
                while place not in outcome.ended and outcome.lengths[place] < len(blocks):
                    verdict = _judge(by_id, base, outcome, feed, number)
                    if isinstance(verdict, Reason):
                        outcome.ended[place] = verdict
                    elif verdict is not None:
                        outcome.missing[place] = verdict
                        break
                    else:
                        outcome.lengths[place] += 1
                    changed = True
    return outcome


def _start(base: dict[FeedId, Cut], feed: FeedId) -> int:
    return base[feed].length if feed in base else 0


def _judge(
    feeds: dict[FeedId, Feed], base: dict[FeedId, Cut], outcome: Outcome, feed: Feed, number: int
) -> Reason | Missing | None:
    """Why the next block of a branch is invalid, or which dependency it lacks; None when it counts."""
    blocks = feed.branches[number]
    seq = outcome.lengths[feed.id, number]
    block = blocks[seq]
    if block.fault is not None:
        return block.fault
    for dependency in block.dependencies:
        before = named_before(blocks, seq, dependency.feed)
        if dependency.feed == feed.id or (before is not None and before.seq >= dependency.seq):
            return Reason.TIMEFRAME_BACKWARDS
        target = feeds.get(dependency.feed)
        if target is None:
            return dependency.feed, dependency.seq
        if feed.kind == CONTROL and target.kind == DATA:
            return Reason.WRONG_KIND
        cut = base.get(dependency.feed)
        if cut is not None and dependency.seq < cut.length:
            if not 0 < dependency.depth <= cut.depth - (cut.length - 1 - dependency.seq):
                return Reason.LYING_DEPTH
            continue
        holders = [
            other
            for other, theirs in enumerate(target.branches)
            if dependency.seq < outcome.lengths[target.id, other]
            and _prefix(theirs[dependency.seq]) == dependency.link_prefix
        ]
        if not holders:
            return dependency.feed, dependency.seq
        if target.branches[holders[0]][dependency.seq].depth != dependency.depth:
            return Reason.LYING_DEPTH
        below_cut = before is not None and cut is not None and before.seq < cut.length
        if (
            before is not None
            and not below_cut
            and not any(_prefix(target.branches[other][before.seq]) == before.link_prefix for other in holders)
        ):
            return Reason.TIMEFRAME_BRANCH
    if block.depth != 1 + max([_depth_before(base, feed, number, seq), *(d.depth for d in block.dependencies)]):
        return Reason.LYING_DEPTH
    return None


def named_before(blocks: list[Block], seq: int, feed: FeedId) -> Dependency | None:
    """What the writer had last said about a feed before `seq`."""
    for block in reversed(blocks[:seq]):
        for dependency in block.dependencies:
            if dependency.feed == feed:
                return dependency
    return None


def _depth_before(base: dict[FeedId, Cut], feed: Feed, number: int, seq: int) -> int:
    if feed.id in base and seq == base[feed.id].length:
        return base[feed.id].depth
    return feed.branches[number][seq - 1].depth if seq else 0


def _prefix(block: Block) -> bytes:
    return block.link[:LINK_PREFIX_BYTES]


# Happened-before


def pasts(feeds: list[Feed]) -> dict[bytes, frozenset[bytes]]:
    """For each block, by link, the links of all blocks that happened before it: the closure over the named edges."""
    at: dict[tuple[FeedId, int, bytes], bytes] = {}
    above: dict[bytes, list[tuple[FeedId, int, bytes]]] = {}
    for feed in feeds:
        for blocks in feed.branches:
            for seq, block in enumerate(blocks):
                at[feed.id, seq, _prefix(block)] = block.link
                edges = [(d.feed, d.seq, d.link_prefix) for d in block.dependencies]
                if seq:
                    edges.append((feed.id, seq - 1, _prefix(blocks[seq - 1])))
                above[block.link] = edges
    known: dict[bytes, frozenset[bytes]] = {}

    def past(link: bytes) -> frozenset[bytes]:
        if link not in known:
            direct = [at[edge] for edge in above[link]]
            known[link] = frozenset(direct).union(*(past(other) for other in direct))
        return known[link]

    return {link: past(link) for link in above}


def depths(before: dict[bytes, frozenset[bytes]]) -> dict[bytes, int]:
    """The length of the longest chain of causes that ends at each block, itself included."""
    known: dict[bytes, int] = {}
    for link in sorted(before, key=lambda link: len(before[link])):
        known[link] = 1 + max((known[other] for other in before[link]), default=0)
    return known
