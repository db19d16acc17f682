"""Leaving a branch that an attested epoch did not choose, and an epoch that lost its number to a rival.

    eve forks her feed      0 1 2 3x 4x      ann, bob and most others have x; an epoch with a quorum contains it
                                └ 3y 4y 5y   dan has y, and has written on top of it

The epoch pins x up to its end (`kernel.party.pins`), so dan's state can't be right with y in it. His peer fetches the
epoch's snapshot and stands on it: eve's feed begins at the cut, on x. His own messages stay where others take them, too:
what they name of y below the cut is checked by its bound alone (O8). From the first one on that names more of y than the
bound allows, nobody could take them once blocks of y are refused: there his feed ends, by his own word, and all that follows is
written again on a new feed. What can't be written again is listed, as with a retired feed.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from echostore.kernel.ids import FeedId, FeedKey, feed_id
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.party.credentials import FeedRetire
from echostore.kernel.party.epoch_chain import Epoch
from echostore.peer.base_following import newest_final, outvoted
from echostore.peer.retiring import write_again
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.epochs import FeedCut

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

_log = logging.getLogger("echostore.bootstrap")


def pinned_elsewhere(runtime: "PartyRuntime") -> Epoch | None:
    """The newest final epoch, where it contains another branch of a feed than the one in use here, or rests on another epoch."""
    epoch = newest_final(runtime)
    base = runtime.processor.base
    if epoch is None or not runtime.writable:
        return None
    if outvoted(runtime):
        return epoch
    if base is not None and epoch.number <= base.name.number:
        return None
    return epoch if _parted(runtime, epoch) else None


def _parted(runtime: "PartyRuntime", epoch: Epoch) -> set[FeedKey]:
    """Data feeds of which an epoch contains another branch than the one in use here."""
    feeds, found = runtime.feeds, set()
    for entry in epoch.genesis.timeframe:
        if not feeds.has_feed(entry.feed) or entry.seq < feeds.feed(entry.feed).base:
            continue
        link = feeds.link_at(entry.feed, entry.seq)
        if link is None:  # shorter here: either it grows into the epoch's branch, or that one is kept beside it
            kept = feeds.branches(entry.feed) and feeds.fork_block(entry.feed, entry.seq, entry.link) is not None
        else:
            kept = link != entry.link
        if kept:
            found.add(entry.feed)
    return found


def leave_branch(
    party: "Party", epoch: Epoch, base: BaseEpoch, stand_on: Callable[["PartyRuntime", BaseEpoch], str]
) -> str:
    """Stand on an epoch; own messages that rest on a branch which it did not choose are written again."""
    runtime = party.runtime
    runtime.flush()
    cuts = {feed_id(feed): base.cuts[feed_id(feed)] for feed in _parted(runtime, epoch)}
    own = runtime.data
    end = _resting(runtime, base, cuts) if own is not None and own.feed not in cuts else None
    if own is None or end is None:
        return stand_on(runtime, base)
    kept = _operations(runtime, own.feed, end)
    parent = runtime.processor.parent
    owner = party if parent is None else party.peer.held(parent.party)
    owner.members.issue_claim(FeedRetire(own.cursor.key, end))
    why = stand_on(runtime, base)
    done = write_again(party, own.feed, kept)
    _log.warning(
        "messages of this device rested on a branch that epoch %d did not choose: %d operations were written again, %d stay behind",
        epoch.number,
        done.operations,
        done.left,
    )
    return why


def _resting(runtime: "PartyRuntime", base: BaseEpoch, cuts: dict[FeedId, FeedCut]) -> int | None:
    """The first own message above the epoch that nobody takes without the branch which was not chosen."""
    own = runtime.data
    assert own is not None
    for seq in range(base.length(own.feed), runtime.feeds.length(own.cursor.key)):
        for dependency in runtime.processor.envelope(own.feed, seq).dependencies:
            cut = cuts.get(dependency.feed)
            if cut is not None and dependency.depth > cut.depth - (cut.length - 1 - dependency.seq):
                return seq
            if cut is not None and dependency.seq >= cut.length:
                return seq
    return None


def _operations(runtime: "PartyRuntime", feed: FeedId, start: int) -> list[tuple[int, list[ItemOperation]]]:
    own = runtime.data
    assert own is not None
    return [
        (seq, runtime.processor.operations_at(feed, seq)) for seq in range(start, runtime.feeds.length(own.cursor.key))
    ]
