"""From a stream of sorted rows to files of bounded size and the runs in them: the inner half of `LakeWriter`.

One sink takes the control rows, one the data rows. Rows without `previous` continue the row before them; a sink checks
that they do, and gives the first row of a file its `previous` when a run is cut there.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import KEY_BYTES, LINK_BYTES
from echostore.pipeline import schemas
from echostore.pipeline.lake import files
from echostore.pipeline.lake.layout import blocks_name
from echostore.pipeline.lake.log import BlocksFile

_FIXED = (("party", KEY_BYTES), ("feed", KEY_BYTES), ("link", LINK_BYTES), ("previous", LINK_BYTES))


class Sink:
    """The files of one kind of feed that one write makes."""

    def __init__(self, lake: Path, *, control: bool) -> None:
        self._lake = lake
        self._control = control
        self._enough = files.ROW_GROUP_SMALL_CONTROL if control else files.ROW_GROUP_SMALL
        self.added: list[BlocksFile] = []
        self.runs: list[pa.Table] = []
        """Finished runs, whose files have their names."""
        self._file: files.HashedFile | None = None
        self._writer: Any = None
        self._file_rows = self._file_bytes = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._file_runs: list[pa.Table] = []
        self._open_run: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        """The last row that was taken, without its payload."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows that follow those taken before."""
        if not batch.num_rows:
            return
        starts = _starts(batch)
        self._check(batch, starts)
        sizes = _row_bytes(batch)
        ends = np.cumsum(sizes)
        new_party = _new_party(batch, starts, self._last)
        at = 0
        while at < batch.num_rows:
            # A group that is large enough ends before a new party.
            if self._pending_bytes >= self._enough and new_party[at]:
                self._end_group()
            until = self._group_end(at, ends, new_party)
            self._take(batch.slice(at, until - at), starts[at:until], sizes[at:until])
            if self._pending_bytes >= files.ROW_GROUP_LARGE:
                self._end_group()
            at = until

    def finish(self) -> None:
        """Write what is left; after it `added` and `runs` are complete."""
        self._end_group()
        self._end_file()

    def abandon(self) -> None:
        """Forget the file that is being written. Files that have their names stay: nobody knows of them."""
        if self._file is not None:
            self._file.drop()
            self._file = None

    # cutting

    def _group_end(self, at: int, ends: Any, new_party: Any) -> int:
        before = int(ends[at - 1]) if at else 0
        room = before - self._pending_bytes
        hard = min(len(ends), int(np.searchsorted(ends, room + files.ROW_GROUP_LARGE)) + 1)
        enough = int(np.searchsorted(ends, room + self._enough)) + 1
        enough = max(enough, at + 1)
        if enough < hard:
            changes = np.flatnonzero(new_party[enough:hard])
            if len(changes):
                return enough + int(changes[0])
        return max(hard, at + 1)

    def _take(self, batch: pa.RecordBatch, starts: Any, sizes: Any) -> None:
        if self._file is None:
            self._file = files.HashedFile(self._lake)
            self._writer = files.blocks_writer(self._file)
            if not starts[0]:
                batch = _with_previous(batch, self._last)
                starts = starts.copy()
                starts[0] = True
        self._note_runs(batch, starts, sizes)
        self._pending.append(batch)
        size = int(sizes.sum())
        self._pending_bytes += size
        self._file_bytes += size
        self._file_rows += batch.num_rows
        self._last = _row(batch, batch.num_rows - 1)

    def _end_group(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending, schemas.BLOCKS))
            self._pending, self._pending_bytes = [], 0
        if self._file_bytes >= files.FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._file is None:
            return
        file, rows = self._file, self._file_rows
        self._writer.close()
        sha256 = file.sha256
        name = blocks_name(sha256)
        file.keep(name)
        self._file = self._writer = None
        self._file_rows = self._file_bytes = 0
        self.added.append(BlocksFile(name, sha256, file.size, rows, self._control))
        if self._open_run is not None:
            self._file_runs.append(_run_table([self._open_run]))
            self._open_run = None
        runs = pa.concat_tables(self._file_runs)
        self._file_runs = []
        self.runs.append(runs.set_column(8, schemas.RUNS.field("file"), pa.repeat(name, len(runs))))

    # runs

    def _note_runs(self, batch: pa.RecordBatch, starts: Any, sizes: Any) -> None:
        firsts = np.flatnonzero(starts)
        if not starts[0]:
            firsts = np.concatenate([[0], firsts])
        lasts = np.concatenate([firsts[1:] - 1, [batch.num_rows - 1]])
        begun, ended = batch.take(pa.array(firsts)), batch.take(pa.array(lasts))
        table = pa.table(
            [
                begun["party"],
                begun["feed"],
                begun["control"],
                begun["seq"],
                pc.add(ended["seq"], 1),
                pc.fill_null(begun["previous"], b""),
                ended["link"],
                ended["depth"],
                pa.repeat("", len(firsts)),
                pa.array(firsts + self._file_rows),
                pa.array(np.add.reduceat(sizes, firsts)),
            ],
            schema=schemas.RUNS,
        )
        if not starts[0]:
            assert self._open_run is not None, "a row that continues has a run that it continues"
            more = table.slice(0, 1).to_pylist()[0]
            self._open_run |= {name: more[name] for name in ("end", "last_link", "last_depth")}
            self._open_run["bytes"] += more["bytes"]
            table = table.slice(1)
        if len(table):
            if self._open_run is not None:
                self._file_runs.append(_run_table([self._open_run]))
            self._file_runs.append(table.slice(0, len(table) - 1))
            self._open_run = table.slice(len(table) - 1).to_pylist()[0]

    # checks

    def _check(self, batch: pa.RecordBatch, starts: Any) -> None:
        """A writer's own mistakes. What peers wrote is not judged here."""
        for name, length in _FIXED:
            sizes = pc.min_max(pc.binary_length(batch[name])).as_py()
            if sizes["min"] is not None and (sizes["min"], sizes["max"]) != (length, length):
                raise UsageError(f"the column {name} of a lake has {length} bytes in each row")
        seqs = batch["seq"].to_numpy()
        if seqs.min() < 0 or batch["depth"].to_numpy().min() < 0:
            raise UsageError("seq and depth are not negative")
        party, feed = batch["party"], batch["feed"]
        goes_on = np.ones(batch.num_rows, bool)
        if batch.num_rows > 1:
            same = pc.and_(
                pc.equal(party.slice(1), party.slice(0, len(party) - 1)),
                pc.equal(feed.slice(1), feed.slice(0, len(feed) - 1)),
            )
            goes_on[1:] = same.to_numpy(zero_copy_only=False) & (seqs[1:] == seqs[:-1] + 1)
            if pc.any(pc.less(party.slice(1), party.slice(0, len(party) - 1))).as_py():
                raise UsageError("rows of a lake are sorted by party")
        first, last = _row(batch, 0), self._last
        goes_on[0] = last is not None and all(
            (first["party"] == last["party"], first["feed"] == last["feed"], first["seq"] == last["seq"] + 1)
        )
        if last is not None and first["party"] < last["party"]:
            raise UsageError("rows of a lake are sorted by party")
        wrong = np.flatnonzero(~goes_on & ~starts)
        if len(wrong):
            raise UsageError(
                f"row {int(wrong[0])} of a batch neither follows the row before it nor says what it follows"
            )


def _starts(batch: pa.RecordBatch) -> Any:
    return batch["previous"].is_valid().to_numpy(zero_copy_only=False)


def _row_bytes(batch: pa.RecordBatch) -> Any:
    sizes = pc.add(
        pc.binary_length(batch["payload"]).cast(pa.int64()),
        pc.fill_null(pc.binary_length(batch["signature"]), 0).cast(pa.int64()),
    )
    return sizes.to_numpy(zero_copy_only=False) + files.ROW_BYTES


def _new_party(batch: pa.RecordBatch, starts: Any, last: dict[str, Any] | None) -> Any:
    party = batch["party"]
    new = starts.copy()
    if batch.num_rows > 1:
        differs = pc.not_equal(party.slice(1), party.slice(0, len(party) - 1))
        new[1:] &= differs.to_numpy(zero_copy_only=False)
    new[0] = last is None or party[0].as_py() != last["party"]
    return new


def _with_previous(batch: pa.RecordBatch, last: dict[str, Any] | None) -> pa.RecordBatch:
    """The rows with `previous` of the first one filled in: a file begins here, in the middle of a run."""
    assert last is not None, "only a row that continues lacks its previous link"
    columns = {name: batch[name] for name in schemas.BLOCKS.names}
    for name, value in (("previous", last["link"]), ("previous_depth", last["depth"])):
        kind = schemas.BLOCKS.field(name).type
        columns[name] = pa.concat_arrays([pa.array([value], kind), columns[name].slice(1)])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schemas.BLOCKS)


def _row(batch: pa.RecordBatch, at: int) -> dict[str, Any]:
    return {name: batch[name][at].as_py() for name in ("party", "feed", "seq", "link", "depth")}


def _run_table(runs: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(runs, schemas.RUNS)
