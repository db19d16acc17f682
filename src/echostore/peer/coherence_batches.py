"""A batch of a leaf becomes one message of the peer's data feed, together with the fact that it did.

    operations -> checked one by one -> one message -> with the account row in the same commit -> durable

An operation that may not be, or that its item refuses, is left out and told with its reason; the others stand. The
account row travels as a note of the append that holds the message (`PartyRuntime.append_notes`), so a crash leaves both
or neither. Everything here runs under the peer's lock.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from echostore.kernel.coherence.arcs import ARC_IDS_BITS, ArcLedger
from echostore.kernel.coherence.events import Commit
from echostore.kernel.coherence.messages import IssuedId, PublishOp, RejectOp, RejectReason
from echostore.kernel.coherence.quotas import (
    ARC_OPS_BURST,
    ARC_OPS_PER_S,
    OBJECT_OPS_BURST,
    OBJECT_OPS_PER_S,
    Quotas,
)
from echostore.kernel.errors import NotFound, Refused, SchemaViolation, TooLarge, UsageError
from echostore.kernel.ids import ARC_BIT, ITEM_ID_BYTES, SYSTEM_TYPE, FeedId, ItemId, item_local
from echostore.kernel.items.operations import METADATA, PLACEMENT, REFUSED, ItemOperation
from echostore.kernel.items.record import DELETED_AT_KEY, DELETED_KEY, NAME_KEY, Genesis, ItemRecord
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.property_set import Change, Increment, PropertySet, Remove, Restore, Set
from echostore.kernel.models.threaded_log import Post
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Value
from echostore.peer.coherence_ledger import CoherenceLedger, PlacedOp
from echostore.peer.item_kinds import ArrayItem, PropertySetItem, TextItem
from echostore.wire.capabilities import Grants
from echostore.wire.generated import message_pb2
from echostore.wire.index_spec import MalformedIndex
from echostore.wire.leaf_operations import ListEdit, TextEdit, read_delta
from echostore.wire.messages import decode_operation
from echostore.wire.values import value_bytes

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Operations of one batch together: they make one block, with what stands around them."""

METADATA_KEYS = frozenset({DELETED_KEY, DELETED_AT_KEY, NAME_KEY})
"""What a leaf may say in an item's metadata. Who may write an item is for members to say."""

Rejected = tuple[IssuedId, RejectReason | Reason]


class _Rejection(Exception):
    """This operation is left out, and why."""

    def __init__(self, reason: RejectReason | Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class BatchWriter:
    """Writes batches of leaves to one party."""

    def __init__(self, party: "Party", ledger: CoherenceLedger) -> None:
        self._party = party
        self._ledger = ledger
        self.doubtful = False
        """Whether the party rejected something that was written since somebody last looked."""

    def write(
        self,
        commit: Commit,
        *,
        rights: Grants | None,
        arcs: ArcLedger,
        told: Iterable[tuple[int, RejectOp]],
        tick: int,
    ) -> tuple[Rejected, ...]:
        """Put a batch into the feed as one message; durable with the next flush, which is the caller's.

        `told` are the arc's earlier rejections, `tick` is the one that will hold the batch.
        """
        runtime = self._party.runtime
        rejected: list[Rejected] = list(commit.rejected)
        earlier = list(told)
        placed: tuple[str, bytes] | None = None
        noted = len(runtime.processor.new_rejects)

        def row() -> tuple[str, bytes]:
            fresh = [(tick, RejectOp(op, reason)) for op, reason in rejected]
            return self._ledger.account_row(commit.clock, commit.batch, [*earlier, *fresh])

        if sum(len(op.delta) for op in commit.ops) > BATCH_BYTES_MAX:
            return self._refuse_all(commit, RejectReason.TOO_LARGE, row, rejected)
        try:
            with runtime.batch():
                writing = _Writing(self._party, runtime, rights, arcs, commit)
                for place, op in enumerate(commit.ops):
                    try:
                        writing.apply(op, commit.ops[place + 1 :])
                    except _Rejection as rejection:
                        rejected.append((op.op, rejection.reason))
                if writing.placed:
                    placed = self._ledger.ops_row(writing.seq, commit.clock, writing.placed)
                    runtime.append_notes.update([placed])
                runtime.append_notes.update([row()])
        except TooLarge:
            self._take_back(placed)
            return self._refuse_all(commit, RejectReason.TOO_LARGE, row, rejected)
        except Refused:  # this device may not write to the party any more
            self._take_back(placed)
            return self._refuse_all(commit, RejectReason.EXCLUDED, row, rejected)
        self.doubtful = self.doubtful or len(runtime.processor.new_rejects) != noted
        return tuple(rejected)

    def _take_back(self, placed: tuple[str, bytes] | None) -> None:
        """The block that a row speaks of was not written; its number is another one's."""
        if placed is not None:
            self._party.runtime.append_notes.pop(placed[0], None)

    def _refuse_all(
        self, commit: Commit, reason: RejectReason, row: Callable[[], tuple[str, bytes]], rejected: list[Rejected]
    ) -> tuple[Rejected, ...]:
        known = {op for op, _ in rejected}
        rejected += [(op.op, reason) for op in commit.ops if op.op not in known]
        self._party.runtime.append_notes.update([row()])
        return tuple(rejected)

    def settle(self) -> None:
        """Make all that was written durable, with its accounts."""
        runtime = self._party.runtime
        runtime.flush()
        if runtime.append_notes:  # batches that left nothing in the feed
            runtime.feeds.set_about(runtime.append_notes)
            runtime.append_notes = {}


class _Writing:
    """One batch while it is written."""

    def __init__(
        self, party: "Party", runtime: "PartyRuntime", rights: Grants | None, arcs: ArcLedger, commit: Commit
    ) -> None:
        assert runtime.data is not None, "a batch is open, so there is a feed"
        self._party = party
        self._runtime = runtime
        self._rights = rights
        self._arcs = arcs
        self._commit = commit
        self._feed: FeedId = runtime.data.feed
        self.seq: int = runtime.data.cursor.length
        self.placed: list[PlacedOp] = []
        """Where in the message each operation stands."""

    def apply(self, op: PublishOp, later: Sequence[PublishOp]) -> None:
        """Into the open batch; _Rejection says why not."""
        start = self._runtime.next_position
        inserts = self._apply(op, later)
        self._collect()  # each edit is an operation of its own, so that each can be told as excluded
        if self._runtime.next_position > start:
            self.placed.append(PlacedOp(op.op.n, start, self._runtime.next_position, inserts))

    def _apply(self, op: PublishOp, later: Sequence[PublishOp]) -> bool:
        """Whether something was put into a text or a list."""
        if len(op.object) != ITEM_ID_BYTES:
            raise _Rejection(RejectReason.MALFORMED)
        item = ItemId(op.object)
        try:
            asked = read_delta(op.delta)
            if isinstance(asked, (TextEdit, ListEdit)):
                self._edit(item, asked)
                return bool(asked.inserted)
            if asked.WhichOneof("kind") == "genesis":
                self._create(item, asked, later)
            else:
                self._change(item, asked)
            return False
        except MalformedIndex:
            raise _Rejection(RejectReason.MALFORMED) from None
        except OperationRefused as refusal:
            raise _Rejection(refusal.reason) from None
        except TooLarge:
            raise _Rejection(RejectReason.TOO_LARGE) from None
        except NotFound:
            raise _Rejection(RejectReason.NO_ITEM) from None
        except SchemaViolation:
            raise _Rejection(RejectReason.NOT_ALLOWED) from None
        except (Refused, UsageError) as error:
            cause = error.__cause__
            raise _Rejection(
                cause.reason if isinstance(cause, OperationRefused) else RejectReason.NOT_ALLOWED
            ) from None

    # making

    def _create(self, item: ItemId, asked: message_pb2.Operation, later: Sequence[PublishOp]) -> None:
        if not self._is_of_arc(item):
            raise _Rejection(RejectReason.OUTSIDE_ARC)
        made = self._decoded(asked)
        if made.field == REFUSED:
            raise _Rejection(made.body[0])
        genesis = made.body
        assert isinstance(genesis, Genesis), genesis
        if made.item != item:
            raise _Rejection(RejectReason.MALFORMED)
        if genesis.type == SYSTEM_TYPE or genesis.forked_from is not None:
            raise _Rejection(RejectReason.NOT_ALLOWED)
        self._must_write(genesis.type)
        if self._party.peer.models.latest(genesis.model) is None:
            raise _Rejection(Reason.WRONG_MODEL)
        if self._party.has_schemas and genesis.model == PropertySet.name:
            self._party.schemas.check_new(genesis.type, self._first_values(item, later))
        self._collect()
        self._runtime.operate([made])

    def _is_of_arc(self, item: ItemId) -> bool:
        """Whether this id was granted to the system that writes, and may still be used."""
        local = item_local(item)
        if item[: len(self._feed)] != self._feed or not local & ARC_BIT or not local & ((1 << ARC_IDS_BITS) - 1):
            return False
        base = (local ^ ARC_BIT) >> ARC_IDS_BITS << ARC_IDS_BITS
        arcs = self._arcs.of_system(self._commit.clock.system)
        return any(known.base == base and (known.release is None or arc == self._commit.clock) for arc, known in arcs)

    def _first_values(self, item: ItemId, later: Sequence[PublishOp]) -> dict[str, Value]:
        """What the batch sets on an item that it makes: a schema wants to see it whole."""
        values: dict[str, Value] = {}
        for op in later:
            if op.object == item:
                asked = read_delta(op.delta)
                if isinstance(asked, message_pb2.Operation) and asked.WhichOneof("kind") == "property_set":
                    changes = self._decoded(asked).body
                    values.update((each.path[0], each.value) for each in changes if isinstance(each, Set))
        return values

    # changing

    def _change(self, item: ItemId, asked: message_pb2.Operation) -> None:
        record = self._written(item)
        made = self._decoded(asked)
        if made.item != item:
            raise _Rejection(RejectReason.MALFORMED)
        if made.field == PropertySet.name:
            self._set(item, record, made.body)
            return
        if made.field == METADATA:
            if any(not isinstance(each, Set) or each.path[0] not in METADATA_KEYS for each in made.body):
                raise _Rejection(RejectReason.NOT_ALLOWED)
        elif made.field != PLACEMENT and not isinstance(made.body, Post):
            raise _Rejection(RejectReason.NOT_ALLOWED)
        self._collect()
        self._runtime.operate([made])

    def _set(self, item: ItemId, record: ItemRecord, changes: tuple[Change | Restore, ...]) -> None:
        """A removal or an increment builds on what stands here: its leaf has not seen who wrote what."""
        if not isinstance(record.model, PropertySet):
            raise _Rejection(Reason.WRONG_MODEL)
        if any(isinstance(each, Restore) for each in changes):
            raise _Rejection(RejectReason.NOT_ALLOWED)
        seen = [self._as_seen(record.model, each) for each in changes if not isinstance(each, Restore)]
        PropertySetItem(self._party, item)._change(*seen)

    def _as_seen(self, model: PropertySet, change: Change) -> Change:
        if isinstance(change, Remove):
            return replace(change, observed=model.additions(change.path, change.key))
        if isinstance(change, Increment):
            return replace(change, base=model.standing_write(change.path))
        return change

    def _edit(self, item: ItemId, edit: TextEdit | ListEdit) -> None:
        self._written(item)
        handle = self._party.handle(item)
        if isinstance(edit, TextEdit):
            if not isinstance(handle, TextItem):
                raise _Rejection(Reason.WRONG_MODEL)
            place = text_place(str(handle), edit)
            if place is None:
                raise _Rejection(RejectReason.CONFLICT)
            handle.splice(place, len(edit.removed), edit.inserted)
            return
        if not isinstance(handle, ArrayItem):
            raise _Rejection(Reason.WRONG_MODEL)
        where = list_place(handle._model().value(), edit)
        if where is None:
            raise _Rejection(RejectReason.CONFLICT)
        for _ in edit.removed:
            del handle[where]
        for offset, element in enumerate(edit.inserted):
            handle.insert(where + offset, element)

    def _written(self, item: ItemId) -> ItemRecord:
        """The record of an item that the leaf may write."""
        record = self._runtime.state.record(item)
        if not isinstance(record, ItemRecord):
            raise _Rejection(RejectReason.NO_ITEM)
        self._must_write(record.genesis.type)
        return record

    def _must_write(self, type: str) -> None:
        if self._rights is None or not self._rights.may_write(type):
            raise _Rejection(RejectReason.NOT_ALLOWED)

    def _decoded(self, asked: message_pb2.Operation) -> ItemOperation:
        own = self._runtime.data
        assert own is not None
        return decode_operation(
            asked,
            party=self._party.key,
            feed=self._feed,
            seq=own.cursor.length,
            position=self._runtime.next_position,
            depth=own.next_depth,
        )

    def _collect(self) -> None:
        """Edits so far come before what follows them, and have their places in the message."""
        if self._runtime.open_edits:
            self._runtime.collect_edits()


def text_place(text: str, edit: TextEdit) -> int | None:
    """Where an edit belongs in a text that has changed since: the nearest place with the same surroundings.

    None when what it removes is nowhere. What only inserts always finds a place.
    """
    place = _nearest(text, edit.before + edit.removed, edit.position - len(edit.before))
    if place is not None:
        return place + len(edit.before)
    if edit.removed:
        return _nearest(text, edit.removed, edit.position)
    return min(edit.position, len(text))


def _nearest(text: str, wanted: str, position: int) -> int | None:
    position = max(0, min(position, len(text)))
    after = text.find(wanted, position)
    before = text.rfind(wanted, 0, position + len(wanted) - 1) if wanted else -1
    if after < 0 or (before >= 0 and position - before < after - position):
        return before if before >= 0 else None
    return after


def list_place(elements: Sequence[Value], edit: ListEdit) -> int | None:
    """The same for a list."""
    if not edit.removed:
        return min(edit.position, len(elements))
    here = [value_bytes(each) for each in elements]
    wanted = [value_bytes(each) for each in edit.removed]
    places = [place for place in range(len(here) - len(wanted) + 1) if here[place : place + len(wanted)] == wanted]
    return min(places, key=lambda place: (abs(place - edit.position), place), default=None)


def over_quota(quotas: Quotas, commit: Commit, now: float) -> float:
    """How long a batch has to wait; 0.0 when it was counted."""
    objects: dict[bytes, int] = {}
    for op in commit.ops:
        objects[b"object " + op.object] = objects.get(b"object " + op.object, 0) + 1
    wait_s = quotas.charge(objects, rate=OBJECT_OPS_PER_S, burst=OBJECT_OPS_BURST, now=now)
    if wait_s:
        return wait_s
    arc = b"arc " + repr(commit.clock).encode()
    return quotas.charge({arc: len(commit.ops)}, rate=ARC_OPS_PER_S, burst=ARC_OPS_BURST, now=now)
