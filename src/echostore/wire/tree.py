"""The item tree: building it, keeping it up to date, reading and checking it (`echostore.wire.tree_reader`).

    build    all items -> nodes, for an epoch made from scratch and for Spark
    update   the items that changed -> the nodes above them, for a peer that keeps (path -> top) in its store

Both give the same nodes for the same items. What a tree holds is its `Kind`: items here, placements in
`echostore.wire.placements`; all else is the same for both. Blobs leave through `put`, children before their parents: a crash leaves
blobs that nobody names, never a name without its blob. `update` hands out nothing before it has computed everything,
so a failing store port leaves the cache as it was.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

from echostore.kernel.errors import Corrupt, TooLarge
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.snapshot import (
    BELOW_END,
    COVERING,
    INLINE_ITEM_BYTES_MAX,
    LABELS,
    NIBBLES,
    SPANS,
    ItemKey,
    Path,
    TreeTop,
    Weight,
    branch_labels,
    chunks,
    entry_bytes,
    is_page,
    is_run,
    item_key,
    key_bounds,
    stays_divided,
    weight_of,
    within,
)
from echostore.wire.cids import PROTOBUF, RAW, cid_of
from echostore.wire.snapshot import EncodedItem, Put
from echostore.wire.tree_nodes import ITEM_HEAD, WholePage, index_bytes, large_item_bytes, page_bytes
from echostore.wire.tree_reader import (
    BadBlob,
    Covering,
    Get,
    MissingBlob,
    TreeDiff,
    TreeReader,
    TreeReport,
    verify_tree,
)

__all__ = [
    "build",
    "update",
    "update_below",
    "join",
    "finish",
    "Part",
    "ItemsUnder",
    "NodeCache",
    "NodeMap",
    "TreeTop",
    "EncodedItem",
    "Put",
    "Get",
    "TreeReader",
    "TreeDiff",
    "Covering",
    "verify_tree",
    "TreeReport",
    "BadBlob",
    "MissingBlob",
]

ItemsUnder = Callable[[Path], Iterable[tuple[ItemId, EncodedItem]]]
"""All items below a path as they are now, in any order, or as a WholePage. A store answers it with
`kernel.snapshot.key_bounds`."""


class NodeCache(Protocol):
    """Path -> TreeTop of every node of the current tree; the caller keeps it in its own transaction."""

    def node(self, path: Path) -> TreeTop | None: ...

    def branches(self, path: Path) -> Iterable[tuple[str, TreeTop]]:
        """The nodes one level below `path`, each with the label that leads to it."""
        ...

    def keep(self, path: Path, top: TreeTop) -> None: ...

    def forget(self, path: Path) -> None:
        """Remove the node at `path` and all below it."""
        ...


class NodeMap:
    """A NodeCache in memory."""

    def __init__(self) -> None:
        self.nodes: dict[Path, TreeTop] = {}

    def node(self, path: Path) -> TreeTop | None:
        return self.nodes.get(path)

    def branches(self, path: Path) -> list[tuple[str, TreeTop]]:
        return [(label, self.nodes[path + label]) for label in LABELS if path + label in self.nodes]

    def keep(self, path: Path, top: TreeTop) -> None:
        self.nodes[path] = top

    def forget(self, path: Path) -> None:
        # Walks down instead of searching: whatever is below a node hangs on a chain of kept nodes.
        if self.nodes.pop(path, None):
            for label in LABELS:
                self.forget(path + label)


@dataclass(frozen=True, slots=True)
class Part:
    """The items below a path: few enough for a page, as they are or not read yet; or more, with their index node."""

    count: int
    size: int
    top: TreeTop | None = None
    """The node that stands there already."""
    items: "Entries | None" = None
    page: WholePage | None = None
    """The items as a page that is ready."""

    @staticmethod
    def of(items: Iterable[tuple[ItemId, EncodedItem]], path: Path) -> "Part":
        """Items that have no node yet."""
        if isinstance(items, WholePage):
            return Part(items.count, len(items.data), page=items)
        return Part.holding(Entries.of(ITEMS, items, path))

    @staticmethod
    def holding(entries: "Entries") -> "Part":
        return Part(len(entries.keys), sum(entries.sizes), items=entries)

    @staticmethod
    def among(entries: "Entries", path: Path) -> "Part":
        """Of some items those below `path`."""
        return Part.holding(entries.cut(entries.below(path)))

    @staticmethod
    def standing(top: TreeTop) -> "Part":
        return Part(top.count, top.size, top)


def build(
    items: Iterable[tuple[ItemId, EncodedItem]], put: Put, *, cache: NodeCache | None = None, path: Path = ""
) -> TreeTop:
    """The tree of all these items. `cache` is filled for later updates; it must be empty below `path`.

    With a `path`, the subtree of the items below it: jobs that share the work build subtrees and `join` them.
    """
    return grow(Entries.of(ITEMS, items, path), put, cache=cache, path=path)


def build_keyed(
    keys: list[ItemKey], items: list[tuple[ItemId, EncodedItem]], put: Put, *, cache: NodeCache, path: Path
) -> TreeTop:
    """`build` for who has the items ascending by their keys, and these with them."""
    entries = Entries(ITEMS, keys, items, [entry_bytes(len(encoded)) for _, encoded in items])
    _check_order(entries, path)
    return grow(entries, put, cache=cache, path=path)


def grow(entries: "Entries", put: Put, *, cache: NodeCache | None, path: Path) -> TreeTop:
    """The node at `path` over entries of any kind, all of which are below it."""
    return _grow(entries, path, put, _keep_nothing if cache is None else cache.keep)


def join(parts: Mapping[str, Part], put: Put, *, path: Path = "") -> Part:
    """What is below `path`, of parts that were made apart, by nibble: an index node, or so few items that they fit a page.

    A part whose items fit a page comes with them, because they may share one with their neighbours.
    """
    there = {nibble: part for nibble, part in parts.items() if part.count}
    count, size = weight_of(there.values())
    if is_page(len(path), count, size):
        return Part(count, size, items=Entries.joined(_items_of(part) for _, part in sorted(there.items())))
    return Part.standing(_index(there, path, _no_items, put, _keep_nothing, branch_labels(len(path), there)))


def finish(part: Part, put: Put) -> TreeTop:
    """The top of a tree whose parts were joined."""
    return part.top or _put_page(_items_of(part), put)


def update(cache: NodeCache, dirty: Iterable[ItemId], items_under: ItemsUnder, put: Put) -> TreeTop:
    """The tree after a change, equal to a fresh build; costs the dirty items times the depth of the tree.

    `dirty` must name every item that was added, changed or removed since `cache` was last brought up to date; more
    of them do no harm. An empty cache makes this a build.
    """
    top = update_below(cache, dirty, items_under, put, path="")
    assert top is not None, "there is always a top"
    return top


def update_below(
    cache: NodeCache, dirty: Iterable[ItemId], items_under: ItemsUnder, put: Put, *, path: Path
) -> TreeTop | None:
    """The same for the subtree at `path`, of which `cache` knows the nodes; None when no item is left below it."""

    def parts_under(below: Path) -> Part:
        return Part.of(items_under(below), below)

    return renew(cache, sorted(map(item_key, dirty)), parts_under, put, path=path)


def renew(cache: NodeCache, keys: list[ItemKey], parts_under: "PartsUnder", put: Put, *, path: Path) -> TreeTop | None:
    """`update_below` for entries of any kind: those with these keys, which ascend, have changed."""
    old = cache.node(path)
    if old and not keys:
        return old
    staged = _Staged()
    part = _renew(cache, keys, parts_under, path, staged)
    top = part.top
    if top is None and path and not part.count:
        staged.keep(path, None)
    elif top is None:
        top = _put_page(_items_of(part), staged.put)
        staged.keep(path, top)
    for cid, blob in staged.blobs:
        put(cid, blob)
    for below, node in staged.nodes:
        if node:
            cache.keep(below, node)
        else:
            cache.forget(below)
    return top


@dataclass(slots=True)
class _Staged:
    """What an update is going to hand out, in order. A node of None forgets its path and all below it."""

    blobs: list[tuple[Cid, bytes]] = field(default_factory=list)
    nodes: list[tuple[Path, TreeTop | None]] = field(default_factory=list)

    def put(self, cid: Cid, blob: bytes) -> None:
        self.blobs.append((cid, blob))

    def keep(self, path: Path, top: TreeTop | None) -> None:
        self.nodes.append((path, top))


def _renew(cache: NodeCache, keys: list[ItemKey], parts_under: "PartsUnder", path: Path, staged: _Staged) -> Part:
    """What is below `path` after the items with these keys have changed. Pages are the caller's: it may join several."""
    old = cache.node(path)
    if old is None or is_page(len(path), old.count, old.size):
        return _part(parts_under(path), path, staged)
    blobs_before, nodes_before = len(staged.blobs), len(staged.nodes)
    branches = dict(cache.branches(path))
    if weight_of(branches.values()) != (old.count, old.size):
        raise Corrupt(
            f"the kept nodes below {path!r} do not add up to {old.count} items of {old.size} bytes",
            next_step="Rebuild the tree.",
        )
    parts: dict[str, Part | TreeTop] = dict(branches)
    dirty: dict[str, list[ItemKey]] = {}
    for key in keys:
        nibble = key[len(path)]
        label = next((each for each in COVERING[nibble] if each in branches), nibble)
        dirty.setdefault(label, []).append(key)
    for label, below in dirty.items():
        parts.pop(label, None)
        if label in NIBBLES:
            parts[label] = _renew(cache, below, parts_under, path + label, staged)
        else:
            parts |= _renewed_run(parts_under(path + label), path, label, staged)
    parts = {label: part for label, part in parts.items() if part.count}
    if is_page(len(path), *weight_of(parts.values())):
        # So many items went away that the branches fold into one page: what was just staged for them is void.
        del staged.blobs[blobs_before:], staged.nodes[nodes_before:]
        staged.keep(path, None)
        return parts_under(path)
    same = parts.keys() == branches.keys() and stays_divided(len(path), parts, dirty)
    labels = sorted(branches, key=_first_nibble) if same else branch_labels(len(path), parts)
    top = _index(parts, path, parts_under, staged.put, staged.keep, labels, gone=branches)
    staged.keep(path, top)
    return Part.standing(top)


def _first_nibble(label: str) -> str:
    return SPANS[label][0]


def _renewed_run(part: Part, path: Path, label: str, staged: _Staged) -> dict[str, Part]:
    """A run of branches with its items as they are now: as it was, or its nibbles when they no longer fit one page."""
    if is_page(len(path) + 1, part.count, part.size):
        return {label: part}
    entries = _items_of(part)
    slices = ((path + nibble, nibble) for nibble in SPANS[label])
    return {nibble: _part(Part.among(entries, below), below, staged) for below, nibble in slices}


def _part(part: Part, path: Path, staged: _Staged) -> Part:
    """Items that may be below `path`, with an index node when they do not fit a page."""
    if is_page(len(path), part.count, part.size):
        return part
    return Part.standing(_grow(_items_of(part), path, staged.put, staged.keep))


def _index(
    parts: "Mapping[str, Part | TreeTop]",
    path: Path,
    parts_under: "PartsUnder",
    put: Put,
    keep: "Callable[[Path, TreeTop | None], None]",
    labels: list[str],
    *,
    gone: Iterable[str] = (),
) -> TreeTop:
    """The index node at `path` over these parts, none of them empty; those below one of `labels` get one page.

    `gone` are the labels that the branches had before.
    """
    for label in gone:
        if label not in labels:
            keep(path + label, None)
    branches: list[tuple[str, TreeTop]] = []
    for label in labels:
        part = parts.get(label)
        top = part.top if isinstance(part, Part) else part
        if top is None and isinstance(part, Part) and part.page is not None:
            top = _put_node(part.page.data, part.count, part.size, put)
            keep(path + label, top)
        elif top is None:
            read = (_items_of(parts[each], parts_under, path + each) for each in within(label) if each in parts)
            top = _put_page(Entries.joined(read), put)
            keep(path + label, top)
        branches.append((label, top))
    return _put_index(branches, put)


def _items_of(part: Part | TreeTop, parts_under: "PartsUnder | None" = None, path: Path = "") -> "Entries":
    if isinstance(part, Part) and part.items is not None:
        return part.items
    if isinstance(part, Part) and part.page is not None:
        return Entries.of(ITEMS, part.page, path)
    assert parts_under is not None, "a part that fits a page comes with its items"
    return _items_of(parts_under(path), path=path)


def _no_items(path: Path) -> Part:
    raise AssertionError(f"the items below {path!r} were not given with their part")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the entries of a tree are: the key of one, the bytes that it counts for, and how a page of them is written.

    An entry is any value that these three understand. A page without entries is empty, whatever their kind.
    """

    key: Callable[[Any], ItemKey]
    size: Callable[[Any], int]
    page: Callable[[list[Any], int, Put], bytes]
    """Of entries ascending by key and the sum of their sizes."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one kind in columns, ascending by key."""

    kind: Kind
    keys: list[ItemKey]
    items: list[Any]
    sizes: list[int]

    @staticmethod
    def of(kind: Kind, items: Iterable[Any], path: Path) -> "Entries":
        """Entries in any order, all of them below `path`."""
        keyed = sorted((kind.key(each), each) for each in items)
        listed = [each for _, each in keyed]
        entries = Entries(kind, [key for key, _ in keyed], listed, [kind.size(each) for each in listed])
        _check_order(entries, path)
        return entries

    @staticmethod
    def joined(several: "Iterable[Entries]") -> "Entries":
        """Those of neighbours, in the order of their keys."""
        whole = Entries(ITEMS, [], [], [])
        for at, each in enumerate(several):
            whole = whole if at else Entries(each.kind, [], [], [])
            assert whole.kind is each.kind, "entries of two kinds in one tree"
            whole.keys.extend(each.keys)
            whole.items.extend(each.items)
            whole.sizes.extend(each.sizes)
        return whole

    def below(self, path: Path) -> slice:
        """Where the items below a path of nibbles stand."""
        start = bisect_left(self.keys, path)
        return slice(start, bisect_left(self.keys, path + BELOW_END, start))

    def cut(self, where: slice) -> "Entries":
        return Entries(self.kind, self.keys[where], self.items[where], self.sizes[where])


PartsUnder = Callable[[Path], Part]
"""All entries below a path as they are now, without a node."""


def _check_order(entries: Entries, path: Path) -> None:
    keys = entries.keys
    if keys:
        first, last = key_bounds(path)
        outside = next((key for key in (keys[0], keys[-1]) if not first <= key <= last), None)
        assert outside is None, f"an item with key {outside} was given for the path {path!r}"
    wrong = next((key for key, following in pairwise(keys) if key >= following), None)
    assert wrong is None, f"the item with key {wrong} was given twice, or out of order"


_Keep = Callable[[Path, TreeTop], None]


def _keep_nothing(path: Path, top: TreeTop | None) -> None:
    """Where the nodes of a tree go that nobody is going to update."""


def _grow(entries: Entries, path: Path, put: Put, keep: _Keep) -> TreeTop:
    """The node at `path` over these entries."""
    sums = [0, *accumulate(entries.sizes)]
    return _grow_between(entries, sums, 0, len(entries.keys), path, put, keep)


def _grow_between(
    entries: Entries, sums: list[int], start: int, end: int, path: Path, put: Put, keep: _Keep
) -> TreeTop:
    """The node over a stretch of entries, `sums` having the bytes before each. Recursion is as deep as the tree, 16 at
    most."""
    size = sums[end] - sums[start]
    if is_run(path) or is_page(len(path), end - start, size):
        top = _put_items(entries.kind, entries.items[start:end], size, put)
    else:
        cuts: dict[str, tuple[int, int]] = {}
        weights: dict[str, Weight] = {}
        first = start
        for nibble in NIBBLES:
            after = bisect_left(entries.keys, path + nibble + BELOW_END, first, end)
            if after > first:
                cuts[nibble] = first, after
                weights[nibble] = Weight(after - first, sums[after] - sums[first])
                first = after
        branches = []
        for label in branch_labels(len(path), weights):
            there = [cuts[nibble] for nibble in SPANS[label] if nibble in cuts]
            below = path + label
            branches.append((label, _grow_between(entries, sums, there[0][0], there[-1][1], below, put, keep)))
        top = _put_index(branches, put)
    keep(path, top)
    return top


def _put_index(branches: list[tuple[str, TreeTop]], put: Put) -> TreeTop:
    count, size = weight_of(top for _, top in branches)
    return _put_node(index_bytes(branches), count, size, put)


def _put_page(entries: Entries, put: Put) -> TreeTop:
    return _put_items(entries.kind, entries.items, sum(entries.sizes), put)


def _put_items(kind: Kind, items: list[Any], size: int, put: Put) -> TreeTop:
    return _put_node(kind.page(items, size, put), len(items), size, put)


def _page(items: list[tuple[ItemId, EncodedItem]], size: int, put: Put) -> bytes:
    small: list[bytes] = []
    large: list[bytes] = []
    for item, encoded in items:
        assert encoded.startswith(ITEM_HEAD + item), f"the encoded state of {item.hex()} starts {encoded[:18].hex()}"
        if len(encoded) <= INLINE_ITEM_BYTES_MAX:
            small.append(encoded)
        else:
            cids = []
            for chunk in chunks(encoded):
                cids.append(cid_of(chunk, RAW))
                put(cids[-1], chunk)
            large.append(large_item_bytes(item, cids))
    data = page_bytes(small, large)
    assert len(data) == size, f"a page of {len(data)} bytes, {size} were counted"
    return data


def _item_key(entry: tuple[ItemId, EncodedItem]) -> ItemKey:
    return item_key(entry[0])


def _item_size(entry: tuple[ItemId, EncodedItem]) -> int:
    return entry_bytes(len(entry[1]))


ITEMS: Final = Kind(_item_key, _item_size, _page)


def _put_node(data: bytes, count: int, size: int, put: Put) -> TreeTop:
    if len(data) > BLOB_BYTES_MAX:
        raise TooLarge(f"a page of {count} items has {len(data)} bytes, more than a blob may have")
    cid = cid_of(data, PROTOBUF)
    put(cid, data)
    return TreeTop(cid, count, size)
