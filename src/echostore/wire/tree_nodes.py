"""The nodes of the item tree <-> bytes: pages and index nodes, written and parsed by hand.

    page         ( 0a len ItemState )*  ( 12 len LargeItem )*        each group ascending by item key
      ItemState    0a 10 <16-byte item id> ...                       embedded as it is, never encoded again
      LargeItem    0a 10 <16-byte item id> ( 12 24 <36-byte CID> )+
    index node   18 present   22 len ( <36-byte CID> )+   2a len ( count )+   32 len ( size )+
    page of the placement tree   3a len ( <32-byte placement> )+           ascending by placement key

By hand, because a page of ready-made item states is then a join of bytes (100,000 items in well under a second), and
because opening one item of a page decodes that item alone. The bytes are those of the generated `TreeNode`.

Parsing is strict: what is accepted has the shape the rules ask for at its path and is the only encoding of what it
says. Whether blobs match their CIDs is the reader's business.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from echostore.kernel.ids import ITEM_ID_BYTES, Cid, ItemId
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.snapshot import (
    CID_BYTES,
    INLINE_ITEM_BYTES_MAX,
    LABELS,
    PLACEMENT_BYTES,
    SPANS,
    ItemKey,
    Path,
    Placement,
    TreeTop,
    Weight,
    branch_labels,
    is_page,
    is_run,
    item_key,
    key_bounds,
    placement_key,
)
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.snapshot import EncodedItem, is_node_cid, is_raw_cid
from echostore.wire.varint import varint

INDEX_BYTES_MAX: Final = 1024
"""16 CIDs, counts and sizes, the numbers of 10 bytes each, with their heads, are less."""

_BITS: Final = {label: 1 << bit for bit, label in enumerate(LABELS)}
_ORDERED: Final = sorted(LABELS, key=lambda label: SPANS[label][0])

ITEM_HEAD: Final = bytes((0x0A, ITEM_ID_BYTES))
_CID_HEAD = bytes((0x12, CID_BYTES))
_ID_END = len(ITEM_HEAD) + ITEM_ID_BYTES


class MalformedNode(ValueError):
    """These bytes are no node that may stand at this path."""


class PageEntry(NamedTuple):
    """An item as its page holds it: the bytes of its ItemState or, when `large`, of its LargeItem."""

    key: ItemKey
    item: ItemId
    data: bytes
    large: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A leaf: its items in ascending order of their keys."""

    entries: tuple[PageEntry, ...]
    size: int
    """Bytes of the page."""

    @property
    def count(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class PlacementPage:
    """A leaf of the placement tree: its placements in ascending order of their keys."""

    placements: tuple[Placement, ...]

    @property
    def count(self) -> int:
        return len(self.placements)

    @property
    def size(self) -> int:
        """Bytes of the placements, without what is around them in the page."""
        return PLACEMENT_BYTES * len(self.placements)


@dataclass(frozen=True, slots=True)
class WholePage:
    """The bytes of a page that was made here, of items that all stand in it whole; goes through as these."""

    data: bytes
    count: int

    @staticmethod
    def of(items: Mapping[ItemId, EncodedItem]) -> "WholePage":
        """Of small items, ascending by their keys: neither is worked out again, which is half the cost of a page."""
        return WholePage(page_bytes(items.values(), ()), len(items))

    def __iter__(self) -> Iterator[tuple[ItemId, EncodedItem]]:
        return iter(small_items(self.data).items())


@dataclass(frozen=True, slots=True)
class IndexNode:
    """An inner node: the branches that hold items, by label in the order of their nibbles."""

    branches: tuple[tuple[str, TreeTop], ...]

    @property
    def count(self) -> int:
        return sum(top.count for _, top in self.branches)

    @property
    def size(self) -> int:
        return sum(top.size for _, top in self.branches)

    def toward(self, key: ItemKey, depth: int) -> tuple[str, TreeTop] | None:
        """The branch that holds `key` if any does, of a node at `depth`."""
        nibble = key[depth]
        return next(((label, top) for label, top in self.branches if nibble in SPANS[label]), None)


def page_bytes(items: Iterable[bytes], large_items: Iterable[bytes]) -> bytes:
    """A page of encoded ItemStates and LargeItems, each ascending by item key."""
    parts: list[bytes] = []
    for item in items:
        parts += (_ITEM_HEADS[len(item)], item)
    for large in large_items:
        parts += (b"\x12" + varint(len(large)), large)
    return b"".join(parts)


def index_bytes(branches: Iterable[tuple[str, TreeTop]]) -> bytes:
    """An index node over the branches that hold items, in the order of their nibbles."""
    present = 0
    tops: list[TreeTop] = []
    for label, top in branches:
        present |= _BITS[label]
        tops.append(top)
    return pb.TreeNode(
        present=present,
        branches=b"".join([top.cid for top in tops]),
        counts=[top.count for top in tops],
        sizes=[top.size for top in tops],
    ).SerializeToString()


def placement_page_bytes(placements: Sequence[Placement]) -> bytes:
    """A page of placements, ascending by their keys."""
    joined = b"".join(placements)
    return b"\x3a" + varint(len(joined)) + joined if joined else b""


def large_item_bytes(item: ItemId, cids: Sequence[Cid]) -> bytes:
    return ITEM_HEAD + item + b"".join(_CID_HEAD + cid for cid in cids)


def large_item_cids(data: bytes) -> list[Cid]:
    """The chunks that a LargeItem names."""
    step = len(_CID_HEAD) + CID_BYTES
    cids = [Cid(data[start + len(_CID_HEAD) : start + step]) for start in range(_ID_END, len(data), step)]
    if not cids or not all(map(is_raw_cid, cids)) or large_item_bytes(ItemId(data[2:_ID_END]), cids) != data:
        raise MalformedNode("a large item that is not an id and the raw CIDs of its chunks")
    return cids


def parse_node(data: bytes, path: Path) -> Page | IndexNode:
    """The node that may stand at `path` with these bytes; raises MalformedNode."""
    if len(data) > BLOB_BYTES_MAX:
        raise MalformedNode(f"a node of {len(data)} bytes")
    if data[:1] == b"\x18":
        return _parse_index(data, path)
    return _parse_page(data, path)


def parse_placement_node(data: bytes, path: Path) -> PlacementPage | IndexNode:
    """The node of a placement tree that may stand at `path` with these bytes; raises MalformedNode."""
    if len(data) > BLOB_BYTES_MAX:
        raise MalformedNode(f"a node of {len(data)} bytes")
    if data[:1] == b"\x18":
        return _parse_index(data, path)
    return _parse_placements(data, path)


def page_placements(data: bytes) -> tuple[Placement, ...]:
    """The placements of a page, as they stand there; raises MalformedNode for another form, and looks at nothing else."""
    if not data:
        return ()
    if data[0] != 0x3A:
        raise MalformedNode(f"unexpected tag {data[0]:#04x} at byte 0")
    size, start = _read_varint(data, 1)
    if size != len(data) - start or size % PLACEMENT_BYTES:
        raise MalformedNode(f"placements of {size} bytes in a page of {len(data)}")
    return tuple(Placement(data[at : at + PLACEMENT_BYTES]) for at in range(start, len(data), PLACEMENT_BYTES))


def small_items(data: bytes) -> dict[ItemId, EncodedItem]:
    """The items that stand in a page whole, ascending by their keys. For pages that were made or checked here."""
    if data[:1] == b"\x18":
        return {}
    found: dict[ItemId, EncodedItem] = {}
    at, end = 0, len(data)
    while at < end and data[at] != 0x12:  # large items are behind all others
        size, start = _read_varint(data, at + 1)
        if data[at] != 0x0A or start + size > end or not data.startswith(ITEM_HEAD, start):
            raise MalformedNode(f"an entry at byte {at} that is no item state")
        at = start + size
        found[ItemId(data[start + 2 : start + _ID_END])] = EncodedItem(data[start:at])
    return found


def index_branches(data: bytes) -> list[tuple[str, TreeTop]]:
    """The branches of an index node that was made or checked here, in the order of their nibbles; none of a page."""
    if data[:1] != b"\x18":
        return []
    node = pb.TreeNode.FromString(data)
    joined = node.branches
    cids = [Cid(joined[at : at + CID_BYTES]) for at in range(0, len(joined), CID_BYTES)]
    # Slices, because the numbers of a message are slow to go through one by one.
    return list(zip(_present(node.present), map(TreeTop, cids, node.counts[:], node.sizes[:]), strict=True))


def page_count(data: bytes, path: Path) -> int | None:
    """How many items a page has that may stand at `path`; None for what has to be parsed to be known.

    Who looks at every page of a tree needs nothing of most of them: this checks a page of small items like
    `parse_node`, in a quarter of the time. An index node, a large item and whatever is wrong are left to that one.
    """
    at, end, count = 0, len(data), 0
    before, last = key_bounds(path)
    digest_before, digest_last = bytes.fromhex(before), bytes.fromhex(last)
    while at < end:
        size, start = data[at + 1] if at + 1 < end else 0, at + 2
        if size >= 0x80:
            high = data[at + 2] if at + 2 < end else 0
            if not 0 < high < 0x80:
                return None
            size, start = (size & 0x7F) | high << 7, at + 3
        if data[at] != 0x0A or not _ID_END <= size <= INLINE_ITEM_BYTES_MAX or not data.startswith(ITEM_HEAD, start):
            return None
        digest = sha256(data[start + 2 : start + _ID_END]).digest()
        if not (digest_before < digest or (count == 0 and digest_before == digest)) or digest > digest_last:
            return None
        at, digest_before, count = start + size, digest, count + 1
    return count if at == end and count and is_page(len(path), count, end) else None


def _parse_index(data: bytes, path: Path) -> IndexNode:
    if len(data) > INDEX_BYTES_MAX:
        raise MalformedNode(f"an index node of {len(data)} bytes")
    try:
        message = pb.TreeNode.FromString(data)
    except DecodeError as error:
        raise MalformedNode(f"undecodable: {error}") from None
    labels = list(_present(message.present))
    cids = [Cid(message.branches[at : at + CID_BYTES]) for at in range(0, len(message.branches), CID_BYTES)]
    same_length = len(labels) == len(cids) == len(message.counts) == len(message.sizes)
    if not same_length or message.present >> len(LABELS):
        raise MalformedNode("an index node with columns of unequal length")
    if not all(map(is_node_cid, cids)):
        raise MalformedNode("a branch that is not named by a protobuf CID")
    if not all(message.counts):
        raise MalformedNode("an empty branch")
    node = IndexNode(tuple(zip(labels, map(TreeTop, cids, message.counts, message.sizes), strict=True)))
    if is_run(path) or is_page(len(path), node.count, node.size):
        raise MalformedNode(f"an index node over {node.count} items at {path!r}, where a page belongs")
    weights = {label: Weight(top.count, top.size) for label, top in node.branches}
    if branch_labels(len(path), weights) != labels:
        raise MalformedNode(f"an index node at {path!r} that is divided in another way than its items are")
    if index_bytes(node.branches) != data:
        raise MalformedNode("an index node that is not in its canonical encoding")
    return node


def _parse_page(data: bytes, path: Path) -> Page:
    if not data and path:
        raise MalformedNode("an empty page below the top")
    groups = _page_groups(data)
    count = len(groups[0]) + len(groups[1])
    if not is_page(len(path), count, len(data)):
        raise MalformedNode(f"a page of {count} items and {len(data)} bytes, where an index node belongs")
    entries: list[PageEntry] = []
    for large, group in enumerate(groups):
        keyed = [PageEntry(item_key(item), item, raw, bool(large)) for item, raw in group]
        if any(before.key >= after.key for before, after in pairwise(keyed)):
            raise MalformedNode("items that are repeated or out of order")
        entries += keyed
    if groups[1]:
        entries.sort()
        if any(before.key == after.key for before, after in pairwise(entries)):
            raise MalformedNode("an item that is both small and large")
    first, last = key_bounds(path)
    for entry in entries:
        if not first <= entry.key <= last:
            raise MalformedNode(f"item {entry.item.hex()} with key {entry.key[:16]}, which lies elsewhere")
    if page_bytes((raw for _, raw in groups[0]), (raw for _, raw in groups[1])) != data:
        raise MalformedNode("a page that is not in its canonical encoding")
    return Page(tuple(entries), len(data))


def _parse_placements(data: bytes, path: Path) -> PlacementPage:
    if not data and path:
        raise MalformedNode("an empty page below the top")
    page = PlacementPage(page_placements(data))
    if not is_page(len(path), page.count, page.size):
        raise MalformedNode(f"a page of {page.count} placements, where an index node belongs")
    keys = [placement_key(each) for each in page.placements]
    if any(before >= after for before, after in pairwise(keys)):
        raise MalformedNode("placements that are repeated or out of order")
    first, last = key_bounds(path)
    if keys and not (first <= keys[0] and keys[-1] <= last):
        raise MalformedNode("a placement that lies elsewhere")
    if placement_page_bytes(page.placements) != data:
        raise MalformedNode("a page that is not in its canonical encoding")
    return page


_Group = list[tuple[ItemId, bytes]]


def _page_groups(data: bytes) -> tuple[_Group, _Group]:
    """The small and the large items of a page, as they stand there."""
    groups: tuple[_Group, _Group] = ([], [])
    at, end = 0, len(data)
    while at < end:
        large = data[at] == 0x12
        if not large and (data[at] != 0x0A or groups[1]):
            raise MalformedNode(f"unexpected tag {data[at]:#04x} at byte {at}")
        size, start = _read_varint(data, at + 1)
        at = start + size
        raw = data[start:at]
        if at > end or size < _ID_END or not raw.startswith(ITEM_HEAD):
            raise MalformedNode(f"an entry at byte {start} that does not start with an item id")
        if large:
            large_item_cids(raw)
        elif size > INLINE_ITEM_BYTES_MAX:
            raise MalformedNode(f"an item state of {size} bytes that is not in chunks")
        groups[large].append((ItemId(raw[2:_ID_END]), raw))
    return groups


@lru_cache(maxsize=4096)
def _present(bits: int) -> tuple[str, ...]:
    """The labels whose bits are set, in the order of their nibbles."""
    return tuple(label for label in _ORDERED if bits & _BITS[label])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A length and where it ends. Longer spellings of it are found by encoding the page again."""
    size = 0
    for place, byte in enumerate(data[at : at + 4]):
        if byte < 0x80:
            return size | byte << 7 * place, at + place + 1
        size |= (byte & 0x7F) << 7 * place
    raise MalformedNode(f"a length at byte {at} that does not end or is too large")


# The page's tag and length for every size of an item that is not large: looked up once per item of every build.
_ITEM_HEADS: Final = tuple(b"\x0a" + varint(size) for size in range(INLINE_ITEM_BYTES_MAX + 1))
