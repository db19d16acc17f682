"""reduce, in one process: the rounds of `stages.reduce` for a small lake, and for parties of which little is new.

The tasks are those of the batch (`Demux`, `Reducing`) over the same parcels; what Spark joins and shuffles there is a few
dictionaries and one sort here. Inputs hold tables where they hold DataFrames for Spark.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import ItemId, PartyKey, item_from_text
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import named_files
from echostore.pipeline.schemas import ADMISSION, PARCELS, SLICES, STATE_INDEX
from echostore.pipeline.stages.demux import Demux, slices_of
from echostore.pipeline.stages.fold_rounds import Findings, Round
from echostore.pipeline.stages.parcels import bucket_nibbles
from echostore.pipeline.stages.reduce import (
    Inputs,
    Outcome,
    Reducing,
    SparkEngine,
    index_to_parcels,
    items_table,
    lacking_to_parcels,
    reduce_items,
    wanted_parcels,
)
from echostore.pipeline.stages.subtrees import latest_tops, tops_parcels

HISTORY_BLOCKS_MAX = 200_000
"""Where items have to be folded from their whole past, blocks that a task reads for it; more is a job for Spark."""


Files = dict[str, list[NamedFile]]


class TooMuchHistory(Exception):
    """Items of a party have to be folded from more blocks than a task should read. The next commit does it."""


def reduce_here(inputs: Inputs) -> Outcome:
    """Reduce what is new, here: for a stream, which leaves subtrees and long pasts to the next run."""
    return reduce_items(inputs, HereEngine(inputs))


def reduce_whole_here(inputs: Inputs) -> Outcome:
    """Reduce what is new, here, with all that a run makes of it on Spark: subtrees, changes of placements, any past."""
    return reduce_items(inputs, HereEngine(inputs, of_run=True))


class HereEngine(SparkEngine):
    """Runs rounds where it is called. `of_run`: for a run, and not for a step of a stream."""

    def __init__(self, inputs: Inputs, *, of_run: bool = False) -> None:
        super().__init__(inputs)
        self._of_run = of_run
        cuts = inputs.cuts.filter(pc.invert(inputs.cuts["control"]))
        self._cuts = {(row["party"], row["feed"]): row for row in cuts.to_pylist() if row["length"]}
        self._messages: dict[bytes, int] = defaultdict(int)
        for (party, _), row in self._cuts.items():
            self._messages[party] += row["length"]

    def run(self, round: Round) -> Findings:
        given = self.inputs
        if (
            not self._of_run
            and round.history
            and sum(self._messages[party] for party in round.wanted or ()) > HISTORY_BLOCKS_MAX
        ):
            raise TooMuchHistory
        wanted = None if round.wanted is None else self._scratch("wanted", items_table(round.wanted))
        demuxes = [(Demux(given.lake, given.place, wanted), self._slices(round))]
        if wanted is None and given.moved is not None:
            demuxes.append((Demux(given.lake, given.place, None, touching=True), self._moved_slices()))
        task = Reducing(
            given.place,
            given.turn + round.number,
            given.models,
            None if wanted is None else self._scratch("absent", items_table(round.absent)),
            None if wanted is None else self._scratch("admission", self._admission(round.wanted or ())),
            round.history,
            lost=self._lost(round),
            trees=self._of_run and wanted is None and given.trees,
            places=self._of_run,
            lake=given.lake,
            bases=self._scratch("bases", given.bases.rows) if given.bases else None,
        )
        more = pa.Table.from_batches(self._more_parcels(round), PARCELS)
        return self._found(round, self.carry_out(demuxes, more, task))

    def carry_out(self, demuxes: list[tuple[Demux, list[dict[str, Any]]]], more: pa.Table, task: Reducing) -> Files:
        """Slices into parcels, and all parcels through the reducer; the files that it wrote, by kind."""
        started = time.perf_counter()
        found = [pa.Table.from_batches(demux(_batches(slices)), PARCELS) for demux, slices in demuxes]
        self.demux_s = (self.demux_s or 0.0) + time.perf_counter() - started
        rows = [row for batch in task(by_bucket([*found, more])) for row in batch.to_pylist()]
        return named_files(rows)

    def lacking(self, parties: frozenset[PartyKey]) -> Iterator[tuple[PartyKey, ItemId, ItemId]]:
        if self.inputs.lacking_before is not None:
            for row in self.inputs.lacking_before.to_pylist():
                if row["party"] in parties and row["item"] is not None:
                    yield PartyKey(row["party"]), ItemId(row["item"]), item_from_text(row["detail"])

    # what goes in

    def _slices(self, round: Round) -> list[dict[str, Any]]:
        """Stretches between the cuts before and those of now; with `history` from the beginning, or from the base."""
        return list(self._sliced(self._runs(round), self._after(round.history)))

    def _after(self, history: bool) -> dict[tuple[bytes, bytes], int]:
        known = self.inputs.cuts_below(history)
        if known is None:
            return {}
        columns = (known[name].to_pylist() for name in ("party", "feed", "length"))
        return {(party, feed): length for party, feed, length in zip(*columns, strict=True)}

    def _sliced(self, runs: pa.Table, after: dict[tuple[bytes, bytes], int]) -> Iterator[dict[str, Any]]:
        standing: dict[tuple[bytes, bytes], list[dict[str, Any]]] = defaultdict(list)
        for row in self.inputs.admission.to_pylist():
            if not row["control"]:
                standing[row["party"], row["feed"]].append(row)
        by_feed: dict[tuple[bytes, bytes], list[dict[str, Any]]] = defaultdict(list)
        for run in runs.to_pylist():
            place = (run["party"], run["feed"])
            if not run["control"] and place in self._cuts and run["end"] > after.get(place, 0):
                by_feed[place].append(run)
        for place, found in sorted(by_feed.items()):
            cut, intervals = self._cuts[place], standing.get(place)
            told = {
                "length": cut["length"],
                "link": cut["link"],
                "after": after.get(place, 0),
                "messages": self._messages[place[0]],
                "intervals": intervals,
                "end_reason": intervals[0]["end_reason"] if intervals else None,
            }
            yield from slices_of(self.inputs.lake, [{**run, **told} for run in found])

    def _moved_slices(self) -> list[dict[str, Any]]:
        """Slices of the blocks whose standing changed, as if nothing had been taken before."""
        ranges: dict[tuple[bytes, bytes], list[tuple[int, int]]] = defaultdict(list)
        for row in self.inputs.moved.to_pylist():  # type: ignore[union-attr]  # the caller has looked
            ranges[row["party"], row["feed"]].append((row["start"], row["end"]))
        found = []
        for each in self._sliced(self.inputs.runs, self._after(history=True)):
            for low, high in ranges.get((each["party"], each["feed"]), ()):
                start, end = max(each["start"], low), min(each["end"], high)
                if start < end:
                    found.append({**each, "start": start, "end": end, "row": each["row"] + start - each["start"]})
        return found

    def _more_parcels(self, round: Round) -> Iterator[pa.RecordBatch]:
        given = self.inputs
        index = list(given.index_before)
        if round.history:
            index += [file for files in self.rounds for file in files.get("state_index", ())]
        rows = read_index_rows(given.place.out, index, frozenset(self._messages))
        yield from index_to_parcels(iter(self._with_messages(rows).to_batches()))
        if round.wanted is not None:
            depth = {bytes(party): bucket_nibbles(self._messages[party]) for party in round.wanted}
            yield pa.RecordBatch.from_pylist(list(wanted_parcels(round.wanted, depth)), PARCELS)
            return
        if self._of_run and given.trees:
            nibbles = {party: bucket_nibbles(count) for party, count in self._messages.items()}
            tops = tops_parcels(latest_tops(given.place.out, given.tops_before, nibbles))
            yield pa.RecordBatch.from_pylist(tops, PARCELS)
        if given.lacking_before is not None:
            rows = given.lacking_before.filter(
                pc.is_in(given.lacking_before["party"], pa.array(list(self._messages), pa.binary()))
            )
            yield from lacking_to_parcels(iter(self._with_messages(rows).to_batches()))

    def _with_messages(self, rows: pa.Table) -> pa.Table:
        counts = [self._messages[party] for party in rows["party"].to_pylist()]
        return rows.append_column("messages", pa.array(counts, pa.int64()))

    def _admission(self, parties: Iterable[bytes]) -> pa.Table:
        rows = self.inputs.admission.filter(pc.invert(self.inputs.admission["control"]))
        wanted = pa.array(sorted(bytes(party) for party in parties), pa.binary())
        return rows.filter(pc.is_in(rows["party"], wanted)).select(ADMISSION.names).cast(ADMISSION)


def read_index_rows(out: str, files: Iterable[NamedFile], parties: frozenset[bytes]) -> pa.Table:
    """The rows of index files about some parties."""
    wanted = pc.field("party").isin(pa.array(sorted(parties), pa.binary()))
    tables = [read_table(out, file, STATE_INDEX, filters=wanted) for file in files]
    return pa.concat_tables([STATE_INDEX.empty_table(), *tables])


def by_bucket(parcels: list[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Parcels as the reducer wants them: sorted by party and bucket."""
    table = pa.concat_tables(parcels).sort_by([("party", "ascending"), ("bucket", "ascending")])
    return iter(table.combine_chunks().to_batches())


def _batches(slices: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pylist(slices, SLICES)])
