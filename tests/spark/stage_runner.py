"""The stages from lake to CIDs in one call, keeping between calls what a commit would keep."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from echostore.kernel.ids import PartyKey
from echostore.pipeline.lake import Lake
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import ITEM_STATES, REJECTS, ROOTS
from echostore.pipeline.stages.control import fold_control
from echostore.pipeline.stages.frames import frame_of
from echostore.pipeline.stages.order import order_blocks
from echostore.pipeline.stages.reduce import LACKING, TURNS, Inputs, Outcome, reduce_items
from echostore.pipeline.stages.snapshot import SnapshotInputs, Snapshots, build_snapshots
from echostore.wire.cids import cid_text


def collect(frame: Any) -> list[Any]:
    return frame.collect()  # type: ignore[no-any-return]


@dataclass
class Stages:
    """Runs the stages over a lake, again and again."""

    spark: Any
    lake: Path
    out: Path
    models: str | None = None
    files: dict[str, list[NamedFile]] = field(default_factory=dict)
    rejects: list[dict[str, Any]] = field(default_factory=list)
    cuts: pa.Table | None = None
    admission: pa.Table | None = None
    turn: int = 0
    outcome: Outcome | None = None
    snapshots: Snapshots | None = None

    def run(self) -> dict[PartyKey, str | None]:
        """Build what is new; returns the CIDs of all parties."""
        spark = self.spark
        version = Lake.open(self.lake).at()
        control = fold_control(spark, version)
        order = order_blocks(spark, version, control)
        cuts, admission = order.cuts.toArrow(), control.admission.toArrow()
        moved = list(self._moved(admission))
        self.turn += TURNS
        folder = f"attempt-{self.turn}"
        (self.out / folder).mkdir(parents=True)
        place = Place(str(self.out), folder)
        lacking = [row for row in self.rejects if row["reason"] in LACKING]
        ranges = pa.table(dict(zip(("party", "feed", "start", "end"), map(list, zip(*moved, strict=True)), strict=True))) if moved else None  # fmt: skip
        self.outcome = reduce_items(
            Inputs(
                spark=spark,
                lake=str(self.lake),
                runs=version.runs(control=False),
                cuts=order.cuts,
                admission=control.admission,
                place=place,
                turn=self.turn,
                collect=collect,
                models=self.models,
                cuts_before=None if self.cuts is None else frame_of(spark, self.cuts),
                index_before=tuple(self.files.get("state_index", ())),
                moves_before=tuple(self.files.get("moves", ())),
                lacking_before=frame_of(spark, pa.Table.from_pylist(lacking, REJECTS)) if lacking else None,
                moved=None if ranges is None else frame_of(spark, ranges),
            )
        )
        place_tops = tuple(self.files.get("place_tops", ()))
        self._keep({kind: named for kind, named in self.outcome.files.items() if kind != "place_changes"})
        self._take_rejects(moved)
        self.snapshots = build_snapshots(
            SnapshotInputs(
                spark=spark,
                parties=control.parties,
                timeframe=order.timeframe,
                cuts=order.cuts,
                place=place,
                turn=self.turn,
                collect=collect,
                models=self.models,
                index=tuple(self.files.get("state_index", ())),
                tops=tuple(self.files.get("tops", ())),
                moves=tuple(self.files.get("moves", ())),
                place_tops=place_tops,
                place_changes=tuple(self.outcome.files["place_changes"]),
                again=self.outcome.again,
            )
        )
        roots = self.snapshots.files.pop("roots")
        self._keep(self.snapshots.files)
        self.cuts, self.admission = cuts, admission
        self.order_rejects = order.rejects.toArrow().to_pylist()
        order.close()
        rows = [row for file in roots for row in read_table(self.out, file, ROOTS).to_pylist()]
        self.roots = {PartyKey(row["party"]): row for row in rows}
        return {party: None if row["cid"] is None else cid_text(row["cid"]) for party, row in self.roots.items()}

    def _moved(self, admission: pa.Table) -> Iterator[tuple[bytes, bytes, int, int]]:
        """Blocks below the cuts before that stand differently now: role by role, block by block."""
        if self.cuts is None or self.admission is None:
            return
        before, after = _roles(self.admission), _roles(admission)
        for row in self.cuts.to_pylist():
            place = (row["party"], row["feed"])
            if row["control"]:
                continue
            for seq in range(row["length"]):
                if _role(before.get(place, ()), seq) != _role(after.get(place, ()), seq):
                    yield (*place, seq, seq + 1)

    def _keep(self, files: dict[str, list[NamedFile]]) -> None:
        for kind, named in files.items():
            self.files.setdefault(kind, []).extend(named)

    def _take_rejects(self, moved: list[tuple[bytes, bytes, int, int]]) -> None:
        assert self.outcome is not None
        dead = self.outcome.again.history
        blocks = {(party, feed[:8], start) for party, feed, start, _ in moved}

        def stale(row: dict[str, Any]) -> bool:
            return (row["party"], row["item"]) in dead or (row["party"], row["feed"], row["seq"]) in blocks

        kept = {_place(row): row for row in self.rejects if not stale(row)}
        for file in self.outcome.files["rejects"]:
            kept.update({_place(row): row for row in read_table(self.out, file, REJECTS).to_pylist()})
        self.rejects = list(kept.values())

    def rejected(self, party: bytes) -> set[tuple[bytes, int, int, str, str]]:
        """As a peer's party lists them."""
        rows = self.rejects + [row for row in self.order_rejects if row["feed"] is not None]
        return {
            (row["feed"], row["seq"], row["position"], row["reason"], row["detail"])
            for row in rows
            if row["party"] == party
        }

    def states(self) -> list[dict[str, Any]]:
        """All rows of states that this run wrote."""
        assert self.outcome is not None
        return [
            row for file in self.outcome.files["states"] for row in read_table(self.out, file, ITEM_STATES).to_pylist()
        ]


_Intervals = dict[tuple[bytes, bytes], list[tuple[int, int | None, str]]]


def _roles(admission: pa.Table) -> _Intervals:
    found: _Intervals = {}
    for row in admission.to_pylist():
        if row["role"] is not None:
            found.setdefault((row["party"], row["feed"]), []).append((row["start"], row["end"], row["role"]))
    return found


def _role(intervals: Iterable[tuple[int, int | None, str]], seq: int) -> str | None:
    roles = (role for start, end, role in intervals if start <= seq and (end is None or seq < end))
    return next((role for role in roles if role != "reader"), None)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["party"], row["feed"], row["seq"], row["position"]
