"""order: how far every feed can be processed, and why no further. Data runs in; CUTS, TIMEFRAME, REJECTS, UNHELD out.

    VERIFIED ──► hold         which pieces hang together, under a head; where feeds fork        (by party)
             ──► look up      does the block that each dependency names exist, as it says?      (by named feed)
             ──► walk         the first block of each branch that can't be delivered            (by party)
             ──► rounds       cut where a block needs one beyond another cut, until none does
             ──► judge        why each feed stops; what of it counts                            (by party)

The cut is the greatest set of blocks in which every block's dependencies are. Hashes can't form a circle, so it is also
what the kernel's orderer reaches by delivering one block after the other. A way from a block to the cause of its
stopping enters each feed once at most: there are no more rounds than feeds, and mostly none or few.

Nothing of a party's blocks passes through one task: dependencies travel as packed columns to the pieces that they name,
and what the steps by party see is a few rows per piece.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import FeedKey, PartyKey, feed_id
from echostore.kernel.party.admission import reach
from echostore.kernel.party.credentials import Role
from echostore.kernel.reasons import Reason
from echostore.pipeline import schemas
from echostore.pipeline.stages import asserted
from echostore.pipeline.stages.bundles import BUNDLES, unbundled
from echostore.pipeline.stages.by_party import HERE_ROWS_MAX, Tables, run_by_party
from echostore.pipeline.stages.control import ControlTables, Limits
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, gathered, mapped, released, width_of
from echostore.pipeline.stages.lookups import look_up
from echostore.pipeline.stages.party_steps import JUDGING, Judging, holding, walking
from echostore.pipeline.stages.planning import BUCKET_BITS, Before, Floors, Place, Plan, plan_pieces
from echostore.pipeline.stages.rounds import cut_to_closure, stops_of
from echostore.pipeline.stages.twigs import Row
from echostore.pipeline.stages.verify import verify_runs

LOOKUP_TASK_BLOCKS = 400_000
"""Blocks whose dependencies one task looks up: some tens of megabytes of packed columns."""
PARTY_TASK_PIECES = 20_000

NOT_OF_PIECES = ("names", "bucket", "seqs", "named_seqs", "named_links", "named_depths", "backwards")


class OrderTables(Tables):
    """The tables of the order stage, and the plan they were made by. `close` frees what they hold."""

    def __init__(self, spark: Any, rows: Mapping[str, Rows], plan: Plan, rounds: int, kept: tuple[Rows, ...]) -> None:
        super().__init__(spark, rows)
        self.plan = plan
        self.rounds = rounds
        self.kept = kept

    @property
    def cuts(self) -> Any:
        return self.frame("cuts")

    @property
    def timeframe(self) -> Any:
        return self.frame("timeframe")

    @property
    def rejects(self) -> Any:
        """Feeds that ended, as `party.rejected()` lists them, and the first block of each stretch that is not held."""
        return self.frame("rejects")

    @property
    def unheld(self) -> Any:
        return self.frame("unheld")

    @property
    def branches(self) -> Any:
        """Stretches of other branches than the one that counts, held as evidence."""
        return self.frame("branches")

    def close(self) -> None:
        for rows in self.kept:
            released(rows)


def order_blocks(
    spark: Any,
    lake_version: Any,
    control: ControlTables,
    parties: Collection[bytes] | None = None,
    limits: Limits | None = None,
    previous: Rows | None = None,
    here_rows_max: int = HERE_ROWS_MAX,
    floors: Floors | None = None,
) -> OrderTables:
    """Order the data feeds that control admits. `previous` is the CUTS table of the last commit, and of epochs whose
    items are taken up now; `floors` are the cuts of all epochs that parties stand on.

    Feeds whose cut is now below the previous one (a fork that control does not know of) have fewer blocks than before.
    """
    lake = str(lake_version.lake.path)
    admission = _of_data(control.rows["admission"], ["party", "feed", "start", "end", "role"])
    runs, unadmitted = split_admitted(wanted_runs(lake_version, control, parties), admission)
    width = width_of(spark)
    plan = plan_pieces(
        runs,
        before=_before(previous),
        limits=limits_of(runs, limits or {}, admission),
        floors=floors,
        tasks_min=2 * width,
    )
    tasks = 0 if _rows_expected(plan) <= here_rows_max else max(width, len(plan.pieces) // PARTY_TASK_PIECES)
    base = _base(spark, previous, plan)
    base = base if tasks else gathered(base)

    verified = verify_runs(spark, lake, plan.pieces).persist()
    fresh = verified.filter("names IS NULL").drop(*NOT_OF_PIECES)
    holdings = run_by_party(spark, {"fresh": fresh, **known_pieces(plan)}, holding, BUNDLES, tasks)
    held = unbundled(holdings, "held", schemas.HELD)
    held = held.persist() if tasks else held
    named = _look_up(spark, lake, verified, held, control.targets, base, plan, width).persist()
    ends = named.select("party", "feed", "piece", *Row._fields, "last_link")
    ends = ends if tasks else gathered(ends)
    twigs = run_by_party(spark, {"held": held, "named": ends, "base": base}, walking, schemas.TWIGS, tasks)
    cuts, rounds = cut_to_closure(spark, named, held, twigs)
    parts = {
        "feed": feeds_in(runs, plan),
        "held": held,
        "twig": twigs,
        "cut": cuts,
        "stop": stops_of(spark, named, held, cuts),
        "named": ends,
        "base": base,
        "admission": admission,
    }
    judged = run_by_party(spark, parts, Judging(lake), BUNDLES, tasks)
    told = {name: unbundled(judged, name, schema) for name, schema in JUDGING.items()}
    unheld, rejects = unbundled(holdings, "unheld", schemas.UNHELD), told["rejects"]
    columns = ["party", "feed", "start", "end"]
    if tasks:
        told["unheld"] = unheld.unionByName(frame_of(spark, unadmitted))
        told["rejects"] = rejects.unionByName(mapped(told["unheld"], as_rejects, schemas.REJECTS))
        told["branches"] = held.filter("NOT main").select(*columns)
    else:
        told["unheld"] = pa.concat_tables([unheld, unadmitted])
        more = pa.Table.from_batches(as_rejects(iter(told["unheld"].to_batches())), schemas.REJECTS)
        told["rejects"] = pa.concat_tables([rejects, more])
        told["branches"] = held.filter(pc.invert(held["main"])).select(columns)
    return OrderTables(spark, told, plan, rounds, (verified, holdings, held, named, twigs, judged))


# what is wanted


def wanted_runs(lake_version: Any, control: ControlTables, parties: Collection[bytes] | None) -> pa.Table:
    """The data runs of some parties and their children, or of all."""
    found: pa.Table = lake_version.runs(parties=_wanted(control, parties), control=False)
    return found


def _wanted(control: ControlTables, parties: Collection[bytes] | None) -> list[bytes] | None:
    if parties is None:
        return None
    asked = set(parties)
    known = control.rows["parties"]
    rows = gathered(known.select(["party", "root"]) if isinstance(known, pa.Table) else known.select("party", "root"))
    return [row["party"] for row in rows.to_pylist() if row["party"] in asked or row["root"] in asked]


def _of_data(rows: Rows, names: list[str]) -> pa.Table:
    """Rows of data feeds, here."""
    if isinstance(rows, pa.Table):
        return rows.filter(pc.invert(rows["control"])).select(names)
    return rows.filter("NOT control").select(*names).toArrow()


def split_admitted(runs: pa.Table, admission: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The runs of admitted feeds, and the others as rows of UNHELD."""
    admitted = set(_places(admission))
    known = np.array([place in admitted for place in _places(runs)], bool)
    others = runs.filter(pa.array(~known)).select(["party", "feed", "control", "start", "end"])
    count = len(others)
    others = others.append_column("reason", pa.array([str(Reason.UNADMITTED)] * count, pa.string()))
    others = others.append_column("detail", pa.array(["no credential admits this data feed"] * count, pa.string()))
    return runs.filter(pa.array(known)), others.cast(schemas.UNHELD)


def _places(rows: pa.Table) -> list[Place]:
    return list(zip(rows["party"].to_pylist(), rows["feed"].to_pylist(), strict=True))


def feeds_in(runs: pa.Table, plan: Plan) -> pa.Table:
    """The feeds of which something is said: those with blocks, and those of which an epoch has all that there is."""
    columns = ["party", "feed"]
    both = pa.concat_tables([runs.select(columns), plan.pieces.select(columns)], promote_options="permissive")
    return both.group_by(columns).aggregate([])


def _before(previous: Rows | None) -> dict[Place, Before]:
    """Where the last commit left the feeds."""
    if previous is None:
        return {}
    rows = _of_data(previous, ["party", "feed", "length", "link", "depth"])
    return {
        (row["party"], row["feed"]): Before(row["length"], row["link"], row["depth"])
        for row in rows.to_pylist()
        if row["length"]
    }


def limits_of(runs: pa.Table, limits: Limits, admission: pa.Table) -> Mapping[Place, int]:
    """Of how many blocks of each feed a job wants to know, where it is about a moment of a party."""
    if not limits:
        return {}
    counted: dict[Place, list[tuple[int, int | None]]] = {}
    for row in admission.to_pylist():
        if row["role"] not in (None, Role.READER.label):
            counted.setdefault((row["party"], row["feed"]), []).append((row["start"], row["end"]))
    found = {}
    for party, feed in set(_places(runs)):
        if party in limits:
            end = limits[PartyKey(party)].data.get(feed_id(FeedKey(feed)), 0)
            limit = reach(end, counted.get((party, feed), ()))
            if limit is not None:
                found[party, feed] = limit
    return found


def _rows_expected(plan: Plan) -> int:
    """How many rows the steps by party may see: each piece can name each feed of its party."""
    pieces = plan.pieces.group_by("party").aggregate([("piece", "count"), ("feed", "count_distinct")])
    return int((pieces["piece_count"].to_numpy() * (1 + pieces["feed_count_distinct"].to_numpy())).sum())


# what is known from the last commit


def known_pieces(plan: Plan) -> dict[str, pa.Table]:
    """Old pieces, and where their feeds go on."""
    old = plan.pieces.filter(plan.pieces["old"]).select(["party", "feed", "piece", "start", "end", "file", "row"])
    places, before = [place for place, _ in plan.bases.values()], [at for _, at in plan.bases.values()]
    base = bases_of(plan).append_column("end", pa.array([at.length for at in before], pa.int64()))
    base = base.append_column("last_link", pa.array([at.link for at in before], pa.binary()))
    base = base.append_column("last_depth", pa.array([at.depth for at in before], pa.int64()))
    assert len(base) == len(places), f"{len(base)} of {len(places)} feeds go on"
    return {"old": old, "base": base}


def bases_of(plan: Plan) -> pa.Table:
    places = [place for place, _ in plan.bases.values()]
    columns = {
        "party": pa.array([place[0] for place in places], pa.binary()),
        "feed": pa.array([place[1] for place in places], pa.binary()),
        "piece": pa.array(list(plan.bases), pa.int64()),
    }
    return pa.table(columns)


def floor_columns(plan: Plan) -> dict[str, pa.Array]:
    """Where the floors of `plan.bases` are; nulls where there is none."""
    found = [plan.floors.get(place) for place, _ in plan.bases.values()]
    return {
        "floor": pa.array([None if at is None else at.length for at in found], pa.int64()),
        "floor_link": pa.array([None if at is None else at.link for at in found], pa.binary()),
        "floor_depth": pa.array([None if at is None else at.depth for at in found], pa.int64()),
    }


def _base(spark: Any, previous: Rows | None, plan: Plan) -> Rows:
    """Of the feeds that go on: their first piece, where their floor is, and what they had said about others."""
    bases = bases_of(plan)
    for name, column in floor_columns(plan).items():
        bases = bases.append_column(name, column)
    if previous is None or not plan.bases:
        for name in asserted.COLUMNS:
            bases = bases.append_column(name, pa.array([b""] * len(bases), pa.binary()))
        return bases
    columns = ["party", "feed", *asserted.COLUMNS]
    if isinstance(previous, pa.Table):
        return bases.join(_of_data(previous, columns), ["party", "feed"], join_type="inner")
    return frame_of(spark, bases).join(previous.filter("NOT control").select(*columns), ["party", "feed"])


def _look_up(
    spark: Any, lake: str, verified: Any, held: Rows, control_targets: Any, base: Rows, plan: Plan, width: int
) -> Any:
    dependencies = verified.filter("names IS NOT NULL")
    if plan.forked and plan.bases:
        forked = frozenset((party, bytes(feed_id(FeedKey(feed)))) for party, feed in plan.forked)
        again = mapped(as_frame(spark, base), asserted.AboutForked(forked), schemas.VERIFIED)
        dependencies = dependencies.unionByName(again)
    if isinstance(held, pa.Table):
        targets = pa.Table.from_batches(as_targets(iter(held.to_batches())), schemas.TARGETS)
    else:
        targets = mapped(held, as_targets, schemas.TARGETS)
    fresh = plan.pieces.filter(pc.invert(plan.pieces["old"]))
    blocks = int((fresh["end"].to_numpy() - fresh["start"].to_numpy()).sum())
    return look_up(
        lake,
        dependencies,
        as_frame(spark, targets).unionByName(control_targets),
        max(width, blocks // LOOKUP_TASK_BLOCKS),
    )


def as_targets(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = [
            {
                **{name: row[name] for name in ("party", "twig", "path", "start", "end", "file", "row")},
                "names": feed_id(row["feed"]),
                "bucket": row["start"] >> BUCKET_BITS,
            }
            for row in batch.to_pylist()
        ]
        yield pa.RecordBatch.from_pylist(rows, schemas.TARGETS)


def as_rejects(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One reject per stretch that is not held, at its first block."""
    for batch in batches:
        rows = [
            {
                "party": row["party"],
                "feed": feed_id(row["feed"]),
                "seq": row["start"],
                "position": -1,
                "reason": row["reason"],
                "detail": f"{row['detail']} ({row['end'] - row['start']} blocks)",
            }
            for row in batch.to_pylist()
        ]
        yield pa.RecordBatch.from_pylist(rows, schemas.REJECTS)
