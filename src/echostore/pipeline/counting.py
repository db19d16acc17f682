"""Steps over one party's small tables: what changed since the last commit, and what a run says of it in the end.

    in = applied + rejected + waiting        blocks of data feeds, each counted once

    beyond a feed's cut    rejected when the feed ended there, waiting otherwise
    below it               applied where the admission counts them, rejected elsewhere, and where a message is malformed
    not held at all        rejected: a bad link, a bad signature, a gap, a feed that nobody admitted
    on another branch      rejected: evidence of a fork

A message of which single operations were refused is applied; the table of rejects has those.

Each step is a function of batches that are sorted by party, with a column `kind` that tells the tables apart: run by
`stages.by_party`, here where they are few, by tasks where they are many.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from echostore.pipeline.output.results import ABSTAINED, BUILT, FAILED
from echostore.pipeline.output.table_schemas import PARTIES
from echostore.pipeline.stages.by_party import parties
from echostore.wire.cids import cid_text
from echostore.wire.generated import credential_pb2 as credentials
from echostore.wire.generated import snapshot_pb2 as snapshots

READER = "reader"

MOVED = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("lost", pa.bool_(), nullable=False),
    ]
)
"""Stretches of blocks whose standing changed; or a feed that lost ground, whose party has to be built from scratch."""

Row = dict[str, Any]
Kinds = dict[str, list[Row]]


def _each_party(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[bytes, Kinds]]:
    for party, rows in parties(batches):
        kinds: Kinds = defaultdict(list)
        for row in rows.to_pylist():
            kinds[row["kind"]].append(row)
        yield party, kinds


def _by_feed(rows: list[Row]) -> dict[bytes, list[Row]]:
    found: dict[bytes, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["feed"]].append(row)
    return found


# what changed


@dataclass(frozen=True)
class Comparing:
    """The step from `cut_before, cut, admission_before, admission` (of data feeds) to MOVED."""

    forked: frozenset[tuple[bytes, bytes]]
    """Feeds with runs that overlap: one that grew may have grown on another branch than the one that was folded."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for party, kinds in _each_party(batches):
            rows = list(self._compare(party, kinds))
            if rows:
                yield pa.RecordBatch.from_pylist(rows, MOVED)

    def _compare(self, party: bytes, kinds: Kinds) -> Iterator[Row]:
        now = {row["feed"]: row for row in kinds["cut"]}
        old, new = _by_feed(kinds["admission_before"]), _by_feed(kinds["admission"])
        for before in kinds["cut_before"]:
            feed, length = before["feed"], before["length"]
            if length and self._lost(party, before, now.get(feed)):
                yield {"party": party, "feed": feed, "start": 0, "end": 0, "lost": True}
            for start, end in differences(old[feed], new[feed], length):
                yield {"party": party, "feed": feed, "start": start, "end": end, "lost": False}

    def _lost(self, party: bytes, before: Row, now: Row | None) -> bool:
        if now is None or now["length"] < before["length"]:
            return True
        if now["length"] == before["length"]:
            return bool(now["link"] != before["link"])
        return (party, before["feed"]) in self.forked


def differences(old: list[Row], new: list[Row], length: int) -> list[tuple[int, int]]:
    """Ranges below `length` in which a writer stood differently: in another role, or not at all."""
    edges = {0, length}
    for interval in (*old, *new):
        edges.update(min(edge, length) for edge in (interval["start"], interval["end"]) if edge is not None)
    ranges = pairwise(sorted(edges))
    return [(start, end) for start, end in ranges if role_at(old, start) != role_at(new, start)]


def role_at(intervals: list[Row], seq: int) -> str | None:
    """The role in which operations count; a reader's don't."""
    for interval in intervals:
        if interval["start"] <= seq and (interval["end"] is None or seq < interval["end"]):
            role: str | None = interval["role"]
            return None if role == READER else role
    return None


# what became of a party


@dataclass(frozen=True)
class Counting:
    """The step to the rows of PARTIES, from the tables

    about        party, root_party, title       cut, admission, outside (not held), branch   of data feeds
    control_cut  of control feeds               malformed   party, feed, seq
    root         schemas.ROOTS, its root as `bytes`          last   epoch, cid, since of the newest row so far
    """

    commit: int
    at: str
    anew: frozenset[bytes]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for party, kinds in _each_party(batches):
            if kinds["about"]:
                yield pa.RecordBatch.from_pylist([self._row(party, kinds)], PARTIES)

    def _row(self, party: bytes, kinds: Kinds) -> Row:
        about = kinds["about"][0]
        root = kinds["root"][0] if kinds["root"] else defaultdict(lambda: None)
        last = kinds["last"][0] if kinds["last"] else None
        unknown, problem = root["unknown"] or "", root["problem"] or ""
        cid = None if root["cid"] is None or unknown else cid_text(root["cid"])
        changed = cid is not None and (last is None or cid != last["cid_before"])
        return {
            "party": party.hex(),
            "root_party": about["root_party"].hex(),
            "title": about["title"],
            "state": ABSTAINED if unknown else FAILED if problem else BUILT,
            "detail": f"no model {unknown} is known here, so no CID is given" if unknown else problem,
            "epoch": (last["epoch"] if last else 0) + (1 if changed else 0),
            "cid": cid,
            "root": root["bytes"],
            "control": _control_bytes(kinds["control_cut"]),
            "models": root["models"] or "",
            "at": self.at,
            **_counts(kinds),
            "items": root["items"] or 0,
            "since": self.commit if last is None or party in self.anew or not last["since"] else last["since"],
            "built": self.commit,
            "commit": self.commit,
        }


def _counts(kinds: Kinds) -> dict[str, int]:
    applied = rejected = waiting = 0
    standing = _by_feed(kinds["admission"])
    for cut in kinds["cut"]:
        length, beyond = cut["length"], cut["held"] - cut["length"]
        # Intervals of one feed never overlap, so the blocks in them add up.
        counted = sum(
            max(0, (length if one["end"] is None else min(one["end"], length)) - one["start"])
            for one in standing[cut["feed"]]
            if one["role"] not in (None, READER)
        )
        applied += counted
        rejected += length - counted
        if cut["state"] == "ended":
            rejected += beyond
        else:
            waiting += beyond
    outside = sum(row["end"] - row["start"] for row in (*kinds["outside"], *kinds["branch"]))
    malformed = len({(row["feed"], row["seq"]) for row in kinds["malformed"]})
    applied -= malformed
    rejected += outside + malformed
    messages = applied + rejected + waiting
    return {"messages": messages, "applied": applied, "rejected": rejected, "waiting": waiting}


def _control_bytes(cuts: list[Row]) -> bytes:
    entries = [
        snapshots.TimeframeEntry(feed_key=cut["feed"], seq=cut["length"] - 1, link=cut["link"])
        for cut in sorted(cuts, key=lambda cut: bytes(cut["feed"]))
        if cut["length"]
    ]
    return credentials.EpochGenesis(control_timeframe=entries).SerializeToString(deterministic=True)
