"""The checker's second reading of a history: what each peer and each client did. Standard library only."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from echostore.testing.history_epochs import EpochConduct
from echostore.testing.history_facts import Entry, Event, Facts
from echostore.testing.history_liveness import Liveness
from echostore.testing.verdict import Report


@dataclass(slots=True)
class PeerView:
    """What one peer has delivered: feed -> hashes by seq. None stands for an entry below an epoch it started from."""

    got: dict[str, list[str | None]] = field(default_factory=dict)
    position: int | None = None
    down: bool = False
    history: dict[str, dict[int, str]] = field(default_factory=dict)
    """What was delivered before a crash that rolled the state back: it must come again unchanged."""
    state_hash: str | None = None
    """Of its last state, if nothing was delivered or excluded since."""
    forks: set[tuple[str, int]] = field(default_factory=set)
    reached: dict[str, int] = field(default_factory=dict)
    """How many entries of a feed it has ever delivered, whatever was taken back since."""

    def has(self, feed: str, seq: int, digest: str) -> bool:
        got = self.got.get(feed)
        return got is not None and seq < len(got) and got[seq] in (digest, None)


@dataclass(slots=True)
class ClientView:
    """What one client was promised: nothing it saw or wrote disappears again."""

    seen: dict[str, int] = field(default_factory=dict)
    wrote: dict[str, tuple[int, str]] = field(default_factory=dict)
    streams: dict[str, dict[str, int]] = field(default_factory=dict)
    live: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    """What each live query shows, by what it told."""


class Conduct:
    """The second reading: what each peer and client did, judged by the facts."""

    def __init__(self, facts: Facts, report: Report) -> None:
        self.facts = facts
        self.report = report
        self._peers: dict[str, PeerView] = {}
        self._clients: dict[str, ClientView] = {}
        self._operations: dict[str, tuple[str, bool]] = {}
        self._states: dict[tuple[Any, ...], tuple[str, str]] = {}
        self._durable_ends: dict[str, int] = {}
        self._last_delivery: dict[str, float] = {}
        self._control_heads: dict[str, dict[int, frozenset[tuple[str, int]]]] = {}
        """feed -> seq -> the control blocks that are last in the past of that entry."""
        self._epochs = EpochConduct(facts.agreement, facts.places, facts.cuts, report)
        self._liveness = Liveness(facts.agreement, facts.cuts, report)
        self._branches: dict[str, dict[int, set[str]]] = {}
        """Of feeds that forked: what correct peers delivered at each place."""

    def read(self, number: int, event: Event) -> None:
        handler = _CONDUCT.get(event["kind"])
        if handler is None:
            self.report.add("H", number, f"unknown kind of event {event['kind']!r}")
            return
        peer = event.get("peer", "")
        if peer in self.facts.byzantine:
            return
        view = self._peers.get(peer) or self._peers.setdefault(peer, PeerView())
        if view.down and event["kind"] not in ("boot", "info"):
            self.report.add("H", number, f"{peer} acts while it is down")
        handler(self, number, event, view)

    def append(self, number: int, event: Event, view: PeerView) -> None:
        entry = self.facts.entries[event["hash"]]
        if entry.durable and not entry.vanished:
            feed = event["feed"]
            self._durable_ends[feed] = max(self._durable_ends.get(feed, 0), event["seq"] + 1)

    def receive(self, number: int, event: Event, view: PeerView) -> None:
        digest = event.get("hash")
        if digest is not None:
            self._must_exist(number, event["peer"], digest, "received")

    def deliver(self, number: int, event: Event, view: PeerView) -> None:
        peer, feed, seq, digest = event["peer"], event["feed"], event["seq"], event["hash"]
        got = view.got.setdefault(feed, [])
        view.reached[feed] = max(seq + 1, view.reached.get(feed, 0))
        if seq == len(got):
            got.append(digest)
        elif seq > len(got):
            self.report.add("I4", number, f"{peer} delivered {feed}:{seq} after {len(got)} entries: a gap")
            got.extend([None] * (seq - len(got)))
            got.append(digest)
        elif got[seq] in (digest, None):
            self.report.add("I4", number, f"{peer} delivered {feed}:{seq} twice")
        else:
            self.report.add("I3", number, f"{peer} delivered two entries at {feed}:{seq}")
        position = event.get("position")
        if position is not None:
            if view.position is not None and position != view.position + 1:
                self.report.add("I4", number, f"{peer} went from position {view.position} to {position}")
            view.position = position
        if view.history:
            before = view.history.get(feed, {}).get(seq)
            if before is not None and before != digest and not self.facts.excluded(feed, seq, before):
                self.report.add("I4", number, f"{peer} delivered another entry at {feed}:{seq} than before its crash")
        entry = self._must_exist(number, peer, digest, "delivered")
        if entry is None:
            return
        if (entry.feed, entry.seq) != (feed, seq):
            self.report.add("I3", number, f"{peer} delivered {entry.feed}:{entry.seq} as {feed}:{seq}")
        view.state_hash = None
        if feed in self.facts.forks:
            self._branches.setdefault(feed, {}).setdefault(seq, set()).add(digest)
        self._check_dependencies(number, view, event, entry)
        self._check_authority(number, event, entry)
        if "time" in event:
            self._last_delivery[digest] = event["time"]

    def _check_dependencies(self, number: int, view: PeerView, event: Event, entry: Entry) -> None:
        for feed, seq, digest in entry.deps:
            if view.has(feed, seq, digest) or self.facts.excluded(feed, seq, digest):
                continue
            if seq > self.facts.cuts.get(feed, seq):
                continue  # out of the state for who had not heard yet of the epoch that brings it back
            what = f"{event['peer']} delivered {entry.feed}:{entry.seq} without its dependency {feed}:{seq}"
            self.report.add("I5", number, what)

    def _check_authority(self, number: int, event: Event, entry: Entry) -> None:
        """I11, from the claims in the entry's own past. An entry is delivered after its causes, so theirs are known."""
        if not self.facts.authority:
            return
        heads = {(feed, seq) for feed, seq, _ in entry.under}
        for feed, seq in [(entry.feed, entry.seq - 1), *((feed, seq) for feed, seq, _ in entry.deps)]:
            heads |= self._control_heads.get(feed, {}).get(seq, frozenset())
        self._control_heads.setdefault(entry.feed, {}).setdefault(entry.seq, _last_of_each(heads))
        why_not = self.facts.authority.why_not(entry.feed, heads)
        if why_not is not None:
            self.report.add("I11", number, f"{event['peer']} delivered {entry.feed}:{entry.seq}, though {why_not}")

    def _must_exist(self, number: int, peer: str, digest: str, did: str) -> Entry | None:
        entry = self.facts.entries.get(digest)
        if entry is None:
            self.report.add("I3", number, f"{peer} {did} {digest}, which nobody appended")
        elif entry.vanished and entry.peer != peer:
            self.report.add("I1", number, f"{peer} {did} {entry.feed}:{entry.seq}, which left before it was durable")
        return entry

    def exclude(self, number: int, event: Event, view: PeerView) -> None:
        peer, reason = event["peer"], event["reason"]
        entry = self._must_exist(number, peer, event["hash"], "excluded")
        if entry is None:
            return
        if not self.facts.ground(reason, entry):
            what = f"{peer} excluded {entry.feed}:{entry.seq} as {reason!r}, which the history does not show"
            self.report.add("I2", number, what)
        view.state_hash = None
        got = view.got.get(entry.feed, [])
        # What an epoch compacted stays in the state; the other reasons take it out, with all that follows.
        if reason != "epoch" and entry.seq < len(got) and got[entry.seq] == event["hash"]:
            del got[entry.seq :]

    def state(self, number: int, event: Event, view: PeerView) -> None:
        peer, timeframe = event["peer"], event["timeframe"]
        place = tuple(sorted((feed, seq, digest) for feed, (seq, digest) in timeframe.items()))
        view.state_hash = event["state_hash"]
        self._epochs.state(number, event)
        self._liveness.state(event)
        known = self._states.setdefault((place, event["admission"], event["base"]), (event["state_hash"], peer))
        if known[0] != event["state_hash"]:
            self.report.add("I6", number, f"{peer} and {known[1]} have different states at one timeframe")
        if event.get("deliveries") == "untold":
            return
        for feed, (seq, digest) in timeframe.items():
            if not view.has(feed, seq, digest):
                self.report.add("I3", number, f"the state of {peer} holds {feed}:{seq}, which was not delivered")
        for feed, got in view.got.items():
            if len(got) > timeframe.get(feed, [-1])[0] + 1:
                self.report.add("I2", number, f"the state of {peer} lacks the delivered {feed}:{len(got) - 1}")

    def fork(self, number: int, event: Event, view: PeerView) -> None:
        """The peer holds a proof that a feed forked."""
        feed, seq = event["feed"], event["seq"]
        if self.facts.forks.get(feed) is None:
            self.report.add("I12", number, f"{event['peer']} found a fork of {feed}, which the history does not show")
        view.forks.add((feed, seq))

    def crash(self, number: int, event: Event, view: PeerView) -> None:
        view.down = True

    def boot(self, number: int, event: Event, view: PeerView) -> None:
        peer, timeframe = event["peer"], event.get("timeframe")
        view.down = False
        if timeframe is None:
            return
        view.position = event["position"] - 1 if "position" in event else None
        base = self.facts.epochs.get(event["base"], {}) if event.get("base") not in (None, "") else {}
        for feed, (seq, digest) in timeframe.items():
            if not view.has(feed, seq, digest) and base.get(feed, [-1])[0] < seq:
                self.report.add("I3", number, f"{peer} starts with {feed}:{seq}, which it never delivered")
        for feed, got in list(view.got.items()):
            kept = timeframe.get(feed, [-1])[0] + 1
            rolled_back = {seq: digest for seq, digest in enumerate(got) if seq >= kept and digest is not None}
            view.history.setdefault(feed, {}).update(rolled_back)
            del got[kept:]
        for feed, (seq, _) in timeframe.items():
            got = view.got.setdefault(feed, [])
            got.extend([None] * (seq + 1 - len(got)))
            view.reached[feed] = max(seq + 1, view.reached.get(feed, 0))

    def quiesce(self, number: int, event: Event, view: PeerView) -> None:
        """All is said to be everywhere: compare each peer with everything there is (I2)."""
        peers = {name: self._peers.setdefault(name, PeerView()) for name in event["peers"]}
        peers = {name: each for name, each in peers.items() if name not in self.facts.byzantine}
        self.report.fates = Counter()
        feeds = set(self._durable_ends) | {feed for each in peers.values() for feed in each.got}
        for feed in sorted(feeds):
            if self.facts.admitted and feed not in self.facts.admitted:
                self._must_be_out(number, feed, peers)
                continue
            self._weigh_feed(number, feed, peers)
        states = {view.state_hash for view in peers.values() if view.state_hash is not None}
        if len(states) > 1:
            self.report.add("I7", number, f"{len(states)} different states although nothing is under way")
        self._epochs.quiesce(number, sorted(peers))
        self._liveness.quiesce(number, sorted(peers))
        self._weigh_forks(number, peers, demanded=bool(event.get("proofs")))

    def _weigh_forks(self, number: int, peers: dict[str, PeerView], *, demanded: bool) -> None:
        """I12: all hold the same proofs and, where peers write down proofs, one for every fork that they saw."""
        proofs = {frozenset(view.forks) for view in peers.values()}
        if len(proofs) > 1:
            self.report.add("I12", number, f"peers hold {len(proofs)} different sets of fork proofs")
        if not demanded:
            return
        known = {feed for view in peers.values() for feed, _ in view.forks}
        for feed, branches in sorted(self._branches.items()):
            if any(len(digests) > 1 for digests in branches.values()) and feed not in known:
                self.report.add("I12", number, f"{feed} forked before correct peers' eyes, and nobody holds a proof")

    def _must_be_out(self, number: int, feed: str, peers: dict[str, PeerView]) -> None:
        for name, view in peers.items():
            if view.got.get(feed):
                self.report.add("I2", number, f"{name} delivered the feed {feed}, which nobody admitted")

    def _weigh_feed(self, number: int, feed: str, peers: dict[str, PeerView]) -> None:
        lengths = {name: len(view.got.get(feed, ())) for name, view in peers.items()}
        limit = self.facts.limit(feed)
        # A faulty writer may keep an entry to itself; once one correct peer has it, all must.
        place = self.facts.places.get(feed, {})
        written = self._durable_ends.get(feed, 0)
        if place and self.facts.entries[next(iter(place.values()))].peer in self.facts.byzantine:
            written = 0
        there = max(written, max(lengths.values(), default=0))
        wanted = int(min(there, limit))
        for name, length in lengths.items():
            if length < wanted:
                self.report.add("I2", number, f"{name} lost {feed}:{length} to {wanted - 1}")
            elif length > limit:
                self.report.add("I2", number, f"{name} kept {feed}:{int(limit)} in its state, which is excluded")
        branches = {tuple(view.got.get(feed, ())[wanted - 1 : wanted]) for view in peers.values()} - {(), (None,)}
        if wanted and len(branches) > 1:
            self.report.add("I2", number, f"peers ended on different branches of {feed} at {wanted - 1}")
        least, most = min(lengths.values(), default=0), max(lengths.values(), default=0)
        self.report.fates["stable"] += min(least, wanted)
        self.report.fates["lost"] += max(0, min(most, wanted) - least)
        self.report.fates["never-read"] += max(0, wanted - most)
        self.report.fates["excluded"] += max(0, len(place) - wanted) if there > wanted else 0

    def invoke(self, number: int, event: Event, view: PeerView) -> None:
        if event["op"] in self._operations:
            self.report.add("H", number, f"operation {event['op']} was invoked twice")
        self._operations[event["op"]] = (event["client"], False)

    def complete(self, number: int, event: Event, view: PeerView) -> None:
        client, done = self._operations.get(event["op"], (None, False))
        if client is None:
            self.report.add("H", number, f"operation {event['op']} completes without having been invoked")
            return
        if done:
            self.report.add("H", number, f"operation {event['op']} completes twice")
        self._operations[event["op"]] = (client, True)
        if event["kind"] == "ok":
            wrote = self._clients.setdefault(client, ClientView()).wrote
            for feed, seq, digest in event.get("entries", []):
                wrote[feed] = max(wrote.get(feed, (-1, "")), (seq, digest))

    def look(self, number: int, event: Event, view: PeerView) -> None:
        """A client read the state at a timeframe."""
        name, timeframe = event["client"], event["timeframe"]
        client = self._clients.setdefault(name, ClientView())
        for feed, seq in client.seen.items():
            # A fork or a cut may take back what was seen; nothing else may.
            if timeframe.get(feed, [-1])[0] < min(seq, self.facts.limit(feed) - 1):
                self.report.add("I9", number, f"{name} saw {feed}:{seq} and then no more")
        for feed, (seq, digest) in client.wrote.items():
            if timeframe.get(feed, [-1])[0] < seq and not self.facts.excluded(feed, seq, digest):
                self.report.add("I9", number, f"{name} does not see its own write {feed}:{seq}")
        for feed, (seq, digest) in timeframe.items():
            if not view.has(feed, seq, digest):
                self.report.add("I9", number, f"{name} saw {feed}:{seq}, which {event['peer']} had not delivered")
            client.seen[feed] = seq

    def stream(self, number: int, event: Event, view: PeerView) -> None:
        """A stream went on from one anchor to the next and gave these entries."""
        name, stream = event["client"], event["stream"]
        start: dict[str, int] = event["after"]
        anchors = self._clients.setdefault(name, ClientView()).streams
        previous = anchors.get(stream, start)
        if previous != start:
            back = any(start.get(feed, -1) < seq for feed, seq in previous.items())
            self.report.add("I9", number, f"stream {stream} of {name} {'went back' if back else 'skipped'}")
        at = dict(start)
        for feed, seq, digest in event["entries"]:
            if seq != at.get(feed, -1) + 1:
                did = "skipped" if seq > at.get(feed, -1) + 1 else "repeated"
                self.report.add("I9", number, f"stream {stream} of {name} {did} {feed}:{seq}")
            self._must_exist(number, name, digest, "was given")
            at[feed] = max(seq, at.get(feed, -1))
        if at != event["anchor"]:
            self.report.add("I9", number, f"stream {stream} of {name} ends at another anchor than its entries")
        anchors[stream] = event["anchor"]

    def live(self, number: int, event: Event, view: PeerView) -> None:
        """A live query told what came and went; with `shows`, what a fresh query answers at that moment."""
        name, query = event["client"], event["query"]
        shown = self._clients.setdefault(name, ClientView()).live.setdefault(query, set())
        for feed, seq in event["added"]:
            if (feed, seq) in shown:
                self.report.add("I9", number, f"live query {query} of {name} told {feed}:{seq} twice")
            if seq >= view.reached.get(feed, 0):
                what = f"live query {query} of {name} told {feed}:{seq}, which {event['peer']} had not delivered"
                self.report.add("I9", number, what)
            shown.add((feed, seq))
        for feed, seq in event["removed"]:
            if (feed, seq) not in shown:
                self.report.add(
                    "I9", number, f"live query {query} of {name} took back {feed}:{seq}, which it never told"
                )
            shown.discard((feed, seq))
        if "shows" in event:
            fresh = {(feed, seq) for feed, seq in event["shows"]}
            for feed, seq in sorted(shown ^ fresh):
                did = "lacks" if (feed, seq) in fresh else "still shows"
                self.report.add("I9", number, f"live query {query} of {name} {did} {feed}:{seq}")

    def declare(self, number: int, event: Event, view: PeerView) -> None:
        self._epochs.declare(number, event)

    def attest(self, number: int, event: Event, view: PeerView) -> None:
        self._epochs.attest(number, event)

    def dispute(self, number: int, event: Event, view: PeerView) -> None:
        self._epochs.dispute(number, event)

    def chain(self, number: int, event: Event, view: PeerView) -> None:
        self._epochs.chain(number, event)
        self._liveness.chain(event)

    def ask(self, number: int, event: Event, view: PeerView) -> None:
        self._liveness.ask(number, event)

    def nothing(self, number: int, event: Event, view: PeerView) -> None:
        """Of interest in the first reading alone."""

    def finish(self) -> None:
        waits = sorted(
            time - entry.time
            for digest, time in self._last_delivery.items()
            if (entry := self.facts.entries.get(digest)) is not None and entry.time is not None
        )
        if waits:
            last = len(waits) - 1
            self.report.latencies_s = {"p50": waits[last // 2], "p99": waits[last * 99 // 100], "max": waits[last]}


_CONDUCT: dict[str, Callable[[Conduct, int, Event, PeerView], None]] = {
    "append": Conduct.append,
    "recv": Conduct.receive,
    "deliver": Conduct.deliver,
    "exclude": Conduct.exclude,
    "state": Conduct.state,
    "crash": Conduct.crash,
    "boot": Conduct.boot,
    "quiesce": Conduct.quiesce,
    "inv": Conduct.invoke,
    "ok": Conduct.complete,
    "fail": Conduct.complete,
    "info": Conduct.nothing,
    "read": Conduct.look,
    "stream": Conduct.stream,
    "live": Conduct.live,
    "cut": Conduct.nothing,
    "epoch": Conduct.nothing,
    "admit": Conduct.nothing,
    "control": Conduct.nothing,
    "truth": Conduct.nothing,
    "declare": Conduct.declare,
    "attest": Conduct.attest,
    "dispute": Conduct.dispute,
    "chain": Conduct.chain,
    "ask": Conduct.ask,
    "fork": Conduct.fork,
    "byzantine": Conduct.nothing,
}


def _last_of_each(heads: set[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Of each feed the last place: it has the earlier ones in its past."""
    last: dict[str, int] = {}
    for feed, seq in heads:
        last[feed] = max(seq, last.get(feed, -1))
    return frozenset(last.items())
