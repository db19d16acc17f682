"""Who this peer is: an identity key, a device key under it, and the credential that ties them.

The keys are made on first use and kept in the KeyStore. A local party needs neither: its device key stands for an
identity.
"""

from dataclasses import dataclass

import msgspec

from echostore.kernel.errors import Corrupt, UsageError
from echostore.kernel.ids import KEY_BYTES, DeviceKey, FeedKey, IdentityKey, PartyKey
from echostore.kernel.party.credentials import Claim, DeviceAdmit
from echostore.kernel.values import check_value
from echostore.store.key_store import KeyStore, KeyUse
from echostore.store.meta_store import MetaStore
from echostore.wire.claims import NAME_CHARACTERS_MAX
from echostore.wire.credentials import sign_credential
from echostore.wire.generated import credential_pb2
from echostore.wire.signing import SigningKey

_CHAIN_SETTING = "device_chain"
_NAME_SETTING = "name"


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a device tells an admin who is about to admit it: who it is, and the feeds it will write."""

    party: PartyKey
    identity: IdentityKey
    device: DeviceKey
    name: str
    control_feed: FeedKey
    control_consent: bytes
    data_feed: FeedKey
    data_consent: bytes
    chain: bytes

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode([1, *_fields(self)])

    @staticmethod
    def from_bytes(data: bytes) -> "JoinRequest":
        try:
            version, *fields = msgspec.msgpack.decode(data)
            request = JoinRequest(*fields)
            keys = (request.party, request.identity, request.device, request.control_feed, request.data_feed)
            if version != 1 or any(len(key) != KEY_BYTES for key in keys):
                raise ValueError("a key of wrong length")
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise UsageError(f"this is not a join request: {error}") from error
        return request


@dataclass(frozen=True, slots=True)
class Welcome:
    """What an admitted device needs to start: where the party's history begins."""

    party: PartyKey
    genesis_feed: FeedKey
    title: str


class Self:
    """This peer's own keys and name."""

    def __init__(self, keys: KeyStore, meta: MetaStore, *, name: str | None, writable: bool) -> None:
        self._keys = keys
        self._meta = meta
        if writable and not keys.own(KeyUse.IDENTITY):
            keys.add_many([(KeyUse.IDENTITY, SigningKey.generate(), ""), (KeyUse.DEVICE, SigningKey.generate(), "")])
        if name:
            check_title(name)
        if writable and name and meta.setting(_NAME_SETTING) != name:
            meta.set_setting(_NAME_SETTING, name)
        self.name: str = name or meta.setting(_NAME_SETTING) or ""
        self.identity = IdentityKey(self._one(KeyUse.IDENTITY))
        self.device = DeviceKey(self._one(KeyUse.DEVICE))

    def rename(self, name: str) -> None:
        check_title(name)
        self._meta.set_setting(_NAME_SETTING, name)
        self.name = name

    @property
    def device_key(self) -> SigningKey:
        return self._keys.key(self.device)

    def chain(self) -> list[credential_pb2.Credential]:
        """The credential by which the identity admits this device, carried by what it signs."""
        stored = self._meta.setting(_CHAIN_SETTING)
        if stored is None:
            admit = DeviceAdmit(self.identity, self.device, self.name)
            claim = Claim(PartyKey(b""), self.identity, DeviceKey(self.identity), admit)
            credential = sign_credential(claim, self._keys.key(self.identity))
            stored = credential.SerializeToString().hex()
            self._meta.set_setting(_CHAIN_SETTING, stored)
        return [credential_pb2.Credential.FromString(bytes.fromhex(stored))]

    def _one(self, use: KeyUse) -> bytes:
        owned = self._keys.own(use)
        if not owned:
            raise Corrupt(f"the key store holds no {use} key", next_step="Restore the file `keys` of this home.")
        return owned[0].public


def check_title(text: object) -> None:
    """A title or name as every member will read it, or UsageError."""
    check_value(text, where="title")
    if not isinstance(text, str) or not text.strip() or len(text) > NAME_CHARACTERS_MAX:
        raise UsageError(f"a title or name is text of 1 to {NAME_CHARACTERS_MAX} characters")


def _fields(request: JoinRequest) -> list[object]:
    return [getattr(request, name) for name in JoinRequest.__slots__]
