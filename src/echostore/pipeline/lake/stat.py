"""stat: what is in a lake, and with `full` whether it is what its log says.

The full check follows the whole chain of entries, computes each whole state again, hashes every live file, and lays the
runs over the rows. Whether the blocks themselves are good (links, signatures, order) is `pipeline audit`'s to say.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.pipeline.lake import log
from echostore.pipeline.lake.compact import KEEP_S, SMALL_BYTES, dead_files
from echostore.pipeline.lake.layout import path_of
from echostore.pipeline.lake.reading import check_file, read_rows
from echostore.pipeline.lake.versions import Lake, LakeVersion, overlapping

Tell = Callable[[int, int], None]


@dataclass(slots=True)
class LakeStat:
    """The numbers of one version of a lake."""

    version: int
    parties: int = 0
    feeds: int = 0
    forked_feeds: int = 0
    """Feeds with runs that overlap: branches, or blocks that are there twice."""
    runs: int = 0
    blocks: int = 0
    control_blocks: int = 0
    files: int = 0
    small_files: int = 0
    """Files that `lake compact` would merge."""
    bytes: int = 0
    row_bytes: int = 0
    """The rows before compression, about."""
    dead_files: int = 0
    dead_bytes: int = 0
    """What `lake compact` would delete."""
    checked: bool = False
    damage: list[tuple[str, str]] = field(default_factory=list)
    """(file, what is wrong), when everything was checked."""


def stat(lake: Lake, *, full: bool = False, keep_s: float = KEEP_S, tell: Tell | None = None) -> LakeStat:
    """The numbers of the newest version; with `full`, everything is checked, and damage is listed."""
    found = LakeStat(0, checked=full)
    try:
        at = lake.at()
        _count(at, found)
    except Corrupt as error:
        if not full:
            raise
        found.damage.append((str(lake.path), error.what))
        return found
    for _, size in dead_files(lake, keep_s):
        found.dead_files += 1
        found.dead_bytes += size
    if full:
        found.damage += _damage(at, tell)
    return found


def _count(at: LakeVersion, found: LakeStat) -> None:
    found.version = at.version
    found.blocks = sum(each.rows for each in at.files)
    found.control_blocks = sum(each.rows for each in at.files if each.control)
    found.files = len(at.files)
    found.bytes = sum(each.bytes for each in at.files) + sum(each.bytes for each in at.runs_files)
    runs = at.runs()  # may be damaged; the log has told the rest
    found.runs = len(runs)
    found.parties = pc.count_distinct(runs["party"]).as_py()
    feeds = runs.append_column("forked", overlapping(runs)).group_by(["party", "feed"]).aggregate([("forked", "max")])
    found.feeds = len(feeds)
    found.forked_feeds = pc.sum(feeds["forked_max"]).as_py() or 0
    found.row_bytes = pc.sum(runs["bytes"]).as_py() or 0
    sizes = runs.group_by(["file", "control"]).aggregate([("bytes", "sum")])
    small = sizes.filter(pc.less(sizes["bytes_sum"], SMALL_BYTES))["control"].to_pylist()
    found.small_files = sum(count for count in (small.count(True), small.count(False)) if count > 1)


# the full check


def _damage(at: LakeVersion, tell: Tell | None) -> Iterator[tuple[str, str]]:
    lake = at.lake.path
    try:
        log.check_chain(lake)
        log.check_states(lake)
    except Corrupt as error:
        yield str(lake / "log"), error.what
    records: list[log.BlocksFile | log.RunsFile] = [*at.runs_files, *at.files]
    runs = at.runs()
    for number, record in enumerate(records):
        if tell:
            tell(number, len(records))
        path = str(path_of(lake, record.file))
        wrong = check_file(lake, record.file, record.sha256, record.bytes)
        if wrong is not None:
            yield path, wrong
        elif isinstance(record, log.BlocksFile):
            try:
                wrong = _rows_wrong(at, record, runs.filter(pc.equal(runs["file"], record.file)))
            except Corrupt as error:
                wrong = error.what
            if wrong is not None:
                yield path, wrong
    if tell:
        tell(len(records), len(records))


def _rows_wrong(at: LakeVersion, record: log.BlocksFile, runs: pa.Table) -> str | None:
    """What the runs of a file say that its rows do not, or None. Every row has to be in exactly one run."""
    runs = runs.sort_by("row")
    row, count = runs["row"].to_numpy(), runs["end"].to_numpy() - runs["start"].to_numpy()
    if not np.array_equal(row, np.concatenate([[0], np.cumsum(count)[:-1]])) or int(count.sum()) != record.rows:
        return "its runs do not cover its rows once each"
    columns = ("party", "feed", "control", "seq", "link", "depth", "previous")
    rows = pa.Table.from_batches(list(read_rows(at.lake.path, record.file, 0, record.rows, columns)))
    first, last = rows.take(pa.array(row)), rows.take(pa.array(row + count - 1))
    for name, theirs, ours in (
        ("party", first["party"], runs["party"]),
        ("feed", first["feed"], runs["feed"]),
        ("control", first["control"], runs["control"]),
        ("seq", first["seq"], runs["start"]),
        ("previous link", first["previous"], runs["previous"]),
        ("end", pc.add(last["seq"], 1), runs["end"]),
        ("last link", last["link"], runs["last_link"]),
        ("last depth", last["depth"], runs["last_depth"]),
    ):
        if not pc.all(pc.fill_null(pc.equal(theirs, ours), False)).as_py():
            return f"its runs tell another {name} than its rows"
    return None
