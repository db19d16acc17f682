"""An encrypted channel between two devices: bytes in, frames out. No sockets, no clock.

    initiator                                         responder
    "ECHO" | lowest, highest version        ---->
                                            <----     "ECHO" | lowest, highest version
    Noise e                                 ---->
                                            <----     Noise e, ee, s, es   { device, signature }
    Noise s, se   { device, signature }     ---->
    frames                                  <--->     frames

The pattern is XX with X25519, AES-GCM and SHA-256. The static keys are made for one channel and die with it. A device
shows who it is by signing its static key with its Ed25519 key, in the encrypted part of the handshake: a signature that
someone else saw is of no use without that static key. Both preambles are the prologue, so that nobody in the middle
can talk two devices into an older version.

A frame is cut into Noise messages of at most 65,519 bytes of text; each travels behind its length in two bytes. The
first one starts with the length of the frame in four. Keys change every REKEY_MESSAGES messages, on both sides alike.

noiseprotocol is used here and nowhere else.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from cryptography.exceptions import InvalidTag
from noise.connection import Keypair, NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

from echostore.kernel.ids import KEY_BYTES, DeviceKey
from echostore.wire.signing import SEED_BYTES, SIGNATURE_BYTES, SigningKey, verify
from echostore.wire.sync import FRAME_BYTES_MAX as SYNC_FRAME_BYTES_MAX

MAGIC: Final = b"ECHO"
VERSION_LOWEST: Final = 1
VERSION_HIGHEST: Final = 1
PREAMBLE_BYTES: Final = len(MAGIC) + 2

FRAME_BYTES_MAX: Final = SYNC_FRAME_BYTES_MAX + 1024
"""The longest replication frame and what wraps it."""

REKEY_MESSAGES: Final = 1 << 16

_PATTERN: Final = b"Noise_XX_25519_AESGCM_SHA256"
_DEVICE_TAG: Final = b"echostore/device-static/1"
_TEXT_BYTES_MAX: Final = 65535 - 16
_HANDSHAKE_BYTES_MAX: Final = 512
_LENGTH_BYTES: Final = 4


class Refusal(StrEnum):
    """Why a channel ended before or in the middle of its work."""

    NOT_ECHOSTORE = "not-echostore"
    NO_COMMON_VERSION = "no-common-version"
    HANDSHAKE_FAILED = "handshake-failed"
    WRONG_DEVICE = "wrong-device"
    TAMPERED = "tampered"
    OVERSIZE = "oversize"


class ChannelFailed(Exception):
    """The other side, or someone between, broke the channel; nothing more may be sent or read."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class SecureChannel:
    """One side of a channel. Feed it what arrives with `receive`; send what `take_outgoing` gives.

    `expected` is the device that must answer, when one is known; `remote` is who did, once `ready`.
    """

    def __init__(self, device: SigningKey, *, initiator: bool, expected: DeviceKey | None = None) -> None:
        self._device = device
        self.initiator = initiator
        self._expected = expected
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._noise: NoiseConnection | None = None
        self._static = SigningKey.generate().seed  # 32 random bytes are an X25519 secret
        self._frame = bytearray()
        self._frame_end = 0
        self._sent = self._received = 0
        self.remote: DeviceKey | None = None
        self.ready = False
        self.failed: ChannelFailed | None = None
        self.handshake_hash = b""
        """The same 32 bytes on both sides, and on no other channel: what further proofs bind to."""
        self._preamble = MAGIC + bytes([VERSION_LOWEST, VERSION_HIGHEST])
        self._outgoing += self._preamble

    @property
    def in_frame(self) -> bool:
        """Whether a part of a message or of a frame has come, and its end has not."""
        return bool(self._buffer) or self._frame_end > 0

    @property
    def outgoing_pending(self) -> bool:
        return bool(self._outgoing)

    def take_outgoing(self) -> bytes:
        """What is to be sent now; calling it again gives nothing."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def receive(self, data: bytes) -> list[bytes]:
        """The frames that are complete with these bytes; ChannelFailed when the channel is broken, from then on always."""
        if self.failed is not None:
            raise self.failed
        self._buffer += data
        try:
            return list(self._advance())
        except ChannelFailed as failure:
            self.failed = failure
            raise

    def send(self, frame: bytes) -> bytes:
        """The bytes that carry a frame."""
        assert self.ready, "the handshake is not over"
        assert len(frame) <= FRAME_BYTES_MAX, f"a frame of {len(frame)} bytes"
        text = len(frame).to_bytes(_LENGTH_BYTES, "big") + frame
        out = bytearray()
        for start in range(0, len(text), _TEXT_BYTES_MAX):
            out += self._seal(text[start : start + _TEXT_BYTES_MAX])
        return bytes(out)

    # handshake

    def _advance(self) -> Iterator[bytes]:
        if self._noise is None:
            if len(self._buffer) < PREAMBLE_BYTES:
                self._check_magic(bytes(self._buffer[: len(MAGIC)]))
                return
            self._begin(bytes(self._buffer[:PREAMBLE_BYTES]))
            del self._buffer[:PREAMBLE_BYTES]
        while (message := self._next_message()) is not None:
            if self.ready:
                yield from self._open(message)
            else:
                self._shake(message)

    def _check_magic(self, start: bytes) -> None:
        if not MAGIC.startswith(start):
            raise ChannelFailed(Refusal.NOT_ECHOSTORE, "the other side does not speak this protocol")

    def _begin(self, theirs: bytes) -> None:
        self._check_magic(theirs[: len(MAGIC)])
        lowest, highest = theirs[len(MAGIC)], theirs[len(MAGIC) + 1]
        if max(lowest, VERSION_LOWEST) > min(highest, VERSION_HIGHEST):
            raise ChannelFailed(
                Refusal.NO_COMMON_VERSION,
                f"they speak versions {lowest} to {highest}, we speak {VERSION_LOWEST} to {VERSION_HIGHEST}",
            )
        noise = NoiseConnection.from_name(_PATTERN)
        if self.initiator:
            noise.set_as_initiator()
            noise.set_prologue(self._preamble + theirs)
        else:
            noise.set_as_responder()
            noise.set_prologue(theirs + self._preamble)
        noise.set_keypair_from_private_bytes(Keypair.STATIC, self._static)
        noise.start_handshake()
        self._noise = noise
        if self.initiator:
            self._send_handshake(b"")

    def _shake(self, message: bytes) -> None:
        assert self._noise is not None
        noise = self._noise
        state = noise.noise_protocol.handshake_state  # the library lets go of it with the last message
        try:
            payload = bytes(noise.read_message(message))
        except (InvalidTag, NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError, ValueError, IndexError) as error:
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, type(error).__name__) from None
        if self.initiator:
            self._take_identity(payload, _public(state.rs))
            self._send_handshake(self._identity())
            self._finish()
        elif not noise.handshake_finished:
            if payload:
                raise ChannelFailed(Refusal.HANDSHAKE_FAILED, "a first message with a payload")
            self._send_handshake(self._identity())
        else:
            self._take_identity(payload, _public(state.rs))
            self._finish()

    def _finish(self) -> None:
        assert self._noise is not None
        self.handshake_hash = bytes(self._noise.get_handshake_hash())
        self.ready = True

    def _identity(self) -> bytes:
        """Our device key and its signature of our static key and of the side we are on."""
        public = _x25519_public(self._static)
        return self._device.public + self._device.sign(_statement(public, initiator=self.initiator))

    def _take_identity(self, payload: bytes, static: bytes) -> None:
        device, signature = payload[:KEY_BYTES], payload[KEY_BYTES:]
        if len(payload) != KEY_BYTES + SIGNATURE_BYTES or not verify(
            device, _statement(static, initiator=not self.initiator), signature
        ):
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, "the device did not sign its key")
        if self._expected is not None and device != self._expected:
            raise ChannelFailed(Refusal.WRONG_DEVICE, f"{device.hex()[:16]} answered")
        self.remote = DeviceKey(device)

    def _send_handshake(self, payload: bytes) -> None:
        assert self._noise is not None
        message = bytes(self._noise.write_message(payload))
        self._outgoing += len(message).to_bytes(2, "big") + message

    # transport

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        size = int.from_bytes(self._buffer[:2], "big")
        if not self.ready and size > _HANDSHAKE_BYTES_MAX:
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, f"a handshake message of {size} bytes")
        if len(self._buffer) < 2 + size:
            return None
        message = bytes(self._buffer[2 : 2 + size])
        del self._buffer[: 2 + size]
        return message

    def _seal(self, text: bytes) -> bytes:
        assert self._noise is not None
        message: bytes = self._noise.encrypt(text)
        self._sent += 1
        if self._sent % REKEY_MESSAGES == 0:
            self._noise.rekey_outbound_cipher()
        return len(message).to_bytes(2, "big") + message

    def _open(self, message: bytes) -> Iterator[bytes]:
        assert self._noise is not None
        try:
            text = self._noise.decrypt(message)
        except (InvalidTag, NoiseInvalidMessage, ValueError):
            raise ChannelFailed(Refusal.TAMPERED, "a message that the other side did not write, or not here") from None
        self._received += 1
        if self._received % REKEY_MESSAGES == 0:
            self._noise.rekey_inbound_cipher()
        if not self._frame_end:
            if len(text) < _LENGTH_BYTES:
                raise ChannelFailed(Refusal.OVERSIZE, "a frame without a length")
            size = int.from_bytes(text[:_LENGTH_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                raise ChannelFailed(Refusal.OVERSIZE, f"a frame of {size} bytes, at most {FRAME_BYTES_MAX}")
            self._frame_end = _LENGTH_BYTES + size
        self._frame += text
        if len(self._frame) > self._frame_end or not text:
            raise ChannelFailed(Refusal.OVERSIZE, "a frame longer than it said")
        if len(self._frame) == self._frame_end:
            frame = bytes(self._frame[_LENGTH_BYTES:])
            self._frame.clear()
            self._frame_end = 0
            yield frame


def _statement(static: bytes, *, initiator: bool) -> bytes:
    return _DEVICE_TAG + (b"i" if initiator else b"r") + static


def _public(keypair: object) -> bytes:
    public: bytes = keypair.public_bytes  # type: ignore[attr-defined]  # noiseprotocol has no types
    return public


def _x25519_public(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    assert len(secret) == SEED_BYTES
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
