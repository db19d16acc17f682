"""View proofs: an inception key signs for the party, the item and the genesis of the view it names.

The proof names the item, so that nobody without the private key can put the inception key on another item: a copy of a
genesis with its proof is refused. Proofs of the form before (`echostore/view/2`) named no item and are refused too.

What is signed is made of the values that the genesis says, each with its length before it, and not of its bytes:
protobuf has many encodings of one message, and a peer or a Spark job that holds the values alone must come to the same
verdict. Fields that a later version wrote and this one does not know are covered too, in the order they came in.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from echostore.kernel.ids import KEY_BYTES, ItemId, PartyKey
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.signing import SigningKey, verify

VIEW_TAG = b"echostore/view/3"
ITEMLESS_TAG = b"echostore/view/2"
"""Of proofs that name no item. Such a proof is refused: whoever saw it could put it on another item."""


def view_statement(party: PartyKey, item: ItemId, genesis: pb.Genesis) -> bytes:
    """What the inception key signs: the party, the item and the hash of all that the genesis says but the proof."""
    return VIEW_TAG + party + item + _said(genesis)


def _said(genesis: pb.Genesis) -> bytes:
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
    return said.digest()


def sign_view(party: PartyKey, item: ItemId, genesis: pb.Genesis, inception: SigningKey) -> bytes:
    return inception.sign(view_statement(party, item, genesis))


def view_proof_holds(party: PartyKey, item: ItemId, genesis: pb.Genesis) -> bool:
    key = genesis.view.inception_key
    return len(key) == KEY_BYTES and verify(key, view_statement(party, item, genesis), genesis.view.id_proof)


def is_itemless_proof(party: PartyKey, genesis: pb.Genesis) -> bool:
    """Whether a refused proof is one of the form before, by the inception key: its view is to be created again."""
    key = genesis.view.inception_key
    return len(key) == KEY_BYTES and verify(key, itemless_statement(party, genesis), genesis.view.id_proof)


def itemless_statement(party: PartyKey, genesis: pb.Genesis) -> bytes:
    """What inception keys signed before proofs named the item."""
    return ITEMLESS_TAG + party + _said(genesis)


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
