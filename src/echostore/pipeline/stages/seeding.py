"""seeding: the items of a base epoch as the states before. SEEDS in; states, tops, moves and blobs as files out.

    base epoch in the lake ──► one task per bucket walks the nodes on its path and those below ──► states, subtrees

Only the first build of a party on an epoch does this; it costs the items of the epoch, whatever its history.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any

import pyarrow as pa

from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import NIBBLES
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import BLOBS, ITEM_STATES, MOVES
from echostore.pipeline.stages.frames import frame_of, mapped
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import bucket_nibbles
from echostore.pipeline.stages.standing import STANDING, Bases
from echostore.pipeline.stages.state_files import StateWriter
from echostore.pipeline.stages.subtrees import Subtrees
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.generated import snapshot_pb2 as pb

SEEDS = STANDING.append(pa.field("bucket", pa.string(), nullable=False))
"""A bucket of a party that is to be taken from its base."""


def seed(spark: Any, bases: Bases, place: Place, turn: int, collect: Collect) -> dict[str, list[NamedFile]]:
    """Files of the kinds states, state_index, tops, moves and blobs: what the parties have on their bases."""
    messages: dict[bytes, int] = {}
    for row in bases.cuts().to_pylist():
        messages[row["party"]] = messages.get(row["party"], 0) + row["length"]
    rows = [
        {**row, "bucket": "".join(nibbles)}
        for row in bases.rows.to_pylist()
        for nibbles in product(NIBBLES, repeat=bucket_nibbles(messages.get(row["party"], 0)))
    ]
    tasks = min(len(rows), 4 * int(spark.sparkContext.defaultParallelism))
    frame = frame_of(spark, pa.Table.from_pylist(rows, SEEDS)).repartitionByRange(tasks, "party", "bucket")
    return named_files(collect(mapped(frame, Seeding(bases.lake, place, turn), NAMED)))


@dataclass(frozen=True)
class Seeding:
    """The task: buckets into files."""

    lake: str
    place: Place
    turn: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts: list[tuple[bytes, str, pa.Table]] = []
        subtrees = Subtrees(self.place, self.turn)
        blobs: dict[Cid, bytes] = {}
        moves: list[tuple[Any, ...]] = []
        opened: dict[bytes, BaseEpoch] = {}
        for row in (row for batch in batches for row in batch.to_pylist()):
            party, bucket = row["party"], row["bucket"]
            if party not in opened:
                opened = {party: Bases(self.lake, pa.Table.from_pylist([row], STANDING)).opened(party)}
            base = opened[party]
            states = _states(base, party, bucket, blobs)
            subtrees.add(party, bucket, None, [], states)
            if len(states):
                parts.append((party, bucket, states))
            if not bucket.strip(NIBBLES[0]):  # the first bucket of a party
                moves += _moves(base, party, self.turn)
        files: dict[str, list[NamedFile]] = {**StateWriter(self.place, self.turn).write(parts, whole=True)}
        for kind, named in subtrees.write().items():
            files[kind] = list(named)
        for kind, schema, rows in (("blobs", BLOBS, list(blobs.items())), ("moves", MOVES, moves)):
            file = self.place.write(kind, schema, rows_table(rows, schema).to_batches(max_chunksize=4096))
            files[kind] = [*files.get(kind, ()), *([] if file is None else [file])]
        yield named_rows(files)


def _states(base: BaseEpoch, party: bytes, bucket: str, blobs: dict[Cid, bytes]) -> pa.Table:
    """ITEM_STATES of a bucket, ascending by key. Nothing is decoded but the frame of each item."""
    rows = [_row(base, party, state, blobs) for state in base.states_below(bucket)]
    return pa.Table.from_pylist(rows, ITEM_STATES).combine_chunks()


def _row(base: BaseEpoch, party: bytes, state: pb.ItemState, blobs: dict[Cid, bytes]) -> dict[str, Any]:
    encoded = state.SerializeToString(deterministic=True)
    whole = base.whole_state(state)
    for cid in state.state_cids:
        blobs[Cid(cid)] = base.blob(Cid(cid))
    return {
        "party": party,
        "item_key": sha256(state.item).digest(),
        "item": state.item,
        "gone": False,
        "model": state.model,
        "version": state.version,
        "parent": state.parent or None,
        "genesis_depth": state.genesis_depth,
        "guarded": bool(state.access),
        "state": whole,
        "encoded": None if encoded == whole else encoded,
    }


def _moves(base: BaseEpoch, party: bytes, turn: int) -> Iterator[tuple[Any, ...]]:
    for stamp, item, kind, parent in base.moves:
        yield party, turn, stamp.depth, stamp.feed, stamp.seq, stamp.position, item, kind, parent
