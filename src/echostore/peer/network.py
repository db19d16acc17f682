"""A peer on the network: a mesh node in a thread of its own, and this peer's parties as the node sees them.

    peer.listen("127.0.0.1:0")            take connections
    peer.connect("127.0.0.1:4711")        connect, and again whenever the connection is lost

Every call of the node takes the peer's lock, like any other user of it. The thread is never joined while that lock is
held.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from echostore.kernel.errors import Closed, EchoError, NotFound, Refused, TimedOut, Unreachable, UsageError
from echostore.kernel.feed import Head
from echostore.kernel.ids import KEY_BYTES, Cid, DeviceKey, FeedKey, PartyKey
from echostore.kernel.order import CONTROL
from echostore.kernel.sync.events import Progress
from echostore.kernel.sync.frames import FeedTip, Tip
from echostore.kernel.sync.turns import OverQuota, Quotas
from echostore.kernel.sync.turns import Standing as QuotaStanding
from echostore.mesh.blob_exchange import BlobExchange, Follow
from echostore.mesh.connection import ConnectionFailed, Ended
from echostore.mesh.connection_limits import address_group
from echostore.mesh.node import Link, Node, Standing
from echostore.mesh.policy import Flow
from echostore.mesh.secure_channel import KnownKeys, Presented, Refusal
from echostore.peer.addresses import Addresses
from echostore.peer.bootstrap import Bootstraps
from echostore.peer.coherence_roots import RootLines
from echostore.peer.control_floor import kept_blobs
from echostore.peer.inviting import Inviting
from echostore.peer.own_devices import OwnDevices
from echostore.peer.progress import PartyProgress, party_progress
from echostore.peer.quotas import IntakeStatus, keep_quotas, quotas_of
from echostore.store.meta_store import PartyState

if TYPE_CHECKING:
    from echostore.kernel.sync.port import Rejection, SyncPort
    from echostore.mesh.lan_mdns import LanDiscovery
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer
    from echostore.peer.processor import PartyProcessor
    from echostore.store.blob_store import BlobStore
    from echostore.wire.signing import SigningKey

CALL_S = 30.0
"""How long a call into the node's thread may take; dials end earlier by themselves."""

KNOWN_S = 1.0
"""How old the list of known devices may be by which strangers are told from members."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Connected:
    """A device that this peer is connected to."""

    device: bytes
    address: str
    dialled: bool
    parties: int
    round_trip_s: float | None
    bytes_received: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class Seen:
    """When a device was last connected, by this machine's clock, and how that ended."""

    device: bytes
    address: str
    at_ms: int
    ended: str


class Network:
    """Owns the node and its thread. Made by the first `listen` or `connect` of a peer."""

    def __init__(self, peer: "Peer") -> None:
        self._peer = peer
        self._flows: dict[bytes, Flow] = {}
        self._watched: weakref.WeakSet[PartyProcessor] = weakref.WeakSet()
        self.seen: dict[bytes, Seen] = {}
        self._known: set[bytes] = set()
        self._known_at = -float("inf")
        self.node = Node(self)
        self.node.intake.set_quotas(quotas_of(peer.meta))
        self.inviting = Inviting(peer, self)
        self.node.invitations = self.inviting
        self.own_devices = OwnDevices(peer, self)
        self.node.identities = self.own_devices
        self.reach_book = Addresses(peer, self)
        self.node.reach = self.reach_book
        self.root_lines = RootLines(peer, self)
        self.node.roots = self.root_lines
        self.node.on_member.append(self.root_lines.opened)
        self.node.on_member.append(self.reach_book.tell_own)
        self.node.on_link.append(self._linked)
        self.blobs = BlobExchange(self.node, self)
        self.node.blobs = self.blobs
        self.bootstraps = Bootstraps(peer, self)
        self.node.on_member.append(self.bootstraps.met)
        self._loop = asyncio.new_event_loop()
        self.lan: LanDiscovery | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="echostore-mesh", daemon=True)
        self._thread.start()

    # for the peer

    def listen(self, address: str) -> str:
        """Take connections at `host:port`; port 0 takes a free one. Returns the address in use."""
        host, port = parse_address(address)
        try:
            given = self.call(self.node.listen(host, port))
            self.soon(self.reach_book.tell_members)
            return given
        except EchoError:
            raise
        except OSError as error:
            raise Unreachable(
                f"this peer can't listen at {address}: {error.strerror or error}", next_step="Name another address."
            ) from None

    def connect(self, address: str, *, device: bytes | None = None, keep: bool = True) -> bytes:
        """Connect to a peer; `device` is who must answer. Returns the device that did. `keep`: connect again later."""
        host, port = parse_address(address)
        expected = DeviceKey(device) if device is not None else None
        if expected is not None and len(expected) != KEY_BYTES:
            raise UsageError("a device key has 32 bytes")
        try:
            link = self.call(self.node.dial(host, port, expected=expected))
        except ConnectionFailed as failure:
            stranger = failure.ended.reason == Refusal.NOTHING_SHARED
            running = "Make sure that a peer is running there (`echostore serve` says its address), or name another."
            raise Unreachable(
                f"no connection to {address}: {failure}",
                next_step="Join a party of that peer first: its ticket names the device." if stranger else running,
            ) from None
        if keep:
            self.soon(lambda: self.node.keep_dialling(host, port, expected=link.device))
        return bytes(link.device)

    def keep_connecting(self, address: str, *, device: bytes | None = None) -> None:
        """Connect whenever the peer can be reached, from now on; nothing is raised when it can't."""
        host, port = parse_address(address)
        expected = DeviceKey(device) if device is not None else None
        self.soon(lambda: self.node.keep_dialling(host, port, expected=expected))

    async def reach(
        self,
        addresses: Iterable[str],
        device: DeviceKey | None = None,
        *,
        known: KnownKeys | None = None,
        whom: str = "the peer",
    ) -> tuple[Link, str]:
        """A link to who answers first at one of these addresses, and the address. Runs in the node's thread.

        Refused when somebody answers to whom this peer is a stranger; Unreachable when nobody does.
        """
        failures, strangers = [], False
        for address in addresses:
            host, port = parse_address(address)
            try:
                return await self.node.dial(host, port, expected=device, known=known), address
            except ConnectionFailed as failure:
                failures.append(f"{address}: {failure}")
                strangers |= failure.ended.reason == Refusal.NOTHING_SHARED
        if strangers:
            raise Refused(
                f"{whom} shares nothing with this peer: " + "; ".join(failures),
                next_step="Name another one, or join by a ticket.",
            )
        raise Unreachable(
            f"{whom} can't be reached: " + "; ".join(failures or ["no address is known"]),
            next_step=f"Make sure that {whom} is running there, and try again.",
        )

    def discover(self, *, interfaces: Sequence[str] = ()) -> None:
        """Find members on the local network by mDNS, and be found: needs the extra `lan`. A second call does nothing.

        `interfaces` are own addresses of the networks to look at; without them, all. See docs/internals/network.md for
        what others can see.
        """
        from echostore.mesh.lan_mdns import LanDiscovery, check_available
        from echostore.peer.reachable import reachable_addresses

        check_available()

        def addresses() -> list[tuple[str, int]]:
            return [parse_address(each) for each in reachable_addresses(self.node.addresses)]

        async def start() -> None:
            if self.lan is None:
                self.lan = LanDiscovery(
                    self.node, addresses=addresses, parties=self.shared_parties, interfaces=interfaces
                )
                await self.lan.start()

        self.call(start())

    def disconnect(self, address: str) -> None:
        """Stop dialling an address; a connection that stands is ended."""
        host, port = parse_address(address)

        def end() -> None:
            self.node.stop_dialling(host, port)
            for link in list(self.node.links.values()):
                if link.connection.dialled and link.connection.address == f"{host}:{port}":
                    link.connection.end(Ended("closing"))

        self.soon(end)

    def connections(self) -> list[Connected]:
        async def collect() -> list[Connected]:
            return [
                Connected(
                    device=bytes(link.device),
                    address=link.connection.address,
                    dialled=link.connection.dialled,
                    parties=len(link.channels),
                    round_trip_s=link.connection.round_trip_s,
                    bytes_received=link.connection.bytes_received,
                    bytes_sent=link.connection.bytes_sent,
                )
                for link in self.node.links.values()
            ]

        return self.call(collect())

    def connected_members(self, party: PartyKey) -> int:
        """How many devices replicate a party with this peer now."""

        async def count() -> int:
            links = self.node.links.values()
            return sum(any(channel.party == party for channel in link.channels.values()) for link in links)

        return self.call(count())

    @property
    def addresses(self) -> list[str]:
        return list(self.node.addresses)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where the node lives."""
        return self._loop

    @property
    def alive(self) -> bool:
        """Whether the node's thread runs."""
        return not self._closed and self._thread.is_alive()

    def progress(self, party: PartyKey) -> PartyProgress:
        """How far a party has come here, of what anyone has announced."""
        return party_progress(self._peer.opened(party) or self._peer.held(party))

    def set_flow(self, device: bytes, flow: str) -> None:
        """What may flow between this peer and a device: both, up (only from here) or down (only to here)."""
        if flow not in set(Flow):
            raise UsageError(f"{flow!r} is no policy", next_step="Policies are both, up and down.")
        self._flows[device] = Flow(flow)

    def set_quotas(self, changes: Mapping[str, float], *, default: bool = False) -> Quotas:
        """Change what one feed and one device may bring per second before they stand behind others, from now on and after
        a restart; with `default` what is not named becomes as it was at first. Names are those of `Quotas`."""
        unknown = sorted(set(changes) - set(asdict(Quotas())))
        if unknown:
            raise UsageError(f"{unknown[0]!r} is no quota", next_step=f"Quotas are {', '.join(asdict(Quotas()))}.")
        quotas = replace(Quotas() if default else quotas_of(self._peer.meta), **changes)
        with self._peer.lock:
            keep_quotas(self._peer.meta, quotas)
        self.soon(lambda: self.node.intake.set_quotas(quotas))
        return quotas

    @property
    def intake(self) -> IntakeStatus:
        """What has come in beyond its quota since the start."""
        turns = self.node.intake.turns
        over = turns.over_blocks
        return IntakeStatus(len(turns), over[OverQuota.FEED], over[OverQuota.DEVICE], turns.slowed_blocks)

    @property
    def lockouts(self) -> list[str]:
        """Why members may be locked out, as of the last minute."""
        return self.node.limiter.lockouts(self._loop.time())

    def quota_of_feed(self, feed: bytes) -> QuotaStanding | None:
        """What a feed has left of its quota; None when nothing of it came lately."""
        return self.node.intake.turns.of_feed(FeedKey(feed), self._loop.time())

    def quota_of_device(self, device: bytes) -> QuotaStanding | None:
        return self.node.intake.turns.of_device(DeviceKey(device), self._loop.time())

    def fetch(
        self,
        party: PartyKey,
        cids: Iterable[Cid],
        *,
        patience_s: float = 30.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
        follow: Follow | None = None,
    ) -> int:
        """Get blobs of a party from connected members, and what they lead to; returns how many came.

        `mesh.blob_exchange.Unavailable` when nothing comes any more.
        """
        work = self.blobs.fetch(party, list(cids), patience_s=patience_s, progress=progress, follow=follow)
        return self.call(work, timeout_s=None)

    def parties_changed(self) -> None:
        """Parties were opened, paused or closed here: the links are told."""
        self._known_at = -float("inf")
        if not self._closed:
            self.node.reviews_asked += 1
            self.soon(self.node.review)
            self.soon(self.own_devices.review)
            if self.lan is not None:
                self.soon(self.lan.review)

    def close(self) -> None:
        """Say goodbye and end the thread. Never called while the peer's lock is held."""
        if self._closed:
            return
        self._closed = True
        self.bootstraps.close()
        if self.lan is not None:
            asyncio.run_coroutine_threadsafe(self.lan.close(), self._loop).result()
        asyncio.run_coroutine_threadsafe(self.node.close(), self._loop).result()
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = CALL_S) -> _T:
        """Run work in the node's thread and wait for it."""
        if self._closed:
            work.close()
            raise Closed("the peer has been closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except EchoError:
            raise
        except TimeoutError:
            future.cancel()
            raise TimedOut(f"the network did not answer in {timeout_s:g} s") from None
        except concurrent.futures.CancelledError:
            raise Closed("the peer has been closed") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def soon(self, action: Callable[[], object]) -> None:
        """Do something in the node's thread, after what is under way there."""
        with contextlib.suppress(RuntimeError):  # the loop has ended between the look and the call
            self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # for the node: see mesh.node.MeshPeer

    @property
    def device_key(self) -> "SigningKey":
        return self._peer.keys.key(DeviceKey(self._peer.device))

    def known_keys(self) -> KnownKeys:
        myself = self._peer.myself
        with self._peer.lock:
            keys: tuple[bytes, ...] = (*self.shared_parties(), *self.own_devices.known())
            return KnownKeys(keys, myself.identity_key if myself.holds_identity_key else None)

    def recognise(self, presented: Presented) -> bytes | None:
        """Who knows this device (from a ticket, a party, an earlier connection), a party of this peer, or has the key of
        an identity that is a member here: a machine that recovers it knows no more."""
        device = bytes(self._peer.device)
        if presented.names(device):
            return device
        for party in self.shared_parties():
            if presented.names(party):
                return party
        if presented.with_proof:
            return next(filter(presented.proven_by, self.own_devices.identities()), None)
        return None

    def shared_parties(self) -> Iterable[PartyKey]:
        with self._peer.lock:
            found = []
            for known in self._peer.parties():
                if known.state in (PartyState.ACTIVE, PartyState.PAUSED) and not known.local:
                    with contextlib.suppress(EchoError):  # damaged: `status` and `doctor` say so
                        self._watch(self._peer.held(known.key))
                        found.append(known.key)
            return found

    def standing(self, party: PartyKey, device: DeviceKey) -> Standing:
        with self._peer.lock:
            machine = self._peer.held(party).runtime.processor.membership.machine
            roles = {member.identity: member.role for member in machine.members}
            entries = [entry for entry in machine.devices if entry.device == device]
        if not entries:
            # A recovered identity's new device reads before it is admitted: the identity key has signed for it.
            present = {identity for identity, role in roles.items() if role}
            return Standing.MEMBER if self.own_devices.proven(device, present) else Standing.UNKNOWN
        if any(not entry.revoked and roles.get(entry.identity) for entry in entries):
            return Standing.MEMBER
        return Standing.REMOVED

    def own_device(self, device: DeviceKey) -> bool:
        return device in self.own_devices.known()

    def knows(self, device: DeviceKey) -> bool:
        now = time.monotonic()
        if now - self._known_at > KNOWN_S:
            self._known, self._known_at = self._known_devices(), now
        return device in self._known

    def _known_devices(self) -> set[bytes]:
        found: set[bytes] = set(self.own_devices.known())
        with self._peer.lock:
            for party in self.shared_parties():
                machine = self._peer.held(party).runtime.processor.membership.machine
                members = {member.identity for member in machine.members if member.role}
                found |= {each.device for each in machine.devices if each.identity in members and not each.revoked}
        return found

    def departure(self, party: PartyKey, device: DeviceKey) -> list[FeedTip]:
        with self._peer.lock:
            processor = self._peer.held(party).runtime.processor
            if processor.parent is not None:
                return []  # a child party has no control feeds: its parent tells
            feeds, found = processor.feeds, []
            for feed, length in processor.membership.machine.departure(device).items():
                cursor = processor.orderer.cursors.get(feed)
                if cursor is None or not feeds.has_feed(cursor.key):
                    continue
                begins = feeds.feed(cursor.key).base
                last = feeds.link_at(cursor.key, begins - 1) if length <= begins else None
                if last is not None:  # the control state stands for it
                    found.append(FeedTip(cursor.key, CONTROL, Tip(begins, last)))
                elif (head := feeds.head_covering(cursor.key, length - 1)) is not None:
                    found.append(FeedTip(cursor.key, CONTROL, Tip(head.length, head.link)))
            return found

    def departure_blobs(self, party: PartyKey) -> Sequence[Cid]:
        with self._peer.lock:
            runtime = self._peer.held(party).runtime
            return [] if runtime.blobs is None else kept_blobs(runtime.processor, runtime.blobs)

    def flow(self, device: DeviceKey) -> Flow:
        return self._flows.get(device, Flow.BOTH)

    def sync_port(self, party: PartyKey) -> "SyncPort":
        return self._peer.sync_port(party)

    def ingest_newcomer(
        self, party: PartyKey, device: DeviceKey, key: FeedKey, start: int, payloads: Sequence[bytes], head: Head
    ) -> "int | Rejection":
        return self._peer.sync_port(party).ingest(key, CONTROL, start, payloads, head, newcomer=device)

    def _open(self, party: PartyKey) -> "Party":
        """A party of a channel; Closed when it was closed or forgotten here meanwhile."""
        try:
            return self._peer.held(party)
        except (NotFound, Refused):
            raise Closed("the party was closed here") from None

    def progressed(self, party: PartyKey, device: DeviceKey, progress: Progress) -> None:
        known = self._peer.opened(party) or self._open(party)
        known.announced(progress.feed, progress.held)
        known.acknowledge(device, {progress.feed: progress.held}, {progress.feed: progress.processed})

    def compacted(self, party: PartyKey, evidence: Cid | None) -> None:
        with self._peer.lock:
            self.bootstraps.compacted(self._open(party), evidence)

    def blobs_here(self, party: PartyKey, cids: Sequence[Cid], bytes_max: int) -> dict[Cid, bytes]:
        """Those that are here and sound: what is damaged here, whoever asked gets elsewhere."""
        with self._peer.lock:
            store = self._blob_store(party)
            return store.get_some(cids, bytes_max) if store is not None else {}

    def missing_blobs(self, party: PartyKey, cids: Sequence[Cid]) -> list[Cid]:
        with self._peer.lock:
            store = self._blob_store(party)
            return store.missing(cids) if store is not None else list(cids)

    def keep_blobs(self, party: PartyKey, blobs: dict[Cid, bytes]) -> None:
        with self._peer.lock:
            store = self._blob_store(party)
            if store is not None:
                store.put_many(blobs, checked=True)

    def _blob_store(self, party: PartyKey) -> "BlobStore | None":
        """Asked for once per blob: an open party is found without a look at the disk. None: it was closed meanwhile."""
        found = self._peer.opened(party)
        try:
            return (found or self._open(party)).runtime.blobs
        except Closed:
            return None

    def connected(self, device: DeviceKey, address: str) -> None:
        self.seen[device] = Seen(device, address, self._peer.now_ms(), "")

    def recall(self, seen: Seen) -> None:
        """What an earlier process has seen: handshakes from there go before others."""
        self.seen.setdefault(seen.device, seen)
        host, colon, _ = seen.address.rpartition(":")
        if colon:
            address = address_group(host.removeprefix("[").removesuffix("]"))
            self.soon(lambda: self.node.limiter.remember(address))

    def disconnected(self, device: DeviceKey, ended: Ended) -> None:
        known = self.seen.get(device)
        self.seen[device] = Seen(device, known.address if known else "", self._peer.now_ms(), ended.reason)

    def _linked(self, link: Link) -> None:
        """Another device of this identity may have come; a stranger introduces itself first."""
        if link.known:
            self.soon(self.own_devices.review)

    def _watch(self, party: "Party") -> None:
        """Hear of it when control changes who belongs."""
        processor = party.runtime.processor
        if processor not in self._watched:
            self._watched.add(processor)
            processor.on_admission.append(self.parties_changed)
            self.own_devices.watch(party)
            self.bootstraps.watch(party)


async def _end_tasks() -> None:
    """What somebody waited for who has gone, such as a fetch that ^C ended: it is over before the loop is."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`, or `[host]:port` for IPv6."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is not an address", next_step="Write host:port, as in 127.0.0.1:4711.")
    return host, int(port)
