"""The checker of histories: every way to break a promise is caught, and good histories raise no alarm."""

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echostore.testing import (
    checker,
    history_authority,
    history_conduct,
    history_epochs,
    history_facts,
    history_liveness,
    verdict,
)
from echostore.testing.checker import Event, check_events, check_file

# Events by hand


def digest(feed: str, seq: int, branch: str = "") -> str:
    return f"{feed}{seq}{branch}"


def append(peer: str, seq: int, *deps: str, durable: bool = True, branch: str = "", **more: Any) -> Event:
    named = [[dep[0], int(dep[1]), dep] for dep in deps]
    event = {"kind": "append", "peer": peer, "feed": peer, "seq": seq, "hash": digest(peer, seq, branch)}
    return {**event, "deps": named, "durable": durable, **more}


def deliver(peer: str, entry: str, position: int | None = None) -> Event:
    event = {"kind": "deliver", "peer": peer, "feed": entry[0], "seq": int(entry[1]), "hash": entry}
    return event if position is None else {**event, "position": position}


def exclude(peer: str, entry: str, reason: str) -> Event:
    return {"kind": "exclude", "peer": peer, "hash": entry, "reason": reason}


def timeframe(*entries: str) -> dict[str, list[Any]]:
    return {entry[0]: [int(entry[1]), entry] for entry in entries}


def state(peer: str, *entries: str, says: str = "s", admission: str = "", base: str = "") -> Event:
    event = {"kind": "state", "peer": peer, "timeframe": timeframe(*entries), "state_hash": says}
    return {**event, "admission": admission, "base": base}


def boot(peer: str, held: dict[str, list[Any]], **more: Any) -> Event:
    return {"kind": "boot", "peer": peer, "held": held, **more}


def crash(peer: str) -> Event:
    return {"kind": "crash", "peer": peer}


def wrote(op: str, client: str, *entries: str, kind: str = "ok") -> list[Event]:
    named = [[entry[0], int(entry[1]), entry] for entry in entries]
    return [{"kind": "inv", "op": op, "client": client}, {"kind": kind, "op": op, "entries": named}]


def look(peer: str, *entries: str, client: str = "x") -> Event:
    return {"kind": "read", "peer": peer, "client": client, "timeframe": timeframe(*entries)}


def stream(after: dict[str, int], entries: list[str], anchor: dict[str, int]) -> Event:
    named = [[entry[0], int(entry[1]), entry] for entry in entries]
    return {"kind": "stream", "client": "x", "stream": "t", "after": after, "entries": named, "anchor": anchor}


def live(peer: str, added: str = "", removed: str = "", shows: str | None = None) -> Event:
    """Entries by their names, with blanks between."""
    origins = [[[entry[0], int(entry[1])] for entry in (each or "").split()] for each in (added, removed, shows)]
    event = {"kind": "live", "peer": peer, "client": "x", "query": "q", "added": origins[0], "removed": origins[1]}
    return event if shows is None else {**event, "shows": origins[2]}


def epoch(*entries: str, attests: tuple[str, ...] = ("a", "b"), number: int = 1) -> Event:
    return {"kind": "epoch", "number": number, "timeframe": timeframe(*entries), "attests": attests, "quorum": 2}


QUIESCE: Event = {"kind": "quiesce", "peers": ["a", "b"]}
BYZANTINE: Event = {"kind": "byzantine", "peer": "z"}
A0, A1, B0 = append("a", 0), append("a", 1), append("b", 0, "a0")
BOTH = [A0, deliver("a", "a0"), deliver("b", "a0"), B0, deliver("b", "b0"), deliver("a", "b0")]
FORKED = [BYZANTINE, append("z", 0), append("z", 1), append("z", 1, branch="f")]

BAD: dict[str, tuple[str, list[Event]]] = {
    # I1 durability
    "a durable append is gone after a boot": ("I1", [A0, crash("a"), boot("a", {})]),
    "the end of a feed is gone after a boot": ("I1", [A0, A1, crash("a"), boot("a", {"a": [1, "a0"]})]),
    "an append is gone after the second boot": (
        "I1",
        [A0, crash("a"), boot("a", {"a": [1, "a0"]}), crash("a"), boot("a", {})],
    ),
    "a boot brings other content": ("I1", [A0, crash("a"), boot("a", {"a": [1, "a0f"]})]),
    "a write is acknowledged before it is durable": ("I1", [append("a", 0, durable=False), *wrote("1", "x", "a0")]),
    "a write is acknowledged that was never appended": ("I1", wrote("1", "x", "a0")),
    "an entry left before it was durable": (
        "I1",
        [append("a", 0, durable=False), crash("a"), boot("a", {}), deliver("b", "a0")],
    ),
    "a writer leaves a gap in its own feed": ("I1", [A0, append("a", 2)]),
    # I2 nothing lost
    "one peer never gets an entry": ("I2", [A0, deliver("a", "a0"), QUIESCE]),
    "nobody gets an entry": ("I2", [A0, QUIESCE]),
    "one peer lacks the end of a feed": (
        "I2",
        [A0, A1, deliver("a", "a0"), deliver("a", "a1"), deliver("b", "a0"), QUIESCE],
    ),
    "a fork is claimed and there is none": ("I2", [*BOTH, exclude("b", "a0", "fork")]),
    "a cut is claimed and there is none": ("I2", [*BOTH, exclude("b", "a0", "cut")]),
    "a cut is claimed that does not reach so far": (
        "I2",
        [*BOTH, {"kind": "cut", "feed": "a", "seq": 0}, exclude("b", "a0", "cut")],
    ),
    "an epoch is claimed that was not attested": (
        "I2",
        [*BOTH, epoch("a0", attests=("a",)), exclude("b", "a0", "epoch")],
    ),
    "an epoch is attested twice by one peer": (
        "I2",
        [*BOTH, epoch("a0", attests=("a", "a")), exclude("b", "a0", "epoch")],
    ),
    "an unknown reason to exclude": ("I2", [*BOTH, exclude("b", "a0", "because")]),
    "a forked entry stays in the state": (
        "I2",
        [*FORKED, *(deliver(peer, entry) for peer in "ab" for entry in ("z0", "z1")), QUIESCE],
    ),
    "an entry beyond a cut stays in the state": (
        "I2",
        [
            *(A0, A1, {"kind": "cut", "feed": "a", "seq": 0}),
            *(deliver("a", "a0"), deliver("a", "a1"), deliver("b", "a0"), QUIESCE),
        ],
    ),
    "an entry of a faulty peer reaches only one": ("I2", [BYZANTINE, append("z", 0), deliver("a", "z0"), QUIESCE]),
    "a feed is delivered that nobody admitted": (
        "I2",
        [{"kind": "admit", "feed": "a"}, A0, B0, *BOTH[1:3], deliver("a", "b0"), deliver("b", "b0"), QUIESCE],
    ),
    "a state forgets what was delivered": ("I2", [A0, A1, deliver("a", "a0"), deliver("a", "a1"), state("a", "a0")]),
    # I3 nothing invented
    "an entry is delivered that nobody appended": ("I3", [deliver("a", "a0")]),
    "an entry is received that nobody appended": ("I3", [{"kind": "recv", "peer": "a", "hash": "b7"}]),
    "an entry is delivered under another name": (
        "I3",
        [A0, {"kind": "deliver", "peer": "b", "feed": "b", "seq": 0, "hash": "a0"}],
    ),
    "two entries in one place of a state": ("I3", [*FORKED, *(deliver("a", entry) for entry in ("z0", "z1", "z1f"))]),
    "a correct peer forks its feed": ("I3", [A0, append("a", 0, branch="f")]),
    "a feed with two writers": ("I3", [A0, {**append("b", 1), "feed": "a", "hash": "a1"}]),
    "a state holds what was not delivered": ("I3", [A0, A1, deliver("a", "a0"), state("a", "a1")]),
    "a state holds another branch than was delivered": (
        "I3",
        [*FORKED, deliver("a", "z0"), deliver("a", "z1"), state("a", "z1f")],
    ),
    "a boot starts with what was never delivered": ("I3", [A0, boot("b", {}, timeframe=timeframe("a0"))]),
    "a boot starts from an epoch that was not attested": (
        "I3",
        [A0, epoch("a0", attests=("a",)), boot("b", {}, timeframe=timeframe("a0"), base=1)],
    ),
    # I4 once and in order
    "an entry is delivered twice": ("I4", [A0, deliver("b", "a0"), deliver("b", "a0")]),
    "an entry is delivered twice across a crash": (
        "I4",
        [A0, deliver("b", "a0"), crash("b"), boot("b", {}), deliver("b", "a0")],
    ),
    "an entry is skipped": ("I4", [A0, A1, deliver("b", "a1")]),
    "an entry is skipped after a boot": (
        "I4",
        [A0, A1, append("a", 2), deliver("b", "a0"), crash("b"), boot("b", {}, timeframe={}), deliver("b", "a1")],
    ),
    "a position is used twice": ("I4", [A0, A1, deliver("b", "a0", 0), deliver("b", "a1", 0)]),
    "a position is left out": ("I4", [A0, A1, deliver("b", "a0", 0), deliver("b", "a1", 2)]),
    "a position goes back at a boot that keeps the state": (
        "I4",
        [A0, A1, deliver("b", "a0", 5), crash("b"), boot("b", {}), deliver("b", "a1", 5)],
    ),
    # I5 causal
    "an entry comes before its dependency": ("I5", [A0, B0, deliver("a", "b0"), deliver("a", "a0")]),
    "a dependency never comes": ("I5", [A0, B0, deliver("b", "b0")]),
    "a dependency is met by another branch": (
        "I5",
        [A0, append("b", 0, "a0f"), deliver("a", "a0"), deliver("a", "b0")],
    ),
    "a dependency is forgotten by a rolled back state": (
        "I5",
        [*BOTH[:3], B0, crash("b"), boot("b", {"b": [1, "b0"]}, timeframe={}), deliver("b", "b0")],
    ),
    # I6 convergence
    "two peers differ at one timeframe": ("I6", [*BOTH, state("a", "a0", "b0"), state("b", "a0", "b0", says="t")]),
    "one peer differs from its own past": ("I6", [*BOTH, state("a", "a0", "b0"), state("a", "a0", "b0", says="t")]),
    "two peers differ before quiescence": ("I6", [*BOTH[:3], state("a", "a0"), state("b", "a0", says="t"), *BOTH[3:]]),
    # I9 sessions
    "a read goes back": ("I9", [A0, A1, deliver("a", "a0"), deliver("a", "a1"), look("a", "a1"), look("a", "a0")]),
    "a read on another peer goes back": (
        "I9",
        [A0, A1, deliver("a", "a0"), deliver("a", "a1"), deliver("b", "a0"), look("a", "a1"), look("b", "a0")],
    ),
    "a read lacks an own write": ("I9", [A0, *wrote("1", "x", "a0"), look("b")]),
    "a read shows what the peer does not have": ("I9", [A0, look("b", "a0")]),
    "a stream goes back": ("I9", [A0, stream({}, ["a0"], {"a": 0}), stream({}, ["a0"], {"a": 0})]),
    "a stream skips an anchor": (
        "I9",
        [A0, A1, append("a", 2), stream({}, ["a0"], {"a": 0}), stream({"a": 1}, ["a2"], {"a": 2})],
    ),
    "a stream skips an entry": ("I9", [A0, A1, stream({}, ["a1"], {"a": 1})]),
    "a stream repeats an entry": ("I9", [A0, stream({}, ["a0", "a0"], {"a": 0})]),
    "a stream's anchor is beyond its entries": ("I9", [A0, A1, stream({}, ["a0"], {"a": 1})]),
    "a live query tells an item twice": ("I9", [A0, deliver("a", "a0"), live("a", "a0"), live("a", "a0")]),
    "a live query tells what the peer does not have": ("I9", [A0, deliver("a", "a0"), live("b", "a0")]),
    "a live query tells what comes later": ("I9", [A0, A1, deliver("a", "a0"), live("a", "a0 a1"), deliver("a", "a1")]),
    "a live query takes back what it never told": ("I9", [A0, deliver("a", "a0"), live("a", "", "a0")]),
    "a live query lacks an item": ("I9", [A0, deliver("a", "a0"), live("a", shows="a0")]),
    "a live query keeps an item": ("I9", [A0, deliver("a", "a0"), live("a", "a0"), live("a", shows="")]),
    "a stream gives what nobody appended": ("I3", [stream({}, ["a0"], {"a": 0})]),
    # the history itself
    "an operation completes twice": ("H", [*wrote("1", "x"), {"kind": "ok", "op": "1"}]),
    "an operation completes without being invoked": ("H", [{"kind": "fail", "op": "1"}]),
    "an operation is invoked twice": ("H", [*wrote("1", "x"), {"kind": "inv", "op": "1", "client": "x"}]),
    "a peer acts while it is down": ("H", [A0, crash("b"), deliver("b", "a0")]),
    "an unknown kind of event": ("H", [{"kind": "gossip"}]),
    "an event without its fields": ("H", [{"kind": "deliver", "peer": "a"}]),
    "an event that is nothing": ("H", [{}]),
    "two attested epochs of one number": ("H", [*BOTH, epoch("a0"), epoch("a0", "b0")]),
    "an entry is appended durably twice": ("H", [A0, A0]),
    "one hash in two places": ("H", [A0, {**append("a", 1), "hash": "a0"}]),
}


@pytest.mark.parametrize("name", BAD)
def test_every_bad_history_is_caught_for_its_own_reason(name: str) -> None:
    invariant, events = BAD[name]
    report = check_events(events)
    assert report.counts[invariant] >= 1, report
    assert not report.good


GOOD: dict[str, list[Event]] = {
    "nothing": [],
    "two peers": [*BOTH, state("a", "a0", "b0"), state("b", "a0", "b0"), QUIESCE],
    "a tail that was not durable is lost and written anew": [
        append("a", 0, durable=False),
        *(crash("a"), boot("a", {}), append("a", 0, branch="n"), deliver("a", "a0n"), deliver("b", "a0n"), QUIESCE),
    ],
    "an append becomes durable later": [append("a", 0, durable=False), A0, *wrote("1", "x", "a0")],
    "a write fails": wrote("1", "x", kind="fail"),
    "a fork leaves every state": [
        *(*FORKED, *(deliver(peer, entry) for peer, entry in (("a", "z0"), ("a", "z1"), ("b", "z0"), ("b", "z1f")))),
        *(exclude("a", "z1", "fork"), exclude("b", "z1f", "fork"), state("a", "z0"), state("b", "z0"), QUIESCE),
    ],
    "a live query tells and takes back, and tells again": [
        *(A0, deliver("a", "a0"), live("a", "a0"), live("a", "", "a0"), live("a", "a0"), live("a", shows="a0")),
        *(crash("a"), boot("a", {"a": [1, "a0"]}, timeframe={}), deliver("a", "a0"), live("a", shows="a0")),
    ],
    "a live query tells late what a fork has taken": [
        *(*FORKED, deliver("a", "z0"), deliver("a", "z1"), exclude("a", "z1", "fork")),
        *(live("a", "z0 z1"), live("a", "", "z1"), live("a", shows="z0")),
    ],
    "an epoch pins one branch of a fork": [
        *(BYZANTINE, append("z", 0), append("z", 1, prev="z0"), append("z", 1, branch="f", prev="z0")),
        *(deliver(peer, entry) for peer in "ab" for entry in ("z0", "z1")),
        *(epoch("z1"), state("a", "z1"), state("b", "z1"), QUIESCE),
    ],
    "what is beyond a cut leaves the state": [
        *(A0, A1, deliver("a", "a0"), deliver("a", "a1"), deliver("b", "a0"), {"kind": "cut", "feed": "a", "seq": 0}),
        *(exclude("a", "a1", "cut"), QUIESCE),
    ],
    "a dependency beyond a cut dangles": [
        *(A0, A1, append("b", 0, "a1"), {"kind": "cut", "feed": "a", "seq": 0}),
        *(deliver(peer, entry) for peer in "ab" for entry in ("a0", "b0")),
        QUIESCE,
    ],
    "a faulty peer keeps an entry to itself": [BYZANTINE, append("z", 0), QUIESCE],
    "a feed that nobody admitted stays out": [{"kind": "admit", "feed": "a"}, *BOTH[:3], append("c", 0), QUIESCE],
    "a state is rolled back and delivered anew": [
        *(*BOTH, crash("b"), boot("b", {"b": [1, "b0"]}, timeframe={}, position=0)),
        *(deliver("b", "a0", 0), deliver("b", "b0", 1), QUIESCE),
    ],
    "a joiner starts from an attested epoch": [
        *(*BOTH, epoch("a0", "b0"), boot("c", {}, timeframe=timeframe("a0", "b0"), base=1)),
        *(append("a", 1, "b0"), deliver("a", "a1"), deliver("b", "a1"), deliver("c", "a1")),
        {"kind": "quiesce", "peers": ["a", "b", "c"]},
    ],
    "what an epoch compacted stays in the state": [*BOTH, epoch("a0"), exclude("a", "a0", "epoch"), QUIESCE],
    "states differ under different admissions": [
        *BOTH,
        state("a", "a0", "b0"),
        state("b", "a0", "b0", says="t", admission="2"),
    ],
    "a fork takes back what a client saw": [
        *(
            *FORKED,
            deliver("a", "z0"),
            deliver("a", "z1"),
            look("a", "z1"),
            exclude("a", "z1", "fork"),
            look("a", "z0"),
        ),
    ],
    "a stream goes on": [A0, A1, stream({}, ["a0"], {"a": 0}), stream({"a": 0}, ["a1"], {"a": 1})],
}


@pytest.mark.parametrize("name", GOOD)
def test_no_good_history_raises_an_alarm(name: str) -> None:
    assert check_events(GOOD[name]).good, check_events(GOOD[name])


# Generated good histories


class Party:
    """A party that keeps every promise, and writes down what it does."""

    def __init__(self, seed: int, *, peers: int = 3, steps: int = 60) -> None:
        self.chance = random.Random(seed)
        self.events: list[Event] = []
        self.peers = [f"p{number}" for number in range(peers)]
        self.time = 0.0
        self.feeds: dict[str, list[str]] = {name: [] for name in self.peers}
        self.deps: dict[str, list[list[Any]]] = {}
        self.ends: dict[str, int] = {}
        self.got: dict[str, dict[str, list[str]]] = {name: {} for name in self.peers}
        self.position = dict.fromkeys(self.peers, 0)
        self.streams: dict[str, dict[str, int]] = {name: {} for name in self.peers}
        self.operations = 0
        self.faulty = self.chance.random() < 0.4
        self.other_branch: list[str] = []
        if self.faulty:
            self.record("byzantine", peer="z")
            self.feeds["z"] = []
        actions = (self.write, self.write, self.write, self.gossip, self.gossip, self.gossip, self.restart, self.look)
        actions += (self.follow, self.tell_state, self.cut, self.fork)
        for _ in range(steps):
            self.time += 0.1
            self.chance.choice(actions)()
        self.quiesce()

    def record(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, "time": round(self.time, 3), **fields})

    def limit(self, feed: str) -> int:
        return self.ends.get(feed, 1 << 30)

    def write(self) -> None:
        writer = self.chance.choice(list(self.feeds))
        feed, seq = self.feeds[writer], len(self.feeds[writer])
        got = self.got.get(writer, {})
        deps = [[name, len(have) - 1, have[-1]] for name, have in got.items() if have and name != writer]
        made = hashlib.sha256(f"{writer}{seq}{len(self.events)}".encode()).hexdigest()[:16]
        feed.append(made)
        self.deps[made] = deps
        self.operations += 1
        honest = writer != "z"
        if honest:
            self.record("inv", op=str(self.operations), client=writer, peer=writer)
        fields = {"peer": writer, "feed": writer, "seq": seq, "hash": made, "deps": deps}
        if honest and self.chance.random() < 0.2:
            self.record("append", **fields, durable=False)
        self.record("append", **fields, durable=True, prev=feed[-2] if seq else None)
        if honest:
            self.record("ok", op=str(self.operations), entries=[[writer, seq, made]], peer=writer)
            while self.deliver_next(writer, writer):
                pass

    def deliver_next(self, peer: str, feed: str) -> bool:
        have = self.got[peer].setdefault(feed, [])
        source = self.feeds[feed]
        if feed == "z" and self.other_branch and peer == "p0":
            source = self.other_branch
        seq = len(have)
        if seq >= min(len(source), self.limit(feed)):
            return False
        made = source[seq]
        for name, at, wanted in self.deps[made]:
            held = self.got[peer].get(name, [])
            if not (at < len(held) and held[at] == wanted) and at < self.limit(name):
                return False
        have.append(made)
        self.record("deliver", peer=peer, feed=feed, seq=seq, hash=made, position=self.position[peer])
        self.position[peer] += 1
        return True

    def gossip(self) -> None:
        peer, feed = self.chance.choice(self.peers), self.chance.choice(list(self.feeds))
        for _ in range(self.chance.randrange(1, 6)):
            if not self.deliver_next(peer, feed):
                return

    def restart(self) -> None:
        peer = self.chance.choice(self.peers)
        feed = self.feeds[peer]
        if self.chance.random() < 0.5:
            lost = {"peer": peer, "feed": peer, "seq": len(feed), "hash": f"lost{len(self.events)}", "deps": []}
            self.record("append", **lost, durable=False)
        self.record("crash", peer=peer)
        self.time += 1
        held = {peer: [len(feed), feed[-1]]} if feed else {}
        if self.chance.random() < 0.5 or len(self.events) > 2000:
            # A long history is not delivered anew, to keep its length in step with the work done.
            self.record("boot", peer=peer, held=held)
            return
        # The state is derived: it may start from an earlier moment, or from nothing.
        kept = {name: have[: self.chance.randrange(len(have) + 1)] for name, have in self.got[peer].items()}
        if not self.closed(kept):
            kept = {}
        self.got[peer] = kept
        at = {name: [len(have) - 1, have[-1]] for name, have in kept.items() if have}
        self.record("boot", peer=peer, held=held, timeframe=at, position=self.position[peer])
        while self.deliver_next(peer, peer):
            pass
        # Clients of a peer that fell back wait until it has caught up.
        while sum(self.deliver_next(peer, feed) for feed in self.feeds):
            pass

    def closed(self, kept: dict[str, list[str]]) -> bool:
        """Whether all that is kept depends on nothing that is not."""
        return all(
            at < len(kept.get(name, [])) or at >= self.limit(name)
            for have in kept.values()
            for made in have
            for name, at, _ in self.deps[made]
        )

    def timeframe(self, peer: str) -> dict[str, list[Any]]:
        return {name: [len(have) - 1, have[-1]] for name, have in self.got[peer].items() if have}

    def look(self) -> None:
        peer = self.chance.choice(self.peers)
        self.record("read", peer=peer, client=peer, timeframe=self.timeframe(peer))

    def follow(self) -> None:
        peer = self.chance.choice(self.peers)
        after = dict(self.streams[peer])
        entries = []
        for name, have in self.got[peer].items():
            if name != "z":
                new = have[after.get(name, -1) + 1 :][: self.chance.randrange(5)]
                entries += [[name, after.get(name, -1) + 1 + number, made] for number, made in enumerate(new)]
        anchor = {**after}
        for name, seq, _ in entries:
            anchor[name] = seq
        self.record("stream", client=peer, stream="all", after=after, entries=entries, anchor=anchor)
        self.streams[peer] = anchor

    def tell_state(self) -> None:
        peer = self.chance.choice(self.peers)
        # Links chain, so the ends of the feeds stand for all that is in them.
        said = hashlib.sha256(json.dumps(sorted(self.timeframe(peer).items())).encode()).hexdigest()
        event = {"peer": peer, "timeframe": self.timeframe(peer), "state_hash": said}
        self.record("state", **event, admission=str(sorted(self.ends.items())), base="")

    def cut(self) -> None:
        feed = self.chance.choice(list(self.feeds))
        if feed == "z" or self.chance.random() < 0.8 or not self.feeds[feed] or len(self.ends) > len(self.peers) // 2:
            return
        self.leave(feed, self.chance.randrange(len(self.feeds[feed])) + 1, "cut")
        self.record("cut", feed=feed, seq=self.limit(feed) - 1)

    def fork(self) -> None:
        if not self.faulty or self.other_branch or len(self.feeds["z"]) < 2 or self.chance.random() < 0.5:
            return
        # p0 is shown another branch than the others, from behind what it has.
        at = len(self.got["p0"].get("z", []))
        if at >= len(self.feeds["z"]):
            return
        made = f"fork{len(self.events)}"
        self.deps[made] = []
        self.other_branch = [*self.feeds["z"][:at], made]
        self.record("append", peer="z", feed="z", seq=at, hash=made, deps=[], durable=True)
        self.deliver_next("p0", "z")
        self.leave("z", at, "fork")

    def leave(self, feed: str, end: int, reason: str) -> None:
        """Entries from `end` on leave every state."""
        end = min(end, self.limit(feed))
        self.ends[feed] = end
        for peer in self.peers:
            have = self.got[peer].get(feed, [])
            for made in have[end:]:
                self.record("exclude", peer=peer, hash=made, reason=reason)
            del have[end:]

    def quiesce(self) -> None:
        while sum(self.deliver_next(peer, feed) for peer in self.peers for feed in self.feeds):
            pass
        for _ in self.peers:
            self.tell_state()
        self.record("quiesce", peers=self.peers)


def test_a_thousand_generated_good_histories_raise_no_alarm() -> None:
    for seed in range(1000):
        party = Party(seed, peers=2 + seed % 4)
        report = check_events(party.events)
        assert report.good, f"seed {seed}: {report}"


def spoil(events: list[Event], chance: random.Random) -> bool:
    """Break a good history in one place; False when this one offers no such place."""
    delivers = [number for number, event in enumerate(events) if event["kind"] == "deliver" and goes_on(events, number)]
    if not delivers:
        return False
    at = chance.choice(delivers)
    match chance.randrange(4):
        case 0:
            del events[at]
        case 1:
            events.insert(at, dict(events[at]))
        case 2:
            events[at] = {**events[at], "hash": "invented"}
        case _:
            states = [number for number, event in enumerate(events) if event["kind"] == "state"]
            same = [n for n in states if sum(events[n]["timeframe"] == events[m]["timeframe"] for m in states) > 1]
            pairs = [n for n in same if sum(_place(events[n]) == _place(events[m]) for m in states) > 1]
            if not pairs:
                return False
            events[pairs[0]] = {**events[pairs[0]], "state_hash": "other"}
    return True


def goes_on(events: list[Event], at: int) -> bool:
    """Whether the peer delivers again before it restarts: otherwise nobody could tell that a delivery was left out."""
    peer = events[at]["peer"]
    following = (event["kind"] for event in events[at + 1 :] if event.get("peer") == peer)
    return next((kind for kind in following if kind in ("deliver", "boot")), "boot") == "deliver"


def _place(event: Event) -> tuple[Any, ...]:
    return (event["timeframe"], event["admission"])


def test_spoiled_histories_are_caught() -> None:
    """The generator's histories again, each broken in one place."""
    spoiled = 0
    for seed in range(300):
        events = Party(seed, peers=3).events
        if spoil(events, random.Random(seed)):
            spoiled += 1
            assert not check_events(events).good, f"seed {seed}"
    assert spoiled > 200


# Authority, agreement at the end, proofs


def control(seq: int, *claims: Event, feed: str = "k", deps: tuple[int, ...] = ()) -> Event:
    named = [["k", dep, f"k{dep}"] for dep in deps]
    return {
        "kind": "control",
        "peer": "a",
        "feed": feed,
        "seq": seq,
        "hash": f"{feed}{seq}",
        "deps": named,
        "claims": list(claims),
    }


def claim(issuer: str, what: str, /, **said: Any) -> Event:
    return {"issuer": issuer, "assertion": {"is": what, **said}}


GENESIS = control(0, claim("ann", "PartyGenesis", identity="ann", data_feed="a"))
BOB = [
    claim("ann", "MemberAdmit", member="bob", role="editor"),
    claim("ann", "FeedAdmit", feed="b", kind="data", identity="bob"),
]
READER = [{**BOB[0], "assertion": {**BOB[0]["assertion"], "role": "reader"}}, BOB[1]]


def under(event: Event, *seqs: int) -> Event:
    return {**event, "under": [["k", seq, f"k{seq}"] for seq in seqs]}


A_UNDER, B_UNDER = under(append("a", 0), 0), under(append("b", 0), 1)
ALLOWED = [GENESIS, control(1, *BOB), A_UNDER, B_UNDER, deliver("a", "a0"), deliver("a", "b0")]
AUTHORITY_BAD: dict[str, tuple[str, list[Event]]] = {
    "a feed that nobody admitted": ("I11", [GENESIS, A_UNDER, B_UNDER, deliver("a", "a0"), deliver("a", "b0")]),
    "an admission outside the entry's past": ("I11", [*ALLOWED[:3], under(append("b", 0), 0), *ALLOWED[4:]]),
    "a reader writes": ("I11", [GENESIS, control(1, *READER), *ALLOWED[2:]]),
    "an editor admits": (
        "I11",
        [
            *(GENESIS, control(1, *BOB)),
            control(
                2,
                claim("bob", "MemberAdmit", member="cat", role="editor"),
                claim("bob", "FeedAdmit", feed="c", kind="data", identity="cat"),
            ),
            *(under(append("c", 0), 2), deliver("a", "c0")),
        ],
    ),
    "a demoted writer": (
        "I11",
        [
            *ALLOWED,
            control(2, claim("ann", "RoleChange", member="bob", role="reader")),
            under(append("b", 1), 2),
            deliver("a", "b1"),
        ],
    ),
    "a removed writer": (
        "I11",
        [
            *ALLOWED,
            control(2, claim("ann", "MemberRemove", member="bob")),
            under(append("b", 1), 2),
            deliver("a", "b1"),
        ],
    ),
    "a writer promotes itself": (
        "I11",
        [
            GENESIS,
            control(1, *READER),
            control(2, claim("bob", "RoleChange", member="bob", role="owner")),
            A_UNDER,
            under(append("b", 0), 2),
            deliver("a", "a0"),
            deliver("a", "b0"),
        ],
    ),
    "states differ in the end": (
        "I7",
        [*BOTH, state("a", "a0", "b0", admission="1"), state("b", "a0", "b0", says="t", admission="2"), QUIESCE],
    ),
    "one peer lacks a proof": (
        "I12",
        [
            *FORKED,
            {"kind": "fork", "peer": "a", "feed": "z", "seq": 1},
            deliver("a", "z0"),
            deliver("b", "z0"),
            QUIESCE,
        ],
    ),
    "a proof of no fork": (
        "I12",
        [*BOTH, *({"kind": "fork", "peer": each, "feed": "a", "seq": 0} for each in "ab"), QUIESCE],
    ),
    "a fork before all eyes and no proof": (
        "I12",
        [
            *(*FORKED, deliver("a", "z0"), deliver("a", "z1"), deliver("b", "z0"), deliver("b", "z1f")),
            *(exclude("a", "z1", "fork"), exclude("b", "z1f", "fork"), {**QUIESCE, "proofs": True}),
        ],
    ),
}


@pytest.mark.parametrize("name", AUTHORITY_BAD)
def test_unlawful_entries_and_disagreement_are_caught(name: str) -> None:
    invariant, events = AUTHORITY_BAD[name]
    assert check_events(events).counts[invariant] >= 1, check_events(events)


AUTHORITY_GOOD: dict[str, list[Event]] = {
    "an admitted editor": ALLOWED,
    "rights come with the past of a dependency": [
        *ALLOWED[:3],
        under(append("b", 0), 1),
        under(append("b", 1)),
        deliver("a", "b0"),
        deliver("a", "b1"),
    ],
    "what was written before a demotion": [
        *ALLOWED,
        control(2, claim("ann", "RoleChange", member="bob", role="reader")),
    ],
    "all hold the proof": [
        *(*FORKED, *({"kind": "fork", "peer": each, "feed": "z", "seq": 1} for each in "ab")),
        *(deliver("a", "z0"), deliver("b", "z0"), {**QUIESCE, "proofs": True}),
    ],
}


@pytest.mark.parametrize("name", AUTHORITY_GOOD)
def test_lawful_entries_raise_no_alarm(name: str) -> None:
    assert check_events(AUTHORITY_GOOD[name]).good, check_events(AUTHORITY_GOOD[name])


def test_the_report_says_how_entries_fared() -> None:
    report = check_events([A0, A1, deliver("a", "a0"), deliver("b", "a0"), deliver("a", "a1"), QUIESCE])
    assert (report.fates["stable"], report.fates["lost"]) == (1, 1)
    assert "I2: 1" in str(report)


def test_the_checker_shares_no_code_with_the_product() -> None:
    """It must not be blind where the product is."""
    modules = (checker, history_authority, history_epochs, history_facts, history_conduct, history_liveness, verdict)
    for module in modules:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        imported = [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
        allowed = {f"echostore.testing.{each.__name__.rpartition('.')[2]}" for each in modules}
        assert all(not name.startswith("echostore") or name in allowed for name in imported)


def test_a_file_is_judged_from_the_command_line(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps(event) + "\n" for event in BOTH))
    bad.write_text("".join(json.dumps(event) + "\n" for event in [*BOTH, deliver("a", "a0")]) + "no json\n")
    report = check_file(bad)
    assert (report.counts["I4"], report.counts["H"]) == (1, 1)
    command = [sys.executable, "-m", "echostore.testing.checker"]
    assert subprocess.run([*command, good], check=False, capture_output=True).returncode == 0
    assert subprocess.run([*command, bad], check=False, capture_output=True).returncode == 6


def test_a_hundred_thousand_events_take_a_tenth_of_a_minute() -> None:
    """The promise is 10^6 events in 60 s; a tenth of it is measured here."""
    party = Party(1, peers=5, steps=30_000)
    start = time.process_time()
    report = check_events(party.events)
    assert report.good, report
    assert len(party.events) > 50_000
    assert time.process_time() - start < 6 * len(party.events) / 100_000
