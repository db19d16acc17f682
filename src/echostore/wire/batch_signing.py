"""What a leaf signs of a batch, so that no edge on its way can write in its name.

    tag ++ arc ++ number of the batch ++ number of its first operation ++ SHA-256 of its operations

An arc names the root and the leaf. Numbers have 8 bytes, big-endian; whatever has a length comes after it. A batch has its
place in its arc, so a signature is good for one place: it can be repeated, and then counts once.
"""

import hashlib

from echostore.kernel.coherence.messages import Arc, PublishOp, Update
from echostore.wire.signing import SigningKey, verify

BATCH_TAG = b"echostore:thin-batch:1\0"


def batch_statement(batch: Update) -> bytes:
    """The bytes that are signed for a batch."""
    hashed = hashlib.sha256()
    first = 0
    for item in batch.items:
        assert isinstance(item, PublishOp), f"{item} is not written by a leaf"
        first = first or item.op.n
        parts = (_arc(item.op.arc), _number(item.op.n), _sized(item.object), _sized(item.delta))
        hashed.update(b"".join(parts))
    return b"".join([BATCH_TAG, _arc(batch.clock), _number(batch.tick), _number(first), hashed.digest()])


def signed_batch(batch: Update, key: SigningKey) -> Update:
    signature = key.sign(batch_statement(batch))
    return Update(batch.clock, batch.prev, batch.tick, batch.follows, batch.items, signature)


def is_signed_by(batch: Update, key: bytes) -> bool:
    """Whether the leaf with this key wrote the batch, as it is."""
    return bool(batch.signature) and verify(key, batch_statement(batch), batch.signature)


def _arc(arc: Arc) -> bytes:
    path = b"".join(map(_number, arc.system.path))
    return arc.system.root + _number(len(arc.system.path)) + path + _number(arc.gen)


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data
