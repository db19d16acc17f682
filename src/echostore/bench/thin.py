"""Thin clients: what a cache hit, a miss, a seen write and a crowd cost. A real root on the loopback, real sockets.

    hit         an answer that is held, against a lookup of the same key in a dictionary
    miss        an answer that is not, against a bare round trip and the fresh query
    seen        from a write at the root until a leaf's query has it, against a bare round trip; ticks are not gathered
    crowd       the root's CPU for a write that 1,000 leaves see, against sending as many bare frames
    specs       the root's time for a write with 100,000 watched specs `field = value`, against 100
    herd        upstream questions for 1,000 equal misses at an edge, against one
    reconnect   values sent again after a reconnection with 10,000 warm entries, against 5 % of them
    zipf        misses of reads by Zipf's law with 0.2 % writes, against 4 %

This module is also what the crowd's process runs: `python -m echostore.bench.thin URL CAPABILITY COUNT`.
"""

import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from timeit import timeit
from typing import Any
from unittest.mock import patch

from echostore.bench import Measure
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import UP, ChildOpened, LinkId, Opening, Received, Send
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Attach,
    Attached,
    Linked,
    Message,
    Spec,
    SystemId,
)
from echostore.kernel.query.expressions import comparisons
from echostore.kernel.query.filters import And
from echostore.kernel.query.spec import QuerySpec, Stage
from echostore.peer import coherence_root
from echostore.peer.coherence_root import CoherenceRoot
from echostore.peer.party import Party
from echostore.peer.peer import Peer, open_peer
from echostore.thin.link import open_link
from echostore.thin.thin_party import ThinParty, connect
from echostore.wire.capabilities import capability_from_text, read_capability
from echostore.wire.coherence import LinkFrame, encode_frame
from echostore.wire.index_spec import IndexCodec, IndexItem, IndexQuery, index_spec, index_value
from echostore.wire.signing import SigningKey

ITEMS = 1_000
HITS = 200_000
MISSES = 300
WRITES = 200
CROWD = 1_000
CROWD_WRITES = 20
SPECS_FEW, SPECS_MANY = 100, 100_000
SPECS_WRITES = 300
HERD = 1_000
WARM = 10_000
READS = 20_000
ZIPF = 0.99
WRITE_SHARE = 0.002
PATIENCE_S = 120.0
GOAL_HIT, GOAL_MISS, GOAL_SEEN, GOAL_CROWD, GOAL_SPECS = 8.0, 3.0, 4.0, 1.5, 1.5

Narrate = Callable[[str], None]


def measure(folder: Path, narrate: Narrate) -> list[Measure]:
    scale = float(os.environ.get("ECHOSTORE_BENCH_THIN", "0.1"))
    with (
        _root(folder / "root") as (party, url, capability),
        _echo() as round_trip,
        connect(url, capability, timeout_s=PATIENCE_S) as leaf,
    ):
        measures = [
            _hit(leaf, narrate),
            *_miss_and_seen(party, leaf, round_trip, narrate),
            _zipf(party, leaf, int(READS * scale), narrate),
            _reconnect(leaf, int(WARM * scale), narrate),
        ]
    with _root(folder / "crowded") as (party, url, capability):  # without what the leaf before had asked for
        measures.append(_crowd(party, url, capability, CROWD, narrate))
    return [*measures, _specs(folder, int(SPECS_MANY * scale), narrate), _herd(narrate)]


@contextmanager
def _root(folder: Path) -> Iterator[tuple[Party, str, str]]:
    """A party that is served, without gathering ticks: its address, and a capability for all of it."""
    with patch.object(coherence_root, "TICK_S", 0.0), open_peer(folder, name="root", background=False) as peer:
        party = _filled(peer, ITEMS)
        yield party, peer.serve_thin("127.0.0.1:0"), party.capability(read="*", write="*", messages=True).text


def _filled(peer: Peer, count: int) -> Party:
    party = peer.create_party("bench")
    with party.batch():
        for number in range(count):
            party.create("property-set", type="task", n=number, text=f"task number {number}", done=False)
    party.flush()
    return party


# floors


@contextmanager
def _echo() -> Iterator[Callable[[], float]]:
    """A function that makes one bare round trip over a WebSocket, between threads as the leaf's are, in seconds."""
    from websockets.asyncio.client import connect as open_socket
    from websockets.asyncio.server import serve

    loops = [asyncio.new_event_loop() for _ in range(2)]
    threads = [threading.Thread(target=loop.run_forever, daemon=True) for loop in loops]
    for thread in threads:
        thread.start()

    async def answer(socket: Any) -> None:
        async for message in socket:
            await socket.send(message)

    def on(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_S)

    async def start() -> Any:
        return await serve(answer, "127.0.0.1", 0, compression=None)

    server = on(loops[0], start())
    port = next(iter(server.sockets)).getsockname()[1]

    async def dial() -> Any:
        return await open_socket(f"ws://127.0.0.1:{port}", compression=None, proxy=None)

    socket = on(loops[1], dial())

    async def trip() -> None:
        await socket.send(b"x" * 64)
        await socket.recv()

    def timed() -> float:
        started = time.perf_counter()
        on(loops[1], trip())
        return time.perf_counter() - started

    try:
        yield timed
    finally:

        async def stop() -> None:
            server.close()
            await server.wait_closed()

        on(loops[1], socket.close())
        on(loops[0], stop())
        for loop, thread in zip(loops, threads, strict=True):
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _query_seconds(party: Party, number: int) -> float:
    """The fresh query and its bytes, as a root has to make them."""
    started = time.perf_counter()
    rows = party.query(type="task", n=number)
    index_value(IndexItem(each.id, each.type, each.model, each.to_dict()) for each in rows.all())
    return time.perf_counter() - started


# one leaf


def _hit(leaf: ThinParty, narrate: Narrate) -> Measure:
    narrate("thin: answers that are held")
    query = leaf.query(type="task", n=1)
    query.all()
    leaf.fence("full", timeout_s=PATIENCE_S)
    query.all()
    held = {query.spec: object()}
    gc.collect()
    best = min(timeit("q.all()", globals={"q": query}, number=HITS) for _ in range(5))
    floor = min(timeit("d[k]", globals={"d": held, "k": query.spec}, number=HITS) for _ in range(5))
    return Measure(
        "thin-hit", best / floor, GOAL_HIT, f"{best / HITS * 1e9:.0f} ns an answer, lookup {floor / HITS * 1e9:.0f} ns"
    )


def _miss_and_seen(party: Party, leaf: ThinParty, trip: Callable[[], float], narrate: Narrate) -> list[Measure]:
    narrate("thin: misses, and writes that a leaf sees")
    misses, fresh, trips, seen = [], [], [], []
    for number in range(MISSES):
        trips.append(trip())
        fresh.append(_query_seconds(party, number))
        query = leaf.query(type="task", n=number).order_by("text")
        started = time.perf_counter()
        query.all()
        misses.append(time.perf_counter() - started)
    item = party.query(type="task", n=5).one()
    query = leaf.query(type="task", n=5)
    query.all()
    with query.watch(timeout_s=PATIENCE_S) as watch:
        for number in range(WRITES):
            trips.append(trip())
            started = time.perf_counter()
            item["done"] = number
            next(watch)
            seen.append(time.perf_counter() - started)
    bare, miss, query_s = (statistics.median(each) for each in (trips, misses, fresh))
    told = statistics.median(seen)
    return [
        Measure(
            "thin-miss",
            miss / (bare + query_s),
            GOAL_MISS,
            f"{miss * 1e6:.0f} us; round trip {bare * 1e6:.0f} us and query {query_s * 1e6:.0f} us",
        ),
        Measure("thin-seen", told / bare, GOAL_SEEN, f"{told * 1e6:.0f} us, round trip {bare * 1e6:.0f} us"),
    ]


def _zipf(party: Party, leaf: ThinParty, reads: int, narrate: Narrate) -> Measure:
    narrate(f"thin: {reads:,} reads by Zipf's law")
    items = party.query(type="task").all()
    weights = [1 / (rank + 1) ** ZIPF for rank in range(len(items))]
    chosen = random.Random(5).choices(range(len(items)), weights, k=reads)
    handles = [each.id for each in items]
    for item in handles:
        leaf.get(item)
    leaf.fence("full", timeout_s=PATIENCE_S)
    missed = leaf.driver.counts["questions"]
    for number, place in enumerate(chosen):
        if number % round(1 / WRITE_SHARE) == 0:
            items[place]["done"] = number
            leaf.fence("full", timeout_s=PATIENCE_S)
            missed += 1  # the fence's own question
        leaf.get(handles[place])
    rate = (leaf.driver.counts["questions"] - missed) / reads
    return Measure("thin-zipf", rate / 0.04, 1.0, f"{100 * (1 - rate):.1f} % of the reads were held")


def _reconnect(leaf: ThinParty, entries: int, narrate: Narrate) -> Measure:
    narrate(f"thin: a reconnection with {entries:,} warm entries")
    ids = leaf.query(type="task").ids()
    queries = [leaf.query(type="task", item=ids[number % len(ids)], n__ge=-number) for number in range(entries)]
    for query in queries:
        query.all()
    links = leaf.driver.counts["links"]
    resent = [0]
    read_frame = Leaf.receive

    def counted(machine: Leaf, event: Any) -> Any:
        if isinstance(event, Received) and getattr(event.message, "value", None) is not None:
            resent[0] += 1
        return read_frame(machine, event)

    leaf.driver.drop_link("bench")
    deadline = time.monotonic() + PATIENCE_S
    while leaf.driver.counts["links"] == links or not leaf.connected:
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.005)
    started = time.perf_counter()
    with patch.object(Leaf, "receive", counted):
        leaf.create(type="other")
        leaf.fence("full", timeout_s=PATIENCE_S)
        for query in queries:
            query.all()
    seconds = time.perf_counter() - started
    return Measure(
        "thin-reconnect",
        resent[0] / (0.05 * entries),
        1.0,
        f"{resent[0]} of {entries:,} values were sent again; all read in {seconds:.1f} s",
    )


# many leaves


def _crowd(party: Party, url: str, capability: str, count: int, narrate: Narrate) -> Measure:
    narrate(f"thin: a write that {count:,} leaves see")
    item = party.query(type="task", n=7).one()
    service = party.peer.thin_services[0]
    with subprocess.Popen(
        [sys.executable, "-m", "echostore.bench.thin", url, capability, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None

        def arrived(number: int) -> None:
            assert process.stdout is not None
            while json.loads(process.stdout.readline()) < number:
                pass

        arrived(count)
        sockets = [link.connection for link in service.server.links.values()]
        told = count
        ours, floor = [], []
        frame = encode_frame(LinkFrame(0, Acquire(Spec(b"x" * 150))))
        for number in range(CROWD_WRITES):
            started = time.process_time()
            item["done"] = number
            told += count
            arrived(told)
            ours.append(time.process_time() - started)
            started = time.process_time()
            service.call(_send_all(sockets, frame))
            told += count
            arrived(told)
            floor.append(time.process_time() - started)
        process.stdin.close()
        process.wait(PATIENCE_S)
    mine, bare = statistics.median(ours), statistics.median(floor)
    return Measure("thin-crowd", mine / bare, GOAL_CROWD, f"{mine * 1e3:.0f} ms CPU, bare frames {bare * 1e3:.0f} ms")


async def _send_all(sockets: list[Any], frame: bytes) -> None:
    for socket in sockets:
        await socket.send(frame)


def _crowd_process(url: str, capability: str, count: int) -> None:
    """Many leaves that hold one index; a line for every thousandth of what arrived."""
    asyncio.run(_crowd_leaves(url, capability_from_text(capability), count))


async def _crowd_leaves(url: str, capability: bytes, count: int) -> None:
    party = read_capability(capability).party
    # Large enough that deltas are worth their bytes for all writes, though nobody says that it is read.
    spec = index_spec(IndexQuery(party, _where({"type": "task", "n__lt": 100})))
    ready = [0]

    def say() -> None:
        ready[0] += 1
        if ready[0] % count == 0:
            sys.stdout.write(f"{ready[0]}\n")
            sys.stdout.flush()

    tasks = []
    for _ in range(count):
        link = await open_link(url, capability, SigningKey.generate())
        tasks.append(asyncio.ensure_future(_crowd_leaf(link, spec, say)))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()


async def _crowd_leaf(link: Any, spec: Spec, say: Callable[[], None]) -> None:
    """Attach, ask once, then count what comes."""
    from echostore.wire.coherence import decode_frame

    generation = link.welcome.generation
    await link.send(encode_frame(LinkFrame(generation, Attach(random.getrandbits(60), None, False, 0))))
    async for data in link.frames():
        name = type(decode_frame(data).message).__name__
        if name == "Linked":
            await link.send(encode_frame(LinkFrame(generation, Acquire(spec))))
        elif name in ("Grant", "Update", "Acquire"):
            say()


# the root's own work


def _where(conditions: dict[str, Any]) -> QuerySpec:
    return QuerySpec((Stage(filter=And(tuple(comparisons(conditions)))),))


class _Outlet:
    """Takes what a root sends, and carries out at once what it puts off."""

    def __init__(self) -> None:
        self.sent = 0
        self.later_actions: list[Callable[[], None]] = []

    def send(self, link: LinkId, generation: int, message: Message) -> None:
        self.sent += 1

    def drop(self, link: LinkId, detail: str) -> None:
        raise AssertionError(detail)

    def aside(self, root: bytes, message: Message) -> None:
        raise AssertionError("there is one root")

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.later_actions.append(action)


def _specs(folder: Path, many: int, narrate: Narrate) -> Measure:
    narrate(f"thin: a write with {many:,} specs")
    with open_peer(folder / "specs", name="root", background=False) as peer:
        party = _filled(peer, 100)
        few_s = _write_seconds(party, SPECS_FEW)
        many_s = _write_seconds(party, many)
    return Measure(
        "thin-specs", many_s / few_s, GOAL_SPECS, f"{many_s * 1e6:.0f} us, with {SPECS_FEW} specs {few_s * 1e6:.0f} us"
    )


def _write_seconds(party: Party, specs: int) -> float:
    """A write that two of so many watched specs notice, until they were told; the median."""
    clock = [0.0]
    outlet = _Outlet()
    root = CoherenceRoot(party, outlet, now=lambda: clock[0])
    grants = read_capability(capability_from_text(party.capability(read="*").text))
    link, generation = LinkId("one"), 7
    root.open_link(link, generation, grants, bytes(32))
    root.receive(link, generation, Attach(1, None, False, 0))
    for number in range(specs):
        clock[0] += 0.01
        root.receive(
            link, generation, Acquire(index_spec(IndexQuery(party.key, _where({"type": "task", "n": number}))))
        )
    item = party.query(type="task", n=3).one()
    times = []
    for number in range(SPECS_WRITES):
        clock[0] += 1.0
        before = outlet.sent
        started = time.perf_counter()
        item["n"] = 3 if number % 2 else 4
        for action in outlet.later_actions:
            action()
        times.append(time.perf_counter() - started)
        outlet.later_actions.clear()
        assert outlet.sent > before, "the write was not told"
        for each in (3, 4):  # an index that is empty now was only invalidated: the leaf asks again
            spec = index_spec(IndexQuery(party.key, _where({"type": "task", "n": each})))
            root.receive(link, generation, Acquire(spec))
    root.close()
    return statistics.median(times)


def _herd(narrate: Narrate) -> Measure:
    """An edge with many links below, and nothing held."""
    narrate(f"thin: {HERD:,} equal misses at an edge")
    root = SystemId(b"r" * 16)
    edge = Edge(IndexCodec())
    edge.receive(Opening(UP, 1, 2))
    edge.receive(Received(UP, 1, Linked(Arc(root), 1)))
    spec, asked = Spec(b"spec"), 0
    for number in range(HERD):
        link, system = LinkId(str(number)), SystemId(root.root, (number + 1,))
        edge.receive(ChildOpened(link, 3))
        edge.receive(Received(link, 3, Attach(number, system, False, 0)))
        edge.receive(Received(UP, 1, Attached((edge.serving.turns[link],), system, 1, ())))
    for number in range(HERD):
        effects = edge.receive(Received(LinkId(str(number)), 3, Acquire(spec)))
        asked += sum(isinstance(each, Send) and each.link == UP for each in effects)
    return Measure("thin-herd", float(asked), 1.0, f"{asked} question for {HERD:,} leaves")


if __name__ == "__main__":
    _crowd_process(sys.argv[1], sys.argv[2], int(sys.argv[3]))
