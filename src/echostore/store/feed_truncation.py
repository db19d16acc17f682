"""Freeing the blocks below an epoch's cut: first the feed's beginning moves, then the blocks behind it go.

    1  one transaction    the feeds begin at the cut; the link there keeps what follows verifiable
    2  many small ones    blocks and heads below the beginning are deleted, from the oldest on
    3  shrink             the file gives its free pages back

A crash after any step leaves a store that opens and verifies: what lies below the beginning is not looked at any more,
and the next run goes on deleting it. Used by `FeedStore` alone, inside its transactions.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from echostore.kernel.errors import Refused
from echostore.kernel.ids import FeedKey
from echostore.store.feed_tables import FeedRow, block_id, first_id
from echostore.store.sqlite import Database

STEP_BLOCKS = 4096
"""Blocks deleted in one transaction: the log stays small and a writer waits for milliseconds."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """What lies below the beginnings of feeds."""

    blocks: int
    bytes: int


def save_beginning(db: Database, row: FeedRow) -> None:
    """Let a feed begin at `row.base`."""
    no, _, _, _, base, base_link, seal = row.sealed()
    db.execute("UPDATE feeds SET base = ?, base_link = ?, seal = ? WHERE no = ?", (base, base_link, seal, no))


def begin(db: Database, row: FeedRow, *, empty: bool) -> FeedRow:
    """Let a feed begin at `row.base`, without any blocks where it is to be `empty`."""
    if empty:
        drop_all(db, row)
    save_beginning(db, row)
    return row


def drop_end(db: Database, row: FeedRow, seq: int) -> int:
    """Blocks of a feed from the last head at or below `seq` on; returns the length that stays."""
    if row.own:
        raise Refused(
            f"Feed {row.key.hex()} is this device's own: blocks that others may have are never dropped from it.",
            next_step="Restore the home from a backup, or let this device write a new feed.",
        )
    found = db.row("SELECT max(length) FROM heads WHERE feed_no = ? AND length <= ?", (row.no, seq))
    length = max(row.base, (found[0] if found else None) or 0)
    db.execute("DELETE FROM heads WHERE feed_no = ? AND length > ?", (row.no, length))
    db.execute("DELETE FROM blocks WHERE id >= ? AND id < ?", (block_id(row.no, length), first_id(row.no + 1)))
    return length


def drop_all(db: Database, row: FeedRow) -> None:
    """Blocks and heads of a feed that begins beyond all of them, or of another branch."""
    db.execute("DELETE FROM blocks WHERE id >= ? AND id < ?", (first_id(row.no), first_id(row.no + 1)))
    db.execute("DELETE FROM heads WHERE feed_no = ?", (row.no,))


def garbage(db: Database, rows: Iterable[FeedRow], cuts: Mapping[FeedKey, int]) -> Garbage:
    """The blocks below the feeds' beginnings, or below later ones."""
    blocks = size = 0
    for row in rows:
        found = db.row(
            "SELECT count(*), sum(length(payload) + length(link)) FROM blocks WHERE id >= ? AND id < ?",
            (first_id(row.no), block_id(row.no, max(row.base, cuts.get(row.key, 0)))),
        )
        assert found is not None, "a count has a row"
        blocks, size = blocks + found[0], size + (found[1] or 0)
    return Garbage(blocks, size)


def drop_garbage(db: Database, rows: Iterable[FeedRow], step: Callable[[], None]) -> None:
    """Delete what lies below the feeds' beginnings; `step` is told after each transaction."""
    for row in rows:
        more = row.base > 0
        while more:
            with db.transaction():
                more = _drop_step(db, row)
            step()
    db.shrink()


def _drop_step(db: Database, row: FeedRow) -> bool:
    """Delete some blocks below a feed's beginning, with their heads; whether there may be more."""
    oldest = db.row(
        "SELECT min(id) FROM blocks WHERE id >= ? AND id < ?", (first_id(row.no), block_id(row.no, row.base))
    )
    if oldest is None or oldest[0] is None:
        db.execute("DELETE FROM heads WHERE feed_no = ? AND length <= ?", (row.no, row.base))
        return False
    end: int = min(row.base, oldest[0] - first_id(row.no) + STEP_BLOCKS)
    db.execute("DELETE FROM blocks WHERE id >= ? AND id < ?", (oldest[0], block_id(row.no, end)))
    # A head goes after the block that it ends at: a feed of which nothing else is left still agrees with itself.
    db.execute("DELETE FROM heads WHERE feed_no = ? AND length <= ?", (row.no, end))
    return end < row.base
