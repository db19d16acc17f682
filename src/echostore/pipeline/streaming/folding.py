"""Folding a micro-batch: the work of one task. Runs of a few root parties in; files of a segment and a few words out.

Each root party with its children goes through the stages of the batch (control, order, reduce, item rows), on top of what
the overlay or the commit below has of it. A party whose past changed (a fork below a cut, a feed that lost ground) or that
can't be folded is *deferred*: it stays as it is until the next commit, which builds it from scratch, and the others go on.
What is too much for one task is folded by `spreading`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from echostore.kernel.errors import EchoError, StorageFailed
from echostore.pipeline.output.record import CommitLost, NamedFile
from echostore.pipeline.output.writing import named_rows
from echostore.pipeline.schemas import RUNS
from echostore.pipeline.stages.order_here import order_here
from echostore.pipeline.stages.parcels import packed, unpacked
from echostore.pipeline.stages.reduce import Outcome
from echostore.pipeline.stages.reduce_here import TooMuchHistory, reduce_here
from echostore.pipeline.streaming.placing import Placing, moved_parties
from echostore.pipeline.streaming.root_party import DEFERRED, Ground, RootParty
from echostore.pipeline.streaming.segment_files import SegmentFiles

ORDERS = pa.schema(
    [
        pa.field("root", pa.binary(), nullable=False),
        pa.field("parties", pa.list_(pa.binary()), nullable=False),
        # RUNS of all of them up to the batch's end, packed.
        pa.field("runs", pa.binary(), nullable=False),
    ]
)
"""What a task is asked to fold: root parties with the children that are known."""

TOLD = pa.schema(
    [
        # Rows of NAMED have a kind; rows about root parties have none.
        pa.field("kind", pa.string()),
        pa.field("path", pa.string()),
        pa.field("sha256", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("root", pa.binary()),
        pa.field("children", pa.list_(pa.binary())),
        pa.field("state", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("blocks", pa.int64()),
        pa.field("waiting", pa.int64()),
    ]
)
"""What a task tells: the names of files, and what became of each root party."""


@dataclass(frozen=True)
class Folding:
    """The task: orders into files of one segment."""

    ground: Ground

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        ground = self.ground
        segment = SegmentFiles(ground.place, ground.number, ground.turn, ground.models)
        for batch in batches:
            for order in batch.to_pylist():
                rows.append(self._fold(order, segment))
        for kind, files in segment.files().items():
            rows += [{"kind": kind, **row} for row in _plain_rows(files)]
        yield pa.RecordBatch.from_pylist(rows, TOLD)

    def _fold(self, order: dict[str, Any], segment: SegmentFiles) -> dict[str, Any]:
        party = RootParty(self.ground, order["root"], unpacked(order["runs"]))
        try:
            return fold_party(self.ground, party, segment)
        except TooMuchHistory:
            return party.told(DEFERRED, TOO_MUCH)
        except (StorageFailed, CommitLost):
            raise
        except EchoError as error:
            return party.told(DEFERRED, error.what)
        except Exception as error:  # noqa: BLE001  # somebody's blocks: the next commit tells about that party
            return party.told(DEFERRED, f"{type(error).__name__}: {error}")


TOO_MUCH = "items have to be folded from a long past"


def fold_party(ground: Ground, party: RootParty, segment: SegmentFiles) -> dict[str, Any]:
    """All stages of one root party, here."""
    ended = party.begin()
    if ended is not None:
        return ended
    control = party.control
    ordered = order_here(
        ground.lake, party.data_runs, control["admission"], control["targets"], party.before.cuts, party.floors
    )
    inputs = party.inputs(ordered.cuts, ordered.plan)
    if inputs is None:
        return party.lost_ground()
    outcome = reduce_here(inputs)
    kept = party.kept_row(ordered.cuts, outcome)
    moved = sorted(moved_parties(ground.out, outcome) & set(party.parties))
    placed = list(placing_of(ground, outcome).of(moved))
    segment.add(outcome)
    for each, rows in placed:
        segment.place(each, rows)
    segment.keep(kept)
    return party.folded(ordered.cuts, ordered.plan)


def placing_of(ground: Ground, outcome: Outcome) -> Placing:
    files = {kind: (*ground.files(kind), *outcome.files.get(kind, ())) for kind in ("moves", "state_index")}
    return Placing(ground.place, ground.number, files)


def _plain_rows(files: list[NamedFile]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = named_rows({"": files}).drop_columns(["kind"]).to_pylist()
    return found


Order = tuple[bytes, list[bytes], pa.Table]
"""A root party, with its children, and the runs of all of them."""


def orders_table(orders: list[Order]) -> pa.Table:
    """Orders as rows: root, parties, runs."""
    rows = [
        {"root": root, "parties": parties, "runs": packed(runs.select(RUNS.names))} for root, parties, runs in orders
    ]
    return pa.Table.from_pylist(rows, ORDERS)
