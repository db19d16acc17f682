"""What guest and host say to each other under the seal of an invitation, as bytes. A party's guest asks with a `JoinRequest`.

party     JoinRequest                      -> Welcome         where the party's history begins
device    device key, name                 -> DeviceWelcome   the identity, and a chain that leads to the device
"""

from dataclasses import dataclass

import msgspec

from echostore.kernel.errors import Refused
from echostore.kernel.ids import KEY_BYTES, DeviceKey, FeedKey, IdentityKey, PartyKey
from echostore.mesh.invitation import InvitationFailed, Reason
from echostore.peer.identity import Welcome, read_chain
from echostore.wire.claims import NAME_CHARACTERS_MAX
from echostore.wire.credentials import device_vouched
from echostore.wire.generated import credential_pb2


@dataclass(frozen=True, slots=True)
class DeviceWelcome:
    """What a device needs to act for an identity."""

    identity: IdentityKey
    name: str
    chain: list[credential_pb2.Credential]


def device_request_bytes(device: DeviceKey, name: str) -> bytes:
    return msgspec.msgpack.encode([1, device, name])


def device_welcome_bytes(welcome: DeviceWelcome) -> bytes:
    links = [link.SerializeToString() for link in welcome.chain]
    return msgspec.msgpack.encode([1, welcome.identity, welcome.name, links])


def read_device_request(data: bytes) -> tuple[bytes, str]:
    try:
        version, device, name = msgspec.msgpack.decode(data)
        if version != 1 or not isinstance(device, bytes) or not isinstance(name, str):
            raise ValueError
        if len(device) != KEY_BYTES or len(name) > NAME_CHARACTERS_MAX:
            raise ValueError
    except (ValueError, TypeError, msgspec.DecodeError):
        raise InvitationFailed(Reason.MALFORMED, "a request that can't be read") from None
    return device, name


def read_device_welcome(data: bytes, device: DeviceKey) -> DeviceWelcome:
    """The host's word, if its chain leads from the identity to this device."""
    try:
        version, identity, name, links = msgspec.msgpack.decode(data)
        chain = read_chain(links)
        if version != 1 or len(identity) != KEY_BYTES or not isinstance(name, str) or len(name) > NAME_CHARACTERS_MAX:
            raise ValueError
        if not device_vouched(chain, IdentityKey(identity), device):
            raise ValueError
    except (ValueError, TypeError, msgspec.DecodeError, Refused):
        raise InvitationFailed(Reason.MALFORMED, "a welcome that can't be read") from None
    return DeviceWelcome(IdentityKey(identity), name, chain)


def welcome_bytes(welcome: Welcome) -> bytes:
    return msgspec.msgpack.encode([1, welcome.party, welcome.genesis_feed, welcome.title])


def read_welcome(data: bytes, party: PartyKey) -> Welcome:
    try:
        version, key, genesis_feed, title = msgspec.msgpack.decode(data)
        if version != 1 or key != party or len(genesis_feed) != KEY_BYTES or not isinstance(title, str):
            raise ValueError
    except (ValueError, TypeError, msgspec.DecodeError):
        raise InvitationFailed(Reason.MALFORMED, "a welcome that can't be read") from None
    return Welcome(PartyKey(key), FeedKey(genesis_feed), title)
