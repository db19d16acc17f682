"""reduce: parcels -> item states. Rounds of demux and reduce on Spark, each one shuffle.

    slices ──► demux ──► parcels ─┐
    index of the states before ───┼──► by bucket ──► reduce_bucket ──► files: states, rejects, moves, blobs
    questions ────────────────────┘                                   the driver sees names and counts

What is hard is folded again by the rounds of `fold_rounds`; `SparkEngine` runs them. Tasks write their results as files of
the attempt. Lists of hard items and of edges come to the driver only where something is hard or absent.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import ItemId, PartyKey, item_from_text
from echostore.kernel.reasons import Reason
from echostore.pipeline.models import model_factory
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import (
    ADMISSION,
    ASKED_ITEMS,
    BLOBS,
    CLAIMS,
    EDGES,
    HARD_ITEMS,
    ITEM_STATES,
    MOVES,
    PARCELS,
    PLACE_CHANGES,
    PLAIN_CHANGES,
    REJECTS,
    REST_OPERATIONS,
    SLICES,
    STATE_INDEX,
)
from echostore.pipeline.stages.by_party import HERE_ROWS_MAX
from echostore.pipeline.stages.demux import Demux, demultiplex, messages_by_party, plan_slices
from echostore.pipeline.stages.fold_rounds import Again, Findings, Items, Round, flagged, run_rounds
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, mapped, sorted_within, width_of
from echostore.pipeline.stages.move_rows import party_moves
from echostore.pipeline.stages.operation_columns import CREATED, GONE, LACKED, PLACED, WANTED, rows_table
from echostore.pipeline.stages.parcel_chunks import chunks_of, notes_in
from echostore.pipeline.stages.parcels import bucket_nibbles, pack, packed, parcels_batch, unpack
from echostore.pipeline.stages.placement_changes import place_changes
from echostore.pipeline.stages.reduce_bucket import Reduced, reduce_bucket
from echostore.pipeline.stages.standing import Bases
from echostore.pipeline.stages.state_files import (
    StateWriter,
    by_bucket,
    index_parcels,
    parcels_table,
    read_index,
    read_states,
    states_noted,
)
from echostore.pipeline.stages.subtrees import Subtrees, TopsBefore, latest_tops, tops_parcels
from echostore.pipeline.stages.view_claims import KeyClaims
from echostore.pipeline.stages.writers import absent_items, read_arrow, write_arrow, writers_of

TASK_BLOCKS = 1 << 18
"""Blocks for one task of a round, at least: seconds of work."""

LACKING = (str(Reason.NO_ITEM), str(Reason.NO_PARENT))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a reduction starts from. Cuts and admission are tables here, or DataFrames where they are many; then subtrees
    are left to the snapshot."""

    spark: Any
    lake: str
    runs: pa.Table
    cuts: Rows
    admission: Rows
    place: Place
    turn: int
    """Of this run; a later one has a higher one, by at least TURNS."""
    collect: Collect
    models: str | None = None
    cuts_before: Rows | None = None
    """CUTS of the last commit, of parties that are not built anew."""
    index_before: tuple[NamedFile, ...] = ()
    """Files of STATE_INDEX of the last commit."""
    moves_before: tuple[NamedFile, ...] = ()
    """Files of MOVES of the last commit."""
    claims_before: tuple[NamedFile, ...] = ()
    """Files of CLAIMS of the last commit."""
    tops_before: tuple[NamedFile, ...] = ()
    """Files of TOPS of the last commit."""
    anew: frozenset[bytes] = frozenset()
    """Parties of which the states before are of no use."""
    lacking_before: Any | None = None
    """REJECTS of the last commit whose reason is one of LACKING."""
    moved: Any | None = None
    """Blocks below the cuts before whose standing changed: party, feed, start, end."""
    bases: Bases | None = None
    """The epochs that parties stand on: what is folded from the past is folded from there."""
    trees: bool = True
    """Whether the first round makes subtrees, where it can: not where states are newer than the tops before."""

    def cuts_below(self, history: bool) -> Rows | None:
        """Where the blocks begin that a round takes."""
        if not history:
            return self.cuts_before
        return self.bases.cuts() if self.bases else None


TURNS = 1 << 20
"""Between two runs: more than a run has rounds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reduction left: files by kind (states, state_index, rejects, moves, claims, blobs, tops, place_changes), which items
    were folded from their whole past (rejects of earlier commits on them are void), and how many blocks were looked at."""

    files: dict[str, list[NamedFile]]
    again: Again
    blocks: int
    rounds: int
    demux_s: float | None = None
    """What of the time went to demultiplexing; None where Spark counts it."""


def reduce_items(inputs: Inputs, engine: "SparkEngine | None" = None) -> Outcome:
    """Reduce what is new between two commits, with all that has to be folded again for it."""
    engine = engine or SparkEngine(inputs)
    again = run_rounds(engine)
    files = {kind: [file for each in engine.rounds for file in each.get(kind, ())] for kind in _KEPT}
    if again.rounds:
        for kind, schema in (("rejects", REJECTS), ("moves", MOVES)):
            files[kind] = _without_superseded(inputs, engine.rounds, kind, schema, again)
    return Outcome(files, again, engine.blocks, len(engine.rounds), engine.demux_s)


_KEPT = ("states", "state_index", "rejects", "moves", "claims", "blobs", "tops", "place_changes")


class SparkEngine:
    """Runs rounds on Spark and keeps the names of what they wrote."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.rounds: list[dict[str, list[NamedFile]]] = []
        self.blocks = 0
        self.demux_s: float | None = None if inputs.spark is not None else 0.0
        """Seconds of demultiplexing, where Spark does not count them."""
        self._refolded: set[tuple[bytes, bytes]] = set()
        self._claims = KeyClaims(inputs.place.out, inputs.claims_before, inputs.bases, self._admission)

    def run(self, round: Round) -> Findings:
        given = self.inputs
        wanted = None if round.wanted is None else self._scratch("wanted", items_table(round.wanted))
        slices = plan_slices(
            given.spark,
            given.lake,
            self._runs(round),
            given.cuts,
            given.admission,
            given.cuts_below(round.history),
        )
        tasks = self._tasks(slices)
        parcels = demultiplex(given.spark, slices, Demux(given.lake, given.place, wanted), tasks)
        if wanted is None and given.moved is not None:
            touching = Demux(given.lake, given.place, None, touching=True)
            parcels = parcels.unionByName(demultiplex(given.spark, self._moved_slices(), touching, tasks))
        for more in self._more_parcels(round):
            parcels = parcels.unionByName(more)
        task = Reducing(
            given.place,
            given.turn + round.number,
            given.models,
            None if wanted is None else self._scratch("absent", items_table(round.absent)),
            None if wanted is None else self._scratch("admission", self._admission(round.wanted or ())),
            round.history,
            lost=self._lost(round),
            trees=wanted is None and given.trees and self._here,
            places=True,
            lake=given.lake,
            bases=self._scratch("bases", given.bases.rows) if given.bases else None,
        )
        sorted_parcels = sorted_within(by_task(parcels, tasks), "party", "bucket")
        return self._found(round, named_files(given.collect(mapped(sorted_parcels, task, NAMED))))

    def _found(self, round: Round, files: dict[str, list[NamedFile]]) -> Findings:
        """What the files of a round tell about the next."""
        self.blocks += sum(file.rows for file in files.pop("blocks", ())) if round.wanted is None else 0
        self.rounds.append(files)
        if round.history and round.wanted is not None:
            self._refolded |= {(party, item) for party, items in round.wanted.items() for item in items}
        self._claims.add(self._read(files.get("claims", ()), CLAIMS))
        told = self._read(files.get("flagged", ()), EDGES)
        is_gone = pc.equal(told["why"], GONE)
        gone = frozenset(PartyKey(party) for party in told.filter(is_gone).column("party").to_pylist())
        return Findings(self._read(files.get("hard", ()), HARD_ITEMS), told.filter(pc.invert(is_gone)), gone)

    def edges(self, parties: frozenset[PartyKey]) -> pa.Table:
        rows: list[dict[str, Any]] = []
        for files in self.rounds:
            table = self._read(files.get("edges", ()), EDGES)
            rows += table.filter(pc.is_in(table["party"], pa.array(sorted(parties), pa.binary()))).to_pylist()
        standing: set[tuple[bytes, bytes]] = set()
        gone: set[tuple[bytes, bytes]] = set()
        for row in self._heads(parties):
            place = (row["party"], row["item"])
            if row["gone"]:
                gone.add(place)
                continue
            standing.add(place)
            # What a base has exists for good, also below a parent that was discarded.
            based = self.inputs.bases is not None and self.inputs.bases.inside(*place)
            if row["before"] and row["parent"] is not None and place not in self._refolded and not based:
                rows.append(_edge(row["party"], row["item"], row["parent"], CREATED))
        rows += self._placed_before(parties)
        lost = {(bytes(party), bytes(item)) for party, items in self._claims.lost(parties).items() for item in items}
        rows = [row for row in rows if row["why"] != CREATED or (row["party"], row["item"]) not in lost]
        for row in rows:
            place = (row["party"], row["parent"])
            row["absent"] = place not in standing and (row["absent"] or place in gone)
        return pa.Table.from_pylist(rows, EDGES)

    def _placed_before(self, parties: frozenset[PartyKey]) -> Iterator[dict[str, Any]]:
        """Placements of the last commit, but for items that were folded from their past."""
        moves = self._read(self.inputs.moves_before, MOVES)
        for party in parties - self.inputs.anew:
            for move in party_moves([packed(moves.filter(pc.equal(moves["party"], party)))]):
                if move.parent is not None and (party, move.item) not in self._refolded:
                    yield _edge(party, move.item, move.parent, PLACED)

    def rivals(self, touched: Items) -> Items:
        return self._claims.rivals(touched)

    def _lost(self, round: Round) -> str | None:
        """Where the tasks of a round find the views that lost their keys."""
        return None if round.wanted is None else self._scratch("lost", items_table(self._claims.lost(round.wanted)))

    def lacking(self, parties: frozenset[PartyKey]) -> Iterator[tuple[PartyKey, ItemId, ItemId]]:
        if self.inputs.lacking_before is None:
            return
        frame = self.inputs.lacking_before.select("party", "item", "detail")
        for row in self.inputs.collect(frame):
            if bytes(row["party"]) in parties and row["item"] is not None:
                yield PartyKey(bytes(row["party"])), ItemId(bytes(row["item"])), item_from_text(row["detail"])

    # what goes in

    def _runs(self, round: Round) -> pa.Table:
        runs = self.inputs.runs
        if round.wanted is None:
            return runs
        return runs.filter(pc.is_in(runs["party"], pa.array(sorted(round.wanted), pa.binary())))

    @property
    def _here(self) -> bool:
        """Whether what is known of feeds and buckets is on the driver."""
        index = (*self.inputs.index_before, *self.inputs.tops_before)
        return isinstance(self.inputs.cuts, pa.Table) and sum(file.rows for file in index) <= HERE_ROWS_MAX

    def _tasks(self, slices: Rows) -> int:
        rows = slices if isinstance(slices, pa.Table) else self.inputs.runs
        blocks = int(pc.sum(pc.subtract(rows["end"], rows["start"])).as_py() or 0)
        width = width_of(self.inputs.spark)
        return width * min(4096, max(1, -(-blocks // (TASK_BLOCKS * width))))

    def _moved_slices(self) -> Any:
        """Slices of the blocks whose standing changed, planned as if nothing had been taken before."""
        given = self.inputs
        every = plan_slices(given.spark, given.lake, given.runs, given.cuts, given.admission, given.cuts_below(True))
        assert given.moved is not None
        every = as_frame(given.spark, every)
        moved = given.moved.selectExpr("party", "feed", "start AS `from`", "end AS `to`")
        met = every.join(moved, ["party", "feed"]).filter("start < to AND end > from")
        clipped = met.selectExpr(
            "party",
            "feed",
            "greatest(start, `from`) AS s",
            "least(end, `to`) AS e",
            "file",
            "row",
            "start",
            "nibbles",
            "standing",
        )
        return clipped.selectExpr(
            "party", "feed", "s AS start", "e AS end", "file", "row + s - start AS row", "nibbles", "standing"
        ).select(*SLICES.names)

    def _more_parcels(self, round: Round) -> Iterator[Any]:
        given = self.inputs
        if self._here:
            yield from self._more_here(round, messages_by_party(given.cuts))
            return
        cuts = as_frame(given.spark, given.cuts)
        totals = cuts.filter("NOT control AND length > 0").groupBy("party").agg({"length": "sum"})
        totals = totals.withColumnRenamed("sum(length)", "messages")
        index = self._index(round)
        if index:
            frame = frame_of(given.spark, pa.Table.from_batches([named_rows({"state_index": index})]))
            rows = mapped(frame.repartition(min(len(index), 64)), ReadIndex(given.place.out), STATE_INDEX)
            rows = rows.filter(~rows["party"].isin(*sorted(given.anew))) if given.anew else rows
            yield mapped(rows.join(totals, "party"), index_to_parcels, PARCELS)
        if round.wanted is not None:
            depth = {
                bytes(row["party"]): bucket_nibbles(row["messages"])
                for row in given.collect(totals)
                if bytes(row["party"]) in round.wanted
            }
            yield frame_of(given.spark, parcels_table(list(wanted_parcels(round.wanted, depth))))
        elif given.lacking_before is not None:
            yield mapped(given.lacking_before.join(totals, "party"), lacking_to_parcels, PARCELS)

    def _more_here(self, round: Round, messages: dict[bytes, int]) -> Iterator[Any]:
        """The same where all is known on the driver: one small table."""
        given = self.inputs
        nibbles = {party: bucket_nibbles(count) for party, count in messages.items()}
        kept = {party: depth for party, depth in nibbles.items() if party not in given.anew}
        index = read_index(given.place.out, [_named(file) for file in self._index(round)])
        parcels = index_parcels(index, kept)
        if round.wanted is not None:
            parcels += wanted_parcels(round.wanted, nibbles)
        else:
            parcels += tops_parcels(latest_tops(given.place.out, given.tops_before, kept))
        if parcels:
            yield frame_of(given.spark, parcels_table(parcels))
        if round.wanted is None and given.lacking_before is not None:
            known = {"party": list(messages), "messages": list(messages.values())}
            totals = frame_of(
                given.spark, pa.table(known, pa.schema([("party", pa.binary()), ("messages", pa.int64())]))
            )
            yield mapped(given.lacking_before.join(totals, "party"), lacking_to_parcels, PARCELS)

    def _index(self, round: Round) -> list[NamedFile]:
        index = list(self.inputs.index_before)
        if round.history:
            index += [file for files in self.rounds for file in files.get("state_index", ())]
        return index

    def _admission(self, parties: Iterable[bytes]) -> pa.Table:
        """The admission of some parties: who wrote what."""
        wanted = sorted(bytes(party) for party in parties)
        known = self.inputs.admission
        if isinstance(known, pa.Table):
            return known.filter(pc.and_(pc.invert(known["control"]), pc.is_in(known["party"], pa.array(wanted))))
        frame = known.filter("NOT control")
        rows = [row.asDict() for row in self.inputs.collect(frame.filter(frame["party"].isin(*wanted)))]
        plain = [
            {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()}
            for row in rows
        ]
        return pa.Table.from_pylist(plain, ADMISSION)

    def _scratch(self, name: str, table: pa.Table) -> str:
        return write_arrow(self.inputs.place, name, table)

    # what comes out

    def _read(self, files: Iterable[NamedFile], schema: pa.Schema) -> pa.Table:
        tables = [read_table(self.inputs.place.out, file, schema) for file in files]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _heads(self, parties: frozenset[PartyKey]) -> Iterator[dict[str, Any]]:
        """Item, parent and whether it is gone, of the latest states of these parties."""
        latest: dict[tuple[bytes, bytes], dict[str, Any]] = {}
        before = [(file, True) for file in self.inputs.index_before]
        now = [(file, False) for files in self.rounds for file in files.get("state_index", ())]
        for index, is_before in before + now:
            places = read_index(self.inputs.place.out, [_named(index)]).to_pylist()
            for path in {place["path"]: place for place in places if place["party"] in parties}.values():
                file = NamedFile(path["path"], path["sha256"], path["bytes"], path["rows"])
                columns = ["party", "item", "parent", "gone"]
                chosen = pc.field("party").isin(pa.array(sorted(parties), pa.binary()))
                table = read_table(self.inputs.place.out, file, ITEM_STATES, columns=columns, filters=chosen)
                for row in table.to_pylist():
                    known = latest.get((row["party"], row["item"]))
                    if is_before and row["party"] in self.inputs.anew:
                        continue
                    if known is None or known["turn"] <= path["turn"]:
                        was = is_before or bool(known and known["before"])
                        latest[row["party"], row["item"]] = {**row, "turn": path["turn"], "before": was}
        yield from latest.values()


def _edge(party: bytes, item: bytes, parent: bytes, why: int) -> dict[str, Any]:
    return {"party": party, "item": item, "parent": parent, "why": why, "absent": False, "doubt": False}


def _named(file: NamedFile) -> dict[str, Any]:
    return {"path": file.path, "sha256": file.sha256, "bytes": file.bytes, "rows": file.rows}


def items_table(items: Items) -> pa.Table:
    rows = [(party, item, False) for party, each in items.items() for item in sorted(each)]
    return rows_table(rows, HARD_ITEMS)


def wanted_parcels(wanted: Items, nibbles: dict[bytes, int]) -> Iterator[dict[str, Any]]:
    for party, items in wanted.items():
        yield from _questions(party, nibbles[party], [(item, item) for item in items], WANTED)


def _questions(party: PartyKey, nibbles: int, pairs: list[tuple[ItemId, ItemId]], why: int) -> Iterator[dict[str, Any]]:
    rows = [(*_halves(about), *_halves(child), 0, 0, 0, why) for about, child in pairs]
    asked = rows_table(rows, ASKED_ITEMS)
    yield from pack(party, nibbles, plain=PLAIN_CHANGES.empty_table(), rest=REST_OPERATIONS.empty_table(), asked=asked)


def _halves(item: bytes) -> tuple[int, int]:
    return int.from_bytes(item[:8], "big"), int.from_bytes(item[8:], "big")


# tasks


def by_task(parcels: Rows, tasks: int) -> Rows:
    """Parcels dealt out to tasks: neighbouring buckets of a large party together, because they lie together in files."""
    if isinstance(parcels, pa.Table):
        return parcels
    from pyspark.sql import functions as f

    share = f"coalesce(floor(conv(bucket, 16, 10) * {tasks}L / pow(16, length(bucket))), 0L)"
    return parcels.repartitionById(tasks, f.expr(f"CAST(pmod(xxhash64(party) + {share}, {tasks}L) AS INT)"))


@dataclass(frozen=True)
class ReadIndex:
    """The task: names of index files into their rows."""

    out: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from read_index(self.out, batch.to_pylist()).to_batches()


def index_to_parcels(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of the index, with the messages of their party, into parcels."""
    for batch in batches:
        nibbles = {
            row["party"]: bucket_nibbles(row["messages"]) for row in batch.select(["party", "messages"]).to_pylist()
        }
        index = pa.Table.from_batches([batch.select(STATE_INDEX.names)])
        yield parcels_batch(index_parcels(index, nibbles))


def lacking_to_parcels(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rejects that lacked an item, with the messages of their party, into questions after it."""
    for batch in batches:
        pairs: dict[tuple[bytes, int], list[tuple[ItemId, ItemId]]] = defaultdict(list)
        for row in batch.to_pylist():
            if row["item"] is not None:
                place = (row["party"], bucket_nibbles(row["messages"]))
                pairs[place].append((item_from_text(row["detail"]), ItemId(row["item"])))
        parcels = [
            parcel
            for (party, nibbles), each in pairs.items()
            for parcel in _questions(PartyKey(party), nibbles, each, LACKED)
        ]
        yield parcels_batch(parcels)


@dataclass(frozen=True)
class Reducing:
    """The task: parcels, sorted by bucket, into files."""

    place: Place
    turn: int
    models: str | None
    absent: str | None = None
    admission: str | None = None
    history: bool = False
    lost: str | None = None
    trees: bool = False
    """Whether to make the subtrees of the buckets too. Later rounds leave that to the snapshot."""
    places: bool = False
    """Whether to tell which placements came and went."""
    lake: str = ""
    bases: str | None = None
    """Where the names of the epochs are that parties stand on."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        results = _Results(self.place, self.turn)
        subtrees = Subtrees(self.place, self.turn)
        absent = None if self.absent is None else absent_items(self.absent)
        lost = None if self.lost is None else absent_items(self.lost)
        writers = None if self.admission is None else writers_of(read_arrow(self.admission))
        factory = model_factory(self.models)
        bases = None if self.bases is None else Bases(self.lake, read_arrow(self.bases), factory)
        reports: list[dict[str, Any]] = []
        for chunk in chunks_of(batches, reports):
            work = chunk.filter(pc.greater(chunk["rows"], 0))
            if not work.num_rows:
                continue
            nibbles, previous = self._previous(chunk, work)
            bucket = unpack(work, previous)
            reduced = reduce_bucket(
                bucket, factory, absent=absent, lost=lost, writers=writers, history=self.history, bases=bases
            )
            results.add(reduced, previous, nibbles)
            if self.places:
                # A later round may not know what an earlier one said of an item.
                every = self.absent is not None
                found = place_changes(reduced.states, previous, nibbles, self.turn, every=every)
                results.tables["place_changes"].append(found)
            if self.trees:
                before = TopsBefore(self.place.out, notes_in(chunk))
                subtrees.add_changed(reduced.states, previous, nibbles, before.nodes)
        files = results.write()
        for kind, named in subtrees.write().items():
            files[kind] = [*files.get(kind, ()), *named]
        blocks = 0
        for told in reports:
            blocks += told["blocks"]
            files["rejects"] += [NamedFile(**file) for file in told["rejects"]]
        yield named_rows({**files, "blocks": [NamedFile("", "", 0, blocks)]})

    def _previous(self, chunk: pa.Table, work: pa.Table) -> tuple[dict[bytes, int], pa.Table]:
        """The states before of the buckets that have work."""
        buckets: dict[bytes, set[str]] = defaultdict(set)
        for party, bucket in zip(work["party"].to_pylist(), work["bucket"].to_pylist(), strict=True):
            buckets[party].add(bucket)
        nibbles = {party: len(next(iter(each))) for party, each in buckets.items()}
        notes: dict[int, list[str]] = defaultdict(list)
        for party, bucket, note in notes_in(chunk):
            if bucket in buckets.get(party, ()):
                notes[nibbles[party]].append(note)
        tables = []
        for depth, each in notes.items():
            same = {party: found for party, found in buckets.items() if nibbles[party] == depth}
            table, _ = read_states(self.place.out, states_noted(each), same)
            tables.append(table)
        return nibbles, pa.concat_tables(tables) if tables else ITEM_STATES.empty_table()


@dataclass(slots=True)
class _Results:
    """Collects what buckets came to, and writes it as files."""

    place: Place
    turn: int
    states: list[tuple[bytes, str, pa.Table]] = field(default_factory=list)
    tables: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))

    def add(self, reduced: Reduced, previous: pa.Table, nibbles: dict[bytes, int]) -> None:
        self.states += by_bucket(reduced.states, nibbles)
        for kind in ("rejects", "moves", "claims", "hard", "edges", "blobs"):
            self.tables[kind].append(getattr(reduced, kind))
        self.tables["flagged"].append(flagged(reduced.edges))
        self.tables["flagged"].append(_gone(reduced.states, previous))

    def write(self) -> dict[str, list[NamedFile]]:
        files = StateWriter(self.place, self.turn).write(self.states)
        for kind, schema in _SCHEMAS.items():
            tables = [self._with_turn(table) if kind == "moves" else table for table in self.tables[kind]]
            batches = (batch for table in tables for batch in table.to_batches())
            file = self.place.write(kind, schema, batches)
            files[kind] += [] if file is None else [file]
        return files

    def _with_turn(self, moves: pa.Table) -> pa.Table:
        return moves.set_column(1, MOVES.field("turn"), pa.repeat(pa.scalar(self.turn), moves.num_rows))


_SCHEMAS = {
    "rejects": REJECTS,
    "moves": MOVES,
    "claims": CLAIMS,
    "hard": HARD_ITEMS,
    "edges": EDGES,
    "flagged": EDGES,
    "blobs": BLOBS,
    "place_changes": PLACE_CHANGES,
}


def _gone(states: pa.Table, previous: pa.Table) -> pa.Table:
    """Items that existed and do no more."""
    gone = states.filter(states["gone"])
    if not gone.num_rows:
        return EDGES.empty_table()
    kept = previous.filter(pc.invert(previous["gone"]))
    existed = set(zip(kept["party"].to_pylist(), kept["item"].to_pylist(), strict=True))
    places = zip(gone["party"].to_pylist(), gone["item"].to_pylist(), strict=True)
    return rows_table([(*place, None, GONE, False, True) for place in places if place in existed], EDGES)


def _without_superseded(
    inputs: Inputs, rounds: list[dict[str, list[NamedFile]]], kind: str, schema: pa.Schema, again: Again
) -> list[NamedFile]:
    """The files of a kind, those of earlier rounds without what later rounds say anew."""
    kept: list[NamedFile] = []
    for number, files in enumerate(rounds, 1):
        for file in files.get(kind, ()):
            table = read_table(inputs.place.out, file, schema)
            places = zip(table["party"].to_pylist(), table["item"].to_pylist(), strict=True)
            stays = [again.rounds.get((PartyKey(party), ItemId(item or b"")), 0) <= number for party, item in places]
            if all(stays):
                kept.append(file)
            elif any(stays):
                written = inputs.place.write(kind, schema, table.filter(pa.array(stays)).to_batches())
                kept += [] if written is None else [written]
    if kind == "moves" and again.history:
        rows = [(party, inputs.turn, 0, b"", 0, 0, item, -1, None) for party, item in sorted(again.history)]
        written = inputs.place.write(kind, schema, rows_table(rows, schema).to_batches())
        kept += [] if written is None else [written]
    return kept
