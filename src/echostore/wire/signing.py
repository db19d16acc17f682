"""Ed25519: the only module that imports PyNaCl for signatures.

`verify` never raises on what another peer sent: a malformed key, signature or message is simply not signed. libsodium
refuses small-order keys and non-canonical signatures, which other implementations accept; we ask for no more than it.
Small-order keys are refused again by name here, because a key that verifies anything would be a feed anybody writes.
"""

from typing import Final

import nacl.bindings
from nacl.exceptions import CryptoError

from echostore.kernel.ids import KEY_BYTES

SEED_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

_crypto_sign = nacl.bindings.crypto_sign
_crypto_sign_open = nacl.bindings.crypto_sign_open


class SigningKey:
    """An Ed25519 secret. Its repr shows the public half only; the seed leaves through `seed` alone."""

    __slots__ = ("_secret", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a signing key is made from {SEED_BYTES} bytes, got {len(seed)}")
        public, secret = nacl.bindings.crypto_sign_seed_keypair(seed)
        self.public: bytes = public
        self._secret: bytes = secret

    @staticmethod
    def generate() -> "SigningKey":
        return SigningKey(nacl.bindings.randombytes(SEED_BYTES))

    @staticmethod
    def from_seed(seed: bytes) -> "SigningKey":
        return SigningKey(seed)

    @property
    def seed(self) -> bytes:
        return self._secret[:SEED_BYTES]

    def sign(self, message: bytes) -> bytes:
        signed: bytes = _crypto_sign(message, self._secret)
        return signed[:SIGNATURE_BYTES]

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()[:16]}…)"

    def __reduce__(self) -> str:
        raise TypeError("a signing key is not pickled: that would write the secret somewhere")


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is a good signature of `message` by `public`; False for anything malformed."""
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES or public in SMALL_ORDER_KEYS:
        return False
    try:
        _crypto_sign_open(signature + message, public)
    except (CryptoError, ValueError):
        return False
    return True


def usable_public_key(public: bytes) -> bool:
    """Whether `public` is the encoding of a point that can be someone's key."""
    return (
        len(public) == KEY_BYTES
        and public not in SMALL_ORDER_KEYS
        and bool(nacl.bindings.crypto_core_ed25519_is_valid_point(public))
    )


def _both_signs(encodings: tuple[str, ...]) -> frozenset[bytes]:
    """Each encoding with the sign bit clear and set: both decode to points of small order."""
    raw = [bytes.fromhex(text) for text in encodings]
    return frozenset(raw + [key[:31] + bytes([key[31] | 0x80]) for key in raw])


SMALL_ORDER_KEYS: Final = _both_signs(
    (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)
"""The encodings of the eight points of small order, non-canonical ones included (libsodium's own list)."""
