"""Pen: the right to edit one text in place, until the edits are sealed into a message.

Typing must cost little more than the text library itself, so an edit takes no lock. Each call into the library is
atomic; what could go wrong is that another thread seals between the check and the edit. Then the pen's count is at or
below zero after the edit, and the writer looks after it under the lock: the edit joins the next message.
"""

from collections.abc import Callable

EDITS_MAX = 4096
"""Edits in place that one message holds at most; more are sealed as they come."""

EDIT_CHARACTERS = 256
"""A long insertion counts as one more edit for each of these, so that a message stays well below a block's limit."""

OPEN_BYTES_MAX = 2 * 1024 * 1024
"""Bytes of long insertions and list elements that are open at a time; they are sealed before more would be."""

INSERT_BYTES_MAX = 4 * 1024 * 1024
"""One insertion into a text. It must fit one block, with what stands around it."""


class Pen:
    """Bound editing calls of one model, and how many edits are left before a seal is due."""

    __slots__ = ("delete", "insert", "left")

    def __init__(self, insert: Callable[[int, str], None], delete: Callable[[int, int], None], left: int) -> None:
        self.insert = insert
        self.delete = delete
        self.left = left


def _closed(*_: object) -> None:
    raise AssertionError("a pen without ink was used")


NO_PEN = Pen(_closed, _closed, 0)
