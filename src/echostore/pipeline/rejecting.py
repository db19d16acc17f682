"""All rejects of some parties that count after a build: those of folding, carried on from build to build, and those of
control and order, which are told anew each time.

What an earlier build said of folding stays true, but for items that were folded again from their whole past, and for
blocks whose standing changed: both are told again by this one. A place is rejected once: where rounds and builds say
the same of it, the last word counts.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import FEED_ID_BYTES
from echostore.pipeline import kept
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import named_rows
from echostore.pipeline.schemas import REJECTS
from echostore.pipeline.stages.by_party import HERE_ROWS_MAX
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, mapped
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
) -> Rows:
    """Rows of KEPT_REJECTS: a table here where there are few, else a DataFrame."""
    fresh = outcome.files.get("rejects", [])
    history = {(bytes(party), bytes(item)) for party, item in outcome.again.history}
    parts = (of_order, of_control, *(() if before is None else (before,)))
    few = job.spark is None or sum(file.rows for file in fresh) <= HERE_ROWS_MAX
    if few and all(isinstance(part, pa.Table) for part in parts):
        lasting = [read_table(job.out, file, REJECTS) for file in fresh]
        if before is not None:
            lasting.append(_still_counting(before, moved, history))
        passing = [part.select(REJECTS.names).cast(REJECTS) for part in (of_order, of_control)]
        return pa.concat_tables(
            [
                _kept(_each_once(pa.concat_tables([REJECTS.empty_table(), *lasting])), True, job.number),
                _kept(pa.concat_tables(passing), False, job.number),
            ]
        )
    return _by_spark(job, of_order, of_control, before, fresh, moved, history)


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
    found = lasting.withColumn("lasting", f.lit(True)).unionByName(passing.withColumn("lasting", f.lit(False)))
    return found.withColumn("commit", f.lit(job.number).cast("long")).persist()
