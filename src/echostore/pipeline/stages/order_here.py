"""order, in one process: what `stages.order` does on Spark, for a small lake and for parties of which little is new.

A micro-batch of a stream has a few thousand blocks, as has a small lake, and a dozen Spark jobs would cost more than all
the work in them. The steps are the same functions of Arrow batches in the same order; only what Spark joins and shuffles
there is joined and sorted here.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import FeedKey, feed_id
from echostore.pipeline import schemas
from echostore.pipeline.stages import asserted
from echostore.pipeline.stages.bundles import BUNDLES, unbundled
from echostore.pipeline.stages.by_party import run_by_party
from echostore.pipeline.stages.control import ControlTables, Limits
from echostore.pipeline.stages.lookups import sorted_lookup
from echostore.pipeline.stages.order import (
    NOT_OF_PIECES,
    OrderTables,
    as_rejects,
    as_targets,
    bases_of,
    feeds_in,
    floor_columns,
    known_pieces,
    limits_of,
    split_admitted,
    wanted_runs,
)
from echostore.pipeline.stages.party_steps import Judging, holding, walking
from echostore.pipeline.stages.planning import Before, Floors, Place, Plan, plan_pieces
from echostore.pipeline.stages.rounds import Cutting, Twig, first_beyond, stops_in
from echostore.pipeline.stages.twigs import Row
from echostore.pipeline.stages.verify import Verifying


@dataclass(frozen=True, slots=True)
class OrderRows:
    """The tables of the order stage."""

    cuts: pa.Table
    timeframe: pa.Table
    rejects: pa.Table
    unheld: pa.Table
    branches: pa.Table
    plan: Plan
    rounds: int


def order_blocks_here(
    lake_version: Any,
    control: ControlTables,
    parties: Collection[bytes] | None = None,
    limits: Limits | None = None,
    previous: pa.Table | None = None,
    floors: Floors | None = None,
) -> OrderTables:
    """The same as `stages.order.order_blocks`, without Spark. The tables of control are here."""
    admission = control.rows["admission"]
    runs = wanted_runs(lake_version, control, parties)
    found = order_here(
        str(lake_version.lake.path),
        runs,
        admission,
        control.rows["targets"],
        previous,
        floors,
        limits=limits_of(runs, limits or {}, _standing(admission)),
    )
    names = ("cuts", "timeframe", "rejects", "unheld", "branches")
    return OrderTables(None, {name: getattr(found, name) for name in names}, found.plan, found.rounds, ())


def plan_here(
    runs: pa.Table,
    admission: pa.Table,
    previous: pa.Table | None,
    floors: Floors | None = None,
    limits: Mapping[Place, int] | None = None,
) -> Plan:
    """Which stretches of data runs are new. `admission` is ADMISSION, `previous` the CUTS so far, `floors` the cuts of
    epochs that parties stand on, and `limits` how many blocks of a feed are wanted."""
    admitted = split_admitted(runs, _standing(admission))[0]
    return plan_pieces(admitted, before=_before(previous), limits=limits, floors=floors)


def fresh_pieces(plan: Plan) -> pa.Table:
    """The pieces that have to be verified."""
    return plan.pieces.filter(pc.invert(plan.pieces["old"]))


def order_here(
    lake: str,
    runs: pa.Table,
    admission: pa.Table,
    control_targets: pa.Table,
    previous: pa.Table | None,
    floors: Floors | None = None,
    verified: pa.Table | None = None,
    limits: Mapping[Place, int] | None = None,
) -> OrderRows:
    """Order data runs. `verified` is VERIFIED of the fresh pieces of `plan_here`, where others have verified them."""
    standing = _standing(admission)
    plan = plan_here(runs, admission, previous, floors, limits)
    runs, unadmitted = split_admitted(runs, standing)
    base = _base(previous, plan)
    if verified is None:
        verified = pa.Table.from_batches(Verifying(lake)(iter(fresh_pieces(plan).to_batches())), schemas.VERIFIED)
    of_pieces = pc.is_null(verified["names"])
    fresh = verified.filter(of_pieces).drop_columns(list(NOT_OF_PIECES))
    holdings = run_by_party(None, {"fresh": fresh, **known_pieces(plan)}, holding, BUNDLES, 0)
    held = unbundled(holdings, "held", schemas.HELD)
    named = _look_up(lake, verified.filter(pc.invert(of_pieces)), held, control_targets, base, plan)
    ends = named.select(["party", "feed", "piece", *Row._fields, "last_link"])
    twigs = run_by_party(None, {"held": held, "named": ends, "base": base}, walking, schemas.TWIGS, 0)
    cutting = Cutting.of(twigs)
    rounds = _close(cutting, named, held, twigs)
    cuts = cutting.table()
    parts = {
        "feed": feeds_in(runs, plan),
        "held": held,
        "twig": twigs,
        "cut": cuts,
        "stop": _stops(named, held, cuts),
        "named": ends,
        "base": base,
        "admission": standing,
    }
    judged = run_by_party(None, parts, Judging(lake), BUNDLES, 0)
    unheld = pa.concat_tables([unbundled(holdings, "unheld", schemas.UNHELD), unadmitted])
    rejects = unbundled(judged, "rejects", schemas.REJECTS)
    not_held = pa.Table.from_batches(as_rejects(iter(unheld.to_batches())), schemas.REJECTS)
    return OrderRows(
        cuts=unbundled(judged, "cuts", schemas.CUTS),
        timeframe=unbundled(judged, "timeframe", schemas.TIMEFRAME),
        rejects=pa.concat_tables([rejects, not_held]),
        unheld=unheld,
        branches=held.filter(pc.invert(held["main"])).select(["party", "feed", "start", "end"]),
        plan=plan,
        rounds=rounds,
    )


# what is known


def _standing(admission: pa.Table) -> pa.Table:
    return admission.filter(pc.invert(admission["control"])).select(["party", "feed", "start", "end", "role"])


def _data(cuts: pa.Table) -> pa.Table:
    return cuts.filter(pc.invert(cuts["control"]))


def _before(previous: pa.Table | None) -> dict[Place, Before]:
    if previous is None:
        return {}
    rows = _data(previous).select(["party", "feed", "length", "link", "depth"]).to_pylist()
    return {
        (row["party"], row["feed"]): Before(row["length"], row["link"], row["depth"]) for row in rows if row["length"]
    }


def _base(previous: pa.Table | None, plan: Plan) -> pa.Table:
    """Of the feeds that go on: their first piece, and what they had said about others."""
    bases = bases_of(plan)
    said = {} if previous is None else {(row["party"], row["feed"]): row for row in _data(previous).to_pylist()}
    places = [place for place, _ in plan.bases.values()]
    for name, column in floor_columns(plan).items():
        bases = bases.append_column(name, column)
    for name in asserted.COLUMNS:
        words = [said[place][name] if place in said else b"" for place in places]
        bases = bases.append_column(name, pa.array(words, pa.binary()))
    return bases


def _look_up(
    lake: str, dependencies: pa.Table, held: pa.Table, control_targets: pa.Table, base: pa.Table, plan: Plan
) -> pa.Table:
    if plan.forked and plan.bases:
        forked = frozenset((party, bytes(feed_id(FeedKey(feed)))) for party, feed in plan.forked)
        again = pa.Table.from_batches(asserted.AboutForked(forked)(iter(base.to_batches())), schemas.VERIFIED)
        dependencies = pa.concat_tables([dependencies, again])
    targets = pa.Table.from_batches(as_targets(iter(held.to_batches())), schemas.TARGETS)
    return sorted_lookup(lake, dependencies, pa.concat_tables([targets, control_targets]))


# cutting


def _close(cutting: Cutting, named: pa.Table, held: pa.Table, twigs: pa.Table) -> int:
    """Lower cuts until no block needs one beyond a cut; returns how many rounds it took."""
    changed = cutting.start()
    if not changed:
        return 0
    twig_rows = {row["twig"]: row for row in twigs.select(Twig._fields).to_pylist()}
    places = {row["piece"]: twig_rows[row["twig"]] for row in held.select(["piece", "twig"]).to_pylist()}
    rows = named.select(["piece", "seqs", "named_seqs", "twigs", "first_twig", "last_named"]).to_pylist()
    rounds = 0
    while changed:
        rounds += 1
        changed = cutting.lower(list(_round(rows, places, changed)))
    return rounds


def _round(rows: list[dict[str, Any]], places: dict[int, dict[str, Any]], changed: dict[int, int]) -> Iterator[Twig]:
    """Twigs with a block that needs one at or beyond a changed cut, each with the first such block."""
    least: dict[int, int] = {}
    for row in rows:
        place = places.get(row["piece"])
        if place is None:  # not held
            continue
        several = row["twigs"] is not None
        for into, upto in changed.items() if several else _one(row, changed):
            seq = first_beyond({**row, "into": into, "upto": upto})
            if seq is not None and seq < place["cut"]:
                least[place["twig"]] = min(least.get(place["twig"], seq), seq)
    by_twig = {row["twig"]: row for row in places.values()}
    for twig, seq in least.items():
        yield Twig(**by_twig[twig])._replace(cut=seq)


def _one(row: dict[str, Any], changed: dict[int, int]) -> list[tuple[int, int]]:
    upto = changed.get(row["first_twig"])
    return [] if upto is None or row["last_named"] < upto else [(row["first_twig"], upto)]


def _stops(named: pa.Table, held: pa.Table, cuts: pa.Table) -> pa.Table:
    """`schemas.STOPS`, as `rounds.stops_of` finds them."""
    if not len(cuts):
        return schemas.STOPS.empty_table()
    at = dict(zip(cuts["twig"].to_pylist(), cuts["cut"].to_pylist(), strict=True))
    stopped: dict[int, dict[str, Any]] = {}
    for row in held.select(["piece", "twig", "main", "old", "start", "end"]).to_pylist():
        cut = at.get(row["twig"])
        if cut is not None and not row["old"] and row["start"] <= cut < row["end"]:
            stopped[row["piece"]] = {"twig": row["twig"], "main": row["main"], "cut": cut}
    if not stopped:
        return schemas.STOPS.empty_table()
    chosen = named.filter(pc.is_in(named["piece"], pa.array(list(stopped), pa.int64()))).to_pylist()
    rows = [{**row, **stopped[row["piece"]]} for row in chosen]
    reached = [row for row in rows if row["first_seq"] <= row["cut"] <= row["last_seq"]]
    return pa.Table.from_pylist([stops_in(row) for row in reached], schemas.STOPS)


def blocks_in(pieces: pa.Table) -> int:
    """How many blocks of a plan are new."""
    fresh = pieces.filter(pc.invert(pieces["old"]))
    return int(np.sum(fresh["end"].to_numpy() - fresh["start"].to_numpy()))
