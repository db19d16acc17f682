"""Who this peer is: an identity, a device key of its own, and the chain of credentials that ties them.

The keys are made on first use and kept in the KeyStore. A device that joined an identity (`become`) has no key of it: the
chain leads from the identity over the device that let it in, and stands in the key file, beside the device's own key.
A local party needs none of this: its device key stands for an identity.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt, Refused, UsageError
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
_DEVICE_NAME_SETTING = "device_name"
_IDENTITY_FACT = "identity"
_CHAIN_FACT = "device_chain"


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
    chain: tuple[bytes, ...]
    """Credentials from the identity down to the device."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode([2, *_fields(self)])

    @staticmethod
    def from_bytes(data: bytes) -> "JoinRequest":
        try:
            version, *fields = msgspec.msgpack.decode(data)
            request = msgspec.convert(dict(zip(JoinRequest.__slots__, fields, strict=True)), JoinRequest)
            keys = (request.party, request.identity, request.device, request.control_feed, request.data_feed)
            if version != 2 or any(len(key) != KEY_BYTES for key in keys):
                raise ValueError("a key of wrong length, or another version")
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
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
        if writable and not keys.own(KeyUse.IDENTITY) and not keys.own(KeyUse.DEVICE):
            keys.add_many([(KeyUse.IDENTITY, SigningKey.generate(), ""), (KeyUse.DEVICE, SigningKey.generate(), "")])
        if name:
            check_title(name)
        if writable and name and meta.setting(_NAME_SETTING) != name:
            meta.set_setting(_NAME_SETTING, name)
        self.name: str = name or meta.setting(_NAME_SETTING) or ""
        self.identity = IdentityKey(keys.fact(_IDENTITY_FACT) or self._one(KeyUse.IDENTITY))
        self.device = DeviceKey(self._one(KeyUse.DEVICE))

    def rename(self, name: str) -> None:
        check_title(name)
        self._meta.set_setting(_NAME_SETTING, name)
        self.name = name

    @property
    def device_name(self) -> str:
        """What this device is called among those of the identity."""
        return self._meta.setting(_DEVICE_NAME_SETTING) or self.name

    @property
    def identity_key(self) -> SigningKey:
        """The identity's own key; Refused where it is not on this device."""
        if not self._keys.has(self.identity):
            raise Refused(
                "the identity's own key is not on this device",
                next_step="Use the device where the identity was made, or its recovery phrase.",
            )
        return self._keys.key(self.identity)

    @property
    def holds_identity_key(self) -> bool:
        return self._keys.has(self.identity)

    def take_name(self, name: str) -> None:
        """Be known as the identity is; what this peer was called before stays the name of the device."""
        if name != self.name:
            self._meta.set_setting(_DEVICE_NAME_SETTING, self.device_name or None)
            self.rename(name)

    def become(
        self,
        identity: IdentityKey,
        *,
        chain: Sequence[credential_pb2.Credential] = (),
        key: SigningKey | None = None,
    ) -> None:
        """Act for another identity from now on, by a chain that vouches for this device, or by the identity's own key.

        One write of the key file: afterwards the device belongs to the other identity, before it to the old one. The
        caller has made sure that the old one is not in use.
        """
        assert (key is None) == bool(chain), "a chain, or the key itself"
        links = list(chain) if key is None else [self._vouch(identity, identity, self.device, key)]
        self._keys.exchange(
            add=[] if key is None else [(KeyUse.IDENTITY, key, "")],
            drop={owned.public for owned in self._keys.own(KeyUse.IDENTITY) if owned.public != identity},
            facts={_IDENTITY_FACT: bytes(identity), _CHAIN_FACT: _packed_chain(links)},
        )
        self.identity = identity
        self._meta.set_setting(_CHAIN_SETTING, None)

    def let_go_of_identity_key(self) -> None:
        """Take the identity's key off this device: then only its recovery phrase has it."""
        chain = self.chain()
        self._keys.exchange(
            drop={self.identity}, facts={_IDENTITY_FACT: bytes(self.identity), _CHAIN_FACT: _packed_chain(chain)}
        )

    def vouch_for(self, device: DeviceKey, name: str) -> list[credential_pb2.Credential]:
        """The chain of another device of this identity, whose last link this device signs."""
        return [*self.chain(), self._vouch(self.identity, self.device, device, self.device_key, name)]

    def _vouch(
        self, identity: IdentityKey, signer: bytes, device: DeviceKey, key: SigningKey, name: str = ""
    ) -> credential_pb2.Credential:
        admit = DeviceAdmit(identity, device, name)
        return sign_credential(Claim(PartyKey(b""), identity, DeviceKey(signer), admit), key)

    @property
    def device_key(self) -> SigningKey:
        return self._keys.key(self.device)

    def chain(self) -> list[credential_pb2.Credential]:
        """The credentials by which the identity admits this device, carried by what it signs."""
        packed = self._keys.fact(_CHAIN_FACT)
        if packed is not None:
            return read_chain(msgspec.msgpack.decode(packed, type=list[bytes]))
        stored = self._meta.setting(_CHAIN_SETTING)
        if stored is None:
            credential = self._vouch(self.identity, self.identity, self.device, self.identity_key, self.name)
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


def read_chain(links: Iterable[bytes]) -> list[credential_pb2.Credential]:
    """The credentials of a device chain as they came; Refused when they can't be read."""
    try:
        return [credential_pb2.Credential.FromString(link) for link in links]
    except DecodeError:
        raise Refused("a device chain that can't be read") from None


def _packed_chain(chain: Iterable[credential_pb2.Credential]) -> bytes:
    return msgspec.msgpack.encode([link.SerializeToString() for link in chain])


def _fields(request: JoinRequest) -> list[object]:
    return [getattr(request, name) for name in JoinRequest.__slots__]
