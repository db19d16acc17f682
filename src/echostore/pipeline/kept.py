"""What a commit keeps for the next run, beside item states: cuts, admission and rejects of every party.

A build writes all rows of its parties anew, each with the commit; rows of a party count when they are of its last build.
So reading what a run builds on is one pass over small tables, whoever was built when.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import ADMISSION, CUTS, REJECTS
from echostore.pipeline.stages.by_party import HERE_ROWS_MAX
from echostore.pipeline.stages.frames import Rows, frame_of, mapped, repartitioned
from echostore.pipeline.stages.standing import STANDING

COMMIT = pa.field("commit", pa.int64(), nullable=False)

KEPT_CUTS = CUTS.append(COMMIT)
KEPT_ADMISSION = ADMISSION.append(COMMIT)
KEPT_REJECTS = REJECTS.append(pa.field("lasting", pa.bool_(), nullable=False)).append(COMMIT)
"""`lasting` rejects are those of folding, which later builds carry on; order tells its own anew each time."""
KEPT_STANDING = STANDING.append(COMMIT)
"""Parties that stand on an epoch, and on which."""


def kept_rows(
    spark: Any, out: Path, base: Commit | None, kind: str, schema: pa.Schema, builds: Mapping[bytes, int]
) -> Rows | None:
    """The rows of a kind that count, of parties with the commit of their last build; None when there are none.

    Few are read here, as a table; many by tasks, as a DataFrame.
    """
    files = () if base is None else base.files.get(kind, ())
    if not files or not builds:
        return None
    chosen = pa.table(
        {"party": pa.array(list(builds), pa.binary()), "commit": pa.array(list(builds.values()), pa.int64())}
    )
    if spark is None or sum(file.rows for file in files) <= HERE_ROWS_MAX:
        rows = pa.concat_tables([read_table(out, file, schema) for file in files])
        return rows.join(chosen, ["party", "commit"], join_type="left semi").select(schema.names).cast(schema)
    frame = frame_of(spark, pa.Table.from_batches([named_rows({kind: files})]))
    found = mapped(frame.repartition(min(len(files), 64)), Reading(str(out), schema), schema)
    return found.join(frame_of(spark, chosen), ["party", "commit"], "left_semi")


@dataclass(frozen=True)
class Reading:
    """The task: names of files into their rows, each file hashed before."""

    out: str
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
                yield from read_table(self.out, file, self.schema).to_batches()


# forgetting


def forget_parties(
    spark: Any,
    place: Place,
    files: Iterable[NamedFile],
    kind: str,
    schema: pa.Schema,
    parties: frozenset[bytes],
    collect: Collect,
) -> tuple[NamedFile, ...]:
    """Files of a kind without the rows of some parties; a file without such rows stays as it is."""
    named = list(files)
    if not named or not parties:
        return tuple(named)
    frame = frame_of(spark, pa.Table.from_batches([named_rows({kind: named})]))
    rows = mapped(repartitioned(frame, min(len(named), 64)), _Forgetting(place, kind, schema, parties), NAMED)
    return tuple(named_files(collect(rows)).get(kind, ()))


@dataclass(frozen=True)
class _Forgetting:
    """The task: files without the rows of some parties."""

    place: Place
    kind: str
    schema: pa.Schema
    parties: frozenset[bytes]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept: list[NamedFile] = []
        for batch in batches:
            for row in batch.to_pylist():
                file = NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"])
                table = read_table(self.place.out, file, self.schema)
                left = table.filter(pc.invert(pc.is_in(table["party"], pa.array(sorted(self.parties), pa.binary()))))
                if len(left) == len(table):
                    kept.append(file)
                elif len(left):
                    written = self.place.write(self.kind, self.schema, left.to_batches())
                    assert written is not None
                    kept.append(written)
        yield named_rows({self.kind: kept})
