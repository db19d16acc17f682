"""Handles by model: what an application can do with a property set, a list, a text, a log or a model of its own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from echostore.kernel.errors import Refused, TooLarge, UsageError
from echostore.kernel.frozen import frozen
from echostore.kernel.ids import POSITION_BITS, ItemId, item_local
from echostore.kernel.items.operations import CUSTOM, ItemOperation
from echostore.kernel.limits import VALUE_BYTES_MAX
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.ordered_fold import CommutingFold, OrderedFold
from echostore.kernel.models.property_set import DELETED, Add, Change, Increment, PropertySet, Remove, Set
from echostore.kernel.models.text import ConcurrentText, TextRun
from echostore.kernel.models.threaded_log import LogEntry, OwnPost, Post, PostId, Retention, Thread, ThreadedLog
from echostore.kernel.positions import insertion_point
from echostore.kernel.values import Reference, Value, check_path, check_value, kind_of, merge_properties
from echostore.peer import arguments
from echostore.peer.items import Item, plain_references
from echostore.peer.pen import EDIT_CHARACTERS, EDITS_MAX, INSERT_BYTES_MAX, NO_PEN, Pen
from echostore.wire.messages import check_custom_operation
from echostore.wire.values import value_bytes

T = TypeVar("T")

if TYPE_CHECKING:
    from echostore.peer.party import Party


class PropertySetItem(Item):
    """Properties by path. `item["title"]`, `item["address", "city"]`."""

    __slots__ = ()

    def __getitem__(self, path: str | tuple[str, ...]) -> Value:
        steps = check_path(path)
        with self.party.reading():
            value = self._model().get(steps, DELETED)
        if value is DELETED:
            raise KeyError(path)
        return frozen(value)

    def get(self, path: str | tuple[str, ...], default: Value = None) -> Value:
        with self.party.reading():
            value = self._model().get(check_path(path), DELETED)
        return default if value is DELETED else frozen(value)

    def __contains__(self, path: str | tuple[str, ...]) -> bool:
        with self.party.reading():
            return self._model().get(check_path(path), DELETED) is not DELETED

    def __iter__(self) -> Iterator[str]:
        with self.party.reading():
            return iter(list(self._model().value()))

    def keys(self) -> list[str]:
        return list(self)

    def to_dict(self) -> dict[str, Value]:
        """All properties, in a dict of the caller's own; lists and maps inside are read-only."""
        with self.party.reading():
            return {key: frozen(value) for key, value in self._model().value().items()}

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

    def update(self, properties: Mapping[str, Value] | None = None, /, **more: Value) -> None:
        """Set several properties as one operation, given as a mapping, as keywords, or as both."""
        given = merge_properties(properties, more)
        if given:
            self._change(*[Set((name,), self._plain(name, value)) for name, value in given.items()])

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
            raise UsageError(f"increment takes a number, not {kind_of(by)}")
        steps = check_path(path)
        by = check_value(by, where="increment")
        if not math.isfinite(by):
            raise UsageError(f"increment takes a number, not {by}")
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
        return check_value(plain_references(self.party, value), where=path)

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
        plain = [self._plain(value) for value in values]
        sizes = [_size(value, "an element") for value in plain]
        with self.party.lock:
            for value, size in zip(plain, sizes, strict=True):
                with _Editing(self, size) as model:
                    model.append(value)

    def insert(self, index: int, value: Value) -> None:
        """Put an element before the one at `index`; a negative index counts from the end."""
        plain = self._plain(value)
        with _Editing(self, _size(plain, "an element")) as model:
            model.insert(insertion_point(arguments.whole(index, "an index"), len(model), "a list"), plain)

    def __setitem__(self, index: int, value: Value) -> None:
        plain = self._plain(value)
        with _Editing(self, _size(plain, "an element")) as model:
            model.set(_index(index, len(model)), plain)

    def __delitem__(self, index: int) -> None:
        with _Editing(self) as model:
            model.delete(_index(index, len(model)), 1)

    def move_element(self, start: int, end: int) -> None:
        """Take the element at `start` to the place `end`. Concurrent moves never duplicate it."""
        with _Editing(self) as model:
            model.move(_index(start, len(model)), arguments.whole(end, "an index"))

    def remove(self, value: Value) -> None:
        """Remove the first element that equals a value or is an item."""
        wanted = self._plain(value)
        with _Editing(self) as model:
            for index, element in enumerate(model):
                if element == wanted:
                    model.delete(index, 1)
                    return
        raise ValueError(f"{value!r} is not in the list")

    def _plain(self, value: Value) -> Value:
        if isinstance(value, Item):
            return self.party.reference_to(value)
        return check_value(plain_references(self.party, value), where="element")

    def _shown(self, value: Value) -> Value:
        """An element as people want it: a reference to an item that is here becomes its handle."""
        if isinstance(value, Reference) and value.party is None and self.party.has(value.item):
            return self.party.handle(value.item)
        return frozen(value)

    def _model(self) -> GrowableArray:
        model: GrowableArray = self._record().model
        return model


class TextItem(Item):
    """Text that several people edit at once. Positions count Unicode code points; negative ones count from the end."""

    __slots__ = ("_pen",)

    def __init__(self, party: "Party", item: ItemId) -> None:
        super().__init__(party, item)
        self._pen = NO_PEN

    def __str__(self) -> str:
        with self.party.reading():
            return str(self._record().model)

    def __len__(self) -> int:
        with self.party.reading():
            return len(self._record().model)

    def insert(self, position: int, text: str) -> None:
        # Typing is the hottest path of all: no lock, one call into the model. See `Pen` for why that is safe.
        if type(text) is not str or len(text) > EDIT_CHARACTERS:
            self.splice(position, 0, text)
            return
        pen = self._pen
        if pen.left <= 0:
            pen = self._take_pen()
        try:
            pen.insert(position, text)
        except BaseException as error:  # noqa: BLE001  # the text library raises bare ones
            if type(position) is int and 0 <= position <= len(self):
                ConcurrentText.raise_edit_error(error)
            self.splice(position, 0, text)  # which counts from the end, or says what is wrong
            return
        pen.left = left = pen.left - 1
        if left <= 0:
            self._look_after(pen)

    def delete(self, position: int | None = None, length: int = 1) -> None:
        """Delete characters; without a position, the item itself."""
        if position is None:
            super().delete()
            return
        pen = self._pen
        if pen.left <= 0:
            pen = self._take_pen()
        try:
            pen.delete(position, length)
        except BaseException as error:  # noqa: BLE001  # as above
            if type(position) is int and type(length) is int and 0 <= position <= position + length <= len(self):
                ConcurrentText.raise_edit_error(error)
            self.splice(position, length, "")
            return
        pen.left = left = pen.left - 1
        if left <= 0:
            self._look_after(pen)

    def _take_pen(self) -> Pen:
        party = self.party
        with party.lock:
            party.check_open()
            self._pen = party.runtime.pen(self._record())
            return self._pen

    def _look_after(self, pen: Pen) -> None:
        """After an edit that used up the pen, or crossed a seal in another thread."""
        party = self.party
        with party.lock:
            runtime = party.runtime
            if not runtime.holds(pen):  # sealed while we wrote: what was just written belongs to the next message
                self._take_pen()
                return
            if runtime.in_batch:
                pen.left = EDITS_MAX
            else:
                party.seal()

    def append(self, text: str) -> None:
        self.insert(len(self), text)

    def splice(self, position: int, length: int, text: str) -> None:
        place, count = arguments.whole(position, "a position"), arguments.whole(length, "a length")
        inserted = arguments.text(text, "what is inserted")
        size = len(inserted.encode())
        if size > INSERT_BYTES_MAX:
            raise TooLarge(
                f"an insertion of {size:,} bytes; at most {INSERT_BYTES_MAX:,} are inserted at once",
                next_step="Insert it in parts, or put large content into a blob.",
            )
        with _Editing(self, size) as model:
            model.splice(insertion_point(place, len(model), "a text"), count, inserted)

    def mark(self, start: int, end: int, key: str, value: Any = True) -> None:
        place, stop = arguments.whole(start, "a position"), arguments.whole(end, "a position")
        with _Editing(self, _size(value, "a mark") if isinstance(value, str) else 0) as model:
            model.mark(*_range(place, stop, len(model)), arguments.text(key, "the name of a mark"), value)

    def unmark(self, start: int, end: int, key: str) -> None:
        place, stop = arguments.whole(start, "a position"), arguments.whole(end, "a position")
        with _Editing(self) as model:
            model.unmark(*_range(place, stop, len(model)), arguments.text(key, "the name of a mark"))

    def runs(self) -> list[TextRun]:
        """The text with its marks."""
        with self.party.reading():
            return [TextRun(run.text, frozen(run.marks)) for run in self._record().model.to_delta()]

    def cursor(self, position: int) -> bytes:
        """A place that stays with its text while others edit."""
        with self.party.reading():
            model = self._record().model
            found: bytes = model.cursor(insertion_point(arguments.whole(position, "a position"), len(model), "a text"))
            return found

    def cursor_position(self, cursor: bytes) -> int:
        with self.party.reading():
            found: int = self._record().model.cursor_position(cursor)
            return found


class LogItem(Item):
    """A threaded log: posts with replies, append-only."""

    __slots__ = ()

    def post(self, body: Value, *, reply_to: "LogEntry | PostId | None" = None) -> PostId:
        """Append a post; returns its id."""
        answered = reply_to.id if isinstance(reply_to, LogEntry) else reply_to
        if answered is not None and not isinstance(answered, PostId):
            raise UsageError(f"a reply names a post, not {kind_of(answered)}")
        with self.party.writing() as runtime:
            self._check_access(runtime)
            plain = check_value(plain_references(self.party, body), where="post")
            _size(plain, "a post")
            runtime.before_naming()
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
            return [_shown_entry(entry) for entry in self._model().entries() if not entry.retracted]

    def threads(self) -> list[Thread]:
        """The posts by thread."""
        with self.party.reading():
            return _shown_threads(self._model().threads())

    def set_retention(self, *, age_ms_max: int = 0, count_max: int = 0) -> None:
        """What an epoch may discard; 0 keeps everything."""
        age_ms, count = (
            arguments.whole(age_ms_max, "age_ms_max", least=0),
            arguments.whole(count_max, "count_max", least=0),
        )
        self._write("threaded-log", Retention(age_ms, count))

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
        """Write one operation of the model. Refused with the model's reason when the model refuses it, ModelFailed when the
        model raises anything else; nothing is written then."""
        plain = check_value(plain_references(self.party, operation), where="operation")
        if self.opaque:
            raise Refused(
                f"the model {self.model}@{self.version} is not registered here",
                next_step="Register its class with peer.models.register(...).",
            )
        body = value_bytes(plain)
        check_custom_operation(body)
        with self.party.batch():  # a batch shows each operation to the model before it becomes a message
            self._write(CUSTOM, body)

    @property
    def instance(self) -> Any:
        """The application's own object. It must not be changed by hand."""
        model = self._record().model
        return model.instance if isinstance(model, CommutingFold) else model.instance()


class _Editing:
    """An edit in place of a text or list, under the party's lock."""

    __slots__ = ("_item", "_size")

    def __init__(self, item: Item, size: int = 0) -> None:
        self._item, self._size = item, size

    def __enter__(self) -> Any:
        party = self._item.party
        party.lock.acquire()
        try:
            party.check_open()
            runtime = party.runtime
            runtime.make_room(self._size)
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
            if kind is None and party.runtime.seal_due:
                party.seal()
        finally:
            party.lock.release()


HANDLES: dict[str, type[Item]] = {
    PropertySet.name: PropertySetItem,
    GrowableArray.name: ArrayItem,
    ConcurrentText.name: TextItem,
    ThreadedLog.name: LogItem,
}


def _shown_entry(entry: LogEntry) -> LogEntry:
    """A post as it is read: its body is read-only."""
    return replace(entry, body=frozen(entry.body)) if isinstance(entry.body, (list, dict)) else entry


def _shown_threads(threads: list[Thread]) -> list[Thread]:
    return [
        Thread(_shown_entry(each.entry), each.dangling, _shown_threads(each.replies) if each.replies else [])
        for each in threads
    ]


def _size(value: Value, what: str) -> int:
    """The bytes of a value, about; one that does not fit is refused before anything is changed."""
    if not isinstance(value, (str, bytes, list, dict)):
        return 16
    size = len(value_bytes(value))
    if size > VALUE_BYTES_MAX:
        raise TooLarge(
            f"{what} of {size:,} bytes; at most {VALUE_BYTES_MAX:,} fit",
            next_step="Put large content into a blob: party.files.add(...).",
        )
    return size


def _index(index: int, length: int) -> int:
    index = arguments.whole(index, "an index")
    place = index + length if index < 0 else index
    if not 0 <= place < length:
        raise IndexError(f"index {index} in a list of {length}")
    return place


def _range(start: int, end: int, length: int) -> tuple[int, int]:
    """The places of a stretch of text."""
    first, last = insertion_point(start, length, "a text"), insertion_point(end, length, "a text")
    if first > last:
        raise UsageError(f"a mark from {start} to {end} ends before it begins, in a text of {length}")
    return first, last


def _element(value: Value) -> Value:
    if isinstance(value, (list, dict)):
        raise UsageError("an element of a set is a plain value or an item, not a list or map")
    return value
