"""Causal delivery and the depth check: turns held blocks into an order in which causes come before effects.

    held blocks of many feeds            the orderer                     delivered, causally
    a: a0 a1 a2 ...                  one cursor per feed           a0 b0 a1 b1 c0 ...
    b: b0 b1 ...                     a block waits for the ONE
    c: c0 ...                        dependency it lacks

Rules
    O1  A block is delivered after its predecessor and after every block its timeframe change names.
    O2  A dependency is met only by a block with the same link prefix: content, not just place.
    O3  depth = 1 + the greatest depth among dependencies and predecessor, and each named depth is the real one.
        Checked against direct dependencies only; by induction it holds for the whole history.
    O4  A timeframe never goes backwards and never changes branch of a forked feed.
    O5  A block that breaks O3 or O4 or can't be decoded ends its feed just before it, on every peer.
    O6  Control messages depend on control feeds alone.
    O7  Feeds never block each other except through real dependencies; one delivery costs O(1) amortised plus its
        dependencies; what waits is one cursor per feed, never a queue of blocks (blocks wait on disk).
    O8  Below the base epoch's cut a dependency is checked by the bound depth <= depth(cut) - (cut seq - seq) alone,
        by every peer, whether it still has the block or not. Who has it, and has not delivered it yet, does so first.

Both branches of a forked feed are followed (a dependency on either must be met with its depth), the second as an
extra cursor whose blocks are never delivered. What is excluded from the state is not decided here.

The state is derived: `FeedCursor` values can be rebuilt from the stores at any time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from echostore.kernel.ids import NO_LINK, FeedId, FeedKey, Link, feed_id
from echostore.kernel.limits import DEPTH_MAX
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency

MARKS_MAX = 4096
"""Recent (link, depth) pairs kept per feed: dependencies nearly always name recent blocks; older ones are looked up."""

CONTROL, DATA = "control", "data"

BASE_REASONS = frozenset({Reason.LYING_DEPTH, Reason.TIMEFRAME_BRANCH})
"""Reasons that may go once a dependency lies below the base."""


class Envelope(NamedTuple):
    """What ordering needs of a message; the body is opaque here."""

    dependencies: tuple[Dependency, ...]
    depth: int
    body: Any


class Held(NamedTuple):
    """A held block as the orderer reads it: its link, and its envelope or why it has none."""

    link: Link
    envelope: Envelope | Reason


class Mark(NamedTuple):
    """Content and depth of one block."""

    link: Link
    depth: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a base epoch ends in one feed."""

    length: int
    link: Link
    depth: int


@dataclass(slots=True)
class FeedCursor:
    """How far one feed (or one branch of a forked one) has come. `length` blocks are processed, `held` are on disk."""

    key: FeedKey
    kind: str
    length: int = 0
    held: int = 0
    link: Link = NO_LINK
    depth: int = 0
    asserted: dict[FeedId, Dependency] = field(default_factory=dict)
    ended: Reason | None = None
    """Why the block at `length` ended the feed."""
    branch: int = 0
    """0 is the branch that is delivered."""
    waits_for: tuple[FeedId, int] | None = None
    checked: int = 0
    """How many dependencies of the waiting block were found good: they stay so, and are not looked at again."""
    checked_depth: int = 0
    marks_start: int = 0
    marks: list[Mark] = field(default_factory=list)

    @property
    def id(self) -> FeedId:
        return feed_id(self.key)


class Delivery(NamedTuple):
    """One block in causal order."""

    cursor: FeedCursor
    seq: int
    link: Link
    envelope: Envelope


class Ended(NamedTuple):
    """A feed ended before `seq`: that block and all that follow are rejected."""

    cursor: FeedCursor
    seq: int
    reason: Reason


class Waits(NamedTuple):
    """A feed's next block lacks a dependency."""

    feed: FeedId
    seq: int


_Place = tuple[FeedId, int]
"""A feed and a branch of it."""

Fetch = Callable[[FeedCursor, int], Held]
"""Reads the held block `seq` of a cursor's feed and branch."""

Lookup = Callable[[FeedCursor, int], Mark]
"""Content and depth of a processed block that is no longer among the marks."""


class Orderer:
    """Follows the feeds of one party. `fetch` and `lookup` are the ports to the store."""

    def __init__(self, *, fetch: Fetch, lookup: Lookup, base: dict[FeedId, Cut] | None = None) -> None:
        self._fetch = fetch
        self._lookup = lookup
        self.base: dict[FeedId, Cut] = dict(base or {})
        """Where the base epoch ends in each feed; see `set_base`."""
        self.cursors: dict[FeedId, FeedCursor] = {}
        self.branches: dict[FeedId, list[FeedCursor]] = {}
        """Further branches of forked feeds."""
        self._waiters: dict[FeedId, dict[int, dict[_Place, FeedCursor]]] = {}
        """By the feed and the seq they wait for, each cursor once. A wake costs what it wakes, not what waits."""
        self._reached: dict[_Place, int] = {}
        """Up to which length the waiters of a cursor were woken, where there are any: others may move a cursor too."""
        self._ready: deque[FeedCursor] = deque()
        """Cursors to look at. Outlives a run, so that a caller who stops listening loses nobody."""

    def add(self, cursor: FeedCursor) -> None:
        """Follow a feed from where the cursor stands. Blocks that waited for an unknown feed are tried again."""
        if cursor.branch == 0:
            assert cursor.id not in self.cursors, cursor.key.hex()
            self.cursors[cursor.id] = cursor
        else:
            self.branches.setdefault(cursor.id, []).append(cursor)
        for woken in self._waiters.pop(cursor.id, {}).values():
            self._ready.extend(woken.values())

    def set_base(self, base: Mapping[FeedId, Cut]) -> None:
        """Stand on another base epoch. A block that was found to lie, or waits, is judged again at the next run.

        What was delivered stays so: a dependency that was checked exactly keeps the bound as well (O8).
        """
        self.base = dict(base)
        for cursor in self._all():
            if cursor.ended in BASE_REASONS:
                cursor.ended = None
            cursor.checked = 0
            self._ready.append(cursor)

    def restart(self) -> None:
        """Cursors were put elsewhere: look at all of them again at the next run."""
        self._waiters.clear()
        self._reached.clear()
        self._ready = deque(self._all())

    def waiting(self) -> Iterator[FeedCursor]:
        """Cursors whose next held block lacks a dependency."""
        for cursor in self._all():
            if cursor.waits_for is not None:
                yield cursor

    def run(self, feeds: Iterable[FeedId]) -> Iterator[Delivery | Ended]:
        """Deliver all that can be, starting with feeds that have grown or have just been added.

        The caller may stop iterating between deliveries and run again later with the same feeds.
        """
        ready = self._ready
        for feed in feeds:
            for cursor in self._of(feed):
                ready.append(cursor)
                self._wake(cursor)
        while ready:
            cursor = ready[0]
            while cursor.length < cursor.held and cursor.ended is None:
                seq = cursor.length
                held = self._fetch(cursor, seq)
                verdict = self._check(cursor, held.envelope)
                if verdict is None:
                    assert isinstance(held.envelope, Envelope)
                    self._advance(cursor, held.link, held.envelope)
                    self._wake(cursor)
                    if cursor.branch == 0:
                        yield Delivery(cursor, seq, held.link, held.envelope)
                elif isinstance(verdict, Waits):
                    self._wait(cursor, verdict)
                    break
                else:
                    cursor.ended = verdict
                    cursor.waits_for = None
                    self._release(cursor)
                    if cursor.branch == 0:
                        yield Ended(cursor, seq, verdict)
            if ready and ready[0] is cursor:
                ready.popleft()

    def advance_own(self, cursor: FeedCursor, link: Link, envelope: Envelope) -> None:
        """Count a block that this device just wrote: it depends on nothing but what is processed."""
        assert cursor.waits_for is None, cursor
        assert cursor.ended is None, cursor
        self._advance(cursor, link, envelope)

    def mark(self, feed: FeedId, seq: int) -> Mark:
        """Content and depth of a processed block of the delivered branch."""
        return self._mark(self.cursors[feed], seq)

    def met(self, dependency: Dependency) -> Mark | None:
        """The processed block that a dependency names, on whichever branch."""
        for cursor in self._of(dependency.feed):
            if dependency.seq < cursor.length:
                found = self._mark(cursor, dependency.seq)
                if found.link.startswith(dependency.link_prefix):
                    return found
        return None

    def _check(self, cursor: FeedCursor, envelope: Envelope | Reason) -> Reason | Waits | None:
        """None when the block can be delivered now."""
        if not isinstance(envelope, Envelope):
            return envelope
        deepest, dependencies = cursor.depth, envelope.dependencies
        if cursor.checked:
            deepest, dependencies = cursor.checked_depth, dependencies[cursor.checked :]
        for dependency in dependencies:
            feed = dependency.feed
            known = cursor.asserted.get(feed)
            if feed == cursor.id or (known is not None and dependency.seq <= known.seq):
                return Reason.TIMEFRAME_BACKWARDS
            target = self.cursors.get(feed)
            verdict: Reason | Waits | None
            if target is None:
                verdict = Waits(feed, dependency.seq)
            elif cursor.kind == CONTROL and target.kind != CONTROL:
                verdict = Reason.WRONG_KIND
            else:
                verdict = self._check_dependency(dependency, target, known)
            if verdict is not None:
                if isinstance(verdict, Waits):
                    cursor.checked, cursor.checked_depth = envelope.dependencies.index(dependency), deepest
                return verdict
            if dependency.depth > deepest:
                deepest = dependency.depth
        if envelope.depth != deepest + 1 or envelope.depth > DEPTH_MAX:
            return Reason.LYING_DEPTH
        return None

    def _check_dependency(
        self, dependency: Dependency, target: FeedCursor, known: Dependency | None
    ) -> Reason | Waits | None:
        cut = self.base.get(dependency.feed)
        if cut is not None and dependency.seq < cut.length:
            bound = cut.depth - (cut.length - 1 - dependency.seq)
            if not 0 < dependency.depth <= bound:
                return Reason.LYING_DEPTH
            # Control feeds are folded from before the cut: what is here comes first (O1), though nothing of it is checked.
            ahead = target.length <= dependency.seq < target.held and target.ended is None
            return Waits(dependency.feed, dependency.seq) if ahead else None
        index = dependency.seq - target.marks_start
        if 0 <= index < len(target.marks):  # the common case, in line
            mark: Mark | None = target.marks[index]
            if not mark.link.startswith(dependency.link_prefix):  # type: ignore[union-attr]  # just assigned
                mark = self.met(dependency)
        else:
            mark = self.met(dependency)
        if mark is None:
            return Waits(dependency.feed, dependency.seq)
        if mark.depth != dependency.depth:
            return Reason.LYING_DEPTH
        if known is not None and dependency.feed in self.branches and not self._same_branch(known, dependency):
            return Reason.TIMEFRAME_BRANCH
        return None

    def _same_branch(self, earlier: Dependency, later: Dependency) -> bool:
        """Whether one branch of a forked feed contains both. What lies below the cut is not looked at (O8)."""
        cut = self.base.get(earlier.feed)
        if cut is not None and earlier.seq < cut.length:
            return True
        for cursor in self._of(later.feed):
            if later.seq < cursor.length and self._mark(cursor, later.seq).link.startswith(later.link_prefix):
                return self._mark(cursor, earlier.seq).link.startswith(earlier.link_prefix)
        return False

    def _advance(self, cursor: FeedCursor, link: Link, envelope: Envelope) -> None:
        cursor.length += 1
        cursor.link = link
        cursor.depth = envelope.depth
        cursor.waits_for = None
        cursor.checked = 0
        for dependency in envelope.dependencies:
            cursor.asserted[dependency.feed] = dependency
        marks = cursor.marks
        if not marks:
            cursor.marks_start = cursor.length - 1
        marks.append(Mark(link, envelope.depth))
        if len(marks) > 2 * MARKS_MAX:
            del marks[:MARKS_MAX]
            cursor.marks_start += MARKS_MAX

    def _wait(self, cursor: FeedCursor, missing: Waits) -> None:
        cursor.waits_for = (missing.feed, missing.seq)
        waiters = self._waiters.get(missing.feed)
        if waiters is None:
            waiters = self._waiters[missing.feed] = {}
            for target in self._of(missing.feed):
                self._reached[target.id, target.branch] = target.length
        waiters.setdefault(missing.seq, {})[cursor.id, cursor.branch] = cursor

    def _wake(self, cursor: FeedCursor) -> None:
        """Look again at what waited for the blocks that this cursor has passed since the last call."""
        waiters = self._waiters.get(cursor.id)
        if not waiters:
            return
        place = (cursor.id, cursor.branch)
        for seq in range(self._reached[place], cursor.length):
            self._ready.extend(waiters.pop(seq, {}).values())
        self._reached[place] = cursor.length
        if not waiters:
            del self._waiters[cursor.id]

    def _release(self, cursor: FeedCursor) -> None:
        """A feed goes no further: who waited for a block of it below the cut is looked at again, and needs it no more."""
        cut, waiters = self.base.get(cursor.id), self._waiters.get(cursor.id, {})
        for seq in [seq for seq in waiters if cut is not None and seq < cut.length]:
            self._ready.extend(waiters.pop(seq).values())

    def _mark(self, cursor: FeedCursor, seq: int) -> Mark:
        index = seq - cursor.marks_start
        if 0 <= index < len(cursor.marks):
            return cursor.marks[index]
        cut = self.base.get(cursor.id)
        if cut is not None and seq == cut.length - 1 and not cursor.branch:
            return Mark(cut.link, cut.depth)
        return self._lookup(cursor, seq)

    def _of(self, feed: FeedId) -> Iterator[FeedCursor]:
        if feed in self.cursors:
            yield self.cursors[feed]
        yield from self.branches.get(feed, ())

    def _all(self) -> Iterator[FeedCursor]:
        yield from self.cursors.values()
        for branches in self.branches.values():
            yield from branches
