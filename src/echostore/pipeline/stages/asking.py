"""Who exists: items name parents in other buckets, and what has no parent does not exist.

An item exists if its genesis counts and its parent exists, or it has none. Buckets are reduced as if every parent did.
With each creation and placement goes a question to the parent's bucket, in the same shuffle. Almost always the answer
is yes to all, and nothing more happens. Otherwise the edges of that party are closed over:

    absent   a parent that nobody created                        a ── b ── c    a is absent: b and c are void
    doubt    a parent that sorts above its child: an honest      d ── e ── d    a circle: neither exists
             writer can't name one, and it may close a circle

(`doubt` also marks what an earlier reject lacked and has come, and items of blocks whose standing changed.)

and the items concerned are folded again, knowing which parents are absent.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from echostore.kernel.ids import ARC_BIT, ItemId, PartyKey
from echostore.pipeline.schemas import EDGES
from echostore.pipeline.stages.operation_columns import CREATED, LACKED, RIVAL, TOUCHED
from echostore.pipeline.stages.property_columns import ITEM, item_ids


def answer(parties: list[PartyKey], asked: pl.DataFrame, before: pl.DataFrame, after: pl.DataFrame) -> pa.Table:
    """The asked edges (EDGES) with what is known of their parents. `before` and `after` are items that exist, with their
    genesis's depth."""
    if asked.is_empty():
        return EDGES.empty_table()
    existing = pl.concat([before.select(*ITEM, "genesis_depth"), after.select(*ITEM, "genesis_depth")])
    existing = existing.unique(subset=ITEM, keep="last")
    met = asked.join(existing, on=ITEM, how="left", maintain_order="left")
    known = met["genesis_depth"].is_not_null().to_numpy()
    # The parent's own place in the canonical order, from its id; a granted number says nothing of it.
    parent = (
        met["genesis_depth"].fill_null(0).cast(pl.UInt64).to_numpy(),
        met["creator"].to_numpy(),
        met["local"].to_numpy(),
    )
    child = (met["depth"].to_numpy(), met["feed"].to_numpy(), met["place"].to_numpy())
    below = _below(parent, child) & (parent[2] & np.uint64(ARC_BIT) == 0)
    why = met["why"].to_numpy()
    rival, touched = why == RIVAL, why == TOUCHED
    parents: list[bytes | None] = list(item_ids(parent[1], parent[2]))
    for at in np.flatnonzero(rival).tolist():
        parents[at] = None
    return pa.table(
        [
            pa.array([parties[code] for code in met["party"].to_list()], pa.binary()),
            pa.array(item_ids(met["child_creator"].to_numpy(), met["child_local"].to_numpy()), pa.binary()),
            pa.array(parents, pa.binary()),
            pa.array(why),
            pa.array(~known & ~rival & ~touched),
            pa.array((known & ~below & (why == CREATED)) | (known & (why == LACKED)) | touched),
        ],
        schema=EDGES,
    )


def _below(low: tuple[np.ndarray, ...], high: tuple[np.ndarray, ...]) -> np.ndarray:
    result = np.zeros(len(low[0]), dtype=bool)
    for mine, other in reversed(list(zip(low, high, strict=True))):
        result = (mine < other) | ((mine == other) & result)
    return result


@dataclass(frozen=True, slots=True)
class Existence:
    """What a party's edges amount to: items that are absent, and those that name one of them."""

    absent: frozenset[ItemId]
    naming: frozenset[ItemId]


Edge = tuple[ItemId, ItemId | None, int, bool]
"""Item, parent, why, absent."""


def close_edges(edges: Iterable[Edge]) -> Existence:
    """Close the edges of one party over what is absent: exact, whatever circles they hold. An item with an edge of its
    own exists if that leads to one that exists; of any other parent `absent` is believed."""
    absent: set[ItemId] = set()
    below: dict[ItemId, list[ItemId]] = defaultdict(list)
    created: set[ItemId] = set()
    roots: set[ItemId] = set()
    named: list[tuple[ItemId, ItemId]] = []
    for item, parent, why, is_absent in edges:
        if why == RIVAL:
            roots.add(item)
            continue
        assert parent is not None
        named.append((item, parent))
        if is_absent:
            absent.add(parent)
        if why == CREATED:
            below[parent].append(item)
            created.add(item)
    absent -= created | roots
    # Down from what exists by itself. What is not reached is void.
    front = [parent for parent in below if parent not in created and parent not in absent] + list(roots)
    reached = set(front)
    while front:
        for item in below.get(front.pop(), ()):
            if item not in reached:
                reached.add(item)
                front.append(item)
    absent |= created - reached
    return Existence(frozenset(absent), frozenset(item for item, parent in named if parent in absent))


def close_lacking(lacking: Iterable[tuple[ItemId, ItemId]], found: Iterable[ItemId]) -> frozenset[ItemId]:
    """Items to be folded again since what they lacked has come: (item, what it lacked), and so on down."""
    waiting: dict[ItemId, list[ItemId]] = defaultdict(list)
    for item, missing in lacking:
        waiting[missing].append(item)
    again: set[ItemId] = set()
    front = list(found)
    while front:
        for item in waiting.pop(front.pop(), ()):
            again.add(item)
            front.append(item)
    return frozenset(again)
