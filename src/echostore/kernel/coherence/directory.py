"""The upper end of a link: which indexes the system below may take for granted, and what each update has to say.

Rules, each at its place below and in tests:
    U1  A Grant is remembered by the last tick it speaks of (gm), and *never clears live*.
    U2  Forgetting may drop gm, never live.
    U3  At an update to e: if gm is there and the value did not change on [gm, e], Subscribed(gm), and live. Else if live
        and changed since the last update, or evicted, or gm was there, Invalidate, and forgotten. Else if not live,
        forgotten in silence. Where a Delta is worth its bytes it takes the place of both, and the record is live.
    U4  An edge says Subscribed, or stays silent about a live record, only while it holds the value over that interval
        itself (inclusion). Losing it means Invalidate below.
    U5  A Grant that begins after what the link was told last moves the link on as well.

What changed is not stored: it is read off the holdings. A record that has something to say is *marked*. However slow a
link is, it costs one record for each index, and updates merge while they wait.
"""

from typing import NamedTuple

from echostore.kernel.coherence.holdings import Codec, Holdings, Version
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Delta,
    FollowsEpoch,
    Grant,
    Invalidate,
    RejectOp,
    Spec,
    Subscribed,
    Update,
    UpdateItem,
)

RECORDS_MAX = 100_000
"""Indexes watched for one link. Beyond it the oldest record is evicted, and its link told."""

SHARED_MAX = 16
"""Marked records that are compared with those of other links. Few links are alike in more."""

WAITS_MAX = 1024
"""Clocks that one link waits for. Who waits for more asks again."""


class Record(NamedTuple):
    """What the system below may believe about one index."""

    live: bool = False
    gm: int | None = None
    evict: bool = False
    spent_bytes: int = 0
    """Deltas sent since the index was last read below."""


class Outcome(NamedTuple):
    """An update, and what each marked record is after it: None where it is gone, and whether it stays marked."""

    update: Update
    records: tuple[tuple[Spec, Record | None, bool], ...]


Shared = dict[tuple[int, tuple[tuple[Spec, Record], ...]], Outcome]
"""What was worked out for links that stood alike: at one tick, with the same records marked. Good while nothing changes
above."""


class Directory:
    """One link downwards."""

    __slots__ = ("due", "generation", "marks", "records", "rejections", "sent", "told", "vector", "waits", "writable")

    def __init__(self, generation: int, sent: int, *, vector: bool = False) -> None:
        self.generation = generation
        self.vector = vector
        """Whether the lower end is told of every feed how much a tick includes."""
        self.sent = sent
        """The tick that the link was told last."""
        self.records: dict[Spec, Record] = {}
        self.marks: set[Spec] = set()
        self.waits: dict[Arc, int] = {}
        self.due: dict[Arc, int] = {}
        """Of other clocks: what the next update has to say."""
        self.told: dict[Arc, int] = {}
        """And what was said."""
        self.rejections: tuple[RejectOp, ...] = ()
        self.writable = True

    # Grants

    def grant(self, asked: Acquire, version: Version, codec: Codec) -> Grant:
        """The answer to an Acquire: `version` as a fact, without its bytes if they are held below."""
        token = codec.token(version.value)
        same = asked.have == token
        if asked.at is None:
            self._remember(asked.spec, version.max)
        return Grant(
            asked.spec, asked.at, version.min, version.max, None if same else version.value, token if same else None
        )

    def _remember(self, spec: Spec, gm: int) -> None:
        """U1."""
        record = self.records.get(spec)
        if record is None:
            self._make_room()
            record = Record()
        self.records[spec] = record._replace(gm=gm, evict=False, spent_bytes=0)
        self.marks.add(spec)

    def _make_room(self) -> None:
        """The oldest record gives way: at once if nothing depends on it, else with the next update."""
        if len(self.records) < RECORDS_MAX:
            return
        for spec, record in self.records.items():
            if not record.evict:
                if record.live:
                    self.evict(spec)
                    continue
                self._drop(spec)
                return

    def forget(self, spec: Spec) -> None:
        """U2."""
        record = self.records.get(spec)
        if record is not None and record.gm is not None:
            if record.live:
                self.records[spec] = record._replace(gm=None)
            else:
                self._drop(spec)

    def evict(self, spec: Spec) -> None:
        """Watch an index no longer; the next update says so where that is news."""
        record = self.records.get(spec)
        if record is not None:
            self.records[spec] = record._replace(gm=None, evict=True)
            self.marks.add(spec)

    def touch(self, spec: Spec) -> None:
        """The index is read below: its deltas are worth their bytes again."""
        record = self.records.get(spec)
        if record is not None and record.spent_bytes:
            self.records[spec] = record._replace(spent_bytes=0)

    def mark(self, spec: Spec) -> None:
        """Something happened to an index above."""
        if spec in self.records:
            self.marks.add(spec)

    # Updates

    def must_advance(self, grant: Grant) -> bool:
        """U5."""
        return grant.at is None and grant.min > self.sent

    def update(self, clock: Arc, holdings: Holdings, codec: Codec, shared: Shared | None = None) -> Update | None:
        """All that is to be said of (sent, cur], in one update; None when the link is there already.

        `shared` is for many links in a row: one that stands as another did is told the very same.
        """
        tick = holdings.cur
        if tick <= self.sent:
            return None
        if shared is None or self.rejections or self.due or len(self.marks) > SHARED_MAX:
            return self._update(clock, tick, sorted(self.marks), holdings, codec)
        specs = sorted(self.marks)
        alike = (self.sent, tuple([(spec, self.records[spec]) for spec in specs]))
        told = shared.get(alike)
        if told is None:
            update = self._update(clock, tick, specs, holdings, codec)
            after = tuple([(spec, self.records.get(spec), spec in self.marks) for spec in specs])
            shared[alike] = Outcome(update, after)
            return update
        for spec, record, marked in told.records:
            if record is None:
                self._drop(spec)
                continue
            self.records[spec] = record
            if not marked:
                self.marks.discard(spec)
        self.sent = tick
        return told.update

    def _update(self, clock: Arc, tick: int, specs: list[Spec], holdings: Holdings, codec: Codec) -> Update:
        items: list[UpdateItem] = []
        for spec in specs:
            item = self._examine(spec, tick, holdings, codec)
            if item is not None:
                items.append(item)
        if len(specs) > SHARED_MAX:
            self.marks = set(self.marks)  # a set that was large is slow to go through for as long as it lives
        items.extend(self.rejections)
        self.rejections = ()
        follows = tuple(FollowsEpoch(other, reached) for other, reached in sorted(self.due.items()))
        self.told.update(self.due)
        self.due.clear()
        update = Update(clock, self.sent, tick, follows, tuple(items))
        self.sent = tick
        return update

    def _examine(self, spec: Spec, tick: int, holdings: Holdings, codec: Codec) -> UpdateItem | None:
        """U3, with U4: whether the value changed is asked of what is held here."""
        record = self.records[spec]
        if record.gm is not None and self._unchanged(spec, record.gm, tick, holdings):
            self.records[spec] = Record(live=True, spent_bytes=record.spent_bytes)
            self._settle(spec, holdings)
            return Subscribed(spec, record.gm)
        if not record.live and record.gm is None:
            self._drop(spec)
            return None
        if record.gm is None and not record.evict and self._unchanged(spec, self.sent, tick, holdings):
            self._settle(spec, holdings)
            return None
        delta = None if record.evict else self._delta(spec, tick, holdings, codec)
        if delta is None:
            self._drop(spec)
            return Invalidate(spec) if record.live else None
        self.records[spec] = Record(live=True, spent_bytes=record.spent_bytes + len(delta.patch))
        self._settle(spec, holdings)
        return delta

    def _unchanged(self, spec: Spec, first: int, last: int, holdings: Holdings) -> bool:
        """U4."""
        return holdings.covers(spec, first, last)

    def _settle(self, spec: Spec, holdings: Holdings) -> None:
        """A record stays marked while the value above is not live: it may end without a word."""
        if holdings.is_live(spec):
            self.marks.discard(spec)

    def _delta(self, spec: Spec, tick: int, holdings: Holdings, codec: Codec) -> Delta | None:
        """The way to the value at `tick`, while the deltas since the last read cost no more than the value itself.

        That is at most twice the better of always telling and never telling (competitive snooping).
        """
        record = self.records[spec]
        gm = self.sent if record.live or record.gm is None else record.gm
        old, new = holdings.at(spec, gm), holdings.at(spec, tick)
        if old is None or new is None:
            return None
        patch = codec.diff(old.value, new.value)
        if patch is None or record.spent_bytes + len(patch) > len(new.value):
            return None
        return Delta(spec, gm, patch)

    def _drop(self, spec: Spec) -> None:
        del self.records[spec]
        self.marks.discard(spec)

    # Other clocks

    def follow(self, clock: Arc, tick: int) -> None:
        """The current tick includes this much of another clock, and the system below has to know."""
        if tick > max(self.due.get(clock, 0), self.told.get(clock, 0)):
            self.due[clock] = tick

    def reached(self, root: Arc, clock: Arc, tick: int) -> bool:
        """Whether the system below was told of a tick that includes this one."""
        return tick <= (self.sent if clock == root else self.told.get(clock, 0))

    def has_news(self) -> bool:
        """Whether an update would say anything."""
        return bool(self.marks or self.due or self.rejections)

    def wait(self, clock: Arc, tick: int) -> None:
        """Remember the furthest tick of each clock that is waited for."""
        if tick > self.waits.get(clock, 0) and (clock in self.waits or len(self.waits) < WAITS_MAX):
            self.waits[clock] = tick
