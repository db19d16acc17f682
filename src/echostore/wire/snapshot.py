"""State roots and item states <-> their canonical bytes.

A state has one encoding: protobuf fields in ascending order, repeated ones sorted, defaults left out, nothing unknown.
What is read back must be exactly what would be written, so two blobs never stand for one state and a reader need not
ask which of them was meant. Everything wrong with received bytes raises `Corrupt` and names the offence.

`encode_item` cuts a large model state into chunks; how items form a tree is `echostore.wire.tree`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NewType, TypeVar

from google.protobuf.message import DecodeError, Message

from echostore.kernel.errors import Corrupt, TooLarge
from echostore.kernel.ids import ITEM_ID_BYTES, KEY_BYTES, LINK_BYTES, Cid, FeedKey, ItemId, Link, PartyKey
from echostore.kernel.limits import BLOB_BYTES_MAX, SEQ_MAX
from echostore.kernel.snapshot import (
    ENCODING_VERSION,
    INLINE_STATE_BYTES_MAX,
    READ_VERSIONS,
    ModelVersion,
    StateRoot,
    TimeframeEntry,
    chunks,
)
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_of, is_cid
from echostore.wire.generated import snapshot_pb2 as pb

EncodedItem = NewType("EncodedItem", bytes)
"""The canonical bytes of an ItemState. They start with 0a 10 and the 16 bytes of the item's id."""

Put = Callable[[Cid, bytes], None]
"""Where blobs go. Called for a blob before it is called for any blob that names it."""

DIGEST_BYTES = 32

_M = TypeVar("_M", bound=Message)


class OldEncoding(Corrupt):
    """A snapshot as an earlier version of this program wrote it."""


def state_root_bytes(
    *,
    party: PartyKey,
    timeframe: Iterable[TimeframeEntry],
    admission_digest: bytes,
    base_epoch: bytes | None,
    models: Iterable[ModelVersion],
    item_count: int,
    membership_root: Cid,
    index_root: Cid,
    tree: Cid,
    placements: Cid | None,
) -> tuple[Cid, bytes]:
    """The CID of a snapshot and its state root. Feeds and models may come in any order and models repeatedly.

    Without placements it is a root as earlier programs wrote it, for who recomputes one of theirs.
    """
    root = StateRoot(
        party=party,
        timeframe=tuple(sorted(timeframe)),
        admission_digest=admission_digest,
        base_epoch=base_epoch,
        models=tuple(sorted(set(models))),
        item_count=item_count,
        membership_root=membership_root,
        index_root=index_root,
        tree=tree,
        placements=placements,
    )
    problem = _root_problem(root)
    assert not problem, f"a state root with {problem}: {root}"
    data = _root_message(root).SerializeToString(deterministic=True)
    if len(data) > BLOB_BYTES_MAX:
        raise TooLarge(f"a state root of {len(root.timeframe)} feeds has {len(data)} bytes, more than a blob may have")
    return cid_of(data, PROTOBUF), data


def read_state_root(data: bytes) -> StateRoot:
    """The state root that these bytes are; Corrupt when `state_root_bytes` would not have written them."""
    if len(data) > BLOB_BYTES_MAX:
        raise Corrupt(f"a state root of {len(data)} bytes is larger than a blob may be")
    message = canonical_message(pb.StateRoot, data, "a state root")
    if message.encoding_version not in READ_VERSIONS:
        versions = " and ".join(map(str, READ_VERSIONS))
        what = f"a state root of encoding version {message.encoding_version}, this program reads {versions}"
        if message.encoding_version > ENCODING_VERSION:
            raise Corrupt(what, next_step="Update echostore on this device.")
        raise OldEncoding(
            what, next_step="Start from a newer epoch, or from the history: who holds it makes the snapshot anew."
        )
    if (message.encoding_version == ENCODING_VERSION) != bool(message.placements):
        raise Corrupt(f"a state root of encoding version {message.encoding_version} that has other fields")
    root = StateRoot(
        party=PartyKey(message.party),
        timeframe=tuple(TimeframeEntry(FeedKey(e.feed_key), e.seq, Link(e.link)) for e in message.timeframe),
        admission_digest=message.admission_digest,
        base_epoch=message.base_epoch or None,
        models=tuple(ModelVersion(each.model, each.version) for each in message.models),
        item_count=message.item_count,
        membership_root=Cid(message.membership_root),
        index_root=Cid(message.index_root),
        tree=Cid(message.tree),
        placements=Cid(message.placements) if message.placements else None,
    )
    problem = _root_problem(root)
    if problem:
        raise Corrupt(f"a state root with {problem}")
    return root


def unplaced_root(root: StateRoot) -> tuple[Cid, bytes]:
    """The same state without its placements, as a root of the version before."""
    data = _root_message(replace(root, placements=None)).SerializeToString(deterministic=True)
    return cid_of(data, PROTOBUF), data


def encode_item(state: pb.ItemState, put: Put) -> EncodedItem:
    """The canonical bytes of an item whose whole model state is in `state.state`; a large one goes to `put` in chunks."""
    if len(state.state) > INLINE_STATE_BYTES_MAX:
        small = pb.ItemState()
        small.CopyFrom(state)
        small.state = b""
        for chunk in chunks(state.state):
            cid = cid_of(chunk, RAW)
            put(cid, chunk)
            small.state_cids.append(cid)
        state = small
    problem = item_problem(state)
    assert not problem, f"an item state with {problem}: {state.item.hex()}"
    return EncodedItem(state.SerializeToString(deterministic=True))


def decode_item(data: bytes, item: ItemId) -> pb.ItemState:
    """The state of `item` that these bytes are; Corrupt when `encode_item` would not have written them."""
    state = canonical_message(pb.ItemState, data, "an item state")
    if state.item != item:
        raise Corrupt(f"the state of item {state.item.hex()} stands where {item.hex()} belongs")
    problem = item_problem(state)
    if problem:
        raise Corrupt(f"an item state with {problem}: {item.hex()}")
    return state


def canonical_message(kind: type[_M], data: bytes, name: str) -> _M:
    """Decode, and refuse every spelling but the one that encoding gives."""
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise Corrupt(f"{name} can't be decoded: {error}") from None
    # Unknown fields would survive the round trip and hide in equal states.
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        raise Corrupt(f"{name} is not in its canonical encoding")
    return message


def item_problem(state: pb.ItemState) -> str:
    """What is wrong with an item state, apart from what its model makes of it; empty when nothing is."""
    if len(state.item) != ITEM_ID_BYTES:
        return f"an item id of {len(state.item)} bytes"
    if len(state.parent) not in (0, ITEM_ID_BYTES):
        return f"a parent of {len(state.parent)} bytes"
    if len(state.state) > INLINE_STATE_BYTES_MAX:
        return f"a model state of {len(state.state)} bytes that is not in chunks"
    if state.state_cids:
        if state.state:
            return "a model state both inline and in chunks"
        if not all(is_raw_cid(cid) for cid in state.state_cids):
            return "a chunk that is not named by a raw CID"
    stamps = [(entry.depth, entry.feed, entry.seq, entry.position) for entry in state.access]
    if not strictly_ascending(stamps):
        return "access entries out of canonical order"
    return ""


def is_raw_cid(raw: bytes) -> bool:
    return is_cid(raw) and cid_codec(Cid(raw)) == RAW


def is_node_cid(raw: bytes) -> bool:
    return is_cid(raw) and cid_codec(Cid(raw)) == PROTOBUF


def strictly_ascending(values: Sequence[Any]) -> bool:
    return all(before < after for before, after in pairwise(values))


def _root_message(root: StateRoot) -> pb.StateRoot:
    return pb.StateRoot(
        encoding_version=root.encoding_version,
        party=root.party,
        timeframe=[pb.TimeframeEntry(feed_key=e.feed_key, seq=e.seq, link=e.link) for e in root.timeframe],
        admission_digest=root.admission_digest,
        base_epoch=root.base_epoch or b"",
        models=[pb.ModelVersion(model=each.model, version=each.version) for each in root.models],
        item_count=root.item_count,
        membership_root=root.membership_root,
        index_root=root.index_root,
        tree=root.tree,
        placements=root.placements or b"",
    )


def _root_problem(root: StateRoot) -> str:
    if len(root.party) != KEY_BYTES:
        return f"a party key of {len(root.party)} bytes"
    for entry in root.timeframe:
        if len(entry.feed_key) != KEY_BYTES or len(entry.link) != LINK_BYTES or not 0 <= entry.seq <= SEQ_MAX:
            return f"a malformed timeframe entry {entry}"
    if not strictly_ascending([entry.feed_key for entry in root.timeframe]):
        return "feeds that are repeated or out of order"
    if len(root.admission_digest) != DIGEST_BYTES:
        return f"an admission digest of {len(root.admission_digest)} bytes"
    if root.base_epoch is not None and len(root.base_epoch) != DIGEST_BYTES:
        return f"a base epoch of {len(root.base_epoch)} bytes"
    if not all(each.model for each in root.models) or not strictly_ascending(list(root.models)):
        return "models that are unnamed, repeated or out of order"
    roots = [root.membership_root, root.index_root, root.tree]
    if root.placements is not None:
        roots.append(root.placements)
    if not all(map(is_node_cid, roots)):
        return "a root that is not named by a protobuf CID"
    return ""
