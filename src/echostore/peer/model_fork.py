"""Forking an item to another version of its model: how custom models evolve.

    old item  counter@1                          new item  counter@2, forked_from = old
      3 operations          --- convert --->       the operations that `convert` made of its value
      deleted               --- link "forked-to" -->

An item names its model and version for life, so that every peer folds it with the same rules. A new version is a new
item. All of this is one batch: peers see either the old item or the new one. Peers that lack the new version keep the
new item opaque and whole, and revive it when they register the class.

What hangs below the old item or is embedded in it moves along, with its name, foreign keys and access rule. Links and
references to the old item stay as they are; `successor` follows them.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from echostore.kernel.errors import ModelFailed, Refused, UsageError
from echostore.kernel.frozen import plain_copy
from echostore.kernel.ids import item_text
from echostore.kernel.items.record import DELETED_KEY
from echostore.kernel.models.ordered_fold import OrderedFold
from echostore.kernel.models.property_set import Change, Set
from echostore.kernel.values import Value
from echostore.peer.item_kinds import CustomItem
from echostore.peer.items import Item
from echostore.wire.values import value_from_bytes

if TYPE_CHECKING:
    from echostore.peer.party import Party

FORKED_TO = "forked-to"
"""The type of the link from an item to the one that continues it."""

Convert = Callable[[Value], Iterable[Value]]
"""From the old item's value to the operations that make up the new item."""


def fork_item(item: Item, version: int, convert: Convert | None = None) -> Item:
    """Continue an item under another version of its model. Without `convert` the new version gets the operations of
    the old one as they are; it must then understand them. When the new version can't apply what it gets, nothing
    happens."""
    party = item.party
    with party.writing():
        _check(party, item, version)
        operations = _operations(item, convert)
        with party.batch():
            made = _create(item, version)
            for operation in operations:
                _apply(made, operation)
            _carry_over(item, made)
            party.link(item, made, type=FORKED_TO)
            item.delete()
        return made


def successor(item: Item) -> Item:
    """The item that continues this one, over all forks; the item itself when it was not forked. Of several forks made
    at the same time, the one with the lowest id continues it."""
    at, seen = item, {item.id}
    while True:
        ahead = [target for link in at.links(FORKED_TO) if (target := _continues(link, at)) and target.id not in seen]
        if not ahead:
            return at
        at = min(ahead, key=lambda target: target.id)
        seen.add(at.id)


def _continues(link: Item, item: Item) -> Item | None:
    """Where a link from this item leads, if that item says so itself: anybody can draw a link."""
    source, target = link.source, link.target
    if source is None or target is None or source.id != item.id or target.party.key != item.party.key:
        return None
    return target if target._record().genesis.forked_from == item.id else None


def _check(party: "Party", item: Item, version: int) -> None:
    shown = f"{item.model}@{version}"
    if version == item.version:
        raise UsageError(f"item {item_text(item.id)[:8]} is a {shown} already")
    if not party.peer.models.known(item.model, version):
        raise Refused(
            f"the model {shown} is not registered here",
            next_step="Register its class with peer.models.register(...).",
        )
    if item.deleted:
        later = successor(item)
        where = f"; it continues as {item_text(later.id)[:8]}" if later.id != item.id else ""
        raise Refused(f"item {item_text(item.id)[:8]} is deleted{where}")


def _operations(item: Item, convert: Convert | None) -> list[Value]:
    model = item._record().model
    if convert is not None:
        if getattr(model, "opaque", False):
            raise Refused(
                f"the model {item.model}@{item.version} is not registered here, so its value can't be converted",
                next_step="Register that version too.",
            )
        return list(convert(plain_copy(item.value())))
    if not isinstance(model, OrderedFold):
        raise UsageError(f"a {item.model}@{item.version} does not keep its operations", next_step="Give a `convert`.")
    return [value_from_bytes(kept.operation) for kept in model.operations]


def _create(item: Item, version: int) -> CustomItem:
    record = item._record()
    made = item.party._create(
        record.genesis.model,
        version,
        type=record.genesis.type,
        parent=item.parent,
        name="",
        properties={},
        forked_from=record.item,
    )
    if not isinstance(made, CustomItem):
        raise UsageError(f"a {record.genesis.model} is not a model of an application's own")
    return made


def _apply(made: CustomItem, operation: Value) -> None:
    try:
        made.apply(operation)
    except (ModelFailed, Refused) as error:
        raise Refused(
            f"the new version can't take over: {error.what}", next_step="Give a `convert` that it understands."
        ) from error


def _carry_over(old: Item, made: Item) -> None:
    """The metadata of the old item, and what hangs below it."""
    metadata = old._record().metadata.value()
    changes: list[Change] = [Set((key,), value) for key, value in metadata.items() if key != DELETED_KEY]
    if changes:
        made._write_metadata(*changes)
    children = old.children(deleted=True)
    kept = {child.id for child in children}
    for child in children:
        child.move(made)
    for guest in old.embedded(deleted=True):
        if guest.id not in kept:
            guest.embed_in(made)
