"""The tree of items as rows in drawing order, and as a drawing. Rows and no nesting: trees may be deeper than stacks."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from echostore.cli.opening import item_id
from echostore.cli.output import Column
from echostore.cli.values import one_line, short, shown, to_json
from echostore.kernel.errors import ModelFailed
from echostore.kernel.ids import ItemId, item_text

if TYPE_CHECKING:
    from echostore.kernel.items.record import ItemRecord
    from echostore.peer.items import Item
    from echostore.peer.party import Party
    from echostore.peer.view_reading import Places

SUMMARY_WIDTH = 70
"""Characters of values in a line of the drawing."""

NODES = (
    Column("depth", "DEPTH"),
    Column("item", "ITEM", short),
    Column("parent", "PARENT"),
    Column("model", "MODEL"),
    Column("type", "TYPE"),
    Column("name", "NAME"),
    Column("embedded", "EMBEDDED"),
    Column("deleted", "DELETED"),
    Column("summary", "SUMMARY"),
)


def nodes(
    party: "Party", root: "Item | None", *, depth_max: int | None = None, deleted: bool = False
) -> Iterator[dict[str, Any]]:
    """The items below a root, or of the whole party, each after its parent. Deleted ones are left out unless wanted."""
    first = [root] if root is not None else party.roots(deleted=deleted)
    waiting: list[tuple[Item, int, str | None, bool, bool]] = [
        (item, 0, None, False, at == len(first) - 1) for at, item in enumerate(first)
    ]
    waiting.reverse()
    while waiting:
        item, depth, parent, embedded, last = waiting.pop()
        yield _row(item._record(), parent, depth, embedded=embedded, deleted=item.deleted, last=last)
        # What is embedded here has its home elsewhere, and is drawn in full there.
        if embedded or (depth_max is not None and depth + 1 >= depth_max):
            continue
        home = {child.id for child in item.children(deleted=deleted)}
        below = item.embedded(deleted=deleted)
        here = item_id(item)
        for at in range(len(below) - 1, -1, -1):
            child = below[at]
            waiting.append((child, depth + 1, here, child.id not in home, at == len(below) - 1))


def nodes_of(top: ItemId, records: "Mapping[ItemId, ItemRecord]", places: "Places") -> Iterator[dict[str, Any]]:
    """The same of records that were read without their party."""
    waiting: list[tuple[ItemId, int, str | None, bool, bool]] = [(top, 0, None, False, True)]
    while waiting:
        item, depth, parent, embedded, last = waiting.pop()
        yield _row(records[item], parent, depth, embedded=embedded, deleted=records[item].deleted, last=last)
        below = list(places.get(item, {}).items()) if not embedded else []
        here = item_text(item)
        for at in range(len(below) - 1, -1, -1):
            child, guest = below[at]
            waiting.append((child, depth + 1, here, guest, at == len(below) - 1))


def _row(
    record: "ItemRecord", parent: str | None, depth: int, *, embedded: bool, deleted: bool, last: bool
) -> dict[str, Any]:
    return {
        "item": item_text(record.item),
        "parent": parent,
        "depth": depth,
        "embedded": embedded,
        "deleted": deleted,
        "model": record.genesis.model,
        "type": record.genesis.type,
        "name": record.name,
        "last": last,
        "summary": summary(record),
    }


def draw(records: Iterator[dict[str, Any]], *, title: str | None) -> Iterator[str]:
    """The lines of the drawing."""
    if title is not None:
        yield one_line(title)
    shift = 0 if title is None else 1
    bars: list[bool] = []  # per level: whether more follows there
    for record in records:
        level = record["depth"] + shift
        del bars[max(0, level - 1) :]
        rails = "".join("│  " if more else "   " for more in bars)
        branch = "" if level == 0 else "└─ " if record["last"] else "├─ "
        if level:
            bars.append(not record["last"])
        mark = "↪ " if record["embedded"] else ""
        label = record["type"] or record["model"]
        model = "" if not record["type"] or record["model"] == "property-set" else f" ({record['model']})"
        name = f" {one_line(record['name'], 40)!r}" if record["name"] else ""
        tail = f"  {record['summary']}" if record["summary"] else ""
        gone = " (deleted)" if record["deleted"] else ""
        yield f"{rails}{branch}{mark}{one_line(label)} {short(record['item'])}{model}{name}{gone}{tail}"


def summary(record: "ItemRecord") -> str:
    """What an item holds, in one short line."""
    try:
        value = record.model.value()
    except ModelFailed as error:
        return f"! {one_line(error.what, SUMMARY_WIDTH)}"
    if isinstance(value, dict):
        text = "  ".join(f"{one_line(key)}={one_line(_brief(element), 30)}" for key, element in value.items())
    elif isinstance(value, list):
        noun = "post" if record.genesis.model == "threaded-log" else "element"
        text = f"{len(value)} {noun}{'' if len(value) == 1 else 's'}"
    else:
        text = "" if value is None else one_line(repr(value) if isinstance(value, str) else str(to_json(value)))
    return one_line(text, SUMMARY_WIDTH)


def _brief(value: Any) -> str:
    return shown(value) if not isinstance(value, str) or " " not in value else repr(value)
