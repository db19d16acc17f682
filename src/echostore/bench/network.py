"""The network: replication, one keystroke, and a joiner far away. Two processes on the loopback, real sockets.

    replicate    the receiver's CPU for blocks that come over the network, against the same blocks from a local file
    keystroke    from a write in one process to a live query in another, against a bare round trip on such a channel
    latency      a joiner's time with 50 ms of latency added, against its time without

This module is also what the processes run: `python -m echostore.bench.network ROLE ARGUMENTS`, as JSON.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from echostore.bench import Measure
from echostore.bench.keystroke_floor import keystroke_floor
from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedKey, Link
from echostore.kernel.sync.serving import RANGE_BYTES
from echostore.peer.party import Party
from echostore.peer.peer import Peer, open_peer

BLOCKS = 100_000
BLOCKS_PER_SIGNATURE = 16
ITEMS = 1_000
REPEATS = 3
READERS = 4 * REPEATS + 5
PATIENCE_S = 120.0
KEYSTROKES = 300
PAUSE_S = 0.005
LATENCY_S = 0.05
LATENCY_REPEATS = 2
GOAL_REPLICATE, GOAL_KEYSTROKE, GOAL_LATENCY, GOAL_GAP = 2.0, 4.0, 1.2, 1.0

Narrate = Callable[[str], None]


def measure(folder: Path, narrate: Narrate) -> list[Measure]:
    blocks = int(os.environ.get("ECHOSTORE_BENCH_BLOCKS", BLOCKS))
    narrate(f"network: making a party of {blocks:,} blocks, {BLOCKS_PER_SIGNATURE} per signature")
    party = _make(folder, blocks)
    return [
        *_replicate(folder, party, blocks, narrate),
        *_keystroke(folder, party, narrate),
        *_latency(folder, party, blocks, narrate),
    ]


# what is sent


def _make(folder: Path, blocks: int) -> bytes:
    """A writer's home with a long feed, readers' homes that know the members and nothing else, and a file of ranges."""
    with ExitStack() as stack:
        writer = stack.enter_context(open_peer(folder / "writer", name="writer", background=False))
        party = writer.create_party("bench")
        readers = []
        for number in range(READERS):
            reader = stack.enter_context(open_peer(folder / f"reader-{number}", name="reader", background=False))
            readers.append(reader.enter(party.members.admit(reader.request_join(party.key), role="editor")))
        with party.batch():
            handles = [party.create("property-set", type="task", done=0) for _ in range(ITEMS)]
        party.flush()
        for each in _ranges(party):
            for joined in readers:
                _ingest(joined, each)
        for number in range(blocks):
            handles[number % ITEMS]["done"] = number
            if number % BLOCKS_PER_SIGNATURE == BLOCKS_PER_SIGNATURE - 1:
                party.flush()
        party.flush()
        with (folder / "ranges").open("wb") as file:
            for each in _ranges(party, beyond=readers[0]):
                data = msgspec.msgpack.encode(each)
                file.write(len(data).to_bytes(4, "big") + data)
        return party.key


def _ingest(party: Party, taken: tuple[Any, ...]) -> None:
    feed, kind, start, payloads, length, link, signature = taken
    result = party.sync_port.ingest(FeedKey(feed), kind, start, payloads, Head(length, Link(link), signature))
    assert result == length, result


def _ranges(party: Party, beyond: Party | None = None) -> Iterator[tuple[Any, ...]]:
    """All blocks, or those that another lacks, in ranges as a session cuts them, control first."""
    port = party.sync_port
    for tip in sorted(port.feeds(), key=lambda tip: tip.kind):
        start = beyond.runtime.feeds.length(tip.feed) if beyond is not None else 0
        while start < tip.tip.length:
            found = port.read(tip.feed, start, 1 << 16, RANGE_BYTES, tip.tip.link)
            assert isinstance(found, tuple), tip
            payloads, head = found
            yield tip.feed, tip.kind, start, list(payloads), head.length, head.link, head.signature
            start += len(payloads)


@contextmanager
def serving(home: Path, party: bytes) -> Iterator[str]:
    """The address of a process that serves a party meanwhile."""
    with _role("send", home=home, party=party) as address:
        yield address


# replicate


def _replicate(folder: Path, party: bytes, blocks: int, narrate: Narrate) -> list[Measure]:
    measures = []
    fresh = iter(range(READERS))
    for name, paused in (("replicate", True), ("replicate-applied", False)):
        narrate(f"network: {name}, {REPEATS} times over the network and from a file")
        net, file = [], []
        for _ in range(REPEATS):
            home = folder / f"reader-{next(fresh)}"
            with _role("send", home=folder / "writer", party=party) as sender:
                net.append(_once("receive", home=home, party=party, address=sender, paused=paused, blocks=blocks))
            home = folder / f"reader-{next(fresh)}"
            file.append(_once("take", home=home, party=party, file=folder / "ranges", paused=paused))
        cpu, floor = min(each["cpu"] for each in net), min(each["cpu"] for each in file)
        rate = blocks / min(each["wall"] for each in net)
        detail = f"{cpu / blocks * 1e6:.1f} us a block, from a file {floor / blocks * 1e6:.1f} us; {rate:,.0f} blocks/s"
        measures.append(Measure(name, cpu / floor, GOAL_REPLICATE, detail))
    return measures


def _send(home: str, party: str) -> None:
    """Serve a party until the standard input ends."""
    with open_peer(home) as peer:
        peer.party(party)
        _say(peer.listen("127.0.0.1:0"))
        sys.stdin.read()


def _receive(home: str, party: str, address: str, paused: bool, blocks: int) -> None:
    """Take a party from the network; tell the CPU of this process until all is held, and applied unless paused."""
    with open_peer(home) as peer:
        joined = _joined(peer, party, paused=paused)
        done = _when_held(joined, blocks, applied=not paused)
        peer.network.connections()  # what a peer does once, such as loading its modules, is not replication
        cpu, wall = time.process_time(), time.perf_counter()
        peer.connect(address)
        assert done.wait(PATIENCE_S), "it did not arrive"
        _say({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})


def _take(home: str, party: str, file: str, paused: bool) -> None:
    """The same from a file."""
    with open_peer(home) as peer:
        joined = _joined(peer, party, paused=paused)
        cpu, wall = time.process_time(), time.perf_counter()
        with Path(file).open("rb") as ranges:
            while size := ranges.read(4):
                _ingest(joined, msgspec.msgpack.decode(ranges.read(int.from_bytes(size, "big"))))
        _say({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})


def _joined(peer: Peer, party: str, *, paused: bool) -> Party:
    joined = peer.party(party)
    if paused:
        peer.pause_party(joined.key)
    return joined


def _when_held(party: Party, blocks: int, *, applied: bool) -> threading.Event:
    """Set once as many blocks are held, and applied if that is asked for."""
    done = threading.Event()
    port = party.sync_port

    def look(feed: FeedKey, length: int) -> None:
        if length >= blocks and (not applied or port.processed_length(feed) >= blocks):
            done.set()

    port.on_grow(look)
    return done


# keystroke


def _keystroke(folder: Path, party: bytes, narrate: Narrate) -> list[Measure]:
    """Clocks of two processes of one machine are one clock: the writer tells when it wrote, the reader when it saw."""
    narrate(f"network: {KEYSTROKES} keystrokes between two processes")
    home = folder / f"reader-{READERS - 1}"
    writer = _start("type", {"home": folder / "writer", "party": party})
    assert writer.stdout is not None
    address = json.loads(writer.stdout.readline())
    reader = _start("watch", {"home": home, "party": party, "address": address})
    wrote = json.loads(writer.stdout.readline())
    seen = json.loads(reader.communicate()[0])["seen"]
    writer.communicate()
    waits = [seen[str(number)] - at for number, at in enumerate(wrote["at"], 1)][KEYSTROKES // 10 :]
    median, bare, sync = statistics.median(waits), wrote["round_trip"], _sync_s(folder / "synced")
    floor = keystroke_floor(folder).seconds + bare / 2
    detail = (
        f"{median * 1e6:.0f} us, a bare round trip {bare * 1e6:.0f} us; the writer's sync alone, which has to come first, "
        f"takes {sync * 1e6:.0f} us here ({sync / bare:.1f} round trips); the steps that can't be left out, with bare "
        f"libraries, {floor * 1e6:.0f} us ({floor / bare:.1f})"
    )
    return [Measure("keystroke", median / bare, GOAL_KEYSTROKE, detail)]


def _sync_s(path: Path) -> float:
    """The median of what this disk takes to make one more page of a file durable, as far apart as the keystrokes."""
    found: list[float] = []
    with path.open("wb", buffering=0) as file:
        for _ in range(KEYSTROKES):
            time.sleep(PAUSE_S)
            file.write(bytes(4096))
            begun = time.perf_counter()
            os.fsync(file.fileno())
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _type(home: str, party: str) -> None:
    """Write a text letter by letter, each once the one before was seen; tell when, and how long a bare round trip takes."""
    with open_peer(home) as peer:
        joined = peer.party(party)
        text = joined.create("text", type="note")
        _say(peer.listen("127.0.0.1:0"))
        joined.flush().wait(held_by=2, timeout=PATIENCE_S)
        at = []
        for _ in range(KEYSTROKES):
            time.sleep(PAUSE_S)
            at.append(time.perf_counter())
            text.insert(0, "x")
            joined.flush().wait(held_by=2, timeout=PATIENCE_S)
        _say({"at": at, "round_trip": peer.network.call(_round_trip(peer))})
        sys.stdin.read()


async def _round_trip(peer: Peer) -> float:
    """The median of pings on the very connection, as far apart as the keystrokes."""
    (link,) = peer.network.node.links.values()
    found: list[float] = []
    for _ in range(KEYSTROKES):
        link.connection.ping()
        await asyncio.sleep(PAUSE_S)
        found.append(link.connection.round_trip_s or PAUSE_S)
    return statistics.median(found)


def _watch(home: str, party: str, address: str) -> None:
    """Subscribe to a live query and note when each letter shows; ends with the standard input."""
    seen: dict[int, float] = {}
    with open_peer(home) as peer:
        joined = peer.party(party)

        def changed(change: Any) -> None:
            now = time.perf_counter()
            for item in (*change.added, *change.changed):
                seen.setdefault(len(str(item)), now)

        joined.query(type="note").subscribe(changed)
        peer.connect(address)
        sys.stdin.read()
    _say({"seen": seen})


# latency


def _latency(folder: Path, party: bytes, blocks: int, narrate: Narrate) -> list[Measure]:
    """A proxy stands on the way in both cases; one of them holds every byte back."""
    fresh = iter(range(READERS - 2, 0, -1))
    runs: dict[float, list[Any]] = {0.0: [], LATENCY_S: []}
    narrate(f"network: a joiner of {blocks:,} blocks, with and without {LATENCY_S * 1e3:.0f} ms of latency")
    for _ in range(LATENCY_REPEATS):
        for delay_s, found in runs.items():
            with _role("send", home=folder / "writer", party=party) as address, _line(address, delay_s / 2) as line:
                home = folder / f"reader-{next(fresh)}"
                found.append(_once("join", home=home, party=party, address=line, blocks=blocks))
    near, far = (min(each["wall"] for each in found) for found in runs.values())
    gap = max(each["gap"] for found in runs.values() for each in found)
    return [
        Measure("latency", far / near, GOAL_LATENCY, f"{far:.2f} s against {near:.2f} s"),
        Measure("progress-gap", gap, GOAL_GAP, f"at most {gap:.2f} s between two tellings of progress"),
    ]


@contextmanager
def _line(address: str, delay_s: float) -> Iterator[str]:
    """A proxy in a process of its own; the product knows nothing of the tools for tests."""
    command = [sys.executable, "-m", "echostore.testing.fault_proxy"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    told = ""
    for method, positional, named in (
        ("open", ["127.0.0.1:0"], {}),
        ("retarget", [address], {}),
        ("shape", [], {"delay_s": delay_s}),
    ):
        process.stdin.write(json.dumps([method, "line", positional, named]) + "\n")
        process.stdin.flush()
        told = json.loads(process.stdout.readline())
    try:
        yield told
    finally:
        process.communicate()


def _join(home: str, party: str, address: str, blocks: int) -> None:
    """Take and apply everything; tell how long that took and the longest time without progress."""
    with open_peer(home) as peer:
        joined = peer.party(party)
        done = _when_held(joined, blocks, applied=True)
        begun = told_at = time.perf_counter()
        told, gap = 0, 0.0
        peer.connect(address)
        while not done.wait(0.02):
            progress = peer.network.progress(joined.key)
            now = time.perf_counter()
            if progress.held + progress.processed > told:
                gap, told, told_at = max(gap, now - told_at), progress.held + progress.processed, now
            assert now - begun < PATIENCE_S, "it did not arrive"
        _say({"wall": time.perf_counter() - begun, "gap": gap})


# processes


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _start(role: str, arguments: dict[str, Any]) -> "subprocess.Popen[str]":
    plain = {
        key: value.hex() if isinstance(value, bytes) else str(value) if isinstance(value, Path) else value
        for key, value in arguments.items()
    }
    command = [sys.executable, "-m", "echostore.bench.network", role, json.dumps(plain)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _once(role: str, **arguments: Any) -> Any:
    process = _start(role, arguments)
    out, _ = process.communicate()
    assert process.returncode == 0, f"{role} failed"
    return json.loads(out)


@contextmanager
def _role(role: str, **arguments: Any) -> Iterator[Any]:
    """A process that says one thing and stays until it is not needed any more."""
    process = _start(role, arguments)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate()


ROLES: dict[str, Callable[..., None]] = {
    "send": _send,
    "receive": _receive,
    "take": _take,
    "type": _type,
    "watch": _watch,
    "join": _join,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
