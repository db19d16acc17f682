"""Runs on one engine, on the other, or on both by turns: the cases are the same, and so are the answers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from echostore.pipeline.run import RunRequest, RunResult, run_pipeline

NAMES = ("spark", "local", "by turns")


@dataclass
class Engines:
    """Runs requests. `session` is of Spark; by turns, each run goes on from what the other engine committed."""

    name: str
    session: Any
    _turns: Iterator[Any] = field(init=False)

    def __post_init__(self) -> None:
        turns = {"spark": [self.session], "local": [None], "by turns": [None, self.session]}
        self._turns = cycle(turns[self.name])

    def run(self, request: RunRequest) -> RunResult:
        return run_pipeline(next(self._turns), request)
