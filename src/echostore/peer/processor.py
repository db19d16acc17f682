"""PartyProcessor: the live state of one party. Blocks in, items out.

    FeedStore -> Orderer -> control messages -> Membership (PartyMachine) -> admission
                         -> data messages    -> PartyState (items)        -> ItemStore, streams, live queries

The state is a function of the data timeframe, the admission and the base epoch. When control says something new about
blocks that were already applied (a removal with a cut, a fork, a removal that turned out void), the items that those
blocks wrote are folded again from their operations.

One processor belongs to one thread at a time: `Peer` holds the lock. It starts no threads and reads no clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import (
    SYSTEM_TYPE,
    FeedId,
    FeedKey,
    IdentityKey,
    ItemId,
    Link,
    PartyKey,
    created_item_id,
    feed_id,
)
from echostore.kernel.items.operations import ItemOperation, Reject, WriterRole
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.order import CONTROL, DATA, Cut, Delivery, Ended, Envelope, FeedCursor, Mark, Orderer
from echostore.kernel.party.admission import Admission
from echostore.kernel.party.credentials import FeedKind, Role
from echostore.kernel.party.roster import RevokedCapability
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency, Timeframe
from echostore.peer.anchors import Anchor
from echostore.peer.base_damage import BaseDamage, watched_blobs
from echostore.peer.base_standing import stand_on_stored, start_from_base, take_checkpoint
from echostore.peer.checkpoints import load_moves, load_record
from echostore.peer.control_standing import follow_control, heed_late
from echostore.peer.delivered import Delivered
from echostore.peer.positions import (
    control_timeframe,
    cursor_at,
    data_timeframe,
    dependencies,
    length_at,
    mirror_control,
    order_cuts,
)
from echostore.peer.reading import BlockReader
from echostore.peer.refolding import refold, refold_found, refold_moved
from echostore.peer.rejections import listed_rejects
from echostore.peer.touched import Touch, Touched
from echostore.peer.view_claims import PartyViewClaims
from echostore.store.blob_store import BlobStore
from echostore.store.feed_store import FeedStore
from echostore.store.item_store import ItemStore
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.control import Membership
from echostore.wire.control_state import StoredControl
from echostore.wire.epochs import FeedCut
from echostore.wire.messages import decode_envelope, decode_operations

READER_ROLES = frozenset({Role.READER})


@dataclass(slots=True)
class Counters:
    """What the processor has done since it was opened."""

    control: int = 0
    delivered: int = 0
    applied: int = 0
    excluded: int = 0
    refolds: int = 0
    refolded_items: int = 0
    rebuilds: int = 0


Listener = Callable[[set[ItemId], list[Delivered]], None]


class PartyProcessor:
    """Owns the orderer, the membership and the state of one party."""

    def __init__(
        self,
        party: PartyKey,
        *,
        feeds: FeedStore,
        items: ItemStore | None,
        factory: ModelFactory,
        blobs: BlobStore | None = None,
        parent: "PartyProcessor | None" = None,
        limit: Anchor | None = None,
    ) -> None:
        self.party = party
        self.feeds = feeds
        self.items = items
        self.factory = factory
        self.blobs = blobs
        if items is not None and blobs is not None:
            items.read_pages_with(watched_blobs(self))
        self.base: BaseEpoch | None = None
        """The epoch that the state is folded from; None: from the beginning."""
        self.damage: BaseDamage | None = None
        """What is lost of that epoch, if anything is."""
        self.on_damage: list[Callable[[], None]] = []
        """Told when blobs of it are found lost."""
        self.parent = parent
        self.child_key: PartyKey | None = party if parent is not None else None
        """By which key the parent's control feeds speak of this party; None: it has control feeds of its own."""
        self.membership: Membership = parent.membership if parent else Membership(party)
        self.reader = BlockReader(feeds)
        self.orderer = Orderer(fetch=self.reader.fetch, lookup=self._lookup)
        self.counters = Counters()
        self.listeners: list[Listener] = []
        self.streaming = False
        """Whether any listener wants the delivered messages themselves."""
        self.touches: list[Touch] = []
        """What was written since the last checkpoint."""
        self.touched = Touched(self)
        self.views = PartyViewClaims(self)
        self.new_rejects: list[Reject] = []
        self.gone_rejects: set[tuple[FeedId, int, int]] = set()
        """Places of stored rejects that hold no more. Nothing is written in the midst of a run: a disk may be full."""
        self.advanced: set[FeedId] = set()
        """Feeds that moved since this device last wrote: what its next message must name."""
        self.control_kept = 0
        """How many control messages the control state in the FeedStore spares."""
        self.control_start: StoredControl | None = None
        """What the membership went on from."""
        self.control_named: StoredControl | None = None
        """The state that was made last for an epoch (`control_naming`)."""
        self.control_floor: dict[FeedId, FeedCut] = {}
        """Where the control feeds begin; empty where they begin with their first blocks."""
        self._admission: Admission | None = None
        self._admission_changed = False
        self.limit = limit
        """While the party is paused: how far the feeds of others are processed. What is beyond is held, no more."""
        self.children: list[PartyProcessor] = []
        self.on_admission: list[Callable[[], None]] = []
        """Told when control has changed which blocks count."""
        self.on_revocation: list[Callable[[], None]] = []
        """Told when control has changed which capabilities of thin clients are revoked."""
        self._revoked: dict[bytes, RevokedCapability] | None = None
        self._revoked_changed = False
        self.on_processed: list[Callable[[set[FeedId]], None]] = []
        """Told at the end of a run which feeds it processed further."""
        self.moved: set[FeedId] = set()
        """Feeds of which the listeners hear at the end of a run."""
        self.refolded: set[ItemId] = set()
        """Items that were folded again since somebody last looked."""
        self.after_finish: Callable[[], None] = lambda: None
        self.before_refold: Callable[[], object] = lambda: None
        """Makes this device's own open writes durable, where there is space for them."""
        self.open_payload: Callable[[FeedKey, int], bytes | None] = lambda key, seq: None
        """A block of this device that is not durable yet; None for all others."""
        self._pending: list[Delivered] = []
        """What a run has collected for its listeners."""
        self.state = self._blank_state()

    # opening

    def open(self) -> None:
        """Fold control, take the items from the last checkpoint where it fits, and fold the tail."""
        self.stand()
        self.begin()

    def begin(self) -> None:
        """Fold the data feeds, from the base that is stood on."""
        if not take_checkpoint(self):
            self.state.start_over(load_moves(self.items) if self.items else ())
            start_from_base(self)
        self.follow_data()
        self.advance(list(self.orderer.cursors))

    def stand(self, *, given_up: str = "", mendable: bool = False) -> None:
        """Take up the base and the control feeds. With `mendable`, a lost base leaves the party `closed`, not refused."""
        stand_on_stored(self, given_up=given_up)
        self._follow_control()
        if self.damage is not None and self.closed and not mendable:
            raise self.damage.error()

    @property
    def closed(self) -> bool:
        """Whether the base is lost, so that there is no state."""
        return self.damage is not None and self.damage.closed

    def _blank_state(self) -> PartyState:
        return PartyState(
            self.party,
            self.factory,
            load=self._load,
            identity_of=self.identity_of,
            base_length=self.base_length,
            views=self.views,
        )

    def _load(self, item: ItemId) -> ItemRecord | None:
        return load_record(self.items, item, self.factory) if self.items and not self.closed else None

    def _follow_control(self) -> None:
        if self.parent is not None:
            self.parent.children.append(self)
            self._mirror_control(self.parent)
            return
        follow_control(self)
        self._admission = None

    def _mirror_control(self, parent: "PartyProcessor") -> None:
        """A child party sees its parent's control feeds as far as the parent has processed them, and never reads them."""
        self.moved.update(mirror_control(self.orderer, parent.orderer))

    def _lookup(self, cursor: FeedCursor, seq: int) -> Mark:
        if cursor.kind == CONTROL and self.parent is not None:
            return self.parent.orderer.mark(cursor.id, seq)
        return self.reader.lookup(cursor, seq)

    def follow_data(self) -> None:
        """Follow every data feed of which something is held and may count or be built on; none while the base is lost."""
        if self.closed:
            return
        cursors = self.orderer.cursors
        for each in self.admission.followed:
            if each.kind is FeedKind.DATA and feed_id(each.feed) not in cursors and self.feeds.has_feed(each.feed):
                self.follow(FeedCursor(each.feed, DATA))

    def follow(self, cursor: FeedCursor) -> None:
        if cursor.id in self.orderer.cursors:
            return
        cursor.held = self.held_length(cursor.kind, cursor.key)
        self.orderer.add(cursor)
        self.follow_branches(cursor)

    def held_length(self, kind: str, key: FeedKey) -> int:
        """How much of a feed there is to process; the past sees less, and so does a paused party."""
        length = self.feeds.length(key)
        if self.limit is None or self.feeds.feed(key).own:  # own blocks build on what was processed when they were made
            return length
        if kind == DATA:
            return length_at(self.limit.data, self.admission, key, length)
        return min(length, self.limit.control.length(feed_id(key)))

    def follow_branches(self, main: FeedCursor) -> None:
        """Follow the other branches of a forked feed from their first block: depths must be checked like any."""
        known = {cursor.branch: cursor for cursor in self.orderer.branches.get(main.id, ())}
        for number, branch in enumerate(self.feeds.branches(main.key), 1):
            end_seq = branch.start_seq + len(branch.blocks)
            if number in known:
                known[number].held = end_seq
                continue
            begun = self.control_floor.get(main.id)  # what lies below may be gone
            if begun is None and self.base is not None and self.feeds.feed(main.key).base:
                begun = self.base.cuts.get(main.id)
            # What parts below can't be followed any more: an epoch contains the branch that counts.
            if begun is None or branch.start_seq >= begun.length:
                other = cursor_at(main.key, main.kind, begun)
                other.branch, other.held = number, end_seq
                self.orderer.add(other)

    # what holds now

    @property
    def admission(self) -> Admission:
        if self._admission is None:
            self._admission = self.membership.admission(self.child_key)
        return self._admission

    @property
    def timeframe(self) -> Timeframe:
        """What of the data feeds is in the state: the last allowed block that was processed, with its link."""
        return data_timeframe(self.orderer, self.admission)

    @property
    def control_timeframe(self) -> Timeframe:
        return control_timeframe(self.orderer, (self.parent or self).admission, self.membership)

    def feeds_of(self, kind: str) -> FeedStore:
        """Where feeds of a kind are: a child party's control feeds are its parent's."""
        return self.parent.feeds if kind == CONTROL and self.parent is not None else self.feeds

    def feed_key(self, feed: FeedId) -> FeedKey:
        return self.orderer.cursors[feed].key

    def dependencies(self, own: FeedCursor) -> tuple[Dependency, ...]:
        """What this device has processed since the last message of its own feed, in ascending order of feed."""
        # A data feed looks at what moved since it last wrote; a control feed at all control feeds, which are few.
        moved = self.orderer.cursors if own.kind == CONTROL else self.advanced
        return dependencies(self.orderer, self.admission, (self.parent or self).admission, own, moved)

    def wrote(self, own: FeedCursor) -> None:
        """An own message was built: a data feed's has named all that moved, a control feed's is itself news."""
        if own.kind == DATA:
            self.advanced.clear()
        else:
            self.advanced.add(own.id)

    def base_length(self, feed: FeedId) -> int:
        """How many blocks of a feed lie inside the base epoch."""
        return self.base.length(feed) if self.base is not None else 0

    def order_cuts(self) -> dict[FeedId, Cut]:
        """Below which places dependencies are taken by their bound (O8): those of the base, and where control begins."""
        return order_cuts(self.base, (self.parent or self).control_floor)

    def identity_of(self, feed: FeedId) -> IdentityKey | None:
        record = self.admission.by_id.get(feed)
        return record.identity if record else None

    # advancing

    def grown(self, key: FeedKey, start: int, links: list[Link], payloads: list[bytes]) -> None:
        """Blocks of a feed were stored."""
        feed = feed_id(key)
        cursor = self.orderer.cursors.get(feed)
        if cursor is None or cursor.key != key:
            self.follow_data()
            cursor = self.orderer.cursors.get(feed)
            if cursor is None and self.feeds.feed(key).kind == CONTROL and self.parent is None:
                cursor = FeedCursor(key, CONTROL)
                self.follow(cursor)
        if cursor is None:
            return
        if not self.paused and not (self.closed and cursor.kind == DATA):
            cursor.held = self.feeds.length(key)
            self.reader.arrived(feed, start, links, payloads)
            self.advance([feed])

    @property
    def paused(self) -> bool:
        return self.limit is not None

    def resume(self) -> None:
        """Process what was held while the party was paused."""
        self.limit = None
        for cursor in self.orderer.cursors.values():
            if self.feeds.has_feed(cursor.key):
                cursor.held = self.feeds.length(cursor.key)
                self.follow_branches(cursor)
        self.follow_data()
        self.advance(list(self.orderer.cursors))

    def control_moved(self) -> None:
        """The parent's control feeds have moved: look again at what counts in this child party."""
        assert self.parent is not None
        self._mirror_control(self.parent)
        self.advanced.update(feed for feed, cursor in self.orderer.cursors.items() if cursor.kind == CONTROL)
        self._admission_moved()
        self.follow_data()
        self.advance(list(self.orderer.cursors))

    def fork_stored(self, key: FeedKey) -> None:
        """Another branch of a feed was stored: follow it, so that dependencies on it can be met."""
        feed = feed_id(key)
        main = self.orderer.cursors.get(feed)
        if main is None or self.paused:
            return
        self.follow_branches(main)
        self.moved.add(feed)
        self.advance([feed])

    def advance(self, feeds: Iterable[FeedId]) -> None:
        """Deliver all that can be delivered now, control before what depends on it, and tell the listeners."""
        todo = list(feeds)
        while todo:
            before = set(self.orderer.cursors)
            control_moved = False
            for event in self.orderer.run(todo):
                if event.cursor.kind == CONTROL:
                    control_moved |= self.take_control(event)
                elif isinstance(event, Delivery):
                    self._take_data(event)
            todo = []
            if control_moved:
                self._admission_moved()
                self.follow_data()
                for child in list(self.children):
                    child.control_moved()
                todo = [feed for feed in self.orderer.cursors if feed not in before]
        self.finish()

    def finish(self) -> None:
        """End of a run: settle the tree, refold what rules demand, tell the listeners once."""
        if self._admission_changed:
            self._admission_changed = False
            for told in list(self.on_admission):
                told()
        if self._revoked_changed:
            self._revoked_changed = False
            for told in list(self.on_revocation):
                told()
        self.state.settle()
        self._collect_rejects()
        if self.state.refold:
            items, self.state.refold = self.state.refold, set()
            self.refold(items)
        if self.state.found:
            refold_found(self)
        self._collect_rejects()
        delivered, self._pending = self._pending, []
        changed, self.state.changed = self.state.changed, set()
        if changed or delivered:
            for listener in list(self.listeners):
                listener(changed, delivered)
        self.after_finish()
        moved, self.moved = self.moved, set()
        for heard in list(self.on_processed) if moved else ():
            heard(moved)

    def take_control(self, event: Delivery | Ended) -> bool:
        """Fold one control message in; whether it was one."""
        if isinstance(event, Ended):
            return False
        self.counters.control += 1
        self.advanced.add(event.cursor.id)
        self.moved.add(event.cursor.id)
        self.membership.receive(event)
        return True

    def _take_data(self, delivery: Delivery) -> None:
        cursor, seq, link, envelope = delivery
        feed = cursor.id
        self.counters.delivered += 1
        self.advanced.add(feed)
        self.moved.add(feed)
        writer = self.writer(feed, seq)
        if writer is not None:
            self.apply_message(feed, seq, link, envelope, writer)
            return
        self.counters.excluded += 1
        self.exclude(feed, seq)
        # Indexed all the same: should the admission change its mind, these are the items to fold again.
        self._touch(feed, seq, self.operations(feed, seq, envelope.body))

    def apply_message(
        self,
        feed: FeedId,
        seq: int,
        link: Link,
        envelope: Envelope,
        writer: WriterRole,
        *,
        operations: list[ItemOperation] | None = None,
        own: bool = False,
    ) -> None:
        """Fold one allowed message into the state."""
        body = envelope.body
        if operations is None:
            try:
                operations = decode_operations(body, party=self.party, feed=feed, seq=seq)
            except OperationRefused as refusal:
                self.new_rejects.append(Reject(feed, seq, -1, refusal.reason, refusal.detail))
                return
        time_ms = body.time_ms
        try:
            self.state.apply(
                depth=envelope.depth, feed=feed, seq=seq, time_ms=time_ms, operations=operations, writer=writer, own=own
            )
        except Corrupt:
            if self.damage is None:
                raise  # else a page of the base is lost: all above it is folded again once that is back
        self.count_message(feed, seq, link, envelope, writer, operations)

    def count_message(
        self,
        feed: FeedId,
        seq: int,
        link: Link,
        envelope: Envelope,
        writer: WriterRole,
        operations: list[ItemOperation],
    ) -> None:
        """A message is in the state: index what it touched and remember it for the listeners."""
        self.counters.applied += 1
        self._touch(feed, seq, operations)
        if self.streaming:
            self._pending.append(
                Delivered(feed, seq, link, envelope.depth, envelope.body.time_ms, tuple(operations), writer)
            )

    def _touch(self, feed: FeedId, seq: int, operations: list[ItemOperation]) -> None:
        if len(operations) == 1:
            self.touches.append((operations[0].item, feed, seq))
        else:
            self.touches.extend((item, feed, seq) for item in {operation.item for operation in operations})

    def writer(self, feed: FeedId, seq: int) -> WriterRole | None:
        """Who acts at this place and as what; None when its blocks don't count there."""
        record = self.admission.by_id.get(feed)
        if record is None:
            return None
        for interval in record.intervals:
            if interval.start <= seq and (interval.end is None or seq < interval.end):
                if interval.role in READER_ROLES:
                    return None
                return WriterRole(record.identity, interval.role.label)
        return None

    def exclude(self, feed: FeedId, seq: int) -> None:
        reason = self.admission.why_excluded(feed, seq) or Reason.UNADMITTED
        self.new_rejects.append(Reject(feed, seq, -1, reason, ""))

    def check_form(self, feed: FeedId, seq: int) -> None:
        """List a message that counts, as far as the admission goes, if it is malformed."""
        body = self.envelope(feed, seq).body
        try:
            decode_operations(body, party=self.party, feed=feed, seq=seq)
        except OperationRefused as refusal:
            self.new_rejects.append(Reject(feed, seq, -1, refusal.reason, refusal.detail))

    def _collect_rejects(self) -> None:
        if self.state.rejects:
            self.new_rejects.extend(self.state.rejects)
            self.state.rejects = []

    def take_own_control(self, cursor: FeedCursor) -> None:
        """Process control messages that this device has just appended: they are counted by the orderer already."""
        for seq in range(self.membership.length(cursor.id), cursor.length):
            block = self.feeds.block(cursor.key, seq)
            envelope = decode_envelope(block.payload, CONTROL)
            assert isinstance(envelope, Envelope), envelope
            self.counters.control += 1
            self.membership.receive(Delivery(cursor, seq, block.link, envelope))
        self._admission_moved()
        self.follow_data()
        for child in list(self.children):
            child.control_moved()
        self.advance(list(self.orderer.cursors))

    # when control changes what counts

    def control_replaced(self) -> None:
        """The membership is another one now: look again at what counts."""
        self._admission_moved()
        self.follow_data()

    def _admission_moved(self) -> None:
        """Compare what counted with what counts now; refold the items of blocks whose standing changed."""
        heed_late(self)
        known, self._revoked = self._revoked, None
        self._revoked_changed |= known is not None and known.keys() != self.revoked.keys()
        before = self._admission
        self._admission = None
        if before is None:
            return
        moved = before.digest != self.admission.digest
        self._admission_changed |= moved or before.void.keys() != self.admission.void.keys()
        if moved:
            refold_moved(self, before, self.admission)

    @property
    def revoked(self) -> dict[bytes, RevokedCapability]:
        """Revoked capabilities by name: the id and the issuer, or the id alone where any issuer is meant."""
        if self._revoked is None:
            found = self.membership.machine.revoked_capabilities
            self._revoked = {each.id + (each.issuer or b""): each for each in found}
        return self._revoked

    def refold(self, items: Iterable[ItemId]) -> None:
        """Fold items again from all allowed operations on them, with what depends on their existence."""
        refold(self, items)

    def forget_rejects(self, places: Iterable[tuple[FeedId, int, int]]) -> None:
        """Rejects that no longer hold, or are about to be found again."""
        gone = set(places)
        if not gone:
            return
        self._collect_rejects()
        self.new_rejects = [
            reject for reject in self.new_rejects if (reject.feed, reject.seq, reject.position) not in gone
        ]
        if self.items is not None:
            self.gone_rejects |= self.items.rejects_at(gone)

    def rejects(self) -> list[Reject]:
        """All that did not enter the state, with the reasons."""
        self._collect_rejects()
        stored = [
            reject
            for reject in (self.items.rejects() if self.items is not None else ())
            if (reject.feed, reject.seq, reject.position) not in self.gone_rejects
        ]
        kinds = (DATA,) if self.parent is not None else (CONTROL, DATA)
        cursors = [cursor for cursor in self.orderer.cursors.values() if cursor.kind in kinds]
        return listed_rejects((*stored, *self.new_rejects), self.admission, cursors)

    def delivered(self, feed: FeedId, seq: int, link: Link, envelope: Envelope) -> Delivered | None:
        """A processed message as streams show it; None when it is excluded or malformed."""
        writer = self.writer(feed, seq)
        if writer is None:
            return None
        operations = tuple(self.operations(feed, seq, envelope.body))
        if not operations:
            return None
        return Delivered(feed, seq, link, envelope.depth, envelope.body.time_ms, operations, writer)

    @property
    def system_item(self) -> ItemId | None:
        """The party's system item: the first item of the genesis data feed."""
        if self.parent is not None:
            # It has no genesis of its own: the earliest item that was made as one.
            made = map(self.state.record, (created_item_id(feed, 0, 0) for feed in self.admission.by_id))
            found = [(each.genesis.depth, each.item) for each in made if each and each.genesis.type == SYSTEM_TYPE]
            return min(found)[1] if found else None
        genesis = self.membership.machine.genesis
        return created_item_id(feed_id(genesis.data_feed), 0, 0) if genesis else None

    def operations_at(self, feed: FeedId, seq: int) -> list[ItemOperation]:
        return self.operations(feed, seq, self.envelope(feed, seq).body)

    def envelope(self, feed: FeedId, seq: int) -> Envelope:
        """The envelope of a processed block."""
        cursor = self.orderer.cursors[feed]
        envelope = decode_envelope(self.payload(cursor.key, seq), cursor.kind)
        if isinstance(envelope, Reason):
            raise Corrupt(f"Block {seq} of feed {cursor.key.hex()} was processed and is now {envelope}.")
        return envelope

    def payload(self, key: FeedKey, seq: int) -> bytes:
        """The payload of a block that is held, or that this device has written and not stored yet."""
        waiting = self.open_payload(key, seq)
        return self.feeds.block(key, seq).payload if waiting is None else waiting

    def operations(self, feed: FeedId, seq: int, body: object) -> list[ItemOperation]:
        try:
            return decode_operations(body, party=self.party, feed=feed, seq=seq)  # type: ignore[arg-type]  # a Message
        except OperationRefused:
            return []
