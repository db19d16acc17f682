"""SPAKE2: one password gives one key, another one another, and no share that is not a point is taken."""

import hashlib

import nacl.bindings as sodium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.mesh.pake import POINT_A, POINT_B, PakeFailed, Spake2

# The neutral element, a point of order 2, a point of order 8, and bytes that are no point at all.
NO_SHARES = (
    b"\x01" + bytes(31),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    b"\x02" + bytes(31),
    bytes(31),
    bytes(33),
    b"",
)


def side(password: bytes, *, first: bool, name_a: bytes = b"ann", name_b: bytes = b"bob") -> Spake2:
    return Spake2(password, first=first, name_a=name_a, name_b=name_b)


@given(password=st.binary(max_size=100))
def test_the_same_password_gives_the_same_key(password: bytes) -> None:
    one, other = side(password, first=True), side(password, first=False)
    assert one.finish(other.share) == other.finish(one.share)


def test_every_exchange_has_a_key_and_shares_of_its_own() -> None:
    other = side(b"secret", first=False)
    first, second = side(b"secret", first=True), side(b"secret", first=True)
    assert first.share != second.share
    assert first.finish(other.share) != second.finish(other.share)


@pytest.mark.parametrize(
    "other",
    [
        side(b"other", first=False),
        side(b"secret", first=False, name_a=b"eve"),
        side(b"secret", first=False, name_b=b"eve"),
        side(b"secret", first=True),
    ],
    ids=["password", "name of A", "name of B", "side"],
)
def test_another_password_name_or_side_gives_another_key(other: Spake2) -> None:
    one = side(b"secret", first=True)
    assert one.finish(other.share) != other.finish(one.share)


@pytest.mark.parametrize("share", NO_SHARES, ids=lambda share: share.hex()[:8] or "empty")
def test_what_is_no_point_of_the_main_group_is_refused(share: bytes) -> None:
    with pytest.raises(PakeFailed):
        side(b"secret", first=True).finish(share)


def test_a_share_that_cancels_the_password_leads_to_no_key() -> None:
    """Y = w*N, without a random part."""
    w = sodium.crypto_core_ed25519_scalar_reduce(hashlib.sha512(b"secret").digest())
    with pytest.raises(PakeFailed):
        side(b"secret", first=True).finish(sodium.crypto_scalarmult_ed25519_noclamp(w, POINT_B))


@pytest.mark.parametrize(("point", "name"), [(POINT_A, "M"), (POINT_B, "N")])
def test_the_fixed_points_are_made_as_the_standard_says(point: bytes, name: str) -> None:
    """Hash a text, and again what came out, until that is a point: nobody could choose it."""
    made = hashlib.sha256(f"edwards25519 point generation seed ({name})".encode()).digest()
    while not sodium.crypto_core_ed25519_is_valid_point(made):
        made = hashlib.sha256(made).digest()
    assert made == point


def test_the_key_is_the_hash_of_the_transcript_of_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shares, K and w, each behind its length; K from the secrets of both sides."""
    one, other = side(b"secret", first=True), side(b"secret", first=False)
    secrets = sodium.crypto_core_ed25519_scalar_mul(one._secret, other._secret)
    agreed = sodium.crypto_scalarmult_ed25519_base_noclamp(secrets)
    w = sodium.crypto_core_ed25519_scalar_reduce(hashlib.sha512(b"secret").digest())
    parts = (b"ann", b"bob", one.share, other.share, agreed, w)
    transcript = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    assert one.finish(other.share) == hashlib.sha512(transcript).digest()
