"""`echostore view`: items that applications find by class."""

from typing import Any

from cyclopts import App

from echostore.cli.opening import find_item, item_id, open_party, reading
from echostore.cli.options import IN_PARTY, LISTING_IN_PARTY, InParty, ListingInParty, Name, examples
from echostore.cli.output import Column, Form, Output
from echostore.cli.tree import draw, nodes
from echostore.cli.values import one_line, short, to_json
from echostore.kernel.errors import UsageError

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
    name="open", help_prologue=examples("echostore view open @Planner", "echostore view open echo://1f3a.../9c02...")
)
def open_view(view: Name, /, *, options: InParty = IN_PARTY) -> None:
    """Show a view: its class, its values, and the items in it.

    Parameters
    ----------
    view
        Locator, inception key, id, unique prefix or @name.
    """
    output = Output.of(options)
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


def _fields(view: Any) -> dict[str, Any]:
    return {
        "item": item_id(view),
        "inception_key": view._record().genesis.inception_key.hex(),
        "view_class": view.get("view_class"),
        "display_name": view.get("display_name"),
        "locator": view.locator,
    }
