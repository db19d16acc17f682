"""`echostore query`: find items by type and values."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from echostore.cli.moments import parse_moment
from echostore.cli.opening import item_id, item_in, open_party, reading
from echostore.cli.options import FLAG, LISTING_IN_PARTY, Count, ListingInParty, examples
from echostore.cli.output import Column, Form, Output
from echostore.cli.values import looks_like_json, parse_value, short, shown_json, to_json, untagged
from echostore.kernel.errors import UsageError

if TYPE_CHECKING:
    from echostore.kernel.query.filters import Filter
    from echostore.peer.peer import Peer

app = App(
    name="query",
    help_prologue=examples(
        "echostore query --type task --where done=false --where 'priority>=3' --order -due --limit 5",
        "echostore query --where 'tags contains red' --select title,due --csv",
    ),
)

SYMBOLS = {"=": "eq", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
WORDS = ("in", "contains", "startswith", "exists", "missing")

_SYMBOL = re.compile(r"(?P<field>[^=!<>]+?)\s*(?P<sign>==|!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
_WORD = re.compile(rf"(?P<field>\S+)\s+(?P<word>{'|'.join(WORDS)})(?:\s+(?P<value>.*))?", re.DOTALL)

NEXT_STEP = (
    "A condition reads FIELD=VALUE (also != < <= > >=), 'FIELD contains VALUE', 'FIELD in [1,2]' or 'FIELD missing'; "
    "a field is a property, a.b inside one, or @type, @model, @parent, @created."
)

_MANY = Parameter(consume_multiple=False, allow_leading_hyphen=True)


@app.default
def query(
    *,
    type: str | None = None,
    where: Annotated[tuple[str, ...], _MANY] = (),
    under: str | None = None,
    order: Annotated[tuple[str, ...], _MANY] = (),
    limit: Count = None,
    select: str | None = None,
    deleted: Literal["hide", "show", "only"] = "hide",
    count: Annotated[bool, FLAG] = False,
    explain: Annotated[bool, FLAG] = False,
    all_parties: Annotated[bool, FLAG] = False,
    options: ListingInParty = LISTING_IN_PARTY,
) -> None:
    """Find items by type and values.

    Parameters
    ----------
    type
        Items of this type.
    where
        A condition: FIELD=VALUE, also != < <= > >=, or "FIELD contains VALUE", "FIELD startswith TEXT",
        "FIELD in [1,2]", "FIELD exists", "FIELD missing". All given conditions have to hold. A field is a property,
        a.b inside one, or @type, @model, @parent, @created of the item itself. @created is compared with a time: 2d
        (ago), 2026-05-01.
    under
        Items whose home is this item.
    order
        A field to sort by; -FIELD sorts downwards. May be given several times.
    limit
        Only the first so many.
    select
        Fields to show, with commas between.
    deleted
        Whether deleted items are left out, shown too, or shown alone.
    count
        Only tell how many there are.
    explain
        Tell how the query is answered.
    all_parties
        Ask all active parties.
    """
    output = Output.of(options)
    fields = [_check_field(name.strip()) for name in select.split(",")] if select is not None else None
    with reading(options) as peer:
        asked = _start(peer, options, all_parties)
        if type is not None:
            asked = asked.where(type=type)
        if under is not None:
            asked = asked.where(parent=item_in(open_party(peer, options.party), under))
        asked = asked.where(*[parse_condition(text) for text in where]).deleted(deleted)
        asked = asked.order_by(*[_order(text) for text in order]) if order else asked
        asked = asked.limit(limit) if limit is not None else asked
        found = 0
        if explain:
            text = asked.explain()
            output.document({"explain": text.splitlines()}, text)
        elif count:
            found = asked.count()
            output.document({"count": found}, str(found))
        else:
            found = _show(output, asked, fields)
        if not explain and not found:
            for doubt in asked.doubts():
                output.warn(doubt)


def _start(peer: "Peer", options: ListingInParty, all_parties: bool) -> Any:
    if all_parties:
        if options.party is not None:
            raise UsageError("--party and --all-parties can't be given together")
        return peer.query()
    return open_party(peer, options.party).query()


def _order(text: str) -> str:
    if text.startswith("--"):
        raise UsageError(f"--order wants a field, not {text}")
    _check_field(text.removeprefix("-"))
    return text


def _check_field(text: str) -> str:
    from echostore.kernel.query.fields import parse_field

    with _explained(text):
        parse_field(text)
    return text


def parse_condition(text: str) -> "Filter":
    """A condition as typed."""
    text = text.strip()
    # Words first: in `title contains a=b` the sign belongs to the value.
    found = _WORD.fullmatch(text)
    if found:
        word, value = found["word"], found["value"]
        if word in ("exists", "missing"):
            if value:
                raise UsageError(f"{text!r}: {word} takes no value", next_step=NEXT_STEP)
            return _compared(text, found["field"], "exists", word == "exists")
        if value is None:
            raise UsageError(f"{text!r}: {word} wants a value", next_step=NEXT_STEP)
        return _compared(text, found["field"], word, value)
    found = _SYMBOL.fullmatch(text)
    if not found:
        raise UsageError(f"{text!r} is not a condition", next_step=NEXT_STEP)
    name, sign, value = found["field"].strip(), found["sign"], found["value"]
    if not value.strip():
        raise UsageError(
            f"{text!r}: {sign} wants a value",
            next_step=f"""Write '{name}{sign}""' for the empty text, '{name} missing' for no value at all.""",
        )
    if value[0] in "=<>":
        raise UsageError(
            f"{text!r}: {sign}{value[0]} is not a comparison",
            next_step=f"""Comparisons are {" ".join(SYMBOLS)}. A text that begins with such a sign is written in quotes: """
            f"""'{name}="{value[0]}..."'.""",
        )
    return _compared(text, name, SYMBOLS[sign], value.strip())


def _compared(text: str, name: str, op: str, value: str | bool) -> "Filter":
    from echostore.kernel.query.expressions import compare
    from echostore.kernel.query.fields import CREATED, parse_field

    with _explained(text):
        place = parse_field(name)
        if isinstance(value, bool):
            return compare(place, op, value)
        if place == CREATED and not looks_like_json(value) and value != "null":
            return compare(place, op, parse_moment(value))
        return compare(place, op, parse_value(value))


@contextmanager
def _explained(text: str) -> Iterator[None]:
    """Say what is wrong with something typed in the words of the command line, not in those of the Python API."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{text[:60]!r}: {error.what}", next_step=NEXT_STEP) from None


def _show(output: Output, asked: Any, fields: list[str] | None) -> int:
    if fields is not None:
        records = [
            {
                "item": str(row["@item"]),
                "type": row["@type"],
                "values": {name: to_json(row[name]) for name in fields},
            }
            for row in asked.select("@item", "@type", *fields).rows()
        ]
        names, head = fields, [Column("item", "ITEM", short, style="cyan")]
    else:
        records = list(_whole(asked))
        names = sorted({key for record in records for key in record["values"]})
        head = [Column("item", "ITEM", short, style="cyan"), Column("type", "TYPE")]
    if output.form in (Form.TEXT, Form.CSV):
        # Columns by number: a property may be called `item` too.
        columns = [*head, *(Column(str(at), name, shown_json) for at, name in enumerate(names))]
        cell = untagged if output.form is Form.CSV else _as_it_is
        records = [
            {**record, **{str(at): cell(record["values"].get(name)) for at, name in enumerate(names)}}
            for record in records
        ]
    else:
        columns = head
    output.table("items", columns, records, empty="no item matches")
    return len(records)


def _as_it_is(document: Any) -> Any:
    return document


def _whole(asked: Any) -> Iterator[dict[str, Any]]:
    """Whole items: properties of a property-set, of any other model its value under `value`."""
    for item in asked.all():
        value = item.value()
        values = value if isinstance(value, dict) else {"value": value}
        yield {
            "item": item_id(item),
            "type": item.type,
            "values": {key: to_json(element) for key, element in values.items()},
        }
