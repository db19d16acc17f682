"""Blobs between peers: serves what is asked for, fetches what is wanted. Every blob is checked before it touches disk.

Serving is bounded like replication: what a link asked for waits in a short queue and is sent while the link takes it.
A peer that sends one blob that is not what its CID says is disconnected, and nothing more is asked of that device.

Lives in the node's loop.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from echostore.kernel.ids import Cid, DeviceKey, PartyKey
from echostore.mesh.connection import Ended
from echostore.mesh.node import Link, Node
from echostore.mesh.policy import Flow
from echostore.mesh.want_list import Ask, WantList
from echostore.wire.cids import matches
from echostore.wire.mesh import WANTS_MAX, Blob, Channel, Have, MeshFrame, Want

log = logging.getLogger("echostore.mesh")

QUEUE_MAX: Final = 4 * WANTS_MAX
"""Blobs that one link may have asked for and not got yet."""
WINDOW: Final = 1024
"""Blobs that are looked for at a time: planning costs what is in the window, not what is wanted in all."""
TURN_BYTES: Final = 64 * 1024
"""What one link is given before others have their turn: pages of snapshots are small, and a turn costs more than one."""
STORE_BLOBS: Final = 1024
STORE_BYTES: Final = 8 * 1024 * 1024
"""Blobs that are kept in one transaction while more are coming: each costs a sync of the disk."""


class BlobPeer(Protocol):
    """What the exchange needs of a peer."""

    def blob(self, party: PartyKey, cid: Cid) -> bytes | None: ...
    def has_blob(self, party: PartyKey, cid: Cid) -> bool: ...
    def keep_blobs(self, party: PartyKey, blobs: dict[Cid, bytes]) -> None: ...
    def flow(self, device: DeviceKey) -> Flow: ...


class Unavailable(Exception):
    """Nobody who is connected has these blobs."""

    def __init__(self, cids: set[Cid]) -> None:
        super().__init__(f"{len(cids)} blobs that nobody has who is connected")
        self.cids = cids


@dataclass(slots=True)
class _Fetching:
    """The blobs that are wanted of one party, and who waits for them."""

    wants: WantList[Link] = field(default_factory=WantList)
    arrived: dict[Cid, bytes] = field(default_factory=dict)
    arrived_bytes: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0

    @property
    def full(self) -> bool:
        return len(self.arrived) >= STORE_BLOBS or self.arrived_bytes >= STORE_BYTES


class BlobExchange:
    """Handles the blob frames of a node."""

    def __init__(self, node: Node, peer: BlobPeer) -> None:
        self._node, self._peer = node, peer
        self._fetching: dict[PartyKey, _Fetching] = {}
        self._queues: dict[Link, deque[tuple[Channel, Cid]]] = {}
        self._serving: dict[Link, asyncio.Task[None]] = {}
        self.poisoners: set[DeviceKey] = set()
        self.given: dict[DeviceKey, int] = {}
        """Blobs that each device has given since the start."""

    # fetching

    async def fetch(
        self,
        party: PartyKey,
        cids: Iterable[Cid],
        *,
        patience_s: float = 30.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Get blobs and keep them. What is here already is not asked for; Unavailable when nothing comes any more."""
        waiting = [cid for cid in dict.fromkeys(cids) if not self._peer.has_blob(party, cid)]
        total = left = len(waiting)
        if not waiting:
            return
        waiting.reverse()
        looked_for: set[Cid] = set()
        state = self._fetching.setdefault(party, _Fetching())
        state.users += 1
        loop = asyncio.get_running_loop()
        moved_at = loop.time()
        try:
            while left:
                while waiting and len(looked_for) < WINDOW:
                    looked_for.add(waiting.pop())
                state.wants.add(looked_for - state.arrived.keys())
                self._plan(party, state)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(state.moved.wait(), 0.5)
                state.moved.clear()
                if state.full or not looked_for & state.wants.wanted:
                    self._store(party, state)
                looked_for &= state.wants.wanted | state.arrived.keys()
                if len(waiting) + len(looked_for) < left:
                    left, moved_at = len(waiting) + len(looked_for), loop.time()
                    progress(total - left, total)
                elif loop.time() - moved_at > patience_s:
                    raise Unavailable(looked_for | set(waiting))
        finally:
            self._store(party, state)
            state.users -= 1
            if not state.users:
                self._fetching.pop(party, None)

    def _store(self, party: PartyKey, state: _Fetching) -> None:
        arrived, state.arrived, state.arrived_bytes = state.arrived, {}, 0
        if arrived:
            self._peer.keep_blobs(party, arrived)

    def _plan(self, party: PartyKey, state: _Fetching) -> None:
        for link in self._node.links.values():
            allowed = self._peer.flow(link.device) is not Flow.UP and link.device not in self.poisoners
            if allowed and link.channel_for(party) is not None:
                state.wants.source(link)
        if not state.wants.idle():
            return
        for step in state.wants.plan(asyncio.get_running_loop().time()):
            channel = step.source.channel_for(party)
            if channel is None:
                state.wants.lost(step.source)
                continue
            for start in range(0, len(step.cids), WANTS_MAX):
                cids = step.cids[start : start + WANTS_MAX]
                step.source.connection.send(Want(channel, cids, only_ask=isinstance(step, Ask)))

    # frames

    def receive(self, link: Link, frame: MeshFrame) -> None:
        assert isinstance(frame, Want | Have | Blob)
        party = link.party_of(frame.channel)
        if party is None:
            return  # of a party that is not replicated with this device, or no longer
        if isinstance(frame, Want):
            self._asked(link, party, frame)
        elif isinstance(frame, Have):
            state = self._fetching.get(party)
            if state is not None:
                state.wants.heard(link, frame.cids, frame.missing, asyncio.get_running_loop().time())
                state.moved.set()
        else:
            self._got(link, party, frame)

    def closed(self, link: Link) -> None:
        self._queues.pop(link, None)
        task = self._serving.pop(link, None)
        if task is not None:
            task.cancel()
        for state in self._fetching.values():
            state.wants.lost(link)
            state.moved.set()

    def _got(self, link: Link, party: PartyKey, blob: Blob) -> None:
        if not matches(blob.cid, blob.data):
            self.poisoners.add(link.device)
            self._node.counters.scores["poison"] += 1
            link.connection.end(Ended("poison", "a blob that is not what its CID says", theirs=True))
            return
        state = self._fetching.get(party)
        if state is None or not state.wants.arrived(link, blob.cid):
            return  # late, from a second source
        self.given[link.device] = self.given.get(link.device, 0) + 1
        state.arrived[blob.cid] = blob.data
        state.arrived_bytes += len(blob.data)
        state.moved.set()

    # serving

    def _asked(self, link: Link, party: PartyKey, want: Want) -> None:
        if self._peer.flow(link.device) is Flow.DOWN:
            link.connection.send(Have(want.channel, (), want.cids))
            return
        here = tuple(cid for cid in want.cids if self._peer.has_blob(party, cid))
        missing = tuple(cid for cid in want.cids if cid not in set(here))
        if want.only_ask or missing:
            link.connection.send(Have(want.channel, here if want.only_ask else (), missing))
        if want.only_ask:
            return
        queue = self._queues.setdefault(link, deque())
        if len(queue) + len(here) > QUEUE_MAX:
            link.connection.end(Ended("flood", f"more than {QUEUE_MAX} blobs asked for", theirs=True))
            return
        queue.extend((want.channel, cid) for cid in here)
        if queue and link not in self._serving:
            self._serving[link] = asyncio.create_task(self._serve(link))

    async def _serve(self, link: Link) -> None:
        """Send what is queued while the link takes it, and let others have their turn."""
        try:
            queue = self._queues[link]
            while queue and link.connection.ended is None:
                if not link.connection.writable:
                    await asyncio.sleep(0.01)
                    continue
                sent = 0
                while queue and sent < TURN_BYTES and link.connection.writable:
                    sent += self._give(link, *queue.popleft())
                await asyncio.sleep(0)
        finally:
            self._serving.pop(link, None)

    def _give(self, link: Link, channel: Channel, cid: Cid) -> int:
        """Send one blob; returns its size."""
        party = link.party_of(channel)
        data = self._peer.blob(party, cid) if party is not None else None
        if data is None:
            link.connection.send(Have(channel, (), (cid,)))
            return 0
        link.connection.send(Blob(channel, cid, data))
        return len(data)
