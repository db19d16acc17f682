"""Freeing the disk below epochs: what may go, and letting it go, in steps that each leave a whole party.

    1  items are checkpointed, so that the ItemStore needs nothing below the cut
    2  feeds begin at the cut of an epoch that the policy's quorum attested and that is one epoch old
    3  blocks and heads below are deleted, in small transactions
    4  the index of who wrote what forgets them
    5  blobs of snapshots that nobody stands on are deleted
    6  the three files give their free pages back

A crash after any step leaves a party that opens to the same state; the next run goes on. Control feeds keep their
blocks. Files that people added are never deleted here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from echostore.kernel.errors import NotFound
from echostore.kernel.ids import Cid, feed_id
from echostore.kernel.party.epoch_chain import Epoch, truncatable
from echostore.kernel.values import BlobRef, Value
from echostore.peer.base_following import open_epoch
from echostore.peer.snapshots import take_snapshot
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_from_text, is_cid
from echostore.wire.epochs import FeedCut, cut_pages, read_cut
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import move_chunks

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

_DELETE_BLOBS: Final = 1024


@dataclass(frozen=True, slots=True)
class Freed:
    """What a gc frees, or would."""

    epoch: int | None
    """Below which epoch blocks go; None when none is old and agreed enough."""
    blocks: int
    block_bytes: int
    blobs: int
    blob_bytes: int
    disk_before: int
    disk_after: int | None
    """None for a dry run."""
    why: str
    """Why no block goes, where none does."""


Step = Callable[[str], None]
"""Told after each durable step; tests end the process there."""


def plan_gc(party: "Party") -> Freed:
    """What `run_gc` would free now. Nothing is changed."""
    with party.writing() as runtime:
        return _measure(runtime, None)


def run_gc(party: "Party", step: Step = lambda name: None) -> Freed:
    """Free what may go; says what went."""
    with party.writing() as runtime:
        freed = _measure(runtime, None)
        _truncate(runtime, _truncation(runtime).cuts, step)
        doomed = list(_doomed(runtime))
        assert runtime.blobs is not None
        for start in range(0, len(doomed), _DELETE_BLOBS):
            runtime.blobs.delete(doomed[start : start + _DELETE_BLOBS])
            step("blobs deleted")
        for store in (runtime.blobs, runtime.items):
            if store is not None:
                store.shrink()
                step("shrunk")
        return _measure(runtime, freed)


@dataclass(frozen=True, slots=True)
class _Truncation:
    """The epoch below which blocks may go and where that is in each data feed, or why there is none."""

    epoch: int | None
    cuts: tuple[FeedCut, ...] = ()
    why: str = ""


def _truncate(runtime: "PartyRuntime", cuts: tuple[FeedCut, ...], step: Step) -> None:
    runtime.checkpoint()
    step("checkpoint")
    runtime.feeds.begin_at({cut.feed: (cut.length, cut.link) for cut in cuts})
    step("beginnings moved")
    runtime.feeds.drop_garbage(lambda: step("blocks deleted"))
    step("blocks gone")
    if runtime.items is not None:
        for cut in cuts:
            runtime.items.drop_touches(feed_id(cut.feed), cut.length)
        step("touches forgotten")


def _truncation(runtime: "PartyRuntime") -> _Truncation:
    processor = runtime.processor
    if runtime.blobs is None or runtime.items is None:
        return _Truncation(None, why="the party is open read-only")
    if processor.base is None:
        return _Truncation(None, why="the party stands on no epoch that is final")
    machine = processor.membership.machine
    found = truncatable(_chain(runtime), machine.epoch_policy)
    if found is None:
        return _Truncation(None, why="no epoch is attested by the policy's quorum and one epoch old")
    if found.number >= processor.base.name.number:
        return _Truncation(None, why=f"this peer does not stand on an epoch above {found.number} yet")
    try:
        cuts = tuple(cut for cut in read_cut(Cid(found.genesis.cut), runtime.blobs.get) if not cut.control)
    except NotFound:
        return _Truncation(None, why=f"this peer never had what lies below epoch {processor.base.name.number}")
    return _Truncation(found.number, cuts)


def _chain(runtime: "PartyRuntime") -> list[Epoch]:
    child = runtime.party if runtime.processor.parent is not None else None
    return runtime.processor.membership.machine.epoch_tally(child).chain


def _measure(runtime: "PartyRuntime", before: Freed | None) -> Freed:
    """What would go; after a run, what went according to `before`."""
    assert runtime.blobs is not None
    disk = sum(store.disk_bytes() for store in (runtime.feeds, runtime.blobs, runtime.items) if store is not None)
    if before is not None:
        return Freed(
            before.epoch,
            before.blocks,
            before.block_bytes,
            before.blobs,
            before.blob_bytes,
            before.disk_before,
            disk,
            before.why,
        )
    found = _truncation(runtime)
    garbage = runtime.feeds.garbage({cut.feed: cut.length for cut in found.cuts})
    doomed = set(_doomed(runtime))
    size = sum(length for cid, length in runtime.blobs.list() if cid in doomed)
    return Freed(found.epoch, garbage.blocks, garbage.bytes, len(doomed), size, disk, None, found.why)


# blobs


def _doomed(runtime: "PartyRuntime") -> Iterator[Cid]:
    """Blobs of snapshots that are neither the base nor the state as it is, nor of an epoch that may still be chosen."""
    blobs = runtime.blobs
    assert blobs is not None
    kept = _kept(runtime)
    listed = [cid for cid, _ in blobs.list() if cid not in kept]
    raw: set[Cid] = set()
    for cid in listed:
        if cid_codec(cid) == PROTOBUF:
            raw.update(chunk for chunk in _chunks_in(blobs.get(cid)) if cid_codec(chunk) == RAW)
            yield cid
    raw -= kept
    if raw:
        raw -= _files(runtime)
        yield from (cid for cid in listed if cid in raw)


def _kept(runtime: "PartyRuntime") -> set[Cid]:
    blobs = runtime.blobs
    assert blobs is not None
    kept: set[Cid] = set()
    live = take_snapshot(runtime)
    kept.update(live.reader().reachable())
    kept.update(_roots(blobs.get, live.root.membership_root, live.root.tree))
    kept.add(cid_from_text(live.cid))
    base = runtime.processor.base
    first = base.name.number if base is not None else 1
    for epoch in _chain(runtime):
        genesis = epoch.genesis
        # Of the epoch below the base the cut is kept: the next one may be truncated there.
        if epoch.number >= first - 1:
            kept.update((Cid(genesis.record), Cid(genesis.cut)))
            if blobs.has(Cid(genesis.cut)):
                kept.update(cut_pages(blobs.get(Cid(genesis.cut))))
        found = open_epoch(runtime, epoch) if epoch.number >= first else None
        if found is not None:
            kept.add(genesis.snapshot)
            kept.update(found.reader.reachable())
            kept.update(_roots(blobs.get, found.root.membership_root, found.root.tree))
    return kept


def _roots(get: Callable[[Cid], bytes], membership: Cid, tree: Cid) -> set[Cid]:
    return {membership, tree, *move_chunks(get(tree))}


def _chunks_in(data: bytes) -> Iterable[Cid]:
    """The chunks that a page names; nothing for any other blob."""
    try:
        node = pb.TreeNode.FromString(data)
    except DecodeError:
        return []
    named = [cid for item in node.items for cid in item.state_cids]
    named += [cid for item in node.large_items for cid in item.cids]
    return [Cid(cid) for cid in named if is_cid(cid)]


def _files(runtime: "PartyRuntime") -> set[Cid]:
    """Chunks of files that living items point to: one may have the bytes of an item's state."""
    found: set[Cid] = set()
    for item in runtime.all_items():
        record = runtime.state.record(item)
        if record is not None:
            found.update(_files_in(record.values()))
    return found


def _files_in(value: Value) -> Iterator[Cid]:
    if isinstance(value, BlobRef):
        yield from value.cids
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _files_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _files_in(inner)
