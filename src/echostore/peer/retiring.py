"""Feeds that went silent: retiring them by policy, and what their devices do when they come back.

    admin     a data feed whose device wrote nothing for the policy's `epoch.silence_s` is retired where it ends, so
              that it no longer holds up what epochs may discard
    device    finds its feed retired: it opens a new one and writes again what the old one has beyond its end

Ages are by the writers' clocks, the declarers' and the admin's own: retiring is an admin's act, not part of a fold. Edits of texts and
lists are done again on what these are now, as far as nobody has overtaken them (`kernel.models.repeating`). What stays
behind is listed by `party.rejected()` with the reason `retired`:

    views                      the proof names an item of the old feed
    undos of properties        put back what an entry of the old feed was
    retractions                of posts that count: only the feed that wrote one retracts it
    what an epoch discarded    there is nothing to write on; of texts also where this device has lost that history
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import Refused, TooLarge
from echostore.kernel.ids import FeedId, FeedKey, ItemId, Stamp, feed_id
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models._elements import element_text, element_value
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.property_set import Add, Increment, PropertySet, Remove, Set
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import OwnPost, Post, PostId, Retention, Retract, Revive, ThreadedLog
from echostore.kernel.party.credentials import FeedKind, FeedRetire, Role
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Reference, Value

if TYPE_CHECKING:
    from echostore.kernel.party.admission import FeedAdmission
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime


SIGNS_SETTING: Final = "signs_of_life"
"""Under which the MetaStore keeps, per feed of a party, its length and when its end was written at the latest."""


@dataclass(frozen=True, slots=True)
class Rebased:
    """What was written again after a feed was retired."""

    messages: int
    operations: int
    left: int
    """Operations that stay with the old feed."""


# the admin


def retire_silent(party: "Party") -> list[FeedKey]:
    """Retire the data feeds of others that were silent for longer than the policy allows; returns them."""
    with party.writing() as runtime:
        silent = silent_feeds(party)
        for feed in silent:
            cursor = runtime.processor.orderer.cursors.get(feed_id(feed))
            _owner(party).members.issue_claim(FeedRetire(feed, cursor.length if cursor is not None else 0))
        return silent


def silent_feeds(party: "Party") -> list[FeedKey]:
    """The data feeds of others that this device would retire now: what they were silent for is up to the policy."""
    with party.reading() as runtime:
        machine = runtime.processor.membership.machine
        silence_ms = 1000 * machine.epoch_policy.silence_s
        owner = _owner(party)
        identity = party.peer.opener.identity_in(owner)
        mine = next((member.role for member in machine.members if member.identity == identity), None)
        if not silence_ms or mine is None or mine < Role.ADMIN:
            return []
        signs = _SignsOfLife(party, owner.runtime)
        silent = [
            admitted.feed
            for admitted in runtime.processor.admission.feeds
            if _open_writer(admitted)
            and not _own(runtime, admitted.feed)
            and signs.last_ms(admitted) < runtime.now_ms() - silence_ms
        ]
        if runtime.writable:
            signs.keep()
        return silent


def _owner(party: "Party") -> "Party":
    """The party whose control feeds speak of this one's feeds."""
    parent = party.runtime.processor.parent
    return party if parent is None else party.peer.held(parent.party)


def _open_writer(admitted: "FeedAdmission") -> bool:
    last = admitted.intervals[-1] if admitted.intervals else None
    return admitted.kind is FeedKind.DATA and last is not None and last.end is None and last.role is not Role.READER


def _own(runtime: "PartyRuntime", feed: FeedKey) -> bool:
    return runtime.feeds.has_feed(feed) and runtime.feeds.feed(feed).own


class _SignsOfLife:
    """When the device of a feed was last heard of: its last data or control message, or the admission of the feed.

    Where the last message is gone (`epoch gc`, or this peer started from an epoch), it was written before the first epoch
    that contains it. Such epochs go in their turn, so what was found once is kept for as long as the feed stays as it is.
    """

    def __init__(self, party: "Party", owner: "PartyRuntime") -> None:
        """The control feeds of a child party are those of its parent, the `owner`."""
        self._party, self._runtime, self._owner = party, party.runtime, owner
        self._known: dict[str, list[int]] = party.peer.meta.setting(SIGNS_SETTING, {}, party=party.key)
        self._found: dict[str, list[int]] = {}

    def last_ms(self, admitted: "FeedAdmission") -> int:
        machine = self._runtime.processor.membership.machine
        last = max(machine.admitted_ms(admitted.feed), self._written_ms(self._runtime, admitted.feed))
        for other in self._owner.processor.admission.feeds:
            if other.kind is FeedKind.CONTROL and other.device == admitted.device:
                last = max(last, self._written_ms(self._owner, other.feed))
        return last

    def keep(self) -> None:
        if self._found != self._known:
            self._party.peer.meta.set_setting(SIGNS_SETTING, self._found, party=self._party.key)

    def _written_ms(self, runtime: "PartyRuntime", feed: FeedKey) -> int:
        cursor = runtime.processor.orderer.cursors.get(feed_id(feed))
        if cursor is None or not cursor.length:
            return 0
        name = feed.hex()
        length, known_ms = self._known.get(name, (0, 0))
        found_ms = runtime.block_time(cursor.id, cursor.length - 1)
        if found_ms is None:
            found_ms = _contained_ms(runtime, feed, cursor.length - 1)
            if length == cursor.length:
                found_ms = min(found_ms, known_ms)
        self._found[name] = [cursor.length, found_ms]
        return found_ms


def _contained_ms(runtime: "PartyRuntime", feed: FeedKey, seq: int) -> int:
    """When the first epoch that contains a block was made, of those that are known here; else now: nobody can tell."""
    processor = runtime.processor
    for epoch in processor.membership.machine.epoch_tally(processor.child_key).chain:
        said = epoch.genesis
        if any(entry.feed == feed and entry.seq >= seq for entry in (*said.timeframe, *said.control_timeframe)):
            return said.created_ms
    return runtime.now_ms()


# the device that comes back


def rebase_retired(party: "Party") -> Rebased | None:
    """Go on with a new feed where this device's own was retired; None when it was not, or may not write any more."""
    with party.writing() as runtime:
        own = runtime.data
        record = runtime.processor.admission.by_id.get(own.feed) if own is not None else None
        if own is None or record is None or record.end_reason is not Reason.RETIRED or not _writes(party):
            return None
        runtime.flush()
        end = max((interval.end or 0 for interval in record.intervals), default=0)
        held = runtime.feeds.feed(own.cursor.key)
        kept = [
            (seq, runtime.processor.operations_at(own.feed, seq)) for seq in range(max(end, held.base), held.length)
        ]
        return write_again(party, own.feed, kept)


def write_again(party: "Party", old: FeedId, kept: list[tuple[int, list[ItemOperation]]]) -> Rebased:
    """Write operations of an own feed that goes no further again, on a new one; none while this device may only read.

    They stay on the old feed then, and are written again once it may (`rebase_retired`).
    """
    runtime = party.runtime
    if not _writes(party):
        return Rebased(0, 0, sum(len(operations) for _, operations in kept))
    party.peer.opener.open_data_feed(party)
    runtime.reissues.feed_changed()
    return _Rebase(runtime, old).write(kept)


def _writes(party: "Party") -> bool:
    """Whether this device's identity is more than a reader now."""
    parent = party.runtime.processor.parent
    owner = party if parent is None else party.peer.held(parent.party)
    identity = party.peer.opener.identity_in(owner)
    members = owner.runtime.processor.membership.machine.members
    return any(member.identity == identity and member.role not in (None, Role.READER) for member in members)


class _Rebase:
    """Writes operations of an old feed again, with the ids that things have on the new one."""

    def __init__(self, runtime: "PartyRuntime", old: FeedId) -> None:
        self._runtime, self._old = runtime, old
        self._items: dict[ItemId, ItemId] = {}
        self._posts: dict[tuple[int, int], OwnPost] = {}
        self._updates: dict[ItemId, list[tuple[Any, Stamp]]] = {}
        """Of texts and lists, by the ids that they had on the old feed."""
        self._done = self._left = self._messages = 0

    def write(self, kept: list[tuple[int, list[ItemOperation]]]) -> Rebased:
        for seq, operations in kept:
            written = self._done
            with self._runtime.batch():
                for position, operation in enumerate(operations):
                    self._again(operation, seq, position)
            self._messages += self._done > written
        for item, updates in self._updates.items():
            self._edited_again(item, updates)
        self._runtime.flush()
        return Rebased(self._messages, self._done, self._left)

    def _again(self, operation: ItemOperation, seq: int, position: int) -> None:
        item = self._items.get(operation.item, operation.item)
        record = self._runtime.state.record(item)
        if record is not None and isinstance(record.model, SharedSequence) and operation.field == record.model.name:
            stamp = Stamp(seq + 1, self._old, seq, position)  # of one writer alone: its own order will do
            self._updates.setdefault(operation.item, []).append((operation.body, stamp))
            return
        made = self._made(operation, item)
        if made is None:
            self._left += 1
            return
        own = self._runtime.data
        assert own is not None
        place = OwnPost(own.cursor.length, self._runtime.next_position)
        try:
            self._runtime.operate([made])
        except Refused:
            self._left += 1  # on ground that an epoch discarded, or that this member may not write any more
            return
        self._done += 1
        if isinstance(operation.body, Post):
            self._posts[seq, position] = place

    def _edited_again(self, item: ItemId, updates: list[tuple[Any, Stamp]]) -> None:
        """What this device did to a text or list, in one message."""
        record = self._runtime.state.record(self._items.get(item, item))
        if record is None:
            self._left += len(updates)  # an epoch that was adopted meanwhile left it out
            return
        if item not in self._items:
            written = self._runtime.reissues.again(record, [update for update, _ in updates], self._piece(record))
        else:
            # It was made on the old feed: all that is in it is this device's own.
            seen = type(record.model)(item)
            seen.apply_many([(update, stamp, 0) for update, stamp in updates])
            pieces = [self._piece(record)(piece.text) for piece in seen.pieces()]
            written = bool(pieces) and self._put(record, pieces, seen)
        self._messages += written
        self._done += len(updates) if written else 0
        self._left += 0 if written else len(updates)

    def _put(self, record: ItemRecord, pieces: list[str], seen: SharedSequence) -> bool:
        try:
            with self._runtime.batch():
                self._runtime.edit(record)
                record.model.put(0, pieces)
                if isinstance(seen, ConcurrentText):
                    record.model.put_marks(
                        (index, key, value)
                        for index, marks in enumerate(seen.marks_in(0, len(seen)))
                        for key, value in marks.items()
                    )
        except (Refused, TooLarge):
            return False
        return True

    def _piece(self, record: ItemRecord) -> Callable[[str], str]:
        """What a character or an element is on the new feed: elements may name items that were made anew."""
        if not isinstance(record.model, GrowableArray):
            return lambda piece: piece
        return lambda piece: element_text(self._value(element_value(piece)))

    def _made(self, operation: ItemOperation, item: ItemId) -> ItemOperation | None:
        """The same operation on the new feed; None where there is none."""
        field, body = operation.field, operation.body
        if field == GENESIS:
            if body.inception_key:
                return None  # its proof names the old item
            new = self._runtime.next_item()
            self._items[operation.item] = new
            assert self._runtime.data is not None
            return ItemOperation(
                new,
                GENESIS,
                replace(
                    body,
                    item=new,
                    parent=self._item(body.parent),
                    source=self._item(body.source),
                    target=self._item(body.target) if body.target_party is None else body.target,
                    depth=self._runtime.data.next_depth,
                ),
            )
        if self._runtime.state.record(item) is None:
            return None
        if field in (PropertySet.name, METADATA):
            changes = self._changes(item, field, body)
            return ItemOperation(item, field, changes) if changes else None
        if field == PLACEMENT:
            return ItemOperation(item, field, (body[0], self._item(body[1])))
        if field == ThreadedLog.name:
            return self._log(item, body)
        return ItemOperation(item, field, body) if field == CUSTOM else None

    def _changes(self, item: ItemId, field: str, body: Any) -> tuple[Any, ...] | None:
        record = self._runtime.state.record(item)
        assert record is not None
        model = record.metadata if field == METADATA else record.model
        found: list[Any] = []
        for change in body:
            if isinstance(change, Set):
                found.append(Set(change.path, self._value(change.value)))
            elif isinstance(change, Increment):
                found.append(replace(change, base=model.standing_write(change.path)))
            elif isinstance(change, Add | Remove):
                found.append(change)  # what was observed is named by where it stands, the old feed's own too
            else:
                return None  # what was undone belongs to the old feed
        return tuple(found)

    def _log(self, item: ItemId, body: Any) -> ItemOperation | None:
        if isinstance(body, Retention):
            return ItemOperation(item, ThreadedLog.name, body)
        if isinstance(body, Retract | Revive):
            post = self._posts.get((body.post.seq, body.post.position)) if isinstance(body.post, OwnPost) else None
            return None if post is None else ItemOperation(item, ThreadedLog.name, replace(body, post=post))
        if not isinstance(body, Post):
            return None
        answered = body.reply_to
        if isinstance(answered, OwnPost):
            answered = self._posts.get((answered.seq, answered.position)) or PostId(
                self._old, answered.seq, answered.position
            )
        return ItemOperation(item, ThreadedLog.name, replace(body, reply_to=answered))

    def _item(self, item: ItemId | None) -> ItemId | None:
        return None if item is None else self._items.get(item, item)

    def _value(self, value: Value) -> Value:
        if isinstance(value, Reference) and value.party is None:
            return Reference(self._items.get(value.item, value.item), None)
        if isinstance(value, list):
            return [self._value(inner) for inner in value]
        if isinstance(value, dict):
            return {key: self._value(inner) for key, inner in value.items()}
        return value
