"""Epochs: starting from one, making the next one, what gc leaves on disk, and a newcomer's download.

    cold start     items are folded from the epoch, after 10,000 and after 1,000,000 mutations of 1,000 items; and
                   against replaying all of them
    next epoch     1 % of 10,000 items of 1 KiB changed, five times in a row, in three homes; and again after a first epoch
                   that leaves out what it may
    gc             what is on disk against three times the snapshot and the tail
    many epochs    a party of 20 devices, opened after 10 epochs and after 1,000, all attested by all
    newcomer       100,000 items over loopback, against the same bytes as files over the same connection

ECHOSTORE_BENCH_EPOCHS scales all of it: 0.01 is a quick look.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from echostore.bench import Measure
from echostore.bench.many_epochs import make_party
from echostore.bench.network import PATIENCE_S, serving
from echostore.bench.writing import write_seconds
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.peer import Peer, open_peer
from echostore.wire.base_epoch import snapshot_blobs

SCALE = float(os.environ.get("ECHOSTORE_BENCH_EPOCHS", "1"))
ITEMS = 1_000
SMALL, LARGE = 10_000, max(20_000, int(1_000_000 * SCALE))
KIB_ITEMS = max(1_000, int(10_000 * SCALE))
LIVE_ITEMS = max(2_000, int(100_000 * SCALE))
DEVICES, FEW_EPOCHS, MANY_EPOCHS = 20, 10, max(50, int(1_000 * SCALE))
REPEATS = 5
HOMES, NEXT_EPOCHS = 3, 5

_PROBE = """
import json, resource, sys, time
from pathlib import Path
import echostore, echostore.peer.peer, echostore.peer.query, echostore.peer.epochs
from echostore.store.feed_store import FeedStore
home = Path(sys.argv[1])
folder = next((home / "parties").iterdir())
for file in folder.glob("items.db*"):
    file.unlink()
if sys.argv[2] == "replay":
    with FeedStore(folder / "feeds.db", bytes.fromhex(folder.name)) as feeds:
        kept = feeds.about("base")
        feeds.set_about({"base": b""})
before = time.perf_counter()
with echostore.open(home, background=False) as peer:
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


_OPEN_PROBE = """
import json, sys, time
from pathlib import Path
import echostore, echostore.peer.peer, echostore.peer.query
before = time.perf_counter()
with echostore.open(Path(sys.argv[1]), background=False) as peer:
    party = peer.party(peer.parties()[0].key)
    count = party.query(type="task").count()
    seconds = time.perf_counter() - before
    devices = len(party.runtime.processor.membership.machine.devices)
    messages = party.runtime.processor.counters.control
assert count == 1, count
print(json.dumps({"seconds": seconds, "devices": devices, "messages": messages}))
"""


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    return [
        *_cold_starts(folder, narrate),
        *_next_epoch(folder / "next", narrate),
        _next_discard(folder / "discarding", narrate),
        _many_epochs(folder / "many", narrate),
        _newcomer(folder / "joining", narrate),
    ]


def _cold_starts(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    homes = {}
    for mutations in (SMALL, LARGE):
        narrate(f"epochs: a party of {ITEMS:,} items with {mutations:,} mutations, and an epoch of it")
        homes[mutations] = folder / str(mutations)
        write_seconds(homes[mutations], mutations, ITEMS)
        with open_peer(homes[mutations], background=False) as peer:
            Epochs(peer.party(peer.parties()[0].key)).create()
    found: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
    for _ in range(REPEATS):  # alternating, so that a slow moment of the machine hits both
        for mutations, home in homes.items():
            found[mutations].append(_probe(home, "epoch"))
    best = {mutations: min(run["seconds"] for run in runs) for mutations, runs in found.items()}
    memory = {mutations: min(run["kib"] for run in runs) for mutations, runs in found.items()}
    narrate(f"epochs: replaying {LARGE:,} mutations")
    replay = _probe(homes[LARGE], "replay")["seconds"]
    return [
        Measure("epoch-start-time", best[LARGE] / best[SMALL], 1.3, f"{_ms(best[LARGE])} against {_ms(best[SMALL])}"),
        Measure(
            "epoch-start-memory",
            memory[LARGE] / memory[SMALL],
            1.3,
            f"{memory[LARGE] / 1024:.0f} MiB against {memory[SMALL] / 1024:.0f} MiB",
        ),
        Measure(
            "epoch-start-replay",
            best[LARGE] / replay,
            0.05,
            f"{_ms(best[LARGE])} against {_ms(replay)}: {replay / best[LARGE]:.0f} times faster",
        ),
        _disk(homes[LARGE]),
    ]


def _probe(home: Path, how: str) -> dict[str, float]:
    return _run(_PROBE, str(home), how)


def _run(program: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=True)
    outcome: dict[str, float] = msgspec.json.decode(done.stdout)
    return outcome


def _disk(home: Path) -> Measure:
    """One more epoch, so that the first one is old enough; then gc."""
    with open_peer(home, background=False) as peer:
        party = peer.party(peer.parties()[0].key)
        party.query(type="task").all()[0]["done"] = 1
        Epochs(party).create()
        freed = run_gc(party)
        snapshot = party.snapshot()
        size = sum(len(snapshot.blob(cid)) for cid in set(snapshot_blobs(snapshot.root, snapshot.blob)))
        tail = sum(
            len(block.payload) + len(block.link)
            for held in party.runtime.feeds.feeds()
            for block in party.runtime.feeds.read(held.key, held.base)
        )
        assert freed.disk_after is not None
    detail = f"{freed.disk_before:,} bytes before, {freed.disk_after:,} after; snapshot {size:,}, tail {tail:,}"
    return Measure("epoch-gc-disk", freed.disk_after / (3 * size + tail), 1.0, detail)


def _next_epoch(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    """Medians: each epoch is a few hundredths of a second, and the machine has slow moments."""
    first, later = _first_and_later(folder, narrate)
    return [
        _next_time("epoch-next-time", first, later),
        Measure(
            "epoch-next-bytes", later.size / first.size, 0.15, f"{later.size:,.0f} against {first.size:,.0f} bytes"
        ),
    ]


def _next_discard(folder: Path, narrate: Callable[[str], None]) -> Measure:
    """All epochs after one that discarded do so too, by its time."""
    narrate("epochs: the same, and the first epoch leaves out what it may")
    return _next_time("epoch-next-discard", *_first_and_later(folder, narrate, discarding=True))


def _first_and_later(
    folder: Path, narrate: Callable[[str], None], *, discarding: bool = False
) -> tuple["_Cost", "_Cost"]:
    narrate(f"epochs: {HOMES} times {KIB_ITEMS:,} items of 1 KiB, then {NEXT_EPOCHS} times another 1 % of them changed")
    homes = [_epochs_in_a_row(folder / str(number), discarding=discarding) for number in range(HOMES)]
    return _medians([epochs[0] for epochs in homes]), _medians([each for epochs in homes for each in epochs[1:]])


def _next_time(name: str, first: "_Cost", later: "_Cost") -> Measure:
    clock = f"by the clock {_ms(later.clock_s)} against {_ms(first.clock_s)}"
    detail = f"{_ms(later.cpu_s)} against {_ms(first.cpu_s)}; {clock}"
    return Measure(name, later.cpu_s / first.cpu_s, 0.10, detail)


class _Cost(NamedTuple):
    """What an epoch takes: seconds of CPU and by the clock, and bytes of blobs."""

    cpu_s: float
    clock_s: float
    size: float


def _epochs_in_a_row(home: Path, *, discarding: bool = False) -> list[_Cost]:
    """The first epoch of a party, and the ones that follow."""
    with open_peer(home, name="bench", background=False) as peer:
        party = peer.create_party("bench")
        handles = []
        for start in range(0, KIB_ITEMS, 500):
            with party.batch():
                handles += [
                    party.create("property-set", type="page", text=f"{number:06d}" + "x" * 1000)
                    for number in range(start, min(start + 500, KIB_ITEMS))
                ]
        party.runtime.checkpoint()
        found = [_epoch(peer, discard_before_ms=party.runtime.now_ms() if discarding else None)]
        for turn in range(NEXT_EPOCHS):
            for handle in handles[turn::100]:
                handle["text"] = "y" * 1000
            party.runtime.checkpoint()
            found.append(_epoch(peer))
    return found


def _medians(epochs: list[_Cost]) -> _Cost:
    return _Cost(*(median(values) for values in zip(*epochs, strict=True)))


def _many_epochs(folder: Path, narrate: Callable[[str], None]) -> Measure:
    """Opening costs what a party has, not what it went through."""
    homes = {epochs: folder / str(epochs) for epochs in (FEW_EPOCHS, MANY_EPOCHS)}
    for epochs, home in homes.items():
        narrate(f"epochs: a party of {DEVICES} devices with {epochs:,} epochs that all of them attested")
        make_party(home, devices=DEVICES, epochs=epochs)
    found: dict[int, list[dict[str, float]]] = {epochs: [] for epochs in homes}
    for _ in range(REPEATS):  # alternating, so that a slow moment of the machine hits both
        for epochs, home in homes.items():
            found[epochs].append(_run(_OPEN_PROBE, str(home)))
            assert found[epochs][-1]["devices"] == DEVICES, found
    best = {epochs: min(run["seconds"] for run in runs) for epochs, runs in found.items()}
    folded = {epochs: int(runs[-1]["messages"]) for epochs, runs in found.items()}
    return Measure(
        "epoch-many-open",
        best[MANY_EPOCHS] / best[FEW_EPOCHS],
        1.2,
        f"{_ms(best[MANY_EPOCHS])} after {MANY_EPOCHS:,} epochs, {_ms(best[FEW_EPOCHS])} after {FEW_EPOCHS}; "
        f"{folded[MANY_EPOCHS]} and {folded[FEW_EPOCHS]} control messages folded",
    )


def _epoch(peer: Peer, *, discard_before_ms: int | None = None) -> _Cost:
    party = peer.party(peer.parties()[0].key)
    blobs = party.runtime.blobs
    assert blobs is not None
    before, cpu, clock = blobs.data_bytes(), time.process_time(), time.perf_counter()
    Epochs(party).create(discard_before_ms=discard_before_ms)
    return _Cost(time.process_time() - cpu, time.perf_counter() - clock, blobs.data_bytes() - before)


def _newcomer(folder: Path, narrate: Callable[[str], None]) -> Measure:
    """The host is a process of its own, as it is between people: two peers in one would wait for each other."""
    narrate(f"epochs: a newcomer to {LIVE_ITEMS:,} items over loopback")
    with (
        open_peer(folder / "host", name="host", background=False) as host,
        open_peer(folder / "guest", name="guest", background=False) as guest,
    ):
        party = host.create_party("bench")
        for start in range(0, LIVE_ITEMS, 1000):
            with party.batch():
                for number in range(start, start + 1000):
                    party.create("property-set", type="task", text=f"task number {number}", done=number)
        guest.listen("127.0.0.1:0")  # who is on the network looks for an epoch first
        guest.enter(party.members.admit(guest.request_join(party.key), role="editor"))
        Epochs(party).create()
        blobs = party.runtime.blobs
        assert blobs is not None
        size = blobs.data_bytes()
        copy = party.files.add(os.urandom(size))
        party.flush()
        key = party.key
    with serving(folder / "host", key) as address, open_peer(folder / "guest") as guest:
        guest.party(key)
        began = time.perf_counter()
        guest.connect(address)
        outcomes = guest.network.bootstraps.outcomes
        until = time.monotonic() + PATIENCE_S
        while key not in outcomes:
            assert time.monotonic() < until, "the newcomer got nothing"
            time.sleep(0.01)
        usable_s = time.perf_counter() - began
        assert outcomes[key].epoch == 1, outcomes
        tree_s = outcomes[key].fetching_s
        started = time.perf_counter()
        guest.network.fetch(key, copy.cids)
        copy_s = time.perf_counter() - started
    detail = f"{size:,} bytes in {_ms(tree_s)}, as a file in {_ms(copy_s)}; ready for work after {_ms(usable_s)}"
    return Measure("epoch-newcomer", tree_s / copy_s, 2.0, detail)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
