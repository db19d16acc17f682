"""control: who belongs to each party, and which blocks count. Control runs in; tables of membership out.

    RUNS (control) ──► all of a party's control feeds in one task, many parties per task (they are small)
                   ──► verified and held like data (`verify_piece`, `hold`), folded by the kernel (`fold_party`)
                   ──► PARTIES  ADMISSION  MEMBERS  PUBLISHED_MODELS  CUTS  TARGETS  REJECTS (twice)  UNHELD

A child party has no control feeds: it gets rows of its own from its parent's. `TARGETS` are the processed control blocks,
on any branch: what data messages may depend on. Control is folded whole in every run, or from the control state on that
stands for blocks that nobody has any more (`lake.control_floors`); only blocks of data have a history that is long.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import NO_LINK, FeedId, FeedKey, Link, PartyKey, feed_id
from echostore.kernel.order import Envelope, FeedCursor
from echostore.kernel.party.admission import Admission
from echostore.kernel.party.credentials import FeedKind
from echostore.kernel.reasons import Reason
from echostore.pipeline import schemas
from echostore.pipeline.lake.control_floors import floor_at, floors_of
from echostore.pipeline.stages.bundles import BUNDLES, Bundler, unbundled
from echostore.pipeline.stages.by_party import PARTY_TASK_BYTES, Tables, parties, together
from echostore.pipeline.stages.frames import Rows, frame_of, mapped, released, width_of
from echostore.pipeline.stages.holding import HeldPiece, Stretch, hold
from echostore.pipeline.stages.party_fold import ControlFeed, FoldedParty, fold_party
from echostore.pipeline.stages.planning import BUCKET, BUCKET_BITS, NO_FILE, Before, plan_pieces
from echostore.pipeline.stages.standing import stands_on
from echostore.pipeline.stages.verify import Piece, piece_rows, verify_piece
from echostore.wire.control_state import StoredControl
from echostore.wire.membership import membership_state

AFTER_INVALID_LISTED_MAX = 1024
"""Blocks of an ended feed that are listed one by one, as on a peer; a feed may grow for ever after its end."""

TABLES: dict[str, pa.Schema] = {
    "parties": schemas.PARTIES,
    "admission": schemas.ADMISSION,
    "members": schemas.MEMBERS,
    "models": schemas.PUBLISHED_MODELS,
    "cuts": schemas.CUTS,
    "targets": schemas.TARGETS,
    "rejects": schemas.REJECTS,
    "refusals": schemas.REJECTS,
    "unheld": schemas.UNHELD,
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A moment of a party: of how many blocks of each feed it knew. Feeds that are not named had none.

    `control` of None: all of control. A child party's control is its parent's, under whose key that limit belongs.
    """

    data: Mapping[FeedId, int] = field(default_factory=dict)
    control: Mapping[FeedId, int] | None = None


Limits = Mapping[PartyKey, Limit]


class ControlTables(Tables):
    """The tables of the control stage; computed once, on first use. `close` frees what they hold."""

    def __init__(self, spark: Any, rows: Mapping[str, Rows], bundles: Rows) -> None:
        super().__init__(spark, rows)
        self.bundles = bundles

    @property
    def parties(self) -> Any:
        return self.frame("parties")

    @property
    def admission(self) -> Any:
        return self.frame("admission")

    @property
    def members(self) -> Any:
        return self.frame("members")

    @property
    def models(self) -> Any:
        return self.frame("models")

    @property
    def cuts(self) -> Any:
        return self.frame("cuts")

    @property
    def targets(self) -> Any:
        return self.frame("targets")

    @property
    def rejects(self) -> Any:
        """Control feeds that ended, as `party.rejected()` lists them."""
        return self.frame("rejects")

    @property
    def refusals(self) -> Any:
        """Credentials that do not count, as `party.members.rejected()` lists them."""
        return self.frame("refusals")

    @property
    def unheld(self) -> Any:
        return self.frame("unheld")

    def close(self) -> None:
        released(self.bundles)


CONTROL_HERE_BYTES = 256 << 10
"""Control feeds that the driver folds itself when it is asked to: a thousand credentials, a quarter of a second."""


def fold_control(
    spark: Any,
    lake_version: Any,
    parties: Collection[bytes] | None = None,
    limits: Limits | None = None,
    here_bytes_max: int = 0,
    hurt: dict[bytes, Corrupt] | None = None,
) -> ControlTables:
    """Fold the control feeds of parties, or of all; child parties come with their parents.

    A wanted party without control feeds of its own may be a child of any other: then all parties are folded. Without
    Spark, and up to `here_bytes_max` of them, the work is done where this is called, and the tables are here. A party whose control state
    in the lake is damaged is Corrupt; with `hurt` it is noted there and left out.
    """
    runs = lake_version.runs(parties=parties, control=True)
    if parties is not None and set(parties) - set(runs["party"].unique().to_pylist()):
        runs = lake_version.runs(control=True)
    pieces = _planned(str(lake_version.lake.path), runs, limits or {}, hurt)
    total = int(runs["bytes"].to_numpy().sum())
    lake = str(lake_version.lake.path)
    if spark is None or total <= here_bytes_max:
        bundles = _bundles_here(lake, pieces)
    else:
        tasks = max(width_of(spark), total // PARTY_TASK_BYTES)
        bundles = mapped(together(frame_of(spark, pieces), tasks), _Folding(lake), BUNDLES).persist()
    tables = {name: unbundled(bundles, name, schema) for name, schema in TABLES.items()}
    return ControlTables(spark, tables, bundles)


def fold_control_here(lake: str, runs: pa.Table) -> dict[str, pa.Table]:
    """The same of a few parties, inside one task: the tables by name. `runs` are sorted control runs."""
    bundles = _bundles_here(lake, _planned(lake, runs, {}))
    return {name: unbundled(bundles, name, schema) for name, schema in TABLES.items()}


def _bundles_here(lake: str, pieces: pa.Table) -> pa.Table:
    ordered = pieces.sort_by("party").combine_chunks()
    return pa.Table.from_batches(_Folding(lake)(iter(ordered.to_batches())), BUNDLES)


def _planned(lake: str, runs: pa.Table, limits: Limits, hurt: dict[bytes, Corrupt] | None = None) -> pa.Table:
    """The pieces of control runs, from the states on that stand for what the lake lacks."""
    moments: dict[bytes, Mapping[FeedId, int]] = {
        party: limit.control for party, limit in limits.items() if limit.control is not None
    }
    floors: dict[tuple[bytes, bytes], Before] = {
        (party, key): Before(cut.length, cut.link, cut.depth)
        for party, stored in floors_of(lake, runs, moments, hurt).items()
        for key, cut in stored.cuts.items()
    }
    if hurt:
        left = pa.array(list(hurt), runs.schema.field("party").type)
        runs = runs.filter(pc.invert(pc.is_in(runs["party"], left)))
    return plan_pieces(runs, limits=_limits(runs, limits), floors=floors).pieces


def _limits(runs: pa.Table, limits: Limits) -> dict[tuple[bytes, bytes], int]:
    if not limits:
        return {}
    places = set(zip(runs["party"].to_pylist(), runs["feed"].to_pylist(), strict=True))
    found = {}
    for party, feed in places:
        limit = limits.get(party)
        if limit is not None and limit.control is not None:
            found[party, feed] = limit.control.get(feed_id(feed), 0)
    return found


@dataclass(frozen=True)
class _Folding:
    """The task: folds the parties of a partition."""

    lake: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bundler = Bundler(TABLES)
        for party, pieces in parties(batches):
            _fold(self.lake, PartyKey(party), pieces, bundler)
            if bundler.full:
                yield from bundler.take()
        yield from bundler.take()


def _fold(lake: str, party: PartyKey, pieces: pa.Table, bundler: Bundler) -> None:
    feeds, by_feed = {}, _by_feed(pieces)
    lengths = {key: _floor(found) for key, found in by_feed.items() if _floor(found)}
    begun = floor_at(lake, party, lengths) if lengths else None
    for key, found in by_feed.items():
        feeds[key] = _control_feed(lake, key, found, begun)
        for start, end, reason, detail in feeds[key].held.unheld:
            row = {"party": party, "feed": key, "control": True, "start": start, "end": end}
            bundler.add("unheld", {**row, "reason": reason, "detail": detail})
    folded = fold_party(party, feeds, begun)
    machine = folded.membership.machine
    children = [child for child, _ in machine.children]
    for child in (None, *children):
        _tell_party(folded, child, stands_on(lake, child or party, machine.epoch_tally(child)), bundler)
        for key, feed in feeds.items():
            if folded.cursors[feed_id(key)].key == key:
                for held in feed.held.pieces:
                    _tell_targets(child or party, key, held, feed, folded, bundler)
    for cursor in folded.cursors.values():
        _tell_cursor(party, cursor, folded, feeds[cursor.key], bundler)
    for rejection in machine.listed:
        place = {"party": party, "feed": rejection.feed, "seq": rejection.seq, "position": rejection.position}
        bundler.add("refusals", {**place, "reason": rejection.reason, "detail": rejection.detail, "item": None})


def _by_feed(pieces: pa.Table) -> dict[FeedKey, list[Piece]]:
    found: dict[FeedKey, list[Piece]] = {}
    for row in pieces.select(Piece._fields).to_pylist():
        found.setdefault(FeedKey(row["feed"]), []).append(Piece(**row))
    return found


def _floor(pieces: list[Piece]) -> int:
    """How many blocks of a feed a control state stands for."""
    return max((piece.end for piece in pieces if piece.file == NO_FILE), default=0)


def _control_feed(lake: str, key: FeedKey, pieces: list[Piece], start: StoredControl | None) -> ControlFeed:
    stretches, links, payloads = [], {}, {}
    cut = start.cuts.get(key) if start is not None else None
    if cut is not None:
        first = next(piece.piece for piece in pieces if piece.file == NO_FILE)
        stretches.append(Stretch.base(first, cut.length, cut.link, cut.depth))
    for piece in pieces:
        if piece.file == NO_FILE:
            continue
        batches = list(piece_rows(lake, piece))
        stretches.append(Stretch.of(verify_piece(piece, iter(batches), envelopes=False)[0]))
        before = 1 if piece.previous is None else 0
        links[piece.piece] = [link for batch in batches for link in batch["link"].to_pylist()][before:]
        payloads[piece.piece] = [payload for batch in batches for payload in batch["payload"].to_pylist()][before:]
    return ControlFeed(key, hold(stretches), links, payloads)


def _tell_party(folded: FoldedParty, child: PartyKey | None, base: dict[str, Any], bundler: Bundler) -> None:
    machine = folded.membership.machine
    party = child or machine.party
    genesis = machine.genesis
    admission = machine.admission(child)
    titles = dict(machine.children)
    bundler.add(
        "parties",
        {
            "party": party,
            "root": machine.party,
            "title": titles[child] if child else genesis.title if genesis else "",
            "admission": admission.digest,
            "membership": membership_state(machine),
            "genesis_feed": genesis.data_feed if genesis and child is None else None,
            **base,
        },
    )
    _tell_admission(party, admission, bundler)
    for member in machine.members:
        bundler.add(
            "members",
            {
                "party": party,
                "identity": member.identity,
                "name": member.name,
                "role": member.role.label if member.role is not None else None,
                "status": str(member.status),
                "creator": member.creator,
                "devices": sum(not device.revoked for device in member.devices),
            },
        )
    for model in machine.models:
        row = {"party": party, "name": model.name, "version": model.version}
        bundler.add("models", {**row, "descriptor": model.descriptor, "hash": model.hash})


def _tell_admission(party: PartyKey, admission: Admission, bundler: Bundler) -> None:
    for admitted in admission.followed:
        shared = {
            "party": party,
            "feed": admitted.feed,
            "feed_id": feed_id(admitted.feed),
            "control": admitted.kind is FeedKind.CONTROL,
            "identity": admitted.identity,
            "device": admitted.device,
            "end_reason": str(admitted.end_reason) if admitted.end_reason is not None else None,
            "fork": admitted.fork,
        }
        if not admitted.intervals:
            bundler.add("admission", {**shared, "start": 0, "end": 0, "role": None})
        for start, end, role in admitted.intervals:
            bundler.add("admission", {**shared, "start": start, "end": end, "role": role.label})


def _tell_targets(
    party: PartyKey, key: FeedKey, held: HeldPiece, feed: ControlFeed, folded: FoldedParty, bundler: Bundler
) -> None:
    """The processed blocks of a control piece, as what dependencies of data may name."""
    start, piece = held.stretch.start, held.stretch.piece
    end = folded.processed.get(piece, start)
    if end <= start:
        return
    shared = {
        "party": party,
        "names": feed_id(key),
        # Below zero, so that no twig of a data feed has the same name.
        "twig": -2 - held.twig,
        "path": np.array([-2 - twig for twig in held.path], np.int64).tobytes(),
    }
    if piece not in feed.links:  # a control state stands for it: the bound of depth is checked (O8)
        above = held.stretch.last_depth - end + 1
        for at in range(0, end, BUCKET):
            place = {"bucket": at >> BUCKET_BITS, "start": at, "end": min(at + BUCKET, end)}
            below = {"file": NO_FILE, "row": above, "links": None, "depths": None}
            bundler.add("targets", {**shared, **place, **below})
        return
    depths = []
    for index in range(end - start):
        envelope = folded.envelopes[piece, index]
        assert isinstance(envelope, Envelope), (key.hex(), start + index)
        depths.append(envelope.depth)
    bundler.add(
        "targets",
        {
            **shared,
            "bucket": start >> BUCKET_BITS,
            "start": start,
            "end": end,
            "file": None,
            "row": None,
            "links": b"".join(feed.links[piece][: end - start]),
            "depths": np.array(depths, np.int64).tobytes(),
        },
    )


def _tell_cursor(party: PartyKey, cursor: FeedCursor, folded: FoldedParty, feed: ControlFeed, bundler: Bundler) -> None:
    """How far a control feed is processed, and the rejects of one that ended."""
    state, length, link, depth = "open", cursor.length, cursor.link, cursor.depth
    waits = cursor.waits_for
    fork = folded.unproven.get(cursor.key)
    if fork is not None and fork <= length:
        state, length, waits = "forked", fork, None
        link, depth = _mark_before(fork, feed, folded)
    elif cursor.ended is not None:
        state = "ended"
    elif waits is not None:
        state = "waiting"
    ended = cursor.ended if state == "ended" else None
    bundler.add(
        "cuts",
        {
            "party": party,
            "feed": cursor.key,
            "feed_id": cursor.id,
            "control": True,
            "length": length,
            "link": bytes(link),
            "depth": depth,
            "state": state,
            "reason": str(ended) if ended is not None else None,
            "waits_feed": waits[0] if waits else None,
            "waits_seq": waits[1] if waits else None,
            "held": cursor.held,
            "asserted_feeds": b"",
            "asserted_seqs": b"",
            "asserted_links": b"",
        },
    )
    if ended is not None:
        for row in ended_rejects(party, cursor.id, length, cursor.held, str(ended)):
            bundler.add("rejects", row)


def _mark_before(fork: int, feed: ControlFeed, folded: FoldedParty) -> tuple[Link, int]:
    """Link and depth of the last block before a fork."""
    for held in feed.held.main():
        if held.stretch.start < fork <= held.end:
            index = fork - 1 - held.stretch.start
            envelope = folded.envelopes[held.stretch.piece, index]
            assert isinstance(envelope, Envelope), (feed.key.hex(), fork)
            return Link(feed.links[held.stretch.piece][index]), envelope.depth
    return NO_LINK, 0


def ended_rejects(party: bytes, feed: bytes, length: int, held: int, reason: str) -> Iterator[dict[str, Any]]:
    """The rejects of a feed that ended before the block `length`, as a peer lists them."""
    shared = {"party": party, "feed": feed, "position": -1, "item": None}
    yield {**shared, "seq": length, "reason": str(Reason.INVALID), "detail": reason}
    for seq in range(length + 1, min(held, length + AFTER_INVALID_LISTED_MAX)):
        yield {**shared, "seq": seq, "reason": str(Reason.AFTER_INVALID), "detail": ""}
