"""A story of replicas that share one text or list: who edits, who hears of it when, in what groups.

Hypothesis draws the steps as numbers; `tell` plays them. Every operation goes through its wire form on the way, and is
delivered only after what its writer had delivered, as the processor does. The tests then compare replicas that got
the same operations in other orders, in other groups, or partly from a snapshot.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from echostore.kernel.ids import FeedId, ItemId, Stamp, item_id

FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(3)]
ITEM: ItemId = item_id(FEEDS[0], 7)

Step = tuple[int, int, int, int, int]
STEPS = st.lists(
    st.tuples(*[st.integers(0, 255)] * 5),
    min_size=40,
    max_size=60,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One model with its codec, and how numbers become an edit."""

    model: type[Any]
    codec: Any
    edit: Callable[[Any, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A sealed operation with what its writer had delivered: writer -> operations."""

    writer: int
    number: int
    message: bytes
    past: tuple[int, ...]
    depth: int

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.depth, FEEDS[self.writer], self.number, 0)

    @property
    def time_ms(self) -> int:
        """A clock on which some neighbours fall into one minute."""
        return self.depth * 20_000


@dataclass(slots=True)
class Replica:
    model: Any
    delivered: list[int]
    depth: int = 0


@dataclass(slots=True)
class Story:
    kind: Kind
    replicas: list[Replica] = field(default_factory=list)
    written: list[list[Written]] = field(default_factory=list)  # per writer

    def all(self) -> list[Written]:
        return [operation for operations in self.written for operation in operations]

    def decode(self, operation: Written) -> tuple[Any, Stamp, int]:
        message = self.message_type().FromString(operation.message)
        return self.kind.codec.decode_operation(message), operation.stamp, operation.time_ms

    def message_type(self) -> Any:
        return self.kind.codec.decode_operation.__annotations__["message"]

    def seal(self, who: int) -> None:
        replica = self.replicas[who]
        sealed = replica.model.seal()
        if sealed is None:
            return
        replica.depth += 1
        message = self.kind.codec.encode_operation(sealed).SerializeToString()
        past = tuple(replica.delivered)
        replica.delivered[who] += 1
        written = Written(who, len(self.written[who]), message, past, replica.depth)
        replica.model.stamped(written.stamp, written.time_ms)
        self.written[who].append(written)

    def stamp_after(self, writer: int) -> Stamp:
        """The place of an operation whose writer has everything."""
        return Stamp(1 + max(operation.depth for operation in self.all()), FEEDS[writer], len(self.all()), 0)

    def deliver(self, who: int, choice: int, count: int) -> None:
        """Up to `count` operations that may come next, in one batch or alone."""
        replica = self.replicas[who]
        batch = []
        for _ in range(count):
            ready = [
                operations[replica.delivered[writer]]
                for writer, operations in enumerate(self.written)
                if writer != who
                and replica.delivered[writer] < len(operations)
                and covers(replica.delivered, operations[replica.delivered[writer]].past)
            ]
            if not ready:
                break
            operation = ready[choice % len(ready)]
            replica.delivered[operation.writer] += 1
            replica.depth = max(replica.depth, operation.depth)
            batch.append(self.decode(operation))
        if count == 1:
            for entry in batch:
                replica.model.apply(*entry)
        else:
            assert replica.model.apply_many(batch) == [None] * len(batch)

    def fresh(self) -> Any:
        return self.kind.model(ITEM)

    def state(self, model: Any) -> bytes:
        state: bytes = self.kind.codec.encode_state(model)
        return state


def covers(delivered: Iterable[int], past: Iterable[int]) -> bool:
    return all(have >= need for have, need in zip(delivered, past, strict=True))


def tell(kind: Kind, steps: list[Step]) -> Story:
    """Play the steps, then seal what is open. Replicas need not have everything at the end."""
    story = Story(kind)
    for feed in FEEDS:
        replica = Replica(kind.model(ITEM), [0] * len(FEEDS))
        replica.model.begin(feed, 0)
        story.replicas.append(replica)
        story.written.append([])
    go_on(story, steps)
    return story


def go_on(story: Story, steps: list[Step]) -> None:
    """Play steps on a story as it is, then seal what is open."""
    for action, who, a, b, c in steps:
        who %= len(FEEDS)
        if action < 150:
            story.kind.edit(story.replicas[who].model, a, b, c)
        elif action < 195:
            story.seal(who)
        else:
            story.deliver(who, a, 1 + b % 4)
    for who in range(len(FEEDS)):
        story.seal(who)


def finish(story: Story) -> None:
    """Everybody hears everything."""
    for _ in range(len(story.all()) + 1):
        for who in range(len(FEEDS)):
            story.deliver(who, 0, 3)


def causal_order(operations: list[Written], chance: random.Random) -> list[Written]:
    """Some order in which nothing comes before what its writer had seen. What is not in the list counts as seen."""
    waiting = {writer: [op for op in operations if op.writer == writer] for writer in range(len(FEEDS))}
    present = {(op.writer, op.number) for op in operations}
    done: set[tuple[int, int]] = set()
    order = []
    while any(waiting.values()):
        ready = [
            queue[0]
            for queue in waiting.values()
            if queue
            and all(
                (writer, number) in done or (writer, number) not in present
                for writer, end in enumerate(queue[0].past)
                for number in range(end)
                if writer != queue[0].writer
            )
        ]
        operation = chance.choice(ready)
        waiting[operation.writer].pop(0)
        done.add((operation.writer, operation.number))
        order.append(operation)
    return order


def groups(entries: list[Any], chance: random.Random) -> Iterable[list[Any]]:
    while entries:
        size = chance.choice([1, 1, 2, 3, 10])
        yield entries[:size]
        entries = entries[size:]
