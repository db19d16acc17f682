"""The rows of the tree's explicit moves: those that came and went since the last checkpoint, never all of them.

A row stands under its stamp, and moves are read in the order of stamps: a late one is a row like any other.
"""

from collections.abc import Sequence

from echostore.kernel.ids import Stamp
from echostore.store.item_tables import MoveRow
from echostore.store.row_checks import Group, Tally, sum_of
from echostore.store.sqlite import Database

_AT = "depth = ? AND feed = ? AND seq = ? AND position = ?"


def save_moves(database: Database, fresh: Sequence[MoveRow], gone: Sequence[Stamp], tally: Tally) -> None:
    """Take moves out, then put moves in, inside the checkpoint's transaction; one that is folded again is in both."""
    for stamp in gone:  # some were never saved
        row = database.row(f"SELECT * FROM moves WHERE {_AT}", stamp)
        if row is not None:
            tally.add(Group.MOVES, b"", -sum_of([row]), -1)
    database.insert(f"DELETE FROM moves WHERE {_AT}", gone)
    database.insert("INSERT INTO moves VALUES (?,?,?,?,?,?,?)", fresh)
    if fresh:
        tally.add(Group.MOVES, b"", sum_of(fresh), len(fresh))
