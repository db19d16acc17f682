"""seeding: the items of a base epoch as the states before. SEEDS in; states, tops, moves and blobs as files out.

    base epoch in the lake ──► one task per bucket walks the nodes on its path and those below ──► states, subtrees

Only the first build of a party on an epoch does this. Where there are states of an earlier commit, only items are written
that the epoch has otherwise: buckets whose top is the same are not opened, of others the items are compared. Without such
states it costs the items of the epoch, whatever its history.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import NIBBLES
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import NAMED, Collect, Place, named_files, named_rows
from echostore.pipeline.schemas import BLOBS, ITEM_STATES, MOVES, PLACE_CHANGES, STATE_INDEX
from echostore.pipeline.stages.frames import frame_of, mapped, sorted_within, width_of
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import bucket_nibbles
from echostore.pipeline.stages.placement_changes import PLACE_COLUMNS, place_changes
from echostore.pipeline.stages.standing import STANDING, Bases
from echostore.pipeline.stages.state_files import StateWriter, index_parcels, read_states, states_noted
from echostore.pipeline.stages.subtrees import STATE_COLUMNS, Subtrees, latest_tops
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.generated import snapshot_pb2 as pb

SEEDS = pa.schema(
    [
        *STANDING,
        pa.field("bucket", pa.string(), nullable=False),
        # By how many nibbles the placements of the party are spread.
        pa.field("nibbles", pa.int32(), nullable=False),
        # Where there are states of an earlier commit: their places (JSON), and the CID of the bucket's top.
        pa.field("before", pa.list_(pa.string())),
        pa.field("top", pa.binary()),
    ]
)
"""A bucket of a party that is to be taken from its base."""

Files = dict[str, list[NamedFile]]


def seed(
    spark: Any,
    bases: Bases,
    place: Place,
    turn: int,
    collect: Collect,
    now: Mapping[bytes, int],
    before: "StatesBefore | None" = None,
) -> Files:
    """Files of the kinds states, state_index, tops, moves, blobs and place_changes: what the parties have on their bases,
    or what of it differs from the states before. `now` has the messages of each party, those above its base with them."""
    known = {} if before is None else before.nibbles()
    messages: dict[bytes, int] = {}
    for row in bases.cuts().to_pylist():
        messages[row["party"]] = messages.get(row["party"], 0) + row["length"]
    rows = [
        {**row, "bucket": "".join(nibbles), "nibbles": bucket_nibbles(now.get(row["party"], 0))}
        for row in bases.rows.to_pylist()
        if row["party"] not in known
        for nibbles in product(NIBBLES, repeat=bucket_nibbles(messages.get(row["party"], 0)))
    ]
    if before is not None:
        standing = {
            row["party"]: {**row, "nibbles": bucket_nibbles(now.get(row["party"], 0))} for row in bases.rows.to_pylist()
        }
        rows += [{**standing[party], **bucket} for party, bucket in before.buckets(known) if party in standing]
    frame = frame_of(spark, pa.Table.from_pylist(rows, SEEDS))
    if spark is None:
        frame = sorted_within(frame, "party", "bucket")
    else:
        frame = frame.repartitionByRange(min(len(rows), 4 * width_of(spark)), "party", "bucket")
    return named_files(collect(mapped(frame, Seeding(bases.lake, place, turn), NAMED)))


@dataclass(frozen=True)
class StatesBefore:
    """What the last commit has of parties that come to stand on another epoch."""

    out: str
    parties: frozenset[bytes]
    index: tuple[NamedFile, ...]
    tops: tuple[NamedFile, ...]

    def nibbles(self) -> dict[bytes, int]:
        """By how many nibbles their items were spread."""
        found: dict[bytes, int] = {}
        for row in self._rows(self.index, STATE_INDEX, ["party", "bucket"]).to_pylist():
            found[row["party"]] = max(found.get(row["party"], 0), len(row["bucket"]))
        return found

    def buckets(self, nibbles: dict[bytes, int]) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """All buckets of the parties, with what SEEDS say of the states before."""
        tops = latest_tops(self.out, self.tops, nibbles)
        names = ("party", "bucket", "cid")
        cids = {
            (party, bucket): cid for party, bucket, cid in zip(*(tops[name].to_pylist() for name in names), strict=True)
        }
        notes: dict[tuple[bytes, str], list[str]] = defaultdict(list)
        for parcel in index_parcels(self._rows(self.index, STATE_INDEX, STATE_INDEX.names), nibbles):
            notes[parcel["party"], parcel["bucket"]].append(parcel["note"])
        for party, depth in nibbles.items():
            for each in product(NIBBLES, repeat=depth):
                bucket = "".join(each)
                yield (
                    party,
                    {"bucket": bucket, "before": notes.get((party, bucket), []), "top": cids.get((party, bucket))},
                )

    def _rows(self, files: tuple[NamedFile, ...], schema: pa.Schema, names: list[str]) -> pa.Table:
        wanted = pc.field("party").isin(pa.array(sorted(self.parties), pa.binary()))
        tables = [read_table(self.out, file, schema, columns=names, filters=wanted).select(names) for file in files]
        return pa.concat_tables([pa.schema([schema.field(name) for name in names]).empty_table(), *tables])


@dataclass(frozen=True)
class Seeding:
    """The task: buckets into files."""

    lake: str
    place: Place
    turn: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts: list[tuple[bytes, str, pa.Table]] = []
        changed: list[tuple[bytes, str, pa.Table]] = []
        subtrees = Subtrees(self.place, self.turn)
        blobs: dict[Cid, bytes] = {}
        moves: list[tuple[Any, ...]] = []
        places: list[pa.Table] = []
        opened: dict[bytes, BaseEpoch] = {}
        for row in (row for batch in batches for row in batch.to_pylist()):
            party, bucket = row["party"], row["bucket"]
            if party not in opened:
                opened = {party: Bases(self.lake, pa.Table.from_pylist([row], STANDING)).opened(party)}
            base = opened[party]
            if row["before"] is None:
                states, kept = _states(base, party, bucket, blobs), ITEM_STATES.empty_table()
                subtrees.add(party, bucket, None, [], states)
                parts += [(party, bucket, states)] if len(states) else []
            elif not _same_top(base, bucket, row["top"]):
                # Subtrees of these are made when everything above the epoch is folded too.
                states, kept = self._differing(base, row, blobs)
                changed += [(party, bucket, states)] if len(states) else []
            else:
                states, kept = ITEM_STATES.empty_table(), ITEM_STATES.empty_table()
            places.append(place_changes(states, kept, {party: row["nibbles"]}, self.turn))
            if not bucket.strip(NIBBLES[0]):  # the first bucket of a party
                moves += _moves(base, party, self.turn)
        writer = StateWriter(self.place, self.turn)
        files: Files = {**writer.write(parts, whole=True)}
        for kind, named in writer.write(changed).items():
            files[kind] = [*files.get(kind, ()), *named]
        for kind, named in subtrees.write().items():
            files[kind] = [*files.get(kind, ()), *named]
        tables = {
            "blobs": rows_table(list(blobs.items()), BLOBS),
            "moves": rows_table(moves, MOVES),
            "place_changes": pa.concat_tables([PLACE_CHANGES.empty_table(), *places]),
        }
        for kind, table in tables.items():
            file = self.place.write(kind, table.schema, table.to_batches(max_chunksize=4096))
            files[kind] = [*files.get(kind, ()), *([] if file is None else [file])]
        yield named_rows(files)

    def _differing(self, base: BaseEpoch, row: dict[str, Any], blobs: dict[Cid, bytes]) -> tuple[pa.Table, pa.Table]:
        """ITEM_STATES of the items of a bucket that the epoch has otherwise than the states before, or no more; and the
        states before."""
        party, bucket = row["party"], row["bucket"]
        kept, _ = read_states(self.place.out, states_noted(row["before"]), {party: {bucket}}, _COLUMNS)
        kept = kept.filter(pc.invert(kept["gone"]))
        known = dict(
            zip(kept["item"].to_pylist(), pc.coalesce(kept["encoded"], kept["state"]).to_pylist(), strict=True)
        )
        rows = []
        for state in base.states_below(bucket):
            if known.pop(state.item, None) != state.SerializeToString(deterministic=True):
                rows.append(_row(base, party, state, blobs))
        rows += [_gone_row(party, item) for item in known]
        rows.sort(key=lambda each: each["item_key"])
        return pa.Table.from_pylist(rows, ITEM_STATES).combine_chunks(), kept


_COLUMNS = [*dict.fromkeys([*STATE_COLUMNS, *PLACE_COLUMNS])]


def _same_top(base: BaseEpoch, bucket: str, top: bytes | None) -> bool:
    covering = base.reader.node_for_prefix(bucket)
    return covering is not None and covering.path == bucket and covering.top.cid == top


def _gone_row(party: bytes, item: bytes) -> dict[str, Any]:
    key = {"party": party, "item_key": sha256(item).digest(), "item": item, "gone": True}
    return {**key, "model": "", "version": 0, "genesis_depth": 0, "guarded": False, "state": b""}


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
        "inception": state.inception_key or None,
        "genesis_depth": state.genesis_depth,
        "guarded": bool(state.access),
        "state": whole,
        "encoded": None if encoded == whole else encoded,
    }


def _moves(base: BaseEpoch, party: bytes, turn: int) -> Iterator[tuple[Any, ...]]:
    for stamp, item, kind, parent in base.moves:
        yield party, turn, stamp.depth, stamp.feed, stamp.seq, stamp.position, item, kind, parent
