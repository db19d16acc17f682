"""Rounds: cuts at which some block needs one beyond another cut are lowered until none does.

    cut of b: 40     a17 names b39: fine      a18 names b41: cut a at 18      c5 names a18: cut c at 5      ...

Each round looks only at rows of `schemas.NAMED` that lead into a twig whose cut was lowered in the round before, and in
those it searches (both columns ascend): data-parallel, and nothing at all when every feed is whole. The driver keeps the
twigs that stop before their end, a few words each.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from echostore.kernel.ids import LINK_PREFIX_BYTES
from echostore.pipeline import schemas
from echostore.pipeline.stages.frames import Rows, as_frame, frame_of, gathered, mapped

CUT_TWIGS = pa.schema([schemas.TWIGS.field(name) for name in ("party", "feed", "twig", "cut")])
"""The twigs that stop before their end."""

_BOUNDS = pa.schema([pa.field("piece", pa.int64(), nullable=False), pa.field("seq", pa.int64(), nullable=False)])


class Twig(NamedTuple):
    party: bytes
    feed: bytes
    twig: int
    parent: int | None
    start: int
    end: int
    cut: int


def cut_to_closure(spark: Any, named: Any, held: Rows, twigs: Rows) -> tuple[pa.Table, int]:
    """(`CUT_TWIGS`, how many rounds it took)"""
    if isinstance(twigs, pa.Table):
        watched = twigs
    else:
        watched = twigs.filter("cut < end OR parent IS NOT NULL").select(*Twig._fields)
    cutting = Cutting.of(gathered(watched))
    changed = cutting.start()
    rounds = 0
    while changed:
        rounds += 1
        changed = cutting.lower(_round(spark, named, held, twigs, changed))
    return cutting.table(), rounds


class Cutting:
    """The twigs that stop before their end, and how they pull down what follows them."""

    def __init__(self, twigs: list[Twig]) -> None:
        self._children: dict[int, list[Twig]] = {}
        self._cuts: dict[int, Twig] = {}
        for twig in twigs:
            if twig.parent is not None:
                self._children.setdefault(twig.parent, []).append(twig)
            if twig.cut < twig.end:
                self._cuts[twig.twig] = twig

    @staticmethod
    def of(twigs: pa.Table) -> "Cutting":
        """Of rows of TWIGS."""
        found = [Twig(**row) for row in twigs.select(Twig._fields).to_pylist()]
        return Cutting([twig for twig in found if twig.cut < twig.end or twig.parent is not None])

    def start(self) -> dict[int, int]:
        return self._with_children(dict(self._cuts))

    def lower(self, found: list[Twig]) -> dict[int, int]:
        """Take in lower cuts; returns the twigs whose cut is lower now."""
        lowered = {}
        for twig in found:
            known = self._cuts.get(twig.twig)
            if known is None or twig.cut < known.cut:
                self._cuts[twig.twig] = lowered[twig.twig] = twig
        return self._with_children(lowered)

    def _with_children(self, lowered: dict[int, Twig]) -> dict[int, int]:
        """What follows a twig that stops before its end is not reached at all."""
        todo = list(lowered)
        while todo:
            for child in self._children.get(todo.pop(), ()):
                known = self._cuts.get(child.twig)
                if known is None or child.start < known.cut:
                    self._cuts[child.twig] = lowered[child.twig] = child._replace(cut=child.start)
                    todo.append(child.twig)
        return {number: twig.cut for number, twig in lowered.items()}

    def table(self) -> pa.Table:
        rows = [
            {"party": twig.party, "feed": twig.feed, "twig": twig.twig, "cut": twig.cut} for twig in self._cuts.values()
        ]
        return pa.Table.from_pylist(rows, CUT_TWIGS)


def _round(spark: Any, named: Any, held: Rows, twigs: Rows, changed: dict[int, int]) -> list[Twig]:
    """Which twigs have a block that needs one at or beyond a changed cut, and the first such block."""
    from pyspark.sql import functions as f

    table = pa.table(
        {"into": pa.array(list(changed), pa.int64()), "upto": pa.array(list(changed.values()), pa.int64())}
    )
    lowered = f.broadcast(frame_of(spark, table))
    one = named.filter("twigs IS NULL").join(lowered, named["first_twig"] == lowered["into"])
    several = named.filter("twigs IS NOT NULL").crossJoin(lowered)
    columns = ("piece", "seqs", "named_seqs", "twigs", "into", "upto")
    rows = one.filter("last_named >= upto").select(*columns).unionByName(several.select(*columns))
    least = mapped(rows, _bounds, _BOUNDS).groupBy("piece").agg(f.min("seq").alias("seq"))
    places = as_frame(spark, held).select("piece", "twig").join(as_frame(spark, twigs).drop("main", "faults"), "twig")
    # A twig that was found to stop earlier already is none of the caller's business; nor is what lies behind its end.
    hits = least.join(places, "piece").filter("seq < cut")
    best = hits.groupBy("party", "feed", "twig", "parent", "start", "end").agg(f.min("seq").alias("cut"))
    return [Twig(**row) for row in best.toArrow().select(Twig._fields).to_pylist()]


def stops_of(spark: Any, named: Any, held: Rows, cuts: pa.Table) -> Rows:
    """`schemas.STOPS`: the dependencies of the blocks at which twigs stop, and the last words before."""
    from pyspark.sql import functions as f

    if not len(cuts):
        return schemas.STOPS.empty_table()
    stopped = f.broadcast(frame_of(spark, cuts.select(["twig", "cut"])))
    at = as_frame(spark, held).filter("NOT old").join(stopped, "twig").filter("start <= cut AND cut < end")
    rows = named.join(f.broadcast(at.select("piece", "twig", "main", "cut")), "piece")
    rows = rows.filter("first_seq <= cut AND cut <= last_seq")
    columns = ("party", "feed", "twig", "main", "names", "cut", "fault", "first_twig", "twigs")
    return mapped(rows.select(*columns, "seqs", "named_seqs", "named_links"), _stops, schemas.STOPS)


def _bounds(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The first block of each row that names one at or beyond a cut."""
    for batch in batches:
        found = ((row["piece"], first_beyond(row)) for row in batch.to_pylist())
        rows = [{"piece": piece, "seq": seq} for piece, seq in found if seq is not None]
        yield pa.RecordBatch.from_pylist(rows, _BOUNDS)


def first_beyond(row: dict[str, Any]) -> int | None:
    """The first block of a row of NAMED that names one of the twig `into` at `upto` or later."""
    seqs, wanted = np.frombuffer(row["seqs"], np.int64), np.frombuffer(row["named_seqs"], np.int64)
    beyond = wanted >= row["upto"]
    if row["twigs"] is not None:
        beyond &= np.frombuffer(row["twigs"], np.int64) == row["into"]
    return int(seqs[np.argmax(beyond)]) if beyond.any() else None


def _stops(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pylist([stops_in(row) for row in batch.to_pylist()], schemas.STOPS)


def stops_in(row: dict[str, Any]) -> dict[str, Any]:
    seqs, wanted = np.frombuffer(row["seqs"], np.int64), np.frombuffer(row["named_seqs"], np.int64)
    at = int(np.searchsorted(seqs, row["cut"]))
    told = {name: row[name] for name in ("party", "feed", "twig", "main", "names")}
    if at:
        told["said_seq"] = int(wanted[at - 1])
        told["said_link"] = row["named_links"][(at - 1) * LINK_PREFIX_BYTES : at * LINK_PREFIX_BYTES]
    if at < len(seqs) and seqs[at] == row["cut"]:
        told["named_seq"] = int(wanted[at])
        twigs = row["twigs"]
        told["named_twig"] = row["first_twig"] if twigs is None else int(np.frombuffer(twigs, np.int64)[at])
        told["fault"] = row["fault"] if at == len(seqs) - 1 else None
    return told
