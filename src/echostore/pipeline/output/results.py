"""What a run says about each party: rows of the kind `parties`, of which the one with the highest commit counts."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.layout import parse_file
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.table_schemas import PARTIES

BUILT: Final = "built"
ABSTAINED: Final = "abstained"
FAILED: Final = "failed"
STRAY: Final = "stray"
"""Of a party of which the lake has data alone: nobody admits it."""

KIND: Final = "parties"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyResult:
    """One party after a run. `messages` = applied + rejected + waiting."""

    party: bytes
    root_party: bytes
    title: str = ""
    state: str
    detail: str = ""
    epoch: int
    cid: str | None
    root: bytes | None = None
    control: bytes | None = None
    models: str = ""
    at: str = ""
    messages: int
    applied: int
    rejected: int
    waiting: int
    items: int
    since: int
    built: int
    commit: int

    def document(self) -> dict[str, Any]:
        """As `pipeline run --json` prints it. What went wrong is there only if something did."""
        shown: dict[str, Any] = {
            "party": self.party.hex(),
            "epoch": self.epoch,
            "cid": self.cid,
            "messages": self.messages,
            "items": self.items,
            "rejected": self.rejected,
            "waiting": self.waiting,
        }
        if self.state != BUILT:
            shown["error"] = f"{self.state}: {self.detail}"
        return shown

    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in PARTIES.names}
        return {**row, "party": self.party.hex(), "root_party": self.root_party.hex()}

    @staticmethod
    def of(row: dict[str, Any]) -> "PartyResult":
        keys = {name: bytes.fromhex(row[name]) for name in ("party", "root_party")}
        return PartyResult(**{**row, **keys})


def results_table(results: Collection[PartyResult]) -> pa.Table:
    return pa.Table.from_pylist([result.row() for result in sorted(results, key=lambda each: each.party)], PARTIES)


def party_results(
    out: Path, commit: Commit, parties: Collection[bytes] | None = None, *, columns: list[str] | None = None
) -> Iterator[PartyResult]:
    """The results that count, ascending by party; of some parties if they are named. Roots are left out by default."""
    wanted = None if parties is None else pa.array(sorted(party.hex() for party in parties), pa.string())
    chosen = columns or [name for name in PARTIES.names if name not in ("root", "control")]
    tables = [_rows(out, file, chosen, wanted) for file in commit.files.get(KIND, ())]
    if not tables:
        return
    rows = pa.concat_tables(tables).sort_by([("party", "ascending"), ("commit", "descending")])
    last = ""
    for batch in rows.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            if row["party"] != last:
                last = row["party"]
                yield PartyResult.of(row)


def latest_result(out: Path, commit: Commit, party: bytes) -> PartyResult | None:
    """Everything that the commit says about a party, its state root included."""
    return next(party_results(out, commit, [party], columns=PARTIES.names), None)


def _rows(out: Path, file: NamedFile, columns: list[str], wanted: pa.Array | None) -> pa.Table:
    filters = None if wanted is None else pc.field("party").isin(wanted)
    return read_table(out, file, PARTIES, columns=columns, filters=filters)


def commits_of(files: Collection[NamedFile]) -> set[int]:
    """The commits that wrote some files."""
    return {parsed[0] for file in files if (parsed := parse_file(file.path)) is not None}


def totals(out: Path, files: Collection[NamedFile]) -> dict[str, int]:
    """Sums over the parties, of the rows that count. By column: there may be a million."""
    names = ("messages", "applied", "rejected", "waiting", "items")
    tables = [read_table(out, file, PARTIES, columns=["party", "commit", "state", *names]) for file in files]
    if not tables:
        return {"parties": 0}
    rows = pa.concat_tables(tables).sort_by([("party", "ascending"), ("commit", "descending")])
    party = rows["party"].combine_chunks()
    first = pa.concat_arrays([pa.array([True]), pc.not_equal(party.slice(1), party.slice(0, len(party) - 1))])
    counting = rows.filter(first)
    found = {"parties": len(counting), **{name: int(pc.sum(counting[name]).as_py() or 0) for name in names}}
    for state in (ABSTAINED, FAILED, STRAY):
        found[state] = int(pc.sum(pc.equal(counting["state"], state)).as_py() or 0)
    return found
