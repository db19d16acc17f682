"""What comes of a bucket, collected row by row and handed out as tables."""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.ids import Cid, ItemId, PartyKey
from echostore.kernel.items.operations import Reject
from echostore.kernel.items.record import Genesis
from echostore.kernel.items.tree import TreeMove
from echostore.kernel.snapshot import INLINE_STATE_BYTES_MAX
from echostore.pipeline.schemas import BLOBS, CLAIMS, HARD_ITEMS, ITEM_STATES, MOVES, REJECTS
from echostore.pipeline.stages.item_fold import Folded, native_form
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.property_columns import number_bytes
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import encode_record
from echostore.wire.snapshot import encode_item


class Results:
    """Collects the results of a bucket."""

    def __init__(self, parties: list[PartyKey]) -> None:
        self._parties = parties
        self._tables: list[pa.Table] = []
        self._rows: list[dict[str, Any]] = []
        self._rejects: list[tuple[Any, ...]] = []
        self._moves: list[tuple[Any, ...]] = []
        self._hard: list[tuple[Any, ...]] = []
        self._claims: list[tuple[Any, ...]] = []
        self._blobs: dict[Cid, bytes] = {}
        self._expected: set[tuple[PartyKey, ItemId]] = set()

    def add_easy(self, heads: pl.DataFrame, items: list[bytes], states: pa.Array) -> None:
        """Items that columns have folded."""
        count = len(items)
        encoded: list[bytes | None] = [None] * count
        large = heads["state"].bin.size().to_numpy() > INLINE_STATE_BYTES_MAX
        for at in np.flatnonzero(large).tolist():
            encoded[at] = encode_item(pb.ItemState.FromString(states[at].as_py()), self._blobs.__setitem__)
        places = heads["last_place"]
        named = heads.select(
            pl.when(pl.col(name).bin.size() > 0).then(name).alias(name) for name in ("parent", "inception_key")
        )
        table = pa.table(
            [
                pa.array([self._parties[code] for code in heads["party"].to_list()], pa.binary()),
                pa.array([sha256(item).digest() for item in items], pa.binary()),
                pa.array(items, pa.binary()),
                pa.array(np.zeros(count, dtype=bool)),
                heads["model"].to_arrow().cast(pa.string()),
                heads["version"].to_arrow().cast(pa.int64()),
                named["parent"].to_arrow().cast(pa.binary()),
                named["inception_key"].to_arrow().cast(pa.binary()),
                heads["genesis_depth"].to_arrow().cast(pa.int64()),
                pa.array(np.zeros(count, dtype=bool)),
                states,
                pa.array(encoded, pa.binary()),
                pa.nulls(count, pa.binary()),
                heads["last_depth"].to_arrow().cast(pa.int64()),
                _nullable_bytes(heads["last_feed"]),
                (places // 65536).to_arrow().cast(pa.int64()),
                (places % 65536).to_arrow().cast(pa.int64()),
            ],
            schema=ITEM_STATES,
        )
        self._tables.append(table)

    def expect(self, wanted: Iterable[tuple[int, bytes]]) -> None:
        """These items get a row whatever becomes of them."""
        self._expected = {(self._parties[code], ItemId(item)) for code, item in wanted}

    def add_folded(self, party: PartyKey, item: ItemId, folded: Folded) -> None:
        for reject in folded.rejects:
            self.add_reject(party, reject, item)
        for move in folded.moves:
            self.add_move(party, move)
        record = folded.record
        if record is None:
            return
        self._expected.discard((party, item))
        message = encode_record(record)
        whole = message.SerializeToString(deterministic=True)
        encoded = encode_item(message, self._blobs.__setitem__)
        last = record.last
        self._rows.append(
            {
                "party": party,
                "item_key": sha256(item).digest(),
                "item": item,
                "gone": False,
                "model": record.genesis.model,
                "version": record.genesis.version,
                "parent": record.genesis.parent,
                "inception": record.genesis.inception_key or None,
                "genesis_depth": record.genesis.depth,
                "guarded": bool(record.access),
                "state": whole,
                "encoded": None if encoded == whole else encoded,
                "native": native_form(record),
                "last_depth": last.depth if last else None,
                "last_feed": last.feed if last else None,
                "last_seq": last.seq if last else None,
                "last_position": last.position if last else None,
            }
        )

    def add_reject(self, party: PartyKey, reject: Reject, item: ItemId | None) -> None:
        self._rejects.append((party, reject.feed, reject.seq, reject.position, str(reject.reason), reject.detail, item))

    def add_move(self, party: PartyKey, move: TreeMove) -> None:
        self._moves.append(_move_row(party, move))

    def add_claim(self, party: PartyKey, genesis: Genesis) -> None:
        self._claims.append((party, genesis.inception_key, genesis.item, genesis.depth))

    def add_hard(self, party: PartyKey, item: ItemId, *, history: bool) -> None:
        self._expected.discard((party, item))
        self._hard.append((party, item, history))

    def states(self) -> pa.Table:
        """Ascending by party and key: a bucket is a stretch of this."""
        self._rows += [_gone_row(party, item) for party, item in sorted(self._expected)]
        self._expected = set()
        tables = [*self._tables, pa.Table.from_pylist(self._rows, ITEM_STATES)]
        return pa.concat_tables(tables).sort_by([("party", "ascending"), ("item_key", "ascending")])

    def rejects(self) -> pa.Table:
        return rows_table(self._rejects, REJECTS)

    def moves(self) -> pa.Table:
        return rows_table(self._moves, MOVES)

    def hard(self) -> pa.Table:
        return rows_table(self._hard, HARD_ITEMS)

    def claims(self) -> pa.Table:
        return rows_table(self._claims, CLAIMS)

    def blobs(self) -> pa.Table:
        return rows_table(list(self._blobs.items()), BLOBS)


def _nullable_bytes(feeds: pl.Series) -> pa.Array:
    """Feed ids from numbers, where there are any."""
    data = number_bytes(feeds.fill_null(0).to_numpy())
    return pc.if_else(pa.array(feeds.is_null().to_numpy()), pa.scalar(None, pa.binary()), data)


def _gone_row(party: PartyKey, item: ItemId) -> dict[str, Any]:
    return {
        "party": party,
        "item_key": sha256(item).digest(),
        "item": item,
        "gone": True,
        "model": "",
        "version": 0,
        "genesis_depth": 0,
        "guarded": False,
        "state": b"",
    }


def _move_row(party: PartyKey, move: TreeMove) -> tuple[Any, ...]:
    stamp = move.stamp
    return party, 0, stamp.depth, stamp.feed, stamp.seq, stamp.position, move.item, move.kind, move.parent
