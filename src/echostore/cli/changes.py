"""Messages as history, watch and tail tell them: which item, what was done to it, by whom and when."""

from typing import TYPE_CHECKING, Any

from echostore.cli.output import Column
from echostore.cli.values import iso_ms, one_line, short, short_place, shown, to_json
from echostore.kernel.ids import ItemId, item_text

if TYPE_CHECKING:
    from echostore.kernel.items.operations import ItemOperation
    from echostore.peer.delivered import Delivered
    from echostore.peer.party import Party

VALUE_WIDTH = 60
"""Characters of a value in a line for people."""

CHANGES = (
    Column("time", "TIME"),
    Column("author", "AUTHOR"),
    Column("place", "AT", short_place, style="cyan"),
    Column("changes", "WHAT", lambda changes: "; ".join(change["what"] for change in changes)),
)


def change_record(party: "Party", message: "Delivered", *, item: ItemId | None = None) -> dict[str, Any]:
    """A message for programs; of one item if given. `what` of each change is the line for people."""
    feed = party.runtime.processor.feed_key(message.feed).hex()
    return {
        "time": iso_ms(message.time_ms),
        "author": author(party, message.writer.identity),
        "identity": message.writer.identity.hex(),
        "place": f"{feed}:{message.seq}",
        "feed": feed,
        "seq": message.seq,
        "depth": message.depth,
        "changes": [operation_record(op) for op in message.operations if item is None or op.item == item],
    }


def change_line(record: dict[str, Any], *, with_items: bool) -> str:
    parts = [
        f"{short(change['item'])} {change['what']}" if with_items else change["what"] for change in record["changes"]
    ]
    return f"{record['time']}  {short_place(record['place'])}  {one_line(record['author']) or '?'}  {one_line('; '.join(parts))}"


def author(party: "Party", identity: bytes) -> str:
    machine = party.runtime.processor.membership.machine
    return next((member.name for member in machine.members if member.identity == identity), "")


def operation_record(operation: "ItemOperation") -> dict[str, Any]:
    from echostore.kernel.items.operations import GENESIS, METADATA, PLACEMENT

    match operation.field:
        case "genesis":
            assert operation.field == GENESIS
            done = _genesis(operation.body)
        case "placement":
            assert operation.field == PLACEMENT
            done = _placement(operation.body)
        case "metadata":
            assert operation.field == METADATA
            done = _metadata(operation.body)
        case "property-set":
            done = _properties(operation.body)
        case "threaded-log":
            done = _log(operation.body)
        case field:
            done = {"what": f"{field} edited"}
    return {"item": item_text(operation.item), "field": operation.field, **done}


def _genesis(genesis: Any) -> dict[str, Any]:
    label = f"{genesis.model}@{genesis.version}"
    return {
        "what": f"created as {label}" + (f" of type {genesis.type}" if genesis.type else ""),
        "model": genesis.model,
        "model_version": genesis.version,
        "type": genesis.type,
        "parent": item_text(genesis.parent) if genesis.parent else None,
    }


def _placement(body: tuple[int, ItemId | None]) -> dict[str, Any]:
    from echostore.kernel.items.tree import EMBED, MOVE

    kind, parent = body
    verb = "moved below" if kind == MOVE else "embedded in" if kind == EMBED else "no longer embedded in"
    where = short(item_text(parent)) if parent else "the top"
    return {"what": f"{verb} {where}", "parent": item_text(parent) if parent else None}


def _properties(changes: Any) -> dict[str, Any]:
    done = [_property(change) for change in changes]
    return {"what": ", ".join(each["what"] for each in done), "properties": done}


def _metadata(changes: Any) -> dict[str, Any]:
    done = [_property(change) for change in changes]
    return {"what": ", ".join(_metadata_words(each) for each in done), "properties": done}


def _metadata_words(done: dict[str, Any]) -> str:
    """What a change of metadata means to a person, where it means something."""
    match done["path"], done["done"], done.get("value"):
        case ["deleted"], "set", True:
            return "item deleted"
        case ["deleted"], "deleted", _:
            return "item restored"
        case ["display_name"], "set", str(name):
            return f"named {one_line(name, VALUE_WIDTH)!r}"
    return f"metadata {done['what']}"


def _property(change: Any) -> dict[str, Any]:
    from echostore.kernel.models.property_set import DELETED, Add, Increment, Restore, Set

    if isinstance(change, Restore):
        path, verb, value = change.key.path, "restored", None
    elif isinstance(change, Set):
        path, verb, value = change.path, "deleted" if change.value is DELETED else "set", change.value
    elif isinstance(change, Increment):
        path, verb, value = change.path, "incremented", change.delta
    else:
        path, verb, value = change.path, "added" if isinstance(change, Add) else "removed", change.element
    name = ".".join(path)
    if verb in ("restored", "deleted"):
        return {"what": f"{name} {verb}", "path": list(path), "done": verb}
    text = one_line(shown(value), VALUE_WIDTH)
    what = {"set": f"{name} = {text}", "incremented": f"{name} += {text}"}.get(verb, f"{name}: {text} {verb}")
    return {"what": what, "path": list(path), "done": verb, "value": to_json(value)}


def _log(body: Any) -> dict[str, Any]:
    from echostore.kernel.models.threaded_log import Post, Retention, Retract

    if isinstance(body, Post):
        return {"what": f"posted {one_line(shown(body.body), VALUE_WIDTH)}", "body": to_json(body.body)}
    if isinstance(body, Retention):
        return {"what": f"retention {body.count_max} posts, {body.age_ms_max} ms"}
    return {"what": "post retracted" if isinstance(body, Retract) else "post revived"}
