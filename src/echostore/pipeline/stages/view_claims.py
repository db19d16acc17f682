"""Which geneses claim an inception key, over the runs of a pipeline, and which of them lost it.

The first round lets every view have its key: buckets see single items. They tell their claims (CLAIMS), and where one key
is claimed twice, or claimed once more than the base epoch has it, all items that claim it are folded again from their past,
knowing who lost. The rule is the kernel's (`kernel.items.view_claims`).

    bucket 3a   key K claimed by x @7 ─┐                               x holds K
    bucket 9c   key K claimed by y @5 ─┼──► one key, more than one ──► y holds K, x is folded again and refused
    last commit                        ┘

Commits keep all claims that were ever read; whether a claim counts is asked of the admission and of the base each time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import FeedId, ItemId, PartyKey
from echostore.kernel.items.view_claims import Claim, key_holder
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.schemas import CLAIMS
from echostore.pipeline.stages.fold_rounds import Items
from echostore.pipeline.stages.standing import Bases

READER = "reader"

AdmissionOf = Callable[[Iterable[bytes]], pa.Table]
"""Rows of ADMISSION about the data feeds of some parties."""


class KeyClaims:
    """The claims of a run: those of the last commit, and those that its rounds found."""

    def __init__(self, out: str, before: Iterable[NamedFile], bases: Bases | None, admission: AdmissionOf) -> None:
        self._out, self._before, self._bases, self._admission = out, list(before), bases, admission
        self._found = _empty()
        self._looked_at: set[tuple[PartyKey, bytes]] = set()
        """Keys whose claims are folded again already, and nobody has claimed since."""
        self._views: dict[tuple[bytes, bytes], ItemId | None] = {}
        """What the bases have under keys."""

    def add(self, claims: pa.Table) -> None:
        """Claims that a round told. A key that somebody else claims now is looked at once more."""
        told = _frame(claims).unique()
        new = told.join(self._found, on=["party", "item"], how="anti")
        if not new.is_empty():
            self._looked_at.difference_update(new.select("party", "inception").iter_rows())
            self._found = pl.concat([self._found, new])

    def rivals(self, touched: Items) -> Items:
        """Items that claim keys which more than one claims, of keys that were claimed in this run or by touched items."""
        parties = {*self._found["party"].unique().to_list(), *touched}
        if not parties:
            return {}
        every = self._of(parties)
        items = [(party, item) for party, each in touched.items() for item in each]
        known = pl.DataFrame(items, schema={"party": pl.Binary, "item": pl.Binary}, orient="row")
        keys = pl.concat([self._found, every.join(known, on=["party", "item"], how="semi")])
        found: dict[PartyKey, set[ItemId]] = defaultdict(set)
        for (party, key), claims in self._contested(every.join(keys, on=["party", "inception"], how="semi")).items():
            if (party, key) not in self._looked_at:
                self._looked_at.add((party, key))
                found[party].update(claim.item for claim in claims)
        return {party: frozenset(items) for party, items in found.items()}

    def lost(self, parties: Iterable[PartyKey]) -> Items:
        """The items of some parties that claim a key, by a block that counts, and do not hold it."""
        contested = self._contested(self._of(parties))
        if not contested:
            return {}
        counts = _counting(self._admission(sorted({party for party, _ in contested})))
        found: dict[PartyKey, set[ItemId]] = defaultdict(set)
        for (party, key), claims in contested.items():
            inside = self._bases.lengths(party) if self._bases else lambda feed: 0
            counting = [each for each in claims if each.seq >= inside(each.feed) and counts(party, each)]
            holder = key_holder(counting, in_base=self._in_base(party, key))
            found[party].update(claim.item for claim in counting if claim.item != holder)
        return {party: frozenset(items) for party, items in found.items()}

    def _of(self, parties: Iterable[bytes]) -> pl.DataFrame:
        """All claims of some parties, each once."""
        chosen = pa.array(sorted(parties), pa.binary())
        before = [
            _frame(read_table(self._out, file, CLAIMS, filters=pc.field("party").isin(chosen))) for file in self._before
        ]
        now = self._found.filter(pl.col("party").is_in(chosen.to_pylist()))
        return pl.concat([*before, now]).unique()

    def _contested(self, claims: pl.DataFrame) -> dict[tuple[PartyKey, bytes], list[Claim]]:
        """The claims of keys that more than one item claims, or that the base has a view under."""
        key = ["party", "inception"]
        several = claims.group_by(key).len().filter(pl.col("len") > 1)
        based = [row for row in claims.select(key).unique().iter_rows() if self._in_base(*row) is not None]
        keys = pl.concat([several.select(key), pl.DataFrame(based, schema=several.select(key).schema, orient="row")])
        found: dict[tuple[PartyKey, bytes], list[Claim]] = defaultdict(list)
        for party, inception, item, depth in claims.join(keys, on=key, how="semi").iter_rows():
            found[PartyKey(party), inception].append(Claim(depth, ItemId(item)))
        return found

    def _in_base(self, party: bytes, key: bytes) -> ItemId | None:
        if not self._bases or party not in self._bases:
            return None
        if (party, key) not in self._views:
            self._views[party, key] = self._bases.opened(party).view(key)
        return self._views[party, key]


def _counting(admission: pa.Table) -> Callable[[bytes, Claim], bool]:
    """Whether the block of a claim counts."""
    intervals: dict[tuple[bytes, FeedId], list[tuple[int, int | None]]] = defaultdict(list)
    for row in admission.to_pylist():
        if row["role"] is not None and row["role"] != READER:
            intervals[row["party"], FeedId(row["feed_id"])].append((row["start"], row["end"]))

    def counts(party: bytes, claim: Claim) -> bool:
        known = intervals.get((party, claim.feed), ())
        return any(start <= claim.seq and (end is None or claim.seq < end) for start, end in known)

    return counts


def _frame(claims: pa.Table) -> pl.DataFrame:
    found = pl.from_arrow(claims.select(CLAIMS.names))
    assert isinstance(found, pl.DataFrame)
    return found


def _empty() -> pl.DataFrame:
    return _frame(CLAIMS.empty_table())
