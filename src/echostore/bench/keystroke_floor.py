"""The floor of a keystroke: the steps that can't be left out, with bare libraries, as cold as between two keystrokes.

    writer     letter into the text ─ its change ─ message ─ two hashes ─ sign ─ commit, sync ─ encrypt
    receiver   decrypt ─ message ─ two hashes ─ verify ─ commit without a sync ─ change into the text

No store, no session, no order, no membership, no live query and no thread between them. What lies on the wire is half of a
round trip, which `network` measures.
"""

import hashlib
import sqlite3
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loro
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from echostore.wire.generated import message_pb2, text_pb2
from echostore.wire.signing import SigningKey, verify

KEYSTROKES = 200
PAUSE_S = 0.005
"""As far apart as the keystrokes of `network`."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Medians in seconds, step by step."""

    writer: dict[str, float]
    receiver: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.writer.values()) + sum(self.receiver.values())


def keystroke_floor(folder: Path) -> Floor:
    """Every step of every letter, each side after a pause of its own."""
    ends = _Ends(folder)
    writer: dict[str, list[float]] = {}
    receiver: dict[str, list[float]] = {}
    try:
        for number in range(KEYSTROKES):
            time.sleep(PAUSE_S)
            _timed(ends.write(number), writer)
            time.sleep(PAUSE_S)
            _timed(ends.receive(number), receiver)
    finally:
        ends.close()
    assert ends.shown == "x" * KEYSTROKES, len(ends.shown)
    return Floor(*({name: statistics.median(found) for name, found in side.items()} for side in (writer, receiver)))


def _timed(steps: dict[str, Callable[[], None]], found: dict[str, list[float]]) -> None:
    for name, step in steps.items():
        begun = time.perf_counter()
        step()
        found.setdefault(name, []).append(time.perf_counter() - begun)


class _Ends:
    """Both ends of a keystroke in one process; what one leaves behind, the other takes up."""

    def __init__(self, folder: Path) -> None:
        self._theirs = loro.LoroDoc()  # type: ignore[no-untyped-call]  # loro has no types for its constructor
        self._ours = loro.LoroDoc()  # type: ignore[no-untyped-call]  # the same
        self._text = self._ours.get_text("text")
        self._key = SigningKey.generate()
        self._cipher = AESGCM(AESGCM.generate_key(128))
        self._nonce = bytes(12)
        self._writer, self._reader = (_table(folder / f"floor-{name}.db") for name in ("writer", "reader"))
        self._reader.execute("PRAGMA synchronous = NORMAL")
        self._written, self._link = bytes(32), bytes(32)
        self._change = self._payload = self._signature = self._frame = b""
        self._seen = self._ours.oplog_vv

    @property
    def shown(self) -> str:
        return str(self._theirs.get_text("text").to_string())

    def write(self, number: int) -> dict[str, Callable[[], None]]:
        return {
            "letter into the text": self._type,
            "its change": self._export,
            "message": lambda: self._encode(number),
            "two hashes": self._chain,
            "sign": self._sign,
            "commit and sync": lambda: self._keep(self._writer, number, self._written),
            "encrypt": self._encrypt,
        }

    def receive(self, number: int) -> dict[str, Callable[[], None]]:
        return {
            "decrypt": self._decrypt,
            "message": self._decode,
            "two hashes": self._chain_again,
            "verify": self._verify,
            "commit": lambda: self._keep(self._reader, number, self._link),
            "change into the text": self._import,
        }

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def _type(self) -> None:
        self._text.insert(0, "x")
        self._ours.commit()

    def _export(self) -> None:
        self._change = self._ours.export(loro.ExportMode.Updates(self._seen))
        self._seen = self._ours.oplog_vv

    def _encode(self, number: int) -> None:
        operation = message_pb2.Operation(local=number, text=text_pb2.TextOperation(update=self._change))
        self._payload = message_pb2.Message(
            depth=number + 1, time_ms=number, operations=[operation]
        ).SerializeToString()

    def _chain(self) -> None:
        self._written = _linked(self._written, self._payload)

    def _sign(self) -> None:
        self._signature = self._key.sign(self._written)

    def _keep(self, database: sqlite3.Connection, number: int, link: bytes) -> None:
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO blocks VALUES (?, ?, ?)", (number, link, self._payload))
        database.execute("INSERT INTO heads VALUES (?, ?, ?)", (number, link, self._signature))
        database.execute("COMMIT")

    def _encrypt(self) -> None:
        self._frame = self._cipher.encrypt(self._nonce, self._signature + self._payload, None)

    def _decrypt(self) -> None:
        plain = self._cipher.decrypt(self._nonce, self._frame, None)
        self._signature, self._payload = plain[:64], plain[64:]

    def _decode(self) -> None:
        self._change = message_pb2.Message.FromString(self._payload).operations[0].text.update

    def _chain_again(self) -> None:
        self._link = _linked(self._link, self._payload)

    def _verify(self) -> None:
        assert verify(self._key.public, self._link, self._signature), "the floor signs what it verifies"

    def _import(self) -> None:
        self._theirs.import_(self._change)


def _linked(previous: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(previous + hashlib.sha256(payload).digest()).digest()


def _table(path: Path) -> Any:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE blocks (seq INTEGER PRIMARY KEY, link BLOB, payload BLOB)")
    database.execute("CREATE TABLE heads (seq INTEGER PRIMARY KEY, link BLOB, signature BLOB)")
    return database
