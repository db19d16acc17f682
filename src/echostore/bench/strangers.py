"""A peer under attack by strangers: 1,000 hostile connections on the loopback, and what a member notices of them.

    strangers-round-trip   a member's write until the attacked peer holds it, against the same while another peer is attacked
    strangers-restart      seconds until a member that starts anew has its first write held, the slowest of several
    strangers-memory       MiB of the attacked peer above what it had before

The attackers have keys of their own making, and have seen a ticket of the peer that they attack. They connect again half a second after they were thrown out, and each does one of:

    slow      begins a handshake and goes on for ever
    key       shakes hands and stays
    offer     names 10,000 parties in every frame
    half      sends frames of 7.9 MiB without their end
    small     sends the shortest frames as fast as they are taken

They run at a lower priority, and take processors of the machine that real ones would bring along. So the round trip is compared with the one that the
member has while the same attackers are busy with another peer, and the one in peace is told beside it.

This module is also what the processes run: `python -m echostore.bench.strangers ROLE ARGUMENTS`, as JSON.
"""

import asyncio
import contextlib
import functools
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from echostore.bench import Measure
from echostore.kernel.ids import DeviceKey
from echostore.mesh.connection import Connection, ConnectionFailed, open_connection
from echostore.peer.network import parse_address
from echostore.peer.peer import open_peer
from echostore.wire.mesh import Offer, Ping, encode_mesh_frame
from echostore.wire.signing import SigningKey

HOSTILE: Final = 1_000
ATTACKERS: Final = 2
"""Processes that share the hostile connections."""
WRITES: Final = 150
PAUSE_S: Final = 0.01
RESTARTS: Final = 5
SETTLE_S: Final = 5.0
"""How long an attack goes on before anything is measured."""
RECONNECT_S: Final = 0.5
PATIENCE_S: Final = 60.0
TAGS: Final = 10_000
HALF_BYTES: Final = 7_900_000
FILES: Final = 8_192
GOAL_ROUND_TRIP, GOAL_RESTART_S, GOAL_MEMORY_MIB = 2.0, 5.0, 150.0

Narrate = Callable[[str], None]


def measure(folder: Path, narrate: Narrate) -> list[Measure]:
    hostile = int(os.environ.get("ECHOSTORE_BENCH_STRANGERS", HOSTILE))
    party = _make(folder)
    with _role("host", home=folder / "host", party=party) as host, _role("decoy", home=folder / "decoy") as decoy:
        address, process = host.said["address"], host.process.pid
        with _role("member", home=folder / "member-0", party=party, address=address) as member:
            member.ask("write")  # what is done once is not measured
            narrate("strangers: a member's round trip in peace")
            peace = member.ask("write")
            narrate(f"strangers: the same while {hostile:,} hostile connections go to another peer")
            with _attack(decoy.said["address"], decoy.said["device"], hostile):
                time.sleep(SETTLE_S)
                elsewhere = member.ask("write")
            quiet_bytes = _resident(process)
            narrate("strangers: the same while they go to the peer that the member writes to")
            with _attack(address, host.said["device"], hostile), _Peak(process) as peak:
                time.sleep(SETTLE_S)
                during = member.ask("write")
                restarts = [_restart(folder, party, address, number) for number in range(1, RESTARTS + 1)]
                seen = host.ask("counters")
    quiet, busy = statistics.median(elsewhere), statistics.median(during)
    more = (peak.peak_bytes - quiet_bytes) / 2**20
    counted = ", ".join(f"{name} {count:,}" for name, count in sorted(seen.items()))
    return [
        Measure(
            "strangers-round-trip",
            busy / quiet,
            GOAL_ROUND_TRIP,
            f"{busy * 1e3:.1f} ms against {quiet * 1e3:.1f} ms; nine of ten within {_slow_s(during) * 1e3:.1f} ms against "
            f"{_slow_s(elsewhere) * 1e3:.1f} ms; in peace {statistics.median(peace) * 1e3:.1f} ms",
        ),
        Measure(
            "strangers-restart",
            max(restarts),
            GOAL_RESTART_S,
            "seconds: " + ", ".join(f"{each:.2f}" for each in restarts),
        ),
        Measure("strangers-memory", more, GOAL_MEMORY_MIB, f"MiB above {quiet_bytes / 2**20:.0f}; counted: {counted}"),
    ]


def _make(folder: Path) -> bytes:
    """A party of a host and of members, of which one writes all the time and the others start during the attack."""
    with open_peer(folder / "host", name="host", background=False) as host:
        party = host.create_party("bench")
        for number in range(RESTARTS + 1):
            with open_peer(folder / f"member-{number}", name="member", background=False) as member:
                member.enter(party.members.admit(member.request_join(party.key), role="editor"))
        return party.key


def _slow_s(took: list[float]) -> float:
    return statistics.quantiles(took, n=10)[-1]


def _resident(process: int) -> int:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Peak:
    """The most memory that a process has had meanwhile."""

    def __init__(self, process: int) -> None:
        self._process, self.peak_bytes = process, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, _resident(self._process))


def _restart(folder: Path, party: bytes, address: str, number: int) -> float:
    with _role("restart", home=folder / f"member-{number}", party=party, address=address) as member:
        return float(member.said)


# members


def _host(home: str, party: str) -> None:
    _more_files()
    with open_peer(home) as peer:
        peer.party(party)
        _say({"address": peer.listen("127.0.0.1:0"), "device": peer.device.hex()})
        for _ in sys.stdin:
            node = peer.network.node
            limited = node.limiter.counters
            told: Counter[str] = Counter(accepted=node.counters.accepted)
            told.update({f"evicted-{why}": count for why, count in limited.evicted.items()})
            told.update({f"displaced-{why}": count for why, count in limited.displaced.items()})
            told.update({f"refused-{why}": count for why, count in node.counters.refused.items()})
            told["starved"] = limited.starved
            told["strangers"] = node.limiter.strangers
            _say({name: count for name, count in told.items() if count})


def _decoy(home: str) -> None:
    """A peer for the attackers alone."""
    _more_files()
    with open_peer(home, name="decoy") as peer:
        peer.create_party("decoy")
        _say({"address": peer.listen("127.0.0.1:0"), "device": peer.device.hex()})
        sys.stdin.read()


def _member(home: str, party: str, address: str) -> None:
    """Writes when it is asked to; tells how long each write took until the host held it."""
    with open_peer(home) as peer:
        joined = peer.party(party)
        peer.connect(address)
        joined.wait_admitted(PATIENCE_S)
        item = joined.create("property-set", type="task")
        joined.flush().wait(held_by=2, timeout=PATIENCE_S)
        _say("ready")
        for _ in sys.stdin:
            took = []
            for number in range(WRITES):
                time.sleep(PAUSE_S)
                begun = time.perf_counter()
                item["number"] = number
                joined.flush().wait(held_by=2, timeout=PATIENCE_S)
                took.append(time.perf_counter() - begun)
            _say(took)


def _restarted(home: str, party: str, address: str) -> None:
    """A member that has just started: how long until the host holds its first write."""
    with open_peer(home) as peer:
        joined = peer.party(party)
        begun = time.perf_counter()
        peer.network.keep_connecting(address)
        joined.wait_for(lambda: joined.admitted, PATIENCE_S)
        joined.create("property-set", type="task")
        joined.flush().wait(held_by=2, timeout=PATIENCE_S)
        _say(time.perf_counter() - begun)


# attackers


class Target(NamedTuple):
    """The peer that is attacked."""

    host: str
    port: int
    device: DeviceKey


@contextmanager
def _attack(address: str, device: str, hostile: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for number in range(ATTACKERS):
            share = range(number, hostile, ATTACKERS)
            stack.enter_context(_role("attack", address=address, device=device, connections=list(share)))
        yield


def _attacker(address: str, device: str, connections: list[int]) -> None:
    """Keeps hostile connections until the standard input ends."""
    os.nice(10)
    _more_files()
    threading.Thread(target=_end_with_input, daemon=True).start()
    asyncio.run(_all_hostile(address, DeviceKey(bytes.fromhex(device)), connections))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


async def _all_hostile(address: str, device: DeviceKey, connections: list[int]) -> None:
    host, port = parse_address(address)
    kinds = (_slow, _key, _offer, _half, _small)
    _say("attacking")
    await asyncio.gather(*(_hostile(Target(host, port, device), kinds[number % len(kinds)]) for number in connections))


async def _hostile(target: Target, kind: Callable[[Target], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(OSError, ConnectionFailed):
            await kind(target)
        await asyncio.sleep(RECONNECT_S)


async def _slow(target: Target) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(b"ECHO")
    await _until_thrown_out(reader, writer)


async def _key(target: Target) -> None:
    async with _hostile_link(target) as link:
        await _until_thrown_out(link._reader, link._writer)


async def _offer(target: Target) -> None:
    async with _hostile_link(target) as link:
        while _open(link):
            link._writer.write(link._channel.send(_offer_frame()))
            await link._writer.drain()


async def _half(target: Target) -> None:
    async with _hostile_link(target) as link:
        whole = link._channel.send(_half_frame())
        link._writer.write(whole[:-1])
        await link._writer.drain()
        await _until_thrown_out(link._reader, link._writer)


async def _small(target: Target) -> None:
    async with _hostile_link(target) as link:
        while _open(link):
            for number in range(100):
                link.send(Ping(number) if number % 2 else Offer((secrets.token_bytes(32),)))
            await link._writer.drain()
            await asyncio.sleep(0)


@functools.cache
def _offer_frame() -> bytes:
    return encode_mesh_frame(Offer(tuple(secrets.token_bytes(32) for _ in range(TAGS))))


@functools.cache
def _half_frame() -> bytes:
    return bytes(HALF_BYTES)


@contextlib.asynccontextmanager
async def _hostile_link(target: Target) -> Any:
    shaken = await open_connection(target.host, target.port, SigningKey.generate(), expected=target.device)
    link: Connection = shaken.connection
    try:
        yield link
    finally:
        link._writer.transport.abort()


def _open(link: Connection) -> bool:
    return not link._reader.at_eof() and not link._writer.transport.is_closing()


async def _until_thrown_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.read(65_536):
            pass
    finally:
        writer.transport.abort()


# processes


def _more_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class _Role:
    """A process that says one thing when it is ready, and one more for each question."""

    def __init__(self, role: str, arguments: dict[str, Any]) -> None:
        plain = {
            key: value.hex() if isinstance(value, bytes) else str(value) if isinstance(value, Path) else value
            for key, value in arguments.items()
        }
        command = [sys.executable, "-m", "echostore.bench.strangers", role, json.dumps(plain)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said = self._answer()

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


@contextmanager
def _role(role: str, **arguments: Any) -> Iterator[_Role]:
    started = _Role(role, arguments)
    try:
        yield started
    finally:
        started.process.communicate()


ROLES: dict[str, Callable[..., None]] = {
    "host": _host,
    "decoy": _decoy,
    "member": _member,
    "restart": _restarted,
    "attack": _attacker,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
