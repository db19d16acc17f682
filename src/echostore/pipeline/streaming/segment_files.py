"""What the root parties of a task came to, as the files of one segment of an overlay."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from echostore.pipeline.models import model_factory
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.item_rows import item_tables
from echostore.pipeline.output.overlay import KEPT, PLACED
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PLACEMENTS, PROPERTIES, table_kind
from echostore.pipeline.output.writing import STATE_ROWS, Place
from echostore.pipeline.schemas import ITEM_STATES, STATE_INDEX
from echostore.pipeline.stages.reduce import Outcome


class SegmentFiles:
    """Collects what the root parties of a task came to, and writes the tables of the segment."""

    def __init__(self, place: Place, number: int, turn: int, models: str | None) -> None:
        self._at, self._number, self._turn = place, number, turn
        self._factory = model_factory(models)
        self._files: dict[str, list[NamedFile]] = defaultdict(list)
        self._kept: list[dict[str, Any]] = []
        self._tables: dict[str, list[pa.RecordBatch]] = {name: [] for name in ("items", "properties", "links")}
        self._placements: list[pa.RecordBatch] = []
        self._placed: set[str] = set()

    def name(self, files: Mapping[str, Iterable[NamedFile]]) -> None:
        """Take in files that are written already."""
        for kind, named in files.items():
            self._files[kind] += named

    def place(self, party: bytes, rows: pa.RecordBatch | list[NamedFile]) -> None:
        """The placements of a party are told anew: rows, or files that have them."""
        self._placed.add(party.hex())
        if isinstance(rows, list):
            self.name({table_kind("placements"): rows})
        else:
            self._placements.append(rows)

    def add(self, outcome: Outcome) -> None:
        """The states that a reduction wrote, and the rows of their items."""
        self.name({kind: outcome.files.get(kind, ()) for kind in ("states", "state_index", "moves", "claims")})
        turns = {
            row["path"]: row["turn"]
            for file in outcome.files["state_index"]
            for row in read_table(self._at.out, file, STATE_INDEX, columns=["path", "turn"]).to_pylist()
        }
        last = {(bytes(party), bytes(item)): number for (party, item), number in outcome.again.rounds.items()}
        for file in outcome.files["states"]:
            states = read_table(self._at.out, file, ITEM_STATES)
            if last:
                # Items that were folded again: only what the last of their rounds wrote is shown.
                number = turns[file.path] - self._turn
                places = zip(states["party"].to_pylist(), states["item"].to_pylist(), strict=True)
                states = states.filter(pa.array([last.get(place, 0) <= number for place in places], pa.bool_()))
            for part in states.combine_chunks().to_batches(max_chunksize=STATE_ROWS):
                for name, rows in item_tables(part, self._number, self._factory).items():
                    self._tables[name].append(rows)

    def keep(self, row: dict[str, Any]) -> None:
        self._kept.append(row)

    def files(self) -> dict[str, list[NamedFile]]:
        """Write what is collected, and name everything."""
        placed = [{"party": party, "number": self._number} for party in sorted(self._placed)]
        rows = {
            "kept": (KEPT, [pa.RecordBatch.from_pylist(self._kept, KEPT)]),
            "placed": (PLACED, [pa.RecordBatch.from_pylist(placed, PLACED)]),
            table_kind("placements"): (PLACEMENTS, self._placements),
            table_kind("items"): (ITEMS, self._tables["items"]),
            table_kind("properties"): (PROPERTIES, self._tables["properties"]),
            table_kind("links"): (LINKS, self._tables["links"]),
        }
        for kind, (schema, batches) in rows.items():
            file = self._at.write(kind, schema, batches)
            self._files[kind] += [] if file is None else [file]
        return dict(self._files)
