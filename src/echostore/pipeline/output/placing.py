"""Where moved items hang now: the moves of each party replayed over the places that its items were created in.

Only parties with moves are looked at, each by one task: the tree is a rule over a whole party. Its moves are its state,
and the parents that items were created with are all that has to be known beside them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import ItemId
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.party_rows import placement_rows
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.table_schemas import PLACEMENTS
from echostore.pipeline.output.writing import named_rows
from echostore.pipeline.schemas import ITEM_STATES, MOVES
from echostore.pipeline.stages.by_party import parties, together
from echostore.pipeline.stages.frames import Rows, chosen, frame_of, gathered, mapped, repartitioned, united

_PARTS = pa.schema(
    [
        *(pa.field(field.name, field.type) for field in MOVES),
        pa.field("gone", pa.bool_()),
        pa.field("moved", pa.bool_(), nullable=False),
    ]
)
"""Moves, and below them heads of item states: the latter have a turn, a parent and `gone`."""


def placements(
    spark: Any,
    out: str,
    moves: Iterable[NamedFile],
    states: Mapping[NamedFile, int],
    wanted: frozenset[bytes],
    commit: int,
) -> Rows | None:
    """Rows of PLACEMENTS of the wanted parties. `states` are files of item states with their turns."""
    named = list(moves)
    if not named:
        return None
    frame = frame_of(spark, pa.Table.from_batches([named_rows({"moves": named})]))
    moved = mapped(repartitioned(frame, min(len(named), 64)), _Reading(out, tuple(sorted(wanted)), None), _PARTS)
    having = _moving_parties(moved)
    if not having:
        return None
    files = list(states)
    frame = frame_of(spark, pa.Table.from_batches([named_rows({"states": files})]))
    turns = {file.path: turn for file, turn in states.items()}
    heads = mapped(repartitioned(frame, min(len(files), 64)), _Reading(out, tuple(sorted(having)), turns), _PARTS)
    every = united(_of_parties(moved, having), heads)
    return mapped(together(every, min(len(having), 64)), _Placing(commit), PLACEMENTS)


def _moving_parties(moved: Rows) -> list[bytes]:
    """Parties of which a move stands, or did."""
    if isinstance(moved, pa.Table):
        found = moved.filter(pc.greater_equal(moved["kind"], 0))["party"].unique()
    else:
        found = gathered(chosen(moved.filter("kind >= 0"), ["party"]).distinct())["party"]
    return sorted(found.to_pylist())


def _of_parties(rows: Rows, parties: list[bytes]) -> Rows:
    if isinstance(rows, pa.Table):
        return rows.filter(pc.is_in(rows["party"], pa.array(parties, pa.binary())))
    return rows.filter(rows["party"].isin(*parties))


@dataclass(frozen=True)
class _Reading:
    """The task: moves or heads of states of some parties."""

    out: str
    wanted: tuple[bytes, ...]
    turns: Mapping[str, int] | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chosen = pc.field("party").isin(pa.array(self.wanted, pa.binary()))
        for batch in batches:
            for row in batch.to_pylist():
                file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
                if self.turns is None:
                    table = read_table(self.out, file, MOVES, filters=chosen)
                else:
                    columns = ["party", "item", "parent", "gone"]
                    table = read_table(self.out, file, ITEM_STATES, columns=columns, filters=chosen)
                    table = table.append_column("turn", pa.repeat(pa.scalar(self.turns[file.path]), len(table)))
                table = table.append_column("moved", pa.repeat(pa.scalar(self.turns is None), len(table)))
                for field in _PARTS:
                    if field.name not in table.column_names:
                        table = table.append_column(field.name, pa.nulls(len(table), field.type))
                yield from table.select(_PARTS.names).cast(_PARTS).to_batches()


@dataclass(frozen=True)
class _Placing:
    """The task: the trees of parties."""

    commit: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for party, rows in parties(batches):
            moves = rows.filter(rows["moved"]).to_pylist()
            taken_back: dict[bytes, int] = {}
            for move in moves:
                if move["kind"] < 0:
                    taken_back[move["item"]] = max(taken_back.get(move["item"], -1), move["turn"])
            standing = [move for move in moves if move["kind"] >= 0 and move["turn"] > taken_back.get(move["item"], -1)]
            yield placement_rows(party, standing, _first_parents(rows), self.commit)


def _first_parents(rows: pa.Table) -> dict[ItemId, ItemId]:
    heads = rows.filter(pc.invert(rows["moved"])).sort_by("turn")
    found: dict[ItemId, ItemId] = {}
    for item, parent, gone in zip(*(heads[name].to_pylist() for name in ("item", "parent", "gone")), strict=True):
        if gone or parent is None:
            found.pop(ItemId(item), None)
        else:
            found[ItemId(item)] = ItemId(parent)
    return found
