"""What writes items: the verbs create, set, append, delete, restore and move of `echostore item`.

Each command is one message: all of it is delivered together and undone together, or nothing of it happened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from echostore.cli.opening import (
    find_item,
    from_dash,
    item_id,
    item_in,
    open_party,
    read_ahead,
    read_input,
    reading,
    writing,
    wrote,
)
from echostore.cli.options import FLAG, IN_PARTY, YES, Content, InParty, Name
from echostore.cli.options import content as checked
from echostore.cli.output import Output, counted
from echostore.cli.values import (
    looks_like_json,
    one_line,
    parse_assignment,
    parse_document,
    parse_path,
    parse_value,
    short,
)
from echostore.kernel.errors import NotFound, UsageError

if TYPE_CHECKING:
    from echostore.kernel.values import Value
    from echostore.peer.items import Item

EXAMPLES = {
    "create": (
        "echostore item create property-set --type task title=Tickets done=false",
        'echostore item create text "book early" --parent 69e5962b',
    ),
    "set": ("echostore item set 69e5962b done=true address.city=Rome", "echostore item set 69e5962b - < values.json"),
    "append": ('echostore item append 7c01aa35 "and another line"', "echostore item append @tasks 1 2 '{\"a\":3}'"),
    "delete": ("echostore item delete 69e5962b --dry-run", "echostore item delete @Summer --yes"),
    "restore": ("echostore item restore 69e5962b", "echostore item restore 69e5962b --json"),
    "move": ("echostore item move 69e5962b @Summer", "echostore item move 69e5962b /"),
}

TOP = "/"
"""How the place below the party's system item is written."""


def create(
    model: str,
    /,
    *content: Content,
    type: str = "",
    parent: str | None = None,
    name: str = "",
    options: InParty = IN_PARTY,
) -> None:
    """Make an item.

    Parameters
    ----------
    model
        property-set, growable-array, text or threaded-log.
    content
        Of a property-set KEY=VALUE pairs, of a list its values, of a text its text, of a log its posts; - reads it.
    type
        What kind of thing it is: task, note.
    parent
        Where it hangs: id, unique prefix or @name; without it, at the top.
    name
        Its display name.
    """
    output = Output.of(options)
    read_ahead(content)
    with writing(options) as peer:
        party = open_party(peer, options.party)
        above = item_in(party, parent) if parent is not None else None
        given = checked(content)
        with party.batch():
            made: Item = party.create(model, type=type, parent=above)
            if name:
                made.name = name
            if given:
                _fill(output, made, given)
        _wrote(output, made, model=made.model, type=made.type, locator=made.locator)


def set_(
    item: Name,
    /,
    *values: Content,
    unset: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    name: str | None = None,
    options: InParty = IN_PARTY,
) -> None:
    """Set properties of an item, all in one message.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    values
        KEY=VALUE: the value is JSON if it is JSON, else text; - reads a JSON object of keys and values.
    unset
        A property to remove; may be given several times.
    name
        Its new display name.
    """
    output = Output.of(options)
    if not values and not unset and name is None:
        raise UsageError("there is nothing to set", next_step="Write KEY=VALUE.")
    read_ahead(values)
    with _item_to_write(options, item) as found:
        with found.party.batch():
            if values or unset:
                _set_properties(output, found, checked(values), unset)
            if name is not None:
                found.name = name
        _wrote(output, found, set=len(values) + len(unset) + (name is not None))


def append(
    item: Name,
    /,
    *content: Content,
    options: InParty = IN_PARTY,
) -> None:
    """Append to a list (values), a text (text) or a log (posts).

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    content
        What to append, each as one value, line or post; - reads it from standard input.
    """
    output = Output.of(options)
    if not content:
        raise UsageError("there is nothing to append")
    read_ahead(content)
    with _item_to_write(options, item) as found:
        if found.model == "property-set":
            raise UsageError("a property-set has no end to append to", next_step="Use `echostore item set`.")
        with found.party.batch():
            _fill(output, found, checked(content))
        _wrote(output, found, appended=len(content))


def delete(
    item: Name,
    /,
    *,
    dry_run: Annotated[bool, FLAG] = False,
    yes: Annotated[bool, YES] = False,
    options: InParty = IN_PARTY,
) -> None:
    """Delete an item and all that hangs below it, for every member. `item restore` brings it back.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    dry_run
        Only tell what would be deleted.
    yes
        Do it without asking; needed where nobody can be asked.
    """
    output = Output.of(options)
    text = from_dash(item)
    with reading(options) as peer:
        found = find_item(peer, options, text)
        if found == found.party.system_item:
            raise UsageError("this is the party's system item, the root of all others")
        fields: dict[str, Any] = {
            "item": item_id(found),
            "items": _size_of_closure(found),
            "was_deleted": found.deleted,
        }
        label = found.locator
    output.note(f"this deletes {counted(fields['items'], 'item')}: {short(fields['item'])} and what hangs below it")
    output.note("they can be restored until an epoch discards them")
    if dry_run:
        output.document({**fields, "deleted": False}, f"would delete {counted(fields['items'], 'item')}")
        return
    if not output.confirm(f"Delete {short(fields['item'])}?", yes=yes):
        output.document({**fields, "deleted": False}, "nothing deleted")
        return
    with _item_to_write(options, label) as again:
        again.delete()
        wrote(output, again.party, {**fields, "deleted": True}, f"deleted {counted(fields['items'], 'item')}")


def restore(item: Name, /, *, options: InParty = IN_PARTY) -> None:
    """Bring a deleted item back, with all that hangs below it.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    """
    output = Output.of(options)
    with _item_to_write(options, item) as found:
        found.restore()
        _wrote(output, found, deleted=found.deleted)


def move(item: Name, parent: str, /, *, options: InParty = IN_PARTY) -> None:
    """Give an item another home.

    Parameters
    ----------
    item
        Id, unique prefix, @name or locator.
    parent
        The new home: id, unique prefix or @name, or / for the top.
    """
    output = Output.of(options)
    with _item_to_write(options, item) as found:
        found.move(None if parent == TOP else item_in(found.party, parent))
        above = found.parent
        _wrote(output, found, parent=item_id(above) if above is not None else None)


@contextmanager
def _item_to_write(options: InParty, name: str) -> "Iterator[Item]":
    with writing(options) as peer:
        yield find_item(peer, options, name)


def _wrote(output: Output, item: "Item", **fields: Any) -> None:
    """Make a write durable and name the item that it was about."""
    text = item_id(item)
    wrote(output, item.party, {"item": text, **fields}, short(text))


# content


def _fill(output: Output, item: "Item", content: tuple[str, ...]) -> None:
    """Put what was typed into an item, in the way of its model."""
    from echostore.peer.item_kinds import ArrayItem, LogItem, PropertySetItem, TextItem

    if isinstance(item, PropertySetItem):
        _set_properties(output, item, content, ())
    elif isinstance(item, ArrayItem):
        item.append(*[_value(output, each) for each in content])
    elif isinstance(item, TextItem):
        for each in content:
            item.append(read_input() if each == "-" else each)
    elif isinstance(item, LogItem):
        for each in content:
            item.post(_value(output, each))
    else:
        raise UsageError(f"the model {item.model} takes no content from the command line")


def _set_properties(output: Output, item: "Item", values: tuple[str, ...], unset: tuple[str, ...]) -> None:
    from echostore.peer.item_kinds import PropertySetItem

    if not isinstance(item, PropertySetItem):
        raise UsageError(f"a {item.model} has no properties", next_step="Use `echostore item append`.")
    for each in values:
        if each == "-":
            for key, value in _object_from_input().items():
                item[key] = value
        else:
            path, value = parse_assignment(each)
            _warn_of_text(output, each.partition("=")[2], value)
            item[path] = value
    for each in unset:
        path = parse_path(each)
        if path not in item:
            raise NotFound(f"the item has nothing at {each!r}")
        del item[path]


def _object_from_input() -> "dict[str, Value]":
    document = parse_document(read_input(), "standard input")
    if not isinstance(document, dict):
        raise UsageError("standard input is not a JSON object", next_step='Write {"key": value, ...}.')
    return document


def _value(output: Output, text: str) -> "Value":
    if text == "-":
        return parse_value(read_input().rstrip("\n"))
    value = parse_value(text)
    _warn_of_text(output, text, value)
    return value


def _warn_of_text(output: Output, text: str, value: "Value") -> None:
    if isinstance(value, str) and value == text and looks_like_json(text):
        output.warn(f"{one_line(text, 40)} is not JSON and is stored as text")


def _size_of_closure(item: "Item") -> int:
    waiting, count = [item], 0
    while waiting:
        count += 1
        waiting.extend(waiting.pop().children())
    return count
