"""A scheduler of steps: several real calls in one process, one step at a time, in an order drawn from a seed.

Each actor runs in a thread of its own and stops at every step that it announces. The scheduler lets exactly one of
them go on, so equal seeds give equal runs.
"""

import threading
from collections.abc import Callable
from random import Random
from typing import Any

WAIT_S = 30


class Actor:
    """One call that stops at its steps."""

    def __init__(self, name: str, call: Callable[[Callable[[str], None]], Any]) -> None:
        self.name = name
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.at = "start"
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._call(self._step)
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error
        self.done = True
        self._stopped.release()

    def _step(self, name: str) -> None:
        self.at = name
        self._stopped.release()
        self._go.acquire()

    def advance(self) -> None:
        """Let it run to its next step or its end."""
        self._go.release()
        assert self._stopped.acquire(timeout=WAIT_S), f"{self.name} hangs after {self.at}"


def interleave(actors: list[Actor], random: Random, after_each: Callable[[str], None]) -> list[str]:
    """Run all actors to their ends; the order in which they went."""
    order = []
    while waiting := [actor for actor in actors if not actor.done]:
        # Now and then one of them sleeps for long: that is what makes a zombie.
        actor = random.choice(waiting)
        for _ in range(random.choice((1, 1, 1, 2, 5, 30))):
            if actor.done:
                break
            actor.advance()
            order.append(f"{actor.name}:{actor.at}")
            after_each(order[-1])
    return order
