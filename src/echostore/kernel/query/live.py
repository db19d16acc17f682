"""Live queries: an answer that follows the data.

    changed ids --> Membership (stages, edges) --> Answer (window, reduction) --> Change, or None

The peer calls `update` once for each applied batch with every item whose row is new, other or gone, and with both ends
of every edge that came or went: {y, a, b} when y moves from a to b, a link with its source and target, x with what it
refers to now and before. Naming too many items is harmless.

    L1  After every update the maintained answer equals a fresh evaluation.
    L2  None is returned exactly when the answer is the same: the same items, in the same order, with the same
        projected values; the same groups with the same values.
    L3  The cost follows what changed, not how much there is.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.query.evaluate import entry_maker
from echostore.kernel.query.fields import Field, reader
from echostore.kernel.query.membership import Membership
from echostore.kernel.query.order import identical
from echostore.kernel.query.reduce import Group, Reduction
from echostore.kernel.query.source import Row, Source
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.query.window import Window
from echostore.kernel.values import Value

T = TypeVar("T")
U = TypeVar("U")
Token = tuple[PartyKey, ItemId]


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """How an answer differs from the one before.

    For queries with an order, `positions` gives the new index of everything added or moved: take out what was removed
    or moved, put these in by ascending index, and the list is the new answer. A query that reduces has only the last
    two: groups that are new or have another value, and the `by` of groups that are gone.
    """

    added: tuple[T, ...] = ()
    changed: tuple[T, ...] = ()
    removed: tuple[T, ...] = ()
    moved: tuple[T, ...] = ()
    positions: tuple[tuple[int, T], ...] = ()
    groups: tuple[Group, ...] = ()
    groups_removed: tuple[Value, ...] = ()

    def map(self, make: Callable[[T], U]) -> "Change[U]":
        """The same change with other names for the items."""
        return Change(
            added=tuple(map(make, self.added)),
            changed=tuple(map(make, self.changed)),
            removed=tuple(map(make, self.removed)),
            moved=tuple(map(make, self.moved)),
            positions=tuple((index, make(token)) for index, token in self.positions),
            groups=self.groups,
            groups_removed=self.groups_removed,
        )

    def replay(self, before: Iterable[T]) -> list[T]:
        """The answer after this change, from the one before; for queries with an order."""
        gone = {*self.removed, *self.moved}
        after = [token for token in before if token not in gone]
        for index, token in self.positions:
            after.insert(index, token)
        return after


class LiveQuery:
    """The live answer of one party."""

    def __init__(self, spec: QuerySpec, source: Source) -> None:
        self._source = source
        self._membership = Membership(spec, source)
        self._answer: Answer[ItemId] = Answer(spec)

    def start(self) -> Change[ItemId]:
        """Answer for the first time; everything is new."""
        row_of = _read_once(self._source)
        return self._answer.fill(self._membership.start(row_of).entered, row_of)

    def update(self, changed: Set[ItemId]) -> Change[ItemId] | None:
        """Follow one applied batch."""
        row_of = _read_once(self._source)
        delta = self._membership.update(changed, row_of)
        return self._answer.update(delta.entered, delta.left, delta.touched, row_of)

    def items(self) -> list[ItemId]:
        """The answer as it is, in order."""
        return self._answer.tokens()

    @property
    def members(self) -> Set[ItemId]:
        """All items that match, also those beyond the limit."""
        return self._membership.members

    def groups(self) -> tuple[Group, ...]:
        """The reduced answer as it is."""
        return self._answer.groups()


class LiveUnion:
    """The live answer over several parties. Order, limit and reduction apply to the union.

    A party's source is read only while that party is added or updated, so that its lock is enough; the rows of the
    others are kept here.
    """

    def __init__(self, spec: QuerySpec) -> None:
        self._spec = spec
        self._memberships: dict[PartyKey, tuple[Membership, Source]] = {}
        self._answer: Answer[Token] = Answer(spec)
        self._rows: dict[Token, Row] = {}

    def add(self, party: PartyKey, source: Source) -> Change[Token] | None:
        """Take in another party."""
        membership = Membership(self._spec, source)
        self._memberships[party] = (membership, source)
        row_of = _read_once(source)
        delta = membership.start(row_of)
        return self._merge(party, delta.entered, delta.left, delta.touched, row_of)

    def update(self, party: PartyKey, changed: Set[ItemId]) -> Change[Token] | None:
        """Follow one applied batch of one party."""
        membership, source = self._memberships[party]
        row_of = _read_once(source)
        delta = membership.update(changed, row_of)
        return self._merge(party, delta.entered, delta.left, delta.touched, row_of)

    def items(self) -> list[Token]:
        return self._answer.tokens()

    def groups(self) -> tuple[Group, ...]:
        return self._answer.groups()

    def _merge(
        self,
        party: PartyKey,
        entered: list[ItemId],
        left: list[ItemId],
        touched: list[ItemId],
        row_of: Callable[[ItemId], Row | None],
    ) -> Change[Token] | None:
        gone = [(party, item) for item in left]
        for item in (*entered, *touched):
            row = row_of(item)
            assert row is not None, f"a member without a row: {item.hex()}"
            self._rows[party, item] = replace(row, values=dict(row.values))
        change = self._answer.update(
            [(party, item) for item in entered], gone, [(party, item) for item in touched], self._rows.get
        )
        for token in gone:
            del self._rows[token]
        return change


class Answer(Generic[T]):
    """What is seen of the last stage: order, limit, projection, reduction."""

    def __init__(self, spec: QuerySpec) -> None:
        self._entry = entry_maker(spec.order)
        self._ordered = bool(spec.order)
        windowed = spec.limit is not None or (self._ordered and spec.reduce is None)
        self._window: Window[T] | None = Window(spec.limit) if windowed else None
        self._reduction: Reduction[T] | None = None if spec.reduce is None else Reduction(spec.reduce)
        self._see = _view(spec.select)
        self._seen: dict[T, tuple[Any, ...]] = {}  # what was last shown of each item in the answer

    def tokens(self) -> list[T]:
        if self._window is not None:
            return list(self._window)
        assert self._reduction is None, "a reduction without a limit keeps no items"
        return sorted(self._seen)  # type: ignore[type-var]  # tokens are bytes or tuples of bytes

    def groups(self) -> tuple[Group, ...]:
        assert self._reduction is not None, "the query reduces nothing"
        return self._reduction.groups()

    def fill(self, entered: Iterable[T], row_of: Callable[[T], Row | None]) -> Change[T]:
        """The first answer; as `update`, and quicker for many items."""
        if self._window is None:
            return self.update(entered, (), (), row_of) or Change(
                groups=self._reduction.groups() if self._reduction else ()
            )
        self._window.fill({token: self._entry(token, _row(row_of, token)) for token in entered})
        inside = list(self._window)
        for token in inside:
            self._show(token, _row(row_of, token))
        if self._reduction is not None:
            self._reduction.settle()
            return Change(groups=self._reduction.groups())
        return Change(added=tuple(inside), positions=tuple(enumerate(inside)) if self._ordered else ())

    def update(
        self, entered: Iterable[T], left: Iterable[T], touched: Iterable[T], row_of: Callable[[T], Row | None]
    ) -> Change[T] | None:
        rekeyed: list[tuple[T, int]] = []  # items that stay and sort elsewhere, with their old index
        came, went = entered, left
        if self._window is not None:
            rekeyed = self._move(entered, left, touched, row_of)
            came, went = self._window.settle()
        changed = self._look(came, went, touched, row_of)
        if self._reduction is not None:
            groups, groups_removed = self._reduction.settle()
            return Change(groups=groups, groups_removed=groups_removed) if groups or groups_removed else None
        return self._change(came, went, changed, rekeyed)

    def _move(
        self, entered: Iterable[T], left: Iterable[T], touched: Iterable[T], row_of: Callable[[T], Row | None]
    ) -> list[tuple[T, int]]:
        """Bring the window up to date; returns the items inside whose entry changed, with their old index."""
        window = self._window
        assert window is not None
        fresh = {}
        if self._ordered:
            for token in touched:
                entry = self._entry(token, _row(row_of, token))
                if entry != window.entry(token):
                    fresh[token] = entry
        ranked = [(token, window.rank(token)) for token in fresh if token in window] if self._reduction is None else []
        for token in left:
            window.drop(token)
        for token, entry in fresh.items():
            window.put(token, entry)
        for token in entered:
            window.put(token, self._entry(token, _row(row_of, token)))
        return ranked

    def _look(
        self, came: Iterable[T], went: Iterable[T], touched: Iterable[T], row_of: Callable[[T], Row | None]
    ) -> list[T]:
        """Show what came, forget what went; returns the items that stayed and look different."""
        for token in went:
            self._hide(token)
        changed = []
        for token in touched:
            if token in self._seen and self._show(token, _row(row_of, token)):
                changed.append(token)
        for token in came:
            self._show(token, _row(row_of, token))
        return changed

    def _show(self, token: T, row: Row) -> bool:
        """Note how the item looks now; returns whether that is new."""
        if self._reduction is not None:
            self._reduction.put(token, row)
            self._seen[token] = ()
            return False
        view, before = self._see(row), self._seen.get(token)
        self._seen[token] = view
        return before is None or not all(map(identical, view, before))

    def _hide(self, token: T) -> None:
        del self._seen[token]
        if self._reduction is not None:
            self._reduction.drop(token)

    def _change(
        self, came: Iterable[T], went: Iterable[T], changed: list[T], rekeyed: list[tuple[T, int]]
    ) -> Change[T] | None:
        added, removed = tuple(came), tuple(sorted(went))  # type: ignore[type-var]  # as in `tokens`
        window = self._window
        if window is None or not self._ordered:
            if not added and not removed and not changed:
                return None
            return Change(tuple(sorted(added)), tuple(sorted(changed)), removed)  # type: ignore[type-var]  # as above
        stayed = {token: index for token, index in rekeyed if token in window}
        ranks = {token: window.rank(token) for token in (*added, *stayed)}
        # With nothing added or removed, the order is the same exactly when every re-sorted item kept its index.
        if not added and not removed and all(ranks[token] == index for token, index in stayed.items()):
            stayed = {}
        if not added and not removed and not changed and not stayed:
            return None
        placed = sorted((ranks[token], token) for token in (*added, *stayed))
        return Change(
            added=tuple(token for _, token in placed if token not in stayed),
            changed=tuple(window.ordered(changed)),
            removed=removed,
            moved=tuple(token for _, token in placed if token in stayed),
            positions=tuple(placed),
        )


def _view(select: tuple[Field, ...] | None) -> Callable[[Row], tuple[Any, ...]]:
    """What an answer shows of a row: the selected fields, or all there is. Live mappings are copied."""
    if select is not None:
        reads = [reader(field) for field in select]
        return lambda row: tuple([read(row) for read in reads])
    return lambda row: (
        dict(row.values),
        row.type,
        row.model,
        row.parent,
        row.deleted,
        row.source,
        row.target,
        row.target_party,
        row.created,
        row.view_class,
    )


def _read_once(source: Source) -> Callable[[ItemId], Row | None]:
    """Rows of one batch, each read once: a source may build them from storage."""
    rows: dict[ItemId, Row | None] = {}

    def row_of(item: ItemId) -> Row | None:
        if item in rows:
            return rows[item]
        row = rows[item] = source.row(item)
        return row

    return row_of


def _row(row_of: Callable[[T], Row | None], token: T) -> Row:
    row = row_of(token)
    assert row is not None, f"an item of the answer without a row: {token!r}"
    return row
