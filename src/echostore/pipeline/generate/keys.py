"""Keys out of a seed: whoever knows the seed can sign in these parties, so they are for tests and measurements alone."""

import hashlib
from dataclasses import dataclass

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, feed_id
from echostore.kernel.party.credentials import Role
from echostore.wire.signing import SigningKey


def seeded_key(root: bytes, party: int, name: str) -> SigningKey:
    """A key of a shape (`Shape.root`), by the number of its party and what it is for."""
    return SigningKey.from_seed(hashlib.sha256(root + party.to_bytes(8, "big") + name.encode()).digest())


@dataclass(frozen=True, slots=True)
class Member:
    """A person with one device, one control feed and one data feed."""

    name: str
    role: Role
    identity_key: SigningKey
    device_key: SigningKey
    control_key: SigningKey
    data_key: SigningKey

    @staticmethod
    def of(root: bytes, party: int, name: str, role: Role) -> "Member":
        kinds = ("identity", "device", "control", "data")
        identity, device, control, data = (seeded_key(root, party, f"{name}/{kind}") for kind in kinds)
        return Member(name, role, identity, device, control, data)

    @property
    def identity(self) -> IdentityKey:
        return IdentityKey(self.identity_key.public)

    @property
    def device(self) -> DeviceKey:
        return DeviceKey(self.device_key.public)

    @property
    def control(self) -> FeedKey:
        return FeedKey(self.control_key.public)

    @property
    def data(self) -> FeedKey:
        return FeedKey(self.data_key.public)

    @property
    def feed(self) -> FeedId:
        return feed_id(self.data)
