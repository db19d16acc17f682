"""Between the live state and the ItemStore: what a checkpoint holds, and how it is read back."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, FeedId, ItemId, PartyKey, Stamp
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.items.tree import TreeMove
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.order import FeedCursor
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency
from echostore.kernel.values import BlobRef, Reference, Value
from echostore.store.item_store import Checkpoint, CursorRow, ItemRow, ItemStore, MoveRow, StateRow
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import decode_record, encode_record

_REFERENCE, _BLOB = 1, 2
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


RULES_MARK = "rules"
RULES = b"2"
"""By which rules items were folded. Those of another number are folded again from the blocks.

2: proofs of views name the item, an inception key names one item, and `touches` has the blocks that claim a key.
"""


class LoadedCursors(NamedTuple):
    """Where a checkpoint stands and under which admission it was taken."""

    cursors: list[FeedCursor]
    admission: bytes
    base: bytes
    """The genesis of the base epoch that the items were folded from; empty for none."""
    rules: bytes


def load_cursors(store: ItemStore) -> LoadedCursors:
    cursors = [
        FeedCursor(
            row.key,
            row.kind,
            length=row.length,
            link=row.link,
            depth=row.depth,
            asserted=_decode_asserted(row.asserted),
            ended=Reason(row.ended) if row.ended else None,
        )
        for row in store.cursors()
    ]
    admission, base, rules = (store.about(name) or b"" for name in ("admission", "base", RULES_MARK))
    return LoadedCursors(cursors, admission, base, rules)


def load_moves(store: ItemStore) -> list[TreeMove]:
    return [
        TreeMove(
            Stamp(row.depth, FeedId(row.feed), row.seq, row.position),
            ItemId(row.item),
            row.kind,
            ItemId(row.parent) if row.parent is not None else None,
        )
        for row in store.moves()
    ]


def load_record(store: ItemStore, item: ItemId, factory: ModelFactory) -> ItemRecord | None:
    row = store.state(item)
    return None if row is None else record_of(row.state, row.native, row.last, factory)


def record_of(state: bytes, native: bytes | None, last: bytes | None, factory: ModelFactory) -> ItemRecord:
    """A record from its stored parts; a model that edits in place comes from its own fast form."""
    if native is None:
        record = decode_record(state, factory)
    else:
        shell = pb.ItemState.FromString(state)
        blank = factory.create(shell.model, shell.version, ItemId(shell.item))
        record = decode_record(state, factory, model=type(blank).from_native(ItemId(shell.item), native))
    if last:
        depth, feed, seq, position = msgspec.msgpack.decode(last)
        record.last = Stamp(depth, FeedId(feed), seq, position)
    return record


def cursor_rows(cursors: Iterable[FeedCursor]) -> list[CursorRow]:
    return [
        CursorRow(
            cursor.key,
            cursor.kind,
            cursor.length,
            cursor.link,
            cursor.depth,
            _encode_asserted(cursor.asserted),
            str(cursor.ended) if cursor.ended else None,
        )
        for cursor in cursors
    ]


def state_rows(state: PartyState, declared: frozenset[str], checkpoint: Checkpoint) -> None:
    """Add everything about the dirty items of a state to a checkpoint."""
    for item in state.dirty:
        record = state.records.get(item)
        if record is None:
            checkpoint.gone.append(item)
            continue
        add_record(checkpoint, record, item_row(state.home(item), record), _state_row(record), declared)


def add_record(
    checkpoint: Checkpoint, record: ItemRecord, row: ItemRow, state: StateRow, declared: frozenset[str]
) -> None:
    """Add one item with its indexes."""
    item = record.item
    checkpoint.items.append(row)
    checkpoint.states.append(state)
    references = references_of(record)
    if references:
        checkpoint.references[item] = references
    if declared and isinstance(record.model, PropertySet):
        values = record.model.value()
        if values:
            indexed = [(name, index_key(values[name])) for name in declared if name in values]
            checkpoint.properties[item] = [(name, key) for name, key in indexed if key is not None]


def move_rows(moves: Iterable[TreeMove]) -> list[MoveRow]:
    return [
        MoveRow(
            move.stamp.depth, move.stamp.feed, move.stamp.seq, move.stamp.position, move.item, move.kind, move.parent
        )
        for move in moves
    ]


def item_row(home: ItemId | None, record: ItemRecord) -> ItemRow:
    """What queries filter on; `home` is where the item hangs."""
    genesis = record.genesis
    model = record.model
    return ItemRow(
        genesis.item,
        genesis.type,
        genesis.model,
        genesis.version,
        home,
        record.deleted,
        genesis.source,
        genesis.target,
        genesis.target_party,
        genesis.inception_key or None,
        genesis.depth,
        genesis.parent,
        encode_values(model.value()) if isinstance(model, PropertySet) else None,
    )


def _state_row(record: ItemRecord) -> StateRow:
    last = msgspec.msgpack.encode(record.last) if record.last else None
    if getattr(record.model, "edits_in_place", False):
        shell = encode_record(record, with_model=False)
        return StateRow(record.item, shell.SerializeToString(deterministic=True), record.model.native(), last)
    return StateRow(record.item, encode_record(record).SerializeToString(deterministic=True), None, last)


def references_of(record: ItemRecord) -> list[ItemId]:
    """Items of this party that an item's properties or elements point to."""
    model = record.model
    return references_in(model.value()) if isinstance(model, (PropertySet, GrowableArray)) else []


def references_in(values: Value) -> list[ItemId]:
    """Items of this party that a value points to, each once."""
    found: dict[ItemId, None] = {}
    _collect(values, found)
    return list(found)


def _collect(value: Value, found: dict[ItemId, None]) -> None:
    kind = type(value)
    if kind is Reference:
        if value.party is None:
            found[value.item] = None
    elif kind is dict:
        for inner in value.values():
            _collect(inner, found)
    elif kind is list:
        for inner in value:
            _collect(inner, found)


def index_key(value: Value) -> object:
    """What the index of a declared property holds for a value; None when the value is not indexed (lists, maps)."""
    kind = type(value)
    if kind is bool:
        return int(value)
    if kind is int or kind is float or kind is str or kind is bytes:
        return value
    if kind is Reference:
        return value.item
    return None


def encode_values(values: dict[str, Value]) -> bytes:
    """Properties as the query index keeps them: msgpack with our own types as extensions."""
    return _encoder.encode({key: value if type(value) in _PLAIN else _tagged(value) for key, value in values.items()})


def decode_values(data: bytes) -> dict[str, Value]:
    decoded: dict[str, Value] = _decoder.decode(data)
    return decoded


def _tagged(value: Value) -> object:
    """Our own types as extensions, wherever they stand: msgspec would write a dataclass as a map."""
    if isinstance(value, Reference):
        return msgspec.msgpack.Ext(_REFERENCE, value.item + (value.party or b""))
    if isinstance(value, BlobRef):
        content = [list(value.cids), value.size, value.media_type, value.name]
        return msgspec.msgpack.Ext(_BLOB, msgspec.msgpack.encode(content))
    if isinstance(value, list):
        return [_tagged(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _tagged(inner) for key, inner in value.items()}
    return value


def _decode_extension(code: int, data: memoryview) -> object:
    raw = bytes(data)
    if code == _REFERENCE:
        return Reference(ItemId(raw[:16]), PartyKey(raw[16:]) if len(raw) > 16 else None)
    if code == _BLOB:
        cids, size, media_type, name = msgspec.msgpack.decode(raw)
        return BlobRef(tuple(Cid(cid) for cid in cids), size, media_type, name)
    raise Corrupt(f"the item index holds an unknown extension {code}")


def _encode_asserted(asserted: dict[FeedId, Dependency]) -> bytes:
    return msgspec.msgpack.encode([list(dependency) for dependency in asserted.values()])


def _decode_asserted(data: bytes) -> dict[FeedId, Dependency]:
    rows = msgspec.msgpack.decode(data)
    return {FeedId(feed): Dependency(FeedId(feed), seq, prefix, depth) for feed, seq, prefix, depth in rows}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_extension)

__all__ = [
    "RULES",
    "RULES_MARK",
    "LoadedCursors",
    "add_record",
    "cursor_rows",
    "decode_values",
    "encode_values",
    "index_key",
    "item_row",
    "load_cursors",
    "load_moves",
    "load_record",
    "move_rows",
    "record_of",
    "references_in",
    "references_of",
    "state_rows",
]
