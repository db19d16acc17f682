"""PartyRuntime: one open party. Its stores, its processor, this device's own feeds, and how writes become durable.

    operation -> (batch) -> message -> applied to the state -> ... flush ... -> durable -> others may read it

    flush        seals open edits, signs one head per own feed, one commit
    checkpoint   brings the ItemStore up to the state; taken every CHECKPOINT_MESSAGES messages and at close
    snapshot     flush, checkpoint, then the nodes of the snapshot tree above what changed

A full disk (`failure` is a `DiskFull`):
    what was written and is not stored stays shown and is stored once there is space: `unstored` counts it
    new writes are refused before they change anything; each one looks first whether there is space again
    reading goes on; blocks of others are asked for again later; a checkpoint is taken later
    `recover` ends it. The peer's background thread calls it every second, and so do writers
Any other failure of the store stands until the party is opened again.

Everything here runs under the peer's lock.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from echostore.kernel.errors import NOTHING_CHANGED, Closed, DiskFull, EchoError, Refused, TooLarge
from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, ItemId, PartyKey, Stamp, created_item_id
from echostore.kernel.items.operations import ItemOperation, WriterRole
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.limits import OPERATIONS_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.order import CONTROL, DATA, FeedCursor
from echostore.kernel.party.credentials import Role
from echostore.kernel.reasons import Reason
from echostore.peer.anchors import Anchor
from echostore.peer.base_following import BaseFollower
from echostore.peer.base_install import BASE_MARK
from echostore.peer.checkpoints import RULES, RULES_MARK, cursor_rows, decode_values, index_key, move_rows, state_rows
from echostore.peer.control_standing import keep_control
from echostore.peer.model_registry import COMMUTING_MARK, commuting_mark
from echostore.peer.pen import EDITS_MAX, OPEN_BYTES_MAX, Pen
from echostore.peer.processor import PartyProcessor
from echostore.peer.progress import Summed
from echostore.peer.reissue import Reissues
from echostore.peer.source import PartySource
from echostore.peer.status import WRITING_ROLES, standing_of, writing_refused
from echostore.peer.undo_images import PROPERTY_FIELDS, UndoImages, layers_of
from echostore.peer.writer import OwnFeed
from echostore.store.blob_store import BlobStore
from echostore.store.feed_store import Append, FeedStore
from echostore.store.item_store import Checkpoint, ItemStore
from echostore.wire.generated import credential_pb2
from echostore.wire.items import MoveChunks
from echostore.wire.messages import decode_envelope, encode_operation
from echostore.wire.signing import SigningKey

_log = logging.getLogger("echostore")

CHECKPOINT_MESSAGES = 8192
"""Messages between checkpoints: what a start after a kill folds again, at most."""

CHECKPOINT_ITEMS = 4096
CHECKPOINT_TOUCHES = 32_768
"""Changed items and writes of items between checkpoints. One message may have thousands, and a checkpoint keeps everybody
else waiting: so that it is a matter of half a second at most (70 us an item, 6 us a write)."""

RECORDS_MAX = 50_000
"""Clean records kept in memory after a checkpoint; the rest is read again when touched."""

Clock = Callable[[], int]


class PartyRuntime:
    """The live side of a party. `writable` is False for readers beside another process and for the past."""

    def __init__(
        self,
        processor: PartyProcessor,
        *,
        feeds: FeedStore,
        items: ItemStore | None,
        blobs: BlobStore | None,
        now_ms: Clock,
        writable: bool,
    ) -> None:
        self.party: PartyKey = processor.party
        self.processor = processor
        self.feeds = feeds
        self.items = items
        self.blobs = blobs
        self.now_ms = now_ms
        self.writable = writable
        self.closed = False
        self.failure: EchoError | None = None
        self.data: OwnFeed | None = None
        self.control: OwnFeed | None = None
        self.declared: set[str] = set()
        self.blocks_stored = 0
        """Blocks of others that became durable here since the party was opened."""
        self.summed: Summed | None = None
        """How far the party had come when somebody last asked (`progress`)."""
        self.data_held = False
        """While the party waits for its epoch: data feeds are not asked for."""
        self.source = PartySource(processor.state, items, block_time=self.block_time)
        self.source.touched(processor.state.dirty)  # the tail was folded before anybody listened
        self.open_edits: dict[ItemId, ItemRecord] = {}
        self.edit_count = 0
        self.edit_bytes = 0
        self._pens: dict[ItemId, Pen] = {}
        self.undo_images = UndoImages()
        self.move_chunks = MoveChunks()
        self.schema_count = 0
        self.on_retired: Callable[[], None] = lambda: None
        """Called before a write where this device's own feed was retired: it goes on with a new one."""
        self.on_write: Callable[[], None] = lambda: None
        """Told after every write, so that a flush is due."""
        self.device: DeviceKey | None = None
        """Whose feeds the own ones are."""
        self.on_durable: list[Callable[[FeedKey, int], None]] = []
        self.on_written: list[Callable[[Append], None]] = []
        """Told of own blocks first, with the blocks: somebody may wait for them."""
        self.on_space: list[Callable[[], None]] = []
        """Told when a full disk has space again."""
        self.append_notes: dict[str, bytes] = {}
        """What the next append of own blocks keeps beside them, in the same durable commit."""
        self._batch: _Batch | None = None
        self._spent: tuple[FeedId, int] | None = None
        """The feed and seq of a rolled-back batch that gave out ids. The next write puts an empty message there first, so that
        no handle of this process leads to an item that somebody else made. Nothing is written before that."""
        self._applied_saved = 0
        processor.before_refold = self.flush_if_space
        processor.open_payload = self._open_payload
        self.reissues = Reissues(self)
        processor.listeners.append(lambda changed, delivered: self.source.touched(changed))
        self.follower = BaseFollower(self)

    @property
    def state(self) -> Any:
        return self.processor.state

    # own feeds

    def adopt(self, kind: str, key: SigningKey) -> OwnFeed:
        """Write to this own feed from now on. It must be in the store; following it starts here if it is new."""
        processor = self.processor
        feed_key = FeedKey(key.public)
        cursor = processor.orderer.cursors.get(feed_key[:8])  # type: ignore[call-overload]  # a FeedId
        if cursor is None:
            waits = kind == DATA and processor.closed  # for the base: nothing of it is processed before
            cursor = FeedCursor(feed_key, kind, held=0 if waits else self.feeds.length(feed_key))
            processor.orderer.add(cursor)
        own = OwnFeed(processor, cursor, key)
        if kind == CONTROL:
            self.control = own
        else:
            self.data = own
            processor.advanced.update(
                feed for feed, other in processor.orderer.cursors.items() if other is not cursor and other.length
            )
        return own

    def writer(self) -> WriterRole:
        """As whom this device writes data now; Refused when it may not."""
        if self.data is None:
            raise Refused("this device has no feed in the party", next_step="Join the party with this device first.")
        feed = self.data.feed
        if self.data.cursor.waits_for is not None:
            raise Refused(
                "what this device wrote itself rests on messages that are not here",
                next_step="Connect to a member that has them; then go on.",
            )
        record = self.processor.admission.by_id.get(feed)
        role = record.role_at(self.data.cursor.length) if record else None
        if record is None or role is None or role is Role.READER:
            reason = self.processor.admission.why_excluded(feed, self.data.cursor.length) or Reason.UNADMITTED
            raise writing_refused(self, reason)
        return WriterRole(record.identity, role.label)

    def going_on(self) -> WriterRole:
        """As `writer`, before anything is made of the feed's name: on a new feed, where this device's own was retired."""
        if self.data is not None and not self.in_batch and not self.open_edits:
            record = self.processor.admission.by_id.get(self.data.feed)
            if record is not None and record.end_reason is Reason.RETIRED:
                self.on_retired()
        writer = self.writer()
        if self._spent is not None and not self.in_batch:
            self._seal_spent(writer)
        return writer

    def _seal_spent(self, writer: WriterRole) -> None:
        """Use up the number of a batch that was rolled back by a message without operations."""
        assert self.data is not None
        if self._spent == (self.data.feed, self.data.cursor.length):
            self._write([], writer, undoes=None)
        self._spent = None

    @property
    def may_write(self) -> bool:
        return not self.closed and self.writable and self.failure is None

    @property
    def disk_full(self) -> bool:
        return isinstance(self.failure, DiskFull)

    @property
    def unstored(self) -> int:
        """Changes of this device that are in memory only."""
        blocks = sum(own.open_blocks for own in (self.control, self.data) if own is not None)
        return blocks + (1 if self.open_edits else 0)

    @property
    def takes_writes(self) -> bool:
        """Whether a write of data would be taken now: the store is sound, and the party lets this device write."""
        if not self.may_write or self.processor.closed:
            return False
        try:
            self.writer()
        except Refused:
            record = self.processor.admission.by_id.get(self.data.feed) if self.data is not None else None
            retired = record is not None and record.end_reason is Reason.RETIRED
            return retired and standing_of(self) in WRITING_ROLES  # `going_on` opens a new feed
        return True

    def check_writable(self) -> None:
        """Before a change. Where the disk was full, what waits is stored first; while it is full, the change is refused."""
        self.check_sound()
        if self.disk_full:
            try:
                self.recover()
            except DiskFull as error:
                kept = f"This change was not made. {error.unchanged}"
                raise DiskFull(error.what, unchanged=kept, next_step=error.next_step) from error

    def check_sound(self) -> None:
        """Before a flush: the party is open for writing, and its store has not failed but for a lack of space."""
        if self.closed:
            raise Closed("the party has been closed", next_step="Open the peer again.")
        if not self.writable:
            raise Refused("the party is open read-only")
        failure = self.failure
        if failure is not None and not self.disk_full:
            if isinstance(failure, Refused):  # of edits that were sealed in the background: told once, and they are out
                self.failure = None
            raise failure

    # writing data

    def before_naming(self) -> None:
        """Before something gets its name by where it is going to stand: edits in place so far come before it."""
        if self.open_edits:
            (self.collect_edits if self.in_batch else self.seal_edits)()
        self.going_on()

    def next_item(self) -> ItemId:
        """The id that a genesis written now will have."""
        assert self.data is not None
        if self._batch is not None:
            self._batch.named = True
        return created_item_id(self.data.feed, self.data.cursor.length, self.next_position)

    @property
    def next_position(self) -> int:
        """Where in its message the next operation will stand."""
        return len(self._batch.operations) if self._batch else 0

    def operate(self, operations: list[ItemOperation], *, undoes: int | None = None) -> None:
        """Write operations: into the open batch, or as one message."""
        self.check_writable()
        if self._batch is None:
            if self.open_edits:
                self.seal_edits()
            self._write(operations, self.going_on(), undoes=undoes)
            self.processor.finish()
        else:
            if self.open_edits:
                self.collect_edits()  # in the order in which they were made: a rule set later must not rule over them
            self._batch.add(operations)

    @contextmanager
    def batch(self, *, undoes: int | None = None) -> Iterator[None]:
        """All writes inside become one message. When the block raises, none of them happened."""
        self.check_writable()
        if self._batch is not None:  # a batch inside a batch is part of it
            yield
            return
        if self.open_edits:
            self.seal_edits()
        batch = self._batch = _Batch(self, self.going_on())
        try:
            yield
            self.collect_edits()
            if batch.operations:
                self._batch = None
                self._write(batch.operations, self.writer(), undoes=undoes, applied_ms=batch.time_ms)
                if batch.overtaken:
                    self.processor.refold(batch.touched)
        except BaseException:
            self._batch = None
            self.undo_images.drop()
            self.open_edits.clear()
            self._close_pens()
            if batch.touched:
                self.processor.refold(batch.touched)
            if batch.named:
                self._spent = batch.place
            self.processor.finish()
            raise
        self._batch = None
        self.processor.finish()

    @property
    def in_batch(self) -> bool:
        return self._batch is not None

    def _write(
        self, operations: list[ItemOperation], writer: WriterRole, *, undoes: int | None, applied_ms: int | None = None
    ) -> None:
        """Seal operations as the next message; `applied_ms` is the time under which a batch has applied its own."""
        own = self.data
        assert own is not None
        if len(operations) > OPERATIONS_MAX:
            what = f"a batch of {len(operations)} operations; at most {OPERATIONS_MAX} fit one message"
            raise TooLarge(what, unchanged=NOTHING_CHANGED)
        feed, seq = own.feed, own.cursor.length
        encoded = [encode_operation(feed, operation) for operation in operations]
        time_ms = self.now_ms() if applied_ms is None else applied_ms
        envelope, link = own.seal(time_ms=time_ms, operations=encoded, undoes=undoes)
        if applied_ms is not None:
            self.state.stamp_edits(envelope.depth, feed, seq, time_ms, operations)
            self.processor.count_message(feed, seq, link, envelope, writer, operations)
        else:
            for operation in operations:
                self._note_image(operation)
            self.processor.apply_message(feed, seq, link, envelope, writer, operations=operations, own=True)
        self.undo_images.keep(seq)
        if own.full:
            self.flush_if_space()  # the message is in the state: who wrote it is not told that it was refused
        self.on_write()
        self.checkpoint_if_due()

    def apply_now(self, operation: ItemOperation, position: int, writer: WriterRole, depth: int, time_ms: int) -> None:
        """Show one operation of an open batch to its writer."""
        assert self.data is not None
        self._note_image(operation)
        stamp = Stamp(depth, self.data.feed, self.data.cursor.length, position)
        self.source.touched(self.state.apply_own(operation, stamp, time_ms, writer))

    def _note_image(self, operation: ItemOperation) -> None:
        """Before an own operation on a property set is applied: what it will change is what an undo puts back."""
        item, field, body = operation
        if field in PROPERTY_FIELDS:
            assert self.data is not None
            record = self.state.record(item)
            layers = {} if record is None else layers_of(record, field)
            if layers is not None:
                self.undo_images.note((item, field), layers.get(self.data.feed, {}), body)

    # open edits of texts and lists

    def edit(self, record: ItemRecord) -> None:
        """An item is about to be edited in place: its edits become an operation when they are sealed."""
        self.check_writable()
        writer = self.going_on()
        rule = record.rule_at(Stamp(1 << 62, self.data.feed, 0, 0)) if self.data else None
        if rule is not None and writer.role != "owner" and not rule.allows(writer.role, writer.identity):
            raise Refused("the item's access metadata does not let this member write it")
        assert self.data is not None
        record.model.begin(self.data.feed, self.reissues.generation(record))
        self.open_edits[record.item] = record
        self.state.dirty.add(record.item)
        self.state.changed.add(record.item)
        self.source.touched((record.item,))
        if self._batch is not None:
            self._batch.edited.add(record.item)
        self.on_write()

    def pen(self, record: ItemRecord) -> Pen:
        """The pen for a text: edits with it are open until the next seal."""
        if record.item not in self.open_edits:
            self.edit(record)
        pen = self._pens.get(record.item)
        if pen is None:
            insert, delete = record.model.raw_edits()
            pen = self._pens[record.item] = Pen(insert, delete, EDITS_MAX)
        return pen

    def holds(self, pen: Pen) -> bool:
        """Whether edits with this pen are still open."""
        return any(known is pen for known in self._pens.values())

    def _close_pens(self) -> None:
        for pen in self._pens.values():
            pen.left = 0
        self._pens.clear()

    def seal_edits(self) -> None:
        """Turn open edits into one message of their own."""
        operations = self._take_edits()
        try:
            if operations:
                self._seal_together(operations)
        finally:
            self.processor.finish()

    def _seal_together(self, operations: list[ItemOperation]) -> None:
        try:
            self._write(operations, self.writer(), undoes=None)
        except Refused as error:
            if isinstance(error, TooLarge) and len(operations) > 1:  # several texts, each within the limit
                half = len(operations) // 2
                try:
                    self._seal_together(operations[:half])
                finally:
                    self._seal_together(operations[half:])
                return
            # They are in the state and will never be in a message: take them out again.
            self.processor.refold({operation.item for operation in operations})
            raise

    def make_room(self, size: int) -> None:
        """Before an edit in place of so many bytes: what is open is sealed when both might not fit one block."""
        if self._batch is None:
            if self.edit_bytes and self.edit_bytes + size > OPEN_BYTES_MAX:
                self.seal_edits()
            self.edit_bytes += size

    @property
    def seal_due(self) -> bool:
        """Whether enough edits in place are open for a message of their own."""
        return self.edit_count >= EDITS_MAX or self.edit_bytes >= OPEN_BYTES_MAX

    def collect_edits(self) -> None:
        """Turn open edits into operations of the open batch."""
        assert self._batch is not None
        self._batch.operations.extend(self._take_edits())

    def _take_edits(self) -> list[ItemOperation]:
        self._close_pens()
        open_edits, self.open_edits = self.open_edits, {}
        self.edit_count = self.edit_bytes = 0
        operations = []
        for item, record in open_edits.items():
            sealed = record.model.seal()
            if sealed is not None:
                operations.append(ItemOperation(item, record.genesis.model, sealed))
        return operations

    # control

    def issue(self, credentials: list[credential_pb2.Credential]) -> None:
        """Write credentials to the own control feed, durable on return, and process them."""
        self.check_writable()
        if self.control is None:
            raise Refused("this device has no control feed in the party")
        self.flush()
        control, before, known = self.control, self.control.unsealed(), self.control.feed in self.processor.advanced
        control.seal(time_ms=self.now_ms(), credentials=credentials)
        try:
            self._append([control])
        except EchoError as error:
            control.take_back(before)
            if not known:
                self.processor.advanced.discard(control.feed)
            if isinstance(error, DiskFull):
                raise self._full(error) from error  # it counted what was just taken back
            raise
        self.processor.take_own_control(control.cursor)
        self.follower.review()

    # durability

    def flush(self) -> None:
        """Everything written so far is durable on return."""
        if self.open_edits and self._batch is None:
            self.seal_edits()
        self.flush_blocks()

    def flush_quietly(self) -> None:
        """Flush from the background: a failure is kept in `failure` and raised to the next writer."""
        try:
            if self.disk_full:
                self.recover()
            self.flush()
        except EchoError as error:
            self.failure = self.failure or error

    def flush_blocks(self) -> None:
        self._append([own for own in (self.control, self.data) if own is not None and own.open_blocks])

    def flush_if_space(self) -> bool:
        """Flush blocks in the midst of something that must not end here; False when the disk is full."""
        try:
            self.flush_blocks()
        except DiskFull:
            return False
        return True

    def _append(self, feeds: list[OwnFeed]) -> None:
        appends = [append for append in (own.take_append() for own in feeds) if append is not None]
        if not appends:
            return
        if self.failure is not None and not self.disk_full:
            raise self.failure
        try:
            self.feeds.append_many(appends, self.append_notes)
        except DiskFull as error:
            raise self.note_full(error) from error
        except EchoError as error:
            # The state is ahead of the disk now. Nothing more is taken until the party is opened again.
            self.failure = error
            raise
        self.append_notes = {}
        for own in feeds:
            own.appended()
        for append in appends:
            for handed in self.on_written:
                handed(append)
        for append in appends:
            for told in self.on_durable:
                told(append.feed, append.head.length)

    # a full disk

    def note_full(self, error: DiskFull) -> DiskFull:
        """There was no space for something of this party. Returns what to tell of it."""
        if not self.disk_full:
            _log.error("no space left", extra={"party": self.party.hex(), "why": error.what, "unstored": self.unstored})
        if self.failure is None or self.disk_full:
            self.failure = self._full(error)
        self.on_write()  # the background tries again
        return self._full(error)

    def _full(self, error: DiskFull) -> DiskFull:
        waiting = self.unstored
        kept = "What was stored before is kept and can be read."
        step = "Free space: writing goes on by itself then."
        if waiting:
            changes = "1 change is" if waiting == 1 else f"{waiting} changes are"
            kept = f"{changes} in memory only, shown and not stored."
            step = "Free space while the home stays open: what waits is stored by itself then, and lost otherwise."
        return DiskFull(error.what, unchanged=kept, next_step=step)

    def recover(self) -> None:
        """Where the disk was full: store what waits. Raises DiskFull while there is no space."""
        if not self.disk_full:
            return
        try:
            self.flush_blocks()
            self.feeds.prove_space()
            if self._checkpoint_due:
                self.checkpoint()
        except DiskFull as error:
            raise self.note_full(error) from error
        except EchoError as error:
            self.failure = error
            raise
        self.failure = None
        _log.warning("there is space again", extra={"party": self.party.hex()})
        for told in list(self.on_space):
            told()

    def look_for_space(self) -> None:
        """Before the status is told: whether the disk is still full."""
        if self.disk_full and not self.closed:
            with suppress(EchoError):
                self.recover()

    def _open_payload(self, key: FeedKey, seq: int) -> bytes | None:
        for own in (self.control, self.data):
            if own is not None and own.cursor.key == key:
                return own.open_payload(seq)
        return None

    # checkpoints

    def checkpoint_if_due(self) -> None:
        """Where there is no space for it, writes are refused until there is: what is not in it takes memory."""
        if self._checkpoint_due:
            try:
                self.checkpoint()
            except DiskFull as error:
                self.note_full(error)

    @property
    def _checkpoint_due(self) -> bool:
        due = (
            self.processor.counters.applied - self._applied_saved >= CHECKPOINT_MESSAGES
            or len(self.state.dirty) >= CHECKPOINT_ITEMS
            or len(self.processor.touches) >= CHECKPOINT_TOUCHES
        )
        return due and self.items is not None and not self.items.damaged and self.processor.damage is None

    def checkpoint(self) -> None:
        """Bring the ItemStore up to the state. The FeedStore comes first: items never run ahead of their blocks."""
        if self.items is None or not self.writable or self._batch is not None:
            return
        self.flush()
        if self.items.damaged:
            raise self.items.damage("it takes no checkpoints any more")
        if self.processor.damage is not None:
            raise self.processor.damage.error()
        processor, state = self.processor, self.state
        state.settle()
        processor.finish()
        checkpoint = Checkpoint(
            cursors=cursor_rows(cursor for cursor in processor.orderer.cursors.values() if cursor.kind == DATA),
            items=[],
            states=[],
            gone=[],
            references={},
            properties={},
            touches=processor.touches,
            moves=move_rows(state.moves_new.values()),
            rejects=processor.new_rejects,
            about={
                "admission": processor.admission.digest,
                COMMUTING_MARK: commuting_mark(processor.factory),
                RULES_MARK: RULES,
                BASE_MARK: processor.base.name.genesis if processor.base is not None else b"",
            },
            moves_gone=sorted(state.moves_gone),
            rejects_gone=processor.gone_rejects,
        )
        state_rows(state, frozenset(self.declared), checkpoint)
        self.items.save(checkpoint)
        processor.touches, processor.new_rejects, processor.gone_rejects = [], [], set()
        state.dirty.clear()
        state.gone.clear()
        state.moves_new.clear()
        state.moves_gone.clear()
        self.source.checkpointed()
        self._applied_saved = processor.counters.applied
        with suppress(DiskFull):  # it only spares work at the next opening
            keep_control(processor)
        if len(state.records) > RECORDS_MAX:
            state.records.clear()

    # all items

    def all_items(self) -> list[ItemId]:
        """Every item of the state, in the order of their ids."""
        stored = self.items.scan("1", ()) if self.items is not None else []
        state = self.state
        return sorted({item for item in stored if item not in state.gone} | set(state.records))

    def block_time(self, feed: FeedId, seq: int) -> int | None:
        """What the clock of a block's writer showed; None when the block is not here any more."""
        cursor = self.processor.orderer.cursors.get(feed)
        if cursor is None or not self.feeds.has_feed(cursor.key):
            return None
        held = self.feeds.feed(cursor.key)
        if not held.base <= seq < held.length:
            return None
        envelope = decode_envelope(self.feeds.block(cursor.key, seq).payload, cursor.kind)
        return None if isinstance(envelope, Reason) else int(envelope.body.time_ms)

    def models_in_use(self) -> set[tuple[str, int]]:
        records = self.state.records
        if self.items is None:
            return {(record.genesis.model, record.genesis.version) for record in records.values()}
        unsaved = (records[item].genesis for item in self.state.dirty if item in records)
        return {(genesis.model, genesis.version) for genesis in unsaved} | set(self.items.models_in_use())

    def views(self) -> list[ItemId]:
        """Items that an inception key names."""
        stored = self.items.scan("inception IS NOT NULL", ()) if self.items is not None else []
        state = self.state
        live = {item for item, record in state.records.items() if record.genesis.inception_key}
        return sorted({item for item in stored if item not in state.gone} | live)

    def declare(self, names: tuple[str, ...]) -> None:
        """Index properties that queries filter on."""
        fresh = [name for name in names if name not in self.declared]
        if not fresh or self.items is None or self.processor.damage is not None:
            return
        self.checkpoint()
        self.declared.update(fresh)
        self.source.declared = frozenset(self.declared)
        for name in fresh:
            rows = []
            for row in self.items.scan_rows("vals IS NOT NULL", ()):
                assert row.vals is not None
                values = decode_values(row.vals)
                key = index_key(values[name]) if name in values else None
                if key is not None:
                    rows.append((key, ItemId(row.item)))
            self.items.declare_property(name, rows)

    # positions

    def anchor(self) -> Anchor:
        processor = self.processor
        return Anchor(self.party, 0, processor.timeframe, processor.control_timeframe)

    def close(self) -> None:
        """Flush, checkpoint, release the files. A second call does nothing."""
        if self.closed:
            return
        try:
            if self.writable and (self.failure is None or self.disk_full):
                self._close_stores()
        finally:
            self.abandon()

    def _close_stores(self) -> None:
        try:
            self.flush()
        except DiskFull as error:
            one = self.unstored == 1
            lost = "1 change was not stored and is" if one else f"{self.unstored} changes were not stored and are"
            step = f"Free space and make {'it' if one else 'them'} again."
            raise DiskFull(error.what, unchanged=f"{lost} lost.", next_step=step) from error
        try:
            # A damaged one is made anew at the next opening, and so is one on a base of which blobs are lost.
            if (self.items is None or not self.items.damaged) and self.processor.damage is None:
                self.checkpoint()
            keep_control(self.processor, closing=True)
        except DiskFull as error:
            # All blocks are stored: the next opening folds what the checkpoint lacks.
            _log.warning("no space for a checkpoint", extra={"party": self.party.hex(), "why": error.what})

    def abandon(self) -> None:
        """Release the files as they are."""
        self.closed = True
        parent = self.processor.parent
        if parent is not None and self.processor in parent.children:
            parent.children.remove(self.processor)
        for store in (self.items, self.blobs, self.feeds):
            if store is not None:
                store.close()


class _Batch:
    """The operations of an open batch, applied as they come so that the writer reads what it wrote."""

    def __init__(self, runtime: PartyRuntime, writer: WriterRole) -> None:
        assert runtime.data is not None
        self._runtime = runtime
        self._depth = runtime.data.next_depth
        self.place = (runtime.data.feed, runtime.data.cursor.length)
        """The message that it is going to be."""
        self.named = False
        """Whether something got its name from that place: an item's id, a post's."""
        self.time_ms = runtime.now_ms()
        """One time for all: some models keep it, so what is shown now must be what the message will say."""
        self.writer = writer
        self.operations: list[ItemOperation] = []
        self.edited: set[ItemId] = set()
        self._seen = self._counted()

    @property
    def touched(self) -> set[ItemId]:
        return {operation.item for operation in self.operations} | self.edited

    @property
    def overtaken(self) -> bool:
        """Whether blocks came in or items were folded again meanwhile: what was shown has other stamps by now."""
        return self._counted() != self._seen

    def _counted(self) -> tuple[int, int, int]:
        counters = self._runtime.processor.counters
        return counters.delivered, counters.refolded_items, counters.control

    def add(self, operations: list[ItemOperation]) -> None:
        for operation in operations:
            try:
                self._runtime.apply_now(operation, len(self.operations), self.writer, self._depth, self.time_ms)
            except OperationRefused as refusal:
                raise Refused(f"the operation is refused: {refusal}") from refusal
            self.operations.append(operation)
