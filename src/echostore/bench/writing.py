"""Writing: single property mutations through the public API, one flush per 64."""

import time
from collections.abc import Callable
from pathlib import Path

from echostore.bench import Measure
from echostore.bench.floor import BATCH, floor_seconds
from echostore.peer.peer import open_peer

MUTATIONS = 100_000
ITEMS = 1_000
GOAL = 4.0


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    narrate(f"write: {MUTATIONS:,} mutations of {ITEMS:,} items, one flush per {BATCH}")
    seconds = write_seconds(folder / "home", MUTATIONS, ITEMS)
    floor = floor_seconds(folder / "floor.db", MUTATIONS, ITEMS, signing=True)
    detail = f"{seconds / MUTATIONS * 1e6:.1f} us a mutation, floor {floor / MUTATIONS * 1e6:.1f} us"
    return [Measure("write", seconds / floor, GOAL, detail)]


def write_seconds(home: Path, mutations: int, items: int) -> float:
    """Until everything is durable and indexed: the closing checkpoint is inside."""
    with open_peer(home, name="bench", background=False) as peer:
        party = peer.create_party("bench")
        with party.batch():
            handles = [party.create("property-set", type="task", done=0) for _ in range(items)]
        party.flush()
        started = time.perf_counter()
        for number in range(mutations):
            handles[number % items]["done"] = number
            if number % BATCH == BATCH - 1:
                party.flush()
        party.runtime.checkpoint()
        return time.perf_counter() - started
