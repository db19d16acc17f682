"""A budget of steps for an application's own model, so that one that loops takes out its item and nothing else.

A step is a line of Python that the model runs, or a call, or a return; in a function with a loop inside one line, also
eight instructions, because Python tells of no new line in some such loops. Steps are counted, not seconds: the same
operation on the same state takes as many on a slow peer as on a fast one, so peers that run the same Python agree on
where the budget ends. What is done inside one call of C code, such as the sum of a huge range, is one step; and a model
that catches BaseException can go on uncounted. Models are installed by hand: this guards against mistakes, it is no
sandbox.
"""

import dis
import sys
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

STEPS_MAX = 1_000_000
"""For one operation, value, snapshot or restoring; a second or so. Far above what a model of plain values needs."""


INSTRUCTIONS_A_STEP = 8


class OutOfSteps(BaseException):
    """No `except Exception` of a model catches it."""

    def __init__(self) -> None:
        super().__init__(f"took more than {STEPS_MAX} steps")


class StepBudget:
    """Counts the steps of what is called inside its `with` block, on this thread. A debugger has to wait meanwhile."""

    def __init__(self) -> None:
        self._left = STEPS_MAX * INSTRUCTIONS_A_STEP
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._left -= 1 if event == "opcode" else INSTRUCTIONS_A_STEP
        if self._left < 0:
            raise OutOfSteps
        if event == "call" and loops_in_a_line(frame.f_code):
            frame.f_trace_opcodes = True
        return self._count


@lru_cache(4096)
def loops_in_a_line(code: CodeType) -> bool:
    """Whether any jump back stays in its line: `while True: pass`, a comprehension."""
    lines = {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}
    return any(
        instruction.argval <= instruction.offset and lines.get(instruction.argval) == lines.get(instruction.offset)
        for instruction in dis.get_instructions(code)
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
    )
