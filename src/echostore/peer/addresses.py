"""Where other devices take connections, as they told: so that one lost address is not the loss of everybody.

    member        ---->   its own addresses, once a party is shared
    own device    ---->   all that it knows: other devices of the identity, and members of its parties
    recovery      ---->   the same, to a device that the identity's key has signed for

Used for tickets that any admin honours, for recovery, and to find the other devices of one identity. An address is a
hint: who answers there has to show the key of the device. Only own devices are dialled by themselves; a party of a
hundred would else become ten thousand connections.
"""

from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import DeviceKey, IdentityKey, PartyKey
from echostore.mesh.node import Link
from echostore.mesh.ticket import ADDRESSES_MAX
from echostore.wire.mesh import REACH_DEVICES_MAX, MeshFrame, Reach
from echostore.wire.sync import MalformedFrame

if TYPE_CHECKING:
    from echostore.peer.network import Network
    from echostore.peer.peer import Peer

FRAMES_MAX: Final = 1_000
"""On one connection."""
TOLD_ADDRESSES_MAX: Final = 8
_SETTING: Final = "told_addresses"


class Addresses:
    """What devices said of where they are. Handles `Reach` frames, in the node's thread."""

    def __init__(self, peer: "Peer", network: "Network") -> None:
        self._peer, self._network = peer, network
        self._told: dict[Link, Reach] = {}
        self._frames: dict[Link, int] = {}

    def known(self) -> dict[DeviceKey, tuple[str, ...]]:
        """Addresses by device, the last told first."""
        from echostore.peer.inviting import ADDRESSES_SETTING, SOMEBODY

        with self._peer.lock:
            found: dict[DeviceKey, tuple[str, ...]] = {}
            for setting in (_SETTING, ADDRESSES_SETTING):
                for device, addresses in self._peer.meta.setting(setting, {}).items():
                    if device == SOMEBODY:
                        continue
                    key = DeviceKey(bytes.fromhex(device))
                    found[key] = tuple(dict.fromkeys((*found.get(key, ()), *addresses)))
            return found

    def of_admins(self, party: PartyKey) -> list[str]:
        """Addresses of other devices that may admit members to a party."""
        from echostore.kernel.party.credentials import Role

        with self._peer.lock:
            machine = self._peer.held(party).runtime.processor.membership.machine
            admins = {member.identity for member in machine.members if member.role and member.role >= Role.ADMIN}
            devices = [each.device for each in machine.devices if each.identity in admins and not each.revoked]
        known = self.known()
        return [address for device in devices if device != self._peer.device for address in known.get(device, ())]

    # telling

    def tell_own(self, link: Link) -> None:
        """A party is shared with the device: it may know where this one is."""
        own = self._own()
        if own.addresses and link not in self._told:
            self._told[link] = own
            link.connection.send(own)

    def tell_members(self) -> None:
        """This device listens at one address more."""
        for link in list(self._network.node.links.values()):
            if link.with_member:
                self._told.pop(link, None)
                self.tell_own(link)

    def tell_all(self, link: Link, identity: IdentityKey) -> None:
        """To a device of this identity, or one that is being recovered: where the members of its parties are."""
        near: set[DeviceKey] = set()
        with self._peer.lock:
            for party in self._peer.held_parties():
                machine = party.runtime.processor.membership.machine
                if any(member.identity == identity and member.role for member in machine.members):
                    near |= {device.device for device in machine.devices if not device.revoked}
        told = {device: each[:TOLD_ADDRESSES_MAX] for device, each in self.known().items() if device in near}
        told.update(self._own().addresses)
        told.pop(link.device, None)
        reach = Reach(dict(list(told.items())[-REACH_DEVICES_MAX:]))
        if reach.addresses and self._told.get(link) != reach:
            self._told[link] = reach
            link.connection.send(reach)

    def _own(self) -> Reach:
        from echostore.peer.reachable import reachable_addresses

        addresses = reachable_addresses(self._network.node.addresses)[:TOLD_ADDRESSES_MAX]
        return Reach({DeviceKey(self._peer.device): addresses} if addresses else {})

    # hearing

    def receive(self, link: Link, frame: MeshFrame) -> None:
        assert isinstance(frame, Reach)
        self._frames[link] = self._frames.get(link, 0) + 1
        if self._frames[link] > FRAMES_MAX:
            raise MalformedFrame("addresses without end")
        mine = self._network.own_devices.trusts(link)
        heard = {
            device: addresses[:TOLD_ADDRESSES_MAX]
            for device, addresses in frame.addresses.items()
            if device != self._peer.device and (mine or (device == link.device and link.with_member))
        }
        for addresses in heard.values():
            _check(addresses)
        self._keep({device: addresses for device, addresses in heard.items() if addresses})

    def closed(self, link: Link) -> None:
        self._told.pop(link, None)
        self._frames.pop(link, None)

    def _keep(self, heard: dict[DeviceKey, tuple[str, ...]]) -> None:
        with self._peer.lock:
            kept = dict(self._peer.meta.setting(_SETTING, {}))
            before = dict(kept)
            for device, addresses in heard.items():
                kept.pop(device.hex(), None)
                kept[device.hex()] = list(addresses)
            for oldest in list(kept)[: max(0, len(kept) - REACH_DEVICES_MAX)]:
                del kept[oldest]
            if kept != before:
                self._peer.meta.set_setting(_SETTING, kept)
            own = self._network.own_devices.known()
        for device, addresses in heard.items():
            if device in own and device not in self._network.node.links:
                for address in addresses:
                    self._network.keep_connecting(address, device=device)


def _check(addresses: tuple[str, ...]) -> None:
    from echostore.peer.network import parse_address

    for address in addresses[:ADDRESSES_MAX]:
        try:
            parse_address(address)
        except UsageError as error:
            raise MalformedFrame(error.what) from None
