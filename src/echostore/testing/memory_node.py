"""A small peer on dictionaries: what the simulator and the session tests run before and beside the real one.

It shares the product's links and nothing else: signatures are hashes that anybody could make, messages are JSON, and
delivery is a loop over all feeds. Its rules are those of the real peer in miniature:

    control feed   block 0 admits the feed itself and its data feed
    data feed      every block names the timeframe that its writer had processed; delivery is causal
    fork           two signed branches: both are kept, blocks from the fork on leave the state
    crash          memory is lost; the disk keeps what was flushed
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from echostore.kernel.feed import Head
from echostore.kernel.ids import NO_LINK, FeedKey, Link, PartyKey
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.frames import Blocks, FeedTip, Tip
from echostore.kernel.sync.port import Rejection
from echostore.wire import links

PARTY = PartyKey(hashlib.sha256(b"the simulated party").digest())


@dataclass(slots=True)
class Branch:
    """A chain of blocks with the heads that cover it."""

    payloads: list[bytes] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)

    @property
    def tip(self) -> Tip:
        return Tip(len(self.links), self.links[-1] if self.links else NO_LINK)

    def link_before(self, seq: int) -> Link:
        return self.links[seq - 1] if seq else NO_LINK

    def extend(self, payloads: Sequence[bytes], new_links: Sequence[Link], head: Head) -> None:
        self.payloads.extend(payloads)
        self.links.extend(new_links)
        self.heads.append(head)

    def cut_at(self, end: int) -> "Branch":
        return Branch(self.payloads[:end], self.links[:end], [head for head in self.heads if head.length <= end])


@dataclass(slots=True)
class StoredFeed:
    """A feed on disk: the branch in use first, others as evidence."""

    kind: str
    branches: list[Branch] = field(default_factory=lambda: [Branch()])

    @property
    def fork_seq(self) -> int | None:
        """The first seq at which two branches differ."""
        used = self.branches[0].links
        found = [_parting(used, other.links) for other in self.branches[1:]]
        return min(found, default=None)


def sign(feed: FeedKey, message: bytes) -> bytes:
    """Stands for a signature: as long as one, and bound to the feed and the message."""
    return hashlib.sha512(b"signed" + feed + message).digest()


def verify(feed: bytes, message: bytes, signature: bytes) -> bool:
    return sign(FeedKey(feed), message) == signature


def make_range(feed: FeedKey, start: int, previous: Link, payloads: Sequence[bytes]) -> tuple[list[Link], Head]:
    """Link and sign blocks as their writer would."""
    made = links.chain(feed, start, previous, payloads)
    end = start + len(payloads)
    return made, Head(end, made[-1], sign(feed, links.head_bytes(PARTY, feed, end, made[-1])))


def feed_key(name: str, kind: str) -> FeedKey:
    return FeedKey(hashlib.sha256(f"{name}/{kind}".encode()).digest())


class MemoryNode:
    """One simulated peer of the party. Implements `echostore.testing.world.Node` and is its own `SyncPort`."""

    def __init__(self, name: str, record: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self.name = name
        self.up = True
        self._record = record
        self._disk: dict[FeedKey, StoredFeed] = {}
        self._unflushed: list[bytes] = []
        self.control, self.data = feed_key(name, CONTROL), feed_key(name, DATA)
        self._start()
        self._disk[self.control] = StoredFeed(CONTROL)
        self._disk[self.data] = StoredFeed(DATA)
        self._append(self.control, [_json({"admit": [self.control.hex(), self.data.hex()]})])

    # What a client does

    def write(self, text: str) -> None:
        """Write one message; it is nobody's until it is flushed."""
        self._unflushed.append(text.encode())

    def flush(self) -> None:
        """Make what was written durable under one head, and apply it."""
        texts, self._unflushed = self._unflushed, []
        if texts:
            timeframe = {feed.hex(): length - 1 for feed, length in self.processed.items() if length}
            self._append(self.data, [_json({"deps": timeframe, "text": text.decode()}) for text in texts])

    def forge(self, key: FeedKey, texts: Sequence[str], *, at: int) -> None:
        """Replace the end of a feed on disk from block `at` on, as a clone of its writer would have written it.

        For a node that is down: a running one never forgets what it holds.
        """
        assert not self.up, "a running node never forgets what it holds"
        branch = self._disk[key].branches[0].cut_at(at)
        payloads = [_json({"deps": {}, "text": text}) for text in texts]
        branch.extend(payloads, *make_range(key, at, branch.link_before(at), payloads))
        self._disk[key].branches[0] = branch

    def length(self, key: FeedKey) -> int:
        return len(self._disk[key].branches[0].links)

    def state(self) -> tuple[dict[str, tuple[int, str]], str]:
        """The data timeframe with hashes, and the hash of the state: a function of the set of applied messages."""
        timeframe = {}
        for feed, length in sorted(self.processed.items()):
            if length:
                timeframe[feed.hex()] = (length - 1, self._disk[feed].branches[0].links[length - 1].hex())
        return timeframe, hashlib.sha256(_json(sorted(self._applied))).hexdigest()

    # What happens to it

    def crash(self) -> None:
        """The process ends here: listeners, limbo and what was not flushed are gone."""
        self.up = False
        self._unflushed = []
        self._record({"kind": "crash", "peer": self.name})

    def restart(self) -> None:
        self.up = True
        self._start()
        tip = self._disk[self.data].branches[0].tip
        held = {self.data.hex(): [tip.length, tip.link.hex()]} if tip.length else {}
        # What was applied is derived from the disk, so it starts from nothing and is delivered anew.
        self._record({"kind": "boot", "peer": self.name, "held": held, "timeframe": {}, "position": 0})
        for key, feed in self._disk.items():
            if feed.kind == CONTROL:
                self._admit(key)
        self._deliver()

    def _start(self) -> None:
        self.processed: dict[FeedKey, int] = {}
        self._applied: set[str] = set()
        self._position = 0
        self._known: dict[FeedKey, str] = {}
        self._listeners: dict[int, Callable[[FeedKey, int], None]] = {}
        self._next_listener = 0

    def on_written(self, callback: Callable[[FeedTip, Blocks], None]) -> Callable[[], None]:
        return lambda: None  # its writes are told by `on_grow` alone: that way has to work too

    def port(self) -> "MemoryNode":
        return self

    # SyncPort

    def feeds(self) -> Iterable[FeedTip]:
        return [tip for key in self._known for tip in self.tips(key)]

    def tips(self, key: FeedKey) -> Sequence[FeedTip]:
        kind = self._known.get(key)
        if kind is None:
            return []
        branches = self._disk[key].branches
        return [FeedTip(key, kind, branch.tip, number > 0) for number, branch in enumerate(branches)]

    def processed_length(self, key: FeedKey) -> int:
        return self.processed.get(key, 0)

    def fork_proofs(self) -> Iterable[bytes]:
        forked = [key for key, feed in self._disk.items() if len(feed.branches) > 1]
        return [hashlib.sha256(b"fork" + key).digest() for key in forked]

    def own(self, key: FeedKey) -> bool:
        return key in (self.control, self.data)

    def holds(self, key: FeedKey, length: int, link: Link) -> bool:
        return any(length <= len(branch.links) and branch.links[length - 1] == link for branch in self._branches(key))

    def read(
        self, key: FeedKey, start: int, blocks_max: int, bytes_max: int, toward: Link
    ) -> tuple[Sequence[bytes], Head] | None:
        branches = self._branches(key)
        branch = next((each for each in branches if toward in each.links), branches[0])
        best: Head | None = None
        for head in branch.heads:
            if head.length > start:
                size = sum(map(len, branch.payloads[start : head.length]))
                if best is not None and (head.length - start > blocks_max or size > bytes_max):
                    break
                best = head
        return None if best is None else (branch.payloads[start : best.length], best)

    def ingest(self, key: FeedKey, kind: str, start: int, payloads: Sequence[bytes], head: Head) -> int | Rejection:
        if key not in self._known:
            admitted = self._admits_itself(key, kind, start, payloads, head)
            if not admitted:
                return Rejection(Reason.UNADMITTED)
            self._disk.setdefault(key, StoredFeed(kind))
            self._known[key] = kind
        feed = self._disk[key]
        if start > max(len(branch.links) for branch in feed.branches):
            return Rejection(Reason.GAP)
        reason: Reason = Reason.BAD_LINK
        hooks: list[tuple[int, int, list[Link]]] = []
        for number, branch in enumerate(feed.branches):
            if start > len(branch.links):
                continue
            checked = links.check_range(PARTY, key, start, branch.link_before(start), payloads, head, verify)
            if isinstance(checked, Reason):
                reason = checked
            else:
                hooks.append((_parting(branch.links[start:], checked), -number, checked))
        if not hooks:
            return Rejection(reason, fatal=reason is Reason.BAD_SIGNATURE)
        # The branch that shares most with the range; of equals, the one in use.
        same, number, checked = max(hooks)
        return self._keep(key, feed, feed.branches[-number], start, same, payloads, checked, head)

    def on_grow(self, callback: Callable[[FeedKey, int], None]) -> Callable[[], None]:
        number = self._next_listener
        self._next_listener += 1
        self._listeners[number] = callback
        return lambda: self._listeners.pop(number, None) and None

    # Inside

    def _branches(self, key: FeedKey) -> list[Branch]:
        feed = self._disk.get(key)
        return feed.branches if feed else [Branch()]

    def _keep(
        self,
        key: FeedKey,
        feed: StoredFeed,
        branch: Branch,
        start: int,
        same: int,
        payloads: Sequence[bytes],
        new_links: Sequence[Link],
        head: Head,
    ) -> int | Rejection:
        """Keep a range of which `branch` has the first `same` blocks: it extends it, is known, or parts from it."""
        end = start + same
        forks = end < len(branch.links) and same < len(new_links)
        if forks:
            branch = branch.cut_at(end)
            feed.branches.append(branch)
        if same < len(new_links):
            branch.extend(payloads[same:], new_links[same:], head)
            if feed.kind == DATA:
                event = {"kind": "recv", "peer": self.name, "feed": key.hex(), "seq": head.length - 1}
                self._record({**event, "hash": head.link.hex()})
        evidence = branch is not feed.branches[0]
        if forks:
            self._exclude(key, feed)
        self._deliver()
        self._grown(key)
        return Rejection(Reason.FORK) if evidence else len(feed.branches[0].links)

    def _append(self, key: FeedKey, payloads: Sequence[bytes]) -> None:
        branch = self._disk[key].branches[0]
        start = len(branch.links)
        new_links, head = make_range(key, start, branch.link_before(start), payloads)
        branch.extend(payloads, new_links, head)
        for seq, (link, payload) in enumerate(zip(new_links, payloads, strict=True), start):
            deps = [[feed, at] for feed, at in json.loads(payload).get("deps", {}).items()]
            event = {"kind": "append", "peer": self.name, "feed": key.hex(), "seq": seq, "hash": link.hex()}
            if self._disk[key].kind == DATA:
                named = [[feed, at, self._link_hex(feed, at)] for feed, at in deps]
                self._record({**event, "deps": named, "durable": True})
        if self._disk[key].kind == CONTROL:
            self._admit(key)
        self._deliver()
        self._grown(key)

    def _link_hex(self, feed: str, seq: int) -> str:
        return self._disk[FeedKey(bytes.fromhex(feed))].branches[0].links[seq].hex()

    def _admits_itself(self, key: FeedKey, kind: str, start: int, payloads: Sequence[bytes], head: Head) -> bool:
        """Whether the first range of a control feed is signed and admits the feed itself."""
        if kind != CONTROL or start != 0:
            return False
        if isinstance(links.check_range(PARTY, key, 0, NO_LINK, payloads, head, verify), Reason):
            return False
        return key.hex() in json.loads(payloads[0]).get("admit", [])

    def _admit(self, control: FeedKey) -> None:
        """Take in what the control feed admits; both of its feeds are known from now on."""
        for payload in self._disk[control].branches[0].payloads:
            for name, kind in zip(json.loads(payload).get("admit", []), (CONTROL, DATA), strict=False):
                key = FeedKey(bytes.fromhex(name))
                self._disk.setdefault(key, StoredFeed(kind))
                self._known[key] = kind

    def _exclude(self, key: FeedKey, feed: StoredFeed) -> None:
        """A fork was found: blocks from it on leave the state."""
        seq = feed.fork_seq
        if seq is None or feed.kind != DATA:
            return
        self._applied -= {link.hex() for branch in feed.branches for link in branch.links[seq:]}
        self.processed[key] = min(self.processed.get(key, 0), seq)

    def _deliver(self) -> None:
        """Apply every message whose dependencies are applied, until nothing moves."""
        for key in [key for key, kind in self._known.items() if kind == CONTROL]:
            before = len(self._known)
            self._admit(key)
            if len(self._known) != before:
                for added in list(self._known)[before:]:
                    self._grown(added)
        moved = True
        while moved:
            moved = False
            for key in sorted(self._known):
                moved = self._deliver_feed(key) or moved

    def _deliver_feed(self, key: FeedKey) -> bool:
        feed = self._disk[key]
        if feed.kind != DATA:
            return False
        branch, at = feed.branches[0], self.processed.get(key, 0)
        end = len(branch.links) if feed.fork_seq is None else min(feed.fork_seq, len(branch.links))
        start = at
        while at < end and self._met(json.loads(branch.payloads[at])["deps"]):
            self._applied.add(branch.links[at].hex())
            self.processed[key] = at + 1
            event = {"kind": "deliver", "peer": self.name, "feed": key.hex(), "seq": at, "hash": branch.links[at].hex()}
            self._record({**event, "position": self._position})
            self._position += 1
            at += 1
        return at > start

    def _met(self, deps: dict[str, int]) -> bool:
        """A dependency is met when it is applied, or held on a forked feed: then it dangles."""
        for name, seq in deps.items():
            key = FeedKey(bytes.fromhex(name))
            feed = self._disk.get(key)
            if self.processed.get(key, 0) > seq:
                continue
            if feed is None or feed.fork_seq is None or all(len(branch.links) <= seq for branch in feed.branches):
                return False
        return True

    def _grown(self, key: FeedKey) -> None:
        if key in self._known:
            for callback in list(self._listeners.values()):
                callback(key, len(self._disk[key].branches[0].links))


def _parting(one: Sequence[Link], other: Sequence[Link]) -> int:
    """The first seq at which two chains differ, or the end of the shorter one."""
    for seq, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return seq
    return min(len(one), len(other))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
