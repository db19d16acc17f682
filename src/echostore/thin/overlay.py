"""Own batches on top of what the root said: the view of a leaf that writes ahead.

    view  =  the answer at the current tick  +  own operations that it does not include yet

An answer of one step (filter, order, limit) is computed again with the operations applied. What can't be computed here,
because an item's state is not known or the query walks, projects or asks what only the root knows, is shown as the root
said it and marked *pending*: it will be right when the root has spoken, and it is never guessed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from echostore.kernel.ids import FeedId, ItemId, PartyKey
from echostore.kernel.items.operations import GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import DELETED_KEY
from echostore.kernel.items.tree import MOVE
from echostore.kernel.models.property_set import DELETED, Set
from echostore.kernel.models.threaded_log import Post
from echostore.kernel.query.evaluate import Entry, compile_stage, entry_maker
from echostore.kernel.query.fields import Attribute, Field
from echostore.kernel.query.filters import And, Filter, Not, Or, Test
from echostore.kernel.query.source import Row
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.values import Path, Value
from echostore.thin.operations import LIST, LOG, PROPERTY_SET, TEXT, decoded
from echostore.wire.index_spec import IndexItem, IndexQuery
from echostore.wire.leaf_operations import ListEdit, TextEdit

_ONLY_THE_ROOT_KNOWS = (Attribute.CREATED.value, Attribute.VIEW_CLASS.value)

Known = Callable[[ItemId], IndexItem | None]
"""What is known of an item from any answer."""


class Overlay:
    """Operations of one's own, in order."""

    def __init__(self, party: PartyKey, feed: FeedId, operations: Iterable[tuple[ItemId, bytes]]) -> None:
        self._feed = feed
        self.by_item: dict[ItemId, list[Any]] = {}
        for item, delta in operations:
            self.by_item.setdefault(item, []).append(decoded(party, feed, delta))

    def __bool__(self) -> bool:
        return bool(self.by_item)

    def view(self, asked: IndexQuery, items: Sequence[IndexItem], known: Known) -> tuple[list[IndexItem], bool]:
        """The answer with own operations applied, and whether some of it is pending."""
        if not self.by_item:
            return list(items), False
        if asked.query is None:
            return self._one(asked, items)
        plan = _plan(asked.query)
        return (list(items), True) if plan is None else self._many(asked.query, plan, items, known)

    def _one(self, asked: IndexQuery, items: Sequence[IndexItem]) -> tuple[list[IndexItem], bool]:
        assert asked.item is not None, "a spec is a query or an item"
        shown, exact = self.apply(asked.item, items[0] if items else None)
        return ([] if shown is None else [shown]), not exact

    def _many(
        self, query: QuerySpec, plan: "_Plan", items: Sequence[IndexItem], known: Known
    ) -> tuple[list[IndexItem], bool]:
        pending = False
        states = {each.item: each for each in items}
        for item in self.by_item:
            before = states.get(item) or known(item)
            after, exact = self.apply(item, before)
            pending = pending or not exact
            if after is not None:
                states[item] = after
        deleted = {item for item, state in states.items() if state.deleted}
        passed = []
        for state in states.values():
            if state.parent in deleted and not state.deleted:
                state = replace(state, deleted=True)
            row = _row(state)
            if plan.test(row):
                passed.append((plan.entry(state.item, row), state))
        passed.sort(key=lambda pair: pair[0])
        if query.limit is not None:
            # What left a full answer makes room for an item that only the root knows.
            short = len(items) == query.limit and len(passed) < query.limit
            return [state for _, state in passed[: query.limit]], pending or short
        return [state for _, state in passed], pending

    def apply(self, item: ItemId, state: IndexItem | None) -> tuple[IndexItem | None, bool]:
        """An item with its own operations, and whether all of them could be carried out here."""
        exact = True
        for operation in self.by_item.get(item, ()):
            done = self._step(state, operation)
            if done is None:
                exact = False
            else:
                state = done
        return state, exact

    def _step(self, state: IndexItem | None, operation: Any) -> IndexItem | None:
        """One operation; None when it can't be carried out here."""
        if isinstance(operation, ItemOperation) and operation.field == GENESIS:
            return _born(operation) if state is None else state
        if state is None:
            return None
        if isinstance(operation, TextEdit):
            return _edited_text(state, operation) if state.model == TEXT else None
        if isinstance(operation, ListEdit):
            return _edited_list(state, operation) if state.model == LIST else None
        body = operation.body
        if operation.field == METADATA:
            return _with_metadata(state, body)
        if operation.field == PLACEMENT:
            kind, parent = body
            return replace(state, parent=parent) if kind == MOVE else None
        if operation.field == LOG and isinstance(body, Post) and state.model == LOG:
            return replace(state, values={"value": [*state.values.get("value", []), _shown_post(body, self._feed)]})
        if operation.field == PROPERTY_SET and state.model == PROPERTY_SET:
            return _with_properties(state, body)
        return None


def _born(operation: ItemOperation) -> IndexItem:
    genesis = operation.body
    empty: dict[str, Any] = {TEXT: {"value": ""}, LIST: {"value": []}, LOG: {"value": []}}
    return IndexItem(
        genesis.item,
        genesis.type,
        genesis.model,
        empty.get(genesis.model, {}),
        genesis.parent,
        source=genesis.source,
        target=genesis.target,
    )


def _with_metadata(state: IndexItem, changes: Iterable[Any]) -> IndexItem:
    for each in changes:
        if isinstance(each, Set) and each.path == (DELETED_KEY,):
            state = replace(state, deleted=each.value is True)
    return state


def _with_properties(state: IndexItem, changes: Iterable[Any]) -> IndexItem | None:
    values: dict[str, Value] = dict(state.values)
    for each in changes:
        if not isinstance(each, Set) or not _put(values, each.path, each.value):
            return None
    return replace(state, values=values)


def _put(values: dict[str, Value], path: Path, value: Value) -> bool:
    """Set a value in nested maps, which are copied on the way. False where a step leads through something else."""
    for step in path[:-1]:
        inner = values.get(step, {})
        if not isinstance(inner, dict):
            return False
        values[step] = values = dict(inner)
    if value is DELETED:
        values.pop(path[-1], None)
    else:
        values[path[-1]] = value
    return True


def _edited_text(state: IndexItem, edit: TextEdit) -> IndexItem | None:
    text = state.values.get("value")
    if not isinstance(text, str):
        return None
    place = nearest(text, edit)
    if place is None:
        return None
    return replace(state, values={"value": text[:place] + edit.inserted + text[place + len(edit.removed) :]})


def nearest(text: str, edit: TextEdit) -> int | None:
    """Where an edit belongs in a text that others have changed: the nearest place with the same surroundings."""
    wanted = edit.before + edit.removed
    start = edit.position - len(edit.before)
    if start >= 0 and text.startswith(wanted, start) and edit.position <= len(text):
        return edit.position
    places = []
    found = text.find(wanted) if wanted else -1
    while found >= 0:
        places.append(found + len(edit.before))
        found = text.find(wanted, found + 1)
    if places:
        return min(places, key=lambda place: (abs(place - edit.position), place))
    return None if edit.removed else min(edit.position, len(text))


def _edited_list(state: IndexItem, edit: ListEdit) -> IndexItem | None:
    elements = state.values.get("value")
    if not isinstance(elements, list):
        return None
    position, removed = min(edit.position, len(elements)), list(edit.removed)
    if elements[position : position + len(removed)] != removed:
        return None
    kept = [*elements[:position], *edit.inserted, *elements[position + len(removed) :]]
    return replace(state, values={"value": kept})


def _shown_post(body: Post, feed: FeedId) -> dict[str, Value]:
    """A post of one's own before the root has it: it has no place and no time yet."""
    reply = body.reply_to
    answered = None if reply is None else str(reply if hasattr(reply, "feed") else reply.of(feed))
    return {
        "id": None,
        "author": feed.hex(),
        "time_ms": None,
        "body": body.body,
        "reply_to": answered,
        "dangling": False,
    }


# Queries that can be computed again


class _Plan:
    """The compiled test and order of a query of one step."""

    __slots__ = ("entry", "test")

    def __init__(self, query: QuerySpec) -> None:
        self.test: Test = compile_stage(query.stages[0])
        self.entry: Callable[[Any, Row], Entry] = entry_maker(query.order)


@lru_cache(maxsize=1024)
def _plan(query: QuerySpec) -> _Plan | None:
    """None for a query that only the root can answer."""
    if len(query.stages) != 1 or query.select is not None or query.reduce is not None:
        return None
    fields = [*_fields(query.stages[0].filter), *(each.field for each in query.order)]
    if any(each.attribute and each.steps[0] in _ONLY_THE_ROOT_KNOWS for each in fields):
        return None
    return _Plan(query)


def _fields(condition: Filter) -> list[Field]:
    if isinstance(condition, And | Or):
        return [field for part in condition.parts for field in _fields(part)]
    return _fields(condition.part) if isinstance(condition, Not) else [condition.field]


def _row(state: IndexItem) -> Row:
    values: Mapping[str, Value] = state.values
    return Row(state.item, state.type, state.model, state.parent, state.deleted, values, state.source, state.target)
