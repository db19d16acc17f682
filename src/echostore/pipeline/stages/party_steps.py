"""The steps of `order` that see all feeds of a party at once, as tasks over batches that are sorted by party.

    holding    fresh, old, base                                       ──► HELD, UNHELD
    walking    held, named, base                                      ──► TWIGS
    Judging    feed, held, twig, cut, stop, named, base, admission    ──► CUTS, TIMEFRAME, REJECTS

The names before the arrows are the kinds of rows; `run_by_party` tags them. Rows are few per piece, and none has a block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from echostore.kernel.ids import NO_LINK, FeedKey, feed_id
from echostore.pipeline import schemas
from echostore.pipeline.stages import verdicts
from echostore.pipeline.stages.asserted import Said, pack_asserted, unpack_asserted
from echostore.pipeline.stages.bundles import Bundler
from echostore.pipeline.stages.by_party import parties
from echostore.pipeline.stages.control import ended_rejects
from echostore.pipeline.stages.holding import Stretch, hold
from echostore.pipeline.stages.lookups import read_marks
from echostore.pipeline.stages.planning import NO_FILE
from echostore.pipeline.stages.twigs import Row, walk_feed

HOLDING = {"held": schemas.HELD, "unheld": schemas.UNHELD}
JUDGING = {"cuts": schemas.CUTS, "timeframe": schemas.TIMEFRAME, "rejects": schemas.REJECTS}

Kinds = dict[str, list[dict[str, Any]]]
"""The rows of one feed by kind."""


def _feeds(rows: pa.Table) -> dict[bytes, Kinds]:
    found: dict[bytes, Kinds] = {}
    for row in rows.to_pylist():
        found.setdefault(row["feed"], {}).setdefault(row["kind"], []).append(row)
    return found


# hold


def holding(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    bundler = Bundler(HOLDING)
    for party, rows in parties(batches):
        for feed, kinds in _feeds(rows).items():
            _hold_feed(party, feed, kinds, bundler)
        if bundler.full:
            yield from bundler.take()
    yield from bundler.take()


def _hold_feed(party: bytes, feed: bytes, kinds: Kinds, bundler: Bundler) -> None:
    fresh = {row["piece"]: row for row in kinds.get("fresh", [])}
    base = next(iter(kinds.get("base", [])), None)
    stretches = [Stretch.of(row) for row in fresh.values()]
    if base is not None:
        stretches.append(Stretch.base(base["piece"], base["end"], base["last_link"], base["last_depth"]))
    found = hold(stretches)
    main = {id(piece) for piece in found.main()}
    key = {"party": party, "feed": feed}
    for piece in found.pieces:
        path = np.array(piece.path, np.int64).tobytes()
        shared = {**key, "twig": piece.twig, "path": path, "main": id(piece) in main}
        number = piece.stretch.piece
        if base is not None and number == base["piece"]:
            for row in kinds["old"]:
                place = {name: row[name] for name in ("piece", "start", "end", "file", "row")}
                bundler.add("held", {**shared, **place, "old": True})
            continue
        place = {name: fresh[number][name] for name in ("piece", "start", "file", "row")}
        bad = piece.bad or (None, None, None)
        told = {"end": piece.end, "old": False, "bad_seq": bad[0], "bad_reason": bad[1], "bad_late": bad[2]}
        bundler.add("held", {**shared, **place, **told})
    for start, end, reason, detail in found.unheld:
        told = {"control": False, "start": start, "end": end, "reason": str(reason), "detail": detail}
        bundler.add("unheld", {**key, **told})


# walk


def walking(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _, rows in parties(batches):
        twigs: list[dict[str, Any]] = []
        for kinds in _feeds(rows).values():
            named: dict[int, list[Row]] = {}
            for row in kinds.get("named", []):
                named.setdefault(row["piece"], []).append(Row(*(row[name] for name in Row._fields)))
            said = [each[:2] for row in kinds.get("base", []) for each in unpack_asserted(row)]
            twigs += walk_feed(kinds.get("held", []), named, said)
        yield pa.RecordBatch.from_pylist(twigs, schemas.TWIGS)


# judge


@dataclass(frozen=True)
class Judging:
    lake: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bundler = Bundler(JUDGING)
        for party, rows in parties(batches):
            feeds = _feeds(rows)
            cuts = {row["twig"]: row["cut"] for kinds in feeds.values() for row in kinds.get("cut", [])}
            for feed, kinds in feeds.items():
                if "feed" in kinds:
                    _Feed(self.lake, party, FeedKey(feed), kinds, cuts).tell(bundler)
            if bundler.full:
                yield from bundler.take()
        yield from bundler.take()


@dataclass(frozen=True)
class _Feed:
    """One feed on its way to its rows. `cuts` are the cuts of all twigs of the party that stop before their ends."""

    lake: str
    party: bytes
    feed: FeedKey
    kinds: Kinds
    cuts: Mapping[int, int]

    def tell(self, bundler: Bundler) -> None:
        rows = self.kinds.get("admission", [])
        intervals = [verdicts.Interval(row["start"], row["end"], row["role"]) for row in rows]
        end = verdicts.end_of(self.kinds.get("twig", []), intervals, self._judged, self.cuts)
        reason, waits = end.verdict
        link, depth = self._mark(end.length - 1)
        key = {"party": self.party, "feed": self.feed, "feed_id": feed_id(self.feed)}
        told = {
            "control": False,
            "length": end.length,
            "link": link,
            "depth": depth,
            "state": end.state,
            "reason": str(reason) if reason is not None else None,
            "waits_feed": waits[0] if waits else None,
            "waits_seq": waits[1] if waits else None,
            "held": end.held,
        }
        bundler.add("cuts", {**key, **told, **pack_asserted(self._said())})
        if reason is not None:
            for row in ended_rejects(self.party, feed_id(self.feed), end.length, end.held, str(reason)):
                bundler.add("rejects", row)
        last = verdicts.allowed_last(intervals, end.length, self._floor["floor"] or 0)
        if last is not None:
            bundler.add("timeframe", {**key, "seq": last, "link": self._mark(last)[0]})

    @property
    def _floor(self) -> dict[str, Any]:
        """Where the epoch ends that the party stands on."""
        return next(iter(self.kinds.get("base", [])), {"floor": None})

    def _judged(self, twig: dict[str, Any]) -> verdicts.Verdict:
        number = twig["twig"]
        cut = self.cuts[number]
        stops = [
            verdicts.Stop(row["names"], row["named_seq"], row["named_twig"], row["fault"])
            for row in self.kinds.get("stop", [])
            if row["twig"] == number and row["named_seq"] is not None
        ]
        faults = twig["faults"] if cut == twig["cut"] else b""
        held = (row for row in self.kinds.get("held", []) if row["twig"] == number and row["bad_seq"] is not None)
        bad = min(((row["bad_seq"], row["bad_reason"], row["bad_late"]) for row in held), default=None)
        return verdicts.judge(stops, faults, bad, cut, self.cuts)

    def _said(self) -> list[Said]:
        """The last words about each other feed, below the cut."""
        found = {said.names: said for row in self.kinds.get("base", []) for said in unpack_asserted(row)}
        upto = {
            row["piece"]: min(row["end"], self.cuts.get(row["twig"], row["end"]))
            for row in self.kinds.get("held", [])
            if row["main"] and not row["old"]
        }
        words = [
            Said(row["names"], row["last_named"], row["last_link"])
            for row in self.kinds.get("named", [])
            if row["last_seq"] < upto.get(row["piece"], 0)
        ]
        words += [
            Said(row["names"], row["said_seq"], row["said_link"])
            for row in self.kinds.get("stop", [])
            if row["said_seq"] is not None and row["main"]
        ]
        for said in words:
            found[said.names] = max(found.get(said.names, said), said)
        return list(found.values())

    def _mark(self, seq: int) -> tuple[bytes, int]:
        """Link and depth of a held block of the branch that is processed: one row is read."""
        for row in self.kinds.get("held", []):
            if row["main"] and row["start"] <= seq < row["end"]:
                if row["file"] == NO_FILE:
                    assert seq == self._floor["floor"] - 1, f"block {seq} lies below the party's epoch"
                    return self._floor["floor_link"], self._floor["floor_depth"]
                at = row["row"] + seq - row["start"]
                links, depths = read_marks(self.lake, row["file"], at, at + 1)
                return links[0].tobytes(), int(depths[0])
        assert seq < 0, f"block {seq} is processed and not held"
        return NO_LINK, 0
