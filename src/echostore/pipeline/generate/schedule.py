"""Schedule: who writes to which item when, and who hears of whom, before any byte is made.

Time goes in *rounds*. In a round every feed appends one flush of blocks under one head; the first of them names the
ends that a few other feeds had in an earlier round. Two feeds in one round know nothing of each other: their edits are
concurrent.

    round        0          1           2           3
    feed 0    ■■■■■■■■   ■■■■■■■■    ■■■■■■■■    ■■■■■■■■      round r names the feed 2^((r-1) mod L) before it in the
    feed 1    ■■■■■■■■ ◄─■■■■■■■■    ■■■■■■■■    ■■■■■■■■      ring: after L = log2(feeds) rounds everybody has heard
    feed 2    ■■■■■■■■   ■■■■■■■■ ◄──■■■■■■■■    ■■■■■■■■      of everything, through others
    late      ■■■■■■■■   ■■■■■■■■    (writes on, hears nothing, is not heard)

So an item may be written by others from L + 3 rounds after its genesis on, and that is all the schedule needs to know
about causality. Every eighth feed is *late*: it hangs on one other feed, and spends the middle third of the time off line.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from echostore.pipeline.generate.shape import MODELS, Part

FLUSH_BLOCKS_MAX: Final = 64
"""Blocks under one head, as a peer makes them that flushes ten times a second."""
ROUNDS_MIN: Final = 24
"""A short feed flushes more often: its party shall have some history too."""
MARGIN_ROUNDS: Final = 3
"""Beyond L: a late feed is one step off the ring at each end, and one round lies between an end and its naming."""
LATE_ONE_IN: Final = 8
LAG_ROUNDS_MAX: Final = 4
LATE_ITEMS_SHARE: Final = 5
"""One item in so many is made while others are written already."""
MOVES_MAX: Final = 2000
"""Moves of a party: each late one is replayed with all that follow it."""

SET, GENESIS, ODD, NAME, DELETE, MOVE = range(6)
"""What a message does: one property, a new item, other changes of properties, metadata, the tree."""
SHARES: Final = ((ODD, 0.02), (NAME, 0.01), (DELETE, 0.005), (MOVE, 0.005))

SYSTEM: Final = -1
"""As a target: the system item."""

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a party in columns. An item belongs to the feed `number % feeds`."""

    seqs: npt.NDArray[np.int64]
    rounds: Numbers
    models: npt.NDArray[np.uint8]
    parents: Numbers


class Schedule:
    """The plan of one party. `slots` count a feed's messages; the founder's have a seq one higher (system item)."""

    def __init__(self, part: Part) -> None:
        shape = part.shape
        self.feeds = shape.feeds
        self._seeds = [shape.seed, part.number]
        ordinary = part.messages - 1
        self.lengths = [ordinary // self.feeds + (feed < ordinary % self.feeds) for feed in range(self.feeds)]
        self.flush = min(FLUSH_BLOCKS_MAX, max(1, -(-self.lengths[0] // ROUNDS_MIN)))
        self.rounds = -(-self.lengths[0] // self.flush)
        writing = [feed for feed in range(self.feeds) if self.lengths[feed]]
        late = max(1, len(writing) // LATE_ONE_IN) if len(writing) >= 4 else 0
        self._ring = writing[: len(writing) - late]
        self._place = {feed: place for place, feed in enumerate(self._ring)}
        self.late = writing[len(self._ring) :]
        self._steps = max(1, (len(self._ring) - 1).bit_length())
        chance = self._chance("party")
        self._extra: Numbers = chance.integers(
            0, 2 * max(1, len(self._ring)), (self.rounds, self.feeds), dtype=np.int32
        )
        self._lags: Numbers = chance.integers(0, LAG_ROUNDS_MAX, (self.rounds, self.feeds), dtype=np.int32)
        self.kinds: list[npt.NDArray[np.uint8]] = []
        self.targets: list[Numbers] = []
        self._plan_items(part, chance)
        self._plan_messages(part, chance)

    def seq(self, feed: int, slot: int) -> int:
        return slot + (feed == 0)

    def off_line(self, round_: int) -> bool:
        """Whether the late feeds hear nothing in a round."""
        return self._spell[0] <= round_ < self._spell[1]

    def named(self, round_: int, feed: int) -> list[tuple[int, int]]:
        """Whose ends the first block of a feed's round names: feeds, and the rounds at whose ends they stood there."""
        if round_ == 0 or not self._ring:
            return []
        ring = self._ring
        if feed not in self._place:
            return [] if self.off_line(round_) else [self._end(ring[feed % len(ring)], round_ - 1)]
        place = self._place[feed]
        found = [self._end(ring[(place - (1 << (round_ - 1) % self._steps)) % len(ring)], round_ - 1)]
        if not self.off_line(round_):
            found += [self._end(late, round_ - 1) for late in self.late if ring[late % len(ring)] == feed]
        extra = int(self._extra[round_, feed])
        if extra < len(ring):
            found.append(self._end(ring[extra], max(0, round_ - 1 - int(self._lags[round_, feed]))))
        return [each for each in found if each[0] != feed]

    def knowledge(self) -> Numbers:
        """[round, feed, other]: the last round of another feed that a feed has heard of, through whomever; -1: none."""
        known: Numbers = np.full((self.rounds, self.feeds, self.feeds), -1, dtype=np.int32)
        for round_ in range(1, self.rounds):
            known[round_] = known[round_ - 1]
            for feed in range(self.feeds):
                heard = known[round_, feed]
                for other, at in self.named(round_, feed):
                    np.maximum(heard, known[at, other], out=heard)
                    heard[other] = max(heard[other], at)
        return known

    def _end(self, feed: int, round_: int) -> tuple[int, int]:
        return feed, min(round_, (self.lengths[feed] - 1) // self.flush)

    def _chance(self, *place: int | str) -> np.random.Generator:
        numbers = [number if isinstance(number, int) else int.from_bytes(number.encode(), "big") for number in place]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([*self._seeds, *numbers])))

    # items

    def _plan_items(self, part: Part, chance: np.random.Generator) -> None:
        count, feeds = part.items, self.feeds
        seqs = np.zeros(count, np.int64)
        rounds = np.zeros(count, np.int32)
        first_rounds = 0
        for feed, length in enumerate(self.lengths):
            own = np.arange(feed, count, feeds, dtype=np.int32)
            late_items = 0 if feed in self.late else len(own) // LATE_ITEMS_SHARE
            early = len(own) - late_items
            later = early + np.sort(chance.choice(max(1, length - early), late_items, replace=False))
            slots = np.concatenate([np.arange(early), later]).astype(np.int64)
            kinds = np.zeros(length, np.uint8)
            targets = np.full(length, SYSTEM, np.int32)
            kinds[slots], targets[slots] = GENESIS, own
            self.kinds.append(kinds)
            self.targets.append(targets)
            seqs[own] = slots + (feed == 0)
            rounds[own] = slots // self.flush
            first_rounds = max(first_rounds, -(-early // self.flush))
        self.items = Items(seqs, rounds, self._models(part, chance), self._parents(count, chance))
        # Their own early items are told before late feeds go off line; later ones they don't make.
        self._spell = (max(self.rounds // 3, first_rounds + 2), 2 * self.rounds // 3)

    def _models(self, part: Part, chance: np.random.Generator) -> npt.NDArray[np.uint8]:
        names = [MODELS.index(model) for model, _ in part.shape.mix]
        weights = np.array([weight for _, weight in part.shape.mix], float)
        models = chance.choice(np.array(names, np.uint8), part.items, p=weights / weights.sum())
        if part.items:
            # The item that skew goes to: a property set if there are any. A text that many write at once is slow work.
            models[0] = 0 if 0 in names else names[int(weights.argmax())]
        return models.astype(np.uint8)

    def _parents(self, count: int, chance: np.random.Generator) -> Numbers:
        """Half of the items hang below an earlier item of the same feed, the others at the top."""
        numbers = np.arange(count, dtype=np.int64)
        earlier = numbers // self.feeds
        chosen = (chance.random(count) * earlier).astype(np.int64) * self.feeds + numbers % self.feeds
        return np.where((earlier > 0) & (chance.random(count) < 0.5), chosen, SYSTEM).astype(np.int32)

    # messages

    def _plan_messages(self, part: Part, chance: np.random.Generator) -> None:
        items, since = self._writable(part, chance)
        hot_share = self._hot_share(part) if part.items else 0.0
        for feed, length in enumerate(self.lengths):
            dice = self._chance("feed", feed)
            rounds = np.arange(length) // self.flush
            open_count = np.searchsorted(since[feed], rounds, side="right")
            chosen = (dice.random(length) * open_count).astype(np.int64)
            targets = (
                np.where(open_count > 0, items[feed][np.minimum(chosen, len(items[feed]) - 1)], SYSTEM)
                if len(items[feed])
                else np.full(length, SYSTEM)
            )
            if hot_share:
                hot = (dice.random(length) < hot_share) & (rounds >= self._since(feed, 0))
                targets = np.where(hot, 0, targets)
            kinds = self._kinds(part, feed, targets, dice)
            made = self.kinds[feed] == GENESIS
            self.kinds[feed] = np.where(made, GENESIS, kinds).astype(np.uint8)
            self.targets[feed] = np.where(made, self.targets[feed], targets).astype(np.int32)

    def _hot_share(self, part: Part) -> float:
        """How often a message goes to the hot item where it may, so that `skew` of all do."""
        free = 0
        for feed, kinds in enumerate(self.kinds):
            free += int((kinds[self._since(feed, 0) * self.flush :] != GENESIS).sum())
        return min(1.0, part.shape.skew * part.messages / free) if free else 0.0

    def _kinds(
        self, part: Part, feed: int, targets: npt.NDArray[np.int64], dice: np.random.Generator
    ) -> npt.NDArray[np.uint8]:
        kinds = np.full(len(targets), SET, np.uint8)
        drawn, at = dice.random(len(targets)), 0.0
        for kind, share in SHARES:
            size = min(share, MOVES_MAX / part.messages) if kind == MOVE else share
            kinds[(drawn >= at) & (drawn < at + size)] = kind
            at += size
        foreign = targets % self.feeds != feed
        kinds[(kinds == MOVE) & foreign] = NAME  # a feed moves its own items, to places that it knows
        kinds[(targets == SYSTEM) & (kinds != ODD)] = SET
        if len(self.items.models):
            others = (self.items.models[np.maximum(targets, 0)] != 0) & (targets != SYSTEM)
            kinds[(kinds == ODD) & others] = SET
        return kinds

    def _writable(self, part: Part, chance: np.random.Generator) -> tuple[list[Numbers], list[Numbers]]:
        """Of each feed the items it writes, and since which rounds it may, ascending by that."""
        count, feeds = part.items, self.feeds
        numbers = np.arange(count, dtype=np.int64)
        more = min(part.shape.writers_per_item, feeds) - 1
        steps = chance.integers(1, max(2, feeds), (more, count))
        writers = [numbers % feeds, *[(numbers + step) % feeds for step in steps]]
        by_feed: list[Numbers] = []
        since: list[Numbers] = []
        all_writers = np.concatenate(writers) if count else np.zeros(0, np.int64)
        all_items = np.tile(numbers, len(writers))
        order = np.argsort(all_writers, kind="stable")
        edges = np.searchsorted(all_writers[order], np.arange(feeds + 1))
        for feed in range(feeds):
            own = np.unique(all_items[order[edges[feed] : edges[feed + 1]]]).astype(np.int32)
            rounds = np.array([self._since(feed, int(item)) for item in own], np.int32)
            sort = np.argsort(rounds, kind="stable")
            by_feed.append(own[sort])
            since.append(rounds[sort])
        return by_feed, since

    def _since(self, feed: int, item: int) -> int:
        """The round from which a feed may write an item."""
        made = int(self.items.rounds[item])
        if item % self.feeds == feed:
            return made + 1
        since = made + self._steps + MARGIN_ROUNDS
        start, end = self._spell
        if feed in self._place or not start <= since < end + MARGIN_ROUNDS or start >= end:
            return since
        return end + MARGIN_ROUNDS
