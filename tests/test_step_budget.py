"""The budget of steps stops loops of any shape that Python itself runs."""

import subprocess
import sys

import pytest

from echostore.kernel.models.step_budget import loops_in_a_line

LOOPS = {
    "nothing in one line": "while True: pass",
    "nothing in two lines": "while True:\n        pass",
    "a condition": "while [1]: pass",
    "a sum": "n = 0\n    while True: n += 1",
    "a for": "for _ in iter(int, 1): pass",
    "a comprehension": "[_ for _ in iter(int, 1)]",
    "a generator": "any(_ for _ in iter(int, 1))",
    "loop in loop": "while True:\n        while True: pass",
}

RUN = """
import sys
from echostore.kernel.models import step_budget
step_budget.STEPS_MAX = 5000
found = {}
exec(sys.argv[1], found)
try:
    with step_budget.StepBudget():
        found["spin"]()
except step_budget.OutOfSteps as out:
    print(out)
"""


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_any_shape_is_stopped(name: str) -> None:
    source = f"def spin():\n    {LOOPS[name]}\n"
    ran = subprocess.run([sys.executable, "-c", RUN, source], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "took more than 5000 steps\n"


def test_only_functions_with_a_loop_in_one_line_are_counted_by_instructions() -> None:
    counted = {name: loops_in_a_line(_code(source)) for name, source in LOOPS.items()}
    assert counted["nothing in one line"]
    assert counted["a sum"]
    assert counted["loop in loop"]
    assert not loops_in_a_line(_code("for n in range(3):\n        print(n)"))
    assert not loops_in_a_line(_code("return 1 if len('a') else 2"))


def _code(body: str) -> object:
    found: dict[str, object] = {}
    exec(f"def spin():\n    {body}\n", found)  # a formatter would put it on two lines
    return found["spin"].__code__  # type: ignore[attr-defined]  # a function
