"""Several `echostore serve` processes, lines between them that break on demand, and one history of all that happens.

    with ProxyLab(folder, "abc") as lab:
        lab.found()                     a creates the party, the others join by ticket and passcode
        lab.write("b")
        lab.drop("a", "b")              nothing passes between them; `one_way`: from the first to the second alone
        lab.kill("c"); lab.start("c")
        lab.heal(); lab.settle()        all agree; the history is judged

Clients of a service are attached to it as any program is. Peers write their own part of the history from inside
(`recorded_serve`), clients write theirs from here; the merged history goes to the checker, which knows nothing else.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import echostore
from echostore.kernel.errors import Closed, EchoError
from echostore.kernel.ids import POSITION_BITS, item_creator, item_local
from echostore.kernel.timeframe import link_prefix
from echostore.mesh.ticket import read_ticket
from echostore.peer.anchors import Anchor
from echostore.testing.checker import Event, check_events
from echostore.testing.fault_proxy import FaultProxy, Way
from echostore.testing.verdict import Report

PATIENCE_S = 90.0
"""For what must happen; only a failing test waits so long."""


def until(condition: Callable[[], Any], what: str = "it", *, seconds: float = PATIENCE_S) -> Any:
    """Wait for something to become true; it must within the time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.02)
    return found


@dataclass(slots=True)
class Host:
    """One home and, while it runs, its service."""

    name: str
    home: Path
    process: "subprocess.Popen[str] | None" = None
    address: str = ""
    peer: Any = None
    party: Any = None
    anchor: Anchor | None = None
    """How far its client has read the stream."""
    watch: Any = None
    """A live query of all notes, from the start of the service on."""
    watches: int = 0

    @property
    def up(self) -> bool:
        return self.process is not None


class Lines(Protocol):
    """How hosts reach each other, and how that breaks. A pair is named by the lower name first; the higher one dials."""

    def listen(self, name: str) -> str: ...
    def wrap(self, name: str, command: list[str]) -> list[str]:
        """The command as it runs at a host."""
        ...

    def came_up(self, name: str, address: str) -> None: ...
    def address(self, of: str, seen_by: str) -> str: ...
    def drop(self, sender: str, receiver: str) -> None: ...
    def cut(self, one: str, other: str) -> None: ...
    def heal(self) -> None: ...
    def close(self) -> None: ...


class ProxyLines:
    """All on the loopback; every pair has a proxy between."""

    def __init__(self, names: str) -> None:
        self._proxies = {pair: FaultProxy("127.0.0.1:9") for pair in combinations(sorted(names), 2)}

    def line(self, one: str, other: str) -> FaultProxy:
        return self._proxies[min(one, other), max(one, other)]

    def listen(self, name: str) -> str:
        return "127.0.0.1:0"

    def wrap(self, name: str, command: list[str]) -> list[str]:
        return command

    def came_up(self, name: str, address: str) -> None:
        for (low, _), proxy in self._proxies.items():
            if low == name:
                proxy.retarget(address)

    def address(self, of: str, seen_by: str) -> str:
        return self.line(of, seen_by).address

    def drop(self, sender: str, receiver: str) -> None:
        self.line(sender, receiver).drop(Way.TO_TARGET if sender > receiver else Way.TO_DIALLER)

    def cut(self, one: str, other: str) -> None:
        self.line(one, other).cut()

    def heal(self) -> None:
        for proxy in self._proxies.values():
            proxy.heal()

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()


@dataclass(slots=True)
class Burst:
    """Writes in a thread of their own, until as many are done or the service dies."""

    work: "Future[None]"
    acked: list[Any]

    def over(self) -> bool:
        return self.work.done()

    def end(self) -> None:
        """Wait for the end; what went wrong in the thread goes wrong here."""
        self.work.result(PATIENCE_S)


class Lab:
    """See the module."""

    def __init__(self, folder: Path, names: str, lines: Lines, *, links: str | None = None) -> None:
        """`links` names the pairs that may connect ("ab,bc"); all may by default."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lines = folder, lines
        self.hosts = {name: Host(name, folder / name) for name in names}
        self._pairs = set(links.split(",")) if links else {low + high for low, high in combinations(names, 2)}
        self.key = b""
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._operations = 0
        self._items: list[Any] = []

    # processes

    def start(self, name: str, *, only: str | None = None, **environment: str) -> None:
        """Start a service. It dials those of its pairs whose name is lower, or `only` some of them."""
        host = self.hosts[name]
        assert not host.up
        fresh = not host.home.exists()
        known = [low for low in sorted(self.hosts) if low + name in self._pairs and (only is None or low in only)]
        dial = [part for low in known for part in ("--connect", self.lines.address(low, name))]
        history = self.folder / f"{name}.jsonl"
        command = [sys.executable, str(Path(__file__).with_name("recorded_serve.py")), str(history), name, "serve"]
        command += ["--json", "--log", "json", "--listen", self.lines.listen(name), *dial]
        command += ["--home", str(host.home), *(("--name", name) if fresh else ())]
        log = self.folder / f"{name}.log"
        with log.open("a") as errors:
            host.process = subprocess.Popen(
                self.lines.wrap(name, command),
                env={**os.environ, "ECHOSTORE_STATE": str(self.folder / f"{name}-state"), **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert host.process.stdout is not None
        line = host.process.stdout.readline()
        assert line, log.read_text()
        host.address = json.loads(line)["addresses"][0]
        self.lines.came_up(name, host.address)
        host.peer = echostore.open(host.home)
        host.party = host.peer.party(self.key) if self.key and not fresh else None
        self._follow(host)

    def kill(self, name: str) -> None:
        """As a power cut: no goodbye."""
        self._ended(name, signal.SIGKILL)
        with contextlib.suppress(Closed):  # it can't say any more that all is durable
            self.hosts[name].peer.close()

    def stop(self, name: str) -> None:
        self.hosts[name].peer.close()
        assert self._ended(name, signal.SIGTERM) == 0, (self.folder / f"{name}.log").read_text()

    def _ended(self, name: str, number: int) -> int:
        host = self.hosts[name]
        assert host.process is not None
        host.process.send_signal(number)
        status = host.process.wait(timeout=PATIENCE_S)
        assert host.process.stdout is not None
        host.process.stdout.close()
        host.process = host.party = host.watch = None
        return status

    def found(self, names: str | None = None) -> None:
        """Start all hosts; the first creates the party, the others join it in turn, each by the one that it dials."""
        wanted = names or "".join(self.hosts)
        for name in wanted:
            self.start(name)
        first = self.hosts[wanted[0]]
        first.party = first.peer.create_party("Lab")
        self.key = first.party.key
        self._follow(first)
        for name in wanted[1:]:
            self.join(name)

    def join(self, name: str, role: str = "admin") -> None:
        """By ticket and passcode; the ticket leads over the line."""
        inviter = min(pair[0] for pair in self._pairs if pair[1] == name and self.hosts[pair[0]].up)
        guest = self.hosts[name]
        invitation = self.hosts[inviter].party.invite(role)
        ticket = replace(read_ticket(invitation.ticket), addresses=(self.lines.address(inviter, name),))
        guest.party = guest.peer.join(ticket.text(), invitation.passcode)
        self._follow(guest)
        until(lambda: guest.party.status.writable and self._admitted(guest), f"{name} knows that it is a member")

    def _admitted(self, host: Host) -> bool:
        progress = host.peer.network.progress(self.key)
        return bool(progress.admitted)

    # clients

    def write(self, name: str, *, size: int = 1) -> None:
        """One batch of a client, durable when this returns."""
        host = self.hosts[name]
        if host.up and host.party is not None:
            self._write(host)
            for _ in range(size - 1):
                self._write(host)

    def _write(self, host: Host) -> Any:
        with self._lock:
            self._operations += 1
            number = self._operations
        op, client = f"op{number}", f"client-{host.name}"
        self._say({"kind": "inv", "op": op, "client": client})
        try:
            with host.party.batch():
                item = host.party.create("property-set", type="note", text=f"{host.name} {number}")
                item["n"] = number
            receipt = host.party.flush()
            # All of these are trips to the service, which may be killed between them.
            feed, length, data = bytes(receipt.feed), receipt.length, receipt.anchor.data
        except (EchoError, OSError) as error:
            self._say({"kind": "info", "op": op, "what": f"{type(error).__name__}: {error}"})
            return None
        place = next(at for known, at in data.entries.items() if feed.startswith(known))
        assert place.seq == length - 1, (place, length)
        entry = [feed[:8].hex(), place.seq, link_prefix(place.link).hex()]
        self._say({"kind": "ok", "op": op, "entries": [entry]})
        self._read(host, client)
        return receipt

    def _read(self, host: Host, client: str) -> None:
        """A client sees the state, with all that it wrote and saw before."""
        try:
            entries = host.party.timeframe.entries
        except (EchoError, OSError) as error:
            self._say({"kind": "info", "client": client, "what": f"{type(error).__name__}: {error}"})
            return
        shown = {feed.hex(): [at.seq, link_prefix(at.link).hex()] for feed, at in entries.items()}
        self._say({"kind": "read", "peer": host.name, "client": client, "timeframe": shown})

    def _follow(self, host: Host) -> None:
        """Begin a live query, unless there is one or no party yet."""
        if host.party is not None and host.watch is None:
            host.watches += 1
            host.watch = host.party.query(type="note").watch(initial=True)

    def _told(self, host: Host) -> bool:
        """Write down what the live query has told since the last time; whether that was anything."""
        changes = []
        while (change := host.watch.poll(0.0)) is not None:
            changes.append(change)
        # What is shown may not be durable yet, and the peer may still be at telling it: both are over after a flush.
        host.party.flush()
        for change in changes:
            self._say({**_live(host), "added": _origins(change.added), "removed": _origins(change.removed)})
        return bool(changes)

    def _compare(self, host: Host) -> None:
        """Write down what a fresh query answers, at a moment at which the live one has told all."""
        self._told(host)
        fresh = _origins(host.party.query(type="note").all())
        while self._told(host):
            fresh = _origins(host.party.query(type="note").all())
        self._say({**_live(host), "added": [], "removed": [], "shows": fresh})

    def burst(self, name: str, count: int) -> Burst:
        """Writes that go on while other things happen."""
        host = self.hosts[name]
        party_host = replace(host)

        acked: list[Any] = []

        def work() -> None:
            for _ in range(count):
                receipt = self._write(party_host)
                if receipt is None:
                    return
                acked.append(receipt)

        pool = ThreadPoolExecutor(1)
        made = Burst(pool.submit(work), acked)
        pool.shutdown(wait=False)
        return made

    def look(self, name: str) -> None:
        """A client reads the state, and goes on with its stream."""
        host = self.hosts[name]
        if not host.up or host.party is None:
            return
        host.party.flush()
        self._read(host, f"reader-{name}")
        self._told(host)
        stream = host.party.stream(after=host.anchor)
        entries = [[each.feed.hex(), each.seq, link_prefix(each.link).hex()] for each in stream]
        before, host.anchor = host.anchor, stream.anchor()
        event = {"kind": "stream", "client": f"reader-{name}", "stream": name, "entries": entries}
        self._say({**event, "after": _places(before), "anchor": _places(host.anchor)})

    # faults

    def drop(self, one: str, other: str, *, one_way: bool = False) -> None:
        self.lines.drop(one, other)
        if not one_way:
            self.lines.drop(other, one)

    def partition(self, split: str) -> None:
        """ "ab|c": nothing passes between the sides; "ab>c": nothing passes from the left to the right."""
        left, mark, right = split.partition("|") if "|" in split else split.partition(">")
        for one in left:
            for other in right:
                self.drop(one, other, one_way=mark == ">")

    def cut(self, one: str, other: str) -> None:
        self.lines.cut(one, other)

    def heal(self) -> None:
        self.lines.heal()

    # the end

    def cids(self) -> dict[str, str]:
        return {name: host.party.snapshot().cid for name, host in self.hosts.items() if host.party is not None}

    def has(self, name: str, writer: str, count: int) -> bool:
        """Whether a host has processed the last `count` writes of a client of another, or more."""
        acked = self._acked(writer)
        return self._has_all(self.hosts[name], acked[-count:])

    def _acked(self, writers: str) -> list[list[Any]]:
        clients = {event["op"]: event["client"][-1] for event in self.events if event["kind"] == "inv"}
        done = [event for event in self.events if event["kind"] == "ok" and clients[event["op"]] in writers]
        return [entry for event in done for entry in event["entries"]]

    def settle(self, *, but: str = "", feeds_of: str | None = None) -> str:
        """Everybody who is up agrees (I7), and what was acknowledged is there; returns the CID."""
        up = [host for name, host in self.hosts.items() if host.up and name not in but]
        for host in up:
            host.party.flush()
        acked = self._acked(feeds_of or "".join(self.hosts))

        def agree() -> bool:
            cids = {host.party.snapshot().cid for host in up}
            return len(cids) == 1 and all(self._has_all(host, acked) for host in up)

        until(agree, "agreement")
        cid: str = up[0].party.snapshot().cid
        for host in up:
            assert host.party.snapshot().cid == cid
        self._say({"kind": "quiesce", "peers": [host.name for host in up], "proofs": True})
        for host in up:
            self._compare(host)
        return cid

    def _has_all(self, host: Host, acked: list[list[Any]]) -> bool:
        seqs = {feed.hex(): at.seq for feed, at in host.party.timeframe.entries.items()}
        return all(seqs.get(feed, -1) >= seq for feed, seq, _ in acked)

    def history(self, *, byzantine: str = "") -> list[Event]:
        """All parts by time. Only the order of one peer's events matters, and an append comes before its ok."""
        events: list[Event] = [{"kind": "byzantine", "peer": name, "time": 0.0} for name in byzantine]
        for part in sorted(self.folder.glob("*.jsonl")):
            events += [json.loads(line) for line in part.read_text().splitlines()]
        return sorted([*events, *self.events], key=lambda event: event["time"])

    def judge(self, *, byzantine: str = "") -> Report:
        """The verdict of the checker; it must be good, and about something."""
        events = self.history(byzantine=byzantine)
        report = check_events(events)
        (self.folder / "history.json").write_text("\n".join(json.dumps(event) for event in events))
        assert report.good, f"{report}\nthe history is in {self.folder}"
        assert report.fates["stable"] > 0
        for name in self.hosts:
            log = self.folder / f"{name}.log"
            assert "Traceback" not in (log.read_text() if log.exists() else ""), log.read_text()
        return report

    def _say(self, event: Event) -> None:
        with self._lock:
            self.events.append({"time": round(time.monotonic(), 6), **event})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self.lines.close)
            for host in self.hosts.values():
                if host.process is not None:
                    stack.callback(host.process.wait, PATIENCE_S)
                    stack.callback(host.process.kill)
                    assert host.process.stdout is not None
                    stack.callback(host.process.stdout.close)
                    stack.callback(host.peer.close)


class ProxyLab(Lab):
    """A lab on the loopback: no rights are needed."""

    lines: ProxyLines

    def __init__(self, folder: Path, names: str, *, links: str | None = None) -> None:
        super().__init__(folder, names, ProxyLines(names), links=links)


def _live(host: Host) -> Event:
    return {"kind": "live", "peer": host.name, "client": f"reader-{host.name}", "query": f"notes-{host.watches}"}


def _origins(items: Any) -> list[list[Any]]:
    """The entries that made items."""
    ids = [item.id for item in items]
    return [[item_creator(item).hex(), item_local(item) >> POSITION_BITS] for item in ids]


def _places(anchor: Anchor | None) -> dict[str, int]:
    return {feed.hex(): at.seq for feed, at in anchor.data.entries.items()} if anchor else {}


def cuts_and_drops(lab: Lab) -> None:
    """Three hosts write on all sides of what keeps them apart; in the end they agree."""
    lab.found("abc")
    for name in "abc":
        lab.write(name, size=3)
        lab.look(name)
    lab.partition("a|bc")
    for name in "abc":
        lab.write(name, size=3)
    lab.heal()
    lab.settle()
    lab.partition("ab>c")
    for name in "abc":
        lab.write(name, size=2)
    lab.heal()
    lab.cut("a", "b")
    lab.cut("a", "c")
    for name in "abc":
        lab.write(name, size=2)
        lab.look(name)
    lab.heal()
    lab.settle()
    for name in "abc":
        lab.look(name)


def chaos(lab: Lab, seed: int, steps: int) -> Iterator[str]:
    """Random writes, reads and faults, all from the seed; yields what is done, so that a test may stop or look."""
    import random

    chance = random.Random(seed)
    names = sorted(lab.hosts)
    for _ in range(steps):
        roll, name = chance.random(), chance.choice(names)
        one, other = chance.sample(names, 2)
        down = [each for each in names if not lab.hosts[each].up]
        if roll < 0.5:
            lab.write(name, size=chance.randrange(1, 4))
            yield f"write {name}"
        elif roll < 0.6:
            lab.look(name)
            yield f"look {name}"
        elif roll < 0.7:
            lab.drop(one, other, one_way=chance.random() < 0.5)
            yield f"drop {one} {other}"
        elif roll < 0.75:
            lab.cut(one, other)
            yield f"cut {one} {other}"
        elif roll < 0.85:
            lab.heal()
            yield "heal"
        elif down:
            lab.start(down[0])
            yield f"start {down[0]}"
        elif chance.random() < 0.5:
            burst = lab.burst(name, 50)
            until(lambda burst=burst: len(burst.acked) >= 3 or burst.over(), "a few writes")
            lab.kill(name)
            burst.end()
            yield f"kill {name}"
        else:
            lab.stop(name)
            yield f"stop {name}"
    for name in names:
        if not lab.hosts[name].up:
            lab.start(name)
    lab.heal()
