"""Placements of a step: where the items of a party hang, told anew where something moved. The tree is not cut into buckets."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import ItemId
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.party_rows import placement_rows
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.table_schemas import PLACEMENTS, table_kind
from echostore.pipeline.output.writing import Place, named_rows
from echostore.pipeline.schemas import ITEM_STATES, MOVES, STATE_INDEX
from echostore.pipeline.stages.reduce import Outcome

PLACED_PARTIES = pa.schema([pa.field("party", pa.binary(), nullable=False)])


def moved_parties(out: str, outcome: Outcome) -> set[bytes]:
    """Parties in which an item moved, or was folded again."""
    tables = [read_table(out, file, MOVES, columns=["party"]) for file in outcome.files.get("moves", ())]
    moved = {party for table in tables for party in table["party"].unique().to_pylist()}
    return moved | {bytes(party) for party, _ in outcome.again.rounds}


@dataclass(frozen=True)
class Placing:
    """The task: parties into files of placements, named by party. `files` are all moves and indexes of states that count now."""

    place: Place
    number: int
    files: Mapping[str, tuple[NamedFile, ...]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = self.of(party for batch in batches for party in batch["party"].to_pylist())
        for party, rows in found:
            file = self.place.write(table_kind("placements"), PLACEMENTS, [rows])
            yield named_rows({party.hex(): [] if file is None else [file]})

    def of(self, parties: Iterable[bytes]) -> Iterator[tuple[bytes, pa.RecordBatch]]:
        """The parties with moves, each with its rows."""
        for party in parties:
            chosen = pc.field("party") == pa.scalar(party, pa.binary())
            tables = [read_table(self.place.out, file, MOVES, filters=chosen) for file in self.files["moves"]]
            moves = [row for table in tables for row in table.to_pylist()]
            if moves:
                yield party, placement_rows(party, _standing(moves), self._first_parents(party), self.number)

    def _first_parents(self, party: bytes) -> dict[ItemId, ItemId]:
        """The parents that the items of a party were created with: all states of it are looked at."""
        chosen = pc.field("party") == pa.scalar(party, pa.binary())
        files: dict[str, tuple[int, NamedFile]] = {}
        for index in self.files["state_index"]:
            for row in read_table(self.place.out, index, STATE_INDEX, filters=chosen).to_pylist():
                files[row["path"]] = row["turn"], NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
        parents: dict[ItemId, ItemId] = {}
        columns = ["item", "parent", "gone"]
        for _, file in sorted(files.values(), key=lambda each: each[0]):
            table = read_table(self.place.out, file, ITEM_STATES, columns=columns, filters=chosen)
            for item, parent, gone in zip(*(table[name].to_pylist() for name in columns), strict=True):
                if gone or parent is None:
                    parents.pop(item, None)
                else:
                    parents[item] = parent
        return parents


def _standing(moves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves without those that were taken back."""
    taken_back: dict[bytes, int] = {}
    for move in moves:
        if move["kind"] < 0:
            taken_back[move["item"]] = max(taken_back.get(move["item"], -1), move["turn"])
    return [move for move in moves if move["kind"] >= 0 and move["turn"] > taken_back.get(move["item"], -1)]
