"""Moves as rows: what of them counts after several runs."""

from collections.abc import Iterable

from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.items.tree import TreeMove
from echostore.pipeline.stages.parcels import unpacked


def party_moves(parts: Iterable[bytes]) -> list[TreeMove]:
    """The moves of a party in canonical order, out of packed rows of MOVES."""
    rows = [row for part in parts for row in unpacked(part).to_pylist()]
    taken_back: dict[bytes, int] = {}
    for row in rows:
        if row["kind"] < 0:
            taken_back[row["item"]] = max(taken_back.get(row["item"], -1), row["turn"])
    return sorted(
        TreeMove(
            Stamp(row["depth"], FeedId(row["feed"]), row["seq"], row["position"]),
            ItemId(row["item"]),
            row["kind"],
            None if row["parent"] is None else ItemId(row["parent"]),
        )
        for row in rows
        if row["kind"] >= 0 and row["turn"] > taken_back.get(row["item"], -1)
    )
