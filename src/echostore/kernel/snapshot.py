"""The shape of a snapshot: which items share a page, which bytes become blobs. Pure rules; `echostore.wire` encodes.

    key of an item   SHA-256(item id), written as 64 nibbles
    path             the first nibbles of a key, as hex text: "" is the top, "3f" lies two levels down
    node at a path   covers the items whose key starts with it: a page when they fit one, else branches
    branch           a nibble, or an aligned run of 2, 4 or 8 nibbles whose items fit one page together

               ""  420 items               The rule looks at the items alone, never at how they came: equal sets of
          /    |    \\     \\                items give equal trees, and a change rewrites only the nodes above it.
        0-7    8    9    a-b  c-f
        110   130   20   60   100          Item ids name their creator and count up; hashing spreads them.
             /   \\
          80-87  88-8f

Runs are there so that pages are well filled: cut by nibbles alone they would hold a sixteenth of a page just after a split.

A second tree of the same shape has the *placements*: what hangs where, by the genesis of every item. So one view can be
read out of a snapshot without all the others. Explicit moves are not in it; they stand by themselves (`StateRoot.tree`).

    placement        place (16 bytes) ++ item (16 bytes); the place is its genesis parent, or stands for its inception key
    key of one       8 nibbles of the place's key ++ 56 of SHA-256(placement): what hangs at one place stands together

Every number here is part of the format: with another one, equal states have other CIDs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from typing import Final, NamedTuple, NewType, Protocol

from echostore.kernel.ids import ITEM_ID_BYTES, Cid, FeedKey, ItemId, Link, PartyKey

ItemKey = NewType("ItemKey", str)
"""SHA-256 of an item id as 64 hex digits. Text, because paths are prefixes of it and hex sorts like the bytes do."""

Placement = NewType("Placement", bytes)
"""Where one item stands: the id of the place, then its own."""

Path = str
"""Hex digits; a prefix of the keys of all items below the node. The last place may be the label of a run."""

NIBBLES: Final = "0123456789abcdef"
KEY_NIBBLES: Final = 64
CID_BYTES: Final = 36

ENCODING_VERSION: Final = 3
"""Of everything under a state root. It changes whenever equal states get other bytes."""

UNPLACED_VERSION: Final = 2
"""Of state roots without placements, as this program wrote them before. They are read, and recomputed as they are."""

READ_VERSIONS: Final = (UNPLACED_VERSION, ENCODING_VERSION)

PAGE_BYTES_MAX: Final = 8192
PAGE_ITEMS_MAX: Final = 128
"""Measured (docs/internals/snapshots.md). A small page costs little when one of its items changes, a large one needs
fewer blobs and index nodes: what a newcomer fetches costs by the blob. Pages come out between half full and full."""

PATH_NIBBLES_MAX: Final = 16
"""At this depth everything is a page, whatever its size. Nobody finds many ids that share 60 bits of SHA-256, so it
never happens; a reader may refuse what lies deeper, and a hostile tree can't lead it on without end."""

INLINE_STATE_BYTES_MAX: Final = 2048
"""A larger model state becomes chunks, so that its page stays small and lists of items load without it."""

INLINE_ITEM_BYTES_MAX: Final = 4096
"""An ItemState that is larger though its model state has moved out (long metadata, many access writes, a long list
of chunks) becomes chunks too: otherwise one item could make a page that is too large to be sent."""

PLACE_NIBBLES: Final = 8
"""Of a place's key at the front of a placement's: enough to find it. A clash of two places costs a reader a few foreign
entries, and the rest of the path divides what hangs at a large place."""

PLACEMENT_BYTES: Final = 2 * ITEM_ID_BYTES

CHUNK_BYTES: Final = 256 * 1024
"""Chunks have this size, the last one less. Fixed, so that a chunk's bytes are found without reading the others."""


@dataclass(frozen=True, slots=True)
class TreeTop:
    """The node at the top of a tree or of a subtree: its CID, how many items are below, and their bytes in pages."""

    cid: Cid
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class Weight:
    """How many items, and how many bytes they take in one page."""

    count: int
    size: int


class Weighed(Protocol):
    """What stands for items and knows their weight."""

    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...


def weight_of(parts: Iterable[Weighed]) -> tuple[int, int]:
    """How many items, and how many bytes, all of them are together."""
    count = size = 0
    for part in parts:
        count += part.count
        size += part.size
    return count, size


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
    placements: Cid | None
    """The top of the placement tree; None in roots of UNPLACED_VERSION, which have none."""

    @property
    def encoding_version(self) -> int:
        return UNPLACED_VERSION if self.placements is None else ENCODING_VERSION

    def same_state(self, other: "StateRoot") -> bool:
        """Whether two roots say the same of a party, whatever epochs they were folded from."""
        return replace(self, base_epoch=None) == replace(other, base_epoch=None)


def item_key(item: ItemId) -> ItemKey:
    return ItemKey(sha256(item).hexdigest())


def view_place(inception_key: bytes) -> ItemId:
    """The place at which a view stands under its inception key. No item has this id, unless somebody looked for one."""
    return ItemId(sha256(b"echostore/view-place/1" + inception_key).digest()[:ITEM_ID_BYTES])


def placements_of(item: ItemId, parent: ItemId | None, inception_key: bytes) -> tuple[Placement, ...]:
    """Where an item stands by its genesis: below its parent, and under its inception key if it is a view."""
    places = [] if parent is None else [parent]
    if inception_key:
        places.append(view_place(inception_key))
    return tuple(Placement(place + item) for place in dict.fromkeys(places))


def place_path(place: ItemId) -> Path:
    """What the keys of all placements at a place begin with."""
    return item_key(place)[:PLACE_NIBBLES]


def placement_key(placement: Placement) -> ItemKey:
    """The place first. The rest is of both: an item that stands at two places whose keys begin alike has two keys."""
    place, _ = placed(placement)
    return ItemKey(place_path(place) + sha256(placement).hexdigest()[: KEY_NIBBLES - PLACE_NIBBLES])


def placed(placement: Placement) -> tuple[ItemId, ItemId]:
    """The place and the item of a placement."""
    return ItemId(placement[:ITEM_ID_BYTES]), ItemId(placement[ITEM_ID_BYTES:])


def entry_bytes(encoded: int) -> int:
    """What an item of so many encoded bytes takes in its page: tag, length, and itself or the names of its chunks."""
    if encoded > INLINE_ITEM_BYTES_MAX:
        encoded = 2 + ITEM_ID_BYTES + (2 + CID_BYTES) * -(-encoded // CHUNK_BYTES)
    return 1 + (1 if encoded < 1 << 7 else 2 if encoded < 1 << 14 else 3) + encoded


def is_page(depth: int, count: int, size: int) -> bool:
    """Whether items are a page at `depth`, or one branch: the rule that gives the tree its shape.

    One item is never split, whatever its size. What fits, fits with fewer items too.
    """
    return count <= 1 or depth >= PATH_NIBBLES_MAX or (count <= PAGE_ITEMS_MAX and size <= PAGE_BYTES_MAX)


# The runs as a binary tree over the 16 nibbles. A run has one letter, so that a path has one letter for each level.
_HALVES: Final[dict[str, str]] = dict(
    zip(
        ("", *"ghijklmnopqrst"),
        ("gh", "ij", "kl", "mn", "op", "qr", "st", "01", "23", "45", "67", "89", "ab", "cd", "ef"),
        strict=True,
    )
)
LABELS: Final = NIBBLES + "ghijklmnopqrst"
"""Every name that a branch may have: a nibble; g and h 8 nibbles, i to l 4, m to t 2."""
BELOW_END: Final = "~"
"""Sorts after every label: `path + BELOW_END` ends what lies below a path."""


def _within(label: str) -> tuple[str, ...]:
    below = tuple(each for half in _HALVES.get(label, "") for each in _within(half))
    return (label, *below) if label else below


_WITHIN: Final = {label: _within(label) for label in ("", *LABELS)}
SPANS: Final = {label: [each for each in _WITHIN[label] if each in NIBBLES] for label in LABELS}
"""The nibbles of each label, ascending."""
COVERING: Final = {nibble: tuple(label for label in LABELS if nibble in SPANS[label]) for nibble in NIBBLES}
"""The labels below which a nibble may lie: itself, and the runs that it is in."""

_ENDS: Final = {label: NIBBLES.index(SPANS[label][-1]) + 1 for label in LABELS}
_DIVIDED: Final = {
    run: [(half, NIBBLES.index(SPANS[half][0]), _ENDS[half]) for half in reversed(halves)]
    for run, halves in _HALVES.items()
}
"""The halves of each run, the second one first, with the number of their first nibble and that after their last."""
_WIDER: Final = {half: run for run, halves in _HALVES.items() if run for half in halves}


def is_run(path: Path) -> bool:
    """Whether the node at `path` covers several nibbles: then it is a page."""
    return path[-1:] > "f"


def within(label: str) -> tuple[str, ...]:
    """A label and those of its parts, in the order of their nibbles where they do not overlap."""
    return _WITHIN[label]


def branch_labels(depth: int, weights: Mapping[str, Weighed]) -> list[str]:
    """How the items of an index node at `depth` are divided: the widest runs that fit a page, else nibbles.

    `weights` has the items by nibble, or by runs that fit a page; nothing for where there are none.
    """
    counts, sizes = [0] * (len(NIBBLES) + 1), [0] * (len(NIBBLES) + 1)
    for label, weight in weights.items():
        end = _ENDS[label]
        counts[end] += weight.count
        sizes[end] += weight.size
    # Up to each nibble, so that what a run has is one difference: every index node of every update comes by here.
    counts, sizes = list(accumulate(counts)), list(accumulate(sizes))
    found: list[str] = []
    waiting = list(_DIVIDED[""])
    while waiting:
        label, start, end = waiting.pop()
        count = counts[end] - counts[start]
        if not count:
            continue
        if label in NIBBLES or is_page(depth + 1, count, sizes[end] - sizes[start]):
            found.append(label)
        else:
            waiting += _DIVIDED[label]
    return found


def stays_divided(depth: int, weights: Mapping[str, Weighed], changed: Iterable[str]) -> bool:
    """Whether an index node has the same labels as before, though the items below some of them have changed.

    `weights` are by these labels, none of which is empty, and runs fit a page. What fits, fits with fewer items too: so it
    is enough that what is next wider than a changed label does not fit one. Quicker than `branch_labels`.
    """
    wider = {_WIDER[label] for label in changed if label in _WIDER}
    return not any(
        is_page(depth + 1, *weight_of([weights[each] for each in _WITHIN[run] if each in weights])) for run in wider
    )


def key_bounds(path: Path) -> tuple[ItemKey, ItemKey]:
    """The first and the last key below `path`, both inclusive: what an ordered store asks for to list a node's items."""
    first = last = path
    if is_run(path):
        span = SPANS[path[-1]]
        first, last = path[:-1] + span[0], path[:-1] + span[-1]
    return ItemKey(first.ljust(KEY_NIBBLES, "0")), ItemKey(last.ljust(KEY_NIBBLES, "f"))


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
