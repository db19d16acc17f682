"""Looking for somebody who knows an identity, among strangers: how `identity recover` finds its way on a local network.

    machine that recovers                               every peer that announces itself on the local network
    Seek  HMAC(connection, identity), proof   ---->     is it an identity of a party of mine, and has its key signed this?
                                              <----     Seek  another HMAC if so, and random bytes if not
    Introduction, as with any member          ---->

Who does not know the identity's key already sees random bytes, and a device key that was made on that machine: neither who
is looking nor what for. Who knows it (members of its parties, and whoever they told it) learns that it is being recovered. Who
knows it and lacks the identity's secret gets random bytes too, and so learns nothing of who is whose member.

Lives in the node's thread.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from hmac import compare_digest
from typing import TYPE_CHECKING, Final

from echostore.kernel.ids import DeviceKey, IdentityKey
from echostore.mesh.connection import ConnectionFailed, Ended
from echostore.mesh.node import Link
from echostore.wire.mesh import TAG_BYTES, Seek, found_tag, seek_bytes, seek_tag
from echostore.wire.signing import SigningKey, verify
from echostore.wire.sync import MalformedFrame

if TYPE_CHECKING:
    from echostore.peer.network import Network
    from echostore.peer.peer import Peer

log = logging.getLogger("echostore.lan")

SEEKS_MAX: Final = 4
"""Questions on one connection: each costs a look at every member of every party."""
ANSWER_S: Final = 5.0
STRANGERS_MAX: Final = 64
"""Addresses that are dialled in one search: a network full of announcements is no reason to dial them all."""
GRACE_S: Final = 1.0
"""How long others are waited for when somebody was found: several know more parties than one."""
LOOK_S: Final = 0.05


class Seeking:
    """Answers who is looking for an identity, and looks for one."""

    def __init__(self, peer: "Peer", network: "Network") -> None:
        self._peer, self._network = peer, network
        self._asked: Counter[Link] = Counter()
        self._answers: dict[Link, asyncio.Future[bytes]] = {}

    # from the node

    def receive(self, link: Link, frame: Seek) -> None:
        if not frame.proof:
            answer = self._answers.pop(link, None)
            if answer is not None and not answer.done():
                answer.set_result(frame.tag)
            return
        self._asked[link] += 1
        if self._asked[link] > SEEKS_MAX:
            raise MalformedFrame("looking for identities without end")
        identity = self._known(link, frame)
        tag = secrets.token_bytes(TAG_BYTES) if identity is None else found_tag(_hash(link), identity)
        link.connection.send(Seek(tag))

    def closed(self, link: Link) -> None:
        self._asked.pop(link, None)
        answer = self._answers.pop(link, None)
        if answer is not None and not answer.done():
            answer.set_result(b"")

    def _known(self, link: Link, frame: Seek) -> IdentityKey | None:
        """The identity that is looked for, if it is known here and has signed for the device that asks."""
        for identity in self._network.own_devices.identities():
            if compare_digest(seek_tag(_hash(link), identity), frame.tag):
                signed = seek_bytes(_hash(link), identity, link.device)
                return identity if verify(identity, signed, frame.proof) else None
        return None

    # looking

    async def find(self, key: SigningKey, *, seconds: float, interfaces: Sequence[str]) -> list[tuple[str, DeviceKey]]:
        """Where somebody on the local network knows the identity of this key: addresses and devices. Nobody is told
        that does not know it already, and nothing is announced."""
        from echostore.mesh.lan_mdns import LanDiscovery

        loop = asyncio.get_running_loop()
        search = LanDiscovery(self._network.node, addresses=list, parties=list, interfaces=interfaces)
        asking: dict[tuple[str, int], asyncio.Task[tuple[str, DeviceKey] | None]] = {}
        ends_at = loop.time() + seconds
        try:
            await search.start()
            while loop.time() < ends_at:
                for address in search.neighbours.addresses():
                    if address not in asking and len(asking) < STRANGERS_MAX:
                        asking[address] = asyncio.create_task(self._ask(*address, key))
                if any(task.done() and task.result() for task in asking.values()):
                    ends_at = min(ends_at, loop.time() + GRACE_S)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in asking.values():
                task.cancel()
            done = await asyncio.gather(*asking.values(), return_exceptions=True)
            await search.close()
        return [each for each in done if isinstance(each, tuple)]

    async def _ask(self, host: str, port: int, key: SigningKey) -> tuple[str, DeviceKey] | None:
        node = self._network.node
        before = set(node.links)
        try:
            link = await node.dial(host, port)
        except ConnectionFailed as failure:
            log.info("a neighbour does not answer", extra={"address": f"{host}:{port}", "why": str(failure)})
            return None
        if await self._knows(link, key):
            return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), link.device
        if link.device not in before and not link.channels:
            link.connection.end(Ended("closing"))
        return None

    async def _knows(self, link: Link, key: SigningKey) -> bool:
        """Whether the device at the other end knows the identity of a key."""
        identity = IdentityKey(key.public)
        own = DeviceKey(self._peer.device)
        answer = self._answers[link] = asyncio.get_running_loop().create_future()
        proof = key.sign(seek_bytes(_hash(link), identity, own))
        link.connection.send(Seek(seek_tag(_hash(link), identity), proof))
        try:
            async with asyncio.timeout(ANSWER_S):
                return compare_digest(await answer, found_tag(_hash(link), identity))
        except TimeoutError:
            return False
        finally:
            self._answers.pop(link, None)


def _hash(link: Link) -> bytes:
    return link.connection.handshake_hash
