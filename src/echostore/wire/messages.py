"""Messages <-> bytes: the payload of a block.

Decoding comes in two steps, because the orderer needs only the envelope: `decode_envelope` checks what decides over a
feed's life (O5), `decode_operations` runs when the message is delivered. Received bytes are never re-serialised.
"""

from google.protobuf.message import DecodeError

from echostore.kernel.errors import TooLarge
from echostore.kernel.ids import (
    ARC_BIT,
    FEED_ID_BYTES,
    ITEM_ID_BYTES,
    KEY_BYTES,
    LINK_PREFIX_BYTES,
    FeedId,
    ItemId,
    PartyKey,
    Stamp,
    created_item_id,
    item_creator,
    item_id,
    item_local,
)
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, REFUSED, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED
from echostore.kernel.limits import (
    CREDENTIALS_MAX,
    DEPENDENCIES_MAX,
    DEPTH_MAX,
    OPERATIONS_MAX,
    SEQ_MAX,
    VALUE_BYTES_MAX,
)
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.order import CONTROL, Envelope
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.models import CODECS, MODEL_OF_FIELD, property_set
from echostore.wire.views import is_itemless_proof, view_proof_holds

NAME_CHARACTERS_MAX = 256
"""Names of models and types."""

_NO_FEED = b""


def check_custom_operation(body: bytes) -> None:
    """TooLarge when an operation of an application's model does not fit a message."""
    if len(body) > VALUE_BYTES_MAX:
        raise TooLarge(
            f"an operation of {len(body)} bytes; a model's own operation has at most {VALUE_BYTES_MAX}",
            unchanged="Nothing was written.",
            next_step="Split it, or keep large content as a blob and refer to it.",
        )


def encode_operation(writer: FeedId, operation: ItemOperation) -> pb.Operation:
    """One operation as a message of the schema."""
    item, field, body = operation
    creator = item_creator(item)
    message = pb.Operation(feed=_NO_FEED if creator == writer else creator, local=item_local(item))
    if field == GENESIS:
        if not message.local & ARC_BIT:
            message.local = 0
        message.genesis.CopyFrom(encode_genesis(body))
    elif field == METADATA:
        message.metadata.CopyFrom(property_set.encode_operation(body))
    elif field == PLACEMENT:
        kind, parent = body
        message.placement.CopyFrom(pb.Placement(kind=kind, parent=parent or b""))
    elif field == CUSTOM:
        check_custom_operation(body)
        message.custom = body
    elif field == "property-set":
        message.property_set.CopyFrom(property_set.encode_operation(body))
    else:
        codec = CODECS[field]
        getattr(message, codec.field).CopyFrom(codec.encode_operation(body))
    return message


def decode_envelope(payload: bytes, kind: str) -> Envelope | Reason:
    """What ordering needs; the body is the parsed message, for `decode_operations` or the credentials' codec."""
    try:
        message = pb.Message.FromString(payload)
    except (DecodeError, ValueError):
        return Reason.UNDECODABLE
    depth = message.depth
    if not 0 < depth <= DEPTH_MAX:
        return Reason.LYING_DEPTH
    if message.operations if kind == CONTROL else message.credentials:
        return Reason.WRONG_KIND
    if len(message.operations) > OPERATIONS_MAX or len(message.credentials) > CREDENTIALS_MAX:
        return Reason.OVERSIZE
    seqs = message.dependency_seqs
    if not seqs:
        if message.dependency_feeds or message.dependency_links or message.dependency_depths:
            return Reason.UNDECODABLE
        return Envelope((), depth, message)
    dependencies = _dependencies(message)
    return Envelope(dependencies, depth, message) if isinstance(dependencies, tuple) else dependencies


def _dependencies(message: pb.Message) -> tuple[Dependency, ...] | Reason:
    seqs = message.dependency_seqs
    count = len(seqs)
    feeds, links, depths = message.dependency_feeds, message.dependency_links, message.dependency_depths
    if count > DEPENDENCIES_MAX:
        return Reason.OVERSIZE
    if len(feeds) != count * FEED_ID_BYTES or len(links) != count * LINK_PREFIX_BYTES or len(depths) != count:
        return Reason.UNDECODABLE
    found = tuple(
        [
            Dependency(
                FeedId(feeds[index * FEED_ID_BYTES : (index + 1) * FEED_ID_BYTES]),
                seqs[index],
                links[index * LINK_PREFIX_BYTES : (index + 1) * LINK_PREFIX_BYTES],
                depths[index],
            )
            for index in range(count)
        ]
    )
    if max(seqs) > SEQ_MAX or any(found[index].feed >= found[index + 1].feed for index in range(count - 1)):
        return Reason.UNDECODABLE
    return found


def decode_operations(message: pb.Message, *, party: PartyKey, feed: FeedId, seq: int) -> list[ItemOperation]:
    """The operations of a delivered message; OperationRefused(MALFORMED) rejects the message as a whole."""
    depth = message.depth
    return [
        decode_operation(operation, party=party, feed=feed, seq=seq, position=position, depth=depth)
        for position, operation in enumerate(message.operations)
    ]


def decode_operation(
    operation: pb.Operation, *, party: PartyKey, feed: FeedId, seq: int, position: int, depth: int
) -> ItemOperation:
    """One operation of the message at (feed, seq); OperationRefused as above."""
    field = operation.WhichOneof("kind")
    if field == "genesis":
        return _decode_genesis(operation, party, feed, seq, position, depth)
    creator = operation.feed
    if creator and len(creator) != FEED_ID_BYTES:
        raise OperationRefused(Reason.MALFORMED, "a feed id of wrong length")
    item = item_id(FeedId(creator) if creator else feed, operation.local)
    if field == "property_set":
        stamp = Stamp(depth, feed, seq, position)
        return ItemOperation(item, "property-set", property_set.decode_operation(operation.property_set, stamp))
    if field == "metadata":
        stamp = Stamp(depth, feed, seq, position)
        return ItemOperation(item, METADATA, property_set.decode_operation(operation.metadata, stamp))
    if field == "custom":
        return ItemOperation(item, CUSTOM, operation.custom)
    if field == "placement":
        return ItemOperation(item, PLACEMENT, _decode_placement(operation.placement))
    if field is None:
        raise OperationRefused(Reason.MALFORMED, "an operation without a kind")
    model = MODEL_OF_FIELD[field]
    stamp = Stamp(depth, feed, seq, position)
    return ItemOperation(item, model, CODECS[model].decode_operation(getattr(operation, field), stamp))


def encode_genesis(genesis: Genesis) -> pb.Genesis:
    message = pb.Genesis(
        model=genesis.model,
        version=genesis.version,
        type=genesis.type,
        parent=genesis.parent or b"",
        forked_from=genesis.forked_from or b"",
    )
    if genesis.source is not None and genesis.target is not None:
        message.link.CopyFrom(
            pb.LinkEnds(source=genesis.source, target=genesis.target, target_party=genesis.target_party or b"")
        )
    if genesis.inception_key:
        message.view.CopyFrom(pb.ViewProof(inception_key=genesis.inception_key, id_proof=genesis.id_proof))
    return message


def _decode_genesis(
    operation: pb.Operation, party: PartyKey, feed: FeedId, seq: int, position: int, depth: int
) -> ItemOperation:
    message = operation.genesis
    local = operation.local
    if operation.feed or (local and not local & ARC_BIT):
        raise OperationRefused(Reason.MALFORMED, "a genesis that names its own id")
    item = item_id(feed, local) if local else created_item_id(feed, seq, position)
    if not 0 < len(message.model) <= NAME_CHARACTERS_MAX or len(message.type) > NAME_CHARACTERS_MAX:
        raise OperationRefused(Reason.MALFORMED, "a model or type name of wrong length")
    if not message.version:
        raise OperationRefused(Reason.MALFORMED, "a genesis without a model version")
    link, view = message.link, message.view
    has_link, has_view = message.HasField("link"), message.HasField("view")
    genesis = Genesis(
        item=item,
        model=message.model,
        version=message.version,
        type=message.type,
        parent=_item(message.parent),
        depth=depth,
        source=_item(link.source, needed=True) if has_link else None,
        target=_item(link.target, needed=True) if has_link else None,
        target_party=_party(link.target_party) if has_link else None,
        inception_key=view.inception_key if has_view else b"",
        id_proof=view.id_proof if has_view else b"",
        forked_from=_item(message.forked_from),
    )
    if has_view and local:
        return ItemOperation(item, REFUSED, (Reason.BAD_PROOF, "a view with a granted id"))
    if has_view and not view_proof_holds(party, item, message):
        return ItemOperation(item, REFUSED, (Reason.BAD_PROOF, _why_bad(party, message)))
    return ItemOperation(item, GENESIS, genesis)


def _why_bad(party: PartyKey, genesis: pb.Genesis) -> str:
    if is_itemless_proof(party, genesis):
        return "a proof of the earlier form, which names no item; create the view again"
    return "the inception key did not sign for this item and genesis"


def _decode_placement(message: pb.Placement) -> tuple[int, ItemId | None]:
    if message.kind not in (MOVE, EMBED, UNEMBED):
        raise OperationRefused(Reason.MALFORMED, "an unknown placement")
    return message.kind, _item(message.parent)


def _item(data: bytes, *, needed: bool = False) -> ItemId | None:
    if not data and not needed:
        return None
    if len(data) != ITEM_ID_BYTES:
        raise OperationRefused(Reason.MALFORMED, "an item id of wrong length")
    return ItemId(data)


def _party(data: bytes) -> PartyKey | None:
    if not data:
        return None
    if len(data) != KEY_BYTES:
        raise OperationRefused(Reason.MALFORMED, "a party key of wrong length")
    return PartyKey(data)
