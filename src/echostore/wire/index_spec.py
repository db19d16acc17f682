"""Indexes of thin clients <-> canonical bytes: specs, values, patches.

    spec    what an index is asked for by; equal questions have equal bytes
    value   its answer: items in the order of the query; equal answers have equal bytes
    patch   what takes one value to another: `patched(old, diff(old, new)) == new`, byte for byte

Both ends run this module. Whatever is wrong with bytes from the other end raises `MalformedIndex`, never more. A spec
that is not canonical is refused, so that one question is evaluated, cached and watched once.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from echostore.kernel.coherence.messages import IndexValue, Patch, Spec, Token
from echostore.kernel.coherence.services import SERVICES_SPEC
from echostore.kernel.ids import CAPABILITY_ID_BYTES, ITEM_ID_BYTES, KEY_BYTES, ItemId, PartyKey
from echostore.kernel.query.filters import depth
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.values import Value
from echostore.wire.generated import index_pb2 as pb
from echostore.wire.generated import query_pb2
from echostore.wire.queries import MalformedQuery, query_bytes, query_from_bytes
from echostore.wire.signing import SIGNATURE_BYTES
from echostore.wire.values import MalformedValue, value_bytes, value_from_bytes

INDEX_VERSION = 1

INDEX_SPEC_BYTES_MAX = 16 * 1024
"""Every link and every edge on the way keeps it."""

FILTER_DEPTH_MAX = 16

ITEMS_MAX = 10_000
"""Items of one value. More is asked for in parts, by queries with a limit."""

REVOCATIONS_SPEC = Spec(b"revocations")
"""The index of revoked capabilities, which edges hold live."""

FENCE_SPEC = SERVICES_SPEC + b"\0fence/"
"""What a fence asks for, each time under another name: nobody holds it, so the root itself answers. It is empty."""

SEAL_TAG = b"echostore/index-seal/2"


class MalformedIndex(ValueError):
    """Received bytes that can't be read, are not canonical or break a limit."""


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What an index is asked for: a query over a party, or one item of it."""

    party: PartyKey
    query: QuerySpec | None = None
    item: ItemId | None = None
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class IndexItem:
    """One item of an answer. `values` is what a row of the query shows; record and hash are there if sealed."""

    item: ItemId
    type: str
    model: str
    values: dict[str, Value]
    parent: ItemId | None = None
    deleted: bool = False
    source: ItemId | None = None
    target: ItemId | None = None
    record: bytes = b""


# Specs


def index_spec(asked: IndexQuery) -> Spec:
    """The canonical bytes; MalformedIndex when no root would answer it."""
    if asked.query is not None:
        asked = replace(asked, query=asked.query.normal())
    data = _encode_spec(asked)
    _check_spec(asked, data)
    return Spec(data)


def index_query(spec: Spec) -> IndexQuery:
    """What canonical bytes ask for."""
    if len(spec) > INDEX_SPEC_BYTES_MAX:
        raise MalformedIndex(f"a spec of {len(spec)} bytes, at most {INDEX_SPEC_BYTES_MAX}")
    try:
        message = pb.IndexSpec.FromString(spec)
        query = None
        if message.HasField("query"):
            query = query_from_bytes(message.query.SerializeToString(deterministic=True))
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    except MalformedQuery as error:
        raise MalformedIndex(str(error)) from error
    if message.version != INDEX_VERSION:
        raise MalformedIndex(f"version {message.version} of a spec")
    item = ItemId(message.item) if message.item else None
    asked = IndexQuery(PartyKey(message.party), query, item, message.sealed)
    _check_spec(asked, spec)
    if (
        _spec_bytes(asked, None if query is None else message.query) != spec
    ):  # the query itself was found to be canonical
        raise MalformedIndex("not in canonical form")
    return asked


def _encode_spec(asked: IndexQuery) -> bytes:
    query = None
    if asked.query is not None:
        query = query_pb2.QuerySpec.FromString(query_bytes(asked.query))
    return _spec_bytes(asked, query)


def _spec_bytes(asked: IndexQuery, query: query_pb2.QuerySpec | None) -> bytes:
    return pb.IndexSpec(
        version=INDEX_VERSION, party=asked.party, query=query, item=asked.item or b"", sealed=asked.sealed
    ).SerializeToString(deterministic=True)


def _check_spec(asked: IndexQuery, data: bytes) -> None:
    query = asked.query
    if len(asked.party) != KEY_BYTES or (asked.item is not None and len(asked.item) != ITEM_ID_BYTES):
        raise MalformedIndex("a party or item of wrong length")
    if (query is None) is (asked.item is None):
        raise MalformedIndex("a spec is a query or an item, one of the two")
    if query is not None:
        if query.reduce is not None or (asked.sealed and query.select is not None):
            raise MalformedIndex("an index holds items: no reduction, and whole ones where they are sealed")
        if query.limit is not None and query.limit > ITEMS_MAX:
            raise MalformedIndex(f"a limit of {query.limit}, at most {ITEMS_MAX}")
        if any(depth(stage.filter) > FILTER_DEPTH_MAX for stage in query.stages):
            raise MalformedIndex("a filter nested too deep")
    if len(data) > INDEX_SPEC_BYTES_MAX:
        raise MalformedIndex(f"a spec of {len(data)} bytes, at most {INDEX_SPEC_BYTES_MAX}")


# Values


def index_value(items: Iterable[IndexItem], seal: bytes = b"") -> IndexValue:
    """The bytes of an answer."""
    return IndexValue(pb.IndexValue(items=map(_encode_item, items), seal=seal).SerializeToString(deterministic=True))


def index_items(value: IndexValue) -> list[IndexItem]:
    """The items of an answer."""
    return list(_decode_items(_read_value(value)))


def index_seal(value: IndexValue) -> bytes:
    """The signature in an answer; empty where none was asked for."""
    return _read_value(value).seal


def seal_statement(spec: Spec, items: Iterable[IndexItem]) -> bytes:
    """What the root's device signs: which items, each as it is shown and with the hash of its record, and in this order,
    are the answer to which spec. So a leaf that has no models can check what it shows, and one that has them the record.
    """
    listed = b"".join(each.item + _shown_hash(each) for each in items)
    return SEAL_TAG + hashlib.sha256(spec).digest() + hashlib.sha256(listed).digest()


def _shown_hash(each: IndexItem) -> bytes:
    shown = _encode_item(each)
    shown.ClearField("record")
    return hashlib.sha256(shown.SerializeToString(deterministic=True)).digest()


def record_hash(record: bytes) -> bytes:
    return hashlib.sha256(record).digest()


def revocations_value(names: Iterable[bytes]) -> IndexValue:
    """The answer to `revocations`."""
    return IndexValue(pb.IndexValue(revoked=sorted(set(names))).SerializeToString(deterministic=True))


def revoked_names(value: IndexValue) -> frozenset[bytes]:
    """Each is the id of a capability and its issuer, or the id alone: then whoever issued it."""
    message = _read_value(value)
    if any(len(each) not in (CAPABILITY_ID_BYTES, CAPABILITY_ID_BYTES + KEY_BYTES) for each in message.revoked):
        raise MalformedIndex("the name of a revoked capability has a wrong length")
    return frozenset(message.revoked)


def _encode_item(each: IndexItem) -> pb.IndexItem:
    return pb.IndexItem(
        item=each.item,
        type=each.type,
        model=each.model,
        parent=each.parent or b"",
        deleted=each.deleted,
        state=value_bytes(each.values),
        source=each.source or b"",
        target=each.target or b"",
        hash=record_hash(each.record) if each.record else b"",
        record=each.record,
    )


def _decode_items(message: pb.IndexValue) -> Iterator[IndexItem]:
    for each in message.items:
        try:
            values = value_from_bytes(each.state, bytes_max=None)
        except MalformedValue as error:
            raise MalformedIndex(f"a state: {error}") from error
        if not isinstance(values, dict):
            raise MalformedIndex("a state that is not a map")
        if each.record and record_hash(each.record) != each.hash:
            raise MalformedIndex("a record that is not the one of its hash")
        yield IndexItem(
            item=ItemId(each.item),
            type=each.type,
            model=each.model,
            values=values,
            parent=_optional_item(each.parent),
            deleted=each.deleted,
            source=_optional_item(each.source),
            target=_optional_item(each.target),
            record=each.record,
        )


def _optional_item(data: bytes) -> ItemId | None:
    if data and len(data) != ITEM_ID_BYTES:
        raise MalformedIndex("an item id of wrong length")
    return ItemId(data) if data else None


def _read_value(value: IndexValue) -> pb.IndexValue:
    try:
        message = pb.IndexValue.FromString(value)
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    _check_items(message.items)
    if len(message.seal) not in (0, SIGNATURE_BYTES):
        raise MalformedIndex("a seal of wrong length")
    return message


def _check_items(items: Iterable[pb.IndexItem]) -> None:
    seen = [each.item for each in items]
    if len(seen) > ITEMS_MAX or any(len(each) != ITEM_ID_BYTES for each in seen) or len(set(seen)) != len(seen):
        raise MalformedIndex("too many items, one twice, or an id of wrong length")


# Patches


class IndexCodec:
    """How the machines compare and patch values (`kernel.coherence.holdings.Codec`)."""

    def token(self, value: IndexValue) -> Token:
        return Token(hashlib.sha256(value).digest())

    def diff(self, old: IndexValue, new: IndexValue) -> Patch | None:
        """None when the patch would be longer than the value, or when one of the two is of another kind."""
        try:
            before, after = _read_value(old), _read_value(new)
        except MalformedIndex:
            return None  # the index of services has a form of its own, and is told whole
        if not (_is_items(before, old) and _is_items(after, new)):
            return None
        patch = _difference(before, after).SerializeToString(deterministic=True)
        return Patch(patch) if len(patch) <= len(new) else None

    def patch(self, old: IndexValue, patch: Patch) -> IndexValue | None:
        try:
            return patched(old, patch)
        except MalformedIndex:
            return None  # the leaf asks for the whole value


class TickCodec(IndexCodec):
    """The same for one who tells many: what was worked out for one link serves the next, until the next tick."""

    def __init__(self) -> None:
        self._patches: dict[tuple[IndexValue, IndexValue], Patch | None] = {}
        self._tokens: dict[IndexValue, Token] = {}

    def forget(self) -> None:
        """Other values are asked for from now on."""
        self._patches.clear()
        self._tokens.clear()

    def token(self, value: IndexValue) -> Token:
        found = self._tokens.get(value)
        if found is None:
            found = self._tokens[value] = super().token(value)
        return found

    def diff(self, old: IndexValue, new: IndexValue) -> Patch | None:
        pair = (old, new)
        if pair not in self._patches:
            self._patches[pair] = super().diff(old, new)
        return self._patches[pair]


def patched(old: IndexValue, patch: Patch) -> IndexValue:
    """The value that a patch leads to; MalformedIndex when it does not fit."""
    before = _read_value(old)
    try:
        change = pb.IndexPatch.FromString(patch)
    except DecodeError as error:
        raise MalformedIndex("undecodable") from error
    _check_items(change.upserts)
    if len(change.places) not in (0, len(change.upserts)) or len(change.seal) not in (0, SIGNATURE_BYTES):
        raise MalformedIndex("a patch with unequal columns or a seal of wrong length")
    present = {each.item: each for each in before.items}
    removed = set(_split(change.removed))
    if not removed <= present.keys():
        raise MalformedIndex("a patch that removes what is not there")
    upserts = [_completed(each, present.get(each.item)) for each in change.upserts]
    items = _placed(before.items, removed, upserts, change.places)
    if change.order:
        by_id = {each.item: each for each in items}
        order = _split(change.order)
        if len(order) != len(items) or set(order) != set(by_id):
            raise MalformedIndex("a patch whose order is not that of its items")
        items = [by_id[each] for each in order]
    if len(items) > ITEMS_MAX:
        raise MalformedIndex("a patch to too many items")
    return IndexValue(pb.IndexValue(items=items, seal=change.seal).SerializeToString(deterministic=True))


def _completed(upsert: pb.IndexItem, old: pb.IndexItem | None) -> pb.IndexItem:
    """Type and model never change, so a known item comes without them."""
    if upsert.model or old is None:
        return upsert
    whole = pb.IndexItem()
    whole.CopyFrom(upsert)
    whole.type, whole.model = old.type, old.model
    return whole


def _placed(
    before: Iterable[pb.IndexItem], removed: set[bytes], upserts: list[pb.IndexItem], places: Sequence[int]
) -> list[pb.IndexItem]:
    if not places:
        fresh = {each.item: each for each in upserts}
        items = [fresh.pop(each.item, each) for each in before if each.item not in removed]
        return [*items, *fresh.values()]
    leaving = removed | {each.item for each in upserts}
    items = [each for each in before if each.item not in leaving]
    for place, each in zip(places, upserts, strict=True):
        if place > len(items):
            raise MalformedIndex("a patch with a place beyond the end")
        items.insert(place, each)
    return items


def _is_items(message: pb.IndexValue, data: bytes) -> bool:
    return not message.revoked and message.SerializeToString(deterministic=True) == data


def _difference(before: pb.IndexValue, after: pb.IndexValue) -> pb.IndexPatch:
    old = {each.item: each for each in before.items}
    order = [each.item for each in after.items]
    removed = old.keys() - set(order)
    changed = [(place, each) for place, each in enumerate(after.items) if old.get(each.item) != each]
    upserts = [each for _, each in changed]
    patch = pb.IndexPatch(removed=b"".join(sorted(removed)), seal=after.seal)
    for each in upserts:
        added = patch.upserts.add()
        added.CopyFrom(each)
        known = old.get(each.item)
        if known is not None and (known.type, known.model) == (each.type, each.model):
            added.ClearField("type")
            added.ClearField("model")
    if [each.item for each in _placed(before.items, removed, upserts, ())] != order:
        patch.places.extend(place for place, _ in changed)
        if [each.item for each in _placed(before.items, removed, upserts, patch.places)] != order:
            patch.order = b"".join(order)
    return patch


def _split(data: bytes) -> list[bytes]:
    if len(data) % ITEM_ID_BYTES:
        raise MalformedIndex("item ids of wrong length")
    return [data[start : start + ITEM_ID_BYTES] for start in range(0, len(data), ITEM_ID_BYTES)]
