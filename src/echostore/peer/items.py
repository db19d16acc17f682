"""Item handles: what an application holds. One class per model; a handle names an item and keeps no state.

A handle stays valid for as long as its party is open, whatever happens to the item. Reading shows the state as it is
now; writing goes through the party, so that it lands in the open batch or in a message of its own.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from echostore.kernel.errors import ModelFailed, NotFound, Refused, UsageError
from echostore.kernel.ids import POSITION_BITS, IdentityKey, ItemId, Stamp, item_local, item_text
from echostore.kernel.items.operations import CUSTOM, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import ACCESS_KEY, DELETED_KEY, FOREIGN_KEYS_KEY, NAME_KEY, ItemRecord
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.ordered_fold import CommutingFold, OrderedFold
from echostore.kernel.models.property_set import DELETED, Add, Change, Increment, PropertySet, Remove, Set
from echostore.kernel.models.text import ConcurrentText, TextRun
from echostore.kernel.models.threaded_log import LogEntry, OwnPost, Post, PostId, Retention, Thread, ThreadedLog
from echostore.kernel.values import Reference, Value, check_path, check_value, locator
from echostore.wire.values import value_bytes

if TYPE_CHECKING:
    from echostore.peer.history import Revision, ValueDiff
    from echostore.peer.model_fork import Convert
    from echostore.peer.party import Party
    from echostore.peer.streams import Stream

T = TypeVar("T")

EDITS_MAX = 4096
"""Edits in place that one message holds at most; more are sealed as they come."""

ROLES = ("owner", "admin", "editor", "reader")


class Item:
    """Any item. Subclasses add what their model can do."""

    __slots__ = ("id", "party")

    def __init__(self, party: "Party", item: ItemId) -> None:
        self.party = party
        self.id = item

    # what it is

    @property
    def type(self) -> str:
        return self._record().genesis.type

    @property
    def model(self) -> str:
        return self._record().genesis.model

    @property
    def version(self) -> int:
        return self._record().genesis.version

    @property
    def locator(self) -> str:
        """`echo://<party>/<item>`; of a view, with its inception key."""
        genesis = self._record().genesis
        if genesis.inception_key:
            return f"echo://{self.party.key.hex()}/{genesis.inception_key.hex()}"
        return locator(self.id, self.party.key)

    @property
    def reference(self) -> Reference:
        return Reference(self.id)

    def value(self) -> Value:
        """The state as plain values."""
        with self.party.reading():
            return self._record().model.value()

    @property
    def failed(self) -> str | None:
        """Why the model gave up on this item, if it did."""
        try:
            self.value()
        except ModelFailed as error:
            return error.what
        return None

    # metadata

    @property
    def name(self) -> str:
        return self._record().name

    @name.setter
    def name(self, name: str) -> None:
        self._write_metadata(Set((NAME_KEY,), check_value(name, where="name")))

    @property
    def metadata(self) -> dict[str, Value]:
        """The metadata item: its properties, and `embedded_items`, which is derived from the tree."""
        with self.party.reading():
            values = dict(self._record().metadata.value())
        values["embedded_items"] = [child.reference for child in self.embedded()]
        return values

    def set_foreign_key(self, system: str, key: str) -> None:
        """Remember under which key another system knows this item."""
        path = check_path((FOREIGN_KEYS_KEY, system))
        self._write_metadata(Set(path, check_value(key, where="key")))

    @property
    def foreign_keys(self) -> dict[str, str]:
        return dict(self._record().metadata.get((FOREIGN_KEYS_KEY,), {}))

    @property
    def access(self) -> dict[str, Value] | None:
        """Who may write this item, when that is narrowed."""
        value = self._record().metadata.get((ACCESS_KEY,))
        return value if isinstance(value, dict) else None

    def restrict(self, *, roles: list[str] | None = None, members: list[IdentityKey] | None = None) -> None:
        """Narrow who may write this item. Owners always may."""
        for role in roles or ():
            if role not in ROLES:
                raise UsageError(f"{role!r} is not a role", next_step=f"Roles are {', '.join(ROLES)}.")
        if not roles and not members:
            raise UsageError("name roles or members", next_step="Use unrestrict() to let everybody write again.")
        rule = {"roles": sorted(roles or []), "members": sorted(bytes(member) for member in members or [])}
        self._write_metadata(Set((ACCESS_KEY,), rule))

    def unrestrict(self) -> None:
        self._write_metadata(Set((ACCESS_KEY,), DELETED))

    # life

    @property
    def deleted(self) -> bool:
        """Whether it, or anything it hangs below, was deleted."""
        return self.party.is_deleted(self.id)

    def delete(self) -> None:
        """Hide the item and all that hangs below it. It can be restored until an epoch discards it."""
        self._write_metadata(Set((DELETED_KEY,), True))

    def restore(self) -> None:
        self._write_metadata(Set((DELETED_KEY,), DELETED))

    def upgrade(self, version: int, convert: "Convert | None" = None) -> "Item":
        """Continue this item under another version of its model, as a new item; see docs/models.md."""
        from echostore.peer.model_fork import fork_item

        return fork_item(self, version, convert)

    # place

    @property
    def parent(self) -> "Item | None":
        """What it hangs below; None is the party's system item."""
        with self.party.reading():
            home = self.party.runtime.state.home(self._record().item)
        return None if home is None else self.party.handle(home)

    def children(self) -> "list[Item]":
        """Items whose home this is."""
        with self.party.reading():
            return [self.party.handle(item) for item in self.party.runtime.source.children(self.id)]

    def embedded(self) -> "list[Item]":
        """Its children and what is embedded in it besides."""
        with self.party.reading():
            return [self.party.handle(item) for item in self.party.runtime.source.embedded(self.id)]

    def move(self, parent: "Item | None") -> None:
        """Give it another home; None is the party's system item."""
        self._place(MOVE, parent)

    def embed_in(self, parent: "Item") -> None:
        """Let it appear below a further parent, beside its home."""
        self._place(EMBED, parent)

    def unembed_from(self, parent: "Item") -> None:
        self._place(UNEMBED, parent)

    # links

    def link(self, target: "Item | Reference", *, type: str = "link", **properties: Value) -> "Item":
        """A typed edge to another item, itself an item. The target may lie in another party."""
        return self.party.link(self, target, type=type, **properties)

    def links(self, type: str | None = None) -> "list[Item]":
        """Links that start or end here."""
        with self.party.reading():
            found = [self.party.handle(item) for item in self.party.runtime.source.links(self.id)]
        return [link for link in found if not link.deleted and type in (None, link.type)]

    @property
    def source(self) -> "Item | None":
        """Of a link: where it starts; None when that item is not here."""
        end = self._record().genesis.source
        return self.party.get(end) if end is not None and self.party.has(end) else None

    @property
    def target(self) -> "Item | None":
        """Of a link: where it leads; None when that item is not here, see `dangling`."""
        genesis = self._record().genesis
        if genesis.target is None:
            return None
        if genesis.target_party is not None:
            found: Item | None = self.party.peer.resolve(locator(genesis.target, genesis.target_party))
            return found
        return self.party.get(genesis.target) if self.party.has(genesis.target) else None

    @property
    def dangling(self) -> bool:
        """Of a link: whether an end is missing or deleted."""
        ends = (self.source, self.target)
        return any(end is None or end.deleted for end in ends)

    # the past

    def history(self) -> "list[Revision]":
        """Every message that wrote it: who, when, what."""
        from echostore.peer.history import item_history

        return item_history(self)

    def diff(self, before: Any, after: Any = None) -> "list[ValueDiff]":
        """What changed between two moments (anchors, timeframes, times); the second defaults to now."""
        from echostore.peer.history import item_diff

        return item_diff(self, before, after)

    def stream(self, after: Any = None) -> "Stream":
        """The messages that write this item, after an anchor."""
        from echostore.peer.streams import Stream

        return Stream(self.party, after, item=self.id)

    # inside

    def _record(self) -> ItemRecord:
        with self.party.reading():
            record = self.party.runtime.state.record(self.id)
        if record is None:
            raise NotFound(f"item {item_text(self.id)[:8]} is not in the party")
        found: ItemRecord = record
        return found

    def _write_metadata(self, *changes: Change) -> None:
        self._write(METADATA, tuple(changes))

    def _write(self, field: str, body: Any) -> None:
        with self.party.writing() as runtime:
            self._check_access(runtime)
            runtime.operate([ItemOperation(self.id, field, body)])

    def _check_access(self, runtime: Any) -> None:
        record = self._record()
        if not record.access:
            return
        writer = runtime.writer()
        rule = record.rule_at(_HIGHEST)
        if rule is not None and writer.role != "owner" and not rule.allows(writer.role, writer.identity):
            raise Refused(f"item {item_text(self.id)[:8]} may be written by {_rule_text(rule)} only")

    def _place(self, kind: int, parent: "Item | None") -> None:
        where = None
        if parent is not None:
            self.party.check_own(parent)
            where = parent._record().item
        with self.party.writing() as runtime:
            self._check_access(runtime)
            if kind != UNEMBED and runtime.state.tree.forms_cycle(self.id, where):
                raise Refused("an item can't hang below itself, directly or through others")
            runtime.operate([ItemOperation(self.id, PLACEMENT, (kind, where))])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and other.id == self.id and other.party.key == self.party.key

    def __hash__(self) -> int:
        return hash((self.party.key, self.id))

    def __repr__(self) -> str:
        with self.party.reading():
            record = self.party.runtime.state.record(self.id)
        if record is None:
            return f"<item {item_text(self.id)[:8]}: not here>"
        label = record.genesis.type or record.genesis.model
        return f"<{label} {item_text(self.id)[:8]}{' deleted' if record.deleted else ''}>"


_HIGHEST = Stamp(1 << 62, b"\xff" * 8, 1 << 62, 0)  # type: ignore[arg-type]  # above every real stamp


def _rule_text(rule: Any) -> str:
    parts = sorted(rule.roles) + [member.hex()[:8] for member in sorted(rule.members)]
    return ", ".join(parts)


class PropertySetItem(Item):
    """Properties by path. `item["title"]`, `item["address", "city"]`."""

    __slots__ = ()

    def __getitem__(self, path: str | tuple[str, ...]) -> Value:
        steps = check_path(path)
        with self.party.reading():
            value = self._model().get(steps, DELETED)
        if value is DELETED:
            raise KeyError(path)
        return _copy(value)

    def get(self, path: str | tuple[str, ...], default: Value = None) -> Value:
        with self.party.reading():
            value = self._model().get(check_path(path), DELETED)
        return default if value is DELETED else _copy(value)

    def __contains__(self, path: str | tuple[str, ...]) -> bool:
        with self.party.reading():
            return self._model().get(check_path(path), DELETED) is not DELETED

    def __iter__(self) -> Iterator[str]:
        with self.party.reading():
            return iter(list(self._model().value()))

    def keys(self) -> list[str]:
        return list(self)

    def to_dict(self) -> dict[str, Value]:
        """All properties."""
        with self.party.reading():
            return {key: _copy(value) for key, value in self._model().value().items()}

    def to(self, cls: type[T]) -> T:
        """The instance of a dataclass that this item stands for; changing it changes nothing here."""
        from echostore.peer.dataclass_mapping import to_dataclass

        found: T = to_dataclass(self, cls)
        return found

    def __setitem__(self, path: str | tuple[str, ...], value: Value) -> None:
        self._change(Set(check_path(path), self._plain(path, value)))

    def __delitem__(self, path: str | tuple[str, ...]) -> None:
        steps = check_path(path)
        if steps not in self:
            raise KeyError(path)
        self._change(Set(steps, DELETED))

    def update(self, **properties: Value) -> None:
        """Set several properties as one operation."""
        if properties:
            self._change(*[Set((name,), self._plain(name, value)) for name, value in properties.items()])

    def add(self, path: str | tuple[str, ...], element: Value) -> None:
        """Add an element to the set at a path. Concurrent additions and removals of others are kept apart."""
        plain = _element(self._plain(path, element))
        self._change(Add(check_path(path), plain, value_bytes(plain)))

    def remove(self, path: str | tuple[str, ...], element: Value) -> None:
        """Remove an element from the set at a path: the additions seen here, not those made elsewhere meanwhile."""
        steps, plain = check_path(path), _element(self._plain(path, element))
        key = value_bytes(plain)
        with self.party.reading():
            observed = self._model().additions(steps, key)
        self._change(Remove(steps, plain, key, observed))

    def increment(self, path: str | tuple[str, ...], by: int | float = 1) -> None:
        """Add to a number. Concurrent increments add up."""
        if isinstance(by, bool) or not isinstance(by, (int, float)):
            raise UsageError(f"increment takes a number, not {type(by).__name__}")
        steps = check_path(path)
        check_value(by, where="increment")
        with self.party.reading():
            base = self._model().standing_write(steps)
        self._change(Increment(steps, by, base))

    def conflicts(self, path: str | tuple[str, ...]) -> list[Value]:
        """Values that others wrote at this path concurrently with the one that stands, and that lost."""
        from echostore.peer.history import losing_values

        return losing_values(self, check_path(path))

    def _change(self, *changes: Change) -> None:
        party = self.party
        with party.writing() as runtime:
            record = runtime.state.records.get(self.id) or self._record()
            if record.access:
                self._check_access(runtime)
            if party.has_schemas:
                party.check_schema(record, changes)
            runtime.operate([ItemOperation(self.id, "property-set", changes)])

    def _plain(self, path: object, value: Value) -> Value:
        if isinstance(value, Item):
            return self.party.reference_to(value)
        return check_value(_references(self.party, value), where=str(path))

    def _model(self) -> PropertySet:
        record = self.party.runtime.state.records.get(self.id) or self._record()
        model: PropertySet = record.model
        return model


class ArrayItem(Item):
    """A list that grows anywhere; elements are values or items."""

    __slots__ = ()

    def __len__(self) -> int:
        with self.party.reading():
            return len(self._model())

    def __getitem__(self, index: int) -> Value:
        with self.party.reading():
            return self._shown(self._model().get(_index(index, len(self._model()))))

    def __iter__(self) -> Iterator[Value]:
        with self.party.reading():
            values = list(self._model())
        return iter([self._shown(value) for value in values])

    def to_list(self) -> list[Value]:
        return list(self)

    def append(self, *values: Value) -> None:
        with self._editing() as model:
            for value in values:
                model.append(self._plain(value))

    def insert(self, index: int, value: Value) -> None:
        with self._editing() as model:
            model.insert(index, self._plain(value))

    def __setitem__(self, index: int, value: Value) -> None:
        with self._editing() as model:
            model.set(_index(index, len(model)), self._plain(value))

    def __delitem__(self, index: int) -> None:
        with self._editing() as model:
            model.delete(_index(index, len(model)), 1)

    def move_element(self, start: int, end: int) -> None:
        """Take the element at `start` to the place `end`. Concurrent moves never duplicate it."""
        with self._editing() as model:
            model.move(_index(start, len(model)), end)

    def remove(self, value: Value) -> None:
        """Remove the first element that equals a value or is an item."""
        wanted = self._plain(value)
        with self._editing() as model:
            for index, element in enumerate(model):
                if element == wanted:
                    model.delete(index, 1)
                    return
        raise ValueError(f"{value!r} is not in the list")

    def _editing(self) -> "_Editing":
        return _Editing(self)

    def _plain(self, value: Value) -> Value:
        if isinstance(value, Item):
            return self.party.reference_to(value)
        return check_value(_references(self.party, value), where="element")

    def _shown(self, value: Value) -> Value:
        """An element as people want it: a reference to an item that is here becomes its handle."""
        if isinstance(value, Reference) and value.party is None and self.party.has(value.item):
            return self.party.handle(value.item)
        return value

    def _model(self) -> GrowableArray:
        model: GrowableArray = self._record().model
        return model


class TextItem(Item):
    """Text that several people edit at once. Positions count Unicode code points."""

    __slots__ = ()

    def __str__(self) -> str:
        with self.party.reading():
            return str(self._record().model)

    def __len__(self) -> int:
        with self.party.reading():
            return len(self._record().model)

    def insert(self, position: int, text: str) -> None:
        party = self.party
        with party.lock:
            runtime = party.runtime
            record = runtime.open_edits.get(self.id)
            if record is None:
                record = self._open(runtime)
            record.model.insert(position, text)
            runtime.edit_count += 1
            if runtime.edit_count >= EDITS_MAX:
                party.seal()

    def delete(self, position: int | None = None, length: int = 1) -> None:
        """Delete characters; without a position, the item itself."""
        if position is None:
            super().delete()
            return
        party = self.party
        with party.lock:
            runtime = party.runtime
            record = runtime.open_edits.get(self.id)
            if record is None:
                record = self._open(runtime)
            record.model.delete(position, length)
            runtime.edit_count += 1
            if runtime.edit_count >= EDITS_MAX:
                party.seal()

    def append(self, text: str) -> None:
        self.insert(len(self), text)

    def splice(self, position: int, length: int, text: str) -> None:
        with _Editing(self) as model:
            model.splice(position, length, text)

    def mark(self, start: int, end: int, key: str, value: Any = True) -> None:
        with _Editing(self) as model:
            model.mark(start, end, key, value)

    def unmark(self, start: int, end: int, key: str) -> None:
        with _Editing(self) as model:
            model.unmark(start, end, key)

    def runs(self) -> list[TextRun]:
        """The text with its marks."""
        with self.party.reading():
            found: list[TextRun] = self._record().model.to_delta()
            return found

    def cursor(self, position: int) -> bytes:
        """A place that stays with its text while others edit."""
        with self.party.reading():
            found: bytes = self._record().model.cursor(position)
            return found

    def cursor_position(self, cursor: bytes) -> int:
        with self.party.reading():
            found: int = self._record().model.cursor_position(cursor)
            return found

    def _open(self, runtime: Any) -> ItemRecord:
        self.party.check_open()
        record = self._record()
        runtime.edit(record)
        return record


class LogItem(Item):
    """A threaded log: posts with replies, append-only."""

    __slots__ = ()

    def post(self, body: Value, *, reply_to: "LogEntry | PostId | None" = None) -> PostId:
        """Append a post; returns its id."""
        answered = reply_to.id if isinstance(reply_to, LogEntry) else reply_to
        with self.party.writing() as runtime:
            self._check_access(runtime)
            plain = self.party.reference_to(body) if isinstance(body, Item) else check_value(body, where="post")
            runtime.writer()
            assert runtime.data is not None
            feed = runtime.data.feed
            own = answered is not None and answered.feed == feed
            target = OwnPost(answered.seq, answered.position) if answered is not None and own else answered
            local = item_local(runtime.next_item())
            runtime.operate([ItemOperation(self.id, "threaded-log", Post(plain, target))])
            return PostId(feed, local >> POSITION_BITS, local & 0xFFFF)

    def append(self, body: Value) -> PostId:
        return self.post(body)

    def posts(self) -> list[LogEntry]:
        """Posts in canonical order; those taken back are left out."""
        with self.party.reading():
            return [entry for entry in self._model().entries() if not entry.retracted]

    def threads(self) -> list[Thread]:
        """The posts by thread."""
        with self.party.reading():
            return self._model().threads()

    def set_retention(self, *, age_ms_max: int = 0, count_max: int = 0) -> None:
        """What an epoch may discard; 0 keeps everything."""
        self._write("threaded-log", Retention(age_ms_max, count_max))

    def __len__(self) -> int:
        return len(self.posts())

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self.posts())

    def _model(self) -> ThreadedLog:
        model: ThreadedLog = self._record().model
        return model


class CustomItem(Item):
    """An item of an application's own model, or of one that is not registered here."""

    __slots__ = ()

    @property
    def opaque(self) -> bool:
        """Whether its model is not registered here; it is kept and replicated all the same."""
        return isinstance(self._record().model, OrderedFold) and self._record().model.opaque

    def apply(self, operation: Value) -> None:
        """Write one operation of the model."""
        plain = check_value(_references(self.party, operation), where="operation")
        if self.opaque:
            raise Refused(
                f"the model {self.model}@{self.version} is not registered here",
                next_step="Register its class with peer.models.register(...).",
            )
        self._write(CUSTOM, value_bytes(plain))

    @property
    def instance(self) -> Any:
        """The application's own object. It must not be changed by hand."""
        model = self._record().model
        return model.instance if isinstance(model, CommutingFold) else model.instance()


class _Editing:
    """An edit in place of a text or list, under the party's lock."""

    __slots__ = ("_item",)

    def __init__(self, item: Item) -> None:
        self._item = item

    def __enter__(self) -> Any:
        party = self._item.party
        party.lock.acquire()
        try:
            party.check_open()
            runtime = party.runtime
            record = runtime.open_edits.get(self._item.id)
            if record is None:
                record = self._item._record()
                runtime.edit(record)
            runtime.edit_count += 1
            return record.model
        except BaseException:
            party.lock.release()
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        party = self._item.party
        try:
            if kind is None and party.runtime.edit_count >= EDITS_MAX:
                party.seal()
        finally:
            party.lock.release()


HANDLES: dict[str, type[Item]] = {
    PropertySet.name: PropertySetItem,
    GrowableArray.name: ArrayItem,
    ConcurrentText.name: TextItem,
    ThreadedLog.name: LogItem,
}


def _index(index: int, length: int) -> int:
    place = index + length if index < 0 else index
    if not 0 <= place < length:
        raise IndexError(f"index {index} in a list of {length}")
    return place


def _copy(value: Value) -> Value:
    """Containers are copied, so that callers can't change the state by accident."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    return value


def _references(party: "Party", value: Value) -> Value:
    """Handles inside lists and maps become references."""
    if isinstance(value, Item):
        return party.reference_to(value)
    if isinstance(value, dict):
        return {key: _references(party, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_references(party, inner) for inner in value]
    return value


def _element(value: Value) -> Value:
    if isinstance(value, (list, dict)):
        raise UsageError("an element of a set is a plain value or an item, not a list or map")
    return value
