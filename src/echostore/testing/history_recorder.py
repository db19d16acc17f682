"""Writes down what a real peer does, while it does it, for the checker of histories (docs/internals/histories.md).

    record_histories(path, "ann")       from here on every party that this process opens is written down

One file per peer, one line per event, each written by one call before anything else happens: what was told outside
stands in the file even if the process is killed next. A peer that comes back goes on with its file: it first writes down
what it had made durable and not noted any more, then that it crashed, then what it starts with.

    append, control     own blocks, once they are durable
    deliver             messages as they enter the state, in that order
    exclude, fork       whenever a snapshot is taken: what left the state meanwhile, and the forks that are known
    state               whenever a snapshot is taken, at the same moment
"""

import json
import os
import time
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from echostore.kernel.ids import FeedId, FeedKey, Link, feed_id
from echostore.kernel.order import CONTROL, DATA, Envelope
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import link_prefix
from echostore.peer.delivered import Delivered
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.snapshots import Snapshot
from echostore.store.feed_store import HeldFeed
from echostore.wire.claims import decode_claim
from echostore.wire.messages import decode_envelope


def record_histories(path: Path, name: str) -> None:
    """Write down the first party that a peer of this process opens. For a process that does nothing else."""
    recorders: dict[bytes, HistoryRecorder] = {}
    keep, snapshot = Peer._keep, Party.snapshot

    def keep_and_record(peer: Peer, party: Party) -> Party:
        kept = keep(peer, party)
        if not recorders:
            recorders[party.key] = HistoryRecorder(path, name, party)
        return kept

    def snapshot_and_record(party: Party) -> Snapshot:
        with party.lock:
            taken = snapshot(party)
            if party.key in recorders:
                recorders[party.key].state(taken)
            return taken

    Peer._keep = keep_and_record  # type: ignore[method-assign, assignment]  # the one place that all parties pass
    Party.snapshot = snapshot_and_record  # type: ignore[method-assign, assignment]  # the state and its line at once


class HistoryRecorder:
    """The file of one party of one peer."""

    def __init__(self, path: Path, name: str, party: Party) -> None:
        self._name, self._party = name, party
        before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._noted: dict[str, int] = {}
        """How many of an own feed's blocks are in the file."""
        self._got: dict[FeedId, list[str]] = {}
        """What the file says that was delivered in this life."""
        self._forks: set[tuple[str, int]] = set()
        for event in before:
            if event["kind"] in ("append", "control"):
                self._noted[event["feed"]] = event["seq"] + 1
        with party.lock:
            runtime = party.runtime
            runtime.on_durable.append(lambda feed, length: self._own_grew())
            runtime.processor.streaming = True
            runtime.processor.listeners.append(self._delivered)
            self._own_appends()
            if before:
                self._write("crash")
                self._write("boot", held=self._held(), timeframe={})
            self._follow()

    def state(self, taken: Snapshot) -> None:
        """The state at this moment, after all that led to it."""
        self._follow()
        for key, seq in sorted(self._party.runtime.processor.membership.machine.forks.items()):
            fork = (feed_id(key).hex(), seq)
            if fork not in self._forks:
                self._forks.add(fork)
                self._write("fork", feed=fork[0], seq=seq)
        timeframe = {feed.hex(): [len(got) - 1, got[-1]] for feed, got in self._got.items() if got}
        base = taken.root.base_epoch.hex() if taken.root.base_epoch else ""
        admission = taken.root.admission_digest.hex()
        self._write("state", timeframe=timeframe, admission=admission, base=base, state_hash=taken.cid)

    # inside

    def _own_grew(self) -> None:
        """Perhaps in the middle of a run: of others' messages the listener will hear."""
        self._own_appends()
        self._follow_new({feed_id(held.key): held.key for held in self._own() if held.kind == DATA})

    def _own_appends(self) -> None:
        """Write down own blocks that are durable and were not noted yet."""
        for held in self._own():
            feed = feed_id(held.key).hex()
            for block in self._party.runtime.feeds.read(held.key, self._noted.get(feed, 0)):
                self._append(feed, held.kind, block.seq, block.link, block.payload)
                self._noted[feed] = block.seq + 1

    def _own(self) -> list[HeldFeed]:
        return [held for held in self._party.runtime.feeds.feeds() if held.own]

    def _append(self, feed: str, kind: str, seq: int, link: Link, payload: bytes) -> None:
        envelope = decode_envelope(payload, kind)
        assert isinstance(envelope, Envelope), f"{self._name} wrote a message that can't be read: {envelope}"
        cursors = self._party.runtime.processor.orderer.cursors
        data: list[list[Any]] = []
        control: list[list[Any]] = []
        for dep in envelope.dependencies:
            of_control = dep.feed in cursors and cursors[dep.feed].kind == CONTROL
            (control if of_control else data).append([dep.feed.hex(), dep.seq, dep.link_prefix.hex()])
        place = {"feed": feed, "seq": seq, "hash": link_prefix(link).hex()}
        if kind == DATA:
            self._write("append", **place, deps=data, under=control, durable=True)
        else:
            claims = [_plain(decode_claim(each.claim)) for each in envelope.body.credentials]
            self._write("control", **place, deps=control, claims=claims)

    def _delivered(self, changed: object, delivered: list[Delivered]) -> None:
        own = {feed_id(held.key) for held in self._own()}
        for each in delivered:
            if each.feed not in own:  # own ones count once they are durable
                self._deliver(each.feed, each.seq, each.link)

    def _deliver(self, feed: FeedId, seq: int, link: Link) -> None:
        got = self._got.setdefault(feed, [])
        got.append(link_prefix(link).hex())
        self._write("deliver", feed=feed.hex(), seq=seq, hash=got[-1])

    def _follow(self) -> None:
        """Bring the file up to the state: what came before this life began, and what left the state since."""
        runtime = self._party.runtime
        admission, cursors = runtime.processor.admission, runtime.processor.orderer.cursors
        for feed, cursor in sorted(cursors.items()):
            if cursor.kind != DATA or not runtime.feeds.has_feed(cursor.key):
                continue
            got = self._got.setdefault(feed, [])
            end = min(cursor.length, runtime.feeds.length(cursor.key))
            out = next((seq for seq in range(min(end, len(got))) if admission.why_excluded(feed, seq)), None)
            if out is not None:
                reason = "fork" if admission.why_excluded(feed, out) is Reason.FORK else "cut"
                self._write("exclude", hash=got[out], reason=reason)
                del got[out:]
        self._follow_new({feed: cursor.key for feed, cursor in cursors.items() if cursor.kind == DATA})

    def _follow_new(self, feeds: dict[FeedId, FeedKey]) -> None:
        """Deliveries that nobody told of, causes before effects: by depth, as the canonical order has them."""
        runtime = self._party.runtime
        fresh = []
        for feed, key in feeds.items():
            got = self._got.setdefault(feed, [])
            cursor = runtime.processor.orderer.cursors[feed]
            end = min(cursor.length, runtime.feeds.length(key)) if runtime.feeds.has_feed(key) else 0
            for block in runtime.feeds.read(key, len(got), end) if end > len(got) else ():
                if runtime.processor.admission.why_excluded(feed, block.seq) is not None:
                    break
                envelope = decode_envelope(block.payload, DATA)
                assert isinstance(envelope, Envelope), (feed.hex(), block.seq)
                fresh.append((envelope.depth, feed, block.seq, block.link))
        for _, feed, seq, link in sorted(fresh, key=lambda each: each[:3]):
            self._deliver(feed, seq, link)

    def _held(self) -> dict[str, list[Any]]:
        own = (held for held in self._own() if held.kind == DATA and held.length)
        return {feed_id(held.key).hex(): [held.length, link_prefix(held.last_link).hex()] for held in own}

    def _write(self, kind: str, **more: Any) -> None:
        event = {"kind": kind, "peer": self._name, "time": round(time.monotonic(), 6), **more}
        line = json.dumps(event).encode() + b"\n"
        assert os.write(self._file, line) == len(line), "a line is written whole or the run is void"


def _plain(value: Any) -> Any:
    """A claim as JSON: records as maps with their kind, keys as hex."""
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__, **{each.name: _plain(getattr(value, each.name)) for each in fields(value)}}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
