"""Rows of tables that belong to a party as a whole: members, rejects, and where moved items hang now."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from echostore.kernel.ids import FeedId, ItemId, Stamp, item_text
from echostore.kernel.items.tree import Tree, TreeMove
from echostore.pipeline.output.item_rows import hex_texts
from echostore.pipeline.output.table_schemas import MEMBERS, PLACEMENTS, REJECTS


def member_rows(members: pa.RecordBatch, commit: int) -> pa.RecordBatch:
    """`schemas.MEMBERS` as rows of the table."""
    columns = [hex_texts(members.column(name)) for name in ("party", "identity")]
    columns += [members.column(name) for name in ("name", "role", "status", "creator", "devices")]
    return pa.record_batch([*columns, _commits(members, commit)], schema=MEMBERS)


def reject_rows(rejects: pa.RecordBatch, commit: int) -> pa.RecordBatch:
    """`schemas.REJECTS` as rows of the table."""
    columns = [hex_texts(rejects.column(name)) for name in ("party", "feed")]
    columns += [rejects.column(name) for name in ("seq", "position", "reason", "detail")]
    return pa.record_batch([*columns, _commits(rejects, commit)], schema=REJECTS)


def placement_rows(
    party: bytes, moves: Iterable[dict[str, Any]], first_parents: dict[ItemId, ItemId], commit: int
) -> pa.RecordBatch:
    """Where the items hang that were moved or embedded: rows of `schemas.MOVES` replayed over the first parents."""
    tree = Tree(first_parents.get, map(_move, moves))
    rows = [
        {
            "party": party.hex(),
            "item": item_text(item),
            "parent": _text(tree.home(item)),
            "embedded_in": sorted(item_text(parent) for parent in tree.embeddings(item) if parent is not None),
            "commit": commit,
        }
        for item in sorted({move.item for move in tree.moves})
    ]
    return pa.RecordBatch.from_pylist(rows, PLACEMENTS)


def _move(row: dict[str, Any]) -> TreeMove:
    stamp = Stamp(row["depth"], FeedId(row["feed"]), row["seq"], row["position"])
    return TreeMove(stamp, ItemId(row["item"]), row["kind"], None if row["parent"] is None else ItemId(row["parent"]))


def _text(item: ItemId | None) -> str | None:
    return None if item is None else item_text(item)


def _commits(rows: pa.RecordBatch, commit: int) -> pa.Array:
    return pa.array(np.full(len(rows), commit, np.int64))


class Converting:
    """A task that turns batches into rows of a table by one of the functions above."""

    def __init__(self, convert: Any, commit: int) -> None:
        self.convert = convert
        self.commit = commit

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield self.convert(batch, self.commit)
