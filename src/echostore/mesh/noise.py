"""Noise_XX_25519_AESGCM_SHA256 (revision 34 of the Noise specification) on the primitives of `cryptography`.

    -> e
    <- e, ee, s, es
    -> s, se

`Handshake` does the three messages, `split` gives one `Cipher` for each direction. Names and order are those of the
specification. Only `secure_channel` uses this module. tests/test_noise.py checks it with published vectors.
"""

import hashlib
import hmac
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PROTOCOL: Final = b"Noise_XX_25519_AESGCM_SHA256"
MESSAGE_BYTES_MAX: Final = 65535
DH_BYTES: Final = 32
TAG_BYTES: Final = 16

_PATTERN: Final = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
_REKEY_NONCE: Final = bytes(4) + b"\xff" * 8


class NoiseFailed(Exception):
    """A message that the other side did not write, or not at this point."""


class Cipher:
    """One direction: a key and a counter that never goes back."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._nonce = 0

    def encrypt(self, text: bytes, associated: bytes = b"") -> bytes:
        sealed = self._aead.encrypt(self._next_nonce(), text, associated)
        self._nonce += 1
        return sealed

    def decrypt(self, sealed: bytes, associated: bytes = b"") -> bytes:
        try:
            text = self._aead.decrypt(self._next_nonce(), sealed, associated)
        except (InvalidTag, ValueError) as error:
            raise NoiseFailed(type(error).__name__) from None
        self._nonce += 1
        return text

    def rekey(self) -> None:
        """Another key, which does not lead back to this one. The counter goes on."""
        self._aead = AESGCM(self._aead.encrypt(_REKEY_NONCE, bytes(32), b"")[:32])

    def _next_nonce(self) -> bytes:
        return bytes(4) + self._nonce.to_bytes(8, "big")


class Handshake:
    """One side of the three messages. `write` and `read` take turns, the initiator writes first.

    Keys are made here unless a test gives them.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        prologue: bytes,
        static: X25519PrivateKey | None = None,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._initiator = initiator
        self._own = {"s": static or new_key(), "e": ephemeral or new_key()}
        self._theirs: dict[str, X25519PublicKey] = {}
        self._cipher: Cipher | None = None
        self._done = 0
        # A name of at most 32 bytes is padded, not hashed.
        self.hash = self._chaining = PROTOCOL.ljust(hashlib.sha256().digest_size, b"\0")
        self._mix_hash(prologue)

    @property
    def finished(self) -> bool:
        return self._done == len(_PATTERN)

    def write(self, payload: bytes) -> bytes:
        """The next message of this side."""
        out = bytearray()
        for token in self._turn(ours=True):
            if token == "e":
                public = self._own["e"].public_key().public_bytes_raw()
                self._mix_hash(public)
                out += public
            elif token == "s":
                out += self._encrypt_and_hash(self._own["s"].public_key().public_bytes_raw())
            else:
                self._mix_key(self._agree(token))
        out += self._encrypt_and_hash(payload)
        return bytes(out)

    def read(self, message: bytes) -> bytes:
        """The payload of the other side's next message; NoiseFailed when it is not that."""
        at = 0
        for token in self._turn(ours=False):
            if token in ("e", "s"):
                size = DH_BYTES + (TAG_BYTES if token == "s" else 0)  # the pattern has no `s` before a key
                part, at = message[at : at + size], at + size
                if len(part) < size:
                    raise NoiseFailed("too short")
                if token == "e":
                    self._mix_hash(part)
                else:
                    part = self._decrypt_and_hash(part)
                self._theirs[token] = X25519PublicKey.from_public_bytes(part)
            else:
                self._mix_key(self._agree(token))
        return self._decrypt_and_hash(message[at:])

    def split(self) -> tuple[Cipher, Cipher]:
        """What this side sends with, and what it receives with."""
        assert self.finished, "the handshake is not over"
        first, second = (Cipher(key) for key in _hkdf(self._chaining, b""))
        return (first, second) if self._initiator else (second, first)

    def _turn(self, *, ours: bool) -> tuple[str, ...]:
        assert not self.finished, "the handshake is over"
        assert (self._done % 2 == 0) == (self._initiator == ours), "the other side's turn"
        self._done += 1
        return _PATTERN[self._done - 1]

    def _agree(self, token: str) -> bytes:
        """`es` is the initiator's ephemeral and the responder's static key, `se` the other way round."""
        own, theirs = (token[0], token[1]) if self._initiator else (token[1], token[0])
        try:
            return self._own[own].exchange(self._theirs[theirs])
        except ValueError:  # a point of low order: the shared secret would be known to everybody
            raise NoiseFailed("a key that agrees on nothing") from None

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining, key = _hkdf(self._chaining, material)
        self._cipher = Cipher(key)

    def _encrypt_and_hash(self, text: bytes) -> bytes:
        sealed = text if self._cipher is None else self._cipher.encrypt(text, self.hash)
        self._mix_hash(sealed)
        return sealed

    def _decrypt_and_hash(self, sealed: bytes) -> bytes:
        text = sealed if self._cipher is None else self._cipher.decrypt(sealed, self.hash)
        self._mix_hash(sealed)
        return text


def new_key() -> X25519PrivateKey:
    return X25519PrivateKey.generate()


def _hkdf(chaining: bytes, material: bytes) -> tuple[bytes, bytes]:
    key = hmac.digest(chaining, material, "sha256")
    first = hmac.digest(key, b"\x01", "sha256")
    return first, hmac.digest(key, first + b"\x02", "sha256")
