"""View proofs: an inception key signs for the party and the genesis of the view it names."""

import hashlib

from echostore.kernel.ids import KEY_BYTES, PartyKey
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.signing import SigningKey, verify

VIEW_TAG = b"echostore/view/1"


def view_statement(party: PartyKey, genesis: pb.Genesis) -> bytes:
    """What the inception key signs: the party and the hash of the genesis without the proof."""
    bare = pb.Genesis()
    bare.CopyFrom(genesis)
    bare.view.ClearField("id_proof")
    return VIEW_TAG + party + hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()


def sign_view(party: PartyKey, genesis: pb.Genesis, inception: SigningKey) -> bytes:
    return inception.sign(view_statement(party, genesis))


def view_proof_holds(party: PartyKey, genesis: pb.Genesis) -> bool:
    key = genesis.view.inception_key
    return len(key) == KEY_BYTES and verify(key, view_statement(party, genesis), genesis.view.id_proof)
