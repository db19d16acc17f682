"""Membership: which items each stage of a query holds, kept up to date.

    stage 0   every item that passes
    stage n   every item that passes and to which a member of stage n-1 leads   (`edges`)

A batch runs through the stages once, front to back. Only items that changed, or whose edges did, are looked at. It is
driven by state, not by events: told of an item that did not change, or told twice, it does nothing.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from echostore.kernel.ids import ItemId
from echostore.kernel.query.edges import Edges, RowOf, edges_for
from echostore.kernel.query.evaluate import compile_stage, first_candidates
from echostore.kernel.query.source import Row, Source
from echostore.kernel.query.spec import QuerySpec, Stage, Step

NO_ITEMS: frozenset[ItemId] = frozenset()


@dataclass(frozen=True, slots=True)
class Delta:
    """What a batch did to the last stage. `touched` stayed in, and may have changed."""

    entered: list[ItemId]
    left: list[ItemId]
    touched: list[ItemId]


class Membership:
    """The stages of one query over one source."""

    def __init__(self, spec: QuerySpec, source: Source) -> None:
        self._spec, self._source = spec, source
        self._stages = [_StageMembers(stage, source) for stage in spec.stages]

    @property
    def members(self) -> Set[ItemId]:
        """The last stage."""
        return self._stages[-1].members

    def start(self, row_of: RowOf) -> Delta:
        """Fill the stages; everything in the last one has entered."""
        return self._run(frozenset(first_candidates(self._spec, self._source)), NO_ITEMS, row_of)

    def update(self, changed: Set[ItemId], row_of: RowOf) -> Delta:
        return self._run(changed, changed, row_of)

    def _run(self, candidates: Set[ItemId], changed: Set[ItemId], row_of: RowOf) -> Delta:
        first = self._stages[0]
        entered, left = first.settle(candidates, row_of)
        before = first
        for stage in self._stages[1:]:
            assert stage.edges is not None
            touched = stage.edges.update(
                members=before.members, entered=entered, left=left, changed=changed, row_of=row_of
            )
            entered, left = stage.settle(touched | changed, row_of)
            before = stage
        fresh = frozenset(entered)
        return Delta(entered, left, [item for item in changed if item in before.members and item not in fresh])


class _StageMembers:
    """The members of one stage."""

    __slots__ = ("edges", "members", "test")

    def __init__(self, stage: Stage, source: Source) -> None:
        self.test = compile_stage(stage)
        self.edges: Edges | None = None if stage.step is Step.ALL else edges_for(stage.step, source)
        self.members: set[ItemId] = set()

    def settle(self, candidates: Iterable[ItemId], row_of: RowOf) -> tuple[list[ItemId], list[ItemId]]:
        """Look at these items again; returns those that entered and those that left."""
        entered, left = [], []
        for item in candidates:
            inside = self._holds(item, row_of)
            if inside is (item in self.members):
                continue
            if inside:
                self.members.add(item)
                entered.append(item)
            else:
                self.members.discard(item)
                left.append(item)
        return entered, left

    def _holds(self, item: ItemId, row_of: RowOf) -> bool:
        if self.edges is not None and not self.edges.reaches(item):
            return False
        row: Row | None = row_of(item)
        return row is not None and bool(self.test(row))
