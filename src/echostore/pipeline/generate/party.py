"""One generated party: its founding, its feeds round by round, then its faults."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from echostore.kernel.ids import SYSTEM_TYPE, FeedId, ItemId, PartyKey, created_item_id
from echostore.kernel.items.operations import GENESIS as GENESIS_FIELD
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.models.property_set import PropertySet, Set
from echostore.kernel.party.credentials import Role
from echostore.kernel.timeframe import Dependency
from echostore.pipeline.generate import contents as made
from echostore.pipeline.generate.contents import POOL, Contents
from echostore.pipeline.generate.edits import Edit, ItemEdits, encoded_edits
from echostore.pipeline.generate.encoding import (
    DEPTH,
    OPERATION,
    TIME,
    item_head,
    message,
    number,
    property_part,
    timeframe_part,
)
from echostore.pipeline.generate.faults import Fault, Faults
from echostore.pipeline.generate.feeds import Give, SignedFeed
from echostore.pipeline.generate.founding import START_MS, Founding
from echostore.pipeline.generate.keys import Member, seeded_key
from echostore.pipeline.generate.schedule import (
    DELETE,
    GENESIS,
    LAG_ROUNDS_MAX,
    MOVE,
    NAME,
    ODD,
    SET,
    SYSTEM,
    Schedule,
)
from echostore.pipeline.generate.shape import MODELS, Part
from echostore.wire.messages import encode_operation

TICK_MS: Final = 40
"""How far a writer's clock goes from one depth to the next."""

ADMIN_ONE_IN: Final = 10


@dataclass(frozen=True, slots=True)
class MadeParty:
    """What was made, as far as the maker knows."""

    party: PartyKey
    title: str
    feeds: int
    messages: int
    items: int
    faults: tuple[Fault, ...]


def write_party(
    part: Part, pool: Contents, give: Give, *, processes: int, last: float = 0.0, later: Give | None = None
) -> MadeParty:
    """Make all blocks of one party. `later` takes those of the last share of the rounds."""
    return _PartyWriter(part, pool, give, processes).write(last, later or give)


class _PartyWriter:
    def __init__(self, part: Part, pool: Contents, give: Give, processes: int) -> None:
        seed, root = part.shape.seed, part.shape.root()
        self._part = part
        self._pool = pool.pool
        self._give = give
        self._processes = processes
        self._schedule = Schedule(part)
        self._chance = random.Random(f"party {seed} {part.number}")
        self._members = [
            Member.of(root, part.number, f"member {feed}", _role(feed)) for feed in range(part.shape.feeds)
        ]
        self._title = f"Party {part.number + 1}"
        party_key = seeded_key(root, part.number, "party")
        self._faults = Faults(part)
        self._founding = Founding(party_key, self._members[0], self._title, give)
        self._founding.admit([*self._members[1:], *self._faults.members])
        self.party = self._founding.party
        self._feeds = [SignedFeed(self.party, member.data_key, give, control=False) for member in self._members]
        self._ends: list[deque[tuple[int, Dependency]]] = [deque(maxlen=LAG_ROUNDS_MAX + 2) for _ in self._feeds]
        """The last rounds of each feed, with its last block in them."""
        self._items = self._item_ids()
        own, foreign = [], []
        for item in self._items:
            own.append(item_head(item, own=True))
            foreign.append(item_head(item, own=False))
        self._own_heads, self._foreign_heads = own, foreign

    def write(self, last: float, later: Give) -> MadeParty:
        # What a feed's first message names: its admission, and the system item.
        self._first = [self._founding.feed.mark(), self._write_system_item()]
        schedule = self._schedule
        edits = self._edits()
        changes = [
            np.random.Generator(np.random.PCG64([self._part.shape.seed, self._part.number, feed])).integers(
                0, POOL, length, dtype=np.uint16
            )
            for feed, length in enumerate(schedule.lengths)
        ]
        last_round = int(schedule.lengths[0] * (1 - last)) // schedule.flush if last else schedule.rounds
        founder: Dependency | None = None
        for round_ in range(schedule.rounds):
            if round_ == last_round:
                founder = self._feeds[0].mark()
                for each in self._feeds:
                    each.begin_run(later)
            for feed in range(schedule.feeds):
                self._write_round(round_, feed, changes[feed], edits[feed])
        faults = self._faults.write(self._founding, founder or self._feeds[0].mark(), self._give)
        for each in self._feeds:
            each.flush()
        self._founding.flush()
        return MadeParty(
            self.party,
            self._title,
            len(self._feeds) + len(self._faults.members),
            self._part.messages,
            self._part.items,
            tuple(faults),
        )

    def _item_ids(self) -> list[ItemId]:
        ids = [member.feed for member in self._members]
        count = len(ids)
        seqs = self._schedule.items.seqs.tolist()
        return [created_item_id(ids[item % count], seq, 0) for item, seq in enumerate(seqs)]

    def _write_system_item(self) -> Dependency:
        """The founder's first message, under a head of its own."""
        feed = self._feeds[0]
        self._system_item = created_item_id(feed.id, 0, 0)
        named = feed.fresh([self._founding.feed.mark()])
        depth = 1 + max(each.depth for each in named)
        genesis = Genesis(self._system_item, PropertySet.name, PropertySet.version, SYSTEM_TYPE, None, depth)
        operations = (
            ItemOperation(self._system_item, GENESIS_FIELD, genesis),
            ItemOperation(self._system_item, PropertySet.name, (Set(("title",), self._title),)),
        )
        feed.append([message(named, depth, _time(depth), _encoded(feed.id, operations))], [depth])
        return feed.mark()

    # rounds

    def _write_round(
        self, round_: int, feed_number: int, changes: npt.NDArray[np.uint16], edits: dict[int, bytes]
    ) -> None:
        """One flush of one feed. Hot path: what every message costs is in this loop and in `chain`."""
        schedule, feed = self._schedule, self._feeds[feed_number]
        start = round_ * schedule.flush
        end = min(start + schedule.flush, schedule.lengths[feed_number])
        if start >= end:
            return
        marks = [self._end(other, at) for other, at in schedule.named(round_, feed_number)] if round_ else self._first
        named = feed.fresh(marks)
        depth = max([feed.depth, *[each.depth for each in named]])
        prefix = timeframe_part(named)
        kinds = schedule.kinds[feed_number][start:end].tolist()
        targets = schedule.targets[feed_number][start:end].tolist()
        parts = changes[start:end].tolist()
        pool, own_heads, foreign_heads, feeds = self._pool, self._own_heads, self._foreign_heads, schedule.feeds
        payloads: list[bytes] = []
        depths = list(range(depth + 1, depth + 1 + end - start))
        for at, (kind, target) in enumerate(zip(kinds, targets, strict=True)):
            depth += 1
            if kind == SET and target != SYSTEM and start + at not in edits:
                head = own_heads[target] if target % feeds == feed_number else foreign_heads[target]
                operation = head + pool[parts[at]]
                body = OPERATION + number(len(operation)) + operation
            else:
                operations = self._operations(feed_number, start + at, kind, target, depth, parts[at], edits)
                body = b"".join([OPERATION + number(len(each)) + each for each in operations])
            payloads.append(prefix + DEPTH + number(depth) + TIME + number(2 * _time(depth)) + body)
            prefix = b""
        feed.append(payloads, depths)
        self._ends[feed_number].append((round_, feed.mark()))

    def _end(self, feed: int, round_: int) -> Dependency:
        for at, mark in reversed(self._ends[feed]):
            if at <= round_:
                return mark
        raise AssertionError(f"round {round_} of feed {feed} is forgotten: {self._ends[feed]}")

    def _operations(
        self, feed: int, slot: int, kind: int, target: int, depth: int, part: int, edits: dict[int, bytes]
    ) -> list[bytes]:
        """The operations of a message that is not one plain change of one property."""
        if slot in edits:
            return [edits[slot]]
        writer, chance = self._members[feed].feed, self._chance
        if target == SYSTEM:
            head = item_head(self._system_item, own=feed == 0)
            return [head + (property_part(made.odd_change(chance)) if kind == ODD else self._pool[part])]
        item = self._items[target]
        if kind == GENESIS:
            parent = int(self._schedule.items.parents[target])
            model = MODELS[self._schedule.items.models[target]]
            above = None if parent == SYSTEM else self._items[parent]
            return _encoded(writer, made.genesis_operations(item, model, above, depth, chance))
        if kind == MOVE:
            return _encoded(writer, [made.move_operation(item, self._new_parent(feed, target))])
        if kind in (NAME, DELETE):
            make = made.name_operation if kind == NAME else made.delete_operation
            return _encoded(writer, [make(item, chance)])
        assert kind == ODD, kind
        return _encoded(writer, [ItemOperation(item, PropertySet.name, made.odd_change(chance))])

    def _new_parent(self, feed: int, target: int) -> ItemId | None:
        """An older item of the same feed, or the top."""
        older = self._chance.randrange(feed, target + 1, self._schedule.feeds)
        return None if older == target else self._items[older]

    # texts, lists, logs

    def _edits(self) -> list[dict[int, bytes]]:
        """Of each feed, by slot, the operations on items that are no property sets."""
        schedule = self._schedule
        found: list[dict[int, bytes]] = [{} for _ in self._feeds]
        models = schedule.items.models
        if not models.any():
            return found
        by_item: dict[int, list[Edit]] = {}
        for feed, (kinds, targets) in enumerate(zip(schedule.kinds, schedule.targets, strict=True)):
            chosen = (kinds == SET) & (targets != SYSTEM) & (models[np.maximum(targets, 0)] != 0)
            for slot, target in zip(np.flatnonzero(chosen).tolist(), targets[chosen].tolist(), strict=True):
                edit = Edit(slot // schedule.flush, feed, schedule.seq(feed, slot))
                by_item.setdefault(target, []).append(edit)
        heard = schedule.knowledge()
        work = [self._item_edits(item, edits, heard) for item, edits in sorted(by_item.items())]
        for each, encoded in zip(work, encoded_edits(work, processes=self._processes), strict=True):
            for edit, operation in zip(each.edits, encoded, strict=True):
                found[edit.feed][edit.seq - schedule.seq(edit.feed, 0)] = operation
        return found

    def _item_edits(self, item: int, edits: list[Edit], heard: Any) -> ItemEdits:
        ordered = tuple(sorted(edits, key=lambda edit: (edit.round, edit.feed, edit.seq)))
        writers = tuple(sorted({edit.feed for edit in ordered}))
        rounds, feeds = [edit.round for edit in ordered], [edit.feed for edit in ordered]
        ids: tuple[FeedId, ...] = tuple(self._members[writer].feed for writer in writers)
        model = MODELS[self._schedule.items.models[item]]
        seed = f"item {self._part.shape.seed} {self._part.number} {item}"
        return ItemEdits(self._items[item], model, seed, ordered, heard[rounds, feeds][:, list(writers)], writers, ids)


def _encoded(writer: FeedId, operations: list[ItemOperation] | tuple[ItemOperation, ...]) -> list[bytes]:
    return [encode_operation(writer, operation).SerializeToString() for operation in operations]


def _time(depth: int) -> int:
    return START_MS + TICK_MS * depth


def _role(feed: int) -> Role:
    if feed == 0:
        return Role.OWNER
    return Role.ADMIN if feed % ADMIN_ONE_IN == 0 else Role.EDITOR
