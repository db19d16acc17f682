"""The state of a party: its items after the delivered messages. The ItemDemuxer of the seeds lives here.

    message -> operations -> (access check) -> the item's model, its metadata item, or the tree

The state is a function of the set of applied operations (section 6 of the design). Arrival order shows nowhere: models
see to it for themselves, the tree replays its moves, and access rules rule by canonical order. Where a rule arrives
after operations it rules over, or an edit after refused ones above it that lacked it, the item is listed in `refold`;
where an item arrives after operations that lacked it (their writers did not name it as a cause), it is listed in
`found`. The caller folds again what that concerns.

Records are loaded through a port on first touch, so that an inactive item costs no decode.
"""

from collections.abc import Callable, Iterable
from typing import Any

from echostore.kernel.ids import (
    ARC_BIT,
    POSITION_BITS,
    FeedId,
    IdentityKey,
    ItemId,
    PartyKey,
    Stamp,
    item_creator,
    item_local,
    item_text,
)
from echostore.kernel.items.operations import (
    CUSTOM,
    GENESIS,
    METADATA,
    PLACEMENT,
    REFUSED,
    ItemOperation,
    Reject,
    WriterRole,
)
from echostore.kernel.items.record import ACCESS_KEY, AccessRule, AccessWrite, Genesis, ItemRecord
from echostore.kernel.items.tree import Tree, TreeMove
from echostore.kernel.items.view_claims import SoleClaims, ViewClaims
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.ordered_fold import CommutingFold, OrderedFold
from echostore.kernel.models.property_set import DELETED, SET, EntryKey, PropertySet, Restore, Set
from echostore.kernel.reasons import Reason

EDITS_MAX = 4096
"""Operations on texts and lists that wait for one import, over all items."""

ADMIN_ROLES = frozenset({"owner", "admin"})

Load = Callable[[ItemId], ItemRecord | None]


class ItemMissing(OperationRefused):
    """An operation lacks an item that may still come; the detail of the reject names it."""

    def __init__(self, reason: Reason, item: ItemId) -> None:
        super().__init__(reason, item_text(item))
        self.item = item


class PartyState:
    """All items of one party, as far as they are in memory. `changed` and `rejects` collect since the last `take`."""

    def __init__(
        self,
        party: PartyKey,
        factory: ModelFactory,
        *,
        load: Load,
        identity_of: Callable[[FeedId], IdentityKey | None],
        base_length: Callable[[FeedId], int] = lambda feed: 0,
        moves: Iterable[TreeMove] = (),
        views: ViewClaims | None = None,
    ) -> None:
        self.party = party
        self._factory = factory
        self._load = load
        self._identity_of = identity_of
        self._base_length = base_length
        self._views: ViewClaims = views or SoleClaims()
        self.records: dict[ItemId, ItemRecord] = {}
        self.dirty: set[ItemId] = set()
        """Items whose record differs from the ItemStore's."""
        self.changed: set[ItemId] = set()
        """Items that live queries must look at: changed, or at an end of a changed edge."""
        self.gone: set[ItemId] = set()
        """Items that the ItemStore has and the state has not, since their genesis was excluded."""
        self.refold: set[ItemId] = set()
        self.wanted: set[ItemId] = set()
        """Items that an operation was refused for the lack of."""
        self.found: set[ItemId] = set()
        """Those of them that have come since: what lacked them is to be folded again."""
        self.rejects: list[Reject] = []
        self._moves: list[TreeMove] = []
        self._edits: dict[ItemId, list[tuple[Any, Stamp, int]]] = {}
        self._edit_count = 0
        self.moves_new: dict[Stamp, TreeMove] = {}
        """Moves that came since the ItemStore last saw them."""
        self.moves_gone: set[Stamp] = set()
        """Moves that went since then; one that came back is in both."""
        self.loads = 0
        """How many records were read and decoded: inactive items must cost none."""
        self.tree = Tree(self._first_parent, moves)

    # reading

    def record(self, item: ItemId) -> ItemRecord | None:
        record = self.records.get(item)
        if record is None and item not in self.gone:
            record = self._load(item)
            if record is not None:
                self.loads += 1
                self.records[item] = record
        return record

    def take_in(self, records: Iterable[ItemRecord]) -> None:
        """Records that somebody read many at a time, as `load` would have given them one by one."""
        for record in records:
            if record.item not in self.records and record.item not in self.gone:
                self.loads += 1
                self.records[record.item] = record

    def home(self, item: ItemId) -> ItemId | None:
        return self.tree.home(item)

    def _first_parent(self, item: ItemId) -> ItemId | None:
        record = self.record(item)
        return record.genesis.parent if record else None

    # folding

    def apply(
        self,
        *,
        depth: int,
        feed: FeedId,
        seq: int,
        time_ms: int,
        operations: Iterable[ItemOperation],
        writer: WriterRole,
        only: frozenset[ItemId] | None = None,
        creating: bool | None = None,
        own: bool = False,
    ) -> None:
        """Fold in one message. A refold names the items (`only`) and creates them before it goes on (`creating`);
        `own` says that models which edit in place have these operations already."""
        for position, operation in enumerate(operations):
            if only is not None and operation.item not in only:
                continue
            if creating is not None and creating != (operation.field == GENESIS):
                continue
            self.apply_operation(operation, Stamp(depth, feed, seq, position), time_ms, writer, own=own)

    def apply_operation(
        self, operation: ItemOperation, stamp: Stamp, time_ms: int, writer: WriterRole, *, own: bool = False
    ) -> None:
        """Fold in one operation at its place; one that is refused is listed in `rejects`."""
        try:
            self._apply_one(operation, stamp, time_ms, writer, own)
        except OperationRefused as refusal:
            self.rejects.append(Reject(stamp.feed, stamp.seq, stamp.position, refusal.reason, refusal.detail))
            if isinstance(refusal, ItemMissing):
                self.wanted.add(refusal.item)

    def apply_own(self, operation: ItemOperation, stamp: Stamp, time_ms: int, writer: WriterRole) -> set[ItemId]:
        """Show one operation of a message that this device is still writing; OperationRefused when it can't be, ModelFailed
        when an application's model raises. Returns what it touched."""
        if operation.field == GENESIS:
            self._create(operation.body, stamp, time_ms)
        else:
            self._apply_one(operation, stamp, time_ms, writer, own=True)
        if operation.field == CUSTOM:
            model = self.records[operation.item].model
            if isinstance(model, OrderedFold):
                model.confirm(stamp)
        return self.settle() | {operation.item}

    def stamp_edits(
        self, depth: int, feed: FeedId, seq: int, time_ms: int, operations: Iterable[ItemOperation]
    ) -> None:
        """Operations of an own batch, shown while it was open, are a message now."""
        for position, operation in enumerate(operations):
            if operation.field == GENESIS:
                self._claim(operation.body)
                continue
            record = self.records.get(operation.item)
            if record is not None and isinstance(record.model, SharedSequence) and operation.field == record.model.name:
                record.model.stamped(Stamp(depth, feed, seq, position), time_ms)

    def settle(self) -> set[ItemId]:
        """Import the edits and replay the moves that came since the last call, once for a whole run of messages;
        returns the items whose place changed."""
        touched: set[ItemId] = set()
        if self._edits:
            self._import_edits()
        if self._moves:
            touched = self.tree.apply_all(self._moves)
            self.moves_new.update((move.stamp, move) for move in self._moves)
            self._moves = []
            self.changed |= touched
            self.dirty |= {item for item in touched if self.record(item) is not None}
        return touched

    def _apply_one(self, operation: ItemOperation, stamp: Stamp, time_ms: int, writer: WriterRole, own: bool) -> None:
        item, field, body = operation
        if field == GENESIS:
            self._claim(body)
            self._create(body, stamp, time_ms)
            return
        if field == REFUSED:
            raise OperationRefused(*body)
        record = self.records.get(item) or self.record(item)
        if record is None:
            raise self._missing(Reason.NO_ITEM, item)
        if record.last is None or stamp > record.last:
            record.last = stamp  # also when it is refused: a rule that comes late may allow it
            self.dirty.add(item)
        if record.access:
            self._check_access(record, field, stamp, writer)
        if field == METADATA:
            self._apply_metadata(record, body, stamp, time_ms, writer)
        elif field == PLACEMENT:
            self._place(record, body, stamp)
        else:
            model = record.model
            if field != (CUSTOM if isinstance(model, OrderedFold | CommutingFold) else model.name):
                raise OperationRefused(Reason.WRONG_MODEL, f"{field} on a {model.name}@{model.version}")
            if not isinstance(model, SharedSequence):
                model.apply(body, stamp, time_ms)
            elif own:  # its own edits are in the document already
                model.stamped(stamp, time_ms)
            else:
                self._edits.setdefault(item, []).append((body, stamp, time_ms))
                self._edit_count += 1
                if self._edit_count >= EDITS_MAX:
                    self._import_edits()
        self.dirty.add(item)
        self.changed.add(item)

    def _missing(self, reason: Reason, item: ItemId) -> OperationRefused:
        """Why an item is not here: it may still come, unless it was made inside the base epoch, which has it no more."""
        local = item_local(item)
        if not local & ARC_BIT and local >> POSITION_BITS < self._base_length(item_creator(item)):
            return OperationRefused(Reason.DISCARDED, item_text(item))
        return ItemMissing(reason, item)

    def _claim(self, genesis: Genesis) -> None:
        """A message has the genesis of a view: its inception key may name another item from now on."""
        if genesis.inception_key:
            self.refold |= self._views.note(genesis)

    def _create(self, genesis: Genesis, stamp: Stamp, time_ms: int) -> None:
        item = genesis.item
        if item_creator(item) != stamp.feed:
            raise OperationRefused(Reason.MALFORMED, "an item id of another feed")
        if self.record(item) is not None:
            raise OperationRefused(Reason.DUPLICATE, "the item exists")
        if genesis.inception_key and self._views.holder(genesis) != item:
            raise OperationRefused(Reason.DUPLICATE_VIEW, f"inception key {genesis.inception_key.hex()}")
        if genesis.parent is not None and self.record(genesis.parent) is None:
            raise self._missing(Reason.NO_PARENT, genesis.parent)
        model = self._factory.create(genesis.model, genesis.version, item)
        self.records[item] = ItemRecord(genesis, model, PropertySet(item), created_ms=time_ms)
        if item in self.wanted:
            self.wanted.discard(item)
            self.found.add(item)
        self.gone.discard(item)
        self.dirty.add(item)
        self.changed.add(item)
        self.changed.update(end for end in (genesis.parent, genesis.source, genesis.target) if end is not None)

    def _apply_metadata(self, record: ItemRecord, body: Any, stamp: Stamp, time_ms: int, writer: WriterRole) -> None:
        written = _access_change(body)
        if written is not None:
            creator = self._identity_of(item_creator(record.item))
            if writer.role not in ADMIN_ROLES and writer.identity != creator:
                raise OperationRefused(Reason.DENIED, "only admins and the item's creator change who may write it")
        record.metadata.apply(body, stamp, time_ms)
        if written is not None:
            # After an undo the best remaining write rules. What is shown now is just that, or a refold will see to it.
            value = written.value if isinstance(written, Set) else record.metadata.get((ACCESS_KEY,))
            record.access.append(AccessWrite(stamp, _rule_of(value)))
            record.access.sort(key=lambda known: known.stamp)
            if record.last is not None and stamp < record.last:
                self.refold.add(record.item)

    def _check_access(self, record: ItemRecord, field: str, stamp: Stamp, writer: WriterRole) -> None:
        rule = record.rule_at(stamp)
        if rule is None or writer.role == "owner" or rule.allows(writer.role, writer.identity):
            return
        raise OperationRefused(Reason.DENIED, f"{field} by a member whom the item's access metadata does not name")

    def _place(self, record: ItemRecord, body: tuple[int, ItemId | None], stamp: Stamp) -> None:
        kind, parent = body
        if parent is not None and self.record(parent) is None:
            raise self._missing(Reason.NO_PARENT, parent)
        self._moves.append(TreeMove(stamp, record.item, kind, parent))
        self.changed.add(record.item)
        if parent is not None:
            self.changed.add(parent)

    def _import_edits(self) -> None:
        """Texts and lists take many operations at once far more cheaply than one by one."""
        edits, self._edits, self._edit_count = self._edits, {}, 0
        for item, operations in edits.items():
            record = self.records[item]
            for (_, stamp, _), refusal in zip(operations, record.model.apply_many(operations), strict=True):
                if refusal is not None:
                    self.rejects.append(Reject(stamp.feed, stamp.seq, stamp.position, refusal.reason, refusal.detail))
            if record.model.overtaken:
                self.refold.add(item)

    # refolding

    def forget(self, items: frozenset[ItemId]) -> None:
        """Drop items, with their moves, that are about to be folded again from their operations."""
        dropped = [move.stamp for move in self.tree.moves if move.item in items]
        self.changed |= self.tree.without(items)
        self.moves_gone.update(dropped)
        for stamp in dropped:
            self.moves_new.pop(stamp, None)
        self._moves = [move for move in self._moves if move.item not in items]
        for item in items:
            self.records.pop(item, None)
            self._edits.pop(item, None)
        self.gone |= items
        self.dirty |= items
        self.changed |= items

    def restore(self, records: Iterable[ItemRecord], moves: Iterable[TreeMove]) -> None:
        """Put items back as a base epoch has them, with its moves of them; what came after it is folded on top."""
        for record in records:
            item = record.item
            self.records[item] = record
            self.gone.discard(item)
            self.dirty.add(item)
            self.changed.add(item)
        self._moves.extend(moves)

    def drop(self, items: frozenset[ItemId]) -> None:
        """Items that an epoch leaves out, with their moves."""
        self.settle()
        self.forget(items)

    def start_over(self, moves: Iterable[TreeMove]) -> None:
        """Forget all that is in memory: the ItemStore holds another state now."""
        for kept in (self.records, self.dirty, self.gone, self.refold, self.wanted, self.found, self._edits):
            kept.clear()
        self.moves_new.clear()
        self.moves_gone.clear()
        self.rejects, self._moves, self._edit_count = [], [], 0
        self.tree = Tree(self._first_parent, moves)


def _access_change(operation: Any) -> Set | Restore | None:
    """The last change of a metadata operation that writes the access rule, if any does."""
    found: Set | Restore | None = None
    for change in operation:
        key = change.key if isinstance(change, Restore) else EntryKey(change.path, SET, b"", None)
        if key.path[0] == ACCESS_KEY:
            if len(key.path) != 1 or key.kind != SET or not isinstance(change, Set | Restore):
                raise OperationRefused(Reason.MALFORMED, "access metadata is written whole")
            found = change
    return found


def _rule_of(value: Any) -> AccessRule:
    """A malformed rule allows nobody but owners: narrowing was meant, and opening up by mistake would be worse."""
    if value is DELETED or value is None:
        return AccessRule()
    roles = value.get("roles", []) if isinstance(value, dict) else []
    members = value.get("members", []) if isinstance(value, dict) else []
    rule = AccessRule(
        frozenset(role for role in roles if isinstance(role, str)) if isinstance(roles, list) else frozenset(),
        frozenset(IdentityKey(member) for member in members if isinstance(member, bytes))
        if isinstance(members, list)
        else frozenset(),
    )
    return rule if rule.roles or rule.members else AccessRule(roles=frozenset({"owner"}))
