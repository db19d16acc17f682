"""SPAKE2 over edwards25519 (RFC 9382) on the group operations of libsodium: two sides that know one password agree on a key.

    A   x random, sends X = x*G + w*M                B   y random, sends Y = y*G + w*N
        K = x*(Y - w*N)                                  K = y*(X - w*M)
    both    SHA-512 of both names, X, Y, K and w

w comes from the password. Who guesses another one gets another key, and learns of one guess only that it was wrong.
All operations with secrets take the same time whatever these are. Shares that are no points of the main group are refused.
"""

import hashlib
from typing import Final

import nacl.bindings as sodium
import nacl.exceptions
import nacl.utils

SHARE_BYTES: Final = 32

# RFC 9382, section 6: made by hashing a text until it is a point, so that nobody knows their logarithms.
POINT_A: Final = bytes.fromhex("d048032c6ea0b6d697ddc2e86bda85a33adac920f1bf18e1b0c6d166a5cecdaf")
POINT_B: Final = bytes.fromhex("d3bfb518f44f3430f29d0c92af503865a1ed3281dc69b35dd868ba85f886c4ab")


class PakeFailed(Exception):
    """A share that is no point, or one that leads to no key."""


class Spake2:
    """One side of one exchange. `first` is side A; each side is named, and both know both names."""

    def __init__(self, password: bytes, *, first: bool, name_a: bytes, name_b: bytes) -> None:
        self._first, self._names = first, (name_a, name_b)
        self._w = sodium.crypto_core_ed25519_scalar_reduce(hashlib.sha512(password).digest())
        self._secret = sodium.crypto_core_ed25519_scalar_reduce(nacl.utils.random(64))
        self.share = sodium.crypto_core_ed25519_add(
            sodium.crypto_scalarmult_ed25519_base_noclamp(self._secret), self._blind(POINT_A if first else POINT_B)
        )
        """What the other side is sent."""

    def finish(self, theirs: bytes) -> bytes:
        """The key: the same on both sides if they have the same password and names. 64 bytes."""
        if len(theirs) != SHARE_BYTES or not sodium.crypto_core_ed25519_is_valid_point(theirs):
            raise PakeFailed("a share that is no point")
        try:
            bare = sodium.crypto_core_ed25519_sub(theirs, self._blind(POINT_B if self._first else POINT_A))
            agreed = sodium.crypto_scalarmult_ed25519_noclamp(self._secret, bare)
        except nacl.exceptions.CryptoError:
            raise PakeFailed("a share that leads to no key") from None
        shares = (self.share, theirs) if self._first else (theirs, self.share)
        transcript = b"".join(
            len(part).to_bytes(8, "little") + part for part in (*self._names, *shares, agreed, self._w)
        )
        return hashlib.sha512(transcript).digest()

    def _blind(self, point: bytes) -> bytes:
        blind: bytes = sodium.crypto_scalarmult_ed25519_noclamp(self._w, point)
        return blind
