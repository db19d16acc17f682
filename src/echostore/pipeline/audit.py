"""audit: is everything in a lake what its writers signed, whole and in order? Reads all of it and writes nothing.

The stages control, verify and order from scratch, and a hash of every file. What they reject is told by feed: which
blocks, from which one on, and why. Of a party with blocks in a damaged file, or without the control state that stands
for its first control blocks, nothing more can be said; the others are checked.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.kernel.reasons import Reason
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.control_floors import Damage, damaged, floors_of
from echostore.pipeline.lake.reading import check_file
from echostore.pipeline.parties import chosen_parties
from echostore.pipeline.stages.control import fold_control
from echostore.pipeline.stages.frames import Rows, collected, frame_of, mapped, repartitioned, united, width_of
from echostore.pipeline.stages.order import order_blocks
from echostore.pipeline.stages.order_here import order_blocks_here
from echostore.pipeline.stages.standing import Bases

FINDINGS_MAX = 10_000
"""Rows that are told one by one; all of them are counted."""

HARMLESS = frozenset(map(str, (Reason.UNADMITTED, Reason.READER, Reason.BEYOND_CUT, Reason.RETIRED, Reason.WAITING)))
"""Reasons that say nothing against a lake: blocks that are whole and do not count, or not yet."""

DAMAGED_FILE = "damaged-file"
"""The reason of what is wrong with a file as such."""

_FILES = pa.schema([("file", pa.string()), ("sha256", pa.string()), ("bytes", pa.int64())])
_DAMAGE = pa.schema([("file", pa.string()), ("what", pa.string())])


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found. `counts` are blocks by reason."""

    lake_version: int
    parties: int
    feeds: int
    blocks: int
    checked: int
    """Blocks of parties that could be checked: those without any in a damaged file."""
    findings: list[dict[str, Any]]
    counts: dict[str, int]

    @property
    def sound(self) -> bool:
        return not set(self.counts) - HARMLESS


def audit_lake(spark: Any | None, path: Path, parties: Sequence[str] = ()) -> Audit:
    """Check a lake, or some of its parties, on Spark or in this process. Corrupt where the log itself is broken: then nothing can be said."""
    lake = Lake.open(path)
    version = lake.at()
    wanted = chosen_parties(version, parties)
    runs = version.runs(parties=wanted)
    counts: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    hurt: set[bytes] = set()
    for finding in _damaged_files(spark, version, runs):
        counts[DAMAGED_FILE] += finding["blocks"]
        hurt |= finding.pop("parties")
        findings.append(finding)
    for finding in _damaged_states(path, runs, hurt):
        counts[DAMAGED_FILE] += finding["blocks"]
        findings.append(finding)
    if hurt:
        wanted = sorted(set(runs["party"].unique().to_pylist()) - hurt)
        whole = runs.filter(pc.is_in(runs["party"], pa.array(wanted, runs.schema.field("party").type)))
    else:
        whole = runs
    if len(whole):
        control = fold_control(spark, version, wanted, hurt={})  # who is hurt has been told of
        # Where the beginning was freed everywhere, the epoch that the party stands on is the ground to check from.
        bases = Bases.of(str(path), control.rows["parties"]).only(_begun_late(whole))
        cuts = bases.order_cuts() if bases else None
        floors = bases.floors()
        if spark is None:
            order = order_blocks_here(version, control, wanted, previous=cuts, floors=floors)
        else:
            order = order_blocks(spark, version, control, wanted, previous=cuts, floors=floors)
        try:
            for finding in _findings(control, order):
                counts[finding["reason"]] += finding["blocks"]
                if len(findings) < FINDINGS_MAX:
                    findings.append(finding)
        finally:
            order.close()
            control.close()
    feeds = len(runs.group_by(["party", "feed"]).aggregate([]))
    return Audit(
        version.version,
        len(runs["party"].unique()),
        feeds,
        blocks_of(runs),
        blocks_of(whole),
        findings,
        {reason: count for reason, count in sorted(counts.items()) if count},
    )


def blocks_of(runs: pa.Table) -> int:
    """How many blocks runs have in all."""
    return int((runs["end"].to_numpy() - runs["start"].to_numpy()).sum())


def _begun_late(runs: pa.Table) -> set[bytes]:
    """Parties with data feeds of which the lake lacks the first block."""
    data = runs.filter(pc.invert(runs["control"])).group_by(["party", "feed"]).aggregate([("start", "min")])
    return set(data.filter(pc.greater(data["start_min"], 0))["party"].to_pylist())


def _findings(control: Any, order: Any) -> Iterator[dict[str, Any]]:
    """One row for each stretch of a feed that is not in order."""
    for row in _each(united(control.unheld, order.unheld)):
        yield _finding(row, row["start"], row["end"] - row["start"], row["reason"], row["detail"])
    for row in _each(united(control.cuts, order.cuts), "held > length OR state = 'forked'"):
        beyond = row["held"] - row["length"]
        if beyond <= 0 and row["state"] != "forked":
            continue
        if row["state"] == "ended":
            yield _finding(row, row["length"], beyond, row["reason"], "the feed ends before this block")
        elif row["state"] == "forked":
            yield _finding(
                row, row["length"], max(beyond, 1), str(Reason.FORK), "two branches begin here, without a proof"
            )
        elif row["waits_feed"] is not None:
            detail = f"waits for block {row['waits_seq']} of feed {bytes(row['waits_feed']).hex()}"
            yield _finding(row, row["length"], beyond, str(Reason.WAITING), detail)
    for row, end in _excluded(control.admission, order.cuts):
        yield _finding(row, end, row["length"] - end, str(Reason.FORK), "control holds a proof of two branches")


def _each(rows: Rows, where: str = "true") -> Iterator[Any]:
    """Rows one by one; in Spark only those that fulfil a condition, here all."""
    return iter(rows.to_pylist()) if isinstance(rows, pa.Table) else rows.filter(where).toLocalIterator()


def _excluded(admission: Rows, cuts: Rows) -> Iterator[tuple[Any, int]]:
    """Cuts beyond the end that a proven fork has for a feed, and that end."""
    if isinstance(cuts, pa.Table):
        ends: dict[tuple[bytes, bytes, bool], set[int]] = {}
        for row in admission.to_pylist():
            if row["end"] is not None and row["end_reason"] == "fork":
                ends.setdefault((row["party"], row["feed"], row["control"]), set()).add(row["end"])
        for row in cuts.to_pylist():
            for end in sorted(ends.get((row["party"], row["feed"], row["control"]), ())):
                if row["length"] > end:
                    yield row, end
        return
    columns = ("party", "feed", "end_reason", "control", "end")
    proven = admission.filter("end IS NOT NULL AND end_reason = 'fork'").select(*columns).distinct()
    for row in cuts.join(proven, ["party", "feed", "control"]).filter("length > end").toLocalIterator():
        yield row, row["end"]


def _finding(row: Any, seq: int, blocks: int, reason: str, detail: str) -> dict[str, Any]:
    return {
        "party": bytes(row["party"]).hex(),
        "feed": bytes(row["feed"]).hex(),
        "seq": seq,
        "blocks": blocks,
        "reason": reason,
        "detail": detail,
    }


def _damaged_files(spark: Any, version: Any, runs: pa.Table) -> Iterator[dict[str, Any]]:
    """Files of the lake whose content does not match the log, with the parties in them; tasks hash them."""
    used = set(runs["file"].unique().to_pylist())
    rows = [
        {"file": each.file, "sha256": each.sha256, "bytes": each.bytes} for each in version.files if each.file in used
    ]
    if not rows:
        return
    frame = repartitioned(frame_of(spark, pa.Table.from_pylist(rows, _FILES)), min(len(rows), 4 * width_of(spark)))
    found = collected(mapped(frame, _Hashing(str(version.lake.path)), _DAMAGE))
    for row in sorted(found, key=lambda row: str(row["file"])):
        inside = runs.filter(pc.equal(runs["file"], row["file"]))
        yield {
            "parties": set(inside["party"].unique().to_pylist()),
            "party": "",
            "feed": "",
            "seq": 0,
            "blocks": blocks_of(inside),
            "reason": DAMAGED_FILE,
            "detail": f"{row['file']}: {row['what']}",
        }


def _damaged_states(path: Path, runs: pa.Table, hurt: set[bytes]) -> Iterator[dict[str, Any]]:
    """Control states that can't be read; to `hurt` go the parties of which nothing can be said without."""
    control, lacking = runs.filter(runs["control"]), dict[bytes, Corrupt]()
    floors_of(path, control, {}, lacking)
    hurt.update(lacking)
    found = list(damaged(path, sorted(control["party"].unique().to_pylist())))
    missing = lacking.keys() - {each.party for each in found}
    for each in (*found, *(Damage(party, 0, lacking[party].what) for party in sorted(missing))):
        yield {
            "party": each.party.hex(),
            "feed": "",
            "seq": 0,
            "blocks": max(1, each.messages),
            "reason": DAMAGED_FILE,
            "detail": each.what,
        }


@dataclass(frozen=True)
class _Hashing:
    """The task: hash some files."""

    lake: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            damage = []
            for row in batch.to_pylist():
                what = check_file(Path(self.lake), row["file"], row["sha256"], row["bytes"])
                if what is not None:
                    damage.append({"file": row["file"], "what": what})
            yield pa.RecordBatch.from_pylist(damage, _DAMAGE)
