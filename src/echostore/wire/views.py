"""View proofs: an inception key signs for the party and the genesis of the view it names.

What is signed is made of the values that the genesis says, each with its length before it, and not of its bytes:
protobuf has many encodings of one message, and a peer or a Spark job that holds the values alone must come to the same
verdict. Fields that a later version wrote and this one does not know are covered too, in the order they came in.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from echostore.kernel.ids import KEY_BYTES, PartyKey
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.signing import SigningKey, verify

VIEW_TAG = b"echostore/view/2"


def view_statement(party: PartyKey, genesis: pb.Genesis) -> bytes:
    """What the inception key signs: the party and the hash of all that the genesis says but the proof."""
    link = genesis.link
    said = hashlib.sha256()
    for part in (
        genesis.model.encode(),
        genesis.version.to_bytes(4, "big"),
        genesis.type.encode(),
        genesis.parent,
        link.source,
        link.target,
        link.target_party,
        genesis.view.inception_key,
        genesis.forked_from,
        *_unknown((genesis, link, genesis.view)),
    ):
        said.update(len(part).to_bytes(4, "big"))
        said.update(part)
    return VIEW_TAG + party + said.digest()


def sign_view(party: PartyKey, genesis: pb.Genesis, inception: SigningKey) -> bytes:
    return inception.sign(view_statement(party, genesis))


def view_proof_holds(party: PartyKey, genesis: pb.Genesis) -> bool:
    key = genesis.view.inception_key
    return len(key) == KEY_BYTES and verify(key, view_statement(party, genesis), genesis.view.id_proof)


def _unknown(messages: Iterable[Message]) -> Iterator[bytes]:
    """The fields of each message that this version does not know."""
    for message in messages:
        yield b"".join(_fields(UnknownFieldSet(message)))


def _fields(unknown: Any) -> Iterator[bytes]:
    """Unknown fields with number, wire type and length; groups, which protobuf still reads, hold more of them."""
    for field in unknown:
        data = field.data
        if isinstance(data, int):
            content = b"%d" % data
        else:
            content = data if isinstance(data, bytes) else b"".join(_fields(data))
        yield b"%d %d %d:" % (field.field_number, field.wire_type, len(content)) + content
