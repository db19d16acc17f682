"""Item states in files: found by bucket, read by row group, the latest of each item.

Each run writes only the items that changed, bucket by bucket; small buckets share a row group, since each group costs
some milliseconds to write. The index (STATE_INDEX) says which row groups hold a bucket. Where a bucket has too many, the
snapshot stage writes it whole.
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
GROUP_ROWS, GROUP_BYTES = 4096, 1 << 20
"""Neighbouring buckets share a row group up to this size: little enough to be read for the sake of one item."""


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
        note = json.dumps({"state": {"party": row["party"].hex(), **{name: row[name] for name in _PLACE}}})
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
    whole: dict[tuple[str, str], int] = {}
    for place in places:
        if place["whole"]:
            bucket = (place["party"], place["bucket"])
            whole[bucket] = max(whole.get(bucket, -1), place["turn"])
    return [place for place in places if place["turn"] >= whole.get((place["party"], place["bucket"]), -1)]


def read_states(
    out: str, places: list[dict[str, Any]], buckets: Mapping[bytes, set[str]], columns: list[str] | None = None
) -> tuple[pa.Table, np.ndarray[Any, Any]]:
    """The latest state of each item of these buckets, and the turn of each."""
    files: dict[str, tuple[NamedFile, int, set[int]]] = {}
    for place in places:
        file = NamedFile(place["path"], place["sha256"], place["bytes"], place["rows"])
        files.setdefault(place["path"], (file, place["turn"], set()))[2].add(place["group"])
    names = columns or ITEM_STATES.names
    tables, turns, numbers = [], [], []
    for number, (file, turn, groups) in enumerate(files.values()):
        table = pq.ParquetFile(checked_path(out, file)).read_row_groups(sorted(groups), columns=names)
        tables.append(table.select(names))
        turns.append(np.full(table.num_rows, turn, dtype=np.int64))
        numbers.append(np.full(table.num_rows, number, dtype=np.int64))
    if not tables:
        return pa.schema([ITEM_STATES.field(name) for name in names]).empty_table(), np.zeros(0, dtype=np.int64)
    table, turn_column = pa.concat_tables(tables), np.concatenate(turns)
    frame = pl.DataFrame(
        {
            "party": pl.from_arrow(table.column("party")),
            "key": pl.from_arrow(table.column("item_key")),
            "turn": turn_column,
            "file": np.concatenate(numbers),
            "row": np.arange(table.num_rows),
        }
    )
    rows = _latest(frame, places, list(files), buckets)
    if len(rows) == table.num_rows and bool(np.all(rows[1:] > rows[:-1])):
        return table.combine_chunks(), turn_column  # all of them, as they lie
    return table.combine_chunks().take(pa.array(rows)), turn_column[rows]


def _latest(
    frame: pl.DataFrame, places: list[dict[str, Any]], paths: list[str], buckets: Mapping[bytes, set[str]]
) -> np.ndarray[Any, Any]:
    """The rows that count. A row group has rows of other buckets too; they count where their own bucket is named."""
    nibbles = len(next(iter(next(iter(buckets.values())))))
    wanted = pl.DataFrame(
        [(party, bucket) for party, each in buckets.items() for bucket in each],
        schema={"party": pl.Binary, "bucket": pl.String},
        orient="row",
    )
    number = {path: at for at, path in enumerate(paths)}
    named = pl.DataFrame(
        list({(number[place["path"]], bytes.fromhex(place["party"]), place["bucket"]) for place in places}),
        schema={"file": pl.Int64, "party": pl.Binary, "written": pl.String},
        orient="row",
    )
    frame = frame.with_columns(text=pl.col("key").bin.encode("hex"))
    frame = frame.with_columns(bucket=pl.col("text").str.head(nibbles)).join(wanted, on=["party", "bucket"], how="semi")
    # One file has one cut of a party's keys.
    depths = named.select("file", "party", depth=pl.col("written").str.len_bytes()).unique()
    if depths["depth"].n_unique() == 1:
        cut = frame.with_columns(written=pl.col("text").str.head(int(depths["depth"][0])))
    else:
        cut = frame.join(depths, on=["file", "party"]).with_columns(written=pl.col("text").str.head(pl.col("depth")))
    counting = cut.join(named, on=["file", "party", "written"], how="semi").sort("turn")
    return counting.unique(subset=["party", "key"], keep="last").sort("party", "key")["row"].to_numpy()


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
        grouped = list(_groups(parts))
        batches = [pa.concat_tables(table for _, _, table in group).combine_chunks().to_batches() for group in grouped]
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
                "group": number,
                "rows": file.rows,
            }
            for number, group in enumerate(grouped)
            for party, bucket, _ in group
        ]
        written = self.place.write("state_index", STATE_INDEX, [pa.RecordBatch.from_pylist(index, STATE_INDEX)])
        assert written is not None
        files["state_index"].append(written)


def _groups(parts: list[tuple[bytes, str, pa.Table]]) -> Iterator[list[tuple[bytes, str, pa.Table]]]:
    """Parts that share a row group: some small ones, or a large one."""
    held: list[tuple[bytes, str, pa.Table]] = []
    rows = size = 0
    for part in parts:
        more, bytes_more = part[2].num_rows, part[2].nbytes
        if held and (rows + more > GROUP_ROWS or size + bytes_more > GROUP_BYTES):
            yield held
            held, rows, size = [], 0, 0
        held.append(part)
        rows, size = rows + more, size + bytes_more
    if held:
        yield held


def by_bucket(states: pa.Table, nibbles: Mapping[bytes, int]) -> Iterator[tuple[bytes, str, pa.Table]]:
    """States that ascend by party and key, cut into buckets."""
    frame = pl.DataFrame(
        {"party": pl.from_arrow(states.column("party")), "key": pl.from_arrow(states.column("item_key"))}
    )
    depths = set(nibbles.values())
    text = pl.col("key").bin.encode("hex")
    if len(depths) == 1:
        frame = frame.select("party", bucket=text.str.head(depths.pop()))
    else:
        cut = pl.DataFrame(list(nibbles.items()), schema={"party": pl.Binary, "depth": pl.Int64}, orient="row")
        frame = frame.join(cut, on="party", how="left", maintain_order="left")
        frame = frame.select("party", bucket=text.str.head(pl.col("depth")))
    if frame.is_empty():
        return
    changed = (frame["party"] != frame["party"].shift()) | (frame["bucket"] != frame["bucket"].shift())
    starts = [0, *np.flatnonzero(changed.fill_null(False).to_numpy()).tolist()]
    for start, end in zip(starts, [*starts[1:], len(frame)], strict=True):
        party, bucket = frame.row(start)
        yield party, bucket, states.slice(start, end - start)


def parcels_table(parcels: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(parcels, PARCELS)
