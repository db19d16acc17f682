"""Folding a micro-batch: the work of one task. Runs of a few root parties in; files of a segment and a few words out.

Each root party with its children goes through the stages of the batch (control, order, reduce, item rows), on top of what
the overlay or the commit below has of it. A party whose past changed (a fork below a cut, a feed that lost ground) or that
can't be folded is *deferred*: it stays as it is until the next commit, which builds it from scratch, and the others go on.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import EchoError, StorageFailed
from echostore.kernel.ids import ItemId
from echostore.pipeline import kept
from echostore.pipeline.counting import MOVED, Comparing
from echostore.pipeline.models import model_factory
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.item_rows import item_tables
from echostore.pipeline.output.overlay import KEPT, PLACED, Overlay
from echostore.pipeline.output.party_rows import placement_rows
from echostore.pipeline.output.record import Commit, CommitLost, NamedFile
from echostore.pipeline.output.results import FAILED, PartyResult, party_results
from echostore.pipeline.output.table_schemas import ITEMS, LINKS, PLACEMENTS, PROPERTIES, table_kind
from echostore.pipeline.output.writing import STATE_ROWS, Place, named_rows
from echostore.pipeline.schemas import CUTS, ITEM_STATES, MOVES, REJECTS, RUNS, STATE_INDEX
from echostore.pipeline.stages.by_party import run_by_party
from echostore.pipeline.stages.control import TABLES as CONTROL_TABLES
from echostore.pipeline.stages.control import fold_control_here
from echostore.pipeline.stages.order_here import blocks_in, order_here
from echostore.pipeline.stages.parcels import packed, unpacked
from echostore.pipeline.stages.reduce import LACKING, Inputs, Outcome
from echostore.pipeline.stages.reduce_here import TooMuchHistory, reduce_here
from echostore.pipeline.stages.standing import Bases, above_bases, lacks_base

ORDERS = pa.schema(
    [
        pa.field("root", pa.binary(), nullable=False),
        pa.field("parties", pa.list_(pa.binary()), nullable=False),
        # RUNS of all of them up to the batch's end, packed.
        pa.field("runs", pa.binary(), nullable=False),
    ]
)
"""What a task is asked to fold: root parties with the children that are known."""

FOLDED, NOTHING, DEFERRED = "folded", "nothing", "deferred"

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

    lake: str
    place: Place
    number: int
    """Of the overlay that is being made."""
    turn: int
    base: int
    overlay: Overlay | None
    models: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        segment = _Written(self.place, self.number, self.turn, self.models)
        for batch in batches:
            for order in batch.to_pylist():
                rows.append(self._fold(order, segment))
        for kind, files in segment.files().items():
            rows += [{"kind": kind, **row} for row in _plain_rows(files)]
        yield pa.RecordBatch.from_pylist(rows, TOLD)

    def _fold(self, order: dict[str, Any], segment: "_Written") -> dict[str, Any]:
        party = _RootParty(self, order["root"], unpacked(order["runs"]))
        try:
            return party.fold(segment)
        except TooMuchHistory:
            return party.told(DEFERRED, "items have to be folded from a long past")
        except (StorageFailed, CommitLost):
            raise
        except EchoError as error:
            return party.told(DEFERRED, error.what)
        except Exception as error:  # noqa: BLE001  # somebody's blocks: the next commit tells about that party
            return party.told(DEFERRED, f"{type(error).__name__}: {error}")

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


def _plain_rows(files: list[NamedFile]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = named_rows({"": files}).drop_columns(["kind"]).to_pylist()
    return found


# one root party


@dataclass(slots=True)
class _Before:
    """What is known of a root party and its children."""

    control_mark: bytes = b""
    data_mark: bytes = b""
    control: dict[str, pa.Table] | None = None
    cuts: pa.Table | None = None
    admission: pa.Table | None = None
    lacking: pa.Table | None = None
    bases: dict[bytes, bytes] = field(default_factory=dict)
    """The epochs that parties stood on."""


class _RootParty:
    """One root party with its children, on its way through the stages."""

    def __init__(self, task: Folding, root: bytes, runs: pa.Table) -> None:
        self._task, self._root, self._runs = task, root, runs
        self._children: list[bytes] = []
        self._waiting = 0

    def told(self, state: str, detail: str = "", blocks: int = 0) -> dict[str, Any]:
        return {
            "root": self._root,
            "children": self._children,
            "state": state,
            "detail": detail[:1000],
            "blocks": blocks,
            "waiting": self._waiting,
        }

    def fold(self, segment: "_Written") -> dict[str, Any]:
        task = self._task
        is_control = self._runs["control"]
        control_runs, data_runs = self._runs.filter(is_control), self._runs.filter(pc.invert(is_control))
        control_mark, data_mark = _mark(control_runs), _mark(data_runs)
        before = self._kept()
        if before.control is not None and before.control_mark == control_mark:
            control = before.control
        else:
            control = fold_control_here(task.lake, control_runs)
        parties = control["parties"]["party"].to_pylist()
        self._children = [party for party in parties if party != self._root]
        if before.control is None:
            before = self._committed(parties)
        elif (before.control_mark, before.data_mark) == (control_mark, data_mark):
            self._waiting = _waiting(before.cuts)
            return self.told(NOTHING)
        bases = Bases.of(task.lake, control["parties"])
        if bases.hashes() != before.bases or lacks_base(control["parties"]):
            return self.told(DEFERRED, "the party stands on another epoch than before")
        known = pc.is_in(data_runs["party"], pa.array(parties, pa.binary()))
        data_runs = data_runs.filter(known)
        ordered = order_here(task.lake, data_runs, control["admission"], control["targets"], before.cuts)
        moved = self._compared(before, ordered.cuts, control["admission"], ordered.plan.forked)
        if moved is None:
            return self.told(DEFERRED, "a feed lost ground: the party has to be built from scratch")
        moved = above_bases(moved, bases)
        outcome = reduce_here(
            Inputs(
                spark=None,
                lake=task.lake,
                runs=data_runs,
                cuts=ordered.cuts,
                admission=control["admission"],
                place=task.place,
                turn=task.turn,
                collect=list,
                models=task.models,
                cuts_before=before.cuts,
                index_before=task.files("state_index"),
                moves_before=task.files("moves"),
                lacking_before=before.lacking,
                moved=moved if len(moved) else None,
                bases=bases or None,
            )
        )
        self._waiting = _waiting(ordered.cuts)
        lacking = self._lacking(before.lacking, outcome)
        segment.add(outcome, self._placements(outcome, parties))
        segment.keep(
            {
                "root": self._root,
                "number": task.number,
                "control_mark": control_mark,
                "data_mark": data_mark,
                "control": _pack_tables(control),
                "cuts": packed(ordered.cuts),
                "lacking": packed(lacking),
            }
        )
        return self.told(FOLDED, blocks=_advanced(before.cuts, ordered.cuts, blocks_in(ordered.plan.pieces)))

    # what is known

    def _kept(self) -> _Before:
        """What the overlay has of the party."""
        task = self._task
        newest: dict[str, Any] | None = None
        for file in () if task.overlay is None else task.overlay.files("kept"):
            table = read_table(task.out, file, KEPT, filters=pc.field("root") == pa.scalar(self._root, pa.binary()))
            for row in table.to_pylist():
                if newest is None or row["number"] > newest["number"]:
                    newest = row
        if newest is None:
            return _Before()
        control = _unpack_tables(newest["control"])
        return _Before(
            newest["control_mark"],
            newest["data_mark"],
            control,
            unpacked(newest["cuts"]),
            control["admission"],
            unpacked(newest["lacking"]),
            Bases.of(task.lake, control["parties"]).hashes(),
        )

    def _committed(self, parties: list[bytes]) -> _Before:
        """What the commit below has of the party and its children."""
        task = self._task
        if not task.base:
            return _Before()
        commit = commit_record(task.out, task.base)
        results = list(party_results(Path(task.out), commit, parties))
        _check_built(results)
        builds = {result.party: result.built for result in results if result.built}
        cuts = _rows_kept(task.out, commit, "cuts", kept.KEPT_CUTS, builds)
        admission = _rows_kept(task.out, commit, "admission", kept.KEPT_ADMISSION, builds)
        rejects = _rows_kept(task.out, commit, "rejected", kept.KEPT_REJECTS, builds)
        if cuts is None or rejects is None:
            return _Before()
        lacking = rejects.filter(pc.and_(rejects["lasting"], pc.is_in(rejects["reason"], pa.array(LACKING))))
        data = cuts.filter(pc.invert(cuts["control"]))
        stood = _rows_kept(task.out, commit, "bases", kept.KEPT_BASES, builds)
        return _Before(
            cuts=data.select(CUTS.names),
            admission=admission,
            lacking=lacking.select(REJECTS.names),
            bases={} if stood is None else {row["party"]: row["base"] for row in stood.to_pylist()},
        )

    # what changed

    def _compared(
        self, before: _Before, cuts: pa.Table, admission: pa.Table, forked: frozenset[tuple[bytes, bytes]]
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
        tables = [read_table(self._task.out, file, REJECTS) for file in outcome.files.get("rejects", ())]
        fresh = pa.concat_tables([REJECTS.empty_table(), *tables])
        fresh = fresh.filter(pc.is_in(fresh["reason"], pa.array(LACKING)))
        if before is None or not len(before):
            return fresh
        again = {(bytes(party), bytes(item)) for party, item in outcome.again.history}
        places = zip(before["party"].to_pylist(), before["item"].to_pylist(), strict=True)
        stays = pa.array([place not in again for place in places], pa.bool_())
        return pa.concat_tables([before.filter(stays).cast(REJECTS), fresh])

    # where items hang

    def _placements(self, outcome: Outcome, parties: list[bytes]) -> list[tuple[str, pa.RecordBatch]]:
        """The placements of parties in which something moved, told anew."""
        moves_now = [read_table(self._task.out, file, MOVES) for file in outcome.files.get("moves", ())]
        touched = {party for table in moves_now for party in table["party"].to_pylist()}
        touched |= {bytes(party) for party, _ in outcome.again.rounds}
        found = []
        for party in sorted(touched & set(parties)):
            chosen = pc.field("party") == pa.scalar(party, pa.binary())
            files = (*self._task.files("moves"), *outcome.files.get("moves", ()))
            rows = [
                row for file in files for row in read_table(self._task.out, file, MOVES, filters=chosen).to_pylist()
            ]
            if rows:
                first = self._first_parents(party, outcome)
                found.append((party.hex(), placement_rows(party, _standing(rows), first, self._task.number)))
        return found

    def _first_parents(self, party: bytes, outcome: Outcome) -> dict[ItemId, ItemId]:
        """The parents that the items of a party were created with: all states of it are looked at."""
        chosen = pc.field("party") == pa.scalar(party, pa.binary())
        files: dict[str, tuple[int, NamedFile]] = {}
        for index in (*self._task.files("state_index"), *outcome.files["state_index"]):
            for row in read_table(self._task.out, index, STATE_INDEX, filters=chosen).to_pylist():
                files[row["path"]] = row["turn"], NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
        parents: dict[ItemId, ItemId] = {}
        columns = ["item", "parent", "gone"]
        for _, file in sorted(files.values(), key=lambda each: each[0]):
            table = read_table(self._task.out, file, ITEM_STATES, columns=columns, filters=chosen)
            for item, parent, gone in zip(*(table[name].to_pylist() for name in columns), strict=True):
                if gone or parent is None:
                    parents.pop(item, None)
                else:
                    parents[item] = parent
        return parents


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


def _standing(moves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves without those that were taken back."""
    taken_back: dict[bytes, int] = {}
    for move in moves:
        if move["kind"] < 0:
            taken_back[move["item"]] = max(taken_back.get(move["item"], -1), move["turn"])
    return [move for move in moves if move["kind"] >= 0 and move["turn"] > taken_back.get(move["item"], -1)]


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


# what is written


class _Written:
    """Collects what the root parties of a task came to, and writes the tables of the segment."""

    def __init__(self, place: Place, number: int, turn: int, models: str | None) -> None:
        self._place, self._number, self._turn = place, number, turn
        self._factory = model_factory(models)
        self._files: dict[str, list[NamedFile]] = defaultdict(list)
        self._kept: list[dict[str, Any]] = []
        self._tables: dict[str, list[pa.RecordBatch]] = {name: [] for name in ("items", "properties", "links")}
        self._placements: list[tuple[str, pa.RecordBatch]] = []

    def add(self, outcome: Outcome, placements: list[tuple[str, pa.RecordBatch]]) -> None:
        for kind in ("states", "state_index", "moves"):
            self._files[kind] += outcome.files.get(kind, ())
        self._placements += placements
        turns = {
            row["path"]: row["turn"]
            for file in outcome.files["state_index"]
            for row in read_table(self._place.out, file, STATE_INDEX, columns=["path", "turn"]).to_pylist()
        }
        last = {(bytes(party), bytes(item)): number for (party, item), number in outcome.again.rounds.items()}
        for file in outcome.files["states"]:
            states = read_table(self._place.out, file, ITEM_STATES)
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
        parties = sorted({party for party, _ in self._placements})
        placed = [{"party": party, "number": self._number} for party in parties]
        rows = {
            "kept": (KEPT, [pa.RecordBatch.from_pylist(self._kept, KEPT)]),
            "placed": (PLACED, [pa.RecordBatch.from_pylist(placed, PLACED)]),
            table_kind("placements"): (PLACEMENTS, [batch for _, batch in self._placements]),
            table_kind("items"): (ITEMS, self._tables["items"]),
            table_kind("properties"): (PROPERTIES, self._tables["properties"]),
            table_kind("links"): (LINKS, self._tables["links"]),
        }
        for kind, (schema, batches) in rows.items():
            file = self._place.write(kind, schema, batches)
            self._files[kind] += [] if file is None else [file]
        return dict(self._files)


def orders_table(orders: list[tuple[bytes, list[bytes], pa.Table]]) -> pa.Table:
    """Orders as rows: root, parties, runs."""
    rows = [
        {"root": root, "parties": parties, "runs": packed(runs.select(RUNS.names))} for root, parties, runs in orders
    ]
    return pa.Table.from_pylist(rows, ORDERS)
