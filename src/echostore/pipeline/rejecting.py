"""All rejects of some parties that count after a build: those of folding, carried on from build to build, and those of
control and order, which are told anew each time.

What an earlier build said of folding stays true, but for items that were folded again from their whole past, and for
blocks whose standing changed: both are told again by this one. A place is rejected once: where rounds and builds say
the same of it, the last word counts. A forked feed is told once, from the fork on, as a peer does (`peer.rejections`).
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import FEED_ID_BYTES
from echostore.kernel.reasons import Reason
from echostore.pipeline import kept
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import named_rows
from echostore.pipeline.schemas import REJECTS
from echostore.pipeline.stages.by_party import HERE_ROWS_MAX
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, gathered, mapped
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.reduce import LACKING, Outcome

if TYPE_CHECKING:
    from echostore.pipeline.building import Job


def lacking(spark: Any, rejects: Rows | None) -> Any | None:
    """Rejects of folding that lacked an item which may still come, as a DataFrame."""
    if rejects is None:
        return None
    if isinstance(rejects, pa.Table):
        found = rejects.filter(pc.and_(rejects["lasting"], pc.is_in(rejects["reason"], pa.array(LACKING))))
        return frame_of(spark, found.select(REJECTS.names)) if len(found) else None
    return rejects.filter(rejects["lasting"] & rejects["reason"].isin(*LACKING)).select(*REJECTS.names)


def all_rejects(
    job: "Job",
    of_order: Rows,
    of_control: Rows,
    before: Rows | None,
    moved: pa.Table,
    outcome: Outcome,
    forks: pa.Table,
) -> Rows:
    """Rows of KEPT_REJECTS: a table here where there are few, else a DataFrame. `forks` see `fork_places`."""
    fresh = outcome.files.get("rejects", [])
    history = {(bytes(party), bytes(item)) for party, item in outcome.again.history}
    parts = (of_order, of_control, *(() if before is None else (before,)))
    few = job.spark is None or sum(file.rows for file in fresh) <= HERE_ROWS_MAX
    if few and all(isinstance(part, pa.Table) for part in parts):
        lasting = [read_table(job.out, file, REJECTS) for file in fresh]
        if before is not None:
            lasting.append(_still_counting(before, moved, history))
        passing = [part.select(REJECTS.names).cast(REJECTS) for part in (of_order, of_control)]
        each_once = _each_once(pa.concat_tables([REJECTS.empty_table(), *lasting]))
        return pa.concat_tables(
            [
                _kept(_before_forks(each_once, forks), True, job.number),
                _kept(_before_forks(pa.concat_tables(passing), forks), False, job.number),
                _kept(_of_forks(forks), False, job.number),
            ]
        )
    return _by_spark(job, of_order, of_control, before, fresh, moved, history, forks)


FORKS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("at", pa.int64(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)


def fork_places(admission: Rows) -> pa.Table:
    """FORKS: from which block on feeds have several branches, none of which counts, and why. Out of ADMISSION."""
    forked = admission.filter(pc.is_valid(admission["fork"])) if isinstance(admission, pa.Table) else admission
    if not isinstance(forked, pa.Table):
        forked = gathered(forked.filter("fork IS NOT NULL"))
    feeds: dict[tuple[bytes, bytes], list[dict[str, Any]]] = defaultdict(list)
    for row in forked.to_pylist():
        feeds[row["party"], row["feed_id"]].append(row)
    found = []
    for (party, feed), rows in sorted(feeds.items()):
        at = rows[0]["fork"]
        for row in sorted(rows, key=lambda row: row["start"]):
            if at is not None and row["role"] is not None and row["start"] <= at:
                at = row["end"] if row["end"] is None or at < row["end"] else at
        if at is not None:
            reason = rows[0]["end_reason"] or str(Reason.BEYOND_CUT)
            found.append((party, feed, at, rows[0]["control"], reason))
    return rows_table(found, FORKS)


def _before_forks(rejects: pa.Table, forks: pa.Table) -> pa.Table:
    """Rejects of blocks that all branches of their feed share."""
    starts = {(row["party"], row["feed"]): row["at"] for row in forks.to_pylist()}
    if not starts:
        return rejects
    places = zip(*(rejects[name].to_pylist() for name in ("party", "feed", "seq")), strict=True)
    return rejects.filter(
        pa.array([seq < starts.get((party, feed), seq + 1) for party, feed, seq in places], pa.bool_())
    )


def _of_forks(forks: pa.Table) -> pa.Table:
    """The rejects that tell of forked data feeds."""
    rows = forks.filter(pc.invert(forks["control"])).to_pylist()
    return rows_table([(row["party"], row["feed"], row["at"], -1, row["reason"], "", None) for row in rows], REJECTS)


def _each_once(rejects: pa.Table) -> pa.Table:
    """The first of several rows about one place."""
    places = zip(*(rejects[name].to_pylist() for name in _PLACE), strict=True)
    first: dict[tuple[Any, ...], int] = {}
    for at, place in enumerate(places):
        first.setdefault(place, at)
    return rejects if len(first) == len(rejects) else rejects.take(pa.array(first.values(), pa.int64()))


_PLACE = ["party", "feed", "seq", "position"]


def _kept(rejects: pa.Table, lasting: bool, commit: int) -> pa.Table:
    rejects = rejects.append_column("lasting", pa.repeat(pa.scalar(lasting), len(rejects)))
    rejects = rejects.append_column("commit", pa.repeat(pa.scalar(commit), len(rejects)))
    return rejects.cast(kept.KEPT_REJECTS)


def _still_counting(before: pa.Table, moved: pa.Table, history: set[tuple[bytes, bytes]]) -> pa.Table:
    ranges = _ranges(moved)
    stays = []
    names = ("party", "feed", "seq", "position", "item", "lasting")
    for party, feed, seq, position, item, lasting in zip(*(before[n].to_pylist() for n in names), strict=True):
        in_moved = position == -1 and any(start <= seq < end for start, end in ranges.get((party, feed), ()))
        stays.append(lasting and not in_moved and (party, item) not in history)
    return before.filter(pa.array(stays, pa.bool_())).select(REJECTS.names)


def _ranges(moved: pa.Table) -> dict[tuple[bytes, bytes], list[tuple[int, int]]]:
    """Stretches by party and feed id."""
    found: dict[tuple[bytes, bytes], list[tuple[int, int]]] = defaultdict(list)
    for row in moved.to_pylist():
        found[row["party"], row["feed"][:FEED_ID_BYTES]].append((row["start"], row["end"]))
    return found


def _by_spark(
    job: "Job",
    of_order: Rows,
    of_control: Rows,
    before: Rows | None,
    fresh: list[NamedFile],
    moved: pa.Table,
    history: set[tuple[bytes, bytes]],
    forks: pa.Table,
) -> Any:
    from pyspark.sql import functions as f

    spark = job.spark
    lasting = frame_of(spark, REJECTS.empty_table())
    if fresh:
        frame = frame_of(spark, pa.Table.from_batches([named_rows({"rejects": fresh})]))
        lasting = mapped(frame.repartition(min(len(fresh), 64)), kept.Reading(str(job.out), REJECTS), REJECTS)
    if before is not None:
        old = as_frame(spark, before).filter("lasting").select(*REJECTS.names)
        if history:
            rows = [{"party": party, "item": item} for party, item in sorted(history)]
            schema = pa.schema([REJECTS.field("party"), REJECTS.field("item")])
            old = old.join(frame_of(spark, pa.Table.from_pylist(rows, schema)), ["party", "item"], "left_anti")
        if len(moved):
            ranges = frame_of(spark, moved).selectExpr(
                "party AS p", f"substring(feed, 1, {FEED_ID_BYTES}) AS q", "start AS s", "end AS e"
            )
            within = f.expr("party = p AND feed = q AND position = -1 AND seq >= s AND seq < e")
            old = old.join(ranges, within, "left_anti")
        lasting = lasting.unionByName(old.join(lasting.select(*_PLACE), _PLACE, "left_anti"))
    lasting = lasting.dropDuplicates(_PLACE)
    passing = (
        as_frame(spark, of_order).select(*REJECTS.names).unionByName(as_frame(spark, of_control).select(*REJECTS.names))
    )
    if len(forks):
        starts = frame_of(spark, forks).selectExpr("party AS p", "feed AS q", "at AS s")
        behind = f.expr("party = p AND feed = q AND seq >= s")
        lasting, passing = (each.join(starts, behind, "left_anti") for each in (lasting, passing))
        passing = passing.unionByName(frame_of(spark, _of_forks(forks)))
    found = lasting.withColumn("lasting", f.lit(True)).unionByName(passing.withColumn("lasting", f.lit(False)))
    return found.withColumn("commit", f.lit(job.number).cast("long")).persist()
