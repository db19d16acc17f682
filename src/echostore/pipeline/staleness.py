"""What has to be built: the parties whose blocks, models or moment differ from what the last commit has of them.

A commit says up to which version of the lake *all* parties were looked at. Runs over some parties do not move that
point: the next run over all of them looks at these again, and finds little to do.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from echostore.kernel.errors import Refused
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.log import read_entry
from echostore.pipeline.lake.reading import read_runs
from echostore.pipeline.lake.versions import LakeVersion
from echostore.pipeline.output.record import Commit, LakePoint
from echostore.pipeline.output.results import ABSTAINED, FAILED, STRAY, PartyResult, party_results

NOWHERE = LakePoint(0, "")

COMPACTION = "compact"
"""The kind of log entries that add no blocks."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Root parties to build, and those of them whose kept states are of no use."""

    roots: frozenset[bytes] | None
    """None: all parties of the lake."""
    anew: frozenset[bytes] = frozenset()
    """Parties (not only roots) that are built from scratch."""
    unknown: frozenset[bytes] = frozenset()
    """Parties without control feeds that no commit knows: children of some party, or of none."""

    @property
    def nothing(self) -> bool:
        return self.roots is not None and not self.roots and not self.unknown


def lake_point(lake: Lake, version: int) -> LakePoint:
    return LakePoint(version, read_entry(lake.path, version)[1]) if version else NOWHERE


def check_same_lake(lake: Lake, base: Commit) -> None:
    """Refuse to build on a commit that was made from another lake."""
    known = base.lake
    newest = lake.version()
    if known.version > newest or lake_point(lake, known.version) != known:
        raise Refused(
            f"commit {base.number} was built from another lake than {lake.path}, or from a later state of it",
            next_step="Name the lake that the output was built from, or another output folder.",
        )


def stale_parties(
    out: Path, base: Commit | None, version: LakeVersion, wanted: Collection[bytes] | None, models: list[str]
) -> Stale:
    """What a run has to build; of some parties, if they are named."""
    if base is None and wanted is None:
        return Stale(None)
    if base is None:
        return Stale(*_roots(version, wanted or (), {}))
    results = {result.party: result for result in party_results(out, base)}
    touched = touched_parties(version, base.lake.version)
    if wanted is not None:
        touched = touched & frozenset(wanted) | frozenset(party for party in wanted if party not in results)
        results = {party: result for party, result in results.items() if party in wanted}
    anew = frozenset(party for party, result in results.items() if _models_differ(result, base, models))
    unfinished = frozenset(party for party, result in results.items() if result.state == FAILED or result.at)
    roots, _, unknown = _roots(version, touched | anew | unfinished, results)
    return Stale(roots, anew, unknown)


def touched_parties(version: LakeVersion, after: int) -> frozenset[bytes]:
    """Parties of which blocks were added to the lake after a version."""
    lake = version.lake.path
    found: set[bytes] = set()
    for number in range(after + 1, version.version + 1):
        entry, _ = read_entry(lake, number)
        if entry.kind != COMPACTION:
            for record in entry.runs:
                found.update(read_runs(lake, record, None)["party"].unique().to_pylist())
    return frozenset(found)


def _models_differ(result: PartyResult, base: Commit, models: list[str]) -> bool:
    """Whether a party uses a model that is known now and was not, or the other way round."""
    before, now = set(base.settings.get("known_models", ())), set(models)
    used = set(filter(None, result.models.split(",")))
    return bool(used & (before ^ now)) or (result.state == ABSTAINED and used <= now)


def _roots(
    version: LakeVersion, parties: Collection[bytes], results: dict[bytes, PartyResult]
) -> tuple[frozenset[bytes], frozenset[bytes], frozenset[bytes]]:
    """The fields of Stale for some parties: their roots, none anew, and those of which no root is known."""
    known = {results[party].root_party for party in parties if party in results and results[party].state != STRAY}
    others = {party for party in parties if party not in results or results[party].state == STRAY}
    own = set(version.runs(parties=others, control=True)["party"].unique().to_pylist()) if others else set()
    return frozenset(known | own), frozenset(), frozenset(others - own)
