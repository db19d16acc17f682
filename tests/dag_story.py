"""Histories of many feeds for the orderer's tests: writers that process some of what others wrote, then write.

A `Mind` is a writer with its own view of the world. A forked feed has two minds that share their first blocks; every
other writer meets one of the two branches first and stays with it.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from echostore.kernel.ids import LINK_PREFIX_BYTES, NO_LINK, FeedId, FeedKey, Link
from echostore.kernel.order import CONTROL, DATA, Cut, Delivery, Ended, Envelope, FeedCursor, Held, Mark, Orderer
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency
from reference.orderer import Block, Feed

Fault = Callable[[Block], Block]


def feed_key(number: int) -> FeedKey:
    return FeedKey(hashlib.sha256(b"feed %d" % number).digest())


@dataclass
class Mind:
    """One writer, or one of the two minds of a forking one. `past` holds links; `places` says where each one is."""

    key: FeedKey
    kind: str
    branch: int = 0
    blocks: list[Block] = field(default_factory=list)
    asserted: dict[FeedId, Dependency] = field(default_factory=dict)
    past: set[bytes] = field(default_factory=set)
    sides: dict[FeedId, int] = field(default_factory=dict)
    """Which branch of a forked feed it met first."""

    @property
    def id(self) -> FeedId:
        return FeedId(self.key[:8])

    @property
    def depth(self) -> int:
        return self.blocks[-1].depth if self.blocks else 0

    def append(self, dependencies: tuple[Dependency, ...], depth: int, fault: Reason | None = None) -> Block:
        before = self.blocks[-1].link if self.blocks else NO_LINK
        content = repr((len(self.blocks), self.branch, dependencies, depth)).encode()
        link = hashlib.sha256(self.key + before + content).digest()
        self.blocks.append(Block(link, dependencies, depth, fault))
        for dependency in dependencies:
            self.asserted[dependency.feed] = dependency
        return self.blocks[-1]


class History:
    """What a set of writers has written. Honest unless told otherwise."""

    def __init__(self, feeds: int, *, control: int = 0) -> None:
        self.minds = [Mind(feed_key(number), CONTROL if number < control else DATA) for number in range(feeds)]
        self.pasts: dict[bytes, frozenset[bytes]] = {}
        self.places: dict[bytes, tuple[Mind, int]] = {}

    def fork(self, mind: Mind) -> Mind:
        """A second mind that goes its own way from here on."""
        other = Mind(mind.key, mind.kind, 1, list(mind.blocks), dict(mind.asserted), set(mind.past), dict(mind.sides))
        self.minds.append(other)
        return other

    def process(self, reader: Mind, of: Mind, length: int) -> None:
        """The reader takes in the first `length` blocks of another, with everything they depend on."""
        if reader.id == of.id or (reader.kind == CONTROL and of.kind == DATA) or not length:
            return
        link = of.blocks[length - 1].link
        fresh = (self.pasts[link] | {link}) - reader.past
        reader.past |= fresh
        for met in sorted(fresh, key=lambda link: self.places[link][1]):
            mind, _ = self.places[met]
            if self._forked(mind.id) and not self._shared(mind.id, met):
                reader.sides.setdefault(mind.id, mind.branch)

    def write(self, writer: Mind) -> Block:
        """One honest block: it names whatever its writer has processed since its last one."""
        dependencies = tuple(self.news(writer))
        depth = 1 + max([writer.depth, *(dependency.depth for dependency in dependencies)])
        before = [writer.blocks[-1].link] if writer.blocks else []
        block = writer.append(dependencies, depth)
        self.places[block.link] = (writer, len(writer.blocks) - 1)
        own = self.pasts[before[0]] | set(before) if before else frozenset()
        self.pasts[block.link] = frozenset(writer.past) | own
        writer.past.add(block.link)
        return block

    def news(self, writer: Mind) -> Iterator[Dependency]:
        for mind in sorted(self.minds, key=lambda mind: mind.id):
            if mind.id == writer.id or mind.branch != writer.sides.get(mind.id, 0):
                continue
            length = self._reached(writer, mind)
            known = writer.asserted.get(mind.id)
            if length and (known is None or known.seq < length - 1):
                yield name(mind, length - 1)

    def feeds(self, held: dict[tuple[FeedId, int], int] | None = None) -> list[Feed]:
        """For the oracle: all blocks, or the first ones of each branch."""
        found: dict[FeedId, Feed] = {}
        for mind in self.minds:
            length = len(mind.blocks) if held is None else held.get((mind.id, mind.branch))
            if length is not None:
                feed = found.setdefault(mind.id, Feed(mind.id, mind.kind, []))
                feed.branches.append(mind.blocks[:length])
        return list(found.values())

    def _reached(self, reader: Mind, of: Mind) -> int:
        length = 0
        while length < len(of.blocks) and of.blocks[length].link in reader.past:
            length += 1
        return length

    def _forked(self, feed: FeedId) -> bool:
        return sum(mind.id == feed for mind in self.minds) > 1

    def _shared(self, feed: FeedId, link: bytes) -> bool:
        return all(any(block.link == link for block in mind.blocks) for mind in self.minds if mind.id == feed)


def name(mind: Mind, seq: int) -> Dependency:
    block = mind.blocks[seq]
    return Dependency(mind.id, seq, block.link[:LINK_PREFIX_BYTES], block.depth)


def random_history(
    chance: random.Random, *, feeds: int, steps: int, control: int = 0, forks: int = 0, reads: int = 3
) -> History:
    """Writers take turns at random; before writing, one reads up to `reads` random places of others."""
    history = History(feeds, control=control)
    when = {chance.randrange(1, max(2, steps)) for _ in range(forks)}
    for step in range(steps):
        if step in when:
            mind = chance.choice(history.minds[:feeds])
            if mind.blocks and not history._forked(mind.id):
                history.fork(mind)
        writer = chance.choice(history.minds)
        for _ in range(chance.randrange(reads + 1)):
            other = chance.choice(history.minds)
            history.process(writer, other, chance.randrange(len(other.blocks) + 1))
        history.write(writer)
    return history


class CountingOrderer(Orderer):
    """Counts how often a block is looked at and how often the store is asked."""

    checks = 0
    dependency_checks = 0

    def _check_dependency(self, dependency, target, known):  # type: ignore[no-untyped-def]
        self.dependency_checks += 1
        return super()._check_dependency(dependency, target, known)

    def _check(self, cursor, envelope):  # type: ignore[no-untyped-def]
        self.checks += 1
        return super()._check(cursor, envelope)


class Peer:
    """One receiver of a history: holds blocks, asks its orderer, keeps what was delivered."""

    def __init__(self, history: History, *, base: dict[FeedId, Cut] | None = None) -> None:
        self.minds = {(mind.id, mind.branch): mind for mind in history.minds}
        self.base = base or {}
        self.cursors: dict[tuple[FeedId, int], FeedCursor] = {}
        self.orderer = CountingOrderer(fetch=self._fetch, lookup=self._lookup, base=base)
        self.delivered: list[Delivery] = []
        self.ends: list[Ended] = []
        self.lookups = 0

    def follow(self, mind: Mind) -> FeedCursor:
        """Start to follow a feed or a branch; below a base, from the cut on."""
        place = (mind.id, mind.branch)
        if place not in self.cursors:
            cursor = FeedCursor(mind.key, mind.kind, branch=mind.branch)
            cut = self.base.get(mind.id)
            if cut is not None:
                cursor.length, cursor.link, cursor.depth, cursor.held = cut.length, cut.link, cut.depth, cut.length
                for block in mind.blocks[: cut.length]:
                    cursor.asserted.update({dependency.feed: dependency for dependency in block.dependencies})
            self.cursors[place] = cursor
            self.orderer.add(cursor)
        return self.cursors[place]

    def hold(self, mind: Mind, length: int) -> None:
        cursor = self.follow(mind)
        cursor.held = max(cursor.held, length)

    def arrive(self, mind: Mind, length: int | None = None) -> None:
        """Blocks up to `length` came; deliver what can be."""
        self.hold(mind, len(mind.blocks) if length is None else length)
        self.run([mind.id])

    def run(self, feeds: list[FeedId], *, limit: int | None = None) -> None:
        """Deliver; with a limit, stop listening after so many events."""
        for count, event in enumerate(self.orderer.run(feeds), 1):
            self.take(event)
            if count == limit:
                break

    def take(self, event: Delivery | Ended) -> None:
        assert event.cursor.branch == 0
        if isinstance(event, Ended):
            self.ends.append(event)
            return
        for dependency in event.envelope.dependencies:
            assert self._met(dependency), (event.seq, dependency)
        self.delivered.append(event)

    def held(self) -> dict[tuple[FeedId, int], int]:
        return {place: cursor.held for place, cursor in self.cursors.items()}

    def _met(self, dependency: Dependency) -> bool:
        """Whether a dependency is below the cut, was delivered, or is on the way of another branch."""
        cut = self.base.get(dependency.feed)
        if cut is not None and dependency.seq < cut.length:
            return True
        for (feed, branch), cursor in self.cursors.items():
            if feed == dependency.feed and dependency.seq < cursor.length:
                block = self.minds[feed, branch].blocks[dependency.seq]
                if block.link[:LINK_PREFIX_BYTES] == dependency.link_prefix:
                    return True
        return False

    def _fetch(self, cursor: FeedCursor, seq: int) -> Held:
        assert cursor.length == seq < cursor.held, (cursor, seq)
        block = self.minds[cursor.id, cursor.branch].blocks[seq]
        return Held(Link(block.link), block.fault or Envelope(block.dependencies, block.depth, None))

    def _lookup(self, cursor: FeedCursor, seq: int) -> Mark:
        cut = self.base.get(cursor.id)
        assert (cut.length if cut else 0) <= seq < cursor.length, (cursor, seq)
        self.lookups += 1
        block = self.minds[cursor.id, cursor.branch].blocks[seq]
        return Mark(Link(block.link), block.depth)
