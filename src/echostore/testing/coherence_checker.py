"""A checker for roots, edges and leaves that really run: what they hold is compared with what was true.

At every tick that a root exposes, the answers to all specs of a run are computed afresh and remembered. From then on
every version that anybody holds is judged by them:

    C1   at every tick of its interval a held value is the answer of that tick
    C3   the current tick of a leaf never falls
    C5   an own batch is on top of the state, or in it, never both
    C6   each batch is applied once, in order
    C7   no id names two things
    C9   what is kept is bounded by indexes, links and systems

It reaches into machines under the locks of their hosts; nothing of it is part of the product.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from echostore.kernel.coherence.cache import ENTRIES_MAX
from echostore.kernel.coherence.directory import RECORDS_MAX
from echostore.kernel.coherence.events import Advanced, Committed, Effect, Event
from echostore.kernel.coherence.holdings import Holdings
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import Arc, IndexValue, Spec
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
        self.ticks: dict[str, int] = {}
        self.ids: set[bytes] = set()
        self.compared = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, every tick of any root in this process is remembered, and every commit counted."""
        receive = Root.receive
        checker = self

        def watched(root: Root, event: Event) -> list[Effect]:
            if isinstance(event, Advanced):
                checker.exposed(event.tick)
            elif isinstance(event, Committed):
                checker.committed(event.clock, event.batch)
            return receive(root, event)

        with patch.object(Root, "receive", watched):
            yield

    def exposed(self, tick: int) -> None:
        assert tick not in self.truth, f"tick {tick} names two states"
        source = self.source()
        self.truth[tick] = {spec: fresh_answer(spec, source) for spec in self.specs}

    def committed(self, clock: Arc, batch: int) -> None:
        """C6."""
        assert batch == self.applied.get(clock, 0) + 1, f"batch {batch} of {clock} after {self.applied.get(clock, 0)}"
        self.applied[clock] = batch

    def made(self, id: bytes) -> None:
        """C7."""
        assert id not in self.ids, f"{id.hex()} was issued twice"
        self.ids.add(id)

    def check_holdings(self, holdings: Holdings) -> None:
        """C1, C9."""
        assert len(holdings) <= ENTRIES_MAX
        for spec in self.specs:
            for version in holdings.versions(spec):
                for tick in range(max(version.min, version.max - LOOK_BACK_TICKS), version.max + 1):
                    true = self.truth.get(tick)
                    if true is not None:
                        self.compared += 1
                        assert version.value == true[spec], f"C1: tick {tick} of {version.min} to {version.max}"

    def check_leaf(self, name: str, leaf: Leaf) -> None:
        """C1, C3, C5."""
        cache = leaf.caches[leaf.home]
        assert cache.cur >= self.ticks.get(name, 0), f"C3: {name} went from {self.ticks[name]} back to {cache.cur}"
        self.ticks[name] = cache.cur
        for batch in leaf.outbox.batches:
            assert batch.number > cache.follows.get(batch.arc, 0), "C5: a batch is in the state and on top of it"
        numbers = [(batch.arc.gen, batch.number) for batch in leaf.outbox.batches]
        assert numbers == sorted(set(numbers)), "C5: a batch is on top twice"
        self.check_holdings(cache.holdings)

    def check_serving(self, serving: Serving) -> None:
        """C1 of the system's own, C9."""
        self.check_holdings(serving.holdings)
        for directory in serving.links.values():
            assert len(directory.records) <= RECORDS_MAX
            assert directory.marks <= directory.records.keys(), "C9: marks of indexes that nobody watches"
