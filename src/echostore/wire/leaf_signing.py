"""What a leaf signs, so that nobody on its way to the root can speak in its name.

    batch      tag ++ arc ++ number of the batch ++ number of its first operation ++ SHA-256 of its operations
    release    tag ++ arc ++ number of the last batch that uses it
    service    tag ++ system ++ name ++ gen ++ seq ++ whether it is offered ++ what is said of it
    message    tag ++ id ++ floor ++ after ++ target ++ crosses roots ++ type ++ context ++ SHA-256 of the payload
    receipt    tag ++ id of the message ++ target

A system's name has the root in it, so a signature is good at one root. Numbers have 8 bytes, big-endian; whatever has a length
comes after it. A statement has its place (a batch in its arc, a message in its stream), so a signature is good for one place: it
can be repeated, and then counts once.
"""

import hashlib
from dataclasses import replace
from typing import TypeVar, assert_never

from echostore.kernel.coherence.messages import (
    Announce,
    Arc,
    Deannounce,
    MessageId,
    PublishOp,
    ReleaseArc,
    Statement,
    SystemId,
    Update,
    UserMessage,
    UserReceipt,
)
from echostore.wire.signing import SigningKey, verify

_Said = TypeVar("_Said", bound=Update | Statement)

BATCH_TAG = b"echostore:thin-batch:1\0"
RELEASE_TAG = b"echostore:thin-release:1\0"
SERVICE_TAG = b"echostore:thin-service:1\0"
MESSAGE_TAG = b"echostore:thin-message:1\0"
RECEIPT_TAG = b"echostore:thin-receipt:1\0"


def statement_bytes(said: Update | Statement) -> bytes:
    """The bytes that are signed for a batch or a statement."""
    match said:
        case Update():
            return _batch(said)
        case ReleaseArc():
            return b"".join([RELEASE_TAG, _arc(said.arc), _number(said.batch)])
        case Announce() | Deannounce():
            offered = isinstance(said, Announce)
            name, detail = said.service.name.encode(), said.detail if isinstance(said, Announce) else b""
            numbers = _number(said.gen) + _number(said.seq) + _flag(offered)
            return b"".join([SERVICE_TAG, _system(said.service.system), _sized(name), numbers, _sized(detail)])
        case UserMessage():
            return _message(said)
        case UserReceipt():
            return b"".join([RECEIPT_TAG, _id(said.id), _system(said.target)])
        case _:
            assert_never(said)


def signed(said: _Said, key: SigningKey) -> _Said:
    return replace(said, signature=key.sign(statement_bytes(said)))


def is_signed_by(said: Update | Statement, key: bytes) -> bool:
    """Whether the leaf with this key said it, as it is."""
    return bool(said.signature) and verify(key, statement_bytes(said), said.signature)


def _batch(batch: Update) -> bytes:
    hashed = hashlib.sha256()
    first = 0
    for item in batch.items:
        assert isinstance(item, PublishOp), f"{item} is not written by a leaf"
        first = first or item.op.n
        parts = (_arc(item.op.arc), _number(item.op.n), _sized(item.object), _sized(item.delta))
        hashed.update(b"".join(parts))
    return b"".join([BATCH_TAG, _arc(batch.clock), _number(batch.tick), _number(first), hashed.digest()])


def _message(message: UserMessage) -> bytes:
    context = [_number(len(message.context))]
    for clause in message.context:
        context.append(_number(len(clause)))
        context += [_arc(witness.clock) + _number(witness.tick) for witness in clause]
    return b"".join(
        [
            MESSAGE_TAG,
            _id(message.id),
            _number(message.floor),
            _number(message.after),
            _system(message.target),
            _flag(message.cross_root),
            _sized(message.type.encode()),
            *context,
            hashlib.sha256(message.payload).digest(),
        ]
    )


def _id(id: MessageId) -> bytes:
    return _system(id.sender) + _number(id.stream) + _number(id.seq)


def _arc(arc: Arc) -> bytes:
    return _system(arc.system) + _number(arc.gen)


def _system(system: SystemId) -> bytes:
    return system.root + _number(len(system.path)) + b"".join(map(_number, system.path))


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _flag(flag: bool) -> bytes:
    return b"\1" if flag else b"\0"


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data
