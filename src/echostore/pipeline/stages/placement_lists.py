"""The placements of one bucket: a list of 32 bytes each, ascending by key, and the subtree over it. No Spark.

    rows of PLACE_LISTS since the last whole one ──► the list ─┐
    PLACE_CHANGES ─────────────────────────────────────────────┴► the list now, the subtree, one more row

A list is one array of bytes, and keys are computed where they are looked at: one change in a million placements costs
some twenty of them and a copy of the array. Only when much of a bucket is new are all keys computed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import PLACEMENT_BYTES, ItemKey, Placement, TreeTop, key_bounds
from echostore.pipeline.stages.placement_changes import raw_key
from echostore.wire.placements import PLACEMENTS, update_placements_below
from echostore.wire.snapshot import Put
from echostore.wire.tree import Entries, NodeMap, grow

Array = np.ndarray[Any, Any]
"""Of bytes, one row for each placement or key."""

CHANGE = np.dtype([("key", "u1", 32), ("placement", "u1", PLACEMENT_BYTES), ("turn", "<i8"), ("gone", "?")])
"""A row of PLACE_CHANGES on its way to its bucket."""

ANEW_SHARE = 5
"""When more than one placement in so many has changed, the subtree is grown as a whole."""


def array_of(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8).reshape(-1, PLACEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class PlacementList:
    """Placements ascending by key."""

    rows: Array

    @staticmethod
    def of(parts: Iterable[tuple[bytes, bytes]]) -> "PlacementList":
        """Of pairs of what came and what went, the first being a whole list."""
        (whole, _), *more = parts
        found = PlacementList(array_of(whole))
        for added, gone in more:
            found = found._patched(array_of(added), array_of(gone))
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def placement(self, at: int) -> Placement:
        return Placement(self.rows[at].tobytes())

    def placements(self, start: int = 0, end: int | None = None) -> list[Placement]:
        return split(self.rows[start:end])

    def below(self, path: str) -> "PlacementList":
        start, end = self._bounds(path)
        return PlacementList(self.rows[start:end])

    def under(self, path: str) -> list[Placement]:
        return self.placements(*self._bounds(path))

    def _bounds(self, path: str) -> tuple[int, int]:
        first, last = (bytes.fromhex(key) for key in key_bounds(path))
        start = self._find(first)
        return start, bisect_right(range(len(self)), last, start, key=self._key)

    def _find(self, key: bytes) -> int:
        return bisect_left(range(len(self)), key, key=self._key)

    def _key(self, at: int) -> bytes:
        return raw_key(self.placement(at))

    def _patched(self, added: Array, gone: Array) -> "PlacementList":
        """Without those that went, all of which are there, and with those that came, none of which is."""
        away = np.array([self._find(raw_key(each)) for each in split(gone)], np.int64)
        places = np.array([self._find(raw_key(each)) for each in split(added)], np.int64)
        kept = np.delete(self.rows, away, axis=0)
        return PlacementList(np.insert(kept, places - np.searchsorted(away, places), added, axis=0))

    def changed(self, changes: Array) -> "Changed":
        """The list after changes (CHANGE) in any order."""
        latest = _latest(changes)
        if len(latest) * ANEW_SHARE < len(self):
            return self._patch(latest)
        every = np.zeros(len(self) + len(latest), CHANGE)
        size = len(self)
        every["placement"][:size], every["placement"][size:] = self.rows, latest["placement"]
        every["key"][:size] = _raw_keys(self.placements())
        every["key"][size:], every["gone"][size:], every["turn"][size:] = latest["key"], latest["gone"], 1
        order = _order(every)
        every = every[order]
        # Of two with one key the second is the change, which counts.
        twice = _same_as_next(every["key"])
        second = np.concatenate(([False], twice[:-1])) if len(twice) else twice
        stays = ~twice & ~every["gone"]
        fresh = every["turn"] == 1
        added, gone = every[fresh & ~second & stays], every[fresh & second & every["gone"]]
        now = every[stays]
        keys = [ItemKey(key) for key in split_hex(now["key"])]
        return Changed(PlacementList(now["placement"]), added["placement"], gone["placement"], keys)

    def _patch(self, latest: Array) -> "Changed":
        came, went = [], []
        for at, change in enumerate(latest):
            place = self._find(change["key"].tobytes())
            there = place < len(self) and self.rows[place].tobytes() == change["placement"].tobytes()
            if there and change["gone"]:
                went.append(at)
            elif not there and not change["gone"]:
                came.append(at)
        added, gone = latest["placement"][came], latest["placement"][went]
        return Changed(self._patched(added, gone), added, gone, None)


@dataclass(frozen=True, slots=True)
class Changed:
    """A list after changes, and what they amounted to. `keys`: those of the list, where they were computed."""

    now: PlacementList
    added: Array
    gone: Array
    keys: list[ItemKey] | None

    def __bool__(self) -> bool:
        return bool(len(self.added) or len(self.gone))

    def subtree(self, bucket: str, nodes: NodeMap | None, put: Put) -> tuple[TreeTop, NodeMap]:
        """The subtree over the list, which is more than a page; `nodes` are those before the changes."""
        if nodes is None or self.keys is not None:
            return self._grown(bucket, nodes, put)
        dirty = [*split(self.added), *split(self.gone)]
        top = update_placements_below(nodes, dirty, self.now.under, put, path=bucket)
        assert top is not None, bucket
        return top, nodes

    def _grown(self, bucket: str, nodes: NodeMap | None, put: Put) -> tuple[TreeTop, NodeMap]:
        """All nodes anew, and the blobs of those that were not there."""
        known = set() if nodes is None else {top.cid for top in nodes.nodes.values()}

        def put_new(cid: Cid, blob: bytes) -> None:
            if cid not in known:
                put(cid, blob)

        placements = self.now.placements()
        keys = self.keys or [ItemKey(raw_key(each).hex()) for each in placements]
        cache = NodeMap()
        entries = Entries(PLACEMENTS, keys, placements, [PLACEMENT_BYTES] * len(placements))
        return grow(entries, put_new, cache=cache, path=bucket), cache


def split(rows: Array) -> list[Placement]:
    data = rows.tobytes()
    return [Placement(data[at : at + PLACEMENT_BYTES]) for at in range(0, len(data), PLACEMENT_BYTES)]


def split_hex(keys: Array) -> list[str]:
    text = keys.tobytes().hex()
    return [text[at : at + 64] for at in range(0, len(text), 64)]


def _raw_keys(placements: list[Placement]) -> Array:
    return np.frombuffer(b"".join(map(raw_key, placements)), np.uint8).reshape(-1, 32)


def _latest(changes: Array) -> Array:
    """Of each placement the last that was said, ascending by key."""
    ordered = changes[_order(changes)]
    return ordered[~_same_as_next(ordered["key"])]


def _order(rows: Array) -> Array:
    """By key, then by turn."""
    parts = np.ascontiguousarray(rows["key"]).view(">u8").reshape(-1, 4)
    return np.lexsort((rows["turn"], *(parts[:, at] for at in (3, 2, 1, 0))))


def _same_as_next(keys: Array) -> Array:
    """Whether the key of the next row is the same; of sorted rows."""
    same = np.zeros(len(keys), bool)
    if len(keys) > 1:
        same[:-1] = (keys[1:] == keys[:-1]).all(axis=1)
    return same
