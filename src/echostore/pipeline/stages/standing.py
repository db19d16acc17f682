"""Parties that stand on an epoch: which, up to where, and what of it folding needs.

Once an epoch is final, every peer folds from its snapshot, and so do the stages:

    first build on it   its items are the states before (`seeding`): those that the last commit has otherwise; its cuts
                        are the cuts before
    later ones          as any: on top of the last commit
    from the past       items are folded again from the epoch's form of them and the blocks above its cut
    what is missing     an item that was made inside of it, and is not there, was discarded

The newest final epoch counts whose snapshot the lake has, as a peer goes on from the base it has until it has the next.
Without any, the blocks are folded from their beginning, unless an epoch left something out: then nobody could.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import (
    ARC_BIT,
    LINK_BYTES,
    POSITION_BITS,
    FeedId,
    FeedKey,
    ItemId,
    PartyKey,
    feed_id,
    item_local,
)
from echostore.kernel.ids import item_creator as creator_of
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.party.epoch_chain import Tally
from echostore.pipeline.lake.bases import has_base, open_base
from echostore.pipeline.models import model_factory
from echostore.pipeline.schemas import CUTS
from echostore.pipeline.stages.asserted import Said, pack_asserted
from echostore.pipeline.stages.frames import Rows, gathered
from echostore.pipeline.stages.planning import Before, Place
from echostore.wire.base_epoch import BaseEpoch, BaseName

KEY_BYTES = 32

STANDING = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("base", pa.binary(), nullable=False),
        pa.field("base_name", pa.binary(), nullable=False),
        pa.field("base_feeds", pa.binary(), nullable=False),
        pa.field("base_lengths", pa.binary(), nullable=False),
        pa.field("base_links", pa.binary(), nullable=False),
        pa.field("base_depths", pa.binary(), nullable=False),
    ]
)
"""Of PARTIES, the rows of those that stand on an epoch."""

CUTS_OF_BASES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
    ]
)
"""What of CUTS is asked of the cuts before."""

Lengths = Callable[[FeedId], int]


def stands_on(lake: str, party: bytes, tally: Tally) -> dict[str, Any]:
    """What PARTIES say of the base of a party with these epochs."""
    final = [epoch for epoch in tally.chain if epoch.final]
    discards = [epoch.number for epoch in final if epoch.genesis.discard_before_ms > 0]
    for epoch in reversed(final):
        if discards and epoch.number < discards[0]:
            break  # what came to be left out since is in no state that the blocks above this one give
        if not has_base(lake, party, epoch.hash):
            continue
        name = BaseName.of(epoch.genesis, epoch.hash)
        cuts = [
            cut
            for cut in open_base(lake, party, name, model_factory(None)).cuts.values()
            if not cut.control and cut.length
        ]
        return {
            "base_number": name.number,
            "base": name.genesis,
            "base_name": name.encode(),
            "base_feeds": b"".join(cut.feed for cut in cuts),
            "base_lengths": np.array([cut.length for cut in cuts], np.int64).tobytes(),
            "base_links": b"".join(cut.link for cut in cuts),
            "base_depths": np.array([cut.depth for cut in cuts], np.int64).tobytes(),
        }
    return {"base_number": discards[-1]} if discards else {}


def base_lacking(number: int) -> str:
    """Why there is no snapshot of a party whose base the lake lacks."""
    return (
        f"epoch {number} left something out, and the lake has no snapshot of it: "
        "publish from a home that stands on this epoch"
    )


@dataclass(slots=True)
class Bases:
    """The bases of some parties. Snapshots are opened when they are asked for."""

    lake: str
    rows: pa.Table
    """STANDING"""
    factory: ModelFactory | None = None
    _lengths: dict[bytes, dict[FeedId, int]] = field(init=False)
    _open: dict[bytes, BaseEpoch] = field(default_factory=dict, init=False)
    _names: dict[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._lengths = {
            row["party"]: {feed_id(FeedKey(key)): length for key, length in _cuts_in(row)}
            for row in self.rows.to_pylist()
        }
        self._names = {row["party"]: row["base_name"] for row in self.rows.to_pylist()}

    @staticmethod
    def of(lake: str, parties: Rows) -> "Bases":
        """Out of PARTIES, here or in Spark."""
        if isinstance(parties, pa.Table):
            chosen = parties.filter(pc.is_valid(parties["base"])).select(STANDING.names)
        else:
            chosen = gathered(parties.filter("base IS NOT NULL").select(*STANDING.names))
        return Bases(lake, chosen.cast(STANDING))

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, party: bytes) -> bool:
        return party in self._names

    def hashes(self) -> dict[bytes, bytes]:
        """Party -> hash of the genesis of its base."""
        return {row["party"]: row["base"] for row in self.rows.to_pylist()}

    def discard(self, but: "Bases") -> bool:
        """Whether one of these, other than those that parties stand on in `but`, left something out."""
        known = but.hashes()
        others = [name for party, name in self._names.items() if self.hashes()[party] != known.get(party)]
        return any(BaseName.decode(name).discards for name in others)

    def only(self, parties: Iterable[bytes]) -> "Bases":
        return Bases(self.lake, self.rows.filter(pc.is_in(self.rows["party"], pa.array(sorted(parties), pa.binary()))))

    def opened(self, party: bytes) -> BaseEpoch:
        found = self._open.get(party)
        if found is None:
            factory = self.factory or model_factory(None)
            found = self._open[party] = open_base(self.lake, party, BaseName.decode(self._names[party]), factory)
        return found

    def lengths(self, party: bytes) -> Lengths:
        """How many blocks of each feed lie inside."""
        known = self._lengths.get(party, {})
        return lambda feed: known.get(feed, 0)

    def inside(self, party: bytes, item: bytes) -> bool:
        """Whether an item was made inside the base, as far as its number tells."""
        local = item_local(ItemId(item))
        made = local >> POSITION_BITS
        return not local & ARC_BIT and made < self.lengths(PartyKey(party))(creator_of(ItemId(item)))

    def floors(self) -> dict[Place, Before]:
        """Where they end in each feed."""
        found: dict[Place, Before] = {}
        for row in self.rows.to_pylist():
            links, depths = row["base_links"], np.frombuffer(row["base_depths"], np.int64).tolist()
            for at, (feed, length) in enumerate(_cuts_in(row)):
                link = links[at * LINK_BYTES : (at + 1) * LINK_BYTES]
                found[row["party"], feed] = Before(length, link, depths[at])
        return found

    def order_cuts(self) -> pa.Table:
        """CUTS at their ends, with what the feeds had said there: the bases are opened for it."""
        rows = [
            {
                "party": party,
                "feed": cut.feed,
                "feed_id": feed_id(cut.feed),
                "control": False,
                "length": cut.length,
                "link": cut.link,
                "depth": cut.depth,
                "state": "open",
                "held": cut.length,
                **pack_asserted(Said(each.feed, each.seq, each.link_prefix) for each in cut.asserted),
            }
            for party in self._names
            for cut in self.opened(party).cuts.values()
            if not cut.control and cut.length
        ]
        return pa.Table.from_pylist(rows, CUTS)

    def cuts(self) -> pa.Table:
        """CUTS_OF_BASES"""
        rows = [
            {"party": row["party"], "feed": key, "control": False, "length": length}
            for row in self.rows.to_pylist()
            for key, length in _cuts_in(row)
        ]
        return pa.Table.from_pylist(rows, CUTS_OF_BASES)


def stood_on(parties: pa.Table, standing: pa.Table) -> pa.Table:
    """PARTIES that stand where they stood before (STANDING)."""
    before = {row["party"]: row for row in standing.to_pylist()}
    rows = []
    for row in parties.to_pylist():
        nowhere = dict.fromkeys((*STANDING.names[1:], "base_number"))
        known = before.get(row["party"])
        number = {} if known is None else {"base_number": BaseName.decode(known["base_name"]).number}
        rows.append({**row, **nowhere, **(known or {}), **number})
    return pa.Table.from_pylist(rows, parties.schema)


def lacks_base(parties: pa.Table) -> bool:
    """Whether one of these rows of PARTIES stands on an epoch that the lake lacks."""
    return bool(pc.any(pc.and_(pc.is_valid(parties["base_number"]), pc.is_null(parties["base"]))).as_py())


def above_bases(moved: pa.Table, bases: Bases) -> pa.Table:
    """Stretches of blocks whose standing changed, without what lies inside of bases: that counts for good."""
    if not bases or not len(moved):
        return moved
    rows = []
    for row in moved.to_pylist():
        start = max(row["start"], bases.lengths(row["party"])(feed_id(FeedKey(row["feed"]))))
        if start < row["end"]:
            rows.append({**row, "start": start})
    return pa.Table.from_pylist(rows, moved.schema)


def check_reached(bases: Bases, cuts: pa.Table) -> None:
    """Refuse a base whose blocks the lake does not have: what was written above it could not be told apart."""
    reached = {(row["party"], row["feed"]): row["length"] for row in cuts.to_pylist()}
    for row in bases.cuts().to_pylist():
        found = reached.get((row["party"], row["feed"]), 0)
        if found < row["length"]:
            raise Corrupt(
                f"party {row['party'].hex()} stands on an epoch with {row['length']} blocks of feed "
                f"{row['feed'].hex()}, and {found} of them can be processed here",
                next_step="Publish from a home that holds the blocks below the epoch too.",
            )


def _cuts_in(row: dict[str, Any]) -> Iterable[tuple[bytes, int]]:
    keys, lengths = row["base_feeds"], np.frombuffer(row["base_lengths"], np.int64).tolist()
    return [(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], length) for at, length in enumerate(lengths)]
