"""A root party with its children in a step of a stream: what is known of it, what is new, what is kept of it afterwards.

Used by both ways of folding a step: `folding` (in one task) and `spreading` (on all cores). They differ in who carries out
the work between these parts, not in what comes of it.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import EchoError
from echostore.pipeline import kept
from echostore.pipeline.counting import MOVED, Comparing
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.overlay import KEPT, Overlay
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.results import FAILED, PartyResult, party_results
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import CUTS, REJECTS
from echostore.pipeline.stages.by_party import run_by_party
from echostore.pipeline.stages.control import TABLES as CONTROL_TABLES
from echostore.pipeline.stages.control import fold_control_here
from echostore.pipeline.stages.order_here import blocks_in
from echostore.pipeline.stages.parcels import packed, unpacked
from echostore.pipeline.stages.planning import Floors, Plan
from echostore.pipeline.stages.reduce import LACKING, Inputs, Outcome
from echostore.pipeline.stages.standing import STANDING, Bases, above_bases, lacks_base, stood_on

FOLDED, NOTHING, DEFERRED = "folded", "nothing", "deferred"


@dataclass(frozen=True)
class Ground:
    """What a step stands on, and where it writes."""

    lake: str
    place: Place
    number: int
    """Of the overlay that is being made."""
    turn: int
    base: int
    overlay: Overlay | None
    models: str | None

    @property
    def out(self) -> str:
        return self.place.out

    def files(self, kind: str) -> tuple[NamedFile, ...]:
        """All that counts of a kind, of the commit below and of the overlay."""
        below = () if not self.base else commit_record(self.out, self.base).files.get(kind, ())
        return (*below, *(() if self.overlay is None else self.overlay.files(kind)))


@lru_cache(maxsize=2)
def commit_record(out: str, number: int) -> Commit:
    """A commit, read once in each process."""
    return reading.load(Path(out), number)[0]


@dataclass(slots=True)
class Before:
    """What is known of a root party and its children."""

    control_mark: bytes = b""
    data_mark: bytes = b""
    control: dict[str, pa.Table] | None = None
    cuts: pa.Table | None = None
    admission: pa.Table | None = None
    lacking: pa.Table | None = None
    standing: pa.Table = field(default_factory=STANDING.empty_table)
    """The epochs that parties stood on."""


class RootParty:
    """One root party with its children, on its way through the stages: `begin`, order, `inputs`, reduce, `kept_row`."""

    def __init__(self, ground: Ground, root: bytes, runs: pa.Table) -> None:
        self._ground, self._root, self._runs = ground, root, runs
        self._children: list[bytes] = []
        self._waiting = 0
        self.parties: list[bytes] = []
        self.before = Before()
        self.control: dict[str, pa.Table] = {}
        self.data_runs = runs
        self._marks = b"", b""
        self._bases: Bases | None = None

    def told(self, state: str, detail: str = "", blocks: int = 0) -> dict[str, Any]:
        return {
            "root": self._root,
            "children": self._children,
            "state": state,
            "detail": detail[:1000],
            "blocks": blocks,
            "waiting": self._waiting,
        }

    def begin(self) -> dict[str, Any] | None:
        """Find out what is known and who counts; what is to be told when there is nothing to fold."""
        ground = self._ground
        is_control = self._runs["control"]
        control_runs, data_runs = self._runs.filter(is_control), self._runs.filter(pc.invert(is_control))
        self._marks = control_mark, data_mark = _mark(control_runs), _mark(data_runs)
        before = self._kept()
        if before.control is not None and before.control_mark == control_mark:
            self.control = before.control
        else:
            self.control = fold_control_here(ground.lake, control_runs)
        self.parties = self.control["parties"]["party"].to_pylist()
        self._children = [party for party in self.parties if party != self._root]
        if before.control is None:
            before = self._committed(self.parties)
        elif (before.control_mark, before.data_mark) == (control_mark, data_mark):
            self._waiting = _waiting(before.cuts)
            return self.told(NOTHING)
        bases, stood = Bases.of(ground.lake, self.control["parties"]), Bases(ground.lake, before.standing)
        if bases.discard(stood) or lacks_base(self.control["parties"]):
            return self.told(DEFERRED, "the party stands on another epoch than before")
        # An epoch that left nothing out is taken up by the next run; until then the last one serves, as with a peer.
        self.control["parties"] = stood_on(self.control["parties"], before.standing)
        self._bases = stood
        self.before = before
        self.data_runs = data_runs.filter(pc.is_in(data_runs["party"], pa.array(self.parties, pa.binary())))
        return None

    @property
    def floors(self) -> Floors:
        """Where the epochs end that the parties stand on."""
        return self._bases.floors() if self._bases else {}

    def inputs(self, cuts: pa.Table, plan: Plan) -> Inputs | None:
        """What is to be reduced, now that the cuts are known; None when a feed lost ground."""
        ground = self._ground
        moved = self._compared(self.before, cuts, self.control["admission"], plan.forked)
        if moved is None:
            return None
        assert self._bases is not None
        moved = above_bases(moved, self._bases)
        return Inputs(
            spark=None,
            lake=ground.lake,
            runs=self.data_runs,
            cuts=cuts,
            admission=self.control["admission"],
            place=ground.place,
            turn=ground.turn,
            collect=list,
            models=ground.models,
            cuts_before=self.before.cuts,
            index_before=ground.files("state_index"),
            moves_before=ground.files("moves"),
            claims_before=ground.files("claims"),
            lacking_before=self.before.lacking,
            moved=moved if len(moved) else None,
            bases=self._bases or None,
        )

    def lost_ground(self) -> dict[str, Any]:
        return self.told(DEFERRED, "a feed lost ground: the party has to be built from scratch")

    def kept_row(self, cuts: pa.Table, outcome: Outcome) -> dict[str, Any]:
        """What the next step needs to know of the party: a row of KEPT."""
        return {
            "root": self._root,
            "number": self._ground.number,
            "control_mark": self._marks[0],
            "data_mark": self._marks[1],
            "control": _pack_tables(self.control),
            "cuts": packed(cuts),
            "lacking": packed(self._lacking(self.before.lacking, outcome)),
        }

    def folded(self, cuts: pa.Table, plan: Plan) -> dict[str, Any]:
        self._waiting = _waiting(cuts)
        return self.told(FOLDED, blocks=_advanced(self.before.cuts, cuts, blocks_in(plan.pieces)))

    # what is known

    def _kept(self) -> Before:
        """What the overlay has of the party."""
        ground = self._ground
        newest: dict[str, Any] | None = None
        for file in () if ground.overlay is None else ground.overlay.files("kept"):
            table = read_table(ground.out, file, KEPT, filters=pc.field("root") == pa.scalar(self._root, pa.binary()))
            for row in table.to_pylist():
                if newest is None or row["number"] > newest["number"]:
                    newest = row
        if newest is None:
            return Before()
        control = _unpack_tables(newest["control"])
        return Before(
            newest["control_mark"],
            newest["data_mark"],
            control,
            unpacked(newest["cuts"]),
            control["admission"],
            unpacked(newest["lacking"]),
            Bases.of(ground.lake, control["parties"]).rows,
        )

    def _committed(self, parties: list[bytes]) -> Before:
        """What the commit below has of the party and its children."""
        ground = self._ground
        if not ground.base:
            return Before()
        commit = commit_record(ground.out, ground.base)
        results = list(party_results(Path(ground.out), commit, parties))
        _check_built(results)
        builds = {result.party: result.built for result in results if result.built}
        cuts = _rows_kept(ground.out, commit, "cuts", kept.KEPT_CUTS, builds)
        admission = _rows_kept(ground.out, commit, "admission", kept.KEPT_ADMISSION, builds)
        rejects = _rows_kept(ground.out, commit, "rejected", kept.KEPT_REJECTS, builds)
        if cuts is None or rejects is None:
            return Before()
        lacking = rejects.filter(pc.and_(rejects["lasting"], pc.is_in(rejects["reason"], pa.array(LACKING))))
        data = cuts.filter(pc.invert(cuts["control"]))
        stood = _rows_kept(ground.out, commit, "standing", kept.KEPT_STANDING, builds)
        return Before(
            cuts=data.select(CUTS.names),
            admission=admission,
            lacking=lacking.select(REJECTS.names),
            standing=STANDING.empty_table() if stood is None else stood.select(STANDING.names),
        )

    # what changed

    def _compared(
        self, before: Before, cuts: pa.Table, admission: pa.Table, forked: frozenset[tuple[bytes, bytes]]
    ) -> pa.Table | None:
        """Blocks whose standing changed; None when a feed lost ground."""
        if before.cuts is None or before.admission is None:
            return MOVED.empty_table()
        parts = {
            "cut_before": _data(before.cuts, ["party", "feed", "length", "link"]),
            "cut": _data(cuts, ["party", "feed", "length", "link"]),
            "admission_before": _data(before.admission, ["party", "feed", "start", "end", "role"]),
            "admission": _data(admission, ["party", "feed", "start", "end", "role"]),
        }
        found = run_by_party(None, parts, Comparing(forked), MOVED, 0)
        return None if any(found["lost"].to_pylist()) else found.drop_columns(["lost"])

    def _lacking(self, before: pa.Table | None, outcome: Outcome) -> pa.Table:
        """Rejects that lack an item which may still come."""
        tables = [read_table(self._ground.out, file, REJECTS) for file in outcome.files.get("rejects", ())]
        fresh = pa.concat_tables([REJECTS.empty_table(), *tables])
        fresh = fresh.filter(pc.is_in(fresh["reason"], pa.array(LACKING)))
        if before is None or not len(before):
            return fresh
        again = {(bytes(party), bytes(item)) for party, item in outcome.again.history}
        places = zip(before["party"].to_pylist(), before["item"].to_pylist(), strict=True)
        stays = pa.array([place not in again for place in places], pa.bool_())
        return pa.concat_tables([before.filter(stays).cast(REJECTS), fresh])


def _check_built(results: list[PartyResult]) -> None:
    for result in results:
        if result.state == FAILED:
            raise EchoError(f"the last commit could not build it: {result.detail}")


def _rows_kept(out: str, commit: Commit, kind: str, schema: pa.Schema, builds: dict[bytes, int]) -> pa.Table | None:
    """The rows of a kind that count, of some parties; None when none of them was built."""
    if not builds:
        return None
    chosen = pc.field("party").isin(pa.array(sorted(builds), pa.binary()))
    tables = [read_table(out, file, schema, filters=chosen) for file in commit.files.get(kind, ())]
    rows = pa.concat_tables([schema.empty_table(), *tables])
    places = zip(rows["party"].to_pylist(), rows["commit"].to_pylist(), strict=True)
    return rows.filter(pa.array([builds[party] == number for party, number in places], pa.bool_()))


def _data(rows: pa.Table, names: list[str]) -> pa.Table:
    return rows.filter(pc.invert(rows["control"])).select(names)


def _mark(runs: pa.Table) -> bytes:
    """What blocks there are, whichever files they lie in."""
    ends: dict[tuple[bytes, bytes], set[tuple[int, bytes]]] = defaultdict(set)
    starts: dict[tuple[bytes, bytes], set[tuple[int, bytes]]] = defaultdict(set)
    names = ("party", "feed", "start", "end", "previous", "last_link")
    for party, feed, start, end, previous, last in zip(*(runs[name].to_pylist() for name in names), strict=True):
        ends[party, feed].add((end, last))
        starts[party, feed].add((start, previous))
    hashed = hashlib.sha256()
    for place in sorted(ends):
        hashed.update(b"".join(place))
        for end, link in sorted(ends[place] - starts[place]):
            hashed.update(end.to_bytes(8, "big") + link)
        for start, link in sorted(starts[place] - ends[place]):
            hashed.update(b"<" + start.to_bytes(8, "big") + link)
    return hashed.digest()


def _waiting(cuts: pa.Table | None) -> int:
    """Blocks that are held and wait for others."""
    if cuts is None or not len(cuts):
        return 0
    behind = cuts["held"].to_numpy() - cuts["length"].to_numpy()
    open_ends = pc.not_equal(cuts["state"], "ended").to_numpy(zero_copy_only=False)
    return int(np.sum(behind[open_ends]))


def _advanced(before: pa.Table | None, after: pa.Table, most: int) -> int:
    """By how many blocks the cuts moved on."""
    total = int(np.sum(after["length"].to_numpy()))
    known = 0 if before is None else int(np.sum(_data(before, ["length"])["length"].to_numpy()))
    return min(most, max(0, total - known))


def _pack_tables(tables: dict[str, pa.Table]) -> bytes:
    schema = pa.schema([pa.field("name", pa.string()), pa.field("rows", pa.binary())])
    rows = [{"name": name, "rows": packed(tables[name])} for name in _NEEDED]
    return packed(pa.Table.from_pylist(rows, schema))


def _unpack_tables(data: bytes) -> dict[str, pa.Table]:
    return {row["name"]: unpacked(row["rows"]).cast(CONTROL_TABLES[row["name"]]) for row in unpacked(data).to_pylist()}


_NEEDED = ("parties", "admission", "targets")
"""What of control is needed again while it does not change."""
