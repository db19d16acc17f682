"""PartySource: what queries read of a party. The ItemStore as of the last checkpoint, overlaid by what changed since.

    clean items   rows and indexes of the ItemStore; no record is decoded
    dirty items   their live records, indexed here in memory; a checkpoint empties the overlay

The overlay is brought up to date when a query asks, so that writing costs nothing while nobody does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from echostore.kernel.ids import (
    ARC_BIT,
    FEED_ID_BYTES,
    POSITION_BITS,
    FeedId,
    ItemId,
    PartyKey,
    Stamp,
    is_system_item,
    item_creator,
    item_local,
)
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.query.source import Deleted, Row
from echostore.kernel.values import Value
from echostore.peer.checkpoints import decode_values, index_key, references_in, references_of
from echostore.store.item_store import ItemRow, ItemStore

VIEW_CLASS = "view_class"

BLOCK_TIMES_MAX = 65_536
"""Times of blocks that are remembered for `@created`: reading one costs a block."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a dirty item stands in the overlay's indexes."""

    type: str
    deleted: bool
    parent: ItemId | None
    source: ItemId | None
    target: ItemId | None
    references: tuple[ItemId, ...]


class PartySource:
    """The `Source` of one party's queries."""

    def __init__(
        self,
        state: PartyState,
        store: ItemStore | None,
        declared: Iterable[str] = (),
        *,
        block_time: Callable[[FeedId, int], int | None] = lambda feed, seq: None,
    ) -> None:
        self._state = state
        self._store = store
        self._block_time = lru_cache(BLOCK_TIMES_MAX)(block_time)
        self.declared = frozenset(declared)
        self._stale: set[ItemId] = set()
        self._seen: dict[ItemId, _Entry] = {}
        self._hidden: dict[ItemId, bool] = {}
        self._entries: dict[ItemId, _Entry] = {}
        self._by_type: dict[str, set[ItemId]] = defaultdict(set)
        self._by_parent: dict[ItemId | None, set[ItemId]] = defaultdict(set)
        self._by_end: dict[ItemId, set[ItemId]] = defaultdict(set)
        self._by_reference: dict[ItemId, set[ItemId]] = defaultdict(set)

    # kept up to date by the party

    def touched(self, items: Iterable[ItemId]) -> None:
        self._stale.update(items)
        self._hidden.clear()

    def spread(self, changed: set[ItemId]) -> set[ItemId]:
        """The changed items with every item at the other end of an edge that came or went, and with all that hangs
        below an item that was deleted, restored or moved: what live queries need."""
        spread = set(changed)
        known = {item: self._known(item) for item in changed}  # before anything here looks at the new state
        seen: dict[ItemId, _Entry] = {}
        for item, old in known.items():
            record = self._state.records.get(item)
            new = None
            if record is not None:
                new = seen[item] = self._entry(item, record)
            spread |= (_ends(old) if old else set()) ^ (_ends(new) if new else set())
            if old is not None and new is not None and (old.deleted, old.parent) != (new.deleted, new.parent):
                spread |= self._below(item)
        self._seen.update(seen)
        return spread

    def _known(self, item: ItemId) -> _Entry | None:
        """How an item stood when live queries last looked."""
        return self._seen.get(item) or self._entries.get(item) or self._stored_entry(item)

    def _below(self, item: ItemId) -> set[ItemId]:
        found: set[ItemId] = set()
        front = [item]
        while front:
            for child in self.children(front.pop()):
                if child not in found:
                    found.add(child)
                    front.append(child)
        return found

    def checkpointed(self) -> None:
        """Every item is clean again."""
        self._stale.clear()
        self._entries.clear()
        self._seen.clear()
        for index in (self._by_type, self._by_parent, self._by_end, self._by_reference):
            index.clear()

    # the port

    def row(self, item: ItemId) -> Row | None:
        record = self._state.records.get(item)
        if record is None:
            if self._store is None or item in self._state.gone:
                return None
            stored = self._store.item(item)
            return self._stored_row(stored) if stored else None
        return self._record_row(record)

    def scan(
        self, *, type: str | None, parent: ItemId | None, equals: Mapping[str, Value], deleted: Deleted
    ) -> Iterator[ItemId]:
        self._refresh()
        yield from self._overlay(type, parent)
        for item in self._stored(type, parent, equals):
            if not self._is_dirty(item):
                yield item

    def children(self, item: ItemId) -> list[ItemId]:
        self._refresh()
        found = self._clean(self._store.scan("parent = ?", (item,))) if self._store else []
        return sorted([*found, *self._by_parent.get(item, ())])

    def roots(self) -> list[ItemId]:
        """Items that hang below the party's system item."""
        self._refresh()
        found = self._clean(self._store.scan("parent IS NULL", ())) if self._store else []
        return sorted([*found, *self._by_parent.get(None, ())])

    def embedded(self, item: ItemId) -> list[ItemId]:
        return sorted({*self.children(item), *self._state.tree.guests(item)})

    def embedders(self, item: ItemId) -> list[ItemId]:
        home = self._state.home(item)
        parents = {parent for parent in self._state.tree.embeddings(item) if parent is not None}
        return sorted(parents | ({home} if home is not None else set()))

    def links(self, item: ItemId) -> list[ItemId]:
        self._refresh()
        # Two statements: SQLite reads one index each.
        found = (
            {*self._store.scan("source = ?", (item,)), *self._store.scan("target = ?", (item,))} if self._store else ()
        )
        return sorted({*self._clean(found), *self._by_end.get(item, ())})

    def references(self, item: ItemId) -> list[ItemId]:
        row = self.row(item)
        return sorted(references_in(dict(row.values))) if row else []

    def referrers(self, item: ItemId) -> list[ItemId]:
        self._refresh()
        found = self._clean(self._store.referrers(item)) if self._store else []
        return sorted({*found, *self._by_reference.get(item, ())})

    # besides the port

    def hidden(self, item: ItemId) -> bool:
        """Whether an item or anything it hangs below was deleted."""
        return self._below_deleted(item)

    def is_system(self, item: ItemId) -> bool:
        """Whether an item is the party's system item."""
        if any(item[FEED_ID_BYTES:]):  # nearly always, and without a look at the item
            return False
        row = self.row(item)
        return row is not None and row.system

    def created_ms(self, item: ItemId) -> int | None:
        """When an item was made, by its writer's clock: from memory, else from the block that made it."""
        record = self._state.records.get(item)
        if record is not None and record.created_ms is not None:
            return record.created_ms
        local = item_local(item)
        return None if local & ARC_BIT else self._block_time(item_creator(item), local >> POSITION_BITS)

    # inside

    def _is_dirty(self, item: ItemId) -> bool:
        return item in self._entries or item in self._state.gone or item in self._state.dirty

    def _clean(self, items: Iterable[ItemId]) -> list[ItemId]:
        return [item for item in items if not self._is_dirty(item)]

    def _overlay(self, type: str | None, parent: ItemId | None) -> list[ItemId]:
        if parent is not None:
            return list(self._by_parent.get(parent, ()))
        if type is not None:
            return list(self._by_type.get(type, ()))
        return list(self._entries)

    def _stored(self, type: str | None, parent: ItemId | None, equals: Mapping[str, Value]) -> list[ItemId]:
        if self._store is None:
            return []
        for name in self.declared & equals.keys():
            key = index_key(equals[name])
            if key is not None:
                return self._store.with_property(name, key)
        if parent is not None:
            return self._store.scan("parent = ?", (parent,))
        if type is not None:
            return self._store.scan("type = ?", (type,))
        return self._store.scan("1", ())

    def _refresh(self) -> None:
        if not self._stale:
            return
        for item in self._stale:
            old = self._entries.pop(item, None)
            if old is not None:
                self._unindex(item, old)
            record = self._state.records.get(item)
            if record is not None and item in self._state.dirty:
                self._index(item, record)
        self._stale.clear()

    def _entry(self, item: ItemId, record: ItemRecord) -> _Entry:
        genesis = record.genesis
        references = tuple(references_of(record))
        return _Entry(genesis.type, record.deleted, self._state.home(item), genesis.source, genesis.target, references)

    def _stored_entry(self, item: ItemId) -> _Entry | None:
        stored = self._store.item(item) if self._store else None
        if stored is None or self._store is None:
            return None
        references = tuple(self._store.references(item))
        return _Entry(stored.type, bool(stored.deleted), stored.parent, stored.source, stored.target, references)

    def _index(self, item: ItemId, record: ItemRecord) -> None:
        entry = self._entry(item, record)
        references = entry.references
        self._entries[item] = entry
        self._by_type[entry.type].add(item)
        self._by_parent[entry.parent].add(item)
        for end in (entry.source, entry.target):
            if end is not None:
                self._by_end[end].add(item)
        for target in references:
            self._by_reference[target].add(item)

    def _unindex(self, item: ItemId, entry: _Entry) -> None:
        self._by_type[entry.type].discard(item)
        self._by_parent[entry.parent].discard(item)
        for end in (entry.source, entry.target):
            if end is not None:
                self._by_end[end].discard(item)
        for target in entry.references:
            self._by_reference[target].discard(item)

    def _record_row(self, record: ItemRecord) -> Row:
        genesis = record.genesis
        values = record.values()
        home = self._state.home(genesis.item)
        return Row(
            item=genesis.item,
            type=genesis.type,
            model=genesis.model,
            parent=home,
            deleted=record.deleted or self._below_deleted(home),
            values=values,
            source=genesis.source,
            target=genesis.target,
            target_party=genesis.target_party,
            created=_created(genesis.item, genesis.depth),
            view_class=_view_class(genesis.inception_key, values),
            system=is_system_item(genesis.item, genesis.type),
            time_of=self.created_ms,
        )

    def _stored_row(self, stored: ItemRow) -> Row:
        if stored.vals is None:  # not a property set: its value is in the record
            record = self._state.record(ItemId(stored.item))
            assert record is not None, stored.item.hex()
            return self._record_row(record)
        values = decode_values(stored.vals)
        return Row(
            item=ItemId(stored.item),
            type=stored.type,
            model=stored.model,
            parent=stored.parent,
            deleted=bool(stored.deleted) or self._below_deleted(stored.parent),
            values=values,
            source=stored.source,
            target=stored.target,
            target_party=PartyKey(stored.target_party) if stored.target_party else None,
            created=_created(ItemId(stored.item), stored.depth),
            view_class=_view_class(stored.inception or b"", values),
            system=is_system_item(ItemId(stored.item), stored.type),
            time_of=self.created_ms,
        )

    def _below_deleted(self, parent: ItemId | None) -> bool:
        """Whether anything from `parent` upwards was deleted; remembered until something changes."""
        path: list[ItemId] = []
        answer = False
        while parent is not None:
            known = self._hidden.get(parent)
            if known is not None:
                answer = known
                break
            path.append(parent)
            record = self._state.records.get(parent)
            if record is not None:
                deleted, above = record.deleted, self._state.home(parent)
            else:
                stored = self._store.item(parent) if self._store and parent not in self._state.gone else None
                deleted, above = (bool(stored.deleted), stored.parent) if stored else (False, None)
            if deleted:
                answer = True
                break
            parent = above
        for item in path:
            self._hidden[item] = answer
        return answer


def _ends(entry: _Entry) -> set[ItemId]:
    return {end for end in (entry.parent, entry.source, entry.target, *entry.references) if end is not None}


def _created(item: ItemId, depth: int) -> Stamp:
    local = item_local(item)
    return Stamp(depth, FeedId(item[:8]), local >> 16, local & 0xFFFF)


def _view_class(inception_key: bytes, values: Mapping[str, Value]) -> str | None:
    value = values.get(VIEW_CLASS) if inception_key else None
    return value if isinstance(value, str) else None
