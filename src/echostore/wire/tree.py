"""The item tree: building it, keeping it up to date, reading and checking it (`echostore.wire.tree_reader`).

    build    all items -> nodes, for an epoch made from scratch and for Spark
    update   the items that changed -> the nodes above them, for a peer that keeps (path -> CID, count) in its store

Both give the same nodes for the same items. Blobs leave through `put`, children before their parents: a crash leaves
blobs that nobody names, never a name without its blob. `update` hands out nothing before it has computed everything,
so a failing store port leaves the cache as it was.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Protocol

from echostore.kernel.errors import Corrupt, TooLarge
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.snapshot import (
    INLINE_ITEM_BYTES_MAX,
    NIBBLES,
    ItemKey,
    Path,
    TreeTop,
    chunks,
    is_page,
    item_key,
)
from echostore.wire.cids import PROTOBUF, RAW, cid_of
from echostore.wire.snapshot import EncodedItem, Put
from echostore.wire.tree_nodes import ITEM_HEAD, index_bytes, large_item_bytes, page_bytes
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
"""All items below a path as they are now, in any order. A store answers it with `kernel.snapshot.key_bounds`."""


class NodeCache(Protocol):
    """Path -> (CID, count) of every node of the current tree; the caller keeps it in its own transaction."""

    def node(self, path: Path) -> TreeTop | None: ...

    def branches(self, path: Path) -> Iterable[tuple[str, TreeTop]]:
        """The nodes one level below `path`, each with the nibble that leads to it."""
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
        return [(nibble, self.nodes[path + nibble]) for nibble in NIBBLES if path + nibble in self.nodes]

    def keep(self, path: Path, top: TreeTop) -> None:
        self.nodes[path] = top

    def forget(self, path: Path) -> None:
        # Walks down instead of searching: whatever is below a node hangs on a chain of kept nodes.
        if self.nodes.pop(path, None):
            for nibble in NIBBLES:
                self.forget(path + nibble)


def build(
    items: Iterable[tuple[ItemId, EncodedItem]], put: Put, *, cache: NodeCache | None = None, path: Path = ""
) -> TreeTop:
    """The tree of all these items. `cache` is filled for later updates; it must be empty below `path`.

    With a `path`, the subtree of the items below it: jobs that share the work build subtrees and `join` them.
    """
    entries = _sorted_entries(items, path)
    return _grow(
        entries.keys, entries.items, 0, len(entries.keys), path, put, _keep_nothing if cache is None else cache.keep
    )


def join(branches: Iterable[tuple[str, TreeTop]], put: Put, *, path: Path = "") -> TreeTop:
    """The index node at `path` over subtrees that were built apart, by nibble; empty ones are left out.

    Only for more items than fit a page: fewer have no index node, and must be built together.
    """
    ordered = sorted(((nibble, top) for nibble, top in branches if top.count), key=itemgetter(0))
    assert len({nibble for nibble, _ in ordered}) == len(ordered), f"a branch of {path!r} was given twice"
    count = sum(top.count for _, top in ordered)
    assert not is_page(len(path), count), f"{count} items at {path!r} are a page"
    return _put_node(index_bytes(ordered), count, put)


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
    keys = sorted(item_key(item) for item in dirty)
    top = cache.node(path)
    if top and not keys:
        return top
    staged = _Staged()
    renewed = _renew(cache, keys, items_under, path, staged)
    for cid, blob in staged.blobs:
        put(cid, blob)
    for below, node in staged.nodes:
        if node:
            cache.keep(below, node)
        else:
            cache.forget(below)
    return renewed


@dataclass(slots=True)
class _Staged:
    """What an update is going to hand out, in order. A node of None forgets its path."""

    blobs: list[tuple[Cid, bytes]] = field(default_factory=list)
    nodes: list[tuple[Path, TreeTop | None]] = field(default_factory=list)

    def put(self, cid: Cid, blob: bytes) -> None:
        self.blobs.append((cid, blob))

    def keep(self, path: Path, top: TreeTop | None) -> None:
        self.nodes.append((path, top))


def _renew(
    cache: NodeCache, keys: list[ItemKey], items_under: ItemsUnder, path: Path, staged: _Staged
) -> TreeTop | None:
    """The node at `path` after the items with these keys, all of them below it, have changed; None when it is empty."""
    old = cache.node(path)
    if old is None or is_page(len(path), old.count):
        renewed = _grow_anew(items_under, path, staged)
        if old and renewed is None:
            staged.keep(path, None)
        return renewed
    blobs_before, nodes_before = len(staged.blobs), len(staged.nodes)
    branches = dict(cache.branches(path))
    if sum(top.count for top in branches.values()) != old.count:
        raise Corrupt(
            f"the kept nodes below {path!r} do not add up to {old.count} items", next_step="Rebuild the tree."
        )
    for nibble in NIBBLES:
        below = path + nibble
        dirty = keys[bisect_left(keys, below) : bisect_left(keys, below + "g")]  # "g" sorts after every nibble
        if dirty:
            branch = _renew(cache, dirty, items_under, below, staged)
            if branch:
                branches[nibble] = branch
            else:
                branches.pop(nibble, None)
    count = sum(top.count for top in branches.values())
    if is_page(len(path), count):
        # So many items went away that the branches fold into one page: what was just staged for them is void.
        del staged.blobs[blobs_before:], staged.nodes[nodes_before:]
        staged.keep(path, None)
        return _grow_anew(items_under, path, staged)
    top = _put_node(index_bytes(sorted(branches.items())), count, staged.put)
    staged.keep(path, top)
    return top


def _grow_anew(items_under: ItemsUnder, path: Path, staged: _Staged) -> TreeTop | None:
    """The node at `path` from all its items, which fit a page now or did before the change."""
    entries = _sorted_entries(items_under(path), path)
    if path and not entries.keys:
        return None
    return _grow(entries.keys, entries.items, 0, len(entries.keys), path, staged.put, staged.keep)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Items in columns, ascending by key."""

    keys: list[ItemKey]
    items: list[tuple[ItemId, EncodedItem]]


def _sorted_entries(items: Iterable[tuple[ItemId, EncodedItem]], path: Path) -> _Entries:
    keyed = sorted((item_key(item), item, encoded) for item, encoded in items)
    entries = _Entries([key for key, _, _ in keyed], [(item, encoded) for _, item, encoded in keyed])
    if keyed:
        outside = next((key for key in (entries.keys[0], entries.keys[-1]) if not key.startswith(path)), None)
        assert outside is None, f"an item with key {outside} was given for the path {path!r}"
    repeated = next((key for key, following in pairwise(entries.keys) if key == following), None)
    assert repeated is None, f"the item with key {repeated} was given twice"
    return entries


_Keep = Callable[[Path, TreeTop], None]


def _keep_nothing(path: Path, top: TreeTop) -> None:
    """Where the nodes of a tree go that nobody is going to update."""


def _grow(
    keys: list[ItemKey],
    items: list[tuple[ItemId, EncodedItem]],
    first: int,
    end: int,
    path: Path,
    put: Put,
    keep: _Keep,
) -> TreeTop:
    """The node at `path` over the entries from `first` to `end`. Recursion is as deep as the tree, 16 at most."""
    count = end - first
    if is_page(len(path), count):
        top = _put_node(_page(items[first:end], put), count, put)
    else:
        branches = []
        start = first
        for nibble in NIBBLES:
            below = path + nibble
            stop = bisect_left(keys, below + "g", start, end)
            if stop > start:
                branches.append((nibble, _grow(keys, items, start, stop, below, put, keep)))
                start = stop
        top = _put_node(index_bytes(branches), count, put)
    keep(path, top)
    return top


def _page(items: list[tuple[ItemId, EncodedItem]], put: Put) -> bytes:
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
    return page_bytes(small, large)


def _put_node(data: bytes, count: int, put: Put) -> TreeTop:
    if len(data) > BLOB_BYTES_MAX:
        raise TooLarge(f"a page of {count} items has {len(data)} bytes, more than a blob may have")
    cid = cid_of(data, PROTOBUF)
    put(cid, data)
    return TreeTop(cid, count)
