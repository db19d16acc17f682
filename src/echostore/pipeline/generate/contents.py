"""What is written: property changes out of a pool that every party shares, and the few that are made one by one."""

import random
from datetime import UTC, datetime, timedelta
from typing import Final

from echostore.kernel.ids import ItemId
from echostore.kernel.items.operations import GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import DELETED_KEY, NAME_KEY, Genesis
from echostore.kernel.items.tree import MOVE
from echostore.kernel.models.property_set import DELETED, Add, Change, Increment, Operation, PropertySet, Remove, Set
from echostore.kernel.values import Value
from echostore.pipeline.generate.encoding import property_part
from echostore.wire.values import value_bytes

POOL: Final = 8192
"""Different single changes. They are encoded once; a message takes one of them."""

_TEXT: Final = (
    "ask bake bring build buy call carry check clean collect cook count draw drive fetch fill find fix fold follow give "
    "hang hold invite keep learn lend lift mend move open order pack paint pay plan plant post read repair ring save send "
    "share sing sort start store teach tell thank visit wait walk wash watch water write bicycle boat books bread bridge "
    "camera candle chair coffee concert dinner evening ferry garden guitar harbour island kitchen ladder letter library "
    "market mountain museum neighbour orchard picnic postcard river saturday station summer sunday tent ticket weekend"
)
WORDS: Final = _TEXT.split()

PATHS: Final = ("text", "notes", "place", "done", "priority", "due", "effort", "plan")
TAGS: Final = ("home", "garden", "travel", "music", "kitchen")


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def value_for(path: str, chance: random.Random) -> Value:
    """A value as that property of a task has it."""
    if path == "done":
        return chance.random() < 0.5
    if path == "priority":
        return chance.randrange(-5, 100)
    if path == "due":
        return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(minutes=chance.randrange(500_000))
    if path == "effort":
        return chance.randrange(1000) / 8
    if path == "plan":
        return {"step": words(chance, 2), "parts": [words(chance, 1), chance.randrange(9), None]}
    return words(chance, chance.randrange(8, 32))


class Contents:
    """The pool of one seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"contents {seed}")
        self.pool: list[bytes] = []
        for _ in range(POOL):
            # Three of four messages write text, so that a message has about 150 bytes.
            path = chance.choice(PATHS[:3]) if chance.random() < 0.75 else chance.choice(PATHS)
            self.pool.append(property_part((Set((path,), value_for(path, chance)),)))


def first_properties(chance: random.Random) -> Operation:
    return (
        Set(("text",), words(chance, 6)),
        Set(("done",), False),
        Set(("priority",), chance.randrange(9)),
    )


def odd_change(chance: random.Random) -> Operation:
    """What a column of single writes does not hold: removals, sets, counters, deep paths, several at once."""
    tag = chance.choice(TAGS)
    choices: tuple[tuple[Change, ...], ...] = (
        (Set((chance.choice(PATHS),), DELETED),),
        (Add(("tags",), tag, value_bytes(tag)),),
        (Remove(("tags",), tag, value_bytes(tag), ()),),
        (Increment(("visits",), chance.randrange(1, 5), None),),
        (Set(("plan", "step"), words(chance, 2)),),
        (Set(("text",), words(chance, 5)), Set(("done",), True)),
    )
    return chance.choice(choices)


def genesis_operations(
    item: ItemId, model: str, parent: ItemId | None, depth: int, chance: random.Random
) -> list[ItemOperation]:
    kind = "task" if model == PropertySet.name else "note"
    operations = [ItemOperation(item, GENESIS, Genesis(item, model, 1, kind, parent, depth))]
    if model == PropertySet.name:
        operations.append(ItemOperation(item, PropertySet.name, first_properties(chance)))
    return operations


def name_operation(item: ItemId, chance: random.Random) -> ItemOperation:
    return ItemOperation(item, METADATA, (Set((NAME_KEY,), words(chance, 3)),))


def delete_operation(item: ItemId, chance: random.Random) -> ItemOperation:
    """Deleted more often than restored."""
    return ItemOperation(item, METADATA, (Set((DELETED_KEY,), chance.random() < 0.7),))


def move_operation(item: ItemId, parent: ItemId | None) -> ItemOperation:
    return ItemOperation(item, PLACEMENT, (MOVE, parent))
