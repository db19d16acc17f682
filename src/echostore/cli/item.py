"""`echostore item`: look at items now, in the past, and as they change. What writes them is in `item_write`."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from echostore.cli import item_write
from echostore.cli.changes import CHANGES, change_line, change_record
from echostore.cli.moments import parse_duration_s, parse_moment
from echostore.cli.opening import find_item, item_id, open_party, reading
from echostore.cli.options import (
    FLAG,
    IN_PARTY,
    LISTING_IN_PARTY,
    Count,
    InParty,
    ListingInParty,
    Name,
    PartyChoice,
    examples,
)
from echostore.cli.output import Column, Form, Output
from echostore.cli.past import item_then, party_then, with_running
from echostore.cli.tree import NODES, draw, nodes
from echostore.cli.values import compact, one_line, parse_path, short, shown, shown_json, to_json
from echostore.kernel.errors import ModelFailed, NotFound

if TYPE_CHECKING:
    from echostore.kernel.ids import ItemId
    from echostore.peer.items import Item
    from echostore.peer.peer import Peer

app = App(
    name="item",
    help="Items: read, write, follow, look back.",
    help_prologue=examples("echostore item tree", "echostore item set 69e5962b done=true"),
)

DIFFERENCES = (
    Column("path", "PATH", lambda path: ".".join(path)),
    Column("kind", "CHANGE"),
    Column("before", "BEFORE", shown_json),
    Column("after", "AFTER", shown_json),
)

At = Annotated[str | None, Parameter(name="--at")]


@app.command(help_prologue=examples("echostore item tree", "echostore item tree @Summer --at 10m --depth 2"))
def tree(
    item: Name | None = None,
    /,
    *,
    at: At = None,
    depth: Count = None,
    deleted: Annotated[bool, FLAG] = False,
    options: ListingInParty = LISTING_IN_PARTY,
) -> None:
    """Draw the tree of items: type, short id, name and values. ↪ marks one that is embedded besides its home.

    Parameters
    ----------
    item
        Where to start: id, unique prefix, @name or locator; without it, the whole party.
    at
        As of a moment: 10m (ago), an ISO time, an anchor, or an epoch (epoch:3).
    depth
        How many levels to show.
    deleted
        Show deleted items too, marked as such.
    """
    output = Output.of(options)
    with reading(options) as peer:
        root = None if item is None else _found(peer, options, item, at)
        party = root.party if root is not None else open_party(peer, options.party)
        if at is not None and root is None:
            party = party_then(options, party, at)
        records = nodes(party, root, depth_max=depth, deleted=deleted)
        if output.form is Form.TEXT:
            output.document({}, draw(records, title=None if root is not None else party.title))
        else:
            rows = ({name: value for name, value in record.items() if name != "last"} for record in records)
            output.table("items", NODES, rows, party=party.key.hex())


@app.command(help_prologue=examples("echostore item get 69e5962b", "echostore item get @Summer address.city --at 2h"))
def get(item: Name, path: str | None = None, /, *, at: At = None, options: InParty = IN_PARTY) -> None:
    """Show an item, or one of its values.

    Parameters
    ----------
    item
        Id, unique prefix, @name, locator, or - to read it from standard input.
    path
        Where the value is: done, address.city, or ["a.b","c"]; in a list, its place.
    at
        As of a moment: 10m (ago), an ISO time, an anchor, or an epoch (epoch:3).
    """
    output = Output.of(options)
    with reading(options) as peer:
        found = _found(peer, options, item, at)
        if path is not None:
            steps = parse_path(path)
            value = _walk(found.value(), steps)
            output.document({"item": item_id(found), "path": list(steps), "value": to_json(value)}, shown(value))
        elif output.form is Form.TEXT and found.model == "text":
            output.raw(found.value())
        else:
            fields = item_fields(found)
            output.document(fields, _lines(fields, found))


def _found(peer: "Peer", options: PartyChoice, text: str, at: str | None) -> "Item":
    return find_item(peer, options, text) if at is None else item_then(peer, options, text, at)


@app.command(help_prologue=examples("echostore item history 69e5962b", "echostore item history @Summer --nl"))
def history(item: Name, /, *, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List every message that wrote an item: who, when, what.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    """
    output = Output.of(options)
    with reading(options) as peer:
        found = find_item(peer, options, item)
        stream = found.stream()
        if stream.compacted:
            output.warn("messages that an epoch stands for are not here any more: what they wrote is not listed")
        records = (change_record(found.party, message, item=found.id) for message in stream)
        output.table("revisions", CHANGES, records, item=item_id(found), compacted=stream.compacted)


@app.command(help_prologue=examples("echostore item diff 69e5962b 1h", "echostore item diff @Summer 2d 1d --json"))
def diff(item: Name, before: str, after: str = "now", /, *, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """Show what changed in an item between two moments.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    before
        The earlier moment: 10m (ago), an ISO time, an anchor, or an epoch (epoch:3).
    after
        The later moment.
    """
    from echostore.kernel.models.property_set import DELETED

    output = Output.of(options)
    with reading(options) as peer:
        found = find_item(peer, options, item)
        earlier, later = parse_moment(before), None if after == "now" else parse_moment(after)
        moments = [moment for moment in (earlier, later) if moment is not None]
        differences = with_running(options, found.party, moments, lambda: found.diff(earlier, later))
        records = [
            {
                "path": list(difference.path),
                "kind": difference.kind,
                "before": None if difference.before is DELETED else to_json(difference.before),
                "after": None if difference.after is DELETED else to_json(difference.after),
            }
            for difference in differences
        ]
        output.table("differences", DIFFERENCES, records, empty="no difference", item=item_id(found))


@app.command(
    help_prologue=examples("echostore item watch", "echostore item watch @Summer --nl --count 1 --timeout 30s")
)
def watch(
    item: Name | None = None,
    /,
    *,
    since: str | None = None,
    count: Count = None,
    timeout: str | None = None,
    options: ListingInParty = LISTING_IN_PARTY,
) -> None:
    """Print changes as they come, until ^C. Works beside the process that writes them.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator; without it, all items of the party.
    since
        An anchor: begin with what came after it, instead of now. Every printed change has one.
    count
        End after so many changes.
    timeout
        End with status 5 when nothing came for so long: 30s, 10m.
    """
    from echostore.cli.following import follow
    from echostore.peer.streams import Stream

    output = Output.of(options)
    seen = 0
    with reading(options) as peer:
        found = find_item(peer, options, item) if item is not None else None
        party = found.party if found is not None else open_party(peer, options.party)
        wanted: ItemId | None = found.id if found is not None else None
        position = since or str(party.anchor())
        limit_s = None if timeout is None else parse_duration_s(timeout)
        Stream(party, position, item=wanted)  # a bad anchor is told now, and not after the first change
        output.note("watching; ^C ends it")
        for now in follow(peer, party.key, timeout_s=limit_s):
            stream = Stream(now, position, item=wanted)
            for message in stream:
                record = {**change_record(now, message, item=wanted), "anchor": str(stream.anchor())}
                output.row(CHANGES, record, change_line(record, with_items=wanted is None))
                seen += 1
                if count is not None and seen >= count:
                    return
            position = str(stream.anchor())


def item_fields(item: "Item") -> dict[str, Any]:
    """Everything about one item."""
    record = item._record()
    parent = item.parent
    fields: dict[str, Any] = {
        "item": item_id(item),
        "party": item.party.key.hex(),
        "locator": item.locator,
        "model": item.model,
        "model_version": item.version,
        "type": item.type,
        "name": item.name,
        "parent": item_id(parent) if parent is not None else None,
        "deleted": item.deleted,
    }
    genesis = record.genesis
    if genesis.source is not None:
        fields |= {"source": _end(genesis.source), "target": _end(genesis.target), "dangling": item.dangling}
    try:
        fields["value"] = to_json(item.value())
        fields["failed"] = None
    except ModelFailed as error:
        fields["value"] = None
        fields["failed"] = error.what
    return fields


def _end(item: Any) -> str | None:
    from echostore.kernel.ids import item_text

    return None if item is None else item_text(item)


def _lines(fields: dict[str, Any], item: "Item") -> list[str]:
    head = f"{fields['type'] or fields['model']} {short(fields['item'])}"
    named = f" {one_line(fields['name'])!r}" if fields["name"] else ""
    lines = [head + named + (" (deleted)" if fields["deleted"] else "")]
    if fields["failed"]:
        return [*lines, f"  its model failed: {fields['failed']}"]
    value = item.value()
    if isinstance(value, dict):
        width = max((len(one_line(key)) for key in value), default=0)
        lines += [f"  {one_line(key):<{width}}  {one_line(shown(value[key]))}" for key in value]
    elif isinstance(value, list) and item.model == "threaded-log":
        lines += [f"  {one_line(shown(post['body']))}" for post in value]
    elif isinstance(value, list):
        lines += [f"  {at}  {one_line(shown(element))}" for at, element in enumerate(value)]
    else:
        lines.append(f"  {one_line(compact(fields['value']))}")
    return lines


def _walk(value: Any, steps: tuple[str, ...]) -> Any:
    for at, step in enumerate(steps):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.lstrip("-").isdigit() and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        else:
            raise NotFound(f"the item has nothing at {'.'.join(steps[: at + 1])!r}")
    return value


for _verb in (item_write.create, item_write.append, item_write.delete, item_write.restore, item_write.move):
    app.command(_verb, help_prologue=examples(*item_write.EXAMPLES[_verb.__name__]))
app.command(item_write.set_, name="set", help_prologue=examples(*item_write.EXAMPLES["set"]))
