"""Live queries: being told of one change over 100,000 items, against over 1,000."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from echostore.bench import Measure
from echostore.peer.peer import open_peer

SMALL, LARGE = 1_000, 100_000
CHANGES = 300
GOAL = 2.0


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    medians = {}
    for items in (SMALL, LARGE):
        narrate(f"live-query: one change among {items:,} items")
        medians[items] = _median_seconds(folder / str(items), items)
    detail = f"{medians[LARGE] * 1e6:.0f} us against {medians[SMALL] * 1e6:.0f} us a change"
    return [Measure("live-query", medians[LARGE] / medians[SMALL], GOAL, detail)]


def _median_seconds(home: Path, items: int) -> float:
    with open_peer(home, name="bench", background=False) as peer:
        party = peer.create_party("bench")
        handles = []
        for start in range(0, items, 1000):
            with party.batch():
                handles += [
                    party.create("property-set", type="task", done=False, n=start + number)
                    for number in range(min(1000, items - start))
                ]
        party.flush()
        party.runtime.checkpoint()
        told: list[object] = []
        watching = party.query(type="task").where(done=False).order_by("n").subscribe(told.append)
        told.clear()
        seconds = []
        for number in range(CHANGES):
            handle = handles[number * 7 % items]
            started = time.perf_counter()
            handle["done"] = not handle["done"]
            seconds.append(time.perf_counter() - started)
        assert len(told) == CHANGES, f"{len(told)} changes were told of"
        watching.close()
        return statistics.median(seconds)
