"""Real peers in the simulated world: real stores, real keys, real snapshots, in folders of their own.

    with PeerNodes(folder, seed=7) as make:
        World(seed=7, peers=3, make=make).chaos(10).revive().settle()

The first node founds the party and admits the others; from then on everything goes through the simulated network.
Keys come from the seed while the nodes live, so that a run can be repeated. A crash drops the peer without closing
it, as a killed process does: the operating system frees the lock, and nothing else is tidied up.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import echostore
from echostore.kernel.errors import Refused
from echostore.kernel.ids import FeedKey, PartyKey, feed_id
from echostore.kernel.order import DATA, Envelope
from echostore.kernel.sync.port import SyncPort
from echostore.kernel.timeframe import link_prefix
from echostore.peer.anchors import Anchor
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.messages import decode_envelope
from echostore.wire.signing import SEED_BYTES, SigningKey

Record = Callable[[dict[str, Any]], None]


class PeerNodes:
    """Makes the nodes of one party; a `make` for `World`. Close it to close the peers and to forget the seeded keys."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._nodes: list[PeerNode] = []
        self._keys = seeded_keys(self._chance)
        self._time_ms = 0

    def __call__(self, name: str, record: Record) -> "PeerNode":
        peer = self._open(name)
        if not self._nodes:
            key = peer.create_party("Simulated").key
        else:
            founder = self._nodes[0].party
            key = founder.key
            peer.enter(founder.members.admit(peer.request_join(key), role="editor"))
            founder.flush()
        node = PeerNode(name, record, peer, key, lambda: self._open(name))
        self._nodes.append(node)
        return node

    def _open(self, name: str) -> Peer:
        return echostore.open(self._folder / name, name=name, background=False, now_ms=self._now_ms)

    def _now_ms(self) -> int:
        """A clock that only counts: wall time is display only, and a run must not depend on it."""
        self._time_ms += 1
        return self._time_ms

    def __enter__(self) -> Self:
        self._keys.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keys.__exit__(kind, error, trace)
        for node in self._nodes:
            node.close()


@contextmanager
def seeded_keys(chance: random.Random) -> Iterator[None]:
    """New keys come from a seed while this lasts, so that a run can be repeated."""
    generate = SigningKey.generate

    def seeded() -> SigningKey:
        return SigningKey.from_seed(chance.randbytes(SEED_BYTES))

    SigningKey.generate = staticmethod(seeded)  # type: ignore[method-assign]  # undone below
    try:
        yield
    finally:
        SigningKey.generate = staticmethod(generate)  # type: ignore[method-assign]  # as it was


class PeerNode:
    """One real peer as the world sees it. What it does is written down for the checker, seen from a stream."""

    def __init__(self, name: str, record: Record, peer: Peer, key: PartyKey, reopen: Callable[[], Peer]) -> None:
        self.name = name
        self.up = True
        self._record = record
        self._peer = peer
        self._key = key
        self._reopen = reopen
        self._recorded = 0
        self._position = 0
        self._anchor: Anchor | None = None

    @property
    def party(self) -> Party:
        return self._peer.party(self._key)

    def port(self) -> SyncPort:
        return self._peer.sync_port(self._key)

    def write(self, text: str) -> None:
        try:
            self.party.create("property-set", type="note", text=text)
        except Refused as error:
            # A device that has not heard of its own admission yet.
            self._record({"kind": "info", "peer": self.name, "what": str(error)})

    def flush(self) -> None:
        self.party.flush()
        self._observe()

    def state(self) -> tuple[dict[str, tuple[int, str]], str]:
        self._observe()
        party = self.party
        timeframe = {
            feed.hex(): (at.seq, link_prefix(at.link).hex()) for feed, at in sorted(party.timeframe.entries.items())
        }
        return timeframe, party.snapshot().cid

    def crash(self) -> None:
        self.up = False
        self._observe_own()
        self._record({"kind": "crash", "peer": self.name})
        # The end of a process frees its lock; everything else stays as it is on disk.
        lock = self._peer._file_lock
        assert lock is not None, "a node is open for writing"
        lock.release()

    def restart(self) -> None:
        self._peer = self._reopen()
        self.up = True
        own = self._own_feed()
        held: dict[str, list[Any]] = {}
        if own is not None:
            feed = self.party.runtime.feeds.feed(own)
            if feed.length:
                held = {feed_id(own).hex(): [feed.length, link_prefix(feed.last_link).hex()]}
        self._record({"kind": "boot", "peer": self.name, "held": held})

    def close(self) -> None:
        if self.up:
            self._peer.close()

    # What is written down

    def _own_feed(self) -> FeedKey | None:
        own = self.party.runtime.data
        return own.cursor.key if own else None

    def _observe(self) -> None:
        """Write down what was appended and delivered since the last look."""
        self._observe_own()
        stream = self.party.stream(after=self._anchor)
        for delivered in stream:
            event = {"kind": "deliver", "peer": self.name, "feed": delivered.feed.hex(), "seq": delivered.seq}
            self._record({**event, "hash": link_prefix(delivered.link).hex(), "position": self._position})
            self._position += 1
        self._anchor = stream.anchor()

    def _observe_own(self) -> None:
        own = self._own_feed()
        if own is None:
            return
        runtime = self.party.runtime
        for block in runtime.feeds.read(own, self._recorded):
            envelope = decode_envelope(block.payload, DATA)
            assert isinstance(envelope, Envelope), f"{self.name} wrote a message that can't be read: {envelope}"
            cursors = runtime.processor.orderer.cursors
            deps = [
                [dep.feed.hex(), dep.seq, dep.link_prefix.hex()]
                for dep in envelope.dependencies
                if dep.feed in cursors and cursors[dep.feed].kind == DATA
            ]
            event = {"kind": "append", "peer": self.name, "feed": feed_id(own).hex(), "seq": block.seq}
            self._record({**event, "hash": link_prefix(block.link).hex(), "deps": deps, "durable": True})
            self._recorded = block.seq + 1
