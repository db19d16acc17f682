"""The replication of one party over one link: a session's frames, narrowed by policy, and its timer."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import Closed
from echostore.kernel.feed import Head
from echostore.kernel.ids import Cid, FeedKey, PartyKey
from echostore.kernel.ids import Link as BlockLink
from echostore.kernel.order import CONTROL
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.endpoint import Endpoint
from echostore.kernel.sync.events import Close, Effect, Progress, Score, Unobtainable, Writable
from echostore.kernel.sync.frames import Blocks, FeedTip, Frame, RefusalReason, Request
from echostore.kernel.sync.port import Rejection, SyncPort
from echostore.kernel.sync.session import TRACKS_HEARD_MAX
from echostore.mesh.connection import Ended
from echostore.mesh.farewell import FAREWELL_S, FarewellPort
from echostore.mesh.policy import Flow, incoming, outgoing, refused
from echostore.wire.mesh import Channel, Sync
from echostore.wire.sync import decode_frame, encode_frame

if TYPE_CHECKING:
    from echostore.mesh.node import Link

log = logging.getLogger("echostore.mesh")

STRAIGHT_LINKS_MAX: Final = 8
"""So many connections may get news from the thread that wrote it; with more, the node's loop sends to all. Strangers get none."""

NEWCOMER_FEEDS_MAX: Final = 128
"""Feeds that a device may name which is not known as a member: its own, and those that admitted it."""


IngestControl = Callable[[FeedKey, int, Sequence[bytes], Head], int | Rejection]


class NewcomerPort:
    """A party as a device sees it that is not known as a member: it may hand over control blocks, and gets nothing."""

    def __init__(self, port: SyncPort, ingest: IngestControl, useful: Callable[[], None]) -> None:
        """`ingest` takes blocks of control feeds; `useful` hears of those that were taken into a feed that counts."""
        self._port, self._ingest, self._useful = port, ingest, useful

    def feeds(self) -> Iterable[FeedTip]:
        return [tip for tip in self._port.feeds() if tip.kind == CONTROL]

    def tips(self, key: FeedKey) -> list[FeedTip]:
        return [tip for tip in self._port.tips(key) if tip.kind == CONTROL]

    def own(self, key: FeedKey) -> bool:
        return False

    def holds(self, key: FeedKey, length: int, link: BlockLink) -> bool:
        return self._port.holds(key, length, link)

    def read(
        self, key: FeedKey, start: int, blocks_max: int, bytes_max: int, toward: BlockLink
    ) -> tuple[Sequence[bytes], Head] | None:
        return None

    def ingest(self, key: FeedKey, kind: str, start: int, payloads: Sequence[bytes], head: Head) -> int | Rejection:
        if kind != CONTROL:
            return Rejection(Reason.UNADMITTED)
        before = self.tips(key)
        result = self._ingest(key, start, payloads, head)
        after = self.tips(key)
        if after and (not before or after[0].tip.length > before[0].tip.length):
            self._useful()
        return result

    def processed_length(self, key: FeedKey) -> int:
        return 0

    def fork_proofs(self) -> Iterable[bytes]:
        return ()

    def on_grow(self, callback: Callable[[FeedKey, int], None]) -> Callable[[], None]:
        return self._port.on_grow(callback)

    def on_written(self, callback: Callable[[FeedTip, Blocks], None]) -> Callable[[], None]:
        return lambda: None  # it gets nothing


class PartyChannel:
    """The replication of one party on one link."""

    def __init__(
        self,
        link: "Link",
        party: PartyKey,
        channel: Channel,
        *,
        newcomer: bool = False,
        proof: Iterable[FeedTip] | None = None,
    ) -> None:
        """`proof`: the device was removed, and is told no more than that (`farewell`)."""
        self.party, self.newcomer = party, newcomer
        self._link, self._channel = link, channel
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._parting: asyncio.TimerHandle | None = None
        port = link.node.peer.sync_port(party)
        self.farewell = None
        if proof is not None:
            self.farewell = FarewellPort(port, proof, link.node.peer.departure_blobs(party))
        view: SyncPort = self.farewell or (self._newcomer_port(port) if newcomer else port)
        # A newcomer is told no tips (it could not ask for them anyway) and may only bring.
        self._flow = Flow.DOWN if newcomer else Flow.UP if self.farewell else link.node.peer.flow(link.device)
        self._endpoint = Endpoint(
            view,
            send=self._send,
            clock=self._loop.time,
            tell=self._heed,
            defer=self._defer,
            intake=lambda arrived, act: link.node.intake.arrived(link.device, arrived, lambda: self._take_in(act)),
            last=lambda feed: link.node.intake.last(feed, self._loop.time()),
            straight=self._send_straight,
            heard_max=NEWCOMER_FEEDS_MAX if newcomer else TRACKS_HEARD_MAX,
        )

    def _newcomer_port(self, port: SyncPort) -> NewcomerPort:
        peer, device = self._link.node.peer, self._link.device
        return NewcomerPort(port, lambda *blocks: peer.ingest_newcomer(self.party, device, *blocks), self._link.useful)

    @property
    def for_member(self) -> bool:
        """Whether the device is known as a member, and so gets blobs too."""
        return not self.newcomer and self.farewell is None

    def start(self) -> None:
        if self.farewell is not None:
            self._parting = self._loop.call_later(FAREWELL_S, self._link.part, self._channel)
        self._endpoint.start()
        if not self._link.connection.writable:
            self._endpoint.post(Writable(False))
        self._schedule()

    def receive(self, data: bytes) -> None:
        frame = decode_frame(data)
        if self._endpoint.closed:
            return
        answer = refused(self._flow, frame)
        if answer is not None:
            self._send(answer)
            return
        heard = incoming(self._flow, frame)
        if heard is not None:
            try:
                self._endpoint.receive(heard)
            except Closed:
                self.stop()  # the party was closed here meanwhile; the link is about to leave it
                return
            self._schedule()

    def writable(self, writable: bool) -> None:
        self._endpoint.post(Writable(writable))
        self._schedule()

    def stop(self) -> None:
        self._endpoint.stop()
        if self._parting is not None:
            self._parting.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lacking(self) -> int:
        return len(self._endpoint.session.lacking())

    def _defer(self, action: Callable[[], None]) -> None:
        def run() -> None:
            if not self._endpoint.closed:
                try:
                    action()
                except Closed:
                    self.stop()  # the party was closed here meanwhile; the link is about to leave it
                    return
                self._schedule()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the node is gone, and so is who would hear this
            self._loop.call_soon_threadsafe(run)

    def _take_in(self, act: Callable[[], None]) -> None:
        """A range has its turn, here or at a later moment of the loop."""
        if self._endpoint.closed:
            return
        if self._endpoint.busy:
            act()  # within `receive` or `_tick`: they take care of the rest
            return

        def take_in() -> None:
            try:
                act()
            except Closed:
                self.stop()  # the party was closed here meanwhile; the link is about to leave it
                return
            self._schedule()

        self._link.node.guarded(self._link, take_in)

    def _send(self, frame: Frame) -> None:
        allowed = outgoing(self._flow, frame)
        if allowed is not None:
            if isinstance(allowed, Request):
                self._link.connection.expect_frame(allowed.bytes_max)
            self._link.connection.send(Sync(self._channel, encode_frame(allowed)))

    def _send_straight(self, written: Blocks) -> bool:
        """Send news in the thread that wrote it, which is not to be kept busy with many links."""
        link, node = self._link, self._link.node
        if node.reviews_asked != node.reviews_done or node.limiter.known > STRAIGHT_LINKS_MAX:
            return False
        if outgoing(self._flow, written) is None:
            return False
        return link.connection.send_straight(Sync(self._channel, encode_frame(written)))

    def _heed(self, effect: Effect) -> None:
        link = self._link
        if isinstance(effect, Progress) and self.farewell is not None:
            if self.farewell.heard(effect):
                self._loop.call_soon(link.part, self._channel)
        elif isinstance(effect, Progress):
            if not self.newcomer:  # what it says to hold is nobody's business before it is a member
                link.node.peer.progressed(self.party, link.device, effect)
        elif isinstance(effect, Unobtainable):
            if effect.reason is RefusalReason.COMPACTED:
                link.node.peer.compacted(self.party, Cid(effect.evidence) if effect.evidence else None)
        elif isinstance(effect, Score):
            link.node.counters.scores[effect.misbehaviour] += 1
            log.warning("misbehaviour", extra={"device": link.device.hex(), "what": effect.misbehaviour})
        elif isinstance(effect, Close):
            link.connection.end(Ended(effect.reason, "replication", theirs=True))

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self._endpoint.session.wake_at()
        if wake is not None and not self._endpoint.closed:
            self._timer = self._loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._endpoint.tick()
        except Closed:
            self.stop()
            return
        self._schedule()
