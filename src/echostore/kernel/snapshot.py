"""The shape of a snapshot: which items share a page, which bytes become blobs. Pure rules; `echostore.wire` encodes.

    key of an item   SHA-256(item id), written as 64 nibbles
    path             the first nibbles of a key, as hex text: "" is the top, "3f" lies two levels down
    node at a path   covers the items whose key starts with it: a page when they are few, else 16 branches

            ""  25 items              The rule looks at the items alone, never at how they came: equal sets of items
           /  |   \\                   give equal trees, and a change rewrites only the nodes above the changed items.
         "0" "3"  "f"
          9   14    2                 Item ids name their creator and count up; hashing spreads them over the branches.
             /  \\
          "31"  "3c"

Every number here is part of the format: with another one, equal states have other CIDs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple, NewType

from echostore.kernel.ids import Cid, FeedKey, ItemId, Link, PartyKey

ItemKey = NewType("ItemKey", str)
"""SHA-256 of an item id as 64 hex digits. Text, because paths are prefixes of it and hex sorts like the bytes do."""

Path = str
"""Hex digits; a prefix of the keys of all items below the node."""

NIBBLES: Final = "0123456789abcdef"
KEY_NIBBLES: Final = 64

ENCODING_VERSION: Final = 1
"""Of everything under a state root. It changes whenever equal states get other bytes."""

PAGE_ITEMS_MAX: Final = 12
"""Measured (docs/internals/snapshots.md). A small page costs little when one of its items changes, a large one needs
fewer index nodes. With 12, a change of 1 % of the items makes 5 to 9 % new bytes, whatever the number of items."""

PATH_NIBBLES_MAX: Final = 16
"""At this depth everything is a page, whatever its size. Nobody finds 13 ids that share 64 bits of SHA-256, so it
never happens; a reader may refuse what lies deeper, and a hostile tree can't lead it on without end."""

INLINE_STATE_BYTES_MAX: Final = 2048
"""A larger model state becomes chunks, so that its page stays small and lists of items load without it."""

INLINE_ITEM_BYTES_MAX: Final = 4096
"""An ItemState that is larger though its model state has moved out (long metadata, many access writes, a long list
of chunks) becomes chunks too: otherwise one item could make a page that is too large to be sent."""

CHUNK_BYTES: Final = 256 * 1024
"""Chunks have this size, the last one less. Fixed, so that a chunk's bytes are found without reading the others."""


@dataclass(frozen=True, slots=True)
class TreeTop:
    """The node at the top of a tree or of a subtree: its CID, and how many items are below."""

    cid: Cid
    count: int


class TimeframeEntry(NamedTuple):
    """The last block of a data feed inside a snapshot."""

    feed_key: FeedKey
    seq: int
    link: Link


class ModelVersion(NamedTuple):
    """A model that some item of the snapshot uses."""

    model: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRoot:
    """Everything that `snapshot().cid` stands for; nothing here differs between honest peers."""

    party: PartyKey
    timeframe: tuple[TimeframeEntry, ...]
    admission_digest: bytes
    base_epoch: bytes | None
    models: tuple[ModelVersion, ...]
    item_count: int
    membership_root: Cid
    index_root: Cid
    tree: Cid
    encoding_version: int = ENCODING_VERSION


def item_key(item: ItemId) -> ItemKey:
    return ItemKey(sha256(item).hexdigest())


def is_page(depth: int, count: int) -> bool:
    """Whether a node with `count` items at `depth` is a page. The one rule that gives the tree its shape."""
    return count <= PAGE_ITEMS_MAX or depth >= PATH_NIBBLES_MAX


def key_bounds(path: Path) -> tuple[ItemKey, ItemKey]:
    """The first and the last key below `path`, both inclusive: what an ordered store asks for to list a node's items."""
    return ItemKey(path.ljust(KEY_NIBBLES, "0")), ItemKey(path.ljust(KEY_NIBBLES, "f"))


def chunks(data: bytes) -> Iterator[bytes]:
    """`data` cut into chunks."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def chunks_problem(sizes: list[int], *, total_min: int) -> str:
    """What is wrong with chunks of these sizes that hold at least `total_min` bytes; empty when nothing is."""
    if not sizes or sum(sizes) < total_min:
        return f"{sum(sizes)} bytes in chunks, where fewer than {total_min} bytes stand in the page itself"
    if any(size != CHUNK_BYTES for size in sizes[:-1]) or not 0 < sizes[-1] <= CHUNK_BYTES:
        return f"chunks of {sizes[:4]} bytes, where all but the last have {CHUNK_BYTES}"
    return ""
