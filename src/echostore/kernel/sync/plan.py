"""What a session knows about one feed and which range of it to ask for next. Called by `session`; decides no timing.

    ours    0 ------------------ held
    theirs  0 ------------------------------- tip        extend: ask from `held` on

    ours    0 ------+----------- held
    theirs          +----------- tip                     probe: their branch is not ours; where they part is unknown

Where the branches part is found by asking for their blocks from ever earlier places (1, 2, 4, ... blocks back) until
the store can hook a range to what it holds: then it has both branches from one link on, which proves the fork. A probe
that lands before the parting brings known blocks and moves forward again.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.order import CONTROL
from echostore.kernel.sync.frames import NO_TIP, Blocks, FeedTip, Tip

BRANCHES_MAX = 4
"""Branches of one feed that are fetched or announced beside the one in use. One proves the fork; a few more may be
needed because other feeds depend on them; without a bound a forker could make us store any number."""

PROBES_MAX = 96
"""Steps back in search of one parting. Doubling passes any feed in 48; more means that the store can't hook at all."""


class Standing(Enum):
    """Whether a feed is wanted."""

    HEARD = auto()
    """The other side named it; nobody admitted it yet."""
    KNOWN = auto()
    REFUSED = auto()
    """Not admitted, or it ended: nothing more is asked of it in this session."""


@dataclass(slots=True)
class Goal:
    """A tip of theirs that we lack. `probe` is the next start when the branch has to be hooked first."""

    tip: Tip
    probe: int | None = None
    branch: bool = False
    step: int = 1
    probes: int = 0


@dataclass(slots=True)
class Track:
    """One feed in one session."""

    feed: FeedKey
    kind: str
    standing: Standing
    held: Tip = NO_TIP
    branches: dict[Link, Tip] = field(default_factory=dict)
    """Our other tips of a forked feed."""
    processed: int = 0
    processed_told: int = 0

    pushed: int = 0
    """Up to where our blocks were sent without having been asked for."""
    news_end: int = 0
    """Where their last blocks end that we took without having asked for them."""

    theirs: Tip = NO_TIP
    """The longest tip they announced for the branch they use."""
    theirs_held: int = 0
    theirs_processed: int = 0

    goal: Goal | None = None
    wishes: dict[Link, Tip] = field(default_factory=dict)
    """Branch tips of theirs that we lack and have not turned to yet."""
    settled: Tip = NO_TIP
    """Their tip for which nothing is left to do, though it is not ours: we are past it, or hold it as evidence."""
    given_up: Tip = NO_TIP
    """Their tip that they can't bring us to; tried again when we have come further by other ways."""
    comparing: Tip | None = None
    seen_branches: dict[Link, None] = field(default_factory=dict)
    evidence_end: int = 0
    """Up to where their branch is kept beside ours, once a fork was found."""

    ready: deque[Blocks] = field(default_factory=deque)
    """Ranges that arrived in order and wait for the store."""
    ingesting: Blocks | None = None
    attempts: int = 0
    bytes_needed: int = 0
    """What a refusal said the next range weighs."""
    limbo_full: bool = False
    """The first range of a feed that is not admitted has been handed up; nothing more until it is decided."""

    def as_tip(self) -> FeedTip:
        return FeedTip(self.feed, self.kind, self.held)

    def heard(self, tip: Tip) -> None:
        """They hold the feed up to `tip`. An announcement that was overtaken by a later one is ignored."""
        self.theirs_held = max(self.theirs_held, tip.length)
        if tip.length > self.theirs.length or (tip.length == self.theirs.length and tip != self.theirs):
            self.theirs = tip

    def grew(self, tip: Tip) -> bool:
        """We hold the feed up to `tip`; False when that is no news."""
        if tip.length < self.held.length or tip == self.held:
            return False
        self.held = tip
        return True

    def went_back(self, tip: Tip) -> None:
        """We hold less of the feed than we did: what follows is asked for again."""
        self.held, self.processed = tip, min(self.processed, tip.length)
        self.settled = self.given_up = NO_TIP
        self.goal, self.comparing, self.evidence_end = None, None, 0

    def review(self) -> Tip | None:
        """Set the goal anew after either side moved. Returns a tip that has to be compared with our store first."""
        if self.standing is not Standing.KNOWN:
            # Of a feed in limbo only the beginning is asked for, and only of control feeds, which admit themselves.
            wanted = self.standing is Standing.HEARD and self.kind == CONTROL and not self.limbo_full
            self.goal = Goal(self.theirs) if wanted and self.theirs.length else None
            return None
        goal, theirs = self.goal, self.theirs
        if goal is not None and goal.branch:
            return None
        if not theirs.length or theirs in (self.held, self.settled, self.given_up):
            self.goal = None
        elif goal is not None and goal.probe is not None:
            goal.tip = theirs
        elif theirs.length > self.held.length:
            self.goal = goal or Goal(theirs, probe=self.evidence_end or None)
            self.goal.tip = theirs
        else:
            self.goal = None
            if self.comparing != theirs:
                self.comparing = theirs
                return theirs
        if self.goal is None and self.wishes:
            link, tip = next(iter(self.wishes.items()))
            del self.wishes[link]
            self.goal = Goal(tip, probe=min(tip.length - 1, self.held.length), branch=True)
        return None

    def notice_branch(self, tip: Tip) -> bool:
        """They hold another branch. True when it is new to us and has to be compared with our store."""
        if tip.link in self.seen_branches or len(self.seen_branches) >= BRANCHES_MAX or not tip.length:
            return False
        self.seen_branches[tip.link] = None
        return True

    def compared(self, tip: Tip, *, held: bool) -> None:
        """The store said whether it holds a tip of theirs that is not longer than ours."""
        if tip.link in self.seen_branches and tip != self.theirs:
            if not held:
                self.wishes[tip.link] = tip
        elif tip == self.theirs:
            self.comparing = None
            if held:
                self.settled = tip
            else:
                self.goal = Goal(tip, probe=tip.length - 1)

    def arrived_end(self) -> int | None:
        """Where the feed ends with what has arrived and waits for the store; None when they have more that we know of."""
        waiting = self.ready[-1] if self.ready else self.ingesting
        if waiting is None:
            return self.held.length if self.goal is None else None
        extends = self.goal is None or (self.goal.probe is None and not self.goal.branch)
        return waiting.end if extends and self.theirs.length == waiting.end else None

    def next_start(self) -> int | None:
        """Where the next request starts; None while an answer of the store is needed to know."""
        goal = self.goal
        if goal is None:
            return None
        waiting = self.ready[-1] if self.ready else self.ingesting
        if waiting is None:
            start = self.held.length if goal.probe is None else goal.probe
        elif goal.probe is None and self.standing is Standing.KNOWN:
            start = waiting.end
        else:
            return None
        return start if start < goal.tip.length else None

    def took(self, end: int, tip: Tip) -> None:
        """The store has the range that ends at `end` on the branch in use, which now ends at `tip`."""
        self.grew(tip)
        goal = self.goal
        if goal is None or goal.probe is None:
            return
        if end >= goal.tip.length:
            self._settle(goal)
        else:
            goal.probe = None if tip.length == end and not goal.branch else end

    def kept_evidence(self, end: int) -> None:
        """The store has the range that ends at `end` on another branch."""
        goal = self.goal
        if goal is None:
            return
        if not goal.branch:
            self.evidence_end = end
        goal.probe, goal.step = end, 1
        if end >= goal.tip.length:
            self._settle(goal)

    def broke(self, start: int) -> bool:
        """The range from `start` does not hook to what we hold. False when there is nothing earlier to ask for."""
        goal = self.goal
        if goal is None:
            return True
        if start == 0:
            return False
        goal.probes += 1
        if goal.probes > PROBES_MAX:
            self.give_up()
        else:
            goal.probe = max(0, start - goal.step)
            goal.step *= 2
        return True

    def give_up(self) -> None:
        """The other side can't bring us to the goal; a longer tip would be a new one."""
        if self.goal is not None and not self.goal.branch:
            self.given_up = self.goal.tip
        self.goal = None

    def _settle(self, goal: Goal) -> None:
        if not goal.branch:
            self.settled = goal.tip
        self.goal = None
