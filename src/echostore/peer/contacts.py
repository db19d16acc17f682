"""Contacts: the people this peer shares parties with. Derived from the parties' members; nothing is kept for it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.errors import EchoError
from echostore.kernel.ids import DeviceKey, IdentityKey, PartyKey
from echostore.store.meta_store import PartyState

if TYPE_CHECKING:
    from echostore.peer.network import Network
    from echostore.peer.peer import Peer

SEEN_SETTING = "seen_devices"
"""When devices were last connected, as `echostore serve` keeps it."""


@dataclass(frozen=True, slots=True)
class SharedParty:
    """A party that a contact is in, and its role there."""

    party: PartyKey
    title: str
    role: str


@dataclass(frozen=True, slots=True)
class ContactDevice:
    device: DeviceKey
    name: str
    seen_ms: int | None
    connected: bool


@dataclass(frozen=True, slots=True)
class SharedContact:
    """Another identity that is a member of a party of this peer."""

    identity: IdentityKey
    name: str
    """As it calls itself, in the party that was told last; there may be others elsewhere."""
    parties: tuple[SharedParty, ...]
    devices: tuple[ContactDevice, ...]
    """Those that count in any of the parties."""
    seen_ms: int | None
    """When one of its devices was last connected to this peer, by this machine's clock; None when it never was."""
    connected: bool
    """Whether one of them is connected now."""


def contacts(peer: "Peer", network: "Network | None") -> list[SharedContact]:
    """Everyone who is in a party with this peer now, by name. Parties that are closed here are left out."""
    names: dict[IdentityKey, str] = {}
    shared: dict[IdentityKey, list[SharedParty]] = {}
    devices: dict[IdentityKey, dict[DeviceKey, str]] = {}
    for known in peer.parties():
        if known.state is PartyState.CLOSED or known.local or known.child_of is not None:
            continue
        try:
            party = peer.held(known.key)
            members = party.members.all()
        except EchoError:  # damaged: `status` and `doctor` say so
            continue
        for member in members:
            if member.identity == peer.identity or member.role is None:
                continue
            names[member.identity] = member.name or names.get(member.identity, "")
            shared.setdefault(member.identity, []).append(SharedParty(party.key, party.title, member.role.label))
            mine = devices.setdefault(member.identity, {})
            mine |= {each.device: each.name or mine.get(each.device, "") for each in member.devices if not each.revoked}
    seen = _seen(peer, network)
    now = frozenset(each.device for each in network.seen.copy().values() if not each.ended) if network else frozenset()
    found = []
    for identity, parties in shared.items():
        shown = tuple(
            ContactDevice(key, name, seen.get(key), key in now) for key, name in sorted(devices[identity].items())
        )
        last = max((each.seen_ms for each in shown if each.seen_ms is not None), default=None)
        found.append(
            SharedContact(identity, names[identity], tuple(parties), shown, last, any(each.connected for each in shown))
        )
    return sorted(found, key=lambda each: (each.name.casefold(), each.identity))


def _seen(peer: "Peer", network: "Network | None") -> dict[bytes, int]:
    kept = {bytes.fromhex(device): at_ms for device, (_, at_ms, _) in peer.meta.setting(SEEN_SETTING, {}).items()}
    if network is not None:
        kept |= {device: each.at_ms for device, each in network.seen.copy().items()}
    return kept
