"""Which groups the rows of an items.db belong to, and what each counts there (`row_checks`)."""

from zlib import crc32

from echostore.store.item_tables import ItemRow
from echostore.store.row_checks import Group, Tally, model_key

TOUCH_SHIFT = 40
"""A touch counts as feed number << 40 | seq."""


def groups_of(row: ItemRow) -> list[tuple[Group, bytes]]:
    """The groups that an item belongs to, apart from all and from its model."""
    found = [(Group.TYPE, row.type.encode()), (Group.PARENT, row.parent or b"")]
    edges = ((Group.ORIGIN, row.origin), (Group.SOURCE, row.source), (Group.TARGET, row.target))
    found += [(group, end) for group, end in edges if end is not None]
    return [*found, (Group.VIEWS, b"")] if row.inception is not None else found


def count_item(row: ItemRow, sign: int, tally: Tally) -> None:
    value = sign * crc32(row.item)
    tally.add(Group.ALL, b"", value, sign)
    model = model_key(row.model, row.version)
    tally.add(Group.MODEL, model, sign * crc32(model), sign)
    for group, key in groups_of(row):
        tally.add(group, key, value, sign)


def count_reference(target: bytes, item: bytes, sign: int, tally: Tally) -> None:
    tally.add(Group.REFERRERS, target, sign * crc32(item), sign)
    tally.add(Group.REFERENCES, item, sign * crc32(target), sign)


def touch_value(number: int, seq: int) -> int:
    return number << TOUCH_SHIFT | seq
