"""Which placements came and went: out of item states before and after. PLACE_CHANGES out, no Spark.

The placements of an item follow from its row alone (`kernel.snapshot.placements_of`: parent and inception key), so that
what only changes values says nothing here. An item that is folded again in a later round of the same run says all of its
placements again, and what earlier rounds said of it is void:

    round 1   a is new below p        p a
    round 2   a has no genesis        (nothing)        what round 1 said counts as gone
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import polars as pl
import pyarrow as pa

from echostore.kernel.ids import ITEM_ID_BYTES, ItemId
from echostore.kernel.snapshot import PLACE_NIBBLES, Placement, placements_of
from echostore.pipeline.schemas import PLACE_CHANGES
from echostore.pipeline.stages.operation_columns import rows_table

PLACE_COLUMNS = ["party", "item_key", "item", "gone", "parent", "inception"]
"""What of ITEM_STATES has to be known."""

_PLACE_BYTES = PLACE_NIBBLES // 2
_ROW = ["party", "item_key"]


def raw_key(placement: bytes) -> bytes:
    """`kernel.snapshot.placement_key` as 32 bytes."""
    return _place_start(placement[:ITEM_ID_BYTES]) + sha256(placement).digest()[:-_PLACE_BYTES]


def _place_start(place: bytes) -> bytes:
    return sha256(place).digest()[:_PLACE_BYTES]


def place_changes(
    states: pa.Table, previous: pa.Table, nibbles: Mapping[bytes, int], turn: int, *, every: bool = False
) -> pa.Table:
    """PLACE_CHANGES of states that were written now over those before; of items that stand where they stood only with
    `every`. `nibbles` tells by how many of them the placements of a party are spread."""
    rows: list[tuple[Any, ...]] = []
    starts: dict[bytes, bytes] = {}
    for party, item, parent, inception, parent_before, inception_before in _differing(states, previous, every):
        now = _placements(item, parent, inception)
        for placement in {*now, *_placements(item, parent_before, inception_before)}:
            place = placement[:ITEM_ID_BYTES]
            start = starts.get(place)
            if start is None:
                start = starts[place] = _place_start(place)
            key = start + sha256(placement).digest()[:-_PLACE_BYTES]
            rows.append((party, key.hex()[: nibbles[party]], turn, key, placement, placement not in now))
    return rows_table(rows, PLACE_CHANGES)


def _placements(item: bytes, parent: bytes | None, inception: bytes | None) -> tuple[Placement, ...]:
    return placements_of(ItemId(item), None if parent is None else ItemId(parent), inception or b"")


def _differing(states: pa.Table, previous: pa.Table, every: bool) -> Iterable[tuple[Any, ...]]:
    """Party, item, and what its placements follow from, now and before; of what exists not, nothing does."""
    now = _frame(states)
    before = _frame(previous).join(now, on=_ROW, how="semi").drop("item")
    both = now.join(before, on=_ROW, how="left", suffix="_before")
    if every:
        wanted = pl.any_horizontal(pl.col(name).is_not_null() for name in _SAID)
    else:
        wanted = pl.any_horizontal(
            pl.col(name).ne_missing(pl.col(f"{name}_before")) for name in ("parent", "inception")
        )
    return both.filter(wanted).select("party", "item", *_SAID).iter_rows()


_SAID = ("parent", "inception", "parent_before", "inception_before")


def _frame(states: pa.Table) -> pl.DataFrame:
    found = pl.from_arrow(states.select(PLACE_COLUMNS))
    assert isinstance(found, pl.DataFrame)
    there = (pl.when(~pl.col("gone")).then(pl.col(name)).alias(name) for name in ("parent", "inception"))
    return found.with_columns(there).drop("gone")


def without_void(changes: pa.Table, first: int, again: pa.Table | None) -> pa.Table:
    """Changes of the rounds of one run, which began at the turn `first`: what was said of items before the round in
    which they were folded last counts as gone. `again` are rows of AGAIN; what came before all rounds stands."""
    if again is None or not changes.num_rows:
        return changes
    rows = pl.DataFrame(
        {
            "party": pl.from_arrow(changes["party"]),
            "item": pl.Series(
                [placement[ITEM_ID_BYTES:] for placement in changes["placement"].to_pylist()], dtype=pl.Binary
            ),
            "round": pl.from_arrow(changes["turn"]),
            "gone": pl.from_arrow(changes["gone"]),
        }
    )
    last = pl.from_arrow(again)
    assert isinstance(last, pl.DataFrame)
    rows = rows.with_columns(pl.col("round") - first).join(
        last, on=["party", "item"], how="left", maintain_order="left"
    )
    void = (pl.col("round") > 0) & (pl.col("round") < pl.col("last").fill_null(0))
    gone = rows.select(pl.col("gone") | void).to_series()
    at = changes.schema.get_field_index("gone")
    return changes.set_column(at, PLACE_CHANGES.field("gone"), gone.to_arrow().cast(pa.bool_()))


AGAIN = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        pa.field("last", pa.int64(), nullable=False),
    ]
)
"""Items that were folded again, and the last round in which they were."""
