"""Going on from a control state at opening, so that a party with a thousand epochs opens like one with ten.

    about["control_state"]   what the control feeds amount to below the cut of an epoch (`wire.control_state`)

    opening      the state is taken up, control cursors stand at its cut, the tail is folded
    late         something speaks of what the state left out: all control messages are folded, as if there were none
    whole        somebody asks for epochs that lie below it: the same
    checkpoint   a new state is kept, once enough messages lie below the newest final epoch's cut

The state is derived: without it, or with a damaged one, everything is folded from the feeds. It is used only where the
feeds still hold its cut, on the same branch.
"""

import logging
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedKey
from echostore.kernel.order import CONTROL, Delivery, FeedCursor, Orderer
from echostore.kernel.party.compaction import compact, is_closed
from echostore.kernel.party.control_state import is_late
from echostore.peer.reading import BlockReader
from echostore.wire.control import Membership
from echostore.wire.control_state import (
    StoredControl,
    control_cuts,
    encode_control_state,
    lengths_of,
    read_control_state,
)
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor
    from echostore.store.feed_store import FeedStore

_log = logging.getLogger("echostore")

CONTROL_KEY = "control_state"
"""Under which the FeedStore keeps the state; empty: none."""

KEEP_AFTER_MESSAGES = 64
"""A new state is kept when it spares at least so many control messages more than the last one."""


def follow_control(processor: "PartyProcessor") -> None:
    """Fold the control feeds, from the kept state on where there is one that fits."""
    start = _kept(processor)
    if start is not None:
        processor.membership = Membership(processor.party, start.state)
        processor.control_kept = sum(start.state.lengths.values())
    for held in processor.feeds.feeds():
        if held.kind == CONTROL:
            processor.follow(_cursor(held.key, start))
    control = [feed for feed, cursor in processor.orderer.cursors.items() if cursor.kind == CONTROL]
    processor.advanced.update(feed for feed in control if processor.orderer.cursors[feed].length)
    for event in processor.orderer.run(control):
        processor.take_control(event)
    heed_late(processor)


def heed_late(processor: "PartyProcessor") -> None:
    """Where something spoke of what the state left out, fold all control messages."""
    if processor.membership.machine.late:
        fold_whole(processor)


def fold_whole(processor: "PartyProcessor") -> None:
    """Stand on all control messages that were processed, where only a state and its tail were folded so far."""
    owner = processor.parent or processor
    if owner.membership.machine.start is None:
        return
    owner.membership = _membership_of_all(owner)
    for child in owner.children:
        child.membership = owner.membership


def _membership_of_all(processor: "PartyProcessor") -> Membership:
    reader = BlockReader(processor.feeds)
    orderer = Orderer(fetch=reader.fetch, lookup=reader.lookup)
    orderer.set_base(processor.orderer.base)
    membership = Membership(processor.party)
    for feed, cursor in processor.orderer.cursors.items():
        if cursor.kind != CONTROL:
            continue
        orderer.add(FeedCursor(cursor.key, CONTROL, held=cursor.length))
        for branch in processor.orderer.branches.get(feed, ()):
            orderer.add(FeedCursor(cursor.key, CONTROL, held=branch.held, branch=branch.branch))
    for event in orderer.run(list(orderer.cursors)):
        if isinstance(event, Delivery):
            membership.receive(event)
    return membership


def _cursor(key: FeedKey, start: StoredControl | None) -> FeedCursor:
    cut = start.cuts.get(key) if start is not None else None
    if cut is None:
        return FeedCursor(key, CONTROL)
    asserted = {known.feed: known for known in cut.asserted}
    return FeedCursor(key, CONTROL, length=cut.length, link=cut.link, depth=cut.depth, asserted=asserted)


def _kept(processor: "PartyProcessor") -> StoredControl | None:
    """The state that the FeedStore keeps, if this processor may go on from it."""
    feeds = processor.feeds
    try:
        data = feeds.about(CONTROL_KEY)
        start = read_control_state(data, processor.party) if data else None
    except Corrupt as error:
        _log.warning("%s All control messages of party %s are folded.", error.what, processor.party.hex()[:8])
        return None
    if start is None:
        return None
    for key, cut in start.cuts.items():
        if not feeds.has_feed(key) or processor.held_length(CONTROL, key) < cut.length:
            return None
        if feeds.link_at(key, cut.length - 1) != cut.link or feeds.branches(key):
            return None
    return start


def keep_control(processor: "PartyProcessor", *, closing: bool = False) -> bool:
    """Keep the state at the newest final epoch's cut, where that spares much; says whether it did.

    While the party stays open, it waits until a quarter of what making a state goes through is new, so that making them
    costs no more than folding the messages did.
    """
    base, machine = processor.base, processor.membership.machine
    if processor.parent is not None or base is None or processor.paused:
        return False
    cuts = control_cuts(base.cuts.values())
    lengths = lengths_of(cuts)
    before = machine.start.lengths if machine.start is not None else {}
    if any(lengths.get(key, 0) < length for key, length in before.items()):
        return False
    below = sum(lengths.values())
    spared, gone_through = below - processor.control_kept, below - sum(before.values())
    if spared < max(KEEP_AFTER_MESSAGES, 0 if closing else gone_through // 4):
        return False
    if any(processor.membership.length_of(key) < length for key, length in lengths.items()):
        return False
    if not is_closed(machine, lengths):
        return False
    state = compact(machine, lengths)
    tail = [message for message in machine.messages if message.seq >= lengths.get(message.feed_key, 0)]
    known = {credential.hash for message in (*state.messages, *tail) for credential in message.credentials}
    if any(is_late(state, message, known) for message in tail):
        return False
    data = encode_control_state(StoredControl(state, cuts), Credentials(processor.feeds).at)
    processor.feeds.set_about({CONTROL_KEY: data})
    processor.control_kept = below
    return True


class Credentials:
    """Signed credentials by their places, read from the blocks that carry them."""

    def __init__(self, feeds: "FeedStore") -> None:
        self._feeds = feeds

    def at(self, key: FeedKey, seq: int, position: int) -> bytes:
        envelope = decode_envelope(self._feeds.block(key, seq).payload, CONTROL)
        body = getattr(envelope, "body", None)
        if body is None or position >= len(body.credentials):
            raise Corrupt(f"Block {seq} of feed {key.hex()} was processed and can't be decoded now.")
        data: bytes = body.credentials[position].SerializeToString(deterministic=True)
        return data
