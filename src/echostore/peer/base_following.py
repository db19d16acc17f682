"""Following the chain of epochs: a party stands on its newest final epoch.

Looked at whenever control feeds moved. A peer that has processed an epoch's blocks and has its blobs (because it
recomputed or declared it) adopts it; until then it goes on from the base it has. Nothing is fetched or waited for here.
`stand_on` is for who fetched one instead.
"""

import logging
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, DiskFull, NotFound
from echostore.kernel.ids import Cid, FeedId, ItemId
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.party.epoch_chain import Epoch
from echostore.peer.base_standing import adopt, covers, forsake, install, written_above
from echostore.peer.positions import counts_alike
from echostore.peer.view_claims import names_a_view_of
from echostore.peer.whole_epochs import is_whole
from echostore.wire.base_epoch import FETCHING_KEY, MENDING_KEY, BaseEpoch, BaseName, holes_key

if TYPE_CHECKING:
    from echostore.peer.runtime import PartyRuntime


_log = logging.getLogger("echostore.bootstrap")


class BaseFollower:
    """Keeps one open party on its newest final epoch."""

    def __init__(self, runtime: "PartyRuntime") -> None:
        self._runtime = runtime
        self.made: Cid | None = None
        """The snapshot that this process made last: all of it was stored."""
        runtime.processor.on_processed.append(self._moved)
        runtime.on_space.append(self.review)

    def _moved(self, feeds: set[FeedId]) -> None:
        cursors = self._runtime.processor.orderer.cursors
        if any(cursors[feed].kind == CONTROL for feed in feeds if feed in cursors):
            self.review()

    def review(self) -> None:
        """Adopt the newest final epoch, if that is possible now; on a full disk once there is space."""
        try:
            self._review()
        except DiskFull as error:
            self._runtime.note_full(error)

    def _review(self) -> None:
        runtime = self._runtime
        processor = runtime.processor
        if not runtime.writable or runtime.blobs is None or runtime.in_batch or processor.paused:
            return
        if processor.damage is not None:
            return  # what was folded may lack something: an epoch is installed then, not adopted
        found = newest_final(runtime)
        base = processor.base
        if unfounded(runtime):
            self._forsake()
            return
        if found is None or (base is not None and found.number <= base.name.number) or outvoted(runtime):
            return
        candidate = _opened(runtime, found)
        if candidate is not None and covers(processor, candidate) and is_whole(runtime, candidate):
            tail = written_above(processor, candidate)
            differs = candidate.name.discards or names_a_view_of(candidate, tail)
            adopt(processor, candidate, tail, differing_items(runtime, candidate) if differs else ())

    def _forsake(self) -> None:
        runtime = self._runtime
        assert runtime.processor.base is not None
        details = {"party": runtime.party.hex(), "epoch": runtime.processor.base.name.number}
        _log.warning(
            "an epoch that a party stood on is not final and does not hold any more: its history is taken",
            extra=details,
        )
        runtime.flush()
        forsake(runtime.processor)
        runtime.source.checkpointed()
        runtime.checkpoint()


def stand_on(runtime: "PartyRuntime", base: BaseEpoch) -> str:
    """Install a fetched epoch, unless this peer has processed it all meanwhile.

    Where blobs of the base were lost, its items are made anew all the same: what was folded without them may lack
    something. They are whole from then on.
    """
    processor = runtime.processor
    damage = processor.damage
    lost = outvoted(runtime)
    if damage is None and not lost and covers(processor, base):
        runtime.follower.review()
        return "it was processed here already"
    processor.damage = None
    try:
        runtime.flush()
        install(processor, base, frozenset(runtime.declared), anew=lost)
        runtime.source.checkpointed()
        runtime.source.touched(processor.state.changed)
        runtime.checkpoint()
    except BaseException:
        processor.damage = damage
        raise
    if damage is not None:
        runtime.feeds.set_about({MENDING_KEY: None})
    return "its items were fetched"


def outvoted(runtime: "PartyRuntime") -> bool:
    """Whether the party stands on an epoch that was not final when it began there, and has lost its number to another.

    What it holds may not be so: blocks may be in it that count nowhere else, and who declared it may have lied.
    """
    processor = runtime.processor
    if processor.base is None:
        return False
    tally = processor.membership.machine.epoch_tally(processor.child_key)
    named = tally.accepted(processor.base.name.number)
    return named is not None and named.final and named.hash != processor.base.name.genesis


def unfounded(runtime: "PartyRuntime") -> bool:
    """Whether the party stands on an epoch that nothing makes final, and which the chain has left or that says too much.

    Only a final epoch keeps what it contains: of this one a removal or a fork that came later takes some. And who stands
    beside the chain can judge nothing in it, while others wait for its vote. Who has truncated its own feed can't go back,
    and waits for the next final epoch.
    """
    processor = runtime.processor
    base, latest = processor.base, newest_final(runtime)
    if base is None or (latest is not None and latest.number >= base.name.number):
        return False
    if any(held.own and held.base for held in runtime.feeds.feeds() if held.kind == DATA):
        return False
    named = processor.membership.machine.epoch_tally(processor.child_key).accepted(base.name.number)
    left = named is None or named.hash != base.name.genesis
    return left or not counts_alike(base, processor.admission)


def newest_final(runtime: "PartyRuntime") -> Epoch | None:
    """The newest epoch that names its number for good."""
    processor = runtime.processor
    return processor.membership.machine.epoch_tally(processor.child_key).latest_final


def open_epoch(runtime: "PartyRuntime", epoch: Epoch) -> BaseEpoch | None:
    """An epoch as a base; None while blobs of it are missing here."""
    found = _opened(runtime, epoch)
    return found if found is not None and is_whole(runtime, found) else None


def _opened(runtime: "PartyRuntime", epoch: Epoch) -> BaseEpoch | None:
    """An epoch of which the beginning is here, and no fetch was cut short."""
    assert runtime.blobs is not None
    name = BaseName.of(epoch.genesis, epoch.hash)
    try:
        found = BaseEpoch(name, runtime.blobs.get, runtime.processor.factory)
    except (NotFound, Corrupt):
        return None
    tops = [found.root.index_root, *([] if found.root.placements is None else [found.root.placements])]
    about, snapshot = runtime.feeds.about, epoch.genesis.snapshot
    holed = snapshot in {about(key) for key in (FETCHING_KEY, MENDING_KEY)} or about(holes_key(snapshot)) is not None
    return None if holed or runtime.blobs.missing(tops) else found


def no_holes(runtime: "PartyRuntime", snapshot: Cid) -> None:
    """All of a snapshot is here now, also where fetching it was cut short before."""
    if runtime.feeds.about(holes_key(snapshot)) is not None:
        runtime.feeds.set_about({holes_key(snapshot): None})


def differing_items(runtime: "PartyRuntime", base: BaseEpoch) -> set[ItemId]:
    """Items that an epoch has in another form than this peer."""
    from echostore.peer.snapshots import take_snapshot

    mine = take_snapshot(runtime)
    diff = mine.reader().diff(base.root.index_root)
    return {*diff.added, *diff.changed, *diff.removed}
