"""Item records <-> ItemState bytes: what a snapshot's page and the ItemStore hold of an item."""

from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt, ModelFailed
from echostore.kernel.ids import Cid, FeedId, IdentityKey, ItemId, PartyKey, Stamp
from echostore.kernel.items.record import DELETED_KEY, AccessRule, AccessWrite, Genesis, ItemRecord
from echostore.kernel.items.tree import Tree, TreeMove
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.ordered_fold import CommutingFold, KeptOperation, OrderedFold
from echostore.kernel.models.property_set import PropertySet
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.models import CODECS, property_set
from echostore.wire.snapshot import Put, is_node_cid
from echostore.wire.values import MalformedValue, value_bytes, value_from_bytes

MOVES_PER_CHUNK = 8192
"""About half a blob. Part of the format: with another number, equal states have other CIDs."""

NO_STATE = b""
"""The state of a model that can't write its own: no value has these bytes."""


def encode_record(record: ItemRecord, *, with_model: bool = True) -> pb.ItemState:
    """The canonical message of a record, with its model's whole state inside unless told otherwise."""
    genesis = record.genesis
    return pb.ItemState(
        item=genesis.item,
        model=genesis.model,
        version=genesis.version,
        type=genesis.type,
        parent=genesis.parent or b"",
        link_source=genesis.source or b"",
        link_target=genesis.target or b"",
        link_party=genesis.target_party or b"",
        inception_key=genesis.inception_key,
        id_proof=genesis.id_proof,
        forked_from=genesis.forked_from or b"",
        state=encode_model(record.model) if with_model else b"",
        metadata=property_set.encode_state(record.metadata) if record.metadata.layers else b"",
        access=[_encode_access(write) for write in record.access],
        genesis_depth=genesis.depth,
    )


def decode_record(data: bytes, factory: ModelFactory, *, model: object | None = None) -> ItemRecord:
    """The record of an ItemState whose state is inline, or given; Corrupt when the bytes are not one."""
    try:
        message = pb.ItemState.FromString(data)
        item = ItemId(message.item)
        genesis = Genesis(
            item=item,
            model=message.model,
            version=message.version,
            type=message.type,
            parent=ItemId(message.parent) if message.parent else None,
            depth=message.genesis_depth,
            source=ItemId(message.link_source) if message.link_source else None,
            target=ItemId(message.link_target) if message.link_target else None,
            target_party=PartyKey(message.link_party) if message.link_party else None,
            inception_key=message.inception_key,
            id_proof=message.id_proof,
            forked_from=ItemId(message.forked_from) if message.forked_from else None,
        )
        metadata = property_set.decode_state(item, message.metadata) if message.metadata else PropertySet(item)
        if model is None:
            model = decode_model(factory, message.model, message.version, item, message.state)
    except (DecodeError, MalformedValue, OperationRefused) as error:
        raise Corrupt(f"an item state can't be read: {error}") from error
    return ItemRecord(genesis, model, metadata, [_decode_access(entry) for entry in message.access])


def is_deleted(state: pb.ItemState) -> bool:
    """`ItemRecord.deleted` of an item whose model is not read; Corrupt when its metadata can't be."""
    if not state.metadata:
        return False
    try:
        metadata = property_set.decode_state(ItemId(state.item), state.metadata)
    except (DecodeError, MalformedValue, OperationRefused) as error:
        raise Corrupt(f"an item state can't be read: {error}") from error
    return metadata.get((DELETED_KEY,)) is True


def encode_model(model: object) -> bytes:
    """The canonical state of a model: its own message, or its operations in order."""
    if isinstance(model, PropertySet):
        return property_set.encode_state(model)
    if isinstance(model, OrderedFold):
        kept = [
            pb.KeptOperation(
                feed=one.stamp.feed,
                depth=one.stamp.depth,
                seq=one.stamp.seq,
                position=one.stamp.position,
                time_ms=one.time_ms,
                operation=one.operation,
            )
            for one in model.operations
        ]
        return pb.OperationsState(operations=kept).SerializeToString(deterministic=True)
    if isinstance(model, CommutingFold):
        try:
            return value_bytes(model.state())
        except ModelFailed:
            return NO_STATE  # its own handle tells; all other items are written
    return CODECS[model.name].encode_state(model)  # type: ignore[attr-defined]  # every base model has a name


def decode_model(factory: ModelFactory, name: str, version: int, item: ItemId, state: bytes) -> object:
    blank = factory.create(name, version, item)
    if isinstance(blank, OrderedFold):
        message = pb.OperationsState.FromString(state)
        kept = [
            KeptOperation(Stamp(one.depth, FeedId(one.feed), one.seq, one.position), one.time_ms, one.operation)
            for one in message.operations
        ]
        return factory.restore_operations(name, version, item, kept)
    if isinstance(blank, CommutingFold):
        if state == NO_STATE:
            blank.fail(ValueError("it could not write its snapshot down"))
        else:
            blank.restore(value_from_bytes(state, bytes_max=None))  # a state may be larger than one property
        return blank
    return CODECS[name].decode_state(item, state)


def encode_moves(moves: Sequence[TreeMove], put: Put, known: Sequence[Cid] = ()) -> bytes:
    """The tree state's bytes; when there are many moves, they go to `put` in chunks of a fixed number.

    `known` are the first chunks, of whom has them.
    """
    if len(moves) <= MOVES_PER_CHUNK:
        return _encode_moves(moves)
    chunks = list(known)
    for start in range(len(known) * MOVES_PER_CHUNK, len(moves), MOVES_PER_CHUNK):
        data = _encode_moves(moves[start : start + MOVES_PER_CHUNK])
        cid = cid_of(data, PROTOBUF)
        put(cid, data)
        chunks.append(cid)
    return pb.TreeState(chunks=chunks).SerializeToString(deterministic=True)


class MoveChunks:
    """The chunks of a live tree as they were last encoded: those whose moves are the same are not made again."""

    def __init__(self) -> None:
        self._cids: list[Cid] = []

    def encode(self, tree: Tree, put: Put, missing: Callable[[list[Cid]], list[Cid]]) -> bytes:
        """`encode_moves` of the tree; `missing` tells which chunks are not stored, or not any more."""
        same = self._cids[: tree.unchanged // MOVES_PER_CHUNK]
        data = encode_moves(tree.moves, put, [] if missing(same) else same)
        self._cids, tree.unchanged = move_chunks(data), len(tree.moves)
        return data


def decode_moves(data: bytes, get: Callable[[Cid], bytes]) -> list[TreeMove]:
    """The moves of a tree state, in canonical order; `get` reads the chunks. Corrupt for moves that are in no order: so a
    chunk that is named a thousand times is read twice."""
    state = _tree_state(data)
    found: list[TreeMove] = []
    for part in (_tree_state(get(cid)) for cid in _chunks_of(state)) if state.chunks else (state,):
        if state.chunks and not part.moves:
            raise Corrupt("a tree state with an empty chunk")
        for move in part.moves:
            stamp = Stamp(move.depth, FeedId(move.feed), move.seq, move.position)
            if found and stamp <= found[-1].stamp:
                raise Corrupt("a tree state with moves that are repeated or out of order")
            found.append(TreeMove(stamp, ItemId(move.item), move.kind, ItemId(move.parent) if move.parent else None))
    return found


def move_chunks(data: bytes) -> list[Cid]:
    """The blobs that a tree state names, beside itself."""
    return _chunks_of(_tree_state(data))


def _chunks_of(state: pb.TreeState) -> list[Cid]:
    if not all(map(is_node_cid, state.chunks)):
        raise Corrupt("a tree state with a chunk that is not named by a protobuf CID")
    return [Cid(cid) for cid in state.chunks]


def _tree_state(data: bytes) -> pb.TreeState:
    try:
        return pb.TreeState.FromString(data)
    except DecodeError as error:
        raise Corrupt("a tree state can't be read") from error


def _encode_moves(moves: Sequence[TreeMove]) -> bytes:
    return pb.TreeState(
        moves=[
            pb.TreeMove(
                feed=move.stamp.feed,
                depth=move.stamp.depth,
                seq=move.stamp.seq,
                position=move.stamp.position,
                item=move.item,
                kind=move.kind,
                parent=move.parent or b"",
            )
            for move in moves
        ]
    ).SerializeToString(deterministic=True)


def _encode_access(write: AccessWrite) -> pb.AccessEntry:
    stamp, rule = write.stamp, write.rule
    return pb.AccessEntry(
        feed=stamp.feed,
        depth=stamp.depth,
        seq=stamp.seq,
        position=stamp.position,
        roles=sorted(rule.roles),
        members=sorted(rule.members),
        cleared=not rule.roles and not rule.members,
    )


def _decode_access(entry: pb.AccessEntry) -> AccessWrite:
    stamp = Stamp(entry.depth, FeedId(entry.feed), entry.seq, entry.position)
    return AccessWrite(stamp, AccessRule(frozenset(entry.roles), frozenset(IdentityKey(key) for key in entry.members)))
