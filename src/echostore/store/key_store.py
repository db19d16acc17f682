"""KeyStore: this device's secrets, and the public keys of others with the names given to them.

One small file, readable by its owner alone, replaced as a whole and durable before `add` returns: a feed's key is on
disk before the feed's first block. With a passphrase, everything after the header is sealed:

    "echostore/keys/1\\n" | header length u32 | header (JSON: kdf, salt, ops, memory, nonce) | body
    body   kdf "none":      SHA-256(header | content) | content
           kdf "argon2id":  XChaCha20-Poly1305(content), the header as associated data

The passphrase is stretched once, on opening; the derived key stays in memory. Secrets never appear in a repr, an error
or a log. Without a passphrase the file's mode is the only protection, and `protected` says so.
"""

import hashlib
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import nacl.bindings
import nacl.pwhash
from nacl.exceptions import CryptoError

from echostore.kernel.errors import Corrupt, NotFound, Refused, UsageError, WrongPassphrase
from echostore.store.durable_file import PRIVATE_FILE, file_error, read_bounded, replace
from echostore.wire.signing import SEED_BYTES, SigningKey

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Half a million keys; every feed of every party this device ever wrote has one."""

_MAGIC = b"echostore/keys/1\n"
_KEY = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_KEYBYTES
_NONCE = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_NPUBBYTES
_SALT = nacl.pwhash.argon2id.SALTBYTES


class KeyUse(StrEnum):
    """What a secret is for."""

    IDENTITY = "identity"
    DEVICE = "device"
    FEED = "feed"
    PARTY = "party"
    VIEW = "view"


@dataclass(frozen=True, slots=True)
class Stretch:
    """How hard a passphrase is to try: passes and bytes of memory for argon2id."""

    ops: int = nacl.pwhash.argon2id.OPSLIMIT_MODERATE
    memory_bytes: int = nacl.pwhash.argon2id.MEMLIMIT_MODERATE


MODERATE: Final = Stretch()
_OPS_MAX = nacl.pwhash.argon2id.OPSLIMIT_SENSITIVE
_MEMORY_MAX = nacl.pwhash.argon2id.MEMLIMIT_SENSITIVE


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A secret of this device: what it is for, its public half, and a name for people."""

    use: KeyUse
    public: bytes
    label: str
    key: SigningKey = field(repr=False)


@dataclass(frozen=True, slots=True)
class KnownKey:
    """Somebody else's public key and the name given to it here."""

    public: bytes
    label: str


class _Header(msgspec.Struct, frozen=True):
    kdf: str
    salt: bytes = b""
    ops: int = 0
    memory: int = 0
    nonce: bytes = b""


class _Own(msgspec.Struct, frozen=True):
    use: KeyUse
    seed: bytes
    label: str

    def __repr__(self) -> str:
        return f"_Own({self.use})"


class _Content(msgspec.Struct, frozen=True):
    own: list[_Own]
    known: dict[str, str]
    facts: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"_Content({len(self.own)} own, {len(self.known)} known)"


class _Seal:
    """The key that a passphrase was stretched to, with what is needed to stretch it again."""

    __slots__ = ("_key", "salt", "stretch")

    def __init__(self, passphrase: str, salt: bytes, stretch: Stretch) -> None:
        self.salt, self.stretch = salt, stretch
        self._key: bytes = nacl.pwhash.argon2id.kdf(
            _KEY, passphrase.encode(), salt, opslimit=stretch.ops, memlimit=stretch.memory_bytes
        )

    def close(self, content: bytes, header: bytes, nonce: bytes) -> bytes:
        sealed: bytes = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(content, header, nonce, self._key)
        return sealed

    def open(self, body: bytes, header: bytes, nonce: bytes) -> bytes:
        content: bytes = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(body, header, nonce, self._key)
        return content


class KeyStore:
    """The key file, open. `KeyStore.create` and `KeyStore.open` make one."""

    def __init__(self, path: Path, seal: _Seal | None) -> None:
        self.path = path
        self._seal = seal
        self._own: dict[bytes, OwnKey] = {}
        self._known: dict[bytes, KnownKey] = {}
        self._facts: dict[str, bytes] = {}

    @staticmethod
    def create(path: Path, passphrase: str | None = None, *, stretch: Stretch = MODERATE) -> "KeyStore":
        """A new, empty key file; an existing one is never written over."""
        if os.path.lexists(path):
            raise Refused(f"There is a key file at {path} already.", next_step="Open it instead.")
        store = KeyStore(path, _new_seal(passphrase, stretch))
        store._save()
        return store

    @staticmethod
    def open(path: Path, passphrase: str | None = None) -> "KeyStore":
        """The key file at `path`; WrongPassphrase when it is sealed and this does not open it."""
        _refuse_loose_mode(path)
        try:
            raw = read_bounded(path, FILE_BYTES_MAX)
        except OSError as error:
            raise file_error(error, f"read the key file {path}") from error
        seal, content = _unpacked(path, raw, passphrase)
        store = KeyStore(path, seal)
        for own in content.own:
            key = SigningKey(own.seed)
            store._own[key.public] = OwnKey(own.use, key.public, own.label, key)
        for public, label in content.known.items():
            store._known[bytes.fromhex(public)] = KnownKey(bytes.fromhex(public), label)
        store._facts = dict(content.facts)
        return store

    @property
    def protected(self) -> bool:
        """Whether a passphrase is needed to open the file."""
        return self._seal is not None

    def add(self, use: KeyUse, key: SigningKey | None = None, *, label: str = "") -> OwnKey:
        """Keep a secret, by default a new one; durable on return. One that is here already is returned as it is."""
        return self.add_many([(use, key or SigningKey.generate(), label)])[0]

    def add_many(self, entries: list[tuple[KeyUse, SigningKey, str]]) -> list[OwnKey]:
        """Keep several secrets in one write: a party's keys are made together."""
        fresh = {
            key.public: OwnKey(use, key.public, label, key)
            for use, key, label in entries
            if key.public not in self._own
        }
        if fresh:
            self._change(self._own | fresh, self._known)
        return [self._own[key.public] for _, key, _ in entries]

    def key(self, public: bytes) -> SigningKey:
        """The secret of this public key."""
        own = self._own.get(public)
        if own is None:
            raise NotFound(f"There is no secret here for the key {public.hex()}.")
        return own.key

    def has(self, public: bytes) -> bool:
        return public in self._own

    def own(self, use: KeyUse | None = None) -> list[OwnKey]:
        """The secrets of one use, or all, oldest first."""
        return [own for own in self._own.values() if use is None or own.use is use]

    def remember(self, public: bytes, label: str) -> None:
        """Give someone's public key a name."""
        self._change(self._own, self._known | {public: KnownKey(public, label)})

    def known(self) -> list[KnownKey]:
        return list(self._known.values())

    def fact(self, name: str) -> bytes | None:
        """Something that belongs to the keys and is not secret, such as whose device this is."""
        return self._facts.get(name)

    def exchange(
        self,
        *,
        add: Sequence[tuple[KeyUse, SigningKey, str]] = (),
        drop: Collection[bytes] = (),
        facts: Mapping[str, bytes] | None = None,
    ) -> None:
        """Drop secrets, keep others and note facts about them, all in one write."""
        own = {public: owned for public, owned in self._own.items() if public not in drop}
        own |= {key.public: OwnKey(use, key.public, label, key) for use, key, label in add if key.public not in own}
        self._change(own, self._known, self._facts | dict(facts or {}))

    def label(self, public: bytes) -> str | None:
        """The name of a key, own or known."""
        found = self._own.get(public) or self._known.get(public)
        return found.label if found else None

    def change_passphrase(self, passphrase: str | None, *, stretch: Stretch = MODERATE) -> None:
        """Seal the file with another passphrase, or with none; durable on return."""
        before, self._seal = self._seal, _new_seal(passphrase, stretch)
        try:
            self._save()
        except BaseException:
            self._seal = before
            raise

    def __repr__(self) -> str:
        return f"KeyStore({str(self.path)!r}, {len(self._own)} own, {len(self._known)} known)"

    def _change(
        self, own: dict[bytes, OwnKey], known: dict[bytes, KnownKey], facts: dict[str, bytes] | None = None
    ) -> None:
        """Memory follows the disk: after a failed write the store is as before."""
        before = self._own, self._known, self._facts
        self._own, self._known = own, known
        self._facts = self._facts if facts is None else facts
        try:
            self._save()
        except BaseException:
            self._own, self._known, self._facts = before
            raise

    def _save(self) -> None:
        content = msgspec.msgpack.encode(
            _Content(
                own=[_Own(own.use, own.key.seed, own.label) for own in self._own.values()],
                known={known.public.hex(): known.label for known in self._known.values()},
                facts=self._facts,
            )
        )
        try:
            replace(self.path, _packed(self._seal, content))
        except OSError as error:
            raise file_error(error, f"write the key file {self.path}") from error


def _new_seal(passphrase: str | None, stretch: Stretch) -> _Seal | None:
    if passphrase is None:
        return None
    if not passphrase:
        raise UsageError("An empty passphrase protects nothing.", next_step="Give one, or none at all.")
    return _Seal(passphrase, nacl.bindings.randombytes(_SALT), stretch)


def _packed(seal: _Seal | None, content: bytes) -> bytes:
    if seal is None:
        header = msgspec.json.encode(_Header("none"))
        body = hashlib.sha256(header + content).digest() + content
    else:
        # A new nonce for every write: 24 random bytes never meet again.
        nonce = nacl.bindings.randombytes(_NONCE)
        header = msgspec.json.encode(_Header("argon2id", seal.salt, seal.stretch.ops, seal.stretch.memory_bytes, nonce))
        body = seal.close(content, header, nonce)
    return _MAGIC + len(header).to_bytes(4, "big") + header + body


def _unpacked(path: Path, raw: bytes, passphrase: str | None) -> tuple[_Seal | None, _Content]:
    damaged = Corrupt(f"The key file {path} is damaged.", next_step="Restore it from a backup or the recovery phrase.")
    start = len(_MAGIC) + 4
    if not raw.startswith(_MAGIC) or len(raw) < start:
        raise damaged
    end = start + int.from_bytes(raw[start - 4 : start], "big")
    header_bytes, body = raw[start:end], raw[end:]
    # `from None` throughout: the causes quote what they were decoding.
    try:
        header = msgspec.json.decode(header_bytes, type=_Header)
    except msgspec.MsgspecError:
        raise damaged from None
    if header.kdf == "none":
        seal, content = None, body[32:]
        if hashlib.sha256(header_bytes + content).digest() != body[:32]:
            raise damaged
    elif header.kdf == "argon2id":
        seal, content = _opened(path, header, header_bytes, body, passphrase, damaged)
    else:
        raise Refused(f"The key file {path} was written by a newer echostore.")
    try:
        decoded = msgspec.msgpack.decode(content, type=_Content)
    except msgspec.MsgspecError:
        raise damaged from None
    if any(len(own.seed) != SEED_BYTES for own in decoded.own):
        raise damaged
    return seal, decoded


def _opened(
    path: Path, header: _Header, header_bytes: bytes, body: bytes, passphrase: str | None, damaged: Corrupt
) -> tuple[_Seal, bytes]:
    if not passphrase:
        raise WrongPassphrase(
            f"The key file {path} is sealed with a passphrase.", next_step="Give it to open the home."
        )
    bounded = header.ops <= _OPS_MAX and header.memory <= _MEMORY_MAX
    if not bounded or len(header.salt) != _SALT or len(header.nonce) != _NONCE:
        raise damaged
    try:
        seal = _Seal(passphrase, header.salt, Stretch(header.ops, header.memory))
        return seal, seal.open(body, header_bytes, header.nonce)
    except (CryptoError, ValueError):
        raise WrongPassphrase(
            f"This passphrase does not open the key file {path} (or the file is damaged).",
            next_step="Try again, or recover the identity from its recovery phrase.",
        ) from None


def _refuse_loose_mode(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise NotFound(f"There is no key file at {path}.") from None
    except OSError as error:
        raise file_error(error, f"read the key file {path}") from error
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"The key file {path} is not a plain file.", next_step="Replace it with the real file.")
    loose = stat.S_IMODE(found.st_mode) & ~PRIVATE_FILE
    if loose:
        raise Refused(
            f"The key file {path} has mode {stat.S_IMODE(found.st_mode):03o}: others may have read the secrets.",
            next_step=f"Run `chmod 600 {path}`; if others use this machine, make new keys.",
        )
