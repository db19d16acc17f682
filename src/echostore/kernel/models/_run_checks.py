"""Whether a run is one of its model's kinds and within range (L4 of `_shared_sequence`)."""

from collections.abc import Mapping

from echostore.kernel.limits import KEY_CHARACTERS_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import (
    COUNTER_END_MAX,
    Delete,
    InsertElements,
    InsertText,
    Mark,
    Move,
    Run,
    SetElement,
)
from echostore.kernel.reasons import Reason


def check_run(run: Run, made: tuple[int, int], view: Mapping[int, int] | None) -> None:
    """`made` is the atom with which the run begins. `view` is there whenever it refers to another writer's atoms."""
    writer, counter = made
    if isinstance(run, InsertText):
        fits = bool(run.text) and 0 <= run.position <= COUNTER_END_MAX
    elif isinstance(run, InsertElements):
        fits = bool(run.elements) and 0 <= run.position <= COUNTER_END_MAX
    elif isinstance(run, Delete):
        seen = counter if run.writer == writer else (view or {}).get(run.writer, 0)
        size = abs(run.length)
        room = run.position + 1 if run.length < 0 else COUNTER_END_MAX - run.position
        fits = 0 < size <= room and run.position >= 0 and 0 <= run.counter <= seen - size
    elif isinstance(run, Mark):
        fits = 0 <= run.start < run.end <= COUNTER_END_MAX and 0 < len(run.key) <= KEY_CHARACTERS_MAX
    elif isinstance(run, Move):
        fits = 0 <= run.source <= COUNTER_END_MAX and 0 <= run.target <= COUNTER_END_MAX and _is_lamport(run.lamport)
    else:
        assert isinstance(run, SetElement)
        fits = _is_lamport(run.lamport)
    if not fits:
        raise OperationRefused(Reason.MALFORMED, f"a {type(run).__name__} out of range")


def _is_lamport(number: int) -> bool:
    return 0 <= number <= COUNTER_END_MAX
