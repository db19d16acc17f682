"""The blobs of a snapshot tree above items that changed, read for many items at once.

    top   3   3f   3fm        one look into the blobs for each level, not one for each node: an update that touches a
          7   72   72n        hundred pages asks four times and not three hundred times
              7c   7c0

Items are taken in the order of their keys, so many of them at a time, which bounds what is in memory. A node that lies
elsewhere, was left out or is lost is asked for by itself: reading ahead changes what a look costs, never what it says.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import COVERING, ItemKey, Path, TreeTop, key_bounds
from echostore.wire.tree_nodes import index_branches

GetSome = Callable[[list[Cid], int], dict[Cid, bytes]]
"""Of some blobs those that are here and sound, until they have so many bytes together: `BlobStore.get_some`."""

AHEAD_ITEMS: Final = 512
"""Changed items whose nodes are read together."""
AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Of each level at most this: twice what the pages of so many items have."""

_Branches = list[tuple[str, TreeTop]]


class NodesAhead:
    """Reads nodes of the tree with the top `top`, of which the items with `keys`, ascending, are going to change."""

    def __init__(self, get_some: GetSome, top: Cid, keys: Sequence[ItemKey]) -> None:
        self._get_some = get_some
        self._top = top
        self._keys = keys
        self._end = 0
        """The keys before this one were read for."""
        self._pages: dict[Cid, bytes] = {}
        self._branches: dict[Cid, _Branches] = {}

    def page(self, path: Path, cid: Cid) -> bytes | None:
        """The blob of the page at a path; None where it is lost or damaged."""
        self._look(path, cid)
        return self._pages.get(cid)

    def branches(self, path: Path, cid: Cid) -> _Branches:
        """Those of the index node at a path; none where it is lost or damaged."""
        self._look(path, cid)
        return self._branches.get(cid, [])

    def _look(self, path: Path, cid: Cid) -> None:
        """Have the blob of a node, if it is here at all."""
        if cid in self._pages or cid in self._branches:
            return
        first, last = key_bounds(path)
        start = bisect_left(self._keys, first)
        if self._end <= start < len(self._keys) and self._keys[start] <= last:
            self._read_from(start)
        if cid not in self._pages and cid not in self._branches:
            self._read([cid])

    def _read_from(self, start: int) -> None:
        """The nodes above the keys from `start` on, from the top down; those of earlier keys are let go."""
        keys = list(self._keys[start : start + AHEAD_ITEMS])
        self._end = start + len(keys)
        self._pages.clear()
        self._branches.clear()
        depth, level = 0, {self._top: keys}
        while level:
            self._read(list(level))
            below: dict[Cid, list[ItemKey]] = {}
            for cid, some in level.items():
                below.update(_ways(self._branches.get(cid, []), some, depth))
            depth, level = depth + 1, below

    def _read(self, cids: list[Cid]) -> None:
        for cid, data in self._get_some(cids, AHEAD_BYTES).items():
            branches = index_branches(data)
            if branches:
                self._branches[cid] = branches
            else:
                self._pages[cid] = data


def _ways(branches: _Branches, keys: Sequence[ItemKey], depth: int) -> dict[Cid, list[ItemKey]]:
    """The branches of a node at `depth` that some keys lie below, each with these."""
    tops = dict(branches)
    found: dict[Cid, list[ItemKey]] = {}
    for key in keys:
        for label in COVERING[key[depth]]:
            if label in tops:
                found.setdefault(tops[label].cid, []).append(key)
    return found
