"""Positions in texts and lists as a program gives them: a negative one counts from the end, as in Python."""

from echostore.kernel.errors import UsageError


def insertion_point(position: int, length: int, where: str) -> int:
    """The place from 0 to `length` that a position names; `where` is "a text" or "a list"."""
    place = position + length if position < 0 else position
    if not 0 <= place <= length:
        raise UsageError(
            f"no position {position} in {where} of {length}",
            next_step=f"Positions go from 0 to {length}; -1 is the one before the last.",
        )
    return place
