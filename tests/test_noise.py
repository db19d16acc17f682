"""Noise XX against published vectors: every byte of the handshake, of the messages after it, and the hash."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from echostore.mesh.noise import Cipher, Handshake, NoiseFailed

# Keys, payloads and ciphertexts of Noise_XX_25519_AESGCM_SHA256 as the cacophony project publishes them for all
# implementations. The two vectors differ by their prologue, and so in what is authenticated with the hash.
INITIATOR_STATIC = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
INITIATOR_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESPONDER_STATIC = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
RESPONDER_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
PAYLOADS = (
    b"Ludwig von Mises",
    b"Murray Rothbard",
    b"F. A. Hayek",
    b"Carl Menger",
    b"Jean-Baptiste Say",
    "Eugen Böhm von Bawerk".encode("latin-1"),
)
AFTER = (
    "bc3fa77f6aca3e8466d7dc6bea10013e88a6a29add5132b461806c",
    "250b01074cdfe0df2ecf8ccbf1737b15a2ddb5b52fd9a396604e9c793cee3b3bb9",
    "449d4d433b3cdc3d02bf6fc881774b9df54366ebcffb9689bb13f14709822cd7ef42bcdb4d",
)
FIRST = "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79444c756477696720766f6e204d69736573"
VECTORS = {
    b"John Galt": (
        FIRST,
        (
            "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843757117acceb05bd7a45733bc22015c97a9d0cbaf41b8"
            "0446d5988ff5127235d76b79eade70f473d6a4ef521fdcbeda5340d01e028ba793fc059f2724a83af05f12dda0448a7621a926b379a9"
            "2477fd"
        ),
        (
            "c90f1cf77eba4e50edb038991565e36c9758943a989229b6051244dc4fbecb6946744b401af2ee1a5881b65fbb87fd07cb6a328ececc"
            "9ce6ce84c399dc332d4fd521fa4bb7f467ce909395"
        ),
        *AFTER,
    ),
    b"Prologue123": (
        FIRST,
        (
            "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843757117acceb05bd7a45733bc22015c97a9d0cbaf41b8"
            "0446d5988ff5127235d78c9ea8b1c117179204c8a49f9a83a7f640d01e028ba793fc059f2724a83af08e993c1d87032f536390f1d612"
            "be65f7"
        ),
        (
            "c90f1cf77eba4e50edb038991565e36c9758943a989229b6051244dc4fbecb6928dadfe5492c3bf6aab568b11ddc6ebdcb6a328ececc"
            "9ce6ce84c336e421a792bc6eaca1d9d2c93636f8ff"
        ),
        *AFTER,
    ),
}
HASH_OF_PROLOGUE123 = "b1fee4b75a0da34a3d1e338b093de8e46801eeafd1af0a7185b020cd27007ce4"


def key(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def sides(prologue: bytes) -> tuple[Handshake, Handshake]:
    return (
        Handshake(initiator=True, prologue=prologue, static=key(INITIATOR_STATIC), ephemeral=key(INITIATOR_EPHEMERAL)),
        Handshake(initiator=False, prologue=prologue, static=key(RESPONDER_STATIC), ephemeral=key(RESPONDER_EPHEMERAL)),
    )


@pytest.mark.parametrize("prologue", VECTORS)
def test_every_message_is_that_of_the_published_vector(prologue: bytes) -> None:
    expected = [bytes.fromhex(text) for text in VECTORS[prologue]]
    writer, reader = sides(prologue)
    for payload, message in zip(PAYLOADS[:3], expected[:3], strict=True):
        assert writer.write(payload) == message
        assert reader.read(message) == payload
        writer, reader = reader, writer
    assert writer.finished
    assert reader.finished
    # The responder writes next.
    out, back = writer.split(), reader.split()
    for payload, message in zip(PAYLOADS[3:], expected[3:], strict=True):
        assert out[0].encrypt(payload) == message
        assert back[1].decrypt(message) == payload
        out, back = back, out


def test_the_hash_is_that_of_the_published_vector_on_both_sides() -> None:
    writer, reader = sides(b"Prologue123")
    for payload in PAYLOADS[:3]:
        reader.read(writer.write(payload))
        writer, reader = reader, writer
    assert writer.hash.hex() == reader.hash.hex() == HASH_OF_PROLOGUE123


def test_a_new_key_is_what_the_specification_says() -> None:
    """REKEY: the first 32 bytes of 32 zeros under the greatest nonce. The counter goes on."""
    cipher, other = Cipher(b"k" * 32), Cipher(b"k" * 32)
    cipher.encrypt(b"one")
    cipher.rekey()
    other._nonce = 2**64 - 1
    expected = Cipher(other.encrypt(bytes(32))[:32])
    expected.encrypt(b"")
    assert cipher.encrypt(b"two") == expected.encrypt(b"two")


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_a_key_of_low_order_is_refused(public: bytes) -> None:
    _, responder = sides(b"")
    responder.read(public)
    with pytest.raises(NoiseFailed):
        responder.write(b"")


@pytest.mark.parametrize("size", [0, 31])
def test_a_message_that_is_too_short_is_refused(size: int) -> None:
    _, responder = sides(b"")
    with pytest.raises(NoiseFailed):
        responder.read(bytes(size))


def test_fresh_keys_are_made_for_each_handshake() -> None:
    assert Handshake(initiator=True, prologue=b"").write(b"") != Handshake(initiator=True, prologue=b"").write(b"")
