"""The mesh node of one peer: listens, dials, keeps one connection per device, and replicates what both share.

    Node ── Link (one device) ── PartyChannel (one party) ── Endpoint ── Session
                 |
             Connection (Noise over TCP)

A party is named on a connection by a tag that only those who know its key can compute (`wire.mesh.party_tag`). A tag is
offered to devices that are members as far as this peer knows. A device that offers a tag and is not known as a member
may hand over control blocks, which can prove that it is one, and gets nothing until they do (`newcomer`).

A device that is not known here is a stranger: its connection has a slot, a budget and a time in which to share a party
(`connection_limits`), and what it causes is done in turns (`work_queue`).

Lives in one asyncio loop. The peer behind it (`MeshPeer`) is called in the loop's thread and may call back from any.
"""

import asyncio
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from echostore.kernel.feed import Head
from echostore.kernel.ids import Cid, DeviceKey, FeedKey, PartyKey
from echostore.kernel.sync.events import Progress
from echostore.kernel.sync.frames import FeedTip
from echostore.kernel.sync.port import Rejection, SyncPort
from echostore.mesh.connection import (
    BUFFER_BYTES,
    HANDSHAKE_S,
    METERED_READ_BYTES,
    READ_BYTES,
    Connection,
    ConnectionFailed,
    Ended,
    Handshaken,
    accept,
    open_connection,
    read_at_once,
)
from echostore.mesh.connection_limits import ConnectionLimiter, Eviction, Limits, WorkShare, address_group
from echostore.mesh.intake import Intake
from echostore.mesh.listener import Listener, listen
from echostore.mesh.party_channel import PartyChannel
from echostore.mesh.policy import Flow
from echostore.mesh.secure_channel import KnownKeys, Presented
from echostore.mesh.work_queue import Rank, WorkQueue
from echostore.wire.mesh import (
    Blob,
    Blobs,
    Channel,
    Have,
    Introduction,
    Invitation,
    Leave,
    MeshFrame,
    Offer,
    Parties,
    Reach,
    Roots,
    Seek,
    Sync,
    Want,
    channel_of,
    party_tag,
)
from echostore.wire.signing import SigningKey
from echostore.wire.sync import MalformedFrame

log = logging.getLogger("echostore.mesh")

OFFERS_MAX: Final = 10_000
STRANGER_OFFERS_MAX: Final = 512
"""Parties that a device has named and that are kept in mind for it: they may be opened here later."""
HANDSHAKE_SHARE, HANDSHAKE_BURST_S = 0.25, 0.25
STRANGER_SHARE, STRANGER_BURST_S = 0.1, 0.1
"""Of the loop's thread: what handshakes, and frames of strangers, may take while others wait."""
OPEN_S: Final = 0.0003
"""What a connection costs beside the steps of its handshake, about."""
SWEEP_MIN_S: Final = 0.5
"""Strangers whose time is over are looked for so often at the most."""
OTHER_FILES: Final = 128
"""Files of this process that are no connections of the node: stores, local programs, logs."""
HANDSHAKES_MIN: Final = 32
REDIAL_FIRST_S: Final = 0.5
REDIAL_LAST_S: Final = 60.0
REDIAL_CROWDED_S: Final = 1.0
REMOVED: Final = "removed"
"""Why a connection to a device ends that is no member of anything here any more."""
SHARES_NOTHING: Final = "shares-nothing"
"""Why a connection to a stranger ends that shared no party in time."""
OVER_BUDGET: Final = "over-budget"
CROWDED: Final = "crowded"
"""Others needed the room. Who shares a party is never told so."""
_ENDS: Final = {
    Eviction.TIME: Ended(SHARES_NOTHING, "no party is shared with this device"),
    Eviction.BYTES: Ended(OVER_BUDGET, "too many bytes of a device that shares no party", theirs=True),
    Eviction.FRAMES: Ended(OVER_BUDGET, "too many frames of a device that shares no party", theirs=True),
    Eviction.TOTAL_BYTES: Ended(OVER_BUDGET, "the most bytes of all devices that share no party", theirs=True),
}


class Standing(StrEnum):
    """What this peer knows of a device in a party."""

    MEMBER = "member"
    UNKNOWN = "unknown"
    """Perhaps admitted by someone whose control blocks have not come yet."""
    REMOVED = "removed"


class MeshPeer(Protocol):
    """What the mesh needs of a peer."""

    @property
    def device_key(self) -> SigningKey: ...
    def known_keys(self) -> KnownKeys:
        """What this peer may share with somebody of whom it knows an address and no device."""
        ...

    def recognise(self, presented: Presented) -> bytes | None:
        """The key by which this device shows itself to who dials it; None for a stranger."""
        ...

    def shared_parties(self) -> Iterable[PartyKey]:
        """Parties that replicate now: open, not paused."""
        ...

    def standing(self, party: PartyKey, device: DeviceKey) -> Standing: ...
    def own_device(self, device: DeviceKey) -> bool:
        """Whether it is another device of this peer's identity."""
        ...

    def knows(self, device: DeviceKey) -> bool:
        """Whether it is a member of a party that replicates, or another device of this peer's identity.

        Asked for every stranger, so it costs little, and may be a second old: `standing` decides.
        """
        ...

    def departure(self, party: PartyKey, device: DeviceKey) -> list[FeedTip]:
        """Control feeds, each up to a head, that prove that a device was removed; empty when they don't."""
        ...

    def departure_blobs(self, party: PartyKey) -> Sequence[Cid]:
        """Blobs that stand for control blocks which are here no more: a removed device may have these too."""
        ...

    def flow(self, device: DeviceKey) -> Flow: ...
    def sync_port(self, party: PartyKey) -> SyncPort: ...
    def ingest_newcomer(
        self, party: PartyKey, device: DeviceKey, key: FeedKey, start: int, payloads: Sequence[bytes], head: Head
    ) -> int | Rejection:
        """Blocks of a control feed that a device brings which is not known as a member."""
        ...

    def progressed(self, party: PartyKey, device: DeviceKey, progress: Progress) -> None: ...
    def compacted(self, party: PartyKey, evidence: Cid | None) -> None:
        """Another peer has blocks no more that are lacking here: an epoch stands for them.

        Of a control feed, `evidence` names why a control state may be believed to stand for them.
        """
        ...

    def connected(self, device: DeviceKey, address: str) -> None: ...
    def disconnected(self, device: DeviceKey, ended: Ended) -> None: ...


class FrameHandler(Protocol):
    """Takes the frames of one concern (invitations, identities, blobs) on all connections."""

    def receive(self, link: "Link", frame: MeshFrame) -> None: ...
    def closed(self, link: "Link") -> None: ...


@dataclass(slots=True)
class NodeCounters:
    """What has happened since the node was made; shown as metrics."""

    accepted: int = 0
    dialled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Connections that never stood, by reason."""
    ended: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Frames that made this peer fail, by the kind of failure: each is a defect here, whatever the other side sent."""
    scores: Counter[str] = field(default_factory=Counter)
    bytes_received: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    offers_forgotten: int = 0
    """Parties that a device has named beyond what is kept in mind for it."""


class _Meter:
    """What a stranger's connection reports to: see `mesh.connection.Meter`."""

    def __init__(self, link: "Link") -> None:
        self._link, self._limiter = link, link.node.limiter
        self.useful = False
        """Whether what is done for it now counts here, and so is not charged."""

    def received(self, size_bytes: int) -> None:
        self._link.node.evict(self._limiter.received(self._link, size_bytes))

    def frame(self) -> None:
        self._link.node.evict(self._limiter.frame(self._link))

    async def turn(self, act: Callable[[], None]) -> None:
        work = self._link.node.stranger_work
        await work.turn(self._link)
        self.useful = False
        begun = time.perf_counter()
        try:
            act()
        finally:
            if not self.useful:
                work.charge(time.perf_counter() - begun)


class Link:
    """A connection to one device, and what is replicated over it."""

    def __init__(self, node: "Node", connection: Connection) -> None:
        self.node, self.connection = node, connection
        self.device: DeviceKey = connection.remote
        self.channels: dict[Channel, PartyChannel] = {}
        self.known = False
        """Whether the device is no stranger; as of the last review."""
        self.greeted = False
        """Whether the peer was told that the device is connected: strangers are not remembered."""
        self.shared = False
        """Whether any party has been replicated with it as with a member."""
        self._offered: set[bytes] = set()
        self._heard: dict[bytes, None] = {}
        """Tags that it has offered, the oldest first."""
        self._ours: tuple[Sequence[PartyKey], set[bytes]] = ((), set())
        """The tags of the parties that are shared here."""
        self._parted: set[bytes] = set()
        """Parties that this device was removed from and knows it."""
        connection.on_writable = self._writable

    def review(self) -> None:
        """Offer what may be offered now, open what both sides want, end what is over."""
        peer = self.node.peer
        tags: dict[bytes, PartyKey] = {}
        members: dict[bytes, bool] = {}
        is_known = self.connection.dialled
        parting: dict[bytes, PartyKey] = {}
        myself = DeviceKey(peer.device_key.public)
        for party in peer.shared_parties():
            standing = peer.standing(party, self.device)
            is_known |= standing is Standing.MEMBER
            tag = party_tag(self.connection.handshake_hash, party)
            if standing is not Standing.REMOVED:
                # Who was removed itself has nothing to give, and hears of it first when it is let in again.
                outside = peer.standing(party, myself) is Standing.REMOVED
                tags[tag], members[tag] = party, standing is Standing.MEMBER and not outside
            elif tag in self._heard and tag not in self._parted:
                parting[tag] = party
        self.node.classify(self, known=is_known or peer.own_device(self.device))
        if any(tag in tags for tag in self._heard):
            self.node.limiter.newcomer(self)
        self._parted -= set(tags)
        self._leave({channel_of(tag) for tag in (*tags, *parting)})
        self._say_farewell(parting)
        for tag in tags:
            known = self.channels.get(channel_of(tag))
            if known is not None and (known.newcomer == members[tag] or known.farewell is not None):
                # It has become a member, or ceased to be known as one: both sides begin again.
                self._drop(channel_of(tag))
                self.connection.send(Leave(channel_of(tag), "begins again"))
                self._offered.discard(tag)
        # Who offers a tag knows the party; to offer it back tells nothing new.
        fresh = [tag for tag in tags if (members[tag] or tag in self._heard) and tag not in self._offered]
        self._offered |= set(fresh)
        if fresh:
            self.connection.send(Offer(tuple(fresh)))
        for tag, party in tags.items():
            channel = channel_of(tag)
            if tag in self._heard and channel not in self.channels:
                self.channels[channel] = opened = PartyChannel(self, party, channel, newcomer=not members[tag])
                opened.start()
                self.shared |= members[tag]
                for told in self.node.on_member if members[tag] else ():
                    told(self)

    def _say_farewell(self, parting: dict[bytes, PartyKey]) -> None:
        """Tell a device that it was removed, by the control blocks that prove it."""
        for tag, party in parting.items():
            channel = channel_of(tag)
            known = self.channels.get(channel)
            if known is not None and known.farewell is not None:
                continue
            proof = self.node.peer.departure(party, self.device)
            if known is not None:
                self._drop(channel)
                self.connection.send(Leave(channel, "begins again" if proof else "not replicated here any more"))
                self._offered.discard(tag)
            if not proof:
                self._parted.add(tag)
                continue
            if tag not in self._offered:
                self._offered.add(tag)
                self.connection.send(Offer((tag,)))
            self.channels[channel] = opened = PartyChannel(self, party, channel, proof=proof)
            opened.start()

    def part(self, channel: Channel) -> None:
        """A removed device has heard that it is, or has had its time: leave the party, and the device if that was all."""
        known = self.channels.get(channel)
        if known is None or known.farewell is None:
            return
        self._drop(channel)
        self._parted |= {tag for tag in self._heard if channel_of(tag) == channel}
        self._offered = {tag for tag in self._offered if channel_of(tag) != channel}
        self.connection.send(Leave(channel, REMOVED))
        if not self.channels:
            self.connection.end(Ended(REMOVED, "no member of any party that is shared here"))

    def _leave(self, wanted: set[Channel]) -> None:
        for channel in [channel for channel in self.channels if channel not in wanted]:
            self._drop(channel)
            self.connection.send(Leave(channel, "not replicated here any more"))
            self._offered = {tag for tag in self._offered if channel_of(tag) != channel}

    def receive(self, frame: MeshFrame) -> None:
        self.node.counters.frames_received += 1
        if isinstance(frame, Sync):
            known = self.channels.get(frame.channel)
            if known is not None:
                known.receive(frame.frame)
        elif isinstance(frame, Offer):
            self._hear(frame.tags)
            if self.known or self._names_ours(frame.tags):
                self.review()
        elif isinstance(frame, Leave):
            self._drop(frame.channel)
            # Until it offers the party again; then it is offered again from here too.
            self._heard = {tag: None for tag in self._heard if channel_of(tag) != frame.channel}
            self._offered = {tag for tag in self._offered if channel_of(tag) != frame.channel}
        elif isinstance(frame, Want | Have | Blob | Blobs):
            self._hand_over(self.node.blobs, frame)
        elif isinstance(frame, Invitation):
            self._hand_over(self.node.invitations, frame)
        elif isinstance(frame, Introduction | Parties | Seek):
            self._hand_over(self.node.identities, frame)
        elif isinstance(frame, Reach):
            self._hand_over(self.node.reach, frame)
        elif isinstance(frame, Roots):
            self._hand_over(self.node.roots, frame)
        else:
            raise MalformedFrame(f"an unexpected {type(frame).__name__}")

    def useful(self) -> None:
        """What the device has just sent counts here: it has its budget and its time back."""
        meter = self.connection.meter
        if isinstance(meter, _Meter):
            meter.useful = True
            self.node.limiter.useful(self, asyncio.get_running_loop().time())

    def _names_ours(self, tags: Iterable[bytes]) -> bool:
        """Whether one of these tags stands for a party that is shared here: all that a stranger's guesses cost."""
        shared = self.node.shared_parties()
        if self._ours[0] is not shared:
            self._ours = shared, {party_tag(self.connection.handshake_hash, party) for party in shared}
        return any(tag in self._ours[1] for tag in tags)

    def _hear(self, tags: Iterable[bytes]) -> None:
        """Keep in mind what the device offers; when that is too much, what it offered first is forgotten."""
        most = OFFERS_MAX if self.known else STRANGER_OFFERS_MAX
        for tag in tags:
            self._heard.pop(tag, None)
            self._heard[tag] = None
            if len(self._heard) > most:
                del self._heard[next(iter(self._heard))]
                self.node.counters.offers_forgotten += 1

    def party_of(self, channel: Channel, *, strangers: bool = False) -> PartyKey | None:
        """The party of a channel, for members only; or also for who is not known as one yet."""
        known = self.channels.get(channel)
        return known.party if known is not None and (known.for_member or (strangers and known.newcomer)) else None

    def given_to(self, channel: Channel, cids: Sequence[Cid]) -> tuple[PartyKey | None, list[Cid]]:
        """The party of a channel, and which blobs of it the device may have: a member all, a removed one its proof."""
        known = self.channels.get(channel)
        if known is None or known.newcomer:
            return None, []
        allowed = None if known.farewell is None else known.farewell.blobs
        return known.party, [cid for cid in cids if allowed is None or cid in allowed]

    def channel_for(self, party: PartyKey, *, strangers: bool = False) -> Channel | None:
        for channel, known in self.channels.items():
            if known.party == party and self.party_of(channel, strangers=strangers) is not None:
                return channel
        return None

    @property
    def with_member(self) -> bool:
        """Whether any party is replicated with the device as with a member."""
        return any(known.for_member for known in self.channels.values())

    def stop(self) -> None:
        for channel in list(self.channels):
            self._drop(channel)
        node = self.node
        for handler in (node.blobs, node.invitations, node.identities, node.reach, node.roots):
            if handler is not None:
                handler.closed(self)

    def _hand_over(self, handler: FrameHandler | None, frame: MeshFrame) -> None:
        if handler is not None:
            handler.receive(self, frame)

    def _drop(self, channel: Channel) -> None:
        known = self.channels.pop(channel, None)
        if known is not None:
            known.stop()

    def _writable(self, writable: bool) -> None:
        for channel in list(self.channels.values()):
            channel.writable(writable)


class Node:
    """See the module."""

    def __init__(self, peer: MeshPeer) -> None:
        self.peer = peer
        self.counters = NodeCounters()
        self.limiter: ConnectionLimiter[asyncio.Task[None], Link] = ConnectionLimiter(_limits())
        self.handshake_work = WorkQueue(WorkShare(HANDSHAKE_SHARE, HANDSHAKE_BURST_S))
        self.stranger_work = WorkQueue(WorkShare(STRANGER_SHARE, STRANGER_BURST_S))
        self.intake = Intake()
        self.reviews_asked = self.reviews_done = 0
        """Members or parties have changed so often, and so often every link was looked at afterwards. While the two
        differ nothing is sent past the loop: a link may have lost its right to it."""
        self.links: dict[DeviceKey, Link] = {}
        self.invitations: FrameHandler | None = None
        self.identities: FrameHandler | None = None
        self.blobs: FrameHandler | None = None
        self.reach: FrameHandler | None = None
        self.roots: FrameHandler | None = None
        self.on_member: list[Callable[[Link], None]] = []
        """Told when a party begins to be replicated with a device that is known as a member."""
        self.addresses: list[str] = []
        self.on_link: list[Callable[[Link], None]] = []
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self._shared: Sequence[PartyKey] | None = None

    def shared_parties(self) -> Sequence[PartyKey]:
        """Parties that replicate, as of the last review."""
        if self._shared is None:
            self._shared = tuple(self.peer.shared_parties())
        return self._shared

    # listening and dialling

    async def listen(self, host: str, port: int) -> str:
        """Take connections at an address; returns it with the port that was given."""
        listeners = await listen(host, port, self._accepted, self._out_of_files)
        self._listeners += listeners
        self.addresses.append(listeners[0].address)
        return listeners[0].address

    async def dial(
        self, host: str, port: int, *, expected: DeviceKey | None = None, known: KnownKeys | None = None
    ) -> Link:
        """Connect once; ConnectionFailed says why not. A device that is connected already gives its link.

        `known` is what is shared with whoever answers where no device is expected: without it all that this peer shares
        with anybody.
        """
        if expected is not None and expected in self.links:
            return self.links[expected]
        if expected is None and known is None:
            known = self.peer.known_keys()
        shaken = await open_connection(host, port, self.peer.device_key, expected=expected, known=known)
        self.counters.dialled += 1
        kept = self._adopt(shaken)
        if kept is None:
            existing = self.links.get(shaken.connection.remote)
            if existing is None:
                own = shaken.connection.remote == self.peer.device_key.public
                why = "this is the own device" if own else "the node closes, or all connections are taken"
                raise ConnectionFailed(Ended("refused", why))
            return existing
        return kept

    def keep_dialling(self, host: str, port: int, *, expected: DeviceKey | None = None) -> None:
        """Connect, and again whenever the connection is lost, ever more slowly while nobody answers."""
        address = f"{host}:{port}"
        if address not in self._dials and not self._closing:
            task = asyncio.create_task(self._redial(host, port, expected))
            self._dials[address] = task

    def stop_dialling(self, host: str, port: int) -> None:
        task = self._dials.pop(f"{host}:{port}", None)
        if task is not None:
            task.cancel()

    def review(self) -> None:
        """Parties or members have changed: look at every link again."""
        asked, self._shared = self.reviews_asked, None
        for link in list(self.links.values()):
            link.review()
        self.reviews_done = asked

    async def close(self) -> None:
        """Say goodbye to everybody and stop."""
        self._closing = True
        for listener in self._listeners:
            listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._dials.values():
            task.cancel()
        for link in list(self.links.values()):
            link.connection.end(Ended("closing"))
        tasks = [*self._tasks, *self._dials.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=3.0)
            for task in late:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _redial(self, host: str, port: int, expected: DeviceKey | None) -> None:
        pause = REDIAL_FIRST_S
        while not self._closing:
            try:
                link = await self.dial(host, port, expected=expected)
            except ConnectionFailed as failure:
                self.counters.refused[failure.ended.reason] += 1
                log.info("dial failed", extra={"address": f"{host}:{port}", "why": str(failure)})
                await asyncio.sleep(pause)
                # Who hung up in the middle of a handshake is there, and has more diallers than room.
                crowded = failure.ended.reason in ("closed", "broken")
                pause = min(pause * 2, REDIAL_CROWDED_S if crowded else REDIAL_LAST_S)
                continue
            expected = expected or link.device
            while self.links.get(link.device) is not None and not self._closing:
                await asyncio.sleep(REDIAL_FIRST_S)
            ended = link.connection.ended
            if ended is not None and ended.detail.startswith((REMOVED, SHARES_NOTHING)):
                await asyncio.sleep(REDIAL_LAST_S)  # nobody waits for us there
            pause = REDIAL_FIRST_S if link.shared else min(pause * 2, REDIAL_LAST_S)

    def _accepted(self, sock: socket.socket, host: str) -> None:
        if self._closing:
            sock.close()
            return
        address = address_group(host)
        task = self._run(self._shake_hands(sock, address))
        task.add_done_callback(lambda done: self._displaced(sock) if done.cancelled() else None)
        for displaced in self.limiter.handshake_began(task, address, asyncio.get_running_loop().time()):
            displaced.cancel()

    def _displaced(self, sock: socket.socket) -> None:
        """A handshake had to go, perhaps before it began."""
        sock.close()
        self.counters.refused["too-many"] += 1

    async def _shake_hands(self, sock: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        waits = False

        async def wait(rank: Rank) -> None:
            nonlocal waits
            waits = True
            await self.handshake_work.turn(rank=rank)
            waits = False

        async def turn(step: Callable[[], list[bytes]]) -> list[bytes]:
            await wait(Rank.BEGUN)
            return self.handshake_work.charged(step)

        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await wait(Rank.PREFERRED if self.limiter.preferred(address) else Rank.OTHER)
            self.handshake_work.charge(OPEN_S)
            reader, writer = await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)
            read_at_once(writer, METERED_READ_BYTES)
            shaken = await accept(reader, writer, self.peer.device_key, recognise=self.peer.recognise, turn=turn)
        except (ConnectionFailed, TimeoutError) as failure:
            self.counters.refused[failure.ended.reason if isinstance(failure, ConnectionFailed) else "slow"] += 1
            if waits:
                self.limiter.handshake_starved(address, asyncio.get_running_loop().time())
            sock.close()
            return
        except OSError as error:
            sock.close()
            self.counters.refused["broken"] += 1
            log.debug("a connection broke at once", extra={"why": str(error)})
            return
        finally:
            self.limiter.handshake_ended(task)
        self.counters.accepted += 1
        self.handshake_work.charged(lambda: self._adopt(shaken))

    def _out_of_files(self) -> None:
        self.counters.refused["too-many"] += 1
        for displaced in self.limiter.out_of_files(asyncio.get_running_loop().time()):
            displaced.cancel()

    # strangers

    def classify(self, link: Link, *, known: bool) -> None:
        """A link was looked at: whether its device is known here may have changed."""
        if link.known == known or self.links.get(link.device) is not link:
            return
        link.known = known
        if known:
            self.limiter.became_known(link)
            self._greet(link)
        else:
            self._meter(link)
            now = asyncio.get_running_loop().time()
            self.evict(self.limiter.became_stranger(link, address_group(link.connection.host), now))

    def evict(self, links: Iterable[tuple[Link, Eviction]]) -> None:
        """End connections of strangers, with the reason."""
        for link, why in links:
            self._forget(link)
            link.connection.end(_ENDS.get(why, Ended(CROWDED, "others need the room")))

    def _greet(self, link: Link) -> None:
        """The device is known: it is read at full speed, and remembered."""
        link.connection.meter = None
        link.connection.read_at_once(READ_BYTES)
        link.greeted = True
        self.peer.connected(link.device, link.connection.address)

    def _meter(self, link: Link) -> None:
        link.connection.meter = _Meter(link)
        link.connection.read_at_once(METERED_READ_BYTES)
        self._sweep_later()

    def _sweep_later(self) -> None:
        """Look again when the next stranger's time is over."""
        if self._sweeper is None and not self._closing:
            loop = asyncio.get_running_loop()
            at = self.limiter.next_deadline()
            pause = SWEEP_MIN_S if at is None else max(SWEEP_MIN_S, at - loop.time())
            self._sweeper = loop.call_later(pause, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        self.evict(self.limiter.expired(asyncio.get_running_loop().time()))
        if self.limiter.strangers:
            self._sweep_later()

    # one connection per device

    def _adopt(self, shaken: Handshaken) -> Link | None:
        """Take over a connection, unless there is a better one to the same device."""
        connection = shaken.connection
        device = connection.remote
        existing = self.links.get(device)
        if self._closing or device == self.peer.device_key.public:
            connection.end(Ended("refused"))
        elif existing is not None and not self._better(connection, existing.connection):
            connection.end(Ended("duplicate"))
        else:
            if existing is not None:
                self._forget(existing)
                existing.connection.end(Ended("duplicate"))
            link = Link(self, connection)
            if self._take_slot(link):
                self.links[device] = link
                self._run(self._serve(link, shaken))
                return link
            connection.end(Ended(CROWDED, "all connections are taken"))
            self.counters.refused["too-many"] += 1
        self._run(self._discard(shaken))
        return None

    def _take_slot(self, link: Link) -> bool:
        """Give a new link its place, among the known ones or the strangers; False when there is none."""
        link.known = link.connection.dialled or self.peer.knows(link.device)
        address, now = address_group(link.connection.host), asyncio.get_running_loop().time()
        fits, evicted = self.limiter.link_began(link, address, now, known=link.known)
        self.evict(evicted)
        if fits and not link.known:
            self._meter(link)
        return fits

    def _better(self, fresh: Connection, old: Connection) -> bool:
        """Of two connections between two devices both keep the one that the lower key dialled; of two dialled by the
        same side, the newer one: the older is likely to be dead without having noticed."""
        if fresh.dialled == old.dialled or old.ended is not None:
            return True
        return fresh.dialled == (self.peer.device_key.public < fresh.remote)

    async def _serve(self, link: Link, shaken: Handshaken) -> None:
        if link.known:
            self._greet(link)
        log.info("connected", extra={"device": link.device.hex(), "address": link.connection.address})
        try:
            if link.known:  # a stranger is offered nothing before it has named a party
                self.guarded(link, link.review)
            for told in list(self.on_link):
                self.guarded(link, lambda told=told: told(link))  # type: ignore[misc]  # bound now, not at the end
            ended = await shaken.run(lambda frame: self.guarded(link, lambda: link.receive(frame)))
        finally:
            self._forget(link)
        self.counters.ended[ended.reason] += 1
        self.counters.bytes_received += link.connection.bytes_received
        self.counters.bytes_sent += link.connection.bytes_sent
        if link.greeted:
            self.peer.disconnected(link.device, ended)
        log.info("disconnected", extra={"device": link.device.hex(), "why": ended.reason, "detail": ended.detail})

    def guarded(self, link: Link, act: Callable[[], None]) -> None:
        """Do something for one link. What nobody foresaw ends that connection, with a counted reason, and nothing else."""
        try:
            act()
        except MalformedFrame:
            raise  # foreseen: the connection ends itself
        except Exception as error:  # one peer's frame must not take the others down
            self.counters.failures[type(error).__name__] += 1
            log.exception("a connection failed", extra={"device": link.device.hex()})
            link.connection.end(Ended("internal", type(error).__name__))

    async def _discard(self, shaken: Handshaken) -> None:
        await shaken.run(lambda frame: None)

    def _forget(self, link: Link) -> None:
        self.limiter.link_ended(link)
        self.stranger_work.release(link)
        link.stop()
        if self.links.get(link.device) is link:
            del self.links[link.device]

    def _run(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _limits() -> Limits:
    """As many handshakes as files may be opened, beside connections and stores."""
    usual = Limits()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return usual
    most = max(HANDSHAKES_MIN, min(usual.handshakes_max, files - usual.links_max - OTHER_FILES))
    return replace(usual, handshakes_max=most, handshakes_per_address_max=min(usual.handshakes_per_address_max, most))
