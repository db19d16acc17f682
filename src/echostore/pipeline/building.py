"""One build: the stages over some parties of a lake, on top of what the last commit kept of them, into files.

    control ─► order ─► reduce ─► snapshot ─► tables and rows of parties
       │         │         │
       │         │         └─ states before: index of the last commit
       │         └─ cuts before                         nothing below them is read again, unless
       └─ admission before                              its standing changed

Nothing here is visible to readers: `echostore.pipeline.run` commits what builds wrote.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from echostore.pipeline import kept
from echostore.pipeline.clock import Clock
from echostore.pipeline.counting import MOVED, Comparing, Counting
from echostore.pipeline.lake.versions import LakeVersion
from echostore.pipeline.output.block_rows import block_table, message_table, without_malformed
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.party_rows import Converting, member_rows, reject_rows
from echostore.pipeline.output.placing import placements
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.results import party_results
from echostore.pipeline.output.table_schemas import (
    BLOCKS,
    MEMBERS,
    MESSAGES,
    PARTIES,
    PLACEMENTS,
    REJECTS,
    table_kind,
)
from echostore.pipeline.output.writing import Collect, Place, write_frames, write_item_tables
from echostore.pipeline.rejecting import all_rejects, fork_places, lacking
from echostore.pipeline.schemas import CLAIMS, ITEM_STATES, MOVES, PLACE_TOPS, ROOTS, STATE_INDEX, TOPS
from echostore.pipeline.schemas import REJECTS as STAGE_REJECTS
from echostore.pipeline.stages.bundles import unbundled
from echostore.pipeline.stages.by_party import PARTY_TASK_BYTES, run_by_party
from echostore.pipeline.stages.control import CONTROL_HERE_BYTES, ControlTables, Limits, fold_control
from echostore.pipeline.stages.control import TABLES as CONTROL_TABLES
from echostore.pipeline.stages.frames import Rows, as_frame, chosen, frame_of, gathered, mapped, width_of
from echostore.pipeline.stages.order import OrderTables, order_blocks
from echostore.pipeline.stages.order_here import order_blocks_here
from echostore.pipeline.stages.planning import Floors
from echostore.pipeline.stages.reduce import TURNS, Inputs, Outcome, reduce_items
from echostore.pipeline.stages.reduce_here import reduce_whole_here
from echostore.pipeline.stages.seeding import StatesBefore, seed
from echostore.pipeline.stages.snapshot import SnapshotInputs, build_snapshots
from echostore.pipeline.stages.standing import STANDING, Bases, above_bases, check_reached

Files = dict[str, list[NamedFile]]

FORGOTTEN = {"state_index": STATE_INDEX, "tops": TOPS, "place_tops": PLACE_TOPS, "moves": MOVES, "claims": CLAIMS}
"""Kinds whose rows of a party are dropped when it is built from scratch."""

UNNAMED = frozenset({"rejects", "place_changes"})
"""Kinds that later stages of the build read, and that no commit names."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all builds of a run share."""

    spark: Any | None
    """The session that stages run on; None: in this process, and all rows are tables."""
    version: LakeVersion
    out: Path
    base: Commit | None
    number: int
    place: Place
    models: str | None
    tables: tuple[str, ...]
    collect: Collect
    clock: Clock
    limits: Limits = field(default_factory=dict)
    at: str = ""
    builds: Mapping[bytes, int] = field(default_factory=dict)
    """The commit of the last build of every party that was built."""

    def before(self, kind: str) -> tuple[NamedFile, ...]:
        return () if self.base is None else self.base.files.get(kind, ())

    @property
    def turn(self) -> int:
        return self.number * TURNS


@dataclass(slots=True)
class Built:
    """What a build wrote: new files by kind, and those of the last commit that it had to write anew."""

    files: Files
    instead: dict[str, tuple[NamedFile, ...]]
    keys: frozenset[bytes]
    """The parties, with their children."""


def build(job: Job, parties: frozenset[bytes] | None, anew: frozenset[bytes]) -> Built:
    """Build root parties with their children, or all of the lake."""
    control = order = None
    try:
        with job.clock.stage("control") as told:
            control = fold_control(job.spark, job.version, parties, job.limits, CONTROL_HERE_BYTES)
            stages = _Stages.of(job, control, parties)
            told.rows = len(stages.keys)
        with job.clock.stage("order") as told:
            scratch = anew | frozenset(job.limits)
            rebased = _rebased(job, stages, scratch)
            scratch |= (stages.bases.hashes().keys() - job.builds.keys()) | (rebased - stages.bases.hashes().keys())
            rebased -= scratch
            known = _Known.of(job, stages.keys, scratch | rebased)
            # Parties that are built from scratch or rebased go on from the epoch that they stand on, if they do.
            cuts = _with_cuts(known.cuts, stages.bases.only(scratch | rebased), Bases.order_cuts)
            floors = stages.bases.floors()
            order = _ordered(job, stages.control, parties, cuts, floors)
            stages.order = _Order.of(job, order)
            told.rows = _blocks(order.plan.pieces)
            moved, lost = _compared(job, stages, known, order)
            if lost:
                scratch |= lost
                known = _Known.of(job, stages.keys, scratch | rebased)
        return _fold(job, stages, known, moved, scratch & stages.keys, rebased)
    finally:
        for tables in (order, control):
            if tables is not None:
                tables.close()


def _ordered(
    job: Job, control: ControlTables, parties: frozenset[bytes] | None, cuts: Rows | None, floors: Floors
) -> OrderTables:
    if job.spark is None:
        return order_blocks_here(job.version, control, parties, job.limits, cuts, floors)
    return order_blocks(job.spark, job.version, control, parties, job.limits, cuts, floors=floors)


def _blocks(pieces: pa.Table) -> int:
    """Blocks that were verified: those that no earlier commit has."""
    fresh = pieces.filter(pa.compute.invert(pieces["old"]))
    return int((fresh["end"].to_numpy() - fresh["start"].to_numpy()).sum())


@dataclass(slots=True)
class _Stages:
    """What the stages said of the parties of this build; small tables are here, large ones in Spark."""

    control: ControlTables
    rows: dict[str, Rows]
    keys: frozenset[bytes]
    whole: bool
    bases: Bases
    order: "_Order" = field(init=False)

    @staticmethod
    def of(job: Job, control: ControlTables, parties: frozenset[bytes] | None) -> "_Stages":
        """Control folds more parties than it is asked for where it has to find out whose children there are."""
        bundles = control.bundles
        size = job.version.runs(parties=parties, control=True)["bytes"].to_numpy().sum()
        if size <= PARTY_TASK_BYTES:
            bundles = gathered(bundles)
        rows = {name: unbundled(bundles, name, schema) for name, schema in CONTROL_TABLES.items()}
        names = gathered(chosen(rows["parties"], ["party", "root"])).to_pylist()
        keys = frozenset(
            row["party"] for row in names if parties is None or row["party"] in parties or row["root"] in parties
        )
        if len(keys) < len(names):
            rows = {name: _of_parties(each, keys) for name, each in rows.items()}
        bases = Bases.of(str(job.version.lake.path), rows["parties"])
        return _Stages(ControlTables(job.spark, rows, control.bundles), rows, keys, parties is None, bases)

    def runs(self, job: Job, *, control: bool | None = False) -> pa.Table:
        return job.version.runs(parties=None if self.whole else self.keys, control=control)


@dataclass(frozen=True, slots=True)
class _Order:
    """The tables of order, here where they are small."""

    tables: OrderTables
    cuts: Rows
    timeframe: Rows
    rejects: Rows
    unheld: Rows
    branches: Rows
    tasks: int
    """For steps by party: none when they are done here."""

    @staticmethod
    def of(job: Job, order: OrderTables) -> "_Order":
        here = isinstance(order.rows["cuts"], pa.Table)
        tasks = 0 if here else 4 * width_of(job.spark)
        names = ("cuts", "timeframe", "rejects", "unheld", "branches")
        return _Order(order, **{name: order.rows[name] for name in names}, tasks=tasks)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the last commit kept of the parties that are built on it."""

    cuts: Rows | None
    admission: Rows | None
    rejects: Rows | None

    @staticmethod
    def of(job: Job, keys: frozenset[bytes], scratch: frozenset[bytes]) -> "_Known":
        builds = {party: job.builds[party] for party in keys - scratch if party in job.builds}

        def rows(kind: str, schema: pa.Schema) -> Rows | None:
            return kept.kept_rows(job.spark, job.out, job.base, kind, schema, builds)

        cuts, admission = rows("cuts", kept.KEPT_CUTS), rows("admission", kept.KEPT_ADMISSION)
        return _Known(cuts, admission, rows("rejected", kept.KEPT_REJECTS))


def _rebased(job: Job, stages: _Stages, scratch: frozenset[bytes]) -> frozenset[bytes]:
    """Parties that were built and stand on another epoch now: they go on from that one. Of what was kept of them only
    item states are of use, where they are the same."""
    builds = {party: job.builds[party] for party in stages.keys - scratch if party in job.builds}
    rows = kept.kept_rows(job.spark, job.out, job.base, "standing", kept.KEPT_STANDING, builds)
    before = {} if rows is None else Bases(stages.bases.lake, gathered(rows).select(STANDING.names)).hashes()
    now = stages.bases.hashes()
    return frozenset(party for party in builds if before.get(party) != now.get(party))


def _compared(job: Job, stages: _Stages, known: _Known, order: OrderTables) -> tuple[pa.Table, frozenset[bytes]]:
    """Blocks whose standing changed, and parties that have to be built from scratch because a feed lost ground."""
    if known.cuts is None or known.admission is None:
        return MOVED.empty_table(), frozenset()
    parts = {
        "cut_before": _data(known.cuts, ["party", "feed", "length", "link"]),
        "cut": _data(stages.order.cuts, ["party", "feed", "length", "link"]),
        "admission_before": _data(known.admission, ["party", "feed", "start", "end", "role"]),
        "admission": _data(stages.rows["admission"], ["party", "feed", "start", "end", "role"]),
    }
    found = gathered(run_by_party(job.spark, parts, Comparing(order.plan.forked), MOVED, stages.order.tasks))
    lost = found.filter(found["lost"])
    return found.filter(pa.compute.invert(found["lost"])), frozenset(lost["party"].to_pylist())


def _fold(
    job: Job,
    stages: _Stages,
    known: _Known,
    moved: pa.Table,
    scratch: frozenset[bytes],
    rebased: frozenset[bytes],
) -> Built:
    """From ordered blocks to files. Of rebased parties the states stay that their epoch has as well."""
    instead = {}
    for kind, schema in FORGOTTEN.items():
        gone = scratch | rebased if kind == "moves" else scratch
        instead[kind] = kept.forget_parties(job.spark, job.place, job.before(kind), kind, schema, gone, job.collect)
    moved = moved.filter(pa.array([party not in scratch for party in moved["party"].to_pylist()], pa.bool_()))
    moved = above_bases(moved, stages.bases)
    ordered = stages.order
    seeded = stages.bases.only(scratch | rebased)
    seeds: Files = {}
    if seeded:
        cuts = _of_parties(_data(ordered.cuts, ["party", "feed", "length"]), frozenset(seeded.hashes()))
        reached = gathered(cuts)
        check_reached(seeded, reached)
        now = dict(zip(*reached.group_by("party").aggregate([("length", "sum")]).to_pydict().values(), strict=True))
        before = StatesBefore(str(job.out), rebased, instead["state_index"], instead["tops"]) if rebased else None
        seeds = seed(job.spark, seeded, job.place, job.turn, job.collect, now, before)
        instead = {kind: (*named, *seeds.get(kind, ())) for kind, named in instead.items()}
    inputs = Inputs(
        spark=job.spark,
        lake=str(job.version.lake.path),
        runs=stages.runs(job),
        cuts=ordered.cuts,
        admission=stages.rows["admission"],
        place=job.place,
        turn=job.turn,
        collect=job.collect,
        models=job.models,
        cuts_before=_with_cuts(known.cuts, seeded, Bases.cuts),
        index_before=instead["state_index"],
        moves_before=instead["moves"],
        claims_before=instead["claims"],
        tops_before=instead["tops"],
        lacking_before=lacking(job.spark, known.rejects),
        moved=frame_of(job.spark, moved.drop_columns(["lost"])) if len(moved) else None,
        bases=stages.bases or None,
        trees=not rebased,
    )
    with job.clock.stage("reduce", before="demux") as told:
        outcome = reduce_whole_here(inputs) if job.spark is None else reduce_items(inputs)
        told.seconds_before = outcome.demux_s
        told.rows = sum(file.rows for file in outcome.files["states"])
        told.rows_before = outcome.blocks
    files: Files = {kind: list(named) for kind, named in outcome.files.items() if kind not in UNNAMED}
    files["states"] = [*seeds.get("states", ()), *files["states"]]
    files["blobs"] = [*seeds.get("blobs", ()), *files["blobs"]]
    index = (*instead["state_index"], *outcome.files["state_index"])
    moves = (*instead["moves"], *outcome.files["moves"])
    with job.clock.stage("snapshot") as told:
        snapshots = build_snapshots(
            SnapshotInputs(
                spark=job.spark,
                parties=stages.rows["parties"],
                timeframe=ordered.timeframe,
                cuts=ordered.cuts,
                place=job.place,
                turn=job.turn,
                collect=job.collect,
                models=job.models,
                index=index,
                tops=(*instead["tops"], *outcome.files["tops"]),
                moves=moves,
                place_tops=instead["place_tops"],
                place_changes=(*seeds.get("place_changes", ()), *outcome.files["place_changes"]),
                again=outcome.again,
            )
        )
        told.rows = sum(file.rows for file in snapshots.files.get("blobs", ()))
    with job.clock.stage("tables") as told:
        forks = fork_places(stages.rows["admission"])
        rejects = all_rejects(job, stages.order.rejects, stages.rows["rejects"], known.rejects, moved, outcome, forks)
        for found in (
            {kind: named for kind, named in snapshots.files.items() if kind != "roots"},
            _small_files(job, stages, rejects, snapshots.files.get("roots", []), scratch),
            _item_tables(job, outcome, seeds.get("states", [])),
            _block_tables(job, stages, rejects),
            _placements(job, stages, index, moves),
        ):
            for kind, named in found.items():
                files.setdefault(kind, []).extend(named)
        told.rows = sum(file.rows for kind, named in files.items() if kind.startswith("table_") for file in named)
    changed = {kind: named for kind, named in instead.items() if named != job.before(kind)}
    return Built(files, changed, stages.keys)


# files


def _small_files(job: Job, stages: _Stages, rejects: Rows, roots: list[NamedFile], scratch: frozenset[bytes]) -> Files:
    """Cuts, admission, rejects, members and the rows of parties."""
    rows: dict[str, tuple[Rows, pa.Schema]] = {
        "cuts": (_dated(_joined(stages.order.cuts, stages.rows["cuts"]), job.number), kept.KEPT_CUTS),
        "admission": (_dated(stages.rows["admission"], job.number), kept.KEPT_ADMISSION),
        "rejected": (rejects, kept.KEPT_REJECTS),
        "standing": (_dated(stages.bases.rows, job.number), kept.KEPT_STANDING),
        "parties": (_party_rows(job, stages, rejects, roots, scratch), PARTIES),
    }
    if "members" in job.tables:
        converting = Converting(member_rows, job.number)
        rows[table_kind("members")] = mapped(stages.rows["members"], converting, MEMBERS), MEMBERS
    if "rejects" in job.tables:
        shown = chosen(rejects, STAGE_REJECTS.names)
        rows[table_kind("rejects")] = mapped(shown, Converting(reject_rows, job.number), REJECTS), REJECTS
    here = {kind: each for kind, each in rows.items() if isinstance(each[0], pa.Table)}
    files: Files = {}
    for kind, (table, schema) in here.items():
        written = job.place.write(kind, schema, table.select(schema.names).to_batches())
        files[kind] = [] if written is None else [written]
    frames = {kind: each for kind, each in rows.items() if kind not in here}
    return files | (write_frames(job.spark, job.place, frames, job.collect) if frames else {})


def _party_rows(job: Job, stages: _Stages, rejects: Rows, roots: list[NamedFile], scratch: frozenset[bytes]) -> Rows:
    about = chosen(stages.rows["parties"], ["party", "root", "title"])
    found = [read_table(job.out, file, ROOTS) for file in roots]
    parts = {
        "about": _renamed(about, {"root": "root_party"}),
        "cut": _data(stages.order.cuts, ["party", "feed", "length", "held", "state"]),
        "admission": _data(stages.rows["admission"], ["party", "feed", "start", "end", "role"]),
        "outside": _data(stages.order.unheld, ["party", "feed", "start", "end"]),
        "branch": chosen(stages.order.branches, ["party", "feed", "start", "end"]),
        "control_cut": _control_cuts(stages),
        "malformed": _malformed(rejects),
        "root": _renamed(pa.concat_tables([ROOTS.empty_table(), *found]), {"root": "bytes"}),
        "last": _last_rows(job, stages.keys),
    }
    return run_by_party(job.spark, parts, Counting(job.number, job.at, scratch), PARTIES, stages.order.tasks)


def _control_cuts(stages: _Stages) -> Rows:
    """How far control is folded; a child party's control is its parent's."""
    names = chosen(stages.rows["parties"], ["party", "root"])
    cuts = _renamed(chosen(stages.rows["cuts"], ["party", "feed", "length", "link"]), {"party": "root"})
    joined = names.join(cuts, "root", join_type="inner") if isinstance(names, pa.Table) else names.join(cuts, "root")
    return chosen(joined, ["party", "feed", "length", "link"])


def _last_rows(job: Job, keys: frozenset[bytes]) -> pa.Table:
    """What the last commit says of the parties of this build."""
    results = party_results(job.out, job.base, keys) if job.base is not None else iter(())
    rows = [{"party": r.party, "epoch": r.epoch, "cid_before": r.cid, "since": r.since} for r in results]
    names = {"party": pa.binary(), "epoch": pa.int64(), "cid_before": pa.string(), "since": pa.int64()}
    return pa.Table.from_pylist(rows, pa.schema(names))


def _item_tables(job: Job, outcome: Outcome, seeded: list[NamedFile]) -> Files:
    """Rows of the items that were folded, and of those that came with an epoch and stayed as they were."""
    superseded: dict[str, frozenset[tuple[bytes, bytes]]] = {}
    if seeded:
        names = ["party", "item"]
        folded = [read_table(job.out, file, ITEM_STATES, columns=names) for file in outcome.files["states"]]
        found = frozenset(
            place for table in folded for place in zip(*(table[name].to_pylist() for name in names), strict=True)
        )
        superseded = {file.path: found for file in seeded}
    if outcome.again.rounds:
        # Items that were folded again: only what the last of their rounds wrote is shown.
        for file, turn in _state_files(job, outcome.files["state_index"]).items():
            later = ((bytes(p), bytes(i)) for (p, i), last in outcome.again.rounds.items() if last > turn - job.turn)
            superseded[file.path] = frozenset(later)
    return write_item_tables(
        job.spark,
        job.place,
        [*seeded, *outcome.files["states"]],
        job.number,
        models=job.models,
        tables=job.tables,
        collect=job.collect,
        superseded=superseded,
    )


def _block_tables(job: Job, stages: _Stages, rejects: Rows) -> Files:
    lake, ordered = str(job.version.lake.path), stages.order.tables
    frames: dict[str, tuple[Any, pa.Schema]] = {}
    if "blocks" in job.tables:
        blocks = block_table(job.spark, lake, stages.runs(job, control=None), job.number)
        frames[table_kind("blocks")] = blocks, BLOCKS
    if "messages" in job.tables:
        messages = message_table(job.spark, lake, stages.runs(job), stages.control, ordered, job.number)
        refused = as_frame(job.spark, _malformed(rejects))
        frames[table_kind("messages")] = without_malformed(messages, refused), MESSAGES
    return write_frames(job.spark, job.place, frames, job.collect, apart=True) if frames else {}


def _placements(job: Job, stages: _Stages, index: Iterable[NamedFile], moves: tuple[NamedFile, ...]) -> Files:
    if "items" not in job.tables or not moves:
        return {}
    states = _state_files(job, index)
    frame = placements(job.spark, str(job.out), moves, states, stages.keys, job.number)
    kind = table_kind("placements")
    return {} if frame is None else write_frames(job.spark, job.place, {kind: (frame, PLACEMENTS)}, job.collect)


def _state_files(job: Job, index: Iterable[NamedFile]) -> dict[NamedFile, int]:
    """The files of item states that an index names, each with its turn."""
    found: dict[NamedFile, int] = {}
    for file in index:
        for row in read_table(job.out, file, STATE_INDEX).to_pylist():
            found[NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])] = row["turn"]
    return found


# tables here and in Spark, alike


def _with_cuts(before: Rows | None, bases: Bases, cuts_of: Callable[[Bases], pa.Table]) -> Rows | None:
    """The cuts before, with those of epochs that parties go on from."""
    if not bases:
        return before
    cuts = cuts_of(bases)
    if before is None:
        return cuts
    if isinstance(before, pa.Table):
        return pa.concat_tables([before.select(cuts.column_names).cast(cuts.schema), cuts])
    return before.select(*cuts.column_names).unionByName(as_frame(before.sparkSession, cuts))


def _data(rows: Rows, names: list[str]) -> Rows:
    """Rows of data feeds."""
    if isinstance(rows, pa.Table):
        return rows.filter(pa.compute.invert(rows["control"])).select(names)
    return rows.filter("NOT control").select(*names)


def _malformed(rejects: Rows) -> Rows:
    """Messages that were refused as a whole."""
    names = ["party", "feed", "seq"]
    if isinstance(rejects, pa.Table):
        whole = pa.compute.equal(rejects["position"], -1)
        return rejects.filter(pa.compute.and_(whole, pa.compute.equal(rejects["reason"], "malformed"))).select(names)
    return rejects.filter("position = -1 AND reason = 'malformed'").select(*names).distinct()


def _of_parties(rows: Rows, keys: frozenset[bytes]) -> Rows:
    if isinstance(rows, pa.Table):
        return rows.filter(pa.compute.is_in(rows["party"], pa.array(sorted(keys), pa.binary())))
    return rows.filter(rows["party"].isin(*sorted(keys)))


def _renamed(rows: Rows, names: dict[str, str]) -> Rows:
    if isinstance(rows, pa.Table):
        return rows.rename_columns([names.get(name, name) for name in rows.column_names])
    return rows.withColumnsRenamed(names)


def _joined(one: Rows, other: Rows) -> Rows:
    if isinstance(one, pa.Table) and isinstance(other, pa.Table):
        return pa.concat_tables([one, other.cast(one.schema)])
    spark = (other if isinstance(one, pa.Table) else one).sparkSession
    return as_frame(spark, one).unionByName(as_frame(spark, other))


def _dated(rows: Rows, commit: int) -> Rows:
    if isinstance(rows, pa.Table):
        return rows.append_column(kept.COMMIT, pa.repeat(pa.scalar(commit), len(rows)))
    from pyspark.sql import functions as f

    return rows.withColumn("commit", f.lit(commit).cast("long"))
