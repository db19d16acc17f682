"""The ways between the roots of one party: over the mesh, to devices of members that serve thin clients too.

    Roots(channel, root)         this root answers here; said when a channel opens, and when a root begins to serve
    Roots(channel, root, frame)  a message of the coherence protocol, from that root to the one at the other end

The name of a root is a hash of the party and of the key it writes with, so a device can only speak as a root whose feed
is its own. Nothing is passed on for others: two roots that are not connected wait until they are.

Runs in the mesh's thread; roots live in that of their service.
"""

from typing import TYPE_CHECKING, Final

from echostore.kernel.coherence.messages import Connectivity, Message, SystemId
from echostore.kernel.errors import EchoError
from echostore.kernel.ids import DeviceKey, PartyKey
from echostore.kernel.party.credentials import FeedKind
from echostore.mesh.node import Link
from echostore.peer.coherence_ledger import root_system
from echostore.wire.coherence import decode_frame, message_bytes
from echostore.wire.mesh import MeshFrame, Roots

if TYPE_CHECKING:
    from echostore.peer.coherence_service import ThinService
    from echostore.peer.network import Network
    from echostore.peer.peer import Peer

ROOTS_PER_LINK_MAX: Final = 1024
"""Parties times feeds of one device that serve as roots."""


class RootLines:
    """Who is met, of all parties. A mesh.node.FrameHandler."""

    def __init__(self, peer: "Peer", network: "Network") -> None:
        self._peer, self._network = peer, network
        self._served: dict[PartyKey, tuple[ThinService, bytes]] = {}
        """The parties that have a root here, with its service and name."""
        self._met: dict[tuple[PartyKey, bytes], Link] = {}
        self._greeted: set[tuple[Link, PartyKey, bytes]] = set()
        self.refused = 0

    # from the service, by `Network.soon`

    def serve(self, service: "ThinService", party: PartyKey, root: bytes) -> None:
        """A root begins to serve here."""
        self._served[party] = (service, root)
        for link in list(self._network.node.links.values()):
            self._greet(link, party)
        for known, other in self._met:
            if known == party:
                service.root_met(party, other)

    def withdraw(self, service: "ThinService", party: PartyKey) -> None:
        """It serves no more."""
        known = self._served.get(party)
        if known is None or known[0] is not service:
            return
        del self._served[party]
        gone = message_bytes(Connectivity(SystemId(known[1]), affects_all_services=True))
        for link in list(self._network.node.links.values()):
            channel = link.channel_for(party)
            if channel is not None and (link, party, known[1]) in self._greeted:
                self._greeted.discard((link, party, known[1]))
                link.connection.send(Roots(channel, known[1], gone))

    def send(self, party: PartyKey, to: bytes, message: Message) -> None:
        link, known = self._met.get((party, to)), self._served.get(party)
        channel = None if link is None else link.channel_for(party)
        if link is None or channel is None or known is None:
            return  # it was met and is gone: who sent this hears so, and keeps it
        link.connection.send(Roots(channel, known[1], message_bytes(message)))

    # from the mesh

    def opened(self, link: Link) -> None:
        """A party is replicated with a member from now on."""
        services = self._peer.thin_services
        for channel in list(link.channels.values()):
            if channel.for_member:
                if channel.party in self._served:
                    self._greet(link, channel.party)
                elif services:
                    services[0].wake(channel.party, only_if_used=True)

    def receive(self, link: Link, frame: MeshFrame) -> None:
        assert isinstance(frame, Roots), f"{frame} is not for roots"
        party = link.party_of(frame.channel)
        if party is None or not self._is_of(party, frame.root, link.device):
            self.refused += 1
            return
        if not frame.frame:
            self._hello(link, party, frame.root)
            return
        message = decode_frame(frame.frame).message
        if isinstance(message, Connectivity) and message.system == SystemId(frame.root):
            self._part(party, frame.root, link)
            return
        known = self._served.get(party)
        if known is not None and self._met.get((party, frame.root)) is link:
            known[0].from_root(party, frame.root, message)

    def closed(self, link: Link) -> None:
        self._greeted = {each for each in self._greeted if each[0] is not link}
        for (party, root), other in list(self._met.items()):
            if other is link:
                self._part(party, root, link)

    # inside

    def _greet(self, link: Link, party: PartyKey) -> None:
        """Say once on each channel which root answers here."""
        channel, (_, root) = link.channel_for(party), self._served[party]
        if channel is not None:
            self._greeted.add((link, party, root))
            link.connection.send(Roots(channel, root))

    def _hello(self, link: Link, party: PartyKey, root: bytes) -> None:
        if sum(other is link for other in self._met.values()) >= ROOTS_PER_LINK_MAX:
            self.refused += 1
            return
        self._met[party, root] = link
        known = self._served.get(party)
        if known is None:
            services = self._peer.thin_services
            if services:
                services[0].wake(party)
            return
        if (link, party, known[1]) not in self._greeted:
            self._greet(link, party)
        known[0].root_met(party, root)

    def _part(self, party: PartyKey, root: bytes, link: Link) -> None:
        if self._met.get((party, root)) is not link:
            return
        del self._met[party, root]
        known = self._served.get(party)
        if known is not None:
            known[0].root_parted(party, root)

    def _is_of(self, party: PartyKey, root: bytes, device: DeviceKey) -> bool:
        """Whether a root of this name writes with a key of the device."""
        if root_system(party, device).root == root:
            return True
        try:
            with self._peer.lock:
                feeds = self._peer.held(party).runtime.processor.admission.feeds
        except EchoError:  # closed here meanwhile: whoever asks for it is told by the channel
            return False
        own = [each.feed for each in feeds if each.device == device and each.kind is FeedKind.DATA]
        return any(root_system(party, feed).root == root for feed in own)
