"""Handles of items that a thin client has read or made. A handle shows the state it was read with, and own edits of it.

    task["title"], task["address", "city"] = ...      properties
    notes.insert(0, "Dear all, "), notes.append("!")  text
    stops.append("Rome"), del stops[0]                lists
    chat.post("hello", reply_to=entry)                logs

Writing goes into the open batch of this thread, or is a batch of its own. Reading a query again gives newer handles.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import NotFound, UsageError
from echostore.kernel.frozen import FrozenDict, frozen
from echostore.kernel.ids import ItemId, PartyKey, item_text
from echostore.kernel.models.property_set import DELETED
from echostore.kernel.positions import insertion_point
from echostore.kernel.values import Path, Reference, Value, check_path, kind_of, merge_properties
from echostore.thin import operations
from echostore.thin.operations import LIST, LOG, PROPERTY_SET, TEXT, Operation
from echostore.thin.overlay import Overlay
from echostore.wire.index_spec import IndexItem

if TYPE_CHECKING:
    from echostore.thin.thin_party import ThinParty


class ThinItem:
    """Any item. Subclasses add what their model can do."""

    __slots__ = ("_party", "_shown", "id")

    def __init__(self, party: "ThinParty", state: IndexItem) -> None:
        self._party = party
        self.id: ItemId = state.item
        self._shown: IndexItem | None = state

    @property
    def _state(self) -> IndexItem:
        if self._shown is None:
            raise NotFound(f"item {item_text(self.id)[:8]} is not in the party: the batch that made it was rolled back")
        return self._shown

    def id_in(self, party: PartyKey) -> ItemId:
        """Its id, for an item of that party to hang below it or to start at it."""
        if self._party.key != party:
            raise UsageError(
                "the item belongs to another party", next_step="Refer to it by a property or a link instead."
            )
        return self._state.item

    def roll_back(self, shown: IndexItem | None) -> None:
        """Show again what was shown before a batch that was rolled back; None when that batch made the item."""
        self._shown = shown

    @property
    def type(self) -> str:
        return self._state.type

    @property
    def model(self) -> str:
        return self._state.model

    @property
    def parent(self) -> ItemId | None:
        return self._state.parent

    @property
    def deleted(self) -> bool:
        return self._state.deleted

    @property
    def source(self) -> ItemId | None:
        """Of a link: where it starts."""
        return self._state.source

    @property
    def target(self) -> ItemId | None:
        """Of a link: where it leads."""
        return self._state.target

    @property
    def reference(self) -> Reference:
        return Reference(self._state.item, None, self._party.key)

    @property
    def values(self) -> FrozenDict:
        """What a row of a query shows: the properties, or the content under `value`. Read-only."""
        shown: FrozenDict = frozen(self._state.values)
        return shown

    def value(self) -> Value:
        """The state as values; lists and maps in it are read-only."""
        return frozen(self._content if self.model != PROPERTY_SET else self._state.values)

    @property
    def _content(self) -> Value:
        """What a model other than the property set holds."""
        return self._state.values.get("value")

    # writing

    def delete(self) -> None:
        """Hide the item and what hangs below it."""
        self._write(operations.delete(self._party.feed, self.id, self._party.now_ms()))

    def restore(self) -> None:
        self._write(operations.restore(self._party.feed, self.id))

    def rename(self, name: str) -> None:
        """Set its display name."""
        self._write(operations.rename(self._party.feed, self.id, name))

    def move(self, parent: "ThinItem | None") -> None:
        """Give it another home; None is the party's own."""
        self._write(operations.move(self._party.feed, self.id, parent_id(parent, self._party.key)))

    def link(
        self,
        target: "ThinItem | ItemId | Reference",
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        type: str = "link",
        **more: Value,
    ) -> "ThinItem":
        """A typed edge to another item, itself an item."""
        made: ThinItem = self._party.link(self, target, properties, type=type, **more)
        return made

    def _write(self, operation: Operation) -> None:
        party, before = self._party, self._state
        party.publish([operation])
        after, exact = Overlay(party.key, party.feed, [operation]).apply(self.id, before)
        if exact and after is not None:
            party.changes(self, before)
            self._shown = after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThinItem) and other.id == self.id and other._party.key == self._party.key

    def __hash__(self) -> int:
        return hash((self._party.key, self.id))

    def __repr__(self) -> str:
        if self._shown is None:
            return f"<item {item_text(self.id)[:8]}: not here>"
        return f"<{self.type or self.model} {item_text(self.id)[:8]}{' deleted' if self.deleted else ''}>"


class ThinProperties(ThinItem):
    """Properties by path."""

    __slots__ = ()

    def __getitem__(self, path: str | tuple[str, ...]) -> Value:
        found = self._find(check_path(path))
        if found is DELETED:
            raise KeyError(path)
        return frozen(found)

    def get(self, path: str | tuple[str, ...], default: Value = None) -> Value:
        found = self._find(check_path(path))
        return default if found is DELETED else frozen(found)

    def __contains__(self, path: str | tuple[str, ...]) -> bool:
        return self._find(check_path(path)) is not DELETED

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.values)

    def keys(self) -> Iterable[str]:
        return self._state.values.keys()

    def to_dict(self) -> dict[str, Value]:
        """All properties, in a dict of the caller's own; lists and maps inside are read-only."""
        return {key: frozen(value) for key, value in self._state.values.items()}

    def __setitem__(self, path: str | tuple[str, ...], value: Value) -> None:
        self._change({check_path(path): value})

    def __delitem__(self, path: str | tuple[str, ...]) -> None:
        self[path]
        self._change({check_path(path): DELETED})

    def update(self, properties: Mapping[str, Value] | None = None, /, **more: Value) -> None:
        """Set several properties as one operation, given as a mapping, as keywords, or as both."""
        given = merge_properties(properties, more)
        if given:
            self._change({(name,): value for name, value in given.items()})

    def _find(self, path: Path) -> Any:
        found: Any = self._state.values
        for step in path:
            if not isinstance(found, dict) or step not in found:
                return DELETED
            found = found[step]
        return found

    def _change(self, changes: dict[Path, Value]) -> None:
        plain = {path: plain_value(value, self._party.key) for path, value in changes.items()}
        self._write(operations.change(self._party.feed, self.id, plain))


class ThinText(ThinItem):
    """Text. Positions count Unicode code points of the text as this handle shows it; negative ones count from the end."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self._state.values.get("value", ""))

    def __len__(self) -> int:
        return len(str(self))

    def insert(self, position: int, text: str) -> None:
        self.splice(position, 0, text)

    def append(self, text: str) -> None:
        self.splice(len(self), 0, text)

    def erase(self, position: int, length: int = 1) -> None:
        self.splice(position, length, "")

    def splice(self, position: int, length: int, text: str) -> None:
        """Take characters out and put others in their place."""
        if not isinstance(text, str):
            raise UsageError(f"text is inserted, not {kind_of(text)}")
        seen = str(self)
        place = insertion_point(_whole(position), len(seen), "a text")
        self._write(operations.edit_text(self.id, seen, place, _whole(length), text))


class ThinList(ThinItem):
    """A list; elements are values or items."""

    __slots__ = ()

    def to_list(self) -> list[Value]:
        """The elements, in a list of the caller's own; lists and maps inside are read-only."""
        return [frozen(each) for each in self._elements]

    @property
    def _elements(self) -> list[Value]:
        return self._content or []

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.to_list())

    def __getitem__(self, index: int) -> Value:
        return frozen(self._elements[index])

    def append(self, *values: Value) -> None:
        self._splice(len(self), 0, list(values))

    def insert(self, index: int, value: Value) -> None:
        self._splice(insertion_point(_whole(index), len(self), "a list"), 0, [value])

    def __setitem__(self, index: int, value: Value) -> None:
        self._splice(self._place(index), 1, [value])

    def __delitem__(self, index: int) -> None:
        self._splice(self._place(index), 1, [])

    def _place(self, index: int) -> int:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"the list has {len(self)} elements, none at {index}")
        return place

    def _splice(self, position: int, removed: int, inserted: list[Value]) -> None:
        plain = [plain_value(each, self._party.key) for each in inserted]
        self._write(operations.edit_list(self.id, self._elements, position, removed, plain))


class ThinLog(ThinItem):
    """A threaded log: posts with replies."""

    __slots__ = ()

    def posts(self) -> list[dict[str, Value]]:
        """The posts; one of one's own has no id before the root has it."""
        return [frozen(each) for each in self._content or []]

    def __len__(self) -> int:
        return len(self._content or [])

    def post(self, body: Value, *, reply_to: str | None = None) -> None:
        """Append a post; `reply_to` is the id of another."""
        answered = None if reply_to is None else operations.parse_post(reply_to)
        self._write(operations.post(self._party.feed, self.id, plain_value(body, self._party.key), answered))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"a position is a whole number, not {kind_of(value)}")
    return value


def parent_id(parent: Any, party: PartyKey) -> ItemId | None:
    """The id of a home; None is the party's own."""
    if parent is not None and not isinstance(parent, ThinItem):
        raise UsageError(f"a parent is an item, not {kind_of(parent)}", next_step="party.get(...) gives one for an id.")
    return None if parent is None else parent.id_in(party)


KINDS: dict[str, type[ThinItem]] = {PROPERTY_SET: ThinProperties, TEXT: ThinText, LIST: ThinList, LOG: ThinLog}


def plain_value(value: Value, party: PartyKey) -> Value:
    """Handles inside a value become references, which name their party when that is another one."""
    if isinstance(value, ThinItem | Reference):
        return (value if isinstance(value, Reference) else value.reference).seen_from(party)
    if isinstance(value, list | tuple):
        return [plain_value(each, party) for each in value]
    if isinstance(value, dict):
        return {key: plain_value(each, party) for key, each in value.items()}
    return value
