"""PropertySet, slowly: keeps every operation and works the value out from the whole set each time.

There are no layers here. An undo is simply the absence of what it took back. Each rule is one loop over all facts:

    a write (a deletion is one) loses against a later one at its path, and is void when a later one lies above it
    an addition is gone once its own feed removed the element, once somebody who saw it did, or under a later write
    an increment counts while the write it was based on is the latest at or above its path
    what is left is replayed in canonical order: a later one decides what its place is, a value, a map or a set
"""

import math
from dataclasses import dataclass, field
from typing import Any

from echostore.kernel.ids import Stamp
from echostore.kernel.models.property_set import DELETED, Add, Change, Increment, Remove, Set
from echostore.kernel.values import Path, Value

When = tuple[Stamp, int]
"""A stamp and the number of the change within its operation."""


@dataclass(frozen=True)
class Written:
    """One operation as its writer meant it: changes, or the taking back of an earlier operation of its own feed."""

    stamp: Stamp
    changes: tuple[Change, ...] = ()
    undoes: Stamp | None = None


@dataclass
class _Elements:
    """A set in the replay."""

    by_key: dict[bytes, Value] = field(default_factory=dict)


def value_of(operations: list[Written]) -> dict[str, Value]:
    facts = _facts(operations)
    writes = {}
    for when, change in facts:
        if isinstance(change, Set) and (change.path not in writes or writes[change.path][0] < when):
            writes[change.path] = (when, change)
    standing: list[tuple[When, Set | Add]] = [
        (when, change) for when, change in writes.values() if not _later(facts, change.path[:-1], when)
    ]
    for when, change in facts:
        if isinstance(change, Add) and not _removed(facts, when, change) and not _later(facts, change.path, when):
            standing.append((when, change))
    root: dict[str, Any] = {}
    for _, change in sorted(standing, key=lambda fact: (fact[0], len(fact[1].path))):
        _replay(root, change)
    for path in sorted({change.path for _, change in facts if isinstance(change, Increment)}):
        _increase(root, path, _sums(facts, path))
    return {key: _plain(value) for key, value in root.items()}


def _facts(operations: list[Written]) -> list[tuple[When, Change]]:
    """The changes that were not taken back. Taking back an undo brings its target back."""
    by_stamp = {written.stamp: written for written in operations}
    gone: set[Stamp] = set()
    for written in sorted(operations, key=lambda written: (written.stamp.seq, written.stamp.position), reverse=True):
        if written.undoes is not None and written.stamp not in gone:
            assert written.undoes in by_stamp
            gone.add(written.undoes)
    return [
        ((written.stamp, number), change)
        for written in operations
        if written.stamp not in gone
        for number, change in enumerate(written.changes)
    ]


def _later(facts: list[tuple[When, Change]], path: Path, when: When) -> bool:
    """Whether something was written at or above a path after `when`."""
    return any(
        isinstance(change, Set) and path[: len(change.path)] == change.path and other > when for other, change in facts
    )


def _removed(facts: list[tuple[When, Change]], when: When, addition: Add) -> bool:
    stamp, _ = when
    for other, change in facts:
        if isinstance(change, Remove) and (change.path, change.key) == (addition.path, addition.key):
            if other[0].feed == stamp.feed:
                if other > when:
                    return True
            elif any(seen.feed == stamp.feed and seen >= stamp for seen in change.observed):
                return True
    return False


def _replay(root: dict[str, Any], change: Set | Add) -> None:
    *above, last = change.path
    at = root
    for step in above:
        inner = at.get(step)
        if not isinstance(inner, dict):
            if isinstance(change, Set) and change.value is DELETED:
                return
            inner = at[step] = {}
        at = inner
    if isinstance(change, Add):
        if not isinstance(at.get(last), _Elements):
            at[last] = _Elements()
        at[last].by_key[change.key] = change.element
    elif change.value is DELETED:
        at.pop(last, None)
    else:
        at[last] = _copy(change.value)


def _sums(facts: list[tuple[When, Change]], path: Path) -> list[int | float]:
    """One sum for each feed that increments a number whose write still stands."""
    above = [when[0] for when, change in facts if isinstance(change, Set) and path[: len(change.path)] == change.path]
    base = max(above, default=None)
    by_feed: dict[bytes, int | float] = {}
    for when, change in sorted(facts, key=lambda fact: fact[0]):
        if isinstance(change, Increment) and change.path == path and change.base == base:
            feed = when[0].feed
            by_feed[feed] = by_feed.get(feed, 0) + change.delta or 0
    return list(by_feed.values())


def _increase(root: dict[str, Any], path: Path, sums: list[int | float]) -> None:
    """Add to the number at a path or to nothing; anything else there or on the way stays."""
    at: Any = root
    for step in path[:-1]:
        if not isinstance(at, dict):
            return
        at = at.get(step, {})
    known = at.get(path[-1], 0) if isinstance(at, dict) else None
    if not sums or isinstance(known, bool) or not isinstance(known, (int, float)):
        return
    at = root
    for step in path[:-1]:
        at = at.setdefault(step, {})
    numbers = [*sums, known] if path[-1] in at else sums
    total = math.fsum(numbers) if any(isinstance(number, float) for number in numbers) else sum(numbers)
    at[path[-1]] = total


def _copy(value: Value) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _plain(value: Any) -> Value:
    if isinstance(value, _Elements):
        return [value.by_key[key] for key in sorted(value.by_key)]
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value
