"""A checker for roots, edges and leaves that really run: what they hold is compared with what was true.

At every tick that a root exposes, the answers to all specs of a run are computed afresh and remembered, with what the
tick includes of other clocks. From then on everything that anybody holds, reads or is told is judged by that:

    C1   at every tick of its interval a held value is the answer of that tick
    C2   all reads of a transaction are the answers of one tick
    C3   the current tick of a leaf never falls
    C4   a view includes exactly the batches that it says; a message comes after its context; over several roots none
         includes what another has not reached
    C5   an own batch is on top of the state, or in it, never both
    C6   each batch is applied once, in order
    C7   no id names two things
    C8   what is live below is held above, over the interval that was told
    C9   what is kept is bounded by indexes, links and systems
    C10  deltas since an index was last read cost no more than its value

It reaches into machines under the locks of their hosts; nothing of it is part of the product. `checked` counts by rule
what was looked at: a run that never got to a rule says nothing about it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from echostore.kernel.coherence.cache import ENTRIES_MAX
from echostore.kernel.coherence.directory import RECORDS_MAX, Directory
from echostore.kernel.coherence.events import Advanced, Committed, Delivered, Effect, Event
from echostore.kernel.coherence.holdings import Holdings
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import Acquire, Arc, Delta, Grant, IndexValue, Spec, Update, UserMessage
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.serving import Serving
from echostore.kernel.query.evaluate import evaluate
from echostore.kernel.query.source import Source
from echostore.wire.index_spec import IndexItem, index_query, index_value

LOOK_BACK_TICKS = 24
"""How far into the past of an interval a check looks: earlier ticks were looked at by earlier checks."""


def fresh_answer(spec: Spec, source: Source) -> IndexValue:
    """The answer to a spec from nothing."""
    asked = index_query(spec)
    assert asked.query is not None, "the checker asks queries"
    return index_value(
        IndexItem(row.item, row.type, row.model, dict(row.values), row.parent, row.deleted, row.source, row.target)
        for _, row in evaluate(asked.query, source).rows
    )


class CoherenceChecker:
    """What was true, and whether what is held agrees."""

    def __init__(self, specs: Iterable[Spec], source: Callable[[], Source]) -> None:
        self.specs = tuple(specs)
        self.source = source
        self.truth: dict[int, dict[Spec, IndexValue]] = {}
        self.applied: dict[Arc, int] = {}
        self.included: dict[tuple[Arc, int], int] = {}
        """The tick that includes each batch first."""
        self.followed: dict[tuple[Arc, int], dict[Arc, int]] = {}
        """What each tick of a root includes of other roots."""
        self.ticks: dict[str, int] = {}
        self.ids: set[bytes] = set()
        self.spent: dict[tuple[Directory, Spec], int] = {}
        """Bytes of deltas by link and index, since the index was last read."""
        self.checked: Counter[str] = Counter()
        self.compared = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, every tick, commit, delta and message of any machine in this process is looked at."""
        root, leaf = Root.receive, Leaf.receive
        update, grant, touch = Directory.update, Directory.grant, Directory.touch
        checker = self

        def watched_root(machine: Root, event: Event) -> list[Effect]:
            if isinstance(event, Advanced):
                checker.exposed(event.tick)
                checker.follows(machine, event)
            elif isinstance(event, Committed):
                checker.committed(event.clock, event.batch, event.tick)
            return root(machine, event)

        def watched_leaf(machine: Leaf, event: Event) -> list[Effect]:
            effects = leaf(machine, event)
            for effect in effects:
                if isinstance(effect, Delivered):
                    checker.delivered(machine, effect.message)
            return effects

        def watched_update(directory: Directory, clock: Arc, holdings: Holdings, *more: Any) -> Update | None:
            told = update(directory, clock, holdings, *more)
            if told is not None:
                checker.updated(directory, told, holdings)
            return told

        def watched_grant(directory: Directory, asked: Acquire, *more: Any) -> Grant:
            checker.spent.pop((directory, asked.spec), None)
            return grant(directory, asked, *more)

        def watched_touch(directory: Directory, spec: Spec) -> None:
            checker.spent.pop((directory, spec), None)
            touch(directory, spec)

        with ExitStack() as stack:
            stack.enter_context(patch.object(Root, "receive", watched_root))
            stack.enter_context(patch.object(Leaf, "receive", watched_leaf))
            stack.enter_context(patch.object(Directory, "update", watched_update))
            stack.enter_context(patch.object(Directory, "grant", watched_grant))
            stack.enter_context(patch.object(Directory, "touch", watched_touch))
            yield

    # what happened

    def exposed(self, tick: int) -> None:
        assert tick not in self.truth, f"tick {tick} names two states"
        source = self.source()
        self.truth[tick] = {spec: fresh_answer(spec, source) for spec in self.specs}

    def follows(self, root: Root, event: Advanced) -> None:
        """What a tick of a root includes of others: all that the one before did, and what is new."""
        known = self.followed.get((root.clock, event.tick - 1), {})
        fresh = {each.clock: max(each.tick, known.get(each.clock, 0)) for each in event.follows}
        self.followed[root.clock, event.tick] = {**known, **fresh}

    def committed(self, clock: Arc, batch: int, tick: int = 0) -> None:
        """C6."""
        self.checked["C6"] += 1
        assert batch == self.applied.get(clock, 0) + 1, (
            f"C6: batch {batch} of {clock} after {self.applied.get(clock, 0)}"
        )
        self.applied[clock] = batch
        self.included[clock, batch] = tick

    def made(self, id: bytes) -> None:
        """C7."""
        self.checked["C7"] += 1
        assert id not in self.ids, f"C7: {id.hex()} was issued twice"
        self.ids.add(id)

    def delivered(self, leaf: Leaf, message: UserMessage) -> None:
        """C4, for a message: every clause of its context is shown, by one of its witnesses."""
        for clause in message.context:
            self.checked["C4"] += 1
            shown = [cache for cache in leaf.caches.values() for each in clause if cache.reached(each.clock, each.tick)]
            assert shown, f"C4: a message came before its context {clause}"

    def updated(self, directory: Directory, update: Update, holdings: Holdings) -> None:
        """C10."""
        for item in update.items:
            if isinstance(item, Delta):
                self.checked["C10"] += 1
                key = (directory, item.spec)
                self.spent[key] = self.spent.get(key, 0) + len(item.patch)
                version = holdings.at(item.spec, update.tick)
                assert version is not None, "C8: a delta to a value that is not held"
                size = len(version.value)
                assert self.spent[key] <= size, f"C10: deltas of {self.spent[key]} bytes for a value of {size}"

    # what is held

    def check_holdings(self, holdings: Holdings) -> None:
        """C1, C9."""
        assert len(holdings) <= ENTRIES_MAX, "C9: too many indexes"
        self.checked["C9"] += 1
        for spec in self.specs:
            for version in holdings.versions(spec):
                for tick in range(max(version.min, version.max - LOOK_BACK_TICKS), version.max + 1):
                    true = self.truth.get(tick)
                    if true is not None:
                        self.compared += 1
                        self.checked["C1"] += 1
                        assert version.value == true[spec], f"C1: tick {tick} of {version.min} to {version.max}"

    def check_transaction(self, tick: int, reads: Mapping[Spec, IndexValue]) -> None:
        """C2."""
        true = self.truth.get(tick)
        if true is not None:
            self.checked["C2"] += len(reads)
            wrong = [spec for spec, value in reads.items() if value != true[spec]]
            assert not wrong, f"C2: {len(wrong)} of {len(reads)} reads are not of tick {tick}"

    def check_leaf(self, name: str, leaf: Leaf) -> None:
        """C1, C3, C4, C5."""
        cache = leaf.caches[leaf.home]
        self.checked.update(["C3", "C5"])
        assert cache.cur >= self.ticks.get(name, 0), f"C3: {name} went from {self.ticks[name]} back to {cache.cur}"
        self.ticks[name] = cache.cur
        for batch in leaf.outbox.batches:
            assert batch.number > cache.follows.get(batch.arc, 0), "C5: a batch is in the state and on top of it"
        numbers = [(batch.arc.gen, batch.number) for batch in leaf.outbox.batches]
        assert numbers == sorted(set(numbers)), "C5: a batch is on top twice"
        self.check_follows(leaf)
        self.check_causal(leaf)
        self.check_holdings(cache.holdings)

    def check_follows(self, leaf: Leaf) -> None:
        """C4: the state that is shown includes the batches it says, and not one more."""
        cache = leaf.caches[leaf.home]
        for clock, batch in cache.follows.items():
            if clock.system == leaf.systems.get(leaf.home) and (clock, batch) in self.included:
                self.checked["C4"] += 1
                assert self.included[clock, batch] <= cache.cur, f"C4: tick {cache.cur} does not include batch {batch}"
                after = self.included.get((clock, batch + 1))
                assert after is None or after > cache.cur, f"C4: tick {cache.cur} includes batch {batch + 1} unsaid"

    def check_causal(self, leaf: Leaf) -> None:
        """C4: a view over several roots that is offered as one has what each of them includes of the others."""
        if len(leaf.caches) < 2 or not leaf.is_causal():
            return
        cur = {cache.clock: cache.cur for cache in leaf.caches.values() if cache.clock is not None}
        for clock, tick in cur.items():
            for other, reached in self.followed.get((clock, tick), {}).items():
                if other in cur:
                    self.checked["C4"] += 1
                    assert reached <= cur[other], f"C4: a view has {reached} of a root that it shows at {cur[other]}"

    def check_serving(self, serving: Serving) -> None:
        """C1 of the system's own, C8, C9, C10."""
        self.check_holdings(serving.holdings)
        holdings = serving.holdings
        for directory in serving.links.values():
            assert len(directory.records) <= RECORDS_MAX, "C9: too many records"
            assert directory.marks <= directory.records.keys(), "C9: marks of indexes that nobody watches"
            for spec, record in directory.records.items():
                if record.live and spec not in directory.marks:  # what is marked is spoken of in the next update
                    self.checked["C8"] += 1
                    assert holdings.covers(spec, directory.sent, holdings.cur), "C8: live below, and not held here"
