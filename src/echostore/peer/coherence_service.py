"""Thin clients at a peer: a WebSocket server in a thread of its own, and a root for each party that is asked for.

    peer.serve_thin("127.0.0.1:0")  ->  ws://127.0.0.1:40123/thin

A client names its party by its capability. The party's root is made with its first client and kept until the service
ends or the party is closed. What a client may do is checked when it connects, with each question, with each operation,
and again when something is revoked, when somebody's role changes and when time passes.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from echostore.kernel.coherence.events import LinkId
from echostore.kernel.coherence.messages import Message
from echostore.kernel.errors import Closed, EchoError, NotFound, Refused, TimedOut, Unreachable, UsageError
from echostore.kernel.ids import PartyKey
from echostore.mesh.coherence_numbers import Sent, ThinNumbers, added
from echostore.mesh.coherence_socket import (
    FAILED,
    GOING_AWAY,
    NOT_ALLOWED,
    PROTOCOL,
    UNAUTHORISED,
    Door,
    OpeningRefused,
    ServedLink,
    ThinServer,
    grants_fields,
)
from echostore.mesh.web_rules import BadOrigin
from echostore.peer.coherence_ledger import ever_served
from echostore.peer.coherence_root import CoherenceRoot
from echostore.peer.network import parse_address
from echostore.wire.capabilities import Grants
from echostore.wire.coherence import LinkFrame

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

_log = logging.getLogger("echostore.thin")
_T = TypeVar("_T")

CALL_S: Final = 30.0
"""How long a call into the service's thread may take."""

SWEEP_S: Final = 5.0
"""How often silent services, idle indexes and expired capabilities are looked for."""

UNAUTHORISED_REASONS: Final = frozenset({"expired", "revoked"})


@dataclass(frozen=True, slots=True)
class ThinLink:
    """A connected thin client, as `echostore mesh` shows it."""

    link: str
    party: str
    address: str
    indexes: int
    live: int
    sent_tick: int
    buffered: int
    bytes_sent: int
    bytes_received: int
    capability: str
    writable: bool


@dataclass(frozen=True, slots=True)
class ThinIndexes:
    """The root of one party, as `echostore mesh` shows it."""

    party: str
    tick: int
    watched: int
    systems: int
    acquires: int
    evaluations: int
    refusals: tuple[tuple[str, int], ...]
    mail_out: int = 0
    """Messages that wait for other roots,"""
    mail_in: int = 0
    """and messages of other roots that wait for systems here."""
    roots: tuple[str, ...] = ()
    """Other roots that are connected."""

    @property
    def hit_rate(self) -> float | None:
        """Questions that were answered from what is held."""
        return 1 - self.evaluations / self.acquires if self.acquires else None


class ThinService:
    """Owns the server, its thread and the roots."""

    def __init__(self, peer: "Peer", address: str, origins: Sequence[str] = ()) -> None:
        self._peer = peer
        host, port = parse_address(address)
        try:
            self.server = ThinServer(self, now_ms=peer.now_ms, origins=origins)
        except BadOrigin as error:
            raise UsageError(str(error), next_step="Like https://app.example, without a path.") from None
        self._roots: dict[PartyKey, CoherenceRoot] = {}
        self._root_of: dict[LinkId, CoherenceRoot] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._sent = Sent()
        self._past = ThinNumbers()
        """What roots counted that are no more."""
        self._thread = threading.Thread(target=self._run, name="echostore-thin", daemon=True)
        self._thread.start()
        try:
            self.url = self.call(self.server.start(host, port))
        except EchoError:
            raise
        except OSError as error:
            self._stop_loop()
            raise Unreachable(
                f"thin clients can't be served at {address}: {error.strerror or error}",
                next_step="Name another address.",
            ) from None
        self._loop.call_soon_threadsafe(self._sweep_later)

    def close(self) -> None:
        """Send all clients away and end the thread. Never called while the peer's lock is held."""
        if self._closed:
            return
        self.call(self.server.close())
        self._closed = True
        self.call_soon(self._close_roots)
        self._stop_loop()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run work in the service's thread and wait for it. Not inside a batch, for which that thread may wait."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(CALL_S)
        except EchoError:
            raise
        except TimeoutError:
            future.cancel()
            raise TimedOut(f"the service for thin clients did not answer in {CALL_S:g} s") from None

    def call_soon(self, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """In the service's thread; from any thread. After the end of the service, nothing happens."""
        try:
            if delay_s:
                self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, action)
            else:
                self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop has ended: there is nobody left to tell
            if not self._closed:
                raise

    def links(self) -> list[ThinLink]:
        """Who is connected."""

        async def collect() -> list[ThinLink]:
            return [self._shown(link) for link in self.server.links.values()]

        return self.call(collect())

    def indexes(self) -> list[ThinIndexes]:
        """What the roots hold."""

        async def collect() -> list[ThinIndexes]:
            return [
                ThinIndexes(
                    party=party.hex(),
                    tick=root.tick,
                    watched=len(root.watch),
                    systems=len(root.root.serving.routes),
                    acquires=root.acquires,
                    evaluations=root.watch.evaluations,
                    refusals=tuple(sorted(root.refusals.items())),
                    mail_out=len(root.root.courier.out),
                    mail_in=len(root.root.courier.where),
                    roots=tuple(sorted(each.hex() for each in root.root.courier.met)),
                )
                for party, root in self._roots.items()
            ]

        return self.call(collect())

    def refusals(self) -> dict[str, int]:
        """Connections and frames that were refused, by reason."""

        async def collect() -> dict[str, int]:
            return dict(sorted(self.server.refusals.items()))

        return self.call(collect())

    def numbers(self) -> ThinNumbers:
        """What is counted, for monitors."""

        async def collect() -> ThinNumbers:
            served = ThinNumbers(
                links=len(self.server.links),
                updates=self._sent.updates,
                backpressure=self._sent.backpressure,
                refused=dict(self.server.refusals),
            )
            return added([served, self._past, *(root.numbers() for root in self._roots.values())])

        return self.call(collect())

    def trace(self, last: int = 100) -> list[tuple[int, str, str, str, int]]:
        """The last messages: time, link, direction, kind, bytes."""

        async def collect() -> list[tuple[int, str, str, str, int]]:
            return self.server.trace.last(last)

        return self.call(collect())

    # for the server: see mesh.coherence_socket.LinkOwner

    def admit(self, grants: Grants) -> Door:
        try:
            party = self._peer.party(grants.party)
            why = party.capabilities.why_not(grants)
        except (NotFound, Refused, Closed):
            raise OpeningRefused(NOT_ALLOWED, "no-party", "the party is not served here") from None
        if why is not None:
            code = UNAUTHORISED if why in UNAUTHORISED_REASONS else NOT_ALLOWED
            raise OpeningRefused(code, why, f"the capability is worth nothing here: {why}")
        root = self._root(party)
        fields = {
            **grants_fields(grants),
            "root": root.system.root.hex(),
            "tick": root.tick,
            "feed": root.feed.hex(),
            "device": root.device.hex(),
        }
        return Door(fields)

    def opened(self, link: ServedLink) -> None:
        root = self._root(self._peer.party(link.grants.party))
        self._root_of[link.id] = root
        self._guarded(root, lambda: root.open_link(link.id, link.generation, link.grants, link.key))

    def closed(self, link: ServedLink) -> None:
        root = self._root_of.pop(link.id, None)
        if root is not None:
            self._guarded(root, lambda: root.close_link(link.id))

    def received(self, link: ServedLink, frame: LinkFrame) -> None:
        root = self._root_of.get(link.id)
        if root is not None:
            self._guarded(root, lambda: root.receive(link.id, frame.generation, frame.message))

    def writable(self, link: ServedLink, *, writable: bool) -> None:
        root = self._root_of.get(link.id)
        if root is not None:
            self._loop.call_soon(self._guarded, root, lambda: root.writable(link.id, writable))

    def may_read(self, link: ServedLink) -> bool:
        root = self._root_of.get(link.id)
        return root is None or not root.full

    # roots

    def _root(self, party: "Party") -> CoherenceRoot:
        found = self._roots.get(party.key)
        if found is None or found.party is not party or party.runtime.closed:
            if found is not None:
                self._fail(found, "the party was closed")
            found = CoherenceRoot(party, _RootOutlet(self, party.key))
            self._roots[party.key] = found
            self._meet_roots(found)
            for told in (party.runtime.processor.on_admission, party.runtime.processor.on_revocation):
                told.append(self._review_soon)
        return found

    # other roots; from the mesh's thread, see peer.coherence_roots

    def _meet_roots(self, root: CoherenceRoot) -> None:
        if self._peer.on_network:
            network, party, name = self._peer.network, root.party.key, root.system.root
            network.soon(lambda: network.root_lines.serve(self, party, name))

    def wake(self, party: PartyKey, *, only_if_used: bool = False) -> None:
        """Another root of a party is there: have one here too. `only_if_used`: if thin clients have ever been here."""

        def make() -> None:
            try:
                found = self._peer.party(party)
                if party in self._roots:  # it may be older than the network
                    self._meet_roots(self._root(found))
                elif not only_if_used or ever_served(found):
                    self._root(found)
            except EchoError as error:
                _log.info("a party is not served", extra={"party": party.hex(), "why": str(error)})

        self.call_soon(make)

    def root_met(self, party: PartyKey, root: bytes) -> None:
        self.later(party, 0.0, lambda: self._roots[party].root_met(root))

    def root_parted(self, party: PartyKey, root: bytes) -> None:
        self.later(party, 0.0, lambda: self._roots[party].root_parted(root))

    def from_root(self, party: PartyKey, root: bytes, message: Message) -> None:
        self.later(party, 0.0, lambda: self._roots[party].from_root(root, message))

    def aside(self, party: PartyKey, root: bytes, message: Message) -> None:
        if self._peer.on_network:
            network = self._peer.network
            network.soon(lambda: network.root_lines.send(party, root, message))

    def _guarded(self, root: CoherenceRoot, action: Callable[[], None]) -> None:
        """A root whose party is closed or whose disk fails ends its own links, and no others."""
        if self._roots.get(root.party.key) is not root:
            return
        try:
            action()
        except EchoError as error:
            _log.error("a root of thin clients failed", extra={"party": root.party.key.hex(), "why": str(error)})
            self._fail(root, str(error))
        if not root.full:
            self.server.read_on()

    def _fail(self, root: CoherenceRoot, why: str) -> None:
        self._forget(root)
        self.server.read_on()
        for id, other in list(self._root_of.items()):
            if other is root:
                del self._root_of[id]
                link = self.server.links.get(id)
                if link is not None:
                    link.close(GOING_AWAY if root.party.runtime.closed else FAILED, why)

    def _forget(self, root: CoherenceRoot) -> None:
        if self._roots.get(root.party.key) is root:
            del self._roots[root.party.key]
            last = root.numbers()
            self._past = added([self._past, replace(last, systems=0, indexes=0)])
        root.close()
        if self._peer.on_network:
            network, party = self._peer.network, root.party.key
            network.soon(lambda: network.root_lines.withdraw(self, party))
        processor = root.party.runtime.processor
        for told in (processor.on_admission, processor.on_revocation):
            if self._review_soon in told:
                told.remove(self._review_soon)

    def _close_roots(self) -> None:
        for root in list(self._roots.values()):
            self._forget(root)

    def send(self, link: LinkId, message: Message) -> None:
        found = self.server.links.get(link)
        if found is not None:
            self._sent.count(message)
            found.send(message)

    def drop(self, link: LinkId, detail: str) -> None:
        found = self.server.links.get(link)
        if found is not None:
            self.server.count("dropped")
            found.close(PROTOCOL, detail)

    def later(self, party: PartyKey, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            root = self._roots.get(party)
            if root is not None:
                self._guarded(root, action)

        self.call_soon(act, delay_s)

    # what ends a link from above

    def _end(self, link: ServedLink, why: str) -> None:
        """At once: nothing more goes to it or comes from it."""
        self.server.count(why)
        root = self._root_of.pop(link.id, None)
        if root is not None:
            self._guarded(root, lambda: root.close_link(link.id))
        link.close(UNAUTHORISED, why)

    def _review_soon(self) -> None:
        self.call_soon(self._review)

    def _review(self) -> None:
        """Whether all who are here may still be."""
        for link in list(self.server.links.values()):
            root = self._root_of.get(link.id)
            if root is not None and not root.party.runtime.closed:
                why = root.party.capabilities.why_not(link.grants)
                if why is not None:
                    self._end(link, why)

    def _sweep_later(self) -> None:
        self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        for root in list(self._roots.values()):
            self._guarded(root, root.sweep)
        self._review()
        self._sweep_later()

    def _shown(self, link: ServedLink) -> ThinLink:
        root = self._root_of.get(link.id)
        directory = root.root.serving.links.get(link.id) if root is not None else None
        records = directory.records.values() if directory is not None else ()
        return ThinLink(
            link=link.id,
            party=link.grants.party.hex(),
            address=link.address,
            indexes=len(records),
            live=sum(record.live for record in records),
            sent_tick=directory.sent if directory is not None else 0,
            buffered=link.buffered,
            bytes_sent=link.bytes_sent,
            bytes_received=link.bytes_received,
            capability=link.grants.id.hex(),
            writable=link.writable,
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _RootOutlet:
    """The way out of one root."""

    def __init__(self, service: ThinService, party: PartyKey) -> None:
        self._service, self._party = service, party

    def send(self, link: LinkId, generation: int, message: Message) -> None:
        self._service.send(link, message)

    def drop(self, link: LinkId, detail: str) -> None:
        self._service.drop(link, detail)

    def aside(self, root: bytes, message: Message) -> None:
        self._service.aside(self._party, root, message)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._service.later(self._party, delay_s, action)
