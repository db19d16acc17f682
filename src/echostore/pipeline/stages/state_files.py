"""Item states in files: found by bucket, read by row group, the latest of each item.

Each run writes only the items that changed, bucket by bucket, a row group each. The index (STATE_INDEX) says which row
groups hold a bucket. Where a bucket has too many, the snapshot stage writes it whole.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from echostore.pipeline.output.files import checked_path, read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import ITEM_STATES, PARCELS, STATE_INDEX

FILE_BYTES = 64 << 20
"""States that a task keeps before it writes them as one file."""


def read_index(out: str, rows: list[dict[str, Any]]) -> pa.Table:
    """The rows of files of STATE_INDEX, given as rows of NAMED."""
    tables = [
        read_table(out, NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"]), STATE_INDEX) for row in rows
    ]
    return pa.concat_tables(tables) if tables else STATE_INDEX.empty_table()


def index_parcels(index: pa.Table, nibbles: Mapping[bytes, int]) -> list[dict[str, Any]]:
    """The index as parcels for the buckets of this run, which may be larger or smaller than those that were written."""
    parcels = []
    for row in index.to_pylist():
        depth = nibbles.get(row["party"])
        if depth is None:
            continue
        note = json.dumps({"state": {name: row[name] for name in _PLACE}})
        for bucket in spread(row["bucket"], depth):
            parcels.append({"party": row["party"], "bucket": bucket, "rows": 0, "note": note})
    return parcels


_PLACE = ("bucket", "turn", "whole", "path", "sha256", "bytes", "group", "rows")


def spread(bucket: str, nibbles: int) -> list[str]:
    """The buckets of `nibbles` digits that hold items of this one."""
    if len(bucket) >= nibbles:
        return [bucket[:nibbles]]
    missing = nibbles - len(bucket)
    return [f"{bucket}{number:0{missing}x}" for number in range(16**missing)]


def states_noted(notes: Iterable[str]) -> list[dict[str, Any]]:
    """The places that parcels of an index name, without those that a whole one makes needless."""
    places = [told["state"] for note in notes if "state" in (told := json.loads(note))]
    whole: dict[str, int] = {}
    for place in places:
        if place["whole"]:
            whole[place["bucket"]] = max(whole.get(place["bucket"], -1), place["turn"])
    return [place for place in places if place["turn"] >= whole.get(place["bucket"], -1)]


def read_states(
    out: str, places: list[dict[str, Any]], buckets: Mapping[bytes, set[str]], columns: list[str] | None = None
) -> tuple[pa.Table, np.ndarray[Any, Any]]:
    """The latest state of each item of these buckets, and the turn of each."""
    files: dict[str, tuple[NamedFile, int, set[int]]] = {}
    for place in places:
        file = NamedFile(place["path"], place["sha256"], place["bytes"], place["rows"])
        files.setdefault(place["path"], (file, place["turn"], set()))[2].add(place["group"])
    names = columns or ITEM_STATES.names
    tables, turns = [], []
    for file, turn, groups in files.values():
        table = pq.ParquetFile(checked_path(out, file)).read_row_groups(sorted(groups), columns=names)
        tables.append(table.select(names))
        turns.append(np.full(table.num_rows, turn, dtype=np.int64))
    if not tables:
        return pa.schema([ITEM_STATES.field(name) for name in names]).empty_table(), np.zeros(0, dtype=np.int64)
    table, turn_column = pa.concat_tables(tables), np.concatenate(turns)
    frame = pl.DataFrame(
        {
            "party": pl.from_arrow(table.column("party")),
            "key": pl.from_arrow(table.column("item_key")),
            "turn": turn_column,
            "row": np.arange(table.num_rows),
        }
    )
    nibbles = len(next(iter(next(iter(buckets.values())))))
    wanted = pl.DataFrame(
        [(party, bucket) for party, each in buckets.items() for bucket in each],
        schema={"party": pl.Binary, "bucket": pl.String},
        orient="row",
    )
    frame = frame.with_columns(bucket=pl.col("key").bin.encode("hex").str.head(nibbles))
    frame = frame.join(wanted, on=["party", "bucket"], how="semi").sort("turn")
    frame = frame.unique(subset=["party", "key"], keep="last").sort("party", "key")
    rows = frame["row"].to_numpy()
    return table.take(pa.array(rows)), turn_column[rows]


@dataclass(slots=True)
class StateWriter:
    """Writes states bucket by bucket, and the index of what it wrote."""

    place: Place
    turn: int

    def write(self, parts: list[tuple[bytes, str, pa.Table]], *, whole: bool = False) -> dict[str, list[NamedFile]]:
        """Files of the kinds `states` and `state_index`. Parts are (party, bucket, states)."""
        files: dict[str, list[NamedFile]] = defaultdict(list)
        held: list[tuple[bytes, str, pa.Table]] = []
        size = 0
        for part in parts:
            held.append(part)
            size += part[2].nbytes
            if size >= FILE_BYTES:
                self._file(held, whole, files)
                held, size = [], 0
        if held:
            self._file(held, whole, files)
        return files

    def _file(self, parts: list[tuple[bytes, str, pa.Table]], whole: bool, files: dict[str, list[NamedFile]]) -> None:
        batches = [table.combine_chunks().to_batches() for _, _, table in parts]
        assert all(len(each) == 1 for each in batches), [len(each) for each in batches]
        file = self.place.write("states", ITEM_STATES, (each[0] for each in batches))
        if file is None:
            return
        files["states"].append(file)
        index = [
            {
                "party": party,
                "bucket": bucket,
                "turn": self.turn,
                "whole": whole,
                "path": file.path,
                "sha256": file.sha256,
                "bytes": file.bytes,
                "group": group,
                "rows": file.rows,
            }
            for group, (party, bucket, _) in enumerate(parts)
        ]
        written = self.place.write("state_index", STATE_INDEX, [pa.RecordBatch.from_pylist(index, STATE_INDEX)])
        assert written is not None
        files["state_index"].append(written)


def by_bucket(states: pa.Table, nibbles: Mapping[bytes, int]) -> Iterator[tuple[bytes, str, pa.Table]]:
    """States that ascend by party and key, cut into buckets."""
    parties = states.column("party").to_pylist()
    keys = states.column("item_key").to_pylist()
    places = [(party, key.hex()[: nibbles[party]]) for party, key in zip(parties, keys, strict=True)]
    start = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[start]:
            yield (*places[start], states.slice(start, at - start))
            start = at


def parcels_table(parcels: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(parcels, PARCELS)
