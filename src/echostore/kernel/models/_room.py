"""Room: how many places a sequence has for sure in the version in which an operation was made.

The library trusts positions as long as the result of an import makes sense to it, and what makes sense depends on what
is imported together. So positions are checked before. The exact length of a version is not known without building it;
but every atom that inserts adds one place, and every one that deletes takes at most one away:

    room = inserted - deleted atoms  <=  length        equal, unless two writers deleted the same thing

Almost every honest edit is within this room. The few others are tried on a document of their version (`_shadows`).
"""

from collections.abc import Iterable

from echostore.kernel.models.change_graph import Change, Delete, InsertElements, InsertText, Mark, Move, Run


def gain(runs: Iterable[Run]) -> int:
    """By how much runs make the room larger; less than nothing when they delete."""
    total = 0
    for run in runs:
        kind = type(run)
        if kind is InsertText:
            total += len(run.text)  # type: ignore[union-attr]  # by its kind
        elif kind is Delete:
            total -= abs(run.length)  # type: ignore[union-attr]  # by its kind
        elif kind is InsertElements:
            total += len(run.elements)  # type: ignore[union-attr]  # by its kind
        elif kind is Mark:
            total += 2
    return total


def fits(change: Change, room: int) -> bool:
    """Whether the runs of a change stay inside a room, which grows and shrinks with them."""
    for run in change.runs:
        if isinstance(run, InsertText):
            if run.position > room:
                return False
            room += len(run.text)
        elif isinstance(run, Delete):
            end = run.position + (run.length if run.length > 0 else 1)
            if end > room:
                return False
            room -= abs(run.length)
        elif isinstance(run, InsertElements):
            if run.position > room:
                return False
            room += len(run.elements)
        elif isinstance(run, Mark):
            if run.end > room:
                return False
            room += 2
        elif isinstance(run, Move) and max(run.source, run.target) >= room:
            return False
    return True
