"""The lower end of a link: what a system holds of its root's indexes, and how updates change that.

Rules, each at its place below and in tests:
    D1  An update counts only in its own generation of the link, and only next after the current tick.
    D2  Invalidate ends a live value. The value stays good for the past.
    D3  Subscribed(gm) makes the value that holds at gm live; *whatever else is held is live no more*.
    D4  Without an item, live values go on and all others stay where they are: the implicit Invalidate.
    D5  While an Acquire is out, what Subscribed says is noted, so that a Grant that comes late can join it.
    D6  A Grant that nobody waits for, or of another generation, is ignored.
    D7  A value is read at a tick only inside its interval.
    D8  In a new generation nothing is live, notes are dropped, and all that is wanted is asked for again, with the hash
        of what is held.
"""

from collections.abc import Iterable
from typing import NamedTuple, assert_never

from echostore.kernel.coherence.holdings import Codec, Holdings, Version
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Delta,
    Denied,
    FollowsEpoch,
    Gone,
    Grant,
    Invalidate,
    Linked,
    PublishOp,
    RejectOp,
    Spec,
    Subscribed,
    Update,
)

ENTRIES_MAX = 100_000
"""Indexes that are held. Beyond it the one that was learned first goes, and whoever relies on it is told."""

CLOCKS_MAX = 200_000
"""Other clocks that a tick is known to include: those of all systems below, and of other roots."""

WANTED_MAX = 100_000
"""Questions that wait for an answer. What is asked beyond that is refused where it is asked."""


class Note(NamedTuple):
    """A Subscribed for a value that has not come yet. While live, it reaches to the current tick."""

    gm: int
    through: int
    live: bool


class Cache:
    """What is held of one root, over one link at a time."""

    __slots__ = ("clock", "codec", "follows", "generation", "holdings", "notes", "opening", "wanted")

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.clock: Arc | None = None
        self.generation: int | None = None
        self.opening: int | None = None
        """The generation of a link that does not stand yet."""
        self.holdings = Holdings()
        self.wanted: dict[tuple[Spec, int | None], bool] = {}
        """What an answer is awaited for, and whether a hash may be sent along."""
        self.notes: dict[Spec, Note] = {}
        self.follows: dict[Arc, int] = {}
        """What the current tick includes of other clocks."""

    @property
    def cur(self) -> int:
        return self.holdings.cur

    def read(self, spec: Spec, at: int | None = None) -> Version | None:
        """D7: the version that holds at a tick, or none."""
        holdings = self.holdings
        return holdings.at(spec, holdings.cur if at is None else at)

    def reached(self, clock: Arc, tick: int) -> bool:
        """Whether the current tick includes that tick of that clock."""
        return tick <= (self.cur if clock == self.clock else self.follows.get(clock, 0))

    # The link

    def open(self, generation: int, linked: Linked) -> list[Acquire] | None:
        """D8. None if the link is another one, or would lead back in time; then it is not used."""
        if generation != self.opening or linked.tick < self.cur or self.clock not in (None, linked.clock):
            return None
        self._start_afresh()
        self.clock, self.generation, self.opening = linked.clock, generation, None
        self.holdings.cur = linked.tick
        self.follow(linked.follows)
        return self.ask_again()

    def close(self) -> None:
        """Nothing is heard until the next generation."""
        self.generation = self.opening = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        """D8: what was said in one generation says nothing about the next."""
        self.holdings.end_all()
        self.notes.clear()

    def ask_again(self) -> list[Acquire]:
        return [self._acquire(spec, at) for spec, at in self.wanted]

    def want(self, spec: Spec, at: int | None = None, *, anew: bool = False) -> Acquire | None:
        """Ask for an index, unless it is held or already asked for: equal misses are one question.

        `anew`: also if it is held, because nobody would tell of its changes.
        """
        held = not anew and self.read(spec, at) is not None
        if (spec, at) in self.wanted or held or len(self.wanted) >= WANTED_MAX:
            return None
        self.wanted[spec, at] = True
        return self._acquire(spec, at)

    def _acquire(self, spec: Spec, at: int | None) -> Acquire:
        held = self.holdings.newest(spec) if self.wanted[spec, at] else None
        return Acquire(spec, at, None if held is None else self.codec.token(held.value))

    # Answers

    def take_grant(self, grant: Grant) -> Acquire | bool:
        """True if something was learned, False if not; an Acquire when the value that is meant is no longer held."""
        spec = grant.spec
        if not self._is_wanted(grant):
            return False
        value = grant.value
        if value is None:
            same = [each.value for each in self.holdings.versions(spec) if self.codec.token(each.value) == grant.token]
            if not same:
                self.wanted[spec, grant.at] = False
                return self._acquire(spec, grant.at)
            value = same[0]
        del self.wanted[spec, grant.at]
        fact = Version(grant.min, grant.max, value, live=False)
        if grant.at is None:
            fact = self._join_note(spec, fact)
        self.holdings.learn(spec, fact)
        return True

    def make_room(self) -> Spec | None:
        """Drop what was learned first, if too much is held."""
        if len(self.holdings) <= ENTRIES_MAX:
            return None
        spec = next(self.holdings.specs())
        self.holdings.evict(spec)
        return spec

    def _is_wanted(self, grant: Grant) -> bool:
        """D6."""
        return (grant.spec, grant.at) in self.wanted

    def _join_note(self, spec: Spec, fact: Version) -> Version:
        """D5: a Subscribed that overtook this Grant extends it."""
        note = self.notes.pop(spec, None)
        if note is None or not fact.min <= note.gm <= fact.max:
            return fact
        through = self.cur if note.live else note.through
        return fact._replace(max=max(fact.max, through), live=note.live)

    def take_gone(self, gone: Gone) -> bool:
        return self.wanted.pop((gone.spec, gone.at), None) is not None

    def take_denied(self, denied: Denied) -> list[int | None]:
        """The ticks for which an answer was awaited, and which will get none."""
        ticks = [at for spec, at in self.wanted if spec == denied.spec]
        for at in ticks:
            del self.wanted[denied.spec, at]
        self.notes.pop(denied.spec, None)
        return ticks

    # Updates

    def apply(self, update: Update) -> list[Spec] | None:
        """Move to the update's tick; the indexes of which something was said. None if it is not its turn."""
        if not self._is_next(update):
            return None
        for item in update.items:
            match item:
                case Subscribed(spec, gm):
                    self._subscribed(spec, gm)
                case Invalidate(spec):
                    self._invalidated(spec)
                case Delta():
                    self._changed(item, update.tick)
                case RejectOp():
                    pass  # the owner of the outbox hears of it
                case PublishOp():
                    raise AssertionError(f"{item} does not travel downwards")
                case _:
                    assert_never(item)
        self._advance(update)
        return list(_specs(update.items))

    @staticmethod
    def may_come_from_above(update: Update) -> bool:
        """Whether an honest system above says such things at all."""
        return not any(isinstance(item, PublishOp) for item in update.items)

    def _is_next(self, update: Update) -> bool:
        """D1. The generation is compared where the message comes in."""
        return update.clock == self.clock and update.prev == self.cur and update.tick > update.prev

    def _subscribed(self, spec: Spec, gm: int) -> None:
        """D3, with D5's note."""
        if (spec, None) in self.wanted:
            self.notes[spec] = Note(gm, gm, live=True)
        self.holdings.subscribe(spec, gm)

    def _invalidated(self, spec: Spec) -> None:
        """D2."""
        self._end_note(spec)
        self.holdings.end(spec)

    def _changed(self, delta: Delta, tick: int) -> None:
        """D2, and the next value where the one that the patch starts from is held: it is live then."""
        before = self.holdings.at(delta.spec, delta.gm)
        self._invalidated(delta.spec)
        if before is not None:
            value = self.codec.patch(before.value, delta.patch)
            if value is not None:
                self.holdings.learn(delta.spec, Version(tick, tick, value, live=True))

    def _end_note(self, spec: Spec) -> None:
        note = self.notes.get(spec)
        if note is not None and note.live:
            self.notes[spec] = note._replace(through=self.cur, live=False)

    def _advance(self, update: Update) -> None:
        """D4: live values and notes reach to the new tick by themselves; nothing else moves."""
        self.holdings.cur = update.tick
        self.follow(update.follows)

    def follow(self, follows: Iterable[FollowsEpoch]) -> None:
        """The current tick includes this much of other clocks."""
        for each in follows:
            room = each.clock in self.follows or len(self.follows) < CLOCKS_MAX
            if room and each.tick > self.follows.get(each.clock, 0):
                self.follows[each.clock] = each.tick


def _specs(items: Iterable[object]) -> Iterable[Spec]:
    for item in items:
        if isinstance(item, Subscribed | Invalidate | Delta):
            yield item.spec
