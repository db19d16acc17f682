"""Writing an item anew, as a new item that names the one it was made of: what reviving does with what it found.

Values, texts with marks, threads of posts, operations of an application's own model: written by this device, in one message.
What a new item can't have is told in words, for people.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import NotFound, Refused
from echostore.kernel.ids import ItemId, item_text
from echostore.kernel.items.record import ACCESS_KEY, DELETED_AT_KEY, DELETED_KEY, ItemRecord
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.ordered_fold import OrderedFold
from echostore.kernel.models.property_set import ADDED, Add, PropertySet, Set
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import PostId, ThreadedLog
from echostore.kernel.values import Value
from echostore.peer.items import HIGHEST, Item
from echostore.wire.values import value_bytes, value_from_bytes

if TYPE_CHECKING:
    from echostore.peer.party import Party


@dataclass(slots=True)
class OldItem:
    """An item as it would be if no epoch had left it out."""

    record: ItemRecord
    parent: ItemId | None
    brought: int
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Revived:
    """What became of an item that an epoch had discarded."""

    old: ItemId
    item: ItemId | None
    """The new one; None when nothing was written."""
    epoch: int | None
    """From which epoch's snapshot it was made; None where the history itself is here."""
    operations: int
    """Quarantined operations that are in it."""
    left: list[str]
    """What could not be brought back, in words."""


class Anew:
    """Writes an item anew, in one message."""

    def __init__(self, party: "Party", old: OldItem) -> None:
        self._party, self._old, self._record = party, old, old.record
        self._left = old.left

    def write(self, epoch: int | None, *, dry_run: bool) -> Revived:
        record, item = self._record, self._record.item
        self._check_right()
        self._check_model()
        more = self._ends()
        parent = self._parent()
        if isinstance(record.model, ThreadedLog) and record.model.value():
            self._left.append("who wrote its posts, and when")
        made: Item | None = None
        if not dry_run:
            with self._party.batch():
                made = self._party._create(
                    record.genesis.model,
                    record.genesis.version,
                    type=record.genesis.type,
                    parent=parent,
                    name="",
                    properties=self._properties(),
                    forked_from=item,
                    **more,
                )
                self._fill(made)
                self._describe(made)
        return Revived(item, made.id if made is not None else None, epoch, self._old.brought, self._left)

    def _check_right(self) -> None:
        writer = self._party.runtime.writer()
        rule = self._record.rule_at(HIGHEST)
        if rule is not None and writer.role != "owner" and not rule.allows(writer.role, writer.identity):
            raise Refused(f"item {short_id(self._record.item)} may be revived only by who might write it")

    def _check_model(self) -> None:
        model, genesis = self._record.model, self._record.genesis
        if getattr(model, "opaque", False):
            raise Refused(
                f"the model {genesis.model}@{genesis.version} is not registered here",
                next_step="Register its class with peer.models.register(...).",
            )
        if not isinstance(model, PropertySet | SharedSequence | ThreadedLog | OrderedFold):
            raise Refused(f"a {genesis.model}@{genesis.version} does not keep its operations, and can't be made anew")

    def _ends(self) -> dict[str, Any]:
        """What only links and views have."""
        genesis, party = self._record.genesis, self._party
        if genesis.source is not None:
            if not party.has(genesis.source):
                raise Refused("it is a link from an item that is not in the party", next_step="Revive that one first.")
            return {"source": genesis.source, "target": genesis.target, "target_party": genesis.target_party}
        if genesis.inception_key:
            try:
                party.peer.keys.key(genesis.inception_key)
            except NotFound:
                self._left.append("that it is a view: the key that names it is not on this device")
                return {}
            return {"inception_key": genesis.inception_key}
        return {}

    def _parent(self) -> Item | None:
        wanted = self._old.parent
        if wanted is None:
            return None
        if self._party.has(wanted):
            return self._party.handle(wanted)
        again = made_of(self._party, wanted)
        if again is None:
            self._left.append(f"its place: item {short_id(wanted)}, below which it hung, is not in the party")
        return again

    def _properties(self) -> dict[str, Value]:
        model = self._record.model
        if not isinstance(model, PropertySet):
            return {}
        return {key: value for key, value in model.value().items() if key not in self._sets()}

    def _sets(self) -> set[str]:
        """Properties that are sets: their elements are added one by one, as people did."""
        layers = self._record.model.layers.values()
        return {key.path[0] for layer in layers for key in layer if key.kind == ADDED and len(key.path) == 1}

    def _fill(self, made: Any) -> None:
        model = self._record.model
        if isinstance(model, PropertySet):
            for key in sorted(self._sets() & model.value().keys()):
                elements = model.value()[key]
                made._write(PropertySet.name, tuple(Add((key,), each, value_bytes(each)) for each in elements))
        elif isinstance(model, SharedSequence):
            self._put(made, model)
        elif isinstance(model, ThreadedLog):
            self._post(made, model)
        else:
            for kept in model.operations:
                made.apply(value_from_bytes(kept.operation))

    def _put(self, made: Item, old: SharedSequence) -> None:
        record, pieces = made._record(), [piece.text for piece in old.pieces()]
        self._party.runtime.edit(record)
        record.model.put(0, pieces)
        if isinstance(old, ConcurrentText):
            marks = enumerate(old.marks_in(0, len(old)))
            record.model.put_marks((index, key, value) for index, given in marks for key, value in given.items())

    def _post(self, made: Any, old: ThreadedLog) -> None:
        if old.retention.age_ms_max or old.retention.count_max:
            made.set_retention(age_ms_max=old.retention.age_ms_max, count_max=old.retention.count_max)
        posts: dict[PostId, PostId] = {}
        for entry in (each for each in old.entries() if not each.retracted):
            answered = posts.get(entry.reply_to) if entry.reply_to is not None else None
            posts[entry.id] = made.post(entry.body, reply_to=answered)

    def _describe(self, made: Item) -> None:
        """Its metadata; who may write it last, since it rules over what comes after."""
        metadata = self._record.metadata.value()
        keys = [key for key in metadata if key not in (DELETED_KEY, DELETED_AT_KEY, ACCESS_KEY)]
        changes = [Set((key,), metadata[key]) for key in (*keys, *({ACCESS_KEY} & metadata.keys()))]
        if changes:
            made._write_metadata(*changes)


def made_of(party: "Party", item: ItemId) -> Item | None:
    """The living item that was made of one that is gone; the lowest id of several."""
    return next((each for each in party.items() if each._record().genesis.forked_from == item), None)


def short_id(item: ItemId) -> str:
    return item_text(item)[:8]
