"""The blobs of an epoch, from whoever has them: heads first, then the item tree from its top, many nodes at a time.

    fetch_heads   root, cut, moves, membership: where the epoch ends and what is in it
    fetch_tree    nodes and large states
    keep_placements   the placement tree, made from the items and compared

`Fetch` gets blobs into the store; who newly comes, who slept and who lost its blobs hand in the network, and whoever wants to
know what is missing here hands in a look at the store alone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import CHUNK_BYTES, TreeTop, is_page, is_run
from echostore.peer.placement_checking import check_items
from echostore.wire.base_epoch import BaseEpoch, BaseName
from echostore.wire.cids import RAW, cid_of
from echostore.wire.epochs import cut_pages
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import move_chunks
from echostore.wire.membership import membership_names
from echostore.wire.snapshot import is_raw_cid, read_state_root
from echostore.wire.tree_nodes import IndexNode, MalformedNode, Page, large_item_cids, parse_node
from echostore.wire.tree_reader import ITEM_BYTES_MAX

if TYPE_CHECKING:
    from echostore.mesh.blob_exchange import Follow
    from echostore.store.blob_store import BlobStore

_LARGE_ITEMS: Final = 256
"""Large items that are looked at together."""

_LOOK_BLOBS: Final = 512
_LOOK_BYTES: Final = 4 * 1024 * 1024
"""What is looked at together of an epoch that is here."""

_CHUNK_HEAD: Final = cid_of(b"", RAW)[:4]
"""What the CID of every chunk begins with: a page without these bytes names none."""


class Fetch(Protocol):
    """Gets blobs into the store, and what `follow` says they lead to; `Unavailable` when nobody has them."""

    def __call__(self, cids: list[Cid], follow: "Follow | None" = None) -> None: ...


Progress = Callable[[int, int], None]


def fetch_heads(blobs: "BlobStore", name: BaseName, fetch: Fetch) -> None:
    """Everything of an epoch but its items: enough to know where it ends and what is in it."""
    name.check()
    fetch([name.snapshot, name.cut] if name.cut else [name.snapshot])
    root = read_state_root(blobs.get(name.snapshot))
    pages = cut_pages(blobs.get(name.cut)) if name.cut else []
    fetch([root.membership_root, root.tree, root.index_root, *pages])
    fetch([*move_chunks(blobs.get(root.tree)), *membership_names(root.membership_root, blobs.get)])


def fetch_tree(
    blobs: "BlobStore",
    name: BaseName,
    fetch: Fetch,
    progress: Progress = lambda done, total: None,
    *,
    chunks_too: bool = True,
) -> None:
    """The item tree from its top; a node that can't stand where it does is Corrupt. Large states may come later."""
    root = read_state_root(blobs.get(name.snapshot))
    walk = _TreeWalk(root.index_root, root.item_count, progress, chunks_too=chunks_too)
    fetch([root.index_root], walk.below)
    for start in range(0, len(walk.large), _LARGE_ITEMS):
        some = walk.large[start : start + _LARGE_ITEMS]
        fetch([cid for cids in some for cid in cids])
        fetch([chunk for cids in some for chunk in _state_chunks(b"".join(blobs.get(cid) for cid in cids))])


class _TreeWalk:
    """What each node of an item tree leads to, while its siblings are still on their way.

    Of pages nothing is read but the names of chunks: whether they stand where they belong is asked once, by who reads
    their items. So a download costs by the blob, not by the item.
    """

    def __init__(self, top: Cid, count: int, progress: Progress, *, chunks_too: bool) -> None:
        self._expected: dict[Cid, tuple[str, TreeTop | None]] = {top: ("", None)}
        self._total, self._progress, self._chunks_too = count, progress, chunks_too
        self._done = 0
        self.large: list[list[Cid]] = []
        """The chunks of items that are too large for their page: what such an item leads to is known once it is here."""

    def below(self, cid: Cid, data: bytes) -> list[Cid]:
        place = self._expected.pop(cid, None)
        if place is None:
            return []  # a chunk
        path, top = place
        if top is not None and top.size == len(data) and _CHUNK_HEAD not in data:
            self._told(top.count)  # a page of small items: an index node is shorter than what it stands for
            return []
        node = _node(data, path, top)
        if isinstance(node, IndexNode):
            self._expected.update((branch.cid, (path + label, branch)) for label, branch in node.branches)
            return [branch.cid for _, branch in node.branches]
        self._told(node.count)
        if not self._chunks_too:
            return []
        self.large += [item_chunks(entry.data) for entry in node.entries if entry.large]
        return [chunk for entry in node.entries if not entry.large for chunk in _state_chunks(entry.data)]

    def _told(self, items: int) -> None:
        self._done += items
        self._progress(self._done, self._total)


def _node(data: bytes, path: str, top: TreeTop | None) -> Page | IndexNode:
    try:
        node = parse_node(data, path)
    except MalformedNode as error:
        raise Corrupt(f"a node of the epoch's tree at {path!r} is malformed: {error}") from None
    if top is not None and (node.count, node.size) != (top.count, top.size):
        raise Corrupt(f"a node of the epoch's tree at {path!r} has {node.count} items, its parent promised {top.count}")
    return node


def item_chunks(data: bytes) -> list[Cid]:
    """The chunks of a large item. One chunk can be named very often in little space, and they are put together in memory."""
    cids = large_item_cids(data)
    if (len(cids) - 1) * CHUNK_BYTES >= ITEM_BYTES_MAX:
        raise Corrupt(f"an item of the epoch's tree in {len(cids)} chunks")
    return cids


def _state_chunks(data: bytes) -> list[Cid]:
    """The chunks of the model state that an item names. What else it says is asked by who reads it."""
    try:
        cids = pb.ItemState.FromString(data).state_cids
    except DecodeError as error:
        raise Corrupt(f"an item of the epoch's tree can't be decoded: {error}") from None
    if not all(map(is_raw_cid, cids)):
        raise Corrupt("an item of the epoch's tree names a chunk that is not named by a raw CID")
    return [Cid(cid) for cid in cids]


class _Look:
    """A `Fetch` that gets nothing: it counts what is missing here, and follows what is not."""

    def __init__(self, blobs: "BlobStore") -> None:
        self._blobs = blobs
        self.lost: set[Cid] = set()

    def __call__(self, cids: list[Cid], follow: "Follow | None" = None) -> None:
        waiting = list(dict.fromkeys(cids))
        while waiting:
            some = [waiting.pop() for _ in range(min(_LOOK_BLOBS, len(waiting)))]
            while some:
                found = self._blobs.get_some(some, _LOOK_BYTES)
                if not found:
                    self.lost.update(some)
                for cid, data in found.items():
                    waiting.extend(follow(cid, data) if follow is not None else ())
                some = [cid for cid in some if cid not in found] if found else []


def holes(name: BaseName, blobs: "BlobStore | None") -> int:
    """How many blobs of an epoch are missing or damaged here, as far as what is here tells. All of them are read."""
    if blobs is None:
        return 1
    look = _Look(blobs)
    try:
        fetch_heads(blobs, name, look)
        fetch_tree(blobs, name, look)
    except (NotFound, Corrupt):
        return max(1, len(look.lost))
    return len(look.lost)


def absent(name: BaseName, blobs: "BlobStore") -> int:
    """How many nodes of an epoch's item tree are not here. Pages are not read, so this costs little."""
    try:
        root = read_state_root(blobs.get(name.snapshot))
        lost, waiting = 0, [("", TreeTop(root.index_root, root.item_count, 0))]
        while waiting:
            level, waiting = waiting, []
            lost += len(blobs.missing([top.cid for _, top in level]))
            for path, top in level:
                if (path and is_page(len(path), top.count, top.size)) or is_run(path):
                    continue
                node = parse_node(blobs.get(top.cid), path)
                if isinstance(node, IndexNode):
                    waiting += [(path + label, branch) for label, branch in node.branches]
    except (NotFound, Corrupt, MalformedNode):
        return 1
    return lost


def keep_placements(base: BaseEpoch, blobs: "BlobStore") -> None:
    """Check a fetched epoch, and keep its placement tree, so that others can be given views of it.

    The tree is made from the items, which takes no fetching and shows whether the epoch's index is theirs.
    """
    made = check_items(base.reader, base.root.placements)
    blobs.drop_damaged(made)
    blobs.put_many({cid: made[cid] for cid in blobs.missing(made)})
