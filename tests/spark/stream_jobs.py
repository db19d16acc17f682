"""What the tests of streams share: tasks run where they are called, steps of a stream, and what an output holds."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.overlay import freshest
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.schemas import ITEM_STATES, MOVES, STATE_INDEX
from echostore.pipeline.stages.move_rows import party_moves
from echostore.pipeline.stages.parcels import packed
from echostore.pipeline.streaming.following import Follower, Timeframe, changed_parties
from echostore.pipeline.streaming.overlaying import Folded, Overlaying


class HereJobs:
    """Runs tasks in this process: a step of a stream takes what its work takes."""

    width = 2

    def run(self, rows: pa.Table, task: Any, schema: pa.Schema) -> list[Any]:
        half = -(-len(rows) // self.width)
        parts = [rows.slice(at, half) for at in range(0, len(rows), half)]
        return [row for part in parts for batch in task(iter(part.to_batches())) for row in batch.to_pylist()]


class Steps:
    """A stream without a query: each step takes in what the lake has now."""

    def __init__(self, lake: Path, out: Path, **more: Any) -> None:
        self.out = out
        (out / "stream").mkdir(parents=True, exist_ok=True)
        self.follower = Follower(lake)
        self.overlaying = Overlaying(HereJobs(), self.follower, out, **more)
        self.end: Timeframe = {}

    def step(self) -> Folded:
        self.follower.look()
        before, self.end = self.end, self.follower.newest()
        folded = self.overlaying.advance(self.end, changed_parties(before, self.end))
        self.overlaying.tidy()
        return folded


def held_states(out: Path) -> dict[tuple[bytes, bytes], bytes]:
    """The state of each item that an output holds: those of its commit, and of the overlay on top."""
    latest: dict[tuple[bytes, bytes], tuple[int, bytes | None]] = {}
    for index in _files(out, "state_index"):
        for path in {row["path"]: row for row in read_table(out, index, STATE_INDEX).to_pylist()}.values():
            file = NamedFile(path["path"], path["sha256"], path["bytes"], path["rows"])
            for row in read_table(out, file, ITEM_STATES).to_pylist():
                place = (row["party"], row["item"])
                if place not in latest or latest[place][0] <= path["turn"]:
                    latest[place] = path["turn"], None if row["gone"] else row["state"]
    return {place: state for place, (_, state) in latest.items() if state is not None}


def held_moves(out: Path) -> dict[bytes, list[Any]]:
    """The moves of each party that count."""
    rows = pa.concat_tables([MOVES.empty_table(), *(read_table(out, file, MOVES) for file in _files(out, "moves"))])
    found = {}
    for party in rows["party"].unique().to_pylist():
        moves = party_moves([packed(rows.filter(pa.compute.equal(rows["party"], party)))])
        if moves:
            found[party] = moves
    return found


def _files(out: Path, kind: str) -> list[NamedFile]:
    commit, overlay = freshest(out)
    below = [] if commit is None else list(commit.files.get(kind, ()))
    return below + ([] if overlay is None else list(overlay.files(kind)))
