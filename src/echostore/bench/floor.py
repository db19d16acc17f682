"""The floor: what the same blocks cost with bare libraries. Protobuf, two SHA-256, one signature per 64, SQLite rows."""

import hashlib
import sqlite3
import time
from pathlib import Path

from echostore.wire.generated import message_pb2, property_set_pb2, value_pb2
from echostore.wire.signing import SigningKey

BATCH = 64


def floor_seconds(path: Path, blocks: int, items: int, *, signing: bool) -> float:
    """Seconds of CPU and waiting for `blocks` blocks: encode, hash twice, sign every 64, insert a block and a row."""
    key = SigningKey.generate()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE blocks (seq INTEGER PRIMARY KEY, link BLOB, payload BLOB)")
    database.execute("CREATE TABLE props (item BLOB, name TEXT, value, PRIMARY KEY (item, name)) WITHOUT ROWID")
    database.execute("CREATE INDEX props_value ON props (name, value)")
    ids = [number.to_bytes(16, "big") for number in range(items)]
    link = bytes(32)
    started = time.perf_counter()
    for start in range(0, blocks, BATCH):
        rows, indexed = [], []
        for seq in range(start, min(start + BATCH, blocks)):
            change = property_set_pb2.PropertyChange(path=["done"], set=value_pb2.Value(integer=seq))
            operation = message_pb2.Operation(
                local=seq << 16, property_set=property_set_pb2.PropertySetOperation(changes=[change])
            )
            payload = message_pb2.Message(depth=seq + 1, time_ms=seq, operations=[operation]).SerializeToString()
            content = hashlib.sha256(payload).digest()
            link = hashlib.sha256(link + content).digest()
            rows.append((seq, link, payload))
            indexed.append((ids[seq % items], "done", seq))
        if signing:
            key.sign(link)
        database.execute("BEGIN")
        database.executemany("INSERT INTO blocks VALUES (?, ?, ?)", rows)
        database.executemany("INSERT OR REPLACE INTO props VALUES (?, ?, ?)", indexed)
        database.execute("COMMIT")
    elapsed = time.perf_counter() - started
    database.close()
    return elapsed
