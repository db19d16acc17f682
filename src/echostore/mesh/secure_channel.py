"""An encrypted channel between two devices: bytes in, frames out. No sockets, no clock.

    initiator                                            responder
    "ECHO" | lowest, highest version | Noise e  ---->
                                                <----    "ECHO" | lowest, highest version | Noise e, ee, s, es  { preamble }
    Noise s, se  { tags, proof }                ---->    does one of the tags name a key of mine?
                                                <----    { tag, device, signature }, or { } for a stranger
    { device, signature }                       ---->
    frames                                      <--->    frames

The pattern is XX with X25519, AES-GCM and SHA-256 (`noise`). The static keys of the pattern are made for one channel and
tell nothing of a device. A device shows itself by its Ed25519 key and a signature that covers the hash of the handshake:
it counts on this channel and on no other.

Neither side shows its device to a stranger. The initiator names keys that it shares with whom it looks for (the device
itself, a party, an identity whose key signs) by tags that only someone who knows the same key can compute or recognise, and
only on this channel (`KnownKeys`, `Presented`). The responder answers with its own tag of one of them, or with nothing.

The initiator's preamble is the prologue of the handshake, the responder's is repeated in its encrypted part: nobody in
the middle can talk two devices into an older version.

A frame is cut into Noise messages of at most 65,519 bytes of text; each travels behind its length in two bytes. The
first one starts with the length of the frame in four. Keys change every REKEY_MESSAGES messages, on both sides alike.
"""

import hmac
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from echostore.kernel.ids import KEY_BYTES, DeviceKey
from echostore.mesh.noise import DH_BYTES, MESSAGE_BYTES_MAX, TAG_BYTES, Cipher, Handshake, NoiseFailed
from echostore.wire.signing import SIGNATURE_BYTES, SigningKey, verify
from echostore.wire.sync import FRAME_BYTES_MAX as SYNC_FRAME_BYTES_MAX

MAGIC: Final = b"ECHO"
VERSION_LOWEST: Final = 2
VERSION_HIGHEST: Final = 2
"""Version 1 showed the responder's device to everybody, and its signatures did not cover the handshake."""
PREAMBLE_BYTES: Final = len(MAGIC) + 2

FRAME_BYTES_MAX: Final = SYNC_FRAME_BYTES_MAX + 1024
"""The longest replication frame and what wraps it."""

REKEY_MESSAGES: Final = 1 << 16
KEYS_MAX: Final = 1024
"""Keys that one initiator names: each costs the responder a look into a set, and 32 bytes."""
KEYS_MIN: Final = 8
"""The number of tags is filled up with random ones to a power of two, at least this: it does not tell how many parties
an initiator is in."""

_DEVICE_LABEL: Final = b"echostore/device/2"
_KNOWN_LABEL: Final = b"echostore/known-key/2"
_PROOF_LABEL: Final = b"echostore/known-identity/2"
_KNOWN_TAG_BYTES: Final = 32
_TEXT_BYTES_MAX: Final = MESSAGE_BYTES_MAX - TAG_BYTES
_LENGTH_BYTES: Final = 4
_NO_PROOF: Final = bytes(SIGNATURE_BYTES)

# The longest message of each step of the handshake: nothing longer is waited for.
_ASK_BYTES: Final = DH_BYTES
_ANSWER_BYTES: Final = DH_BYTES + (DH_BYTES + TAG_BYTES) + (PREAMBLE_BYTES + TAG_BYTES)
_KNOWN_BYTES: Final = (DH_BYTES + TAG_BYTES) + KEYS_MAX * _KNOWN_TAG_BYTES + SIGNATURE_BYTES + TAG_BYTES
_SHOWN_BYTES: Final = _KNOWN_TAG_BYTES + KEY_BYTES + SIGNATURE_BYTES + TAG_BYTES
_INTRODUCED_BYTES: Final = KEY_BYTES + SIGNATURE_BYTES + TAG_BYTES


class Refusal(StrEnum):
    """Why a channel ended before or in the middle of its work."""

    NOT_ECHOSTORE = "not-echostore"
    NO_COMMON_VERSION = "no-common-version"
    HANDSHAKE_FAILED = "handshake-failed"
    NOTHING_SHARED = "nothing-shared"
    """The dialler is a stranger to whom it dialled: it names no key that is known there."""
    WRONG_DEVICE = "wrong-device"
    TAMPERED = "tampered"
    OVERSIZE = "oversize"


class ChannelFailed(Exception):
    """The other side, or someone between, broke the channel; nothing more may be sent or read."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """What an initiator shares with whom it looks for: keys of devices and parties, and an identity that it can sign as."""

    keys: tuple[bytes, ...] = ()
    identity: SigningKey | None = None


class Presented:
    """What an initiator has shown to a responder."""

    def __init__(self, hash_: bytes, tags: frozenset[bytes], proof: bytes) -> None:
        self._hash, self._tags, self._proof = hash_, tags, proof

    def names(self, key: bytes) -> bool:
        """Whether the initiator knows a key."""
        return _known_tag(self._hash, key, initiator=True) in self._tags

    @property
    def with_proof(self) -> bool:
        return self._proof != _NO_PROOF

    def proven_by(self, identity: bytes) -> bool:
        """Whether the initiator has the secret of an identity's key."""
        return self.names(identity) and verify(identity, _PROOF_LABEL + self._hash, self._proof)


Recognise = Callable[[Presented], bytes | None]
"""The key by which a responder shows itself to an initiator; None for a stranger."""


class SecureChannel:
    """One side of a channel. Feed it what arrives with `receive`; send what `take_outgoing` gives.

    Of an initiator, `expected` is the device that must answer, when one is known; otherwise `known` is what it shares
    with whom it looks for. Of a responder, `recognise` says to whom it shows itself: without it, to who knows its device
    key. `remote` is who is there, once `ready`.
    """

    def __init__(
        self,
        device: SigningKey,
        *,
        initiator: bool,
        expected: DeviceKey | None = None,
        known: KnownKeys | None = None,
        recognise: Recognise | None = None,
    ) -> None:
        self._device = device
        self.initiator = initiator
        self._expected = expected
        self._known = KnownKeys((expected,)) if expected is not None else known or KnownKeys()
        self._recognise = recognise or self._recognise_own_device
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._handshake: Handshake | None = None
        self._known_hash = b""
        """The hash that tags are bound to: it covers all but the message that carries them."""
        self._sends: Cipher | None = None
        self._receives: Cipher | None = None
        self._frame = bytearray()
        self._frame_end = 0
        self._sent = self._received = 0
        self.remote: DeviceKey | None = None
        self.ready = False
        self.failed: ChannelFailed | None = None
        self.handshake_hash = b""
        """The same 32 bytes on both sides, and on no other channel: what signatures and further proofs bind to."""
        self._preamble = MAGIC + bytes([VERSION_LOWEST, VERSION_HIGHEST])
        self._their_preamble = b""
        self._outgoing += self._preamble
        if initiator:
            self._handshake = Handshake(initiator=True, prologue=self._preamble)
            self._outgoing += _framed(self._handshake.write(b""))
        self._message_bytes_max = _ANSWER_BYTES if initiator else _ASK_BYTES
        self._step: Callable[[bytes], None] = self._take_answer if initiator else self._take_ask

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
        first = _TEXT_BYTES_MAX - _LENGTH_BYTES
        parts = [*self._seal(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame[:first])]
        for start in range(first, len(frame), _TEXT_BYTES_MAX):
            parts += self._seal(frame[start : start + _TEXT_BYTES_MAX])
        return b"".join(parts)

    # handshake

    def _advance(self) -> Iterator[bytes]:
        if not self._their_preamble:
            if len(self._buffer) < PREAMBLE_BYTES:
                self._check_magic(bytes(self._buffer[: len(MAGIC)]))
                return
            self._take_preamble(bytes(self._buffer[:PREAMBLE_BYTES]))
            del self._buffer[:PREAMBLE_BYTES]
        while (message := self._next_message()) is not None:
            if self.ready:
                yield from self._open(message)
            else:
                try:
                    self._step(message)
                except NoiseFailed as failure:
                    raise ChannelFailed(Refusal.HANDSHAKE_FAILED, str(failure)) from None

    def _check_magic(self, start: bytes) -> None:
        if not MAGIC.startswith(start):
            raise ChannelFailed(Refusal.NOT_ECHOSTORE, "the other side does not speak this protocol")

    def _take_preamble(self, theirs: bytes) -> None:
        self._check_magic(theirs[: len(MAGIC)])
        lowest, highest = theirs[len(MAGIC)], theirs[len(MAGIC) + 1]
        if max(lowest, VERSION_LOWEST) > min(highest, VERSION_HIGHEST):
            raise ChannelFailed(
                Refusal.NO_COMMON_VERSION,
                f"they speak versions {lowest} to {highest}, we speak {VERSION_LOWEST} to {VERSION_HIGHEST}",
            )
        self._their_preamble = theirs

    def _next_step(self, message_bytes_max: int, step: Callable[[bytes], None]) -> None:
        self._message_bytes_max, self._step = message_bytes_max, step

    # of the initiator

    def _take_answer(self, message: bytes) -> None:
        """The responder's keys; then say what is known."""
        handshake = self._handshake
        assert handshake is not None
        if handshake.read(message) != self._their_preamble:
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, "the versions were changed under way")
        self._known_hash = handshake.hash
        self._outgoing += _framed(handshake.write(self._known_payload()))
        self._split(handshake)
        self._next_step(_SHOWN_BYTES, self._take_shown)

    def _known_payload(self) -> bytes:
        keys, identity = self._known.keys, self._known.identity
        named = dict.fromkeys([*([identity.public] if identity else []), *keys])
        tags = [_known_tag(self._known_hash, key, initiator=True) for key in named][:KEYS_MAX]
        wanted = max(KEYS_MIN, 1 << (len(tags) - 1).bit_length())
        tags += [secrets.token_bytes(_KNOWN_TAG_BYTES) for _ in range(wanted - len(tags))]
        proof = identity.sign(_PROOF_LABEL + self._known_hash) if identity else _NO_PROOF
        return b"".join(sorted(tags)) + proof

    def _take_shown(self, message: bytes) -> None:
        """The responder's device, if it knows a key that was named; then show this one."""
        text = self._decrypt(message)
        if not text and self._expected is not None:
            raise ChannelFailed(Refusal.WRONG_DEVICE, "another device answers there")
        if not text:
            raise ChannelFailed(
                Refusal.NOTHING_SHARED, "the device there shows itself only to those who share a party with it"
            )
        tag, device, signature = _cut(text, _KNOWN_TAG_BYTES, KEY_BYTES, SIGNATURE_BYTES)
        identity = self._known.identity
        named = (*self._known.keys, *([identity.public] if identity else []))
        if not any(hmac.compare_digest(tag, _known_tag(self._known_hash, key, initiator=False)) for key in named):
            raise ChannelFailed(Refusal.NOTHING_SHARED, "the device there knows none of the keys that were named")
        self._check_signature(device, self._statement(device, b""), signature)
        if self._expected is not None and device != self._expected:
            raise ChannelFailed(Refusal.WRONG_DEVICE, f"{device.hex()[:16]} answered")
        own = self._device.public
        self._outgoing += b"".join(self._seal(own + self._device.sign(self._statement(own, device))))
        self.remote, self.ready = DeviceKey(device), True

    # of the responder

    def _take_ask(self, message: bytes) -> None:
        handshake = self._handshake = Handshake(initiator=False, prologue=self._their_preamble)
        if handshake.read(message):
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, "a first message with a payload")
        self._outgoing += _framed(handshake.write(self._preamble))
        self._known_hash = handshake.hash
        self._next_step(_KNOWN_BYTES, self._take_known)

    def _take_known(self, message: bytes) -> None:
        """What the initiator knows: to a stranger nothing is shown."""
        handshake = self._handshake
        assert handshake is not None
        text = handshake.read(message)
        tags, proof = text[:-SIGNATURE_BYTES], text[-SIGNATURE_BYTES:]
        if len(proof) != SIGNATURE_BYTES or len(tags) % _KNOWN_TAG_BYTES:
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, "tags that can't be read")
        self._split(handshake)
        cut = range(0, len(tags), _KNOWN_TAG_BYTES)
        presented = frozenset(tags[at : at + _KNOWN_TAG_BYTES] for at in cut)
        key = self._recognise(Presented(self._known_hash, presented, proof))
        if key is None:
            self._outgoing += b"".join(self._seal(b""))
            raise ChannelFailed(Refusal.NOTHING_SHARED, "a stranger")
        own = self._device.public
        shown = _known_tag(self._known_hash, key, initiator=False) + own + self._device.sign(self._statement(own, b""))
        self._outgoing += b"".join(self._seal(shown))
        self._next_step(_INTRODUCED_BYTES, self._take_introduced)

    def _take_introduced(self, message: bytes) -> None:
        device, signature = _cut(self._decrypt(message), KEY_BYTES, SIGNATURE_BYTES)
        self._check_signature(device, self._statement(device, self._device.public), signature)
        self.remote, self.ready = DeviceKey(device), True

    def _recognise_own_device(self, presented: Presented) -> bytes | None:
        own = self._device.public
        return own if presented.names(own) else None

    # of both

    def _split(self, handshake: Handshake) -> None:
        self._sends, self._receives = handshake.split()
        self.handshake_hash = handshake.hash
        self._handshake = None

    def _statement(self, device: bytes, shown_to: bytes) -> bytes:
        """What a device signs: itself, this channel, and, once it knows, to whom."""
        return _DEVICE_LABEL + self.handshake_hash + device + shown_to

    def _check_signature(self, device: bytes, statement: bytes, signature: bytes) -> None:
        if not verify(device, statement, signature):
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, "the device did not sign this channel")

    # transport

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        size = int.from_bytes(self._buffer[:2], "big")
        if not self.ready and size > self._message_bytes_max:
            raise ChannelFailed(Refusal.HANDSHAKE_FAILED, f"a handshake message of {size} bytes")
        if len(self._buffer) < 2 + size:
            return None
        message = bytes(memoryview(self._buffer)[2 : 2 + size])
        del self._buffer[: 2 + size]
        return message

    def _seal(self, text: bytes) -> tuple[bytes, bytes]:
        """The next message and, before it, its length: in two parts, so that nothing is copied twice."""
        assert self._sends is not None, "before the keys are agreed"
        message = self._sends.encrypt(text)
        self._sent += 1
        if self._sent % REKEY_MESSAGES == 0:
            self._sends.rekey()
        return len(message).to_bytes(2, "big"), message

    def _decrypt(self, message: bytes) -> bytes:
        assert self._receives is not None, "before the keys are agreed"
        text = self._receives.decrypt(message)
        self._received += 1
        if self._received % REKEY_MESSAGES == 0:
            self._receives.rekey()
        return text

    def _open(self, message: bytes) -> Iterator[bytes]:
        try:
            text = self._decrypt(message)
        except NoiseFailed:
            raise ChannelFailed(Refusal.TAMPERED, "a message that the other side did not write, or not here") from None
        if not self._frame_end:
            if len(text) < _LENGTH_BYTES:
                raise ChannelFailed(Refusal.OVERSIZE, "a frame without a length")
            size = int.from_bytes(text[:_LENGTH_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                raise ChannelFailed(Refusal.OVERSIZE, f"a frame of {size} bytes, at most {FRAME_BYTES_MAX}")
            text = text[_LENGTH_BYTES:]
            if len(text) == size:  # most frames are one message
                yield text
                return
            self._frame_end = size
        elif not text:
            raise ChannelFailed(Refusal.OVERSIZE, "a part of a frame with nothing in it")
        self._frame += text
        if len(self._frame) > self._frame_end:
            raise ChannelFailed(Refusal.OVERSIZE, "a frame longer than it said")
        if len(self._frame) == self._frame_end:
            frame, self._frame, self._frame_end = bytes(self._frame), bytearray(), 0
            yield frame


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


def _known_tag(hash_: bytes, key: bytes, *, initiator: bool) -> bytes:
    """Names a key on one channel, to those who know it. The two sides have different tags of one key."""
    return hmac.digest(hash_, _KNOWN_LABEL + (b"i" if initiator else b"r") + key, "sha256")


def _cut(text: bytes, *sizes: int) -> list[bytes]:
    """The parts of a message of fixed size."""
    if len(text) != sum(sizes):
        raise ChannelFailed(Refusal.HANDSHAKE_FAILED, f"a message of {len(text)} bytes instead of {sum(sizes)}")
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    return parts
