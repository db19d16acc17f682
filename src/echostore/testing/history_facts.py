"""The checker's first reading of a history: what exists in it, and what it excludes by itself. Standard library only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echostore.testing.history_authority import Authority
from echostore.testing.history_epochs import EpochFacts
from echostore.testing.verdict import Report

Event = dict[str, Any]
Timeframe = dict[str, list[Any]]
"""feed -> [last seq, its hash]"""


@dataclass(slots=True)
class Entry:
    """One appended entry. `vanished`: its writer lost it in a crash before it was durable, which is allowed."""

    feed: str
    seq: int
    peer: str
    deps: list[list[Any]]
    durable: bool
    previous: str | None
    time: float | None
    under: list[list[Any]]
    """Control blocks that it directly follows."""
    vanished: bool = False


class Facts:
    """The first reading: what exists, and what the history itself excludes."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.entries: dict[str, Entry] = {}
        self.places: dict[str, dict[int, str]] = {}
        """feed -> seq -> hash; of a fork the one that came first."""
        self.forks: dict[str, int] = {}
        self.cuts: dict[str, int] = {}
        self.epochs: dict[int, Timeframe] = {}
        """Attested ones only."""
        self.pins: dict[str, tuple[int, str]] = {}
        self.byzantine: set[str] = set()
        self.admitted: set[str] = set()
        self.authority = Authority()
        self.agreement = EpochFacts()
        self._writers: dict[str, str] = {}
        self._ends: dict[str, int] = {}
        self._fork_events: dict[str, tuple[int, str]] = {}
        self._two_writers: dict[str, tuple[int, str]] = {}

    def read(self, number: int, event: Event) -> None:
        handler = _FACTS.get(event["kind"])
        if handler is not None:
            handler(self, number, event)

    def finish(self) -> None:
        """What can be said only when all is known: who was declared faulty, and which entries are excluded."""
        for feed, (number, peer) in self._fork_events.items():
            if peer not in self.byzantine:
                self.report.add("I3", number, f"{peer} forked its own feed {feed} at {self.forks[feed]}")
        for feed, (number, peer) in self._two_writers.items():
            if peer not in self.byzantine and self._writers[feed] not in self.byzantine:
                self.report.add("I3", number, f"{peer} wrote to the feed {feed} of {self._writers[feed]}")

    def limit(self, feed: str) -> float:
        """How many entries of a feed can be in a state: forks and cuts end it, a pin of an attested epoch keeps it."""
        limit = min(self.forks.get(feed, float("inf")), self.cuts.get(feed, float("inf")) + 1)
        pin = self.pins.get(feed)
        return max(limit, pin[0] + 1) if pin and limit != float("inf") else limit

    def excluded(self, feed: str, seq: int, digest: str) -> bool:
        """Whether this entry is legally outside every state."""
        if seq >= self.limit(feed):
            return True
        pin = self.pins.get(feed)
        return pin is not None and seq >= self.forks.get(feed, seq + 1) and digest not in self._chain(pin[1])

    def ground(self, reason: str, entry: Entry) -> bool:
        """Whether the history shows what a peer gave as its reason to exclude an entry."""
        if reason == "fork":
            return entry.seq >= self.forks.get(entry.feed, entry.seq + 1)
        if reason == "cut":
            return entry.seq > self.cuts.get(entry.feed, entry.seq)
        if reason == "epoch":
            return any(entry.seq <= timeframe.get(entry.feed, [-1])[0] for timeframe in self.epochs.values())
        return False

    def _chain(self, digest: str | None) -> set[str]:
        chain = set()
        while digest is not None and digest in self.entries:
            chain.add(digest)
            digest = self.entries[digest].previous
        return chain

    def append(self, number: int, event: Event) -> None:
        feed, seq, digest, peer = event["feed"], event["seq"], event["hash"], event["peer"]
        durable = bool(event["durable"])
        writer = self._writers.setdefault(feed, peer)
        if writer != peer:
            self._two_writers.setdefault(feed, (number, peer))
        known = self.entries.get(digest)
        if known is not None:
            if (known.feed, known.seq) != (feed, seq):
                self.report.add("H", number, f"one hash for two places: {digest}")
            elif known.durable and durable and not known.vanished:
                self.report.add("H", number, f"{feed}:{seq} was appended durably twice")
            known.durable = known.durable or durable
            known.vanished = False
        else:
            deps, under = event.get("deps", []), event.get("under", [])
            self.entries[digest] = Entry(feed, seq, peer, deps, durable, event.get("prev"), event.get("time"), under)
        place = self.places.setdefault(feed, {})
        other = place.setdefault(seq, digest)
        end = self._ends.get(feed, 0)
        if other != digest:
            self.forks[feed] = min(seq, self.forks.get(feed, seq))
            self._fork_events.setdefault(feed, (number, peer))
        elif seq > end:
            self.report.add("I1", number, f"{peer} appended {feed}:{seq} while its feed ended at {end}")
        self._ends[feed] = max(end, seq + 1)

    def boot(self, number: int, event: Event) -> None:
        peer, held = event["peer"], event["held"]
        if peer in self.byzantine:
            return  # what it keeps or loses is its own affair
        for feed, writer in self._writers.items():
            if writer != peer:
                continue
            length, link = held.get(feed, [0, ""])
            place = self.places[feed]
            if length and place.get(length - 1) != link:
                self.report.add("I1", number, f"{peer} came back with another content at {feed}:{length - 1}")
            end = length
            for seq in range(length, self._ends[feed]):
                digest = place.pop(seq, None)
                if digest is None:
                    continue
                if self.entries[digest].durable:
                    place[seq] = digest
                    end = seq + 1
                    self.report.add("I1", number, f"{peer} lost {feed}:{seq} in a crash, though it was durable")
                else:
                    self.entries[digest].vanished = True
            self._ends[feed] = end

    def acknowledged(self, number: int, event: Event) -> None:
        for feed, seq, digest in event.get("entries", []):
            entry = self.entries.get(digest)
            if entry is None or (entry.feed, entry.seq) != (feed, seq):
                self.report.add("I1", number, f"acknowledged {feed}:{seq}, which was not appended")
            elif not entry.durable:
                self.report.add("I1", number, f"acknowledged {feed}:{seq} before it was durable")

    def cut(self, number: int, event: Event) -> None:
        # Concurrent removals take the minimum.
        self.cuts[event["feed"]] = min(event["seq"], self.cuts.get(event["feed"], event["seq"]))

    def epoch(self, number: int, event: Event) -> None:
        if len(set(event["attests"])) < event["quorum"]:
            return
        timeframe: Timeframe = event["timeframe"]
        if self.epochs.setdefault(event["number"], timeframe) != timeframe:
            self.report.add("H", number, f"two attested epochs {event['number']}")
        for feed, (seq, digest) in timeframe.items():
            self.pins[feed] = max(self.pins.get(feed, (-1, "")), (seq, digest))

    def declare(self, number: int, event: Event) -> None:
        self.agreement.declare(event)

    def attest(self, number: int, event: Event) -> None:
        self.agreement.attest(event)

    def truth(self, number: int, event: Event) -> None:
        self.agreement.truth(event)

    def control(self, number: int, event: Event) -> None:
        self.authority.read(event)

    def admit(self, number: int, event: Event) -> None:
        self.admitted.add(event["feed"])

    def declare_byzantine(self, number: int, event: Event) -> None:
        self.byzantine.add(event["peer"])


_FACTS: dict[str, Callable[[Facts, int, Event], None]] = {
    "append": Facts.append,
    "boot": Facts.boot,
    "ok": Facts.acknowledged,
    "cut": Facts.cut,
    "epoch": Facts.epoch,
    "admit": Facts.admit,
    "control": Facts.control,
    "declare": Facts.declare,
    "attest": Facts.attest,
    "truth": Facts.truth,
    "byzantine": Facts.declare_byzantine,
}
