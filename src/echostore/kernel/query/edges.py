"""Edges of one traversal, kept so that a change costs what changed.

A stage holds y when some x of the stage before leads to y. Which x and y, is kept in one of two ways, by the side on
which an edge can be read from one row:

    Forward    x says where it leads: parent, source, target, references. Kept: out[x], and how many lead to y.
    Backward   y says what leads to it: children (y's parent), embedded, links (their ends), referrers. Kept: into[y]
               and out[x]. A parent of 100,000 children is not listed again when one of them moves.

`update` is told which x entered or left the stage before and which items changed, and answers which y to look at.
"""

from collections.abc import Callable, Iterable, Set
from typing import Protocol

from echostore.kernel.ids import ItemId
from echostore.kernel.query.evaluate import edges_out
from echostore.kernel.query.source import Row, Source
from echostore.kernel.query.spec import Step

RowOf = Callable[[ItemId], Row | None]


class Edges(Protocol):
    """The edges from the members of one stage to the candidates of the next."""

    def update(
        self,
        *,
        members: Set[ItemId],
        entered: Iterable[ItemId],
        left: Iterable[ItemId],
        changed: Set[ItemId],
        row_of: RowOf,
    ) -> Set[ItemId]:
        """Take in a batch; `members` is the stage before as it is now. Returns candidates whose edges changed."""

    def reaches(self, item: ItemId) -> bool:
        """Whether a member leads to the item."""


def edges_for(step: Step, source: Source) -> Edges:
    return Forward(step, source) if step in FORWARD else Backward(step, source)


FORWARD = frozenset((Step.PARENT, Step.SOURCE, Step.TARGET, Step.REFERENCES))


class Forward:
    """Edges that x's own row names."""

    def __init__(self, step: Step, source: Source) -> None:
        self._step, self._source = step, source
        self._out: dict[ItemId, tuple[ItemId, ...]] = {}
        self._counts: dict[ItemId, int] = {}

    def reaches(self, item: ItemId) -> bool:
        return item in self._counts

    def update(
        self,
        *,
        members: Set[ItemId],
        entered: Iterable[ItemId],
        left: Iterable[ItemId],
        changed: Set[ItemId],
        row_of: RowOf,
    ) -> Set[ItemId]:
        touched: set[ItemId] = set()
        for item in {*entered, *left, *changed}:
            row = row_of(item) if item in members else None
            self._replace(item, () if row is None else dict.fromkeys(edges_out(self._step, self._source, row)), touched)
        return touched

    def _replace(self, item: ItemId, fresh: Iterable[ItemId], touched: set[ItemId]) -> None:
        before, after = self._out.pop(item, ()), tuple(fresh)
        if after:
            self._out[item] = after
        if before == after:
            return
        counts = self._counts
        for other in after:  # first up, then down: what stays never falls to zero
            counts[other] = counts.get(other, 0) + 1
            touched.add(other)
        for other in before:
            counts[other] -= 1
            if not counts[other]:
                del counts[other]
            touched.add(other)


class Backward:
    """Edges that y's own row names."""

    def __init__(self, step: Step, source: Source) -> None:
        self._step, self._source = step, source
        self._out: dict[ItemId, set[ItemId]] = {}
        self._into: dict[ItemId, tuple[ItemId, ...]] = {}  # tuples, for most items have one way in

    def reaches(self, item: ItemId) -> bool:
        return item in self._into

    def update(
        self,
        *,
        members: Set[ItemId],
        entered: Iterable[ItemId],
        left: Iterable[ItemId],
        changed: Set[ItemId],
        row_of: RowOf,
    ) -> Set[ItemId]:
        touched: set[ItemId] = set()
        for item in left:
            for other in self._out.pop(item, ()):
                self._set_into(other, tuple(each for each in self._into[other] if each != item))
                touched.add(other)
        for item in entered:
            row = row_of(item)
            assert row is not None, f"a member without a row: {item.hex()}"
            reached = set(edges_out(self._step, self._source, row))
            if reached:
                self._out[item] = reached
            for other in reached:
                into = self._into.get(other, ())
                if item not in into:
                    self._into[other] = (*into, item)
                touched.add(other)
        for item in changed:
            row = row_of(item)
            fresh = () if row is None else tuple(dict.fromkeys(self._ways_in(row)))
            self._replace(item, tuple(each for each in fresh if each in members), touched)
        return touched

    def _ways_in(self, row: Row) -> Iterable[ItemId]:
        """What leads to the item of this row, whether a member or not."""
        if self._step is Step.CHILDREN:
            return () if row.parent is None else (row.parent,)
        if self._step is Step.EMBEDDED:
            return self._source.embedders(row.item)
        if self._step is Step.LINKS:
            target = row.target if row.target_party is None else None
            return tuple(end for end in (row.source, target) if end is not None)
        assert self._step is Step.REFERRERS, self._step
        return self._source.references(row.item)

    def _replace(self, item: ItemId, fresh: tuple[ItemId, ...], touched: set[ItemId]) -> None:
        before = self._into.get(item, ())
        if before == fresh:
            return
        touched.add(item)
        self._set_into(item, fresh)
        for other in before:
            if other not in fresh:
                self._out[other].discard(item)
        for other in fresh:
            self._out.setdefault(other, set()).add(item)

    def _set_into(self, item: ItemId, into: tuple[ItemId, ...]) -> None:
        if into:
            self._into[item] = into
        else:
            self._into.pop(item, None)
