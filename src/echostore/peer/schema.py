"""Schemas: what a party's members agreed that items of a type look like.

    local write      -> checked before it happens; what breaks a schema raises SchemaViolation and changes nothing
    arriving write   -> applied like any other, never dropped; `violations()` lists what does not fit

A schema is an item, so it replicates, has a history and merges by the rules of property sets. Where several items
speak for one type (two peers defined it at the same time), the one with the lowest id counts. Schemas rule property
sets only.

Checking costs a look at the fields that a change touches. The parsed schemas are kept by type until a schema item
changes; a party without any never gets here (`Party.has_schemas`).
"""

import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import NOTHING_CHANGED, SchemaViolation, UsageError
from echostore.kernel.ids import FeedId, ItemId, Stamp, item_text
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models.property_set import DELETED, Change, PropertySet, Set
from echostore.kernel.query.source import Deleted
from echostore.kernel.values import Reference, Value, check_value
from echostore.peer.item_kinds import PropertySetItem
from echostore.peer.items import Item
from echostore.peer.schema_types import (
    SCHEMA_TYPE,
    FieldType,
    Schema,
    SchemaField,
    read_schema,
    schema_field,
    schema_problems,
)

if TYPE_CHECKING:
    from echostore.peer.delivered import Delivered
    from echostore.peer.party import Party

__all__ = ["FieldType", "Schema", "SchemaField", "Schemas", "Violation", "create_from_object", "schema_type"]

_NO_FEED = FeedId(bytes(8))


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of an item in the state that does not fit its schema."""

    item: Item
    type: str
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.type} {item_text(self.item.id)[:8]}: {self.field!r} {self.problem}"


class Schemas:
    """The schemas of one party."""

    def __init__(self, party: "Party") -> None:
        self._party = party
        runtime = party.runtime
        stored = runtime.items.scan("type = ?", (SCHEMA_TYPE,)) if runtime.items is not None else []
        records = runtime.state.records
        live = [item for item, record in records.items() if record.genesis.type == SCHEMA_TYPE]
        self._items: set[ItemId] = {item for item in stored if item not in runtime.state.gone} | set(live)
        self._by_type: dict[str, Schema] | None = None
        self._index_due = True
        runtime.schema_count = len(self._items)
        runtime.processor.listeners.append(self._changed)

    # reading

    def get(self, type: str) -> Schema | None:
        """The schema that counts for a type."""
        with self._party.reading():
            return self._current().get(type)

    def all(self) -> list[Schema]:
        """The schemas that count, by type."""
        with self._party.reading():
            current = self._current()
            return [current[type] for type in sorted(current)]

    def violations(self, type: str | None = None) -> list[Violation]:
        """Items of the state that break their schema, and schema items that can't be understood."""
        found: list[Violation] = []
        with self._party.reading():
            for schema in self.all():
                if type in (None, schema.for_type):
                    for item, values in self._rows(schema.for_type):
                        found += self._listed(item, schema.for_type, schema.problems(values, self._target_problem))
            if type in (None, SCHEMA_TYPE):
                for item, values in self._rows(SCHEMA_TYPE):
                    found += self._listed(item, SCHEMA_TYPE, schema_problems(values))
        return found

    def _listed(self, item: ItemId, type: str, problems: Iterable[tuple[str, str]]) -> list[Violation]:
        return [Violation(self._party.handle(item), type, field, problem) for field, problem in problems]

    def _rows(self, type: str) -> Iterable[tuple[ItemId, Mapping[str, Value]]]:
        """The property sets of a type that are not deleted. An audit reads the records themselves, not the index."""
        party, runtime = self._party, self._party.runtime
        for item in sorted(runtime.source.scan(type=type, parent=None, equals={}, deleted=Deleted.HIDE)):
            record = runtime.state.record(item)
            if record is not None and isinstance(record.model, PropertySet) and not party.is_deleted(item):
                yield item, record.model.value()

    # defining

    def define(self, type: Any, fields: Mapping[str, Any] | None = None, *, closed: bool = False) -> Schema:
        """Say how items of a type look, in place of what was said before. The type is a name with fields, or a
        dataclass. Items that are there already and don't fit are listed by `violations`."""
        if not isinstance(type, str):
            from echostore.peer.dataclass_mapping import fields_of

            if fields is not None:
                raise UsageError("a dataclass brings its own fields")
            type, fields = schema_type(type), fields_of(type)
        if not type or type == SCHEMA_TYPE:
            raise UsageError(f"{type!r} can't have a schema")
        wanted = {name: schema_field(field) for name, field in (fields or {}).items()}
        check_value(dict.fromkeys(wanted), where="fields")
        with self._party.writing():
            known = self._current().get(type)
            if known is None:
                self._create(type, wanted, closed)
            else:
                self._update(known, wanted, closed)
            schema = self._current()[type]
            self.declare_indexes()
            return schema

    def extend(self, type: str, fields: Mapping[str, SchemaField]) -> Schema:
        """Add fields that a schema lacks, or define it; what it says already stays."""
        known = self.get(type)
        if known is None:
            return self.define(type, fields)
        if fields.keys() <= known.fields.keys():
            return known
        return self.define(type, {**fields, **known.fields}, closed=known.closed)

    def _create(self, type: str, fields: Mapping[str, SchemaField], closed: bool) -> None:
        values = {name: field.to_value() for name, field in fields.items()}
        made: Item = self._party.create(PropertySet.name, type=SCHEMA_TYPE, for_type=type, fields=values, closed=closed)
        # Inside a batch nobody is told before its end, and the next write of the batch must already fit.
        self._note(made.id)

    def _update(self, known: Schema, fields: Mapping[str, SchemaField], closed: bool) -> None:
        """Write field by field, so that what two people change in different fields at the same time both stands."""
        changes: list[Change] = [
            Set(("fields", name), field.to_value()) for name, field in fields.items() if known.fields.get(name) != field
        ]
        changes += [Set(("fields", name), DELETED) for name in known.fields if name not in fields]
        if known.closed != closed:
            changes.append(Set(("closed",), closed))
        if changes:
            PropertySetItem(self._party, known.item)._change(*changes)

    def declare_indexes(self) -> None:
        """Give the fields that schemas mark for it an index. Called before queries; schemas may come from elsewhere."""
        runtime = self._party.runtime
        if not self._index_due or not runtime.writable or runtime.closed or runtime.failure is not None:
            return
        with self._party.writing():
            names = {name for schema in self._current().values() for name in schema.indexed}
            self._index_due = False
            if names - runtime.declared:
                self._party.index(*sorted(names))

    # checking what this peer is about to write

    def check_new(self, type: str, properties: Mapping[str, Value]) -> None:
        """Refuse a new item that does not fit; every field counts."""
        if type == SCHEMA_TYPE:
            _refuse(SCHEMA_TYPE, list(schema_problems(properties)))
            return
        schema = self._current().get(type)
        if schema is not None:
            _refuse(type, list(schema.problems(properties, self._target_problem)))

    def check_change(self, record: ItemRecord, changes: Iterable[Change]) -> None:
        """Refuse changes after which a field they touch would not fit. What was wrong elsewhere does not block."""
        model, type = record.model, record.genesis.type
        if not isinstance(model, PropertySet):
            return
        by_field: dict[str, list[Change]] = {}
        for change in changes:
            by_field.setdefault(change.path[0], []).append(change)
        if type == SCHEMA_TYPE:
            after = {**model.value(), **{name: self._after(model, name, each) for name, each in by_field.items()}}
            _refuse(type, list(schema_problems({k: v for k, v in after.items() if v is not DELETED})))
            return
        schema = self._current().get(type)
        if schema is None:
            return
        problems = []
        for name, each in by_field.items():
            problem = schema.field_problem(name, self._after(model, name, each), self._target_problem)
            if problem:
                problems.append((name, problem))
        _refuse(type, problems)

    def _after(self, model: PropertySet, name: str, changes: list[Change]) -> Value:
        """What a field will hold after changes of it; DELETED when nothing."""
        last = changes[-1]
        if isinstance(last, Set) and len(last.path) == 1:  # the usual case: the new write stands, whatever was there
            return last.value
        own = self._party.runtime.data
        trial = PropertySet(
            model.item,
            {
                feed: {key: entry for key, entry in layer.items() if key.path[0] == name}
                for feed, layer in model.layers.items()
            },
        )
        trial.apply(tuple(changes), Stamp(1 << 62, own.feed if own else _NO_FEED, 0, 0), 0)
        return trial.value().get(name, DELETED)

    def _target_problem(self, reference: Reference, target: str) -> str | None:
        party = self._party
        shown = item_text(reference.item)[:8]
        if reference.party is None or reference.party == party.key:
            record = party.runtime.state.record(reference.item)
            if record is None:
                return f"refers to item {shown}, which is not in the party"
        else:
            # Only a party that is open anyway is asked: a check must not be what opens one.
            others = (other for other in party.peer.open_parties() if other.key == reference.party)
            record = next((other.runtime.state.record(reference.item) for other in others), None)
        if record is not None and target and record.genesis.type != target:
            return f"expects a reference to an item of type {target!r}, item {shown} is a {record.genesis.type!r}"
        return None

    # what counts now

    def _current(self) -> dict[str, Schema]:
        """The schemas by type. Inside a batch a changed schema item shows in the state before anybody is told."""
        state = self._party.runtime.state
        if self._by_type is None or not state.changed.isdisjoint(self._items):
            found: dict[str, Schema] = {}
            for item in sorted(self._items):
                record = state.record(item)
                if record is None or record.deleted or not isinstance(record.model, PropertySet):
                    continue
                schema = read_schema(item, record.model.value())
                if schema is not None:
                    found.setdefault(schema.for_type, schema)
            self._by_type = found
        return self._by_type

    def _changed(self, changed: set[ItemId], delivered: "list[Delivered]") -> None:
        """After each applied batch: forget what was parsed when a schema item is among what changed."""
        state = self._party.runtime.state
        records = state.records
        for item in changed:
            record = records.get(item)
            if record is None:
                if item in self._items and item in state.gone:
                    self._items.discard(item)
                    self._stale()
            elif record.genesis.type == SCHEMA_TYPE:
                self._note(item)

    def _note(self, item: ItemId) -> None:
        self._items.add(item)
        self._stale()

    def _stale(self) -> None:
        self._by_type = None
        self._index_due = True
        self._party.runtime.schema_count = len(self._items)


def _refuse(type: str, problems: list[tuple[str, str]]) -> None:
    if problems:
        said = "; ".join(f"field {field!r} {problem}" for field, problem in problems)
        raise SchemaViolation(
            f"a {type} would break its schema: {said}.",
            unchanged=NOTHING_CHANGED,
            next_step=f"party.schemas.get({type!r}) shows the schema.",
        )


def schema_type(type: Any) -> str:
    """The name of a type that is given by name or as a dataclass."""
    if isinstance(type, str):
        return type
    from echostore.peer.dataclass_mapping import type_name

    return type_name(type)


def create_from_object(
    party: "Party",
    obj: Any,
    *,
    type: str = "",
    parent: Item | None = None,
    name: str = "",
    properties: Mapping[str, Value] | None = None,
) -> Any:
    """What `party.create` does with something else than a model's name: a model class, or a dataclass instance."""
    from echostore.peer.dataclass_mapping import create_from_dataclass, is_dataclass_instance

    if properties:
        raise UsageError("a model class or a dataclass instance takes no further properties")
    if is_dataclass_instance(obj):
        if type:
            raise UsageError("a dataclass brings its own type", next_step="Set __echo_type__ on the class.")
        return create_from_dataclass(party, obj, parent=parent, name=name)
    model, version = getattr(obj, "name", None), getattr(obj, "version", None)
    if isinstance(obj, builtins.type) and isinstance(model, str) and isinstance(version, int):
        with party.batch():
            made = party.create(f"{model}@{version}", type=type, parent=parent)
            if name:
                made.name = name
        return made
    raise UsageError(
        f"party.create takes a model's name, a model class or a dataclass instance, not {obj!r:.60}",
    )
