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

Merging asks first which entries stand: at each path the highest-stamped write, a deletion being one; a write supersedes
whatever is lower-stamped at and below its path. Those that stand are replayed in stamp order, so that what was
overwritten leaves no trace, whoever wrote it. An increment counts while the write it was based on stands.
"""

import math
import sys
from collections.abc import Iterable, Iterator
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
                if layer:
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
        """The stamp of the write or deletion that stands at this path, which an increment by this peer is based on."""
        writes: dict[Path, Entry] = {}
        for key, entry in self._entries_of(path[0]):
            if key.kind == SET and (key.path not in writes or writes[key.path].stamp < entry.stamp):
                writes[key.path] = entry
        return _standing(writes, path)

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


def touched_keys(layer: Layer, operation: Operation) -> Iterator[EntryKey]:
    """The entries of its feed's layer that an operation may change, as the layer is before it."""
    for change in operation:
        if isinstance(change, Restore):
            yield change.key
        elif isinstance(change, Set):
            path, steps = change.path, len(change.path)
            yield EntryKey(path, SET, b"", None)
            yield from [key for key in layer if key.path[:steps] == path]
        elif isinstance(change, Increment):
            yield EntryKey(change.path, INCREMENT, b"", change.base)
        else:
            yield EntryKey(change.path, ADDED, change.key, None)
            if isinstance(change, Remove):
                for seen in change.observed:
                    yield EntryKey(change.path, REMOVED, change.key, seen.feed)


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
        layer[key] = Entry(stamp, _plus(0 if known is None else known.value, change.delta))


def merge(entries: Iterable[tuple[EntryKey, Entry]]) -> dict[str, Value]:
    """The properties that a set of entries of any layers amounts to."""
    merged = _tree(entries).plain()
    return merged if isinstance(merged, dict) else {}


def _tree(entries: Iterable[tuple[EntryKey, Entry]]) -> "_Node":
    removed: dict[tuple[Path, bytes, FeedId], Stamp] = {}
    sums: dict[Path, dict[Stamp | None, list[int | float]]] = {}
    writes: dict[Path, Entry] = {}
    additions: list[tuple[EntryKey, Entry]] = []
    for key, entry in entries:
        if key.kind == SET:
            known = writes.get(key.path)
            if known is None or known.stamp < entry.stamp:
                writes[key.path] = entry
        elif key.kind == REMOVED:
            assert entry.upto is not None
            place = (key.path, key.element, key.other)
            if place not in removed or removed[place] < entry.upto:
                removed[place] = entry.upto
        elif key.kind == INCREMENT:
            sums.setdefault(key.path, {}).setdefault(key.other, []).append(entry.value)
        else:
            additions.append((key, entry))
    events = [
        (EntryKey(path, SET, b"", None), entry)
        for path, entry in writes.items()
        if not _superseded(writes, path, len(path) - 1, entry.stamp)
    ]
    for key, entry in additions:
        gone = removed.get((key.path, key.element, entry.stamp.feed))
        if (gone is None or gone < entry.stamp) and not _superseded(writes, key.path, len(key.path), entry.stamp):
            events.append((key, entry))
    events.sort(key=lambda event: (event[1].stamp, entry_order(event[0])))
    root = _Node()
    for key, entry in events:
        if key.kind == SET:
            root.put(key.path, entry.value)
        else:
            root.add(key.path, key.element, entry.value)
    for path in sorted(sums):
        deltas = sums[path].get(_standing(writes, path))
        if deltas is not None:
            root.increment(path, deltas)
    return root


def _superseded(writes: dict[Path, Entry], path: Path, steps: int, stamp: Stamp) -> bool:
    """Whether a write at one of the first `steps` places on the way to `path` is later."""
    for length in range(1, steps + 1):
        above = writes.get(path[:length])
        if above is not None and above.stamp > stamp:
            return True
    return False


def _standing(writes: dict[Path, Entry], path: Path) -> Stamp | None:
    """The latest write at a path or above it."""
    stamps = [writes[path[:length]].stamp for length in range(1, len(path) + 1) if path[:length] in writes]
    return max(stamps, default=None)


class _Node:
    """One place of the merged tree: a value, elements of a set, or children. The later one decides which."""

    __slots__ = ("children", "elements", "value")

    def __init__(self, value: Value = DELETED) -> None:
        self.value: Value = value
        self.children: dict[str, _Node] | None = None
        self.elements: dict[bytes, Value] | None = None

    def put(self, path: Path, value: Value) -> None:
        node = self.find(path) if value is DELETED else self._reach(path)
        if node is not None:
            node.value, node.children, node.elements = value, None, None

    def add(self, path: Path, key: bytes, element: Value) -> None:
        node = self._reach(path)
        if node.elements is None:
            node.value, node.children, node.elements = DELETED, None, {}
        node.elements[key] = element

    def increment(self, path: Path, deltas: list[int | float]) -> None:
        """Add to a number, or to nothing. Whatever else stands there or in the way stays as it is."""
        node = self
        for step in path:
            if not node._map_or_nothing:
                return
            node = node._child(step)
        if node.children is not None or node.elements is not None:
            return
        known = node.value
        if known is DELETED:
            node.value = _total(deltas)
        elif isinstance(known, (int, float)) and not isinstance(known, bool):
            node.value = _total([*deltas, known])

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

    def _reach(self, path: Path) -> "_Node":
        node = self
        for step in path:
            node = node._child(step)
        return node

    def _child(self, step: str) -> "_Node":
        """The place below, made if need be."""
        self._open()
        assert self.children is not None
        child = self.children.get(step)
        if child is None:
            child = self.children[step] = _Node()
        return child

    @property
    def _map_or_nothing(self) -> bool:
        return self.elements is None and (self.value is DELETED or isinstance(self.value, dict))

    def _open(self) -> None:
        """Make the place a map whose keys can be written one by one; whatever else stood here is gone."""
        if self.children is not None:
            return
        inner = self.value if isinstance(self.value, dict) else {}
        self.children = {key: _Node(value) for key, value in inner.items()}
        self.value, self.elements = DELETED, None

    def plain(self) -> Value:
        if self.elements is not None:
            return [self.elements[key] for key in sorted(self.elements)]
        if self.children is not None:
            inner = {key: child.plain() for key, child in sorted(self.children.items())}
            return {key: value for key, value in inner.items() if value is not DELETED}
        return self.value


def _plus(known: int | float, delta: int | float) -> int | float:
    """A layer's sum so far: always one that the wire can carry and read back as it was."""
    total = known + delta
    if isinstance(total, int):
        return _wrapped(total)
    if not math.isfinite(total):
        total = math.copysign(sys.float_info.max, total)
    return total or 0


def _total(numbers: list[int | float]) -> int | float:
    """The sum, the same in whatever order the layers come: floats exactly rounded, integers wrapped at 64 bits."""
    if any(isinstance(number, float) for number in numbers):
        try:
            return math.fsum(sorted(numbers))
        except (OverflowError, ValueError):  # infinities of both signs, or beyond the range of a double
            return math.nan
    return _wrapped(int(sum(numbers)))


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
