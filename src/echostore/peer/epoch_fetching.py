"""The blobs of an epoch, from whoever has them: heads first, then the item tree from its top, many nodes at a time.

    fetch_heads   root, cut, moves, membership: where the epoch ends and what is in it
    fetch_tree    nodes and large states
    keep_placements   the placement tree, made from the items and compared

`Fetch` gets blobs into the store; who newly comes, who slept and who lost its blobs hand in the network, and whoever wants to
know what is missing here hands in a look at the store alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import CHUNK_BYTES, TreeTop
from echostore.peer.placement_checking import check_items
from echostore.wire.base_epoch import BaseEpoch, BaseName
from echostore.wire.cids import RAW, cid_of
from echostore.wire.epochs import cut_pages
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import move_chunks
from echostore.wire.membership import membership_names
from echostore.wire.snapshot import is_raw_cid, read_state_root
from echostore.wire.tree_nodes import (
    IndexNode,
    MalformedNode,
    Page,
    large_item_cids,
    parse_node,
    parse_placement_node,
)
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


class Look:
    """A `Fetch` that gets nothing: it says what is missing or damaged here, and follows what is not."""

    def __init__(self, blobs: "BlobStore") -> None:
        self._blobs = blobs
        self.here: set[Cid] = set()
        self.lost: set[Cid] = set()

    def __call__(self, cids: list[Cid], follow: "Follow | None" = None) -> None:
        waiting = list(dict.fromkeys(cids))
        while waiting:
            some = [waiting.pop() for _ in range(min(_LOOK_BLOBS, len(waiting)))]
            while some:
                found = self._blobs.get_some(some, _LOOK_BYTES)
                if not found:
                    self.lost.update(some)
                self.here.update(found)
                for cid, data in found.items():
                    waiting.extend(follow(cid, data) if follow is not None else ())
                some = [cid for cid in some if cid not in found] if found else []


@dataclass(frozen=True, slots=True)
class Survey:
    """What is here of an epoch, as far as that tells what belongs to it."""

    here: frozenset[Cid]
    lost: int
    """Missing or damaged blobs that members have."""
    unplaced: int
    """Those of the placement tree, which the items give again."""


def survey(name: BaseName, blobs: "BlobStore") -> Survey:
    """Read all that is here of an epoch, hundreds of blobs at a time: some 100 MB in a second."""
    look, places = Look(blobs), Look(blobs)
    lost = 0
    try:
        fetch_heads(blobs, name, look)
        fetch_tree(blobs, name, look)
    except (NotFound, Corrupt):
        lost = 1
    try:
        top = read_state_root(blobs.get(name.snapshot)).placements
        look_at_tree(places, top, parse_placement_node)
    except (NotFound, Corrupt):
        lost = 1
    return Survey(frozenset(look.here | places.here), max(lost, len(look.lost)), len(places.lost))


def holes(name: BaseName, blobs: "BlobStore | None") -> int:
    """How many blobs of an epoch that only members have are missing or damaged here, as far as what is here tells."""
    return 1 if blobs is None else survey(name, blobs).lost


Branches = Callable[[str], Iterable[tuple[str, TreeTop]]]
"""What stands below a path of a tree."""


def look_at_tree(
    look: Look, top: Cid | None, parse: Callable[[bytes, str], object], known: Iterable[Branches] = ()
) -> list[Cid]:
    """Look at the nodes of a tree, but for those that trees have which are `known` to be whole; returns chunks of items.

    So it costs what differs from them.
    """
    paths: dict[Cid, str] = {} if top is None else {top: ""}
    trees, chunks = list(known), list[Cid]()

    def below(cid: Cid, data: bytes) -> list[Cid]:
        path = paths.pop(cid, None)
        if path is None:
            return []  # named twice
        try:
            node = parse(data, path)
        except MalformedNode as error:
            raise Corrupt(f"a node of a tree at {path!r} is malformed: {error}") from None
        if isinstance(node, Page):
            for entry in node.entries:
                chunks.extend(item_chunks(entry.data) if entry.large else _state_chunks(entry.data))
        if not isinstance(node, IndexNode):
            return []
        shared = {branch.cid for tree in trees for _, branch in tree(path)}
        onward = {branch.cid: path + label for label, branch in node.branches if branch.cid not in shared}
        paths.update(onward)
        return list(onward)

    look(list(paths), below)
    return chunks


def keep_placements(base: BaseEpoch, blobs: "BlobStore") -> None:
    """Check a fetched epoch, and keep its placement tree, so that others can be given views of it.

    The tree is made from the items, which takes no fetching and shows whether the epoch's index is theirs.
    """
    made = check_items(base.reader, base.root.placements)
    blobs.drop_damaged(made)
    blobs.put_many({cid: made[cid] for cid in blobs.missing(made)})
