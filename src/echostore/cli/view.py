"""`echostore view`: items that applications find by class."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from echostore.cli.opening import find_item, item_id, open_party, reading, writing
from echostore.cli.options import IN_PARTY, LISTING_IN_PARTY, InParty, ListingInParty, Name, examples
from echostore.cli.output import Column, Form, Output
from echostore.cli.tree import draw, nodes
from echostore.cli.values import one_line, short, to_json
from echostore.kernel.errors import UsageError
from echostore.kernel.ids import KEY_BYTES, item_from_text, item_text
from echostore.kernel.values import parse_locator

app = App(
    name="view",
    help="Views: items that applications find by class.",
    help_prologue=examples("echostore view list", "echostore view open @Planner"),
)

VIEWS = (
    Column("item", "VIEW", short, style="cyan"),
    Column("view_class", "CLASS"),
    Column("display_name", "NAME"),
    Column("locator", "LOCATOR"),
)


@app.command(
    name="list", help_prologue=examples("echostore view list", "echostore view list example.org/planner --json")
)
def list_views(view_class: str | None = None, /, *, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the views of a party.

    Parameters
    ----------
    view_class
        Only views of this class.
    """
    output = Output.of(options)
    with reading(options) as peer:
        party = open_party(peer, options.party)
        records = [_fields(view) for view in party.views(view_class)]
    output.table("views", VIEWS, records, empty="no view here", party=party.key.hex())


@app.command(
    name="open",
    help_prologue=examples(
        "echostore view open @Planner", "echostore view open echo://1f3a.../9c02... --from 192.0.2.7:4711"
    ),
)
def open_view(
    view: Name,
    /,
    *,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    options: InParty = IN_PARTY,
) -> None:
    """Show a view: its class, its values, and the items in it.

    Parameters
    ----------
    view
        Locator, inception key, id, unique prefix or @name.
    from_
        Address (host:port) of a member. The view is read from the party's newest epoch there, and nothing else of the
        party has to be here; `view` is a locator then.
    """
    output = Output.of(options)
    if from_ is not None:
        _open_from(view, from_, options, output)
        return
    with reading(options) as peer:
        found = find_item(peer, options, view)
        if not found._record().genesis.inception_key:
            raise UsageError(
                f"{short(item_id(found))} is not a view", next_step="`echostore view list` shows the views."
            )
        fields = _fields(found)
        fields["value"] = to_json(found.value())
        rows = list(nodes(found.party, found))
        if output.form is Form.TEXT:
            lines = [f"{fields['view_class']}  {one_line(fields['display_name'])}", fields["locator"]]
            output.document({}, [*lines, *draw(iter(rows), title=None)])
        else:
            output.document({**fields, "items": [row["item"] for row in rows]})


def _open_from(view: str, address: str, options: InParty, output: Output) -> None:
    """The view as the newest epoch has it, with the few blobs that it takes."""
    with writing(options) as peer:
        key, name = parse_locator(view)
        party = peer.party(key)
        peer.connect(address)
        wanted = bytes.fromhex(name) if len(name) == 2 * KEY_BYTES else item_from_text(name)
        reader = peer.network.bootstraps.early(party)
        records = list(reader.view(wanted).values())
        top = records[0]
        values = top.values()
        fields = {
            "item": item_text(top.item),
            "inception_key": top.genesis.inception_key.hex(),
            "view_class": values.get("view_class"),
            "display_name": values.get("display_name"),
            "locator": view,
            "epoch": reader.base.name.number,
            "value": to_json(values),
            "items": [item_text(record.item) for record in records],
        }
        lines = [f"{fields['view_class']}  {one_line(fields['display_name'])}", view]
        lines += [
            f"{short(item_text(record.item))}  {record.genesis.type or record.genesis.model}" for record in records
        ]
        output.document(fields, [*lines, f"as of epoch {fields['epoch']}"])


def _fields(view: Any) -> dict[str, Any]:
    return {
        "item": item_id(view),
        "inception_key": view._record().genesis.inception_key.hex(),
        "view_class": view.get("view_class"),
        "display_name": view.get("display_name"),
        "locator": view.locator,
    }
