"""Booting from the epoch that the MetaStore keeps as accepted, where the FeedStore's own base is of no use.

    feeds.db   about["base"]      what the party stands on: nearly always all that is needed
    meta.db    setting "epoch"    the latest epoch that this peer declared, attested or believes

Where blocks were deleted, a party needs a base. The first may be lost, or name a snapshot whose blobs are lost, while those
of a later epoch are here: then that one is stood on, if the feeds reach to its cut on the same branch, and control says
that it is final. So nothing that is held is passed over. Where the history is whole, it is folded instead.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.party.epoch_chain import Epoch
from echostore.peer.base_damage import is_truncated
from echostore.peer.epoch_fetching import holes
from echostore.wire.base_epoch import BASE_KEY, BaseEpoch, BaseName
from echostore.wire.snapshot import OldEncoding

if TYPE_CHECKING:
    from echostore.kernel.models.factory import ModelFactory
    from echostore.peer.epoch_agreement import AcceptedEpoch
    from echostore.peer.processor import PartyProcessor
    from echostore.store.blob_store import BlobStore
    from echostore.store.feed_store import FeedStore

_log = logging.getLogger("echostore")


def open_on_accepted(
    feeds: "FeedStore",
    accepted: Callable[[], BaseEpoch | None],
    opened: Callable[[BaseEpoch | None], "PartyProcessor | None"],
) -> "PartyProcessor":
    """What `opened` makes of the base that the FeedStore names, or of the accepted epoch where that one is lost.

    It makes None of an accepted epoch that is not final by control. Where neither is of use, the party is closed until its
    base is fetched (`base_damage`).
    """
    closed: PartyProcessor | None = None
    lost: Corrupt | None = None
    if feeds.about(BASE_KEY) or not is_truncated(feeds):
        try:
            closed = opened(None)
            assert closed is not None, "a party can be closed, and is not nothing"
            if not closed.closed:
                return closed
        except Corrupt as error:
            lost = error
    base = accepted() if is_truncated(feeds) else None
    try:
        found = opened(base) if base is not None else None
    except Corrupt:
        if closed is None:
            raise
        found = None  # what the items lend is lost of this one too
    if found is not None and base is not None:
        if closed is not None:
            leave_parent(closed)
        details = {"party": found.party.hex(), "epoch": base.name.number}
        _log.warning("a party boots from its accepted epoch, its base being lost", extra=details)
        return found
    if closed is not None:
        return closed
    raise lost or Corrupt(
        "feeds.db does not say on which epoch the party stands, and the blocks below are gone",
        next_step="Restore feeds.db of the party from a backup, or forget the party here and join it again.",
    )


def stand_on_accepted(processor: "PartyProcessor", base: BaseEpoch, *, writable: bool) -> bool:
    """Name the accepted epoch as what the party stands on; False when control does not say that it is final."""
    epoch = final_epoch(processor, base.name.number, base.name.genesis)
    if epoch is None:
        return False
    base.name = BaseName.of(epoch.genesis, epoch.hash)  # which also says whether something was left out
    if writable:
        processor.feeds.set_about({BASE_KEY: base.name.encode()})
    return True


def accepted_base(
    accepted: "AcceptedEpoch | None", feeds: "FeedStore", blobs: "BlobStore | None", factory: "ModelFactory"
) -> BaseEpoch | None:
    """The accepted epoch, if all of its items can be read here and the feeds hold what follows its cut."""
    if accepted is None or blobs is None:
        return None
    name = BaseName(accepted.number, accepted.hash, accepted.snapshot, accepted.cut, discards=False)
    try:
        base = BaseEpoch(name, blobs.get, factory)
        whole = base.root.party == feeds.party and not holes(name, blobs)
    except (OldEncoding, NotFound, Corrupt):
        return None
    return base if whole and _reached(feeds, base) else None


def final_epoch(processor: "PartyProcessor", number: int, genesis: bytes) -> Epoch | None:
    """An epoch by number and hash, if control says that it names its number for good."""
    found = processor.membership.machine.epoch_tally(processor.child_key).accepted(number)
    return found if found is not None and found.final and found.hash == genesis else None


def disagreement(processor: "PartyProcessor", accepted: "AcceptedEpoch | None") -> str:
    """What is odd about the accepted epoch beside the base, in words; empty where nothing is."""
    base = processor.base
    if accepted is None:
        return ""
    if base is not None and accepted.number == base.name.number and accepted.hash != base.name.genesis:
        return f"meta.db keeps another epoch {accepted.number} than feeds.db stands on"
    stands = base.name.number if base is not None else 0
    if accepted.number > stands and final_epoch(processor, accepted.number, accepted.hash) is not None:
        return f"meta.db keeps epoch {accepted.number}, which is final, and feeds.db stands on epoch {stands}"
    known = processor.membership.machine.epoch_tally(processor.child_key).accepted(accepted.number)
    if known is not None and known.final and known.hash != accepted.hash:
        return f"meta.db keeps an epoch {accepted.number} that another one has the number of for good"
    return ""


def leave_parent(processor: "PartyProcessor") -> None:
    """A processor that was opened in vain hears no more of its parent's control feeds."""
    if processor.parent is not None and processor in processor.parent.children:
        processor.parent.children.remove(processor)


def _reached(feeds: "FeedStore", base: BaseEpoch) -> bool:
    """Whether the data feeds hold what follows an epoch's cut, on its branch."""
    return all(
        feeds.has_feed(cut.feed)
        and feeds.feed(cut.feed).base <= cut.length <= feeds.length(cut.feed)
        and feeds.link_at(cut.feed, cut.length - 1) == cut.link
        for cut in base.cuts.values()
        if not cut.control and cut.length
    )
