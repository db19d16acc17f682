"""Benchmarks as ratios: each measures our work and a floor of the same run, side by side.

Times alone mean nothing on shared machines; a ratio against bare library calls of the same run does. `echostore bench`
runs them, `docs/benchmarks.md` keeps the figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Measure:
    """One benchmark's outcome: at most `goal`, lower is better."""

    name: str
    ratio: float
    goal: float
    detail: str

    @property
    def ok(self) -> bool:
        return self.ratio <= self.goal


Bench = Callable[[Path, Callable[[str], None]], list[Measure]]
"""(scratch folder, narrate) -> measures."""

BENCHES: dict[str, str] = {
    "write": "echostore.bench.writing",
    "receive": "echostore.bench.receiving",
    "text": "echostore.bench.typing",
    "open": "echostore.bench.opening",
    "live-query": "echostore.bench.live_query",
    "network": "echostore.bench.network",
    "strangers": "echostore.bench.strangers",
    "thin": "echostore.bench.thin",
    "epochs": "echostore.bench.epochs",
    "views": "echostore.bench.views",
    "pipeline": "echostore.bench.pipeline",
    "streaming": "echostore.bench.streaming",
}


def run(names: list[str], folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    """Run benchmarks by name, all of them when none is given."""
    measures = []
    for name in names or list(BENCHES):
        bench: Bench = import_module(BENCHES[name]).measure
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        measures.extend(bench(place, narrate))
    return measures
