"""Receiving: foreign blocks, 64 under each signature, verified, ordered, applied and indexed."""

import time
from collections.abc import Callable
from pathlib import Path

from echostore.bench import Measure
from echostore.bench.floor import BATCH, floor_seconds
from echostore.peer.peer import open_peer

BLOCKS = 100_000
ITEMS = 1_000
GOAL = 3.0


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    narrate(f"receive: {BLOCKS:,} foreign blocks, {BATCH} per signature")
    with (
        open_peer(folder / "writer", name="writer", background=False) as writer,
        open_peer(folder / "reader", name="reader", background=False) as reader,
    ):
        party = writer.create_party("bench")
        joined = reader.enter(party.members.admit(reader.request_join(party.key), role="reader"))
        with party.batch():
            handles = [party.create("property-set", type="task", done=0) for _ in range(ITEMS)]
        party.flush()
        for number in range(BLOCKS):
            handles[number % ITEMS]["done"] = number
            if number % BATCH == BATCH - 1:
                party.flush()
        party.flush()
        source, target = party.sync_port, joined.sync_port
        ranges = []
        for tip in sorted(source.feeds(), key=lambda tip: tip.kind):
            start = 0
            while start < tip.tip.length:
                found = source.read(tip.feed, start, BATCH, 1 << 20, tip.tip.link)
                assert isinstance(found, tuple), tip
                ranges.append((tip.feed, tip.kind, start, found[0], found[1]))
                start += len(found[0])
        started = time.perf_counter()
        for feed, kind, start, payloads, head in ranges:
            target.ingest(feed, kind, start, payloads, head)
        joined.runtime.checkpoint()
        seconds = time.perf_counter() - started
        assert joined.timeframe == party.timeframe, "everything arrived"
    floor = floor_seconds(folder / "floor.db", BLOCKS, ITEMS, signing=False)
    detail = f"{seconds / BLOCKS * 1e6:.1f} us a block, floor {floor / BLOCKS * 1e6:.1f} us"
    return [Measure("receive", seconds / floor, GOAL, detail)]
