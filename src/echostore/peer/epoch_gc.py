"""Freeing the disk below epochs: what may go, and letting it go, in steps that each leave a whole party.

    1  items are checkpointed, so that the ItemStore needs nothing below the cut
    2  feeds begin at the cut of an epoch that the policy's quorum attested and that is one epoch old: data feeds at its
       snapshot, control feeds at the control state that it names (`control_floor`)
    3  blocks and heads below are deleted, in small transactions
    4  the index of who wrote what forgets them
    5  blobs of snapshots that nobody stands on are deleted, the nodes of the others compressed
    6  states that the snapshot tree has as they are need not be in the ItemStore as well (`store/lent_states.py`)
    7  the three files give their free pages back

A crash after any step leaves a party that opens to the same state; the next run goes on. Files that people added are
never deleted here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt, DamagedHere, NotFound
from echostore.kernel.ids import Cid, feed_id
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.order import DATA
from echostore.kernel.party.epoch_chain import Epoch, truncatable
from echostore.kernel.values import BlobRef, Value
from echostore.peer.base_mending import make_records
from echostore.peer.control_floor import Floor, kept_blobs, mend_floor, plan_floor, rise_to
from echostore.peer.epoch_fetching import survey
from echostore.peer.older_epochs import kept_records
from echostore.peer.snapshots import take_snapshot
from echostore.peer.whole_epochs import check_base, check_live
from echostore.wire.base_epoch import FETCHING_KEY, BaseName, snapshot_blobs
from echostore.wire.cids import PROTOBUF, RAW, cid_codec, cid_from_text, is_cid
from echostore.wire.control_blobs import chunks_named
from echostore.wire.epochs import FeedCut, cut_pages, read_cut
from echostore.wire.generated import snapshot_pb2 as pb

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime
    from echostore.store.blob_store import BlobStore

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
    control_blocks: int = 0
    """How many of the blocks are of control feeds."""
    control_why: str = ""
    """Why no block of a control feed goes, where none does."""


Step = Callable[[str], None]
"""Told after each durable step; tests end the process there."""


def plan_gc(party: "Party") -> Freed:
    """What `run_gc` would free now. Nothing is deleted; of a party that is open read-only, nothing is written either."""
    with party.reading() as runtime, _damage_told(runtime):
        found = _truncation(runtime)
        if runtime.blobs is None:
            return _nothing(runtime, found)
        return _measure(runtime, found, _doomed(runtime, found, check_base(runtime)))


def run_gc(party: "Party", step: Step = lambda name: None) -> Freed:
    """Free what may go; says what went."""
    with party.writing() as runtime, _damage_told(runtime):
        found = _truncation(runtime)
        assert runtime.blobs is not None
        # Nothing goes before it is certain that all is here that has to stay.
        check_base(runtime)
        make_records(runtime)
        mend_floor(runtime.processor, runtime.blobs)
        freed = _measure(runtime, found, _doomed(runtime, found))
        _truncate(runtime, found, step)
        doomed = _doomed(runtime, found)
        if runtime.items is not None:
            runtime.items.secure()
        for start in range(0, len(doomed), _DELETE_BLOBS):
            runtime.blobs.delete(doomed[start : start + _DELETE_BLOBS])
            step("blobs deleted")
        runtime.blobs.pack()
        step("blobs packed")
        _lend(runtime)
        step("states lent")
        for store in (runtime.blobs, runtime.items):
            if store is not None:
                store.shrink()
                step("shrunk")
        return replace(freed, disk_after=_disk(runtime))


@contextmanager
def _damage_told(runtime: "PartyRuntime") -> Iterator[None]:
    """What was found lost on the way is told as what it is, with what to do about it."""
    try:
        yield
    except (NotFound, Corrupt) as error:
        damage = runtime.processor.damage
        if damage is None:
            raise
        raise damage.error() from error


@dataclass(frozen=True, slots=True)
class _Truncation:
    """The epoch below which blocks may go and where that is in each data feed, or why there is none."""

    epoch: int | None
    cuts: tuple[FeedCut, ...] = ()
    why: str = ""
    control: Floor | None = None
    """Where control feeds may begin."""
    control_why: str = ""


def _truncate(runtime: "PartyRuntime", found: _Truncation, step: Step) -> None:
    assert runtime.blobs is not None
    runtime.checkpoint()
    step("checkpoint")
    beginnings, floor = {cut.feed: (cut.length, cut.link) for cut in found.cuts}, found.control
    if floor is None:
        runtime.feeds.begin_at(beginnings)
    else:
        runtime.blobs.put_many({cid: data for cid, data in floor.blobs.items() if not runtime.blobs.has(cid)})
        step("control state kept")
        runtime.feeds.begin_at({**beginnings, **floor.beginnings}, floor.about)
        rise_to(runtime.processor, floor)
    step("beginnings moved")
    runtime.feeds.drop_garbage(lambda: step("blocks deleted"))
    step("blocks gone")
    if runtime.items is not None:
        for cut in found.cuts:
            runtime.items.drop_touches(feed_id(cut.feed), cut.length)
        step("touches forgotten")


def _lend(runtime: "PartyRuntime") -> None:
    """Keep one copy of what is as the base has it; what was written above the base keeps the stamp of its last write."""
    items, base = runtime.items, runtime.processor.base
    if items is None or base is None:
        return
    written = (
        item
        for feed, cursor in runtime.processor.orderer.cursors.items()
        if cursor.kind == DATA
        for item in items.touched_from(feed, base.length(feed))
    )
    items.lend(frozenset(written))


def _truncation(runtime: "PartyRuntime") -> _Truncation:
    processor = runtime.processor
    if runtime.blobs is None:
        return _Truncation(None, why="this party keeps no blobs here")
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
    except DamagedHere:
        return _Truncation(None, why=f"the cut of epoch {found.number} is damaged here")
    control = plan_floor(processor, found, runtime.blobs)
    if isinstance(control, str):
        return _Truncation(found.number, cuts, control_why=control)
    return _Truncation(found.number, cuts, control=control)


def _chain(runtime: "PartyRuntime") -> list[Epoch]:
    child = runtime.processor.child_key
    return runtime.processor.membership.machine.epoch_tally(child).chain


def _measure(runtime: "PartyRuntime", found: _Truncation, going: list[Cid]) -> Freed:
    """What would go."""
    assert runtime.blobs is not None
    control = {cut.feed: cut.length for cut in found.control.cuts} if found.control is not None else {}
    garbage = runtime.feeds.garbage({cut.feed: cut.length for cut in found.cuts} | control)
    of_data = runtime.feeds.garbage({cut.feed: cut.length for cut in found.cuts})
    doomed = set(going)
    size = sum(length for cid, length in runtime.blobs.list() if cid in doomed)
    return Freed(
        found.epoch,
        garbage.blocks,
        garbage.bytes,
        len(doomed),
        size,
        _disk(runtime),
        None,
        found.why,
        garbage.blocks - of_data.blocks,
        found.control_why,
    )


def _nothing(runtime: "PartyRuntime", found: _Truncation) -> Freed:
    return Freed(None, 0, 0, 0, 0, _disk(runtime), None, found.why)


def _disk(runtime: "PartyRuntime") -> int:
    return sum(store.disk_bytes() for store in (runtime.feeds, runtime.blobs, runtime.items) if store is not None)


# blobs


def _doomed(runtime: "PartyRuntime", found: _Truncation, made: Mapping[Cid, bytes] = MappingProxyType({})) -> list[Cid]:
    """Blobs of snapshots that are neither the base nor the state as it is, nor of an epoch that may still be chosen.

    `made` are blobs of the base that are not stored.
    """
    blobs = runtime.blobs
    assert blobs is not None
    kept = _kept(runtime)
    kept.update(made)
    kept.update(found.control.blobs if found.control is not None else kept_blobs(runtime.processor, blobs))
    listed = [cid for cid, _ in blobs.list() if cid not in kept]
    raw: set[Cid] = set()
    for cid in listed:
        if cid_codec(cid) == PROTOBUF:
            raw.update(chunk for chunk in _chunks_in(cid, _sound(blobs, cid)) if cid_codec(chunk) == RAW)
    raw -= kept
    if raw:
        raw -= _files(runtime)
    return [cid for cid in listed if cid_codec(cid) == PROTOBUF or cid in raw]


def _kept(runtime: "PartyRuntime") -> set[Cid]:
    blobs = runtime.blobs
    assert blobs is not None
    check_live(runtime)
    kept: set[Cid] = set()
    live = take_snapshot(runtime)
    kept.update(snapshot_blobs(live.root, live.blob))  # of a reader it is in memory alone
    kept.add(cid_from_text(live.cid))
    kept.update(kept_records(runtime))
    base = runtime.processor.base
    first = base.name.number if base is not None else 1
    if base is not None:  # whether or not the chain still has it: its declarer may have been removed meanwhile
        kept.update(survey(base.name, blobs).here)
    coming = runtime.feeds.about(FETCHING_KEY)
    for epoch in _chain(runtime):
        genesis = epoch.genesis
        # Of the epoch below the base the cut is kept: the next one may be truncated there.
        if epoch.number >= first - 1:
            cut = _sound(blobs, Cid(genesis.cut))
            kept.update((Cid(genesis.record), Cid(genesis.cut), *(cut_pages(cut) if cut else ())))
        if epoch.number < first or not blobs.has(genesis.snapshot):
            continue
        seen = survey(BaseName.of(genesis, epoch.hash), blobs)
        # One that has holes is of no use to anybody, unless the rest is on its way.
        if not (seen.lost or seen.unplaced) or genesis.snapshot == coming:
            kept.update(seen.here)
    return kept


def _sound(blobs: "BlobStore", cid: Cid) -> bytes:
    """A blob; empty where it is not here, or damaged."""
    return blobs.get_some([cid], BLOB_BYTES_MAX).get(cid, b"")


def _chunks_in(cid: Cid, data: bytes) -> Iterable[Cid]:
    """The chunks that a page or the head of a large control state names; nothing for any other blob."""
    try:
        node = pb.TreeNode.FromString(data)
        of_control = chunks_named(cid, data)
    except (DecodeError, Corrupt):
        return []
    if of_control:
        return of_control
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
