"""Opening: a party of 1,000 live items after 10,000 and after 1,000,000 mutations, in time and in memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from echostore.bench import Measure
from echostore.bench.writing import write_seconds

ITEMS = 1_000
SMALL, LARGE = 10_000, 1_000_000
GOAL = 1.3
REPEATS = 5

_PROBE = """
import json, resource, sys, time
from pathlib import Path
import echostore, echostore.peer.peer, echostore.peer.query  # imports are not what is measured
before = time.perf_counter()
with echostore.open(sys.argv[1], background=False) as peer:
    party = peer.party(peer.parties()[0].key)
    count = party.query(type="task").where(done__ge=0).count()
    seconds = time.perf_counter() - before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.exists():  # Linux counts the parent's peak before exec in the figure above
        memory = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
assert count == 1000, count
print(json.dumps({"seconds": seconds, "kib": memory}))
"""


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    homes = {}
    for mutations in (SMALL, LARGE):
        narrate(f"open: making a party of {ITEMS:,} items with {mutations:,} mutations")
        homes[mutations] = folder / str(mutations)
        write_seconds(homes[mutations], mutations, ITEMS)
    found: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
    for _ in range(REPEATS):  # alternating, so that a slow moment of the machine hits both
        for mutations, home in homes.items():
            done = subprocess.run([sys.executable, "-c", _PROBE, str(home)], capture_output=True, check=True)
            found[mutations].append(msgspec.json.decode(done.stdout))
    best = {mutations: min(run["seconds"] for run in runs) for mutations, runs in found.items()}
    memory = {mutations: min(run["kib"] for run in runs) for mutations, runs in found.items()}
    return [
        Measure(
            "open-time",
            best[LARGE] / best[SMALL],
            GOAL,
            f"{best[LARGE] * 1e3:.0f} ms against {best[SMALL] * 1e3:.0f} ms",
        ),
        Measure(
            "open-memory",
            memory[LARGE] / memory[SMALL],
            GOAL,
            f"{memory[LARGE] / 1024:.0f} MiB against {memory[SMALL] / 1024:.0f} MiB",
        ),
    ]
