"""An edge: a caching proxy between a root (or another edge) and thin clients. It holds no party and no feed.

    leaf --ws--> ThinServer --> Edge machine --ws--> up, one connection at a time; the next address when it is lost

An edge has a capability of its own, and lets in whoever shows one that is signed by the same issuer, has not expired
and is not in the index of revocations, which it holds live; while that is unknown, nobody is let in. What a client may
read is checked here, and by the kernel's rules (`coherence.guard`) for whom it speaks. What it may write is checked by the
root, which alone knows the type of every item: an edge passes on with Attach what a client showed, and the root judges the
client's batches by that. The edge's own rights to write, if it has any, are for nobody.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from echostore.kernel.coherence.cache import Cache
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import (
    UP,
    ChildOpened,
    Drop,
    Effect,
    Event,
    EvictRecord,
    LinkClosed,
    LinkId,
    Opening,
    Received,
    Refusal,
    Send,
    Unanswered,
    Writable,
)
from echostore.kernel.coherence.guard import Right
from echostore.kernel.coherence.messages import (
    Acquire,
    Attach,
    Denied,
    Grant,
    Message,
    RejectReason,
    Spec,
    Statement,
    Update,
)
from echostore.kernel.coherence.services import SERVICES_SPEC
from echostore.kernel.errors import EchoError, Refused
from echostore.mesh.coherence_numbers import Sent, ThinNumbers
from echostore.mesh.coherence_socket import (
    GOING_AWAY,
    NOT_ALLOWED,
    PROTOCOL,
    TRY_LATER,
    UNAUTHORISED,
    Door,
    OpeningRefused,
    ServedLink,
    ThinServer,
    grants_fields,
    keep_until_done,
)
from echostore.thin.link import CapabilityRefused, Link, Welcome, open_link
from echostore.wire.capabilities import Grants, ShownCredentials, encode_credential, read_capability
from echostore.wire.coherence import LinkFrame, decode_frame, encode_frame
from echostore.wire.coherence_parts import parts_of
from echostore.wire.index_spec import (
    FENCE_SPEC,
    REVOCATIONS_SPEC,
    IndexCodec,
    MalformedIndex,
    index_items,
    index_query,
    revoked_names,
)
from echostore.wire.leaf_signing import is_signed_by
from echostore.wire.signing import SigningKey
from echostore.wire.sync import MalformedFrame

_log = logging.getLogger("echostore.edge")

ASK_AGAIN_S: Final = 2.0
RETRY_S, RETRY_S_MAX = 0.2, 10.0
UP_BUFFER_MAX: Final = 10_000
"""Messages that wait for the way up. Beyond, no link below is read."""


@dataclass(frozen=True, slots=True)
class EdgeStatus:
    """How an edge is, as `echostore mesh` shows it."""

    up: str | None
    tick: int
    held: int
    links: int
    systems: int
    acquires: int
    upstream: int
    """Questions that were passed on."""
    refusals: tuple[tuple[str, int], ...]

    @property
    def hit_rate(self) -> float | None:
        return 1 - self.upstream / self.acquires if self.acquires else None


class EdgeNode:
    """Runs in one event loop: `start`, then until `close`."""

    def __init__(
        self, ups: Sequence[str], capability: bytes, *, now_ms: Callable[[], int], origins: Sequence[str] = ()
    ) -> None:
        self._ups = list(ups)
        self._capability = capability
        self.grants: Grants = read_capability(capability)
        self._key = SigningKey.generate()
        self._now_ms = now_ms
        self.server = ThinServer(self, now_ms=now_ms, origins=origins)
        self._codec = IndexCodec()
        self._credentials = ShownCredentials()
        self.edge = Edge(self._codec, proofs=self)
        self._welcome: Welcome | None = None
        self._up: Link | None = None
        self._up_url: str | None = None
        self._up_queue: deque[bytes] = deque()
        self._up_filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._revoked: frozenset[bytes] | None = None
        self.refusals: dict[str, int] = {}
        self.acquires = 0
        self.upstream = 0
        self._sent = Sent()
        self.refused_up: str | None = None
        """Why the root does not take this edge, once it said so."""

    async def start(self, host: str, port: int) -> str:
        url = await self.server.start(host, port)
        self._tasks = [asyncio.ensure_future(self._climb()), asyncio.ensure_future(self._ask_again())]
        return url

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.close()

    def status(self) -> EdgeStatus:
        counted = dict(self.refusals)
        for reason, count in self.server.refusals.items():
            counted[reason] = counted.get(reason, 0) + count
        return EdgeStatus(
            up=self._up_url,
            tick=self._cache.cur,
            held=len(self._cache.holdings),
            links=len(self.server.links),
            systems=len(self.edge.serving.routes),
            acquires=self.acquires,
            upstream=self.upstream,
            refusals=tuple(sorted(counted.items())),
        )

    def numbers(self) -> ThinNumbers:
        """What is counted, for monitors."""
        status = self.status()
        return ThinNumbers(
            links=status.links,
            systems=status.systems,
            indexes=status.held,
            hits=max(0, status.acquires - status.upstream),
            misses=status.upstream,
            updates=self._sent.updates,
            backpressure=self._sent.backpressure,
            refused=dict(status.refusals),
        )

    def mesh(self, last: int) -> dict[str, Any]:
        """What `echostore mesh` tells of this edge."""
        status = self.status()
        serving = self.edge.serving
        links = []
        for link in self.server.links.values():
            directory = serving.links.get(link.id)
            records = list(directory.records.values()) if directory is not None else []
            links.append(
                {
                    "link": link.id,
                    "party": link.grants.party.hex(),
                    "address": link.address,
                    "indexes": len(records),
                    "live": sum(record.live for record in records),
                    "tick": directory.sent if directory is not None else 0,
                    "buffered": link.buffered,
                    "capability": link.grants.id.hex(),
                }
            )
        held = {
            "party": self.grants.party.hex(),
            "up": status.up,
            "tick": status.tick,
            "held": status.held,
            "systems": status.systems,
            "asked": status.acquires,
            "passed_on": status.upstream,
            "hit_rate": status.hit_rate,
            "refused": dict(status.refusals),
        }
        return {"links": links, "indexes": [held], "trace": self.server.trace.last(last)}

    @property
    def _cache(self) -> Cache:
        return self.edge.cache

    @property
    def ready(self) -> bool:
        """Whether clients can be let in: the root is known, and so is what was revoked."""
        return self._welcome is not None and self._revoked is not None

    # the way up

    async def _climb(self) -> None:
        """Stay connected to one of the addresses above, whichever answers."""
        failures = 0
        while True:
            url = self._ups[failures % len(self._ups)]
            try:
                link = await open_link(url, self._capability, self._key)
            except CapabilityRefused as refused:
                self.refused_up = str(refused)
                _log.error("refused above", extra={"up": url, "why": str(refused)})
                failures += 1
            except EchoError as error:
                _log.info("not connected", extra={"up": url, "why": str(error)})
                failures += 1
            else:
                self.refused_up = None
                if await self._serve_up(link, url):
                    failures = 0
                else:
                    failures += 1
            await asyncio.sleep(min(RETRY_S_MAX, RETRY_S * 2 ** min(failures // len(self._ups), 10)))

    async def _serve_up(self, link: Link, url: str) -> bool:
        """One connection until it ends; whether it was any use."""
        self._take_root(link.welcome)
        self._up, self._up_url = link, url
        self._up_queue.clear()
        self.server.read_on()
        writer = asyncio.ensure_future(self._write_up(link))
        useful = False
        try:
            self._happens(Opening(UP, link.welcome.generation, secrets.randbits(63)))
            async for data in link.frames():
                frame = decode_frame(data)
                self.server.trace.add(UP, "in", frame.message, len(data))
                self._happens(Received(UP, frame.generation, frame.message))
                self._look_at_revocations()
                useful = True
        except MalformedFrame as error:
            self._count("malformed-from-above")
            _log.error("a frame from above can't be read", extra={"up": url, "why": str(error)})
        except CapabilityRefused as refused:
            self.refused_up = str(refused)
            self._send_all_away("the edge may not serve any more")
        except EchoError as error:
            _log.info("the way up was lost", extra={"up": url, "why": str(error)})
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._up = self._up_url = None
            self._happens(LinkClosed(UP))
            await link.close()
        return useful

    def _take_root(self, welcome: Welcome) -> None:
        """Another root has another clock: everything begins anew, here and below."""
        if self._welcome is not None and welcome.root != self._welcome.root:
            self._send_all_away("another root")
            self.edge = Edge(self._codec, proofs=self)
            self._revoked = None
        self._welcome = welcome

    def _send_all_away(self, why: str) -> None:
        for link in list(self.server.links.values()):
            link.close(GOING_AWAY, why)

    async def _write_up(self, link: Link) -> None:
        while True:
            await self._up_filled.wait()
            self._up_filled.clear()
            while self._up_queue:
                await link.send(self._up_queue.popleft())
                if len(self._up_queue) == UP_BUFFER_MAX // 2:
                    self.server.read_on()

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            self._review()
            if self._up_url is not None and (
                self._cache.opening is not None or self._cache.wanted or self.edge.attaching
            ):
                self._happens(Unanswered(UP))

    def _look_at_revocations(self) -> None:
        """Hold the index of revocations, and cut off whom it names."""
        cache = self._cache
        if cache.generation is None:
            return
        version = cache.read(REVOCATIONS_SPEC)
        if version is None or not cache.holdings.is_live(REVOCATIONS_SPEC):
            asked = cache.want(REVOCATIONS_SPEC)
            if asked is not None:
                self._perform([Send(UP, cache.generation, asked)])
        if version is None:
            return
        try:
            revoked = revoked_names(version.value)
        except MalformedIndex:
            self._count("malformed-from-above")
            return
        if revoked != self._revoked:
            self._revoked = revoked
            self._review()

    def _review(self) -> None:
        """Whether all who are here may still be."""
        for link in list(self.server.links.values()):
            why = self._why_not(link.grants)
            if why is not None:
                self._count(why)
                link.close(UNAUTHORISED, why)

    def _is_known(self, grants: Grants) -> bool:
        """Whether the edge knows anything of who issued a capability."""
        return grants.issuer in (self.grants.issuer, *self.grants.sealers)

    def _why_not(self, grants: Grants) -> str | None:
        if grants.expires_ms <= self._now_ms():
            return "expired"
        if self._revoked is not None and (grants.name in self._revoked or grants.id in self._revoked):
            return "revoked"
        return None

    # for the machine: see kernel.coherence.guard.Proofs

    def of_link(self, link: LinkId) -> Right | None:
        found = self.server.links.get(link)
        return None if found is None else Right(found.key, found.grants.edge, found.grants.messages)

    def shown(self, credential: bytes) -> Right | None:
        found = self._credentials.read(credential)
        if found is None:
            return None
        grants, key = found
        good = grants.party == self.grants.party and self._is_known(grants) and self._why_not(grants) is None
        return Right(key, grants.edge, grants.messages) if good else None

    def signed(self, message: Update | Statement, key: bytes) -> bool:
        return is_signed_by(message, key)

    # for the server: see LinkOwner

    def admit(self, grants: Grants) -> Door:
        welcome = self._welcome
        if welcome is None or self._revoked is None:
            raise OpeningRefused(TRY_LATER, "not-ready", "the edge has not reached its root yet")
        if grants.party != self.grants.party:
            raise OpeningRefused(NOT_ALLOWED, "no-party", "the party is not served here")
        if not self._is_known(grants):
            raise OpeningRefused(NOT_ALLOWED, "issuer-unknown", "the edge knows nothing of who issued the capability")
        why = self._why_not(grants)
        if why is not None:
            raise OpeningRefused(UNAUTHORISED, why, f"the capability is worth nothing here: {why}")
        fields: dict[str, Any] = {
            **grants_fields(grants),
            "root": welcome.root.hex(),
            "tick": self._cache.cur,
            "feed": welcome.feed.hex(),
            "device": str(welcome.rights.get("device", "")),
            "sign": True,  # the root takes no edge's word for what a leaf wrote
        }
        return Door(fields)

    def opened(self, link: ServedLink) -> None:
        self._happens(ChildOpened(link.id, link.generation))

    def closed(self, link: ServedLink) -> None:
        self._happens(LinkClosed(link.id))

    def writable(self, link: ServedLink, *, writable: bool) -> None:
        asyncio.get_running_loop().call_soon(self._happens, Writable(link.id, writable))

    def may_read(self, link: ServedLink) -> bool:
        return len(self._up_queue) < UP_BUFFER_MAX

    def received(self, link: ServedLink, frame: LinkFrame) -> None:
        message = frame.message
        if isinstance(message, Acquire):
            reason = self._unreadable(message.spec, link.grants)
            if reason is not None:
                self._count(reason)
                link.send(Denied(message.spec, reason))
                return
            self.acquires += 1
        elif isinstance(message, Attach) and not message.turn:
            message = replace(message, credential=encode_credential(link.shown))
        self._happens(Received(link.id, frame.generation, message))

    def _unreadable(self, spec: Spec, grants: Grants) -> RejectReason | None:
        if spec.startswith(SERVICES_SPEC):
            return None if grants.messages or spec.startswith(FENCE_SPEC) else RejectReason.NOT_ALLOWED
        if spec == REVOCATIONS_SPEC:
            return None
        try:
            asked = index_query(spec)
        except MalformedIndex:
            return RejectReason.MALFORMED
        if asked.item is not None and asked.party == grants.party and grants.read:
            return None  # what type the item has is seen in its value, see `_shown`
        return None if grants.may_read(asked) else RejectReason.NOT_ALLOWED

    def _shown(self, link: ServedLink, message: Message) -> Message:
        """An item of a type that the client may not read is not shown to it, and neither is one that is not there."""
        if not isinstance(message, Grant) or message.value is None or any(each.all_items for each in link.grants.read):
            return message
        if message.spec.startswith(SERVICES_SPEC) or message.spec == REVOCATIONS_SPEC:
            return message
        asked = index_query(message.spec)
        if asked.item is None:
            return message
        items = index_items(message.value)
        if len(items) == 1 and link.grants.may_read(asked, items[0].type):
            return message
        self._count(RejectReason.NOT_ALLOWED)
        self._perform(self.edge.receive(EvictRecord(link.id, message.spec)))
        return Denied(message.spec, RejectReason.NOT_ALLOWED)

    # effects

    def _happens(self, event: Event) -> None:
        self._perform(self.edge.receive(event))
        self._perform(self.edge.serving.tell())

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(link, generation, message) if link == UP:
                    self._send_up(generation, message)
                case Send(link, _, message):
                    self._send_down(link, message)
                case Refusal(_, reason, _):
                    self._count(reason)
                case Drop(link, detail):
                    self._drop(link, detail)
                case _:
                    raise AssertionError(f"{effect} is not for an edge's host")

    def _send_up(self, generation: int, message: Message) -> None:
        self.upstream += isinstance(message, Acquire) and message.spec != REVOCATIONS_SPEC
        for part in parts_of(message):
            data = encode_frame(LinkFrame(generation, part))
            self.server.trace.add(UP, "out", part, len(data))
            self._up_queue.append(data)
        self._up_filled.set()

    def _send_down(self, id: LinkId, message: Message) -> None:
        link = self.server.links.get(id)
        if link is None:
            return
        self._sent.count(message)
        try:
            link.send(self._shown(link, message))
        except MalformedIndex:
            self._count("malformed-from-above")
            if isinstance(message, Grant):
                link.send(Denied(message.spec, RejectReason.MALFORMED))

    def _drop(self, id: LinkId, detail: str) -> None:
        link = self.server.links.get(id)
        if link is not None:
            self._count("dropped")
            link.close(PROTOCOL, detail)
        elif id == UP:
            self._count("dropped-above")
            if self._up is not None:
                keep_until_done(asyncio.ensure_future(self._up.close(detail)))

    def _count(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1


def check_capability(data: bytes) -> Grants:
    """An edge's own capability; Refused when it can't serve anybody with it."""
    grants = read_capability(data)
    if not grants.edge:
        raise Refused(
            "this capability is not for an edge: it may not pass on what others read and write",
            next_step="Issue one with --edge.",
        )
    if not any(each.all_items for each in grants.read):
        raise Refused(
            "an edge reads for all its clients, and this capability reads some types only",
            next_step="Issue one without --read.",
        )
    return grants
