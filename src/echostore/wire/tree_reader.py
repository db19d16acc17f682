"""Reading an item tree that someone else may have made: one item, all of them, what differs, what is wrong.

Nothing is believed. Every blob is checked against its CID before it is parsed, every node against the shape rule of
its path and the count its parent promised. With that, a tree that wants to waste a reader's time can't:

    deep          a node below 16 nibbles must be a page
    wide, shared  an item's key must start with its path, so no page serves at two places; no branch is empty
    many          nodes_max, for readers that walk a whole tree
    large         a blob is at most BLOB_BYTES_MAX, one item's bytes are at most bytes_max
    cyclic        would need a SHA-256 collision

Walks keep their own stack; nothing here recurses. Blobs come through `get`, which answers None (or raises KeyError or
NotFound) for one that is not here; `MissingBlob` then names it, for who wants to fetch it and try again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from echostore.kernel.errors import Corrupt, NotFound, TooLarge
from echostore.kernel.ids import Cid, ItemId
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.snapshot import (
    CHUNK_BYTES,
    INLINE_ITEM_BYTES_MAX,
    INLINE_STATE_BYTES_MAX,
    SPANS,
    ItemKey,
    Path,
    TreeTop,
    chunks_problem,
    item_key,
    within,
)
from echostore.wire.cids import cid_text, matches
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.snapshot import decode_item, is_node_cid
from echostore.wire.tree_nodes import (
    IndexNode,
    MalformedNode,
    Page,
    PageEntry,
    PlacementPage,
    large_item_cids,
    page_count,
    parse_node,
    small_items,
)

Get = Callable[[Cid], bytes | None]

P = TypeVar("P", Page, PlacementPage)
"""What the pages of a tree are."""

NODES_MAX: Final = 1 << 20
"""Nodes that one walk reads: about two million items. Who knows a larger party passes more."""

ITEM_BYTES_MAX: Final = 1 << 30
"""Bytes of one item's state that are put together in memory: one chunk can be named very often in little space."""

PROBLEMS_MAX: Final = 100
"""Problems that a report lists: enough to see what happened, and a broken tree of any size gives a short report."""


class BadBlob(Corrupt):
    """A blob of the tree does not match its CID or can't stand where it does."""

    def __init__(self, cid: Cid, path: Path, what: str, *, tree: str = "item tree") -> None:
        super().__init__(f"Blob {cid_text(cid)} at path {path!r} of the {tree}: {what}.")
        self.cid = cid
        self.path = path
        self.problem = what


class MissingBlob(BadBlob):
    """A blob of the tree is not here."""


@dataclass(frozen=True, slots=True)
class TreeDiff:
    """The items that differ between two trees, each list in ascending order of the keys."""

    added: tuple[ItemId, ...]
    changed: tuple[ItemId, ...]
    removed: tuple[ItemId, ...]


@dataclass(frozen=True, slots=True)
class Covering:
    """The lowest node whose items include all those below a prefix, and where it stands."""

    path: Path
    top: TreeTop


@dataclass(frozen=True, slots=True)
class TreeReport:
    """What `verify_tree` found. Counts are of what could be read; `problems` is cut at PROBLEMS_MAX."""

    problems: tuple[str, ...]
    items: int
    nodes: int
    blobs: int
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


class NodeReader(Generic[P]):
    """The nodes of a tree with this top, whatever its pages hold. Every method raises BadBlob or MissingBlob, both Corrupt,
    for what it can't trust."""

    _tree = "item tree"
    _parse: Callable[[bytes, Path], P | IndexNode]

    def __init__(self, top: Cid, get: Get, *, nodes_max: int = NODES_MAX) -> None:
        self.top = top
        self._get = get
        self._nodes_max = nodes_max

    @property
    def count(self) -> int:
        return self._node(self.top, "").count

    def nodes(self) -> Iterator[tuple[Path, Cid, P | IndexNode]]:
        """All nodes, parents before children, in ascending order of the keys below them."""
        return self._walk()

    def pages_toward(self, prefixes: Iterable[str]) -> Iterator[tuple[Path, P]]:
        """The pages that may have keys beginning with any of some nibbles; each node on the way is read once."""
        waiting: list[tuple[Path, Cid, TreeTop | None, list[str]]] = [("", self.top, None, list(prefixes))]
        visited = 0
        while waiting:
            path, cid, promised, wanted = waiting.pop()
            visited += 1
            self._check_visited(visited)
            node = self._node(cid, path, promised)
            if isinstance(node, IndexNode):
                below = [(path + label, top.cid, top, mine) for label, top, mine in branches_toward(node, path, wanted)]
                waiting += reversed(below)
            else:
                yield path, node

    def open_node(self, cid: Cid, path: Path, promised: TreeTop | None = None) -> P | IndexNode:
        """The node with this CID, as it must be at `path` and as its parent promised it."""
        return self._node(cid, path, promised)

    def _walk(self, tops: "_Side | None" = None) -> Iterator[tuple[Path, Cid, P | IndexNode]]:
        """All nodes, parents before children, in ascending order of the keys below them."""
        waiting: _Side = [("", self.top, None)] if tops is None else tops[::-1]
        visited = 0
        while waiting:
            path, cid, promised = waiting.pop()
            visited += 1
            self._check_visited(visited)
            node = self._node(cid, path, promised)
            if isinstance(node, IndexNode):
                waiting += [(path + label, top.cid, top) for label, top in reversed(node.branches)]
            yield path, cid, node

    def _check_visited(self, visited: int) -> None:
        if visited > self._nodes_max:
            what = f"the {self._tree} has more than {self._nodes_max} nodes"
            raise TooLarge(what, next_step="Pass a larger nodes_max.")

    def _node(self, cid: Cid, path: Path, promised: TreeTop | None = None) -> P | IndexNode:
        if not is_node_cid(cid):
            raise BadBlob(cid, path, "not the CID of a node", tree=self._tree)
        return self.open_bytes(cid, self._blob(cid, path, BLOB_BYTES_MAX), path, promised)

    def open_bytes(self, cid: Cid, data: bytes, path: Path, promised: TreeTop | None = None) -> P | IndexNode:
        """`open_node` for who has its blob, and has checked it against its CID."""
        try:
            node = type(self)._parse(data, path)
        except MalformedNode as error:
            raise BadBlob(cid, path, str(error), tree=self._tree) from None
        if promised is not None and (node.count, node.size) != (promised.count, promised.size):
            said = f"{promised.count} of {promised.size}"
            what = f"{node.count} items of {node.size} bytes, its parent promised {said}"
            raise BadBlob(cid, path, what, tree=self._tree)
        return node

    def _blob(self, cid: Cid, path: Path, bytes_max: int) -> bytes:
        try:
            data = self._get(cid)
        except (KeyError, NotFound):
            data = None
        if data is None:
            raise MissingBlob(cid, path, "not here", tree=self._tree)
        if len(data) > bytes_max:
            raise BadBlob(cid, path, f"{len(data)} bytes, where at most {bytes_max} may be", tree=self._tree)
        if not matches(cid, data):
            raise BadBlob(cid, path, "its bytes do not match its CID", tree=self._tree)
        return data


def branches_toward(node: IndexNode, path: Path, prefixes: Iterable[str]) -> Iterator[tuple[str, TreeTop, list[str]]]:
    """The branches of a node at `path` that may have keys beginning with some nibbles, each with those that lead there."""
    depth = len(path)
    ended: list[str] = []
    onward: dict[str, list[str]] = {}
    for prefix in prefixes:
        if len(prefix) <= depth:
            ended.append(prefix)
        else:
            onward.setdefault(prefix[depth], []).append(prefix)
    for label, top in node.branches:
        mine = [prefix for nibble in SPANS[label] for prefix in onward.get(nibble, ())] + ended
        if mine:
            yield label, top, mine


class TreeReader(NodeReader[Page]):
    """The item tree with this top."""

    _parse = staticmethod(parse_node)

    def __init__(self, top: Cid, get: Get, *, nodes_max: int = NODES_MAX, bytes_max: int = ITEM_BYTES_MAX) -> None:
        super().__init__(top, get, nodes_max=nodes_max)
        self._bytes_max = bytes_max

    def item(self, item: ItemId) -> pb.ItemState | None:
        """The state of one item; reads the nodes on its path only. A large model state stays where it is."""
        key = item_key(item)
        path, node = self._descend(key)
        if isinstance(node, Page):
            for entry in node.entries:
                if entry.item == item:
                    return self._item_state(entry, path)
        return None

    def some(self, items: Iterable[ItemId]) -> dict[ItemId, pb.ItemState]:
        """The states of those of some items that are in the tree, by their keys; reads the nodes on their paths once."""
        wanted = {item: item_key(item) for item in items}
        found: dict[ItemId, pb.ItemState] = {}
        for path, page in self.pages_toward(wanted.values()) if wanted else ():
            for entry in page.entries:
                if entry.item in wanted:
                    found[entry.item] = self._item_state(entry, path)
        return found

    def items(self) -> Iterator[tuple[ItemId, pb.ItemState]]:
        """All items, in ascending order of their keys."""
        for path, _, node in self._walk():
            if isinstance(node, Page):
                for entry in node.entries:
                    yield entry.item, self._item_state(entry, path)

    def check(self, told: Callable[[pb.ItemState], None] | None = None) -> None:
        """Read every node once: BadBlob for one that can't stand where it does.

        What items say is not looked at, unless somebody wants to be told of each: in no certain order.
        """
        waiting: _Side = [("", self.top, None)]
        visited = 0
        while waiting:
            path, cid, promised = waiting.pop()
            visited += 1
            self._check_visited(visited)
            if promised is not None and is_node_cid(cid):
                data = self._blob(cid, path, BLOB_BYTES_MAX)
                if len(data) == promised.size and page_count(data, path) == promised.count:
                    if told is not None:
                        for item, raw in small_items(data).items():
                            told(decode_item(raw, item))
                    continue
            node = self._node(cid, path, promised)
            if isinstance(node, IndexNode):
                waiting += [(path + label, top.cid, top) for label, top in node.branches]
            elif told is not None:
                for _, state in self.page_items(node, path):
                    told(state)

    def page_items(
        self, page: Page, path: Path, item: ItemId | None = None
    ) -> Iterator[tuple[PageEntry, pb.ItemState]]:
        """The items of one page as they stand in it and as they are; or one of them, if it is there."""
        for entry in page.entries:
            if item is None or entry.item == item:
                yield entry, self._item_state(entry, path)

    def state_bytes(self, state: pb.ItemState) -> bytes:
        """The whole model state of an item, also when it is in chunks."""
        if not state.state_cids:
            return state.state
        path = item_key(ItemId(state.item))
        return self._join([Cid(cid) for cid in state.state_cids], path, total_min=INLINE_STATE_BYTES_MAX + 1)

    def reachable(self) -> Iterator[Cid]:
        """Every CID of the tree once, a name before what it leads to: nodes, large items, chunks of model states."""
        chunks: set[Cid] = set()
        for path, cid, node in self._walk():
            yield cid
            if isinstance(node, Page):
                for chunk in self.chunk_cids(node, path):
                    if chunk not in chunks:
                        chunks.add(chunk)
                        yield chunk

    def node_for_prefix(self, prefix: Path) -> Covering | None:
        """The lowest node that holds all items below `prefix`: the one there, or the page above; None without items."""
        path, place = "", None
        node = self._node(self.top, "")
        while len(path) < len(prefix) and isinstance(node, IndexNode):
            place = node.toward(ItemKey(prefix), len(path))
            if place is None:
                return None
            path += place[0]
            node = self._node(place[1].cid, path, place[1])
        if isinstance(node, Page) and not any(entry.key.startswith(prefix) for entry in node.entries):
            return None
        return Covering(path, place[1] if place else TreeTop(self.top, node.count, node.size))

    def diff(self, other: Cid, other_get: Get | None = None) -> TreeDiff:
        """What must be added, changed and removed to turn this tree into the one with the top `other`.

        Subtrees with equal CIDs are not visited.
        """
        there = TreeReader(other, other_get or self._get, nodes_max=self._nodes_max, bytes_max=self._bytes_max)
        if other == self.top:
            return TreeDiff((), (), ())
        differing: list[tuple[ItemKey, ItemId, bool, bool]] = []
        pairs: list[tuple[_Side, _Side]] = [([("", self.top, None)], [("", other, None)])]
        visited = 0
        while pairs:
            old_side, new_side = pairs.pop()
            visited += 1
            self._check_visited(visited)
            if [path for path, *_ in old_side] == [path for path, *_ in new_side] and len(old_side) == 1:
                path = old_side[0][0]
                old, new = self._open_one(old_side), there._open_one(new_side)
                if isinstance(old, IndexNode) and isinstance(new, IndexNode):
                    pairs += _paired(old, new, path)
                    continue
            # One side has a page of all this, so that most of the other side differs: all of it is read.
            differing += _differing_entries(self._entries(old_side), there._entries(new_side))
        differing.sort()
        return TreeDiff(
            added=tuple(item for _, item, was, _ in differing if not was),
            changed=tuple(item for _, item, was, is_ in differing if was and is_),
            removed=tuple(item for _, item, _, is_ in differing if not is_),
        )

    def _descend(self, key: ItemKey) -> tuple[Path, Page | IndexNode]:
        """The page that holds `key` if any does, or the index node that has no branch for it."""
        path = ""
        node = self._node(self.top, path)
        while isinstance(node, IndexNode):
            place = node.toward(key, len(path))
            if place is None:
                break
            path += place[0]
            node = self._node(place[1].cid, path, place[1])
        return path, node

    def _open_one(self, side: "_Side") -> Page | IndexNode:
        [(path, cid, promised)] = side
        return self._node(cid, path, promised)

    def _entries(self, side: "_Side") -> dict[ItemId, PageEntry]:
        return {
            entry.item: entry for _, _, node in self._walk(side) if isinstance(node, Page) for entry in node.entries
        }

    def _item_state(self, entry: PageEntry, path: Path) -> pb.ItemState:
        data = entry.data
        if entry.large:
            data = self._join(large_item_cids(data), path, total_min=INLINE_ITEM_BYTES_MAX + 1)
        return decode_item(data, entry.item)

    def _join(self, cids: list[Cid], path: Path, *, total_min: int) -> bytes:
        # Asked before anything is fetched: all but the last chunk must be full.
        if (len(cids) - 1) * CHUNK_BYTES >= self._bytes_max:
            raise TooLarge(f"{len(cids)} chunks at {path!r} of the item tree, more than {self._bytes_max} bytes")
        parts = [self._blob(cid, path, CHUNK_BYTES) for cid in cids]
        problem = chunks_problem([len(part) for part in parts], total_min=total_min)
        if problem:
            raise BadBlob(cids[0], path, problem)
        return b"".join(parts)

    def chunk_cids(self, page: Page, path: Path) -> Iterator[Cid]:
        """The chunks that the items of a page are in: of large items, and of their model states."""
        for entry in page.entries:
            if entry.large:
                yield from large_item_cids(entry.data)
            yield from map(Cid, self._item_state(entry, path).state_cids)


def verify_tree(top: Cid, count: int, get: Get, *, nodes_max: int = NODES_MAX) -> TreeReport:
    """Read everything below `top`, chunks included, and list what is wrong; `count` items are promised.

    A tree without problems is the only tree of its items: its top is what `build` gives for them. Whether they are the
    right items only the history can tell.
    """
    meter = _Meter(get)
    reader = TreeReader(top, meter)
    problems: list[str] = []
    items = nodes = 0
    waiting: list[tuple[Path, Cid, TreeTop | None]] = [("", top, None)]
    while waiting and len(problems) < PROBLEMS_MAX:
        path, cid, promised = waiting.pop()
        nodes += 1
        if nodes > nodes_max:
            problems.append(f"more than {nodes_max} nodes")
            break
        try:
            node = reader._node(cid, path, promised)
            if promised is None and node.count != count:
                raise BadBlob(cid, path, f"{node.count} items, the state root promised {count}")
        except BadBlob as error:
            problems.append(error.what)
            continue
        if isinstance(node, IndexNode):
            waiting += [(path + label, branch.cid, branch) for label, branch in reversed(node.branches)]
            continue
        items += node.count
        for entry in node.entries:
            problem = _item_problem(reader, meter, entry, path)
            if problem:
                problems.append(problem)
    return TreeReport(tuple(problems[:PROBLEMS_MAX]), items, nodes, len(meter.sizes), sum(meter.sizes.values()))


class _Meter:
    """A `get` that remembers how large every blob was."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self.sizes: dict[Cid, int] = {}

    def __call__(self, cid: Cid) -> bytes | None:
        data = self._get(cid)
        if data is not None:
            self.sizes[cid] = len(data)
        return data


def _item_problem(reader: TreeReader, meter: _Meter, entry: PageEntry, path: Path) -> str:
    try:
        state = reader._item_state(entry, path)
        cids = [Cid(cid) for cid in state.state_cids]
        for cid in dict.fromkeys(cids):  # a chunk that an item names a thousand times is hashed once
            reader._blob(cid, path, CHUNK_BYTES)
    except (Corrupt, TooLarge) as error:
        return error.what
    if not cids:
        return ""
    problem = chunks_problem([meter.sizes[cid] for cid in cids], total_min=INLINE_STATE_BYTES_MAX + 1)
    return f"The state of item {entry.item.hex()}: {problem}." if problem else ""


# One side of a comparison: nodes with their paths and what their parents promised, in ascending order.
_Side = list[tuple[Path, Cid, TreeTop | None]]


def _paired(old: IndexNode, new: IndexNode, path: Path) -> Iterator[tuple[_Side, _Side]]:
    """What both have below the same nibbles, where it differs: one may have a run where the other has its parts."""
    labels = {label for node in (old, new) for label, _ in node.branches}
    for label in labels:
        if any(label in within(wider)[1:] for wider in labels):
            continue
        before, after = _side(old, label, path), _side(new, label, path)
        if before != after:
            yield before, after


def _side(node: IndexNode, label: str, path: Path) -> _Side:
    return [(path + each, top.cid, top) for each, top in node.branches if each in within(label)]


def _differing_entries(
    before: Mapping[ItemId, PageEntry], after: Mapping[ItemId, PageEntry]
) -> Iterator[tuple[ItemKey, ItemId, bool, bool]]:
    """Key, id, whether the item was there, whether it is there: for each item that is not the same in both."""
    for item in before.keys() | after.keys():
        if before.get(item) != after.get(item):
            yield item_key(item), item, item in before, item in after
