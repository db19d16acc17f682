"""PropertySet: properties by path, the last writer wins by canonical order.

The state is one *layer* per feed. A layer is a function of that feed's operations alone, and a feed's operations
always arrive in feed order, so the state depends on the set of operations whatever the arrival order (M1). What a
reader sees is the merge of all layers:

    feed a:  title "Trip" @3     done False @5
    feed b:  title "Tour" @4                      merged: title "Tour", done False

Layers are what makes undo exact: undoing a write puts *this feed's* earlier entry back, every other feed's write is
still in its own layer, and the best remaining one wins. An entry costs nothing extra as long as one feed writes it.

Entries of a layer, keyed by (path, kind, element, other feed):
    set        a value at a path, or its deletion. It drops the layer's own entries at and below the path.
    added      an element of a set, with the stamp of its addition
    removed    another feed's additions of an element up to a stamp, as observed by the remover
    increment  a sum over one base: the write whose number it adds to

Merging replays the entries of all layers in stamp order. A write supersedes lower-stamped ones at and below its path.
An increment counts while the write it was based on is the one that stands.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.values import Path, Value

SET, ADDED, REMOVED, INCREMENT = 0, 1, 2, 3


class _Deleted:
    """The value of a path that was deleted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DELETED"


DELETED = _Deleted()


class EntryKey(NamedTuple):
    """What an entry is about. `element` holds canonical value bytes; `other` a feed or a base's stamp."""

    path: Path
    kind: int
    element: bytes
    other: Any


class Entry(NamedTuple):
    """One entry of a layer. For `added` and `removed` the element itself is the value."""

    stamp: Stamp
    value: Value
    upto: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Set:
    """Put a value at a path; DELETED removes it."""

    path: Path
    value: Value


@dataclass(frozen=True, slots=True)
class Add:
    """Add an element to the set at a path. `key` is the element's canonical bytes."""

    path: Path
    element: Value
    key: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove an element: the writer's own addition, and those of others it had observed."""

    path: Path
    element: Value
    key: bytes
    observed: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class Increment:
    """Add to the number that the write `base` left; None when the writer saw no write."""

    path: Path
    delta: int | float
    base: Stamp | None


@dataclass(frozen=True, slots=True)
class Restore:
    """Undo: the writer's own entry at `key` shall be this again, or be gone."""

    key: EntryKey
    entry: Entry | None


Change = Set | Add | Remove | Increment
Operation = tuple[Change | Restore, ...]
"""A PropertySet operation: changes that share one stamp."""

Layer = dict[EntryKey, Entry]


class PropertySet:
    """The state machine. `layers` is the whole state; everything else is derived and cached."""

    name: ClassVar[str] = "property-set"
    version: ClassVar[int] = 1
    __slots__ = ("_merged", "_tops", "item", "layers")

    def __init__(self, item: ItemId, layers: dict[FeedId, Layer] | None = None) -> None:
        self.item = item
        self.layers: dict[FeedId, Layer] = layers or {}
        self._merged: dict[str, Value] | None = None
        self._tops: set[str] = set()  # top keys whose merged value is stale

    # folding

    def apply(self, operation: Operation, stamp: Stamp, time_ms: int) -> None:
        layer = self.layers.get(stamp.feed)
        if layer is None:
            layer = self.layers[stamp.feed] = {}
        for change in operation:
            if isinstance(change, Set):
                path = change.path
                if len(layer) > 1:
                    _drop_at_and_below(layer, path)
                layer[EntryKey(path, SET, b"", None)] = Entry(stamp, change.value)
            elif isinstance(change, Restore):
                path = change.key.path
                _restore(layer, change)
            else:
                path = change.path
                _fold_rare(layer, change, stamp)
            self._stale(path[0], change)
        if not layer:
            del self.layers[stamp.feed]

    def _stale(self, top: str, change: Change | Restore) -> None:
        """Keep the merged view exact where that is cheap: one layer, a plain top-level write."""
        merged = self._merged
        if merged is None:
            return
        if len(self.layers) == 1 and type(change) is Set and len(change.path) == 1 and top not in self._tops:
            if change.value is DELETED:
                merged.pop(top, None)
            else:
                merged[top] = change.value
        else:
            self._tops.add(top)

    # reading

    def value(self) -> dict[str, Value]:
        """All properties. The caller must not change the result."""
        merged = self._merged
        if merged is None:
            merged = self._merged = {}
            self._tops.clear()
            grouped: dict[str, list[tuple[EntryKey, Entry]]] = {}
            for layer in self.layers.values():
                for key, entry in layer.items():
                    grouped.setdefault(key.path[0], []).append((key, entry))
            for top in sorted(grouped):
                self._merge_top(top, grouped[top])
        elif self._tops:
            for top in sorted(self._tops):
                merged.pop(top, None)
                self._merge_top(top, self._entries_of(top))
            self._tops.clear()
        return merged

    def _merge_top(self, top: str, entries: list[tuple[EntryKey, Entry]]) -> None:
        assert self._merged is not None
        if len(entries) == 1 and entries[0][0].kind == SET and len(entries[0][0].path) == 1:
            value = entries[0][1].value
        else:
            value = merge(entries).get(top, DELETED)
        if value is not DELETED:
            self._merged[top] = value

    def get(self, path: Path, default: Value = None) -> Value:
        value: Value = self.value()
        for step in path:
            if not isinstance(value, dict) or step not in value:
                return default
            value = value[step]
        return value

    def standing_write(self, path: Path) -> Stamp | None:
        """The stamp of the write whose value stands at this path, which an increment by this peer is based on."""
        node = _tree(self._entries_of(path[0])).find(path)
        return node.stamp if node else None

    def _entries_of(self, top: str) -> list[tuple[EntryKey, Entry]]:
        return [(key, entry) for layer in self.layers.values() for key, entry in layer.items() if key.path[0] == top]

    def additions(self, path: Path, element: bytes) -> tuple[Stamp, ...]:
        """The additions of an element that stand now, by feed: what a removal by this peer has observed."""
        key = EntryKey(path, ADDED, element, None)
        found = [layer[key].stamp for layer in self.layers.values() if key in layer]
        return tuple(sorted(found, key=lambda stamp: stamp.feed))

    def writes(self, path: Path) -> list[tuple[Stamp, Value]]:
        """Each feed's standing write at exactly this path, the winner first."""
        key = EntryKey(path, SET, b"", None)
        found = [(layer[key].stamp, layer[key].value) for layer in self.layers.values() if key in layer]
        return sorted(found, key=lambda pair: pair[0], reverse=True)


def undo_of(before: Layer, after: Layer) -> tuple[Restore, ...]:
    """What puts a feed's layer back from `after` to `before`."""
    changed = [key for key in after if before.get(key) != after[key]]
    gone = [key for key in before if key not in after]
    restores = [Restore(key, before.get(key)) for key in changed] + [Restore(key, before[key]) for key in gone]
    return tuple(sorted(restores, key=lambda restore: entry_order(restore.key)))


def entry_order(key: EntryKey) -> tuple[Any, ...]:
    """The order of a layer's entries in a snapshot."""
    other = key.other
    return (tuple(step.encode() for step in key.path), key.kind, key.element, () if other is None else (other,))


def _drop_at_and_below(layer: Layer, path: Path) -> None:
    steps = len(path)
    doomed = [key for key in layer if key.path[:steps] == path and not (key.kind == SET and key.path == path)]
    for key in doomed:
        del layer[key]


def _restore(layer: Layer, change: Restore) -> None:
    if change.entry is None:
        layer.pop(change.key, None)
    else:
        layer[change.key] = change.entry


def _fold_rare(layer: Layer, change: Change, stamp: Stamp) -> None:
    """Set elements and increments."""
    if isinstance(change, Add):
        layer[EntryKey(change.path, ADDED, change.key, None)] = Entry(stamp, change.element)
    elif isinstance(change, Remove):
        layer.pop(EntryKey(change.path, ADDED, change.key, None), None)
        for seen in change.observed:
            if seen.feed == stamp.feed:
                continue
            key = EntryKey(change.path, REMOVED, change.key, seen.feed)
            known = layer.get(key)
            if known is None or known.upto is None or known.upto < seen:
                layer[key] = Entry(stamp, change.element, seen)
    elif isinstance(change, Increment):
        key = EntryKey(change.path, INCREMENT, b"", change.base)
        known = layer.get(key)
        layer[key] = Entry(stamp, change.delta if known is None else known.value + change.delta)


def merge(entries: Iterable[tuple[EntryKey, Entry]]) -> dict[str, Value]:
    """The properties that a set of entries of any layers amounts to."""
    merged = _tree(entries).plain()
    return merged if isinstance(merged, dict) else {}


def _tree(entries: Iterable[tuple[EntryKey, Entry]]) -> "_Node":
    removed: dict[tuple[Path, bytes, FeedId], Stamp] = {}
    sums: dict[Path, dict[Stamp | None, list[int | float]]] = {}
    events: list[tuple[Stamp, EntryKey, Entry]] = []
    for key, entry in entries:
        if key.kind == REMOVED:
            assert entry.upto is not None
            place = (key.path, key.element, key.other)
            if place not in removed or removed[place] < entry.upto:
                removed[place] = entry.upto
        elif key.kind == INCREMENT:
            sums.setdefault(key.path, {}).setdefault(key.other, []).append(entry.value)
        else:
            events.append((entry.stamp, key, entry))
    events.sort(key=lambda event: (event[0], entry_order(event[1])))
    root = _Node()
    for stamp, key, entry in events:
        if key.kind == SET:
            root.put(key.path, entry.value, stamp)
        else:
            gone = removed.get((key.path, key.element, stamp.feed))
            if gone is None or gone < stamp:
                root.add(key.path, key.element, entry.value)
    for path, by_base in sorted(sums.items()):
        root.increment(path, by_base)
    return root


class _Node:
    """One place of the merged tree: a value, elements of a set, or children."""

    __slots__ = ("children", "elements", "stamp", "value")

    def __init__(self) -> None:
        self.value: Value = DELETED
        self.stamp: Stamp | None = None
        self.children: dict[str, _Node] | None = None
        self.elements: dict[bytes, Value] | None = None

    def put(self, path: Path, value: Value, stamp: Stamp) -> None:
        if value is DELETED:
            node = self.find(path)
            if node is None:
                return
        else:
            node = self._reach(path)
        node.value, node.stamp, node.children, node.elements = value, stamp, None, None

    def add(self, path: Path, key: bytes, element: Value) -> None:
        node = self._reach(path)
        if node.elements is None:
            node.elements = {}
        node.elements[key] = element

    def increment(self, path: Path, by_base: dict[Stamp | None, list[int | float]]) -> None:
        node = self.find(path)
        deltas = by_base.get(node.stamp if node else None)
        if deltas is None:
            return
        node = node or self._reach(path)
        known = node.value
        if known is DELETED:
            node.value = _total(deltas)
        elif isinstance(known, (int, float)) and not isinstance(known, bool):
            node.value = _total([known, *deltas])

    def _reach(self, path: Path) -> "_Node":
        node = self
        for step in path:
            node._open()
            assert node.children is not None
            child = node.children.get(step)
            if child is None:
                child = node.children[step] = _Node()
            node = child
        return node

    def find(self, path: Path) -> "_Node | None":
        node = self
        for step in path:
            if node.children is None:
                if not isinstance(node.value, dict) or step not in node.value:
                    return None
                node._open()
            assert node.children is not None
            child = node.children.get(step)
            if child is None:
                return None
            node = child
        return node

    def _open(self) -> None:
        """Make the place a map whose keys can be written one by one; whatever else stood here is gone."""
        if self.children is not None:
            return
        self.children = {}
        self.elements = None
        if isinstance(self.value, dict):
            for key, inner in self.value.items():
                child = self.children[key] = _Node()
                child.value, child.stamp = inner, self.stamp
        self.value = DELETED

    def plain(self) -> Value:
        if self.elements is not None:
            return [self.elements[key] for key in sorted(self.elements)]
        if self.children is not None:
            inner = {key: child.plain() for key, child in sorted(self.children.items())}
            return {key: value for key, value in inner.items() if value is not DELETED}
        return self.value


def _total(numbers: list[int | float]) -> int | float:
    """The sum, the same in whatever order the layers come: floats exactly rounded, integers wrapped at 64 bits."""
    if any(isinstance(number, float) for number in numbers):
        try:
            return math.fsum(numbers)
        except (OverflowError, ValueError):  # infinities of both signs, or beyond the range of a double
            return math.nan
    return (sum(numbers) + (1 << 63)) % (1 << 64) - (1 << 63)
