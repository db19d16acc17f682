"""Blobs between peers: serves what is asked for, fetches what is wanted. Every blob is checked before it touches disk.

Serving is bounded like replication: what a link asked for waits in a short queue and is sent while the link takes it. A
device that has been given more than its quota stands behind those that have had less (`kernel.sync.turns`).
A peer that sends one blob that is not what its CID says is disconnected, and nothing more is asked of that device.

Lives in the node's loop.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, DeviceKey, PartyKey
from echostore.kernel.sync.turns import Turns
from echostore.mesh.connection import Ended
from echostore.mesh.node import Link, Node
from echostore.mesh.policy import Flow
from echostore.mesh.want_list import Ask, WantList
from echostore.wire.cids import PROTOBUF, cid_codec, cid_text, matches
from echostore.wire.mesh import WANTS_MAX, Blob, Blobs, Channel, Have, MeshFrame, Want

log = logging.getLogger("echostore.mesh")

QUEUE_MAX: Final = 4 * WANTS_MAX
"""Blobs that one link may have asked for and not got yet."""
WINDOW: Final = 8192
"""Blobs that are looked for at a time: planning among several sources costs what is in the window."""
LOOK_BLOBS: Final = 1024
"""Blobs that are looked up here at a time, and of one turn of a link."""
TURN_BYTES: Final = 256 * 1024
"""What one link is given before others have their turn: pages of snapshots are small, and a turn costs more than one."""
ALONE_BYTES: Final = 64 * 1024
"""A blob of this size gains nothing by travelling with others."""
STORE_BLOBS: Final = 8192
STORE_BYTES: Final = 8 * 1024 * 1024
"""Blobs that are kept in one transaction while more are coming: each costs a sync of the disk."""

POISONERS_MAX: Final = 1_024

Follow = Callable[[Cid, bytes], Iterable[Cid]]
"""What a blob leads to: further blobs to fetch."""


class BlobPeer(Protocol):
    """What the exchange needs of a peer."""

    def blobs_here(self, party: PartyKey, cids: Sequence[Cid], bytes_max: int) -> dict[Cid, bytes]: ...
    def missing_blobs(self, party: PartyKey, cids: Sequence[Cid]) -> list[Cid]: ...
    def keep_blobs(self, party: PartyKey, blobs: dict[Cid, bytes]) -> None: ...
    def flow(self, device: DeviceKey) -> Flow: ...


class Unavailable(Exception):
    """Nobody who is connected has these blobs."""

    def __init__(self, cids: set[Cid]) -> None:
        super().__init__(f"{len(cids)} blobs that nobody has who is connected")
        self.cids = cids


@dataclass(slots=True, eq=False)
class _Waiter:
    """One call of `fetch`."""

    follow: Follow | None
    waiting: list[Cid]
    """Not looked for yet; the next one last."""
    wanted: set[Cid] = field(default_factory=set)
    came: list[tuple[Cid, bytes]] = field(default_factory=list)
    """Arrived, and not followed yet."""
    done: int = 0
    strangers: bool = False
    """Whether also devices are asked that are not known as members."""

    @property
    def left(self) -> int:
        return len(self.waiting) + len(self.wanted) + len(self.came)


@dataclass(slots=True)
class _Fetching:
    """The blobs that are wanted of one party, and who waits for them."""

    wants: WantList[Link] = field(default_factory=WantList)
    arrived: dict[Cid, bytes] = field(default_factory=dict)
    arrived_bytes: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: list[_Waiter] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.arrived) >= STORE_BLOBS or self.arrived_bytes >= STORE_BYTES

    @property
    def strangers(self) -> bool:
        return any(waiter.strangers for waiter in self.waiters)


@dataclass(frozen=True, slots=True)
class _Order:
    """A blob that a link asked for."""

    channel: Channel
    cid: Cid
    packed: bool


class BlobExchange:
    """Handles the blob frames of a node."""

    def __init__(self, node: Node, peer: BlobPeer) -> None:
        self._node, self._peer = node, peer
        self._fetching: dict[PartyKey, _Fetching] = {}
        self._queues: dict[Link, deque[_Order]] = {}
        self._serving: dict[Link, asyncio.Task[None]] = {}
        self._turns: Turns[None] = Turns()
        self.poisoners: dict[DeviceKey, None] = {}
        """Devices that gave a blob which is not what its CID says; the oldest are forgotten."""
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
        follow: Follow | None = None,
        strangers: bool = False,
    ) -> int:
        """Get blobs and keep them; returns how many came. Unavailable when nothing comes any more.

        What is here already is not asked for. With `follow` also what they lead to, and so on: nodes of a tree while their siblings are under way. It is
        called once for each node that is here or arrives, in no certain order. With `strangers` also of those who are not
        known as members: whoever knows no member yet has nobody else to ask.
        """
        waiter = _Waiter(follow, list(dict.fromkeys(cids)), strangers=strangers)
        waiter.waiting.reverse()
        state = self._fetching.setdefault(party, _Fetching())
        state.waiters.append(waiter)
        loop = asyncio.get_running_loop()
        told, moved_at = 0, loop.time()
        try:
            while waiter.left:
                while waiter.waiting and len(waiter.wanted) < WINDOW:
                    self._look(party, state, waiter)
                    await asyncio.sleep(0)  # others have their turn
                self._plan(party, state)
                if waiter.wanted and not waiter.came:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(state.moved.wait(), 0.5)
                    state.moved.clear()
                self._follow(waiter)
                if state.full:
                    self._store(party, state)
                if waiter.done > told:
                    told, moved_at = waiter.done, loop.time()
                    progress(told, told + waiter.left)
                elif waiter.wanted and loop.time() - moved_at > patience_s:
                    raise Unavailable(waiter.wanted | set(waiter.waiting))
            return waiter.done
        finally:
            self._store(party, state)
            state.waiters.remove(waiter)
            if not state.waiters:
                self._fetching.pop(party, None)

    def _look(self, party: PartyKey, state: _Fetching, waiter: _Waiter) -> None:
        """Want the next few, unless they are here."""
        some = [waiter.waiting.pop() for _ in range(min(LOOK_BLOBS, len(waiter.waiting)))]
        absent = dict.fromkeys(self._peer.missing_blobs(party, some))
        for cid in absent:
            if cid in state.arrived:
                waiter.came.append((cid, state.arrived[cid]))
            else:
                waiter.wanted.add(cid)
        state.wants.add(waiter.wanted.intersection(absent))
        if waiter.follow is not None:
            nodes = [cid for cid in some if cid not in absent and cid_codec(cid) == PROTOBUF]
            while nodes:
                found = self._peer.blobs_here(party, nodes, STORE_BYTES)
                if not found:
                    raise Corrupt(
                        f"The blob {cid_text(nodes[0])} is damaged here.", next_step="Delete it; it is fetched again."
                    )
                for cid, data in found.items():
                    waiter.waiting.extend(waiter.follow(cid, data))
                nodes = [cid for cid in nodes if cid not in found]

    def _follow(self, waiter: _Waiter) -> None:
        came, waiter.came = waiter.came, []
        waiter.done += len(came)
        if waiter.follow is not None:
            for cid, data in came:
                waiter.waiting.extend(waiter.follow(cid, data))

    def _store(self, party: PartyKey, state: _Fetching) -> None:
        arrived, state.arrived, state.arrived_bytes = state.arrived, {}, 0
        if arrived:
            self._peer.keep_blobs(party, arrived)

    def _plan(self, party: PartyKey, state: _Fetching) -> None:
        for link in self._node.links.values():
            allowed = self._peer.flow(link.device) is not Flow.UP and link.device not in self.poisoners
            if allowed and link.channel_for(party, strangers=state.strangers) is not None:
                state.wants.source(link)
        if not state.wants.idle():
            return
        for step in state.wants.plan(asyncio.get_running_loop().time()):
            channel = step.source.channel_for(party, strangers=state.strangers)
            if channel is None:
                state.wants.lost(step.source)
                continue
            for start in range(0, len(step.cids), WANTS_MAX):
                cids = step.cids[start : start + WANTS_MAX]
                ask = isinstance(step, Ask)
                step.source.connection.send(Want(channel, cids, only_ask=ask, packed=not ask))

    # frames

    def receive(self, link: Link, frame: MeshFrame) -> None:
        assert isinstance(frame, Want | Have | Blob | Blobs)
        if isinstance(frame, Want):
            party, _ = link.given_to(frame.channel, ())
        else:
            party = link.party_of(frame.channel, strangers=True)
        if party is None:
            return  # of a party that is not replicated with this device, or no longer
        if isinstance(frame, Want):
            self._asked(link, party, frame)
        elif isinstance(frame, Have):
            state = self._fetching.get(party)
            if state is not None:
                state.wants.heard(link, frame.cids, frame.missing, asyncio.get_running_loop().time())
                state.moved.set()
        elif isinstance(frame, Blob):
            self._got(link, party, (frame.cid,), (frame.data,))
        else:
            self._got(link, party, frame.cids, frame.data)

    def closed(self, link: Link) -> None:
        self._queues.pop(link, None)
        task = self._serving.pop(link, None)
        if task is not None:
            task.cancel()
        for state in self._fetching.values():
            state.wants.lost(link)
            state.moved.set()

    def _got(self, link: Link, party: PartyKey, cids: Sequence[Cid], several: Sequence[bytes]) -> None:
        """Each blob is checked before anybody hears of it; those before a bad one are what they say."""
        state = self._fetching.get(party)
        for cid, data in zip(cids, several, strict=True):
            if not matches(cid, data):
                self._poisoned(link.device)
                self._node.counters.scores["poison"] += 1
                link.connection.end(Ended("poison", "a blob that is not what its CID says", theirs=True))
                return
            if state is None or not state.wants.arrived(link, cid, len(data)):
                continue  # late, from a second source
            link.useful()
            self.given[link.device] = self.given.get(link.device, 0) + 1
            state.arrived[cid] = data
            state.arrived_bytes += len(data)
            for waiter in state.waiters:
                if cid in waiter.wanted:
                    waiter.wanted.discard(cid)
                    waiter.came.append((cid, data))
        if state is not None:
            state.moved.set()

    def _poisoned(self, device: DeviceKey) -> None:
        self.poisoners[device] = None
        if len(self.poisoners) > POISONERS_MAX:
            del self.poisoners[next(iter(self.poisoners))]

    # serving

    def _asked(self, link: Link, party: PartyKey, want: Want) -> None:
        if self._peer.flow(link.device) is Flow.DOWN:
            link.connection.send(Have(want.channel, (), want.cids))
            return
        if want.only_ask:
            _, allowed = link.given_to(want.channel, want.cids)
            absent = set(self._peer.missing_blobs(party, allowed))
            here = dict.fromkeys(cid for cid in allowed if cid not in absent)
            missing = tuple(cid for cid in want.cids if cid not in here)
            link.connection.send(Have(want.channel, tuple(here), missing))
            return
        queue = self._queues.setdefault(link, deque())
        if len(queue) + len(want.cids) > QUEUE_MAX:
            link.connection.end(Ended("flood", f"more than {QUEUE_MAX} blobs asked for", theirs=True))
            return
        queue.extend(_Order(want.channel, cid, want.packed) for cid in want.cids)
        if queue and link not in self._serving:
            self._serving[link] = asyncio.create_task(self._serve(link))

    async def _serve(self, link: Link) -> None:
        """Send what is queued while the link takes it, and let others have their turn."""
        try:
            queue = self._queues[link]
            while queue and link.connection.ended is None:
                if link.connection.writable:
                    if not self._stands_behind(link):
                        self._give(link, queue)
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(0.01)
        finally:
            self._serving.pop(link, None)

    def _stands_behind(self, link: Link) -> bool:
        """Whether it is over its quota, and somebody waits who has more left and takes what is sent."""
        now = asyncio.get_running_loop().time()
        mine = self._turns.of_device(link.device, now)
        if mine is None or not mine.over:
            return False
        for other, queue in self._queues.items():
            left = self._turns.of_device(other.device, now)
            takes = queue and other.connection.writable and other.connection.ended is None
            if takes and (left is None or left.left > mine.left):
                return True
        return False

    def _give(self, link: Link, queue: "deque[_Order]") -> None:
        """One turn: the next blobs of one party."""
        channel, packed = queue[0].channel, queue[0].packed
        some: list[Cid] = []
        while queue and len(some) < LOOK_BLOBS and (queue[0].channel, queue[0].packed) == (channel, packed):
            some.append(queue.popleft().cid)
        party, allowed = link.given_to(channel, some)
        found = self._peer.blobs_here(party, allowed, TURN_BYTES) if party is not None and allowed else {}
        left = [cid for cid in dict.fromkeys(some) if cid not in found]
        if sum(map(len, found.values())) >= TURN_BYTES:
            queue.extendleft(_Order(channel, cid, packed) for cid in reversed(left))
        elif left:
            link.connection.send(Have(channel, (), tuple(left)))
        now, size_bytes = asyncio.get_running_loop().time(), sum(map(len, found.values()))
        self._turns.quotas = self._node.intake.turns.quotas
        self._turns.drawn(link.device, len(found), size_bytes, now)
        together = {cid: data for cid, data in found.items() if packed and len(data) < ALONE_BYTES}
        if together:
            link.connection.send(Blobs(channel, tuple(together), tuple(together.values())))
        for cid in found.keys() - together.keys():
            link.connection.send(Blob(channel, cid, found[cid]))
