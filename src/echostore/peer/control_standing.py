"""Going on from a control state at opening, so that a party with a thousand epochs opens like one with ten.

    about["control_state"]   what the control feeds amount to below the cut of an epoch (`wire.control_state`)
    about["control_floor"]   the same at the cut where truncated control feeds begin

    opening      the state is taken up, control cursors stand at its cut, the tail is folded
    late         something speaks of what the state left out: all control messages are folded, as if there were none
    whole        somebody asks for epochs that lie below it: the same
    checkpoint   a new state is kept, once enough messages lie below the newest final epoch's cut

The first is derived: without it, or with a damaged one, everything is folded from the feeds. It is used only where the
feeds still hold its cut, on the same branch. The second stands for blocks that are gone: whoever asks for what lies below
it is told so.
"""

import logging
from typing import TYPE_CHECKING

from echostore.kernel.errors import Compacted, Corrupt, NotFound
from echostore.kernel.ids import FeedId, FeedKey, feed_id
from echostore.kernel.order import CONTROL, Delivery, FeedCursor, Orderer
from echostore.kernel.party.compaction import compact, is_closed
from echostore.kernel.party.control_state import is_late
from echostore.peer.positions import cursor_at
from echostore.peer.reading import BlockReader
from echostore.wire.control import Membership
from echostore.wire.control_state import (
    CONTROL_KEY,
    FLOOR_KEY,
    Place,
    StoredControl,
    control_cuts,
    encode_control_state,
    lengths_of,
    read_control_state,
    read_cuts,
)
from echostore.wire.epochs import FeedCut
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor
    from echostore.store.feed_store import FeedStore

_log = logging.getLogger("echostore")

KEEP_AFTER_MESSAGES = 64
"""A new state is kept when it spares at least so many control messages more than the last one."""


def follow_control(processor: "PartyProcessor") -> None:
    """Fold the control feeds, from the kept state on where there is one that fits, else from where they begin."""
    processor.control_floor = _beginnings(processor)
    start = _fitting(processor, CONTROL_KEY) or _floor(processor)
    processor.orderer.set_base(processor.order_cuts())
    if start is not None:
        processor.membership = Membership(processor.party, start.state)
        processor.control_kept = sum(start.state.lengths.values())
    processor.control_start = start
    for held in processor.feeds.feeds():
        if held.kind == CONTROL:
            processor.follow(control_cursor(held.key, start))
    control = [feed for feed, cursor in processor.orderer.cursors.items() if cursor.kind == CONTROL]
    processor.advanced.update(feed for feed in control if processor.orderer.cursors[feed].length)
    for event in processor.orderer.run(control):
        processor.take_control(event)
    heed_late(processor)


def heed_late(processor: "PartyProcessor") -> None:
    """Where something spoke of what the state left out, fold all control messages that are here."""
    if processor.membership.machine.late:
        fold_whole(processor)


def fold_whole(processor: "PartyProcessor") -> None:
    """Stand on all control messages that are here, where only a later state and its tail were folded so far.

    Where the control feeds begin at a cut, that is the state there and what follows: it is let stand.
    """
    owner = processor.parent or processor
    start = owner.membership.machine.start
    if start is None:
        return
    floor = _floor(owner)
    if floor is not None and floor.state.lengths == start.lengths:
        return
    owner.membership = membership_from(owner, floor)
    owner.control_start = floor
    for child in owner.children:
        child.membership = owner.membership


def membership_from(processor: "PartyProcessor", start: StoredControl | None) -> Membership:
    """What the control messages that were processed amount to, from a state on; all of them without one."""
    reader = BlockReader(processor.feeds)
    orderer = Orderer(fetch=reader.fetch, lookup=reader.lookup)
    orderer.set_base(processor.orderer.base)
    membership = Membership(processor.party, start.state if start is not None else None)
    for feed, cursor in processor.orderer.cursors.items():
        if cursor.kind != CONTROL:
            continue
        begun = control_cursor(cursor.key, start)
        begun.held = cursor.length
        orderer.add(begun)
        for branch in processor.orderer.branches.get(feed, ()):
            other = control_cursor(cursor.key, start)
            other.held, other.branch = branch.held, branch.branch
            orderer.add(other)
    for event in orderer.run(list(orderer.cursors)):
        if isinstance(event, Delivery):
            membership.receive(event)
    return membership


def control_cursor(key: FeedKey, start: StoredControl | None) -> FeedCursor:
    """Where a control feed stands for who goes on from a state."""
    return cursor_at(key, CONTROL, start.cuts.get(key) if start is not None else None)


def _beginnings(processor: "PartyProcessor") -> dict[FeedId, FeedCut]:
    """Where control feeds begin; nothing of what is kept there is checked but that."""
    data = processor.feeds.about(FLOOR_KEY)
    try:
        return {feed_id(key): cut for key, cut in read_cuts(data).items()} if data else {}
    except Corrupt:
        _floor(processor)  # where feeds begin there, nobody can go on without it
        return {}


def _floor(processor: "PartyProcessor") -> StoredControl | None:
    """The state at which the control feeds begin; None when they begin with their first blocks.

    Compacted when this processor looks at a moment below it.
    """
    feeds = processor.feeds
    begun = [held for held in feeds.feeds() if held.kind == CONTROL and held.base]
    if not begun:
        return None
    if any(processor.held_length(CONTROL, held.key) < held.base for held in begun):
        raise Compacted(
            "that moment lies below what this peer keeps of its control feeds",
            next_step="Name a later moment, or ask a member that kept its history.",
        )
    found = _fitting(processor, FLOOR_KEY)
    if found is None:
        raise Corrupt(
            f"The control feeds of party {processor.party.hex()[:8]} begin at a state that is damaged.",
            next_step="Restore the file from a backup, or forget the party and join it again.",
        )
    return found


def _fitting(processor: "PartyProcessor", name: str) -> StoredControl | None:
    """A state that the FeedStore keeps, if this processor may go on from it."""
    feeds = processor.feeds
    try:
        data = feeds.about(name)
        start = read_control_state(data, processor.party) if data else None
    except Corrupt as error:
        _log.warning("%s It is not used for party %s.", error.what, processor.party.hex()[:8])
        return None
    if start is None:
        return None
    for key, cut in start.cuts.items():
        if not feeds.has_feed(key) or processor.held_length(CONTROL, key) < cut.length:
            return None
        if feeds.link_at(key, cut.length - 1) != cut.link or (name == CONTROL_KEY and feeds.branches(key)):
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
    if machine.late or any(processor.membership.length_of(key) < length for key, length in lengths.items()):
        return False
    if not is_closed(machine, lengths):
        return False
    state = compact(machine, lengths)
    tail = [message for message in machine.messages if message.seq >= lengths.get(message.feed_key, 0)]
    known = {credential.hash for message in (*state.messages, *tail) for credential in message.credentials}
    if any(is_late(state, message, known) for message in tail):
        return False
    credentials = Credentials(processor.feeds, processor.control_start, processor.control_named)
    data = encode_control_state(StoredControl(state, cuts), credentials.at)
    processor.feeds.set_about({CONTROL_KEY: data})
    processor.control_kept = below
    return True


def no_epoch(processor: "PartyProcessor", number: int) -> NotFound | Compacted:
    """What to say of an epoch that is not in the chain as it is known here."""
    child = processor.child_key
    start = processor.membership.machine.start
    first = next((chain.number for chain in start.chains if chain.child == child), 0) if start is not None else 0
    if 0 < number < first:
        return Compacted(
            f"epoch {number} lies below epoch {first}, where what this peer keeps of its control feeds begins",
            next_step=f"`echostore epoch fetch {number}` gets its snapshot from a member that kept it; the rest is with "
            "those who kept their history.",
        )
    if number == 0:
        return NotFound(
            "epoch 0 is the party's genesis, and holds no state", next_step="`echostore epoch show 0` tells of it."
        )
    return NotFound(f"the party has no epoch {number}", next_step="`echostore epoch list` shows its epochs.")


class Credentials:
    """Signed credentials by their places: from states that have them, else from the blocks that carry them."""

    def __init__(self, feeds: "FeedStore", *states: StoredControl | None) -> None:
        self._feeds = feeds
        self._states = [state.signed for state in states if state is not None]
        self.used: dict[Place, bytes] = {}
        """What was asked for."""
        self._last: tuple[FeedKey, int, list[bytes]] | None = None
        """The block that was read last: whoever asks goes through its credentials in turn."""

    def at(self, key: FeedKey, seq: int, position: int) -> bytes:
        place = (key, seq, position)
        found = next((signed[place] for signed in self._states if place in signed), None)
        self.used[place] = found if found is not None else self._read(*place)
        return self.used[place]

    def _read(self, key: FeedKey, seq: int, position: int) -> bytes:
        if self._last is None or self._last[:2] != (key, seq):
            envelope = decode_envelope(self._feeds.block(key, seq).payload, CONTROL)
            body = getattr(envelope, "body", None)
            credentials = body.credentials if body is not None else ()
            self._last = key, seq, [each.SerializeToString(deterministic=True) for each in credentials]
        if position >= len(self._last[2]):
            raise Corrupt(f"Block {seq} of feed {key.hex()} was processed and can't be decoded now.")
        return self._last[2][position]
